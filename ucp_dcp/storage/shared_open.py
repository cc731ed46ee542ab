"""Opening a foreign checkpoint on N ranks: each of its files is parsed once, by one rank, and all ranks get the records (D15)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist

from ..errors import UCPError
from ..formats import Source, open_source
from .store import Store

__all__ = ["open_shared"]


def open_shared(store: Store, group: dist.ProcessGroup, *, prefer: Literal["ucp", "stock"] | None = None) -> Source:
    """``open_source`` with its file parsing spread over the ranks of ``group`` (collective).

    Every rank gets an equal Source. A file that one rank cannot parse is the same error on all.
    """

    def parse_all(paths: Sequence[str], parse: Callable[[str], Any]) -> list[Any]:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        mine: dict[int, Any] = {}
        failed: UCPError | None = None
        for i in range(rank, len(paths), world):
            try:
                mine[i] = parse(paths[i])
            except UCPError as error:
                failed = error
                break
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (mine, failed), group=group)
        for _, cause in everyone:
            if cause is not None:
                raise cause
        records: dict[int, Any] = {}
        for part, _ in everyone:
            records.update(part)
        return [records[i] for i in range(len(paths))]

    return open_source(store, prefer=prefer, parse_all=parse_all)
