"""Write the checkpoints of this folder with real DeepSpeed (see README.md). One run makes the configurations of one world size.

    torchrun --nproc_per_node 3 make.py OUT [NAME ...]

Beside each checkpoint lies ``truth.npz``: what the live engine held, gathered with DeepSpeed's own ``safe_get_full_*`` functions, or,
where the optimizer is not partitioned (stage 0), taken from the optimizer's own parameters.
"""

import argparse
import os
import shutil
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.comm.torch as ds_torch
import deepspeed.runtime.engine as ds_engine
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ds_torch.build_shm_op = lambda: None  # an optional op that would be compiled here
get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it works
get_accelerator().supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 14)
        self.down = torch.nn.Linear(14, width, bias=False)
        self.mix = torch.nn.Conv1d(width, width, 3, padding=1)  # a 3-d weight

    def forward(self, x):
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


class Net(torch.nn.Module):
    """Odd sizes, biases, a 3-d weight, a float and an integer buffer, optionally tied embeddings."""

    def __init__(self, vocab, width, tied):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.tensor([1.5, 0.25]))
        self.register_buffer("table", torch.arange(6).reshape(2, 3))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float() / self.temperature[0].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tiny(torch.nn.Module):
    """Parameters of 1, 2, 3 elements, smaller than the world; a buffer that is persistent and one that is not."""

    def __init__(self, vocab, width, tied):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.norm = torch.nn.LayerNorm(width)
        self.gain = torch.nn.Parameter(torch.tensor([1.25]))
        self.low = torch.nn.Linear(width, 2)
        self.head = torch.nn.Linear(2, vocab, bias=False)
        self.register_buffer("temperature", torch.tensor([1.5, 0.25]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids, labels):
        logits = self.head(self.low(self.norm(self.embed(ids)) * self.gain)).float() / self.temperature[0].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Empty(Tiny):
    """And a parameter of no elements. DeepSpeed 0.19.8 cannot run the forward pass of such a module in stage 3."""

    def __init__(self, vocab, width, tied):
        super().__init__(vocab, width, tied)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))


class Pair(Tiny):
    """Its group without weight decay has two elements."""

    def __init__(self, vocab, width, tied):
        super().__init__(vocab, width, tied)
        self.norm = torch.nn.Identity()
        self.gain = torch.nn.Parameter(torch.tensor([1.25, 0.5]))
        self.low = torch.nn.Linear(width, 2, bias=False)

    def forward(self, ids, labels):
        logits = self.head(self.low(self.embed(ids)) * self.gain).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): one state, ``exp_avg``, and no step count."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(torch.lerp(p.grad, average, one).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - two)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def adafactor(params):
    return torch.optim.Adafactor(params, lr=1e-2)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FORCE = {"zero_force_ds_cpu_optimizer": False}  # torch's AdamW may be offloaded, too

CONFIGS = {
    1: {
        "z0_fp32_frozen_tied_w1": dict(stage=0, dtype="fp32", vocab=11, width=5, tied=True, freeze="blocks.0.mix"),
        "z0_fp32_adafactor_w1": dict(stage=0, dtype="fp32", vocab=7, width=3, model=Tiny, client=adafactor),
        "z1_bf16_tiny_w1": dict(stage=1, vocab=7, width=3, model=Empty),
        "z3_fp32_tiny_w1": dict(stage=3, dtype="fp32", vocab=7, width=3, model=Empty),
    },
    2: {
        "z0_bf16_frozen_tied_w2": dict(stage=0, vocab=11, width=5, tied=True, freeze="blocks.0.mix"),
        "z0_bf16_adafactor_w2": dict(stage=0, vocab=7, width=3, model=Empty, client=adafactor),
        "z0_fp16_fused_w2": dict(stage=0, dtype="fp16", vocab=11, width=5, fused=True),
        "z1_fp16_w2": dict(stage=1, dtype="fp16", vocab=11, width=5),
        "z3_fp16_w2": dict(stage=3, dtype="fp16", vocab=11, width=5),
        "z1_bf16_lion_w2": dict(stage=1, vocab=7, width=3, model=Empty, client=Lion),
        "z3_bf16_lion_w2": dict(stage=3, vocab=7, width=3, model=Tiny, client=Lion),
        "z2_bf16_adafactor_w2": dict(stage=2, vocab=7, width=3, model=Tiny, client=adafactor),
        "z3_fp32_adafactor_w2": dict(stage=3, dtype="fp32", vocab=7, width=3, model=Tiny, client=adafactor),
        "z2_bf16_frozen_tied_w2": dict(stage=2, vocab=11, width=5, tied=True, freeze="blocks.0.mix"),
        "z2_bf16_offload_w2": dict(stage=2, vocab=7, width=3, model=Tiny, client=adamw, zero=OFFLOAD, extra=FORCE),
        "z3_bf16_offload_w2": dict(stage=3, vocab=7, width=3, model=Tiny, client=adamw, zero=OFFLOAD, extra=FORCE),
        "z1_bf16_universal_w2": dict(stage=1, vocab=11, width=5, tied=True, freeze="blocks.0.mix", universal=True),
        "z3_bf16_universal_w2": dict(stage=3, vocab=11, width=5, tied=True, freeze="blocks.0.mix", universal=True),
        "z3_bf16_w2": dict(stage=3),
        "z1_bf16_tied_w2": dict(stage=1, tied=True),
        "z1_fp32_sgd_w2": dict(stage=1, dtype="fp32", optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    },
    3: {
        "z1_bf16_w3": dict(stage=1),
        "z2_fp32_odd_w3": dict(stage=2, dtype="fp32", vocab=29, width=7),
        "z3_fp32_subgroups_w3": dict(stage=3, dtype="fp32", zero={"sub_group_size": 150}),
        "z3_bf16_frozen_tied_w3": dict(stage=3, freeze="blocks.0.mix", tied=True),
        "z2_bf16_roundrobin_w3": dict(stage=2, zero={"round_robin_gradients": True}),
        "z1_bf16_frozen_w3": dict(stage=1, vocab=11, width=5, freeze="embed"),
        "z1_bf16_roundrobin_w3": dict(stage=1, vocab=11, width=5, zero={"round_robin_gradients": True}),
        "z3_bf16_universal_w3": dict(stage=3, vocab=7, width=3, model=Tiny, universal=True),
        "z1_bf16_gad32_w3": dict(stage=1, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    },
    4: {
        "z1_bf16_w4": dict(stage=1),
        "z2_fp32_w4": dict(stage=2, dtype="fp32"),
        "z3_bf16_1group_w4": dict(stage=3, groups=1),
        "z1_bf16_aligned_w4": dict(stage=1, zero={"parameter_alignment": True}),
        "z1_bf16_gad32_pair_w4": dict(stage=1, vocab=7, width=3, model=Pair, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        "z2_bf16_universal_w4": dict(stage=2, vocab=7, width=3, model=Empty, universal=True),
    },
    5: {"z2_bf16_tiny_w5": dict(stage=2, vocab=7, width=3, model=Empty)},
    6: {"z3_bf16_tiny_w6": dict(stage=3, vocab=7, width=3, model=Tiny)},
    7: {"z1_fp32_tiny_w7": dict(stage=1, dtype="fp32", vocab=7, width=3, model=Empty)},
    8: {
        "z1_bf16_tiny_w8": dict(stage=1, vocab=7, width=3, model=Empty),
        "z3_bf16_tiny_w8": dict(stage=3, vocab=7, width=3, model=Tiny, zero={"sub_group_size": 4}),
    },
}


def whole_states(engine, opt):
    """Stage 0: (name, master or None, its states) of every parameter, from the optimizer's own memory."""
    names = engine.param_names
    inner = getattr(opt, "optimizer", opt)
    if hasattr(opt, "fp32_groups"):
        for low, full in zip(opt.fp16_groups, opt.fp32_groups, strict=True):
            for p, master in zip(low, full, strict=True):
                yield names[p], master, inner.state[master]
    elif hasattr(opt, "fp32_groups_flat"):
        for low, flat in zip(opt.fp16_groups, opt.fp32_groups_flat, strict=True):
            at = 0
            for p in low:
                own = {k: v[at : at + p.numel()].view_as(p) for k, v in inner.state[flat].items() if v.dim() == 1}
                yield names[p], flat[at : at + p.numel()].view_as(p), own
                at += p.numel()
    else:
        for p in (p for group in inner.param_groups for p in group["params"]):
            yield names[p], None, inner.state[p]


def joined_partitions(engine, opt):
    """Stages 1 and 2: masters and states cut out of the gathered flat buffers, in the order that the optimizer itself keeps."""
    truth = {}
    for order, part, group in zip(
        opt.round_robin_bit16_groups, opt.single_partition_of_fp32_groups, opt.optimizer.param_groups, strict=True
    ):
        state = opt.optimizer.state[group["params"][0]]
        for s, mine in {"master": part, **{k: v for k, v in state.items() if v.dim() == 1}}.items():
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine.detach())
            at = 0
            for p in order:
                truth[f"{s}/{engine.param_names[p]}"] = torch.cat(parts)[at : at + p.numel()].view(p.shape).numpy().copy()
                at += p.numel()
    return truth


def make(
    out, name, *, stage, dtype="bf16", vocab=23, width=9, tied=False, groups=2, freeze=None, zero=None, optimizer=None, extra=None,
    model=Net, client=None, fused=False, universal=False,
):  # fmt: skip
    torch.manual_seed(1234)
    ds_engine.FusedAdam = torch.optim.AdamW if fused else ()  # FP16_Optimizer without the compiled kernel: torch's AdamW in its place
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 5e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 6}} if dtype == "fp16" else {}),
        **(extra or {}),
    }
    if client:
        del config["optimizer"]
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=DTYPES[dtype]):
            net = model(vocab, width, tied)
    else:
        net = model(vocab, width, tied)
    for n, p in net.named_parameters():
        p.requires_grad_(not (freeze and freeze in n))
    trained = [p for p in net.parameters() if p.requires_grad]

    def decays(p):
        return len(getattr(p, "ds_shape", p.shape)) > 1

    parts = [
        {"params": [p for p in trained if decays(p)], "weight_decay": 0.1},
        {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
    ]
    engine, opt, _, _ = deepspeed.initialize(
        model=net, optimizer=client, model_parameters=parts if groups == 2 else [{"params": trained}], config=config
    )
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(2):
        ids = torch.randint(0, vocab, (2, 9), generator=generator)
        engine.backward(engine(ids[:, :-1], ids[:, 1:].contiguous()))
        engine.step()
    state = {"note": {"tokens": 12345, "names": ["a", "b"]}, "rng": torch.get_rng_state()}
    engine.save_checkpoint(f"{out}/{name}", tag="global_step2", client_state=state)
    if hasattr(opt, "_hp_optimizer_states_linked"):  # DeepSpeed links states after the first group's first step only: link again
        opt._hp_optimizer_states_linked = False
        opt._lazy_init_hp_params_optimizer_state()
    states = {Lion: ["exp_avg"], adafactor: ["variance"]}.get(client, ["momentum_buffer"] if optimizer else ["exp_avg", "exp_avg_sq"])
    truth = {}
    for n, p in engine.module.named_parameters():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        with deepspeed.zero.GatheredParameters([p]):
            truth[f"weight/{n}"] = p.detach().float().numpy().copy().reshape(shape)
        if stage and p.requires_grad and 0 not in shape and not (zero or {}).get("round_robin_gradients"):
            # with round_robin_gradients, safe_get_full_* return the wrong bytes
            values = {"master": safe_get_full_fp32_param(p), **{s: safe_get_full_optimizer_state(p, s) for s in states}}
            for s, value in values.items():
                truth[f"{s}/{n}"] = value.detach().float().numpy().copy().reshape(shape)
    if name == "z1_bf16_roundrobin_w3":
        truth.update(joined_partitions(engine, opt))
    if stage == 0:
        for n, master, own in whole_states(engine, opt):
            if master is not None:
                truth[f"master/{n}"] = master.detach().float().numpy().copy()
            for s, value in own.items():
                truth[f"{s}/{n}"] = torch.as_tensor(value).detach().float().numpy().copy()
    kept = engine.module.state_dict()
    for n, b in engine.module.named_buffers():
        if n in kept:
            truth[f"buffer/{n}"] = b.detach().float().numpy()
    if dist.get_rank() == 0:
        np.savez_compressed(f"{out}/{name}/truth.npz", **truth)
        if universal:
            convert(f"{out}/{name}")
        for extra_file in ("zero_to_fp32.py", "zero_to_torch.py"):
            if os.path.exists(f"{out}/{name}/{extra_file}"):
                os.remove(f"{out}/{name}/{extra_file}")
        print("made", name, type(opt).__name__, flush=True)
    dist.barrier()


def convert(folder):
    """DeepSpeed's own converter; the folder of the rank files is deleted, so that only the universal folder can answer."""
    arguments = argparse.Namespace(
        input_folder=f"{folder}/global_step2", output_folder=f"{folder}/global_step2_universal", num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(arguments)
    shutil.rmtree(f"{folder}/global_step2")
    os.remove(f"{folder}/latest")


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for key, arguments in CONFIGS[dist.get_world_size()].items():
        if len(sys.argv) < 3 or key in sys.argv[2:]:
            make(sys.argv[1], key, **arguments)
    dist.destroy_process_group()
