"""megatron-core's torch_dist checkpoints against what the live run held: whole tensors, slices, and the rest of the state.

The small ones that differ in kind are in ``tests/data/megatron``; ``UCP_DCP_EXTRA_DATA`` may name a folder with more. Golden tensors come
from per-rank dumps of live objects (``megatron_truth``), never from a checkpoint.
"""

from __future__ import annotations

from functools import cache

import megatron_truth
import pytest
import torch

import ucp_dcp
from ucp_dcp import open_checkpoint
from ucp_dcp.formats.megatron_core import MegatronSource
from ucp_dcp.names import Role

BROKEN = "e2_mb_dp3"
NAMES = [name for name in megatron_truth.names() if next(megatron_truth.find(name).rglob(".metadata"), None)]
GOOD = [name for name in NAMES if name != BROKEN]


def stored_name(name: str) -> str:
    """torch_dist names norms as Transformer Engine does, whichever modules the run had."""
    return name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
        ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
    )


@cache
def golden(name: str) -> dict[str, torch.Tensor]:
    path = megatron_truth.find(name)
    assert path is not None
    return {stored_name(key): value for key, value in megatron_truth.truth(path).canonical().items()}


def test_there_is_a_checkpoint_of_every_kind() -> None:
    assert {"old014_fsms", "old0161_fr", "e2_mb_dp3_dpr", "f4_tied_unpadded", BROKEN} <= set(NAMES)


@pytest.mark.parametrize("name", GOOD)
def test_every_tensor_is_what_the_run_held(name: str) -> None:
    checkpoint = open_checkpoint(megatron_truth.find(name))
    assert isinstance(checkpoint.source, MegatronSource)
    expected = golden(name)
    assert set(checkpoint) == set(expected)
    for key, value in expected.items():
        found = checkpoint[key].read()
        assert found.dtype == value.dtype and torch.equal(found, value), key


@pytest.mark.parametrize("name", GOOD)
def test_slices(name: str) -> None:
    checkpoint = open_checkpoint(megatron_truth.find(name))
    for key, value in golden(name).items():
        index = tuple(slice(n // 3, n - n // 5, 1 + d) for d, n in enumerate(value.shape))
        assert torch.equal(checkpoint[key][index], value[index]), key


@pytest.mark.parametrize("name", GOOD)
def test_steps_and_groups(name: str) -> None:
    checkpoint = open_checkpoint(megatron_truth.find(name))
    path = megatron_truth.find(name)
    assert path is not None
    steps = megatron_truth.truth(path).steps
    assert steps
    for fqn, step in steps.items():
        if fqn not in megatron_truth.TIED:
            assert checkpoint.objects[f"optim.state.{stored_name(fqn)}.step"] == step
    grouped = [fqn for key in checkpoint.objects if key.endswith(".params") for fqn in checkpoint.objects[key]]
    masters = [checkpoint[key].fqn for key in checkpoint if checkpoint[key].role == Role.MASTER]
    assert sorted(grouped) == sorted(masters)
    for key in checkpoint.objects:
        if key.endswith(".params"):
            decay = checkpoint.objects[key.replace(".params", ".wd_mult")]
            for fqn in checkpoint.objects[key]:
                assert (decay == 0) == (len(checkpoint[f"model.{fqn}"].shape) == 1), fqn
    assert checkpoint.objects["iteration"] == 2 == checkpoint.provenance["iteration"]


@pytest.mark.parametrize(("name", "generation"), [("old014_fsms", "D1"), ("old0161_fr", "D3"), ("e2_mb_dp3_dpr", "D4")])
def test_generations(name: str, generation: str) -> None:
    assert open_checkpoint(megatron_truth.find(name)).provenance["generation"] == generation


def test_stock_view() -> None:
    """The same files as the DCP checkpoint that they are, with stacked tensors under Megatron's keys."""
    path = megatron_truth.find("old014_fsms")
    assert path is not None
    stock = open_checkpoint(path, prefer="stock")
    assert stock.format == "dcp"
    whole = torch.stack([golden("old014_fsms")[f"model.decoder.layers.{i}.self_attention.linear_qkv.weight"] for i in range(2)])
    assert torch.equal(stock["decoder.layers.self_attention.linear_qkv.weight"].read(), whole)


def test_iteration_folder_and_the_one_above() -> None:
    path = megatron_truth.find("f4_tied_unpadded")
    assert path is not None
    above, inside = open_checkpoint(path), open_checkpoint(path / "iter_0000002")
    assert set(above) == set(inside)
    key = "optim.state.embedding.word_embeddings.weight.exp_avg"
    assert torch.equal(above[key].read(), inside[key].read())


def test_under_hugging_face_names() -> None:
    """A name map on top: q, k and v come out of the fused tensor; masters and moments follow."""
    names = ucp_dcp.MappedNames("llama", to="huggingface", variables={"heads": 4, "kv_heads": 2})
    checkpoint = open_checkpoint(megatron_truth.find("old0161_fr"), names=names)
    fused = golden("old0161_fr")["optim.state.decoder.layers.1.self_attention.linear_qkv.weight.exp_avg"].reshape(2, 4, 4, 16)
    assert torch.equal(checkpoint["optim.state.model.layers.1.self_attn.k_proj.weight.exp_avg"].read(), fused[:, 2].reshape(8, 16))
    assert torch.equal(checkpoint["optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg"].read(), fused[:, :2].reshape(16, 16))
    gate_up = golden("old0161_fr")["model.decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(checkpoint["model.model.layers.0.mlp.up_proj.weight"].read(), gate_up[24:])
    assert checkpoint.source.doubt
