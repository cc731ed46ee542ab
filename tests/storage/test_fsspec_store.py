from __future__ import annotations

import gc
import os
import pickle
import uuid

import fsspec
import pytest

from ucp_dcp.errors import CheckpointExistsError, StoreError, StoreExistsError, UnsupportedError
from ucp_dcp.storage import fsspec_store as module
from ucp_dcp.storage.fsspec_store import FsspecStore
from ucp_dcp.storage.manifest import MANIFEST
from ucp_dcp.storage.store import Range, open_store

from .objectfs import ObjectFileSystem
from .test_commit import open_ours, open_stock, save


@pytest.fixture
def store():
    return FsspecStore(ObjectFileSystem(bucket=uuid.uuid4().hex), "bucket/run")


class Stop(Exception):
    pass


@pytest.mark.parametrize("written", [100, 3 << 20])
def test_a_failed_upload_is_aborted_not_completed(store, written):
    try:
        with store.create("g/file") as writer:
            writer.write(bytes(written))
            raise Stop
    except Stop:
        del writer  # the last reference to the stream, with the traceback
    gc.collect()  # fsspec's files complete themselves when they are collected
    assert store.fs.objects == {} and store.fs.uploads == {}
    assert ("complete", "bucket/run/g/file") not in store.fs.calls
    assert ("abort", "bucket/run/g/file") in store.fs.calls


def test_a_failing_close_is_an_error_and_leaves_nothing():
    store = FsspecStore(ObjectFileSystem(bucket=uuid.uuid4().hex, fail_close=True), "run")
    with pytest.raises(StoreError, match=r"g/file.*503 Slow Down"), store.create("g/file") as writer:
        writer.write(bytes(5 << 20))
    gc.collect()
    assert store.fs.objects == {} and store.fs.uploads == {}


def test_a_close_that_loses_bytes_is_noticed(store, monkeypatch):
    real = store.fs.info
    monkeypatch.setattr(store.fs, "info", lambda path, **k: {**real(path), "size": 3})
    with pytest.raises(StoreError, match="10 bytes were written, but the file has 3"), store.create("file") as writer:
        writer.write(bytes(10))
    assert store.fs.objects == {}


def test_how_puts_are_made():
    """Which way is taken is found out from the file system, and stated."""
    local, memory = FsspecStore(fsspec.filesystem("file"), "/x"), open_store("memory://x")
    s3 = FsspecStore(ObjectFileSystem(bucket="x"), "x")
    assert (local.replaces, memory.replaces, s3.replaces) == ("rename", "put", "put")
    assert (local.excludes, memory.excludes, s3.excludes) == ("link", "check", "condition")
    inside = open_store("dir::memory://x", dir={"path": "/sub"})
    assert (inside.replaces, inside.excludes) == ("put", "check")


def test_an_ordinary_error_is_not_taken_for_a_failed_condition(store, monkeypatch):
    store.put("m", b"old")

    def refuse(*args, **options):
        raise OSError(13, "Access Denied")

    monkeypatch.setattr(store.fs, "pipe_file", refuse)
    with pytest.raises(StoreError, match="Access Denied") as caught:
        store.put("m", b"new", if_absent=True)
    assert not isinstance(caught.value, StoreExistsError)


def test_einval_without_a_file_is_not_a_failed_condition(store, monkeypatch):
    def refuse(*args, **options):
        raise OSError(22, "Invalid Argument")

    monkeypatch.setattr(store.fs, "pipe_file", refuse)
    with pytest.raises(StoreError, match="Invalid Argument") as caught:
        store.put("m", b"new", if_absent=True)
    assert not isinstance(caught.value, StoreExistsError)


def test_a_store_that_cannot_tell_is_not_an_empty_store(store, monkeypatch):
    """fs.exists() says no on any error; an overwrite decision on that would destroy a checkpoint."""

    def unreachable(*args, **options):
        raise OSError("503 Slow Down")

    monkeypatch.setattr(store.fs, "info", unreachable)
    monkeypatch.setattr(store.fs, "find", unreachable)
    for action in (lambda: store.size("a"), lambda: store.create("a").__enter__(), lambda: list(store.list())):
        with pytest.raises(StoreError, match="503"):
            action()


def test_reads_are_in_bounded_pieces(store, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 1000)
    monkeypatch.setattr(module, "_IN_FLIGHT", 4000)
    content = os.urandom(20_500)
    store.put("a", content)
    calls = []
    real = store.fs.cat_ranges

    def watched(paths, starts, ends, **options):
        calls.append([end - start for start, end in zip(starts, ends, strict=True)])
        return real(paths, starts, ends, **options)

    monkeypatch.setattr(store.fs, "cat_ranges", watched)
    into = [memoryview(bytearray(20_000)), memoryview(bytearray(300)), memoryview(bytearray(1500))]
    store.read_ranges([Range("a", 500, 20_000), Range("a", 0, 300), Range("a", 10, 1500)], into)
    assert [bytes(b) for b in into] == [content[500:20_500], content[:300], content[10:1510]]
    assert max(map(max, calls)) <= 1000 and max(map(sum, calls)) <= 4000
    assert store.read("a", 100, 5000) == content[100:5100]


def test_a_store_that_returns_too_much_or_too_little(store, monkeypatch):
    store.put("a", bytes(100))
    for data in ([b"123"], [b"12345"], [], [b"1234", b"1234"]):
        monkeypatch.setattr(store.fs, "cat_ranges", lambda *a, data=data, **k: data)
        with pytest.raises((StoreError, ValueError), match=r"a in|ranges"):
            store.read_ranges([Range("a", 0, 4)], [memoryview(bytearray(4))])


def test_pickle_keeps_storage_options_and_no_credentials_show():
    store = FsspecStore.from_url("memory://x/y", key="AKIA", global_store=True)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.fs.storage_options == store.fs.storage_options and copy.fs.storage_options["key"] == "AKIA"
    assert "AKIA" not in repr(store) + store.url


def test_after_a_fork_the_file_system_is_made_anew(store, monkeypatch):
    before = store.fs
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert store.fs is not before and store.fs.bucket == before.bucket
    assert store.fs is store.fs


def test_unknown_protocols():
    for url in ("nothing://x", "nothing::memory://x"):
        with pytest.raises(UnsupportedError, match="nothing"):
            open_store(url)


def test_the_commit_protocol_on_object_stores(store):
    old, new, late = ("g-" + c * 32 for c in "abc")
    save(store, old, overwrite=False)
    assert open_ours(store) == open_stock(store) == old
    with pytest.raises(CheckpointExistsError):
        save(store, late, overwrite=False)
    save(store, new)
    assert open_ours(store) == open_stock(store) == new
    assert {name.split("/")[2] for name in store.fs.objects} == {MANIFEST, ".metadata", new}


def test_neighbours_are_one_request(store, monkeypatch):
    """Columns of a matrix are thousands of short runs; a request for each takes minutes on an object store."""
    rows, row, run = 2000, 4000, 100
    content = os.urandom(rows * row)
    store.put("a", content)
    store.put("b", content)
    calls = []
    real = store.fs.cat_ranges

    def watched(paths, starts, ends, **options):
        calls.extend(end - start for start, end in zip(starts, ends, strict=True))
        return real(paths, starts, ends, **options)

    monkeypatch.setattr(store.fs, "cat_ranges", watched)
    ranges = [Range(path, row * i, run) for i in reversed(range(rows)) for path in ("a", "b")]
    ranges += [Range("a", 7, 0), Range("a", 0, len(content)), Range("b", 50, 10)]  # one over all of them, one inside another
    into = [memoryview(bytearray(wanted.length)) for wanted in ranges]
    store.read_ranges(ranges[:-2], into[:-2])
    assert len(calls) == 2
    store.read_ranges(ranges, into)
    assert all(bytes(b) == content[wanted.start : wanted.start + wanted.length] for wanted, b in zip(ranges, into, strict=True))
    calls.clear()
    far = [Range("a", 0, 10), Range("a", 1 << 20, 10)]  # what lies between is more than a request is worth
    store.read_ranges(far, [memoryview(bytearray(10)), memoryview(bytearray(10))])
    assert calls == [10, 10]
