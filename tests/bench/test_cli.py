"""The command line as a user runs it, in processes of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest
from bench_helpers import TINY, load

from probjax.bench.attention.config import AttentionConfig
from probjax.cli import main


def words(fields):
    found = []
    for name, value in fields.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [flag, str(value)]
    return found


def probjax(*arguments, cwd, timeout=120, **more):
    return subprocess.run(
        [sys.executable, "-m", "probjax.cli", *arguments],
        cwd=cwd, timeout=timeout, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}, **more,
    )  # fmt: skip


def test_a_run_prints_a_table_and_no_progress_bar_and_writes_the_default_file(tmp_path):
    fields = {**TINY, "impls": "jax_xla", "variants": "causal"}
    done = probjax("bench", "attention", *words(fields), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "variant causal, mode fwdbwd" in done.stdout
    assert "\x1b" not in done.stdout
    assert "%" not in done.stdout
    assert len(load(tmp_path / "attention_cpu.json")["results"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_cells_measured_so_far(tmp_path, fake_torch, number):
    # Far more lengths than can be measured before the signal comes.
    fields = {
        **TINY,
        "seqs": ",".join(map(str, range(8, 800))),
        "impls": "jax_xla,torch_sdpa",
        "variants": "plain",
    }
    fields |= {"output": "out.json", "torch_python": fake_torch}
    path = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "probjax.cli", "bench", "attention", *words(fields)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (path.exists() and len(load(path)["results"]) >= 4):
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    data = load(path)
    assert len(data["results"]) >= 4
    assert len(data["results"]) % 2 == 0
    assert data["runs"][0]["interrupted"] is True
    assert all(row["status"] == "ok" for row in data["results"])
    assert "jax_xla" in out
    assert "written: out.json" in out
    # The same command with --append goes on where it stopped.
    some = ",".join(map(str, range(8, 12)))
    again = probjax("bench", "attention", *words({**fields, "seqs": some, "append": True}), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    grown = load(path)["results"]
    assert grown[: len(data["results"])] == data["results"]
    assert {8, 9, 10, 11} <= {row["seq"] for row in grown}


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("probjax ")


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["bench", "--help"],
        ["bench", "attention", "--help"],
        ["report", "--help"],
        ["info", "--help"],
    ],
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: probjax" in text
    if "attention" in command:
        for name in AttentionConfig().header():
            assert "--" + name.replace("_", "-") in text
        assert "default: 128, 512, 1024, 2048" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "attention", "--seqs", "1,two"], "--seqs: got '1,two'"),
        (["bench", "attention", "--max-fit"], "wanted one, such as --memory-limit 4G"),
        (["bench", "attention", "--device", "tpu"], "--device: got 'tpu'"),
        (["bench", "attention", "--nonsense"], "--nonsense"),
        (["bench", "attention", "--torch-python", "no/such/python"], "--torch-python: got no/such/python"),
        (["bench", "nothing"], "attention"),
        (["dance"], "bench"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_named_and_end_with_status_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_continued_is_an_error(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("not json")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "attention", "--impls", "jax_xla", "--append", "--output", str(path)])
    assert caught.value.code == 2
    assert "no JSON" in capsys.readouterr().err
    assert path.read_text() == "not json"


def test_info_tells_machine_versions_and_peers(capsys, monkeypatch, fake_torch):
    assert main(["info", "--torch-python", str(fake_torch)]) == 0
    text = capsys.readouterr().out
    for topic in ("processor", "cores", "memory", "jax ", "jaxlib", "numpy", "flax", "devices", "attention"):
        assert topic in text
    assert "fake in Python 0" in text
    monkeypatch.setenv("PROBJAX_TORCH_PYTHON", "/no/such/python")
    assert main(["info"]) == 0
    assert "is no program" in capsys.readouterr().out


def test_report_calls_the_report_module(tmp_path, capsys, monkeypatch):
    import probjax.bench.report as report

    seen = []
    monkeypatch.setattr(report, "write_report", lambda paths, output: seen.append((paths, output)))
    assert main(["report", "a.json", "b.json", "-o", "r.html"]) == 0
    ((paths, output),) = seen
    assert [str(path) for path in paths] == ["a.json", "b.json"]
    assert str(output) == "r.html"


def test_report_of_a_missing_file_is_an_error_without_traceback(tmp_path, capsys):
    try:
        status = main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "r.html")])
    except SystemExit as error:
        status = error.code
    assert status in (1, 2)
    assert "none.json" in capsys.readouterr().err


def test_the_command_line_starts_without_the_peers():
    code = (
        "import sys, probjax.cli as c; c.build_parser(); print('flax' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
