"""What the package needs of a place that holds bytes (design decision D19).

A :class:`Store` is a flat map from relative paths to byte strings. There is no rename, append or seek: object stores have
none, and the commit protocol of ``docs/format.md`` needs none. Implementations hold no lock, thread or open file between
calls, so they pickle (D18), and they may be used by several threads at once.

``ucp_dcp.testing.store_conformance`` is the executable form of this page.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import StoreError
from ..paths import checked_path

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BoundedStore",
    "Entry",
    "PositionalWriter",
    "Range",
    "SizedStore",
    "Store",
    "Writer",
    "byte_view",
    "checked_path",
    "create_sized",
    "open_store",
    "target_views",
]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """``length`` bytes of the file ``path``, from byte ``start``."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One file of a listing: its size in bytes, and the time of its last change in seconds since 1970 (UTC).

    A store that does not know that time says "now", so that nothing is ever taken for old because of it.
    """

    path: str
    size: int
    mtime: float


class Writer(Protocol):
    """A file that is being written from its start to its end."""

    def write(self, data: Buffer) -> int:
        """Append all bytes of a C-contiguous buffer; returns their number. Raises StoreError."""
        ...

    def tell(self) -> int:
        """Bytes written so far."""
        ...


class PositionalWriter(Protocol):
    """A file of known size that is being written at any place.

    Attributes:
        concurrent: calls of :meth:`write_at` that may run at the same time, in any order of offsets. 1: the calls come from one thread,
            each where the one before ended.
        part_size: 0, or the bytes of every call but the last (a multiple of 1 MiB), each at a multiple of it: parts of an upload.
    """

    concurrent: int
    part_size: int

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all bytes of C-contiguous buffers, one behind the other, from byte ``offset`` on. Raises StoreError."""
        ...


@runtime_checkable
class SizedStore(Protocol):
    """A store that can write a file in any order; :func:`create_sized` does without."""

    def create_sized(self, path: str, size: int) -> AbstractContextManager[PositionalWriter]:
        """Like :meth:`Store.create`, for a file of exactly ``size`` bytes.

        Raises StoreError at once where it is known that there is no room, and at the end when a byte was not written.
        """
        ...


@runtime_checkable
class BoundedStore(Protocol):
    """A store that can read a small file of unknown size in one request."""

    def read_up_to(self, path: str, limit: int) -> tuple[int, bytes]:
        """The size of a file and its first ``limit`` bytes, both of one version of it. Raises as :meth:`Store.read` does."""
        ...


@runtime_checkable
class Store(Protocol):
    """Bytes by path and range. Paths are relative to the store's root; one that could leave it raises FormatError.

    Failures raise StoreError; a missing file is StoreNotFoundError.
    """

    @property
    def url(self) -> str:
        """Where the store's root is, for people and for :func:`open_store`."""
        ...

    def size(self, path: str) -> int:
        """Size of a file in bytes. Raises StoreNotFoundError."""
        ...

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from byte ``start``, or everything after it.

        Raises StoreNotFoundError, and CorruptCheckpointError (naming file, wanted and found) when the file ends earlier.
        """
        ...

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill ``into[i]`` (writable, C-contiguous, ``ranges[i].length`` bytes) with the bytes of ``ranges[i]``.

        Ranges may be in any order and may overlap in the file; buffers must not overlap. Raises as :meth:`read` does; the
        content of the buffers is undefined then.
        """
        ...

    def create(self, path: str) -> AbstractContextManager[Writer]:
        """Write a new file as a stream.

        The file is complete and durable when the context exits cleanly, and gone when it exits with an error. While it is being
        written, whether others see it, and how much of it, is undefined. Raises StoreExistsError when the path exists.
        """
        ...

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a small file at once: others see the old content or the new one, and it is durable on return.

        With ``if_absent`` the call raises StoreExistsError when the path exists; of several such calls at the same time one wins.
        """
        ...

    def delete(self, *paths: str) -> None:
        """Delete files, durably, the first one before all others. A file that is missing is no error."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """All files whose path starts with the string ``prefix``, in no particular order. A missing root is an empty store."""
        ...


def open_store(url: str | os.PathLike[str] | Store, **options: Any) -> Store:
    """The store at a plain path, a ``file://`` URL, ``s3://``, ``memory://`` or any URL that fsspec knows.

    ``options`` go to :class:`~ucp_dcp.storage.local.LocalStore` for local paths; for ``s3://`` they are those of s3fs and of
    :class:`~ucp_dcp.storage.object_store.Options`; else they go to the fsspec filesystem (its "storage options").
    ``client="obstore"`` takes obstore, for ``s3://``, ``gs://`` and ``az://``; ``client="s3fs"`` takes s3fs itself. A store is returned as
    it is. Nothing is created or contacted. Raises UnsupportedError for an unknown protocol.
    """
    from .fsspec_store import FsspecStore
    from .local import LocalStore
    from .object_store import open_object_store

    if not isinstance(url, (str, os.PathLike)):
        if options:
            raise TypeError(f"options {sorted(options)} given together with a ready store")
        return url
    text = os.fspath(url)
    protocol, separator, rest = text.partition("://")
    if "::" in text or (separator and protocol not in ("file", "local")):
        client = options.get("client")
        if "::" not in text and client != "s3fs" and (protocol in ("s3", "s3a") or client is not None):
            return open_object_store(text, options)
        return FsspecStore.from_url(text, **{name: value for name, value in options.items() if name != "client"})
    return LocalStore(rest if separator else text, **options)


@contextlib.contextmanager
def create_sized(store: Store, path: str, size: int) -> Iterator[PositionalWriter]:
    """:meth:`SizedStore.create_sized` of any store: those that can only stream get the bytes in order."""
    if isinstance(store, SizedStore):
        with store.create_sized(path, size) as file:
            yield file
        return
    with store.create(path) as stream:
        writer = _InOrder(stream, path)
        yield writer
        if stream.tell() != size:
            raise StoreError(f"{path}: {stream.tell()} of {size} bytes were written")


class _InOrder:
    """Writes at positions, over a stream."""

    concurrent = 1
    part_size = 0

    def __init__(self, stream: Writer, path: str) -> None:
        self._stream = stream
        self._path = path

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if offset != self._stream.tell():
            raise StoreError(f"{self._path}: a write at byte {offset}, but this store only appends and is at byte {self._stream.tell()}")
        for buffer in buffers:
            self._stream.write(buffer)


def byte_view(data: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer of any format and shape, as a flat view. Raises BufferError when it is not contiguous."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")  # cast() refuses shapes that hold a zero
    if not view.c_contiguous:
        raise BufferError("a buffer to write must be C-contiguous")
    return view.cast("B")


def target_views(ranges: Sequence[Range], into: Sequence[memoryview]) -> list[memoryview]:
    """The flat byte views of the buffers of ``read_ranges``, after the checks that every store makes.

    Raises ValueError when the buffers do not fit the ranges, FormatError for a bad path or a negative range.
    """
    from ..errors import FormatError

    if len(ranges) != len(into):
        raise ValueError(f"{len(ranges)} ranges but {len(into)} buffers")
    views = []
    for wanted, buffer in zip(ranges, into, strict=True):
        if wanted.start < 0 or wanted.length < 0:
            raise FormatError(f"{wanted.path}: range of {wanted.length} bytes from byte {wanted.start}; neither may be negative")
        view = memoryview(buffer)
        if view.nbytes != wanted.length:
            raise ValueError(f"{wanted.path}: buffer of {view.nbytes} bytes for a range of {wanted.length}")
        if view.nbytes and (view.readonly or not view.c_contiguous):
            raise ValueError(f"{wanted.path}: a buffer to read into must be writable and C-contiguous")
        views.append(view.cast("B") if view.nbytes else memoryview(bytearray()))
    return views
