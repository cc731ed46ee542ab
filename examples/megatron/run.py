"""The whole story: train with TP 2 x PP 2, save in the middle, go on on other grids and under FSDP2, and come back.

    python run.py [--short] [--out FOLDER]

Starts the ranks itself (gloo, CPU). Prints a table; writes ``losses.svg`` and ``results.json``. Exits with 1 when a state is not bitwise
equal, or a loss is off by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import shared
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel import Grid
from rich.console import Console
from rich.table import Table
from trainer import Options, Result, train
from whole import fingerprints, masters_are_weights, whole

LIMIT = 1e-4
FIRST = Grid(tp=2, pp=2)
TARGETS = (Grid(pp=2, dp=2, stages=(3, 1)), Grid(tp=4), Grid(fsdp=2))


@dataclass
class Resumed:
    """A row of the table. differences: |loss - loss of the run that went on| of each step after the resume."""

    source: str
    grid: str
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
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    torch.save(train(options), f"{out}.{rank}")
    dist.destroy_process_group()


def run(options: Options, out: Path) -> list[Result]:
    """A run on as many processes as its grid has places; what each rank has to tell."""
    world = options.grid.ranks
    mp.start_processes(rank_main, (world, options, str(out)), nprocs=world, start_method="forkserver")
    results = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]
    for used in out.parent.glob(f"{out.name}.*"):
        used.unlink()
    return results


def state_of(results: list[Result], what: str) -> dict[str, str]:
    """Fingerprints of the global state at the save or after the resume."""
    tensors = whole([getattr(r, what) for r in results])
    if not masters_are_weights(tensors):
        raise SystemExit(f"{what}: a master is not its weight")
    return fingerprints(tensors)


def compare(source: str, grid: Grid, results: list[Result], losses: dict[int, float], state: dict[str, str]) -> Resumed:
    """A resumed run beside the losses and the state that it should have."""
    own = results[0].losses
    if own.keys() != losses.keys():
        raise SystemExit(f"{grid}: steps {sorted(own)} were trained, {sorted(losses)} were expected")
    found = state_of(results, "resumed")
    differences = [abs(own[step] - losses[step]) for step in own]
    unequal = sorted(key for key in state.keys() | found.keys() if state.get(key) != found.get(key))
    seconds, read = max(r.load_seconds for r in results), sum(r.bytes_read for r in results)
    return Resumed(source, str(grid), len(results), own, differences, len(state), unequal, seconds, read)


def table_of(rows: list[Resumed]) -> Table:
    table = Table(title="Resumed; weights, moments and step counts put together by hand and hashed right after the load")
    for heading, right in (("checkpoint", False), ("resumed on", False), ("ranks", True), ("state bitwise equal", True)):
        table.add_column(heading, justify="right" if right else "left")
    for heading in ("max |loss difference|", "load s", "bytes read"):
        table.add_column(heading, justify="right")
    for row in rows:
        equal = f"[green]{row.tensors} of {row.tensors}[/]" if not row.unequal else f"[bold red]{len(row.unequal)} differ[/]"
        worst = max(row.differences)
        shown = f"[{'green' if worst <= LIMIT else 'bold red'}]{worst:.1e}[/]"
        table.add_row(row.source, row.grid, str(row.ranks), equal, shown, f"{row.load_seconds:.2f}", f"{row.bytes_read:,}")
    return table


def main() -> None:
    """Train, resume, compare; table, plot and numbers."""
    parser = argparse.ArgumentParser(description="Train with TP x PP, resume on other grids and under FSDP2, and come back.")
    parser.add_argument("--short", action="store_true", help="fewer steps")
    default = Path(os.environ.get("UCP_DEMO_OUT", "demo_out")) / "megatron"
    parser.add_argument("--out", type=Path, default=default, help="a folder that is emptied first (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    # A fork of a process that has imported torch starts in no time. The fork server itself runs no threads.
    mp.set_forkserver_preload(["trainer", "torch._dynamo", "ucp_dcp.api"])
    began = time.perf_counter()

    save_at, more = (6, 6) if arguments.short else (40, 20)
    back_at, end = save_at + more // 2, save_at + more
    checkpoint = str(out / "checkpoint")
    results = run(Options(FIRST, end, save=checkpoint, save_at=save_at, through_dcp=True, keep_state=True), out / "first")
    losses, state = results[0].losses, state_of(results, "saved")
    went = f"loss {losses[1]:.3f} -> {losses[end]:.3f}; saved after step {save_at} with dcp.save and UCPSavePlanner"
    console.print(f"   {FIRST}: trained {end} steps without a stop, {went}")
    after = {step: loss for step, loss in losses.items() if step > save_at}
    rows, between = [], ""
    for grid in TARGETS:
        # another seed: every weight has to come from the checkpoint. Each saves again on its way; the last of these goes back.
        between = str(out / f"from_{len(rows)}")
        results = run(Options(grid, end, between, back_at, checkpoint, seed=1, keep_state=True), out / "other")
        rows.append(compare(str(FIRST), grid, results, after, state))
        again, late = state_of(results, "saved"), {s: v for s, v in results[0].losses.items() if s > back_at}
        if grid is TARGETS[0] and arguments.short:
            continue
        results = run(Options(FIRST, end, resume=between, seed=2, keep_state=True), out / "back")
        rows.append(compare(str(grid), FIRST, results, late, again))

    console.print(table_of(rows))
    curves = [(row.source, row.grid, row.losses, row.differences) for row in rows]
    (out / "losses.svg").write_text(shared.module("plot").draw(losses, {}, curves, LIMIT))
    numbers = {"uninterrupted": losses, "resumed": [asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"   {time.perf_counter() - began:.0f} s; plot and numbers: {out / 'losses.svg'}, {out / 'results.json'}")
    if not all(row.good for row in rows):
        bad = [f"{row.source} on {row.grid}: {row.unequal[:3]}, {max(row.differences):.1e}" for row in rows if not row.good]
        raise SystemExit("not as it should be:\n  " + "\n  ".join(bad))


if __name__ == "__main__":
    main()
