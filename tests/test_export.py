"""Exports are read back by the safetensors library: bytes, names, shards, dtypes; failures leave nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import ucp_dcp
from ucp_dcp import export as module
from ucp_dcp.cli.app import app
from ucp_dcp.errors import PlanError, StoreError, StoreExistsError, UnsupportedError
from ucp_dcp.export import export_safetensors
from ucp_dcp.storage.local import LocalStore

ROOTS = {"model": "model", "optimizer": "optimizer"}
MODEL = {
    "a.weight": torch.arange(24.0).reshape(2, 3, 4),
    "b.weight": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16),
    "c.scalar": torch.tensor(7.0),
    "d.ids": torch.arange(5),
    "e.none": torch.zeros(0, 3),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    optimizer = {"state": {"b.weight": {"master": MODEL["b.weight"].float() + 0.25, "exp_avg": torch.ones(3, 4)}}}
    state = {"model": {**MODEL, "a.weight": MODEL["a.weight"].mT.contiguous().mT}, "optimizer": optimizer, "epoch": 3}
    ucp_dcp.save(state, tmp_path / "c", roots=ROOTS, no_dist=True)
    return tmp_path / "c"


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return sorted(found) == sorted(wanted) and all(
        found[n].dtype == w.dtype and found[n].shape == w.shape and torch.equal(found[n], w) for n, w in wanted.items()
    )


def test_one_file(saved: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = export_safetensors(saved, tmp_path / "out", config={"model_type": "x"}, progress=lambda *s: seen.append(s))
    assert same(load_file(tmp_path / "out" / "model.safetensors"), MODEL)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x"}
    assert set(report.tensors.values()) == {"weight"} and report.nbytes == sum(t.nbytes for t in MODEL.values())
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert {p: (tmp_path / "out" / p).stat().st_size for p in report.files} == report.files
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_and_index(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of two rows; a tensor that is larger than a shard has one of its own."""
    monkeypatch.setattr(module, "SLAB", 16)
    report = export_safetensors(saved, tmp_path / "out", shard_size=50)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes
    assert index["weight_map"]["a.weight"] == "model-00001-of-00003.safetensors"
    found = {n: t for path in sorted(set(index["weight_map"].values())) for n, t in load_file(tmp_path / "out" / path).items()}
    assert same(found, MODEL)
    back = ucp_dcp.open_checkpoint(tmp_path / "out")
    assert torch.equal(back["model.b.weight"][1:, 2], MODEL["b.weight"][1:, 2])


def test_masters_and_dtypes(saved: Path, tmp_path: Path) -> None:
    report = export_safetensors(saved, tmp_path / "masters", source="master")
    assert report.tensors["b.weight"] == "master" and report.tensors["a.weight"] == "weight"
    assert torch.equal(load_file(tmp_path / "masters" / "model.safetensors")["b.weight"], MODEL["b.weight"].float() + 0.25)
    export_safetensors(saved, tmp_path / "half", dtype=torch.float16)
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["a.weight"].dtype == torch.float16 and half["d.ids"].dtype == torch.int64
    with pytest.raises(UnsupportedError, match="safetensors has no dtype complex128"):
        export_safetensors(saved, tmp_path / "no", dtype="complex128")
    assert not (tmp_path / "no").exists()


class Full(LocalStore):
    """There is room for one file."""

    def create(self, path: str) -> Any:
        if "00002" in path:
            raise StoreError("no space left")
        return super().create(path)


def test_what_exists_stays_and_failures_leave_nothing(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(StoreExistsError, match=r"holds model-00001-of-00002\.safetensors already"):
        export_safetensors(saved, tmp_path / "used")
    with pytest.raises(StoreError, match="no space"):
        export_safetensors(saved, Full(tmp_path / "full"), shard_size=50, config={})
    assert [p.name for p in (tmp_path / "full").rglob("*") if p.is_file()] == []
    ucp_dcp.save({"x": torch.ones(2)}, tmp_path / "plain", no_dist=True)
    with pytest.raises(PlanError, match="it names no weights"):
        export_safetensors(tmp_path / "plain", tmp_path / "out")


def ucp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_command(tmp_path: Path) -> None:
    qkv = torch.arange(64.0).reshape(16, 4)
    model = {"decoder.layers.0.self_attention.linear_qkv.weight": qkv, "decoder.final_layernorm.weight": torch.ones(4)}
    ucp_dcp.save({"model": model}, tmp_path / "c", roots={"model": "model"}, no_dist=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = ucp(
        "export", tmp_path / "c", tmp_path / "out", "--map", "llama", "--var", "heads=2", "--var", "kv_heads=1", "--dtype", "bfloat16",
        "--config", tmp_path / "config.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 tensors" in done.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.layers.0.self_attn.v_proj.weight"], qkv[12:].bfloat16())
    again = ucp("export", tmp_path / "c", tmp_path / "out", "--map", "llama", "--var", "heads=2", "--var", "kv_heads=1")
    assert again.exit_code == 1 and again.output.startswith("error: ") and "already" in again.output
    assert ucp("export", tmp_path / "c", tmp_path / "new", "--map", "llama").exit_code == 1
    assert ucp("export", tmp_path / "c", tmp_path / "new", "--var", "heads=2").exit_code == 2
    assert ucp("export", tmp_path / "c", tmp_path / "new", "--map", "llama", "--var", "heads").exit_code == 2
    (tmp_path / "config.json").write_text("[]")
    assert "expected a JSON object" in ucp("export", tmp_path / "c", tmp_path / "new", "--config", tmp_path / "config.json").output


@pytest.mark.slow
def test_memory_is_bounded(isolated_python: Any, tmp_path: Path) -> None:
    """256 MiB in one tensor, and in one row: two slabs are held, not the tensor."""
    code = f"""
        import resource, torch, ucp_dcp
        from ucp_dcp.export import export_safetensors
        root = {str(tmp_path)!r}
        def export(name):
            export_safetensors(root + "/" + name, root + "/" + name + "_out", verify="off")
        ucp_dcp.save({{"model": {{"w": torch.ones(10, 10)}}}}, root + "/small", roots={{"model": "model"}}, no_dist=True)
        export("small")
        def saved(name, *shape):
            state = {{"model": {{"w": torch.ones(1).expand(shape)}}}}
            ucp_dcp.save(state, root + "/" + name, roots={{"model": "model"}}, no_dist=True, check_replicas="off")
        saved("wide", 1, 1, 64 << 20)
        saved("tall", 1 << 20, 64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        export("wide"); export("tall")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    assert int(isolated_python(code, forbid=())) <= 2 * 64 + 32
