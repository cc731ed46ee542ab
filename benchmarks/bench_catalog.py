"""What a catalog of a million chunks costs: build, serialise, open, check, find one rank's chunks, check coverage.

Prints one table and writes benchmarks/results/catalog.json. Run: python benchmarks/bench_catalog.py [--chunks N] [--repeat R]

Times are the best of R runs in one process, on warm memory. "open" goes from a read-only memory map of the sections to a catalog whose
tensor columns and file table are checked; names are decoded, and chunks checked, when they are first used: those times are listed by
themselves.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ucp_dcp.catalog import Catalog, FileRow
from ucp_dcp.geometry import check_cover_ragged, intersect_ragged

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """How a million chunks are spread."""

    name: str
    tensors: int
    chunks: int  # per tensor
    grid: bool = False  # cut in both dims instead of dim 0 alone


def columns(case: Case) -> dict[str, Any]:
    """Columns of 2-D tensors, every one cut evenly, chunk i of each in file i of at most 1,024."""
    t, k = case.tensors, case.chunks
    rows = int(np.sqrt(k)) if case.grid else k
    while k % rows:
        rows -= 1
    cols = k // rows
    height, width = 8, 4096 // cols
    i, j = np.divmod(np.arange(k), cols)
    boxes = np.empty((k, 2, 2), dtype=np.int64)
    boxes[:, 0, 0], boxes[:, 0, 1] = i * height, j * width
    boxes[:, 1, 0], boxes[:, 1, 1] = height, width
    files = [FileRow(f"g-{0:032x}/__{r}_0.distcp", 1 << 40) for r in range(min(k, 1024))]
    keys = [f"model.layers.{n:06d}.mlp.experts.down_proj.weight" for n in range(t)]
    names = [key.removeprefix("model.") for key in keys]
    return {
        "keys": keys,
        "roles": np.zeros(t, dtype=np.uint8),
        "fqns": names,
        "states": [""] * t,
        "dtypes": np.full(t, 3, dtype=np.uint8),
        "shape_start": np.arange(t + 1, dtype=np.int64) * 2,
        "shape": np.tile(np.array([rows * height, cols * width], dtype=np.int64), t),
        "chunk_start": np.arange(t + 1, dtype=np.int64) * k,
        "coords": np.tile(boxes.reshape(-1), t),
        "files": files,
        "chunk_file": np.tile(np.arange(k, dtype=np.int32) % len(files), t),
        "chunk_offset": np.repeat(np.arange(t, dtype=np.int64) * 65536, k),
    }


def best(repeat: int, action: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> tuple[float, Any]:
    """Seconds of the fastest of ``repeat`` runs, and the last result."""
    fastest, result = float("inf"), None
    for _ in range(repeat):
        argument = (prepare(),) if prepare else ()
        gc.collect()
        start = time.perf_counter()
        result = action(*argument)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest, result


def measure(case: Case, repeat: int) -> dict[str, Any]:
    given = columns(case)
    out: dict[str, Any] = {"case": case.name, "tensors": case.tensors, "chunks": case.tensors * case.chunks}
    out["build_s"], catalog = best(repeat, lambda: Catalog.from_columns(**given))
    # The same tensors in another order: every column is permuted.
    order = list(range(case.tensors - 1, -1, -1))
    shuffled = {**given, "keys": [given["keys"][i] for i in order], "fqns": [given["fqns"][i] for i in order]}
    out["build_unsorted_s"], _ = best(repeat, lambda: Catalog.from_columns(**shuffled))
    out["serialise_s"], sections = best(repeat, catalog.to_sections)
    out["bytes"] = sum(memoryview(data).nbytes for data in sections.values())
    with tempfile.TemporaryFile() as file:
        table: dict[str, tuple[int, int]] = {}
        for name, data in sections.items():
            file.write(b"\0" * (-file.tell() % 64))
            table[name] = (file.tell(), memoryview(data).nbytes)
            file.write(data)
        file.flush()
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def load(name: str) -> memoryview | None:
        if name not in table:
            return None
        start, size = table[name]
        return whole[start : start + size]

    out["open_s"], opened = best(repeat, lambda: Catalog.from_sections(load))
    middle = given["keys"][case.tensors // 2]
    out["first_find_s"], _ = best(repeat, lambda c: c.tensor(c.find(middle)), lambda: Catalog.from_sections(load))
    out["first_boxes_s"], _ = best(repeat, lambda c: c.boxes(case.tensors // 2), lambda: Catalog.from_sections(load))
    out["check_all_chunks_s"], _ = best(repeat, lambda c: c.coords, lambda: Catalog.from_sections(load))
    opened.validate()

    # One rank of 8 wants rows [3/8, 4/8) of every tensor: one box each.
    t = case.tensors
    want = np.empty((t, 2, 2), dtype=np.int64)
    shapes = opened.shape.reshape(t, 2)
    want[:, 0, 0], want[:, 1, 0] = shapes[:, 0] * 3 // 8, shapes[:, 0] // 8
    want[:, 0, 1], want[:, 1, 1] = 0, shapes[:, 1]
    start = np.arange(t + 1, dtype=np.int64)
    out["find_chunks_of_rank_s"], pairs = best(
        repeat, lambda: intersect_ragged(start, want.reshape(-1), opened.chunk_start, opened.coords, opened.ndim)
    )
    out["pairs"] = len(pairs.tensor)
    out["check_cover_s"], wrong = best(
        repeat, lambda: check_cover_ragged(opened.shape_start, opened.shape, opened.chunk_start, opened.coords)
    )
    if len(wrong):
        raise SystemExit(f"{case.name}: {len(wrong)} tensors are not covered; the benchmark is wrong")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000, help="chunks per case")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    n = args.chunks
    cases = [
        Case("1,000 chunks per tensor, dim 0", n // 1000, 1000),
        Case("1,000 chunks per tensor, grid", n // 1000, 1000, grid=True),
        Case("10 chunks per tensor, dim 0", n // 10, 10),
    ]
    rows = [measure(case, args.repeat) for case in cases]
    lines = [
        ("build from columns", "build_s", 2.0),
        ("build from columns in reverse order", "build_unsorted_s", 2.0),
        ("serialise", "serialise_s", None),
        ("size", "bytes", 80e6),
        ("open", "open_s", 0.020),
        ("open is followed by: first find(key)", "first_find_s", None),
        ("... first boxes(t) of one tensor", "first_boxes_s", None),
        ("... check all chunks", "check_all_chunks_s", None),
        ("find the chunks of one rank's boxes", "find_chunks_of_rank_s", 1.0),
        ("check exact cover of all tensors", "check_cover_s", None),
    ]
    load = os.getloadavg()[0]
    print(f"{n:,} chunks of 2-D tensors, numpy {np.__version__}, {os.cpu_count()} CPUs, load {load:.1f}, best of {args.repeat}\n")
    print(f"{'':38}" + "".join(f"{row['case']:>34}" for row in rows) + f"{'aim':>12}")

    def show(value: float, unit: str) -> str:
        return f"{value / 1e6:.1f} MB" if unit == "bytes" else f"{value * 1e3:.1f} ms"

    for label, field, aim in lines:
        values = "".join(f"{show(row[field], field):>34}" for row in rows)
        print(f"{label:38}{values}{show(aim, field) if aim else '':>12}")
    RESULTS.mkdir(exist_ok=True)
    info = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg(),
    }
    (RESULTS / "catalog.json").write_text(json.dumps({"host": info, "repeat": args.repeat, "cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
