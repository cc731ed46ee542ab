"""``UCPStager``: what it copies, that live values never reach a file, that memory is used again, and saves in other processes."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import Groups, dtensor, fresh_meshes
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Shard

import ucp_dcp
from ucp_dcp import PerRank, UCPSavePlanner, UCPStager, UCPStorageWriter
from ucp_dcp.errors import PlanError


def every_kind() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    raw = torch.arange(64, dtype=torch.uint8)
    state: dict[str, Any] = {
        "zero_d": torch.tensor(4.0),
        "step": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "base": base,
        "strided": base[::2, 1::2],
        "transposed": base.t(),
        "row": base[2],
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
        "gap": torch.arange(100_000.0).reshape(1000, 100)[:, 3],
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "two bytes at 2": raw[2:8].view(torch.int16),
        "four bytes at 4": raw[4:16].view(torch.int32),
        "sixteen at 16": raw[16:64].view(torch.complex128),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "large": torch.arange(3_000_000.0),
    }
    return state


def assert_same(found: Any, want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
        assert torch.equal(found[key].float() if key == "fp8" else found[key], value.float() if key == "fp8" else value), key


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_every_kind_of_tensor(shared: bool, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucp_dcp.stager._ALONE", 1 << 20)
    monkeypatch.setattr("ucp_dcp.stager._PART", 1 << 20)
    live, want = every_kind(), {k: v.detach().clone() for k, v in every_kind().items()}
    stager = UCPStager(shared=shared, threads=threads)
    assert isinstance(stager, AsyncStager) and not stager.should_synchronize_after_execute
    found = stager.stage({"a": live, "b": [live["row"]]})
    with torch.no_grad():
        for value in live.values():
            if value.numel():
                (value if 0 not in value.stride() else value[:, :1]).zero_()
    assert_same(found["a"], want)
    assert type(found["a"]["parameter"]) is torch.Tensor and not found["a"]["parameter"].requires_grad
    assert all(not t.is_conj() and t.is_shared() == shared for k, t in found["a"].items() if t.numel() and k != "conjugated")
    assert torch.equal(found["b"][0], want["row"])


def test_objects_are_copied_and_containers_stay() -> None:
    class Thing:
        def __init__(self) -> None:
            self.values = [1, 2]

    numbers = np.ones(3)
    live = OrderedDict(a=[1, {"x": (torch.ones(2), [3])}], thing=Thing(), numbers=numbers, rng=PerRank({"k": [7]}), none=None, f=1.5)
    found = UCPStager().stage(live)
    live["a"][1]["x"][1].append(4)
    live["a"][1]["x"][0].zero_()
    live["thing"].values.append(3)
    live["rng"].value["k"].append(8)
    numbers.fill(5)
    assert type(found) is OrderedDict and list(found) == list(live)
    assert type(found["a"][1]["x"]) is tuple and found["a"][1]["x"][0].tolist() == [1, 1] and found["a"][1]["x"][1] == [3]
    assert found["thing"].values == [1, 2] and found["numbers"].tolist() == [1, 1, 1]
    assert type(found["rng"]) is PerRank and found["rng"].value == {"k": [7]}


def test_shared_memory_stays_shared_and_only_what_is_used_is_copied() -> None:
    base = torch.arange(4_000_000.0)
    live = {"tied": base[10:20], "again": base[10:20], "overlap": base[15:30], "far": base[3_000_000:3_000_010]}
    stager = UCPStager()
    found = stager.stage(live)
    assert found["tied"].data_ptr() == found["again"].data_ptr() == found["overlap"].data_ptr() - 20
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1
    assert all(torch.equal(found[k], live[k]) for k in live) and stager.nbytes < 1000
    one = torch.ones(3)
    found = stager.stage({"x": one, "y": one, "z": torch.ones(3)})
    assert found["x"] is found["y"] and found["z"].data_ptr() != found["x"].data_ptr()


def test_memory_is_used_again() -> None:
    stager = UCPStager()
    state = {f"t{i}": torch.full((100,), float(i)) for i in range(50)}
    places = set()
    for n in range(4):
        found = stager.stage(state)
        assert found["t7"].tolist() == [7.0 + n] * 100
        places.add(found["t0"].untyped_storage().data_ptr())
        for value in state.values():
            value.add_(1)
        del found
    assert len(places) == 1 and stager.nbytes == 50 * 448
    small = stager.stage({"x": torch.ones(3)})  # in what is there
    assert stager.nbytes == 50 * 448
    del small
    large = stager.stage({"x": torch.ones(100_000)})  # the smaller memory goes
    assert stager.nbytes == 400_000 and large["x"].sum() == 100_000
    stager.close()
    assert stager.nbytes == 0 and large["x"].sum() == 100_000


def test_memory_in_use_is_left_alone() -> None:
    stager = UCPStager()
    value = torch.ones(10)
    first = stager.stage({"x": value})
    second = stager.stage({"x": value.mul_(2)})
    with pytest.raises(PlanError, match="2 earlier saves still use"):
        stager.stage({"x": value})
    assert first["x"].tolist() == [1.0] * 10 and second["x"].tolist() == [2.0] * 10
    part = first["x"]
    del first
    with pytest.raises(PlanError, match="2 earlier saves"):  # somebody still has one tensor of it
        stager.stage({"x": value})
    del part
    third = stager.stage({"x": value.mul_(2)})
    assert second["x"].tolist() == [2.0] * 10 and third["x"].tolist() == [4.0] * 10 and stager.nbytes == 2 * 64
    with pytest.raises(PlanError, match="buffers=0"):
        UCPStager(buffers=0)


def test_it_pickles_without_its_memory() -> None:
    stager = UCPStager(shared=True, buffers=3, threads=2)
    stager.stage({"x": torch.ones(1000)})
    other = pickle.loads(pickle.dumps(stager))
    assert (other.shared, other.buffers, other.threads, other.nbytes) == (True, 3, 2, 0)
    assert len(pickle.dumps(stager)) < 500


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Gate(UCPStorageWriter):
    """Writes when it may."""

    def __init__(self, url: Any) -> None:
        super().__init__(url)
        self.open = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.open.wait(60)
        return super().write_data(plan, planner)


def test_live_values_never_reach_the_file(alone: Any, tmp_path: Path) -> None:
    """Two saves under way, and training goes on."""
    stager = UCPStager()
    weight, step, epochs = torch.ones(1000), torch.tensor(1.0), [1]
    live = {"model": {"w": weight, "tied": weight}, "step": step, "epochs": epochs, "numbers": np.ones(3)}
    saves = []
    for n in (1, 2):
        writer = Gate(tmp_path / f"{n}")
        planner = UCPSavePlanner(roots={"model": "model"})
        saves.append((writer, dcp.async_save(live, storage_writer=writer, planner=planner, async_stager=stager)))
        weight.add_(1)
        step.add_(1)
        epochs.append(9)
        live["numbers"].fill(7)
    for writer, future in saves:
        writer.open.set()
        future.result(timeout=60)
    for n in (1, 2):
        checkpoint = ucp_dcp.open_checkpoint(tmp_path / f"{n}")
        assert checkpoint["model.w"].read().unique().tolist() == [n] and checkpoint["step"].read() == n
        assert checkpoint.objects["epochs"] == [1, *[9] * (n - 1)]
        assert checkpoint.objects["numbers"].tolist() == [[1, 1, 1], [7, 7, 7]][n - 1]
        w, tied = (checkpoint.catalog.chunk_offset[checkpoint.catalog.find(k)] for k in ("model.w", "model.tied"))
        assert w == tied  # one memory, one copy in the file


@pytest.mark.parametrize("stock", [False, True])
def test_a_save_lets_go_of_its_copy(alone: Any, tmp_path: Path, stock: bool) -> None:
    """As soon as it is done, not when the garbage collector comes: gigabytes."""
    stager = UCPStager(buffers=1)
    state = {"model": {f"t{i}": torch.ones(100) for i in range(10)}, "more": [torch.ones(2), {"x": 1}]}
    planner = UCPSavePlanner()
    gc.collect()
    gc.disable()
    try:
        for n in range(3):
            writer = dcp.FileSystemWriter(tmp_path / f"{n}") if stock else UCPStorageWriter(tmp_path / f"{n}")
            staged: list[Any] = []
            stage = stager.stage

            def watched(value: Any, stage: Any = stage, staged: list[Any] = staged) -> Any:
                out = stage(value)
                staged.append(weakref.ref(out["model"]["t0"]))
                return out

            stager.stage = watched  # type: ignore[method-assign]
            future = dcp.async_save(state, storage_writer=writer, planner=None if stock else planner, async_stager=stager)
            stager.stage = stage  # type: ignore[method-assign]
            future.result(timeout=60)
            for _ in range(200):
                if staged[0]() is None:
                    break
                threading.Event().wait(0.01)
            assert staged[0]() is None
    finally:
        gc.enable()
    assert stager.nbytes == 10 * 448 + 64


def on_a_mesh(rank: int, world: int, url: str, process: bool) -> bool:
    """DTensors and plain tensors, two saves with one stager, changed right after each stage."""
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    _async_process_executor._CHECKPOINT_PROCESS = None
    with fresh_meshes():
        full = torch.arange(24.0).reshape(6, 4)
        mesh = Groups().mesh(world)
        live: dict[str, Any] = {"w": dtensor(full, mesh, [Shard(0)]), "b": torch.ones(5), "n": {"x": [1]}}
        stager = UCPStager(shared=process)
        group = dist.new_group(backend="gloo")
        futures = []
        for n in range(2):
            if futures:
                futures[-1].result(timeout=100)
            futures.append(
                dcp.async_save(
                    live, storage_writer=UCPStorageWriter(f"{url}/{n}"), planner=UCPSavePlanner(), process_group=group,
                    async_checkpointer_type=kind, async_stager=stager,
                )
            )  # fmt: skip
            live["w"].to_local().add_(100)
            live["b"].add_(100)
        futures[-1].result(timeout=100)
        dist.barrier()
        good = True
        for n in range(2):
            got = {"w": dtensor(full, mesh, [Shard(1)], 0.0), "b": torch.zeros(5)}
            ucp_dcp.load(got, f"{url}/{n}")
            whole = got["w"].full_tensor() if isinstance(got["w"], DTensor) else got["w"]
            good &= torch.equal(whole, full + 100 * n) and torch.equal(got["b"], torch.ones(5) + 100 * n)
        dist.barrier()
    _async_process_executor._CHECKPOINT_PROCESS = None
    return good


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "process"])
def test_on_a_mesh(ranks: Any, tmp_path: Path, process: bool) -> None:
    assert ranks.run(2, on_a_mesh, str(tmp_path / "c"), process, timeout=200) == [True, True]


def test_a_copy_for_another_process_is_one_open_file() -> None:
    """torch sends an open file for each storage of a state dict."""
    from multiprocessing.reduction import ForkingPickler

    def sent(state: dict[str, Any]) -> int:
        before = len(os.listdir("/proc/self/fd"))
        data = ForkingPickler.dumps(state)
        assert len(data) > 1000
        return len(os.listdir("/proc/self/fd")) - before

    state = {f"t{i}": torch.full((4,), float(i)) for i in range(100)}
    shared = UCPStager(shared=True).stage(state)
    plain = UCPStager().stage(state)
    assert sent(shared) <= 3 and sent(plain) <= 3
    assert torch.equal(plain["t7"], state["t7"])
