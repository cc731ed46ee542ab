"""One rank file -> one record: plain numbers, strings, lists and dicts.

A tensor in a record is ``(byte offset in the file, dtype name, shape, element strides)``; no byte of it is read. The keys of the
files: deepspeed/runtime/engine.py ``_common_checkpoint_state``, zero/stage_1_and_2.py ``state_dict``,
zero/stage3.py ``_rigid_state_dict``, bf16_optimizer.py ``state_dict``.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ...errors import FormatError, UnsupportedError
from ...safe_pickle import EnumStub, StoredTensor, Stub
from ...storage.store import Store
from ..torch_archive import open_archive
from .rank_file import RankFile, stand_in
from .stage0 import optimizer_record

__all__ = ["parse_file", "stand_in"]

_ENGINE_KEYS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
        "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "num_experts",
        "ds_autoep_layers", "universal_checkpoint_info",
    )
)  # fmt: skip
"""Keys of the model states that describe the file; the others are counters, the scheduler and what the user gave as client state."""
_COUNTERS = frozenset(
    ("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "ds_config", "ds_version")
)
_OPTIMIZER_OBJECTS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def parse_file(store: Store, path: str) -> dict[str, Any]:
    """The record of one rank file, ``{"kind": "optim" | "model", ...}``.

    Raises CorruptCheckpointError, UnsafePickleError, UnsupportedError naming the file, StoreError.
    """
    tree = open_archive(store, path, stubs=stand_in, inert_unknown=True)
    if not isinstance(tree.value, dict):
        raise FormatError(f"{path}: holds a {type(tree.value).__name__}, expected the dict that DeepSpeed writes")
    if "optimizer_state_dict" in tree.value:
        return _Optim(tree).record()
    if "module" in tree.value:
        return _Model(tree).record(store)
    raise FormatError(f"{path}: neither model states nor optimizer states of DeepSpeed; keys: {', '.join(map(str, list(tree.value)[:8]))}")


class _Model(RankFile):
    def record(self, store: Store) -> dict[str, Any]:
        root = self.root
        for key, what in (("ds_autoep_layers", "AutoEP experts"), ("universal_checkpoint_info", None)):
            if what and root.get(key):
                raise UnsupportedError(f"{self.path}: {what} ({key}) are not supported yet")
        module = root["module"]
        if module is None:
            raise UnsupportedError(f"{self.path}: no module in it: a pipeline-parallel checkpoint; not supported yet")
        tensors: dict[str, Any] = {}
        others: list[str] = []
        for name, value in self.mapping(module, "module").items():
            if type(name) is not str:
                self.bad(f"module holds a tensor named {name!r:.60}")
            if isinstance(value, StoredTensor):
                tensors[name] = self.tensor(value, name)
            else:
                others.append(name)
        groups = root.get("param_shapes")
        buffers = [str(name) for name in self.items(root.get("buffer_names") or (), "buffer_names")]
        optimizer = None
        if groups is None and root.get("optimizer") is not None:  # ZeRO stage 0
            optimizer = optimizer_record(self, store, tensors, set(buffers))
        shapes = None
        if groups is not None:
            shapes = [self.shapes(group, f"param_shapes[{i}]") for i, group in enumerate(self.items(groups, "param_shapes"))]
        fragments = root.get("frozen_param_fragments")
        shared = {}
        for alias, name in self.mapping(root.get("shared_params") or {}, "shared_params").items():
            if type(alias) is not str or type(name) is not str:
                self.bad(f"shared_params holds {alias!r:.60}: {name!r:.60}")
            shared[alias] = name
        frozen = root.get("frozen_param_shapes")
        objects = [
            (key if key in _COUNTERS else f"client_state.{key}", *self.thing(value, (key,)))
            for key, value in root.items()
            if type(key) is str and key not in _ENGINE_KEYS and value is not None
        ]
        return {
            "kind": "model",
            "path": self.path,
            "size": self.size,
            "module": tensors,
            "not_tensors": others,
            "buffers": buffers,
            "optimizer": optimizer,
            "param_shapes": shapes,
            "shapes_digest": hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest(),
            "frozen_shapes": None if frozen is None else self.shapes(frozen, "frozen_param_shapes"),
            "frozen_fragments": None
            if fragments is None
            else {
                str(k): self.tensor(v, f"frozen_param_fragments[{k!r}]")
                for k, v in self.mapping(fragments, "frozen_param_fragments").items()
            },
            "shared": shared,
            "dp_world_size": self.integer(root.get("dp_world_size", 0), "dp_world_size"),
            "mp_world_size": self.integer(root.get("mp_world_size", 1), "mp_world_size"),
            "experts": bool(_any_positive(root.get("num_experts"))),
            "objects": objects,
            "version": root.get("ds_version") if isinstance(root.get("ds_version"), str) else None,
            "global_steps": root.get("global_steps") if type(root.get("global_steps")) is int else None,
        }


def _any_positive(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(type(x) is int and x > 1 for x in values)


class _Optim(RankFile):
    def record(self) -> dict[str, Any]:
        state = self.mapping(self.root["optimizer_state_dict"], "optimizer_state_dict")
        stage = state.get("zero_stage")
        if isinstance(stage, EnumStub):
            stage = {"weights": 3, "gradients": 2, "optimizer_states": 1, "disabled": 0}.get(stage.member or "", stage.value)
        if stage not in (None, 1, 2, 3):
            raise UnsupportedError(f"{self.path}: zero_stage is {stage!r:.60}; stages 1, 2 and 3 are supported")
        if state.get("ds_zero_partition_groups"):
            raise UnsupportedError(f"{self.path}: AutoEP partition groups are not supported yet")
        config = self.root.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        zero = zero if isinstance(zero, dict) else {}
        self._check_config(zero)
        masters_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        base_key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        if masters_key not in state:
            raise UnsupportedError(
                f"{self.path}: there is no {masters_key} (found {', '.join(map(str, list(state)[:8]))}): not a ZeRO optimizer, "
                "or one that this version does not know"
            )
        base = state.get(base_key)
        if isinstance(base, list):
            raise UnsupportedError(f"{self.path}: an elastic checkpoint (zero_optimization.elastic_checkpoint); save without it")
        base = self.mapping(base, base_key)
        record = {
            "kind": "optim",
            "path": self.path,
            "size": self.size,
            "stage": stage,
            "round_robin": bool(zero.get("round_robin_gradients", False)),
            "masters": [self.tensor(t, f"{masters_key}[{i}]") for i, t in enumerate(self.items(state[masters_key], masters_key))],
            "states": self.states(base),
            "groups": self.groups(base, ("optimizer_state_dict", base_key)),
            "partition_count": self.integers(state["partition_count"], "partition_count")
            if isinstance(state.get("partition_count"), (list, tuple))
            else self.integer(state.get("partition_count"), "partition_count"),
            "paddings": None if state.get("group_paddings") is None else self.integers(state["group_paddings"], "group_paddings"),
            "param_paddings": None
            if state.get("param_alignment_paddings") is None
            else [
                self.integers(p, "param_alignment_paddings")
                for p in self.items(state["param_alignment_paddings"], "param_alignment_paddings")
            ],
            "mappings": self._mappings(state.get("param_slice_mappings")),
            "objects": [
                (f"optim.{key}", *self.scaler(state[key], ("optimizer_state_dict", key)))
                for key in _OPTIMIZER_OBJECTS
                if state.get(key) is not None
            ],
            "version": self.root.get("ds_version") if isinstance(self.root.get("ds_version"), str) else None,
        }
        return record

    def _check_config(self, zero: dict[Any, Any]) -> None:
        for key, limit, what in (
            ("mics_shard_size", 0, "MiCS (partitions inside a sub-group)"),
            ("zero_hpz_partition_size", 1, "ZeRO++ hpZ (secondary partitions)"),
        ):
            if type(zero.get(key)) is int and zero[key] > limit:
                raise UnsupportedError(f"{self.path}: {what}, {key}={zero[key]}, is not supported yet")
        offload = zero.get("offload_optimizer")
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            raise UnsupportedError(f"{self.path}: the optimizer state was offloaded to NVMe and is not in this file; not supported")

    def _mappings(self, value: Any) -> list[list[tuple[str, int, int]]] | None:
        if value is None:
            return None
        mappings: list[list[tuple[str, int, int]]] = []
        for i, group in enumerate(self.items(value, "param_slice_mappings")):
            rows = []
            for name, address in self.mapping(group, f"param_slice_mappings[{i}]").items():
                if isinstance(address, Stub):
                    start, numel = address.get("start"), address.get("numel")
                    if start is None and len(address.args) == 2:  # as a named tuple: (numel, start)
                        numel, start = address.args
                else:
                    start = numel = None
                rows.append((str(name), self.integer(start, f"the start of {name!r}"), self.integer(numel, f"the size of {name!r}")))
            mappings.append(rows)
        return mappings
