"""What a checkpoint tells of the model that it holds: numbers that shapes alone do not give (heads, query groups)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import CorruptCheckpointError, StoreNotFoundError
from ..storage.store import Store
from .source import Source

__all__ = ["model_facts"]

CONFIG = "config.json"
_MAX_CONFIG = 4 << 20
# fact -> how configurations call it: Hugging Face's (GPT-2's n_head), Megatron's arguments
_CALLED = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads"),
}


def model_facts(source: Source) -> dict[str, int]:
    """``heads``, ``kv_heads`` as far as the checkpoint tells them: Hugging Face's ``config.json``, Megatron's ``args``.

    Raises CorruptCheckpointError when ``config.json`` is no JSON object.
    """
    config: Any = source.provenance.get("args")
    if source.format == "safetensors":
        config = _config(source.store)
    if not isinstance(config, Mapping):
        return {}
    found: dict[str, int] = {}
    for fact, names in _CALLED.items():
        values = [config[name] for name in names if type(config.get(name)) is int and config[name] > 0]
        if values:
            found[fact] = values[0]
    # Megatron's num_query_groups has a default, and counts only with grouped queries
    if "group_query_attention" in config and not config["group_query_attention"]:
        found.pop("kv_heads", None)
    return found


def _config(store: Store) -> Any:
    try:
        size = store.size(CONFIG)
    except StoreNotFoundError:
        return None
    if size > _MAX_CONFIG:
        raise CorruptCheckpointError(f"{store.url}: {CONFIG} has {size} bytes, expected at most {_MAX_CONFIG}")
    try:
        found = json.loads(store.read(CONFIG))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{store.url}: {CONFIG} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{store.url}: {CONFIG} is {type(found).__name__}, expected an object")
    inner = found.get("text_config")  # models of several modalities
    return inner if isinstance(inner, dict) and "num_attention_heads" not in found else found
