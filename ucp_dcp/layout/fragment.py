"""What a layout yields: fragments, padding and objects of one rank's state dict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..geometry import Box
from ..names import Role

__all__ = ["Collected", "Fragment", "GroupField", "ObjectLeaf", "Padding", "Path"]

Path: TypeAlias = tuple[str | int, ...]


@dataclass(slots=True)
class Fragment:
    """A box of a global tensor and the local memory that holds it.

    key: dotted name in the checkpoint, with the global fqn. path: nesting of that name in a state dict.
    role, fqn, state: decision D6; fqn and state are "" for a plain tensor, state is "" for a master copy.
    shape: global logical shape, padding not counted. box: part of it; of size 0 when this rank holds none of the tensor's elements.
    view: tensor of shape ``box.size``, a view of local memory, never a copy; any strides.
    replicated: other ranks may hold the same box. average: axes over which the copies drifted apart; the
        global value is their mean.
    writes: False for a copy that is loaded but must not be saved (``Average(state=first)`` at other coordinates than 0).
    pattern: how the tensor is divided, for people.
    """

    key: str
    path: Path
    role: Role
    fqn: str
    state: str
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor
    replicated: bool
    average: tuple[str, ...] = ()
    pattern: str = ""
    writes: bool = True


@dataclass(slots=True)
class Padding:
    """Local memory that holds no global element: it is not saved, and a load fills it with 0. ``key``: of the local tensor it is in."""

    key: str
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupField:
    """A field of an optimizer's ``param_groups``.

    root: dotted path of the optimizer root. group: the group's number, or in torch's flattened form the parameter's name.
    """

    root: str
    group: int | str
    field: str


@dataclass(slots=True)
class ObjectLeaf:
    """A value that is no tensor. ``per_rank``: each rank keeps its own (``PerRank``).

    key, path: in the checkpoint, with the global fqn. local_path: where the value stands in this rank's state dict.
    group: for a hyperparameter below an optimizer root; such values belong to parameters, not to a place in a list.
    """

    key: str
    path: Path
    value: Any
    per_rank: bool = False
    local_path: Path = ()
    group: GroupField | None = None


@dataclass(slots=True)
class Collected:
    """Everything in a state dict. ``paths``: key -> nesting, for tensors and objects."""

    fragments: list[Fragment] = field(default_factory=list)
    objects: list[ObjectLeaf] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
