"""Geometry that tensors bring themselves: DTensor, ShardedTensor, and tensors that describe their own chunks.

What a coordinate of a device mesh holds follows from shape, mesh and placements alone. DCP describes it by one box per rank, which is
wrong for a lone ``_StridedShard`` and for shards made by hand; here placements are applied from left to right to the list of global indices
of each dimension, and the local tensor's real shape must be what comes out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LayoutError, UnsupportedError
from ..geometry import Box
from .memory import check_memory
from .segments import Segments, chunk_bounds, cut, join, length, overlap

__all__ = ["OwnGeometry", "dtensor_pieces", "is_distributed", "own_geometry"]


@dataclass(slots=True)
class OwnGeometry:
    """Global shape, (box, view) of every local shard, and whether other ranks may hold the same boxes."""

    shape: tuple[int, ...]
    shards: list[tuple[Box, torch.Tensor]]
    replicated: bool
    pattern: str
    cut: bool
    """True when some rank holds less than the whole."""


def dtensor_pieces(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int] | None, placements: Sequence[Any]
) -> list[tuple[Box, Box]]:
    """Boxes of the global tensor and of the local tensor, pairwise, that ``coordinate`` of the mesh holds.

    Exact for every placement of torch: uneven and empty shards (rule of ``torch.chunk``), one tensor dim sharded by several mesh dims, and
    ``_StridedShard(dim, split_factor)``: the dim in ``split_factor`` pieces, each chunked over the mesh dim, own chunks end to end.

    Args:
        shape: global shape.
        mesh_shape: sizes of the mesh dims.
        coordinate: the rank's coordinate; None when the rank is not in the mesh (the result is empty).
        placements: one torch placement per mesh dim.

    Returns:
        Disjoint pairs (global box, local box), in local order; empty when the coordinate holds no element.

    Raises:
        LayoutError: a Partial placement, or placements that do not fit shape and mesh.
    """
    if coordinate is None:
        return []
    return _pairs(_dtensor_dims(shape, mesh_shape, coordinate, placements))


def _pairs(dims: Sequence[Segments]) -> list[tuple[Box, Box]]:
    """Global and local boxes from the list of global indices of each dim."""
    runs = [overlap(segments, 0, length(segments)) for segments in dims]
    out: list[tuple[Box, Box]] = []
    for choice in itertools.product(*runs):
        size = tuple(n for _, _, n in choice)
        out.append((Box(tuple(g for _, g, _ in choice), size), Box(tuple(at for at, _, _ in choice), size)))
    return out


def _dtensor_dims(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> list[Segments]:
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise LayoutError(
            f"found {len(placements)} placements and coordinate {tuple(coordinate)}, expected one each per dim of mesh {tuple(mesh_shape)}"
        )
    dims: list[Segments] = [((0, int(n)),) if n else () for n in shape]
    for n, k, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise LayoutError(
                f"placement {placement} is a sum that was not reduced yet: its local values are no part of the global tensor; "
                "redistribute it to Replicate() or Shard() before saving or loading"
            )
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            raise UnsupportedError(f"placement {placement!r} is not known to this version")
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(f"placement {placement} of a tensor of shape {tuple(shape)}: there is no dim {dim}")
        dim %= len(shape)
        whole = dims[dim]
        split = int(getattr(placement, "split_factor", 1))
        kept: list[Segments] = []
        for piece in range(split):
            start, stop = chunk_bounds(length(whole), split, piece)
            low, high = chunk_bounds(stop - start, n, k)
            kept.append(cut(whole, start + low, start + high))
        dims[dim] = join(kept)
    return dims


def is_distributed(value: torch.Tensor) -> bool:
    """True for a tensor that brings its own geometry; False for a plain one."""
    return _kind(value) != ""


def is_own_class(value: torch.Tensor) -> bool:
    """True for a tensor of torch's own class, not of a subclass."""
    kind = type(value)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def _kind(value: torch.Tensor) -> str:
    if is_own_class(value) and not value.__dict__:  # most tensors of most state dicts: nobody added what a protocol asks for
        return ""
    if _is_dtensor(value):
        return "dtensor"
    if _is_sharded(value):
        return "sharded"
    if all(hasattr(value, name) for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes")):
        return "checkpointable"
    if hasattr(value, "__create_chunk_list__") and hasattr(value, "__get_tensor_shard__"):
        return "chunks"
    return ""


def _is_dtensor(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _is_sharded(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def own_geometry(key: str, value: Any) -> OwnGeometry:
    """Shards of a tensor for which ``is_distributed``. Raises LayoutError naming ``key`` when its parts do not agree with each other."""
    kind = _kind(value)
    try:
        if kind == "dtensor":
            return _from_dtensor(key, value)
        if kind == "sharded":
            return _from_sharded(value)
        if kind == "checkpointable":
            return _from_checkpointable(value)
        return _from_chunks(key, value, tuple(value.size()), value.__create_chunk_list__(), value.__get_tensor_shard__)
    except (LayoutError, UnsupportedError) as error:
        raise type(error)(f"{key}: {error}") from None


def _from_dtensor(key: str, value: Any) -> OwnGeometry:
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = value.device_mesh, value.placements, tuple(int(n) for n in value.shape)
    coordinate = mesh.get_coordinate()
    pattern = ", ".join(f"{name}: {p}" for name, p in zip(_mesh_names(mesh), placements, strict=True))
    sizes = tuple(mesh.shape)  # a property that torch computes anew each time
    covers = math.prod(sizes) >= world_size()
    replicated = not covers or any(p.is_replicate() and n > 1 for p, n in zip(placements, sizes, strict=True))
    divided = any(not p.is_replicate() and n > 1 for p, n in zip(placements, sizes, strict=True))
    if coordinate is None:
        return OwnGeometry(shape, [], replicated, pattern, divided)
    # Before anything else: a Partial has no boxes, whatever its local tensor says.
    dims = _dtensor_dims(shape, sizes, coordinate, placements)
    # to_local() would make a new object and lose chunk lists that frameworks hang on the local tensor itself.
    local = value._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()
    own = type(value).__create_chunk_list__ is not DTensor.__create_chunk_list__
    if not own and not hasattr(local, "__create_chunk_list__"):
        check_memory(key, local)
    source = value if own else local
    if own or hasattr(local, "__create_chunk_list__"):
        out = _from_chunks(key, value, shape, source.__create_chunk_list__(), source.__get_tensor_shard__)
        return OwnGeometry(shape, out.shards, replicated, pattern, divided)
    local = local.detach()
    expected = tuple(length(segments) for segments in dims)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"DTensor of shape {shape}, {pattern}: the local tensor at coordinate {tuple(coordinate)} has shape {tuple(local.shape)}, "
            f"expected {expected}; shards that do not follow the rule of torch.chunk need explicit offsets: describe them with a layout "
            "(widths=) or let the tensor implement __create_chunk_list__"
        )
    shards = []
    for box, where in _pairs(dims):
        shards.append((box, _narrow(local, where)))
    if not shards:
        shards.append((_empty_box(shape, expected), local))
    return OwnGeometry(shape, shards, replicated, pattern, divided)


def _mesh_names(mesh: Any) -> Sequence[str]:
    names = mesh.mesh_dim_names
    return names if names else [str(d) for d in range(mesh.ndim)]


def _empty_box(shape: Sequence[int], size: Sequence[int]) -> Box:
    """A box without elements, behind the end of the dims it does not reach into, so that it cannot be taken for a real shard."""
    return Box(tuple(n if not s else 0 for n, s in zip(shape, size, strict=True)), tuple(size))


def _narrow(local: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (start, n) in enumerate(zip(box.offset, box.size, strict=True)):
        if start != 0 or n != local.shape[d]:
            local = local.narrow(d, start, n)
    return local


def _checked(shape: Sequence[int], offset: Sequence[int], view: torch.Tensor) -> tuple[Box, torch.Tensor]:
    size = tuple(int(n) for n in view.shape)
    offset = tuple(int(o) for o in offset)
    if len(offset) != len(shape) or len(size) != len(shape):
        raise LayoutError(f"a shard at offset {offset} with shape {size} of a tensor of shape {tuple(shape)}: the number of dims differs")
    if any(o < 0 or o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
        raise LayoutError(f"a shard at offset {offset} with shape {size} does not lie in shape {tuple(shape)}")
    return Box(offset, size), view.detach()


def _from_sharded(value: Any) -> OwnGeometry:
    # Not value.size(): every torch function on a ShardedTensor warns that the class is deprecated.
    shape = tuple(int(n) for n in value.metadata().size)
    shards: list[tuple[Box, torch.Tensor]] = []

    def add(tensor: Any, offset: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        # FSDP1 with TP nests: the shard of a ShardedTensor is a ShardedTensor whose offsets count inside the outer shard's.
        if _is_sharded(tensor):
            for inner in tensor.local_shards():
                moved = tuple(a + int(b) for a, b in zip(offset, inner.metadata.shard_offsets, strict=True))
                add(inner.tensor, moved, tuple(int(n) for n in inner.metadata.shard_sizes))
            return
        if tuple(tensor.shape) != wanted:
            raise LayoutError(f"ShardedTensor: the shard at offset {offset} has shape {tuple(tensor.shape)}, its metadata says {wanted}")
        shards.append(_checked(shape, offset, tensor))

    for shard in value.local_shards():
        add(shard.tensor, tuple(map(int, shard.metadata.shard_offsets)), tuple(map(int, shard.metadata.shard_sizes)))
    group = getattr(value, "_process_group", None)
    size = torch.distributed.get_world_size(group) if group is not None else world_size()
    whole = len(shards) == 1 and shards[0][0].size == shape
    return OwnGeometry(shape, shards, size < world_size(), "ShardedTensor", not whole)


def _from_checkpointable(value: Any) -> OwnGeometry:
    """Of torch 2.14's ``CheckpointableTensor``: one tuple per local shard in ``global_offsets``, ``local_offsets`` and ``local_sizes``."""
    shape = tuple(int(n) for n in value.global_shape)
    if not len(value.global_offsets) == len(value.local_offsets) == len(value.local_sizes):
        raise LayoutError("global_offsets, local_offsets and local_sizes have different lengths")
    local = value.detach()
    shards: list[tuple[Box, torch.Tensor]] = []
    for offset, start, size in zip(value.global_offsets, value.local_offsets, value.local_sizes, strict=True):
        where = Box(tuple(map(int, start)), tuple(map(int, size)))
        if where.ndim != local.ndim or any(s > n for s, n in zip(where.stop, local.shape, strict=True)):
            raise LayoutError(f"a shard at local {where.offset}, shape {where.size}, does not lie in the local shape {tuple(local.shape)}")
        shards.append(_checked(shape, offset, _narrow(local, where)))
    return OwnGeometry(shape, shards, True, "CheckpointableTensor", True)


def _from_chunks(key: str, value: Any, shape: tuple[int, ...], chunks: Sequence[Any], get_shard: Any) -> OwnGeometry:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shards: list[tuple[Box, torch.Tensor]] = []
    for index, chunk in enumerate(chunks):
        if 0 in chunk.sizes:
            continue
        view = get_shard(MetadataIndex(key, chunk.offsets, index))
        if tuple(view.shape) != tuple(chunk.sizes):
            raise LayoutError(f"the chunk at {tuple(chunk.offsets)} has shape {tuple(view.shape)}, described as {tuple(chunk.sizes)}")
        shards.append(_checked(shape, chunk.offsets, view))
    return OwnGeometry(shape, shards, True, type(value).__name__, True)
