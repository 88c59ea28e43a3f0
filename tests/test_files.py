import errno
import hashlib
import os

import pytest

from pipeline import files
from pipeline.errors import UserError


def test_write_atomically_replaces_whole_files(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomically(path, "é")
    assert path.read_bytes() == "é".encode()
    files.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_atomically(path, "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_hash_and_syncs(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * (3 << 20))
    assert files.sha256_file(path) == hashlib.sha256(b"x" * (3 << 20)).hexdigest()
    files.fsync_file(path)
    files.fsync_folder(tmp_path)
    with pytest.raises(OSError, match="directory"):
        files.fsync_folder(path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission denied"),
        (errno.EINTR, "nterrupt"),
    ],
)
def test_errors_of_the_system_are_one_line(number, words):
    error = OSError(number, os.strerror(number), "/data/a.tar")
    assert files.describe_os_error(error).startswith("/data/a.tar: ")
    assert words in files.describe_os_error(error)
    described = files.as_user_error(error, "b.tar")
    assert isinstance(described, UserError)
    assert str(described).startswith("b.tar: ")
    assert files.describe_os_error(OSError(number, "x")) != ""
