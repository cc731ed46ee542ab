"""The catalog: which global tensors a checkpoint holds, which chunk covers which box of them, and where its bytes are (D6-D9)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice, pairwise
from operator import lt
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ..dtypes import NAMES
from ..errors import CorruptCheckpointError, FormatError
from ..geometry.ragged import coords_start
from ..names import Role
from .assemble import ColumnArguments, assemble
from .codec import check_files, check_groups, check_objects, decode_array, decode_msgpack, decode_objects
from .columns import ChunkColumns, Int64Array, TensorColumns, check_chunk_columns, check_chunks, check_tensor_columns
from .lookup import canonical_index, find_object, named_index, only
from .rows import FileBlocks, FileRow, ObjectRow, PathTuple, TensorRow
from .sections import I32, I64, U8, U16, encode_sections

__all__ = ["Catalog", "Load"]

Load = Callable[[str], memoryview | None]
"""Returns the bytes of an index section by name; None when the index has no such section."""

_SINGLE_CHECKS = 16
"""So many tensors are checked one by one; with the next one all others are checked at once, which is far cheaper per tensor."""


class Catalog:
    """Tensors, chunks and objects of one checkpoint, in columns. Immutable: arrays are read-only, rows are values.

    Numbers of tensors and chunks are T and C; tensors are sorted by key, chunks by tensor. Columns are named as the sections of
    ``docs/format.md`` with ``_`` for ``.``. What is read from a checkpoint is checked before it is handed out: tensor columns when the
    catalog is opened; the chunks of a tensor, and lists of names, when they are first used.
    Raises CorruptCheckpointError (any access to a damaged part), UnsupportedError (a part that a later version has written).
    """

    def __init__(self, tensors: TensorColumns, load: Load, given: dict[str, Any], error: type[FormatError]) -> None:
        """Use ``from_sections``, ``from_columns`` or ``CatalogBuilder``. ``given`` holds decoded sections, ``load`` gives the others."""
        self._tensors = tensors
        self._load = load
        self._given = given
        self._error = error
        self._chunk_checked = np.zeros(len(tensors.role), dtype=np.bool_)
        self._single_checks = 0
        self.n_tensors = len(tensors.role)
        self.n_chunks = int(tensors.chunk_start[-1])
        self.tensor_role = tensors.role
        self.tensor_dtype = tensors.dtype
        self.tensor_kind = tensors.kind
        self.tensor_pattern = tensors.pattern
        self.tensor_strided = tensors.strided
        self.shape_start = tensors.shape_start
        self.shape = tensors.shape
        self.chunk_start = tensors.chunk_start
        self.ndim: Int64Array = tensors.ndim
        """(T,) dims of each tensor."""

    def __repr__(self) -> str:
        return f"Catalog({self.n_tensors} tensors, {self.n_chunks} chunks, {len(self.files)} files)"

    # -- lists of names, decoded when first used

    def _section(self, name: str) -> memoryview:
        data = self._load(name)
        if data is None:
            raise CorruptCheckpointError(f"index section {name} is missing")
        return data

    @cached_property
    def keys(self) -> Sequence[str]:
        """Keys of all tensors, ascending by Unicode code point."""
        keys: list[str] = (
            self._given["keys"] if "keys" in self._given else decode_msgpack("tensor.key", self._section("tensor.key"), list[str])
        )
        self._need(len(keys) == self.n_tensors, f"tensor.key has {len(keys)} entries, expected {self.n_tensors}")
        if not all(map(lt, keys, islice(keys, 1, None))):
            before, after = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
            self._need(before != after, f"two tensors have the key {after!r}")
            raise self._error(f"catalog: tensors are not sorted by key: {after!r} follows {before!r}")
        return tuple(keys)

    @cached_property
    def fqns(self) -> Sequence[str]:
        """Global parameter name of each tensor; "" where the role is plain."""
        fqns: list[str] = (
            self._given["fqns"] if "fqns" in self._given else decode_msgpack("tensor.fqn", self._section("tensor.fqn"), list[str])
        )
        self._need(len(fqns) == self.n_tensors, f"tensor.fqn has {len(fqns)} entries, expected {self.n_tensors}")
        return tuple(fqns)

    @cached_property
    def _states(self) -> tuple[tuple[str, ...], NDArray[np.uint16]]:
        if "states" in self._given:
            names, codes = self._given["states"]
        else:
            names, packed = decode_msgpack("tensor.state", self._section("tensor.state"), tuple[list[str], bytes])
            codes = decode_array("tensor.state", memoryview(packed), U16)
        self._need(len(codes) == self.n_tensors, f"tensor.state has {len(codes)} codes, expected {self.n_tensors}")
        if len(codes):
            self._need(int(codes.max()) < len(names), f"tensor.state holds code {int(codes.max())}, expected 0 to {len(names) - 1}")
        return tuple(names), codes

    @property
    def state_names(self) -> tuple[str, ...]:
        """The distinct optimizer state names; ``state_codes`` are indices into them."""
        return self._states[0]

    @property
    def state_codes(self) -> NDArray[np.uint16]:
        """(T,) index into ``state_names`` of each tensor."""
        return self._states[1]

    @property
    def states(self) -> list[str]:
        """Optimizer state name of each tensor, "" for none."""
        names, codes = self._states
        return [names[code] for code in codes.tolist()]

    @cached_property
    def paths(self) -> Sequence[PathTuple | None] | None:
        """Nesting path of each tensor, None where it is just ``(key,)``; None when all are."""
        if "paths" in self._given:
            return tuple(self._given["paths"]) if self._given["paths"] is not None else None
        data = self._load("tensor.path")
        if data is None:
            return None
        paths = decode_msgpack("tensor.path", data, list[tuple[str | int, ...] | None])
        self._need(len(paths) == self.n_tensors, f"tensor.path has {len(paths)} entries, expected {self.n_tensors}")
        return tuple(paths)

    @cached_property
    def files(self) -> tuple[FileRow, ...]:
        """Files that chunks and objects lie in."""
        if "files" in self._given:
            return tuple(self._given["files"])
        files = decode_msgpack("files", self._section("files"), list[tuple[str, int]])
        data = self._load("file.blocks")
        blocks = decode_msgpack("file.blocks", data, list[tuple[str, int, str] | None]) if data is not None else [None] * len(files)
        self._need(len(blocks) == len(files), f"file.blocks has {len(blocks)} entries, expected {len(files)}")
        rows = tuple(FileRow(*file, None if b is None else FileBlocks(*b)) for file, b in zip(files, blocks, strict=True))
        check_files(rows, self._error)
        return rows

    @cached_property
    def objects(self) -> tuple[ObjectRow, ...]:
        """What is not a tensor, as listed."""
        if "objects" in self._given:
            return tuple(self._given["objects"])
        data = self._load("objects")
        if data is None:
            return ()
        rows = decode_objects(data)
        check_objects(rows, self.files, self._error)
        for row in rows:
            self._need(self.find(row.key) is None, f"an object and a tensor have the same key {row.key!r}")
        return rows

    @cached_property
    def patterns(self) -> tuple[dict[str, Any], ...]:
        """How tensors had been divided by the writer: ``{"text": ..., ...}``; ``tensor_pattern`` are indices into it."""
        if "patterns" in self._given:
            patterns = tuple(self._given["patterns"])
        else:
            data = self._load("patterns")
            patterns = tuple(decode_msgpack("patterns", data, list[dict[str, Any]])) if data is not None else ()
        if self.n_tensors:
            low, high = int(self.tensor_pattern.min()), int(self.tensor_pattern.max())
            self._need(low >= -1 and high < len(patterns), f"tensor.pattern holds {low} to {high}, expected -1 to {len(patterns) - 1}")
        for i, pattern in enumerate(patterns):
            self._need(isinstance(pattern.get("text"), str), f"pattern {i} has no text")
        return patterns

    @cached_property
    def groups(self) -> tuple[dict[str, Any], ...]:
        """Combine op of each group of chunks: ``{"op": "copy" | "mean" | "bf16_remainder"}``."""
        if "groups" in self._given:
            return tuple(self._given["groups"])
        data = self._load("groups")
        groups = tuple(decode_msgpack("groups", data, list[dict[str, Any]])) if data is not None else ()
        check_groups(groups, self._error)
        return groups

    def _need(self, ok: bool, message: str) -> None:
        if not ok:
            raise self._error(f"catalog: {message}")

    # -- lookups

    def find(self, key: str) -> int | None:
        """Index of the tensor with this key."""
        keys = self.keys
        i = bisect_left(keys, key)
        return i if i < len(keys) and keys[i] == key else None

    def find_named(self, role: Role, fqn: str, state: str = "") -> int | None:
        """Index of the tensor with this role, fqn and state. Raises PlanError when there are several: only the key tells them apart."""
        return only(self.find_all_named(role, fqn, state), f"role {Role(role).name.lower()}, fqn {fqn!r}, state {state!r}", self.keys)

    def find_all_named(self, role: Role, fqn: str, state: str = "") -> tuple[int, ...]:
        """Indices of all tensors with this role, fqn and state; plain tensors have no name but their key."""
        return self._named.get((int(role), fqn, state), ())

    def find_canonical(self, name: str) -> int | None:
        """Index of the tensor with this canonical name. Raises PlanError when there are several."""
        return only(self._canonical.get(name, ()), f"the canonical name {name!r}", self.keys)

    def find_object(self, key: str) -> ObjectRow | None:
        """The object with this key, else the one with this fqn. Raises PlanError when several have the fqn."""
        by_key, by_fqn = self._object_index
        return find_object(self.objects, by_key, by_fqn, key)

    @cached_property
    def _named(self) -> dict[tuple[int, str, str], tuple[int, ...]]:
        return named_index(self.tensor_role.tolist(), self.fqns, self.states)

    @cached_property
    def _canonical(self) -> dict[str, tuple[int, ...]]:
        return canonical_index(self.keys, self.tensor_role.tolist(), self.fqns, self.states)

    @cached_property
    def _object_index(self) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        by_fqn: dict[str, tuple[int, ...]] = {}
        for i, row in enumerate(self.objects):
            if row.fqn:
                by_fqn[row.fqn] = (*by_fqn.get(row.fqn, ()), i)
        return {row.key: i for i, row in enumerate(self.objects)}, by_fqn

    # -- tensors

    def tensor(self, t: int) -> TensorRow:
        """Tensor t as a value. Raises IndexError."""
        t = self._index(t)
        names, codes = self._states
        key, paths, pattern = self.keys[t], self.paths, int(self.tensor_pattern[t])
        path = paths[t] if paths is not None else None
        return TensorRow(
            index=t,
            key=key,
            role=Role(int(self.tensor_role[t])),
            fqn=self.fqns[t],
            state=names[codes[t]],
            dtype=NAMES[self.tensor_dtype[t]],
            shape=self.shape_of(t),
            pattern=None if pattern == -1 else self.patterns[pattern]["text"],
            path=(key,) if path is None else path,
        )

    def tensors(self) -> Iterable[TensorRow]:
        """All tensors as values, by key."""
        return (self.tensor(t) for t in range(self.n_tensors))

    def shape_of(self, t: int) -> tuple[int, ...]:
        """Global shape of tensor t."""
        t = self._index(t)
        return tuple(self.shape[self.shape_start[t] : self.shape_start[t + 1]].tolist())

    def _index(self, t: int) -> int:
        if not 0 <= t < self.n_tensors:
            raise IndexError(f"tensor {t} of {self.n_tensors}")
        return int(t)

    # -- chunks

    def chunk_range(self, t: int) -> tuple[int, int]:
        """Chunks of tensor t: ``start, stop``."""
        t = self._index(t)
        return int(self.chunk_start[t]), int(self.chunk_start[t + 1])

    def tensor_of(self, chunks: Int64Array) -> Int64Array:
        """The tensor that each of these chunk indices belongs to."""
        return np.searchsorted(self.chunk_start, chunks, side="right") - 1

    def boxes(self, t: int) -> Int64Array:
        """(k, 2, ndim) view: offsets and sizes of the chunks of tensor t."""
        columns = self._checked(t)
        start, stop = self._coords_start[t : t + 2].tolist()
        first, last = self.chunk_range(t)
        return columns.coords[start:stop].reshape(last - first, 2, int(self.ndim[t]))

    def strides(self, t: int) -> Int64Array:
        """(k, ndim) element strides of the chunks of tensor t: as stored, else those of C order of each box."""
        columns = self._checked(t)
        first, last = self.chunk_range(t)
        n = int(self.ndim[t])
        if columns.strides is not None and self.tensor_strided is not None and self.tensor_strided[t]:
            start, stop = self._strides_start[t : t + 2].tolist()
            return columns.strides[start:stop].reshape(last - first, n)
        strides = np.ones((last - first, n), dtype=np.int64)
        if n > 1:
            sizes = np.maximum(self.boxes(t)[:, 1, :0:-1], 1)
            strides[:, :-1] = np.cumprod(sizes, axis=1)[:, ::-1]
        return strides

    def chunk_dtypes(self, t: int) -> NDArray[np.uint8]:
        """(k,) stored dtype codes of the chunks of tensor t."""
        columns = self._checked(t)
        first, last = self.chunk_range(t)
        if columns.dtype is not None:
            return columns.dtype[first:last]
        return np.full(last - first, self.tensor_dtype[t], dtype=np.uint8)

    def groups_of(self, t: int) -> NDArray[np.int32]:
        """(k,) index into ``groups`` of the chunks of tensor t, -1 for none."""
        columns = self._checked(t)
        first, last = self.chunk_range(t)
        if columns.group is not None:
            return columns.group[first:last]
        return np.full(last - first, -1, dtype=np.int32)

    @property
    def coords(self) -> Int64Array:
        """Flat coords of all chunks: per chunk ndim offsets, then ndim sizes."""
        return self._all_checked().coords

    @property
    def chunk_file(self) -> NDArray[np.int32]:
        """(C,) index into ``files``."""
        return self._all_checked().file

    @property
    def chunk_offset(self) -> Int64Array:
        """(C,) byte of the first element of each box in its file."""
        return self._all_checked().offset

    @property
    def chunk_dtype(self) -> NDArray[np.uint8] | None:
        """(C,) stored dtype codes; None when all equal their tensor's."""
        return self._all_checked().dtype

    @property
    def chunk_strides(self) -> Int64Array | None:
        """Element strides of the chunks of strided tensors, end to end; None when every box is stored in C order."""
        return self._all_checked().strides

    @property
    def chunk_group(self) -> NDArray[np.int32] | None:
        """(C,) index into ``groups``; None when there are no groups."""
        return self._all_checked().group

    def validate(self) -> None:
        """Check every part of the catalog now, instead of when it is first used."""
        self._all_checked()
        _ = (self.keys, self.fqns, self._states, self.paths, self.objects, self.patterns)

    @cached_property
    def _coords_start(self) -> Int64Array:
        return coords_start(self.chunk_start, self.ndim)

    @cached_property
    def _strides_start(self) -> Int64Array:
        start = np.zeros(self.n_tensors + 1, dtype=np.int64)
        if self.tensor_strided is not None:
            np.cumsum(np.diff(self.chunk_start) * self.ndim * self.tensor_strided, out=start[1:])
        return start

    @cached_property
    def _chunks(self) -> ChunkColumns:
        """The chunk columns: lengths and codes are checked, boxes and bytes not yet."""
        if "chunks" in self._given:
            columns: ChunkColumns = self._given["chunks"]
        else:
            dtype, strides, group = (self._load(f"chunk.{name}") for name in ("dtype", "strides", "group"))
            columns = ChunkColumns(
                coords=decode_array("chunk.coords", self._section("chunk.coords"), I64),
                file=decode_array("chunk.file", self._section("chunk.file"), I32),
                offset=decode_array("chunk.offset", self._section("chunk.offset"), I64),
                dtype=None if dtype is None else decode_array("chunk.dtype", dtype, U8),
                strides=None if strides is None else decode_array("chunk.strides", strides, I64),
                group=None if group is None else decode_array("chunk.group", group, I32),
            )
        check_chunk_columns(self._tensors, columns, len(self.files), len(self.groups), self._error)
        return columns

    def _checked(self, t: int) -> ChunkColumns:
        """The chunk columns, of which tensor t is checked."""
        t = self._index(t)
        columns = self._chunks
        if not self._chunk_checked[t]:
            if self._single_checks >= _SINGLE_CHECKS:
                return self._all_checked()
            self._single_checks += 1
            self._check_chunks(np.asarray([t], dtype=np.int64))
        return columns

    def _all_checked(self) -> ChunkColumns:
        columns = self._chunks
        if self._single_checks != -1:
            self._check_chunks(np.flatnonzero(~self._chunk_checked))
            self._single_checks = -1
        return columns

    def _check_chunks(self, which: Int64Array) -> None:
        sizes = np.asarray([row.size for row in self.files], dtype=np.int64)
        names = [row.path for row in self.files]
        check_chunks(self._tensors, self._chunks, sizes, names, which, lambda t: repr(self.keys[t]), self._error)
        self._chunk_checked[which] = True

    # -- to and from other forms

    def to_sections(self) -> dict[str, bytes | memoryview]:
        """All sections of ``docs/format.md`` as bytes-like objects, in the order in which they are best stored.

        Raises FormatError when an inline object value, or text, cannot be written.
        """
        return encode_sections(self)

    @classmethod
    def from_sections(cls, load: Load) -> Catalog:
        """Open a catalog from index sections.

        ``load`` is called now for the tensor columns and the file table, later for the others, when they are first used; arrays share the
        memory it returns. Raises CorruptCheckpointError, UnsupportedError.
        """

        def array(name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
            data = load(name)
            if data is None:
                raise CorruptCheckpointError(f"index section {name} is missing")
            return decode_array(name, data, dtype)

        strided = load("tensor.strided")
        tensors = TensorColumns(
            role=array("tensor.role", U8),
            dtype=array("tensor.dtype", U8),
            kind=array("tensor.kind", U8),
            pattern=array("tensor.pattern", I32),
            shape_start=array("tensor.shape_start", I64),
            shape=array("tensor.shape", I64),
            chunk_start=array("tensor.chunk_start", I64),
            strided=None if strided is None else decode_array("tensor.strided", strided, U8),
        )
        check_tensor_columns(tensors, CorruptCheckpointError)
        catalog = cls(tensors, load, {}, CorruptCheckpointError)
        _ = (catalog.files, catalog.groups)
        return catalog

    @classmethod
    def from_columns(cls, **columns: Unpack[ColumnArguments]) -> Catalog:
        """A catalog from ready columns, see ``ColumnArguments``; tensors in any order, they are sorted by key. All is checked at once.

        Raises FormatError: duplicate keys, lengths, boxes outside their shape, bytes outside their file, unsafe paths.
        """
        tensors, given = assemble(**columns)
        catalog = cls(tensors, _no_section, given, FormatError)
        catalog.validate()
        for row in catalog.objects:
            catalog._need(catalog.find(row.key) is None, f"an object and a tensor have the same key {row.key!r}")
        return catalog

    def __reduce__(self) -> tuple[Any, ...]:
        # Objects travel as rows: a parser's inline values may be of types that only pickle knows.
        sections = {name: bytes(data) for name, data in encode_sections(self, objects=False).items()}
        return _restore, (sections, self.objects)


def _no_section(name: str) -> memoryview | None:
    return None


def _restore(sections: dict[str, bytes], objects: tuple[ObjectRow, ...]) -> Catalog:
    """The other end of ``Catalog.__reduce__``."""

    def load(name: str) -> memoryview | None:
        return memoryview(sections[name]) if name in sections else None

    catalog = Catalog.from_sections(load)
    catalog._given["objects"] = objects
    return catalog
