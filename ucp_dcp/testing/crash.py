"""A crash-consistency kit: run a save again and again, and break it at each single operation that it does on its store.

For a writer: :class:`Disk` is a store in memory that knows which bytes are durable. After a crash it shows what a disk may show then:
only what was durable, or also what was not, or half of that. ``Disk(concurrent=n)`` writes files as a local disk does: of known size, at
any place, from n threads at once. For a store: :class:`FaultyStore` puts the same faults between a save and any other store.
:func:`exhaust` does the loop::

    from ucp_dcp.testing.crash import Disk, exhaust

    def fresh():
        disk = Disk()
        save_old(disk.store())
        return disk

    report = exhaust(fresh, save=lambda disk: save_new(disk.store()), check=lambda store: "old" if ... else "new")

``check`` opens what survived and raises when it is neither the old nor the new checkpoint, whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import UCPError
from ..storage.store import Store
from .crash_disk import SURVIVALS, Disk, DiskStore, SizedDiskStore, Survival
from .faults import MODES, Fault, Killed, Mode
from .faulty_store import FaultyStore

__all__ = [
    "MODES",
    "SURVIVALS",
    "Disk",
    "DiskStore",
    "ExhaustReport",
    "Fault",
    "FaultyStore",
    "Killed",
    "Mode",
    "SizedDiskStore",
    "Survival",
    "exhaust",
]


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
    select: Callable[[int, str, Mode], bool] = lambda number, name, mode: True,
) -> ExhaustReport:
    """Run ``save`` once whole, then once for each of its operations and each mode, and look at what is left each time.

    fresh: a disk as it is before the save. save: must raise when it fails; a broken save that returns as if all was well is an error here.
    check: opens the store and says what it found ("old", "new"); raises when that is neither. again: a later save, which must succeed on
    whatever a killed or lost process left, and after which ``check`` must say "new". select: which operations break, by their number and
    name in the undisturbed save, and how; default: every one in every mode.

    Raises AssertionError that names the operation, the mode and the cause.
    """
    disk = fresh()
    disk.arm(None)
    save(disk)
    report = ExhaustReport(disk.operations)
    if check(disk.store()) != "new":
        raise AssertionError("after an undisturbed save the new checkpoint is not there")
    for at, name in enumerate(report.operations):
        for mode in (mode for mode in modes if select(at, name, mode)):
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
