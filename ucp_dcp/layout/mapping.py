"""Steps applied to one tensor: which global elements a coordinate holds, and where in its local memory.

While the array is n-d every step cuts dimensions one by one, so the mapping is a *product* of segment lists and its boxes are the products
of segments. ``Flat`` freezes that array and goes on with ranges of its flattened elements; a range becomes boxes of the frozen array, each
of which is intersected with the product. All of it is integers: torch comes in only when a piece becomes a view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import LayoutError
from ..geometry import Box, c_strides, flat_range_to_boxes
from ..patterns import Average, Flat, FlatBuffer, Pad, Pattern, Permute, Replicate, Shard, Stack, Unique
from .segments import PADDING, Segments, chunk_bounds, cut, join, length, overlap, width_bounds

__all__ = ["Applied", "AxisStep", "Piece", "apply_steps", "infer_global_shape"]

Coords = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AxisStep:
    """A resolved step: the axis (None for axis-free patterns) and its pattern."""

    axis: str | None
    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.axis}: {self.pattern}" if self.axis is not None else str(self.pattern)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and where it lies in a local array.

    box: the box of the global tensor, or None for padding. size: its extent, dim by dim of ``box`` (of the local array for padding).
    at: index of its first element in the local array. strides: per dim of ``size`` (local dim, factor): one step along the dim moves
    ``factor`` elements along that local dim; (-1, 1) where the local array has no such dim (size 1).
    """

    box: Box | None
    size: tuple[int, ...]
    at: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """What one coordinate holds of one tensor after some steps.

    dims: per dim of the current array (global dim, segments). fixed: (global dim, index) of dims that a Stack fixed to one index.
    flat: None while n-d, else segments over the flattened current array. even: the local length that trailing padding may fill up to.
    held: False when a Unique leaves the tensor to other coordinates. replicated: other coordinates hold the same elements.
    average: the Average step, average_axes its axes, and average_first whether this is coordinate 0 of them.
    """

    global_shape: tuple[int, ...]
    dims: tuple[tuple[int, Segments], ...]
    fixed: tuple[tuple[int, int], ...] = ()
    flat: Segments | None = None
    even: int = 0
    held: bool = True
    average: Average | None = None
    average_first: bool = True
    average_axes: tuple[str, ...] = ()
    replicated: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the current (after the last step: local) array."""
        if self.flat is not None:
            return (length(self.flat),)
        return tuple(length(segments) for _, segments in self.dims)

    def flattened(self) -> Applied:
        """The same with the current array frozen and flattened."""
        if self.flat is not None:
            return self
        n = math.prod(self.shape)
        return replace(self, flat=((0, n),) if n else ())

    def pieces(self) -> list[Piece]:
        """Pieces of global boxes and of padding, disjoint, covering the local array."""
        if self.flat is None:
            return list(self._product())
        out: list[Piece] = []
        at = 0
        for start, n in self.flat:
            if start == PADDING:
                out.append(Piece(None, (n,), (at,), ((0, 1),)))
            else:
                out.extend(self.flat_pieces(start, start + n, at))
            at += n
        return out

    def flat_pieces(self, start: int, stop: int, at: int) -> Iterator[Piece]:
        """Pieces of elements ``[start, stop)`` of the flattened current array, which lie at ``at`` in a 1-D local array."""
        shape = tuple(length(segments) for _, segments in self.dims)
        strides = c_strides(shape)
        for box in flat_range_to_boxes(shape, start, stop):
            for piece in self._product(box):
                where = at - start + sum(i * s for i, s in zip(piece.at, strides, strict=True))
                flat_strides = tuple((0, strides[d] * factor) if d >= 0 else (-1, 1) for d, factor in piece.strides)
                yield Piece(piece.box, piece.size, (where,), flat_strides)

    def _product(self, within: Box | None = None) -> Iterator[Piece]:
        """Pieces of the n-d current array, or of a box of it. ``at`` and strides are in dims of that array."""
        shape = tuple(length(segments) for _, segments in self.dims)
        offset = within.offset if within is not None else (0,) * len(shape)
        size = within.size if within is not None else shape
        runs = [overlap(segments, o, o + n) for (_, segments), o, n in zip(self.dims, offset, size, strict=True)]
        if any(not run for run in runs):
            return
        real = [[r for r in run if r[1] != PADDING] for run in runs]
        for choice in itertools.product(*real):
            start, extent = [0] * len(self.global_shape), [1] * len(self.global_shape)
            strides = [(-1, 1)] * len(self.global_shape)
            for g, index in self.fixed:
                start[g] = index
            for d, ((g, _), (_, first, n)) in enumerate(zip(self.dims, choice, strict=True)):
                start[g], extent[g], strides[g] = first, n, (d, 1)
            yield Piece(Box(tuple(start), tuple(extent)), tuple(extent), tuple(c[0] for c in choice), tuple(strides))
        # Padding, without one piece twice: padding in dim d, real in the dims before it, anything in the dims behind it.
        for d, run in enumerate(runs):
            for low, first, n in run:
                if first != PADDING:
                    continue
                for before in itertools.product(*real[:d]):
                    at = (*(b[0] for b in before), low, *offset[d + 1 :])
                    extents = (*(b[2] for b in before), n, *size[d + 1 :])
                    yield Piece(None, extents, at, tuple((k, 1) for k in range(len(shape))))


def start(global_shape: Sequence[int]) -> Applied:
    """The whole global tensor, before any step."""
    return Applied(tuple(global_shape), tuple((d, ((0, n),) if n else ()) for d, n in enumerate(global_shape)))


def apply_steps(global_shape: Sequence[int], steps: Sequence[AxisStep], coords: Coords, without_axis: str | None = None) -> Applied:
    """What the coordinate ``coords`` (axis -> (coordinate, size)) holds of a tensor of this global shape, after all steps.

    without_axis: skip this axis (a flat buffer divides it). Raises LayoutError when a step does not fit the array it is applied to.
    """
    state = start(global_shape)
    cutting: set[str] = set()
    for step in steps:
        if step.axis is not None and step.axis == without_axis:
            continue
        k, n = coords[step.axis] if step.axis is not None else (0, 1)
        state, cuts = _apply(state, step, k, n)
        if cuts and step.axis is not None:
            cutting.add(step.axis)
    replicated = state.replicated or any(n > 1 and axis not in cutting and axis != without_axis for axis, (_, n) in coords.items())
    return replace(state, replicated=replicated)


def _dim(state: Applied, step: AxisStep, dim: int) -> int:
    ndim = 1 if state.flat is not None else len(state.dims)
    if not -ndim <= dim < ndim:
        raise LayoutError(f"{step}: the array has {ndim} dims by then, shape {state.shape}; dim {dim} does not exist")
    return dim % ndim


def _with_dim(state: Applied, dim: int, segments: Segments) -> Applied:
    if state.flat is not None:
        return replace(state, flat=segments)
    dims = list(state.dims)
    dims[dim] = (dims[dim][0], segments)
    return replace(state, dims=tuple(dims))


def _apply(state: Applied, step: AxisStep, k: int, n: int) -> tuple[Applied, bool]:
    """The array after one step, and whether the coordinates of its axis hold different elements (or none)."""
    pattern = step.pattern
    match pattern:
        case Replicate():
            return state, False
        case Unique(at=at):
            if max(at) >= n:
                raise LayoutError(f"{step}: axis {step.axis} has {n} coordinates, {max(at)} does not exist")
            return replace(state, held=state.held and k in at, replicated=state.replicated or len(set(at)) > 1), True
        case Average():
            if n == 1:
                return state, False
            axes = (*state.average_axes, step.axis or "")
            return replace(state, average=pattern, average_axes=axes, average_first=state.average_first and k == 0), False
        case Shard(dim=dim):
            d = _dim(state, step, dim)
            old = state.flat if state.flat is not None else state.dims[d][1]
            new, copied = _shard(old, pattern, step, k, n)
            return replace(_with_dim(state, d, new), replicated=state.replicated or copied, even=0), True
        case Pad(dim=dim, to=to, size=size):
            d = _dim(state, step, dim)
            old = state.flat if state.flat is not None else state.dims[d][1]
            have = length(old)
            if size is not None and have != size:
                raise LayoutError(f"{step}: dim {dim} has {have} elements before padding, expected size={size}")
            if to < have:
                raise LayoutError(f"{step}: dim {dim} has {have} elements, padding to {to} would cut it")
            return replace(_with_dim(state, d, join((old, ((PADDING, to - have),)))), even=0), False
        case Flat(bounds=bounds):
            state = state.flattened()
            flat = state.flat or ()
            total = length(flat)
            if bounds is None:
                low, high = chunk_bounds(total, n, k)
                return replace(state, flat=cut(flat, low, high), even=-(-total // n)), True
            if len(bounds) != n + 1 or bounds[-1] != total:
                raise LayoutError(
                    f"{step}: found cut points up to {bounds[-1]} for {len(bounds) - 1} coordinates, expected up to {total} for {n}"
                )
            return replace(state, flat=cut(flat, bounds[k], bounds[k + 1]), even=0), True
        case Stack(dim=dim, index=index, size=size, keep=keep):
            return _stack(state, step, dim, index, size, keep), False
        case Permute(dims=dims):
            if len(dims) != len(state.dims):
                raise LayoutError(f"{step}: the array has {len(state.dims)} dims by then, expected {len(dims)}")
            return replace(state, dims=tuple(state.dims[d] for d in dims)), False
        case FlatBuffer():
            raise LayoutError(f"{step}: describes a buffer of many parameters and cannot divide one of them")


def _stack(state: Applied, step: AxisStep, dim: int, index: tuple[int, ...], size: int | None, keep: bool) -> Applied:
    d = _dim(state, step, dim)
    g, segments = state.dims[d]
    have = length(segments)
    if size is not None and have != size:
        raise LayoutError(f"{step}: dim {dim} of the stacked tensor has {have} elements, expected size={size}")
    if index and max(index) >= have:
        raise LayoutError(f"{step}: dim {dim} of the stacked tensor has {have} elements, {max(index)} does not exist")
    chosen = join(cut(segments, i, i + 1) for i in index)
    if keep:
        return _with_dim(state, d, chosen)
    if chosen[0][0] == PADDING:
        raise LayoutError(f"{step}: element {index[0]} is padding")
    dims = state.dims[:d] + state.dims[d + 1 :]
    return replace(state, dims=dims, fixed=(*state.fixed, (g, chosen[0][0])))


def _shard(segments: Segments, pattern: Shard, step: AxisStep, k: int, n: int) -> tuple[Segments, bool]:
    have = length(segments)
    parts = pattern.parts if pattern.parts is not None else (have,)
    if sum(parts) != have:
        raise LayoutError(f"{step}: parts add up to {sum(parts)}, dim {pattern.dim} has {have} elements by then")
    copied = False
    out: list[Segments] = []
    at = 0
    for p, part in enumerate(parts):
        copies = pattern.copies[p] if len(pattern.copies) > 1 else pattern.copies[0]
        if n % copies:
            raise LayoutError(f"{step}: axis {step.axis} has {n} coordinates, not a multiple of copies={copies}")
        copied = copied or copies > 1
        pieces, which = n // copies, k // copies
        if pattern.widths is not None:
            widths = pattern.widths[p]
            if len(widths) != pieces or sum(widths) != part:
                raise LayoutError(f"{step}: found {len(widths)} widths adding up to {sum(widths)}, expected {pieces} adding up to {part}")
            low, high = width_bounds(widths, which)
        else:
            low, high = chunk_bounds(part, pieces, which)
        out.append(cut(segments, at + low, at + high))
        at += part
    # Even if only one fused part is copied, neighbours hold some of the same elements.
    return join(out), copied


def infer_global_shape(local_shape: Sequence[int], steps: Sequence[AxisStep], coords: Coords) -> tuple[int, ...]:
    """The global shape, from the local one, steps undone from last to first.

    Assumes that a Shard without widths is even; where it is not, ranks infer different shapes and saving finds out. Raises LayoutError when
    a step cannot be undone from the local shape alone.
    """
    shape = list(local_shape)
    for step in reversed(steps):
        _, n = coords[step.axis] if step.axis is not None else (0, 1)
        match step.pattern:
            case Shard(dim=dim, parts=parts, widths=widths, copies=copies):
                d = _local_dim(shape, step, dim)
                if parts is not None:
                    shape[d] = sum(parts)
                elif widths is not None:
                    shape[d] = sum(widths[0])
                else:
                    shape[d] *= n // copies[0]
            case Pad(dim=dim, to=to, size=size):
                d = _local_dim(shape, step, dim)
                if size is None:
                    raise LayoutError(f"{step}: the logical length is not known; give size= or the global shape (shapes=)")
                if shape[d] != to:
                    raise LayoutError(f"{step}: dim {dim} would have {shape[d]} elements after padding, expected {to}")
                shape[d] = size
            case Stack(dim=dim, index=index, size=size, keep=keep):
                if size is None:
                    raise LayoutError(f"{step}: the number of stacked elements is not known; give size= or the global shape (shapes=)")
                if keep:
                    d = _local_dim(shape, step, dim)
                    if shape[d] != len(index):
                        raise LayoutError(f"{step}: dim {dim} has {shape[d]} elements, expected {len(index)}")
                    shape[d] = size
                else:
                    d = dim if dim >= 0 else dim + len(shape) + 1
                    if not 0 <= d <= len(shape):
                        raise LayoutError(f"{step}: a stacked tensor of {len(shape) + 1} dims has no dim {dim}")
                    shape.insert(d, size)
            case Permute(dims=dims):
                if len(dims) != len(shape):
                    raise LayoutError(f"{step}: the array has {len(shape)} dims, expected {len(dims)}")
                old = list(shape)
                for j, d in enumerate(dims):
                    shape[d] = old[j]
            case Flat() | FlatBuffer():
                raise LayoutError(f"{step}: a flat array does not tell the shape of its tensor; give the global shape (shapes=)")
            case Replicate() | Unique() | Average():
                pass
    return tuple(shape)


def _local_dim(shape: Sequence[int], step: AxisStep, dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(f"{step}: the array has shape {tuple(shape)}, dim {dim} does not exist")
    return dim % len(shape)
