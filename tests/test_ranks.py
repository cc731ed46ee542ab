"""The tests' own tools: gloo ranks and isolated interpreters."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankDied, RankFailed, RankHung, RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("two arguments do not come back from one")


def identity(rank: int, world: int, *args: object, **kwargs: object) -> tuple[object, ...]:
    return rank, world, args, kwargs, os.getpid(), torch.get_num_threads()


def summed(rank: int, world: int, factor: int) -> torch.Tensor:
    t = torch.tensor([rank + 1.0]) * factor
    dist.all_reduce(t)
    return t


def sub_group(rank: int, world: int) -> list[int]:
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    got: list[int | None] = [None, None]
    dist.all_gather_object(got, rank, group=low if rank < 2 else high)
    return [g for g in got if g is not None]


def mesh_2d(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    t = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0), Shard(1)])
    return t.to_local(), t.full_tensor()


def fail_on(rank: int, world: int, bad: int, kind: str) -> None:
    if rank == bad:
        if kind == "value":
            raise ValueError("broken on purpose")
        if kind == "unpicklable":
            raise Unpicklable(1, 2)
        if kind == "exit":
            os._exit(7)
        if kind == "sleep":
            time.sleep(1000)
    dist.barrier()


def failing_load(rank: int, world: int, path: str) -> None:
    dcp.load({"a": torch.zeros(2)}, checkpoint_id=path)


def test_results_arguments_and_threads(ranks: RankPool) -> None:
    for world in (1, 2, 4):
        got = ranks.run(world, identity, 1, "x", key=[2])
        assert [g[:4] for g in got] == [(r, world, (1, "x"), {"key": [2]}) for r in range(world)]
        assert len({g[4] for g in got}) == world and os.getpid() not in {g[4] for g in got}
        assert {g[5] for g in got} == {1}


def test_processes_are_shared_between_calls(ranks: RankPool) -> None:
    first = [g[4] for g in ranks.run(2, identity)]
    started = ranks.started
    assert [g[4] for g in ranks.run(2, identity)] == first and ranks.started == started


def test_collectives_sub_groups_and_meshes(ranks: RankPool) -> None:
    for factor in (1, 10):  # a second call must not see the store of the first
        assert [t.item() for t in ranks.run(4, summed, factor)] == [10.0 * factor] * 4
    assert ranks.run(4, sub_group) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    whole = torch.arange(12.0).reshape(4, 3)
    for _ in range(2):
        got = ranks.run(4, mesh_2d)
        assert all(torch.equal(full, whole) for _, full in got)
        assert torch.equal(got[3][0], whole[2:, 2:])


def test_first_failure_is_raised_with_rank_and_traceback(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="broken on purpose") as caught:
        ranks.run(4, fail_on, 2, "value")
    note = "".join(caught.value.__notes__)
    assert "rank 2 of 4" in note and "in fail_on" in note and 'raise ValueError("broken on purpose")' in note
    assert time.monotonic() - start < 20
    assert [t.item() for t in ranks.run(4, summed, 1)] == [10.0] * 4


def test_exception_that_does_not_pickle(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2.*Unpicklable: two arguments"):
        ranks.run(2, fail_on, 1, "unpicklable")


def test_checkpoint_exception_keeps_its_type(ranks: RankPool, tmp_path: object) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        ranks.run(2, failing_load, f"{tmp_path}/nothing")
    assert set(caught.value.failures) <= {0, 1} and caught.value.failures


def test_dead_rank_is_named_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankDied, match="rank 0 of 2 died in fail_on with exit code 7"):
        ranks.run(2, fail_on, 0, "exit")
    assert [t.item() for t in ranks.run(2, summed, 1)] == [3.0] * 2


@pytest.mark.slow
def test_hung_rank_is_killed_and_shown(ranks: RankPool) -> None:
    with pytest.raises(RankHung, match=r"(?s)ranks \[0, 1\] of 2 did not finish fail_on within 2 s.*--- rank 1.*in fail_on"):
        ranks.run(2, fail_on, 1, "sleep", timeout=2)
    assert [t.item() for t in ranks.run(2, summed, 1)] == [3.0] * 2


def test_what_cannot_be_sent_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top of an importable module"):
        ranks.run(1, lambda rank, world: None)
    with pytest.raises(ValueError, match=r"world size 9, this pool has 1..8"):
        ranks.run(9, identity)


def test_isolated_python_cannot_import_ours(isolated_python) -> None:  # type: ignore[no-untyped-def]
    assert isolated_python("import sys; print(sys.argv[1])", args=["hello"]) == "hello\n"
    with pytest.raises(AssertionError, match="importing ucp_dcp is forbidden here"):
        isolated_python("import ucp_dcp")
    with pytest.raises(AssertionError, match="importing json is forbidden here"):
        isolated_python("import json", forbid=["json"])
