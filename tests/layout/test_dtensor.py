"""Geometry of DTensor, ShardedTensor and tensors with their own chunk lists, against what torch itself cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_dcp.errors import LayoutError, UnsupportedError
from ucp_dcp.geometry import Box
from ucp_dcp.layout import PerRank, collect, dtensor_pieces
from ucp_dcp.names import Role

from .common import examples, layout_of, rule


def torch_cut(full: torch.Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Any]) -> torch.Tensor:
    """What torch gives the coordinate: its placements split the tensor from left to right."""
    for n, k, placement in zip(mesh, coordinate, placements, strict=True):
        if not placement.is_replicate():
            full = placement._split_tensor(full, n, with_padding=False, contiguous=True)[0][k]
    return full


@st.composite
def meshes(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for _ in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        placements.append(
            draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=draw(st.integers(1, 4)))]))
        )
    return shape, mesh, placements


@given(meshes())
@examples(250)
def test_pieces_are_what_torch_cuts(case: Any) -> None:
    """A01, A03, A05, A07: uneven and empty shards, one dim over several mesh dims, strided shards with several regions."""
    shape, mesh, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    counts = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*(range(n) for n in mesh)):
        local = torch_cut(full, mesh, coordinate, placements)
        pieces = dtensor_pieces(shape, mesh, coordinate, placements)
        covered = torch.zeros(local.shape, dtype=torch.int64)
        for box, where in pieces:
            assert not box.empty and box.size == where.size
            assert torch.equal(full[box.slices()], local[where.slices()])
            counts[box.slices()] += 1
            covered[where.slices()] += 1
        assert bool((covered == 1).all()), "the local tensor is covered exactly once"
    copies = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert bool((counts == copies).all()), "every element is held once per replica"


@given(meshes())
@examples(100)
def test_one_box_agrees_with_torchs_offsets(case: Any) -> None:
    """A05: where torch's own description is right (no strided shard), ours is the same."""
    shape, mesh, placements = case
    placements = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
    for coordinate in itertools.product(*(range(n) for n in mesh)):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        pieces = dtensor_pieces(shape, mesh, coordinate, placements)
        assert pieces == ([] if 0 in size else [(Box(tuple(offset), tuple(size)), Box((0,) * len(shape), tuple(size)))])


def test_strided_shard_regions_are_separate_pieces() -> None:
    """A07: (8,) on 2 ranks, split factor 2: rank 0 owns 0, 1, 4, 5."""
    placements = [_StridedShard(0, split_factor=2)]
    assert dtensor_pieces((8,), (2,), (0,), placements) == [(Box((0,), (2,)), Box((0,), (2,))), (Box((4,), (2,)), Box((2,), (2,)))]
    # As FSDP2 over TP makes it, the second shard joins the regions again: one piece.
    for coordinate in itertools.product(range(2), range(2)):
        assert len(dtensor_pieces((8, 3), (2, 2), coordinate, [_StridedShard(0, split_factor=2), Shard(0)])) == 1


def test_outside_the_mesh_and_wrong_placements() -> None:
    assert dtensor_pieces((4,), (2,), None, [Shard(0)]) == []
    with pytest.raises(LayoutError, match="not reduced"):  # A44
        dtensor_pieces((4,), (2,), (0,), [Partial()])
    with pytest.raises(LayoutError, match="no dim 1"):
        dtensor_pieces((4,), (2,), (0,), [Shard(1)])
    with pytest.raises(LayoutError, match="placements"):
        dtensor_pieces((4,), (2,), (0,), [Shard(0), Shard(0)])


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """``start(rank, size)``: a process group without communication, so that one process can be any rank."""

    def start(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


CASES = [
    ((6,), (4,), [Shard(0)]),  # A01
    ((5, 3), (4,), [Shard(0)]),  # A01
    ((1, 8, 4), (4,), [Shard(0)]),  # A02
    ((5,), (2, 2), [Shard(0), Shard(0)]),  # A03
    ((2,), (4, 2), [Shard(0), Shard(0)]),  # A03
    ((1, 17), (2, 4), [Shard(0), Replicate()]),  # A04
    ((12,), (2, 2), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]),  # A07
    ((7, 3), (2, 2), [Replicate(), Shard(0)]),  # A08
    ((10, 4), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 0), (2,), [Shard(1)]),
    ((), (2,), [Replicate()]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES)
def test_real_dtensors(fake_world: Any, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]) -> None:
    """Fragments of real DTensors, all ranks one after another, put together: each element once per replica."""
    full = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1
    got, counts = torch.full(shape, -1.0), torch.zeros(shape)
    world = math.prod(mesh_shape)
    for rank in range(world):
        fake_world(rank, world)
        mesh = init_device_mesh("cpu", mesh_shape)
        value = distribute_tensor(full, mesh, placements, src_data_rank=None)
        collected = collect({"model": {"w": value}}, roots={"model": "model"})
        assert collected.fragments, "the key is known on every rank of the mesh (A02)"
        for f in collected.fragments:
            assert (f.key, f.role, f.fqn, f.shape) == ("model.w", Role.WEIGHT, "w", shape)
            assert tuple(f.view.shape) == f.box.size and not f.view.requires_grad
            got[f.box.slices()] = f.view
            counts[f.box.slices()] += 1
            assert f.replicated == any(isinstance(p, Replicate) for p in placements)
    assert torch.equal(got, full)
    copies = math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_replicate())
    assert bool((counts == copies).all())


def test_empty_shard_lies_behind_the_end(fake_world: Any) -> None:
    """A03: an empty shard must not have the offset of a real one."""
    fake_world(3, 4)
    value = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    (f,) = collect({"w": value}).fragments
    assert f.box == Box((6,), (0,)) and f.role == Role.PLAIN and f.fqn == ""


def test_parameters_are_detached(fake_world: Any) -> None:
    fake_world(0, 2)
    value = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    (f,) = collect({"model": {"w": torch.nn.Parameter(value)}}, roots={"model": "model"}).fragments
    f.view.copy_(torch.tensor([7.0, 8.0]))
    assert not f.view.requires_grad and value.to_local().tolist() == [7.0, 8.0]


def test_views_are_the_local_tensor(fake_world: Any) -> None:
    fake_world(0, 2)
    value = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=2)], src_data_rank=None)
    fragments = collect({"w": value}).fragments
    assert [f.box.offset for f in fragments] == [(0,), (4,)]
    for f in fragments:
        f.view.fill_(-1)
    assert bool((value.to_local() == -1).all())


def test_hand_made_uneven_dtensor_is_refused(fake_world: Any) -> None:
    """A09: (10,) on 3 ranks with lengths 5, 1, 4 and no offsets must raise, never be stored shifted."""
    for rank, n in enumerate((5, 1, 4)):
        fake_world(rank, 3)
        mesh = init_device_mesh("cpu", (3,))
        value = DTensor.from_local(torch.ones(n), mesh, [Shard(0)], run_check=False, shape=torch.Size((10,)), stride=(1,))
        with pytest.raises(LayoutError, match=r"w: DTensor of shape \(10,\).*expected"):
            collect({"w": value})


def test_same_lengths_with_a_layout_are_exact() -> None:
    """A09, the other half: with stated widths the same shards are right."""
    full = torch.arange(10)
    for k, (start, n) in enumerate(((0, 5), (5, 1), (6, 4))):
        layout = layout_of([rule("w", ("dp", "Shard", {"dim": 0, "widths": [5, 1, 4]}))], {"dp": (k, 3)})
        (f,) = layout.fragments({"model": {"w": full[start : start + n].clone()}})
        assert f.box == Box((start,), (n,)) and f.shape == (10,) and torch.equal(f.view, full[start : start + n])


def test_unsorted_mesh(fake_world: Any) -> None:
    """A45: the coordinate in the mesh counts, not the rank."""
    full = torch.arange(7.0)
    got = torch.full((7,), -1.0)
    order = [3, 1, 2, 0]
    for rank in range(4):
        fake_world(rank, 4)
        value = distribute_tensor(full, DeviceMesh("cpu", order), [Shard(0)], src_data_rank=None)
        for f in collect({"w": value}).fragments:
            if not f.box.empty:
                assert f.box.offset == (2 * order.index(rank),)
                got[f.box.slices()] = f.view
    assert torch.equal(got, full)


def test_sub_mesh(fake_world: Any) -> None:
    """A rank outside the mesh holds nothing; ranks of a mesh that does not cover the world may have replicas elsewhere."""
    for rank, inside in ((0, True), (2, False)):
        fake_world(rank, 4)
        mesh = DeviceMesh("cpu", [0, 1])
        if inside:
            value = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
            (f,) = collect({"w": value}).fragments
            assert f.replicated
        else:
            value = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,))
            assert collect({"w": value}).fragments == []


def test_partial_is_refused(fake_world: Any) -> None:
    """A44: a pending sum has no global value yet."""
    fake_world(0, 2)
    value = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    with pytest.raises(LayoutError, match="redistribute it"):
        collect({"w": value})


def test_layout_leaves_dtensors_alone_but_names_them(fake_world: Any) -> None:
    """D11: own geometry, role and global name from the layout; a sharding rule on it is an error."""
    fake_world(0, 2)
    value = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    state = {
        "model": {"layers.0.w": value},
        "optimizer": {"state": {"layers.0.w": {"master": value, "m": value, "step": torch.tensor(3.0)}}},
    }
    naming = rule("layers.{i}.w", rename="decoder.layers.{i + 4}.w")
    layout = layout_of([naming], {"dp": (0, 2)}, states={"step": "scalar", "master": "master"})
    by_key = {f.key: f for f in collect(state, layout=layout).fragments}
    assert {k: (f.role, f.fqn, f.state) for k, f in by_key.items()} == {
        "model.decoder.layers.4.w": (Role.WEIGHT, "decoder.layers.4.w", ""),
        "optimizer.state.decoder.layers.4.w.master": (Role.MASTER, "decoder.layers.4.w", ""),
        "optimizer.state.decoder.layers.4.w.m": (Role.STATE, "decoder.layers.4.w", "m"),
        "optimizer.state.decoder.layers.4.w.step": (Role.STATE, "decoder.layers.4.w", "step"),
    }
    assert by_key["model.decoder.layers.4.w"].path == ("model", "decoder.layers.4.w")
    assert by_key["model.decoder.layers.4.w"].box == Box((0,), (2,))
    with pytest.raises(LayoutError, match="brings its own geometry"):
        collect(state, layout=layout_of([rule("layers.{i}.w", ("dp", "Shard", {"dim": 0}))], {"dp": (0, 2)}))
    # A DTensor needs no rule at all, nor does its step.
    other = layout_of([rule("x")], {"dp": (0, 2)}, states={"step": "scalar"})
    assert {f.fqn for f in collect(state, layout=other).fragments} == {"layers.0.w"}


def test_plain_state_of_a_dtensor_parameter(fake_world: Any) -> None:
    """A43: a local shard kept as a plain tensor would be stored as the whole state."""
    fake_world(0, 2)
    value = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    state = {"model": {"w": value}, "optimizer": {"state": {"w": {"exp_avg": torch.arange(4.0), "step": torch.tensor(1.0)}}}}
    with pytest.raises(LayoutError, match=r"optimizer.state.w.exp_avg: found a plain tensor of shape \(4,\)"):
        collect(state, roots={"model": "model", "optimizer": "optimizer"})
    state["optimizer"]["state"]["w"]["exp_avg"] = torch.zeros(8)  # whole: fine
    assert len(collect(state, roots={"model": "model", "optimizer": "optimizer"}).fragments) == 3


class Chunked(torch.Tensor):
    """A tensor subclass with torch 2.13's dunders: rows 1 and 3 of a (4, 2) tensor."""

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> Chunked:
        self = torch.Tensor._make_subclass(cls, rows)
        return self

    def size(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((4, 2))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((r, 0)), torch.Size((1, 2))) for r in (1, 3)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        row = {1: 0, 3: 1}[index.offset[0]]
        return torch.Tensor(self.as_subclass(torch.Tensor)[row : row + 1])


def test_tensor_with_its_own_chunks() -> None:
    """Torch 2.13's ``__create_chunk_list__`` and ``__get_tensor_shard__`` are honoured."""
    fragments = collect({"w": Chunked(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}).fragments
    assert [(f.shape, f.box, f.view.tolist()) for f in fragments] == [
        ((4, 2), Box((1, 0), (1, 2)), [[1.0, 2.0]]),
        ((4, 2), Box((3, 0), (1, 2)), [[3.0, 4.0]]),
    ]


def test_checkpointable_tensor_of_torch_2_14() -> None:
    """The four attributes: a padded local buffer with two shards."""
    value = torch.arange(12.0).reshape(6, 2)
    value.global_shape = (8, 2)  # type: ignore[attr-defined]
    value.global_offsets = [(2, 0), (6, 0)]  # type: ignore[attr-defined]
    value.local_offsets = [(0, 0), (3, 0)]  # type: ignore[attr-defined]
    value.local_sizes = [(2, 2), (1, 2)]  # type: ignore[attr-defined]
    first, second = collect({"w": value}).fragments
    assert (first.box, first.view.tolist()) == (Box((2, 0), (2, 2)), [[0.0, 1.0], [2.0, 3.0]])
    assert (second.box, second.view.tolist()) == (Box((6, 0), (1, 2)), [[6.0, 7.0]])
    assert second.view.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    value.local_offsets = [(0, 0), (6, 0)]  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match="does not lie in the local shape"):
        collect({"w": value})
    value.local_offsets = [(0, 0), (3, 0)]  # type: ignore[attr-defined]
    value.global_offsets = [(2, 0), (8, 0)]  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match="does not lie in shape"):
        collect({"w": value})


def test_chunk_list_on_a_local_tensor(fake_world: Any) -> None:
    """Frameworks hang the dunders on the local tensor of a DTensor whose shards are not torch.chunk's."""
    fake_world(1, 3)
    local = torch.arange(1.0)
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size((5,)), torch.Size((1,)))]  # type: ignore[attr-defined]
    local.__get_tensor_shard__ = lambda index: local  # type: ignore[attr-defined]
    value = DTensor.from_local(local, init_device_mesh("cpu", (3,)), [Shard(0)], run_check=False, shape=torch.Size((10,)), stride=(1,))
    value._local_tensor = local
    (f,) = collect({"w": value}).fragments
    assert f.box == Box((5,), (1,)) and f.shape == (10,)


def test_sharded_tensor(fake_world: Any) -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties

    fake_world(0, 2)
    placed = [ShardMetadata([0, 0], [1, 3], "rank:0/cpu"), ShardMetadata([1, 0], [2, 3], "rank:1/cpu")]
    meta = ShardedTensorMetadata(placed, torch.Size((3, 3)), TensorProperties(dtype=torch.float32))
    value = ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(torch.ones(1, 3), placed[0])], meta)
    (f,) = collect({"model": {"w": value}}, roots={"model": "model"}).fragments
    assert (f.shape, f.box, f.role, f.replicated) == ((3, 3), Box((0, 0), (1, 3)), Role.WEIGHT, False)
    value.local_shards()[0].tensor = torch.ones(2, 3)
    with pytest.raises(LayoutError, match="its metadata says"):
        collect({"model": {"w": value}})


def test_nested_sharded_tensor(fake_world: Any) -> None:
    """FSDP1 over TP: the outer shard's tensor is a ShardedTensor whose offsets count inside it."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties

    def sharded(tensor: Any, offset: list[int], size: list[int], whole: tuple[int, ...]) -> ShardedTensor:
        rest = ShardMetadata([0, 0], [whole[0] - size[0], size[1]], "rank:1/cpu") if offset[0] else None
        here = ShardMetadata(offset, size, "rank:0/cpu")
        meta = ShardedTensorMetadata([here] if rest is None else [rest, here], torch.Size(whole), TensorProperties(dtype=torch.float32))
        return ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(torch.ones(size), here)], meta)

    fake_world(0, 2)
    inner = sharded(None, [1, 0], [2, 4], (3, 4))
    outer = sharded(None, [3, 0], [3, 4], (6, 4))
    outer.local_shards()[0].tensor = inner
    (f,) = collect({"w": outer}).fragments
    assert (f.shape, f.box) == ((6, 4), Box((4, 0), (2, 4)))


def test_ranks_beyond_the_layout_may_be_replicas(fake_world: Any) -> None:
    """Two ranks that no axis tells apart hold the same, as far as the layout knows."""
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 0}))], {"tp": (0, 2)})
    for size, replicated in ((2, False), (4, True)):
        fake_world(0, size)
        (f,) = layout.fragments({"model": {"w": torch.zeros(2)}})
        assert f.replicated is replicated


def test_unknown_placement() -> None:
    class Odd:
        def is_replicate(self) -> bool:
            return False

        def is_partial(self) -> bool:
            return False

    with pytest.raises(UnsupportedError, match="not known"):
        dtensor_pieces((4,), (2,), (0,), [Odd()])


def test_per_rank_value_is_no_tensor_leaf() -> None:
    """B16: a generator's state differs on every rank and is kept so, also after a stager rebuilt the dict."""
    for value in (PerRank(torch.arange(3)), {"__ucp_per_rank__": torch.arange(3)}):
        collected = collect({"rng": {"cpu": value}, "x": 1})
        assert collected.fragments == []
        rng, x = collected.objects
        assert (rng.key, rng.path, rng.per_rank) == ("rng.cpu", ("rng", "cpu"), True) and torch.equal(rng.value, torch.arange(3))
        assert (x.key, x.per_rank) == ("x", False)
