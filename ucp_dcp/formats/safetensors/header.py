"""The header of a safetensors file: 8 bytes with its length, JSON that says where each tensor lies, then the bytes of all tensors.

All rules of the format are checked before anything is made of a number in it, as the safetensors library does: the tensors' bytes lie end
to end from the end of the header to the end of the file, without a hole, an overlap or a byte too many. Twice the same name, of which
that library takes the last, is refused: two readers could take different ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ...errors import CorruptCheckpointError, UnsupportedError
from ...storage.store import Store

__all__ = ["DTYPE_NAMES", "Header", "HeaderTensor", "JsonObjects", "parse_header", "read_header"]

MAX_HEADER = 100_000_000
"""Bytes of a header at most: the limit of the safetensors library."""
_LENGTH = 8
_MAX_NDIM = 64
_LIMIT = 2**62
_METADATA = "__metadata__"
SHARDING = "DCP_SHARDING_INFO"
"""Key of the metadata under which torch's HuggingFaceStorageWriter says where a file's pieces lie in their tensors."""

# name in the file -> (ours, bits per element); F4 is torch's float4_e2m1fn_x2, whose last dim counts pairs
_DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}

DTYPE_NAMES: Mapping[str, str] = {ours: name for name, (ours, bits) in _DTYPES.items() if bits >= 8}
"""Ours -> as a file calls it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a file: dtype name and shape as torch has them, first byte in the file, and where it lies in the global tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of the file ``path`` of ``size`` bytes. ``sharded``: it says where its tensors lie in larger ones."""

    path: str
    size: int
    tensors: tuple[HeaderTensor, ...]
    metadata: dict[str, str]
    sharded: bool


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Piece(msgspec.Struct):
    saved_offsets: list[int]


_TENSOR = msgspec.json.Decoder(_Tensor)
_PIECE = msgspec.json.Decoder(_Piece)
_TEXT = msgspec.json.Decoder(str)


def read_header(store: Store, path: str) -> Header:
    """The header of a file; no byte behind it is read.

    Raises CorruptCheckpointError naming file and tensor, UnsupportedError for a dtype that torch does not have, StoreError.
    """
    size = store.size(path)
    if size < _LENGTH:
        raise CorruptCheckpointError(f"{path}: has {size} bytes; a safetensors file begins with the length of its header, {_LENGTH} bytes")
    length = int.from_bytes(store.read(path, 0, _LENGTH), "little")
    if length > size - _LENGTH:
        raise CorruptCheckpointError(
            f"{path}: its header should have {length} bytes, but the file has {size}; it is truncated, or no safetensors file. (torch's "
            "HuggingFaceStorageWriter writes such files for a state dict that holds anything but tensors)"
        )
    if length > MAX_HEADER:
        raise CorruptCheckpointError(f"{path}: its header should have {length} bytes; at most {MAX_HEADER} are allowed")
    return parse_header(store.read(path, _LENGTH, length), size, path)


def parse_header(data: bytes, file_size: int, path: str) -> Header:
    """A header from its JSON text; ``file_size``: bytes of the whole file. Raises as :func:`read_header` does."""
    if not data.startswith(b"{"):
        raise CorruptCheckpointError(f"{path}: its header begins with {data[:8]!r}, expected JSON that begins with '{{'")
    json = JsonObjects()
    fields = json.read(data, f"{path}: the header")
    metadata = json.texts(fields.pop(_METADATA, msgspec.Raw(b"null")), f"{path}: {_METADATA}")
    begin = _LENGTH + len(data)
    tensors = {name: json.typed(raw, _TENSOR, f"{path}: tensor {name!r}") for name, raw in fields.items()}
    _check_offsets(tensors, file_size - begin, path)
    pieces = _pieces(json, metadata, path)
    rows = tuple(_row(name, tensor, begin, pieces, path) for name, tensor in tensors.items())
    return Header(path, file_size, rows, metadata, pieces is not None)


class _Name(str):
    """A name in a JSON object."""

    __slots__ = ()


class JsonObjects:
    """JSON objects of known structure, in which no name stands twice. What has another structure ends before it takes memory."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._object = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=self._name)

    def _name(self, kind: type, value: Any) -> Any:
        """Called by msgspec for every name, also for one that it has seen before."""
        self._names.append(value)
        return _Name(value)

    def read(self, data: bytes | msgspec.Raw, what: str) -> dict[str, msgspec.Raw]:
        """An object with its values as they are. Raises CorruptCheckpointError."""
        self._names.clear()
        found = _decode(self._object, data, what)
        if len(found) != len(self._names):
            ((twice, _),) = Counter(self._names).most_common(1)
            raise CorruptCheckpointError(f"{what} has the name {twice!r:.200} twice")
        return {str(name): value for name, value in found.items()}

    def typed(self, data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], what: str) -> T:
        """An object of named fields. Raises CorruptCheckpointError."""
        self.read(data, what)
        return _decode(decoder, data, what)

    def texts(self, data: bytes | msgspec.Raw, what: str) -> dict[str, str]:
        """An object of texts, empty for null. Raises CorruptCheckpointError."""
        if bytes(data) == b"null":
            return {}
        return {name: _decode(_TEXT, value, f"{what}, {name!r:.200},") for name, value in self.read(data, what).items()}


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is damaged: {error}") from error


def _check_offsets(tensors: Mapping[str, _Tensor], room: int, path: str) -> None:
    """Sizes fit dtypes and shapes, and the tensors fill the ``room`` behind the header exactly."""
    at = 0
    last = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        if start != at or stop < start or stop > room:
            before = f"the tensor before, {last!r}, ends at {at}" if last else "the first one must begin at 0"
            raise CorruptCheckpointError(
                f"{path}: tensor {name!r} claims bytes {start} to {stop} of {room}, but {before}; tensors lie end to end in the file"
            )
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{path}: tensor {name!r} is of dtype {tensor.dtype!r:.40}, which torch does not have; known are {', '.join(_DTYPES)}"
            )
        if len(tensor.shape) > _MAX_NDIM or any(not 0 <= n < _LIMIT for n in tensor.shape):
            raise CorruptCheckpointError(f"{path}: tensor {name!r} has the shape {tensor.shape!r:.200}")
        bits = math.prod(tensor.shape) * _DTYPES[tensor.dtype][1]
        if bits != 8 * (stop - start):
            raise CorruptCheckpointError(
                f"{path}: tensor {name!r}, {tensor.dtype} {tensor.shape!r:.200}, has {stop - start} bytes, expected {bits / 8:.16g}"
            )
        at, last = stop, name
    if at != room:
        raise CorruptCheckpointError(
            f"{path}: its tensors end at byte {at} behind the header, the file at byte {room}; it is truncated, or has bytes that belong "
            "to no tensor"
        )


def _pieces(json: JsonObjects, metadata: Mapping[str, str], path: str) -> dict[str, _Piece] | None:
    text = metadata.get(SHARDING)
    if text is None:
        return None
    what = f"{path}: {SHARDING} in {_METADATA}"
    return {name: json.typed(raw, _PIECE, f"{what}, {name!r:.200},") for name, raw in json.read(text.encode(), what).items()}


def _row(name: str, tensor: _Tensor, begin: int, pieces: Mapping[str, _Piece] | None, path: str) -> HeaderTensor:
    shape = tuple(tensor.shape)
    if tensor.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise UnsupportedError(f"{path}: tensor {name!r}, F4 {list(shape)}: torch packs two F4 into a byte and needs an even last dim")
        shape = (*shape[:-1], shape[-1] // 2)
    offset = (0,) * len(shape)
    if pieces is not None:
        piece = pieces.get(name)
        if piece is None:
            raise CorruptCheckpointError(f"{path}: {SHARDING} does not say where tensor {name!r} lies")
        offset = tuple(piece.saved_offsets)
        if len(offset) != len(shape) or any(not 0 <= o < _LIMIT for o in offset):
            raise CorruptCheckpointError(f"{path}: tensor {name!r} of shape {list(shape)} lies at {list(offset)!r:.200}, says {SHARDING}")
    return HeaderTensor(name, _DTYPES[tensor.dtype][0], shape, offset, begin + tensor.data_offsets[0])
