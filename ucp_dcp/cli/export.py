"""``ucp export``: a checkpoint of any format as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import FormatError
from .options import StorageOptions, TargetOptions, parse_options
from .progress import bar
from .text import human_bytes, printable

__all__ = ["export"]


def export(
    url: Annotated[str, typer.Argument(help="Folder or URL of a checkpoint of any known format.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Folder or URL that holds no safetensors file yet.", show_default=False)],
    to: Annotated[Literal["safetensors"], typer.Option(help="What is written.")] = "safetensors",
    name_map: Annotated[
        str | None, typer.Option("--map", help="Name map: gpt, llama, mixtral, deepseek, bloom, or a YAML file.", show_default=False)
    ] = None,
    names: Annotated[str, typer.Option(help="With --map: the family whose names are written.")] = "huggingface",
    stored_names: Annotated[
        str | None, typer.Option(help="With --map: the family whose names are stored.", show_default="the one that knows most")
    ] = None,
    var: Annotated[
        list[str] | None, typer.Option(help="With --map: a variable, heads=32. Those that the checkpoint tells need not be given.")
    ] = None,
    root: Annotated[
        str | None, typer.Option(help="With --map: prefix of the weights in a checkpoint that has no roles.", show_default=False)
    ] = None,
    source: Annotated[Literal["weight", "master"], typer.Option(help="Which copy of a parameter.")] = "weight",
    dtype: Annotated[str | None, typer.Option(help="Of floating-point tensors: bfloat16, ...", show_default="as stored")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Bytes of a file at most.")] = 5 * 10**9,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A config.json to put beside them.", show_default=False)
    ] = None,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
) -> None:
    """Write the weights of a checkpoint as safetensors files, with an index where there are several; no model is built."""
    from ..export import export_safetensors
    from ..formats import MappedNames

    if name_map is None and (var or root is not None or stored_names is not None):
        raise typer.BadParameter("--var, --root and --stored-names need --map")
    mapped = None if name_map is None else MappedNames(name_map, names, stored_names, _variables(var or []), root)
    about = None if config is None else _json(config)
    options, targets = parse_options(storage_option), parse_options(target_option, "--target-option")
    with bar("export") as progress:
        report = export_safetensors(
            url,
            target,
            names=mapped,
            source=source,
            dtype=dtype,
            shard_size=shard_size,
            config=about,
            progress=progress,
            storage_options=options,
            target_options=targets,
        )
    for path, size in report.files.items():
        typer.echo(f"{printable(path)}  {human_bytes(size)}")
    masters = sum(kind == "master" for kind in report.tensors.values())
    typer.echo(f"{len(report.tensors)} tensors, {human_bytes(report.nbytes)}" + (f", {masters} from fp32 masters" if masters else ""))
    if report.left_out:
        typer.echo(f"left out, no name for them: {', '.join(printable(name) for name in report.left_out)}", err=True)


def _variables(given: list[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for text in given:
        name, equal, value = text.partition("=")
        if not equal or not value.isdecimal():
            raise typer.BadParameter(f"--var {text!r}: expected NAME=NUMBER")
        out[name] = int(value)
    return out


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path} holds {type(found).__name__}, expected a JSON object")
    return found
