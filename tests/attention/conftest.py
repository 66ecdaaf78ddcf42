"""Every attention test that takes `implementation` runs once for each of them.

Compiling dominates the time of these tests. So of the cases on `reference` and `dense`, which share masks or
tile mathematics with the others, the quick suite runs every third of each test function; the rest are marked
slow. `make test-all` runs them all.
"""

from collections import defaultdict

import pytest

from oracle import IMPLEMENTATIONS

THINNED = {"reference": 0, "dense": 1}
EVERY = 3


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = callspec.params.get("implementation") if callspec is not None else None
        if name in THINNED:
            cases[item.path, item.originalname, name].append(item)  # type: ignore[attr-defined]
    for (_, _, name), same in cases.items():
        kept = THINNED[name] if len(same) > THINNED[name] else 0
        for number, item in enumerate(same):
            if number % EVERY != kept:
                item.add_marker(pytest.mark.slow)
