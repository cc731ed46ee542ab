"""Checkpoints of any format as a catalog over a store: ours, stock DCP, DeepSpeed ZeRO."""

from __future__ import annotations

from .dcp import DcpSource, catalog_from_metadata, open_dcp
from .detect import ParseAll, open_source
from .source import Located, Source
from .ucp import open_ucp

__all__ = ["DcpSource", "Located", "ParseAll", "Source", "catalog_from_metadata", "open_dcp", "open_source", "open_ucp"]
