"""Public bug reports whose kind is layout, by case id: the right values are the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ucp_dcp.errors import LayoutError
from ucp_dcp.geometry import Box
from ucp_dcp.layout import Fragment, Layout, collect
from ucp_dcp.names import Role
from ucp_dcp.spec import LayoutSpec

from .common import layout_of, rule


def put_together(fragments: Sequence[Fragment]) -> dict[str, torch.Tensor]:
    """Global tensors from the fragments of all ranks; NaN where nothing was written."""
    out: dict[str, torch.Tensor] = {}
    for f in fragments:
        full = out.setdefault(f.key, torch.full(f.shape, float("nan"), dtype=torch.float64))
        assert tuple(full.shape) == f.shape
        if not f.box.empty:
            full[f.box.slices()] = f.view.double()
    return out


def fill(fragments: Sequence[Fragment], full: Mapping[str, torch.Tensor]) -> None:
    """What a load does: every fragment takes its box."""
    for f in fragments:
        if not f.box.empty:
            f.view.copy_(full[f.key][f.box.slices()])


def test_A11_prepended_axes_are_in_offset_and_size() -> None:
    """4 experts of (2, 3), global (4, 2, 3), two per EP rank; loaded with four and with one rank."""
    step = (None, "Stack", {"dim": 0, "index": [0, 1], "size": 4})
    expert = {
        "match": "experts.{e}.w",
        "rename": "experts.w",
        "steps": [{"stack": "Stack(0, index=e + 2*ep, size=4)"}, {"ep": "Replicate()"}],
    }
    experts = torch.arange(24.0).reshape(4, 2, 3)
    got: list[Fragment] = []
    for ep in range(2):
        layout = layout_of([expert], {"ep": (ep, 2)})
        got += layout.fragments({"model": {f"experts.{e}.w": experts[2 * ep + e].clone() for e in range(2)}})
    assert {(f.box.offset, f.box.size) for f in got} == {((e, 0, 0), (1, 2, 3)) for e in range(4)}
    assert torch.equal(put_together(got)["model.experts.w"], experts.double())
    # EP=4: one grouped tensor per rank, sharded; EP=1: the elements by a list.
    for ep in range(4):
        local = torch.zeros(1, 2, 3)
        fill(
            layout_of([rule("experts.w", ("ep", "Shard", {"dim": 0}))], {"ep": (ep, 4)}).fragments({"model": {"experts.w": local}}),
            {"model.experts.w": experts},
        )
        assert torch.equal(local[0], experts[ep])
    local = torch.zeros(2, 2, 3)
    fill(layout_of([rule("experts.w", step)], {"ep": (0, 1)}).fragments({"model": {"experts.w": local}}), {"model.experts.w": experts})
    assert torch.equal(local, experts[:2])


def test_A15_A16_virtual_pipeline_offsets() -> None:
    """10 layers, PP=2, VPP=2, last stage 4 layers: every global index once, from the offsets of the chunks."""
    spec = LayoutSpec.from_dict(
        {
            "ucp_spec": 1,
            "axes": ["pp"],
            "variables": {"first": "int"},
            "rules": [{"match": "layers.{i}.w", "rename": "layers.{i + first}.w", "steps": [{"pp": "Unique(pp)"}]}],
        }
    )
    chunks = {(0, 0): range(0, 3), (1, 0): range(3, 5), (0, 1): range(5, 8), (1, 1): range(8, 10)}  # (pp, vp) -> global layers
    got = []
    for pp in range(2):
        layout = Layout(
            spec,
            {"pp": (pp, 2)},
            roots={"model0": "model", "model1": "model"},
            variables={"first": 0},
            root_variables={f"model{vp}": {"first": chunks[pp, vp][0]} for vp in range(2)},
        )
        state = {f"model{vp}": {f"layers.{j}.w": torch.full((2, 2), float(g)) for j, g in enumerate(chunks[pp, vp])} for vp in range(2)}
        got += layout.fragments(state)
    assert sorted(f.fqn for f in got) == sorted(f"layers.{g}.w" for g in range(10))
    for f in got:
        assert bool((f.view == int(f.fqn.split(".")[1])).all()) and not f.replicated


def test_A18_A19_fused_gate_up() -> None:
    """gate 0..3, up 10..13: TP=2 holds [0, 1, 10, 11] and [2, 3, 12, 13]; TP=4 holds pairs; the same for the moments."""
    full = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    expected = {1: [full.tolist()], 2: [[0, 1, 10, 11], [2, 3, 12, 13]], 4: [[0, 10], [1, 11], [2, 12], [3, 13]]}

    def layout(tp: int, n: int) -> Layout:
        return layout_of([rule("w", ("tp", "Shard", {"dim": 0, "parts": [4, 4]}))], {"tp": (tp, n)})

    got = []
    for tp, values in enumerate(expected[2]):
        local = torch.tensor(values, dtype=torch.float32)
        got += layout(tp, 2).fragments({"model": {"w": local}, "optimizer": {"state": {"w": {"m": local + 100}}}})
    stored = put_together(got)
    assert torch.equal(stored["model.w"], full.double()) and torch.equal(stored["optimizer.state.w.m"], full.double() + 100)
    for n, rows in expected.items():
        for tp, values in enumerate(rows):
            local = torch.zeros(len(values))
            fill(layout(tp, n).fragments({"model": {"w": local}}), stored)
            assert local.tolist() == values
    # A18: data-parallel rows of the same fused tensor are plain rows.
    for dp in range(4):
        layout_dp = layout_of([rule("w", ("dp", "Shard", {"dim": 0}))], {"dp": (dp, 4)})
        (f,) = layout_dp.fragments({"model": {"w": torch.zeros(2)}})
        assert f.box == Box((2 * dp,), (2,))


def test_A21_interleaved_qkv_rows_are_plain_rows() -> None:
    """8 heads, 2 KV groups, 24 rows: TP=8 gives 3 rows each; no arithmetic with kv_heads // tp."""
    got = []
    for tp in range(8):
        layout = layout_of([rule("qkv", ("tp", "Shard", {"dim": 0}))], {"tp": (tp, 8)})
        got += layout.fragments({"model": {"qkv": torch.arange(3.0) + 3 * tp}})
    assert put_together(got)["model.qkv"].tolist() == list(range(24))


def test_A22_replicated_kv() -> None:
    """q cut over TP, kv whole on every rank; and KV heads fewer than ranks: neighbours hold the same head."""
    rules = [
        rule("q", ("tp", "Shard", {"dim": 0})),
        rule("kv", ("tp", "Replicate", {})),
        rule("k2", ("tp", "Shard", {"dim": 0, "copies": 2})),
    ]
    k2 = torch.arange(6.0).reshape(2, 3)
    got = []
    for tp in range(4):
        state = {
            "q": torch.arange(6.0).reshape(2, 3) + 6 * tp,
            "kv": torch.arange(12.0).reshape(4, 3),
            "k2": k2[tp // 2 : tp // 2 + 1].clone(),
        }
        got += layout_of(rules, {"tp": (tp, 4)}).fragments({"model": state})
    stored = put_together(got)
    assert torch.equal(stored["model.q"], torch.arange(24.0).reshape(8, 3).double())
    assert torch.equal(stored["model.kv"], torch.arange(12.0).reshape(4, 3).double())
    assert torch.equal(stored["model.k2"], k2.double())
    assert {(f.fqn, f.replicated) for f in got} == {("q", False), ("kv", True), ("k2", True)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_A23_vocabulary_padding_depends_on_tp(tp: int) -> None:
    """vocab 10, divisor 4: padded to 12, 16, 16. Rows 0..9 only are stored; extra rows are filled by 0; moments too."""
    padded = {1: 12, 2: 16, 4: 16}[tp]
    spec = LayoutSpec.from_dict(
        {
            "ucp_spec": 1,
            "axes": ["tp"],
            "variables": {"vocab": "int", "divisor": {"type": "int", "default": 4}},
            "rules": [
                {
                    "match": "emb",
                    "steps": [
                        {"pad": "Pad(0, to=(vocab + divisor*tp.size - 1) // (divisor*tp.size) * divisor*tp.size, size=vocab)"},
                        {"tp": "Shard(0)"},
                    ],
                }
            ],
        }
    )
    rows = torch.arange(20.0).reshape(10, 2) + 1
    stored_rows = torch.cat([rows, torch.full((padded - 10, 2), -5.0)])
    got = []
    for k in range(tp):
        each = padded // tp
        local = stored_rows[k * each : (k + 1) * each].clone()
        collected = collect(
            {"model": {"emb": local}, "optimizer": {"state": {"emb": {"m": local.clone()}}}},
            layout=Layout(spec, {"tp": (k, tp)}, variables={"vocab": 10}),
        )
        got += collected.fragments
        assert all(f.shape == (10, 2) for f in collected.fragments)
        for padding in collected.padding:
            assert bool((padding.view == -5).all())
            padding.view.zero_()
        assert local[local < 0].numel() == 0
    stored = put_together(got)
    assert torch.equal(stored["model.emb"], rows.double()) and torch.equal(stored["optimizer.state.emb.m"], rows.double())


def test_A23_unknown_vocabulary_is_an_error() -> None:
    layout = layout_of([rule("emb", (None, "Pad", {"dim": 0, "to": 12}))], {"tp": (0, 1)})
    with pytest.raises(LayoutError, match="the logical length is not known"):
        layout.fragments({"model": {"emb": torch.zeros(12, 2)}})


def test_A26_grouped_experts_with_transpose() -> None:
    """Per expert (2, 3) saved at EP=2; loaded as a grouped (E, 3, 2) at EP=1 and EP=4: grouped[e] is expert e transposed."""
    expert = {"match": "experts.{e}.w", "rename": "w", "steps": [{"stack": "Stack(0, index=e + 2*ep, size=4)"}, {"ep": "Replicate()"}]}
    experts = [torch.full((2, 3), float(e)) + torch.arange(6.0).reshape(2, 3) / 10 for e in range(4)]
    got = []
    for ep in range(2):
        layout = layout_of([expert], {"ep": (ep, 2)})
        got += layout.fragments({"model": {f"experts.{e}.w": experts[2 * ep + e].clone() for e in range(2)}})
    stored = put_together(got)
    for n in (1, 4):
        for ep in range(n):
            grouped = torch.zeros(4 // n, 3, 2)
            layout = layout_of([rule("w", ("ep", "Shard", {"dim": 0}), (None, "Permute", {"dims": [0, 2, 1]}))], {"ep": (ep, n)})
            fill(layout.fragments({"model": {"w": grouped}}), stored)
            for j in range(4 // n):
                assert torch.equal(grouped[j], experts[ep * (4 // n) + j].t())


def test_A27_flat_ranges_through_fused_columns() -> None:
    """(6, 4) with gate and up columns, flat 24 cut at 7 and 19: unequal piece counts, exact values."""
    full = torch.arange(24.0).reshape(6, 4)
    tp = ("tp", "Shard", {"dim": 1, "parts": [2, 2]})
    for n in (1, 2):
        got = []
        for k in range(n):
            columns = full[:, [k, k + 2]] if n == 2 else full
            total = columns.numel()
            cuts = [0, 7 * total // 24, 19 * total // 24, total]
            for dp in range(3):
                local = columns.reshape(-1)[cuts[dp] : cuts[dp + 1]].clone()
                layout = layout_of([rule("w", tp, ("dp", "Flat", {"bounds": cuts}))], {"tp": (k, n), "dp": (dp, 3)}, shapes={"w": (6, 4)})
                got += layout.fragments({"model": {"w": local}})
        assert torch.equal(put_together(got)["model.w"], full.double())
        assert sum(f.view.numel() for f in got) == 24


def test_A28_a_whole_tensor_called_sharded() -> None:
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 0}))], {"tp": (1, 2)}, shapes={"w": (3, 3)})
    with pytest.raises(LayoutError, match=r"local shape is \(2, 3\), expected \(1, 3\)"):
        layout.fragments({"model": {"w": torch.zeros(2, 3)}})


def test_A30_average_is_marked() -> None:
    """D13: weights are averaged; optimizer state is an error until the spec says what to do."""
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"w": {"m": torch.ones(2), "step": torch.tensor(1.0)}}}}

    def fragments(call: str, k: int = 1) -> dict[str, Fragment]:
        rules = [{"match": "w", "steps": [{"tp": call}]}]
        return {f.key: f for f in layout_of(rules, {"tp": (k, 4)}, states={"step": "scalar"}).fragments(state)}

    with pytest.raises(LayoutError, match=r"optimizer state 'm' of an averaged parameter.*Average\(state=mean\)"):
        fragments("Average()")
    mean = fragments("Average(state=mean)")
    assert mean["model.w"].average and mean["optimizer.state.w.m"].average and not mean["optimizer.state.w.step"].average
    for k in (0, 1):
        first = fragments("Average(state=first)", k)
        assert first["model.w"].average and first["model.w"].writes
        assert (first["optimizer.state.w.m"].average, first["optimizer.state.w.m"].writes) == ((), k == 0)
    alone = layout_of([{"match": "w", "steps": [{"tp": "Average()"}]}], {"tp": (0, 1)}, states={"step": "scalar"}).fragments(state)
    assert not any(f.average for f in alone)


def test_A33_tied_embedding_over_pipeline_stages() -> None:
    """The head of the last stage is the embedding of the first: one name, replicated, moments once."""
    emb = torch.arange(8.0).reshape(4, 2)
    got = []
    for pp in range(2):
        layout = Layout(
            "megatron-gpt",
            {"pp": (pp, 2), "tp": (0, 1), "dp": (0, 1)},
            variables={"vocab": 4, "vocab_multiple": 4, "layer_offset": 0, "ffn": 8, "tied": True},
        )
        name = ("embedding.word_embeddings.weight", "output_layer.weight")[pp]
        got += layout.fragments({"model": {name: emb.clone()}, "optimizer": {"state": {name: {"exp_avg": emb + 1}}}})
    assert {(f.key, f.replicated) for f in got} == {
        ("model.embedding.word_embeddings.weight", True),
        ("optimizer.state.embedding.word_embeddings.weight.exp_avg", True),
    }


def zero1(dp: int, n: int, groups: list[list[str]], shapes: dict[str, tuple[int, ...]], **variables: Any) -> Layout:
    return Layout("zero1", {"dp": (dp, n)}, variables={"groups": groups, **variables}, shapes=shapes)


def flat_state(dp: int, n: int, whole: torch.Tensor) -> dict[str, Any]:
    each = whole.numel() // n
    part = whole[dp * each : (dp + 1) * each]
    states = {"fp32": part.clone(), "exp_avg": part + 100, "exp_avg_sq": part + 200, "step": torch.tensor(5.0)}
    return {"optimizer": {"state": {"flat_group_0": states}}}


def test_A35_zero_partitions_do_not_depend_on_dp() -> None:
    """p0 (3,), p1 (2, 2): 7 elements padded to 8, DP=2. Loaded at DP=1, 3, 4: weights and both moments exact per parameter."""
    shapes = {"p0": (3,), "p1": (2, 2)}
    got = []
    for dp in range(2):
        got += zero1(dp, 2, [["p0", "p1"]], shapes).fragments(flat_state(dp, 2, torch.cat([torch.arange(7.0), torch.tensor([-1.0])])))
    stored = put_together(got)
    assert stored["optimizer.state.p1.fp32"].tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert stored["optimizer.state.p0.exp_avg"].tolist() == [100.0, 101.0, 102.0]
    assert stored["optimizer.state.p0.step"].item() == stored["optimizer.state.p1.step"].item() == 5.0
    assert {f.role for f in got if f.key.endswith("fp32")} == {Role.MASTER}
    for n in (1, 3, 4):
        length = -(-7 // (2 * n)) * 2 * n
        seen = []
        for dp in range(n):
            state = flat_state(dp, n, torch.full((length,), -3.0))
            collected = collect(state, layout=zero1(dp, n, [["p0", "p1"]], shapes))
            fill(collected.fragments, stored)
            for padding in collected.padding:
                padding.view.zero_()
            seen.append(state["optimizer"]["state"]["flat_group_0"]["fp32"])
        assert torch.cat(seen).tolist() == [*range(7), *[0] * (length - 7)]


def test_A37_alignment_padding() -> None:
    """57 elements, DP=2, align 4: 60, and the pad is no data; stage 3's padding per parameter: (5,) and (3,) over 2 ranks."""
    got = []
    for dp in range(2):
        whole = torch.cat([torch.arange(57.0), torch.full((3,), -1.0)])
        collected = collect(flat_state(dp, 2, whole), layout=zero1(dp, 2, [["w"]], {"w": (57,)}))
        got += collected.fragments
        assert sum(p.view.numel() for p in collected.padding) == (0, 9)[dp]  # 3 elements in each of three states
    assert put_together(got)["optimizer.state.w.fp32"].tolist() == list(range(57))
    got = []
    for dp in range(2):
        parts = {"a": torch.tensor([0.0, 1, 2, 3, 4, -1])[3 * dp :][:3].clone(), "b": torch.tensor([0.0, 1, 2, -1])[2 * dp :][:2].clone()}
        got += Layout("zero3", {"dp": (dp, 2)}, shapes={"a": (5,), "b": (3,)}).fragments({"model": parts})
    stored = put_together(got)
    assert stored["model.a"].tolist() == [0, 1, 2, 3, 4] and stored["model.b"].tolist() == [0, 1, 2]


def test_deepspeeds_worked_example() -> None:
    """numels 10, 7, 5; dp 3: F = 24, S = 8. Rank 1: p0[8:10] at 0, p1[0:6] at 2. Rank 2: p1[6:7], p2[0:5], padding 2."""
    shapes = {"p0": (10,), "p1": (7,), "p2": (5,)}
    boxes = []
    for dp in range(3):
        collected = collect(
            {"optimizer": {"state": {"flat_group_0": {"m": torch.zeros(8)}}}}, layout=zero1(dp, 3, [["p0", "p1", "p2"]], shapes)
        )
        boxes.append([(f.fqn, f.box.offset[0], f.box.size[0], f.view.storage_offset()) for f in collected.fragments])
        assert sum(p.view.numel() for p in collected.padding) == (0, 0, 2)[dp]
    assert boxes == [[("p0", 0, 8, 0)], [("p0", 8, 2, 0), ("p1", 0, 6, 2)], [("p1", 6, 1, 0), ("p2", 0, 5, 1)]]


def test_round_robin_gradients() -> None:
    """The buffer's order is 0, n, 2n, ..., 1, n + 1, ...: DeepSpeed's own mapping on disk describes the wrong bytes here."""
    shapes = {f"p{i}": (2,) for i in range(5)}
    layout = zero1(0, 2, [[f"p{i}" for i in range(5)]], shapes, round_robin=True)
    fragments = layout.fragments({"optimizer": {"state": {"flat_group_0": {"m": torch.zeros(6)}}}})
    assert [f.fqn for f in sorted(fragments, key=lambda f: f.view.storage_offset())] == ["p0", "p2", "p4"]


def test_A39_short_last_partition() -> None:
    """A bucket of 10 values over 3 and 4 ranks: the last rank is short or empty, and exact."""
    for n, each in ((3, 4), (4, 3)):
        spec = [{"match": "b", "steps": [{"dp": "FlatBuffer(params=['w'])"}]}, rule("w")]
        got = []
        for dp in range(n):
            local = torch.arange(10.0)[dp * each : (dp + 1) * each].clone()
            got += layout_of(spec, {"dp": (dp, n)}, shapes={"w": (10,)}).fragments({"optimizer": {"state": {"b": {"m": local}}}})
        assert put_together(got)["optimizer.state.w.m"].tolist() == list(range(10))


def test_A40_size_0_placeholder_is_never_a_value() -> None:
    """Stage 3 leaves tensors of size 0 in the module: they fit no rule."""
    for spec in ("replicate", "zero3"):
        layout = Layout(spec, {"dp": (0, 2)}, shapes={"b": (4,)})
        with pytest.raises(LayoutError, match=r"local shape is \(0,\), expected"):
            layout.fragments({"model": {"b": torch.zeros(0)}})


def test_zero3_sub_groups() -> None:
    """Stage 3's fp32 sub-group: partitions of ceil(numel / dp) end to end, padding after each."""
    shapes = {"a": (5,), "b": (3,)}
    got = []
    for dp, values in enumerate(([0.0, 1, 2, 10, 11], [3.0, 4, -1, 12, -1])):
        layout = Layout("zero3", {"dp": (dp, 2)}, variables={"sub_groups": [["a", "b"]]}, shapes=shapes)
        collected = collect({"optimizer": {"state": {"sub_group_0": {"fp32": torch.tensor(values)}}}}, layout=layout)
        got += collected.fragments
        assert [p.view.tolist() for p in collected.padding] == ([], [[-1.0], [-1.0]])[dp]
    stored = put_together(got)
    assert stored["optimizer.state.a.fp32"].tolist() == [0, 1, 2, 3, 4] and stored["optimizer.state.b.fp32"].tolist() == [10, 11, 12]


def test_unique_elsewhere_must_not_be_here() -> None:
    layout = layout_of([rule("w", ("pp", "Unique", {"at": 0}))], {"pp": (1, 2)})
    with pytest.raises(LayoutError, match="the tensor is here at pp=1, and the rule says `pp: Unique"):
        layout.fragments({"model": {"w": torch.zeros(2)}})


def test_forgotten_layer_offset_is_found() -> None:
    """C01's kind: two local names that become one global name, with boxes that clash, are an error."""
    layout = layout_of(
        [rule("a.{i}.w", ("tp", "Shard", {"dim": 0}), rename="a.0.w"), rule("b", rename="a.0.w")], {"tp": (0, 2)}, shapes={"a.0.w": (4,)}
    )
    with pytest.raises(LayoutError, match=r"both become 'model.a.0.w'"):
        layout.fragments({"model": {"a.0.w": torch.zeros(2), "b": torch.zeros(4)}})
    # One box held twice is a replica: the planner compares the two.
    fragments = layout.fragments({"model": {"a.0.w": torch.zeros(2), "a.1.w": torch.zeros(2)}})
    assert len(fragments) == 2 and all(f.replicated for f in fragments)


def test_C11_C12_views_of_shared_storage() -> None:
    """A slice holds its own elements only, and two dtypes over the same bytes keep their own views."""
    base = torch.arange(16, dtype=torch.int32)
    fragments = collect({"slice": base[4:6], "other": base.view(torch.float32)}).fragments
    assert [f.view.shape for f in fragments] == [(2,), (16,)] and [f.view.dtype for f in fragments] == [torch.int32, torch.float32]


def test_factored_and_own_steps_of_state() -> None:
    """Adam is not special: Adafactor's rows and columns, a whole table, and a blockwise scale with steps of its own."""
    states = {
        "row": {"kind": "factored", "drop": -1},
        "col": {"kind": "factored", "drop": 0},
        "table": "replicated",
        "absmax": {"steps": [{"tp": "Shard(0)"}]},
        "step": "scalar",
    }
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 0}))], {"tp": (1, 2)}, states=states)
    state = {
        "model": {"w": torch.zeros(4, 6)},
        "optimizer": {"state": {"w": {"row": torch.zeros(4), "table": torch.zeros(256), "absmax": torch.zeros(3), "m": torch.zeros(4, 6)}}},
    }
    found = {f.state: (f.shape, f.box) for f in layout.fragments(state)}
    assert found == {
        "": ((8, 6), Box((4, 0), (4, 6))),
        "row": ((8,), Box((4,), (4,))),
        "table": ((256,), Box((0,), (256,))),
        "absmax": ((6,), Box((3,), (3,))),
        "m": ((8, 6), Box((4, 0), (4, 6))),
    }
    state["optimizer"]["state"]["w"] = {"col": torch.zeros(6)}
    with pytest.raises(LayoutError, match="lacks dim 0, along which its parameter is divided"):
        layout.fragments(state)
    state["optimizer"]["state"]["w"] = {"step": torch.zeros(2)}
    with pytest.raises(LayoutError, match="declared scalar"):
        layout.fragments(state)


def test_megatron_gpt_spec_end_to_end() -> None:
    """TP=2, PP=2, 2 layers: what the ranks hold gives the whole model, with the moments in flat buffers over DP=2."""
    shapes = {
        "embedding.word_embeddings.weight": (10, 4),
        "decoder.final_layernorm.weight": (4,),
        "output_layer.weight": (10, 4),
    }
    for i in range(2):
        shapes |= {
            f"decoder.layers.{i}.self_attention.linear_qkv.weight": (12, 4),
            f"decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight": (4,),
            f"decoder.layers.{i}.self_attention.linear_proj.weight": (4, 4),
            f"decoder.layers.{i}.mlp.linear_fc1.weight": (16, 4),
            f"decoder.layers.{i}.mlp.linear_fc2.weight": (4, 8),
            f"decoder.layers.{i}.pre_mlp_layernorm.weight": (4,),
        }
    full = {}
    first = 1
    for fqn, shape in shapes.items():
        n = torch.Size(shape).numel()
        full[fqn] = (torch.arange(n, dtype=torch.float64) + first).reshape(shape)
        first += n

    def local(fqn: str, tp: int) -> torch.Tensor:
        value = full[fqn]
        if fqn.endswith(("word_embeddings.weight", "output_layer.weight")):
            return torch.cat([value, torch.zeros(6, 4)]).chunk(2)[tp].clone()
        if "linear_qkv.weight" in fqn:
            return value.chunk(2)[tp].clone()
        if "fc1" in fqn:
            return torch.cat([part.chunk(2)[tp] for part in value.chunk(2)])
        if "linear_proj" in fqn or "fc2" in fqn:
            return value.chunk(2, dim=1)[tp].clone()
        return value.clone()

    def on_stage(fqn: str, pp: int) -> bool:
        if fqn.startswith("decoder.layers."):
            return fqn.split(".")[2] == str(pp)
        return fqn.startswith("embedding") == (pp == 0)

    got: list[Fragment] = []
    for pp in range(2):
        for tp in range(2):
            model = {fqn.replace(f"layers.{pp}.", "layers.0."): local(fqn, tp) for fqn in shapes if on_stage(fqn, pp)}
            flat = torch.cat([t.reshape(-1) for t in model.values()])
            flat = torch.cat([flat, torch.zeros(-flat.numel() % 4, dtype=flat.dtype)]) + 0.5
            for dp in range(2):
                variables = {"vocab": 10, "vocab_multiple": 8, "layer_offset": pp, "ffn": 8, "swiglu": True, "groups": [list(model)]}
                layout = Layout("megatron-gpt", {"pp": (pp, 2), "tp": (tp, 2), "dp": (dp, 2)}, variables=variables)
                got += layout.fragments({"model": model, "optimizer": {"state": {"flat_group_0": {"exp_avg": flat.chunk(2)[dp].clone()}}}})
    stored = put_together(got)
    for fqn, value in full.items():
        assert torch.equal(stored[f"model.{fqn}"], value), fqn
        assert torch.equal(stored[f"optimizer.state.{fqn}.exp_avg"], value + 0.5), fqn


def test_an_element_of_padding_is_no_tensor() -> None:
    layout = layout_of(
        [rule("w", (None, "Pad", {"dim": 0, "to": 4}), (None, "Stack", {"dim": 0, "index": 3}))], {"tp": (0, 1)}, shapes={"w": (3, 2)}
    )
    with pytest.raises(LayoutError, match="element 3 is padding"):
        layout.fragments({"model": {"w": torch.zeros(2)}})


def test_A35_partition_of_padding_only_is_known() -> None:
    """7 elements over 3 ranks, padded to 12: rank 2 holds padding only, and its load must know that the buffer is wanted."""
    state = flat_state(2, 3, torch.full((12,), -3.0))
    collected = collect(state, layout=zero1(2, 3, [["p0", "p1"]], {"p0": (3,), "p1": (2, 2)}))
    empty = [f for f in collected.fragments if f.key.endswith("fp32")]
    assert [(f.fqn, f.shape, f.box.empty) for f in empty] == [("p1", (2, 2), True)]
    (padding,) = (p for p in collected.padding if p.key.endswith("fp32"))
    assert padding.view.numel() == 4 and padding.view.untyped_storage().data_ptr() == empty[0].view.untyped_storage().data_ptr()
