"""``UCPSavePlanner``: the DCP SavePlanner that understands layouts (paper: Extract + Union at planning time)."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from ..dtypes import name_of
from ..errors import PlanError, UnsupportedError
from ..layout import Collected, Fragment, Layout, ObjectLeaf, PerRank, collect
from .agree import agree, guarded
from .average import average_fragments, check_averaged
from .merge import check_replicas, merge_objects
from .plan_cache import plan_tensors
from .planned import Assignment, PlannedMetadata, stock_state_dict_metadata, ucp_planner_data, with_objects
from .replicas import CheckReplicas, object_digest, serialize_object, tensor_digest
from .tied import same_memory
from .wire import KeyRow, LocalPlan, ObjectEntry, digest_columns, pack_local

__all__ = ["UCPSavePlanner", "UCPStorageMeta"]


@dataclass
class UCPStorageMeta(StorageMeta):
    """What our writer tells the planner about itself (design decision D1)."""

    ucp_version: int = 1


def _averages(layout: Layout) -> bool:
    """Whether any rule averages: the same on all ranks of one spec, so that all of them enter the collectives."""
    return any(step.kind == "Average" for rule in layout.spec.rules for step in rule.steps)


def _ranks(group: dist.ProcessGroup | None) -> int:
    """Ranks of a save over this group, or over more than are known here."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def _dtype_name(fragment: Fragment) -> str:
    if fragment.view.is_meta:
        raise PlanError(f"tensor {fragment.key!r} is on the meta device: it has no values to save")
    try:
        return name_of(fragment.view.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor {fragment.key!r}: {error}") from None


def _serialized(leaf: ObjectLeaf) -> tuple[bytes, bytes]:
    """Bytes of an object and the digest of its value."""
    if _holds_per_rank(leaf.value):
        raise PlanError(
            f"object {leaf.key!r} of type {type(leaf.value).__name__} holds a PerRank; PerRank works as a value of a dict or in a "
            "list, not inside a tuple or another object"
        )
    try:
        data = serialize_object(leaf.value)
        return data, object_digest(leaf.value, data)
    except Exception as error:
        raise PlanError(f"object {leaf.key!r} of type {type(leaf.value).__name__} cannot be pickled: {error}") from error


def _holds_per_rank(value: Any, depth: int = 0) -> bool:
    if isinstance(value, PerRank):
        return True
    if depth > 64 or not isinstance(value, dict | list | tuple):
        return False
    return any(_holds_per_rank(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))


class UCPSavePlanner(SavePlanner):
    """Plans a save of DTensors, ShardedTensors, CheckpointableTensors, plain tensors and objects, and of *fragments* described by a layout.

    Use it with ``dcp.save`` / ``dcp.async_save``, with :class:`ucp_dcp.UCPStorageWriter` or with DCP's own writers.

    Args:
        layout: how plain tensors below the layout's roots are divided over the ranks. Without it, plain tensors are replicas, as in DCP.
        roots: top-level path -> ``"model"`` or ``"optimizer"``: what lies there gets a role and an fqn. Default: the layout's roots.
        check_replicas: ``"sample"`` compares replicas by content digest (all bytes up to 1 MiB, evenly spaced parts above), ``"full"``
            by all bytes, ``"off"`` not at all.
        process_group: the group of the save; needed only when the layout has ``Average()``.

    Raises (on every rank, inside DCP's CheckpointException): CoverageError for holes and overlaps, ReplicaMismatchError for replicas that
    differ, LayoutError for a layout that does not fit. All before a byte is written.
    """

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        roots: Mapping[str, str] | None = None,
        check_replicas: CheckReplicas = "sample",
        process_group: dist.ProcessGroup | None = None,
        enable_plan_caching: bool = False,
    ) -> None:
        if enable_plan_caching:
            raise UnsupportedError(
                "enable_plan_caching: DCP keys that cache by the planner class's name, so two state dicts or two dtypes would share plans"
            )
        if check_replicas not in ("full", "sample", "off"):
            raise PlanError(f"check_replicas={check_replicas!r}; expected 'full', 'sample' or 'off'")
        self.layout = layout
        self.roots = dict(roots) if roots is not None else None
        self.check_replicas: CheckReplicas = check_replicas
        self._process_group = process_group
        self._no_dist = False
        self._collected: Collected | None = None
        self._fragments: list[Fragment] = []
        self._object_bytes: dict[str, bytes] = {}
        self._assignment: Assignment | None = None
        self._ours = False
        self._alone = False
        self._local: LocalPlan | None = None
        self._stock_tensors: dict[MetadataIndex, torch.Tensor] = {}
        self._stock_bytes: dict[str, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        # D18: DCP's process-based async save pickles the planner; only what the user gave may travel.
        return {"layout": self.layout, "roots": self.roots, "check_replicas": self.check_replicas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- SavePlanner ---------------------------------------------------------------------------------------------------------

    @guarded
    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Find the fragments and objects of this rank. Collective only when the layout has ``Average()``."""
        self._ours = isinstance(storage_meta, UCPStorageMeta)
        self._assignment = None
        self._collected = None
        self._local = None
        self._alone = is_coordinator and (self._no_dist or _ranks(self._process_group) == 1)
        averages = self.layout is not None and _averages(self.layout)
        together = averages and not self._no_dist and dist.is_available() and dist.is_initialized()
        error: Exception | None = None
        collected = Collected()
        try:
            collected = collect(state_dict, layout=self.layout, roots=self.roots)
            if self.layout is not None and averages:
                check_averaged(collected.fragments, self.layout, alone=not together)
        except Exception as failure:
            if not together:
                raise
            error = failure
        fragments = collected.fragments
        if self.layout is not None and together:
            # a rank that raised here would leave the others waiting for it in the collectives of the mean
            agree(error, self._process_group)
            fragments = average_fragments(fragments, self.layout, self._process_group)
        self._collected = collected
        self._fragments = sorted(
            (f for f in fragments if f.writes and not f.box.empty),
            key=lambda f: (f.key, f.box.offset, f.box.size),
        )

    @guarded
    def create_local_plan(self) -> SavePlan:
        """One row per fragment, in numpy columns; ``items`` stays empty (design decision D2)."""
        if self._collected is None:
            raise PlanError("create_local_plan was called before set_up_planner")
        rows: dict[str, KeyRow] = {}
        dtypes: dict[torch.dtype, str] = {}
        for fragment in self._collected.fragments:
            dtype = fragment.view.dtype
            if fragment.view.is_meta or (name := dtypes.get(dtype)) is None:
                name = dtypes[dtype] = _dtype_name(fragment)
            row = KeyRow(
                fragment.key,
                int(fragment.role),
                fragment.fqn,
                fragment.state,
                name,
                tuple(fragment.shape),
                fragment.pattern,
                tuple(fragment.path),
            )
            other = rows.setdefault(fragment.key, row)
            if other is not row and (other.dtype, other.shape) != (row.dtype, row.shape):
                raise PlanError(
                    f"tensor {fragment.key!r}: this rank holds parts of it as {other.dtype} {other.shape} and as {row.dtype} {row.shape}"
                )
        order = sorted(rows)
        index = {key: i for i, key in enumerate(order)}
        objects: list[ObjectEntry] = []
        self._object_bytes = {}
        for leaf in self._collected.objects:
            if leaf.key in rows:
                raise PlanError(f"{leaf.key!r} is both a tensor and an object of this rank's state dict")
            data, digest = _serialized(leaf)
            self._object_bytes[leaf.key] = data
            objects.append(ObjectEntry(leaf.key, tuple(leaf.path), digest, len(data), leaf.per_rank))
        tied = [(index[key], index[group[0]]) for group in same_memory(self._fragments) for key in group[1:]]
        digests = self._digests(among_own=self._alone)
        self._local = pack_local([rows[k] for k in order], self._fragments, [index[f.key] for f in self._fragments], digests, objects, tied)
        return SavePlan(items=[], planner_data=self._local)

    def _digests(self, among_own: bool) -> list[int | None]:
        """What tells replicas apart. ``among_own``: there is no other rank, so only boxes that this one holds twice can differ."""
        mine = self._fragments
        if among_own:
            twice = [False] * len(mine)
            for i in range(1, len(mine)):  # sorted by key and box
                if mine[i].key == mine[i - 1].key and mine[i].box == mine[i - 1].box:
                    twice[i - 1] = twice[i] = True
            if not any(twice):
                return [None] * len(mine)
        else:
            twice = [True] * len(mine)
        # A layout is somebody's claim: a wrong one can give two ranks one box that each believes to hold alone, which no cover shows.
        described = self.layout is not None
        return [
            tensor_digest(f.view, self.check_replicas) if wanted and (f.replicated or described) else None
            for f, wanted in zip(mine, twice, strict=True)
        ]

    @guarded
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check coverage and replicas, choose one writer for every byte (coordinator only)."""
        locals_: list[LocalPlan] = []
        for rank, plan in enumerate(all_plans):
            if not isinstance(plan.planner_data, LocalPlan):
                raise PlanError(f"rank {rank} did not plan with UCPSavePlanner (found {type(plan.planner_data).__name__})")
            locals_.append(plan.planner_data)
        if self._alone and len(locals_) > 1:
            self._digest_late(locals_)
        # a stock writer has an item for each key, so that tied weights are written for each of their names
        tensors = plan_tensors(locals_, tied=self._ours)
        check_replicas(locals_, tensors.merged)
        objects = merge_objects(locals_)
        tensor_keys = {row.key for row in tensors.merged.rows}
        for entry, rank in objects.entries:
            if entry.key in tensor_keys:
                raise PlanError(f"{entry.key!r} is an object on rank {rank} and a tensor on another rank")
        planned, assignments = with_objects(tensors.planned, tensors.assignments, objects)
        plans = [SavePlan(items=[], storage_data=p.storage_data, planner_data=a) for p, a in zip(all_plans, assignments, strict=True)]
        if self._ours:
            return plans, PlannedMetadata(planned=planned)
        return plans, Metadata(stock_state_dict_metadata(planned), planner_data=ucp_planner_data(planned))

    def _digest_late(self, plans: list[LocalPlan]) -> None:
        """There are other ranks after all (somebody plays them in one process, say), and this one thought that it was alone."""
        own = [rank for rank, plan in enumerate(plans) if plan is self._local]
        if len(own) != 1:
            raise PlanError(
                f"this planner was set up without torch.distributed, so for a save of one rank, and gets the plans of {len(plans)} ranks: "
                "initialise the process group before the save"
            )
        plans[own[0]] = dataclasses.replace(plans[own[0]], **digest_columns(self._digests(among_own=False)))

    @guarded
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """With a stock writer, expand this rank's own WriteItems; with ours the columns are the plan."""
        assignment = new_plan.planner_data
        if not isinstance(assignment, Assignment):
            raise PlanError(f"finish_plan got {type(assignment).__name__} instead of this planner's assignment")
        self._assignment = assignment
        if self._ours:
            return new_plan
        items: list[WriteItem] = []
        self._stock_tensors, self._stock_bytes = {}, {}
        for fragment, offset, view in self._assigned(assignment):
            index = MetadataIndex(fragment.key, torch.Size(offset))
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=view.size())
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=view.dtype), size=torch.Size(fragment.shape))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
            self._stock_tensors[index] = view
        for key, local in assignment.objects:
            self._stock_bytes[key] = self._object_bytes[local]
            nbytes = BytesIOWriteData(nbytes=len(self._stock_bytes[key]))
            items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO, bytes_io_data=nbytes))
        return SavePlan(items=items, storage_data=new_plan.storage_data, planner_data=assignment)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of a stock WriteItem: a view of the live tensor, or the serialised object. Thread-safe, no copies."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._stock_bytes[write_item.index.fqn])
        return self._stock_tensors[write_item.index].detach()

    # -- for our storage writer ------------------------------------------------------------------------------------------------

    def payloads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, view) of every tensor item of this rank, in file order."""
        if self._assignment is None:
            raise PlanError("payloads() was called before finish_plan")
        for fragment, _, view in self._assigned(self._assignment):
            yield fragment.key, view

    def object_payloads(self) -> Iterator[tuple[str, bytes]]:
        """(key, serialised bytes) of every object item of this rank, in file order."""
        if self._assignment is None:
            raise PlanError("object_payloads() was called before finish_plan")
        for key, local in self._assignment.objects:
            yield key, self._object_bytes[local]

    def _assigned(self, assignment: Assignment) -> Iterator[tuple[Fragment, tuple[int, ...], torch.Tensor]]:
        """(fragment, global offset, view) of every tensor item in file order."""
        for index, part in zip(assignment.fragment.tolist(), assignment.part.tolist(), strict=True):
            fragment = self._fragments[index]
            if part < 0:
                yield fragment, fragment.box.offset, fragment.view
                continue
            offset, size = assignment.part_boxes[part]
            view = fragment.view
            for dim, (begin, extent) in enumerate(zip(offset, size, strict=True)):
                view = view.narrow(dim, begin, extent)
            yield fragment, tuple(a + b for a, b in zip(fragment.box.offset, offset, strict=True)), view
