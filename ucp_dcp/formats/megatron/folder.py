"""Which files of a folder are a Megatron checkpoint in the legacy format (``--ckpt-format torch``): one folder per model-parallel rank.

Names: megatron/training/checkpointing.py, ``get_checkpoint_name``: ``mp_rank_TT``, with pipeline stages ``_PPP``, with expert parallelism
``_EEE``. With three numbers missing one, only the arguments in the files tell which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from ...storage.store import Store

__all__ = ["MODEL", "OPTIMIZER", "Folder", "find_legacy"]

MODEL = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"
_LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_\d{7,}|release")
_LAYER_WISE = re.compile(r"layer_wise_optimizer_\d+\.pt")


@dataclass(slots=True)
class Folder:
    """The rank folders of one iteration. ``prefix`` is their folder within the store (``""`` or ``"iter_0000002/"``)."""

    prefix: str
    ranks: dict[str, set[str]] = field(default_factory=dict)
    """``mp_rank_...`` -> names of the files in it."""

    def paths(self) -> list[str]:
        """Paths in the store of all files to parse. Raises CorruptCheckpointError, UnsupportedError for what names alone tell."""
        paths = []
        for rank in sorted(self.ranks):
            names = self.ranks[rank]
            layer_wise = sorted(name for name in names if _LAYER_WISE.fullmatch(name))
            if layer_wise:
                raise UnsupportedError(
                    f"{self.prefix}{rank}/{layer_wise[0]}: a layer-wise (Muon) optimizer in the legacy format; not supported yet"
                )
            if MODEL not in names:
                raise CorruptCheckpointError(f"{self.prefix}{rank}/{MODEL}: the file is missing; found {', '.join(sorted(names)[:8])}")
            paths += [f"{self.prefix}{rank}/{name}" for name in (MODEL, OPTIMIZER) if name in names]
        return paths


def find_legacy(store: Store, iteration: str | None) -> Folder | None:
    """The rank folders at a store: of ``iteration`` (a folder, or its number), of what ``latest_checkpointed_iteration.txt`` names, of the
    store itself, or of the only iteration. None: there are none.

    Raises CheckpointNotFoundError listing the iterations that exist when the wanted one does not, FormatError when several could be meant.
    """
    wanted = iteration
    if wanted is None:
        try:
            if store.size(_LATEST) <= 64:
                wanted = store.read(_LATEST).decode("ascii", "replace").strip()
        except StoreNotFoundError:
            pass
    if wanted is not None:
        name = f"iter_{int(wanted):07d}" if wanted.isdecimal() and wanted.isascii() else wanted
        if not _ITERATION.fullmatch(name):
            if iteration is not None:
                return None  # the tag of another format
            raise FormatError(f"{store.url}: {_LATEST} holds {wanted!r:.40}, expected an iteration number or 'release'")
        found = _ranks(store, name + "/")
        if found.ranks:
            return found
        here = _iterations(store)
        if not here:
            return None
        reason = f"iteration {name!r} is not here" if iteration else f"{_LATEST} names {name!r}, which is not there"
        raise CheckpointNotFoundError(f"{store.url}: {reason}; legacy Megatron checkpoints here: {', '.join(here)}")
    root = _ranks(store, "")
    if root.ranks:
        return root
    here = _iterations(store)
    if len(here) > 1:
        raise FormatError(f"{store.url}: several iterations and no {_LATEST}; say which: tag={' or '.join(map(repr, here))}")
    return _ranks(store, here[0] + "/") if here else None


def _ranks(store: Store, prefix: str) -> Folder:
    folder = Folder(prefix)
    for entry in store.list(prefix):
        rank, slash, name = entry.path[len(prefix) :].partition("/")
        if slash and "/" not in name and _RANK.fullmatch(rank):
            folder.ranks.setdefault(rank, set()).add(name)
    return folder


def _iterations(store: Store) -> list[str]:
    """Iterations directly below the root that have rank folders."""
    parts = (entry.path.split("/") for entry in store.list(""))
    return sorted({p[0] for p in parts if len(p) == 3 and _ITERATION.fullmatch(p[0]) and _RANK.fullmatch(p[1])})


def rank_numbers(rank: str) -> tuple[int, ...]:
    """The numbers in ``mp_rank_00_001``."""
    match = _RANK.fullmatch(rank)
    assert match is not None
    return tuple(int(n) for n in match.groups() if n is not None)
