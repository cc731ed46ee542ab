"""Our own checkpoints: ``ucp.json`` and the sections of the index (``docs/format.md``)."""

from __future__ import annotations

from ..catalog import Catalog
from ..storage.index_file import IndexFile
from ..storage.manifest import Manifest
from ..storage.store import Store
from .source import Source

__all__ = ["open_ucp"]


def open_ucp(store: Store, manifest: Manifest) -> Source:
    """The checkpoint of a committed manifest. Index sections are read and verified when they are first used.

    Raises CorruptCheckpointError, UnsupportedError.
    """
    catalog = Catalog.from_sections(IndexFile.of(store, manifest).load)
    return Source(catalog, store, "ucp", {**manifest.provenance, "generation": manifest.generation, "created": manifest.created})
