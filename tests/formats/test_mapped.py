"""A checkpoint under the names of another model family: values against numpy reshapes, bytes counted, onto meshes, of several formats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting_store import CountingStore
from meshes import fresh_meshes
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ucp_dcp
from ucp_dcp.errors import CorruptCheckpointError, MissingKeysError, SpecError
from ucp_dcp.formats import MappedNames
from ucp_dcp.storage.local import LocalStore

HEADS, KV, HEAD_DIM, FFN, HIDDEN, VOCAB = 4, 2, 4, 5, 16, 12
TO_HF = MappedNames("llama", "huggingface", variables={"heads": HEADS, "kv_heads": KV})
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "decoder.layers.0.input_layernorm.weight": (HIDDEN,),
        QKV: ((HEADS + 2 * KV) * HEAD_DIM, HIDDEN),
        FC1: (2 * FFN, HIDDEN),
    }
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def state(step: float = 3.0) -> dict[str, Any]:
    model = weights()
    moments = {name: {"exp_avg": w * 2, "master": w.double(), "step": torch.tensor(step)} for name, w in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


ROOTS = {"model": "model", "optimizer": "optimizer"}


def parts(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a linear_qkv."""
    groups = w.reshape(KV, HEADS // KV + 2, HEAD_DIM, HIDDEN)
    return groups[:, :-2].reshape(-1, HIDDEN), groups[:, -2].reshape(-1, HIDDEN), groups[:, -1].reshape(-1, HIDDEN)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ucp_dcp.save(state(), tmp_path / "c", roots=ROOTS, no_dist=True)
    return tmp_path / "c"


def test_weights_and_state_follow(saved: Path) -> None:
    w = weights()
    checkpoint = ucp_dcp.open_checkpoint(saved, names=TO_HF, verify="strict")
    q, k, v = parts(w[QKV])
    at = "layers.0.self_attn"
    for name, value in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        assert torch.equal(checkpoint[f"model.model.{at}.{name}.weight"].read(), value)
        assert torch.equal(checkpoint[f"optim.state.model.{at}.{name}.weight.exp_avg"].read(), value * 2)
        assert torch.equal(checkpoint[f"optim.state.model.{at}.{name}.weight.master"].read(), value.double())
        assert checkpoint[f"optim.state.model.{at}.{name}.weight.step"].read() == 3.0
    assert torch.equal(checkpoint["model.model.layers.0.mlp.up_proj.weight"][1:3, 2], w[FC1][FFN + 1 : FFN + 3, 2])
    assert torch.equal(checkpoint["model.model.embed_tokens.weight"].read(), w["embedding.word_embeddings.weight"])
    assert checkpoint.stats.bytes_unverified == 0
    with pytest.raises(MissingKeysError):
        checkpoint[f"model.{QKV}"]


def test_there_and_back_reads_the_same_bytes(saved: Path) -> None:
    """Two views on top of each other; fused steps that agree are one step."""
    view = ucp_dcp.open_checkpoint(saved, names=TO_HF).under(MappedNames("llama", "megatron", variables={"heads": HEADS, "kv_heads": KV}))
    plain = ucp_dcp.open_checkpoint(saved)
    assert sorted(n for n in view if n.startswith(("model.", "optim."))) == sorted(plain)
    for name in plain:
        assert torch.equal(view[name].read(), plain[name].read()), name
    assert view.stats.bytes_wanted == plain.stats.bytes_wanted


def test_a_slice_costs_its_own_bytes(saved: Path) -> None:
    store = CountingStore(LocalStore(saved))
    checkpoint = ucp_dcp.open_checkpoint(store, names=TO_HF, verify="off")
    row = checkpoint["model.model.layers.0.self_attn.k_proj.weight"]
    row[0]
    assert checkpoint.stats.bytes_read == HIDDEN * 4


def test_steps_that_differ_cannot_become_one(tmp_path: Path) -> None:
    q, k, v = parts(weights()[QKV])
    at = "model.layers.0.self_attn"
    model = {f"{at}.q_proj.weight": q, f"{at}.k_proj.weight": k, f"{at}.v_proj.weight": v}
    for same in (True, False):
        steps = dict(zip(model, (1.0, 1.0 if same else 2.0, 1.0), strict=True))
        optimizer = {"state": {name: {"step": torch.tensor(steps[name]), "exp_avg": w + 1} for name, w in model.items()}}
        ucp_dcp.save({"model": model, "optimizer": optimizer}, tmp_path / "c", roots=ROOTS, no_dist=True)
        fused = ucp_dcp.open_checkpoint(tmp_path / "c", names=MappedNames("llama", "megatron", variables={"heads": HEADS, "kv_heads": KV}))
        if same:
            assert fused[f"optim.state.{QKV}.step"].read() == 1.0
            assert torch.equal(fused[f"optim.state.{QKV}.exp_avg"].read(), weights()[QKV] + 1)
        else:
            with pytest.raises(SpecError, match=r"become one differ in a state that is one number: .*q_proj.weight.step"):
                fused[f"optim.state.{QKV}.step"].read()


def test_state_of_another_shape_is_left_out_of_what_is_split(tmp_path: Path) -> None:
    """A factored state of a fused parameter has no parts; that of a tensor that is only renamed goes along."""
    saved = state()
    for name, own in saved["optimizer"]["state"].items():
        own["row"] = torch.ones(weights()[name].shape[0])
    ucp_dcp.save(saved, tmp_path / "c", roots=ROOTS, no_dist=True)
    view = ucp_dcp.open_checkpoint(tmp_path / "c", names=TO_HF)
    assert "optim.state.model.embed_tokens.weight.row" in view
    assert view.source.left_out == (f"optim.state.{FC1}.row", f"optim.state.{QKV}.row")


def test_stock_checkpoints_need_a_root(tmp_path: Path) -> None:
    """Places of a stock checkpoint are found when they are needed; the items lie transposed and strided as DCP stored them."""
    w = weights()
    stored = {**w, FC1: w[FC1].T.contiguous().T}
    dcp.save({"net": stored, "other": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(SpecError, match=r"say below which prefix the weights are \(root=\)"):
        ucp_dcp.open_checkpoint(tmp_path / "c", names=TO_HF)
    view = ucp_dcp.open_checkpoint(
        tmp_path / "c", names=MappedNames("llama", "huggingface", variables={"heads": HEADS, "kv_heads": KV}, root="net")
    )
    assert torch.equal(view["model.model.layers.0.self_attn.v_proj.weight"].read(), parts(w[QKV])[2])
    assert torch.equal(view["model.model.layers.0.mlp.gate_proj.weight"][1:, 3:7], w[FC1][1:FFN, 3:7])
    assert view.source.left_out == ("other",)


def test_errors(saved: Path) -> None:
    with pytest.raises(SpecError, match="variable 'heads' has no value"):
        ucp_dcp.open_checkpoint(saved, names=MappedNames("llama", "huggingface"))
    with pytest.raises(SpecError, match="no family 'jax'"):
        ucp_dcp.open_checkpoint(saved, names=MappedNames("llama", "jax"))
    with pytest.raises(SpecError, match="rows, but there are 32 rows; check the variables"):
        ucp_dcp.open_checkpoint(saved, names=MappedNames("llama", "huggingface", variables={"heads": 5, "kv_heads": 1}))


def save_sharded(rank: int, world: int, folder: str) -> None:
    with fresh_meshes():
        mesh = init_device_mesh("cpu", (world,))
        model = {name: distribute_tensor(w, mesh, [Shard(0)]) for name, w in weights().items()}
        optimizer = {"state": {name: {"exp_avg": distribute_tensor(w * 2, mesh, [Shard(w.ndim - 1)])} for name, w in weights().items()}}
        ucp_dcp.save({"model": model, "optimizer": optimizer}, folder, roots=ROOTS)


def load_elsewhere(rank: int, world: int, folder: str) -> list[str]:
    """Under Hugging Face's names, on a 2-D mesh, with q, k and v of their own."""
    wanted: dict[str, torch.Tensor] = dict(zip("qkv", parts(weights()[QKV]), strict=True))
    with fresh_meshes():
        mesh = init_device_mesh("cpu", (2, world // 2))
        placements = [Shard(1), Shard(0)]
        model = {
            f"model.layers.0.self_attn.{part}_proj.weight": distribute_tensor(torch.zeros_like(w), mesh, placements)
            for part, w in wanted.items()
        }
        moments = {name: {"exp_avg": torch.zeros(w.shape)} for name, w in model.items()}
        full = {"model": model, "optimizer": {"state": moments}}
        ucp_dcp.load(full, folder, roots=ROOTS, names=TO_HF)
        wrong = []
        for part, w in wanted.items():
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            if not torch.equal(model[name].full_tensor(), w):
                wrong.append(name)
            if not torch.equal(moments[name]["exp_avg"], w * 2):
                wrong.append(f"{name}.exp_avg")
        dist.barrier()
    return wrong


def test_onto_a_mesh(ranks: Any, tmp_path: Path) -> None:
    ranks.run(3, save_sharded, str(tmp_path / "c"))
    assert ranks.run(4, load_elsewhere, str(tmp_path / "c")) == [[]] * 4


def test_hyperparameters_follow_the_names(tmp_path: Path) -> None:
    """What belonged to linear_qkv belongs to q, k and v, and groups whose parameters became others are found by the new names."""
    full = state()
    full["optimizer"]["param_groups"] = [{"lr": 0.1, "params": [QKV]}, {"lr": 0.2, "params": [n for n in full["model"] if n != QKV]}]
    ucp_dcp.save(full, tmp_path / "c", roots=ROOTS, no_dist=True)
    at = "model.layers.0"
    names = [f"{at}.self_attn.{part}_proj.weight" for part in "qkv"]
    groups = [{"lr": 0.0, "params": [f"{at}.mlp.up_proj.weight"]}, {"lr": 0.0, "params": names}]
    wanted = {"optimizer": {"state": {}, "param_groups": groups}}
    ucp_dcp.load(wanted, tmp_path / "c", roots=ROOTS, names=TO_HF, no_dist=True)
    assert [group["lr"] for group in wanted["optimizer"]["param_groups"]] == [0.2, 0.1]


def test_a_hugging_face_folder_tells_its_heads(tmp_path: Path) -> None:
    """A real LLaMA folder, as transformers lays it out, under Megatron's names; ``config.json`` gives the numbers."""
    q, k, v = parts(weights()[QKV])
    at = "model.layers.0.self_attn"
    save_file({f"{at}.{n}_proj.weight": t.contiguous() for n, t in zip("qkv", (q, k, v), strict=True)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"}')
    view = ucp_dcp.open_checkpoint(tmp_path, names=MappedNames("llama", "megatron"))
    assert torch.equal(view[f"model.{QKV}"].read(), weights()[QKV])
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is list, expected an object"):
        ucp_dcp.open_checkpoint(tmp_path, names=MappedNames("llama", "megatron"))


def test_real_megatron_files(tmp_path: Path) -> None:
    """One job as legacy files and as torch_dist, under Hugging Face's names: the same tensors, state and steps; args tell the heads."""
    root = os.environ.get("UCP_DCP_EXTRA_DATA")
    if root is None:
        pytest.skip("UCP_DCP_EXTRA_DATA names no folder of checkpoints")
    names = MappedNames("llama", "huggingface")
    views = [
        ucp_dcp.open_checkpoint(Path(root) / "megatron" / name, names=names)
        for name in ("llama_tp2pp2dp2_torch", "llama_tp2pp2dp2_fr", "llama_tp2pp2dp2_dp")
    ]
    tensors = [n for n in views[0] if not n.endswith(".step")]
    assert len(tensors) > 100
    for name in tensors:
        first, *others = (view[name].read() for view in views)
        assert all(torch.equal(first, other) for other in others), name
    step = "optim.state.model.layers.3.self_attn.k_proj.weight.step"
    assert views[0].objects[step] == 2.0
