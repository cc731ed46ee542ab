"""The counting store counts, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from counting_store import CountingStore

from ucp_dcp.errors import StoreExistsError
from ucp_dcp.storage.store import Range, Store, open_store


def test_counts_bytes_and_requests(tmp_path: Path) -> None:
    store = CountingStore(open_store(tmp_path))
    assert isinstance(store, Store) and store.url == open_store(tmp_path).url
    with store.create("a/data") as writer:
        assert writer.write(b"0123456789") == 10 and writer.tell() == 10
    store.put("b", b"xyz")
    assert store.counts.bytes_written == 13 and store.counts.calls == {"create": 1, "put": 1}
    store.reset()

    target = bytearray(5)
    store.read_ranges([Range("a/data", 1, 2), Range("b", 0, 3)], [memoryview(target)[:2], memoryview(target)[2:]])
    assert bytes(target) == b"12xyz" and store.read("a/data", 8) == b"89" and store.size("b") == 3
    counts = store.reset()
    assert (counts.requests, counts.bytes_read, counts.bytes_of("a/data"), counts.bytes_written) == (3, 7, 4, 0)
    assert counts.calls == {"read_ranges": 1, "read": 1, "size": 1}

    with pytest.raises(StoreExistsError):
        store.put("b", b"", if_absent=True)
    assert {e.path for e in store.list()} == {"a/data", "b"}
    store.delete("a/data", "b")
    assert list(store.list()) == [] and store.counts.bytes_read == 0
