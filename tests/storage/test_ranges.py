from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.storage.ranges import coalesce

_members = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=30)


def _union(members):
    covered = set()
    for start, length in members:
        covered.update(range(start, start + length))
    return covered


@settings(max_examples=300, deadline=None)
@given(_members, st.integers(0, 40), st.integers(1, 120))
def test_properties(members, gap, max_length):
    starts = [m[0] for m in members]
    lengths = [m[1] for m in members]
    out = coalesce(starts, lengths, gap, max_length)
    assert len(out.member_group) == len(members)
    groups = list(zip(out.group_start.tolist(), out.group_length.tolist(), strict=True))
    assert groups == sorted(groups, key=lambda g: g[0])
    inside = {g: [] for g in range(len(groups))}
    for (start, length), group, offset in zip(members, out.member_group.tolist(), out.member_offset.tolist(), strict=True):
        assert groups[group][0] + offset == start
        assert offset >= 0 and offset + length <= groups[group][1]
        inside[group].append((start, length))
    for group, (start, length) in enumerate(groups):
        own = inside[group]
        assert own, "no group without members"
        assert start == min(m[0] for m in own) and start + length == max(m[0] + m[1] for m in own)
        if length > max_length:
            assert max(m[1] for m in own) == length
        # No more than `gap` unwanted bytes in a row.
        wanted = _union(own)
        unwanted = 0
        for byte in range(start, start + length):
            unwanted = 0 if byte in wanted else unwanted + 1
            assert unwanted <= gap
    # Bytes read at most those of the members plus the gaps inside the groups; a byte read twice was wanted twice.
    gaps = sum(length - len(_union(inside[g])) for g, (_, length) in enumerate(groups))
    assert sum(length for _, length in groups) <= sum(lengths) + gaps
    for byte in range(370):
        holders = sum(start <= byte < start + length for start, length in groups)
        if holders > 1:
            assert sum(start <= byte < start + length for start, length in members) >= holders


@settings(max_examples=150, deadline=None)
@given(_members, st.integers(0, 40), st.integers(1, 120), st.randoms(use_true_random=False))
def test_order_does_not_matter(members, gap, max_length, random):
    order = list(range(len(members)))
    random.shuffle(order)
    one = coalesce([m[0] for m in members], [m[1] for m in members], gap, max_length)
    two = coalesce([members[i][0] for i in order], [members[i][1] for i in order], gap, max_length)
    assert one.group_start.tolist() == two.group_start.tolist()
    assert one.group_length.tolist() == two.group_length.tolist()
    for position, i in enumerate(order):
        # Members that are equal byte for byte may be told apart only by their position.
        a = (one.group_start[one.member_group[i]] + one.member_offset[i], members[i][1])
        b = (two.group_start[two.member_group[position]] + two.member_offset[position], members[i][1])
        assert a == b


@settings(max_examples=100, deadline=None)
@given(_members, st.integers(0, 40), st.integers(1, 120))
def test_no_pair_of_neighbours_could_be_joined(members, gap, max_length):
    out = coalesce([m[0] for m in members], [m[1] for m in members], gap, max_length)
    stops = np.maximum.accumulate(out.group_start + out.group_length)
    for i in range(1, len(out.group_start)):
        apart = out.group_start[i] - stops[i - 1] > gap
        first_of_next = max(m[1] for m in members if m[0] == out.group_start[i])
        too_long = out.group_start[i] + first_of_next - out.group_start[i - 1] > max_length
        assert apart or too_long


def test_examples():
    out = coalesce([100, 0, 10], [5, 10, 20], gap=0, max_length=1000)
    assert out.group_start.tolist() == [0, 100] and out.group_length.tolist() == [30, 5]
    assert out.member_group.tolist() == [1, 0, 0] and out.member_offset.tolist() == [0, 0, 10]
    assert coalesce([0, 5], [5, 6], gap=0, max_length=11).group_length.tolist() == [11]
    assert coalesce([0, 5], [5, 6], gap=0, max_length=10).group_length.tolist() == [5, 6]
    assert coalesce([0, 7], [5, 5], gap=2, max_length=99).group_length.tolist() == [12]
    assert coalesce([0, 7], [5, 5], gap=1, max_length=99).group_length.tolist() == [5, 5]
    assert coalesce([0, 5, 60], [90, 10, 20], gap=0, max_length=10).group_length.tolist() == [90]  # free inside a larger one
    assert coalesce([], [], 0, 1).group_start.tolist() == []


def test_limits():
    top = 2**63 - 1
    out = coalesce([top - 10, 0], [10, 5], gap=top, max_length=top)
    assert out.group_length.tolist() == [top]
    bad = [([-1], [1], 0, 1), ([0], [-1], 0, 1), ([0], [0], 0, 1), ([top], [1], 0, 1)]
    bad += [([0], [1], -1, 1), ([0], [1], 0, 0), ([0, 1], [1], 0, 1)]
    for starts, lengths, gap, most in bad:
        with pytest.raises(ValueError):
            coalesce(starts, lengths, gap, most)


def test_a_million_members():
    starts = np.arange(1_000_000) * 1000
    for max_length, groups in ((1 << 20, 954), (500, 1_000_000)):
        out = coalesce(starts, np.full(1_000_000, 900), gap=100, max_length=max_length)
        assert len(out.group_start) == pytest.approx(groups, rel=0.01)
