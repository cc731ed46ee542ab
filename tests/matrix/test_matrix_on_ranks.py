"""Any to any on real gloo ranks: a ring in which every layout is a source once and a target once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import job
import pytest
from cuts import FAMILIES, WORLDS
from job import OPTIMIZERS

import ucp_dcp

RING = (
    "fsdp_3", "zero3_2", "fsdp_tp_2x2", "pp_tp_zero1_2x2x1", "tp_3", "zero1_1x1x2", "hsdp_2x2", "tp_zero1_1x2x2", "ddp_2",
)  # fmt: skip


def save_rank(rank: int, ranks: int, world: str, optimizer: str, url: str) -> None:
    w = WORLDS[world]
    ucp_dcp.save(w.build(rank, optimizer, job.junk(rank)), url, **w.args(rank, optimizer))


def load_rank(rank: int, ranks: int, world: str, optimizer: str, url: str) -> list[str]:
    w = WORLDS[world]
    state = w.build(rank, optimizer, 0.0)
    want = job.spoil(state, job.junk(rank))
    ucp_dcp.load(state, url, **w.args(rank, optimizer))
    return job.differences(state, want)


@pytest.mark.parametrize(("source", "target"), list(itertools.pairwise([*RING, RING[0]])))
def test_on_real_ranks(ranks: Any, tmp_path: Path, source: str, target: str) -> None:
    optimizer = OPTIMIZERS[RING.index(source) % len(OPTIMIZERS)]
    ranks.run(WORLDS[source].ranks, save_rank, source, optimizer, str(tmp_path))
    n = WORLDS[target].ranks
    assert ranks.run(n, load_rank, target, optimizer, str(tmp_path)) == [[]] * n


def test_the_ring_has_every_layout() -> None:
    assert sorted(WORLDS[w].family for w in RING) == sorted(FAMILIES)
