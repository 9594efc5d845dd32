"""Write files atomically, and reserve disk space in advance."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dubito.core.errors import FileFormatError, InputError

try:
    import fcntl
except ImportError:  # Windows: without locks, leftover temporary files cannot be told from those in use, so they stay
    fcntl = None  # type: ignore[assignment]

# Seconds after which an unlocked temporary file counts as left over, even if its process id is in use again.
ORPHAN_AGE = 60.0
# Zero bytes that are written at a time if the file system cannot reserve space.
ZEROS = 2**20


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: a reader sees either the old content or the new one, never a part.

    Symbolic links are followed and the permissions of a replaced file are kept. A path that is not a regular file (a
    folder, a device, a pipe) raises an error. Temporary files of killed writers are removed.
    """
    with writing(path) as write:
        write(content)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Callable[[bytes], None]]:
    """Provide a function that writes parts of a file, which is replaced when the block ends without an error.

    See `write_atomic`.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    with _explained(path):
        old = target.stat() if target.exists() else None
        temporary = target.with_name(f"{_prefix(target)}{os.getpid()}.{uuid.uuid4().hex[:8]}")
        # a new file gets the default mode (less the umask); a replacement is private until it has the old file's mode
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            _try_lock(stream.fileno())

            def write(content: bytes) -> None:
                with _explained(path):
                    stream.write(content)

            yield write
            with _explained(path):
                stream.flush()
                os.fsync(stream.fileno())
                if old is not None:
                    _copy_ownership(temporary, old)
                os.replace(temporary, target)
                _remove_orphans(target, now=os.fstat(stream.fileno()).st_mtime)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an error if `path` exists and is neither a regular file nor a link to one."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:  # there is no file yet; other problems show when it is written
        if error.errno == errno.ELOOP:
            raise FileFormatError(f"Cannot write '{path}': it is a symbolic link that leads back to itself.") from error
        return
    except ValueError as error:  # a NUL within the name
        raise FileFormatError(f"Cannot write {str(path)!r}: {error}.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise FileFormatError(f"Cannot write '{path}': it is {what}, not a file; choose another name.")


def check_place(path: str | os.PathLike[str], what: str) -> None:
    """Raise, before any work is done, if no file can be written to `path`; an error says `what` was to be written."""
    target = Path(path)
    try:
        is_folder, has_folder = target.is_dir(), target.resolve().parent.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{what} cannot be written to '{path}': {why}.") from error
    if is_folder or not has_folder:
        problem = "it is a folder" if is_folder else f"the folder '{target.parent}' does not exist"
        raise InputError(f"{what} cannot be written to '{path}': {problem}.")


def reserve(handle: int, size: int) -> None:
    """Allocate `size` bytes on disk for an open file, so that later writes cannot fail because the disk is full.

    The file keeps its content. Raises OSError if there is not enough space.
    """
    try:
        os.posix_fallocate(handle, 0, size)
        return
    except AttributeError:  # a system that has no such call
        pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):  # the file system cannot do it
            raise
    start = os.fstat(handle).st_size
    while start < size:
        start += os.pwrite(handle, bytes(min(ZEROS, size - start)), start)
    os.fsync(handle)  # some file systems report a full disk only here


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the operating system into a `FileFormatError` that names the file."""
    try:
        yield
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL within the name
        raise FileFormatError(f"Cannot write '{path}': {getattr(error, 'strerror', None) or error}.") from error


def _prefix(target: Path) -> str:
    """Return the prefix of a file's temporary files, short enough for names of any allowed length."""
    return f".{target.name[:40]}.dubito-"


def _copy_ownership(temporary: Path, old: os.stat_result) -> None:
    new = temporary.stat()
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with suppress(OSError, AttributeError):  # only root may change the owner
            os.chown(temporary, old.st_uid, old.st_gid)
    os.chmod(temporary, stat.S_IMODE(old.st_mode))


def _try_lock(handle: int) -> bool | None:
    """Lock an open file until it is closed; return False if it is locked already, None if locks are not supported."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_orphans(target: Path, now: float) -> None:
    """Remove the temporary files of killed writers: those that are not locked and whose process has ended."""
    prefix = _prefix(target)
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            number = entry.name.removeprefix(prefix).partition(".")[0]
            if entry.name.startswith(prefix) and number.isdecimal() and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    if _is_orphan(entry.path, int(number), now):
                        os.unlink(entry.path)


def _is_orphan(path: str, process: int, now: float) -> bool:
    handle = os.open(path, os.O_RDWR)
    try:
        # A running writer holds a lock, on any machine. Before it has the lock, only the process id shows that it runs.
        # The id of a killed writer may be in use again (always so in a restarted container), hence the age limit.
        old = now - os.fstat(handle).st_mtime > ORPHAN_AGE
        return _try_lock(handle) is True and (old or not _is_alive(process))
    finally:
        os.close(handle)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
