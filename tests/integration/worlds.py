"""One small job seen by four ranks under several layouts, each cut by hand in torch (nothing here uses the package's geometry or layout).

``truth()`` is the whole state; ``World.build(rank, fill)`` is the state dict of one rank: with ``fill`` cut from the truth, else zeros of
the same form.
``World.planner_args(rank)`` is what a user would give our planners for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ucp_dcp import Layout, LayoutSpec

VOCAB, PADDED, HIDDEN, LAYERS = 10, 12, 8, 4
QKV = (8, 4, 4)
STATES = ("exp_avg", "exp_avg_sq")

# (dim that tensor parallelism cuts, parts) per kind of parameter
TP_DIM = {"embed.weight": 0, "qkv.weight": 0, "qkv.bias": 0, "proj.weight": 1, "norm.weight": None, "head.weight": 0}


def shapes() -> dict[str, tuple[int, ...]]:
    """Global logical shapes in parameter order."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        out[f"layers.{i}.qkv.weight"] = (sum(QKV), HIDDEN)
        out[f"layers.{i}.qkv.bias"] = (sum(QKV),)
        out[f"layers.{i}.proj.weight"] = (HIDDEN, HIDDEN)
        out[f"layers.{i}.norm.weight"] = (HIDDEN,)
    out["head.weight"] = (VOCAB, HIDDEN)
    return out


def kind(fqn: str) -> str:
    """Parameter kind: the name without its layer number."""
    return fqn.split(".", 2)[2] if fqn.startswith("layers.") else fqn


def truth() -> dict[str, dict[str, torch.Tensor]]:
    """fqn -> {"": weight, "exp_avg": ..., "exp_avg_sq": ...}: every element different, none zero."""
    out = {}
    base = 1.0
    for fqn, shape in shapes().items():
        n = int(torch.Size(shape).numel())
        out[fqn] = {
            "": (torch.arange(n, dtype=torch.float32) + base).reshape(shape),
            "exp_avg": -(torch.arange(n, dtype=torch.float32) + base + 0.25).reshape(shape),
            "exp_avg_sq": (torch.arange(n, dtype=torch.float32) * 3 + base + 0.5).reshape(shape),
        }
        base += n
    return out


STEP = 7.0
OBJECTS = {"iteration": 123, "args": {"lr": 1e-3, "betas": (0.9, 0.95), "name": "run"}}


def _nest(values: Callable[[str, str], Any], names: list[str], fill: bool) -> dict[str, Any]:
    model = {fqn: values(fqn, "") for fqn in names}
    state: dict[str, Any] = {}
    for fqn in names:
        state[fqn] = {s: values(fqn, s) for s in STATES}
        state[fqn]["step"] = torch.tensor(STEP if fill else 0.0)
    blank = {"iteration": 0, "args": {"lr": 0.0, "betas": None, "name": ""}}
    extra = {"iteration": OBJECTS["iteration"], "args": dict(OBJECTS["args"])} if fill else blank
    return {"model": model, "optimizer": {"state": state}, **extra}


@dataclass(frozen=True)
class World:
    """A layout of the job over ``ranks`` ranks."""

    name: str
    ranks: int
    build: Callable[[int, bool], dict[str, Any]]
    planner_args: Callable[[int], dict[str, Any]]


ROOTS = {"roots": {"model": "model", "optimizer": "optimizer"}}


def _cut(full: torch.Tensor, dim: int, k: int, n: int) -> torch.Tensor:
    """torch.chunk with empty tails."""
    parts = list(torch.chunk(full, n, dim))
    empty = full.narrow(dim, 0, 0)
    return (parts + [empty] * (n - len(parts)))[k]


def _dtensor(local: torch.Tensor, mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    full = torch.empty(shape, device="meta")
    return DTensor.from_local(local.clone().contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _fsdp(ranks: int) -> World:
    def build(rank: int, fill: bool) -> dict[str, Any]:
        mesh, full = init_device_mesh("cpu", (ranks,)), truth()

        def value(fqn: str, state: str) -> DTensor:
            local = _cut(full[fqn][state], 0, rank, ranks)
            return _dtensor(local if fill else torch.zeros_like(local), mesh, [Shard(0)], shapes()[fqn])

        return _nest(value, list(full), fill)

    return World(f"fsdp{ranks}", ranks, build, lambda rank: dict(ROOTS))


def _hsdp_build(rank: int, fill: bool) -> dict[str, Any]:
    mesh, full = init_device_mesh("cpu", (2, 2)), truth()

    def value(fqn: str, state: str) -> DTensor:
        local = _cut(full[fqn][state], 0, rank % 2, 2)
        return _dtensor(local if fill else torch.zeros_like(local), mesh, [Replicate(), Shard(0)], shapes()[fqn])

    return _nest(value, list(full), fill)


def _fsdp_tp_build(rank: int, fill: bool) -> dict[str, Any]:
    """FSDP2 over TP on mesh (dp 2, tp 2): the TP shard is cut again along dim 0 by FSDP (a strided shard where TP cuts dim 0 too)."""
    mesh, full = init_device_mesh("cpu", (2, 2)), truth()
    dp, tp = divmod(rank, 2)

    def value(fqn: str, state: str) -> DTensor:
        tensor, dim = full[fqn][state], TP_DIM[kind(fqn)]
        if dim is None:
            placements: list[Any] = [Shard(0), Replicate()]
            local = _cut(tensor, 0, dp, 2)
        else:
            placements = [_StridedShard(0, split_factor=2) if dim == 0 else Shard(0), Shard(dim)]
            local = _cut(_cut(tensor, dim, tp, 2), 0, dp, 2)
        return _dtensor(local if fill else torch.zeros_like(local), mesh, placements, shapes()[fqn])

    return _nest(value, list(full), fill)


def _tp_shard(fqn: str, tensor: torch.Tensor, tp: int, n: int) -> torch.Tensor:
    """Plain TP: fused QKV is cut part by part."""
    dim = TP_DIM[kind(fqn)]
    if dim is None:
        return tensor
    if kind(fqn).startswith("qkv"):
        return torch.cat([_cut(part, 0, tp, n) for part in torch.split(tensor, QKV, 0)], 0)
    return _cut(tensor, dim, tp, n)


TP_ZERO1_RULES: dict[str, Any] = {
    "name": "tp-zero1",
    "axes": ["tp", "dp"],
    "variables": {"order": {"type": "params"}},
    "rules": [
        {"match": "embed.weight", "steps": [{"tp": "Shard(0)"}]},
        {"match": "head.weight", "steps": [{"tp": "Shard(0)"}]},
        {"match": "layers.*.qkv.*", "steps": [{"tp": f"Shard(0, parts={list(QKV)})"}]},
        {"match": "layers.*.proj.weight", "steps": [{"tp": "Shard(1)"}]},
        {"match": "layers.*.norm.weight", "steps": [{"tp": "Replicate()"}]},
        {"match": "flat", "steps": [{"dp": "FlatBuffer(params=order, pad_to=2*dp.size)"}]},
    ],
    "optimizer": {"states": {"step": "scalar"}},
}


def _tp_zero1_build(rank: int, fill: bool) -> dict[str, Any]:
    """TP 2 x DP 2: weights are TP shards, optimizer state is one flat buffer over all parameters, padded and cut over dp (ZeRO-1)."""
    tp, dp = rank % 2, rank // 2
    full = truth()
    model = {fqn: _tp_shard(fqn, full[fqn][""], tp, 2).clone() for fqn in full}
    flat: dict[str, torch.Tensor] = {}
    for state in STATES:
        line = torch.cat([_tp_shard(fqn, full[fqn][state], tp, 2).reshape(-1) for fqn in full])
        total = -(-len(line) // 4) * 4
        line = torch.cat([line, torch.zeros(total - len(line))])
        flat[state] = line.chunk(2)[dp].clone()
    flat["step"] = torch.tensor(STEP)
    out = {"model": model, "optimizer": {"state": {"flat": flat}}, "iteration": OBJECTS["iteration"], "args": dict(OBJECTS["args"])}
    return out if fill else _zeroed(out)


def _tp_zero1_args(rank: int) -> dict[str, Any]:
    spec = LayoutSpec.from_dict({"ucp_spec": 1, **TP_ZERO1_RULES})
    return {
        "layout": Layout(spec, coords={"tp": (rank % 2, 2), "dp": (rank // 2, 2)}, variables={"order": list(shapes())}, shapes=shapes())
    }


PP_TP_RULES: dict[str, Any] = {
    "name": "pp-tp",
    "axes": ["pp", "tp"],
    "variables": {"per_stage": {"type": "int"}, "vocab": {"type": "int"}, "padded": {"type": "int"}},
    "rules": [
        {"match": "embed.weight", "steps": [{"pp": "Unique(0)"}, {"pad": "Pad(0, to=padded, size=vocab)"}, {"tp": "Shard(0)"}]},
        {"match": "head.weight", "steps": [{"pp": "Unique(1)"}, {"pad": "Pad(0, to=padded, size=vocab)"}, {"tp": "Shard(0)"}]},
        {"match": "layers.{i}.qkv.*", "rename": "layers.{i + pp*per_stage}.qkv.*", "steps": [{"tp": f"Shard(0, parts={list(QKV)})"}]},
        {"match": "layers.{i}.proj.weight", "rename": "layers.{i + pp*per_stage}.proj.weight", "steps": [{"tp": "Shard(1)"}]},
        {"match": "layers.{i}.norm.weight", "rename": "layers.{i + pp*per_stage}.norm.weight", "steps": [{"tp": "Replicate()"}]},
    ],
    "optimizer": {"states": {"step": "scalar"}},
}


def _pp_tp_build(rank: int, fill: bool) -> dict[str, Any]:
    """PP 2 x TP 2 as Megatron does it: stage-local layer numbers, fused QKV, vocabulary padded to 12 with junk in the padding."""
    pp, tp = divmod(rank, 2)
    full = truth()
    local: dict[str, str] = {}
    for fqn in full:
        if fqn.startswith("layers."):
            layer = int(fqn.split(".")[1])
            if layer // 2 == pp:
                local[f"layers.{layer % 2}.{kind(fqn)}"] = fqn
        elif (fqn == "embed.weight") == (pp == 0):
            local[fqn] = fqn

    def value(name: str, state: str) -> torch.Tensor:
        fqn = local[name]
        tensor = full[fqn][state]
        if fqn in ("embed.weight", "head.weight"):
            tensor = torch.cat([tensor, torch.full((PADDED - VOCAB, HIDDEN), -999.0)])
        return _tp_shard(fqn, tensor, tp, 2).clone()

    out = _nest(value, list(local), True)
    return out if fill else _zeroed(out)


def _pp_tp_args(rank: int) -> dict[str, Any]:
    pp, tp = divmod(rank, 2)
    spec = LayoutSpec.from_dict({"ucp_spec": 1, **PP_TP_RULES})
    variables = {"per_stage": LAYERS // 2, "vocab": VOCAB, "padded": PADDED}
    return {"layout": Layout(spec, coords={"pp": (pp, 2), "tp": (tp, 2)}, variables=variables)}


def _ddp_build(rank: int, fill: bool) -> dict[str, Any]:
    full = truth()
    return _nest(lambda fqn, s: full[fqn][s].clone() if fill else torch.zeros_like(full[fqn][s]), list(full), fill)


def _zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: _zeroed(v) for k, v in value.items()}
    return 0 if isinstance(value, int) else 0.0 if isinstance(value, float) else None


WORLDS: dict[str, World] = {
    w.name: w
    for w in (
        World("fsdp_tp", 4, _fsdp_tp_build, lambda rank: dict(ROOTS)),
        World("hsdp", 4, _hsdp_build, lambda rank: dict(ROOTS)),
        World("tp_zero1", 4, _tp_zero1_build, _tp_zero1_args),
        World("pp_tp", 4, _pp_tp_build, _pp_tp_args),
        World("ddp", 4, _ddp_build, lambda rank: dict(ROOTS)),
        *(_fsdp(n) for n in (1, 2, 3, 4)),
    )
}


def same(got: Any, want: Any, path: str = "") -> list[str]:
    """Differences between two state dicts: bitwise for tensors (local parts of DTensors), by value for the rest."""
    if isinstance(want, DTensor):
        return same(got.to_local(), want.to_local(), path)
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            return [f"{path}: {got} != {want}"]
        return []
    if isinstance(want, dict):
        if set(got) != set(want):
            return [f"{path}: keys {set(got) ^ set(want)}"]
        return [d for k in want for d in same(got[k], want[k], f"{path}.{k}")]
    return [] if got == want else [f"{path}: {got!r} != {want!r}"]


def unpadded(world: str, rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """What a load must give: padding holds zeros, whatever junk the writer had there."""
    if world == "pp_tp":
        for tensors in (state["model"], *(s for s in state["optimizer"]["state"].values())):
            for tensor in tensors.values():
                if isinstance(tensor, torch.Tensor):
                    tensor[tensor == -999.0] = 0.0
    return state
