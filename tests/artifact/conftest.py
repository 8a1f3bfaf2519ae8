"""An artifact for each test that damages it."""

import pytest
from small_artifact import write


@pytest.fixture
def artifact(tmp_path):
    write(tmp_path / "a")
    return tmp_path / "a"
