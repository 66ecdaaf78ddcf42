"""The loop over cells: guesses of durations, and rows that break where nobody expects it."""

import io
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from probjax.bench.measure import Deadline, Failed, Prepared, Skipped, Unavailable, check_stop
from probjax.bench.runner import Bar, CostModel, interruptible, measure_cell


def cell(work=1.0, kind=("fwd",)):
    return SimpleNamespace(work=work, kind=kind, title="a cell", columns=lambda: {"seq": 1})


def test_durations_are_guessed_from_cells_of_the_same_kind():
    costs = CostModel()
    assert costs.guess(cell(5.0)) == 0.0
    costs.learn(cell(1.0), 10.0)
    # One known cell: half of its time is taken as constant.
    assert costs.guess(cell(3.0)) == pytest.approx(5 + 15)
    assert costs.guess(cell(3.0, kind=("fwdbwd",))) == pytest.approx(20)
    costs.learn(cell(2.0), 12.0)
    assert costs.guess(cell(4.0)) == pytest.approx(16)
    assert costs.guess(cell(1.0)) == pytest.approx(10)
    costs.learn(cell(1.0, kind=("fwdbwd",)), 100.0)
    assert costs.guess(cell(1.0, kind=("fwdbwd",))) == pytest.approx(100)


def test_a_faster_larger_cell_does_not_make_guesses_negative():
    costs = CostModel()
    costs.learn(cell(1.0), 10.0)
    costs.learn(cell(2.0), 5.0)
    assert costs.guess(cell(100.0)) == pytest.approx(5.0)


class Suite:
    """Row labels are what happens to them."""

    def prepare(self, impl, cell):
        raised = {
            "unavailable": Unavailable("not here"),
            "skipped": Skipped("left out"),
            "not implemented": NotImplementedError("dropout_rate"),
            "broken": ValueError("bad shape"),
            "surprise": KeyError("a bug in the benchmark"),
        }
        if impl in raised:
            raise raised[impl]
        return Prepared(impl, lambda n: 1.0 * n, {"lower_compile_s": 0.5})

    def check(self, cell, prepared):
        if prepared.impl == "wrong":
            raise Failed("the result is wrong")
        return {"rel_err": 1e-7}


def measure(*impls):
    bar = Bar(Console(file=io.StringIO()), [1.0])
    settings = SimpleNamespace(repeats=3, min_sample_ms=1.0)
    rows = measure_cell(
        Suite(), cell(), impls, settings=settings, deadline=Deadline(None), bar=bar, shared={"tag": "t"}
    )
    return {row["impl"]: row for row in rows}


def test_every_row_gets_a_status():
    rows = measure("unavailable", "good", "skipped", "not implemented", "broken", "wrong")
    assert {name: row["status"] for name, row in rows.items()} == {
        "unavailable": "unavailable", "good": "ok", "skipped": "skipped", "not implemented": "unavailable",
        "broken": "error", "wrong": "error",
    }  # fmt: skip
    assert list(rows) == ["unavailable", "good", "skipped", "not implemented", "broken", "wrong"]
    assert rows["broken"]["reason"] == "ValueError: bad shape"
    assert all(row["tag"] == "t" and row["seq"] == 1 for row in rows.values())
    assert rows["good"]["median_ms"] == 1000
    assert all("median_ms" not in row for name, row in rows.items() if name != "good")


def test_a_bug_of_ours_is_not_hidden_in_a_row():
    with pytest.raises(KeyError):
        measure("surprise")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_python_drops_is_met_later(number):
    results = SimpleNamespace(annotate=lambda **facts: seen.update(facts), save=lambda: None)
    seen = {}

    def swallow():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            return

    with pytest.raises(KeyboardInterrupt), interruptible(results):
        swallow()
        check_stop()
    assert seen["interrupted"] is True
    check_stop()


def test_an_interruption_is_raised_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    results = SimpleNamespace(annotate=lambda **facts: None, save=lambda: None)
    with pytest.raises(KeyboardInterrupt), interruptible(results):
        signal.raise_signal(signal.SIGTERM)
    check_stop()
    assert signal.getsignal(signal.SIGTERM) is before
