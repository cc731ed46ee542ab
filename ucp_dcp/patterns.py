"""Patterns: how one parallel axis divides a tensor. The nouns of the UCP language (``docs/language.md``).

They are DTensor's placements generalised to what Megatron and ZeRO really do, and cover the patterns of the Universal Checkpointing paper
(arXiv 2406.18820, section 5.3.1). A pattern here is *resolved*: integers and names only. A spec (``ucp_dcp.spec``) holds the same call
with expressions as arguments and resolves it for one tensor and one coordinate.

A coordinate ``k`` of an axis of ``n`` coordinates holds a part of the *current array*: the global tensor after the steps that come before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .errors import LayoutError

__all__ = ["Average", "Flat", "FlatBuffer", "Pad", "Pattern", "Permute", "Replicate", "Shard", "Stack", "Unique"]


def _ints(name: str, values: tuple[int, ...], least: int = 0) -> None:
    for value in values:
        if type(value) is not int or value < least:
            raise LayoutError(f"{name}: found {value!r}, expected integers of at least {least}")


def _show(values: tuple[int, ...]) -> str:
    """A list in a text for people: long ones are cut short."""
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ... {len(values)} in all]"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate holds the same values; one of them writes. The paper's Replicate; implied for every axis a rule does not name."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Unique:
    """Only the coordinates ``at`` hold the tensor (a pipeline stage's layers). The paper's Unique.

    More than one coordinate: they hold the same values, such as an embedding tied to the head of the last pipeline stage.
    """

    at: tuple[int, ...]

    def __post_init__(self) -> None:
        _ints("Unique(at)", self.at)
        if not self.at:
            raise LayoutError("Unique(at): found no coordinate, expected at least one")

    def __str__(self) -> str:
        return f"Unique({self.at[0]})" if len(self.at) == 1 else f"Unique({list(self.at)})"


@dataclass(frozen=True, slots=True)
class Shard:
    """The coordinate holds a slice along ``dim``. The paper's Shard-V, Shard-H, Shard-Hy (two steps) and Shard-NC (``parts``).

    dim: dimension of the current array; negative counts from the end.
    parts: sizes of fused parts laid end to end along ``dim`` (q, k, v; gate, up): each part is sharded by itself and the
        coordinate holds its slices of all parts, end to end.
    widths: slice lengths of the coordinates, in order; with ``parts`` one such tuple per part. Without: the rule of ``torch.chunk``.
    copies: this many neighbouring coordinates hold the same slice (KV heads fewer than TP ranks); with ``parts`` one per part.
    """

    dim: int
    parts: tuple[int, ...] | None = None
    widths: tuple[tuple[int, ...], ...] | None = None
    copies: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        count = 1
        if self.parts is not None:
            _ints("Shard(parts)", self.parts)
            count = len(self.parts)
            if not count:
                raise LayoutError("Shard(parts): found no part, expected at least one")
        if self.widths is not None:
            for row in self.widths:
                _ints("Shard(widths)", row)
            if len(self.widths) != count:
                raise LayoutError(f"Shard(widths): found {len(self.widths)} lists, expected {count}: one per part")
        _ints("Shard(copies)", self.copies, 1)
        if len(self.copies) not in (1, count):
            raise LayoutError(f"Shard(copies): found {len(self.copies)} numbers, expected one or {count}: one per part")

    def __str__(self) -> str:
        text = f"Shard({self.dim}"
        if self.parts is not None:
            text += f", parts={_show(self.parts)}"
        if self.widths is not None:
            widths = [_show(row) for row in self.widths]
            text += f", widths=[{', '.join(widths)}]" if self.parts is not None else f", widths={widths[0]}"
        if any(c != 1 for c in self.copies):
            text += f", copies={self.copies[0] if len(self.copies) == 1 else _show(self.copies)}"
        return text + ")"


@dataclass(frozen=True, slots=True)
class Average:
    """The coordinates drifted apart; the global value is their mean. The paper's Partial.

    state: what that means for optimizer state that follows the parameter: ``"error"`` (refuse), ``"mean"``, or ``"first"``:
        coordinate 0 is saved and every coordinate loads it.
    """

    state: Literal["error", "mean", "first"] = "error"

    def __post_init__(self) -> None:
        if self.state not in ("error", "mean", "first"):
            raise LayoutError(f"Average(state): found {self.state!r}, expected 'error', 'mean' or 'first'")

    def __str__(self) -> str:
        return "Average()" if self.state == "error" else f"Average(state={self.state})"


@dataclass(frozen=True, slots=True)
class Flat:
    """The current array is flattened in C order and cut into ranges of elements. ZeRO-3's Shard-V.

    bounds: the ``n + 1`` cut points, from 0 to the number of elements. Without: ``ceil(numel / n)`` elements each, the last ones fewer
        or none; the local memory may be longer than the range, up to that even size.
    """

    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_bounds("Flat(bounds)", self.bounds)

    def __str__(self) -> str:
        return "Flat()" if self.bounds is None else f"Flat(bounds={_show(self.bounds)})"


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One 1-D local array holds pieces of *many* tensors laid end to end. Shard-V of ZeRO-1/2 and of Megatron's buckets.

    params: names of the parameters as they stand below the model root, in order. What is laid end to end is what their own rules leave
        of them without the buffer's axis (their TP shards, for one), flattened in C order.
    order: ``given``; ``reverse``; ``round_robin``: numbers 0, n, 2n, ..., then 1, n + 1, ... for n coordinates (DeepSpeed's
        ``round_robin_gradients``).
    align: each parameter starts at a multiple of so many elements. pad_to: the total length is padded to a multiple of so many.
    bounds: the ``n + 1`` cut points, from 0 to the padded length; None: the padded length in ``n`` equal ranges (rounded up).
    each: every parameter is cut by itself into ``n`` ranges of ``ceil(numel / n)`` elements, the last ones padded, and the coordinate's
        ranges stand end to end (ZeRO-3's sub-groups); excludes ``bounds``, ``align`` and ``pad_to``.
    label: what to call ``params`` in texts for people.
    """

    params: tuple[str, ...]
    order: Literal["given", "reverse", "round_robin"] = "given"
    align: int = 1
    pad_to: int = 1
    bounds: tuple[int, ...] | None = None
    each: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        _ints("FlatBuffer(align)", (self.align,), 1)
        _ints("FlatBuffer(pad_to)", (self.pad_to,), 1)
        _check_bounds("FlatBuffer(partition)", self.bounds)
        if self.order not in ("given", "reverse", "round_robin"):
            raise LayoutError(f"FlatBuffer(order): found {self.order!r}, expected 'given', 'reverse' or 'round_robin'")
        if self.each and (self.bounds is not None or self.align != 1 or self.pad_to != 1):
            raise LayoutError("FlatBuffer(partition=each): align and pad_to have no meaning with it")
        if len(set(self.params)) != len(self.params):
            twice = sorted({name for name in self.params if self.params.count(name) > 1})[:3]
            raise LayoutError(f"FlatBuffer(params): {', '.join(twice)} stands in it twice; each parameter has one place in the buffer")

    def __str__(self) -> str:
        text = f"FlatBuffer({self.label or f'{len(self.params)} params'}"
        if self.order != "given":
            text += f", order={self.order}"
        if self.align != 1:
            text += f", align={self.align}"
        if self.pad_to != 1:
            text += f", pad_to={self.pad_to}"
        if self.each:
            text += ", partition=each"
        if self.bounds is not None:
            text += f", partition={_show(self.bounds)}"
        return text + ")"


@dataclass(frozen=True, slots=True)
class Pad:
    """Stored longer along ``dim`` than the logical tensor, ``to`` elements in all. The paper's StripPad.

    The extra elements come last, belong to no global tensor, are not saved, and are filled with 0 by a load.
    size: the logical length; needed where the global shape has to be worked out from the local one.
    """

    dim: int
    to: int
    size: int | None = None

    def __post_init__(self) -> None:
        _ints("Pad(to)", (self.to,))
        if self.size is not None:
            _ints("Pad(size)", (self.size,))

    def __str__(self) -> str:
        return f"Pad({self.dim}, to={self.to}" + (f", size={self.size})" if self.size is not None else ")")


@dataclass(frozen=True, slots=True)
class Stack:
    """This array is element ``index`` of a stacked global tensor (grouped experts, stacked layers), which has ``dim`` one time more.

    index: one integer: the local array has no such dimension. A tuple: it has, and holds these elements in this order (``keep``).
    size: number of elements along ``dim``; needed where the global shape has to be worked out from the local one.
    """

    dim: int
    index: tuple[int, ...]
    size: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        _ints("Stack(index)", self.index)
        if not self.keep and len(self.index) != 1:
            raise LayoutError(f"Stack(index): found {len(self.index)} numbers, expected one")
        if len(set(self.index)) != len(self.index):
            raise LayoutError(f"Stack(index): found {list(self.index)}, expected no element twice")
        if self.size is not None:
            _ints("Stack(size)", (self.size,))
            if self.index and max(self.index) >= self.size:
                raise LayoutError(f"Stack(index): found element {max(self.index)}, expected less than size={self.size}")

    def __str__(self) -> str:
        index = _show(self.index) if self.keep else self.index[0]
        return f"Stack({self.dim}, index={index}" + (f", size={self.size})" if self.size is not None else ")")


@dataclass(frozen=True, slots=True)
class Permute:
    """The array is held with its dimensions in another order: local dimension ``j`` is dimension ``dims[j]`` of the array before."""

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.dims) != list(range(len(self.dims))):
            raise LayoutError(f"Permute(dims): found {list(self.dims)}, expected each of 0 .. {len(self.dims) - 1} once")

    def __str__(self) -> str:
        return f"Permute({list(self.dims)})"


Pattern: TypeAlias = Replicate | Unique | Shard | Average | Flat | FlatBuffer | Pad | Stack | Permute
"""Any pattern."""


def _check_bounds(name: str, bounds: tuple[int, ...] | None) -> None:
    if bounds is None:
        return
    _ints(name, bounds)
    if len(bounds) < 2 or bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
        raise LayoutError(f"{name}: found {list(bounds)}, expected cut points that ascend from 0")
