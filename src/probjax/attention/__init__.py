"""Attention: one call, several implementations. See `dot_product_attention`."""

from probjax.attention import biases, masks
from probjax.attention.api import RESIDUAL_NAMES, attention_plan, dot_product_attention
from probjax.attention.dispatch import implementations
from probjax.attention.dropout import dropout_mask
from probjax.attention.plan import AttentionPlan

__all__ = [
    "RESIDUAL_NAMES",
    "AttentionPlan",
    "attention_plan",
    "biases",
    "dot_product_attention",
    "dropout_mask",
    "implementations",
    "masks",
]
