"""``TrainState``: a whole training job (model, optimizer, scheduler, random generators, own values) as one checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...api import load_with, save
from ...errors import MissingKeysError, PlanError, UCPError
from ...layout import ObjectLeaf, PerRank
from ...planners.load_planner import UCPLoadPlanner
from ...planners.report import LoadReport
from ...planners.resolve import SourceChoice
from .groups import LiveGroup, global_groups, live_groups, put_group, scheduler_join, scheduler_split
from .model import Modules
from .states import StateDtype, StoredStates, destination

__all__ = ["TrainState"]

_SCHEDULER, _RNG, _EXTRA = "lr_scheduler", "rng", "extra"


class TrainState:
    """A training job that stops on one mesh and goes on on another.

    Everything is kept by global parameter name: wrappers (DDP, torch.compile, activation checkpointing) leave no trace in names, optimizer
    state that is not there is neither made up nor asked for, and hyperparameters find their parameters in whatever groups these are now.

    Args:
        model: a module, or the pipeline stages of this rank. Plain, DDP, FSDP2 (``fully_shard``), tensor parallel, or any mixture.
        optimizer: one or several torch optimizers over its parameters.
        scheduler: one or several learning rate schedulers of these optimizers.
        rng: keep each rank's random generators (torch, CUDA, numpy, python). A rank that did not exist keeps its own.
        extra: other values of the job (iteration, data loader state); a load updates this very mapping in place.
        model_root, optimizer_root: their names in the checkpoint.
        process_group: of the job; default: all ranks.

    ``state_dict()`` is what ``dcp.save`` takes (with ``UCPSavePlanner(roots=train_state.roots)``); :meth:`save` and :meth:`load` do all in
    one call. Its keys, for ``include`` and ``exclude``: ``model.<name>``, ``optimizer.state.<name>.<state>``,
    ``optimizer.param_groups.<i>.<field>``, ``lr_scheduler`` (all of it), ``rng``, ``extra.<key>``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        scheduler: Any = (),
        rng: bool = True,
        extra: MutableMapping[str, Any] | None = None,
        model_root: str = "model",
        optimizer_root: str = "optimizer",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._modules = Modules([model] if isinstance(model, nn.Module) else model)
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._schedulers = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        self._rng = rng
        self._extra = extra
        self.model_root, self.optimizer_root = model_root, optimizer_root
        self._group = process_group
        for scheduler in self._schedulers:
            if not any(o is scheduler.optimizer for o in self._optimizers):
                raise PlanError(f"{type(scheduler).__name__} belongs to an optimizer that was not given")

    @property
    def roots(self) -> dict[str, str]:
        """What the planners need to know about :meth:`state_dict`."""
        return {self.model_root: "model", self.optimizer_root: "optimizer"}

    # -- save

    def state_dict(self) -> dict[str, Any]:
        """Everything, for DCP. Collective over the process group when ranks have different parameters (pipeline stages)."""
        names = self._modules.parameters()
        groups = live_groups(self._optimizers, names)
        out: dict[str, Any] = {self.model_root: self._modules.state_dict()}
        records, shared = self._records(groups)
        if self._optimizers:
            state = {name: dict(live) for name, live in self._states(groups) if live}
            out[self.optimizer_root] = {"state": state, "param_groups": global_groups(records, self._group)}
        out.update(self._rest(shared))
        return out

    def save(self, url: str | os.PathLike[str], **options: Any) -> None:
        """Save. ``options``: those of :func:`ucp_dcp.save` (``overwrite``, ``storage_options``, ...). Collective."""
        save(self.state_dict(), url, roots=self.roots, process_group=self._group, **options)

    def _states(self, groups: Iterable[LiveGroup]) -> Iterable[tuple[str, dict[str, Any]]]:
        """(name, state without empty entries) of every parameter that an optimizer has."""
        for group in groups:
            for name, parameter in zip(group.names, group.group["params"], strict=True):
                live = group.optimizer.state.get(parameter, {})
                yield name, {k: v for k, v in live.items() if v is not None}

    def _records(self, groups: Sequence[LiveGroup]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Hyperparameters of each group with the schedulers' part of them, and what schedulers have for all groups."""
        records = [group.values() for group in groups]
        shared = []
        for scheduler in self._schedulers:
            own = [i for i, group in enumerate(groups) if group.optimizer is scheduler.optimizer]
            common, parts = scheduler_split(scheduler.state_dict(), len(own))
            shared.append(common)
            for i, part in zip(own, parts, strict=True):
                records[i].update({f"{_SCHEDULER}.{key}": value for key, value in part.items()})
        return records, shared

    def _rest(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self._schedulers:
            out[_SCHEDULER] = tuple(shared)  # a tuple is one value: its parts may be others when it is loaded
        if self._rng:
            out[_RNG] = PerRank(_generators())
        if self._extra is not None:
            out[_EXTRA] = self._extra
        return out

    # -- load

    def load(
        self,
        url: str | os.PathLike[str],
        *,
        strict: bool | Literal["exact"] = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: Literal["cast", "error"] = "cast",
        source: SourceChoice = "auto",
        state_dtype: StateDtype | None = None,
        allow_classes: Sequence[type] = (),
        prefer: Literal["ucp", "stock"] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """Load from any checkpoint into the live objects, whatever ran them when it was saved. Collective.

        Optimizer state that does not exist yet is made as the checkpoint has it; a parameter that had none when it was saved has none
        afterwards. A parameter that the checkpoint's optimizer did not know (new, or frozen then) is a MissingKeysError under
        ``<optimizer_root>.state.<name>``: ``exclude`` it, or ``strict=False``, to start it afresh.

        state_dtype: how to make state that is stored wider than its parameter: ``"stored"`` or ``"param"`` wide. Other arguments and
        errors as :func:`ucp_dcp.load`; after an error the job is as it was, but for the tensors of a read that failed midway.
        """
        planner = _TrainPlanner(
            self,
            state_dtype,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            dtype=dtype,
            source=source,
            allow_classes=allow_classes,
            roots=self.roots,
        )
        report = load_with(planner, planner.template(), url, prefer, storage_options, self._group)
        planner.put_back()
        return report


class _TrainPlanner(UCPLoadPlanner):
    """Completes the state dict with memory for the optimizer state that the checkpoint has, and hands everything to its live owner."""

    def __init__(self, train: TrainState, state_dtype: StateDtype | None, **options: Any) -> None:
        super().__init__(**options)
        self._train = train
        self._state_dtype: StateDtype | None = state_dtype
        self._live: list[LiveGroup] = []
        self._template: dict[str, Any] = {}
        self._before: dict[str, UCPError] = {}
        self._no_schedulers: UCPError | None = None
        self._forget: list[tuple[LiveGroup, torch.Tensor]] = []

    def template(self) -> dict[str, Any]:
        """What is wanted; the optimizer's state is added once the checkpoint is open."""
        train = self._train
        self._live = live_groups(train._optimizers, train._modules.parameters())
        records, shared = train._records(self._live)
        out = self._template = {train.model_root: train._modules.state_dict(), **train._rest(shared)}
        if train._optimizers:
            out[train.optimizer_root] = {"state": {}, "param_groups": records}
        return out

    def _prepare(self, state_dict: dict[str, Any]) -> None:
        train, root = self._train, self._train.optimizer_root
        self._before, self._forget = {}, []
        if not train._optimizers:
            return
        self._no_schedulers = self._check_schedulers()
        catalog = self._require_catalog()
        aliases = train._modules.aliases()
        stored = StoredStates(catalog, root, {n for group in self._live for name in group.names for n in (name, *aliases.get(name, ()))})
        known = self._stored_groups(root).known if self._served is not None else set()
        wanted: dict[str, dict[str, Any]] = state_dict[root]["state"]
        for group in self._live:
            for name, parameter in zip(group.names, group.group["params"], strict=True):
                live = {k: v for k, v in group.optimizer.state.get(parameter, {}).items() if v is not None}
                rows = next((stored.of[n] for n in (name, *aliases.get(name, ())) if n in stored.of), {})
                key = f"{root}.state.{name}"
                if rows:
                    left_out = [state for state in rows if state not in live and not self._selected(f"{key}.{state}")]
                    if left_out and not live and len(left_out) < len(rows):
                        self._before[key] = PlanError(
                            f"{key!r}: {', '.join(left_out)} left out by include or exclude, while the other states are made: half a state "
                            f"is none that {type(group.optimizer).__name__} could go on with; leave out {key + '.**'!r}"
                        )
                    wanted[name] = live
                    for state, row in rows.items():
                        if state not in live:
                            try:
                                live[state] = destination(name, state, row, parameter, group.optimizer, group.group, self._state_dtype)
                            except UCPError as error:
                                self._before[f"{key}.{state}"] = error
                elif name in known:
                    self._forget.append((group, parameter))
                elif live:
                    wanted[name] = live
                else:
                    self._before[key] = MissingKeysError(
                        f"{key!r}: the optimizer of the checkpoint has neither state nor hyperparameters of this parameter (it is new, or "
                        "was frozen); exclude it to start it afresh"
                    )

    def _check_schedulers(self) -> UCPError | None:
        """Why the checkpoint's schedulers cannot be loaded. DeepSpeed, for one, has something else under their name."""
        count, source = len(self._train._schedulers), self._served
        if not count or source is None or not self._selected(_SCHEDULER):
            return None
        row = self._require_catalog().find_object(self._source_key(_SCHEDULER))
        hint = f"exclude=[{_SCHEDULER!r}] keeps the present state"
        if row is None:
            return MissingKeysError(f"{_SCHEDULER!r}: the checkpoint has no learning rate scheduler; {hint}")
        stored = source.read_object(row, self.allow_classes)
        if not isinstance(stored, tuple) or not all(isinstance(item, dict) for item in stored):
            return PlanError(f"{_SCHEDULER!r} in the checkpoint was not written by TrainState: found {stored!r:.100}; {hint}")
        if len(stored) != count:
            return PlanError(f"{_SCHEDULER!r}: the checkpoint has {len(stored)} schedulers, this job has {count}; {hint}")
        return None

    def _want_object(self, leaf: ObjectLeaf, *args: Any) -> None:
        if leaf.key == _SCHEDULER and self._no_schedulers is not None:
            raise self._no_schedulers
        super()._want_object(leaf, *args)

    def _selected(self, key: str) -> bool:
        """What schedulers keep for each parameter group is loaded with them, or not at all."""
        head, mark, _ = key.partition(f".{_SCHEDULER}.")
        if mark and head.startswith(f"{self._train.optimizer_root}.param_groups."):
            return self._no_schedulers is None and super()._selected(_SCHEDULER)
        return super()._selected(key)

    def _found_before(self) -> dict[str, UCPError]:
        return self._before

    def put_back(self) -> None:
        """All that was loaded goes to its live owner."""
        train, loaded = self._train, set(self.report.loaded)
        out, root = self._template, self._train.optimizer_root
        names = [k for k in out[train.model_root] if f"{train.model_root}.{k}" in loaded]
        train._modules.put_back(out[train.model_root], names)
        if train._optimizers:
            self._put_states(out[root]["state"], loaded)
            for group, values in zip(self._live, out[root]["param_groups"], strict=True):
                put_group(group.group, {k: v for k, v in values.items() if not k.startswith(f"{_SCHEDULER}.")})
        if train._schedulers and _SCHEDULER in loaded:
            for scheduler, shared in zip(train._schedulers, out[_SCHEDULER], strict=True):
                pairs = zip(self._live, out[root]["param_groups"], strict=True)
                mine = [values for group, values in pairs if group.optimizer is scheduler.optimizer]
                own = [{k.removeprefix(f"{_SCHEDULER}."): v for k, v in values.items()} for values in mine]
                scheduler.load_state_dict(scheduler_join(scheduler.state_dict(), shared, own))
        if train._rng and _RNG in loaded:
            _set_generators(out[_RNG].value)

    def _put_states(self, states: Mapping[str, Mapping[str, Any]], loaded: set[str]) -> None:
        root = self._train.optimizer_root
        for group in self._live:
            for name, parameter in zip(group.names, group.group["params"], strict=True):
                for state, value in states.get(name, {}).items():
                    if f"{root}.state.{name}.{state}" in loaded:
                        group.optimizer.state[parameter][state] = value
        for group, parameter in self._forget:
            group.optimizer.state.pop(parameter, None)


def _generators() -> dict[str, Any]:
    """The states of this process's random generators."""
    out = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
