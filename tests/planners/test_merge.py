"""The coordinator's checks: exact coverage also on one rank, replicas, names. Every error before a byte is written."""

from __future__ import annotations

import pickle

import pytest
from plans import rank_plan, rows_of, whole

from ucp_dcp.errors import CoverageError, PlanError, ReplicaMismatchError
from ucp_dcp.planners.merge import check_replicas, merge_objects, merge_tensors
from ucp_dcp.planners.wire import ObjectEntry

T = {"w": ("float32", (6, 4))}


def test_hole_on_one_rank_is_an_error_with_its_place() -> None:
    with pytest.raises(CoverageError, match=r"'w' of shape \(6, 4\): nobody holds offset \(4, 0\) size \(2, 4\)"):
        merge_tensors([rank_plan(T, {"w": [((0, 0), (4, 4))]})])


def test_overlap_names_both_ranks_and_the_box() -> None:
    plans = [rank_plan(T, {"w": [((0, 0), (4, 4))]}), rank_plan(T, {"w": [((3, 0), (3, 4))]})]
    with pytest.raises(CoverageError, match=r"ranks \[0\] and \[1\] both hold offset \(3, 0\) size \(1, 4\)"):
        merge_tensors(plans)


def test_equal_volume_does_not_hide_a_hole_and_an_overlap() -> None:
    plans = [rank_plan(T, {"w": [((0, 0), (4, 4))]}), rank_plan(T, {"w": [((3, 0), (2, 4))]})]
    with pytest.raises(CoverageError, match="nobody holds offset"):
        merge_tensors(plans)


def test_a12_replicas_with_other_content_are_an_error() -> None:
    plans = [rank_plan(T, {"w": [whole((6, 4))]}, {"w": digest}) for digest in (1, 1, 2)]
    with pytest.raises(ReplicaMismatchError, match=r"'w' at offset \(0, 0\) size \(6, 4\): ranks \[0, 1\] / \[2\]"):
        check_replicas(plans, merge_tensors(plans))
    plans = [rank_plan(T, {"w": [whole((6, 4))]}, {"w": 7}) for _ in range(3)]
    check_replicas(plans, merge_tensors(plans))


@pytest.mark.parametrize("other", [("float32", (6, 5)), ("bfloat16", (6, 4))])
def test_ranks_must_agree_about_shape_and_dtype(other: tuple[str, tuple[int, ...]]) -> None:
    plans = [rank_plan(T, {"w": [whole((6, 4))]}), rank_plan({"w": other}, {"w": [whole(other[1])]})]
    with pytest.raises(ReplicaMismatchError, match=r"rank 0 but .* on rank 1"):
        merge_tensors(plans)


def test_uneven_and_empty_ranks_cover_exactly() -> None:
    merged = merge_tensors([rank_plan({"w": ("float32", (5, 3))}, {"w": rows_of((5, 3), r, 4)}) for r in range(4)])
    assert merged.numel.tolist() == [6, 6, 3]


def test_zero_element_and_zero_dim_tensors_are_ordinary() -> None:
    tensors = {"none": ("float32", (0, 3)), "one": ("float32", ())}
    merged = merge_tensors([rank_plan(tensors, {"one": [whole(())]}) for _ in range(2)])
    assert [row.key for row in merged.rows] == ["none", "one"]
    assert merged.holder_rank.tolist() == [0, 1]


def entry(key: str, digest: bytes, per_rank: bool = False) -> ObjectEntry:
    return ObjectEntry(key, (key,), digest, 10, per_rank)


def test_objects_equal_by_value_have_one_owner_and_others_are_an_error() -> None:
    same = [rank_plan({}, {}, None, [entry("lr", b"a")]) for _ in range(3)]
    assert [(e.key, r) for e, r in merge_objects(same).entries] == [("lr", 0)]
    with pytest.raises(ReplicaMismatchError, match="'rng': rank 0 and rank 1 hold different values"):
        merge_objects([rank_plan({}, {}, None, [entry("rng", d)]) for d in (b"a", b"b")])


def test_per_rank_objects_are_kept_per_rank() -> None:
    plans = [rank_plan({}, {}, None, [entry("rng", d, True)]) for d in (b"a", b"b")]
    assert [(e.key, e.path, r) for e, r in merge_objects(plans).entries] == [
        ("rng.per_rank.0", ("rng", "per_rank", "0"), 0),
        ("rng.per_rank.1", ("rng", "per_rank", "1"), 1),
    ]


def test_errors_of_planning_pickle() -> None:
    for kind in (CoverageError, ReplicaMismatchError, PlanError):
        copy = pickle.loads(pickle.dumps(kind("tensor 'w': found, expected")))
        assert type(copy) is kind and str(copy) == "tensor 'w': found, expected"
