"""Many reads in one call: the same bytes as one by one, errors by name, short reads, and what happens where there is no AIO."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import ucp_dcp
from ucp_dcp.errors import CorruptCheckpointError, StoreError
from ucp_dcp.storage import batched
from ucp_dcp.storage.batched import DEPTH, read_runs
from ucp_dcp.transfer import run as transfer_run

pytestmark = pytest.mark.skipif(not batched.available(), reason="needs Linux's native AIO")


@pytest.fixture
def file(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd, data
    os.close(fd)


def runs(count, size, seed=0):
    random = np.random.default_rng(seed)
    start = random.integers(0, size - 200, count)
    length = random.integers(1, 200, count)
    into = np.zeros(int(length.sum()) + 1, dtype=np.uint8)
    place = np.concatenate(([0], np.cumsum(length)[:-1]))
    return start, length, into, into.ctypes.data + place


def expected(data, start, length):
    return np.concatenate([data[a : a + n] for a, n in zip(start, length, strict=True)])


@pytest.mark.parametrize("count", [1, 2, DEPTH, DEPTH + 1, 3 * DEPTH + 7])
def test_the_bytes(file, count):
    fd, data = file
    start, length, into, address = runs(count, len(data))
    assert read_runs(fd, "f", start, length, address)
    assert np.array_equal(into[:-1], expected(data, start, length)) and into[-1] == 0


def test_threads_have_contexts_of_their_own(file):
    fd, data = file

    def one(seed):
        start, length, into, address = runs(500, len(data), seed)
        assert read_runs(fd, "f", start, length, address)
        return np.array_equal(into[:-1], expected(data, start, length))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(64)))
    assert len(batched._idle) <= batched._IDLE


def test_a_file_that_ends_too_early(file):
    fd, data = file
    into = np.zeros(200, dtype=np.uint8)
    address = into.ctypes.data + np.asarray([0, 100])
    with pytest.raises(CorruptCheckpointError, match=rf"^f: ended at byte {len(data)} while 60 more were wanted; it is truncated"):
        read_runs(fd, "f", np.asarray([5, len(data) - 40]), np.asarray([100, 100]), address)


def test_an_error_of_the_disk_is_named(file, monkeypatch):
    fd, data = file
    real = batched._reap

    def failing(context, count, events):
        real(context, count, events)
        events["result"][count - 1] = -errno.EIO

    monkeypatch.setattr(batched, "_reap", failing)
    start, length, _, address = runs(40, len(data))
    with pytest.raises(StoreError, match=rf"^f: reading at byte {start[-1]} failed: Input/output error"):
        read_runs(fd, "f", start, length, address)


def test_what_the_kernel_did_not_take_or_not_whole_is_read_on(file, monkeypatch):
    fd, data = file
    real, submits = batched._call, []

    def partial(number, *arguments):
        if number == batched._SUBMIT:
            submits.append(arguments)
            if len(submits) == 3:
                return -errno.EAGAIN
            return real(number, arguments[0], min(arguments[1], 10), arguments[2])
        return real(number, *arguments)

    reap = batched._reap

    def short(context, count, events):
        reap(context, count, events)
        events["result"][:3] = [0, 1, -errno.EINTR]

    monkeypatch.setattr(batched, "_call", partial)
    monkeypatch.setattr(batched, "_reap", short)
    start, length, into, address = runs(50, len(data))
    assert read_runs(fd, "f", start, length, address)
    assert len(submits) == 3
    assert np.array_equal(into[:-1], expected(data, start, length))


def test_without_aio(file, monkeypatch):
    fd, data = file
    monkeypatch.setattr(batched, "_idle", [])
    monkeypatch.setattr(batched, "_call", lambda *a: -errno.ENOSYS)
    start, length, into, address = runs(50, len(data))
    assert not read_runs(fd, "f", start, length, address)
    assert not into.any()


def test_a_fork_has_no_contexts(file):
    assert batched.available() and batched._idle
    child = os.fork()
    if child == 0:
        os._exit(0 if not batched._idle and batched.available() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert batched._idle


@pytest.mark.parametrize("aio", [True, False])
def test_loads_of_columns_use_it_and_do_without(tmp_path, monkeypatch, aio):
    full = torch.randn(3000, 2048)
    ucp_dcp.save({"w": full}, tmp_path, no_dist=True)
    calls, real, lock = [], transfer_run.read_runs, threading.Lock()

    def counted(fd, path, start, length, address):
        with lock:
            calls.append(len(start))
        return real(fd, path, start, length, address) if aio else False

    monkeypatch.setattr(transfer_run, "read_runs", counted)
    found = ucp_dcp.open_checkpoint(tmp_path)["w"][:, 512:1024]
    assert torch.equal(found, full[:, 512:1024])
    assert sum(calls) >= 2900
