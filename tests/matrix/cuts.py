"""The job of ``job.py`` under every layout, cut by hand in torch: nothing here uses the package's geometry or its layouts.

``World.build`` is what one rank has. Where a layout needs a description, ``World.args`` gives it in the UCP language, and the tests
compare what that did with what was cut here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from job import GATE_UP, LAYERS, PADDED, QKV, STEP, VOCAB, has_step, kind, shapes, states_of, truth
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ucp_dcp import Layout, LayoutSpec

ROOTS = {"roots": {"model": "model", "optimizer": "optimizer"}}

# (dim that tensor parallelism cuts, parts that are cut one by one) of each kind of parameter
TP: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "embed.weight": (0, ()),
    "odd.weight": (None, ()),
    "router.bias": (None, ()),
    "qkv.weight": (0, QKV),
    "gate_up.weight": (0, GATE_UP),
    "down.weight": (1, ()),
    "head.weight": (0, ()),
}


def chunk(full: torch.Tensor, dim: int, k: int, n: int) -> torch.Tensor:
    """The k-th of torch.chunk, empty when there is none."""
    parts = torch.chunk(full, n, dim)
    return parts[k] if k < len(parts) else full.narrow(dim, 0, 0)


@dataclass(frozen=True)
class World:
    """One layout on a number of ranks. ``plain``: of plain tensors with a layout in the UCP language; else of DTensors or replicas."""

    name: str
    family: str
    ranks: int
    plain: bool
    build: Callable[[int, str, float], dict[str, Any]]
    """(rank, optimizer, what is in the padding)."""
    args: Callable[[int, str], dict[str, Any]]


def nested(optimizer: str, names: Sequence[str], value: Callable[[str, str], Any]) -> dict[str, Any]:
    """The state dict of a trainer that keeps state by parameter."""
    state: dict[str, Any] = {}
    for fqn in names:
        state[fqn] = {s: value(fqn, s) for s in states_of(optimizer, fqn)}
        if has_step(optimizer, fqn):
            state[fqn]["step"] = torch.tensor(STEP)
    return {"model": {fqn: value(fqn, "") for fqn in names}, "optimizer": {"state": state}}


# -- DTensors and replicas -----------------------------------------------------------------------------------------------------


def ddp(n: int) -> World:
    def build(rank: int, optimizer: str, junk: float) -> dict[str, Any]:
        full = truth(optimizer)
        return nested(optimizer, list(full), lambda fqn, state: full[fqn][state].clone())

    return World(f"ddp_{n}", "ddp", n, False, build, lambda rank, optimizer: dict(ROOTS))


def dtensors(family: str, mesh_shape: tuple[int, ...], placements_of: Callable[[str], list[Any]], factored_whole: bool) -> World:
    """Every tensor under ``placements_of(fqn)``.

    factored_whole: a factored state is whole on every rank, as ``DTensor.new_zeros`` of another shape makes it (torch's Adafactor under
    FSDP2); else it is cut like its parameter in the dims that both have (an Adafactor that knows about tensor parallelism).
    """
    ranks = torch.Size(mesh_shape).numel()

    def build(rank: int, optimizer: str, junk: float) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", mesh_shape)
        coordinate = [int(c) for c in (torch.arange(ranks).reshape(mesh_shape) == rank).nonzero()[0]]

        def value(fqn: str, state: str) -> torch.Tensor:
            full, shape = truth(optimizer)[fqn][state], shapes()[fqn]
            whole = factored_whole and tuple(full.shape) != shape
            placements = [
                p if p.is_replicate() or (not whole and full.shape[p.dim] == shape[p.dim]) else Replicate() for p in placements_of(fqn)
            ]
            local, strided = full, any(isinstance(p, _StridedShard) for p in placements)
            # FSDP cuts what TP left, so where both cut one dim (the strided shard) the last mesh dim comes first
            for d in reversed(range(len(mesh_shape))) if strided else range(len(mesh_shape)):
                if not placements[d].is_replicate():
                    local = chunk(local, placements[d].dim, coordinate[d], mesh_shape[d])
            return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())

        return nested(optimizer, list(shapes()), value)

    name = "x".join(map(str, mesh_shape))
    return World(f"{family}_{name}", family, ranks, False, build, lambda rank, optimizer: dict(ROOTS))


def fsdp(n: int) -> World:
    return dtensors("fsdp", (n,), lambda fqn: [Shard(0)], True)


def hsdp(replicas: int, shards: int) -> World:
    return dtensors("hsdp", (replicas, shards), lambda fqn: [Replicate(), Shard(0)], True)


def tp(n: int) -> World:
    return dtensors("tp", (n,), lambda fqn: [Replicate() if (dim := TP[kind(fqn)][0]) is None else Shard(dim)], False)


def fsdp_tp(dp: int, tp: int) -> World:
    def placements(fqn: str) -> list[Any]:
        dim, _ = TP[kind(fqn)]
        if dim is None:
            return [Shard(0), Replicate()]
        return [_StridedShard(0, split_factor=tp) if dim == 0 else Shard(0), Shard(dim)]

    return dtensors("fsdp_tp", (dp, tp), placements, False)


# -- plain tensors, described in the UCP language --------------------------------------------------------------------------------

OPTIMIZER_STATES: dict[str, Any] = {"states": {"step": "scalar", "master": "master", "row_var": "replicated", "col_var": "replicated"}}


def flat_groups(optimizer: str, names: Sequence[str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Parameters whose states have their own shape, grouped by which states those are: each group is one flat buffer.

    Factored state is made of means over whole rows and columns, so no trainer has it in flat buffers of pieces: beside them it stays by
    parameter, whole on every rank. Adafactor's vectors are not factored, and lie in a buffer.
    """
    out: dict[tuple[str, ...], list[str]] = {}
    for fqn in names:
        own = tuple(s for s, shape in states_of(optimizer, fqn).items() if shape == shapes()[fqn])
        own = (*own, "master") if optimizer == "mixed" else own
        if own:
            out.setdefault(own, []).append(fqn)
    return list(out.items())


@dataclass(frozen=True)
class Grid:
    """Pipeline, tensor and data parallel sizes of a Megatron-like job with flat optimizer buffers (ZeRO-1)."""

    family: str
    pp: int
    tp: int
    dp: int
    padded: bool = False
    """The vocabulary is padded to PADDED rows before tensor parallelism cuts it."""
    copies: int = 1
    """So many neighbours in tensor parallelism hold the same key and value rows."""

    def world(self) -> World:
        name = f"{self.family}_{self.pp}x{self.tp}x{self.dp}" + (f"_kv{self.copies}" if self.copies > 1 else "")
        return World(name, self.family, self.pp * self.tp * self.dp, True, self.build, self.args)

    def coords(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.tp * self.dp), rank // self.dp % self.tp, rank % self.dp

    def local_names(self, pp: int) -> dict[str, str]:
        """Local name -> fqn on a stage: layers count from 0; what is in no layer is on the first stage, the head on the last."""
        per = LAYERS // self.pp
        out = {}
        for fqn in shapes():
            if fqn.startswith("layers."):
                layer = int(fqn.split(".")[1])
                if layer // per == pp:
                    out[f"layers.{layer % per}.{kind(fqn)}"] = fqn
            elif (self.pp - 1 if fqn == "head.weight" else 0) == pp:
                out[fqn] = fqn
        return out

    def tp_cut(self, fqn: str, full: torch.Tensor, tp: int, junk: float) -> torch.Tensor:
        """What tensor parallelism leaves of a tensor of the parameter's shape."""
        dim, parts = TP[kind(fqn)]
        if self.padded and fqn in ("embed.weight", "head.weight"):
            full = torch.cat([full, torch.full((PADDED - VOCAB, *full.shape[1:]), junk)])
        if dim is None:
            return full
        if not parts:
            return chunk(full, dim, tp, self.tp)
        copies = (1, self.copies, self.copies) if parts == QKV else (1,) * len(parts)
        pieces = zip(torch.split(full, parts, dim), copies, strict=True)
        return torch.cat([chunk(part, dim, tp // c, self.tp // c) for part, c in pieces], dim)

    def spec(self, groups: int) -> dict[str, Any]:
        vocab: list[Any] = [{"pad": f"Pad(0, to={PADDED}, size={VOCAB})"}] if self.padded else []
        rules: list[dict[str, Any]] = [
            {"match": "embed.weight", "steps": [{"pp": "Unique(0)"}, *vocab, {"tp": "Shard(0)"}]},
            {"match": "head.weight", "steps": [{"pp": f"Unique({self.pp - 1})"}, *vocab, {"tp": "Shard(0)"}]},
            {"match": "odd.weight", "steps": [{"pp": "Unique(0)"}]},
        ]
        steps = {
            "router.bias": [],
            "qkv.weight": [{"tp": f"Shard(0, parts={list(QKV)}, copies=[1, {self.copies}, {self.copies}])"}],
            "gate_up.weight": [{"tp": f"Shard(0, parts={list(GATE_UP)})"}],
            "down.weight": [{"tp": "Shard(1)"}],
        }
        rules += [{"match": f"layers.{{i}}.{name}", "rename": f"layers.{{i + pp*per}}.{name}", "steps": s} for name, s in steps.items()]
        rules += [{"match": f"flat{g}", "steps": [{"dp": f"FlatBuffer(params=order{g}, pad_to=2*dp.size)"}]} for g in range(groups)]
        variables = {"per": {"type": "int"}, **{f"order{g}": {"type": "params"} for g in range(groups)}}
        head = {"ucp_spec": 1, "name": "grid", "axes": ["pp", "tp", "dp"], "variables": variables}
        return {**head, "rules": rules, "optimizer": OPTIMIZER_STATES}

    def args(self, rank: int, optimizer: str, change: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Planner arguments; ``change`` spoils the spec or the layout's arguments, to see that a wrong one is noticed."""
        pp, tp, dp = self.coords(rank)
        local = self.local_names(pp)
        groups = flat_groups(optimizer, list(local.values()))
        back = {fqn: name for name, fqn in local.items()}
        variables: dict[str, Any] = {"per": LAYERS // self.pp}
        variables |= {f"order{g}": [back[fqn] for fqn in names] for g, (_, names) in enumerate(groups)}
        coords = {"pp": (pp, self.pp), "tp": (tp, self.tp), "dp": (dp, self.dp)}
        given = {"spec": self.spec(len(groups)), "coords": coords, "variables": variables}
        if change is not None:
            change(given)
        return {"layout": Layout(LayoutSpec.from_dict(given["spec"]), given["coords"], variables=given["variables"], shapes=dict(shapes()))}

    def build(self, rank: int, optimizer: str, junk: float) -> dict[str, Any]:
        pp, tp, dp = self.coords(rank)
        local, full = self.local_names(pp), truth(optimizer)
        kept = torch.bfloat16 if optimizer == "mixed" else torch.float32
        model = {name: self.tp_cut(fqn, full[fqn][""], tp, junk).to(kept, copy=True) for name, fqn in local.items()}
        state: dict[str, Any] = {}
        for g, (states, names) in enumerate(flat_groups(optimizer, list(local.values()))):
            state[f"flat{g}"] = {}
            for s in states:
                # padding inside a tensor belongs to the buffer as much as its rows do
                line = torch.cat([self.tp_cut(f, full[f]["" if s == "master" else s], tp, junk).reshape(-1) for f in names])
                total = -(-len(line) // (2 * self.dp)) * 2 * self.dp
                line = torch.cat([line, torch.full((total - len(line),), junk)])
                state[f"flat{g}"][s] = line.chunk(self.dp)[dp].clone()
            if has_step(optimizer, names[0]):
                state[f"flat{g}"]["step"] = torch.tensor(STEP)
        for name, fqn in local.items():
            factored = {s: full[fqn][s].clone() for s, shape in states_of(optimizer, fqn).items() if shape != shapes()[fqn]}
            if factored:  # see flat_groups
                state[name] = {**factored, "step": torch.tensor(STEP)}
        return {"model": model, "optimizer": {"state": state}}


def zero3(n: int) -> World:
    """Every parameter, and every state of its shape, flattened by itself and cut into equal parts (the last ones padded)."""
    rules = [{"match": "**", "steps": [{"dp": "Flat()"}]}]
    spec = LayoutSpec.from_dict({"ucp_spec": 1, "name": "zero3", "axes": ["dp"], "rules": rules, "optimizer": OPTIMIZER_STATES})

    def build(rank: int, optimizer: str, junk: float) -> dict[str, Any]:
        full = truth(optimizer)

        def part(fqn: str, s: str) -> torch.Tensor:
            tensor = full[fqn]["" if s == "master" else s]
            if tuple(tensor.shape) != shapes()[fqn]:
                return tensor.clone()  # factored: see flat_groups
            line = tensor.reshape(-1)
            size = -(-len(line) // n)
            return torch.cat([line, torch.full((size * n - len(line),), junk)])[rank * size : (rank + 1) * size].clone()

        out = nested(optimizer, list(full), part)
        if optimizer == "mixed":
            for fqn in full:
                out["optimizer"]["state"][fqn]["master"] = part(fqn, "master")
                out["model"][fqn] = out["model"][fqn].to(torch.bfloat16)
        return out

    def args(rank: int, optimizer: str) -> dict[str, Any]:
        return {"layout": Layout(spec, coords={"dp": (rank, n)}, shapes=dict(shapes()))}

    return World(f"zero3_{n}", "zero3", n, True, build, args)


GRIDS = (
    *(Grid("zero1", 1, 1, n) for n in (2, 3, 4)),
    *(Grid("tp_zero1", 1, t, d) for t, d in ((2, 2), (2, 3), (3, 1))),
    Grid("tp_zero1", 1, 4, 1, copies=2),
    *(Grid("pp_tp_zero1", 2, t, d, padded=True) for t, d in ((2, 1), (1, 3), (2, 2))),
)
WORLDS: dict[str, World] = {
    w.name: w
    for w in (
        *(ddp(n) for n in (1, 2)),
        *(fsdp(n) for n in (1, 2, 3, 4)),
        *(hsdp(r, s) for r, s in ((2, 2), (2, 3))),
        *(tp(n) for n in (2, 3)),
        *(fsdp_tp(d, t) for d, t in ((2, 2), (3, 2))),
        *(zero3(n) for n in (2, 3, 5)),
        *(g.world() for g in GRIDS),
    )
}
FAMILIES = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "zero1", "zero3", "tp_zero1", "pp_tp_zero1")
