"""Records of all rank files -> one catalog of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...catalog import Catalog, ObjectRow
from ...dtypes import itemsize, torch_dtype
from ...errors import CorruptCheckpointError, UnsupportedError
from ...names import Role
from ...storage.store import Range, Store
from ..source import Located, Source
from ..torch_archive import load_value
from .flat import pieces_of_group, pieces_of_subgroup
from .rank_file import stand_in
from .ranks import Ranks, order_ranks
from .rows import Record, Rows, Select, Stored, Twins
from .stage0 import catalog_of_whole

__all__ = ["DeepSpeedSource", "catalog_from_records"]


class DeepSpeedSource(Source):
    """A DeepSpeed checkpoint. Objects that are not plain values stay in the rank file; ``read_object`` reads that part of it."""

    def __init__(
        self, catalog: Catalog, store: Store, provenance: Mapping[str, Any], selects: Mapping[str, Select], twins: Sequence[Twins] = ()
    ) -> None:
        super().__init__(catalog, store, "deepspeed", provenance)
        self._selects = dict(selects)
        self._unchecked = tuple(twins)

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Where chunks lie (:meth:`Source.locate`). Before the first, the numbers that all ranks must agree about are compared.

        Opening reads no tensor byte, so this is the first moment at which rank files of two saves can be told: their ``step`` differs.
        """
        if self._unchecked:
            self._compare_twins(self._unchecked)
            self._unchecked = ()
        return super().locate(chunks)

    def _compare_twins(self, twins: Sequence[Twins]) -> None:
        ranges = [Range(path, offset, itemsize(dtype)) for _, copies in twins for path, offset, dtype in copies]
        buffers = [bytearray(r.length) for r in ranges]
        self.store.read_ranges(ranges, [memoryview(b) for b in buffers])
        found = iter(buffers)
        for what, copies in twins:
            values = [bytes(next(found)) for _ in copies]
            for (path, _, dtype), value in zip(copies, values, strict=True):
                if value != values[0]:
                    shown = [torch.frombuffer(bytearray(v), dtype=torch_dtype(dtype)).item() for v in (value, values[0])]
                    raise CorruptCheckpointError(f"{path}: {what} is {shown[0]}, but {shown[1]} in {copies[0][0]}: files of two saves")

    def read_object(self, row: ObjectRow, allow_classes: Iterable[type] = ()) -> Any:
        """The value of an object row (:meth:`Source.read_object`)."""
        select = self._selects.get(row.key)
        if row.encoding == "inline" or select is None:
            return super().read_object(row, allow_classes)
        path = self.catalog.files[row.file].path
        return load_value(
            self.store, path, allow_classes=allow_classes, select=select, stubs=stand_in, what=f"object {row.key!r} in {path}"
        )


def catalog_from_records(records: Sequence[Record], prefix: str = "") -> tuple[Catalog, dict[str, Select], dict[str, Any], list[Twins]]:
    """Join the records of :func:`parse_file`, in any order.

    Returns the catalog; for objects that are not plain, key -> where they are in the object tree of their file; the provenance; and the
    numbers that all rank files must agree about.
    ``prefix`` is the tag folder, for messages. Raises CorruptCheckpointError naming the file that does not fit the others, and
    UnsupportedError.
    """
    if len(records) == 1 and records[0]["kind"] == "model":
        return (*catalog_of_whole(records[0]), [])
    return _Joiner(order_ranks(records, prefix)).join()


class _Joiner(Rows):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.model_file = self.file(ranks.model)
        self.optim_files = np.asarray([self.file(r) for r in ranks.optim], dtype=np.int32)
        self.names: list[list[str]] = [[] for _ in ranks.optim[0]["groups"]]
        self._dtypes: dict[str, str] = {}
        self.twins: list[Twins] = []

    def join(self) -> tuple[Catalog, dict[str, Select], dict[str, Any], list[Twins]]:
        masters: dict[str, Callable[[str], None]] = {}
        for group in range(len(self.ranks.shapes)):
            masters.update(self._group(group))
        if self.ranks.stage == 3:
            self._frozen()
            self._placeholders(masters)
        else:
            self._module()
        self._objects()
        provenance: dict[str, Any] = {
            "writer": "deepspeed",
            "deepspeed": self.ranks.model["version"] or self.ranks.optim[0]["version"],
            "zero_stage": self.ranks.stage,
            "dp": self.ranks.dp,
            "global_steps": self.ranks.model["global_steps"],
        }
        return self.build.build(), self.selects, provenance, self.twins

    # ---- optimizer state

    def _group(self, g: int) -> dict[str, Callable[[str], None]]:
        """Masters and states of one flat buffer; returns, by parameter, how to add a weight row over the master's chunks."""
        ranks = self.ranks
        params = ranks.shapes[g]
        optimizer_group, state_id = ranks.owner_of(g)
        if ranks.stage == 3:
            pieces, size = pieces_of_subgroup(params, ranks.dp)
            valid = [size] * ranks.dp
            text = f"dp={ranks.dp}: Flat (ZeRO-3)"
        else:
            paddings = ranks.param_paddings(g)
            pieces, total, size = pieces_of_group(params, paddings, ranks.dp)
            valid = [min(max(total - r * size, 0), size) for r in range(ranks.dp)]
            ranks.check_paddings(g, size, valid)
            ranks.check_mappings(g, pieces)
            text = f"dp={ranks.dp}: FlatBuffer (ZeRO-{ranks.stage or 'bf16'}, group {g})"
        pattern = self.build.add_pattern({"text": text})
        self.names[optimizer_group].extend(name for name, _ in params)
        columns: dict[str, list[Stored]] = {
            "": [self._checked(r, rank["masters"][g], {valid[r], size}, f"fp32 group {g}") for r, rank in enumerate(ranks.optim)]
        }
        numbers: dict[str, Any] = {}
        scalars: dict[str, Stored] = {}
        for name in self._state_names(g, state_id):
            values = [rank["states"][state_id][name] for rank in ranks.optim]
            kinds = {kind for kind, _ in values}
            if len(kinds) != 1:
                self.bad(ranks.optim[0], f"state {name!r} of group {state_id} is of different kinds on the ranks")
            if kinds == {"number"}:
                for r, (_, value) in enumerate(values):
                    if value != values[0][1] and not (value != value and values[0][1] != values[0][1]):
                        other = f"{values[0][1]} in {ranks.optim[0]['path']}"
                        self.bad(ranks.optim[r], f"state {name!r} of group {state_id} is {value}, but {other}: files of two saves")
                numbers[name] = values[0][1]
            elif kinds == {"scalar"}:
                scalars[name] = values[0][1]
                copies = tuple((rank["path"], value[0], value[1]) for rank, (_, value) in zip(ranks.optim, values, strict=True))
                twin = (f"state {name!r} of group {state_id}", copies)
                if twin not in self.twins:
                    self.twins.append(twin)
            else:
                columns[name] = [
                    self._checked(r, value, {valid[r], size}, f"state {name!r} of group {state_id}") for r, (_, value) in enumerate(values)
                ]
        found: dict[str, Callable[[str], None]] = {}
        for piece in pieces:
            for state, tensors in columns.items():
                self.flat(piece, Role.STATE if state else Role.MASTER, piece.name, state, tensors, self.optim_files, pattern)
            for name, scalar in scalars.items():
                self.whole(Role.STATE, piece.name, scalar, int(self.optim_files[0]), name)
            for name, value in numbers.items():
                self.number(piece.name, name, value)
            found[piece.name] = lambda alias, piece=piece: self.flat(  # type: ignore[misc]
                piece, Role.WEIGHT, alias, "", columns[""], self.optim_files, pattern
            )
        return found

    def _state_names(self, g: int, state_id: int) -> list[str]:
        """Names of the states of a group: the same on every rank, or there are none (the optimizer has not stepped)."""
        first = self.ranks.optim[0]["states"].get(state_id, {})
        for rank in self.ranks.optim:
            own = rank["states"].get(state_id, {})
            if set(own) != set(first):
                self.bad(rank, f"group {g} has the optimizer states {sorted(own)}, but {sorted(first)} in {self.ranks.optim[0]['path']}")
        return sorted(first)

    def _checked(self, r: int, tensor: Stored, sizes: set[int], what: str) -> Stored:
        _, dtype, shape, strides = tensor
        reference = self.ranks.optim[0]
        if len(shape) != 1 or (strides != (1,) and shape[0] > 1):
            raise UnsupportedError(
                f"{self.ranks.optim[r]['path']}: {what} has shape {list(shape)}; only flat state of the parameters' size is supported yet"
            )
        if shape[0] not in sizes:
            self.bad(
                self.ranks.optim[r],
                f"{what} has {shape[0]} elements, expected {' or '.join(map(str, sorted(sizes)))} from the parameter shapes in "
                f"{self.ranks.model['path']} and {self.ranks.dp} ranks",
            )
        if dtype != self._dtypes.setdefault(what, dtype):
            self.bad(self.ranks.optim[r], f"{what} is {dtype}, but {self._dtypes[what]} in {reference['path']}")
        return tensor

    # ---- weights and buffers

    def _module(self) -> None:
        """Stages 1 and 2: every weight is in the model states as a whole."""
        model = self.ranks.model
        module: Mapping[str, Stored] = model["module"]
        shapes = dict(param for group in self.ranks.shapes for param in group)
        for name, shape in shapes.items():
            if name not in module:
                self.bad(model, f"parameter {name!r} is in param_shapes but not in the module")
            if module[name][2] != shape:
                self.bad(model, f"parameter {name!r} has shape {list(module[name][2])} in the module and {list(shape)} in param_shapes")
        self.module(model, set(shapes))

    def _placeholders(self, masters: Mapping[str, Callable[[str], None]]) -> None:
        """Stage 3: the module holds real buffers, and empty tensors in the place of parameters."""
        model = self.ranks.model
        frozen = {name for name, _ in model["frozen_shapes"] or ()}
        for name, tensor in model["module"].items():
            if name in masters or name in frozen or name in model["shared"]:
                continue
            if name not in model["buffers"] and tensor[2] == (0,):
                self.bad(model, f"the module has an empty tensor {name!r} that is no parameter, buffer or shared name")
            self.whole(Role.BUFFER, name, tensor, self.model_file)
        for alias, name in model["shared"].items():
            if name in masters and alias not in masters:
                masters[name](alias)
        self.not_tensors(model)

    def _frozen(self) -> None:
        """Stage 3: frozen parameters are cut like others, but lie in the model states."""
        model = self.ranks.model
        frozen: Sequence[tuple[str, tuple[int, ...]]] = model["frozen_shapes"] or ()
        if not frozen:
            return
        pattern = self.build.add_pattern({"text": f"dp={self.ranks.dp}: Flat (ZeRO-3, frozen)"})
        files = np.asarray([self.file(r) for r in self.ranks.models], dtype=np.int32)
        for name, shape in frozen:
            (piece,), size = pieces_of_subgroup([(name, shape)], self.ranks.dp)
            tensors: list[Stored] = []
            for rank in self.ranks.models:
                found = (rank["frozen_fragments"] or {}).get(name)
                if found is None:
                    self.bad(rank, f"the frozen parameter {name!r} has no fragment")
                if found[2] != (size,) or found[1] != (tensors[0] if tensors else found)[1]:
                    self.bad(
                        rank, f"the fragment of the frozen parameter {name!r} is {found[1]} {list(found[2])}, expected {size} elements"
                    )
                tensors.append(found)
            self.flat(piece, Role.WEIGHT, name, "", tensors, files, pattern)

    # ---- objects

    def _objects(self) -> None:
        first, model = self.ranks.optim[0], self.ranks.model
        self.hyperparameters(first["groups"], self.names, first)
        for record in (first, model):
            for key, kind, value in record["objects"]:
                self.object(key, kind, value, record)
