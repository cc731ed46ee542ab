"""Every operation of a save and of an overwrite by four ranks, broken in every way: the old or the new checkpoint, never a mixture."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec, UCPSavePlanner, UCPStorageWriter
from ucp_dcp.errors import CheckpointNotFoundError, StoreError
from ucp_dcp.storage import write_file
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.store import Store
from ucp_dcp.testing.crash import Disk, DiskStore, Fault, FaultyStore, Killed, exhaust
from ucp_dcp.testing.crash_disk import SizedWriter as SizedFileOfDisk

RANKS = 4
SPEC = LayoutSpec.from_dict(
    {"ucp_spec": 1, "name": "rows", "axes": ["dp"], "rules": [{"match": "w", "steps": [{"dp": "Shard(0)"}]}, {"match": "b"}]}
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def whole(value: float, n: int = 8) -> dict[str, Any]:
    return {"model": {"w": torch.arange(float(n)) + value, "b": torch.full((3,), value)}, "step": value}


def save_together(stores: list[Store], value: float, stock: bool = True, n: int = 8) -> None:
    """``dcp.save`` of some ranks in one process, in DCP's order of calls; after an error the coordinator abandons, as ours does."""
    state = whole(value, n)
    part = n // len(stores)
    planners, writers, plans = [], [], []
    try:
        for rank, store in enumerate(stores):
            layout = Layout(SPEC, coords={"dp": (rank, len(stores))}, roots={"model": "model"})
            planner, writer = UCPSavePlanner(layout=layout), UCPStorageWriter(store, stock_metadata=stock, grace=0)
            rows = state["model"]["w"][part * rank : part * (rank + 1)]
            mine = {"model": {"w": rows, "b": state["model"]["b"]}, "step": state["step"]}
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


def found(store: Store, n: int = 8) -> float:
    """The value of the checkpoint that is there, whole and by itself."""
    checkpoint = ucp_dcp.open_checkpoint(store)
    value = checkpoint.objects["step"]
    want = whole(value, n)["model"]
    assert sorted(checkpoint) == ["model.b", "model.w"]
    assert torch.equal(checkpoint["model.w"].read(), want["w"]) and torch.equal(checkpoint["model.b"].read(), want["b"])
    return value


def check(store: Store, n: int = 8) -> str:
    try:
        return {1.0: "old", 2.0: "new"}[found(store, n)]
    except CheckpointNotFoundError:
        return "nothing"


def on_disk(value: float, stock: bool = True, ranks: int = RANKS, n: int = 8) -> Callable[[Disk], None]:
    return lambda disk: save_together([disk.store() for _ in range(ranks)], value, stock, n)


STREAM, LOCAL = 0, 4
"""Calls at the same time of a :class:`Disk`: one that only streams, and one that writes as LocalStore does."""


LEFTOVERS = (("g-" + "0" * 32 + "/__0_0.distcp", b"unfinished"), (".ucp.json.0123456789abcdef.tmp", b"half"))
"""What a crash left long ago; the next save deletes it."""


def with_leftovers(concurrent: int) -> Disk:
    disk = Disk(concurrent, clock=1e6)
    for path, data in LEFTOVERS:
        disk.store().put(path, data)
    return disk


def every(n: int) -> Callable[[int, str, str], bool]:
    """Every n-th operation in every mode; 1: every operation, without the runs that are another one over again."""

    def select(number: int, name: str, mode: str) -> bool:
        kind = name.split()[0]
        if kind in ("size", "read", "list"):
            return number % n == 0 and mode == "fail"  # an end before it is one behind the operation before
        return number % n == 0 and (mode != "torn" or kind in ("write", "write_at", "put"))

    return select if n else lambda number, name, mode: True


@pytest.mark.parametrize(
    ("concurrent", "stock", "step"),
    [
        (LOCAL, True, 3),
        pytest.param(LOCAL, True, 1, marks=pytest.mark.slow),
        (STREAM, True, 5),
        *(pytest.param(c, stock, 0, marks=pytest.mark.slow) for c in (LOCAL, STREAM) for stock in (True, False)),
    ],
)
def test_an_overwrite_leaves_the_old_or_the_new(concurrent: int, stock: bool, step: int) -> None:
    saved = with_leftovers(concurrent)
    on_disk(1.0, stock)(saved)
    for path, data in LEFTOVERS:
        saved.store().put(path, data)
    save = on_disk(2.0, stock)
    report = exhaust(saved.copy, save, check, again=None if step else save, select=every(step))
    if step == 1:
        exhaust(saved.copy, save, check, again=save, select=every(4), modes=["kill", "lose"])
    assert {outcome for _, outcome in report.outcomes} == {"old", "new"}
    assert len(report.operations) > 50 and report.runs > (3 * len(report.operations) if step < 2 else 20)
    files = {name for name, path in map(str.split, report.operations) if name == "close" for name in [path.split("/")[-1]]}
    assert files >= {"index.ucp", *(f"__{r}_0.distcp" for r in range(RANKS))}
    done = {name for name, path in map(str.split, report.operations) if path.endswith(".distcp")}
    assert done >= {"create", "close", "write_at" if concurrent else "write", "delete"}
    assert step > 1 or {f"delete {path}" for path, _ in LEFTOVERS} <= set(report.operations)


@pytest.mark.parametrize(("concurrent", "step"), [(LOCAL, 3), *(pytest.param(c, 0, marks=pytest.mark.slow) for c in (LOCAL, STREAM))])
def test_a_first_save_leaves_nothing_or_the_new(concurrent: int, step: int) -> None:
    report = exhaust(lambda: with_leftovers(concurrent), on_disk(2.0), check, again=on_disk(2.0), select=every(step))
    assert {outcome for _, outcome in report.outcomes} == {"nothing", "new"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_write_breaks_in_one_of_several_threads(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several slices, written by as many threads: whatever the others do then, the error of one ends the save."""
    monkeypatch.setattr(write_file, "SLICE", write_file.BLOCK)
    n = ranks * 3 * write_file.BLOCK // 4
    seen: set[str] = set()
    write_at = SizedFileOfDisk.write_at

    def watched(self: Any, offset: int, buffers: Any) -> None:
        seen.add(threading.current_thread().name)
        write_at(self, offset, buffers)

    monkeypatch.setattr(SizedFileOfDisk, "write_at", watched)
    saved = Disk(3)
    on_disk(1.0, ranks=ranks, n=n)(saved)
    save = on_disk(2.0, ranks=ranks, n=n)
    report = exhaust(saved.copy, save, lambda store: check(store, n), again=save, select=lambda _, name, mode: name.startswith("write_at"))
    assert report.runs >= 5 * 3 * ranks and len({name for name in seen if name.startswith("ucp-write-")}) > 1
    assert {outcome for _, outcome in report.outcomes} == {"old"}


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


def test_bytes_of_a_file_of_known_size_survive_in_any_order() -> None:
    disk = Disk(2)
    with contextlib.suppress(Killed), disk.store().create_sized("f", 8) as file:  # type: ignore[attr-defined]
        file.write_at(4, [b"5678"])
        disk.faults.dead = True
        file.write_at(0, [b"1234"])
    assert [disk.after_crash(s).store().read("f") for s in ("all", "half")] == [b"\0\0\0\0" + b"5678", bytes(8)]
    disk = Disk(2)
    with contextlib.suppress(Killed), disk.store().create_sized("f", 8) as file:  # type: ignore[attr-defined]
        file.write_at(4, [b"56", b"78"])
        file.write_at(0, [b"1234"])
        disk.faults.dead = True
    assert [disk.after_crash(s).store().read("f") for s in ("all", "half")] == [b"12345678", b"\0\0\0\0" + b"5678"]
    assert not list(disk.after_crash("durable").store().list())


@pytest.mark.parametrize(
    ("writes", "text"),
    [
        ([(0, b"1234")], "from 4 to the end, 8, were not written"),
        ([(0, b"1234"), (5, b"678")], "4 to 5 were not written"),
        ([(0, b"12345"), (4, b"5678")], "4 to 5 were written twice"),
        ([(4, b"56789")], "do not lie"),
        ([(-1, b"12")], "do not lie"),
    ],
)
def test_the_kit_finds_bytes_that_were_not_written(writes: list[tuple[int, bytes]], text: str) -> None:
    disk = Disk(1)
    with pytest.raises(StoreError, match=text), disk.store().create_sized("f", 8) as file:  # type: ignore[attr-defined]
        for offset, data in writes:
            file.write_at(offset, [data])
    assert not list(disk.store().list())


def test_the_kit_finds_too_many_writes_at_once() -> None:
    disk = Disk(1)
    with pytest.raises(StoreError, match="2 writes at the same time"), disk.store().create_sized("f", 8) as file:  # type: ignore[attr-defined]
        disk.faults.lock.acquire()
        thread = threading.Thread(target=file.write_at, args=(0, [b"1234"]), daemon=True)
        thread.start()
        try:
            while not file._running:
                pass
            file.write_at(4, [b"5678"])
        finally:
            disk.faults.lock.release()
            thread.join()


def test_the_kit_finds_a_thread_whose_error_is_lost() -> None:
    """What stock DCP does with an error in one of its writer threads."""

    def save(disk: Disk) -> None:
        with disk.store().create_sized("data", 8) as file:  # type: ignore[attr-defined]
            threads = [threading.Thread(target=quietly, args=(file, at)) for at in (0, 4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            file._file.writes = [(0, 8)]  # and does not count
        disk.store().put("mark", b"new")

    def quietly(file: Any, at: int) -> None:
        with contextlib.suppress(StoreError, Killed):
            file.write_at(at, [b"new!"])

    def look(store: Store) -> str:
        return "new" if [e for e in store.list() if e.path == "mark"] and store.read("data") == b"new!new!" else "old"

    with pytest.raises(AssertionError, match=r"write_at data\), fail: the save reported success"):
        exhaust(lambda: Disk(2), save, look, modes=["fail"], select=lambda number, name, mode: "write_at" in name)


def test_only_one_rank_is_lost() -> None:
    disk = Disk()
    first, second = disk.store(), disk.store()
    disk.arm(Fault(0, "lose"))
    for _ in range(2):
        with pytest.raises(Killed):
            first.put("a", b"1")
    second.put("b", b"2")
    assert isinstance(second, DiskStore) and [e.path for e in second.list()] == ["b"]


REAL_MODES = ["kill", "torn", *(pytest.param(m, marks=pytest.mark.slow) for m in ("kill_after", "fail", "lose"))]


@pytest.mark.parametrize("mode", REAL_MODES)
def test_the_same_on_a_real_folder(tmp_path: Path, mode: Any) -> None:
    """LocalStore below the faults: real files, every third operation."""
    count = FaultyStore(LocalStore(tmp_path / "count", sync=False))
    save_together([count] * RANKS, 1.0)
    total = len(count.faults.operations)
    assert total > 30 and any(name.startswith("write_at") for name in count.faults.operations)
    for at in range(0, total, 3):
        root = tmp_path / f"{at}"
        save_together([LocalStore(root, sync=False)] * RANKS, 1.0)
        on_a_real_folder(root, Fault(at, mode), RANKS, 8)


@pytest.mark.parametrize("mode", REAL_MODES)
def test_threads_on_a_real_folder(tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files of several slices and three threads, every write of them."""
    monkeypatch.setattr(write_file, "SLICE", write_file.BLOCK)
    n = 3 * write_file.BLOCK // 4
    root = tmp_path / "c"
    count = FaultyStore(LocalStore(root, sync=False, threads=3))
    save_together([count], 1.0, n=n)
    places = [at for at, name in enumerate(count.faults.operations) if name.startswith("write_at")]
    assert len(places) > 3
    for at in places:
        save_together([LocalStore(root, sync=False)], 1.0, n=n)
        on_a_real_folder(root, Fault(at, mode), 1, n)


def on_a_real_folder(root: Path, fault: Fault, ranks: int, n: int) -> None:
    faulty = FaultyStore(LocalStore(root, sync=False, threads=3), fault)
    with pytest.raises(BaseException) as raised:
        save_together([faulty] * ranks, 2.0, n=n)
        raise AssertionError("fine")  # a failure after the commit is logged, not raised
    value = found(LocalStore(root), n)
    assert value in (1.0, 2.0)
    if str(raised.value) == "fine":
        assert value == 2.0
    save_together([LocalStore(root, sync=False)] * ranks, 3.0, n=n)
    assert found(LocalStore(root), n) == 3.0
