"""Payloads of a data file out of torch tensors: those that lie in memory as in the file are given as they are, all others are staged.

Staged are strided and broadcast views, lazily conjugated or negated ones, and tensors on a device. A thread has two buffers of one slice
each for them; a payload that is larger is copied part by part. For CUDA the buffers are pinned and the copies run on a stream of their
own, while the thread writes the slice before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..dtypes import name_of
from ..errors import PlanError, UCPError
from ..geometry import flat_range_to_boxes
from .file_layout import Part
from .preadv import view_of

__all__ = ["CudaCopier", "HostCopier", "HostCopies", "LazyTensor", "TensorPayloads"]

# Bits are copied, not values: no dtype without a copy kernel, and no signalling NaN that changes on the way.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopies(Protocol):
    """Copies into host memory, for one thread."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """A buffer of bytes to copy into."""
        ...

    def copy(self, into: torch.Tensor, view: torch.Tensor) -> None:
        """Copy a view of the same shape; may return before it is done."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that waits for all copies until now."""
        ...


def _nothing() -> None:
    pass


class HostCopier:
    """Copies at once, in the calling thread; also from devices that torch copies from synchronously."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, into: torch.Tensor, view: torch.Tensor) -> None:
        """In the calling thread."""
        into.copy_(view)

    def mark(self) -> Callable[[], None]:
        """Nothing is under way."""
        return _nothing


class CudaCopier:
    """Pinned memory, and a stream of its own for each device. Not run on a GPU so far."""

    def __init__(self, computed: dict[torch.device, Any]) -> None:
        """``computed``: for each device, the event after which its tensors hold what is to be saved."""
        self._computed = computed
        self._streams: dict[torch.device, Any] = {}

    def memory(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: torch.Tensor, view: torch.Tensor) -> None:
        """Queued; the rest of the work goes on."""
        if view.device.type != "cuda":
            into.copy_(view)
            return
        stream = self._streams.get(view.device)
        if stream is None:
            stream = self._streams[view.device] = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._computed[view.device])
        stream.wait_stream(torch.cuda.current_stream(view.device))  # a lazy tensor was made in this thread
        with torch.cuda.stream(stream):
            into.copy_(view, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """Waits for the streams."""
        events = [stream.record_event() for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


class LazyTensor:
    """A tensor that somebody else's planner gives, perhaps made for the occasion: asked for when its bytes are due, and let go then."""

    def __init__(self, resolve: Callable[[], torch.Tensor]) -> None:
        self._resolve = resolve
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._written = 0
        tensor = resolve()
        self.dtype, self.shape, self.device, self.is_cpu = tensor.dtype, tensor.shape, tensor.device, tensor.is_cpu
        self.nbytes = tensor.numel() * tensor.element_size()

    def get(self) -> torch.Tensor:
        """The tensor."""
        with self._lock:
            if self._tensor is None:
                tensor = self._resolve().detach()
                if tensor.dtype != self.dtype or tensor.shape != self.shape:
                    raise PlanError(
                        f"the planner first gave {self.dtype} of shape {tuple(self.shape)}, then {tensor.dtype} of {tuple(tensor.shape)}"
                    )
                self._tensor = tensor
            return self._tensor

    def wrote(self, nbytes: int) -> None:
        """So many bytes more are written."""
        with self._lock:
            self._written += nbytes
            if self._written >= self.nbytes:
                self._tensor = None


class TensorPayloads:
    """The payloads of tensors, then of ready byte strings.

    Args:
        tensors: views, which must not change until the file is written, or lazy ones.
        names: what messages call them.
        copies: makes what copies to the host, once for each thread. Default: by the devices of the views.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | LazyTensor],
        objects: Sequence[bytes],
        names: Sequence[Any],
        *,
        copies: Callable[[], HostCopies] | None = None,
    ) -> None:
        self._tensors, self._objects, self._names = tensors, objects, names
        self.items: list[tuple[str, tuple[int, ...]]] = []
        """(dtype name, shape) of each tensor."""
        self._address: list[int] = []
        devices: set[torch.device] = set()
        known: dict[tuple[torch.dtype, torch.Size], tuple[str, tuple[int, ...]]] = {}
        for tensor in tensors:
            kind = (tensor.dtype, tensor.shape)
            item = known.get(kind)
            if item is None:
                item = known[kind] = (name_of(tensor.dtype), tuple(tensor.shape))
            self.items.append(item)
            self._address.append(_address(tensor) if isinstance(tensor, torch.Tensor) else 0)
            if not tensor.is_cpu:
                devices.add(tensor.device)
        self._copies = copies if copies is not None else _copies_from(devices)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each object."""
        return [len(data) for data in self._objects]

    def stager(self, capacity: int) -> _Stager:
        """See :class:`~.write_file.Payloads`."""
        return _Stager(self, self._copies(), capacity)


class _Stager:
    """See :class:`~.write_file.Stager`."""

    def __init__(self, payloads: TensorPayloads, copies: HostCopies, capacity: int) -> None:
        self._p, self._copies, self._capacity = payloads, copies, capacity
        self._buffers: list[torch.Tensor | None] = [None, None]

    def stage(self, slot: int, origin: int, places: Sequence[int], parts: Sequence[Part]) -> tuple[list[memoryview], Callable[[], None]]:
        address, count = self._p._address, len(self._p._tensors)
        views = []
        copied = False
        for place, (item, start, stop) in zip(places, parts, strict=True):
            if item >= count:
                views.append(memoryview(self._p._objects[item - count])[start:stop])
                continue
            base = address[item]
            if base == 0:
                tensor = self._tensor(item)
                base = _address(tensor)
                if base == 0:
                    # payloads begin at multiples of 64 in the file, so what is staged does too, and one layout serves for both
                    views.append(self._copy(slot, place - origin, item, tensor, start, stop))
                    copied = True
                    continue
            views.append(view_of(base + start, stop - start))
        return views, self._copies.mark() if copied else _nothing

    def _tensor(self, item: int) -> torch.Tensor:
        tensor = self._p._tensors[item]
        if isinstance(tensor, torch.Tensor):
            return tensor.detach()
        try:
            return tensor.get()
        except UCPError as error:
            raise type(error)(f"{self._p._names[item]!r}: {error}") from error

    def _copy(self, slot: int, at: int, item: int, tensor: torch.Tensor, start: int, stop: int) -> memoryview:
        buffer = self._buffers[slot]
        if buffer is None:
            buffer = self._buffers[slot] = self._copies.memory(self._capacity)
        into = buffer[at : at + stop - start]
        try:
            with torch.no_grad():
                self._copy_range(into, tensor, start, stop)
        except Exception as error:
            name, dtype, shape = self._p._names[item], tensor.dtype, tuple(tensor.shape)
            raise UCPError(f"{name!r}: copying {dtype} of shape {shape} from {tensor.device} to the host failed: {error}") from error
        return view_of(into.data_ptr(), stop - start)

    def _copy_range(self, into: torch.Tensor, tensor: torch.Tensor, start: int, stop: int) -> None:
        """The bytes [start, stop) of the elements in C order."""
        itemsize = tensor.element_size()
        bits = _BITS.get(itemsize)
        if bits is not None and not tensor.is_conj() and not tensor.is_neg():
            tensor = tensor.view(bits)
        flat = into.view(tensor.dtype)
        if tensor.is_contiguous():
            self._copies.copy(flat, tensor.view(-1)[start // itemsize : stop // itemsize])
            return
        at = 0
        for box in flat_range_to_boxes(tuple(tensor.shape), start // itemsize, stop // itemsize):
            self._copies.copy(flat[at : at + box.numel].view(box.size), tensor[box.slices()])
            at += box.numel

    def release(self, parts: Sequence[Part]) -> None:
        for item, start, stop in parts:
            if item < len(self._p._tensors):
                tensor = self._p._tensors[item]
                if isinstance(tensor, LazyTensor):
                    tensor.wrote(stop - start)

    def close(self) -> None:
        self._copies.mark()()


def _address(tensor: torch.Tensor) -> int:
    """Where the elements lie in C order in the memory of the host; 0: they do not."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.data_ptr()
    return 0


def _copies_from(devices: set[torch.device]) -> Callable[[], HostCopies]:
    """By the devices that tensors are on; asked in the thread in whose order they were computed."""
    computed = {device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"}
    if computed:
        return lambda: CudaCopier(computed)
    return HostCopier
