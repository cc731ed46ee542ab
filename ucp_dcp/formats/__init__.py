"""Checkpoints of any format as a catalog over a store: ours, stock DCP, DeepSpeed ZeRO."""

from __future__ import annotations

from .dcp import DcpSource, catalog_from_metadata, open_dcp
from .detect import ParseAll, open_source
from .mapped import MappedNames, MappedSource, map_source
from .source import Located, Source
from .ucp import open_ucp

__all__ = [
    "DcpSource",
    "Located",
    "MappedNames",
    "MappedSource",
    "ParseAll",
    "Source",
    "catalog_from_metadata",
    "map_source",
    "open_dcp",
    "open_source",
    "open_ucp",
]
