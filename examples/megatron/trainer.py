"""Train on a grid of tensor, pipeline and data parallelism, save, go on on another one, or under FSDP2.

What matters for checkpoints: ``Megatron.state_dict`` and ``Megatron.layout``, ``Fsdp.state_dict``, and ``save`` and ``resume`` below.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import shared
import torch
import torch.distributed as dist
from gpt import GPT, Shape, initialize
from optimizer import ALIGN, DistributedOptimizer
from parallel import Grid, Groups
from torch import Tensor
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ucp_dcp

recipe, data = shared.module("recipe"), shared.module("data")
MICROBATCHES = 2
ROOTS = {"model": "model", "optimizer": "optimizer"}
STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class Options:
    """What a run is told. save_at: after which step ``save`` is written (default: the last). through_dcp: with ``dcp.save`` itself."""

    grid: Grid
    steps: int
    save: str | None = None
    save_at: int | None = None
    resume: str | None = None
    seed: int = 0
    through_dcp: bool = False
    keep_state: bool = False


@dataclass
class Result:
    """Of one rank. saved, resumed: copies of its own tensors at the save and right after the resume (``Options.keep_state``)."""

    losses: dict[int, float] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    resumed: dict[str, Any] = field(default_factory=dict)
    load_seconds: float = 0.0
    bytes_read: int = 0


class Megatron:
    """A Megatron-style job: plain local tensors, which only a layout makes parts of a global model."""

    def __init__(self, options: Options) -> None:
        self.grid, self.shape = options.grid, Shape()
        self.groups = Groups(self.grid)
        self.model = GPT(self.shape, self.grid, self.groups)
        initialize(self.model, options.seed)
        self.optimizer = DistributedOptimizer(self.model, self.groups, recipe.BETAS, recipe.DECAY)
        self.progress = {"step": 0}

    def state_dict(self) -> dict[str, Any]:
        """What is saved: local weights, one flat buffer of optimizer state, and how far the training is."""
        model = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"model": model, "optimizer": {"state": {"flat_group_0": self.optimizer.state}}, "progress": self.progress}

    def layout(self) -> ucp_dcp.Layout:
        """How this rank's tensors are parts of the global ones."""
        grid, groups = self.grid, self.groups
        return ucp_dcp.Layout(
            "megatron-llama",
            coords={"pp": (groups.pp_rank, grid.pp), "tp": (groups.tp_rank, grid.tp), "dp": (groups.dp_rank, grid.dp)},
            variables={
                "vocab": self.shape.vocab,
                "vocab_multiple": self.shape.vocab_multiple,
                "ffn": self.shape.hidden,
                "layer_offset": self.model.layer_offset,
                "groups": [self.optimizer.names],
                "group_align": ALIGN,
                "group_pad": self.optimizer.multiple // grid.dp,
            },
        )

    def step(self, text: Any) -> float:
        """One step of all microbatches through the pipeline (all forwards, then all backwards). The loss is the whole batch's."""
        step = self.progress["step"]
        inputs, targets = text.batch(step, self.groups.dp_rank, self.grid.dp)
        kept: list[tuple[Tensor | None, Tensor]] = []
        total = torch.zeros(())
        for ids, wanted in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            x = ids
            received = None
            if self.groups.previous is not None:
                received = torch.empty(*ids.shape, self.shape.width)
                dist.recv(received, self.groups.previous)
                x = received.requires_grad_()
            out = self.model(x, wanted)
            if self.groups.next is not None:
                dist.send(out.detach().contiguous(), self.groups.next)
            else:
                out = out / MICROBATCHES
                total += out.detach()
            kept.append((received, out))
        for received, out in reversed(kept):
            if self.groups.next is None:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, self.groups.next)
                out.backward(grad)
            if received is not None and received.grad is not None:
                dist.send(received.grad.contiguous(), self.groups.previous)
        self.optimizer.step(recipe.PEAK * recipe.rate(step), recipe.CLIP)
        self.progress["step"] += 1
        # the last stage knows the loss, and each of its tensor-parallel ranks the same one
        if self.groups.next is not None or self.groups.tp_rank:
            total.zero_()
        if self.grid.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.grid.dp

    def copies(self) -> dict[str, Any]:
        """This rank's own tensors and what says where they belong, for ``whole.py``."""
        place = {"tp": self.groups.tp_rank, "dp": self.groups.dp_rank, "pp": self.groups.pp_rank, "first_layer": self.model.layer_offset}
        model = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        state = {name: value.clone() for name, value in self.optimizer.state.items()}
        return {"place": place, "model": model, "state": state, "starts": self.optimizer.starts}


class Fsdp:
    """The same model as plain modules under FSDP2: DTensors say themselves what they are. Fused weights stay fused."""

    def __init__(self, options: Options) -> None:
        self.grid = options.grid
        one = Grid(fsdp=1)
        self.model = GPT(Shape(), one, _Alone(one))  # type: ignore[arg-type]
        initialize(self.model, options.seed)
        self.mesh = init_device_mesh("cpu", (self.grid.fsdp,), mesh_dim_names=("dp",))
        for layer in self.model.decoder.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(recipe.parameter_groups(self.model), betas=recipe.BETAS)
        self.progress = {"step": 0}
        self.moments = {
            name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": torch.tensor(0.0)}
            for name, p in self.model.named_parameters()
        }
        for name, p in self.model.named_parameters():
            self.optimizer.state[p] = self.moments[name]

    def state_dict(self) -> dict[str, Any]:
        return {"model": dict(self.model.named_parameters()), "optimizer": {"state": self.moments}, "progress": self.progress}

    def layout(self) -> None:
        return None

    def step(self, text: Any) -> float:
        step, rank = self.progress["step"], self.mesh.get_local_rank()
        inputs, targets = text.batch(step, rank, self.grid.fsdp)
        loss = self.model(inputs, targets)
        loss.backward()
        total = torch.zeros(())
        for p in self.model.parameters():
            assert isinstance(p.grad, DTensor)
            total += p.grad.to_local().square().sum()
        dist.all_reduce(total)
        for p in self.model.parameters():
            p.grad.to_local().mul_((recipe.CLIP / (total.sqrt() + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.PEAK * recipe.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.grid.fsdp

    def copies(self) -> dict[str, Any]:
        """Global tensors, gathered by torch."""
        out: dict[str, Any] = {name: p.detach().full_tensor().clone() for name, p in self.model.named_parameters()}
        for name, state in self.moments.items():
            out |= {f"{name} {key}": state[key].full_tensor().clone() for key in STATES}
            out[f"{name} step"] = state["step"].clone()
        return {"global": out}


class _Alone:
    """The groups of a process without tensor and pipeline parallelism."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.tp, self.dp = grid, None, None
        self.tp_rank = self.dp_rank = self.pp_rank = 0
        self.previous = self.next = None


def save(job: Megatron | Fsdp, url: str, through_dcp: bool = False) -> None:
    """A universal checkpoint of the job, by ``ucp_dcp.save`` or by DCP's own ``save`` with our planner and writer."""
    layout = job.layout()
    where = {"layout": layout} if layout is not None else {"roots": ROOTS}
    if through_dcp:
        dcp_save(job.state_dict(), planner=ucp_dcp.UCPSavePlanner(**where), storage_writer=ucp_dcp.UCPStorageWriter(url))
    else:
        ucp_dcp.save(job.state_dict(), url, **where)


def resume(job: Megatron | Fsdp, url: str) -> ucp_dcp.LoadReport:
    """Everything from a checkpoint, whatever grid wrote it. Masters that FSDP2 does not have start from its fp32 weights."""
    layout = job.layout()
    return ucp_dcp.load(job.state_dict(), url, **({"layout": layout} if layout is not None else {"roots": ROOTS}))


def train(options: Options) -> Result:
    """A run, on every rank."""
    job = Fsdp(options) if options.grid.fsdp else Megatron(options)
    text, result = data.Text(), Result()
    if options.resume is not None:
        began = time.perf_counter()
        result.bytes_read = resume(job, options.resume).bytes_read
        result.load_seconds = time.perf_counter() - began
        if options.keep_state:
            result.resumed = job.copies()
    save_at = options.steps if options.save_at is None else options.save_at
    while job.progress["step"] < options.steps:
        loss = job.step(text)
        result.losses[job.progress["step"]] = loss
        if options.save is not None and job.progress["step"] == save_at:
            save(job, options.save, options.through_dcp)
            if options.keep_state:
                result.saved = job.copies()
    return result
