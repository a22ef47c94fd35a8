"""Runs that tests of the analysis share."""

import pytest
from support import record_and_train


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a recording and a training by its plan."""
    folder = tmp_path_factory.mktemp("analyzed")
    record_and_train(folder / "first run", folder / "second")
    return folder
