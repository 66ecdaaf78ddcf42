"""New values never trace or compile again: masks, segments, lengths, keys, slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import cases, normal, qkv
from probjax import biases, masks

ARRAYS = {name: jnp.asarray(x, "float32") for name, x in qkv((2,), 6, 6, 2).items()}


def documents(b, h, q, kv, ids):
    return ids[b, q] == ids[b, kv]


def shifted(score, b, h, q, kv, table):
    return score + table[kv]


VALUES = {
    "mask array": lambda i: {"mask": jnp.asarray(normal(2, 1, 6, 6, seed=i) > 0)},
    "mask object": lambda i: {
        "mask": masks.Dense(jnp.asarray(normal(2, 1, 6, 6, seed=i) > 0)) & masks.Causal()
    },
    "padding": lambda i: {"mask": masks.Padding(jnp.array([i + 1, 6 - i]))},
    "prefix": lambda i: {"mask": masks.PrefixLM(jnp.array([i, 6 - i]))},
    "segments": lambda i: {"segment_ids": jnp.arange(12).reshape(2, 6) // (i + 1)},
    "segments object": lambda i: {"mask": masks.Segments(jnp.arange(12).reshape(2, 6) // (i + 1))},
    "mask function": lambda i: {
        "mask": masks.MaskFunction(documents, jnp.arange(12).reshape(2, 6) // (i + 1))
    },
    "lengths": lambda i: {
        "key_value_seq_lengths": jnp.array([i, 6 - i]),
        "query_seq_lengths": jnp.array([6, i]),
    },
    "dropout key": lambda i: {"dropout_key": jax.random.key(i), "dropout_rate": 0.5},
    "slopes": lambda i: {"bias": biases.ALiBi(jnp.array([0.1 * i, 1.0]))},
    "score function": lambda i: {
        "bias": biases.ScoreFunction(shifted, jnp.asarray(normal(6, seed=i), "float32"))
    },
    "bias": lambda i: {"bias": jnp.asarray(normal(1, 2, 6, 6, seed=i), "float32")},
    "sinks": lambda i: {"sinks": jnp.asarray(normal(2, seed=i), "float32")},
    "scale": lambda i: {"scale": jnp.float32(i)},
    "static": lambda i: {"mask": masks.Causal() & masks.SlidingWindow(left=3), "local_window_size": (4, 4)},
}

STATIC = ("dropout_rate", "local_window_size")


@pytest.mark.parametrize("name", cases(VALUES, "score function"))
def test_new_values_do_not_trace_again(name):
    traces = []

    @jax.jit
    def run(options):
        traces.append(None)

        def loss(arrays):
            return (probjax.dot_product_attention(**arrays, **options, **fixed) ** 2).sum()

        return jax.value_and_grad(loss)(ARRAYS)

    fixed = {key: value for key, value in VALUES[name](1).items() if key in STATIC}
    for i in (1, 2, 3):
        run({key: value for key, value in VALUES[name](i).items() if key not in STATIC})
    assert len(traces) == 1


class Compilations:
    """Counts what JAX compiles while it is active."""

    def __enter__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(kwargs.get("fun_name"))

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


@pytest.mark.parametrize("name", cases(VALUES, "score function"))
def test_eager_calls_compile_once(implementation, name):
    """Without jit around: the second and third call, with other values, compile nothing."""

    def run(i):
        options = VALUES[name](i)

        def loss(arrays):
            return (
                probjax.dot_product_attention(**arrays, **options, implementation=implementation) ** 2
            ).sum()

        jax.block_until_ready((loss(ARRAYS), jax.grad(loss)(ARRAYS)))

    run(1)
    options = [VALUES[name](i) for i in (2, 3)]  # making the arrays may compile; calling may not
    del options
    with Compilations() as compiled:
        run(2)
        run(3)
    assert not compiled.names


def test_the_counter_counts():
    with Compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1.5)(jnp.arange(7.0)).block_until_ready()
    assert compiled.names


def test_lambdas_made_anew_are_new_programs_but_right(implementation):
    """Two functions with equal code but different constants are not mixed up."""
    outs = []
    for shift in (0, 1):
        mask = masks.MaskFunction(lambda b, h, q, kv, shift=shift: kv <= q + shift)
        outs.append(probjax.dot_product_attention(**ARRAYS, mask=mask, implementation=implementation))
    want = probjax.dot_product_attention(**ARRAYS, is_causal=True, implementation=implementation)
    np.testing.assert_allclose(outs[0], want, rtol=1e-6)
    assert np.abs(outs[0] - outs[1]).max() > 1e-3


def test_closures_over_traced_values(implementation):
    """A function that closes over a tracer: right, or an error that says to pass it as an array."""

    @jax.jit
    def attend(limit):
        mask = masks.MaskFunction(lambda b, h, q, kv: kv < limit)
        return probjax.dot_product_attention(**ARRAYS, mask=mask, implementation=implementation)

    want = probjax.dot_product_attention(
        **ARRAYS, mask=masks.Padding(jnp.array([3, 3])), implementation=implementation
    )
    try:
        got = attend(3)
    except (TypeError, ValueError, jax.errors.UnexpectedTracerError) as error:
        assert "arrays" in str(error)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6)
