"""Megatron's legacy checkpoints (``--ckpt-format torch``: ``iter_*/mp_rank_*/model_optim_rng.pt``), opened where they lie.

Each rank's file is parsed into a plain *record* and the records are joined to global tensors, as for DeepSpeed: names with global layer
and expert numbers, tensor-parallel shards in place, the distributed optimizer's buffers taken apart. ``docs/megatron-legacy.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...storage.store import Store
from .catalog import MegatronLegacySource, catalog_from_records
from .folder import Folder, find_legacy
from .parse import parse_file

__all__ = ["Folder", "MegatronLegacySource", "catalog_from_records", "find_legacy", "open_legacy", "parse_file"]


def open_legacy(
    store: Store, folder: Folder, parse_all: Callable[[Sequence[str], Callable[[str], Any]], list[Any]]
) -> MegatronLegacySource:
    """Open the checkpoint of an iteration's folder.

    What is read: of each file the zip directory, the pickle and local headers. No tensor byte, and nothing is written or run.

    Raises CorruptCheckpointError naming the file, and the parameter where it is about one, that is missing or does not fit;
    UnsupportedError for what this version cannot read; UnsafePickleError; StoreError.
    """
    records = parse_all(folder.paths(), lambda path: parse_file(store, path))
    catalog, selects, provenance = catalog_from_records(records, folder.prefix)
    return MegatronLegacySource(catalog, store, provenance, selects)
