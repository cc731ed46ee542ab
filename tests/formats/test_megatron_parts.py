"""Parts of the legacy Megatron parser that the real files do not reach: other layouts, older names, forms of experts, broken files."""

from __future__ import annotations

import argparse
import enum
import os
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megatron_truth
import pytest
import torch
from format_helpers import torch_bytes

from ucp_dcp import Checkpoint, open_checkpoint
from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, UnsafePickleError, UnsupportedError
from ucp_dcp.formats import open_source
from ucp_dcp.formats.megatron.buffers import lay_out

WITH_BUFFERS = [n for n in megatron_truth.names() if next(Path(str(megatron_truth.find(n))).glob("golden"), None)]


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_buffers_are_laid_out_as_megatron_does(name: str) -> None:
    """Against the geometry of live buffers, several buckets and shared embeddings among them."""
    path = megatron_truth.find(name)
    assert path is not None
    checked = 0
    for file in sorted(path.glob("golden/rank_*.pt")):
        dump = torch.load(file, weights_only=True)
        for optimizer in dump["optim"]:
            for buffer in optimizer["gbuf"]:
                order = sorted(buffer["param_index_map"], key=lambda key: buffer["param_index_map"][key][0])
                ends = buffer["bucket_numel_unpadded"]
                alone = [bool(dump["param_attrs"][chunk][param].get("shared_embedding")) for chunk, param in order]
                size = min(ends[:-1]) if len(ends) > 1 and not any(alone) else None
                starts, total = lay_out([dump["params"][c][p].numel() for c, p in order], alone, size, 64)
                assert total == buffer["numel_unpadded"] == sum(ends)
                for key, start in zip(order, starts, strict=True):
                    first, _, bucket = buffer["param_index_map"][key]
                    assert start == sum(ends[:bucket]) + first - buffer["bucket_indices"][bucket][0], key
                    checked += 1
    assert checked or "tied_torch" in name or "plain" in name or "fp32" in name or name == "gpt_tp2pp2_tied_td"


def test_before_starts_were_aligned() -> None:
    assert lay_out([10, 7, 64], [False] * 3, None, 1) == ([0, 10, 17], 81)
    assert lay_out([10, 7, 64], [False] * 3, None, 64) == ([0, 64, 128], 192)


# ---- written by hand, in Megatron's form

HIDDEN, FFN, VOCAB = 8, 12, 10


class Writer:
    """A checkpoint as Megatron writes it, cut by hand from global tensors."""

    def __init__(self, root: Path, **args: Any) -> None:
        self.folder = root / "iter_0000003"
        self.args = {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "swiglu": True,
            "untie_embeddings_and_output_weights": True,
            "no_save_optim": True,
            **args,
        }
        root.mkdir(exist_ok=True)
        (root / "latest_checkpointed_iteration.txt").write_text("3")

    def rank(self, name: str, *models: dict[str, Any], **more: Any) -> None:
        keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
        value = {
            "args": argparse.Namespace(**self.args),
            "checkpoint_version": 3.0,
            "iteration": 3,
            **dict(zip(keys, models, strict=True)),
            **more,
        }
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / name / "model_optim_rng.pt").write_bytes(torch_bytes(value))


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def layers(count: int, first: int) -> dict[str, torch.Tensor]:
    return {f"decoder.layers.{i}.input_layernorm.weight": torch.full((4,), float(first + i)) for i in range(count)}


def held(checkpoint: Checkpoint) -> list[float]:
    return [float(checkpoint[f"model.decoder.layers.{i}.input_layernorm.weight"].read()[0]) for i in range(len(checkpoint))]


# A15: ten layers, the last stage has four of them, interleaved
@pytest.mark.parametrize(
    ("args", "chunks"),
    [
        ({"num_layers": 10, "decoder_last_pipeline_num_layers": 4}, [[3, 3], [2, 2]]),
        ({"num_layers": 8}, [[2, 2], [2, 2]]),
        ({"num_layers": 7, "account_for_embedding_in_pipeline_split": True}, [[1, 2], [2, 2]]),
        ({"num_layers": 5, "pipeline_model_parallel_layout": "Et|ttt|t|L"}, [[0, 3], [1, 1]]),
        ({"num_layers": 6}, [[2], [4]]),
    ],
)
def test_layers_are_counted_over_stages_and_chunks(tmp_path: Path, args: dict[str, Any], chunks: list[list[int]]) -> None:
    """``chunks[stage][chunk]``: how many layers it has. The batch goes through chunk 0 of all stages first."""
    writer = Writer(tmp_path, pipeline_model_parallel_size=2, **args)
    first: dict[tuple[int, int], int] = {}
    at = 0
    for c in range(len(chunks[0])):
        for stage, own in enumerate(chunks):
            first[stage, c] = at
            at += own[c]
    for stage, own in enumerate(chunks):
        writer.rank(f"mp_rank_00_{stage:03d}", *(layers(count, first[stage, c]) for c, count in enumerate(own)))
    assert held(open_checkpoint(tmp_path)) == [float(i) for i in range(at)]


# A17
def test_a_lost_layer_is_noticed(tmp_path: Path) -> None:
    writer = Writer(tmp_path, pipeline_model_parallel_size=2, num_layers=5)
    for stage in range(2):
        writer.rank(f"mp_rank_00_{stage:03d}", layers(2, 2 * stage))
    with pytest.raises(
        CorruptCheckpointError, match=r"num_layers is 5, but the files hold 4 layers \(stage 0 chunk 0: 2, stage 1 chunk 0: 2"
    ):
        open_checkpoint(tmp_path)


# A19, A21, A22, A23
def test_gate_and_up_fused_queries_and_padding(tmp_path: Path) -> None:
    whole = {
        "decoder.layers.0.mlp.linear_fc1.weight": numbers(2 * FFN, HIDDEN),
        "decoder.layers.0.self_attention.linear_qkv.weight": numbers(24, HIDDEN),
        "decoder.layers.0.mlp.linear_fc2.weight": numbers(HIDDEN, FFN),
        "decoder.layers.0.input_layernorm.weight": numbers(HIDDEN),
        "embedding.word_embeddings.weight": numbers(VOCAB, HIDDEN),
    }
    writer = Writer(tmp_path, tensor_model_parallel_size=4, make_vocab_size_divisible_by=4, vocab_size=VOCAB, padded_vocab_size=16)
    padded = torch.cat([whole["embedding.word_embeddings.weight"], torch.full((6, HIDDEN), -1.0)])
    for t in range(4):
        gate, up = whole["decoder.layers.0.mlp.linear_fc1.weight"].split(FFN)
        writer.rank(
            f"mp_rank_{t:02d}",
            {
                "embedding.word_embeddings.weight": padded.chunk(4)[t].clone(),
                "decoder.layers.0.mlp.linear_fc1.weight": torch.cat([gate.chunk(4)[t], up.chunk(4)[t]]),
                # eight heads, two groups, heads of two: rank 1 has two queries' rows and one of a key
                "decoder.layers.0.self_attention.linear_qkv.weight": whole["decoder.layers.0.self_attention.linear_qkv.weight"]
                .chunk(4)[t]
                .clone(),
                "decoder.layers.0.mlp.linear_fc2.weight": whole["decoder.layers.0.mlp.linear_fc2.weight"].chunk(4, 1)[t].contiguous(),
                "decoder.layers.0.input_layernorm.weight": whole["decoder.layers.0.input_layernorm.weight"],
            },
        )
    checkpoint = open_checkpoint(tmp_path)
    assert {key.removeprefix("model.") for key in checkpoint} == set(whole)
    for name, value in whole.items():
        assert torch.equal(checkpoint[f"model.{name}"].read(), value), name


def test_a_vocabulary_of_unknown_size_keeps_its_padding(tmp_path: Path) -> None:
    writer = Writer(tmp_path, padded_vocab_size=16)
    writer.rank("mp_rank_00", {"embedding.word_embeddings.weight": numbers(16, HIDDEN)})
    assert open_checkpoint(tmp_path)["model.embedding.word_embeddings.weight"].shape == (16, HIDDEN)


# A26
@pytest.mark.parametrize("form", ["grouped", "grouped_old", "sequential"])
def test_experts_of_every_form_have_one_name(tmp_path: Path, form: str) -> None:
    """Four experts over EP 2; Transformer Engine's grouped linear layers, GroupedMLP's two big matrices, one module per expert."""
    first = [numbers(2 * FFN, HIDDEN, start=1000 * e) for e in range(4)]
    second = [numbers(HIDDEN, FFN, start=1000 * e + 500) for e in range(4)]
    writer = Writer(tmp_path, expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=FFN)
    for ep in range(2):
        own = range(2 * ep, 2 * ep + 2)
        at = "decoder.layers.0.mlp.experts."
        if form == "grouped":
            model = {f"{at}linear_fc1.weight{m}": first[e] for m, e in enumerate(own)}
            model |= {f"{at}linear_fc2.weight{m}": second[e] for m, e in enumerate(own)}
        elif form == "sequential":
            model = {f"{at}local_experts.{m}.linear_fc1.weight": first[e] for m, e in enumerate(own)}
            model |= {f"{at}local_experts.{m}.linear_fc2.weight": second[e] for m, e in enumerate(own)}
        else:  # x @ weight1.view(experts, hidden, -1)[m], so each is the transpose of a linear layer's
            model = {
                f"{at}weight1": torch.stack([first[e].T for e in own]).reshape(HIDDEN, -1),
                f"{at}weight2": torch.stack([second[e].T for e in own]).reshape(-1, HIDDEN),
            }
        writer.rank(f"mp_rank_00_{ep:03d}", model)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint) == 8
    for e in range(4):
        name = f"model.decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc"
        assert torch.equal(checkpoint[f"{name}1.weight"].read(), first[e])
        assert torch.equal(checkpoint[f"{name}2.weight"].read(), second[e])


def test_names_from_before_megatron_core(tmp_path: Path) -> None:
    """Nested by module, in the old words."""
    writer = Writer(tmp_path, num_layers=1, swiglu=False)
    layer = "layers.0"
    model = {
        "language_model": {
            "embedding": {"word_embeddings": {"weight": numbers(4, 2)}, "position_embeddings": {"weight": numbers(3, 2)}},
            "encoder": {
                f"{layer}.input_norm.weight": numbers(2),
                f"{layer}.self_attention.query_key_value.weight": numbers(6, 2),
                f"{layer}.self_attention.dense.weight": numbers(2, 2),
                f"{layer}.post_attention_norm.weight": numbers(2),
                f"{layer}.mlp.dense_h_to_4h.weight": numbers(FFN, 2),
                f"{layer}.mlp.dense_4h_to_h.weight": numbers(2, FFN),
                "final_norm.weight": numbers(2),
            },
            "output_layer": {"weight": numbers(4, 2)},
        }
    }
    writer.rank("mp_rank_00", model)
    names = {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert {key.removeprefix("model.") for key in open_checkpoint(tmp_path)} == names


@pytest.mark.parametrize(("rows", "whole"), [(6, True), (3, False)])
def test_latent_attention_down_projections_by_their_size(tmp_path: Path, rows: int, whole: bool) -> None:
    """The same name is a copy with Transformer Engine and a shard with local layers."""
    value = numbers(6, HIDDEN)
    writer = Writer(tmp_path, tensor_model_parallel_size=2, q_lora_rank=6)
    for t in range(2):
        part = value if whole else value.chunk(2)[t].clone()
        writer.rank(f"mp_rank_{t:02d}", {"decoder.layers.0.self_attention.linear_q_down_proj.weight": part})
    name = "model.decoder.layers.0.self_attention.linear_q_down_proj.weight"
    assert torch.equal(open_checkpoint(tmp_path)[name].read(), value)


# ---- files that do not fit

Damage = Callable[[Path], None]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = torch.load(path, weights_only=False)  # made by this project's own scripts
    change(value)
    path.write_bytes(torch_bytes(value))


def rewrite(rank: str, change: Callable[[dict[str, Any]], None], file: str = "model_optim_rng.pt") -> Damage:
    return lambda folder: edit(folder / rank / file, change)


def drop(rank: str) -> Damage:
    return lambda folder: shutil.rmtree(folder / rank)


def unlink(rank: str, file: str) -> Damage:
    return lambda folder: (folder / rank / file).unlink()


def truncate(folder: Path) -> None:
    file = folder / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-2000])


def shorter_buffer(value: dict[Any, Any]) -> None:
    ((_, buffer),) = value[0].items()
    for key in ("param", "exp_avg", "exp_avg_sq"):
        buffer[key] = buffer[key][:-64].clone()
    buffer["numel_unpadded"] -= 64


def shorter_weight(value: dict[str, Any]) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    value["model"][name] = value["model"][name][:-1].clone()


def other_args(value: dict[str, Any]) -> None:
    value["args"].num_layers = 7


BAD: list[tuple[str, Damage, type[Exception], Sequence[str]]] = [
    ("s_llama_tp4kv2", drop("mp_rank_02"), CorruptCheckpointError, ["mp_rank_02/model_optim_rng.pt", "missing", "tensor parallel 4"]),
    ("s_llama_tp4kv2", unlink("mp_rank_01", "model_optim_rng.pt"), CorruptCheckpointError, ["mp_rank_01/model_optim_rng.pt", "missing"]),
    (
        "s_llama_tp4kv2",
        unlink("mp_rank_01", "distrib_optim.pt"),
        CorruptCheckpointError,
        ["mp_rank_01/distrib_optim.pt", "missing", "masters"],
    ),
    ("s_llama_tp4kv2", truncate, CorruptCheckpointError, ["mp_rank_00/model_optim_rng.pt", "expert tensor parallelism"]),
    (
        "s_llama_tp4kv2",
        rewrite("mp_rank_03", lambda v: v.update(iteration=4)),
        CorruptCheckpointError,
        ["mp_rank_03/model_optim_rng.pt", "iteration 4, but 2 in", "mp_rank_00/model_optim_rng.pt", "two saves"],
    ),
    ("s_llama_tp4kv2", rewrite("mp_rank_03", other_args), CorruptCheckpointError, ["mp_rank_03", "num_layers is 7, but 2", "two runs"]),
    (
        "s_llama_tp4kv2",
        rewrite("mp_rank_02", shorter_buffer, "distrib_optim.pt"),
        CorruptCheckpointError,
        ["mp_rank_02/distrib_optim.pt", "buffer 0", "'embedding.word_embeddings.weight' does not fit"],
    ),
    (
        "s_llama_tp4kv2",
        rewrite("mp_rank_02", shorter_weight),
        CorruptCheckpointError,
        ["mp_rank_02/model_optim_rng.pt", "decoder.layers.1.mlp.linear_fc2.weight", "[15, 4]", "[16, 4]"],
    ),
    (
        "s_llama_tp4kv2",
        rewrite("mp_rank_01", lambda v: v["model"].pop("decoder.layers.1.mlp.linear_fc2.weight")),
        CorruptCheckpointError,
        ["mp_rank_01/distrib_optim.pt", "buffer 0"],
    ),
    (
        "s_llama_tp4kv2",
        rewrite("mp_rank_01", lambda v: v["model"].update({"decoder.layers.1.mlp.extra.weight": torch.zeros(2, 2)})),
        UnsupportedError,
        ["mp_rank_01/model_optim_rng.pt", "decoder.layers.1.mlp.extra.weight", "tensor parallelism (4)"],
    ),
    ("s_llama_tp4kv2", rewrite("mp_rank_00", lambda v: v.pop("args")), CorruptCheckpointError, ["mp_rank_00", "args is NoneType"]),
    (
        "s_mixtral_pp2ep2_plain",
        rewrite("mp_rank_00_001_001", lambda v: v["optimizer"][0]["fp32_from_fp16_params"][0].pop()),
        CorruptCheckpointError,
        ["mp_rank_00_001_001/model_optim_rng.pt", "fp32_from_fp16_params of group 0"],
    ),
    (
        "s_mixtral_pp2ep2_plain",
        rewrite("mp_rank_00_000_000", lambda v: v["optimizer"][0]["optimizer"]["param_groups"][0]["params"].pop()),
        CorruptCheckpointError,
        ["mp_rank_00_000_000", "param group 0", "first without a number"],
    ),
]


@pytest.mark.parametrize(("name", "damage", "error", "parts"), BAD)
def test_damage_is_found_at_open(tmp_path: Path, name: str, damage: Damage, error: type[Exception], parts: Sequence[str]) -> None:
    source = megatron_truth.find(name)
    assert source is not None
    shutil.copytree(source, tmp_path / "c", ignore=shutil.ignore_patterns("golden"))
    open_checkpoint(tmp_path / "c")
    damage(tmp_path / "c" / "iter_0000002")
    with pytest.raises(error) as found:
        open_checkpoint(tmp_path / "c")
    for part in parts:
        assert part in str(found.value), str(found.value)


def test_experts_that_overwrote_each_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path, num_experts=2, expert_tensor_parallel_size=2, moe_ffn_hidden_size=FFN)
    writer.rank("mp_rank_00", {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": numbers(FFN, HIDDEN)})
    with pytest.raises(
        UnsupportedError, match=r"mp_rank_00: expert tensor parallel 2 with tensor parallel 1.*wrote this file over each other"
    ):
        open_checkpoint(tmp_path)


def test_the_real_file_that_two_ranks_wrote() -> None:
    found = megatron_truth.find("g1_etp2_torch")
    if found is None:
        pytest.skip("UCP_DCP_EXTRA_DATA names no folder with g1_etp2_torch")
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_00/model_optim_rng.pt: .*several ranks wrote this file"):
        open_checkpoint(found)


def test_which_iteration(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.rank("mp_rank_00", layers(1, 0))
    shutil.copytree(writer.folder, tmp_path / "iter_0000005")
    assert len(open_checkpoint(tmp_path)) == 1
    with pytest.raises(CheckpointNotFoundError, match=r"'iter_0000009' is not here; .*iter_0000003, iter_0000005"):
        open_source(tmp_path, tag="9")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointNotFoundError, match=r"names 'iter_0000007', which is not there; .*iter_0000003"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(FormatError, match=r"several iterations.*tag='iter_0000003' or 'iter_0000005'"):
        open_checkpoint(tmp_path)


def set_in(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        for key in path[:-1]:
            root = vars(root)[key] if isinstance(root, argparse.Namespace) else root[key]
        if isinstance(root, argparse.Namespace):
            setattr(root, path[-1], value)
        else:
            root[path[-1]] = value

    return change


MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
ODD: list[tuple[str, Callable[[Any], None]]] = [
    (MODEL, set_in("args", "tensor_model_parallel_size", value=value)) for value in ("4", -4, 2**40, 1.5, [4])
]
ODD += [(MODEL, set_in("args", "context_parallel_size", value=2**62)), (MODEL, set_in("args", "pipeline_model_parallel_size", value=2))]
ODD += [(MODEL, set_in("model", value=value)) for value in (None, 5, [], {3: torch.zeros(2)})]
ODD += [(MODEL, set_in("model7", value={})), (MODEL, set_in("checkpoint_version", value="x")), (MODEL, set_in("iteration", value="x"))]
ODD += [(MODEL, set_in("optimizer", value=value)) for value in (5, [5], {}, {"optimizer": 1}, {"optimizer": {"param_groups": [1]}}, [])]
ODD += [(MODEL, set_in("model", "output_layer.weight", value=value)) for value in (torch.zeros(()), torch.zeros(3, 0), torch.zeros(7, 16))]
ODD += [(OPTIMIZER, set_in(0, value=value)) for value in (5, {}, {1: {}, 2: {}}, {(torch.bfloat16, torch.float32): {"param": 1}})]
ODD += [(OPTIMIZER, set_in("buckets_coalesced", value=False)), (OPTIMIZER, set_in(7, value={})), (OPTIMIZER, set_in("x", value=1))]


@pytest.mark.parametrize("case", range(len(ODD)))
def test_odd_values_are_errors_of_ours(tmp_path: Path, case: int) -> None:
    source = megatron_truth.find("s_llama_tp4kv2")
    assert source is not None
    shutil.copytree(source, tmp_path / "c", ignore=shutil.ignore_patterns("golden"))
    file, change = ODD[case]
    rewrite("mp_rank_00", change, file)(tmp_path / "c" / "iter_0000002")
    with pytest.raises((FormatError, UnsupportedError), match="mp_rank_0"):
        open_checkpoint(tmp_path / "c")


class Attack:
    """Runs when it is unpickled without restriction."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("where", ["args", "rng_state"])
def test_nothing_is_run(tmp_path: Path, where: str) -> None:
    writer = Writer(tmp_path / "c")
    marker = tmp_path / "ran"
    if where == "args":
        writer.args["hook"] = Attack(marker)
        writer.rank("mp_rank_00", layers(1, 0))
    else:
        writer.rank("mp_rank_00", layers(1, 0), rng_state=[Attack(marker)])
    with pytest.raises(UnsafePickleError, match=r"mp_rank_00/model_optim_rng.pt: the pickle calls posix.system.*nothing was run"):
        open_checkpoint(tmp_path / "c")
    assert not marker.exists()


def test_classes_of_megatron_are_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums and objects in ``args``, of modules that are not there when the checkpoint is opened."""
    module = types.ModuleType("megatron.core.transformer.enums")
    backend = enum.Enum("AttnBackend", {"flash": 1, "fused": 2}, module=module.__name__)
    other = types.ModuleType("megatron.core.transformer.layout")
    thing = type("Layout", (), {"__module__": other.__name__})
    module.AttnBackend, other.Layout = backend, thing  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name in ("megatron", "megatron.core", "megatron.core.transformer"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        patch.setitem(sys.modules, other.__name__, other)
        writer = Writer(tmp_path, attention_backend=backend.fused, pipeline_model_parallel_layout=thing(), params_dtype=torch.bfloat16)
        writer.rank("mp_rank_00", layers(1, 0))
    args = open_checkpoint(tmp_path).objects["args"]
    assert args["attention_backend"] == 2 and args["params_dtype"] == "bfloat16"
    assert args["pipeline_model_parallel_layout"] == "<Stub>" and module.__name__ not in sys.modules
