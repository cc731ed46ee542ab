"""Public bug reports about async saves, process groups and failures, on real gloo ranks. ``test_e04_...`` is case E04.
"""

from __future__ import annotations

import datetime
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ucp_dcp
from ucp_dcp import UCPLoadPlanner, UCPSavePlanner, UCPStager, UCPStorageReader, UCPStorageWriter
from ucp_dcp.errors import UCPError


class SlowWriter(UCPStorageWriter):
    """Waits before it writes; ``delay`` per rank."""

    delay: tuple[float, ...] = (0.5,)
    fails: int | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        time.sleep(self.delay[rank % len(self.delay)])
        if rank == self.fails:
            raise OSError("no space on this disk")
        return super().write_data(plan, planner)


def own_group(seconds: float = 60) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))


def values(base: float) -> dict[str, torch.Tensor]:
    return {f"v{i}": torch.full((4,), float(base)) for i in range(4)}


def loaded(url: str, **kwargs: Any) -> set[float]:
    state = values(-9)
    ucp_dcp.load(state, url, **kwargs)
    return {float(x) for v in state.values() for x in v}


def change_behind_it(rank: int, world: int, url: str, process: bool, own: bool) -> list[Any]:
    """A tensor, a 0-d tensor on the CPU, a nested list, a numpy array; all change in place right after the call."""
    _async_process_executor._CHECKPOINT_PROCESS = None
    w, step, nested, numbers = torch.ones(3), torch.tensor(1.0), [1], np.ones(2)
    try:
        future = dcp.async_save(
            {"w": w, "optim": {"step": step, "nested": {"x": nested}}, "numbers": numbers},
            storage_writer=SlowWriter(url),
            planner=UCPSavePlanner(),
            async_stager=UCPStager() if own else None,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD,
            process_group=own_group(),
        )
        w.fill_(-1)
        step.add_(1)
        nested.append(2)
        nested[0] = 7
        numbers[:] = 5
        future.result(timeout=100)
    finally:
        _async_process_executor._CHECKPOINT_PROCESS = None
    dist.barrier()
    checkpoint = ucp_dcp.open_checkpoint(url)
    tensors = [checkpoint[name].read().tolist() for name in ("w", "optim.step")]
    return [*tensors, checkpoint.objects["optim.nested.x"], checkpoint.objects["numbers"].tolist()]


@pytest.mark.parametrize("own", [False, True], ids=["stock stager", "UCPStager"])
@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "process"])
def test_e01_values_of_a_later_step(ranks: Any, tmp_path: Path, process: bool, own: bool) -> None:
    found = ranks.run(2, change_behind_it, str(tmp_path / "c"), process, own, timeout=150)
    assert found == [[[1.0] * 3, 1.0, [1], [1.0, 1.0]]] * 2


def load_while_saving(rank: int, world: int, url: str) -> tuple[str, set[float], set[float]]:
    group = own_group()
    first = dcp.async_save(values(1), storage_writer=SlowWriter(url), planner=UCPSavePlanner(), process_group=group)
    try:
        loaded(url)
        early = "loaded"
    except UCPError as error:
        early = str(error)
    first.result(timeout=60)
    dist.barrier()
    second = dcp.async_save(values(2), storage_writer=SlowWriter(url), planner=UCPSavePlanner(), process_group=group)
    during = loaded(url)
    second.result(timeout=60)
    dist.barrier()
    return early, during, loaded(url)


def test_e02_a_load_while_a_save_is_under_way(ranks: Any, tmp_path: Path) -> None:
    for early, during, after in ranks.run(2, load_while_saving, str(tmp_path / "c")):
        assert "nothing here" in early or "unfinished save" in early
        assert (during, after) == ({1.0}, {2.0})  # the old one, whole, until the new one is committed


def five_in_a_row(rank: int, world: int, url: str) -> float:
    group = own_group()
    begin = time.monotonic()
    futures = []
    for n in range(5):
        if futures:
            futures[-1].result(timeout=60)
        futures.append(
            dcp.async_save(values(n), storage_writer=UCPStorageWriter(f"{url}/{n}"), planner=UCPSavePlanner(), process_group=group)
        )
        dist.barrier()
    for future in futures:
        future.result(timeout=60)
    dist.barrier()
    assert [loaded(f"{url}/{n}") for n in range(5)] == [{float(n)} for n in range(5)]
    return time.monotonic() - begin


def test_e03_barriers_beside_background_saves(ranks: Any, tmp_path: Path) -> None:
    assert max(ranks.run(2, five_in_a_row, str(tmp_path))) < 60


def one_fails(rank: int, world: int, url: str) -> str:
    writer = SlowWriter(url)
    writer.fails = 1
    future = dcp.async_save(values(1), storage_writer=writer, planner=UCPSavePlanner(), process_group=own_group())
    try:
        future.result(timeout=60)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_e04_every_rank_learns_that_a_background_save_failed(ranks: Any, tmp_path: Path) -> None:
    for text in ranks.run(2, one_fails, str(tmp_path / "c")):
        assert "no space on this disk" in text and "RANK 1" in text.upper()
    assert not (tmp_path / "c/ucp.json").exists()


def many_tensors(rank: int, world: int, url: str, process: bool) -> int:
    """Ranks 0, 1 and ranks 2, 3 are two jobs; each saves twice, and changes its tensors after each copy."""
    pairs = [dist.new_group(p, backend="gloo") for p in ([0, 1], [2, 3])[: world // 2]]
    job, group = rank // 2, pairs[rank // 2]
    _async_process_executor._CHECKPOINT_PROCESS = None  # of an earlier test, with other ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        state = {f"t{i}": torch.full((4,), float(i)) for i in range(3000)}
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        stager = UCPStager(shared=process)
        for n in range(2):
            future = dcp.async_save(
                state,
                storage_writer=UCPStorageWriter(f"{url}/{job}/{n}"),
                planner=UCPSavePlanner(),
                async_checkpointer_type=kind,
                async_stager=stager,
                process_group=group,
            )
            for value in state.values():
                value.add_(1)
            future.result(timeout=150)
        dist.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        _async_process_executor._CHECKPOINT_PROCESS = None
    right = 0
    for n in range(2):
        found = {name: torch.zeros(4) for name in state}
        ucp_dcp.load(found, f"{url}/{job}/{n}", no_dist=True)
        right += sum(found[f"t{i}"].tolist() == [i + n] * 4 for i in range(3000))
    return right


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_e05_three_thousand_tensors_and_few_file_descriptors(ranks: Any, tmp_path: Path, process: bool) -> None:
    """With our stager all tensors lie in one storage, so that a save in another process needs one open file, and not 3,000."""
    assert ranks.run(4, many_tensors, str(tmp_path / "c"), process, timeout=300) == [6000] * 4


def slow_rank(rank: int, world: int, url: str) -> set[float]:
    training = own_group(2)
    writer = SlowWriter(url)
    writer.delay = (0.0, 4.0)
    future = dcp.async_save(values(3), storage_writer=writer, planner=UCPSavePlanner(), process_group=own_group(60))
    for _ in range(3):
        dist.barrier(group=training)  # training goes on, and its short timeout does not see the slow disk
    future.result(timeout=60)
    dist.barrier()
    assert loaded(url) == {3.0}
    # a group for checkpoints that is too short: an error, and neither a hang nor the end of the process
    late = dcp.async_save(values(4), storage_writer=writer, planner=UCPSavePlanner(), process_group=own_group(2))
    text = ""
    try:
        late.result(timeout=60)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    if rank == 0:
        assert "time" in text.lower(), text
    time.sleep(4 if rank == 0 else 0)
    dist.barrier()
    return loaded(url)


@pytest.mark.slow
def test_e06_a_slow_disk_does_not_end_the_training_group(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, slow_rank, str(tmp_path / "c")) == [{3.0}, {3.0}]


def raises_somewhere(rank: int, world: int, url: str, where: str) -> str:
    class Planner(UCPSavePlanner):
        def create_local_plan(self) -> Any:
            if where == "plan" and rank == 1:
                raise ValueError("bad local planning")
            return super().create_local_plan()

    class Loader(UCPLoadPlanner):
        def execute(self, *args: Any, **kwargs: Any) -> None:
            if where == "read" and rank == 1:
                raise ValueError("bad read")
            super().execute(*args, **kwargs)

    writer = SlowWriter(url)
    writer.delay = (0.0,)
    writer.fails = 1 if where == "write" else None
    try:
        dcp.save(values(1), storage_writer=writer, planner=Planner())
        dcp.load(values(0), storage_reader=UCPStorageReader(url), planner=Loader())
    except BaseException as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("where", "text"), [("plan", "bad local planning"), ("write", "no space on this disk"), ("read", "bad read")])
def test_e08_one_rank_raises(ranks: Any, tmp_path: Path, where: str, text: str) -> None:
    for found in ranks.run(2, raises_somewhere, str(tmp_path / "c"), where):
        assert text in found and "RANK 1" in found.upper()


def part_of_the_ranks(rank: int, world: int, url: str) -> tuple[set[float], str]:
    pair, short = dist.new_group([1, 2], backend="gloo"), own_group(3)
    if rank in (1, 2):
        ucp_dcp.save(values(5), url, process_group=pair)
    dist.barrier()
    text = ""
    if rank == 0:
        try:
            ucp_dcp.save(values(6), url + "x", process_group=short)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
    time.sleep(4 if rank else 0)
    return loaded(url, no_dist=True), text


@pytest.mark.slow
def test_e09_sub_groups_and_a_call_on_one_rank_only(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(3, part_of_the_ranks, str(tmp_path / "c"))
    assert [v for v, _ in found] == [{5.0}] * 3
    assert "time" in found[0][1].lower()  # it ends, and does not hang
    assert not (tmp_path / "cx/ucp.json").exists()


def two_jobs(rank: int, world: int, url: str, overwrite: bool) -> str:
    """Ranks 0, 1 and ranks 2, 3 are two jobs that know nothing of each other."""
    pairs = [dist.new_group(p, backend="gloo") for p in ([0, 1], [2, 3])]
    job = rank // 2
    state = {f"v{i}": torch.full((4,), float(job + 1)) for i in range(4) if i % 2 == rank % 2}
    dist.barrier()
    try:
        ucp_dcp.save(state, url, process_group=pairs[job], overwrite=overwrite)
    except UCPError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("overwrite", [True, False])
def test_e10_two_jobs_save_to_one_place(ranks: Any, tmp_path: Path, overwrite: bool) -> None:
    for n in range(2):
        url = str(tmp_path / f"{n}")
        results = ranks.run(4, two_jobs, url, overwrite)
        assert results[0] == results[1] and results[2] == results[3]
        found = loaded(url)
        assert found in ({1.0}, {2.0})
        if overwrite:
            assert results == ["saved"] * 4
        else:
            assert sorted(r == "saved" for r in results) == [False, False, True, True]
            assert results[0 if found == {1.0} else 2] == "saved"


def test_e10_two_background_saves_of_one_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        futures = [
            dcp.async_save(values(n), storage_writer=SlowWriter(tmp_path / "c"), planner=UCPSavePlanner()) for n in (1, 2)
        ]
        for future in futures:
            future.result(timeout=60)
    finally:
        dist.destroy_process_group()
    assert loaded(str(tmp_path / "c")) in ({1.0}, {2.0})


class SlowReader(UCPStorageReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(4)
        return super().read_data(plan, planner)


def slow_load(rank: int, world: int, url: str) -> tuple[str, set[float]]:
    group = own_group(2)
    ucp_dcp.save(values(8), url)
    out = []
    for limit in (group, own_group(60)):
        state = values(0)
        try:
            dcp.load(state, storage_reader=SlowReader(url), planner=UCPLoadPlanner(), process_group=limit)
            out.append("loaded")
        except BaseException as error:
            out.append(f"{type(error).__name__}: {error}")
            time.sleep(4 if rank == 0 else 0)
    return out[0], {float(x) for v in state.values() for x in v}


@pytest.mark.slow
def test_e11_a_slow_reader(ranks: Any, tmp_path: Path) -> None:
    """A group that is too short ends in an error on every rank that waits, never in a hang; one that is long enough just waits."""
    found = ranks.run(2, slow_load, str(tmp_path / "c"))
    assert "time" in found[0][0].lower() or "closed" in found[0][0].lower()
    assert [v for _, v in found] == [{8.0}, {8.0}]
