"""``UCPStorageWriter``: DCP's StorageWriter over a Store, with the on-disk form and the commit protocol of ``docs/format.md``."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from ..transfer import flat_bytes
from .commit import Begun, abandon, begin, check_visible, commit, new_generation
from .framing import align, tensor_frame
from .index_file import write_index
from .manifest import Manifest
from .stock_metadata import stock_metadata_bytes
from .store import Store, Writer, open_store

__all__ = ["UCPStorageWriter"]

GRACE = 300.0
"""Seconds that a replaced checkpoint stays for its readers, unless a writer says otherwise."""
_STOCK_VERSION = "1.0.0"  # what DCP's own FileSystemWriter puts into Metadata.version
_SLAB = 64 << 20  # bytes copied at once from tensors whose memory is not the box's bytes (strided, on a device)


@dataclass(frozen=True)
class RankResult:
    """What one rank wrote.

    ``offset``, ``length``: of each item's first byte in the file and of the whole item; ``payload``: of its first element.
    """

    rank: int
    path: str
    size: int
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    payload: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Coordinator -> rank, in ``SavePlan.storage_data``."""

    generation: str
    rank: int
    stock: bool


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
        storage_options: for the fsspec filesystem (``sync=False`` for local paths skips fsync).
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        overwrite: bool = True,
        stock_metadata: bool = True,
        provenance: Mapping[str, Any] | None = None,
        grace: float = GRACE,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._url = url
        self._options = dict(storage_options or {})
        self.overwrite = overwrite
        self.stock_metadata = stock_metadata
        self.grace = grace
        self.provenance = dict(provenance or {})
        _check_provenance(self.provenance)
        self._store: Store = open_store(url, **self._options)
        self._save_id = uuid.uuid4().hex
        self._begun: Begun | None = None
        self._generation = ""

    def __getstate__(self) -> dict[str, Any]:
        # D18: process-based async save pickles the writer
        keep = ("_url", "overwrite", "stock_metadata", "grace", "provenance")
        return {**{k: self.__dict__[k] for k in keep}, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["_url"],
            overwrite=state["overwrite"],
            stock_metadata=state["stock_metadata"],
            provenance=state["provenance"],
            grace=state["grace"],
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
        return [dataclasses.replace(plan, storage_data=_Order(self._generation, i, self.stock_metadata)) for i, plan in enumerate(plans)]

    @guarded
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one file of the new generation; durable on return."""
        order = plan.storage_data
        if not isinstance(order, _Order):
            raise PlanError(f"write_data got {type(order).__name__} instead of this writer's order")
        path = f"{order.generation}/__{order.rank}_0.distcp"
        results: list[Any] = []
        tensors: Iterator[tuple[Any, torch.Tensor]]
        objects: Iterator[tuple[Any, bytes]]
        if isinstance(planner, UCPSavePlanner):
            tensors, objects = planner.payloads(), planner.object_payloads()
        else:
            tensors, objects = _foreign_items(plan, planner)
        written = _write_file(self._store, path, order, tensors, objects)
        if written is not None:
            result, indices = written
            results = [result]
            if not isinstance(planner, UCPSavePlanner):
                rows = zip(indices, result.offset.tolist(), result.length.tolist(), result.payload.tolist(), strict=True)
                results = [WriteResult(index, length, (path, offset, length, payload)) for index, offset, length, payload in rows]
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
        paths = {r.path if isinstance(r, RankResult) else r.storage_data[0] for part in results for r in part}
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
        ranks = sorted(by_rank)
        files = [FileRow(by_rank[r].path, by_rank[r].size) for r in ranks]
        file_of_rank = np.full(planned.world, -1, dtype=np.int32)
        file_of_rank[ranks] = np.arange(len(ranks))
        chunks = len(planned.owner)
        start, length, payload = (np.zeros(chunks, dtype=np.int64) for _ in range(3))
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
                    file=int(file_of_rank[rank]),
                    offset=int(result.offset[at]),
                    length=int(result.length[at]),
                    encoding="torch_save",
                    value=None,
                )
            )
        if planned.tied:
            planned, written = planned.with_tied()
            start, length, payload = start[written], length[written], payload[written]
        catalog = _catalog_of(planned, files, file_of_rank[planned.owner], payload, objects)
        if not self.stock_metadata:
            return catalog, None
        stock = stock_metadata_bytes(
            planned,
            file_of_rank[planned.owner].tolist(),
            start.tolist(),
            length.tolist(),
            [(row.key, row.file, row.offset, row.length) for row in objects],
            [file.path for file in files],
            StorageMeta(checkpoint_id=self._where, save_id=self._save_id),
            _STOCK_VERSION,
        )
        return catalog, stock

    def _finish_foreign(self, metadata: Metadata, results: list[list[WriteResult]]) -> tuple[Catalog, bytes | None]:
        """A save planned by somebody else's planner: its Metadata is the truth, our file positions are added."""
        where = {r.index: r.storage_data for part in results for r in part}
        builder = CatalogBuilder()
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        ends: dict[str, int] = {}
        for path, offset, length, _ in where.values():
            ends[path] = max(ends.get(path, 0), offset + length)
        file_ids = {path: builder.add_file(path, end) for path, end in sorted(ends.items())}
        for key, entry in metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if isinstance(entry, BytesStorageMetadata):
                file, offset, length, _ = where[MetadataIndex(key)]
                builder.add_object(
                    ObjectRow(
                        key=key, role=Role.OBJECT, fqn=key, state="", path=path, file=file_ids[file],
                        offset=offset, length=length, encoding="torch_save", value=None,
                    )
                )  # fmt: skip
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise PlanError(f"{key!r}: unknown kind of storage metadata {type(entry).__name__}")
            handle = builder.add_tensor(
                key=key, role=Role.PLAIN, fqn="", state="", dtype=name_of(entry.properties.dtype), shape=tuple(entry.size), path=path
            )
            for chunk in entry.chunks:
                if 0 in chunk.sizes:
                    continue
                file, _, _, payload = where[MetadataIndex(key, chunk.offsets)]
                box = np.asarray([[list(chunk.offsets), list(chunk.sizes)]], dtype=np.int64).reshape(1, 2, len(entry.size))
                builder.add_chunks(handle, box, file_ids[file], np.asarray([payload], dtype=np.int64))
        if not self.stock_metadata:
            return builder.build(), None
        storage = {index: _StorageInfo(path, offset, length) for index, (path, offset, length, _) in where.items()}
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


def _foreign_items(plan: SavePlan, planner: SavePlanner) -> tuple[Iterator[tuple[Any, torch.Tensor]], Iterator[tuple[Any, bytes]]]:
    tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
    objects = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
    tensors.sort(key=lambda i: (i.index.fqn, tuple(i.index.offset or ())))
    objects.sort(key=lambda i: i.index.fqn)

    def resolve(item: WriteItem) -> torch.Tensor:
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise PlanError(f"{item.index.fqn!r}: the planner gives a {type(data).__name__} for a tensor item")
        return data

    def resolve_bytes(item: WriteItem) -> bytes:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            raise PlanError(f"{item.index.fqn!r}: the planner gives a tensor for a bytes item")
        return data.getvalue()

    return ((i.index, resolve(i)) for i in tensors), ((i.index, resolve_bytes(i)) for i in objects)


def _write_file(
    store: Store, path: str, order: _Order, tensors: Iterator[tuple[Any, torch.Tensor]], objects: Iterator[tuple[Any, bytes]]
) -> tuple[RankResult, list[Any]] | None:
    """Stream all items of a rank into one file; None when there is none (then no file is made)."""
    first_tensor, first_object = next(tensors, None), None
    if first_tensor is None:
        first_object = next(objects, None)
        if first_object is None:
            return None
    offsets: list[int] = []
    lengths: list[int] = []
    payloads: list[int] = []
    indices: list[Any] = []
    at = 0
    with store.create(path) as writer:

        def pad() -> None:
            nonlocal at
            gap = align(at) - at
            if gap:
                writer.write(bytes(gap))
                at += gap

        tensor = first_tensor
        while tensor is not None:
            index, view = tensor
            pad()
            begin = at
            nbytes = view.numel() * view.element_size()
            if order.stock:
                frame = tensor_frame(name_of(view.dtype), tuple(view.shape))
                writer.write(frame.head)
                at += len(frame.head)
                payloads.append(at)
                _write_payload(writer, view)
                writer.write(frame.tail)
                at += nbytes + len(frame.tail)
            else:
                payloads.append(at)
                _write_payload(writer, view)
                at += nbytes
            offsets.append(begin)
            lengths.append(at - begin)
            indices.append(index)
            tensor = next(tensors, None)
        item = first_object if first_object is not None else next(objects, None)
        while item is not None:
            index, data = item
            pad()
            writer.write(data)
            offsets.append(at)
            payloads.append(at)
            lengths.append(len(data))
            indices.append(index)
            at += len(data)
            item = next(objects, None)
    columns = (np.asarray(column, dtype=np.int64) for column in (offsets, lengths, payloads))
    return RankResult(order.rank, path, at, *columns), indices


def _write_payload(writer: Writer, view: torch.Tensor) -> None:
    """The elements of a view in C order: from its own memory when they lie so, else in bounded copies."""
    view = view.detach()
    if view.numel() == 0:
        return
    nbytes = view.numel() * view.element_size()
    plain = view.device.type == "cpu" and view.is_contiguous() and not view.is_conj() and not view.is_neg()
    if plain or nbytes <= _SLAB or view.dim() == 0:
        writer.write(flat_bytes(view.cpu().resolve_conj().resolve_neg().contiguous()).numpy().data)
        return
    if view.shape[0] == 1:
        _write_payload(writer, view[0])
        return
    step = max(1, view.shape[0] * _SLAB // nbytes)
    for start in range(0, view.shape[0], step):
        _write_payload(writer, view[start : start + step])


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
