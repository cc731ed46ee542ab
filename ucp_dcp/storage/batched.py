"""Many small reads by one system call: Linux's native AIO (``io_submit``), which reads files in the page cache right then and there.

A run of 2 KiB costs more to ask for than to copy: entering the kernel takes over a microsecond on a virtual machine, and Python's threads
hand their lock over for each call. One ``io_submit`` takes a thousand. The kernel's AIO is old, and allowed where ``io_uring`` is not
(containers); where it is missing or used up, callers do without.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading

import numpy as np
import numpy.typing as npt

from ..errors import CorruptCheckpointError, StoreError
from .preadv import view_of

__all__ = ["DEPTH", "available", "finish_run", "read_runs"]

DEPTH = 1024
"""Reads per call."""
_IDLE = 8  # contexts kept for the next load: to destroy one means to wait for all cores
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # io_setup, io_destroy, io_getevents, io_submit
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),  # 0: IOCB_CMD_PREAD
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("length", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("resfd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("object", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_lock = threading.Lock()
_idle: list[int] = []


def _find() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux") or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    if platform.machine() not in _NUMBERS:
        return None
    try:
        function: ctypes._NamedFuncPointer = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_long
    return function


_syscall = _find()
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = _NUMBERS.get(platform.machine(), (0, 0, 0, 0))


def _call(number: int, *arguments: int) -> int:
    """The result, or minus errno."""
    assert _syscall is not None
    got = int(_syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)))
    return got if got >= 0 else -ctypes.get_errno()


def _take() -> int:
    """A context; 0 where there is none to be had."""
    if _syscall is None:
        return 0
    with _lock:
        if _idle:
            return _idle.pop()
    context = ctypes.c_ulong(0)
    return context.value if _call(_SETUP, DEPTH, ctypes.addressof(context)) == 0 else 0


def _give(context: int) -> None:
    with _lock:
        if len(_idle) < _IDLE:
            _idle.append(context)
            return
    _call(_DESTROY, context)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has no contexts


def available() -> bool:
    """Whether :func:`read_runs` works here at present."""
    context = _take()
    if context:
        _give(context)
    return context != 0


def read_runs(fd: int, path: str, start: npt.NDArray[np.int64], length: npt.NDArray[np.int64], address: npt.NDArray[np.int64]) -> bool:
    """Read ``length[i]`` bytes from byte ``start[i]`` to ``address[i]``, for all i; False when nothing was done, for lack of AIO.

    Whoever calls this vouches for the addresses and keeps their memory alive. Raises as :func:`finish_run` does.
    """
    context = _take()
    if not context:
        return False
    control = np.zeros(len(start), dtype=_IOCB)
    control["data"], control["fd"] = np.arange(len(start)), fd
    control["buffer"], control["length"], control["offset"] = address, length, start
    pointer = control.ctypes.data + _IOCB.itemsize * np.arange(len(start), dtype=np.int64)
    result = np.full(len(start), -errno.EAGAIN, dtype=np.int64)
    events = np.zeros(DEPTH, dtype=_EVENT)
    clean = False
    try:
        at = 0
        while at < len(start):
            taken = _call(_SUBMIT, context, min(DEPTH, len(start) - at), pointer.ctypes.data + 8 * at)
            if taken <= 0:
                break  # what was not taken is read one by one
            _reap(context, taken, events)
            done = events[:taken]
            result[done["data"]] = done["result"]
            at += taken
        clean = True
    finally:
        if clean:
            _give(context)
        else:
            _call(_DESTROY, context)  # waits for reads that are under way
    for i in np.flatnonzero(result != length).tolist():
        finish_run(fd, path, int(start[i]), int(length[i]), int(address[i]), int(result[i]))
    return True


def _reap(context: int, count: int, events: npt.NDArray[np.void]) -> None:
    """Wait for all reads: the kernel writes into memory that is not ours until then."""
    got = 0
    while got < count:
        more = _call(_GETEVENTS, context, count - got, count - got, events.ctypes.data + _EVENT.itemsize * got, 0)
        if more >= 0:
            got += more
        elif more != -errno.EINTR:
            raise StoreError(f"waiting for {count - got} reads failed: {os.strerror(-more)}")


def finish_run(fd: int, path: str, start: int, length: int, address: int, got: int) -> None:
    """Read what is left of a run of which ``got`` bytes were read; below 0: minus errno.

    Raises CorruptCheckpointError when the file ends earlier, StoreError.
    """
    if got < 0 and got not in (-errno.EAGAIN, -errno.EINTR):
        raise StoreError(f"{path}: reading at byte {start} failed: {os.strerror(-got)}")
    done = max(got, 0)
    while done < length:
        try:
            more = os.preadv(fd, [view_of(address + done, length - done)], start + done)
        except OSError as error:
            raise StoreError(f"{path}: reading at byte {start + done} failed: {error.strerror or error}") from error
        if not more:
            raise CorruptCheckpointError(f"{path}: ended at byte {start + done} while {length - done} more were wanted; it is truncated")
        done += more
