"""Every attention test that takes `implementation` runs once for each of them."""

import pytest

from oracle import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param
