"""Carrying out the plans of a wave: several files and threads in flight, digests while the bytes are in the cache."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ..catalog import FileRow
from ..errors import StoreError
from ..storage.batched import finish_run, read_runs
from ..storage.blocks import block_digest
from ..storage.local import LocalStore
from ..storage.preadv import available, fill, view_of
from ..storage.store import Range, Store
from .copies import Wave
from .pieces import CALL, FilePlan
from .stage import Taker

__all__ = ["BadBlockError", "Job", "Runner", "by_file"]


_BATCH = 32
"""Runs of a task from which on they are read by one call."""


class BadBlockError(Exception):
    """A block is not what its digest says; becomes a CorruptCheckpointError that names tensors."""

    def __init__(self, file: int, block: int, found: int, expected: int) -> None:
        super().__init__(file, block, found, expected)
        self.file, self.block, self.found, self.expected = file, block, found, expected


@dataclass(frozen=True, slots=True)
class Job:
    """One file of a wave."""

    number: int
    row: FileRow
    plan: FilePlan
    digests: npt.NDArray[np.uint64] | None


class _File:
    """A file that is open while one of its tasks is under way."""

    def __init__(self, store: LocalStore, path: str, plan: FilePlan) -> None:
        self._store, self._path, self._left = store, path, len(plan.task) - 1
        self._start, self._stop = int(plan.start[0]), int(plan.start[-1] + plan.length[-1])
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._fd = -1

    def enter(self) -> int:
        with self._lock:
            if self._fd < 0:
                self._fd, size = self._open.enter_context(self._store.opened(self._path))
                self._store.check_end(self._path, self._start, self._stop - self._start, size)
            return self._fd

    def leave(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self.close()

    def close(self) -> None:
        self._open.close()
        self._fd = -1


class _Units:
    """Counts, for each scratch unit of a wave, the tasks that have still to bring bytes."""

    def __init__(self, wave: Wave, arena: torch.Tensor, taker: Taker) -> None:
        self._wave, self._arena, self._taker = wave, arena, taker
        self._lock = threading.Lock()
        self._left = [0] * len(wave.units)

    def expect(self, plan: FilePlan) -> list[list[int]]:
        """The units of each task of a plan."""
        if not len(self._wave.units):
            return [[] for _ in range(len(plan.task) - 1)]
        edges = plan.call[plan.task]
        out = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            own = np.unique(plan.unit[first:last])
            out.append([u for u in own.tolist() if u >= 0])
            for u in out[-1]:
                self._left[u] += 1
        return out

    def arrived(self, units: list[int]) -> None:
        for u in units:
            with self._lock:
                self._left[u] -= 1
                ready = not self._left[u]
            if ready:
                unit = self._wave.units[u]
                self._taker.take(self._arena[unit.offset : unit.offset + unit.length], unit)


class Runner:
    """Threads and their buffers, for all waves of one load."""

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ucp-read") if threads > 1 else None
        self._local = threading.local()
        self._stop = threading.Event()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, wave: Wave, jobs: list[Job], arena: torch.Tensor, taker: Taker) -> None:
        """Read all pieces and hand complete units to the taker. The first error of any thread is raised, after all threads stopped."""
        units = _Units(wave, arena, taker)
        local = isinstance(self._store, LocalStore) and available()
        work: list[tuple[Job, _File | None, int, list[int], npt.NDArray[np.uint64]]] = []
        files: list[_File] = []
        for job in jobs:
            plan = job.plan
            table = np.empty((len(plan.start), 2), dtype=np.uint64)
            table[:, 0] = plan.address
            table[:, 1] = plan.length
            file = None
            if local:
                assert isinstance(self._store, LocalStore)
                file = _File(self._store, job.row.path, plan)
                files.append(file)
            for t, own in enumerate(units.expect(plan)):
                work.append((job, file, t, own, table))

        def one(item: tuple[Job, _File | None, int, list[int], npt.NDArray[np.uint64]]) -> None:
            job, file, t, own, table = item
            if self._stop.is_set():
                return
            if file is not None:
                self._read_local(job, file.enter(), t, table)
                file.leave()
            else:
                self._read_store(job, t)
            units.arrived(own)

        futures: list[Future[None]] = []
        try:
            if self._pool is None or len(work) == 1:
                for item in work:
                    one(item)
                return
            futures += [self._pool.submit(one, item) for item in work]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # also after an interrupt: nobody writes into memory or reads from a closed file once this returns
            if not all(future.done() for future in futures):
                self._stop.set()
                for future in futures:
                    future.cancel()
                wait(futures)
            for file in files:
                file.close()
        for future in futures:
            if not future.cancelled():
                future.result()

    # -- local files -------------------------------------------------------------------------------------------------------

    def _buffer(self) -> npt.NDArray[np.uint8]:
        """Filler of one call; each thread has its own."""
        held: npt.NDArray[np.uint8] | None = getattr(self._local, "buffer", None)
        if held is None:
            held = self._local.buffer = np.empty(CALL, dtype=np.uint8)
        return held

    def _read_local(self, job: Job, fd: int, t: int, table: npt.NDArray[np.uint64]) -> None:
        plan, path = job.plan, job.row.path
        c0, c1 = int(plan.task[t]), int(plan.task[t + 1])
        calls = np.arange(c0, c1)
        first = plan.call[c0:c1]
        # runs that are far apart: one piece each, wanted, and no digest is checked
        alone = (plan.call[c0 + 1 : c1 + 1] - first == 1) & (plan.call_block[c0:c1] < 0) & ~plan.filler[first]
        if int(alone.sum()) >= _BATCH:
            runs = plan.call_start[c0:c1][alone], plan.call_length[c0:c1][alone], plan.address[first[alone]]
            if not read_runs(fd, path, *runs):
                _read_one_by_one(fd, path, *runs)
            calls = calls[~alone]
            if not len(calls):
                return
        p0, p1 = int(plan.call[c0]), int(plan.call[c1])
        mask = plan.filler[p0:p1]
        table = table[p0:p1]
        if mask.any():
            table = table.copy()
            table[mask, 0] += np.uint64(self._buffer().ctypes.data)
        base = table.ctypes.data
        columns = (plan.call[calls], plan.call[calls + 1], plan.call_start[calls], plan.call_length[calls], plan.call_block[calls])
        hasher = _Hasher(job)
        for p, q, start, length, block in zip(*(column.tolist() for column in columns), strict=True):
            fill(fd, base + 16 * (p - p0), q - p, start, length, path)
            if block >= 0:
                if q - p == 1:
                    hasher.add(block, int(table[p - p0, 0]), length)
                else:
                    for address, size in table[p - p0 : q - p0].tolist():
                        hasher.add(block, address, size)

    # -- any other store ----------------------------------------------------------------------------------------------------

    def _read_store(self, job: Job, t: int) -> None:
        """Each consecutive range of the task in one request: into its destination where that is one place, else through a buffer."""
        plan, path = job.plan, job.row.path
        c0, c1 = int(plan.task[t]), int(plan.task[t + 1])
        first, last = int(plan.call[c0]), int(plan.call[c1])
        start, length = plan.start[first:last], plan.length[first:last]
        address, filler = plan.address[first:last], plan.filler[first:last]
        ranges: list[Range] = []
        into: list[memoryview] = []
        buffers: list[tuple[memoryview, int, int]] = []
        places: list[int] = []  # of each piece, where its bytes are after reading
        edges = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), start[1:] != start[:-1] + length[:-1])))
        for a, b in zip(edges.tolist(), [*edges[1:].tolist(), len(start)], strict=True):
            size = int(length[a:b].sum())
            straight = not filler[a:b].any() and bool((address[a + 1 : b] == address[a : b - 1] + length[a : b - 1]).all())
            if straight:
                view, begin = view_of(int(address[a]), size), int(address[a])
            else:
                buffer = np.empty(size, dtype=np.uint8)
                view, begin = buffer.data, buffer.ctypes.data
                buffers.append((view, a, b))
            places.extend((begin + start[a:b] - start[a]).tolist())
            ranges.append(Range(path, int(start[a]), size))
            into.append(view)
        self._store.read_ranges(ranges, into)
        hasher = _Hasher(job)
        call = plan.call[c0 : c1 + 1] - first
        for c, block in enumerate(plan.call_block[c0:c1].tolist()):
            if block >= 0:
                for k in range(int(call[c]), int(call[c + 1])):
                    hasher.add(block, places[k], int(length[k]))
        for view, a, b in buffers:
            origin = int(start[a])
            for k in range(a, b):
                if not filler[k]:
                    at, size = int(start[k]) - origin, int(length[k])
                    view_of(int(address[k]), size)[:] = view[at : at + size]


def _read_one_by_one(
    fd: int, path: str, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], address: npt.NDArray[np.int64]
) -> None:
    """Runs that are far apart, each in one call: as little as possible around the system call."""
    low = int(address.min())
    # a view from the first to the last byte that is written; only slices of it, which are ours, are touched
    reach = view_of(low, int(address.max()) - low + int(lengths.max()))
    preadv = os.preadv
    for start, length, at in zip(starts.tolist(), lengths.tolist(), (address - low).tolist(), strict=True):
        try:
            got = preadv(fd, (reach[at : at + length],), start)
        except OSError as error:
            raise StoreError(f"{path}: reading at byte {start} failed: {error.strerror or error}") from error
        if got < length:
            finish_run(fd, path, start, length, low + at, got)


class _Hasher:
    """Digests of the blocks of one task, from pieces in file order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        blocks = job.row.blocks
        self._block = blocks.size if blocks is not None else 0
        self._open = xxhash.xxh3_64()
        self._filled = 0

    def add(self, block: int, address: int, length: int) -> None:
        digests = self._job.digests
        assert digests is not None
        whole = min(self._block, self._job.row.size - block * self._block)
        view = view_of(address, length)
        if length == whole:
            found = block_digest(view)
        else:
            if not self._filled:
                self._open.reset()
            self._open.update(view)
            self._filled += length
            if self._filled < whole:
                return
            self._filled = 0
            found = self._open.intdigest()
        expected = int(digests[block])
        if found != expected:
            raise BadBlockError(self._job.number, block, found, expected)


def by_file(wave: Wave) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(file, rows) of a wave."""
    order = np.argsort(wave.file, kind="stable")
    cuts = np.flatnonzero(np.diff(wave.file[order])) + 1
    for rows in np.split(order, cuts):
        yield int(wave.file[rows[0]]), rows
