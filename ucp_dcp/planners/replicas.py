"""Content digests: what lets replicas be compared without moving them.

Two ranks that hold the same box of the same tensor must hold the same bytes; DCP keeps one copy and never looks at the other. A digest
depends only on the logical content (box shape, dtype, elements in C order), not on strides or device.
"""

from __future__ import annotations

import io
import struct
from typing import Any, Literal

import numpy as np
import torch
import xxhash

__all__ = ["CheckReplicas", "object_digest", "serialize_object", "tensor_digest"]

CheckReplicas = Literal["full", "sample", "off"]

_SAMPLE_LIMIT = 1 << 20  # bytes: up to this size the whole content is hashed in "sample" mode
_SAMPLES_PER_DIM = 32


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(view: torch.Tensor, mode: CheckReplicas) -> int | None:
    """64-bit digest of a tensor's content, None for mode "off". "sample": everything up to 1 MiB, evenly spaced parts above."""
    if mode == "off":
        return None
    digest = xxhash.xxh3_64()
    digest.update(f"{view.dtype}{tuple(view.shape)}".encode())
    _feed(digest, view, _SAMPLE_LIMIT if mode == "sample" else None)
    return int(digest.intdigest())


def _feed(digest: xxhash.xxh3_64, view: torch.Tensor, budget: int | None) -> None:
    nbytes = view.numel() * view.element_size()
    if budget is None and nbytes > _SAMPLE_LIMIT and view.dim() > 0 and view.shape[0] > 1:
        # full mode: hash in slabs, so that a strided or device tensor is never copied whole
        step = max(1, view.shape[0] * _SAMPLE_LIMIT // nbytes)
        for begin in range(0, view.shape[0], step):
            _feed(digest, view[begin : begin + step], None)
        return
    if budget is None or nbytes <= budget or view.dim() == 0:
        if nbytes:
            digest.update(_as_bytes(view))
        return
    extent = view.shape[0]
    if extent == 1:
        _feed(digest, view[0], budget)
    elif view.dim() == 1:
        width = max(1, budget // _SAMPLES_PER_DIM // view.element_size())
        for begin in np.linspace(0, extent - width, _SAMPLES_PER_DIM, dtype=np.int64):
            digest.update(_as_bytes(view[int(begin) : int(begin) + width]))
    else:
        for index in np.unique(np.linspace(0, extent - 1, min(_SAMPLES_PER_DIM, extent), dtype=np.int64)):
            _feed(digest, view[int(index)], budget // _SAMPLES_PER_DIM)


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
    if value is None or isinstance(value, bool | int | str | bytes):
        digest.update(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, float):
        digest.update(b"float:" + struct.pack("<d", value))
    elif isinstance(value, torch.Tensor):
        digest.update(b"tensor:")
        digest.update((tensor_digest(value, "full") or 0).to_bytes(8, "little"))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        digest.update(f"array:{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"{'list' if isinstance(value, list) else 'tuple'}:{len(value)};".encode())
        return all(_feed_value(digest, item, depth + 1) for item in value)
    elif isinstance(value, dict):
        digest.update(f"dict:{len(value)};".encode())
        if not all(isinstance(k, str | int | float | bool | tuple) for k in value):
            return False
        ordered = sorted(value.items(), key=lambda kv: (type(kv[0]).__name__, repr(kv[0])))
        return all(_feed_value(digest, k, depth + 1) and _feed_value(digest, v, depth + 1) for k, v in ordered)
    else:
        return False
    return True
