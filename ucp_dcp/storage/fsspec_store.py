"""A store on any fsspec file system: object stores, memory, and what else fsspec knows.

fsspec promises little about atomicity, so what a file system can do is found out from its class, once, and named
(:attr:`FsspecStore.replaces`, :attr:`FsspecStore.excludes`).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import inspect
import logging
import os
import posixpath
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError, UnsupportedError
from ..paths import checked_path
from .ranges import coalesce
from .store import Entry, Range, byte_view, target_views

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FsspecStore"]

_log = logging.getLogger(__name__)

_PIECE = 16 << 20
"""Bytes per request. Several ranged requests of this size in parallel are about twice as fast as one large request on S3."""
_GAP = 64 << 10
"""Bytes between two wanted ranges that are read through rather than asked for apart: what a request costs in bytes."""
_IN_FLIGHT = 256 << 20
"""Bytes held outside of the caller's buffers at most, since fsspec returns new byte strings."""
_REQUESTS = 4096
"""Requests per cat_ranges call."""

# One request makes the whole object visible or nothing, so a put needs no temporary name.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "hf", "memory", "objectmemory"}
# For exclusive creates that are only checked: makes them exact within this process, and so for memory://.
_CHECK_THEN_PUT = threading.Lock()


class FsspecStore:
    """Files below ``root`` of an fsspec file system.

    Durability is what the file system gives when a file is closed. ``create`` checks for an existing path with a request of its own.
    On ``LocalFileSystem``, symbolic links are not checked; use :class:`~ucp_dcp.storage.local.LocalStore` for folders.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._pid = os.getpid()
        self.root = str(fs._strip_protocol(root)).rstrip("/")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FsspecStore:
        """The store at an fsspec URL (chained ones too); ``options`` are fsspec's storage options. Contacts nothing.

        Raises UnsupportedError when fsspec does not know the protocol or its package is not installed.
        """
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UnsupportedError(f"{url}: fsspec cannot open this kind of URL: {error}") from error
        return cls(fs, root)

    @property
    def fs(self) -> Any:
        """The file system. Made anew after a fork, since the event loop of an asynchronous one does not survive it."""
        if self._pid != os.getpid():
            self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._pid = os.getpid()
        return self._fs

    @property
    def url(self) -> str:
        """The root with its protocol. Storage options (credentials) are not part of it."""
        return str(self._fs.unstrip_protocol(self.root or "/"))

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        # fsspec pickles a file system as its class and storage options.
        return {"fs": self._fs, "root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fs = state["fs"]
        self._pid = os.getpid()
        self.root = state["root"]

    @property
    def replaces(self) -> Literal["put", "rename"]:
        """How a file is replaced at once: by one request (object stores), or by a temporary file and ``mv``."""
        return "put" if _protocols(self._fs) & _OBJECT_STORES else "rename"

    @property
    def excludes(self) -> Literal["condition", "link", "check"]:
        """How ``put(if_absent=True)`` excludes another writer.

        ``condition``: by the file system's exclusive ``pipe_file(mode="create")`` (S3: ``If-None-Match: *``; a server that ignores the
        condition cannot be told apart). ``link``: by a hard link to a temporary file. ``check``: by looking first, which is
        weaker: two processes at the same instant may both succeed. Threads of one process never do.
        """
        innermost = _innermost(self._fs)
        if _takes_mode(innermost) and "memory" not in _protocols(innermost):
            return "condition"
        return "link" if callable(getattr(innermost, "link", None)) and innermost is self._fs else "check"

    # -- reading ---------------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        """See :meth:`Store.size`."""
        full = self._full(path)
        try:
            about = self.fs.info(full)
        except Exception as error:
            raise self._translated(error, path) from error
        if about.get("type") == "directory":
            raise StoreNotFoundError(f"{path} is a folder in {self.url}, expected a file")
        if about.get("size") is None:
            raise StoreError(f"{path} in {self.url}: the file system does not tell its size")
        return int(about["size"])

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: range of {length} bytes from byte {start}; neither may be negative")
        if length is None and start == 0:
            try:  # one request, so that a file which is replaced meanwhile comes old or new
                return bytes(self.fs.cat_file(self._full(path)))
            except Exception as error:
                raise self._translated(error, path) from error
        size = None
        if length is None:
            size = self.size(path)
            length = max(size - start, 0)
        elif length > _PIECE:
            size = self.size(path)  # before memory is taken for what a hostile index claims
        if size is not None and start + length > size:
            raise self._short(path, start, length, f"the file has {size} bytes")
        if length == 0:
            self.size(path)
            return b""
        if length <= _PIECE:
            return bytes(self._fetch([Range(path, start, length)])[0])
        data = bytearray(length)
        self.read_ranges([Range(path, start, length)], [memoryview(data)])
        return bytes(data)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`: in pieces of 16 MiB through ``cat_ranges``, parallel where the file system is asynchronous.

        Neighbours are one request, with what lies between them.
        """
        views = target_views(ranges, into)
        pieces: list[Range] = []
        targets: list[list[tuple[memoryview, int]]] = []  # of each piece: memory to fill, from which byte of it on
        held = 0

        def flush() -> None:
            for data, parts in zip(self._fetch(pieces), targets, strict=True):
                for view, at in parts:
                    view[:] = memoryview(data)[at : at + view.nbytes]
            pieces.clear()
            targets.clear()

        for piece, parts in self._pieces(ranges, views):
            if held + piece.length > _IN_FLIGHT or len(pieces) == _REQUESTS:
                flush()
                held = 0
            pieces.append(piece)
            targets.append(parts)
            held += piece.length
        flush()

    def _pieces(self, ranges: Sequence[Range], views: Sequence[memoryview]) -> Iterator[tuple[Range, list[tuple[memoryview, int]]]]:
        by_path: dict[str, list[int]] = {}
        for i, wanted in enumerate(ranges):
            checked_path(wanted.path)
            if wanted.length == 0:
                self.size(wanted.path)
            else:
                by_path.setdefault(wanted.path, []).append(i)
        for path, own in by_path.items():
            groups = coalesce([ranges[i].start for i in own], [ranges[i].length for i in own], _GAP, _PIECE)
            members: list[list[int]] = [[] for _ in groups.group_start]
            for i, group in zip(own, groups.member_group.tolist(), strict=True):
                members[group].append(i)
            for joined, start, length in zip(members, groups.group_start.tolist(), groups.group_length.tolist(), strict=True):
                if length <= _PIECE:
                    yield Range(path, start, length), [(views[i], ranges[i].start - start) for i in joined]
                    continue
                for i in joined:
                    for at in range(0, ranges[i].length, _PIECE):
                        view = views[i][at : at + _PIECE]
                        yield Range(path, ranges[i].start + at, view.nbytes), [(view, 0)]

    def _fetch(self, pieces: list[Range]) -> list[bytes]:
        if not pieces:
            return []
        try:
            found = self.fs.cat_ranges(
                [self._full(piece.path) for piece in pieces],
                [piece.start for piece in pieces],
                [piece.start + piece.length for piece in pieces],
                on_error="return",
            )
        except Exception as error:
            raise self._translated(error, pieces[0].path) from error
        if len(found) != len(pieces):
            raise StoreError(f"{self.url}: asked for {len(pieces)} ranges, got {len(found)} answers")
        for piece, data in zip(pieces, found, strict=True):
            if isinstance(data, BaseException):
                # Servers answer a range behind the end with an error of their own; say what it means.
                if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                    with contextlib.suppress(StoreError):
                        size = self.size(piece.path)
                        if piece.start + piece.length > size:
                            raise self._short(piece.path, piece.start, piece.length, f"the file has {size} bytes") from data
                    raise self._translated(data, piece.path) from data
                raise self._translated(data, piece.path) from data
            if len(data) != piece.length:
                raise self._short(piece.path, piece.start, piece.length, f"the store returned {len(data)}")
        return list(found)

    def _short(self, path: str, start: int, length: int, found: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{path} in {self.url}: {length} bytes from byte {start} were wanted, but {found}; it is truncated or its index is wrong"
        )

    # -- writing ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[_FsspecWriter]:
        """See :meth:`Store.create`. An upload that fails is aborted, never completed."""
        full = self._full(path)
        if self._exists(path):
            raise StoreExistsError(f"{path} exists already in {self.url}")
        try:
            self._make_folder(full)
            stream = self.fs.open(full, "wb")
        except Exception as error:
            raise self._translated(error, path) from error
        try:
            writer = _FsspecWriter(stream, path)
            yield writer
            try:
                stream.close()
            except Exception as error:
                raise StoreError(f"{path} in {self.url}: completing the file failed after {writer.tell()} bytes: {error}") from error
            # A close that reports nothing has been seen to lose data; one request tells.
            found = self.size(path)
            if found != writer.tell():
                raise StoreError(f"{path} in {self.url}: {writer.tell()} bytes were written, but the file has {found}")
        except BaseException:
            _abandon(stream)
            with contextlib.suppress(Exception):
                self.fs.rm_file(full)
            raise

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`, :attr:`replaces` and :attr:`excludes`."""
        full = self._full(path)
        content = bytes(byte_view(data))
        try:
            self._make_folder(full)
            if not if_absent:
                self._replace(full, content)
            elif self.excludes == "condition":
                self.fs.pipe_file(full, content, mode="create")
            elif self.excludes == "link":
                with self._temporary(full, content) as temporary:
                    self.fs.link(temporary, full)
                    with contextlib.suppress(Exception):  # it is put; a file left over is collected later
                        self.fs.rm_file(temporary)
            else:
                with _CHECK_THEN_PUT:
                    if self._exists(path):
                        raise FileExistsError(full)
                    self._replace(full, content)
        except Exception as error:
            failure = self._translated(error, path)
            # S3 servers answer a failed condition with EINVAL or "precondition failed"; only the path itself tells what happened.
            if if_absent and not isinstance(failure, (StoreExistsError, FormatError)) and _may_be_condition(error) and self._exists(path):
                failure = StoreExistsError(f"{path} exists already in {self.url}")
            raise failure from error

    def _replace(self, full: str, content: bytes) -> None:
        if self.replaces == "put":
            self.fs.pipe_file(full, content)
            return
        with self._temporary(full, content) as temporary:
            self.fs.mv(temporary, full)

    @contextlib.contextmanager
    def _temporary(self, full: str, content: bytes) -> Iterator[str]:
        folder, name = posixpath.split(full)
        temporary = f"{folder}/.{name[:32]}.{secrets.token_hex(8)}.tmp"
        try:
            self.fs.pipe_file(temporary, content)
            yield temporary
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(temporary)
            raise

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`. One after the other, because the order of deletions carries meaning."""
        for path in paths:
            full = self._full(path)
            try:
                self.fs.rm_file(full)
            except FileNotFoundError:
                continue
            except Exception as error:
                if not self._exists(path):
                    continue
                raise self._translated(error, path) from error

    def _make_folder(self, full: str) -> None:
        """Make the folder where folders are real. Object stores have none, and making one there would make a bucket or a marker."""
        if self.replaces == "rename":
            self.fs.makedirs(posixpath.dirname(full), exist_ok=True)

    # -- listing ---------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        folder, _, _ = prefix.rpartition("/")
        where = self._full(folder) if folder else self.root or "/"
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(where, detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._translated(error, prefix) from error
        above = self.root + "/"
        for full, about in found.items():
            name = str(self.fs._strip_protocol(full))
            if not name.startswith(above) or about.get("type", "file") != "file":
                continue
            path = name[len(above) :]
            if path.startswith(prefix):
                yield Entry(path, int(about.get("size") or 0), self._modified(about))

    @staticmethod
    def _modified(about: dict[str, Any]) -> float:
        for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
            value = about.get(name)
            if isinstance(value, str):
                try:
                    value = datetime.datetime.fromisoformat(value)
                except ValueError:
                    continue
            if isinstance(value, datetime.datetime):
                return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return time.time()

    # -- helpers ---------------------------------------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        return f"{self.root}/{checked_path(path)}"

    def _exists(self, path: str) -> bool:
        """Whether there is a file. Unlike ``fs.exists``, which answers no on every error, this raises when the store cannot tell."""
        self.fs.invalidate_cache()
        try:
            self.fs.info(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except Exception as error:
            raise self._translated(error, path) from error
        return True

    def _translated(self, error: BaseException, path: str) -> StoreError | FormatError:
        if isinstance(error, (StoreError, FormatError)):
            return error
        if isinstance(error, FileExistsError):
            return StoreExistsError(f"{path} exists already in {self.url}")
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return StoreNotFoundError(f"{path} was not found in {self.url}")
        return StoreError(f"{path} in {self.url}: {type(error).__name__}: {error}")


class _FsspecWriter:
    """The writer of :meth:`FsspecStore.create`."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path
        self._position = 0

    def write(self, data: Buffer) -> int:
        view = byte_view(data)
        done = 0
        # fsspec's buffered files gather all of one write before they upload, so a huge one would be held twice.
        while done < view.nbytes:
            piece = view[done : done + _PIECE]
            try:
                count = self._stream.write(piece)
            except Exception as error:
                raise StoreError(f"{self._path}: writing failed after {self._position} bytes: {error}") from error
            if count is not None and count != piece.nbytes:
                raise StoreError(f"{self._path}: wrote {count} of {piece.nbytes} bytes at byte {self._position}")
            done += piece.nbytes
            self._position += piece.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._position


def _abandon(stream: Any) -> None:
    """End a file under way without completing it.

    fsspec's buffered files (S3 and others) complete the upload in close(), which also runs when the object is collected. So the
    upload is discarded and the file is marked closed.
    """
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        # Also when it is closed: a close() that failed has left the parts of its upload behind.
        with contextlib.suppress(Exception):
            stream.discard()
        stream.closed = True
        return
    with contextlib.suppress(Exception):
        stream.close()


def _innermost(fs: Any) -> Any:
    """The file system below those that only change paths (``dir::``)."""
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return fs


def _protocols(fs: Any) -> set[str]:
    protocol = _innermost(fs).protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _takes_mode(fs: Any) -> bool:
    """Whether the file system has an exclusive write of its own, rather than the check-then-write of fsspec's base class."""
    from fsspec.asyn import AsyncFileSystem

    for name in ("_pipe_file", "pipe_file"):
        method = getattr(type(fs), name, None)
        if method is None or method is getattr(AsyncFileSystem, name, None):
            continue
        try:
            if "mode" in inspect.signature(method).parameters:
                return True
        except (TypeError, ValueError):
            continue
    return False


def _may_be_condition(error: BaseException) -> bool:
    text = str(error).lower()
    return (isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EEXIST)) or "precondition" in text or "pre-condition" in text
