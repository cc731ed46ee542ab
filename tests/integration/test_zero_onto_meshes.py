"""Every dense ZeRO checkpoint: bit for bit through slices, through ``dcp.load`` in one process, and onto 1-D and 2-D gloo meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros

import ucp_dcp

CHECKPOINTS = zero.checkpoints()


def test_there_is_a_checkpoint_of_every_stage() -> None:
    assert {p.name[:2] for p in CHECKPOINTS} >= {"z1", "z2", "z3"}


def nested(truth: dict[str, dict[str, torch.Tensor]], make) -> dict:
    """A state dict under canonical names, with weights too (answered by masters where the checkpoint holds no fp32 weight)."""
    model = {fqn: make(values["master"].shape) for fqn, values in truth.items()}
    state = {fqn: {name: make(value.shape) for name, value in values.items()} for fqn, values in truth.items()}
    return {"model": model, "optim": {"state": state}}


def differences(state: dict, truth: dict[str, dict[str, torch.Tensor]], whole=lambda t: t) -> list[str]:
    out = [f"model.{fqn}" for fqn, values in truth.items() if not torch.equal(whole(state["model"][fqn]), values["master"])]
    for fqn, values in truth.items():
        out += [f"{fqn}.{name}" for name, value in values.items() if not torch.equal(whole(state["optim"]["state"][fqn][name]), value)]
    return out


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: p.name)
def test_slices_and_one_process(folder: Path) -> None:
    truth = zero.truth(folder)
    assert len(truth) > 5
    ckpt = ucp_dcp.open_checkpoint(folder)
    assert ckpt.stats.bytes_read == 0
    for fqn, values in truth.items():
        for name, value in values.items():
            stored = ckpt[f"optim.state.{fqn}.{name}"]
            assert stored.shape == tuple(value.shape)
            assert torch.equal(stored[...], value), (fqn, name)
            middle = value.shape[0] // 2
            assert torch.equal(stored[middle:], value[middle:]), (fqn, name)
            assert torch.equal(stored[..., -1], value[..., -1]), (fqn, name)
    state = nested(truth, torch.zeros)
    planner = ucp_dcp.UCPLoadPlanner()
    dcp.load(state, storage_reader=ucp_dcp.UCPStorageReader(folder), planner=planner, no_dist=True)
    assert differences(state, truth) == []
    assert set(planner.report.source.values()) <= {"weight", "master", "state"}


def load_on_mesh(rank: int, world: int, shape: tuple[int, ...], folders: list[str]) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", shape)
    out = {}
    for folder in folders:
        truth = zero.truth(Path(folder))

        def make(size: torch.Size):
            placements = [Shard(0)] if len(shape) == 1 else [Shard(0), Shard(1) if len(size) > 1 else Replicate()]
            return zeros(*size, device_mesh=mesh, placements=placements)

        state = nested(truth, make)
        reader = ucp_dcp.UCPStorageReader(folder, process_group=dist.group.WORLD)
        dcp.load(state, storage_reader=reader, planner=ucp_dcp.UCPLoadPlanner())
        out[folder] = differences(state, truth, lambda t: t.full_tensor())
    return out


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (1, 2), (3, 1), (2, 2)], ids=str)
def test_meshes(ranks, mesh: tuple[int, ...]) -> None:
    world = int(torch.tensor(mesh).prod())
    for found in ranks.run(world, load_on_mesh, mesh, [str(p) for p in CHECKPOINTS], timeout=300):
        assert found == {str(p): [] for p in CHECKPOINTS}


def test_a_foreign_planner_reads_a_zero_checkpoint_through_our_reader() -> None:
    """DCP's own DefaultLoadPlanner, canonical keys."""
    folder = next(p for p in CHECKPOINTS if p.name.startswith("z3"))
    truth = zero.truth(folder)
    state = {"optim": {"state": {fqn: {n: torch.zeros(v.shape) for n, v in values.items()} for fqn, values in truth.items()}}}
    dcp.load(state, storage_reader=ucp_dcp.UCPStorageReader(folder), no_dist=True)
    for fqn, values in truth.items():
        assert all(torch.equal(state["optim"]["state"][fqn][n], v) for n, v in values.items())
