"""The checkpoints of one run, each in a folder of its own below one root: which of them is the newest that is complete."""

from __future__ import annotations

import datetime
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import CheckpointNotFoundError, UCPError
from .formats import open_source
from .storage.manifest import MANIFEST
from .storage.store import open_store

__all__ = ["latest"]

_log = logging.getLogger(__name__)
_METADATA = ".metadata"


def latest(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> str:
    """The URL of the newest complete checkpoint in a folder directly below ``url``.

    There is no pointer that could be ahead of the data: a checkpoint is in the list once it is committed. "Newest" is the time of the
    commit (for stock checkpoints: of their ``.metadata``), then the number in the folder's name. Folders whose checkpoint cannot be opened,
    or lacks a file of it, are skipped with a warning. Lists the files below ``url`` once.

    Raises CheckpointNotFoundError when there is none, StoreError.
    """
    options = dict(storage_options or {})
    store = open_store(url, **options)
    sizes: dict[str, dict[str, int]] = {}
    times: dict[str, float] = {}
    for entry in store.list(""):
        folder, _, rest = entry.path.partition("/")
        sizes.setdefault(folder, {})[rest] = entry.size
        if rest in (MANIFEST, _METADATA):
            times[folder] = max(times.get(folder, entry.mtime), entry.mtime)
    root = os.fspath(url).rstrip("/")
    found: list[tuple[float, list[tuple[int, str]], str]] = []
    for folder in times:
        child = f"{root}/{folder}"
        try:
            source = open_source(open_store(child, **options))
        except UCPError as error:
            _log.warning("%s is skipped: %s", child, error)
            continue
        files = {row.path: row.size for row in source.catalog.files}
        lacking = [path for path, size in files.items() if sizes[folder].get(path, -1) != size]
        if lacking:
            _log.warning("%s is skipped: %s is missing or has another size than the checkpoint states", child, lacking[0])
            continue
        created = source.provenance.get("created")
        when = datetime.datetime.fromisoformat(created).timestamp() if isinstance(created, str) else times[folder]
        found.append((when, _natural(folder), child))
    if not found:
        raise CheckpointNotFoundError(f"{root}: there is no complete checkpoint in a folder below it")
    return max(found)[2]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
