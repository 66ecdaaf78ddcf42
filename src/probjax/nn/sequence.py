"""Models of sequences: stacks over any recurrent cell or block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._cpu import dot_general, settle
from probjax.nn._module import _flag, at_least_one
from probjax.nn._stack import Stack
from probjax.nn.mlp import MLP, check_rate, dropout, fold
from probjax.recurrence._arguments import cuts

Array = jax.Array

DIRECTIONS = ("forward", "alternating", "bidirectional")


class Mixer(nnx.Module):
    """The recurrent half of a block: x + glu(gelu(cell(norm(x)))), or x + cell(norm(x)).

    `backward` is whether the (last) cell sees documents from their ends; of two cells the first does not, and
    what both give is put side by side.
    """

    def __init__(
        self,
        features: int,
        cell: Callable[..., Any],
        *,
        both: bool,
        backward: bool,
        glu: bool,
        cell_norm: bool,
        dropout_rate: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.both, self.backward, self.glu, self.twice = both, backward, glu, cell_norm
        self.dropout_rate = dropout_rate
        self.norm = nnx.LayerNorm(features, **kinds)
        if cell_norm:
            self.cell_norm = nnx.LayerNorm(features, **kinds)
        self.cell = cell(features, **kinds)
        if both:
            self.backward_cell = cell(features, **kinds)
        wide = 2 * features if both else features
        if glu:
            self.value = nnx.Linear(wide, features, dot_general=dot_general, **kinds)
            self.gate = nnx.Linear(wide, features, dot_general=dot_general, **kinds)
        elif both:
            self.merge = nnx.Linear(wide, features, dot_general=dot_general, **kinds)

    def __call__(self, x: Array, state: Any, tokens: _Tokens, key: Array | None) -> tuple[Array, Any]:
        h = self.norm(x)
        h = self.cell_norm(h) if self.twice else h
        if self.both:
            y = jnp.concatenate([tokens.forward(self.cell, h), tokens.backward(self.backward_cell, h)], -1)
        elif self.backward:
            y = tokens.backward(self.cell, h)
        elif state is None:
            y = tokens.forward(self.cell, h)
        else:
            y, state = tokens.carried(self.cell, h, state)
        if self.glu:
            y = jax.nn.gelu(y)
            y = self.value(y) * jax.nn.sigmoid(self.gate(y))
        elif self.both:
            y = self.merge(y)
        return x + dropout(y, self.dropout_rate, key), state


class FeedForward(nnx.Module):
    """The other half: x + mlp(norm(x))."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activate_final: bool,
        dropout_rate: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.dropout_rate = dropout_rate
        self.norm = nnx.LayerNorm(features, **kinds)
        self.mlp = MLP((features, hidden, features), activate_final=activate_final, **kinds)

    def __call__(self, x: Array, state: Any, tokens: _Tokens, key: Array | None) -> tuple[Array, Any]:
        return x + dropout(self.mlp(self.norm(x)), self.dropout_rate, key), state


class _Tokens:
    """What the cells are told of the tokens, in both directions."""

    def __init__(self, reset: Any, segment_ids: Any, mask: Any, lead: tuple[int, ...], single: bool = False):
        self.single = single
        self.ahead = {"reset": reset, "mask": mask}
        self.back: dict[str, Any] = {}
        if single:
            return
        self.ahead["segment_ids"] = segment_ids
        self.back = {"mask": None if mask is None else jnp.flip(mask, -1)}
        if reset is not None or segment_ids is not None:
            # From its end a document starts where from its start it ends: number the documents.
            starts, _ = cuts(reset, segment_ids, mask, lead, False)
            number = jnp.cumsum(jnp.asarray(starts), -1)
            self.back["segment_ids"] = jnp.flip(number, -1)

    def forward(self, cell: Any, x: Array) -> Array:
        return cell(x, **_given(self.ahead))

    def backward(self, cell: Any, x: Array) -> Array:
        return jnp.flip(cell(jnp.flip(x, -2), **_given(self.back)), -2)

    def carried(self, cell: Any, x: Array, state: Any) -> tuple[Array, Any]:
        if self.single:
            return cell.step(x, state, **_given(self.ahead))
        return cell(x, state=state, return_state=True, **_given(self.ahead))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if x is not None}


class SequenceModel(nnx.Module):
    """A stack of recurrent blocks: (*B, L, in_features) to (*B, L, out_features).

    Each block is a cell with a skip, then an MLP with one, both behind layer norms.

    Args:
      features: channels of the blocks.
      num_layers: number of blocks.
      cell: makes a cell: f(features, dtype=, param_dtype=, rngs=), such as `LRUCell`, `MambaBlock` or
        `functools.partial(MambaBlock, state_size=8)`, or a module of one's own with their methods.
      in_features, out_features: None, or the channels of inputs and outputs: then linear maps come first and
        last.
      direction: "forward": every token sees what is before it. "alternating": every other block runs from
        the end. "bidirectional": every block has two cells, one for each direction.
      mlp_features: hidden units of the MLP; None is 4 times `features`.
      glu: whether GELU and a gated linear unit follow the cell. For bare cells; blocks such as `MambaBlock`
        have their own gates, and want False.
      cell_norm, activate_final: a second norm right before the cell, and GELU after the MLP's last layer:
        both are of no use, but the model of the reference file has them.
      final_norm: whether a layer norm follows the last block.
      dropout_rate: of the results of cells and MLPs, where a call is given a key.
      scan_layers, remat, unroll: as in `Transformer`; cell and MLP are computed again one by one, which takes
        less memory than a block at once. "save_attention" keeps what the recurrences recorded.
      dtype: of the computation, None for what inputs and parameters are promoted to; states and decays are
        float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes that do not fit or unknown names.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import LRUCell, SequenceModel
      >>> model = SequenceModel(16, num_layers=2, cell=LRUCell, in_features=3, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((2, 10, 3))).shape
      (2, 10, 16)

      Token by token:

      >>> state = model.init_state(2)
      >>> y, state = model.step(jnp.ones((2, 3)), state)
      >>> y.shape
      (2, 16)
    """

    def __init__(
        self,
        features: int,
        num_layers: int,
        cell: Callable[..., Any],
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        direction: str = "forward",
        mlp_features: int | None = None,
        glu: bool = True,
        cell_norm: bool = False,
        activate_final: bool = False,
        final_norm: bool = True,
        dropout_rate: float = 0.0,
        scan_layers: bool = False,
        remat: str = "none",
        unroll: int = 1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features)
        if direction not in DIRECTIONS:
            raise ValueError(f"direction: got {direction!r}, want one of {', '.join(map(repr, DIRECTIONS))}")
        check_rate("dropout_rate", dropout_rate)
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        hidden = 4 * features if mlp_features is None else mlp_features
        both = direction == "bidirectional"

        def make(position: int, rngs: nnx.Rngs) -> nnx.Module:
            if position % 2:
                return FeedForward(
                    features,
                    hidden,
                    activate_final=activate_final,
                    dropout_rate=dropout_rate,
                    **kinds,
                    rngs=rngs,
                )
            return Mixer(
                features,
                cell,
                both=both,
                backward=both or position == 2,
                glu=glu,
                cell_norm=cell_norm,
                dropout_rate=dropout_rate,
                **kinds,
                rngs=rngs,
            )

        self.features, self.num_layers, self.direction = features, num_layers, direction
        self.in_features = features if in_features is None else in_features
        self.final_norm = final_norm
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = {"dot_general": dot_general, "rngs": rngs, **kinds}
        self.embed = None if in_features is None else nnx.Linear(in_features, features, **linear)
        self.stack = Stack(
            make,
            2 * num_layers,
            scan_layers=scan_layers,
            remat=remat,
            unroll=unroll,
            period=4 if direction == "alternating" else 2,
            rngs=rngs,
        )
        if final_norm:
            self.norm = nnx.LayerNorm(features, **kinds, rngs=rngs)
        self.head = None if out_features is None else nnx.Linear(features, out_features, **linear)

    def __call__(
        self,
        x: Array,
        *,
        state: Any = None,
        reset: Any = None,
        segment_ids: Any = None,
        mask: Any = None,
        return_state: bool = False,
        dropout_key: Array | None = None,
    ) -> Any:
        """Runs whole sequences, or with direction "forward" the next part of them.

        Args:
          x: (*B, L, in_features), floating.
          state: what the previous part returned; None starts afresh.
          reset: bool, broadcasts to (*B, L): a document starts at the token. No direction sees across.
          segment_ids: integers, broadcast to (*B, L): a document starts where the id differs from that of the
            valid token before.
          mask: bool, broadcasts to (*B, L): a token that is False is padding: its output is zero, and nothing
            of it, not even a NaN, reaches an output or a gradient.
          return_state: whether the state after the last token is returned too.
          dropout_key: a key draws dropout, another mask in every block; None leaves it out.

        Returns:
          y: (*B, L, out_features or features) in the dtype of the computation.
          state: only with `return_state`.

        Raises:
          ValueError: for shapes that do not fit, or a state with a direction other than "forward".
        """
        x = self._checked(x, 2, "(*B, L, in_features)")
        lead = x.shape[:-1]
        if state is not None or return_state:
            self._needs_forward("state" if state is not None else "return_state")
            state = self.init_state(lead[:-1]) if state is None else state
        tokens = _Tokens(
            _flag("reset", reset, jnp.bool_, lead, "(*B, L)"),
            _flag("segment_ids", segment_ids, jnp.integer, lead, "(*B, L)"),
            _flag("mask", mask, jnp.bool_, lead, "(*B, L)"),
            lead,
        )
        y, state = self._run(x, state, tokens, dropout_key)
        return (y, state) if return_state else y

    def step(self, x: Array, state: Any, *, reset: Any = None, mask: Any = None) -> tuple[Array, Any]:
        """Runs one token: equal to a call with L = 1.

        Args:
          x: (*B, in_features), floating.
          state: from `init_state`, a call with `return_state`, or the step before.
          reset, mask: bool, broadcast to (*B,), as in a call.

        Returns:
          y: (*B, out_features or features).
          state: the next one.
        """
        self._needs_forward("step")
        x = self._checked(x, 1, "(*B, in_features)")
        lead = x.shape[:-1]
        reset = _flag("reset", reset, jnp.bool_, lead, "(*B,)")
        tokens = _Tokens(reset, None, _flag("mask", mask, jnp.bool_, lead, "(*B,)"), lead, single=True)
        return self._run(x, state, tokens, None)

    def init_state(self, batch_shape: int | Sequence[int] = ()) -> Any:
        """The state before the first token: of every block's cell, for inputs with the leading axes
        `batch_shape`.
        """
        self._needs_forward("init_state")
        if self.num_layers == 0:
            return self.stack.gather([])
        # All cells are alike; those of a scanned stack have a leading axis, which their states do not see.
        one = self.stack.blocks[0].cell.init_state(batch_shape)
        return self.stack.gather([one, None] * self.num_layers)

    def _run(self, x: Array, state: Any, tokens: _Tokens, key: Array | None) -> tuple[Array, Any]:
        if state is not None:
            got, want = (str(jax.tree.structure(tree)) for tree in (state, self.init_state(())))
            if got != want:
                raise ValueError(
                    f"state: got {got}, want {want}, as init_state and a call with return_state make it"
                )
        mask = tokens.ahead["mask"]

        def hide(x: Array) -> Array:
            return x if mask is None else jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))

        def body(block: Any, x: Array, index: Any, held: Any) -> tuple[Array, Any]:
            return block(x, held, tokens, fold(key, index))

        x = hide(x)
        x = x if self.embed is None else self.embed(x)
        x = x.astype(jnp.promote_types(x.dtype, self.param_dtype) if self.dtype is None else self.dtype)
        x, state = self.stack(body, x, state)
        if self.final_norm:
            x = self.norm(settle(x))
        return hide(x if self.head is None else self.head(x)), state

    def _checked(self, x: Any, axes: int, wanted: str) -> Array:
        x = jnp.asarray(x)
        if x.ndim < axes or x.shape[-1] != self.in_features:
            raise ValueError(f"x: got shape {x.shape}, want {wanted} with {self.in_features} in_features")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one")
        return x

    def _needs_forward(self, name: str) -> None:
        if self.direction != "forward":
            raise ValueError(
                f'{name}: got it with direction="{self.direction}", want direction="forward": blocks that '
                "run from the end have seen all of a sequence before its first output"
            )
