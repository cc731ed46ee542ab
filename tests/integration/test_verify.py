"""``ucp_dcp.verify``: one flipped bit anywhere is found, and said where; what cannot be checked is counted."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero
from digested import digest_checkpoint
from typer.testing import CliRunner

import ucp_dcp
from ucp_dcp.cli.app import app
from ucp_dcp.errors import CheckpointNotFoundError, UCPError

STATE = {
    "w": torch.arange(6000, dtype=torch.float32).reshape(60, 100),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "step": 12,
    "names": ["x", "y"],
}
BLOCK = 4096


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "ours"
    ucp_dcp.save(dict(STATE), folder)
    digest_checkpoint(folder, BLOCK)
    return folder


def flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))


def test_a_whole_checkpoint_is_whole(ours: Path) -> None:
    report = ucp_dcp.verify(ours)
    assert report.ok and not report.unknown_files and not report.notes, str(report)
    files = [p for p in ours.rglob("*") if p.is_file()]
    assert report.files == len(files)
    assert report.bytes == report.bytes_verified == sum(p.stat().st_size for p in files) and report.bytes_unverifiable == 0


def test_a_flipped_bit_anywhere_is_found(ours: Path) -> None:
    random.seed(3)
    for file in sorted(p for p in ours.rglob("*") if p.is_file()):
        size = file.stat().st_size
        places = {0, size - 1, *random.sample(range(size), min(size, 60))}
        for at in sorted(places):
            bit = random.randrange(8)
            flip(file, at, bit)
            try:
                report = ucp_dcp.verify(ours, threads=1)
                name = str(file.relative_to(ours))
                found = [p for p in report.problems if p.file == name and (p.start < 0 or p.start <= at < p.stop)]
                assert not report.ok and found, f"byte {at} bit {bit} of {name}: {report}"
            finally:
                flip(file, at, bit)
    assert ucp_dcp.verify(ours).ok


def test_padding_of_the_index_is_looked_at(ours: Path) -> None:
    manifest = json.loads((ours / "ucp.json").read_text())
    used = sorted((offset, offset + size) for offset, size, _ in manifest["index"]["sections"].values())
    hole = next(b for (_, b), (c, _) in itertools.pairwise(used) if c > b)
    flip(ours / manifest["index"]["path"], hole, 0)
    try:
        (problem,) = ucp_dcp.verify(ours).problems
        assert "padding" in problem.message and problem.start == hole
        assert ucp_dcp.load({"w": torch.zeros(60, 100)}, ours).loaded == ["w"]  # nobody reads it
    finally:
        flip(ours / manifest["index"]["path"], hole, 0)


def place_of(folder: Path, key: str) -> tuple[Path, int]:
    catalog = ucp_dcp.open_checkpoint(folder).catalog
    chunk = catalog.chunk_range(catalog.find(key))[0]
    return folder / catalog.files[catalog.chunk_file[chunk]].path, int(catalog.chunk_offset[chunk])


def test_loads_notice(ours: Path) -> None:
    file, start = place_of(ours, "w")
    at = start + 4 * (30 * 100 + 5)
    flip(file, at, 2)
    try:
        (problem,) = ucp_dcp.verify(ours).problems
        assert problem.start == at // BLOCK * BLOCK and problem.stop - problem.start == BLOCK
        assert ("w", (0, 0), (60, 100)) in problem.tensors
        target = {"w": torch.zeros(60, 100)}
        for verify in ("covered", "strict"):
            words = rf"bytes {problem.start} to {problem.stop} are damaged.*'w' box \(0, 0\) \+ \(60, 100\)"
            with pytest.raises(UCPError, match=words):
                ucp_dcp.load(target, ours, verify=verify)
        report = ucp_dcp.load(target, ours, verify="off")
        assert report.bytes_unverified == report.bytes_wanted == 24000 and target["w"][30, 5] != STATE["w"][30, 5]
        # a row covers no block: unchecked by default, and the report says so; strict reads the block
        row = ucp_dcp.open_checkpoint(ours)
        assert row["w"][30][5] != STATE["w"][30, 5] and row.stats.bytes_unverified == 400
        with pytest.raises(UCPError, match="damaged"):
            ucp_dcp.open_checkpoint(ours, verify="strict")["w"][30]
        with pytest.raises(ValueError, match="verify='sometimes'"):
            ucp_dcp.load(target, ours, verify="sometimes")
    finally:
        flip(file, at, 2)


def test_objects_are_checked_by_default(tmp_path: Path) -> None:
    ucp_dcp.save({"x": torch.zeros(9), "rng": {"state": torch.arange(5000)}, "obj": [1, {"a": "b" * 500}]}, tmp_path / "c")
    digest_checkpoint(tmp_path / "c", BLOCK)
    catalog = ucp_dcp.open_checkpoint(tmp_path / "c").catalog
    row = next((r for r in catalog.objects if r.encoding != "inline"), None)
    if row is None:
        pytest.skip("the writer keeps these objects in the index")
    file = tmp_path / "c" / catalog.files[row.file].path
    flip(file, row.offset + row.length // 2, 1)
    with pytest.raises(UCPError, match="damaged"):
        ucp_dcp.open_checkpoint(tmp_path / "c").objects[row.key]


def test_sizes_sidecars_and_strangers(ours: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def fresh() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ours, folder)
        return place_of(folder, "w")[0]

    data = fresh()
    data.write_bytes(data.read_bytes() + b"\0")
    assert [p.message for p in ucp_dcp.verify(folder).problems] == [
        f"has {data.stat().st_size} bytes, the index states {data.stat().st_size - 1}"
    ]
    data = fresh()
    data.write_bytes(data.read_bytes()[:-5000])
    report = ucp_dcp.verify(folder)
    assert not report.ok and report.problems[0].file == str(data.relative_to(folder))
    data = fresh()
    data.unlink()
    assert "is missing" in str(ucp_dcp.verify(folder).problems[0])
    data = fresh()
    Path(f"{data}.blocks").unlink()
    assert "not found" in str(ucp_dcp.verify(folder).problems[0])
    fresh()
    (folder / ".metadata").unlink()
    assert [(p.file, "is missing" in p.message) for p in ucp_dcp.verify(folder).problems] == [(".metadata", True)]
    fresh()
    (folder / "notes.txt").write_text("mine")
    (folder / ("g-" + "0" * 32)).mkdir()
    (folder / ("g-" + "0" * 32) / "x").write_text("unfinished")
    report = ucp_dcp.verify(folder)
    assert report.ok and report.unknown_files == ["g-" + "0" * 32 + "/", "notes.txt"]
    with pytest.raises(CheckpointNotFoundError):
        ucp_dcp.verify(tmp_path / "nothing")


def test_without_digests_everything_counts_as_unverifiable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": STATE["w"]}, checkpoint_id=tmp_path / "s", no_dist=True)
    report = ucp_dcp.load({"w": torch.zeros(60, 100)}, tmp_path / "s", verify="strict")
    assert report.bytes_verified == 0 and report.bytes_unverified == 24000
    assert "24000 of them not verified" in str(report)


@pytest.mark.parametrize("part", ["first", "last", "middle"])
def test_stock_dcp_by_its_crc32(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "s"
    dcp.save({"w": STATE["w"], "v": torch.ones(3), "o": [1, 2]}, checkpoint_id=folder, no_dist=True)
    whole = ucp_dcp.verify(folder)
    assert whole.ok and whole.format == "dcp" and whole.bytes_verified > 24000, str(whole)
    file = next(p for p in folder.iterdir() if p.suffix == ".distcp")
    raw = file.read_bytes()
    start = raw.index(STATE["w"].numpy().tobytes())
    at = {"first": start, "last": start + 23999, "middle": start + 12000}[part]
    flip(file, at, 0)
    (problem,) = ucp_dcp.verify(folder).problems
    assert problem.start <= at < problem.stop + 4096 and [t[0] for t in problem.tensors][:1] == ["w"] and "CRC" in problem.message
    flip(file, at, 0)
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:100])
    assert "cannot be opened" in ucp_dcp.verify(folder).problems[0].message


def test_deepspeed_by_its_crc32(tmp_path: Path) -> None:
    folder = tmp_path / "z"
    shutil.copytree(next(p for p in zero.checkpoints() if p.name == "z1_bf16_w3"), folder)
    whole = ucp_dcp.verify(folder)
    assert whole.ok and whole.format == "deepspeed" and whole.bytes_verified > 0.5 * whole.bytes, str(whole)
    checkpoint = ucp_dcp.open_checkpoint(folder)
    catalog = checkpoint.catalog
    t = catalog.find_canonical("optim.state.embed.weight.master")
    chunk = catalog.chunk_range(t)[0]
    flip(folder / catalog.files[catalog.chunk_file[chunk]].path, int(catalog.chunk_offset[chunk]) + 5, 3)
    problems = ucp_dcp.verify(folder).problems
    assert len(problems) == 1 and any("embed.weight" in key for key, _, _ in problems[0].tensors), problems


def test_progress_reaches_the_end(ours: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = ucp_dcp.verify(ours, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and seen[-1][0] == seen[-1][1] > 24000 and [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_command(ours: Path, tmp_path: Path) -> None:
    def ucp(*arguments: object):
        return CliRunner().invoke(app, ["verify", *map(str, arguments)])

    shown = ucp(ours)
    assert shown.exit_code == 0 and shown.stdout.startswith("verify: ok")
    as_json = json.loads(ucp(ours, "--json").stdout)
    assert as_json["ok"] is True and as_json["problems"] == []
    folder = tmp_path / "c"
    shutil.copytree(ours, folder)
    file, start = place_of(folder, "w")
    flip(file, start, 0)
    damaged = ucp(folder, "--threads", 2)
    assert damaged.exit_code == 1 and "'w' box (0, 0) + (60, 100)" in damaged.stdout
    (problem,) = json.loads(ucp(folder, "--json").stdout)["problems"]
    assert problem["file"] == str(file.relative_to(folder)) and problem["start"] <= start < problem["stop"]
    missing = ucp(tmp_path / "nothing")
    assert missing.exit_code == 2 and missing.stderr.startswith("error: ")
