"""Scripts in a fresh interpreter in which some packages cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_isolated"]

_PRELUDE = """\
import sys
class _Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbid!r}:
            raise ImportError(f"importing {{name}} is forbidden here")
sys.meta_path.insert(0, _Forbidden())
del _Forbidden
sys.argv = ["script", *{args!r}]
"""


def run_isolated(script: Path, code: str, forbid: Sequence[str] = ("ucp_dcp",), args: Sequence[str] = (), timeout: float = 100.0) -> str:
    """Standard output of ``code`` (dedented; ``sys.argv[1:] == args``). Raises AssertionError with all output when it fails."""
    script.write_text(_PRELUDE.format(forbid=tuple(forbid), args=[str(a) for a in args]) + textwrap.dedent(code))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))} | {"OMP_NUM_THREADS": "1"}
    # -I: neither the current folder nor the script's is on sys.path.
    done = subprocess.run([sys.executable, "-I", str(script)], env=env, cwd=script.parent, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise AssertionError(f"the script ended with exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
