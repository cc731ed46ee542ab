"""Public bug reports about local storage and commit. One process unless ranks matter; ``test_d05_...`` is case D05.

D02, D04: every crash of a save is in tests/storage/test_crash.py; here a rank is really killed. D15, D16: also tests/security and
tests/attacks. D19: what a cached plan depends on is in tests/planners/test_plan_cache.py.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import Groups, fresh_meshes
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Shard
from typer.testing import CliRunner

import ucp_dcp
from ucp_dcp import PerRank, UCPSavePlanner, UCPStorageWriter
from ucp_dcp.cli.app import app
from ucp_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, StoreError, UCPError, UnsafePickleError
from ucp_dcp.storage.local import LocalStore


def values(base: int, n: int = 8) -> dict[str, torch.Tensor]:
    return {f"v{i}": torch.full((3,), float(base + i)) for i in range(n)}


def loaded(url: Any, n: int = 8) -> list[float]:
    state = values(-50, n)
    ucp_dcp.load(state, url)
    return [float(state[f"v{i}"][0]) for i in range(n)]


def save_own(rank: int, world: int, url: str, base: int) -> None:
    ucp_dcp.save({k: v for i, (k, v) in enumerate(values(base).items()) if i % world == rank}, url, grace=0)


def load_all(rank: int, world: int, url: str) -> list[float]:
    return loaded(url)


def test_d01_fewer_ranks_into_a_used_folder(ranks: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ranks.run(4, save_own, url, 0)
    ranks.run(2, save_own, url, 100)
    for n in (1, 4):
        assert ranks.run(n, load_all, url) == [[100.0 + i for i in range(8)]] * n
    named = {row.path for row in ucp_dcp.open_checkpoint(url).files}
    found = {p.relative_to(url).as_posix() for p in Path(url).rglob("*.distcp")}
    assert found == named and len(found) == 2


class _Killed(UCPStorageWriter):
    """Rank 1 is killed before it writes."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        return super().write_data(plan, planner)


def save_killed(rank: int, world: int, url: str) -> None:
    state = {k: v for i, (k, v) in enumerate(values(100).items()) if i % world == rank}
    dcp.save(state, storage_writer=_Killed(url), planner=UCPSavePlanner())


def test_d02_a_rank_is_killed_while_it_overwrites(ranks: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ranks.run(2, save_own, url, 0)
    with pytest.raises(Exception, match="rank 1"):
        ranks.run(2, save_killed, url, timeout=60)
    assert loaded(url) == [float(i) for i in range(8)]
    ranks.run(2, save_own, url, 200)
    assert loaded(url) == [200.0 + i for i in range(8)]


def test_d04_the_coordinator_dies_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ucp_dcp.save(values(1), tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(UCPStorageWriter, "finish", lambda self, metadata, results: os._exit(9))
        pid = os.fork()
        if pid == 0:
            try:
                ucp_dcp.save(values(9), tmp_path / "c")
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert loaded(tmp_path / "c") == [1.0 + i for i in range(8)]
    assert len(list((tmp_path / "c").glob("g-*"))) == 2  # the unfinished one may be another job's: collected a day later


def test_d05_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        ucp_dcp.save(values(step), tmp_path / f"step-{step}")
    dcp.save(values(7), checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert ucp_dcp.latest(tmp_path) == f"{tmp_path}/step-7"
    (tmp_path / "step-7/.metadata").write_bytes(b"")
    (tmp_path / "step-2/ucp.json").unlink()
    (tmp_path / "step-2/.metadata").unlink()
    (tmp_path / "step-3/ucp.json").rename(tmp_path / "step-3/.ucp.json.0123456789abcdef.tmp")
    (tmp_path / "step-3/.metadata").unlink()
    (tmp_path / "step-4/ucp.json").write_bytes(b"")
    next((tmp_path / "step-5").rglob("*.distcp")).unlink()
    data = next((tmp_path / "step-6").rglob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert ucp_dcp.latest(tmp_path) == f"{tmp_path}/step-1"
    for step in (2, 3):
        with pytest.raises(CheckpointNotFoundError, match="unfinished save"):
            ucp_dcp.open_checkpoint(tmp_path / f"step-{step}")
    for step in (4, 7):
        with pytest.raises(UCPError, match=r"ucp\.json|\.metadata"):
            ucp_dcp.open_checkpoint(tmp_path / f"step-{step}")
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        ucp_dcp.latest(tmp_path)


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("damage", ["half", "16 bytes", "empty", "gone"])
def test_d07_a_data_file_is_damaged(tmp_path: Path, damage: str, kind: str) -> None:
    if kind == "ours":
        ucp_dcp.save(values(1), tmp_path)
    else:
        dcp.save(values(1), checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.rglob("*.distcp")
    size = file.stat().st_size
    left = {"half": size // 2, "16 bytes": size - 16, "empty": 0, "gone": None}[damage]
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left)
    state = values(-5)
    with pytest.raises((CorruptCheckpointError, StoreError)) as raised:
        ucp_dcp.load(state, tmp_path)
        ucp_dcp.open_checkpoint(tmp_path)["v0"].read()
        assert damage == "16 bytes" and kind == "ours"  # only framing is cut: no tensor byte is missing
        raise CorruptCheckpointError(f"{file.name} {left}")
    assert file.name in str(raised.value) and (left is None or str(left) in str(raised.value))


class _Slow(UCPStorageWriter):
    fails = False

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(0.5)
        if self.fails:
            raise OSError("the disk is gone")
        return super().write_data(plan, planner)


def test_d08_d09_the_newest_is_what_was_committed(tmp_path: Path) -> None:
    """There is no pointer beside the data: during a slow save, and after one that fails, the old step is the newest."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        live = {"step": 4, "w": torch.ones(3)}
        ucp_dcp.save(live, tmp_path / "step-4")
        live["step"] = 5
        future = dcp.async_save(live, storage_writer=_Slow(tmp_path / "step-5"), planner=UCPSavePlanner())
        live["step"] = 7
        assert ucp_dcp.latest(tmp_path).endswith("step-4")
        future.result(timeout=60)
        newest = ucp_dcp.latest(tmp_path)
        assert newest.endswith("step-5") and ucp_dcp.open_checkpoint(newest).objects["step"] == 5
        writer = _Slow(tmp_path / "step-6")
        writer.fails = True
        with pytest.raises(BaseException, match="the disk is gone"):
            dcp.async_save(live, storage_writer=writer, planner=UCPSavePlanner()).result(timeout=60)
        assert ucp_dcp.latest(tmp_path).endswith("step-5")
        again = _Slow(tmp_path / "step-5")  # over the old one: it stays, and stays whole
        again.fails = True
        with pytest.raises(BaseException, match="the disk is gone"):
            dcp.async_save(live, storage_writer=again, planner=UCPSavePlanner()).result(timeout=60)
        assert ucp_dcp.open_checkpoint(newest).objects["step"] == 5 and ucp_dcp.verify(newest).ok
    finally:
        dist.destroy_process_group()


def blind(rank: int, world: int, url: str) -> float:
    """Rank 1 does not see the manifest that is there."""
    if rank == 1:
        size = LocalStore.size

        def missing(self: LocalStore, path: str) -> int:
            if path.endswith("ucp.json"):
                raise ucp_dcp.errors.StoreNotFoundError(f"{path} does not exist")
            return size(self, path)

        LocalStore.size = missing  # type: ignore[method-assign]
    try:
        begin = time.monotonic()
        try:
            ucp_dcp.save({"w": torch.ones(2)}, url, overwrite=False)
        except UCPError as error:
            assert "overwrite" in str(error)
            return time.monotonic() - begin
        raise AssertionError("the save was not refused")
    finally:
        if rank == 1:
            LocalStore.size = size  # type: ignore[method-assign]


def test_d10_one_rank_decides_what_exists(ranks: Any, tmp_path: Path) -> None:
    ucp_dcp.save({"w": torch.zeros(2)}, tmp_path)
    assert max(ranks.run(2, blind, str(tmp_path))) < 30


def save_apart(rank: int, world: int, url: str) -> str:
    try:
        ucp_dcp.save({f"w{rank}": torch.ones(2)}, f"{url}/{rank}")
    except UCPError as error:
        return str(error)
    return "saved"


def test_d11_folders_that_are_not_shared(ranks: Any, tmp_path: Path) -> None:
    for text in ranks.run(2, save_apart, str(tmp_path)):
        assert "rank 1" in text and "shared" in text
    assert not list(tmp_path.rglob("ucp.json"))


def load_apart(rank: int, world: int, url: str) -> str:
    try:
        ucp_dcp.load({"w": torch.zeros(2), "v": torch.zeros(2)}, f"{url}/{rank}")
    except UCPError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_d11_loading_from_folders_that_are_not_shared(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Rank 0's folder is whole; rank 1's holds what one rank of a stock save leaves on its own disk."""
    state = {"w": torch.ones(2), "v": torch.ones(2)}
    if kind == "ours":
        ucp_dcp.save(state, tmp_path / "0")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "0", no_dist=True)
    (tmp_path / "1").mkdir()
    for text in ranks.run(2, load_apart, str(tmp_path)):
        assert "rank 1" in text and str(tmp_path / "1") in text and "nothing here" in text
    if kind == "stock":
        shutil.copy(tmp_path / "0/.metadata", tmp_path / "1")  # and the data file is on the other machine
        for text in ranks.run(2, load_apart, str(tmp_path)):
            assert "rank 1" in text and "__0_0.distcp" in text and "missing" in text


def half(rank: int, world: int, url: str) -> tuple[int, int, bool]:
    """(growth of the peak beyond the destination, bytes read, whether it is right) of a load of half the rows into a DTensor."""
    with fresh_meshes():
        local = torch.zeros(8192 // world, 8192)
        mesh = Groups().mesh(world)
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = ucp_dcp.load(state, url)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        first = rank * 8192 // world
        right = bool((local == torch.arange(first, first + len(local), dtype=torch.float32)[:, None]).all())
    return grown * 1024, report.bytes_read, right


def one_eighth(rank: int, world: int, url: str) -> tuple[int, int, int]:
    """(growth of the peak in bytes, bytes read, right elements) of a load of 1/8 of the rows."""
    rows = 8192 // 8
    out = []
    for part in range(rank, 8, world):
        state = {"w": ucp_dcp.open_checkpoint(url)["w"][:0]}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint = ucp_dcp.open_checkpoint(url)
        state["w"] = checkpoint["w"][part * rows : (part + 1) * rows]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        right = bool((state["w"] == torch.arange(part * rows, (part + 1) * rows, dtype=torch.float32)[:, None]).all())
        out.append((grown * 1024, checkpoint.stats.bytes_read, int(right)))
        del state
    return max(o[0] for o in out), max(o[1] for o in out), min(o[2] for o in out)


@pytest.mark.slow
def test_d12_a_part_of_a_large_tensor(ranks: Any, tmp_path: Path) -> None:
    """256 MiB in one chunk; 8 parts of 32 MiB."""
    w = torch.arange(8192, dtype=torch.float32)[:, None].expand(8192, 8192).contiguous()
    dcp.save({"w": w}, checkpoint_id=tmp_path / "stock", no_dist=True)
    ucp_dcp.save({"w": w}, tmp_path / "ours", storage_options={"sync": False})
    del w
    for kind in ("stock", "ours"):
        for grown, read, right in ranks.run(2, one_eighth, str(tmp_path / kind)):
            assert right and read <= (32 << 20) * 1.01 + 4096 and grown <= (32 + 64) << 20, kind
        for grown, read, right in ranks.run(2, half, str(tmp_path / kind)):
            assert right and read <= (128 << 20) * 1.01 + 4096 and grown <= 64 << 20, kind


@pytest.mark.slow
def test_d13_more_than_two_gib(tmp_path: Path) -> None:
    n = 2**31 + 1000
    w = torch.zeros(n, dtype=torch.uint8)
    w[-3:] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    ucp_dcp.save({"w": w}, tmp_path, storage_options={"sync": False})
    w.zero_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ucp_dcp.load({"w": w}, tmp_path)
    assert w[-3:].tolist() == [7, 8, 9] and int(w[:-3].max()) == 0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 512 << 20
    assert ucp_dcp.open_checkpoint(tmp_path)["w"][-2:].tolist() == [8, 9]


def test_d14_rename_does_not_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if os.path.exists(target):
            raise FileExistsError(target)
        raise AssertionError("rename was used")

    monkeypatch.setattr(os, "rename", rename)
    for base in (1, 2):
        ucp_dcp.save(values(base), tmp_path)
    assert loaded(tmp_path)[0] == 2.0


class Crafted:
    """A pickle that makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_d15_d16_nothing_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "m").mkdir()
    (tmp_path / "m/.metadata").write_bytes(pickle.dumps(Crafted(marker)))
    with pytest.raises(UCPError):
        ucp_dcp.open_checkpoint(tmp_path / "m")
    for command in ("show", "verify"):
        assert CliRunner().invoke(app, [command, str(tmp_path / "m")]).exit_code != 0
    dcp.save({"o": Crafted(marker), "w": torch.ones(1)}, checkpoint_id=tmp_path / "o", no_dist=True)
    ucp_dcp.save({"o": Crafted(marker), "w": torch.ones(1)}, tmp_path / "u")
    marker.rmdir() if marker.exists() else None  # the stock save itself may look at the value
    for kind in "ou":
        with pytest.raises(UnsafePickleError, match="mkdir"):
            ucp_dcp.load({"o": None, "w": torch.zeros(1)}, tmp_path / kind)
    assert not marker.exists()


def test_d17_random_states_survive_the_safe_loader(tmp_path: Path) -> None:
    state = {"rng": PerRank({"numpy": np.random.get_state(), "python": random.getstate(), "torch": torch.get_rng_state()})}
    ucp_dcp.save(state, tmp_path)
    following = (np.random.rand(), random.random(), torch.rand(1))
    got = {"rng": PerRank(None)}
    ucp_dcp.load(got, tmp_path)
    states = got["rng"].value
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    assert (np.random.rand(), random.random()) == following[:2] and torch.equal(torch.rand(1), following[2])


def test_d18_what_the_planner_adds_is_there_afterwards(tmp_path: Path, isolated_python: Any) -> None:
    dcp.save(
        {"model": {"a.b": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True, planner=UCPSavePlanner(roots={"model": "model"})
    )
    ours = ucp_dcp.open_checkpoint(tmp_path)["model.a.b"]
    assert (ours.role.name, ours.fqn) == ("WEIGHT", "a.b")
    found = isolated_python(
        f"""
import torch.distributed.checkpoint as dcp
data = dcp.FileSystemReader({str(tmp_path)!r}).read_metadata().planner_data["ucp_dcp"]
print(data["version"], data["tensors"]["model.a.b"])
"""
    )
    assert found.split() == ["1", "[0,", "'a.b',", "'',", "'']"]


def changed_states() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "first", {"w": torch.ones(2), "n": 1}
    yield "values", {"w": torch.full((2,), 5.0), "n": 2}
    yield "another key", {"w": torch.ones(2), "v": torch.full((3,), 2.0), "n": 3}
    yield "another shape", {"w": torch.ones(3), "v": torch.full((3,), 2.0), "n": 3}
    yield "another dtype", {"w": torch.ones(3, dtype=torch.float64), "v": torch.full((3,), 2.0), "n": 3}
    yield "keys exchanged", {"v": torch.ones(3, dtype=torch.float64), "w": torch.full((3,), 2.0), "n": 3}
    yield "an object becomes a tensor", {"v": torch.ones(3, dtype=torch.float64), "w": torch.full((3,), 2.0), "n": torch.tensor(3)}
    yield "a key less", {"w": torch.full((3,), 2.0)}


def save_each(rank: int, world: int, url: str) -> list[str]:
    """One planner and one writer for states that change. Returns what did not come back."""
    writer, planner, wrong = UCPStorageWriter(url), UCPSavePlanner(), []
    for what, state in changed_states():
        dcp.save(state, storage_writer=writer, planner=planner)
        found = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
        report = ucp_dcp.load(found, url, strict="exact", dtype="error")
        if report.unexpected or any(not torch.equal(torch.as_tensor(found[k]), torch.as_tensor(v)) for k, v in state.items()):
            wrong.append(what)
        dist.barrier()
    return wrong


def test_d19_a_plan_is_not_used_for_another_state(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, save_each, str(tmp_path / "c")) == [[], []]


def save_safetensors(rank: int, world: int, url: str) -> None:
    state = {k: v for i, (k, v) in enumerate(values(0).items()) if i % world == rank}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(url, save_distributed=True))


@pytest.mark.parametrize("kind", ["ours", "stock", "safetensors"])
def test_d20_the_order_of_a_listing_means_nothing(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Shards of safetensors files are found by listing, and shared out over the ranks in the order of the list."""
    url = str(tmp_path / "c")
    if kind == "stock":
        dcp.save(values(0), storage_writer=dcp.FileSystemWriter(url, single_file_per_rank=False), no_dist=True)
    else:
        ranks.run(4, save_own if kind == "ours" else save_safetensors, url, *([0] if kind == "ours" else []))
    assert len([p for p in Path(url).rglob("*") if p.suffix in (".distcp", ".safetensors")]) >= 4
    assert ranks.run(2, load_reversed, url) == [[float(i) for i in range(8)]] * 2


def load_reversed(rank: int, world: int, url: str) -> list[float]:
    scandir = os.scandir

    class Reversed:
        def __init__(self, path: Any) -> None:
            with scandir(path) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self) -> Any:
            return iter(self.entries)

        def __exit__(self, *args: Any) -> None:
            pass

    if rank == 1:
        os.scandir = Reversed  # type: ignore[assignment,misc]
    try:
        return loaded(url)
    finally:
        os.scandir = scandir  # type: ignore[assignment]
