"""What a parsed spec is: variables, optimizer states, rules with steps. Plain frozen data that pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..errors import SpecError
from ..patterns import Average, Flat, FlatBuffer, Pad, Pattern, Permute, Replicate, Shard, Stack, Unique
from .expr import Expr, Value
from .names import Match, NameGlob, Template

__all__ = ["AXIS_FREE", "RESERVED", "SIGNATURES", "Rule", "StateSpec", "Step", "Variable"]

Lookup: TypeAlias = Callable[[str], Value]

SIGNATURES: dict[str, dict[str, str]] = {
    # argument -> kind; a kind that ends in "?" may be left out
    "Replicate": {},
    "Unique": {"at": "int_or_list"},
    "Shard": {"dim": "int", "parts": "ints?", "widths": "rows?", "copies": "int_or_list?"},
    "Average": {"state": "word?"},
    "Flat": {"bounds": "ints?"},
    "FlatBuffer": {"params": "params", "order": "word?", "align": "int?", "pad_to": "int?", "partition": "partition?"},
    "Pad": {"dim": "int", "to": "int", "size": "int?"},
    "Stack": {"dim": "int", "index": "int_or_list", "size": "int?"},
    "Permute": {"dims": "ints"},
}
"""Arguments of every pattern as written in a step, in positional order."""

AXIS_FREE: dict[str, str] = {"pad": "Pad", "stack": "Stack", "permute": "Permute"}
"""Step keys that are no axis, and the pattern each takes."""

RESERVED = frozenset({"shape", "ndim", "name", "size", *AXIS_FREE})
"""Names that an axis, a variable or a capture must not have."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A typed variable of a spec. ``default`` is None when the caller has to give it."""

    name: str
    type: Literal["int", "bool", "str", "list[int]", "params", "list[params]"]
    default: Value | None = None
    doc: str = ""

    def check(self, value: Any) -> Value:
        """The value, lists as tuples. Raises SpecError when it is not of the declared type."""
        ok = False
        match self.type:
            case "int":
                ok = type(value) is int
            case "bool":
                ok = type(value) is bool
            case "str":
                ok = isinstance(value, str)
            case "list[int]":
                ok = _is_list(value) and all(type(v) is int for v in value)
            case "params":
                ok = _is_list(value) and all(isinstance(v, str) for v in value)
            case "list[params]":
                ok = _is_list(value) and all(_is_list(row) and all(isinstance(v, str) for v in row) for row in value)
        if not ok:
            shown = repr(value)
            raise SpecError(f"variable {self.name!r}: found {shown[:80]} ({type(value).__name__}), expected {self.type}")
        return _tupled(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _tupled(value: Any) -> Value:
    return tuple(_tupled(v) for v in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class Step:
    """One step as written: an axis (None for axis-free ones), the pattern's name, and its arguments as expressions or bare words."""

    axis: str | None
    kind: str
    args: tuple[tuple[str, Expr | str], ...]

    @property
    def names(self) -> frozenset[str]:
        """Names that its expressions read."""
        return frozenset().union(*(value.names for _, value in self.args if isinstance(value, Expr)))

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={value.text if isinstance(value, Expr) else value}" for name, value in self.args)
        key = self.axis or next(k for k, v in AXIS_FREE.items() if v == self.kind)
        return f"{key}: {self.kind}({inner})"

    def resolve(self, lookup: Lookup) -> Pattern:
        """The pattern with its numbers. Raises SpecError for a wrong type, LayoutError for numbers that make no pattern."""
        values: dict[str, Any] = {}
        for name, value in self.args:
            kind = SIGNATURES[self.kind][name].rstrip("?")
            found = value if isinstance(value, str) else value.evaluate(lookup)
            values[name] = _typed(f"{self}: {name}", kind, found)
        match self.kind:
            case "Replicate":
                return Replicate()
            case "Unique":
                return Unique(_one_or_more(values["at"]))
            case "Shard":
                parts = values.get("parts")
                widths = values.get("widths")
                if widths is not None and parts is None:
                    widths = (widths,)
                return Shard(values["dim"], parts, _rows(f"{self}: widths", widths), _one_or_more(values.get("copies", 1)))
            case "Average":
                return Average(**values)
            case "Flat":
                return Flat(values.get("bounds"))
            case "FlatBuffer":
                written = dict(self.args)["params"]
                bounds = values.get("partition")
                return FlatBuffer(
                    values["params"],
                    values.get("order", "given"),
                    values.get("align", 1),
                    values.get("pad_to", 1),
                    None if isinstance(bounds, str) else bounds,
                    each=bounds == "each",
                    label=written.text if isinstance(written, Expr) and len(written.text) <= 40 else "",
                )
            case "Pad":
                return Pad(values["dim"], values["to"], values.get("size"))
            case "Stack":
                index = values["index"]
                return Stack(values["dim"], _one_or_more(index), values.get("size"), keep=isinstance(index, tuple))
            case _:
                return Permute(values["dims"])


def _one_or_more(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _rows(what: str, value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    for row in value:
        if not isinstance(row, tuple) or not all(type(v) is int for v in row):
            raise SpecError(f"{what}: found {value!r}, expected one list of integers per part (or one list, without parts)")
    return tuple(value)


def _typed(what: str, kind: str, value: Any) -> Any:
    if _is_list(value):
        value = _tupled(value)
    integers = isinstance(value, tuple) and all(type(v) is int for v in value)
    match kind:
        case "int":
            ok, wanted = type(value) is int, "an integer"
        case "ints":
            ok, wanted = integers, "a list of integers"
        case "int_or_list":
            ok, wanted = type(value) is int or integers, "an integer or a list of integers"
        case "rows":
            ok, wanted = isinstance(value, tuple), "a list of integers, or with parts a list of such lists"
        case "params":
            ok, wanted = isinstance(value, tuple) and all(isinstance(v, str) for v in value), "a list of parameter names"
        case "partition":
            ok, wanted = value in ("even", "each") or integers, "`even`, `each` or a list of cut points"
        case _:
            ok, wanted = isinstance(value, str), "a word"
    if not ok:
        raise SpecError(f"{what}: found {str(value)[:80]!r}, expected {wanted}")
    return value


@dataclass(frozen=True, slots=True)
class StateSpec:
    """How an optimizer state differs from its parameter.

    kind: ``follow`` (same shape, same steps), ``scalar`` (0-d or one element, on every rank), ``replicated`` (any shape, whole on every
    rank), ``factored`` (the parameter's shape without dimension ``drop``; its steps without that dimension), ``steps`` (own ``steps``).
    master: it is the fp32 master copy of the weight.
    """

    kind: Literal["follow", "scalar", "replicated", "factored", "steps"] = "follow"
    drop: int = 0
    steps: tuple[Step, ...] = ()
    master: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: which names, under which condition, and how the tensor is divided.

    line: 0 when not read from text. below: the spec that it was inherited from (``extends``), or "".
    """

    number: int
    match: NameGlob
    excluded: tuple[NameGlob, ...] = ()
    when: Expr | None = None
    rename: Template | None = None
    role: Literal["weight", "buffer"] = "weight"
    steps: tuple[Step, ...] = ()
    line: int = 0
    where: str = field(default="", compare=False)
    below: str = field(default="", compare=False)

    @property
    def reads_shape(self) -> bool:
        """True when the condition or a step depends on the tensor's shape."""
        reads = frozenset().union(*(step.names for step in self.steps), self.when.names if self.when is not None else ())
        return not reads.isdisjoint(("shape", "ndim"))

    def match_name(self, name: str) -> Match | None:
        """What ``match`` finds in a name, None when it does not match or an ``except`` glob does."""
        found = self.match.match(name)
        if found is not None and any(glob.match(name) is not None for glob in self.excluded):
            return None
        return found

    @property
    def is_buffer_of_many(self) -> bool:
        """True for a rule whose tensor is a flat buffer of many parameters."""
        return any(step.kind == "FlatBuffer" for step in self.steps)

    @property
    def title(self) -> str:
        """How errors call it."""
        line = f", line {self.line}" if self.line else ""
        below = f" of {self.below}" if self.below else ""
        return f"rule {self.number} (match {self.match.text!r}{line}{below})"


def check_variables(declared: Mapping[str, Variable], given: Mapping[str, Any], source: str) -> dict[str, Value]:
    """All variables with defaults filled in. Raises SpecError for unknown, missing or ill-typed ones."""
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise SpecError(f"{source}: unknown variable {_list(unknown)}; the spec declares {_list(declared) or 'none'}")
    out: dict[str, Value] = {}
    missing = []
    for name, variable in declared.items():
        if name in given:
            out[name] = variable.check(given[name])
        elif variable.default is None:
            missing.append(f"{name} ({variable.type}{': ' + variable.doc if variable.doc else ''})")
        else:
            out[name] = variable.default
    if missing:
        raise SpecError(f"{source}: no value for {_list(missing)}; give variables={{...}}")
    return out


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
