"""Loading from a local folder: ours beside stock DCP, torch.load, and the bare system calls, on the same bytes in the same run.

Same layout: a state of equal matrices and some small vectors, written by one process, loaded into memory that exists. Reshard: the stored
chunks are rows (Shard(0) over 8), each of 8 ranks wants columns (Shard(1)); the ranks are played one after another in this process, for
stock in the same way. Files lie in a temporary folder (``--dir``), so the page cache is warm, except in the rows that say cold.
``--large``: peak memory of a load of 4 GiB, in a process of its own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed.checkpoint as dcp
from digested import digest_checkpoint
from harness import Bench, human_bytes
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import ucp_dcp
from ucp_dcp.formats import open_source
from ucp_dcp.storage.blocks import BLOCK, block_digest
from ucp_dcp.transfer import default_threads

warnings.filterwarnings("ignore")


class Shards(torch.Tensor):
    """Several boxes of one global tensor in one process, as DCP's own protocol has it: what many ranks hold, without the ranks."""

    shards: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def __new__(cls, shards: list[tuple[tuple[int, ...], torch.Tensor]], shape: tuple[int, ...]) -> Shards:
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32)
        self.shards = shards
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=torch.float32)
        return [
            WriteItem(MetadataIndex(fqn, c.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(c, properties, self.size()))
            for c in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), shard.size()) for offset, shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(shard for offset, shard in self.shards if offset == tuple(index.offset or ()))


def pieces(full: torch.Tensor, parts: int, dim: int) -> Shards:
    step = full.shape[dim] // parts
    return Shards(
        [(tuple(i * step if d == dim else 0 for d in range(full.dim())), t.clone()) for i, t in enumerate(full.split(step, dim))],
        tuple(full.shape),
    )


def empty_columns(full: torch.Tensor, parts: int, rank: int) -> Shards:
    step = full.shape[1] // parts
    return Shards([((0, rank * step), torch.zeros(full.shape[0], step))], tuple(full.shape))


def write(state: dict[str, Any], folder: Path, *, torch_save: bool = False) -> None:
    """The same state three times: ours (with digests), stock, torch.save."""
    ucp_dcp.save(state, folder / "ours", no_dist=True)
    if all(row.blocks is None for row in open_source(str(folder / "ours")).catalog.files):
        digest_checkpoint(folder / "ours", BLOCK)
    dcp.save(state, checkpoint_id=folder / "stock", no_dist=True)
    if torch_save:
        torch.save(state, folder / "state.pt")


def data_files(folder: Path) -> list[Path]:
    return [folder / row.path for row in open_source(str(folder)).catalog.files]


def raw(files: list[Path], into: memoryview, threads: int, *, read: bool = True, digest: bool = False) -> None:
    """Every byte with preadv in calls of 1 MiB, and the digest of each block."""
    jobs, at = [], 0
    for file in files:
        size = file.stat().st_size
        jobs += [(file, p, at + p, min(8 * BLOCK, size - p)) for p in range(0, size, 8 * BLOCK)]
        at += size

    def one(job: tuple[Path, int, int, int]) -> None:
        file, position, place, length = job
        fd = os.open(file, os.O_RDONLY)
        for k in range(0, length, BLOCK):
            view = into[place + k : place + min(k + BLOCK, length)]
            if read and os.preadv(fd, [view], position + k) != len(view):
                raise SystemExit(f"{file}: short read")
            if digest:
                block_digest(view)
        os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, jobs))


def drop_cache(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load_ours(folder: Path, state: dict[str, Any], **kwargs: Any) -> Callable[[], Any]:
    return lambda: ucp_dcp.load(state, folder / "ours", no_dist=True, **kwargs)


def load_stock(folder: Path, state: dict[str, Any]) -> Callable[[], Any]:
    return lambda: dcp.load(state, checkpoint_id=folder / "stock", no_dist=True)


def same_layout(bench: Bench, root: Path, mib: int, notes: list[str]) -> None:
    side = 2048 if bench.quick else 4096  # 16 or 64 MiB each
    count = mib * 2**18 // side**2
    state = {f"layers.{i}.weight": torch.randn(side, side) for i in range(count)}
    state |= {f"layers.{i}.bias": torch.randn(side) for i in range(count)}
    folder = root / "same"
    write(state, folder, torch_save=True)
    files = data_files(folder / "ours")
    size = sum(f.stat().st_size for f in files)
    into = memoryview(bytearray(size))
    target = {k: torch.zeros_like(v) for k, v in state.items()}
    threads = default_threads()
    what = f"{human_bytes(size)}, same layout: "
    reading = bench.measure(what + "preadv alone", lambda: raw(files, into, threads), repeat=7)
    bench.measure(what + "digest alone", lambda: raw(files, into, threads, read=False, digest=True), repeat=7)
    both = bench.measure(what + "preadv + digest", lambda: raw(files, into, threads, digest=True), repeat=7)
    rows = {}
    for verify in ("covered", "strict", "off"):
        rows[verify] = bench.measure(what + f"ours, verify={verify}", load_ours(folder, target, verify=verify), repeat=7)
        report = rows[verify].result
        rows[verify].facts.update(over_read=report.bytes_read / report.bytes_wanted, unverified=report.bytes_unverified)
    if not all(torch.equal(target[k], v) for k, v in state.items()):
        raise SystemExit("ours loaded other values")
    stock = bench.measure(what + "stock dcp.load (verifies nothing)", load_stock(folder, target), repeat=3)
    plain = bench.measure(what + "torch.load", lambda: torch.load(folder / "state.pt", weights_only=True), repeat=3)
    one = bench.measure(what + "ours, covered, 1 thread", load_ours(folder, target, storage_options={"threads": 1}), repeat=5)
    single = bench.measure(what + "preadv + digest, 1 thread", lambda: raw(files, into, 1, digest=True), repeat=5)
    cold = {}
    for label, fn, paths in (
        ("cold: preadv", lambda: raw(files, into, threads), files),
        ("cold: ours, covered", load_ours(folder, target), files),
        ("cold: stock dcp.load", load_stock(folder, target), [p for p in (folder / "stock").iterdir() if p.suffix == ".distcp"]),
    ):
        cold[label] = bench.measure(what + label, lambda _, f=fn: f(), setup=lambda p=paths: drop_cache(p), repeat=2, warmup=0)
    notes.append(
        f"same layout, page cache dropped (a disk only: memory has none), wall: ours covered / preadv = "
        f"{cold['cold: ours, covered'].wall / cold['cold: preadv'].wall:.2f}; stock / ours covered = "
        f"{cold['cold: stock dcp.load'].wall / cold['cold: ours, covered'].wall:.2f}"
    )
    notes.append(
        f"same layout, CPU: ours covered / (preadv + digest) = {rows['covered'].cpu / both.cpu:.2f} (aim 1.15; with 1 thread "
        f"{one.cpu / single.cpu:.2f}); ours off / preadv = {rows['off'].cpu / reading.cpu:.2f}; stock / ours covered = "
        f"{stock.cpu / rows['covered'].cpu:.2f}; stock / ours off = {stock.cpu / rows['off'].cpu:.2f} (aim 2.1); "
        f"torch.load / ours covered = {plain.cpu / rows['covered'].cpu:.2f}"
    )
    shutil.rmtree(folder)


def reshard(bench: Bench, root: Path, rows: int, run: int, notes: list[str]) -> None:
    """Shard(0) -> Shard(1) at 8 ranks; ``run`` bytes of a row belong to one rank."""
    full = torch.randn(rows, 8 * run // 4)
    folder = root / "reshard"
    write({"w": pieces(full, 8, 0)}, folder)
    targets = [{"w": empty_columns(full, 8, rank)} for rank in range(8)]
    what = f"{human_bytes(full.nbytes)}, Shard(0) -> Shard(1), runs of {human_bytes(run)}: "
    results = {}
    for label, load in (("ours", load_ours), ("stock", load_stock)):
        for target in targets:
            target["w"].shards[0][1].zero_()
        loads = [load(folder, target) for target in targets]
        results[label] = bench.measure(what + f"{label}, 8 ranks in turn", lambda fs=loads: [f() for f in fs], repeat=3)
        if not all(torch.equal(t["w"].shards[0][1], c) for t, c in zip(targets, full.split(full.shape[1] // 8, 1), strict=True)):
            raise SystemExit(f"{label} loaded other values")
    reports = results["ours"].result
    over = sum(r.bytes_read for r in reports) / sum(r.bytes_wanted for r in reports)
    results["ours"].facts.update(over_read=over, unverified=sum(r.bytes_unverified for r in reports))
    strict = bench.measure(what + "ours, strict", lambda: [load_ours(folder, t, verify="strict")() for t in targets], repeat=2)
    strict.facts.update(over_read=sum(r.bytes_read for r in strict.result) / full.nbytes, unverified=0)
    foreign = bench.measure(
        what + "ours, out of the stock checkpoint", lambda: [ucp_dcp.load(t, folder / "stock", no_dist=True) for t in targets], repeat=2
    )
    ours, stock = results["ours"], results["stock"]
    notes.append(
        f"Shard(0) -> Shard(1), runs of {human_bytes(run)}: stock / ours = {stock.wall / ours.wall:.1f} wall, "
        f"{stock.cpu / ours.cpu:.1f} CPU; "
        f"out of stock's own files {stock.wall / foreign.wall:.1f} wall"
    )
    shutil.rmtree(folder)


def small_chunks(bench: Bench, root: Path, chunks: int, notes: list[str]) -> None:
    full = torch.randn(chunks, 1024)
    folder = root / "chunks"
    write({"w": pieces(full, chunks, 0)}, folder)
    target = {"w": torch.zeros_like(full)}
    what = f"{chunks:,} chunks of 4 KiB: "
    ours = bench.measure(what + "ours", load_ours(folder, target), repeat=5)
    if not torch.equal(target["w"], full):
        raise SystemExit("ours loaded other values")
    report = ours.result
    ours.facts.update(over_read=report.bytes_read / report.bytes_wanted, unverified=report.bytes_unverified)
    foreign = bench.measure(what + "ours, out of the stock checkpoint", lambda: ucp_dcp.load(target, folder / "stock", no_dist=True))
    stock = bench.measure(what + "stock", load_stock(folder, target), repeat=3)
    checkpoint = ucp_dcp.open_checkpoint(folder / "ours")
    read = bench.measure(what + "ours, open_checkpoint()[...] of an open checkpoint", lambda: checkpoint["w"].read(), repeat=5)
    notes.append(
        f"{chunks:,} chunks: stock / ours = {stock.wall / ours.wall:.1f} wall, {stock.cpu / ours.cpu:.1f} CPU (aim 20); "
        f"slice of an open checkpoint {stock.wall / read.wall:.1f}; out of stock's files {stock.wall / foreign.wall:.1f}"
    )
    shutil.rmtree(folder)


def one_row(bench: Bench, root: Path, notes: list[str]) -> None:
    full = torch.randn(16384, 4096)
    folder = root / "row"
    write({"w": full}, folder)
    for label, name in (("ours", "ours"), ("stock's files", "stock")):
        checkpoint = ucp_dcp.open_checkpoint(folder / name)
        first = checkpoint["w"][77]
        if not torch.equal(first, full[77]):
            raise SystemExit("another row")
        stats = checkpoint.stats
        notes.append(f"one row of 16 KiB out of 256 MiB, {label}: {stats.bytes_read:,} bytes read from payloads in {stats.ranges} range(s)")
        bench.measure(f"one row of 16 KiB out of 256 MiB, {label}, open", lambda c=checkpoint: c["w"][77], repeat=5)
    shutil.rmtree(folder)


_PEAK = """
import sys, torch, ucp_dcp
def peak():  # not ru_maxrss, which a process takes over from the one that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
folder, mode = sys.argv[1], sys.argv[2]
dtype = torch.bfloat16 if mode == "cast" else torch.float32
state = {f"w{i}": torch.ones(8192, 8192, dtype=dtype) for i in range(16)}
ucp_dcp.load({"small": torch.zeros(8)}, folder, no_dist=True)
before = peak()
report = ucp_dcp.load(state, folder, no_dist=True)
assert report.bytes_wanted == 4 << 30 and report.bytes_unverified < 1 << 20, report
print((peak() - before) // 1024)
"""


def peak(root: Path, notes: list[str]) -> None:
    """Growth of the peak resident set by one load of 4 GiB into memory that is there."""
    folder = root / "large"
    state = {f"w{i}": torch.randn(1, 8192).expand(8192, 8192).contiguous() for i in range(16)}
    state["small"] = torch.zeros(8)
    ucp_dcp.save(state, folder, no_dist=True)
    if all(row.blocks is None for row in open_source(str(folder)).catalog.files):
        digest_checkpoint(folder, BLOCK)
    del state
    for mode in ("same", "cast"):
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", _PEAK, str(folder), mode], capture_output=True, text=True, check=True)
        notes.append(f"4 GiB, {mode}: peak resident memory grew by {out.stdout.strip()} MiB during the load")
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true", help="peak memory with 4 GiB as well")
    parser.add_argument("--dir", help="where the files lie; default: the temporary folder")
    parser.add_argument("--only", nargs="*", choices=("same", "reshard", "chunks", "row"))
    args = parser.parse_args()
    bench = Bench("load", "Loading from a local folder")
    notes = [f"{default_threads()} threads; load average {os.getloadavg()[0]:.1f}"]
    small = args.quick
    parts: dict[str, Callable[[Path], None]] = {
        "same": lambda root: same_layout(bench, root, 64 if small else 512, notes),
        "reshard": lambda root: (
            reshard(bench, root, 256 if small else 2048, 16 << 10, notes),
            reshard(bench, root, 2048 if small else 16384, 2 << 10, notes),
        )[0],
        "chunks": lambda root: small_chunks(bench, root, 512 if small else 4096, notes),
        "row": lambda root: one_row(bench, root, notes),
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for name, part in parts.items():
            if not args.only or name in args.only:
                part(Path(folder))
        if args.large:
            peak(Path(folder), notes)
    notes.append(f"peak resident memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    bench.finish(*notes)


if __name__ == "__main__":
    main()
