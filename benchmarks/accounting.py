"""What a piece of work costs a Linux process: bytes through file reads and writes, CPU seconds, memory; and a folder: files and bytes.

Standard library only: another interpreter (DeepSpeed's) imports it, too.

``/proc/self/io`` counts bytes of ``read`` and ``write`` calls of a process and of its children that have ended, whether a disk or the page
cache answers; libraries that are mapped into memory are not in it. gloo sends with ``write`` and receives with ``recv``, so what went out
over TCP is counted as written there and is taken off again with the kernel's own counters of each socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

__all__ = ["DiskWatch", "Meter"]

_BYTES_ACKED = 120  # offset in struct tcp_info (linux/tcp.h): u64 bytes_acked, u64 bytes_received


def _io() -> dict[str, int]:
    return {key: int(value) for key, value in (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())}


def _memory(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def _sent() -> int:
    """Bytes that left through the TCP sockets that are open now."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    total += struct.unpack_from("Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _BYTES_ACKED)[0]
    return total


def _cpu() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


class Meter:
    """``start()``, the work, ``stop()``: what it cost this process and those of its children that have ended."""

    def start(self) -> None:
        """Note where the counters stand; the high-water mark of memory begins anew."""
        Path("/proc/self/clear_refs").write_text("5")
        self._rss = _memory("VmRSS")
        self._at = (_io(), _sent(), _cpu(), time.perf_counter())

    def stop(self) -> dict[str, float]:
        """``read``, ``written`` and ``sent`` bytes, ``wall`` and ``cpu`` seconds, ``cpu_process`` (since the process began: imports,
        too), ``peak`` and ``peak_over_start`` bytes of resident memory (of this process alone)."""
        wall, cpu, io, sent = time.perf_counter(), _cpu(), _io(), _sent()
        io0, sent0, cpu0, wall0 = self._at
        peak = _memory("VmHWM")
        return {
            "read": io["rchar"] - io0["rchar"],
            "written": max(0, io["wchar"] - io0["wchar"] - (sent - sent0)),
            "sent": sent - sent0,
            "wall": wall - wall0,
            "cpu": cpu - cpu0,
            "cpu_process": cpu,
            "peak": peak,
            "peak_over_start": peak - self._rss,
        }

    def save(self, folder: str, rank: int) -> None:
        """``stop()`` into ``<folder>/rank<rank>.json``."""
        found = self.stop()
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


class DiskWatch:
    """Looks at a folder 50 times a second: every file that was ever there, and the most bytes at one time, beyond what it held before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before, self._size = self._look()
        self._seen: set[str] = set()
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def files(self) -> int:
        """Files that were created."""
        return len(self._seen - self._before)

    def _look(self) -> tuple[set[str], int]:
        paths, size, folders = set(), 0, [str(self._folder)]
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        paths.add(entry.path)
                        with contextlib.suppress(FileNotFoundError):
                            size += entry.stat(follow_symlinks=False).st_size
        return paths, size

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self._once()

    def _once(self) -> None:
        paths, size = self._look()
        self._seen |= paths
        self.peak = max(self.peak, size - self._size)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self._thread.join()
        self._once()
