"""The index file ``index.ucp``: named sections that are each read, and verified, on their own (``docs/format.md``, "Index").

This module knows bytes only; what is in the sections is ``ucp_dcp.catalog``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptCheckpointError, StoreNotFoundError
from .framing import align
from .manifest import Manifest, Section, digest
from .ranges import coalesce
from .store import Range, Store, byte_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["IndexFile", "write_index"]

_SMALL = 256 << 10
"""Sections up to this many bytes are all read together, on the first use of one of them."""
_GAP = 64 << 10
_TOGETHER = 8 << 20
_TRUSTED = 16 << 20
"""Bytes that are allocated on the manifest's word alone; for more, the file's size is asked first."""


def write_index(store: Store, path: str, sections: Mapping[str, Buffer]) -> tuple[int, dict[str, Section]]:
    """Write sections into a new file, in the order given, each at a multiple of 64 bytes; returns its size and table. Durable on return."""
    table: dict[str, Section] = {}
    pending = bytearray()
    done = 0
    with store.create(path) as writer:
        for name, data in sections.items():
            view = byte_view(data)
            pending += bytes(align(done + len(pending)) - done - len(pending))
            table[name] = Section(done + len(pending), view.nbytes, digest(view))
            if len(pending) + view.nbytes <= _TOGETHER:  # most indexes are one write
                pending += view
                continue
            writer.write(pending)
            writer.write(view)
            done += len(pending) + view.nbytes
            pending = bytearray()
        writer.write(pending)
        return done + len(pending), table


class IndexFile:
    """The sections of one index, read when they are first asked for and then kept.

    Pickles without what it has read.
    """

    def __init__(self, store: Store, path: str, size: int, sections: Mapping[str, Section]) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._sections = dict(sections)
        self._read: dict[str, memoryview] = {}
        self._size_checked = False

    @classmethod
    def of(cls, store: Store, manifest: Manifest) -> IndexFile:
        """The index that a manifest names. Nothing is read yet."""
        return cls(store, manifest.index_path, manifest.index_size, manifest.sections)

    def __contains__(self, name: object) -> bool:
        return name in self._sections

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexFile, (self._store, self._path, self._size, self._sections)

    def load(self, name: str) -> memoryview | None:
        """The verified bytes of a section, read-only and at a 16-byte aligned address; None when there is no such section.

        Raises CorruptCheckpointError, naming the section, when the file is missing, too short or does not match its digest.
        """
        if name not in self._sections:
            return None
        if name not in self._read:
            together = [name]
            if self._sections[name].size <= _SMALL:
                together = [other for other, s in self._sections.items() if s.size <= _SMALL and other not in self._read]
            self._fetch(together)
        return self._read[name]

    def prefetch(self, *names: str) -> None:
        """Read the sections of these names (all of them without any) in one call of the store; unknown names are ignored."""
        wanted = set(names or self._sections)
        self._fetch([name for name in self._sections if name in wanted and name not in self._read])

    def _fetch(self, names: list[str]) -> None:
        for name in names:
            if self._sections[name].size == 0:
                self._keep(name, memoryview(b""))
        names = [name for name in names if name not in self._read]
        sections = [self._sections[name] for name in names]
        groups = coalesce([s.offset for s in sections], [s.size for s in sections], _GAP, _TOGETHER)
        total = int(groups.group_length.sum())
        try:
            if total > _TRUSTED and not self._size_checked:
                found = self._store.size(self._path)
                if found != self._size:
                    raise CorruptCheckpointError(f"{self._path} has {found} bytes, but the manifest states {self._size}; it is truncated")
                self._size_checked = True
            buffers = [np.empty(length, np.uint8).data for length in groups.group_length.tolist()]
            ranges = [Range(self._path, start, len(buffer)) for start, buffer in zip(groups.group_start.tolist(), buffers, strict=True)]
            self._store.read_ranges(ranges, buffers)
        except StoreNotFoundError as error:
            raise CorruptCheckpointError(f"{error}, but the manifest names it; the checkpoint is incomplete") from error
        for name, section, group, offset in zip(names, sections, groups.member_group.tolist(), groups.member_offset.tolist(), strict=True):
            self._keep(name, buffers[group][offset : offset + section.size].toreadonly())

    def _keep(self, name: str, data: memoryview) -> None:
        section = self._sections[name]
        found = digest(data)
        if found != section.xxh3:
            raise CorruptCheckpointError(
                f"{self._path}: section {name!r} ({section.size} bytes at byte {section.offset}) has digest {found}, "
                f"but the manifest states {section.xxh3}; it was damaged"
            )
        self._read[name] = data
