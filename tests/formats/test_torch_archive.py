"""torch.save archives: tensors found by byte range, and archives that lie."""

from __future__ import annotations

import argparse
import io
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from format_helpers import tensor_spans, torch_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucp_dcp.dtypes import torch_dtype
from ucp_dcp.errors import CorruptCheckpointError, FormatError, UCPError, UnsafePickleError, UnsupportedError
from ucp_dcp.formats.torch_archive import load_value, open_archive
from ucp_dcp.safe_pickle import StoredTensor, iter_leaves, load_object
from ucp_dcp.storage.store import open_store

VALUE = {
    "plain": torch.arange(12.0).reshape(3, 4),
    "nested": [1, (2, torch.arange(7, dtype=torch.int16))],
    "bf16": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "text": "x",
}
VALUE["transposed"] = VALUE["plain"].t()
VALUE["row"] = VALUE["plain"][1]
VALUE["parameter"] = torch.nn.Parameter(VALUE["plain"] * 2)
VALUE["broadcast"] = torch.tensor([2.0]).expand(5)


def opened(tmp_path: Path, data: bytes) -> Any:
    (tmp_path / "x.pt").write_bytes(data)
    return open_archive(open_store(tmp_path), "x.pt").value


def tensor_at(data: bytes, tensor: StoredTensor) -> torch.Tensor:
    dtype = torch_dtype(tensor.dtype)
    if tensor.numel == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)) + 1
    raw = bytearray(data[tensor.offset : tensor.offset + extent * dtype.itemsize])
    return torch.frombuffer(raw, dtype=dtype).as_strided(tensor.shape, tensor.strides)


def test_tensors_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    data = torch_bytes(VALUE)
    tree = opened(tmp_path, data)
    for key, value in VALUE.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(tensor_at(data, tree[key]), value.detach()), key
            assert tree[key].strides == value.stride()
    assert tree["nested"][0] == 1 and tree["text"] == "x"
    assert torch.equal(tensor_at(data, tree["nested"][1][1]), VALUE["nested"][1][1])
    assert tree["row"].storage is tree["plain"].storage


def test_no_tensor_byte_is_read(tmp_path: Path) -> None:
    data = torch_bytes({str(i): torch.full((100,), i) for i in range(20)})
    (tmp_path / "x.pt").write_bytes(data)
    store = CountingStore(open_store(tmp_path))
    open_archive(store, "x.pt")
    spans = [span for span in tensor_spans(data) if span[1] > 64]
    assert len(spans) == 20
    for r in store.counts.ranges:
        assert not any(r.start < start + length and start < r.start + r.length for start, length in spans), r
    assert store.counts.calls["read_ranges"] <= 5  # end, zip64 end, directory, pickle, all local headers


def test_objects_with_real_tensors(tmp_path: Path) -> None:
    got = load_object(torch_bytes(VALUE))
    for key, value in VALUE.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[key], value.detach()) and got[key].stride() == value.stride(), key
    got["plain"][1, 2] = 99.0
    assert got["row"][2] == 99.0  # one storage, as it was
    (tmp_path / "x.bin").write_bytes(b"abc" + torch_bytes([1, VALUE["plain"]]) + b"def")
    length = len(torch_bytes([1, VALUE["plain"]]))
    assert torch.equal(load_value(open_store(tmp_path), "x.bin", start=3, length=length)[1], VALUE["plain"])


def test_a_part_of_an_object_reads_that_part(tmp_path: Path) -> None:
    data = torch_bytes({"big": torch.zeros(10_000), "user": {"small": torch.arange(3), "bad": argparse.Namespace(x=1)}})
    (tmp_path / "x.pt").write_bytes(data)
    store = CountingStore(open_store(tmp_path))
    assert load_value(store, "x.pt", select=("user", "small")).tolist() == [0, 1, 2]
    assert store.counts.bytes_read < 10_000
    with pytest.raises(UnsafePickleError, match=r"user\.bad holds argparse\.Namespace"):
        load_value(store, "x.pt", select=("user", "bad"))
    assert load_value(store, "x.pt", select=("user", "bad"), allow_classes=[argparse.Namespace]).x == 1
    with pytest.raises(CorruptCheckpointError, match=r"user\.none"):
        load_value(store, "x.pt", select=("user", "none"))


def test_old_format_says_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"x\.pt.*old format.*torch\.save\(torch\.load"):
        opened(tmp_path, torch_bytes(VALUE, _use_new_zipfile_serialization=False))


def test_torchscript_is_refused() -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        load_object(buffer.getvalue())


# ---- files that are no archives, or not any more


@pytest.mark.parametrize("data", [b"", b"x", b"hello world" * 30, bytes(100), b"PK\x05\x06" + bytes(17)])
def test_something_else(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError, match=r"x\.pt"):
        opened(tmp_path, data)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = torch_bytes({"a": torch.arange(6.0)})
    for n in range(0, len(data), 7):
        with pytest.raises(FormatError, match=r"x\.pt"):
            opened(tmp_path, data[:n])
    with pytest.raises(CorruptCheckpointError, match="cut"):
        opened(tmp_path, data[:-1])


def test_other_zip_files(tmp_path: Path) -> None:
    for names in (["a.txt"], ["x/data.pkl", "y/data.pkl"], ["data.pkl"], []):
        with pytest.raises(FormatError, match=r"x\.pt"):
            opened(tmp_path, zipped({name: b"N." for name in names}))


def test_a_zip_comment_is_legal(tmp_path: Path) -> None:
    data = bytearray(torch_bytes({"a": torch.arange(6.0)}))
    data[-2:] = struct.pack("<H", 5)
    assert torch.equal(tensor_at(bytes(data), opened(tmp_path, bytes(data) + b"hello")["a"]), torch.arange(6.0))
    with pytest.raises(CorruptCheckpointError):
        opened(tmp_path, bytes(data) + b"hell")


# ---- archives that lie


def zipped(records: dict[str, bytes], **compression: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def records_of(value: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(torch_bytes(value))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_rezipped_archives() -> None:
    records = records_of({"a": torch.arange(6.0)})
    assert torch.equal(load_object(zipped(records))["a"], torch.arange(6.0))
    with pytest.raises(UnsupportedError, match="compressed"):
        load_object(zipped(records, compression=zipfile.ZIP_DEFLATED))


def pickled(old: bytes, new: bytes) -> Any:
    """Replaces bytes of data.pkl: ``K 06 85`` is the size (6,), ``K 01 85`` the strides (1,)."""

    def change(records: dict[str, bytes]) -> None:
        assert old in records["archive/data.pkl"]
        records["archive/data.pkl"] = records["archive/data.pkl"].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("archive/data/0"), "storage '0' is missing"),
        (lambda r: r.update({"archive/data/0": b"abc"}), "should hold 24 bytes, its record has 3"),
        (lambda r: r.update({"archive/byteorder": b"big"}), "little endian"),
        (pickled(b"K\x06\x85", b"K\x07\x85"), "does not lie in storage"),
        (pickled(b"K\x06\x85", b"J\xff\xff\xff\xff\x85"), "a tensor of size"),
        (pickled(b"K\x06\x85", b"J\xff\xff\xff\x7f\x85"), "does not lie"),
        (pickled(b"K\x01\x85", b"K\x02\x85"), "does not lie"),
        (lambda r: r.update({"archive/data.pkl": b"\x80\x02}."[:-1]}), "pickle"),
        (lambda r: r.update({"archive/constants.pkl": b""}), "TorchScript"),
    ],
)
def test_contents_that_do_not_fit(change: Any, message: str) -> None:
    records = records_of({"a": torch.arange(6.0)})
    change(records)
    with pytest.raises(UCPError, match=message):
        load_object(zipped(records))


def test_a_small_file_must_not_become_a_huge_tensor() -> None:
    records = records_of({"a": torch.tensor([1.0]).expand(6)})
    pickle = records["archive/data.pkl"].replace(b"K\x06\x85", b"J\xff\xff\xff\x7f\x85")
    assert pickle != records["archive/data.pkl"]
    with pytest.raises(CorruptCheckpointError, match="does not lie"):
        load_object(zipped({**records, "archive/data.pkl": pickle}))


def central(data: bytes) -> list[int]:
    """Positions of the directory's entries."""
    places, at = [], data.find(b"PK\x01\x02")
    while at >= 0:
        places.append(at)
        at = data.find(b"PK\x01\x02", at + 1)
    return places


def patched(data: bytes, at: int, form: str, value: Any) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


def test_directories_that_lie() -> None:
    records = records_of({"a": torch.arange(6.0)})
    data = zipped(records)
    entries = central(data)
    end = data.rfind(b"PK\x05\x06")
    which = {name: entries[i] for i, name in enumerate(records)}
    storage, pickle = which["archive/data/0"], which["archive/data.pkl"]
    lies = {
        "count of records": patched(patched(data, end + 8, "<H", 9999), end + 10, "<H", 9999),
        "count without room": patched(patched(data, end + 8, "<H", 60000), end + 10, "<H", 60000),
        "directory size": patched(data, end + 12, "<L", 2**31),
        "directory start": patched(data, end + 16, "<L", 2**31),
        "directory start inside": patched(data, end + 16, "<L", 3),
        "several disks": patched(data, end + 4, "<H", 1),
        "record size": patched(patched(data, storage + 20, "<L", 2**31), storage + 24, "<L", 2**31),
        "stored size only": patched(data, storage + 20, "<L", 2),
        "record start": patched(data, storage + 42, "<L", 2**31),
        "record over another": patched(data, storage + 42, "<L", 0),
        "two records at one place": patched(data, storage + 42, "<L", struct.unpack_from("<L", data, pickle + 42)[0]),
        "zip64 announced, missing": patched(data, storage + 42, "<L", 0xFFFFFFFF),
        "encrypted": patched(data, pickle + 8, "<H", 1),
        "name length": patched(data, storage + 28, "<H", 65535),
        "name not text": patched(data, storage + 46, "<B", 0xFF),
        "local name": patched(data, struct.unpack_from("<L", data, pickle + 42)[0] + 30, "<B", 0x62),
        "local extra": patched(data, struct.unpack_from("<L", data, storage + 42)[0] + 28, "<H", 65535),
        "local size": patched(data, struct.unpack_from("<L", data, storage + 42)[0] + 18, "<L", 5),
        "local method": patched(data, struct.unpack_from("<L", data, storage + 42)[0] + 8, "<H", 8),
    }
    for what, lie in lies.items():
        with pytest.raises(UCPError):
            load_object(lie)
            pytest.fail(what)
    twice = data.replace(b"archive/version", b"archive/data/0/")[: len(data)]
    with pytest.raises(UCPError):
        load_object(twice.replace(b"archive/data/0/", b"archive/data/0"))


def test_two_records_of_one_name() -> None:
    records = records_of({"a": torch.arange(6.0)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in [*records.items(), ("archive/data/0", bytes(24))]:
            archive.writestr(name, content)
    with pytest.raises(CorruptCheckpointError, match="two records"):
        load_object(buffer.getvalue())


def test_zip64_records_are_read_and_checked() -> None:
    """Sizes and offsets in the zip64 extra field, as files above 4 GiB have them."""
    records = records_of({"a": torch.arange(6.0)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as f:
                f.write(content)
    data = buffer.getvalue()
    assert torch.equal(load_object(data)["a"], torch.arange(6.0))
    # The same directory with 64-bit fields for the storage.
    at = dict(zip(records, central(data), strict=True))["archive/data/0"]
    name, extra = struct.unpack_from("<2H", data, at + 28)
    size, start = struct.unpack_from("<L", data, at + 24)[0], struct.unpack_from("<L", data, at + 42)[0]
    for real, ok in (((size, size, start), True), ((2**62, 2**62, start), False), ((size, size, 2**62), False)):
        field = struct.pack("<2H3Q", 1, 24, *real)
        entry = bytearray(data[at : at + 46 + name])
        struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
        struct.pack_into("<H", entry, 30, len(field))
        longer = data[:at] + bytes(entry) + field + data[at + 46 + name + extra :]
        end = longer.rfind(b"PK\x05\x06")
        longer = patched(longer, end + 12, "<L", end - struct.unpack_from("<L", longer, end + 16)[0])
        if ok:
            assert torch.equal(load_object(longer)["a"], torch.arange(6.0))
        else:
            with pytest.raises(CorruptCheckpointError):
                load_object(longer)


FUZZED = torch_bytes({"a": torch.arange(6.0), "b": [torch.zeros(2, 3).t(), 5]})


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(FUZZED) - 1), st.integers(0, 255), st.integers(0, 3))
def test_any_changed_byte_is_an_error_of_ours_or_stays_in_bounds(at: int, byte: int, more: int) -> None:
    data = bytearray(FUZZED)
    data[at : at + 1 + more] = bytes([byte]) * (1 + more)
    try:
        value = load_object(bytes(data))
    except UCPError:
        return
    for tensor in iter_leaves(value, torch.Tensor):
        assert tensor.numel() <= 6


def test_what_torch_writes_lies_where_numpy_finds_it(tmp_path: Path) -> None:
    """The same through a file and numpy, for a large tensor."""
    weights = torch.randn(300, 1000)
    torch.save({"w": weights}, tmp_path / "x.pt")
    found = open_archive(open_store(tmp_path), "x.pt").value["w"]
    values = np.fromfile(tmp_path / "x.pt", dtype="<f4", count=300_000, offset=found.offset)
    assert np.array_equal(values, weights.numpy().ravel())
