"""The whole story: train on one mesh, save in the middle, resume on others; then resume from a checkpoint that DeepSpeed wrote.

    python run.py [--short] [--out FOLDER]

Starts the ranks itself (gloo, CPU). Prints a table; writes ``losses.svg`` and ``results.json``. Exits with 1 when a state is not bitwise
equal, or a loss is off by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plot import draw
from rich.console import Console
from rich.table import Table
from train import Options, Result, train

HERE = Path(__file__).parent
ZERO = HERE / "zero"
LIMIT = 1e-4
FIRST = {"dp": 4}
OTHERS: list[dict[str, int]] = [{"dp": 3}, {"dp": 2, "tp": 2}, {}]


@dataclass
class Resumed:
    """A row of the table. differences: |loss - loss of the run it is compared with| of each step after the resume."""

    source: str
    mesh: str
    ranks: int
    losses: dict[int, float]
    differences: list[float]
    tensors: int
    unequal: list[str]
    load_seconds: float
    bytes_read: int

    @property
    def good(self) -> bool:
        return bool(self.tensors and not self.unequal and self.differences and max(self.differences) <= LIMIT)


def rank_main(rank: int, world: int, options: Options, out: str) -> None:
    """One rank of a run."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    torch.save(train(options), f"{out}.{rank}")
    if world > 1:
        dist.destroy_process_group()


def run(options: Options, out: Path) -> list[Result]:
    """A run on as many processes as its mesh has places; what each rank has to tell."""
    world = math.prod(options.mesh.values())
    mp.start_processes(rank_main, (world, options, str(out)), nprocs=world, start_method="forkserver")
    results = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]
    for used in out.parent.glob(f"{out.name}.*"):
        used.unlink()
    return results


def named(mesh: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) or "one process"


def compare(source: str, options: Options, results: list[Result], losses: dict[int, float], state: dict[str, str]) -> Resumed:
    """A resumed run beside the losses and the state that it should have."""
    own = {step.step: step.loss for step in results[0].log}
    if own.keys() != losses.keys():
        raise SystemExit(f"{named(options.mesh)}: steps {sorted(own)} were trained, {sorted(losses)} were expected")
    found = results[0].resumed
    return Resumed(
        source,
        named(options.mesh),
        len(results),
        own,
        [abs(own[step] - losses[step]) for step in own],
        len(state),
        sorted(key for key in state.keys() | found.keys() if state.get(key) != found.get(key)),
        max(r.load_seconds for r in results),
        sum(r.bytes_read for r in results),
    )


def table_of(rows: list[Resumed]) -> Table:
    steps = len(rows[0].differences)
    table = Table(title=f"Resumed; weights, moments and step counts hashed right after the load; then {steps} steps")
    for heading, right in (("checkpoint", False), ("resumed on", False), ("ranks", True), ("state bitwise equal", True)):
        table.add_column(heading, justify="right" if right else "left")
    for heading in ("max |loss difference|", "load s", "bytes read"):
        table.add_column(heading, justify="right")
    for row in rows:
        equal = f"[green]{row.tensors} of {row.tensors}[/]" if not row.unequal else f"[bold red]{len(row.unequal)} differ[/]"
        worst = max(row.differences)
        shown = f"[{'green' if worst <= LIMIT else 'bold red'}]{worst:.1e}[/]"
        table.add_row(row.source, row.mesh, str(row.ranks), equal, shown, f"{row.load_seconds:.2f}", f"{row.bytes_read:,}")
    return table


def main() -> None:
    """Both halves, table, plot and numbers."""
    parser = argparse.ArgumentParser(description="Train on one mesh, resume on others, and from DeepSpeed's ZeRO.")
    parser.add_argument("--short", action="store_true", help="fewer steps and meshes")
    default = Path(os.environ.get("UCP_DEMO_OUT", "demo_out")) / "fsdp"
    parser.add_argument("--out", type=Path, default=default, help="a folder that is emptied first (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    console = Console(width=None if sys.stdout.isatty() else 130)
    # A fork of a process that has imported torch starts in no time. The fork server itself runs no threads.
    mp.set_forkserver_preload(["train", "torch._dynamo", "ucp_dcp.frameworks.pytorch"])
    began = time.perf_counter()

    save_at, more = (20, 10) if arguments.short else (40, 20)
    checkpoint = str(out / "checkpoint")
    options = Options(mesh=FIRST, steps=save_at + more, save=checkpoint, save_at=save_at, fingerprint=True)
    whole = run(options, out / "first")[0]
    losses = {step.step: step.loss for step in whole.log}
    went = f"loss {losses[1]:.3f} -> {losses[save_at + more]:.3f}; saved after step {save_at}"
    console.print(f"   {named(FIRST)}: trained {save_at + more} steps without a stop, {went}")
    after = {step: loss for step, loss in losses.items() if step > save_at}
    rows = []
    for mesh in OTHERS[1:] if arguments.short else OTHERS:
        # another seed: every weight has to come from the checkpoint
        options = Options(mesh=mesh, steps=save_at + more, resume=checkpoint, seed=1, fingerprint=True)
        rows.append(compare(f"ours, {named(FIRST)}", options, run(options, out / "other"), after, whole.saved))

    expected = json.loads((ZERO / "expected.json").read_text())
    deepspeed = {int(step): loss for step, loss in expected["losses"].items()}
    deepspeed = {step: loss for step, loss in deepspeed.items() if step < min(deepspeed) + more}
    for mesh in OTHERS[1:2] if arguments.short else OTHERS:
        options = Options(mesh=mesh, steps=max(deepspeed), resume=str(ZERO / "checkpoint"), seed=1, fingerprint=True)
        source = f"DeepSpeed {expected['deepspeed']}, ZeRO-3 on {expected['ranks']}"
        rows.append(compare(source, options, run(options, out / "zero"), deepspeed, expected["fingerprints"]))

    console.print(table_of(rows))
    curves: list[dict[str, Any]] = [asdict(row) for row in rows]
    (out / "losses.svg").write_text(draw(losses, deepspeed, [(row.source, row.mesh, row.losses, row.differences) for row in rows], LIMIT))
    (out / "results.json").write_text(json.dumps({"uninterrupted": losses, "deepspeed": deepspeed, "resumed": curves}, indent=1) + "\n")
    console.print(f"   {time.perf_counter() - began:.0f} s; plot and numbers: {out / 'losses.svg'}, {out / 'results.json'}")
    if not all(row.good for row in rows):
        bad = [f"{row.source} on {row.mesh}: {row.unequal[:3]}, {max(row.differences):.1e}" for row in rows if not row.good]
        raise SystemExit("not as it should be:\n  " + "\n  ".join(bad))


if __name__ == "__main__":
    main()
