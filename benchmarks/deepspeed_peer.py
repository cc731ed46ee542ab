"""DeepSpeed's side of ``bench_deepspeed.py``; runs in DeepSpeed's own interpreter, one process per rank (RANK, WORLD_SIZE, ... are set).

- ``deepspeed_peer.py make FOLDER STAGE WIDTH LAYERS VOCAB``: train two steps, save; what the engine holds goes into FOLDER/facts.json
- ``deepspeed_peer.py convert FOLDER RESULTS``: DeepSpeed's converter, as its command line runs it
- ``deepspeed_peer.py load FOLDER RESULTS``: load_checkpoint of the universal folder, into a fresh engine
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.comm.torch as ds_torch
import torch
import torch.distributed as dist
from accounting import Meter
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ds_torch.build_shm_op = lambda: None  # an optional op that would be compiled here
TAG = "global_step2"


class Block(torch.nn.Module):
    """LLaMA's: grouped-query attention, SwiGLU."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads, self.ff = d // 64, d * 11 // 4
        self.input_layernorm, self.post_attention_layernorm = torch.nn.RMSNorm(d), torch.nn.RMSNorm(d)
        self.q_proj, self.o_proj = (torch.nn.Linear(d, d, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (torch.nn.Linear(d, d // 2, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (torch.nn.Linear(d, self.ff, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(self.ff, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.input_layernorm(x)
        q, k, v = (p(y).unflatten(-1, (-1, 64)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        x = x + self.o_proj(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(torch.nn.Module):
    """Untied embeddings, no biases; returns its loss."""

    def __init__(self, d: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(vocab, d)
        self.layers = torch.nn.Sequential(*(Block(d) for _ in range(layers)))
        self.norm = torch.nn.RMSNorm(d)
        self.lm_head = torch.nn.Linear(d, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.norm(self.layers(self.embed_tokens(ids[:, :-1])))).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(stage: int, d: int, layers: int, vocab: int, universal: bool):
    torch.manual_seed(1234 + universal)  # a load must not find what it should bring
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000000,
        **({"checkpoint": {"load_universal": True}} if universal else {}),
    }
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = Llama(d, layers, vocab)
    else:
        model = Llama(d, layers, vocab)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def contents(engine) -> dict[str, dict[str, str]]:
    """By parameter: {"shape", and a digest of the master and of each state}, gathered from the live engine."""
    out = {}
    for fqn, p in engine.module.named_parameters():
        shape = list(getattr(p, "ds_shape", p.shape))
        values = {"master": safe_get_full_fp32_param(p)}
        values |= {s: safe_get_full_optimizer_state(p, s) for s in ("exp_avg", "exp_avg_sq")}
        out[fqn] = {"shape": shape} | {k: hashlib.sha256(v.detach().float().numpy().tobytes()).hexdigest() for k, v in values.items()}
    return out


def make(folder: str, *sizes: str) -> None:
    deepspeed.init_distributed("gloo")
    stage, d, layers, vocab = map(int, sizes)
    engine = build(stage, d, layers, vocab, False)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randint(0, vocab, (1, 65), generator=generator)))
        engine.step()
    engine.save_checkpoint(folder, tag=TAG)
    found = contents(engine)
    if dist.get_rank() == 0:
        facts = {"arguments": [stage, d, layers, vocab], "contents": found, "deepspeed": deepspeed.__version__, "torch": torch.__version__}
        Path(folder, "facts.json").write_text(json.dumps(facts))


def convert(folder: str, results: str) -> None:
    sys.argv = ["ds_to_universal", "--input_folder", f"{folder}/{TAG}", "--output_folder", f"{folder}/{TAG}_universal"]
    sys.argv.append("--inject_missing_state")  # without it, it refuses what save_checkpoint wrote for a model that is not Megatron's
    meter = Meter()
    meter.start()
    ds_to_universal.main(ds_to_universal.parse_arguments())
    meter.save(results, 0)


def load(folder: str, results: str) -> None:
    deepspeed.init_distributed("gloo")
    facts = json.loads(Path(folder, "facts.json").read_text())
    engine = build(*facts["arguments"], True)
    dist.barrier()
    meter = Meter()
    meter.start()
    path, _ = engine.load_checkpoint(folder)
    dist.barrier()
    meter.save(results, dist.get_rank())
    assert path is not None and engine.global_steps == 2
    found = contents(engine)
    different = [f"{fqn}.{k}" for fqn, values in facts["contents"].items() for k, v in values.items() if found[fqn][k] != v]
    assert not different, f"DeepSpeed loaded other values than were saved: {different}"


if __name__ == "__main__":
    {"make": make, "convert": convert, "load": load}[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.destroy_process_group()
