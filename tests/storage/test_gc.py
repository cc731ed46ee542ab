"""What killed jobs left: found, deleted when it is old, left alone where anybody may need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ucp_dcp
from ucp_dcp.cli.app import app
from ucp_dcp.cli.options import parse_options
from ucp_dcp.errors import StoreError
from ucp_dcp.storage import commit
from ucp_dcp.storage.commit import METADATA, read_manifest
from ucp_dcp.storage.manifest import MANIFEST
from ucp_dcp.storage.store import Store, open_store

DEAD = "g-" + "0" * 32
TEMPORARY = ".ucp.json.0123456789abcdef.tmp"


def save(store: Store, value: float = 1.0, **kwargs: Any) -> str:
    ucp_dcp.save({"w": torch.full((5,), value)}, store, no_dist=True, **kwargs)
    manifest = read_manifest(store)
    assert manifest is not None
    return manifest.generation


def load(store: Store) -> float:
    return float(ucp_dcp.open_checkpoint(store)["w"][0])


def paths(store: Store) -> set[str]:
    return {entry.path for entry in store.list()}


def kinds(report: ucp_dcp.GcReport) -> set[tuple[str, str, bool]]:
    return {(item.kind, item.path, not item.kept) for item in report.found}


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield open_store(tmp_path / "run", sync=False)
    elif request.param == "memory":
        yield open_store(f"memory://gc-{uuid.uuid4().hex}")
    else:
        server = request.getfixturevalue("seaweed_server")
        yield open_store(f"s3://bucket/gc {uuid.uuid4().hex}/run", **server.storage_options)


def test_all_kinds(store: Store) -> None:
    for child in ("", "step-1/"):
        store.put(f"{child}{DEAD}/__0_0.distcp", b"unfin")
        store.put(f"{child}{DEAD}/7f/__1_0.distcp", b"ished")  # keys of many ranks are spread over folders
        store.put(child + TEMPORARY, b"half")
    store.put("notes.txt", b"not ours")
    store.put("g-1/file", b"not ours")
    generation = save(store, overwrite=True)
    kept = {generation, "notes.txt", "g-1"}

    assert kinds(ucp_dcp.gc(store)) == {
        (kind, child + path, False) for child in ("", "step-1/") for kind, path in (("unfinished", DEAD), ("temporary", TEMPORARY))
    }
    before = paths(store)
    dry = ucp_dcp.gc(store, older_than=0)
    assert len(dry.goes) == 4 and not dry.deleted and dry.bytes == 2 * len(b"unfinished") + 2 * len(b"half")
    assert paths(store) == before

    done = ucp_dcp.gc(store, older_than=0, delete=True)
    assert kinds(done) == kinds(dry) and done.deleted
    assert {path.partition("/")[0] for path in paths(store)} == kept | {MANIFEST, METADATA}
    assert load(store) == 1.0
    assert ucp_dcp.gc(store, older_than=0).found == []


def test_a_replaced_generation_waits_for_its_readers(store: Store) -> None:
    old = save(store, 1.0)
    reader = ucp_dcp.open_checkpoint(store)
    save(store, 2.0)
    report = ucp_dcp.gc(store, older_than=0, delete=True)
    assert kinds(report) == {("replaced", old, False)} and "readers" in report.found[0].kept
    assert float(reader["w"][1]) == 1.0
    # a user who waits longer than the writer's grace waits so long
    assert ucp_dcp.gc(store, grace=0, delete=True).goes == []
    assert kinds(ucp_dcp.gc(store, older_than=0, grace=0, delete=True)) == {("replaced", old, True)}
    assert not any(path.startswith(old) for path in paths(store))
    assert load(store) == 2.0
    save(store, 3.0, grace=0)  # the manifest that is replaced names what is gone
    assert load(store) == 3.0


def test_metadata_is_repaired(store: Store) -> None:
    """A crash between the manifest and the root .metadata (D3)."""
    save(store, 1.0)
    old = store.read(METADATA)
    save(store, 2.0)
    new = store.read(METADATA)
    store.put(METADATA, old)
    assert kinds(ucp_dcp.gc(store)) == {("metadata", METADATA, True)} | {("replaced", g, False) for g in replaced(store)}
    assert store.read(METADATA) == old
    ucp_dcp.gc(store, delete=True)
    assert store.read(METADATA) == new
    store.delete(METADATA)
    ucp_dcp.gc(store, delete=True)
    assert store.read(METADATA) == new


def replaced(store: Store) -> list[str]:
    manifest = read_manifest(store)
    assert manifest is not None
    return [name for name, _ in manifest.superseded]


def test_nothing_goes_where_it_is_unclear(store: Store) -> None:
    store.put(f"{DEAD}/__0_0.distcp", b"x")
    store.put(METADATA, b"somebody else's")
    for manifest in (None, b"{damaged"):
        if manifest is not None:
            store.put(MANIFEST, manifest)
        report = ucp_dcp.gc(store, older_than=0, delete=True)
        assert kinds(report) == {("unfinished", DEAD, False)}
        assert f"{DEAD}/__0_0.distcp" in paths(store)
    store.delete(MANIFEST, METADATA)
    save(store)
    store.put(METADATA, b"somebody else's")
    report = ucp_dcp.gc(store, older_than=0, delete=True)
    assert kinds(report) == {("unfinished", DEAD, False)} and "somebody" in report.found[0].kept
    assert store.read(METADATA) == b"somebody else's" and f"{DEAD}/__0_0.distcp" in paths(store)


class Late:
    """A store where something happens right after the files were listed for the first time."""

    def __init__(self, inner: Store, event: Any) -> None:
        self._inner, self._event = inner, event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str = "") -> Any:
        found = list(self._inner.list(prefix))
        event, self._event = self._event, None
        if event is not None:
            event()
        return iter(found)


def test_a_commit_meanwhile(tmp_path: Path) -> None:
    """A generation that is committed between the listing and the deletion stays."""
    store = open_store(tmp_path, sync=False)
    save(store)
    committed = store.read(MANIFEST)
    store.delete(MANIFEST)
    late = Late(store, lambda: store.put(MANIFEST, committed))
    assert ucp_dcp.gc(late, older_than=0, delete=True).goes == []
    assert load(store) == 1.0


def test_a_save_that_writes_meanwhile(tmp_path: Path) -> None:
    store = open_store(tmp_path, sync=False)
    store.put(f"{DEAD}/__0_0.distcp", b"x")
    late = Late(store, lambda: store.put(f"{DEAD}/__1_0.distcp", b"x"))
    (found,) = ucp_dcp.gc(late, older_than=0, delete=True).found
    assert "changed while" in found.kept
    assert len(paths(store)) == 2


def test_repair_yields_to_a_later_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading the manifest and putting its .metadata, another save is committed: its .metadata stays in the end."""
    store = open_store(tmp_path, sync=False)
    save(store, 1.0)
    first = read_manifest(store)
    assert first is not None
    store.delete(METADATA)
    put = type(store).put

    def committed_before(self: Any, path: str, data: Any, **kwargs: Any) -> None:
        if path == METADATA:
            monkeypatch.setattr(type(store), "put", put)
            ucp_dcp.save({"other": torch.zeros(7)}, store, no_dist=True)
        put(self, path, data, **kwargs)

    monkeypatch.setattr(type(store), "put", committed_before)
    assert commit.repair(store, first) == "repaired"
    assert list(ucp_dcp.open_checkpoint(store)) == ["other"]
    assert commit.root_state(store, read_manifest(store)) == "consistent"


def begin(client: Any, key: str) -> None:
    upload = client.create_multipart_upload(Bucket="bucket", Key=key)
    client.upload_part(Bucket="bucket", Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=bytes(5 << 20))


def test_orphaned_uploads(seaweed_server: Any) -> None:
    name = f"gc-{uuid.uuid4().hex}"
    url = f"s3://bucket/{name}/run"
    options = seaweed_server.storage_options
    store = open_store(url, **options)
    client = seaweed_server.client()
    generation = save(store)
    ours = [f"{DEAD}/0a/__0_0.distcp", f"{generation}/__3_0.distcp", f"step-2/{DEAD}/__0_0.distcp"]
    theirs = "dataset/shard.tar"
    for path in (*ours, theirs):
        begin(client, f"{name}/run/{path}")
    begin(client, f"{name}/running/{DEAD}/__0_0.distcp")  # a neighbour, whose name begins the same
    store.put(f"{DEAD}/__1_0.distcp", b"of the same save")

    assert not [item for item in ucp_dcp.gc(url, storage_options=options, delete=True).found if not item.kept]
    assert len(list(store.uploads())) == 4
    # client="obstore" cannot list uploads; gc takes the other client
    report = ucp_dcp.gc(url, storage_options={**options, "client": "obstore"}, older_than=0, delete=True)
    assert kinds(report) == {*(("upload", path, True) for path in ours), ("upload", theirs, False), ("unfinished", DEAD, True)}
    assert [upload.key for upload in store.uploads()] == [f"{name}/run/{theirs}"]
    beside = open_store(f"s3://bucket/{name}/running", **options)
    assert len(list(beside.uploads())) == 1
    assert load(store) == 1.0


def test_an_upload_keeps_its_generation_alive(seaweed_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a save may be old while its last one is still being uploaded, and the other way round."""
    name = f"gc-{uuid.uuid4().hex}"
    store = open_store(f"s3://bucket/{name}", **seaweed_server.storage_options)
    old, older = time.time() - 7200, time.time() - 10800
    for generation, file, upload in ((DEAD, old, time.time()), ("g-" + "1" * 32, time.time(), old), ("g-" + "2" * 32, old, older)):
        store.put(f"{generation}/__0_0.distcp", b"x")
        begin(seaweed_server.client(), f"{name}/{generation}/__1_0.distcp")
        shift(monkeypatch, generation, file, upload)
    report = ucp_dcp.gc(store, older_than=3600)
    assert {item.path.partition("/")[0] for item in report.goes} == {"g-" + "2" * 32}
    assert len(report.found) == 6 and len(report.goes) == 2


def shift(monkeypatch: pytest.MonkeyPatch, generation: str, file: float, upload: float) -> None:
    import dataclasses

    from ucp_dcp.storage.object_store import ObjectStore

    listed, begun = ObjectStore.list, ObjectStore.uploads
    monkeypatch.setattr(
        ObjectStore,
        "list",
        lambda self, prefix="": (dataclasses.replace(e, mtime=file) if generation in e.path else e for e in listed(self, prefix)),
    )
    monkeypatch.setattr(
        ObjectStore, "uploads", lambda self: (dataclasses.replace(u, started=upload) if generation in u.key else u for u in begun(self))
    )


def ucp(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_command(tmp_path: Path) -> None:
    store = open_store(tmp_path, sync=False)
    save(store)
    store.put(f"{DEAD}/__0_0.distcp", b"unfinished")
    assert f"keep  unfinished  {DEAD}" in ucp("gc", tmp_path).stdout and "nothing to delete" in ucp("gc", tmp_path).stdout
    day = time.time() - 86400 - 60
    os.utime(tmp_path / DEAD / "__0_0.distcp", (day, day))
    shown = ucp("gc", tmp_path).stdout
    assert f"delete  unfinished  {DEAD}, 1 files, 10 B, 24 h old" in shown and "say --delete" in shown
    assert "nothing to delete" in ucp("gc", tmp_path, "--older-than", "2d").stdout
    found = json.loads(ucp("gc", tmp_path, "--json").stdout)
    assert found["deleted"] is False and found["found"][0]["bytes"] == 10
    assert f"deleted  unfinished  {DEAD}" in ucp("gc", tmp_path, "--delete").stdout
    assert not (tmp_path / DEAD).exists() and load(store) == 1.0
    assert ucp("gc", tmp_path, "--older-than", "soon").exit_code == 2


def test_storage_options_of_a_command_line() -> None:
    given = ["endpoint_url=http://h:1?a=b", "secret=123", "anon=true", "part_size=16777216", "client_kwargs.region_name=1", "x.y.z=2.5",
             'token=true', 'list=["a"]', "quoted=\"true\"", "date=2024-01-01"]  # fmt: skip
    assert parse_options(given) == {
        "endpoint_url": "http://h:1?a=b", "secret": "123", "anon": True, "part_size": 16777216, "client_kwargs": {"region_name": "1"},
        "x": {"y": {"z": 2.5}}, "token": "true", "list": ["a"], "quoted": "true", "date": "2024-01-01",
    }  # fmt: skip
    assert parse_options(None) == {}
    import typer

    for wrong in (["secret"], ["=1"], ["a..b=1"], ["a=1", "a=2"], ["a=1", "a.b=2"]):
        with pytest.raises(typer.BadParameter) as raised:
            parse_options(wrong)
        assert "secret=" not in str(raised.value)


def test_every_command_on_s3(seaweed_server: Any, tmp_path: Path) -> None:
    """By options, and by the environment (fsspec's and the SDK's)."""
    url = f"s3://bucket/cli-{uuid.uuid4().hex}"
    options = seaweed_server.storage_options
    state = {"model": {"layer.weight": torch.arange(6.0).reshape(2, 3)}}
    ucp_dcp.save(state, url, storage_options=options, roots={"model": "model"}, no_dist=True)
    given = [
        f"key={options['key']}",
        f"secret={options['secret']}",
        f"endpoint_url={options['endpoint_url']}",
        "client_kwargs.region_name=us-east-1",
    ]
    flags = [word for text in given for word in ("--storage-option", text)]
    assert "layer.weight" in ucp("show", url, "--tensors", *flags).stdout
    assert ucp("verify", url, *flags).exit_code == 0
    targets = [word for text in given for word in ("--target-option", text)]
    assert ucp("export", url, f"{url}-hf", *flags, *targets).exit_code == 0
    assert torch.equal(ucp_dcp.open_checkpoint(f"{url}-hf", storage_options=options)["layer.weight"].read(), state["model"]["layer.weight"])
    assert ucp("gc", url, *flags).stdout == "nothing to delete\n"
    wrong = ucp("show", url, *(flag.replace(options["secret"], "wrong-secret") for flag in flags))
    assert wrong.exit_code == 1 and "error: " in wrong.stderr and "wrong-secret" not in wrong.stderr

    environment = {**os.environ, "AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    environment |= {"AWS_DEFAULT_REGION": "us-east-1", "FSSPEC_S3_ENDPOINT_URL": options["endpoint_url"]}
    command = [sys.executable, "-c", "from ucp_dcp.cli import main; main()", "show", url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "tensors" in done.stdout, done.stderr


def test_a_store_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, sync=False)
    save(store)
    monkeypatch.setattr(type(store), "read", lambda *a, **k: (_ for _ in ()).throw(StoreError("gone away")))
    with pytest.raises(StoreError, match="gone away"):
        ucp_dcp.gc(store, delete=True)
