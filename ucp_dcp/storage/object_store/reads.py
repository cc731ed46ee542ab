"""Ranges of objects: neighbours joined, large ones split, several requests in flight, straight into the caller's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ranges import coalesce
from ..store import Range, target_views
from .client import Failed, Found, Partial
from .retry import Attempts

if TYPE_CHECKING:
    from .store import ObjectStore

__all__ = ["read_into", "read_piece"]


@dataclass(frozen=True, slots=True)
class _Request:
    """One ranged GET. ``into``: where it goes; None: to a buffer, from which ``members`` (target, offset in it) are copied."""

    path: str
    start: int
    length: int
    into: memoryview | None
    members: list[tuple[memoryview, int]] = field(default_factory=list)


def read_into(store: ObjectStore, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
    """See :meth:`Store.read_ranges`. All requests have ended when this returns or raises."""
    views = target_views(ranges, into)
    by_path: dict[str, list[int]] = {}
    for i, wanted in enumerate(ranges):
        store.key(wanted.path)  # checks the path
        by_path.setdefault(wanted.path, []).append(i)
    requests: list[_Request] = []
    for path, members in by_path.items():
        filled = [i for i in members if ranges[i].length]
        if len(filled) < len(members):
            store.size(path)  # a range without bytes still says whether the file is there
        requests += _planned(path, [ranges[i].start for i in filled], [views[i] for i in filled], store)
    if len(requests) == 1:
        _perform(store, requests[0])
        return
    store.together(lambda request: _perform(store, request), requests)


def _planned(path: str, starts: list[int], views: list[memoryview], store: ObjectStore) -> list[_Request]:
    if not starts:
        return []
    piece = store.options.piece
    lengths = [view.nbytes for view in views]
    groups = coalesce(starts, lengths, store.options.gap, piece)
    members: list[list[int]] = [[] for _ in groups.group_start]
    for i, group in enumerate(groups.member_group.tolist()):
        members[group].append(i)
    out = []
    for own, start, length in zip(members, groups.group_start.tolist(), groups.group_length.tolist(), strict=True):
        if len(own) == 1:
            view = views[own[0]]
            out += [
                _Request(path, start + at, min(piece, length - at), view[at : at + min(piece, length - at)])
                for at in range(0, length, piece)
            ]
        elif length > piece:  # ranges within one large range: each by itself rather than through a large buffer
            for i in own:
                out += [
                    _Request(path, starts[i] + at, min(piece, lengths[i] - at), views[i][at : at + piece])
                    for at in range(0, lengths[i], piece)
                ]
        else:
            out.append(_Request(path, start, length, None, [(views[i], starts[i] - start) for i in own]))
    return out


def _perform(store: ObjectStore, request: _Request) -> None:
    into = request.into if request.into is not None else memoryview(bytearray(request.length))
    read_piece(store, request.path, request.start, into)
    for view, at in request.members:
        view[:] = into[at : at + view.nbytes]


def read_piece(store: ObjectStore, path: str, start: int, into: memoryview, *, pinned: bool = True) -> None:
    """One ranged GET, resumed where a body ended early; of the same object as before when ``pinned``."""
    client, key = store.client, store.key(path)
    etag = store.pins.get(path) if pinned else None
    done = 0

    def attempt(_: Attempts) -> Found:
        nonlocal done, etag
        try:
            return client.get(key, start + done, into[done:], etag)
        except Partial as partial:
            done += partial.received
            if partial.found is not None:
                etag = partial.found.etag or etag  # the rest must be of the same object
            raise

    try:
        found = store.request(path, f"reading {len(into)} bytes from byte {start}", attempt)
    except Failed as failed:
        if failed.kind == "range":
            size = "fewer"
            with contextlib.suppress(Exception):
                size = str(store.size(path))
            raise store.short(path, start, len(into), f"the file has {size} bytes") from failed
        raise store.translated(failed, path, "reading it") from failed
    if start + len(into) > found.size:
        raise store.short(path, start, len(into), f"the file has {found.size} bytes")
    if pinned and found.etag and store.pins.setdefault(path, found.etag) != found.etag:
        raise store.changed(path, f"its ETag is {found.etag} now, it was {store.pins[path]}")
