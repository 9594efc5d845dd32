"""Write files so that they are whole or absent, and reserve disk space before it is needed."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dubito.core.errors import FileFormatError

try:
    import fcntl
except ImportError:  # Windows: orphans stay, since nobody can tell them from a living writer's files
    fcntl = None  # type: ignore[assignment]

# Seconds after which an unlocked temporary file is an orphan even where its process number is in use again.
ORPHAN_AGE = 60.0
# Bytes that are written at a time where the file system cannot reserve space.
ZEROS = 2**20


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees either the old content or the new one, never a part.

    A symbolic link is followed, the permissions of a file that is replaced are kept, and what is not a plain file
    (a folder, a device, a pipe) is refused. Temporary files of writers that were killed are removed.
    """
    target = Path(os.path.realpath(path))
    check_writable(path)
    with _said(path):
        old = target.stat() if target.exists() else None
        temporary = target.with_name(f"{_prefix(target)}{os.getpid()}.{uuid.uuid4().hex[:8]}")
        # the mode of a new file is the usual one (the system applies the umask); a secret is never readable in between
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old is None else 0o600)
        try:
            with os.fdopen(handle, "wb") as stream:
                _try_lock(stream.fileno())
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                if old is not None:
                    _own_like(temporary, old)
                os.replace(temporary, target)
                _remove_orphans(target, now=os.fstat(stream.fileno()).st_mtime)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise one sentence where `path` exists and is not a plain file, or a link to one."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:  # nothing there yet; what else is wrong shows when it is written
        if error.errno == errno.ELOOP:
            raise FileFormatError(f"Cannot write '{path}': it is a link that leads in a circle.") from error
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise FileFormatError(f"Cannot write '{path}': it is {what}, not a file; choose another name.")


def reserve(handle: int, size: int) -> None:
    """Make an open file `size` bytes long on disk, so that no later write to it can find the disk full.

    What the file holds stays. Raises OSError where the space is not there.
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
    os.fsync(handle)  # some file systems find out only now that they are full


@contextmanager
def _said(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL within the name
        raise FileFormatError(f"Cannot write '{path}': {getattr(error, 'strerror', None) or error}.") from error


def _prefix(target: Path) -> str:
    """How the names of a file's temporary files start; short, so that a long name does not become too long."""
    return f".{target.name[:40]}.dubito-"


def _own_like(temporary: Path, old: os.stat_result) -> None:
    new = temporary.stat()
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with suppress(OSError, AttributeError):  # only the administrator may give files away
            os.chown(temporary, old.st_uid, old.st_gid)
    os.chmod(temporary, stat.S_IMODE(old.st_mode))


def _try_lock(handle: int) -> bool | None:
    """Lock an open file until it is closed; False if another holds it, None if this system cannot tell."""
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
    """Remove the temporary files of killed writers: those that nobody has locked and whose process is gone."""
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
        # A living writer holds a lock, on whatever machine. Between making its file and locking it a writer is known
        # by its process number, which another process may have by now, or again after a container was started anew.
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
