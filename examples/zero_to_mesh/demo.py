"""A real DeepSpeed ZeRO checkpoint, opened where it lies, onto an FSDP2 x TP mesh, saved with DCP, read by stock torch and by another mesh.

    make demo            (or: python examples/zero_to_mesh/demo.py)

Every step proves that all values are equal, bit for bit, to what the live DeepSpeed engine held when it saved (``truth.pt``).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from model import Llama, parallelize
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ucp_dcp
from ucp_dcp.layout import collect

HERE = Path(__file__).parent
SOURCE = HERE / "data" / "z1_bf16_w3"
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
PICTURED = ("layers.0.gate_proj.weight", "layers.0.down_proj.weight")
ROOTS = {"model": "model", "optim": "optimizer"}

STOCK_READER = """
import sys, torch, torch.distributed.checkpoint as dcp
sys.modules["ucp_dcp"] = None
truth = torch.load(sys.argv[2], weights_only=True)
state = {k: torch.zeros_like(v) for k, v in truth.items()}
dcp.load(state, checkpoint_id=sys.argv[1])
assert all(torch.equal(state[k], truth[k]) for k in truth)
print(len(truth))
"""


def training_state(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """A fresh model and AdamW on a mesh: random weights, empty optimizer state, all DTensors made by FSDP2 and tensor parallelism."""
    torch.manual_seed(dist.get_rank())
    model = parallelize(Llama(), init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {"model": get_model_state_dict(model), "optim": {"state": state}}


def tensors_of(state: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    """(fqn, state name or "", tensor)."""
    for fqn, weight in state["model"].items():
        yield fqn, "", weight
    for fqn, states in state["optim"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            yield fqn, name, states[name]


def unequal(state: Mapping[str, Any], truth: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Names whose gathered DTensor is not, bit for bit, what DeepSpeed's live engine held."""
    out = []
    for fqn, name, tensor in tensors_of(state):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full, truth[fqn][name or "fp32"]):
            out.append(f"{fqn} {name}")
    return out


def boxes_of(state: Mapping[str, Any]) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """What this rank holds of the pictured weights."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for fqn in PICTURED:
        fragments = collect({"model": {fqn: state["model"][fqn]}}).fragments
        found[fqn] = [(f.box.offset, f.box.size) for f in fragments if not f.box.empty]
    return found


def worker(rank: int, world: int, mesh: tuple[int, ...], names: tuple[str, ...], source: str, target: str | None, out: str) -> None:
    """One rank: load ``source`` onto the mesh, prove equality, save to ``target``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    truth = torch.load(SOURCE / "truth.pt", weights_only=True)["params"]
    state = training_state(mesh, names)
    different_before = len(unequal(state, truth))

    start = time.perf_counter()
    planner = ucp_dcp.UCPLoadPlanner(roots=ROOTS)
    reader = ucp_dcp.UCPStorageReader(source, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=planner)
    load_seconds = time.perf_counter() - start
    wrong = unequal(state, truth)

    save_seconds = 0.0
    if target is not None:
        dist.barrier()
        start = time.perf_counter()
        dcp.save(state, storage_writer=ucp_dcp.UCPStorageWriter(target), planner=ucp_dcp.UCPSavePlanner(roots=ROOTS))
        save_seconds = time.perf_counter() - start
    report = {
        "before": different_before,
        "wrong": wrong,
        "tensors": sum(1 for _ in tensors_of(state)),
        "read": planner.report.bytes_read,
        "wanted": planner.report.bytes_wanted,
        "load": load_seconds,
        "save": save_seconds,
        "boxes": boxes_of(state),
        "sources": sorted(set(planner.report.source.values())),
    }
    torch.save(report, f"{out}.{rank}")
    dist.destroy_process_group()


def on_mesh(mesh: tuple[int, ...], names: tuple[str, ...], source: Path, target: Path | None, out: Path) -> list[dict[str, Any]]:
    """Run ``worker`` on as many gloo processes as the mesh has places."""
    world = int(torch.tensor(mesh).prod())
    mp.spawn(worker, (world, mesh, names, str(source), str(target) if target else None, str(out)), nprocs=world)
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]


def zero_owners(ckpt: ucp_dcp.Checkpoint, fqn: str) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """What each ZeRO rank holds of a master: one file of optimizer states is one rank."""
    stored = ckpt[f"optim.state.{fqn}.master"]
    t = ckpt.catalog.find_canonical(stored.name)
    assert t is not None
    low, high = ckpt.catalog.chunk_range(t)
    ranks = [i for i, file in enumerate(ckpt.files) if "optim_states" in file.path]
    owners: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in ranks]
    for file, box in zip(ckpt.catalog.chunk_file[low:high].tolist(), stored.chunks, strict=True):
        owners[ranks.index(file)].append((box.offset, box.size))
    return owners


def picture(title: str, shape: tuple[int, ...], owners: list[list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> Panel:
    """Who holds which part of a matrix, scaled down: one color and digit per rank."""
    rows, columns = 11, 40
    text = Text()
    for r in range(rows):
        for c in range(columns):
            at = (r * shape[0] // rows, c * shape[1] // columns)
            inside = [
                rank
                for rank, boxes in enumerate(owners)
                if any(all(o <= x < o + s for x, o, s in zip(at, offset, size, strict=True)) for offset, size in boxes)
            ]
            text.append(str(inside[0]) if inside else "?", style=f"black on {COLORS[inside[0] % len(COLORS)]}" if inside else "")
        text.append("\n" if r < rows - 1 else "")
    return Panel(text, title=f"{title} {list(shape)}", expand=False)


def human(n: int) -> str:
    """Bytes for people."""
    return f"{n:,} B" if n < 10_000 else f"{n / 1024:,.0f} KiB"


def main() -> None:
    """The whole demo."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    out = Path(os.environ.get("UCP_DEMO_OUT", "demo_out")).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    before = {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(SOURCE.rglob("*"))}

    start = time.perf_counter()
    ckpt = ucp_dcp.open_checkpoint(SOURCE)
    seconds = time.perf_counter() - start
    files = sum(size for p, (size, _) in before.items() if p.name.endswith(".pt") and p.name != "truth.pt")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("format", ckpt.format + "  " + ", ".join(f"{k}={v}" for k, v in ckpt.provenance.items() if isinstance(v, str | int))[:90])
    facts.add_row("tensors", f"{len(ckpt)} global tensors in {len(ckpt.files)} files, {human(files)}")
    facts.add_row("tensor bytes read", str(ckpt.stats.bytes_read))
    facts.add_row("bytes written", "0")
    facts.add_row("time", f"{1000 * seconds:.0f} ms")
    console.print(Panel(facts, title="1. A ZeRO-1 checkpoint that DeepSpeed wrote on 3 ranks, opened where it lies", expand=False))

    master = ckpt[f"optim.state.{PICTURED[0]}.master"]
    row = master[5]
    console.print(f"   one row of {master.name} {list(master.shape)}: {human(ckpt.stats.bytes_read)} read for {human(row.numel() * 4)}\n")
    console.print(Columns([picture(f"{fqn}: ZeRO", ckpt[f"optim.state.{fqn}.master"].shape, zero_owners(ckpt, fqn)) for fqn in PICTURED]))
    console.print(f"   before: fp32 masters as {master.pattern}; a digit is a ZeRO rank\n")

    saved = out / "universal"
    first = on_mesh((2, 2), ("dp", "tp"), SOURCE, saved, out / "fsdp_tp")
    shapes = {fqn: ckpt[f"optim.state.{fqn}.master"].shape for fqn in PICTURED}
    console.print(Columns([picture(f"{fqn}: mesh", shapes[fqn], [r["boxes"][fqn] for r in first]) for fqn in PICTURED]))
    console.print("   after: DTensors of FSDP2 x TP on DeviceMesh (dp 2, tp 2); a digit is a rank of the mesh\n")

    table = Table(title="2. dcp.load onto FSDP2 x TP, 4 gloo ranks; then dcp.save(planner=UCPSavePlanner())")
    for heading in ("rank", "tensors", "equal to DeepSpeed's live state", "bytes read", "bytes wanted", "load s", "save s"):
        table.add_column(heading, justify="right")
    for rank, r in enumerate(first):
        equal = f"{r['tensors'] - len(r['wrong'])} of {r['tensors']} (before: {r['tensors'] - r['before']})"
        table.add_row(str(rank), str(r["tensors"]), equal, human(r["read"]), human(r["wanted"]), f"{r['load']:.2f}", f"{r['save']:.2f}")
    console.print(table)
    after = {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(SOURCE.rglob("*"))}

    truth = torch.load(SOURCE / "truth.pt", weights_only=True)["params"]
    flat = {f"model.{fqn}": v["fp32"] for fqn, v in truth.items()}
    flat |= {f"optim.state.{fqn}.{s}": v[s] for fqn, v in truth.items() for s in ("exp_avg", "exp_avg_sq")}
    torch.save(flat, out / "truth_flat.pt")
    reader = [sys.executable, "-W", "ignore", "-c", STOCK_READER, str(saved), str(out / "truth_flat.pt")]
    stock = subprocess.run(reader, capture_output=True, text=True)
    other = on_mesh((3,), ("dp",), saved, None, out / "fsdp3")

    proof = Table(title="3. Proof: equal bit for bit to what the DeepSpeed engine held", show_header=True)
    proof.add_column("read by")
    proof.add_column("tensors equal", justify="right")
    rows = [
        ("FSDP2 x TP, mesh (2, 2), from the ZeRO files", all(not r["wrong"] for r in first), first[0]["tensors"]),
        ("plain dcp.load in a process that cannot import ucp_dcp", stock.returncode == 0, len(flat)),
        ("FSDP2 on 3 ranks, from what 4 ranks saved", all(not r["wrong"] for r in other), other[0]["tensors"]),
        ("the DeepSpeed folder: not a byte changed, no file added", before == after, len(before)),
    ]
    for name, good, count in rows:
        proof.add_row(name, Text(f"{count} of {count}" if good else "NOT EQUAL", style="green" if good else "bold red"))
    console.print(proof)
    if stock.returncode:
        console.print(stock.stderr)
    if not all(good for _, good, _ in rows):
        raise SystemExit("the demo found values that are not equal")
    console.print(f"The universal checkpoint is in {saved}; try: [bold].venv/bin/ucp show {saved}[/]")


if __name__ == "__main__":
    main()
