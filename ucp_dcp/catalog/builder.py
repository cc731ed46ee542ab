"""Building a catalog tensor by tensor: what a parser of a foreign checkpoint does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..dtypes import CODES, code_of
from ..errors import FormatError
from ..names import Role
from .catalog import Catalog
from .codec import check_groups
from .columns import Int64Array
from .rows import FileBlocks, FileRow, ObjectRow, PathTuple

__all__ = ["CatalogBuilder"]


class _Chunks:
    """What one call of ``add_chunks`` gave."""

    __slots__ = ("boxes", "dtype", "file", "group", "offset", "strides")

    def __init__(
        self,
        boxes: Int64Array,
        file: NDArray[np.int32],
        offset: Int64Array,
        strides: Int64Array | None,
        dtype: NDArray[np.uint8] | None,
        group: NDArray[np.int32] | None,
    ) -> None:
        self.boxes = boxes
        self.file = file
        self.offset = offset
        self.strides = strides
        self.dtype = dtype
        self.group = group


class CatalogBuilder:
    """Collects files, tensors, chunks and objects in any order; ``build`` sorts them by key, checks them and makes the catalog.

    Every method raises FormatError for what can be seen to be wrong at once.
    """

    def __init__(self) -> None:
        self._files: list[FileRow] = []
        self._file_index: dict[str, int] = {}
        self._patterns: list[dict[str, Any]] = []
        self._pattern_index: dict[bytes, int] = {}
        self._groups: list[dict[str, Any]] = []
        self._objects: list[ObjectRow] = []
        self._keys: list[str] = []
        self._roles: list[int] = []
        self._fqns: list[str] = []
        self._states: list[str] = []
        self._dtypes: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self._paths: list[PathTuple | None] = []
        self._pattern: list[int] = []
        self._chunks: list[list[_Chunks]] = []

    def add_file(self, path: str, size: int, blocks: FileBlocks | None = None) -> int:
        """Index of a file (path relative to the root, size in bytes, where its digests are); the same path gives the same index."""
        found = self._file_index.get(path)
        if found is not None:
            if self._files[found].size != size:
                raise FormatError(f"file {path!r} has {self._files[found].size} bytes and also {size} bytes")
            return found
        self._file_index[path] = len(self._files)
        self._files.append(FileRow(path, int(size), blocks))
        return len(self._files) - 1

    def add_pattern(self, pattern: dict[str, Any]) -> int:
        """Index of a pattern, ``{"text": ..., ...}`` of plain values; an equal one gives the same index."""
        if not isinstance(pattern.get("text"), str):
            raise FormatError(f"a pattern needs a text, found {pattern!r}")
        encoded = msgspec.msgpack.encode(pattern)
        found = self._pattern_index.setdefault(encoded, len(self._patterns))
        if found == len(self._patterns):
            self._patterns.append(dict(pattern))
        return found

    def add_group(self, op: str) -> int:
        """A new group of chunks that are combined by ``op``: "copy", "mean" or "bf16_remainder". Raises UnsupportedError for another."""
        group = {"op": op}
        check_groups([group], FormatError)
        self._groups.append(group)
        return len(self._groups) - 1

    def add_tensor(
        self,
        *,
        key: str,
        role: Role,
        fqn: str,
        state: str = "",
        dtype: Any,
        shape: Sequence[int],
        path: PathTuple | None = None,
        pattern: int = -1,
    ) -> int:
        """Add a global tensor; returns a handle for ``add_chunks``. ``dtype`` is a name or a torch dtype, another is UnsupportedError."""
        sizes = tuple(int(n) for n in shape)
        if any(n < 0 or n >= 2**63 for n in sizes):
            raise FormatError(f"tensor {key!r} has shape {sizes}, expected sizes from 0 to 2**63 - 1")
        if not -1 <= pattern < len(self._patterns):
            raise FormatError(f"tensor {key!r} has pattern {pattern}, expected -1 to {len(self._patterns) - 1}")
        self._keys.append(key)
        self._roles.append(int(role))
        self._fqns.append(fqn)
        self._states.append(state)
        self._dtypes.append(CODES[dtype] if dtype in CODES else code_of(dtype))
        self._shapes.append(sizes)
        self._paths.append(path)
        self._pattern.append(pattern)
        self._chunks.append([])
        return len(self._keys) - 1

    def add_chunks(
        self,
        handle: int,
        boxes: NDArray[Any],
        file: int | NDArray[Any],
        offset: int | NDArray[Any] | Sequence[int],
        strides: NDArray[Any] | None = None,
        dtype: Any = None,
        group: int | NDArray[Any] | None = None,
    ) -> None:
        """Add k chunks of a tensor.

        Args:
            handle: of ``add_tensor``.
            boxes: (k, 2, ndim) offsets and sizes.
            file: index of ``add_file``, one for all or (k,).
            offset: byte of the first element in the file, one for all or (k,).
            strides: (k, ndim) element strides; None for C order of each box.
            dtype: stored dtype where it is not the tensor's: a name, a torch dtype, or (k,) codes.
            group: index of ``add_group``, one for all or (k,); None or -1 for none.
        """
        key, n = self._keys[handle], len(self._shapes[handle])
        boxes = _integers(boxes, f"boxes of tensor {key!r}")
        if boxes.ndim != 3 or boxes.shape[1:] != (2, n):
            raise FormatError(f"tensor {key!r} of {n} dims got boxes of shape {boxes.shape}, expected (k, 2, {n})")
        k = len(boxes)

        def column(value: Any, kind: type[Any], what: str) -> NDArray[Any]:
            array = _integers(value, f"{what} of tensor {key!r}")
            limits = np.iinfo(kind)
            if array.shape not in ((), (k,)) or (array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max)):
                raise FormatError(f"tensor {key!r}: {what} must be one number or {k} of them, from {limits.min} to {limits.max}")
            return np.broadcast_to(array.astype(kind), (k,))

        if strides is not None:
            strides = _integers(strides, f"strides of tensor {key!r}")
            if strides.shape != (k, n):
                raise FormatError(f"tensor {key!r} got strides of shape {strides.shape}, expected {(k, n)}")
        codes = None if dtype is None else column(dtype if isinstance(dtype, np.ndarray) else code_of(dtype), np.uint8, "dtype")
        self._chunks[handle].append(
            _Chunks(
                boxes,
                column(file, np.int32, "file"),
                column(offset, np.int64, "offset"),
                strides,
                codes,
                None if group is None else column(group, np.int32, "group"),
            )
        )

    def add_object(self, row: ObjectRow) -> None:
        """Add something that is not a tensor."""
        self._objects.append(row)

    def build(self) -> Catalog:
        """The catalog. Raises FormatError: duplicate keys, boxes outside their shape, bytes outside their file, unsafe paths."""
        flat = [(t, part) for t, parts in enumerate(self._chunks) for part in parts]
        any_dtype = any(part.dtype is not None for _, part in flat)
        any_group = any(part.group is not None for _, part in flat)
        strided = np.asarray([any(p.strides is not None for p in parts) for parts in self._chunks], dtype=np.uint8)
        dtypes = np.asarray(self._dtypes, dtype=np.uint8)
        count = np.asarray([sum(len(p.boxes) for p in parts) for parts in self._chunks], dtype=np.int64)
        ndim = np.asarray([len(shape) for shape in self._shapes], dtype=np.int64)
        any_strided = bool(strided.any())
        return Catalog.from_columns(
            keys=self._keys,
            roles=np.asarray(self._roles, dtype=np.uint8),
            fqns=self._fqns,
            states=self._states,
            dtypes=dtypes,
            shape_start=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(ndim))),
            shape=np.asarray([n for shape in self._shapes for n in shape], dtype=np.int64),
            chunk_start=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(count))),
            coords=_joined([part.boxes.reshape(-1) for _, part in flat], np.int64),
            files=self._files,
            chunk_file=_joined([part.file for _, part in flat], np.int32),
            chunk_offset=_joined([part.offset for _, part in flat], np.int64),
            chunk_dtype=None
            if not any_dtype
            else _joined([p.dtype if p.dtype is not None else np.full(len(p.boxes), dtypes[t]) for t, p in flat], np.uint8),
            strided=strided if any_strided else None,
            strides=None if not any_strided else _joined([_strides(p).reshape(-1) for t, p in flat if strided[t]], np.int64),
            chunk_group=None
            if not any_group
            else _joined([p.group if p.group is not None else np.full(len(p.boxes), -1) for _, p in flat], np.int32),
            groups=self._groups,
            objects=self._objects,
            paths=self._paths,
            pattern=np.asarray(self._pattern, dtype=np.int32),
            patterns=self._patterns,
        )


def _integers(value: Any, what: str) -> Int64Array:
    try:
        array = np.asarray(value)
    except (OverflowError, ValueError) as error:
        raise FormatError(f"{what}: expected an array of integers, {error}") from error
    if array.size and (array.dtype.kind not in "iu" or (array.dtype == np.uint64 and int(array.max()) >= 2**63)):
        raise FormatError(f"{what}: expected integers below 2**63, found {array.dtype}")
    return array.astype(np.int64)


def _joined(parts: Sequence[NDArray[Any]], kind: type[Any]) -> NDArray[Any]:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.empty(0, dtype=kind)


def _strides(part: _Chunks) -> Int64Array:
    """The strides given, else those of C order of each box."""
    if part.strides is not None:
        return part.strides
    k, _, n = part.boxes.shape
    strides = np.ones((k, n), dtype=np.int64)
    if n > 1:
        strides[:, :-1] = np.cumprod(np.maximum(part.boxes[:, 1, :0:-1], 1), axis=1)[:, ::-1]
    return strides
