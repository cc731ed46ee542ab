"""Index sections that lie. Every lie is a named error when it is read, never a crash, an overflow or a large allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.catalog import Catalog, CatalogBuilder, ObjectRow
from ucp_dcp.errors import CorruptCheckpointError, UCPError, UnsupportedError
from ucp_dcp.names import Role

BIG = 2**63 - 1


def sections() -> dict[str, bytes]:
    """Two tensors: "a" (4, 4) float32 in two chunks with strides and groups, "b" () int64; one object of each encoding."""
    b = CatalogBuilder()
    f = b.add_file("f", 1000)
    p = b.add_pattern({"text": "dp: Flat()"})
    t = b.add_tensor(key="a", role=Role.WEIGHT, fqn="a", state="", dtype="float32", shape=(4, 4), pattern=p, path=("x", "a"))
    boxes = np.array([[[0, 0], [2, 4]], [[2, 0], [2, 4]]])
    b.add_chunks(t, boxes, f, [0, 32], np.array([[4, 1], [4, 1]]), "bfloat16", b.add_group("copy"))
    t = b.add_tensor(key="b", role=Role.STATE, fqn="a", state="step", dtype="int64", shape=())
    b.add_chunks(t, np.zeros((1, 2, 0), dtype=np.int64), f, 992)
    b.add_object(ObjectRow("o", value=[1]))
    b.add_object(ObjectRow("q", file=f, offset=100, length=900, encoding="torch_save"))
    return {name: bytes(data) for name, data in b.build().to_sections().items()}


def open_all(data: dict[str, bytes]) -> Catalog:
    """Open, then use every part."""
    catalog = Catalog.from_sections(lambda name: memoryview(data[name]) if name in data else None)
    catalog.validate()
    return catalog


def i64(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def edited(name: str, at: int, value: int) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        array = np.frombuffer(data, dtype="<i8").copy()
        array[at] = value
        return array.tobytes()

    return edit


LIES: list[tuple[str, Any, str]] = [
    ("tensor.key", pack(["a"]), "tensor.key has 1"),
    ("tensor.key", pack(["a", "a"]), "two tensors have the key 'a'"),
    ("tensor.key", pack(["b", "a"]), "not sorted"),
    ("tensor.key", pack(["a", 5]), "tensor.key is damaged"),
    ("tensor.key", pack("ab"), "tensor.key is damaged"),
    ("tensor.key", b"", "tensor.key is damaged"),
    ("tensor.key", b"\xdd\xff\xff\xff\xff", "tensor.key is damaged"),  # four billion strings in five bytes
    ("tensor.key", b"\x92\xa1\xff\xa1b", "tensor.key is damaged"),  # not UTF-8
    ("tensor.key", None, "tensor.key is missing"),
    ("tensor.fqn", pack([]), "tensor.fqn has 0"),
    ("tensor.fqn", None, "tensor.fqn is missing"),
    ("tensor.state", pack([["", "step"], b"\0\0"]), "tensor.state has 1 codes"),
    ("tensor.state", pack([["", "step"], b"\0\0\2\0"]), "tensor.state holds code 2"),
    ("tensor.state", pack([["", "step"], b"\0\0\2"]), "multiple of 2"),
    ("tensor.state", pack([["x"]]), "tensor.state is damaged"),
    ("tensor.role", b"\0", "tensor.dtype has 2 entries, expected 1"),
    ("tensor.role", b"\0\6", "tensor.role holds 6"),
    ("tensor.role", None, "tensor.role is missing"),
    ("tensor.dtype", b"\0\0\0", "tensor.dtype has 3"),
    ("tensor.kind", b"", "tensor.kind has 0"),
    ("tensor.pattern", b"\0\0\0\0\1\0\0\0", "tensor.pattern holds 0 to 1"),
    ("tensor.pattern", b"\0\0\0\0\xfe\xff\xff\xff", "tensor.pattern holds -2"),
    ("tensor.pattern", b"\0\0\0", "multiple of 4"),
    ("tensor.shape_start", i64(0, 2), "tensor.shape_start has 2"),
    ("tensor.shape_start", i64(0, 2, 1), "falls from 2 to 1"),
    ("tensor.shape_start", i64(0, 2, 3), "ends at 3, expected 2"),
    ("tensor.shape_start", i64(-BIG - 1, 0, 2), "starts at"),
    ("tensor.shape_start", i64(0, BIG, -BIG), "falls from"),
    ("tensor.shape_start", b"\0" * 23, "multiple of 8"),
    ("tensor.shape", i64(4, -4), "tensor.shape holds -4"),
    ("tensor.shape", i64(2**31, 2**31), r"\[2147483648, 2147483648\], more elements"),
    ("tensor.shape", i64(BIG, BIG), "more elements"),
    ("tensor.shape", i64(4, 3), r"'a': chunk 0, offset \[0, 0\], size \[2, 4\], does not lie in shape \[4, 3\]"),
    ("tensor.chunk_start", i64(0, 2, 2), "chunk.file has 3 entries, expected 2"),
    ("tensor.chunk_start", i64(0, BIG, BIG), f"expected {BIG}"),
    ("tensor.chunk_start", i64(0, 3, 2), "falls"),
    ("tensor.chunk_start", i64(0, 1, 3), "chunk.coords has 8 entries, expected 4"),
    ("tensor.strided", None, "both"),
    ("tensor.strided", b"\1\2", "tensor.strided holds 2"),
    ("tensor.strided", b"\0\1", "chunk.strides has 4"),
    ("chunk.strides", None, "both"),
    ("chunk.strides", i64(4, 1, 4, -1), r"strides \[4, -1\]"),
    ("chunk.strides", i64(4, 1, BIG, BIG), "strides"),
    ("chunk.strides", i64(4, 1, 2**62, 1), "strides"),
    ("chunk.strides", i64(4, 1, 2**30, 1), "claims"),
    ("chunk.coords", None, "chunk.coords is missing"),
    ("chunk.coords", b"\0" * 60, "multiple of 8"),
    ("chunk.coords", edited("chunk.coords", 0, -1), "does not lie"),
    ("chunk.coords", edited("chunk.coords", 0, BIG), "does not lie"),
    ("chunk.coords", edited("chunk.coords", 2, BIG), "does not lie"),
    ("chunk.coords", edited("chunk.coords", 2, -BIG - 1), "does not lie"),
    ("chunk.coords", edited("chunk.coords", 4, 3), "does not lie"),
    ("chunk.file", b"\0" * 8 + b"\1\0\0\0", "chunk.file holds 1"),
    ("chunk.file", b"\xff" * 12, "chunk.file holds -1"),
    ("chunk.offset", i64(0, 32), "chunk.offset has 2"),
    ("chunk.offset", i64(0, 32, 993), "'b': chunk 0 claims 8 bytes at byte 993 of 'f', which has 1000 bytes"),
    ("chunk.offset", i64(0, 32, BIG), "claims 8 bytes"),  # offset + size does not fit into int64
    ("chunk.offset", i64(0, 32, -8), "claims 8 bytes at byte -8"),
    ("chunk.dtype", b"\3\3", "chunk.dtype has 2"),
    ("chunk.group", i64(0), "chunk.group has 2"),
    ("chunk.group", b"\0\0\0\0\1\0\0\0\xff\xff\xff\xff", "chunk.group holds 1"),
    ("groups", None, "chunk.group holds 0"),
    ("groups", pack([{}]), "op None"),
    ("groups", pack([[1]]), "groups is damaged"),
    ("files", None, "files is missing"),
    ("files", pack([]), "chunk.file holds 0"),
    ("files", pack([["f", 999]]), "claims|which has"),
    ("files", pack([["f", -1]]), "size -1"),
    ("files", pack([["f", 2**63]]), "size 9223372036854775808"),
    ("files", pack([["/etc/passwd", 1000]]), "file table"),
    ("files", pack([["a/../../f", 1000]]), "file table"),
    ("files", pack([["a\\f", 1000]]), "file table"),
    ("files", pack([["f\0", 1000]]), "file table"),
    ("files", pack([["", 1000]]), "file table"),
    ("files", pack([["f", 1000, 1]]), "files is damaged"),
    ("files", pack([["f", 1000], ["f", 1000]]), "listed twice"),
    ("tensor.path", pack([None]), "tensor.path has 1"),
    ("tensor.path", pack([None, [1.5]]), "tensor.path is damaged"),
    ("patterns", pack([{"text": 1}]), "pattern 0 has no text"),
    ("patterns", pack([[]]), "patterns is damaged"),
    ("objects", b"\x91" * 100_000, "objects is damaged"),  # nested deeper than any stack
    ("objects", pack([{"key": "o"}]), "objects is damaged"),
]


@pytest.mark.parametrize(("name", "lie", "message"), LIES, ids=[f"{i}-{lie[0]}" for i, lie in enumerate(LIES)])
def test_lies(name: str, lie: Any, message: str) -> None:
    data = sections()
    open_all(data)
    if lie is None:
        del data[name]
    else:
        data[name] = lie(data[name]) if callable(lie) else lie
    with pytest.raises(CorruptCheckpointError, match=message):
        open_all(data)


def an_object(**changes: Any) -> bytes:
    o = {
        "key": "o",
        "role": 4,
        "fqn": "",
        "state": "",
        "path": ["o"],
        "file": -1,
        "offset": 0,
        "length": 0,
        "encoding": "inline",
        "value": 1,
    }
    return pack([o | changes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": 6}, "role 6"),
        ({"role": -1}, "role -1"),
        ({"key": "a"}, "same key 'a'"),
        ({"file": 0}, "inline but names file 0"),
        ({"encoding": "torch_save"}, "file -1"),
        ({"encoding": "torch_save", "file": 1}, "file 1"),
        ({"encoding": "torch_save", "file": 0, "offset": 1000, "length": 1}, "1 bytes at byte 1000"),
        ({"encoding": "torch_save", "file": 0, "offset": 1, "length": -1}, "-1 bytes"),
        ({"encoding": "torch_save", "file": 0, "offset": BIG, "length": BIG}, "which has 1000"),
        ({"path": [None]}, "damaged"),
    ],
)
def test_lies_about_objects(changes: dict[str, Any], message: str) -> None:
    data = sections()
    data["objects"] = an_object(**changes)
    with pytest.raises(CorruptCheckpointError, match=message):
        open_all(data)


def test_what_a_later_version_wrote_is_unsupported() -> None:
    for name, value, message in [
        ("tensor.kind", b"\0\1", "kind 1"),
        ("tensor.dtype", b"\0\xc8", "dtype code 200"),
        ("chunk.dtype", b"\3\3\xc8", "dtype code 200"),
        ("groups", pack([{"op": "median"}]), "median"),
        ("objects", an_object(encoding="json"), "json"),
    ]:
        data = sections() | {name: value}
        with pytest.raises(UnsupportedError, match=message):
            open_all(data)
    # Fields and sections that are new but harmless are ignored (docs/format.md: what matters raises min_reader).
    data = sections() | {"objects": an_object(digest="x"), "tensor.colour": b"\1"}
    assert open_all(data).objects[0].value == 1


def test_many_dims() -> None:
    data = sections()
    data["tensor.shape_start"] = i64(0, 65, 65)
    data["tensor.shape"] = i64(*[1] * 65)
    with pytest.raises(CorruptCheckpointError, match="65 dims, expected at most 64"):
        open_all(data)


def test_one_tensor_is_checked_when_used() -> None:
    """Access to one tensor checks that one; any access to whole columns checks all."""
    data = sections()
    data["chunk.offset"] = i64(0, 32, 993)  # "b" is wrong
    catalog = Catalog.from_sections(lambda name: memoryview(data[name]) if name in data else None)
    assert catalog.boxes(0).tolist() == [[[0, 0], [2, 4]], [[2, 0], [2, 4]]]
    uses: list[Callable[[], Any]] = [
        lambda: catalog.boxes(1),
        lambda: catalog.strides(1),
        lambda: catalog.chunk_dtypes(1),
        lambda: catalog.groups_of(1),
        lambda: catalog.coords,
        lambda: catalog.chunk_file,
        lambda: catalog.chunk_offset,
        lambda: catalog.chunk_dtype,
        lambda: catalog.chunk_strides,
        lambda: catalog.chunk_group,
        lambda: catalog.to_sections(),
    ]
    for use in uses * 3:  # more often than tensors are checked one by one
        with pytest.raises(CorruptCheckpointError, match="'b': chunk 0 claims"):
            use()
    assert catalog.boxes(0).shape == (2, 2, 2)


def test_sections_are_loaded_when_needed() -> None:
    data, asked = sections(), []

    def load(name: str) -> memoryview | None:
        asked.append(name)
        return memoryview(data[name]) if name in data else None

    catalog = Catalog.from_sections(load)
    assert "chunk.coords" not in asked and "tensor.key" not in asked and "objects" not in asked
    catalog.find("a")
    assert "tensor.key" in asked and "chunk.coords" not in asked
    catalog.boxes(0)
    assert "chunk.coords" in asked
    catalog.validate()
    assert len(asked) == len(set(asked)), "a section was read twice"


def test_counts_are_not_allocated() -> None:
    """A few bytes that claim 2**40 chunks cost no memory."""
    data = sections()
    data["tensor.chunk_start"] = i64(0, 2**40, 2**40)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError):
        open_all(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_any_damage_is_a_named_error_or_a_valid_catalog(data: st.DataObject) -> None:
    """Bytes flipped, cut off or doubled anywhere: an error of ours, or a catalog whose every part holds."""
    parts = sections()
    name = data.draw(st.sampled_from(sorted(parts)))
    raw = bytearray(parts[name])
    how = data.draw(st.sampled_from(["flip", "cut", "twice", "big"]))
    if how == "flip" and raw:
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del raw[data.draw(st.integers(0, len(raw))) :]
    elif how == "twice":
        raw = raw + raw
    elif len(raw) >= 8:
        at = data.draw(st.integers(0, len(raw) // 8 - 1)) * 8
        raw[at : at + 8] = i64(data.draw(st.sampled_from([BIG, -BIG - 1, 2**62, 2**32, -1])))
    parts[name] = bytes(raw)
    try:
        catalog = open_all(parts)
    except UCPError:
        return
    for t in range(catalog.n_tensors):
        row, boxes, strides = catalog.tensor(t), catalog.boxes(t), catalog.strides(t)
        first, last = catalog.chunk_range(t)
        assert boxes.shape == (last - first, 2, len(row.shape))
        assert ((boxes >= 0).all() and (boxes.sum(axis=1) <= np.array(row.shape)).all()) or not row.shape
        for i in range(last - first):
            if 0 not in boxes[i, 1]:
                end = int(catalog.chunk_offset[first + i]) + sum(
                    (n - 1) * s for n, s in zip(boxes[i, 1].tolist(), strides[i].tolist(), strict=True)
                )
                assert 0 <= end < catalog.files[catalog.chunk_file[first + i]].size
