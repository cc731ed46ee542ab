"""Reading a box of a stored tensor, and the comparison of a master with the weight: both copies of a parameter must say the same.

A parser that knows of a fault of its format's writers sets ``Source.doubt``. Then a load compares, before it touches any destination, the
masters of the boxes it is about to load with the weights there: nothing else is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..catalog import Catalog, TensorRow
from ..dtypes import is_floating, torch_dtype
from ..errors import CorruptCheckpointError
from ..formats import Source
from ..geometry import Box, boxes_to_array, intersect_pairs
from ..names import Role
from ..spec.names import NameGlob
from ..transfer import Copy, Digests, ReadStats, Verify, read_copies
from .stored import check_covered, check_groups

__all__ = ["SLAB", "AllowInconsistent", "Comparison", "Doubts", "comparable", "compare", "read_box", "refuse", "states_of"]

AllowInconsistent = bool | Sequence[str]
"""True, or names (globs over fqns) of parameters whose optimizer state is taken as it is."""
SLAB = 1 << 22
"""Elements compared at a time."""
_SHOWN = 100
_GAP = 4096
_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_box(
    source: Source,
    row: TensorRow,
    box: Box,
    out: torch.Tensor,
    *,
    verify: Verify = "covered",
    digests: Digests | None = None,
    stats: ReadStats | None = None,
) -> None:
    """Read a box of a tensor into ``out``; the halves of a master are combined. Raises CoverageError, UnsupportedError, StoreError,
    CorruptCheckpointError.
    """
    if box.empty:
        return
    if is_halved(source.catalog, row):
        weight = source.catalog.find_named(Role.WEIGHT, row.fqn, "")
        if weight is None:
            raise CorruptCheckpointError(f"{row.key!r}: its high half, the bfloat16 weight of {row.fqn!r}, is not there")
        for part in slabs(box, SLAB):
            high = torch.empty(part.size, dtype=torch.bfloat16)
            low = torch.empty(part.size, dtype=torch.int16)
            _read_raw(source, source.catalog.tensor(weight), part, high, verify, digests, stats)
            _read_raw(source, row, part, low, verify, digests, stats)
            view = out
            for dim, (a, n, b) in enumerate(zip(part.offset, part.size, box.offset, strict=True)):
                view = view.narrow(dim, a - b, n)
            view.copy_(join_halves(high, low))
        return
    check_groups(row.key, row.index, source.catalog)
    _read_raw(source, row, box, out, verify, digests, stats)


def is_halved(catalog: Catalog, row: TensorRow) -> bool:
    """Whether a tensor is stored as the remainder of its weight (``bf16_remainder``)."""
    if not catalog.groups:
        return False
    groups = catalog.groups_of(row.index)
    return bool(len(groups)) and int(groups[0]) >= 0 and catalog.groups[int(groups[0])]["op"] == "bf16_remainder"


def join_halves(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and an int16 remainder: fp32 bits = ((weight bits - (remainder < 0)) << 16) | remainder.

    The weight is the master rounded by its remainder: a negative one means that it was rounded up. Source: Transformer Engine,
    ``multi_tensor/adam.cu``.
    """
    low = remainder.to(torch.int32)
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def _read_raw(
    source: Source, row: TensorRow, box: Box, out: torch.Tensor, verify: Verify, digests: Digests | None, stats: ReadStats | None
) -> None:
    catalog = source.catalog
    ndim = len(row.shape)
    boxes = catalog.boxes(row.index)
    want, chunk, parts = intersect_pairs(boxes_to_array([box], ndim), boxes)
    check_covered(row.key, row.key, [box], want, chunk, parts)
    first = catalog.chunk_range(row.index)[0]
    copies = []
    for h, stored, (offset, size) in zip(chunk.tolist(), boxes[chunk, 0].tolist(), parts.tolist(), strict=True):
        view = out
        for dim in range(ndim):
            if size[dim] != view.shape[dim]:
                view = view.narrow(dim, offset[dim] - box.offset[dim], size[dim])
        copies.append(Copy(first + h, tuple(o - s for o, s in zip(offset, stored, strict=True)), view))
    read_copies(source, copies, gap=_GAP, verify=verify, digests=digests, stats=stats)


@dataclass(frozen=True, slots=True)
class Comparison:
    """differing: elements whose rounded master is not the weight; first: the first of them; constant: all weights looked at are equal."""

    differing: int
    first: tuple[int, ...] | None
    constant: bool


def comparable(dtype: str) -> bool:
    """Whether a master is rounded to this dtype by a cast alone: fp8 and fp4 weights have scales beside them."""
    return is_floating(dtype) and not dtype.startswith(("float8", "float4"))


def compare(
    source: Source,
    master: TensorRow,
    weight: TensorRow,
    box: Box,
    *,
    slab: int = SLAB,
    verify: Verify = "covered",
    digests: Digests | None = None,
    stats: ReadStats | None = None,
) -> Comparison:
    """Compare a box of a master with the weight, ``slab`` elements at a time: bits, after rounding to nearest even; NaN equals NaN."""
    differing, constant = 0, True
    first: tuple[int, ...] | None = None
    level: torch.Tensor | None = None
    for part in slabs(box, slab):
        low = torch.empty(part.size, dtype=torch_dtype(weight.dtype))
        high = torch.empty(part.size, dtype=torch_dtype(master.dtype))
        read_box(source, weight, part, low, verify=verify, digests=digests, stats=stats)
        read_box(source, master, part, high, verify=verify, digests=digests, stats=stats)
        rounded = high.to(low.dtype)
        wrong = (_bits(low) != _bits(rounded)) & ~(torch.isnan(low) & torch.isnan(rounded))
        count = int(wrong.sum())
        if count and first is None:
            place = wrong.nonzero()[0].tolist()[: len(part.size)]
            first = tuple(o + int(i) for o, i in zip(part.offset, place, strict=True))
        differing += count
        level = low.reshape(-1)[:1].clone() if level is None else level
        constant = constant and bool((_bits(low.reshape(-1)) == _bits(level)).all())
    return Comparison(differing, first, constant)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return tensor.contiguous().view(_INT[tensor.element_size()])


def slabs(box: Box, limit: int) -> Iterator[Box]:
    """A box in boxes of at most ``limit`` elements, in C order."""
    if box.numel <= limit or not box.size:
        yield box
        return
    inner = prod(box.size[1:])
    step = max(1, limit // max(1, inner))
    for begin in range(0, box.size[0], step):
        count = min(step, box.size[0] - begin)
        head = Box((box.offset[0] + begin, *box.offset[1:]), (count, *box.size[1:]))
        if head.numel <= limit:
            yield head
        else:
            for rest in slabs(Box(box.offset[1:], box.size[1:]), limit):
                yield Box((head.offset[0], *rest.offset), (1, *rest.size))


def states_of(catalog: Catalog) -> dict[str, list[str]]:
    """Parameter -> the optimizer state stored for it, its master among it."""
    found: dict[str, list[str]] = {}
    for row in catalog.tensors():
        if row.role in (Role.MASTER, Role.STATE):
            found.setdefault(row.fqn, []).append("master" if row.role == Role.MASTER else row.state)
    return found


class Doubts:
    """The parameters of one load, or of an open checkpoint, whose optimizer state is compared before it is used.

    broken: parameter -> what was found. unproven: parameters for which the comparison tells nothing (constant values, no second copy).
    """

    def __init__(self, source: Source, allow: AllowInconsistent) -> None:
        self.source = source
        self.active = bool(source.doubt) and allow is not True
        self._allowed = [] if isinstance(allow, bool) else [NameGlob(name) for name in allow]
        self._done: set[tuple[str, Box]] = set()
        self.broken: dict[str, str] = {}
        self.unproven: set[str] = set()

    def allowed(self, fqn: str) -> bool:
        """Whether the caller takes this parameter's state as it is."""
        return any(glob.match(fqn) is not None for glob in self._allowed)

    def look(
        self,
        row: TensorRow,
        boxes: Sequence[Box],
        *,
        verify: Verify = "covered",
        digests: Digests | None = None,
        stats: ReadStats | None = None,
    ) -> None:
        """Compare the master with the weight in these boxes of a master or state; boxes that were compared before are not read again."""
        if not self.active or row.role not in (Role.MASTER, Role.STATE) or self.allowed(row.fqn):
            return
        catalog = self.source.catalog
        found = [catalog.find_named(role, row.fqn, "") for role in (Role.MASTER, Role.WEIGHT)]
        if found[0] is None or found[1] is None:
            self.unproven.add(row.fqn)
            return
        master, weight = catalog.tensor(found[0]), catalog.tensor(found[1])
        halved = is_halved(catalog, master)  # the weight is part of such a master
        if (
            halved
            or master.shape != weight.shape
            or row.shape != master.shape
            or not (comparable(master.dtype) and comparable(weight.dtype))
        ):
            self.unproven.add(row.fqn)
            return
        constant = True
        for box in boxes:
            if box.empty or (row.fqn, box) in self._done:
                constant = constant and (box.empty or row.fqn in self.unproven)
                continue
            self._done.add((row.fqn, box))
            result = compare(self.source, master, weight, box, verify=verify, digests=digests, stats=stats)
            constant = constant and result.constant
            if result.differing and row.fqn not in self.broken:
                share = f"{result.differing:,} of {box.numel:,} elements looked at"
                self.broken[row.fqn] = f"{share}, the first at {list(result.first or ())}"
        if constant and row.fqn not in self.broken:
            self.unproven.add(row.fqn)

    def check(self) -> None:
        """Raise when something was found."""
        refuse(self.source, self.broken)


def refuse(source: Source, broken: Mapping[str, str]) -> None:
    """Raise CorruptCheckpointError that names every broken parameter with its states; nothing when there is none."""
    if not broken:
        return
    states = states_of(source.catalog)
    lines = [f"{fqn} ({', '.join(states.get(fqn, ()))}): {what}" for fqn, what in sorted(broken.items())]
    more = f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise CorruptCheckpointError(
        f"{source.store.url}: the optimizer state of {len(broken)} parameters is wrong in the file: their masters, rounded, are not the "
        f"weights, so their moments cannot be trusted either. {source.doubt}. Nothing was loaded. Load only the model (the weights are not "
        "affected), or take the state as it is with allow_inconsistent=True or =[names]:\n  " + "\n  ".join(lines[:_SHOWN]) + more
    )
