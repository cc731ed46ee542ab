"""Flattening, roots, roles and names: what ``collect`` makes of a state dict."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ucp_dcp.errors import LayoutError, PlanError, UnsupportedError
from ucp_dcp.geometry import Box
from ucp_dcp.layout import Layout, PerRank, collect
from ucp_dcp.names import Role
from ucp_dcp.spec import LayoutSpec

from .common import examples, layout_of, rule

leaves = st.sampled_from([1, 2.5, "x", None, b"y", torch.zeros(2), torch.zeros(0), (1, torch.ones(1)), (), {1, 2}])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(["a", "b", "a.b", ""]), st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", "c"]), trees, max_size=4))
@examples(200)
def test_keys_and_paths_are_those_of_dcp(state_dict: dict[str, Any]) -> None:
    """C01, C02: the same leaves under the same keys as torch's own flattening, or an error where torch has one."""
    try:
        flat, paths = flatten_state_dict(state_dict)
    except ValueError:
        with pytest.raises(PlanError, match="two values have the key"):
            collect(state_dict)
        return
    collected = collect(state_dict)
    tensors = {f.key: f for f in collected.fragments}
    objects = {o.key: o for o in collected.objects}
    assert set(tensors) | set(objects) == set(flat) and not set(tensors) & set(objects)
    assert collected.paths == paths
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            f = tensors[key]
            assert f.view.data_ptr() == value.data_ptr() and f.shape == tuple(value.shape)
            assert (f.role, f.fqn, f.state, f.replicated, f.path) == (Role.PLAIN, "", "", True, paths[key])
        else:
            assert objects[key].value is value and objects[key].path == objects[key].local_path == paths[key]


def test_dict_subclasses_and_nested_tuples() -> None:
    state: dict[str, Any] = {"a": OrderedDict(x=[{"y": torch.ones(1)}, (torch.ones(2), 1)]), "n": np.zeros(3)}
    assert set(collect(state).paths) == set(flatten_state_dict(state)[0]) == {"a.x.0.y", "a.x.1", "n"}


def test_a_state_dict_that_holds_itself() -> None:
    state: dict[str, Any] = {}
    state["a"] = state
    with pytest.raises(PlanError, match="nested too deeply or holds itself"):
        collect(state)


def test_per_rank_survives_pickling_and_rebuilding() -> None:
    value = PerRank({"seed": 3})
    assert pickle.loads(pickle.dumps(value)) == value and isinstance(pickle.loads(pickle.dumps(value)), PerRank)
    for form in (value, dict(value)):
        (leaf,) = collect({"rng": form}).objects
        assert leaf.per_rank and leaf.value == {"seed": 3} and leaf.key == "rng"
    # Two keys are an ordinary dict.
    assert {o.key for o in collect({"rng": {**value, "other": 1}}).objects} == {"rng.__ucp_per_rank__.seed", "rng.other"}


ROOTS = {"model": "model", "optimizer": "optimizer"}


def test_roots_without_a_layout_give_names_and_roles() -> None:
    """D6: roles come from declared roots, never from splitting a name."""
    state = {
        "model": {"a": {"w": torch.ones(2, 3)}, "b.w": torch.ones(1)},
        "optimizer": {
            "state": {"a.w": {"exp_avg": torch.ones(2, 3), "pre": {"cond": torch.ones(2)}}},
            "param_groups": [{"lr": torch.tensor(0.1)}],
        },
        "ema": torch.ones(1),
    }
    by_key = {f.key: f for f in collect(state, roots=ROOTS).fragments}
    assert {k: (f.role, f.fqn, f.state) for k, f in by_key.items()} == {
        "model.a.w": (Role.WEIGHT, "a.w", ""),
        "model.b.w": (Role.WEIGHT, "b.w", ""),
        "optimizer.state.a.w.exp_avg": (Role.STATE, "a.w", "exp_avg"),
        "optimizer.state.a.w.pre.cond": (Role.STATE, "a.w", "pre.cond"),
        "optimizer.param_groups.0.lr": (Role.PLAIN, "", ""),
        "ema": (Role.PLAIN, "", ""),
    }
    assert all(f.replicated for f in by_key.values())


def test_nested_and_whole_roots() -> None:
    state = {"app": {"net": {"w": torch.ones(2)}, "opt": {"state": {"w": {"m": torch.ones(2)}}}}}
    found = {f.key: (f.role, f.fqn) for f in collect(state, roots={"app.net": "model", "app.opt": "optimizer"}).fragments}
    assert found == {"app.net.w": (Role.WEIGHT, "w"), "app.opt.state.w.m": (Role.STATE, "w")}
    (f,) = collect({"layer": {"w": torch.ones(2)}}, roots={"": "model"}).fragments
    assert (f.key, f.fqn, f.role) == ("layer.w", "layer.w", Role.WEIGHT)
    with pytest.raises(LayoutError, match="expected a path"):
        collect(state, roots={"app": "weights"})


def test_layout_names_and_paths() -> None:
    """Keys carry the global fqn; paths keep the nesting where the name is global already."""
    rules = [rule("layers.{i}.w", rename="decoder.layers.{i + first}.w"), rule("stats.*", role="buffer")]
    layout = layout_of(rules, {"dp": (0, 2)}, states={"step": "scalar", "fp32": "master"}, declare={"first": "int"}, variables={"first": 6})
    state = {
        "model": {"layers": {"0": {"w": torch.ones(2), "_extra_state": io.BytesIO(b"x")}}, "stats": {"mean": torch.ones(1)}},
        "optimizer": {
            "state": {"layers.0.w": {"m": torch.ones(2), "fp32": torch.ones(2), "step": torch.tensor([3.0]), "note": "n"}},
            "param_groups": [{"lr": 0.1, "params": ["layers.0.w"]}],
        },
        "epoch": 3,
    }
    collected = collect(state, layout=layout)
    found = {f.key: (f.role, f.fqn, f.state, f.path) for f in collected.fragments}
    assert found == {
        "model.decoder.layers.6.w": (Role.WEIGHT, "decoder.layers.6.w", "", ("model", "decoder.layers.6.w")),
        "model.stats.mean": (Role.BUFFER, "stats.mean", "", ("model", "stats", "mean")),
        "optimizer.state.decoder.layers.6.w.m": (
            Role.STATE, "decoder.layers.6.w", "m", ("optimizer", "state", "decoder.layers.6.w", "m"),
        ),
        "optimizer.state.decoder.layers.6.w.fp32": (
            Role.MASTER, "decoder.layers.6.w", "", ("optimizer", "state", "decoder.layers.6.w", "fp32"),
        ),
        "optimizer.state.decoder.layers.6.w.step": (
            Role.STATE, "decoder.layers.6.w", "step", ("optimizer", "state", "decoder.layers.6.w", "step"),
        ),
    }  # fmt: skip
    objects = {o.key: (o.path, o.local_path) for o in collected.objects}
    # An object of a renamed parameter is renamed too (its place in the state dict stays known); one that no rule matches keeps its name.
    assert objects["optimizer.state.decoder.layers.6.w.note"] == (
        ("optimizer", "state", "decoder.layers.6.w", "note"),
        ("optimizer", "state", "layers.0.w", "note"),
    )
    assert "model.layers.0._extra_state" in objects and "epoch" in objects and "optimizer.param_groups.0.params" in objects


def test_tensors_where_none_are_expected() -> None:
    layout = layout_of([rule("**")], {"dp": (0, 1)})
    with pytest.raises(
        LayoutError, match=r"below optimizer root 'optimizer' at \['exp_avg', 'w'\], expected \('state', <parameter>, <state>\)"
    ):
        collect({"optimizer": {"exp_avg": {"w": torch.ones(1)}}}, layout=layout)
    with pytest.raises(LayoutError, match="none of the layout's roots"):
        collect({"net": {"w": torch.ones(1)}}, layout=layout)
    # A learning rate held as a tensor is no parameter state.
    (f,) = collect({"optimizer": {"param_groups": [{"lr": torch.tensor(0.1)}]}}, layout=layout).fragments
    assert f.role == Role.PLAIN
    with pytest.raises(UnsupportedError, match="sparse"):
        collect({"w": torch.ones(2).to_sparse()})


def test_rules_must_match_exactly_one() -> None:
    layout = layout_of(
        [rule("a.*"), rule("a.w"), rule("b.w", when="false_one")],
        {"dp": (0, 1)},
        declare={"false_one": "bool"},
        variables={"false_one": False},
    )
    with pytest.raises(LayoutError, match=r"'a.w' matches rule 1 .*rule 2 .*disjoint"):
        collect({"model": {"a.w": torch.ones(1)}}, layout=layout)
    with pytest.raises(LayoutError, match=r"'b.w' matches only rules whose `when:` is false: rule 3"):
        collect({"model": {"b.w": torch.ones(1)}}, layout=layout)
    with pytest.raises(LayoutError, match=r"'c.w' matches no rule; nearest is rule"):
        collect({"model": {"c.w": torch.ones(1)}}, layout=layout)


def test_conditions_on_shape() -> None:
    shard, whole = ("tp", "Shard", {"dim": 0}), ("tp", "Replicate", {})
    rules = [rule("*", shard, when="ndim == 2 and shape[0] > 4"), rule("*", whole, when="not (ndim == 2 and shape[0] > 4)")]
    layout = layout_of(rules, {"tp": (0, 2)}, shapes={"a": (8, 3), "b": (4, 3), "c": (8,)})
    found = {f.fqn: f.box.size for f in layout.fragments({"model": {"a": torch.ones(4, 3), "b": torch.ones(4, 3), "c": torch.ones(8)}})}
    assert found == {"a": (4, 3), "b": (4, 3), "c": (8,)}
    assert layout.describe("a") == "tp: Shard(0)" and layout.describe("b") == "tp: Replicate()"
    with pytest.raises(LayoutError, match="global shape of 'd' is not known"):
        layout.describe("d")


def test_wrong_local_shape_names_everything() -> None:
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 1}))], {"tp": (1, 2)}, shapes={"w": (3, 5)})
    with pytest.raises(
        LayoutError, match=r"model.w: rule 1 \(match 'w'\): local shape is \(3, 3\), expected \(3, 2\) of global shape \(3, 5\)"
    ):
        collect({"model": {"w": torch.ones(3, 3)}}, layout=layout)


def test_shapes_from_the_caller_make_uneven_shards_right() -> None:
    """A load knows the global shapes from the checkpoint: A01's empty rank gets an empty fragment, not an inferred shape."""
    layout = layout_of([rule("w", ("dp", "Shard", {"dim": 0}))], {"dp": (3, 4)})
    asked: list[Any] = []

    def shapes(role: Role, fqn: str, state: str) -> tuple[int, ...] | None:
        asked.append((role, fqn, state))
        return (6,)

    (f,) = collect({"model": {"w": torch.ones(0)}}, layout=layout, shapes=shapes).fragments
    assert asked == [(Role.WEIGHT, "w", "")] and f.shape == (6,) and f.box == Box((6,), (0,)) and f.view.shape == (0,)


def test_layout_and_results_pickle() -> None:
    """D18: a layout is plain data in the planner."""
    layout = Layout("zero1", {"dp": (1, 4)}, variables={"groups": [["a", "b"]]}, shapes={"a": [3]})
    again = pickle.loads(pickle.dumps(layout))
    assert (
        again.coords == layout.coords and again.spec == layout.spec and again.variables == layout.variables and again.shapes == {"a": (3,)}
    )
    assert "zero1: dp=1/4" in repr(again)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"coords": {}}, "no coordinate for dp"),
        ({"coords": {"dp": (2, 2)}}, "coordinate 2 of 2"),
        ({"coords": {"dp": 3}}, r"expected \(coordinate, size\)"),
        ({"roots": {"model": "net"}}, "expected a path"),
        ({"variables": {"grups": []}}, "unknown variable grups"),
        ({"variables": {}}, "no value for groups"),
        ({"variables": {"groups": ["a"]}}, r"expected list\[params\]"),
        ({"shapes": {"a": (-1,)}}, "expected sizes from 0"),
        ({"root_variables": {"x": {}}}, "is no root"),
    ],
)
def test_layout_arguments_are_checked(kwargs: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"coords": {"dp": (0, 2)}, "variables": {"groups": []}}
    with pytest.raises(ValueError, match=message):
        Layout(LayoutSpec.load("zero1"), **{**good, **kwargs})


def test_tensor_without_elements_is_known() -> None:
    """A key without elements on any rank is still saved and found (A02's kind)."""
    (f,) = layout_of([rule("w", ("tp", "Shard", {"dim": 0}))], {"tp": (0, 2)}, shapes={"w": (0, 4)}).fragments(
        {"model": {"w": torch.ones(0, 4)}}
    )
    assert f.shape == (0, 4) and f.box.empty and f.view.shape == f.box.size


def test_conjugate_views_keep_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j, 5 + 0j]).conj()
    layout = layout_of([rule("w", ("dp", "Flat", {}))], {"dp": (1, 2)}, shapes={"w": (5,)})
    (f,) = layout.fragments({"model": {"w": value}})
    assert f.view.resolve_conj().tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrapper_prefixes_are_renamed_away(prefix: str) -> None:
    """C05, C07: a global name has no wrapper in it."""
    rules = [rule(prefix + "**", rename="**"), rule("flat")]
    layout = layout_of(rules, {"dp": (0, 1)})
    state = {"model": {prefix + "a.w": torch.ones(1)}, "optimizer": {"state": {prefix + "a.w": {"m": torch.ones(1)}}}}
    assert {f.key for f in collect(state, layout=layout).fragments} == {"model.a.w", "optimizer.state.a.w.m"}


def test_parameters_are_views_without_gradient() -> None:
    value = torch.nn.Parameter(torch.arange(4.0))
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 0}))], {"tp": (0, 2)})
    (f,) = layout.fragments({"model": {"w": value}})
    f.view.fill_(9)
    assert not f.view.requires_grad and value.tolist() == [9.0] * 4
