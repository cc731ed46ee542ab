"""Train on one mesh, save, go on on another. Under torchrun, or as one process without it:

    torchrun --nproc-per-node 4 train.py --mesh dp=4 --steps 40 --save ckpt
    torchrun --nproc-per-node 4 train.py --mesh dp=2,tp=2 --steps 60 --resume ckpt
    python train.py --steps 60 --resume ckpt

What matters for checkpoints is in ``start`` (a ``TrainState`` over everything that a job consists of), ``resume`` and ``train``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from data import Text
from model import Llama, Shape, parallelize
from recipe import BETAS, CLIP, PEAK, parameter_groups, rate
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import ucp_dcp

# Known and harmless here: nothing is written into the logits; one process is meant; fingerprints gather over both dims of a mesh.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Options:
    """What a run is told. ``mesh`` is like {"dp": 2, "tp": 2}; save_at: steps after which ``save`` is written (default: at the end)."""

    mesh: dict[str, int] = field(default_factory=dict)
    steps: int = 40
    save: str | None = None
    save_at: int | None = None
    resume: str | None = None
    dtype: str = "fp32"
    tied: bool = False
    seed: int = 0
    fingerprint: bool = False


@dataclass
class Step:
    """One line of the log."""

    step: int
    loss: float
    lr: float
    grad_norm: float


@dataclass
class Result:
    """What a run has to tell. saved, resumed: fingerprints of the live state when it was saved, and right after the resume."""

    log: list[Step] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)
    resumed: dict[str, str] = field(default_factory=dict)
    load_seconds: float = 0.0
    bytes_read: int = 0
    """Of this rank."""


@dataclass
class Job:
    """A training job: the live objects, and the state that is saved of them."""

    mesh: DeviceMesh | None
    model: Llama
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    progress: dict[str, int]
    state: ucp_dcp.TrainState


def start(options: Options) -> Job:
    """A job with fresh random weights. Collective; the default process group must be there if the mesh has more than one rank."""
    torch.manual_seed(options.seed)
    model, mesh = Llama(Shape(tied=options.tied)), None
    if math.prod(options.mesh.values()) > 1:
        mesh = init_device_mesh("cpu", tuple(options.mesh.values()), mesh_dim_names=tuple(options.mesh))
        parallelize(model, mesh, DTYPES[options.dtype])
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=PEAK, betas=BETAS)
    scheduler = LambdaLR(optimizer, rate)
    progress = {"step": 0}
    state = ucp_dcp.TrainState(model, optimizer, scheduler=scheduler, extra=progress)
    return Job(mesh, model, optimizer, scheduler, progress, state)


def resume(job: Job, url: str) -> ucp_dcp.LoadReport:
    """Everything from a checkpoint: our own, whatever mesh saved it, or one of DeepSpeed's, where it lies."""
    checkpoint = ucp_dcp.open_checkpoint(url)
    if checkpoint.format != "deepspeed":
        return job.state.load(url)
    # Weights, moments, step counts and hyperparameters (the learning rate, too) come from it. It has neither our random generators nor
    # our scheduler and progress; but it counts steps, and our scheduler is a function of the step.
    report = job.state.load(url, exclude=["rng", "lr_scheduler", "extra.**"])
    job.progress["step"] = job.scheduler.last_epoch = int(checkpoint.objects["global_steps"])
    return report


def clip_gradients(model: torch.nn.Module, limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most ``limit``. Returns the norm before. Collective.

    ``torch.nn.utils.clip_grad_norm_`` refuses parameters on different meshes (norm weights live on dp, matrices on dp x tp). One all-reduce
    gives all ranks the same bits: weights that are replicated over tp must not drift apart.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    world = dist.get_world_size() if dist.is_initialized() else 1
    total = torch.zeros(())
    for g in gradients:
        parts = 1
        if isinstance(g, DTensor):
            parts = math.prod(n for n, p in zip(g.device_mesh.shape, g.placements, strict=True) if not p.is_replicate())
        total += local(g).square().sum() * (parts / world)  # the same piece is on world / parts ranks
    if world > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    for g in gradients:
        local(g).mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The global tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(job: Job, text: Text, dtype: torch.dtype) -> Step:
    """One step; the loss is that of the whole global batch."""
    data = job.mesh["dp"] if job.mesh is not None else None
    part, parts = (data.get_local_rank(), data.size()) if data is not None else (0, 1)
    inputs, targets = text.batch(job.progress["step"], part, parts)
    autocast = torch.autocast("cpu", dtype) if data is None and dtype != torch.float32 else contextlib.nullcontext()  # FSDP2 does its own
    with autocast:
        logits = job.model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    norm = clip_gradients(job.model, CLIP)
    used = job.optimizer.param_groups[0]["lr"]
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    job.progress["step"] += 1
    mean = loss.detach()
    if data is not None:
        dist.all_reduce(mean, group=data.get_group())
        mean /= parts
    return Step(job.progress["step"], mean.item(), used, norm.item())


def fingerprints(job: Job) -> dict[str, str]:
    """SHA-256 of every global weight and optimizer state, gathered from the live objects without this package. Collective."""
    out = {}
    for name, p in job.model.named_parameters():
        for key, value in {"weight": p, **job.optimizer.state[p]}.items():
            whole = full(value.detach()).contiguous().view(-1).view(torch.uint8)
            out[f"{name} {key}"] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return out


def train(options: Options, report: Callable[[Step], None] = lambda step: None) -> Result:
    """A run, on every rank of the mesh."""
    job, text, result = start(options), Text(), Result()
    if options.resume is not None:
        began = time.perf_counter()
        result.bytes_read = resume(job, options.resume).bytes_read
        result.load_seconds = time.perf_counter() - began
        if options.fingerprint:
            result.resumed = fingerprints(job)
    save_at = options.steps if options.save_at is None else options.save_at
    while job.progress["step"] < options.steps:
        result.log.append(train_step(job, text, DTYPES[options.dtype]))
        report(result.log[-1])
        if options.save is not None and job.progress["step"] == save_at:
            job.state.save(options.save)
            if options.fingerprint:
                result.saved = fingerprints(job)
    return result


def parse_mesh(text: str) -> dict[str, int]:
    """``dp=2,tp=2`` -> {"dp": 2, "tp": 2}."""
    try:
        mesh = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write dp=4 or dp=2,tp=2") from None
    if list(mesh) not in (["dp"], ["dp", "tp"]):
        raise argparse.ArgumentTypeError(f"{text!r}: the dimensions are dp, or dp and then tp")
    return mesh


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; rank 0 prints one JSON line for each step."""
    parser = argparse.ArgumentParser(description="Train a small LLaMA-style model; save and resume on any mesh.")
    parser.add_argument("--mesh", type=parse_mesh, help="dp=4 or dp=2,tp=2 (default: dp over all ranks)")
    parser.add_argument("--steps", type=int, default=40, help="the last step, counted from the very beginning (default: %(default)s)")
    parser.add_argument("--save", metavar="URL", help="where to save: a folder or any fsspec URL")
    parser.add_argument("--save-at", type=int, metavar="STEP", help="save after this step (default: the last)")
    parser.add_argument("--resume", metavar="URL", help="a checkpoint of this program, or a DeepSpeed folder")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="what to compute in; weights stay fp32 (default: %(default)s)")
    parser.add_argument("--tied", action="store_true", help="one parameter for embedding and head")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    values = vars(parser.parse_args(arguments))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    values["mesh"] = values["mesh"] or {"dp": world}
    options = Options(**values)
    needed = math.prod(options.mesh.values())
    if needed != world:
        parser.error(f"a mesh of {options.mesh} needs {needed} ranks, and there are {world}: torchrun --nproc-per-node {needed}")
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    if world > 1:
        dist.init_process_group("gloo")
    leader = world == 1 or dist.get_rank() == 0
    train(options, lambda step: print(json.dumps(asdict(step)), flush=True) if leader else None)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
