"""The suite `moe`: a mixture of experts, forward and train step, by how tokens are handed to experts."""
