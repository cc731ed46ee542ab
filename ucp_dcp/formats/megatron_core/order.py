"""The order in which megatron-core's modules register their parameters, and which stage has which layers.

It decides where a parameter lies in an optimizer buffer. Sources (0.19.2): ``core/models/gpt/gpt_model.py``, ``transformer/attention.py``,
``multi_latent_attention.py``, ``transformer_layer.py``, ``moe/moe_layer.py``, ``moe/shared_experts.py``; stages:
``transformer_layer.get_transformer_layer_offset``, ``transformer_block.get_num_layers_to_build``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import UnsupportedError
from .objects import Common

__all__ = ["STYLES", "Style", "expert_of", "in_module_order", "layer_of", "stage_layers"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(.+)")
_HEAD = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
_TAIL = ("decoder.final_layernorm", "output_layer")
_WITHIN = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_ATTENTION = (
    "core_attention.softmax_offset",
    "linear_proj",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_qkv",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
)
_MLP = ("router", "fc1_latent_proj", "fc2_latent_proj", "experts", "shared_experts", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True)
class Style:
    """What a checkpoint does not say of the modules that wrote it.

    fused_norm: the norm before attention is part of ``linear_qkv`` (Transformer Engine), not a module in front (local spec).
    grouped: all first matrices of the experts before all second ones (grouped GEMM), not expert by expert.
    """

    fused_norm: bool
    grouped: bool


STYLES = tuple(Style(fused, grouped) for fused in (False, True) for grouped in (False, True))


def layer_of(fqn: str) -> int | None:
    """The layer number in a name, None for what is outside the layers."""
    match = _LAYER.fullmatch(fqn)
    return None if match is None else int(match[1])


def expert_of(fqn: str) -> int | None:
    """The expert number in a name."""
    match = re.search(r"\.experts\.local_experts\.(\d+)\.", fqn)
    return None if match is None else int(match[1])


def in_module_order(names: Iterable[str], style: Style, where: str) -> list[str]:
    """Names as ``named_parameters()`` lists them. Raises UnsupportedError for one whose place is not known."""
    return sorted(names, key=lambda fqn: _place(fqn, style, where))


def _place(fqn: str, style: Style, where: str) -> tuple[int, ...]:
    match = _LAYER.fullmatch(fqn)
    if match is None:
        for part, heads in ((0, _HEAD), (2, _TAIL)):
            for i, head in enumerate(heads):
                if fqn.startswith(head + "."):
                    return (part, i, _within(fqn.removeprefix(head + "."), fqn, where))
        raise _unknown(fqn, where)
    layer, tail = int(match[1]), match[2]
    return (1, layer, *_in_layer(tail, style, fqn, where))


def _in_layer(tail: str, style: Style, fqn: str, where: str) -> tuple[int, ...]:
    first, _, rest = tail.partition(".")
    if first == "input_layernorm":
        return (0, _within(rest, fqn, where))
    if first == "self_attention":
        if not style.fused_norm and rest.startswith("linear_qkv.layer_norm_"):
            return (0, _within(rest.removeprefix("linear_qkv."), fqn, where))
        for i, name in enumerate(_ATTENTION):
            if rest == name:
                return (1, i)
            if rest.startswith(name + "."):
                return (1, i, _within(rest.removeprefix(name + "."), fqn, where))
    if first == "pre_mlp_layernorm":
        return (2, _within(rest, fqn, where))
    if first == "mlp":
        expert = _EXPERT.fullmatch(tail)
        if expert is not None:
            number, matrix = int(expert[1]), int(expert[2][-1])
            pair = (matrix, number) if style.grouped else (number, matrix)
            return (3, _MLP.index("experts"), *pair, _within(expert[3], fqn, where))
        if rest.startswith("linear_fc1.layer_norm_"):  # alone in front of the router, or first in linear_fc1: the same place
            return (2, _within(rest.removeprefix("linear_fc1."), fqn, where))
        if rest == "shared_experts.gate_weight":  # a parameter of the module itself comes before those of its parts
            return (3, _MLP.index("shared_experts"), 0)
        for i, name in enumerate(_MLP):
            if rest.startswith(name + "."):
                inner = rest.removeprefix(name + ".")
                if name == "shared_experts":
                    linear, _, last = inner.partition(".")
                    if linear in ("linear_fc1", "linear_fc2"):
                        return (3, i, int(linear[-1]), _within(last, fqn, where))
                elif name != "experts":
                    return (3, i, _within(inner, fqn, where))
    raise _unknown(fqn, where)


def _within(name: str, fqn: str, where: str) -> int:
    if name not in _WITHIN:
        raise _unknown(fqn, where)
    return _WITHIN.index(name)


def _unknown(fqn: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: the optimizer state is stored as flat buffers, and where parameter {fqn!r} lies in them is not known to this version. "
        "Its weights can be had as a stock checkpoint (prefer='stock'); to keep the optimizer state save with "
        "--dist-ckpt-optim-fully-reshardable"
    )


def stage_layers(common: Common, layers: int, pp: int, vpp: int) -> dict[tuple[int, int], range]:
    """(pipeline rank, model chunk) -> global layers. Raises UnsupportedError for a division that ``args`` does not describe."""
    args = common.args
    if args.get("pipeline_model_parallel_layout"):
        raise UnsupportedError(
            f"{common.path}: args.pipeline_model_parallel_layout divides the layers in a way that this version does not know; "
            "the flat optimizer buffers cannot be taken apart. Save with --dist-ckpt-optim-fully-reshardable"
        )
    first = common.integer("num_layers_in_first_pipeline_stage") or common.integer("decoder_first_pipeline_num_layers")
    last = common.integer("num_layers_in_last_pipeline_stage") or common.integer("decoder_last_pipeline_num_layers")
    counts: list[int]
    if pp > 1 and (first is not None or last is not None):
        middle = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (middle and rest % middle) or (not middle and rest):
            raise _uneven(common, layers, pp, vpp)
        counts = [rest // middle if middle else 0] * pp
        counts[0] = counts[0] if first is None else first
        counts[-1] = counts[-1] if last is None else last
    else:
        embedding = bool(args.get("account_for_embedding_in_pipeline_split")) and pp > 1
        loss = bool(args.get("account_for_loss_in_pipeline_split")) and pp > 1
        total = layers + embedding + loss
        if total % pp:
            raise _uneven(common, layers, pp, vpp)
        counts = [total // pp] * pp
        if embedding or loss:
            if vpp > 1:
                raise _uneven(common, layers, pp, vpp)
            counts[0] -= embedding
            counts[-1] -= loss
    if any(n % vpp for n in counts):
        raise _uneven(common, layers, pp, vpp)
    found: dict[tuple[int, int], range] = {}
    at = 0
    for chunk in range(vpp):
        for rank in range(pp):
            found[rank, chunk] = range(at, at + counts[rank] // vpp)
            at += counts[rank] // vpp
    return found


def _uneven(common: Common, layers: int, pp: int, vpp: int) -> UnsupportedError:
    return UnsupportedError(
        f"{common.path}: {layers} layers are not divided evenly over {pp} pipeline stages of {vpp} model chunks, and args does not say how"
    )
