"""Four gloo ranks save to a real S3 server, other numbers of ranks load, on plain tensors and meshes; a ZeRO-3 checkpoint in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero
from meshes import Groups, dtensor, fresh_meshes
from torch.distributed.tensor import DTensor, Replicate, Shard

import ucp_dcp
from ucp_dcp.errors import CheckpointExistsError, UCPError
from ucp_dcp.storage.dcp_writer import _spread
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.fault_proxy import FaultProxy
from ucp_dcp.testing.servers import options_for

SHAPES = {"a": (37, 12), "b": (8, 6, 5), "c": (3,), "empty": (0, 4), "scalar": ()}
PART = 5 << 20
BIG = (4, 1 << 19)  # 8 MiB: its rank uploads in parts


def full(name: str, value: float) -> torch.Tensor:
    shape = BIG if name == "big" else SHAPES[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 0.5 + value).reshape(shape)


def state(make: Callable[[str, torch.Tensor], torch.Tensor], value: float) -> dict[str, Any]:
    return {"model": {name: make(name, full(name, value)) for name in (*SHAPES, "big")}, "step": int(value)}


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def on_mesh(mesh: Any, fill: float | None = None) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Each mesh dimension cuts another dimension of the tensor, as far as it has them."""

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        placements = [Shard(d) if d < tensor.dim() else Replicate() for d in range(mesh.ndim)]
        return dtensor(tensor, mesh, placements, fill)

    return make


def wrong(state: dict[str, Any], value: float) -> list[str]:
    out = [] if state["step"] == int(value) else [f"step {state['step']}"]
    for name, tensor in state["model"].items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(found, full(name, value)):
            out.append(name)
    return out


def save_and_load(rank: int, world: int, url: str, options: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    with fresh_meshes():
        groups = Groups()
        for value in (1.0, 2.0):  # the second replaces the first
            saved = state(plain, value) if value == 1 else state(on_mesh(groups.mesh(2, 2)), value)
            ucp_dcp.save(saved, url, storage_options=options)
            for n in (1, 2, 3):
                group = groups.first(n)
                meshes = [None, groups.mesh(n), *([groups.mesh(2, 1), groups.mesh(1, 2)] if n == 2 else [])]
                meshes += [groups.mesh(1, 3)] if n == 3 else []
                for mesh in meshes if rank < n else ():
                    target = state(plain if mesh is None else on_mesh(mesh, -9.0), -9.0)
                    if mesh is None:
                        target["model"] = {name: torch.full_like(t, -9.0) for name, t in target["model"].items()}
                    ucp_dcp.load(target, url, storage_options=options, process_group=group)
                    problems += [f"{value} on {n} ranks, {mesh}: {name}" for name in wrong(target, value)]
                dist.barrier()
        try:
            ucp_dcp.save(state(plain, 3.0), url, storage_options=options, overwrite=False)
            problems.append("a save with overwrite=False replaced a checkpoint")
        except CheckpointExistsError:
            pass
    return problems


@pytest.mark.parametrize("client", ["botocore", pytest.param("obstore", marks=pytest.mark.slow)])
def test_save_on_four_load_on_one_two_three(ranks: Any, seaweed_server: Any, client: str) -> None:
    url = f"s3://bucket/ranks-{uuid.uuid4().hex}/step 100"
    options = {**seaweed_server.storage_options, "part_size": PART, "client": client}
    for found in ranks.run(4, save_and_load, url, options, timeout=350):
        assert found == []
    with_parts = open_store(url, **seaweed_server.storage_options)
    assert list(with_parts.uploads()) == []
    assert ucp_dcp.verify(url, storage_options=options).ok


def load_zero(rank: int, world: int, url: str, options: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    with fresh_meshes():
        mesh = Groups().mesh(world)
        target = {
            "model": {name: dtensor(t, mesh, [Shard(0)], 77.0) for name, t in golden["model"].items()},
            "optim": {
                "state": {
                    fqn: {name: dtensor(t, mesh, [Shard(0) if t.dim() else Replicate()], 77.0) for name, t in values.items()}
                    for fqn, values in golden["optim"]["state"].items()
                }
            },
        }
        ucp_dcp.load(target, url, roots={"model": "model", "optim": "optimizer"}, storage_options=options)
        for name, value in target["model"].items():
            if not torch.equal(value.full_tensor(), golden["model"][name]):
                problems.append(name)
        for fqn, values in target["optim"]["state"].items():
            problems += [f"{fqn} {n}" for n, v in values.items() if not torch.equal(v.full_tensor(), golden["optim"]["state"][fqn][n])]
    return problems


def test_a_zero_3_checkpoint_in_a_bucket(ranks: Any, seaweed_server: Any) -> None:
    """Copied as it lies, opened in place, loaded by two ranks, by ranges."""
    case = next(c for c in zero.cases() if c.name == "z3_bf16_w2")
    url, options = f"s3://bucket/zero-{uuid.uuid4().hex}", seaweed_server.storage_options
    store = open_store(url, **options)
    folder = Path(case.url)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "truth.npz":
            store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    golden = zero.golden(case)
    checkpoint = ucp_dcp.open_checkpoint(url, storage_options=options)
    assert checkpoint.format == "deepspeed" and checkpoint.stats.bytes_read == 0
    fqn = next(iter(golden["optim"]["state"]))
    assert torch.equal(checkpoint[f"optim.state.{fqn}.master"].read(), golden["optim"]["state"][fqn]["master"])
    for found in ranks.run(2, load_zero, url, options, golden):
        assert found == []


def with_wrong_secret(rank: int, world: int, url: str, options: dict[str, Any]) -> str:
    options = {**options, "secret": "not-this-secret"} if rank == 2 else options
    try:
        ucp_dcp.save(state(plain, 2.0), url, storage_options=options)
    except UCPError as error:
        return str(error)
    return "saved"


def test_one_rank_without_rights(ranks: Any, seaweed_server: Any) -> None:
    """The same error on all ranks, at once, and the old checkpoint is whole."""
    url, options = f"s3://bucket/rights-{uuid.uuid4().hex}", seaweed_server.storage_options
    ucp_dcp.save(state(plain, 1.0), url, storage_options=options, no_dist=True)
    messages = ranks.run(4, with_wrong_secret, url, options)
    assert len(set(messages)) == 1 and "rank 2" in messages[0] and "403" in messages[0], messages
    assert "not-this-secret" not in messages[0]
    target = state(plain, -9.0)
    ucp_dcp.load(target, url, storage_options=options, no_dist=True)
    assert wrong(target, 1.0) == []
    # what the other ranks wrote is gone, too
    generations = {entry.path.partition("/")[0] for entry in open_store(url, **options).list("g-")}
    assert len(generations) == 1


def test_keys_of_many_ranks_are_spread(seaweed_server: Any) -> None:
    """Prefixes depend on the rank alone; a stock reader and ours find what lies in them."""
    folders = {_spread(open_store("s3://bucket/x", **seaweed_server.storage_options), rank) for rank in range(512)}
    assert len(folders) > 200 and all(len(folder) == 3 for folder in folders)
    assert _spread(open_store("memory://x"), 3) == ""


def test_requests_of_a_save(seaweed_server: Any) -> None:
    """The formula of docs/cloud.md: what a job pays for."""
    with FaultProxy(seaweed_server.port) as proxy:
        options = {**options_for(proxy.endpoint), "part_size": PART}
        for nbytes in (1000, 12 << 20):
            url = f"s3://bucket/count-{uuid.uuid4().hex}"
            saved = {"w": torch.zeros(nbytes // 4)}
            ucp_dcp.save(saved, url, storage_options=options, grace=0, no_dist=True)
            proxy.seen.clear()
            ucp_dcp.save(saved, url, storage_options=options, grace=0, no_dist=True)
            parts = -(-nbytes // PART)
            puts = [seen for seen in proxy.seen if seen.method in ("PUT", "POST")]
            assert len(puts) == parts + (2 if parts > 1 else 0) + 1 + 4, puts
            listings = [seen for seen in proxy.seen if "list-type" in seen.path]
            others = [seen for seen in proxy.seen if seen.method in ("GET", "HEAD") and seen not in listings]
            assert len(others) <= 20 and len(listings) <= 4, (others, listings)
            assert len([seen for seen in proxy.seen if seen.method == "DELETE"]) == 2 + 2
