"""A Megatron checkpoint as views of the items that lie on disk: other names, per-layer tensors, and boxes of flat buffers.

A view is part of a stored chunk: from which element on, and with which strides. Two kinds cover all of Megatron's formats: a *box* of an
n-d chunk (a layer of a stacked tensor), and a *stretch* of a flat one (the slice of a parameter in an optimizer buffer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...catalog import CatalogBuilder, ObjectRow
from ...dtypes import ITEMSIZE
from ...errors import CorruptCheckpointError, UnsupportedError
from ...geometry import Box, boxes_to_array, c_strides
from ...names import Role, canonical_name
from ..dcp import DcpSource
from ..source import Located, Source

__all__ = ["DIRECT", "MegatronSource", "Place", "Views", "flat_place"]

DIRECT = -1
"""Base chunk of a view whose place in the file is known: its bytes are inside an object, not an item of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a view begins.

    Attributes:
        chunk: of the base catalog, or ``DIRECT``.
        start: element of the chunk, one number per dim of it.
        dims: for each dim of the view the dim of the chunk that it runs along; None: ``strides`` count elements along the last dim.
        strides: of a flat stretch, in elements.
        file, offset, dtype: of a direct view: index of the file, byte of the first element, dtype code.
    """

    chunk: int
    start: tuple[int, ...] = ()
    dims: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    file: int = -1
    offset: int = 0


@dataclass(slots=True)
class _Tensor:
    key: str
    role: Role
    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    pattern: str | None
    boxes: list[Box] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    remainder: bool = False
    """Stored is the low half of an fp32 master, as int16; the high half is the bf16 weight."""


class Views:
    """Tensors and objects that a Megatron checkpoint becomes; ``build`` makes the source."""

    def __init__(self, base: DcpSource) -> None:
        self.base = base
        self.tensors: dict[tuple[Role, str, str], _Tensor] = {}
        self.objects: list[ObjectRow] = []

    def add(
        self, role: Role, fqn: str, state: str, dtype: str, shape: Sequence[int], box: Box, place: Place, *, pattern: str | None = None
    ) -> None:
        """A box of a tensor and where it lies. Every box of a tensor gives its dtype and shape, which must be the same."""
        # Transformer Engine's precision-aware optimizer keeps what rounding took from the master, in the master's place
        remainder = role == Role.MASTER and dtype == "int16"
        dtype = "float32" if remainder else dtype
        own = self.tensors.get((role, fqn, state))
        if own is None:
            key = canonical_name(role, fqn, state, "")
            own = self.tensors[role, fqn, state] = _Tensor(key, role, fqn, state, dtype, tuple(shape), pattern, remainder=remainder)
        if own.dtype != dtype or own.shape != tuple(shape):
            raise UnsupportedError(
                f"{self.base.store.url}: {own.key!r} is stored as {own.dtype} {list(own.shape)} and also as {dtype} {list(shape)}"
            )
        own.boxes.append(box)
        own.places.append(place)

    def has(self, role: Role, fqn: str, state: str = "") -> bool:
        """Whether there is such a tensor by now."""
        return (role, fqn, state) in self.tensors

    def shape(self, role: Role, fqn: str) -> tuple[int, ...]:
        """Shape of a weight, master or buffer."""
        return self.tensors[role, fqn, ""].shape

    def value(self, key: str, value: Any) -> None:
        """A plain value."""
        self.objects.append(ObjectRow(key, fqn=key, path=(key,), value=value))

    def build(self, provenance: Mapping[str, Any], doubt: str) -> MegatronSource:
        """The source of everything that was added."""
        base, out = self.base.catalog, CatalogBuilder()
        for row in base.files:
            out.add_file(row.path, row.size, row.blocks)
        halves = {fqn: out.add_group("bf16_remainder") for fqn in sorted(t.fqn for t in self.tensors.values() if t.remainder)}
        for fqn in halves:
            weight = self.tensors.get((Role.WEIGHT, fqn, ""))
            if weight is None or weight.dtype != "bfloat16" or weight.shape != self.tensors[Role.MASTER, fqn, ""].shape:
                instead = "none" if weight is None else f"{weight.dtype} {list(weight.shape)}"
                raise CorruptCheckpointError(
                    f"{self.base.store.url}: of the master of {fqn!r} only the remainder is stored; its bfloat16 weight is needed, "
                    f"found {instead}"
                )
        places: list[Place] = []
        for own in sorted(self.tensors.values(), key=lambda t: t.key):
            handle = out.add_tensor(
                key=own.key,
                role=own.role,
                fqn=own.fqn,
                state=own.state,
                dtype=own.dtype,
                shape=own.shape,
                pattern=-1 if own.pattern is None else out.add_pattern({"text": own.pattern}),
            )
            file, offset = [], []
            for place in own.places:
                direct = place.chunk == DIRECT
                file.append(place.file if direct else int(base.chunk_file[place.chunk]))
                # of an item the catalog says where it begins, and only `locate` where its elements are
                offset.append(place.offset if direct else int(base.chunk_offset[place.chunk]))
            out.add_chunks(
                handle,
                boxes_to_array(own.boxes, len(own.shape)),
                np.asarray(file, np.int32),
                np.asarray(offset, np.int64),
                dtype="int16" if own.remainder else None,
                group=halves[own.fqn] if own.remainder else None,
            )
            places.extend(own.places)
        for found in self.objects:
            out.add_object(found)
        return MegatronSource(self.base, out, places, provenance, doubt)


class MegatronSource(Source):
    """A torch_dist checkpoint of megatron-core: global tensors per layer and per expert. Pickles when its store does.

    Attributes:
        base: the stock DCP checkpoint below, with Megatron's own keys.
        side_files: files of the checkpoint that hold no tensors.
    """

    def __init__(self, base: DcpSource, out: CatalogBuilder, places: Sequence[Place], provenance: Mapping[str, Any], doubt: str) -> None:
        super().__init__(out.build(), base.store, "megatron_core", provenance)
        self.base = base
        self.doubt = doubt
        self.side_files: set[str] = set()
        self._places = list(places)

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Where these chunks lie (:meth:`Source.locate`)."""
        chunks = np.asarray(chunks, dtype=np.int64)
        places = [self._places[c] for c in chunks.tolist()]
        stored = [i for i, place in enumerate(places) if place.chunk != DIRECT]
        found = self.base.locate(np.asarray([places[i].chunk for i in stored], dtype=np.int64))
        # what lies inside an object has C order and the tensor's own dtype, as the catalog says
        file = self.catalog.chunk_file[chunks].astype(np.int32)
        offset = self.catalog.chunk_offset[chunks].astype(np.int64)
        dtype = np.asarray(self.catalog.tensor_dtype, np.uint8)[self.catalog.tensor_of(chunks)].copy()
        strides: list[tuple[int, ...]] = [place.strides for place in places]
        for n, i in enumerate(stored):
            place, own = places[i], found.strides[n]
            file[i], dtype[i] = found.file[n], found.dtype[n]
            at = sum(a * b for a, b in zip(place.start, own, strict=True))
            offset[i] = int(found.offset[n]) + at * ITEMSIZE[int(found.dtype[n])]
            if place.dims is not None:
                strides[i] = tuple(own[d] for d in place.dims)
            elif own[-1] != 1:
                raise UnsupportedError(f"{self.store.url}: a flat optimizer buffer is stored with stride {own[-1]}, expected 1")
        return Located(file, offset, strides, dtype)


def flat_place(chunk: int, ndim: int, start: int, shape: Sequence[int]) -> Place:
    """A stretch of a chunk of ``ndim`` dims, from element ``start`` of the last one, that is laid out as an array of ``shape``."""
    return Place(chunk, (*(0,) * (ndim - 1), start), None, c_strides(shape))
