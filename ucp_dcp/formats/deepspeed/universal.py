"""The *universal* folder that DeepSpeed's converter writes (deepspeed/checkpoint/ds_to_universal.py), opened where it lies.

``zero/<parameter>/{fp32, exp_avg, ..., step}.pt`` beside full copies of the model states. Stages 1 and 2: a dict with ``param``, the
tensor in its shape. Stage 3: a bare flat tensor, its shape is in the model states, and the step is in ``zero/optimizer_state.pt``.

What DeepSpeed's own loader leaves out is taken from the model states: frozen parameters, persistent buffers and the low-precision weights.
The fp32 copies of frozen parameters, buffers and second names of tied parameters, which the converter writes since 0.19.8, are no
masters and are not used: they were widened from what the model states hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...catalog import Catalog
from ...errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from ...geometry import c_strides
from ...names import Role
from ...paths import checked_path
from ...safe_pickle import EnumStub, StoredTensor
from ...storage.store import Store
from ..torch_archive import open_archive
from .catalog import DeepSpeedSource
from .flat import pieces_of_subgroup
from .parse import parse_file
from .rank_file import RankFile, stand_in
from .rows import Record, Rows, Select, Stored

__all__ = ["UniversalFolder", "find_universal", "open_universal"]

_LATEST = "latest_universal"
_OPTIMIZER = "zero/optimizer_state.pt"
_MAX_LATEST = 4096
_MODEL = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_MASTER = "fp32"
_NOT_OBJECTS = frozenset(
    (
        "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count", "ds_version", "param_groups", "param_slice_mappings",
        "optimizer_state_dict", "fp32_flat_groups", "universal_checkpoint_info", "ds_zero_partition_groups", "affine_map",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UniversalFolder:
    """A universal folder: ``prefix`` is ``""`` or ``"<tag>/"``; ``models`` are paths; ``states`` is parameter -> state -> path."""

    prefix: str
    tag: str
    models: tuple[str, ...]
    states: Mapping[str, Mapping[str, str]]

    def paths(self) -> list[str]:
        """All files to parse."""
        own = [path for states in self.states.values() for path in states.values()]
        return [*self.models, self.prefix + _OPTIMIZER, *own]


def find_universal(store: Store, tag: str | None) -> UniversalFolder | None:
    """The universal folder of the tag given, the one that ``latest_universal`` names, or the store's root. None: there is none.

    Where rank files (``latest``) and a universal folder lie side by side, only ``tag`` leads to the latter.

    Raises CheckpointNotFoundError: ``latest_universal`` names a folder that is not there. CorruptCheckpointError, StoreError.
    """
    if tag is not None:
        return _list(store, tag + "/", tag) if "/" not in tag and tag and _there(store, f"{checked_path(tag)}/{_OPTIMIZER}") else None
    if _there(store, _OPTIMIZER):
        return _list(store, "", store.url.rstrip("/").rpartition("/")[2])
    named = _named(store, "latest")
    if named is not None and _there(store, f"{named}/{_OPTIMIZER}"):
        return _list(store, named + "/", named)
    if named is not None:
        return None
    named = _named(store, _LATEST)
    if named is None:
        return None
    if not _there(store, f"{named}/{_OPTIMIZER}"):
        raise CheckpointNotFoundError(
            f"{store.url}: the file {_LATEST} names the folder {named!r}, but there is no {named}/{_OPTIMIZER}; did the conversion finish?"
        )
    return _list(store, named + "/", named)


def _there(store: Store, path: str) -> bool:
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def _named(store: Store, path: str) -> str | None:
    """The folder name in a small text file; None when there is no such file, or no such name in it."""
    try:
        if store.size(path) > _MAX_LATEST:
            return None
        name = store.read(path).decode("utf-8", "replace").strip()
    except StoreNotFoundError:
        return None
    if not name or "/" in name:
        return None
    try:
        return checked_path(name)
    except FormatError:
        return None


def _list(store: Store, prefix: str, tag: str) -> UniversalFolder:
    models: list[str] = []
    states: dict[str, dict[str, str]] = {}
    for entry in sorted(store.list(prefix)):
        parts = entry.path[len(prefix) :].split("/")
        if len(parts) == 1 and _MODEL.fullmatch(parts[0]):
            models.append(entry.path)
        elif len(parts) == 3 and parts[0] == "zero" and parts[2].endswith(".pt"):
            states.setdefault(parts[1], {})[parts[2][: -len(".pt")]] = entry.path
    where = prefix or "this folder"
    if not models:
        raise CorruptCheckpointError(f"{where}: a universal checkpoint without model states (*mp_rank_00_model_states.pt)")
    ranks = {match[2] for path in models if (match := _MODEL.fullmatch(path.rpartition("/")[2]))}
    if ranks != {"00"}:
        raise UnsupportedError(f"{where}: a universal checkpoint of model-parallel ranks {sorted(ranks)}; not supported yet")
    kinds = {path.rpartition("/")[2].startswith("zero_pp") for path in models}
    if len(kinds) != 1:
        raise CorruptCheckpointError(f"{where}: files of two saves: model states of ZeRO stage 3 and of stages 0 to 2")
    return UniversalFolder(prefix, tag, tuple(models), states)


def open_universal(
    store: Store, folder: UniversalFolder, parse_all: Callable[[Sequence[str], Callable[[str], Any]], list[Any]]
) -> DeepSpeedSource:
    """Open a universal folder. Of each file its directory, pickle and local headers are read; no tensor byte.

    Raises CorruptCheckpointError naming the file that is missing, truncated or does not fit the model states; UnsupportedError,
    UnsafePickleError, StoreError.
    """
    records = parse_all(folder.paths(), lambda path: _parse(store, folder.prefix, path))
    models, optimizer, values = records[: len(folder.models)], records[len(folder.models)], iter(records[len(folder.models) + 1 :])
    states = {name: {state: next(values) for state in own} for name, own in folder.states.items()}
    catalog, selects, provenance = _Universal(models, optimizer, states).join()
    return DeepSpeedSource(catalog, store, {**provenance, "tag": folder.tag}, selects)


# ---- one file


def _parse(store: Store, prefix: str, path: str) -> dict[str, Any]:
    inner = path[len(prefix) :]
    if _MODEL.fullmatch(inner):
        return parse_file(store, path)
    file = RankFile(open_archive(store, path, stubs=stand_in, inert_unknown=True))
    record: dict[str, Any] = {"path": path, "size": file.size}
    return record | (_optimizer(file) if inner == _OPTIMIZER else _value(file))


def _value(file: RankFile) -> dict[str, Any]:
    """One state of one parameter. ``bare``: it was stored flat, without a dict around it."""
    value: Any = file.root
    if isinstance(value, dict):
        if value.get("is_expert_param"):
            raise UnsupportedError(f"{file.path}: a parameter of experts (is_expert_param); not supported yet")
        return {"tensor": file.tensor(value.get("param"), "param"), "bare": False}
    if isinstance(value, StoredTensor):
        return {"tensor": file.tensor(value, "the value"), "bare": True}
    if type(value) in (int, float):
        return {"number": value, "bare": True}
    file.bad(f"holds a {type(value).__name__}, expected a tensor or a dict with 'param'")


def _optimizer(file: RankFile) -> dict[str, Any]:
    root = file.mapping(file.root, "the optimizer state")
    stage = root.get("zero_stage")
    if isinstance(stage, EnumStub):
        stage = {"weights": 3, "gradients": 2, "optimizer_states": 1, "disabled": 0}.get(stage.member or "", stage.value)
    if stage not in (None, 0, 1, 2, 3):
        raise UnsupportedError(f"{file.path}: zero_stage is {stage!r:.60}; stages 0 to 3 are supported")
    base = root.get("optimizer_state_dict")
    base = file.mapping(base, "optimizer_state_dict") if base is not None else {}
    holder, path = (root, ()) if "param_groups" in root else (base, ("optimizer_state_dict",))
    version = root.get("ds_version")
    return {
        "stage": stage,
        "groups": file.groups(holder, path),
        "states": file.states(base) if stage == 3 else {},
        "objects": [
            (f"optim.{key}", *file.scaler(value, (key,)))
            for key, value in root.items()
            if type(key) is str and key not in _NOT_OBJECTS and value is not None
        ],
        "version": version if isinstance(version, str) else None,
    }


# ---- all files


class _Universal(Rows):
    def __init__(self, models: Sequence[Record], optimizer: Record, states: Mapping[str, Mapping[str, Record]]) -> None:
        super().__init__()
        self.models = models
        self.model = models[0]
        self.optimizer = optimizer
        self.states = states
        self.stage3 = models[0]["path"].rpartition("/")[2].startswith("zero_pp")
        self.dp: int = self.model["dp_world_size"]

    def join(self) -> tuple[Catalog, dict[str, Select], dict[str, Any]]:
        self._check()
        groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]] = self.model["param_shapes"]
        shapes = {name: shape for group in groups for name, shape in group}
        for g, group in enumerate(groups):
            first: tuple[str, set[str]] | None = None
            for name, shape in group:
                states = self._parameter(name, shape, g)
                first = first or (name, states)
                if states != first[1]:
                    self.bad(
                        self.model, f"zero/{name} holds the states {sorted(states)}, but zero/{first[0]} holds {sorted(first[1])}; "
                        "is the conversion complete?"
                    )  # fmt: skip
        if self.stage3:
            self._stage3(shapes)
        else:
            self.module(self.model, set(shapes))
            for name, shape in shapes.items():
                found = self.model["module"].get(name)
                if found is None or found[2] != shape:
                    self.bad(self.model, f"parameter {name!r} is {found and list(found[2])} in the module, {list(shape)} in param_shapes")
        self._objects(groups)
        provenance: dict[str, Any] = {
            "writer": "deepspeed ds_to_universal",
            "deepspeed": self.model["version"] or self.optimizer["version"],
            "zero_stage": self.optimizer["stage"],
            "dp": self.dp,
            "global_steps": self.model["global_steps"],
        }
        return self.build.build(), self.selects, provenance

    def _check(self) -> None:
        model = self.model
        if model["mp_world_size"] > 1:
            raise UnsupportedError(f"{model['path']}: mp_world_size is {model['mp_world_size']}; model parallelism is not supported yet")
        if model["experts"]:
            raise UnsupportedError(f"{model['path']}: num_experts: mixtures of experts are not supported yet")
        if model["param_shapes"] is None:
            raise UnsupportedError(f"{model['path']}: no param_shapes: the shapes and groups of the parameters are not known")
        if self.stage3 and len(self.models) != self.dp:
            self.bad(model, f"dp_world_size is {self.dp}, but there are {len(self.models)} files of model states")
        for other in self.models[1:]:
            if other["shapes_digest"] != model["shapes_digest"] or other["global_steps"] != model["global_steps"]:
                self.bad(other, f"its parameters or step differ from those in {model['path']}: files of two saves")
        names = [name for group in model["param_shapes"] for name, _ in group]
        if len(set(names)) != len(names):
            self.bad(model, "a parameter is listed twice in param_shapes")

    def _parameter(self, name: str, shape: tuple[int, ...], g: int) -> set[str]:
        """Master and states of one parameter; the names of its states."""
        own = self.states.get(name, {})
        numel = math.prod(shape)
        if _MASTER not in own:
            self.bad(self.model, f"lists the parameter {name!r}, but there is no zero/{name}/{_MASTER}.pt; is the conversion complete?")
        for state, record in own.items():
            role, state_name = (Role.MASTER, "") if state == _MASTER else (Role.STATE, state)
            if "number" in record:
                self.number(name, state, record["number"])
                continue
            tensor: Stored = record["tensor"]
            found = tensor[2]
            scalar = found == () and record["bare"] and role is Role.STATE
            whole = found == shape or (record["bare"] and found == (numel,) and tensor[3] in ((1,), c_strides(found)))
            if not scalar and not whole:
                self.bad(
                    record,
                    f"{state} of {name!r} has shape {list(found)}, {self.model['path']} says {list(shape)} ({numel} elements); "
                    "was a folder of an earlier conversion used again?",
                )
            self.whole(role, name, tensor, self.file(record), state_name, None if scalar else shape)
        shared = self._shared_numbers(name, g) if self.stage3 else set()
        return set(own) | shared

    def _shared_numbers(self, name: str, g: int) -> set[str]:
        """Stage 3: numbers of the sub-group (``step``), which are not in the parameter's folder."""
        values = {s: v for s, v in self.optimizer["states"].get(g, {}).items() if v[0] in ("scalar", "number")}
        for state, (kind, value) in values.items():
            if state in self.states[name]:
                continue
            if kind == "scalar":
                self.whole(Role.STATE, name, value, self.file(self.optimizer), state)
            else:
                self.number(name, state, value)
        return set(values)

    def _stage3(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Buffers are in the module; frozen parameters in fragments; a second name is the first one's master."""
        model = self.model
        frozen: dict[str, tuple[int, ...]] = dict(model["frozen_shapes"] or ())
        files = np.asarray([self.file(r) for r in self.models], dtype=np.int32)
        pattern = self.build.add_pattern({"text": f"dp={self.dp}: Flat (ZeRO-3, frozen)"})
        for name, shape in frozen.items():
            (piece,), size = pieces_of_subgroup([(name, shape)], self.dp)
            fragments: list[Stored] = []
            for rank in self.models:
                found = (rank["frozen_fragments"] or {}).get(name)
                if found is None or found[2] != (size,) or found[1] != (fragments or [found])[0][1]:
                    self.bad(rank, f"the frozen parameter {name!r} has the fragment {found}, expected {size} elements")
                fragments.append(found)
            self.flat(piece, Role.WEIGHT, name, "", fragments, files, pattern)
        for name, tensor in model["module"].items():
            if name in shapes or name in frozen or name in model["shared"]:
                continue
            if name not in model["buffers"] and tensor[2] == (0,):
                self.bad(model, f"the module has an empty tensor {name!r} that is no parameter, buffer or shared name")
            self.whole(Role.BUFFER, name, tensor, self.file(model))
        for alias, name in model["shared"].items():
            if name in shapes and alias not in shapes:
                record = self.states[name][_MASTER]
                self.whole(Role.WEIGHT, alias, record["tensor"], self.file(record), shape=shapes[name])
        self.not_tensors(model)

    def _objects(self, groups: Sequence[Sequence[tuple[str, Any]]]) -> None:
        names: list[list[str]] = []
        for i, group in enumerate(self.optimizer["groups"]):
            ids = group.get("params")
            if ids is None:
                ids = [i] if len(self.optimizer["groups"]) == len(groups) else []
            if any(g >= len(groups) for g in ids):
                self.bad(self.optimizer, f"param group {i} has the flat buffers {ids}, {self.model['path']} lists {len(groups)}")
            names.append([name for g in ids for name, _ in groups[g]])
        self.hyperparameters(self.optimizer["groups"], names, self.optimizer)
        for record in (self.optimizer, self.model):
            for key, kind, value in record["objects"]:
                self.object(key, kind, value, record)
