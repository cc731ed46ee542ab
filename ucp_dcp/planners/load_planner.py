"""``UCPLoadPlanner``: wanted fragments x stored chunks -> copies (paper: UcpInfo + Load at planning time)."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import sub
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ..catalog import Catalog, ObjectRow, TensorRow
from ..dtypes import name_of
from ..errors import (
    MissingKeysError,
    PlanError,
    ShapeMismatchError,
    UCPError,
)
from ..formats import Source, catalog_from_metadata
from ..geometry import Box, full_box
from ..layout import Collected, Fragment, Layout, ObjectLeaf, collect
from ..names import Role
from ..safe_pickle import load_object
from ..spec.names import NameGlob
from ..transfer import Copy, Digests, ReadStats, Verify, read_copies
from .agree import guarded
from .consistency import AllowInconsistent, Doubts, is_halved, read_box, refuse
from .destinations import fill_number, place_of, put_object, stored_number
from .load_parts import LoadOrder, LoadRequest, PendingGroups, Wanted
from .param_groups import Resolved, StoredGroups, resolve_groups
from .report import LoadReport
from .resolve import Found, Lookup, SourceChoice, check_cast, resolve_tensor
from .served import FailedMetadata, ServedMetadata
from .stored import check_groups, identity, pieces_of
from .tied import Tied, check_tied

__all__ = ["UCPLoadPlanner"]

_SHOWN = 20
_log = logging.getLogger(__name__)


class UCPLoadPlanner(LoadPlanner):
    """Plans a load, in place, into DTensors, ShardedTensors, CheckpointableTensors, plain tensors, objects, and fragments of a layout.

    Use it with ``dcp.load`` and :class:`ucp_dcp.UCPStorageReader` (any format) or DCP's own readers.

    Args:
        layout, roots: as for :class:`UCPSavePlanner`.
        strict: True: every wanted tensor must be there, with its shape, fully covered; stored things nobody wants are reported.
            ``"exact"``: those are an error too. False: load what can be loaded, report the rest.
        include, exclude: name globs (``*`` inside a dotted segment, ``**`` across) over the keys of the state dict; what they leave out
            is not touched.
        rename: key in the state dict -> key (or canonical name) in the checkpoint; a mapping or a function returning None for "same".
        dtype: ``"cast"`` casts between floating types (reported), ``"error"`` refuses.
        source: ``"auto"`` takes the copy of the wanted dtype, else the master; ``"weight"`` / ``"master"`` insist.
        master_from_weight: allow fp32 masters to start from 16-bit weights.
        allow_classes: classes that stored objects may contain besides plain containers, scalars, tensors and arrays.
        allow_inconsistent: where the writer of a checkpoint is known to write wrong optimizer state at times, the masters of what is
            loaded are compared with the weights first (both are read), and a load is refused that would take wrong state. True takes
            everything unread; names or globs of parameters take theirs. With DCP's own readers nothing is compared.

    ``planner.report`` says what happened. Errors (all problems at once, on all ranks, before any destination is touched): MissingKeysError,
    ShapeMismatchError, DtypeMismatchError, CoverageError, LayoutError, PlanError.
    """

    def __getstate__(self) -> dict[str, Any]:
        # D18: only what the user gave travels, no tensor, no open source
        names = ["layout", "roots", "strict", "include", "exclude", "rename", "dtype", "source", "master_from_weight"]
        names += ["allow_classes", "allow_inconsistent"]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        roots: Mapping[str, str] | None = None,
        strict: bool | Literal["exact"] = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: Literal["cast", "error"] = "cast",
        source: SourceChoice = "auto",
        master_from_weight: bool = False,
        allow_classes: Sequence[type] = (),
        allow_inconsistent: AllowInconsistent = False,
    ) -> None:
        for name, value, allowed in (("strict", strict, (True, False, "exact")), ("dtype", dtype, ("cast", "error"))):
            if value not in allowed:
                raise PlanError(f"{name}={value!r}; expected one of {allowed}")
        if source not in ("auto", "weight", "master"):
            raise PlanError(f"source={source!r}; expected 'auto', 'weight' or 'master'")
        self.layout = layout
        self.roots = dict(roots) if roots is not None else None
        self.strict = strict
        self.include = list(include) if include is not None else None
        self.exclude = list(exclude or ())
        self._include = [NameGlob(g) for g in self.include] if self.include is not None else None
        self._exclude = [NameGlob(g) for g in self.exclude]
        self.rename = rename
        self.dtype: Literal["cast", "error"] = dtype
        self.source: SourceChoice = source
        self.master_from_weight = master_from_weight
        self.allow_classes = tuple(allow_classes)
        self.allow_inconsistent: AllowInconsistent = (
            allow_inconsistent if isinstance(allow_inconsistent, bool) else [NameGlob(g).text for g in allow_inconsistent]
        )
        self.report = LoadReport()
        self._state_dict: dict[str, Any] = {}
        self._catalog: Catalog | None = None
        self._served: Source | None = None
        self._collected: Collected | None = None
        self._wanted = Wanted()
        self._targets: dict[MetadataIndex, torch.Tensor] = {}
        self._scalar_at: dict[int, list[ObjectLeaf]] = {}
        """id of a one-element tensor -> the places of its number; it lives in _wanted."""
        self._lookup: Lookup | None = None
        self._tied = Tied()
        self._bytes_for: dict[str, list[ObjectLeaf | Fragment | PendingGroups]] = {}
        self._state_boxes: list[tuple[TensorRow, list[Box]]] = []
        self._padding: list[torch.Tensor] = []
        self._pending: list[PendingGroups] = []
        self._groups: dict[str, StoredGroups] = {}

    # -- LoadPlanner ---------------------------------------------------------------------------------------------------------

    @guarded
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Open the catalog and find the wanted fragments. Raises what ``read_metadata`` of our reader could not."""
        if isinstance(metadata, FailedMetadata) and metadata.error is not None:
            raise metadata.error
        self.report = LoadReport()
        self._state_dict = state_dict
        self._groups = {}
        if isinstance(metadata, ServedMetadata) and metadata.source is not None:
            self._served, self._catalog = metadata.source, metadata.source.catalog
        elif metadata is not None:
            self._served, self._catalog = None, catalog_from_metadata(metadata)
        else:
            raise PlanError("the storage reader returned no metadata")
        self._prepare(state_dict)
        self._collected = collect(state_dict, layout=self.layout, roots=self.roots, shapes=self._stored_shape)

    def _prepare(self, state_dict: dict[str, Any]) -> None:
        """For subclasses: the checkpoint is open, and the state dict can still be completed with what it holds."""

    def _found_before(self) -> dict[str, UCPError]:
        """For subclasses: problems by key that ``_prepare`` found; reported together with all others."""
        return {}

    @guarded
    def create_local_plan(self) -> LoadPlan:
        """Resolve, check and intersect everything wanted. All problems of this rank are raised together."""
        if self._catalog is None or self._collected is None:
            raise PlanError("create_local_plan was called before set_up_planner")
        catalog = self._catalog
        self._wanted = Wanted()
        self._pending = []
        self._state_boxes = []
        self._tied = Tied.of(self._collected.fragments)
        self._lookup = Lookup(catalog, self._tied.fqns)
        used = np.zeros(catalog.n_tensors + len(catalog.objects), dtype=np.bool_)
        object_index = {id(row): i for i, row in enumerate(catalog.objects)}
        problems: dict[str, UCPError] = {k: e for k, e in self._found_before().items() if self._selected(k)}
        per_rank: list[str] = []
        groups: dict[str, list[ObjectLeaf]] = {}
        by_key: dict[str, list[Fragment]] = {}
        for fragment in self._collected.fragments:
            by_key.setdefault(fragment.key, []).append(fragment)
        for key, fragments in by_key.items():
            if not self._selected(key):
                continue
            try:
                self._want_tensor(key, fragments, self._lookup, used, object_index)
            except UCPError as error:
                problems[key] = error
        for leaf in self._collected.objects:
            if not self._selected(leaf.key):
                continue
            try:
                place_of(self._state_dict, leaf)
                if leaf.per_rank:
                    self._want_per_rank(leaf, catalog, per_rank)
                    continue
                if leaf.group is not None:
                    groups.setdefault(leaf.group.root, []).append(leaf)
                    continue
                self._want_object(leaf, catalog, used, object_index)
            except UCPError as error:
                problems[leaf.key] = error
        for root, leaves in groups.items():
            problems.update(self._want_groups(root, leaves, catalog, used, object_index))
        self._settle(problems)
        if self._served is not None:
            check_tied(self._served, self._tied)
        # padding belongs to a local tensor, which may hold many keys: it is filled when anything in the same memory is loaded
        loaded = set(self.report.loaded)
        touched = {f.view.untyped_storage().data_ptr() for f in self._collected.fragments if f.key in loaded}
        padding = [p for p in self._collected.padding if p.view.untyped_storage().data_ptr() in touched]
        self._padding = [p.view for p in padding]
        self.report.padded = sorted({p.key for p in padding})
        request = LoadRequest(np.packbits(used).tobytes(), tuple(per_rank), identity(catalog), self._broken())
        return LoadPlan(items=[], planner_data=request)

    @guarded
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Per-rank objects and unexpected keys need all ranks; the coordinator answers with columns only."""
        catalog = self._require_catalog()
        total = catalog.n_tensors + len(catalog.objects)
        used = np.zeros(total, dtype=np.bool_)
        object_at = {row.key: i for i, row in enumerate(catalog.objects)}
        absent: dict[str, list[int]] = {}
        there: set[str] = set()
        for rank, plan in enumerate(global_plan):
            request = plan.planner_data
            if not isinstance(request, LoadRequest):
                raise PlanError(f"rank {rank} did not plan with UCPLoadPlanner (found {type(request).__name__})")
            if request.checkpoint != identity(catalog):
                raise PlanError(f"rank {rank} sees another checkpoint than rank 0: it was replaced meanwhile; load again")
            mask = np.unpackbits(np.frombuffer(request.used, dtype=np.uint8), count=total).astype(np.bool_)
            used |= mask
            for key in request.per_rank:
                at = object_at.get(f"{key}.per_rank.{rank}")
                if at is None:
                    absent.setdefault(key, []).append(rank)
                else:
                    there.add(key)
                    used[catalog.n_tensors + at] = True
        if self._served is not None:  # all ranks' findings, so that the error names every parameter
            refuse(self._served, {fqn: what for plan in global_plan for fqn, what in plan.planner_data.broken.items()})
        if self.strict and (missing := sorted(set(absent) - there)):  # saved by ranks that are not here now
            raise MissingKeysError("per-rank objects are not in the checkpoint: " + ", ".join(map(repr, missing[:_SHOWN])))
        for key, ranks in absent.items():
            _log.warning("%r was saved by fewer ranks: ranks %s keep the value that they have", key, ", ".join(map(str, ranks)))
        if self.strict == "exact" and not used.all():
            names = [*catalog.keys, *(row.key for row in catalog.objects)]
            extra = [names[i] for i in np.flatnonzero(~used).tolist()]
            shown = ", ".join(map(repr, extra[:_SHOWN]))
            raise PlanError(f"strict='exact': the checkpoint holds {len(extra)} things nobody wants: {shown}")
        unused = np.packbits(~used).tobytes()
        return [LoadPlan(items=[], storage_data=p.storage_data, planner_data=LoadOrder(i, unused)) for i, p in enumerate(global_plan)]

    @guarded
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """All ranks agreed: with a stock reader make its ReadItems; padding is filled here."""
        catalog = self._require_catalog()
        order = central_plan.planner_data
        if not isinstance(order, LoadOrder):
            raise PlanError(f"finish_plan got {type(order).__name__} instead of this planner's order")
        total = catalog.n_tensors + len(catalog.objects)
        unused = np.unpackbits(np.frombuffer(order.unused, dtype=np.uint8), count=total).astype(np.bool_)
        names = [*catalog.keys, *(row.key for row in catalog.objects)]
        self.report.unexpected = [names[i] for i in np.flatnonzero(unused).tolist()]
        for leaf in self._collected.objects if self._collected else ():
            if leaf.per_rank and self._selected(leaf.key):
                row = catalog.find_object(f"{self._source_key(leaf.key)}.per_rank.{order.rank}")
                if row is None:
                    if leaf.key not in self.report.missing:
                        self.report.missing.append(leaf.key)
                else:
                    self._wanted.objects.append((row, leaf))
                    self.report.loaded.append(leaf.key)
        with torch.no_grad():
            for view in self._padding:
                view.detach().zero_()
        if self._served is not None:
            return central_plan
        return LoadPlan(items=self._read_items(), storage_data=central_plan.storage_data, planner_data=order)

    def _broken(self) -> dict[str, str]:
        """Parameters whose optimizer state this rank would load although it is wrong in the file."""
        if self._served is None or not self._served.doubt:
            return {}
        doubts = Doubts(self._served, self.allow_inconsistent)
        for row, boxes in self._state_boxes:
            doubts.look(row, boxes)
        self.report.unproven = sorted(doubts.unproven)
        return doubts.broken

    # -- planning ---------------------------------------------------------------------------------------------------------------

    def _require_catalog(self) -> Catalog:
        if self._catalog is None:
            raise PlanError("the planner was not set up")
        return self._catalog

    def _selected(self, key: str) -> bool:
        if self._include is not None and not any(g.match(key) is not None for g in self._include):
            self.report.skipped[key] = "not in include"
            return False
        if any(g.match(key) is not None for g in self._exclude):
            self.report.skipped[key] = "in exclude"
            return False
        return True

    def _source_key(self, key: str) -> str:
        if self.rename is None:
            return key
        renamed = self.rename(key) if callable(self.rename) else self.rename.get(key)
        return key if renamed is None else renamed

    def _stored_shape(self, role: Role, fqn: str, state: str) -> tuple[int, ...] | None:
        """Global shape of a named tensor in the checkpoint: what a layout needs to cut flat ranges (paper: UcpInfo)."""
        catalog = self._require_catalog()
        for r, s in ((role, state), (Role.MASTER, ""), (Role.WEIGHT, ""), (Role.BUFFER, "")):
            row = catalog.find_named(r, fqn, s)
            if row is not None:
                return catalog.tensor(row).shape
        return None

    def _want_tensor(
        self,
        key: str,
        fragments: list[Fragment],
        lookup: Lookup,
        used: npt.NDArray[np.bool_],
        object_index: Mapping[int, int],
    ) -> None:
        first, catalog = fragments[0], lookup.catalog
        if first.view.is_meta:
            raise PlanError(f"tensor {key!r} is on the meta device: it has no memory to load into; make it real first (to_empty)")
        for f in fragments:
            if any(step == 0 and extent > 1 for step, extent in zip(f.view.stride(), f.view.shape, strict=True)):
                raise PlanError(
                    f"tensor {key!r} is an expanded view (shape {tuple(f.view.shape)}, strides {f.view.stride()}): several of its elements "
                    "are one place in memory, which cannot be loaded into; give it memory of its own (clone())"
                )
        source_key = self._source_key(key)
        found = resolve_tensor(first, source_key, lookup, source=self.source, master_from_weight=self.master_from_weight)
        if found.value is not None:
            if any(f.view.numel() > 1 for f in fragments):
                raise PlanError(f"{key!r} is stored as an object and wanted as a tensor of shape {first.shape}")
            used[catalog.n_tensors + object_index[id(found.value)]] = True
            self._wanted.numbers.extend((found.value, f) for f in fragments)
        else:
            self._want_stored(key, fragments, found, catalog)
            if found.tensor is not None:
                used[found.tensor.index] = True
        self.report.loaded.append(key)
        self.report.source[key] = found.source

    def _want_stored(self, key: str, fragments: list[Fragment], found: Found, catalog: Catalog) -> None:
        row = found.tensor
        if row is None:
            raise PlanError(f"tensor {key!r}: nothing stored answers it")
        if tuple(fragments[0].shape) != tuple(row.shape):
            # a 0-d step and a one-element step are the same number; nothing else may change its shape
            if fragments[0].view.numel() == 1 and math.prod(row.shape) == 1 and len(fragments) == 1 and math.prod(fragments[0].shape) == 1:
                fragments = [replace(fragments[0], shape=row.shape, box=full_box(row.shape), view=fragments[0].view.reshape(row.shape))]
            else:
                wanted_shape = tuple(fragments[0].shape)
                raise ShapeMismatchError(f"tensor {key!r} is wanted with shape {wanted_shape}, but {row.key!r} is stored as {row.shape}")
        wanted_dtype = name_of(fragments[0].view.dtype)
        cast = check_cast(key, row.dtype, wanted_dtype, self.dtype)
        if not self._tied.first(key, fragments, row.index):
            return
        self._want_boxes(key, [(f.box, f.view) for f in fragments if not f.box.empty], row, catalog)
        if row.role in (Role.MASTER, Role.STATE):
            self._state_boxes.append((row, [f.box for f in fragments if not f.box.empty]))
        if cast:
            self.report.cast[key] = (row.dtype, wanted_dtype)

    def _want_boxes(self, key: str, wanted: list[tuple[Box, torch.Tensor]], row: TensorRow, catalog: Catalog) -> None:
        """Copies of the stored chunks that fill these boxes; nothing is kept when some of it is not there."""
        if self._served is not None and is_halved(catalog, row):
            pieces_of(key, row.key, [box for box, _ in wanted], catalog.boxes(row.index))
            self._wanted.halved.extend((row, box, view) for box, view in wanted)
            return
        check_groups(row.key, row.index, catalog)
        boxes = catalog.boxes(row.index)
        base = catalog.chunk_range(row.index)[0]
        if len(boxes) == 1 and len(wanted) == 1:  # most tensors of most loads
            box, view = wanted[0]
            offset, size = boxes[0].tolist()
            if Box(tuple(offset), tuple(size)).contains(box):
                self._wanted.copies.append(Copy(base, tuple(o - s for o, s in zip(box.offset, offset, strict=True)), view))
                self._wanted.boxes.append((row.key, tuple(offset)))
                return
        pieces = pieces_of(key, row.key, [box for box, _ in wanted], boxes)
        begins = boxes[:, 0].tolist()
        for w, h, offset, size in pieces:
            box, view = wanted[w]
            for dim, extent in enumerate(size):
                if extent != view.shape[dim]:
                    view = view.narrow(dim, offset[dim] - box.offset[dim], extent)
            begin = tuple(begins[h])
            self._wanted.copies.append(Copy(base + h, tuple(map(sub, offset, begin)), view))
            self._wanted.boxes.append((row.key, begin))

    def _want_object(self, leaf: ObjectLeaf, catalog: Catalog, used: npt.NDArray[np.bool_], object_index: Mapping[int, int]) -> None:
        key = self._source_key(leaf.key)
        row = catalog.find_object(key)
        if row is not None:
            used[catalog.n_tensors + object_index[id(row)]] = True
            self._wanted.objects.append((row, leaf))
            self.report.source[leaf.key] = "object"
        else:
            t = catalog.find(key)
            t = catalog.find_canonical(key) if t is None else t
            if t is None:
                hint = self._lookup.hint(key) if self._lookup is not None else ""
                raise MissingKeysError(f"object {leaf.key!r} is not in the checkpoint{hint}")
            tensor = catalog.tensor(t)
            if math.prod(tensor.shape) != 1 or isinstance(leaf.value, str | bytes | list | dict | tuple):
                raise PlanError(
                    f"{leaf.key!r} is stored as a {tensor.dtype} tensor of shape {tensor.shape} and wanted as {type(leaf.value).__name__};"
                    " put a tensor of that shape there"
                )
            from ..dtypes import torch_dtype

            number = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
            self._want_boxes(leaf.key, [(full_box(tensor.shape), number)], tensor, catalog)
            self._wanted.scalars.append((number, leaf))
            used[t] = True
            self.report.source[leaf.key] = "key"
        self.report.loaded.append(leaf.key)

    def _want_per_rank(self, leaf: ObjectLeaf, catalog: Catalog, per_rank: list[str]) -> None:
        """Which rank has one is known when all have spoken; that none has, at once."""
        key = self._source_key(leaf.key)
        if not any(row.key.startswith(f"{key}.per_rank.") for row in catalog.objects):
            raise MissingKeysError(f"per-rank objects are not in the checkpoint: {key!r}")
        per_rank.append(key)

    def _want_groups(
        self,
        root: str,
        leaves: Sequence[ObjectLeaf],
        catalog: Catalog,
        used: npt.NDArray[np.bool_],
        object_index: Mapping[int, int],
    ) -> dict[str, UCPError]:
        """Hyperparameters of one optimizer, by parameter name. Returns problems by key."""
        prefix, rows = StoredGroups.rows_of(catalog, root)
        for row in rows:
            used[catalog.n_tensors + object_index[id(row)]] = True
        if self._served is None:
            self._pending.append(PendingGroups(leaves, prefix, rows))
            return {}
        resolved = resolve_groups(leaves, self._stored_groups(root))
        self._wanted.hyperparameters.extend(resolved.values)
        self._note_groups(resolved)
        return dict(resolved.problems)

    def _stored_groups(self, root: str) -> StoredGroups:
        """The hyperparameters of one optimizer in the checkpoint; read once."""
        if root not in self._groups and self._served is not None:
            prefix, rows = StoredGroups.rows_of(self._require_catalog(), root)
            values = {row.key: self._served.read_object(row, self.allow_classes) for row in rows}
            self._groups[root] = StoredGroups.read(prefix, rows, values)
        return self._groups[root]

    def _note_groups(self, resolved: Resolved) -> None:
        self.report.kept.update(resolved.kept)
        for leaf, _ in resolved.values:
            self.report.loaded.append(leaf.key)
            self.report.source[leaf.key] = "param_groups"

    def _settle(self, problems: Mapping[str, UCPError]) -> None:
        """Raise all problems as one error, or with ``strict=False`` report them."""
        if not problems:
            return
        if not self.strict:
            for key, error in problems.items():
                if isinstance(error, MissingKeysError):
                    self.report.missing.append(key)
                else:
                    self.report.skipped[key] = str(error)
            return
        kinds = {type(e) for e in problems.values()}
        kind: type[UCPError] = kinds.pop() if len(kinds) == 1 else PlanError
        texts = [str(e) for e in problems.values()]
        if len(texts) == 1:
            raise kind(texts[0])
        more = f"\n  ... and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise kind(f"{len(texts)} problems, nothing was loaded:\n  " + "\n  ".join(texts[:_SHOWN]) + more)

    # -- our storage reader -------------------------------------------------------------------------------------------------

    def execute(self, source: Source, *, gap: int = 0, verify: Verify = "covered", digests: Digests | None = None) -> ReadStats:
        """Fill every destination of this rank from ``source`` (called by our reader's ``read_data``)."""
        objects = [(source.read_object(row, self.allow_classes), leaf) for row, leaf in self._wanted.objects]
        numbers = [(source.read_object(row, self.allow_classes), fragment) for row, fragment in self._wanted.numbers]
        for value, fragment in numbers:
            stored_number(fragment, value)
        stats = read_copies(source, self._wanted.copies, gap=gap, verify=verify, digests=digests)
        for row, box, view in self._wanted.halved:
            read_box(source, row, box, view, verify=verify, digests=digests, stats=stats)
        self.report.bytes_read, self.report.bytes_wanted, self.report.ranges = stats.bytes_read, stats.bytes_wanted, stats.ranges
        self.report.bytes_verified, self.report.bytes_unverified = stats.bytes_verified, stats.bytes_unverified
        for value, fragment in numbers:
            fill_number(fragment, value)
        for value, leaf in objects:
            put_object(self._state_dict, leaf, value)
        for number, leaf in self._wanted.scalars:
            put_object(self._state_dict, leaf, number.reshape(()).item())
        for leaf, value in self._wanted.hyperparameters:
            put_object(self._state_dict, leaf, value)
        return stats

    # -- stock storage reader --------------------------------------------------------------------------------------------------

    def _read_items(self) -> list[ReadItem]:
        items: list[ReadItem] = []
        self._targets = {}
        self._scalar_at = {}
        for number, leaf in self._wanted.scalars:
            self._scalar_at.setdefault(id(number), []).append(leaf)
        for i, (copy, (key, stored)) in enumerate(zip(self._wanted.copies, self._wanted.boxes, strict=True)):
            dest = MetadataIndex(f"ucp.{i}")
            self._targets[dest] = copy.view
            size = copy.view.size()
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=dest,
                    dest_offsets=torch.Size([0] * len(size)),
                    storage_index=MetadataIndex(key, torch.Size(stored)),
                    storage_offsets=torch.Size(copy.offset),
                    lengths=size,
                )
            )
        self._bytes_for = {}
        groups = [(row, pending) for pending in self._pending for row in pending.rows]
        requests: Iterable[tuple[ObjectRow, ObjectLeaf | Fragment | PendingGroups]] = [
            *self._wanted.objects,
            *self._wanted.numbers,
            *groups,
        ]
        for row, target in requests:
            if row.key not in self._bytes_for:
                none = torch.Size([])
                index = MetadataIndex(row.key)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
            self._bytes_for.setdefault(row.key, []).append(target)
        return items

    @guarded
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """An object's bytes from a stock reader: through the restricted unpickler, never ``weights_only=False`` (D16)."""
        loaded = load_object(value.getvalue(), allow_classes=self.allow_classes, where=f"object {read_item.storage_index.fqn!r}")
        for target in self._bytes_for[read_item.storage_index.fqn]:
            if isinstance(target, Fragment):
                fill_number(target, loaded)
            elif isinstance(target, PendingGroups):
                self._arrived(target, read_item.storage_index.fqn, loaded)
            else:
                put_object(self._state_dict, target, loaded)

    def _arrived(self, pending: PendingGroups, key: str, value: Any) -> None:
        """With a stock reader values come one by one; the last one completes the groups."""
        pending.values[key] = value
        if len(pending.values) < len(pending.rows):
            return
        resolved = resolve_groups(pending.leaves, StoredGroups.read(pending.prefix, pending.rows, pending.values))
        self._note_groups(resolved)
        self._settle(resolved.problems)
        for leaf, found in resolved.values:
            put_object(self._state_dict, leaf, found)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The destination view of a stock ReadItem."""
        return self._targets[read_item.dest_index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The view was filled in place. One-element tensors that are wanted as numbers are put into the state dict here."""
        at = int(read_item.dest_index.fqn.removeprefix("ucp."))
        number = self._wanted.copies[at].view
        for leaf in self._scalar_at.get(id(number), ()):
            put_object(self._state_dict, leaf, number.reshape(()).item())
