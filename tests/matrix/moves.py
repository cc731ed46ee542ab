"""Saving and loading the job under a layout: what every test of the matrix does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job
import simulated
import torch
import torch.distributed as dist
from cuts import WORLDS

import ucp_dcp

Args = simulated.Build


def put(world: str, optimizer: str, url: Any, state_of: simulated.Build | None = None, args: Args | None = None) -> None:
    """Save under a layout, with junk in all padding; another state or other planner arguments than the world's where given."""
    w = WORLDS[world]
    build = state_of or (lambda rank: w.build(rank, optimizer, job.junk(rank)))
    args = args or (lambda rank: w.args(rank, optimizer))
    simulated.save(w.ranks, build, args, url, stock_metadata=False, storage_options={"sync": False})


def get(world: str, optimizer: str, url: Any, args: Args | None = None) -> list[dict[str, Any]]:
    """Load under a layout into memory full of junk, and compare every rank with the truth: padding is zero."""
    w = WORLDS[world]
    wanted: list[Any] = []

    def build(rank: int) -> dict[str, Any]:
        state = w.build(rank, optimizer, 0.0)
        wanted.append(job.spoil(state, job.junk(rank)))
        return state

    results = simulated.load(w.ranks, build, args or (lambda rank: w.args(rank, optimizer)), url)
    for rank, ((state, report), want) in enumerate(zip(results, wanted, strict=True)):
        assert job.differences(state, want) == [], f"rank {rank} of {world}"
        assert report.missing == [] and report.skipped == {}, f"rank {rank} of {world}"
    return [state for state, _ in results]


def check_stored(world: str, optimizer: str, url: Path, *, values: bool = True) -> None:
    """The naive oracle of a checkpoint: whole tensors by name, all of them and nothing else; padding is not stored.

    values: read them all; else only names, shapes and dtypes are compared.
    """
    wanted = {}
    masters = optimizer == "mixed" and WORLDS[world].plain
    for fqn, states in job.truth(optimizer).items():
        wanted[f"model.{fqn}"] = states[""].to(torch.bfloat16) if masters else states[""]
        wanted |= {f"optim.state.{fqn}.{s}": v for s, v in states.items() if s}
        if masters:
            wanted[f"optim.state.{fqn}.master"] = states[""]
        if job.has_step(optimizer, fqn):
            wanted[f"optim.state.{fqn}.step"] = torch.tensor(job.STEP)
    found = ucp_dcp.open_checkpoint(url)
    assert {n: (tuple(found[n].shape), found[n].dtype) for n in found} == {n: (tuple(v.shape), v.dtype) for n, v in wanted.items()}
    if values:
        assert job.differences({name: found[name].read() for name in found}, wanted) == []


def checkpoint(root: Path, world: str, optimizer: str) -> Path:
    """The checkpoint of a world under ``root``, saved by whoever asks first. (Its values: every source is loaded under ``ddp_1``, too.)"""
    url, checked = root / f"{world}-{optimizer}", root / f"{world}-{optimizer}.checked"
    if not checked.exists():
        put(world, optimizer, url)
        check_stored(world, optimizer, url, values=False)
        checked.touch()
    return url


def walk(rank: int, ranks: int, pairs: list[tuple[str, str]], optimizer: str, root: Path) -> list[tuple[str, str]]:
    """Move the state of each pair's source to its target; the pairs that were walked.

    For several processes, to use all cores: process ``rank`` of ``ranks`` takes some of the sources, and simulates all of their ranks.
    """
    dist.barrier()  # the others still connect to this process
    dist.destroy_process_group()
    sources = list(dict.fromkeys(source for source, _ in pairs))[rank::ranks]
    done = []
    for source, target in pairs:
        if source in sources:
            try:
                get(target, optimizer, checkpoint(root, source, optimizer))
            except Exception as error:
                error.add_note(f"{source} -> {target} with {optimizer}")
                raise
            done.append((source, target))
    return done
