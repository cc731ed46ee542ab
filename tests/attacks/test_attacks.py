"""Every attack of the corpus ends in an error of ours, runs nothing, reads nothing outside, and allocates nothing that was only claimed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import ATTACKS

import ucp_dcp
from ucp_dcp.errors import UCPError


def read_all(folder: Path) -> None:
    checkpoint = ucp_dcp.open_checkpoint(folder)
    for name in checkpoint:
        checkpoint[name].read()
    for key in checkpoint.objects:
        checkpoint.objects[key]


def load(folder: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(4, 6), "o": {"a": None}}
    ucp_dcp.load(state, folder, strict=False)
    raise UCPError("loaded what could be loaded")


def verify(folder: Path) -> None:
    report = ucp_dcp.verify(folder)
    if not report.ok:
        raise UCPError("problems were found")
    raise UCPError("every byte is what its writer wrote")  # lies that are whole are for readers to find


@pytest.mark.parametrize("use", [read_all, load, verify], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", list(ATTACKS))
def test_attack(tmp_path: Path, name: str, use: Any) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "ran"
    ATTACKS[name](folder, marker)
    tracemalloc.start()
    try:
        with pytest.raises(UCPError):
            use(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not marker.exists(), "code of the checkpoint was run"
    assert peak < 64 << 20, f"{peak} bytes were allocated"
