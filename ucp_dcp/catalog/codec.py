"""Sections of ``docs/format.md`` <-> values: plain arrays, and msgpack for names, files, objects and patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptCheckpointError, FormatError, UnsupportedError
from ..names import Role
from ..paths import checked_path
from .rows import FileRow, ObjectRow, PathTuple

__all__ = [
    "GROUP_OPS",
    "check_files",
    "check_groups",
    "check_objects",
    "decode_array",
    "decode_msgpack",
    "decode_objects",
    "encode_array",
    "encode_msgpack",
    "encode_objects",
    "file_blocks",
]

GROUP_OPS = ("copy", "mean", "bf16_remainder")
"""How the chunks of one group are combined."""

T = TypeVar("T")
S = TypeVar("S", bound=np.generic)


def decode_array(name: str, data: memoryview, dtype: np.dtype[S]) -> NDArray[S]:
    """A section as a read-only array that shares its memory. Raises CorruptCheckpointError for a length that is no multiple of the item."""
    data = data.cast("B") if data.format != "B" or data.ndim != 1 else data
    if data.nbytes % dtype.itemsize:
        raise CorruptCheckpointError(f"index section {name} has {data.nbytes} bytes, not a multiple of {dtype.itemsize}")
    if data.nbytes == 0:
        return np.empty(0, dtype=dtype)
    array = np.frombuffer(data, dtype=dtype)
    array.flags.writeable = False
    return array


def encode_array(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes | memoryview:
    """The little-endian bytes of a column, without a copy where it already is of that type."""
    if array.size == 0:
        return b""
    data: memoryview = np.ascontiguousarray(array, dtype=dtype).data
    return data.cast("B")


def decode_msgpack(name: str, data: memoryview, kind: type[T]) -> T:
    """A msgpack section of a known type. Raises CorruptCheckpointError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CorruptCheckpointError(f"index section {name} is damaged: {error}") from error


def encode_msgpack(name: str, value: Any) -> bytes:
    """The msgpack bytes of a section. Raises FormatError for text that is not valid Unicode or numbers beyond 64 bits."""
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"cannot write index section {name}: {error}") from error


MIN_BLOCK, MAX_BLOCK = 4096, 1 << 30
_HEX = re.compile("[0-9a-f]{32}")


def file_blocks(rows: Sequence[FileRow]) -> list[list[Any] | None]:
    """The section ``file.blocks``: for each file nil or [path of the sidecar, bytes of a block, digest of the sidecar]."""
    return [None if row.blocks is None else [row.blocks.path, row.blocks.size, row.blocks.xxh3] for row in rows]


def check_files(rows: Sequence[FileRow], error: type[FormatError]) -> None:
    """Paths stay inside the checkpoint, sizes are possible. A path may be named once only."""
    seen: set[str] = set()
    for row in rows:
        try:
            checked_path(row.path)
        except FormatError as cause:
            raise error(f"file table: {cause}") from cause
        if not 0 <= row.size < 2**63:
            raise error(f"file {row.path!r} has size {row.size}, expected 0 to 2**63 - 1")
        if row.path in seen:
            raise error(f"file {row.path!r} is listed twice")
        seen.add(row.path)
        if row.blocks is not None:
            try:
                checked_path(row.blocks.path)
            except FormatError as cause:
                raise error(f"digests of file {row.path!r}: {cause}") from cause
            if not MIN_BLOCK <= row.blocks.size <= MAX_BLOCK or row.blocks.size & (row.blocks.size - 1):
                raise error(f"file {row.path!r} has digests of blocks of {row.blocks.size} bytes, expected a power of two, 4096 to 2**30")
            if not _HEX.fullmatch(row.blocks.xxh3):
                raise error(f"file {row.path!r}: the digest of its sidecar is {row.blocks.xxh3!r:.80}, expected 32 lower-case hex digits")


def check_groups(groups: Sequence[dict[str, Any]], error: type[FormatError]) -> None:
    """Every group has a known combine op; another one is UnsupportedError."""
    for i, group in enumerate(groups):
        op = group.get("op")
        if not isinstance(op, str):
            raise error(f"group {i} has op {op!r}, expected one of {', '.join(GROUP_OPS)}")
        if op not in GROUP_OPS:
            raise UnsupportedError(f"group {i} is combined by {op!r}, which this version does not know; it knows {', '.join(GROUP_OPS)}")


def check_objects(rows: Sequence[ObjectRow], files: Sequence[FileRow], error: type[FormatError]) -> None:
    """Encodings are known, bytes lie inside their files, no key is used twice."""
    seen: set[str] = set()
    for row in rows:
        if row.key in seen:
            raise error(f"object {row.key!r} is listed twice")
        seen.add(row.key)
        if row.encoding == "inline":
            if row.file != -1:
                raise error(f"object {row.key!r} is inline but names file {row.file}, expected -1")
        elif row.encoding == "torch_save":
            if not 0 <= row.file < len(files):
                raise error(f"object {row.key!r} lies in file {row.file}, expected 0 to {len(files) - 1}")
            size = files[row.file].size
            if row.offset < 0 or row.length < 0 or row.offset + row.length > size:
                raise error(
                    f"object {row.key!r} claims {row.length} bytes at byte {row.offset} of {files[row.file].path!r}, which has {size} bytes"
                )
        else:
            raise UnsupportedError(f"object {row.key!r} has encoding {row.encoding!r}, which this version does not know")


class _Object(msgspec.Struct):
    """An entry of the section ``objects``; fields that a later version adds are ignored."""

    key: str
    role: int
    fqn: str
    state: str
    path: list[str | int]
    file: int
    offset: int
    length: int
    encoding: str
    value: Any = None


def decode_objects(data: memoryview) -> tuple[ObjectRow, ...]:
    """The section ``objects``; call ``check_objects`` on the result."""
    rows = []
    for o in decode_msgpack("objects", data, list[_Object]):
        if not 0 <= o.role < len(Role):
            raise CorruptCheckpointError(f"object {o.key!r} has role {o.role}, expected 0 to {len(Role) - 1}")
        path: PathTuple = tuple(o.path)
        # An encoding that is neither is refused by check_objects, by name.
        rows.append(ObjectRow(o.key, Role(o.role), o.fqn, o.state, path, o.file, o.offset, o.length, o.encoding, o.value))  # type: ignore[arg-type]
    return tuple(rows)


def encode_objects(rows: Sequence[ObjectRow]) -> bytes:
    """The section ``objects``. Raises FormatError for an inline value that would not come back as it is."""
    out = []
    for row in rows:
        found = _not_plain(row.value)
        if found is not None:
            raise FormatError(
                f"object {row.key!r} has an inline value with a {found}, which the index cannot hold; store it with encoding 'torch_save'"
            )
        out.append(
            {
                "key": row.key,
                "role": int(row.role),
                "fqn": row.fqn,
                "state": row.state,
                "path": list(row.path),
                "file": row.file,
                "offset": row.offset,
                "length": row.length,
                "encoding": row.encoding,
                "value": row.value,
            }
        )
    return encode_msgpack("objects", out)


def _not_plain(value: Any, depth: int = 0) -> str | None:
    """What in a value msgpack would change or refuse; None when it comes back equal and of the same types."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return None
    if kind is int:
        return None if -(2**63) <= value < 2**64 else "integer beyond 64 bits"
    if depth > 100:
        return "nesting of more than 100 levels"
    if kind is list:
        return next((found for item in value if (found := _not_plain(item, depth + 1)) is not None), None)
    if kind is dict:
        for key, item in value.items():
            if type(key) not in (str, int):
                return f"dict key of type {type(key).__name__}"
            found = _not_plain(key) or _not_plain(item, depth + 1)
            if found is not None:
                return found
        return None
    return kind.__name__
