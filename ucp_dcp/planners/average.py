"""``Average()``: replicas that drifted apart become one value, their mean (design decision D13; the paper's Partial pattern).

Runs in ``set_up_planner``, the only place of a DCP save that is on all ranks and on the planning thread. Every rank walks the same sorted
list of (key, box), so the collectives match. The mean is taken in fp64 (fp32 for 16-bit inputs) in coordinate order and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import PlanError
from ..layout import Fragment, Layout

__all__ = ["average_fragments", "mean_in_order"]

_BLOCK = 1 << 22  # elements exchanged at once: bounds the memory to world x this

_Label = tuple[str, tuple[int, ...], tuple[int, ...], str]


def mean_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean of equally shaped tensors, added in the given order in fp64 (fp32 for 16-bit types), rounded once to their dtype."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
    total = torch.zeros(values[0].shape, dtype=wide, device=values[0].device)
    for value in values:
        total += value.to(wide)
    return (total / len(values)).to(dtype)


def average_fragments(fragments: Sequence[Fragment], layout: Layout, group: dist.ProcessGroup | None) -> list[Fragment]:
    """Fragments with every averaged one replaced by the mean over its ``Average()`` axes. Collective over ``group``.

    Raises PlanError when an averaged axis has several coordinates and there is no process group to reach them.
    """
    if not dist.is_available() or not dist.is_initialized():
        wide = [f.key for f in fragments if f.average and any(layout.coords[a][1] > 1 for a in f.average)]
        if wide:
            raise PlanError(f"tensor {wide[0]!r} is to be averaged over ranks, but no process group is initialised")
        return list(fragments)
    mine: list[tuple[_Label, tuple[int, ...], tuple[tuple[str, int], ...]]] = []
    local: dict[_Label, int] = {}
    for i, f in enumerate(fragments):
        if f.average:
            label = (f.key, f.box.offset, f.box.size, str(f.view.dtype))
            order = tuple(layout.coords[a][0] for a in f.average)
            rest = tuple(sorted((a, c) for a, (c, _) in layout.coords.items() if a not in f.average))
            mine.append((label, order, rest))
            local[label] = i
    world = dist.get_world_size(group)
    rank = dist.get_rank(group)
    everyone: list[list[tuple[_Label, tuple[int, ...], tuple[tuple[str, int], ...]]]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine, group=group)

    holders: dict[_Label, list[tuple[tuple[tuple[str, int], ...], tuple[int, ...], int]]] = {}
    for r, rows in enumerate(everyone):
        for label, order, rest in rows:
            holders.setdefault(label, []).append((rest, order, r))
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    out = list(fragments)
    for label in sorted(holders):
        rows_ = sorted(holders[label])
        own_rest = next((rest for rest, _, r in rows_ if r == rank), None)
        ranks = [r for rest, _, r in rows_ if rest == own_rest]
        size, dtype = label[2], getattr(torch, label[3].removeprefix("torch."))
        numel = 1
        for extent in size:
            numel *= extent
        source = fragments[local[label]].view.detach().to(device).contiguous().reshape(-1) if label in local else None
        result = torch.empty(numel if source is not None else 0, dtype=dtype)
        for begin in range(0, numel, _BLOCK):
            end = min(numel, begin + _BLOCK)
            block = source[begin:end] if source is not None else torch.zeros(end - begin, dtype=dtype, device=device)
            parts = [torch.empty_like(block) for _ in range(world)]
            dist.all_gather(parts, block, group=group)
            if source is not None:
                result[begin:end] = mean_in_order([parts[r] for r in ranks]).cpu()
        if source is not None:
            i = local[label]
            out[i] = dataclasses.replace(fragments[i], view=result.reshape(size), average=(), replicated=True)
    return out
