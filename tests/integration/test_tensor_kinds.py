"""Every kind of tensor that torch trainers put into a state dict, on four gloo ranks, against an independent cut or gather."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import Groups, cut, dtensor, fresh_meshes
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ucp_dcp

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()
Kind = Callable[[Groups, str], Iterator[str]]
KINDS: dict[str, Kind] = {}


def kind(fn: Kind) -> Kind:
    KINDS[fn.__name__] = fn
    return fn


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def stored(groups: Groups, url: str, full: dict[str, torch.Tensor]) -> Iterator[str]:
    """What stock torch and our random access read of the checkpoint."""
    state = {key: torch.full_like(value, -3) for key, value in full.items()}
    dcp.load(state, checkpoint_id=url)
    checkpoint = ucp_dcp.open_checkpoint(url)
    for key, value in full.items():
        if not torch.equal(state[key], value):
            yield f"stock reads {key}: {state[key]} != {value}"
        if not torch.equal(checkpoint[key].read(), value):
            yield f"{key}: stored {checkpoint[key].read()}"


@kind
def three_dim_meshes(groups: Groups, url: str) -> Iterator[str]:
    """Mesh of three dims, all placements, uneven everywhere; (1, 17) and 5 rows on 4 ranks among them."""
    full = {"a": numbered(1, 17, 3), "b": numbered(5, 2, 3), "c": numbered(7, 3, 5)}
    forms = [
        ((2, 1, 2), [S0, R, S0]),
        ((2, 2, 1), [R, S1, S0]),
        ((1, 2, 2), [S2, S0, S1]),
        ((2, 2), [_StridedShard(0, split_factor=2), S0]),
        ((4,), [S0]),
        ((4,), [S1]),
    ]
    for i, (shape, placements) in enumerate(forms):
        ucp_dcp.save({k: dtensor(v, groups.mesh(*shape), placements) for k, v in full.items()}, f"{url}{i}")
        yield from stored(groups, f"{url}{i}", full)
        target, wanted = forms[(i + 1) % len(forms)]
        state = {k: dtensor(v, groups.mesh(*target), wanted, fill=-3) for k, v in full.items()}
        ucp_dcp.load(state, f"{url}{i}")
        for k, v in full.items():
            want = cut(v, groups.mesh(*target), wanted)
            if state[k].to_local().shape != want.shape or not torch.equal(state[k].to_local(), want):
                yield f"{k} from {placements} to {wanted}: {state[k].to_local()}"


@kind
def sub_meshes(groups: Groups, url: str) -> Iterator[str]:
    """Two pipeline stages with a mesh each, and ranks outside the mesh that hold the DTensor all the same; all in one save of all ranks."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    mine = groups.rank // 2
    full = {f"stage{s}.w": numbered(5, 3) + 100 * s for s in range(2)}
    state: dict[str, Any] = {f"stage{mine}.w": dtensor(full[f"stage{mine}.w"], meshes[mine], [S0])}
    lonely = numbered(3, 2)
    state["first"] = dtensor(lonely, meshes[0], [S0])
    ucp_dcp.save(state, url)
    yield from stored(groups, url, {**full, "first": lonely})
    other = 1 - mine  # the stages change places
    wanted: dict[str, Any] = {f"stage{other}.w": dtensor(full[f"stage{other}.w"], meshes[mine], [S1], fill=-3)}
    wanted["first"] = dtensor(lonely, meshes[1], [S0], fill=-3)
    ucp_dcp.load(wanted, url)
    if not torch.equal(wanted[f"stage{other}.w"].to_local(), cut(full[f"stage{other}.w"], meshes[mine], [S1])):
        yield f"stage{other}: {wanted}"
    if mine == 1 and not torch.equal(wanted["first"].to_local(), cut(lonely, meshes[1], [S0])):
        yield f"first: {wanted}"


@kind
def hsdp_replicas_are_compared(groups: Groups, url: str) -> Iterator[str]:
    """Replicas of a DTensor that drifted apart are found before anything is written."""
    value = dtensor(numbered(6, 2), groups.mesh(2, 2), [R, S0])
    if groups.rank == 3:
        value.to_local()[0, 0] += 1
    try:
        ucp_dcp.save({"w": value}, url)
        yield "saved"
    except ucp_dcp.UCPError as error:
        if "'w'" not in str(error):
            yield str(error)


class ShardsWrapper(torch.Tensor):
    """Several shards behind one tensor, with the three dunders, as ``LocalShardsWrapper`` of torch's table-wise sharding has them."""

    shards: list[tuple[tuple[int, ...], torch.Tensor]]
    whole: torch.Size

    @staticmethod
    def __new__(cls, shards: list[tuple[tuple[int, ...], torch.Tensor]], shape: tuple[int, ...]) -> ShardsWrapper:
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32)
        self.shards, self.whole = shards, torch.Size(shape)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a wrapper")

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=torch.float32)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.whole))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), shard.size()) for offset, shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(shard for offset, shard in self.shards if tuple(offset) == tuple(index.offset or ()))


@kind
def own_chunk_lists(groups: Groups, url: str) -> Iterator[str]:
    """Columns 2r and 2r + 8 ... of each rank; some ranks hold several shards, one none. Stock writes and reads the same tensors."""
    full = numbered(4, 12)
    mine = [[0, 6], [2], [4, 8, 10], []][groups.rank]

    def wrapper(fill: float | None = None) -> ShardsWrapper:
        cols = [full[:, c : c + 2].clone() if fill is None else torch.full((4, 2), fill) for c in mine]
        return ShardsWrapper([((0, c), v) for c, v in zip(mine, cols, strict=True)], (4, 12))

    ucp_dcp.save({"w": wrapper()}, url)
    yield from stored(groups, url, {"w": full})
    dcp.save({"w": wrapper()}, checkpoint_id=url + "stock")
    for path in (url, url + "stock"):
        got = {"w": wrapper(fill=-3.0)}
        ucp_dcp.load(got, path)
        for c, (_, value) in zip(mine, got["w"].shards, strict=True):
            if not torch.equal(value, full[:, c : c + 2]):
                yield f"{path}: columns {c}: {value}"


@kind
def checkpointable_tensor(groups: Groups, url: str) -> Iterator[str]:
    """Torch 2.14's attributes: padded buffers with two shards each; padding is neither saved nor loaded over."""
    full = numbered(16, 3)

    def value(fill: float | None = None) -> torch.Tensor:
        rows = [2 * groups.rank, 8 + 2 * groups.rank]
        buffer = torch.full((6, 3), -7.0)
        for at, row in zip((1, 4), rows, strict=True):
            buffer[at : at + 2] = full[row : row + 2] if fill is None else fill
        buffer.global_shape, buffer.global_offsets = (16, 3), [(row, 0) for row in rows]  # type: ignore[attr-defined]
        buffer.local_offsets, buffer.local_sizes = [(1, 0), (4, 0)], [(2, 3), (2, 3)]  # type: ignore[attr-defined]
        return buffer

    ucp_dcp.save({"w": value()}, url)
    yield from stored(groups, url, {"w": full})
    state = {"w": value(fill=-3)}
    ucp_dcp.load(state, url)
    if not torch.equal(state["w"], value()):
        yield f"{state}"


def gathered(value: Any) -> torch.Tensor:
    """The whole of a ShardedTensor from what every rank says about its own shards (torch's FULL_STATE_DICT mixes up states on CPU)."""
    if not hasattr(value, "local_shards"):
        return value.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [(s.metadata.shard_offsets, s.tensor.detach().clone()) for s in value.local_shards()])
    full = torch.full(tuple(value.metadata().size), float("nan"))
    for offset, part in (shard for shards in parts for shard in shards):
        full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return full


@kind
def fsdp1_sharded_state_dict(groups: Groups, url: str) -> Iterator[str]:
    """FSDP1's SHARDED_STATE_DICT: ShardedTensors of uneven parameters, and its optimizer state."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def trainer(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        wrapped(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return wrapped, optimizer

    def state_of(model: Any, optimizer: Any, kind: Any) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = trainer(0)
        state = state_of(model, optimizer, StateDictType.SHARDED_STATE_DICT)
        full = {f"model.{k}": gathered(v) for k, v in state["model"].items()}
        for name, states in state["optim"]["state"].items():
            full |= {f"optim.state.{name}.{s}": gathered(v) for s, v in states.items()}
        roots = {"model": "model", "optim": "optimizer"}
        ucp_dcp.save(state, url, roots=roots)
        yield from stored(groups, url, full)
        model, optimizer = trainer(99)
        state = state_of(model, optimizer, StateDictType.SHARDED_STATE_DICT)
        ucp_dcp.load(state, url, roots=roots)
        loaded = {f"model.{k}": gathered(v) for k, v in state["model"].items()}
        for name, states in state["optim"]["state"].items():
            loaded |= {f"optim.state.{name}.{s}": gathered(v) for s, v in states.items()}
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"]))
        again = state_of(model, optimizer, StateDictType.SHARDED_STATE_DICT)
        loaded |= {f"model.{k}": gathered(v) for k, v in again["model"].items()}
    yield from (f"FSDP1 {k}: {v}" for k, v in loaded.items() if not torch.equal(v, full[k]))


@kind
def dtensor_odds_and_ends(groups: Groups, url: str) -> Iterator[str]:
    """0-d, empty, bf16, bool and transposed-local DTensors, and parameters that need gradients."""
    mesh = groups.mesh(4)
    full = {
        "zero_d": torch.tensor(4.5),
        "empty": torch.zeros(0, 3),
        "narrow": numbered(3, 0),
        "bf16": numbered(9, 2).bfloat16(),
        "bool": torch.arange(10) % 3 == 0,
        "int": torch.arange(7),
    }
    state: dict[str, Any] = {k: dtensor(v, mesh, [R if v.dim() == 0 else S0]) for k, v in full.items()}
    turned = numbered(6, 5)
    local = cut(turned, mesh, [S0]).t().contiguous().t()
    state["turned"] = DTensor.from_local(local, mesh, [S0], run_check=False, shape=turned.shape, stride=turned.stride())
    state["param"] = nn.Parameter(dtensor(turned, mesh, [S1]))
    full |= {"turned": turned, "param": turned}
    ucp_dcp.save(state, url)
    yield from stored(groups, url, full)
    for value in state.values():
        value.detach().to_local().fill_(0)
    ucp_dcp.load(state, url)
    for k, v in full.items():
        want = cut(v, mesh, list(state[k].placements))
        if not torch.equal(state[k].detach().to_local(), want):
            yield f"{k}: {state[k].to_local()} != {want}"


def run_kinds(rank: int, world: int, root: str) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    with fresh_meshes():
        groups = Groups()
        for name, fn in KINDS.items():
            try:
                out[name] = list(fn(groups, f"{root}/{name}"))
            except Exception as error:
                out[name] = [f"{type(error).__name__}: {error}", traceback.format_exc()]
            dist.barrier()
    return out


@pytest.fixture(scope="module")
def results(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return ranks.run(4, run_kinds, str(tmp_path_factory.mktemp("kinds")), timeout=180)


@pytest.mark.parametrize("name", list(KINDS))
def test_kind(results: list[dict[str, list[str]]], name: str) -> None:
    for rank, found in enumerate(results):
        assert found[name] == [], f"{name} on rank {rank}: " + "\n".join(found[name])
