"""Shared set-up: eight CPU devices for the sharding tests, and no randomness in hypothesis.

On a GPU: `PROBJAX_TEST_PLATFORM=cuda PROBJAX_TEST_IMPLEMENTATIONS=triton,cudnn pytest tests/attention`.
"""

import os
import sys
from pathlib import Path

PLATFORM = os.environ.get("PROBJAX_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu"
# Has to be set before JAX makes its first device; programs without a mesh still use one device only. Most of
# the tests' time is compiling: without LLVM's optimisations (XLA's own stay on) it is a quarter less.
if PLATFORM == "cpu":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0"
    ).strip()
else:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

if PLATFORM != "cpu":  # tests compare with float64; there the default is one pass of TF32
    jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile(
    "probjax",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("probjax")


@pytest.fixture
def x64():
    """Run the test with 64-bit types."""
    with jax.enable_x64(True):
        yield
