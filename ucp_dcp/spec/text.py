"""YAML text -> plain data with the line of every key. Safe constructors only; size, nesting and repeated keys are checked."""

from __future__ import annotations

from typing import Any, TypeAlias

import yaml

from ..errors import SpecError

__all__ = ["Lines", "Path", "load_yaml"]

Path: TypeAlias = tuple[str | int, ...]
Lines: TypeAlias = dict[Path, int]

MAX_BYTES = 4 << 20
MAX_NODES = 100_000
MAX_DEPTH = 12


def load_yaml(text: str, source: str) -> tuple[Any, Lines]:
    """Plain data and the 1-based line of each path in it. Raises SpecError naming source and line."""
    if len(text) > MAX_BYTES:
        raise SpecError(f"{source}: {len(text)} characters, expected at most {MAX_BYTES}")
    try:
        _check_depth(text, source)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SpecError(f"{source}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if root is None:
        raise SpecError(f"{source}: found nothing, expected a spec")
    lines: Lines = {}
    scalars = yaml.SafeLoader("")
    count = 0

    def convert(node: yaml.Node, path: Path) -> Any:
        nonlocal count
        # Aliases repeat nodes; the count is of visits, so that a few lines of aliases cannot unfold into gigabytes.
        count += 1
        line = node.start_mark.line + 1
        if count > MAX_NODES or len(path) > MAX_DEPTH:
            raise SpecError(f"{source}:{line}: too large or nested too deeply")
        lines[path] = line
        if not isinstance(node, yaml.ScalarNode) and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise SpecError(f"{source}:{line}: tag {node.tag} is not allowed")
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
                at = key_node.start_mark.line + 1
                # The written text, so that a variable may be called `off` or `y` without being a truth value.
                if key is None:
                    raise SpecError(f"{source}:{at}: a key must be one word")
                if key in out:
                    raise SpecError(f"{source}:{at}: key {key!r} stands twice in one mapping")
                out[key] = convert(value_node, (*path, key))
                lines[(*path, key)] = at
            return out
        if isinstance(node, yaml.SequenceNode):
            return [convert(child, (*path, k)) for k, child in enumerate(node.value)]
        value = scalars.construct_object(node, deep=True)
        if not isinstance(value, (str, int, bool, float, type(None))):
            raise SpecError(f"{source}:{line}: {node.value!r} is neither text, number nor truth value")
        return value

    try:
        return convert(root, ()), lines
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: {error}") from None


def _check_depth(text: str, source: str) -> None:
    """Refuse deep nesting before nodes are built: the time that PyYAML takes grows with the square of it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SpecError(f"{source}: nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
