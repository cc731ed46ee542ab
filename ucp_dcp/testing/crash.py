"""A crash-consistency kit: run a save again and again, and break it at each single operation that it does on its store.

For a writer: :class:`Disk` is a store in memory that knows which bytes are durable. After a crash it shows what a disk may show then:
only what was durable, or also what was not, or half of that. For a store: :class:`FaultyStore` puts the same faults between a save and any
other store. :func:`exhaust` does the loop::

    from ucp_dcp.testing.crash import Disk, exhaust

    def fresh():
        disk = Disk()
        save_old(disk.store())
        return disk

    report = exhaust(fresh, save=lambda disk: save_new(disk.store()), check=lambda store: "old" if ... else "new")

``check`` opens what survived and raises when it is neither the old nor the new checkpoint, whole.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..errors import CorruptCheckpointError, FormatError, StoreError, StoreExistsError, StoreNotFoundError, UCPError
from ..storage.store import Entry, Range, Store, byte_view, checked_path, target_views

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Disk", "ExhaustReport", "Fault", "FaultyStore", "Killed", "Mode", "Survival", "exhaust"]

Mode: TypeAlias = Literal["kill", "kill_after", "lose", "fail", "torn"]
"""kill: everything ends before the operation; kill_after: right behind it; lose: only the rank whose store this is ends before it (SIGKILL
of one process); fail: it raises, nothing happened, and the program goes on; torn: half of a write happens, then it raises."""
Survival: TypeAlias = Literal["durable", "all", "half"]
"""What a crash leaves of bytes that were not durable: nothing, all, or the first half of each file."""

MODES: tuple[Mode, ...] = ("kill", "kill_after", "lose", "fail", "torn")
SURVIVALS: tuple[Survival, ...] = ("durable", "all", "half")


class Killed(BaseException):
    """The process has ended. No handler may do anything on the store any more; each further operation raises this again."""


@dataclass
class Fault:
    """Break operation number ``at`` (counted from 0). ``errno``: what a failing operation says."""

    at: int
    mode: Mode
    errno: int = errno.ENOSPC


@dataclass
class _Faults:
    """Counts operations and says which one breaks."""

    fault: Fault | None = None
    operations: list[str] = field(default_factory=list)
    dead: bool = False
    lost: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, name: str, path: str, owner: int = 0) -> bool:
        """One operation of the store ``owner`` begins. True when half of it shall happen. Raises Killed or StoreError."""
        with self.lock:
            if self.dead or owner in self.lost:
                raise Killed(f"{name} {path} of a process that has ended")
            number = len(self.operations)
            self.operations.append(f"{name} {path}")
        if self.fault is None or self.fault.at != number:
            return False
        if self.fault.mode == "kill":
            self.dead = True
            raise Killed(f"operation {number}: {name} {path}")
        if self.fault.mode == "lose":
            self.lost.add(owner)
            raise Killed(f"operation {number}: {name} {path}")
        if self.fault.mode == "fail" or (self.fault.mode == "torn" and name not in ("write", "put")):
            raise StoreError(f"{path}: {name} failed: {errno.errorcode[self.fault.errno]}")
        return self.fault.mode == "torn"

    def done(self) -> None:
        """The operation that began last has happened."""
        if self.fault is not None and self.fault.mode == "kill_after" and self.fault.at == len(self.operations) - 1:
            self.dead = True
            raise Killed(f"after operation {self.fault.at}")

    def torn(self, name: str, path: str) -> StoreError:
        """What a half-done operation raises."""
        return StoreError(f"{path}: {name} failed half way: {errno.errorcode[errno.EIO]}")


# -- a disk --------------------------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """``durable``: what is on the disk for certain, None: nothing."""

    content: bytearray
    durable: bytes | None = None
    mtime: float = 0.0


class Disk:
    """Files in memory with the durability of a file system, and the faults of :class:`Fault`.

    A file that is being created is volatile until it is closed; a put and a delete are durable when they return. Any number of stores, one
    for each rank, share a disk.
    """

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._clock = 1_000_000.0
        self.faults = _Faults()

    @property
    def operations(self) -> list[str]:
        """What was done so far, in order: ``"write g-.../__0_0.distcp"``."""
        return list(self.faults.operations)

    def store(self) -> DiskStore:
        """A store over this disk."""
        return DiskStore(self)

    def arm(self, fault: Fault | None) -> None:
        """Count from 0 again, and break what ``fault`` says."""
        self.faults = _Faults(fault)

    def after_crash(self, survival: Survival) -> Disk:
        """The disk as the next process finds it."""
        out = Disk()
        out._clock = self._clock + 1
        for path, file in self._files.items():
            content: bytes | None = file.durable
            if survival == "all":
                content = bytes(file.content)
            elif survival == "half" and bytes(file.content) != file.durable:
                content = bytes(file.content[: len(file.content) // 2])
            if content is not None:
                out._files[path] = _File(bytearray(content), content, file.mtime)
        return out

    def copy(self) -> Disk:
        """Another disk with the same files."""
        out = Disk()
        out._clock = self._clock
        out._files = {path: _File(bytearray(f.content), f.durable, f.mtime) for path, f in self._files.items()}
        return out

    def now(self) -> float:
        """A clock that moves with each change."""
        self._clock += 1e-3
        return self._clock


class DiskStore:
    """A :class:`~ucp_dcp.storage.store.Store` over a :class:`Disk`, of one rank."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def _step(self, name: str, path: str) -> bool:
        return self._disk.faults.step(name, path, id(self))

    @property
    def url(self) -> str:
        """For messages only."""
        return "crash-disk"

    def _file(self, path: str) -> _File:
        try:
            return self._disk._files[checked_path(path)]
        except KeyError:
            raise StoreNotFoundError(f"{path} does not exist") from None

    def size(self, path: str) -> int:
        """See :meth:`Store.size`."""
        self._step("size", path)
        return len(self._file(path).content)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: range of {length} bytes from byte {start}; neither may be negative")
        self._step("read", path)
        content = self._file(path).content
        if length is None:
            length = max(len(content) - start, 0)
        if start + length > len(content):
            raise CorruptCheckpointError(f"{path}: {length} bytes from byte {start} were wanted, but the file has {len(content)} bytes")
        return bytes(content[start : start + length])

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`."""
        for wanted, view in zip(ranges, target_views(ranges, into), strict=True):
            view[:] = self.read(wanted.path, wanted.start, wanted.length)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[_DiskWriter]:
        """See :meth:`Store.create`."""
        disk, faults = self._disk, self._disk.faults
        self._step("create", path)
        if checked_path(path) in disk._files:
            raise StoreExistsError(f"{path} exists")
        file = disk._files[path] = _File(bytearray(), None, disk.now())
        try:
            faults.done()
            yield _DiskWriter(self, path, file)
            self._step("close", path)
            file.durable = bytes(file.content)
            faults.done()
        except Exception:  # not Killed: the dead do not clean up
            disk._files.pop(path, None)
            raise

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`."""
        disk, faults = self._disk, self._disk.faults
        half = self._step("put", path)
        if if_absent and checked_path(path) in disk._files:
            raise StoreExistsError(f"{path} exists")
        if half:  # in a temporary file, which nobody cleans up when the program is ended by this
            raise faults.torn("put", path)
        content = bytes(byte_view(data))
        disk._files[checked_path(path)] = _File(bytearray(content), content, disk.now())
        faults.done()

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`. Each file is one operation."""
        for path in paths:
            self._step("delete", path)
            self._disk._files.pop(checked_path(path), None)
            self._disk.faults.done()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        self._step("list", prefix)
        for path, file in list(self._disk._files.items()):
            if path.startswith(prefix):
                yield Entry(path, len(file.content), file.mtime)


class _DiskWriter:
    def __init__(self, store: DiskStore, path: str, file: _File) -> None:
        self._store, self._path, self._file = store, path, file

    def write(self, data: Buffer) -> int:
        """Append."""
        faults = self._store._disk.faults
        half = self._store._step("write", self._path)
        view = byte_view(data)
        self._file.content += view[: view.nbytes // 2] if half else view
        if half:
            raise faults.torn("write", self._path)
        faults.done()
        return view.nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return len(self._file.content)


# -- any store -----------------------------------------------------------------------------------------------------------------


class FaultyStore:
    """Any store with faults in front of it. After a kill its files stay as they are; open the inner store to look at them."""

    def __init__(self, inner: Store, fault: Fault | None = None) -> None:
        self.inner = inner
        self.faults = _Faults(fault)
        self._left_open: list[object] = []

    @property
    def url(self) -> str:
        """That of the inner store."""
        return self.inner.url

    def size(self, path: str) -> int:
        """See :meth:`Store.size`."""
        self.faults.step("size", path)
        return self.inner.size(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        self.faults.step("read", path)
        return self.inner.read(path, start, length)

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`."""
        self.faults.step("read", ranges[0].path if ranges else "")
        self.inner.read_ranges(ranges, into)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[_FaultyWriter]:
        """See :meth:`Store.create`."""
        self.faults.step("create", path)
        context = self.inner.create(path)
        writer = context.__enter__()
        try:
            self.faults.done()
            yield _FaultyWriter(self.faults, writer, path)
            self.faults.step("close", path)
        except Killed:
            self._left_open.append(context)  # closing it would clean up, which the dead do not
            raise
        except BaseException as error:
            context.__exit__(type(error), error, error.__traceback__)
            raise
        context.__exit__(None, None, None)
        self.faults.done()

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`."""
        if self.faults.step("put", path):
            raise self.faults.torn("put", path)
        self.inner.put(path, data, if_absent=if_absent)
        self.faults.done()

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`."""
        for path in paths:
            self.faults.step("delete", path)
            self.inner.delete(path)
            self.faults.done()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        self.faults.step("list", prefix)
        return self.inner.list(prefix)


class _FaultyWriter:
    def __init__(self, faults: _Faults, inner: object, path: str) -> None:
        self._faults, self._inner, self._path = faults, inner, path

    def write(self, data: Buffer) -> int:
        """Append."""
        view = byte_view(data)
        if self._faults.step("write", self._path):
            self._inner.write(view[: view.nbytes // 2])  # type: ignore[attr-defined]
            raise self._faults.torn("write", self._path)
        written = int(self._inner.write(view))  # type: ignore[attr-defined]
        self._faults.done()
        return written

    def tell(self) -> int:
        """Bytes so far."""
        return int(self._inner.tell())  # type: ignore[attr-defined]


# -- the loop ------------------------------------------------------------------------------------------------------------------


@dataclass
class ExhaustReport:
    """operations: of one undisturbed save. runs: broken saves. outcomes: how often each (mode, what ``check`` said) was seen."""

    operations: list[str]
    runs: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)


def exhaust(
    fresh: Callable[[], Disk],
    save: Callable[[Disk], None],
    check: Callable[[Store], str],
    *,
    modes: Sequence[Mode] = MODES,
    survivals: Sequence[Survival] = SURVIVALS,
    again: Callable[[Disk], None] | None = None,
) -> ExhaustReport:
    """Run ``save`` once whole, then once for each of its operations and each mode, and look at what is left each time.

    fresh: a disk as it is before the save. save: must raise when it fails; a broken save that returns as if all was well is an error here.
    check: opens the store and says what it found ("old", "new"); raises when that is neither. again: a later save, which must succeed on
    whatever a killed or lost process left, and after which ``check`` must say "new".

    Raises AssertionError that names the operation, the mode and the cause.
    """
    disk = fresh()
    disk.arm(None)
    save(disk)
    report = ExhaustReport(disk.operations)
    if check(disk.store()) != "new":
        raise AssertionError("after an undisturbed save the new checkpoint is not there")
    for at, name in enumerate(report.operations):
        for mode in modes:
            disk = fresh()
            disk.arm(Fault(at, mode))
            where = f"operation {at} ({name}), {mode}"
            failed = False
            try:
                save(disk)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # DCP wraps what ends it, Killed too, in an exception of its own
                failed = True
                if not disk.faults.dead and mode in ("kill", "kill_after"):
                    raise AssertionError(f"{where}: the save failed before anything was broken: {error}") from error
            ended = disk.faults.dead
            if ended and not failed:
                raise AssertionError(f"{where}: the save returned though its process had ended")
            for survival in survivals if ended else ("all",):
                left = disk.after_crash(survival)
                try:
                    found = check(left.store())
                except UCPError as error:
                    raise AssertionError(f"{where}, {survival}: what is left cannot be opened: {error}") from error
                if not ended and not failed and found != "new":
                    raise AssertionError(f"{where}: the save reported success, and the {found} checkpoint is there")
                report.outcomes[(mode, found)] += 1
                # what a later save finds differs by what ended the earlier one, hardly by how
                if again is not None and mode in ("kill", "lose"):
                    again(left)
                    if check(left.store()) != "new":
                        raise AssertionError(f"{where}, {survival}: a later save did not put the new checkpoint there")
            report.runs += 1
    return report
