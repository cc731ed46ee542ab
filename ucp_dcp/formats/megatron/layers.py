"""Global layer numbers: stages and model chunks, in the order in which a batch goes through them, hold the layers in order.

That is true of every way in which Megatron divides layers (even, uneven first and last stage, room for embedding and loss, a written
layout; ``core/transformer/transformer_layer.py`` ``get_transformer_layer_offset``), so counting is enough, and no rule can be misread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...errors import CorruptCheckpointError
from .run import Rank, Run

__all__ = ["Layers"]

_LAYER = re.compile(r"(.*?)\blayers\.(\d+)\.(.+)")


class Layers:
    """``global_name`` renumbers a local name."""

    def __init__(self, run: Run, ranks: Sequence[Rank]) -> None:
        counts: dict[str, dict[tuple[int, int], int]] = {}
        chunks = len(ranks[0].model["chunks"])
        for rank in ranks:
            for c, tensors in enumerate(rank.model["chunks"]):
                for stack, numbers in _stacks(name for name, _ in tensors).items():
                    where = f"{rank.model['path']}: chunk {c}"
                    if numbers != set(range(len(numbers))):
                        missing = min(set(range(max(numbers) + 1)) - numbers)
                        raise CorruptCheckpointError(f"{where}: {stack}layers.{missing} is missing, {stack}layers.{max(numbers)} is there")
                    known = counts.setdefault(stack, {}).setdefault((c, rank.pp), len(numbers))
                    if known != len(numbers):
                        raise CorruptCheckpointError(
                            f"{where}: {len(numbers)} {stack}layers, but another rank of pipeline stage {rank.pp} has {known}"
                        )
        self.first: dict[str, dict[tuple[int, int], int]] = {}
        for stack, own in counts.items():
            at = 0
            first = self.first[stack] = {}
            for c in range(chunks):
                for pp in range(run.pp):
                    first[c, pp] = at
                    at += own.get((c, pp), 0)
            self._check(run, ranks, stack, at, own)

    def _check(self, run: Run, ranks: Sequence[Rank], stack: str, total: int, own: Mapping[tuple[int, int], int]) -> None:
        expected = run.args.get("num_layers")
        if stack != "decoder." or len(self.first) > 1 or type(expected) is not int or run.args.get("hybrid_layer_pattern"):
            return
        if total != expected:
            held = ", ".join(f"stage {pp} chunk {c}: {n}" for (c, pp), n in sorted(own.items(), key=lambda x: (x[0][1], x[0][0])))
            raise CorruptCheckpointError(
                f"{ranks[0].model['path']}: args.num_layers is {expected}, but the files hold {total} layers ({held})"
            )

    def global_name(self, name: str, chunk: int, pp: int) -> str:
        """The name with the layer's global number."""
        match = _LAYER.fullmatch(name)
        if match is None or match[1] not in self.first:
            return name
        return f"{match[1]}layers.{int(match[2]) + self.first[match[1]][chunk, pp]}.{match[3]}"


def _stacks(names: object) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name in names:  # type: ignore[attr-defined]
        match = _LAYER.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
