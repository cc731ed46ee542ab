"""Names of models from before megatron-core (``megatron/legacy/model``; ``megatron/model`` earlier) in the words of megatron-core."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["modern_names"]

_ROOT = re.compile(r"(?:model\.)?language_model\.")
_EARLY = (
    (re.compile(r"^(?:encoder|transformer|decoder)\.(?=layers\.|final_)"), "decoder."),
    (re.compile(r"\.attention\.(?=query_key_value\.|dense\.)"), ".self_attention."),
    (re.compile(r"\.self_attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.self_attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.input_norm\."), ".input_layernorm."),
    (re.compile(r"\.post_attention_(?:layer)?norm\."), ".pre_mlp_layernorm."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.linear_fc2."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
)


def modern_names(names: Sequence[str]) -> list[str]:
    """Names of a model chunk, in their order: without ``module.`` in front, and in megatron-core's words where they are older."""
    found = list(names)
    while found and all(name.startswith("module.") for name in found):
        found = [name.removeprefix("module.") for name in found]
    if not any(_ROOT.match(name) for name in found):
        return found
    return [_modern(name) for name in found]


def _modern(name: str) -> str:
    match = _ROOT.match(name)
    if match is None:
        # the last stage's copy of the embedding
        return name.replace("word_embeddings_for_head.", "output_layer.", 1) if name.startswith("word_embeddings_for_head.") else name
    name = name[match.end() :]
    for pattern, new in _EARLY:
        name = pattern.sub(new, name)
    return name
