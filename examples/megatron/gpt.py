"""A LLaMA-style model in Megatron's layout: fused grouped QKV, fused gate and up, padded vocabulary, and only the layers of one stage.

Parameters have megatron-core's names. Nothing in here knows about checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from parallel import Grid, Groups, all_reduce, copy_to, gather, reduce_from
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Two query groups: with four tensor-parallel ranks a group's rows are cut in two."""

    vocab: int = 200
    vocab_multiple: int = 24
    width: int = 64
    heads: int = 4
    groups: int = 2
    hidden: int = 152
    layers: int = 4

    @property
    def head(self) -> int:
        return self.width // self.heads

    def padded(self, tp: int) -> int:
        """Rows of the vocabulary so that every rank gets a multiple of ``vocab_multiple``: Megatron's make-vocab-size-divisible-by."""
        each = self.vocab_multiple * tp
        return -(-self.vocab // each) * each


class Linear(nn.Module):
    """A weight of this rank's size; which side is cut is the caller's business."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm with a weight, alike on all tensor-parallel ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class WordEmbeddings(nn.Module):
    """Vocabulary-parallel: each rank looks up the ids that it has, and the sum is the embedding."""

    def __init__(self, shape: Shape, rows: int, groups: Groups) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, shape.width))
        self.first, self.group = rows * groups.tp_rank, groups.tp

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        mine = (local >= 0) & (local < len(self.weight))
        return reduce_from(F.embedding(local.where(mine, 0), self.weight) * mine[..., None], self.group)


class Embedding(nn.Module):
    """Named as in Megatron."""

    def __init__(self, shape: Shape, rows: int, groups: Groups) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings(shape, rows, groups)


class SelfAttention(nn.Module):
    """Rows of linear_qkv lie by query group: its queries, its key, its value."""

    def __init__(self, shape: Shape, groups: Groups) -> None:
        super().__init__()
        tp = groups.grid.tp
        self.shape, self.groups = shape, groups
        self.linear_qkv = Linear((shape.heads + 2 * shape.groups) * shape.head // tp, shape.width)
        self.linear_proj = Linear(shape.width, shape.heads * shape.head // tp)

    def forward(self, x: Tensor) -> Tensor:
        shape, tp = self.shape, self.groups.grid.tp
        qkv = self.linear_qkv(copy_to(x, self.groups.tp))
        per = shape.heads // shape.groups
        share = per
        if shape.groups % tp:
            # More ranks than query groups: the cut goes through a group. All rows come together, and each rank takes its group and, of
            # that, its queries.
            several = tp // shape.groups
            share = per // several
            qkv = gather(qkv, self.groups.tp).unflatten(-1, (shape.groups, -1))[:, :, self.groups.tp_rank // several]
        q, k, v = qkv.unflatten(-1, (-1, per + 2, shape.head)).split([per, 1, 1], dim=-2)
        if share < per:
            q = q.narrow(-2, self.groups.tp_rank % (per // share) * share, share)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return reduce_from(self.linear_proj(y.transpose(1, 2).flatten(2)), self.groups.tp)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class MLP(nn.Module):
    """SwiGLU. Of linear_fc1 a rank has its rows of the gate, and behind them its rows of up."""

    def __init__(self, shape: Shape, groups: Groups) -> None:
        super().__init__()
        self.group = groups.tp
        self.linear_fc1 = Linear(2 * shape.hidden // groups.grid.tp, shape.width)
        self.linear_fc2 = Linear(shape.width, shape.hidden // groups.grid.tp)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(copy_to(x, self.group)).chunk(2, -1)
        return reduce_from(self.linear_fc2(F.silu(gate) * up), self.group)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, groups: Groups) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attention = SelfAttention(shape, groups)
        self.pre_mlp_layernorm = RMSNorm(shape.width)
        self.mlp = MLP(shape, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Decoder(nn.Module):
    """The layers of this stage, counted from 0 as Megatron does."""

    def __init__(self, shape: Shape, groups: Groups, layers: int, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, groups) for _ in range(layers))
        if last:
            self.final_layernorm = RMSNorm(shape.width)


class GPT(nn.Module):
    """One pipeline stage: ids (first stage) or activations in, activations or the mean loss (last stage) out."""

    def __init__(self, shape: Shape, grid: Grid, groups: Groups) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.first, self.last = groups.pp_rank == 0, groups.pp_rank == grid.pp - 1
        stages = grid.stages or (shape.layers // grid.pp,) * grid.pp
        if sum(stages) != shape.layers or len(stages) != grid.pp:
            raise ValueError(f"stages of {stages} layers, expected {grid.pp} that make {shape.layers}")
        self.layer_offset = sum(stages[: groups.pp_rank])
        # Without tensor parallelism by Megatron (FSDP2) nothing has to be padded.
        rows = shape.vocab if grid.fsdp else shape.padded(grid.tp) // grid.tp
        if self.first:
            self.embedding = Embedding(shape, rows, groups)
        self.decoder = Decoder(shape, groups, stages[groups.pp_rank], self.last)
        if self.last:
            self.output_layer = Linear(rows, shape.width)
            self.rows = rows

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.first:
            x = self.embedding.word_embeddings(x)
        for layer in self.decoder.layers:
            x = layer(x)
        if not self.last:
            return x
        assert targets is not None
        logits = self.output_layer(copy_to(self.decoder.final_layernorm(x), self.groups.tp))
        return self.cross_entropy(logits, targets)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over a vocabulary that is divided over ranks. Padding takes no part, so the loss does not depend on it."""
        group, first = self.groups.tp, self.rows * self.groups.tp_rank
        real = torch.arange(first, first + self.rows) < self.shape.vocab
        logits = logits.masked_fill(~real, float("-inf"))
        highest = all_reduce(logits.detach().amax(-1), group, dist.ReduceOp.MAX)
        logits = logits - highest[..., None]
        total = reduce_from(logits.exp().sum(-1), group)
        local = targets - first
        mine = (local >= 0) & (local < self.rows)
        own = logits.gather(-1, local.where(mine, 0)[..., None])[..., 0].where(mine, 0.0)
        return (total.log() - reduce_from(own, group)).mean()


def initialize(model: GPT, seed: int) -> None:
    """Random weights of this rank. The checkpoint has to replace all of them, so they need not fit together over ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * model.groups.pp_rank + model.groups.tp_rank)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0)
                continue
            deep = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            nn.init.normal_(p, std=0.1 / (2 * model.shape.layers) ** 0.5 if deep else 0.1, generator=generator)
