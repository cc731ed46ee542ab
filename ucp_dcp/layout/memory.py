"""Which tensors have memory of their own that can be written and read as bytes."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError

__all__ = ["check_memory"]


def check_memory(key: str, value: torch.Tensor) -> None:
    """Raise UnsupportedError, naming ``key``, for a tensor whose bytes are not its values.

    Subclasses of quantisation and low-precision libraries keep them in inner tensors, and show a dtype and a shape that exist nowhere.
    """
    if value.layout != torch.strided:
        raise UnsupportedError(f"tensor {key!r}: found layout {value.layout}; only strided (dense) tensors can be checkpointed")
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not hasattr(value, "__tensor_flatten__"):
        return
    inner, _ = value.__tensor_flatten__()
    parts = ", ".join(f"{name}: {getattr(getattr(value, name), 'dtype', '?')}" for name in inner)
    raise UnsupportedError(
        f"tensor {key!r} is a {kind.__name__}, which keeps its values in inner tensors ({parts}): a checkpoint of it as a {value.dtype} "
        f"tensor would not be what it is. Put the inner tensors ({', '.join(inner)}) into the state dict under names of their own, or "
        "dequantise it"
    )
