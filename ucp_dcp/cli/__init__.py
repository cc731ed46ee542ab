"""The ``ucp`` command. Nothing heavy is imported before a command runs, so ``ucp --help`` is quick."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script ``ucp``."""
    from .app import app

    app()
