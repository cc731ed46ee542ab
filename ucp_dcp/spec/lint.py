"""Findings about a spec that parses: what is suspicious before any tensor is seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .expr import names_of
from .model import Rule
from .parse import LayoutSpec

__all__ = ["Finding", "lint"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``error``: the spec cannot work as written; ``warning``: it may not do what was meant. ``rule`` is 0 for all of it."""

    level: Literal["error", "warning"]
    code: str
    rule: int
    line: int
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{self.level} {self.code}: {where}{self.message}"


def lint(spec: LayoutSpec) -> list[Finding]:
    """Findings in rule order; empty for a clean spec."""
    out: list[Finding] = []
    used: set[str] = set()
    for state in spec.states.values():
        for step in state.steps:
            used |= step.names | ({step.axis} if step.axis else set())
    for rule in spec.rules:
        used |= _names(rule)
        out.extend(_rule(rule))
    for a, rule in enumerate(spec.rules):
        for other in spec.rules[a + 1 :]:
            out.extend(_pair(rule, other))
    for name in spec.variables:
        if name not in used:
            out.append(Finding("warning", "unused-variable", 0, 0, f"variable {name} is not used"))
    for axis in spec.axes:
        if axis not in used and f"{axis}.size" not in used:
            out.append(Finding("warning", "unused-axis", 0, 0, f"axis {axis} is not used: every tensor is replicated along it"))
    return out


def _names(rule: Rule) -> set[str]:
    used: set[str] = set()
    for step in rule.steps:
        used |= step.names | ({step.axis} if step.axis else set())
    if rule.when is not None:
        used |= rule.when.names
    if rule.rename is not None:
        used |= rule.rename.names
    return used


def _rule(rule: Rule) -> list[Finding]:
    out: list[Finding] = []

    def add(level: Literal["error", "warning"], code: str, message: str) -> None:
        out.append(Finding(level, code, rule.number, rule.line, f"{rule.title}: {message}"))

    flat = False
    for step in rule.steps:
        args = dict(step.args)
        dim = args.get("dim")
        text = dim.text if dim is not None and not isinstance(dim, str) else None
        if flat and step.kind in ("Shard", "Pad") and text not in ("0", "-1"):
            add("error", "dim-after-flat", f"{step}: after Flat the array has dimension 0 only")
        if step.kind in ("Pad", "Stack") and "size" not in args:
            add("warning", "no-size", f"{step}: without size= the global shape is known only from shapes= or a checkpoint")
        if step.kind == "Shard" and "copies" in args and "widths" in args:
            add("warning", "copies-and-widths", f"{step}: widths are per distinct slice, n / copies of them")
        flat = flat or step.kind == "Flat"
    unused = [c for c in rule.match.captures if c not in _names(rule)]
    if unused:
        add("warning", "unused-capture", f"captured {', '.join(unused)} is not used; `*` would do")
    if rule.is_buffer_of_many and rule.rename is not None:
        add("error", "renamed-buffer", "a flat buffer has no global name to rename; rename its parameters")
    return out


def _pair(a: Rule, b: Rule) -> list[Finding]:
    # A buffer's rule and a parameter's rule may meet on one name only if both stand below one root; a condition may keep them apart.
    name = a.match.overlap(b.match)
    if name is None or a.match_name(name) is None or b.match_name(name) is None:
        return []
    conditions = [r.when.text for r in (a, b) if r.when is not None]
    if conditions and not (len(conditions) == 2 and conditions[0] == conditions[1]):
        constant = all(not names_of(text) for text in conditions)
        if not constant:
            return []
    return [Finding("error", "overlap", b.number, b.line, f"{a.title} and {b.title} both match {name!r}; rules must be disjoint")]
