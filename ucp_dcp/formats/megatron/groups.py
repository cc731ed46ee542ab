"""Which parameters are in which param group: Megatron numbers them per rank, and the distributed optimizer does not even do that.

core/optimizer/__init__.py ``_get_param_groups``: what is 1-d or a bias has no weight decay, experts with a data-parallel group of their
own have their own groups, embedding and output layer may have another learning rate; parameters in the order of the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .local import Param

__all__ = ["GlobalGroups", "is_expert_optimizer", "members"]

_KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")


def _value(group: Mapping[str, Any], key: str) -> Any:
    found = group.get(key)
    return found[1] if found is not None and found[0] == "inline" else None


def is_expert_optimizer(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer of a rank is that of its experts."""
    return any(bool(_value(group, "is_expert_parallel")) for group in optimizer["groups"])


def members(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], params: Sequence[Param]) -> list[Param]:
    """Parameters of one group of an optimizer that has ``params`` (those of its buffers or model), in the order of the module."""
    if len(groups) == 1:
        return list(params)
    return [p for p in params if _fits(group, groups, p)]


def _fits(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], param: Param) -> bool:
    if bool(_value(group, "is_expert_parallel")) != param.expert:
        return False
    mult = _value(group, "wd_mult")
    if mult is not None and (mult != 0) != param.decays and any(_value(g, "wd_mult") != mult for g in groups):
        return False
    if any(bool(_value(g, "is_decoupled_lr")) for g in groups):
        return bool(_value(group, "is_decoupled_lr")) == param.is_end
    return True


@dataclass
class GlobalGroups:
    """Param groups of all ranks: ranks list the same kinds, each with its own parameters."""

    found: dict[tuple[str, ...], tuple[Mapping[str, Any], Mapping[str, Any], dict[str, None]]] = field(default_factory=dict)

    def add(self, group: Mapping[str, Any], record: Mapping[str, Any], names: Sequence[str]) -> None:
        """A rank's group and the global names of its parameters."""
        key = tuple(repr(_value(group, kind)) for kind in _KINDS)
        self.found.setdefault(key, (group, record, {}))[2].update(dict.fromkeys(names))

    def step(self, group: Mapping[str, Any]) -> Any:
        """The step of a group, where the optimizer counts it by group."""
        return _value(group, "step")
