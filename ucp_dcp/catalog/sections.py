"""A catalog's values -> the index sections of ``docs/format.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .codec import encode_array, encode_msgpack, encode_objects, file_blocks

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["I32", "I64", "U8", "U16", "encode_sections"]

I64 = np.dtype("<i8")
I32 = np.dtype("<i4")
U16 = np.dtype("<u2")
U8 = np.dtype("u1")


def encode_sections(catalog: Catalog, *, objects: bool = True) -> dict[str, bytes | memoryview]:
    """All sections, those that are read first before the large ones. Raises FormatError for what cannot be written."""
    c = catalog
    out: dict[str, bytes | memoryview] = {
        "tensor.key": encode_msgpack("tensor.key", c.keys),
        "tensor.fqn": encode_msgpack("tensor.fqn", c.fqns),
        "tensor.state": encode_msgpack("tensor.state", [c.state_names, bytes(encode_array(c.state_codes, U16))]),
        "tensor.role": encode_array(c.tensor_role, U8),
        "tensor.dtype": encode_array(c.tensor_dtype, U8),
        "tensor.kind": encode_array(c.tensor_kind, U8),
        "tensor.pattern": encode_array(c.tensor_pattern, I32),
        "tensor.shape_start": encode_array(c.shape_start, I64),
        "tensor.shape": encode_array(c.shape, I64),
        "tensor.chunk_start": encode_array(c.chunk_start, I64),
    }
    values: tuple[tuple[str, Any], ...] = (
        ("tensor.path", c.paths),
        ("patterns", c.patterns),
        ("groups", c.groups),
        ("files", [[row.path, row.size] for row in c.files]),
    )
    for name, value in values:
        if value or name == "files":
            out[name] = encode_msgpack(name, value)
    if any(row.blocks is not None for row in c.files):
        out["file.blocks"] = encode_msgpack("file.blocks", file_blocks(c.files))
    if objects and c.objects:
        out["objects"] = encode_objects(c.objects)
    columns: tuple[tuple[str, Any, np.dtype[Any]], ...] = (
        ("tensor.strided", c.tensor_strided, U8),
        ("chunk.file", c.chunk_file, I32),
        ("chunk.offset", c.chunk_offset, I64),
        ("chunk.coords", c.coords, I64),
        ("chunk.dtype", c.chunk_dtype, U8),
        ("chunk.strides", c.chunk_strides, I64),
        ("chunk.group", c.chunk_group, I32),
    )
    for name, column, dtype in columns:
        if column is not None:
            out[name] = encode_array(column, dtype)
    return out
