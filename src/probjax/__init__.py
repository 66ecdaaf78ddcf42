"""probjax: exact, fast attention for JAX, closed under every transformation."""

from probjax.attention import attention_plan, biases, dot_product_attention, masks

__version__ = "0.1.0"

__all__ = ["__version__", "attention_plan", "biases", "dot_product_attention", "masks"]
