"""Gives a checkpoint of ours digests with another block size: the same data files, other sidecars, a new index and manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np

from ucp_dcp.formats import open_source
from ucp_dcp.storage.blocks import BlockHasher, sidecar_of, write_digests
from ucp_dcp.storage.index_file import IndexFile, write_index
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.manifest import MANIFEST, Manifest

__all__ = ["digest_checkpoint"]


def digest_checkpoint(folder: Path, block: int) -> None:
    store = LocalStore(folder, sync=False)
    manifest = Manifest.from_bytes(store.read(MANIFEST))
    source = open_source(store)
    rows = []
    for row in source.catalog.files:
        if row.blocks is not None:
            store.delete(row.blocks.path)
        hasher = BlockHasher(block)
        hasher.update(np.fromfile(folder / row.path, dtype=np.uint8).data if row.size else b"")
        assert not (folder / sidecar_of(row.path)).exists()
        made = write_digests(store, row.path, hasher.digests(), block)
        rows.append([made.path, made.size, made.xxh3])
    index = IndexFile.of(store, manifest)
    index.prefetch()
    sections = {name: index.load(name) for name in index}
    sections["file.blocks"] = msgspec.msgpack.encode(rows)
    path = manifest.index_path.replace(".ucp", f".{block}.ucp")
    size, table = write_index(store, path, sections)
    store.delete(manifest.index_path)
    store.put(MANIFEST, dataclasses.replace(manifest, index_path=path, index_size=size, sections=table).to_bytes())
