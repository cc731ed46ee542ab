"""DeepSpeed's universal folders, written by its own converter, as catalogs: with everything its own loader loses."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from format_helpers import DATA, assemble, reread, tensor_spans

from ucp_dcp.checkpoint import open_checkpoint
from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, UCPError, UnsupportedError
from ucp_dcp.formats import open_source
from ucp_dcp.names import Role
from ucp_dcp.storage.store import open_store

UNIVERSAL = ["z1_bf16_universal_w2", "z2_bf16_universal_w4", "z3_bf16_universal_w2", "z3_bf16_universal_w3"]
TAG = "global_step2_universal"


def folder(name: str) -> Path:
    return DATA / "deepspeed" / name


@pytest.fixture
def copy(tmp_path: Path):
    def make(name: str) -> Path:
        shutil.copytree(folder(name), tmp_path / name)
        return tmp_path / name

    return make


@pytest.mark.parametrize("name", UNIVERSAL)
def test_every_tensor_equals_the_live_state(name: str) -> None:
    source = open_source(folder(name))
    checked = 0
    with np.load(folder(name) / "truth.npz") as truth:
        for key in truth.files:
            kind, fqn = key.split("/", 1)
            role = {"weight": Role.WEIGHT, "buffer": Role.BUFFER, "master": Role.MASTER}.get(kind, Role.STATE)
            t = source.catalog.find_named(role, fqn, kind if role is Role.STATE else "")
            if t is None:  # stage 3 keeps trained weights as masters only
                assert kind == "weight" and name.startswith("z3"), key
                values = assemble(source, source.catalog.find_named(Role.MASTER, fqn)).bfloat16()
            else:
                values = assemble(source, t)
            assert values.shape == truth[key].shape and torch.equal(values.double(), torch.from_numpy(truth[key]).double()), key
            checked += 1
    assert checked >= 22


@pytest.mark.parametrize("name", UNIVERSAL)
def test_opening_reads_no_tensor_and_writes_nothing(name: str) -> None:
    store = CountingStore(open_store(folder(name)))
    before = reread(folder(name))
    source = open_source(store)
    assert source.format == "deepspeed" and source.provenance["writer"] == "deepspeed ds_to_universal"
    spans = {path: tensor_spans(data) for path, data in before.items() if path.endswith(".pt")}
    for r in store.counts.ranges:
        for start, length in spans.get(r.path, ()):
            assert min(r.start + r.length, start + length) - max(r.start, start) <= 0, r
    assert store.counts.bytes_written == 0 and reread(folder(name)) == before


@pytest.mark.parametrize("name", UNIVERSAL)
def test_steps_hyperparameters_and_objects(name: str) -> None:
    source = open_source(folder(name))
    catalog = source.catalog
    objects = {row.key: source.read_object(row) for row in catalog.objects}
    names = [set(objects[f"optim.param_groups.{i}.params"]) for i in (0, 1)]
    masters = {row.fqn for row in map(catalog.tensor, range(catalog.n_tensors)) if row.role == Role.MASTER}
    assert names[0] | names[1] == masters and not names[0] & names[1]
    assert (objects["optim.param_groups.0.weight_decay"], objects["optim.param_groups.1.weight_decay"]) == (0.1, 0.0)
    assert objects["lr_scheduler"] == {"last_batch_iteration": 1} and objects["client_state.note"]["tokens"] == 12345
    for fqn in masters:
        step = assemble(source, catalog.find_named(Role.STATE, fqn, "step"))
        assert step.shape == () and step.item() == 2
    assert source.provenance["global_steps"] == 2 and source.provenance["tag"] == TAG


def test_frozen_parameters_and_buffers_keep_their_dtype() -> None:
    """The converter widens them to fp32 in zero/<name>/fp32.pt: an integer buffer, too. The model states have them as they were."""
    for name in ("z1_bf16_universal_w2", "z3_bf16_universal_w2"):
        catalog = open_source(folder(name)).catalog
        row = catalog.tensor(catalog.find_named(Role.BUFFER, "table"))
        assert row.dtype == "int64" and row.shape == (2, 3)
        row = catalog.tensor(catalog.find_named(Role.WEIGHT, "blocks.0.mix.weight"))
        assert row.dtype == "bfloat16" and row.shape == (5, 5, 3)
        assert catalog.find_named(Role.MASTER, "blocks.0.mix.weight") is None
        assert catalog.find_named(Role.MASTER, "head.weight") is None  # the second name of a tied weight
        assert catalog.find_named(Role.WEIGHT, "head.weight") is not None


@pytest.mark.parametrize("name", UNIVERSAL)
def test_masters_are_consistent_with_the_weights(name: str) -> None:
    report = open_checkpoint(folder(name)).check()
    assert report.ok
    if not name.startswith("z3"):
        assert report.counts["consistent"] >= 3


def test_where_it_is(copy) -> None:
    root = copy("z1_bf16_universal_w2")
    keys = open_source(root).catalog.keys
    assert open_source(root / TAG).catalog.keys == keys and open_source(root, tag=TAG).catalog.keys == keys
    (root / "latest_universal").unlink()
    assert open_source(root, tag=TAG).catalog.keys == keys
    assert open_source(root).catalog.keys == keys  # the only folder
    (root / "latest").write_text(TAG)
    assert open_source(root).catalog.keys == keys
    (root / "latest").unlink()
    (root / "latest_universal").write_text("global_step9_universal\n")
    with pytest.raises(CheckpointNotFoundError, match=r"latest_universal.*global_step9_universal"):
        open_source(root)


def test_rank_files_come_first_where_both_are_there(copy) -> None:
    root = copy("z1_bf16_universal_w2")
    shutil.copytree(folder("z1_bf16_w3") / "global_step2", root / "global_step2")
    (root / "latest").write_text("global_step2")
    assert open_source(root).provenance["writer"] == "deepspeed"
    assert open_source(root, tag=TAG).provenance["writer"] == "deepspeed ds_to_universal"


def test_source_pickles_and_records_may_be_parsed_elsewhere() -> None:
    def elsewhere(paths, parse):
        return [pickle.loads(pickle.dumps(parse(p))) for p in paths]

    for name in UNIVERSAL:
        one, two = open_source(folder(name)), pickle.loads(pickle.dumps(open_source(folder(name), parse_all=elsewhere)))
        assert {k: bytes(v) for k, v in one.catalog.to_sections().items()} == {k: bytes(v) for k, v in two.catalog.to_sections().items()}
        assert two.read_object(two.catalog.find_object("client_state.rng")).dtype == torch.uint8


# ---- damage


@pytest.mark.parametrize("name", ["z1_bf16_universal_w2", "z3_bf16_universal_w3"])
def test_every_truncated_or_missing_file_is_noticed(copy, name: str) -> None:
    root = copy(name)
    needed = ["zero/optimizer_state.pt", "zero/embed.weight/fp32.pt", "zero/embed.weight/exp_avg.pt"]
    needed += [p.name for p in (root / TAG).glob("*.pt")]
    for inner in needed:
        path = root / TAG / inner
        data = path.read_bytes()
        for keep in (0, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:keep])
            with pytest.raises(UCPError, match=path.name):
                open_source(root)
        path.unlink()
        with pytest.raises(UCPError):
            open_source(root)
        path.write_bytes(data)
    open_source(root)


def test_a_missing_parameter_or_state_is_named(copy) -> None:
    root = copy("z1_bf16_universal_w2")
    (root / TAG / "zero" / "blocks.1.up.weight" / "exp_avg_sq.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"blocks\.1\.up\.weight.*exp_avg"):
        open_source(root)
    shutil.rmtree(root / TAG / "zero" / "blocks.1.up.weight")
    with pytest.raises(CorruptCheckpointError, match=r"blocks\.1\.up\.weight.*fp32"):
        open_source(root)


@pytest.mark.parametrize("name", ["z1_bf16_universal_w2", "z3_bf16_universal_w3"])
def test_a_tensor_of_another_size_is_named(copy, name: str) -> None:
    root = copy(name)
    path = root / TAG / "zero" / "embed.weight" / "exp_avg.pt"
    value = torch.load(path, weights_only=True)
    torch.save({**value, "param": value["param"][:-1]} if isinstance(value, dict) else value[:-1].clone(), path)
    with pytest.raises(CorruptCheckpointError, match=r"exp_avg\.pt.*embed\.weight.*earlier conversion"):
        open_source(root)


def test_a_transposed_tensor_is_named(copy) -> None:
    root = copy("z1_bf16_universal_w2")
    path = root / TAG / "zero" / "embed.weight" / "fp32.pt"
    value = torch.load(path, weights_only=True)
    torch.save({**value, "param": value["param"].t().contiguous()}, path)
    with pytest.raises(CorruptCheckpointError, match=r"fp32\.pt.*\[5, 11\].*\[11, 5\]"):
        open_source(root)


def test_model_states_of_two_saves(copy) -> None:
    root = copy("z3_bf16_universal_w3")
    path = root / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["global_steps"] = 9
    torch.save(state, path)
    with pytest.raises(CorruptCheckpointError, match=r"rank_1_.*two saves"):
        open_source(root)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"dp_world_size is 3, but there are 2"):
        open_source(root)


def test_what_is_refused(copy) -> None:
    root = copy("z1_bf16_universal_w2")
    path = root / TAG / "zero" / "embed.weight" / "fp32.pt"
    value = torch.load(path, weights_only=True)
    torch.save({**value, "is_expert_param": True}, path)
    with pytest.raises(UnsupportedError, match="experts"):
        open_source(root)
    torch.save(value, path)
    shutil.copy(root / TAG / "mp_rank_00_model_states.pt", root / TAG / "mp_rank_01_model_states.pt")
    with pytest.raises(UnsupportedError, match=r"model-parallel ranks \['00', '01'\]"):
        open_source(root)


def test_show(copy) -> None:
    from typer.testing import CliRunner

    from ucp_dcp.cli.app import app

    shown = CliRunner().invoke(app, ["show", str(copy("z3_bf16_universal_w3")), "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["roles"]["master"] == 7
