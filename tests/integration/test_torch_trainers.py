"""Real torch trainers on gloo ranks: FSDP2 on one and two mesh dims, FSDP2 over TP with uneven sizes, AdamW and SGD, tied and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import fresh_meshes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ucp_dcp

ROOTS = {"model": "model", "optimizer": "optimizer"}
VOCAB, DIM, FFN = 17, 6, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, FFN)
        self.down = nn.Linear(FFN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()


def build(kind: str, seed: int, variant: Variant) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny(variant.tied)
    world = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "fsdp_tp":
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, Any] = {f"layers.{i}.up": ColwiseParallel() for i in range(2)}
        plan |= {f"layers.{i}.down": RowwiseParallel() for i in range(2)}
        if not variant.tied:
            plan |= {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, grid["tp"], plan)
        mesh = grid["dp"]
    if variant.frozen:  # after parallelize_module: torch 2.10's makes everything trainable
        model.layers[0].up.weight.requires_grad_(False)
    if kind != "ddp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    if variant.sgd:
        return model, torch.optim.SGD(params, lr=0.1, momentum=0.9)
    decay = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() < 2]
    return model, torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    tokens = (torch.arange(24).reshape(4, 6) * (n + 3)) % VOCAB  # every rank sees the same data, so all layouts train alike
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens + 1) % VOCAB).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list):
        return [whole(v) for v in value]
    return value


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    if isinstance(want, torch.Tensor):
        ok = isinstance(got, torch.Tensor) and got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
        return [] if ok else [f"{path}: {got} != {want}"]
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return [f"{path}: keys {set(got) ^ set(want)}"]
        return [d for k in want for d in differences(got[k], want[k], f"{path}.{k}")]
    return [] if got == want else [f"{path}: {got!r} != {want!r}"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    m, o = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": m, "optimizer": o}


def blank(value: Any) -> None:
    """Overwrite everything that a load must bring back."""
    if isinstance(value, DTensor):
        value.to_local().fill_(-3)
    elif isinstance(value, torch.Tensor):
        value.detach().fill_(-3)
    elif isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, int | float) and not isinstance(child, bool):
                value[key] = -3
            else:
                blank(child)
    elif isinstance(value, list):
        for child in value:
            blank(child)


@dataclass(frozen=True)
class Variant:
    """What is trained, and which form the optimizer's state dict has."""

    flat: bool = False
    frozen: bool = False
    tied: bool = False
    sgd: bool = False

    @property
    def roots(self) -> dict[str, str] | None:
        # The flattened form has no nesting to tell parameter and state apart: no roots, it is saved and loaded by key.
        return None if self.flat else ROOTS


def save_all(state: dict[str, Any], url: str, roots: dict[str, str] | None) -> None:
    ucp_dcp.save(state, f"{url}/ours", roots=roots)
    dcp.save(state, checkpoint_id=f"{url}/planner", planner=ucp_dcp.UCPSavePlanner(roots=roots))
    dcp.save(state, checkpoint_id=f"{url}/stock")


LOADS = [
    ("ours", "ours"),
    ("ours", "stock"),
    ("ours", "planner"),
    ("planner", "stock"),
    ("planner", "ours"),
    ("stock", "ours"),
    ("stock", "planner"),
]


def load_all(kind: str, url: str, variant: Variant, want: Any) -> list[str]:
    """Load each checkpoint in each way into a fresh trainer: differences from what was saved."""
    model, optimizer = build(kind, 99, variant)
    state = state_of(model, optimizer, variant.flat)
    found: list[str] = []
    for saved, how in LOADS:
        blank(state)
        path = f"{url}/{saved}"
        if how == "stock":
            dcp.load(state, checkpoint_id=path)
        elif how == "planner":
            dcp.load(state, checkpoint_id=path, planner=ucp_dcp.UCPLoadPlanner(roots=variant.roots))
        else:
            report = ucp_dcp.load(state, path, roots=variant.roots, strict="exact")
            assert not (report.cast or report.missing or report.unexpected or report.skipped), report
        found += differences(whole(state), want, f"{kind} {saved} {how}")
    options = StateDictOptions(flatten_optimizer_state_dict=variant.flat)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    return found + differences(whole(state_of(model, optimizer, variant.flat)), want, f"{kind} set_state_dict")


def scenario(rank: int, world: int, source: str, targets: list[str], url: str, variant: Variant) -> list[str]:
    with fresh_meshes():
        return train_save_load(source, targets, url, variant)


def train_save_load(source: str, targets: list[str], url: str, variant: Variant) -> list[str]:
    model, optimizer = build(source, 0, variant)
    for n in range(2):
        step(model, optimizer, n)
    state = state_of(model, optimizer, variant.flat)
    want = whole(state)
    save_all(state, url, variant.roots)
    differ = differences(whole(state), want, "the save changed the state")
    return differ + [d for kind in targets for d in load_all(kind, url, variant, want)]


def slow(*values: Any) -> Any:
    """One of several alike: with ``make test-thorough``."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("source", "targets", "variant"),
    [
        slow("fsdp", ["fsdp_tp"], Variant()),
        slow("fsdp_tp", ["fsdp_tp", "hsdp"], Variant()),
        slow("hsdp", ["fsdp", "ddp"], Variant(frozen=True, tied=True)),
        slow("fsdp_tp", ["fsdp"], Variant(sgd=True)),
        ("fsdp_tp", ["hsdp"], Variant(flat=True, frozen=True, tied=True)),
        ("ddp", ["fsdp_tp"], Variant(tied=True)),
    ],
    ids=str,
)
def test_trainers(ranks, tmp_path: Path, source: str, targets: list[str], variant: Variant) -> None:
    assert ranks.run(4, scenario, source, targets, str(tmp_path), variant) == [[]] * 4


def save_truth(rank: int, world: int, url: str, truth: str) -> None:
    variant = Variant()
    with fresh_meshes():
        model, optimizer = build("fsdp", 0, variant)
        step(model, optimizer, 0)
        state = state_of(model, optimizer, False)
        want = whole(state)
        save_all(state, url, ROOTS)
    if rank == 0:
        torch.save(want, truth)


def load_truth(rank: int, world: int, url: str, truth: str) -> list[str]:
    with fresh_meshes():
        return load_all("fsdp", url, Variant(), torch.load(truth))


def test_other_number_of_ranks(ranks, tmp_path: Path) -> None:
    url, truth = str(tmp_path), str(tmp_path / "truth.pt")
    ranks.run(3, save_truth, url, truth)
    for n in (4, 1):
        assert ranks.run(n, load_truth, url, truth) == [[]] * n
