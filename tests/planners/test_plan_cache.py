"""A save of the same layout takes the plan of the last one; anything that a plan follows from makes another plan (D19)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import rank_plan, rows_of, whole

import ucp_dcp
from ucp_dcp.errors import ReplicaMismatchError
from ucp_dcp.planners import plan_cache
from ucp_dcp.planners.merge import check_replicas
from ucp_dcp.planners.wire import LocalPlan

T = {"v": ("float32", (4,)), "w": ("float32", (6, 4))}


def sharded(tensors: dict[str, tuple[str, tuple[int, ...]]] = T, ranks: int = 2, **kwargs: Any) -> list[LocalPlan]:
    return [rank_plan(tensors, {k: rows_of(s, r, ranks) for k, (_, s) in tensors.items()}, **kwargs) for r in range(ranks)]


@pytest.fixture(autouse=True)
def no_plans() -> None:
    plan_cache.forget()


def test_the_same_columns_take_the_same_plan() -> None:
    first = plan_cache.plan_tensors(sharded(), tied=True)
    assert plan_cache.plan_tensors(sharded(), tied=True) is first
    assert plan_cache.plan_tensors(sharded(), tied=False) is not first


@pytest.mark.parametrize(
    "other",
    [
        sharded({**T, "x": ("float32", (2,))}),
        sharded({"v": T["v"]}),
        sharded({**T, "w": ("float32", (8, 4))}),
        sharded({**T, "w": ("bfloat16", (6, 4))}),
        sharded({"v": T["v"], "u": T["w"]}),
        sharded(ranks=3),
        [rank_plan(T, {"v": [whole((4,))], "w": [((0, 0), (6, 2))]}), rank_plan(T, {"w": [((0, 2), (6, 2))]})],
        [rank_plan(T, {"v": [whole((4,))], "w": [((0, 2), (6, 2))]}), rank_plan(T, {"w": [((0, 0), (6, 2))]})],
    ],
    ids=["new key", "key gone", "shape", "dtype", "name", "ranks", "boxes", "holders"],
)
def test_d19_another_layout_takes_another_plan(other: list[LocalPlan]) -> None:
    first = plan_cache.plan_tensors(sharded(), tied=True)
    second = plan_cache.plan_tensors(other, tied=True)
    assert second is not first
    boxes = sorted((second.planned.rows[t].key, offset, size) for t, offset, size in second.planned.boxes())
    wanted = sorted(
        (row, tuple(plan.coords[at : at + n].tolist()), tuple(plan.coords[at + n : at + 2 * n].tolist()))
        for plan in other
        for row, at, n in fragments(plan)
    )
    assert boxes == wanted


def fragments(plan: LocalPlan) -> list[tuple[str, int, int]]:
    from ucp_dcp.planners.wire import parse_table

    rows, at, out = parse_table(plan.table), 0, []
    for key in plan.key.tolist():
        out.append((rows[key].key, at, len(rows[key].shape)))
        at += 2 * len(rows[key].shape)
    return out


def test_contents_are_compared_each_time() -> None:
    same = [rank_plan(T, {k: [whole(s)] for k, (_, s) in T.items()}, {"v": 1, "w": 2}) for _ in range(2)]
    plan = plan_cache.plan_tensors(same, tied=True)
    check_replicas(same, plan.merged)
    drifted = [same[0], rank_plan(T, {k: [whole(s)] for k, (_, s) in T.items()}, {"v": 1, "w": 3})]
    assert plan_cache.plan_tensors(drifted, tied=True) is plan
    with pytest.raises(ReplicaMismatchError, match="'w'"):
        check_replicas(drifted, plan.merged)


def test_only_a_few_plans_are_kept() -> None:
    first = plan_cache.plan_tensors(sharded(), tied=True)
    for n in range(3, 9):
        plan_cache.plan_tensors(sharded(ranks=n), tied=True)
    assert plan_cache.plan_tensors(sharded(), tied=True) is not first


def test_d19_saves_one_after_another(tmp_path: Path) -> None:
    """Values, objects and layouts that change between saves."""
    w, v = torch.arange(6.0), torch.arange(4.0)
    states: list[dict[str, Any]] = [
        {"w": w, "n": 1},
        {"w": w + 1, "n": 2},
        {"w": w + 2, "m": "other", "v": v},
        {"w": (w + 3).reshape(2, 3)},
        {"w": (w + 4).double()},
        {"x": w + 5},
        {"w": w + 6, "n": [1, 2]},
    ]
    for i, state in enumerate(states):
        ucp_dcp.save(state, tmp_path / "c")
        checkpoint = ucp_dcp.open_checkpoint(tmp_path / "c")
        assert sorted([*checkpoint, *checkpoint.objects]) == sorted(state), i
        for key, value in state.items():
            found = checkpoint[key].read() if isinstance(value, torch.Tensor) else checkpoint.objects[key]
            if isinstance(value, torch.Tensor):
                assert found.dtype == value.dtype and np.array_equal(found.numpy(), value.numpy()), (i, key)
            else:
                assert found == value
