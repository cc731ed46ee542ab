"""The ``.metadata`` written as opcodes is the object that stock code would have pickled."""

from __future__ import annotations

import pickle
import pickletools

import torch
from plans import rank_plan, rows_of, whole
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from ucp_dcp.planners.merge import merge_objects, merge_tensors
from ucp_dcp.planners.planned import plan_chunks, stock_state_dict_metadata, ucp_planner_data, with_objects
from ucp_dcp.planners.wire import ObjectEntry
from ucp_dcp.storage.stock_metadata import stock_metadata_bytes

TENSORS = {
    "zero_d": ("float32", ()),
    "empty": ("int64", (0, 3)),
    "wide": ("bfloat16", (70_000, 300)),
    "four": ("bool", (2, 3, 2, 5)),
    "ünïcode.name": ("float64", (1 << 33,)),
    **{f"many.{i}": ("float32", (8, 2)) for i in range(300)},
}


def test_equal_to_what_stock_code_pickles() -> None:
    plans = []
    for rank in range(4):
        boxes = {k: rows_of(s, rank, 4) if s and s[0] else [] for k, (_, s) in TENSORS.items()}
        boxes["zero_d"] = [whole(())]
        entries = [ObjectEntry("obj.lr", ("obj", "lr"), b"x", 100, False), ObjectEntry("rng", ("rng",), bytes([rank]), 50, True)]
        plans.append(rank_plan(TENSORS, boxes, None, entries))
    planned, _ = with_objects(*plan_chunks(merge_tensors(plans), 4), merge_objects(plans))
    count = len(planned.owner)
    files = [f"g-0/__{rank}_0.distcp" for rank in range(4)]
    starts = [i * (1 << 33) + i for i in range(count)]
    lengths = [(200, 70_000, 1 << 40)[i % 3] for i in range(count)]
    objects = [(entry.key, rank, 64 * i, entry.length) for i, (entry, rank) in enumerate(planned.objects)]
    meta = StorageMeta(checkpoint_id="/some/where", save_id="abc")

    data = stock_metadata_bytes(planned, planned.owner.tolist(), starts, lengths, objects, files, meta, "1.0.0")

    storage = {}
    for c, (t, offset, _) in enumerate(planned.boxes()):
        storage[MetadataIndex(planned.rows[t].key, torch.Size(offset))] = _StorageInfo(files[int(planned.owner[c])], starts[c], lengths[c])
    for key, file, start, length in objects:
        storage[MetadataIndex(key)] = _StorageInfo(files[file], start, length)
    expected = Metadata(stock_state_dict_metadata(planned), ucp_planner_data(planned), storage, meta, "1.0.0")
    assert isinstance(expected.state_dict_metadata["rng.per_rank.3"], BytesStorageMetadata)
    got = pickle.loads(data)
    assert got == expected
    assert list(got.state_dict_metadata) == list(expected.state_dict_metadata)
    # a second pickling by stock code is the same object again, and no class outside torch and the standard library is named
    assert pickle.loads(pickle.dumps(got)) == expected
    modules = {op[1].split(" ")[0] for op in pickletools.genops(data) if op[0].name == "GLOBAL"}
    assert all(m.split(".")[0] in ("torch", "copy_reg", "collections") for m in modules), modules
