"""The suite `ssm`: stacks of recurrent cells, forward and train step."""
