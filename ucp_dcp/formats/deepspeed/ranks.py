"""The records of one checkpoint in rank order, checked against each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CorruptCheckpointError, UnsupportedError
from .flat import Pieces

__all__ = ["Ranks", "order_ranks"]

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


@dataclass(frozen=True, slots=True)
class Ranks:
    """``optim[r]`` is dp rank r's optimizer record, ``models[r]`` its model record (stage 3; otherwise one), ``model`` the first.

    ``stage`` is 1, 2, 3, or None for BF16_Optimizer, which does not say. ``shapes`` are the parameters of each flat buffer, in its order.
    """

    stage: int | None
    dp: int
    optim: Sequence[Mapping[str, Any]]
    models: Sequence[Mapping[str, Any]]
    shapes: Sequence[Sequence[tuple[str, tuple[int, ...]]]]

    @property
    def model(self) -> Mapping[str, Any]:
        """The model record that speaks for all."""
        return self.models[0]

    def owner_of(self, g: int) -> tuple[int, int]:
        """(optimizer group, id of its state) of flat buffer g: the ids in ``param_groups[i].params`` count the flat buffers."""
        for i, group in enumerate(self.optim[0]["groups"]):
            if g in group["params"]:
                return i, g
        raise CorruptCheckpointError(f"{self.optim[0]['path']}: flat buffer {g} belongs to no param group")

    def param_paddings(self, g: int) -> Sequence[int]:
        """Elements of padding after each parameter of group g (zero_optimization.parameter_alignment)."""
        paddings = self.optim[0]["param_paddings"]
        if paddings is None:
            return [0] * len(self.shapes[g])
        for rank in self.optim:
            if rank["param_paddings"] != paddings:
                raise CorruptCheckpointError(f"{rank['path']}: param_alignment_paddings differ from those in {self.optim[0]['path']}")
        if len(paddings) != len(self.shapes) or len(paddings[g]) != len(self.shapes[g]):
            raise CorruptCheckpointError(f"{self.optim[0]['path']}: param_alignment_paddings do not fit the parameters of group {g}")
        return paddings[g]  # type: ignore[no-any-return]

    def check_paddings(self, g: int, size: int, valid: Sequence[int]) -> None:
        """DeepSpeed's own count of this rank's padding must be ours. BF16_Optimizer counts all of it on the last rank."""
        for r, rank in enumerate(self.optim):
            stated = rank["paddings"]
            if stated is None:
                continue
            expected = size - valid[r]
            if self.stage is None:
                expected = sum(size - v for v in valid) if r == self.dp - 1 else 0
            if len(stated) != len(self.shapes) or stated[g] != expected:
                raise CorruptCheckpointError(
                    f"{rank['path']}: group_paddings are {stated}, expected {expected} for group {g} from the parameter shapes in "
                    f"{self.model['path']} and {self.dp} ranks"
                )

    def check_mappings(self, g: int, pieces: Sequence[Pieces]) -> None:
        """DeepSpeed's own list of what lies where must be ours, except with round_robin_gradients, where it describes the wrong bytes."""
        ours: list[dict[str, tuple[int, int]]] = [{} for _ in self.optim]
        for piece in pieces:
            numel = piece.boxes[:, 1].prod(axis=1)
            for rank, start, count in zip(piece.rank.tolist(), piece.start.tolist(), numel.tolist(), strict=True):
                first, total = ours[rank].get(piece.name, (start, 0))
                ours[rank][piece.name] = (first, total + count)
        for r, rank in enumerate(self.optim):
            mappings = rank["mappings"]
            if mappings is None or rank["round_robin"]:
                continue
            theirs = {name: (start, numel) for name, start, numel in mappings[g]} if g < len(mappings) else {}
            if theirs != ours[r]:
                name = sorted(n for n in set(theirs) | set(ours[r]) if theirs.get(n) != ours[r].get(n))[0]
                raise CorruptCheckpointError(
                    f"{rank['path']}: param_slice_mappings put {name!r} at (start, size) {theirs.get(name)}, the parameter shapes in "
                    f"{self.model['path']} at {ours[r].get(name)}"
                )


def order_ranks(records: Sequence[Mapping[str, Any]], prefix: str) -> Ranks:
    """Sort records by rank and check what several of them state. Raises CorruptCheckpointError naming the file, UnsupportedError."""
    optim = _by_rank([r for r in records if r["kind"] == "optim"])
    models = _by_rank([r for r in records if r["kind"] == "model"])
    if not optim or not models:
        raise CorruptCheckpointError(f"{prefix or 'this folder'}: {'optimizer' if not optim else 'model'} states are missing")
    first, model = optim[min(optim)], models[min(models)]
    stage = first["stage"]
    _check_kind(first, model, stage)
    if model["param_shapes"] is None:
        raise UnsupportedError(f"{model['path']}: no param_shapes beside the files of a ZeRO optimizer: from DeepSpeed before 0.3.16")
    counts = first["partition_count"]
    dp = counts if isinstance(counts, int) else counts[0] if counts else 0
    _check_files(optim, dp, first, "partition_count")
    if stage == 3:
        _check_files(models, dp, first, "partition_count")
    if dp != model["dp_world_size"]:
        raise CorruptCheckpointError(
            f"{model['path']}: dp_world_size is {model['dp_world_size']}, partition_count in {first['path']} is {dp}: files of two saves"
        )
    shapes = model["param_shapes"]
    for rank in optim.values():
        same = (rank["stage"], rank["partition_count"]) == (stage, counts)
        if not same or [g["params"] for g in rank["groups"]] != [g["params"] for g in first["groups"]]:
            raise CorruptCheckpointError(
                f"{rank['path']}: zero_stage, partition_count or param groups differ from those in {first['path']}: files of two saves"
            )
        if len(rank["masters"]) != len(shapes):
            raise CorruptCheckpointError(
                f"{rank['path']}: {len(rank['masters'])} flat fp32 groups, but {model['path']} lists the parameters of {len(shapes)}"
            )
    for rank in models.values():
        if rank["shapes_digest"] != model["shapes_digest"] or rank["global_steps"] != model["global_steps"]:
            raise CorruptCheckpointError(f"{rank['path']}: its parameters or step differ from those in {model['path']}: files of two saves")
    _check_names(shapes, first, model)
    return Ranks(stage, dp, [optim[r] for r in range(dp)], [models[r] for r in sorted(models)], shapes)


def _by_rank(records: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for record in records:
        match = _RANK.search(record["path"].rpartition("/")[2])
        rank = int(match[1]) if match else 0
        if rank in found:
            raise CorruptCheckpointError(f"{record['path']}: a second file of rank {rank} beside {found[rank]['path']}")
        found[rank] = record
    return found


def _check_kind(first: Mapping[str, Any], model: Mapping[str, Any], stage: int | None) -> None:
    if model["mp_world_size"] > 1:
        raise UnsupportedError(
            f"{model['path']}: mp_world_size is {model['mp_world_size']}: tensor or pipeline parallelism is not supported yet"
        )
    if model["experts"]:
        raise UnsupportedError(f"{model['path']}: num_experts: mixtures of experts are not supported yet")
    counts = first["partition_count"]
    if not isinstance(counts, int) and len(set(counts)) > 1:
        raise UnsupportedError(f"{first['path']}: groups are partitioned over {counts} ranks; only one data-parallel size is supported yet")
    if stage == 3 and not isinstance(counts, int):
        raise UnsupportedError(f"{first['path']}: a ZeRO-3 partition count per group ({counts}) is not supported yet")


def _check_files(found: Mapping[int, Mapping[str, Any]], dp: int, first: Mapping[str, Any], what: str) -> None:
    """Exactly the files of ranks 0 to dp - 1."""
    example = found[min(found)]["path"]
    missing = [r for r in range(dp) if r not in found]
    if missing:
        name = _RANK.sub(lambda m: f"zero_pp_rank_{missing[0]}_mp_rank_{m[2]}_", example)
        raise CorruptCheckpointError(f"{name}: the file is missing: {what} in {first['path']} is {dp}, found {len(found)} such files")
    extra = sorted(r for r in found if r >= dp)
    if extra or dp == 0:
        path = found[extra[0]]["path"] if extra else first["path"]
        raise CorruptCheckpointError(
            f"{path}: does not belong to this save: {what} in {first['path']} is {dp}; a left-over of another one?"
        )


def _check_names(shapes: Sequence[Sequence[tuple[str, Any]]], first: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    names = [name for group in shapes for name, _ in group]
    if len(set(names)) != len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)[0]
        raise CorruptCheckpointError(f"{model['path']}: parameter {twice!r} is listed twice in param_shapes")
    ids = [i for group in first["groups"] for i in group["params"]]
    if sorted(ids) != list(range(len(shapes))):
        raise CorruptCheckpointError(
            f"{first['path']}: param groups refer to the flat buffers {ids}, expected 0 to {len(shapes) - 1}, as {model['path']} lists them"
        )
    for alias, name in model["shared"].items():
        if alias in names and name in names:
            raise CorruptCheckpointError(f"{model['path']}: {alias!r} is shared with {name!r}, but both have optimizer state")
