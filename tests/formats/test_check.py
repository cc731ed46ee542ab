"""``Checkpoint.check()`` and ``ucp show --check``: a master that is not the weight is found, and what cannot be told says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from counting_store import CountingStore
from format_helpers import DATA
from typer.testing import CliRunner

from ucp_dcp import check as check_module
from ucp_dcp.check import CheckReport
from ucp_dcp.checkpoint import open_checkpoint
from ucp_dcp.cli.app import app
from ucp_dcp.errors import MissingKeysError
from ucp_dcp.geometry import Box
from ucp_dcp.planners.consistency import slabs
from ucp_dcp.storage.store import open_store

CHECKPOINTS = sorted(p.parent.name for p in (DATA / "deepspeed").glob("*/latest*"))


def flip(root: Path, key: str, element: int) -> None:
    """Change the exponent of one stored element of a master, in the file."""
    checkpoint = open_checkpoint(root)
    source = checkpoint.source
    row = checkpoint.catalog.find(key)
    first, _ = checkpoint.catalog.chunk_range(row)
    place = source.locate(torch.arange(first, first + 1).numpy())
    path = root / checkpoint.catalog.files[int(place.file[0])].path
    data = bytearray(path.read_bytes())
    data[int(place.offset[0]) + 4 * element + 3] ^= 0x40
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_real_checkpoints_are_consistent(name: str) -> None:
    report = open_checkpoint(DATA / "deepspeed" / name).check()
    assert report.ok and report.parameters and sum(report.counts.values()) == len(report.parameters)
    two_copies = not name.startswith("z3") and not name.startswith("z0_fp32")
    assert (report.counts["consistent"] >= 3) == two_copies
    if not two_copies:
        assert report.counts["unproven"] == len(report.parameters)


def test_outcomes_and_reasons() -> None:
    report = open_checkpoint(DATA / "deepspeed" / "z1_bf16_frozen_w3").check()
    found = {p.name: p for p in report.parameters}
    assert found["head.weight"].outcome == "consistent" and found["head.weight"].master == "float32"
    assert found["embed.weight"].outcome == "unproven" and "only the weight" in found["embed.weight"].reason
    assert found["blocks.0.norm.weight"].outcome == "unproven" and "constant" in found["blocks.0.norm.weight"].reason
    tied = open_checkpoint(DATA / "deepspeed" / "z3_bf16_frozen_tied_w3").check(["embed.weight", "head.weight"])
    assert [p.outcome for p in tied.parameters] == ["unproven", "unproven"]


def test_a_flipped_bit_is_found_and_placed(tmp_path: Path) -> None:
    root = tmp_path / "c"
    shutil.copytree(DATA / "deepspeed" / "z1_bf16_w3", root)
    flip(root, "optim.state.head.weight.master", 11)
    report = open_checkpoint(root).check()
    assert not report.ok and report.names("inconsistent") == ["head.weight"]
    (wrong,) = [p for p in report.parameters if p.outcome == "inconsistent"]
    assert wrong.differing == 1 and wrong.first == (1, 2)  # 9 columns
    assert "1 of 207 elements" in wrong.reason and "head.weight" in str(report)
    assert json.loads(report.to_json())["counts"]["inconsistent"] == 1


def test_names_choose_and_unknown_ones_are_errors() -> None:
    checkpoint = open_checkpoint(DATA / "deepspeed" / "z1_bf16_w3")
    assert [p.name for p in checkpoint.check(["embed.weight"]).parameters] == ["embed.weight"]
    with pytest.raises(MissingKeysError, match=r"no\.such"):
        checkpoint.check(["no.such"])


def test_every_byte_is_read_once() -> None:
    store = CountingStore(open_store(DATA / "deepspeed" / "z1_bf16_w3"))
    checkpoint = open_checkpoint(store)
    checkpoint["model.embed.weight"].read()  # the step of the ranks is compared
    store.reset()
    checkpoint.check(["embed.weight"])
    assert store.counts.bytes_read == 23 * 9 * (4 + 2)


@pytest.mark.parametrize("slab", [1, 7, 64])
def test_small_slabs_find_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slab: int) -> None:
    root = tmp_path / "c"
    shutil.copytree(DATA / "deepspeed" / "z1_bf16_w3", root)
    flip(root, "optim.state.blocks.0.mix.weight.master", 4)
    whole = open_checkpoint(root).check(["blocks.0.mix.weight", "embed.weight", "blocks.0.norm.bias"])
    assert whole.names("inconsistent") == ["blocks.0.mix.weight"]
    monkeypatch.setattr(check_module, "SLAB", slab)
    assert open_checkpoint(root).check(["blocks.0.mix.weight", "embed.weight", "blocks.0.norm.bias"]) == whole


@pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 3), (2, 3, 5), (1, 1, 7)])
@pytest.mark.parametrize("limit", [1, 3, 6, 100])
def test_slabs_cover_exactly_and_are_bounded(shape: tuple[int, ...], limit: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in slabs(Box((0,) * len(shape), shape), limit):
        index = box.slices()
        assert seen[index].numel() <= limit
        seen[index] += 1
    assert bool((seen == 1).all())


def test_our_own_checkpoints(tmp_path: Path) -> None:
    """A saved layout's masters and weights are compared in the same way; a checkpoint without roles says that."""
    from ucp_dcp import save

    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    save({"model": {"w": weight}}, tmp_path / "plain")
    report = open_checkpoint(tmp_path / "plain").check()
    assert report.ok and report == CheckReport(()) and "does not say" in str(report)
    save({"model": {"w": weight}}, tmp_path / "roles", roots={"model": "model"})
    assert [p.reason for p in open_checkpoint(tmp_path / "roles").check().parameters] == ["no second copy: there is only the weight"]


def test_command(tmp_path: Path) -> None:
    root = tmp_path / "c"
    shutil.copytree(DATA / "deepspeed" / "z1_bf16_w3", root)
    good = CliRunner().invoke(app, ["show", "--check", str(root)])
    assert good.exit_code == 0 and "0 inconsistent" in good.stdout
    flip(root, "optim.state.head.weight.master", 0)
    bad = CliRunner().invoke(app, ["show", "--check", str(root)])
    assert bad.exit_code == 1 and "1 inconsistent" in bad.stdout and "inconsistent: head.weight" in bad.stdout
    bad = CliRunner().invoke(app, ["show", "--check", "--json", str(root)])
    fields = json.loads(bad.stdout)["check"]
    assert bad.exit_code == 1 and fields["ok"] is False
    assert [p["name"] for p in fields["parameters"] if p["outcome"] == "inconsistent"] == ["head.weight"]
    assert "check" not in json.loads(CliRunner().invoke(app, ["show", "--json", str(root)]).stdout)
