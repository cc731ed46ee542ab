"""The recipe of the training: what the DeepSpeed run in ``zero/`` and ours have in common, beside model and data."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

PEAK, BETAS, DECAY, CLIP = 3e-3, (0.9, 0.95), 0.1, 1.0
WARMUP, HORIZON = 10, 200  # steps of the learning rate's way up, and until it has come down to a tenth


def rate(step: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = min(1.0, (step - WARMUP) / (HORIZON - WARMUP))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
