"""What a checkpoint holds besides tensors: hyperparameters by parameter, steps, scheduler, counters; the rest stays object shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...catalog import ObjectRow
from ...dtypes import itemsize, torch_dtype
from ...names import Role, canonical_name
from ...safe_pickle import StoredTensor
from .objects import COMMON_STATE, Common, inline, read_shards, shard_key
from .order import expert_of
from .views import Views

__all__ = ["add_run_state"]

_BUFFER_GROUPS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer")
_INTERNAL = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.")
_KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Fields that make two groups different: ranks may list different ones, in different order."""


def add_run_state(views: Views, common: Common) -> None:
    """Objects of the checkpoint."""
    catalog = views.base.catalog
    shards: list[ObjectRow] = []
    for row in catalog.objects:
        name = shard_key(row.key)
        if _BUFFER_GROUPS.fullmatch(name):
            shards.append(row)
        if row.key != COMMON_STATE and not _INTERNAL.match(name):
            views.objects.append(row)
    for key in (
        "args",
        "iteration",
        "checkpoint_version",
        "opt_param_scheduler",
        "num_floating_point_operations_so_far",
        "content_metadata",
    ):
        value = common.args if key == "args" else inline(common.state.get(key))
        if value is not None and value != {}:
            views.value(key, value)
    groups = _groups([*_dicts(common.state.get("optimizer")), *(d for value in read_shards(views.base, shards) for d in _dicts(value))])
    _add_groups(views, groups, _common_step(views, common))


def _common_step(views: Views, common: Common) -> float | None:
    """The step of the plain optimizer, which keeps one for all parameters as a 0-d tensor."""
    for state in _states(common.state.get("optimizer")):
        step = state.get("common_step")
        if isinstance(step, StoredTensor) and step.shape == ():
            raw = views.base.store.read(common.file, step.offset, itemsize(step.dtype))
            return float(torch.frombuffer(bytearray(raw), dtype=torch_dtype(step.dtype)).item())
        if isinstance(step, (int, float)):
            return float(step)
    return None


def _states(value: Any) -> list[Mapping[str, Any]]:
    return [d["state"] for d in _dicts(value) if isinstance(d.get("state"), dict)]


def _dicts(value: Any, depth: int = 0) -> list[Mapping[str, Any]]:
    """The dicts with ``param_groups`` in an optimizer's common state: alone, below ``optimizer``, or one per chained optimizer."""
    if depth > 3:
        return []
    if isinstance(value, list):
        return [found for item in value for found in _dicts(item, depth + 1)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("param_groups"), list):
        return [value]
    return [found for item in value.values() for found in _dicts(item, depth + 1)]


def _groups(dicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups without their parameters (Megatron numbers those per rank), each kind once."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for group in (g for d in dicts for g in d["param_groups"] if isinstance(g, dict)):
        fields = {k: inline(v) for k, v in group.items() if isinstance(k, str) and k != "params"}
        found.setdefault(tuple(repr(fields.get(kind)) for kind in _KINDS), fields)
    return list(found.values())


def _add_groups(views: Views, groups: Sequence[Mapping[str, Any]], common_step: float | None) -> None:
    """``optim.param_groups.<i>.<field>`` with names as ``params``, and ``step`` of each parameter, where a parameter can be in one only.

    Megatron puts what is 1-d or a bias into the groups without weight decay (``core/optimizer/__init__.py``), experts into their own.
    """
    members: list[list[str]] = [[] for _ in groups]
    certain = bool(groups)
    stepped = {fqn for role, fqn, _ in views.tensors if role in (Role.MASTER, Role.STATE)}
    for fqn in sorted(stepped):
        shape = next(t.shape for (_, name, _), t in views.tensors.items() if name == fqn)
        decays = len(shape) > 1 and not fqn.endswith(".bias")
        fits = [i for i, group in enumerate(groups) if len(groups) == 1 or _fits(group, decays, expert_of(fqn) is not None)]
        if len(fits) > 1:
            fits = [i for i in fits if bool(groups[i].get("is_expert_parallel")) == (expert_of(fqn) is not None)] or fits
        if len(fits) == 1:
            members[fits[0]].append(fqn)
        else:
            certain = False
    for i, group in enumerate(groups):
        for key, value in group.items():
            views.value(f"optim.param_groups.{i}.{key}", value)
        if certain:
            views.value(f"optim.param_groups.{i}.params", members[i])
        step = group.get("step", common_step)
        if isinstance(step, (int, float)) and certain:
            for fqn in members[i]:
                if not views.has(Role.STATE, fqn, "step"):
                    views.value(canonical_name(Role.STATE, fqn, "step", ""), step)


def _fits(group: Mapping[str, Any], decays: bool, expert: bool) -> bool:
    if group.get("is_expert_parallel") and not expert:
        return False
    mult = group.get("wd_mult")
    return mult is None or decays == (mult != 0)
