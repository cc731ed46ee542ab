"""``--storage-option``: how to reach a store, for every command that takes a URL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import typer

__all__ = ["StorageOptions", "TargetOptions", "parse_options"]

StorageOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        "-o",
        metavar="KEY=VALUE",
        help="How to reach the store, as often as needed: endpoint_url=https://..., profile=..., anon=true, "
        "client_kwargs.region_name=.... Secrets are better in the environment or in ~/.aws: others see this command line.",
        show_default=False,
    ),
]

TargetOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--target-option", metavar="KEY=VALUE", help="Like --storage-option, for the target.", show_default=False),
]

# Of these, 12345 and true are text.
_TEXT = frozenset(("key", "secret", "token", "username", "password", "profile", "endpoint_url", "region_name", "client"))


def parse_options(given: Sequence[str] | None, option: str = "--storage-option") -> dict[str, Any]:
    """Storage options out of ``key=value``.

    A dot in the key reaches into a mapping (``client_kwargs.region_name=eu-west-1``); numbers, true, false, null and JSON
    objects, lists and strings (in double quotes) are what they are in JSON, everything else is text. Raises typer.BadParameter.
    """
    out: dict[str, Any] = {}
    for text in given or ():
        name, equal, value = text.partition("=")
        parts = name.split(".")
        if not equal or not all(parts):
            # not the value: it may be a secret
            raise typer.BadParameter(f"{option} {name!r}: expected KEY=VALUE")
        where = out
        for part in parts[:-1]:
            where = where.setdefault(part, {})
            if not isinstance(where, dict):
                raise typer.BadParameter(f"{option} {name!r}: {part!r} was given a value before and cannot hold options as well")
        if parts[-1] in where:
            raise typer.BadParameter(f"{option} {name!r} was given twice")
        where[parts[-1]] = value if parts[-1] in _TEXT else _value(value)
    return out


def _value(text: str) -> Any:
    if text not in ("true", "false", "null") and text[:1] not in ("{", "[", '"') and not text.lstrip("-")[:1].isdigit():
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
