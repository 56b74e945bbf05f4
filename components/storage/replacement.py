"""Replacement: a file or folder that takes another's place in one step, or not at all.

It is filled under a temporary name beside its target and renamed when whole, so a crash, a signal or a full disk leaves
the earlier content as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from configs.failure import BadConfig, BadData, Failure

UNFINISHED = ".tmp~"
"""Names that start with it are replacements still being filled, or left by a process that was killed."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """A path beside `target` to fill with a file or folder, which then takes its place; gone when anything fails.

    Raises:
        BadConfig: the disk is full, or this user may not write there.
    """
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        unfinished = unfinished_beside(target)
        try:
            yield unfinished
            _install(unfinished, target)
        finally:
            # After an exchange it holds the earlier content; after a failure, what was written so far.
            _remove(unfinished)
        _sync_folder(target.parent)


def unfinished_beside(target: Path) -> Path:
    """A fresh temporary name beside `target` that tells which process of which host made it."""
    host = socket.gethostname()
    return target.parent / f"{UNFINISHED}{target.name}~{host}~{os.getpid()}~{secrets.token_hex(4)}"


def _remove_abandoned(target: Path) -> None:
    """Remove what processes of this machine that no longer live left beside `target` (kill -9 in mid-upload)."""
    for path in target.parent.glob(f"{glob.escape(UNFINISHED + target.name)}~{socket.gethostname()}~*"):
        process = path.name.split("~")[-2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _install(unfinished: Path, target: Path) -> None:
    """Give `target` the content of `unfinished`, whatever kind either is."""
    if not target.is_dir() and not unfinished.is_dir():
        unfinished.replace(target)
        return
    if unfinished.is_dir():
        for folder, _, _ in os.walk(unfinished):
            _sync_folder(Path(folder))
    if not target.exists():
        unfinished.rename(target)
    elif not _exchange(unfinished, target):
        # A file system without an atomic exchange (NFS, Lustre): absent for the moment between two renames.
        earlier = unfinished_beside(target)
        target.rename(earlier)
        unfinished.rename(target)
        _remove(earlier)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths atomically with renameat2(2); False where kernel, libc or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(one))


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses inside into the sentence for the user.

    Args:
        path: Place to name where the error names none.

    Raises:
        BadData: something is missing.
        BadConfig: it is not accessible, is of another kind, or the disk is full.
    """
    try:
        yield
    except OSError as error:
        named = str(error.filename or "")
        failure = _failure(error, Path(named) if named and UNFINISHED not in named else path)
        if failure is None:
            raise
        raise failure from None


def _failure(error: OSError, path: Path) -> Failure | None:
    reason = error.strerror
    match error.errno:
        case errno.ENOENT:
            return BadData(f"{path.as_uri()}: no such file or folder; check the URI")
        case errno.ENOSPC | errno.EDQUOT:
            return BadConfig(
                f"{path}: the disk is full ({reason}); nothing written earlier was lost, so free space there"
                " (`df -h` tells how much) or set storage.root elsewhere, and resume"
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return BadConfig(f"{path}: is not accessible ({reason}); allow this user there or choose another location")
        case errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ELOOP | errno.ENAMETOOLONG:
            return BadConfig(f"{path}: cannot be used as a location ({reason}); choose another path")
        case _:
            return None


def sync(writer: IO[bytes]) -> None:
    """Bring what was written onto the disk."""
    writer.flush()
    os.fsync(writer.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
