"""Which files of a folder are a DeepSpeed checkpoint.

Names: deepspeed/runtime/engine.py, ``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from ...paths import checked_path
from ...storage.store import Store

__all__ = ["Folder", "find_folder", "list_tags"]

LATEST = "latest"
_MAX_LATEST = 4096
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_ZERO3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_\d+(-model_\d+)?-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


@dataclass(slots=True)
class Folder:
    """The rank files of one tag. ``prefix`` is the folder within the store (``""`` or ``"<tag>/"``); file names have no folder."""

    prefix: str
    tag: str
    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    """(dp rank, mp rank) -> file name of optimizer states."""
    zero3: dict[tuple[int, int], str] = field(default_factory=dict)
    """(dp rank, mp rank) -> file name of a ZeRO-3 rank's model states."""
    model: dict[int, str] = field(default_factory=dict)
    """mp rank -> file name of model states (stages 0 to 2)."""
    layers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """True when no file is one of DeepSpeed's."""
        return not (self.optim or self.zero3 or self.model)

    def paths(self) -> list[str]:
        """Paths in the store of all files to parse, after checks that need no file's content.

        Raises UnsupportedError for kinds of checkpoints that this version does not handle, CorruptCheckpointError for missing files.
        """
        where = self.prefix or "this folder"
        if self.layers:
            raise UnsupportedError(
                f"{where}: a pipeline-parallel DeepSpeed checkpoint ({len(self.layers)} files like {self.layers[0]}); not supported yet"
            )
        if self.experts:
            raise UnsupportedError(f"{where}: a mixture-of-experts DeepSpeed checkpoint ({self.experts[0]}, ...); not supported yet")
        model_ranks = {mp for _, mp in self.optim} | {mp for _, mp in self.zero3} | set(self.model)
        if model_ranks != {0}:
            raise UnsupportedError(
                f"{where}: model-parallel ranks {sorted(model_ranks)}: tensor or pipeline parallelism is not supported yet"
            )
        if self.zero3 and self.model:
            raise CorruptCheckpointError(
                f"{where}: files of two saves: {self.zero3[min(self.zero3)]} (ZeRO stage 3) and {self.model[0]} (stages 0 to 2)"
            )
        if not self.zero3 and not self.model:
            raise CorruptCheckpointError(f"{where}: the file mp_rank_00_model_states.pt is missing")
        if not self.optim and self.zero3:
            raise CorruptCheckpointError(f"{where}: model states of ZeRO stage 3, but no *_optim_states.pt file: all of them are missing")
        names = [self.optim[key] for key in sorted(self.optim)]
        names += [self.zero3[key] for key in sorted(self.zero3)] or [self.model[0]]
        return [self.prefix + name for name in names]


def _sort(prefix: str, tag: str, names: Iterable[str]) -> Folder:
    folder = Folder(prefix, tag)
    for name in sorted(names):
        if match := _OPTIM.fullmatch(name):
            key = (int(match[2]), int(match[3]))
            if key in folder.optim:
                raise CorruptCheckpointError(f"{prefix or 'this folder'}: files of two saves: {folder.optim[key]} and {name}")
            folder.optim[key] = name
        elif match := _ZERO3.fullmatch(name):
            folder.zero3[int(match[1]), int(match[2])] = name
        elif match := _MODEL.fullmatch(name):
            folder.model[int(match[1])] = name
        elif _LAYER.fullmatch(name):
            folder.layers.append(name)
        elif _EXPERT.fullmatch(name):
            folder.experts.append(name)
    return folder


def list_tags(store: Store) -> list[str]:
    """Names of the folders directly below the root that hold DeepSpeed files."""
    return sorted(tag for tag, names in _by_folder(store, "").items() if tag and not _sort("", tag, names).empty)


def _by_folder(store: Store, prefix: str) -> dict[str, list[str]]:
    """Names of files in the root (under ``""``) and in its direct sub-folders."""
    found: dict[str, list[str]] = {}
    for entry in store.list(prefix):
        folder, slash, name = entry.path.partition("/")
        if not slash:
            found.setdefault("", []).append(folder)
        elif "/" not in name:
            found.setdefault(folder, []).append(name)
    return found


def find_folder(store: Store, tag: str | None) -> Folder | None:
    """The rank files at a store: of the tag given, of what ``latest`` names, of the root itself, or of the only tag. None: there are none.

    Raises CheckpointNotFoundError listing the tags that exist when the wanted one does not, FormatError when several could be meant.
    """
    latest = tag
    if latest is None:
        try:
            if store.size(LATEST) <= _MAX_LATEST:
                latest = store.read(LATEST).decode("utf-8", "replace").strip()
        except StoreNotFoundError:
            pass
    if latest is not None:
        if "/" in latest or not latest:
            raise FormatError(f"{store.url}: the tag {latest!r:.80} (from {'tag=' if tag else LATEST}) is not the name of a folder")
        checked_path(latest)
        names = [entry.path[len(latest) + 1 :] for entry in store.list(latest + "/")]
        folder = _sort(latest + "/", latest, (name for name in names if "/" not in name))
        if not folder.empty:
            return folder
        tags = list_tags(store)
        if tag is None and not tags:
            return None  # a file that happens to be named "latest"
        reason = "there is no such tag" if tag is not None else f"the file {LATEST} names the tag {latest!r}, which is not there"
        raise CheckpointNotFoundError(f"{store.url}: {f'tag {tag!r}: ' if tag else ''}{reason}; tags here: {', '.join(tags) or 'none'}")
    folders = _by_folder(store, "")
    root = _sort("", store.url.rstrip("/").rpartition("/")[2], folders.pop("", []))
    if not root.empty:
        return root
    sorted_folders = [_sort(name + "/", name, names) for name, names in folders.items()]
    found = sorted((f for f in sorted_folders if not f.empty), key=lambda f: f.tag)
    if len(found) > 1:
        raise FormatError(f"{store.url}: several tags and no file {LATEST!r}; say which: tag={' or '.join(repr(f.tag) for f in found)}")
    return found[0] if found else None
