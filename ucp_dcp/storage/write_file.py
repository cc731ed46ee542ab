"""Writes one rank's data file: bytes go from where they are to their place in the file, digested on the way, by a few threads.

The file is cut into slices of whole blocks. A thread takes the next slice, has those of its payloads brought to the host that do not lie
in memory as the file wants them (two buffers per thread, so that the next slice is copied while this one is written), and then, block by
block, digests the bytes and writes them: the second finds them in the cache of the first. Memory, whatever the size of the state: per
thread two buffers of ``SLICE`` bytes and one of ``BLOCK``. What lies ready in memory is not copied, but for small pieces, which are joined.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from .blocks import BLOCK, U64, block_count, block_digest
from .file_layout import FileLayout, Part
from .store import PositionalWriter, Store, create_sized

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SLICE", "Payloads", "Stager", "write_file"]

SLICE = 8 << 20
"""Bytes that a thread takes at once; a store with larger parts makes it larger."""
_JOIN = 64 << 10  # bytes: a block whose pieces are smaller on average is copied together first, which costs less than so many pieces


class Stager(Protocol):
    """Brings payloads to the host for one thread."""

    def stage(self, slot: int, origin: int, places: Sequence[int], parts: Sequence[Part]) -> tuple[list[memoryview], Callable[[], None]]:
        """The bytes of each part, valid once the returned function has come back, until the next call with this slot (0 or 1).

        ``places``: the byte of the file where each part begins; all lie within ``SLICE`` or one part of the store from ``origin``.
        """
        ...

    def release(self, parts: Sequence[Part]) -> None:
        """The bytes of these parts are written."""
        ...

    def close(self) -> None:
        """Nothing is copied any more when this returns. Called once, after an error too."""
        ...


class Payloads(Protocol):
    """The payloads of a file."""

    def stager(self, capacity: int) -> Stager:
        """What one thread uses; ``capacity``: bytes of a slice."""
        ...


def write_file(store: Store, path: str, layout: FileLayout, payloads: Payloads, *, digests: bool = True) -> npt.NDArray[np.uint64] | None:
    """Write all bytes of a file; durable on return. Returns the digest of each block, None without ``digests``.

    Raises StoreError naming the file, and whatever ``payloads`` raise; the first error of any thread ends the others, and the file is gone.
    """
    found = np.zeros(block_count(layout.size), dtype=U64) if digests else None
    with create_sized(store, path, layout.size) as file:
        run = _Run(file, layout, payloads, found)
        if run.workers == 1:
            run.work()
        else:
            run.threaded()
    return found


class _Run:
    def __init__(self, file: PositionalWriter, layout: FileLayout, payloads: Payloads, digests: npt.NDArray[np.uint64] | None) -> None:
        self._file, self._layout, self._payloads, self._digests = file, layout, payloads, digests
        self._unit = file.part_size or BLOCK
        if self._unit % BLOCK:
            raise ValueError(f"the store wants parts of {self._unit} bytes, which is no multiple of the {BLOCK} bytes of a block")
        self._slice = max(SLICE // self._unit, 1) * self._unit
        slices = -(-layout.size // self._slice)
        self._pending = deque(range(0, layout.size, self._slice))
        self.workers = max(1, min(file.concurrent, slices))
        self._errors: list[BaseException] = []
        self._stop = threading.Event()

    def threaded(self) -> None:
        """Work in several threads. Returns or raises when none of them is running any more."""
        threads = [threading.Thread(target=self._guarded, name=f"ucp-write-{i}", daemon=True) for i in range(self.workers)]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for thread in started:
                thread.join()
        except BaseException:
            self._stop.set()  # an interrupt: the file must not be closed under the feet of a thread
            for thread in started:
                thread.join()
            raise
        if self._errors:
            raise self._errors[0]

    def _guarded(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def work(self) -> None:
        """Take slices until there is none."""
        stager = self._payloads.stager(self._slice)
        slot = 0
        write: Callable[[], None] | None = None
        try:
            while not self._stop.is_set():
                following = self._staged(stager, slot)
                if write is not None:
                    write()
                if following is None:
                    return
                slot, write = 1 - slot, following
        finally:
            stager.close()

    def _staged(self, stager: Stager, slot: int) -> Callable[[], None] | None:
        """Begin to stage the next slice; returns what writes it, None when there is no more."""
        try:
            start = self._pending.popleft()
        except IndexError:
            return None
        stop = min(start + self._slice, self._layout.size)
        parts = self._layout.parts(start, stop)
        views, wait = stager.stage(slot, start, self._layout.places(parts), parts)

        def write() -> None:
            wait()
            self._write(start, self._layout.fill(start, stop, parts, views))
            stager.release(parts)

        return write

    def _write(self, start: int, buffers: list[Buffer]) -> None:
        """Digest and write the consecutive bytes of a slice, unit by unit."""
        at = start
        unit: list[Buffer] = []
        for block in _cut(buffers, BLOCK):
            if self._stop.is_set():
                return
            size = sum(map(len, block))  # type: ignore[arg-type]
            # a block of one tensor is the rule where bytes are many, and many pieces where tensors are small
            pieces: list[Buffer] = [b"".join(block)] if len(block) > 1 and size < _JOIN * len(block) else block
            if self._digests is not None:
                self._digests[at // BLOCK] = _digest(pieces)
            unit += pieces
            at += size
            if at - start >= self._unit:
                self._file.write_at(start, unit)
                start, unit = at, []
        if unit:
            self._file.write_at(start, unit)


def _cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """Consecutive buffers of bytes, regrouped into groups of ``size`` bytes; the last may be shorter."""
    group: list[Buffer] = []
    room = size
    for buffer in buffers:
        length = len(buffer)  # type: ignore[arg-type]
        if length < room:
            group.append(buffer)
            room -= length
            continue
        view = memoryview(buffer)
        while len(view) >= room:
            group.append(view[:room])
            yield group
            view = view[room:]
            group, room = [], size
        if view:
            group.append(view)
            room -= len(view)
    if group:
        yield group


def _digest(pieces: list[Buffer]) -> int:
    if len(pieces) == 1:
        return block_digest(pieces[0])
    stream = xxhash.xxh3_64()
    for piece in pieces:
        stream.update(piece)
    return stream.intdigest()
