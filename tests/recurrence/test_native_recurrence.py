"""The C++ kernels of the recurrences, called directly, against loops over time in NumPy, in float64."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probjax import _native
from probjax._call import Call, Operand, Output
from probjax.recurrence import native
from probjax.recurrence.spec import RecurrenceSpec

pytestmark = pytest.mark.skipif(_native.reason() is not None, reason=str(_native.reason()))

EVERY = {
    "u": ("L", "D"),
    "dt": ("L", "D"),
    "A": ("D", "N"),
    "B": ("L", "G", "N"),
    "C": ("L", "K", "N"),
    "initial": ("D", "N"),
}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# ----------------------------------------------------------------------------------------------------------
# Loops over time


def summed_to(x, shape):
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(axes, keepdims=True)


def wide(x, dtype):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else dtype)


class Linear:
    """All of linear_scan by a loop; time comes first after the batch axes."""

    def __init__(self, a, b, initial, reverse):
        self.shapes = a.shape, b.shape, initial.shape
        a, b, initial = (wide(x, np.float64) for x in (a, b, initial))
        self.batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], initial.shape[:-1])
        length, channels = np.broadcast_shapes(a.shape[-2:], b.shape[-2:])
        channels = max(channels, initial.shape[-1])
        full = (*self.batch, length, channels)
        self.a, self.b = np.broadcast_to(a, full), np.broadcast_to(b, full)
        self.initial = np.broadcast_to(initial, (*self.batch, channels))
        self.order = range(length)[::-1] if reverse else range(length)
        self.h = self.walk(self.b, self.initial)

    def walk(self, b, h):
        out = np.zeros(b.shape, np.result_type(self.a, b, h))
        for t in self.order:
            h = self.a[..., t, :] * h + b[..., t, :]
            out[..., t, :] = h
        return out

    def before(self):
        out, h = np.zeros_like(self.h), self.initial
        for t in self.order:
            out[..., t, :], h = h, self.h[..., t, :]
        return out

    def tangent(self, moves):
        a, b, initial = (np.zeros(s) if m is None else m for s, m in zip(self.shapes, moves, strict=True))
        drive = np.broadcast_to(a, self.a.shape) * self.before() + b
        return self.walk(drive, np.broadcast_to(initial, self.initial.shape))

    def backward(self, ct):
        g = np.zeros_like(self.h)
        carry = np.zeros_like(self.initial)
        for t in reversed(self.order):
            g[..., t, :] = ct[..., t, :] + carry
            carry = self.a[..., t, :] * g[..., t, :]
        full = g * self.before(), g, carry
        return [summed_to(x, s) for x, s in zip(full, self.shapes, strict=True)]


class Selective:
    """All of selective_scan by a loop; the state is (*batch, D, N)."""

    def __init__(self, operands, reset, reverse):
        self.shapes = {k: v.shape for k, v in operands.items()}
        sizes = {}
        for name, axes in EVERY.items():
            for axis, size in zip(axes, operands[name].shape[-len(axes) :], strict=True):
                sizes[axis] = max(sizes.get(axis, 1), size)
        self.L, self.D, self.N = sizes["L"], sizes["D"], sizes["N"]
        self.groups = {"B": sizes["G"], "C": sizes["K"]}
        leads = [v.shape[: -len(EVERY[k])] for k, v in operands.items()]
        if reset is not None:
            leads.append(reset.shape[:-1])
        self.batch = np.broadcast_shapes(*leads)
        self.x = {k: self.full(k, v) for k, v in operands.items()}
        self.keep = np.ones((*self.batch, self.L))
        if reset is not None:
            self.keep = np.where(np.broadcast_to(reset, self.keep.shape), 0.0, 1.0)
        self.order = range(self.L)[::-1] if reverse else range(self.L)

    def full(self, name, x):
        x = np.asarray(x, np.float64)
        if name in self.groups:
            x = np.repeat(x, self.D // self.groups[name], -2)
        tails = {"L": self.L, "D": self.D, "N": self.N, "G": self.D, "K": self.D}
        return np.broadcast_to(x, (*self.batch, *(tails[axis] for axis in EVERY[name])))

    def at(self, x, t):
        """Everything at one time, with the shape of a state."""
        pick = {k: v[..., t, :, :] for k, v in x.items() if k in "BC"}
        return pick | {k: v[..., t, :, None] for k, v in x.items() if k in ("u", "dt")}

    def decay(self, now, t):
        return self.keep[..., t, None, None] * np.exp(now["dt"] * self.x["A"])

    @functools.cached_property
    def states(self):
        h, out = self.x["initial"], []
        for t in self.order:
            now = self.at(self.x, t)
            out.append(h)
            h = self.decay(now, t) * h + now["u"] * now["B"]
        return [*out, h]

    def forward(self):
        y = np.zeros((*self.batch, self.L, self.D))
        for i, t in enumerate(self.order):
            y[..., t, :] = (self.at(self.x, t)["C"] * self.states[i + 1]).sum(-1)
        return y, self.states[-1], np.stack(self.states[:-1:64], -3)

    def tangent(self, moves):
        moves = {k: self.full(k, moves.get(k, np.zeros(s))) for k, s in self.shapes.items()}
        h, y = moves["initial"], np.zeros((*self.batch, self.L, self.D))
        for i, t in enumerate(self.order):
            now, move = self.at(self.x, t), self.at(moves, t)
            inner = move["dt"] * self.x["A"] + now["dt"] * moves["A"]
            h = self.decay(now, t) * (h + inner * self.states[i])
            h = h + move["u"] * now["B"] + now["u"] * move["B"]
            y[..., t, :] = (move["C"] * self.states[i + 1] + now["C"] * h).sum(-1)
        return y, h

    def backward(self, ct_y, ct_last):
        grads = {k: np.zeros_like(v) for k, v in self.x.items()}
        g = ct_last
        for i, t in reversed(list(enumerate(self.order))):
            now, dy = self.at(self.x, t), ct_y[..., t, :, None]
            g = g + now["C"] * dy
            grads["C"][..., t, :, :] = dy * self.states[i + 1]
            grads["B"][..., t, :, :] = g * now["u"]
            grads["u"][..., t, :] = (g * now["B"]).sum(-1)
            g = g * self.decay(now, t)
            through = g * self.states[i]
            grads["A"] += through * now["dt"]
            grads["dt"][..., t, :] = (through * self.x["A"]).sum(-1)
        grads["initial"] = g
        return {k: self.narrow(k, v) for k, v in grads.items()}

    def narrow(self, name, x):
        if name in self.groups:
            x = x.reshape(*x.shape[:-2], self.groups[name], -1, x.shape[-1]).sum(-2)
        return summed_to(x, self.shapes[name])


# ----------------------------------------------------------------------------------------------------------
# Calls of the kernels


def linear_call(dtype, reverse):
    operands = (Operand("a", ("L", "C")), Operand("b", ("L", "C")), Operand("initial", ("C",)))
    return Call(None, operands, (Output("out", ("L", "C"), dtype),), RecurrenceSpec(reverse=reverse))


def selective_call(dtype, reverse, reset, length):
    operands = tuple(Operand(name, axes) for name, axes in EVERY.items())
    if reset:
        operands += (Operand("reset", ("L",), differentiable=False),)
    kept = -(-length // 64)
    outputs = (("out", ("L", "D")), ("last", ("D", "N")), ("states", (kept, "D", "N")))
    outputs = tuple(Output(name, axes, dtype) for name, axes in outputs)
    return Call(None, operands, outputs, RecurrenceSpec(reverse=reverse))


def close(found, expected, dtype, factor=1.0):
    found = np.asarray(found)
    assert found.shape == expected.shape and np.isfinite(found).all()
    limit = {4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize // (2 if np.dtype(dtype).kind == "c" else 1)]
    assert np.abs(found - expected).max() <= factor * limit * max(np.abs(expected).max(), 1e-30)


def draw(rng, shape, dtype):
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = (x + 1j * rng.standard_normal(shape)) / np.sqrt(2)
    return x.astype(dtype)


def check_linear(dtype, a, b, initial, reverse=False, seed=0):
    """`a`, `b`, `initial` are shapes."""
    rng = np.random.default_rng(seed)
    a, b, initial = (draw(rng, shape, dtype) for shape in (a, b, initial))
    a = (a / np.maximum(np.abs(a), 1) * 0.99).astype(dtype)
    loop, call = Linear(a, b, initial, reverse), linear_call(dtype, reverse)
    kernels, operands = native.LINEAR_SCAN_NATIVE, (a, b, initial)
    assert kernels.declines(call, operands) is None
    (out,) = jax.jit(lambda *x: kernels.forward(call, "cpu", x))(*operands)
    close(out, loop.h, dtype)
    ct = draw(rng, loop.h.shape, dtype)
    backward = jax.jit(
        lambda out, ct, *x, wanted: kernels.backward(call, "cpu", x, (out,), (ct,), wanted),
        static_argnames="wanted",
    )
    expected = loop.backward(ct)
    for wanted in ((0, 1, 2), (0,), (1,), (2, 0)):
        for i, x in zip(wanted, backward(out, ct, *operands, wanted=wanted), strict=True):
            assert x.dtype == dtype
            close(x, expected[i], dtype)
    moves = [draw(rng, x.shape, dtype) for x in operands]
    for active in ((0, 1, 2), (0,), (1,), (2,)):
        given = {i: moves[i] for i in active}
        (moved,) = jax.jit(lambda out, given, *x: kernels.tangent(call, "cpu", x, (out,), given))(
            out, given, *operands
        )
        close(moved, loop.tangent([given.get(i) for i in range(3)]), dtype)


def make_selective(shapes, dtype=np.float32, reset=None, seed=0):
    rng = np.random.default_rng(seed)
    operands = {k: draw(rng, shapes[k], dtype) for k in EVERY}
    operands["dt"] = (0.4 * np.abs(operands["dt"])).astype(dtype)
    operands["A"] = -np.abs(operands["A"]) - dtype(0.01)
    return operands, None if reset is None else rng.random(reset) < 0.05, rng


def shapes_of(L, D, N, G=1, K=1, batch=(2,), **other):
    sizes = {"L": L, "D": D, "N": N, "G": G, "K": K}
    shapes = {k: (*batch, *(sizes[axis] for axis in axes)) for k, axes in EVERY.items()}
    shapes["A"] = (1,) * len(batch) + (D, N)
    return shapes | other


@dataclasses.dataclass
class Kernels:
    """The three functions on the arrays of one call, compiled."""

    call: Call
    arrays: tuple

    @classmethod
    def of(cls, operands, reset, reverse, length):
        dtype = operands["u"].dtype
        arrays = tuple(operands.values()) + (() if reset is None else (reset,))
        call = selective_call(dtype, reverse, reset is not None, length)
        assert native.SELECTIVE_SCAN_NATIVE.declines(call, arrays) is None
        return cls(call, arrays)

    def forward(self):
        run = jax.jit(lambda *x: native.SELECTIVE_SCAN_NATIVE.forward(self.call, "cpu", x))
        return run(*self.arrays)

    def backward(self, outputs, cotangents, wanted):
        function = native.SELECTIVE_SCAN_NATIVE.backward
        run = jax.jit(lambda x, outputs, ct: function(self.call, "cpu", x, outputs, ct, wanted))
        return run(self.arrays, outputs, cotangents)

    def tangent(self, outputs, tangents):
        function = native.SELECTIVE_SCAN_NATIVE.tangent
        run = jax.jit(lambda x, outputs, moves: function(self.call, "cpu", x, outputs, moves))
        return run(self.arrays, outputs, tangents)


def check_selective(shapes, dtype=np.float32, reset=None, reverse=False, seed=0, subsets=False):
    operands, reset, rng = make_selective(shapes, dtype, reset, seed)
    loop = Selective(operands, reset, reverse)
    kernels = Kernels.of(operands, reset, reverse, loop.L)
    outputs = kernels.forward()
    for found, expected in zip(outputs, loop.forward(), strict=True):
        assert found.dtype == dtype
        close(found, expected, dtype)
    names = list(EVERY)
    cts = [draw(rng, x.shape, dtype) for x in outputs]
    for given in ((0, 1), (0,), (1,))[: 3 if subsets else 1]:
        cotangents = tuple(cts[i] if i in given or i == 2 else None for i in range(3))
        zeros = [cts[i] if i in given else np.zeros_like(cts[i]) for i in (0, 1)]
        expected = loop.backward(*zeros)
        some = [(i,) for i in range(6)] + [(3, 0), (4, 2, 5)] if subsets and len(given) == 2 else []
        for wanted in (tuple(range(6)), *some):
            found = kernels.backward(outputs, cotangents, wanted)
            for i, x in zip(wanted, found, strict=True):
                assert x.dtype == dtype
                close(x, expected[names[i]], dtype)
    moves = {k: draw(rng, v.shape, dtype) for k, v in operands.items()}
    for active in (tuple(range(6)), *([(i,) for i in range(6)] if subsets else [])):
        given = {names[i]: moves[names[i]] for i in active}
        found = kernels.tangent(outputs, {i: moves[names[i]] for i in active})
        for x, expected in zip(found, loop.tangent(given), strict=False):
            close(x, expected, dtype)
        assert found[2].shape == outputs[2].shape and not np.any(found[2])


# ----------------------------------------------------------------------------------------------------------
# linear_scan


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_scan(dtype, reverse):
    check_linear(dtype, (2, 65, 33), (2, 65, 33), (2, 33), reverse)


@pytest.mark.parametrize(("L", "C"), [(1, 1), (2, 3), (63, 16), (64, 8), (300, 5), (1024, 300), (7, 2051)])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_linear_scan_sizes(dtype, L, C):
    check_linear(dtype, (L, C), (L, C), (C,))


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 1, 20), (3, 70, 20), (3, 20)),  # decay constant in time and batch
        ((1, 70, 1), (3, 70, 20), (1, 20)),
        ((1, 1, 1), (3, 70, 20), (1, 1)),
        ((3, 70, 20), (1, 70, 1), (3, 1)),
        ((3, 70, 20), (1, 1, 20), (1, 20)),
        ((2, 1, 3, 30, 9), (1, 4, 1, 30, 9), (2, 4, 1, 9)),
    ],
)
def test_linear_scan_shared_axes(dtype, shapes):
    check_linear(dtype, *shapes, reverse=True)


# ----------------------------------------------------------------------------------------------------------
# selective_scan


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reset", [None, (2, 130), (1, 130)])
def test_selective_scan(reverse, reset):
    check_selective(shapes_of(130, 20, 5), reset=reset, reverse=reverse)


@pytest.mark.parametrize(
    ("L", "D", "N"),
    [
        (1, 1, 1),
        (2, 3, 2),
        (63, 16, 16),
        (64, 17, 3),
        (65, 32, 1),
        (300, 1, 33),
        (129, 100, 7),
        (9, 300, 2),
        (9, 2, 300),
    ],
)
def test_selective_scan_sizes(L, D, N):
    check_selective(shapes_of(L, D, N, batch=()))


def test_selective_scan_of_every_subset():
    check_selective(shapes_of(70, 18, 6, batch=(3,)), reset=(3, 70), subsets=True)


def test_selective_scan_float64():
    check_selective(shapes_of(130, 37, 6), np.float64, reset=(2, 130))
    check_selective(shapes_of(70, 36, 5, G=4, K=36), np.float64, reverse=True)


@pytest.mark.parametrize(("G", "K"), [(2, 1), (1, 3), (2, 3), (6, 4), (36, 1), (12, 36), (36, 36)])
def test_selective_scan_groups(G, K):
    check_selective(shapes_of(70, 36, 3, G=G, K=K), reset=(2, 70))


def test_selective_scan_groups_that_no_block_respects():
    check_selective(shapes_of(66, 105, 2, G=35, K=21, batch=(1,)))
    check_selective(shapes_of(66, 102, 2, G=2, K=34, batch=(1,)))


@pytest.mark.parametrize(
    "other",
    [
        {"B": (1, 1, 1, 5), "C": (1, 1, 1, 5)},  # time-invariant
        {"B": (1, 1, 20, 5), "C": (2, 1, 20, 5)},  # time-invariant, per channel
        {"B": (1, 130, 20, 1), "C": (2, 130, 1, 1)},
        {"B": (1, 1, 20, 1), "C": (2, 1, 1, 1)},
        {"u": (1, 130, 1), "dt": (2, 1, 20), "initial": (1, 1, 5)},
        {"dt": (1, 1, 1), "A": (2, 20, 1), "initial": (2, 20, 1)},
        {"A": (1, 1, 5), "B": (1, 130, 5, 5)},
    ],
)
def test_selective_scan_shared_axes(other):
    check_selective(shapes_of(130, 20, 5, **other), reset=(1, 130))


def test_selective_scan_shared_batch_axes():
    shapes = shapes_of(40, 9, 3, batch=(2, 1, 3, 2))
    shapes |= {"A": (1, 4, 1, 1, 9, 3), "B": (2, 1, 1, 1, 40, 1, 3), "C": (1, 1, 3, 2, 40, 9, 3)}
    check_selective(shapes, reset=(1, 4, 1, 1, 40))


def test_selective_scan_many_blocks_share_a_group():
    check_selective(shapes_of(66, 300, 2, G=3, K=1, batch=(1,)))


def test_decay_of_zero_step_is_exact():
    operands, _, _ = make_selective(shapes_of(100, 20, 5))
    operands["dt"][:] = 0
    operands["u"][:] = 0
    _, last, _ = Kernels.of(operands, None, False, 100).forward()
    np.testing.assert_array_equal(np.asarray(last), operands["initial"])


def test_strong_decay_and_growth():
    operands, _, _ = make_selective(shapes_of(3, 20, 5))
    operands["dt"][:, 0] = 1e30
    operands["u"][:, 0] = 0
    _, last, _ = Kernels.of(operands, None, False, 3).forward()
    loop = Selective(operands, None, False)
    close(last, loop.forward()[1], np.float32)
    operands["A"] = np.full_like(operands["A"], 20.0)
    operands["dt"] = np.full_like(operands["dt"], 0.5)
    out, *_ = Kernels.of(operands, None, False, 3).forward()
    close(out, Selective(operands, None, False).forward()[0], np.float32)
    operands["dt"][:] = 10
    out, *_ = Kernels.of(operands, None, False, 3).forward()
    assert np.all(np.isinf(out) | np.isnan(out))


def test_a_reset_hides_finite_history():
    operands, _, rng = make_selective(shapes_of(70, 20, 5))
    reset = np.zeros((2, 70), bool)
    reset[:, 40] = True
    operands["dt"][:, 40] = 3e38
    operands["A"] = operands["A"] - 3
    kernels = Kernels.of(operands, reset, False, 70)
    outputs = kernels.forward()
    assert np.isfinite(outputs[0]).all()
    ct = draw(rng, outputs[0].shape, np.float32)
    ct[:, :40] = 0
    found = kernels.backward(outputs, (ct, None, None), (0, 5))
    assert not np.any(np.asarray(found[0])[:, :40]) and not np.any(found[1])


def test_infinities_stay_in_their_channels():
    operands, _, _ = make_selective(shapes_of(70, 20, 5))
    operands["u"][0, 10, 3] = np.inf
    outputs = Kernels.of(operands, None, False, 70).forward()
    bad = ~np.isfinite(outputs[0])
    assert bad[0, 10:, 3].all() and not np.delete(bad, 3, 2).any() and not bad[1].any()


def test_an_infinite_factor_meets_only_channels_that_are_there():
    operands, _, _ = make_selective(shapes_of(9, 3, 2))
    operands["u"], operands["B"] = np.abs(operands["u"]), np.abs(operands["B"])
    operands["B"][:, 4] = np.inf
    kernels = Kernels.of(operands, None, False, 9)
    outputs = kernels.forward()
    ct = np.ones(outputs[0].shape, np.float32)
    (found,) = kernels.backward(outputs, (ct, None, None), (4,))
    assert np.isfinite(found[:, :4]).all() and np.all(np.asarray(found)[:, 4:] == np.inf)


# ----------------------------------------------------------------------------------------------------------
# The library

DIGEST = """
import hashlib, sys
sys.path.insert(0, {folder!r})
import numpy as np
import test_native_recurrence as t
from probjax import _native
found = hashlib.sha256()
for shapes in (t.shapes_of(200, 70, 24), t.shapes_of(130, 36, 6, G=12, K=36)):
    operands, reset, rng = t.make_selective(shapes, reset=(2, shapes["u"][1]))
    kernels = t.Kernels.of(operands, reset, False, shapes["u"][1])
    outputs = kernels.forward()
    cts = tuple(t.draw(rng, x.shape, np.float32) for x in outputs)
    moves = {{i: t.draw(rng, x.shape, np.float32) for i, x in enumerate(operands.values())}}
    for x in (*outputs, *kernels.backward(outputs, cts, tuple(range(6))), *kernels.tangent(outputs, moves)):
        found.update(np.asarray(x).tobytes())
a, b = (t.draw(rng, (3, 200, 130), np.complex64) for _ in range(2))
call, kernels = t.linear_call(np.complex64, False), t.native.LINEAR_SCAN_NATIVE
(out,) = kernels.forward(call, "cpu", (a / 2, b, b[:, 0]))
for x in (out, *kernels.backward(call, "cpu", (a / 2, b, b[:, 0]), (out,), (b,), (0, 1, 2))):
    found.update(np.asarray(x).tobytes())
print(found.hexdigest())
"""


def in_subprocess(code, **environment):
    here = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", code.format(folder=here)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()[-1]


def test_bitwise_the_same_for_any_number_of_threads():
    found = {in_subprocess(DIGEST, NPROC=n, PROBJAX_ISA=_native.isa()) for n in ("1", "5")}
    assert len(found) == 1


LESSER = """
import sys
sys.path.insert(0, {folder!r})
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import test_native_recurrence as t
from probjax import _native
t.check_selective(t.shapes_of(70, 36, 5, G=4), reset=(2, 70), reverse=True)
t.check_selective(t.shapes_of(66, 20, 3, G=20, K=1, batch=()))
t.check_selective(t.shapes_of(130, 13, 6), np.float64)
t.check_linear(np.complex64, (2, 65, 33), (2, 65, 33), (2, 33))
t.check_linear(np.float64, (1, 1, 33), (2, 65, 33), (2, 33))
print(_native.isa())
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets(isa):
    if _native.isa() not in ("avx2", "avx512"):
        pytest.skip("no lesser instruction set")
    assert in_subprocess(LESSER, PROBJAX_ISA=isa) == isa


def test_what_the_kernels_decline():
    call = selective_call(np.float32, False, False, 4)
    operands = tuple(make_selective(shapes_of(4, 2, 2))[0].values())
    kernels = native.SELECTIVE_SCAN_NATIVE
    assert kernels.declines(call, operands) is None
    half = tuple(jnp.asarray(x, jnp.bfloat16) for x in operands)
    assert "bfloat16" in kernels.declines(call, half)
    empty = tuple(make_selective(shapes_of(0, 2, 2))[0].values())
    assert "empty" in kernels.declines(call, empty)
    assert native.unavailable("cuda") is not None and native.unavailable("cpu") is None
