"""The verbs: ``save`` and ``load`` of a state dict with this package's planners and storage, raising this package's errors on all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .errors import UCPError
from .formats import MappedNames
from .layout import Layout
from .planners.consistency import AllowInconsistent
from .planners.load_planner import UCPLoadPlanner
from .planners.replicas import CheckReplicas
from .planners.report import LoadReport
from .planners.resolve import SourceChoice
from .planners.save_planner import UCPSavePlanner
from .storage.dcp_reader import UCPStorageReader
from .storage.dcp_writer import GRACE, UCPStorageWriter
from .storage.store import Store
from .transfer import Verify

__all__ = ["load", "save"]

_log = logging.getLogger(__name__)


def _raise_cause(error: CheckpointException) -> None:
    """Raise our own error out of DCP's wrapper, the same on all ranks: that of the lowest failed rank that has one of ours (D17).

    Another exception becomes a UCPError, for DCP's wrapper is no ``Exception``. What is none itself (an interrupt) stays in the wrapper.
    """
    causes = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    others = "" if len(causes) == 1 else f" (and {len(causes) - 1} more ranks failed)"
    for rank, cause in causes.items():
        if isinstance(cause, UCPError):
            raise type(cause)(f"rank {rank}: {cause}{others}") from error
    if all(isinstance(cause, Exception) for cause in causes.values()):
        rank, cause = next(iter(causes.items()))
        raise UCPError(f"rank {rank}: {type(cause).__name__}: {cause}{others}") from error
    raise error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that there is no process group. In the main thread only: filters are global."""
    if _initialised() or threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)
        yield


def _group(process_group: dist.ProcessGroup | None, no_dist: bool) -> dist.ProcessGroup | None:
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    return process_group if process_group is not None else dist.group.WORLD


def save(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str] | Store,
    *,
    layout: Layout | None = None,
    roots: Mapping[str, str] | None = None,
    overwrite: bool = True,
    stock_metadata: bool = True,
    check_replicas: CheckReplicas = "sample",
    provenance: Mapping[str, Any] | None = None,
    grace: float = GRACE,
    digests: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Save a state dict as a universal checkpoint. Collective over ``process_group`` (default: all ranks; one process without a group).

    Arguments are those of :class:`UCPSavePlanner` and :class:`UCPStorageWriter`. Raises their errors, the same on all ranks; after an
    error the checkpoint that lay there before is still complete.
    """
    planner = UCPSavePlanner(layout=layout, roots=roots, check_replicas=check_replicas, process_group=_group(process_group, no_dist))
    planner._no_dist = no_dist
    writer = UCPStorageWriter(
        url,
        overwrite=overwrite,
        stock_metadata=stock_metadata,
        provenance=provenance,
        grace=grace,
        digests=digests,
        storage_options=storage_options,
    )
    try:
        with _quiet():
            dcp_save(state_dict, storage_writer=writer, planner=planner, process_group=process_group, no_dist=no_dist or not _initialised())
    except CheckpointException as error:
        # every rank has reported by now, so nobody writes into the failed generation any more
        try:
            writer.abandon()
        except UCPError as rest:
            _log.warning("%s: the files of a failed save were not deleted: %s", writer.checkpoint_id, rest)
        _raise_cause(error)


def load(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str] | Store,
    *,
    layout: Layout | None = None,
    roots: Mapping[str, str] | None = None,
    strict: bool | Literal["exact"] = True,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
    dtype: Literal["cast", "error"] = "cast",
    source: SourceChoice = "auto",
    master_from_weight: bool = False,
    allow_classes: Sequence[type] = (),
    allow_inconsistent: AllowInconsistent = False,
    verify: Verify = "covered",
    prefer: Literal["ucp", "stock"] | None = None,
    names: MappedNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load into a state dict, in place, from any checkpoint this package can open. Collective over ``process_group``.

    Arguments are those of :class:`UCPLoadPlanner` and :class:`UCPStorageReader`. Returns this rank's report. Raises their errors, the
    same on all ranks, before any destination is touched.
    """
    planner = UCPLoadPlanner(
        layout=layout,
        roots=roots,
        strict=strict,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        source=source,
        master_from_weight=master_from_weight,
        allow_classes=allow_classes,
        allow_inconsistent=allow_inconsistent,
    )
    return load_with(planner, state_dict, url, prefer, storage_options, process_group, no_dist, verify, names)


def load_with(
    planner: UCPLoadPlanner,
    state_dict: dict[str, Any],
    url: str | os.PathLike[str] | Store,
    prefer: Literal["ucp", "stock"] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    verify: Verify = "covered",
    names: MappedNames | None = None,
) -> LoadReport:
    """:func:`load` with a planner that is there already."""
    group = _group(process_group, no_dist)
    reader = UCPStorageReader(url, process_group=group, prefer=prefer, verify=verify, names=names, storage_options=storage_options)
    try:
        with _quiet():
            dcp_load(state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist or not _initialised())
    except CheckpointException as error:
        _raise_cause(error)
    return planner.report


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
