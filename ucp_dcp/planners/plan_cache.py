"""The plan of a save's tensors, kept for the next save of the same layout.

A training job saves the same tensors in the same boxes again and again. Merging and checking them and choosing owners takes the
coordinator 0.4 s for 873 tensors on 256 ranks; a fingerprint of all columns takes a sixth of that. It covers all that the plan follows
from: names, dtypes, shapes, roles, patterns, boxes, who holds them, and their order on every rank. Contents are compared each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from .merge import MergedBoxes, find_tied, merge_tensors
from .planned import Assignment, Planned, plan_chunks
from .wire import LocalPlan

__all__ = ["TensorPlan", "fingerprint", "forget", "plan_tensors"]

_KEPT = 2  # a job has a small and a large checkpoint at most; a plan of 223,488 chunks takes some 20 MB


@dataclass(frozen=True)
class TensorPlan:
    """What follows from the columns of all ranks, but for contents and objects."""

    merged: MergedBoxes
    planned: Planned
    assignments: list[Assignment]


_plans: OrderedDict[str, TensorPlan] = OrderedDict()
_lock = threading.Lock()


def fingerprint(plans: Sequence[LocalPlan], tied: bool) -> str:
    """Tells apart any two saves whose tensor plans could differ."""
    digest = xxhash.xxh3_128(f"{len(plans)} {tied}".encode())
    tables: dict[bytes, bytes] = {}  # most ranks have one and the same
    for plan in plans:
        table = tables.get(plan.table)
        if table is None:
            table = tables[plan.table] = xxhash.xxh3_128_digest(plan.table)
        digest.update(table)
        for column in (plan.key, plan.coords, plan.tied):
            digest.update(f"{column.size} ".encode())
            digest.update(column.tobytes())
    return digest.hexdigest()


def plan_tensors(plans: Sequence[LocalPlan], *, tied: bool) -> TensorPlan:
    """Merge the columns of all ranks, check coverage and choose owners, or take the plan of an earlier save with the same columns.

    tied: write tied weights once. Raises CoverageError, ReplicaMismatchError (dtype, shape or role), PlanError.
    """
    key = fingerprint(plans, tied)
    with _lock:
        known = _plans.get(key)
        if known is not None:
            _plans.move_to_end(key)
            return known
    merged = merge_tensors(plans)
    planned, assignments = plan_chunks(merged, len(plans), find_tied(plans, merged) if tied else {})
    plan = TensorPlan(merged, planned, assignments)
    with _lock:
        _plans[key] = plan
        while len(_plans) > _KEPT:
            _plans.popitem(last=False)
    return plan


def forget() -> None:
    """Drop all plans (for benchmarks and tests)."""
    with _lock:
        _plans.clear()
