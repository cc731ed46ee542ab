"""Scratch memory that is used again and again, and what takes its content away: torch in this thread, or a device in its own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from .copies import Unit

__all__ = ["Arenas", "CudaTaker", "HostTaker", "Taker", "taker_for"]


class Taker(Protocol):
    """Moves the content of scratch units to where it belongs."""

    arenas: int
    """Arenas in use at once: 2 lets the next one fill while this one is being taken."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Scratch memory that this taker likes."""
        ...

    def take(self, flat: torch.Tensor, unit: Unit) -> None:
        """``flat``: the unit's bytes. May return before they were taken. Called by several threads."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that waits for all that was taken until now."""
        ...


class HostTaker:
    """Copies at once, in the calling thread; also to devices that torch copies to synchronously."""

    arenas = 1

    def memory(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def take(self, flat: torch.Tensor, unit: Unit) -> None:
        """Strides, cast and device in one copy."""
        with torch.no_grad():
            unit.view.detach().copy_(unit.shape.values(flat))

    def mark(self) -> Callable[[], None]:
        """Nothing is under way."""
        return _nothing


class CudaTaker:
    """Two pinned arenas. Bytes go to the device as they are, on streams of our own; strides and cast happen there.

    (torch would cast on the CPU, into unpinned memory, and wait.)
    """

    arenas = 2

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams: dict[torch.device, Any] = {}
        for device in devices:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # what still happens to the destinations comes first
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def memory(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def take(self, flat: torch.Tensor, unit: Unit) -> None:
        """Queued; :meth:`mark` says when it is done."""
        view = unit.view.detach()
        stream = self._streams.get(view.device)
        with torch.no_grad():
            if stream is None:
                view.copy_(unit.shape.values(flat))
                return
            with torch.cuda.stream(stream):
                view.copy_(unit.shape.values(flat.to(view.device, non_blocking=True)))

    def mark(self) -> Callable[[], None]:
        """Events on all streams."""
        events = [stream.record_event() for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def _nothing() -> None:
    pass


def taker_for(views: Iterable[torch.Tensor]) -> Taker:
    """Pinned and asynchronous where a destination is on a CUDA device."""
    devices = {view.device for view in views if view.is_cuda}
    return CudaTaker(devices) if devices else HostTaker()


class Arenas:
    """The arenas of one load, taken in turn."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._memory: list[torch.Tensor | None] = [None] * taker.arenas
        self._busy: list[Callable[[], None]] = [_nothing] * taker.arenas
        self._next = 0

    def get(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` of memory whose former content was taken; until :meth:`used` it is the caller's."""
        at = self._next
        self._busy[at]()
        self._busy[at] = _nothing
        held = self._memory[at]
        if held is None or held.numel() < nbytes:
            self._memory[at] = held = None  # gone before the larger one is there
            held = self._memory[at] = self._taker.memory(nbytes)
        return held

    def used(self) -> None:
        """The arena is full and its units were given to the taker."""
        self._busy[self._next] = self._taker.mark()
        self._next = (self._next + 1) % len(self._memory)

    def wait(self) -> None:
        """Until everything was taken."""
        for busy in self._busy:
            busy()
