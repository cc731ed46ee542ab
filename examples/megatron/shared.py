"""What this example takes from ``examples/fsdp`` (text, learning rate, plot), loaded by path: nothing there is on the path here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FSDP = Path(__file__).resolve().parents[1] / "fsdp"


def module(name: str) -> ModuleType:
    """``examples/fsdp/<name>.py``."""
    known = sys.modules.get(f"fsdp_example_{name}")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"fsdp_example_{name}", FSDP / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded
