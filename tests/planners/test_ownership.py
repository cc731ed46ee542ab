"""Exactly one owner of every byte, bytes balanced over the holders (also case A08)."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import rank_plan, rows_of, whole

from ucp_dcp.planners.merge import merge_objects, merge_tensors
from ucp_dcp.planners.planned import Assignment, Planned, plan_chunks, with_objects
from ucp_dcp.planners.wire import LocalPlan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from models import LLAMA3_8B, adam_shapes


def plan(plans: list[LocalPlan]) -> tuple[Planned, list[Assignment]]:
    return with_objects(*plan_chunks(merge_tensors(plans), len(plans)), merge_objects(plans))


def bytes_per_rank(planned: Planned, itemsize: int) -> np.ndarray:
    out = np.zeros(planned.world)
    for (_, _, size), owner in zip(planned.boxes(), planned.owner.tolist(), strict=True):
        out[owner] += math.prod(size) * itemsize
    return out


def painted(planned: Planned) -> list[np.ndarray]:
    """How often each element of each tensor is written."""
    out = [np.zeros(row.shape, dtype=int) for row in planned.rows]
    for t, offset, size in planned.boxes():
        out[t][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    return out


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_llama3_8b_with_adam_is_balanced_over_replicas(ranks: int) -> None:
    shapes = {".".join(path): ("float32", shape) for path, shape in adam_shapes(LLAMA3_8B).items()}
    one = rank_plan(shapes, {key: [whole(shape)] for key, (_, shape) in shapes.items()})
    planned, assignments = plan([one] * ranks)
    loads = bytes_per_rank(planned, 4)
    assert loads.sum() == 4 * sum(math.prod(shape) for _, shape in shapes.values())
    assert loads.max() / loads.mean() <= 1.1
    # no more pieces than boxes + a few per cut
    assert len(planned.owner) <= len(shapes) + 4 * ranks
    assert sum(len(a.fragment) for a in assignments) == len(planned.owner)


def test_a08_hsdp_writes_one_copy_spread_over_both_shard_groups() -> None:
    """Mesh (2, 2), [Replicate(), Shard(0)], 40 tensors (7, 3): one copy in all, no rank more than 60 percent."""
    tensors = {f"t{i:02}": ("float32", (7, 3)) for i in range(40)}
    plans = [rank_plan(tensors, {k: rows_of((7, 3), rank % 2, 2) for k in tensors}) for rank in range(4)]
    planned, _ = plan(plans)
    loads = bytes_per_rank(planned, 4)
    assert loads.sum() == 40 * 21 * 4
    assert loads.max() <= 0.6 * loads.sum()
    assert all((p == 1).all() for p in painted(planned))


def test_a_loaded_rank_gets_less_of_what_is_shared() -> None:
    tensors = {"alone": ("float32", (1000, 100)), "shared": ("float32", (3000, 100))}
    alone = rank_plan(tensors, {"alone": [whole((1000, 100))], "shared": [whole((3000, 100))]})
    other = rank_plan({"shared": tensors["shared"]}, {"shared": [whole((3000, 100))]})
    planned, _ = plan([alone, other])
    loads = bytes_per_rank(planned, 4)
    assert loads.max() / loads.mean() < 1.02


@settings(max_examples=150, deadline=None)
@given(
    world=st.integers(1, 9),
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_byte_has_exactly_one_owner_that_holds_it(world: int, shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    tensors = {f"t{i}": ("float64", shape) for i, shape in enumerate(shapes)}
    boxes: list[dict[str, list]] = [{} for _ in range(world)]
    for key, (_, shape) in tensors.items():
        parts = data.draw(st.integers(1, min(3, shape[0]))) if shape else 1
        for part in range(parts):
            part_boxes = rows_of(shape, part, parts) if shape else [whole(shape)]
            holders = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
            for holder in holders:
                boxes[holder].setdefault(key, []).extend(part_boxes)
    planned, assignments = plan([rank_plan(tensors, b) for b in boxes])
    assert all((p == 1).all() for p in painted(planned))
    # an assignment names a fragment of that rank, and parts lie inside it
    for rank, assignment in enumerate(assignments):
        local = [(k, *b) for k in sorted(boxes[rank]) for b in sorted(boxes[rank][k])]
        chunks = [
            (planned.rows[t].key, o, s) for (t, o, s), owner in zip(planned.boxes(), planned.owner.tolist(), strict=True) if owner == rank
        ]
        got = []
        for index, part in zip(assignment.fragment.tolist(), assignment.part.tolist(), strict=True):
            key, offset, size = local[index]
            if part >= 0:
                inner, size = assignment.part_boxes[part]
                offset = tuple(a + b for a, b in zip(offset, inner, strict=True))
            got.append((key, offset, size))
        assert got == chunks
