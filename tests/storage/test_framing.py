from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import struct
import subprocess
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ucp_dcp.dtypes import NAMES, itemsize
from ucp_dcp.errors import FormatError, UnsupportedError
from ucp_dcp.storage.framing import align, tensor_frame

HERE = [name for name in NAMES if hasattr(torch, name)]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (1, 1), (300, 5), (70_000,), (2, 3, 4), (4, 1, 3, 2)]


def _payload(name, shape, seed=0):
    count = int(np.prod(shape)) * itemsize(name)
    data = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, count, dtype=np.uint8).tobytes()
    return data


def _item(name, shape, crc=None):
    frame = tensor_frame(name, shape)
    payload = _payload(name, shape)
    item = frame.head + payload + frame.tail_for(zlib.crc32(payload) if crc else None)
    assert len(item) == frame.length and frame.payload_offset == len(frame.head) and frame.payload_offset % 64 == 0
    return item, payload


def _bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_every_dtype_of_the_format_is_tried():
    assert set(HERE) >= set(NAMES) - {"float4_e2m1fn_x2", "float8_e8m0fnu"}


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_loads_it(name, shape, tmp_path):
    item, payload = _item(name, shape)
    for tensor in (
        torch.load(io.BytesIO(item), weights_only=True),
        torch.load(io.BytesIO(item), weights_only=True, map_location="cpu"),
        torch.load(io.BytesIO(item), weights_only=False),
    ):
        assert tensor.dtype == getattr(torch, name) and tensor.shape == shape
        assert tensor.is_contiguous() and not tensor.requires_grad and tensor.storage_offset() == 0
        assert _bytes(tensor) == payload
    expected = torch.empty(shape, dtype=getattr(torch, name), device="meta")
    assert torch.load(io.BytesIO(item), weights_only=True).stride() == expected.stride()


@pytest.mark.parametrize("name", HERE)
def test_torch_maps_it(name, tmp_path):
    item, payload = _item(name, (300, 5))
    path = tmp_path / "item.pt"
    path.write_bytes(item)
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert _bytes(mapped) == payload
    assert mapped.data_ptr() % 64 == 0


@pytest.mark.parametrize("name", HERE)
def test_pickle_means_what_torch_writes(name):
    """The same call, with the same arguments, as in torch.save's own pickle of such a tensor."""
    tensor = torch.zeros(300 * 5 * 2 * itemsize(name), dtype=torch.uint8).view(getattr(torch, name)).reshape(300, 5, 2)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    theirs = zipfile.ZipFile(stream).read("archive/data.pkl")
    ours = zipfile.ZipFile(io.BytesIO(_item(name, (300, 5, 2))[0])).read("archive/data.pkl")

    class Recorder(pickle.Unpickler):
        def find_class(self, module, qualname):
            return (
                ("global", module, qualname)
                if qualname not in ("OrderedDict",) and not qualname.startswith("_rebuild")
                else (lambda *args: (module, qualname, args))
            )

        def persistent_load(self, pid):
            return ("storage", pid)

    assert Recorder(io.BytesIO(ours)).load() == Recorder(io.BytesIO(theirs)).load()
    pickletools.dis(ours, out=io.StringIO())  # checks stack and opcodes
    assert max(op.proto for op, _, _ in pickletools.genops(ours)) <= 2
    assert torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(_item(name, (300, 5, 2))[0])) == []


def test_reads_as_a_zip_archive(tmp_path):
    item, payload = _item("bfloat16", (300, 5), crc=True)
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert archive.read("archive/byteorder") == b"little" and archive.read("archive/version") == b"3\n"
        assert archive.read("archive/data/0") == payload
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    assert torch.load(io.BytesIO(item), weights_only=True).shape == (300, 5)
    without, _ = _item("bfloat16", (300, 5))
    assert zipfile.ZipFile(io.BytesIO(without)).testzip() == "archive/data/0"
    assert len(without) == len(item) and without[: tensor_frame("bfloat16", (300, 5)).payload_offset] in item
    if shutil.which("unzip"):
        path = tmp_path / "item.zip"
        path.write_bytes(item)
        done = subprocess.run(["unzip", "-t", str(path)], capture_output=True, text=True)
        assert done.returncode == 0 and "No errors" in done.stdout, done.stdout + done.stderr


def test_a_slice_of_a_file_as_stock_dcp_reads_it(tmp_path):
    items = [("float32", (3, 4)), ("uint16", ()), ("bool", (0, 2)), ("float64", (65, 3))]
    stream = io.BytesIO()
    where = []
    for name, shape in items:
        stream.write(bytes(align(stream.tell()) - stream.tell()))
        item, payload = _item(name, shape)
        where.append((stream.tell(), len(item), payload, shape))
        stream.write(item)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(stream.getvalue())
    reader = FileSystemReader(tmp_path)
    with open(path, "rb") as file:
        for offset, length, payload, shape in where:
            assert offset % 64 == 0
            part = reader._slice_file(file, type("Info", (), {"offset": offset, "length": length}))
            tensor = torch.load(part, map_location="cpu", weights_only=True)
            assert tensor.shape == shape and _bytes(tensor) == payload


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HERE), st.lists(st.integers(0, 9), max_size=5), st.booleans())
def test_any_small_tensor(name, shape, crc):
    item, payload = _item(name, tuple(shape), crc)
    tensor = torch.load(io.BytesIO(item), weights_only=True)
    assert tensor.shape == tuple(shape) and _bytes(tensor) == payload


@pytest.mark.parametrize("around", [-1, 0, 1, 1 << 20])
def test_more_than_4_gib(tmp_path, around):
    """Header fields at the 4 GiB limit. The payload is a hole in a sparse file, except at its last bytes."""
    size = 0xFFFFFFFF + around
    frame = tensor_frame("uint8", (size,))
    assert frame.payload_length == size and frame.payload_offset % 64 == 0 and len(frame.head) < 1024
    path = tmp_path / "big.pt"
    with open(path, "wb") as file:
        file.write(frame.head)
        file.seek(frame.payload_offset + size - 3)
        file.write(b"\1\2\3")
        file.write(frame.tail)
    assert path.stat().st_size == frame.length
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert info.file_size == info.compress_size == size
        assert (b"\x01\x00\x10\x00" in info.extra) == (around >= 0)
        assert archive.read("archive/version") == b"3\n"
    (extra,) = struct.unpack_from("<H", frame.head, frame.head.rindex(b"PK\3\4") + 28)
    assert frame.head.rindex(b"PK\3\4") + 30 + len("archive/data/0") + extra == frame.payload_offset
    assert (b"PK\6\6" in frame.tail) == (frame.payload_offset + size + (24 if around >= 0 else 16) >= 0xFFFFFFFF)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (size,) and tensor[-3:].tolist() == [1, 2, 3] and tensor[:5].tolist() == [0] * 5


@pytest.mark.parametrize("directory_at", [0xFFFFFFFE, 0xFFFFFFFF, 0x100000000])
def test_directory_at_4_gib(directory_at):
    """The payload is just below the limit, the central directory just at it: only the end record needs zip64."""
    size = directory_at - 16 - tensor_frame("uint8", (0xFFFFF000,)).payload_offset
    frame = tensor_frame("uint8", (size,))
    assert frame.payload_offset + size + 16 == directory_at
    assert (b"PK\6\6" in frame.tail, b"PK\6\7" in frame.tail) == ((True, True) if directory_at >= 0xFFFFFFFF else (False, False))
    (stated,) = struct.unpack_from("<I", frame.tail, len(frame.tail) - 6)
    assert stated == min(directory_at, 0xFFFFFFFF)


def test_a_claim_of_exabytes_costs_nothing():
    frame = tensor_frame("float32", (1 << 40, 1 << 19))
    assert frame.payload_length == 1 << 61 and len(frame.head) + len(frame.tail) < 2048
    for shape in ((1 << 62,), (1 << 40, 1 << 40), (1 << 62, 1 << 62, 0)):
        with pytest.raises(FormatError):
            tensor_frame("float32", shape)
    with pytest.raises(FormatError):
        tensor_frame("float32", (2, -1))
    with pytest.raises(UnsupportedError):
        tensor_frame("float31", (2,))
    with pytest.raises(ValueError):
        tensor_frame("float32", (2,), at=8)


def test_deterministic_and_cached():
    """The frame depends on (dtype, shape) alone; these bytes are the format, so a change of them is a change of the format."""
    assert tensor_frame("float32", [2, 3]) is tensor_frame("float32", (2, 3), at=640)
    frame = tensor_frame("float32", (2, 3))
    assert (frame.payload_offset, len(frame.tail)) == (384, 284)
    assert (zlib.crc32(frame.head), zlib.crc32(frame.tail)) == (1120737998, 195982037)
    assert frame.tail_for(0) == frame.tail == frame.tail_for(None)
    assert b"\x78\x56\x34\x12" in frame.tail_for(0x12345678)


def test_align():
    assert [align(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert align(9, 8) == 16
