"""``ucp verify``: whether every byte of a checkpoint is what its writer wrote."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.text import Text

from ..errors import UCPError
from .options import StorageOptions, parse_options
from .progress import bar
from .text import console, one_line, printable

__all__ = ["verify"]


def verify(
    url: Annotated[str, typer.Argument(help="Folder or URL of a checkpoint of any known format.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read and digest.", show_default="cores, at most 4")] = None,
    prefer: Annotated[
        Literal["ucp", "stock"] | None,
        typer.Option(help="Which one is meant where a plain DCP save was written over one of ours.", show_default=False),
    ] = None,
    storage_option: StorageOptions = None,
) -> None:
    """Read a whole checkpoint and compare it with its digests. Exit code 0: whole; 1: damaged; 2: it cannot be looked at."""
    from ..verification import verify as run

    options = parse_options(storage_option)
    try:
        with bar("verify") as progress:
            report = run(url, prefer=prefer, threads=threads, progress=progress, storage_options=options)
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
