"""All dense DeepSpeed checkpoints of a folder, against what the live engine held (``truth.pt`` beside each).

Set ``UCP_DCP_EXTRA_DATA`` to a folder with ``deepspeed/<name>/{latest, <tag>/, truth.pt}``; ``truth.pt`` is ``{"params": {fqn: {"fp32",
"exp_avg", "exp_avg_sq"}}}``. Checkpoints of kinds that are not supported must say so.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from format_helpers import assemble

from ucp_dcp.checkpoint import open_checkpoint
from ucp_dcp.errors import UnsupportedError
from ucp_dcp.formats import open_source

FOLDER = os.environ.get("UCP_DCP_EXTRA_DATA")
NAMES = sorted(p.parent.name for p in Path(FOLDER, "deepspeed").glob("*/latest")) if FOLDER else []
UNIVERSAL = sorted(p.parent.name for p in Path(FOLDER, "deepspeed").glob("*/latest_universal")) if FOLDER else []
UNSUPPORTED = ("moe_", "pipe_")
WHOLE = ("z0_",)
"""Stage 0: its ``truth.pt`` could not be gathered with DeepSpeed's functions and holds no values."""


@pytest.mark.skipif(not FOLDER, reason="UCP_DCP_EXTRA_DATA names no folder of more checkpoints")
def test_there_are_checkpoints() -> None:
    assert NAMES


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(UNSUPPORTED + WHOLE)])
def test_equal(name: str) -> None:
    compare(name, None)


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_folders_equal(name: str) -> None:
    tag = Path(str(FOLDER), "deepspeed", name, "latest_universal").read_text().strip()
    compare(name, tag)


def compare(name: str, tag: str | None) -> None:
    path = Path(str(FOLDER), "deepspeed", name)
    source = open_source(path, tag=tag)
    assert ("universal" in source.provenance["writer"]) == (tag is not None)
    truth = torch.load(path / "truth.pt", weights_only=True)["params"]
    checked = 0
    for fqn, values in truth.items():
        if "frozen" in values:
            assert torch.equal(assemble(source, source.catalog.find_canonical(f"model.{fqn}")), values["frozen"]), fqn
            checked += 1
            continue
        assert "error" not in values, (fqn, values)
        for kind, state in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            t = source.catalog.find_canonical(f"optim.state.{fqn}.{state}")
            assert torch.equal(assemble(source, t), values[kind]), (fqn, state)
            checked += 1
    assert checked > 40


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(UNSUPPORTED)])
def test_masters_are_the_weights(name: str) -> None:
    """Independent of ``truth.pt``: both copies are in the checkpoint."""
    checkpoint = open_checkpoint(Path(str(FOLDER), "deepspeed", name))
    report = checkpoint.check()
    assert report.ok and report.parameters
    if "z3" in name:
        assert not report.counts["consistent"]  # stage 3 stores no second copy
    else:
        assert report.counts["consistent"] >= 10
    if name.startswith(WHOLE):
        masters = [n for n in checkpoint.names() if n.endswith(".master")]
        assert len(masters) == 21 and "unnamed" not in checkpoint.provenance
        assert len([n for n in checkpoint.names() if n.endswith((".exp_avg", ".exp_avg_sq", ".step"))]) == 63


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(UNSUPPORTED)])
def test_unsupported_kinds_say_so(name: str) -> None:
    with pytest.raises(UnsupportedError):
        open_source(Path(str(FOLDER), "deepspeed", name))
