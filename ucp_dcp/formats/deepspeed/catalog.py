"""Records of all rank files -> one catalog of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ...catalog import Catalog, CatalogBuilder, ObjectRow
from ...dtypes import itemsize, torch_dtype
from ...errors import CorruptCheckpointError, UnsupportedError
from ...names import Role, canonical_name
from ...storage.store import Range, Store
from ..source import Located, Source
from ..torch_archive import load_value
from .flat import Pieces, pieces_of_group, pieces_of_subgroup
from .parse import stand_in
from .ranks import Ranks, order_ranks

__all__ = ["DeepSpeedSource", "catalog_from_records"]

Select = tuple[str | int, ...]
Stored = tuple[int, str, tuple[int, ...], tuple[int, ...]]
"""A tensor in a record: byte offset, dtype name, shape, strides."""
Twins = tuple[str, tuple[tuple[str, int, str], ...]]
"""A number that every rank file holds: what it is, and (path, byte offset, dtype) of each copy."""


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


def catalog_from_records(
    records: Sequence[Mapping[str, Any]], prefix: str = ""
) -> tuple[Catalog, dict[str, Select], dict[str, Any], list[Twins]]:
    """Join the records of :func:`parse_file`, in any order.

    Returns the catalog; for objects that are not plain, key -> where they are in the object tree of their file; the provenance; and the
    numbers that all rank files must agree about.
    ``prefix`` is the tag folder, for messages. Raises CorruptCheckpointError naming the file that does not fit the others, and
    UnsupportedError.
    """
    return _Joiner(order_ranks(records, prefix)).join()


class _Joiner:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.build = CatalogBuilder()
        self.model_file = self.build.add_file(ranks.model["path"], ranks.model["size"])
        self.optim_files = np.asarray([self.build.add_file(r["path"], r["size"]) for r in ranks.optim], dtype=np.int32)
        self.selects: dict[str, Select] = {}
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
            "": [self._flat(r, rank["masters"][g], {valid[r], size}, f"fp32 group {g}") for r, rank in enumerate(ranks.optim)]
        }
        numbers: dict[str, Any] = {}
        scalars: dict[str, Stored] = {}
        for name in self._state_names(g, state_id):
            values = [rank["states"][state_id][name] for rank in ranks.optim]
            kinds = {kind for kind, _ in values}
            if len(kinds) != 1:
                self._bad(ranks.optim[0], f"state {name!r} of group {state_id} is of different kinds on the ranks")
            if kinds == {"number"}:
                for r, (_, value) in enumerate(values):
                    if value != values[0][1] and not (value != value and values[0][1] != values[0][1]):
                        other = f"{values[0][1]} in {ranks.optim[0]['path']}"
                        self._bad(ranks.optim[r], f"state {name!r} of group {state_id} is {value}, but {other}: files of two saves")
                numbers[name] = values[0][1]
            elif kinds == {"scalar"}:
                scalars[name] = values[0][1]
                copies = tuple((rank["path"], value[0], value[1]) for rank, (_, value) in zip(ranks.optim, values, strict=True))
                twin = (f"state {name!r} of group {state_id}", copies)
                if twin not in self.twins:
                    self.twins.append(twin)
            else:
                columns[name] = [
                    self._flat(r, value, {valid[r], size}, f"state {name!r} of group {state_id}") for r, (_, value) in enumerate(values)
                ]
        found: dict[str, Callable[[str], None]] = {}
        for piece in pieces:
            for state, tensors in columns.items():
                self._flat_row(piece, Role.STATE if state else Role.MASTER, piece.name, state, tensors, self.optim_files, pattern)
            for name, scalar in scalars.items():
                self._whole(Role.STATE, piece.name, scalar, name, self.optim_files[0])
            for name, value in numbers.items():
                key = canonical_name(Role.STATE, piece.name, name, "")
                self.build.add_object(ObjectRow(key, fqn=key, path=(key,), value=value))
            found[piece.name] = lambda alias, piece=piece: self._flat_row(  # type: ignore[misc]
                piece, Role.WEIGHT, alias, "", columns[""], self.optim_files, pattern
            )
        return found

    def _state_names(self, g: int, state_id: int) -> list[str]:
        """Names of the states of a group: the same on every rank, or there are none (the optimizer has not stepped)."""
        first = self.ranks.optim[0]["states"].get(state_id, {})
        for rank in self.ranks.optim:
            own = rank["states"].get(state_id, {})
            if set(own) != set(first):
                self._bad(rank, f"group {g} has the optimizer states {sorted(own)}, but {sorted(first)} in {self.ranks.optim[0]['path']}")
        return sorted(first)

    def _flat(self, r: int, tensor: Stored, sizes: set[int], what: str) -> Stored:
        _, dtype, shape, strides = tensor
        reference = self.ranks.optim[0]
        if len(shape) != 1 or (strides != (1,) and shape[0] > 1):
            raise UnsupportedError(
                f"{self.ranks.optim[r]['path']}: {what} has shape {list(shape)}; only flat state of the parameters' size is supported yet"
            )
        if shape[0] not in sizes:
            self._bad(
                self.ranks.optim[r],
                f"{what} has {shape[0]} elements, expected {' or '.join(map(str, sorted(sizes)))} from the parameter shapes in "
                f"{self.ranks.model['path']} and {self.ranks.dp} ranks",
            )
        if dtype != self._dtypes.setdefault(what, dtype):
            self._bad(self.ranks.optim[r], f"{what} is {dtype}, but {self._dtypes[what]} in {reference['path']}")
        return tensor

    def _flat_row(
        self, piece: Pieces, role: Role, fqn: str, state: str, tensors: Sequence[Stored], files: NDArray[np.int32], pattern: int
    ) -> None:
        dtype = tensors[0][1]
        handle = self._tensor(role, fqn, state, dtype, piece.shape, pattern)
        base = np.asarray([t[0] for t in tensors], dtype=np.int64)
        offset = base[piece.rank] + piece.start * itemsize(dtype)
        self.build.add_chunks(handle, piece.boxes, files[piece.rank], offset)

    def _tensor(self, role: Role, fqn: str, state: str, dtype: str, shape: tuple[int, ...], pattern: int = -1) -> int:
        key = canonical_name(role, fqn, state, "")
        return self.build.add_tensor(key=key, role=role, fqn=fqn, state=state, dtype=dtype, shape=shape, pattern=pattern)

    # ---- weights and buffers

    def _whole(self, role: Role, fqn: str, tensor: Stored, state: str = "", file: int | None = None) -> None:
        offset, dtype, shape, strides = tensor
        handle = self._tensor(role, fqn, state, dtype, shape)
        boxes = np.asarray([[(0,) * len(shape), shape]], dtype=np.int64).reshape(1, 2, len(shape))
        where = self.model_file if file is None else file
        self.build.add_chunks(handle, boxes, where, offset, strides=np.asarray([strides], dtype=np.int64).reshape(1, len(shape)))

    def _module(self) -> None:
        """Stages 1 and 2: every weight is in the model states as a whole."""
        model = self.ranks.model
        module: Mapping[str, Stored] = model["module"]
        buffers = set(model["buffers"])
        shapes = dict(param for group in self.ranks.shapes for param in group)
        for name, shape in shapes.items():
            if name not in module:
                self._bad(model, f"parameter {name!r} is in param_shapes but not in the module")
            if module[name][2] != shape:
                self._bad(model, f"parameter {name!r} has shape {list(module[name][2])} in the module and {list(shape)} in param_shapes")
        for name, tensor in module.items():
            self._whole(Role.BUFFER if name in buffers and name not in shapes else Role.WEIGHT, name, tensor)
        for alias, name in model["shared"].items():
            if alias not in module and name in module:
                self._whole(Role.WEIGHT, alias, module[name])
        self._not_tensors()

    def _not_tensors(self) -> None:
        for name in self.ranks.model["not_tensors"]:
            key = f"model.{name}"
            self._object(key, "select", ("module", name), self.ranks.model)

    def _placeholders(self, masters: Mapping[str, Callable[[str], None]]) -> None:
        """Stage 3: the module holds real buffers, and empty tensors in the place of parameters."""
        model = self.ranks.model
        frozen = {name for name, _ in model["frozen_shapes"] or ()}
        for name, tensor in model["module"].items():
            if name in masters or name in frozen or name in model["shared"]:
                continue
            if name not in model["buffers"] and tensor[2] == (0,):
                self._bad(model, f"the module has an empty tensor {name!r} that is no parameter, buffer or shared name")
            self._whole(Role.BUFFER, name, tensor)
        for alias, name in model["shared"].items():
            if name in masters and alias not in masters:
                masters[name](alias)
        self._not_tensors()

    def _frozen(self) -> None:
        """Stage 3: frozen parameters are cut like others, but lie in the model states."""
        model = self.ranks.model
        frozen: Sequence[tuple[str, tuple[int, ...]]] = model["frozen_shapes"] or ()
        if not frozen:
            return
        pattern = self.build.add_pattern({"text": f"dp={self.ranks.dp}: Flat (ZeRO-3, frozen)"})
        files = np.asarray([self.build.add_file(r["path"], r["size"]) for r in self.ranks.models], dtype=np.int32)
        for name, shape in frozen:
            (piece,), size = pieces_of_subgroup([(name, shape)], self.ranks.dp)
            tensors: list[Stored] = []
            for rank in self.ranks.models:
                found = (rank["frozen_fragments"] or {}).get(name)
                if found is None:
                    self._bad(rank, f"the frozen parameter {name!r} has no fragment")
                if found[2] != (size,) or found[1] != (tensors[0] if tensors else found)[1]:
                    self._bad(
                        rank, f"the fragment of the frozen parameter {name!r} is {found[1]} {list(found[2])}, expected {size} elements"
                    )
                tensors.append(found)
            self._flat_row(piece, Role.WEIGHT, name, "", tensors, files, pattern)

    # ---- objects

    def _objects(self) -> None:
        first, model = self.ranks.optim[0], self.ranks.model
        for i, group in enumerate(first["groups"]):
            for key, value in group.items():
                if key != "params":
                    self._object(f"optim.param_groups.{i}.{key}", value[0], value[1], first)
            self._object(f"optim.param_groups.{i}.params", "inline", self.names[i], first)
        for record in (first, model):
            for key, kind, value in record["objects"]:
                self._object(key, kind, value, record)

    def _object(self, key: str, kind: str, value: Any, record: Mapping[str, Any]) -> None:
        if kind != "select":
            self.build.add_object(ObjectRow(key, fqn=key, path=(key,), value=value))
            return
        self.selects[key] = tuple(value)
        file = self.build.add_file(record["path"], record["size"])
        self.build.add_object(ObjectRow(key, fqn=key, path=(key,), file=file, offset=0, length=record["size"], encoding="torch_save"))

    def _bad(self, record: Mapping[str, Any], message: str) -> NoReturn:
        raise CorruptCheckpointError(f"{record['path']}: {message}")
