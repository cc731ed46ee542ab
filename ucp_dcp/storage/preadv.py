"""``preadv`` into memory that is given as addresses: no Python object for each of the many pieces of one call.

``os.preadv`` wants a buffer object for every piece, which costs more than the kernel's own work when pieces are small. Here the
caller's numpy table *is* the array of ``struct iovec``. Whoever calls this vouches for the addresses and keeps their memory alive.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

from ..errors import CorruptCheckpointError, StoreError

__all__ = ["VECTOR", "available", "fill", "view_of"]

VECTOR = 1024
"""Pieces per call (IOV_MAX of Linux)."""


def _find() -> ctypes._NamedFuncPointer | None:
    if ctypes.sizeof(ctypes.c_void_p) != 8 or os.name != "posix":
        return None
    try:
        library = ctypes.CDLL(None, use_errno=True)
        # preadv takes a 64-bit offset on every 64-bit system
        function = library.preadv
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    return function


_preadv = _find()
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def available() -> bool:
    """Whether this system has what :func:`fill` needs."""
    return _preadv is not None


def view_of(address: int, length: int) -> memoryview:
    """Writable bytes at an address. The caller keeps the memory alive."""
    return _from_memory(address, length, _WRITABLE)  # type: ignore[no-any-return]


def fill(fd: int, table: int, count: int, position: int, length: int, path: str) -> None:
    """Read ``length`` consecutive bytes from byte ``position`` into ``count`` pieces.

    Args:
        table: address of ``count`` pairs of uint64 (address, bytes), whose bytes sum up to ``length``; ``count`` <= :data:`VECTOR`.
        path: for messages.

    Raises CorruptCheckpointError when the file ends earlier, StoreError.
    """
    assert _preadv is not None
    got = _preadv(fd, table, count, position)
    if got != length:
        _rest(fd, table, count, position, length, path, got)


def _rest(fd: int, table: int, count: int, position: int, length: int, path: str, got: int) -> None:
    """The kernel may return fewer bytes per call than asked for."""
    assert _preadv is not None
    pieces: npt.NDArray[np.uint64] = np.frombuffer(view_of(table, 16 * count), dtype=np.uint64).reshape(count, 2).copy()
    while True:
        if got < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise StoreError(f"{path}: reading at byte {position} failed: {os.strerror(number)}")
        elif got == 0:
            raise CorruptCheckpointError(f"{path}: ended at byte {position} while {length} more were wanted; the file is truncated")
        else:
            position += got
            length -= got
            if length == 0:
                return
            reach = np.cumsum(pieces[:, 1])
            done = int(np.searchsorted(reach, got, side="right"))
            into = got - (int(reach[done - 1]) if done else 0)
            pieces = pieces[done:].copy()
            pieces[0, 0] += np.uint64(into)
            pieces[0, 1] -= np.uint64(into)
        got = _preadv(fd, pieces.ctypes.data, len(pieces), position)
