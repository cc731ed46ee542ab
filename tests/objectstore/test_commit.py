"""The commit protocol on a real object store, where nothing can be renamed."""

from __future__ import annotations

import threading
import uuid

import pytest
from storage.test_commit import open_ours, open_stock, save

from ucp_dcp.errors import CheckpointExistsError, StoreError
from ucp_dcp.storage.commit import METADATA, new_generation, read_manifest
from ucp_dcp.storage.manifest import MANIFEST
from ucp_dcp.storage.object_store import ObjectStore
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.fault_proxy import Rule


def test_save_over_save(store):
    old, new = new_generation(), new_generation()
    save(store, old, overwrite=False)
    assert open_ours(store) == open_stock(store) == old
    with pytest.raises(CheckpointExistsError):
        save(store, overwrite=False)
    save(store, new)
    assert open_ours(store) == open_stock(store) == new
    assert {entry.path.partition("/")[0] for entry in store.list()} == {MANIFEST, METADATA, new}


def test_the_manifest_is_one_small_conditional_put(store, proxy):
    save(store, overwrite=False)
    (put,) = [seen for seen in proxy.seen if seen.method == "PUT" and seen.path.endswith(f"/{MANIFEST}")]
    assert put.status == 200 and put.sent < 64 << 10
    assert not [seen for seen in proxy.seen if "copy" in seen.path or seen.method == "POST"]


@pytest.mark.parametrize("turn", range(3))
def test_of_two_racing_jobs_one_wins_whole(seaweed_server, store, turn):
    """Each in a store of its own, as two jobs are; they meet right before the manifest."""
    gate = threading.Barrier(2, timeout=60)
    committed, refused, errors = [], [], []

    class Meeting(ObjectStore):
        def put(self, path, data, *, if_absent=False):
            if path == MANIFEST:
                gate.wait()
            super().put(path, data, if_absent=if_absent)

    def job():
        own = Meeting(store.client, "s3", store.root, store.options)
        try:
            committed.append(save(own, overwrite=False).generation)
        except CheckpointExistsError as error:
            refused.append(error)
        except BaseException as error:
            errors.append(error)

    jobs = [threading.Thread(target=job) for _ in range(2)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert errors == [] and len(committed) == len(refused) == 1
    assert open_ours(store) == open_stock(store) == committed[0]


@pytest.mark.parametrize("overwrite", [True, False])
def test_the_answer_to_the_commit_is_lost(store, proxy, overwrite):
    if overwrite:
        save(store)
    proxy.rules = [Rule("lose", method="PUT", path=rf"/{MANIFEST}$", times=2)]
    committed = save(store, overwrite=overwrite)
    assert proxy.rules[0].used == 2
    assert open_ours(store) == open_stock(store) == committed.generation


def test_a_commit_that_fails_leaves_the_old_one(store, proxy):
    old = save(store).generation
    proxy.rules = [Rule("answer", method="PUT", path=rf"/{MANIFEST}$", status=403, code="AccessDenied")]
    with pytest.raises(StoreError, match=r"ucp\.json.*AccessDenied"):
        save(store)
    assert open_ours(store) == open_stock(store) == old


def test_metadata_replaced_while_it_is_looked_at(store):
    """The ends of .metadata are read by their ranges: when it is replaced in between, once more, and not as damage."""
    save(store)
    reader = ObjectStore(store.client, "s3", store.root, store.options)
    size, turns = reader.size, []

    def replaced(path):
        found = size(path)
        if path == METADATA and not turns:
            turns.append(1)
            save(store)
        return found

    reader.size = replaced
    assert open_ours(reader) == read_manifest(store).generation
    assert turns


def test_readers_do_not_list(seaweed_server, store, proxy):
    """Listings may be behind."""
    save(store)
    proxy.seen.clear()
    reader = ObjectStore(store.client, "s3", f"bucket/{store.root.partition('/')[2]}", store.options)
    open_ours(reader)
    assert proxy.seen and not [seen for seen in proxy.seen if "list-type" in seen.path]


def test_a_trailing_slash_is_the_same_place(seaweed_server):
    place = f"bucket/{uuid.uuid4().hex}"
    save(open_store(f"s3://{place}/", **seaweed_server.storage_options))
    assert open_ours(open_store(f"s3://{place}", **seaweed_server.storage_options))
