"""The manifest ``ucp.json``: what the committed generation is and where its index lies (``docs/format.md``, "Manifest").

JSON is read with the standard library because the digest needs it exactly: duplicate names, ``NaN`` and lone surrogates are refused,
numbers come back as they were written.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from ..errors import CorruptCheckpointError, FormatError, UnsupportedError
from ..paths import checked_path
from .framing import ALIGNMENT

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MANIFEST", "MAX_BYTES", "VERSION", "FileDigest", "Manifest", "Section", "check_generation", "digest", "seconds_of", "utc_text"]

MANIFEST = "ucp.json"
VERSION = 1
"""Version of docs/format.md that this package writes, and the newest that it reads."""
MAX_BYTES = 64 << 10
_ENDS = 32 << 10
_FORMAT = "ucp_dcp"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_GENERATION = re.compile(r"g-[0-9a-f]{32}")
_SIZE_LIMIT = 1 << 62


def digest(data: Buffer) -> str:
    """XXH3-128 of some bytes, 32 lower-case hex digits. It finds damage; it does not stop somebody who means harm."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))


def utc_text(seconds: float) -> str:
    """A time since 1970 as RFC 3339 writes it, to the microsecond: two commits of one second have an order."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seconds_of(text: str) -> float:
    """The inverse of :func:`utc_text`."""
    return datetime.datetime.fromisoformat(text).timestamp()


def check_generation(name: object) -> str:
    """Return a generation name (``g-`` and 32 hex digits). Raises FormatError for anything else."""
    if not isinstance(name, str) or not _GENERATION.fullmatch(name):
        raise FormatError(f"generation {name!r:.80} is not 'g-' followed by 32 lower-case hex digits")
    return name


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes ``offset .. offset + size`` of the index, and their XXH3-128."""

    offset: int
    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and XXH3-128 of a file, and of its first and last 32 KiB joined (the whole file when it is not longer than both).

    ``ends`` tells a ``.metadata`` of hundreds of MiB from another one by two small reads.
    """

    size: int
    xxh3: str
    ends: str

    @classmethod
    def of(cls, data: Buffer) -> FileDigest:
        """The digest of a file with this content."""
        view = memoryview(data)
        return cls(view.nbytes, digest(view), digest(view if view.nbytes <= 2 * _ENDS else bytes(view[:_ENDS]) + bytes(view[-_ENDS:])))

    @staticmethod
    def end_ranges(size: int) -> list[tuple[int, int]]:
        """The (start, length) ranges that ``ends`` covers in a file of this size."""
        return [(0, size)] if size <= 2 * _ENDS else [(0, _ENDS), (size - _ENDS, _ENDS)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``ucp.json``. Sizes in bytes; ``index_path`` relative to the root and inside the generation's folder."""

    generation: str
    created: str
    index_path: str
    index_size: int
    sections: Mapping[str, Section]
    metadata: FileDigest | None = None
    previous_metadata: FileDigest | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    superseded: tuple[tuple[str, str], ...] = ()
    """(generation, UTC time of the commit that replaced it): its files are still there, for readers that opened it before."""
    version: int = VERSION
    min_reader: int = 1

    @classmethod
    def new(
        cls,
        *,
        generation: str,
        index_path: str,
        index_size: int,
        sections: Mapping[str, Section],
        provenance: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """A manifest for a new generation; the commit fills in what it publishes as ``.metadata``. Raises FormatError as reading does."""
        now = utc_text(datetime.datetime.now(datetime.UTC).timestamp())
        manifest = cls(generation, now, index_path, index_size, MappingProxyType(dict(sections)), provenance=dict(provenance or {}))
        return cls.from_bytes(manifest.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.from_bytes, (self.to_bytes(),)

    def replacing(
        self, metadata: FileDigest | None, previous: FileDigest | None, superseded: Sequence[tuple[str, str]] = ()
    ) -> Manifest:
        """This manifest with the root ``.metadata`` that it publishes and the one that it replaces, and the generations that stay."""
        return dataclasses.replace(self, metadata=metadata, previous_metadata=previous, superseded=tuple(superseded))

    def to_bytes(self) -> bytes:
        """The JSON text, one line per field. Raises FormatError when it would be larger than 64 KiB or is not JSON."""
        fields: dict[str, Any] = {
            "format": _FORMAT,
            "version": self.version,
            "min_reader": self.min_reader,
            "generation": self.generation,
            "created": self.created,
            "index": {
                "path": self.index_path,
                "size": self.index_size,
                "sections": {name: [s.offset, s.size, s.xxh3] for name, s in self.sections.items()},
            },
            "metadata": None if self.metadata is None else dataclasses.asdict(self.metadata),
            "previous_metadata": None if self.previous_metadata is None else dataclasses.asdict(self.previous_metadata),
            "provenance": dict(self.provenance),
            "superseded": [list(pair) for pair in self.superseded],
        }
        try:
            lines = [f"{_canonical(name)}: {_canonical(value)}" for name, value in fields.items()]
            lines.append(f'"xxh3": "{_digest_of(fields)}"')
            data = ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{MANIFEST}: the provenance is not plain JSON ({error}); use strings, numbers, lists and maps") from error
        if len(data) > MAX_BYTES:
            raise FormatError(f"{MANIFEST} would have {len(data)} bytes, at most {MAX_BYTES} are allowed; shorten the provenance")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, name: str = MANIFEST) -> Manifest:
        """Parse and check a manifest; ``name`` is for messages.

        Raises FormatError when it is not a manifest, UnsupportedError when only a newer version can read it, CorruptCheckpointError
        when its digest or a field is wrong.
        """
        if len(data) > MAX_BYTES:
            raise CorruptCheckpointError(f"{name} has {len(data)} bytes; a manifest has at most {MAX_BYTES}")
        fields = _parse(data, name)
        if fields.get("format") != _FORMAT:
            raise FormatError(f"{name}: format is {fields.get('format')!r:.80}, expected {_FORMAT!r}; this is no checkpoint of ucp_dcp")
        check = _Checker(name)
        # Before the digest: a newer version may define it differently.
        version, min_reader = check.integer(fields, "version"), check.integer(fields, "min_reader")
        if min_reader > VERSION:
            raise UnsupportedError(
                f"{name}: written as format version {version}, needs a reader of version {min_reader} (min_reader); "
                f"this one knows up to version {VERSION}. Upgrade ucp_dcp"
            )
        if version < min_reader or min_reader < 1:
            raise CorruptCheckpointError(f"{name}: version {version} and min_reader {min_reader} do not fit together")
        stated = fields.pop("xxh3", None)
        try:
            found = _digest_of(fields)
        except ValueError as error:
            raise CorruptCheckpointError(f"{name}: {error}") from error
        if found != stated:
            raise CorruptCheckpointError(f"{name}: its digest is {found}, but it states {stated!r:.80}; the file was damaged or edited")
        try:
            generation = check_generation(fields.get("generation"))
        except FormatError as error:
            raise CorruptCheckpointError(f"{name}: {error}") from error
        index = check.map(fields, "index")
        path = check.path(index, "path", generation)
        size = check.integer(index, "size", "index")
        return cls(
            generation=generation,
            created=check.time(fields, "created"),
            index_path=path,
            index_size=size,
            sections=check.sections(index, size),
            metadata=check.file(fields, "metadata"),
            previous_metadata=check.file(fields, "previous_metadata"),
            provenance=check.map(fields, "provenance"),
            superseded=check.superseded(fields, generation),
            version=version,
            min_reader=min_reader,
        )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _digest_of(fields: dict[str, Any]) -> str:
    return digest(_canonical(fields).encode("utf-8"))


def _parse(data: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return out

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{name} holds a {type(value).__name__}, expected a JSON object")
    return value


class _Checker:
    """Takes fields out of parsed JSON, with errors that name file, field, found and expected."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, where: str, found: object, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.name}: {where} is {found!r:.80}, expected {expected}")

    def map(self, fields: dict[str, Any], key: str, above: str = "") -> dict[str, Any]:
        value = fields.get(key)
        if not isinstance(value, dict):
            raise self.wrong(f"{above}.{key}" if above else key, value, "an object")
        return value

    def integer(self, fields: dict[str, Any], key: str, above: str = "") -> int:
        return self.number(fields.get(key), f"{above}.{key}" if above else key)

    def number(self, value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _SIZE_LIMIT:
            raise self.wrong(where, value, "an integer from 0 to 2^62")
        return value

    def hex(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self.wrong(where, value, "32 lower-case hex digits")
        return value

    def path(self, fields: dict[str, Any], key: str, generation: str) -> str:
        value = fields.get(key)
        if not isinstance(value, str):
            raise self.wrong(f"index.{key}", value, "a path")
        try:
            checked_path(value)
        except FormatError as error:
            raise CorruptCheckpointError(f"{self.name}: index.{key}: {error}") from error
        if not value.startswith(generation + "/"):
            raise self.wrong(f"index.{key}", value, f"a path inside {generation}/")
        return value

    def time(self, fields: dict[str, Any], key: str) -> str:
        value = fields.get(key)
        try:
            if isinstance(value, str) and "T" in value and datetime.datetime.fromisoformat(value).utcoffset() == datetime.timedelta(0):
                return value
        except ValueError:
            pass
        raise self.wrong(key, value, "a UTC time as in RFC 3339")

    def file(self, fields: dict[str, Any], key: str) -> FileDigest | None:
        if fields.get(key, 0) is None:
            return None
        value = self.map(fields, key)
        ends = self.hex(value.get("ends"), f"{key}.ends")
        return FileDigest(self.integer(value, "size", key), self.hex(value.get("xxh3"), f"{key}.xxh3"), ends)

    def superseded(self, fields: dict[str, Any], generation: str) -> tuple[tuple[str, str], ...]:
        value = fields.get("superseded", [])
        if not isinstance(value, list):
            raise self.wrong("superseded", value, "a list")
        out = []
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2 or pair[0] == generation:
                raise self.wrong("superseded", pair, "[another generation, time]")
            try:
                name = check_generation(pair[0])
            except FormatError as error:
                raise CorruptCheckpointError(f"{self.name}: superseded: {error}") from error
            out.append((name, self.time({"superseded": pair[1]}, "superseded")))
        return tuple(out)

    def sections(self, index: dict[str, Any], size: int) -> Mapping[str, Section]:
        sections: dict[str, Section] = {}
        for name, value in self.map(index, "sections", "index").items():
            where = f"index.sections.{name:.60}"
            if not isinstance(value, list) or len(value) != 3:
                raise self.wrong(where, value, "[offset, size, xxh3]")
            section = Section(self.number(value[0], where), self.number(value[1], where), self.hex(value[2], where))
            if section.offset % ALIGNMENT:
                raise self.wrong(f"{where} offset", section.offset, f"a multiple of {ALIGNMENT}")
            sections[name] = section
        end = 0
        for name, section in sorted(sections.items(), key=lambda item: (item[1].offset, item[1].size)):
            if section.offset < end:
                raise self.wrong(f"index.sections.{name:.60} offset", section.offset, f"at least {end}: sections must not overlap")
            end = section.offset + section.size
            if end > size:
                raise self.wrong(f"index.sections.{name:.60} end", end, f"at most the index's size {size}")
        return MappingProxyType(sections)
