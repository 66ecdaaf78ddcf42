"""The form in which a call reaches hand-written kernels: arrays, and two small programs that say what is made
of them.

`lower` knows no library: it turns the masks and biases of a call into steps whose meaning
csrc/attention/problem.h defines, and says how each native operand is computed from operands of the call.
Kernels that can trace a user's function get it as a step of its own.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._op import Call, axis_sizes
from probjax.attention import biases, masks
from probjax.attention._function import TILE, as_band, looks_at, on_host, tile_table
from probjax.attention._mask import Mask, _And, _Not, _Or, offset
from probjax.attention._scalar import NotElementwise, own_derivative, trace
from probjax.attention._scalar import looks_at as looks_at_argument
from probjax.attention._terms import Tile, over_tile
from probjax.attention.spec import KEY, QUERY, VALUE, AttentionSpec, accumulator

Array = jax.Array

MASK_ENTRIES = 2**26
"""Most entries of a mask function that is evaluated as a whole array."""

MASK_DEPTH = 16
"""The stack on which the kernels evaluate a mask; `kMaskDepth` of csrc/attention/problem.h."""

NO_BOUND = 2**40
"""Stands for a band without a bound on one side: more than any distance."""


class MaskOp(enum.IntEnum):
    """`MaskOp` of csrc/attention/problem.h."""

    ALL_OF = 0
    ANY_OF = 1
    NONE_OF = 2
    BAND = 3
    BLOCK = 4
    PREFIX = 5
    SEGMENTS = 6
    KEY_LENGTHS = 7
    QUERY_LENGTHS = 8
    DENSE = 9
    TABLE = 10
    FUNCTION = 11  # only for kernels that trace functions


class ScoreOp(enum.IntEnum):
    """`ScoreOp` of csrc/attention/problem.h."""

    ADD_DENSE = 0
    ADD_DIAGONAL = 1
    MULTIPLY = 2
    SOFT_CAP = 3
    FUNCTION = 4  # only for kernels that trace functions


class Unsupported(Exception):
    """The native kernels have no form for a call; the text says why."""


@dataclass(frozen=True)
class Function:
    """A user's function, and the native operands that it reads: those of its arrays, then the batch and head
    indices.
    """

    fn: Callable
    arrays: tuple[int, ...]
    batch_index: int
    head_index: int


@dataclass(frozen=True)
class MaskStep:
    op: MaskOp
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    function: Function | None = None


@dataclass(frozen=True)
class ScoreStep:
    op: ScoreOp
    operand: int = -1
    constant: float = 0.0
    function: Function | None = None


@dataclass(frozen=True)
class Source:
    """A native operand: a function of the call's operands at the positions `reads`."""

    reads: tuple[int, ...]
    make: Callable[..., Array]

    def of(self, operands: Sequence[Array]) -> Array:
        return self.make(*(operands[i] for i in self.reads))


@dataclass(frozen=True)
class Dropout:
    words: int
    batch_index: int
    head_index: int
    threshold: int
    everything: bool
    scale: float


@dataclass
class Program:
    """What the kernels are told. `owner` is the native operand that carries the derivative of an operand of
    the call.
    """

    sources: list[Source] = field(default_factory=list)
    mask: tuple[MaskStep, ...] = ()
    score: list[ScoreStep] = field(default_factory=list)
    sinks: int = -1
    dropout: Dropout | None = None
    owner: dict[int, int] = field(default_factory=dict)

    def arrays(self, operands: Sequence[Array]) -> list[Array]:
        return [source.of(operands) for source in self.sources]


def lower(call: Call, arrays: Sequence[Any], functions: bool = False) -> Program:
    """The program of a call. Of `arrays`, its operands, only shapes and dtypes matter.

    Args:
      call: the call.
      arrays: its operands.
      functions: whether the kernels can trace a user's function.

    Raises:
      Unsupported: the kernels have no form for it.
    """
    return _Lowering(call, arrays, functions).program


@dataclass(frozen=True)
class _Leaf:
    """Stands for an operand inside a mask or bias."""

    position: int
    shape: tuple[int, ...]
    dtype: Any


Steps = tuple[MaskStep, ...]
EVERYTHING: Steps = ()
NOTHING: Steps = (MaskStep(MaskOp.BAND, 1, 0),)


def stack_depth(steps: Steps) -> int:
    """Most values that a postfix program holds at a time."""
    height = most = 0
    for step in steps:
        height += {MaskOp.ALL_OF: -1, MaskOp.ANY_OF: -1, MaskOp.NONE_OF: 0}.get(step.op, 1)
        most = max(most, height)
    return most


class _Lowering:
    def __init__(self, call: Call, arrays: Sequence[Any], functions: bool):
        self.call = call
        self.functions = functions
        spec: AttentionSpec = call.spec
        self.spec = spec
        self.batch_ndim = call.batch_ndim(arrays)
        sizes = axis_sizes(call, arrays)
        self.T, self.S, self.N = sizes["T"], sizes["S"], sizes["N"]
        self.acc = accumulator(arrays[QUERY].dtype)
        self.program = Program()
        self.leaves = [_Leaf(i, x.shape, x.dtype) for i, x in enumerate(arrays)]

        for i in (QUERY, KEY, VALUE):
            self.moving(i, lambda x: x)
        if spec.scale_at is not None:
            self.score(ScoreOp.MULTIPLY, self.moving(spec.scale_at, lambda x: self.wide(x[..., None])))
        bias = spec.bias_of(self.leaves)
        if bias is not None:
            self.bias(bias)
        mask = spec.mask_of(self.leaves)
        if mask is not None:
            self.program.mask = self.mask(mask, negated=False)
            if stack_depth(self.program.mask) > MASK_DEPTH:
                raise Unsupported(f"a mask nested so that it needs a stack of more than {MASK_DEPTH}")
        if spec.sinks_at is not None:
            self.program.sinks = self.moving(spec.sinks_at, self.wide)
        if spec.dropout_at is not None:
            self.program.dropout = self.dropout(spec.dropout_at, spec.dropout_rate)

    def wide(self, x: Array) -> Array:
        return x.astype(self.acc)

    def fixed(self, make: Callable[..., Array], *reads: int) -> int:
        """Adds a native operand through which no derivative flows; returns its position."""
        self.program.sources.append(Source(reads, make))
        return len(self.program.sources) - 1

    def moving(self, position: int, make: Callable[[Array], Array]) -> int:
        """Adds the native operand that an operand of the call moves."""
        self.program.owner[position] = self.fixed(make, position)
        return self.program.owner[position]

    def dropout(self, words_at: int, rate: float) -> Dropout:
        index = self.spec.index_at
        assert index is not None  # `prepare` gives indices to every call with dropout
        return Dropout(
            words=self.fixed(lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), words_at),
            batch_index=self.fixed(lambda x: x.astype(jnp.int32), index),
            head_index=self.fixed(lambda x: x.astype(jnp.int32), index + 1),
            threshold=min(int(rate * 2.0**32), 2**32 - 1),
            everything=rate >= 1.0,
            scale=1.0 / (1.0 - rate) if rate < 1.0 else 0.0,
        )

    # ------------------------------------------------------------------------------------------------------
    # Scores

    def score(self, op: ScoreOp, operand: int = -1, constant: float = 0.0) -> None:
        self.program.score.append(ScoreStep(op, operand, constant))

    def bias(self, bias: Any) -> None:
        match bias:
            case biases._Chain(first, second):
                self.bias(first)
                self.bias(second)
            case biases.Dense(leaf):
                kept = jnp.dtype(leaf.dtype).name in ("float64", "float32", "bfloat16", "float16")
                self.score(
                    ScoreOp.ADD_DENSE, self.moving(leaf.position, (lambda x: x) if kept else self.wide)
                )
            case biases.ALiBi(leaf):
                self.score(ScoreOp.ADD_DIAGONAL, self.moving(leaf.position, self.alibi))
            case biases.RelativePosition(leaf):
                self.score(ScoreOp.ADD_DIAGONAL, self.moving(leaf.position, lambda x: self.relative(bias, x)))
            case biases.HeadScale(leaf):
                self.score(ScoreOp.MULTIPLY, self.moving(leaf.position, self.wide))
            case biases.SoftCap(float(value)):
                self.score(ScoreOp.SOFT_CAP, constant=value)
            case biases.SoftCap(leaf):
                self.score(ScoreOp.SOFT_CAP, self.moving(leaf.position, self.wide))
            case biases.ScoreFunction(fn, arrays) if self.functions:
                structs = self.structs(arrays)
                try:
                    own = own_derivative(trace(fn, True, structs).jaxpr)
                except NotElementwise as error:
                    raise Unsupported(f"biases.ScoreFunction with {error}") from None
                if own is not None:  # the kernels would differentiate its steps instead
                    raise Unsupported(f"biases.ScoreFunction with a derivative of its own ({own})")
                at = self.traced(fn, arrays)
                self.program.score.append(ScoreStep(ScoreOp.FUNCTION, function=at))
            case biases.ScoreFunction():
                raise Unsupported(
                    "biases.ScoreFunction is a function in JAX, which the C++ kernels cannot call"
                )
            case _:
                raise Unsupported(f"{type(bias).__name__} has no form in the C++ kernels")

    def alibi(self, slopes: Array) -> Array:
        return -self.wide(slopes)[..., None] * jnp.abs(_distances(self.T, self.S)).astype(self.acc)

    def relative(self, bias: biases.RelativePosition, table: Array) -> Array:
        buckets = _buckets(*_settings(bias), self.T, self.S, table.shape[-1])
        return self.wide(table).at[..., buckets].get(mode="promise_in_bounds")

    # ------------------------------------------------------------------------------------------------------
    # Masks. Negations are pushed down to the leaves, so that as much as possible is one conjunction, whose
    # key ranges the kernels intersect.

    def mask(self, mask: Mask, negated: bool) -> Steps:
        if isinstance(mask, _Not):
            return self.mask(mask.inner, not negated)
        if isinstance(mask, (_And, _Or)):
            every = isinstance(mask, _And) != negated
            return self.join([self.mask(m, n) for m, n in _parts(mask, negated, every)], every)
        steps = self.leaf(mask)
        return self.complement(steps) if negated else steps

    def join(self, parts: list[Steps], every: bool) -> Steps:
        absorbing, neutral = (NOTHING, EVERYTHING) if every else (EVERYTHING, NOTHING)
        if every:
            bands = [p[0] for p in parts if _is_band(p)]
            parts = [p for p in parts if not _is_band(p)]
            if bands:
                parts.insert(0, self.band(max(s.a for s in bands), min(s.b for s in bands)))
        if absorbing in parts:
            return absorbing
        parts = [p for p in parts if p != neutral]
        if not parts:
            return neutral
        join = MaskStep(MaskOp.ALL_OF if every else MaskOp.ANY_OF)
        parts.sort(key=stack_depth, reverse=True)  # the deepest first: it then has the stack to itself
        steps = parts[0]
        for part in parts[1:]:
            steps = (*steps, *part, join)
        return steps

    def complement(self, steps: Steps) -> Steps:
        if steps in (EVERYTHING, NOTHING):
            return NOTHING if steps == EVERYTHING else EVERYTHING
        if _is_band(steps):
            low, high = steps[0].a, steps[0].b
            if low == -NO_BOUND:
                return self.band(high + 1, NO_BOUND)
            if high == NO_BOUND:
                return self.band(-NO_BOUND, low - 1)
        return (*steps, MaskStep(MaskOp.NONE_OF))

    def band(self, low: int, high: int) -> Steps:
        """The pairs with low <= j - i <= high, which lies in 1 - T ... S - 1 for all of them."""
        if low > high or low > self.S - 1 or high < 1 - self.T:
            return NOTHING
        low = low if low > 1 - self.T else -NO_BOUND
        high = high if high < self.S - 1 else NO_BOUND
        return EVERYTHING if (low, high) == (-NO_BOUND, NO_BOUND) else (MaskStep(MaskOp.BAND, low, high),)

    def leaf(self, mask: Mask) -> Steps:
        T, S = self.T, self.S
        match mask:
            case masks.Causal(alignment):
                return self.band(-NO_BOUND, offset(alignment, T, S))
            case masks.SlidingWindow():
                low, high = mask._sides(T, S)
                return self.band(-NO_BOUND if low is None else low, NO_BOUND if high is None else high)
            case masks.BlockDiagonal(size):
                return EVERYTHING if size >= max(T, S) else (MaskStep(MaskOp.BLOCK, int(size)),)
            case masks.PrefixLM(leaf, alignment):
                shift = offset(alignment, T, S)
                return (MaskStep(MaskOp.PREFIX, self.fixed(_lengths, leaf.position), shift),)
            case masks.Segments():
                return self.segments(mask.query_ids, mask.key_value_ids)
            case masks.Padding(leaf) if jnp.issubdtype(leaf.dtype, jnp.bool_):
                return (MaskStep(MaskOp.DENSE, self.fixed(lambda x: x[..., None, None, :], leaf.position)),)
            case masks.Padding(leaf):
                return (MaskStep(MaskOp.KEY_LENGTHS, self.fixed(_lengths, leaf.position)),)
            case masks.QueryPadding(leaf):
                return (MaskStep(MaskOp.QUERY_LENGTHS, self.fixed(_lengths, leaf.position)),)
            case masks.Dense(leaf):
                return (MaskStep(MaskOp.DENSE, self.fixed(lambda x: x, leaf.position)),)
            case masks.MaskFunction(fn, arrays):
                return self.function(fn, arrays)
        raise Unsupported(f"{type(mask).__name__} has no form in the C++ kernels")

    def segments(self, query_ids: _Leaf, key_ids: _Leaf | None) -> Steps:
        types = [jnp.dtype(x.dtype) for x in (query_ids, key_ids or query_ids)]
        common = jnp.promote_types(*types)
        if not jnp.issubdtype(common, jnp.integer):
            raise Unsupported(f"segment ids of dtypes {types[0]} and {types[1]} have no common integer type")
        # Only equality counts, so unsigned ids keep their bits.
        wide = jnp.int64 if common.itemsize == 8 else jnp.int32
        at = [self.fixed(lambda x: x.astype(common).astype(wide), query_ids.position)]
        if key_ids is not None:
            at.append(self.fixed(lambda x: x.astype(common).astype(wide), key_ids.position))
        return (MaskStep(MaskOp.SEGMENTS, at[0], at[-1]),)

    def function(self, fn: Callable, arrays: tuple[_Leaf, ...]) -> Steps:
        """A mask function: as a table of tiles if it is known now, else as an array that XLA computes."""
        if not self.T * self.S:
            return EVERYTHING
        n = self.batch_ndim
        if self.functions:
            steps = self.traced_mask(fn, arrays)
            if steps is not None:
                return steps
        on_batch, on_head = looks_at(fn, tuple(jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x in arrays))
        if not (arrays or on_batch or on_head or self.functions):
            found = tile_table(fn, self.T, self.S)
            if found is not None:
                kinds, tiles = found
                if (kinds == kinds[0, 0]).all() and kinds[0, 0] < 2:
                    return EVERYTHING if kinds[0, 0] == 1 else NOTHING
                at = self.fixed(lambda: jnp.asarray(kinds)), self.fixed(lambda: jnp.asarray(tiles))
                return (MaskStep(MaskOp.TABLE, *at, TILE, TILE),)

        reads = [x.position for x in arrays]
        batch_at = self.spec.index_at
        assert batch_at is not None  # `prepare` gives indices to every call with a function
        if on_batch:
            reads.append(batch_at)
        lead = jnp.broadcast_shapes((1,) * n, *(self.leaves[i].shape[:n] for i in reads))
        entries = math.prod(lead) * (self.N if on_head else 1) * self.T * self.S
        if entries > MASK_ENTRIES:
            raise Unsupported(
                f"a masks.MaskFunction of arrays, batch or head is computed as an array, here of {entries} "
                f"entries, more than {MASK_ENTRIES}"
            )
        if on_head:
            reads.append(batch_at + 1)

        def evaluate(*given: Array) -> Array:
            rest = given[len(arrays) :]
            own = [len(self.call.operands[i].axes) for i in reads]
            lead = jnp.broadcast_shapes(
                *(x.shape[: x.ndim - k] for x, k in zip(given, own, strict=True)), (1,) * n
            )
            zero = jnp.zeros(1, jnp.int32)
            tile = Tile(
                batch=_flat(rest[0], 0, lead) if on_batch else zero,
                head=rest[-1].reshape(-1) if on_head else zero,
                query=jnp.arange(self.T, dtype=jnp.int32),
                key=jnp.arange(self.S, dtype=jnp.int32),
                query_length=self.T,
                key_length=self.S,
                heads=self.N,
                kv_heads=self.N,
            )
            parts = tuple(_flat(x, k, lead) for x, k in zip(given[: len(arrays)], own, strict=False))
            seen = over_tile(fn, tile, parts).astype(bool)
            return seen.reshape(*lead, *seen.shape[1:])

        return (MaskStep(MaskOp.DENSE, self.fixed(evaluate, *reads)),)

    def structs(self, arrays: tuple[_Leaf, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a function's arrays look like to it: without batch axes."""
        return tuple(jax.ShapeDtypeStruct(x.shape[self.batch_ndim :], x.dtype) for x in arrays)

    def traced(self, fn: Callable, arrays: tuple[_Leaf, ...]) -> Function:
        index = self.spec.index_at
        assert index is not None  # `prepare` gives indices to every call with a function
        at = []
        for leaf in arrays:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                at.append(self.moving(leaf.position, lambda x: x))
            else:
                at.append(self.fixed(lambda x: x, leaf.position))
        batch = self.fixed(lambda x: x.astype(jnp.int32), index)
        return Function(fn, tuple(at), batch, self.fixed(lambda x: x.astype(jnp.int32), index + 1))

    def traced_mask(self, fn: Callable, arrays: tuple[_Leaf, ...]) -> Steps | None:
        """A mask function as a step that the kernels evaluate; None where they cannot."""
        structs = self.structs(arrays)
        try:
            closed = trace(fn, False, structs)
        except NotElementwise:
            return None
        if not (arrays or looks_at_argument(closed, 0) or looks_at_argument(closed, 1)):
            band = as_band(fn, self.T, self.S)
            if band is not None:
                return self.band(*band)
        return (MaskStep(MaskOp.FUNCTION, function=self.traced(fn, arrays)),)


def _parts(mask: Mask, negated: bool, every: bool) -> Iterator[tuple[Mask, bool]]:
    """What a nest of the same connective joins, each with whether it is negated."""
    if isinstance(mask, _Not):
        yield from _parts(mask.inner, not negated, every)
    elif isinstance(mask, (_And, _Or)) and (isinstance(mask, _And) != negated) == every:
        yield from _parts(mask.left, negated, every)
        yield from _parts(mask.right, negated, every)
    else:
        yield mask, negated


def _is_band(steps: Steps) -> bool:
    return len(steps) == 1 and steps[0].op == MaskOp.BAND


def _lengths(x: Array) -> Array:
    return jnp.clip(x, 0, min(int(jnp.iinfo(x.dtype).max), 2**31 - 1)).astype(jnp.int32)


def _distances(query_length: int, key_length: int) -> np.ndarray:
    """Key minus query position along a strip: entry S - 1 - j + i is that of query i and key j."""
    return key_length - 1 - np.arange(query_length + key_length - 1, dtype=np.int32)


def _settings(bias: biases.RelativePosition) -> tuple[str, int, bool]:
    return bias.bucketing, bias.max_distance, bias.bidirectional


@functools.lru_cache(maxsize=256)
def _buckets(
    bucketing: str, max_distance: int, bidirectional: bool, query_length: int, key_length: int, count: int
) -> np.ndarray:
    """Buckets along a strip: known when a program is traced, so that a call does not compute them again."""
    bias = biases.RelativePosition(None, bucketing, max_distance, bidirectional)
    with jax.ensure_compile_time_eval(), on_host():
        return np.asarray(bias._bucket(jnp.asarray(_distances(query_length, key_length)), count))


def _flat(x: Array, own: int, lead: tuple[int, ...]) -> Array:
    """Batch axes as one: of size 1 if they all have size 1, else those of `lead`."""
    tail = x.shape[x.ndim - own :]
    if math.prod(x.shape[: x.ndim - own]) != 1:
        x = jnp.broadcast_to(x, (*lead, *tail))
    return x.reshape(-1, *tail)
