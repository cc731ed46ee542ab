"""``ucp show``: what a checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .options import StorageOptions, parse_options
from .text import console, human_bytes, printable

if TYPE_CHECKING:
    from ..check import CheckReport
    from .summary import Summary, TensorLine

__all__ = ["show"]


def show(
    url: Annotated[str, typer.Argument(help="Folder or URL of a checkpoint of any known format.", show_default=False)],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read every fp32 master and compare it, rounded, with the stored weight; exit 1 if one differs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    prefer: Annotated[
        Literal["ucp", "stock"] | None,
        typer.Option(help="Which one to open where a plain DCP save was written over one of ours.", show_default=False),
    ] = None,
    storage_option: StorageOptions = None,
) -> None:
    """Show what a checkpoint holds. No tensor is read, except with --check."""
    from ..checkpoint import open_checkpoint
    from .summary import summarise, tensor_lines

    checkpoint = open_checkpoint(url, prefer=prefer, storage_options=parse_options(storage_option))
    summary = summarise(checkpoint)
    lines = tensor_lines(checkpoint) if tensors else None
    report = checkpoint.check() if check else None
    if as_json:
        typer.echo(_json(summary, lines, report))
    else:
        out = console()
        out.print(_panel(summary))
        if lines is not None:
            out.print(_table(lines, out.width))
        if report is not None:
            out.print(Text("\n".join(printable(line) for line in str(report).split("\n"))))
    if report is not None and not report.ok:
        raise typer.Exit(1)


def _json(summary: Summary, lines: list[TensorLine] | None, report: CheckReport | None) -> str:
    fields: dict[str, Any] = asdict(summary)
    if lines is not None:
        fields["tensor_list"] = [asdict(line) for line in lines]
    if report is not None:
        fields["check"] = report.to_dict()
    return json.dumps(fields, indent=1, default=str)


def _counts(total: int, parts: dict[str, int]) -> str:
    if not parts:
        return f"{total:,}"
    return f"{total:,} ({', '.join(f'{n:,} {name}' for name, n in parts.items())})"


def _panel(summary: Summary) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")

    def line(label: str, value: str) -> None:
        grid.add_row(label, Text(printable(value)))

    line("format", summary.format)
    line("where", summary.url)
    if summary.generation is not None:
        line("generation", summary.generation)
    line("tensors", _counts(summary.tensors, summary.roles))
    line("dtypes", ", ".join(f"{n:,} {name}" for name, n in summary.dtypes.items()) or "none")
    line("chunks", f"{summary.chunks:,}")
    line("parameters", "unknown" if summary.parameters is None else f"{summary.parameters:,}")
    line("bytes", f"{human_bytes(summary.bytes)} of tensors, {human_bytes(summary.file_bytes)} of files")
    line("files", f"{len(summary.files):,}")
    line("objects", f"{len(summary.objects):,}")
    for key, value in summary.provenance.items():
        line(str(key), value if isinstance(value, str) else json.dumps(value, default=str))
    return Panel(grid, title="checkpoint", title_align="left", expand=False, box=box.ROUNDED)


def _table(lines: list[TensorLine], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    longest = max((len(printable(line.name)) for line in lines), default=0)
    table.add_column("name", overflow="fold", no_wrap=longest <= width // 2)  # on a narrow terminal, patterns fold first
    table.add_column("dtype")
    table.add_column("shape", overflow="fold")
    table.add_column("pattern", overflow="fold")
    table.add_column("chunks", justify="right")
    table.add_column("bytes", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            Text(printable(line.name)),
            line.dtype,
            "x".join(map(str, line.shape)) or "scalar",
            Text(printable(line.pattern or "")),
            f"{line.chunks:,}",
            human_bytes(line.bytes),
        )
    return table
