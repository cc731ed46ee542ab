"""What every kind of DeepSpeed checkpoint puts into a catalog: whole tensors, flat pieces, objects that stay in their file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...catalog import CatalogBuilder, ObjectRow
from ...dtypes import itemsize
from ...errors import CorruptCheckpointError
from ...geometry import c_strides
from ...names import Role, canonical_name
from .flat import Pieces

__all__ = ["Record", "Rows", "Select", "Stored", "Twins"]

Record = Mapping[str, Any]
"""What ``parse_file`` makes of one file."""
Select = tuple[str | int, ...]
"""Where an object is in the object tree of its file."""
Stored = tuple[int, str, tuple[int, ...], tuple[int, ...]]
"""A tensor in a record: byte offset, dtype name, shape, strides."""
Twins = tuple[str, tuple[tuple[str, int, str], ...]]
"""A number that every rank file holds: what it is, and (path, byte offset, dtype) of each copy."""


class Rows:
    """A catalog being built. ``selects``: for objects that are not plain, key -> where they are in their file."""

    def __init__(self) -> None:
        self.build = CatalogBuilder()
        self.selects: dict[str, Select] = {}

    def file(self, record: Record) -> int:
        """The index of a record's file."""
        return self.build.add_file(record["path"], record["size"])

    def tensor(self, role: Role, fqn: str, state: str, dtype: str, shape: tuple[int, ...], pattern: int = -1) -> int:
        """A tensor row without chunks, under its canonical name."""
        key = canonical_name(role, fqn, state, "")
        return self.build.add_tensor(key=key, role=role, fqn=fqn, state=state, dtype=dtype, shape=shape, pattern=pattern)

    def whole(self, role: Role, fqn: str, tensor: Stored, file: int, state: str = "", shape: tuple[int, ...] | None = None) -> None:
        """A tensor that lies in one piece. ``shape``: what a contiguous tensor of as many elements is when looked at properly."""
        offset, dtype, found, strides = tensor
        if shape is not None and shape != found:
            found, strides = shape, c_strides(shape)
        self.chunk(self.tensor(role, fqn, state, dtype, found), (offset, dtype, found, strides), file)

    def chunk(self, handle: int, tensor: Stored, file: int) -> None:
        """One chunk that covers the whole tensor."""
        offset, _, shape, strides = tensor
        boxes = np.asarray([[(0,) * len(shape), shape]], dtype=np.int64).reshape(1, 2, len(shape))
        self.build.add_chunks(handle, boxes, file, offset, strides=np.asarray([strides], dtype=np.int64).reshape(1, len(shape)))

    def flat(
        self, piece: Pieces, role: Role, fqn: str, state: str, tensors: Sequence[Stored], files: NDArray[np.int32], pattern: int
    ) -> None:
        """A tensor that lies in pieces in the flat ``tensors`` of the ranks."""
        dtype = tensors[0][1]
        handle = self.tensor(role, fqn, state, dtype, piece.shape, pattern)
        base = np.asarray([t[0] for t in tensors], dtype=np.int64)
        offset = base[piece.rank] + piece.start * itemsize(dtype)
        self.build.add_chunks(handle, piece.boxes, files[piece.rank], offset)

    def number(self, fqn: str, state: str, value: Any) -> None:
        """An optimizer state that is a Python number."""
        self.object(canonical_name(Role.STATE, fqn, state, ""), "inline", value, {})

    def object(self, key: str, kind: str, value: Any, record: Record) -> None:
        """An object: ``kind`` is "inline" (``value`` is it) or "select" (``value`` is where it lies in the record's file)."""
        if kind != "select":
            self.build.add_object(ObjectRow(key, fqn=key, path=(key,), value=value))
            return
        self.selects[key] = tuple(value)
        size = record["size"]
        self.build.add_object(ObjectRow(key, fqn=key, path=(key,), file=self.file(record), offset=0, length=size, encoding="torch_save"))

    def module(self, model: Record, names: set[str], skip: set[str] | None = None) -> None:
        """Weights and buffers of a module that is there as a whole (stages 0 to 2). ``names``: what is known to be a parameter."""
        module: Mapping[str, Stored] = model["module"]
        buffers = set(model["buffers"]) - names
        file = self.file(model)
        for name, tensor in module.items():
            if name not in (skip or ()):
                self.whole(Role.BUFFER if name in buffers else Role.WEIGHT, name, tensor, file)
        for alias, name in model["shared"].items():
            if alias not in module and name in module:
                self.whole(Role.WEIGHT, alias, module[name], file)
        self.not_tensors(model)

    def not_tensors(self, model: Record) -> None:
        """What a module keeps in its state dict without being a tensor."""
        for name in model["not_tensors"]:
            self.object(f"model.{name}", "select", ("module", name), model)

    def hyperparameters(self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], record: Record) -> None:
        """``optim.param_groups.<i>.<key>``; ``params`` are names instead of numbers."""
        for i, group in enumerate(groups):
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    self.object(f"optim.param_groups.{i}.{key}", value[0], value[1], record)
            self.object(f"optim.param_groups.{i}.params", "inline", list(names[i]), record)

    def bad(self, record: Record, message: str) -> NoReturn:
        """Raise CorruptCheckpointError naming the record's file."""
        raise CorruptCheckpointError(f"{record['path']}: {message}")
