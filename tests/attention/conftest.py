"""Every attention test that takes `implementation` runs once for each of them.

Compiling dominates the time of these tests. So of the cases on `reference` and `dense`, which share masks or
tile mathematics with the others, the quick suite runs every sixteenth of each test function, and of functions
with one case every other; of the GPU kernels in Pallas's interpreter, every fourth. The rest are marked slow;
`make test-all` runs them all.
"""

from collections import defaultdict

import jax
import pytest

from oracle import PARAMETERS

THINNED = {"reference": 0, "dense": 1}
EVERY = 16
EVERY_KERNEL = 4
INTERPRETED = ("test_triton.py", "test_cudnn.py")
# What these may decline where they are named; any other refusal fails.
_LIMITS = ("call: float64", "is float64; cast it", "more than 256", "the program is exported")
DECLINES = {
    "triton": _LIMITS,
    "interpret": _LIMITS,
    "cudnn": ("'cudnn' cannot run this call",),  # it takes plain and causal calls of half types only
}


@pytest.fixture(params=PARAMETERS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of a module are of no use to the next one, and there are hundreds of megabytes."""
    yield
    jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "score_function: with a function of the score, which the C++ kernels cannot call"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """The GPU kernels decline some calls (float64, say), and nothing falls back where they are named."""
    try:
        return (yield)
    except NotImplementedError as error:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if any(text in str(error) for text in DECLINES.get(params.get("implementation"), ())):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    kept, dropped = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = callspec.params.get("implementation") if callspec is not None else None
        if name in THINNED:
            cases[item.path, item.originalname, name].append(item)  # type: ignore[attr-defined]
        impossible = name == "native" and item.get_closest_marker("score_function")
        (dropped if impossible else kept).append(item)
    kernels = defaultdict(list)
    for item in kept:
        if item.path.name in INTERPRETED:
            kernels[item.path, item.originalname].append(item)  # type: ignore[attr-defined]
    for same in kernels.values():
        for number, item in enumerate(same):
            if number % EVERY_KERNEL:
                item.add_marker(pytest.mark.slow)
    functions: dict = {}
    for (path, function, name), same in cases.items():
        turn = functions.setdefault((path, function), len(functions))
        for number, item in enumerate(same):
            left_out = turn % 2 != THINNED[name] if len(same) == 1 else number % EVERY != THINNED[name]
            if left_out:
                item.add_marker(pytest.mark.slow)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)
