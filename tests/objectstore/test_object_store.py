"""What is particular to stores on objects: parts, pins, options, processes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import pickle
import threading
import uuid

import pytest

from ucp_dcp.errors import CorruptCheckpointError, StoreChangedError, StoreError, StoreExistsError, StoreNotFoundError, UnsupportedError
from ucp_dcp.storage.fsspec_store import FsspecStore
from ucp_dcp.storage.object_store import ObjectStore, Options, conditions
from ucp_dcp.storage.object_store.options import part_size_for
from ucp_dcp.storage.store import Range, create_sized, open_store
from ucp_dcp.testing.fault_proxy import FaultProxy, Rule
from ucp_dcp.testing.servers import options_for

MIB = 1 << 20


def with_options(store, **changes):
    return ObjectStore(store.client, "s3", store.root, dataclasses.replace(store.options, **changes))


def test_an_object_of_5_tib_has_10_000_parts_at_most():
    for size in (0, 1, 160_000 * MIB, 160_000 * MIB + 1, 5 << 40):
        part = part_size_for(size, 16 * MIB)
        assert -(-size // part) <= 10_000 and part % MIB == 0 and part >= 16 * MIB
    assert part_size_for(5 << 40, 16 * MIB) <= 525 * MIB


def test_parts_of_a_stream_grow(store, proxy, monkeypatch):
    """Of unknown length: 10,000 parts must hold 5 TiB. Here they grow after each."""
    from ucp_dcp.storage.object_store import uploads

    assert sum(16 * MIB * (1 + n // uploads._GROWS) for n in range(10_000)) > 5 << 40
    monkeypatch.setattr(uploads, "_GROWS", 1)
    content = os.urandom(16 * MIB)
    with store.create("s") as stream:
        for at, size in ((0, 1), (1, 6 * MIB), (6 * MIB + 1, 16), (6 * MIB + 17, len(content))):
            stream.write(content[at : at + size] if at + size < len(content) else content[at:])
    assert sorted(seen.sent for seen in proxy.seen if "partNumber" in seen.path) == [MIB, 5 * MIB, 10 * MIB]
    assert store.read("s") == content


@pytest.mark.parametrize(("size", "parts"), [(0, 0), (5 * MIB, 0), (5 * MIB + 1, 2)])
def test_few_requests_for_a_file(store, proxy, size, parts):
    content = os.urandom(size)
    with create_sized(store, "f", size) as file:
        for at in range(0, size, file.part_size or max(size, 1)):
            file.write_at(at, [content[at : at + (file.part_size or size)]])
    assert len(proxy.seen) == (parts + 2 if parts else 1)
    proxy.seen.clear()
    assert store.read("f") == content
    assert len(proxy.seen) == 1


def test_parts_must_be_parts(store):
    for at, size in ((1, 5 * MIB), (0, 5 * MIB - 1)):
        with pytest.raises(StoreError, match="no part of an upload in parts of 5242880"), create_sized(store, "f", 12 * MIB) as file:
            file.write_at(at, [bytes(size)])
    assert list(store.uploads()) == [] and list(store.list()) == []


def test_a_large_range_is_read_in_parallel_pieces_straight_into_place(store, proxy):
    content = os.urandom(3 * MIB)
    store.put("a", content)
    proxy.seen.clear()
    pieces = with_options(store, piece=MIB, gap=100)
    into = [bytearray(3 * MIB - 7), bytearray(10), bytearray(10), bytearray(10)]
    pieces.read_ranges([Range("a", 7, 3 * MIB - 7)], [memoryview(into[0])])
    assert into[0] == content[7:] and len(proxy.seen) == 3
    proxy.seen.clear()
    pieces.read_ranges([Range("a", at, 10) for at in (0, 100, 1000)], [memoryview(b) for b in into[1:]])
    assert [bytes(b) for b in into[1:]] == [content[at : at + 10] for at in (0, 100, 1000)]
    assert sorted(seen.received for seen in proxy.seen) == [10, 110]  # the first two are near enough, the third is not


def test_an_object_that_changes_is_noticed(store):
    """A load must not put together the bytes of two saves."""
    store.put("a", b"old old old")
    reader = with_options(store)
    data = memoryview(bytearray(3))
    reader.read_ranges([Range("a", 0, 3)], [data])
    store.put("a", b"new new new")
    with pytest.raises(StoreChangedError, match=r"a in s3://.* was replaced"):
        reader.read_ranges([Range("a", 4, 3)], [data])
    reader.size("a")  # opened again
    reader.read_ranges([Range("a", 4, 3)], [data])
    assert bytes(data) == b"new"
    store.put("a", b"newest")
    with pytest.raises(StoreChangedError):
        reader.read_ranges([Range("a", 0, 3)], [data])


def test_a_server_that_ignores_if_match_does_not_hide_a_change(store, monkeypatch):
    store.put("a", b"old old old")
    reader = with_options(store)
    assert reader.size("a") == 11
    store.put("a", b"new new new")
    real = store.client._call
    monkeypatch.setattr(store.client, "_call", lambda operation, **a: real(operation, **{k: v for k, v in a.items() if k != "IfMatch"}))
    with pytest.raises(StoreChangedError, match="ETag"):
        reader.read_ranges([Range("a", 0, 3)], [memoryview(bytearray(3))])


def test_a_bucket_that_is_not_there(moto_server):
    store = open_store("s3://no-such-bucket/run", **moto_server.storage_options)
    for action in (lambda: store.size("a"), lambda: store.read("a"), lambda: list(store.list()), lambda: store.put("a", b"x")):
        with pytest.raises(StoreError, match=r"bucket.* does not exist|NoSuchBucket") as caught:
            action()
        assert not isinstance(caught.value, FileNotFoundError), caught.value


@pytest.mark.parametrize("client", ["botocore", "obstore"])
def test_wrong_credentials(seaweed_server, client):
    wrong = open_store("s3://bucket/run", client=client, **{**seaweed_server.storage_options, "secret": "wrong-secret"})
    for action in (lambda: wrong.size("a"), lambda: wrong.put("a", b"x", if_absent=True), lambda: list(wrong.list())):
        with pytest.raises(StoreError, match=r"credentials|secret|SignatureDoesNotMatch") as caught:
            action()
        assert "wrong-secret" not in str(caught.value) and not isinstance(caught.value, FileNotFoundError)


def test_no_credentials(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no credentials were found"):
        open_store("s3://bucket/run", endpoint_url="http://127.0.0.1:9", client_kwargs={"region_name": "us-east-1"}).size("a")


def test_urls():
    for url, root in (("s3://b/run/", "b/run"), ("s3://b", "b"), ("s3a://b/", "b"), ("s3://b/p%20x/q?x#y", "b/p%20x/q?x#y")):
        assert open_store(url, key="k", secret="s").root == root
    assert open_store("s3://b/run/").url == "s3://b/run"
    for url in ("s3://", "s3://s3://b/x", "s3://b//x"):
        with pytest.raises(UnsupportedError, match="without empty names"):
            open_store(url)


def test_options():
    store = open_store("s3://b/r", key="AKIA", secret="SECRET", part_size=32 * MIB, requests=4, deadline=7)
    assert store.options == Options(part_size=32 * MIB, requests=4, deadline=7)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url and copy.options == store.options
    assert "SECRET" not in repr(store) + store.url + str(store.__dict__.keys())
    for wrong in ({"part_size": MIB}, {"part_size": 5 * MIB + 1}, {"requests": 0}, {"gap": -1}):
        with pytest.raises(ValueError):
            open_store("s3://b/r", **wrong)
    with pytest.raises(UnsupportedError, match=r"unknown storage options \['keey'\]"):
        open_store("s3://b/r", keey="AKIA")
    with pytest.raises(UnsupportedError, match=r'expected "botocore", "obstore" or "s3fs"'):
        open_store("s3://b/r", client="boto5")
    assert isinstance(open_store("s3://b/r", client="s3fs", anon=True), FsspecStore)
    assert isinstance(open_store("memory://b/r"), FsspecStore)


def test_s3fs_options_reach_the_client():
    options = {"endpoint_url": "http://127.0.0.1:9", "client_kwargs": {"region_name": "eu-west-7"}, "config_kwargs": {"read_timeout": 3}}
    s3 = open_store("s3://b/r", anon=True, **options).client.s3
    assert s3.meta.region_name == "eu-west-7" and s3.meta.config.read_timeout == 3 and s3.meta.endpoint_url == "http://127.0.0.1:9"


def test_additional_arguments_go_where_they_belong(store, monkeypatch):
    options = {**store.client._options, "s3_additional_kwargs": {"StorageClass": "STANDARD_IA", "ServerSideEncryption": "AES256"}}
    client = type(store.client)("bucket", options, 4)
    asked = {}

    class Recorder:
        meta = client.s3.meta

        def __getattr__(self, name):
            return lambda **arguments: asked.setdefault(name, arguments)

    monkeypatch.setattr(type(client), "s3", Recorder())
    client._call("put_object", Key="k")
    client._call("delete_object", Key="k")
    assert asked["put_object"]["StorageClass"] == "STANDARD_IA" and "StorageClass" not in asked["delete_object"]


# -- conditions ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful(moto_server, monkeypatch):
    """moto, which checks no signatures, behind a proxy; nothing is known about it yet."""
    monkeypatch.setattr(conditions, "_KNOWN", {})
    with FaultProxy(moto_server.port) as proxy:
        yield proxy, open_store(f"s3://bucket/{uuid.uuid4().hex}", **options_for(proxy.endpoint))


def test_a_server_that_refuses_conditions(forgetful, caplog):
    """OpenStack Swift answers 501. Then the path is looked at, and the log says so, once."""
    proxy, store = forgetful
    proxy.rules = [Rule("answer", method="PUT", header="if-none-match", status=501, code="NotImplemented")]
    with caplog.at_level(logging.WARNING):
        store.put("a", b"first", if_absent=True)
        with pytest.raises(StoreExistsError):
            store.put("a", b"second", if_absent=True)
        with pytest.raises(StoreExistsError), store.create("a") as stream:
            stream.write(b"third")
    assert store.read("a") == b"first"
    assert caplog.text.count("does not keep If-None-Match") == 1
    assert [entry.path for entry in store.list()] == ["a"]


def test_a_server_that_ignores_conditions(forgetful, monkeypatch, caplog):
    """rclone writes regardless: the probe finds out before a checkpoint is lost."""
    _, store = forgetful
    real = store.client._call
    monkeypatch.setattr(store.client, "_call", lambda operation, **a: real(operation, **{k: v for k, v in a.items() if k != "IfNoneMatch"}))
    with caplog.at_level(logging.WARNING):
        store.put("a", b"first", if_absent=True)
        with pytest.raises(StoreExistsError):
            store.put("a", b"second", if_absent=True)
    assert store.read("a") == b"first" and "wrote one object twice" in caplog.text
    big = bytes(17 * MIB)
    with create_sized(store, "b", len(big)) as file:
        for at in range(0, len(big), file.part_size):
            file.write_at(at, [big[at : at + file.part_size]])
    with pytest.raises(StoreExistsError), create_sized(store, "b", len(big)):
        pass
    assert [entry.path for entry in store.list()] == ["a", "b"]


def test_the_probe_is_made_once(forgetful):
    proxy, store = forgetful
    for name in "abc":
        store.put(name, b"x", if_absent=True)
    assert len([seen for seen in proxy.seen if ".tmp" in seen.path]) == 3  # twice written, once deleted
    assert sorted(entry.path for entry in store.list()) == ["a", "b", "c"]


# -- processes, threads, loops ---------------------------------------------------------------------------------------------------


def _use(store, answers):
    try:
        data = bytearray(4)
        store.read_ranges([Range("a", 0, 2), Range("a", 2 * MIB, 2)], [memoryview(data)[:2], memoryview(data)[2:]])
        store.put(f"child-{os.getpid()}", bytes(data))
        answers.put(bytes(data))
    except BaseException as error:
        answers.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_other_processes(seaweed_server, method):
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", gap=0, **seaweed_server.storage_options)
    store.put("a", b"ab" + bytes(2 * MIB - 2) + b"cd")
    _use(store, answers := multiprocessing.get_context(method).Queue())  # its threads and connections are there when it forks
    child = multiprocessing.get_context(method).Process(target=_use, args=(store, answers))
    child.start()
    child.join(60)
    assert not child.is_alive() and child.exitcode == 0
    assert [answers.get(timeout=5) for _ in range(2)] == [b"abcd", b"abcd"]
    assert len(list(store.list("child-"))) == 2


def test_obstore_says_that_it_does_not_survive_a_fork(seaweed_server):
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", client="obstore", **seaweed_server.storage_options)
    store.put("a", b"x")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_use, args=(store, answers := context.Queue()))
    child.start()
    told = answers.get(timeout=10)
    child.join(10)
    assert "obstore was used before this process was forked" in told


@pytest.mark.parametrize("where", ["seaweed_server", "moto_server"])
def test_listings_go_on_after_a_page(where, request):
    server = request.getfixturevalue(where)
    page = {"MaxKeys": 3} if server.name == "seaweedfs" else {"MaxKeys": 3, "MaxUploads": 2}  # see BotocoreClient.uploads
    paged = open_store(f"s3://bucket/{uuid.uuid4().hex}", s3_additional_kwargs=page, **server.storage_options)
    names = [f"a b/{number}%20" for number in range(7)]
    for name in names:
        paged.put(name, b"")
        paged.client.begin(paged.key(name), "nonce")
    assert sorted(entry.path for entry in paged.list()) == names
    assert sorted(entry.path for entry in paged.list("a b/3")) == names[3:4]
    found = list(paged.uploads())
    assert sorted(upload.key for upload in found) == [paged.key(name) for name in names]
    for upload in found:
        paged.abort_upload(upload)
    assert list(paged.uploads()) == []


def test_in_a_running_event_loop_and_in_many_threads(store):
    content = os.urandom(100_000)
    store.put("a", content)

    async def inside():
        return store.read("a")

    assert asyncio.run(inside()) == content
    wrong = []

    def look(number):
        data = bytearray(1000)
        for turn in range(5):
            start = (number * 5 + turn) * 97 % 99_000
            store.read_ranges([Range("a", start, 400), Range("a", start + 600, 400)], [memoryview(data)[:400], memoryview(data)[600:]])
            if data[:400] != content[start : start + 400] or data[600:] != content[start + 600 : start + 1000]:
                wrong.append(start)

    threads = [threading.Thread(target=look, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_range_behind_the_end_says_what_is_there(store):
    store.put("a", bytes(10))
    for start, length in ((5, 6), (10, 1), (100, 5)):
        with pytest.raises(CorruptCheckpointError, match=f"{length} bytes from byte {start} were wanted, but the file has 10 bytes"):
            store.read_ranges([Range("a", start, length)], [memoryview(bytearray(length))])


def test_a_small_file_of_unknown_size_is_one_request(store, proxy):
    for size in (0, 1, 1000, 1001):
        store.put(f"m{size}", bytes(size))
        proxy.seen.clear()
        assert store.read_up_to(f"m{size}", 1000) == (size, bytes(min(size, 1000)))
        assert len(proxy.seen) == 1
    with pytest.raises(StoreNotFoundError):
        store.read_up_to("nothing", 1000)
