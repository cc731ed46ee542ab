"""One ZeRO checkpoint onto four ranks: loaded in place by us, beside DeepSpeed's converter and its load of the universal folder.

    python benchmarks/bench_deepspeed.py [--quick] [--install] [--deepspeed-python=PATH]

DeepSpeed makes the source itself (two ranks, two steps, bf16). It is no dependency of the package: it lives in
``benchmarks/.venv-deepspeed``, which ``--install`` (``make bench-deepspeed``) makes, or in another interpreter (``--deepspeed-python``,
UCP_DCP_DEEPSPEED_PYTHON). Without any, this script says so and measures nothing. Linux only (``accounting.py``).

Bytes are those of files, per byte of state (fp32 masters, exp_avg, exp_avg_sq: 12 per parameter), over all processes; ``disk`` is the most
that lay there at one time beyond the source, ``files`` how many were created. CPU seconds are user + system of all processes while they
convert or load, and again with all that they did before (imports, process group, building the engine or the destinations). ``rank memory``
is the largest growth of one process's resident memory beyond the destinations. ``sent`` went between ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from accounting import DiskWatch
from harness import Bench, Measurement, human_bytes

HERE = Path(__file__).parent
VENV = HERE / ".venv-deepspeed"
PACKAGES = ("torch==2.13.0", "deepspeed==0.19.8")
RANKS = 4
SIZES = {False: (512, 6, 8000), True: (128, 2, 1000)}  # quick -> width, layers, vocabulary


def interpreter(given: str | None, install: bool) -> Path | None:
    """DeepSpeed's interpreter, or None where there is none and none was asked for."""
    named = given or os.environ.get("UCP_DCP_DEEPSPEED_PYTHON")
    python = Path(named) if named else VENV / "bin" / "python"
    if not python.exists() and install and not named:
        print(f"making {VENV} with {' '.join(PACKAGES)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        if subprocess.run(pip, env={**os.environ, "DS_BUILD_OPS": "0"}).returncode:
            shutil.rmtree(VENV)
            raise SystemExit("DeepSpeed could not be installed")
    if not python.exists() and named:
        raise SystemExit(f"there is no interpreter at {python}")
    return python if python.exists() else None


def run_ranks(world: int, command: list[str], log: Path) -> None:
    """``command`` on ``world`` ranks of this machine; raises with the last lines of the log when one fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world)}
    base |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("ab") as out:
        ranks = [
            subprocess.Popen(command, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=out, stderr=subprocess.STDOUT)
            for r in range(world)
        ]
        codes = [p.wait() for p in ranks]
    if any(codes):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{' '.join(command)} failed on {sum(map(bool, codes))} of {world} ranks:\n{tail}")


class Run:
    """One source checkpoint, and what was measured on it."""

    def __init__(self, folder: Path, python: Path, stage: int, sizes: tuple[int, int, int]) -> None:
        self.source, self.log, self.python = folder / "source", folder / "log", python
        self.results = folder / "results"
        self.peer = [str(python), str(HERE / "deepspeed_peer.py")]
        run_ranks(2, [*self.peer, "make", str(self.source), str(stage), *map(str, sizes)], self.log)
        self.facts = json.loads((self.source / "facts.json").read_text())
        self.params = sum(math.prod(values["shape"]) for values in self.facts["contents"].values())
        self.state = 12 * self.params

    def measure(self, label: str, world: int, command: list[str]) -> Measurement:
        """Run, and add up what the ranks have noted: seconds of the slowest, bytes and CPU of all, memory of the largest."""
        self.results.mkdir()
        with DiskWatch(self.source) as disk:
            run_ranks(world, command, self.log)
        notes = [json.loads((self.results / f"rank{r}.json").read_text()) for r in range(world)]
        shutil.rmtree(self.results)
        total = {key: sum(note[key] for note in notes) for key in notes[0]}
        return self.row(label, max(n["wall"] for n in notes), total, disk, max(n["peak_over_start"] for n in notes))

    def row(self, label: str, wall: float, total: dict[str, float], disk: Any, memory: float) -> Measurement:
        facts = {
            "CPU +imports": total["cpu_process"],
            "read": round(total["read"] / self.state, 3),
            "written": round(total["written"] / self.state, 3),
            "disk": round(disk.peak / self.state, 3),
            "files": disk.files,
            "rank memory": human_bytes(memory),
            "sent": round(total["sent"] / self.state, 3),
        }
        return Measurement(label, (wall,), (total["cpu"],), facts)


def both(label: str, first: Measurement, second: Measurement) -> Measurement:
    """One after the other: sums; of memory and disk the larger."""
    facts: dict[str, Any] = {k: v + second.facts[k] for k, v in first.facts.items() if not isinstance(v, str)}
    facts["disk"] = max(first.facts["disk"], second.facts["disk"])
    return Measurement(label, (first.wall + second.wall,), (first.cpu + second.cpu,), facts)


def main() -> None:
    """Run and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--deepspeed-python")
    options = parser.parse_args()
    python = interpreter(options.deepspeed_python, options.install)
    if python is None:
        print("bench_deepspeed: skipped, DeepSpeed is not there; `make bench-deepspeed` installs it and runs this", flush=True)
        return
    bench = Bench("deepspeed", f"A ZeRO checkpoint of 2 ranks onto {RANKS} ranks; bytes per byte of state (masters, exp_avg, exp_avg_sq)")
    notes = []
    for stage in (1, 3):
        with tempfile.TemporaryDirectory(prefix="ucp-bench-") as folder:
            run = Run(Path(folder), python, stage, SIZES[options.quick])
            ours = [sys.executable, str(HERE / "deepspeed_ours.py")]
            for kind, what in (("fsdp2", "fp32 parameters"), ("mixed", "bf16 weights + masters")):
                command = [*ours, str(run.source), str(run.results), kind]
                bench.add(run.measure(f"ZeRO-{stage}, ucp_dcp in place, {what}", RANKS, command))
            convert = run.measure(f"ZeRO-{stage}, DeepSpeed: convert", 1, [*run.peer, "convert", str(run.source), str(run.results)])
            load = run.measure(f"ZeRO-{stage}, DeepSpeed: universal load", RANKS, [*run.peer, "load", str(run.source), str(run.results)])
            bench.add(convert)
            bench.add(load)
            bench.add(both(f"ZeRO-{stage}, DeepSpeed: both", convert, load))
            notes.append(f"ZeRO-{stage}: {run.params:,} parameters, {human_bytes(run.state)} of state; DeepSpeed {run.facts['deepspeed']}")
    bench.finish(*notes, "every load was compared, tensor by tensor, with what the training engine held")


if __name__ == "__main__":
    main()
