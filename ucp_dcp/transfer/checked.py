"""Digests of an open checkpoint, and a store that checks what small readers (objects) get from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import CorruptCheckpointError
from ..storage.blocks import block_digest, read_digests
from ..storage.store import Entry, Range, Store, Writer, target_views
from .blame import describe

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..formats import Source

__all__ = ["CheckedStore", "Digests", "checked_source"]


@dataclass
class Digests:
    """Digests of the files of one checkpoint, each read when it is first needed."""

    source: Source
    _known: dict[int, npt.NDArray[np.uint64] | None] = field(default_factory=dict)

    def of(self, file: int) -> npt.NDArray[np.uint64] | None:
        """Of the blocks of a file; None where it has none. Raises CorruptCheckpointError."""
        if file not in self._known:
            store = self.source.store
            self._known[file] = read_digests(store.store if isinstance(store, CheckedStore) else store, self.source.catalog.files[file])
        return self._known[file]

    def error(self, file: int, block: int, found: int, expected: int) -> CorruptCheckpointError:
        """The error for a block with another digest."""
        row = self.source.catalog.files[file]
        assert row.blocks is not None
        start = block * row.blocks.size
        stop = min(start + row.blocks.size, row.size)
        return CorruptCheckpointError(
            f"{row.path}: bytes {start} to {stop} are damaged: their digest is {found:016x}, expected {expected:016x}. "
            f"There lie: {describe(self.source, file, start, stop)}. Load another copy of this checkpoint"
        )


class CheckedStore:
    """A store over another whose reads of digested files read, and check, whole blocks. For small reads: every block is read by itself."""

    def __init__(self, store: Store, digests: Digests) -> None:
        self.store = store
        self._digests = digests
        self._file = {row.path: i for i, row in enumerate(digests.source.catalog.files) if row.blocks is not None}
        self._last: tuple[int, int, bytes] | None = None

    @property
    def url(self) -> str:
        """Of the store below."""
        return self.store.url

    def __repr__(self) -> str:
        return f"CheckedStore({self.store!r})"

    def size(self, path: str) -> int:
        """See :class:`Store`."""
        return self.store.size(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :class:`Store`."""
        if path not in self._file:
            return self.store.read(path, start, length)
        buffer = bytearray(self.store.size(path) - start if length is None else length)
        self.read_ranges([Range(path, start, len(buffer))], [memoryview(buffer)])
        return bytes(buffer)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :class:`Store`. Raises CorruptCheckpointError naming block and tensors where a digest differs."""
        plain = [i for i, wanted in enumerate(ranges) if wanted.path not in self._file]
        if plain:
            self.store.read_ranges([ranges[i] for i in plain], [into[i] for i in plain])
        for wanted, view in zip(ranges, target_views(ranges, into), strict=True):
            file = self._file.get(wanted.path)
            if file is None:
                continue
            row = self._digests.source.catalog.files[file]
            if row.blocks is None:
                continue
            if wanted.start + wanted.length > row.size:
                raise CorruptCheckpointError(
                    f"{row.path}: {wanted.length} bytes from byte {wanted.start} were wanted, but the file should have {row.size} bytes"
                )
            step, at = row.blocks.size, wanted.start
            while at < wanted.start + wanted.length:
                block = at // step
                stop = min((block + 1) * step, wanted.start + wanted.length)
                data = self._block(file, block)
                view[at - wanted.start : stop - wanted.start] = data[at - block * step : stop - block * step]
                at = stop

    def _block(self, file: int, block: int) -> memoryview:
        last = self._last
        if last is not None and last[:2] == (file, block):
            return memoryview(last[2])
        row = self._digests.source.catalog.files[file]
        digests = self._digests.of(file)
        assert row.blocks is not None and digests is not None
        start = block * row.blocks.size
        data = self.store.read(row.path, start, min(row.blocks.size, row.size - start))
        found, expected = block_digest(data), int(digests[block])
        if found != expected:
            raise self._digests.error(file, block, found, expected)
        self._last = (file, block, data)
        return memoryview(data)

    def create(self, path: str) -> AbstractContextManager[Writer]:
        """See :class:`Store`."""
        return self.store.create(path)

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :class:`Store`."""
        self.store.put(path, data, if_absent=if_absent)

    def delete(self, *paths: str) -> None:
        """See :class:`Store`."""
        self.store.delete(*paths)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :class:`Store`."""
        return self.store.list(prefix)


def checked_source(source: Source, digests: Digests) -> None:
    """From now on objects of a source are read through its digests, where it has any."""
    if not isinstance(source.store, CheckedStore) and any(row.blocks is not None for row in source.catalog.files):
        source.store = CheckedStore(source.store, digests)
