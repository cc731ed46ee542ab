"""Name globs and rename templates.

A glob is a dotted name in which ``*`` stands for one character or more inside one segment, ``**`` for one or more across segments, and
``{i}`` for a whole number, captured as ``i``. A rename template is a dotted name in which ``{expression}`` is a number or text and the k-th
``*`` or ``**`` stands for what the k-th wildcard of the glob matched.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import SpecError
from .expr import Expr, Value

__all__ = ["Match", "NameGlob", "Template", "distance"]

_TOKEN = re.compile(r"\*\*|\*|\{[^{}]*\}|[^*{}]+|.")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Match:
    """What a glob matched: the captured integers and the text of each wildcard, in order."""

    captures: dict[str, int]
    wildcards: tuple[str, ...]


def _tokens(text: str) -> list[str]:
    if not text or len(text) > MAX_TEXT:
        raise SpecError(f"a name of {len(text)} characters, expected 1 to {MAX_TEXT}")
    return [m.group() for m in _TOKEN.finditer(text)]


@dataclass(frozen=True, slots=True)
class NameGlob:
    """A glob over dotted names. Raises SpecError when it is malformed."""

    text: str

    def __post_init__(self) -> None:
        _compiled(self.text)

    @property
    def captures(self) -> tuple[str, ...]:
        """Names of the captured integers."""
        return _compiled(self.text)[1]

    @property
    def n_wildcards(self) -> int:
        """How many ``*`` and ``**`` it has."""
        return _compiled(self.text)[2]

    def match(self, name: str) -> Match | None:
        """Match a whole name, or None."""
        regex, captures, n_wild = _compiled(self.text)
        found = regex.fullmatch(name)
        if found is None:
            return None
        return Match({c: int(found.group(f"c_{c}")) for c in captures}, tuple(found.group(f"w_{k}") for k in range(n_wild)))

    def overlap(self, other: NameGlob) -> str | None:
        """A name that both globs match, or None if there is none."""
        return _overlap(self.text, other.text)


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[re.Pattern[str], tuple[str, ...], int]:
    regex = ""
    captures: list[str] = []
    wild = 0
    for token in _tokens(text):
        if token in ("*", "**"):
            # What each wildcard gets must be plain to people: the first ones as much as they can.
            regex += f"(?P<w_{wild}>{'.+' if token == '**' else '[^.]+'})"
            wild += 1
        elif token[0] == "{" and len(token) > 1:
            name = token[1:-1].strip()
            if not _IDENTIFIER.match(name):
                raise SpecError(f"glob {text!r}: found {token}, expected {{name}} of a captured whole number")
            if name in captures:
                raise SpecError(f"glob {text!r}: {token} stands in it twice")
            captures.append(name)
            regex += f"(?P<c_{name}>0|[1-9][0-9]{{0,17}})"
        elif token in "{}":
            raise SpecError(f"glob {text!r}: unbalanced {token!r}")
        else:
            regex += re.escape(token)
    # Each `**` may be tried at every character: more of them would let a hostile spec spend minutes on one name.
    if wild > 8 or _tokens(text).count("**") > 3:
        raise SpecError(f"glob {text!r}: found {wild} wildcards, expected at most 8, and at most 3 of them `**`")
    return re.compile(regex, re.DOTALL), tuple(captures), wild


@dataclass(frozen=True, slots=True)
class Template:
    """A rename template. Raises SpecError when it is malformed."""

    text: str

    def __post_init__(self) -> None:
        for token in _tokens(self.text):
            if token in ("{", "}"):
                raise SpecError(f"rename {self.text!r}: unbalanced {token!r}")
            if token[0] == "{":
                Expr(token[1:-1])

    @property
    def names(self) -> frozenset[str]:
        """Names that its expressions read."""
        out: frozenset[str] = frozenset()
        for token in _tokens(self.text):
            if token[0] == "{":
                out |= Expr(token[1:-1]).names
        return out

    @property
    def n_wildcards(self) -> int:
        """How many ``*`` and ``**`` it has."""
        return sum(token in ("*", "**") for token in _tokens(self.text))

    def fill(self, wildcards: tuple[str, ...], lookup: Callable[[str], Value]) -> str:
        """The name. Raises SpecError when an expression yields a negative number or a list."""
        out: list[str] = []
        wild = iter(wildcards)
        for token in _tokens(self.text):
            if token in ("*", "**"):
                out.append(next(wild))
            elif token[0] == "{":
                value = Expr(token[1:-1]).evaluate(lookup)
                if isinstance(value, bool) or not isinstance(value, (int, str)) or (isinstance(value, int) and value < 0):
                    raise SpecError(f"rename {self.text!r}: {token} is {value!r}, expected a number from 0 or a string")
                out.append(str(value))
            else:
                out.append(token)
        return "".join(out)


def _symbols(text: str) -> list[str]:
    """Tokens with literals cut into characters; a capture becomes the symbol ``#``+ (one digit or more)."""
    out: list[str] = []
    for token in _tokens(text):
        if token in ("*", "**"):
            out.append(token)
        elif token[0] == "{":
            out.append("{}")
        else:
            out.extend(token)
    return out


@functools.lru_cache(maxsize=65536)
def _overlap(a: str, b: str) -> str | None:
    """Breadth-first search through the product of the two automata. Numbers with leading zeros are not told apart from others."""
    sa, sb = _symbols(a), _symbols(b)

    # A state is (position, inside): inside = the symbol before has matched at least one character and may take more.
    def moves(symbols: list[str], state: tuple[int, bool]) -> list[tuple[str, tuple[int, bool]]]:
        at, inside = state
        out: list[tuple[str, tuple[int, bool]]] = []
        if inside:
            out.append((symbols[at - 1], (at, True)))
        if at < len(symbols):
            symbol = symbols[at]
            out.append((symbol, (at + 1, symbol in ("*", "**", "{}"))))
        return out

    def common(x: str, y: str) -> str | None:
        wide = {"**": 0, "*": 1, "{}": 2}
        if x not in wide and y not in wide:
            return x if x == y else None
        if x not in wide or y not in wide:
            literal, symbol = (x, y) if x not in wide else (y, x)
            if symbol == "{}":
                return literal if literal.isascii() and literal.isdigit() else None
            return None if symbol == "*" and literal == "." else literal
        return "0" if "{}" in (x, y) else "x"

    start = ((0, False), (0, False))
    seen = {start: ""}
    queue = [start]
    while queue:
        state = queue.pop(0)
        (pa, _), (pb, _) = state
        if pa == len(sa) and pb == len(sb):
            return seen[state]
        for xa, na in moves(sa, state[0]):
            for xb, nb in moves(sb, state[1]):
                letter = common(xa, xb)
                if letter is not None and (na, nb) not in seen:
                    seen[(na, nb)] = seen[state] + letter
                    queue.append((na, nb))
    return None


def distance(glob: str, name: str) -> int:
    """How far a name is from being matched: characters to change, wildcards matching anything. For naming the nearest rule in an error."""
    symbols = _symbols(glob)[:200]
    name = name[:200]
    row = list(range(len(symbols) + 1))
    for letter in name:
        new = [row[0] + 1]
        for k, symbol in enumerate(symbols, 1):
            if symbol == "**" or (symbol == "*" and letter != ".") or (symbol == "{}" and letter.isdigit()):
                new.append(min(row[k], row[k - 1], new[k - 1] + 1, row[k] + 1))
            else:
                new.append(min(row[k - 1] + (symbol != letter), row[k] + 1, new[k - 1] + 1))
        row = new
    return row[-1]
