from __future__ import annotations

import json
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import CorruptCheckpointError, FormatError, UnsupportedError
from ucp_dcp.storage.manifest import MAX_BYTES, FileDigest, Manifest, Section, _digest_of, check_generation, digest

GEN = "g-" + "0123456789abcdef" * 2
HEX = "ab" * 16


def make(**changes):
    sections = {"tensor.key": Section(0, 100, HEX), "chunk.coords": Section(128, 64, HEX), "empty": Section(192, 0, HEX)}
    fields = {
        "generation": GEN,
        "index_path": f"{GEN}/index.ucp",
        "index_size": 192,
        "sections": sections,
        "provenance": {"writer": "t", "ü": [1, 2.5, None]},
    }
    return Manifest.new(**{**fields, **changes})


def edited(change, keep_digest=False):
    fields = json.loads(make().to_bytes())
    stated = fields.pop("xxh3")
    change(fields)
    fields["xxh3"] = stated if keep_digest else _digest_of(fields)
    return json.dumps(fields).encode()


def test_round_trip():
    one, two = FileDigest.of(b"abc"), FileDigest.of(bytes(200_000))
    manifest = make().replacing(one, two)
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest == pickle.loads(pickle.dumps(manifest))
    assert again.metadata == one and again.previous_metadata == two and again.provenance["ü"] == [1, 2.5, None]
    assert dict(again.sections) == dict(make().sections) and again.sections["tensor.key"] == Section(0, 100, HEX)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", again.created)
    assert manifest.to_bytes() == again.to_bytes()


def test_the_text_is_json_as_the_page_says():
    data = make().to_bytes()
    fields = json.loads(data)
    names = "format version min_reader generation created index metadata previous_metadata provenance superseded xxh3"
    assert set(fields) == set(names.split())
    assert fields["format"] == "ucp_dcp" and fields["version"] == 1 and fields["metadata"] is None
    stated = fields.pop("xxh3")
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert digest(canonical) == stated and "ü".encode() in canonical
    # the layout of the text is free
    assert Manifest.from_bytes(json.dumps({**fields, "xxh3": stated}, indent=4).encode()) == Manifest.from_bytes(data)


def test_unknown_fields_are_ignored_but_covered():
    assert Manifest.from_bytes(edited(lambda f: f.update(later={"x": 1}))).generation == GEN
    with pytest.raises(CorruptCheckpointError, match="digest"):
        Manifest.from_bytes(edited(lambda f: f.update(later=1), keep_digest=True))


def test_newer_versions():
    assert Manifest.from_bytes(edited(lambda f: f.update(version=5))).version == 5
    for keep_digest in (True, False):  # a newer version may compute it in another way
        data = edited(lambda f: f.update(version=5, min_reader=3), keep_digest)
        with pytest.raises(UnsupportedError, match=r"version 5.*version 3 \(min_reader\).*up to version 1"):
            Manifest.from_bytes(data)


BIG = 10**400
BAD_INDEX_PATHS = (
    "/etc/passwd",
    f"{GEN}/../../x",
    "index.ucp",
    "",
    f"{GEN}//x",
    f"{GEN}\\x",
    f"{GEN}/\0",
    f"{GEN}0/index.ucp",
    3,
    None,
)
BAD_FIELDS = {
    "version": ["1", 1.0, True, -1, None, 0, BIG],
    "min_reader": ["1", 0, -1, True, None],
    "generation": ["g-xyz", "../" + GEN, GEN + "/", GEN.upper(), 7, None, GEN + "\n"],
    "created": ["yesterday", "2024-01-01", "2024-01-01T00:00:00", "2024-01-01T00:00:00+02:00", 5, None],
    "metadata": [
        [],
        "x",
        {},
        {"size": -1, "xxh3": HEX, "ends": HEX},
        {"size": 1, "xxh3": "AB" * 16, "ends": HEX},
        {"size": 1, "xxh3": HEX},
    ],
    "previous_metadata": [0, {"size": 1 << 62, "xxh3": HEX, "ends": HEX}],
    "provenance": [None, [], "x"],
    "index": [
        None,
        [],
        {"path": f"{GEN}/index.ucp", "size": -1, "sections": {}},
        {"path": f"{GEN}/index.ucp", "size": BIG, "sections": {}},
        {"path": f"{GEN}/index.ucp", "size": 5},
        {"path": f"{GEN}/index.ucp", "size": 5, "sections": []},
        *({"path": path, "size": 0, "sections": {}} for path in BAD_INDEX_PATHS),
    ],
}
BAD_SECTIONS = [
    {"a": [0, 1]},
    {"a": {"offset": 0}},
    {"a": [0, -1, HEX]},
    {"a": [-64, 64, HEX]},
    {"a": [1, 4, HEX]},
    {"a": [0, 193, HEX]},
    {"a": [0, 1 << 61, HEX]},
    {"a": [1 << 61, 1 << 61, HEX]},
    {"a": [0, 10, "zz" * 16]},
    {"a": [0, 10.0, HEX]},
    {"a": [0, 65, HEX], "b": [64, 1, HEX]},
    {"a": [0, 128, HEX], "b": [64, 64, HEX], "c": [128, 64, HEX]},
]


@pytest.mark.parametrize("field, value", [(f, v) for f, values in BAD_FIELDS.items() for v in values], ids=lambda v: ascii(v)[:40])
def test_bad_fields(field, value):
    with pytest.raises(FormatError, match=f"(?s)ucp.json.*{field}|ucp.json.*generation"):
        Manifest.from_bytes(edited(lambda f: f.__setitem__(field, value)))
    with pytest.raises(FormatError):
        Manifest.from_bytes(edited(lambda f: f.__delitem__(field)))


@pytest.mark.parametrize("sections", BAD_SECTIONS, ids=str)
def test_bad_sections(sections):
    with pytest.raises(CorruptCheckpointError, match="sections"):
        Manifest.from_bytes(edited(lambda f: f["index"].update(sections=sections)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"ucp_dcp"',
        b"{}",
        b'{"format": "zarr"}',
        b'{"format": "ucp_dcp"}',
        b'{"format": "ucp_dcp", "format": "ucp_dcp", "version": 1, "min_reader": 1}',
        b'{"format": "ucp_dcp", "version": 1, "min_reader": 1, "x": NaN}',
        b'{"format": "ucp_dcp", "version": 1, "min_reader": 1, "x": 1e999}',
        b'{"format": "ucp_dcp", "version": 1, "min_reader": 1, "x": "\\ud800"}',
        b'{"format": "ucp_dcp", "version": ' + b"9" * 5000 + b"}",
        b"[" * 60_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b" " * (MAX_BYTES + 1),
    ],
    ids=lambda d: ascii(d[:40]),
)
def test_bad_bytes(data):
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_changed_byte_is_noticed_or_harmless(position, value):
    original = make().to_bytes()
    data = bytearray(original)
    data[position % len(data)] = value
    try:
        manifest = Manifest.from_bytes(bytes(data))
    except (FormatError, UnsupportedError):
        return
    assert manifest.to_bytes() == bytes(original)  # white space


def test_what_cannot_be_written():
    with pytest.raises(FormatError, match="65536"):
        make(provenance={"note": "x" * MAX_BYTES})
    for bad in ({"x": float("nan")}, {"x": object()}, {"x": b"bytes"}, {1: 2, "a": 3}, {"x": "\ud800"}):
        with pytest.raises(FormatError, match="provenance"):
            make(provenance=bad)
    for bad in ({"index_path": "../x"}, {"index_path": "o/index.ucp"}, {"generation": "latest"}, {"index_size": -1}, {"index_size": 100}):
        with pytest.raises(FormatError):
            make(**bad)


def test_check_generation():
    assert check_generation(GEN) == GEN
    for bad in ("", "g-", GEN[:-1], GEN + "0", None, 5, "../" + GEN):
        with pytest.raises(FormatError):
            check_generation(bad)


def test_file_digest():
    small, large = b"x" * 65536, b"a" * 32768 + b"m" + b"z" * 32768
    assert FileDigest.of(small).ends == FileDigest.of(small).xxh3
    assert FileDigest.of(large).ends == digest(b"a" * 32768 + b"z" * 32768) != FileDigest.of(large).xxh3
    for data in (b"", small, large):
        parts = b"".join(data[start : start + length] for start, length in FileDigest.end_ranges(len(data)))
        assert digest(parts) == FileDigest.of(data).ends
