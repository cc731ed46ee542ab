"""The conformance suite against real servers."""

from __future__ import annotations

import uuid

import pytest

from ucp_dcp.storage.fsspec_store import FsspecStore
from ucp_dcp.storage.object_store import ObjectStore
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.store_conformance import StoreConformance


def opened(server, **options):
    return open_store("s3://bucket/x", **server.storage_options, **options)


def fresh(base):
    """An empty place; with the client of ``base``, which takes a while to make."""
    return ObjectStore(base.client, base.protocol, f"bucket/{uuid.uuid4().hex}/a run", base.options)


@pytest.fixture(scope="module")
def seaweed(seaweed_server):
    return opened(seaweed_server, part_size=5 << 20)


@pytest.fixture(scope="module")
def moto(moto_server):
    return opened(moto_server, part_size=5 << 20)


@pytest.fixture(scope="module")
def obstore(seaweed_server):
    return opened(seaweed_server, client="obstore", part_size=5 << 20)


class TestSeaweed(StoreConformance):
    race_turns = 2  # this server takes a second for each
    many_keys = 20  # botocore needs 4 ms of CPU for each request

    def test_more_than_a_page_of_files(self, store, obstore):
        """Made by the cheaper client, and listed by this one."""
        other = ObjectStore(obstore.client, "s3", store.root, store.options)
        wanted = [f"g/{number:04d}" for number in range(1050)]
        other.together(lambda path: other.put(path, b"1"), wanted)
        assert sorted(entry.path for entry in store.list("g/")) == wanted
        other.delete(*wanted)
        assert list(store.list()) == []

    @pytest.fixture
    def store(self, seaweed):
        store = fresh(seaweed)
        yield store
        assert list(store.uploads()) == []


class TestMoto(StoreConformance):
    many_keys = 20  # each of its requests takes 10 ms of CPU

    @pytest.fixture
    def store(self, moto):
        store = fresh(moto)
        yield store
        assert list(store.uploads()) == []


class TestSeaweedThroughObstore(StoreConformance):
    race_turns = 2
    many_keys = 20

    @pytest.fixture
    def store(self, obstore, seaweed):
        store = fresh(obstore)
        yield store
        with_parts = ObjectStore(seaweed.client, "s3", store.root, store.options)
        assert list(with_parts.uploads()) == []


@pytest.mark.slow
class TestSeaweedThroughS3fs(StoreConformance):
    """fsspec's own file system, as ``FsspecStore`` takes it."""

    race_turns = 2

    @pytest.fixture
    def store(self, seaweed_server):
        store = open_store(f"s3://bucket/{uuid.uuid4().hex}/a run", client="s3fs", **seaweed_server.storage_options)
        assert isinstance(store, FsspecStore)
        return store
