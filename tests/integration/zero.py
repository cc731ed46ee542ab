"""Real DeepSpeed checkpoints with what the live engine held: the repository's, and more where ``UCP_DCP_EXTRA_DATA`` says.

Nothing here uses the package's parsers: the truth lies beside each checkpoint, gathered from the live engine (see ``truth.npz`` in
tests/data/deepspeed/README.md), or is read with ``torch.load``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parents[1] / "data" / "deepspeed"
EXTRA = os.environ.get("UCP_DCP_EXTRA_DATA")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_UNSUPPORTED = ("moe_", "pipe_")
# Main road: dense ZeRO-1, 2, 3 in fp32 and bf16.
_OTHERS = (*_UNSUPPORTED, "z2_bf16_roundrobin", "z0_", "frozen_", "z1_fp16", "z1_bf16_gad32", "z3_bf16_frozen")
# Of these the optimizer keeps a number only, and two parameters could be it (docs/deepspeed.md, "Stage 0").
_UNNAMED = {"z0_fp32_frozen_tied_w1": ("blocks.1.norm.weight", "blocks.1.norm.bias")}
_ALIASES = {"head.weight": "embed.weight", "lm_head.weight": "wte.weight"}
"""Second names of tied parameters. A live engine lists the first only."""


def folders() -> list[Path]:
    """Folders of all checkpoints, of every kind."""
    return sorted(p for p in [*HERE.iterdir(), *(Path(EXTRA, "deepspeed").iterdir() if EXTRA else ())] if list(p.glob("latest*")))


def checkpoints() -> list[Path]:
    """Folders of the checkpoints of the main road, with the values of their optimizer under :func:`truth`."""
    return [p for p in folders() if (p / "latest").exists() and not p.name.startswith(_OTHERS)]


@dataclass(frozen=True, slots=True)
class Case:
    """A dense checkpoint, or a universal folder."""

    url: str
    """What is opened."""
    folder: str
    """Where its truth lies."""
    universal: bool

    @property
    def name(self) -> str:
        return Path(self.folder).name + ("/universal" if self.universal and "universal" not in Path(self.folder).name else "")


def cases() -> list[Case]:
    """All dense checkpoints: ZeRO-0 to 3, every dtype, frozen, tied, round robin, BF16_Optimizer; universal folders."""
    out = []
    for p in folders():
        if not p.name.startswith(_UNSUPPORTED):
            if (p / "latest").exists():
                out.append(Case(str(p), str(p), False))
            if (p / "latest_universal").exists():
                out.append(Case(str(p / (p / "latest_universal").read_text().strip()), str(p), True))
    return out


def truth(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """fqn -> {"master", "exp_avg", ...}: what the live engine held."""
    return _known(folder)[1]


def golden(case: Case) -> dict[str, Any]:
    """``{"model": {name: weight or buffer}, "optim": {"state": {fqn: {"master", "exp_avg", "step", ...}}}}``: what a load must give.

    Weights have the dtype of the training; where the checkpoint keeps no such copy (stage 3), they are rounded masters.
    """
    folder = Path(case.folder)
    model, state = _known(folder)
    zero_0 = folder.name.startswith("z0")
    for fqn, values in state.items():
        if "exp_avg_sq" in values and not zero_0:  # in stage 0 the truth has the steps
            values["step"] = torch.tensor(2.0 if (folder / "truth.npz").exists() else 3.0)
        if zero_0 and fqn in _UNNAMED.get(folder.name, ()):
            values.clear()
    if "tied" in folder.name or (case.universal and "universal_w2" in folder.name):
        model |= {alias: model[first] for alias, first in _ALIASES.items() if first in model}
    return {"model": model, "optim": {"state": {fqn: values for fqn, values in state.items() if values}}}


def _known(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    low = next(dtype for word, dtype in DTYPES.items() if re.search(rf"_{word}_", folder.name))
    model: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    if (folder / "truth.npz").exists():
        with np.load(folder / "truth.npz") as data:
            for name in data.files:
                kind, fqn = name.split("/", 1)
                value = torch.from_numpy(data[name])
                if kind == "buffer":
                    model[fqn] = value.long() if fqn == "table" else value  # kept as fp32 in truth.npz
                elif kind == "weight":
                    model[fqn] = value.to(low)
                else:
                    state.setdefault(fqn, {})[kind] = value
    elif folder.name.startswith("z0_bf16"):
        return _stage0(folder)
    else:
        for fqn, values in torch.load(folder / "truth.pt", weights_only=True)["params"].items():
            if "frozen" in values:
                model[fqn] = values["frozen"]
            else:
                model[fqn] = values["fp32"].to(low)
                state[fqn] = {"master": values["fp32"], **{k: v for k, v in values.items() if k.startswith("exp_avg")}}
    return model, state


def _stage0(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The file itself, since its truth.pt holds errors only. It was trained with two groups: parameters of more dimensions, and vectors."""
    (path,) = folder.glob("global_step*/mp_rank_00_model_states.pt")
    stored = torch.load(path, weights_only=True)
    model, optimizer = stored["module"], stored["optimizer"]
    inner = optimizer["optimizer_state_dict"]
    state: dict[str, dict[str, torch.Tensor]] = {}
    for masters, group, many in zip(optimizer["fp32_groups"], inner["param_groups"], (True, False), strict=True):
        names = [fqn for fqn, value in model.items() if (value.dim() > 1) == many]
        for fqn, master, number in zip(names, masters, group["params"], strict=True):
            state[fqn] = {"master": master.detach(), **inner["state"][number]}
    return dict(model), state


def universal_files(case: Case) -> dict[tuple[str, str], torch.Tensor]:
    """(parameter, "master" or state) -> the flat contents of the converter's file of it, for trained parameters."""
    out = {}
    for path in Path(case.url, "zero").glob("*/*.pt"):
        if (path.parent / "exp_avg.pt").exists() and path.stem != "step":
            value = torch.load(path, weights_only=True)
            value = value["param"] if isinstance(value, dict) else value
            out[path.parent.name, "master" if path.stem == "fp32" else path.stem] = value.flatten()
    return out
