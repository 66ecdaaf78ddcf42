"""The programs of a network, forward and one train step, made ready to be timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.network.program import Program, caller, compile_program
from probjax.train.step import plain_step

LEARNING_RATE = 1e-3
_FIRST_DECAY = 0.9
_SEED = 20261201


@dataclass(frozen=True)
class Network:
    """A network as a suite hands it over.

    Attributes:
      apply: f(parameters, *inputs), the output.
      parameters: a pytree of arrays.
      inputs: arrays.
    """

    apply: Callable[..., jax.Array]
    parameters: Any
    inputs: tuple[jax.Array, ...]

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.parameters))

    @property
    def leaves(self) -> int:
        """The number of arrays that hold them."""
        return len(jax.tree.leaves(self.parameters))

    @property
    def arrays(self) -> list[np.ndarray]:
        """The parameters as a list."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.parameters)]

    def tree(self, leaves: Sequence[np.ndarray]) -> Any:
        """Return such a list nested by the parameters' names."""
        from flax import nnx

        return nnx.to_pure_dict(jax.tree.unflatten(jax.tree.structure(self.parameters), leaves))


def mean_square(y: jax.Array) -> jax.Array:
    """The loss of every suite of networks."""
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def direction(index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the fixed random direction of leaf `index` of the parameters that gradients are compared in."""
    return np.random.default_rng([_SEED, index]).standard_normal(shape, np.float32)


def along(gradients: Any) -> tuple[float, float]:
    """Return the slope of the loss along `direction` by these gradients, and their norm."""
    slope = square = 0.0
    for index, leaf in enumerate(jax.tree.leaves(gradients)):
        array = np.asarray(leaf, np.float64)
        slope += float(np.vdot(array, direction(index, array.shape)))
        square += float(np.vdot(array, array))
    return slope, square**0.5


def prepare(
    impl: str,
    network: Network,
    *,
    op: str,
    variant: str | None,
    device: str,
    memory_limit: str | None,
) -> Prepared:
    """Compile one program of a network and call it once.

    Args:
      impl: the row label.
      network: the network; one of the variant `remat` was made so by the suite.
      op: ``forward``, or ``train_step``: parameters, Adam's state and loss after one step.
      variant: ``donate`` gives parameters and state to the program; the others change nothing here.
      device: ``cpu`` or ``gpu``.
      memory_limit: see `Program.require`.

    Returns:
      The row; its results are `y`, or `loss` (before the step), `finite` (of the parameters after it), and
      `slope` and `norm`, see `along`.

    Raises:
      Unavailable: without optax.
      Skipped: when it needs more memory than the limit.
    """
    if op == "forward":
        program = compile_program(network.apply, (network.parameters, *network.inputs))
        program.require(memory_limit, device)
        arguments = (network.parameters, *network.inputs)
        begin = time.perf_counter()
        y = jax.block_until_ready(program.call(*arguments))
        first = time.perf_counter() - begin
        kept = {"y": np.asarray(y.astype(jnp.float32))}
        run = caller(program.call, arguments, wait=device == "cpu")
    else:
        step, state = train_step(network)
        donate = variant == "donate"
        program = compile_program(
            step, (network.parameters, state, *network.inputs), donate=(0, 1) if donate else ()
        )
        program.require(memory_limit, device)
        # What is donated is gone after the call, and the network's own parameters serve other rows.
        carried = jax.tree.map(jnp.copy, (network.parameters, state)) if donate else None
        start = carried or (network.parameters, state)
        begin = time.perf_counter()
        *new, loss = jax.block_until_ready(program.call(*start, *network.inputs))
        first = time.perf_counter() - begin
        finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(new))
        # Adam's first moment is zero at first: after one step it is a share of the gradients.
        slope, norm = (value / (1 - _FIRST_DECAY) for value in along(new[1][0].mu))
        found = {"loss": loss, "finite": finite, "slope": slope, "norm": norm}
        kept = {name: np.asarray(value) for name, value in found.items()}
        if donate:
            run = _chained(program.call, tuple(new), network.inputs, wait=device == "cpu")
        else:
            run = caller(program.call, (*start, *network.inputs), wait=device == "cpu")
    return Prepared(
        impl,
        run,
        _columns(network, program, kept, first),
        result=lambda: kept,
        release=kept.clear,
    )


def train_step(network: Network) -> tuple[Callable[..., Any], Any]:
    """Return f(parameters, state, *inputs) -> (parameters, state, loss), one step of Adam, and its state.

    Raises:
      Unavailable: without optax.
    """
    try:
        import optax
    except ImportError as error:
        raise Unavailable(f"optax cannot be imported ({error}): install optax") from None
    optimizer = optax.adam(LEARNING_RATE, b1=_FIRST_DECAY)

    def loss_of(parameters: Any, inputs: tuple[jax.Array, ...], key: None) -> jax.Array:
        return mean_square(network.apply(parameters, *inputs))

    update = plain_step(loss_of, optimizer)

    def step(parameters: Any, state: Any, *inputs: jax.Array) -> Any:
        return update(parameters, state, inputs)[:3]

    return step, optimizer.init(network.parameters)


def _chained(
    call: Callable[..., Any], carried: tuple[Any, ...], inputs: tuple[jax.Array, ...], *, wait: bool
) -> Callable[[int], float]:
    """Return a function as `caller`'s, of a program each of whose calls takes the results of the last."""
    held = [carried]

    def run(repetitions: int) -> float:
        begin = time.perf_counter()
        for _ in range(repetitions):
            *new, loss = call(*held[0], *inputs)
            held[0] = tuple(new)
            if wait:
                jax.block_until_ready(loss)
        jax.block_until_ready(held[0])
        return time.perf_counter() - begin

    return run


def _columns(network: Network, program: Program, kept: dict[str, np.ndarray], first: float) -> dict[str, Any]:
    finite = all(bool(np.isfinite(array).all()) for array in kept.values()) and bool(kept.get("finite", True))
    return {
        "implementation": "native" if program.native else "xla",
        "params": network.count,
        "finite": finite,
        "trace_s": program.trace_s,
        "compile_s": program.compile_s,
        **program.memory,
        "first_call_s": first,
    }
