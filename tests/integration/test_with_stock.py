"""Our planner with stock storage, our storage with foreign planners, stock and ours in one folder (D1, D4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import worlds
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

import ucp_dcp
from ucp_dcp.errors import ForeignSaveError


def save_mixed(rank: int, world: int, name: str, url: str, planner: bool, storage: bool) -> None:
    """Save with our planner and / or our storage."""
    case = worlds.WORLDS[name]
    args = case.planner_args(rank)
    writer = ucp_dcp.UCPStorageWriter(url) if storage else FileSystemWriter(url)
    dcp.save(case.build(rank, True), storage_writer=writer, planner=ucp_dcp.UCPSavePlanner(**args) if planner else None)


def load_mixed(rank: int, world: int, name: str, url: str, planner: bool, storage: bool) -> list[str]:
    case = worlds.WORLDS[name]
    state = case.build(rank, False)
    reader = ucp_dcp.UCPStorageReader(url) if storage else FileSystemReader(url)
    dcp.load(state, storage_reader=reader, planner=ucp_dcp.UCPLoadPlanner(**case.planner_args(rank)) if planner else None)
    return worlds.same(state, worlds.unpadded(name, rank, case.build(rank, True)))


@pytest.mark.parametrize("world", [pytest.param("hsdp", marks=pytest.mark.slow), "fsdp_tp"])
@pytest.mark.parametrize("writer", [(True, False), (False, True), (False, False)], ids=["ours+stock", "default+ours", "stock"])
def test_every_pair_of_planner_and_storage(ranks, tmp_path: Path, world: str, writer: tuple[bool, bool]) -> None:
    url = str(tmp_path / "c")
    ranks.run(4, save_mixed, world, url, *writer)
    for planner in (True, False):
        for storage in (True, False):
            for found in ranks.run(4, load_mixed, world, url, planner, storage):
                assert found == [], (planner, storage)


@pytest.mark.parametrize("world", [pytest.param("tp_zero1", marks=pytest.mark.slow), "pp_tp"])
def test_layouts_through_stock_storage(ranks, tmp_path: Path, world: str) -> None:
    url = str(tmp_path / "c")
    ranks.run(4, save_mixed, world, url, True, False)
    for storage in (True, False):
        for target in ("tp_zero1", "pp_tp", "hsdp"):
            for found in ranks.run(4, load_mixed, target, url, True, storage):
                assert found == [], (storage, target)


def test_stock_metadata_is_optional(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": {"c": torch.ones(5, dtype=torch.int32)}, "n": 3}
    ucp_dcp.save(state, tmp_path / "c", stock_metadata=False)
    assert not (tmp_path / "c" / ".metadata").exists()
    got = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(5, dtype=torch.int32)}, "n": 0}
    ucp_dcp.load(got, tmp_path / "c")
    assert torch.equal(got["a"], state["a"]) and torch.equal(got["b"]["c"], state["b"]["c"]) and got["n"] == 3


def test_a_plain_save_over_ours_is_noticed(tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.zeros(3)}, tmp_path)
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    got = {"a": torch.full((3,), 9.0)}
    with pytest.raises(ForeignSaveError, match="prefer="):
        ucp_dcp.load(got, tmp_path)
    with pytest.raises(ForeignSaveError, match=r"\.metadata"):
        ucp_dcp.open_checkpoint(tmp_path)
    assert got["a"].tolist() == [9.0] * 3
    ucp_dcp.load(got, tmp_path, prefer="stock")
    assert got["a"].tolist() == [1.0] * 3
    ucp_dcp.load(got, tmp_path, prefer="ucp")
    assert got["a"].tolist() == [0.0] * 3
    # bare dcp.load carries the same error
    with pytest.raises(CheckpointException) as caught:
        dcp.load(got, storage_reader=ucp_dcp.UCPStorageReader(tmp_path), planner=ucp_dcp.UCPLoadPlanner(), no_dist=True)
    assert isinstance(caught.value.failures[0][0], ForeignSaveError)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(got, storage_reader=ucp_dcp.UCPStorageReader(tmp_path), no_dist=True)
    assert isinstance(caught.value.failures[0][0], ForeignSaveError)


def test_our_save_over_a_plain_one_takes_its_place(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    ucp_dcp.save({"a": torch.full((3,), 2.0)}, tmp_path)
    got = {"a": torch.zeros(3)}
    dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    assert got["a"].tolist() == [2.0] * 3


def test_overwrite_false_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.ones(3)}, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ucp_dcp.UCPError, match="overwrite"):
        ucp_dcp.save({"a": torch.zeros(3)}, tmp_path, overwrite=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_overwriting_leaves_one_generation_and_those_of_the_grace_period(tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.full((3,), 7.0)}, tmp_path)
    reader = ucp_dcp.open_checkpoint(tmp_path)
    ucp_dcp.save({"a": torch.full((3,), 8.0)}, tmp_path)
    assert reader["a"].read().tolist() == [7.0] * 3
    for value in range(3):
        ucp_dcp.save({"a": torch.full((3,), float(value))}, tmp_path, grace=0)
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("g-")]) == 1
    got = {"a": torch.zeros(3)}
    dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    assert got["a"].tolist() == [2.0] * 3


def test_memory_store_round_trip() -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "o": [1, "x", None]}
    ucp_dcp.save(state, "memory://round/trip")
    got = {"a": torch.zeros(2, 3), "o": []}
    ucp_dcp.load(got, "memory://round/trip")
    assert torch.equal(got["a"], state["a"]) and got["o"] == [1, "x", None]
