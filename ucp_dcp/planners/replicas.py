"""Content digests: what lets replicas be compared without moving them.

Two ranks that hold the same box of the same tensor must hold the same bytes; DCP keeps one copy and never looks at the other. A digest
depends only on the logical content (box shape, dtype, elements in C order), not on strides or device.
"""

from __future__ import annotations

import enum
import functools
import io
import struct
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from ..geometry import flat_range_to_boxes
from ..storage.preadv import view_of
from ..transfer import flat_bytes

__all__ = ["CheckReplicas", "object_digest", "serialize_object", "tensor_digest"]

CheckReplicas = Literal["full", "sample", "off"]

_SAMPLE_LIMIT = 1 << 20  # bytes: up to this size the whole content is hashed in "sample" mode
_WINDOWS = 128  # above it, so many evenly spaced runs of elements (in C order) that make up as many bytes


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()).numpy().data


def _in_place(view: torch.Tensor) -> memoryview | None:
    """The bytes of a view that lies in host memory in C order, without a tensor operation: ten thousand small tensors are not rare."""
    if view.is_cpu and view.is_contiguous() and not view.is_conj() and not view.is_neg():
        address, nbytes = view.data_ptr(), view.nbytes
        return view_of(address, nbytes) if address and nbytes else None
    return None


def _bits(flat: torch.Tensor) -> torch.Tensor:
    # as bytes, since torch cannot concatenate every dtype
    return flat_bytes(flat.resolve_conj().resolve_neg().contiguous())


@functools.lru_cache(maxsize=4096)
def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    """Sets tensors apart that differ in dtype or shape alone. A seed, and kept: most tensors of a state dict have few shapes."""
    return xxhash.xxh3_64_intdigest(f"{dtype}{tuple(shape)}".encode())


def tensor_digest(view: torch.Tensor, mode: CheckReplicas) -> int | None:
    """64-bit digest of a tensor's content, None for mode "off". "sample": everything up to 1 MiB, evenly spaced parts above."""
    if mode == "off":
        return None
    seed = _seed(view.dtype, view.shape)
    sampled = mode == "sample" and view.nbytes > _SAMPLE_LIMIT
    data = _in_place(view)
    if data is not None and not sampled:
        return xxhash.xxh3_64_intdigest(data, seed)
    digest = xxhash.xxh3_64(seed=seed)
    view = view.detach()
    if data is not None and sampled:
        width, begins = _windows(view)
        for begin in begins:
            digest.update(data[begin * view.element_size() : (begin + width) * view.element_size()])
    elif sampled:
        # one copy of all samples: from a device that is one transfer
        digest.update(_as_bytes(torch.cat([_bits(part) for part in _samples(view)])))
    else:
        _feed(digest, view)
    return int(digest.intdigest())


def _windows(view: torch.Tensor) -> tuple[int, list[int]]:
    """Elements of each sample, and the first element of each."""
    width = _SAMPLE_LIMIT // _WINDOWS // view.element_size()
    return width, np.linspace(0, view.numel() - width, _WINDOWS, dtype=np.int64).tolist()


def _samples(view: torch.Tensor) -> list[torch.Tensor]:
    """Evenly spaced runs of elements in C order, first and last element included: the same whatever the strides are."""
    width, begins = _windows(view)
    if view.is_contiguous():
        flat = view.reshape(-1)
        return [flat[begin : begin + width] for begin in begins]
    out = []
    for begin in begins:
        for box in flat_range_to_boxes(tuple(view.shape), begin, begin + width):
            part = view
            for dim, (start, extent) in enumerate(zip(box.offset, box.size, strict=True)):
                if extent != part.shape[dim]:
                    part = part.narrow(dim, start, extent)
            out.append(part.reshape(-1))
    return out


def _feed(digest: xxhash.xxh3_64, view: torch.Tensor) -> None:
    """All bytes in C order, in slabs, so that a strided or device tensor is never copied whole."""
    nbytes = view.numel() * view.element_size()
    if nbytes <= _SAMPLE_LIMIT or (view.device.type == "cpu" and view.is_contiguous() and not view.is_conj() and not view.is_neg()):
        if nbytes:
            digest.update(_as_bytes(view))
        return
    if view.shape[0] == 1:
        _feed(digest, view[0])
        return
    step = max(1, view.shape[0] * _SAMPLE_LIMIT // nbytes)
    for begin in range(0, view.shape[0], step):
        _feed(digest, view[begin : begin + step])


def serialize_object(value: Any) -> bytes:
    """The bytes of an object item: ``torch.save``, as DCP's DefaultSavePlanner writes them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def object_digest(value: Any, serialized: bytes) -> bytes:
    """16-byte digest of a value: equal for equal plain values, whatever their pickles look like; other classes by their pickle."""
    digest = xxhash.xxh3_128()
    if not _feed_value(digest, value, depth=0):
        digest = xxhash.xxh3_128(serialized)
    return digest.digest()


def _feed_value(digest: xxhash.xxh3_128, value: Any, depth: int) -> bool:
    """Feed a canonical form; False when the value holds something that has none."""
    if depth > 64:
        return False
    if isinstance(value, enum.Enum):
        digest.update(f"enum:{type(value).__module__}.{type(value).__qualname__}.{value.name};".encode())
    elif value is None or isinstance(value, bool | int | str | bytes):
        digest.update(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, float | complex):
        digest.update(type(value).__name__.encode() + struct.pack("<dd", value.real, value.imag))
    elif isinstance(value, torch.dtype | torch.device | torch.Size):
        digest.update(f"{value!r};".encode())
    elif isinstance(value, torch.Tensor):
        digest.update(b"tensor:")
        digest.update((tensor_digest(value, "full") or 0).to_bytes(8, "little"))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        digest.update(f"array:{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"{'list' if isinstance(value, list) else 'tuple'}:{len(value)};".encode())
        return all(_feed_value(digest, item, depth + 1) for item in value)
    elif isinstance(value, set | frozenset):
        # their order differs between processes, and with it their pickle
        digest.update(f"set:{len(value)};".encode())
        members = []
        for item in value:
            member = xxhash.xxh3_128()
            if not _feed_value(member, item, depth + 1):
                return False
            members.append(member.digest())
        digest.update(b"".join(sorted(members)))
    elif isinstance(value, dict):
        digest.update(f"dict:{len(value)};".encode())
        if not all(k is None or isinstance(k, str | bytes | int | float | bool | tuple) for k in value):
            return False
        ordered = sorted(value.items(), key=lambda kv: (type(kv[0]).__name__, repr(kv[0])))
        return all(_feed_value(digest, k, depth + 1) and _feed_value(digest, v, depth + 1) for k, v in ordered)
    else:
        return False
    return True
