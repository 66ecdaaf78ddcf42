"""Samples in turn, their length, and peers that break."""

import math
import time

import pytest

from probjax.bench.measure import (
    MIN_SAMPLES,
    Deadline,
    Failed,
    OutOfTime,
    Prepared,
    Samples,
    choose_inner,
    describe,
    drain,
    interleave,
    quartiles,
)


def peer(name, log, seconds=1.0, breaks_at=None):
    calls = []

    def run(repetitions):
        calls.append(repetitions)
        if breaks_at is not None and len(calls) > breaks_at:
            raise Failed("it broke")
        log.append(name)
        return seconds * repetitions

    return Prepared(name, run)


def test_samples_are_taken_in_rotating_order():
    log = []
    peers = [peer(name, log) for name in "abc"]
    samples, broken = interleave(peers, repeats=4, min_sample_s=0.1, deadline=Deadline(None))
    assert "".join(log) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert not broken
    assert all(sample.seconds == [1.0] * 4 and sample.inner == 1 for sample in samples.values())


def test_short_calls_are_repeated_and_warmed_up():
    log = []
    samples, _ = interleave(
        [peer("a", log, seconds=1e-3)], repeats=2, min_sample_s=0.02, deadline=Deadline(None)
    )
    assert samples["a"].inner >= 20
    assert samples["a"].seconds == pytest.approx([1e-3] * 2)
    assert len(log) > 4


def test_inner_makes_a_sample_long_enough_and_stays_bounded():
    assert choose_inner(lambda n: 1.0 * n, 0.02) == (1, 1.0)
    assert 20 <= choose_inner(lambda n: 1e-3 * n, 0.02)[0] <= 25
    # The first call is slow: it must not make the sample short.
    assert choose_inner(lambda n: 0.01 + 1e-4 * n, 0.02)[0] * 1e-4 + 0.01 >= 0.02
    assert choose_inner(lambda n: 0.0, 0.02) == (1000, 0.0)


def test_a_peer_that_breaks_does_not_stop_the_others():
    log = []
    peers = [peer("good", log), peer("bad", log, breaks_at=2), peer("other", log)]
    samples, broken = interleave(peers, repeats=5, min_sample_s=0.1, deadline=Deadline(None))
    assert broken == {"bad": "it broke"}
    assert set(samples) == {"good", "other"}
    assert all(len(sample.seconds) == 5 for sample in samples.values())


def test_a_spent_budget_ends_the_rounds_but_leaves_enough_samples():
    samples, _ = interleave(
        [peer("a", [])], repeats=50, min_sample_s=0.1, deadline=Deadline(60.0, time.monotonic())
    )
    assert len(samples["a"].seconds) == 50

    class Ending(Deadline):
        def left(self):
            return 0.0

        def check(self):
            pass

    samples, _ = interleave([peer("a", [])], repeats=50, min_sample_s=0.1, deadline=Ending(None))
    assert len(samples["a"].seconds) == MIN_SAMPLES
    with pytest.raises(OutOfTime):
        interleave([peer("a", [])], repeats=2, min_sample_s=0.1, deadline=Deadline(1.0, time.monotonic() - 2))


def test_columns():
    columns = Samples(3, 0.0, [4e-3, 1e-3, 2e-3, 3e-3, 5e-3]).columns()
    assert columns == {
        "inner": 3, "median_ms": pytest.approx(3), "q1_ms": pytest.approx(2), "q3_ms": pytest.approx(4),
        "min_ms": pytest.approx(1), "samples": 5,
    }  # fmt: skip
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_deadline():
    assert Deadline(None).left() == math.inf
    assert Deadline(5.0, time.monotonic() - 3).left() == pytest.approx(2, abs=0.5)
    with pytest.raises(OutOfTime):
        Deadline(1.0, time.monotonic() - 2).check()


def test_drain_returns_in_an_idle_process_and_gives_up_in_a_busy_one():
    drain()
    begin = time.monotonic()
    drain(limit_s=0.01)
    assert time.monotonic() - begin < 5


def test_errors_become_one_short_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(Failed("only this")) == "only this"
    assert describe(MemoryError()) == "MemoryError"
    assert len(describe(ValueError("x" * 1000))) == 300
