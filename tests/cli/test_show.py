"""``ucp show`` on checkpoints of each kind, for people, programs and hostile names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner, Result

from ucp_dcp import save
from ucp_dcp.cli.app import app
from ucp_dcp.cli.text import human_bytes, one_line, printable

MODEL = {"layers.0.weight": torch.arange(12.0).reshape(3, 4), "layers.0.bias": torch.zeros(3, dtype=torch.bfloat16)}


def ucp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    state = {
        "model": dict(MODEL),
        "optim": {"state": {"layers.0.weight": {"exp_avg": torch.ones(3, 4)}}},
        "epoch": 3,
    }
    save(state, folder, roots={"model": "model", "optim": "optimizer"}, provenance={"run": "unit test"})
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    dcp.save({"model": dict(MODEL), "\x1b[31mred[/bold]": torch.zeros(())}, checkpoint_id=folder, no_dist=True)
    return folder


def test_panel_of_ours(ours: Path) -> None:
    shown = ucp("show", ours)
    assert shown.exit_code == 0 and not shown.stderr
    lines = [" ".join(line.strip("│ ").split()) for line in shown.stdout.splitlines()]
    assert "format ucp" in lines and f"generation {json.loads((ours / 'ucp.json').read_text())['generation']}" in lines
    assert "parameters 15" in lines and "run unit test" in lines and "objects 1" in lines
    (tensors,) = [line for line in lines if line.startswith("tensors")]
    assert tensors.startswith("tensors 3 (") and "2 weight" in tensors and "1 state" in tensors
    # 12 fp32 + 3 bf16 + 12 fp32
    assert any(line.startswith("bytes 102 B of tensors") for line in lines)
    assert "layers.0.weight" not in shown.stdout


def test_table_of_ours(ours: Path) -> None:
    shown = ucp("show", ours, "--tensors")
    rows = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.strip().startswith(("model.", "optim."))}
    assert list(rows) == ["model.layers.0.bias", "model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"]
    assert rows["model.layers.0.weight"][1:3] == ["float32", "3x4"] and rows["model.layers.0.weight"][-3:] == ["1", "48", "B"]
    assert rows["model.layers.0.bias"][1:3] == ["bfloat16", "3"]


def test_json_of_ours(ours: Path) -> None:
    short = json.loads(ucp("show", ours, "--json").stdout)
    assert "tensor_list" not in short
    full = json.loads(ucp("show", ours, "--json", "--tensors").stdout)
    tensors = {t["name"]: t for t in full.pop("tensor_list")}
    assert full == short
    assert (full["format"], full["tensors"], full["chunks"], full["parameters"], full["bytes"]) == ("ucp", 3, 3, 15, 102)
    assert full["roles"] == {"weight": 2, "state": 1} and full["dtypes"] == {"float32": 2, "bfloat16": 1}
    assert full["objects"] == ["epoch"] and full["provenance"]["run"] == "unit test"
    assert full["files"] and all((ours / path).stat().st_size == size for path, size in full["files"].items())
    assert full["file_bytes"] == sum(full["files"].values()) >= 102
    state = tensors["optim.state.layers.0.weight.exp_avg"]
    assert (state["role"], state["fqn"], state["state"], state["shape"]) == ("state", "layers.0.weight", "exp_avg", [3, 4])
    assert state["key"] == "optim.state.layers.0.weight.exp_avg" and state["bytes"] == 48 and state["chunks"] == 1


def test_stock_checkpoint_and_names_that_would_steer_the_terminal(stock: Path) -> None:
    shown = ucp("show", stock, "--tensors")
    assert shown.exit_code == 0 and "\x1b" not in shown.stdout
    assert r"\x1b[31mred[/bold]" in shown.stdout and "scalar" in shown.stdout
    full = json.loads(ucp("show", stock, "--json").stdout)
    assert full["format"] == "dcp" and full["generation"] is None and full["parameters"] is None and full["roles"] == {"plain": 3}


def test_deepspeed_where_it_lies() -> None:
    folder = Path(__file__).parent.parent / "data" / "deepspeed" / "z1_bf16_w3"
    full = json.loads(ucp("show", folder, "--json", "--tensors").stdout)
    assert full["format"] == "deepspeed" and full["generation"] is None
    weights = {t["fqn"]: t for t in full["tensor_list"] if t["role"] == "weight"}
    masters = {t["fqn"]: t for t in full["tensor_list"] if t["role"] == "master"}
    assert weights and weights.keys() == masters.keys()
    assert {t["dtype"] for t in weights.values()} == {"bfloat16"} and {t["dtype"] for t in masters.values()} == {"float32"}
    assert full["parameters"] == sum(t["bytes"] // 2 for t in weights.values()) == sum(t["bytes"] // 4 for t in masters.values())


@pytest.mark.parametrize("flags", [(), ("--json",), ("--tensors",)])
def test_errors_are_one_line_on_stderr(tmp_path: Path, flags: tuple[str, ...]) -> None:
    shown = ucp("show", tmp_path / "nothing here", *flags)
    assert shown.exit_code == 1 and shown.stdout == ""
    assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1 and "nothing here" in shown.stderr


def test_damaged_checkpoint(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "ucp.json").write_bytes((ours / "ucp.json").read_bytes()[:-20])
    shown = ucp("show", tmp_path)
    assert shown.exit_code == 1 and shown.stderr.count("\n") == 1 and "ucp.json" in shown.stderr


def test_unknown_protocol(tmp_path: Path) -> None:
    shown = ucp("show", "nosuchprotocol://bucket/x")
    assert shown.exit_code == 1 and shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1


def test_wrong_use_is_exit_code_2(stock: Path) -> None:
    assert ucp("show").exit_code == 2
    assert ucp("show", stock, "--prefer", "other").exit_code == 2
    assert ucp("--version").stdout.startswith("ucp_dcp ")


def test_a_bug_keeps_its_traceback(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr("ucp_dcp.checkpoint.open_checkpoint", broken)
    with pytest.raises(KeyError, match="a bug of ours"):
        ucp("show", stock)


def test_as_a_program(ours: Path, tmp_path: Path) -> None:
    """The console script: nothing on the way prints, and a pipe gets whole names."""
    run = [sys.executable, "-c", "import ucp_dcp.cli; ucp_dcp.cli.main()", "show"]
    good = subprocess.run([*run, str(ours), "--tensors"], capture_output=True, text=True, timeout=60)
    assert good.returncode == 0 and good.stderr == "" and "optim.state.layers.0.weight.exp_avg" in good.stdout
    bad = subprocess.run([*run, str(tmp_path / "missing")], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and bad.stdout == "" and bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1


def test_text_helpers() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 1 << 20, 5 << 40, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 TiB",
        "1.0 PiB",
    ]
    assert printable("é\x07\u202e") == "é\\x07\\u202e" and one_line(" a\n\tb\x1b ") == "a b\\x1b"
