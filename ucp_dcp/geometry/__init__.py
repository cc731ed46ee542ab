"""Integers only: boxes, flat ranges, contiguous runs, intersections and exact coverage. No torch, no I/O."""

from __future__ import annotations

from .box import Box, array_to_boxes, boxes_to_array, c_strides, flat_range_to_boxes, full_box
from .cover import Cover, check_cover, check_cover_ragged
from .intersect import RaggedPairs, intersect_one, intersect_pairs, intersect_ragged
from .runs import Runs, runs

__all__ = [
    "Box",
    "Cover",
    "RaggedPairs",
    "Runs",
    "array_to_boxes",
    "boxes_to_array",
    "c_strides",
    "check_cover",
    "check_cover_ragged",
    "flat_range_to_boxes",
    "full_box",
    "intersect_one",
    "intersect_pairs",
    "intersect_ragged",
    "runs",
]
