"""Universal Checkpointing for PyTorch Distributed Checkpoint (DCP): any training checkpoint onto any mesh, where it lies.

The public names are imported on first use, so that ``import ucp_dcp`` and ``ucp --help`` do not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .api import load, save
    from .checkpoint import Checkpoint, StoredTensor, open_checkpoint
    from .errors import UCPError
    from .formats import MappedNames
    from .frameworks.pytorch import TrainState
    from .garbage import GcReport, gc
    from .layout import Layout, PerRank
    from .names import Role
    from .planners.load_planner import UCPLoadPlanner
    from .planners.report import LoadReport
    from .planners.save_planner import UCPSavePlanner
    from .series import latest
    from .spec import LayoutSpec, NameMap
    from .stager import UCPStager
    from .storage.dcp_reader import UCPStorageReader
    from .storage.dcp_writer import UCPStorageWriter
    from .verification import VerifyReport, verify

__all__ = [
    "Checkpoint",
    "GcReport",
    "Layout",
    "LayoutSpec",
    "LoadReport",
    "MappedNames",
    "NameMap",
    "PerRank",
    "Role",
    "StoredTensor",
    "TrainState",
    "UCPError",
    "UCPLoadPlanner",
    "UCPSavePlanner",
    "UCPStager",
    "UCPStorageReader",
    "UCPStorageWriter",
    "VerifyReport",
    "__version__",
    "gc",
    "latest",
    "load",
    "open_checkpoint",
    "save",
    "verify",
]

_HOME = {
    "Checkpoint": "checkpoint",
    "GcReport": "garbage",
    "Layout": "layout",
    "LayoutSpec": "spec",
    "LoadReport": "planners.report",
    "MappedNames": "formats",
    "NameMap": "spec",
    "PerRank": "layout",
    "Role": "names",
    "StoredTensor": "checkpoint",
    "TrainState": "frameworks.pytorch",
    "UCPError": "errors",
    "UCPLoadPlanner": "planners.load_planner",
    "UCPSavePlanner": "planners.save_planner",
    "UCPStager": "stager",
    "UCPStorageReader": "storage.dcp_reader",
    "UCPStorageWriter": "storage.dcp_writer",
    "VerifyReport": "verification",
    "gc": "garbage",
    "latest": "series",
    "load": "api",
    "open_checkpoint": "checkpoint",
    "save": "api",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
