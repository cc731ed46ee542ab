"""DeepSpeed checkpoints, opened where they lie: bit for bit what the live engine held, without reading a tensor to open them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from format_helpers import DATA, assemble, reread, tensor_spans

from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, UCPError, UnsafePickleError, UnsupportedError
from ucp_dcp.formats import open_source
from ucp_dcp.formats.deepspeed import catalog_from_records, parse_file
from ucp_dcp.formats.deepspeed.flat import partition_size, pieces_of_group, pieces_of_subgroup, range_boxes
from ucp_dcp.geometry import check_cover, flat_range_to_boxes
from ucp_dcp.names import Role
from ucp_dcp.storage.store import open_store

CHECKPOINTS = sorted(p.parent.name for p in (DATA / "deepspeed").glob("*/latest"))
UNIVERSAL = sorted(p.parent.name for p in (DATA / "deepspeed").glob("*/latest_universal"))
STAGE3 = [name for name in CHECKPOINTS if name.startswith("z3")]


SAMPLED = [name for name in CHECKPOINTS if name.startswith(("z0_bf16", "z0_fp16"))]
"""Opening these reads a few elements of masters and weights, to know which parameter is which."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def folder(name: str) -> Path:
    return DATA / "deepspeed" / name


@pytest.fixture
def copy(tmp_path: Path):
    """A checkpoint that a test may damage."""

    def make(name: str) -> Path:
        shutil.copytree(folder(name), tmp_path / name)
        return tmp_path / name

    return make


def test_all_kinds_are_here() -> None:
    assert len(CHECKPOINTS) == 37
    assert len(UNIVERSAL) == 4


# ---- what is read is what was saved


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_equals_the_live_state(name: str) -> None:
    source = open_source(folder(name))
    catalog = source.catalog
    with np.load(folder(name) / "truth.npz") as truth:
        checked = 0
        for key in truth.files:
            kind, fqn = key.split("/", 1)
            if kind == "weight":
                t = catalog.find_named(Role.WEIGHT, fqn)
                if t is None:  # stage 3 keeps trained weights as masters only
                    assert name in STAGE3
                    t = catalog.find_named(Role.MASTER, fqn)
                    values = assemble(source, t)
                    values = values.to(LOW.get(name.split("_")[1], torch.float32))
                else:
                    values = assemble(source, t)
            elif kind == "buffer":
                values = assemble(source, catalog.find_named(Role.BUFFER, fqn))
            elif kind == "master":
                values = assemble(source, catalog.find_named(Role.MASTER, fqn))
            else:
                t = catalog.find_named(Role.STATE, fqn, kind)
                if t is None:
                    assert (name, fqn.rsplit(".", 1)[0]) in UNNAMED, key
                    continue
                values = assemble(source, t)
            assert values.shape == truth[key].shape, key
            assert torch.equal(values.double(), torch.from_numpy(truth[key]).double()), key
            checked += 1
    assert checked >= 15
    # Nothing in the catalog but what the truth knows, and aliases.
    known = {key.split("/", 1)[1] for key in reread_truth(name)} | {"head.weight", ""}
    assert {catalog.tensor(t).fqn for t in range(catalog.n_tensors)} <= known


UNNAMED = [("z0_fp32_frozen_tied_w1", "blocks.1.norm")]
"""Stage 0 in fp32, a bias frozen: the number of either norm parameter could also mean the bias before it, and no master tells."""


def reread_truth(name: str) -> list[str]:
    with np.load(folder(name) / "truth.npz") as truth:
        return list(truth.files)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_chunks_cover_every_tensor_exactly(name: str) -> None:
    catalog = open_source(folder(name)).catalog
    for t in range(catalog.n_tensors):
        cover = check_cover(catalog.shape_of(t), catalog.boxes(t))
        assert cover.ok, (catalog.keys[t], cover)


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if ("bf16" in n or "fp16" in n) and n not in STAGE3])
def test_masters_round_to_the_stored_weights(name: str) -> None:
    """Independent of DeepSpeed's own address book, which is wrong with round_robin_gradients."""
    source = open_source(folder(name))
    masters = [t for t in range(source.catalog.n_tensors) if source.catalog.tensor(t).role == Role.MASTER]
    assert masters
    assert not source.provenance.get("unnamed")
    moved = 0
    for t in masters:
        weight = source.catalog.find_named(Role.WEIGHT, source.catalog.tensor(t).fqn)
        low = assemble(source, weight)
        assert torch.equal(assemble(source, t).to(low.dtype), low), source.catalog.keys[t]
        moved += not torch.equal(assemble(source, t), low.float())
    assert moved == len(masters)  # none of it is what the model was initialised with: rounding is really tried


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n not in SAMPLED])
def test_opening_reads_no_tensor(name: str) -> None:
    store = CountingStore(open_store(folder(name)))
    before = reread(folder(name))
    source = open_source(store)
    assert source.format == "deepspeed"
    spans = {path: tensor_spans(data) for path, data in before.items() if path.endswith(".pt")}
    for r in store.counts.ranges:
        for start, length in spans.get(r.path, ()):
            touched = min(r.start + r.length, start + length) - max(r.start, start)
            assert touched <= 0, f"{r} reads {touched} bytes of a tensor of {length}"
    assert store.counts.bytes_written == 0
    assert reread(folder(name)) == before
    assert not set(store.counts.calls) - {"size", "read", "read_ranges", "list"}


def test_reading_one_tensor_reads_its_bytes_only() -> None:
    store = CountingStore(open_store(folder("z3_fp32_subgroups_w3")))
    source = open_source(store)
    store.reset()
    t = source.catalog.find_canonical("optim.state.embed.weight.exp_avg")
    values = assemble(source, t)
    # The first read also compares the step of every sub-group between the three ranks, 4 bytes each.
    assert store.counts.bytes_read - values.numel() * 4 == 4 * 3 * 4
    store.reset()
    assemble(source, t)
    assert store.counts.bytes_read == values.numel() * 4


# ---- rows


def test_roles_keys_and_names() -> None:
    catalog = open_source(folder("z1_bf16_w3")).catalog
    row = catalog.tensor(catalog.find("optim.state.blocks.0.mix.weight.exp_avg_sq"))
    assert (row.role, row.fqn, row.state, row.dtype, row.shape) == (Role.STATE, "blocks.0.mix.weight", "exp_avg_sq", "float32", (9, 9, 3))
    row = catalog.tensor(catalog.find("model.blocks.0.mix.weight"))
    assert (row.role, row.fqn, row.dtype) == (Role.WEIGHT, "blocks.0.mix.weight", "bfloat16")
    row = catalog.tensor(catalog.find("model.table"))
    assert (row.role, row.dtype, row.shape) == (Role.BUFFER, "int64", (2, 3))
    assert row.pattern is None
    assert "FlatBuffer" in catalog.tensor(catalog.find("optim.state.embed.weight.master")).pattern


def test_states_are_whatever_the_optimizer_has() -> None:
    catalog = open_source(folder("z1_fp32_sgd_w2")).catalog
    assert catalog.find_named(Role.STATE, "embed.weight", "momentum_buffer") is not None
    assert catalog.find_named(Role.STATE, "embed.weight", "exp_avg") is None
    assert catalog.find_named(Role.STATE, "embed.weight", "step") is None


@pytest.mark.parametrize("name", ["z1_bf16_tied_w2", "z3_bf16_frozen_tied_w3"])
def test_tied_weights_are_found_under_both_names(name: str) -> None:
    source = open_source(folder(name))
    alias = source.catalog.find_named(Role.WEIGHT, "head.weight")
    assert alias is not None
    assert source.catalog.find_named(Role.MASTER, "head.weight") is None  # once, under the name the optimizer has
    master = assemble(source, source.catalog.find_named(Role.MASTER, "embed.weight"))
    assert torch.equal(assemble(source, alias).bfloat16(), master.bfloat16())


def test_objects() -> None:
    source = open_source(folder("z1_bf16_w3"))
    catalog = source.catalog

    def get(key: str) -> object:
        return source.read_object(catalog.find_object(key))

    step = assemble(source, catalog.find_canonical("optim.state.blocks.1.up.bias.step"))
    assert step.shape == () and step.item() == 2
    assert get("optim.param_groups.0.weight_decay") == 0.1
    assert get("optim.param_groups.1.weight_decay") == 0.0
    assert get("optim.param_groups.0.betas") == (0.9, 0.95)
    assert get("optim.param_groups.1.params")[:3] == ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.up.bias"]
    assert get("lr_scheduler") == {"last_batch_iteration": 1}
    assert get("global_steps") == 2
    assert get("client_state.note") == {"tokens": 12345, "names": ["a", "b"]}
    rng = get("client_state.rng")
    assert isinstance(rng, torch.Tensor) and rng.dtype == torch.uint8 and rng.numel() > 1000
    assert get("optim.loss_scaler")["dynamic"] is False
    assert source.provenance["zero_stage"] == 1 and source.provenance["dp"] == 3 and source.provenance["tag"] == "global_step2"


@pytest.mark.parametrize("name", ["z1_fp16_w2", "z3_fp16_w2"])
def test_loss_scaler(name: str) -> None:
    source = open_source(folder(name))
    scaler = source.read_object(source.catalog.find_object("optim.loss_scaler"))
    assert scaler["cur_scale"] == 64 and scaler["dynamic"] is True and scaler["scale_window"] == 1000 and scaler["dtype"] == "float16"
    assert source.read_object(source.catalog.find_object("optim.dynamic_loss_scale")) is True


@pytest.mark.parametrize("name", ["z0_bf16_adafactor_w2", "z1_bf16_tiny_w8", "z2_bf16_tiny_w5", "z3_fp32_tiny_w1"])
def test_a_parameter_without_elements(name: str) -> None:
    catalog = open_source(folder(name)).catalog
    row = catalog.tensor(catalog.find_named(Role.WEIGHT, "nothing"))
    assert row.shape == (0, 3) and catalog.find_named(Role.MASTER, "nothing") is None


@pytest.mark.parametrize("name", ["z1_bf16_tiny_w1", "z2_bf16_tiny_w5", "z3_bf16_tiny_w6"])
def test_a_buffer_that_is_not_persistent_is_not_there(name: str) -> None:
    catalog = open_source(folder(name)).catalog
    assert catalog.find_named(Role.BUFFER, "temperature") is not None and catalog.find_canonical("model.scratch") is None


def test_hyperparameters_name_all_parameters_of_several_subgroups() -> None:
    source = open_source(folder("z3_fp32_subgroups_w3"))
    names = [source.read_object(source.catalog.find_object(f"optim.param_groups.{i}.params")) for i in (0, 1)]
    masters = {source.catalog.tensor(t).fqn for t in range(source.catalog.n_tensors) if source.catalog.tensor(t).role == Role.MASTER}
    assert set(names[0]) | set(names[1]) == masters and not set(names[0]) & set(names[1])
    assert "embed.weight" in names[0] and "blocks.0.norm.bias" in names[1]


def test_a_class_of_the_users_is_an_error_where_it_is_read_and_nowhere_else(copy) -> None:
    path = copy("z1_bf16_w3")
    model = path / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=True)
    state["trainer"] = {"config": Config(3)}
    torch.save(state, model)
    source = open_source(path)
    row = source.catalog.find_object("client_state.trainer")
    with pytest.raises(UnsafePickleError, match=r"Config.*allow_classes"):
        source.read_object(row)
    assert source.read_object(row, allow_classes=[Config])["config"].value == 3


class Config:
    def __init__(self, value: int) -> None:
        self.value = value


def test_source_pickles() -> None:
    source = pickle.loads(pickle.dumps(open_source(folder("z1_bf16_w3"))))
    assert source.read_object(source.catalog.find_object("client_state.rng")).dtype == torch.uint8
    assert assemble(source, 0).shape == source.catalog.shape_of(0)


def test_records_may_be_parsed_elsewhere_and_joined_in_any_order() -> None:
    """D15: a record is plain data; who parses which file does not matter."""
    asked: list[str] = []

    def elsewhere(paths, parse):
        asked.extend(paths)
        return [pickle.loads(pickle.dumps(parse(p))) for p in reversed(paths)]

    name = "z3_bf16_frozen_tied_w3"
    shared, alone = open_source(folder(name), parse_all=elsewhere), open_source(folder(name))
    assert len(asked) == 6
    assert {k: bytes(v) for k, v in shared.catalog.to_sections().items()} == {k: bytes(v) for k, v in alone.catalog.to_sections().items()}


# ---- where it is


def test_root_tag_folder_and_tag_are_the_same_checkpoint() -> None:
    root = folder("z1_bf16_w3")
    keys = open_source(root).catalog.keys
    assert open_source(root / "global_step2").catalog.keys == keys
    assert open_source(str(root), tag="global_step2").catalog.keys == keys
    assert open_source(f"file://{root}/global_step2").catalog.keys == keys


def test_wrong_tags_list_those_that_exist(copy) -> None:
    root = copy("z1_bf16_w3")
    with pytest.raises(CheckpointNotFoundError, match="global_step2"):
        open_source(root, tag="global_step9")
    with pytest.raises(CheckpointNotFoundError, match="global_step2"):
        open_source(root / "global_step9")
    (root / "latest").write_text("global_step7")
    with pytest.raises(CheckpointNotFoundError, match=r"latest.*global_step7.*global_step2"):
        open_source(root)
    (root / "latest").unlink()
    assert open_source(root).provenance["tag"] == "global_step2"
    shutil.copytree(root / "global_step2", root / "global_step4")
    with pytest.raises(FormatError, match=r"global_step2.*global_step4"):
        open_source(root)
    (root / "latest").write_text("../elsewhere")
    with pytest.raises(FormatError):
        open_source(root)


# ---- damage


def rank_file(root: Path, rank: int) -> Path:
    return next((root / "global_step2").glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


@pytest.mark.parametrize("name", ["z1_bf16_w3", "z3_fp32_subgroups_w3"])
def test_missing_and_foreign_files_are_named(copy, name: str) -> None:
    root = copy(name)
    path = rank_file(root, 1)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=path.name):
        open_source(root)
    path.write_bytes(data)
    extra = path.with_name(path.name.replace("rank_1_", "rank_3_"))
    extra.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=extra.name):
        open_source(root)


def test_a_missing_last_rank_is_noticed(copy) -> None:
    root = copy("z1_bf16_w4")
    rank_file(root, 3).unlink()
    with pytest.raises(CorruptCheckpointError, match="rank_3_"):
        open_source(root)


@pytest.mark.parametrize("name", ["z2_fp32_w4", "z3_bf16_w2"])
def test_every_truncation_is_noticed_and_named(copy, name: str) -> None:
    root = copy(name)
    for path in sorted((root / "global_step2").glob("*.pt")):
        data = path.read_bytes()
        for keep in (0, 1, 21, 200, len(data) // 3, len(data) - 200, len(data) - 21, len(data) - 1):
            path.write_bytes(data[:keep])
            with pytest.raises(UCPError, match=path.name):
                open_source(root)
        path.write_bytes(data)
    open_source(root)


def test_rank_files_of_another_model_or_world_are_noticed(copy) -> None:
    root = copy("z1_bf16_w3")
    shutil.copy(rank_file(folder("z1_bf16_w4"), 1), rank_file(root, 1))
    with pytest.raises(CorruptCheckpointError, match="rank_1_"):
        open_source(root)
    root = copy("z2_fp32_w4")
    shutil.copy(folder("z2_fp32_odd_w3") / "global_step2" / "mp_rank_00_model_states.pt", root / "global_step2")
    with pytest.raises(CorruptCheckpointError, match="mp_rank_00_model_states"):
        open_source(root)


@pytest.fixture
def deepspeed_classes(monkeypatch: pytest.MonkeyPatch):
    """torch.load needs DeepSpeed's classes to rewrite a file; stand-ins that keep their state."""
    import enum
    import sys
    import types

    class Stage(enum.IntEnum):
        one = 1
        two = 2
        three = 3

    for module, name, value in (
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", Stage),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", type("LossScaler", (), {})),
        ("deepspeed.utils.tensor_fragment", "fragment_address", type("fragment_address", (), {})),
    ):
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            full = ".".join(parts[:i])
            if full not in sys.modules:
                monkeypatch.setitem(sys.modules, full, types.ModuleType(full))
        value.__module__, value.__qualname__, value.__name__ = module, name, name
        monkeypatch.setattr(sys.modules[module], name, value, raising=False)


def load(path: Path) -> dict:
    return torch.load(path, weights_only=False)


@pytest.mark.usefixtures("deepspeed_classes")
class TestInconsistent:
    """Files that parse, but do not fit together."""

    def rewrite(self, path: Path, change) -> None:
        state = load(path)
        change(state.get("optimizer_state_dict", state))
        torch.save(state, path)

    def check(self, root: Path, path: Path, change, error=CorruptCheckpointError, match: str = "") -> None:
        self.rewrite(path, change)
        with pytest.raises(error, match=path.name + ".*" + match):
            open_source(root)

    def test_other_step(self, copy) -> None:
        root = copy("z1_bf16_w3")
        path = rank_file(root, 2)

        def change(s):
            for own in s["base_optimizer_state"]["state"].values():
                own["step"] += 1

        self.rewrite(path, change)
        source = open_source(root)  # no tensor byte is read yet
        with pytest.raises(CorruptCheckpointError, match=path.name + ".*step.*3.*2.*two saves"):
            assemble(source, source.catalog.find_canonical("model.embed.weight"))

    def test_short_partition(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["single_partition_of_fp32_groups"][0] = s["single_partition_of_fp32_groups"][0][:-2].clone()

        self.check(root, rank_file(root, 0), change, match="elements")

    def test_short_state(self, copy) -> None:
        root = copy("z3_bf16_w2")

        def change(s):
            own = s["optimizer_state_dict"]["state"][0]
            own["exp_avg"] = own["exp_avg"][:-1].clone()

        self.check(root, rank_file(root, 1), change, match="exp_avg.*elements")

    def test_other_dtype(self, copy) -> None:
        root = copy("z3_bf16_w2")

        def change(s):
            s["fp32_flat_groups"][0] = s["fp32_flat_groups"][0].double()

        self.check(root, rank_file(root, 1), change, match="float64")

    def test_missing_state(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            del s["base_optimizer_state"]["state"][1]["exp_avg_sq"]

        self.check(root, rank_file(root, 1), change, match="exp_avg")

    def test_missing_group(self, copy) -> None:
        root = copy("z1_bf16_w3")
        self.check(root, rank_file(root, 1), lambda s: s["single_partition_of_fp32_groups"].pop(), match="1 flat fp32 groups")

    def test_wrong_padding(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["group_paddings"][0] += 2

        self.check(root, rank_file(root, 2), change, match="group_paddings")

    def test_wrong_mapping(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            next(iter(s["param_slice_mappings"][0].values())).start = 1

        self.check(root, rank_file(root, 0), change, match="param_slice_mappings")

    def test_the_mapping_does_not_count_with_round_robin(self, copy) -> None:
        root = copy("z2_bf16_roundrobin_w3")
        self.rewrite(rank_file(root, 0), lambda s: s["param_slice_mappings"][0].clear())
        open_source(root)

    def test_other_shapes(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["param_shapes"][0]["embed.weight"] = torch.Size([22, 9])

        self.rewrite(root / "global_step2" / "mp_rank_00_model_states.pt", change)
        with pytest.raises(CorruptCheckpointError, match=r"optim_states.*shapes in .*mp_rank_00_model_states"):
            open_source(root)

    def test_module_of_other_shape(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["module"]["embed.weight"] = s["module"]["embed.weight"].t()

        self.check(root, root / "global_step2" / "mp_rank_00_model_states.pt", change, match="embed.weight")

    def test_models_of_two_saves(self, copy) -> None:
        root = copy("z3_bf16_w2")

        def change(s):
            s["global_steps"] = 7

        self.check(root, root / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt", change, match="two saves")

    def test_other_world_size(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["dp_world_size"] = 2

        self.check(root, root / "global_step2" / "mp_rank_00_model_states.pt", change, match="dp_world_size")

    def test_missing_fragment(self, copy) -> None:
        root = copy("z3_bf16_frozen_tied_w3")

        def change(s):
            s["frozen_param_fragments"].pop("blocks.0.mix.weight")

        self.check(root, root / "global_step2" / "zero_pp_rank_2_mp_rank_00_model_states.pt", change, match="blocks.0.mix.weight")

    def test_state_of_another_shape_is_refused(self, copy) -> None:
        root = copy("z1_bf16_w3")

        def change(s):
            s["base_optimizer_state"]["state"][0]["row"] = torch.zeros(3, 4)

        for rank in (1, 2):
            self.rewrite(rank_file(root, rank), change)
        self.check(root, rank_file(root, 0), change, UnsupportedError, "row")

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (lambda s: s.update(zero_stage=4), "zero_stage"),
            (lambda s: s.update(base_optimizer_state=[]), "elastic"),
            (lambda s: s.update(partition_count=[3, 1]), "only one data-parallel size"),
        ],
    )
    def test_unsupported(self, copy, change, what: str) -> None:
        root = copy("z1_bf16_w3")
        for rank in (2, 1):
            self.rewrite(rank_file(root, rank), change)
        self.check(root, rank_file(root, 0), change, UnsupportedError, what)

    def test_unsupported_configurations(self, copy) -> None:
        root = copy("z3_bf16_w2")
        path = rank_file(root, 0)
        for key, value in (("mics_shard_size", 2), ("zero_hpz_partition_size", 2), ("offload_optimizer", {"device": "nvme"})):
            state = load(path)
            zero = state["ds_config"]["zero_optimization"]
            zero[key] = value
            torch.save(state, path)
            with pytest.raises(UnsupportedError, match=r"MiCS|hpZ|NVMe"):
                open_source(root)
            del zero[key]
            torch.save(state, path)
        open_source(root)

    def test_unsupported_model_states(self, copy) -> None:
        root = copy("z1_bf16_w3")
        path = root / "global_step2" / "mp_rank_00_model_states.pt"
        original = path.read_bytes()
        for change, what in (
            (lambda s: s.update(mp_world_size=2), "mp_world_size"),
            (lambda s: s.update(num_experts=[4]), "experts"),
            (lambda s: s.update(module=None), "pipeline"),
            (lambda s: s.update(param_shapes=None), "param_shapes"),
        ):
            self.check(root, path, change, UnsupportedError, what)
            path.write_bytes(original)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline"),
        ("layer_00-model_states.pt", "pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture-of-experts"),
    ],
)
def test_other_parallelism_is_refused_by_name(copy, name: str, what: str) -> None:
    root = copy("z1_bf16_w3")
    (root / "global_step2" / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match=what):
        open_source(root)


def test_all_optimizer_files_missing(copy) -> None:
    for name, match in (("z1_bf16_w3", "saved with ZeRO, but no"), ("z3_bf16_w2", "stage 3, but no")):
        root = copy(name)
        for path in (root / "global_step2").glob("*optim_states.pt"):
            path.unlink()
        with pytest.raises(CorruptCheckpointError, match=match):
            open_source(root)


def test_files_of_two_stages_in_one_folder(copy) -> None:
    root = copy("z1_bf16_w3")
    source = folder("z3_fp32_subgroups_w3") / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(source, root / "global_step2")
    with pytest.raises(CorruptCheckpointError, match="two saves"):
        open_source(root)


def test_something_else_in_a_rank_file(copy) -> None:
    root = copy("z1_bf16_w3")
    path = rank_file(root, 0)
    for value in ([1, 2], {"weights": torch.zeros(2)}):
        torch.save(value, path)
        with pytest.raises(FormatError, match=path.name):
            open_source(root)


def test_records_alone() -> None:
    store = open_store(folder("z1_bf16_w3"))
    paths = sorted(entry.path for entry in store.list("global_step2/"))
    records = [parse_file(store, path) for path in paths]
    catalog, _, provenance, _ = catalog_from_records(records)
    assert catalog.n_tensors and provenance["dp"] == 3
    with pytest.raises(CorruptCheckpointError, match="model states are missing"):
        catalog_from_records([r for r in records if r["kind"] == "optim"])


# ---- the geometry


def test_partition_size() -> None:
    assert partition_size(22, 3) == 8  # 22 -> 24 = 4 * (2 * 3)
    assert partition_size(24, 3) == 8
    assert partition_size(2, 4) == 2  # three ranks hold padding only


def test_worked_example_of_a_group() -> None:
    """numels 10, 7, 5 over 3 ranks: partitions of 8."""
    pieces, total, size = pieces_of_group([("a", (10,)), ("b", (7,)), ("c", (5,))], [0, 0, 0], 3)
    assert (total, size) == (22, 8)
    got = [(p.name, p.rank.tolist(), p.start.tolist(), p.boxes[:, :, 0].tolist()) for p in pieces]
    assert got == [
        ("a", [0, 1], [0, 0], [[0, 8], [8, 2]]),
        ("b", [1, 2], [2, 0], [[0, 6], [6, 1]]),
        ("c", [2], [1], [[0, 5]]),
    ]


def test_small_parameters_of_stage_3() -> None:
    pieces, size = pieces_of_subgroup([("a", (5,)), ("b", ()), ("c", (0, 3)), ("d", (9,))], 4)
    assert size == 2 + 1 + 0 + 3
    assert pieces[0].rank.tolist() == [0, 1, 2] and pieces[0].boxes[:, :, 0].tolist() == [[0, 2], [2, 2], [4, 1]]
    assert pieces[1].rank.tolist() == [0] and pieces[1].start.tolist() == [2] and pieces[1].boxes.shape == (1, 2, 0)
    assert len(pieces[2].boxes) == 0
    assert pieces[3].start.tolist() == [3, 3, 3]


def test_range_boxes_is_flat_range_to_boxes() -> None:
    rng = np.random.default_rng(5)
    for _ in range(400):
        shape = tuple(int(n) for n in rng.integers(1, 8, size=rng.integers(1, 5)))
        cuts = np.unique(rng.integers(0, np.prod(shape) + 1, size=rng.integers(2, 7))).astype(np.int64)
        if len(cuts) < 2:
            continue
        boxes, owner = range_boxes(shape, cuts[:-1], cuts[1:])
        expected = [(i, b.offset, b.size) for i in range(len(cuts) - 1) for b in flat_range_to_boxes(shape, int(cuts[i]), int(cuts[i + 1]))]
        assert [(i, tuple(b[0]), tuple(b[1])) for i, b in zip(owner.tolist(), boxes.tolist(), strict=True)] == expected
