"""The zip archive that ``torch.save`` writes: where its records lie, without reading them.

Format: PKWARE APPNOTE 6.3 (end record, zip64, central directory, local headers) as far as torch's writer uses it: records are stored, not
compressed; ``<name>/data.pkl`` is the object, ``<name>/data/<key>`` are storages, ``<name>/byteorder`` is ``little`` or ``big``.

The parser does no I/O: it is a generator that yields the ranges it needs and is sent their bytes, so it serves files in a store, items
inside a file, many of them in step (``drive_many``), and bytes in memory. Everything that a file claims is checked before it is used:
sizes against the archive, records against each other (no two may share a byte), names for duplicates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..errors import CorruptCheckpointError, FormatError, UnsupportedError

__all__ = ["Archive", "ReadMany", "Record", "Steps", "archive_steps", "drive", "drive_many", "local_payload"]

T = TypeVar("T")
Ranges: TypeAlias = list[tuple[int, int]]
Steps: TypeAlias = Generator[Ranges, Sequence[bytes], T]
"""Yields (start, length) ranges of an archive, is sent their bytes, returns the result."""
ReadMany = Callable[[Ranges], Sequence[bytes]]
"""Reads (start, length) ranges of an archive; every result has exactly the length asked for."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY = 1 << 28
_MAX_NAME = 1 << 12
_LEGACY = (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\nl\xfc\x9cF\xf9")


@dataclass(frozen=True, slots=True)
class Record:
    """One record: where its local header starts, its size in bytes, and the first byte that is not its own."""

    name: str
    header: int
    size: int
    limit: int
    method: int
    encrypted: bool


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of one archive by name, the common name prefix, and the bytes of ``data.pkl``."""

    records: dict[str, Record]
    prefix: str
    pickle: bytes

    def storage_record(self, key: str) -> str:
        """Name of the record of a storage."""
        return f"{self.prefix}/data/{key}"


def drive(steps: Steps[T], read: ReadMany) -> T:
    """Run steps over one archive."""
    return drive_many([steps], lambda ranges: read([(start, length) for _, start, length in ranges]))[0]


def drive_many(steps: Sequence[Steps[T]], read: Callable[[list[tuple[int, int, int]]], Sequence[bytes]]) -> list[T]:
    """Run steps over several archives side by side; ``read`` gets the (archive number, start, length) of one step of all at once."""
    results: dict[int, T] = {}
    sent: dict[int, Sequence[bytes] | None] = {i: None for i in range(len(steps))}
    while sent:
        asked: dict[int, Ranges] = {}
        for i, answer in sent.items():
            try:
                asked[i] = steps[i].send(answer) if answer is not None else next(steps[i])
            except StopIteration as stop:
                results[i] = stop.value
        parts = iter(read([(i, start, length) for i, ranges in asked.items() for start, length in ranges])) if asked else iter(())
        sent = {i: [next(parts) for _ in ranges] for i, ranges in asked.items()}
    return [results[i] for i in range(len(steps))]


def archive_steps(length: int, what: str) -> Steps[Archive]:
    """Parse an archive of ``length`` bytes: end record, central directory, ``data.pkl``. No storage is read.

    Raises UnsupportedError (torch's old format, compression, big endian, TorchScript), CorruptCheckpointError (truncated, inconsistent),
    FormatError (something else than a torch archive).
    """
    end_at, directory_at, directory_size, count = yield from _find_directory(length, what)
    if directory_at + directory_size > end_at:
        raise CorruptCheckpointError(
            f"{what}: the directory claims {directory_size} bytes at {directory_at}, but the end record starts at {end_at}"
        )
    if directory_size > _MAX_DIRECTORY or count * _CENTRAL.size > directory_size:
        raise CorruptCheckpointError(f"{what}: a directory of {count} records in {directory_size} bytes is impossible")
    records = _parse_directory((yield [(directory_at, directory_size)])[0], count, directory_at, what)
    roots = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        some = ", ".join(sorted(records)[:4])
        raise FormatError(f"{what}: a zip file, but not one that torch.save wrote: {len(roots)} records <name>/data.pkl (records: {some})")
    prefix = roots[0].removesuffix("/data.pkl")
    if f"{prefix}/constants.pkl" in records:
        raise UnsupportedError(f"{what}: a TorchScript archive; save the state_dict with torch.save instead")
    return Archive(records, prefix, (yield from _small_records(records, prefix, what)))


def _find_directory(length: int, what: str) -> Steps[tuple[int, int, int, int]]:
    """(first byte after the directory, its start, its size, number of records)."""
    # The end record, and before it the two zip64 records where there are any; never tensor bytes, because the directory comes before.
    tail_size = min(length, _END.size + _LOCATOR.size + _END64.size)
    if length < _END.size:
        raise (yield from _not_an_archive(length, what))
    tail = (yield [(length - tail_size, tail_size)])[0]
    at = tail_size - _END.size
    if not tail.startswith(b"PK\x05\x06", at):
        # A comment after the end record is legal; torch never writes one.
        tail_size = min(length, _END.size + 0xFFFF)
        tail = (yield [(length - tail_size, tail_size)])[0]
        at = tail.rfind(b"PK\x05\x06", 0, tail_size - _END.size + 4)
        if at < 0 or at + _END.size > tail_size:
            raise (yield from _not_an_archive(length, what))
    base = length - tail_size
    _, disk, disk2, count, total, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != tail_size:
        raise CorruptCheckpointError(f"{what}: {tail_size - at - _END.size} bytes after the zip end record, which announces {comment}")
    end = base + at
    if at >= _LOCATOR.size and tail.startswith(b"PK\x06\x07", at - _LOCATOR.size):
        _, _, end64, disks = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if disks > 1 or end64 + _END64.size > end - _LOCATOR.size:
            raise CorruptCheckpointError(f"{what}: the zip64 locator points to byte {end64} of {length}")
        raw = (yield [(end64, _END64.size)])[0]
        magic, _, _, _, disk, disk2, count, total, size, start = _END64.unpack(raw)
        if magic != b"PK\x06\x06":
            raise CorruptCheckpointError(f"{what}: no zip64 end record at byte {end64}")
        end = end64
    if disk or disk2 or count != total:
        raise CorruptCheckpointError(f"{what}: a zip file of several parts")
    return end, start, size, count


def _not_an_archive(length: int, what: str) -> Steps[FormatError | UnsupportedError]:
    head = (yield [(0, min(length, 32))])[0] if length else b""
    if head.startswith(_LEGACY):
        return UnsupportedError(
            f"{what}: written by torch.save in its old format (before torch 1.6, or _use_new_zipfile_serialization=False), whose tensors "
            "have no known place in the file. Convert it: torch.save(torch.load(path, weights_only=True), new_path)"
        )
    if head.startswith(b"PK\x03\x04"):
        return CorruptCheckpointError(f"{what}: the file is cut: it starts as a zip archive but has no end record in its {length} bytes")
    return FormatError(f"{what}: not a torch.save file: {length} bytes that start with {head[:8]!r}")


def _parse_directory(raw: bytes, count: int, directory_at: int, what: str) -> dict[str, Record]:
    found: list[tuple[int, int, str, int, bool]] = []
    names: set[str] = set()
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(raw):
            raise CorruptCheckpointError(f"{what}: the directory ends inside record {len(found)} of {count}")
        fields = _CENTRAL.unpack_from(raw, at)
        magic, flags, method, stored, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, header = fields[10], fields[11], fields[12], fields[16]
        stop = at + _CENTRAL.size + name_size + extra_size + comment_size
        if magic != b"PK\x01\x02" or stop > len(raw) or not 0 < name_size <= _MAX_NAME:
            raise CorruptCheckpointError(f"{what}: record {len(found)} of the directory is damaged")
        at += _CENTRAL.size
        try:
            name = raw[at : at + name_size].decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptCheckpointError(f"{what}: record {len(found)} has a name that is not text") from None
        size, stored, header = _zip64(raw[at + name_size : at + name_size + extra_size], size, stored, header, f"{what}: {name}")
        if name in names:
            raise CorruptCheckpointError(f"{what}: two records are named {name!r}")
        names.add(name)
        if header + LOCAL.size + name_size + stored > directory_at:
            raise CorruptCheckpointError(
                f"{what}: record {name!r} claims {stored} bytes at {header}, but the directory starts at {directory_at}"
            )
        if method == 0 and size != stored:
            raise CorruptCheckpointError(f"{what}: record {name!r} is stored but claims {stored} bytes for {size}")
        found.append((header, stored, name, method, bool(flags & 1)))
        at = stop
    found.sort()
    records: dict[str, Record] = {}
    for i, (header, stored, name, method, encrypted) in enumerate(found):
        limit = found[i + 1][0] if i + 1 < len(found) else directory_at
        if header + LOCAL.size + len(name.encode()) + stored > limit:
            raise CorruptCheckpointError(f"{what}: record {name!r} overlaps the one after it")
        records[name] = Record(name, header, stored, limit, method, encrypted)
    return records


def _zip64(extra: bytes, size: int, stored: int, header: int, what: str) -> tuple[int, int, int]:
    """Replace 0xFFFFFFFF by the 64-bit numbers of the zip64 extra field, in the order that APPNOTE 4.5.3 fixes."""
    if 0xFFFFFFFF not in (size, stored, header):
        return size, stored, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1 and at + length <= len(extra):
            values = [v for (v,) in struct.iter_unpack("<Q", extra[at : at + length // 8 * 8])]
            wanted = [size, stored, header]
            for i, value in enumerate(wanted):
                if value == 0xFFFFFFFF:
                    if not values:
                        raise CorruptCheckpointError(f"{what}: its zip64 field is too short")
                    wanted[i] = values.pop(0)
            return wanted[0], wanted[1], wanted[2]
        at += length
    raise CorruptCheckpointError(f"{what}: a 64-bit size or offset is announced but missing")


def _small_records(records: dict[str, Record], prefix: str, what: str) -> Steps[bytes]:
    """The bytes of ``data.pkl``, after checking the byte order."""
    wanted = [records[f"{prefix}/data.pkl"]]
    order = records.get(f"{prefix}/byteorder")
    if order is not None:
        wanted.append(order)
    # From each header to where the next record begins: header, name, padding and content in one read, and nothing of the next record.
    spans = yield [(r.header, min(r.limit - r.header, LOCAL.size + 2 * 0xFFFF + r.size)) for r in wanted]
    content = []
    for record, span in zip(wanted, spans, strict=True):
        start = local_payload(record, span, what) - record.header
        content.append(span[start : start + record.size])
    if order is not None and content[1] != b"little":
        raise UnsupportedError(f"{what}: written on a machine of byte order {content[1][:16]!r}; only little endian is supported")
    return content[0]


def local_payload(record: Record, header: bytes, what: str) -> int:
    """The byte at which the content of a record starts, from its local header (at least 30 bytes and the name).

    The name and the extra field are there a second time, and only their lengths here count for the position.
    """
    magic, _, flags, method, _, _, _, stored, size, name_size, extra_size = LOCAL.unpack_from(header)
    name = record.name.encode()
    if magic != b"PK\x03\x04" or header[LOCAL.size : LOCAL.size + name_size] != name:
        raise CorruptCheckpointError(f"{what}: there is no record {record.name!r} at byte {record.header}")
    if record.encrypted or flags & 1:
        raise UnsupportedError(f"{what}: record {record.name!r} is encrypted")
    if method != 0 or record.method != 0:
        raise UnsupportedError(f"{what}: record {record.name!r} is compressed; torch.save never does that")
    if not flags & 8 and (stored not in (record.size, 0xFFFFFFFF) or size not in (record.size, 0xFFFFFFFF)):
        raise CorruptCheckpointError(f"{what}: record {record.name!r} has {stored} bytes in one place and {record.size} in another")
    start: int = record.header + LOCAL.size + name_size + extra_size
    if start + record.size > record.limit:
        raise CorruptCheckpointError(f"{what}: record {record.name!r} overlaps the one after it")
    return start
