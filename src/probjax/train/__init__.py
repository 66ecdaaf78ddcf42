"""Training: plain functions of arrays, pytrees, losses and optimizers with the two functions of optax."""

from probjax.train.step import train_step

__all__ = ["train_step"]
