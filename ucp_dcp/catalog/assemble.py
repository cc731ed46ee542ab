"""Ready columns, in any order of tensors, to the sorted and typed columns of a catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..geometry.ragged import coords_start, ragged_arange
from .codec import check_files, check_groups, check_objects
from .columns import ChunkColumns, Int64Array, TensorColumns, check_chunk_columns, check_tensor_columns
from .rows import FileRow, ObjectRow, PathTuple

__all__ = ["ColumnArguments", "assemble"]

N = TypeVar("N", bound=np.generic)


class ColumnArguments(TypedDict):
    """Arguments of ``Catalog.from_columns``; names, types and lengths are those of ``docs/format.md``, for T tensors and C chunks.

    Attributes:
        keys, roles, fqns, states: (T,); ``states`` are names, "" for none.
        dtypes: (T,) dtype codes.
        shape_start, shape: (T + 1,), (sum of ndim,).
        chunk_start: (T + 1,).
        coords: per chunk ndim offsets, then ndim sizes, end to end.
        files: what ``chunk_file`` counts.
        chunk_file, chunk_offset: (C,).
        chunk_dtype: (C,) codes; absent or None: the tensor's.
        strided, strides: (T,) flags and element strides of the flagged tensors' chunks end to end; absent: C order.
        chunk_group: (C,) index into ``groups``, -1 for none.
        paths: (T,) nesting path, None for ``(key,)``.
        pattern: (T,) index into ``patterns``, -1 for none.
    """

    keys: Sequence[str]
    roles: Sequence[int] | NDArray[Any]
    fqns: Sequence[str]
    states: Sequence[str]
    dtypes: Sequence[int] | NDArray[Any]
    shape_start: Int64Array
    shape: Int64Array
    chunk_start: Int64Array
    coords: Int64Array
    files: Sequence[FileRow]
    chunk_file: NDArray[Any]
    chunk_offset: Int64Array
    chunk_dtype: NotRequired[NDArray[Any] | None]
    strided: NotRequired[Sequence[int] | NDArray[Any] | None]
    strides: NotRequired[Int64Array | None]
    chunk_group: NotRequired[NDArray[Any] | None]
    groups: NotRequired[Sequence[dict[str, Any]]]
    objects: NotRequired[Sequence[ObjectRow]]
    paths: NotRequired[Sequence[PathTuple | None] | None]
    pattern: NotRequired[Sequence[int] | NDArray[Any] | None]
    patterns: NotRequired[Sequence[dict[str, Any]]]


def assemble(**columns: Unpack[ColumnArguments]) -> tuple[TensorColumns, dict[str, Any]]:
    """Arguments of ``Catalog.from_columns`` -> tensor columns and the decoded sections. Raises FormatError."""
    keys, fqns, states, paths = columns["keys"], columns["fqns"], columns["states"], columns.get("paths")
    files, objects, groups = columns["files"], columns.get("objects", ()), columns.get("groups", ())
    pattern, strided = columns.get("pattern"), columns.get("strided")
    chunk_dtype, strides, chunk_group = columns.get("chunk_dtype"), columns.get("strides"), columns.get("chunk_group")
    t = len(keys)
    named: tuple[tuple[str, Sequence[Any] | None], ...] = (("fqns", fqns), ("states", states), ("paths", paths))
    for what, column in named:
        if column is not None and len(column) != t:
            raise FormatError(f"catalog column {what} has {len(column)} entries, expected {t}")
    for what, texts in (("key", keys), ("fqn", fqns), ("state", states)):
        for kind in set(map(type, texts)):
            if not issubclass(kind, str):
                raise FormatError(f"a tensor has a {what} of type {kind.__name__}, expected a string")
    for key, path in zip(keys, paths or (), strict=False):
        if path is not None and not (path and all(isinstance(part, (str, int)) for part in path)):
            raise FormatError(f"tensor {key!r} has the path {path!r}, expected strings and integers")
    check_files(files, FormatError)
    check_groups(groups, FormatError)
    check_objects(objects, files, FormatError)
    names, codes = _state_codes(states)
    tensors = TensorColumns(
        role=_typed(np.asarray(columns["roles"]), np.uint8, "roles"),
        dtype=_typed(np.asarray(columns["dtypes"]), np.uint8, "dtypes"),
        kind=np.zeros(t, dtype=np.uint8),
        pattern=np.full(t, -1, dtype=np.int32) if pattern is None else _typed(np.asarray(pattern), np.int32, "pattern"),
        shape_start=_typed(np.asarray(columns["shape_start"]), np.int64, "shape_start"),
        shape=_typed(np.asarray(columns["shape"]), np.int64, "shape"),
        chunk_start=_typed(np.asarray(columns["chunk_start"]), np.int64, "chunk_start"),
        strided=None if strided is None else _typed(np.asarray(strided), np.uint8, "strided"),
    )
    chunks = ChunkColumns(
        coords=_typed(np.asarray(columns["coords"]).reshape(-1), np.int64, "coords"),
        file=_typed(np.asarray(columns["chunk_file"]), np.int32, "chunk_file"),
        offset=_typed(np.asarray(columns["chunk_offset"]), np.int64, "chunk_offset"),
        dtype=None if chunk_dtype is None else _typed(np.asarray(chunk_dtype), np.uint8, "chunk_dtype"),
        strides=None if strides is None else _typed(np.asarray(strides).reshape(-1), np.int64, "strides"),
        group=None if chunk_group is None else _typed(np.asarray(chunk_group), np.int32, "chunk_group"),
    )
    if len(tensors.role) != t:
        raise FormatError(f"catalog column roles has {len(tensors.role)} entries, expected {t}")
    check_tensor_columns(tensors, FormatError)
    check_chunk_columns(tensors, chunks, len(files), len(groups), FormatError)
    order = sorted(range(t), key=keys.__getitem__)
    if any(i != j for i, j in enumerate(order)):
        tensors, chunks = _permuted(tensors, chunks, np.asarray(order, dtype=np.int64))
        keys = [keys[i] for i in order]
        fqns = [fqns[i] for i in order]
        codes = codes[np.asarray(order, dtype=np.int64)]
        paths = None if paths is None else [paths[i] for i in order]
    if paths is not None:
        paths = [None if path == (key,) else path for key, path in zip(keys, paths, strict=True)]
        if all(path is None for path in paths):
            paths = None
    for array in (*_arrays(tensors), *_arrays(chunks), codes):
        array.flags.writeable = False
    given = {
        "keys": keys,
        "fqns": fqns,
        "states": (names, codes),
        "paths": paths,
        "files": tuple(files),
        "groups": tuple(groups),
        "patterns": tuple(columns.get("patterns", ())),
        "objects": tuple(_with_path(row) for row in objects),
        "chunks": chunks,
    }
    return tensors, given


def _state_codes(states: Sequence[str]) -> tuple[list[str], NDArray[np.uint16]]:
    numbers: dict[str, int] = {"": 0}
    codes = [numbers.setdefault(state, len(numbers)) for state in states]
    if len(numbers) > 2**16:
        raise FormatError(f"{len(numbers)} distinct state names, expected at most {2**16}")
    return list(numbers), np.asarray(codes, dtype=np.uint16)


def _typed(array: NDArray[Any], kind: type[N], what: str) -> NDArray[N]:
    """A view or copy of the column in its type on disk, never the caller's array. Raises FormatError if values would change."""
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise FormatError(f"catalog column {what} has shape {array.shape} and type {array.dtype}, expected a flat array of integers")
    out = array.astype(kind, copy=False)
    if out is not array and array.size and not bool((out == array).all()):
        raise FormatError(f"catalog column {what} holds numbers that do not fit into {np.dtype(kind)}")
    return np.ascontiguousarray(out).view()


def _arrays(columns: TensorColumns | ChunkColumns) -> list[NDArray[Any]]:
    return [value for name in columns.__slots__ if (value := getattr(columns, name)) is not None]


def _permuted(tensors: TensorColumns, chunks: ChunkColumns, order: Int64Array) -> tuple[TensorColumns, ChunkColumns]:
    """Tensors and their chunks in another order."""
    ndim, count = tensors.ndim, np.diff(tensors.chunk_start)

    def starts(lengths: Int64Array) -> Int64Array:
        out = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=out[1:])
        return out

    def moved(start: Int64Array, length: Int64Array) -> Int64Array:
        return ragged_arange(start[order], length[order])[1]

    chunk = moved(tensors.chunk_start[:-1], count)
    strides = chunks.strides
    if strides is not None and tensors.strided is not None:
        per_tensor = count * ndim * tensors.strided
        strides = strides[moved(starts(per_tensor)[:-1], per_tensor)]
    return (
        TensorColumns(
            role=tensors.role[order],
            dtype=tensors.dtype[order],
            kind=tensors.kind[order],
            pattern=tensors.pattern[order],
            shape_start=starts(ndim[order]),
            shape=tensors.shape[moved(tensors.shape_start[:-1], ndim)],
            chunk_start=starts(count[order]),
            strided=None if tensors.strided is None else tensors.strided[order],
        ),
        ChunkColumns(
            coords=chunks.coords[moved(coords_start(tensors.chunk_start, ndim)[:-1], count * 2 * ndim)],
            file=chunks.file[chunk],
            offset=chunks.offset[chunk],
            dtype=None if chunks.dtype is None else chunks.dtype[chunk],
            strides=strides,
            group=None if chunks.group is None else chunks.group[chunk],
        ),
    )


def _with_path(row: ObjectRow) -> ObjectRow:
    if row.path:
        return row
    return ObjectRow(row.key, row.role, row.fqn, row.state, (row.key,), row.file, row.offset, row.length, row.encoding, row.value)
