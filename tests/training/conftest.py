import pytest

from tests.support import prepare_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder of a small prepared corpus of bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    prepare_data(folder)
    return folder / "data"
