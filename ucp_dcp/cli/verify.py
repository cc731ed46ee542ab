"""``ucp verify``: whether every byte of a checkpoint is what its writer wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from ..errors import UCPError
from .text import console, one_line, printable

if TYPE_CHECKING:
    from ..verification import Progress

__all__ = ["verify"]


@contextmanager
def _bar() -> Iterator[Progress | None]:
    """A progress bar on standard error when that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def verify(
    url: Annotated[str, typer.Argument(help="Folder or URL of a checkpoint of any known format.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read and digest.", show_default="cores, at most 4")] = None,
    prefer: Annotated[
        Literal["ucp", "stock"] | None,
        typer.Option(help="Which one is meant where a plain DCP save was written over one of ours.", show_default=False),
    ] = None,
) -> None:
    """Read a whole checkpoint and compare it with its digests. Exit code 0: whole; 1: damaged; 2: it cannot be looked at."""
    from ..verification import verify as run

    try:
        with _bar() as progress:
            report = run(url, prefer=prefer, threads=threads, progress=progress)
    except BrokenPipeError:
        raise
    except (UCPError, OSError) as error:
        typer.echo(f"error: {one_line(str(error) or type(error).__name__)}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(report.to_json())
    else:
        console().print(Text("\n".join(printable(line) for line in str(report).split("\n"))))
    if not report.ok:
        raise typer.Exit(1)
