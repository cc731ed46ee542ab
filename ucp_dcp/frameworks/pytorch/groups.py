"""Parameter groups of live optimizers, by parameter name; with them what learning rate schedulers keep for each group."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import PlanError

__all__ = ["LiveGroup", "global_groups", "live_groups", "put_group", "scheduler_join", "scheduler_split"]

_PER_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "default_min_lr"})
"""Lists of torch's schedulers with one entry for each parameter group."""


@dataclass
class LiveGroup:
    """A parameter group: the optimizer's own dict, and the names of its parameters."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    names: list[str]

    def values(self) -> dict[str, Any]:
        """The hyperparameters as plain values, ``params`` as names."""
        out: dict[str, Any] = {"params": list(self.names)}
        for key, value in self.group.items():
            if key in ("params", "param_names"):
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            out[key] = list(value) if isinstance(value, list) else value
        return out


def live_groups(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> list[LiveGroup]:
    """All groups of all optimizers. Raises PlanError for a parameter that is in no module."""
    out = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            own = []
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                if name is None:
                    raise PlanError(
                        f"parameter {position} of group {number} (shape {tuple(parameter.shape)}) of {type(optimizer).__name__} is in none "
                        "of the modules; make the optimizer after the module is wrapped, and give all modules"
                    )
                own.append(name)
            out.append(LiveGroup(optimizer, group, own))
    return out


def put_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Hyperparameters into a live group: tensors are filled, tuples stay tuples."""
    for key, value in values.items():
        if key == "params":
            continue
        live = group.get(key)
        if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
            with torch.no_grad():
                live.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(live, tuple) and isinstance(value, list) else value


def global_groups(groups: list[dict[str, Any]], process_group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """The groups of all ranks as one list, the same on all of them. Collective when there is a process group.

    Pipeline stages have different parameters: groups with the same number and the same values become one, with the names of both; others
    stay apart.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
        return groups
    digest = hashlib.sha256(repr(groups).encode()).digest()
    digests: list[bytes] = [b""] * dist.get_world_size(process_group)
    dist.all_gather_object(digests, digest, group=process_group)
    if len(set(digests)) == 1:
        return groups
    rank = dist.get_rank(process_group)
    speaks = digests.index(digest) == rank  # one rank of those with equal groups
    every: list[list[dict[str, Any]] | None] = [None] * len(digests)
    dist.all_gather_object(every, groups if speaks else None, group=process_group)
    merged: list[tuple[int, dict[str, Any]]] = []
    for own in every:
        for number, group in enumerate(own or ()):
            values = {k: v for k, v in group.items() if k != "params"}
            for at, other in merged:
                if at == number and {k: v for k, v in other.items() if k != "params"} == values:
                    present = set(other["params"])
                    other["params"].extend(p for p in group["params"] if p not in present)
                    break
            else:
                merged.append((number, {"params": list(group["params"]), **values}))
    return [group for _, group in sorted(merged, key=lambda pair: pair[0])]


def scheduler_split(state: Mapping[str, Any], groups: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A scheduler's state as (what is the same for all groups, what each group has of it)."""
    shared: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in range(groups)]
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list) and len(value) == groups:
            for mine, item in zip(own, value, strict=True):
                mine[key] = item
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):  # SequentialLR, ChainedScheduler
            shared[key] = []
            for number, item in enumerate(value):
                inner, theirs = scheduler_split(item, groups)
                shared[key].append(inner)
                for mine, part in zip(own, theirs, strict=True):
                    mine.update({f"{key}.{number}.{name}": v for name, v in part.items()})
        else:
            shared[key] = dict(value) if isinstance(value, Counter) else value
    return shared, own


def scheduler_join(
    live: Mapping[str, Any], shared: Mapping[str, Any], own: Sequence[Mapping[str, Any]], prefix: str = ""
) -> dict[str, Any]:
    """The state for ``load_state_dict``: the inverse of :func:`scheduler_split`, in the form that the live scheduler has.

    Raises PlanError when a group lacks an entry.
    """
    out: dict[str, Any] = {}
    for key, present in live.items():
        name = prefix + key
        if key in _PER_GROUP and isinstance(present, list) and len(present) == len(own):
            lacking = [i for i, mine in enumerate(own) if name not in mine]
            if lacking:
                raise PlanError(f"learning rate scheduler: the checkpoint has no {name!r} for parameter group {lacking[0]}")
            out[key] = [mine[name] for mine in own]
        elif isinstance(present, list) and present and all(isinstance(item, dict) for item in present):
            stored = shared.get(key)
            if not isinstance(stored, list) or len(stored) != len(present):
                raise PlanError(f"learning rate scheduler: {name!r} has {len(present)} parts here, the checkpoint has {stored!r:.80}")
            pairs = enumerate(zip(present, stored, strict=True))
            out[key] = [scheduler_join(inner, theirs, own, f"{name}.{i}.") for i, (inner, theirs) in pairs]
        elif key in shared:
            out[key] = Counter(shared[key]) if isinstance(present, Counter) else shared[key]
    for key in shared.keys() - live.keys():
        out[key] = shared[key]
    return out
