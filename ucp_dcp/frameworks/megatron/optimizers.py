"""Optimizers of megatron-core -> (parameter, range of it, states) of this rank, without gathering anything.

The distributed optimizer knows for each parameter which range of its flattened local shard this rank owns (``gbuf_ranges``), and has 1-D
tensors of it. So its state is saved as what it is, and Megatron's own gather through bucket space is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UnsupportedError

__all__ = ["OwnedState", "initialise", "owned_states"]


@dataclass(slots=True)
class OwnedState:
    """Elements [start, stop) of a flattened local parameter: master copy (None where the parameter is fp32 itself) and states."""

    param: torch.Tensor
    start: int
    stop: int
    master: torch.Tensor | None
    states: dict[str, torch.Tensor]
    group: dict[str, Any]
    """The live param group it belongs to."""


def _chained(optimizer: Any) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def initialise(optimizer: Any) -> None:
    """Make the states of an optimizer that has not stepped yet, so that a load has somewhere to go."""
    for part in _chained(optimizer):
        if all(own.states for own in _of(part)):
            continue
        if hasattr(part, "_init_optimizer_states_with_dummy_values"):
            part._init_optimizer_states_with_dummy_values()
        elif getattr(part, "init_state_fn", None) is not None:
            part.init_state_fn(part.optimizer, part.config)
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            # megatron-core makes Adam's states for Apex and TE, which count steps per group; torch's, its fallback, counts per parameter
            for state in inner.state.values():
                if state and "step" not in state:
                    state["step"] = torch.tensor(0.0)


def owned_states(optimizer: Any) -> list[OwnedState]:
    """Everything that this rank's (chained) optimizer holds. Raises UnsupportedError for one whose states are not tensors in memory."""
    return [own for part in _chained(optimizer) for own in _of(part)]


def _of(part: Any) -> Iterator[OwnedState]:
    config = getattr(part, "config", None)
    if getattr(config, "use_precision_aware_optimizer", False):
        raise UnsupportedError(
            f"{type(part).__name__}: the precision-aware optimizer keeps scaled states, which cannot be filled in place; save its "
            "torch_dist checkpoint with Megatron and open that"
        )
    if hasattr(part, "gbuf_ranges") and hasattr(part, "model_param_group_index_map"):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, where in bucket["param_map"].items():
                        index, order = part.model_param_group_index_map[param]
                        group = part.optimizer.param_groups[index]
                        main = group["params"][order]
                        states = _states(part.optimizer.state.get(main, {}))
                        yield OwnedState(param, int(where["param"].start), int(where["param"].end), main.detach(), states, group)
        return
    if hasattr(part, "float16_groups"):
        groups = part.optimizer.param_groups
        home = {id(p): group for group in groups for p in group["params"]}
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for param, main in zip(params, mains, strict=True):
                yield OwnedState(param, 0, param.numel(), main.detach(), _states(part.optimizer.state.get(main, {})), home[id(main)])
        for params in part.fp32_from_fp32_groups:
            for param in params:
                yield OwnedState(param, 0, param.numel(), None, _states(part.optimizer.state.get(param, {})), home[id(param)])
        return
    inner: Any = getattr(part, "optimizer", None)
    if not hasattr(inner, "param_groups") or not isinstance(getattr(inner, "state", None), Mapping):
        raise UnsupportedError(f"{type(part).__name__} is no optimizer of megatron-core that this version knows")
    for group in inner.param_groups:
        for param in group["params"]:
            yield OwnedState(param, 0, param.numel(), None, _states(inner.state.get(param, {})), group)


def _states(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
