"""The run that wrote a checkpoint: sizes from its arguments, and which shard each rank file holds.

Ranks of a pipeline stage are numbered tp fastest, then cp, then dp; for experts etp fastest, then ep, then their own dp
(``core/parallel_state.py``). A file is written by the ranks that are first in dp or in the experts' dp (``training/checkpointing.py``),
and its name tells tp, pp and ep only: so not every pair (tp, ep) has a file, and the expert-tp of a file follows from who wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CorruptCheckpointError, UnsupportedError
from ..megatron_core.objects import Common
from .folder import MODEL, rank_numbers

__all__ = ["Rank", "Run", "arrange"]

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "world_size", "num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_query_groups", "num_experts", "padded_vocab_size", "swiglu", "untie_embeddings_and_output_weights",
)  # fmt: skip
"""Arguments that all ranks of one run share."""


class Run:
    """Sizes of a run."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.path: str = record["path"]
        self.common = Common(record["path"], {"args": record["args"]})
        self.args = self.common.args
        size = self.common.integer
        self.tp = size("tensor_model_parallel_size", 1) or 1
        self.pp = size("pipeline_model_parallel_size", 1) or 1
        self.cp = size("context_parallel_size", 1) or 1
        self.ep = size("expert_model_parallel_size", 1) or 1
        self.etp = size("expert_tensor_parallel_size", self.tp) or self.tp
        self.experts = size("num_experts")
        if self.experts is None:
            self.ep, self.etp = 1, self.tp

    @property
    def own_expert_group(self) -> bool:
        """Whether experts have a data-parallel group, buffers and an optimizer of their own."""
        return self.experts is not None and (self.ep > 1 or self.etp != self.tp)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the word embedding. Before there was a choice it always was."""
        return not self.args.get("untie_embeddings_and_output_weights", False)

    def gated(self, name: str) -> bool | None:
        """Whether ``linear_fc1`` holds gate and up; None: ``args`` does not say."""
        for key in ("swiglu", "gated_linear_unit", "quick_geglu", "geglu", "reglu", "liglu"):
            if self.args.get(key):
                return True
        unit = self.args.get("glu_activation")
        return bool(unit) if unit is not None else False if "swiglu" in self.args else None


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank folder: its coordinates, the record of its model file and that of its optimizer file."""

    name: str
    tp: int
    pp: int
    ep: int
    etp: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None


def arrange(records: Sequence[Mapping[str, Any]], prefix: str) -> tuple[Run, list[Rank]]:
    """Records to ranks in order of (pp, tp, ep), after checks that they are one complete save.

    Raises CorruptCheckpointError naming the file that is missing or does not fit, UnsupportedError.
    """
    models = {r["path"][len(prefix) :].partition("/")[0]: r for r in records if r["kind"] == "model"}
    optimizers = {r["path"][len(prefix) :].partition("/")[0]: r for r in records if r["kind"] == "optimizer"}
    first = models[min(models)]
    run = Run(first)
    for record in models.values():
        _same_run(first, record)
    _plausible(run, len(models))
    names = {name: _coordinates(name, run, prefix) for name in models}
    expected = _expected(run)
    present = set(names.values())
    for tp, pp, ep in sorted(expected - present, key=lambda c: (c[1], c[0], c[2])):
        if not run.own_expert_group or not _covered(run, names, tp, pp, ep):
            raise CorruptCheckpointError(
                f"{prefix}{_folder_name(run, tp, pp, ep)}/{MODEL}: the file is missing: args in {first['path']} say tensor parallel "
                f"{run.tp}, pipeline parallel {run.pp}, expert parallel {run.ep}; found {len(models)} rank folders"
            )
    ranks = []
    for name, (tp, pp, ep) in names.items():
        etp = _expert_tensor_rank(run, tp, ep, f"{prefix}{name}")
        ranks.append(Rank(name, tp, pp, ep, etp, models[name], optimizers.get(name)))
    chunks = {len(rank.model["chunks"]) for rank in ranks}
    if len(chunks) != 1:
        odd = next(rank for rank in ranks if len(rank.model["chunks"]) != len(first["chunks"]))
        raise CorruptCheckpointError(
            f"{odd.model['path']}: {len(odd.model['chunks'])} model chunks, but {len(first['chunks'])} in {first['path']}: "
            "files of two runs"
        )
    return run, sorted(ranks, key=lambda r: (r.pp, r.tp, r.ep))


def _plausible(run: Run, folders: int) -> None:
    """Sizes that no run has must not become loops."""
    for key, size in (
        ("tensor_model_parallel_size", run.tp),
        ("pipeline_model_parallel_size", run.pp),
        ("expert_model_parallel_size", run.ep),
        ("expert_tensor_parallel_size", run.etp),
        ("context_parallel_size", run.cp),
    ):
        if size > 1 << 12 and size > folders:
            raise CorruptCheckpointError(f"{run.path}: args.{key} is {size}, with {folders} rank folders")


def _same_run(first: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    if record["iteration"] != first["iteration"]:
        raise CorruptCheckpointError(
            f"{record['path']}: iteration {record['iteration']}, but {first['iteration']} in {first['path']}: files of two saves"
        )
    for key in _SIZES:
        a, b = first["args"].get(key), record["args"].get(key)
        if a != b:
            raise CorruptCheckpointError(f"{record['path']}: args.{key} is {b!r:.40}, but {a!r:.40} in {first['path']}: files of two runs")
    if record["version"] != first["version"]:
        raise CorruptCheckpointError(
            f"{record['path']}: checkpoint_version is {record['version']!r:.40}, but {first['version']!r:.40} in {first['path']}"
        )
    version = record["version"]
    if not isinstance(version, (int, float)) or version < 2:
        raise UnsupportedError(
            f"{record['path']}: checkpoint_version is {version!r:.40}: before 2.0 the rows of fused queries, keys and values lie in "
            "another order; load and save it with Megatron-LM once"
        )


def _coordinates(name: str, run: Run, prefix: str) -> tuple[int, int, int]:
    numbers = rank_numbers(name)
    expected = 1 + (run.pp > 1) + (run.ep > 1)
    if len(numbers) != expected:
        raise CorruptCheckpointError(
            f"{prefix}{name}: {len(numbers)} numbers in the folder's name, expected {expected}: args in {run.path} say pipeline parallel "
            f"{run.pp}, expert parallel {run.ep}; left over from another run?"
        )
    tp = numbers[0]
    pp = numbers[1] if run.pp > 1 else 0
    ep = numbers[-1] if run.ep > 1 else 0
    if tp >= run.tp or pp >= run.pp or ep >= run.ep:
        raise CorruptCheckpointError(
            f"{prefix}{name}: does not belong to this run: args in {run.path} say tensor parallel {run.tp}, pipeline parallel {run.pp}, "
            f"expert parallel {run.ep}; left over from another one?"
        )
    return tp, pp, ep


def _writers(run: Run) -> range:
    """Ranks within a stage that are first in dp, or in the experts' dp, of their shard."""
    return range(max(run.tp * run.cp, run.etp * run.ep))


def _expected(run: Run) -> set[tuple[int, int, int]]:
    pairs = {(r % run.tp, r // run.etp % run.ep) for r in _writers(run)}
    return {(tp, pp, ep) for tp, ep in pairs for pp in range(run.pp)}


def _covered(run: Run, names: Mapping[str, tuple[int, int, int]], tp: int, pp: int, ep: int) -> bool:
    """Whether other files of the stage hold both this file's dense shard and its expert shard (another order of ranks)."""
    etp = _expert_tensor_rank(run, tp, ep, "")
    here = [(t, e) for t, p, e in names.values() if p == pp]
    return any(t == tp for t, _ in here) and any(e == ep and _expert_tensor_rank(run, t, e, "") == etp for t, e in here)


def _expert_tensor_rank(run: Run, tp: int, ep: int, where: str) -> int:
    found = {r % run.etp for r in _writers(run) if r % run.tp == tp and r // run.etp % run.ep == ep}
    if not found:  # no writer by the usual order of ranks
        found = {r % run.etp for r in range(run.tp * run.etp * run.ep) if r % run.tp == tp and r // run.etp % run.ep == ep}
    if len(found) != 1:
        raise UnsupportedError(
            f"{where}: expert tensor parallel {run.etp} with tensor parallel {run.tp}: the legacy format has no number for it "
            f"in its names, and {len(found)} ranks wrote this file over each other; their experts are lost (Megatron-LM issue 1719)"
        )
    return found.pop()


def _folder_name(run: Run, tp: int, pp: int, ep: int) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if run.pp > 1 else "") + (f"_{ep:03d}" if run.ep > 1 else "")
