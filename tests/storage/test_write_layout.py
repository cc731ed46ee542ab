"""The plan of a data file against the plain reading of docs/format.md."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.dtypes import itemsize
from ucp_dcp.errors import UnsupportedError
from ucp_dcp.storage.file_layout import plan_file
from ucp_dcp.storage.framing import align, tensor_frame

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "complex128")
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=8)
objects = st.lists(st.integers(0, 200), max_size=4)


def payload_bytes(items, sizes):
    random = np.random.default_rng(0)
    return [random.bytes(math.prod(shape) * itemsize(dtype)) for dtype, shape in items] + [random.bytes(size) for size in sizes]


def plain(items, sizes, payloads, framed):
    """The file, item by item; offset, length and first payload byte of each."""
    out, rows = bytearray(), []
    for number, payload in enumerate(payloads):
        out += bytes(align(len(out)) - len(out))
        start = len(out)
        frame = tensor_frame(*items[number]) if framed and number < len(items) else None
        out += frame.head if frame else b""
        at = len(out)
        out += payload + (frame.tail if frame else b"")
        rows.append((start, len(out) - start, at))
    return bytes(out), rows


@settings(max_examples=150, deadline=None)
@given(tensors, objects, st.booleans(), st.data())
def test_any_slice_of_the_file(items, sizes, framed, data):
    payloads = payload_bytes(items, sizes)
    expected, rows = plain(items, sizes, payloads, framed)
    layout = plan_file(items, sizes, framed=framed)
    assert layout.size == len(expected)
    assert list(zip(layout.offset.tolist(), layout.length.tolist(), layout.payload.tolist(), strict=True)) == rows
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.size), max_size=6)))
    edges = [0, *cuts, layout.size]
    found = b""
    for start, stop in itertools.pairwise(edges):
        parts = layout.parts(start, stop)
        assert all(first < last for _, first, last in parts)
        for (item, first, _), place in zip(parts, layout.places(parts), strict=True):
            assert place == rows[item][2] + first
        piece = b"".join(layout.fill(start, stop, parts, [payloads[item][first:last] for item, first, last in parts]))
        assert len(piece) == stop - start
        found += piece
    assert found == expected


def test_no_items():
    layout = plan_file([], [], framed=True)
    assert (layout.size, len(layout), layout.parts(0, 100)) == (0, 0, [])


def test_unknown_dtype():
    with pytest.raises(UnsupportedError, match="float7"):
        plan_file([("float7", (2,))], [], framed=False)


def test_a_file_beyond_4_gib_is_planned_without_memory():
    items = [("float32", (1 << 31,)), ("float32", (3,)), ("bfloat16", (1 << 34, 2))]
    layout = plan_file(items, [5], framed=True)
    assert layout.size > (1 << 36) + (1 << 33)
    start = int(layout.payload[2]) + (1 << 35)
    assert layout.parts(start, start + 100) == [(2, 1 << 35, (1 << 35) + 100)]
