"""Shared set-up: eight CPU devices for the sharding tests, and no randomness in hypothesis."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Has to be set before JAX makes its first device; programs without a mesh still use one device only. Most of
# the tests' time is compiling: without LLVM's optimisations (XLA's own stay on) it is a quarter less.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0"
).strip()
sys.path.insert(0, str(Path(__file__).parent))

import hypothesis
import jax
import pytest

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
