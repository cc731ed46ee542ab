"""DTensors cut by torch's own placements, for tests on real ranks; everything here is independent of the package under test."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import forget_meshes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def fresh_meshes() -> Iterator[None]:
    """Around what a rank does with DTensor operators: no mesh of another process group is remembered before or after."""
    forget_meshes()
    try:
        yield
    finally:
        forget_meshes()


class Groups:
    """Groups of the first ``n`` ranks and meshes over them, made once by all ranks in the same order."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._groups = {n: dist.new_group(list(range(n)), backend="gloo") for n in range(1, self.world + 1)}
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def first(self, n: int) -> Any:
        """The group of ranks 0..n-1. Only they may use it."""
        return self._groups[n]

    def mesh(self, *shape: int) -> DeviceMesh:
        """A mesh of this shape over the first ranks. Collective over all ranks when it is new."""
        if shape not in self._meshes:
            self._meshes[shape] = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
        return self._meshes[shape]


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """What torch's placements leave of ``full`` at this rank's coordinate; empty outside the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return full.new_empty(0)
    for n, k, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            full = placement._split_tensor(full, n, with_padding=False, contiguous=True)[0][k]
    return full.clone().contiguous()


def dtensor(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], fill: float | None = None) -> DTensor:
    """``full`` as DTensor; with ``fill`` a destination of that form."""
    local = cut(full, mesh, placements)
    if fill is not None:
        local.fill_(fill)
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=full.shape, stride=full.stride())
