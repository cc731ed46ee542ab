"""Roles and canonical names of what a checkpoint holds (design decision D6).

A thing in a checkpoint has a key (as written), a role, an fqn (global parameter name: no pipeline-local layer number, no wrapper prefix)
and, for optimizer state, the name of the state. Canonical names are a view of (role, fqn, state); nothing splits a dotted name to guess
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

__all__ = ["Role", "canonical_name", "unwrap", "unwrap_all"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that torch.compile, activation checkpointing and FSDP1 put into names; no module of a user is called so."""


class Role(IntEnum):
    """What a stored tensor or object is; the numbers are those of ``docs/format.md``."""

    WEIGHT = 0
    MASTER = 1
    STATE = 2
    BUFFER = 3
    OBJECT = 4
    PLAIN = 5
    """Saved without a declaration of what it is: only its key counts."""


def canonical_name(role: Role, fqn: str, state: str, key: str) -> str:
    """``model.<fqn>``, ``optim.state.<fqn>.master``, ``optim.state.<fqn>.<state>``; for objects ``fqn``; for plain tensors ``key``."""
    if role in (Role.WEIGHT, Role.BUFFER):
        return f"model.{fqn}"
    if role == Role.MASTER:
        return f"optim.state.{fqn}.master"
    if role == Role.STATE:
        return f"optim.state.{fqn}.{state}"
    if role == Role.OBJECT:
        return fqn or key
    return key


def unwrap(name: str) -> str:
    """A dotted name without the segments of wrappers that say so unmistakably."""
    if "_mod" not in name:  # all of them have it; most names have not
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap_all(names: Iterable[str]) -> dict[str, str]:
    """Names of one model as found -> without wrappers.

    ``module.``, which DistributedDataParallel puts in front, is an ordinary word: it is a wrapper only when all names begin with it.
    """
    clean = {name: unwrap(name) for name in names}
    while clean and all(name.startswith("module.") for name in clean.values()):
        clean = {name: found.removeprefix("module.") for name, found in clean.items()}
    return clean
