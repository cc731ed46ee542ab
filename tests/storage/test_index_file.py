from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import CorruptCheckpointError
from ucp_dcp.storage.index_file import IndexFile, write_index
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.manifest import Section, digest

from .dictstore import DictStore


class Counting(DictStore):
    def __init__(self, files=None):
        super().__init__(files)
        self.calls = []

    def read_ranges(self, ranges, into):
        self.calls.append([(r.start, r.length) for r in ranges])
        super().read_ranges(ranges, into)


def written(sections, store=None):
    store = store or Counting()
    size, table = write_index(store, "g/index.ucp", sections)
    return store, IndexFile(store, "g/index.ucp", size, table), size, table


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_round_trip(contents, data):
    sections = {f"s{i}": content for i, content in enumerate(contents)}
    store, index, size, table = written(sections)
    file = store.files["g/index.ucp"]
    assert len(file) == size
    covered = bytearray(len(file))
    for name, section in table.items():
        assert section.offset % 64 == 0 and section.xxh3 == digest(sections[name])
        assert file[section.offset :][: section.size] == sections[name]
        covered[section.offset : section.offset + section.size] = b"x" * section.size
    assert all(byte == 0 for byte, mark in zip(file, covered, strict=True) if not mark)
    for name in data.draw(st.permutations(list(sections))):
        assert bytes(index.load(name)) == sections[name]
    assert index.load("nothing") is None
    assert list(index) == list(sections) and ("s0" in index) == bool(sections)
    assert len(store.calls) == bool(sections)


def test_small_sections_in_one_call_large_ones_alone():
    big, other = np.arange(200_000).tobytes(), np.ones(100_000).tobytes()
    sections = {"a": b"1" * 10, "big": big, "b": b"2" * 100, "other": other, "c": b"3"}
    store, index, _, table = written(sections)
    assert store.calls == []
    assert bytes(index.load("b")) == b"2" * 100 and bytes(index.load("c")) == b"3" and bytes(index.load("a")) == b"1" * 10
    assert len(store.calls) == 1 and sum(length for _, length in store.calls[0]) < 200
    values = np.frombuffer(index.load("big"), np.int64)
    assert values[-1] == 199_999 and not values.flags.writeable and values.flags.aligned
    assert store.calls[1:] == [[(table["big"].offset, table["big"].size)]]
    index.load("big"), index.load("a")
    assert len(store.calls) == 2
    copy = pickle.loads(pickle.dumps(IndexFile(DictStore(store.files), "g/index.ucp", store.size("g/index.ucp"), table)))
    assert bytes(copy.load("other")) == other
    store, index, *_ = written(sections)
    index.prefetch("big", "other", "unknown")
    index.prefetch()
    assert len(store.calls) == 2 and bytes(index.load("big")) == big
    assert len(pickle.dumps(index)) < len(big) + len(store.files["g/index.ucp"])


@pytest.mark.parametrize("name", ["a", "big"])
def test_damage_is_found_on_first_use_and_named(name):
    store, index, _, table = written({"a": b"abc", "big": bytes(300_000)})
    file = bytearray(store.files["g/index.ucp"])
    file[table[name].offset + 1] ^= 1
    store.files["g/index.ucp"] = bytes(file)
    other = {"a": "big", "big": "a"}[name]
    assert index.load(other) is not None
    with pytest.raises(CorruptCheckpointError, match=f"'{name}'.*digest"):
        index.load(name)


def test_missing_and_truncated():
    store, index, size, table = written({"a": b"abc", "b": bytes(100)})
    store.files["g/index.ucp"] = store.files["g/index.ucp"][:-1]
    with pytest.raises(CorruptCheckpointError):
        index.load("a")
    store.delete("g/index.ucp")
    with pytest.raises(CorruptCheckpointError, match="incomplete"):
        IndexFile(store, "g/index.ucp", size, table).load("b")


@pytest.mark.parametrize("claimed", [1 << 40, 1 << 61])
def test_absurd_sizes_are_refused_before_memory_is_taken(tmp_path, claimed):
    store = LocalStore(tmp_path)
    store.put("g/index.ucp", b"abc")
    index = IndexFile(store, "g/index.ucp", claimed, {"x": Section(0, claimed, "0" * 32)})
    with pytest.raises(CorruptCheckpointError, match="3 bytes"):
        index.load("x")
    many = {f"s{i}": Section(i << 18, 1 << 18, "0" * 32) for i in range(400)}  # each is small, together they are not
    with pytest.raises(CorruptCheckpointError, match="3 bytes"):
        IndexFile(store, "g/index.ucp", 400 << 18, many).load("s3")


def test_a_failed_write_leaves_nothing():
    store = DictStore()
    with pytest.raises(TypeError):
        write_index(store, "g/index.ucp", {"a": b"x", "b": "text"})
    assert store.files == {}
