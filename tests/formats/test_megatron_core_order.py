"""Flat buffers that can be read in two ways: contents decide, and when they decide nothing it is an error.

Made here, not by Megatron: experts whose two matrices have as many elements each, so that "expert by expert" and "all first matrices, then
all second ones" (grouped GEMM) end in the same places.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from ucp_dcp import open_checkpoint
from ucp_dcp.errors import UnsupportedError
from ucp_dcp.formats.megatron_core.buckets import LocalParam, lay_out, pieces_of_range

BUFFER = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
NAME = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc{}.weight"
ROWS, COLUMNS = 16, 8


def saved(root: Path, order: list[tuple[int, int]], wrong: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint of two experts; ``order``: (expert, matrix) as the module registers them. Returns the masters by name."""
    g = torch.Generator().manual_seed(1)
    shapes = {1: (ROWS, COLUMNS), 2: (COLUMNS, ROWS)}
    masters = {(e, m): torch.randn(shapes[m], generator=g) for e, m in order}
    state = {
        f"decoder.layers.mlp.experts.experts.linear_fc{m}.weight": torch.stack([masters[e, m] for e in range(2)])[None].bfloat16()
        for m in (1, 2)
    }
    flat = {name: [masters[key].reshape(-1) + (3 if wrong else 0) for key in reversed(order)] for name in ("param", "exp_avg")}
    parts = {f"{name}/{i}": part for name, pieces in flat.items() for i, part in enumerate(pieces)}
    dcp.save({**state, **parts}, checkpoint_id=root, no_dist=True)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    for name, pieces in flat.items():
        chunks = []
        for i, part in enumerate(pieces):
            offset = torch.Size([i * len(part)])
            chunks.append(ChunkStorageMetadata(offset, part.size()))
            old = metadata.state_dict_metadata.pop(f"{name}/{i}")
            (index,) = (key for key in metadata.storage_data if key.fqn == f"{name}/{i}")
            metadata.storage_data[MetadataIndex(BUFFER + name, offset, i)] = metadata.storage_data.pop(index)
        size = torch.Size([sum(map(len, pieces))])
        metadata.state_dict_metadata[BUFFER + name] = TensorStorageMetadata(old.properties, size, chunks)
    metadata.planner_data = None
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return {NAME.format(e, m): value for (e, m), value in masters.items()}


ONE_BY_ONE = [(0, 1), (0, 2), (1, 1), (1, 2)]
GROUPED = [(0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("order", [ONE_BY_ONE, GROUPED], ids=["one_by_one", "grouped"])
def test_contents_decide(tmp_path: Path, order: list[tuple[int, int]]) -> None:
    masters = saved(tmp_path / "c", order)
    checkpoint = open_checkpoint(tmp_path / "c")
    for name, value in masters.items():
        assert torch.equal(checkpoint[f"optim.state.{name}.master"].read(), value), name
        assert torch.equal(checkpoint[f"optim.state.{name}.exp_avg"][3:, 1:], value[3:, 1:]), name
    assert checkpoint.check().ok and len(masters) == 4


def test_contents_that_fit_in_no_way(tmp_path: Path) -> None:
    saved(tmp_path / "c", ONE_BY_ONE, wrong=True)
    with pytest.raises(UnsupportedError, match="in no ways that agree with the weights"):
        open_checkpoint(tmp_path / "c")


def test_places_in_buckets() -> None:
    assert lay_out([100, 28, 64], [156, 64]) == [(0, 0), (0, 128), (1, 0)]
    assert lay_out([100, 28, 64], [256]) == [(0, 0), (0, 128), (0, 192)]
    assert lay_out([100, 28, 64], [157, 64]) is None  # a bucket ends where a parameter ends
    assert lay_out([100, 28], [156, 64]) is None
    assert lay_out([100, 28, 64], [156]) is None
    assert lay_out([], [64]) is None


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (3, 17), (5, 6), (11, 13), (0, 1), (23, 24)])
def test_ranges_of_gate_and_up(start: int, stop: int) -> None:
    """TP rank 1 of 2 has rows 2, 3 (gate) and 6, 7 (up) of 8; a range of its flattened shard, element by element."""
    param = LocalParam("fc1", (8, 6), 0, ((2, 2), (6, 2)))
    whole = torch.arange(48).reshape(8, 6)
    local = torch.cat([whole[2:4], whole[6:8]]).reshape(-1)
    assert param.numel == 24 and param.local == (4, 6)
    found = torch.full((24,), -1)
    for box, at in pieces_of_range(param, start, stop):
        values = whole[box.slices()].reshape(-1)
        assert bool((found[at : at + len(values)] == -1).all())
        found[at : at + len(values)] = values
    assert torch.equal(found[start:stop], local[start:stop])
    assert bool((found[:start] == -1).all()) and bool((found[stop:] == -1).all())
