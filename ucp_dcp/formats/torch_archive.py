"""``torch.save`` archives in a store: the object with tensors left where they lie, or the object with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..safe_pickle import StubTable, read_archive, read_values
from ..storage.store import Range, Store

__all__ = ["Tree", "load_value", "open_archive"]


class Tree:
    """The object of an archive, with a :class:`~ucp_dcp.safe_pickle.StoredTensor` for each tensor; ``size`` is the file's, in bytes."""

    __slots__ = ("path", "size", "value")

    def __init__(self, path: str, size: int, value: Any) -> None:
        self.path = path
        self.size = size
        self.value = value


def _reader(store: Store, path: str, start: int) -> Callable[[Sequence[tuple[int, int]]], list[bytes]]:
    def read(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        buffers = [bytearray(length) for _, length in ranges]
        store.read_ranges([Range(path, start + at, length) for at, length in ranges], [memoryview(b) for b in buffers])
        return [bytes(b) for b in buffers]

    return read


def open_archive(store: Store, path: str, *, stubs: StubTable | None = None, inert_unknown: bool = False, what: str | None = None) -> Tree:
    """The object of the ``torch.save`` file ``path``.

    No tensor byte is read: end record, directory, ``data.pkl``, local headers, in five steps.

    Raises UnsafePickleError, CorruptCheckpointError, UnsupportedError, FormatError naming the file, StoreError.
    """
    size = store.size(path)
    tree = read_archive(_reader(store, path, 0), size, what=what or path, stubs=stubs, inert_unknown=inert_unknown)
    return Tree(path, size, tree)


def load_value(
    store: Store,
    path: str,
    *,
    start: int = 0,
    length: int | None = None,
    allow_classes: Iterable[type] = (),
    select: Sequence[str | int] = (),
    stubs: StubTable | None = None,
    what: str | None = None,
) -> Any:
    """The object of the archive in bytes ``start .. start + length`` of a file (default: to its end), with real CPU tensors.

    ``select`` is a path of keys into the object: only that part is read; ``stubs`` are stand-ins for classes elsewhere in it.
    Raises as :func:`open_archive` does.
    """
    if length is None:
        length = store.size(path) - start
    read = _reader(store, path, start)
    return read_values(read, length, what=what or path, allow_classes=allow_classes, select=select, stubs=stubs)
