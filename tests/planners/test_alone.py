"""A save of one rank compares nothing with other ranks, and still what that rank holds twice; plain tensors take a short way."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from typing import Any

import pytest
import torch
from simulated import as_rank

from ucp_dcp import UCPSavePlanner
from ucp_dcp.errors import PlanError, ReplicaMismatchError, UnsupportedError
from ucp_dcp.layout import Layout, PerRank, collect
from ucp_dcp.planners.wire import LocalPlan
from ucp_dcp.spec import LayoutSpec

module = importlib.import_module("ucp_dcp.layout.collect")  # the package has a function of that name


def planned(planner: UCPSavePlanner, state: dict[str, Any], rank: int = 0) -> Any:
    planner.set_up_planner(state, is_coordinator=rank == 0)
    return planner.create_local_plan()


def digests(plan: Any) -> int:
    local = plan.planner_data
    assert isinstance(local, LocalPlan)
    return int(local.has_digest.sum())


def test_digests_only_where_there_is_somebody_to_compare_with() -> None:
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    assert digests(planned(UCPSavePlanner(), state)) == 0
    with as_rank(0, 2):
        assert digests(planned(UCPSavePlanner(), state)) == 2
    with as_rank(0, 1):
        assert digests(planned(UCPSavePlanner(), state)) == 0
    alone = UCPSavePlanner()
    alone._no_dist = True  # what ucp_dcp.save(no_dist=True) says
    with as_rank(0, 2):
        assert digests(planned(alone, state)) == 0


def test_a_coordinator_that_was_not_alone_after_all() -> None:
    """Ranks played in one process without a process group: the coordinator digests what it has when it sees other plans."""
    planners = [UCPSavePlanner() for _ in range(3)]
    states = [{"a": torch.ones(3)}, {"a": torch.ones(3)}, {"a": torch.ones(3)}]
    plans = [planned(p, s, rank) for rank, (p, s) in enumerate(zip(planners, states, strict=True))]
    planners[0].create_global_plan(plans)
    states[0]["a"][1] = 2
    plans = [planned(p, s, rank) for rank, (p, s) in enumerate(zip(planners, states, strict=True))]
    with pytest.raises(ReplicaMismatchError, match=r"'a'.*\[0\].*\[1, 2\]"):
        planners[0].create_global_plan(plans)
    with pytest.raises(PlanError, match="initialise the process group"):
        planners[0].create_global_plan([pickle.loads(pickle.dumps(plan)) for plan in plans])


def test_what_one_rank_holds_twice_is_compared() -> None:
    """Two stages of one rank that share a head: two tensors, one global tensor, and no other rank that would notice."""
    rules = [{"match": "stage.{i}.head", "rename": "head", "steps": []}, {"match": "body", "steps": []}]
    spec = LayoutSpec.from_dict({"ucp_spec": 1, "axes": ["tp"], "variables": {}, "optimizer": {"states": {}}, "rules": rules})
    state = {"model": {"stage.0.head": torch.ones(2, 3), "stage.1.head": torch.ones(2, 3), "body": torch.ones(5)}}
    planner = UCPSavePlanner(layout=Layout(spec, coords={"tp": (0, 1)}))
    plan = planned(planner, state)
    assert digests(plan) == 2
    planner.create_global_plan([plan])
    state["model"]["stage.1.head"][1, 2] = 7
    plan = planned(planner, state)
    with pytest.raises(ReplicaMismatchError, match=r"'model\.head'"):
        planner.create_global_plan([plan])


def awkward() -> dict[str, Any]:
    marked = torch.nn.Parameter(torch.ones(2, 2))
    marked.partition_dim = 0  # type: ignore[attr-defined]
    return {
        "model": {"a": torch.randn(3, 4).T, "b": marked, 7: torch.zeros(0, 2), "scalar": torch.tensor(1.5)},
        "list": [torch.ones(1), {"x": torch.ones(2)}, "text"],
        "step": 3,
        "rng": PerRank(torch.ones(2)),
        "none": {},
    }


def test_the_short_way_of_plain_tensors_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    state = awkward()
    short = collect(state)
    assert module._all_plain(state) is not None
    monkeypatch.setattr(module, "_all_plain", lambda state: None)
    long = collect(state)
    assert short.paths == long.paths
    assert short.objects == long.objects
    assert len(short.fragments) == len(long.fragments) == 6
    for mine, other in zip(short.fragments, long.fragments, strict=True):
        assert mine.view.data_ptr() == other.view.data_ptr() and mine.view.stride() == other.view.stride()
        assert not mine.view.requires_grad and not other.view.requires_grad
        none = torch.zeros(0)  # tensors have no truth value to compare by
        assert dataclasses.replace(mine, view=none) == dataclasses.replace(other, view=none)


def test_the_short_way_is_not_taken_for_more_than_plain_tensors() -> None:
    class Sub(torch.Tensor):
        pass

    claims = torch.ones(2)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(claims, name, ())
    others = [torch.ones(2).as_subclass(Sub), torch.ones(2, 2).to_sparse(), claims]
    assert [module._all_plain({"a": torch.ones(1), "b": other}) for other in others] == [None] * 3
    assert module._all_plain({"a": {"b": torch.ones(1)}, "a.b": 1}) is None
    with pytest.raises(UnsupportedError, match=r"'b': found layout torch\.sparse_coo"):
        collect({"b": others[1]})
