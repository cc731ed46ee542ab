"""``export``: a checkpoint of any format as a Hugging Face folder of safetensors files, written as a stream."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import torch

from .catalog import TensorRow
from .checkpoint import Checkpoint, StoredTensor, open_checkpoint
from .dtypes import itemsize, name_of, torch_dtype
from .errors import PlanError, StoreExistsError, UnsupportedError
from .formats import MappedNames
from .formats.safetensors.header import DTYPE_NAMES
from .names import Role
from .storage.store import Store, open_store
from .transfer import Verify, flat_bytes

__all__ = ["ExportReport", "Progress", "export_safetensors"]

INDEX = "model.safetensors.index.json"
SLAB = 64 << 20
"""Bytes of one tensor that are held at a time."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes done, and bytes of all tensors."""


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        files: path -> bytes, in the order written.
        tensors: name -> "weight" or "master": which stored copy it is.
        nbytes: bytes of all tensors.
        left_out: canonical names of weights that were not written: those that a name map has no place for.
    """

    files: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    stored: StoredTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.stored.shape) * itemsize(self.dtype)


def export_safetensors(
    url: str | os.PathLike[str] | Store | Checkpoint,
    target: str | os.PathLike[str] | Store,
    *,
    names: MappedNames | None = None,
    source: Literal["weight", "master"] = "weight",
    dtype: torch.dtype | str | None = None,
    shard_size: int = 5 * 10**9,
    config: Mapping[str, Any] | None = None,
    verify: Verify = "covered",
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the weights and buffers of a checkpoint as ``model.safetensors``, or as several files and ``model.safetensors.index.json``.

    Args:
        url: any checkpoint that :func:`open_checkpoint` opens, or an open one.
        target: folder or URL that holds no safetensors file yet.
        names: under which names (``MappedNames("llama", "huggingface")``); by default those of the checkpoint.
        source: which copy of a parameter is written where there are two: the ``weight`` or the fp32 ``master``. One that has only the
            other is written from that.
        dtype: of floating-point tensors; by default what is stored.
        shard_size: bytes of a file at most, but for a tensor that is larger by itself.
        config: what ``config.json`` shall hold; nothing is written without it.
        verify: of the bytes read, as for :func:`open_checkpoint`.

    At most two slabs of ``SLAB`` bytes are held. The index (a single file's name) appears last, when everything else is durable; after a
    failure what was written is deleted. Raises StoreExistsError, PlanError (nothing to write), UnsupportedError (a dtype that
    safetensors does not have), and what reading raises.
    """
    checkpoint = url if isinstance(url, Checkpoint) else open_checkpoint(url, verify=verify, storage_options=storage_options)
    if names is not None:
        checkpoint = checkpoint.under(names)
    store = open_store(target, **dict(target_options or {}))
    report = ExportReport()
    items = list(_items(checkpoint, source, None if dtype is None else name_of(dtype), report))
    if not items:
        raise PlanError(f"{checkpoint.url}: it names no weights, so there is nothing to export; a stock checkpoint needs names with a root")
    _refuse_used(store)
    left_out = getattr(checkpoint.source, "left_out", ())
    report.left_out = tuple(name for name in left_out if name.startswith("model."))
    report.nbytes = sum(item.nbytes for item in items)
    shards = _shards(items, shard_size)
    count = len(shards)
    files = ["model.safetensors"] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, report.nbytes)

    try:
        if config is not None:
            _put(store, "config.json", config, report)
        for path, shard in zip(files, shards, strict=True):
            report.files[path] = 0
            report.files[path] = _write(store, path, shard, step)
        if len(shards) > 1:
            where = {item.name: path for path, shard in zip(files, shards, strict=True) for item in shard}
            _put(store, INDEX, {"metadata": {"total_size": report.nbytes}, "weight_map": where}, report)
    except BaseException:
        store.delete(*reversed(report.files))
        raise
    return report


def _items(checkpoint: Checkpoint, source: Literal["weight", "master"], dtype: str | None, report: ExportReport) -> Iterator[_Item]:
    rows: dict[str, dict[Role, TensorRow]] = {}
    for row in checkpoint.catalog.tensors():
        # saved without a layout, a master is a state of that name
        role = Role.MASTER if row.role == Role.STATE and row.state == "master" else row.role
        if role in (Role.WEIGHT, Role.BUFFER, Role.MASTER):
            rows.setdefault(row.fqn, {})[role] = row
    first = (Role.MASTER, Role.WEIGHT) if source == "master" else (Role.WEIGHT, Role.MASTER)
    for fqn, own in sorted(rows.items()):
        role = next(role for role in (Role.BUFFER, *first) if role in own)
        row = own[role]
        wanted = dtype if dtype is not None and torch_dtype(row.dtype).is_floating_point else row.dtype
        if wanted not in DTYPE_NAMES:
            raise UnsupportedError(f"{row.name}: safetensors has no dtype {wanted}; give dtype=")
        report.tensors[fqn] = "master" if role == Role.MASTER else "weight"
        yield _Item(fqn, checkpoint[row.name], wanted)


def _refuse_used(store: Store) -> None:
    for entry in store.list(""):
        if entry.path.endswith((".safetensors", ".safetensors.index.json")) and "/" not in entry.path:
            raise StoreExistsError(f"{store.url} holds {entry.path} already; export into a folder of its own, or delete it first")


def _shards(items: list[_Item], limit: int) -> list[list[_Item]]:
    out: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if out[-1] and size + item.nbytes > limit:
            out.append([])
            size = 0
        out[-1].append(item)
        size += item.nbytes
    return out


def _put(store: Store, path: str, value: Mapping[str, Any], report: ExportReport) -> None:
    data = json.dumps(value, indent=2, sort_keys=path == INDEX).encode() + b"\n"
    store.put(path, data, if_absent=True)
    report.files[path] = len(data)


def _write(store: Store, path: str, items: list[_Item], step: Callable[[int], None]) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in items:
        header[item.name] = {"dtype": DTYPE_NAMES[item.dtype], "shape": list(item.stored.shape), "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with store.create(path) as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            for slab in _slabs(item):
                writer.write(slab)
                step(slab.nbytes)
        return writer.tell()


def _slabs(item: _Item) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, some of its outermost rows at a time."""
    shape = item.stored.shape
    if prod(shape) == 0:
        return
    dtype = torch_dtype(item.dtype)
    yield from _of(item.stored, (), shape, dtype, max(itemsize(item.dtype), item.stored.nbytes // prod(shape)))


def _of(stored: StoredTensor, index: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, width: int) -> Iterator[memoryview]:
    rest = shape[len(index) :]
    row = prod(rest[1:]) * width
    if rest and row > SLAB and len(rest) > 1:
        for i in range(rest[0]):
            yield from _of(stored, (*index, i), shape, dtype, width)
        return
    step = max(1, SLAB // max(1, row)) if rest else 1
    for start in range(0, rest[0] if rest else 1, step):
        part = stored[(*index, slice(start, start + step))] if rest else stored[index or ...]
        yield flat_bytes(part.to(dtype).contiguous()).numpy().data
