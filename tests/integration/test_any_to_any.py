"""Save under one layout, load under another, on real gloo ranks: bitwise, and readable by stock torch without this package."""

from __future__ import annotations

from pathlib import Path

import pytest
import worlds

import ucp_dcp
from ucp_dcp.planners.report import LoadReport


def save_as(rank: int, world: int, name: str, url: str) -> None:
    case = worlds.WORLDS[name]
    ucp_dcp.save(case.build(rank, True), url, **case.planner_args(rank))


def load_as(rank: int, world: int, names: list[str], url: str) -> dict[str, tuple[list[str], LoadReport]]:
    """Load one checkpoint under several layouts of as many ranks."""
    out = {}
    for name in names:
        case = worlds.WORLDS[name]
        state = case.build(rank, False)
        report = ucp_dcp.load(state, url, **case.planner_args(rank))
        out[name] = worlds.same(state, worlds.unpadded(name, rank, case.build(rank, True))), report
    return out


NAMES = ["fsdp_tp", "hsdp", "tp_zero1", "pp_tp"]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """One checkpoint of each world."""
    root: Path = tmp_path_factory.mktemp("saved")
    for name in [*NAMES, "ddp", "fsdp3"]:
        ranks.run(worlds.WORLDS[name].ranks, save_as, name, str(root / name))
    return root


@pytest.mark.parametrize("source", [*NAMES, "ddp", "fsdp3"])
@pytest.mark.parametrize("ranks_of_target", [pytest.param(n, marks=pytest.mark.slow) if n != 3 else n for n in (1, 2, 3, 4)])
def test_every_layout_loads_under_every_other(ranks, saved, source: str, ranks_of_target: int) -> None:
    targets = [name for name, world in worlds.WORLDS.items() if world.ranks == ranks_of_target]
    for rank, results in enumerate(ranks.run(ranks_of_target, load_as, targets, str(saved / source))):
        assert list(results) == targets
        for target, (differences, report) in results.items():
            assert differences == [], f"rank {rank} of {target}"
            assert report.missing == [] and report.unexpected == [] and report.cast == {}, target


@pytest.mark.parametrize("source", [pytest.param(n, marks=[] if n == "pp_tp" else pytest.mark.slow) for n in NAMES])
def test_stock_torch_reads_every_layout_without_this_package(saved, isolated_python, tmp_path: Path, source: str) -> None:
    import torch

    full = worlds.truth()
    expected = {f"model.{fqn}": v[""] for fqn, v in full.items()}
    expected |= {f"optimizer.state.{fqn}.{s}": v[s] for fqn, v in full.items() for s in worlds.STATES}
    torch.save(expected, tmp_path / "expected.pt")
    isolated_python(
        f"""
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
expected = torch.load({str(tmp_path / "expected.pt")!r})
state = {{k: torch.zeros_like(v) for k, v in expected.items()}}
dcp.load(state, checkpoint_id={str(saved / source)!r})
assert all(torch.equal(state[k], expected[k]) for k in expected)
dcp_to_torch_save({str(saved / source)!r}, {str(tmp_path / "out.pt")!r})
nested = torch.load({str(tmp_path / "out.pt")!r}, weights_only=False)
assert nested["iteration"] == 123 and nested["args"]["lr"] == 1e-3
for key, value in expected.items():
    path = key.split(".", 1)
    found = nested["model"][path[1]] if path[0] == "model" else None
    if found is None:
        name, state_name = path[1][len("state."):].rsplit(".", 1)
        found = nested["optimizer"]["state"][name][state_name]
    assert torch.equal(found, value), key
"""
    )
