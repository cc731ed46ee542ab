"""The ``Metadata`` that our storage reader hands to planners: the real one is a Catalog, stock objects are made when asked for (D1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..catalog import Catalog
from ..dtypes import torch_dtype
from ..formats import Source

__all__ = ["FailedMetadata", "PathView", "ServedMetadata", "StockView"]


class StockView(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """``Metadata.state_dict_metadata`` of a catalog: each entry is made when a foreign planner looks at it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getitem__(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
        t = self._catalog.find(key)
        if t is None:
            row = self._catalog.find_object(key)
            if row is None or row.key != key:
                raise KeyError(key)
            return BytesStorageMetadata()
        tensor = self._catalog.tensor(t)
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size)) for offset, size in self._catalog.boxes(t).tolist()
        ]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(tensor.dtype)), size=torch.Size(tensor.shape), chunks=chunks
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.keys
        for row in self._catalog.objects:
            yield row.key

    def __len__(self) -> int:
        return self._catalog.n_tensors + len(self._catalog.objects)


class PathView(Mapping[str, tuple[str | int, ...]]):
    """``Metadata.planner_data`` of a catalog: the nesting path of every key."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getitem__(self, key: str) -> tuple[str | int, ...]:
        t = self._catalog.find(key)
        if t is not None:
            return tuple(self._catalog.tensor(t).path) or (key,)
        row = self._catalog.find_object(key)
        if row is None or row.key != key:
            raise KeyError(key)
        return tuple(row.path) or (key,)

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.keys
        for row in self._catalog.objects:
            yield row.key

    def __len__(self) -> int:
        return self._catalog.n_tensors + len(self._catalog.objects)


@dataclass
class ServedMetadata(Metadata):
    """Metadata of an open :class:`~ucp_dcp.formats.Source`. Pickles without the source: DCP never sends it, tools may."""

    state_dict_metadata: Any = field(default_factory=dict)
    source: Source | None = None

    @classmethod
    def of(cls, source: Source) -> ServedMetadata:
        """The view of one open source."""
        catalog = source.catalog
        return cls(state_dict_metadata=StockView(catalog), planner_data=PathView(catalog), storage_data={}, source=source)


@dataclass
class FailedMetadata(Metadata):
    """Stands for metadata that could not be read. DCP would hide the cause (D17), so the next planning call raises it."""

    state_dict_metadata: Any = field(default_factory=dict)
    error: BaseException | None = None
