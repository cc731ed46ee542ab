"""``UCPStorageWriter``: DCP's StorageWriter over a Store, with the on-disk form and the commit protocol of ``docs/format.md``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .._version import __version__
from ..catalog import Catalog, CatalogBuilder, FileRow, ObjectRow
from ..dtypes import CODES, name_of
from ..errors import PlanError, UnsupportedError
from ..names import Role
from ..planners.agree import guarded
from ..planners.planned import Planned, PlannedMetadata
from ..planners.save_planner import UCPSavePlanner, UCPStorageMeta
from .commit import Begun, abandon, begin, check_visible, commit, new_generation
from .file_layout import plan_file, split_items
from .index_file import write_index
from .manifest import Manifest, digest
from .staging import LazyTensor, TensorPayloads
from .stock_metadata import stock_metadata_bytes
from .store import Store, open_store
from .write_file import FileJob, write_files

__all__ = ["UCPStorageWriter"]

GRACE = 300.0
"""Seconds that a replaced checkpoint stays for its readers, unless a writer says otherwise."""
_STOCK_VERSION = "1.0.0"  # what DCP's own FileSystemWriter puts into Metadata.version


@dataclass(frozen=True)
class RankResult:
    """What one rank wrote.

    ``files``: its files, with where their digests are. ``edges``: the first item of each file, and the number of items.
    ``offset``, ``length``: of each item's first byte in its file and of the whole item; ``payload``: of its first element.
    """

    rank: int
    files: list[FileRow]
    edges: list[int]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    payload: npt.NDArray[np.int64]

    @property
    def file(self) -> npt.NDArray[np.int32]:
        """For each item, which of the files it is in."""
        return np.repeat(np.arange(len(self.files), dtype=np.int32), np.diff(self.edges))


@dataclass(frozen=True)
class _Order:
    """Coordinator -> rank, in ``SavePlan.storage_data``."""

    generation: str
    rank: int
    stock: bool
    digests: bool


class UCPStorageWriter(StorageWriter):
    """Writes a checkpoint in the format of this package; with ``stock_metadata=True`` a plain ``dcp.load`` reads it too.

    Args:
        url: a local path, ``file://``, any fsspec URL, or a :class:`~ucp_dcp.storage.store.Store`.
        overwrite: False refuses when there is a checkpoint already, decided once for all ranks. The old checkpoint stays loadable until
            the new one is committed in any case.
        stock_metadata: also write what stock DCP needs (``.metadata`` and a torch.save frame around every item).
        provenance: free JSON-like fields kept in the manifest.
        grace: seconds that a replaced checkpoint stays readable for those who opened it before; the next save after that deletes it. 0
            deletes it at once: one copy on the disk instead of two, and readers that are inside fail.
        digests: write a digest of each MiB of the data files, so that a load can tell damage. They cost up to a fifth of the CPU time.
        storage_options: for the fsspec filesystem; for local paths ``sync=False`` skips fsync, ``threads=`` says how many write,
            ``files=`` into how many files at most (default: one per thread where that helps; each has at least 64 MiB).

    A save needs at most 17 MiB per thread (at most 4 threads unless told otherwise) beside the state, whatever its size; on an object store
    up to three of its parts per thread (48 MiB with parts of 16 MiB).
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        overwrite: bool = True,
        stock_metadata: bool = True,
        provenance: Mapping[str, Any] | None = None,
        grace: float = GRACE,
        digests: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._url = url
        self._options = dict(storage_options or {})
        self.overwrite = overwrite
        self.stock_metadata = stock_metadata
        self.grace = grace
        self.digests = digests
        self.provenance = dict(provenance or {})
        _check_provenance(self.provenance)
        self._store: Store = open_store(url, **self._options)
        self._save_id = uuid.uuid4().hex
        self._begun: Begun | None = None
        self._generation = ""

    def __getstate__(self) -> dict[str, Any]:
        # D18: process-based async save pickles the writer
        keep = ("_url", "overwrite", "stock_metadata", "grace", "digests", "provenance")
        return {**{k: self.__dict__[k] for k in keep}, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["_url"],
            overwrite=state["overwrite"],
            stock_metadata=state["stock_metadata"],
            provenance=state["provenance"],
            grace=state["grace"],
            digests=state["digests"],
            storage_options=state["_options"],
        )

    @property
    def _where(self) -> str:
        """The URL as text."""
        return os.fspath(self._url) if isinstance(self._url, str | os.PathLike) else self._url.url

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The URL this writer writes to."""
        return self._url if isinstance(self._url, str | os.PathLike) else self._url.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a store can be opened at this URL."""
        try:
            open_store(checkpoint_id)
        except UnsupportedError:
            return False
        return True

    # -- StorageWriter --------------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another save, at another URL if given; storage options are kept."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self._where:
            self._url = checkpoint_id
            self._store = open_store(checkpoint_id, **self._options)
        self._save_id = uuid.uuid4().hex
        self._begun, self._generation = None, ""

    def storage_meta(self) -> StorageMeta:
        """Tells our planner that this is our writer (D1)."""
        return UCPStorageMeta(checkpoint_id=self._where, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses ``use_collectives=False``: without a coordinator there is no commit."""
        if kwargs.get("use_collectives", True) is False:
            raise UnsupportedError(
                "dcp.save(use_collectives=False) writes a checkpoint per rank that cannot be resharded;"
                " UCPStorageWriter needs a coordinator"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to do on a rank before the overwrite decision."""
        return plan

    @guarded
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide once for all ranks about overwriting, repair what a crash left behind, draw the generation (D3-D5)."""
        self._begun = begin(self._store, overwrite=self.overwrite)
        self._generation = new_generation()
        return [dataclasses.replace(plan, storage_data=self._order(i)) for i, plan in enumerate(plans)]

    def _order(self, rank: int) -> _Order:
        return _Order(self._generation, rank, self.stock_metadata, self.digests)

    @guarded
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into a few files of the new generation; durable on return."""
        order = plan.storage_data
        if not isinstance(order, _Order):
            raise PlanError(f"write_data got {type(order).__name__} instead of this writer's order")
        results: list[Any] = []
        if isinstance(planner, UCPSavePlanner):
            result = _write(self._store, order, list(planner.payloads()), list(planner.object_payloads()))
            results = [result] if result is not None else []
        else:
            # beside the one row for all files, a row for each item: only its planner knows what they are
            tensors, objects = _foreign_items(plan, planner)
            result = _write(self._store, order, tensors, objects)
            if result is not None:
                paths = [result.files[f].path for f in result.file.tolist()]
                rows = zip(paths, result.offset.tolist(), result.length.tolist(), result.payload.tolist(), strict=True)
                stored = [(index, name_of(tensor.dtype)) for index, tensor in tensors] + [(index, "") for index, _ in objects]
                results = [
                    result,
                    *(WriteResult(i, row[2], (*row, dtype)) for (i, dtype), row in zip(stored, rows, strict=True)),
                ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @guarded
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Assemble the catalog and commit (coordinator)."""
        self._check_generation(results)
        if isinstance(metadata, PlannedMetadata) and metadata.planned is not None:
            catalog, stock = self._finish_planned(metadata.planned, results)
        else:
            catalog, stock = self._finish_foreign(metadata, results)
        check_visible(self._store, self._generation, {row.path: row.size for row in catalog.files})
        index_path = f"{self._generation}/index.ucp"
        size, sections = write_index(self._store, index_path, catalog.to_sections())
        provenance = {
            "writer": f"ucp_dcp {__version__}",
            "torch": torch.__version__,
            "world_size": len(results),
            "payload_crc32": False,
            **self.provenance,
        }
        manifest = Manifest.new(
            generation=self._generation, index_path=index_path, index_size=size, sections=sections, provenance=provenance
        )
        commit(self._store, manifest, stock, begun=self._begun, overwrite=self.overwrite, grace=self.grace)
        self._generation = ""
        metadata.version = _STOCK_VERSION

    def _check_generation(self, results: list[list[Any]]) -> None:
        """Two saves at once with one writer (a second async_save before the first is done) must not share a manifest."""
        paths: set[str] = set()
        for result in (r for part in results for r in part):
            paths.update([row.path for row in result.files] if isinstance(result, RankResult) else [result.storage_data[0]])
        if not self._generation or any(not path.startswith(f"{self._generation}/") for path in paths):
            raise PlanError(
                f"{self._store.url}: this UCPStorageWriter was used for another save while this one was under way; nothing was committed. "
                "Wait for the first save, or use one writer for each"
            )

    def abandon(self) -> None:
        """Delete what a failed save wrote (coordinator; only once no rank writes any more).

        Does nothing after a commit or before a save.
        """
        if self._generation:
            abandon(self._store, self._generation)
            self._generation = ""

    # -- assembling -----------------------------------------------------------------------------------------------------------

    def _finish_planned(self, planned: Planned, results: list[list[Any]]) -> tuple[Catalog, bytes | None]:
        by_rank: dict[int, RankResult] = {r.rank: r for part in results for r in part}
        files: list[FileRow] = []
        first: dict[int, int] = {}  # rank -> number of its first file
        for rank in sorted(by_rank):
            first[rank] = len(files)
            files += by_rank[rank].files
        chunks = len(planned.owner)
        start, length, payload = (np.zeros(chunks, dtype=np.int64) for _ in range(3))
        file = np.full(chunks, -1, dtype=np.int32)
        order = np.argsort(planned.owner, kind="stable")
        edges = np.searchsorted(planned.owner[order], np.arange(planned.world + 1))
        taken = dict.fromkeys(range(planned.world), 0)
        for rank in range(planned.world):
            mine = order[edges[rank] : edges[rank + 1]]
            taken[rank] = len(mine)
            if len(mine):
                result = by_rank[rank]
                start[mine], length[mine] = result.offset[: len(mine)], result.length[: len(mine)]
                payload[mine] = result.payload[: len(mine)]
                file[mine] = first[rank] + result.file[: len(mine)]
        objects = []
        for entry, rank in planned.objects:
            result, at = by_rank[rank], taken[rank]
            taken[rank] += 1
            objects.append(
                ObjectRow(
                    key=entry.key,
                    role=Role.OBJECT,
                    fqn=entry.key,
                    state="",
                    path=tuple(entry.path),
                    file=first[rank] + int(result.file[at]),
                    offset=int(result.offset[at]),
                    length=int(result.length[at]),
                    encoding="torch_save",
                    value=None,
                )
            )
        if planned.tied:
            planned, written = planned.with_tied()
            start, length, payload, file = start[written], length[written], payload[written], file[written]
        catalog = _catalog_of(planned, files, file, payload, objects)
        if not self.stock_metadata:
            return catalog, None
        stock = stock_metadata_bytes(
            planned,
            file.tolist(),
            start.tolist(),
            length.tolist(),
            [(row.key, row.file, row.offset, row.length) for row in objects],
            [row.path for row in files],
            StorageMeta(checkpoint_id=self._where, save_id=self._save_id),
            _STOCK_VERSION,
        )
        return catalog, stock

    def _finish_foreign(self, metadata: Metadata, results: list[list[Any]]) -> tuple[Catalog, bytes | None]:
        """A save planned by somebody else's planner: its Metadata is the truth, our file positions are added."""
        where = {r.index: r.storage_data for part in results for r in part if not isinstance(r, RankResult)}
        builder = CatalogBuilder()
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        files = [row for part in results for r in part if isinstance(r, RankResult) for row in r.files]
        files.sort(key=lambda row: row.path)
        file_ids = {row.path: builder.add_file(row.path, row.size, row.blocks) for row in files}
        for key, entry in metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if isinstance(entry, BytesStorageMetadata):
                file, offset, length, _, _ = where[MetadataIndex(key)]
                builder.add_object(
                    ObjectRow(
                        key=key, role=Role.OBJECT, fqn=key, state="", path=path, file=file_ids[file],
                        offset=offset, length=length, encoding="torch_save", value=None,
                    )
                )  # fmt: skip
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise PlanError(f"{key!r}: unknown kind of storage metadata {type(entry).__name__}")
            dtype = name_of(entry.properties.dtype)
            handle = builder.add_tensor(key=key, role=Role.PLAIN, fqn="", state="", dtype=dtype, shape=tuple(entry.size), path=path)
            for chunk in entry.chunks:
                if 0 in chunk.sizes:
                    continue
                file, _, _, payload, stored = where[MetadataIndex(key, chunk.offsets)]
                box = np.asarray([[list(chunk.offsets), list(chunk.sizes)]], dtype=np.int64).reshape(1, 2, len(entry.size))
                # a planner may give another dtype than it planned
                stored = stored if stored != dtype else None
                builder.add_chunks(handle, box, file_ids[file], np.asarray([payload], dtype=np.int64), dtype=stored)
        if not self.stock_metadata:
            return builder.build(), None
        storage = {index: _StorageInfo(path, offset, length) for index, (path, offset, length, *_) in where.items()}
        meta = StorageMeta(checkpoint_id=self._where, save_id=self._save_id)
        stock = Metadata(
            dict(metadata.state_dict_metadata), metadata.planner_data, storage_data=storage, storage_meta=meta, version=_STOCK_VERSION
        )
        return builder.build(), pickle.dumps(stock)


_RESERVED = ("writer", "torch", "world_size", "payload_crc32")
_LARGEST_PROVENANCE = 32 << 10  # bytes of JSON: the manifest as a whole may have 64 KiB


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    """Raises PlanError now for what the commit would refuse when all bytes are written."""
    reserved = [name for name in _RESERVED if name in provenance]
    if reserved:
        raise PlanError(f"provenance field {reserved[0]!r} is written by this package; use another name")
    try:
        size = len(json.dumps(dict(provenance), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"provenance is not plain JSON: {error}; use strings, numbers, lists and maps") from error
    if size > _LARGEST_PROVENANCE:
        raise PlanError(f"provenance has {size} bytes of JSON; at most {_LARGEST_PROVENANCE} are kept in a manifest")


def _foreign_items(plan: SavePlan, planner: SavePlanner) -> tuple[list[tuple[Any, LazyTensor]], list[tuple[Any, bytes]]]:
    """(index, data) of the items of somebody else's planner, in file order."""
    tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
    objects = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
    tensors.sort(key=lambda i: (i.index.fqn, tuple(i.index.offset or ())))
    objects.sort(key=lambda i: i.index.fqn)

    def resolve(item: WriteItem) -> torch.Tensor:
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise PlanError(f"{item.index.fqn!r}: the planner gives a {type(data).__name__} for a tensor item")
        planned = item.tensor_data.chunk.sizes if item.tensor_data is not None else data.shape
        if data.shape != planned:
            raise PlanError(f"{item.index.fqn!r}: the planner gives a tensor of shape {tuple(data.shape)}, but planned {tuple(planned)}")
        return data

    def resolve_bytes(item: WriteItem) -> bytes:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            raise PlanError(f"{item.index.fqn!r}: the planner gives a tensor for a bytes item")
        return data.getvalue()

    return [(i.index, LazyTensor(partial(resolve, i))) for i in tensors], [(i.index, resolve_bytes(i)) for i in objects]


_FILE = 64 << 20
"""Bytes of payload below which a further data file is not worth its fsyncs."""


def _spread(store: Store, rank: int) -> str:
    """The folder of a rank's files in a store that serves each prefix of its keys at a limited rate: one of 256, else none."""
    return f"{digest(rank.to_bytes(8, 'little'))[:2]}/" if getattr(store, "spread", False) else ""


def _write(
    store: Store,
    order: _Order,
    tensors: Sequence[tuple[Any, torch.Tensor | LazyTensor]],
    objects: Sequence[tuple[Any, bytes]],
) -> RankResult | None:
    """Write all items of a rank, and the sidecars of its files; None when there is no item (then no file is made).

    Items stay in order; each file has a run of them. Where the kernel lets one write into a file at a time, threads that share a file
    wait for each other.
    """
    if not tensors and not objects:
        return None
    sizes = [tensor.nbytes for _, tensor in tensors] + [len(data) for _, data in objects]
    most = getattr(store, "parallel_files", 1)  # a store that says nothing takes one
    edges = split_items(sizes, max(1, min(most, sum(sizes) // _FILE)))
    jobs: list[FileJob] = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        own, rest = tensors[low:high], objects[max(low - len(tensors), 0) : max(high - len(tensors), 0)]
        payloads = TensorPayloads([t for _, t in own], [data for _, data in rest], [name for name, _ in own])
        layout = plan_file(payloads.items, payloads.sizes, framed=order.stock)
        jobs.append(FileJob(f"{order.generation}/{_spread(store, order.rank)}__{order.rank}_{number}.distcp", layout, payloads))
    rows = write_files(store, jobs, digests=order.digests)
    offset, length, payload = (
        np.concatenate(columns) for columns in zip(*((j.layout.offset, j.layout.length, j.layout.payload) for j in jobs), strict=True)
    )
    return RankResult(order.rank, rows, edges, offset, length, payload)


def _catalog_of(
    planned: Planned,
    files: list[FileRow],
    chunk_file: npt.NDArray[np.int32],
    chunk_offset: npt.NDArray[np.int64],
    objects: list[ObjectRow],
) -> Catalog:
    rows = planned.rows
    patterns: dict[str, int] = {}
    pattern = [patterns.setdefault(row.pattern, len(patterns)) if row.pattern else -1 for row in rows]
    return Catalog.from_columns(
        keys=[row.key for row in rows],
        roles=[row.role for row in rows],
        fqns=[row.fqn for row in rows],
        states=[row.state for row in rows],
        dtypes=[CODES[row.dtype] for row in rows],
        shape_start=np.cumsum([0, *(len(row.shape) for row in rows)], dtype=np.int64),
        shape=np.asarray([extent for row in rows for extent in row.shape], dtype=np.int64),
        chunk_start=planned.chunk_start,
        coords=planned.coords,
        files=files,
        chunk_file=chunk_file,
        chunk_offset=chunk_offset,
        objects=objects,
        paths=[tuple(row.path) for row in rows],
        pattern=np.asarray(pattern, dtype=np.int32),
        patterns=[{"text": text} for text in patterns],
    )
