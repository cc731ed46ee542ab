"""What a rank tells the coordinator at save, in columns (design decision D2).

A rank sends one :class:`KeyTable` blob (names, dtypes, global shapes: equal on most ranks, so the coordinator parses each distinct blob
once) and numpy columns with one row per fragment. No object per fragment crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..layout import Fragment

__all__ = ["I64", "KeyRow", "LocalPlan", "ObjectEntry", "digest_columns", "pack_local", "parse_table"]

I64 = npt.NDArray[np.int64]


# gc=False: Python need not look into these for garbage; they hold texts, numbers and tuples of them, never each other.


class KeyRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One global tensor as a rank knows it: everything but its boxes."""

    key: str
    role: int
    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    pattern: str
    path: tuple[str | int, ...]


class ObjectEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One non-tensor value of a rank. ``digest`` is of the value, ``length`` of its serialised bytes."""

    key: str
    path: tuple[str | int, ...]
    digest: bytes
    length: int
    per_rank: bool


_encode = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(list[KeyRow]).decode
_decode_objects = msgspec.msgpack.Decoder(list[ObjectEntry]).decode


@dataclass(frozen=True)
class LocalPlan:
    """The columns of one rank. F fragments in (key, box) order.

    table: msgpack of the rank's KeyRows, sorted by key. key: (F,) int32 row of the table. coords: flat int64, per fragment
    offsets then sizes. digest: (F,) uint64, content digest of fragments that may be replicas; has_digest: (F,) bool. objects: msgpack.
    tied: (K, 2) int32, table rows (tensor, another one that is the very same memory on this rank).
    """

    table: bytes
    key: npt.NDArray[np.int32]
    coords: I64
    digest: npt.NDArray[np.uint64]
    has_digest: npt.NDArray[np.bool_]
    objects: bytes
    tied: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int32))

    def object_entries(self) -> list[ObjectEntry]:
        """The object rows, decoded."""
        return _decode_objects(self.objects)


def parse_table(blob: bytes) -> list[KeyRow]:
    """Decode a table blob."""
    return _decode_table(blob)


def digest_columns(digests: Sequence[int | None]) -> dict[str, Any]:
    """The columns ``digest`` and ``has_digest`` of a :class:`LocalPlan`."""
    return {
        "digest": np.asarray([d or 0 for d in digests], dtype=np.uint64),
        "has_digest": np.asarray([d is not None for d in digests], dtype=np.bool_),
    }


def pack_local(
    rows: Sequence[KeyRow],
    fragments: Sequence[Fragment],
    key_index: Sequence[int],
    digests: Sequence[int | None],
    objects: Sequence[ObjectEntry],
    tied: Sequence[tuple[int, int]] = (),
) -> LocalPlan:
    """Columns of one rank from its fragments, which are in (key, box) order; ``key_index[i]`` is the row of fragment i."""
    flat: list[int] = []
    for fragment in fragments:
        flat.extend(fragment.box.offset)
        flat.extend(fragment.box.size)
    return LocalPlan(
        table=_encode(list(rows)),
        key=np.asarray(key_index, dtype=np.int32),
        coords=np.asarray(flat, dtype=np.int64),
        **digest_columns(digests),
        objects=_encode(list(objects)),
        tied=np.asarray(list(tied), dtype=np.int32).reshape(-1, 2),
    )
