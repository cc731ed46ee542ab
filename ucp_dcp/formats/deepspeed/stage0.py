"""ZeRO stage 0: one file with the whole module and the whole optimizer, whose parameters have numbers instead of names.

Three forms (deepspeed/runtime/engine.py ``_configure_optimizer``): the optimizer itself (fp32), ``FP16_UnfusedOptimizer`` (fp16 or bf16: an
fp32 master per parameter), ``FP16_Optimizer`` (a fused kernel: one flat fp32 master per group). Names: ``naming.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...catalog import Catalog
from ...dtypes import itemsize, torch_dtype
from ...errors import CorruptCheckpointError, UnsupportedError
from ...geometry import c_strides
from ...names import Role
from ...safe_pickle import is_plain
from ...storage.store import Range, Store
from .flat import pieces_of_group
from .naming import FlatItem, Item, name_flat_groups, name_groups
from .rank_file import RankFile
from .rows import Record, Rows, Select, Stored

__all__ = ["catalog_of_whole", "optimizer_record"]

_SAMPLE = 128
"""Elements compared at either end of a parameter, where masters tell which is which."""
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def optimizer_record(file: RankFile, store: Store, module: Mapping[str, Stored], buffers: set[str]) -> dict[str, Any]:
    """What the ``optimizer`` of model states holds, with the names of its parameters as far as they can be known.

    Where there are fp32 masters, up to 2 x 128 elements of each and of each weight are read. Raises CorruptCheckpointError,
    UnsupportedError.
    """
    value = file.mapping(file.root["optimizer"], "optimizer")
    wrapped = "optimizer_state_dict" in value
    base = file.mapping(value["optimizer_state_dict"] if wrapped else value, "optimizer_state_dict")
    if "param_groups" not in base or "state" not in base:
        raise UnsupportedError(
            f"{file.path}: the optimizer holds {', '.join(map(str, list(value)[:8]))}: a kind that this version does not know"
        )
    groups = file.groups(base, ("optimizer", "optimizer_state_dict") if wrapped else ("optimizer",))
    states = file.states(base)
    ids = [group.get("params", []) for group in groups]
    flat_ids = [i for group in ids for i in group]
    if len(set(flat_ids)) != len(flat_ids) or not set(states) <= set(flat_ids):
        file.bad("the param groups of the optimizer do not list each of its states once")
    candidates = _parameters(module, buffers)
    samples = _Samples(store, file.path)
    record: dict[str, Any] = {
        "groups": groups,
        "states": states,
        "ids": ids,
        "masters": None,
        "flat": None,
        "objects": _scaler(file, value) if wrapped else [],
    }
    if "fp32_groups_flat" in value:
        flats = [file.tensor(t, "fp32_groups_flat") for t in file.items(value["fp32_groups_flat"], "fp32_groups_flat")]
        if any(len(t[2]) != 1 or t[3] != (1,) for t in flats) or [len(group) for group in ids] != [1] * len(flats):
            file.bad("fp32_groups_flat does not hold one flat tensor per param group")
        record["flat"] = flats
        chosen = name_flat_groups([_numel(t) for _, t in candidates], [_Flat(samples, t, candidates) for t in flats])
        record["names"] = [None if c is None else [(candidates[j][0], candidates[j][1][2]) for j in c] for c in chosen]
        return record
    if wrapped:
        if "fp32_groups" not in value:
            raise UnsupportedError(f"{file.path}: the optimizer has no fp32_groups: a kind that this version does not know")
        listed = [file.items(group, "fp32_groups") for group in file.items(value["fp32_groups"], "fp32_groups")]
        masters = [[file.tensor(t, "fp32_groups") for t in group] for group in listed]
        if [len(group) for group in masters] != [len(group) for group in ids]:
            file.bad("fp32_groups and the param groups of the optimizer differ in their numbers of parameters")
        record["masters"] = masters
        low = {t[1] for _, t in candidates}
        dtype = low.pop() if len(low) == 1 else None  # weights of several dtypes: which one a master was rounded to is not known
        items = [[_item(t, samples.rounded(t, dtype) if dtype else None) for t in group] for group in masters]
        named = [(name, _item(t, samples.plain(t) if dtype else None)) for name, t in candidates if _numel(t)]
        record["names"] = name_groups(named, items)
        return record
    stated = [group.get("param_names") for group in groups]
    if all(s is not None and s[0] == "inline" and isinstance(s[1], list) and len(s[1]) == len(i) for s, i in zip(stated, ids, strict=True)):
        record["names"] = [list(map(str, s[1])) for s in stated if s is not None]
        return record
    items = [[Item(_shape(states.get(i, {}))) for i in group] for group in ids]
    record["names"] = name_groups([(name, Item(t[2])) for name, t in candidates], items)
    return record


def _scaler(file: RankFile, value: Mapping[Any, Any]) -> list[tuple[str, str, Any]]:
    """The loss scaler's fields as one object, under the names that the other stages have."""
    fields = {key: value[key] for key in _SCALER if key in value}
    if not is_plain(fields):
        file.bad("the fields of the loss scaler are no plain values")
    rest = [key for key in ("dynamic_loss_scale", "clip_grad") if key in value]
    own: list[tuple[str, str, Any]] = [("optim.loss_scaler", "inline", fields)] if fields else []
    return own + [(f"optim.{key}", *file.thing(value[key], ("optimizer", key))) for key in rest]


def _parameters(module: Mapping[str, Stored], buffers: set[str]) -> list[tuple[str, Stored]]:
    """The parameters of a module in its order, each once: a tied one under its first name, as in ``named_parameters()``."""
    seen: set[Stored] = set()
    found = []
    for name, tensor in module.items():
        if name in buffers or (tensor in seen and _numel(tensor)):
            continue
        seen.add(tensor)
        found.append((name, tensor))
    return found


def _shape(states: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter by its states: factored ones (``[n, 1]`` and ``[1, m]``) are broadcast."""
    shapes = [value[2] for kind, value in states.values() if kind == "tensor"]
    try:
        return tuple(np.broadcast_shapes(*shapes)) if shapes else None
    except ValueError:
        return None


def _numel(tensor: Stored) -> int:
    return math.prod(tensor[2])


def _item(tensor: Stored, sample: bytes | None) -> Item:
    count = min(_numel(tensor), 2 * _SAMPLE)
    width = len(sample) // count if sample else 0
    return Item(tensor[2], sample, sample is not None and sample == sample[:width] * count)


class _Samples:
    """The first and last elements of tensors, as bytes."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path

    def _read(self, tensor: Stored, at: int, numel: int) -> torch.Tensor:
        """Up to 2 x 128 of ``numel`` elements from element ``at`` on of a contiguous tensor."""
        offset, dtype, _, _ = tensor
        width = itemsize(dtype)
        parts = [(at, numel)] if numel <= 2 * _SAMPLE else [(at, _SAMPLE), (at + numel - _SAMPLE, _SAMPLE)]
        buffers = [bytearray(count * width) for _, count in parts]
        ranges = [Range(self.path, offset + start * width, count * width) for start, count in parts]
        self.store.read_ranges(ranges, [memoryview(b) for b in buffers])
        return torch.frombuffer(bytearray(b"".join(buffers)), dtype=torch_dtype(dtype))

    def plain(self, tensor: Stored) -> bytes | None:
        if tensor[3] != c_strides(tensor[2]) or not _numel(tensor):
            return None
        return self._read(tensor, 0, _numel(tensor)).view(torch.uint8).numpy().tobytes()

    def rounded(self, tensor: Stored, dtype: str, at: int = 0, numel: int | None = None) -> bytes | None:
        numel = _numel(tensor) if numel is None else numel
        if tensor[3] != c_strides(tensor[2]) or not numel:
            return None
        return self._read(tensor, at, numel).to(torch_dtype(dtype)).view(torch.uint8).numpy().tobytes()


class _Flat(FlatItem):
    def __init__(self, samples: _Samples, tensor: Stored, candidates: Sequence[tuple[str, Stored]]) -> None:
        super().__init__(tensor[2][0])
        self.samples = samples
        self.tensor = tensor
        self.candidates = candidates
        self.known: dict[int, bytes | None] = {}

    def holds(self, at: int, index: int) -> bool:
        weight = self.candidates[index][1]
        if index not in self.known:
            self.known[index] = self.samples.plain(weight)
        return self.known[index] in (None, self.samples.rounded(self.tensor, weight[1], at, _numel(weight)))


def catalog_of_whole(record: Record) -> tuple[Catalog, dict[str, Select], dict[str, Any]]:
    """The catalog of a stage 0 file, where its objects are, and the provenance.

    Parameters whose number could not be given a name keep their states as plain tensors ``optimizer.<number>.<state>``, and
    ``provenance["unnamed"]`` counts them. Raises CorruptCheckpointError, UnsupportedError.
    """
    _check(record)
    rows = Rows()
    rows.module(record, set())
    unnamed = 0
    optimizer = record["optimizer"]
    if optimizer is not None:
        file = rows.file(record)
        names: list[list[str]] = []
        for g, ids in enumerate(optimizer["ids"]):
            if optimizer["flat"] is not None:
                names.append(_flat_group(rows, record, g, ids[0], file))
                unnamed += optimizer["names"][g] is None
                continue
            own = []
            for k, (i, name) in enumerate(zip(ids, optimizer["names"][g], strict=True)):
                values = {**optimizer["states"].get(i, {})}
                if optimizer["masters"] is not None:
                    values["master"] = ["tensor", optimizer["masters"][g][k]]
                unnamed += name is None and bool(values)
                for state, (kind, value) in values.items():
                    _state(rows, name, i, state, kind, value, file)
                own.append(f"#{i}" if name is None else name)
            names.append(own)
        rows.hyperparameters(optimizer["groups"], names, record)
        for key, kind, value in optimizer["objects"]:
            rows.object(key, kind, value, record)
    for key, kind, value in record["objects"]:
        rows.object(key, kind, value, record)
    provenance: dict[str, Any] = {
        "writer": "deepspeed",
        "deepspeed": record["version"],
        "zero_stage": 0,
        "dp": record["dp_world_size"],
        "global_steps": record["global_steps"],
        **({"unnamed": f"{unnamed} parameters of the optimizer have a number only: optimizer.<number>.<state>"} if unnamed else {}),
    }
    return rows.build.build(), rows.selects, provenance


def _check(record: Record) -> None:
    if record["mp_world_size"] > 1:
        raise UnsupportedError(f"{record['path']}: mp_world_size is {record['mp_world_size']}: model parallelism is not supported yet")
    if record["experts"]:
        raise UnsupportedError(f"{record['path']}: num_experts: mixtures of experts are not supported yet")
    if record["param_shapes"] is not None:
        raise CorruptCheckpointError(
            f"{record['path']}: was saved with ZeRO, but no *_optim_states.pt file lies beside it; all of them are missing"
        )


def _state(rows: Rows, name: str | None, number: int, state: str, kind: str, value: Any, file: int) -> None:
    if kind == "number":
        if name is None:
            rows.object(f"optimizer.{number}.{state}", "inline", value, {})
        else:
            rows.number(name, state, value)
        return
    if name is not None:
        role = Role.MASTER if state == "master" else Role.STATE
        rows.whole(role, name, value, file, "" if role is Role.MASTER else state)
        return
    key = f"optimizer.{number}.{state}"
    handle = rows.build.add_tensor(key=key, role=Role.PLAIN, fqn="", state="", dtype=value[1], shape=value[2])
    rows.chunk(handle, value, file)


def _flat_group(rows: Rows, record: Record, g: int, number: int, file: int) -> list[str]:
    """Masters and states of one flat buffer of FP16_Optimizer: the parameters end to end, without padding."""
    optimizer = record["optimizer"]
    flat: Stored = optimizer["flat"][g]
    values = {"": ["tensor", flat], **optimizer["states"].get(number, {})}
    params = optimizer["names"][g]
    if params is None:
        for state, (kind, value) in values.items():
            _state(rows, None, number, state or "master", kind, value, file)
        return [f"#{number}"]
    pieces, _, _ = pieces_of_group(params, [0] * len(params), 1)
    files = np.asarray([file], dtype=np.int32)
    pattern = rows.build.add_pattern({"text": f"Flat (FP16_Optimizer, group {g})"})
    for state, (kind, value) in values.items():
        if kind == "tensor" and (value[2] != flat[2] or value[3] != (1,)):
            raise UnsupportedError(f"{record['path']}: state {state!r} of group {g} has shape {list(value[2])}, not that of the parameters")
        for piece in pieces:
            if kind == "tensor":
                rows.flat(piece, Role.STATE if state else Role.MASTER, piece.name, state, [value], files, pattern)
            else:
                _state(rows, piece.name, number, state, kind, value, file)
    return [name for name, _ in params]
