"""``Average()``: replicas that drifted apart become one value, their mean (design decision D13; the paper's Partial pattern).

Runs in ``set_up_planner``, the only place of a DCP save that is on all ranks and on the planning thread. Every rank walks the same sorted
list of (key, box), so the collectives match; whatever one rank alone could fail at is looked at before them (``check_averaged``), and the
ranks agree about it first. The mean is taken in fp64 (fp32 for 16-bit inputs) in coordinate order and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import PlanError, UnsupportedError
from ..layout import Fragment, Layout

__all__ = ["average_fragments", "check_averaged", "mean_in_order"]

_BUDGET = 64 << 20  # bytes that are exchanged at once, of all ranks together
_SMALLEST = 1 << 16  # ... but at least so many of each

_Label = tuple[str, tuple[int, ...], tuple[int, ...], str]
_Row = tuple[_Label, tuple[int, ...], tuple[tuple[str, int], ...]]

_WITHOUT_MEAN = {torch.bool, getattr(torch, "float4_e2m1fn_x2", torch.bool)}


def mean_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean of equally shaped tensors, added in the given order in fp64 (fp32 for 16-bit types), rounded once to their dtype."""
    dtype = values[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
    total = torch.zeros(values[0].shape, dtype=wide, device=values[0].device)
    for value in values:
        total += value.to(wide)
    total /= len(values)
    return total.to(dtype) if dtype.is_floating_point or dtype.is_complex else total.round_().to(dtype)


def _label(fragment: Fragment) -> _Label:
    return fragment.key, fragment.box.offset, fragment.box.size, str(fragment.view.dtype)


def check_averaged(fragments: Sequence[Fragment], layout: Layout, alone: bool) -> None:
    """Everything a rank can find wrong by itself. ``alone``: there are no other ranks to reach.

    Raises PlanError when an averaged axis has several coordinates and nobody to reach them, or when this rank holds two different copies
    of one averaged box; UnsupportedError for a dtype that has no mean.
    """
    seen: dict[_Label, Fragment] = {}
    for f in fragments:
        if not f.average:
            continue
        if alone and any(layout.coords[a][1] > 1 for a in f.average):
            raise PlanError(f"tensor {f.key!r} is to be averaged over ranks, but this save has no process group to reach them")
        if f.view.dtype in _WITHOUT_MEAN or f.view.is_meta:
            raise UnsupportedError(f"tensor {f.key!r} is to be averaged, but a {f.view.dtype} tensor on {f.view.device} has no mean")
        other = seen.setdefault(_label(f), f)
        if other is not f and not torch.equal(other.view, f.view):
            raise PlanError(f"tensor {f.key!r}: this rank holds two different copies of the box at {f.box.offset}; which to average?")


def average_fragments(fragments: Sequence[Fragment], layout: Layout, group: dist.ProcessGroup | None) -> list[Fragment]:
    """Fragments with every averaged one replaced by the mean over its ``Average()`` axes. Collective over ``group``."""
    mine: list[_Row] = []
    local: dict[_Label, list[int]] = {}
    for i, f in enumerate(fragments):
        if f.average:
            label = _label(f)
            if label not in local:
                order = tuple(layout.coords[a][0] for a in f.average)
                rest = tuple(sorted((a, c) for a, (c, _) in layout.coords.items() if a not in f.average))
                mine.append((label, order, rest))
            local.setdefault(label, []).append(i)
    world = dist.get_world_size(group)
    rank = dist.get_rank(group)
    everyone: list[list[_Row]] = [[] for _ in range(world)]
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
        numel = torch.Size(size).numel()
        source = None
        if label in local:
            source = fragments[local[label][0]].view.detach().resolve_conj().resolve_neg().to(device).contiguous().reshape(-1)
        result = torch.empty(numel if source is not None else 0, dtype=dtype)
        step = max(_SMALLEST, _BUDGET // world) // dtype.itemsize
        for begin in range(0, numel, step):
            end = min(numel, begin + step)
            # as bytes: gloo knows few dtypes
            if source is not None:
                block = source[begin:end].view(torch.uint8)
            else:
                block = torch.zeros((end - begin) * dtype.itemsize, dtype=torch.uint8, device=device)
            parts = [torch.empty_like(block) for _ in range(world)]
            dist.all_gather(parts, block, group=group)
            if source is not None:
                result[begin:end] = mean_in_order([parts[r].view(dtype) for r in ranks]).cpu()
        for i in local.get(label, ()):
            out[i] = dataclasses.replace(fragments[i], view=result.reshape(size), average=(), replicated=True)
    return out
