"""What a load is made of: what ranks and coordinator tell each other, and what one rank will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..catalog import ObjectRow, TensorRow
from ..geometry import Box
from ..layout import Fragment, ObjectLeaf
from ..transfer import Copy

__all__ = ["LoadOrder", "LoadRequest", "PendingGroups", "Wanted"]


@dataclass(frozen=True)
class LoadRequest:
    """What a rank tells the coordinator: which stored rows it uses (bit mask over catalog rows, then objects) and its per-rank keys."""

    used: bytes
    per_rank: tuple[str, ...]
    """Keys in the checkpoint of the wanted per-rank objects, without the rank."""
    checkpoint: str
    """Which checkpoint this rank sees: all must see the same."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Parameters whose master is not the weight in what this rank would load, and what was found (``consistency``)."""


@dataclass(frozen=True)
class LoadOrder:
    """What the coordinator answers: the rank's number and which rows no rank uses."""

    rank: int
    unused: bytes


@dataclass
class Wanted:
    """Everything one rank will do, in three kinds."""

    copies: list[Copy] = field(default_factory=list)
    boxes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Parallel to copies: (stored key, offset of the stored chunk), for stock ReadItems."""
    numbers: list[tuple[ObjectRow, Fragment]] = field(default_factory=list)
    objects: list[tuple[ObjectRow, ObjectLeaf]] = field(default_factory=list)
    scalars: list[tuple[torch.Tensor, ObjectLeaf]] = field(default_factory=list)
    halved: list[tuple[TensorRow, Box, torch.Tensor]] = field(default_factory=list)
    """Boxes of masters whose halves are read apart and combined."""
    hyperparameters: list[tuple[ObjectLeaf, Any]] = field(default_factory=list)


@dataclass
class PendingGroups:
    """Hyperparameters whose stored values a stock reader has still to bring."""

    leaves: Sequence[ObjectLeaf]
    prefix: str
    rows: Sequence[ObjectRow]
    values: dict[str, Any] = field(default_factory=dict)
