"""Real Hugging Face model classes load our export of a Megatron-layout model, and give its logits; and the other way round.

``make test-frameworks`` installs transformers; without it these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ucp_dcp
from ucp_dcp.export import export_safetensors
from ucp_dcp.formats import MappedNames
from ucp_dcp.layout import Layout
from ucp_dcp.spec import LayoutSpec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.frameworks

HEADS, KV, HIDDEN, FFN, LAYERS, VOCAB, EXPERTS = 4, 2, 16, 24, 2, 32, 4
HEAD_DIM = HIDDEN // HEADS
EPS, BASE = 1e-5, 10000.0


def megatron(experts: int) -> dict[str, Tensor]:
    """Weights of a whole model under megatron-core's names."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "output_layer.weight": (VOCAB, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"decoder.layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.pre_mlp_layernorm.weight": (HIDDEN,)}
        shapes[f"{at}.self_attention.linear_qkv.weight"] = ((HEADS + 2 * KV) * HEAD_DIM, HIDDEN)
        shapes[f"{at}.self_attention.linear_proj.weight"] = (HIDDEN, HIDDEN)
        if experts:
            shapes[f"{at}.mlp.router.weight"] = (experts, HIDDEN)
        for mlp in [f"{at}.mlp.experts.local_experts.{e}" for e in range(experts)] or [f"{at}.mlp"]:
            shapes |= {f"{mlp}.linear_fc1.weight": (2 * FFN, HIDDEN), f"{mlp}.linear_fc2.weight": (HIDDEN, FFN)}
    return {name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotary(x: Tensor) -> Tensor:
    """(sequence, heads, head_dim), halves of a head rotated."""
    angles = torch.arange(len(x))[:, None] * BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def gated(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = (x @ fc1.T).chunk(2, -1)
    return (functional.silu(gate) * up) @ fc2.T


def logits(w: dict[str, Tensor], tokens: Tensor, experts: int) -> Tensor:
    """What Megatron computes with fused weights: for each query group its queries, its key, its value; [gate; up]."""
    x = w["embedding.word_embeddings.weight"][tokens]
    n = len(tokens)
    for i in range(LAYERS):
        at = f"decoder.layers.{i}"
        h = norm(x, w[f"{at}.input_layernorm.weight"])
        qkv = (h @ w[f"{at}.self_attention.linear_qkv.weight"].T).reshape(n, KV, HEADS // KV + 2, HEAD_DIM)
        q, k, v = qkv[:, :, :-2].reshape(n, HEADS, HEAD_DIM), qkv[:, :, -2], qkv[:, :, -1]
        q, k = rotary(q).transpose(0, 1), rotary(k).transpose(0, 1).repeat_interleave(HEADS // KV, 0)
        v = v.transpose(0, 1).repeat_interleave(HEADS // KV, 0)
        mask = torch.full((n, n), float("-inf")).triu(1)
        attention = ((q @ k.transpose(1, 2)) / HEAD_DIM**0.5 + mask).softmax(-1) @ v
        x = x + attention.transpose(0, 1).reshape(n, HIDDEN) @ w[f"{at}.self_attention.linear_proj.weight"].T
        h = norm(x, w[f"{at}.pre_mlp_layernorm.weight"])
        if not experts:
            x = x + gated(h, w[f"{at}.mlp.linear_fc1.weight"], w[f"{at}.mlp.linear_fc2.weight"])
            continue
        value, chosen = (h @ w[f"{at}.mlp.router.weight"].T).softmax(-1).topk(2, -1)
        value = value / value.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for e in range(experts):
            local = f"{at}.mlp.experts.local_experts.{e}"
            share = (value * (chosen == e)).sum(-1, keepdim=True)
            out = out + share * gated(h, w[f"{local}.linear_fc1.weight"], w[f"{local}.linear_fc2.weight"])
        x = x + out
    return norm(x, w["decoder.final_layernorm.weight"]) @ w["output_layer.weight"].T


def configured(experts: int) -> Any:
    common = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "rms_norm_eps": EPS, "tie_word_embeddings": False, "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
    }  # fmt: skip
    if experts:
        return transformers.MixtralConfig(num_local_experts=experts, num_experts_per_tok=2, sliding_window=None, **common)
    return transformers.LlamaConfig(**common)


@pytest.mark.parametrize("experts", [0, EXPERTS], ids=["llama", "mixtral"])
def test_a_model_class_loads_the_export(tmp_path: Path, experts: int) -> None:
    w, config, name = megatron(experts), configured(experts), "mixtral" if experts else "llama"
    ucp_dcp.save({"model": w}, tmp_path / "c", roots={"model": "model"}, no_dist=True)
    names = MappedNames(name, "huggingface", variables={"heads": HEADS, "kv_heads": KV})
    export_safetensors(tmp_path / "c", tmp_path / "hf", names=names, shard_size=4000, config=config.to_dict())
    kind = transformers.MixtralForCausalLM if experts else transformers.LlamaForCausalLM
    model, about = kind.from_pretrained(tmp_path / "hf", config=config, output_loading_info=True, dtype=torch.float32)
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    tokens = torch.tensor([3, 1, 30, 7, 7, 12])
    with torch.no_grad():
        found = model.eval()(tokens[None]).logits[0]
    torch.testing.assert_close(found, logits(w, tokens, experts), rtol=1e-4, atol=1e-4)

    # and back: what the class itself saves goes into a Megatron layout with one load
    model.save_pretrained(tmp_path / "theirs")
    into = {key: torch.full_like(value, -1.0) for key, value in w.items()}
    ucp_dcp.load({"model": into}, tmp_path / "theirs", roots={"model": "model"}, names=MappedNames(name, "megatron"), no_dist=True)
    assert all(torch.equal(into[key], value) for key, value in w.items())


def test_straight_into_a_tensor_parallel_rank(tmp_path: Path) -> None:
    """Hugging Face weights -> the local shards of rank 1 of TP 2, with no copy of the model in between."""
    w, config = megatron(0), configured(0)
    ucp_dcp.save({"model": w}, tmp_path / "c", roots={"model": "model"}, no_dist=True)
    names = MappedNames("llama", "huggingface", variables={"heads": HEADS, "kv_heads": KV})
    export_safetensors(tmp_path / "c", tmp_path / "hf", names=names, config=config.to_dict())
    variables = {"vocab": VOCAB, "vocab_multiple": 1, "ffn": FFN, "swiglu": True, "layer_offset": 0}
    layout = Layout(
        LayoutSpec.load("megatron-gpt"),
        coords={"pp": (0, 1), "tp": (1, 2), "dp": (0, 1)},
        roots={"model": "model"},
        variables=variables,
    )
    qkv, fc1 = w["decoder.layers.1.self_attention.linear_qkv.weight"], w["decoder.layers.1.mlp.linear_fc1.weight"]
    local = {
        "decoder.layers.1.self_attention.linear_qkv.weight": torch.zeros(len(qkv) // 2, HIDDEN),
        "decoder.layers.1.mlp.linear_fc1.weight": torch.zeros(FFN, HIDDEN),
    }
    ucp_dcp.load({"model": local}, tmp_path / "hf", layout=layout, names=MappedNames("llama", "megatron"), no_dist=True)
    assert torch.equal(local["decoder.layers.1.self_attention.linear_qkv.weight"], qkv[len(qkv) // 2 :])
    half = FFN // 2
    wanted = torch.cat((fc1[half:FFN], fc1[FFN + half :]))
    assert torch.equal(local["decoder.layers.1.mlp.linear_fc1.weight"], wanted)
