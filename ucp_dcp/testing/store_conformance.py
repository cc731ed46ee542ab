"""What every :class:`~ucp_dcp.storage.store.Store` must do, as tests that anybody can run against a store of their own.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)          # empty, and used by one test only

Needs pytest.
"""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ucp_dcp.errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError
from ucp_dcp.storage.store import Range, Store, create_sized

__all__ = ["BAD_PATHS", "StoreConformance"]

BAD_PATHS = ("", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a/./b", "a//b", "a/", "a\\b", "a\0b", "\ud800")
"""Paths that every store must refuse, whatever it is asked to do with them."""


class _Stop(Exception):
    """Raised by a test inside a write."""


def _fill(store: Store, path: str, data: bytes) -> None:
    with store.create(path) as writer:
        writer.write(data)


def _names(store: Store, prefix: str = "") -> list[str]:
    return sorted(entry.path for entry in store.list(prefix))


class StoreConformance:
    """Subclass it, and give it a fixture ``store`` that returns an empty store."""

    exclusive_put_threads = 8
    """Writers that race for one path; 1 turns the test off, for stores whose ``put(if_absent=True)`` is documented as weaker."""

    race_turns = 5
    """How often they race."""
    many_keys = 1050
    """Files of one folder: more than the 1,000 that a page of an object store's listing has."""

    @pytest.fixture
    def store(self) -> Store:
        """The empty store under test."""
        raise NotImplementedError("give the subclass a fixture `store`")

    # -- one file --------------------------------------------------------------------------------------------------------

    def test_create_then_read(self, store: Store) -> None:
        """A streamed file holds what was written, of any buffer type, and tells its position."""
        typed = np.arange(6, dtype=np.int16).reshape(2, 3).data
        parts: list[bytes | bytearray | memoryview] = [b"abc", bytearray(b"def"), memoryview(b"ghi"), typed, np.zeros((0, 3)).data, b""]
        expected = b"abcdefghi" + np.arange(6, dtype=np.int16).tobytes()
        with store.create("folder/sub/file.bin") as writer:
            assert writer.tell() == 0
            for part in parts:
                before = writer.tell()
                assert writer.write(part) == memoryview(part).nbytes
                assert writer.tell() == before + memoryview(part).nbytes
        assert store.size("folder/sub/file.bin") == len(expected)
        assert store.read("folder/sub/file.bin") == expected
        assert store.read("folder/sub/file.bin", 3) == expected[3:]
        assert store.read("folder/sub/file.bin", 3, 4) == expected[3:7]
        assert store.read("folder/sub/file.bin", len(expected)) == b""
        assert store.read("folder/sub/file.bin", 2, 0) == b""

    def test_non_contiguous_buffers_are_refused(self, store: Store) -> None:
        """A strided buffer is not silently written in some order."""
        with pytest.raises((BufferError, ValueError)), store.create("x") as writer:
            writer.write(np.arange(12).reshape(3, 4).T.data)
        assert _names(store) == []

    def test_empty_file(self, store: Store) -> None:
        """A file without bytes exists."""
        with store.create("empty"):
            pass
        assert store.size("empty") == 0
        assert store.read("empty") == b""
        store.read_ranges([Range("empty", 0, 0)], [memoryview(bytearray())])

    def test_big_file_with_large_and_small_writes(self, store: Store) -> None:
        """Several MiB, in writes of very different sizes, come back equal."""
        random = np.random.default_rng(0)
        parts = [random.bytes(size) for size in (1, 3 << 20, 17, 0, (2 << 20) + 1, 64)]
        with store.create("big") as writer:
            for part in parts:
                writer.write(part)
        assert store.read("big") == b"".join(parts)

    def test_create_refuses_an_existing_path(self, store: Store) -> None:
        """The old content stays."""
        _fill(store, "a/b", b"old")
        with pytest.raises(StoreExistsError), store.create("a/b") as writer:
            writer.write(b"new")
        assert store.read("a/b") == b"old"

    @pytest.mark.parametrize("written", [0, 10, 6 << 20])
    def test_a_failed_create_leaves_nothing(self, store: Store, written: int) -> None:
        """Neither a partial nor a completed file, and the path can be used again. The error is the caller's own."""
        with pytest.raises(_Stop), store.create("dir/file") as writer:
            writer.write(bytes(written))
            raise _Stop
        assert _names(store) == []
        with pytest.raises(StoreNotFoundError):
            store.read("dir/file")
        _fill(store, "dir/file", b"again")
        assert store.read("dir/file") == b"again"

    def test_create_sized(self, store: Store) -> None:
        """A file of known size, in as many concurrent calls as the store says, in any order if it allows that; empty buffers are fine."""
        mib = 1 << 20
        random = np.random.default_rng(3)
        content = memoryview(random.bytes(9 * mib + 77))
        with create_sized(store, "folder/sized", len(content)) as file:
            unit = file.part_size or mib
            assert unit % mib == 0
            offsets = list(range(0, len(content), unit))
            errors: list[BaseException] = []

            def write(some: list[int]) -> None:
                try:
                    for at in some:
                        piece = content[at : at + unit]
                        file.write_at(at, [piece[:100], b"", piece[100:5000], np.frombuffer(piece[5000:], dtype=np.uint8).data])
                except BaseException as error:
                    errors.append(error)

            if file.concurrent == 1:
                write(offsets)
            else:
                offsets.reverse()
                threads = [threading.Thread(target=write, args=(offsets[i :: file.concurrent],)) for i in range(file.concurrent)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert errors == []
        assert store.size("folder/sized") == len(content)
        assert store.read("folder/sized") == content
        with create_sized(store, "folder/empty", 0):
            pass
        assert store.size("folder/empty") == 0

    def test_create_sized_takes_many_buffers(self, store: Store) -> None:
        """More buffers than one system call may have."""
        pieces = [bytes([i % 251]) * (i % 7) for i in range(5000)]
        whole = b"".join(pieces)
        with create_sized(store, "pieces", len(whole)) as file:
            file.write_at(0, pieces)
        assert store.read("pieces") == whole

    @pytest.mark.parametrize("written", [0, 5])
    def test_create_sized_misses_bytes(self, store: Store, written: int) -> None:
        """Bytes that nobody wrote are an error, not zeros; and nothing is left."""
        with pytest.raises(StoreError, match="half"), create_sized(store, "dir/half", 10) as file:
            file.write_at(0, [bytes(written)])
        assert _names(store) == []

    def test_create_sized_refuses_what_lies_outside(self, store: Store) -> None:
        """A write behind the end is an error before or at the end of the context."""
        with pytest.raises(StoreError, match="outside"), create_sized(store, "outside", 10) as file:
            file.write_at(0, [bytes(11)])
        assert _names(store) == []

    def test_create_sized_refuses_an_existing_path(self, store: Store) -> None:
        """The old content stays."""
        _fill(store, "a/b", b"old")
        with pytest.raises(StoreExistsError), create_sized(store, "a/b", 3) as file:
            file.write_at(0, [b"new"])
        assert store.read("a/b") == b"old"

    def test_a_failed_create_sized_leaves_nothing(self, store: Store) -> None:
        """Neither a partial nor a completed file; the error is the caller's own, and the path can be used again."""
        with pytest.raises(_Stop), create_sized(store, "dir/file", 3 << 20) as file:
            file.write_at(0, [bytes(3 << 20)])
            raise _Stop
        assert _names(store) == []
        _fill(store, "dir/file", b"again")
        assert store.read("dir/file") == b"again"

    def test_put_replaces_at_once(self, store: Store) -> None:
        """Put makes, and replaces, and leaves nothing else behind."""
        store.put("dir/manifest", b"one")
        assert store.read("dir/manifest") == b"one"
        store.put("dir/manifest", memoryview(b"the second one"))
        assert store.read("dir/manifest") == b"the second one"
        store.put("dir/manifest", b"")
        assert store.read("dir/manifest") == b""
        assert _names(store) == ["dir/manifest"]

    def test_readers_see_old_or_new(self, store: Store) -> None:
        """While one thread replaces a file, another never reads a mixture or nothing."""
        contents = [bytes([65 + i]) * (1000 + i) for i in range(8)]
        store.put("m", contents[0])
        stop = threading.Event()
        bad: list[object] = []

        def look() -> None:
            while not stop.is_set():
                try:
                    data = store.read("m", 0, 1000)
                    if len(set(data)) != 1:
                        bad.append(data[:10])
                except Exception as error:
                    bad.append(error)

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for content in contents * 3:
                store.put("m", content)
        finally:
            stop.set()
            reader.join()
        assert bad == []

    def test_put_if_absent(self, store: Store) -> None:
        """The first wins; the second is told, and changes nothing."""
        store.put("ucp.json", b"first", if_absent=True)
        with pytest.raises(StoreExistsError):
            store.put("ucp.json", b"second", if_absent=True)
        assert store.read("ucp.json") == b"first"
        assert _names(store) == ["ucp.json"]
        store.delete("ucp.json")
        store.put("ucp.json", b"third", if_absent=True)
        assert store.read("ucp.json") == b"third"

    def test_put_if_absent_race(self, store: Store) -> None:
        """Of several writers at the same instant exactly one succeeds, and its bytes are there."""
        if self.exclusive_put_threads < 2:
            pytest.skip("this store documents a weaker put(if_absent=True)")
        for turn in range(self.race_turns):
            gate = threading.Barrier(self.exclusive_put_threads)
            winners: list[bytes] = []
            errors: list[Exception] = []

            def attempt(number: int, turn: int = turn, gate: threading.Barrier = gate) -> None:
                data = b"writer %d" % number
                gate.wait()
                try:
                    store.put(f"race-{turn}", data, if_absent=True)
                    winners.append(data)  # noqa: B023
                except StoreExistsError:
                    pass
                except Exception as error:
                    errors.append(error)  # noqa: B023

            threads = [threading.Thread(target=attempt, args=(i,)) for i in range(self.exclusive_put_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert len(winners) == 1
            assert store.read(f"race-{turn}") == winners[0]

    def test_delete(self, store: Store) -> None:
        """Files go; what is missing is no error; the rest stays."""
        for path in ("g/a", "g/b", "g2/a", "top"):
            store.put(path, path.encode())
        store.delete("g/a", "not/there", "g/b", "g/b")
        store.delete()
        assert _names(store) == ["g2/a", "top"]
        with pytest.raises(StoreNotFoundError):
            store.size("g/a")
        store.delete("top")
        assert _names(store) == ["g2/a"]

    # -- reading ---------------------------------------------------------------------------------------------------------

    def test_missing_files(self, store: Store) -> None:
        """All reads name what is missing; a folder is no file."""
        store.put("folder/file", b"x")
        for path in ("nothing", "folder/nothing", "folder", "folder/file/below"):
            with pytest.raises(StoreNotFoundError):
                store.size(path)
            with pytest.raises(StoreNotFoundError, match=path.split("/")[-1]):
                store.read(path, 0, 1)
            with pytest.raises(StoreNotFoundError):
                store.read(path)
            with pytest.raises(StoreNotFoundError):
                store.read_ranges([Range(path, 0, 1)], [memoryview(bytearray(1))])

    def test_reads_behind_the_end(self, store: Store) -> None:
        """A short file is an error that names file, wanted and found, never a short or zero-filled answer."""
        store.put("data", b"0123456789")
        for start, length in ((8, 3), (10, 1), (11, 1), (0, 11), (1 << 40, 1), (0, 1 << 62)):
            with pytest.raises(CorruptCheckpointError, match="data"):
                store.read("data", start, length)
        for start, length in ((8, 3), (10, 1), (11, 1), (0, 11), (1 << 40, 1)):
            into = [memoryview(bytearray(2)), memoryview(bytearray(length))]
            with pytest.raises(CorruptCheckpointError, match="data"):
                store.read_ranges([Range("data", 0, 2), Range("data", start, length)], into)

    def test_negative_ranges(self, store: Store) -> None:
        """Python's meaning of negative numbers must not slip through."""
        store.put("data", b"0123456789")
        for start, length in ((-1, 1), (0, -1)):
            with pytest.raises(FormatError):
                store.read("data", start, length)
            with pytest.raises((FormatError, ValueError)):
                store.read_ranges([Range("data", start, length)], [memoryview(bytearray(max(length, 0)))])

    def test_read_ranges(self, store: Store) -> None:
        """Any order, several files, neighbours, overlaps, empty ranges, typed and multi-dimensional buffers."""
        random = np.random.default_rng(1)
        contents = {"a": random.bytes(5000), "g/b": random.bytes(300_000), "g/c": random.bytes(17)}
        for path, content in contents.items():
            _fill(store, path, content)
        ranges, into = [], []
        for _ in range(300):
            path = str(random.choice(list(contents)))
            start = int(random.integers(0, len(contents[path]) + 1))
            length = int(random.integers(0, min(len(contents[path]) - start, 400) + 1))
            ranges.append(Range(path, start, length))
        ranges += [Range("a", i, 1) for i in range(1500)]  # more neighbours than one vectored call takes
        into = [memoryview(bytearray(item.length)) for item in ranges]
        typed = np.zeros((10, 5), np.int32)
        ranges.append(Range("g/b", 1001, 200))
        into.append(typed.data)
        store.read_ranges(ranges, into)
        for item, buffer in zip(ranges, into, strict=True):
            assert bytes(buffer.tobytes()) == contents[item.path][item.start : item.start + item.length], item
        store.read_ranges([], [])

    def test_read_ranges_checks_the_buffers(self, store: Store) -> None:
        """A wrong number or size of buffers, a read-only or a strided one is a ValueError."""
        store.put("data", b"0123456789")
        strided = np.zeros(40, np.uint8)[::4].data
        cases = [
            ([Range("data", 0, 4)], []),
            ([Range("data", 0, 4)], [memoryview(bytearray(3))]),
            ([Range("data", 0, 4)], [memoryview(b"1234")]),
            ([Range("data", 0, 10)], [strided]),
        ]
        for ranges, into in cases:
            with pytest.raises(ValueError):
                store.read_ranges(ranges, into)

    # -- listing, paths, pickling ----------------------------------------------------------------------------------------

    def test_list(self, store: Store) -> None:
        """Files only, by string prefix, with sizes and times; an empty store lists nothing."""
        assert _names(store) == []
        before = time.time()
        for path, size in (("ucp.json", 1), ("g-1/a", 2), ("g-1/sub/b", 3), ("g-12/a", 4), ("other", 0)):
            _fill(store, path, bytes(size))
        entries = {entry.path: entry for entry in store.list()}
        assert {path: entry.size for path, entry in entries.items()} == {"ucp.json": 1, "g-1/a": 2, "g-1/sub/b": 3, "g-12/a": 4, "other": 0}
        assert all(before - 60 < entry.mtime < time.time() + 60 for entry in entries.values())
        assert _names(store, "g-1/") == ["g-1/a", "g-1/sub/b"]
        assert _names(store, "g-1") == ["g-1/a", "g-1/sub/b", "g-12/a"]
        assert _names(store, "g-1/s") == ["g-1/sub/b"]
        assert _names(store, "g-1/sub/b") == ["g-1/sub/b"]
        assert _names(store, "nothing/") == []
        assert _names(store, "nothing") == []
        assert _names(store, "other/") == []

    def test_many_files(self, store: Store) -> None:
        """A listing does not stop at a page, and all of it can be deleted; a folder beside it stays."""
        store.put("beside/it", b"x")
        wanted = [f"g/{number:05d}" for number in range(self.many_keys)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: store.put(path, b"1"), wanted))
        entries = list(store.list("g/"))
        assert sorted(entry.path for entry in entries) == wanted
        assert sum(entry.size for entry in entries) == self.many_keys
        store.delete(*wanted)
        assert _names(store) == ["beside/it"]

    @pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
    def test_bad_paths(self, store: Store, path: str) -> None:
        """No operation follows a path that could leave the root, or that is not a normal path."""
        for action in (
            lambda: store.size(path),
            lambda: store.read(path),
            lambda: store.read_ranges([Range(path, 0, 1)], [memoryview(bytearray(1))]),
            lambda: store.put(path, b"x"),
            lambda: store.put(path, b"x", if_absent=True),
            lambda: store.delete(path),
            lambda: _fill(store, path, b"x"),
        ):
            with pytest.raises(FormatError):
                action()
        assert _names(store) == []

    @pytest.mark.parametrize("path", ["a b", "ü/日本", "%2e%2e/x", "%20", "a?b#c", "+&=", "..a/b..", "...", "-rf", "x" * 100, "[ab]*", "~"])
    def test_odd_paths(self, store: Store, path: str) -> None:
        """Unusual but legal paths are taken literally."""
        store.put(path, b"odd")
        assert store.read(path, 0, 3) == b"odd"
        assert store.size(path) == 3
        assert _names(store) == [path]
        store.delete(path)
        assert _names(store) == []

    def test_pickles(self, store: Store) -> None:
        """A copy made by pickle, as DCP makes one for a background process, reads and writes the same place."""
        store.put("a", b"1")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.url == store.url
        assert copy.read("a") == b"1"
        _fill(copy, "b", b"2")
        assert store.read("b") == b"2"

    def test_protocol(self, store: Store) -> None:
        """The store has all methods of the protocol, its errors are ours, and it has a URL."""
        assert isinstance(store, Store)
        assert isinstance(store.url, str)
        assert store.url
        with pytest.raises(StoreError) as caught:
            store.size("missing")
        assert isinstance(caught.value, FileNotFoundError)
        pickle.loads(pickle.dumps(caught.value))
