"""What an adversarial review broke: hangs of ranks that disagree, values lost without a word, half-loaded states, costs that explode."""

from __future__ import annotations

import pickle
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ucp_dcp
from ucp_dcp import Layout, LayoutSpec, PerRank, UCPLoadPlanner, UCPSavePlanner, UCPStorageReader, UCPStorageWriter
from ucp_dcp.errors import CoverageError, DtypeMismatchError, LayoutError, PlanError, ReplicaMismatchError, UCPError, UnsupportedError

SOON = 15.0  # seconds; a hang lasts for the 30 s of the test pool's collectives


def outcome(verb: Any, *args: Any, **kwargs: Any) -> tuple[type, str, float]:
    """What a rank got, and after how long."""
    start = time.monotonic()
    try:
        verb(*args, **kwargs)
    except UCPError as error:
        return type(error), str(error), time.monotonic() - start
    return type(None), "", time.monotonic() - start


def averaging(axes: dict[str, tuple[int, int]]) -> Layout:
    rules = [{"match": "drifted", "steps": [{"dp": "Average()"}]}]
    return Layout(LayoutSpec.from_dict({"ucp_spec": 1, "name": "x", "axes": list(axes), "rules": rules}), axes, roots={"model": "model"})


# -- ranks that take different paths --------------------------------------------------------------------------------------------


def average_with_an_error(rank: int, world: int, url: str) -> tuple[type, str, float]:
    state: dict[str, Any] = {"model": {"drifted": torch.ones(3)}}
    if rank == 1:
        state["model"]["stranger"] = torch.ones(3)
    return outcome(ucp_dcp.save, state, url, layout=averaging({"dp": (rank, world)}))


def test_an_error_of_one_rank_before_the_mean_is_everybodys(ranks, tmp_path: Path) -> None:
    for kind, text, seconds in ranks.run(2, average_with_an_error, str(tmp_path / "c")):
        assert kind is LayoutError and "stranger" in text and "rank 1" in text and seconds < SOON


def average_alone(rank: int, world: int, url: str) -> tuple[type, str, float]:
    if rank == 1:
        return type(None), "", 0.0
    ucp_dcp.save({"model": {"drifted": torch.ones(3)}}, url, layout=averaging({"dp": (0, 1)}), no_dist=True)
    return outcome(ucp_dcp.save, {"model": {"drifted": torch.ones(3)}}, url, layout=averaging({"dp": (0, 2)}), no_dist=True)


def test_no_dist_does_not_wait_for_other_ranks(ranks, tmp_path: Path) -> None:
    kind, text, seconds = ranks.run(2, average_alone, str(tmp_path / "c"), timeout=20)[0]
    assert kind is PlanError and "drifted" in text and seconds < SOON


def average_of(rank: int, world: int, url: str, name: str) -> tuple[type, str, float]:
    value = (torch.tensor([2.0, 5.0]) * (1 + 2 * rank)).to(getattr(torch, name))
    return outcome(ucp_dcp.save, {"model": {"drifted": value}}, url, layout=averaging({"dp": (rank, world)}))


@pytest.mark.parametrize("name", ["int16", "complex64", "float8_e5m2", "uint16"])
def test_the_mean_of_every_dtype(ranks, tmp_path: Path, name: str) -> None:
    assert {kind for kind, _, _ in ranks.run(2, average_of, str(tmp_path / "c"), name)} == {type(None)}
    assert ucp_dcp.open_checkpoint(tmp_path / "c")["model.drifted"][:].tolist() == [4, 10]


def open_with_a_broken_rank(rank: int, world: int, url: str, what: str) -> tuple[type, str, float]:
    import ucp_dcp.formats.deepspeed as module
    from ucp_dcp.storage.local import LocalStore

    def broken(*args: Any) -> Any:
        raise TwoArguments("boom", 2)

    owner, name = (module, "parse_file") if what == "parsing" else (LocalStore, "size")
    original = getattr(owner, name)
    if rank == 1:
        setattr(owner, name, broken)
    try:
        return outcome(ucp_dcp.load, {"a": torch.zeros(1)}, url)
    finally:
        setattr(owner, name, original)


class TwoArguments(Exception):
    """Pickles, but does not come back."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


@pytest.mark.parametrize("what", ["parsing", "looking"])
def test_a_rank_that_cannot_open_a_foreign_checkpoint_stops_all(ranks, what: str) -> None:
    for kind, text, seconds in ranks.run(2, open_with_a_broken_rank, str(zero.checkpoints()[0]), what):
        assert issubclass(kind, UCPError) and "TwoArguments: boom" in text and seconds < SOON


def open_other_folder(rank: int, world: int, one: str, other: str) -> tuple[type, str, float]:
    return outcome(ucp_dcp.load, {"a": torch.zeros(3)}, other if rank else one)


def test_ranks_that_see_different_checkpoints(ranks, tmp_path: Path) -> None:
    ucp_dcp.save({"a": torch.ones(3)}, tmp_path / "one")
    ucp_dcp.save({"a": torch.zeros(3)}, tmp_path / "two")
    for other in (tmp_path / "two", zero.checkpoints()[0]):
        for kind, text, seconds in ranks.run(2, open_other_folder, str(tmp_path / "one"), str(other)):
            assert issubclass(kind, UCPError) and "rank" in text and seconds < SOON


def write_with_a_foreign_error(rank: int, world: int, url: str) -> tuple[type, str, float]:
    from ucp_dcp.storage.local import LocalStore

    def create(*args: Any) -> Any:
        raise TwoArguments("boom", 2)

    original = LocalStore.create
    if rank == 1:
        LocalStore.create = create  # type: ignore[method-assign]
    try:
        return outcome(ucp_dcp.save, {"a": torch.arange(9000.0), "b": torch.arange(9000.0)}, url)
    finally:
        LocalStore.create = original  # type: ignore[method-assign]


def test_an_exception_that_does_not_pickle(ranks, tmp_path: Path) -> None:
    for kind, text, seconds in ranks.run(2, write_with_a_foreign_error, str(tmp_path / "c")):
        assert kind is UCPError and "TwoArguments: boom" in text and seconds < SOON


# -- values lost without a word -------------------------------------------------------------------------------------------------


def both_claim(rank: int, world: int, url: str) -> tuple[type, str, float]:
    """Two stages, each told (its own spec says so) that it alone holds layer 0."""
    rules = [{"match": "layers.*", "steps": [{"pp": f"Unique({rank})"}]}]
    layout = Layout(
        LayoutSpec.from_dict({"ucp_spec": 1, "name": "x", "axes": ["pp"], "rules": rules}), {"pp": (rank, 2)}, {"model": "model"}
    )
    return outcome(ucp_dcp.save, {"model": {"layers.0": torch.full((4,), float(rank))}}, url, layout=layout)


def test_two_ranks_that_claim_one_box_are_compared(ranks, tmp_path: Path) -> None:
    for kind, text, _ in ranks.run(2, both_claim, str(tmp_path / "c")):
        assert kind is ReplicaMismatchError and "model.layers.0" in text


def test_keys_that_are_numbers(tmp_path: Path) -> None:
    ucp_dcp.save({"o": {0: {"lr": 0.5}, 1: 5}, "t": {3: torch.ones(2)}}, tmp_path)
    state: dict[str, Any] = {"o": {0: {"lr": 0.0}, 1: 0}, "t": {3: torch.zeros(2)}}
    ucp_dcp.load(state, tmp_path)
    assert state["o"] == {0: {"lr": 0.5}, 1: 5} and list(state["t"]) == [3] and state["t"][3].tolist() == [1.0, 1.0]


def test_meta_tensors_are_refused_by_name(tmp_path: Path) -> None:
    meta = {"m": {"a": torch.empty(3, device="meta")}}
    with pytest.raises(PlanError, match=r"'m\.a'.*meta"):
        ucp_dcp.save(meta, tmp_path)
    ucp_dcp.save({"m": {"a": torch.ones(3)}}, tmp_path)
    with pytest.raises(PlanError, match=r"'m\.a'.*meta"):
        ucp_dcp.load(meta, tmp_path)
    assert "m.a" in ucp_dcp.load(meta, tmp_path, strict=False).skipped


def test_a_reader_and_planners_that_are_used_again(tmp_path: Path) -> None:
    reader, planner = UCPStorageReader(tmp_path / "a"), UCPLoadPlanner()
    writer, saver = UCPStorageWriter(tmp_path / "a"), UCPSavePlanner()
    for value in (1.0, 2.0):
        dcp.save({"x": torch.full((3,), value)}, storage_writer=writer, planner=saver, no_dist=True)
        got = {"x": torch.zeros(3)}
        dcp.load(got, storage_reader=reader, planner=planner, no_dist=True)
        assert got["x"].tolist() == [value] * 3
    dcp.save({"y": torch.ones(2), "n": 1}, checkpoint_id=tmp_path / "b", storage_writer=writer, planner=saver, no_dist=True)
    other: dict[str, Any] = {"y": torch.zeros(2), "n": 0}
    dcp.load(other, checkpoint_id=tmp_path / "b", storage_reader=reader, planner=planner, no_dist=True)
    assert other["y"].tolist() == [1.0, 1.0] and other["n"] == 1 and planner.report.loaded == ["y", "n"]
    assert not pickle.loads(pickle.dumps(planner))._wanted.copies and len(pickle.dumps(planner)) < 2000


def test_two_saves_at_once_with_one_writer(tmp_path: Path) -> None:
    """A manifest must never name the files of another generation: they would be collected a day later."""
    writer, other = UCPStorageWriter(tmp_path), UCPSavePlanner()
    original = UCPStorageWriter.write_data

    def interrupted(self: Any, plan: Any, planner: Any) -> Any:
        UCPStorageWriter.write_data = original  # type: ignore[method-assign]
        done = original(self, plan, planner)
        dcp.save({"x": torch.zeros(3)}, storage_writer=writer, planner=other, no_dist=True)
        return done

    UCPStorageWriter.write_data = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(BaseException, match="another save"):
            dcp.save({"x": torch.ones(3)}, storage_writer=writer, planner=UCPSavePlanner(), no_dist=True)
    finally:
        UCPStorageWriter.write_data = original  # type: ignore[method-assign]
    assert ucp_dcp.open_checkpoint(tmp_path)["x"][:].tolist() == [0.0] * 3


def test_overlaps_that_make_up_for_holes(tmp_path: Path) -> None:
    """A stock checkpoint of one rank may have both; counting elements would not see it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    dcp.save({"t": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (index, info), *_ = metadata.storage_data.items()
    small, parts = torch.arange(2.0), []
    data = tmp_path / info.relative_path
    for offset in (0, 1, 4):
        start = data.stat().st_size
        with data.open("ab") as stream:
            torch.save(small, stream)
        place = type(index)("t", torch.Size([offset]))
        metadata.storage_data[place] = type(info)(info.relative_path, start, data.stat().st_size - start)
        parts.append(ChunkStorageMetadata(torch.Size([offset]), torch.Size([2])))
    metadata.state_dict_metadata["t"].chunks = parts
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CoverageError, match="'t'"):
        ucp_dcp.open_checkpoint(tmp_path)["t"][:]
    with pytest.raises(CoverageError, match="'t'"):
        ucp_dcp.load({"t": torch.zeros(6)}, tmp_path)


# -- half-loaded, or found out too late -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "wanted", "kind"),
    [
        (0.5, torch.zeros((), dtype=torch.int64), DtypeMismatchError),
        (2**40, torch.zeros((), dtype=torch.int32), DtypeMismatchError),
        ([1], torch.zeros(()), PlanError),
        (3, types.MappingProxyType({"v": 0}), PlanError),
    ],
    ids=["fraction", "large", "list", "read-only dict"],
)
def test_what_cannot_be_put_there_is_found_before_tensors_are_touched(tmp_path: Path, stored: Any, wanted: Any, kind: type) -> None:
    ucp_dcp.save({"a": {"v": stored} if isinstance(wanted, types.MappingProxyType) else stored, "b": torch.ones(3)}, tmp_path)
    state = {"a": wanted, "b": torch.zeros(3)}
    with pytest.raises(kind, match="'a"):
        ucp_dcp.load(state, tmp_path)
    assert state["b"].tolist() == [0.0] * 3


def test_a_per_rank_value_where_it_cannot_be_found_again(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'t'.*PerRank"):
        ucp_dcp.save({"t": (1, PerRank(2))}, tmp_path)
    ucp_dcp.save({"l": [PerRank(2), torch.ones(1)], "d": {"p": PerRank((1, 2))}}, tmp_path)
    state: dict[str, Any] = {"l": [PerRank(0), torch.zeros(1)], "q": PerRank(None)}
    ucp_dcp.load(state, tmp_path, rename={"q": "d.p"})
    assert state["l"][0].value == 2 and state["q"].value == (1, 2) and state["l"][1].item() == 1.0


@pytest.mark.parametrize("bad", [{"x": torch.ones(2)}, {"writer": "me"}, {"x": "y" * 40_000}, {"x": float("nan")}], ids=str)
def test_provenance_is_looked_at_before_anything_is_written(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="provenance"):
        ucp_dcp.save({"a": torch.ones(3)}, tmp_path / "c", provenance=bad)
    assert not (tmp_path / "c").exists()


def test_dtypes_are_named_with_their_tensor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'x\.a'.*uint4"):
        ucp_dcp.save({"x": {"a": torch.empty(3, dtype=torch.uint4)}}, tmp_path)


def test_packed_types_cannot_be_cast(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ucp_dcp.save({"p": packed}, tmp_path)
    got = {"p": torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    ucp_dcp.load(got, tmp_path)
    assert torch.equal(got["p"].view(torch.uint8), packed.view(torch.uint8))
    with pytest.raises(DtypeMismatchError, match="'p'"):
        ucp_dcp.load({"p": torch.zeros(8)}, tmp_path)


# -- odd memory, odd values, costs ----------------------------------------------------------------------------------------------


def test_one_element_with_a_stride(tmp_path: Path) -> None:
    """Contiguous, says torch, but its stride is not 1."""
    one = torch.arange(10.0)[5::9]
    assert one.stride() == (9,) and one.is_contiguous()
    ucp_dcp.save({"a": one, "o": {"t": (one,)}}, tmp_path)
    got = {"a": torch.zeros(10)[5::9]}
    ucp_dcp.load(got, tmp_path)
    assert got["a"].tolist() == [5.0]


def test_destinations_of_every_kind(tmp_path: Path) -> None:
    ucp_dcp.save({k: torch.arange(12.0).reshape(3, 4) for k in "abcd"}, tmp_path)
    with torch.inference_mode():
        inference = torch.zeros(3, 4, dtype=torch.float64)
    leaf = torch.zeros(3, 4, requires_grad=True)
    odd = torch.zeros(8, 6)[1:7:2, ::2][:, :3]
    state = {"a": inference, "b": leaf, "c": torch.zeros(4, 3).t(), "d": torch.zeros(3, 8)[:, 1::2]}
    ucp_dcp.load(state, tmp_path)
    assert all(torch.equal(v.detach().float(), torch.arange(12.0).reshape(3, 4)) for v in state.values())
    assert leaf.grad is None and leaf.requires_grad and state["b"] is leaf and odd.shape == (3, 3)


def objects_of_rank(rank: int, world: int, url: str) -> tuple[type, str, float]:
    """Equal values whose pickles differ between processes: the order of a set of strings does."""
    words = [f"word{i}" for i in range(20)]
    value = {"set": set(words if rank else words[::-1]), None: np.float32(1.5), b"k": frozenset("ab"), "c": 1j, "d": torch.float16}
    return outcome(ucp_dcp.save, {"o": ["x", [value]]}, url)


def test_equal_objects_are_equal(ranks, tmp_path: Path) -> None:
    assert {kind for kind, _, _ in ranks.run(2, objects_of_rank, str(tmp_path / "c"))} == {type(None)}


def test_one_wrong_prefix_does_not_take_minutes(tmp_path: Path) -> None:
    ucp_dcp.save({f"model.layers.{i}.weight": torch.zeros(1) for i in range(600)}, tmp_path, storage_options={"sync": False})
    start = time.process_time()
    with pytest.raises(UCPError, match="closest stored key"):
        ucp_dcp.load({f"module.layers.{i}.weight": torch.zeros(1) for i in range(600)}, tmp_path)
    assert time.process_time() - start < 5.0


def test_a_column_is_not_a_million_reads(tmp_path: Path) -> None:
    full = torch.arange(40_000.0).reshape(10_000, 4)
    ucp_dcp.save({"t": full}, tmp_path)
    ckpt = ucp_dcp.open_checkpoint(tmp_path)
    assert torch.equal(ckpt["t"][:, 2], full[:, 2]) and ckpt.stats.ranges == 1
    got = {"t": torch.zeros(4, 10_000).t()}
    ucp_dcp.load(got, tmp_path)
    assert torch.equal(got["t"], full)


def test_stock_tools_read_ours_and_empty_tensors(tmp_path: Path) -> None:
    state = {"m": {"w": torch.ones(2, 3), "none": torch.zeros(0, 3)}, "l": [torch.ones(1), {"k": 3}], "n": 5, "rng": PerRank("seed")}
    ucp_dcp.save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    back = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(back["m"]["w"], state["m"]["w"]) and back["m"]["none"].shape == (0, 3) and back["n"] == 5
    assert back["l"][1]["k"] == 3 and back["rng"]["per_rank"]["0"] == "seed"
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    for reader in (UCPStorageReader(tmp_path / "c"), dcp.FileSystemReader(tmp_path / "c")):
        whole: dict[str, Any] = {}
        _load_state_dict(whole, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        assert torch.equal(whole["m"]["w"], state["m"]["w"]) and whole["l"][1]["k"] == 3 and whole["m"]["none"].shape == (0, 3)
