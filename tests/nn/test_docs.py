"""The user page's example runs and says what it promises."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recurrent-cells.md"


def test_the_example_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in said] == ["True"] * 3
    assert float(names["loss"]) > 0


def test_the_examples_of_the_models_run(capsys):
    page = PAGE.with_name("models.md")
    for code in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        exec(compile(code, str(page), "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in said] == ["True"] * 4
