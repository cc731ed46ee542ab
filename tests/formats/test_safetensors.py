"""Safetensors checkpoints: files written by the safetensors library and by torch's HuggingFaceStorageWriter, on real ranks."""

from __future__ import annotations

import json
import pickle
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from counting_store import CountingStore
from format_helpers import assemble
from meshes import Groups, cut, dtensor, fresh_meshes
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard
from typer.testing import CliRunner

import ucp_dcp
from ucp_dcp.cli.app import app
from ucp_dcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    CoverageError,
    FormatError,
    ShapeMismatchError,
    UnsupportedError,
)
from ucp_dcp.formats import open_source
from ucp_dcp.formats.safetensors import SafetensorsSource, at_file, parse_header
from ucp_dcp.names import Role
from ucp_dcp.storage.fsspec_store import FsspecStore
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.store import open_store

INDEX = "model.safetensors.index.json"
GENERATOR = torch.Generator().manual_seed(5)


def packed(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape).view(torch.float4_e2m1fn_x2)


TENSORS: dict[str, torch.Tensor] = {
    "model.embed.weight": torch.randn(11, 6, generator=GENERATOR),
    "model.norm.weight": torch.randn(6, generator=GENERATOR).bfloat16(),
    "f16": torch.randn(3, 5, generator=GENERATOR).half(),
    "f64": torch.randn(3, generator=GENERATOR).double(),
    "e4m3": torch.randn(16, generator=GENERATOR).to(torch.float8_e4m3fn),
    "e5m2": torch.randn(5, generator=GENERATOR).to(torch.float8_e5m2),
    "e8m0": torch.arange(7, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "fp4": packed(3, 4),
    "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "i8": torch.arange(5, dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64, generator=GENERATOR),
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 4),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_indexed(folder: Path, tensors: dict[str, torch.Tensor], files: int = 2) -> None:
    """A model folder as ``save_pretrained`` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for n in range(files):
        part = dict(list(tensors.items())[n::files])
        name = f"model-{n + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(t.nbytes for t in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text("{}")


def write(path: Path, header: Any, body: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


# ---- what the safetensors library writes


@pytest.fixture(params=["file", "folder", "index", "indexed folder", "memory"])
def saved(request: Any, tmp_path: Path) -> Any:
    """The URL of a checkpoint that holds TENSORS."""
    if "index" in request.param:
        save_indexed(tmp_path / "m", TENSORS, 3)
        return tmp_path / "m" / (INDEX if request.param == "index" else "")
    (tmp_path / "m").mkdir()
    save_file(TENSORS, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    if request.param == "memory":
        store = FsspecStore.from_url("memory://safetensors")
        store.put("weights.safetensors", (tmp_path / "m/model.safetensors").read_bytes())
        return "memory://safetensors/weights.safetensors"
    return tmp_path / "m" / ("model.safetensors" if request.param == "file" else "")


def test_every_tensor(saved: Any) -> None:
    source = pickle.loads(pickle.dumps(open_source(saved)))
    assert source.format == "safetensors" and source.provenance == {"format": "pt"}
    assert list(source.catalog.keys) == sorted(TENSORS)
    for name, value in TENSORS.items():
        t = source.catalog.find_named(Role.WEIGHT, name)
        row = source.catalog.tensor(t)
        assert (row.key, row.shape, row.dtype) == (name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
    checkpoint = ucp_dcp.open_checkpoint(saved)
    for name, value in TENSORS.items():
        got = checkpoint[f"model.{name}"].read()
        assert got.dtype == value.dtype and raw(got) == raw(value), name


def test_loading_by_role_and_by_key(saved: Any) -> None:
    wanted = {name: torch.zeros_like(TENSORS[name]) for name in ("model.embed.weight", "model.norm.weight")}
    report = ucp_dcp.load({"net": dict(wanted)}, saved, roots={"net": "model"})
    assert all(torch.equal(wanted[name], TENSORS[name]) for name in wanted) and len(report.unexpected) == len(TENSORS) - 2
    flat = {name: torch.zeros(TENSORS[name].shape) for name in wanted}
    ucp_dcp.load(flat, saved)
    assert all(torch.equal(flat[name], TENSORS[name].float()) for name in wanted)
    with pytest.raises(ShapeMismatchError, match=r"model\.embed\.weight"):
        ucp_dcp.load({"model.embed.weight": torch.zeros(11, 7)}, saved)


def test_a_tied_weight_that_save_model_left_out(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    from safetensors.torch import save_model

    written, net = Net(), Net()
    save_model(written, str(tmp_path / "model.safetensors"))
    assert len(open_source(tmp_path).catalog.keys) == 1
    ucp_dcp.load({"model": net.state_dict()}, tmp_path, roots={"model": "model"})
    assert torch.equal(net.head.weight, written.embed.weight) and net.head.weight is net.embed.weight


def test_opening_reads_headers_and_a_slice_its_own_bytes(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(1000, 256, generator=GENERATOR) for i in range(4)}
    save_indexed(tmp_path, tensors)
    store = CountingStore(LocalStore(tmp_path))
    checkpoint = ucp_dcp.open_checkpoint(store)
    files = sorted(tmp_path.glob("*.safetensors"))
    headers = {f.name: 8 + int.from_bytes(f.read_bytes()[:8], "little") for f in files}
    assert {name: store.counts.bytes_of(name) for name in headers} == headers
    store.reset()
    assert torch.equal(checkpoint["model.w2"][500:502], tensors["w2"][500:502])
    assert store.counts.bytes_read == 2 * 256 * 4
    store.reset()
    assert torch.equal(checkpoint["model.w1"][:, 3:5], tensors["w1"][:, 3:5])
    assert store.counts.bytes_read <= 1000 * 256 * 4


def test_on_s3(seaweed_server: Any, tmp_path: Path) -> None:
    """By the URL of a folder, of its index, and of one file."""
    save_indexed(tmp_path, TENSORS)
    options = seaweed_server.storage_options
    url = f"s3://bucket/{uuid.uuid4().hex}"
    store = open_store(url, **options)
    for file in tmp_path.iterdir():
        store.put(file.name, file.read_bytes())
    for where in (url, f"{url}/{INDEX}"):
        checkpoint = ucp_dcp.open_checkpoint(where, storage_options=options)
        assert len(checkpoint) == len(TENSORS)
        assert torch.equal(checkpoint["model.model.embed.weight"][3:5], TENSORS["model.embed.weight"][3:5])
    one = ucp_dcp.open_checkpoint(f"{url}/model-00001-of-00002.safetensors", storage_options=options)
    assert 0 < len(one) < len(TENSORS) and torch.equal(one["model.model.embed.weight"].read(), TENSORS["model.embed.weight"])
    assert ucp_dcp.verify(f"{url}/model-00001-of-00002.safetensors", storage_options=options).ok
    with pytest.raises(CheckpointNotFoundError):
        ucp_dcp.open_checkpoint(f"{url}/other.safetensors", storage_options=options)
    assert at_file(open_store("s3://bucket.safetensors", **options)) is None


def test_an_index_decides_where_a_tensor_lies(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "x": torch.ones(3)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "2.safetensors")
    save_file({"a": torch.full((2,), 9.0)}, tmp_path / "other.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert ucp_dcp.open_checkpoint(tmp_path)["model.a"].read().tolist() == [1, 1]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "x": "1.safetensors"}}))
    assert ucp_dcp.open_checkpoint(tmp_path)["model.a"].read().tolist() == [0, 0]
    (tmp_path / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"'a' lies in 1\.safetensors and in 2\.safetensors"):
        open_source(tmp_path)
    assert ucp_dcp.open_checkpoint(tmp_path / "other.safetensors")["model.a"].read().tolist() == [9, 9]


def test_which_files_of_a_folder(tmp_path: Path) -> None:
    for name, value in (("model.safetensors", 1.0), ("model.fp16.safetensors", 2.0)):
        save_file({"a": torch.full((2,), value)}, tmp_path / name)
    assert ucp_dcp.open_checkpoint(tmp_path)["model.a"].read().tolist() == [1, 1]
    assert ucp_dcp.verify(tmp_path).unknown_files == ["model.fp16.safetensors"]
    (tmp_path / "unet.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.fp16.safetensors"}}))
    (tmp_path / "model.safetensors").unlink()
    assert ucp_dcp.open_checkpoint(tmp_path)["model.a"].read().tolist() == [2, 2]
    (tmp_path / "vae.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(FormatError, match=r"unet\.safetensors\.index\.json, vae"):
        open_source(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    save_indexed(tmp_path, TENSORS, 3)
    lost = "model-00002-of-00003.safetensors"
    (tmp_path / lost).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{INDEX} names the file '{lost}', which is missing"):
        open_source(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{lost} is missing"):
        open_source(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        open_source(tmp_path / lost)
    (tmp_path / "snapshots").mkdir()
    for file in tmp_path.glob("model*"):
        file.rename(tmp_path / "snapshots" / file.name)
    with pytest.raises(FormatError, match="open one of these: snapshots"):
        open_source(tmp_path)


def test_an_index_and_a_file_disagree(tmp_path: Path) -> None:
    save_indexed(tmp_path, TENSORS)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["more"] = index["weight_map"]["f16"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="'more' should lie in model-0000"):
        open_source(tmp_path)


def test_a_cache_of_links(tmp_path: Path) -> None:
    """Hugging Face's cache links every file of a snapshot to a shared pool: not followed, unless asked for."""
    pool, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    pool.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, pool / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    for url in (snapshot, snapshot / "model.safetensors"):
        with pytest.raises(FormatError, match="links_outside=True"):
            ucp_dcp.open_checkpoint(url)
        checkpoint = ucp_dcp.open_checkpoint(url, storage_options={"links_outside": True})
        assert checkpoint["model.a"].read().tolist() == [1, 1]


def test_show_and_verify(tmp_path: Path) -> None:
    save_indexed(tmp_path, TENSORS)
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--tensors"])
    assert shown.exit_code == 0 and "safetensors" in shown.output and "model.fp4" in shown.output
    found = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    report = json.loads(found.output)
    size = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert found.exit_code == 0 and report["files"] == 2
    assert (report["bytes_verified"], report["bytes_unverifiable"]) == (0, size) and "no digests" in report["notes"][0]
    (file, _) = sorted(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    found = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert found.exit_code == 1 and file.name in found.output.replace("\n", "")
    single = CliRunner().invoke(app, ["verify", str(sorted(tmp_path.glob("*.safetensors"))[1])])
    assert single.exit_code == 0


# ---- what torch's HuggingFaceStorageWriter writes


STATE = {
    "rows": torch.randn(10, 6, generator=GENERATOR),
    "columns": torch.randn(4, 9, generator=GENERATOR).bfloat16(),
    "block": torch.randn(7, 8, generator=GENERATOR),
    "whole": torch.randn(5, generator=GENERATOR),
    "one": torch.tensor(3.0),
}
PLACED = {"rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)), "block": (Shard(0), Shard(1))}


def write_shards(rank: int, world: int, url: str, consolidate: bool, files: int) -> None:
    with fresh_meshes():
        mesh = Groups().mesh(2, world // 2)
        state: dict[str, Any] = {k: dtensor(v, mesh, PLACED[k]) if k in PLACED else v for k, v in STATE.items()}
        mapping = {k: i % files + 1 for i, k in enumerate(STATE)} if files > 1 else None
        dcp.save(
            state, storage_writer=HuggingFaceStorageWriter(url, mapping, save_distributed=True, enable_consolidation=consolidate)
        )


def load_on_meshes(rank: int, world: int, url: str) -> list[str]:
    """Names of what is wrong."""
    wrong = []
    with fresh_meshes():
        groups = Groups()
        for shape, placements in (((world,), (Shard(0),)), ((world,), (Shard(1),)), ((2, world // 2), (Shard(1), Shard(0)))):
            mesh = groups.mesh(*shape)
            state: dict[str, Any] = {
                k: dtensor(v, mesh, placements, 7.0) if v.ndim == 2 else torch.zeros_like(v) for k, v in STATE.items()
            }
            ucp_dcp.load({"model": state}, url, roots={"model": "model"})
            for k, v in STATE.items():
                got = state[k].to_local() if isinstance(state[k], DTensor) else state[k]
                want = cut(v, mesh, placements) if v.ndim == 2 else v
                if not torch.equal(got, want):
                    wrong.append(f"{k} on {shape} {placements}")
    return wrong


@pytest.mark.parametrize(("consolidate", "files"), [(False, 1), (False, 2), (True, 2)])
def test_sharded_files_onto_meshes(ranks: Any, tmp_path: Path, consolidate: bool, files: int) -> None:
    ranks.run(4, write_shards, str(tmp_path / "c"), consolidate, files)
    checkpoint = ucp_dcp.open_checkpoint(tmp_path / "c")
    names = {row.path for row in checkpoint.files}
    assert all(name.startswith("model-" if consolidate else "shard-") for name in names) and len(names) >= 2
    assert len(checkpoint["model.block"].chunks) == (1 if consolidate else 4)
    lost = {"one"} if consolidate else set()  # torch 2.13 leaves 0-d tensors zero when it brings shards together
    for name, value in STATE.items():
        assert torch.equal(checkpoint[f"model.{name}"].read(), value * (name not in lost)), name
    found = ranks.run(4, load_on_meshes, str(tmp_path / "c"))
    assert [[w for w in wrong if w.split()[0] not in lost] for wrong in found] == [[]] * 4
    assert ucp_dcp.verify(tmp_path / "c").ok
    if consolidate:  # and the pieces from which it was made
        shards = ucp_dcp.open_checkpoint(tmp_path / "c/sharded")
        assert torch.equal(shards["model.block"].read(), STATE["block"])
        for file in (tmp_path / "c").glob("model*"):
            file.unlink()
        assert {row.path.split("/")[0] for row in ucp_dcp.open_checkpoint(tmp_path / "c").files} == {"sharded"}


def test_one_rank_without_sharding(tmp_path: Path) -> None:
    dcp.save(dict(STATE), storage_writer=HuggingFaceStorageWriter(tmp_path, {k: i % 2 + 1 for i, k in enumerate(STATE)}), no_dist=True)
    source = open_source(tmp_path)
    assert isinstance(source, SafetensorsSource) and source.index == INDEX
    assert all(torch.equal(assemble(source, source.catalog.find(k)), v) for k, v in STATE.items())


def test_shards_that_are_missing_or_stale(ranks: Any, tmp_path: Path) -> None:
    url = tmp_path / "c"
    ranks.run(4, write_shards, str(url), False, 1)
    (url / "shard-00001-model-00001-of-00001.safetensors").rename(tmp_path / "kept")
    checkpoint = ucp_dcp.open_checkpoint(url)
    with pytest.raises(CoverageError, match=r"rows|block"):
        ucp_dcp.load({"rows": torch.zeros(10, 6), "block": torch.zeros(7, 8)}, url)
    with pytest.raises(CoverageError):
        checkpoint["model.block"].read()
    report = ucp_dcp.verify(url)
    assert not report.ok and "block" in str(report) and "a file is missing" in str(report)
    (tmp_path / "kept").rename(url / "shard-00001-model-00001-of-00001.safetensors")
    assert ucp_dcp.verify(url).ok
    # a later save by fewer ranks leaves shards of the first one, which stock loads without a word
    ranks.run(2, write_shards, str(url), False, 1)
    with pytest.raises(CorruptCheckpointError, match=r"shard-0000\d.* both hold the elements .*several saves"):
        open_source(url)


def test_objects_make_torch_write_no_safetensors_file(tmp_path: Path) -> None:
    """Its writer puts objects in front of the header."""
    dcp.save({"w": torch.ones(2), "step": 5}, storage_writer=HuggingFaceStorageWriter(tmp_path), no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="anything but tensors"):
        open_source(tmp_path)


# ---- the rules of the header


def test_padding_and_order_of_a_header_are_free(tmp_path: Path) -> None:
    """Spaces behind the JSON, tensors in any order, fields that nobody knows."""
    header = {"b": entry([2], 4, 12), "__metadata__": {}, "a": {**entry([1], 0, 4), "more": [1]}}
    write(tmp_path / "model.safetensors", json.dumps(header).encode() + b"   ", struct.pack("<3f", 1, 2, 3))
    assert [t.tolist() for t in load_file(tmp_path / "model.safetensors").values()] in ([[1.0], [2.0, 3.0]], [[2.0, 3.0], [1.0]])
    checkpoint = ucp_dcp.open_checkpoint(tmp_path)
    assert checkpoint["model.a"].read().tolist() == [1] and checkpoint["model.b"].read().tolist() == [2, 3]


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
WRONG: list[tuple[str, Any, bytes, str]] = [
    ("no JSON", b"[]", b"", "begins with"),
    ("not a map", b'{"a":5}', b"", "'a'"),
    ("cut JSON", b'{"a":', b"", "damaged"),
    ("two values", b'{"a":{}}{}', b"", "damaged"),
    ("bytes behind", b"{" + ONE + b"}\0\0", b"1234", "damaged"),
    ("a name twice", b"{" + ONE + b"," + ONE + b"}", b"1234", "'a' twice"),
    ("a field twice", b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"1234", "'dtype' twice"),
    ("no shape", {"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "shape"),
    ("a fraction", {"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, b"1234", "int"),
    ("three offsets", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234", "length 2"),
    ("a hole at the start", {"a": entry([1], 4, 8)}, b"12345678", "must begin at 0"),
    ("a hole", {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"123456789012", "end to end"),
    ("an overlap", {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"123456789012", "end to end"),
    ("the same bytes twice", {"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234", "end to end"),
    ("bytes of nobody", {"a": entry([1], 0, 4)}, b"12345", "belong to no tensor"),
    ("beyond the end", {"a": entry([2], 0, 8)}, b"1234", "of 4"),
    ("backwards", {"a": entry([0], 0, -4)}, b"", "'a'"),
    ("too large for its shape", {"a": entry([1], 0, 8)}, b"12345678", "expected 4"),
    ("a negative size", {"a": entry([-1], 0, 4)}, b"1234", "shape"),
    ("a product that overflows", {"a": entry([2**33, 2**33], 0, 4)}, b"1234", "expected"),
    ("a huge size", {"a": entry([10**30], 0, 4)}, b"1234", "'a'"),
    ("very many dims", {"a": entry([1] * 1000, 0, 4)}, b"1234", "shape"),
    ("odd bits", {"a": entry([3], 0, 1, "F4")}, b"1", "expected 1.5"),
    ("metadata that is no text", {"__metadata__": {"a": 1}, "a": entry([1], 0, 4)}, b"1234", "__metadata__"),
    ("deep", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "damaged|'a'"),
    ("text that is no UTF-8", b'{"\xff":' + ONE[4:] + b"}", b"1234", "damaged"),
    ("half a surrogate", b'{"\\ud800":' + ONE[4:] + b"}", b"1234", "damaged"),
]


@pytest.mark.parametrize(("header", "body", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_headers_that_are_wrong(tmp_path: Path, header: Any, body: bytes, text: str) -> None:
    write(tmp_path / "model.safetensors", header, body)
    with pytest.raises(CorruptCheckpointError, match=rf"model\.safetensors.*({text})"):
        open_source(tmp_path)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F128", ""])
def test_dtypes_that_torch_does_not_have(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "model.safetensors", {"a": entry([4], 0, 3, dtype)}, b"123")
    with pytest.raises(UnsupportedError, match=f"model.safetensors: tensor 'a' is of dtype '{dtype}'.*F8_E4M3"):
        open_source(tmp_path)


def test_f4_of_an_odd_last_dim(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": entry([2, 3], 0, 3, "F4")}, b"123")
    with pytest.raises(UnsupportedError, match="even last dim"):
        open_source(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_files_that_are_too_short(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 100)[:size].ljust(size, b" "))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        open_source(tmp_path)


def test_the_length_of_a_header_has_a_limit(tmp_path: Path) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(200_000_000)  # sparse
    with pytest.raises(CorruptCheckpointError, match="at most 100000000"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ("{}", "does not say where tensor 'a'"),
        ('{"a":{"saved_offsets":[]}}', "lies at"),
        ('{"a":{"saved_offsets":[-1]}}', "lies at"),
        ('{"a":{"saved_offsets":[1e30]}}', "int"),
        ('{"a":{"saved_offsets":[1000000000000000000000]}}', "damaged|lies at"),
        ('{"a":{"saved_offsets":[4611686018427387900]}}', "more elements"),
        ('{"a":{"saved_offsets":[0]},"a":{"saved_offsets":[4]}}', "'a' twice"),
        ("5", "DCP_SHARDING_INFO"),
    ],
)
def test_sharding_info_that_is_wrong(tmp_path: Path, info: str, text: str) -> None:
    write(tmp_path / "model.safetensors", {"__metadata__": {"DCP_SHARDING_INFO": info}, "a": entry([1], 0, 4)}, b"1234")
    with pytest.raises(FormatError, match=text):
        open_source(tmp_path)


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    def shard(n: int, offsets: list[int], kind: dict[str, Any]) -> None:
        info = json.dumps({"a": {"saved_offsets": offsets}})
        header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "a": kind}
        write(tmp_path / f"shard-{n:05d}-model-00001-of-00001.safetensors", header, b"1234")

    shard(1, [0], entry([1], 0, 4))
    shard(2, [1], entry([1], 0, 4, "I32"))
    with pytest.raises(CorruptCheckpointError, match=r"'a' is float32 .* int32"):
        open_source(tmp_path)
    shard(2, [1, 0], entry([1, 1], 0, 4))
    with pytest.raises(CorruptCheckpointError, match="'a' is float32 of 1 dims"):
        open_source(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(CorruptCheckpointError, match="nothing says which"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map":5}',
        '{"weight_map":{"a":5}}',
        '{"weight_map":{"a":"../../etc/passwd"}}',
        '{"weight_map":{"a":"/etc/passwd"}}',
        '{"weight_map":{"a":""}}',
        '{"weight_map":{"a":"model.safetensors","a":"other"}}',
        '{"weight_map":{},"metadata":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_indices_that_are_wrong(tmp_path: Path, text: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError):
        open_source(tmp_path)


def test_many_tensors_open_quickly() -> None:
    import time

    header = {f"layers.{i}.weight": entry([4], 16 * i, 16 * i + 16) for i in range(20_000)}
    text = json.dumps(header).encode()
    begin = time.perf_counter()
    parsed = parse_header(text, 8 + len(text) + 16 * 20_000, "f")
    assert len(parsed.tensors) == 20_000 and time.perf_counter() - begin < 5
