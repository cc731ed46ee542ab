"""Any store with faults in front of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..storage.store import Entry, PositionalWriter, Range, SizedStore, Store, Writer, byte_view
from .faults import Fault, Faults, Killed

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FaultyStore"]

W = TypeVar("W")
F = TypeVar("F")


class FaultyStore:
    """Any store with faults in front of it. After a kill its files stay as they are; open the inner store to look at them.

    It has ``create_sized`` when the inner store has.
    """

    def __init__(self, inner: Store, fault: Fault | None = None) -> None:
        self.inner = inner
        self.faults = Faults(fault)
        self._left_open: list[object] = []
        if isinstance(inner, SizedStore):
            self.create_sized = self._create_sized

    @property
    def url(self) -> str:
        """That of the inner store."""
        return self.inner.url

    def size(self, path: str) -> int:
        """See :meth:`Store.size`."""
        self.faults.step("size", path)
        return self.inner.size(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        self.faults.step("read", path)
        return self.inner.read(path, start, length)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`."""
        self.faults.step("read", ranges[0].path if ranges else "")
        self.inner.read_ranges(ranges, into)

    def create(self, path: str) -> AbstractContextManager[_FaultyWriter]:
        """See :meth:`Store.create`."""
        return self._created(path, lambda: self.inner.create(path), lambda writer: _FaultyWriter(self.faults, path, writer))

    def _create_sized(self, path: str, size: int) -> AbstractContextManager[_FaultySizedWriter]:
        """See :meth:`SizedStore.create_sized`."""
        inner = self.inner
        assert isinstance(inner, SizedStore)
        return self._created(path, lambda: inner.create_sized(path, size), lambda writer: _FaultySizedWriter(self.faults, path, writer))

    @contextlib.contextmanager
    def _created(self, path: str, create: Callable[[], AbstractContextManager[W]], wrap: Callable[[W], F]) -> Iterator[F]:
        operation = self.faults.step("create", path)
        context = create()
        writer = context.__enter__()
        try:
            self.faults.done(operation)
            yield wrap(writer)
            operation = self.faults.step("close", path)
        except Killed:
            self._left_open.append(context)  # closing it would clean up, which the dead do not
            raise
        except BaseException as error:
            context.__exit__(type(error), error, error.__traceback__)
            raise
        context.__exit__(None, None, None)
        self.faults.done(operation)

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`."""
        operation = self.faults.step("put", path)
        if operation.half:
            raise self.faults.torn("put", path)
        self.inner.put(path, data, if_absent=if_absent)
        self.faults.done(operation)

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`."""
        for path in paths:
            operation = self.faults.step("delete", path)
            self.inner.delete(path)
            self.faults.done(operation)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        self.faults.step("list", prefix)
        return self.inner.list(prefix)


@dataclass
class _FaultyWriter:
    _faults: Faults
    _path: str
    _inner: Writer

    def write(self, data: Buffer) -> int:
        """Append."""
        view = byte_view(data)
        operation = self._faults.step("write", self._path)
        if operation.half:
            self._inner.write(view[: view.nbytes // 2])
            raise self._faults.torn("write", self._path)
        written = self._inner.write(view)
        self._faults.done(operation)
        return written

    def tell(self) -> int:
        """Bytes so far."""
        return self._inner.tell()


@dataclass
class _FaultySizedWriter:
    _faults: Faults
    _path: str
    _inner: PositionalWriter

    @property
    def concurrent(self) -> int:
        """As of the inner writer."""
        return self._inner.concurrent

    @property
    def part_size(self) -> int:
        """As of the inner writer."""
        return self._inner.part_size

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See :meth:`PositionalWriter.write_at`. One operation."""
        operation = self._faults.step("write_at", self._path)
        if operation.half:
            data = b"".join(byte_view(buffer) for buffer in buffers)
            if not self._inner.part_size:  # half a part of an upload is no part
                self._inner.write_at(offset, [data[: len(data) // 2]])
            raise self._faults.torn("write_at", self._path)
        self._inner.write_at(offset, buffers)
        self._faults.done(operation)
