"""Index segments: one dimension of a local array as runs of indices of a dimension of the global tensor.

``((4, 2), (10, 3), (-1, 1))`` is a dimension of 6 elements: global 4, 5, then 10, 11, 12, then one element that is no global element
(padding). Cutting steps only ever slice and join such lists, so what a coordinate holds is an exact, disjoint cover by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["PADDING", "Segments", "chunk_bounds", "cut", "join", "length", "overlap"]

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""(first global index, or PADDING; number of elements), in local order; no element of length 0."""

PADDING = -1


def length(segments: Segments) -> int:
    """Elements in all."""
    return sum(n for _, n in segments)


def join(parts: Iterable[Segments]) -> Segments:
    """Segments end to end, runs that continue each other merged."""
    out: list[tuple[int, int]] = []
    for part in parts:
        for start, n in part:
            if not n:
                continue
            if out:
                last, m = out[-1]
                if (start == PADDING and last == PADDING) or (start != PADDING and last != PADDING and last + m == start):
                    out[-1] = (last, m + n)
                    continue
            out.append((start, n))
    return tuple(out)


def cut(segments: Segments, start: int, stop: int) -> Segments:
    """Local elements ``[start, stop)``."""
    out: list[tuple[int, int]] = []
    at = 0
    for first, n in segments:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            out.append((PADDING if first == PADDING else first + low - at, high - low))
        at += n
        if at >= stop:
            break
    return tuple(out)


def overlap(segments: Segments, start: int, stop: int) -> list[tuple[int, int, int]]:
    """What lies in local ``[start, stop)``, as (local start, global start or PADDING, length)."""
    out: list[tuple[int, int, int]] = []
    at = 0
    for first, n in segments:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            out.append((low, PADDING if first == PADDING else first + low - at, high - low))
        at += n
        if at >= stop:
            break
    return out


def chunk_bounds(size: int, count: int, k: int) -> tuple[int, int]:
    """Range of chunk ``k`` of ``count`` by the rule of ``torch.chunk``: ``ceil(size / count)`` each, the last ones fewer or none."""
    each = -(-size // count)
    return min(each * k, size), min(each * (k + 1), size)


def width_bounds(widths: Sequence[int], k: int) -> tuple[int, int]:
    """Range of slice ``k`` of slices with these lengths."""
    start = sum(widths[:k])
    return start, start + widths[k]
