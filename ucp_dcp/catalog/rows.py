"""One tensor, object or file of a catalog as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..names import Role, canonical_name

__all__ = ["FileBlocks", "FileRow", "ObjectRow", "PathTuple", "TensorRow"]

PathTuple = tuple[str | int, ...]
"""Nesting path in a state dict."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A global tensor.

    Attributes:
        index: its number in the catalog (tensors are sorted by key).
        key: as written; what stock DCP sees.
        role, fqn, state: what it is (D6).
        dtype: name of the dtype of the global tensor, ``"bfloat16"``.
        shape: global shape.
        pattern: how the writer had divided it, as text; None when unknown.
        path: nesting path in the state dict.
    """

    index: int
    key: str
    role: Role
    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    pattern: str | None
    path: PathTuple

    @property
    def name(self) -> str:
        """Canonical name (``ucp_dcp.names``)."""
        return canonical_name(self.role, self.fqn, self.state, self.key)


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """Something in a checkpoint that is not a tensor.

    Attributes:
        key, role, fqn, state: as for tensors.
        path: nesting path in the state dict; empty means ``(key,)``.
        file: index into the catalog's files; -1 when the value is inline.
        offset, length: bytes in that file.
        encoding: ``"torch_save"`` (bytes in a file) or ``"inline"`` (``value``).
        value: the value when inline. Only None, bool, int, float, str, and lists and dicts (string or integer keys) of them can be
            serialised.
    """

    key: str
    role: Role = Role.OBJECT
    fqn: str = ""
    state: str = ""
    path: PathTuple = ()
    file: int = -1
    offset: int = 0
    length: int = 0
    encoding: Literal["torch_save", "inline"] = "inline"
    value: Any = None


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Where the digests of a file's blocks are (D10).

    Attributes:
        path: the sidecar: one little-endian u64 for each block, XXH3-64 of its bytes. size: bytes of a block; the last may be shorter.
        xxh3: XXH3-128 of the sidecar, 32 hex digits.
    """

    path: str
    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a checkpoint: its path relative to the root, its size in bytes, and where digests of its blocks are, if there are any."""

    path: str
    size: int
    blocks: FileBlocks | None = None
