"""The diffusion transformer: a transformer of noisy tokens and a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._cpu import dot_general, settle
from probjax.nn._module import at_least_one
from probjax.nn.embedding import FourierFeatures
from probjax.nn.mlp import MLP
from probjax.nn.norm import AdaptiveLayerNorm
from probjax.nn.transformer import Transformer, wants

Array = jax.Array


class DiffusionTransformer(nnx.Module):
    """A transformer conditioned on a time, for diffusion and flow models: (*B, L, in_features) and (*B,).

    The time goes through learned Fourier features and an MLP; what comes out, with a linear map of the
    condition added, scales, shifts and (with `gate`) gates every half of every block. With the defaults this
    is DiT with adaLN-Zero (arXiv:2212.09748): every block starts as the identity, and the output as zero.

    Args:
      features: channels of the blocks.
      num_layers: number of blocks.
      num_heads: query heads.
      in_features: channels of the inputs.
      out_features: of the outputs; None is `in_features`.
      time_features: channels of the time's embedding.
      num_frequencies: of the Fourier features.
      condition_features: None, or the channels of a condition beside the time, such as a class embedding or
        observed data.
      condition_hidden: hidden units of the maps from the embedding to scale and shift; None for linear ones.
      gate: see `TransformerBlock`.
      positions, max_length: as in `Transformer`.
      final_norm: whether a norm, scaled and shifted like the others, precedes the last linear map, whose
        kernel is zero at first then.
      scan_layers, remat, unroll: as in `Transformer`.
      dtype: of the computation, None for what inputs and parameters are promoted to; angles of the time are
        float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.
      **block: further arguments of `TransformerBlock`, such as `context_features`.

    Raises:
      ValueError: for sizes that do not fit or unknown names.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import DiffusionTransformer
      >>> model = DiffusionTransformer(64, num_layers=2, num_heads=8, in_features=3, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((2, 10, 3)), jnp.array([0.1, 0.9])).shape
      (2, 10, 3)
    """

    def __init__(
        self,
        features: int,
        num_layers: int,
        num_heads: int,
        *,
        in_features: int,
        out_features: int | None = None,
        time_features: int = 128,
        num_frequencies: int = 32,
        condition_features: int | None = None,
        condition_hidden: int | None = None,
        gate: bool = True,
        positions: str | None = "sinusoidal",
        max_length: int | None = None,
        final_norm: bool = True,
        scan_layers: bool = False,
        remat: str = "none",
        unroll: int = 1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **block: Any,
    ):
        at_least_one(in_features=in_features, time_features=time_features)
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.condition_features, self.final_norm = condition_features, final_norm
        out_features = in_features if out_features is None else out_features
        self.frequencies = FourierFeatures(1, num_frequencies, **kinds)
        self.time_mlp = MLP(
            (2 * num_frequencies, time_features, time_features), activation=jax.nn.silu, **kinds
        )
        if condition_features is not None:
            self.condition = nnx.Linear(condition_features, time_features, dot_general=dot_general, **kinds)
        self.transformer = Transformer(
            features,
            num_layers,
            num_heads,
            in_features=in_features,
            positions=positions,
            max_length=max_length,
            final_norm=False,
            condition_features=time_features,
            condition_hidden=condition_hidden,
            gate=gate,
            scan_layers=scan_layers,
            remat=remat,
            unroll=unroll,
            **kinds,
            **block,
        )
        init = nnx.initializers
        if final_norm:
            self.norm = AdaptiveLayerNorm(features, time_features, hidden_features=condition_hidden, **kinds)
        self.head = nnx.Linear(
            features,
            out_features,
            kernel_init=init.zeros_init() if final_norm else init.lecun_normal(),
            dot_general=dot_general,
            **kinds,
        )

    def __call__(
        self,
        x: Array,
        t: Array,
        *,
        condition: Array | None = None,
        context: Array | None = None,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        context_mask: Any = None,
        positions: Any = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Runs the model.

        Args:
          x: (*B, L, in_features), floating.
          t: (*B,) floating, or what broadcasts to that: the times.
          condition: (*B, condition_features), where the model takes one.
          context, context_mask, mask, bias, is_causal, positions, dropout_key: as in `Transformer`.

        Returns:
          (*B, L, out_features) in the dtype of the computation.

        Raises:
          ValueError: for shapes that do not fit.
        """
        x, t = jnp.asarray(x), jnp.asarray(t)
        wants(condition, "condition", self.condition_features)
        if not jnp.issubdtype(t.dtype, jnp.floating):
            raise TypeError(f"t: got dtype {t.dtype}, want a floating one")
        try:
            t = jnp.broadcast_to(t, x.shape[:-2])
        except ValueError:
            raise ValueError(
                f"t: got shape {t.shape}, want what broadcasts to (*B,) = {x.shape[:-2]}"
            ) from None
        time = self.time_mlp(self.frequencies(t[..., None]))
        if condition is not None:
            time = time + self.condition(condition)
        h = self.transformer(
            x,
            condition=time,
            context=context,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            context_mask=context_mask,
            positions=positions,
            dropout_key=dropout_key,
        )
        h = settle(h)
        return self.head(self.norm(h, time) if self.final_norm else h)
