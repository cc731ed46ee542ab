"""What ``ucp show`` says about a checkpoint, as values; taken from the catalog alone, so no tensor byte is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ..dtypes import itemsize
from ..names import Role

if TYPE_CHECKING:
    from ..catalog import TensorRow
    from ..checkpoint import Checkpoint

__all__ = ["Summary", "TensorLine", "summarise", "tensor_lines"]


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor. ``bytes`` is its size when read: elements times bytes per element of ``dtype``; ``chunks`` counts the stored boxes."""

    name: str
    key: str
    role: str
    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    pattern: str | None
    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole checkpoint.

    Attributes:
        format, url: what it is and where.
        generation: of the committed save; None for formats that have none.
        parameters: elements of all weights, or of the fp32 master weights where no weight is stored; None where the checkpoint does not
            say what its tensors are.
        bytes: of all tensors when read.
        file_bytes: of the files that hold them.
        roles, dtypes: number of tensors of each.
        objects: keys of what is not a tensor.
        files: path -> size.
        provenance: who wrote it, as far as the checkpoint says.
    """

    format: str
    url: str
    generation: str | None
    tensors: int
    chunks: int
    parameters: int | None
    bytes: int
    file_bytes: int
    roles: dict[str, int]
    dtypes: dict[str, int]
    objects: list[str]
    files: dict[str, int]
    provenance: dict[str, Any]


def _rows(checkpoint: Checkpoint) -> Iterator[TensorRow]:
    catalog = checkpoint.catalog
    return (catalog.tensor(t) for t in range(catalog.n_tensors))


def summarise(checkpoint: Checkpoint) -> Summary:
    """The summary of an open checkpoint."""
    catalog = checkpoint.catalog
    roles: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    elements: Counter[Role] = Counter()
    nbytes = 0
    for row in _rows(checkpoint):
        n = prod(row.shape)
        roles[row.role.name.lower()] += 1
        dtypes[row.dtype] += 1
        elements[row.role] += n
        nbytes += n * itemsize(row.dtype)
    counted = next((role for role in (Role.WEIGHT, Role.MASTER) if role in elements), None)
    provenance = checkpoint.provenance
    generation = provenance.pop("generation", None)
    files = {file.path: file.size for file in checkpoint.files}
    return Summary(
        format=checkpoint.format,
        url=checkpoint.url,
        generation=None if generation is None else str(generation),
        tensors=catalog.n_tensors,
        chunks=catalog.n_chunks,
        parameters=None if counted is None else elements[counted],
        bytes=nbytes,
        file_bytes=sum(files.values()),
        roles=dict(roles.most_common()),
        dtypes=dict(dtypes.most_common()),
        objects=[row.key for row in catalog.objects],
        files=files,
        provenance=provenance,
    )


def tensor_lines(checkpoint: Checkpoint) -> list[TensorLine]:
    """All tensors, sorted by name."""
    lines = []
    for row in _rows(checkpoint):
        first, last = checkpoint.catalog.chunk_range(row.index)
        nbytes = prod(row.shape) * itemsize(row.dtype)
        role = row.role.name.lower()
        lines.append(
            TensorLine(row.name, row.key, role, row.fqn, row.state, row.dtype, tuple(row.shape), row.pattern, last - first, nbytes)
        )
    return sorted(lines, key=lambda line: (line.name, line.key))
