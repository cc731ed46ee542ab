"""Local tensors of one rank -> fragments of global tensors: by a layout, or by the geometry that DTensors bring themselves."""

from .collect import Shapes, collect
from .dtensor import dtensor_pieces
from .flatten import PER_RANK_KEY, PerRank
from .fragment import Collected, Fragment, GroupField, ObjectLeaf, Padding
from .layout import Layout

__all__ = [
    "PER_RANK_KEY",
    "Collected",
    "Fragment",
    "GroupField",
    "Layout",
    "ObjectLeaf",
    "Padding",
    "PerRank",
    "Shapes",
    "collect",
    "dtensor_pieces",
]
