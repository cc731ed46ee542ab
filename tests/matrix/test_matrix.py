"""Any to any: every layout as source and as target with every optimizer, in one process; a covering part on real gloo ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import job
import pytest
import simulated
import torch
from job import FAMILIES, OPTIMIZERS, WORLDS

import ucp_dcp

SOURCES = ["ddp2", "fsdp3", "hsdp2x2", "tp3", "fsdp_tp2x2", "zero1_1x1x3", "zero1_1x1x4", "zero3_5", "zero3_4", "tp_zero1_1x2x2",
           "pp_tp_zero1_2x2x2"]  # fmt: skip
TARGETS = ["ddp1", "fsdp1", "fsdp2", "hsdp3x1", "tp2", "fsdp_tp3x2", "zero1_1x1x2", "zero1_1x1x3", "zero3_2", "zero3_3", "tp_zero1_1x2x2",
           "pp_tp_zero1_2x2x1", "pp_tp_zero1_2x1x3"]  # fmt: skip
OPTIONS = {"sync": False}


def put(world: str, optimizer: str, url: Any, state_of: Any = None) -> None:
    """Save under a layout, with junk in all padding."""
    w = WORLDS[world]
    build = state_of or (lambda rank: w.build(rank, optimizer, True, job.JUNK))
    simulated.save(w.ranks, build, lambda rank: w.args(rank, optimizer), url, stock_metadata=False, storage_options=OPTIONS)


def get(world: str, optimizer: str, url: Any) -> list[dict[str, Any]]:
    """Load under a layout and compare every rank with the truth."""
    w = WORLDS[world]
    args = lambda rank: {**w.args(rank, optimizer), "strict": True}  # noqa: E731
    states = []
    results = simulated.load(w.ranks, lambda rank: w.build(rank, optimizer, False, 0.0), args, url)
    for rank, (state, report) in enumerate(results):
        with simulated.as_rank(rank, w.ranks):
            want = w.build(rank, optimizer, True, 0.0)
        assert job.differences(state, want) == [], f"rank {rank} of {world}"
        assert report.missing == [] and report.skipped == {}
        states.append(state)
    return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(world, optimizer) -> its checkpoint, saved once."""
    root: Path = tmp_path_factory.mktemp("matrix")
    there: dict[tuple[str, str], Path] = {}

    def of(world: str, optimizer: str) -> Path:
        if (world, optimizer) not in there:
            there[world, optimizer] = root / f"{world}-{optimizer}"
            put(world, optimizer, there[world, optimizer])
        return there[world, optimizer]

    return of


def test_the_matrix_has_every_pair() -> None:
    assert FAMILIES == ["ddp", "fsdp", "fsdp_tp", "hsdp", "pp_tp_zero1", "tp", "tp_zero1", "zero1", "zero3"]
    assert {WORLDS[s].family for s in SOURCES} == {WORLDS[t].family for t in TARGETS} == set(FAMILIES)
    counts = {(WORLDS[s].ranks, WORLDS[t].ranks) for s in SOURCES for t in TARGETS}
    assert {(3, 2), (4, 3), (5, 1)} <= counts
    assert set(OPTIMIZERS) == {"adamw", "sgd", "adafactor", "muon", "mixed"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_pair(saved: Any, source: str, optimizer: str, thorough: bool) -> None:
    """All pairs with AdamW; with each other optimizer a quarter of them, another one for each (``--thorough``: all)."""
    url = saved(source, optimizer)
    for t, target in enumerate(TARGETS):
        if thorough or optimizer == "adamw" or (t + SOURCES.index(source) + OPTIMIZERS.index(optimizer)) % 4 == 0:
            get(target, optimizer, url)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_stored_is_the_truth(saved: Any, source: str, optimizer: str) -> None:
    """The naive oracle: whole tensors, by name; padding is not stored."""
    checkpoint = ucp_dcp.open_checkpoint(saved(source, optimizer))
    plain = WORLDS[source].family in ("zero1", "zero3", "tp_zero1", "pp_tp_zero1")
    wanted = {}
    for fqn, states in job.truth(optimizer).items():
        master = optimizer == "mixed" and plain
        wanted[f"model.{fqn}"] = states[""].to(torch.bfloat16) if master else states[""]
        wanted |= {f"optim.state.{fqn}.{s}": v for s, v in states.items() if s}
        if master:
            wanted[f"optim.state.{fqn}.master"] = states[""]
        if job.has_step(optimizer, fqn):
            wanted[f"optim.state.{fqn}.step"] = torch.tensor(job.STEP)
    assert sorted(checkpoint) == sorted(wanted)
    for name, value in wanted.items():
        found = checkpoint[name].read()
        assert found.dtype == value.dtype and torch.equal(found, value), name


TRIPLES = [
    ("fsdp3", "pp_tp_zero1_2x2x1", "zero3_2"), ("pp_tp_zero1_2x2x2", "fsdp2", "tp_zero1_1x2x2"), ("zero3_5", "tp2", "hsdp3x1"),
    ("tp3", "zero1_1x1x2", "fsdp_tp3x2"), ("zero1_1x1x4", "fsdp_tp3x2", "ddp1"), ("ddp2", "tp_zero1_1x2x2", "pp_tp_zero1_2x1x3"),
    ("hsdp2x2", "zero3_3", "fsdp1"), ("tp_zero1_1x2x2", "ddp1", "tp2"), ("fsdp_tp2x2", "hsdp3x1", "zero1_1x1x3"),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize(("a", "b", "c"), TRIPLES)
def test_a_to_b_to_c_is_a_to_c(saved: Any, tmp_path: Path, a: str, b: str, c: str, optimizer: str, thorough: bool) -> None:
    """What was loaded under B is saved again and loaded under C: the same as straight from A. One optimizer each (``--thorough``: all)."""
    if not thorough and TRIPLES.index((a, b, c)) % 3 != ["adamw", "adafactor", "muon"].index(optimizer):
        pytest.skip("with --thorough")
    through = get(b, optimizer, saved(a, optimizer))
    put(b, optimizer, tmp_path, lambda rank: through[rank])
    direct, twice = get(c, optimizer, saved(a, optimizer)), get(c, optimizer, tmp_path)
    for one, two in zip(direct, twice, strict=True):
        assert job.differences(two, one) == []


def test_every_layout_is_in_the_middle_once() -> None:
    assert {WORLDS[b].family for _, b, _ in TRIPLES} == set(FAMILIES)


# -- on real ranks -------------------------------------------------------------------------------------------------------------

RING = ["fsdp3", "zero3_3", "hsdp2x2", "tp_zero1_1x2x2", "fsdp_tp2x2", "pp_tp_zero1_2x2x1", "tp2", "zero1_1x1x4", "ddp2", "fsdp3"]


def save_rank(rank: int, ranks: int, world: str, optimizer: str, url: str) -> None:
    w = WORLDS[world]
    ucp_dcp.save(w.build(rank, optimizer, True, job.JUNK), url, **w.args(rank, optimizer))


def load_rank(rank: int, ranks: int, world: str, optimizer: str, url: str) -> list[str]:
    w = WORLDS[world]
    state = w.build(rank, optimizer, False, 0.0)
    ucp_dcp.load(state, url, **w.args(rank, optimizer))
    return job.differences(state, w.build(rank, optimizer, True, 0.0))


@pytest.mark.parametrize(("source", "target"), list(itertools.pairwise(RING)))
def test_on_real_ranks(ranks: Any, tmp_path: Path, source: str, target: str) -> None:
    optimizer = OPTIMIZERS[RING.index(target) % len(OPTIMIZERS)]
    ranks.run(WORLDS[source].ranks, save_rank, source, optimizer, str(tmp_path))
    n = WORLDS[target].ranks
    assert ranks.run(n, load_rank, target, optimizer, str(tmp_path)) == [[]] * n


def test_the_ring_has_every_layout() -> None:
    assert {WORLDS[w].family for w in RING[:-1]} == set(FAMILIES) and RING[0] == RING[-1]
