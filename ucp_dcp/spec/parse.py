"""Plain data -> LayoutSpec. Every complaint names the file, the line, the rule and the key."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, NoReturn

from ..errors import SpecError
from .expr import Expr
from .model import AXIS_FREE, RESERVED, SIGNATURES, Rule, StateSpec, Step, Variable
from .names import NameGlob, Template
from .text import Lines, Path, load_yaml

__all__ = ["LayoutSpec", "ready_specs"]

VERSION = 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_KEYS = {"ucp_spec", "name", "doc", "extends", "axes", "variables", "optimizer", "rules"}
_RULE_KEYS = {"match", "except", "when", "rename", "role", "steps", "doc"}
_TYPES = ("int", "bool", "str", "list[int]", "params", "list[params]")
_MAX_FILE = 4 << 20


def ready_specs() -> tuple[str, ...]:
    """Names of the specs that come with the package."""
    folder = resources.files("ucp_dcp") / "specs"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """A parsed and checked spec (``docs/language.md``): axes, variables, optimizer states, rules. Plain data; pickles."""

    name: str
    axes: tuple[str, ...]
    rules: tuple[Rule, ...]
    variables: Mapping[str, Variable] = field(default_factory=dict)
    states: Mapping[str, StateSpec] = field(default_factory=dict)
    doc: str = ""
    source: str = "<spec>"

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> LayoutSpec:
        """A ready spec by its name (``ready_specs()``), or a YAML file. Raises SpecError when there is none or it is wrong."""
        name = os.fspath(name_or_path)
        if isinstance(name_or_path, str) and _is_ready_name(name):
            return cls.parse((resources.files("ucp_dcp") / "specs" / f"{name}.yaml").read_text("utf-8"), source=f"{name}.yaml")
        path = FilePath(name)
        try:
            if path.stat().st_size > _MAX_FILE:
                raise SpecError(f"{name}: {path.stat().st_size} bytes, expected at most {_MAX_FILE}")
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{name}: neither a ready spec ({', '.join(ready_specs())}) nor a readable file: {error}") from None
        return cls.parse(text, source=name)

    @classmethod
    def parse(cls, text: str, source: str = "<text>") -> LayoutSpec:
        """A spec from YAML text. Raises SpecError naming source and line."""
        data, lines = load_yaml(text, source)
        return _Parser(source, lines).spec(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "<dict>") -> LayoutSpec:
        """A spec from plain data of the same shape as the YAML. Raises SpecError."""
        return _Parser(source, {}).spec(data)


def _is_ready_name(name: str) -> bool:
    return name in ready_specs()


class _Parser:
    def __init__(self, source: str, lines: Lines) -> None:
        self.source = source
        self.lines = lines

    def fail(self, path: Path, message: str) -> NoReturn:
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), 0)
        where = ""
        if len(path) >= 2 and path[0] == "rules":
            where = f"rule {int(path[1]) + 1}, "
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in (path[2:] if where else path)).lstrip(".")
        raise SpecError(f"{self.source}{f':{line}' if line else ''}: {where}{f'key {key}: ' if key else ''}{message}")

    def mapping(self, value: Any, path: Path, keys: set[str] | None = None) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(path, f"found {_short(value)}, expected a mapping")
        for key in value:
            if not isinstance(key, str):
                self.fail(path, f"found key {key!r}, expected text")
            if keys is not None and key not in keys:
                self.fail((*path, key), f"unknown; expected one of {', '.join(sorted(keys))}")
        return value

    def sequence(self, value: Any, path: Path) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            self.fail(path, f"found {_short(value)}, expected a list")
        return list(value)

    def string(self, value: Any, path: Path) -> str:
        if not isinstance(value, str):
            self.fail(path, f"found {_short(value)}, expected text")
        return value

    def spec(self, data: Any) -> LayoutSpec:
        top = self.mapping(data, (), _KEYS)
        if top.get("ucp_spec") != VERSION or type(top.get("ucp_spec")) is not int:
            self.fail(("ucp_spec",), f"found {top.get('ucp_spec')!r}, expected {VERSION}: the version of the language")
        if "rules" not in top:
            self.fail((), "no `rules`")
        below = self.extended(top.get("extends", ""))
        axes = self.axes(top.get("axes", []))
        variables = self.variables(top.get("variables", {}), axes)
        rules: tuple[Rule, ...] = ()
        states: dict[str, StateSpec] = {}
        if below is not None:
            axes = (*below.axes, *(axis for axis in axes if axis not in below.axes))
            for name in set(axes) & (set(variables) | set(below.variables)):
                self.fail(("extends",), f"{name!r} is an axis here or in {below.source}, and a variable in the other")
            variables = {**below.variables, **variables}
            rules = tuple(replace(r, below=r.below or below.source) for r in below.rules)
            states.update(below.states)
        known = set(axes) | {f"{a}.size" for a in axes} | set(variables)
        states.update(self.states(top.get("optimizer", {}), axes, known))
        first = len(rules)
        rules += tuple(self.rule(r, ("rules", k), first + k, axes, known) for k, r in enumerate(self.sequence(top["rules"], ("rules",))))
        if not rules:
            self.fail(("rules",), "found no rule, expected at least one")
        return LayoutSpec(
            name=self.string(top.get("name", "spec"), ("name",)),
            axes=axes,
            rules=rules,
            variables=variables,
            states=states,
            doc=self.string(top.get("doc", ""), ("doc",)),
            source=self.source,
        )

    def extended(self, value: Any) -> LayoutSpec | None:
        """The ready spec that this one extends: its axes, variables, states and rules come before the own ones."""
        name = self.string(value, ("extends",))
        if not name:
            return None
        # A name only, never a path: parsing opens no file that the caller did not name.
        if not _is_ready_name(name):
            self.fail(("extends",), f"found {_short(name)}, expected a ready spec: {', '.join(ready_specs())}")
        if self.source == f"{name}.yaml":
            self.fail(("extends",), "a spec cannot extend itself")
        return LayoutSpec.load(name)

    def name_of(self, value: Any, path: Path, taken: set[str]) -> str:
        name = self.string(value, path)
        if not _NAME.match(name):
            self.fail(path, f"found {name!r}, expected letters, digits and _")
        if name in RESERVED:
            self.fail(path, f"{name!r} is a word of the language; choose another name")
        if name in taken:
            self.fail(path, f"{name!r} is declared twice")
        return name

    def axes(self, value: Any) -> tuple[str, ...]:
        names: list[str] = []
        for k, item in enumerate(self.sequence(value, ("axes",))):
            names.append(self.name_of(item, ("axes", k), set(names)))
        return tuple(names)

    def variables(self, value: Any, axes: tuple[str, ...]) -> dict[str, Variable]:
        out: dict[str, Variable] = {}
        for name, entry in self.mapping(value, ("variables",)).items():
            path: Path = ("variables", name)
            self.name_of(name, path, set(axes) | set(out))
            row = self.mapping({"type": entry} if isinstance(entry, str) else entry, path, {"type", "default", "doc"})
            if row.get("type") not in _TYPES:
                self.fail((*path, "type"), f"found {row.get('type')!r}, expected one of {', '.join(_TYPES)}")
            variable = Variable(name, row["type"], None, self.string(row.get("doc", ""), (*path, "doc")))
            if "default" in row:
                try:
                    variable = Variable(name, variable.type, variable.check(row["default"]), variable.doc)
                except SpecError as error:
                    self.fail((*path, "default"), str(error))
            out[name] = variable
        return out

    def states(self, value: Any, axes: tuple[str, ...], known: set[str]) -> dict[str, StateSpec]:
        top = self.mapping(value, ("optimizer",), {"states"})
        out: dict[str, StateSpec] = {}
        for name, entry in self.mapping(top.get("states", {}), ("optimizer", "states")).items():
            path: Path = ("optimizer", "states", name)
            row = self.mapping({"kind": entry} if isinstance(entry, str) else entry, path, {"kind", "drop", "steps", "master"})
            kind = row.get("kind", "steps" if "steps" in row else "follow")
            master = row.get("master", False)
            if kind == "master":
                kind, master = "follow", True
            if kind not in ("follow", "scalar", "replicated", "factored", "steps"):
                self.fail((*path, "kind"), f"found {kind!r}, expected follow, scalar, replicated, factored, steps or master")
            if type(master) is not bool:
                self.fail((*path, "master"), f"found {master!r}, expected true or false")
            if (kind == "factored") != ("drop" in row):
                self.fail(path, "`drop` (the dimension that is gone) belongs to kind factored, and to it alone")
            if (kind == "steps") != ("steps" in row):
                self.fail(path, "`steps` belongs to kind steps, and to it alone")
            drop = row.get("drop", 0)
            if type(drop) is not int:
                self.fail((*path, "drop"), f"found {drop!r}, expected an integer")
            steps = self.steps(row.get("steps", []), (*path, "steps"), axes, known, buffers=False)
            out[name] = StateSpec(kind, drop, steps, master)
        return out

    def rule(self, value: Any, path: Path, number: int, axes: tuple[str, ...], known: set[str]) -> Rule:
        row = self.mapping(value, path, _RULE_KEYS)
        if "match" not in row:
            self.fail(path, "no `match`")
        match = self.built(NameGlob, row["match"], (*path, "match"))
        for capture in match.captures:
            if capture in known or capture in RESERVED:
                self.fail((*path, "match"), f"capture {{{capture}}} has the name of an axis, a variable or a word of the language")
        names = known | set(match.captures)
        excluded = tuple(
            self.built(NameGlob, text, (*path, "except", k))
            for k, text in enumerate(self.sequence(row.get("except", []), (*path, "except")))
        )
        when = None
        if "when" in row:
            text = row["when"] if isinstance(row["when"], str) else str(row["when"])
            when = self.built(Expr, text, (*path, "when"))
            self.check_names(when.names, names | {"shape", "ndim", "name"}, (*path, "when"))
        rename = None
        if "rename" in row:
            rename = self.built(Template, row["rename"], (*path, "rename"))
            self.check_names(rename.names, names, (*path, "rename"))
            if rename.n_wildcards > match.n_wildcards:
                self.fail((*path, "rename"), f"found {rename.n_wildcards} wildcards, expected at most the {match.n_wildcards} of `match`")
        role = row.get("role", "weight")
        if role not in ("weight", "buffer"):
            self.fail((*path, "role"), f"found {role!r}, expected weight or buffer")
        steps = self.steps(row.get("steps", []), (*path, "steps"), axes, names | {"shape", "ndim"}, buffers=True)
        line = self.lines.get(path, 0)
        return Rule(number + 1, match, excluded, when, rename, role, steps, line, self.source)

    def built(self, kind: type[Any], text: Any, path: Path) -> Any:
        try:
            return kind(self.string(text, path))
        except SpecError as error:
            if str(error).startswith(self.source):
                raise
            self.fail(path, str(error))

    def check_names(self, used: frozenset[str], known: set[str], path: Path) -> None:
        unknown = sorted(used - known)
        if unknown:
            self.fail(path, f"unknown name {', '.join(unknown)}; known are {', '.join(sorted(known)) or 'none'}")

    def steps(self, value: Any, path: Path, axes: tuple[str, ...], known: set[str], buffers: bool) -> tuple[Step, ...]:
        out: list[Step] = []
        for k, item in enumerate(self.sequence(value, path)):
            here = (*path, k)
            row = self.mapping(item, here)
            if len(row) != 1:
                self.fail(here, f"found {len(row)} keys, expected one: an axis or {', '.join(AXIS_FREE)}")
            key, text = next(iter(row.items()))
            here = (*here, key)
            step = self.step(key, self.string(text, here), here, axes)
            self.check_names(step.names, known, here)
            if step.axis is not None and any(other.axis == step.axis for other in out):
                self.fail(here, f"axis {step.axis} stands in two steps of one rule")
            out.append(step)
        self.order(out, path, buffers)
        return tuple(out)

    def step(self, key: str, text: str, path: Path, axes: tuple[str, ...]) -> Step:
        try:
            call = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.fail(path, f"{text!r} cannot be parsed: {getattr(error, 'msg', error)}")
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            self.fail(path, f"found {text!r}, expected a pattern such as Shard(0)")
        kind = call.func.id
        if kind not in SIGNATURES:
            self.fail(path, f"unknown pattern {kind!r}; expected one of {', '.join(SIGNATURES)}")
        free = key in AXIS_FREE
        if free and AXIS_FREE[key] != kind:
            self.fail(path, f"found {kind}, expected {AXIS_FREE[key]}(...)")
        if not free and kind in AXIS_FREE.values():
            wanted = next(k for k, v in AXIS_FREE.items() if v == kind)
            self.fail(path, f"{kind} belongs to no axis; write `{wanted}: {text}`")
        if not free and key not in axes:
            self.fail(path, f"unknown axis {key!r}; declared are {', '.join(axes) or 'none'}")
        signature = SIGNATURES[kind]
        given: dict[str, ast.expr] = {}
        if len(call.args) > len(signature):
            self.fail(path, f"{kind} takes {len(signature)} arguments, found {len(call.args)}")
        for name, node in zip(signature, call.args, strict=False):
            given[name] = node
        for keyword in call.keywords:
            if keyword.arg not in signature:
                self.fail(path, f"{kind} has no argument {keyword.arg!r}; it has {', '.join(signature) or 'none'}")
            if keyword.arg in given:
                self.fail(path, f"{kind}: argument {keyword.arg} stands twice")
            given[keyword.arg] = keyword.value
        missing = [name for name, form in signature.items() if name not in given and not form.endswith("?")]
        if missing:
            self.fail(path, f"{kind} needs {', '.join(missing)}")
        args: list[tuple[str, Expr | str]] = []
        for name in signature:
            if name not in given:
                continue
            node = given[name]
            form = signature[name].rstrip("?")
            if isinstance(node, ast.Starred):
                self.fail(path, f"{kind}: `*` is not allowed")
            if form == "word" or (form == "partition" and isinstance(node, ast.Name) and node.id in ("even", "each")):
                if isinstance(node, ast.Name):
                    args.append((name, node.id))
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    args.append((name, node.value))
                    continue
                self.fail(path, f"{kind}: {name} must be a word")
            args.append((name, self.built(Expr, ast.unparse(node), path)))
        return Step(None if free else key, kind, tuple(args))

    def order(self, steps: list[Step], path: Path, buffers: bool) -> None:
        flat = False
        for k, step in enumerate(steps):
            if step.kind == "FlatBuffer":
                if not buffers:
                    self.fail((*path, k), "FlatBuffer describes a buffer, not one state")
                if len(steps) != 1:
                    self.fail((*path, k), "FlatBuffer must be the only step of its rule: its parameters' own rules come before it")
            if flat and step.kind in ("Stack", "Permute"):
                self.fail((*path, k), f"{step.kind} after Flat: the array has one dimension by then")
            flat = flat or step.kind == "Flat"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
