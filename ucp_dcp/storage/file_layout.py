"""Where every byte of one rank's data file lies, before the first one is written: ``docs/format.md``, "Data files".

The file is *glue, payload, glue, payload, ..., glue*: a glue is the tail of the item before, the padding and the head of the next item, so
it is one ready byte string that depends on the two frames and the padding alone. Pure: no I/O, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ..dtypes import itemsize, name_of
from .framing import ALIGNMENT, Frame, tensor_frame

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileLayout", "Part", "plan_file", "split_items"]

_Int64 = npt.NDArray[np.int64]


Part: TypeAlias = tuple[int, int, int]
"""(item, start, stop): bytes [start, stop) of the payload of one item. A plain tuple, since there are as many as small tensors."""


class FileLayout:
    """The places of all items of a file.

    Attributes:
        offset, length: (n,) first byte and bytes of each item, its frame included.
        payload, nbytes: (n,) first byte and bytes of its payload.
        size: bytes of the file.
    """

    def __init__(self, frames: list[Frame], frame: _Int64) -> None:
        """``frames[frame[i]]`` is the frame of item i."""
        head, body, tail = (
            np.asarray([part(f) for f in frames], dtype=np.int64)
            for part in (lambda f: len(f.head), lambda f: f.payload_length, lambda f: len(f.tail))
        )
        self.nbytes = body[frame]
        self.length = (head + body + tail)[frame]
        reach = np.cumsum(-(-self.length // ALIGNMENT) * ALIGNMENT)
        self.offset = np.concatenate([np.zeros(min(len(reach), 1), dtype=np.int64), reach[:-1]])
        self.payload = self.offset + head[frame]
        self.size = int(self.offset[-1] + self.length[-1]) if len(frame) else 0
        self._frames, self._frame = frames, frame.tolist()
        self._start: list[int] = self.payload.tolist()
        self._stop: list[int] = (self.payload + self.nbytes).tolist()
        self._glue: dict[tuple[int, int, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._frame)

    def parts(self, start: int, stop: int) -> list[Part]:
        """The parts of payloads in bytes [start, stop) of the file, in file order; empty ones are left out."""
        out: list[Part] = []
        if start >= stop:
            return out
        for item in range(bisect_right(self._stop, start), len(self._frame)):
            first, last = self._start[item], self._stop[item]
            if first >= stop:
                break
            if first < last:
                out.append((item, max(start - first, 0), min(stop, last) - first))
        return out

    def places(self, parts: Sequence[Part]) -> list[int]:
        """The byte of the file where each part begins."""
        return [self._start[item] + first for item, first, _ in parts]

    def fill(self, start: int, stop: int, parts: Sequence[Part], views: Sequence[Buffer]) -> list[Buffer]:
        """The bytes [start, stop) of the file as buffers in order. ``views``: the bytes of ``parts``, which are those of :meth:`parts`."""
        out: list[Buffer] = []
        at, region = start, bisect_right(self._stop, start)
        for (item, first, last), view in zip(parts, views, strict=True):
            begin = self._start[item] + first
            if at < begin:
                self._glued(at, begin, region, out)
            out.append(view)
            at, region = begin + last - first, item + 1
        if at < stop:
            self._glued(at, stop, region, out)
        return out

    def _glued(self, at: int, stop: int, region: int, out: list[Buffer]) -> None:
        """Append the bytes [at, stop), in which no payload has a byte. ``region``: the glue that holds ``at``."""
        while at < stop:
            begin = self._stop[region - 1] if region else 0
            glue = self._between(region)
            if at > begin or begin + len(glue) > stop:
                glue = glue[at - begin : stop - begin]
            if glue:  # none before an item that is its payload alone and starts right there
                out.append(glue)
            at += len(glue)
            region += 1  # further glue follows here only behind an item without a byte of payload

    def _between(self, item: int) -> bytes:
        """Glue number ``item``: all bytes between the payloads of items ``item - 1`` and ``item``; either may be none."""
        frame, count = self._frame, len(self._frame)
        before = frame[item - 1] if item else -1
        after = frame[item] if item < count else -1
        begin = self._stop[item - 1] if item else 0
        size = (self._start[item] if item < count else self.size) - begin
        key = (before, size, after)
        found = self._glue.get(key)
        if found is None:
            tail = self._frames[before].tail if item else b""
            head = self._frames[after].head if item < count else b""
            found = tail + bytes(size - len(tail) - len(head)) + head
            if len(self._glue) < 4096:
                self._glue[key] = found
        return found


def split_items(nbytes: Sequence[int], files: int) -> list[int]:
    """Cut items, kept in order, into files of about the same size: the first item of each file, and the number of items.

    Every file has an item; there are fewer files than asked for where items are few or large.
    """
    size = np.asarray(nbytes, dtype=np.int64)
    if not len(size):
        return [0]
    reach = np.cumsum(size)
    # an item goes where its middle lies
    edges = np.searchsorted(2 * reach - size, [2 * int(reach[-1]) * k // files for k in range(1, files)])
    return sorted({0, len(size), *edges.tolist()})


def plan_file(tensors: Sequence[tuple[str, tuple[int, ...]]], objects: Sequence[int], *, framed: bool) -> FileLayout:
    """Lay out tensor items (dtype name, shape), then objects (bytes).

    ``framed``: with the zip archive around each tensor that stock readers need. Raises UnsupportedError for an unknown dtype.
    """
    frames: list[Frame] = []
    known: dict[object, int] = {}
    frame: list[int] = []
    for tensor in tensors:
        number = known.get(tensor)
        if number is None:
            number = known[tensor] = len(frames)
            frames.append(tensor_frame(*tensor) if framed else _bare(math.prod(tensor[1]) * itemsize(name_of(tensor[0]))))
        frame.append(number)
    for size in objects:
        number = known.get(size)
        if number is None:
            number = known[size] = len(frames)
            frames.append(_bare(size))
        frame.append(number)
    return FileLayout(frames, np.asarray(frame, dtype=np.int64))


def _bare(size: int) -> Frame:
    return Frame(b"", b"", size, (0, 0))
