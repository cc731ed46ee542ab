"""Hostile checkpoints. Each function writes one into a folder; opening, reading, loading and verifying it must end in an error of ours.

``marker`` is a path that code inside a checkpoint would create. The functions are the corpus: what somebody finds is added here.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import ucp_dcp
from ucp_dcp.storage.manifest import digest

Attack = Callable[[Path, Path], None]
ATTACKS: dict[str, Attack] = {}
BIG = 2**62


def attack(fn: Attack) -> Attack:
    ATTACKS[fn.__name__] = fn
    return fn


def state() -> dict[str, Any]:
    return {"w": torch.arange(24.0).reshape(4, 6), "o": {"a": [1, 2]}}


class Runs:
    """A pickle that makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


# -- ours ----------------------------------------------------------------------------------------------------------------------


def ours(folder: Path) -> Path:
    """A good checkpoint; returns its generation's folder."""
    ucp_dcp.save(state(), folder)
    return next(folder.glob("g-*"))


def with_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and put the right digest on it: a liar knows how."""
    path = folder / "ucp.json"
    fields = json.loads(path.read_text())
    fields.pop("xxh3")
    edit(fields)
    fields["xxh3"] = digest(json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    path.write_text(json.dumps(fields))


def with_section(folder: Path, name: str, data: bytes) -> None:
    """Put another section into the index, behind the old ones, with a right digest."""
    index = next(folder.glob("g-*")) / "index.ucp"
    old = index.read_bytes()
    start = -(-len(old) // 64) * 64
    index.write_bytes(old.ljust(start, b"\0") + data)

    def edit(fields: dict[str, Any]) -> None:
        fields["index"]["size"] = start + len(data)
        fields["index"]["sections"][name] = [start, len(data), digest(data)]

    with_manifest(folder, edit)


def i64(*numbers: int) -> bytes:
    return np.asarray(numbers, dtype="<i8").tobytes()


@attack
def manifest_names_an_index_outside(folder: Path, marker: Path) -> None:
    ours(folder)
    with_manifest(folder, lambda f: f["index"].update(path="../index.ucp"))


@attack
def manifest_names_an_absolute_index(folder: Path, marker: Path) -> None:
    ours(folder)
    with_manifest(folder, lambda f: f["index"].update(path="/etc/passwd"))


@attack
def manifest_generation_with_a_path_in_it(folder: Path, marker: Path) -> None:
    ours(folder)
    with_manifest(folder, lambda f: f.update(generation="g-" + "../" * 10 + "0" * 2))


@attack
def manifest_claims_a_huge_section(folder: Path, marker: Path) -> None:
    ours(folder)
    with_manifest(folder, lambda f: f["index"].update(size=BIG - 1) or f["index"]["sections"].update({"files": [0, BIG - 64, "0" * 32]}))


@attack
def manifest_of_deep_json(folder: Path, marker: Path) -> None:
    ours(folder)
    (folder / "ucp.json").write_text("[" * 30000 + "]" * 30000)


@attack
def index_file_outside(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "files", msgspec.msgpack.encode([["../../../../etc/passwd", 100000]]))


@attack
def index_huge_shape(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "tensor.shape", i64(2**31, 2**31))


@attack
def index_negative_offset(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "chunk.offset", i64(-8))


@attack
def index_offset_that_overflows(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "chunk.offset", i64(2**63 - 8))


@attack
def index_chunk_outside_its_tensor(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "chunk.coords", i64(2, 0, 4, 6))


@attack
def index_two_files_of_one_name(folder: Path, marker: Path) -> None:
    generation = ours(folder).name
    with_section(folder, "files", msgspec.msgpack.encode([[f"{generation}/__0_0.distcp", 10**6]] * 2))


@attack
def index_file_larger_than_it_is(folder: Path, marker: Path) -> None:
    generation = ours(folder).name
    with_section(folder, "files", msgspec.msgpack.encode([[f"{generation}/__0_0.distcp", BIG]]))
    with_section(folder, "chunk.offset", i64(BIG - 1024))


@attack
def index_of_many_nested_arrays(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "tensor.key", b"\x91" * 100000 + b"\xa1x")


@attack
def index_array_that_claims_billions(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "tensor.key", b"\xdd\xff\xff\xff\xff")


@attack
def sidecar_outside(folder: Path, marker: Path) -> None:
    ours(folder)
    with_section(folder, "file.blocks", msgspec.msgpack.encode([["../../secret", 1 << 20, "0" * 32]]))


@attack
def object_that_runs(folder: Path, marker: Path) -> None:
    ucp_dcp.save({"w": torch.ones(2), "o": Runs(marker)}, folder)
    marker.rmdir() if marker.exists() else None


@attack
def data_file_is_a_link_to_the_outside(folder: Path, marker: Path) -> None:
    file = ours(folder) / "__0_0.distcp"
    secret = folder.parent / "secret"
    secret.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(secret)


@attack
def generation_is_a_link_to_the_outside(folder: Path, marker: Path) -> None:
    generation = ours(folder)
    generation.rename(folder.parent / "elsewhere")
    generation.symlink_to(folder.parent / "elsewhere")


@attack
def data_file_is_a_pipe(folder: Path, marker: Path) -> None:
    file = ours(folder) / "__0_0.distcp"
    file.unlink()
    os.mkfifo(file)


# -- stock DCP -----------------------------------------------------------------------------------------------------------------


def stock(folder: Path, edit: Callable[[Any], None]) -> None:
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


@attack
def metadata_that_runs(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(marker)))


@attack
def metadata_with_code_in_a_field(folder: Path, marker: Path) -> None:
    stock(folder, lambda m: m.planner_data.update(x=Runs(marker)))


@attack
def metadata_names_a_file_outside(folder: Path, marker: Path) -> None:
    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../../../etc/passwd"

    stock(folder, edit)


@attack
def metadata_claims_a_huge_tensor(folder: Path, marker: Path) -> None:
    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([2**30, 2**30])
        entry.chunks[0].sizes = torch.Size([2**30, 2**30])

    stock(folder, edit)


@attack
def metadata_with_negative_places(folder: Path, marker: Path) -> None:
    def edit(metadata: Any) -> None:
        metadata.storage_data = {
            MetadataIndex(i.fqn, i.offset): _StorageInfo(s.relative_path, -64, s.length) for i, s in metadata.storage_data.items()
        }

    stock(folder, edit)


@attack
def metadata_of_endless_nesting(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x02" + b"(" * 30000 + b"t" * 30000 + b".")


@attack
def metadata_that_doubles_a_list(folder: Path, marker: Path) -> None:
    """A billion laughs: each list holds the one before it twice."""
    folder.mkdir()
    body = b"\x80\x02]q\x00"
    for i in range(40):
        body += b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    (folder / ".metadata").write_bytes(body + b".")


@attack
def item_with_overlapping_records(folder: Path, marker: Path) -> None:
    """The central directory of an item puts all records at the place of the first."""
    stock(folder, lambda m: None)
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        data[at + 42 : at + 46] = struct.pack("<I", 0)
        at += 46
    file.write_bytes(data)


@attack
def item_with_a_compressed_bomb(folder: Path, marker: Path) -> None:
    stock(folder, lambda m: None)
    (file,) = folder.glob("*.distcp")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(80 << 20))
        archive.writestr("archive/data/0", bytes(96))
    size = len(file.read_bytes())
    file.write_bytes(buffer.getvalue().ljust(size, b"\0"))


# -- DeepSpeed -----------------------------------------------------------------------------------------------------------------


@attack
def deepspeed_latest_outside(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / "latest").write_text("../../etc")


@attack
def deepspeed_file_that_runs(folder: Path, marker: Path) -> None:
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": {}, "optimizer_state_dict": Runs(marker)}, tag / name)
    marker.rmdir() if marker.exists() else None


# -- safetensors ---------------------------------------------------------------------------------------------------------------


def safetensors(folder: Path, header: Any, body: bytes = b"", length: int | None = None, name: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def float32(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


@attack
def safetensors_header_of_exabytes(folder: Path, marker: Path) -> None:
    safetensors(folder, {}, length=BIG)


@attack
def safetensors_header_longer_than_allowed(folder: Path, marker: Path) -> None:
    safetensors(folder, {}, length=1 << 30)
    os.truncate(folder / "model.safetensors", 2 << 30)  # sparse


@attack
def safetensors_header_of_deep_json(folder: Path, marker: Path) -> None:
    safetensors(folder, b'{"__metadata__":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001)


@attack
def safetensors_header_of_a_long_list(folder: Path, marker: Path) -> None:
    """Of the wrong type, and large once it is made of Python objects."""
    safetensors(folder, b'{"w":[' + b"[],[]," * 500_000 + b"[]]}")


@attack
def safetensors_unknown_field_of_a_long_list(folder: Path, marker: Path) -> None:
    """Fields that nobody knows are allowed, and nothing is made of them."""
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":[' + b"[],[]," * 500_000 + b"[]]}"
    safetensors(folder, b'{"w":' + entry + b',"v":' + entry + b"}", b"1234")


@attack
def safetensors_number_of_a_million_digits(folder: Path, marker: Path) -> None:
    safetensors(folder, b'{"w":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}', b"1234")


@attack
def safetensors_claims_a_huge_tensor(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([2**31, 2**31], 0, BIG)}, b"1234")


@attack
def safetensors_size_that_wraps_around(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([2**32, 2**32], 0, 0)})


@attack
def safetensors_two_tensors_of_the_same_bytes(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([24], 0, 96), "v": float32([24], 0, 96)}, bytes(96))


@attack
def safetensors_tensor_in_its_own_header(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([2], -8, 0)}, bytes(96))


@attack
def safetensors_one_name_of_two_tensors(folder: Path, marker: Path) -> None:
    """Readers that take the first and readers that take the last see different weights."""
    one = json.dumps({"w": float32([1], 0, 4)}).encode()
    two = json.dumps({"w": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    safetensors(folder, one[:-1] + b"," + two[1:], b"1234")


@attack
def safetensors_bytes_behind_the_last_tensor(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([1], 0, 4)}, b"1234MZ and a program")


@attack
def safetensors_index_names_a_file_outside(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([1], 0, 4)}, b"1234")
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../outside.safetensors"}}))


@attack
def safetensors_file_is_a_link_to_the_outside(folder: Path, marker: Path) -> None:
    safetensors(folder, {"w": float32([1], 0, 4)}, b"1234")
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / "model.safetensors").symlink_to("../secret.safetensors")


@attack
def safetensors_shard_far_away(folder: Path, marker: Path) -> None:
    """The whole tensor reaches as far as its pieces do, so a piece can make it as large as it likes."""
    info = json.dumps({"w": {"saved_offsets": [2**61]}})
    safetensors(folder, {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": float32([1], 0, 4)}, b"1234", name="shard-00001.safetensors")


@attack
def safetensors_shards_that_overlap(folder: Path, marker: Path) -> None:
    for n, at in enumerate((0, 1)):
        info = json.dumps({"w": {"saved_offsets": [at]}})
        header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": float32([2], 0, 8)}
        safetensors(folder, header, b"12345678", name=f"shard-0000{n}.safetensors")
