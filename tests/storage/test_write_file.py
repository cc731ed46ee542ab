"""Writing a planned file: the bytes and digests, what must be staged, several threads, and every way in which it can fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ucp_dcp.errors import PlanError, StoreError, StoreExistsError, UCPError
from ucp_dcp.storage import sized_file, write_file
from ucp_dcp.storage.blocks import BLOCK, BlockHasher
from ucp_dcp.storage.file_layout import plan_file
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.staging import HostCopier, LazyTensor, TensorPayloads

from .dictstore import DictStore
from .test_write_layout import plain

MIB = 1 << 20


def c_order(tensor):
    """The elements as bytes, by the slow way."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.contiguous().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def odd_tensors():
    """Views that do not lie in memory as in the file, and some that do."""
    torch.manual_seed(0)
    base = torch.randn(700, 900)
    small = torch.arange(24, dtype=torch.int64).reshape(2, 3, 4)
    z = torch.randn(300, 400, dtype=torch.complex64)
    nan = torch.tensor([0x7FA00001, 0x7F800001, 0x3F800000, 1], dtype=torch.int32).view(torch.float32)
    return {
        "transposed": base.T,
        "columns": base[:, 100:350],
        "row": base[3:4, ::2],
        "plain": base,
        "inner": base[50:400],
        "permuted": small.permute(2, 0, 1),
        "expanded": torch.randn(1, 500).expand(1000, 500),
        "conjugated": z.conj(),
        "conjugated and transposed": z.T.conj(),
        "negated": z.conj().imag,
        "scalar": torch.tensor(3.5),
        "one of a strided": torch.arange(10)[3:4:2],
        "empty": torch.zeros(0, 7),
        "empty strided": torch.zeros(7, 0).T,
        "float8": base[:64, :64].to(torch.float8_e4m3fn).T,
        "uint16": torch.arange(60).to(torch.uint16).reshape(6, 10).T,
        "bool": (base > 0).T,
        "complex128": torch.randn(30, 40, dtype=torch.complex128).T,
        "signalling": nan.expand(3, 4).T,
        "grad": torch.nn.Parameter(base[:10, :10].clone()).T,
        "bfloat16": base.bfloat16()[:, 1:].T,
    }


OBJECTS = [b"first object" * 7, b"", b"x"]


def put(store, tensors, objects=(), *, framed=True, digests=True, copies=None, path="f", views=None):
    payloads = TensorPayloads(list(views if views is not None else tensors.values()), list(objects), list(tensors), copies=copies)
    layout = plan_file(payloads.items, payloads.sizes, framed=framed)
    found = write_file.write_file(store, path, layout, payloads, digests=digests)
    expected, _ = plain(payloads.items, payloads.sizes, [*map(c_order, tensors.values()), *objects], framed)
    return expected, found


def digests_of(data):
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.digests().tolist()


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(write_file, "SLICE", MIB)


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_and_digests(tmp_path, framed, threads, small_slices):
    store = LocalStore(tmp_path, threads=threads)
    expected, found = put(store, odd_tensors(), OBJECTS, framed=framed)
    assert len(expected) > 5 * MIB
    assert store.read("f") == expected
    assert found.tolist() == digests_of(expected)


@pytest.mark.parametrize("framed", [True, False])
def test_a_store_that_only_streams(framed, small_slices):
    store = DictStore()
    expected, found = put(store, odd_tensors(), OBJECTS, framed=framed)
    assert store.files["f"] == expected
    assert found.tolist() == digests_of(expected)


def test_without_digests(tmp_path):
    expected, found = put(LocalStore(tmp_path), {"a": torch.randn(300_000)}, digests=False)
    assert found is None
    assert (tmp_path / "f").read_bytes() == expected


@pytest.mark.parametrize("size", [0, 1, 63, 64, MIB - 1, MIB, MIB + 1, 8 * MIB, 8 * MIB + 5, 20 * MIB])
def test_sizes_around_blocks_and_slices(tmp_path, size):
    expected, found = put(LocalStore(tmp_path), {"a": torch.arange(size, dtype=torch.int64).to(torch.uint8)}, framed=False)
    assert (tmp_path / "f").read_bytes() == expected
    assert found.tolist() == digests_of(expected)


def test_many_small_tensors(tmp_path):
    state = {f"t{i}": torch.full((1 + i % 50,), i, dtype=torch.int32) for i in range(5000)}
    expected, found = put(LocalStore(tmp_path, threads=2), state)
    assert (tmp_path / "f").read_bytes() == expected
    assert found.tolist() == digests_of(expected)


class UploadStore:
    """Takes parts of fixed size in any order, as an object store does."""

    def __init__(self, part_size):
        self.part_size, self.calls, self.concurrent = part_size, [], 3

    def create_sized(self, path, size):
        import contextlib

        self.content = bytearray(size)
        return contextlib.nullcontext(self)

    def write_at(self, offset, buffers):
        data = b"".join(buffers)
        self.calls.append((offset, len(data)))
        self.content[offset : offset + len(data)] = data


@pytest.mark.parametrize("part", [MIB, 3 * MIB, 16 * MIB])
def test_parts_of_an_upload(part):
    store = UploadStore(part)
    expected, found = put(store, {"a": torch.randn(5_000_000), "b": torch.randn(2000, 1000).T, "c": torch.zeros(3)})
    assert store.content == expected
    assert found.tolist() == digests_of(expected)
    assert [o for o, _ in sorted(store.calls)] == list(range(0, len(expected), part))
    assert all(length == min(part, len(expected) - offset) for offset, length in store.calls)


def test_parts_that_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        put(UploadStore(MIB + 64), {"a": torch.zeros(3)})


# -- staging -------------------------------------------------------------------------------------------------------------------


class SlowDevice:
    """Copies in a thread of its own, late, as a device does: only who waits sees the bytes. Counts the memory it gave."""

    def __init__(self, log):
        self.log, self.pool, self.pending = log, ThreadPoolExecutor(1), []

    def memory(self, nbytes):
        self.log.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, into, view):
        def later():
            time.sleep(0.002)
            with torch.no_grad():
                into.copy_(view)

        self.pending.append(self.pool.submit(later))

    def mark(self):
        mine = list(self.pending)

        def wait():
            for job in mine:
                job.result()

        return wait


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_under_way_while_the_slice_before_is_written(tmp_path, threads, small_slices):
    log = []
    tensors = {f"w{i}": torch.randn(400 + i, 1000).T for i in range(12)} | {"s": torch.randn(40, 30).T, "p": torch.randn(10)}
    store = LocalStore(tmp_path, threads=threads)
    expected, found = put(store, tensors, OBJECTS, copies=lambda: SlowDevice(log))
    assert store.read("f") == expected
    assert found.tolist() == digests_of(expected)
    # 19 MB went through at most two buffers of one slice per thread
    assert len(log) <= 2 * threads
    assert set(log) == {MIB}


def test_the_next_slice_is_copied_before_this_one_is_written(tmp_path, small_slices):
    """Otherwise two buffers would be no faster than one."""
    events = []

    class Recorder(HostCopier):
        def copy(self, into, view):
            events.append("copy")
            super().copy(into, view)

        def mark(self):
            return lambda: events.append("wait")

    put(LocalStore(tmp_path, threads=1), {"w": torch.randn(1024, 1024).T}, framed=False, copies=Recorder)
    order = [e for i, e in enumerate(events) if i == 0 or events[i - 1] != e]
    assert order[:2] == ["copy", "wait"]
    first_wait = events.index("wait")
    assert events[:first_wait].count("copy") >= 2  # of the first two slices; a slice is a run of whole rows here


def test_what_lies_ready_is_not_copied(tmp_path):
    class Never(HostCopier):
        def memory(self, nbytes):
            raise AssertionError("a contiguous tensor was copied")

    put(LocalStore(tmp_path), {"a": torch.randn(1000, 1000), "b": torch.randn(1000, 1000)[500:]}, copies=Never)


def test_a_failing_copy_names_the_tensor(tmp_path, small_slices):
    class Broken(HostCopier):
        def copy(self, into, view):
            raise RuntimeError("device lost")

    with pytest.raises(UCPError, match=r"'w'.*float32.*\(1000, 1000\).*device lost"):
        put(LocalStore(tmp_path, threads=2), {"w": torch.randn(1000, 1000).T}, copies=Broken)
    assert os.listdir(tmp_path) == []


def test_meta_tensors_are_refused_by_name(tmp_path):
    payloads = TensorPayloads([torch.empty(3, 3, device="meta")], [], ["w"])
    with pytest.raises(UCPError, match=r"'w'.*meta"):
        write_file.write_file(LocalStore(tmp_path), "f", plan_file(payloads.items, [], framed=True), payloads)


def test_lazy_tensors_live_only_while_they_are_written(tmp_path, small_slices):
    """A planner that converts each tensor when asked must not end up with a second copy of the state."""
    alive = set()
    most = 0

    class Made:
        def __init__(self, number):
            self.number = number

        def __call__(self):
            nonlocal most
            tensor = torch.full((300_000,), self.number, dtype=torch.int32)
            alive.add(self.number)
            import weakref

            weakref.finalize(tensor, alive.discard, self.number)
            most = max(most, len(alive))
            return tensor

    sources = [Made(i) for i in range(20)]
    tensors = {str(i): torch.full((300_000,), i, dtype=torch.int32) for i in range(20)}
    expected, _ = put(LocalStore(tmp_path, threads=1), tensors, views=[LazyTensor(s) for s in sources])
    assert (tmp_path / "f").read_bytes() == expected
    assert most <= 5
    assert alive == set()


def test_lazy_tensors_that_change(tmp_path):
    shapes = iter([(3,), (4,)])
    with pytest.raises(PlanError, match=r"'w'.*\(3,\).*\(4,\)"):
        put(LocalStore(tmp_path), {"w": torch.zeros(3)}, views=[LazyTensor(lambda: torch.zeros(next(shapes)))])


# -- failures ------------------------------------------------------------------------------------------------------------------

BIG = {"a": torch.arange(6 * MIB, dtype=torch.int32), "b": torch.arange(100)}


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwritev
    random = np.random.default_rng(0)

    def short(fd, buffers, offset):
        whole = b"".join(buffers)
        return real(fd, [whole[: int(random.integers(1, len(whole) + 1))]], offset)

    monkeypatch.setattr(sized_file.os, "pwritev", short)
    expected, found = put(LocalStore(tmp_path, threads=2), {**BIG, **odd_tensors()}, OBJECTS)
    assert (tmp_path / "f").read_bytes() == expected
    assert found.tolist() == digests_of(expected)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_any_thread_ends_the_save(tmp_path, monkeypatch, number, threads):
    real, calls, lock = os.pwritev, [], threading.Lock()

    def failing(fd, buffers, offset):
        with lock:
            calls.append(offset)
            if len(calls) == 7:
                raise OSError(number, os.strerror(number))
        time.sleep(0.005)
        return real(fd, buffers, offset)

    monkeypatch.setattr(sized_file.os, "pwritev", failing)
    before = threading.active_count()
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        put(LocalStore(tmp_path / "root", threads=threads), {"a": torch.zeros(48 * MIB // 4)})
    assert caught.value.__cause__.errno == number
    assert str(caught.value).startswith("f: ")
    assert len(calls) < 7 + 2 * threads, "the others went on writing"
    assert threading.active_count() == before
    assert os.listdir(tmp_path / "root") == []


def test_a_short_write_before_the_error(tmp_path, monkeypatch):
    """A full disk takes what still fits, and says why only then."""
    real = os.pwritev

    def filling(fd, buffers, offset):
        room = 2 * MIB + 1000 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [b"".join(buffers)[:room]], offset)

    monkeypatch.setattr(sized_file.os, "pwritev", filling)
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
        put(LocalStore(tmp_path, threads=1), BIG)
    assert os.listdir(tmp_path) == []


def test_a_write_that_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sized_file.os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StoreError, match="took none"):
        put(LocalStore(tmp_path), BIG)


@pytest.mark.skipif(sized_file._fallocate is None, reason="needs fallocate")
def test_no_room_is_said_before_a_byte_is_written(tmp_path, monkeypatch):
    """With the kernel's own refusal: a limit on the size of files."""
    import resource

    written = []
    monkeypatch.setattr(sized_file.os, "pwritev", lambda *a: written.append(a))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, limits[1]))
    try:
        with pytest.raises(StoreError, match=f"no place for its {24 * MIB}"):
            put(LocalStore(tmp_path), {"a": BIG["a"]}, framed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert written == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR])
def test_file_systems_that_cannot_reserve(tmp_path, monkeypatch, number):
    import ctypes

    calls = []

    def fallocate(*arguments):
        calls.append(arguments)
        ctypes.set_errno(number)
        return -1 if number != errno.EINTR or len(calls) == 1 else 0

    monkeypatch.setattr(sized_file, "_fallocate", fallocate)
    expected, _ = put(LocalStore(tmp_path), BIG)
    assert (tmp_path / "f").read_bytes() == expected
    assert len(calls) == (2 if number == errno.EINTR else 1)


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_errors_at_the_end(tmp_path, monkeypatch, call):
    """Network file systems tell of lost writes only here."""
    real = getattr(os, call)

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/f"):
            if call == "close":
                real(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd)

    store = LocalStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("ucp_dcp.storage.local.os." + call, failing)
        with pytest.raises(StoreError, match=r"^f: .*durable"):
            put(store, BIG)
    assert os.listdir(tmp_path) == []


def test_an_existing_file_stays(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(StoreExistsError):
        put(LocalStore(tmp_path), BIG)
    assert (tmp_path / "f").read_bytes() == b"old"


def test_an_interrupt_waits_for_the_threads(tmp_path, monkeypatch):
    """The descriptor must not be closed, and perhaps given to another file, while a thread still writes to it."""
    running = []
    real_write, real_join = os.pwritev, threading.Thread.join

    def slow(fd, buffers, offset):
        running.append(1)
        time.sleep(0.05)
        count = real_write(fd, buffers, offset)
        running.pop()
        return count

    interrupted = []

    def join(self, timeout=None):
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return real_join(self, timeout)

    monkeypatch.setattr(sized_file.os, "pwritev", slow)
    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        put(LocalStore(tmp_path, threads=3), {"a": torch.zeros(12 * MIB)})
    assert running == []
    assert os.listdir(tmp_path) == []


def test_block_size_is_what_the_format_says():
    assert BLOCK == MIB and write_file.SLICE % BLOCK == 0


@pytest.mark.parametrize("exclusive", [True, False])
def test_writes_at_the_same_time_only_where_the_file_system_gains(tmp_path, monkeypatch, exclusive):
    """ext4, XFS, btrfs and tmpfs let one buffered write into a file; threads that wait for it in the kernel burn processor time."""
    real, lock, inside, most = os.pwritev, threading.Lock(), [], []

    def slow(fd, buffers, offset):
        with lock:
            inside.append(offset)
            most.append(len(inside))
        time.sleep(0.01)
        count = real(fd, buffers, offset)
        with lock:
            inside.remove(offset)
        return count

    monkeypatch.setattr(sized_file.os, "pwritev", slow)
    monkeypatch.setattr(sized_file, "one_write_at_a_time", lambda fd: exclusive)
    expected, _ = put(LocalStore(tmp_path, threads=4), {"a": torch.arange(9 * MIB, dtype=torch.int32)})
    assert (tmp_path / "f").read_bytes() == expected
    assert (max(most) == 1) == exclusive


@pytest.mark.skipif(sized_file._fstatfs is None or not os.path.isdir("/dev/shm"), reason="needs a tmpfs of Linux")
def test_file_systems_are_told_apart(monkeypatch):
    """By the kernel's own numbers: tmpfs is listed, procfs is not."""
    import tempfile

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert sized_file.one_write_at_a_time(file.fileno())
    with open("/proc/self/status", "rb") as file:
        assert not sized_file.one_write_at_a_time(file.fileno())
