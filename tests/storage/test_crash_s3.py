"""Saves of four ranks to a real S3 server, broken at each operation of the store and at each request: the old or the new checkpoint, whole,
and after ``gc`` nothing else, no upload either."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import ucp_dcp
from storage.test_crash import RANKS, found, save_together
from ucp_dcp.errors import CheckpointNotFoundError
from ucp_dcp.storage.object_store import ObjectStore
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.crash import MODES, Fault, FaultyStore, Mode
from ucp_dcp.testing.fault_proxy import FaultProxy, Rule
from ucp_dcp.testing.servers import options_for

SMALL = 8
PARTS = 3 << 19  # elements: 6 MiB, two parts
FOREVER = 10**6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def base(seaweed_server: Any) -> ObjectStore:
    store = open_store("s3://bucket/x", part_size=5 << 20, **seaweed_server.storage_options)
    assert isinstance(store, ObjectStore)
    return store


@pytest.fixture(scope="module")
def proxy(seaweed_server: Any) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def through(proxy: FaultProxy) -> ObjectStore:
    store = open_store("s3://bucket/x", part_size=5 << 20, **options_for(proxy.endpoint))
    assert isinstance(store, ObjectStore)
    return store


def place(base: ObjectStore, root: str, deadline: float | None = None) -> ObjectStore:
    options = base.options if deadline is None else dataclasses.replace(base.options, deadline=deadline)
    return ObjectStore(base.client, "s3", root, options)


def new_root() -> str:
    return f"bucket/crash-{uuid.uuid4().hex}"


def broken(stores: Sequence[Any], n: int) -> bool:
    """Whether a save of 2.0 said that it failed."""
    try:
        save_together(list(stores), 2.0, n=n)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return True
    return False


def whole(store: ObjectStore, n: int, old: bool, failed: bool) -> str:
    """What is there before and after gc, which must leave nothing else."""
    allowed = (1.0, 2.0) if old else (None, 2.0)
    value = there(store, n)
    assert value in allowed
    assert failed or value == 2.0, "the save reported success"
    ucp_dcp.gc(store, older_than=0, grace=0, delete=True)
    assert there(store, n) == value
    assert list(store.uploads()) == []
    paths = {entry.path for entry in store.list()}
    generations = {path.partition("/")[0] for path in paths if "/" in path}
    if value is None:
        assert paths == set()
    else:
        assert len(generations) == 1 and {path for path in paths if "/" not in path} == {"ucp.json", ".metadata"}
        assert ucp_dcp.verify(store).ok
    return "nothing" if value is None else "old" if value == 1.0 else "new"


def there(store: ObjectStore, n: int) -> float | None:
    try:
        return found(store, n)
    except CheckpointNotFoundError:
        return None


def again(store: ObjectStore, ranks: int, n: int) -> None:
    save_together([store] * ranks, 3.0, n=n)
    assert found(store, n) == 3.0


def operations(base: ObjectStore, ranks: int, n: int, old: bool) -> list[str]:
    store = place(base, new_root())
    if old:
        save_together([store] * ranks, 1.0, n=n)
    count = FaultyStore(store)
    save_together([count] * ranks, 2.0, n=n)
    return count.faults.operations


def every(step: int, total: int) -> list[int]:
    """Every so many-th of so many, and the last, which is behind the commit."""
    return sorted({*range(0, total, step), total - 1})


OVERWRITE = pytest.param(RANKS, SMALL, True, 29, id="overwrite")
IN_PARTS = pytest.param(1, PARTS, True, 29, id="parts")
SLOW = [
    pytest.param(RANKS, SMALL, True, 1, id="overwrite-all", marks=pytest.mark.slow),
    pytest.param(RANKS, SMALL, False, 1, id="first-all", marks=pytest.mark.slow),
    pytest.param(1, PARTS, True, 1, id="parts-all", marks=pytest.mark.slow),
]


def modes_of(name: str) -> tuple[Mode, ...]:
    """Without the runs that are another one over again: an end before a read is one behind the operation before."""
    kind = name.split()[0]
    return ("fail",) if kind in ("size", "read", "list") else MODES if kind in ("write", "write_at", "put") else MODES[:-1]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "n", "old", "step"), [OVERWRITE, *SLOW])
def test_every_operation(base: ObjectStore, ranks: int, n: int, old: bool, step: int) -> None:
    """With a step, every so many-th operation, and the modes in turn."""
    names = operations(base, ranks, n, old)
    assert sum(name.startswith("create") for name in names) >= ranks + 2 and any(name == "put ucp.json" for name in names)
    assert (n == SMALL) or any(name.startswith("write_at") for name in names)
    seen = set()
    turn = itertools.cycle(MODES)
    for at in every(step, len(names)):
        for mode in modes_of(names[at]) if step == 1 else [next(turn)]:
            store = place(base, new_root())
            if old:
                save_together([store] * ranks, 1.0, n=n)
            faulty = FaultyStore(store, Fault(at, mode))
            failed = broken([faulty] * ranks, n)
            try:
                seen.add(whole(store, n, old, failed))
                if step == 1 and mode == "kill":
                    again(store, ranks, n)
            except Exception as error:
                raise AssertionError(f"operation {at} ({names[at]}), {mode}: {error}") from error
            faulty._left_open.clear()  # until here: what is open is aborted when it is forgotten
    assert seen == {"old" if old else "nothing", "new"}


def dead_from(number: int) -> list[Rule]:
    """The process is gone before this request."""
    return [Rule("reset", nth=range(number, FOREVER))]


def dead_after(number: int) -> list[Rule]:
    """The process is gone after it sent this request, which is carried out."""
    return [Rule("lose", nth=[number]), Rule("reset", nth=range(number, FOREVER))]


PASSING = {
    "503": lambda number: [Rule("answer", nth=[number])],
    "reset": lambda number: [Rule("reset", nth=[number])],
    "lost answer": lambda number: [Rule("lose", nth=[number])],
    "cut": lambda number: [Rule("cut", nth=[number], size=20)],
}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "n", "old", "step"), [OVERWRITE, IN_PARTS, *SLOW])
def test_every_request(base: ObjectStore, through: ObjectStore, proxy: FaultProxy, ranks: int, n: int, old: bool, step: int) -> None:
    """From one request on nothing comes through, or no answer to it either: what is seen past the proxy is old or new."""
    total = requests_of(base, through, proxy, ranks, n, old)
    assert total > 20
    seen = set()
    turn = itertools.cycle((dead_from, dead_after))
    for number in (at + 1 for at in every(step, total)):
        for rules in (dead_from, dead_after) if step == 1 else [next(turn)]:
            store = place(base, new_root())
            if old:
                save_together([store] * ranks, 1.0, n=n)
            # the dead do not try again
            failed = through_proxy(proxy, rules(number), place(through, store.root, deadline=0), ranks, n)
            try:
                seen.add(whole(store, n, old, failed))
                if step == 1 and rules is dead_from:
                    again(store, ranks, n)
            except Exception as error:
                raise AssertionError(f"request {number} of {total}, {rules.__name__}: {error}") from error
    assert seen == {"old" if old else "nothing", "new"}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "n", "old", "step"), [IN_PARTS, *SLOW])
def test_a_request_that_fails_in_passing(
    base: ObjectStore, through: ObjectStore, proxy: FaultProxy, ranks: int, n: int, old: bool, step: int
) -> None:
    """One request is refused, cut, or carried out without an answer: the save succeeds all the same, and is whole."""
    total = requests_of(base, through, proxy, ranks, n, old)
    turn = itertools.cycle(PASSING)
    for number in (at + 1 for at in every(step, total)):
        for kind in PASSING if step == 1 else [next(turn)]:
            store = place(base, new_root())
            if old:
                save_together([store] * ranks, 1.0, n=n)
            failed = through_proxy(proxy, PASSING[kind](number), place(through, store.root, deadline=60), ranks, n)
            assert not failed, f"request {number} of {total}, {kind}"
            assert whole(store, n, old, failed) == "new", f"request {number} of {total}, {kind}"


def through_proxy(proxy: FaultProxy, rules: list[Rule], store: ObjectStore, ranks: int, n: int) -> bool:
    proxy.rules = rules
    try:
        return broken([store] * ranks, n)
    finally:
        proxy.rules = []


def requests_of(base: ObjectStore, through: ObjectStore, proxy: FaultProxy, ranks: int, n: int, old: bool) -> int:
    store = place(base, new_root())
    if old:
        save_together([store] * ranks, 1.0, n=n)
    proxy.seen.clear()
    save_together([place(through, store.root)] * ranks, 2.0, n=n)
    return len(proxy.seen)
