"""The six operators and the seven patterns of the Universal Checkpointing paper (arXiv 2406.18820, 5.3), one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucp_dcp
from ucp_dcp.layout import Layout, collect
from ucp_dcp.spec import LayoutSpec

from .common import Gathered, layout_of, local_tensor, rule
from .oracle import OracleStep, coordinates, cut, held, numbered


def test_extract() -> None:
    """Extract: the parameter fragments of one rank's state, each with its place in the global tensor; nothing is copied."""
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 1})), rule("b", ("tp", "Replicate", {}))], {"tp": (1, 2)})
    state = {"model": {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(4)}}
    w, b = layout.fragments(state)
    assert (w.fqn, w.shape, w.box.offset, w.box.size, w.pattern) == ("w", (3, 4), (0, 2), (3, 2), "tp: Shard(1)")
    assert (b.fqn, b.shape, b.box.offset, b.replicated) == ("b", (4,), (0,), True)
    assert w.view.data_ptr() == state["model"]["w"].data_ptr()


PATTERNS: list[tuple[str, tuple[int, ...], dict[str, int], list[OracleStep]]] = [
    ("unique", (4, 3), {"pp": 3}, [("pp", "Unique", {"at": [2]})]),
    ("replicate", (5,), {"dp": 3}, [("dp", "Replicate", {})]),
    ("shard_v", (6, 4), {"tp": 3}, [("tp", "Shard", {"dim": 0})]),
    ("shard_h", (6, 5), {"tp": 3}, [("tp", "Shard", {"dim": 1})]),
    ("shard_hy", (6, 5), {"tp": 2, "dp": 2}, [("tp", "Shard", {"dim": 1}), ("dp", "Shard", {"dim": 0})]),
    # (a) of figure 5: 4 experts in one [4 * hidden_out, hidden_in], cut along hidden_out; (b) GQA's q, k, v of different sizes.
    ("shard_nc_experts", (4 * 6, 3), {"tp": 2}, [("tp", "Shard", {"dim": 0, "parts": [6, 6, 6, 6]})]),
    ("shard_nc_gqa", (8 + 2 + 2, 3), {"tp": 2}, [("tp", "Shard", {"dim": 0, "parts": [8, 2, 2]})]),
    ("shard_v_zero3", (32, 32), {"dp": 3}, [("dp", "Flat", {})]),  # the worked example of 1024 elements over 3 ranks: 342 each
]


@pytest.mark.parametrize(("name", "shape", "sizes", "steps"), PATTERNS, ids=[p[0] for p in PATTERNS])
def test_union_by_pattern(name: str, shape: tuple[int, ...], sizes: dict[str, int], steps: list[OracleStep]) -> None:
    """Union: the fragments of all ranks are the global tensor, whatever the pattern."""
    full = numbered(shape)
    gathered = Gathered({"w": full})
    arrays = []
    for at in coordinates(sizes):
        if not held(steps, at):
            continue
        arrays.append(cut(full, steps, at, sizes))
        layout = layout_of([rule("w", *steps)], {a: (k, sizes[a]) for a, k in at.items()}, shapes={"w": shape})
        gathered.add(collect({"model": {"w": local_tensor(arrays[-1])}}, layout=layout))
    gathered.check(arrays)
    assert (gathered.counts["w"] >= 1).all()
    if name == "shard_v_zero3":
        assert [a.size for a in arrays] == [342, 342, 340]


def test_union_of_partial() -> None:
    """Partial: fragments of all coordinates are marked, with one box, for the mean to be taken."""
    for k in range(2):
        (f,) = layout_of([rule("alibi", ("tp", "Average", {}))], {"tp": (k, 2)}).fragments({"model": {"alibi": torch.full((3,), float(k))}})
        assert f.average and f.box.size == (3,) and f.writes


def test_strip_pad() -> None:
    """StripPad: the stored size depends on TP, the tensor does not; what is left over is known as padding."""
    for n, local_rows in ((1, 12), (2, 8), (4, 4)):
        padded = n * local_rows
        rows = 0
        for k in range(n):
            layout = layout_of(
                [rule("emb", (None, "Pad", {"dim": 0, "to": padded, "size": 10}), ("tp", "Shard", {"dim": 0}))], {"tp": (k, n)}
            )
            collected = collect({"model": {"emb": torch.zeros(local_rows, 2)}}, layout=layout)
            assert {f.shape for f in collected.fragments} == {(10, 2)}
            kept = sum(f.view.numel() for f in collected.fragments)
            assert kept + sum(p.view.numel() for p in collected.padding) == local_rows * 2
            rows += kept // 2
        assert rows == 10


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_ucp_info(source: int, target: int, shape: list[int], flat: bool) -> None:
    """UcpInfo: the same spec with other coordinates says what each target rank needs, and the source's fragments have all of it."""
    step: OracleStep = ("dp", "Flat", {}) if flat else ("dp", "Shard", {"dim": 0})
    full = numbered(tuple(shape))
    stored = np.zeros(full.shape, dtype=np.int64)
    for k in range(source):
        layout = layout_of([rule("w", step)], {"dp": (k, source)}, shapes={"w": shape})
        for f in layout.fragments({"model": {"w": local_tensor(cut(full, [step], {"dp": k}, {"dp": source}))}}):
            stored[f.box.slices()] = f.view.numpy()
    for k in range(target):
        expected = cut(full, [step], {"dp": k}, {"dp": target})
        local = torch.zeros(expected.shape, dtype=torch.int64)
        for f in layout_of([rule("w", step)], {"dp": (k, target)}, shapes={"w": shape}).fragments({"model": {"w": local}}):
            f.view.copy_(torch.from_numpy(stored[f.box.slices()].copy()))
        np.testing.assert_array_equal(local.numpy(), expected)


SPEC = """
ucp_spec: 1
axes: [tp, dp]
variables: {names: params}
optimizer: {states: {step: scalar, fp32: master}}
rules:
  - match: emb
    steps: [{pad: "Pad(0, to=(10 + 4*tp.size - 1) // (4*tp.size) * (4*tp.size), size=10)"}, {tp: Shard(0)}]
  - match: fc
    steps: [{tp: "Shard(0, parts=[4, 4])"}]
  - match: flat
    steps: [{dp: "FlatBuffer(params=names, pad_to=2*dp.size)"}]
"""
FULL = {"emb": torch.arange(20.0).reshape(10, 2) + 1, "fc": torch.arange(24.0).reshape(8, 3) + 101}


def _rank_state(rank: int, tp: int, dp: int, filled: bool) -> tuple[dict[str, Any], Layout]:
    t, d = divmod(rank, dp)
    padded = torch.cat([FULL["emb"], torch.zeros(-(-10 // (4 * tp)) * 4 * tp - 10, 2)])
    model = {"emb": padded.chunk(tp)[t].clone(), "fc": torch.cat([part.chunk(tp)[t] for part in FULL["fc"].chunk(2)])}
    flat = torch.cat([v.reshape(-1) for v in model.values()])
    flat = torch.cat([flat, torch.zeros(-flat.numel() % (2 * dp))])
    # Padding rows of the embedding have no moments either.
    state = {
        "model": model,
        "optimizer": {"state": {"flat": {"fp32": flat.chunk(dp)[d].clone(), "exp_avg": -flat.chunk(dp)[d], "step": torch.tensor(4.0)}}},
    }
    if not filled:
        state = torch.utils._pytree.tree_map(lambda x: torch.full_like(x, -7), state)
    layout = Layout(LayoutSpec.parse(SPEC), {"tp": (t, tp), "dp": (d, dp)}, variables={"names": ["emb", "fc"]})
    return state, layout


def _save(rank: int, world: int, url: str) -> None:
    state, layout = _rank_state(rank, 2, 2, True)
    ucp_dcp.save(state, url, layout=layout)


def _load(rank: int, world: int, url: str, tp: int, dp: int) -> None:
    state, layout = _rank_state(rank, tp, dp, False)
    ucp_dcp.load(state, url, layout=layout)
    expected, _ = _rank_state(rank, tp, dp, True)
    for root in ("emb", "fc"):
        assert torch.equal(state["model"][root], expected["model"][root]), root
    for name, value in expected["optimizer"]["state"]["flat"].items():
        assert torch.equal(state["optimizer"]["state"]["flat"][name], value), name


def test_save_and_load(ranks: Any, tmp_path: Path) -> None:
    """Save and Load: TP 2 x DP 2 with ZeRO-1 and a padded vocabulary onto TP 1 x DP 3, TP 4 x DP 1 and TP 1 x DP 1, bit for bit."""
    ranks.run(4, _save, str(tmp_path / "c"))
    for tp, dp in ((1, 3), (4, 1), (1, 1), (2, 2)):
        ranks.run(tp * dp, _load, str(tmp_path / "c"), tp, dp)
