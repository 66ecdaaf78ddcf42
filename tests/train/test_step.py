"""One training step: what it computes, what it keeps, donation, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from probjax.train import train_step

BATCH = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def squares(params, batch, key):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def start(dtype=jnp.float32):
    return {"w": jnp.asarray([1.0, -2.0, 0.5], dtype), "b": jnp.ones((), dtype)}


class TestStep:
    def test_gradient_descent_by_hand(self):
        optimizer = optax.sgd(0.1)
        params, _, loss, metrics = train_step(squares, optimizer)(start(), optimizer.init(start()), BATCH)
        y = BATCH.astype(np.float64) @ [1.0, -2.0, 0.5] + 1
        np.testing.assert_allclose(loss, np.mean(y**2), rtol=1e-6)
        np.testing.assert_allclose(params["b"], 1 - 0.1 * 2 * y.mean(), rtol=1e-5)
        np.testing.assert_allclose(params["w"], [1, -2, 0.5] - 0.1 * 2 * (y @ BATCH) / 5, rtol=1e-5)
        assert metrics == {}

    def test_metrics_and_key_reach_their_place(self):
        def loss(params, batch, key):
            noise = jax.random.normal(key, batch.shape)
            return squares(params, batch + noise, key), {"noise": noise.sum()}

        optimizer = optax.sgd(0.1)
        step = train_step(loss, optimizer, donate=False)
        arguments = (start(), optimizer.init(start()), BATCH)
        *_, metrics = step(*arguments, jax.random.key(1))
        np.testing.assert_allclose(
            metrics["noise"], jax.random.normal(jax.random.key(1), BATCH.shape).sum(), rtol=1e-5
        )

    def test_it_replays_bit_for_bit_and_compiles_once(self):
        optimizer = optax.adam(1e-2)
        step = train_step(squares, optimizer)

        def run():
            params, state, losses = start(), optimizer.init(start()), []
            for _ in range(4):
                params, state, loss, _ = step(params, state, BATCH)
                losses.append(float(loss))
            return params, losses

        (params, losses), (again, same) = run(), run()
        assert losses == same and losses == sorted(losses, reverse=True)
        jax.tree.map(np.testing.assert_array_equal, params, again)
        assert step._cache_size() == 1

    def test_half_precision_parameters_stay_so(self):
        # A schedule gives float32 updates, whatever the parameters are.
        optimizer = optax.sgd(optax.constant_schedule(0.1))
        params, *_ = train_step(squares, optimizer)(
            start(jnp.bfloat16), optimizer.init(start(jnp.bfloat16)), jnp.asarray(BATCH, jnp.bfloat16)
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


class TestDonation:
    def aliased(self, **options):
        optimizer = optax.adam(1e-2)
        arguments = (start(), optimizer.init(start()), BATCH)
        compiled = train_step(squares, optimizer, **options).lower(*arguments).compile()
        return compiled.memory_analysis().alias_size_in_bytes

    def test_parameters_and_state_give_their_memory(self):
        # Four numbers, two moments of them, and the counter.
        assert self.aliased() == 3 * 4 * 4 + 4
        assert self.aliased(donate=False) == 0

    def test_what_was_given_is_gone(self):
        optimizer = optax.sgd(0.1)
        params = start()
        train_step(squares, optimizer)(params, optimizer.init(params), BATCH)
        assert params["w"].is_deleted()
        params = start()
        train_step(squares, optimizer, donate=False)(params, optimizer.init(params), BATCH)
        assert not params["w"].is_deleted()

    def test_off_while_nans_are_searched_for(self):
        with jax.debug_nans(True):
            assert self.aliased() == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("loss", "said"),
        [
            (lambda p, b, k: b @ p["w"], r"loss: got shape \(5,\)"),
            (lambda p, b, k: jnp.zeros((), jnp.int32), "dtype int32"),
            (lambda p, b, k: None, "loss: got NoneType"),
            (lambda p, b, k: (b @ p["w"], {}), r"loss: got shape \(5,\)"),
        ],
    )
    def test_losses(self, loss, said):
        optimizer = optax.sgd(0.1)
        with pytest.raises(TypeError, match=said):
            train_step(loss, optimizer)(start(), optimizer.init(start()), BATCH)

    def test_parameters_that_cannot_be_trained_are_named(self):
        optimizer = optax.sgd(0.1)
        params = {**start(), "count": jnp.zeros((), jnp.int32)}
        with pytest.raises(TypeError, match=r"params\['count'\]: got dtype int32"):
            train_step(squares, optimizer)(params, optimizer.init(params), BATCH)

    def test_no_optimizer(self):
        with pytest.raises(TypeError, match="optimizer: got float without a function init"):
            train_step(squares, 0.1)
