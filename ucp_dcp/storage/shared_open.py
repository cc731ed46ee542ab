"""Opening a foreign checkpoint on N ranks: each of its files is parsed once, by one rank, and all ranks get the records (D15).

Whether there is something to parse together, and whether it failed, each rank finds out by itself, and ranks may see different things (a
folder that is not shared, a stale listing). So every rank says what it is about to do before the collective in which it would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist

from ..errors import FormatError
from ..formats import Source, open_source
from ..planners.agree import agree, on_rank, portable
from .store import Store

__all__ = ["open_shared"]


class _AgreedError(Exception):
    """All ranks know of this error already."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


def open_shared(store: Store, group: dist.ProcessGroup, *, prefer: Literal["ucp", "stock"] | None = None) -> Source:
    """``open_source`` with its file parsing spread over the ranks of ``group`` (collective).

    Every rank gets an equal Source, or every rank raises: its own error, else that of the lowest rank that has one.
    """

    def announce(paths: Sequence[str] | None, error: Exception | None = None) -> None:
        """The next step of this rank: parse these files, or (None) nothing more. The ranks must be about to do the same."""
        steps: list[Any] = [None] * dist.get_world_size(group)
        mine = None if paths is None else list(paths)
        dist.all_gather_object(steps, (mine, None if error is None else portable(error)), group=group)
        if error is not None:
            raise _AgreedError(error)
        for rank, (_, cause) in enumerate(steps):
            if cause is not None:
                raise _AgreedError(on_rank(cause, rank))
        for rank, (theirs, _) in enumerate(steps):
            if theirs != steps[0][0]:
                raise _AgreedError(
                    FormatError(
                        f"{store.url}: ranks 0 and {rank} do not see the same checkpoint there; it must lie where all "
                        "ranks can read it, and nobody may be writing to it"
                    )
                )

    def parse_all(paths: Sequence[str], parse: Callable[[str], Any]) -> list[Any]:
        announce(paths)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        mine: dict[int, Any] = {}
        failed: Exception | None = None
        try:
            for i in range(rank, len(paths), world):
                mine[i] = parse(paths[i])
        except Exception as error:
            mine, failed = {}, error
        try:
            agree(failed, group)
        except Exception as error:
            raise _AgreedError(error) from error
        everyone: list[dict[int, Any]] = [{}] * world
        dist.all_gather_object(everyone, mine, group=group)
        records = {i: record for part in everyone for i, record in part.items()}
        return [records[i] for i in range(len(paths))]

    try:
        try:
            source = open_source(store, prefer=prefer, parse_all=parse_all)
        except _AgreedError:
            raise
        except Exception as error:
            announce(None, error)
            raise
        announce(None)
        return source
    except _AgreedError as agreed:
        raise agreed.cause from None
