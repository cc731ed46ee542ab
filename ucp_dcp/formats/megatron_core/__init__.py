"""megatron-core's ``torch_dist`` checkpoints of every generation, opened where they lie: no conversion, Megatron not needed.

On disk they are stock DCP checkpoints with Megatron's own keys and, up to 0.15, classes of Megatron in ``.metadata``. Here they become
per-layer, per-expert tensors with roles; flat optimizer buffers become tensors of parameters. ``docs/megatron.md`` has the details.

Sources: core/dist_checkpointing/, core/optimizer/distrib_optimizer.py, param_layout.py, training/checkpointing.py (0.14 to 0.19.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from ...geometry import check_cover_ragged
from ...safe_pickle import Stub
from ...storage.store import Store
from ..dcp import METADATA, DcpSource, open_dcp, read_metadata
from .bucket_space import add_buckets
from .objects import COMMON, COMMON_STATE, Common, read_common
from .run_state import add_run_state
from .tensors import Vocab, add_tensors
from .views import MegatronSource, Views

__all__ = ["MegatronSource", "find_iteration", "is_megatron_core", "missing_iteration", "open_megatron_core"]

CONFIG = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
_SHOWN = 5


def is_megatron_core(store: Store, prefix: str = "") -> bool:
    """Whether the folder says that it is a ``torch_dist`` checkpoint: ``metadata.json`` with a sharded backend, beside ``.metadata``."""
    if not _there(store, prefix + METADATA):
        return False
    try:
        if store.size(prefix + CONFIG) > 1 << 20:
            return False
        found = json.loads(store.read(prefix + CONFIG))
    except (StoreNotFoundError, ValueError, RecursionError):
        return _there(store, prefix + COMMON)
    return isinstance(found, dict) and isinstance(found.get("sharded_backend"), str)


def find_iteration(store: Store) -> str | None:
    """``iter_0000002/`` or ``release/``, as ``latest_checkpointed_iteration.txt`` says; None when there is no such file.

    Raises FormatError when the file holds no iteration.
    """
    try:
        text = store.read(LATEST).decode("ascii", "replace").strip() if store.size(LATEST) <= 64 else "?"
    except StoreNotFoundError:
        return None
    if text == "release":
        return "release/"
    if not text.isdecimal():
        raise FormatError(f"{store.url}: {LATEST} holds {text!r:.40}, expected an iteration number or 'release'")
    return f"iter_{int(text):07d}/"


def missing_iteration(store: Store, iteration: str) -> Exception:
    """The error for an iteration that ``latest_checkpointed_iteration.txt`` names and that holds no checkpoint."""
    tops = {entry.path.partition("/")[0] for entry in store.list("")}
    there = sorted(top for top in tops if top.startswith("iter_") or top == "release")
    return CheckpointNotFoundError(
        f"{store.url}: {LATEST} names {iteration.rstrip('/')}, which holds no checkpoint; there are: {', '.join(there) or 'none'}. "
        "Open one of these folders itself"
    )


def open_megatron_core(store: Store, prefix: str = "") -> MegatronSource:
    """Open the ``torch_dist`` checkpoint in folder ``prefix`` of a store.

    What is read: ``.metadata``, ``metadata.json``, the common state, and of flat optimizer buffers their parameter groups; where two
    readings of such a buffer are possible, a few elements of each parameter. No other tensor byte.

    Raises CorruptCheckpointError naming the file, parameter and part that is missing; UnsupportedError for what this version cannot read;
    UnsafePickleError; StoreError.
    """
    if _there(store, prefix + CONFIG):
        backend = _config(store, prefix).get("sharded_backend")
        if backend != "torch_dist":
            raise UnsupportedError(f"{store.url}: {prefix}{CONFIG} says sharded_backend={backend!r}; only 'torch_dist' can be read")
    metadata = read_metadata(store, prefix)
    base = open_dcp(store, prefix, metadata)
    common = read_common(store, base, prefix)
    views = Views(base)
    extra = metadata.get("mcore_data")
    vocab = Vocab(common)
    rest = add_tensors(views, extra if isinstance(extra, dict) else {}, vocab)
    add_buckets(views, rest, common, vocab)
    add_run_state(views, common)
    source = views.build(_provenance(metadata, base, common), _doubt(base, common))
    source.side_files = {prefix + CONFIG, *([LATEST] if prefix else []), *([common.file] if common.file.endswith(COMMON) else [])}
    _check_complete(source)
    return source


def _provenance(metadata: Stub, base: DcpSource, common: Common) -> dict[str, Any]:
    generation = "D1" if metadata.get("mcore_data") is not None and metadata.name == "Metadata" else "D2"
    if metadata.get("mcore_data") is None:
        generation = "D4" if base.catalog.find_object(COMMON_STATE) is not None else "D3"
    known: dict[str, Any] = {"writer": "megatron-core", "generation": generation, **base.provenance}
    if common.args:
        known["args"] = common.args
    iteration = common.state.get("iteration")
    if type(iteration) is int:
        known["iteration"] = iteration
    sharding = common.content.get("distrib_optim_sharding_type")
    if isinstance(sharding, str):
        known["optimizer_format"] = sharding
    return known


def _doubt(base: DcpSource, common: Common) -> str:
    """Why the optimizer state may be wrong: megatron-core 0.15 to 0.19.2 could write wrong ``fully_reshardable`` state, without a word.

    Slices of buffers with several buckets were taken at padded offsets out of tensors without padding (fixed by its PR 5077). Nothing in
    the file tells whether that happened, nor the version.
    """
    sharding = common.content.get("distrib_optim_sharding_type")
    by_key = any(key.startswith("optimizer.state.param.") for key in base.catalog.keys)
    if sharding == "fully_reshardable" or (sharding is None and by_key):
        return "megatron-core 0.15 to 0.19.2 may write wrong optimizer state in the format fully_reshardable"
    return ""


def _check_complete(source: MegatronSource) -> None:
    """Every element of every tensor must lie somewhere, once."""
    c = source.catalog
    wrong = check_cover_ragged(c.shape_start, c.shape, c.chunk_start, c.coords)
    if len(wrong):
        names = ", ".join(repr(c.tensor(int(t)).name) for t in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CorruptCheckpointError(f"{source.store.url}: the stored pieces do not cover exactly once: {names}{more}")


def _there(store: Store, path: str) -> bool:
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def _config(store: Store, prefix: str) -> Mapping[str, Any]:
    try:
        found = json.loads(store.read(prefix + CONFIG))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{store.url}: {prefix}{CONFIG} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{store.url}: {prefix}{CONFIG} is {type(found).__name__}, expected an object")
    return found
