"""Which safetensors files are a checkpoint: one file, a Hugging Face model folder, or what torch's HuggingFaceStorageWriter leaves.

- The URL of a ``.safetensors`` file, or of a ``.safetensors.index.json``.
- A folder with ``model.safetensors.index.json``, whose ``weight_map`` says in which file each tensor lies (``save_pretrained``, and
  HuggingFaceStorageWriter after it has brought shards together). Another ``*.safetensors.index.json`` will do when it is the only one.
- A folder with ``model.safetensors``.
- A folder with any ``*.safetensors``, all of which belong together: the shards of a HuggingFaceStorageWriter, which has no index for them.
- A folder in which only ``sharded/`` holds such files: the same writer before, or without, bringing them together.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ...errors import CorruptCheckpointError, FormatError, StoreNotFoundError
from ...paths import checked_path
from ...storage.fsspec_store import FsspecStore
from ...storage.local import LocalStore
from ...storage.object_store import ObjectStore
from ...storage.store import Store
from .header import MAX_HEADER, JsonObjects

__all__ = ["SafetensorsFiles", "at_file", "find_safetensors"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARDED = "sharded/"
_NUMBERED = re.compile(r"(?!(?:sharded/)?shard-)(.*)-(\d+)-of-(\d+)\.safetensors")
_MANY = 100_000


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """The files of a checkpoint. ``weight_map``: tensor -> path, of the file ``index``; None without an index."""

    paths: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None


def at_file(store: Store) -> tuple[Store, str] | None:
    """The folder and the name of the file, when the URL of ``store`` is that of a safetensors file or index; None for a folder."""
    if not isinstance(store, LocalStore | FsspecStore | ObjectStore) or not store.root.endswith((SUFFIX, INDEX_SUFFIX)):
        return None
    root, _, name = store.root.rpartition("/")
    if isinstance(store, ObjectStore) and not root:  # nothing is above a bucket
        return None
    folder = copy.copy(store)
    folder.root = root if root or not isinstance(store, LocalStore) else "/"
    try:
        folder.size(name)
    except StoreNotFoundError:
        return None
    return folder, name


def find_safetensors(store: Store, name: str | None = None) -> SafetensorsFiles | None:
    """The safetensors files of a folder, or what the file ``name`` in it leads to. None: there are none.

    Raises CorruptCheckpointError naming what is missing or damaged, FormatError when several could be meant, StoreError.
    """
    if name is not None:
        return _indexed(store, name) if name.endswith(INDEX_SUFFIX) else SafetensorsFiles((name,))
    if _there(store, INDEX):
        return _indexed(store, INDEX)
    if _there(store, _SINGLE):
        return SafetensorsFiles((_SINGLE,))
    names = [entry.path for entry in itertools.islice(store.list(""), _MANY)]
    here = sorted(n for n in names if "/" not in n)
    indices = [n for n in here if n.endswith(INDEX_SUFFIX)]
    if len(indices) > 1:
        raise FormatError(f"{store.url}: several safetensors indices; give the URL of one: {', '.join(indices[:8])}")
    if indices:
        return _indexed(store, indices[0])
    found = [n for n in here if n.endswith(SUFFIX)]
    if not found:
        found = sorted(n for n in names if n.startswith(_SHARDED) and n.count("/") == 1 and n.endswith(SUFFIX))
    _check_numbers(found, store)
    return SafetensorsFiles(tuple(found)) if found else None


def _there(store: Store, path: str) -> bool:
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def _indexed(store: Store, index: str) -> SafetensorsFiles:
    size = store.size(index)
    if size > MAX_HEADER:
        raise CorruptCheckpointError(f"{index}: has {size} bytes; at most {MAX_HEADER} are allowed")
    json = JsonObjects()
    weight_map = json.texts(json.read(store.read(index, 0, size), index).get("weight_map", msgspec.Raw(b"5")), f"weight_map of {index}")
    folder = index.rpartition("/")[0]
    paths = {file: checked_path(f"{folder}/{file}" if folder else file) for file in sorted(set(weight_map.values()))}
    return SafetensorsFiles(tuple(paths.values()), index, {name: paths[file] for name, file in weight_map.items()})


def _check_numbers(names: Iterable[str], store: Store) -> None:
    """Files that are numbered ``k-of-n`` must all be there: nothing else tells of a missing one when there is no index."""
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (head, total), there in groups.items():
        # as many as are there and one more: what the names claim is not counted out
        missing = next((k for k in range(1, min(int(total), len(there) + 1) + 1) if k not in there), None)
        if missing is not None:
            raise CorruptCheckpointError(
                f"{store.url}: the file {head}-{missing:0{len(total)}d}-of-{total}{SUFFIX} is missing, as is {INDEX}"
            )
