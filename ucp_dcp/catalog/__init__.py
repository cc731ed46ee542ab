"""The catalog of a checkpoint: tensors, chunks and objects in columns, to and from the index sections of ``docs/format.md``."""

from __future__ import annotations

from .builder import CatalogBuilder
from .catalog import Catalog, Load
from .codec import GROUP_OPS
from .rows import FileBlocks, FileRow, ObjectRow, PathTuple, TensorRow

__all__ = ["GROUP_OPS", "Catalog", "CatalogBuilder", "FileBlocks", "FileRow", "Load", "ObjectRow", "PathTuple", "TensorRow"]
