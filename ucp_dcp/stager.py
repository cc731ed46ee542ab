"""``UCPStager``: what ``dcp.async_save`` copies a state dict with before it returns, into memory that is kept for the next save.

DCP's own stager takes new memory for every save (touching pages for the first time costs several times what the copy costs), unless the
user keeps one, and that one writes into memory from which an earlier save may still be reading. It also gives every tensor a storage of its
own, which a save in another process needs an open file for. Here all tensors lie in one storage, and it is known whether somebody has them.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from .errors import PlanError

__all__ = ["UCPStager"]

_ALIGN = 64
_PART = 8 << 20  # bytes copied at once by a thread
_ALONE = 32 << 20  # bytes up to which threads are not worth their start
_PATIENCE = 20  # milliseconds
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class UCPStager(AsyncStager):
    """Copies tensors and objects of a state dict, so that training may change them while they are written.

    Keep one for all saves of a job: ``stager = UCPStager()``, ``dcp.async_save(..., async_stager=stager)``, ``stager.close()`` at the end.

    - When ``stage`` returns, everything is copied: tensors to host memory, and all other objects (``copy.deepcopy``).
    - Tensors that share memory still do, so that tied weights are written once. Of a large storage only the parts in use are copied.
    - Memory is that of the state, once, kept for the next save. A stage while an earlier save is still running takes further memory, at
      most ``buffers`` times in all; the one after that raises PlanError.
    - The memory is pinned when the state lies on a CUDA device. ``shared=True`` takes memory that other processes can see, for
      ``AsyncCheckpointerType.PROCESS``: without it the first save copies it there (in the background). Either way a save in another process
      needs one open file, not one for every tensor.

    Args:
        threads: that copy; default: the cores of this process, at most 4.

    Attributes of tensor objects are not copied, as DCP needs none. A stager is used by one thread; it pickles without its memory.
    """

    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False, buffers: int = 2, threads: int | None = None) -> None:
        if buffers < 1 or (threads is not None and threads < 1):
            raise PlanError(f"UCPStager(buffers={buffers}, threads={threads}): both are at least 1")
        self.shared = shared
        self.buffers = buffers
        self.threads = threads
        self._buffers: list[_Buffer] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"shared": self.shared, "buffers": self.buffers, "threads": self.threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state dict on the host; later changes of what was given do not reach it.

        Raises PlanError when as many earlier copies as ``buffers`` are still in use.
        """
        found = _Found()
        found.visit(state_dict)
        layout = _Places(found.tensors.values())
        buffer = self._buffer(layout.nbytes, any(t.device.type == "cuda" for t in found.tensors.values()))
        memory = buffer.memory
        layout.copy_into(memory, self.threads)
        storage = memory.untyped_storage()
        memo: dict[int, Any] = {}
        for name, tensor in found.tensors.items():
            place = layout.places[name]
            staged = torch.empty(0, dtype=tensor.dtype).set_(storage, place.offset // tensor.itemsize, tensor.size(), place.stride)
            buffer.users.append(weakref.ref(staged))
            memo[name] = staged
        for name, outer in found.dtensors.items():
            memo[name] = DTensor(memo[id(found.local_of[name])], outer._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        for name, other in found.others.items():
            memo[name] = _staged_by_torch(other)
        copied: dict[str, Any] = copy.deepcopy(state_dict, memo)
        return copied

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` has copied everything."""

    def close(self) -> None:
        """Give the memory back (copies that are in use keep theirs)."""
        self._buffers.clear()

    def _buffer(self, nbytes: int, pinned: bool) -> _Buffer:
        """Memory that nobody uses, large enough."""
        free = self._free()
        for _ in range(_PATIENCE if self._buffers else 0):
            if free:
                break
            time.sleep(1e-3)  # a save whose future is done may take a moment to let go
            free = self._free()
        if not free and len(self._buffers) >= self.buffers:
            gc.collect()
            free = self._free()
        fitting = [buffer for buffer in free if buffer.memory.nbytes >= nbytes and buffer.pinned >= pinned]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.memory.nbytes)
        if not free and len(self._buffers) >= self.buffers:
            raise PlanError(
                f"UCPStager: {len(self._buffers)} earlier saves still use their copies; wait for the future of an earlier async_save, and "
                f"drop the futures of failed ones, or give the stager more than buffers={self.buffers}"
            )
        if free:  # too small: its memory goes before the new one comes
            self._buffers.remove(free[0])
        free.clear()
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and not self.shared)
        if self.shared and nbytes:
            memory.share_memory_()  # type: ignore[no-untyped-call]
        buffer = _Buffer(memory, pinned)
        self._buffers.append(buffer)
        return buffer

    def _free(self) -> list[_Buffer]:
        return [buffer for buffer in self._buffers if not buffer.in_use()]


@dataclass
class _Buffer:
    """Memory, and the tensors that were last handed out of it."""

    memory: torch.Tensor
    pinned: bool
    users: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def in_use(self) -> bool:
        """Whether somebody still has one of them; if not they are forgotten."""
        if any(user() is not None for user in self.users):
            return True
        self.users.clear()
        return False


class _Found:
    """The tensors of a state dict by ``id``: what has memory of its own, DTensors over such, and subclasses that only torch can copy."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.dtensors: dict[int, DTensor] = {}
        self.local_of: dict[int, torch.Tensor] = {}
        self.others: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        self._alive: list[Any] = []

    def visit(self, value: Any) -> None:
        """Containers of DCP; what lies in other objects is copied with them."""
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, Mapping | list | tuple):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            for item in value.values() if isinstance(value, Mapping) else value:
                self.visit(item)

    def _tensor(self, value: torch.Tensor) -> None:
        if isinstance(value, DTensor):
            local = value._local_tensor
            wait = getattr(local, "wait", None)
            local = wait() if callable(wait) else local
            if type(local) in _PLAIN and _simple(local):
                self._alive.append(local)
                self.dtensors[id(value)] = value
                self.local_of[id(value)] = local
                self.tensors[id(local)] = local
                return
        elif type(value) in _PLAIN and _simple(value):
            self.tensors[id(value)] = value
            return
        elif value.device.type == "meta":
            return
        self.others[id(value)] = value


def _simple(tensor: torch.Tensor) -> bool:
    """Whether its bytes and strides are all there is to it."""
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return plain and tensor.device.type in ("cpu", "cuda")


def _staged_by_torch(tensor: torch.Tensor) -> Any:
    if tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg()):
        return tensor.resolve_conj().resolve_neg().detach().cpu().clone()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return stager.stage({"tensor": tensor})["tensor"]  # type: ignore[index]
    finally:
        stager.close()


class _Place(NamedTuple):
    """Where a tensor lies in the memory: byte of its first element, element strides."""

    offset: int
    stride: tuple[int, ...]


class _Places:
    """Where everything goes, and what is copied: parts of storages as they are, or (views with wide gaps) the elements alone."""

    def __init__(self, tensors: Any) -> None:
        self.places: dict[int, _Place] = {}
        self.nbytes = 0
        self._moves: list[tuple[int, int, int]] = []  # host address, bytes, where to
        self._parts: list[tuple[torch.Tensor, int, int, int]] = []  # of which device storage, first byte, bytes, where to
        self._gathered: list[tuple[torch.Tensor, int]] = []
        spans: dict[tuple[bool, int], list[tuple[int, int, torch.Tensor]]] = {}  # by address, which is one of the host or of a device
        same: dict[tuple[Any, ...], _Place] = {}
        for tensor in tensors:
            start = int(tensor.storage_offset()) * tensor.itemsize
            length = tensor.nbytes if tensor.is_contiguous() else _extent(tensor)
            if length > 2 * tensor.nbytes + 4096:
                key = (tensor.device, tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)
                if key not in same:
                    same[key] = _Place(self._take(tensor.nbytes), _c_strides(tensor.size()))
                    self._gathered.append((tensor, same[key].offset))
                self.places[id(tensor)] = same[key]
            else:
                where = (tensor.is_cpu, tensor.untyped_storage().data_ptr())
                spans.setdefault(where, []).append((start, start + length, tensor))
        for (on_host, address), own in spans.items():
            own.sort(key=lambda span: span[:2])
            for group, first, last in _joined(own):
                first -= first % _ALIGN  # every dtype stays aligned
                at = self._take(last - first)
                if on_host:
                    self._moves.append((address + first, last - first, at))
                else:
                    self._parts.append((group[0], first, last - first, at))
                for tensor in group:
                    self.places[id(tensor)] = _Place(at + int(tensor.storage_offset()) * tensor.itemsize - first, tensor.stride())

    def _take(self, nbytes: int) -> int:
        at = self.nbytes
        self.nbytes += -(-nbytes // _ALIGN) * _ALIGN
        return at

    def copy_into(self, memory: torch.Tensor, threads: int | None) -> None:
        """Copy everything; all of it is there on return."""
        devices = set()
        for tensor, first, length, at in self._parts:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), first, (length,), (1,))
            memory[at : at + length].copy_(source, non_blocking=True)
            devices.add(tensor.device)
        for tensor, at in self._gathered:
            target = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.size())
            target.copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
        _move(self._moves, memory.data_ptr(), threads)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))) * tensor.itemsize


def _c_strides(size: torch.Size) -> tuple[int, ...]:
    out = [1] * len(size)
    for dim in range(len(size) - 1, 0, -1):
        out[dim - 1] = out[dim] * max(size[dim], 1)
    return tuple(out)


def _joined(spans: list[tuple[int, int, torch.Tensor]]) -> Iterator[tuple[list[torch.Tensor], int, int]]:
    """(tensors, first byte, end) of spans that overlap or touch, from sorted ones."""
    group: list[torch.Tensor] = []
    first = last = 0
    for start, stop, tensor in spans:
        if group and start > last:
            yield group, first, last
            group = []
        if not group:
            first, last = start, stop
        last = max(last, stop)
        group.append(tensor)
    if group:
        yield group, first, last


def _move(moves: list[tuple[int, int, int]], base: int, threads: int | None) -> None:
    """Copy (address, bytes, where to from ``base``), by several threads: memmove leaves the others running."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = threads or min(4, cores)
    batches: list[list[tuple[int, int, int]]] = [[]]
    room = _PART
    for address, length, at in moves:
        done = 0
        while done < length:
            part = min(length - done, room)
            batches[-1].append((base + at + done, address + done, part))
            done, room = done + part, room - part
            if not room:
                batches.append([])
                room = _PART
    if workers < 2 or len(batches) * _PART < _ALONE:
        for batch in batches:
            _move_all(batch)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="ucp-stage") as pool:
        for _ in pool.map(_move_all, batches):
            pass


def _move_all(batch: list[tuple[int, int, int]]) -> None:
    memmove = ctypes.memmove
    for target, source, length in batch:
        memmove(target, source, length)
