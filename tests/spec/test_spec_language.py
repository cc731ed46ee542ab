"""Expressions, globs, rename templates and lint."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import SpecError
from ucp_dcp.spec import Expr, LayoutSpec, NameGlob, Template, lint

NAMES: dict[str, Any] = {"a": 7, "b": 2, "pp": 1, "pp.size": 4, "xs": (3, 4, 5), "t": True, "s": "glu", "groups": (("u", "v"), ("w",))}


def value(text: str) -> Any:
    return Expr(text).evaluate(NAMES.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * a", 15), ("(a + b - 1) // b * b", 8), ("-a % 4", 1), ("a // -b", -4), ("pp.size - 1", 3), ("+b", 2),
        ("a > b and pp < pp.size", True), ("a < b or s == 'glu'", True), ("not t", False), ("1 < b <= 2 < a", True), ("1 < b < 2", False),
        ("[a, b] + [1]", [7, 2, 1]), ("[b] * 3", [2, 2, 2]), ("2 * [b]", [2, 2]), ("xs[1]", 4), ("groups[1]", ("w",)),
        ("groups[0][1]", "v"),
        ("4 in xs", True), ("4 not in xs", False), ("'w' in groups[1]", True), ("[[1, b]] * 2", [[1, 2], [1, 2]]), ("(1, a)", [1, 7]),
        ("a and b", 2), ("0 or b", 2), ("a != 7", False), ("True + 1", 2),
    ],
)  # fmt: skip
def test_expressions(text: str, expected: Any) -> None:
    assert value(text) == expected


INTEGERS = st.recursive(
    st.one_of(st.integers(-50, 50).map(str), st.sampled_from(["a", "b", "pp"])),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
    max_leaves=8,
)


@given(INTEGERS, st.sampled_from(["==", "<", ">=", "!="]), INTEGERS)
@settings(max_examples=200, deadline=None)
def test_arithmetic_is_pythons(left: str, relation: str, right: str) -> None:
    text = f"{left} {relation} {right}"
    try:
        expected = eval(text, {"__builtins__": {}}, {"a": 7, "b": 2, "pp": 1})
    except ZeroDivisionError:
        with pytest.raises(SpecError, match="division by zero"):
            value(text)
        return
    assert value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "a.real", "a.__class__", "(1).size", "pp.size.size", "[x for x in xs]", "lambda: 1", "a ** b",
        "a / b", "a << b", "~a",
        "xs[0:1]", "a if t else b",
        "f'{a}'", "1.5", "b'x'", "None", "...", "{1: 2}", "{1}", "a := 1", "print(a)", "*xs", "a is b", "1j", "", "a b",
        "9" * 25, "1 + " * 60 + "1", "(" * 300 + "1" + ")" * 300, "x" * 3000, "yield a", "a;b", "a\nb", "await a",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Expr(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a // (b - 2)", "division by zero"), ("a % 0", "division by zero"), ("xs[3]", "index 3 of a list of 3"), ("xs[-1]", "index -1"),
        ("a[0]", "has no elements"), ("s + 1", "arithmetic of 'glu'"), ("xs + 1", "added to a list only"), ("xs < 1", "comparison of"),
        ("1 in a", "`in` needs a list"), ("1 in s", "`in` needs a list"), ("xs * 10000000", "too long"), ("xs * xs", "repetition of"),
        ("4611686018427387904 * 4611686018427387904", "too large"), ("-s", "sign of"),
    ],
)  # fmt: skip
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        value(text)


@pytest.mark.parametrize(
    ("glob", "name", "captures", "wildcards"),
    [
        ("a.b", "a.b", {}, ()),
        ("a.*", "a.b", {}, ("b",)),
        ("a.*", "a.b.c", None, None),
        ("a.*", "a.", None, None),
        ("a.**", "a.b.c", {}, ("b.c",)),
        ("**.w", "w", None, None),
        ("**.w", "x.y.w", {}, ("x.y",)),
        ("l.{i}.*.{j}", "l.12.x.0", {"i": 12, "j": 0}, ("x",)),
        ("l.{i}.w", "l.01.w", None, None),
        ("l.{i}.w", "l.x.w", None, None),
        ("g{i}", "g7", {"i": 7}, ()),
        ("a+b[0].w", "a+b[0].w", {}, ()),
        ("a.b", "axb", None, None),
        ("*_norm.*", "q_norm.weight", {}, ("q", "weight")),
        ("a.**norm.*", "a.x.y_norm.w", {}, ("x.y_", "w")),
        ("a", "a\n", None, None),
    ],
)
def test_globs(glob: str, name: str, captures: Any, wildcards: Any) -> None:
    found = NameGlob(glob).match(name)
    assert (captures, wildcards) == (None, None) if found is None else (found.captures, found.wildcards) == (captures, wildcards)


@given(st.text("ab.*", min_size=1, max_size=7), st.text("ab.", min_size=1, max_size=7))
@settings(max_examples=400, deadline=None)
def test_globs_agree_with_plain_regular_expressions(glob: str, name: str) -> None:
    if "***" in glob or glob.count("**") > 3:
        return
    pattern = "".join({"**": ".+", "*": "[^.]+"}.get(t, re.escape(t)) for t in re.findall(r"\*\*|\*|[^*]+", glob))
    assert (NameGlob(glob).match(name) is not None) == (re.fullmatch(pattern, name) is not None)
    if "*" not in glob:
        assert (NameGlob(glob).match(name) is not None) == fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize("text", ["", "a.{", "a.}", "{1}", "{i}.{i}", "*" * 20, "**a**a**a**", "x" * 2000])
def test_bad_globs(text: str) -> None:
    with pytest.raises(SpecError):
        NameGlob(text)


@given(st.text("a1.*", min_size=1, max_size=6), st.text("a1.*", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_overlap_gives_a_name_that_both_match(a: str, b: str) -> None:
    if "***" in a + " " + b or max(a.count("**"), b.count("**")) > 3:
        return
    one, two = NameGlob(a), NameGlob(b)
    name = one.overlap(two)
    assert (name is None) == (two.overlap(one) is None)
    if name is not None:
        assert one.match(name) is not None and two.match(name) is not None, name
    else:
        # No short name is matched by both.
        for length in range(1, 5):
            for k in range(3**length):
                word = "".join("a1."[k // 3**j % 3] for j in range(length))
                assert one.match(word) is None or two.match(word) is None, word


def test_overlap_with_captures() -> None:
    assert NameGlob("l.{i}.w").overlap(NameGlob("l.*.w")) == "l.0.w"
    assert NameGlob("l.{i}").overlap(NameGlob("l.x")) is None
    assert NameGlob("l.{i}").overlap(NameGlob("l.12")) == "l.12"
    assert NameGlob("a{i}").overlap(NameGlob("**")) == "a0"


def test_templates() -> None:
    template = Template("decoder.{i + a}.*.x.**")
    assert template.names == {"i", "a"} and template.n_wildcards == 2
    found = NameGlob("l.{i}.*.y.**").match("l.3.q.y.b.c")
    assert found is not None
    assert template.fill(found.wildcards, {"i": 3, "a": 7}.__getitem__) == "decoder.10.q.x.b.c"
    for text in ("{-1}", "{xs}", "{t}"):
        with pytest.raises(SpecError, match="expected a number from 0 or a string"):
            Template(text).fill((), NAMES.__getitem__)
    for text in ("a.{", "a}", "{}", "{import os}"):
        with pytest.raises(SpecError):
            Template(text)


def findings(rules: list[Any], **more: Any) -> list[str]:
    spec = LayoutSpec.from_dict({"ucp_spec": 1, "axes": ["tp", "dp"], "rules": rules, **more})
    return [f.code for f in lint(spec)]


def test_lint() -> None:
    both = [{"tp": "Shard(0)"}, {"dp": "Replicate()"}]
    assert findings([{"match": "a", "steps": both}]) == []
    assert findings([{"match": "a.*", "steps": both}, {"match": "*.b", "steps": []}]) == ["overlap"]
    assert findings([{"match": "a.*", "steps": both, "except": ["*.b"]}, {"match": "*.b"}]) == []
    assert findings([{"match": "a", "when": "tp > 0", "steps": both}, {"match": "a", "when": "tp == 0"}]) == []
    assert findings([{"match": "a", "when": "tp > 0", "steps": both}, {"match": "a", "when": "tp > 0"}]) == ["overlap"]
    assert findings([{"match": "a", "when": "True", "steps": both}, {"match": "a"}]) == ["overlap"]
    assert findings([{"match": "a", "steps": [{"tp": "Flat()"}, {"dp": "Shard(1)"}]}]) == ["dim-after-flat"]
    assert findings([{"match": "a", "steps": [*both, {"pad": "Pad(0, to=8)"}]}]) == ["no-size"]
    assert findings([{"match": "a", "steps": [{"tp": "Shard(0)"}]}]) == ["unused-axis"]
    assert findings([{"match": "a.{i}", "steps": both}]) == ["unused-capture"]
    assert findings([{"match": "a", "steps": both}], variables={"n": "int"}) == ["unused-variable"]
    assert findings(
        [{"match": "a", "rename": "b", "steps": [{"dp": "FlatBuffer(params=['x'])"}]}, {"match": "x", "steps": [{"tp": "Shard(0)"}]}]
    ) == ["renamed-buffer"]
    text = str(lint(LayoutSpec.parse("ucp_spec: 1\nrules:\n- match: a\n- match: '*'"))[0])
    assert text == "error overlap: line 4: rule 1 (match 'a', line 3) and rule 2 (match '*', line 4) both match 'a'; rules must be disjoint"
