"""Name maps: plans are compared with numpy reshapes; maps that are wrong are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp_dcp.errors import SpecError
from ucp_dcp.spec import NameMap, NamePlan, ready_name_maps

Arrays = dict[str, np.ndarray[Any, Any]]


def apply(plan: NamePlan, values: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """Each target tensor, element by element out of the cuts; every element must come exactly once."""
    out: Arrays = {}
    for tensor in plan.tensors:
        whole, times = np.zeros(tensor.shape), np.zeros(tensor.shape, int)
        for cut in tensor.cuts:
            for source, size, target in zip(cut.source_offset.tolist(), cut.size.tolist(), cut.target_offset.tolist(), strict=True):
                box = values[cut.source][tuple(slice(o, o + n) for o, n in zip(source, size, strict=True))]
                own = [d for d in cut.dims if d >= 0]
                assert all(size[d] == 1 for d in range(box.ndim) if d not in own)
                box = box.transpose([d for d in range(box.ndim) if d not in own] + own)
                shape = [1 if d < 0 else size[d] for d in cut.dims]
                place = tuple(slice(o, o + n) for o, n in zip(target, shape, strict=True))
                whole[place] = box.reshape(shape)
                times[place] += 1
        assert (times == 1).all(), tensor.fqn
        out[tensor.fqn] = whole
    return out


def mapped(name_map: NameMap, source: str, target: str, values: Arrays, **variables: int) -> Arrays:
    return apply(name_map.plan(source, target, {name: value.shape for name, value in values.items()}, variables), values)


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    start, out = 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        out[name] = np.arange(start, start + count, dtype=float).reshape(shape)
        start += count
    return out


def llama(heads: int, kv_heads: int, head_dim: int, ffn: int, layers: int = 2, experts: int = 0) -> Arrays:
    """Under megatron's names."""
    hidden = 6
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (10, hidden), "output_layer.weight": (10, hidden)}
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    for i in range(layers):
        at = f"decoder.layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.pre_mlp_layernorm.weight": (hidden,)}
        shapes[f"{at}.self_attention.linear_qkv.weight"] = ((heads + 2 * kv_heads) * head_dim, hidden)
        shapes[f"{at}.self_attention.linear_proj.weight"] = (hidden, heads * head_dim)
        if experts:
            shapes[f"{at}.mlp.router.weight"] = (experts, hidden)
        for mlp in [f"{at}.mlp.experts.local_experts.{e}" for e in range(experts)] or [f"{at}.mlp"]:
            shapes |= {f"{mlp}.linear_fc1.weight": (2 * ffn, hidden), f"{mlp}.linear_fc2.weight": (hidden, ffn)}
    return numbered(shapes)


@given(st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)]), st.sampled_from([2, 4]), st.integers(1, 3))
def test_llama(heads_kv: tuple[int, int], head_dim: int, ffn: int) -> None:
    heads, kv = heads_kv
    values, m = llama(heads, kv, head_dim, ffn), NameMap.load("llama")
    assert m.family_of(values) == "megatron"
    hf = mapped(m, "megatron", "huggingface", values, heads=heads, kv_heads=kv)
    groups = values["decoder.layers.1.self_attention.linear_qkv.weight"].reshape(kv, heads // kv + 2, head_dim, -1)
    at = "model.layers.1.self_attn"
    np.testing.assert_array_equal(hf[f"{at}.q_proj.weight"], groups[:, :-2].reshape(heads * head_dim, -1))
    np.testing.assert_array_equal(hf[f"{at}.k_proj.weight"], groups[:, -2].reshape(kv * head_dim, -1))
    np.testing.assert_array_equal(hf[f"{at}.v_proj.weight"], groups[:, -1].reshape(kv * head_dim, -1))
    fc1 = values["decoder.layers.0.mlp.linear_fc1.weight"]
    np.testing.assert_array_equal(hf["model.layers.0.mlp.gate_proj.weight"], fc1[:ffn])
    np.testing.assert_array_equal(hf["model.layers.0.mlp.up_proj.weight"], fc1[ffn:])

    titan = mapped(m, m.family_of(hf), "torchtitan", hf, heads=heads, kv_heads=kv)
    # what torchtitan's own adapter does with q and k
    halves = hf[f"{at}.q_proj.weight"].reshape(heads, 2, head_dim // 2, -1)
    np.testing.assert_array_equal(titan["layers.1.attention.wq.weight"], halves.transpose(0, 2, 1, 3).reshape(heads * head_dim, -1))
    back = mapped(m, m.family_of(titan), "megatron", titan, heads=heads, kv_heads=kv)
    assert sorted(back) == sorted(values)
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_experts_are_stacked_and_unstacked() -> None:
    values, m = llama(2, 1, 2, 3, experts=3), NameMap.load("mixtral")
    hf = mapped(m, "megatron", "huggingface", values, heads=2, kv_heads=1)
    fc1 = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    np.testing.assert_array_equal(hf["model.layers.1.block_sparse_moe.experts.2.w3.weight"], values[fc1][3:])
    titan = mapped(m, "megatron", "torchtitan", values, heads=2, kv_heads=1)
    assert titan["layers.1.moe.experts.w1"].shape == (3, 3, 6) and titan["layers.0.moe.experts.w2"].shape == (3, 6, 3)
    np.testing.assert_array_equal(titan["layers.1.moe.experts.w3"][2], values[fc1][3:])
    for source, other in (("huggingface", hf), ("torchtitan", titan)):
        back = mapped(m, source, "megatron", other, heads=2, kv_heads=1)
        assert all((back[name] == value).all() for name, value in values.items()) and len(back) == len(values)


def test_gpt_is_transposed_and_ungrouped() -> None:
    heads, head_dim, hidden = 3, 2, 6
    at = "decoder.layers.0"
    values = numbered(
        {
            f"{at}.self_attention.linear_qkv.weight": (3 * heads * head_dim, hidden),
            f"{at}.self_attention.linear_qkv.bias": (3 * heads * head_dim,),
            f"{at}.mlp.linear_fc1.weight": (8, hidden),
            f"{at}.self_attention.linear_qkv.layer_norm_weight": (hidden,),
        }
    )
    m = NameMap.load("gpt")
    assert m.family_of(values) == "megatron-te"
    hf = mapped(m, "megatron-te", "huggingface", values, heads=heads)
    qkv = values[f"{at}.self_attention.linear_qkv.weight"].reshape(heads, 3, head_dim, hidden).transpose(1, 0, 2, 3).reshape(-1, hidden)
    np.testing.assert_array_equal(hf["transformer.h.0.attn.c_attn.weight"], qkv.T)
    bias = values[f"{at}.self_attention.linear_qkv.bias"].reshape(heads, 3, head_dim).transpose(1, 0, 2).reshape(-1)
    np.testing.assert_array_equal(hf["transformer.h.0.attn.c_attn.bias"], bias)
    np.testing.assert_array_equal(hf["transformer.h.0.mlp.c_fc.weight"], values[f"{at}.mlp.linear_fc1.weight"].T)
    short = {name.removeprefix("transformer."): value for name, value in hf.items()}  # GPT2Model instead of GPT2LMHeadModel
    for names in (hf, short):
        back = mapped(m, "huggingface", "megatron-te", names, heads=heads)
        assert all((back[name] == value).all() for name, value in values.items()) and len(back) == len(values)


def test_numbers_may_count_from_elsewhere() -> None:
    norms = {"3.input_layernorm.weight": (4,), "4.input_layernorm.weight": (4,)}
    values = numbered({**norms, "tied_modules.embed.word_embeddings.weight": (5, 4)})
    m = NameMap.load("bloom")
    hf = mapped(m, m.family_of(values), "huggingface", values)
    np.testing.assert_array_equal(hf["transformer.h.1.input_layernorm.weight"], values["4.input_layernorm.weight"])
    assert sorted(mapped(m, "huggingface", "megatron-deepspeed", hf)) == sorted(values)
    with pytest.raises(SpecError, match=r"1 names have no row.*2\.input_layernorm"):
        m.plan("megatron-deepspeed", "huggingface", {"2.input_layernorm.weight": (4,)})


@pytest.mark.parametrize("name", ready_name_maps())
def test_ready_maps_go_both_ways(name: str) -> None:
    m = NameMap.load(name)
    assert m.name == name
    for row in m.rows:
        assert len(row.parts) >= 2 or name == "mixtral", f"row {row.number} maps nothing"


def edited(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "ucp_name_map": 1,
        "name": "x",
        "families": ["a", "b"],
        "variables": {"n": {}},
        "rows": [{"names": {"a": "w.{i}", "b": ["u.{i}", "v.{i}"]}, "join": {"sizes": ["n", "total - n"]}}],
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ucp_name_map": 2}, "expected 1"),
        ({"rows": "x"}, r"Expected `array`, got `str` - at `\$\.rows`"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"rows": [{"names": {"a": "w", "c": "u"}}]}, r"row 1: families \['c'\]"),
        ({"rows": [{"names": {"a": "w", "b": ["u", "v"]}}]}, "2 names of family b, but the row joins 0"),
        ({"rows": [{"names": {"a": "w.{i}", "b": "u.{j}"}}]}, "capture different things"),
        ({"rows": [{"names": {"a": "w.*", "b": "u"}}]}, "capture different things"),
        ({"rows": [{"names": {"a": "w", "b": {"name": "u", "permute": [0, 2]}}}]}, "no order of dimensions"),
        ({"rows": [{"names": {"a": "w", "b": {"name": "u", "concat": True}}}]}, "`concat` needs a single name and a `join`"),
        ({"rows": [{"names": {"a": "w", "b": {"name": "u", "offset": {"i": 1}}}}]}, "does not capture"),
        ({"rows": [{"names": {"a": "w", "b": ["u", "v"]}, "join": {"sizes": ["m", 1]}}]}, r"'m' reads \['m'\]"),
        ({"rows": [{"names": {"a": "w.*", "b": "u.*"}}, {"names": {"a": "w.x", "b": "v"}}]}, "rows 1 and 2 both know the name"),
        ({"ignore": {"c": []}}, "ignore or inherit name the families"),
        ({"extends": "no-such-map"}, "expected a ready map"),
    ],
)
def test_wrong_maps(changes: dict[str, Any], message: str) -> None:
    NameMap.from_dict(edited())
    with pytest.raises(SpecError, match=message):
        NameMap.from_dict(edited(**changes))


def test_wrong_tensors() -> None:
    m = NameMap.from_dict(edited())
    good = {"u.0": (2, 3), "v.0": (4, 3)}
    assert [t.shape for t in m.plan("b", "a", good, {"n": 2}).tensors] == [(6, 3)]
    for shapes, variables, message in (
        ({"u.0": (2, 3)}, {"n": 2}, r"v\.0 is missing, of which 'u\.0' is another part"),
        (good, {"n": 3}, r"'u\.0' has 2 rows along dimension 0, expected 3"),
        (good, {}, "variable 'n' has no value and no default"),
        (good, {"k": 1}, r"no variable \['k'\]"),
        (good, {"n": 0}, "expected a whole number from 1"),
        ({"u.0": (2, 3), "v.0": (4, 4)}, {"n": 2}, "differ outside dimension 0"),
        ({"u.0": (2, 3), "v.0": (4,)}, {"n": 2}, "cannot be joined along dimension 0"),
        ({"w.0": (6, 3)}, {"n": 2}, r"1 names have no row in family 'b': w\.0"),
    ):
        with pytest.raises(SpecError, match=message):
            m.plan("b", "a", shapes, variables)
    with pytest.raises(SpecError, match="no family 'c'"):
        m.plan("c", "a", good)
    with pytest.raises(SpecError, match="say which family"):
        m.family_of(["nobody"])


def test_a_stack_must_be_whole() -> None:
    m = NameMap.from_dict(edited(rows=[{"names": {"a": "w.{e}", "b": {"name": "w", "stack": "e"}}}]))
    assert [t.shape for t in m.plan("a", "b", {"w.0": (2,), "w.1": (2,)}).tensors] == [(2, 2)]
    with pytest.raises(SpecError, match=r"'w' is stacked of the elements \[0, 2\]"):
        m.plan("a", "b", {"w.0": (2,), "w.2": (2,)})
    with pytest.raises(SpecError, match="different shapes"):
        m.plan("a", "b", {"w.0": (2,), "w.1": (3,)})


def test_a_map_of_the_users_own(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("ucp_name_map: 1\nname: mine\nfamilies: [a, b]\nrows:\n  - names: {a: x, b: y}\n")
    assert NameMap.load(path).plan("a", "b", {"x": ()}).tensors[0].fqn == "y"
    with pytest.raises(SpecError, match="neither a ready name map"):
        NameMap.load("no-such-map")
