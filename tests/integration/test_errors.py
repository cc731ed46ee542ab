"""Bad input is one clear error of our hierarchy on every rank; nothing is written, nothing is half loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worlds
from torch.distributed.checkpoint.api import CheckpointException

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec
from ucp_dcp.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DtypeMismatchError,
    FormatError,
    LayoutError,
    MissingKeysError,
    PlanError,
    ReplicaMismatchError,
    ShapeMismatchError,
    UCPError,
    UnsafePickleError,
    UnsupportedError,
)


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def failing_save(rank: int, world: int, case: str, url: str) -> tuple[type, str]:
    """Every rank reports which error it got."""
    state: dict = {"model": {"w": torch.ones(4, 3)}}
    args: dict = {}
    if case == "replicas":
        state = {"w": torch.full((4, 3), float(rank))}
    elif case == "objects":
        state = {"rng": {"seed": rank}}
    elif case == "hole":  # two ranks believe they are coordinate 0
        spec = LayoutSpec.from_dict({"ucp_spec": 1, "name": "x", "axes": ["tp"], "rules": [{"match": "w", "steps": [{"tp": "Shard(0)"}]}]})
        args["layout"] = Layout(spec, coords={"tp": (0 if rank == 1 else rank, world)}, roots={"model": "model"})
    elif case == "no rule":
        spec = LayoutSpec.from_dict({"ucp_spec": 1, "name": "x", "axes": ["tp"], "rules": [{"match": "v", "steps": [{"tp": "Shard(0)"}]}]})
        args["layout"] = Layout(spec, coords={"tp": (rank, world)}, roots={"model": "model"})
    elif case == "one rank fails":
        state = {"x": (lambda: 0) if rank == 2 else 1}
    elif case == "shapes":
        state = {"w": torch.ones(4, 3 + (rank == 3))}
    try:
        ucp_dcp.save(state, url, **args)
    except UCPError as error:
        return type(error), str(error)
    return type(None), ""


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("replicas", ReplicaMismatchError, "'w'"),
        ("objects", ReplicaMismatchError, "rng.seed"),
        ("hole", CoverageError, "ranks [0, 1]|both hold|nobody holds"),
        ("no rule", LayoutError, "w"),
        ("one rank fails", PlanError, "'x'"),
        ("shapes", ReplicaMismatchError, "rank 3"),
    ],
)
def test_a_bad_save_fails_on_every_rank_and_writes_nothing(ranks, tmp_path: Path, case: str, kind: type, text: str) -> None:
    (tmp_path / "c").mkdir()
    results = ranks.run(4, failing_save, case, str(tmp_path / "c"))
    assert [r[0] for r in results] == [kind] * 4
    assert all(any(t in r[1] for t in text.split("|")) for r in results), results[0][1]
    assert len({r[1] for r in results}) == 1
    assert files(tmp_path) == []


def failing_load(rank: int, world: int, case: str, url: str) -> tuple[type, str, bool]:
    state: dict = {"a": torch.full((4, 3), 9.0), "n": -1, "b": torch.full((6,), 9.0)}
    kwargs: dict = {}
    if case == "missing on one rank" and rank == 1:
        state["nope"] = torch.zeros(1)
    elif case == "shape":
        state["b"] = torch.full((2, 3), 9.0)
    elif case == "dtype":
        state["b"] = torch.full((6,), 9, dtype=torch.int64)
    elif case == "exact":
        del state["b"]
        kwargs["strict"] = "exact"
    elif case == "cast forbidden":
        state["b"] = torch.full((6,), 9.0, dtype=torch.float64)
        kwargs["dtype"] = "error"
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    try:
        ucp_dcp.load(state, url, **kwargs)
    except UCPError as error:
        return type(error), str(error), worlds.same(state, before) == []
    return type(None), "", False


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("missing on one rank", MissingKeysError, "nope"),
        ("shape", ShapeMismatchError, "'b'"),
        ("dtype", DtypeMismatchError, "'b'"),
        ("exact", PlanError, "'b'"),
        ("cast forbidden", DtypeMismatchError, "'b'"),
    ],
)
def test_a_bad_load_fails_on_every_rank_and_touches_nothing(ranks, tmp_path: Path, case: str, kind: type, text: str) -> None:
    ucp_dcp.save({"a": torch.ones(4, 3), "n": 5, "b": torch.arange(6.0)}, tmp_path / "c")
    for found, message, untouched in ranks.run(3, failing_load, case, str(tmp_path / "c")):
        assert found is kind and text in message and untouched, (found, message)


def test_all_problems_come_together(tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "c")
    with pytest.raises(PlanError) as caught:
        ucp_dcp.load({"a": torch.zeros(5), "b": torch.zeros(4, dtype=torch.int32), "c": torch.zeros(1)}, tmp_path / "c")
    assert all(name in str(caught.value) for name in ("3 problems", "'a'", "'b'", "'c'"))


@pytest.mark.parametrize("url", ["nothing/here", "."])
def test_no_checkpoint(tmp_path: Path, url: str) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises((CheckpointNotFoundError, FormatError)):
        ucp_dcp.open_checkpoint(tmp_path / url)
    with pytest.raises((CheckpointNotFoundError, FormatError)):
        ucp_dcp.load({"a": torch.zeros(1)}, tmp_path / url)


class Evil:
    """Would make a file if anybody unpickled it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_objects_never_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    dcp.save({"a": torch.ones(2), "evil": Evil(str(marker))}, checkpoint_id=tmp_path / "stock", no_dist=True)
    marker.unlink(missing_ok=True)  # DCP's own dedup and pickling do not call it, but be sure
    for reader in (ucp_dcp.UCPStorageReader(tmp_path / "stock"), dcp.FileSystemReader(tmp_path / "stock")):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"evil": None}, storage_reader=reader, planner=ucp_dcp.UCPLoadPlanner(), no_dist=True)
        assert isinstance(caught.value.failures[0][0], UnsafePickleError)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"evil": None}, storage_reader=ucp_dcp.UCPStorageReader(tmp_path / "stock"), no_dist=True)
    assert isinstance(caught.value.failures[0][0], UnsafePickleError)
    assert not marker.exists()


def broken_write(rank: int, world: int, url: str) -> tuple[type, str]:
    """One rank's disk is full in the middle of its data file."""
    from ucp_dcp.errors import StoreError
    from ucp_dcp.storage.local import LocalStore

    if rank == 1:
        original = LocalStore.create

        def create(self, path):
            raise StoreError(f"{path}: no space left on device")

        LocalStore.create = create
    try:
        ucp_dcp.save({"a": torch.full((100,), 2.0), "b": torch.full((100_000,), 3.0)}, url)
    except UCPError as error:
        return type(error), str(error)
    finally:
        if rank == 1:
            LocalStore.create = original
    return type(None), ""


def test_a_failed_write_keeps_the_old_checkpoint_and_leaves_no_rest(ranks, tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.ones(3)}, tmp_path)
    before = {p: p.read_bytes() for p in files(tmp_path)}
    for kind, text in ranks.run(3, broken_write, str(tmp_path)):
        assert issubclass(kind, UCPError) and "no space left" in text
    assert {p: p.read_bytes() for p in files(tmp_path)} == before


def test_what_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="enable_plan_caching"):
        ucp_dcp.UCPSavePlanner(enable_plan_caching=True)
    writer = ucp_dcp.UCPStorageWriter("memory://x")
    with pytest.raises(UnsupportedError, match="use_collectives"):
        dcp.save({"a": torch.ones(1)}, storage_writer=writer, planner=ucp_dcp.UCPSavePlanner(), use_collectives=False)


def load_with_other_ranks_alone(rank: int, world: int, url: str) -> list[float]:
    """A sub-group loads while the other ranks do something else."""
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return []
    state = {"a": torch.zeros(3)}
    ucp_dcp.load(state, url, process_group=group)
    ucp_dcp.save(state, url + "_again", process_group=group)
    return state["a"].tolist()


def test_sub_groups(ranks, tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.arange(3.0)}, tmp_path / "c")
    assert ranks.run(4, load_with_other_ranks_alone, str(tmp_path / "c")) == [[], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []]
    got = {"a": torch.zeros(3)}
    ucp_dcp.load(got, f"{tmp_path}/c_again")
    assert got["a"].tolist() == [0.0, 1.0, 2.0]
