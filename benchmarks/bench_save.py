"""Saving into a local folder: ours beside stock DCP, torch.save, and the bare system calls, of the same bytes in the same run.

Each case runs once per round, all cases in turn, so that a busy machine disturbs all of them alike. Every case does the same fsyncs (file
and folder), also torch.save and the raw write. The files lie in a temporary folder of the disk (``--dir``) and in memory (``--shm``).
``--large``: peak memory of a save of 4 GiB, in a process of its own; it writes 4 GiB into ``--dir``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Bench, Measurement, human_bytes, timed

import ucp_dcp
from ucp_dcp.storage.blocks import BLOCK, block_digest

warnings.filterwarnings("ignore")

THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
BOUND = 512  # MiB that a save may need beside the state


def ours(
    state: dict[str, Any], folder: Path, *, digests: bool = True, stock: bool = True, threads: int = THREADS, files: int | None = None
) -> None:
    options = {"threads": threads, "files": files}
    writer = ucp_dcp.UCPStorageWriter(folder, digests=digests, stock_metadata=stock, storage_options=options)
    dcp.save(state, storage_writer=writer, planner=ucp_dcp.UCPSavePlanner(), no_dist=True)


def stock(state: dict[str, Any], folder: Path, threads: int) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=threads), no_dist=True)


def torch_save(state: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw(memory: memoryview, folder: Path, threads: int, files: int = 1, *, write: bool = True, digest: bool = False) -> None:
    """The limit: pwrite of 1 MiB at a time into as many files, and the digest of each, from as many threads."""
    folder.mkdir()
    each = -(-len(memory) // files // (8 * BLOCK)) * 8 * BLOCK
    fds = [os.open(folder / f"file{i}", os.O_WRONLY | os.O_CREAT) for i in range(files)]

    def one(start: int) -> None:
        number = start // each
        for at in range(start, min(start + 8 * BLOCK, len(memory)), BLOCK):
            view = memory[at : at + BLOCK]
            if digest:
                block_digest(view)
            if write and os.pwrite(fds[number], view, at - number * each) != len(view):
                raise SystemExit("short write")

    # slices of the files in turn, so that threads write into different files
    slices = sorted(range(0, len(memory), 8 * BLOCK), key=lambda start: (start % each, start))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, slices))
    for fd in fds:
        if write:
            os.fsync(fd)
        os.close(fd)
    if write:
        sync_folder(folder)


def in_turn(bench: Bench, what: str, root: Path, cases: dict[str, Callable[[Path], Any]], rounds: int) -> dict[str, Measurement]:
    """Time all cases, one after the other, ``rounds`` times and once before; each into an empty folder."""
    walls: dict[str, list[float]] = {name: [] for name in cases}
    cpus: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            folder = root / "save"
            shutil.rmtree(folder, ignore_errors=True)
            _, wall, cpu = timed(lambda c=case, f=folder: c(f))
            if turn:
                walls[name].append(wall)
                cpus[name].append(cpu)
    shutil.rmtree(root / "save", ignore_errors=True)
    return {name: bench.add(Measurement(f"{what}: {name}", tuple(walls[name]), tuple(cpus[name]))) for name in cases}


def ratio(over: Measurement, *under: Measurement, clock: str) -> float:
    """Median over the rounds of the ratio within each round."""
    runs = [getattr(m, f"{clock}_runs") for m in under]
    return statistics.median(a / sum(b) for a, *b in zip(getattr(over, f"{clock}_runs"), *runs, strict=True))


def check(state: dict[str, Any], folder: Path) -> None:
    """What the timed call wrote is a checkpoint that loads."""
    back = {key: torch.zeros_like(value) for key, value in state["model"].items()}
    ucp_dcp.load({"model": back}, folder, no_dist=True, verify="strict")
    if not all(torch.equal(back[key], value) for key, value in state["model"].items()):
        raise SystemExit("ours saved other values")


def large_tensors(bench: Bench, place: str, root: Path, mib: int, rounds: int, notes: list[str]) -> None:
    side = mib * (1 << 20) // 4 // 100 // 1024
    state = {"model": {f"layers.{i}.weight": torch.randn(side + i % 7, 1024) for i in range(100)}}
    ours(state, root / "once")
    check(state, root / "once")
    memory = memoryview(b"".join(path.read_bytes() for path in sorted((root / "once").rglob("*.distcp"))))
    shutil.rmtree(root / "once")
    what = f"{place}, {human_bytes(len(memory))} in 100 tensors"
    rows = in_turn(
        bench,
        what,
        root,
        {
            f"raw write, {THREADS} files": lambda f: raw(memory, f, THREADS, THREADS),
            "raw write, 1 file": lambda f: raw(memory, f, THREADS),
            "digest alone": lambda f: raw(memory, f, THREADS, write=False, digest=True),
            "ours": lambda f: ours(state, f),
            "ours, 1 file": lambda f: ours(state, f, files=1),
            "ours without digests": lambda f: ours(state, f, digests=False),
            "ours without stock .metadata": lambda f: ours(state, f, stock=False),
            "ours, 1 thread": lambda f: ours(state, f, threads=1),
            "raw write, 1 thread": lambda f: raw(memory, f, 1),
            "stock, 1 thread (its default)": lambda f: stock(state, f, 1),
            f"stock, {THREADS} threads": lambda f: stock(state, f, THREADS),
            "torch.save": lambda f: torch_save(state, f),
        },
        rounds,
    )
    one, bare = rows["ours"], rows[f"raw write, {THREADS} files"]
    best = min(rows["stock, 1 thread (its default)"], rows[f"stock, {THREADS} threads"], key=lambda m: m.wall)
    notes.append(
        f"{what}: CPU ours / (raw + digest) = {ratio(one, bare, rows['digest alone'], clock='cpu'):.2f} (aim 1.1), "
        f"without digests / raw = {ratio(rows['ours without digests'], bare, clock='cpu'):.2f}; "
        f"wall ours / raw = {ratio(one, bare, clock='wall'):.2f} (aim 1.25), with 1 file "
        f"{ratio(rows['ours, 1 file'], rows['raw write, 1 file'], clock='wall'):.2f}, with 1 thread "
        f"{ratio(rows['ours, 1 thread'], rows['raw write, 1 thread'], clock='wall'):.2f}; stock (faster of the two) / ours = "
        f"{ratio(best, one, clock='wall'):.2f} wall (aim 1.5), {ratio(best, one, clock='cpu'):.2f} CPU; torch.save / ours = "
        f"{ratio(rows['torch.save'], one, clock='wall'):.2f} wall, {ratio(rows['torch.save'], one, clock='cpu'):.2f} CPU"
    )


def small_tensors(bench: Bench, place: str, root: Path, count: int, rounds: int, notes: list[str]) -> None:
    state = {"model": {f"layers.{i}.scale": torch.randn(1024) for i in range(count)}}
    ours(state, root / "once")
    check(state, root / "once")
    shutil.rmtree(root / "once")
    what = f"{place}, {count:,} tensors of 4 KiB"
    rows = in_turn(
        bench,
        what,
        root,
        {
            "ours": lambda f: ours(state, f),
            "ours without stock .metadata": lambda f: ours(state, f, stock=False),
            "stock": lambda f: stock(state, f, 1),
            "torch.save": lambda f: torch_save(state, f),
        },
        rounds,
    )
    for name, aim in (("ours", 5), ("ours without stock .metadata", 10)):
        notes.append(
            f"{what}: stock / {name} = {ratio(rows['stock'], rows[name], clock='cpu'):.1f} CPU (aim {aim}), "
            f"{ratio(rows['stock'], rows[name], clock='wall'):.1f} wall"
        )


_PEAK = """
import resource, sys, tempfile, torch, ucp_dcp
mode, root = sys.argv[1:]
ucp_dcp.save({"x": torch.ones(5000, 1000).T}, tempfile.mkdtemp(dir=root), no_dist=True)
tensors = (torch.ones(8192, 8192) for _ in range(16))
state = {f"w{i}": t.T if mode == "transposed" else t for i, t in enumerate(tensors)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ucp_dcp.save(state, tempfile.mkdtemp(dir=root), no_dist=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak(root: Path, notes: list[str]) -> None:
    """Growth of the peak resident set by one save of 4 GiB."""
    for mode in ("contiguous", "transposed"):
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", _PEAK, mode, str(root)], capture_output=True, text=True, check=True)
        notes.append(f"4 GiB, {mode}: peak resident memory grew by {out.stdout.strip()} MiB during the save (bound {BOUND})")
        for folder in root.iterdir():
            shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true", help="peak memory with 4 GiB as well")
    parser.add_argument("--dir", help="a folder of the disk; default: the temporary folder")
    parser.add_argument("--shm", default="/dev/shm", help="a folder in memory; left out where there is none")
    parser.add_argument("--mib", type=int, help="MiB of the large tensors; default 1024, 64 with --quick")
    parser.add_argument("--rounds", type=int, help="default 5, 2 with --quick")
    parser.add_argument("--only", nargs="*", choices=("tensors", "small", "none"))
    args = parser.parse_args()
    bench = Bench("save", "Saving into a local folder")
    notes = [f"{THREADS} threads; load average {os.getloadavg()[0]:.1f}"]
    mib = args.mib or (64 if args.quick else 1024)
    rounds = args.rounds or (2 if args.quick else 5)
    for place, parent in (("/dev/shm" if args.shm == "/dev/shm" else "memory", args.shm), ("disk", args.dir)):
        if parent is not None and not os.path.isdir(parent):
            continue
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            if args.only is None or "tensors" in args.only:
                large_tensors(bench, place, Path(folder), mib, rounds, notes)
            if args.only is None or "small" in args.only:
                small_tensors(bench, place, Path(folder), 1000 if args.quick else 10_000, rounds, notes)
    if args.large:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            peak(Path(folder), notes)
    bench.finish(*notes)


if __name__ == "__main__":
    main()
