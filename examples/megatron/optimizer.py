"""Megatron's distributed optimizer (ZeRO-1) in short: one flat buffer per dtype, of which every data-parallel rank steps one part.

The buffer is laid out as in Megatron: parameters in reverse order, each at a multiple of 64 elements, the end padded to a multiple of
lcm(dp, 128). Parameters are views of it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from gpt import GPT
from parallel import Groups
from torch import Tensor

ALIGN, PAD = 64, 128


class DistributedOptimizer:
    """AdamW of this rank's part: ``state`` holds 1-D tensors of the part, and the step."""

    def __init__(self, model: GPT, groups: Groups, betas: tuple[float, float], decay: float, eps: float = 1e-8) -> None:
        self.groups, self.betas, self.decay, self.eps = groups, betas, decay, eps
        self.names = [name for name, _ in model.named_parameters()][::-1]
        own = dict(model.named_parameters())
        self.starts: dict[str, int] = {}
        end = 0
        for name in self.names:
            self.starts[name] = -(-end // ALIGN) * ALIGN
            end = self.starts[name] + own[name].numel()
        dp = groups.grid.dp
        self.multiple = math.lcm(dp, PAD)
        total = -(-end // self.multiple) * self.multiple
        self.params, self.grads = torch.zeros(total), torch.zeros(total)
        decays, counts = torch.zeros(total), torch.zeros(total)
        for name, start in self.starts.items():
            p, part = own[name], slice(start, start + own[name].numel())
            self.params[part] = p.detach().flatten()
            p.data = self.params[part].view(p.shape)
            p.grad = self.grads[part].view(p.shape)  # backward adds into it
            decays[part] = decay if p.dim() > 1 else 0.0
            # of what all tensor-parallel ranks have alike, one of them counts in the norm of the gradient
            counts[part] = 1.0 if p.dim() > 1 or groups.tp_rank == 0 else 0.0
        each = total // dp
        self.part = slice(groups.dp_rank * each, (groups.dp_rank + 1) * each)
        self.decays, self.counts = decays[self.part], counts[self.part]
        master = self.params[self.part].clone()
        self.state = {"master": master, "exp_avg": torch.zeros(each), "exp_avg_sq": torch.zeros(each), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> float:
        """One step from the sums of gradients of all ranks. Returns the norm of the whole model's gradient. Collective."""
        if self.groups.dp is not None:
            dist.all_reduce(self.grads, group=self.groups.dp)
        grad = self.grads[self.part] / self.groups.grid.dp
        total = (grad.square() * self.counts).sum()
        if self.groups.grid.ranks > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        grad = grad * (clip / (norm + 1e-6)).clamp(max=1.0)
        master, m, v, step = (self.state[k] for k in ("master", "exp_avg", "exp_avg_sq", "step"))
        step += 1
        t = step.item()
        master.mul_(1 - lr * self.decays)
        m.lerp_(grad, 1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        denominator = (v.sqrt() / math.sqrt(1 - self.betas[1] ** t)).add_(self.eps)
        master.addcdiv_(m, denominator, value=-lr / (1 - self.betas[0] ** t))
        self.spread()
        self.grads.zero_()
        return norm.item()

    def spread(self) -> None:
        """Weights of all ranks from the masters. Collective."""
        master = self.state["master"]
        if self.groups.dp is None:
            self.params.copy_(master)
            return
        parts: list[Tensor] = [torch.empty_like(master) for _ in range(self.groups.grid.dp)]
        dist.all_gather(parts, master, group=self.groups.dp)
        self.params.copy_(torch.cat(parts))
