"""Public bug reports about structure and names of state dicts, on four gloo ranks. ``c07(...)`` is case C07; it yields what is wrong."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_kit as kit
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_kit import expect, numbered, refused, save
from meshes import Groups, cut, dtensor
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import ucp_dcp
from ucp_dcp import TrainState
from ucp_dcp.errors import MissingKeysError, PlanError, ReplicaMismatchError, UCPError, UnsupportedError

CASES: dict[str, kit.Case] = {}
MODEL = {"model": "model"}


def case(fn: kit.Case) -> kit.Case:
    CASES[fn.__name__.upper()] = fn
    return fn


@case
def c01(groups: Groups, url: str) -> Iterator[str]:
    """Paths that become one key."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    for state in ({"a": {"b": 1}, "a.b": 2}, {"a": [torch.ones(1)], "a.0": 2}, {"x": {0: 1, "0": 2}}):
        yield from refused(PlanError, "two values have the key", ucp_dcp.save, state, url, **one)
        if Path(url).exists() and any(Path(url).iterdir()):
            yield "something was written"
    state = {"x": {0: 1, "b": torch.ones(1)}}
    ucp_dcp.save(state, url, **one)
    got: dict[str, Any] = {"x": {0: 0, "b": torch.zeros(1)}}
    ucp_dcp.load(got, url, **one)
    yield from expect(got["x"][0], 1)


@case
def c02(groups: Groups, url: str) -> Iterator[str]:
    """A container that is empty where it is loaded."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    ucp_dcp.save({"k": [{"x": 1}, {"y": 2}], "d": {"q": 1}, "plain": [1, 2, 3]}, url, **one)
    got: dict[str, Any] = {"k": [], "d": {}, "plain": []}
    yield from refused(MissingKeysError, "'k'", ucp_dcp.load, got, url, **one)
    yield from expect(got, {"k": [], "d": {}, "plain": []})
    report = ucp_dcp.load({"plain": (got := {"plain": []})["plain"], "d": {}} | got, url, **one)
    yield from expect(report.loaded, ["plain"])
    if not {"d.q", "k.0.x"} <= set(report.unexpected):
        yield f"not reported: {report.unexpected}"


@case
def c03(groups: Groups, url: str) -> Iterator[str]:
    """Metadata of older torch, without versions and planner data; and a manifest of a future version."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    dcp.save({"a": {"w": numbered(3)}, "n": 5}, checkpoint_id=url, no_dist=True)
    file = Path(url, ".metadata")
    metadata = pickle.loads(file.read_bytes())
    for name in ("planner_data", "storage_meta", "version"):
        metadata.__dict__.pop(name, None)
    metadata.storage_data = {
        MetadataIndex(i.fqn, i.offset): _StorageInfo(info.relative_path, info.offset, info.length)
        for i, info in metadata.storage_data.items()
    }
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    file.write_bytes(pickle.dumps(metadata))
    got: dict[str, Any] = {"a": {"w": torch.zeros(3)}, "n": 0}
    ucp_dcp.load(got, url, **one)
    yield from expect(got["a"]["w"], numbered(3))
    yield from expect(got["n"], 5)
    ours = url + "ours"
    ucp_dcp.save({"a": numbered(3)}, ours, **one)
    manifest = Path(ours, "ucp.json")
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "version": 99, "min_reader": 98}))
    yield from refused(UnsupportedError, ["98", "version 1"], ucp_dcp.open_checkpoint, ours)


@case
def c04(groups: Groups, url: str) -> Iterator[str]:
    """The caller's own dicts are updated; tensors are filled in place."""
    shared = numbered(4)
    ucp_dcp.save({"epoch": 20, "n": {"s": 3}, "w": shared, "alias": shared}, url)
    memory = torch.zeros(4)
    inner = {"s": 0}
    got: dict[str, Any] = {"epoch": 0, "n": inner, "w": memory, "alias": memory}
    ucp_dcp.load(got, url)
    yield from expect((got["epoch"], inner["s"], got["n"] is inner, got["w"] is memory), (20, 3, True, True))
    yield from expect(memory, shared)


class Net(nn.Sequential):
    def __init__(self, wrap: str = "") -> None:
        super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
        first: nn.Module = self[0]
        for kind in reversed(wrap):  # "CA" is compile around activation checkpointing
            first = torch.compile(first, backend="eager") if kind == "C" else checkpoint_wrapper(first)
        self[0] = first

    def fill(self, start: float) -> Net:
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(numbered(*p.shape, start=start + 10 * i))
        return self


NAMES = ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]


@case
def c05(groups: Groups, url: str) -> Iterator[str]:
    """Compile and activation checkpointing in every order, on a child and on the root: one set of names."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    builds = {w: (lambda w=w: Net(w)) for w in ("", "C", "A", "CA", "AC")}
    builds["root"] = lambda: torch.compile(Net(), backend="eager")
    builds["rootAC"] = lambda: torch.compile(Net("AC"), backend="eager")
    for name, build in builds.items():
        model = build()
        getattr(model, "_orig_mod", model).fill(1.0)
        want = [p.detach().clone() for p in model.parameters()]
        for how in ("roots", "train", "stock"):
            path = f"{url}{name}{how}"
            if how == "roots":
                ucp_dcp.save({"model": model.state_dict()}, path, roots=MODEL, **one)
            elif how == "train":
                TrainState(model, rng=False, **one).save(path)
            else:
                dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
            if how != "stock":
                yield from expect(ucp_dcp.open_checkpoint(path).names(), NAMES, f"{name} {how}")
            for target in ("", "root", "AC"):
                for load in ("roots", "train"):
                    fresh = builds[target]()
                    if load == "roots":
                        ucp_dcp.load({"model": fresh.state_dict()}, path, roots=MODEL, strict="exact", **one)
                    else:
                        TrainState(fresh, rng=False, **one).load(path, strict="exact")
                    for p, value in zip(fresh.parameters(), want, strict=True):
                        yield from expect(p.detach(), value, f"{name} {how} into {target} {load}")


class Buffers(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(numbered(2))
        self.register_buffer("table", numbered(3), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


@case
def c06(groups: Groups, url: str) -> Iterator[str]:
    """Persistence of a buffer differs between save and load, compiled or not."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    for saved in (False, True):
        for compiled in (False, True):
            path = f"{url}{saved}{compiled}"
            model: nn.Module = Buffers(saved)
            TrainState(torch.compile(model, backend="eager") if compiled else model, rng=False, **one).save(path)
            yield from expect("model.table" in ucp_dcp.open_checkpoint(path), saved)
            fresh = Buffers(not saved)
            train = TrainState(torch.compile(fresh, backend="eager") if compiled else fresh, rng=False, **one)
            if saved:
                report = train.load(path)
                yield from expect(report.unexpected, ["model.table"])
            else:
                yield from refused(MissingKeysError, "table", train.load, path)


@case
def c07(groups: Groups, url: str) -> Iterator[str]:
    """DDP on 2 ranks -> plain on 1 -> DDP on 3: parameters, running statistics, optimizer state."""

    def trainer(n: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        if n > 1:
            model = DistributedDataParallel(model, process_group=groups.first(n))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(numbered(5, 4) / 7).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    want: list[torch.Tensor] = []
    for n, path in ((2, "a"), (1, "b"), (3, "c")):
        if groups.rank < n:
            model, optimizer = trainer(n, n)
            train = TrainState(model, optimizer, rng=False, process_group=groups.first(n))
            if n == 2:
                step(model, optimizer)
            else:
                train.load(url + ("a" if n == 1 else "b"), strict="exact")
            train.save(url + path)
            names = ucp_dcp.open_checkpoint(url + path).names()
            if any("module" in name for name in names) or "model.1.running_mean" not in names:
                yield f"{names}"
        dist.barrier()
        checkpoint = ucp_dcp.open_checkpoint(url + path)
        found = [checkpoint[name].read() for name in sorted(checkpoint.names())]
        if want:
            for a, b in zip(found, want, strict=True):
                yield from expect(a, b, path)
        want = found
    # the same by hand with declared roots, and out of a checkpoint that torch itself saved under DDP
    if groups.rank < 2:
        pair = {"process_group": groups.first(2)}
        model, _ = trainer(2, 5)
        dcp.save({"model": model.state_dict()}, checkpoint_id=url + "stock", **pair)
        ucp_dcp.save({"model": model.state_dict()}, url + "roots", roots=MODEL, **pair)
        plain, _ = trainer(1, 9)
        other, _ = trainer(2, 9)
        for path in ("stock", "roots"):
            for fresh in (plain, other):
                report = ucp_dcp.load({"model": fresh.state_dict()}, url + path, roots=MODEL, strict="exact", **pair)
                yield from expect(len(report.loaded), 7)
                for a, b in zip(fresh.parameters(), model.parameters(), strict=True):
                    yield from expect(a.detach(), b.detach(), path)


class Block(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        attn = nn.Linear(2, 2)
        self.attn = checkpoint_wrapper(attn) if wrapped else attn
        self.mlp = nn.Linear(2, 2)


@case
def c08(groups: Groups, url: str) -> Iterator[str]:
    """Only some inner modules are wrapped for activation checkpointing; optimizer state too."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    for wrapped in (True, False):
        path = f"{url}{wrapped}"
        block = Block(wrapped)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
        sum(p.square().sum() for p in block.parameters()).backward()
        optimizer.step()
        TrainState(block, optimizer, rng=False, **one).save(path)
        other = Block(not wrapped)
        second = torch.optim.SGD(other.parameters(), lr=7.0, momentum=0.9)
        TrainState(other, second, rng=False, **one).load(path, strict="exact")
        for a, b in zip(block.parameters(), other.parameters(), strict=True):
            yield from expect(b.detach(), a.detach())
            yield from expect(second.state[b]["momentum_buffer"], optimizer.state[a]["momentum_buffer"])


@case
def c09(groups: Groups, url: str) -> Iterator[str]:
    """Names that are no file names."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    names = ["a/b", "a%2Fb", "sp ace", "x" * 2000, "Foo", "foo", "..", "", "new\nline", "größe", "../../up", "~"]
    ucp_dcp.save({name: numbered(1, start=i + 1) for i, name in enumerate(names)}, url, **one)
    outside = [p for p in Path(url).parent.rglob("*") if "C09" not in p.as_posix() and p.is_file() and "up" in p.name]
    yield from expect(outside, [])
    got = {name: torch.zeros(1) for name in names}
    ucp_dcp.load(got, url, **one)
    yield from expect([int(v) for v in got.values()], list(range(1, len(names) + 1)))
    stock = {name: torch.zeros(1) for name in names}
    dcp.load(stock, checkpoint_id=url, no_dist=True)
    yield from expect([int(v) for v in stock.values()], list(range(1, len(names) + 1)))


@case
def c10(groups: Groups, url: str) -> Iterator[str]:
    """A tensor on one side, an object on the other."""
    if groups.rank == 0:
        one = {"process_group": groups.first(1)}
        ucp_dcp.save({"t": numbered(2), "i": 7, "s": "text"}, url, **one)
        yield from refused(PlanError, "'t'", ucp_dcp.load, {"t": 7}, url, **one)
        yield from refused(PlanError, "'i'", ucp_dcp.load, {"i": torch.zeros(2)}, url, **one)
        yield from refused(PlanError, "'s'", ucp_dcp.load, {"s": torch.zeros(1)}, url, **one)
    dist.barrier()
    mixed = {"x": torch.ones(1) if groups.rank == 0 else 1}
    yield from refused(PlanError, "'x'", ucp_dcp.save, mixed, url + "m")


@case
def c11(groups: Groups, url: str) -> Iterator[str]:
    """A slice costs its own bytes; views of every kind keep their values."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    ucp_dcp.save({"s": torch.arange(1_000_000, dtype=torch.float32)[:10]}, url, **one)
    data = sum(p.stat().st_size for p in Path(url).rglob("*.distcp"))
    if data > 4096:
        yield f"10 elements take {data} bytes"
    base = numbered(3, 4)
    views = {
        "transposed": base.t(), "every second": base[:, ::2], "expanded": numbered(3, 1).expand(3, 2), "flipped": base.flip(0),
        "channels last": numbered(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }  # fmt: skip
    ucp_dcp.save(views, url + "v", **one)
    got = {name: torch.zeros(value.shape) for name, value in views.items()}
    ucp_dcp.load(got, url + "v", **one)
    for name, value in views.items():
        yield from expect(got[name], value.contiguous(), name)
    yield from refused(PlanError, "expanded", ucp_dcp.load, {"expanded": torch.zeros(3, 1).expand(3, 2)}, url + "v", **one)


@case
def c12(groups: Groups, url: str) -> Iterator[str]:
    """One memory under two dtypes: two tensors."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    x = numbered(4)
    for roots in (None, MODEL):
        ucp_dcp.save({"model": {"x": x, "y": x.view(torch.int32)}}, url, roots=roots, **one)
        got = {"model": {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.int32)}}
        ucp_dcp.load(got, url, roots=roots, **one)
        yield from expect(got["model"]["x"], x)
        yield from expect(got["model"]["y"], x.view(torch.int32))


class Quantised(torch.Tensor):
    """int8 data and a scale behind the face of a float tensor, as quantisation libraries do it: no memory of its own."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].data_, args[0].scale)
        raise NotImplementedError(f"{func}")


@case
def c13(groups: Groups, url: str) -> Iterator[str]:
    """A tensor subclass without memory of its own is refused by name before anything is written or read; its parts can be saved."""
    if groups.rank:
        return
    one = {"process_group": groups.first(1)}
    data, scale = torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor(0.5)
    q = Quantised(data, scale)
    yield from refused(UnsupportedError, ["'w'", "Quantised", "data_", "scale"], ucp_dcp.save, {"w": q}, url, **one)
    if Path(url).exists() and any(Path(url).iterdir()):
        yield "something was written"
    yield from refused(UnsupportedError, ["'w'", "Quantised"], ucp_dcp.save, {"w": nn.Parameter(q, requires_grad=False)}, url, **one)
    ucp_dcp.save({"w": numbered(2, 3)}, url, **one)
    yield from refused(UnsupportedError, ["'w'", "Quantised"], ucp_dcp.load, {"w": q}, url, **one)
    yield from expect(q.data_, torch.arange(6, dtype=torch.int8).reshape(2, 3))
    for kind in (numbered(2, 2).to_sparse(), torch.nested.nested_tensor([numbered(2), numbered(3)], layout=torch.jagged)):
        yield from refused(UCPError, "'w'", ucp_dcp.save, {"w": kind}, url + "k", **one)


@case
def c14(groups: Groups, url: str) -> Iterator[str]:
    """Nesting is kept once; the command line fails loudly."""
    if groups.rank:
        return
    ucp_dcp.save({"model": {"w": numbered(2, 2)}}, url, process_group=groups.first(1))
    yield from expect(list(ucp_dcp.open_checkpoint(url)), ["model.w"])
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    dcp_to_torch_save(url, url + ".pt")
    found = torch.load(url + ".pt")
    yield from expect(list(found), ["model"])
    yield from expect(found["model"]["w"], numbered(2, 2))
    torch_save_to_dcp(url + ".pt", url + "back")
    yield from expect(list(ucp_dcp.open_checkpoint(url + "back")), ["model.w"])
    for arguments in (["show", url + "nothing"], ["show", url, "--nonsense"]):
        done = subprocess.run([sys.executable, "-m", "ucp_dcp", *arguments], capture_output=True, text=True, timeout=100)
        if done.returncode == 0 or not (done.stderr or done.stdout):
            yield f"{arguments}: exit code {done.returncode}"


@case
def c07_shards(groups: Groups, url: str) -> Iterator[str]:
    """Objects and tensors of one rank under a name that another rank uses otherwise; DTensors under wrapped names."""
    mesh = groups.mesh(4)
    names = {"module._orig_mod.w": numbered(6, 2)}
    ucp_dcp.save({"model": {k: dtensor(v, mesh, [Shard(0)]) for k, v in names.items()}}, url, roots=MODEL)
    yield from expect(ucp_dcp.open_checkpoint(url).names(), ["model.w"])
    got = {"model": {"w": dtensor(numbered(6, 2), mesh, [Shard(1)], fill=0)}}
    ucp_dcp.load(got, url, roots=MODEL)
    yield from expect(got["model"]["w"].to_local(), cut(numbered(6, 2), mesh, [Shard(1)]))
    two = {"model": {("module.w" if groups.rank else "w"): numbered(2)}}
    save(groups, 1, lambda: two, url + "one", roots=MODEL)
    yield from refused(PlanError, "'w'", ucp_dcp.save, two, url + "two", roots=MODEL)
    other = {"model": {"w": numbered(2, start=1 + groups.rank)}}
    yield from refused(ReplicaMismatchError, "'model.w'", ucp_dcp.save, other, url + "two", roots=MODEL)


def run_cases(rank: int, world: int, root: str) -> dict[str, list[str]]:
    return kit.run(CASES, root)


@pytest.fixture(scope="module")
def results(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> kit.Results:
    return ranks.run(kit.WORLD, run_cases, str(tmp_path_factory.mktemp("cases")), timeout=180)


@pytest.mark.parametrize("name", list(CASES))
def test_case(results: kit.Results, name: str) -> None:
    kit.check(results, name)
