"""The catalog: rows and columns in, the same out, through sections and pickle."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.catalog import Catalog, CatalogBuilder, FileRow, ObjectRow
from ucp_dcp.dtypes import ITEMSIZE, NAMES
from ucp_dcp.errors import FormatError, PlanError, UnsupportedError
from ucp_dcp.geometry import c_strides
from ucp_dcp.names import Role


def reopen(catalog: Catalog) -> Catalog:
    sections = {name: bytes(data) for name, data in catalog.to_sections().items()}
    return Catalog.from_sections(lambda name: memoryview(sections[name]) if name in sections else None)


def sample() -> Catalog:
    b = CatalogBuilder()
    f = b.add_file("g-1/__0_0.distcp", 1000)
    g = b.add_file("g-1/__1_0.distcp", 2000)
    p = b.add_pattern({"text": "tp: Shard(0)", "parts": [1, 2]})
    t = b.add_tensor(key="net.w", role=Role.WEIGHT, fqn="w", dtype="float32", shape=(4, 4), pattern=p, path=("net", "w"))
    b.add_chunks(t, np.array([[[0, 0], [2, 4]]]), f, 0)
    b.add_chunks(t, np.array([[[2, 0], [2, 4]]]), g, [64])
    t = b.add_tensor(key="a.step", role=Role.STATE, fqn="w", state="step", dtype="float32", shape=())
    b.add_chunks(t, np.zeros((1, 2, 0), dtype=np.int64), f, 128)
    mean = b.add_group("mean")
    t = b.add_tensor(key="a.exp_avg", role=Role.STATE, fqn="w", state="exp_avg", dtype="float32", shape=(3, 2), path=("a", 0, "exp_avg"))
    b.add_chunks(t, np.array([[[0, 0], [3, 2]]] * 2), np.array([f, g]), np.array([200, 200]), np.array([[1, 3], [0, 2]]), "bfloat16", mean)
    b.add_tensor(key="nothing", role=Role.PLAIN, fqn="", dtype="int64", shape=(0, 5))
    b.add_object(ObjectRow("lr", fqn="optim.param_groups.0.lr", value=0.1))
    b.add_object(ObjectRow("sched", path=("sched", 3), file=g, offset=1500, length=500, encoding="torch_save"))
    return b.build()


def everything(c: Catalog) -> dict[str, Any]:
    return {
        "rows": list(c.tensors()),
        "boxes": [c.boxes(t).tolist() for t in range(c.n_tensors)],
        "strides": [c.strides(t).tolist() for t in range(c.n_tensors)],
        "dtypes": [c.chunk_dtypes(t).tolist() for t in range(c.n_tensors)],
        "groups": [c.groups_of(t).tolist() for t in range(c.n_tensors)],
        "places": (c.chunk_file.tolist(), c.chunk_offset.tolist()),
        "others": (c.files, c.objects, c.patterns, c.groups, c.state_names, c.paths, c.n_chunks),
    }


def test_rows_and_columns() -> None:
    c = sample()
    assert list(c.keys) == ["a.exp_avg", "a.step", "net.w", "nothing"]
    w = c.tensor(2)
    assert (w.key, w.role, w.fqn, w.state, w.dtype, w.shape) == ("net.w", Role.WEIGHT, "w", "", "float32", (4, 4))
    assert (w.pattern, w.path, w.name) == ("tp: Shard(0)", ("net", "w"), "model.w")
    assert c.tensor(0).path == ("a", 0, "exp_avg") and c.tensor(1).path == ("a.step",)
    assert c.boxes(2).tolist() == [[[0, 0], [2, 4]], [[2, 0], [2, 4]]]
    first, last = c.chunk_range(2)
    assert c.chunk_file[first:last].tolist() == [0, 1] and c.chunk_offset[first:last].tolist() == [0, 64]
    assert c.strides(2).tolist() == [[4, 1], [4, 1]] and c.strides(0).tolist() == [[1, 3], [0, 2]] and c.strides(1).shape == (1, 0)
    assert [NAMES[d] for d in c.chunk_dtypes(0)] == ["bfloat16"] * 2 and [NAMES[d] for d in c.chunk_dtypes(2)] == ["float32"] * 2
    assert c.groups_of(0).tolist() == [0, 0] and c.groups_of(2).tolist() == [-1, -1] and c.groups == ({"op": "mean"},)
    assert c.boxes(3).shape == (0, 2, 2)
    assert c.tensor_of(np.arange(c.n_chunks)).tolist() == [0, 0, 1, 2, 2]
    with pytest.raises(IndexError):
        c.tensor(4)
    with pytest.raises(IndexError):
        c.boxes(-1)


def test_lookups() -> None:
    c = sample()
    assert c.find("net.w") == 2 and c.find("net") is None and c.find("zzz") is None
    assert c.find_named(Role.WEIGHT, "w") == 2 and c.find_named(Role.STATE, "w", "step") == 1
    assert c.find_named(Role.MASTER, "w") is None and c.find_named(Role.PLAIN, "") is None
    assert c.find_canonical("model.w") == 2 and c.find_canonical("optim.state.w.exp_avg") == 0 and c.find_canonical("nothing") == 3
    lr = c.find_object("lr")
    assert lr is not None and lr == c.find_object("optim.param_groups.0.lr") and lr.value == 0.1 and lr.path == ("lr",)
    assert c.find_object("net.w") is None


def test_names_that_are_not_unique_are_found_by_key_only() -> None:
    b = CatalogBuilder()
    for key in ("ema.w", "model.w"):
        b.add_tensor(key=key, role=Role.WEIGHT, fqn="w", dtype="float32", shape=(0,))
    b.add_object(ObjectRow("x", fqn="n", value=1))
    b.add_object(ObjectRow("y", fqn="n", value=2))
    c = b.build()
    assert c.find("ema.w") == 0 and c.find_all_named(Role.WEIGHT, "w") == (0, 1)
    with pytest.raises(PlanError, match=r"'ema\.w', 'model\.w'"):
        c.find_named(Role.WEIGHT, "w")
    with pytest.raises(PlanError, match="canonical"):
        c.find_canonical("model.w")
    with pytest.raises(PlanError, match="'x', 'y'"):
        c.find_object("n")


def test_sections_and_pickle_give_the_same_catalog() -> None:
    c = sample()
    assert everything(reopen(c)) == everything(c)
    assert everything(pickle.loads(pickle.dumps(c))) == everything(c)
    assert everything(pickle.loads(pickle.dumps(reopen(c)))) == everything(c)
    # The same bytes again: an index can be compared and cached by digest.
    assert {n: bytes(d) for n, d in reopen(c).to_sections().items()} == {n: bytes(d) for n, d in c.to_sections().items()}


def test_empty_catalog() -> None:
    c = reopen(CatalogBuilder().build())
    assert c.n_tensors == 0 and c.n_chunks == 0 and list(c.tensors()) == [] and c.find("x") is None and c.objects == ()
    assert c.coords.tolist() == []


def test_immutable() -> None:
    c = sample()
    for opened in (c, reopen(c)):
        for array in (opened.coords, opened.chunk_offset, opened.chunk_file, opened.shape, opened.tensor_dtype, opened.boxes(2)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    offsets = np.array([0, 8], dtype=np.int64)
    Catalog.from_columns(**columns(chunk_offset=offsets))
    offsets[0] = 4  # the caller's array stays writable


def columns(**changes: Any) -> dict[str, Any]:
    """Columns of one 2 x 2 float32 tensor "t" in two chunks, with changes."""
    out: dict[str, Any] = {
        "keys": ["t"],
        "roles": [5],
        "fqns": [""],
        "states": [""],
        "dtypes": [0],
        "shape_start": np.array([0, 2]),
        "shape": np.array([2, 2]),
        "chunk_start": np.array([0, 2]),
        "coords": np.array([0, 0, 1, 2, 1, 0, 1, 2]),
        "files": [FileRow("f", 16)],
        "chunk_file": np.array([0, 0]),
        "chunk_offset": np.array([0, 8]),
    }
    return out | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fqns": []}, "fqns has 0"),
        ({"roles": [6]}, "tensor.role holds 6"),
        ({"roles": [300]}, "do not fit"),
        ({"roles": [0.5]}, "integers"),
        ({"shape": np.array([2, 2, 2])}, "shape_start ends at 2, expected 3"),
        ({"shape": np.array([2, -2])}, "tensor.shape holds -2"),
        ({"chunk_start": np.array([0, 1])}, "chunk.file has 2 entries, expected 1"),
        ({"chunk_start": np.array([1, 2])}, "starts at 1"),
        ({"coords": np.array([0, 0, 1, 2])}, "chunk.coords has 4"),
        ({"coords": np.array([0, 0, 1, 2, 1, 0, 2, 2])}, r"'t': chunk 1, offset \[1, 0\], size \[2, 2\], does not lie in shape \[2, 2\]"),
        ({"chunk_file": np.array([0, 1])}, "chunk.file holds 1"),
        ({"chunk_file": np.array([-1, 0])}, "chunk.file holds -1"),
        ({"chunk_offset": np.array([0, 9])}, "'t': chunk 1 claims 8 bytes at byte 9 of 'f', which has 16 bytes"),
        ({"chunk_offset": np.array([-1, 8])}, "at byte -1"),
        ({"chunk_dtype": np.array([0, 1])}, "chunk 1 claims 16 bytes at byte 8"),
        ({"keys": [5]}, "key of type int"),
        ({"fqns": [None]}, "fqn of type NoneType"),
        ({"paths": [("a", 1.5)]}, "path"),
        ({"chunk_group": np.array([-1, 0])}, "chunk.group holds 0"),
        ({"strides": np.array([2, 1, 2, 1])}, "both"),
        ({"strided": [1], "strides": np.array([2, 1])}, "chunk.strides has 2"),
        ({"strided": [1], "strides": np.array([2, 1, 2, -1])}, r"strides \[2, -1\]"),
        ({"strided": [1], "strides": np.array([2, 1, 2, 2])}, "claims 12 bytes"),
        ({"strided": [2], "strides": np.array([2, 1, 2, 1])}, "tensor.strided holds 2"),
        ({"files": [FileRow("../f", 16)]}, "segment"),
        ({"files": [FileRow("f", 16), FileRow("f", 17)]}, "listed twice"),
        ({"files": [FileRow("f", -1)]}, "size -1"),
        ({"pattern": [0]}, "tensor.pattern holds 0"),
        ({"objects": [ObjectRow("t", value=1)]}, "same key 't'"),
        ({"objects": [ObjectRow("o", value=1), ObjectRow("o", value=2)]}, "listed twice"),
        ({"objects": [ObjectRow("o", file=0, offset=10, length=7, encoding="torch_save")]}, "7 bytes at byte 10"),
        ({"objects": [ObjectRow("o", file=1, encoding="torch_save")]}, "file 1"),
    ],
)
def test_wrong_columns(changes: dict[str, Any], message: str) -> None:
    Catalog.from_columns(**columns())
    with pytest.raises(FormatError, match=message):
        Catalog.from_columns(**columns(**changes))


def test_duplicate_keys_and_unknown_codes() -> None:
    b = CatalogBuilder()
    for _ in range(2):
        b.add_tensor(key="k", role=Role.PLAIN, fqn="", dtype="float32", shape=(0,))
    with pytest.raises(FormatError, match="two tensors have the key 'k'"):
        b.build()
    with pytest.raises(UnsupportedError, match="dtype code 99"):
        Catalog.from_columns(**columns(dtypes=[99]))
    with pytest.raises(UnsupportedError, match="median"):
        CatalogBuilder().add_group("median")
    with pytest.raises(UnsupportedError, match="json"):
        Catalog.from_columns(**columns(objects=[ObjectRow("o", encoding="json")]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="float7"):
        CatalogBuilder().add_tensor(key="k", role=Role.PLAIN, fqn="", dtype="float7", shape=())


def test_builder_refuses() -> None:
    b = CatalogBuilder()
    f = b.add_file("f", 10)
    assert b.add_file("f", 10) == f
    with pytest.raises(FormatError, match="10 bytes and also 11"):
        b.add_file("f", 11)
    assert b.add_pattern({"text": "x"}) == b.add_pattern({"text": "x"}) == 0 and b.add_pattern({"text": "y"}) == 1
    with pytest.raises(FormatError, match="text"):
        b.add_pattern({})
    t = b.add_tensor(key="k", role=Role.PLAIN, fqn="", dtype="float32", shape=(2, 2))
    box = np.array([[[0, 0], [2, 2]]])
    for kwargs, message in [
        ({"boxes": box[:, :, :1]}, r"\(k, 2, 2\)"),
        ({"boxes": box.astype(np.float64)}, "integers"),
        ({"boxes": np.array([[[0, 0], [2, 2**64 - 1]]], dtype=np.uint64)}, "below"),
        ({"file": 2**31}, "file must be"),
        ({"offset": np.array([1, 2])}, "offset must be one number or 1"),
        ({"offset": 2**63}, "below|limit|2\\*\\*63"),
        ({"strides": np.array([[1]])}, "strides of shape"),
    ]:
        with pytest.raises(FormatError, match=message):
            b.add_chunks(t, **({"boxes": box, "file": f, "offset": 0} | kwargs))
    with pytest.raises(FormatError, match="pattern 7"):
        b.add_tensor(key="l", role=Role.PLAIN, fqn="", dtype="float32", shape=(), pattern=7)
    with pytest.raises(FormatError, match="shape"):
        b.add_tensor(key="l", role=Role.PLAIN, fqn="", dtype="float32", shape=(2**63,))


def test_inline_values() -> None:
    """A parser may put any value inline; only what comes back unchanged can be written."""
    good = {"a": [1, 2.5, None, True, "ü", -(2**63), 2**64 - 1, {3: []}], "b": float("inf")}
    b = CatalogBuilder()
    b.add_object(ObjectRow("o", value=good))
    assert reopen(b.build()).objects[0].value == good
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value, what in [((1, 2), "tuple"), (2**64, "64 bits"), ({1.5: 1}, "float"), (b"x", "bytes"), ([[{1}]], "set"), (deep, "levels")]:
        b = CatalogBuilder()
        b.add_object(ObjectRow("o", value=value))
        c = b.build()
        assert c.objects[0].value == value
        assert pickle.loads(pickle.dumps(c)).objects[0].value == value
        with pytest.raises(FormatError, match=what):
            c.to_sections()


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(FormatError, match=r"tensor\.key"):
        Catalog.from_columns(**columns(keys=["\ud800"])).to_sections()


def test_sorted_by_code_point() -> None:
    """Beyond U+FFFF the order of UTF-16 differs from that of code points; the format says code points, and a reader checks it."""
    keys = ["\U0001f600", "\uffee", "a", "B", "é"]
    b = CatalogBuilder()
    for key in keys:
        b.add_tensor(key=key, role=Role.PLAIN, fqn="", dtype="uint8", shape=(0,))
    c = reopen(b.build())
    assert list(c.keys) == ["B", "a", "é", "\uffee", "\U0001f600"] and all(c.tensor(c.find(k) or 0).key == k for k in keys)


def test_many_state_names() -> None:
    with pytest.raises(FormatError, match="state names"):
        n = 2**16
        Catalog.from_columns(
            **columns(
                keys=[str(i) for i in range(n)],
                roles=np.full(n, 2),
                fqns=["w"] * n,
                states=[f"s{i}" for i in range(n)],
                dtypes=np.zeros(n, dtype=int),
                shape_start=np.zeros(n + 1, dtype=int),
                shape=np.array([], dtype=int),
                chunk_start=np.zeros(n + 1, dtype=int),
            )
        )


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    out = []
    for key in draw(st.lists(st.text(max_size=4), unique=True, max_size=5)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        n = len(shape)
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            offset = [draw(st.integers(0, size)) for size in shape]
            boxes.append([offset, [draw(st.integers(0, size - o)) for size, o in zip(shape, offset, strict=True)]])
        k = len(boxes)
        out.append(
            {
                "key": key,
                "role": draw(st.sampled_from(Role)),
                "fqn": draw(st.text(max_size=3)),
                "state": draw(st.sampled_from(["", "exp_avg", "step"])),
                "dtype": draw(st.sampled_from(NAMES)),
                "shape": shape,
                "path": draw(st.none() | st.lists(st.text(max_size=2) | st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
                "boxes": np.array(boxes, dtype=np.int64).reshape(k, 2, n),
                "offset": np.array([draw(st.integers(0, 1000)) for _ in range(k)], dtype=np.int64),
                "file": np.array([draw(st.integers(0, 1)) for _ in range(k)], dtype=np.int64),
                "strides": draw(st.none() | st.just(np.array([[draw(st.integers(0, 9)) for _ in range(n)]] * k).reshape(k, n))),
                "stored": draw(st.none() | st.sampled_from(NAMES)),
                "group": draw(st.none() | st.integers(-1, 0)),
            }
        )
    return out


@given(rows())
@settings(max_examples=60, deadline=None)
def test_round_trip(tensors: list[dict[str, Any]]) -> None:
    """Whatever is added in whatever order comes out by key, through sections too."""
    b = CatalogBuilder()
    b.add_file("a/f", 10**6)
    b.add_file("g", 10**6)
    b.add_group("bf16_remainder")
    for row in tensors:
        handle = b.add_tensor(**{name: row[name] for name in ("key", "role", "fqn", "state", "dtype", "shape", "path")})
        b.add_chunks(handle, row["boxes"], row["file"], row["offset"], row["strides"], row["stored"], row["group"])
    built = b.build()
    for c in (built, reopen(built)):
        assert list(c.keys) == sorted(row["key"] for row in tensors)
        for row in tensors:
            t = c.find(row["key"])
            assert t is not None
            got = c.tensor(t)
            for name in ("key", "role", "fqn", "state", "dtype", "shape"):
                assert getattr(got, name) == row[name]
            assert got.path == (row["path"] if row["path"] is not None else (row["key"],))
            first, last = c.chunk_range(t)
            np.testing.assert_array_equal(c.boxes(t), row["boxes"])
            np.testing.assert_array_equal(c.chunk_offset[first:last], row["offset"])
            np.testing.assert_array_equal(c.chunk_file[first:last], row["file"])
            strides = row["strides"] if row["strides"] is not None else [c_strides(size) for size in row["boxes"][:, 1].tolist()]
            np.testing.assert_array_equal(c.strides(t), np.array(strides).reshape(c.strides(t).shape))
            assert [NAMES[d] for d in c.chunk_dtypes(t)] == [row["stored"] or row["dtype"]] * (last - first)
            assert c.groups_of(t).tolist() == [-1 if row["group"] is None else row["group"]] * (last - first)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_last_byte(data: st.DataObject) -> None:
    """A chunk may reach to the last byte of its file and not one further, with any strides and dtype; empty boxes need no bytes."""
    size = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = [data.draw(st.integers(0, 2**20)) for _ in size]
    code = data.draw(st.integers(0, len(NAMES) - 1))
    offset = data.draw(st.integers(0, 2**40))
    need = 0 if 0 in size else (sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1) * ITEMSIZE[code]
    for length, fits in [(offset + need, True), (offset + need - 1, False)]:
        if length < 0:
            continue
        b = CatalogBuilder()
        b.add_file("f", length)
        t = b.add_tensor(key="t", role=Role.PLAIN, fqn="", dtype="uint8", shape=size)
        box = np.array([[[0] * len(size), size]], dtype=np.int64).reshape(1, 2, len(size))
        b.add_chunks(t, box, 0, offset, np.array([strides], dtype=np.int64).reshape(1, len(size)), NAMES[code])
        if fits:
            assert b.build().strides(0).tolist() == [strides]
        else:
            with pytest.raises(FormatError, match="which has"):
                b.build()
