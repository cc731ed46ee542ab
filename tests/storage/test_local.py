"""What the conformance suite cannot ask of every store: links, odd files, system calls that do less than they should."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest

from ucp_dcp.errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError
from ucp_dcp.storage import local as local_module
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.store import Range, open_store


@pytest.fixture
def places(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir(), outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "root-sibling").mkdir()
    (tmp_path / "root-sibling" / "file").write_bytes(b"sibling")
    return LocalStore(root), root, outside


def operations(store, path):
    yield lambda: store.size(path)
    yield lambda: store.read(path)
    yield lambda: store.read_ranges([Range(path, 0, 1)], [memoryview(bytearray(1))])


def test_links_that_lead_outside_are_refused(places):
    store, root, outside = places
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "up").symlink_to("..")
    (root / "sibling").symlink_to("../root-sibling")
    (root / "chain").symlink_to("folder")
    for path in ("file", "folder/secret", "up/outside/secret", "sibling/file", "chain/secret"):
        for operation in operations(store, path):
            with pytest.raises(FormatError, match=r"outside of the store.*symbolic link"):
                operation()
    for path in ("folder/new", "up/new", "chain/new", "folder/a/b", "sibling/new"):
        with pytest.raises(FormatError), store.create(path) as writer:
            writer.write(b"x")
        with pytest.raises(FormatError):
            store.put(path, b"x")
        with pytest.raises(FormatError):
            store.delete(path)
    with pytest.raises(FormatError):
        store.delete("folder/secret")
    assert (outside / "secret").read_bytes() == b"secret" and os.listdir(outside) == ["secret"]
    assert list(store.list()) == []
    with pytest.raises(FormatError):
        list(store.list("folder/"))


def test_a_link_itself_is_replaced_or_deleted_never_its_target(places):
    store, root, outside = places
    (root / "file").symlink_to(outside / "secret")
    with pytest.raises(StoreExistsError), store.create("file"):
        pass
    with pytest.raises(StoreExistsError):
        store.put("file", b"x", if_absent=True)
    store.put("file", b"mine")
    assert store.read("file") == b"mine" and not (root / "file").is_symlink()
    (root / "other").symlink_to(outside / "secret")
    store.delete("other")
    assert not (root / "other").is_symlink() and (outside / "secret").read_bytes() == b"secret"


def test_reading_links_outside_when_asked(places):
    _, root, outside = places
    (root / "file").symlink_to(outside / "secret")
    store = open_store(root, links_outside=True)
    assert store.read("file") == b"secret" and [e.path for e in store.list()] == ["file"]
    (root / "folder").symlink_to(outside)
    with pytest.raises(FormatError):
        store.put("folder/x", b"x")


def test_links_inside_and_a_root_that_is_a_link(places, tmp_path):
    store, root, _ = places
    store.put("g-1/data", b"data")
    (root / "latest").symlink_to("g-1")
    (root / "alias").symlink_to("g-1/data")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nothing")
    (root / "g-1" / "self").symlink_to("..")
    assert store.read("latest/data") == store.read("alias") == b"data"
    assert sorted(e.path for e in store.list()) == ["alias", "g-1/data"]
    for path in ("loop", "dangling", "latest/nothing"):
        with pytest.raises(StoreError):
            store.read(path)
    (tmp_path / "link").symlink_to(root)
    through = LocalStore(tmp_path / "link")
    through.put("b", b"b")
    assert through.read("g-1/data") == b"data" and store.read("b") == b"b"


def test_only_regular_files_are_read(places):
    store, root, _ = places
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    for operation in operations(store, "pipe"):  # and do not wait for a writer
        with pytest.raises(StoreError, match="not a regular file"):
            operation()
    for operation in operations(store, "folder"):
        with pytest.raises(StoreNotFoundError, match="folder"):
            operation()
    assert list(store.list()) == []
    with pytest.raises(StoreError):
        store.put("folder", b"x")
    store.put("file", b"x")
    with pytest.raises(StoreError), store.create("file/below"):
        pass
    with pytest.raises(StoreError):
        store.delete("folder")
    assert sorted(os.listdir(root)) == ["file", "folder", "pipe"]


def test_short_reads_and_many_buffers(places, monkeypatch):
    store, _, _ = places
    content = os.urandom(50_000)
    store.put("data", content)
    real_preadv, real_pread = os.preadv, os.pread

    def stingy(fd, buffers, offset):
        head = buffers[0][: min(len(buffers[0]), 777)]
        rest = [b[:0] for b in buffers[1:]] if len(head) < len(buffers[0]) else [b[:100] for b in buffers[1:2]]
        return real_preadv(fd, [head, *rest], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: real_pread(fd, min(length, 999), offset))
    lengths = [1, 0, 5000, 99, 100, 101, 20_000, 3]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    into = [memoryview(bytearray(length)) for length in lengths]
    store.read_ranges([Range("data", s, n) for s, n in zip(starts, lengths, strict=True)], into)
    assert b"".join(into) == content[: sum(lengths)]
    assert store.read("data") == content and store.read("data", 5, 7000) == content[5:7005]


def test_a_file_that_shrinks_while_it_is_read(places, monkeypatch):
    store, _, _ = places
    store.put("data", bytes(100))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: b"")
    for operation in list(operations(store, "data"))[1:]:
        with pytest.raises(CorruptCheckpointError, match="data"):
            operation()


def test_read_errors_are_store_errors(places, monkeypatch):
    store, _, _ = places
    store.put("data", bytes(100))

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    monkeypatch.setattr(os, "pread", fails)
    for operation in list(operations(store, "data"))[1:]:
        with pytest.raises(StoreError, match=r"data.*Input/output"):
            operation()


class Calls:
    """Records fsync, rename and link in the order they happen, with the kind and name of what they act on."""

    def __init__(self, monkeypatch):
        self.log = []
        for name in ("fsync", "replace", "link", "unlink", "mkdir", "rmdir"):
            self._wrap(monkeypatch, name, getattr(os, name))

    def _wrap(self, monkeypatch, name, real):
        def call(first, *rest, **options):
            target = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else rest[0] if name in ("replace", "link") else first
            kind = "folder" if os.path.isdir(target) else "file"
            result = real(first, *rest, **options)
            self.log.append((name, kind if name == "fsync" else "", os.path.basename(str(target))))
            return result

        monkeypatch.setattr(os, name, call)


def test_what_is_durable_when(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    store = LocalStore(tmp_path / "root")
    with store.create("g/file") as writer:
        writer.write(b"x")
        assert ("fsync", "file", "file") not in calls.log
    parent = tmp_path.name
    assert calls.log == [
        ("mkdir", "", "root"), ("fsync", "folder", parent), ("mkdir", "", "g"), ("fsync", "folder", "root"),
        ("fsync", "file", "file"), ("fsync", "folder", "g"),
    ]  # fmt: skip
    calls.log.clear()
    store.put("ucp.json", b"x")
    assert [(a, b) for a, b, _ in calls.log] == [("fsync", "file"), ("replace", ""), ("fsync", "folder")]
    calls.log.clear()
    store.put("other", b"x", if_absent=True)
    assert [(a, b) for a, b, _ in calls.log] == [("fsync", "file"), ("link", ""), ("unlink", ""), ("fsync", "folder")]
    calls.log.clear()
    store.put("g/b", b"x")
    calls.log.clear()
    store.delete("ucp.json", "other", "g/b", "g/file")  # durable in order: the root before what lies in g
    assert calls.log == [
        ("unlink", "", "ucp.json"), ("unlink", "", "other"), ("fsync", "folder", "root"),
        ("unlink", "", "b"), ("unlink", "", "file"), ("rmdir", "", "g"), ("fsync", "folder", "root"),
    ]  # fmt: skip
    calls.log.clear()
    fast = LocalStore(tmp_path / "root", sync=False)
    fast.put("a", b"x")
    with fast.create("b") as writer:
        writer.write(b"x")
    fast.delete("a", "b")
    assert not [c for c in calls.log if c[0] == "fsync"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "link"])
def test_a_failing_system_call_leaves_nothing(places, monkeypatch, failing):
    store, root, _ = places

    def fails(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, fails)
    with pytest.raises(StoreError, match=r"m.*No space left"):
        store.put("m", b"x", if_absent=failing == "link")
    if failing == "fsync":
        with pytest.raises(StoreError, match=r"file.*No space left"), store.create("file") as writer:
            writer.write(b"x")
    assert os.listdir(root) == []


def test_a_full_disk_while_streaming(places, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    store, root, _ = places
    real = os.open

    def full(path, flags, *rest, **options):
        if flags & os.O_CREAT:
            os.close(real(path, flags, *rest, **options))
            return real("/dev/full", os.O_WRONLY)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    for size in (10, 5 << 20):
        with pytest.raises(StoreError, match=r"file.*No space left"), store.create("file") as writer:
            writer.write(bytes(size))
        assert os.listdir(root) == []


def test_without_hard_links(places, monkeypatch, caplog):
    store, root, _ = places

    def fails(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fails)
    store.put("m", b"first", if_absent=True)
    assert "no hard links" in caplog.text
    with pytest.raises(StoreExistsError):
        store.put("m", b"second", if_absent=True)
    assert store.read("m") == b"first" and os.listdir(root) == ["m"]


def test_folders_that_come_and_go(places):
    """Deleting the last file of a folder removes it, while others create files there."""
    store, root, _ = places
    errors = []

    def work(number):
        try:
            for turn in range(60):
                path = f"shared/deep/{number}-{turn}"
                store.put(path, b"x")
                store.delete(path)
        except Exception as error:
            errors.append(error)

    store = LocalStore(root, sync=False)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert errors == [] and os.listdir(root) == []


def test_modes_follow_the_umask(places):
    store, root, _ = places
    before = os.umask(0o027)
    try:
        store.put("a", b"x")
        with store.create("b"):
            pass
    finally:
        os.umask(before)
    assert {stat.S_IMODE((root / name).stat().st_mode) for name in "ab"} == {0o640}


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = open_store("here")
    assert relative.url == str(tmp_path / "here")
    monkeypatch.chdir("/")
    relative.put("a", b"x")
    assert (tmp_path / "here" / "a").read_bytes() == b"x"
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore) and open_store(tmp_path).url == str(tmp_path)
    assert open_store(relative) is relative
    with pytest.raises(TypeError):
        open_store(relative, sync=False)
    assert not open_store(tmp_path, sync=False).sync


def test_buffered_writes_are_counted_and_in_order(places):
    store, _, _ = places
    big = os.urandom(local_module._BUFFER + 5)
    with store.create("x") as writer:
        for part in (b"a", big, b"b", big[:10]):
            writer.write(part)
        assert writer.tell() == 2 + len(big) + 10
    assert store.read("x") == b"a" + big + b"b" + big[:10]
