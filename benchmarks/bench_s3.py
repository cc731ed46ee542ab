"""S3: ours (its own client, obstore, s3fs) beside stock FsspecWriter / FsspecReader and bare s3fs, one SeaweedFS server, the same bytes.

Every case runs once directly and once through a proxy that delays each request by 20 ms (``--latency``) and counts requests and bytes.
Cases take turns, ``--rounds`` times. The stored chunks are rows (Shard(0) over 4); "load" fills the same chunks, "reshard" what each of 4
ranks holds of Shard(1). The ranks are played one after another in this process, for stock in the same way (bench_load.py). "rows" reads
single rows at random places: ours out of an open checkpoint, stock by ``dcp.load`` of one row, s3fs by ``cat_file`` of its bytes.
CPU: "CPU s" is this process, "server CPU" SeaweedFS; they and the proxy share the machine's cores. "peak" is the growth of resident memory
over what it was before, destinations exist by then.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from accounting import Meter
from bench_load import Shards, empty_columns, pieces
from harness import Bench, Measurement, human_bytes, timed
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ucp_dcp
from ucp_dcp.testing.fault_proxy import FaultProxy, Rule
from ucp_dcp.testing.servers import Server, options_for, seaweedfs

warnings.filterwarnings("ignore")

RANKS, SIDE, PIECE = 4, 4096, 16 << 20
ROWS = 16
OURS = {"ours": {}, "ours, obstore": {"client": "obstore"}, "ours over s3fs": {"client": "s3fs"}}


# -- the proxy, in a process of its own --------------------------------------------------------------------------------------------------


def serve_proxy(port: int, seconds: float) -> None:
    """A port on standard output; then, for each line of standard input, what went through since the last one."""
    with FaultProxy(port, [Rule("delay", seconds=seconds)]) as proxy:
        print(proxy.port, flush=True)
        for _ in sys.stdin:
            seen, proxy.seen = proxy.seen, []
            print(json.dumps([len(seen), sum(s.sent for s in seen), sum(s.received for s in seen)]), flush=True)


class Proxy:
    """The proxy process, and what went through it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def counts(self) -> tuple[int, int, int]:
        """Requests, bytes sent, bytes received since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        requests, sent, received = json.loads(self._process.stdout.readline())
        return requests, sent, received


@contextmanager
def delaying(server: Server, seconds: float) -> Iterator[Proxy]:
    command = [sys.executable, __file__, "--proxy", str(server.port), str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Proxy(process)
    finally:
        process.kill()
        process.wait()


def server_cpu() -> float:
    """CPU seconds of the SeaweedFS that is a grandchild of this process."""
    parents, cpu = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        parents[int(path.parent.name)] = int(fields[1])
        if name == "weed":
            cpu[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds for pid, seconds in cpu.items() if parents.get(parents[pid]) == os.getpid())


# -- what is measured --------------------------------------------------------------------------------------------------------------------


class Work:
    """One client at one endpoint: save, load, reshard, rows."""

    def __init__(self, kind: str, endpoint: str, full: dict[str, torch.Tensor], name: str) -> None:
        self.kind, self.full = kind, full
        self.options = {**options_for(endpoint), **OURS.get(kind, {})}
        self.url = f"s3://bench/{name}"
        self.state = {key: pieces(value, RANKS, 0) for key, value in full.items()}
        self.target = {key: pieces(torch.zeros_like(value), RANKS, 0) for key, value in full.items()}
        self.columns = [{key: empty_columns(value, RANKS, rank) for key, value in full.items()} for rank in range(RANKS)]
        self.nbytes = sum(value.nbytes for value in full.values())
        if kind == "s3fs alone":
            self.fs = fsspec.filesystem("s3", **self.options)
            self.blob = bytes(b"".join(memoryview(value.numpy()).cast("B") for value in full.values()))
        self._open: Any = None

    def save(self) -> None:
        if self.kind == "s3fs alone":
            self.fs.pipe_file(self.url + "/blob", self.blob, chunksize=PIECE)
        elif self.kind == "stock":
            dcp.save(self.state, storage_writer=FsspecWriter(self.url, **self.options), no_dist=True)
        else:
            ucp_dcp.save(self.state, self.url, storage_options=self.options, grace=0, no_dist=True)

    def _load(self, state: dict[str, Any]) -> None:
        if self.kind == "stock":
            dcp.load(state, storage_reader=FsspecReader(self.url, **self.options), no_dist=True)
        else:
            ucp_dcp.load(state, self.url, storage_options=self.options, no_dist=True)

    def load(self) -> None:
        if self.kind == "s3fs alone":
            starts = list(range(0, self.nbytes, PIECE))
            got = self.fs.cat_ranges([self.url + "/blob"] * len(starts), starts, [min(s + PIECE, self.nbytes) for s in starts])
            assert sum(map(len, got)) == self.nbytes
        else:
            self._load(self.target)

    def reshard(self) -> None:
        for columns in self.columns:
            self._load(columns)

    def open(self) -> None:
        if self.kind in OURS:
            self._open = ucp_dcp.open_checkpoint(self.url, storage_options=self.options)

    def rows(self) -> None:
        chance = random.Random(0)
        for number in range(ROWS):
            key, row = chance.choice(sorted(self.full)), chance.randrange(SIDE)
            if self.kind == "s3fs alone":
                start = 4 * SIDE * (SIDE * sorted(self.full).index(key) + row)
                got = self.fs.cat_file(self.url + "/blob", start=start, end=start + 4 * SIDE)
                assert got == self.blob[start : start + 4 * SIDE]
            elif self.kind == "stock":
                if number < 2:  # each opens the checkpoint and reads a whole chunk
                    into = torch.zeros(1, SIDE)
                    self._load({key: Shards([((row, 0), into)], (SIDE, SIDE))})
                    assert torch.equal(into[0], self.full[key][row])
            else:
                assert torch.equal(self._open[key][row], self.full[key][row])

    def check(self) -> None:
        if self.kind == "s3fs alone":
            return
        for key, value in self.full.items():
            for (start, _), shard in self.target[key].shards:
                if not torch.equal(shard, value[start : start + len(shard)]):
                    raise SystemExit(f"{self.kind} loaded other values")
            for columns, part in zip(self.columns, value.split(SIDE // RANKS, 1), strict=True):
                if not torch.equal(columns[key].shards[0][1], part):
                    raise SystemExit(f"{self.kind} resharded to other values")


def measure(
    bench: Bench, endpoint: str, what: str, full: dict[str, torch.Tensor], rounds: int, proxy: Proxy | None
) -> dict[str, Measurement]:
    kinds = [*OURS, "stock", "s3fs alone"]
    small = {"w": torch.randn(SIDE, SIDE)[: SIDE // 4, : SIDE // 4].clone()}
    works = {}
    for number, kind in enumerate(kinds):  # imports, clients and connections are made before the clock starts
        works[kind] = Work(kind, endpoint, full, f"{what.replace(' ', '-')}/{number}")
        if kind != "s3fs alone":
            warm = Work(kind, endpoint, small, f"{what.replace(' ', '-')}/warm{number}")
            warm.save()
            warm.load()
        else:
            works[kind].fs.pipe_file(works[kind].url + "/warm", b"x")
    found: dict[str, Measurement] = {}
    for step in ("save", "load", "reshard", "rows"):
        runs: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, work in works.items():
                if step == "reshard" and kind == "s3fs alone":
                    continue
                if step == "rows":
                    work.open()
                if proxy is not None:
                    proxy.counts()
                meter, before = Meter(), server_cpu()
                meter.start()
                _, wall, cpu = timed(getattr(work, step))
                peak = meter.stop()["peak_over_start"]
                counts = proxy.counts() if proxy is not None else (0, 0, 0)
                print(f"{what}, {step}: {kind}: {wall:.2f} s", file=sys.stderr, flush=True)
                runs[kind].append((wall, cpu, server_cpu() - before, peak, *counts))
        for kind, seen in runs.items():
            if not seen:
                continue
            walls, cpus, servers, peaks, requests, sent, received = zip(*seen, strict=True)
            size = works[kind].nbytes * (1 if step != "rows" else 0)
            facts: dict[str, Any] = {"server CPU": statistics.median(servers), "peak MiB": round(statistics.median(peaks) / 2**20)}
            each = 1
            if step == "rows":
                each = 2 if kind == "stock" else ROWS
                facts["ms/row"] = round(1000 * statistics.median(walls) / each, 1)
            else:
                facts["MiB/s"] = round(size / 2**20 / statistics.median(walls))
            if proxy is not None:
                facts["requests"] = statistics.median(requests) / each
                facts["MiB moved"] = round(statistics.median([a + b for a, b in zip(sent, received, strict=True)]) / each / 2**20, 7)
            found[f"{step}: {kind}"] = bench.add(Measurement(f"{what}, {step}: {kind}", walls, cpus, facts))
    for work in works.values():
        work.check()
    return found


def judge(what: str, rows: dict[str, Measurement], counted: dict[str, Measurement], nbytes: int) -> Iterator[str]:
    def ratio(step: str, over: str, under: str) -> float:
        return rows[f"{step}: {over}"].wall / rows[f"{step}: {under}"].wall

    for step, aims in (("save", {"ours": 1.3, "ours, obstore": 2.0}), ("load", {}), ("reshard", {"ours": 4.0, "ours, obstore": 4.0})):
        shown = [
            f"{kind} {ratio(step, 'stock', kind):.2f}"
            + (f" (aim {aims[kind]:g}{'' if ratio(step, 'stock', kind) >= aims[kind] else ', missed'})" if kind in aims else "")
            for kind in OURS
            if f"{step}: {kind}" in rows
        ]
        yield f"{what}: {step}, wall stock / " + ", ".join(shown)
    if rows is counted:
        row = counted["rows: ours"].facts
        save = counted["save: ours"].facts["requests"]
        most = -(-nbytes // PIECE) + 4
        yield (
            f"a row after open: {row['requests']:g} requests (aim 2), {row['MiB moved'] * 2**20 - 4 * SIDE:.0f} bytes moved beyond the row "
            f"(aim 8192); save: {save:g} requests (aim {most} for one rank{'' if save <= most else ', missed'})"
        )


def main() -> None:
    if "--proxy" in sys.argv:
        serve_proxy(int(sys.argv[-2]), float(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mib", type=int, default=256, help="bytes of the state, a multiple of 64 MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.02)
    given = parser.parse_args()
    bench = Bench("s3", "S3 (SeaweedFS on this machine)")
    mib, rounds = (64, 1) if bench.quick else (given.mib, given.rounds)
    full = {f"w{i}": torch.randn(SIDE, SIDE) for i in range(max(1, mib * 2**20 // (4 * SIDE * SIDE)))}
    nbytes = sum(value.nbytes for value in full.values())
    notes = []
    with tempfile.TemporaryDirectory() as folder, seaweedfs(folder) as server:
        server.make_bucket("bench")
        size = human_bytes(nbytes)
        begin = time.monotonic()
        direct = measure(bench, server.endpoint, size, full, rounds, None)
        notes += judge(size, direct, {}, nbytes)
        with delaying(server, given.latency) as proxy:
            slow = measure(bench, proxy.endpoint, f"{size}, {1000 * given.latency:g} ms", full, rounds, proxy)
            notes += judge(f"{1000 * given.latency:g} ms per request", slow, slow, nbytes)
        notes.append(f"{time.monotonic() - begin:.0f} s in all, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    bench.finish(*notes)


if __name__ == "__main__":
    main()
