"""Any to any in one process: every layout as source and as target with every optimizer; A to B to C; wrong layouts are noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job
import pytest
import torch
from cuts import FAMILIES, GRIDS, WORLDS
from job import OPTIMIZERS
from moves import check_stored, checkpoint, get, put, walk
from simulated import as_rank

from ucp_dcp.errors import UCPError

SOURCES = ("ddp_2", "fsdp_3", "hsdp_2x3", "tp_3", "fsdp_tp_3x2", "zero1_1x1x4", "zero3_5", "tp_zero1_1x2x3", "pp_tp_zero1_2x2x2")
TARGETS = ("ddp_1", "fsdp_2", "hsdp_2x2", "tp_2", "fsdp_tp_2x2", "zero1_1x1x3", "zero3_2", "tp_zero1_1x2x2", "pp_tp_zero1_2x2x1")
# The same layouts on other numbers of ranks, and the same world on both sides.
MORE = (
    ("fsdp_4", "fsdp_3"), ("fsdp_2", "fsdp_3"), ("fsdp_1", "pp_tp_zero1_2x1x3"), ("pp_tp_zero1_2x1x3", "fsdp_1"),
    ("zero1_1x1x3", "zero1_1x1x2"), ("zero3_3", "zero3_2"), ("zero3_2", "zero3_3"), ("tp_zero1_1x4x1_kv2", "tp_zero1_1x3x1"),
    ("tp_zero1_1x3x1", "tp_zero1_1x4x1_kv2"), ("tp_zero1_1x4x1_kv2", "tp_3"), ("pp_tp_zero1_2x2x2", "pp_tp_zero1_2x2x2"),
    ("fsdp_tp_2x2", "fsdp_tp_3x2"), ("hsdp_2x2", "hsdp_2x2"),
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint of each world and optimizer is, once somebody needed it."""
    return tmp_path_factory.mktemp("matrix")


def pairs_of(optimizer: str) -> list[tuple[str, str]]:
    """All pairs of layouts; with masters only those in which a layout has masters: the others would be AdamW's once more."""
    return [(s, t) for s, t in itertools.product(SOURCES, TARGETS) if optimizer != "mixed" or WORLDS[s].plain or WORLDS[t].plain]


def pairs_walked(optimizer: str, thorough: bool) -> list[tuple[str, str]]:
    """Every pair with AdamW and with masters; with the other three optimizers a third of the pairs each, together all (thorough: all)."""
    others = [o for o in OPTIMIZERS if o not in ("adamw", "mixed")]
    pairs = pairs_of(optimizer)
    if thorough or optimizer not in others:
        return pairs
    return [(s, t) for s, t in pairs if (SOURCES.index(s) + TARGETS.index(t)) % len(others) == others.index(optimizer)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_pair(ranks: Any, root: Path, optimizer: str, thorough: bool) -> None:
    """Two processes, because there are two cores; each pair is in one of them."""
    pairs = pairs_walked(optimizer, thorough)
    done = ranks.run(2, walk, pairs, optimizer, root)
    assert sorted([*done[0], *done[1]]) == sorted(pairs)


@pytest.mark.parametrize(("source", "target"), MORE)
def test_other_world_sizes(root: Path, source: str, target: str, thorough: bool) -> None:
    """One optimizer each (``--thorough``: all)."""
    for optimizer in OPTIMIZERS if thorough else [OPTIMIZERS[MORE.index((source, target)) % len(OPTIMIZERS)]]:
        get(target, optimizer, checkpoint(root, source, optimizer))


def test_the_matrix_has_every_pair() -> None:
    """What ``test_every_pair`` walks is all pairs of the issue's layouts, with all of its optimizers (``--thorough``: each with each)."""
    names = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "zero1", "zero3", "tp_zero1", "pp_tp_zero1")
    assert names == FAMILIES and OPTIMIZERS == ("adamw", "sgd", "adafactor", "muon", "mixed")
    others = [pair for optimizer in ("sgd", "adafactor", "muon") for pair in pairs_walked(optimizer, False)]
    assert sorted(others) == sorted(pairs_of("adamw")) == sorted(pairs_walked("adamw", False))
    for optimizer in OPTIMIZERS:
        walked = {(WORLDS[s].family, WORLDS[t].family) for s, t in pairs_of(optimizer)}
        without_masters = {"ddp", "fsdp", "hsdp", "tp", "fsdp_tp"} if optimizer == "mixed" else set()
        assert walked == set(itertools.product(names, names)) - set(itertools.product(without_masters, without_masters))
        counts = {(WORLDS[s].ranks, WORLDS[t].ranks) for s, t in pairs_of(optimizer)}
        assert {(3, 2), (4, 3), (5, 1), (2, 3), (6, 4)} <= counts
    for world in (w for w in WORLDS.values() if w.name in (*SOURCES, *TARGETS) and not w.plain):
        with as_rank(world.ranks - 1, world.ranks):
            adamw, mixed = (world.build(world.ranks - 1, optimizer, 0.0) for optimizer in ("adamw", "mixed"))
        assert job.differences(mixed, job.spoil(adamw, 0.0)) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_two_elements_of_the_truth_are_equal(optimizer: str) -> None:
    """Else a swap of two of them would not show. What junk is, and what a bf16 weight is, differs from all of it, too."""
    values = [v.reshape(-1) for states in job.truth(optimizer).values() for v in states.values()]
    junk = torch.tensor([job.junk(rank) for rank in range(8)])
    everything = torch.cat([*values, junk, torch.tensor([0.0, job.STEP - 0.5])])
    assert len(everything.unique()) == len(everything)
    rounded = torch.cat([states[""].to(torch.bfloat16).float().reshape(-1) for states in job.truth(optimizer).values()])
    weights = torch.cat([states[""].reshape(-1) for states in job.truth(optimizer).values()])
    assert (rounded != weights).float().mean() > 0.5
    assert {tuple(states[""].shape) for states in job.truth(optimizer).values()} > {(3,), (7, 5)}


# -- composition ---------------------------------------------------------------------------------------------------------------

TRIPLES = (
    ("fsdp_3", "pp_tp_zero1_2x2x1", "zero3_2"), ("pp_tp_zero1_2x2x2", "fsdp_2", "tp_zero1_1x2x2"), ("zero3_5", "tp_2", "hsdp_2x2"),
    ("tp_3", "zero1_1x1x3", "fsdp_tp_2x2"), ("zero1_1x1x4", "fsdp_tp_2x2", "ddp_1"), ("ddp_2", "tp_zero1_1x2x2", "pp_tp_zero1_2x2x1"),
    ("hsdp_2x3", "zero3_2", "fsdp_2"), ("tp_zero1_1x2x3", "ddp_1", "tp_2"), ("fsdp_tp_3x2", "hsdp_2x2", "zero1_1x1x3"),
)  # fmt: skip


@pytest.mark.parametrize(("a", "b", "c"), TRIPLES)
def test_a_to_b_to_c_is_a_to_c(root: Path, tmp_path: Path, a: str, b: str, c: str, thorough: bool) -> None:
    """What was loaded under B, saved again, is stored as A stored it, and loads under C as straight from A.

    One optimizer for each triple (``--thorough``: all).
    """
    for optimizer in OPTIMIZERS if thorough else [OPTIMIZERS[TRIPLES.index((a, b, c)) % len(OPTIMIZERS)]]:
        through, url = get(b, optimizer, checkpoint(root, a, optimizer)), tmp_path / optimizer
        put(b, optimizer, url, through.__getitem__)
        check_stored(b, optimizer, url)
        for straight, twice in zip(get(c, optimizer, checkpoint(root, a, optimizer)), get(c, optimizer, url), strict=True):
            assert job.differences(twice, job.spoil(straight, 0.0)) == []


def test_every_layout_is_in_the_middle_once() -> None:
    for place in zip(*TRIPLES, strict=True):
        assert sorted(WORLDS[w].family for w in place) == sorted(FAMILIES)


# -- the matrix can fail ---------------------------------------------------------------------------------------------------------


def _steps(given: dict[str, Any], name: str) -> list[dict[str, str]]:
    return next(r for r in given["spec"]["rules"] if r["match"].endswith(name))["steps"]  # type: ignore[no-any-return]


def _qkv_plain(given: dict[str, Any]) -> None:
    _steps(given, "qkv.weight")[0]["tp"] = "Shard(0)"


def _qkv_parts_swapped(given: dict[str, Any]) -> None:
    _steps(given, "qkv.weight")[0]["tp"] = "Shard(0, parts=[4, 8, 4])"


def _down_by_rows(given: dict[str, Any]) -> None:
    _steps(given, "down.weight")[0]["tp"] = "Shard(0)"


def _gate_up_plain(given: dict[str, Any]) -> None:
    _steps(given, "gate_up.weight")[0]["tp"] = "Shard(0)"


def _pad_after_tp(given: dict[str, Any]) -> None:
    steps = _steps(given, "embed.weight")
    steps[1:] = [{"tp": "Shard(0)"}, {"pad": "Pad(0, to=6)"}]


def _buffer_reversed(given: dict[str, Any]) -> None:
    given["variables"]["order0"] = given["variables"]["order0"][::-1]


def _ranks_swapped(given: dict[str, Any]) -> None:
    k, n = given["coords"]["tp"]
    given["coords"]["tp"] = (n - 1 - k, n)


def _stages_swapped(given: dict[str, Any]) -> None:
    rule = next(r for r in given["spec"]["rules"] if r["match"].endswith("router.bias"))
    rule["rename"] = rule["rename"].replace("pp*per", "(1 - pp)*per")


def _data_ranks_swapped(given: dict[str, Any]) -> None:
    k, n = given["coords"]["dp"]
    given["coords"]["dp"] = (n - 1 - k, n)


WRONG = (
    _qkv_plain, _qkv_parts_swapped, _down_by_rows, _gate_up_plain, _pad_after_tp, _buffer_reversed, _ranks_swapped, _stages_swapped,
    _data_ranks_swapped,
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_layout_is_noticed(tmp_path: Path, root: Path, wrong: Callable[[dict[str, Any]], None]) -> None:
    """As source and as target: refused by the package, or the values differ from the truth."""
    world = "pp_tp_zero1_2x2x2"
    grid = next(g for g in GRIDS if g.world().name == world)

    def args(rank: int) -> dict[str, Any]:
        return grid.args(rank, "adamw", wrong)

    with pytest.raises((AssertionError, UCPError)):
        put(world, "adamw", tmp_path / "wrong", args=args)
        check_stored(world, "adamw", tmp_path / "wrong")
    with pytest.raises((AssertionError, UCPError)):
        get(world, "adamw", checkpoint(root, "fsdp_3", "adamw"), args=args)
