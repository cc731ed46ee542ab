"""Every dense ZeRO checkpoint and universal folder: bit for bit through slices, through ``dcp.load`` in one process, onto gloo meshes.

Weights, buffers, masters, optimizer states and steps. Each checkpoint goes onto one 1-D and one 2-D mesh, in turns; with
``UCP_DCP_EXTRA_DATA`` set, each goes onto all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ucp_dcp

CASES = zero.cases()
LINES, PLANES = [(2,), (3,), (4,)], [(1, 2), (3, 1), (2, 2)]
FULL = zero.EXTRA is not None


def on(mesh: tuple[int, ...]) -> list[zero.Case]:
    """The checkpoints that go onto a mesh: 1-D and 2-D ones change places at different speeds, so that kinds beside each other differ."""
    if len(mesh) == 1:
        return [c for i, c in enumerate(CASES) if FULL or LINES[i % 3] == mesh]
    return [c for i, c in enumerate(CASES) if FULL or PLANES[(i + i // 3) % 3] == mesh]


def test_there_is_a_checkpoint_of_every_kind() -> None:
    names = " ".join(c.name for c in CASES)
    kinds = ("z0_bf16", "z0_fp16", "z0_fp32", "z1_fp16", "z3_fp16", "z1_bf16_gad32", "z1_bf16_frozen", "z2_bf16_frozen", "z3_bf16_frozen")
    kinds += ("z1_bf16_roundrobin", "z2_bf16_roundrobin", "z1_bf16_universal", "z2_bf16_universal", "z3_bf16_universal")
    for kind in (*kinds, "z1_fp32", "z2_fp32", "z3_fp32"):
        assert kind in names
    for meshes in (LINES, PLANES):
        assert {c.name for mesh in meshes for c in on(mesh)} == {c.name for c in CASES}


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def like(tree: dict[str, Any], make) -> dict[str, Any]:
    return {key: like(value, make) if isinstance(value, dict) else make(value) for key, value in tree.items()}


def differences(state: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    pairs = zip(leaves(state), leaves(golden), strict=True)
    return [".".join(path) for (path, a), (other, b) in pairs if path != other or a.dtype != b.dtype or not torch.equal(a, b)]


def blank(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, 77)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_slices_and_one_process(case: zero.Case) -> None:
    golden = zero.golden(case)
    ckpt = ucp_dcp.open_checkpoint(case.url)
    assert ("universal" in ckpt.provenance["writer"]) == case.universal
    if "z0" not in case.name:  # stage 0 looks at a few elements to find names
        assert ckpt.stats.bytes_read == 0
    names = set(ckpt.names())
    for path, value in leaves(golden):
        name = ".".join(path)
        if name not in names:
            assert path[0] == "model" and "z3" in case.name, name  # stage 3 keeps masters only
            continue
        stored = ckpt[name]
        assert stored.shape == tuple(value.shape), name
        if value.dim():
            middle = value.shape[0] // 2
            assert torch.equal(stored[:middle].to(value.dtype), value[:middle]), name
            assert torch.equal(stored[middle:].to(value.dtype), value[middle:]), name
            if value.shape[-1]:
                assert torch.equal(stored[..., -1].to(value.dtype), value[..., -1]), name
        else:
            assert torch.equal(stored.read().to(value.dtype), value), name
    if case.universal:
        files = zero.universal_files(case)
        assert len(files) >= 3 * 7
        for (fqn, kind), value in files.items():
            assert torch.equal(ckpt[f"optim.state.{fqn}.{kind}"].read().flatten(), value), (fqn, kind)
    state = like(golden, blank)
    planner = ucp_dcp.UCPLoadPlanner()
    dcp.load(state, storage_reader=ucp_dcp.UCPStorageReader(case.url), planner=planner, no_dist=True)
    assert differences(state, golden) == []
    assert set(planner.report.source.values()) <= {"weight", "master", "state", "object"}
    assert len(list(leaves(golden))) >= 8


@pytest.mark.parametrize("folder", zero.checkpoints(), ids=lambda p: p.name)
def test_fp32_weights_are_answered_by_masters(folder: Path) -> None:
    truth = zero.truth(folder)
    state = {"model": {fqn: torch.zeros(values["master"].shape) for fqn, values in truth.items()}}
    report = ucp_dcp.load(state, folder, no_dist=True)
    assert [fqn for fqn, values in truth.items() if not torch.equal(state["model"][fqn], values["master"])] == []
    assert "fp32" in folder.name or set(report.source.values()) == {"master"}


@pytest.mark.parametrize("name", ["z1_bf16_roundrobin_w3", "z2_bf16_roundrobin_w3"])
def test_masters_in_round_robin_order_are_the_weights(name: str) -> None:
    """The truth of stage 2 has weights only (DeepSpeed's own gatherer reads the wrong bytes): the master, rounded, is the weight."""
    (case,) = (c for c in CASES if c.name == name)
    golden = zero.golden(case)["model"]
    state = {"model": {fqn: torch.zeros(v.shape) for fqn, v in golden.items() if v.is_floating_point() and fqn != "temperature"}}
    ucp_dcp.load(state, case.url, source="master", no_dist=True)
    assert len(state["model"]) == 16
    assert [fqn for fqn, value in state["model"].items() if not torch.equal(value.bfloat16(), golden[fqn])] == []


def sharded(value: torch.Tensor, mesh: DeviceMesh, odd: bool) -> torch.Tensor:
    """``value`` on the mesh by torch's own rules. One mesh dim: rows; two: rows and the last dim, a vector over one dim or both."""
    if value.dim() == 0:
        return value
    placements: list[Any] = [Shard(0)]
    if mesh.ndim == 2:
        placements.append(Shard(value.dim() - 1) if value.dim() > 1 else Shard(0) if odd else Replicate())
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def load_on_mesh(rank: int, world: int, shape: tuple[int, ...], cases: list[zero.Case]) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", shape)
    out = {}
    for case in cases:
        golden, number = zero.golden(case), iter(range(10_000))
        expected = like(golden, lambda v, number=number: sharded(v, mesh, next(number) % 2 == 1))
        state = like(expected, blank)
        reader = ucp_dcp.UCPStorageReader(case.url, process_group=dist.group.WORLD)
        dcp.load(state, storage_reader=reader, planner=ucp_dcp.UCPLoadPlanner())
        out[case.url] = differences(like(state, local), like(expected, local))
    return out


@pytest.mark.parametrize("mesh", LINES + PLANES, ids=str)
def test_meshes(ranks, mesh: tuple[int, ...]) -> None:
    world = int(torch.tensor(mesh).prod())
    chosen = on(mesh)
    assert len(chosen) >= 10
    for found in ranks.run(world, load_on_mesh, mesh, chosen, timeout=600):
        assert found == {c.url: [] for c in chosen}


def test_a_foreign_planner_reads_a_zero_checkpoint_through_our_reader() -> None:
    """DCP's own DefaultLoadPlanner, canonical keys."""
    folder = next(p for p in zero.checkpoints() if p.name.startswith("z3"))
    truth = zero.truth(folder)
    state = {"optim": {"state": {fqn: {n: torch.zeros(v.shape) for n, v in values.items()} for fqn, values in truth.items()}}}
    dcp.load(state, storage_reader=ucp_dcp.UCPStorageReader(folder), no_dist=True)
    for fqn, values in truth.items():
        assert all(torch.equal(state["optim"]["state"][fqn][n], v) for n, v in values.items())
