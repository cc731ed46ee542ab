"""DeepSpeed checkpoints (ZeRO stages 0 to 3, universal folders), opened where they lie: no conversion, no copy, DeepSpeed not needed.

A rank file is parsed by :func:`parse_file` into a plain *record* (numbers, strings, lists, dicts: it pickles and fits into a message),
and :func:`catalog_from_records` joins the records of all rank files. So N ranks may parse one N-th of the files each and exchange records
(D15): that is the ``parse_all`` argument of :func:`~ucp_dcp.formats.open_source`.

Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, runtime/engine.py (0.19); ``docs/deepspeed.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...storage.store import Store
from .catalog import DeepSpeedSource, catalog_from_records
from .folder import Folder, find_folder, list_tags
from .parse import parse_file
from .universal import UniversalFolder, find_universal, open_universal

__all__ = [
    "DeepSpeedSource",
    "Folder",
    "UniversalFolder",
    "catalog_from_records",
    "find_folder",
    "find_universal",
    "list_tags",
    "open_deepspeed",
    "open_universal",
    "parse_file",
]


def open_deepspeed(store: Store, folder: Folder, parse_all: Callable[[Sequence[str], Callable[[str], Any]], list[Any]]) -> DeepSpeedSource:
    """Open the checkpoint of a tag folder.

    What is read: of each rank file the zip directory, the pickle and local headers. No tensor byte (of stage 0 with fp32 masters: a few
    elements of each, to know which is which), and nothing is written. The first read of a tensor compares the optimizer's 0-d numbers
    (``step``) of all ranks; CorruptCheckpointError when they are of two saves.

    Raises CorruptCheckpointError naming the file that is missing, truncated or does not fit the others; UnsupportedError naming what
    this version does not handle (model parallelism, MoE, pipeline, ...); UnsafePickleError; StoreError.
    """
    records = parse_all(folder.paths(), lambda path: parse_file(store, path))
    catalog, selects, provenance, twins = catalog_from_records(records, folder.prefix)
    return DeepSpeedSource(catalog, store, {**provenance, "tag": folder.tag}, selects, twins)
