"""What a run prints."""

from probjax.bench.table import print_list, print_reasons, print_rows, print_summary

GROUP, PEERS = ("variant",), ("jax_xla", "torch_sdpa")


def row(impl, seq, median, run=0, **more):
    times = {
        "median_ms": median,
        "q1_ms": median * 0.9,
        "q3_ms": median * 1.1,
        "rel_err": 3e-7,
        "status": "ok",
    }
    return {"variant": "causal", "impl": impl, "seq": seq, "run": run, "tag": None, **times, **more}


def lines(console):
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]


def test_rows_show_times_quartiles_and_ratios_within_the_run(console):
    rows = [row("ours", 512, 2.0), row("jax_xla", 512, 8.0), row("torch_sdpa", 512, 1.0, run=1)]
    print_rows(console, rows, group=GROUP, line=("seq",), peers=PEERS)
    shown = lines(console)
    assert ["512", "ours", "2.00", "1.80-2.20", "4.00x", "3e-07"] in shown
    # torch was measured in another run: no ratio to it.
    assert ["jax_xla", "8.00", "7.20-8.80", "1.00x", "3e-07"] in shown
    assert any(line[0] == "torch_sdpa" and "1.00x" in line for line in shown)


def test_a_narrow_terminal_leaves_out_error_and_memory_but_no_figure_of_time(console):
    console.width = 78
    print_rows(console, [row("probjax_default", 512, 1234.5)], group=GROUP, line=("seq",), peers=PEERS)
    text = console.file.getvalue()
    assert "…" not in text
    assert "1111-1358" in text
    assert "3e-07" not in text


def test_what_ran_behind_the_default_is_named(console):
    rows = [
        row("probjax_default", 512, 2.0, implementation="tiled"),
        row("xla_tiled", 512, 2.0, implementation="tiled"),
    ]
    print_rows(console, rows, group=GROUP, line=("seq",), peers=PEERS)
    text = console.file.getvalue()
    assert "probjax_default (tiled)" in text
    assert "xla_tiled (tiled)" not in text


def test_broken_rows_are_shown_and_unavailable_ones_only_with_their_reason(console):
    rows = [
        row("jax_xla", 512, 1.0),
        {"variant": "causal", "impl": "bad", "seq": 512, "status": "error", "reason": "it [broke]"},
        {"variant": "causal", "impl": "absent", "seq": 512, "status": "unavailable", "reason": "not here"},
        {"variant": "causal", "impl": "absent", "seq": 1024, "status": "unavailable", "reason": "not here"},
    ]
    print_rows(console, rows, group=GROUP, line=("seq",), peers=PEERS)
    table = console.file.getvalue()
    assert "bad" in table
    assert "absent" not in table
    print_reasons(console, rows)
    text = console.file.getvalue()
    assert "bad: error in 1 cell: it [broke]" in text
    assert "absent: unavailable in 2 cells: not here" in text


def test_summary_has_one_column_per_length(console):
    rows = [row("us", seq, 1.0) for seq in (512, 1024)] + [
        row("jax_xla", seq, seq / 256) for seq in (512, 1024)
    ]
    print_summary(console, rows, group=GROUP, column="seq", impl="us", peers=PEERS)
    shown = lines(console)
    assert ["jax_xla", "causal", "2.00x", "4.00x"] in shown
    assert "torch_sdpa" not in console.file.getvalue()


def test_summary_without_own_times_prints_nothing(console):
    print_summary(console, [row("jax_xla", 512, 1.0)], group=GROUP, column="seq", impl="us", peers=PEERS)
    assert console.file.getvalue() == ""


def test_lists(console):
    rows = [
        {"impl": "a", "max_seq": 4096, "tried": {"8192": "memory", "4096": "fits"}, "status": "ok"},
        {"impl": "b", "max_seq": None, "tried": {}, "status": "unavailable"},
    ]
    print_list(console, rows, title="max_fit", columns=("impl", "max_seq", "tried", "reason"))
    text = console.file.getvalue()
    assert "8192 memory, 4096 fits" in text
    assert "reason" not in text
    assert " b " not in text
