"""Acceptance cases F: grouped and multi-query heads, packed documents."""

import jax
import numpy as np
import pytest

import probjax
from oracle import Call, agree, check, masks, normal, qkv, solve

GROUPS = {
    "F3": (8, 2),
    "F4": (4, 2),
    "F8": (4, 1),
    "F1": (32, 8),
    "thirds": (6, 3),
    "one": (1, 1),
    "fives": (5, 1),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups(implementation, case):
    N, K = GROUPS[case]
    check(implementation, Call(**qkv((2,), N=N, K=K), is_causal=True))


@pytest.mark.parametrize("case", GROUPS)
def test_groups_equal_repeated_keys(implementation, case):
    """F3, F4, original A09: head h uses key/value head h // (N / K); gradients sum over the group."""
    N, K = GROUPS[case]
    arrays = qkv((2,), N=N, K=K)
    grouped = solve(implementation, Call(**arrays))
    repeated = {name: np.repeat(x, N // x.shape[-2], -2) for name, x in arrays.items()}
    wide = solve(implementation, Call(**repeated))
    agree(grouped["out"], wide["out"], 1e-6)
    agree(grouped["query"], wide["query"], 2e-6)
    for name in ("key", "value"):
        summed = wide[name].reshape(2, 7, K, N // K, 4).sum(3)
        agree(grouped[name], summed, 2e-6, name=name)


def test_f1_packed_and_grouped(implementation):
    ids = np.array([[0] * 5 + [1] * 11 + [2] * 4, [0] * 13 + [1] * 7])
    check(implementation, Call(**qkv((2,), 20, 20, 32, 8), segment_ids=ids, is_causal=True))


def test_f1_many_documents_over_tiles(implementation):
    lengths = [1, 37, 200, 5, 300, 129, 28]
    ids = np.repeat(np.arange(len(lengths)), lengths)[None]
    assert ids.shape == (1, 700)
    check(implementation, Call(**qkv((1,), 700, 700, 4, 2), segment_ids=ids), tolerance=4e-6)


def test_f1_unsorted_segments(implementation):
    """Ids need not be sorted or consecutive."""
    query_ids = np.array([[3, 1, 3, 9, 1, -5]])
    key_ids = np.array([[1, 3, 9, 3, 1, 1, 2]])
    check(implementation, Call(**qkv((1,)), segment_ids=(query_ids, key_ids)))
    long = np.random.default_rng(0).integers(0, 3, (1, 700))
    check(implementation, Call(**qkv((1,), 700, 700, 1), segment_ids=long), tolerance=4e-6)


@pytest.mark.parametrize("how", ["argument", "object"])
def test_f2_no_leak_between_documents(implementation, how):
    ids = np.array([[0, 0, 0, 1, 1, 1, 1]])
    hide = {"segment_ids": ids} if how == "argument" else {"mask": masks.Segments(ids)}
    arrays = qkv((1,), 7, 7, 4, 2)
    want = check(implementation, Call(**arrays, **hide))
    other = {name: x.copy() for name, x in arrays.items()}
    for x in other.values():
        x[:, 3:] = normal(*x[:, 3:].shape, seed="other")
    got = check(implementation, Call(**other, **hide))
    for name in ("out", "query", "key", "value"):
        np.testing.assert_array_equal(got[name][:, :3], want[name][:, :3])
        assert np.abs(got[name][:, 3:] - want[name][:, 3:]).max() > 1e-2


def test_documents_equal_separate_calls(implementation):
    arrays = qkv((1,), 9, 9, 2)
    packed = solve(implementation, Call(**arrays, segment_ids=np.array([[7] * 4 + [2] * 5]), is_causal=True))
    for part in (slice(0, 4), slice(4, 9)):
        alone = Call(**{name: x[:, part] for name, x in arrays.items()}, is_causal=True)
        agree(packed["out"][:, part], solve(implementation, alone, differentiate=False)["out"], 2e-6)


def test_original_a15_one_id_array_serves_both_sides(implementation):
    ids = np.array([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 0, 0]])
    one = check(implementation, Call(**qkv(S=6), mask=masks.Segments(ids)))
    two = check(implementation, Call(**qkv(S=6), mask=masks.Segments(ids, ids)))
    np.testing.assert_array_equal(one["out"], two["out"])


def test_f7_wide_head_and_an_explanation():
    """D = 320 works, and the plan says which implementation runs and why."""
    call = Call(**qkv((1,), 9, 9, 2, 1, D=320))
    x = jax.ShapeDtypeStruct((1, 9, 2, 320), "float32")
    k = jax.ShapeDtypeStruct((1, 9, 1, 320), "float32")
    plan = probjax.attention_plan(x, k, k)
    assert plan.reason
    assert plan.implementation in probjax.attention.implementations("cpu")
    check(plan.implementation, call)
    check(None, call)


def test_original_a08_scale_and_groups_together(implementation):
    check(implementation, Call(**qkv((2,), N=8, K=2), scale=0.5))
