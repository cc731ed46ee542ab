"""Stock DCP checkpoints, written by plain ``dcp.save``."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from counting_store import CountingStore
from format_helpers import assemble
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, UCPError, UnsafePickleError, UnsupportedError
from ucp_dcp.formats import catalog_from_metadata, open_source
from ucp_dcp.names import Role
from ucp_dcp.storage.store import open_store

GENERATOR = torch.Generator().manual_seed(3)
TENSORS: dict[str, torch.Tensor] = {
    "plain": torch.randn(4, 5, generator=GENERATOR),
    "transposed": torch.randn(6, 3, generator=GENERATOR).t(),
    "permuted": torch.randn(3, 4, 5, generator=GENERATOR).permute(2, 0, 1),
    "sliced": torch.randn(10, 10, generator=GENERATOR)[::2, 1:5],
    "broadcast": torch.ones(1, 3).expand(4, 3),
    "bf16": torch.randn(33, 7, generator=GENERATOR).bfloat16(),
    "fp8": torch.randn(16, generator=GENERATOR).to(torch.float8_e4m3fn),
    "int8": torch.arange(5, dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64, generator=GENERATOR),
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 4),
    "large": torch.randn(200, 100, generator=GENERATOR),
    "parameter": torch.nn.Parameter(torch.randn(3, generator=GENERATOR)),
}


def save(state: dict[str, Any], path: Path, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **kwargs), no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "c"
    state = {
        "model": dict(TENSORS),
        "list": [torch.ones(2), {"x": torch.full((3,), 2.0)}],
        "step": 7,
        "nested": {"options": {"lr": 0.1, "names": ["a", "b"]}, "text": "hello"},
    }
    save(state, path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "c")
    return tmp_path / "c"


def test_every_tensor(saved: Path) -> None:
    source = open_source(saved)
    assert source.format == "dcp"
    for name, value in TENSORS.items():
        t = source.catalog.find(f"model.{name}")
        row = source.catalog.tensor(t)
        assert row.role == Role.PLAIN and row.path == ("model", name) and row.shape == tuple(value.shape)
        got = assemble(source, t)
        assert got.dtype == value.dtype
        assert torch.equal(got.view(torch.uint8) if name == "fp8" else got, value.view(torch.uint8) if name == "fp8" else value.detach()), (
            name
        )
    assert torch.equal(assemble(source, source.catalog.find("list.1.x")), torch.full((3,), 2.0))
    assert source.catalog.tensor(source.catalog.find("list.1.x")).path == ("list", 1, "x")


def test_strides_are_kept_as_stored(saved: Path) -> None:
    source = open_source(saved)
    t = source.catalog.find("model.transposed")
    assert source.locate(np.arange(*source.catalog.chunk_range(t))).strides == [(1, 3)]


def test_objects(saved: Path) -> None:
    source = open_source(saved)
    objects = {row.key: source.read_object(row) for row in source.catalog.objects}
    assert objects == {"step": 7, "nested.options.lr": 0.1, "nested.options.names": ["a", "b"], "nested.text": "hello"}
    assert source.catalog.find_object("nested.options.lr").path == ("nested", "options", "lr")


@pytest.mark.parametrize("single", [True, False])
def test_one_file_per_item_or_per_rank(tmp_path: Path, single: bool) -> None:
    state = {f"t{i}": torch.full((3, i), float(i)) for i in range(1, 25)}
    save(state, tmp_path / "c", single_file_per_rank=single, thread_count=2)
    source = open_source(tmp_path / "c")
    assert len(source.catalog.files) == (2 if single else 24)
    for key, value in state.items():
        assert torch.equal(assemble(source, source.catalog.find(key)), value)


def test_opening_reads_metadata_only_and_items_cost_one_read(tmp_path: Path) -> None:
    state = {f"layer{i:03d}": torch.full((40, 50), float(i)) for i in range(100)}
    state["t"] = torch.randn(50, 40).t()
    save(state, tmp_path / "c")
    store = CountingStore(open_store(tmp_path / "c"))
    source = open_source(store)
    assert {r.path for r in store.counts.ranges} == {".metadata"}
    store.reset()
    chunks = np.arange(source.catalog.n_chunks)
    located = source.locate(chunks)
    # A head of 1 KiB each; the whole directory for the first of each kind only.
    assert store.counts.bytes_read < 101 * 1024 + 2 * 8192
    assert store.counts.calls["read_ranges"] <= 8
    store.reset()
    again = source.locate(chunks[::-1])
    assert store.counts.requests == 0
    assert np.array_equal(again.offset[::-1], located.offset) and again.strides[::-1] == located.strides
    for t in range(source.catalog.n_tensors):
        assert torch.equal(assemble(source, t), state[source.catalog.keys[t]])


def test_source_pickles(saved: Path) -> None:
    source = pickle.loads(pickle.dumps(open_source(saved)))
    assert torch.equal(assemble(source, source.catalog.find("model.plain")), TENSORS["plain"])


def test_sharded_tensors_and_uneven_chunks(tmp_path: Path) -> None:
    """A two-rank layout, written by the stock writer as two chunks per tensor."""
    whole = torch.randn(5, 6)
    rewrite_as_two_chunks(tmp_path / "c", whole)
    source = open_source(tmp_path / "c")
    t = source.catalog.find("w")
    assert source.catalog.boxes(t).tolist() == [[[0, 0], [3, 6]], [[3, 0], [2, 6]]]
    assert torch.equal(assemble(source, t), whole)


def rewrite_as_two_chunks(path: Path, whole: torch.Tensor) -> None:
    save({"a": whole[:3].clone(), "b": whole[3:].clone()}, path)
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 6])), ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([2, 6]))]
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.state_dict_metadata = {"w": TensorStorageMetadata(TensorProperties(whole.dtype), whole.size(), chunks)}
    metadata.storage_data = {MetadataIndex("w", torch.Size([0, 0])): places["a"], MetadataIndex("w", torch.Size([3, 0])): places["b"]}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def change(path: Path, edit: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


# ---- roles left by our save planner


def test_roles_in_planner_data(copy: Path) -> None:
    def edit(m: Metadata) -> None:
        m.planner_data["ucp_dcp"] = {
            "version": 1,
            "tensors": {"model.plain": [2, "net.w", "exp_avg", "tp: Shard(0)"], "model.int8": [0, "i", ""]},
        }

    change(copy, edit)
    catalog = open_source(copy).catalog
    row = catalog.tensor(catalog.find_named(Role.STATE, "net.w", "exp_avg"))
    assert row.key == "model.plain" and row.pattern == "tp: Shard(0)"
    assert catalog.find_canonical("model.i") == catalog.find("model.int8")
    live = catalog_from_metadata(pickle.loads((copy / ".metadata").read_bytes()))
    assert live.find_named(Role.STATE, "net.w", "exp_avg") is not None


@pytest.mark.parametrize("entry", [[9, "a", ""], ["x"], [0, 1, ""], 5, [0, "a", "", 7]])
def test_damaged_roles(copy: Path, entry: Any) -> None:
    change(copy, lambda m: m.planner_data.update(ucp_dcp={"tensors": {"model.plain": entry}}))
    with pytest.raises(CorruptCheckpointError, match=r"model\.plain"):
        open_source(copy)


def test_a_users_own_entry_of_that_name_is_not_ours(tmp_path: Path) -> None:
    save({"ucp_dcp": torch.ones(2)}, tmp_path / "c")
    assert open_source(tmp_path / "c").catalog.keys == ("ucp_dcp",)


# ---- live metadata


def test_catalog_from_live_metadata(saved: Path) -> None:
    live = catalog_from_metadata(dcp.FileSystemReader(saved).read_metadata())
    stored = open_source(saved).catalog
    assert live.keys == stored.keys and [r.key for r in live.objects] == [r.key for r in stored.objects]
    for t in range(stored.n_tensors):
        assert live.tensor(t) == stored.tensor(t)
        assert np.array_equal(live.boxes(t), stored.boxes(t))


def test_live_metadata_without_storage_data() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4]), chunks)
    catalog = catalog_from_metadata(Metadata({"a": tensor, "b": BytesStorageMetadata()}))
    assert catalog.tensor(0).dtype == "bfloat16" and catalog.find_object("b") is not None
    with pytest.raises(UnsupportedError, match="int"):
        catalog_from_metadata(Metadata({"a": 5}))
    with pytest.raises(FormatError):
        catalog_from_metadata(Metadata(5))


# ---- damage and attacks


class Attack:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "storage_data", "state_dict_metadata", "version"])
def test_code_in_metadata_is_never_run(copy: Path, tmp_path: Path, field: str) -> None:
    change(copy, lambda m: setattr(m, field, Attack(tmp_path / "canary")))
    with pytest.raises(UnsafePickleError, match="system"):
        open_source(copy)
    assert not (tmp_path / "canary").exists()


def test_code_in_an_object_is_never_run(tmp_path: Path) -> None:
    save({"x": Attack(tmp_path / "canary"), "w": torch.ones(2)}, tmp_path / "c")
    source = open_source(tmp_path / "c")
    with pytest.raises(UnsafePickleError, match=r"object 'x'.*system"):
        source.read_object(source.catalog.find_object("x"))
    assert not (tmp_path / "canary").exists()
    assert torch.equal(assemble(source, 0), torch.ones(2))


def test_missing_and_truncated_files(copy: Path) -> None:
    data = (copy / "__0_0.distcp").read_bytes()
    (copy / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*truncated"):
        open_source(copy)
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*missing"):
        open_source(copy)


def test_a_file_of_another_save(copy: Path, tmp_path: Path) -> None:
    """As long as the right one, but the items are elsewhere."""
    size = (copy / "__0_0.distcp").stat().st_size
    (copy / "__0_0.distcp").write_bytes(bytes(size))
    source = open_source(copy)
    with pytest.raises(FormatError, match=r"model\.plain.*__0_0\.distcp"):
        assemble(source, source.catalog.find("model.plain"))


def test_items_swapped(copy: Path) -> None:
    def edit(m: Metadata) -> None:
        at = {index.fqn: index for index in m.storage_data}
        a, b = at["model.plain"], at["model.int8"]
        m.storage_data[a], m.storage_data[b] = m.storage_data[b], m.storage_data[a]

    change(copy, edit)
    source = open_source(copy)
    with pytest.raises(CorruptCheckpointError, match=r"model\.plain.*float32 \[4, 5\]"):
        assemble(source, source.catalog.find("model.plain"))


def test_metadata_that_does_not_fit(copy: Path) -> None:
    original = (copy / ".metadata").read_bytes()

    def place(m: Metadata, **fields: Any) -> None:
        info = next(v for k, v in m.storage_data.items() if k.fqn == "model.plain")
        for name, value in fields.items():
            setattr(info, name, value)

    edits = [
        (lambda m: place(m, offset=2**62), CorruptCheckpointError),
        (lambda m: place(m, offset=-1), CorruptCheckpointError),
        (lambda m: place(m, length=2**62), CorruptCheckpointError),
        (lambda m: place(m, length=10), CorruptCheckpointError),
        (lambda m: place(m, relative_path="../../etc/passwd"), FormatError),
        (lambda m: place(m, relative_path="/etc/passwd"), FormatError),
        (lambda m: place(m, relative_path=None), CorruptCheckpointError),
        (lambda m: place(m, transform_descriptors=["zstd"]), UnsupportedError),
        (lambda m: m.storage_data.clear(), CorruptCheckpointError),
        (lambda m: setattr(m, "storage_data", {1: 2}), UnsupportedError),
        (lambda m: setattr(m, "storage_data", None), UnsupportedError),
        (lambda m: setattr(m, "state_dict_metadata", None), FormatError),
        (lambda m: m.state_dict_metadata.update(x=5), UnsupportedError),
        (lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}), CorruptCheckpointError),
        (lambda m: setattr(m.state_dict_metadata["model.plain"], "size", torch.Size([2, 5])), FormatError),
        (lambda m: setattr(m.state_dict_metadata["model.plain"], "size", torch.Size([4])), FormatError),
        (lambda m: setattr(m.state_dict_metadata["model.plain"].chunks[0], "sizes", torch.Size([2**40, 2**40])), CorruptCheckpointError),
        (lambda m: setattr(m.state_dict_metadata["model.plain"], "properties", None), CorruptCheckpointError),
    ]
    for edit, error in edits:
        change(copy, edit)
        with pytest.raises(error):
            open_source(copy)
        (copy / ".metadata").write_bytes(original)
    open_source(copy)


def test_damaged_metadata(copy: Path) -> None:
    original = (copy / ".metadata").read_bytes()
    for data in (b"", b"abc", original[: len(original) // 2], pickle.dumps([1, 2]), pickle.dumps({"state_dict_metadata": {}})):
        (copy / ".metadata").write_bytes(data)
        with pytest.raises(UCPError, match=r"\.metadata"):
            open_source(copy)


def test_without_collectives_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="use_collectives"):
        open_source(tmp_path)


# ---- detection


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing here"):
        open_source(tmp_path / "none")


def test_something_else_lists_what_is_known_and_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "y").write_text("y")
    with pytest.raises(FormatError, match=r"ucp\.json.*\.metadata.*DeepSpeed.*Found: folder/, notes\.txt"):
        open_source(tmp_path)
    (tmp_path / "latest").write_text("x")  # a file of that name is not DeepSpeed yet
    with pytest.raises(FormatError, match=r"Found"):
        open_source(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(CheckpointNotFoundError, match=r"latest_checkpointed_iteration\.txt names iter_0000001, which holds no checkpoint"):
        open_source(tmp_path)


def test_stores_and_urls(saved: Path) -> None:
    keys = open_source(saved).catalog.keys
    for url in (str(saved), f"file://{saved}", open_store(saved)):
        assert open_source(url).catalog.keys == keys
