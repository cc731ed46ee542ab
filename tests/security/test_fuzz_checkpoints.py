"""Whole checkpoints with changed, cut and inserted bytes: an error of ours or the right values, and ``verify`` finds every change of ours.

``--thorough`` runs a hundred times as many.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucp_dcp
from ucp_dcp.errors import UCPError

DATA = Path(__file__).parent.parent / "data" / "deepspeed"
STATE = {
    "model": {"w": torch.arange(40.0).reshape(8, 5), "b": torch.arange(3, dtype=torch.int64)},
    "n": 3,
    "o": {"deep": [1, "x", None]},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    ucp_dcp.save(STATE, root / "ours", roots={"model": "model"})
    ucp_dcp.save(STATE, root / "bare", roots={"model": "model"}, stock_metadata=False)
    dcp.save(STATE, checkpoint_id=root / "stock", no_dist=True)
    shutil.copytree(DATA / "z1_fp32_sgd_w2", root / "zero1")
    shutil.copytree(DATA / "z3_bf16_w2", root / "zero3")
    return {p.name: p for p in root.iterdir()}


def contents(folder: Path) -> dict[str, Any]:
    checkpoint = ucp_dcp.open_checkpoint(folder)
    out: dict[str, Any] = {name: checkpoint[name].read() for name in checkpoint}
    return out | {key: checkpoint.objects[key] for key in checkpoint.objects}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return repr(a) == repr(b)


HOW = ["flip", "cut", "insert", "zero", "drop"]
CHANGES = st.tuples(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True), st.sampled_from(HOW), st.binary(min_size=1, max_size=9))


def damage(folder: Path, change: tuple[int, float, str, bytes]) -> None:
    number, where, how, data = change
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    file = files[number % len(files)]
    old = file.read_bytes()
    at = int(where * len(old))
    new = {
        "flip": old[:at] + bytes([old[at] ^ (1 << data[0] % 8)]) + old[at + 1 :] if old else b"x",
        "cut": old[:at],
        "insert": old[:at] + data + old[at:],
        "zero": old[:at] + bytes(min(len(data), len(old) - at)) + old[at + len(data) :],
        "drop": None,
    }[how]
    if new is None:
        file.unlink()
    elif new == old:
        file.write_bytes(old + b"x")
    else:
        file.write_bytes(new)


@pytest.mark.parametrize("kind", ["ours", "stock", *(pytest.param(k, marks=pytest.mark.slow) for k in ("bare", "zero1", "zero3"))])
def test_changed_bytes(originals: dict[str, Path], tmp_path: Path, kind: str, thorough: bool) -> None:
    want = contents(originals[kind])

    @settings(max_examples=2000 if thorough else 20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not thorough)
    @given(CHANGES)
    def run(change: tuple[int, float, str, bytes]) -> None:
        folder = tmp_path / "c"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(originals[kind], folder)
        damage(folder, change)
        try:
            found = contents(folder)
        except UCPError:
            found = {}
        if kind in ("ours", "bare"):
            # what is read is right, or its file is one that the checkpoint's digests accuse
            # (a root .metadata that is gone is what a crash right behind the commit leaves: the checkpoint is whole, and verify notes it)
            lost = not (folder / ".metadata").exists() and kind == "ours"
            assert lost or not _verified(folder), f"{change} was not found"
        elif found and all(not same(found.get(k), v) for k, v in want.items()):
            raise AssertionError(f"{change}: nothing is as it was, and no error")
        report = ucp_dcp.load({"model": {"w": torch.zeros(8, 5)}}, folder, strict=False) if _opens(folder) else None
        assert report is None or report.bytes_read >= 0

    run()


def _opens(folder: Path) -> bool:
    try:
        ucp_dcp.open_checkpoint(folder)
        ucp_dcp.load({"model": {"w": torch.zeros(8, 5)}}, folder, strict=False)
    except UCPError:
        return False
    return True


def _verified(folder: Path) -> bool:
    try:
        return bool(ucp_dcp.verify(folder).ok)
    except UCPError:
        return False
