"""Telling apart two readings of a flat buffer by what lies in it: a few elements of masters and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...dtypes import ITEMSIZE, NAMES, torch_dtype
from ...geometry import Box
from ...storage.store import Range
from .buckets import LocalParam
from .views import Place, Views

__all__ = ["Sample", "matches"]

_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """A stretch of a master: its (chunk, element), the box of the parameter that it should be, and that box's flat index."""

    place: tuple[int, int]
    box: Box
    at: int
    param: LocalParam


def matches(views: Views, samples: Sequence[Sample], weights: Mapping[str, Any]) -> bool:
    """Whether every sampled run of a master, rounded to the weight's dtype, is the weight there."""
    wanted: list[tuple[int, tuple[int, ...], int]] = []  # chunk, element, number of elements
    for sample in samples:
        own = weights[sample.param.fqn]
        run = min(sample.box.size[-1] if sample.box.size else 1, _SAMPLE)
        for box, place in zip(own.boxes, own.places, strict=True):
            if all(a <= b < a + n for a, b, n in zip(box.offset, sample.box.offset, box.size, strict=True)):
                room = box.stop[-1] - sample.box.offset[-1] if box.size else 1
                run = min(run, room)
                wanted.append((sample.place[0], (sample.place[1],), run))
                wanted.append((place.chunk, _inside(place, box, sample.box), run))
                break
    values = _read(views, wanted)
    for master, weight in zip(values[::2], values[1::2], strict=True):
        low = master.to(weight.dtype)
        if not bool(((low == weight) | (low.isnan() & weight.isnan())).all()):
            return False
    return True


def _inside(place: Place, box: Box, wanted: Box) -> tuple[int, ...]:
    start = list(place.start)
    assert place.dims is not None
    for d, q in enumerate(place.dims):
        start[q] += wanted.offset[d] - box.offset[d]
    return tuple(start)


def _read(views: Views, wanted: Sequence[tuple[int, tuple[int, ...], int]]) -> list[torch.Tensor]:
    base = views.base
    found = base.locate(np.asarray([chunk for chunk, _, _ in wanted], dtype=np.int64))
    ranges, dtypes, runs = [], [], []
    for i, (_, element, run) in enumerate(wanted):
        strides = found.strides[i]
        code = int(found.dtype[i])
        step = strides[-1] if strides else 1
        at = sum(a * b for a, b in zip(element, strides, strict=True))
        run = run if step == 1 else 1
        ranges.append(Range(base.catalog.files[int(found.file[i])].path, int(found.offset[i]) + at * ITEMSIZE[code], run * ITEMSIZE[code]))
        dtypes.append(torch_dtype(NAMES[code]))
        runs.append(run)
    buffers = [bytearray(r.length) for r in ranges]
    base.store.read_ranges(ranges, [memoryview(b) for b in buffers])
    values = [torch.frombuffer(b, dtype=dtype) for b, dtype in zip(buffers, dtypes, strict=True)]
    for i in range(0, len(values), 2):
        n = min(len(values[i]), len(values[i + 1]))
        values[i], values[i + 1] = values[i][:n], values[i + 1][:n]
    return values
