"""``UCPStorageReader``: DCP's StorageReader over any checkpoint that ``formats`` can open."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import MissingKeysError, PlanError, UnsupportedError
from ..formats import MappedNames, Source, open_source
from ..planners.agree import guarded, portable
from ..planners.load_planner import UCPLoadPlanner
from ..planners.replicas import serialize_object
from ..planners.served import FailedMetadata, ServedMetadata
from ..transfer import Copy, Digests, ReadStats, Verify, checked_source, read_copies
from .shared_open import open_shared
from .store import Store, open_store

__all__ = ["UCPStorageReader"]


class UCPStorageReader(StorageReader):
    """Reads our format, stock DCP and DeepSpeed checkpoints where they lie, byte ranges only.

    Works with :class:`UCPLoadPlanner` and with any other DCP load planner.

    Args:
        url: a local path, ``file://``, any fsspec URL, or a :class:`~ucp_dcp.storage.store.Store`.
        process_group: a foreign checkpoint is parsed once across the ranks of this group (every rank of it must then read); without it
            every rank parses alone. ``ucp_dcp.load`` passes the group of the load.
        prefer: which checkpoint to open when a plain ``dcp.save`` wrote over ours: ``"ucp"`` or ``"stock"``; without it that is an error.
        verify: what is checked against the digests of a checkpoint that has them. ``"covered"``: every block that a load reads whole, and
            all objects; ``"strict"``: every byte loaded, for which whole blocks are read; ``"off"``.
        gap: holes between wanted bytes that are at most this many bytes wide may be read too, where that costs less or completes a
            block: at most as many bytes again as are wanted (but for holes below 512 bytes).
        names: the tensors are wanted under the names of another model family (:class:`~ucp_dcp.formats.MappedNames`).
        storage_options: for :class:`~ucp_dcp.storage.local.LocalStore` (``threads``: how many read at once) or the fsspec filesystem.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        process_group: dist.ProcessGroup | None = None,
        prefer: Literal["ucp", "stock"] | None = None,
        verify: Verify = "covered",
        gap: int = 4096,
        names: MappedNames | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._url = url
        self._group = process_group
        self._prefer: Literal["ucp", "stock"] | None = prefer
        if verify not in ("covered", "strict", "off"):
            raise PlanError(f"verify={verify!r}; expected 'covered', 'strict' or 'off'")
        self._verify: Verify = verify
        self._gap = gap
        self._names = names
        self._options = dict(storage_options or {})
        self._source: Source | None = None
        self._digests: Digests | None = None
        self.stats = ReadStats()

    def __getstate__(self) -> dict[str, Any]:
        # D18: no group, no open source travels
        kept = ("_url", "_prefer", "_verify", "_gap", "_names", "_options")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["_url"],
            prefer=state["_prefer"],
            verify=state["_verify"],
            gap=state["_gap"],
            names=state["_names"],
            storage_options=state["_options"],
        )

    @property
    def _where(self) -> str:
        """The URL as text."""
        return os.fspath(self._url) if isinstance(self._url, str | os.PathLike) else self._url.url

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The URL this reader reads from."""
        return self._url if isinstance(self._url, str | os.PathLike) else self._url.url

    @property
    def source(self) -> Source:
        """The open checkpoint. Raises PlanError before ``read_metadata``."""
        if self._source is None:
            raise PlanError("the checkpoint is not open yet: read_metadata comes first")
        return self._source

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a store can be opened at this URL."""
        try:
            open_store(checkpoint_id)
        except UnsupportedError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the open checkpoint; go to another URL if given; storage options are kept."""
        if checkpoint_id is not None:
            self._url = checkpoint_id
        self._source = None
        self.stats = ReadStats()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint. A failure is kept and raised by the next planning call: DCP would replace it by an AssertionError (D17)."""
        try:
            # anew each time: what lies there may have been replaced since the last load with this reader
            store = open_store(self._url, **self._options)
            if self._group is not None:
                self._source = open_shared(store, self._group, prefer=self._prefer)
            else:
                self._source = open_source(store, prefer=self._prefer)
            self._digests = Digests(self._source)
            if self._verify != "off":
                checked_source(self._source, self._digests)
            if self._names is not None:  # behind the check: digests belong to files, which are the same
                self._source = self._names.apply(self._source)
            metadata = ServedMetadata.of(self._source)
        except Exception as error:
            self._source = None
            return FailedMetadata(error=portable(error), storage_meta=StorageMeta())
        metadata.storage_meta = StorageMeta(checkpoint_id=self._where)
        return metadata

    @guarded
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Foreign planners do not look at failed metadata; here they get the cause."""
        if isinstance(metadata, FailedMetadata) and metadata.error is not None:
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to do."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to do."""
        return plans

    @guarded
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's destinations."""
        if isinstance(planner, UCPLoadPlanner):
            self.stats = planner.execute(self.source, gap=self._gap, verify=self._verify, digests=self._digests)
        else:
            self._read_items(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Ordinary ReadItems of a foreign planner, answered from byte ranges."""
        source = self.source
        catalog = source.catalog
        chunk_at: dict[str, dict[tuple[int, ...], int]] = {}
        copies: list[Copy] = []
        commits: list[tuple[Any, torch.Tensor]] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                row = catalog.find_object(key)
                if row is None:
                    raise MissingKeysError(f"object {key!r} is not in the checkpoint")
                # through the restricted unpickler first: what the foreign planner unpickles afterwards is ours (D16)
                planner.load_bytes(item, io.BytesIO(serialize_object(source.read_object(row))))
                continue
            t = catalog.find(key)
            if t is None:
                raise MissingKeysError(f"tensor {key!r} is not in the checkpoint")
            if key not in chunk_at:
                first = catalog.chunk_range(t)[0]
                # a chunk without elements may begin where a real one does
                places = enumerate(catalog.boxes(t).tolist())
                chunk_at[key] = {tuple(offset): first + i for i, (offset, size) in places if 0 not in size}
            chunk = chunk_at[key].get(tuple(item.storage_index.offset or ()))
            if chunk is None and 0 in item.lengths:
                continue
            if chunk is None:
                raise PlanError(f"tensor {key!r} has no stored chunk at offset {item.storage_index.offset}")
            target = planner.resolve_tensor(item).detach()
            if target.size() != item.lengths:
                raise PlanError(f"tensor {key!r}: the planner offers {tuple(target.size())} for a read of {tuple(item.lengths)}")
            copies.append(Copy(chunk, tuple(item.storage_offsets), target))
            commits.append((item, target))
        self.stats = read_copies(source, copies, gap=self._gap, verify=self._verify, digests=self._digests)
        for item, target in commits:
            planner.commit_tensor(item, target)
