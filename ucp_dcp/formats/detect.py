"""What lies at a URL, by its content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from ..errors import CheckpointNotFoundError, FormatError, StoreError, StoreNotFoundError, UnsupportedError
from ..storage.commit import is_generation, is_temporary, open_root
from ..storage.manifest import MANIFEST
from ..storage.store import Store, open_store
from .dcp import METADATA, open_dcp
from .deepspeed import find_folder, find_universal, list_tags, open_deepspeed, open_universal
from .megatron import find_legacy, open_legacy
from .megatron_core import find_iteration, is_megatron_core, missing_iteration, open_megatron_core
from .safetensors import at_file, find_safetensors, open_safetensors
from .source import Source
from .ucp import open_ucp

__all__ = ["ParseAll", "open_source"]

ParseAll: TypeAlias = Callable[[Sequence[str], Callable[[str], Any]], list[Any]]
"""Given paths and a function, returns the function's value for each path, in order; may spread the work over ranks (D15)."""

_KNOWN = f"{MANIFEST} (this package), {METADATA} (DCP), 'latest', *_optim_states.pt or 'latest_universal' (DeepSpeed), "
_KNOWN += "latest_checkpointed_iteration.txt or mp_rank_* (Megatron), *.safetensors"
_SHOWN = 8


def parse_alone(paths: Sequence[str], parse: Callable[[str], Any]) -> list[Any]:
    """Parse every file in this process."""
    return [parse(path) for path in paths]


def open_source(
    url: Any,
    *,
    prefer: Literal["ucp", "stock"] | None = None,
    tag: str | None = None,
    parse_all: ParseAll | None = None,
) -> Source:
    """Open the checkpoint at a URL, path or Store, of whatever format it is. Nothing is written, and no tensor byte is read.

    Args:
        url: ours (a folder with ``ucp.json``), stock DCP (``.metadata``), DeepSpeed (a folder with ``latest``, or a tag folder),
            safetensors (a file, or a folder of them), megatron-core (an ``iter_*`` folder with ``metadata.json``, or the folder above).
        prefer: which of two checkpoints in one folder is meant (D4): ``"ucp"`` or ``"stock"``; a torch_dist checkpoint of megatron-core
            with ``"stock"`` is the DCP checkpoint that it is on disk, with Megatron's keys.
        tag: which tag of a DeepSpeed folder, which iteration (``iter_0000002``) of a Megatron one; default is what ``latest`` names, then
            what ``latest_universal`` names; what ``latest_checkpointed_iteration.txt`` names.
        parse_all: how files of a checkpoint that has many are parsed; the default parses them one after the other.

    Raises CheckpointNotFoundError (there is nothing), FormatError (it is something else; found and known are listed), ForeignSaveError
    (D4), CorruptCheckpointError, UnsafePickleError, UnsupportedError, StoreError.
    """
    store = open_store(url)
    file = at_file(store)
    if file is not None:
        found = find_safetensors(*file)
        assert found is not None
        return open_safetensors(file[0], found, parse_all or parse_alone)
    foreign = prefer is None and not _exists(store, MANIFEST) and not _exists(store, METADATA)
    iteration = f"{tag}/" if tag is not None and "/" not in tag else find_iteration(store) if foreign else None
    if iteration is not None and is_megatron_core(store, iteration):
        return open_megatron_core(store, iteration)
    legacy = find_legacy(store, tag) if tag is not None or foreign else None
    if legacy is not None:
        return open_legacy(store, legacy, parse_all or parse_alone)
    universal = find_universal(store, tag) if tag is not None or foreign else None
    if universal is not None:
        return open_universal(store, universal, parse_all or parse_alone)
    if tag is None and foreign:
        folder = find_folder(store, None)
    elif tag is not None:
        folder = find_folder(store, tag)
    else:
        manifest = open_root(store, prefer)
        if manifest is None and prefer is None and is_megatron_core(store):
            return open_megatron_core(store)
        return open_dcp(store) if manifest is None else open_ucp(store, manifest)
    if folder is None:
        files = find_safetensors(store)
        if files is None:
            raise _unknown(store) if iteration is None else missing_iteration(store, iteration)
        return open_safetensors(store, files, parse_all or parse_alone)
    if folder.prefix and not folder.optim:  # the only tag, and no latest_universal
        universal = find_universal(store, folder.tag)
        if universal is not None:
            return open_universal(store, universal, parse_all or parse_alone)
    return open_deepspeed(store, folder, parse_all or parse_alone)


def _exists(store: Store, path: str) -> bool:
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def _unknown(store: Store) -> Exception:
    """The error for a folder that holds no checkpoint we know, saying what it holds."""
    names = sorted({entry.path for entry in itertools.islice(store.list(""), 1000)})
    if not names:
        return CheckpointNotFoundError(f"{store.url}: there is nothing here{_siblings(store.url)}")
    tops = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in names})
    found = ", ".join(tops[:_SHOWN]) + (f" and {len(tops) - _SHOWN} more" if len(tops) > _SHOWN else "")
    ours = [top for top in tops if is_generation(top.rstrip("/"))]
    if ours and all(top in ours or is_temporary(top) for top in tops):
        return CheckpointNotFoundError(
            f"{store.url}: there is only an unfinished save here ({', '.join(ours[:_SHOWN])}); nothing was committed (no {MANIFEST})"
        )
    bases = {name.rsplit("/", 1)[-1] for name in names}
    if "__0.metadata" in bases:
        return UnsupportedError(
            f"{store.url}: this looks like a DCP checkpoint saved with use_collectives=False, which this version cannot open. "
            f"Known: {_KNOWN}. Found: {found}"
        )
    below = sorted({name.rpartition("/")[0] for name in names if name.endswith(".safetensors")})
    if below:
        return FormatError(f"{store.url}: there are safetensors files in folders below it; open one of these: {', '.join(below[:_SHOWN])}")
    return FormatError(f"{store.url}: not a checkpoint of a known format. Known: {_KNOWN}. Found: {found}{_siblings(store.url)}")


def _siblings(url: str) -> str:
    """For a wrong tag in the URL of a DeepSpeed checkpoint: the tags that exist beside it."""
    parent = url.rstrip("/").rpartition("/")[0]
    if not parent or parent.endswith(":/"):
        return ""
    try:
        tags = list_tags(open_store(parent))
    except (StoreError, FormatError, UnsupportedError):
        return ""
    return f"; the DeepSpeed checkpoint at {parent} has the tags {', '.join(tags)}" if tags else ""
