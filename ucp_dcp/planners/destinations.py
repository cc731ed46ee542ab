"""Where loaded values go that are not tensor bytes: Python values into the state dict, numbers into one-element tensors.

All that can be refused is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import Any

import numpy as np
import torch

from ..dtypes import name_of
from ..errors import DtypeMismatchError, PlanError
from ..layout import Fragment, ObjectLeaf, PerRank
from .resolve import kind_of_number

__all__ = ["fill_number", "place_of", "put_object", "stored_number"]


def place_of(state_dict: Any, leaf: ObjectLeaf) -> tuple[Any, Any]:
    """The container of a leaf and its key or index there. Raises PlanError when that container cannot be changed in place.

    Paths hold keys as strings; the real key of a mapping may be something else, such as the parameter numbers of torch optimizers.
    """
    place = state_dict
    for step in leaf.local_path[:-1]:
        place = place[_real_key(place, step)]
    if not isinstance(place, MutableMapping | MutableSequence):
        raise PlanError(f"object {leaf.key!r} lies in a {type(place).__name__}, which cannot be changed in place")
    return place, _real_key(place, leaf.local_path[-1])


def _real_key(place: Any, step: str | int) -> Any:
    if isinstance(place, MutableSequence) or step in place:
        return step
    return next((key for key in place if str(key) == step), step)


def put_object(state_dict: Any, leaf: ObjectLeaf, value: Any) -> None:
    """Set a leaf to a loaded value."""
    place, key = place_of(state_dict, leaf)
    place[key] = PerRank(value) if leaf.per_rank else value


def stored_number(fragment: Fragment, value: Any) -> int | float | complex | bool:
    """A stored Python value as a number that the tensor can hold. Raises PlanError (no number), DtypeMismatchError (does not fit)."""
    key, dtype = fragment.key, fragment.view.dtype
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.reshape(()).item()
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float | complex | bool):
        raise PlanError(f"tensor {key!r} is wanted, but a {type(value).__name__} is stored under that name")
    stored = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}[type(value)]
    if kind_of_number(name_of(dtype)) < kind_of_number(stored):
        raise DtypeMismatchError(
            f"{key!r} is stored as the number {value!r} and wanted as a {dtype} tensor: it would lose its kind of number"
        )
    try:
        torch.empty((), dtype=dtype).fill_(value)
    except (RuntimeError, OverflowError) as error:
        raise DtypeMismatchError(f"{key!r} is stored as the number {value!r}, which a {dtype} tensor cannot hold: {error}") from error
    return value


def fill_number(fragment: Fragment, value: Any) -> None:
    """Fill a one-element tensor."""
    with torch.no_grad():
        fragment.view.detach().fill_(stored_number(fragment, value))
