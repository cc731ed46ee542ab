"""One rank's file -> one record: plain numbers, strings, lists and dicts. No tensor byte is read, nothing is run.

Keys of the files: megatron/training/checkpointing.py ``generate_state_dict``; core/optimizer/distrib_optimizer.py
``get_parameter_state_dp_zero``, optimizer.py ``Float16OptimizerWithFloat16Params.state_dict``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import CorruptCheckpointError, FormatError, UnsafePickleError, UnsupportedError
from ...safe_pickle import StoredTensor, Stub
from ...storage.store import Store
from ..deepspeed.rank_file import RankFile
from ..megatron_core.objects import plain, stand_in
from ..torch_archive import open_archive
from .folder import OPTIMIZER
from .older import modern_names

__all__ = ["parse_file"]

_CHUNK = re.compile(r"model(\d*)")
_INLINE = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler")
"""The same on all ranks."""
_PER_RANK = ("rng_state", "rerun_state_machine")


def parse_file(store: Store, path: str) -> dict[str, Any]:
    """The record of one file, ``{"kind": "model" | "optimizer", ...}``.

    Raises CorruptCheckpointError, UnsafePickleError, UnsupportedError naming the file, StoreError.
    """
    try:
        tree = open_archive(store, path, stubs=stand_in, inert_unknown=True)
    except UnsafePickleError:
        raise
    except (CorruptCheckpointError, FormatError) as error:
        raise CorruptCheckpointError(
            f"{error}. If expert tensor parallelism differed from tensor parallelism, several ranks wrote this file at the same time and "
            "their data is lost (Megatron-LM issue 1719); such a run has to save with --ckpt-format torch_dist"
        ) from None
    if path.endswith("/" + OPTIMIZER) or path == OPTIMIZER:
        return _Optimizer(tree).record()
    if not isinstance(tree.value, dict) or ("model" not in tree.value and "model0" not in tree.value):
        keys = ", ".join(map(str, list(tree.value)[:8])) if isinstance(tree.value, dict) else type(tree.value).__name__
        raise FormatError(f"{path}: no model in it, so it is no rank file of Megatron; found {keys}")
    return _Model(tree).record()


class _Model(RankFile):
    def record(self) -> dict[str, Any]:
        root = self.root
        args = root.get("args")
        values = args.state if isinstance(args, Stub) else args
        if not isinstance(values, dict):
            self.bad(f"args is {type(args).__name__}, expected the Namespace of the run's arguments: without it the layout is not known")
        chunks, others = self._chunks()
        objects = [(key, *self.thing(root[key], (key,))) for key in _INLINE if root.get(key) is not None]
        known = {"args", "optimizer", *_INLINE, *_PER_RANK}
        objects += [
            (str(key), *self.thing(value, (key,)))
            for key, value in root.items()
            if key not in known and value is not None and not _CHUNK.fullmatch(str(key))
        ]
        return {
            "kind": "model",
            "path": self.path,
            "size": self.size,
            "args": {key: plain(value) for key, value in values.items() if isinstance(key, str)},
            "iteration": root.get("iteration") if type(root.get("iteration")) is int else None,
            "version": root.get("checkpoint_version"),
            "chunks": chunks,
            "others": others,
            "optimizers": self._optimizers(root.get("optimizer")),
            "objects": objects,
            "per_rank": [(key, *self.thing(root[key], (key,))) for key in _PER_RANK if root.get(key) is not None],
        }

    def _chunks(self) -> tuple[list[list[tuple[str, Any]]], list[tuple[str, tuple[str | int, ...]]]]:
        """Tensors of each model chunk in the order of the module, and where its non-tensors are."""
        numbers = sorted(int(m[1] or -1) for key in self.root if isinstance(key, str) and (m := _CHUNK.fullmatch(key)))
        if numbers not in ([-1], list(range(len(numbers)))):
            self.bad(f"the model chunks are {', '.join(sorted(k for k in self.root if isinstance(k, str) and _CHUNK.fullmatch(k)))}")
        chunks: list[list[tuple[str, Any]]] = []
        others: list[tuple[str, tuple[str | int, ...]]] = []
        for c, number in enumerate(numbers):
            key = "model" if number < 0 else f"model{number}"
            leaves: list[tuple[str, tuple[str | int, ...], Any]] = []
            self._walk(self.mapping(self.root[key], key), "", (key,), leaves)
            names = modern_names([name for name, _, _ in leaves])
            tensors = []
            for name, (_, where, value) in zip(names, leaves, strict=True):
                if isinstance(value, StoredTensor) and not name.endswith("_extra_state"):
                    tensors.append((name, self.tensor(value, name)))
                elif value is not None:
                    others.append((f"{c}/{name}", where))
            twice = {name for name, _ in tensors if [n for n, _ in tensors].count(name) > 1} if len(dict(tensors)) != len(tensors) else ()
            if twice:
                self.bad(f"{key} holds the parameter {sorted(twice)[0]!r} twice")
            chunks.append(tensors)
        return chunks, others

    def _walk(self, value: Mapping[Any, Any], prefix: str, where: tuple[str | int, ...], out: list[Any], depth: int = 0) -> None:
        """Leaves of the state dict; before megatron-core it was nested by module."""
        if depth > 8:
            self.bad(f"{'.'.join(map(str, where))} is nested too deeply")
        for key, item in value.items():
            if type(key) is not str:
                self.bad(f"{'.'.join(map(str, where))} holds a parameter named {key!r:.60}")
            name = f"{prefix}{key}"
            if isinstance(item, dict):
                self._walk(item, name + ".", (*where, key), out, depth + 1)
            else:
                out.append((name, (*where, key), item))

    def _optimizers(self, value: Any) -> list[dict[str, Any]] | None:
        """One entry for each optimizer: experts have their own where they have a data-parallel group of their own."""
        if value is None:
            return None
        listed = isinstance(value, (list, tuple))
        found = []
        for i, own in enumerate(value if listed else [value]):
            path: tuple[str | int, ...] = ("optimizer", i) if listed else ("optimizer",)
            outer = self.mapping(own, "optimizer")
            inner = self.mapping(outer["optimizer"], "optimizer.optimizer") if "optimizer" in outer else outer
            if "optimizer" in outer:
                path = (*path, "optimizer")
            masters = outer.get("fp32_from_fp16_params")
            if masters is None:
                masters = outer.get("fp32_from_float16_params")
            states = self.states(inner) if inner.get("state") else {}
            found.append(
                {
                    "groups": self.groups(inner, path),
                    "states": states,
                    "masters": None
                    if masters is None
                    else [
                        [self.tensor(t, "fp32_from_fp16_params") for t in self.items(group, "fp32_from_fp16_params")]
                        for group in self.items(masters, "fp32_from_fp16_params")
                    ],
                    "scaler": list(self.thing(outer["grad_scaler"], (*path[:-1], "grad_scaler"))) if outer.get("grad_scaler") else None,
                }
            )
        return found


class _Optimizer(RankFile):
    """``distrib_optim.pt``: the buffers of the distributed optimizer, gathered over data parallelism and without padding at bucket ends."""

    def record(self) -> dict[str, Any]:
        value = self.root
        listed = isinstance(value, (list, tuple))
        optimizers = [None if own is None else self._buffers(own) for own in (value if listed else [value])]
        return {"kind": "optimizer", "path": self.path, "size": self.size, "optimizers": optimizers}

    def _buffers(self, value: Any) -> list[dict[str, Any]]:
        own = self.mapping(value, "the optimizer state")
        if not own.get("buckets_coalesced"):
            raise UnsupportedError(
                f"{self.path}: buckets_coalesced is not set: a distributed optimizer's state in a format from before February 2024, whose "
                "parameters lie in another order; megatron-core rewrites it with --ckpt-convert-update-legacy-dist-opt-format"
            )
        numbers = [key for key in own if key != "buckets_coalesced"]
        if numbers != list(range(len(numbers))) or any(type(n) is not int for n in numbers):
            self.bad(f"the buffers are numbered {numbers!r:.80}, expected 0 to {len(numbers) - 1}")
        buffers = []
        for number in numbers:
            by_dtype = self.mapping(own[number], f"buffer {number}")
            if len(by_dtype) != 1:
                self.bad(f"buffer {number} has {len(by_dtype)} dtypes, expected one")
            ((dtypes, tensors),) = by_dtype.items()
            named = self.mapping(tensors, f"buffer {number}")
            numel = self.integer(named.get("numel_unpadded"), f"numel_unpadded of buffer {number}")
            stored = {str(k): self.tensor(v, f"{k} of buffer {number}") for k, v in named.items() if k != "numel_unpadded"}
            for name, tensor in stored.items():
                if tensor[2] != (numel,) or (tensor[3] != (1,) and numel > 1):
                    self.bad(f"{name} of buffer {number} has shape {list(tensor[2])}, expected [{numel}] as numel_unpadded says")
            first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
            buffers.append({"dtype": plain(first), "numel": numel, "tensors": stored})
        return buffers
