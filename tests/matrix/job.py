"""A small job under every layout and optimizer, cut by hand in torch: nothing here uses the package's geometry or its layouts.

``truth(optimizer)`` is the whole state. ``Layout_.build(...)`` is what one rank has of it. Where a layout needs a description, ``spec``
writes it in the UCP language, and the tests compare what that did with what was cut here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ucp_dcp import Layout, LayoutSpec

VOCAB, PADDED, HIDDEN, LAYERS = 10, 12, 8, 2
QKV, GATE_UP = (8, 4, 4), (8, 8)  # grouped-query attention: fewer key and value rows; gate and up side by side
JUNK = -999.0
STEP = 7.0
ROOTS = {"roots": {"model": "model", "optimizer": "optimizer"}}
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon", "mixed")

# (dim that tensor parallelism cuts, parts that are cut one by one) of each kind of parameter
TP: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "embed.weight": (0, ()),
    "qkv.weight": (0, QKV),
    "proj.weight": (1, ()),
    "gate_up.weight": (0, GATE_UP),
    "down.weight": (1, ()),
    "norm.weight": (None, ()),
    "odd.weight": (None, ()),
    "tiny.bias": (None, ()),
    "head.weight": (0, ()),
}


def kind(fqn: str) -> str:
    """The name without its layer number."""
    return fqn.split(".", 2)[2] if fqn.startswith("layers.") else fqn


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Global shapes in parameter order. ``tiny`` is smaller than most worlds, ``odd`` divides by nothing."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "odd.weight": (7, 5), "tiny.bias": (3,)}
    for i in range(LAYERS):
        out[f"layers.{i}.norm.weight"] = (HIDDEN,)
        out[f"layers.{i}.qkv.weight"] = (sum(QKV), HIDDEN)
        out[f"layers.{i}.proj.weight"] = (HIDDEN, 8)
        out[f"layers.{i}.gate_up.weight"] = (sum(GATE_UP), HIDDEN)
        out[f"layers.{i}.down.weight"] = (HIDDEN, 8)
    out["head.weight"] = (VOCAB, HIDDEN)
    return out


def states_of(optimizer: str, fqn: str) -> dict[str, tuple[int, ...]]:
    """Tensor states of a parameter but ``step``: name -> shape."""
    shape = shapes()[fqn]
    adam = {"exp_avg": shape, "exp_avg_sq": shape}
    if optimizer == "sgd":
        return {"momentum_buffer": shape}
    if optimizer == "adafactor":  # torch.optim.Adafactor
        return {"row_var": (shape[0], 1), "col_var": (1, shape[1])} if len(shape) == 2 else {"variance": shape}
    if optimizer == "muon":  # matrices inside the layers; everything else by AdamW
        return {"momentum_buffer": shape} if len(shape) == 2 and fqn.startswith("layers.") else adam
    return adam


def has_step(optimizer: str, fqn: str) -> bool:
    return optimizer != "sgd" and "momentum_buffer" not in states_of(optimizer, fqn)


@cache
def truth(optimizer: str) -> dict[str, dict[str, torch.Tensor]]:
    """fqn -> {"": fp32 weight, state: tensor}: every element of all of it is another number."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    base = 1.0
    for fqn, shape in shapes().items():
        out[fqn] = {}
        for name, extent in {"": shape, **states_of(optimizer, fqn)}.items():
            n = torch.Size(extent).numel()
            out[fqn][name] = (torch.arange(n, dtype=torch.float32) + base).reshape(extent) / (1 if name else 8)
            base += n
    return out


def chunk(full: torch.Tensor, dim: int, k: int, n: int) -> torch.Tensor:
    """The k-th of torch.chunk, empty when there is none."""
    parts = torch.chunk(full, n, dim)
    return parts[k] if k < len(parts) else full.narrow(dim, 0, 0)


@dataclass(frozen=True)
class World:
    """One layout on a number of ranks. ``plain``: it is described by a spec, else by DTensors."""

    name: str
    family: str
    ranks: int
    build: Callable[[int, str, bool, float], dict[str, Any]]
    """(rank, optimizer, filled with the truth or with zeros, what is in the padding)."""
    args: Callable[[int, str], dict[str, Any]]


# -- DTensors ------------------------------------------------------------------------------------------------------------------


def dtensors(name: str, family: str, mesh_shape: tuple[int, ...], placements_of: Callable[[str], list[Any]]) -> World:
    """Every tensor under ``placements_of(fqn)``; states of another shape keep the placements of the dims they share."""
    ranks = torch.Size(mesh_shape).numel()

    def build(rank: int, optimizer: str, fill: bool, junk: float) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", mesh_shape)
        coordinate = [int(c) for c in (torch.arange(ranks).reshape(mesh_shape) == rank).nonzero()[0]]

        def value(fqn: str, state: str) -> torch.Tensor:
            full = truth(optimizer)[fqn][state]
            placements = [
                p if p.is_replicate() or full.shape[p.dim] == shapes()[fqn][p.dim] else Replicate() for p in placements_of(fqn)
            ]
            local = full
            # a strided shard is cut after the other one of its dim: from the last mesh dim to the first where they meet
            for d in reversed(range(len(mesh_shape))) if any(isinstance(p, _StridedShard) for p in placements) else range(len(mesh_shape)):
                if not placements[d].is_replicate():
                    local = chunk(local, placements[d].dim, coordinate[d], mesh_shape[d])
            local = local.clone() if fill else torch.zeros_like(local)
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())

        return nested(optimizer, list(shapes()), value, fill)

    return World(name, family, ranks, build, lambda rank, optimizer: dict(ROOTS))


def nested(optimizer: str, names: list[str], value: Callable[[str, str], Any], fill: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for fqn in names:
        state[fqn] = {s: value(fqn, s) for s in states_of(optimizer, fqn)}
        if has_step(optimizer, fqn):
            state[fqn]["step"] = torch.tensor(STEP if fill else 0.0)
    return {"model": {fqn: value(fqn, "") for fqn in names}, "optimizer": {"state": state}}


def _fsdp_tp(fqn: str) -> list[Any]:
    dim, _ = TP[kind(fqn)]
    if dim is None:
        return [Shard(0), Replicate()]
    return [_StridedShard(0, split_factor=2) if dim == 0 else Shard(0), Shard(dim)]


def ddp(n: int) -> World:
    def build(rank: int, optimizer: str, fill: bool, junk: float) -> dict[str, Any]:
        full = truth(optimizer)
        return nested(optimizer, list(full), lambda f, s: full[f][s].clone() if fill else torch.zeros_like(full[f][s]), fill)

    return World(f"ddp{n}", "ddp", n, build, lambda rank, optimizer: dict(ROOTS))


# -- plain tensors, described in the UCP language --------------------------------------------------------------------------------


def flat_groups(optimizer: str, names: list[str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Parameters whose states have their own shape, grouped by which states those are: each group is one flat buffer."""
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

    pp: int
    tp: int
    dp: int
    padded: bool
    """The vocabulary is padded to PADDED rows before tensor parallelism cuts it."""

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
        if parts:
            return torch.cat([chunk(part, dim, tp, self.tp) for part in torch.split(full, parts, dim)], dim)
        return chunk(full, dim, tp, self.tp)

    def spec(self, optimizer: str, groups: int) -> LayoutSpec:
        vocab: list[Any] = [{"pad": f"Pad(0, to={PADDED}, size={VOCAB})"}] if self.padded else []
        rules: list[dict[str, Any]] = [
            {"match": "embed.weight", "steps": [{"pp": "Unique(0)"}, *vocab, {"tp": "Shard(0)"}]},
            {"match": "head.weight", "steps": [{"pp": f"Unique({self.pp - 1})"}, *vocab, {"tp": "Shard(0)"}]},
            {"match": "odd.weight", "steps": [{"pp": "Unique(0)"}]},
            {"match": "tiny.bias", "steps": [{"pp": "Unique(0)"}]},
        ]
        for name, (dim, parts) in TP.items():
            if name in ("embed.weight", "head.weight", "odd.weight", "tiny.bias"):
                continue
            step = [] if dim is None else [{"tp": f"Shard({dim}, parts={list(parts)})" if parts else f"Shard({dim})"}]
            rules.append({"match": f"layers.{{i}}.{name}", "rename": f"layers.{{i + pp*per}}.{name}", "steps": step})
        rules += [{"match": f"flat{g}", "steps": [{"dp": f"FlatBuffer(params=order{g}, pad_to=2*dp.size)"}]} for g in range(groups)]
        variables = {"per": {"type": "int"}, **{f"order{g}": {"type": "params"} for g in range(groups)}}
        head = {"ucp_spec": 1, "name": "grid", "axes": ["pp", "tp", "dp"], "variables": variables}
        return LayoutSpec.from_dict({**head, "rules": rules, "optimizer": OPTIMIZER_STATES})

    def args(self, rank: int, optimizer: str) -> dict[str, Any]:
        pp, tp, dp = self.coords(rank)
        local = self.local_names(pp)
        groups = flat_groups(optimizer, list(local.values()))
        back = {fqn: name for name, fqn in local.items()}
        variables: dict[str, Any] = {"per": LAYERS // self.pp}
        variables |= {f"order{g}": [back[fqn] for fqn in names] for g, (_, names) in enumerate(groups)}
        coords = {"pp": (pp, self.pp), "tp": (tp, self.tp), "dp": (dp, self.dp)}
        return {"layout": Layout(self.spec(optimizer, len(groups)), coords=coords, variables=variables, shapes=dict(shapes()))}

    def build(self, rank: int, optimizer: str, fill: bool, junk: float) -> dict[str, Any]:
        pp, tp, dp = self.coords(rank)
        local, full = self.local_names(pp), truth(optimizer)
        model = {name: self.tp_cut(fqn, full[fqn][""], tp, junk).clone() for name, fqn in local.items()}
        if optimizer == "mixed":
            model = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
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
            # Factored state is made of norms over whole rows and columns: beside flat parameters a trainer keeps it whole.
            factored = {s: full[fqn][s].clone() for s, shape in states_of(optimizer, fqn).items() if shape != shapes()[fqn]}
            if factored:
                state[name] = {**factored, "step": torch.tensor(STEP)}
        out = {"model": model, "optimizer": {"state": state}}
        return out if fill else zeroed(out)


OPTIMIZER_STATES: dict[str, Any] = {
    "states": {"step": "scalar", "master": "master", "row_var": "replicated", "col_var": "replicated"}
}


def grid(family: str, pp: int, tp: int, dp: int, padded: bool) -> World:
    g = Grid(pp, tp, dp, padded)
    return World(f"{family}_{pp}x{tp}x{dp}", family, pp * tp * dp, g.build, g.args)


def zero3(n: int) -> World:
    """Every parameter, and every state of its shape, flattened by itself and cut into equal parts (the last ones padded)."""
    rules = [{"match": "**", "steps": [{"dp": "Flat()"}]}]
    spec = LayoutSpec.from_dict({"ucp_spec": 1, "name": "zero3", "axes": ["dp"], "rules": rules, "optimizer": OPTIMIZER_STATES})

    def build(rank: int, optimizer: str, fill: bool, junk: float) -> dict[str, Any]:
        full = truth(optimizer)

        def part(fqn: str, s: str) -> torch.Tensor:
            tensor = full[fqn]["" if s == "master" else s]
            if tuple(tensor.shape) != shapes()[fqn]:
                return tensor.clone()
            line = tensor.reshape(-1)
            size = -(-len(line) // n)
            return torch.cat([line, torch.full((size * n - len(line),), junk)])[rank * size : (rank + 1) * size].clone()

        out = nested(optimizer, list(full), part, True)
        if optimizer == "mixed":
            for fqn in full:
                out["optimizer"]["state"][fqn]["master"] = part(fqn, "master")
                out["model"][fqn] = out["model"][fqn].to(torch.bfloat16)
        return out if fill else zeroed(out)

    def args(rank: int, optimizer: str) -> dict[str, Any]:
        return {"layout": Layout(spec, coords={"dp": (rank, n)}, shapes=dict(shapes()))}

    return World(f"zero3_{n}", "zero3", n, build, args)


def zeroed(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else {k: zeroed(v) for k, v in value.items()}


WORLDS: dict[str, World] = {
    w.name: w
    for w in (
        *(ddp(n) for n in (1, 2, 5)),
        *(dtensors(f"fsdp{n}", "fsdp", (n,), lambda fqn: [Shard(0)]) for n in (1, 2, 3, 4)),
        dtensors("hsdp2x2", "hsdp", (2, 2), lambda fqn: [Replicate(), Shard(0)]),
        dtensors("hsdp3x1", "hsdp", (3, 1), lambda fqn: [Replicate(), Shard(0)]),
        *(dtensors(f"tp{n}", "tp", (n,), lambda f: [Replicate() if TP[kind(f)][0] is None else Shard(TP[kind(f)][0])]) for n in (2, 3)),
        dtensors("fsdp_tp2x2", "fsdp_tp", (2, 2), _fsdp_tp),
        dtensors("fsdp_tp3x2", "fsdp_tp", (3, 2), _fsdp_tp),
        *(grid("zero1", 1, 1, n, False) for n in (2, 3, 4, 5)),
        *(zero3(n) for n in (2, 3, 4, 5)),
        grid("tp_zero1", 1, 2, 2, False),
        grid("tp_zero1", 1, 2, 1, False),
        grid("pp_tp_zero1", 2, 2, 1, True),
        grid("pp_tp_zero1", 2, 1, 3, True),
        grid("pp_tp_zero1", 2, 2, 2, True),
    )
}
FAMILIES = sorted({w.family for w in WORLDS.values()})


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    """Where two state dicts are not the same bits; DTensors by their local parts."""
    if isinstance(want, DTensor):
        return differences(got.to_local(), want.to_local(), path)
    if isinstance(want, torch.Tensor):
        same = got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
        return [] if same else [f"{path}: {got} != {want}"]
    if set(got) != set(want):
        return [f"{path}: {set(got) ^ set(want)}"]
    return [d for k in want for d in differences(got[k], want[k], f"{path}.{k}")]
