"""Files that survive a power cut: written aside, flushed, renamed. And one line for what the system refuses."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from pipeline.errors import RunError, UserError

_CHUNK = 1 << 20

_REASONS = {
    errno.ENOSPC: "no space is left on its disk; free some and start again",
    errno.EDQUOT: "the disk quota is used up; free some space and start again",
    errno.EFBIG: "the file would be larger than the system allows; raise the limit (ulimit -f) and start again",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "part of the path is not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk reports an input/output error",
    errno.ESTALE: "the network file system lost the file (stale handle)",
    errno.ELOOP: "its symbolic links run in a circle",
}


def refuse_existing(path: Path) -> None:
    """Raise RunError where there is something at ``path`` already."""
    if path.exists() or path.is_symlink():
        raise RunError(f"{path} exists already; choose a new folder")


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Force the file's content onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Force the folder's entries (new names, renames) onto the disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder and do not need it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file such that a reader, or a crash, sees either the old content or the whole new one.

    Args:
        path: where the file goes; its folder must exist.
        data: the content; text is encoded as UTF-8.
    """
    target = Path(path)
    # The process's number keeps two writers apart; the leading dot keeps globs from picking the file up.
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(aside, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content in hexadecimal, reading it piece by piece."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe_os_error(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """Return one line that says which file the system refused, why, and what would help.

    Args:
        error: what the system reported.
        path: the file meant; by default the one that the error names.
    """
    name = path if path is not None else error.filename
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error) or type(error).__name__
    return f"{os.fspath(name)}: {reason}" if name is not None else reason


def as_user_error(error: OSError, path: str | os.PathLike[str] | None = None) -> UserError:
    """Return the system's error as a UserError with one line, see ``describe_os_error``."""
    return UserError(describe_os_error(error, path))
