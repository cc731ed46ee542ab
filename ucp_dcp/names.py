"""Roles and canonical names of what a checkpoint holds (design decision D6).

A thing in a checkpoint has a key (as written), a role, an fqn (global parameter name: no pipeline-local layer number, no wrapper prefix)
and, for optimizer state, the name of the state. Canonical names are a view of (role, fqn, state); nothing splits a dotted name to guess
them.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Role", "canonical_name"]


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
