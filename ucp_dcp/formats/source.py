"""An open checkpoint: its catalog, its bytes, and how to find what the catalog leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..catalog import Catalog, ObjectRow
from ..errors import CorruptCheckpointError
from ..storage.store import Store
from .torch_archive import load_value

__all__ = ["Located", "Source"]


@dataclass(frozen=True, slots=True)
class Located:
    """Where n chunks lie: index of the file in ``catalog.files``, byte of the first element, element strides, stored dtype code."""

    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    strides: list[tuple[int, ...]]
    dtype: NDArray[np.uint8]


class Source:
    """A checkpoint of any format, opened. It holds no file handle, lock or thread, so it pickles when its store does.

    Attributes:
        catalog: what there is.
        store: the bytes; paths of ``catalog.files`` are paths of this store.
        format: ``"ucp"``, ``"dcp"``, ``"deepspeed"``.
        provenance: what is known of the writer, plain values.
        doubt: why optimizer state may be wrong although nothing is damaged, a known fault of the writer; "" for none. A load then
            compares the masters of what it loads with the weights.
    """

    def __init__(self, catalog: Catalog, store: Store, format: str, provenance: Mapping[str, Any] | None = None) -> None:
        self.catalog = catalog
        self.store = store
        self.format = format
        self.provenance: dict[str, Any] = dict(provenance or {})
        self.doubt = ""

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint at {self.store.url}: {self.catalog.n_tensors} tensors, {self.catalog.n_chunks} chunks>"

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Where these chunks lie. Formats that do not know it from the catalog alone read a few bytes per chunk, once.

        Raises StoreError, CorruptCheckpointError.
        """
        chunks = np.asarray(chunks, dtype=np.int64)
        catalog = self.catalog
        strides: list[tuple[int, ...]] = [()] * len(chunks)
        dtype = np.empty(len(chunks), dtype=np.uint8)
        owners = catalog.tensor_of(chunks)
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        for rows in np.split(order, cuts) if len(order) else []:
            t = int(owners[rows[0]])
            index = chunks[rows] - catalog.chunk_start[t]
            dtype[rows] = catalog.chunk_dtypes(t)[index]
            for row, own in zip(rows.tolist(), catalog.strides(t)[index].tolist(), strict=True):
                strides[row] = tuple(own)
        return Located(catalog.chunk_file[chunks], catalog.chunk_offset[chunks], strides, dtype)

    def read_object(self, row: ObjectRow, allow_classes: Iterable[type] = ()) -> Any:
        """The value of an object row, through the restricted unpickler (D16). Raises UnsafePickleError, CorruptCheckpointError."""
        if row.encoding == "inline":
            return row.value
        if not 0 <= row.file < len(self.catalog.files):
            raise CorruptCheckpointError(f"object {row.key!r} lies in file {row.file} of {len(self.catalog.files)}")
        path = self.catalog.files[row.file].path
        return load_value(
            self.store, path, start=row.offset, length=row.length, allow_classes=allow_classes, what=f"object {row.key!r} in {path}"
        )
