"""Errors that can travel between ranks, and the agreement of ranks about them before a collective.

DCP gathers what a rank raises as a pickle. An exception that does not survive that (many of other libraries do not: their constructors
take several arguments) ends on one rank as a pickling error, while the others wait in a collective for it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from ..errors import UCPError

__all__ = ["agree", "guarded", "on_rank", "portable"]

P = ParamSpec("P")
R = TypeVar("R")


def portable(error: Exception) -> Exception:
    """The error itself when it comes back whole from a pickle, else a UCPError with its type and text."""
    if type(error).__module__ == UCPError.__module__:
        return error
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass  # any failure means the same: this exception cannot travel
    return UCPError(f"{type(error).__name__}: {error}")


def guarded(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator for what DCP calls on a rank: it raises only what can be sent to the other ranks."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            sent = portable(error)
            if sent is error:
                raise
            raise sent from error

    return call


def on_rank(error: Exception, rank: int) -> UCPError:
    """The error of another rank, as this rank raises it."""
    if isinstance(error, UCPError):
        return type(error)(f"{error} (on rank {rank})")
    return UCPError(f"{type(error).__name__}: {error} (on rank {rank})")


def agree(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank when any rank has an error: its own, else that of the lowest rank that has one. Collective over ``group``."""
    everyone: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, None if error is None else portable(error), group=group)
    if error is not None:
        raise error
    for rank, cause in enumerate(everyone):
        if cause is not None:
            raise on_rank(cause, rank)
