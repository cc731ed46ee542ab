"""megatron-core's checkpoints through ``ucp_dcp.load``: in one process, and onto 1-D and 2-D gloo meshes of DTensors, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_truth
import pytest
import torch
from ranks import RankPool
from test_megatron_core import GOOD, golden
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ucp_dcp


def nested(name: str) -> dict[str, Any]:
    """Golden tensors as a state dict: ``model.<fqn>``, ``optim.state.<fqn>.<state>``."""
    out: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for key, value in golden(name).items():
        if key.startswith("model."):
            out["model"][key.removeprefix("model.")] = value
        else:
            fqn, _, state = key.removeprefix("optim.state.").rpartition(".")
            out["optim"]["state"].setdefault(fqn, {})[state] = value
    return out


def like(tree: Any, make: Any) -> Any:
    return {key: like(value, make) for key, value in tree.items()} if isinstance(tree, dict) else make(tree)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
    return bool(a.dtype == b.dtype and torch.equal(a, b))


def junk(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, 77)


@pytest.mark.parametrize("name", GOOD)
def test_one_process(name: str) -> None:
    expected = nested(name)
    state = like(expected, junk)
    path = megatron_truth.find(name)
    assert path is not None
    report = ucp_dcp.load(state, path, no_dist=True)
    assert equal(state, expected) and report.unproven == []


def sharded(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    last = Shard(value.dim() - 1) if value.dim() > 1 else Replicate()
    return distribute_tensor(value, mesh, [Shard(0), last][: mesh.ndim], src_data_rank=None)


def load_on(rank: int, world: int, shape: tuple[int, ...], names: list[str]) -> list[str]:
    mesh = init_device_mesh("cpu", shape)
    wrong = []
    for name in names:
        expected = like(nested(name), partial(sharded, mesh=mesh))
        state = like(expected, junk)
        path = megatron_truth.find(name)
        assert path is not None
        ucp_dcp.load(state, path)
        if not equal(state, expected):
            wrong.append(name)
    return wrong


# each of the repository's on one mesh, others on both
NAMES = {(3,): {"old014_fsms", "f4_tied_unpadded"}, (2, 2): {"old0161_fr", "e2_mb_dp3_dpr"}}


@pytest.mark.parametrize("shape", list(NAMES), ids=str)
def test_meshes(ranks: RankPool, shape: tuple[int, ...]) -> None:
    other = set().union(*(names for mesh, names in NAMES.items() if mesh != shape))
    chosen = [name for name in GOOD if name not in other]
    assert NAMES[shape] <= set(chosen)
    for wrong in ranks.run(int(torch.tensor(shape).prod()), load_on, shape, chosen, timeout=300):
        assert wrong == []
