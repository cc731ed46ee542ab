"""The tables of Megatron-DeepSpeed -> a layout spec; and its regular expressions, which never take long, whatever they are."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import SpecError, UnsupportedError
from ucp_dcp.layout import Layout
from ucp_dcp.spec import from_universal_info, lint
from ucp_dcp.spec.linear_regex import Budget, LinearRegex

VOCAB, PADDED, HIDDEN, FFN = 10, 12, 4, 6
EMBED = "tied_modules.embed.word_embeddings.weight"
# As Megatron-DeepSpeed's GPTModelPipe.universal_checkpoint_info writes it with TP > 1, SwiGLU and tied embeddings (model/gpt_model.py).
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCAB,
    "padded_vocab_size": PADDED,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        r"\d+.input_layernorm.weight", r"\d+.post_attention_layernorm.weight", r"\d+.self_attention.dense.bias",
        r"\d+.mlp.dense_4h_to_h.bias", r"\d+.weight", r"\d+.bias",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h.weight", r"\d+.mlp.dense_h_to_4h.bias"],
}  # fmt: skip


def model() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {EMBED: (VOCAB, HIDDEN), "5.weight": (HIDDEN,)}
    for i in (3, 4):
        shapes |= {
            f"{i}.input_layernorm.weight": (HIDDEN,), f"{i}.self_attention.query_key_value.weight": (12, HIDDEN),
            f"{i}.self_attention.query_key_value.bias": (12,), f"{i}.self_attention.dense.weight": (HIDDEN, 8),
            f"{i}.self_attention.dense.bias": (HIDDEN,), f"{i}.mlp.dense_h_to_4h.weight": (2 * FFN, HIDDEN),
            f"{i}.mlp.dense_h_to_4h.bias": (2 * FFN,), f"{i}.mlp.dense_4h_to_h.weight": (HIDDEN, FFN),
        }  # fmt: skip
    return {n: torch.arange(float(torch.Size(s).numel())).reshape(s) + 100 * k for k, (n, s) in enumerate(shapes.items())}


def cut(name: str, value: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """As Megatron-DeepSpeed has it, by hand."""
    if name == EMBED:
        return torch.cat([value, torch.full((PADDED - VOCAB, HIDDEN), -1.0)]).chunk(n)[k].clone()
    if "query_key_value" in name:
        return value.chunk(n)[k].clone()
    if "dense_h_to_4h" in name:
        return torch.cat([half.chunk(n)[k] for half in value.chunk(2)])
    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return value.chunk(n, 1)[k].clone()
    return value.clone()


def on_stage(name: str, pp: int) -> bool:
    return name == EMBED or (name.split(".")[0] == "3") == (pp == 0)


@pytest.mark.parametrize("shapes_of", ["local tensors", "the whole model"])
def test_the_tables_of_megatron_deepspeed(shapes_of: str) -> None:
    whole, stored = model(), {}
    for pp in range(2):
        for tp in range(2):
            local = {n: cut(n, t, tp, 2) for n, t in whole.items() if on_stage(n, pp)}
            if shapes_of == "local tensors":
                spec, shapes = from_universal_info(INFO, {n: t.shape for n, t in local.items()}, tp=2), {}
            else:
                spec, shapes = from_universal_info(INFO, list(whole)), {n: tuple(t.shape) for n, t in whole.items()}
            assert lint(spec) == []
            line = torch.cat([t.reshape(-1) for t in local.values()]) + 0.5
            state = {"model": local, "optimizer": {"state": {"flat_group_0": {"fp32": line, "exp_avg": line + 1}}}}
            variables = {"groups": [list(local)], "pad_multiple": 1}
            layout = Layout(spec, {"pp": (pp, 2), "tp": (tp, 2), "dp": (0, 1)}, variables=variables, shapes=shapes)
            for f in layout.fragments(state):
                full = stored.setdefault(f"{f.role.name} {f.fqn}", torch.full(f.shape, float("nan")))
                full[f.box.slices()] = f.view
    for name, value in whole.items():
        assert torch.equal(stored.pop(f"WEIGHT {name}"), value), name
        assert torch.equal(stored.pop(f"MASTER {name}"), value + 0.5), name
        assert torch.equal(stored.pop(f"STATE {name}"), value + 1.5), name
    assert not stored


def test_layers_share_rules() -> None:
    names = [f"{i}.mlp.dense_4h_to_h.weight" for i in range(3, 99)] + [EMBED]
    spec = from_universal_info(INFO, names)
    assert [r.match.text for r in spec.rules] == ["*.mlp.dense_4h_to_h.weight", EMBED, "flat_group_{g}"]
    # a layer that is divided in another way takes its kind apart
    odd = {**INFO, "tp_replicated_parameter_patterns": ["7.mlp"]}
    spec = from_universal_info(odd, names)
    assert len(spec.rules) == 98 and lint(spec) == []
    # `a.*` would take in a name that is divided by another table
    spec = from_universal_info({"tp_replicated_parameter_patterns": ["a.norm"]}, ["a.0", "a.1", "a.norm"])
    assert sorted(r.match.text for r in spec.rules[:-1]) == ["a.0", "a.1", "a.norm"] and lint(spec) == []


def test_tables_are_looked_up_in_the_order_of_deepspeed() -> None:
    def steps(**tables: Any) -> str:
        return ", ".join(map(str, from_universal_info(tables, {"w": (8, 4)}, tp=2).rules[0].steps))

    every = [".*"]
    sub = [{"patterns": every, "shape": [[6, 10], 4], "partition_dim": 0}]
    assert steps() == "pp: Unique(at=pp), tp: Shard(dim=0)"
    assert steps(pipeline_replicated_parameter_patterns=every) == "tp: Shard(dim=0)"
    more = {"parameter_with_row_parallelism_patterns": every}
    assert steps(**more).endswith("tp: Shard(dim=1)")
    more["parameter_with_sub_params"] = sub
    assert steps(**more).endswith("tp: Shard(dim=0, parts=[6, 10])")
    widths = {"sub_param_shard_widths": {"w": [[2, 4], [5, 5]]}}
    assert steps(**more, **widths).endswith("tp: Shard(dim=0, parts=[6, 10], widths=[[2, 4], [5, 5]])")
    more["parameter_with_2_sub_params_cat_dim_0"] = every
    assert steps(**more).endswith("tp: Shard(dim=0, parts=[8, 8])")
    more["parameter_to_average_patterns"] = every
    assert steps(**more).endswith("tp: Average(state=mean)")
    more["tp_replicated_parameter_patterns"] = every
    assert steps(**more) == "pp: Unique(at=pp)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_replicated_parameter_patterns": "x"}, "tp_replicated_parameter_patterns is a str, expected a list"),
        ({"tp_replicated_parameter_patterns": [3]}, r"found '3', expected at most 10000 patterns"),
        ({"tp_replicated_parameter_patterns": ["("]}, r"tp_replicated_parameter_patterns: regular expression '\(', at 1: a \( without \)"),
        ({"tp_replicated_parameter_patterns": [r"(a)\1"]}, r"\\1 is not understood"),
        ({"tp_replicated_parameter_patterns": ["(?=a)"]}, "a group of another kind"),
        ({"tp_replicated_parameter_patterns": ["x" * 501]}, "501 characters, expected at most 500"),
        ({"original_vocab_size": None}, "original_vocab_size is 'None', expected a number of rows"),
        ({"padded_vocab_size": 9}, "original_vocab_size 10 is more than padded_vocab_size 9"),
        ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, "expected patterns, shape and partition_dim"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": [4, 4], "partition_dim": 2}]}, "partition_dim 2 of shape"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": [-1, 4], "partition_dim": 0}]}, "expected their sizes"),
        ({"sub_param_shard_widths": [1]}, "sub_param_shard_widths is a list"),
    ],
)
def test_tables_that_are_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_universal_info({**INFO, **change}, [EMBED, "3.w"])


def test_parameters_that_cannot_be_told() -> None:
    with pytest.raises(UnsupportedError, match=r"'3\.experts\.0\.w': experts"):
        from_universal_info({"expert_parameter_patterns": [r".*experts"]}, ["3.experts.0.w"])
    with pytest.raises(UnsupportedError, match="DeepSpeed itself does not know"):
        from_universal_info({"autotp_unsupported_parameter_patterns": ["w"]}, ["w"])
    view = {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [3, 4, 4], "partition_dim": 1}]}
    with pytest.raises(UnsupportedError, match="has 2 dims and is viewed with 3"):
        from_universal_info(view, {"w": (12, 4)})
    with pytest.raises(SpecError, match=r"without \* \{ \}"):
        from_universal_info(INFO, ["a{b}"])


ATOM = st.sampled_from(["a", "b", ".", r"\d", r"\w", r"\.", "[ab]", "[^a]", "[0-9.]", "1"])
PATTERN = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@given(PATTERN, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.text("ab1.", max_size=6))
@settings(max_examples=100, deadline=None)
def test_matches_are_those_of_re(pattern: str, start: str, end: str, text: str) -> None:
    pattern = f"{start}{pattern}{end}"
    assert LinearRegex(pattern).match(text) == (re.match(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "(a|aa)+$", "(.*)*x", "((a?){20}){20}c"])
def test_patterns_that_re_never_finishes(pattern: str) -> None:
    began = time.process_time()
    assert not LinearRegex(pattern).match("a" * 1000 + "!")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "pattern", ["(((a{50}){50}){50})", "((((){9999}){9999}){9999}){9999}", "(" * 40 + "a" + ")" * 40, "a{2,1}", "*a", "[a", "a**"]
)
def test_patterns_that_are_refused(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(SpecError, match="regular expression"):
        LinearRegex(pattern)
    assert time.process_time() - began < 2


def test_many_patterns_and_names_are_bounded_together() -> None:
    with pytest.raises(SpecError, match="patterns take more than"):
        LinearRegex("(.*)*x").match("a" * 900, Budget(1000))
