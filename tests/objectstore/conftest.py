from __future__ import annotations

import uuid

import pytest

from ucp_dcp.storage.object_store import ObjectStore
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.fault_proxy import FaultProxy
from ucp_dcp.testing.servers import options_for

MIB = 1 << 20


@pytest.fixture(scope="session")
def proxy_of_session(seaweed_server):
    with FaultProxy(seaweed_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxy_of_session):
    """Between the stores of these tests and SeaweedFS; without rules at first."""
    proxy_of_session.rules = []
    proxy_of_session.seen.clear()
    yield proxy_of_session
    proxy_of_session.rules = []


@pytest.fixture(scope="session")
def client_through_proxy(proxy_of_session):
    options = options_for(proxy_of_session.endpoint)
    return open_store("s3://bucket/x", part_size=5 * MIB, deadline=20, **options)


@pytest.fixture
def store(client_through_proxy, proxy):
    """An empty place behind the proxy, with parts of 5 MiB."""
    made = client_through_proxy
    return ObjectStore(made.client, "s3", f"bucket/{uuid.uuid4().hex}", made.options)


@pytest.fixture
def direct(seaweed_server, store):
    """The same place, past the proxy."""
    return open_store(store.url, **seaweed_server.storage_options)
