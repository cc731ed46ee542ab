"""Which parameter a number of an optimizer means, where nothing in the file says it (ZeRO stage 0).

A torch optimizer numbers its parameters group by group. Two facts lead back to names: a group lists parameters in the order of the
module, as everybody builds groups; and a low-precision weight is its fp32 master, rounded. The first gives the earliest and the latest
parameter that a number can mean, and a number is named only where both are the same one. The second needs a few bytes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Item", "name_flat_groups", "name_groups"]

_MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter of the module, or of an optimizer group.

    ``shape``: None where it is not known. ``sample``: some of its bytes, rounded to the weights' dtype where it is a master; None where
    they are not known. ``constant``: they repeat one value, as a fresh norm or bias does, and so tell little.
    """

    shape: tuple[int, ...] | None
    sample: bytes | None = None
    constant: bool = False

    def fits(self, other: Item) -> bool:
        """False when the two cannot be the same parameter."""
        if self.shape is not None and other.shape is not None and self.shape != other.shape:
            return False
        return self.sample is None or other.sample is None or self.sample == other.sample


def name_groups(module: Sequence[tuple[str, Item]], groups: Sequence[Sequence[Item]]) -> list[list[str | None]]:
    """Names of the parameters of each group; None where more than one is possible, or none.

    Args:
        module: the parameters in the module's order, each once.
        groups: the optimizer's groups; no parameter is in two of them.
    """
    found: list[list[str | None]] = [[None] * len(group) for group in groups]
    taken: set[str] = set()
    while True:
        before = len(taken)
        for g, group in enumerate(groups):
            left = [(name, item) for name, item in module if name not in taken or name in found[g]]
            for i, name in enumerate(_name_group(left, group)):
                if name is not None and found[g][i] is None and name not in taken:
                    found[g][i] = name
                    taken.add(name)
        if len(taken) == before:
            return found


def _name_group(module: Sequence[tuple[str, Item]], group: Sequence[Item]) -> list[str | None]:
    first = _greedy([item for _, item in module], group)
    if first is not None:
        last = _greedy([item for _, item in reversed(module)], list(reversed(group)))
        assert last is not None  # the mirror image of a match that exists
        latest = [len(module) - 1 - j for j in reversed(last)]
        return [module[a][0] if a == b else None for a, b in zip(first, latest, strict=True)]
    # Not in the order of the module: only contents can tell, where there are enough of them.
    names: list[str | None] = []
    for item in group:
        fitting = [name for name, other in module if other.sample is not None and item.fits(other)]
        telling = item.sample is not None and not item.constant
        names.append(fitting[0] if telling and len(fitting) == 1 else None)
    return [name if names.count(name) == 1 else None for name in names]


def _greedy(module: Sequence[Item], group: Sequence[Item]) -> list[int] | None:
    """The earliest place of each item of the group as a subsequence of the module; None: it is not one."""
    places = []
    at = 0
    for item in group:
        while at < len(module) and not item.fits(module[at]):
            at += 1
        if at == len(module):
            return None
        places.append(at)
        at += 1
    return places


class FlatItem:
    """What is known of a flat buffer: its length, and whether the elements from ``at`` on can be a parameter (by their contents)."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def holds(self, at: int, index: int) -> bool:
        """Whether parameter ``index`` of the module can begin at element ``at``."""
        raise NotImplementedError


def name_flat_groups(numels: Sequence[int], flats: Sequence[FlatItem]) -> list[list[int] | None]:
    """Which parameters (indices into ``numels``) lie end to end in each flat buffer; None where that is not certain.

    Each buffer is filled exactly, in the order of the module, by parameters whose contents fit; no parameter is in two buffers.
    """
    answers: list[list[int] | None] = []
    for flat in flats:
        answers.append(_fill(numels, flat))
    seen: set[int] = set()
    for answer in answers:
        if answer is not None and seen & set(answer):
            return [None] * len(flats)
        seen |= set(answer or ())
    return answers


def _fill(numels: Sequence[int], flat: FlatItem) -> list[int] | None:
    solutions: list[list[int]] = []
    stack: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # next parameter, element, chosen
    steps = 0
    while stack and len(solutions) < 2:
        index, at, chosen = stack.pop()
        steps += 1
        if steps > _MAX_STEPS:
            return None
        if at == flat.numel:
            solutions.append(chosen)
            continue
        for j in range(len(numels) - 1, index - 1, -1):
            if numels[j] and at + numels[j] <= flat.numel and flat.holds(at, j):
                stack.append((j + 1, at + numels[j], [*chosen, j]))
    return solutions[0] if len(solutions) == 1 else None
