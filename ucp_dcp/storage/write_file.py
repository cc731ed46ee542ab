"""Writes the data files of one rank: bytes go from where they are to their place in the file, digested on the way, by a few threads.

A file is cut into slices of whole blocks. A thread takes the next slice, has those of its payloads brought to the host that do not lie
in memory as the file wants them (two buffers per thread, so that the next slice is copied while this one is written), and then, block by
block, digests the bytes and writes them: the second finds them in the cache of the first. Memory, whatever the size of the state: per
thread two buffers of ``SLICE`` bytes and one of ``BLOCK``. What lies ready in memory is not copied, but for small pieces, which are joined.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ..catalog import FileRow
from ..errors import StoreError
from .blocks import BLOCK, U64, block_count, block_digest, sidecar_of, write_digests
from .file_layout import FileLayout, Part
from .store import PositionalWriter, Store, create_sized

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SLICE", "FileJob", "Payloads", "Stager", "write_file", "write_files"]

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


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to write."""

    path: str
    layout: FileLayout
    payloads: Payloads


def write_files(store: Store, jobs: Sequence[FileJob], *, digests: bool = True) -> list[FileRow]:
    """Write files at the same time, each with its sidecar; all durable on return.

    A file has a thread of its own, and more only where there are fewer files than the store takes writes at once. Raises as
    :func:`write_file` does; the first error of any thread ends the others, and no file is left.
    """
    stop = threading.Event()
    complete: list[str] = []
    rows: dict[str, FileRow] = {}

    def one(job: FileJob) -> None:
        found = write_file(store, job.path, job.layout, job.payloads, digests=digests, share=len(jobs), stop=stop)
        complete.append(job.path)
        rows[job.path] = FileRow(job.path, job.layout.size, write_digests(store, job.path, found) if found is not None else None)

    try:
        if len(jobs) == 1:
            one(jobs[0])
        else:
            _together([partial(one, job) for job in jobs], stop)
    except BaseException:
        # the file that failed is gone already; those that were complete before belong to no checkpoint either
        for path in complete:
            with contextlib.suppress(StoreError):
                store.delete(path, sidecar_of(path))
        raise
    return [rows[job.path] for job in jobs]


def write_file(
    store: Store,
    path: str,
    layout: FileLayout,
    payloads: Payloads,
    *,
    digests: bool = True,
    share: int = 1,
    stop: threading.Event | None = None,
) -> npt.NDArray[np.uint64] | None:
    """Write all bytes of a file; durable on return. Returns the digest of each block, None without ``digests``.

    ``share``: files that are being written at the same time and share the threads. ``stop``: set when another of them failed.

    Raises StoreError naming the file, and whatever ``payloads`` raise; the first error of any thread ends the others, and the file is gone.
    """
    found = np.zeros(block_count(layout.size), dtype=U64) if digests else None
    with create_sized(store, path, layout.size) as file:
        run = _Run(file, layout, payloads, found, share, stop if stop is not None else threading.Event())
        if run.workers == 1:
            run.work()
        else:
            _together([run.work] * run.workers, run.stop)
    return found


def _together(tasks: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Each in a thread of its own. Returns, or raises the first error, when none of them is running any more.

    ``stop`` is set at the first error: the tasks look at it.
    """
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(task,), name=f"ucp-write-{i}", daemon=True) for i, task in enumerate(tasks)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:
        stop.set()  # an interrupt: the file must not be closed under the feet of a thread
        for thread in started:
            thread.join()
        raise
    if errors:
        raise errors[0]


class _Run:
    def __init__(
        self,
        file: PositionalWriter,
        layout: FileLayout,
        payloads: Payloads,
        digests: npt.NDArray[np.uint64] | None,
        share: int,
        stop: threading.Event,
    ) -> None:
        self._file, self._layout, self._payloads, self._digests = file, layout, payloads, digests
        self._unit = file.part_size or BLOCK
        if self._unit % BLOCK:
            raise ValueError(f"the store wants parts of {self._unit} bytes, which is no multiple of the {BLOCK} bytes of a block")
        self._slice = max(SLICE // self._unit, 1) * self._unit
        slices = -(-layout.size // self._slice)
        self._pending = deque(range(0, layout.size, self._slice))
        self.workers = max(1, min(file.concurrent // share, slices))
        self.stop = stop

    def work(self) -> None:
        """Take slices until there is none."""
        stager = self._payloads.stager(self._slice)
        slot = 0
        write: Callable[[], None] | None = None
        try:
            while not self.stop.is_set():
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
            if self.stop.is_set():
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
