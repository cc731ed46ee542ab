"""What a state dict may hold and how it is asked for: objects, PerRank, casts, D12, strictness, renames, async saves, Average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec, PerRank, Role, UCPLoadPlanner, UCPSavePlanner, UCPStorageReader, UCPStorageWriter
from ucp_dcp.errors import DtypeMismatchError, MissingKeysError

ROOTS = {"model": "model", "optim": "optimizer"}


def per_rank_round(rank: int, world: int, url: str, save: bool) -> Any:
    if save:
        ucp_dcp.save({"rng": PerRank({"seed": 100 + rank, "state": torch.arange(3) + rank}), "shared": [1, 2]}, url)
        return None
    state: dict[str, Any] = {"rng": PerRank(None), "shared": None}
    ucp_dcp.load(state, url)
    return state


def test_per_rank_objects_come_back_to_their_rank(ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ranks.run(3, per_rank_round, url, True)
    for rank, state in enumerate(ranks.run(2, per_rank_round, url, False)):
        value = next(iter(state["rng"].values()))
        assert value["seed"] == 100 + rank and value["state"].tolist() == [rank, rank + 1, rank + 2] and state["shared"] == [1, 2]
    found = [next(iter(state["rng"].values())) for state in ranks.run(4, per_rank_round, url, False)]
    assert [value["seed"] for value in found[:3]] == [100, 101, 102] and found[3] is None  # a new rank keeps what it has
    with pytest.raises(MissingKeysError, match="per-rank objects are not in the checkpoint: 'other'"):
        ucp_dcp.load({"other": PerRank(None)}, url)


def low_precision_checkpoint(path: Path, with_master: bool = True) -> torch.Tensor:
    """A bf16 weight, its fp32 master, Adam state, under declared roles."""
    master = torch.linspace(-1, 1, 12).reshape(3, 4)
    spec = LayoutSpec.from_dict(
        {
            "ucp_spec": 1,
            "name": "one",
            "axes": [],
            "rules": [{"match": "**"}],
            "optimizer": {"states": {"fp32": "master", "step": "scalar"}},
        }
    )
    state: dict[str, Any] = {"exp_avg": torch.ones(3, 4), "step": torch.tensor(3.0)}
    if with_master:
        state["fp32"] = master
    ucp_dcp.save({"model": {"w": master.bfloat16()}, "optim": {"state": {"w": state}}}, path, layout=Layout(spec, {}, roots=ROOTS))
    return master


@pytest.mark.parametrize(
    ("dtype", "source", "expect"),
    [
        (torch.bfloat16, "auto", "weight"),
        (torch.float32, "auto", "master"),
        (torch.float16, "auto", "master"),
        (torch.float32, "weight", "weight"),
        (torch.bfloat16, "master", "master"),
    ],
)
def test_which_copy_answers_a_weight(tmp_path: Path, dtype: torch.dtype, source: Any, expect: str) -> None:
    master = low_precision_checkpoint(tmp_path)
    state = {"model": {"w": torch.zeros(3, 4, dtype=dtype)}}
    report = ucp_dcp.load(state, tmp_path, roots=ROOTS, source=source)
    stored = master if expect == "master" else master.bfloat16()
    assert torch.equal(state["model"]["w"], stored.to(dtype))
    assert report.source == {"model.w": expect}
    assert report.cast == ({} if stored.dtype == dtype else {"model.w": (str(stored.dtype)[6:], str(dtype)[6:])})


def test_a_master_is_not_made_from_a_narrow_weight_silently(tmp_path: Path) -> None:
    spec = LayoutSpec.from_dict(
        {"ucp_spec": 1, "name": "one", "axes": [], "rules": [{"match": "**"}], "optimizer": {"states": {"fp32": "master"}}}
    )
    layout = Layout(spec, {}, roots=ROOTS)
    master = low_precision_checkpoint(tmp_path, with_master=False)
    state = {"optim": {"state": {"w": {"fp32": torch.zeros(3, 4)}}}}
    with pytest.raises(DtypeMismatchError, match="master_from_weight"):
        ucp_dcp.load(state, tmp_path, layout=layout)
    report = ucp_dcp.load(state, tmp_path, layout=layout, master_from_weight=True)
    assert torch.equal(state["optim"]["state"]["w"]["fp32"], master.bfloat16().float())
    assert list(report.source.values()) == ["weight"]


def test_canonical_names_whatever_the_roots_were_called(tmp_path: Path) -> None:
    master = low_precision_checkpoint(tmp_path)
    ckpt = ucp_dcp.open_checkpoint(tmp_path)
    assert ckpt.names() == ["model.w", "optim.state.w.exp_avg", "optim.state.w.master", "optim.state.w.step"]
    assert torch.equal(ckpt["optim.state.w.master"][1:], master[1:])
    assert ckpt["optim.state.w.master"].role == Role.MASTER and ckpt["optim.state.w.master"].key == "optim.state.w.fp32"
    # other root names at load: (role, fqn, state) is what counts
    state = {"net": {"w": torch.zeros(3, 4)}, "opt": {"state": {"w": {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(0.0)}}}}
    ucp_dcp.load(state, tmp_path, roots={"net": "model", "opt": "optimizer"})
    assert torch.equal(state["net"]["w"], master) and state["opt"]["state"]["w"]["step"].item() == 3.0


def test_strictness_include_exclude_rename(tmp_path: Path) -> None:
    ucp_dcp.save({"a": {"x": torch.ones(2), "y": torch.full((2,), 2.0)}, "b": torch.full((2,), 3.0), "n": 7}, tmp_path)
    state: dict[str, Any] = {"a": {"x": torch.zeros(2), "z": torch.zeros(2)}, "m": 0}
    report = ucp_dcp.load(state, tmp_path, strict=False)
    assert report.missing == ["a.z", "m"] and report.unexpected == ["a.y", "b", "n"] and state["a"]["x"].tolist() == [1.0, 1.0]
    state = {"a": {"x": torch.zeros(2), "y": torch.zeros(2)}, "b": torch.zeros(2), "n": 0}
    report = ucp_dcp.load(state, tmp_path, include=["a.*"], exclude=["a.y"])
    assert report.loaded == ["a.x"] and state["b"].tolist() == [0.0, 0.0] and state["n"] == 0 and state["a"]["y"].tolist() == [0.0, 0.0]
    state = {"q": torch.zeros(2)}
    ucp_dcp.load(state, tmp_path, rename={"q": "b"})
    assert state["q"].tolist() == [3.0, 3.0]
    ucp_dcp.load(state, tmp_path, rename=lambda key: "a.y" if key == "q" else None)
    assert state["q"].tolist() == [2.0, 2.0]
    with pytest.raises(MissingKeysError, match=r"closest stored key is 'a\.x'"):
        ucp_dcp.load({"a": {"xx": torch.zeros(2)}}, tmp_path)


def test_numbers_and_one_element_tensors_answer_each_other(tmp_path: Path) -> None:
    ucp_dcp.save({"step": 5, "lr": torch.tensor(0.25), "k": torch.tensor([3])}, tmp_path)
    state: dict[str, Any] = {"step": torch.tensor(0.0), "lr": 0.0, "k": 0}
    ucp_dcp.load(state, tmp_path)
    assert state["step"].item() == 5.0 and state["lr"] == 0.25 and state["k"] == 3


def test_ordinary_odd_tensors(tmp_path: Path) -> None:
    """0-d, empty, strided, transposed, expanded, bool, complex, bf16, an nn.Parameter."""
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "zero_d": torch.tensor(4.0),
        "empty": torch.zeros(0, 3),
        "strided": base[::2, 1::2],
        "transposed": base.t(),
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "size1": torch.ones(1, 1, 3),
    }
    ucp_dcp.save(state, tmp_path)
    got = {k: torch.zeros_like(v).contiguous() for k, v in state.items()}
    got["transposed"] = torch.zeros(4, 6).t()
    ucp_dcp.load(got, tmp_path)
    for key, value in state.items():
        assert torch.equal(got[key], value), key
    stock = {k: torch.zeros_like(v).contiguous() for k, v in state.items()}
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(stock[k], v) for k, v in state.items())


def async_round(rank: int, world: int, url: str, process: bool) -> list[float]:
    live = torch.arange(8.0) + rank * 0
    group = dist.new_group(backend="gloo")
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    future = dcp.async_save(
        {"model": {"w": live}, "rng": PerRank(rank)},
        storage_writer=UCPStorageWriter(url),
        planner=UCPSavePlanner(roots={"model": "model"}),
        process_group=group,
        async_checkpointer_type=kind,
    )
    live.fill_(-1.0)  # training goes on
    future.result()
    state = {"model": {"w": torch.zeros(8)}, "rng": PerRank(None)}
    dcp.load(state, storage_reader=UCPStorageReader(url), planner=UCPLoadPlanner(roots={"model": "model"}))
    assert next(iter(state["rng"].values())) == rank
    return state["model"]["w"].tolist()


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_async_save(ranks, tmp_path: Path, process: bool) -> None:
    assert ranks.run(2, async_round, str(tmp_path / "c"), process, timeout=110) == [list(map(float, range(8)))] * 2


AVERAGE = {
    "ucp_spec": 1,
    "name": "drift",
    "axes": ["tp", "dp"],
    "rules": [{"match": "alibi", "steps": [{"tp": "Average()"}]}, {"match": "w", "steps": [{"tp": "Shard(0)"}]}],
}


def average_round(rank: int, world: int, url: str) -> None:
    tp, dp = rank % 2, rank // 2
    layout = Layout(LayoutSpec.from_dict(AVERAGE), coords={"tp": (tp, 2), "dp": (dp, 2)}, roots={"model": "model"})
    drifted = torch.tensor([1.0, 2.0, 1e-3]) * (1 + tp)
    state = {"model": {"alibi": drifted, "w": torch.full((2, 2), float(tp))}}
    ucp_dcp.save(state, url, layout=layout)
    assert torch.equal(drifted, torch.tensor([1.0, 2.0, 1e-3]) * (1 + tp))  # nothing of the user's is changed


def test_average_is_the_mean_over_its_axis_only(ranks, tmp_path: Path) -> None:
    ranks.run(4, average_round, str(tmp_path / "c"))
    got = ucp_dcp.open_checkpoint(tmp_path / "c")["model.alibi"][:]
    one = torch.tensor([1.0, 2.0, 1e-3])
    expected = ((one.double() + (one * 2).double()) / 2).float()
    assert torch.equal(got, expected)
