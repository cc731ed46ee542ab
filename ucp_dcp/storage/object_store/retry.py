"""Requests attempts, after a growing random wait, until a deadline."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...errors import StoreError
from .client import Failed, Partial

__all__ = ["Attempts", "Retry"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """How long to go on.

    Attributes:
        deadline: seconds from the first failure of a request until it is given up. A read that got further starts anew.
        unreached: the same for a server that there is no connection to; None: no other.
        first, longest: seconds of the first wait and of any wait at most. Each is drawn at random below that ("full jitter"), so that
            thousands of ranks that were refused together do not come back together.
    """

    deadline: float = 120.0
    unreached: float | None = None
    first: float = 0.1
    longest: float = 10.0

    def run(self, what: str, call: Callable[[Attempts], T]) -> T:
        """The result of ``call``; failures that do not pass go through. Raises StoreError that names ``what`` after the deadline."""
        attempts = Attempts()
        until = 0.0
        while True:
            try:
                return call(attempts)
            except Failed as failed:
                if failed.kind != "transient":
                    raise
                now = time.monotonic()
                if attempts.failures == 0 or (isinstance(failed, Partial) and failed.received):
                    until = now + self.deadline
                    attempts.waits = 0
                attempts.failures += 1
                attempts.unsure |= failed.unsure
                wait = random.uniform(0.5, 1) * min(self.longest, self.first * 2.0**attempts.waits)
                if failed.wait is not None:
                    wait = max(wait, min(failed.wait, self.longest))
                attempts.waits += 1
                limit = self.deadline if self.unreached is None or not failed.unreached else min(self.unreached, self.deadline)
                if now + wait > until - self.deadline + limit:
                    raise StoreError(
                        f"{what} failed {attempts.failures} times within {limit:g} s, and was given up: {failed.text}"
                    ) from failed
                _log.debug("%s failed, again in %.2f s: %s", what, wait, failed.text)
                threading.Event().wait(wait)


@dataclass
class Attempts:
    """What happened to the attempts so far. ``unsure``: one of them may have been carried out by the server."""

    failures: int = 0
    waits: int = 0
    unsure: bool = False
