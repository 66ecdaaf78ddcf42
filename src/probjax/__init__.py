"""probjax: exact, fast attention and recurrences for JAX, closed under every transformation."""

from probjax import recurrence
from probjax.attention import attention_plan, biases, dot_product_attention, masks

__version__ = "0.1.0"

__all__ = ["__version__", "attention_plan", "biases", "dot_product_attention", "masks", "recurrence"]
