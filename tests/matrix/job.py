"""The whole state of a small job under several optimizers, every element of it another number, and how two state dicts are compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

VOCAB, PADDED, HIDDEN, LAYERS = 10, 12, 8, 2
QKV, GATE_UP = (8, 4, 4), (8, 8)  # grouped-query attention: fewer key and value rows; gate and up side by side
STEP = 7.0
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon", "mixed")
"""``mixed``: AdamW of a bf16 model with fp32 masters under the layouts with flat optimizer state; under the others the model is fp32."""


def kind(fqn: str) -> str:
    """The name without its layer number."""
    return fqn.split(".", 2)[2] if fqn.startswith("layers.") else fqn


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Global shapes in parameter order. ``router`` is smaller than most worlds, ``odd`` divides by nothing."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "odd.weight": (7, 5)}
    for i in range(LAYERS):
        out[f"layers.{i}.router.bias"] = (3,)
        out[f"layers.{i}.qkv.weight"] = (sum(QKV), HIDDEN)
        out[f"layers.{i}.gate_up.weight"] = (sum(GATE_UP), HIDDEN)
        out[f"layers.{i}.down.weight"] = (HIDDEN, GATE_UP[0])
    out["head.weight"] = (VOCAB, HIDDEN)
    return out


def states_of(optimizer: str, fqn: str) -> dict[str, tuple[int, ...]]:
    """Tensor states of a parameter but ``step``: name -> shape."""
    shape = shapes()[fqn]
    adam = {"exp_avg": shape, "exp_avg_sq": shape}
    if optimizer == "sgd":
        return {"momentum_buffer": shape}
    if optimizer == "adafactor":  # the shapes of torch.optim.Adafactor
        return {"row_var": (shape[0], 1), "col_var": (1, shape[1])} if len(shape) == 2 else {"variance": shape}
    if optimizer == "muon":  # matrices inside the layers; everything else by AdamW
        return {"momentum_buffer": shape} if len(shape) == 2 and fqn.startswith("layers.") else adam
    return adam


def has_step(optimizer: str, fqn: str) -> bool:
    """Whether the optimizer counts steps for this parameter."""
    return optimizer != "sgd" and "momentum_buffer" not in states_of(optimizer, fqn)


@cache
def truth(optimizer: str) -> dict[str, dict[str, torch.Tensor]]:
    """fqn -> {"": fp32 weight, state: tensor}. No two elements of it are equal, and none is zero. Weights do not fit into bf16."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    base = 1
    for fqn, shape in shapes().items():
        out[fqn] = {}
        for name, extent in {"": shape, **states_of(optimizer, fqn)}.items():
            n = torch.Size(extent).numel()
            numbers = torch.arange(base, base + n, dtype=torch.float32).reshape(extent)
            out[fqn][name] = numbers if name else -(numbers + 1024) / 8
            base += n
    return out


def junk(rank: int) -> float:
    """What lies in padding and in memory that a load has not filled: nothing that the truth has, and not the same on two ranks."""
    return -(2.0 ** (20 + rank))


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The memory of this rank."""
    return value.to_local() if isinstance(value, DTensor) else value


def spoil(state: Any, number: float) -> Any:
    """Fill all memory of a state dict in place; what was there, as plain tensors."""
    if isinstance(state, dict):
        return {k: spoil(v, number) for k, v in state.items()}
    local = local_tensor(state)
    before = local.clone()
    local.fill_(number)
    return before


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    """Where two state dicts are not the same bits; DTensors by their local parts."""
    if isinstance(want, dict):
        if set(got) != set(want):
            return [f"{path}: {set(got) ^ set(want)}"]
        return [d for k in want for d in differences(got[k], want[k], f"{path}.{k}")]
    got, want = local_tensor(got), local_tensor(want)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return [f"{path}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"]
    bits = torch.int16 if want.itemsize == 2 else torch.int32
    wrong = got.reshape(-1).view(bits) != want.reshape(-1).view(bits)
    if not wrong.any():
        return []
    found = [f"{g:g} for {w:g}" for g, w in zip(got.reshape(-1)[wrong][:4].tolist(), want.reshape(-1)[wrong][:4].tolist(), strict=True)]
    return [f"{path}: {int(wrong.sum())} of {wrong.numel()} elements differ: {', '.join(found)}"]
