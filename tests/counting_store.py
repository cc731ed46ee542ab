"""A store that counts what is asked of it: tests prove with it that only the bytes that are needed are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucp_dcp.storage.store import Entry, Range, Store, Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CountingStore", "Counts"]


@dataclass(slots=True)
class Counts:
    """What was asked of a store since it was made, or since ``reset``."""

    calls: dict[str, int] = field(default_factory=dict)
    """Calls by method name."""
    ranges: list[Range] = field(default_factory=list)
    """Every range that was read, in order; a ``read`` is one range."""
    bytes_written: int = 0

    @property
    def bytes_read(self) -> int:
        return sum(r.length for r in self.ranges)

    @property
    def requests(self) -> int:
        """Ranges asked for; the store below may still join neighbours or split large ones."""
        return len(self.ranges)

    def bytes_of(self, path: str) -> int:
        return sum(r.length for r in self.ranges if r.path == path)


class CountingStore:
    """Passes everything on to ``store`` and counts in ``counts``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counts = Counts()

    def reset(self) -> Counts:
        """Start from zero; returns what was counted until now."""
        counts, self.counts = self.counts, Counts()
        return counts

    def _called(self, method: str) -> None:
        self.counts.calls[method] = self.counts.calls.get(method, 0) + 1

    @property
    def url(self) -> str:
        return self.store.url

    def size(self, path: str) -> int:
        self._called("size")
        return self.store.size(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._called("read")
        data = self.store.read(path, start, length)
        self.counts.ranges.append(Range(path, start, len(data)))
        return data

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        self._called("read_ranges")
        self.store.read_ranges(ranges, into)
        self.counts.ranges.extend(ranges)

    def create(self, path: str) -> AbstractContextManager[Writer]:
        self._called("create")
        return self._counted(self.store.create(path))

    @contextmanager
    def _counted(self, context: AbstractContextManager[Writer]) -> Iterator[Writer]:
        with context as writer:
            yield _CountingWriter(writer, self.counts)

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._called("put")
        self.store.put(path, data, if_absent=if_absent)
        self.counts.bytes_written += memoryview(data).nbytes

    def delete(self, *paths: str) -> None:
        self._called("delete")
        self.store.delete(*paths)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._called("list")
        return self.store.list(prefix)


@dataclass(slots=True)
class _CountingWriter:
    writer: Any
    counts: Counts

    def write(self, data: Buffer) -> int:
        written: int = self.writer.write(data)
        self.counts.bytes_written += written
        return written

    def tell(self) -> int:
        position: int = self.writer.tell()
        return position
