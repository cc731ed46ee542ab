"""Element types: the codes of ``docs/format.md``, their names and sizes, and the torch dtype of a name.

Codes are part of the format on disk and never change meaning. Names are torch's own, without the ``torch.`` prefix.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["CODES", "ITEMSIZE", "NAMES", "code_of", "is_complex", "is_floating", "itemsize", "name_of", "torch_dtype"]

# code -> (name, bytes per element). Append only.
_TABLE: tuple[tuple[str, int], ...] = (
    ("float32", 4),
    ("float64", 8),
    ("float16", 2),
    ("bfloat16", 2),
    ("int64", 8),
    ("int32", 4),
    ("int16", 2),
    ("int8", 1),
    ("uint8", 1),
    ("bool", 1),
    ("complex64", 8),
    ("complex128", 16),
    ("complex32", 4),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("float4_e2m1fn_x2", 1),
)

NAMES: tuple[str, ...] = tuple(name for name, _ in _TABLE)
"""Name of each dtype code."""
ITEMSIZE: tuple[int, ...] = tuple(size for _, size in _TABLE)
"""Bytes per element of each dtype code."""
CODES: dict[str, int] = {name: code for code, (name, _) in enumerate(_TABLE)}
"""Code of each dtype name."""


def name_of(dtype: torch.dtype | str) -> str:
    """The name (``"bfloat16"``) of a torch dtype or of a name. Raises UnsupportedError for an unknown one."""
    name = dtype if isinstance(dtype, str) else str(dtype)
    name = name.removeprefix("torch.")
    if name not in CODES:
        raise UnsupportedError(f"dtype {dtype} is not known to this version; known: {', '.join(NAMES)}")
    return name


def code_of(dtype: torch.dtype | str) -> int:
    """The format code of a torch dtype or of a name. Raises UnsupportedError for an unknown one."""
    return CODES[name_of(dtype)]


def itemsize(name: str) -> int:
    """Bytes per element of a dtype name."""
    return ITEMSIZE[CODES[name]]


def is_floating(name: str) -> bool:
    """True for real floating point types."""
    return "float" in name


def is_complex(name: str) -> bool:
    """True for complex types."""
    return name.startswith("complex")


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name. Raises UnsupportedError when this torch has no such dtype."""
    import torch

    dtype = getattr(torch, name_of(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name} is stored in the checkpoint but torch {torch.__version__} has no such dtype")
    return dtype
