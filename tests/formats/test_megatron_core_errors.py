"""Torch_dist checkpoints that are incomplete or not understood: an error at open names the file, the parameter, and what is missing."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_truth
import pytest

from ucp_dcp import open_checkpoint
from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, UnsupportedError
from ucp_dcp.formats import open_source

PROJ = "decoder.layers.self_attention.linear_proj.weight"
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{}.{}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = megatron_truth.find("e2_mb_dp3_dpr")
    assert found is not None
    shutil.copytree(found / "iter_0000002", tmp_path / "iter_0000002")
    shutil.copy(found / "latest_checkpointed_iteration.txt", tmp_path)
    return tmp_path / "iter_0000002"


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change ``.metadata``, which in this checkpoint is a pickle of DCP's own classes only."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def without(metadata: Any, key: str) -> None:
    del metadata.state_dict_metadata[key]
    for index in [i for i in metadata.storage_data if i.fqn == key]:
        del metadata.storage_data[index]


def test_untouched_it_opens(folder: Path) -> None:
    edit(folder, lambda metadata: None)
    assert len(open_checkpoint(folder)) == len(open_checkpoint(folder.parent)) == 108


def test_missing_and_truncated_files(folder: Path) -> None:
    (folder / "__2_0.distcp").rename(folder / "gone")
    with pytest.raises(CorruptCheckpointError, match=r"__2_0\.distcp.*missing"):
        open_checkpoint(folder)
    (folder / "__2_0.distcp").write_bytes((folder / "gone").read_bytes()[:1000])
    with pytest.raises(CorruptCheckpointError, match=r"__2_0\.distcp, which has 1000 bytes"):
        open_checkpoint(folder)


def test_a_bucket_is_missing(folder: Path) -> None:
    edit(folder, lambda metadata: without(metadata, BUCKET.format(3, "exp_avg")))
    with pytest.raises(CorruptCheckpointError, match=r"dp_group_idx_0\.gbuf_idx_0.*bucket_idx_3\.exp_avg is missing"):
        open_checkpoint(folder)


def test_the_last_bucket_is_missing(folder: Path) -> None:
    edit(folder, lambda metadata: [without(metadata, BUCKET.format(9, state)) for state in ("param", "exp_avg", "exp_avg_sq")] and None)
    with pytest.raises(UnsupportedError, match=r"dp_group_idx_0\.gbuf_idx_0.*27 parameters.*do not fill"):
        open_checkpoint(folder)


def test_a_weight_is_missing(folder: Path) -> None:
    edit(folder, lambda metadata: without(metadata, PROJ))
    with pytest.raises(UnsupportedError, match=r"dp_group_idx_0\.gbuf_idx_0.*23 parameters.*do not fill"):
        open_checkpoint(folder)


def test_a_piece_of_a_weight_or_buffer_is_missing(folder: Path) -> None:
    def drop(key: str, metadata: Any) -> None:
        metadata.state_dict_metadata[key].chunks.pop(0)

    original = (folder / ".metadata").read_bytes()
    edit(folder, lambda metadata: drop("decoder.layers.mlp.linear_fc1.weight", metadata))
    with pytest.raises((CorruptCheckpointError, UnsupportedError), match=r"decoder\.layers\.\d\.mlp\.linear_fc1\.weight"):
        open_checkpoint(folder)
    (folder / ".metadata").write_bytes(original)
    edit(folder, lambda metadata: drop(BUCKET.format(1, "exp_avg"), metadata))
    with pytest.raises((CorruptCheckpointError, UnsupportedError), match=r"dp_group_idx_0|linear_fc1"):
        open_checkpoint(folder)


def test_a_buffer_of_an_unknown_model(folder: Path) -> None:
    def rename(metadata: Any) -> None:
        new = "decoder.layers.self_attention.something_new.weight"
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(PROJ)
        for index in [i for i in metadata.storage_data if i.fqn == PROJ]:
            metadata.storage_data[type(index)(new, index.offset, index.index)] = metadata.storage_data.pop(index)

    edit(folder, rename)
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.\d\.self_attention\.something_new\.weight.*not known"):
        open_checkpoint(folder)
    assert len(open_checkpoint(folder, prefer="stock")) == 9 + 30


def test_an_unknown_optimizer_format(folder: Path) -> None:
    old = BUCKET.format(0, "param")

    def rename(metadata: Any) -> None:
        metadata.state_dict_metadata["optimizer.distributed.new_format.param"] = metadata.state_dict_metadata.pop(old)
        for index in [i for i in metadata.storage_data if i.fqn == old]:
            new = type(index)("optimizer.distributed.new_format.param", index.offset, index.index)
            metadata.storage_data[new] = metadata.storage_data.pop(index)

    edit(folder, rename)
    with pytest.raises(UnsupportedError, match=r"optimizer\.distributed\.new_format\.param"):
        open_checkpoint(folder)


def test_gathered_optimizer_state(folder: Path) -> None:
    """dp_zero_gather_scatter: an object of flat buffers. A made-up one: the error is about its key."""
    old = next(key for key in open_checkpoint(folder, prefer="stock").objects if key.startswith("rng_state"))

    def rename(metadata: Any) -> None:
        new = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        (index,) = (i for i in metadata.storage_data if i.fqn == old)
        metadata.storage_data[type(index)(new, index.offset, index.index)] = metadata.storage_data.pop(index)

    edit(folder, rename)
    with pytest.raises(UnsupportedError, match=r"dp_group_idx_0\.param_state.*dp_zero_gather_scatter.*prefer='stock'"):
        open_checkpoint(folder)


def test_another_backend(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(UnsupportedError, match=r"metadata\.json.*zarr"):
        open_checkpoint(folder)


def test_latest_iteration(folder: Path) -> None:
    latest = folder.parent / "latest_checkpointed_iteration.txt"
    assert len(open_source(folder.parent, tag="iter_0000002").catalog.keys) == 108
    latest.write_text("7")
    with pytest.raises(CheckpointNotFoundError, match="iter_0000007"):
        open_checkpoint(folder.parent)
    latest.write_text("seven")
    with pytest.raises(FormatError, match="holds 'seven'"):
        open_checkpoint(folder.parent)
    folder.rename(folder.parent / "release")
    latest.write_text("release")
    assert len(open_checkpoint(folder.parent)) == 108
