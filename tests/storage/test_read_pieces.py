"""The planner of reads: what it must keep, against a byte-by-byte account, on small numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.transfer import pieces
from ucp_dcp.transfer.pieces import layers, plan_file

CALL, TASK = 32, 96


@pytest.fixture(autouse=True)
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALL", CALL)
    monkeypatch.setattr(pieces, "_PIECES", 5)
    monkeypatch.setattr(pieces, "_CALL_COST", 4)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    parts = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), min_size=1, max_size=25))
    at, start, length = 0, [], []
    for hole, size in parts:
        start.append(at + hole)
        length.append(size)
        at += hole + size
    return np.asarray(start), np.asarray(length), at + draw(st.integers(0, 40))


@settings(max_examples=300, deadline=None)
@given(
    wanted(),
    st.sampled_from([0, 8, 16, 64, 128]),
    st.sampled_from(["covered", "strict", "off"]),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
)
def test_every_byte_once_and_blocks_whole(data, block, verify, gap, head, tail) -> None:
    start, length, size = data
    n = len(start)
    address = 1000 + 10 * start
    plan = plan_file(
        start, length, address, np.arange(n), size=size, block=block, verify=verify, gap=gap, task=TASK, widen=(head, tail)
    )  # fmt: skip
    checked = block > 0 and verify != "off"
    # what is read, in order, without overlap, and inside of the file
    assert (plan.length > 0).all() and (plan.start[1:] >= plan.start[:-1] + plan.length[:-1]).all()
    assert plan.start[0] >= 0 and plan.start[-1] + plan.length[-1] <= size
    read = np.zeros(size, dtype=np.int64)
    into = np.full(size, -1)
    unit = np.full(size, -1)
    for s, k, a, u, f in zip(plan.start, plan.length, plan.address, plan.unit, plan.filler, strict=True):
        read[s : s + k] += 1
        if not f:
            into[s : s + k] = a + np.arange(k)
            unit[s : s + k] = u
    assert read.max() == 1 and plan.bytes == read.sum()
    for i in range(n):
        assert (into[start[i] : start[i] + length[i]] == address[i] + np.arange(length[i])).all()
        assert (unit[start[i] : start[i] + length[i]] == i).all()
    want = np.zeros(size, dtype=bool)
    for s, k in zip(start, length, strict=True):
        want[s : s + k] = True
    # calls are consecutive, small, and in one block; filler fits the buffer
    assert plan.call[0] == 0 and plan.call[-1] == len(plan.start) and plan.task[0] == 0 and plan.task[-1] == len(plan.call_start)
    for c in range(len(plan.call_start)):
        own = slice(plan.call[c], plan.call[c + 1])
        s, k = plan.start[own], plan.length[own]
        assert 1 <= len(s) <= 5 and (s[1:] == s[:-1] + k[:-1]).all()
        assert plan.call_start[c] == s[0] and plan.call_length[c] == k.sum() <= CALL
        waste = np.sort(plan.address[own][plan.filler[own]])
        sizes = k[plan.filler[own]]
        assert len(waste) == 0 or (waste[0] == 0 and waste[-1] + sizes[-1] == sizes.sum() <= CALL)
        if checked:
            assert s[0] // block == (s[-1] + k[-1] - 1) // block
    # exactly the blocks that are wholly read are checked, each within one task
    account = 0
    for c, number in enumerate(plan.call_block.tolist()):
        if not checked:
            assert number == -1
            continue
        own = plan.call_start[c] // block
        whole = bool(read[own * block : (own + 1) * block].all())
        assert number == (own if whole else -1)
        if whole:
            account += int(want[plan.call_start[c] : plan.call_start[c] + plan.call_length[c]].sum())
    assert account == plan.verified
    task_of = np.repeat(np.arange(len(plan.task) - 1), np.diff(plan.task))
    if checked:
        for number in np.unique(plan.call_start // block):
            assert len(np.unique(task_of[plan.call_start // block == number])) == 1
    # the price
    extra = plan.bytes - int(want.sum())
    if verify == "strict" and checked:
        assert plan.verified == int(want.sum())
    elif gap == 0 and not (checked and (head or tail)):
        assert extra == 0
    if checked and verify == "covered":
        whole_wanted = [b for b in range(-(-size // block)) if want[b * block : (b + 1) * block].all()]
        assert set(whole_wanted) <= set(plan.call_block.tolist())


def test_over_read_is_at_most_the_wanted_bytes() -> None:
    start = np.arange(100) * 3000
    for length, expected in ((1000, 0), (1600, 99 * 1400)):
        size = np.full(100, length)
        plan = plan_file(start, size, start, np.full(100, -1), size=300_000, block=0, verify="off", gap=4096, task=1 << 20)
        assert plan.bytes - 100 * length == expected


def test_framing_between_items_is_read_through_and_blocks_are_complete() -> None:
    """A same-layout load: items with 1.5 KiB of framing between their payloads, from byte 900 of the file on."""
    start = 900 + np.arange(40) * (100_000 + 1500)
    length = np.full(40, 100_000)
    size = int(start[-1] + length[-1]) + 700
    args = dict(size=size, block=1 << 16, gap=4096, task=1 << 20)
    plan = plan_file(start, length, start, np.full(40, -1), verify="covered", **args)
    assert plan.verified == 4_000_000 and plan.bytes == size and plan.ranges == 1
    tight = plan_file(start, length, start, np.full(40, -1), verify="covered", **{**args, "gap": 0})
    assert tight.bytes == 4_000_000 and tight.ranges == 40 and tight.verified < 2_200_000


def test_layers_part_what_overlaps() -> None:
    start, length = np.array([50, 0, 0, 10, 60]), np.array([10, 10, 20, 5, 1])
    found = layers(start, length)
    assert sorted(np.concatenate(found).tolist()) == [0, 1, 2, 3, 4] and len(found) == 2
    for rows in found:
        assert (start[rows][1:] >= (start + length)[rows][:-1]).all()
