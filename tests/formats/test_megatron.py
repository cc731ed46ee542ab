"""Megatron's legacy checkpoints against what the live runs held: every tensor, slices, param groups, steps, objects, on meshes.

Small ones that differ in kind are in ``tests/data/megatron``; ``UCP_DCP_EXTRA_DATA`` may name a folder with more. Golden tensors come from
per-rank dumps of live objects (``megatron_truth``), never from a checkpoint.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import megatron_truth
import numpy as np
import pytest
import torch
from ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ucp_dcp
from ucp_dcp import Checkpoint, open_checkpoint
from ucp_dcp.formats import open_source
from ucp_dcp.names import Role

BROKEN = "g1_etp2_torch"
NAMES = [n for n in megatron_truth.names() if n != BROKEN and next(Path(str(megatron_truth.find(n))).glob("iter_*/mp_rank_*"), None)]
TIED_OUTPUT = "output_layer.weight"


def path(name: str) -> Path:
    found = megatron_truth.find(name)
    assert found is not None, name
    return found


@cache
def golden(name: str) -> dict[str, torch.Tensor]:
    found = megatron_truth.truth(path(name)).canonical()
    if name.endswith("_fp32"):  # without 16-bit weights the weights are their own masters, stored once
        found = {key: value for key, value in found.items() if not key.endswith(".master")}
    return found


@cache
def opened(name: str) -> Checkpoint:
    return open_checkpoint(path(name))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_there_is_a_checkpoint_of_every_kind() -> None:
    kinds = {
        "s_llama_tp4kv2",
        "s_mixtral_tp2ep2etp2",
        "s_mixtral_pp2ep2_plain",
        "s_gpt_pp2_tied_fp32",
        "llama_tp2pp2vpp2_torch",
        "s_gpt_tp2pp2vpp2_tied",
    }
    assert kinds <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor(name: str) -> None:
    checkpoint = opened(name)
    assert checkpoint.format == "megatron"
    for key, value in golden(name).items():
        assert same(checkpoint[key].read(), value), key
    beyond = {key for key in checkpoint if key not in golden(name) and not key.endswith(".step")}
    assert beyond == ({f"model.{TIED_OUTPUT}"} if megatron_truth.truth(path(name)).tied else set())


@pytest.mark.parametrize("name", NAMES)
def test_tied_output_layer(name: str) -> None:
    """Its own weight is there under its name; its optimizer state is that of the embedding, once."""
    held = megatron_truth.truth(path(name))
    for output, embedding in held.tied.items():
        assert same(opened(name)[f"model.{output}"].read(), held.weights[output])
        assert same(opened(name)[f"model.{output}"].read(), opened(name)[f"model.{embedding}"].read())
        assert f"optim.state.{output}.exp_avg" not in opened(name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("s_llama_tp4kv2", "s_mixtral_tp2ep2etp2") else pytest.mark.slow) for n in NAMES]
)
def test_slices(name: str) -> None:
    rng = np.random.default_rng(0)
    for key, value in golden(name).items():
        index = tuple(slice(int(a), int(rng.integers(a, n)) + 1) for n in value.shape for a in [rng.integers(0, n)])
        assert same(opened(name)[key][index], value[index]), (key, index)


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_groups(name: str) -> None:
    checkpoint, held = opened(name), megatron_truth.truth(path(name))
    stepped = {fqn for fqn in held.states if fqn not in held.tied}
    for fqn in stepped:
        step = f"optim.state.{fqn}.step"
        assert float(checkpoint[step].read() if step in checkpoint else checkpoint.objects[step]) == held.steps[fqn] == 2.0
    grouped = [fqn for key in checkpoint.objects if key.endswith(".params") for fqn in checkpoint.objects[key]]
    assert sorted(grouped) == sorted(stepped)
    for key in checkpoint.objects:
        if key.endswith(".params"):
            decay = checkpoint.objects[key.replace(".params", ".wd_mult")]
            for fqn in checkpoint.objects[key]:
                assert (decay == 0) == (len(checkpoint[f"model.{fqn}"].shape) == 1), fqn


@pytest.mark.parametrize("name", NAMES)
def test_masters_are_the_weights(name: str) -> None:
    """Independent of the golden tensors: both copies are in the checkpoint."""
    report = opened(name).check()
    assert report.ok
    if "fp32" not in name:
        assert report.counts["consistent"] >= 10
        assert all("constant" in p.reason or p.name == TIED_OUTPUT for p in report.parameters if p.outcome == "unproven")


@pytest.mark.parametrize("name", NAMES)
def test_objects(name: str) -> None:
    objects = opened(name).objects
    assert objects["iteration"] == 2 == opened(name).provenance["iteration"]
    assert objects["args"]["num_layers"] == opened(name).provenance["args"]["num_layers"]
    assert objects["args"]["params_dtype"] in ("bfloat16", "float32")
    assert objects["opt_param_scheduler"]["num_steps"] == 2
    found = 0
    for folder in sorted(path(name).glob("iter_*/mp_rank_*")):
        stored = torch.load(folder / "model_optim_rng.pt", weights_only=False)["rng_state"][0]  # made by this project's own scripts
        (state,) = objects[f"rng_state/{folder.name}"]
        assert torch.equal(state["torch_rng_state"], stored["torch_rng_state"]) and state["random_rng_state"] == stored["random_rng_state"]
        assert np.array_equal(state["np_rng_state"][1], stored["np_rng_state"][1])
        found += 1
    assert found == len([key for key in objects if key.startswith("rng_state/")]) > 0


def test_the_iteration_by_tag_and_by_folder(tmp_path: Path) -> None:
    name = "s_llama_tp4kv2"
    (tmp_path / "iter_0000002").symlink_to(path(name) / "iter_0000002", target_is_directory=True)
    for checkpoint in (
        Checkpoint(open_source(path(name), tag="iter_0000002")),
        Checkpoint(open_source(path(name), tag="2")),
        open_checkpoint(path(name) / "iter_0000002"),
    ):
        assert set(checkpoint) == set(opened(name))


# ---- onto meshes

MESHES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(0)]),
    ((2, 2), [Shard(0), Shard(-1)]),
    ((2, 2), [Replicate(), Shard(0)]),
]


def load_on_mesh(rank: int, world: int, name: str, shape: tuple[int, ...], placements: list[Placement]) -> list[str]:
    """Everything as DTensors of a mesh, and what of it differs from the golden tensors."""
    mesh = init_device_mesh("cpu", shape)
    whole = golden(name)

    def spread(value: torch.Tensor) -> Any:
        fitting = [p if not p.is_shard() or value.ndim > 1 or p.dim == 0 else Replicate() for p in placements]  # type: ignore[attr-defined]
        return distribute_tensor(value, mesh, fitting)

    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    wanted: dict[str, torch.Tensor] = {}
    for key, value in whole.items():
        if key.startswith("model."):
            state["model"][key.removeprefix("model.")] = spread(torch.full_like(value, float("nan")))
        else:
            fqn, _, kind = key.removeprefix("optim.state.").rpartition(".")
            state["optim"]["state"].setdefault(fqn, {})[kind] = spread(torch.full_like(value, float("nan")))
        wanted[key] = spread(value).to_local()
    ucp_dcp.load(state, path(name), roots={"model": "model", "optim": "optimizer"})
    got = {f"model.{fqn}": value for fqn, value in state["model"].items()}
    got |= {f"optim.state.{fqn}.{kind}": value for fqn, own in state["optim"]["state"].items() for kind, value in own.items()}
    return [key for key, value in wanted.items() if not same(got[key].to_local(), value)]


FAST = [("s_mixtral_tp2ep2etp2", 0), ("s_mixtral_tp2ep2etp2", 1), ("s_gpt_pp2_tied_fp32", 2)]


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_loads_onto_meshes(ranks: RankPool, name: str, mesh: int) -> None:
    assert ranks.run(4, load_on_mesh, name, *MESHES[mesh]) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [(n, m) for n in NAMES for m in range(len(MESHES)) if (n, m) not in FAST])
def test_the_others_load_onto_meshes(ranks: RankPool, name: str, mesh: int) -> None:
    assert ranks.run(4, load_on_mesh, name, *MESHES[mesh]) == [[]] * 4


def test_tied_and_untied_models_load() -> None:
    """Where embedding and output layer are one memory it is filled once; as two tensors both are."""
    name = "s_gpt_pp2_tied_fp32"
    wanted = golden(name)["model.embedding.word_embeddings.weight"]
    one = torch.zeros_like(wanted)
    ucp_dcp.load({"model": {"embedding.word_embeddings.weight": one, TIED_OUTPUT: one}}, path(name), roots={"model": "model"})
    assert same(one, wanted)
    two = {"embedding.word_embeddings.weight": torch.zeros_like(wanted), TIED_OUTPUT: torch.zeros_like(wanted)}
    ucp_dcp.load({"model": two}, path(name), roots={"model": "model"})
    assert same(two[TIED_OUTPUT], wanted) and same(two["embedding.word_embeddings.weight"], wanted)


def test_roles() -> None:
    checkpoint = opened("s_mixtral_tp2ep2etp2")
    assert {checkpoint[key].role for key in checkpoint} == {Role.WEIGHT, Role.MASTER, Role.STATE}
    assert all(checkpoint[key].dtype == torch.float32 for key in checkpoint if checkpoint[key].role == Role.MASTER)
