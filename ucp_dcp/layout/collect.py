"""A state dict -> fragments, padding and objects of this rank (design decision D11).

Plain tensors below a root of the layout follow exactly one rule each. Tensors that bring their own geometry keep it and take only their
names from the layout. Everything outside the roots is as in DCP: plain tensors are whole and alike on all ranks, other values are objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..errors import LayoutError
from ..geometry import Box, full_box
from ..names import Role
from ..patterns import FlatBuffer, Replicate, Unique
from ..spec import StateSpec
from . import views
from .dtensor import OwnGeometry, is_distributed, is_own_class, own_geometry, world_size
from .flat_buffer import BufferPlan, Param, plan_buffer
from .flatten import Leaf, dotted, flatten, visit
from .fragment import Collected, Fragment, ObjectLeaf, Padding, Path
from .layout import Bound, Layout, check_roots, resolve_steps
from .local_names import LocalNames
from .mapping import Applied, AxisStep, Piece, apply_steps, infer_global_shape
from .memory import check_memory

__all__ = ["Shapes", "collect"]

Shapes: TypeAlias = Callable[[Role, str, str], "Sequence[int] | None"]
"""(role, fqn, state) -> global logical shape, or None where it is not known."""


def collect(
    state_dict: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    roots: Mapping[str, str] | None = None,
    shapes: Shapes | None = None,
) -> Collected:
    """Everything this rank holds.

    Args:
        state_dict: nested as DCP takes it.
        layout: divides the plain tensors below its roots.
        roots: root path -> ``"model"`` | ``"optimizer"``; default: the layout's, or none. Without a layout they give names and roles only.
        shapes: global shapes known from elsewhere (a checkpoint that is being loaded).

    Returns:
        Views of the state dict's own memory; nothing is copied, nothing is changed.

    Raises:
        LayoutError: a tensor fits no rule or several, has another shape than its rule says, or is where it must not be.
        PlanError: two values with one key. UnsupportedError: a sparse or otherwise unstrided tensor.
    """
    where = check_roots(roots) if roots is not None else layout.roots if layout is not None else {}
    if layout is None and not where and (plain := _all_plain(state_dict)) is not None:
        return plain
    collector = _Collector(layout, where, shapes)
    leaves = [_Placed(leaf, *collector.root_of(leaf.path)) for leaf in flatten(state_dict)]
    collector.names.learn(
        (dotted(p.rest) for p in leaves if collector.kind(p) == "model"),
        (str(p.rest[1]) for p in leaves if collector.kind(p) == "optimizer" and len(p.rest) >= 3 and p.rest[0] == "state"),
    )
    tensors = [placed for placed in leaves if isinstance(placed.leaf.value, torch.Tensor) and not placed.leaf.per_rank]
    if layout is not None and tensors and layout.roots and all(p.root is None for p in leaves):
        raise LayoutError(
            f"none of the layout's roots ({', '.join(layout.roots)}) is in the state dict, which has {', '.join(map(str, state_dict))}; "
            "give roots={...}"
        )
    # Shapes flow: tensors with own geometry and parameters first, then optimizer state, then buffers of many parameters.
    stages: list[list[_Placed]] = [[], [], [], []]
    for placed in tensors:
        stages[collector.stage(placed)].append(placed)
    for stage in stages:
        for placed in stage:
            collector.tensor(placed)
    for placed in leaves:
        if not isinstance(placed.leaf.value, torch.Tensor) or placed.leaf.per_rank:
            collector.object(placed)
    return collector.finish(leaves)


def _all_plain(state_dict: Mapping[str, Any]) -> Collected | None:
    """What :func:`collect` finds where nothing has a role and every tensor is a plain one, with few objects on the way; else None.

    Ten thousand small tensors are not rare, and as many thousand objects make Python look for garbage, which costs more than they do.
    """
    out = Collected()
    boxes: dict[tuple[int, ...], Box] = {}
    others = False

    def emit(key: str, path: Path, value: Any, per_rank: bool) -> None:
        nonlocal others
        if not isinstance(value, torch.Tensor) or per_rank:
            out.objects.append(ObjectLeaf(key, path, value, per_rank, path))
        elif is_own_class(value) and value.layout is torch.strided and not is_distributed(value):
            shape = tuple(value.shape)
            box = boxes.get(shape)
            if box is None:
                box = boxes[shape] = full_box(shape)
            out.fragments.append(Fragment(key, path, Role.PLAIN, "", "", box.size, box, value.detach(), True))
        else:
            others = True
        out.paths[key] = path

    visit(state_dict, emit)
    return None if others or len(out.paths) < len(out.fragments) + len(out.objects) else out


@dataclass(slots=True)
class _Placed:
    """A leaf, the root it is below (None: no root), and its path below that root."""

    leaf: Leaf
    root: str | None
    rest: Path
    fragments: list[Fragment] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    obj: ObjectLeaf | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class _Names:
    """What a leaf is: its role, local name and state, and the paths before and behind the name."""

    role: Role
    name: str
    state: str
    head: Path
    tail: Path


@dataclass(slots=True)
class _Divided:
    """A parameter whose tensor is divided by its own geometry."""

    shape: tuple[int, ...]
    cut: bool


class _Collector:
    def __init__(self, layout: Layout | None, roots: Mapping[str, str], shapes: Shapes | None) -> None:
        self.layout = layout
        self.roots = roots
        self.shapes = shapes
        self.names = LocalNames(described=layout is not None)
        self.found: dict[Path, tuple[str | None, int]] = {}
        self.boxes: dict[tuple[int, ...], Box] = {}
        self.learned: dict[str, tuple[int, ...]] = {}
        self.own: dict[str, _Divided] = {}
        self.own_names: set[str] = set()
        self.mapped: dict[tuple[tuple[AxisStep, ...], tuple[int, ...]], tuple[Applied, list[Piece]]] = {}
        self.buffers: dict[tuple[str, str], BufferPlan] = {}
        self.bindings: dict[tuple[str, str, tuple[int, ...] | None], Bound] = {}
        self.by_shape = {rule.number for rule in layout.spec.rules if rule.reads_shape} if layout is not None else set()
        world = math.prod(n for _, n in layout.coords.values()) if layout is not None else 1
        # Ranks that no axis of the layout tells apart hold the same as this one, as far as we know.
        self.beyond = layout is not None and world < world_size()

    # -- where a leaf stands

    def root_of(self, path: Path) -> tuple[str | None, Path]:
        above = path[:-1]
        found = self.found.get(above)  # the same for all that lies in one container
        if found is None:
            found = (None, 0)
            for k in range(len(above), -1, -1):
                head = dotted(path[:k])
                if head in self.roots and (k or head == ""):
                    found = (head, k)
                    break
            self.found[above] = found
        return found[0], path[found[1] :]

    def kind(self, placed: _Placed) -> str:
        """``"model"``, ``"optimizer"``, or "" outside the roots."""
        return "" if placed.root is None else self.roots[placed.root]

    def names_of(self, placed: _Placed) -> _Names | None:
        """What the leaf is; None for one that is no parameter and no state."""
        if placed.root is None:
            return None
        head = placed.leaf.path[: len(placed.leaf.path) - len(placed.rest)]
        if self.roots[placed.root] == "model":
            return _Names(Role.WEIGHT, self.names.of_weight(dotted(placed.rest)), "", head, ())
        if len(placed.rest) >= 3 and placed.rest[0] == "state":
            name = self.names.of_state(str(placed.rest[1]), placed.leaf.key)
            return _Names(Role.STATE, name, dotted(placed.rest[2:]), (*head, "state"), placed.rest[2:])
        flat = self.names.of_flattened(str(placed.rest[0])) if len(placed.rest) == 1 else None
        if flat is not None:
            return _Names(Role.STATE, flat[0], flat[1], (*head, "state"), (flat[1],))
        return None

    def stage(self, placed: _Placed) -> int:
        placed.own = is_distributed(placed.leaf.value)
        if placed.own:
            return 0
        names = self.names_of(placed)
        if self.layout is None or names is None:
            return 1 if names is None or names.role == Role.WEIGHT else 2
        if any(rule.is_buffer_of_many for rule, _ in self.layout.candidates(names.name)):
            return 3
        return 1 if names.role == Role.WEIGHT else 2

    def shape_of(self, role: Role, fqn: str, state: str) -> tuple[int, ...] | None:
        """Global shape where known: given, then (for state) the parameter's, then the caller's, then the parameter's as inferred."""
        if self.layout is not None and fqn in self.layout.shapes:
            return self.layout.shapes[fqn]
        if role in (Role.STATE, Role.MASTER) and fqn in self.learned:
            return self.learned[fqn]
        if self.shapes is not None:
            known = self.shapes(role, fqn, state)
            if known is None and role in (Role.STATE, Role.MASTER):
                known = self.shapes(Role.WEIGHT, fqn, "")
            if known is not None:
                return tuple(int(n) for n in known)
        return self.learned.get(fqn)

    def bind(self, names: _Names, root: str, local_shape: tuple[int, ...] | None, optional: bool = False) -> Bound:
        assert self.layout is not None
        # Most rules do not look at shapes: one binding serves the parameter and all of its states.
        by_shape = any(rule.number in self.by_shape for rule, _ in self.layout.candidates(names.name))
        own_values = root if root in self.layout.root_variables else ""
        key = (own_values, names.name, local_shape if by_shape else None)
        bound = self.bindings.get(key)
        if bound is None:
            bound = self.layout.bind(
                root,
                names.name,
                shape_of=lambda fqn: self.shape_of(names.role, fqn, names.state),
                local_shape=local_shape if names.role == Role.WEIGHT else None,
                optional=optional,
            )
            if bound.rule.number:
                self.bindings[key] = bound
        return bound

    # -- tensors

    def tensor(self, placed: _Placed) -> None:
        value = placed.leaf.value
        names = self.names_of(placed)
        if placed.own:
            self.distributed(placed, names)
            return
        check_memory(placed.leaf.key, value)
        if self.layout is not None and placed.root is not None:
            if names is None:
                if placed.rest[0] != "param_groups":
                    raise LayoutError(
                        f"{placed.leaf.key}: a tensor below optimizer root {placed.root!r} at {list(placed.rest)}, expected "
                        "('state', <parameter>, <state>): pass the optimizer's state nested by parameter name"
                    )
            else:
                self.ruled(placed, names, placed.root)
                return
        self.whole(placed, names)

    def whole_box(self, shape: tuple[int, ...]) -> Box:
        box = self.boxes.get(shape)
        if box is None:
            box = self.boxes[shape] = full_box(shape)
        return box

    def whole(self, placed: _Placed, names: _Names | None) -> None:
        """A plain tensor that no rule divides."""
        value: torch.Tensor = placed.leaf.value
        shape = tuple(value.shape)
        role, fqn, state = (names.role, names.name, names.state) if names is not None else (Role.PLAIN, "", "")
        divided = self.own.get(fqn) if role == Role.STATE else None
        if divided is not None and divided.cut and value.numel() > 1 and shape != divided.shape and len(shape) == len(divided.shape):
            raise LayoutError(
                f"{placed.leaf.key}: found a plain tensor of shape {shape}, while its parameter of global shape {divided.shape} is "
                "divided over ranks; its local shard would be saved as the whole: keep the state as a DTensor, or describe it with a layout"
            )
        if role == Role.WEIGHT:
            self.learned.setdefault(fqn, shape)
        placed.fragments.append(
            Fragment(placed.leaf.key, placed.leaf.path, role, fqn, state, shape, self.whole_box(shape), value.detach(), replicated=True)
        )

    def distributed(self, placed: _Placed, names: _Names | None) -> None:
        key, value = placed.leaf.key, placed.leaf.value
        geometry = own_geometry(key, value)
        path, role, fqn, state = placed.leaf.path, Role.PLAIN, "", ""
        if names is not None and placed.root is not None:
            role, fqn, state = names.role, names.name, names.state
            self.own_names.add(names.name)
            if self.layout is not None:
                bound = self.layout.bind(placed.root, names.name, shape_of=lambda _: geometry.shape, local_shape=None, optional=True)
                self.check_own(key, bound)
                role, state = self.role_of(names, bound)
                fqn = bound.fqn
                key, path = self.renamed(placed, names, fqn)
            if names.role == Role.WEIGHT:
                self.learned.setdefault(fqn, geometry.shape)
                self.own[fqn] = _Divided(geometry.shape, geometry.cut)
        self.emit_own(placed, geometry, key, path, role, fqn, state)

    def emit_own(self, placed: _Placed, geometry: OwnGeometry, key: str, path: Path, role: Role, fqn: str, state: str) -> None:
        for box, view in geometry.shards:
            placed.fragments.append(
                Fragment(key, path, role, fqn, state, geometry.shape, box, view, geometry.replicated, pattern=geometry.pattern)
            )

    def check_own(self, key: str, bound: Bound) -> None:
        assert self.layout is not None
        for step in bound.steps:
            if not isinstance(step.pattern, (Replicate, Unique)):
                raise LayoutError(
                    f"{key}: {bound.rule.title} divides it by `{step}`, but the tensor brings its own geometry (a DTensor or sharded "
                    "tensor); give it a rule without sharding steps, or none"
                )
            if isinstance(step.pattern, Unique) and step.axis is not None and self.layout.coords[step.axis][0] not in step.pattern.at:
                here = self.layout.coords[step.axis][0]
                raise LayoutError(f"{key}: {bound.rule.title} says `{step}`, and this rank is at {step.axis}={here}")

    def role_of(self, names: _Names, bound: Bound) -> tuple[Role, str]:
        assert self.layout is not None
        if names.role == Role.WEIGHT:
            return (Role.BUFFER if bound.rule.role == "buffer" else Role.WEIGHT), ""
        if self.layout.state_spec(names.state).master:
            return Role.MASTER, ""
        return Role.STATE, names.state

    def renamed(self, placed: _Placed, names: _Names, fqn: str) -> tuple[str, Path]:
        """Key and path in the checkpoint: those of the state dict where the name is the global one already."""
        if fqn == names.name:
            return placed.leaf.key, placed.leaf.path
        path = (*names.head, fqn, *names.tail)
        return dotted(path), path

    def ruled(self, placed: _Placed, names: _Names, root: str) -> None:
        """A plain tensor below a root of the layout."""
        assert self.layout is not None
        local: torch.Tensor = placed.leaf.value
        spec = self.layout.state_spec(names.state) if names.role == Role.STATE else StateSpec()
        own_param = names.name in self.own_names and local.numel() == 1
        bound = self.bind(names, root, tuple(local.shape), optional=own_param)
        if bound.rule.is_buffer_of_many:
            self.buffer(placed, names, root, bound, spec)
            return
        role, state = self.role_of(names, bound)
        key, path = self.renamed(placed, names, bound.fqn)
        try:
            steps, shape = self.divided(names, bound, spec, local, root)
            cached = self.mapped.get((steps, shape))
            if cached is None:
                applied = apply_steps(shape, steps, self.layout.coords)
                cached = self.mapped[(steps, shape)] = (applied, applied.pieces())
            applied, pieces = cached
            self.check_held(applied, bound)
            pieces = views.fit(applied, pieces, local)
            average, writes = views.average(applied, names.state, spec)
        except LayoutError as error:
            raise LayoutError(f"{placed.leaf.key}: {bound.rule.title}: {error}") from None
        if role in (Role.WEIGHT, Role.BUFFER):
            self.learned.setdefault(bound.fqn, shape)
        pattern = ", ".join(map(str, steps))
        replicated = applied.replicated or self.beyond
        like = Fragment(key, path, role, bound.fqn, state, shape, full_box(()), local, replicated, average, pattern, writes)
        self.emit(placed, like, pieces)

    def check_held(self, applied: Applied, bound: Bound) -> None:
        assert self.layout is not None
        if not applied.held:
            uniques = [s for s in bound.steps if isinstance(s.pattern, Unique) and s.axis is not None]
            here = ", ".join(f"{s.axis}={self.layout.coords[s.axis][0]}" for s in uniques if s.axis is not None)
            said = ", ".join(map(str, uniques))
            raise LayoutError(
                f"the tensor is here at {here}, and the rule says `{said}`: it must not be in this rank's state dict, or the rule is wrong"
            )

    def divided(
        self, names: _Names, bound: Bound, spec: StateSpec, local: torch.Tensor, root: str
    ) -> tuple[tuple[AxisStep, ...], tuple[int, ...]]:
        """Steps and global shape of a parameter or of a state of it."""
        assert self.layout is not None
        local_shape = tuple(local.shape)
        if names.role == Role.WEIGHT or spec.kind == "follow":
            role, state = self.role_of(names, bound)
            known = self.shape_of(role, bound.fqn, state)
            if known is None:
                known = infer_global_shape(local_shape, bound.steps, self.layout.coords)
            return bound.steps, known
        whole = tuple(s for s in bound.steps if isinstance(s.pattern, Unique))
        if spec.kind == "scalar":
            if local.numel() != 1 or local.dim() > 1:
                raise LayoutError(f"state {names.state!r} is declared scalar, found shape {local_shape}, expected () or (1,)")
            return whole, local_shape
        if spec.kind == "replicated":
            return whole, local_shape
        if spec.kind == "steps":
            steps = (*whole, *resolve_steps(spec.steps, self.layout.plain_lookup(root)))
            stored = None if self.shapes is None else self.shapes(self.role_of(names, bound)[0], bound.fqn, names.state)
            return steps, tuple(stored) if stored is not None else infer_global_shape(local_shape, steps, self.layout.coords)
        param = self.shape_of(Role.WEIGHT, bound.fqn, "")
        ndim = len(param) if param is not None else len(local_shape) + 1
        if not -ndim <= spec.drop < ndim:
            raise LayoutError(f"state {names.state!r}: the parameter has {ndim} dims, `drop: {spec.drop}` does not exist")
        steps = views.factored(bound.steps, spec.drop % ndim, ndim, names.state)
        if param is None:
            return steps, infer_global_shape(local_shape, steps, self.layout.coords)
        return steps, param[: spec.drop % ndim] + param[spec.drop % ndim + 1 :]

    def emit(self, placed: _Placed, like: Fragment, pieces: Sequence[Piece]) -> None:
        """Fragments as ``like`` (whose view is the local tensor), one per piece, and padding."""
        local = like.view.detach()
        real = False
        for piece in pieces:
            view = views.view(local, piece)
            if piece.box is None:
                placed.padding.append(Padding(placed.leaf.key, view))
                continue
            real = True
            placed.fragments.append(views.at_box(like, piece.box, view))
        if not real and like.shape:
            # The rank knows the tensor though it holds none of it: its key is wanted by a load, and a tensor without elements is saved.
            n = len(like.shape)
            placed.fragments.append(views.at_box(like, Box(like.shape, (0,) * n), local.as_strided((0,) * n, (1,) * n)))

    # -- buffers of many parameters

    def buffer(self, placed: _Placed, names: _Names, root: str, bound: Bound, spec: StateSpec) -> None:
        assert self.layout is not None
        local: torch.Tensor = placed.leaf.value
        step = bound.steps[0]
        pattern = step.pattern
        if not isinstance(pattern, FlatBuffer) or step.axis is None:
            raise LayoutError(f"{placed.leaf.key}: {bound.rule.title}: FlatBuffer must be the only step of its rule")
        role, state = self.role_of(names, bound)
        try:
            plan = self.buffers.get((root, names.name))
            if plan is None:
                k, n = self.layout.coords[step.axis]
                plan = plan_buffer(pattern, k, n, lambda name: self.param(name, step.axis or "", names))
                self.buffers[(root, names.name)] = plan
            scalar = names.role == Role.STATE and spec.kind == "scalar"
            if spec.kind in ("factored", "steps", "replicated"):
                raise LayoutError(f"state {names.state!r} is {spec.kind}; a flat buffer can hold follow, master and scalar ones only")
            if scalar and (local.numel() != 1 or local.dim() > 1):
                raise LayoutError(f"state {names.state!r} is declared scalar, found shape {tuple(local.shape)}, expected () or (1,)")
            padding = () if scalar else views.fit_buffer(plan, local)
        except LayoutError as error:
            raise LayoutError(f"{placed.leaf.key}: {bound.rule.title}: {error}") from None
        for part in plan.parts:
            applied = part.param.applied
            path = (*names.head, part.param.fqn, *names.tail)
            text = ", ".join(filter(None, (part.param.pattern, str(step))))
            if scalar:
                # One value for all parameters of the buffer: each of them has it, so that a layout by parameter finds it.
                shape, where = tuple(local.shape), full_box(tuple(local.shape))
                placed.fragments.append(
                    Fragment(dotted(path), path, role, part.param.fqn, state, shape, where, local.detach(), replicated=True, pattern=text)
                )
                continue
            # A partition of padding only must still know that it belongs to something: it is the last parameter's.
            alone = part is plan.parts[-1] and not placed.fragments
            if not part.pieces and 0 not in applied.global_shape and not alone:
                continue
            average, writes = views.average(applied, names.state, spec)
            replicated = applied.replicated or self.beyond
            shape = applied.global_shape
            like = Fragment(dotted(path), path, role, part.param.fqn, state, shape, full_box(()), local, replicated, average, text, writes)
            self.emit(placed, like, part.pieces)
        for piece in padding:
            placed.padding.append(Padding(placed.leaf.key, views.view(local.detach(), piece)))

    def param(self, name: str, axis: str, buffer: _Names) -> Param:
        """A parameter of a flat buffer, by its name below the model root."""
        assert self.layout is not None
        root, name = self.layout.split_root(name)
        bound = self.layout.bind(root, name, shape_of=lambda fqn: self.shape_of(Role.WEIGHT, fqn, ""), local_shape=None)
        shape = self.shape_of(Role.WEIGHT, bound.fqn, "")
        if shape is None and self.shapes is not None:
            role, state = self.role_of(buffer, bound)
            found = self.shapes(role, bound.fqn, state)
            shape = tuple(found) if found is not None else None
        if shape is None:
            raise LayoutError(
                f"the global shape of parameter {name!r} is not known: give it in shapes=, or have the parameter in a model root of the "
                "same state dict"
            )
        try:
            applied = apply_steps(shape, bound.steps, self.layout.coords, without_axis=axis)
            self.check_held(applied, bound)
        except LayoutError as error:
            raise LayoutError(f"parameter {name!r} ({bound.rule.title}): {error}") from None
        text = ", ".join(str(s) for s in bound.steps if s.axis != axis)
        return Param(bound.fqn, applied, text)

    # -- objects, and the end

    def object(self, placed: _Placed) -> None:
        leaf = placed.leaf
        key, path = leaf.key, leaf.path
        names = self.names_of(placed)
        if self.layout is not None and names is not None and placed.root is not None:
            # An object has no shape and need not follow a rule, but its name must be global: pipeline stages would overwrite each other.
            bound = self.object_rule(names, placed.root)
            if bound is not None:
                key, path = self.renamed(placed, names, bound.fqn)
        group = self.names.group_field(placed.root, placed.rest) if placed.root and self.kind(placed) == "optimizer" else None
        placed.obj = ObjectLeaf(key, path, leaf.value, leaf.per_rank, leaf.path, group)

    def object_rule(self, names: _Names, root: str) -> Bound | None:
        assert self.layout is not None
        rules = [rule for rule, _ in self.layout.candidates(names.name)]
        if all(rule.rename is None for rule in rules) or any(rule.number in self.by_shape for rule in rules):
            return None  # nothing to rename, or a rule about shapes, which an object has not
        return self.layout.bind(root, names.name, shape_of=lambda _: None, local_shape=None, optional=True)

    def finish(self, leaves: Sequence[_Placed]) -> Collected:
        out = Collected()
        owner: dict[str, list[_Placed]] = {}
        for placed in leaves:
            for fragment in placed.fragments:
                out.fragments.append(fragment)
                out.paths.setdefault(fragment.key, fragment.path)
                holders = owner.setdefault(fragment.key, [])
                if not holders or holders[-1] is not placed:
                    holders.append(placed)
            out.padding.extend(placed.padding)
            if placed.obj is not None:
                out.objects.append(placed.obj)
                if placed.obj.key in out.paths or placed.obj.key in owner:
                    raise LayoutError(f"{placed.leaf.key}: becomes {placed.obj.key!r} in the checkpoint, as another value does")
                out.paths[placed.obj.key] = placed.obj.path
        for key, holders in owner.items():
            if len(holders) > 1:
                _check_shared(key, holders)
        return out


def _check_shared(key: str, holders: Sequence[_Placed]) -> None:
    """Several local tensors hold parts of one global tensor (experts, a tied head): their boxes are equal or disjoint."""
    seen: list[tuple[Fragment, _Placed]] = []
    for placed in holders:
        for fragment in (f for f in placed.fragments if f.key == key and not f.box.empty):
            for other, where in seen:
                if where is placed or (fragment.shape == other.shape and fragment.box.intersect(other.box) is None):
                    continue
                if fragment.shape != other.shape or fragment.box != other.box:
                    raise LayoutError(
                        f"{placed.leaf.key} and {where.leaf.key} both become {key!r}, with boxes {fragment.box} and {other.box} that "
                        "overlap; two names must not become one by rename"
                    )
                # Two copies of one box on one rank: the planner compares them like any replicas.
                fragment.replicated = other.replicated = True
            seen.append((fragment, placed))
