"""Tensors that are stored by parameter: weights, and masters and moments of the formats that keep a parameter's shape.

Up to 0.15 flattened optimizer tensors were stored *nd-reformulated*: [X/x, Y/y, ..., x*y*...], a grid of local shapes with the
flattened shard behind it, and the real shape in ``.metadata``'s ``mcore_data``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ...errors import CorruptCheckpointError
from ...geometry import Box, c_strides, flat_range_to_boxes
from ...names import Role
from ..dcp import METADATA
from .keys import Key, Stacked, parse_key, split_half, stacked
from .objects import Common
from .views import Place, Views

__all__ = ["Vocab", "add_tensors", "weight_names", "wrapper_of"]

_ORIG = "nd_reformulated_orig_global_shape"


class Vocab:
    """How many rows of vocabulary tensors are real: padding is cut off when ``args`` tells the vocabulary's size.

    ``args.vocab_size`` counts only when padding it by Megatron's rule gives the stored size; ``padded`` is the stored size.
    """

    def __init__(self, common: Common) -> None:
        self.size: int | None = None
        self.padded: int | None = common.integer("padded_vocab_size")
        size = common.integer("vocab_size")
        if size is None or self.padded is None:
            return
        if common.args.get("tokenizer_type") == "NullTokenizer" and common.path.endswith("common.pt"):
            size += 1  # up to 0.18 that tokenizer had an end-of-document token of its own behind the vocabulary
        multiple = (common.integer("make_vocab_size_divisible_by", 128) or 128) * (common.integer("tensor_model_parallel_size", 1) or 1)
        if -(-size // multiple) * multiple == self.padded:
            self.size = size

    def cut(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape without padding."""
        own = tuple(shape)
        vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
        if vocabulary and self.size is not None and own and own[0] == self.padded:
            return (self.size, *own[1:])
        return own


def wrapper_of(keys: Sequence[str]) -> str:
    """``module.`` when all keys of the model begin with it."""
    own = [key for key in keys if not key.startswith(("optimizer.", "chained_"))]
    return "module." if own and all(key.startswith("module.") for key in own) else ""


def add_tensors(views: Views, mcore_data: Mapping[str, Any], vocab: Vocab) -> list[str]:
    """All tensors stored by parameter. Returns the keys that are no such tensors (flat optimizer buffers)."""
    catalog = views.base.catalog
    what = f"{METADATA} in {views.base.store.url}"
    wrapper = wrapper_of(catalog.keys)
    rest: list[str] = []
    for row in catalog.tensors():
        key = parse_key(row.key, wrapper)
        if key is None:
            rest.append(row.key)
            continue
        extra = mcore_data.get(row.key)
        orig = extra.get(_ORIG) if isinstance(extra, Mapping) else None
        adder = _Adder(views, row.index, key, row.dtype, vocab)
        if orig is None:
            adder.plain(row.shape)
        else:
            if not isinstance(orig, (tuple, list)) or not all(type(n) is int and n >= 0 for n in orig) or len(orig) + 1 != len(row.shape):
                raise CorruptCheckpointError(f"{what}: the shape of {row.key!r} before flattening is {orig!r:.80}, stored is {row.shape}")
            adder.reformulated(tuple(orig), row.shape, what, row.key)
    return rest


class _Adder:
    """Adds the views of one stored tensor."""

    def __init__(self, views: Views, index: int, key: Key, dtype: str, vocab: Vocab) -> None:
        self.views, self.key, self.dtype, self.vocab = views, key, dtype, vocab
        catalog = views.base.catalog
        self.first = catalog.chunk_range(index)[0]
        self.boxes = catalog.boxes(index).tolist()
        half = split_half(key.name)
        self.part = None if half is None else half.part
        self.names: Stacked = stacked(key.name if half is None else half.name)

    def plain(self, shape: tuple[int, ...]) -> None:
        """The stored tensor has the parameter's own shape, with stacked axes in front."""
        axes = self._axes(shape)
        for c, (offset, size) in enumerate(self.boxes):
            box = Box(tuple(offset[axes:]), tuple(size[axes:]))
            dims = tuple(range(axes, len(shape)))
            for inner in product(*(range(n) for n in size[:axes])):
                index = tuple(o + i for o, i in zip(offset, inner, strict=False))
                self._add(index, shape[axes:], box, lambda at, inner=inner, c=c, dims=dims: Place(self.first + c, (*inner, *at), dims))

    def reformulated(self, shape: tuple[int, ...], stored: tuple[int, ...], what: str, key: str) -> None:
        """The stored tensor is a grid of flattened shards: ``stored[:-1]`` shards along each dim of ``shape``."""
        grid = stored[:-1]
        local = tuple(n // g if g and n % g == 0 else -1 for n, g in zip(shape, grid, strict=True))
        if -1 in local or prod(local) != stored[-1]:
            raise CorruptCheckpointError(f"{what}: {key!r} is {stored}, which is no grid of shards of {shape}")
        axes = self._axes(shape)
        if any(n != 1 for n in local[:axes]):
            raise CorruptCheckpointError(f"{what}: {key!r}: shards of {local} hold several layers or experts")
        own = local[axes:]
        strides = c_strides(own)
        zeros = (0,) * len(grid)
        for c, (offset, size) in enumerate(self.boxes):
            for inner in product(*(range(n) for n in size[:-1])):
                cell = tuple(o + i for o, i in zip(offset, inner, strict=False))
                origin = tuple(g * n for g, n in zip(cell[axes:], own, strict=True))
                for part in flat_range_to_boxes(own, offset[-1], offset[-1] + size[-1]):
                    at = sum(a * b for a, b in zip(part.offset, strides, strict=True)) - offset[-1]

                    def place(delta: tuple[int, ...], at: int = at, inner: tuple[int, ...] = inner, c: int = c) -> Place:
                        skip = at + sum(a * b for a, b in zip(delta, strides, strict=True))
                        return Place(self.first + c, (*(inner or zeros), skip), None, strides)

                    self._add(cell[:axes], shape[axes:], part.translate(origin), place)

    def _axes(self, shape: tuple[int, ...]) -> int:
        axes = self.names.axes
        if len(shape) < axes:
            raise CorruptCheckpointError(f"{self.views.base.store.url}: {self.key.name!r} of shape {shape} has no layer axis")
        return axes

    def _add(self, index: tuple[int, ...], shape: tuple[int, ...], box: Box, place: Any) -> None:
        """One box of one layer's tensor; ``place(delta)``: where its element ``delta`` lies."""
        name = self.names.name(index)
        if self.part is not None:  # gate in front, up behind it
            half = shape[0]
            shape = (2 * half, *shape[1:])
            box = box.translate((self.part * half, *(0,) * (len(shape) - 1)))
        cut = self.vocab.cut(name, shape)
        kept = box if cut == shape else box.intersect(Box((0,) * len(cut), cut))
        if kept is not None:
            delta = tuple(a - b for a, b in zip(kept.offset, box.offset, strict=True))
            self.views.add(self.key.role, name, self.key.state, self.dtype, cut, kept, place(delta))


def weight_names(views: Views) -> list[str]:
    """Names of the weights found."""
    return [fqn for role, fqn, _ in views.tensors if role == Role.WEIGHT]
