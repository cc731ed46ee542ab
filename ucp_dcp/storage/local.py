"""A store in a folder of a POSIX file system: plain system calls, straight between the page cache and the caller's memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from ..errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError
from ..paths import checked_path
from .sized_file import SizedFile, one_write_at_a_time, reserve
from .store import Entry, Range, byte_view, target_views

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LocalStore"]

_log = logging.getLogger(__name__)

_VECTOR = 1024
"""Buffers per preadv call (IOV_MAX of Linux)."""
_READ = 1 << 30
"""Bytes per pread call; Linux returns at most 2^31 - 4096."""
_BUFFER = 1 << 20
"""Bytes of small writes that are gathered before a system call; larger writes go to the kernel without a copy."""
_CREATE_ATTEMPTS = 100
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """Files below one folder, which is created by the first write.

    ``sync=False`` leaves out every fsync: faster, and what was "durable" then survives the end of the process but not a crash of
    the machine. A symbolic link below the root whose target lies outside it is refused, so that a checkpoint from elsewhere
    cannot make us read or write other files; ``links_outside=True`` allows *reading* through such links (caches that link each file to
    a shared pool). Links are resolved before a file is opened: this protects against hostile content, not against somebody
    who changes the folder at the same time. ``threads``: how many a
    load reads and a save writes with (default: the cores of this process, at most 4). ``files``: how many data files a rank writes at
    the same time, at most (default: one per thread on file systems that let one write into a file at a time, else one).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        sync: bool = True,
        links_outside: bool = False,
        threads: int | None = None,
        files: int | None = None,
    ) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self.sync = sync
        self.links_outside = links_outside
        self.threads = threads
        self.files = files

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return self.root

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    # -- reading ---------------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        """Size of a regular file in bytes. Raises StoreNotFoundError."""
        full = self._resolved(path)
        try:
            found = os.stat(full)
        except OSError as error:
            raise self._translated(error, path) from error
        self._check_regular(found, path)
        return found.st_size

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`. Sizes are checked before memory is taken."""
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: range of {length} bytes from byte {start}; neither may be negative")
        with self.opened(path) as (fd, size):
            if length is None:
                length = max(size - start, 0)
            self.check_end(path, start, length, size)
            parts = []
            while length > 0:
                try:
                    part = os.pread(fd, min(length, _READ), start)
                except OSError as error:
                    raise StoreError(f"{path}: reading at byte {start} failed: {error.strerror or error}") from error
                if not part:
                    raise CorruptCheckpointError(f"{path}: ended at byte {start} while {length} more were wanted; it shrank meanwhile")
                parts.append(part)
                start += len(part)
                length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`: file by file, in file order, neighbouring ranges in one vectored call, without a copy."""
        views = target_views(ranges, into)
        order = sorted(range(len(ranges)), key=lambda i: (ranges[i].path, ranges[i].start, ranges[i].length))
        first = 0
        while first < len(order):
            path = ranges[order[first]].path
            last = first
            while last < len(order) and ranges[order[last]].path == path:
                last += 1
            self._read_file(path, [ranges[i] for i in order[first:last]], [views[i] for i in order[first:last]])
            first = last

    def _read_file(self, path: str, ranges: list[Range], views: list[memoryview]) -> None:
        with self.opened(path) as (fd, size):
            for wanted in ranges:
                self.check_end(path, wanted.start, wanted.length, size)
            first = 0
            while first < len(ranges):
                end = ranges[first].start + ranges[first].length
                last = first + 1
                while last < len(ranges) and last - first < _VECTOR and ranges[last].start == end:
                    end += ranges[last].length
                    last += 1
                self._fill(fd, path, ranges[first].start, views[first:last])
                first = last

    @staticmethod
    def _fill(fd: int, path: str, position: int, views: list[memoryview]) -> None:
        """Read consecutive bytes into the views; the kernel may return fewer per call than asked for."""
        pending = [view for view in views if view.nbytes]
        while pending:
            try:
                count = os.preadv(fd, pending, position)
            except OSError as error:
                raise StoreError(f"{path}: reading at byte {position} failed: {error.strerror or error}") from error
            if count == 0:
                wanted = sum(view.nbytes for view in pending)
                raise CorruptCheckpointError(f"{path}: ended at byte {position} while {wanted} more were wanted; the file is truncated")
            position += count
            done = 0
            while done < len(pending) and count >= pending[done].nbytes:
                count -= pending[done].nbytes
                done += 1
            del pending[:done]
            if count:
                pending[0] = pending[0][count:]

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of a regular file, open for reading. Raises StoreError."""
        full = self._resolved(path)
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer; it has no effect on regular files.
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise self._translated(error, path) from error
        try:
            found = os.fstat(fd)
            self._check_regular(found, path)
            yield fd, found.st_size
        finally:
            os.close(fd)

    @staticmethod
    def _check_regular(found: os.stat_result, path: str) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise StoreNotFoundError(f"{path} is a folder, expected a file")
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{path} is not a regular file (a device, pipe or socket)")

    @staticmethod
    def check_end(path: str, start: int, length: int, size: int) -> None:
        """Raises CorruptCheckpointError when a file of ``size`` bytes does not hold these."""
        if start + length > size:
            raise CorruptCheckpointError(
                f"{path}: {length} bytes from byte {start} were wanted, but the file has {size} bytes; "
                "it is truncated or its index is wrong"
            )

    # -- writing ---------------------------------------------------------------------------------------------------------

    @property
    def _writers(self) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or min(4, cores)

    @property
    def parallel_files(self) -> int:
        """Files that are best written at the same time. Where one write at a time goes into a file, threads need one each."""
        if self.files is not None:
            return max(1, self.files)
        folder = self.root
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)  # the root is made by the first write
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return 1  # whoever writes there will say what is wrong
        try:
            return self._writers if one_write_at_a_time(fd) else 1
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[_LocalWriter]:
        """See :meth:`Store.create`. The file has its final name from the start; generations are named only after they are complete."""
        fd, full = self._create_new(path)
        stream = open(fd, "wb", buffering=_BUFFER)  # noqa: SIM115 - closing must not hide the error that is under way
        try:
            writer = _LocalWriter(stream, path)
            yield writer
            try:
                stream.flush()
                if self.sync:
                    os.fsync(fd)
                stream.close()
            except OSError as error:
                raise StoreError(f"{path}: writing failed after {writer.tell()} bytes: {error.strerror or error}") from error
            self._sync_folder(os.path.dirname(full), path)
        except BaseException:
            self._undo(full, path)
            with contextlib.suppress(OSError):
                stream.close()
            raise

    @contextlib.contextmanager
    def create_sized(self, path: str, size: int) -> Iterator[SizedFile]:
        """See :meth:`SizedStore.create_sized`. The place is reserved first, so that a full disk says so before a byte is written."""
        fd, full = self._create_new(path)
        try:
            reserve(fd, size, path)
            file = SizedFile(fd, path, size, concurrent=self._writers)
            yield file
            file.check_complete()
            try:
                if self.sync:
                    os.fsync(fd)
                closing, fd = fd, -1
                os.close(closing)  # network file systems tell here that a write did not succeed
            except OSError as error:
                raise StoreError(f"{path}: making {size} bytes durable failed: {error.strerror or error}") from error
            self._sync_folder(os.path.dirname(full), path)
        except BaseException:
            self._undo(full, path)
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise

    def _undo(self, full: str, path: str) -> None:
        """Remove a file that did not come to its end, and its folder when that holds nothing else: no delete() will look there."""
        with contextlib.suppress(OSError):
            os.unlink(full)
        with contextlib.suppress(OSError):
            self._drop_empty(os.path.dirname(full), path)

    def _create_new(self, path: str) -> tuple[int, str]:
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                full = self._target(path)
                return os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), full
            except FileNotFoundError as error:
                # delete() of the last file in this folder, by somebody else, removed the folder just now.
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise self._translated(error, path) from error
            except OSError as error:
                raise error if isinstance(error, StoreError) else self._translated(error, path) from error
        raise AssertionError("not reached")

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`: a temporary file beside the target, then rename or (``if_absent``) link, then fsync of the folder."""
        view = byte_view(data)
        checked_path(path)
        folder, _, name = path.rpartition("/")
        # Cut, because a name has at most 255 bytes. The pattern is known to storage.commit, which collects what a crash leaves behind.
        temporary = f"{folder}/" * bool(folder) + f".{name[:32]}.{secrets.token_hex(8)}.tmp"
        fd, full = self._create_new(temporary)
        target = os.path.join(os.path.dirname(full), name)
        try:
            with open(fd, "wb", buffering=0) as stream:
                written = 0
                while written < view.nbytes:
                    written += stream.write(view[written:]) or 0
                if self.sync:
                    os.fsync(fd)
            if not if_absent:
                os.replace(full, target)
            elif self._link(full, target):
                os.unlink(full)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(full)
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise self._translated(error, path) from error
            raise
        self._sync_folder(os.path.dirname(full), path)

    @staticmethod
    def _link(source: str, target: str) -> bool:
        """Give the file a second name that must not exist yet; True. Where links are impossible: check, then rename; False."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "exists", target) from None
            _log.warning("%s: this file system has no hard links; another writer at the same instant would not be noticed", target)
            os.replace(source, target)
            return False
        return True

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`. A folder whose last file goes, goes with it (never the root)."""
        pending: dict[str, str] = {}  # folder -> one path in it, whose change of entries is not yet durable

        def settle() -> None:
            for folder, example in pending.items():
                self._drop_empty(folder, example)
            pending.clear()

        for path in paths:
            full = self._parent_resolved(path)
            if full is None:
                continue
            folder = os.path.dirname(full)
            if pending and folder not in pending:
                settle()  # the order of deletions must hold after a crash too
            try:
                os.unlink(full)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._translated(error, path) from error
            pending[folder] = path
        settle()

    def _drop_empty(self, folder: str, path: str) -> None:
        root = os.path.realpath(self.root)
        while folder != root and folder.startswith(root + os.sep):
            try:
                os.rmdir(folder)
            except OSError:
                break
            folder = os.path.dirname(folder)
        self._sync_folder(folder, path)

    # -- listing ---------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`. Folders that are symbolic links are not entered; links to files are listed when they may be read."""
        folder, _, _ = prefix.rpartition("/")
        if folder:
            checked_path(folder)
            try:
                start = self._resolved(folder)
            except StoreError:
                return
        else:
            start = os.path.realpath(self.root)
        pending = [(start, folder + "/" if folder else "")]
        while pending:
            current, above = pending.pop()
            try:
                with os.scandir(current) as found:
                    children = list(found)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._translated(error, above) from error
            for child in children:
                path = above + child.name
                # A folder is entered when its files can start with the prefix.
                if not path.startswith(prefix) and not prefix.startswith(path + "/"):
                    continue
                try:
                    if child.is_dir(follow_symlinks=False):
                        pending.append((child.path, path + "/"))
                        continue
                    if not path.startswith(prefix):
                        continue
                    about = child.stat(follow_symlinks=False)
                    if stat.S_ISLNK(about.st_mode):
                        about = os.stat(self._resolved(path))
                except (OSError, FormatError):
                    continue  # gone meanwhile, a dangling link, or a link that may not be followed
                if stat.S_ISREG(about.st_mode):
                    yield Entry(path, about.st_size, about.st_mtime if about.st_mtime > 0 else time.time())

    # -- paths -----------------------------------------------------------------------------------------------------------

    def _resolved(self, path: str) -> str:
        """The real path of an existing file, after the check that it lies below the root."""
        full = os.path.realpath(os.path.join(self.root, checked_path(path)))
        if not self.links_outside:
            self._check_inside(full, path)
        return full

    def _check_inside(self, full: str, path: str) -> None:
        root = os.path.realpath(self.root)
        if full != root and not full.startswith(root.rstrip(os.sep) + os.sep):
            raise FormatError(
                f"{path} leads to {full}, outside of the store {self.root}, through a symbolic link; "
                "LocalStore(..., links_outside=True) allows reading it"
            )

    def _parent_resolved(self, path: str) -> str | None:
        """The path with its folder resolved and its last segment as it is (a link itself is meant); None without such a folder."""
        checked_path(path)
        folder = os.path.realpath(os.path.dirname(os.path.join(self.root, path)))
        self._check_inside(folder, path)
        return os.path.join(folder, os.path.basename(path)) if os.path.isdir(folder) else None

    def _target(self, path: str) -> str:
        """The path of a file to write; missing folders are made, each durable in its parent. FileNotFoundError: try again."""
        checked_path(path)
        missing = []
        folder = os.path.dirname(os.path.join(self.root, path))
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if len(folder) > len(self.root):
            self._check_inside(os.path.realpath(folder), path)
        for folder in reversed(missing):
            try:
                os.mkdir(folder)
            except FileExistsError as error:
                if _is_obstacle(folder):
                    raise StoreError(f"{path}: {folder} exists and is not a folder") from error
            self._sync_folder(os.path.dirname(folder), path)
        full = self._parent_resolved(path)
        if full is None:
            raise FileNotFoundError(errno.ENOENT, "its folder was removed", path)
        return full

    def _sync_folder(self, folder: str, path: str) -> None:
        if not self.sync:
            return
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return  # removed meanwhile, so there is nothing to keep
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
                return
            raise StoreError(f"{path}: making the folder {folder} durable failed: {error}") from error

    def _translated(self, error: OSError, path: str) -> StoreError:
        if isinstance(error, FileExistsError):
            return StoreExistsError(f"{path} exists already in {self.root}")
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return StoreNotFoundError(f"{path} was not found in {self.root}")
        return StoreError(f"{path} in {self.root}: {error.strerror or error}")


def _is_obstacle(folder: str) -> bool:
    """Whether something that is no folder, or a link to nothing, has this name. False when there is nothing any more."""
    try:
        mode = os.lstat(folder).st_mode
    except FileNotFoundError:
        return False
    return not (os.path.isdir(folder) if stat.S_ISLNK(mode) else stat.S_ISDIR(mode))


class _LocalWriter:
    """The writer of :meth:`LocalStore.create`."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream = stream
        self._path = path
        self._position = 0

    def write(self, data: Buffer) -> int:
        view = byte_view(data)
        try:
            self._stream.write(view)
        except OSError as error:
            raise StoreError(f"{self._path}: writing failed after {self._position} bytes: {error.strerror or error}") from error
        self._position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._position
