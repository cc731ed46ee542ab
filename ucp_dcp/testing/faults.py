"""Faults of a store: each operation of a save has a number, and one of them breaks."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..errors import StoreError

__all__ = ["MODES", "Fault", "Faults", "Killed", "Mode", "Operation"]

Mode: TypeAlias = Literal["kill", "kill_after", "lose", "fail", "torn"]
"""kill: everything ends before the operation; kill_after: right behind it; lose: only the rank whose store this is ends before it (SIGKILL
of one process); fail: it raises, nothing happened, and the program goes on; torn: half of a write happens, then it raises."""

MODES: tuple[Mode, ...] = ("kill", "kill_after", "lose", "fail", "torn")
_WRITES = ("write", "write_at", "put")


class Killed(BaseException):
    """The process has ended. No handler may do anything on the store any more; each further operation raises this again."""


@dataclass
class Fault:
    """Break operation number ``at`` (counted from 0). ``errno``: what a failing operation says."""

    at: int
    mode: Mode
    errno: int = errno.ENOSPC


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that has begun. ``half``: only half of it shall happen; then raise ``Faults.torn``."""

    number: int
    half: bool


@dataclass
class Faults:
    """Counts operations, from any number of threads, and says which one breaks."""

    fault: Fault | None = None
    operations: list[str] = field(default_factory=list)
    dead: bool = False
    lost: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, name: str, path: str, owner: int = 0) -> Operation:
        """One operation of the store ``owner`` begins. Raises Killed or StoreError."""
        with self.lock:
            if self.dead or owner in self.lost:
                raise Killed(f"{name} {path} of a process that has ended")
            number = len(self.operations)
            self.operations.append(f"{name} {path}")
            if self.fault is None or self.fault.at != number:
                return Operation(number, False)
            if self.fault.mode == "kill":
                self.dead = True
                raise Killed(f"operation {number}: {name} {path}")
            if self.fault.mode == "lose":
                self.lost.add(owner)
                raise Killed(f"operation {number}: {name} {path}")
            if self.fault.mode == "fail" or (self.fault.mode == "torn" and name not in _WRITES):
                raise StoreError(f"{path}: {name} failed: {errno.errorcode[self.fault.errno]}")
            return Operation(number, self.fault.mode == "torn")

    def done(self, operation: Operation) -> None:
        """The operation has happened."""
        if self.fault is not None and self.fault.mode == "kill_after" and self.fault.at == operation.number:
            with self.lock:
                self.dead = True
            raise Killed(f"after operation {self.fault.at}")

    def torn(self, name: str, path: str) -> StoreError:
        """What a half-done operation raises."""
        return StoreError(f"{path}: {name} failed half way: {errno.errorcode[errno.EIO]}")
