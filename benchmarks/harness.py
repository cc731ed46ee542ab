"""What all benchmarks share: repeated timing, one table on the screen, one JSON file in ``benchmarks/results/``.

A benchmark is a script ``bench_<subject>.py``::

    bench = Bench("planning", "Coordinator planning, LLaMA-2 7B with Adam on 256 ranks")
    ours = bench.measure("ucp_dcp", lambda: plan(columns), repeat=5, ranks=256)
    bench.finish()

``python benchmarks/bench_<subject>.py --quick`` asks for a run of seconds; a benchmark looks at ``bench.quick``.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["RESULTS", "Bench", "Measurement", "human_bytes", "timed"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of each run; ``wall`` and ``cpu`` are medians. ``cpu`` is user + system time of this process, all threads."""

    label: str
    wall_runs: tuple[float, ...]
    cpu_runs: tuple[float, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    """What the last run returned; not saved."""

    @property
    def wall(self) -> float:
        """Median wall seconds."""
        return statistics.median(self.wall_runs)

    @property
    def cpu(self) -> float:
        """Median CPU seconds."""
        return statistics.median(self.cpu_runs)


def timed(fn: Callable[[], Any]) -> tuple[Any, float, float]:
    """``(result, wall seconds, CPU seconds)`` of one call, with garbage of earlier work collected before."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = fn()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def human_bytes(n: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


class Bench:
    """Collects measurements of one subject, shows them as one table and saves them."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.quick = "--quick" in sys.argv
        self.rows: list[Measurement] = []

    def measure(
        self,
        label: str,
        fn: Callable[..., Any],
        *,
        repeat: int = 3,
        warmup: int = 1,
        setup: Callable[[], Any] | None = None,
        **facts: Any,
    ) -> Measurement:
        """Time ``fn()``, or ``fn(setup())`` with ``setup`` outside the clock. ``facts`` (numbers or text) become columns."""
        result: Any = None
        walls, cpus = [], []
        for i in range(warmup + repeat):
            result = None  # the previous result is not memory of this run
            if setup is None:
                result, wall, cpu = timed(fn)
            else:
                argument = setup()
                result, wall, cpu = timed(lambda a=argument: fn(a))
            if i >= warmup:
                walls.append(wall)
                cpus.append(cpu)
        return self.add(Measurement(label, tuple(walls), tuple(cpus), facts, result))

    def add(self, measurement: Measurement) -> Measurement:
        """Take a measurement made elsewhere (for example on ranks)."""
        self.rows.append(measurement)
        return measurement

    def finish(self, *notes: str) -> Path:
        """Print the table, save ``results/<name>.json``; returns its path."""
        columns = list(dict.fromkeys(key for row in self.rows for key in row.facts))
        table = Table(title=self.title)
        table.add_column("")
        for heading in ("wall s", "CPU s", "runs", *columns):
            table.add_column(heading, justify="right")
        for row in self.rows:
            facts = (row.facts.get(key, "") for key in columns)
            table.add_row(row.label, f"{row.wall:.4g}", f"{row.cpu:.4g}", str(len(row.wall_runs)), *(_text(fact) for fact in facts))
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table)
        for note in notes:
            console.print(note)
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        rows = [
            {"label": r.label, "wall": r.wall, "cpu": r.cpu, "wall_runs": r.wall_runs, "cpu_runs": r.cpu_runs, "facts": r.facts}
            for r in self.rows
        ]
        saved = {"name": self.name, "title": self.title, "quick": self.quick, **_machine(), "rows": rows}
        path.write_text(json.dumps(saved, indent=1) + "\n")
        return path


def _text(fact: Any) -> str:
    return f"{fact:.4g}" if isinstance(fact, float) else f"{fact:,}" if isinstance(fact, int) else str(fact)


def _machine() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
