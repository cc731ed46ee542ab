"""From pieces to views of a local tensor, and what optimizer state makes of its parameter's steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LayoutError
from ..geometry import Box
from ..patterns import Average, Pad, Replicate, Shard, Unique
from ..spec import StateSpec
from .flat_buffer import BufferPlan
from .fragment import Fragment
from .mapping import Applied, AxisStep, Piece

__all__ = ["at_box", "average", "factored", "fit", "fit_buffer", "view"]


def at_box(like: Fragment, box: Box, memory: torch.Tensor) -> Fragment:
    """The same but for its box and view."""
    names = (like.key, like.path, like.role, like.fqn, like.state, like.shape)
    return Fragment(*names, box, memory, like.replicated, like.average, like.pattern, like.writes)


def view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece as a view of the local tensor, whatever strides that has."""
    if piece.size == local.shape and all(d == k and factor == 1 for k, (d, factor) in enumerate(piece.strides)):
        return local  # all of it: also right for tensor subclasses that have no strides
    stride = local.stride()
    offset = local.storage_offset() + sum(i * s for i, s in zip(piece.at, stride, strict=True))
    return local.as_strided(piece.size, tuple(stride[d] * factor if d >= 0 else 1 for d, factor in piece.strides), offset)


def fit(applied: Applied, pieces: list[Piece], local: torch.Tensor) -> list[Piece]:
    """The pieces, with trailing padding of a flat partition; raises LayoutError when the local shape is not the expected one."""
    found, expected = tuple(local.shape), applied.shape
    if found == expected:
        return pieces
    if applied.flat is not None and local.dim() == 1 and expected[0] < found[0] == applied.even:
        return [*pieces, Piece(None, (found[0] - expected[0],), (expected[0],), ((0, 1),))]
    also = f" (or ({applied.even},) with padding)" if applied.flat is not None and applied.even > expected[0] else ""
    raise LayoutError(
        f"local shape is {found}, expected {expected}{also} of global shape {applied.global_shape}; check coordinates, sizes and the rule"
    )


def fit_buffer(plan: BufferPlan, local: torch.Tensor) -> tuple[Piece, ...]:
    """The padding that the local buffer has; raises LayoutError when its length is not the expected one."""
    if local.dim() == 1 and local.shape[0] == plan.length:
        return plan.padding
    if local.dim() == 1 and local.shape[0] == plan.used:
        return tuple(p for p in plan.padding if p.at[0] < plan.used)
    also = f" (or ({plan.used},) without padding)" if plan.used != plan.length else ""
    raise LayoutError(
        f"local shape is {tuple(local.shape)}, expected ({plan.length},){also} for {len(plan.parts)} parameters; "
        "check their order, pad_to and align"
    )


def average(applied: Applied, state: str, spec: StateSpec) -> tuple[tuple[str, ...], bool]:
    """(axes to average, writes) of a parameter's (``state`` is "") or a state's fragments. LayoutError when the rule does not say."""
    if applied.average is None:
        return (), True
    if not state or spec.master:
        return applied.average_axes, True
    match applied.average.state:
        case "mean":
            return applied.average_axes, True
        case "first":
            return (), applied.average_first
    raise LayoutError(
        f"optimizer state {state!r} of an averaged parameter: its copies differ too; say Average(state=mean) or Average(state=first)"
    )


def factored(steps: Sequence[AxisStep], drop: int, ndim: int, state: str) -> tuple[AxisStep, ...]:
    """The parameter's steps for a state without dimension ``drop``."""
    out: list[AxisStep] = []
    for step in steps:
        pattern = step.pattern
        if isinstance(pattern, (Replicate, Unique, Average)):
            out.append(step)
            continue
        if not isinstance(pattern, (Shard, Pad)):
            raise LayoutError(f"state {state!r} is factored, and its parameter is divided by `{step}`; declare the state's own steps")
        dim = pattern.dim % ndim
        if dim == drop:
            if isinstance(pattern, Pad):
                continue
            raise LayoutError(
                f"state {state!r} lacks dim {drop}, along which its parameter is divided (`{step}`): "
                "coordinates differ; declare its own steps"
            )
        new = dim - (dim > drop)
        if isinstance(pattern, Pad):
            out.append(AxisStep(step.axis, Pad(new, pattern.to, pattern.size)))
        else:
            out.append(AxisStep(step.axis, Shard(new, pattern.parts, pattern.widths, pattern.copies)))
    return tuple(out)
