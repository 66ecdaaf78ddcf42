"""The float64 reference against sums written out by hand, and against finite differences."""

import math

import numpy as np
import pytest

from probjax.bench.attention import device_oracle
from probjax.bench.attention.cells import VARIANTS, AttentionCell, distance_buckets, make_inputs
from probjax.bench.attention.oracle import reference, relative_error
from probjax.bench.attention.sample import steps, thin


def cell(variant="plain", dtype="float32", seq=7, batch=2, heads=2, head_dim=3):
    return AttentionCell("fwdbwd", variant, dtype, batch, seq, heads, head_dim)


def bucket(distance):
    """T5's bucket of a distance, one number at a time (32 buckets, longest distance 128)."""
    if distance < 16:
        return distance
    return min(31, 16 + math.floor(math.log(distance / 16) / math.log(128 / 16) * 16))


def by_hand(inputs, causal):
    """Attention as nested loops over single numbers."""
    query, key, value = (inputs[name].astype(float) for name in ("query", "key", "value"))
    table = inputs.get("table")
    out = np.zeros(query.shape)
    batch, length, heads, head_dim = query.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                seen = range(i + 1) if causal else range(length)
                scores = []
                for j in seen:
                    score = sum(query[b, i, h, d] * key[b, j, h, d] for d in range(head_dim)) / math.sqrt(
                        head_dim
                    )
                    if table is not None:
                        score += float(table[h, bucket(i - j)])
                    scores.append(score)
                weights = [math.exp(score) for score in scores]
                for weight, j in zip(weights, seen, strict=True):
                    out[b, i, h] += weight / sum(weights) * value[b, j, h]
    return out


@pytest.mark.parametrize("variant", ["plain", "causal", "masked_bias"])
@pytest.mark.parametrize("block", [1, 3, 256])
def test_output_equals_explicit_sums(variant, block):
    this = cell(variant)
    inputs = make_inputs(this)
    got = reference(inputs, causal=this.causal, gradients=False, block=block)
    assert set(got) == {"output"}
    np.testing.assert_allclose(got["output"], by_hand(inputs, this.causal), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", ["plain", "causal", "masked_bias"])
def test_gradients_equal_finite_differences(variant):
    this = cell(variant, seq=5, batch=1)
    inputs = {name: array.astype(np.float64) for name, array in make_inputs(this).items()}
    got = reference(inputs, causal=this.causal, gradients=True, block=2)
    names = {"query", "key", "value", "table"} if this.biased else {"query", "key", "value"}
    assert set(got) == names | {"output"}
    step = 1e-6
    for name in names:
        for index in np.ndindex(inputs[name].shape):
            sides = []
            for sign in (step, -step):
                moved = {**inputs, name: inputs[name].copy()}
                moved[name][index] += sign
                output = reference(moved, causal=this.causal, gradients=False)["output"]
                sides.append(np.sum(output * inputs["cotangent"]))
            assert got[name][index] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


def test_long_sequences_go_through_several_blocks():
    this = cell("masked_bias", seq=300, batch=1, heads=1)
    inputs = make_inputs(this)
    one = reference(inputs, causal=True, gradients=True, block=300)
    many = reference(inputs, causal=True, gradients=True, block=64)
    for name, array in one.items():
        np.testing.assert_allclose(many[name], array, rtol=1e-10, atol=1e-12)


def test_buckets():
    np.testing.assert_array_equal(distance_buckets(400), [bucket(distance) for distance in range(400)])


def test_a_table_needs_a_causal_mask():
    with pytest.raises(ValueError, match="causal"):
        reference(make_inputs(cell("masked_bias")), causal=False, gradients=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_are_fixed_random_numbers_of_the_dtype(dtype):
    import ml_dtypes

    first, second = make_inputs(cell(dtype=dtype)), make_inputs(cell(dtype=dtype))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
        assert np.all(np.isfinite(array))
        assert np.count_nonzero(array) > 0.9 * array.size
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        np.testing.assert_array_equal(array, array.astype(kind).astype(np.float32))
    assert len({array.tobytes() for array in first.values()}) == len(first)


def test_the_bias_table_takes_a_kilobyte_at_eight_heads():
    table = make_inputs(AttentionCell("fwd", "masked_bias", "bfloat16", 1, 8, 8, 4))["table"]
    assert table.dtype == np.float32
    assert table.nbytes == 1024


def test_relative_error():
    wanted = {"a": np.array([1.0, -4.0]), "b": np.array([10.0, 0.0])}
    assert relative_error({"a": np.array([1.0, -4.0])}, wanted) == 0
    assert relative_error({"a": np.array([1.0, -3.0], np.float32)}, wanted) == pytest.approx(0.25)
    assert relative_error({"b": np.array([10.0, 1.0]), "a": np.array([1.0, -3.0])}, wanted) == pytest.approx(
        0.25
    )
    for bad in (np.nan, np.inf):
        for names in (("a", "b"), ("b", "a")):
            got = {name: wanted[name].copy() for name in names}
            got["a"][0] = bad
            assert not math.isfinite(relative_error(got, wanted))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", [False, True])
def test_the_reference_on_the_device_agrees_with_float64(variant, part):
    problem = AttentionCell("fwdbwd", variant, "float32", 3, 20, 3, 4)
    inputs = make_inputs(problem)
    options = {"causal": problem.causal, "gradients": True, "window": 5 if variant == "window" else None}
    step = steps(problem) if part else (1, 1)
    exact = reference(inputs, block=7, **options)
    found = device_oracle.reference(thin(inputs, step), **options)
    # A part of the reference is the reference of the part.
    assert relative_error(found, thin(exact, step)) < 2e-6
    assert set(found) == {"output", *problem.learned}


def test_documents_are_causal_and_cover_the_row():
    ids = make_inputs(AttentionCell("fwd", "documents", "float32", 4, 50, 1, 2))["segment_ids"]
    assert ids.shape == (4, 50)
    assert (np.diff(ids) >= 0).all() and set(ids.ravel()) == set(range(8))


def test_a_random_mask_shows_every_query_itself():
    mask = make_inputs(AttentionCell("fwd", "mask", "float32", 2, 40, 1, 2))["mask"]
    assert mask.shape == (2, 1, 40, 40) and mask[:, 0].diagonal(axis1=1, axis2=2).all()
    assert 0.4 < mask.mean() < 0.6
