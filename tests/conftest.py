"""Options and fixtures that all tests share."""

from pathlib import Path

import hypothesis
import pytest

from benchmarks.fetch_model import fetch

# The same examples on every run; `make soak` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be rewritten from what the code gives now."""
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests run from."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A real model, 98 MB, fetched once a machine; fails, not skips, when it cannot be had."""
    return fetch()
