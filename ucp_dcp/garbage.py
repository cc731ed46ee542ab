"""``gc``: what killed jobs left behind, found and deleted by the rules of the commit protocol (``docs/format.md``, "Commit order").

A save that ends in peace leaves nothing, and every commit collects what is a day old. What stays is that of jobs that were killed where no
later save follows: generations that no manifest names, generations that were replaced, temporary files, and on object stores the parts of
uploads that were never completed, which no listing shows and which are billed like objects.

Order of looking: files and uploads first, then the manifest, and the manifest and the generation's files once more right before a
generation is deleted. So whatever is committed or goes on meanwhile is seen.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from .errors import CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from .storage.commit import METADATA, ORPHAN_AGE, is_generation, is_temporary, read_manifest, repair, root_state
from .storage.manifest import MANIFEST, Manifest, seconds_of
from .storage.store import Entry, Range, Store, Writer, open_store

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

    from .storage.object_store.client import Upload

__all__ = ["GRACE", "Found", "GcReport", "gc"]

GRACE = 300.0
"""Seconds that a replaced generation is kept for its readers, whatever ``older_than`` says: the default of the writer."""

Kind: TypeAlias = Literal["unfinished", "replaced", "temporary", "upload", "metadata"]

_OURS = re.compile(r"((?:[^/]+/)*?)g-[0-9a-f]{32}/.+")  # files of a generation, also in folders of it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that may be in the way.

    Attributes:
        kind: ``unfinished``: a generation that no manifest names; ``replaced``: one that a later commit replaced; ``temporary``: what a put
            leaves when it is cut short; ``upload``: a multipart upload that was not completed; ``metadata``: a root ``.metadata`` that is
            not the committed generation's, which is repaired, not deleted.
        path: of the folder or file, relative to the URL; of an upload, the object it would have become.
        files, bytes: how many files, and their size; of an upload that is not known, both are 0.
        age: seconds since it last changed (``replaced``: since it was replaced; ``upload``: since it began).
        kept: why it is left alone; empty when it goes.
    """

    kind: Kind
    path: str
    files: int
    bytes: int
    age: float
    kept: str = ""


@dataclass
class GcReport:
    """What :func:`gc` found below ``url``; ``deleted`` says whether it was also done."""

    url: str
    deleted: bool
    found: list[Found] = field(default_factory=list)

    @property
    def goes(self) -> list[Found]:
        """What was deleted or repaired, or would be."""
        return [item for item in self.found if not item.kept]

    @property
    def bytes(self) -> int:
        """Of the files that go."""
        return sum(item.bytes for item in self.goes)

    def to_json(self) -> str:
        """For programs."""
        return json.dumps(asdict(self), indent=1)


@runtime_checkable
class _Uploads(Protocol):
    """A store that knows about unfinished uploads."""

    def uploads(self) -> Iterator[Upload]:
        """Those below its root."""
        ...

    def abort_upload(self, upload: Upload) -> None:
        """Delete one."""
        ...


def gc(
    url: str | os.PathLike[str] | Store,
    *,
    delete: bool = False,
    older_than: float = ORPHAN_AGE,
    grace: float = GRACE,
    storage_options: Mapping[str, Any] | None = None,
) -> GcReport:
    """Find, and with ``delete`` remove, what killed jobs left of the checkpoint at ``url`` and of all checkpoints in folders below it.

    Args:
        url: a checkpoint, or a folder of them.
        delete: do it; otherwise nothing is changed.
        older_than: seconds since the last change after which an unfinished save, an upload, or a temporary file belongs to nobody.
            A live save that has written nothing for so long would be deleted: do not say less than the longest pause of a job.
        grace: a replaced generation is kept for so many seconds after it was replaced, also when ``older_than`` is less.

    A generation also counts as alive while one of its uploads is younger than that. Uploads that this package did not begin are reported
    and left alone. Nothing is done to a checkpoint whose manifest is damaged or too new, or whose root ``.metadata`` is somebody else's.

    Raises StoreError, UnsupportedError, ValueError for negative seconds.
    """
    if older_than < 0 or grace < 0:
        raise ValueError(f"older_than={older_than}, grace={grace}; neither may be negative")
    options = dict(storage_options or {})
    if options.get("client") == "obstore" and isinstance(url, str) and url.startswith(("s3://", "s3a://")):
        del options["client"]  # it cannot list uploads; the options are the same
    store = open_store(url, **options)
    now = time.time()
    report = GcReport(store.url, delete)
    entries = list(store.list())
    uploads = _uploads_of(store)
    for root in sorted(_roots(entries, uploads)):
        _one_root(_Below(store, root), root, entries, uploads, report, _Limits(now, older_than, grace))
    for upload in uploads:
        if _OURS.fullmatch(upload.path) is None:
            report.found.append(Found("upload", upload.path, 0, 0, now - upload.upload.started, "it is not an upload of ucp_dcp"))
    return report


@dataclass(frozen=True, slots=True)
class _Limits:
    now: float
    older_than: float
    grace: float

    def young(self, changed: float) -> str:
        """Why something that changed then is kept; empty when it is old."""
        age = self.now - changed
        return "" if age > self.older_than else f"it changed {age:.0f} s ago; a save that is under way may need it"


@dataclass(frozen=True, slots=True)
class _Known:
    """An upload, by its path relative to the URL."""

    path: str
    upload: Upload


def _uploads_of(store: Store) -> list[_Known]:
    if not isinstance(store, _Uploads):
        return []
    prefix = store.url.partition("://")[2].partition("/")[2]
    skip = len(prefix) + 1 if prefix else 0
    return [_Known(upload.key[skip:], upload) for upload in store.uploads()]


def _roots(entries: Sequence[Entry], uploads: Sequence[_Known]) -> set[str]:
    """Folders, relative to the URL and with a slash behind them (the URL itself: ""), that are or were to become checkpoints of ours."""
    found = set()
    for path in [*(entry.path for entry in entries), *(upload.path for upload in uploads)]:
        above, _, name = path.rpartition("/")
        ours = _OURS.fullmatch(path)
        if ours is not None:
            found.add(ours[1])
        elif name == MANIFEST or is_temporary(name):
            found.add(f"{above}/" if above else "")
    return found


def _one_root(store: _Below, root: str, entries: Sequence[Entry], uploads: Sequence[_Known], report: GcReport, limits: _Limits) -> None:
    mine: dict[str, list[Entry]] = {}
    temporary: list[Entry] = []
    for entry in entries:
        if not entry.path.startswith(root):
            continue
        folder, slash, _ = entry.path[len(root) :].partition("/")
        if slash and is_generation(folder):
            mine.setdefault(folder, []).append(entry)
        elif not slash and is_temporary(folder):
            temporary.append(entry)
    begun: dict[str, list[_Known]] = {}
    for upload in uploads:
        folder = upload.path[len(root) :].partition("/")[0]
        if upload.path.startswith(root) and is_generation(folder):
            begun.setdefault(folder, []).append(upload)

    manifest, unclear = _manifest_of(store, report, root, limits)
    replaced = {name: seconds_of(when) for name, when in manifest.superseded} if manifest is not None else {}
    doomed: list[str] = []
    for generation in sorted(mine.keys() | begun.keys()):
        if manifest is not None and generation == manifest.generation:
            continue
        files = mine.get(generation, [])
        active = max([entry.mtime for entry in files] + [known.upload.started for known in begun.get(generation, ())])
        if generation in replaced:
            since = replaced[generation]
            wait = max(limits.grace, limits.older_than) - (limits.now - since)
            kept = unclear or (f"its readers have {wait:.0f} s more" if wait >= 0 else "")
        else:
            since, kept = active, unclear or limits.young(active)
        if files:
            kind: Kind = "replaced" if generation in replaced else "unfinished"
            size = sum(entry.size for entry in files)
            report.found.append(Found(kind, root + generation, len(files), size, limits.now - since, kept))
            if not kept:
                doomed.append(generation)
        for known in begun.get(generation, ()):
            # of a generation that is alive, each upload may be
            kept_upload = limits.young(known.upload.started if generation in replaced else active)
            _take_upload(store, known, kept_upload, report, limits)
    if manifest is not None:
        for known in begun.get(manifest.generation, ()):
            _take_upload(store, known, limits.young(known.upload.started), report, limits)
    for entry in temporary:
        report.found.append(Found("temporary", entry.path, 1, entry.size, limits.now - entry.mtime, unclear or limits.young(entry.mtime)))
    if report.deleted:
        for generation in doomed:
            _delete_generation(store, root, generation, mine[generation], report)
        store.delete(*(e.path[len(root) :] for e in temporary if not unclear and not limits.young(e.mtime)))


def _manifest_of(store: _Below, report: GcReport, root: str, limits: _Limits) -> tuple[Manifest | None, str]:
    """The manifest, with its ``.metadata`` repaired; and why nothing may be deleted here, if so."""
    try:
        manifest = read_manifest(store)
    except (FormatError, UnsupportedError) as error:
        return None, f"the manifest cannot be read: {error}"
    if manifest is None:
        try:
            store.size(METADATA)
        except StoreNotFoundError:
            return None, ""
        return None, f"there is a {METADATA} without a {MANIFEST}; it may name any generation"
    state = root_state(store, manifest)
    if state == "foreign":
        return manifest, f"the {METADATA} beside {MANIFEST} is somebody else's; it may name any generation"
    if state == "outdated":
        kept = ""
        if report.deleted:
            try:
                repair(store, manifest)
            except CorruptCheckpointError as error:
                kept = f"it cannot be repaired: {error}"
        age = limits.now - seconds_of(manifest.created)
        report.found.append(Found("metadata", root + METADATA, 0, 0, age, kept))
        if kept:
            return manifest, kept
    return manifest, ""


def _take_upload(store: _Below, known: _Known, kept: str, report: GcReport, limits: _Limits) -> None:
    report.found.append(Found("upload", known.path, 0, 0, limits.now - known.upload.started, kept))
    if report.deleted and not kept:
        _log.info("%s: aborting the upload of %s", report.url, known.path)
        assert isinstance(store.inner, _Uploads)
        store.inner.abort_upload(known.upload)


def _delete_generation(store: _Below, root: str, generation: str, known: Sequence[Entry], report: GcReport) -> None:
    """Delete it, unless it came alive or was committed since it was listed."""
    current = read_manifest(store)
    files = {entry.path: entry for entry in store.list(f"{generation}/")}
    before = {entry.path[len(root) :]: entry for entry in known}
    if (current is not None and current.generation == generation) or files.keys() - before.keys():
        index = next(i for i, item in enumerate(report.found) if item.path == root + generation)
        item = report.found[index]
        report.found[index] = Found(item.kind, item.path, item.files, item.bytes, item.age, "it changed while it was looked at")
        return
    _log.info("%s: deleting %s", report.url, root + generation)
    # What opens a generation goes first: a deletion that is cut short leaves none that looks whole.
    first = [path for path in (f"{generation}/index.ucp", f"{generation}/{METADATA}") if path in files]
    store.delete(*first, *sorted(files.keys() - set(first)))


class _Below:
    """A folder of a store, as a store: checkpoints below one URL, through one connection."""

    def __init__(self, inner: Store, prefix: str) -> None:
        self.inner = inner
        self._prefix = prefix

    @property
    def url(self) -> str:
        return f"{self.inner.url.rstrip('/')}/{self._prefix}".rstrip("/") if self._prefix else self.inner.url

    def size(self, path: str) -> int:
        return self.inner.size(self._prefix + path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self.inner.read(self._prefix + path, start, length)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        self.inner.read_ranges([Range(self._prefix + r.path, r.start, r.length) for r in ranges], into)

    def create(self, path: str) -> AbstractContextManager[Writer]:
        return self.inner.create(self._prefix + path)

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        self.inner.put(self._prefix + path, data, if_absent=if_absent)

    def delete(self, *paths: str) -> None:
        self.inner.delete(*(self._prefix + path for path in paths))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in self.inner.list(self._prefix + prefix):
            yield Entry(entry.path[len(self._prefix) :], entry.size, entry.mtime)
