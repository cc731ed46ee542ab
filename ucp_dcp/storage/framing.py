"""The zip archive around one tensor chunk, so that a stock reader can ``torch.load`` it: ``docs/format.md``, "Data files".

``torch.save`` cannot be used: its archives start their payload at no particular byte, hold a serialization id that differs each time,
and their length is known only afterwards. Here everything but a checksum follows from (dtype, shape), so planning knows the place
of every byte, and a payload is streamed between two ready byte strings. Neither torch nor the payload is needed to make them.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import code_of, itemsize, name_of
from ..errors import FormatError

__all__ = ["ALIGNMENT", "Frame", "align", "tensor_frame"]

ALIGNMENT = 64
"""Items and payloads start at multiples of this many bytes of their file: a cache line, and every vector width and element size."""

# dtype name -> the class that stands for its storage in a pickle. torch stopped adding such classes; newer dtypes are a storage of
# bytes and a dtype (torch.storage._new_dtypes, torch._utils._rebuild_tensor_v3).
_TYPED_STORAGE = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

_ROOT = "archive/"
_PAYLOAD = _ROOT + "data/0"
_ZIP64_FROM = 0xFFFFFFFF  # sizes and offsets from here on are written as this number, and really in a zip64 field
_DATE = 0x21  # 1980-01-01, the first day that a zip archive can name; its time is 0
_UTF8 = 0x800  # flag: names are UTF-8
_DESCRIPTOR = 0x8  # flag: the checksum stands behind the data, which is streamed before it is known
_PADDING_ID = 0x4246  # extra field "FB", as torch pads


def align(n: int, to: int = ALIGNMENT) -> int:
    """The smallest multiple of ``to`` that is not below ``n``."""
    return -(-n // to) * to


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after the payload of one item. ``tail`` has 0 as the payload's CRC32; see :meth:`tail_for`."""

    head: bytes
    tail: bytes
    payload_length: int
    crc_at: tuple[int, int]
    """Where the CRC32 of the payload stands in ``tail`` (twice: data descriptor, central directory)."""

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of the item to the payload; a multiple of 64."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Bytes of the whole item."""
        return len(self.head) + self.payload_length + len(self.tail)

    def tail_for(self, crc: int | None) -> bytes:
        """The tail with the CRC32 of the payload; None is 0 (``provenance.payload_crc32 = false``)."""
        if crc is None:
            return self.tail
        tail = bytearray(self.tail)
        for at in self.crc_at:
            struct.pack_into("<I", tail, at, crc)
        return bytes(tail)


def tensor_frame(dtype_name: str, shape: Sequence[int], at: int = 0) -> Frame:
    """The frame of a C-order box of ``shape`` (elements) that is written as an item at byte ``at`` of a file.

    Raises UnsupportedError for an unknown dtype, FormatError for an impossible shape, ValueError when ``at`` is not a multiple of 64.
    """
    if at % ALIGNMENT or at < 0:
        raise ValueError(f"items start at multiples of {ALIGNMENT}, not at byte {at}")
    return _frame(name_of(dtype_name), tuple(shape))


@functools.lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    code_of(dtype)
    if any(size < 0 for size in shape):
        raise FormatError(f"shape {shape} has a negative size")
    size = math.prod(shape) * itemsize(dtype)
    strides = _c_strides(shape)
    if size >= 1 << 62 or (strides and strides[0] >= 1 << 62):
        raise FormatError(f"a tensor of shape {shape} and dtype {dtype} is larger than any file")

    head = bytearray()
    directory = bytearray()
    for name, data in (("data.pkl", _pickled(dtype, shape, strides)), ("byteorder", b"little"), ("version", b"3\n")):
        record, crc = (_ROOT + name).encode(), zlib.crc32(data)
        directory += _directory_entry(record, _UTF8, crc, len(data), len(head))
        head += _local_header(record, _UTF8, crc, len(data), b"") + data

    record = _PAYLOAD.encode()
    payload_header = len(head)
    bare = payload_header + len(_local_header(record, 0, 0, size, b"")) + 4
    padding = struct.pack("<HH", _PADDING_ID, align(bare) - bare) + bytes(align(bare) - bare)
    head += _local_header(record, _UTF8 | _DESCRIPTOR, 0, size, padding)
    crc_in_entry = len(directory) + 16
    directory += _directory_entry(record, _UTF8 | _DESCRIPTOR, 0, size, payload_header)

    descriptor = struct.pack("<IIQQ" if size >= _ZIP64_FROM else "<IIII", 0x08074B50, 0, size, size)
    tail = descriptor + directory + _end_records(4, len(directory), len(head) + size + len(descriptor))
    return Frame(bytes(head), bytes(tail), size, (4, len(descriptor) + crc_in_entry))


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides as torch gives them to a contiguous tensor: sizes of 0 count as 1."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# -- the pickle ----------------------------------------------------------------------------------------------------------------
# Put together from the opcodes of Python's pickle module, of protocol 2 as torch writes it, without memo. The Pickler itself would
# need torch to name its functions, find a dtype's module by searching sys.modules, and memoize by object identity.


def _pickled(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    typed = _TYPED_STORAGE.get(dtype)
    elements = math.prod(shape)
    storage_class = _global("torch", typed) if typed else _global("torch.storage", "UntypedStorage")
    count = elements if typed else elements * itemsize(dtype)
    storage = _tuple(_text("storage"), storage_class, _text("0"), _text("cpu"), _int(count)) + pickle.BINPERSID
    hooks = _global("collections", "OrderedDict") + _tuple() + pickle.REDUCE
    arguments = [storage, _int(0), _tuple(*map(_int, shape)), _tuple(*map(_int, strides)), pickle.NEWFALSE, hooks]
    if not typed:
        arguments.append(_global("torch", dtype))
    function = _global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
    return pickle.PROTO + b"\x02" + function + _tuple(*arguments) + pickle.REDUCE + pickle.STOP


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return pickle.BININT1 + struct.pack("<B", value)
    if value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def _tuple(*items: bytes) -> bytes:
    if not items:
        return pickle.EMPTY_TUPLE
    if len(items) <= 3:
        return b"".join(items) + (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)[len(items) - 1]
    return pickle.MARK + b"".join(items) + pickle.TUPLE


# -- the archive (PKWARE APPNOTE 6.3.10, sections 4.3.7 to 4.3.16) -------------------------------------------------------------


def _sizes(size: int) -> tuple[int, int, bytes]:
    """Version needed, the 32-bit size, and the zip64 extra field with both sizes where they need it."""
    if size < _ZIP64_FROM:
        return 20, size, b""
    return 45, _ZIP64_FROM, struct.pack("<HHQQ", 1, 16, size, size)


def _local_header(name: bytes, flags: int, crc: int, size: int, padding: bytes) -> bytes:
    version, short, zip64 = _sizes(size)
    extra = zip64 + padding
    fields = struct.pack("<IHHHHHIIIHH", 0x04034B50, version, flags, 0, 0, _DATE, crc, short, short, len(name), len(extra))
    return fields + name + extra


def _directory_entry(name: bytes, flags: int, crc: int, size: int, at: int) -> bytes:
    version, short, zip64 = _sizes(size)
    lengths = (len(name), len(zip64), 0, 0, 0, 0, at)
    return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, flags, 0, 0, _DATE, crc, short, short, *lengths) + name + zip64


def _end_records(entries: int, size: int, at: int) -> bytes:
    zip64 = b""
    if at >= _ZIP64_FROM:
        zip64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, entries, entries, size, at)
        zip64 += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
    return zip64 + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, entries, entries, size, min(at, _ZIP64_FROM), 0)
