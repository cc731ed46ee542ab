"""Is every byte of a checkpoint what its writer wrote? ``ucp_dcp.verify()`` and ``ucp verify``.

Ours: manifest, every index section and the padding between them, both copies of ``.metadata``, and of every data file its size, its sidecar
and all of its blocks. Stock DCP and DeepSpeed: the structure, and the CRC32 that each zip record carries; bytes between records have no
digest there, and are counted as unverifiable. Safetensors: headers, sizes, and that no piece of a tensor is missing; there are no digests.
"""

from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from .catalog import FileRow
from .errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StoreError, UCPError
from .formats import DcpSource, Source, open_dcp, open_source, open_ucp
from .formats.dcp import METADATA
from .formats.megatron_core import MegatronSource
from .formats.safetensors import SafetensorsSource
from .geometry import full_box
from .names import Role
from .planners.consistency import Doubts, states_of
from .storage.blocks import BlockHasher, read_digests
from .storage.commit import is_generation
from .storage.manifest import MANIFEST, MAX_BYTES, FileDigest, Manifest
from .storage.store import Range, Store, open_store
from .transfer import default_threads, tensors_at

if TYPE_CHECKING:
    import os

__all__ = ["Problem", "VerifyReport", "verify"]

_PART = 1 << 20
_TASK = 32 << 20
_SHOWN = 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage: file, what is wrong, bytes ``start .. stop`` of it (-1: not known), and (key, offset, size) of the tensors that lie there."""

    file: str
    message: str
    start: int = -1
    stop: int = -1
    tensors: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        where = f", bytes {self.start} to {self.stop}" if self.start >= 0 else ""
        names = [f"{key!r} box {offset} + {size}" if size else repr(key) for key, offset, size in self.tensors]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.file}{where}: {self.message}" + (f"; there lie: {shown}" if shown else "")


@dataclass(slots=True)
class VerifyReport:
    """What was found. ``str(report)`` is for people, ``to_json()`` for programs.

    Attributes:
        problems: damage; the checkpoint is whole when there is none.
        files, bytes: looked at. bytes_verified: compared with a digest; bytes_unverifiable: read by a load, but without any digest.
        unknown_files: files that belong to no part of the checkpoint. They are no problem.
        notes: what is remarkable and no damage.
    """

    url: str
    format: str
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    bytes_verified: int = 0
    bytes_unverifiable: int = 0
    unknown_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when no damage was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        speed = f", {self.bytes / self.seconds / 2**30:.2f} GiB/s" if self.seconds > 0 else ""
        lines = [
            f"verify: {'ok' if self.ok else f'{len(self.problems):,} problems'}: {self.files:,} files, {self.bytes:,} bytes in "
            f"{self.seconds:.2f} s{speed}; {self.bytes_verified:,} bytes verified, {self.bytes_unverifiable:,} without a digest"
        ]
        lines += [f"  problem: {p}" for p in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  problem: and {len(self.problems) - _SHOWN:,} more")
        lines += [f"  note: {note}" for note in self.notes]
        if self.unknown_files:
            more = f" and {len(self.unknown_files) - 3:,} more" if len(self.unknown_files) > 3 else ""
            lines.append(f"  note: not part of the checkpoint: {', '.join(self.unknown_files[:3])}{more}")
        return "\n".join(lines)


def verify(
    url: str | os.PathLike[str] | Store,
    *,
    prefer: Literal["ucp", "stock"] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read a whole checkpoint and compare it with its digests. Nothing is changed; damage is reported, not raised.

    Args:
        url: a folder, URL or store with a checkpoint of any known format.
        prefer: which checkpoint is meant where a plain ``dcp.save`` wrote over one of ours.
        threads: that read and digest; default: the cores of this process, at most 4.
        progress: is called with (bytes done, bytes in all), from any thread, one call at a time.

    Raises CheckpointNotFoundError, UnsupportedError, StoreError for a store that cannot be read at all.
    """
    store = open_store(url, **dict(storage_options or {}))
    begin = time.perf_counter()
    work = _Work(store, threads or getattr(store, "threads", None) or default_threads(), progress)
    if prefer != "stock" and (prefer == "ucp" or _size(store, MANIFEST) is not None):
        report = VerifyReport(store.url, "ucp")
        _ours(store, report, work)
    else:
        report = _foreign(store, prefer, work)
    report.problems.sort(key=lambda p: (p.file, p.start))
    report.seconds = time.perf_counter() - begin
    return report


def _size(store: Store, path: str) -> int | None:
    try:
        return store.size(path)
    except FileNotFoundError:
        return None


class _Work:
    """Tasks, done by several threads; each returns its problems and the bytes that it verified."""

    def __init__(self, store: Store, threads: int, progress: Progress | None) -> None:
        self.store = store
        self._threads = threads
        self._progress = progress
        self._lock = threading.Lock()
        self._tasks: list[tuple[int, Callable[[], list[Problem]]]] = []
        self._done = self._total = 0

    def add(self, nbytes: int, task: Callable[[], list[Problem]]) -> None:
        self._tasks.append((nbytes, task))

    def advance(self, nbytes: int) -> None:
        """Bytes that were read."""
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)

    def run(self, report: VerifyReport) -> None:
        self._total += sum(nbytes for nbytes, _ in self._tasks)
        report.bytes += sum(nbytes for nbytes, _ in self._tasks)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ucp-verify") as pool:
            futures = [pool.submit(task) for _, task in self._tasks]
            try:
                for future in futures:
                    report.problems += future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._tasks = []
        if self._progress is not None:
            self._progress(self._total, self._total)

    def parts(self, path: str, start: int, length: int) -> Iterator[memoryview]:
        """Consecutive bytes of a file, a part at a time in the same memory."""
        buffer = memoryview(bytearray(min(_PART, length)))
        for at in range(start, start + length, _PART):
            part = buffer[: min(_PART, start + length - at)]
            self.store.read_ranges([Range(path, at, len(part))], [part])
            self.advance(len(part))
            yield part


# -- ours ------------------------------------------------------------------------------------------------------------------------


def _ours(store: Store, report: VerifyReport, work: _Work) -> None:
    size = _size(store, MANIFEST)
    if size is None:
        raise CheckpointNotFoundError(f"{store.url}: there is no {MANIFEST} here")
    report.files, report.bytes = 1, size
    try:
        if size > MAX_BYTES:
            raise CorruptCheckpointError(f"it has {size} bytes; a manifest has at most {MAX_BYTES}")
        manifest = Manifest.from_bytes(store.read(MANIFEST, 0, size))
    except FormatError as error:
        report.problems.append(Problem(MANIFEST, f"{error}. Nothing else can be found without it"))
        return
    report.bytes_verified += size
    known = {MANIFEST, manifest.index_path}
    _index(store, manifest, report, work)
    _metadata(store, manifest, report, work, known)
    try:
        source: Source | None = open_ucp(store, manifest)
        assert source is not None
        source.catalog.validate()
        files = source.catalog.files
    except (FormatError, StoreError) as error:
        # the damaged section is found by its own digest as well
        report.problems.append(Problem(manifest.index_path, f"the catalog cannot be opened, so data files were not looked at: {error}"))
        source, files = None, ()
    for number, row in enumerate(files):
        known |= {row.path} if row.blocks is None else {row.path, row.blocks.path}
        assert source is not None
        _data_file(source, number, row, report, work)
    work.run(report)
    without = [row for row in files if row.blocks is None]
    if without:
        report.notes.append(f"{len(without):,} data files have no digests")
    if source is not None:
        report.unknown_files = _unknown(store, known)


def _index(store: Store, manifest: Manifest, report: VerifyReport, work: _Work) -> None:
    path = manifest.index_path
    size = _size(store, path)
    report.files += 1
    if size != manifest.index_size:
        found = "is missing" if size is None else f"has {size} bytes"
        report.problems.append(Problem(path, f"{found}, the manifest states {manifest.index_size}"))
    if size is None:
        return
    at = 0
    for name, section in sorted(manifest.sections.items(), key=lambda item: (item[1].offset, item[1].size)):
        if section.offset > at:
            work.add(section.offset - at, partial(_zeros, work, path, at, section.offset, report))
        work.add(section.size, partial(_digest, work, path, section.offset, section.size, section.xxh3, f"section {name!r}", report))
        at = section.offset + section.size
    if manifest.index_size > at:
        work.add(manifest.index_size - at, partial(_zeros, work, path, at, manifest.index_size, report))


def _zeros(work: _Work, path: str, start: int, stop: int, report: VerifyReport) -> list[Problem]:
    try:
        for part in work.parts(path, start, stop - start):
            if part.tobytes().count(0) != len(part):
                return [Problem(path, "the padding between sections is not zero", start, stop)]
    except UCPError as error:
        return [Problem(path, str(error), start, stop)]
    _verified(work, report, stop - start)
    return []


def _digest(work: _Work, path: str, start: int, length: int, expected: str, what: str, report: VerifyReport) -> list[Problem]:
    hasher = xxhash.xxh3_128()
    try:
        for part in work.parts(path, start, length):
            hasher.update(part)
    except UCPError as error:
        return [Problem(path, f"{what}: {error}", start, start + length)]
    if hasher.hexdigest() != expected:
        return [Problem(path, f"{what} is damaged: its digest is {hasher.hexdigest()}, expected {expected}", start, start + length)]
    _verified(work, report, length)
    return []


def _verified(work: _Work, report: VerifyReport, nbytes: int) -> None:
    with work._lock:
        report.bytes_verified += nbytes


def _metadata(store: Store, manifest: Manifest, report: VerifyReport, work: _Work, known: set[str]) -> None:
    copy = f"{manifest.generation}/{METADATA}"
    if manifest.metadata is None:
        if _size(store, METADATA) is not None:
            report.notes.append(f"the root holds a {METADATA} that this checkpoint did not publish")
        return
    known |= {METADATA, copy}
    for path in (METADATA, copy):
        size = _size(store, path)
        report.files += 1
        wanted = manifest.metadata
        if path == METADATA and size is not None and size != wanted.size and _is(store, size, manifest.previous_metadata):
            report.notes.append(f"{METADATA} is that of the save before: a crash came before it was replaced; the next save repairs it")
        elif size is None:
            report.problems.append(Problem(path, f"is missing; the manifest states {wanted.size} bytes"))
        elif size != wanted.size:
            report.problems.append(
                Problem(path, f"has {size} bytes, the manifest states {wanted.size}; damaged, or written by a plain dcp.save")
            )
        else:
            work.add(size, partial(_one_metadata, work, path, wanted, manifest, report))


def _one_metadata(work: _Work, path: str, wanted: FileDigest, manifest: Manifest, report: VerifyReport) -> list[Problem]:
    found = _digest(work, path, 0, wanted.size, wanted.xxh3, "the stock metadata", report)
    if found and path == METADATA and _is(work.store, wanted.size, manifest.previous_metadata):
        with work._lock:
            report.notes.append(f"{METADATA} is that of the save before: a crash came before it was replaced; the next save repairs it")
        return []
    return found


def _is(store: Store, size: int, wanted: FileDigest | None) -> bool:
    return wanted is not None and size == wanted.size and FileDigest.of(store.read(METADATA)) == wanted


def _data_file(source: Source, number: int, row: FileRow, report: VerifyReport, work: _Work) -> None:
    store = source.store
    report.files += 1
    size = _size(store, row.path)
    if size != row.size:
        found = "is missing" if size is None else f"has {size} bytes"
        tensors = _tensors(source, number, 0 if size is None else min(size, row.size), row.size)
        start, stop = (-1, -1) if size is None else (min(size, row.size), max(size, row.size))
        report.problems.append(Problem(row.path, f"{found}, the index states {row.size}", start, stop, tensors))
    if row.blocks is None:
        report.bytes += row.size
        report.bytes_unverifiable += row.size
        return
    report.files += 1
    try:
        digests = read_digests(store, row)
    except UCPError as error:
        report.problems.append(Problem(row.blocks.path, str(error)))
        return
    assert digests is not None
    report.bytes += digests.nbytes
    report.bytes_verified += digests.nbytes
    if size is None:
        return
    step = row.blocks.size
    there = row.size if size >= row.size else size // step * step
    each = max(1, _TASK // step)
    for first in range(0, -(-there // step), each):
        start, stop = first * step, min((first + each) * step, there)
        work.add(stop - start, partial(_blocks, source, number, row, start, stop, digests, work, report))


def _blocks(
    source: Source, number: int, row: FileRow, start: int, stop: int, digests: np.ndarray[Any, Any], work: _Work, report: VerifyReport
) -> list[Problem]:
    assert row.blocks is not None
    step = row.blocks.size
    hasher = BlockHasher(step)
    try:
        for part in work.parts(row.path, start, stop - start):
            hasher.update(part)
    except UCPError as error:
        return [Problem(row.path, str(error), start, stop, _tensors(source, number, start, stop))]
    found = hasher.digests()
    expected = digests[start // step : start // step + len(found)]
    bad = np.flatnonzero(found != expected).tolist()
    problems = []
    lost = 0
    for k in bad:
        a, b = start + k * step, min(start + (k + 1) * step, row.size)
        lost += b - a
        message = f"damaged: its digest is {int(found[k]):016x}, expected {int(expected[k]):016x}"
        problems.append(Problem(row.path, message, a, b, _tensors(source, number, a, b)))
    _verified(work, report, stop - start - lost)
    return problems


def _tensors(source: Source, file: int, start: int, stop: int) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((key, tuple(box.offset), tuple(box.size)) for key, box in tensors_at(source, file, start, stop))


def _unknown(store: Store, known: set[str]) -> list[str]:
    """Files that are no part of the checkpoint; unfinished and former generations among them."""
    out = []
    for entry in store.list(""):
        if entry.path not in known:
            top = entry.path.split("/")[0]
            own = any(k.startswith(top + "/") for k in known)
            out.append(top + "/" if "/" in entry.path and is_generation(top) and not own else entry.path)
    return sorted(set(out))


# -- stock DCP, torch archives -------------------------------------------------------------------------------------------------------


def _foreign(store: Store, prefer: Literal["ucp", "stock"] | None, work: _Work) -> VerifyReport:
    try:
        source = open_dcp(store) if prefer == "stock" else open_source(store)
    except FormatError as error:
        if isinstance(error, CorruptCheckpointError) or _size(store, METADATA) is not None:
            report = VerifyReport(store.url, "dcp" if _size(store, METADATA) is not None else "unknown")
            report.problems.append(Problem(METADATA if report.format == "dcp" else store.url, f"the checkpoint cannot be opened: {error}"))
            return report
        raise
    report = VerifyReport(store.url, source.format)
    if isinstance(source, SafetensorsSource):
        _safetensors(source, report, alone=source.store.url != store.url)
        return report
    catalog = source.catalog
    known = {row.path for row in catalog.files}
    covered: dict[str, int] = {}
    base = source.base if isinstance(source, MegatronSource) else source
    if isinstance(source, MegatronSource):
        _state(source, report)
        known |= source.side_files
    if isinstance(base, DcpSource):
        metadata = f"{base.prefix}{METADATA}"
        known.add(metadata)
        size = store.size(metadata)
        report.files, report.bytes, report.bytes_unverifiable = 1, size, size
        for what, number, start, length in _items(base):
            row = catalog.files[number]
            covered[row.path] = covered.get(row.path, 0) + length
            work.add(length, partial(_archive, source, number, start, length, what, work, report))
    else:
        for number, row in enumerate(catalog.files):
            size = _size(store, row.path) or 0
            covered[row.path] = size
            work.add(size, partial(_archive, source, number, 0, size, row.path, work, report))
    for row in catalog.files:
        report.files += 1
        size = _size(store, row.path) or 0
        report.bytes_unverifiable += max(0, size - covered.get(row.path, 0))
    work.run(report)
    report.unknown_files = _unknown(store, known)
    return report


def _state(source: Source, report: VerifyReport) -> None:
    """Where the writer is known to write wrong optimizer state at times: every master against its weight."""
    if not source.doubt:
        return
    doubts = Doubts(source, False)
    catalog = source.catalog
    for row in catalog.tensors():
        if row.role == Role.MASTER:
            try:
                doubts.look(row, [full_box(row.shape)])
            except UCPError as error:
                report.problems.append(Problem(source.store.url, f"{row.name} cannot be compared with its weight: {error}"))
    states = states_of(catalog)
    for fqn, what in doubts.broken.items():
        message = f"the optimizer state of {fqn} ({', '.join(states[fqn])}) is wrong: its master, rounded, is not the weight ({what})"
        report.problems.append(Problem(source.store.url, message))
    if doubts.broken:
        report.notes.append(source.doubt)
    if doubts.unproven:
        report.notes.append(f"unproven, nothing to compare their optimizer state with: {', '.join(sorted(doubts.unproven))}")


def _safetensors(source: SafetensorsSource, report: VerifyReport, alone: bool) -> None:
    """Opening has checked headers against files, and the index against headers. ``alone``: the URL is that of a file."""
    catalog = source.catalog
    report.files = len(catalog.files)
    report.bytes = report.bytes_unverifiable = sum(row.size for row in catalog.files)
    report.notes.append("safetensors files carry no digests: headers and sizes were checked, the bytes of tensors were not read")
    for t, cover in source.faults():
        tensors = tuple((catalog.keys[t], tuple(box.offset), tuple(box.size)) for box in cover.holes)
        report.problems.append(Problem(source.store.url, "no file holds a part of a tensor; a file is missing", tensors=tensors))
    known = {row.path for row in catalog.files}
    if not alone:
        report.unknown_files = [path for path in _unknown(source.store, known) if path.endswith(".safetensors")]


def _items(source: Source) -> Iterator[tuple[str, int, int, int]]:
    """(name, file, start, length) of every item of a stock checkpoint."""
    catalog = source.catalog
    assert isinstance(source, DcpSource)
    lengths = source.item_lengths
    files, starts = catalog.chunk_file.tolist(), catalog.chunk_offset.tolist()
    for t in range(catalog.n_tensors):
        first, last = catalog.chunk_range(t)
        key = catalog.keys[t]
        for chunk in range(first, last):
            yield f"tensor {key!r}", files[chunk], starts[chunk], int(lengths[chunk])
    for row in catalog.objects:
        if row.encoding != "inline":
            yield f"object {row.key!r}", row.file, row.offset, row.length


class _Window(io.RawIOBase):
    """Bytes of a store as a file, for zipfile."""

    def __init__(self, work: _Work, path: str, start: int, length: int) -> None:
        self._work, self._path, self._start, self._length, self._at = work, path, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        if count:
            self._work.store.read_ranges([Range(self._path, self._start + self._at, count)], [view[:count]])
            self._at += count
        return count


def _archive(source: Source, number: int, start: int, length: int, what: str, work: _Work, report: VerifyReport) -> list[Problem]:
    """The CRC32 of every record of one archive."""
    path = source.catalog.files[number].path
    problems: list[Problem] = []
    verified = without = 0

    def wrong(message: str, a: int, b: int) -> None:
        problems.append(Problem(path, f"{what}: {message}", a, b, _tensors(source, number, a, b)))

    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(work, path, start, length), _PART)) as archive:
            for info in archive.infolist():
                a, b = start + info.header_offset, start + info.header_offset + info.file_size
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size > length:
                    wrong(f"record {info.filename!r} is compressed or encrypted, which torch.save never does", a, b)
                    continue
                if info.CRC == 0 and info.flag_bits & 8 and info.file_size and info.filename.endswith("/data/0"):
                    without += info.file_size  # our own writer states no CRC32 of payloads (docs/format.md, "Data files")
                    work.advance(info.file_size)
                    continue
                try:
                    with archive.open(info) as record:
                        while part := record.read(_PART):
                            work.advance(len(part))
                except zipfile.BadZipFile as error:
                    wrong(f"record {info.filename!r} is damaged: {error} (expected {info.CRC:08x})", a, b)
                else:
                    verified += info.file_size
    except (zipfile.BadZipFile, UCPError, EOFError, NotImplementedError, UnicodeDecodeError, ValueError) as error:
        wrong(f"its zip structure is damaged: {error}", start, start + length)
    _verified(work, report, verified)
    with work._lock:
        report.bytes_unverifiable += max(0, length - verified) if not problems else without
    return problems
