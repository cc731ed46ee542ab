"""The reproduced failures of DeepSpeed's universal checkpoints, 3.1 to 3.14, as far as they concern reading: right here, or a clear error.

Each was measured with DeepSpeed 0.19.8 (its converter, then ``load_universal``). The number of a case is in the name of its test.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from format_helpers import DATA, assemble

from ucp_dcp import load, open_checkpoint
from ucp_dcp.errors import CorruptCheckpointError, MissingKeysError, ShapeMismatchError, UnsupportedError
from ucp_dcp.formats import open_source
from ucp_dcp.names import Role
from ucp_dcp.storage.store import open_store

TAG = "global_step2_universal"


def folder(name: str) -> Path:
    return DATA / "deepspeed" / name


def truth(name: str) -> dict[str, torch.Tensor]:
    with np.load(folder(name) / "truth.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("z0_bf16_frozen_tied_w2", "blocks.0.mix"),
        ("z1_bf16_frozen_w3", "embed"),
        ("z2_bf16_frozen_tied_w2", "blocks.0.mix"),
        ("z3_bf16_frozen_tied_w3", "blocks.0.mix"),
        ("z1_bf16_universal_w2", "blocks.0.mix"),
        ("z3_bf16_universal_w2", "blocks.0.mix"),
    ],
)
def test_3_1_frozen_parameters_and_buffers_are_loaded(name: str, frozen: str) -> None:
    """Theirs: they stay at their fresh initialisation, in every stage, without a word."""
    known = truth(name)
    wanted = {key: value for key, value in known.items() if key.startswith("buffer/") or (key.startswith("weight/") and frozen in key)}
    assert len(wanted) >= 3
    state = {"model": {key.split("/", 1)[1]: torch.full(value.shape, 7.0) for key, value in wanted.items()}}
    load(state, folder(name), roots={"model": "model"})
    for key, value in wanted.items():
        assert torch.equal(state["model"][key.split("/", 1)[1]], value), key


@pytest.mark.parametrize("name", ["z1_bf16_roundrobin_w3", "z2_bf16_roundrobin_w3"])
def test_3_2_round_robin_gradients(name: str) -> None:
    """Theirs: 4 of 6 tensors silently wrong; the recorded mapping is that of another order."""
    source = open_source(folder(name))
    known = truth(name)
    if name.startswith("z1"):
        assert sum(key.startswith(("master/", "exp_avg")) for key in known) == 48
    for key, value in known.items():
        kind, fqn = key.split("/", 1)
        if kind != "buffer":
            role = {"weight": Role.WEIGHT, "master": Role.MASTER}.get(kind, Role.STATE)
            t = source.catalog.find_named(role, fqn, kind if role is Role.STATE else "")
            assert torch.equal(assemble(source, t).float(), value), key
    report = open_checkpoint(folder(name)).check()
    assert report.ok and report.counts["consistent"] >= 9


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("z1_fp32_sgd_w2", {"momentum_buffer"}),
        ("z1_bf16_lion_w2", {"exp_avg"}),
        ("z3_bf16_lion_w2", {"exp_avg"}),
        ("z2_bf16_adafactor_w2", {"step", "variance"}),
        ("z3_fp32_adafactor_w2", {"step", "variance"}),
        ("z0_bf16_adafactor_w2", {"step", "variance", "row_var", "col_var"}),
    ],
)
def test_3_3_any_optimizer(name: str, states: set[str]) -> None:
    """Theirs: KeyError 'exp_avg'."""
    catalog = open_source(folder(name)).catalog
    found = {row.state for row in map(catalog.tensor, range(catalog.n_tensors)) if row.role == Role.STATE}
    assert found == states


def test_3_4_stages_are_one_kind_of_catalog() -> None:
    """Theirs: stage 3 -> 1 and 1 -> 3 fail, their files are of two kinds. Ours: the same names, roles, shapes and dtypes.

    (But for float buffers, which DeepSpeed itself converts to bf16 in ``zero.Init``.)
    """

    def rows(name: str) -> set[tuple[object, ...]]:
        catalog = open_source(folder(name)).catalog
        every = map(catalog.tensor, range(catalog.n_tensors))
        known = [r for r in every if r.role in (Role.MASTER, Role.STATE, Role.BUFFER)]
        return {(r.role, r.fqn, r.state, r.shape, None if r.role == Role.BUFFER else r.dtype) for r in known}

    assert rows("z1_bf16_w4") == rows("z3_bf16_w2") and len(rows("z1_bf16_w4")) > 60
    assert rows("z1_bf16_universal_w2") == rows("z3_bf16_universal_w2")
    assert rows("z2_bf16_universal_w4") == rows("z3_bf16_universal_w3")


@pytest.mark.parametrize("name", ["z3_bf16_1group_w4", "z3_bf16_w2", "z1_bf16_w4"])
def test_3_5_the_number_of_groups_does_not_matter(name: str) -> None:
    """Theirs: 1 group -> 2 groups silently loads the first only. Ours: state by parameter name, whatever the groups were."""
    known = truth(name)
    names = [key.split("/", 1)[1] for key in known if key.startswith("exp_avg_sq/")]
    state = {"optim": {"state": {fqn: {"exp_avg_sq": torch.full(known[f"exp_avg_sq/{fqn}"].shape, 9.0)} for fqn in names}}}
    load(state, folder(name), roots={"optim": "optimizer"})
    assert len(names) == 16
    for fqn in names:
        assert torch.equal(state["optim"]["state"][fqn]["exp_avg_sq"], known[f"exp_avg_sq/{fqn}"]), fqn


@pytest.mark.parametrize("name", ["z1_bf16_w4", "z3_bf16_w2", "z1_bf16_universal_w2", "z3_bf16_universal_w2"])
@pytest.mark.parametrize("role", ["model", "optim"])
def test_3_6_a_changed_shape_is_an_error(name: str, role: str) -> None:
    """Theirs: stage 3 loads with no error and scrambles every later parameter of the group."""
    rows, width = truth(name)["master/embed.weight"].shape
    mine = torch.full((rows + 1, width), 5.0)
    state = {"model": {"embed.weight": mine}} if role == "model" else {"optim": {"state": {"embed.weight": {"exp_avg": mine}}}}
    with pytest.raises(ShapeMismatchError, match=rf"embed\.weight.*\[?{rows + 1}, {width}"):
        load(state, folder(name), roots={"model": "model", "optim": "optimizer"})
    assert bool((mine == 5.0).all())


@pytest.mark.parametrize("name", ["z3_bf16_w2", "z3_fp32_subgroups_w3", "z3_bf16_universal_w2", "z2_fp32_w4"])
def test_3_7_every_group_keeps_its_hyperparameters(name: str) -> None:
    """Theirs, stage 3: all groups get those of group 0."""
    source = open_source(folder(name))
    values = [source.read_object(source.catalog.find_object(f"optim.param_groups.{i}.weight_decay")) for i in (0, 1)]
    assert values == [0.1, 0.0]


def test_3_8_a_group_smaller_than_its_padding() -> None:
    """Theirs: 2 elements over 4 ranks in BF16_Optimizer crash the conversion, all of the padding is counted on the last rank."""
    source = open_source(folder("z1_bf16_gad32_pair_w4"))
    assert source.provenance["zero_stage"] is None
    known = truth("z1_bf16_gad32_pair_w4")
    for kind, role in (("master", Role.MASTER), ("exp_avg", Role.STATE), ("exp_avg_sq", Role.STATE)):
        t = source.catalog.find_named(role, "gain", kind if role is Role.STATE else "")
        assert source.catalog.shape_of(t) == (2,) and torch.equal(assemble(source, t), known[f"{kind}/gain"])


def test_3_9_native_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    """Theirs: expert parameters of different ranks have one local name, and are joined or crash."""
    root = tmp_path / "c"
    shutil.copytree(folder("z1_bf16_w3"), root)
    (root / "global_step2" / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="mixture-of-experts"):
        open_source(root)


def test_3_10_pipelines_are_refused_by_name(tmp_path: Path) -> None:
    """Theirs: works, with names that are layer numbers."""
    root = tmp_path / "c"
    shutil.copytree(folder("z1_bf16_w3"), root)
    (root / "global_step2" / "layer_03-model_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="pipeline"):
        open_source(root)


@pytest.mark.parametrize("name", ["z1_bf16_w4", "z3_fp32_subgroups_w3", "z3_bf16_universal_w2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_3_11_all_ranks_together_read_each_byte_once(name: str, ranks: int) -> None:
    """Theirs: stage 3 reads everything on every rank; 2 full reads and writes before that."""
    store = CountingStore(open_store(folder(name)))
    checkpoint = open_checkpoint(store)
    masters = [n for n in checkpoint.names() if n.endswith((".master", ".exp_avg", ".exp_avg_sq"))]
    checkpoint[masters[0]].read()  # the first read compares the step of the ranks
    store.reset()
    nbytes = 0
    for rank in range(ranks):
        for n in masters:
            tensor = checkpoint[n]
            rows = tensor.shape[0]
            mine = tensor[rows * rank // ranks : rows * (rank + 1) // ranks]
            nbytes += mine.numel() * mine.element_size()
    assert store.counts.bytes_read == nbytes == sum(checkpoint[n].nbytes for n in masters)
    assert store.counts.bytes_written == 0


@pytest.mark.parametrize("name", ["z1_bf16_universal_w2", "z3_bf16_universal_w2"])
def test_3_12_fragments_of_an_earlier_conversion(tmp_path: Path, name: str) -> None:
    """Theirs: says Done and merges left-overs of another size. Ours: the tensor does not fit its shape, or its parameter is not known."""
    root = tmp_path / "c"
    shutil.copytree(folder(name), root)
    path = root / TAG / "zero" / "blocks.1.up.bias" / "exp_avg.pt"
    value = torch.load(path, weights_only=True)
    longer = torch.cat((value["param"], torch.zeros(4))) if isinstance(value, dict) else torch.cat((value, torch.zeros(4)))
    torch.save({**value, "param": longer} if isinstance(value, dict) else longer, path)
    with pytest.raises(CorruptCheckpointError, match=r"exp_avg\.pt.*blocks\.1\.up\.bias.*earlier conversion"):
        open_source(root)
    shutil.copytree(folder(name) / TAG / "zero" / "blocks.1.up.bias", root / TAG / "zero" / "blocks.1.up.bias", dirs_exist_ok=True)
    shutil.copytree(root / TAG / "zero" / "blocks.1.up.bias", root / TAG / "zero" / "removed.parameter")
    catalog = open_source(root).catalog
    assert catalog.find_named(Role.MASTER, "removed.parameter") is None


def test_3_13_a_flipped_bit(tmp_path: Path) -> None:
    """Theirs: 502.0 instead of 500.0, no error. The format has no checksum; the second copy of a weight tells, where there is one."""
    root = tmp_path / "c"
    shutil.copytree(folder("z1_bf16_w4"), root)
    model = root / "global_step2" / "mp_rank_00_model_states.pt"
    row = open_source(root).catalog.find("model.embed.weight")
    source = open_source(root)
    at = int(source.locate(np.asarray([source.catalog.chunk_range(row)[0]])).offset[0])
    data = bytearray(model.read_bytes())
    data[at + 4] ^= 1
    model.write_bytes(bytes(data))
    report = open_checkpoint(root).check()
    assert report.names("inconsistent") == ["embed.weight"] and report.parameters[-1].outcome != "inconsistent"
    (wrong,) = [p for p in report.parameters if p.outcome == "inconsistent"]
    assert (wrong.differing, wrong.first) == (1, (0, 2))


@pytest.mark.parametrize("name", ["z1_bf16_w4", "z3_bf16_w2", "z1_bf16_universal_w2"])
def test_3_14_a_transposed_weight_is_an_error(name: str) -> None:
    """Theirs: only the number of elements is compared, and the bytes are taken in the wrong order."""
    rows, width = truth(name)["master/embed.weight"].shape
    state = {"model": {"embed.weight": torch.zeros(width, rows)}}
    with pytest.raises(ShapeMismatchError, match=r"embed\.weight"):
        load(state, folder(name), roots={"model": "model"})


def test_a_parameter_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MissingKeysError, match=r"embed\.wait"):
        load({"model": {"embed.wait": torch.zeros(23, 9)}}, folder("z1_bf16_w4"), roots={"model": "model"})
