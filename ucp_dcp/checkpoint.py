"""``open_checkpoint``: any checkpoint as a mapping of global tensors that read only the bytes a slice needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from .catalog import Catalog, FileRow, ObjectRow, TensorRow
from .dtypes import itemsize, torch_dtype
from .errors import MissingKeysError
from .formats import MappedNames, Source, open_source
from .geometry import Box, full_box
from .names import Role, canonical_name
from .planners.consistency import AllowInconsistent, Comparison, Doubts, compare, read_box, refuse
from .planners.resolve import nearest
from .storage.store import Store, open_store
from .transfer import Digests, ReadStats, Verify, checked_source

if TYPE_CHECKING:
    from .check import CheckReport

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]


class StoredTensor:
    """One global tensor of an open checkpoint. ``t[1:3, :, 0]`` reads just those elements and returns a torch tensor.

    A slice with a step reads everything between its first and last element.
    """

    def __init__(self, checkpoint: Checkpoint, row: TensorRow) -> None:
        self._checkpoint = checkpoint
        self._row = row

    @property
    def key(self) -> str:
        """The name under which it was written."""
        return self._row.key

    @property
    def name(self) -> str:
        """The canonical name."""
        return canonical_name(self._row.role, self._row.fqn, self._row.state, self._row.key)

    @property
    def role(self) -> Role:
        """Weight, master, state, buffer, or plain."""
        return self._row.role

    @property
    def fqn(self) -> str:
        """Global parameter name, empty for plain tensors."""
        return self._row.fqn

    @property
    def state(self) -> str:
        """Optimizer state name, empty for others."""
        return self._row.state

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self._row.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Global dtype."""
        return torch_dtype(self._row.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        n = itemsize(self._row.dtype)
        for extent in self._row.shape:
            n *= extent
        return n

    @property
    def pattern(self) -> str | None:
        """How the writer had divided it over the ranks, as text; None when that is not known."""
        return self._row.pattern

    @property
    def chunks(self) -> list[Box]:
        """The boxes in which it is stored."""
        return [Box(tuple(o), tuple(s)) for o, s in self._checkpoint.catalog.boxes(self._row.index).tolist()]

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={self.shape}, dtype={self._row.dtype}, chunks={len(self.chunks)})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a numpy-style slice (integers, slices with positive steps, ``...``). Raises IndexError as numpy does, CoverageError."""
        box, steps, dropped = _parse_index(index, self.shape, self.name)
        out = torch.empty(box.size, dtype=self.dtype)
        self._checkpoint._read(self._row, box, out)
        if any(step != 1 for step in steps):
            out = out[tuple(slice(None, None, step) for step in steps)].clone()
        return out.reshape([n for d, n in enumerate(out.shape) if d not in dropped])

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        return self[...]


def _parse_index(index: Any, shape: Sequence[int], name: str) -> tuple[Box, list[int], set[int]]:
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(p is Ellipsis for p in parts) > 1:
        raise IndexError(f"{name}: an index can have only one ellipsis")
    if Ellipsis in [p for p in parts if p is Ellipsis]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise IndexError(f"{name}: {len(parts)} indices for a tensor of {len(shape)} dimensions")
    parts += [slice(None)] * (len(shape) - len(parts))
    offset, size, steps, dropped = [], [], [], set()
    for dim, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step <= 0:
                raise IndexError(f"{name}: slices need a positive step, found {step} in dimension {dim}")
            count = len(range(start, stop, step))
            offset.append(start if count else 0)
            size.append((count - 1) * step + 1 if count else 0)
            steps.append(step)
        elif hasattr(part, "__index__") and not isinstance(part, bool | torch.Tensor):
            i = part.__index__()
            if not -extent <= i < extent:
                raise IndexError(f"{name}: index {i} is out of range for dimension {dim} of size {extent}")
            offset.append(i % extent)
            size.append(1)
            steps.append(1)
            dropped.add(dim)
        else:
            raise IndexError(f"{name}: only integers, slices and ... can index a stored tensor, found {type(part).__name__}")
    return Box(tuple(offset), tuple(size)), steps, dropped


class Checkpoint(Mapping[str, StoredTensor]):
    """An open checkpoint of any format: canonical names (or keys as written) -> :class:`StoredTensor`. Nothing is read until a slice is."""

    def __init__(self, source: Source, verify: Verify = "covered", allow_inconsistent: AllowInconsistent = False) -> None:
        self._source = source
        self._allow = allow_inconsistent
        self._doubts = Doubts(source, allow_inconsistent)
        self._verify: Verify = verify
        self._digests = Digests(source)
        if verify != "off":
            checked_source(source, self._digests)
        self.stats = ReadStats()

    def under(self, names: MappedNames) -> Checkpoint:
        """This checkpoint under the names of another model family (q, k and v of a fused tensor, experts stacked ...). Nothing is read.

        Raises SpecError: a name or shape that does not fit the map.
        """
        mapped = Checkpoint(names.apply(self._source), "off", self._allow)
        mapped._verify, mapped._digests = self._verify, self._digests
        return mapped

    @property
    def source(self) -> Source:
        """The catalog and the store behind it."""
        return self._source

    @property
    def catalog(self) -> Catalog:
        """The catalog."""
        return self._source.catalog

    @property
    def url(self) -> str:
        """Where it is."""
        return self._source.store.url

    @property
    def format(self) -> str:
        """``ucp``, ``dcp``, ``deepspeed``, ..."""
        return self._source.format

    @property
    def provenance(self) -> dict[str, Any]:
        """Who wrote it, as far as the checkpoint says."""
        return dict(self._source.provenance)

    @property
    def files(self) -> tuple[FileRow, ...]:
        """Files that hold tensor bytes: path and size."""
        return self.catalog.files

    @property
    def objects(self) -> ObjectView:
        """Everything that is not a tensor, read when asked for, through the restricted unpickler."""
        return ObjectView(self._source)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self[name].nbytes for name in self.names())

    def names(self) -> list[str]:
        """Canonical names of all tensors, sorted."""
        rows = (self.catalog.tensor(t) for t in range(self.catalog.n_tensors))
        return sorted(canonical_name(r.role, r.fqn, r.state, r.key) for r in rows)

    def __getitem__(self, name: str) -> StoredTensor:
        row = self.catalog.find_canonical(name)
        row = self.catalog.find(name) if row is None else row
        if row is None:
            hint = "; it is an object: use .objects" if self.catalog.find_object(name) is not None else nearest(name, self.catalog)
            raise MissingKeysError(f"{name!r} is not a tensor of {self.url}{hint}")
        return StoredTensor(self, self.catalog.tensor(row))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return self.catalog.n_tensors

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (self.catalog.find_canonical(name) is not None or self.catalog.find(name) is not None)

    def __repr__(self) -> str:
        return f"Checkpoint({self.url!r}, format={self.format!r}, tensors={len(self)})"

    def check(self, names: Iterable[str] | None = None) -> CheckReport:
        """Whether every fp32 master, rounded, is the stored weight: :func:`ucp_dcp.check.check`. Reads both."""
        from .check import check

        return check(self, names)

    def _read(self, row: TensorRow, box: Box, out: torch.Tensor) -> None:
        if self._doubts.active:
            self._doubts.look(row, [box], verify=self._verify, digests=self._digests, stats=self.stats)
            if row.fqn in self._doubts.broken and row.role in (Role.MASTER, Role.STATE):
                refuse(self._source, {row.fqn: self._doubts.broken[row.fqn]})
        read_box(self._source, row, box, out, verify=self._verify, digests=self._digests, stats=self.stats)

    def _compare(self, master: TensorRow, weight: TensorRow, slab: int) -> Comparison:
        box = full_box(master.shape)
        return compare(self._source, master, weight, box, slab=slab, verify=self._verify, digests=self._digests, stats=self.stats)


class ObjectView(Mapping[str, Any]):
    """Objects of a checkpoint by key; values are read when asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def _row(self, key: str) -> ObjectRow:
        row = self._source.catalog.find_object(key)
        if row is None:
            raise MissingKeysError(f"{key!r} is not an object of {self._source.store.url}")
        return row

    def __getitem__(self, key: str) -> Any:
        return self._source.read_object(self._row(key))

    def get(self, key: str, default: Any = None, *, allow_classes: Sequence[type] = ()) -> Any:
        """An object, optionally with more classes allowed, or ``default`` when there is none."""
        row = self._source.catalog.find_object(key)
        return default if row is None else self._source.read_object(row, tuple(allow_classes))

    def __iter__(self) -> Iterator[str]:
        return iter(row.key for row in self._source.catalog.objects)

    def __len__(self) -> int:
        return len(self._source.catalog.objects)


def open_checkpoint(
    url: str | os.PathLike[str] | Store,
    *,
    prefer: Literal["ucp", "stock"] | None = None,
    verify: Verify = "covered",
    names: MappedNames | None = None,
    allow_inconsistent: AllowInconsistent = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format where it lies. No tensor byte is read.

    ``verify`` and ``names``: as for :class:`UCPStorageReader`; ``verify="strict"`` makes a slice read whole blocks.
    ``allow_inconsistent``: as for :class:`UCPLoadPlanner`; reading a slice of optimizer state that fails the comparison is an error.

    Raises CheckpointNotFoundError, FormatError / CorruptCheckpointError (file named), ForeignSaveError (D4; see ``prefer``).
    """
    store = open_store(url, **dict(storage_options or {}))
    checkpoint = Checkpoint(open_source(store, prefer=prefer), verify, allow_inconsistent)
    return checkpoint if names is None else checkpoint.under(names)
