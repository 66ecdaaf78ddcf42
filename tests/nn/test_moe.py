"""MixtureOfExperts against NumPy, token by token."""

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from flax import nnx
from nn_helpers import after_a_step, check_gradient, close, normal, pure, stirred, trees_close, wide
from transformer_reference import tree

from probjax.nn import MixtureOfExperts, moe

N, D, H, E = 37, 6, 10, 5
FORMS = {"dense": {"dispatch": "dense"}, "sorted": {}, "capacity": {"capacity_factor": 0.7}}


def make(seed=0, experts=E, **config):
    return stirred(MixtureOfExperts(D, H, experts, **config, rngs=nnx.Rngs(seed)))


@pytest.fixture(params=[8, 4])
def tile(request, monkeypatch):
    """Several tiles of one expert too."""
    monkeypatch.setattr(moe, "MOST_ROWS", request.param)
    monkeypatch.setattr(moe, "FEWEST_ROWS", 1)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("masked", [False, True])
def test_values(form, k, masked, tile):
    layer, x = make(num_selected=k, **form), normal((N, D))
    mask = np.random.default_rng(1).random(N) < 0.7 if masked else None
    y, aux = layer(x, mask=mask)
    want = reference.moe(
        tree(layer), np.float64(x), k, mask=mask, capacity_factor=form.get("capacity_factor")
    )
    close(y, want[0])
    fields = (aux.load_balance_loss, aux.z_loss, aux.expert_fraction, aux.overflow)
    for got, exact in zip(fields, want[1:], strict=True):
        close(got, exact, 1e-5)
    if mask is None:
        assert (want[-1] > 0) == ("capacity_factor" in form)


def _both(layer, x):
    apply, state = pure(layer)
    loss = lambda s: (jnp.sum(jnp.sin(apply(s, x)[0])), apply(s, x)[0])  # noqa: E731
    gradient, y = jax.grad(loss, has_aux=True)(state)
    return y, gradient


def test_rows_of_a_tile():
    assert [moe.tile_rows(n, 8) for n in (1, 7, 100, 2048, 10**6)] == [1, 7, 8, 128, 512]


def test_exported_for_any_number_of_tokens():
    layer = make()
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("tokens"), D), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer(x)[0]), platforms=("cpu", "cuda"))(shape)
    close(exported.call(normal((N, D))), layer(normal((N, D)))[0])


def test_few_experts():
    x = normal((N, D))
    for form in ({}, {"dispatch": "dense"}, {"capacity_factor": 1.0}):
        one = make(experts=1, num_selected=1, **form)
        gate, up, down = (np.float64(p[...][0]) for p in (one.gate, one.up, one.down))
        close(one(x)[0], (reference.silu(x @ gate) * (x @ up)) @ down)
        assert abs(float(one(x)[1].load_balance_loss) - 1) < 1e-6


def test_a_uniform_router():
    layer = make()
    layer.router[...] = jnp.zeros((D, E))
    x = normal((N, D))
    y, aux = layer(x)
    assert abs(float(aux.load_balance_loss) - 1) < 1e-6
    assert abs(float(aux.z_loss) - np.log(E) ** 2) < 1e-5
    # Ties: the first experts.
    close(aux.expert_fraction, [0.5, 0.5, 0, 0, 0], 1e-6)
    assert np.array_equal(y, layer(x)[0])


def test_capacity():
    x = normal((N, D))
    layer = make(capacity_factor=1e-9)
    _, aux = layer(x)
    kept = round((1 - float(aux.overflow)) * N * 2)
    assert 1 <= kept <= E  # one each
    roomy = make(capacity_factor=float(E))
    close(roomy(x)[0], make()(x)[0])
    assert float(roomy(x)[1].overflow) == 0


def test_padding():
    layer, x = make(capacity_factor=0.5), normal((2, N, D))
    mask = np.arange(N) < np.array([[20], [N]])
    dirty = np.where(mask[..., None], x, np.nan)
    y, aux = layer(dirty, mask=mask)
    assert np.isfinite(y).all() and np.all(np.asarray(y)[~mask] == 0)
    assert np.isfinite(float(aux.z_loss))
    definition, state = nnx.split(layer)

    def loss(state, x):
        y, aux = nnx.merge(definition, state)(x, mask=mask)
        return jnp.sum(y**2) + aux.z_loss + aux.load_balance_loss

    gradients = jax.grad(loss, (0, 1))(state, dirty)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    assert np.all(np.asarray(gradients[1])[~mask] == 0)


def test_nothing_to_do():
    for form in FORMS.values():
        y, aux = make(**form)(normal((2, 0, D)))
        assert y.shape == (2, 0, D)
        assert np.isfinite(float(aux.load_balance_loss))
        y, aux = make(**form)(normal((4, D)), mask=np.zeros(4, bool))
        assert np.all(np.asarray(y) == 0) and np.isfinite(float(aux.load_balance_loss + aux.z_loss))
        close(make(**form)(normal((4, D)))[0][2:3], make(**form)(normal((4, D))[None])[0][0, 2:3])
    close(make()(normal((4, D)))[0][2], make()(normal((4, D))[2])[0])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients(form, x64):
    layer = wide(make(**form))
    definition, state = nnx.split(layer)
    weight = normal((N, D), 2)

    def loss(p):
        y, aux = nnx.merge(definition, p[0])(p[1])
        return jnp.sum(weight * y) + aux.load_balance_loss + aux.z_loss

    # Losses are float32.
    check_gradient(loss, (state, normal((N, D)).astype(np.float64)), eps=1e-4, tolerance=2e-3)
    point = state, np.float64(normal((N, D)))
    check_gradient(lambda p: jnp.sum(weight * nnx.merge(definition, p[0])(p[1])[0]), point)


def test_gradients_of_sorted_are_those_of_dense():
    x = normal((N, D))
    trees_close(_both(make(), x)[1], _both(make(dispatch="dense"), x)[1])


def test_extreme_logits():
    layer, x = make(), normal((N, D))
    layer.router[...] = layer.router[...] * 1e4
    y, gradient = _both(layer, x)
    assert np.isfinite(y).all() and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_half_types():
    layer, x = make(dtype=jnp.bfloat16), normal((N, D))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    y, aux = layer(x)
    exact, theirs = make()(x.astype(np.float32))
    assert y.dtype == jnp.bfloat16 and aux.z_loss.dtype == jnp.float32
    # The router is exact, so the choices are the same.
    close(aux.z_loss, theirs.z_loss, 1e-6)
    close(aux.expert_fraction, theirs.expert_fraction)
    assert np.abs(np.float32(y) - exact).max() < 0.02 * np.abs(exact).max()
    for form in FORMS.values():
        gradient = _both(make(dtype=jnp.bfloat16, **form), x)[1]
        assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_jitter():
    layer, x = make(jitter=0.3), normal((N, D))
    key = jax.random.key(0)
    assert np.array_equal(layer(x, key=key)[0], layer(x, key=key)[0])
    assert np.array_equal(layer(x)[0], make()(x)[0])
    assert float(layer(x, key=key)[1].z_loss) != float(layer(x)[1].z_loss)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_transformations(form):
    layer, x = make(**form), normal((3, N, D))
    apply, state = pure(layer)
    many = jax.vmap(lambda x: apply(state, x)[0])(x)
    close(many, jnp.stack([layer(y)[0] for y in x]))

    def loss(x):
        return jnp.sum(jnp.sin(apply(state, x)[0]))

    v = normal(x.shape, 3)
    slope = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])
    close(slope(x), np.vdot(jax.grad(loss)(x), v), 1e-4)
    close(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (v,))[1])(x), jax.grad(slope)(x), 1e-4)


def test_a_step_changes_every_parameter():
    class First(nnx.Module):
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, x):
            return self.layer(x)[0]

    for form in FORMS.values():
        assert not after_a_step(First(make(**form)), normal((N, D)))


def test_no_compilation_twice():
    traces = []
    definition, state = nnx.split(make())

    @jax.jit
    def run(state, x):
        traces.append(1)
        return nnx.merge(definition, state)(x)

    # Other tokens, other routes.
    run(state, normal((N, D)))
    run(nnx.state(make(seed=1)), normal((N, D), 1))
    assert len(traces) == 1


def test_errors():
    for options, name in (
        ({"num_selected": 0}, "num_selected"),
        ({"num_selected": E + 1}, "num_selected"),
        ({"dispatch": "some"}, "dispatch"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"capacity_factor": 1.0, "dispatch": "dense"}, "capacity_factor"),
        ({"jitter": 1.0}, "jitter"),
        ({"experts": 0}, "num_experts"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**options)
    with pytest.raises(ValueError, match="x: got shape"):
        make()(normal((N, D + 1)))
    with pytest.raises(TypeError, match="int32"):
        make()(np.zeros((N, D), np.int32))
    with pytest.raises(ValueError, match="mask"):
        make()(normal((N, D)), mask=np.ones(N + 1, bool))
