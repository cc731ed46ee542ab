"""Tensor parallelism as Megatron does it: what goes through which collective, forwards and backwards; and the ranks of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Sizes of a job, and how many layers each pipeline stage has. Ranks count tp first, then dp, then pp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[int, ...] = ()
    fsdp: int = 0
    """Not 0: so many ranks of FSDP2 instead; the model is then the same modules, whole."""

    @property
    def ranks(self) -> int:
        return self.fsdp or self.tp * self.pp * self.dp

    def __str__(self) -> str:
        if self.fsdp:
            return f"FSDP2 {self.fsdp}"
        layers = f" (layers {'+'.join(map(str, self.stages))})" if len(set(self.stages)) > 1 else ""
        return " x ".join(f"{name} {n}" for name, n in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp)) if n > 1) + layers


class Groups:
    """The coordinates of this rank and its process groups. Collective: every rank makes all groups in one order."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.tp_rank, self.dp_rank = rank % grid.tp, rank // grid.tp % grid.dp
        self.pp_rank = rank // (grid.tp * grid.dp)
        self.tp = self.dp = None
        for first in range(0, grid.ranks, grid.tp):
            group = self._group(list(range(first, first + grid.tp)))
            if first <= rank < first + grid.tp:
                self.tp = group
        for pp in range(grid.pp):
            for tp in range(grid.tp):
                members = [(pp * grid.dp + dp) * grid.tp + tp for dp in range(grid.dp)]
                group = self._group(members)
                if rank in members:
                    self.dp = group
        self.previous = rank - grid.tp * grid.dp if self.pp_rank > 0 else None
        self.next = rank + grid.tp * grid.dp if self.pp_rank < grid.pp - 1 else None

    @staticmethod
    def _group(members: list[int]) -> dist.ProcessGroup | None:
        return dist.new_group(members) if len(members) > 1 else None


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or another reduction) over a group, as a new tensor."""
    if group is None:
        return x
    x = x.clone()
    dist.all_reduce(x, op, group=group)
    return x


class CopyTo(torch.autograd.Function):
    """Into a column-parallel layer: nothing forwards, a sum of gradients backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].contiguous(), ctx.group), None


class ReduceFrom(torch.autograd.Function):
    """Out of a row-parallel layer: a sum forwards, nothing backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """The last dimension of all ranks, end to end; backwards the sum of what all of them made of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = all_reduce(grads[0].contiguous(), ctx.group)
        return whole.narrow(-1, dist.get_rank(ctx.group) * ctx.size, ctx.size).contiguous(), None


def copy_to(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return CopyTo.apply(x, group) if group is not None else x  # type: ignore[no-untyped-call]


def reduce_from(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return ReduceFrom.apply(x, group) if group is not None else x  # type: ignore[no-untyped-call]


def gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return Gather.apply(x, group) if group is not None else x  # type: ignore[no-untyped-call]
