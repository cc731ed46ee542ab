"""What a store makes of what networks and loaded servers do: a proxy before a real server breaks requests."""

from __future__ import annotations

import dataclasses
import logging
import os
import time

import pytest

from ucp_dcp.errors import StoreError, StoreExistsError, StoreNotFoundError
from ucp_dcp.storage.object_store import ObjectStore
from ucp_dcp.storage.store import Range, create_sized, open_store
from ucp_dcp.testing.fault_proxy import Rule
from ucp_dcp.testing.servers import options_for

MIB = 1 << 20
CONTENT = os.urandom(5 * MIB + 345)


def write(store, path="dir/big", content=CONTENT):
    with create_sized(store, path, len(content)) as file:
        step = file.part_size or len(content)
        for at in range(0, len(content), step):
            file.write_at(at, [content[at : at + step]])


def read(store, path="dir/big", start=0, length=5 * MIB + 345):
    data = bytearray(length)
    store.read_ranges([Range(path, start, length)], [memoryview(data)])
    return bytes(data)


def impatient(store, deadline=0.3):
    return ObjectStore(store.client, "s3", store.root, dataclasses.replace(store.options, deadline=deadline))


PASSING = [
    Rule("answer", status=503, code="SlowDown"),
    Rule("answer", status=500, code="InternalError"),
    Rule("reset"),
    Rule("lose"),
    Rule("cut", size=10),
]
ALIKE = [
    Rule("answer", status=429, code="TooManyRequests"),
    Rule("answer", status=502, body="<html>Bad Gateway</html>"),
    Rule("answer", status=400, code="RequestTimeout"),
    Rule("truncate", size=10),
]


@pytest.mark.parametrize(
    "rule",
    [*PASSING, *(pytest.param(rule, marks=pytest.mark.slow) for rule in ALIKE)],
    ids=lambda rule: f"{rule.action}-{rule.status}-{rule.size}",
)
def test_what_passes_is_tried_again(store, proxy, direct, rule):
    """Each kind of request fails twice: a small and a large file written, read, listed and deleted, bit for bit."""
    methods = ["PUT", "POST", "GET", "HEAD", "DELETE"]
    proxy.rules = [dataclasses.replace(rule, method=method, times=2) for method in methods]
    write(store)
    store.put("dir/small", b"small", if_absent=True)
    assert read(store) == CONTENT
    assert store.read("dir/small") == b"small"
    assert store.size("dir/small") == 5
    assert sorted(e.path for e in store.list("dir/")) == ["dir/big", "dir/small"]
    store.delete("dir/small")
    assert [e.path for e in direct.list()] == ["dir/big"]
    assert direct.read("dir/big") == CONTENT
    assert list(direct.uploads()) == []
    for rule in proxy.rules:  # an answer to HEAD without a body cannot be cut, and one that says nothing is looked into by a GET
        assert rule.used == 2 or (rule.method == "HEAD" and rule.used == 1)


def test_200_with_an_error_inside(store, proxy, direct):
    """S3 answers the completion of an upload before it knows how it ends."""
    body = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code><Message>injected</Message></Error>'
    proxy.rules = [Rule("answer", method="POST", path="uploadId=", status=200, body=body, times=2)]
    write(store)
    assert proxy.rules[0].used == 2
    assert direct.read("dir/big") == CONTENT


def test_a_read_goes_on_where_it_was_cut(store, proxy):
    write(store)
    proxy.seen.clear()
    proxy.rules = [Rule("cut", method="GET", size=3 * MIB, times=1)]
    assert read(store) == CONTENT
    assert sum(seen.received for seen in proxy.seen) < len(CONTENT) + 2 * MIB


def test_a_body_that_is_always_short_is_an_error_never_zeros(store, proxy):
    write(store)
    proxy.rules = [Rule("truncate", method="GET", size=0)]
    with pytest.raises(StoreError, match=r"dir/big.*1048576 bytes from byte 5.*given up: .*0 of 1048576 bytes") as caught:
        read(impatient(store), start=5, length=MIB)
    assert not isinstance(caught.value, StoreNotFoundError)


def test_a_stalled_connection_is_left(store, proxy):
    write(store)
    client = type(store.client)("bucket", {**store.client._options, "config_kwargs": {"read_timeout": 1}}, 4)
    proxy.rules = [Rule("stall", method="GET", size=2 * MIB, seconds=60, times=1)]
    begun = time.monotonic()
    assert read(ObjectStore(client, "s3", store.root, store.options), length=4 * MIB) == CONTENT[: 4 * MIB]
    assert time.monotonic() - begun < 30


def test_waits_grow_and_end(store, proxy):
    proxy.rules = [Rule("answer", status=503, code="SlowDown")]
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"small in s3://bucket/.* failed \d+ times within 2 s, and was given up: .*503 "):
        impatient(store, 2).size("small")
    assert 0.5 < time.monotonic() - begun < 20
    assert 3 <= len(proxy.seen) <= 12


def test_an_error_of_the_server_is_not_absence(store, proxy):
    """An overwrite decision on that would destroy a checkpoint."""
    proxy.rules = [Rule("answer", status=500, code="InternalError")]
    hasty = impatient(store)
    for action in (
        lambda: hasty.size("a"),
        lambda: hasty.read("a"),
        lambda: hasty.read("a", 0, 1),
        lambda: list(hasty.list()),
        lambda: hasty.check_absent("a"),
    ):
        with pytest.raises(StoreError, match="500") as caught:
            action()
        assert not isinstance(caught.value, (StoreNotFoundError, StoreExistsError))


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "AccessDenied", "the credentials lack the right"),
        (403, "InvalidAccessKeyId", "the access key is not known"),
        (400, "ExpiredToken", "the credentials have expired"),
    ],
)
def test_what_does_not_pass_is_told_at_once(store, proxy, status, code, told):
    proxy.rules = [Rule("answer", status=status, code=code)]
    begun = time.monotonic()
    for action in (lambda: store.put("a", b"x", if_absent=True), lambda: store.read("a"), lambda: write(store)):
        with pytest.raises(StoreError, match=told) as caught:
            action()
        assert "test-secret" not in str(caught.value)
    assert time.monotonic() - begun < 15  # no wait, and no retry


def test_a_redirect_that_leads_nowhere(store, proxy):
    proxy.rules = [Rule("answer", status=301, code="PermanentRedirect")]
    with pytest.raises(StoreError, match="the server redirects without naming a region"):
        store.read("a")


def test_the_first_cause_is_told_with_key_and_part(store, proxy, direct):
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=2", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match=r"dir/big in .*: uploading part 2 .*AccessDenied"):
        write(store)
    assert list(direct.uploads()) == []
    assert list(direct.list()) == []


def test_parts_of_a_failed_stream_are_aborted(store, proxy, direct):
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=3", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match="part 3"), store.create("s") as stream:
        for _ in range(16):
            stream.write(CONTENT[:MIB])
    assert list(direct.uploads()) == []
    assert list(direct.list()) == []


def test_an_abort_that_fails_is_logged_and_the_cause_stays(store, proxy, direct, caplog):
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=2", status=403, code="AccessDenied"), Rule("answer", method="DELETE")]
    with caplog.at_level(logging.WARNING), pytest.raises(StoreError, match="part 2"):
        write(impatient(store))
    assert "its parts stay" in caplog.text
    (left,) = direct.uploads()
    assert left.key.endswith("dir/big") and abs(left.started - time.time()) < 100
    direct.abort_upload(left)
    assert list(direct.uploads()) == []


@pytest.mark.parametrize("rule", [Rule("lose", times=1), Rule("lose", times=3)], ids=["once", "thrice"])
def test_a_lost_answer_to_a_conditional_put_is_settled(store, proxy, direct, rule):
    """The repeated request gets 412: by its own object, which is not another writer."""
    store.put("x", b"", if_absent=True)  # the probe is done with
    proxy.rules = [dataclasses.replace(rule, method="PUT", header="if-none-match")]
    store.put("ucp.json", b"ours", if_absent=True)
    assert direct.read("ucp.json") == b"ours"
    proxy.rules = [dataclasses.replace(rule, method="PUT", header="if-none-match")]
    with pytest.raises(StoreExistsError):
        store.put("ucp.json", b"late", if_absent=True)
    assert direct.read("ucp.json") == b"ours"


def test_a_put_that_was_given_up_but_is_there_is_no_failure(store, proxy, direct):
    store.put("x", b"", if_absent=True)
    proxy.rules = [Rule("lose", method="PUT", times=1), Rule("answer", method="PUT")]
    impatient(store).put("ucp.json", b"ours", if_absent=True)
    assert direct.read("ucp.json") == b"ours"


def test_a_lost_answer_to_a_completion_is_settled(store, proxy, direct):
    proxy.rules = [Rule("lose", method="POST", path="uploadId=", times=1)]
    write(store)
    assert direct.read("dir/big") == CONTENT
    with pytest.raises(StoreExistsError):
        write(store)
    assert list(direct.uploads()) == []


def test_a_failed_upload_is_never_visible(store, proxy, direct):
    proxy.rules = [Rule("answer", method="POST", path="uploadId=")]
    with pytest.raises(StoreError, match=r"completing its upload of 2 parts.*SlowDown"):
        write(impatient(store))
    proxy.rules = []
    assert list(direct.list()) == []
    assert list(direct.uploads()) == []


def test_a_server_that_is_not_there_is_told_soon(monkeypatch):
    """A name with a typing error must not cost the deadline of a server that is only busy."""
    from ucp_dcp.storage.object_store import store as module

    monkeypatch.setattr(module, "_FIRST", 0.3)
    nowhere = open_store("s3://bucket/run", deadline=600, **options_for("http://127.0.0.1:9"))
    with pytest.raises(StoreError, match=r"failed \d+ times within 0\.3 s.*127\.0\.0\.1:9"):
        nowhere.size("a")


@pytest.fixture
def native(store):
    """obstore in the place of ``store``."""
    options = {**store.client._options, "client": "obstore", "part_size": 5 * MIB, "deadline": 20}
    return open_store(store.url, **options)


@pytest.mark.parametrize(
    "rule", [Rule("answer", status=503), Rule("answer", status=500), Rule("reset"), Rule("lose")], ids=lambda r: r.action
)
def test_obstore_tries_again(native, proxy, direct, rule):
    proxy.rules = [dataclasses.replace(rule, method=method, times=2) for method in ("PUT", "POST", "GET", "HEAD", "DELETE")]
    write(native)
    native.put("dir/small", b"small", if_absent=True)
    assert read(native) == CONTENT and native.read("dir/small") == b"small" and native.size("dir/small") == 5
    assert sorted(e.path for e in native.list("dir/")) == ["dir/big", "dir/small"]
    native.delete("dir/small")
    assert direct.read("dir/big") == CONTENT
    for action in ("put", "write"):
        with pytest.raises(StoreExistsError):
            native.put("dir/big", b"x", if_absent=True) if action == "put" else write(native)


@pytest.mark.parametrize("rule", [Rule("cut", size=MIB), Rule("truncate", size=MIB)], ids=lambda r: r.action)
def test_obstore_reads_whole_bodies(native, proxy, direct, rule):
    write(direct)
    proxy.rules = [dataclasses.replace(rule, method="GET", times=2)]
    assert read(native) == CONTENT
    assert proxy.rules[0].used == 2


def test_obstore_leaves_no_parts(native, proxy, direct):
    proxy.rules = [Rule("answer", method="PUT", path="partNumber=2", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match="403"):
        write(native)
    assert list(direct.list()) == [] and list(direct.uploads()) == []
