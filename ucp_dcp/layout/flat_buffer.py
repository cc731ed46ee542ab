"""Flat buffers: one 1-D local array that holds pieces of many parameters (ZeRO-1/2 partitions, Megatron's buckets)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import LayoutError
from ..patterns import FlatBuffer
from .mapping import Applied, Piece
from .segments import PADDING, chunk_bounds

__all__ = ["BufferPart", "BufferPlan", "Param", "order_params", "plan_buffer"]


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a buffer: its global fqn, what its own rule leaves of it without the buffer's axis, and that rule's steps as text."""

    fqn: str
    applied: Applied
    pattern: str


@dataclass(frozen=True, slots=True)
class BufferPart:
    """A parameter and its pieces in the local buffer; no pieces when this coordinate holds none of it."""

    param: Param
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """What the local buffer holds. ``length``: its expected elements; ``used``: up to the end of the last parameter; padding: pieces."""

    parts: tuple[BufferPart, ...]
    padding: tuple[Piece, ...]
    length: int
    used: int


def order_params(names: Sequence[str], order: str, n: int) -> list[str]:
    """Names in the order in which they lie in the buffer (``FlatBuffer.order``) when ``n`` coordinates share it."""
    if order == "reverse":
        return list(reversed(names))
    if order == "round_robin":
        return [names[i] for first in range(n) for i in range(first, len(names), n)]
    return list(names)


def plan_buffer(pattern: FlatBuffer, k: int, n: int, param_of: Callable[[str], Param]) -> BufferPlan:
    """The plan of coordinate ``k`` of ``n``. Raises LayoutError when the partition does not fit the parameters."""
    params = [param_of(name) for name in order_params(pattern.params, pattern.order, n)]
    if pattern.each:
        return _plan_each(params, k, n)
    starts: list[int] = []
    end = 0
    for param in params:
        at = -(-end // pattern.align) * pattern.align
        starts.append(at)
        end = at + math.prod(param.applied.shape)
    total = -(-end // pattern.pad_to) * pattern.pad_to
    if pattern.bounds is None:
        each = -(-total // n)
        low, high = each * k, each * (k + 1)
    else:
        if len(pattern.bounds) != n + 1:
            raise LayoutError(f"{pattern}: found {len(pattern.bounds)} cut points, expected {n + 1} for {n} coordinates")
        if pattern.bounds[-1] < end:
            raise LayoutError(f"{pattern}: the last cut point is {pattern.bounds[-1]}, the parameters fill {end} elements")
        low, high = pattern.bounds[k], pattern.bounds[k + 1]
    parts: list[BufferPart] = []
    padding: list[Piece] = []
    at = low
    for param, first in zip(params, starts, strict=True):
        last = first + math.prod(param.applied.shape)
        a, b = max(first, low), min(last, high)
        pieces: list[Piece] = []
        if a < b:
            if a > at:
                padding.append(_pad(at - low, a - at))
            for piece in _range_pieces(param.applied, a - first, b - first, a - low):
                (pieces if piece.box is not None else padding).append(piece)
            at = b
        parts.append(BufferPart(param, tuple(pieces)))
    used = max(0, min(at, high) - low)
    if at < high:
        padding.append(_pad(at - low, high - at))
    return BufferPlan(tuple(parts), tuple(padding), high - low, used)


def _plan_each(params: Sequence[Param], k: int, n: int) -> BufferPlan:
    parts: list[BufferPart] = []
    padding: list[Piece] = []
    at = used = 0
    for param in params:
        numel = math.prod(param.applied.shape)
        low, high = chunk_bounds(numel, n, k)
        even = -(-numel // n)
        pieces: list[Piece] = []
        for piece in _range_pieces(param.applied, low, high, at):
            (pieces if piece.box is not None else padding).append(piece)
        if high > low:
            used = at + high - low
        if high - low < even:
            padding.append(_pad(at + high - low, even - (high - low)))
        parts.append(BufferPart(param, tuple(pieces)))
        at += even
    # Padding between parameters is part of the buffer; only what trails may be missing.
    return BufferPlan(tuple(parts), tuple(padding), at, used)


def _pad(at: int, n: int) -> Piece:
    return Piece(None, (n,), (at,), ((0, 1),))


def _range_pieces(applied: Applied, start: int, stop: int, at: int) -> list[Piece]:
    """Elements ``[start, stop)`` of a parameter's flattened array, which lie at ``at`` in the buffer."""
    if applied.flat is None:
        return list(applied.flat_pieces(start, stop, at))
    out: list[Piece] = []
    here = 0
    for first, n in applied.flat:
        low, high = max(start, here), min(stop, here + n)
        if low < high:
            where = at + low - start
            if first == PADDING:
                out.append(_pad(where, high - low))
            else:
                out.extend(applied.flat_pieces(first + low - here, first + high - here, where))
        here += n
    return out
