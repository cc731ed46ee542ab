"""Byte-level batches of ``text.txt``. Which bytes a step sees depends on the step alone, not on how many ranks share the work."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

TEXT = Path(__file__).with_name("text.txt")
VOCAB = 256
GLOBAL_BATCH, LENGTH = 12, 64  # 12 sequences: 1, 2, 3, 4, 6 or 12 data-parallel ranks get equal shares


class Text:
    """The text as one tensor of bytes."""

    def __init__(self) -> None:
        self._bytes = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()

    def batch(self, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of share ``part`` of ``parts`` of the global batch of ``step``.

        A step that is asked for again, on whatever mesh, gives the same sequences: there is no position to save beside the step.
        """
        if GLOBAL_BATCH % parts:
            raise ValueError(f"a global batch of {GLOBAL_BATCH} sequences cannot be divided evenly over {parts} data-parallel ranks")
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._bytes) - LENGTH, (GLOBAL_BATCH,), generator=generator)
        share = GLOBAL_BATCH // parts
        rows = torch.stack([self._bytes[s : s + LENGTH + 1] for s in starts[part * share : (part + 1) * share].tolist()])
        return rows[:, :-1], rows[:, 1:].contiguous()
