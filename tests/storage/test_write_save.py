"""What a save through UCPStorageWriter leaves on the disk: digests, their sidecars, and items of somebody else's planner."""

from __future__ import annotations

import os
import pickle
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ucp_dcp
from ucp_dcp.errors import PlanError, StoreError, StoreExistsError
from ucp_dcp.formats import open_source
from ucp_dcp.storage import dcp_writer, sized_file, write_file
from ucp_dcp.storage.blocks import BLOCK, BlockHasher, read_digests
from ucp_dcp.storage.file_layout import plan_file, split_items
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.staging import TensorPayloads


def state():
    torch.manual_seed(1)
    return {"a": torch.randn(700, 1000), "t": torch.randn(300, 500).T, "step": 7, "small": {str(i): torch.randn(5) for i in range(50)}}


def check_digests(folder):
    store = LocalStore(folder)
    rows = open_source(store).catalog.files
    assert rows
    for row in rows:
        hasher = BlockHasher()
        hasher.update(store.read(row.path))
        assert row.blocks is not None and row.blocks.size == BLOCK
        assert read_digests(store, row).tolist() == hasher.digests().tolist()
        assert store.size(row.path) == row.size


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("planner", [ucp_dcp.UCPSavePlanner, DefaultSavePlanner])
def test_every_data_file_has_digests(tmp_path, stock, planner):
    dcp.save(state(), storage_writer=ucp_dcp.UCPStorageWriter(tmp_path, stock_metadata=stock), planner=planner(), no_dist=True)
    check_digests(tmp_path)


@pytest.mark.parametrize("planner", [ucp_dcp.UCPSavePlanner, DefaultSavePlanner])
def test_digests_can_be_left_out(tmp_path, planner):
    dcp.save(state(), storage_writer=ucp_dcp.UCPStorageWriter(tmp_path, digests=False), planner=planner(), no_dist=True)
    assert all(row.blocks is None for row in open_source(str(tmp_path)).catalog.files)
    assert not list(tmp_path.rglob("*.blocks"))
    back = {"a": torch.zeros(700, 1000)}
    ucp_dcp.load(back, tmp_path, no_dist=True)
    assert torch.equal(back["a"], state()["a"])


def test_save_without_digests(tmp_path):
    ucp_dcp.save(state(), tmp_path / "without", no_dist=True, digests=False)
    ucp_dcp.save(state(), tmp_path / "with", no_dist=True)
    assert len(list(tmp_path.glob("with/**/*.blocks"))) == 1 and not list(tmp_path.glob("without/**/*.blocks"))


def test_the_writer_pickles_with_its_options(tmp_path):
    writer = pickle.loads(pickle.dumps(ucp_dcp.UCPStorageWriter(tmp_path, digests=False, grace=3, storage_options={"threads": 3})))
    assert (writer.digests, writer.grace, writer._store.threads) == (False, 3, 3)


def test_the_bytes_do_not_depend_on_threads(tmp_path):
    files = []
    for threads in (1, 4):
        folder = tmp_path / str(threads)
        ucp_dcp.save(state(), folder, no_dist=True, storage_options={"threads": threads})
        files.append([p.read_bytes() for p in sorted(folder.rglob("*.distcp*"))])
    assert files[0] == files[1]


class Halving(DefaultSavePlanner):
    """Converts when asked for the data, as torch's documentation shows."""

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) else data


def test_a_planner_that_converts(tmp_path):
    """The catalog must say what the bytes are, not what was planned."""
    saved = {"a": torch.randn(40, 50), "b": torch.arange(5.0)}
    dcp.save(saved, storage_writer=ucp_dcp.UCPStorageWriter(tmp_path), planner=Halving(), no_dist=True)
    check_digests(tmp_path)
    expected = {k: v.bfloat16().float() for k, v in saved.items()}
    ours = {k: torch.zeros_like(v) for k, v in saved.items()}
    ucp_dcp.load(ours, tmp_path, no_dist=True)
    stock = {k: torch.zeros_like(v) for k, v in saved.items()}
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    for key, value in expected.items():
        assert torch.equal(stock[key], value)
        assert torch.equal(ours[key], value)


class Reshaping(DefaultSavePlanner):
    def resolve_data(self, write_item):
        return super().resolve_data(write_item)[:1]


def test_a_planner_that_gives_another_shape(tmp_path):
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"a": torch.zeros(4, 5)}, storage_writer=ucp_dcp.UCPStorageWriter(tmp_path), planner=Reshaping(), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, PlanError)
    assert "'a'" in str(error) and "(1, 5)" in str(error) and "(4, 5)" in str(error)
    assert not (tmp_path / "ucp.json").exists()


def test_a_thread_error_reaches_the_caller_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    old = state()
    ucp_dcp.save(old, tmp_path, no_dist=True)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))

    def full(fd, buffers, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sized_file.os, "pwritev", full)
        with pytest.raises(StoreError, match=r"rank 0: g-.*__0_0\.distcp: writing .* at byte \d+ failed: No space left on device"):
            ucp_dcp.save({"a": torch.zeros(20_000_000)}, tmp_path, no_dist=True, storage_options={"threads": 3})
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    back = {"a": torch.zeros(700, 1000)}
    ucp_dcp.load(back, tmp_path, no_dist=True)
    assert torch.equal(back["a"], old["a"])


def test_a_state_of_256_mib_needs_no_copy_of_itself(isolated_python):
    """The peak of the process grows by less than the stated bound, with everything strided, where each byte must be staged."""
    code = """
        import resource, tempfile, torch, ucp_dcp
        state = {f"w{i}": torch.ones(2048, 4096).T for i in range(8)}
        ucp_dcp.save({"x": torch.ones(4000, 400).T}, tempfile.mkdtemp(), no_dist=True, storage_options={"sync": False})
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            ucp_dcp.save(state, folder, no_dist=True, storage_options={"sync": False, "threads": 2}, check_replicas="off")
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    assert int(isolated_python(code, forbid=())) <= 2 * 17 + 16


# -- several files per rank -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(dcp_writer, "_FILE", 64 << 10)


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("planner", [ucp_dcp.UCPSavePlanner, DefaultSavePlanner])
def test_several_files_per_rank(tmp_path, stock, planner, small_files):
    """Every one of them has its digests, and both readers find every item in its file."""
    saved = state() | {"last": torch.arange(10_000), "empty": torch.zeros(0, 3), "words": ["a", "b"]}
    writer = ucp_dcp.UCPStorageWriter(tmp_path, stock_metadata=stock, storage_options={"files": 3})
    dcp.save(saved, storage_writer=writer, planner=planner(), no_dist=True)
    names = sorted(p.name for p in tmp_path.rglob("*.distcp"))
    assert names == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"] or names == ["__0_0.distcp", "__0_1.distcp"]
    check_digests(tmp_path)
    loads = [
        lambda s: ucp_dcp.load(s, tmp_path, no_dist=True, verify="strict"),
        lambda s: dcp.load(s, checkpoint_id=tmp_path, no_dist=True),
    ]
    for load in loads[: 1 + stock]:
        back = {"a": torch.zeros(700, 1000), "t": torch.zeros(500, 300), "last": torch.zeros(10_000, dtype=torch.int64), "step": 0}
        back |= {"small": {str(i): torch.zeros(5) for i in range(50)}, "words": []}
        load(back)
        assert all(torch.equal(back[k], saved[k]) for k in ("a", "t", "last"))
        assert all(torch.equal(back["small"][k], v) for k, v in saved["small"].items())
        assert (back["step"], back["words"]) == (7, ["a", "b"])
    assert ucp_dcp.verify(tmp_path).ok


def test_tied_weights_and_objects_over_several_files(tmp_path, small_files):
    head = torch.randn(300, 200)
    model = {"emb": head, "mid": torch.randn(400, 100), "head": head, "z": torch.randn(100, 500)}
    ucp_dcp.save({"model": model, "epoch": 3}, tmp_path, roots={"model": "model"}, no_dist=True, storage_options={"files": 4})
    assert len(list(tmp_path.rglob("*.distcp"))) > 1
    for stock in (False, True):
        back = {"model": {k: torch.zeros_like(v) for k, v in model.items()}, "epoch": 0}
        if stock:
            dcp.load(back, checkpoint_id=tmp_path, no_dist=True)
        else:
            ucp_dcp.load(back, tmp_path, no_dist=True)
        assert back["epoch"] == 3 and all(torch.equal(back["model"][k], v) for k, v in model.items())


def test_one_of_several_files_fails(tmp_path, monkeypatch, small_files):
    """The others end, their files go, and the cause is named, not that the others were ended."""
    monkeypatch.setattr(write_file, "SLICE", 1 << 20)
    real, lock, calls = os.pwritev, threading.Lock(), []

    def failing(fd, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]
        with lock:
            calls.append(name)
        if name == "__0_1.distcp" and offset:
            raise OSError(5, "Input/output error")
        time.sleep(0.002)
        return real(fd, buffers, offset)

    old = {"a": torch.ones(3)}
    ucp_dcp.save(old, tmp_path, no_dist=True)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(sized_file.os, "pwritev", failing)
        with pytest.raises(StoreError, match=r"__0_1\.distcp: writing .* at byte \d+ failed: Input/output error"):
            tensors = {str(i): torch.zeros(3 << 20) for i in range(3)}
            ucp_dcp.save(tensors, tmp_path, no_dist=True, storage_options={"files": 3, "threads": 3})
    assert len(set(calls)) == 3 and len(calls) < 15
    assert sorted(tmp_path.rglob("*")) == before
    ucp_dcp.load(old, tmp_path, no_dist=True)


def test_files_that_were_complete_go_too(tmp_path):
    """They belong to no checkpoint, and a file of somebody else that was in the way stays."""
    store = LocalStore(tmp_path)
    store.put("taken", b"x")
    jobs = []
    for path, tensor in (("first", torch.zeros(10)), ("taken", torch.zeros(20))):
        payloads = TensorPayloads([tensor], [], [path])
        jobs.append(write_file.FileJob(path, plan_file(payloads.items, [], framed=True), payloads))
    with pytest.raises(StoreExistsError, match="taken"):
        write_file.write_files(store, jobs)
    assert os.listdir(tmp_path) == ["taken"] and store.read("taken") == b"x"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs of Linux")
def test_how_many_files(tmp_path):
    assert LocalStore("/dev/shm/no/such/folder", threads=3).parallel_files == 3
    assert LocalStore("/proc/self", threads=3).parallel_files == 1
    assert LocalStore(tmp_path, threads=3, files=2).parallel_files == 2


@pytest.mark.parametrize(
    ("sizes", "files", "edges"),
    [
        ([], 3, [0]),
        ([5], 3, [0, 1]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1], 3, [0, 1, 2, 4]),
        ([100, 1, 1], 2, [0, 1, 3]),
        ([1, 1, 100], 2, [0, 2, 3]),
        ([0, 0, 0], 2, [0, 3]),
        ([8] * 7 + [0], 1, [0, 8]),
    ],
)
def test_items_are_cut_into_files(sizes, files, edges):
    assert split_items(sizes, files) == edges
