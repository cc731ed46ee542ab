"""How tensor parallelism divides each parameter, by its name: the files do not say it, only live parameters do.

Sources: core/tensor_parallel/layers.py, core/transformer/{attention,mlp,multi_latent_attention,moe/*}.py (0.19.2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...errors import CorruptCheckpointError, UnsupportedError
from ...geometry import c_strides
from .run import Run

__all__ = ["VOCABULARY", "Rule", "Unit", "rule_of", "units_of"]

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..+)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")
_GROUPED_OLD = re.compile(r"(.*\.experts\.)weight([12])")
_REPLICATED = re.compile(
    r"(?:.*\.)?(?:\w*(?:layernorm|layer_norm|norm)\.(?:weight|bias)|[eh]norm\.(?:weight|bias)|(?:linear_proj|linear_fc2)\.bias"
    r"|\w+\.layer_norm_(?:weight|bias)|router\.(?:weight|bias|expert_bias)|local_tokens_per_expert|shared_experts\.gate_weight"
    r"|fc[12]_latent_proj\.weight|(?:position|tokentype)_embeddings\.weight)"
)
_ROWS = re.compile(
    r"(?:.*\.)?(?:(?:linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(?:weight|bias)"
    r"|core_attention\.softmax_offset)"
)
_FIRST = re.compile(r"(?:.*\.)?linear_fc1\.(?:weight|bias)")
_COLUMNS = re.compile(r"(?:.*\.)?(?:linear_proj|linear_fc2)\.weight")
_DOWN = re.compile(r"(?:.*\.)?(linear_q_down_proj|linear_kv_down_proj)\.(?:weight|bias)")


@dataclass(frozen=True, slots=True)
class Rule:
    """``dim`` is divided (-1: none), each of ``parts`` equal parts of it by itself. ``expert``: over expert tensor parallelism."""

    dim: int = -1
    parts: int = 1
    expert: bool = False

    def text(self) -> str:
        """The rule in the words of the UCP language."""
        axis = "etp" if self.expert else "tp"
        if self.dim < 0:
            return f"{axis}: Replicate()"
        return f"{axis}: Shard({self.dim})" if self.parts == 1 else f"{axis}: Shard({self.dim}, parts: gate, up)"


@dataclass(frozen=True, slots=True)
class Unit:
    """A global parameter's shard inside a stored one: mostly all of it.

    Attributes:
        fqn: global name but for the layer number.
        start: element of the stored parameter.
        shape, strides: of the shard, in elements of a contiguous stored parameter.
    """

    fqn: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rule: Rule


def units_of(name: str, shape: tuple[int, ...], run: Run, ep: int, where: str) -> list[Unit]:
    """What the local parameter ``name`` holds: itself, or one parameter per expert. Expert numbers become global ones."""

    def whole(fqn: str) -> list[Unit]:
        return [Unit(fqn, 0, shape, c_strides(shape), rule_of(fqn, shape, run, where))]

    match = _EXPERT.fullmatch(name)
    if match is not None:
        return whole(f"{match[1]}{_global_expert(int(match[2]), run, ep, name, where)}{match[3]}")
    match = _GROUPED.fullmatch(name)
    if match is not None:
        number = _global_expert(int(match[4]), run, ep, name, where)
        return whole(f"{match[1]}local_experts.{number}.{match[2]}.{match[3]}")
    match = _GROUPED_OLD.fullmatch(name)
    if match is None:
        return whole(name)
    # GroupedMLP: all local experts in one matrix, [hidden, experts * f] and [experts * f, hidden] by shape, but in memory expert by expert;
    # each is used as x @ w, so it is the transpose of a linear layer's weight
    count = _local_experts(run, name, where)
    hidden = shape[0] if match[2] == "1" else shape[-1]
    if len(shape) != 2 or prod(shape) % (count * hidden):
        raise CorruptCheckpointError(f"{where}: {name!r} has shape {list(shape)}, which {count} experts do not divide")
    rows, columns = (prod(shape) // count // hidden, hidden) if match[2] == "1" else (hidden, prod(shape) // count // hidden)
    found = []
    for m in range(count):
        fqn = f"{match[1]}local_experts.{_global_expert(m, run, ep, name, where)}.linear_fc{match[2]}.weight"
        found.append(Unit(fqn, m * rows * columns, (rows, columns), (1, rows), rule_of(fqn, (rows, columns), run, where)))
    return found


def _local_experts(run: Run, name: str, where: str) -> int:
    if run.experts is None or run.experts % run.ep:
        raise CorruptCheckpointError(
            f"{where}: {name!r} belongs to an expert, but args.num_experts is {run.experts} with expert parallel {run.ep}"
        )
    return run.experts // run.ep


def _global_expert(local: int, run: Run, ep: int, name: str, where: str) -> int:
    count = _local_experts(run, name, where)
    if local >= count:
        raise CorruptCheckpointError(
            f"{where}: {name!r} is expert {local} of this rank, but {run.experts} experts over {run.ep} ranks are {count} each"
        )
    return ep * count + local


def rule_of(fqn: str, shape: Sequence[int], run: Run, where: str) -> Rule:
    """How the parameter is divided. Raises UnsupportedError for one that is not known where that matters."""
    expert = _EXPERT.fullmatch(fqn) is not None
    size = run.etp if expert else run.tp
    if size == 1:
        return Rule(expert=expert)
    if fqn in VOCABULARY or _ROWS.fullmatch(fqn):
        return Rule(0, 1, expert)
    if _FIRST.fullmatch(fqn):
        return Rule(0, 2 if _gated(fqn, shape, run, size, where) else 1, expert)
    if _COLUMNS.fullmatch(fqn):
        return Rule(1, 1, expert)
    match = _DOWN.fullmatch(fqn)
    if match is not None:
        return _down(match[1], fqn, shape, run, where)
    if _REPLICATED.fullmatch(fqn):
        return Rule(expert=expert)
    raise UnsupportedError(
        f"{where}: how tensor parallelism ({run.tp}) divides the parameter {fqn!r} {list(shape)} is not known to this version, and the "
        "legacy format does not say it; save with --ckpt-format torch_dist"
    )


def _gated(fqn: str, shape: Sequence[int], run: Run, size: int, where: str) -> bool:
    """Whether rows are gate and up. ``args`` says it; the width says it too, and must agree where it is known."""
    if run.args.get("moe_mlp_glu_interleave_size"):
        raise UnsupportedError(f"{where}: args.moe_mlp_glu_interleave_size: interleaved gate and up rows ({fqn!r}) are not supported yet")
    width = run.args.get("ffn_hidden_size")
    if ".shared_experts." in fqn:
        width = run.args.get("moe_shared_expert_intermediate_size")
    elif ".experts." in fqn:
        width = run.args.get("moe_ffn_hidden_size") or width
    gated = run.gated(fqn)
    rows = shape[0] * size
    if type(width) is not int or width <= 0:
        if gated is None:
            raise UnsupportedError(f"{where}: args tell neither swiglu nor ffn_hidden_size, so the rows of {fqn!r} cannot be told apart")
        return gated
    if rows not in (width, 2 * width) or (gated is not None and rows != width * (2 if gated else 1)):
        raise CorruptCheckpointError(
            f"{where}: {fqn!r} has {shape[0]} rows on each of {size} ranks, expected {width * (2 if gated else 1)} in all "
            f"(args: width {width}, {'gate and up' if gated else 'no gate'})"
        )
    return rows == 2 * width


def _down(which: str, fqn: str, shape: Sequence[int], run: Run, where: str) -> Rule:
    """MLA's down projections: whole on every rank with Transformer Engine's layers, divided with local ones."""
    if which == "linear_q_down_proj":
        rank = run.args.get("q_lora_rank")
    else:
        parts = (run.args.get("kv_lora_rank"), run.args.get("qk_pos_emb_head_dim"))
        rank = parts[0] + parts[1] if type(parts[0]) is int and type(parts[1]) is int else None
    if rank == shape[0]:
        return Rule()
    if rank == shape[0] * run.tp:
        return Rule(0)
    raise CorruptCheckpointError(
        f"{where}: {fqn!r} has {shape[0]} rows on each of {run.tp} ranks; args say {rank} in all, which is neither a copy nor a shard"
    )
