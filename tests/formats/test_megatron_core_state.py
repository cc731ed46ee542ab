"""Wrong optimizer state that megatron-core 0.15 to 0.19.2 can write as ``fully_reshardable`` is found before anything is loaded.

``e2_mb_dp3`` is such a file (several buckets, DP 3): the states of 24 of its 27 parameters are wrong. ``e2_mb_dp3_dpr`` is the same run in
another format, and right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_truth
import numpy as np
import pytest
import torch
from ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

import ucp_dcp
from ucp_dcp import open_checkpoint
from ucp_dcp.cli.app import app
from ucp_dcp.errors import CorruptCheckpointError
from ucp_dcp.names import Role
from ucp_dcp.verification import verify

STATES = ("exp_avg", "exp_avg_sq", "master")
GOOD = "decoder.final_layernorm.weight"


def path(name: str) -> Path:
    found = megatron_truth.find(name)
    assert found is not None
    return found


def wrong_parameters() -> set[str]:
    """Those whose stored masters are not what the run held (its twin tells), whatever our check says."""
    bad = open_checkpoint(path("e2_mb_dp3"), allow_inconsistent=True)
    good = open_checkpoint(path("e2_mb_dp3_dpr"))
    masters = [key for key in good if good[key].role == Role.MASTER]
    return {good[key].fqn for key in masters if not torch.equal(bad[key].read(), good[key].read())}


def wanted(names: list[str], states: tuple[str, ...] = STATES) -> dict[str, Any]:
    checkpoint = open_checkpoint(path("e2_mb_dp3_dpr"))
    model = {n: torch.full(checkpoint[f"model.{n}"].shape, 7, dtype=torch.bfloat16) for n in names}
    state = {n: {s: torch.full(checkpoint[f"optim.state.{n}.{s}"].shape, 7.0) for s in states} for n in names}
    return {"model": model, "optim": {"state": state}}


ROOTS = {"model": "model", "optim": "optimizer"}


def all_names() -> list[str]:
    checkpoint = open_checkpoint(path("e2_mb_dp3_dpr"))
    return [checkpoint[key].fqn for key in checkpoint if checkpoint[key].role == Role.WEIGHT]


def test_check_names_exactly_the_wrong_ones_with_their_states() -> None:
    wrong = wrong_parameters()
    assert len(wrong) == 24
    report = open_checkpoint(path("e2_mb_dp3")).check()
    assert set(report.names("inconsistent")) == wrong and not report.ok
    assert all(set(p.states) == set(STATES) for p in report.parameters)
    for name in wrong:
        assert f"{name} (exp_avg, exp_avg_sq, master)" in str(report)
    assert open_checkpoint(path("e2_mb_dp3_dpr")).check().ok


def test_verify_and_show_find_them() -> None:
    wrong = wrong_parameters()
    report = verify(path("e2_mb_dp3"))
    assert {p.message.split(" of ")[1].split(" (")[0] for p in report.problems} == wrong
    assert verify(path("e2_mb_dp3_dpr")).ok and verify(path("old0161_fr")).ok
    shown = CliRunner().invoke(app, ["show", "--check", "--json", str(path("e2_mb_dp3"))])
    assert shown.exit_code == 1
    found = {p["name"]: p["states"] for p in json.loads(shown.stdout)["check"]["parameters"] if p["outcome"] == "inconsistent"}
    assert set(found) == wrong and all(sorted(s) == sorted(STATES) for s in found.values())
    assert CliRunner().invoke(app, ["verify", str(path("e2_mb_dp3"))]).exit_code == 1


@pytest.mark.parametrize("states", [STATES, ("exp_avg",), ("exp_avg_sq",), ("master",)])
def test_a_load_refuses_and_touches_nothing(states: tuple[str, ...]) -> None:
    state = wanted(all_names(), states)
    with pytest.raises(CorruptCheckpointError) as raised:
        ucp_dcp.load(state, path("e2_mb_dp3"), roots=ROOTS)
    for name in wrong_parameters():
        assert name in str(raised.value)
    assert GOOD not in str(raised.value) and "allow_inconsistent" in str(raised.value)
    assert all(bool((t == 7).all()) for t in state["model"].values())
    assert all(bool((t == 7).all()) for own in state["optim"]["state"].values() for t in own.values())


def test_the_model_alone_and_right_state_load() -> None:
    names = all_names()
    state = {"model": wanted(names)["model"]}
    ucp_dcp.load(state, path("e2_mb_dp3"), roots={"model": "model"})
    twin = open_checkpoint(path("e2_mb_dp3_dpr"))
    assert all(torch.equal(t, twin[f"model.{n}"].read()) for n, t in state["model"].items())
    right = sorted(set(names) - wrong_parameters())
    assert GOOD in right
    state = wanted(right)
    ucp_dcp.load(state, path("e2_mb_dp3"), roots=ROOTS)
    for n in right:
        for s in STATES:
            assert torch.equal(state["optim"]["state"][n][s], twin[f"optim.state.{n}.{s}"].read())


def test_told_to_it_takes_the_state_as_it_is() -> None:
    names = all_names()
    ucp_dcp.load(wanted(names), path("e2_mb_dp3"), roots=ROOTS, allow_inconsistent=True)
    ucp_dcp.load(wanted(names), path("e2_mb_dp3"), roots=ROOTS, allow_inconsistent=["decoder.**", "embedding.**", "output_layer.weight"])
    with pytest.raises(CorruptCheckpointError, match="of 1 parameters") as raised:
        ucp_dcp.load(wanted(names), path("e2_mb_dp3"), roots=ROOTS, allow_inconsistent=["decoder.**"])
    assert "embedding.word_embeddings.weight" in str(raised.value)


def test_slices_of_an_open_checkpoint() -> None:
    checkpoint = open_checkpoint(path("e2_mb_dp3"))
    key = "optim.state.decoder.layers.0.mlp.linear_fc1.weight.exp_avg"
    with pytest.raises(CorruptCheckpointError, match="the optimizer state of 1 parameters"):
        checkpoint[key].read()
    assert checkpoint[f"optim.state.{GOOD}.exp_avg"].read().shape == (32,)
    assert checkpoint["model.decoder.layers.0.mlp.linear_fc1.weight"].read().shape == (96, 32)
    assert open_checkpoint(path("e2_mb_dp3"), allow_inconsistent=True)[key].read().shape == (96, 32)


def test_the_check_costs_only_what_is_loaded() -> None:
    """Of a slice of a state: its bytes, and those of the master and the weight there; nothing for other formats, nothing for weights."""
    name, rows = "decoder.layers.0.self_attention.linear_proj.weight", 8
    for checkpoint, each in (("old0161_fr", 4 + 4 + 2), ("old014_fsms", 4)):
        opened = open_checkpoint(path(checkpoint))
        opened[f"model.{name}"].read()
        before = opened.stats.bytes_wanted
        opened[f"optim.state.{name}.exp_avg"][:rows]
        assert opened.stats.bytes_wanted - before == rows * 16 * each
        before = opened.stats.bytes_wanted
        opened[f"model.{name}"].read()
        assert opened.stats.bytes_wanted - before == 16 * 16 * 2


def copied(tmp_path: Path, change: Callable[[Path, Any], None]) -> Path:
    root = tmp_path / "c"
    shutil.copytree(path("e2_mb_dp3"), root)
    change(root, open_checkpoint(root, allow_inconsistent=True))
    return root


def test_constant_values_are_unproven(tmp_path: Path) -> None:
    """A norm that is still all ones in both copies proves nothing; that is reported, and no error."""
    assert ucp_dcp.load(wanted([GOOD]), path("e2_mb_dp3"), roots=ROOTS).unproven == []

    def ones(root: Path, checkpoint: Any) -> None:
        for key, values in ((f"model.{GOOD}", torch.ones(32, dtype=torch.bfloat16)), (f"optim.state.{GOOD}.master", torch.ones(32))):
            first, _ = checkpoint.catalog.chunk_range(checkpoint.catalog.find(key))
            place = checkpoint.source.locate(np.asarray([first]))
            file = root / checkpoint.catalog.files[int(place.file[0])].path
            data = bytearray(file.read_bytes())
            raw = values.view(torch.uint8).numpy().tobytes()
            data[int(place.offset[0]) : int(place.offset[0]) + len(raw)] = raw
            file.write_bytes(data)

    root = copied(tmp_path, ones)
    assert open_checkpoint(root).check([GOOD]).names("unproven") == [GOOD]
    report = ucp_dcp.load(wanted([GOOD]), root, roots=ROOTS)
    assert report.unproven == [GOOD] and "1 unproven" in str(report)


def refuses(rank: int, world: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (world,))
    state = wanted(all_names())
    for own in state["optim"]["state"].values():
        for s, t in own.items():
            own[s] = distribute_tensor(t, mesh, [Shard(0)])
    try:
        ucp_dcp.load(state, folder, roots=ROOTS)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def test_ranks_refuse_together(ranks: RankPool) -> None:
    for message in ranks.run(2, refuses, str(path("e2_mb_dp3"))):
        assert all(name in message for name in wrong_parameters())
