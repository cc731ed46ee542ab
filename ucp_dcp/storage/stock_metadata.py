"""The stock ``.metadata`` of a large save, written as pickle opcodes straight from columns.

A save of 873 tensors on 256 ranks has 223,488 chunks; making DCP's ``ChunkStorageMetadata``, ``MetadataIndex`` and ``_StorageInfo``
objects for them and pickling those takes the coordinator several times as long as all of its planning. The bytes written here unpickle to
exactly the object that stock code would have pickled (a test compares), and name no class outside torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..dtypes import torch_dtype
from ..planners.planned import Planned, ucp_planner_data

__all__ = ["stock_metadata_bytes"]


def _value(value: Any) -> bytes:
    """Opcodes that push ``value``, without memo references, so that they can stand anywhere in a stream."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]  # between PROTO 2 and STOP


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    width = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([width]) + value.to_bytes(width, "little")


class _Memo:
    """Hands out memo slots: ``put`` gives opcodes that store the top of the stack, ``get`` those that push it again."""

    def __init__(self) -> None:
        self._next = 0

    def keep(self, push: bytes) -> tuple[bytes, bytes]:
        """(opcodes that push the value and keep it, opcodes that push it again)."""
        slot = self._next
        self._next += 1
        if slot < 256:
            return push + b"q" + bytes([slot]), b"h" + bytes([slot])
        return push + b"r" + slot.to_bytes(4, "little"), b"j" + slot.to_bytes(4, "little")


def _object(cls: bytes, state: bytes) -> bytes:
    """An instance of a plain dataclass: ``cls.__new__`` and a state dict, as protocol 2 does it."""
    return cls + b")\x81}(" + state + b"ub"


def stock_metadata_bytes(
    planned: Planned,
    chunk_file: Sequence[int],
    chunk_start: Sequence[int],
    chunk_length: Sequence[int],
    objects: Iterable[tuple[str, int, int, int]],
    files: Sequence[str],
    storage_meta: StorageMeta,
    version: str,
) -> bytes:
    """Pickle of the ``Metadata`` of a planned save.

    chunk_file, chunk_start, chunk_length: per chunk the index of its file, and where its item lies. objects: (key, file, start, length).
    """
    memo = _Memo()
    header: list[bytes] = [b"\x80\x02"]

    def keep(push: bytes) -> bytes:
        put, get = memo.keep(push)
        header.append(put + b"0")  # POP: only the memo is wanted
        return get

    def global_(cls: type) -> bytes:
        return keep(b"c" + f"{cls.__module__}\n{cls.__qualname__}\n".encode())

    chunk_cls, tensor_cls, bytes_cls = global_(ChunkStorageMetadata), global_(TensorStorageMetadata), global_(BytesStorageMetadata)
    index_cls, info_cls, size_cls = global_(MetadataIndex), global_(_StorageInfo), global_(torch.Size)
    names = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "properties", "size", "chunks")
    word = {name: keep(_value(name)) for name in names}
    path = [keep(_value(file)) for file in files]
    properties = {d: keep(_value(TensorProperties(dtype=torch_dtype(d)))) for d in {row.dtype for row in planned.rows}}
    key = [keep(_value(row.key)) for row in planned.rows]

    sizes: dict[tuple[int, ...], bytes] = {}

    def size(shape: tuple[int, ...]) -> bytes:
        found = sizes.get(shape)
        if found is None:
            items = b"".join(map(_int, shape))
            packed = {0: b")", 1: items + b"\x85", 2: items + b"\x86", 3: items + b"\x87"}.get(len(shape), b"(" + items + b"t")
            found = sizes[shape] = size_cls + packed + b"\x85R"
        return found

    tensors: list[list[bytes]] = [[] for _ in planned.rows]
    storage: list[bytes] = []
    chunk_head = chunk_cls + b")\x81}(" + word["offsets"]
    index_head = index_cls + b")\x81}(" + word["fqn"]
    no_index = word["index"] + b"Nub"
    info_head = info_cls + b")\x81}(" + word["relative_path"]
    offset_word, sizes_word, length_word = word["offset"], word["sizes"], word["length"]
    # starts as LONG1 of 8 bytes, made all at once; lengths repeat
    starts = np.asarray(chunk_start, dtype="<i8").tobytes()
    ends = {n: length_word + _int(n) + b"ub" for n in set(chunk_length)}
    file_of = [info_head + p + offset_word + b"\x8a\x08" for p in path]
    name_of = [index_head + k + offset_word for k in key]
    for at, ((t, offset, extent), file, length) in enumerate(zip(planned.boxes(), chunk_file, chunk_length, strict=True)):
        place = sizes.get(offset) or size(offset)
        tensors[t].append(chunk_head + place + sizes_word + (sizes.get(extent) or size(extent)) + b"ub")
        storage.append(name_of[t] + place + no_index + file_of[file] + starts[8 * at : 8 * at + 8] + ends[length])
    entries = [
        key[t]
        + _object(
            tensor_cls,
            word["properties"]
            + properties[row.dtype]
            + word["size"]
            + size(row.shape)
            + word["chunks"]
            + b"]("
            + b"".join(tensors[t])
            + b"e",
        )
        for t, row in enumerate(planned.rows)
    ]
    for name, file, start, length in objects:
        entries.append(_value(name) + bytes_cls + b")\x81")
        storage.append(
            _object(index_cls, word["fqn"] + _value(name) + offset_word + b"N" + word["index"] + b"N")
            + _object(info_cls, word["relative_path"] + path[file] + offset_word + _int(start) + length_word + _int(length))
        )
    state = (
        (b"state_dict_metadata", b"}(" + b"".join(entries) + b"u"),
        (b"planner_data", _value(ucp_planner_data(planned))),
        (b"storage_data", b"}(" + b"".join(storage) + b"u"),
        (b"storage_meta", _value(storage_meta)),
        (b"version", _value(version)),
    )
    body = b"c" + f"{Metadata.__module__}\n{Metadata.__qualname__}\n".encode()
    return b"".join([*header, _object(body, b"".join(_value(name.decode()) + value for name, value in state)), b"."])
