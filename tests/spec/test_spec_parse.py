"""Specs from YAML and plain data: what parses, what is refused, and that every complaint names file, line, rule and key."""

from __future__ import annotations

import json
import pickle
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ucp_dcp.errors import LayoutError, SpecError
from ucp_dcp.patterns import Average, Flat, FlatBuffer, Pad, Permute, Replicate, Shard, Stack, Unique
from ucp_dcp.spec import LayoutSpec, check_variables, lint, ready_specs
from ucp_dcp.spec.model import SIGNATURES

SCHEMA = json.loads((resources.files("ucp_dcp") / "specs" / "schema.json").read_text("utf-8"))

GOOD = """\
ucp_spec: 1
name: good
axes: [pp, tp, dp]
variables:
  vocab: int
  first: {type: int, default: 0, doc: first layer}
  qkv: {type: "list[int]"}
  groups: {type: "list[params]", default: [[a, b], [c]]}
optimizer:
  states:
    step: scalar
    fp32: master
    row: {kind: factored, drop: -1}
    absmax: {steps: [{tp: Shard(0)}]}
rules:
  - match: emb.weight
    steps:
      - pp: Unique([0, pp.size - 1])
      - pad: Pad(0, to=(vocab + 7) // 8 * 8, size=vocab)
      - tp: Shard(0)
  - match: layers.{i}.**
    except: ["layers.{i}.qkv"]
    when: first >= 0 and ndim == 2
    rename: decoder.layers.{i + first}.**
    steps:
      - pp: Unique(pp)
      - tp: Shard(-1, widths=[3, 1])
      - dp: Flat(bounds=[0, 5, 9])
  - match: layers.{i}.qkv
    role: buffer
    steps:
      - stack: Stack(0, index=[i, i + 1], size=8)
      - permute: Permute([1, 0])
      - tp: Shard(1, parts=qkv, widths=[[1, 1]] * 3, copies=[1, 2, 2])
      - dp: Average(state=first)
  - match: flat{g}
    steps:
      - dp: FlatBuffer(params=groups[g], order=reverse, align=4, pad_to=2*dp.size, partition=[0, 8, 16])
"""


def lookup(name: str) -> Any:
    return {"vocab": 10, "pp": 1, "pp.size": 4, "dp.size": 2, "i": 3, "g": 1, "qkv": (4, 2, 2), "groups": (("a", "b"), ("c",))}[name]


def test_everything_the_language_has() -> None:
    spec = LayoutSpec.parse(GOOD, source="good.yaml")
    assert (
        spec.axes == ("pp", "tp", "dp")
        and spec.variables["first"].default == 0
        and spec.variables["groups"].default == (("a", "b"), ("c",))
    )
    assert spec.states["fp32"].master and spec.states["row"].drop == -1 and spec.states["absmax"].kind == "steps"
    resolved = [[step.resolve(lookup) for step in rule.steps] for rule in spec.rules]
    assert resolved == [
        [Unique((0, 3)), Pad(0, 16, 10), Shard(0)],
        [Unique((1,)), Shard(-1, widths=((3, 1),)), Flat((0, 5, 9))],
        [Stack(0, (3, 4), 8, keep=True), Permute((1, 0)), Shard(1, (4, 2, 2), ((1, 1),) * 3, (1, 2, 2)), Average("first")],
        [FlatBuffer(("c",), "reverse", 4, 4, (0, 8, 16), label="groups[g]")],
    ]
    assert spec.rules[1].line == 21 and spec.rules[1].title == "rule 2 (match 'layers.{i}.**', line 21)"
    assert spec.rules[2].role == "buffer" and spec.rules[3].is_buffer_of_many
    assert spec.rules[1].match_name("layers.3.qkv") is None and spec.rules[1].match_name("layers.3.proj") is not None
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert LayoutSpec.from_dict(yaml.safe_load(GOOD)).rules[3].steps == spec.rules[3].steps
    jsonschema.validate(yaml.safe_load(GOOD), SCHEMA)


def test_texts_of_patterns() -> None:
    spec = LayoutSpec.parse(GOOD)
    texts = [str(step.resolve(lookup)) for rule in spec.rules for step in rule.steps]
    assert texts == [
        "Unique([0, 3])", "Pad(0, to=16, size=10)", "Shard(0)", "Unique(1)", "Shard(-1, widths=[3, 1])", "Flat(bounds=[0, 5, 9])",
        "Stack(0, index=[3, 4], size=8)", "Permute([1, 0])",
        "Shard(1, parts=[4, 2, 2], widths=[[1, 1], [1, 1], [1, 1]], copies=[1, 2, 2])", "Average(state=first)",
        "FlatBuffer(groups[g], order=reverse, align=4, pad_to=4, partition=[0, 8, 16])",
    ]  # fmt: skip
    assert str(Replicate()) == "Replicate()" and str(Stack(0, (2,))) == "Stack(0, index=2)"
    assert str(Shard(0, parts=tuple(range(20)))) == "Shard(0, parts=[0, 1, 2, 3, ... 20 in all])"


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


BAD = [
    (changed("ucp_spec: 1", "ucp_spec: 2"), r"x.yaml:1: key ucp_spec: found 2, expected 1"),
    (changed("ucp_spec: 1\n", ""), r"key ucp_spec: found None, expected 1"),
    (changed("name: good", "nmae: good"), r"x.yaml:2: key nmae: unknown; expected one of axes"),
    (changed("axes: [pp, tp, dp]", "axes: [pp, tp, dp, tp]"), r"x.yaml:3: key axes\[3\]: 'tp' is declared twice"),
    (changed("axes: [pp, tp, dp]", "axes: [pp, tp, dp, pad]"), r"'pad' is a word of the language"),
    (changed("vocab: int", "vocab: integer"), r"x.yaml:5: key variables.vocab.type: found 'integer', expected one of int"),
    (changed("vocab: int", "tp: int"), r"key variables.tp: 'tp' is declared twice"),
    (changed("default: 0", "default: x"), r"x.yaml:6: key variables.first.default: variable 'first': found 'x' \(str\), expected int"),
    (changed("default: 0", "default: true"), r"found True \(bool\), expected int"),
    (changed("step: scalar", "step: skalar"), r"x.yaml:11: key optimizer.states.step.kind: found 'skalar', expected follow"),
    (changed(", drop: -1", ""), r"x.yaml:13: key optimizer.states.row: `drop`"),
    (changed("match: emb.weight", "mtach: emb.weight"), r"x.yaml:16: rule 1, key mtach: unknown"),
    (changed("layers.{i}.**\n    except", "layers.{i}.{i}.**\n    except"), r"x.yaml:21: rule 2, key match: glob .*stands in it twice"),
    (changed("layers.{i}.**\n    except", "layers.{tp}.**\n    except"), r"rule 2, key match: capture \{tp\} has the name of an axis"),
    (changed("layers.{i + first}.**", "layers.{i + of}.**"), r"x.yaml:24: rule 2, key rename: unknown name of; known are"),
    (changed("layers.{i + first}.**", "layers.{i + first}.**.**"), r"rule 2, key rename: found 2 wildcards, expected at most the 1"),
    (changed("layers.{i + first}.**", "layers.{i + first.**"), r"rule 2, key rename: "),
    (changed("first >= 0 and ndim == 2", "first >= 0 and"), r"x.yaml:23: rule 2, key when: expression .*cannot be parsed"),
    (changed("first >= 0 and ndim == 2", "open('x')"), r"rule 2, key when: .*not allowed"),
    (changed("role: buffer", "role: param"), r"x.yaml:30: rule 3, key role: found 'param', expected weight or buffer"),
    (
        changed("tp: Shard(0)\n  - match", "ep: Shard(0)\n  - match"),
        r"x.yaml:20: rule 1, key steps\[2\].ep: unknown axis 'ep'; declared are pp, tp, dp",
    ),
    (
        changed("tp: Shard(0)\n  - match", "tp: Slice(0)\n  - match"),
        r"rule 1, key steps\[2\].tp: unknown pattern 'Slice'; expected one of Replicate",
    ),
    (changed("tp: Shard(0)\n  - match", "tp: Shard\n  - match"), r"found 'Shard', expected a pattern such as Shard\(0\)"),
    (changed("tp: Shard(0)\n  - match", "tp: Shard()\n  - match"), r"Shard needs dim"),
    (changed("tp: Shard(0)\n  - match", "tp: Shard(0, dim=1)\n  - match"), r"argument dim stands twice"),
    (changed("tp: Shard(0)\n  - match", "tp: Shard(0, part=[1])\n  - match"), r"Shard has no argument 'part'; it has dim, parts"),
    (changed("tp: Shard(0)\n  - match", "tp: Shard(*qkv)\n  - match"), r"`\*` is not allowed"),
    (changed("tp: Shard(0)\n  - match", "tp: Shard(0, parts=lambda: 0)\n  - match"), r"not allowed"),
    (changed("tp: Shard(0)\n  - match", "tp: Pad(0, to=8)\n  - match"), r"Pad belongs to no axis; write `pad: Pad\(0, to=8\)`"),
    (changed("pad: Pad(0, to=(vocab + 7) // 8 * 8, size=vocab)", "pad: Shard(0)"), r"found Shard, expected Pad"),
    (changed("tp: Shard(0)\n  - match", "pp: Shard(0)\n  - match"), r"axis pp stands in two steps"),
    (
        changed("      - pp: Unique(pp)\n", "      - pp: Unique(pp)\n        tp: Shard(0)\n"),
        r"x.yaml:26: rule 2, key steps\[0\]: found 2 keys",
    ),
    (changed("align=4", "align=four"), r"unknown name four"),
    (changed("partition=[0, 8, 16])", "partition=[0, 8, 16])\n      - tp: Shard(0)"), r"FlatBuffer must be the only step"),
    (changed("dp: Flat(bounds=[0, 5, 9])", "dp: Flat()\n      - permute: Permute([0])"), r"Permute after Flat"),
    ("rules: []\nucp_spec: 1", "found no rule"),
    ("ucp_spec: 1", "no `rules`"),
    ("", "found nothing"),
    ("ucp_spec: 1\nrules: [", "x.yaml:2: not YAML"),
    ("ucp_spec: 1\nrules:\n- match: a\n  match: b", "x.yaml:4: key 'match' stands twice"),
    ("ucp_spec: 1\nrules:\n- match: 3", r"x.yaml:3: rule 1, key match: found 3, expected text"),
    ("- a", "found \\['a'\\], expected a mapping"),
    ("ucp_spec: 1\nrules: !!python/object/apply:os.system ['echo']", "x.yaml:2: tag .*os.system.* is not allowed"),
    ("ucp_spec: 1\nrules: 2020-01-01", "neither text"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        LayoutSpec.parse(text, source="x.yaml")
    assert str(error.value).startswith("x.yaml")


def test_names_that_yaml_takes_for_truth_values() -> None:
    spec = LayoutSpec.parse("ucp_spec: 1\nvariables: {off: int, y: {type: bool, default: off}}\nrules: [{match: a}]")
    assert set(spec.variables) == {"off", "y"} and spec.variables["y"].default is False


def test_aliases_cannot_unfold_without_bound() -> None:
    """A few lines of YAML aliases must not become gigabytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
    with pytest.raises(SpecError, match="too large"):
        LayoutSpec.parse("\n".join(lines))
    with pytest.raises(SpecError, match="nested too deeply"):
        LayoutSpec.parse("[" * 5000)


def test_numbers_that_make_no_pattern() -> None:
    for text, message in [
        ("Shard(0, parts=[1, -1])", "at least 0"),
        ("Shard(0, parts=[])", "at least one"),
        ("Shard(0, parts=[1, 2], widths=[[1]])", "one per part"),
        ("Shard(0, widths=[[1]])", "one list of integers per part"),
        ("Shard(0, copies=0)", "at least 1"),
        ("Shard(0, copies=[1, 1])", "expected one or 1"),
        ("Unique([])", "at least one"),
        ("Unique(-1)", "at least 0"),
        ("Flat(bounds=[1, 2])", "ascend from 0"),
        ("Flat(bounds=[0, 2, 1])", "ascend from 0"),
        ("Average(state=median)", "expected 'error', 'mean' or 'first'"),
        ("FlatBuffer(params=['a', 'a'])", "stands in it twice"),
        ("FlatBuffer(params=['a'], order=sorted)", "expected 'given'"),
        ("FlatBuffer(params=['a'], align=0)", "at least 1"),
        ("FlatBuffer(params=['a'], partition=each, align=2)", "no meaning"),
        ("FlatBuffer(params=[1])", "a list of parameter names"),
        ("Shard('0')", "an integer"),
        ("Shard(True)", "an integer"),
    ]:
        spec = LayoutSpec.from_dict({"ucp_spec": 1, "axes": ["tp"], "rules": [{"match": "a", "steps": [{"tp": text}]}]})
        with pytest.raises((SpecError, LayoutError), match=message):
            spec.rules[0].steps[0].resolve(lookup)
    for text, message in [
        ("Stack(0, index=4, size=4)", "less than size"),
        ("Stack(0, index=[1, 1])", "no element twice"),
        ("Permute([0, 2])", "each of 0 .. 1 once"),
        ("Pad(0, to=-1)", "at least 0"),
    ]:
        key = text.split("(")[0].lower()
        spec = LayoutSpec.from_dict({"ucp_spec": 1, "rules": [{"match": "a", "steps": [{key: text}]}]})
        with pytest.raises((SpecError, LayoutError), match=message):
            spec.rules[0].steps[0].resolve(lookup)


def test_variables() -> None:
    declared = LayoutSpec.parse(GOOD).variables
    assert check_variables(declared, {"vocab": 3, "qkv": [1, 2]}, "s") == {
        "vocab": 3, "first": 0, "qkv": (1, 2), "groups": (("a", "b"), ("c",)),
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"s: no value for vocab \(int\), qkv"):
        check_variables(declared, {}, "s")
    with pytest.raises(SpecError, match="unknown variable vocabulary; the spec declares vocab, first"):
        check_variables(declared, {"vocabulary": 3}, "s")
    with pytest.raises(SpecError, match=r"'qkv': found \[1, 'a'\] \(list\), expected list\[int\]"):
        check_variables(declared, {"vocab": 1, "qkv": [1, "a"]}, "s")


@pytest.mark.parametrize("name", ready_specs())
def test_ready_specs_are_clean_and_fit_the_schema(name: str) -> None:
    text = (resources.files("ucp_dcp") / "specs" / f"{name}.yaml").read_text("utf-8")
    spec = LayoutSpec.load(name)
    assert spec.name == name and spec.doc and lint(spec) == []
    jsonschema.validate(yaml.safe_load(text), SCHEMA)
    for variable in spec.variables.values():
        assert variable.doc, f"{name}: variable {variable.name} is not explained"


def test_the_example_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "language.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    spec = LayoutSpec.parse(example)
    jsonschema.validate(yaml.safe_load(example), SCHEMA)
    assert lint(spec) == []
    for name in ready_specs():
        assert f"`{name}`" in text
    for kind in SIGNATURES:
        assert f"{kind}(" in text, f"{kind} is not explained"


def test_ready_names() -> None:
    assert set(ready_specs()) >= {"replicate", "zero1", "zero3", "megatron-gpt"}


def test_schema_refuses_what_the_parser_refuses() -> None:
    """The two must not drift apart: of the bad texts above, the schema refuses every one whose fault is structure."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    structural = [
        "found 2, expected 1", "found None, expected 1", "key nmae", "word of the language", "found 'integer'", "found 'skalar'", "`drop`",
        "key mtach", "expected weight or buffer", "unknown pattern 'Slice'", "found 'Shard', expected a pattern", "Pad belongs to no axis",
        "found Shard, expected Pad", "found 2 keys", "found no rule", "no `rules`", "found 3, expected text",
    ]  # fmt: skip
    seen = 0
    for text, message in BAD:
        if any(part in message for part in structural):
            seen += 1
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(yaml.safe_load(text), SCHEMA)
    assert seen == len(structural)


def test_load_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert LayoutSpec.load(path).rules == LayoutSpec.parse(GOOD).rules
    with pytest.raises(SpecError, match=r"neither a ready spec .*replicate.* nor a readable file"):
        LayoutSpec.load("megatron-gtp")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="nor a readable file"):
        LayoutSpec.load(path)
    with pytest.raises(SpecError, match="nor a readable file"):
        LayoutSpec.load("../specs/replicate")


def test_a_spec_extends_a_ready_one() -> None:
    below = LayoutSpec.load("zero1")
    text = """
ucp_spec: 1
extends: zero1
axes: [ep, dp]
variables: {align: {type: int, default: 4}, experts: int}
optimizer: {states: {fp32: follow}}
rules:
  - match: expert_buffer
    steps: [{ep: "FlatBuffer(params=groups[0], pad_to=experts)"}]
"""
    spec = LayoutSpec.parse(text, source="mine.yaml")
    assert spec.axes == ("dp", "ep") and list(spec.variables) == [*below.variables, "experts"]
    assert spec.variables["align"].default == 4 and below.variables["align"].default == 1
    assert [r.match for r in spec.rules[:-1]] == [r.match for r in below.rules]
    assert [r.number for r in spec.rules] == list(range(1, len(below.rules) + 2))
    assert re.fullmatch(r"rule 1 \(match '\*\*', line \d+ of zero1.yaml\)", spec.rules[0].title)
    assert re.fullmatch(r"rule 4 \(match 'expert_buffer', line 8\)", spec.rules[-1].title)
    assert spec.states["fp32"].master is False and spec.states["step"].kind == "scalar"
    jsonschema.validate(yaml.safe_load(text), SCHEMA)
    for name in ("../zero1", "/etc/passwd", "zero2", "zero1.yaml"):  # a name, never a path
        with pytest.raises(SpecError, match=r"key extends: found .*, expected a ready spec: "):
            LayoutSpec.parse(text.replace("zero1", name))
    with pytest.raises(SpecError, match="cannot extend itself"):
        LayoutSpec.parse(text, source="zero1.yaml")
    with pytest.raises(SpecError, match=r"'dp' is an axis here or in zero1\.yaml"):
        LayoutSpec.parse("{ucp_spec: 1, extends: zero1, variables: {dp: int}, rules: []}")
