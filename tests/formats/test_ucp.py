"""Our own checkpoints as a source: written here from the parts that ``docs/format.md`` names, without the planners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from counting_store import CountingStore
from format_helpers import assemble, torch_bytes

from ucp_dcp.catalog import CatalogBuilder, ObjectRow
from ucp_dcp.errors import CorruptCheckpointError, ForeignSaveError
from ucp_dcp.formats import open_source
from ucp_dcp.names import Role
from ucp_dcp.storage.commit import commit, new_generation
from ucp_dcp.storage.index_file import write_index
from ucp_dcp.storage.manifest import Manifest
from ucp_dcp.storage.store import open_store

WHOLE = torch.arange(30.0).reshape(5, 6)


def write(path: Path) -> str:
    store, generation = open_store(path), new_generation()
    data, item = f"{generation}/__0_0.distcp", torch_bytes({"a": [1, torch.arange(3)]})
    with store.create(data) as writer:
        for part in (WHOLE[:2], WHOLE[2:].t()):
            writer.write(part.contiguous().numpy().tobytes())
        writer.write(item)
    build = CatalogBuilder()
    file = build.add_file(data, 120 + len(item))
    handle = build.add_tensor(key="w", role=Role.MASTER, fqn="net.w", dtype="float32", shape=(5, 6))
    boxes = np.asarray([[[0, 0], [2, 6]], [[2, 0], [3, 6]]])
    build.add_chunks(handle, boxes, file, np.asarray([0, 48]), strides=np.asarray([[6, 1], [1, 3]]))
    build.add_object(ObjectRow("extra", file=file, offset=120, length=len(item), encoding="torch_save"))
    build.add_object(ObjectRow("lr", value=0.5))
    index = f"{generation}/index.ucp"
    size, sections = write_index(store, index, build.build().to_sections())
    provenance = {"writer": "test"}
    manifest = Manifest.new(generation=generation, index_path=index, index_size=size, sections=sections, provenance=provenance)
    commit(store, manifest, None, overwrite=True)
    return generation


def test_open(tmp_path: Path) -> None:
    generation = write(tmp_path)
    store = CountingStore(open_store(tmp_path))
    source = open_source(store)
    assert source.format == "ucp"
    assert source.provenance["writer"] == "test" and source.provenance["generation"] == generation
    assert {r.path for r in store.counts.ranges} <= {"ucp.json", f"{generation}/index.ucp"}
    assert torch.equal(assemble(source, source.catalog.find_named(Role.MASTER, "net.w")), WHOLE)
    value = source.read_object(source.catalog.find_object("extra"))
    assert value["a"][0] == 1 and torch.equal(value["a"][1], torch.arange(3))
    assert source.read_object(source.catalog.find_object("lr")) == 0.5


def test_a_stock_save_over_it_is_noticed(tmp_path: Path) -> None:
    write(tmp_path)
    dcp.save({"v": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ForeignSaveError):
        open_source(tmp_path)
    assert open_source(tmp_path, prefer="ucp").catalog.keys == ("w",)
    stock = open_source(tmp_path, prefer="stock")
    assert stock.format == "dcp" and torch.equal(assemble(stock, stock.catalog.find("v")), torch.ones(2))


def test_an_object_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    generation = write(tmp_path)
    source = open_source(tmp_path)
    (tmp_path / generation / "__0_0.distcp").write_bytes(bytes(200))
    with pytest.raises(CorruptCheckpointError, match="__0_0"):
        source.read_object(source.catalog.find_object("extra"))
