"""Real DeepSpeed checkpoints with what the live engine held: the repository's, and more where ``UCP_DCP_EXTRA_DATA`` says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parents[1] / "data" / "deepspeed"
EXTRA = os.environ.get("UCP_DCP_EXTRA_DATA")

# Main road: dense ZeRO-1, 2, 3 in fp32 and bf16. Round robin has no truth of its own: DeepSpeed's gatherer reads wrong bytes there.
_OTHERS = ("z2_bf16_roundrobin", "moe_", "pipe_", "z0_", "frozen_", "z1_fp16", "z1_bf16_gad32", "z3_bf16_frozen")


def checkpoints() -> list[Path]:
    """Folders of all checkpoints under test."""
    folders = [*HERE.iterdir(), *(Path(EXTRA, "deepspeed").iterdir() if EXTRA else ())]
    return sorted(p for p in folders if (p / "latest").exists() and not p.name.startswith(_OTHERS))


def truth(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """fqn -> {"master", "exp_avg", ...}: what the live engine held."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    if (folder / "truth.npz").exists():
        with np.load(folder / "truth.npz") as data:
            for name in data.files:
                kind, fqn = name.split("/", 1)
                if kind not in ("weight", "buffer"):
                    out.setdefault(fqn, {})[kind] = torch.from_numpy(data[name])
    else:
        for fqn, values in torch.load(folder / "truth.pt", weights_only=True)["params"].items():
            out[fqn] = {"master": values["fp32"], **{k: v for k, v in values.items() if k.startswith("exp_avg")}}
    return out
