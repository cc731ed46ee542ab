"""Every operation of a save and of an overwrite by four ranks, broken in every way: the old or the new checkpoint, never a mixture."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec, UCPSavePlanner, UCPStorageWriter
from ucp_dcp.errors import CheckpointNotFoundError, StoreError
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.store import Store
from ucp_dcp.testing.crash import Disk, DiskStore, Fault, FaultyStore, Killed, exhaust

RANKS = 4
SPEC = LayoutSpec.from_dict(
    {"ucp_spec": 1, "name": "rows", "axes": ["dp"], "rules": [{"match": "w", "steps": [{"dp": "Shard(0)"}]}, {"match": "b"}]}
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def whole(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.arange(8.0) + value, "b": torch.full((3,), value)}, "step": value}


def save_on_four(stores: list[Store], value: float, stock: bool = True) -> None:
    """``dcp.save`` of four ranks in one process, in DCP's order of calls; after an error the coordinator abandons, as ours does."""
    state = whole(value)
    planners, writers, plans = [], [], []
    try:
        for rank, store in enumerate(stores):
            layout = Layout(SPEC, coords={"dp": (rank, RANKS)}, roots={"model": "model"})
            planner, writer = UCPSavePlanner(layout=layout), UCPStorageWriter(store, stock_metadata=stock)
            mine = {"model": {"w": state["model"]["w"][2 * rank : 2 * rank + 2], "b": state["model"]["b"]}, "step": state["step"]}
            planner.set_up_planner(mine, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            planners.append(planner)
            writers.append(writer)
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writers[0].prepare_global_plan(plans)
        results = [w.write_data(p.finish_plan(plan), p).value() for w, p, plan in zip(writers, planners, plans, strict=True)]
        writers[0].finish(metadata, results)
    except BaseException:
        if writers:
            writers[0].abandon()
        raise


def found(store: Store) -> float:
    """The value of the checkpoint that is there, whole and by itself."""
    checkpoint = ucp_dcp.open_checkpoint(store)
    value = checkpoint.objects["step"]
    want = whole(value)["model"]
    assert sorted(checkpoint) == ["model.b", "model.w"]
    assert torch.equal(checkpoint["model.w"].read(), want["w"]) and torch.equal(checkpoint["model.b"].read(), want["b"])
    return value


def check(store: Store) -> str:
    try:
        return {1.0: "old", 2.0: "new"}[found(store)]
    except CheckpointNotFoundError:
        return "nothing"


def on_disk(value: float, stock: bool = True) -> Callable[[Disk], None]:
    return lambda disk: save_on_four([disk.store() for _ in range(RANKS)], value, stock)


@pytest.mark.parametrize("stock", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_overwrite_leaves_the_old_or_the_new(stock: bool) -> None:
    saved = Disk()
    on_disk(1.0, stock)(saved)
    report = exhaust(saved.copy, on_disk(2.0, stock), check, again=on_disk(2.0, stock))
    assert {outcome for _, outcome in report.outcomes} == {"old", "new"}
    assert report.runs == 5 * len(report.operations) and len(report.operations) > 30
    assert {path.split("/")[1] for op in report.operations if op.startswith("close") and "/" in op for path in [op.split(" ")[1]]} >= {
        *(f"__{r}_0.distcp" for r in range(RANKS)),
        "index.ucp",
    }


def test_a_first_save_leaves_nothing_or_the_new() -> None:
    report = exhaust(Disk, on_disk(2.0), check, again=on_disk(2.0))
    assert {outcome for _, outcome in report.outcomes} == {"nothing", "new"}


def test_the_kit_finds_a_writer_that_is_not_safe() -> None:
    """In place, without a commit: what stock DCP does."""

    def fresh() -> Disk:
        disk = Disk()
        disk.store().put("a", b"old")
        disk.store().put("b", b"old")
        return disk

    def save(disk: Disk) -> None:
        disk.store().put("a", b"new")
        disk.store().size("a")
        disk.store().put("b", b"new")

    def look(store: Store) -> str:
        parts = {store.read(name).decode() for name in ("a", "b")}
        if len(parts) > 1:
            raise StoreError("a mixture")
        return parts.pop()

    with pytest.raises(AssertionError, match=r"operation 0 \(put a\), kill_after, durable: .*a mixture"):
        exhaust(fresh, save, look)


def test_the_kit_finds_success_without_a_checkpoint() -> None:
    def save(disk: Disk) -> None:
        with contextlib.suppress(StoreError):  # a lost error
            disk.store().put("a", b"new")

    with pytest.raises(AssertionError, match="reported success"):
        exhaust(Disk, save, lambda store: "new" if list(store.list()) else "old", modes=["fail"])


def test_bytes_that_are_not_durable_do_not_survive() -> None:
    disk = Disk()
    disk.arm(Fault(2, "kill"))
    with pytest.raises(Killed), disk.store().create("f") as writer:
        writer.write(b"12345678")
    assert [list(disk.after_crash(s).store().list()) == [] for s in ("durable", "all", "half")] == [True, False, False]
    assert disk.after_crash("half").store().read("f") == b"1234"


def test_only_one_rank_is_lost() -> None:
    disk = Disk()
    first, second = disk.store(), disk.store()
    disk.arm(Fault(0, "lose"))
    for _ in range(2):
        with pytest.raises(Killed):
            first.put("a", b"1")
    second.put("b", b"2")
    assert isinstance(second, DiskStore) and [e.path for e in second.list()] == ["b"]


@pytest.mark.parametrize("mode", ["kill", "kill_after", "fail", "torn", "lose"])
def test_the_same_on_a_real_folder(tmp_path: Path, mode: Any) -> None:
    """LocalStore below the faults: real files, every third operation."""
    count = FaultyStore(LocalStore(tmp_path / "count", sync=False))
    save_on_four([count] * RANKS, 1.0)
    total = len(count.faults.operations)
    assert total > 30
    for at in range(0, total, 3):
        root = tmp_path / f"{at}"
        save_on_four([LocalStore(root, sync=False)] * RANKS, 1.0)
        faulty = FaultyStore(LocalStore(root, sync=False), Fault(at, mode))
        with pytest.raises(BaseException) as raised:
            save_on_four([faulty] * RANKS, 2.0)
            raise AssertionError("fine")  # a failure after the commit is logged, not raised
        value = found(LocalStore(root))
        assert value in (1.0, 2.0)
        if str(raised.value) == "fine":
            assert value == 2.0
        save_on_four([LocalStore(root, sync=False)] * RANKS, 3.0)
        assert found(LocalStore(root)) == 3.0
