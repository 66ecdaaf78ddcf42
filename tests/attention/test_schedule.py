"""Which tiles the GPU kernels visit, against the mask pair by pair."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import Call, Sizes, masks
from probjax.attention._function import as_band
from probjax.attention._program import NO_BOUND, MaskOp, MaskStep, lower
from probjax.attention._schedule import Cut, Schedule, bounds, schedules
from probjax.attention.prepare import prepare

B, N = 3, 2
CUTS = ((16, 16), (16, 32), (32, 16), (64, 16), (16, 64))


def tiles_of(schedule, cut, along, entry):
    """Per tile of one axis: tiles of the other that are visited, and those visited without the mask."""
    count = cut.row_tiles if along == "keys" else cut.column_tiles
    other = cut.column_tiles if along == "keys" else cut.row_tiles
    visited, full = np.zeros((count, other), int), np.zeros((count, other), bool)
    array = None if schedule.array is None else np.asarray(schedule.array)
    if schedule.kind == "band":
        ranges = of_band(schedule, cut, along)
    elif schedule.kind == "ranges":
        ranges = array.reshape(-1, count, 4)[entry if array.ndim > 2 and len(array) > 1 else 0]
    else:
        for i, (hidden, whole, *numbers) in enumerate(array):
            assert len(set(numbers[: hidden + whole])) == hidden + whole
            np.add.at(visited[i], numbers[: hidden + whole], 1)
            full[i, numbers[hidden : hidden + whole]] = True
        return visited, full
    for i, (begin, first, last, stop) in enumerate(ranges):
        assert 0 <= begin <= first <= last <= stop <= other or begin >= stop, (begin, first, last, stop)
        # The loops of `_site.Site._walk`.
        visited[i, first:last] += 1
        full[i, first:last] = True
        before = first - begin
        for n in range(before + (stop - last)):
            visited[i, begin + n if n < before else begin + n + (last - first)] += 1
    return visited, full


def of_band(schedule, cut, along):
    count = cut.row_tiles if along == "keys" else cut.column_tiles
    run = jax.vmap(lambda i: jnp.stack([jnp.int32(x) for x in bounds(schedule, cut, i, along)]))
    return np.asarray(run(jnp.arange(count, dtype=jnp.int32)))


def truth(visible, cut):
    """Per tile: whether it holds a visible pair, and whether all its pairs are visible."""
    some = np.zeros((cut.row_tiles, cut.column_tiles), bool)
    every = np.zeros_like(some)
    for i in range(cut.row_tiles):
        for j in range(cut.column_tiles):
            tile = visible[..., i * cut.rows : (i + 1) * cut.rows, j * cut.columns : (j + 1) * cut.columns]
            some[i, j], every[i, j] = tile.any(), tile.all()
    return some, every


def verify(call, cut, exact=False):
    """Every visible pair is visited, once; what is called full hides nothing, and its keys exist."""
    arrays = [jnp.asarray(getattr(call, name), "float32") for name in ("query", "key", "value")]
    mask = call.mask.object() if call.mask is not None else None
    given = {
        name: jax.tree.map(jnp.asarray, getattr(call, name))
        for name in ("query_seq_lengths", "key_value_seq_lengths", "segment_ids")
        if getattr(call, name) is not None
    }
    prepared, operands = prepare(
        *arrays, None, mask, is_causal=call.is_causal, local_window_size=call.local_window_size,
        causal_alignment=call.causal_alignment, **given,
    )  # fmt: skip
    program = lower(prepared, operands, functions=True)
    steps = program.mask
    if not steps:
        assert call.visible().all()
        return None
    along_keys, along_queries = schedules(steps, cut, program.arrays(operands), 1)
    visible = call.visible()
    for entry in range(B):
        some, every = truth(visible[entry], cut)
        ragged = np.arange(cut.column_tiles) >= cut.S // cut.columns
        for schedule, along in ((along_keys, "keys"), (along_queries, "queries")):
            visited, full = tiles_of(schedule, cut, along, entry)
            if along == "queries":
                visited, full = visited.T, full.T
            assert visited.max(initial=0) <= 1
            assert (visited[some] == 1).all(), f"{along}, entry {entry}: a visible pair is left out"
            assert every[full].all(), f"{along}, entry {entry}: a full tile hides something"
            assert not full[:, ragged].any(), f"{along}, entry {entry}: a full tile reaches beyond the keys"
            if exact:
                np.testing.assert_array_equal(visited, some)
                np.testing.assert_array_equal(full, every & ~ragged)
    return along_keys


def call_of(T, S, **options):
    return Call(
        query=np.zeros((B, T, N, 1)), key=np.zeros((B, S, N, 1)), value=np.zeros((B, S, N, 1)), **options
    )


# ----------------------------------------------------------------------------------------------------------
# Masks by chance


def every_third(b, h, q, k):
    return (q // 16 + k // 16) % 3 == 0


def far(b, h, q, k):
    return abs(q - k) > 20


def before(b, h, q, k):
    return k <= q + 3


def of_head(b, h, q, k, reach):
    return (k - q <= reach[h]) & (q - k <= 30)


def of_entry(b, h, q, k):
    return k > q + b


def leaf(rng, T, S):
    kind = rng.integers(12)
    if kind == 0:
        return masks.Causal(rng.choice(["top_left", "bottom_right"]).item())
    if kind == 1:
        sides = [None if x > 25 else int(x) for x in rng.integers(0, 40, 2)]
        return masks.SlidingWindow(*sides, rng.choice(["top_left", "bottom_right"]).item())
    if kind == 2:
        return masks.BlockDiagonal(int(rng.integers(1, 50)))
    if kind == 3:
        return masks.PrefixLM(rng.integers(0, S + 1, B))
    if kind in (4, 5):
        ids = rng.integers(-1, 4, (B, T)), rng.integers(-1, 4, (B, S))
        return masks.Segments(*(np.sort(x, -1) for x in ids) if kind == 4 else ids)
    if kind == 6:
        return masks.Padding(rng.integers(0, S + 1, B))
    if kind == 7:
        return masks.Padding(rng.integers(0, S, (B, 1)) > np.arange(S))
    if kind == 8:
        shape = [int(rng.choice([1, n])) for n in (B, N, T, S)]
        coarse = rng.random((*shape[:2], *(math.ceil(n / 16) for n in shape[2:]))) < 0.5
        return masks.Dense(coarse.repeat(16, 2).repeat(16, 3)[:, :, : shape[2], : shape[3]])
    if kind == 9:
        return masks.Dense(rng.random((1, 1, T, S)) < 0.02)
    if kind == 10:
        return masks.MaskFunction([every_third, far, before, of_entry][rng.integers(4)])
    return masks.MaskFunction(of_head, rng.integers(-5, 30, N))


def nested(rng, T, S, depth=2):
    if depth == 0 or rng.random() < 0.25:
        return leaf(rng, T, S)
    kind = rng.integers(5)
    if kind == 0:
        return ~nested(rng, T, S, depth - 1)
    join = operator.and_ if kind < 3 else operator.or_
    return join(nested(rng, T, S, depth - 1), nested(rng, T, S, depth - 1))


def sizes(rng):
    T, S = (int(x) for x in rng.integers(17, 100, 2))
    return (T, T) if rng.random() < 0.3 else (T, S)


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 400))]
)
def test_masks_by_chance(seed):
    rng = np.random.default_rng(seed)
    T, S = sizes(rng)
    mask = nested(rng, T, S, depth=int(rng.integers(0, 4)))
    rows, columns = CUTS[rng.integers(len(CUTS))]
    verify(call_of(T, S, mask=mask), Cut(T, S, rows, columns))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_lengths(cut):
    lengths = {"query_seq_lengths": np.array([0, 40, 70]), "key_value_seq_lengths": np.array([33, 0, 80])}
    for names in (["query_seq_lengths"], ["key_value_seq_lengths"], lengths):
        call = call_of(70, 80, **{name: lengths[name] for name in names})
        verify(call, Cut(70, 80, *cut), exact=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mask", ["segments", "block diagonal", "prefix", "table"])
def test_no_tile_is_visited_for_nothing(mask, cut):
    """Where the mask's own structure names its tiles: exactly those that hold something."""
    T = 80
    made = {
        # The same documents for both axes, each longer than a tile: extremes of ids say all.
        "segments": masks.Segments(np.arange(T)[None].repeat(B, 0) // 32),
        "block diagonal": masks.BlockDiagonal(32),
        "prefix": masks.PrefixLM([0, 40, 80]),
        "table": masks.MaskFunction(every_third),
    }[mask]
    found = verify(call_of(T, T, mask=made), Cut(T, T, *cut), exact=True)
    assert found.kind in ("ranges", "table")


def test_a_table_where_the_tiles_are_no_range():
    found = verify(call_of(96, 96, mask=masks.MaskFunction(every_third)), Cut(96, 96, 16, 16), exact=True)
    assert found.kind == "table"
    assert found.array.shape == (6, 2 + 2)  # two of the six key tiles for each


def test_arrays_that_are_not_known_when_a_program_is_traced():
    """Ranges are then computed by the program, with a batch axis of size 1 where the entries are alike."""

    @jax.jit
    def run(ids):
        steps = (MaskStep(MaskOp.SEGMENTS, 0, 0),)
        return [s.array for s in schedules(steps, Cut(64, 64, 16, 16), [ids], 1)]

    ids = np.arange(64)[None] // 32
    for array in run(jnp.asarray(ids, jnp.int32)):
        np.testing.assert_array_equal(array, [[[0, 0, 2, 2], [0, 0, 2, 2], [2, 2, 4, 4], [2, 2, 4, 4]]])


# ----------------------------------------------------------------------------------------------------------
# Bands


def band(T, S, low, high):
    distance = np.arange(S) - np.arange(T)[:, None]
    seen = np.ones((T, S), bool)
    if low is not None:
        seen &= distance >= low
    if high is not None:
        seen &= distance <= high
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_bounds_of_bands(seed):
    """Exactly the tiles that hold something, and exactly those that hold nothing else."""
    rng = np.random.default_rng(seed)
    T, S = sizes(rng)
    low, high = sorted(int(x) for x in rng.integers(1 - T, S, 2))
    low, high = (None if rng.random() < 0.3 else low), (None if rng.random() < 0.3 else high)
    some_of_all = band(T, S, low, high)
    for rows, columns in CUTS:
        cut = Cut(T, S, rows, columns)
        _, every = truth(some_of_all, cut)
        every &= np.arange(cut.column_tiles) < S // columns
        for along in ("keys", "queries"):
            # What is walked counts in whole tiles: the band goes on where the positions end.
            T_, S_ = (T, cut.column_tiles * columns) if along == "keys" else (cut.row_tiles * rows, S)
            some, _ = truth(band(T_, S_, low, high), cut)
            visited, full = tiles_of(Schedule("band", low, high), cut, along, 0)
            if along == "queries":
                visited, full = visited.T, full.T
            np.testing.assert_array_equal(visited, some, err_msg=f"{along} {cut} {low} {high}")
            np.testing.assert_array_equal(full, every, err_msg=f"{along} {cut} {low} {high}")


@pytest.mark.parametrize(("T", "S"), [(40, 40), (20, 70), (70, 20), (65, 64)])
def test_causal_masks_and_windows_are_bands(T, S):
    for options in (
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"local_window_size": (9, 3)},
        {"is_causal": True, "local_window_size": (9, None)},
        {"mask": masks.MaskFunction(before)},
    ):
        for rows, columns in CUTS:
            found = verify(call_of(T, S, **options), Cut(T, S, rows, columns))
            assert found is None or found.kind == "band"


# ----------------------------------------------------------------------------------------------------------
# Functions of query and key index


def window(left, right, b, h, q, k):
    return (k - q <= right) & (q - k <= left)


def nothing(b, h, q, k):
    return False


def everything(b, h, q, k):
    return True


def two_bands(b, h, q, k):
    return (k - q == 2) | (k - q == -3)


def one_pair_less(b, h, q, k):
    return (k <= q) & ~((q == 30) & (k == 11))


def one_pair_more(b, h, q, k):
    return (k <= q) | ((q == 30) & (k == 35))


FUNCTIONS = {
    "causal": (lambda b, h, q, k: q >= k, True),
    "window": (functools.partial(window, 7, 2), True),
    "one diagonal": (functools.partial(window, 0, 0), True),
    "beyond": (functools.partial(window, -10, 30), True),
    "nothing": (nothing, True),
    "everything": (everything, True),
    "two bands": (two_bands, False),
    "one pair less": (one_pair_less, False),
    "one pair more": (one_pair_more, False),
    "stripes": (lambda b, h, q, k: k % 2 == 0, False),
}


def by_pairs(fn, T, S):
    q, k = np.arange(T, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)[None]
    return np.broadcast_to(np.asarray(fn(0, 0, q, k)), (T, S))


@pytest.mark.parametrize(("T", "S"), [(40, 50), (70, 40), (1, 9), (9, 1), (1, 1), (129, 130)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_band(name, T, S):
    fn, always = FUNCTIONS[name]
    seen = by_pairs(fn, T, S)
    distance = np.arange(S) - np.arange(T)[:, None]
    low, high = (distance[seen].min(), distance[seen].max()) if seen.any() else (1, 0)
    is_band = (seen == ((distance >= low) & (distance <= high))).all()
    assert is_band or not always
    got = as_band(fn, T, S)
    if not is_band:
        assert got is None
    elif seen.any():
        assert got == (low, high)
    else:
        assert got[0] > got[1]


def test_too_many_pairs_are_not_looked_at():
    assert as_band(everything, 2**17, 2**15) is None


def test_a_band_without_a_bound_on_one_side():
    cut = Cut(64, 64, 16, 16)
    found, other = schedules((MaskStep(MaskOp.BAND, -NO_BOUND, 0),), cut, [], 1)
    assert found == other == Schedule("band", None, 0)
    assert not found.everything
    assert schedules((), cut, [], 1)[0].everything


def test_the_oracle_agrees_about_sizes():
    """`call_of` and `Sizes` mean the same call."""
    assert call_of(5, 7).sizes == Sizes((B,), 5, 7, N, N)
