"""ZeRO stage 0: the parameters of the optimizer have numbers; names come from the module's order and from the masters' contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from counting_store import CountingStore
from format_helpers import DATA, assemble
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import CorruptCheckpointError, UnsupportedError
from ucp_dcp.formats import open_source
from ucp_dcp.formats.deepspeed.naming import FlatItem, Item, name_flat_groups, name_groups
from ucp_dcp.names import Role
from ucp_dcp.storage.store import open_store

FILE = "global_step2/mp_rank_00_model_states.pt"


def rewritten(tmp_path: Path, name: str, change) -> Path:
    shutil.copytree(DATA / "deepspeed" / name, tmp_path / name)
    state = torch.load(tmp_path / name / FILE, weights_only=True)
    change(state)
    torch.save(state, tmp_path / name / FILE)
    return tmp_path / name


def objects(source) -> dict[str, object]:
    return {row.key: source.read_object(row) for row in source.catalog.objects}


def test_objects_and_provenance() -> None:
    source = open_source(DATA / "deepspeed" / "z0_fp16_fused_w2")
    found = objects(source)
    assert found["optim.loss_scaler"]["cur_scale"] == 64 and found["optim.loss_scaler"]["scale_window"] == 1000
    assert found["optim.dynamic_loss_scale"] is True and found["optim.clip_grad"] == 1.0
    assert found["optim.param_groups.0.params"][0] == "embed.weight" and found["optim.param_groups.0.weight_decay"] == 0.1
    assert found["lr_scheduler"] == {"last_batch_iteration": 1}
    assert source.provenance["zero_stage"] == 0 and source.provenance["dp"] == 2 and "unnamed" not in source.provenance


def test_factored_states_keep_their_shapes() -> None:
    source = open_source(DATA / "deepspeed" / "z0_bf16_adafactor_w2")
    shapes = {s: source.catalog.shape_of(source.catalog.find_named(Role.STATE, "embed.weight", s)) for s in ("row_var", "col_var")}
    assert shapes == {"row_var": (7, 1), "col_var": (1, 3)}
    assert source.catalog.find_named(Role.STATE, "gain", "variance") is not None


def test_numbers_that_could_mean_two_parameters_stay_numbers() -> None:
    source = open_source(DATA / "deepspeed" / "z0_fp32_frozen_tied_w1")
    names = objects(source)["optim.param_groups.1.params"]
    unknown = [i for i, name in enumerate(names) if name.startswith("#")]
    assert [names[i] for i in unknown] == ["#9", "#10"]
    assert "2 parameters" in source.provenance["unnamed"]
    row = source.catalog.tensor(source.catalog.find("optimizer.9.exp_avg"))
    assert row.role == Role.PLAIN and row.shape == (5,)
    assert source.catalog.find_named(Role.STATE, "blocks.1.norm.weight", "exp_avg") is None
    assert source.catalog.find_named(Role.WEIGHT, "blocks.1.norm.weight") is not None


@pytest.mark.parametrize("name", ["z0_bf16_frozen_tied_w2", "z0_fp16_fused_w2"])
def test_few_bytes_are_read_to_find_the_names(name: str) -> None:
    store = CountingStore(open_store(DATA / "deepspeed" / name))
    open_source(store)
    tensors = 40
    assert max(r.length for r in store.counts.ranges if r.path.endswith(".pt")) < 20_000
    assert store.counts.bytes_read < 60_000 + tensors * 2 * 128 * 6


def test_groups_in_another_order_are_named_by_contents(tmp_path: Path) -> None:
    def change(state) -> None:
        optimizer = state["optimizer"]
        optimizer["fp32_groups"][0].reverse()
        own = optimizer["optimizer_state_dict"]
        own["param_groups"][0]["params"].reverse()

    original = open_source(DATA / "deepspeed" / "z0_bf16_adafactor_w2")
    source = open_source(rewritten(tmp_path, "z0_bf16_adafactor_w2", change))
    for key in ("optim.state.embed.weight.master", "optim.state.embed.weight.row_var", "optim.state.head.weight.col_var"):
        a, b = assemble(source, source.catalog.find(key)), assemble(original, original.catalog.find(key))
        assert torch.equal(a, b), key


def test_masters_of_another_model_are_not_named(tmp_path: Path) -> None:
    def change(state) -> None:
        for group in state["optimizer"]["fp32_groups"]:
            for master in group:
                master.data.add_(1.0)

    source = open_source(rewritten(tmp_path, "z0_bf16_adafactor_w2", change))
    assert "7 parameters" in source.provenance["unnamed"]
    assert not [t for t in range(source.catalog.n_tensors) if source.catalog.tensor(t).role in (Role.MASTER, Role.STATE)]


def test_names_that_the_optimizer_itself_gives_are_used(tmp_path: Path) -> None:
    """torch.optim given named_parameters() keeps ``param_names``."""

    def change(state) -> None:
        groups = state["optimizer"]["param_groups"]
        groups[0]["param_names"] = [f"p{i}" for i in range(len(groups[0]["params"]))]
        groups[1]["param_names"] = [f"q{i}" for i in range(len(groups[1]["params"]))]

    source = open_source(rewritten(tmp_path, "z0_fp32_frozen_tied_w1", change))
    assert source.catalog.find_named(Role.STATE, "q3", "exp_avg") is not None and "unnamed" not in source.provenance


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda s: s["optimizer"].update(optimizer_state_dict={}), UnsupportedError, "a kind that this version"),
        (lambda s: s["optimizer"].pop("fp32_groups"), UnsupportedError, "fp32_groups"),
        (lambda s: s["optimizer"]["fp32_groups"][0].pop(), CorruptCheckpointError, "numbers of parameters"),
        (lambda s: s["optimizer"]["optimizer_state_dict"]["state"].update({99: {}}), CorruptCheckpointError, "list each of its states"),
        (lambda s: s.update(mp_world_size=2), UnsupportedError, "mp_world_size"),
        (lambda s: s.update(num_experts=[4]), UnsupportedError, "experts"),
    ],
)
def test_damage(tmp_path: Path, change, error, match: str) -> None:
    with pytest.raises(error, match=f"mp_rank_00_model_states.pt.*{match}"):
        open_source(rewritten(tmp_path, "z0_bf16_adafactor_w2", change))


def test_a_checkpoint_without_optimizer_has_weights_only(tmp_path: Path) -> None:
    source = open_source(rewritten(tmp_path, "z0_bf16_adafactor_w2", lambda s: s.update(optimizer=None)))
    assert {source.catalog.tensor(t).role for t in range(source.catalog.n_tensors)} == {Role.WEIGHT, Role.BUFFER}


# ---- the search for names


def test_named_only_where_one_parameter_is_possible() -> None:
    module = [("a", Item((2,))), ("b", Item((3,))), ("c", Item((3,))), ("d", Item((4,)))]
    assert name_groups(module, [[Item((2,)), Item((3,)), Item((4,))]]) == [["a", None, "d"]]
    assert name_groups(module, [[Item((2,)), Item((3,)), Item((3,))], [Item((4,))]]) == [["a", "b", "c"], ["d"]]
    # the first group leaves one parameter over for the second
    assert name_groups(module, [[Item((3,))], [Item((2,)), Item((3,)), Item((4,))]]) == [[None], ["a", None, "d"]]
    assert name_groups(module, [[Item((5,))]]) == [[None]]
    assert name_groups(module, [[Item(None), Item(None), Item(None), Item(None)]]) == [["a", "b", "c", "d"]]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_name_that_is_given_is_right(data) -> None:
    n = data.draw(st.integers(1, 8))
    shapes = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    owner = data.draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))  # group of each parameter, -1: frozen
    module = [(str(i), Item((shape,))) for i, shape in enumerate(shapes)]
    truth = [[str(i) for i in range(n) if owner[i] == g] for g in (0, 1)]
    found = name_groups(module, [[module[int(i)][1] for i in group] for group in truth])
    for names, real in zip(found, truth, strict=True):
        assert all(name is None or name == r for name, r in zip(names, real, strict=True))
    if -1 not in owner and 1 not in owner:
        assert found[0] == truth[0]


class Content(FlatItem):
    def __init__(self, have: list[str], numels: dict[str, int], names: list[str]) -> None:
        super().__init__(sum(numels[x] for x in have))
        self.starts = {}
        at = 0
        for x in have:
            self.starts[at] = x
            at += numels[x]
        self.names = names

    def holds(self, at: int, index: int) -> bool:
        return self.starts.get(at) == self.names[index]


def test_flat_groups_are_filled_by_contents() -> None:
    names, numels = ["a", "b", "c", "d"], {"a": 2, "b": 3, "c": 3, "d": 2}
    sizes = [numels[x] for x in names]
    flats = [Content(["a", "c"], numels, names), Content(["b", "d"], numels, names)]
    assert name_flat_groups(sizes, flats) == [[0, 2], [1, 3]]
    assert name_flat_groups(sizes, [Content(["c", "a"], numels, names)]) == [None]  # not in the module's order


def test_flat_groups_that_could_be_filled_in_two_ways_have_no_names() -> None:
    class Anything(FlatItem):
        def holds(self, at: int, index: int) -> bool:
            return True

    assert name_flat_groups([2, 3, 3], [Anything(5)]) == [None]
    assert name_flat_groups([2, 3, 3], [Anything(8)]) == [[0, 1, 2]]
