"""How a save becomes visible, and stays whole when anything crashes (``docs/format.md``, "Commit order"; decisions D3, D4, D5).

One coordinator calls :func:`begin`, all ranks write into the new generation, the coordinator calls :func:`commit`. A reader calls
:func:`open_root`. None of this uses torch.distributed.

Two writers that overwrite one checkpoint at the same time are not kept apart: the later commit wins, whole, and the earlier generation
is collected like an unfinished save.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignSaveError,
    FormatError,
    StoreChangedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from .manifest import MANIFEST, MAX_BYTES, FileDigest, Manifest, check_generation, digest, seconds_of, utc_text
from .store import BoundedStore, Entry, Range, Store

__all__ = [
    "METADATA",
    "ORPHAN_AGE",
    "Begun",
    "abandon",
    "begin",
    "check_foreign",
    "check_visible",
    "collect",
    "commit",
    "is_generation",
    "is_temporary",
    "new_generation",
    "open_root",
    "read_manifest",
    "repair",
    "root_state",
]

METADATA = ".metadata"
ORPHAN_AGE = 24 * 3600.0
"""Seconds since the last change after which a generation that no manifest names is taken for a save that died."""

_TEMPORARY = re.compile(r"\.(ucp\.json|\.metadata)\.[0-9a-f]{16}\.tmp")
_MOST_KEPT = 64  # replaced generations that a manifest names
_OPEN_ATTEMPTS = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """What :func:`begin` found: the manifest that was committed then, if any."""

    previous: Manifest | None


def new_generation() -> str:
    """A fresh generation name, drawn at random, so that two saves never write into the same folder."""
    return "g-" + secrets.token_hex(16)


def read_manifest(store: Store) -> Manifest | None:
    """The committed manifest, or None. Raises what :meth:`Manifest.from_bytes` raises."""
    try:
        if isinstance(store, BoundedStore):  # one request where requests cost
            size, data = store.read_up_to(MANIFEST, MAX_BYTES)
        else:
            size, data = store.size(MANIFEST), b""
        if size > MAX_BYTES:
            raise CorruptCheckpointError(f"{MANIFEST} in {store.url} has {size} bytes; a manifest has at most {MAX_BYTES}")
        data = data or store.read(MANIFEST)
    except StoreNotFoundError:
        return None
    return Manifest.from_bytes(data, f"{MANIFEST} in {store.url}")


def begin(store: Store, *, overwrite: bool) -> Begun:
    """Decide, once for all ranks, whether a save may go on, and repair what a crash may have left (D3).

    Raises CheckpointExistsError when something is there and ``overwrite`` is False, UnsupportedError when that was written by a newer
    format version, which is never overwritten. A damaged manifest may be overwritten. Nothing is changed when this raises.
    """
    previous = _readable_manifest(store, overwrite=overwrite)
    if not overwrite:
        if previous is not None:
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint already (generation {previous.generation}, {previous.created}); "
                "use overwrite=True to replace it, or another folder"
            )
        _refuse_stock(store)
    if previous is not None:
        try:
            repair(store, previous)
        except CorruptCheckpointError as error:
            _log.warning("%s: replacing a checkpoint that is damaged: %s", store.url, error)
    return Begun(previous)


def commit(
    store: Store,
    manifest: Manifest,
    metadata: bytes | None,
    *,
    overwrite: bool,
    begun: Begun | None = None,
    orphan_age: float | None = ORPHAN_AGE,
    grace: float = 0.0,
    now: float | None = None,
) -> Manifest:
    """Make a complete generation the checkpoint, in the order of ``docs/format.md``; returns the manifest as committed.

    Data files and index must be durable already. ``metadata`` is the stock ``.metadata`` to publish, None for
    ``stock_metadata=False``. ``orphan_age`` in seconds: see :func:`collect`; None collects nothing but replaced generations. ``grace``:
    seconds that a replaced generation stays readable for those who opened it before; a later commit deletes it. 0 deletes it now.

    Raises CheckpointExistsError when ``overwrite`` is False and somebody else was faster, StoreError otherwise. An error in deleting
    what is no longer needed is logged, since the save is committed then.
    """
    generation = check_generation(manifest.generation)
    if metadata is not None:  # step 2; the index is there already
        with store.create(f"{generation}/{METADATA}") as writer:
            writer.write(metadata)

    # As late as possible, because another writer may have committed since begin().
    previous = _readable_manifest(store, overwrite=overwrite)
    if not overwrite:
        if previous is not None:
            raise _late(store, previous)
        _refuse_stock(store)
    expected = begun.previous.generation if begun is not None and begun.previous is not None else None
    if begun is not None and previous is not None and previous.generation != expected:
        _log.warning("%s: generation %s was committed while this save was under way; it is replaced", store.url, previous.generation)
    stays, goes = _replaced(previous, generation, grace, time.time() if now is None else now)
    manifest = manifest.replacing(None if metadata is None else FileDigest.of(metadata), _root_digest(store, previous), stays)
    _publish(store, manifest, overwrite=overwrite)  # step 3: the commit

    try:
        _publish_metadata(store, metadata)  # step 4
        _yield_to_later(store, generation)
    except StoreError as error:
        raise StoreError(
            f"{store.url}: generation {generation} is committed, but its {METADATA} was not published for stock readers; "
            f"the next save repairs it: {error}"
        ) from error
    try:  # step 5
        for old in goes:
            _delete_generation(store, old)
        if orphan_age is not None:
            collect(store, orphan_age=orphan_age)
    except (StoreError, FormatError) as error:
        _log.warning("%s: generation %s is committed, but collecting old ones failed: %s", store.url, generation, error)
    return manifest


def check_visible(store: Store, generation: str, files: Mapping[str, int]) -> None:
    """Whether the coordinator sees what the ranks wrote: path -> size of the data files of this save.

    Raises StoreError that names the ranks whose files are not there: folders of the same name on different machines are not one folder.
    """
    seen = {entry.path: entry.size for entry in store.list(f"{check_generation(generation)}/")}
    hidden: dict[str, list[str]] = {}  # rank -> what is wrong with its files
    for path, size in files.items():
        rank = _rank_of(path)
        found = seen.get(path)
        if found is None:  # a listing may be behind
            try:
                found = store.size(path)
            except StoreNotFoundError:
                hidden.setdefault(rank, []).append(f"{path} is not there")
                continue
        if found != size:
            hidden.setdefault(rank, []).append(f"{path} has {found} bytes instead of {size}")
    if hidden:
        ranks = [f"rank {rank} ({why[0]})" for rank, why in hidden.items()]
        shown = ", ".join(ranks[:4]) + (f"; all of them: {', '.join(hidden)}" if len(ranks) > 4 else "")
        raise StoreError(
            f"{store.url}: the coordinator does not see what {len(hidden)} of {len({_rank_of(path) for path in files})} ranks wrote: "
            f"{shown}. A checkpoint must be in one place that is shared by all ranks, not on a disk of each node or in buckets of their "
            "own; nothing was committed"
        )


def _rank_of(path: str) -> str:
    return path.rpartition("/")[2].removeprefix("__").partition("_")[0]


def abandon(store: Store, generation: str) -> None:
    """Delete the files of a save that failed. Does nothing when the generation was committed after all.

    To be called once no rank writes into it any more.
    """
    check_generation(generation)
    current = read_manifest(store)
    if current is None or current.generation != generation:
        _delete_generation(store, generation)


def repair(store: Store, manifest: Manifest) -> Literal["consistent", "repaired", "foreign"]:
    """Finish step 4 of a commit that crashed before it: make the root ``.metadata`` the one of the committed generation.

    A root ``.metadata`` that this manifest does not know is left alone (``"foreign"``). Raises CorruptCheckpointError when the generation's
    own copy is damaged.
    """
    root = _ends_of(store)
    state = _compare(root, manifest)
    if state != "outdated":
        return state
    if manifest.metadata is None:
        store.delete(METADATA)
        _yield_to_later(store, manifest.generation)
        return "repaired"
    path = f"{manifest.generation}/{METADATA}"
    try:
        data = store.read(path, 0, manifest.metadata.size)
    except StoreNotFoundError as error:
        raise CorruptCheckpointError(f"{error}, but the manifest names it; the checkpoint is incomplete") from error
    if digest(data) != manifest.metadata.xxh3:
        raise CorruptCheckpointError(f"{path} has digest {digest(data)}, but the manifest states {manifest.metadata.xxh3}; it was damaged")
    store.put(METADATA, data)
    _yield_to_later(store, manifest.generation)  # a commit between our looks would find its .metadata replaced by an older one
    return "repaired"


def root_state(store: Store, manifest: Manifest) -> Literal["consistent", "outdated", "foreign"]:
    """Whether the root ``.metadata`` is the committed generation's, one that :func:`repair` replaces, or somebody else's."""
    return _compare(_ends_of(store), manifest)


def collect(store: Store, *, orphan_age: float = ORPHAN_AGE, now: float | None = None) -> list[str]:
    """Delete generations that no manifest names and whose newest file is older than ``orphan_age`` seconds; returns their names.

    Also temporary files of that age in the root. A younger generation may be another job's live save. Nothing is deleted where it is
    unclear who needs it: a root ``.metadata`` of somebody else, or one without a manifest.
    """
    manifest = read_manifest(store)
    if manifest is not None:
        if repair(store, manifest) == "foreign":
            return []
    elif _ends_of(store) is not None:
        return []
    before = (time.time() if now is None else now) - orphan_age
    newest: dict[str, float] = {}
    for entry in store.list("g-"):
        generation = entry.path.partition("/")[0]
        if is_generation(generation) and entry.path != generation:
            newest[generation] = max(newest.get(generation, entry.mtime), entry.mtime)
    stale = sorted(generation for generation, changed in newest.items() if changed < before)
    leftovers = [e.path for e in store.list(".") if _TEMPORARY.fullmatch(e.path) and e.mtime < before]
    # Whatever was committed since the first look stays, and what that still keeps for its readers.
    current = read_manifest(store)
    named = {current.generation, *(name for name, _ in current.superseded)} if current is not None else set()
    stale = [g for g in stale if g not in named]
    for generation in stale:
        _log.info("%s: collecting %s, an unfinished save", store.url, generation)
        _delete_generation(store, generation)
    store.delete(*leftovers)
    return stale


def check_foreign(store: Store, manifest: Manifest, prefer: Literal["ucp", "stock"] | None = None) -> Literal["ucp", "stock"]:
    """Which of two checkpoints in one folder to open (D4): ours unless something else has written the root ``.metadata`` since.

    Raises ForeignSaveError, naming both, in that case, unless ``prefer`` decides.
    """
    if prefer is not None:
        return prefer
    root = _ends_of(store)
    if _compare(root, manifest) != "foreign":
        return "ucp"
    found = next((e for e in store.list(METADATA) if e.path == METADATA), Entry(METADATA, root.size if root else 0, 0.0))
    stock_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.mtime))
    raise ForeignSaveError(
        f"{store.url} holds two checkpoints: {MANIFEST} (generation {manifest.generation}, {manifest.created}) and a {METADATA} of another "
        f"program ({found.size} bytes, {stock_time}), for instance of a plain dcp.save into this folder. "
        'Say prefer="ucp" or prefer="stock", and use separate folders'
    )


def open_root(store: Store, prefer: Literal["ucp", "stock"] | None = None) -> Manifest | None:
    """The manifest to open, or None when the stock ``.metadata`` in the root is to be opened instead.

    Raises CheckpointNotFoundError when neither is there, ForeignSaveError as :func:`check_foreign`.
    """
    last: Manifest | None = None
    for _ in range(_OPEN_ATTEMPTS):
        manifest = None if prefer == "stock" else read_manifest(store)
        if manifest is None:
            if prefer != "ucp" and _ends_of(store) is not None:
                return None
            names = {"ucp": MANIFEST, "stock": METADATA, None: f"{MANIFEST} nor {METADATA}"}[prefer]
            raise CheckpointNotFoundError(f"{store.url}: there is no checkpoint here ({'no ' if prefer else 'neither '}{names})")
        try:
            check_foreign(store, manifest, prefer)
            return manifest
        except ForeignSaveError:
            # A commit between our two looks publishes a .metadata that the manifest seen first does not know.
            if last is not None and last.generation == manifest.generation:
                raise
            last = manifest
    raise ForeignSaveError(f"{store.url}: the checkpoint is being replaced faster than it can be opened")


# -- steps -----------------------------------------------------------------------------------------------------------------------


def _readable_manifest(store: Store, *, overwrite: bool) -> Manifest | None:
    try:
        return read_manifest(store)
    except FormatError as error:
        if not overwrite:
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint that is damaged; use overwrite=True to replace it: {error}"
            ) from error
        _log.warning("%s: replacing a checkpoint that is damaged: %s", store.url, error)
        return None


def _refuse_stock(store: Store) -> None:
    if _ends_of(store) is not None:
        raise CheckpointExistsError(
            f"{store.url} holds a stock DCP checkpoint already ({METADATA}); use overwrite=True to replace it, or another folder"
        )


def _publish(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    try:
        store.put(MANIFEST, manifest.to_bytes(), if_absent=not overwrite)
    except StoreError as error:
        # A request may succeed while its answer is lost, and the repeated one then finds the file there: look who wrote it.
        try:
            current = read_manifest(store)
        except (StoreError, FormatError):
            current = None
        if current is not None and current.generation == manifest.generation:
            return
        if isinstance(error, StoreExistsError):
            raise _late(store, current) from error
        raise


def _late(store: Store, current: Manifest | None) -> CheckpointExistsError:
    by = f"generation {current.generation}" if current is not None else "another save"
    return CheckpointExistsError(f"{store.url}: {by} was committed while this save was under way, and overwrite is False")


def _publish_metadata(store: Store, metadata: bytes | None) -> None:
    if metadata is None:
        store.delete(METADATA)
    else:
        store.put(METADATA, metadata)


def _replaced(previous: Manifest | None, generation: str, grace: float, now: float) -> tuple[list[tuple[str, str]], list[str]]:
    """Replaced generations that stay for their readers, with the time they were replaced, and those that go."""
    if previous is None:
        return [], []
    known = [pair for pair in previous.superseded if pair[0] != generation]
    if previous.generation != generation:
        known.append((previous.generation, utc_text(now)))
    stays = [(name, when) for name, when in known if grace > 0 and now - seconds_of(when) < grace][-_MOST_KEPT:]
    kept = {name for name, _ in stays}
    return stays, [name for name, _ in known if name not in kept]


def _yield_to_later(store: Store, generation: str) -> None:
    """Another save may have been committed between our steps 3 and 4: the root ``.metadata`` is then made the later one's.

    Of two savers the one that publishes last looks last, so that in the end the ``.metadata`` is that of the manifest.
    """
    for _ in range(_OPEN_ATTEMPTS):
        current = read_manifest(store)
        if current is None or current.generation == generation:
            return
        generation = current.generation
        try:
            data = store.read(f"{generation}/{METADATA}") if current.metadata is not None else None
        except StoreNotFoundError:
            continue  # replaced once more
        _publish_metadata(store, data)


def _delete_generation(store: Store, generation: str) -> None:
    prefix = check_generation(generation) + "/"
    store.delete(*sorted(entry.path for entry in store.list(prefix)))


def is_temporary(path: str) -> bool:
    """Whether a file in the root is what a put leaves behind when it is cut short."""
    return _TEMPORARY.fullmatch(path) is not None


def is_generation(name: str) -> bool:
    """Whether this is the name of a generation's folder."""
    try:
        check_generation(name)
    except FormatError:
        return False
    return True


# -- the root .metadata ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """Size of the root ``.metadata`` and digest of its ends (:class:`FileDigest`)."""

    size: int
    ends: str


def _ends_of(store: Store) -> _Ends | None:
    """What lies in the root, read without memory of its size; None when nothing does."""
    for attempt in range(_OPEN_ATTEMPTS):
        try:
            size = store.size(METADATA)
            spans = FileDigest.end_ranges(size)
            data = bytearray(sum(length for _, length in spans))
            views, at = [], 0
            for _, length in spans:
                views.append(memoryview(data)[at : at + length])
                at += length
            store.read_ranges([Range(METADATA, start, length) for start, length in spans], views)
        except StoreNotFoundError:
            return None
        except (CorruptCheckpointError, StoreChangedError):
            # Replaced between two calls.
            if attempt == _OPEN_ATTEMPTS - 1:
                raise
            continue
        return _Ends(size, digest(data))
    return None


def _compare(root: _Ends | None, manifest: Manifest) -> Literal["consistent", "outdated", "foreign"]:
    """How the root ``.metadata`` relates to the manifest. ``outdated`` is what a crash between steps 3 and 4 leaves."""

    def same(known: FileDigest | None) -> bool:
        return root == (None if known is None else _Ends(known.size, known.ends))

    if same(manifest.metadata):
        return "consistent"
    return "outdated" if root is None or same(manifest.previous_metadata) else "foreign"


def _root_digest(store: Store, previous: Manifest | None) -> FileDigest | None:
    """The digest of the root ``.metadata``, read in full only when no manifest knows it."""
    root = _ends_of(store)
    if root is None:
        return None
    for known in (previous.metadata, previous.previous_metadata) if previous is not None else ():
        if known is not None and root == _Ends(known.size, known.ends):
            return known
    return FileDigest.of(store.read(METADATA))
