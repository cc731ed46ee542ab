"""Memory for optimizer state that a checkpoint has and a fresh optimizer has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from ...catalog import Catalog, ObjectRow, TensorRow
from ...dtypes import is_floating, torch_dtype
from ...errors import DtypeMismatchError
from ...names import Role, unwrap

__all__ = ["StateDtype", "StoredStates", "destination"]

StateDtype = Literal["param", "stored"]


class StoredStates:
    """What a checkpoint holds of optimizer state: fqn -> {state: row}."""

    def __init__(self, catalog: Catalog, root: str, fqns: Iterable[str]) -> None:
        """root: optimizer root under which rows without roles may have been written by stock DCP. fqns: names that may occur there."""
        self.of: dict[str, dict[str, TensorRow | ObjectRow]] = {}
        known = set(fqns)
        heads = tuple(dict.fromkeys((f"{root}.state.", "optim.state.", "optimizer.state.")))
        for row in catalog.tensors():
            if row.role == Role.STATE:
                self._add(row.fqn, row.state, row)
            elif row.role == Role.PLAIN:
                self._plain(row.key, row, heads, known)
        for obj in catalog.objects:
            self._plain(obj.key, obj, heads, known)

    def _add(self, fqn: str, state: str, row: TensorRow | ObjectRow) -> None:
        self.of.setdefault(fqn, {})[state] = row

    def _plain(self, key: str, row: TensorRow | ObjectRow, heads: tuple[str, ...], known: set[str]) -> None:
        for head in heads:
            if not key.startswith(head):
                continue
            rest = unwrap(key.removeprefix(head))
            at = rest.rfind(".")
            while at > 0:
                if rest[:at] in known:
                    self._add(rest[:at], rest[at + 1 :], row)
                    return
                at = rest.rfind(".", 0, at)


def destination(
    name: str,
    state: str,
    row: TensorRow | ObjectRow,
    parameter: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: StateDtype | None,
) -> Any:
    """An empty tensor, laid out as the optimizer would have laid it out; for a stored Python value a placeholder.

    A state of the parameter's shape is divided like it; another one of as many dims (Adafactor's rows and columns) in those dims whose
    extent is the parameter's. Raises DtypeMismatchError where the state is stored wider than the parameter is and nothing says what to do.
    """
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    shape = tuple(row.shape) if isinstance(row, TensorRow) else ()
    if state == "step" and of_torch and shape in ((), (1,)):
        # torch's optimizers count in float32; on the host, unless a kernel counts
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    if not isinstance(row, TensorRow):
        return 0
    kind = torch_dtype(row.dtype)
    if is_floating(row.dtype) and parameter.is_floating_point() and kind != parameter.dtype and shape not in ((), (1,)):
        if kind.itemsize < parameter.dtype.itemsize or dtype == "param":
            kind = parameter.dtype
        elif dtype is None:
            raise DtypeMismatchError(
                f"state {state!r} of {name!r} is stored as {row.dtype} and the parameter is {parameter.dtype}: "
                "state_dtype='stored' keeps all bits, state_dtype='param' makes the state as wide as the parameter, as torch.optim does"
            )
    return _empty(shape, kind, parameter)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard, empty

    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    placements = [
        p
        if isinstance(p, Shard) and len(shape) == parameter.dim() and shape[p.dim] == parameter.shape[p.dim] and type(p) is Shard
        else Replicate()
        for p in parameter.placements
    ]
    return empty(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
