"""Regular expressions of others in linear time: patterns in a checkpoint may come from anywhere, and ``re`` may take forever over them.

A pattern becomes a small automaton whose states are all followed at once (Thompson's simulation), so that a match takes at most
len(pattern) x len(text) steps. Understood: literals, ``.``, ``\\d \\w \\s`` and their complements, classes, groups, ``|``, ``* + ? {m,n}``
(greedy or lazy, which makes no difference to whether there is a match), ``^ $ \\A \\Z``. Anything else is a SpecError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import SpecError

__all__ = ["Budget", "LinearRegex"]

MAX_PATTERN = 500
MAX_STATES = 2000
MAX_DEPTH = 30
MAX_STEPS = 20_000_000

Ranges: TypeAlias = tuple[tuple[int, int], ...]
Chars: TypeAlias = tuple[bool, Ranges]
"""(complement?, code point ranges)."""
Tree: TypeAlias = tuple[str, object]

_CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
_ANY: Chars = (True, ((10, 10),))


@dataclass
class Budget:
    """How many steps matches may still take together: many patterns times many names are bounded too."""

    left: int = MAX_STEPS

    def spend(self, steps: int, pattern: str) -> None:
        """Raises SpecError when nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise SpecError(
                f"patterns take more than {MAX_STEPS} steps to match, the last one {pattern[:80]!r}: too many, or made to be slow"
            )


@dataclass(slots=True)
class LinearRegex:
    """A parsed pattern. ``match`` is like ``re.match``: at the beginning of the text, not necessarily to its end. Raises SpecError."""

    pattern: str
    literal: str | None = None
    """What the text must begin with, if that is all that the pattern says."""
    _code: list[tuple[str, object, int]] = field(default_factory=list)
    _work: int = 0

    def __post_init__(self) -> None:
        if len(self.pattern) > MAX_PATTERN:
            raise SpecError(f"regular expression of {len(self.pattern)} characters, expected at most {MAX_PATTERN}")
        tree = _Parser(self.pattern).parse()
        self.literal = _literal(tree)
        self._emit(tree)
        self._add("match", None)

    def match(self, text: str, budget: Budget | None = None) -> bool:
        """True if some beginning of the text matches."""
        budget = budget if budget is not None else Budget()
        if self.literal is not None:
            budget.spend(1, self.pattern)
            return text.startswith(self.literal)
        states = self._closure({0}, 0, len(text))
        for at, letter in enumerate(text):
            budget.spend(len(states) + 1, self.pattern)
            if any(self._code[s][0] == "match" for s in states):
                return True
            after = {s + 1 for s in states if self._code[s][0] == "chars" and _has(self._code[s][1], ord(letter))}
            if not after:
                return False
            states = self._closure(after, at + 1, len(text))
        return any(self._code[s][0] == "match" for s in states)

    # -- the automaton: a list of instructions; all but jumps and splits go on with the next one

    def _add(self, kind: str, what: object, to: int = 0) -> int:
        if len(self._code) >= MAX_STATES:
            raise SpecError(f"regular expression {self.pattern[:80]!r} becomes more than {MAX_STATES} states; it repeats too much")
        self._code.append((kind, what, to))
        return len(self._code) - 1

    def _emit(self, tree: Tree) -> None:
        self._work += 1
        if self._work > 20 * MAX_STATES:  # repetitions of nothing add no states
            raise SpecError(f"regular expression {self.pattern[:80]!r} repeats too much")
        kind, what = tree
        if kind in ("chars", "start", "end"):
            self._add(kind, what)
        elif kind == "sequence":
            assert isinstance(what, list)
            for part in what:
                self._emit(part)
        elif kind == "either":
            assert isinstance(what, list)
            ends = []
            for part in what[:-1]:
                split = self._add("split", None)
                self._emit(part)
                ends.append(self._add("jump", None))
                self._code[split] = ("split", None, len(self._code))
            self._emit(what[-1])
            for end in ends:
                self._code[end] = ("jump", None, len(self._code))
        else:
            assert isinstance(what, tuple)
            part, low, high = what
            for _ in range(low):
                self._emit(part)
            if high is None:
                split = self._add("split", None)
                self._emit(part)
                self._add("jump", None, split)
                self._code[split] = ("split", None, len(self._code))
                return
            splits = []
            for _ in range(high - low):
                splits.append(self._add("split", None))
                self._emit(part)
            for split in splits:
                self._code[split] = ("split", None, len(self._code))

    def _closure(self, states: set[int], at: int, end: int) -> set[int]:
        seen, stack = set(), list(states)
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            kind, _, to = self._code[state]
            if kind == "jump":
                stack.append(to)
            elif kind == "split":
                stack += (state + 1, to)
            elif (kind == "start" and at == 0) or (kind == "end" and at == end):
                stack.append(state + 1)
        return seen


def _has(chars: object, code: int) -> bool:
    assert isinstance(chars, tuple)
    complement, ranges = chars
    inside = any(low <= code <= high for low, high in ranges)
    return not inside if complement else inside


def _literal(tree: Tree) -> str | None:
    kind, what = tree
    if kind == "start":
        return ""  # match() is at the beginning anyway
    if kind == "chars":
        assert isinstance(what, tuple)
        complement, ranges = what
        return chr(ranges[0][0]) if not complement and len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None
    if kind == "sequence":
        assert isinstance(what, list)
        parts = [_literal(part) for part in what]
        return None if any(p is None for p in parts) else "".join(p for p in parts if p is not None)
    return None


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, message: str) -> SpecError:
        return SpecError(f"regular expression {self.text[:80]!r}, at {self.at}: {message}")

    def parse(self) -> Tree:
        tree = self.either(0)
        if self.at < len(self.text):
            raise self.fail("unbalanced )")
        return tree

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self) -> str:
        if self.at >= len(self.text):
            raise self.fail("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def either(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise self.fail(f"groups in more than {MAX_DEPTH} groups")
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else ("either", options)

    def sequence(self, depth: int) -> Tree:
        parts: list[Tree] = []
        while self.peek() not in ("", "|", ")"):
            part = self.one(depth)
            while self.peek() in ("*", "+", "?", "{"):
                low_high = self.quantifier()
                if low_high is None:
                    break
                part = ("repeat", (part, *low_high))
                if self.peek() == "?":
                    self.at += 1  # lazy
                elif self.peek() in ("*", "+", "{"):
                    raise self.fail("a repetition of a repetition, or a possessive one")
            parts.append(part)
        return parts[0] if len(parts) == 1 else ("sequence", parts)

    def quantifier(self) -> tuple[int, int | None] | None:
        sign = self.take()
        if sign != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at : max(end, self.at)].partition(",")
        numbers = [n for n in (low, high) if n]
        if end < 0 or not numbers or not all(n.isascii() and n.isdigit() and len(n) <= 4 for n in numbers):
            raise self.fail("{ that begins no repetition; write \\{")
        self.at = end + 1
        first = int(low or 0)
        last = (int(high) if high else None) if comma else first
        if last is not None and last < first:
            raise self.fail(f"a repetition of {first} to {last}")
        return first, last

    def one(self, depth: int) -> Tree:
        letter = self.take()
        if letter == "(":
            if self.peek() == "?":
                self.at += 1
                if self.take() != ":":
                    raise self.fail("a group of another kind than ( ) and (?: )")
            inside = self.either(depth + 1)
            if self.peek() != ")":
                raise self.fail("a ( without )")
            self.at += 1
            return inside
        if letter == "[":
            return "chars", self.char_class()
        if letter == ".":
            return "chars", _ANY
        if letter in "^$":
            return ("start" if letter == "^" else "end"), None
        if letter in "*+?":
            raise self.fail(f"{letter} repeats nothing")
        if letter == "\\":
            return self.escape()
        return "chars", (False, ((ord(letter), ord(letter)),))

    def escape(self) -> Tree:
        letter = self.take()
        if letter in ("A", "Z"):
            return ("start" if letter == "A" else "end"), None
        if letter.lower() in _CLASSES:
            return "chars", (letter.isupper(), _CLASSES[letter.lower()])
        if letter.isalnum():
            raise self.fail(f"\\{letter} is not understood")
        return "chars", (False, ((ord(letter), ord(letter)),))

    def char_class(self) -> Chars:
        complement = self.peek() == "^"
        self.at += complement
        ranges: list[tuple[int, int]] = []
        first = True
        while (letter := self.take()) != "]" or first:
            first = False
            if letter == "\\":
                letter = self.take()
                if letter in _CLASSES:
                    ranges += _CLASSES[letter]
                    continue
                if letter.isalnum():
                    raise self.fail(f"\\{letter} in a class is not understood")
            low = high = ord(letter)
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                upper = self.take()
                high = ord(self.take() if upper == "\\" else upper)
                if high < low:
                    raise self.fail("a range that ends before it begins")
            ranges.append((low, high))
        return complement, tuple(ranges)
