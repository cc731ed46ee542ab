"""``MegatronState``: the model and optimizer of a live megatron-core job, for this package's planners."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...api import load, save
from ...errors import LayoutError
from ...layout import Layout
from ...names import Role
from ...planners.report import LoadReport
from ...spec import LayoutSpec, Rule
from ...spec.names import Match
from .optimizers import OwnedState, initialise, owned_states
from .pieces import Param, Piece, read_sharded

__all__ = ["MegatronState"]

_MASTERS = ("master",)
_DIMS = 8


class _ExactLayout(Layout):
    """A layout with one rule per local name, found by that name: thousands of rules need not be tried for each of thousands of names."""

    def candidates(self, name: str) -> list[tuple[Rule, Match]]:
        index: dict[str, Rule] = self.__dict__.setdefault("_by_name", {rule.match.text: rule for rule in self.spec.rules})
        rule = index.get(name)
        return [] if rule is None else [(rule, Match({}, ()))]


class MegatronState:
    """The state of a megatron-core job on this rank: what it holds of which global tensor.

    Names are megatron-core's own, one tensor per layer and per expert (``decoder.layers.3.mlp.linear_fc1.weight``, gate above up),
    whatever TP, PP, VPP, EP and DP are. Optimizer state goes by parameter: fp32 masters and moments of the distributed optimizer are
    saved as the ranges that each rank owns, with nothing gathered, and load under any other layout.

    Args:
        sharded: ``model.sharded_state_dict(...)`` of a model, or of every virtual pipeline chunk in a list.
        optimizer: the MegatronOptimizer (chained, distributed, Float16 or FP32), or None for weights alone.
        vocab: tokens of the tokenizer. Without it the padded vocabulary, whose size depends on TP, is saved as it is.
        extra: plain values of the job that all ranks share (iteration, scheduler state); a load fills this very mapping.

    ``state_dict`` and ``layout`` are what ``dcp.save`` with ``UCPSavePlanner(layout=...)`` and ``dcp.load`` with
    ``UCPLoadPlanner(layout=...)`` take; after such a load call :meth:`loaded`. :meth:`save` and :meth:`load` do it all. Hyperparameters
    of groups come from Megatron's arguments and scheduler, and are not kept here; the step count of an optimizer is.
    ``ShardedObject``s (RNG, FP8 state) stand in ``state_dict["objects"]`` under their unique keys; giving loaded ones back to the job is
    up to the caller, and under another layout, whose keys differ, they are left out with ``exclude=["objects.**"]``.

    Raises:
        LayoutError: a tensor of the sharded state dict, or a parameter of the optimizer, that does not fit the others.
        UnsupportedError: what cannot be filled in place, such as the precision-aware optimizer.
    """

    def __init__(
        self,
        sharded: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        optimizer: Any = None,
        *,
        vocab: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._vocab = vocab
        self._extra = extra
        self._params, self._objects = read_sharded(sharded)
        self._groups: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._rules: list[dict[str, Any]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.state_dict: dict[str, Any] = {}
        self.layout = self._describe()

    def save(self, url: str | os.PathLike[str], **options: Any) -> None:
        """:func:`ucp_dcp.save` of everything. Collective."""
        self.layout = self._describe()
        save(self.state_dict, url, layout=self.layout, **options)

    def load(self, url: str | os.PathLike[str], **options: Any) -> LoadReport:
        """:func:`ucp_dcp.load` in place, optimizer states made first where there are none. Collective."""
        if self._optimizer is not None:
            initialise(self._optimizer)
        self.layout = self._describe()
        report = load(self.state_dict, url, layout=self.layout, **options)
        self.loaded()
        return report

    def loaded(self) -> None:
        """After a load: step counts that the optimizer keeps as numbers of its groups."""
        for group, step in self._groups:
            group["step"] = type(group["step"])(step.item())

    # -- local memory under names of its own, a rule for each

    def _describe(self) -> Layout:
        self._rules, self._shapes, self._groups = [], {}, []
        model: dict[str, torch.Tensor] = {}
        for number, param in enumerate(self._params):
            for k, piece in enumerate(param.pieces):
                model[self._rule(f"w{number}_{k}", piece, None)] = piece.view.detach()
        self.state_dict = {"model": model}
        if self._optimizer is not None:
            self.state_dict["optimizer"] = {"state": self._states()}
        if self._objects:
            self.state_dict["objects"] = self._objects
        if self._extra is not None:
            self.state_dict["extra"] = self._extra
        axes = [*(f"at{d}" for d in range(_DIMS)), "flat"]
        states = {"step": "scalar", **dict.fromkeys(_MASTERS, "master")}
        data = {"ucp_spec": 1, "name": "megatron-live", "axes": axes, "optimizer": {"states": states}, "rules": self._rules}
        if not self._rules:
            raise LayoutError("the sharded state dict holds no tensor")
        spec = LayoutSpec.from_dict(data, source="megatron-core's sharded state dict")
        # Every piece is the middle one of three: what lies before it, itself, and what lies behind.
        return _ExactLayout(spec, dict.fromkeys(axes, (1, 3)), {"model": "model", "optimizer": "optimizer"}, shapes=self._shapes)

    def _rule(self, name: str, piece: Piece, span: tuple[int, int] | None) -> str:
        """A rule for local memory that is ``piece``, or elements ``span`` of it."""
        shape, steps = list(piece.shape), []
        if piece.padded and self._vocab is not None:
            if self._vocab > shape[0]:
                raise LayoutError(f"{piece.fqn}: vocab={self._vocab}, and the model has {shape[0]} rows")
            steps.append({"pad": f"Pad(0, to={shape[0]}, size={self._vocab})"})
            shape[0] = self._vocab
        for d, (offset, n, whole) in enumerate(zip(piece.offset, piece.view.shape, piece.shape, strict=True)):
            if n != whole:
                steps.append({f"at{d}": f"Shard({d}, widths=[{offset}, {n}, {whole - offset - n}])"})
        if span is not None:
            steps.append({"flat": f"Flat(bounds=[0, {span[0]}, {span[1]}, {piece.view.numel()}])"})
        role = "buffer" if piece.role == Role.BUFFER else "weight"
        self._rules.append({"match": name, "rename": piece.fqn, "role": role, "steps": steps})
        known = self._shapes.setdefault(piece.fqn, tuple(shape))
        if known != tuple(shape):
            raise LayoutError(f"{piece.fqn}: global shape {tuple(shape)}, and {known} elsewhere on this rank")
        return name

    def _states(self) -> dict[str, dict[str, torch.Tensor]]:
        of: dict[int, Param] = {id(param.data): param for param in self._params}
        memory = {(p.data.data_ptr(), p.data.numel()): p for p in self._params}
        steps: dict[int, torch.Tensor] = {}
        out: dict[str, dict[str, torch.Tensor]] = {}
        for number, own in enumerate(owned_states(self._optimizer)):
            param = of.get(id(own.param)) or memory.get((own.param.data_ptr(), own.param.numel()))
            if param is None:
                raise LayoutError(
                    f"a parameter of shape {tuple(own.param.shape)} that the optimizer has is not in the sharded state dict: give that of "
                    "every model chunk that the optimizer is for"
                )
            counted = own.group.get("step")
            for k, piece in enumerate(param.pieces):
                low, high = max(own.start, piece.start), min(own.stop, piece.start + piece.view.numel())
                if low >= high:
                    continue
                if not piece.view.is_contiguous():
                    raise LayoutError(f"{piece.fqn}: its local tensor is not contiguous, so a range of it is no range of the piece")
                span = None if (own.start, own.stop) == (0, param.data.numel()) else (low - piece.start, high - piece.start)
                name = self._rule(f"s{number}_{k}", piece, span)
                states = dict(own.states)
                if own.master is not None:
                    states["master"] = own.master
                entry = {}
                for state, value in states.items():
                    if value.numel() == 1 and state == "step":
                        entry[state] = value
                    else:
                        entry[state] = self._part(own, piece, value, low, high, span)
                if "step" not in states and isinstance(counted, (int, float)) and states:
                    if id(own.group) not in steps:
                        steps[id(own.group)] = torch.tensor(float(counted))
                        self._groups.append((own.group, steps[id(own.group)]))
                    entry["step"] = steps[id(own.group)]
                out[name] = entry
        return out

    @staticmethod
    def _part(own: OwnedState, piece: Piece, value: torch.Tensor, low: int, high: int, span: tuple[int, int] | None) -> torch.Tensor:
        """The part of a state that belongs to elements [low, high) of the parameter."""
        value = value.detach()
        if value.numel() != own.stop - own.start or not value.is_contiguous():
            raise LayoutError(f"{piece.fqn}: a state has {value.numel()} elements, expected {own.stop - own.start}, end to end")
        flat = value.view(-1)[low - own.start : high - own.start]
        return flat if span is not None else flat.view(piece.view.shape)
