"""Objects of a torch archive, with tensors as references to bytes that were not read, or as real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..dtypes import itemsize, torch_dtype
from ..errors import CorruptCheckpointError, UnsafePickleError
from .archive import LOCAL, Archive, ReadMany, Steps, archive_steps, drive, local_payload
from .machine import loads
from .stubs import StubTable
from .walk import find_stub, iter_leaves

__all__ = ["StoredStorage", "StoredTensor", "load_object", "read_archive", "read_values", "tree_steps"]

_MAX_BROADCAST = 1 << 24
"""Bytes of a tensor that repeats its storage (stride 0, overlapping views): a file of a few bytes must not become a huge tensor."""


class StoredStorage:
    """A storage of an archive: ``nbytes`` is what the pickle says it holds, ``start`` its first byte in the file (-1: not yet known)."""

    __slots__ = ("dtype", "key", "nbytes", "start")

    def __init__(self, key: str, dtype: str | None, nbytes: int) -> None:
        self.key = key
        self.dtype = dtype
        self.nbytes = nbytes
        self.start = -1


class StoredTensor:
    """A tensor whose bytes were not read.

    ``dtype`` is a name; ``shape``, ``strides``, ``storage_offset`` count elements; ``offset`` is the byte of the first one in the file.
    """

    __slots__ = ("dtype", "shape", "storage", "storage_offset", "strides")

    def __init__(self, storage: StoredStorage, storage_offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
        self.storage = storage
        self.storage_offset = storage_offset
        self.shape = shape
        self.strides = strides
        self.dtype = dtype

    @property
    def offset(self) -> int:
        """Byte of the first element in the file."""
        return self.storage.start + self.storage_offset * itemsize(self.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<stored {self.dtype} {list(self.shape)}>"


class _References:
    """A sink that makes StoredTensors, checked against the storages they lie in."""

    def __init__(self, archive: Archive, what: str) -> None:
        self.archive = archive
        self.what = what
        self.storages: dict[tuple[str, str | None], StoredStorage] = {}

    def storage(self, dtype: str | None, key: str, numel: int) -> StoredStorage:
        nbytes = numel * (itemsize(dtype) if dtype else 1)
        known = self.storages.get((key, dtype))
        if known is not None:
            if known.nbytes != nbytes:
                raise CorruptCheckpointError(f"{self.what}: storage {key!r} has {known.nbytes} bytes in one place and {nbytes} in another")
            return known
        record = self.archive.records.get(self.archive.storage_record(key))
        if record is None:
            raise CorruptCheckpointError(f"{self.what}: storage {key!r} is missing from the archive")
        if nbytes > record.size:
            raise CorruptCheckpointError(f"{self.what}: storage {key!r} should hold {nbytes} bytes, its record has {record.size}")
        self.storages[key, dtype] = made = StoredStorage(key, dtype, nbytes)
        return made

    def tensor(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: str | None) -> Any:
        if not isinstance(storage, StoredStorage):
            raise CorruptCheckpointError(f"{self.what}: a tensor over something else than a storage")
        name = dtype or storage.dtype
        if name is None:
            raise CorruptCheckpointError(f"{self.what}: a tensor without a dtype")
        if len(size) != len(stride) or min(size, default=0) < 0 or min(stride, default=0) < 0:
            raise CorruptCheckpointError(f"{self.what}: a tensor of size {size} with strides {stride}")
        width, numel = itemsize(name), math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if numel else offset - 1
        if (last + 1) * width > storage.nbytes or numel * width > max(storage.nbytes, _MAX_BROADCAST):
            raise CorruptCheckpointError(
                f"{self.what}: a tensor of size {size}, strides {stride} and offset {offset} ({name}) does not lie in storage "
                f"{storage.key!r} of {storage.nbytes} bytes"
            )
        return StoredTensor(storage, offset, size, stride, name)


class _Values(_References):
    """A sink that makes real tensors of those storages whose bytes are there."""

    def __init__(self, archive: Archive, what: str, buffers: dict[str, Any]) -> None:
        super().__init__(archive, what)
        self._buffers = buffers

    def tensor(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: str | None) -> Any:
        import torch

        found = super().tensor(storage, offset, size, stride, dtype)
        raw = self._buffers.get(found.storage.key)
        if raw is None:
            return found
        whole = raw[: len(raw) // itemsize(found.dtype) * itemsize(found.dtype)].view(torch_dtype(found.dtype))
        return torch.as_strided(whole, size, stride, offset)


def _locate(archive: Archive, storages: Iterable[StoredStorage], base: int, what: str) -> Steps[None]:
    """Give storages their place in the file: one batch of local headers."""
    wanted = list(storages)
    records = [archive.records[archive.storage_record(s.key)] for s in wanted]
    headers = (yield [(r.header, LOCAL.size + len(r.name.encode())) for r in records]) if records else []
    for storage, record, header in zip(wanted, records, headers, strict=True):
        storage.start = base + local_payload(record, header, what)


def read_archive(
    read: ReadMany,
    length: int,
    *,
    what: str,
    base: int = 0,
    stubs: StubTable | None = None,
    inert_unknown: bool = False,
) -> Any:
    """The object tree of an archive with StoredTensors; no tensor byte is read.

    ``read`` gives bytes of the archive, which has ``length`` bytes and starts at byte ``base`` of its file. For the others see ``loads``.
    """
    return drive(tree_steps(length, what=what, base=base, stubs=stubs, inert_unknown=inert_unknown), read)


def tree_steps(length: int, *, what: str, base: int = 0, stubs: StubTable | None = None, inert_unknown: bool = False) -> Steps[Any]:
    """The steps of :func:`read_archive`."""
    archive = yield from archive_steps(length, what)
    sink = _References(archive, what)
    tree = loads(archive.pickle, what=what, stubs=stubs, sink=sink, inert_unknown=inert_unknown)
    yield from _locate(archive, sink.storages.values(), base, what)
    return tree


def read_values(
    read: ReadMany,
    length: int,
    *,
    what: str,
    allow_classes: Iterable[type] = (),
    select: Sequence[str | int] = (),
    stubs: StubTable | None = None,
) -> Any:
    """The object of an archive with real CPU tensors.

    ``select`` is a path of keys and indices into the object: only the part there is returned and only its storages are read; classes
    that are not allowed then matter in that part only, and ``stubs`` are stand-ins for the rest. Raises as ``loads`` and
    ``archive_steps`` do, and CorruptCheckpointError when there is no such part.
    """
    import torch

    allow = tuple(allow_classes)
    archive = drive(archive_steps(length, what), read)
    sink = _References(archive, what)
    tree = loads(archive.pickle, what=what, stubs=stubs, sink=sink, inert_unknown=True) if select else None
    if select:
        wanted = {leaf.storage.key for leaf in iter_leaves(_at(tree, select, what), StoredTensor)}
        if allow:  # an allowed class may hold tensors where nobody can look
            wanted = {s.key for s in sink.storages.values()}
    else:
        loads(archive.pickle, what=what, stubs=_inert(allow), sink=sink)
        wanted = {s.key for s in sink.storages.values()}
    storages = {s.key: s for s in sink.storages.values() if s.key in wanted}
    drive(_locate(archive, storages.values(), 0, what), read)
    sizes = {key: archive.records[archive.storage_record(key)].size for key in storages}
    parts = read([(storages[key].start, sizes[key]) for key in storages])
    buffers = {key: torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
               for key, part in zip(storages, parts, strict=True)}  # fmt: skip
    value = loads(
        archive.pickle, what=what, allow_classes=allow, sink=_Values(archive, what, buffers), stubs=stubs, inert_unknown=bool(select)
    )
    if select:
        value = _at(value, select, what)
        stub = find_stub(value)
        if stub is not None:
            raise UnsafePickleError(
                f"{what}: {'.'.join(map(str, select))} holds {stub.qualname}, which is not allowed; nothing was run. "
                "If you trust the file and need the class, pass allow_classes=[...]"
            )
    return value


def _inert(classes: Iterable[type]) -> StubTable:
    from .stubs import Stub

    return {(c.__module__, c.__qualname__): Stub for c in classes}


def _at(tree: Any, path: Sequence[str | int], what: str) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            raise CorruptCheckpointError(f"{what}: there is no {'.'.join(map(str, path))} in it") from None
    return tree


def load_object(data: bytes | memoryview, *, allow_classes: Iterable[type] = (), where: str = "object") -> Any:
    """What ``torch.save`` wrote into ``data``, through the restricted unpickler, with real CPU tensors (replaces ``torch.load``; D16).

    ``where`` names the source in errors. Raises UnsafePickleError, CorruptCheckpointError, UnsupportedError, FormatError.
    """
    view = memoryview(data).cast("B")

    def read(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [bytes(view[start : start + length]) for start, length in ranges]

    return read_values(read, len(view), what=where, allow_classes=allow_classes)
