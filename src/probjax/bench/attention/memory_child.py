"""One JAX row in a fresh process, for peak memory and the largest length that fits; see `memory`.

Usage: PYTHON -m probjax.bench.attention.memory_child PARENT_PID, then one JSON object per line of input:

  {"op": "compile", "impl": LABEL, "cell": {...}}    compiles without any array, then calls a tiny program
  {"op": "inputs"}                                   makes the arrays
  {"op": "run"}                                      calls the program once
"""

import json
import os
import sys
from typing import Any

from probjax.bench.attention.torch_child import die_with_parent, give_back_memory


class Server:
    """One compiled case and the operations on it."""

    def compile(self, impl: str, cell: dict[str, Any]) -> None:
        """Compile from shapes: the arrays come later, so that the limit and the baseline go in between."""
        import jax
        import jax.numpy as jnp

        from probjax.bench.attention.cells import AttentionCell
        from probjax.bench.attention.jax_rows import shapes, step
        from probjax.bench.attention.rows import ROWS

        jax.config.update("jax_platforms", "cpu")
        self._cell = AttentionCell(**cell)
        attention, _ = ROWS[impl](self._cell)
        self._compiled = jax.jit(step(self._cell, attention)).lower(*shapes(self._cell)).compile()
        # Starts the thread pool, whose stacks are no part of the measured call.
        jax.block_until_ready(jnp.ones((256, 256)) @ jnp.ones((256, 256)))
        give_back_memory()

    def inputs(self) -> None:
        """Make the arrays."""
        from probjax.bench.attention.cells import make_inputs
        from probjax.bench.attention.jax_rows import operands

        self._arguments = operands(self._cell, make_inputs(self._cell))
        give_back_memory()

    def run(self) -> None:
        """Call the program and wait for its outputs."""
        import jax

        self._outputs = jax.block_until_ready(self._compiled(*self._arguments))


def main() -> None:
    """Serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent(int(sys.argv[1]))
    from probjax.bench.measure import Unavailable, describe

    server = Server()
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(server, request.pop("op"))
        answer: dict[str, Any] = {}
        try:
            operation(**request)
        except (Unavailable, NotImplementedError) as error:
            answer = {"error": describe(error), "unavailable": True}
        except Exception as error:
            answer = {"error": describe(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
