"""Write the checkpoints of this folder with real DeepSpeed (see README.md). One run makes the configurations of one world size.

    torchrun --nproc_per_node 3 make.py OUT

Beside each checkpoint lies ``truth.npz``: what the live engine held, gathered with DeepSpeed's own ``safe_get_full_*`` functions.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.comm.torch as ds_torch
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ds_torch.build_shm_op = lambda: None  # an optional op that would be compiled here


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


CONFIGS = {
    2: {
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
        "z1_bf16_gad32_w3": dict(stage=1, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    },
    4: {
        "z1_bf16_w4": dict(stage=1),
        "z2_fp32_w4": dict(stage=2, dtype="fp32"),
        "z3_bf16_1group_w4": dict(stage=3, groups=1),
        "z1_bf16_aligned_w4": dict(stage=1, zero={"parameter_alignment": True}),
    },
}


def make(out, name, *, stage, dtype="bf16", vocab=23, width=9, tied=False, groups=2, freeze=None, zero=None, optimizer=None, extra=None):
    torch.manual_seed(1234)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **(extra or {}),
    }
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]):
            model = Net(vocab, width, tied)
    else:
        model = Net(vocab, width, tied)
    for n, p in model.named_parameters():
        p.requires_grad_(not (freeze and freeze in n))
    trained = [p for p in model.parameters() if p.requires_grad]

    def decays(p):
        return len(getattr(p, "ds_shape", p.shape)) > 1

    parts = [
        {"params": [p for p in trained if decays(p)], "weight_decay": 0.1},
        {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
    ]
    engine, opt, _, _ = deepspeed.initialize(model=model, model_parameters=parts if groups == 2 else [{"params": trained}], config=config)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(2):
        ids = torch.randint(0, vocab, (2, 9), generator=generator)
        engine.backward(engine(ids[:, :-1], ids[:, 1:].contiguous()))
        engine.step()
    client = {"note": {"tokens": 12345, "names": ["a", "b"]}, "rng": torch.get_rng_state()}
    engine.save_checkpoint(f"{out}/{name}", tag="global_step2", client_state=client)
    if hasattr(opt, "_hp_optimizer_states_linked"):  # DeepSpeed links states after the first group's first step only: link again
        opt._hp_optimizer_states_linked = False
        opt._lazy_init_hp_params_optimizer_state()
    states = ["momentum_buffer"] if optimizer else ["exp_avg", "exp_avg_sq"]
    truth = {}
    for n, p in engine.module.named_parameters():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        with deepspeed.zero.GatheredParameters([p]):
            truth[f"weight/{n}"] = p.detach().float().numpy().copy().reshape(shape)
        if p.requires_grad and not (zero or {}).get("round_robin_gradients"):  # with it, safe_get_full_* return the wrong bytes
            values = {"master": safe_get_full_fp32_param(p), **{s: safe_get_full_optimizer_state(p, s) for s in states}}
            for s, value in values.items():
                truth[f"{s}/{n}"] = value.detach().float().numpy().copy().reshape(shape)
    for n, b in engine.module.named_buffers():
        truth[f"buffer/{n}"] = b.detach().float().numpy()
    if dist.get_rank() == 0:
        np.savez_compressed(f"{out}/{name}/truth.npz", **truth)
        print("made", name, type(opt).__name__, flush=True)
    dist.barrier()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for key, arguments in CONFIGS[dist.get_world_size()].items():
        if len(sys.argv) < 3 or key in sys.argv[2:]:
            make(sys.argv[1], key, **arguments)
    dist.destroy_process_group()
