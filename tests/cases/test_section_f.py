"""Public bug reports about object stores, on a real server, most of them with a proxy that breaks requests. ``test_f04_...`` is case F04.

More of F04, F05, F10, F12, F15 and F19 by single operations: tests/objectstore/test_faults.py; of F06 by spawn and in event loops:
tests/objectstore/test_object_store.py; F14 at every operation and request: tests/storage/test_crash_s3.py.
"""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

import ucp_dcp
from ucp_dcp.errors import CheckpointNotFoundError, StoreError, StoreNotFoundError, UnsupportedError
from ucp_dcp.storage.commit import METADATA
from ucp_dcp.storage.object_store import ObjectStore, uploads
from ucp_dcp.storage.object_store.options import Options
from ucp_dcp.storage.store import Store, create_sized, open_store
from ucp_dcp.testing.fault_proxy import FaultProxy, Rule
from ucp_dcp.testing.servers import options_for

MIB = 1 << 20
STATE = {"w": torch.arange(24.0).reshape(4, 6), "empty": torch.empty(0, 3)}


@pytest.fixture(scope="module")
def proxy_of_module(seaweed_server: Any) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxy_of_module: FaultProxy) -> Iterator[FaultProxy]:
    proxy_of_module.rules = []
    proxy_of_module.seen.clear()
    yield proxy_of_module
    proxy_of_module.rules = []


@pytest.fixture(scope="module")
def client(proxy_of_module: FaultProxy) -> Any:
    return open_store("s3://bucket/x", **options_for(proxy_of_module.endpoint)).client


@pytest.fixture
def store(client: Any, proxy: FaultProxy) -> ObjectStore:
    """An empty place, behind the proxy."""
    return ObjectStore(client, "s3", f"bucket/f-{uuid.uuid4().hex}", Options(part_size=5 * MIB, deadline=60))


@pytest.fixture
def direct(seaweed_server: Any, store: ObjectStore) -> Store:
    """The same place, past the proxy."""
    return open_store(store.url, **seaweed_server.storage_options)


def impatient(store: ObjectStore, deadline: float) -> ObjectStore:
    return ObjectStore(store.client, "s3", store.root, dataclasses.replace(store.options, deadline=deadline))


def save(store: Any, **kwargs: Any) -> None:
    ucp_dcp.save(dict(STATE), store, no_dist=True, **kwargs)


def loads(store: Any, **kwargs: Any) -> bool:
    state = {name: torch.full_like(value, -9) for name, value in STATE.items()}
    ucp_dcp.load(state, store, no_dist=True, verify="strict", **kwargs)
    return all(torch.equal(state[name], STATE[name]) for name in STATE)


class Bucket:
    """A client of parts that keeps them."""

    endpoint = "http://nowhere"

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.content = b""

    def begin(self, key: str, nonce: str) -> str:
        return "1"

    def part(self, key: str, upload_id: str, number: int, data: Any) -> dict[str, str]:
        self.parts[number] = bytes(data)
        return {"ETag": str(number)}

    def complete(self, key: str, upload_id: str, parts: list[dict[str, str]], *, if_absent: bool) -> None:
        self.content = b"".join(self.parts[int(part["ETag"])] for part in parts)

    def abort(self, key: str, upload_id: str) -> None:
        self.parts.clear()


def test_f01_more_than_10_000_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth: 100 parts at most, and 1 MiB of unknown length in parts that begin with 4 KiB, which would be 256."""
    monkeypatch.setattr(uploads, "MAX_PARTS", 100)
    monkeypatch.setattr(uploads, "_GROWS", uploads._GROWS // 100)
    bucket, options = Bucket(), Options()
    object.__setattr__(options, "part_size", 4096)
    content = os.urandom(MIB)
    with ObjectStore(bucket, "s3", "b/x", options).create("big") as file:
        for at in range(0, MIB, 1000):
            file.write(content[at : at + 1000])
    assert bucket.content == content and len(bucket.parts) <= 100
    sizes = [len(bucket.parts[number]) for number in sorted(bucket.parts)]
    assert sizes[0] == 4096 and sizes[:-1] == sorted(sizes[:-1])


def test_f02_a_part_in_the_middle_is_too_small() -> None:
    bucket = Bucket()
    writes = [bytes(1), os.urandom(6 * MIB), bytes(16), os.urandom(7 * MIB)]
    with ObjectStore(bucket, "s3", "b/x", Options(part_size=5 * MIB)).create("big") as file:
        for data in writes:
            file.write(data)
    assert bucket.content == b"".join(writes)
    assert all(len(bucket.parts[number]) >= 5 * MIB for number in range(1, len(bucket.parts)))


def test_f03_nothing_to_write(store: ObjectStore) -> None:
    nothing = {"none": torch.empty(0, 7)}
    ucp_dcp.save(nothing, store, no_dist=True)
    back = {"none": torch.empty(0, 7)}
    ucp_dcp.load(back, store, no_dist=True)
    assert ucp_dcp.open_checkpoint(store)["none"].shape == (0, 7)
    with create_sized(store, "zero", 0):
        pass
    assert store.size("zero") == 0 and list(store.uploads()) == []


def test_f04_slow_down(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = [Rule("answer", status=503, code="SlowDown", method=method, times=3) for method in ("PUT", "GET", "HEAD", "DELETE")]
    save(store)
    proxy.rules = [Rule("answer", status=503, code="SlowDown", method=method, times=3) for method in ("GET", "HEAD")]
    assert loads(store)
    proxy.rules = [Rule("answer", status=503, code="SlowDown", method="PUT")]
    begin = time.monotonic()
    proxy.seen.clear()
    with pytest.raises(StoreError, match=r"__0_0.distcp.*503 SlowDown") as raised:
        save(impatient(store, 1.0))
    assert time.monotonic() - begin < 30 and store.url in str(raised.value)
    tries = Counter(seen.path.partition("?")[0] for seen in proxy.seen if seen.action == "answer")
    assert all(1 < number < 20 for number in tries.values()), tries  # waits grow
    proxy.rules = []
    assert loads(store)  # the old one


def parts_of(store: ObjectStore, count: int) -> None:
    with create_sized(store, "dir/big", count * 5 * MIB) as file:
        for number in range(count):
            file.write_at(number * 5 * MIB, [bytes(5 * MIB)])


def test_f05_the_cause_of_a_failed_part(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=2", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match=r"dir/big.*part 2.*AccessDenied"):
        parts_of(store, 3)


def in_a_fork(store: ObjectStore, queue: Any) -> None:
    store.put("by the child", store.read("by the parent") + b"!")
    queue.put(sorted(entry.path for entry in store.list()))


def test_f06_after_a_fork(store: ObjectStore) -> None:
    """The parent has used the client, its threads too."""
    store.put("by the parent", b"hello")
    store.delete("a", "b", "c")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_fork, args=(store, queue))
    child.start()
    try:
        assert queue.get(timeout=60) == ["by the child", "by the parent"]
    finally:
        child.join(30)
        child.kill()
    assert store.read("by the child") == b"hello!"


@pytest.mark.parametrize("kind", ["botocore", "s3fs"])
def test_f07_what_was_not_there_before(direct: Store, seaweed_server: Any, kind: str) -> None:
    reader = open_store(direct.url, client=kind, **seaweed_server.storage_options)
    with pytest.raises(CheckpointNotFoundError):
        ucp_dcp.open_checkpoint(reader)
    assert list(reader.list()) == []
    save(direct)
    assert loads(reader) and len(list(reader.list())) > 3


def test_f09_a_server_without_checksums(store: ObjectStore, proxy: FaultProxy) -> None:
    """It refuses what carries one. Ranges are not compared with a checksum of the whole object."""
    proxy.rules = [Rule("answer", header="x-amz-sdk-checksum-algorithm", status=400, code="InvalidRequest")]
    with pytest.raises(StoreError, match="InvalidRequest"):
        save(store)
    options = {**options_for(proxy.endpoint), "config_kwargs": {"request_checksum_calculation": "when_required"}}
    ucp_dcp.save(dict(STATE), store.url, storage_options=options, overwrite=True, grace=0, no_dist=True)
    ucp_dcp.save(dict(STATE), store.url, storage_options=options, overwrite=True, grace=0, no_dist=True)  # deletes
    assert loads(store.url, storage_options=options)
    assert store.client.s3.meta.config.response_checksum_validation == "when_required"


def test_f10_a_short_body(store: ObjectStore, proxy: FaultProxy) -> None:
    content = os.urandom(100_000)
    store.put("data", content)
    proxy.rules = [Rule("truncate", method="GET", size=50_000, times=1)]
    assert store.read("data", 0, 100_000) == content
    proxy.rules = [Rule("truncate", method="GET", size=0)]
    with pytest.raises(StoreError, match=r"data.*0 of 100000 bytes"):
        impatient(store, 0.5).read("data", 0, 100_000)


def test_f12_no_upload_stays(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=3", status=403, code="AccessDenied")]
    with pytest.raises(StoreError):
        parts_of(store, 5)
    assert list(store.uploads()) == [] and list(store.list()) == []
    assert any("uploads" in seen.path for seen in proxy.seen)


def test_f13_a_stream_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFile

    def no_file(self: Any) -> int:
        raise io.UnsupportedOperation("fileno")

    def no_sync() -> None:
        raise AssertionError("os.sync() of the whole machine")

    monkeypatch.setattr(MemoryFile, "fileno", no_file)
    monkeypatch.setattr(os, "sync", no_sync)
    url = f"memory://f13-{uuid.uuid4().hex}"
    save(url)
    assert loads(url)


def test_f14_the_commit_is_one_put(store: ObjectStore, proxy: FaultProxy) -> None:
    save(store, grace=0)
    proxy.rules = [Rule("answer", header="x-amz-copy-source")]  # nothing is ever copied
    proxy.seen.clear()
    save(store, grace=0)
    changes = [
        (seen.method, seen.path.partition("?")[0].rpartition("/")[2]) for seen in proxy.seen if seen.method in ("PUT", "POST", "DELETE")
    ]
    at = changes.index(("PUT", "ucp.json"))
    assert changes.count(("PUT", "ucp.json")) == 1 and all(method == "PUT" for method, _ in changes[:at])
    assert changes[at + 1] == ("PUT", METADATA) and any(method == "DELETE" for method, _ in changes[at:])
    assert not any(seen.action == "answer" for seen in proxy.seen)


def test_f15_an_error_in_an_answer_of_200(store: ObjectStore, proxy: FaultProxy) -> None:
    body = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code><Message>try again</Message></Error>'
    proxy.rules = [Rule("answer", method="POST", path="uploadId=", status=200, body=body, times=2)]
    parts_of(store, 2)
    assert store.size("dir/big") == 10 * MIB
    proxy.rules = [Rule("answer", method="POST", path="uploadId=", status=200, body=body)]
    store.delete("dir/big")
    with pytest.raises(StoreError, match=r"dir/big.*InternalError"):
        parts_of(impatient(store, 0.5), 2)
    with pytest.raises(StoreNotFoundError):
        store.size("dir/big")


def test_f16_slashes(direct: Store, seaweed_server: Any) -> None:
    options = seaweed_server.storage_options
    ucp_dcp.save(dict(STATE), f"{direct.url}/run/", storage_options=options, no_dist=True)
    assert loads(f"{direct.url}/run", storage_options=options)
    assert all(entry.path.startswith("run/") and "//" not in entry.path for entry in direct.list())
    with pytest.raises(UnsupportedError, match="without empty names"):
        ucp_dcp.open_checkpoint(f"{direct.url}//run", storage_options=options)
    at_root = open_store("s3://bucket/", **options)
    assert at_root.url == open_store("s3://bucket", **options).url == "s3://bucket"
    assert open_store("s3://bucket", **options).size(direct.url.partition("bucket/")[2] + "/run/ucp.json") > 0


def test_f17_odd_keys(direct: Store, seaweed_server: Any) -> None:
    names = ["sp ace", "pct%20x", "h#x", "q?x", "p+x", "t~x", "u-ü"]
    for name in names:
        url = f"{direct.url}/{name}"
        ucp_dcp.save({"name": name}, url, storage_options=seaweed_server.storage_options, no_dist=True)
        assert ucp_dcp.open_checkpoint(url, storage_options=seaweed_server.storage_options).objects["name"] == name
    assert {entry.path.partition("/")[0] for entry in direct.list()} == set(names)
    with pytest.raises(CheckpointNotFoundError):
        ucp_dcp.open_checkpoint(f"{direct.url}/pct x", storage_options=seaweed_server.storage_options)


def test_f18_the_scheme(direct: Store, seaweed_server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = seaweed_server.storage_options
    save(open_store(f"{direct.url}/step-1", **options))
    found = ucp_dcp.latest(direct.url, storage_options=options)
    assert found == f"{direct.url}/step-1" and loads(found, storage_options=options)
    (listed,) = [path for path in fsspec.filesystem("s3", **options).ls(direct.url) if path.endswith("step-1")]
    assert loads(f"s3://{listed}", storage_options=options)
    with pytest.raises(UnsupportedError, match="s3://s3://"):
        ucp_dcp.open_checkpoint(f"s3://{direct.url}", storage_options=options)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=listed):  # without a scheme it is a local path, and the message shows which
        ucp_dcp.open_checkpoint(listed)


ANSWERS = [
    (301, "PermanentRedirect", "another region"),
    (403, "AccessDenied", "lack the right"),
    (403, "SignatureDoesNotMatch", "secret key is wrong"),
    (400, "ExpiredToken", "expired"),
]


@pytest.mark.parametrize(("status", "code", "told"), ANSWERS, ids=[code for _, code, _ in ANSWERS])
def test_f19_region_and_credentials(store: ObjectStore, proxy: FaultProxy, status: int, code: str, told: str) -> None:
    proxy.rules = [Rule("answer", status=status, code=code)]
    begin = time.monotonic()
    with pytest.raises(StoreError) as raised:
        ucp_dcp.open_checkpoint(store)
    # botocore follows a redirect without a region until Python's stack ends: 156 requests, some seconds of CPU
    assert (time.monotonic() - begin < 10 and len(proxy.seen) <= 3) or status == 301
    assert not isinstance(raised.value, FileNotFoundError)
    text = str(raised.value)
    assert "s3://bucket" in text and (str(status) in text or "region_name" in text) and options_for("")["secret"] not in text
    # the answer to a HEAD has no body that names the code
    assert told in text or "lack the right" in text or "400" in text or "redirects without naming a region" in text


def test_f20_pages_of_a_listing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three. More than 1,000 files: tests/objectstore/test_conformance.py."""
    real = type(store.client)._call

    def small_pages(self: Any, operation: str, **arguments: Any) -> Any:
        return real(self, operation, **arguments, **({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(type(store.client), "_call", small_pages)
    for number in range(8):
        store.put(f"g-{number:032x}/__0_0.distcp", b"x")
    save(store)
    assert ucp_dcp.verify(store).ok
    assert len(ucp_dcp.gc(store, older_than=0, delete=True).goes) == 8
    assert loads(store)


def load_together(rank: int, world: int, url: str, options: dict[str, Any]) -> bool:
    state = {name: torch.full_like(value, -9) for name, value in STATE.items()}
    ucp_dcp.load(state, url, storage_options=options)
    return torch.equal(state["w"], STATE["w"])


def test_f21_every_rank_fetches_the_same(ranks: Any, direct: Store, proxy: FaultProxy) -> None:
    """The number of requests for what opens a checkpoint; tensors that all ranks want are read by each of them."""
    save(direct)
    proxy.seen.clear()
    assert all(ranks.run(4, load_together, direct.url, options_for(proxy.endpoint)))
    gets = Counter(seen.path.partition("?")[0].rpartition("/")[2] for seen in proxy.seen if seen.method == "GET")
    assert gets["ucp.json"] <= 4 and gets[METADATA] <= 4 and gets["index.ucp"] <= 8, gets
    assert not [seen for seen in proxy.seen if "list-type" in seen.path]
