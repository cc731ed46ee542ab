"""The command line: which commands there are, and how errors look."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

from .._version import __version__
from ..errors import UCPError
from .export import export
from .gc import gc
from .show import show
from .text import one_line
from .verify import verify

__all__ = ["app", "reported"]

P = ParamSpec("P")


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """What the user can act upon becomes one line on standard error and exit code 1; a bug of ours keeps its traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # `ucp show ... | head`: ends quietly
        except (UCPError, OSError) as error:
            typer.echo(f"error: {one_line(str(error) or type(error).__name__)}", err=True)
            raise typer.Exit(1) from error

    return run


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ucp_dcp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Look into training checkpoints of any parallelism, check them, export them, clean up after them."""


app.command()(reported(show))
app.command()(verify)
app.command()(reported(export))
app.command()(reported(gc))
