"""Run every ``bench_*.py`` beside this file, each in a process of its own: ``python benchmarks/run.py [--quick] [word ...]``.

Words select the benchmarks whose file name contains one of them. The exit code is 1 when any of them fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    flags = [a for a in arguments if a.startswith("-")]
    words = [a for a in arguments if not a.startswith("-")]
    scripts = [s for s in sorted(Path(__file__).parent.glob("bench_*.py")) if not words or any(w in s.stem for w in words)]
    if not scripts:
        print(f"no benchmark matches {' '.join(words)}", file=sys.stderr)
        return 1
    failed = [s.name for s in scripts if subprocess.run([sys.executable, str(s), *flags]).returncode]
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
