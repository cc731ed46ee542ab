"""Reading global tensors back through a catalog, byte range by byte range, with only the catalog and the store of the code under test."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch

from ucp_dcp.dtypes import NAMES, torch_dtype
from ucp_dcp.formats import Source

DATA = Path(__file__).parent.parent / "data"


def assemble(source: Source, t: int) -> torch.Tensor:
    """A global tensor, from its chunks. Elements that no chunk covers stay NaN (or -1), so that a hole shows."""
    catalog = source.catalog
    row = catalog.tensor(t)
    dtype = torch_dtype(row.dtype)
    out = (
        torch.full(row.shape, float("nan"), dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.full(row.shape, -1).to(dtype)
    )
    first, last = catalog.chunk_range(t)
    place = source.locate(np.arange(first, last))
    for i, (offset, size) in enumerate(catalog.boxes(t).tolist()):
        stored = torch_dtype(NAMES[place.dtype[i]])
        extent = sum((n - 1) * s for n, s in zip(size, place.strides[i], strict=True)) + 1 if 0 not in size else 0
        raw = source.store.read(catalog.files[int(place.file[i])].path, int(place.offset[i]), extent * stored.itemsize)
        values = (
            torch.frombuffer(bytearray(raw), dtype=stored).as_strided(size, place.strides[i]) if extent else torch.empty(size, dtype=stored)
        )
        out[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] = values
    return out


def tensor_spans(data: bytes) -> list[tuple[int, int]]:
    """(start, length) of the storages in a torch.save archive, by Python's own zip module."""
    spans = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if info.filename.split("/")[1:2] == ["data"]:
                name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
                spans.append((info.header_offset + 30 + name + extra, info.file_size))
    return spans


def torch_bytes(value: object, **kwargs: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)  # type: ignore[arg-type]
    return buffer.getvalue()


def reread(directory: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
