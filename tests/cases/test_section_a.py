"""Public bug reports about layout and planning, end to end on four gloo ranks: saved by us, loaded by us and by stock torch.

``a07(...)`` is case A07. Each case yields what is wrong, and must yield nothing. All cases run inside one call on the ranks; loads on fewer
ranks take a group of the first ones. Expected values are cut by torch's own placements or written down, never by the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import case_kit
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import Groups, cut, dtensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec
from ucp_dcp.errors import LayoutError, MissingKeysError, ReplicaMismatchError, ShapeMismatchError, UCPError

WORLD = 4
S0, S1, R = Shard(0), Shard(1), Replicate()
Target = tuple[tuple[int, ...], list[Any]]
Case = Callable[[Groups, str], Iterator[str]]
CASES: dict[str, Case] = {}


def case(fn: Case) -> Case:
    CASES[fn.__name__.upper()] = fn
    return fn


def numbered(*shape: int) -> torch.Tensor:
    """Every element different, none zero."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)


def save(groups: Groups, n: int, state: Callable[[], dict[str, Any]], url: str, **kwargs: Any) -> None:
    """The first ``n`` ranks save; all ranks wait for it."""
    if groups.rank < n:
        ucp_dcp.save(state(), url, process_group=groups.first(n), **kwargs)
    dist.barrier()


def loads(groups: Groups, url: str, full: Mapping[str, torch.Tensor], targets: Sequence[Target], stock: bool = True) -> Iterator[str]:
    """Load ``full`` onto each (mesh shape, placements) with our reader and with torch's, on exactly the ranks of the mesh."""
    for shape, placements in targets:
        mesh, n = groups.mesh(*shape), math.prod(shape)
        if groups.rank >= n:
            continue
        for name, load in (("ours", ucp_dcp.load), ("stock", dcp.load)) if stock else (("ours", ucp_dcp.load),):
            state = {key: dtensor(value, mesh, placements, fill=-3) for key, value in full.items()}
            load(state, **{"url" if load is ucp_dcp.load else "checkpoint_id": url}, process_group=groups.first(n))
            for key, value in full.items():
                got, want = state[key].to_local(), cut(value, mesh, placements)
                if got.shape != want.shape or not torch.equal(got, want):
                    yield f"{name} {key} onto {shape} {placements}: {got} != {want}"


def dtensor_case(groups: Groups, url: str, full: Mapping[str, torch.Tensor], source: Target, targets: Sequence[Target]) -> Iterator[str]:
    """Save ``full`` as DTensors of one form, check the stored chunks, load it in other forms."""
    mesh, n = groups.mesh(*source[0]), math.prod(source[0])
    save(groups, n, lambda: {key: dtensor(value, mesh, source[1]) for key, value in full.items()}, url)
    checkpoint = ucp_dcp.open_checkpoint(url)
    for key, value in full.items():
        chunks = checkpoint[key].chunks
        if sum(box.numel for box in chunks) != value.numel() or len({box.offset for box in chunks}) != len(chunks):
            yield f"{key}: stored chunks {chunks}"
        if not torch.equal(checkpoint[key].read(), value):
            yield f"{key}: stored {checkpoint[key].read()}"
    yield from loads(groups, url, full, targets)


def refused(kind: type[UCPError], text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[str]:
    """The call must raise exactly this error, with the text in its message."""
    try:
        call(*args, **kwargs)
    except kind as error:
        if text not in str(error):
            yield f"the message lacks {text!r}: {error}"
    else:
        yield f"no {kind.__name__}"


def layout_of(rules: list[dict[str, Any]], coords: Mapping[str, tuple[int, int]], **kwargs: Any) -> Layout:
    head = {"ucp_spec": 1, "name": "case", "axes": list(coords), "optimizer": {"states": {"step": "scalar"}}}
    variables = kwargs.get("variables", {})
    head["variables"] = {name: "params" if isinstance(v, list) else "int" for name, v in variables.items()}
    return Layout(LayoutSpec.from_dict({**head, "rules": rules}), coords=coords, **{"roots": {"model": "model"}, **kwargs})


@case
def a01(groups: Groups, url: str) -> Iterator[str]:
    """Trailing ranks own nothing."""
    full = {"a": numbered(6), "b": numbered(5, 3)}
    yield from dtensor_case(groups, url, full, ((4,), [S0]), [((n,), [S0]) for n in (4, 3, 2, 1)])
    yield from loads(groups, url, {"b": full["b"]}, [((2,), [S1])])


@case
def a02(groups: Groups, url: str) -> Iterator[str]:
    """A rank without local shards is not a missing key; an absent key is."""
    full = {"a": numbered(1, 8, 4), "b": numbered(1, 4)}
    yield from dtensor_case(groups, url, full, ((4,), [S0]), [((4,), [S0]), ((2,), [S0]), ((2, 2), [S0, S1])])
    absent = {"c": dtensor(numbered(1, 4), groups.mesh(4), [S0], fill=0)}
    yield from refused(MissingKeysError, "'c'", ucp_dcp.load, absent, url)


@case
def a03(groups: Groups, url: str) -> Iterator[str]:
    """Empty shards must not be taken for real ones at the same offset."""
    full = {"a": numbered(5), "b": numbered(2), "c": numbered(10, 2), "d": numbered(1)}
    yield from dtensor_case(groups, url, full, ((2, 2), [S0, S0]), [((3,), [S0]), ((1,), [R]), ((4,), [S0])])


@case
def a04(groups: Groups, url: str) -> Iterator[str]:
    """A full (1, 17) of one rank into FSDP2 over TP, and back."""
    full = {"w": numbered(1, 17)}
    save(groups, 1, lambda: dict(full), url)
    yield from loads(groups, url, full, [((2, 2), [S0, R]), ((2, 2), [_StridedShard(0, split_factor=2), S0]), ((2, 2), [S0, S1])])
    yield from dtensor_case(groups, url + "back", full, ((2, 2), [S0, R]), [((1,), [R]), ((3,), [S1])])


@case
def a05(groups: Groups, url: str) -> Iterator[str]:
    """One dim over two mesh dims, uneven: offsets of chunking twice."""
    full = {"a": numbered(2), "b": numbered(5), "c": numbered(7, 3)}
    yield from dtensor_case(groups, url, full, ((2, 2), [S0, S0]), [((2,), [S0]), ((3,), [S0]), ((2, 2), [S0, S0])])
    found = sorted((box.offset, box.size) for box in ucp_dcp.open_checkpoint(url)["b"].chunks)
    if found != [((0,), (2,)), ((2,), (1,)), ((3,), (1,)), ((4,), (1,))]:
        yield f"chunks of 5 rows: {found}"


@case
def a07(groups: Groups, url: str) -> Iterator[str]:
    """A rank owns several regions: strided shards that nothing joins. Torch itself can neither save nor load these."""
    lone, both = [_StridedShard(0, split_factor=2)], [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    plain: list[Target] = [((n,), [S0]) for n in (1, 2, 3)]
    yield from dtensor_case(groups, url, {"w": numbered(8), "x": numbered(9, 2)}, ((2,), lone), plain)
    yield from loads(groups, url, {"w": numbered(8), "x": numbered(9, 2)}, [((2,), lone), ((2, 2), both)], stock=False)
    yield from dtensor_case(groups, url + "2", {"w": numbered(12), "x": numbered(11, 3)}, ((2, 2), both), plain)
    yield from dtensor_case(groups, url + "3", {"w": numbered(10, 2)}, ((2, 2), [_StridedShard(0, split_factor=2), R]), plain)


@case
def a08(groups: Groups, url: str) -> Iterator[str]:
    """HSDP: every byte once, spread over all replicas."""
    full = {f"w{i}": numbered(7, 3) + i for i in range(40)}
    targets: list[Target] = [((2,), [S0]), ((2, 2), [S0, R]), ((2, 2), [R, S0])]
    yield from dtensor_case(groups, url, full, ((2, 2), [R, S0]), targets)
    catalog = ucp_dcp.open_checkpoint(url).catalog
    written = dict.fromkeys(range(len(catalog.files)), 0)
    for t in range(catalog.n_tensors):
        first, last = catalog.chunk_range(t)
        for chunk, (_, size) in zip(range(first, last), catalog.boxes(t), strict=True):
            written[int(catalog.chunk_file[chunk])] += 4 * int(size.prod())
    total = 40 * 7 * 3 * 4
    if sum(written.values()) != total or max(written.values()) > 0.6 * total or len([n for n in written.values() if n]) < 4:
        yield f"bytes by file: {written}"


class Chunks(torch.Tensor):
    """A local tensor with torch 2.13's dunders, at its own offset of a global shape."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> Chunks:
        self = torch.Tensor._make_subclass(cls, local)
        self.whole, self.offset, self.local = torch.Size(shape), torch.Size(offset), local  # type: ignore[attr-defined]
        return self

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offset, self.local.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


@case
def a09(groups: Groups, url: str) -> Iterator[str]:
    """Shards of 5, 1 and 4: exact with offsets, refused without."""
    full, rank = numbered(10), groups.rank
    start, stop = ((0, 5), (5, 6), (6, 10), (10, 10))[rank]
    mesh = groups.mesh(3)

    def explicit(fill: float | None = None) -> dict[str, Any]:
        chunks, local = full[start:stop].clone(), torch.full((6,), -7.0)
        local[1 : 1 + stop - start] = full[start:stop]
        if fill is not None:
            chunks.fill_(fill), local.fill_(fill)
        local.global_shape, local.global_offsets = (10,), [(start,)]  # type: ignore[attr-defined]
        local.local_offsets, local.local_sizes = [(1,)], [(stop - start,)]  # type: ignore[attr-defined]
        return {"chunks": Chunks(chunks, (10,), (start,)), "attributes": local}

    save(groups, 3, explicit, url)
    yield from loads(groups, url, {"chunks": full, "attributes": full}, [((2,), [S0]), ((4,), [S0])])
    if rank < 3:
        state = explicit(fill=-3)
        ucp_dcp.load(state, url, process_group=groups.first(3))
        if not torch.equal(state["chunks"].local, full[start:stop]):
            yield f"chunks: {state['chunks'].local}"
        want = torch.full((6,), -3.0)
        want[1 : 1 + stop - start] = full[start:stop]
        if not torch.equal(torch.Tensor(state["attributes"]), want):
            yield f"attributes: {state['attributes']}"
        bad = DTensor.from_local(full[start:stop].clone(), mesh, [S0], run_check=False, shape=torch.Size((10,)), stride=(1,))
        yield from refused(LayoutError, "torch.chunk", ucp_dcp.save, {"w": bad}, url + "bad", process_group=groups.first(3))


@case
def a10(groups: Groups, url: str) -> Iterator[str]:
    """A destination of another shape is an error that names both, and stays as it was."""
    save(groups, 4, lambda: {"w": numbered(2, 3)}, url)
    for shape in ((3, 2), (6,), (1, 3), (2, 4), (2, 3, 1)):
        state = {"w": torch.full(shape, -3.0)}
        yield from refused(ShapeMismatchError, "(2, 3)", ucp_dcp.load, state, url)
        yield from refused(ShapeMismatchError, str(shape), ucp_dcp.load, state, url)
        if not bool((state["w"] == -3).all()):
            yield f"{shape} was written to"


@case
def a12(groups: Groups, url: str) -> Iterator[str]:
    """Plain tensors that differ between ranks: refused without a layout, exact with one."""
    rows = numbered(8, 3)
    local = rows[2 * groups.rank :][:2].clone()
    yield from refused(ReplicaMismatchError, "'w'", ucp_dcp.save, {"w": local}, url)
    layout = layout_of([{"match": "w", "steps": [{"tp": "Shard(0)"}]}], {"tp": (groups.rank, 4)})
    save(groups, 4, lambda: {"model": {"w": local}}, url + "l", layout=layout)
    yield from loads(groups, url + "l", {"model.w": rows}, [((3,), [S0]), ((1,), [R])])


@case
def a13(groups: Groups, url: str) -> Iterator[str]:
    """Pipeline parallelism only: every rank has its own keys, several model chunks each."""
    full = {f"layers.{i}.w": torch.full((2, 2), float(i)) for i in range(8)}
    save(groups, 4, lambda: {f"layers.{i}.w": full[f"layers.{i}.w"].clone() for i in (groups.rank, groups.rank + 4)}, url)
    if sorted(ucp_dcp.open_checkpoint(url)) != sorted(full):
        yield f"stored {list(ucp_dcp.open_checkpoint(url))}"
    yield from loads(groups, url, full, [((1,), [R]), ((4,), [S0])])


def stage(groups: Groups, table: Sequence[Sequence[Sequence[int]]]) -> tuple[Layout, dict[str, Any]]:
    """Layout and state dict of this rank, which holds model chunks ``table[rank]`` with these global layers under local numbers."""
    chunks = table[groups.rank]
    layout = layout_of(
        [{"match": "layers.{i}.w", "rename": "layers.{i + first}.w", "steps": [{"pp": "Unique(pp)"}]}],
        {"pp": (groups.rank, len(table))},
        roots={f"model{v}": "model" for v in range(len(chunks))},
        variables={"first": 0},
        root_variables={f"model{v}": {"first": layers[0]} for v, layers in enumerate(chunks)},
    )
    return layout, {
        f"model{v}": {f"layers.{j}.w": torch.full((2, 2), float(g)) for j, g in enumerate(layers)} for v, layers in enumerate(chunks)
    }


@case
def a15(groups: Groups, url: str) -> Iterator[str]:
    """10 layers, PP=2, VPP=2, the last stage has 4: every layer once."""
    table = [[range(0, 3), range(5, 8)], [range(3, 5), range(8, 10)]]
    if groups.rank < 2:
        layout, state = stage(groups, table)
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(2))
    dist.barrier()
    flat = [[range(10)]]
    if groups.rank == 0:
        yield from fill_stage(groups, flat, url, 1)


def fill_stage(groups: Groups, table: Sequence[Sequence[Sequence[int]]], url: str, n: int) -> Iterator[str]:
    layout, want = stage(groups, table)
    state = {root: {k: torch.full_like(v, -3) for k, v in tensors.items()} for root, tensors in want.items()}
    ucp_dcp.load(state, url, layout=layout, process_group=groups.first(n))
    yield from (f"{root} {k}: {v}" for root, tensors in state.items() for k, v in tensors.items() if not torch.equal(v, want[root][k]))


@case
def a16(groups: Groups, url: str) -> Iterator[str]:
    """8 layers of PP=2 into interleaved PP=2 x VPP=2 and into PP=4."""
    if groups.rank < 2:
        layout, state = stage(groups, [[range(0, 4)], [range(4, 8)]])
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(2))
    dist.barrier()
    if groups.rank < 2:
        yield from fill_stage(groups, [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]], url, 2)
    yield from fill_stage(groups, [[range(2 * r, 2 * r + 2)] for r in range(4)], url, 4)


@case
def a17(groups: Groups, url: str) -> Iterator[str]:
    """5 layers into a target that has room for 4: the fifth is reported, or with strict="exact" an error."""
    if groups.rank == 0:
        layout, state = stage(groups, [[range(5)]])
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(1))
    dist.barrier()
    layout, state = stage(groups, [[[r]] for r in range(4)])
    report = ucp_dcp.load(state, url, layout=layout)
    if len(report.unexpected) != 1 or "layers.4.w" not in report.unexpected[0]:
        yield f"unexpected: {report.unexpected}"
    yield from refused(UCPError, "layers.4.w", ucp_dcp.load, state, url, layout=layout, strict="exact")


@case
def a19(groups: Groups, url: str) -> Iterator[str]:
    """Fused gate and up: TP=2 shards of both halves, loaded at TP=4 and whole; the moment likewise."""
    full = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13]) + 1

    def fused(tp: int, n: int, rows: Any) -> dict[str, Any]:
        rule = {"match": "w", "steps": [{"tp": "Shard(0, parts=[4, 4])"}]}
        layout = layout_of([rule], {"tp": (tp, n)}, roots={"model": "model", "optim": "optimizer"})
        return {"layout": layout, "state_dict": {"model": {"w": rows.clone()}, "optim": {"state": {"w": {"m": rows + 100}}}}}

    if groups.rank < 2:
        rows = full[[[0, 1, 4, 5], [2, 3, 6, 7]][groups.rank]]
        ucp_dcp.save(url=url, process_group=groups.first(2), **fused(groups.rank, 2, rows))
    dist.barrier()
    yield from loads(groups, url, {"model.w": full, "optim.state.w.m": full + 100}, [((1,), [R]), ((3,), [S0])])
    wanted = fused(groups.rank, 4, torch.full((2,), -3.0))
    ucp_dcp.load(url=url, **wanted)
    got, want = wanted["state_dict"], full[[groups.rank, groups.rank + 4]]
    if not torch.equal(got["model"]["w"], want) or not torch.equal(got["optim"]["state"]["w"]["m"], want + 100):
        yield f"{got} != {want}"


@case
def a23(groups: Groups, url: str) -> Iterator[str]:
    """Vocabulary of 10, padded to 12 at TP=1 and to 16 at TP=4: real rows exact, padding is 0, the padded size is not stored."""
    full = numbered(10, 2)

    def padded(tp: int, n: int, to: int, fill: float | None) -> tuple[Layout, dict[str, Any]]:
        whole = torch.cat([full, torch.full((to - 10, 2), -999.0)])
        if fill is not None:
            whole.fill_(fill)
        local = whole.chunk(n)[tp].clone()
        rule = {"match": "embed", "steps": [{"pad": "Pad(0, to=padded, size=vocab)"}, {"tp": "Shard(0)"}]}
        layout = layout_of([rule], {"tp": (tp, n)}, variables={"padded": to, "vocab": 10}, roots={"model": "model", "optim": "optimizer"})
        return layout, {"model": {"embed": local}, "optim": {"state": {"embed": {"exp_avg": local + 0 if fill is not None else local * 2}}}}

    for source, target in (((1, 12), (4, 16)), ((4, 16), (1, 12)), ((4, 16), (2, 16))):
        path = f"{url}{source[0]}{target[0]}"
        if groups.rank < source[0]:
            layout, state = padded(groups.rank, *source, None)
            ucp_dcp.save(state, path, layout=layout, process_group=groups.first(source[0]))
        dist.barrier()
        yield from loads(groups, path, {"model.embed": full, "optim.state.embed.exp_avg": full * 2}, [((3,), [S0])])
        if groups.rank < target[0]:
            layout, state = padded(groups.rank, *target, -3.0)
            ucp_dcp.load(state, path, layout=layout, process_group=groups.first(target[0]))
            want = torch.cat([full, torch.zeros(target[1] - 10, 2)]).chunk(target[0])[groups.rank]
            if not torch.equal(state["model"]["embed"], want) or not torch.equal(state["optim"]["state"]["embed"]["exp_avg"], want * 2):
                yield f"{source} {target}: {state} != {want}"


@case
def a24(groups: Groups, url: str) -> Iterator[str]:
    """The shape of a DTensor is global already: 12 rows on TP=2 are 12, not 24."""
    mesh = groups.mesh(2)
    save(groups, 2, lambda: {"model": {"embed": dtensor(numbered(12, 2), mesh, [S0])}}, url, roots={"model": "model"})
    if ucp_dcp.open_checkpoint(url)["model.embed"].shape != (12, 2):
        yield f"stored {ucp_dcp.open_checkpoint(url)['model.embed'].shape}"
    yield from loads(groups, url, {"model.embed": numbered(12, 2)}, [((2,), [S0])])


@case
def a25(groups: Groups, url: str) -> Iterator[str]:
    """4 layers x 4 experts, saved by pipeline stage, loaded by expert rank, with Adam's moments."""
    rank, roots = groups.rank, {"model": "model", "optim": "optimizer"}

    def state(names: Mapping[str, float]) -> dict[str, Any]:
        moments = {n: {"exp_avg": torch.full((2, 3), v + 100), "exp_avg_sq": torch.full((2, 3), v + 200)} for n, v in names.items()}
        return {"model": {n: torch.full((2, 3), v) for n, v in names.items()}, "optim": {"state": moments}}

    by_stage = layout_of(
        [{"match": "layers.{i}.experts.{e}.w", "rename": "layers.{i + pp}.experts.{e}.w", "steps": [{"pp": "Unique(pp)"}]}],
        {"pp": (rank, 4)},
        roots=roots,
    )
    ucp_dcp.save(state({f"layers.0.experts.{e}.w": 10.0 * rank + e for e in range(4)}), url, layout=by_stage)
    by_expert = layout_of(
        [{"match": "layers.{i}.experts.{e}.w", "rename": "layers.{i}.experts.{e + ep}.w", "steps": [{"ep": "Unique(ep)"}]}],
        {"ep": (rank, 4)},
        roots=roots,
    )
    want, got = (
        state({f"layers.{i}.experts.0.w": 10.0 * i + rank for i in range(4)}),
        state({f"layers.{i}.experts.0.w": -3.0 for i in range(4)}),
    )
    report = ucp_dcp.load(got, url, layout=by_expert, strict="exact")
    for i in range(4):
        name = f"layers.{i}.experts.0.w"
        pairs = [(got["model"][name], want["model"][name])]
        pairs += [(got["optim"]["state"][name][s], want["optim"]["state"][name][s]) for s in ("exp_avg", "exp_avg_sq")]
        yield from (f"{name}: {a} != {b} ({report})" for a, b in pairs if not torch.equal(a, b))


@case
def a27(groups: Groups, url: str) -> Iterator[str]:
    """A flat range that cuts a fused expert so that its halves have different numbers of pieces."""
    full, bounds = numbered(6, 4), [0, 7, 19, 24]

    def flat(rank: int, cuts: list[int], fill: float | None) -> tuple[Layout, dict[str, Any]]:
        local = full.reshape(-1)[cuts[rank] : cuts[rank + 1]].clone()
        rule = {"match": "w", "steps": [{"dp": f"Flat(bounds={cuts})"}]}
        layout = layout_of([rule], {"dp": (rank, len(cuts) - 1)}, shapes={"w": (6, 4)})
        return layout, {"model": {"w": local if fill is None else local.fill_(fill)}}

    if groups.rank < 3:
        layout, state = flat(groups.rank, bounds, None)
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(3))
    dist.barrier()
    yield from loads(groups, url, {"model.w": full}, [((2, 2), [S0, S1]), ((3,), [S1])])
    for cuts in ([0, 12, 24], [0, 5, 11, 11, 24]):
        n = len(cuts) - 1
        if groups.rank < n:
            layout, state = flat(groups.rank, cuts, -3)
            ucp_dcp.load(state, url, layout=layout, process_group=groups.first(n))
            if not torch.equal(state["model"]["w"], full.reshape(-1)[cuts[groups.rank] : cuts[groups.rank + 1]]):
                yield f"{cuts}: {state}"


@case
def a28(groups: Groups, url: str) -> Iterator[str]:
    """'Replicas' of different shape."""
    yield from refused(ReplicaMismatchError, "'w'", ucp_dcp.save, {"w": torch.ones(2 + (groups.rank == 1))}, url)
    yield from refused(ReplicaMismatchError, "'w'", ucp_dcp.save, {"w": numbered(4, 3)[: 2 + groups.rank % 2]}, url)


@case
def a30(groups: Groups, url: str) -> Iterator[str]:
    """The mean of bf16 copies is taken in fp32 and rounded once."""
    layout = layout_of([{"match": "w", "steps": [{"tp": "Average()"}]}], {"tp": (groups.rank, 4)})
    copy = torch.tensor([(1.0, 1.0078125)[groups.rank % 2], 3.0 + groups.rank], dtype=torch.bfloat16)
    ucp_dcp.save({"model": {"w": copy}}, url, layout=layout)
    want = torch.tensor([1.00390625, 4.5]).bfloat16()
    yield from loads(groups, url, {"model.w": want}, [((1,), [R]), ((4,), [R])])


@case
def a31(groups: Groups, url: str) -> Iterator[str]:
    """Four ranks that all hold the whole: one copy is written."""
    ucp_dcp.save({"w": numbered(3)}, url)
    if [box.size for box in ucp_dcp.open_checkpoint(url)["w"].chunks] != [(3,)]:
        yield f"chunks {ucp_dcp.open_checkpoint(url)['w'].chunks}"
    yield from loads(groups, url, {"w": numbered(3)}, [((1,), [R]), ((4,), [R])])


@case
def a32(groups: Groups, url: str) -> Iterator[str]:
    """Some ranks want only replicas, one wants nothing."""
    mesh = groups.mesh(2)
    save(groups, 2, lambda: {"w": dtensor(numbered(4, 3), mesh, [S0]), "b": numbered(3)}, url)
    state = {0: {"w": torch.zeros(4, 3)}, 1: {"b": torch.zeros(3)}, 2: {"b": torch.zeros(3)}, 3: {}}[groups.rank]
    ucp_dcp.load(state, url)
    yield from (f"{k}: {v}" for k, v in state.items() if not torch.equal(v, {"w": numbered(4, 3), "b": numbered(3)}[k]))


@case
def a33(groups: Groups, url: str) -> Iterator[str]:
    """Embedding on the first stage, its tied head on the last: one global tensor, loaded under both names."""
    full, roots = numbered(4, 2), {"model": "model", "optim": "optimizer"}
    rules = [
        {"match": "embed.weight", "steps": [{"pp": "Unique([0, pp.size - 1])"}]},
        {"match": "head.weight", "rename": "embed.weight", "steps": [{"pp": "Unique([0, pp.size - 1])"}]},
    ]
    if groups.rank < 2:
        name = ("embed.weight", "head.weight")[groups.rank]
        state = {"model": {name: full.clone()}, "optim": {"state": {name: {"exp_avg": full + 100}}}}
        layout = layout_of(rules, {"pp": (groups.rank, 2)}, roots=roots)
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(2))
    dist.barrier()
    if list(ucp_dcp.open_checkpoint(url)) != ["model.embed.weight", "optim.state.embed.weight.exp_avg"]:
        yield f"stored {list(ucp_dcp.open_checkpoint(url))}"
    yield from loads(groups, url, {"model.embed.weight": full, "optim.state.embed.weight.exp_avg": full + 100}, [((2,), [S0])])
    if groups.rank == 0:  # PP=1: both names are there
        both = {"model": {"embed.weight": torch.zeros(4, 2), "head.weight": torch.zeros(4, 2)}}
        ucp_dcp.load(both, url, layout=layout_of(rules, {"pp": (0, 1)}, roots={"model": "model"}), process_group=groups.first(1))
        yield from (f"{k}: {v}" for k, v in both["model"].items() if not torch.equal(v, full))


@case
def a34(groups: Groups, url: str) -> Iterator[str]:
    """Tied and equal but separate tensors under two keys: both exact, never merged with one that differs."""
    tied, other = numbered(50, 5), numbered(50, 5)
    other[7, 3] = -1
    mesh = groups.mesh(4)
    shared = dtensor(tied, mesh, [S0])
    ucp_dcp.save({"embed": shared, "head": shared, "copy": dtensor(tied, mesh, [S0]), "other": dtensor(other, mesh, [S0])}, url)
    yield from loads(groups, url, {"embed": tied, "head": tied, "copy": tied, "other": other}, [((3,), [S0])])


@case
def a35(groups: Groups, url: str) -> Iterator[str]:
    """ZeRO-1 partitions of 7 elements padded to 8 at DP=2, loaded at DP=1, 3 and 4."""
    shapes, roots = {"p0": (3,), "p1": (2, 2)}, {"optim": "optimizer"}
    rules = [{"match": "flat", "steps": [{"dp": "FlatBuffer(params=order, pad_to=2*dp.size)"}]}, {"match": "p*"}]

    def partition(dp: int, n: int, fill: float | None) -> tuple[Layout, dict[str, Any], dict[str, torch.Tensor]]:
        layout = layout_of(rules, {"dp": (dp, n)}, roots=roots, shapes=shapes, variables={"order": ["p0", "p1"]})
        total = -(-7 // (2 * n)) * 2 * n
        want = {}
        for state, base in (("exp_avg", 100.0), ("exp_avg_sq", 200.0)):
            want[state] = torch.cat([torch.arange(7.0) + base, torch.full((total - 7,), -999.0 if fill is None else 0.0)]).chunk(n)[dp]
        local = {k: v.clone() if fill is None else torch.full_like(v, fill) for k, v in want.items()}
        return layout, {"optim": {"state": {"flat": local}}}, want

    if groups.rank < 2:
        layout, state, _ = partition(groups.rank, 2, None)
        ucp_dcp.save(state, url, layout=layout, process_group=groups.first(2))
    dist.barrier()
    full = {"optim.state.p0.exp_avg": torch.arange(3.0) + 100, "optim.state.p1.exp_avg_sq": torch.arange(3.0, 7).reshape(2, 2) + 200}
    yield from loads(groups, url, full, [((2,), [S0])])
    for n in (1, 3, 4):
        if groups.rank < n:
            layout, state, want = partition(groups.rank, n, -3)
            ucp_dcp.load(state, url, layout=layout, process_group=groups.first(n))
            got = state["optim"]["state"]["flat"]
            yield from (f"dp={n} {k}: {got[k]} != {want[k]}" for k in want if not torch.equal(got[k], want[k]))


@case
def a40(groups: Groups, url: str) -> Iterator[str]:
    """ZeRO-3 with a frozen weight: it is there though it has no optimizer state; a placeholder of size 0 is refused."""
    trained, frozen = numbered(4), numbered(4) + 50

    def zero3(rank: int, n: int) -> Layout:
        return Layout("zero3", {"dp": (rank, n)}, shapes={"a": (4,), "b": (4,)}, roots={"model": "model", "optim": "optimizer"})

    if groups.rank < 2:
        part = slice(2 * groups.rank, 2 * groups.rank + 2)
        state = {
            "model": {"a": trained[part].clone(), "b": frozen[part].clone()},
            "optim": {"state": {"a": {"exp_avg": trained[part] + 100}}},
        }
        ucp_dcp.save(state, url, layout=zero3(groups.rank, 2), process_group=groups.first(2))
        state["model"]["b"] = torch.empty(0)
        refuse = refused(
            LayoutError, "model.b", ucp_dcp.save, state, url + "p", layout=zero3(groups.rank, 2), process_group=groups.first(2)
        )
        yield from refuse
    dist.barrier()
    yield from loads(groups, url, {"model.a": trained, "model.b": frozen}, [((1,), [R]), ((3,), [S0])])


@case
def a42(groups: Groups, url: str) -> Iterator[str]:
    """No key matches and strict is off: the report says that nothing was loaded."""
    save(groups, 4, lambda: {"module.w": numbered(3)}, url)
    state = {"w": torch.full((3,), -3.0)}
    report = ucp_dcp.load(state, url, strict=False)
    if report.loaded or report.missing != ["w"] or report.unexpected != ["module.w"] or not bool((state["w"] == -3).all()):
        yield f"{report}"
    yield from refused(MissingKeysError, "'w'", ucp_dcp.load, state, url)


@case
def a43(groups: Groups, url: str) -> Iterator[str]:
    """A local shard of optimizer state that lost its DTensor type."""
    mesh, roots = groups.mesh(4), {"model": "model", "optim": "optimizer"}
    state = {"model": {"w": dtensor(numbered(8), mesh, [S0])}, "optim": {"state": {"w": {"exp_avg": cut(numbered(8), mesh, [S0])}}}}
    yield from refused(LayoutError, "exp_avg", ucp_dcp.save, state, url, roots=roots)
    yield from refused(ReplicaMismatchError, "exp_avg", ucp_dcp.save, state, url)  # without roots the replicas disagree


@case
def a44(groups: Groups, url: str) -> Iterator[str]:
    """A sum that is not reduced yet is refused before anything is written, and as a destination."""
    mesh = groups.mesh(2, 2)
    for placements in ([Partial(), R], [S0, Partial()]):
        value = DTensor.from_local(torch.ones(3) * (groups.rank + 1), mesh, placements, run_check=False)
        yield from refused(LayoutError, "redistribute", ucp_dcp.save, {"w": value}, url)
        save(groups, 4, lambda: {"w": numbered(3)}, url + "d")
        yield from refused(LayoutError, "redistribute", ucp_dcp.load, {"w": value}, url + "d")
    if Path(url).exists() and any(p.is_file() for p in Path(url).rglob("*")):
        yield "something was written"


@case
def a45(groups: Groups, url: str) -> Iterator[str]:
    """The coordinate counts, not the rank."""
    mesh = DeviceMesh("cpu", [3, 1, 2, 0])
    ucp_dcp.save({"w": dtensor(numbered(7), mesh, [S0]), "v": dtensor(numbered(9, 2), mesh, [S0])}, url)
    yield from loads(groups, url, {"w": numbered(7), "v": numbered(9, 2)}, [((1,), [R]), ((4,), [S0])])
    state = {"w": dtensor(numbered(7), mesh, [S0], fill=-3)}
    ucp_dcp.load(state, url)
    if not torch.equal(state["w"].to_local(), cut(numbered(7), mesh, [S0])):
        yield f"{state}"


@case
def a46(groups: Groups, url: str) -> Iterator[str]:
    """The coordinator, then everybody, has nothing to save."""
    save(groups, 4, lambda: {} if groups.rank == 0 else {f"w{groups.rank}": numbered(groups.rank)}, url)
    yield from loads(groups, url, {f"w{r}": numbered(r) for r in (1, 2, 3)}, [((2,), [S0])])
    save(groups, 4, dict, url + "e")
    if list(ucp_dcp.open_checkpoint(url + "e")) != [] or ucp_dcp.load({}, url + "e").loaded:
        yield "an empty checkpoint holds something"
    dcp.load({}, checkpoint_id=url + "e")


def run_cases(rank: int, world: int, root: str) -> dict[str, list[str]]:
    return case_kit.run(CASES, root)


@pytest.fixture(scope="module")
def results(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return ranks.run(WORLD, run_cases, str(tmp_path_factory.mktemp("cases")), timeout=180)


@pytest.mark.parametrize("name", list(CASES))
def test_case(results: list[dict[str, list[str]]], name: str) -> None:
    for rank, found in enumerate(results):
        assert found[name] == [], f"{name} on rank {rank}: " + "\n".join(found[name])
