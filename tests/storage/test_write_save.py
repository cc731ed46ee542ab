"""What a save through UCPStorageWriter leaves on the disk: digests, their sidecars, and items of somebody else's planner."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ucp_dcp
from ucp_dcp.errors import PlanError, StoreError
from ucp_dcp.formats import open_source
from ucp_dcp.storage import sized_file
from ucp_dcp.storage.blocks import BLOCK, BlockHasher, read_digests
from ucp_dcp.storage.local import LocalStore


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
