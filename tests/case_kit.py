"""Public bug reports as tests: cases that run one after another inside one call on four gloo ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshes import Groups, fresh_meshes

import ucp_dcp
from ucp_dcp.errors import UCPError

WORLD = 4
Case = Callable[[Groups, str], Iterator[str]]
Results = list[dict[str, list[str]]]


def numbered(*shape: int, start: float = 1) -> torch.Tensor:
    """Every element different, none zero."""
    return (torch.arange(math.prod(shape), dtype=torch.float32) + start).reshape(shape)


def save(groups: Groups, n: int, state: Callable[[], dict[str, Any]], url: str, **kwargs: Any) -> None:
    """The first ``n`` ranks save; all ranks wait for it."""
    if groups.rank < n:
        ucp_dcp.save(state(), url, process_group=groups.first(n), **kwargs)
    dist.barrier()


def refused(kind: type[UCPError], texts: str | Sequence[str], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[str]:
    """The call must raise exactly this error, with the texts in its message."""
    try:
        call(*args, **kwargs)
    except kind as error:
        for text in [texts] if isinstance(texts, str) else texts:
            if text not in str(error):
                yield f"the message lacks {text!r}: {error}"
    else:
        yield f"no {kind.__name__}"


def expect(found: Any, wanted: Any, what: str = "") -> Iterator[str]:
    """``found`` must be ``wanted``: bit for bit and of one dtype for tensors."""
    if isinstance(wanted, torch.Tensor):
        ok = isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    else:
        ok = type(found) is type(wanted) and found == wanted
    if not ok:
        yield f"{what}: found {found!r}, expected {wanted!r}"


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The messages that a logger warns with meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def run(cases: Mapping[str, Case], root: str) -> dict[str, list[str]]:
    """On a rank: what is wrong with each case."""
    out: dict[str, list[str]] = {}
    with fresh_meshes():
        groups = Groups()
        for name, fn in cases.items():
            # A case that fails on one rank only leaves the others in a collective: the run ends with the names of what ran.
            try:
                out[name] = list(fn(groups, f"{root}/{name}"))
            except Exception as error:
                out[name] = [f"{type(error).__name__}: {error}", traceback.format_exc()]
            dist.barrier()
    return out


def check(results: Results, name: str) -> None:
    """No rank found anything wrong."""
    for rank, found in enumerate(results):
        assert found[name] == [], f"{name} on rank {rank}: " + "\n".join(found[name])
