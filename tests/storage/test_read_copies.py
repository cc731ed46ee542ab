"""read_copies: any box of any stored layout into any destination, with tiny scratch memory, several threads, and any store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from digested import digest_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import ucp_dcp
from ucp_dcp.catalog import CatalogBuilder, FileRow
from ucp_dcp.errors import CorruptCheckpointError, StoreError
from ucp_dcp.formats import Source, open_source
from ucp_dcp.names import Role
from ucp_dcp.storage import preadv
from ucp_dcp.storage.blocks import BlockHasher, write_digests
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.transfer import Copy, copies, pieces, read_copies
from ucp_dcp.transfer.copies import Unit

STRIDES = {
    "rows": ((40, 30), (30, 1)),
    "transposed": ((40, 30), (1, 40)),
    "padded": ((40, 30), (37, 1)),
    "cube": ((6, 10, 20), (200, 20, 1)),
    "turned": ((6, 10, 20), (20, 120, 1)),
    "spread": ((6, 10, 20), (1300, 130, 3)),
    "broadcast": ((12, 8), (0, 1)),
}


def make(folder: Path, block: int) -> tuple[Source, dict[str, np.ndarray]]:
    """One file with a tensor of each kind of strides, 5 bytes between them."""
    store = LocalStore(folder, sync=False)
    data, places, truth = bytearray(b"head!"), {}, {}
    for number, (key, (size, strides)) in enumerate(STRIDES.items()):
        data += bytes(-len(data) % 4)
        reach = 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        values = np.random.default_rng(number).standard_normal(reach).astype(np.float32)
        places[key] = len(data)
        truth[key] = np.lib.stride_tricks.as_strided(values, size, [4 * s for s in strides]).copy()
        data += values.tobytes() + b"-tail"
    (folder / "f").write_bytes(data)
    hasher = BlockHasher(block)
    hasher.update(data)
    build = CatalogBuilder()
    file = build.add_file("f", len(data))
    build._files[file] = FileRow("f", len(data), write_digests(store, "f", hasher.digests(), block))
    for key in sorted(STRIDES):
        size, strides = STRIDES[key]
        handle = build.add_tensor(key=key, role=Role.PLAIN, fqn="", dtype="float32", shape=size)
        boxes = np.asarray([[[0] * len(size), size]])
        build.add_chunks(handle, boxes, np.asarray([file], np.int32), np.asarray([places[key]]), strides=np.asarray([strides]))
    return Source(build.build(), store, "test"), truth


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, dict[str, np.ndarray]]:
    return make(tmp_path_factory.mktemp("copies"), 4096)


@st.composite
def wishes(draw: st.DrawFn) -> list[tuple[str, tuple[slice, ...], str, torch.dtype]]:
    out = []
    for _ in range(draw(st.integers(1, 6))):
        key = draw(st.sampled_from(sorted(STRIDES)))
        box = []
        for n in STRIDES[key][0]:
            a = draw(st.integers(0, n - 1))
            box.append(slice(a, draw(st.integers(a + 1, n))))
        target = draw(st.sampled_from(["contiguous", "transposed", "gapped", "inner"]))
        out.append((key, tuple(box), target, draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))))
    return out


def destination(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "transposed":
        return torch.full(shape[::-1], -7.0, dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == "gapped":
        return torch.full((*shape[:-1], shape[-1] * 2), -7.0, dtype=dtype)[..., ::2]
    if kind == "inner":
        return torch.full(tuple(n + 3 for n in shape), -7.0, dtype=dtype)[tuple(slice(1, n + 1) for n in shape)]
    return torch.full(shape, -7.0, dtype=dtype)


@settings(max_examples=200, deadline=None)
@given(
    wishes(),
    st.sampled_from([0, 100, 4096]),
    st.sampled_from(["covered", "strict", "off"]),
    st.sampled_from([600, 3000, 1 << 20]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_any_box_into_any_destination(made, wanted, gap, verify, scratch, threads, local, small) -> None:
    source, truth = made
    if not local:
        source = Source(source.catalog, CountingStore(source.store), "test")
    with pytest.MonkeyPatch.context() as patch:
        if small:  # every limit is met, and short runs go straight too
            for module, name, value in (
                (copies, "_PIECES", 7),
                (copies, "_WAVE_PIECES", 20),
                (copies, "_DIRECT", 8),
                (pieces, "_PIECES", 3),
            ):
                patch.setattr(module, name, value)
        targets, work = [], []
        for key, box, kind, dtype in wanted:
            shape = tuple(s.stop - s.start for s in box)
            targets.append(destination(shape, kind, dtype))
            chunk = source.catalog.chunk_range(source.catalog.find(key))[0]
            work.append(Copy(chunk, tuple(s.start for s in box), targets[-1]))
        stats = read_copies(source, work, gap=gap, verify=verify, threads=threads, scratch=scratch)
    for (key, box, kind, dtype), target in zip(wanted, targets, strict=True):
        expected = torch.from_numpy(np.ascontiguousarray(truth[key][box])).to(dtype)
        assert torch.equal(target, expected), (key, box, kind, dtype)
        if kind == "inner":  # nothing beside the box was touched
            base = target._base if target._base is not None else target
            assert int((base == -7.0).sum()) == base.numel() - target.numel()
    assert stats.bytes_wanted <= sum(t.numel() * 4 for t in targets) and (len(targets) > 1 or stats.bytes_wanted == targets[0].numel() * 4)
    assert 0 <= stats.bytes_verified <= stats.bytes_wanted
    if verify == "off":
        assert stats.bytes_verified == 0
    if not local:
        assert stats.bytes_read == sum(r.length for r in source.store.counts.ranges if r.path == "f")


def test_one_task_spans_waves_and_a_straddling_block_is_still_checked(tmp_path: Path) -> None:
    """A cast needs scratch memory; blocks at the edges of its waves are read twice rather than left unchecked."""
    full = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    ucp_dcp.save({"w": full}, tmp_path / "c")
    digest_checkpoint(tmp_path / "c", 4096)
    source = open_source(str(tmp_path / "c"))
    target = torch.zeros(1000, 100, dtype=torch.float64)
    stats = read_copies(source, [Copy(0, (0, 0), target)], gap=4096, scratch=50_000)
    assert torch.equal(target, full.double())
    assert stats.bytes_unverified <= 4096 and stats.bytes_read <= 1.25 * full.nbytes


class SlowTaker:
    """As a device: takes the bytes only when somebody waits for it."""

    arenas = 2

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, Unit]] = []
        self.memories = 0
        self.bytes = 0
        self.lock = threading.Lock()

    def memory(self, nbytes: int) -> torch.Tensor:
        self.memories += 1
        self.bytes = max(self.bytes, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def take(self, flat: torch.Tensor, unit: Unit) -> None:
        with self.lock:
            self.pending.append((flat, unit))

    def mark(self) -> Callable[[], None]:
        with self.lock:
            own, self.pending = self.pending, []

        def wait() -> None:
            while own:
                flat, unit = own.pop()
                unit.view.copy_(unit.shape.values(flat))
                flat.fill_(0xAA)  # whoever still needed it gets nonsense

        return wait


def test_an_arena_is_not_used_again_before_it_was_taken(tmp_path: Path) -> None:
    full = torch.randn(1000, 100)
    ucp_dcp.save({"w": full}, tmp_path / "c")
    taker, target = SlowTaker(), torch.zeros(1000, 100, dtype=torch.float64)
    read_copies(open_source(str(tmp_path / "c")), [Copy(0, (0, 0), target)], scratch=40_000, taker=taker, threads=2)
    assert torch.equal(target, full.double()) and not taker.pending
    assert taker.memories <= 4 and taker.bytes <= 40_000


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_ends_the_read(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ucp_dcp.save({f"w{i}": torch.full((1 << 20,), float(i)) for i in range(12)}, tmp_path / "c")
    source = open_source(str(tmp_path / "c"))
    file = tmp_path / "c" / source.catalog.files[0].path
    targets = [Copy(c, (0,), torch.zeros(1 << 20)) for c in range(12)]
    size = file.stat().st_size
    with file.open("r+b") as f:
        f.truncate(size - (3 << 20))
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        read_copies(source, targets, threads=threads)
    file.unlink()
    with pytest.raises(StoreError, match="not found"):
        read_copies(source, targets, threads=threads)
    assert not [t for t in threading.enumerate() if t.name.startswith("ucp-read")]


def test_short_reads_of_the_kernel_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 4)
    real = preadv._preadv
    calls = []

    def stingy(fd: int, table: int, count: int, position: int) -> int:
        # 10 bytes per call, whatever is asked
        pairs = np.frombuffer(preadv.view_of(table, 16 * count), dtype=np.uint64).reshape(count, 2).copy()
        keep = int(np.searchsorted(np.cumsum(pairs[:, 1]), 10)) + 1
        pairs = pairs[:keep].copy()
        pairs[-1, 1] -= np.uint64(max(0, int(pairs[:, 1].sum()) - 10))
        calls.append(position)
        return real(fd, pairs.ctypes.data, keep, position)

    monkeypatch.setattr(preadv, "_preadv", stingy)
    out = np.zeros(200, dtype=np.uint8)
    pieces = np.asarray([[out.ctypes.data, 7], [out.ctypes.data + 7, 33], [out.ctypes.data + 40, 60]], dtype=np.uint64)
    with (tmp_path / "f").open("rb") as f:
        preadv.fill(f.fileno(), pieces.ctypes.data, 3, 100, 100, "f")
        assert out[:100].tolist() == [(100 + i) % 256 for i in range(100)] and not out[100:].any() and len(calls) == 10
        with pytest.raises(CorruptCheckpointError, match="f: ended at byte 1024 while 76 more"):
            preadv.fill(f.fileno(), pieces.ctypes.data, 3, 1000, 100, "f")
    with pytest.raises(StoreError, match="Bad file descriptor"):
        preadv.fill(-1, pieces.ctypes.data, 3, 0, 100, "f")
