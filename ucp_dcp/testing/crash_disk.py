"""A store in memory that knows which bytes are durable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError
from ..storage.store import Entry, Range, byte_view, checked_path, target_views
from .faults import Fault, Faults, Operation

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SURVIVALS", "Disk", "DiskStore", "SizedDiskStore", "SizedWriter", "Survival"]

Survival: TypeAlias = Literal["durable", "all", "half"]
"""What a crash leaves of bytes that were not durable: nothing, all, or half (the first half of a file that was written in order; every
second write of one whose size was known before, zeros elsewhere)."""

SURVIVALS: tuple[Survival, ...] = ("durable", "all", "half")


@dataclass
class _File:
    """``durable``: what is on the disk for certain, None: nothing. ``writes``: (start, stop) of what was written; None: in order."""

    content: bytearray
    durable: bytes | None = None
    mtime: float = 0.0
    writes: list[tuple[int, int]] | None = None

    def survivor(self, survival: Survival) -> bytes | None:
        """What a crash leaves."""
        if survival == "durable" or bytes(self.content) == self.durable:
            return self.durable
        if survival == "all":
            return bytes(self.content)
        if self.writes is None:
            return bytes(self.content[: len(self.content) // 2])
        out = bytearray(len(self.content))
        for start, stop in sorted(self.writes)[1::2]:
            out[start:stop] = self.content[start:stop]
        return bytes(out)


class Disk:
    """Files in memory with the durability of a file system, and the faults of :class:`Fault`.

    A file that is being created is volatile until it is closed; a put and a delete are durable when they return. Any number of stores, one
    for each rank, share a disk.

    ``concurrent``: 0, then its stores write files from their start to their end (object stores, fsspec); else they write files of known
    size at any place, with so many calls at the same time (as :class:`~ucp_dcp.storage.local.LocalStore` does). ``clock``: the time of the
    first change, in seconds since 1970; default now. With one that is long ago, what a save deletes once it is old enough is old enough.
    """

    def __init__(self, concurrent: int = 0, clock: float | None = None) -> None:
        self.concurrent = concurrent
        self._files: dict[str, _File] = {}
        self._clock = time.time() if clock is None else clock
        self.faults = Faults()

    @property
    def operations(self) -> list[str]:
        """What was done so far, in order: ``"write g-.../__0_0.distcp"``."""
        return list(self.faults.operations)

    def store(self) -> DiskStore:
        """A store over this disk."""
        return SizedDiskStore(self) if self.concurrent else DiskStore(self)

    def arm(self, fault: Fault | None) -> None:
        """Count from 0 again, and break what ``fault`` says."""
        self.faults = Faults(fault)

    def after_crash(self, survival: Survival) -> Disk:
        """The disk as the next process finds it."""
        out = Disk(self.concurrent, self._clock + 1)
        for path, file in self._files.items():
            content = file.survivor(survival)
            if content is not None:
                out._files[path] = _File(bytearray(content), content, file.mtime)
        return out

    def copy(self) -> Disk:
        """Another disk with the same files."""
        out = Disk(self.concurrent, self._clock)
        out._files = {path: _File(bytearray(f.content), f.durable, f.mtime) for path, f in self._files.items()}
        return out

    def now(self) -> float:
        """A clock that moves with each change."""
        self._clock += 1e-3
        return self._clock


class DiskStore:
    """A :class:`~ucp_dcp.storage.store.Store` over a :class:`Disk`, of one rank."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def _step(self, name: str, path: str) -> Operation:
        return self._disk.faults.step(name, path, id(self))

    @property
    def url(self) -> str:
        """For messages only."""
        return "crash-disk"

    def _file(self, path: str) -> _File:
        try:
            return self._disk._files[checked_path(path)]
        except KeyError:
            raise StoreNotFoundError(f"{path} does not exist") from None

    def size(self, path: str) -> int:
        """See :meth:`Store.size`."""
        self._step("size", path)
        return len(self._file(path).content)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: range of {length} bytes from byte {start}; neither may be negative")
        self._step("read", path)
        content = self._file(path).content
        if length is None:
            length = max(len(content) - start, 0)
        if start + length > len(content):
            raise CorruptCheckpointError(f"{path}: {length} bytes from byte {start} were wanted, but the file has {len(content)} bytes")
        return bytes(content[start : start + length])

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`."""
        for wanted, view in zip(ranges, target_views(ranges, into), strict=True):
            view[:] = self.read(wanted.path, wanted.start, wanted.length)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[_DiskWriter]:
        """See :meth:`Store.create`."""
        with self._created(path, None) as file:
            yield _DiskWriter(self, path, file)

    @contextlib.contextmanager
    def _created(self, path: str, size: int | None) -> Iterator[_File]:
        disk, faults = self._disk, self._disk.faults
        operation = self._step("create", path)
        if checked_path(path) in disk._files:
            raise StoreExistsError(f"{path} exists")
        file = disk._files[path] = _File(bytearray(size or 0), None, disk.now(), None if size is None else [])
        try:
            faults.done(operation)
            yield file
            operation = self._step("close", path)
            file.durable = bytes(file.content)
            faults.done(operation)
        except Exception:  # not Killed: the dead do not clean up
            disk._files.pop(path, None)
            raise

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`."""
        disk, faults = self._disk, self._disk.faults
        operation = self._step("put", path)
        if if_absent and checked_path(path) in disk._files:
            raise StoreExistsError(f"{path} exists")
        if operation.half:  # in a temporary file, which nobody cleans up when the program is ended by this
            raise faults.torn("put", path)
        content = bytes(byte_view(data))
        disk._files[checked_path(path)] = _File(bytearray(content), content, disk.now())
        faults.done(operation)

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`. Each file is one operation."""
        for path in paths:
            operation = self._step("delete", path)
            self._disk._files.pop(checked_path(path), None)
            self._disk.faults.done(operation)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        self._step("list", prefix)
        for path, file in list(self._disk._files.items()):
            if path.startswith(prefix):
                yield Entry(path, len(file.content), file.mtime)


class SizedDiskStore(DiskStore):
    """One that writes files of known size at any place, from several threads."""

    @contextlib.contextmanager
    def create_sized(self, path: str, size: int) -> Iterator[SizedWriter]:
        """See :meth:`SizedStore.create_sized`. The file has its size, and zeros in it, from the start."""
        with self._created(path, size) as file:
            writer = SizedWriter(self, path, file)
            yield writer
            writer.check_complete()


@dataclass
class _DiskWriter:
    _store: DiskStore
    _path: str
    _file: _File

    def write(self, data: Buffer) -> int:
        """Append."""
        faults = self._store._disk.faults
        operation = self._store._step("write", self._path)
        view = byte_view(data)
        self._file.content += view[: view.nbytes // 2] if operation.half else view
        if operation.half:
            raise faults.torn("write", self._path)
        faults.done(operation)
        return view.nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return len(self._file.content)


@dataclass
class SizedWriter:
    """Also checks the writer: no byte outside of the file, twice, or not at all, no more calls at the same time than agreed."""

    _store: DiskStore
    _path: str
    _file: _File
    part_size: int = 0
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def concurrent(self) -> int:
        """Calls at the same time."""
        return self._store._disk.concurrent

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See :meth:`PositionalWriter.write_at`. One operation."""
        with self._lock:
            self._running += 1
            if self._running > self.concurrent:
                raise StoreError(f"{self._path}: {self._running} writes at the same time; {self.concurrent} were agreed on")
        try:
            self._write(offset, b"".join(byte_view(buffer) for buffer in buffers))
        finally:
            with self._lock:
                self._running -= 1

    def _write(self, offset: int, data: bytes) -> None:
        faults = self._store._disk.faults
        operation = self._store._step("write_at", self._path)
        stop = offset + len(data)
        if offset < 0 or stop > len(self._file.content):
            raise StoreError(f"{self._path}: bytes {offset} to {stop} do not lie in a file of {len(self._file.content)} bytes")
        if operation.half:
            data = data[: len(data) // 2]
        self._file.content[offset : offset + len(data)] = data
        assert self._file.writes is not None
        with self._lock:
            self._file.writes.append((offset, offset + len(data)))
        if operation.half:
            raise faults.torn("write_at", self._path)
        faults.done(operation)

    def check_complete(self) -> None:
        """Raises StoreError when a byte was not written, or twice."""
        assert self._file.writes is not None
        at = 0
        for start, stop in sorted(self._file.writes):
            if start != at:
                what = "not written" if start > at else "written twice"
                raise StoreError(f"{self._path}: bytes {min(at, start)} to {max(at, start)} were {what}")
            at = stop
        if at != len(self._file.content):
            raise StoreError(f"{self._path}: the bytes from {at} to the end, {len(self._file.content)}, were not written")
