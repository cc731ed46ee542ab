"""A small LLaMA-style model (RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or untied head), and how it is put on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. 116,544 parameters as it stands, 16,384 fewer when tied."""

    vocab: int = 256
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 152
    layers: int = 2
    tied: bool = False


class RMSNorm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(length, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention. The number of heads is read off the projections: a tensor-parallel rank has its share of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.head).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The decoder: token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.tie()

    def tie(self) -> None:
        """One parameter for embedding and head, if the shape says so."""
        if self.shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def parallelize(model: Llama, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Llama:
    """Tensor parallelism over ``mesh["tp"]`` (if it has one), then FSDP2 over ``mesh["dp"]``, computing in ``dtype``."""
    if "tp" in (mesh.mesh_dim_names or ()):
        size = mesh["tp"].size()
        if model.shape.kv_heads % size:
            raise ValueError(f"{model.shape.kv_heads} key/value heads cannot be divided over {size} tensor-parallel ranks")
        plan: dict[str, Any] = {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate()),  # both by rows of the vocabulary, so that they can be tied
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
            "layers.*.self_attn.o_proj": RowwiseParallel(),
            "layers.*.mlp.down_proj": RowwiseParallel(),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
        model.tie()  # parallelize_module made two parameters of it
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model
