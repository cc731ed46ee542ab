"""A small LLaMA-style model (RMSNorm, grouped-query attention, SwiGLU), that of the checkpoint in ``data/``, on an FSDP2 x TP mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 503, 64, 4, 2, 176, 2


class RMSNorm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.input_layernorm = RMSNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.post_attention_layernorm = RMSNorm(WIDTH)
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.input_layernorm(x)
        head = WIDTH // HEADS
        q, k, v = (p(y).view(batch, length, -1, head).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(batch, length, -1))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """Decoder with untied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Tensor parallelism over ``mesh["tp"]`` (if it has one), then FSDP2 over ``mesh["dp"]``."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan: dict[str, Any] = {}
        for i in range(LAYERS):
            for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                plan[f"layers.{i}.{name}"] = ColwiseParallel()
            for name in ("o_proj", "down_proj"):
                plan[f"layers.{i}.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model
