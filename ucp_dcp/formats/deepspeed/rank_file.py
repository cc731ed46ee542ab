"""A file of a checkpoint as plain numbers, strings, lists and dicts: the parts that several kinds of files share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ...errors import CorruptCheckpointError, UnsupportedError
from ...safe_pickle import EnumStub, StoredTensor, Stub, is_plain
from ..torch_archive import Tree

__all__ = ["RankFile", "stand_in"]


def stand_in(module: str, name: str) -> type[Stub] | None:
    """Inert stand-ins for DeepSpeed's own classes."""
    if module == "deepspeed" or module.startswith("deepspeed."):
        return EnumStub if name.endswith("Enum") else Stub
    return None


class RankFile:
    """The object of one file, and checks of its parts that name the file."""

    def __init__(self, tree: Tree) -> None:
        self.path = tree.path
        self.size = tree.size
        self.root: dict[Any, Any] = tree.value

    def bad(self, message: str) -> NoReturn:
        """Raise CorruptCheckpointError naming the file."""
        raise CorruptCheckpointError(f"{self.path}: {message}")

    def mapping(self, value: Any, what: str) -> Mapping[Any, Any]:
        """``value``, a dict."""
        if not isinstance(value, dict):
            self.bad(f"{what} is {type(value).__name__}, expected a dict")
        return value

    def items(self, value: Any, what: str) -> list[Any]:
        """``value``, a list or tuple."""
        if not isinstance(value, (list, tuple)):
            self.bad(f"{what} is {type(value).__name__}, expected a list")
        return list(value)

    def tensor(self, value: Any, what: str) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
        """Where a tensor lies: byte offset, dtype, shape, strides."""
        if not isinstance(value, StoredTensor):
            self.bad(f"{what} is {type(value).__name__}, expected a tensor")
        return value.offset, value.dtype, value.shape, value.strides

    def integer(self, value: Any, what: str) -> int:
        """``value``, an integer from 0."""
        if type(value) is not int or not 0 <= value < 2**63:
            self.bad(f"{what} is {value!r:.60}, expected an integer from 0")
        return value

    def integers(self, value: Any, what: str) -> list[int]:
        """``value``, a list of integers from 0."""
        return [self.integer(x, what) for x in self.items(value, what)]

    def shapes(self, value: Any, what: str) -> list[tuple[str, tuple[int, ...]]]:
        """``value``, a dict of name -> shape, in its order."""
        shapes = []
        for name, shape in self.mapping(value, what).items():
            if type(name) is not str:
                self.bad(f"{what} names a parameter {name!r:.60}")
            size = tuple(self.integers(tuple(shape) if isinstance(shape, (tuple, list)) else shape, f"{what}: the shape of {name!r}"))
            if math.prod(size) >= 2**62:
                self.bad(f"{what}: the shape of {name!r} is {size}")
            shapes.append((name, size))
        return shapes

    def thing(self, value: Any, path: tuple[str | int, ...]) -> tuple[str, Any]:
        """An object of the file for the record: itself where it is plain, else where it is."""
        return ("inline", value) if is_plain(value) else ("select", path)

    def states(self, base: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
        """``state`` of an optimizer: number -> name -> ("tensor" | "scalar" | "number", value)."""
        states: dict[int, dict[str, Any]] = {}
        for group, values in self.mapping(base.get("state", {}), "state").items():
            own: dict[str, Any] = {}
            for name, value in self.mapping(values, f"state[{group!r}]").items():
                if type(name) is not str or not name:
                    self.bad(f"state[{group!r}] has a state named {name!r:.60}")
                if isinstance(value, StoredTensor) and value.shape == ():
                    own[name] = ["scalar", self.tensor(value, name)]
                elif isinstance(value, StoredTensor):
                    own[name] = ["tensor", self.tensor(value, name)]
                elif value is None or type(value) in (bool, int, float):
                    own[name] = ["number", value]
                else:
                    raise UnsupportedError(
                        f"{self.path}: optimizer state {name!r} of group {group!r} is a {type(value).__name__}; not supported yet"
                    )
            states[self.integer(group, "a key of state")] = own
        return states

    def groups(self, base: Mapping[Any, Any], path: tuple[str | int, ...]) -> list[dict[str, Any]]:
        """``param_groups``; ``path`` is where the optimizer's state is in the file."""
        groups: list[dict[str, Any]] = []
        for i, group in enumerate(self.items(base.get("param_groups"), "param_groups")):
            own: dict[str, Any] = {}
            for key, value in self.mapping(group, f"param_groups[{i}]").items():
                if type(key) is not str:
                    self.bad(f"param_groups[{i}] has the key {key!r:.60}")
                if key == "params":
                    own[key] = self.integers(value, f"param_groups[{i}].params")
                else:
                    own[key] = list(self.thing(value, (*path, "param_groups", i, key)))
            groups.append(own)
        return groups

    def scaler(self, value: Any, path: tuple[str | int, ...]) -> tuple[str, Any]:
        """A LossScaler as the dict of its fields; a dtype among them is its name."""
        if isinstance(value, Stub) and isinstance(value.state, dict):
            fields = {key: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x for key, x in value.state.items()}
            if is_plain(fields):
                return "inline", fields
        return self.thing(value, path)
