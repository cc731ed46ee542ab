"""Moving stored chunks into memory, verified: byte ranges planned per file, read straight into the destination where that is possible.

A :class:`Copy` is one rectangular piece of one chunk and the torch view that receives it. ``copies`` turns copies into columns of pieces,
``pieces`` plans each file (pure), ``run`` reads with several threads, ``stage`` owns the scratch memory, ``twins`` spares second reads.
A chunk is never read whole when a part is wanted. Extra memory: at most two arenas of ``SCRATCH`` bytes, one buffer of 1 MiB per thread,
and the columns of one wave (2^18 pieces, about 40 MiB), so below 256 MiB whatever is loaded; a store that is no local folder holds up to
32 MiB per thread besides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptCheckpointError
from ..storage.local import LocalStore
from .blame import describe, tensors_at
from .checked import CheckedStore, Digests, checked_source
from .copies import Copy, Wave, flat_bytes, waves
from .pieces import Verify, layers, plan_file
from .run import BadBlockError, Job, Runner, by_file
from .stage import Arenas, Taker, taker_for
from .twins import fill_twins, split_twins

if TYPE_CHECKING:
    from ..formats import Source

__all__ = [
    "SCRATCH",
    "Copy",
    "Digests",
    "ReadStats",
    "Verify",
    "checked_source",
    "default_threads",
    "describe",
    "flat_bytes",
    "read_copies",
    "tensors_at",
]

SCRATCH = 64 << 20
"""Bytes of scratch memory filled at once (twice that for a CUDA device)."""
_TASK = 8 << 20
_TASK_REMOTE = 32 << 20
"""Bytes of one thread's next piece of work: small enough to spread, large enough that a remote store gets many requests at once."""


def default_threads() -> int:
    """Threads of a read: the cores this process may use, at most 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores)


@dataclass(slots=True)
class ReadStats:
    """What a read did: bytes asked of the store, consecutive ranges, bytes that were wanted, and of those the bytes in checked blocks.

    A box that several destinations want counts once where it is read once.
    """

    bytes_read: int = 0
    ranges: int = 0
    bytes_wanted: int = 0
    bytes_verified: int = 0

    @property
    def bytes_unverified(self) -> int:
        """Wanted bytes that no digest was checked for."""
        return self.bytes_wanted - self.bytes_verified


def read_copies(
    source: Source,
    copies: Iterable[Copy],
    *,
    gap: int = 0,
    verify: Verify = "covered",
    threads: int | None = None,
    digests: Digests | None = None,
    stats: ReadStats | None = None,
    taker: Taker | None = None,
    scratch: int = SCRATCH,
) -> ReadStats:
    """Read every copy's bytes into its view.

    Args:
        source: an open checkpoint.
        copies: what to read; views may be on any device, of any dtype that torch can cast to, and strided.
        gap: holes of at most this many bytes may be read too, where that costs less or completes a block: at most as many bytes again as
            are wanted, but for holes below 512 bytes between short runs.
        verify: ``"covered"``: every block that is wholly read is checked; ``"strict"``: whole blocks are read; ``"off"``.
        threads: default: what the store says, else :func:`default_threads`.
        digests: keeps digests between calls.
        taker: what empties scratch memory; chosen by the devices of the views.
        scratch: bytes of one arena.

    Raises StoreError / CorruptCheckpointError naming the file when bytes are missing, with the tensors when they are damaged. Destinations
    may then hold part of the new values.
    """
    stats = stats if stats is not None else ReadStats()
    work = [c for c in copies if c.view.numel()]
    if not work:
        return stats
    located = source.locate(np.asarray([c.chunk for c in work], dtype=np.int64))
    files = source.catalog.files
    rows, twins = split_twins(work, located.file, located.offset, located.strides, located.dtype)
    order = [rows[i] for i in np.lexsort((located.offset[rows], located.file[rows])).tolist()]
    file, offset, codes = located.file.tolist(), located.offset.tolist(), located.dtype.tolist()
    taker = taker if taker is not None else taker_for(c.view for c in work)
    digests = digests if digests is not None else Digests(source)
    store = source.store.store if isinstance(source.store, CheckedStore) else source.store
    wanted = threads if threads is not None else getattr(store, "threads", None) or default_threads()
    planned = waves(
        [work[i] for i in order],
        [file[i] for i in order],
        [offset[i] for i in order],
        [located.strides[i] for i in order],
        [codes[i] for i in order],
        gap=gap,
        scratch=scratch,
        paths=[f.path for f in files],
    )
    arenas = Arenas(taker)
    task = _TASK if isinstance(store, LocalStore) else _TASK_REMOTE
    runner = Runner(store, max(1, wanted))
    previous: tuple[int, int] | None = None
    try:
        for wave in planned:
            arena = arenas.get(wave.scratch)
            with_unit = wave.unit >= 0
            wave.address[with_unit] += arena.data_ptr()
            before = stats.bytes_verified
            jobs, previous = _jobs(source, digests, wave, verify, gap, task, stats, previous)
            # Small holes inside a box are pieces too; nobody wanted them, so they are no verified bytes.
            holes = max(0, int(wave.length.sum()) - wave.wanted)
            stats.bytes_verified = max(before, stats.bytes_verified - holes)
            try:
                runner.run(wave, jobs, arena, taker)
            except BadBlockError as error:
                raise digests.error(error.file, error.block, error.found, error.expected) from None
            stats.bytes_wanted += wave.wanted
            arenas.used()
    finally:
        runner.close()
        arenas.wait()
    fill_twins(twins)
    return stats


def _jobs(
    source: Source,
    digests: Digests,
    wave: Wave,
    verify: Verify,
    gap: int,
    task: int,
    stats: ReadStats,
    previous: tuple[int, int] | None,
) -> tuple[list[Job], tuple[int, int] | None]:
    """Plans of the files of a wave. ``previous``: the file in which the last wave ended, and where."""
    files = source.catalog.files
    jobs: list[Job] = []
    edge: tuple[int, int] | None = None
    parts = list(by_file(wave))
    for at, (number, rows) in enumerate(parts):
        row = files[number]
        start, length = wave.start[rows], wave.length[rows]
        end = int((start + length).max())
        if row.blocks is not None and end > row.size:
            raise CorruptCheckpointError(f"{row.path}: a chunk ends at byte {end}, but the file should have {row.size} bytes")
        for layer, own in enumerate(layers(start, length)):
            picked = rows[own]
            head = layer == 0 and previous is not None and previous[0] == number and 0 <= int(wave.start[picked[0]]) - previous[1] <= gap
            tail = layer == 0 and wave.more and at == len(parts) - 1
            plan = plan_file(
                wave.start[picked],
                wave.length[picked],
                wave.address[picked],
                wave.unit[picked],
                size=row.size,
                block=row.blocks.size if row.blocks is not None else 0,
                verify=verify,
                gap=gap,
                task=task,
                widen=(head, tail),
            )
            checked = bool((plan.call_block >= 0).any())
            jobs.append(Job(number, row, plan, digests.of(number) if checked else None))
            stats.bytes_read += plan.bytes
            stats.ranges += plan.ranges
            stats.bytes_verified += plan.verified
        edge = (number, end)
    return jobs, edge
