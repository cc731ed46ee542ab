"""Safetensors headers beside the safetensors library: what we open, it opens with the same tensors; what only it opens is named here."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ucp_dcp.errors import CorruptCheckpointError, FormatError, UnsupportedError
from ucp_dcp.formats.safetensors import parse_header
from ucp_dcp.formats.safetensors.catalog import open_safetensors
from ucp_dcp.formats.safetensors.files import SafetensorsFiles
from ucp_dcp.storage.store import Range

NAMES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "C64": "complex64",
}  # fmt: skip
WIDTH = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1, "I64": 8, "F8_E4M3": 1, "C64": 8}
GOOD = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16(), "empty": torch.empty(0)}, {"format": "pt"})


class OneFile:
    """A store of one file in memory."""

    url = "fuzz"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def size(self, path: str) -> int:
        return len(self.data)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        assert length is not None and start >= 0 and start + length <= len(self.data), "a read outside of the file"
        return self.data[start : start + length]

    def read_ranges(self, ranges: list[Range], into: list[memoryview]) -> None:
        raise AssertionError("tensor bytes were read")


def ours(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    source = open_safetensors(OneFile(data), SafetensorsFiles(("f",)), lambda paths, parse: [parse(p) for p in paths])  # type: ignore[arg-type]
    out = {}
    for row in source.catalog.tensors():
        start = int(source.catalog.chunk_offset[source.catalog.chunk_range(row.index)[0]])
        length = torch.Size(row.shape).numel() * getattr(torch, row.dtype).itemsize
        out[row.key] = (row.dtype, list(row.shape), data[start : start + length])
    return out


def compare(data: bytes) -> None:
    try:
        found = ours(data)
    except FormatError as error:
        try:
            safetensors.deserialize(data)
        except Exception:
            return
        # stricter than the library: a name twice, shapes that no torch tensor has, pieces of sharded tensors
        text = str(error)
        assert " twice" in text or "shape" in text or "elements" in text or "DCP_SHARDING" in text, f"only the library opens it: {error}"
        return
    except UnsupportedError as error:
        assert "dtype" in str(error) or "even last dim" in str(error)
        return
    theirs = {name: (NAMES.get(t["dtype"]), t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    assert set(found) == set(theirs)
    for name, (dtype, shape, content) in theirs.items():
        assert dtype in (None, found[name][0]) and content == found[name][2]
        assert dtype is None or shape == found[name][1]


def rounds(thorough: bool, n: int) -> Any:
    n = n * 100 if thorough else n
    return settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not thorough)


HOW = ["flip", "cut", "insert", "digit", "twice"]
CHANGE = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(HOW), st.binary(min_size=1, max_size=4))


def changed(data: bytes, change: tuple[float, str, bytes]) -> bytes:
    where, how, new = change
    at = int(where * len(data))
    if not data:
        return new
    if how == "flip":
        return data[:at] + bytes([data[at] ^ (1 << new[0] % 8)]) + data[at + 1 :]
    if how == "cut":
        return data[:at]
    if how == "insert":
        return data[:at] + new + data[at:]
    if how == "digit":
        digits = [i for i, c in enumerate(data) if chr(c).isdigit()] or [0]
        at = digits[int(where * len(digits))]
        return data[:at] + b"0123456789-.eE"[new[0] % 14 :][:1] + data[at + 1 :]
    return data[: at + len(new) * 4] + data[at:]


def refit(data: bytes, length: int) -> bytes:
    """With the length of the header that fits again."""
    return struct.pack("<Q", max(0, length)) + data[8:]


def test_changed_files(thorough: bool) -> None:
    header = int.from_bytes(GOOD[:8], "little")
    assert ours(GOOD)["a"][2] == torch.arange(6.0).numpy().tobytes()

    @rounds(thorough, 150)
    @given(st.lists(CHANGE, min_size=1, max_size=3), st.booleans())
    def run(changes: list[tuple[float, str, bytes]], fit: bool) -> None:
        data = GOOD
        for change in changes:
            data = changed(data, change)
        compare(refit(data, header + len(data) - len(GOOD)) if fit and len(data) >= 8 else data)

    run()


SIZES = st.one_of(st.integers(0, 4), st.integers(0, 4), st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**40, 1.5, "1", None, True]))


@st.composite
def files(draw: Any) -> bytes:
    """Mostly right: tensors laid end to end, some numbers changed."""
    header: dict[str, Any] = {}
    at = 0
    for i in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from([*WIDTH, *WIDTH, "F4", "F6_E2M3", "F128"]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        nbytes = torch.Size(shape).numel() * WIDTH.get(dtype, 1)
        header[draw(st.sampled_from([f"t{i}", f"t{i}", "", "é", "__metadata"]))] = {
            "dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes],
        }  # fmt: skip
        at += nbytes
    if header and draw(st.booleans()):
        entry = header[draw(st.sampled_from(sorted(header)))]
        where = draw(st.sampled_from(["shape", "data_offsets"]))
        if entry[where]:
            entry[where][draw(st.integers(0, len(entry[where]) - 1))] = draw(SIZES)
    if draw(st.booleans()):
        texts = st.dictionaries(st.text(max_size=2), st.one_of(st.text(max_size=2), st.integers()))
        header["__metadata__"] = draw(st.one_of(st.none(), texts))
    text = json.dumps(header).encode() + b" " * draw(st.integers(0, 2))
    return struct.pack("<Q", len(text)) + text + bytes(draw(st.sampled_from([at, at, at, at + 1, max(0, at - 1)])))


def test_structured_headers(thorough: bool) -> None:
    @rounds(thorough, 150)
    @given(files())
    def run(data: bytes) -> None:
        compare(data)

    run()


def test_any_bytes_as_a_header(thorough: bool) -> None:
    @rounds(thorough, 150)
    @given(st.one_of(st.binary(max_size=60), st.text('{}[]":,0123456789.eE- adFt', max_size=60).map(str.encode)), st.integers(0, 2**64))
    def run(text: bytes, size: int) -> None:
        for data in (text, b'{"a":' + text + b"}", b'{"__metadata__":' + text + b"}"):
            try:
                parse_header(data, size, "f")
            except (CorruptCheckpointError, UnsupportedError) as error:
                assert str(error).startswith("f: ")

    run()


@pytest.mark.parametrize("text", [b'{"a":', b"[", b'{"a":{"shape":[', b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"y":'])
def test_deep_nesting(text: bytes) -> None:
    for unit in (b'{"y":', b"["):
        with pytest.raises(CorruptCheckpointError):
            parse_header(text + unit * 100_000, 10**9, "f")
