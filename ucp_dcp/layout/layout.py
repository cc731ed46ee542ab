"""A spec with one rank's coordinates: which rule a name follows, and what the rank holds of its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError, SpecError
from ..spec import LayoutSpec, Rule, StateSpec, Step, check_variables
from ..spec.expr import Value
from ..spec.names import Match, distance
from .mapping import AxisStep, infer_global_shape

if TYPE_CHECKING:
    from .fragment import Fragment

__all__ = ["Bound", "Layout", "check_roots"]

_NO_STATE = StateSpec()


@dataclass(frozen=True, slots=True)
class Bound:
    """A rule bound to one name: its global fqn and its resolved steps."""

    rule: Rule
    name: str
    fqn: str
    steps: tuple[AxisStep, ...]

    @property
    def pattern(self) -> str:
        """The steps, for people."""
        return ", ".join(map(str, self.steps))


class Layout:
    """How one rank divides its state dict: a spec, the rank's coordinate on every axis, and the values of the spec's variables.

    Plain data: it pickles, and holds no tensor, group or file.

    Args:
        spec: a LayoutSpec, or what ``LayoutSpec.load`` takes (the name of a ready spec, a path).
        coords: axis -> (coordinate, size). Every axis that the spec declares; further ones are implied Replicate.
        roots: path of a part of the state dict -> ``"model"`` or ``"optimizer"``; ``""`` is the whole state dict.
        variables: values of the spec's variables. They may differ between ranks (a pipeline stage's first layer).
        shapes: fqn -> global logical shape, where it is known. A tensor that is flattened needs it here, from its parameter in the same
            state dict, or (at load) from the checkpoint.
        root_variables: root path -> variables that differ there (the layer offset of each virtual pipeline chunk).

    Raises:
        SpecError: a variable is unknown, missing or of a wrong type. LayoutError: axes, coordinates, roots or shapes are not valid.
    """

    def __init__(
        self,
        spec: LayoutSpec | str,
        coords: Mapping[str, tuple[int, int]] | None = None,
        roots: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        root_variables: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.spec = spec if isinstance(spec, LayoutSpec) else LayoutSpec.load(spec)
        self.coords = _checked_coords(self.spec, coords or {})
        self.roots = check_roots({"model": "model", "optimizer": "optimizer"} if roots is None else roots)
        given = dict(variables or {})
        self.variables = check_variables(self.spec.variables, given, self.spec.source)
        self.root_variables: dict[str, dict[str, Value]] = {}
        for root, values in (root_variables or {}).items():
            if root not in self.roots:
                raise LayoutError(f"root_variables: {root!r} is no root; roots are {', '.join(self.roots)}")
            self.root_variables[root] = check_variables(self.spec.variables, {**given, **values}, self.spec.source)
        self.shapes = {fqn: _checked_shape(fqn, shape) for fqn, shape in (shapes or {}).items()}
        self._candidates: dict[str, list[tuple[Rule, Match]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_candidates": {}}

    def __repr__(self) -> str:
        coords = ", ".join(f"{axis}={k}/{n}" for axis, (k, n) in self.coords.items())
        return f"Layout({self.spec.name}: {coords}; roots {', '.join(f'{path}={kind}' for path, kind in self.roots.items())})"

    def state_spec(self, state: str) -> StateSpec:
        """How this optimizer state differs from its parameter."""
        return self.spec.states.get(state, _NO_STATE)

    def fragments(self, state_dict: Mapping[str, Any]) -> list[Fragment]:
        """The fragments of a state dict under this layout (``collect``). Raises LayoutError, PlanError."""
        from .collect import collect

        return collect(state_dict, layout=self).fragments

    def describe(self, name: str, root: str | None = None) -> str:
        """How the tensor with this local name is divided, such as ``pp: Unique(0), tp: Shard(0)``. Raises LayoutError without a rule."""
        root = root if root is not None else self.model_root()
        return self.bind(root, name, shape_of=self.shapes.get, local_shape=None).pattern or "Replicate()"

    def model_root(self) -> str:
        """The first root of kind model; ``""`` if there is none."""
        return next((path for path, kind in self.roots.items() if kind == "model"), "")

    def split_root(self, name: str) -> tuple[str, str]:
        """(root, name below it) of a parameter named by a flat buffer: with several model roots it may start with its root."""
        models = [path for path, kind in self.roots.items() if kind == "model"]
        for path in models if len(models) > 1 else ():
            if name.startswith(path + "."):
                return path, name[len(path) + 1 :]
        return (models[0] if models else ""), name

    def candidates(self, name: str) -> list[tuple[Rule, Match]]:
        """The rules whose glob matches a name, conditions aside."""
        found = self._candidates.get(name)
        if found is None:
            found = [(rule, match) for rule in self.spec.rules if (match := rule.match_name(name)) is not None]
            self._candidates[name] = found
        return found

    def bind(
        self,
        root: str,
        name: str,
        *,
        shape_of: Callable[[str], tuple[int, ...] | None],
        local_shape: tuple[int, ...] | None,
        optional: bool = False,
    ) -> Bound:
        """The one rule that a name below ``root`` follows, resolved.

        Args:
            shape_of: global shape of an fqn where known, for conditions and steps that read ``shape`` or ``ndim``.
            local_shape: shape of the local tensor, from which a missing global shape may be inferred.
            optional: with True a name that no rule matches is bound to no steps under its own name.

        Raises:
            LayoutError: no rule or several match (naming them and the nearest), or a condition cannot be decided.
        """
        found: list[Bound] = []
        candidates = self.candidates(name)
        for rule, match in candidates:
            bound = self._bind_rule(root, rule, match, name, shape_of, local_shape)
            if bound is not None:
                found.append(bound)
        if len(found) == 1:
            return found[0]
        if not found and optional:
            return Bound(Rule(0, self.spec.rules[0].match), name, name, ())
        where = f"{self.spec.source}: tensor {name!r}"
        if found:
            raise LayoutError(f"{where} matches {_titles(b.rule for b in found)}; rules must be disjoint: narrow them, or add `when:`")
        if candidates:
            raise LayoutError(f"{where} matches only rules whose `when:` is false: {_titles(r for r, _ in candidates)}")
        nearest = min(self.spec.rules, key=lambda rule: distance(rule.match.text, name))
        raise LayoutError(
            f"{where} matches no rule; nearest is {nearest.title}. Add a rule, or take the tensor out of the roots "
            f"({', '.join(self.roots)})"
        )

    def _bind_rule(
        self,
        root: str,
        rule: Rule,
        match: Match,
        name: str,
        shape_of: Callable[[str], tuple[int, ...] | None],
        local_shape: tuple[int, ...] | None,
    ) -> Bound | None:
        variables = self.root_variables.get(root, self.variables)

        def plain(key: str) -> Value:
            if key == "name":
                return name
            if key in match.captures:
                return match.captures[key]
            if key in variables:
                return variables[key]
            axis, _, what = key.partition(".")
            if axis in self.coords:
                return self.coords[axis][1 if what else 0]
            raise SpecError(f"{rule.title}: {key!r} is not known here")

        try:
            fqn = rule.rename.fill(match.wildcards, plain) if rule.rename is not None else name
            steps: tuple[AxisStep, ...] | None = None

            def lookup(key: str) -> Value:
                if key not in ("shape", "ndim"):
                    return plain(key)
                shape = shape_of(fqn)
                if shape is None and local_shape is not None and not any({"shape", "ndim"} & step.names for step in rule.steps):
                    shape = infer_global_shape(local_shape, resolve_steps(rule.steps, plain), self.coords)
                if shape is None:
                    raise LayoutError(f"`{key}` is read, and the global shape of {fqn!r} is not known; give it in shapes=")
                return len(shape) if key == "ndim" else shape

            if rule.when is not None and not rule.when.evaluate(lookup):
                return None
            steps = resolve_steps(rule.steps, lookup)
        except (LayoutError, SpecError) as error:
            raise type(error)(f"{self.spec.source}: tensor {name!r}, {rule.title}: {error}") from None
        return Bound(rule, name, fqn, steps)

    def plain_lookup(self, root: str) -> Callable[[str], Value]:
        """Names that hold for every tensor below a root: variables, coordinates and sizes."""
        variables = self.root_variables.get(root, self.variables)

        def lookup(key: str) -> Value:
            if key in variables:
                return variables[key]
            axis, _, what = key.partition(".")
            return self.coords[axis][1 if what else 0]

        return lookup


def resolve_steps(steps: Sequence[Step], lookup: Callable[[str], Value]) -> tuple[AxisStep, ...]:
    """Steps with their numbers. Raises SpecError, LayoutError naming the step."""
    out = []
    for step in steps:
        try:
            out.append(AxisStep(step.axis, step.resolve(lookup)))
        except LayoutError as error:
            raise LayoutError(str(error) if str(error).startswith(str(step)) else f"{step}: {error}") from None
    return tuple(out)


def _titles(rules: Iterable[Rule]) -> str:
    return ", ".join(rule.title for rule in rules)


def check_roots(roots: Mapping[str, str]) -> dict[str, str]:
    """Root path -> kind. Raises LayoutError for another kind or a path that is not text."""
    for path, kind in roots.items():
        if not isinstance(path, str) or kind not in ("model", "optimizer"):
            raise LayoutError(f"roots: found {path!r}: {kind!r}, expected a path in the state dict and 'model' or 'optimizer'")
    return dict(roots)


def _checked_coords(spec: LayoutSpec, coords: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    for axis, pair in coords.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(v) is int for v in pair):
            raise LayoutError(f"coords: axis {axis!r}: found {pair!r}, expected (coordinate, size)")
        k, n = pair
        if not 0 <= k < n:
            raise LayoutError(f"coords: axis {axis!r}: found coordinate {k} of {n}, expected 0 .. {n - 1}")
        if axis in spec.variables:
            raise LayoutError(f"coords: {axis!r} is a variable of the spec, not an axis")
        out[axis] = (k, n)
    missing = [axis for axis in spec.axes if axis not in out]
    if missing:
        raise LayoutError(
            f"coords: no coordinate for {', '.join(missing)}, declared by {spec.source}; give (0, 1) for an axis that is not used"
        )
    return out


def _checked_shape(fqn: str, shape: Sequence[int]) -> tuple[int, ...]:
    out = tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in out):
        raise LayoutError(f"shapes: {fqn!r}: found {out}, expected sizes from 0")
    return tuple(int(n) for n in out)
