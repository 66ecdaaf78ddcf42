"""The attention suite: our implementations against JAX's and PyTorch's on one grid."""
