"""Text for terminals."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["console", "human_bytes", "one_line", "printable"]


def console() -> Console:
    """Standard output. Into a pipe or file nothing is cut or wrapped: other programs read it."""
    return Console(highlight=False, emoji=False) if sys.stdout.isatty() else Console(width=10_000, highlight=False, emoji=False)


def printable(text: str) -> str:
    """Names come out of files of others: what could steer a terminal is shown as an escape (``\\x1b``)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """``text`` with all white space, line ends too, as single blanks."""
    return printable(" ".join(text.split()))


def human_bytes(n: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    if abs(n) < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        n /= 1024
        if abs(n) < 1024:
            return f"{n:.1f} {unit}"
    return f"{n / 1024:.1f} PiB"
