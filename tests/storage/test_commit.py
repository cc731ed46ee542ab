from __future__ import annotations

import json
import logging
import time

import pytest

from ucp_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignSaveError,
    StoreError,
    StoreExistsError,
    UnsupportedError,
)
from ucp_dcp.storage import commit as commit_module
from ucp_dcp.storage.commit import (
    METADATA,
    abandon,
    begin,
    check_foreign,
    collect,
    commit,
    new_generation,
    open_root,
    read_manifest,
    repair,
)
from ucp_dcp.storage.index_file import IndexFile, write_index
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.manifest import MANIFEST, FileDigest, Manifest

from .dictstore import Crash, DictStore


def stock_bytes(generation, files):
    """Stands for stock metadata: it names the files that a stock reader would then open."""
    return json.dumps({"generation": generation, "files": files}).encode()


def save(store, generation=None, *, overwrite=True, stock=True, ranks=2, orphan_age=None, **grace):
    begun = begin(store, overwrite=overwrite)
    generation = generation or new_generation()
    files = [f"{generation}/__{rank}_0.distcp" for rank in range(ranks)]
    for path in files:
        with store.create(path) as writer:
            writer.write(b"data of ")
            writer.write(generation.encode())
    size, sections = write_index(store, f"{generation}/index.ucp", {"files": json.dumps(files).encode(), "g": generation.encode()})
    manifest = Manifest.new(generation=generation, index_path=f"{generation}/index.ucp", index_size=size, sections=sections)
    metadata = stock_bytes(generation, files) if stock else None
    return commit(store, manifest, metadata, overwrite=overwrite, begun=begun, orphan_age=orphan_age, **grace)


def check_complete(store, generation, files):
    assert files
    for path in files:
        assert store.read(path) == b"data of " + generation.encode(), path


def open_ours(store):
    """The generation that our reader gets, after every byte of it was looked at; None without a checkpoint."""
    try:
        manifest = open_root(store)
    except CheckpointNotFoundError:
        return None
    if manifest is None:
        return open_stock(store)
    index = IndexFile.of(store, manifest)
    files = json.loads(bytes(index.load("files")))
    assert bytes(index.load("g")).decode() == manifest.generation
    check_complete(store, manifest.generation, files)
    return manifest.generation


def open_stock(store):
    """The generation that a plain dcp.load gets; None without a .metadata."""
    if METADATA not in {e.path for e in store.list()}:
        return None
    stock = json.loads(store.read(METADATA))
    check_complete(store, stock["generation"], stock["files"])
    return stock["generation"]


OLD, NEW, NEXT = ("g-" + c * 32 for c in "abc")


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("new_stock", [True, False])
@pytest.mark.parametrize("old", ["none", "stock", "no stock", "foreign", "crashed"])
def test_crash_after_every_change(old, new_stock, overwrite):
    """Whatever the last change was that reached the disk: old or new, complete; and the next save cleans up."""
    before = DictStore()
    if old in ("stock", "no stock"):
        save(before, OLD, stock=old == "stock")
    elif old == "foreign":  # a plain dcp.save: its data files lie in the root
        before.put("__0_0.distcp", b"data of plain")
        before.put(METADATA, stock_bytes("plain", ["__0_0.distcp"]))
    elif old == "crashed":  # between steps 3 and 4 of a save over another one
        first = "g-" + "0" * 32
        save(before, first)
        kept = dict(before.files)
        save(before, OLD)
        before.files = {**kept, **before.files, METADATA: kept[METADATA]}
        assert (open_ours(before), open_stock(before)) == (OLD, first)
    if not overwrite and old != "none":
        with pytest.raises(CheckpointExistsError):
            save(before, NEW, overwrite=False, stock=new_stock)
        return
    old_ours, old_stock = open_ours(before), open_stock(before)

    complete = DictStore(before.files)
    save(complete, NEW, overwrite=overwrite, stock=new_stock)
    assert (open_ours(complete), open_stock(complete)) == (NEW, NEW if new_stock else None)
    committed = complete.log.index(f"put {MANIFEST}") + 1
    assert len(complete.log) > 10

    for count in range(len(complete.log)):
        store = DictStore(before.files, allow=count)
        with pytest.raises(Crash):
            save(store, NEW, overwrite=overwrite, stock=new_stock)
        assert store.log == complete.log[:count]
        store.allow = None
        where = f"after {count} changes: {store.log[-1:]}"
        assert open_ours(store) == (old_ours if count < committed else NEW), where
        allowed = {old_stock, NEW if new_stock else None}
        if old == "crashed":
            allowed.add(old_ours)
        assert open_stock(store) in allowed, where
        if count < committed:
            assert open_stock(store) in (old_stock, old_ours), where

        # Collecting alone, even of what is young, takes away nothing that either reader needs.
        swept = DictStore(store.files)
        ours = open_ours(swept)
        collect(swept, orphan_age=-1)
        assert open_ours(swept) == ours, where
        assert open_stock(swept) in allowed, where

        # A further save, and then the same with every crash left behind long ago.
        save(store, NEXT, overwrite=True, stock=True)
        assert (open_ours(store), open_stock(store)) == (NEXT, NEXT), where
        collect(store, orphan_age=-1)
        assert (open_ours(store), open_stock(store)) == (NEXT, NEXT), where
        assert {p.split("/")[0] for p in store.files} - {"__0_0.distcp"} == {MANIFEST, METADATA, NEXT}, where


def test_begin_finishes_what_a_crash_left():
    store, older = _saved(OLD), stock_bytes("older", ["x"])
    store.put("x", b"data of older")
    manifest = read_manifest(store).replacing(read_manifest(store).metadata, FileDigest.of(older))
    store.put(MANIFEST, manifest.to_bytes())
    store.put(METADATA, older)
    assert open_stock(store) == "older"
    with pytest.raises(CheckpointExistsError):
        begin(store, overwrite=False)
    assert open_stock(store) == "older"  # an error changes nothing
    assert begin(store, overwrite=True).previous == manifest
    assert open_stock(store) == OLD


def test_order_of_a_commit():
    store = DictStore()
    save(store, OLD)
    store.log.clear()
    save(store, NEW)
    log = [line for line in store.log if not line.startswith("write")]
    data = [f"{verb} {NEW}/__{r}_0.distcp" for r in (0, 1) for verb in ("open", "close")]
    index = [f"{verb} {NEW}/{name}" for name in ("index.ucp", METADATA) for verb in ("open", "close")]
    gone = [f"delete {OLD}/{name}" for name in (METADATA, "__0_0.distcp", "__1_0.distcp", "index.ucp")]
    assert log == [*data, *index, f"put {MANIFEST}", f"put {METADATA}", *gone]


@pytest.mark.parametrize("make", [DictStore, None])
def test_no_overwrite(make, tmp_path):
    store = make() if make else LocalStore(tmp_path)
    save(store, OLD, overwrite=False)
    files = {e.path: store.read(e.path) for e in store.list()}
    with pytest.raises(CheckpointExistsError, match=OLD):
        save(store, NEW, overwrite=False)
    assert {e.path: store.read(e.path) for e in store.list()} == files


def test_somebody_else_is_faster():
    """Both began on an empty folder; the first commit wins, the second is told, and its files can be given up."""
    store = DictStore()
    begun = begin(store, overwrite=False)
    save(store, OLD, overwrite=False)
    size, sections = write_index(store, f"{NEW}/index.ucp", {"a": b"b"})
    manifest = Manifest.new(generation=NEW, index_path=f"{NEW}/index.ucp", index_size=size, sections=sections)
    with pytest.raises(CheckpointExistsError, match=OLD):
        commit(store, manifest, b"x", overwrite=False, begun=begun)
    assert open_ours(store) == OLD
    abandon(store, NEW)
    abandon(store, OLD)  # is committed, so nothing happens
    assert open_ours(store) == open_stock(store) == OLD
    assert not [p for p in store.files if p.startswith(NEW)]


def test_somebody_else_is_faster_by_an_instant():
    """The other commit falls between our last look and our put: the put itself must refuse."""

    class Racing(DictStore):
        raced = False

        def put(self, path, data, *, if_absent=False):
            if path == MANIFEST and not self.raced:
                self.raced = True
                save(self, OLD)
            super().put(path, data, if_absent=if_absent)

    store = Racing()
    with pytest.raises(CheckpointExistsError, match=OLD):
        save(store, NEW, overwrite=False)
    assert open_ours(store) == open_stock(store) == OLD


class Lossy(DictStore):
    """Writes the manifest but reports a failure, as when the answer to a request is lost and it is sent again."""

    error: Exception = StoreExistsError("exists")

    def put(self, path, data, *, if_absent=False):
        super().put(path, data, if_absent=if_absent)
        if path == MANIFEST:
            raise self.error


@pytest.mark.parametrize("error", [StoreExistsError("exists"), StoreError("timeout")])
def test_a_lost_answer(error):
    store = Lossy()
    store.error = error
    save(store, NEW, overwrite=False)
    assert open_ours(store) == open_stock(store) == NEW


def test_a_failed_manifest_is_an_error():
    class Broken(DictStore):
        def put(self, path, data, *, if_absent=False):
            raise StoreError("no space")

    with pytest.raises(StoreError, match="no space"):
        save(Broken(), NEW)


def test_failing_to_publish_metadata_says_that_it_is_committed():
    class Broken(DictStore):
        def put(self, path, data, *, if_absent=False):
            if path == METADATA:
                raise StoreError("no space")
            super().put(path, data, if_absent=if_absent)

    store = Broken()
    with pytest.raises(StoreError, match=f"{NEW} is committed.*no space"):
        save(store, NEW)
    assert open_ours(store) == NEW and open_stock(store) is None
    fixed = DictStore(store.files)
    assert repair(fixed, read_manifest(fixed)) == "repaired"
    assert open_stock(fixed) == NEW


def test_failing_to_collect_is_only_logged(caplog):
    class Broken(DictStore):
        def delete(self, *paths):
            raise StoreError("not now")

    store = Broken(dict(_saved(OLD).files))
    with caplog.at_level(logging.WARNING):
        save(store, NEW)
    assert "not now" in caplog.text
    assert open_ours(store) == NEW


def _saved(generation, **options):
    store = DictStore()
    save(store, generation, **options)
    return store


# -- foreign saves (D4) ----------------------------------------------------------------------------------------------------------


def test_a_plain_save_over_ours_is_noticed():
    store = _saved(OLD)
    assert check_foreign(store, read_manifest(store)) == "ucp"
    plain = stock_bytes("plain", ["__0_0.distcp"])
    store.put("__0_0.distcp", b"data of plain")
    store.put(METADATA, plain)
    with pytest.raises(ForeignSaveError, match=rf"{OLD}.*{METADATA}.*{len(plain)} bytes.*prefer="):
        open_root(store)
    assert open_root(store, prefer="ucp").generation == OLD
    assert open_root(store, prefer="stock") is None
    assert repair(store, read_manifest(store)) == "foreign"
    assert collect(store, orphan_age=-1) == []
    assert open_stock(store) == "plain"
    with pytest.raises(CheckpointExistsError):
        save(store, NEW, overwrite=False)
    assert store.read(METADATA) == plain
    save(store, NEW)
    assert open_ours(store) == open_stock(store) == NEW


def test_a_plain_save_over_ours_without_stock_metadata():
    store = _saved(OLD, stock=False)
    assert open_root(store).generation == OLD
    store.put(METADATA, b"theirs")
    with pytest.raises(ForeignSaveError):
        open_root(store)


@pytest.mark.parametrize("where", [0, 1 << 19, -1])
def test_large_metadata_of_the_same_size(where):
    """Of a large .metadata only the size and both ends are read; a change in the middle alone is not seen (docs/format.md)."""
    store = DictStore()
    begin(store, overwrite=True)
    size, sections = write_index(store, f"{OLD}/index.ucp", {"a": b"b"})
    manifest = Manifest.new(generation=OLD, index_path=f"{OLD}/index.ucp", index_size=size, sections=sections)
    commit(store, manifest, bytes(1 << 20), overwrite=True)
    changed = bytearray(1 << 20)
    changed[where] = 1
    store.put(METADATA, changed)
    if where in (0, -1):
        with pytest.raises(ForeignSaveError):
            open_root(store)
    else:
        assert open_root(store).generation == OLD


def test_nothing_there():
    store = DictStore()
    for prefer in (None, "ucp", "stock"):
        with pytest.raises(CheckpointNotFoundError):
            open_root(store, prefer)
    store.put(METADATA, b"plain")
    assert open_root(store) is None
    assert open_root(store, "stock") is None
    with pytest.raises(CheckpointNotFoundError):
        open_root(store, "ucp")
    with pytest.raises(CheckpointNotFoundError):
        open_root(_saved(OLD, stock=False), "stock")


def test_a_commit_while_opening_is_no_foreign_save():
    """The manifest is read, then another generation is committed, then the root .metadata is looked at."""

    class Racing(DictStore):
        raced = False

        def read(self, path, start=0, length=None):
            data = super().read(path, start, length)
            if path == MANIFEST and not self.raced:
                self.raced = True
                save(self, NEW)
            return data

    store = Racing(_saved(OLD).files)
    assert open_root(store).generation == NEW


# -- repair and collection -------------------------------------------------------------------------------------------------------


def test_repair():
    store = _saved(OLD)
    manifest = read_manifest(store)
    assert repair(store, manifest) == "consistent"
    store.delete(METADATA)
    assert repair(store, manifest) == "repaired" and open_stock(store) == OLD
    store.delete(METADATA)
    store.files[f"{OLD}/{METADATA}"] = b"X" + store.files[f"{OLD}/{METADATA}"][1:]
    with pytest.raises(CorruptCheckpointError, match="digest"):
        repair(store, manifest)
    store.delete(f"{OLD}/{METADATA}")
    with pytest.raises(CorruptCheckpointError, match="incomplete"):
        repair(store, manifest)
    save(store, NEW)  # may replace it all the same
    assert open_ours(store) == open_stock(store) == NEW


@pytest.mark.parametrize("make", [DictStore, None])
def test_collect_spares_the_young_and_the_named(make, tmp_path):
    store = make() if make else LocalStore(tmp_path)
    save(store, OLD)
    for path in (f"{NEW}/__0_0.distcp", f"{NEXT}/__0_0.distcp", f"{NEXT}/index.ucp", "g-short/file", "g-notes.txt", "notes/x"):
        store.put(path, b"x")
    store.put(".ucp.json.0123456789abcdef.tmp", b"left")
    store.put(".mine.tmp", b"x")
    assert collect(store) == []
    assert collect(store, orphan_age=3600) == []
    assert collect(store, orphan_age=3600, now=time.time() + 3500) == []
    assert collect(store, orphan_age=3600, now=time.time() + 3700) == [NEW, NEXT]
    left = {e.path for e in store.list() if not e.path.startswith(OLD)}
    assert left == {MANIFEST, METADATA, "g-short/file", "g-notes.txt", "notes/x", ".mine.tmp"}
    assert open_ours(store) == open_stock(store) == OLD
    if not make:
        assert not (tmp_path / NEW).exists()


def test_collect_a_generation_counts_as_old_by_its_newest_file():
    store = DictStore({f"{NEW}/a": b"", f"{NEW}/b": b"", f"{NEXT}/a": b""})
    store.times = {f"{NEW}/a": 100.0, f"{NEW}/b": 900.0, f"{NEXT}/a": 400.0}
    assert collect(store, orphan_age=500, now=1000) == [NEXT]
    assert set(store.files) == {f"{NEW}/a", f"{NEW}/b"}


def test_collect_without_manifest_spares_what_a_stock_metadata_may_name():
    store = _saved(OLD)
    del store.files[MANIFEST]  # the user wants it plain
    assert collect(store, orphan_age=-1) == []
    assert open_ours(store) == OLD


def test_collect_sees_a_commit_at_the_last_moment():
    store = DictStore()
    size, sections = write_index(store, f"{NEW}/index.ucp", {"a": b"b"})
    manifest = Manifest.new(generation=NEW, index_path=f"{NEW}/index.ucp", index_size=size, sections=sections)

    class Racing(DictStore):
        def list(self, prefix=""):
            yield from list(super().list(prefix))
            if prefix == "g-":
                self.put(MANIFEST, manifest.to_bytes())

    racing = Racing(store.files)
    assert collect(racing, orphan_age=-1) == []
    assert f"{NEW}/index.ucp" in racing.files


def test_commit_collects_old_orphans():
    store = _saved(OLD)
    store.put(f"{NEXT}/__0_0.distcp", b"x")
    store.times[f"{NEXT}/__0_0.distcp"] = time.time() - 2 * commit_module.ORPHAN_AGE
    save(store, NEW, orphan_age=commit_module.ORPHAN_AGE)
    assert {p.split("/")[0] for p in store.files} == {MANIFEST, METADATA, NEW}


# -- damaged or newer manifests --------------------------------------------------------------------------------------------------


def test_a_damaged_manifest():
    store = _saved(OLD)
    store.files[MANIFEST] = store.files[MANIFEST].replace(b'"version": 1', b'"version": 2')
    for action in (open_root, collect, read_manifest):
        with pytest.raises(CorruptCheckpointError, match="digest"):
            action(store)
    with pytest.raises(CheckpointExistsError, match="damaged"):
        save(store, NEW, overwrite=False)
    save(store, NEW)
    assert open_ours(store) == open_stock(store) == NEW


def test_a_newer_manifest_is_never_overwritten():
    store = _saved(OLD)
    store.files[MANIFEST] = b'{"format":"ucp_dcp","version":9,"min_reader":7,"anything":[]}'
    files = dict(store.files)
    for overwrite in (True, False):
        with pytest.raises(UnsupportedError, match="version 7"):
            save(store, NEW, overwrite=overwrite)
    with pytest.raises(UnsupportedError):
        open_root(store)
    assert store.files == files


def test_a_huge_manifest_is_not_read():
    class Huge(DictStore):
        def size(self, path):
            return 1 << 50 if path == MANIFEST else super().size(path)

        def read(self, path, start=0, length=None):
            raise AssertionError("read")

    with pytest.raises(CorruptCheckpointError, match="at most"):
        read_manifest(Huge({MANIFEST: b""}))


def test_collect_what_a_killed_put_leaves_behind(tmp_path, monkeypatch):
    """The names of LocalStore's temporary files are those that collect() knows."""
    store = LocalStore(tmp_path)
    save(store, OLD)

    class Killed(BaseException):
        pass

    def kill(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", kill)
        patch.setattr("os.unlink", lambda path: None)  # the process is gone, so nothing cleans up
        for path in (MANIFEST, METADATA):
            with pytest.raises(Killed):
                store.put(path, b"half")
    names = {e.path for e in store.list("")}
    assert len([n for n in names if n.endswith(".tmp")]) == 2
    assert open_ours(store) == open_stock(store) == OLD
    collect(store)
    assert {e.path for e in store.list("")} == names
    collect(store, orphan_age=-60)
    assert not [e.path for e in store.list("") if e.path.endswith(".tmp")]
    assert open_ours(store) == open_stock(store) == OLD


def test_a_replaced_generation_stays_for_its_readers():
    """For the grace period; the first commit after it deletes it, whatever crashed in between."""
    store = DictStore()
    names = []
    for n, when in enumerate([1000.0, 1010.0, 1020.0, 1400.0, 1405.0]):
        committed = save(store, grace=300, now=when)
        names.append(committed.generation)
        there = {path.split("/")[0] for path in store.files if path.startswith("g-")}
        kept = {0: [], 1: [0], 2: [0, 1], 3: [2], 4: [2, 3]}[n]
        assert [name for name, _ in committed.superseded] == [names[i] for i in kept]
        assert there == {names[i] for i in [*kept, n]}
        assert read_manifest(store) == committed
    assert collect(store, orphan_age=-1.0) == []  # neither current nor kept for readers
    last = save(store, grace=0, now=1406.0)
    assert {path.split("/")[0] for path in store.files if path.startswith("g-")} == {last.generation}
