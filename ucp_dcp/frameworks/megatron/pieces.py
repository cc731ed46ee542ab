"""megatron-core's ``sharded_state_dict`` -> which box of which global tensor each piece of local memory is.

What is read of its objects (``core/dist_checkpointing/mapping.py``): ``ShardedTensor`` (key, data, global_shape, global_offset,
prepend_axis_num, allow_shape_mismatch, flattened_range), ``ShardedTensorFactory`` (data, build), ``ShardedObject`` (data, unique_key,
replica_id). A factory's tensors must be views of the parameter, or a load could not fill it in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import LayoutError, UnsupportedError
from ...formats.megatron_core.keys import parse_key, stacked
from ...names import Role

__all__ = ["Param", "Piece", "read_sharded"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor and its memory.

    start: where it begins in the flattened parameter. padded: dim 0 is a padded vocabulary.
    """

    fqn: str
    role: Role
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: torch.Tensor
    start: int
    padded: bool


@dataclass(frozen=True, slots=True)
class Param:
    """A local parameter or buffer and its pieces; several for a fused gate and up."""

    data: torch.Tensor
    pieces: tuple[Piece, ...]


def read_sharded(tree: Any) -> tuple[list[Param], dict[str, Any]]:
    """All parameters of a sharded state dict; and its objects by unique key, copies of other ranks and empty ones (``None``) left out.

    Raises LayoutError, UnsupportedError naming the tensor.
    """
    params: list[Param] = []
    objects: dict[str, Any] = {}
    for leaf in _leaves(tree):
        if _is_tensor(leaf) or _is_factory(leaf):
            params.append(_param(leaf))
        elif _is_object(leaf):
            replica = leaf.replica_id
            main = replica == 0 if isinstance(replica, int) else all(r == 0 for r in replica)
            if main and leaf.data is not None and not (hasattr(leaf.data, "getbuffer") and not leaf.data.getbuffer().nbytes):
                objects[str(leaf.unique_key)] = leaf.data
        elif isinstance(leaf, torch.Tensor):
            raise LayoutError(
                "the state dict holds plain tensors; expected megatron-core's sharded_state_dict(), whose tensors know where they belong "
                "(plain local tensors need a layout: see docs/language.md)"
            )
    return params, objects


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _is_factory(value: Any) -> bool:
    return hasattr(value, "build") and hasattr(value, "merge_fn")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "prepend_axis_num") and hasattr(value, "global_offset") and not isinstance(value, torch.Tensor)


def _is_object(value: Any) -> bool:
    return hasattr(value, "unique_key") and hasattr(value, "replica_id") and hasattr(value, "data")


def _param(leaf: Any) -> Param:
    data = leaf.data
    if not isinstance(data, torch.Tensor):
        raise LayoutError(f"{leaf.key}: holds no tensor (found {type(data).__name__}); a sharded state dict without data cannot be used")
    sharded = [leaf] if _is_tensor(leaf) else [part for part in _leaves(leaf.build()) if _is_tensor(part)]
    if not sharded:
        raise UnsupportedError(f"{leaf.key}: its factory built no sharded tensor")
    pieces = tuple(piece for part in sharded for piece in [_piece(part, data)] if piece.view.numel())
    if sum(p.view.numel() for p in pieces) != data.numel():
        raise UnsupportedError(
            f"{leaf.key}: the factory's tensors hold {sum(p.view.numel() for p in pieces)} elements, the parameter has {data.numel()}"
        )
    return Param(data, pieces)


def _piece(part: Any, param: torch.Tensor) -> Piece:
    key, view = str(part.key), part.data
    if getattr(part, "flattened_range", None) is not None:
        raise UnsupportedError(
            f"{key}: a flattened ShardedTensor (megatron-core before 0.16, fully_sharded_model_space): give the optimizer itself instead"
        )
    if view.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
        raise UnsupportedError(
            f"{key}: its tensor is a copy of the parameter, not a view of it, so that a load could not fill the parameter"
        )
    axes = int(part.prepend_axis_num)
    shape, offset = tuple(map(int, part.global_shape)), tuple(map(int, part.global_offset))
    known = parse_key(key)
    if known is None or known.role not in (Role.WEIGHT, Role.BUFFER):
        raise UnsupportedError(f"{key}: a tensor of an optimizer in a model's sharded state dict; give the optimizer itself")
    names = stacked(known.name)
    if names.axes != axes:
        raise UnsupportedError(f"{key}: {axes} axes are prepended, and its name tells of {names.axes} (layers, experts)")
    if len(shape) != axes + view.dim() or len(offset) != len(shape):
        raise LayoutError(f"{key}: local shape {tuple(view.shape)} with {axes} prepended axes does not fit global shape {shape}")
    box, whole = offset[axes:], shape[axes:]
    if any(o + n > s for o, n, s in zip(box, view.shape, whole, strict=True)):
        raise LayoutError(f"{key}: local shape {tuple(view.shape)} at {box} does not lie in global shape {whole}")
    start = view.storage_offset() - param.storage_offset()
    return Piece(names.name(offset[:axes]), known.role, whole, box, view, start, bool(getattr(part, "allow_shape_mismatch", False)))
