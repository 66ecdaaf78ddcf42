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
