"""``ucp gc``: what killed jobs left behind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from .options import StorageOptions, parse_options
from .text import human_bytes, printable

if TYPE_CHECKING:
    from ..garbage import Found

__all__ = ["gc"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def gc(
    url: Annotated[str, typer.Argument(help="A checkpoint, or a folder of checkpoints: folder or URL.", show_default=False)],
    delete: Annotated[bool, typer.Option("--delete", help="Delete and repair; without it, only say what would be done.")] = False,
    older_than: Annotated[
        str, typer.Option(help="Leave alone what changed more recently: 90s, 30m, 24h, 7d. A save that is under way may pause so long.")
    ] = "24h",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    storage_option: StorageOptions = None,
) -> None:
    """Find what killed jobs left: unfinished and replaced saves, temporary files, unfinished uploads, a .metadata that is not repaired."""
    from ..garbage import gc as run

    report = run(url, delete=delete, older_than=_seconds(older_than), storage_options=parse_options(storage_option))
    if as_json:
        typer.echo(report.to_json())
        return
    for item in report.found:
        typer.echo(_line(item, delete))
    goes = report.goes
    if not goes:
        typer.echo("nothing to delete")
        return
    uploads = sum(item.kind == "upload" for item in goes)
    size = human_bytes(report.bytes) + (f" and the parts of {uploads} uploads" if uploads else "")
    typer.echo(f"{'deleted' if delete else 'would delete'} {size}" + ("" if delete else "; say --delete to do it"))


def _line(item: Found, done: bool) -> str:
    what = "repair" if item.kind == "metadata" else "abort" if item.kind == "upload" else "delete"
    verb = "keep" if item.kept else f"{what}{'d' if what[-1] == 'e' else 'ed'}" if done else what
    size = f", {item.files} files, {human_bytes(item.bytes)}" if item.files else ""
    kept = f": {item.kept}" if item.kept else ""
    return printable(f"{verb}  {item.kind}  {item.path}{size}, {_age(item.age)} old{kept}")


def _age(seconds: float) -> str:
    for unit, length in reversed(_UNITS.items()):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])?", text.strip())
    if match is None:
        raise typer.BadParameter(f"--older-than {text!r}: expected a number and s, m, h or d: 24h")
    return float(match[1]) * _UNITS[match[2] or "s"]
