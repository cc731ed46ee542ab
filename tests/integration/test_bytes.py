"""Only the bytes that are needed, from ZeRO, ours, and stock DCP: opening reads no tensor byte, a row costs its own and at most 4 KiB."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero
from counting_store import CountingStore

import ucp_dcp
from ucp_dcp.storage.store import open_store

FULL = torch.arange(512 * 256, dtype=torch.float32).reshape(512, 256)


def write_ours(path: Path) -> None:
    ucp_dcp.save({"w": FULL, "t": FULL.t()}, path)


def write_stock(path: Path) -> None:
    dcp.save({"w": FULL, "t": FULL.t()}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("write", [write_ours, write_stock])
def test_a_row_costs_a_row(tmp_path: Path, write) -> None:
    write(tmp_path / "c")
    store = CountingStore(open_store(tmp_path / "c"))
    ckpt = ucp_dcp.open_checkpoint(store)
    data = [f.path for f in ckpt.files]
    assert sum(store.counts.bytes_of(p) for p in data) == 0
    store.reset()
    row = ckpt["w"][77]
    assert torch.equal(row, FULL[77])
    assert store.counts.bytes_read <= row.numel() * 4 + 4096
    # a transposed tensor: stock DCP stores its strides, a row of it is a column in the file
    store.reset()
    column = ckpt["t"][5]
    assert torch.equal(column, FULL[:, 5])
    assert store.counts.bytes_read <= column.numel() * 4 + 4096


def test_opening_a_zero_checkpoint_reads_no_tensor_byte_and_a_row_costs_a_row() -> None:
    folder = next(p for p in zero.checkpoints() if p.name == "z1_bf16_w3")
    store = CountingStore(open_store(folder))
    ckpt = ucp_dcp.open_checkpoint(store)
    # where torch.save put tensor bytes, by Python's own zip module
    spans: dict[str, list[tuple[int, int]]] = {}
    for path in folder.rglob("*.pt"):
        name, raw = str(path.relative_to(folder)), path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if "/data/" in info.filename:
                    head = raw[info.header_offset : info.header_offset + 30]
                    start = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                    spans.setdefault(name, []).append((start, info.file_size))
    # small client state is an object, not a tensor: it may be looked at only when asked for
    touched = [
        (r.path, start, size)
        for r in store.counts.ranges
        for start, size in spans.get(r.path, ())
        if max(start, r.start) < min(start + size, r.start + r.length)
    ]
    assert touched == []
    store.reset()
    master = ckpt["optim.state.embed.weight.master"]
    row = master[11]
    assert torch.equal(row, torch.from_numpy(np.load(folder / "truth.npz")["master/embed.weight"])[11])
    assert store.counts.bytes_read <= row.numel() * 4 + 4096


def test_a_reshard_reads_each_rank_its_own_bytes(ranks, tmp_path: Path) -> None:
    write_ours(tmp_path / "c")
    for rank, wanted, read in ranks.run(4, load_columns, str(tmp_path / "c")):
        assert wanted == 512 * 64 * 4, rank
        assert read <= 2 * wanted


def load_columns(rank: int, world: int, url: str) -> tuple[int, int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    state = {"w": zeros(512, 256, device_mesh=init_device_mesh("cpu", (world,)), placements=[Shard(1)])}
    report = ucp_dcp.load(state, url)
    assert torch.equal(state["w"].to_local(), FULL[:, 64 * rank : 64 * (rank + 1)])
    return rank, report.bytes_wanted, report.bytes_read


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(3, 9),
        slice(None, None, 7),
        (slice(500, 600), 3),
        (..., slice(1, 5)),
        (5, 6),
        slice(9, 3),
        (slice(2, 10, 3), slice(0, 256, 100)),
    ],
    ids=str,
)
def test_slices_are_numpys(tmp_path_factory: pytest.TempPathFactory, index) -> None:
    folder = tmp_path_factory.getbasetemp() / "slices"
    if not folder.exists():
        write_ours(folder)
    got = ucp_dcp.open_checkpoint(folder)["w"][index]
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), FULL.numpy()[index]) and got.shape == FULL.numpy()[index].shape


@pytest.mark.parametrize("index", [512, -513, (0, 0, 0), (..., ...), None, 1.5, slice(None, None, -1), (True,)], ids=str)
def test_bad_slices_raise_index_error(tmp_path_factory: pytest.TempPathFactory, index) -> None:
    folder = tmp_path_factory.getbasetemp() / "slices"
    if not folder.exists():
        write_ours(folder)
    with pytest.raises(IndexError, match="w"):
        ucp_dcp.open_checkpoint(folder)["w"][index]


@pytest.mark.parametrize("name", ["z3_bf16_w2", "z3_fp32_subgroups_w3"])
def test_masters_that_answer_for_weights_too_are_read_once(name: str) -> None:
    """Stage 3 stores no weights: bf16 weights and fp32 masters come from the same bytes."""
    folder = next(p for p in zero.checkpoints() if p.name == name)
    truth = zero.truth(folder)
    state = {
        "model": {fqn: torch.full(values["master"].shape, 7.0, dtype=torch.bfloat16) for fqn, values in truth.items()},
        "optim": {"state": {fqn: {"master": torch.full(values["master"].shape, 7.0)} for fqn, values in truth.items()}},
    }
    report = ucp_dcp.load(state, folder, no_dist=True)
    for fqn, values in truth.items():
        assert torch.equal(state["optim"]["state"][fqn]["master"], values["master"]), fqn
        assert torch.equal(state["model"][fqn], values["master"].bfloat16()), fqn
    nbytes = sum(4 * values["master"].numel() for values in truth.values())
    assert report.bytes_wanted == nbytes <= report.bytes_read < 1.25 * nbytes  # small holes are read over
