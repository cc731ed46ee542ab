"""The tables that Megatron-DeepSpeed and DeepSpeed's AutoTP store in a checkpoint (``universal_checkpoint_info``) -> a layout spec.

They are regular expressions over parameter names: which parameters are alike on all tensor-parallel ranks, cut by columns, made of parts,
averaged, or a vocabulary. DeepSpeed looks the tables up in one order when it merges (``checkpoint/ds_to_universal.py``,
``merge_tp_slices``); here that order is kept, and its answers for the names at hand become rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import SpecError, UnsupportedError
from .linear_regex import Budget, LinearRegex
from .names import NameGlob
from .parse import LayoutSpec

__all__ = ["from_universal_info"]

MAX_PATTERNS = 10_000
MAX_NAMES = 200_000
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_UNSUPPORTED = (
    ("autotp_unsupported_parameter_patterns", "DeepSpeed itself does not know how it is divided"),
    ("expert_parameter_patterns", "experts that DeepSpeed divided by itself are not supported yet"),
)


def from_universal_info(
    info: Mapping[str, Any], names: Iterable[str] | Mapping[str, Sequence[int]], *, tp: int | None = None
) -> LayoutSpec:
    """A spec with the axes ``pp, tp, dp``, ZeRO-1/2 flat buffers included (``flat_group_{g}``, variable ``groups``, as in ``zero1``).

    Pure: nothing is opened, and the patterns are matched in linear time, for a checkpoint may come from anywhere.

    Args:
        info: ``universal_checkpoint_info`` as it was stored.
        names: names of the parameters that the spec is for, local to a rank or of all ranks; with shapes the number of dims is checked.
        tp: size of the tensor-parallel axis of the job whose local shapes these are. Without it parameters of two halves
            (``parameter_with_2_sub_params_cat_dim_0``) take their sizes from the global shape, and a layout needs ``shapes=`` to save.

    Returns:
        Variables: ``vocab`` and ``padded_vocab`` with the stored sizes as defaults, if there is a vocabulary; ``groups``, ``align``,
        ``pad_multiple`` of the flat buffers.

    Raises:
        SpecError: a table that is not what DeepSpeed writes, or a pattern that is too long or not understood.
        UnsupportedError: a parameter that the tables call unsupported, or an expert.
    """
    tables = _Tables(info)
    shapes: Mapping[str, Sequence[int] | None] = names if isinstance(names, Mapping) else dict.fromkeys(names)
    if len(shapes) > MAX_NAMES:
        raise SpecError(f"universal_checkpoint_info: {len(shapes)} parameter names, expected at most {MAX_NAMES}")
    steps = {name: tables.steps(name, shape, tp) for name, shape in shapes.items()}
    vocabulary = any("pad" in step for own in steps.values() for step in own)
    variables: dict[str, Any] = {
        "groups": {"type": "list[params]", "default": [], "doc": "per flat buffer, the names of its parameters in order"},
        "align": {"type": "int", "default": 1, "doc": "each parameter starts at a multiple of so many elements"},
        "pad_multiple": {"type": "int", "default": 2, "doc": "a flat buffer is padded to a multiple of dp times this"},
    }
    if vocabulary:
        vocab, padded = tables.size("original_vocab_size"), tables.size("padded_vocab_size")
        if vocab > padded:
            raise SpecError(f"universal_checkpoint_info: original_vocab_size {vocab} is more than padded_vocab_size {padded}")
        variables["vocab"] = {"type": "int", "default": vocab, "doc": "rows of the vocabulary without padding"}
        variables["padded_vocab"] = {"type": "int", "default": padded, "doc": "rows of the vocabulary with padding"}
    buffers = {"match": "flat_group_{g}", "steps": [{"dp": "FlatBuffer(params=groups[g], align=align, pad_to=pad_multiple*dp.size)"}]}
    return LayoutSpec.from_dict(
        {
            "ucp_spec": 1,
            "name": "universal-info",
            "doc": "From the universal_checkpoint_info of a checkpoint.",
            "axes": ["pp", "tp", "dp"],
            "variables": variables,
            "optimizer": {"states": {"step": "scalar", "master": "master", "fp32": "master"}},
            "rules": [*({"match": glob, "steps": own} for glob, own in _rules(steps)), buffers],
        },
        source="universal_checkpoint_info",
    )


def _rules(steps: Mapping[str, list[dict[str, str]]]) -> list[tuple[str, list[dict[str, str]]]]:
    """Names that differ in numbers only, and are divided alike, share a rule; others have one each."""
    shared: dict[str, list[str]] = {}
    for name in steps:
        if not name or len(name) > 1000 or any(c in name for c in "*{}"):
            raise SpecError(f"universal_checkpoint_info: parameter name {name[:80]!r}, expected 1 to 1000 characters without * {{ }}")
        shared.setdefault(_NUMBER.sub("*", name), []).append(name)
    out: list[tuple[str, list[dict[str, str]]]] = []
    for glob, alike in shared.items():
        whole = glob.count("*") <= 8 and all(steps[name] == steps[alike[0]] for name in alike)
        # `*` is wider than a number: a name of another rule that it takes in (`layers.norm` beside `layers.0`) makes the rules overlap
        if whole and "*" in glob and _alone(glob, shared):
            out.append((glob, steps[alike[0]]))
        else:
            out += [(name, steps[name]) for name in alike]
    return out


def _alone(glob: str, others: Iterable[str]) -> bool:
    matcher = NameGlob(glob)
    return all(other == glob or matcher.match(other.replace("*", "0")) is None for other in others)


class _Tables:
    def __init__(self, info: Mapping[str, Any]) -> None:
        if not isinstance(info, Mapping):
            raise SpecError(f"universal_checkpoint_info is a {type(info).__name__}, expected a mapping")
        self.info = info
        self.count = 0
        self.budget = Budget()
        self.vocabulary = self.patterns("vocabulary_parameter_patterns")
        self.pipeline = self.patterns("pipeline_replicated_parameter_patterns")
        self.replicated = self.patterns("tp_replicated_parameter_patterns")
        self.averaged = self.patterns("parameter_to_average_patterns")
        self.rows = self.patterns("parameter_with_row_parallelism_patterns")
        self.halves = self.patterns("parameter_with_2_sub_params_cat_dim_0")
        self.refused = [(self.patterns(key), reason) for key, reason in _UNSUPPORTED]
        self.parts = [self.sub_params(entry) for entry in self.items("parameter_with_sub_params")]
        widths = info.get("sub_param_shard_widths") or {}
        if not isinstance(widths, Mapping):
            raise SpecError(f"universal_checkpoint_info: sub_param_shard_widths is a {type(widths).__name__}, expected a mapping")
        self.widths = [(self.pattern(key, "sub_param_shard_widths"), _rows(value)) for key, value in widths.items()]

    def items(self, key: str) -> Sequence[Any]:
        found = self.info.get(key) or ()
        if not isinstance(found, (list, tuple)):
            raise SpecError(f"universal_checkpoint_info: {key} is a {type(found).__name__}, expected a list")
        return found

    def patterns(self, key: str) -> list[LinearRegex]:
        return [self.pattern(item, key) for item in self.items(key)]

    def pattern(self, item: Any, key: str) -> LinearRegex:
        self.count += 1
        if not isinstance(item, str) or self.count > MAX_PATTERNS:
            raise SpecError(
                f"universal_checkpoint_info: {key}: found {str(item)[:60]!r}, expected at most {MAX_PATTERNS} patterns, all text"
            )
        try:
            return LinearRegex(item)
        except SpecError as error:
            raise SpecError(f"universal_checkpoint_info: {key}: {error}") from None

    def size(self, key: str) -> int:
        found = self.info.get(key)
        if type(found) is not int or found <= 0:
            raise SpecError(f"universal_checkpoint_info: {key} is {str(found)[:60]!r}, expected a number of rows: there is a vocabulary")
        return found

    def sub_params(self, entry: Any) -> tuple[list[LinearRegex], int, tuple[int, ...], int]:
        """(patterns, partition dim, sizes of the parts, number of dims)."""
        key = "parameter_with_sub_params"
        if not isinstance(entry, Mapping) or not all(k in entry for k in ("patterns", "shape", "partition_dim")):
            raise SpecError(f"universal_checkpoint_info: {key}: found {str(entry)[:60]!r}, expected patterns, shape and partition_dim")
        shape, dim, listed = entry["shape"], entry["partition_dim"], entry["patterns"]
        if (
            not isinstance(shape, (list, tuple))
            or type(dim) is not int
            or not 0 <= dim < len(shape)
            or not isinstance(listed, (list, tuple))
        ):
            raise SpecError(f"universal_checkpoint_info: {key}: partition_dim {dim!r} of shape {str(shape)[:60]} does not exist")
        sizes = shape[dim]
        parts = (sizes,) if type(sizes) is int else tuple(sizes) if isinstance(sizes, (list, tuple)) else ()
        if not parts or not all(type(n) is int and n > 0 for n in parts):
            raise SpecError(f"universal_checkpoint_info: {key}: parts of dim {dim} are {str(sizes)[:60]}, expected their sizes")
        return [self.pattern(item, key) for item in listed], dim, parts, len(shape)

    def any(self, patterns: Iterable[LinearRegex], name: str) -> bool:
        return any(p.match(name, self.budget) for p in patterns)

    def steps(self, name: str, shape: Sequence[int] | None, tp: int | None) -> list[dict[str, str]]:
        """How one parameter is divided. ``shape``: of its local tensor in a job of ``tp`` ranks."""
        ndim = None if shape is None else len(shape)
        for patterns, reason in self.refused:
            if self.any(patterns, name):
                raise UnsupportedError(f"universal_checkpoint_info: parameter {name!r}: {reason}")
        pipeline: list[dict[str, str]] = [] if self.any(self.pipeline, name) else [{"pp": "Unique(pp)"}]
        if self.any(self.replicated, name):
            return pipeline
        if self.any(self.averaged, name):
            return [*pipeline, {"tp": "Average(state=mean)"}]
        if self.any(self.halves, name):
            if shape and tp is not None:
                half = int(shape[0]) * tp // 2
                return [*pipeline, {"tp": f"Shard(0, parts=[{half}, {half}])"}]
            return [*pipeline, {"tp": "Shard(0, parts=[shape[0] // 2, shape[0] // 2])"}]
        for patterns, dim, parts, dims in self.parts:
            if self.any(patterns, name):
                if ndim is not None and ndim != dims:
                    raise UnsupportedError(
                        f"universal_checkpoint_info: parameter {name!r} has {ndim} dims and is viewed with {dims} to cut it; not supported"
                    )
                rows = next((rows for pattern, rows in self.widths if pattern.match(name, self.budget)), None)
                if rows is not None and [sum(row) for row in rows] != list(parts):
                    raise SpecError(f"universal_checkpoint_info: sub_param_shard_widths of {name!r}: {rows} for parts of {parts}")
                widths = f", widths={[list(r) for r in rows]}" if rows is not None else ""
                return [*pipeline, {"tp": f"Shard({dim}, parts={list(parts)}{widths})"}]
        if self.any(self.rows, name):
            return [*pipeline, {"tp": "Shard(1)"}]
        if self.any(self.vocabulary, name):
            return [*pipeline, {"pad": "Pad(0, to=padded_vocab, size=vocab)"}, {"tp": "Shard(0)"}]
        return [*pipeline, {"tp": "Shard(0)"}]


def _rows(value: Any) -> tuple[tuple[int, ...], ...]:
    rows = (
        tuple(tuple(row) for row in value) if isinstance(value, (list, tuple)) and all(isinstance(r, (list, tuple)) for r in value) else ()
    )
    if not rows or not all(type(n) is int and n >= 0 for row in rows for n in row):
        raise SpecError(f"universal_checkpoint_info: sub_param_shard_widths: found {str(value)[:60]}, expected a list of widths per part")
    return rows
