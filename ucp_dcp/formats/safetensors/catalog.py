"""Headers of safetensors files as a catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...catalog import Catalog, CatalogBuilder
from ...errors import CorruptCheckpointError, StoreNotFoundError
from ...geometry import Cover, check_cover, check_cover_ragged
from ...names import Role
from ...storage.store import Store
from ..source import Source
from .files import SafetensorsFiles
from .header import SHARDING, Header, HeaderTensor, read_header

__all__ = ["SafetensorsSource", "open_safetensors"]

ParseAll = Callable[[Sequence[str], Callable[[str], Any]], list[Any]]
_SHOWN = 200


class SafetensorsSource(Source):
    """Safetensors files, opened.

    Attributes:
        index: path of the index file, None without one.
        metadata: path -> the ``__metadata__`` of that file, texts by name.
    """

    def __init__(self, catalog: Catalog, store: Store, files: SafetensorsFiles, metadata: Mapping[str, dict[str, str]]) -> None:
        super().__init__(catalog, store, "safetensors", _common(metadata))
        self.index = files.index
        self.metadata = dict(metadata)

    def faults(self) -> Iterator[tuple[int, Cover]]:
        """(tensor, where) of each tensor that the files do not hold whole: a shard is missing."""
        yield from _faults(self.catalog)


def open_safetensors(store: Store, files: SafetensorsFiles, parse_all: ParseAll) -> SafetensorsSource:
    """Open the files of a checkpoint; their headers are read, no tensor byte.

    Raises CorruptCheckpointError naming file and tensor: a file does not keep to the format, is missing, lacks what the index says, or
    holds what another one holds too. UnsupportedError for a dtype that torch does not have. StoreError.
    """
    headers: list[Header] = parse_all(files.paths, partial(_read, store, files.index))
    tensors = _gathered(headers, files)
    build = CatalogBuilder()
    numbers = {header.path: build.add_file(header.path, header.size) for header in headers}
    for name, pieces in tensors.items():
        path, first = pieces[0]
        for other, piece in pieces[1:]:
            if piece.dtype != first.dtype or len(piece.shape) != len(first.shape):
                raise CorruptCheckpointError(
                    f"tensor {name!r} is {first.dtype} of {len(first.shape)} dims in {path}, and {piece.dtype} of {len(piece.shape)} dims "
                    f"in {other}"
                )
        boxes = np.asarray([(piece.offset, piece.shape) for _, piece in pieces], dtype=np.int64).reshape(len(pieces), 2, len(first.shape))
        # nothing states the whole shape: it reaches as far as the pieces do (as in torch's HuggingFaceStorageReader)
        shape = boxes.sum(axis=1).max(axis=0).tolist()
        handle = build.add_tensor(key=name, role=Role.WEIGHT, fqn=name, dtype=first.dtype, shape=shape)
        where = np.asarray([numbers[p] for p, _ in pieces], dtype=np.int32)
        build.add_chunks(handle, boxes, where, np.asarray([piece.start for _, piece in pieces], dtype=np.int64))
    catalog = build.build()
    catalog.validate()
    for t, cover in _faults(catalog):
        for i, j, box in cover.overlaps:
            first, second = (catalog.files[catalog.chunk_file[catalog.chunk_range(t)[0] + k]].path for k in (i, j))
            raise CorruptCheckpointError(
                f"tensor {catalog.keys[t]!r}: {first} and {second} both hold the elements at {list(box.offset)}, size {list(box.size)}; "
                "files of several saves lie in one folder, or a tensor was written twice"
            )
    return SafetensorsSource(catalog, store, files, {header.path: header.metadata for header in headers})


def _read(store: Store, index: str | None, path: str) -> Header:
    try:
        return read_header(store, path)
    except StoreNotFoundError:
        if index is None:
            raise
        raise CorruptCheckpointError(f"{store.url}: {index} names the file {path!r}, which is missing") from None


def _gathered(headers: Sequence[Header], files: SafetensorsFiles) -> dict[str, list[tuple[str, HeaderTensor]]]:
    """Tensor -> (path, piece) of all its pieces. With an index, a tensor lies where that says; others must be in one file only."""
    found: dict[str, list[tuple[str, HeaderTensor]]] = {}
    weight_map = files.weight_map or {}
    sharded = {header.path: header.sharded for header in headers}
    for header in headers:
        for tensor in header.tensors:
            if weight_map.get(tensor.name, header.path) == header.path:
                found.setdefault(tensor.name, []).append((header.path, tensor))
    for name, path in weight_map.items():
        if name not in found:
            raise CorruptCheckpointError(f"{files.index}: tensor {name!r} should lie in {path}, which does not hold it")
    for name, pieces in found.items():
        whole = next((path for path, _ in pieces if not sharded[path]), None)
        if len(pieces) > 1 and whole is not None:
            other = next(path for path, _ in pieces if path != whole)
            raise CorruptCheckpointError(f"tensor {name!r} lies in {whole} and in {other}, and nothing says which is meant")
    return found


def _faults(catalog: Catalog) -> Iterator[tuple[int, Cover]]:
    """(tensor, fault) of each tensor whose pieces are not an exact cover."""
    coords = catalog.coords
    for t in check_cover_ragged(catalog.shape_start, catalog.shape, catalog.chunk_start, coords).tolist():
        yield t, check_cover(catalog.tensor(t).shape, catalog.boxes(t))


def _common(metadata: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """What all files say of themselves, long texts cut."""
    each = list(metadata.values())
    return {
        key: value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
        for key, value in (each[0] if each else {}).items()
        if key != SHARDING and all(other.get(key) == value for other in each)
    }
