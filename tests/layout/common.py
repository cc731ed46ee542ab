"""What the layout tests share: checking fragments against numbered arrays, and Hypothesis settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from ucp_dcp.layout import Collected, Layout
from ucp_dcp.spec import LayoutSpec

from .oracle import PAD, OracleStep, text

THOROUGH = os.environ.get("UCP_HYPOTHESIS") == "thorough"


def examples(n: int) -> Any:
    """Settings with ``n`` examples, twenty times as many with UCP_HYPOTHESIS=thorough."""
    chosen = settings(
        max_examples=n * 20 if THOROUGH else n, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    limit = pytest.mark.timeout(7200 if THOROUGH else 120)
    return lambda test: limit(chosen(test))


def layout_of(
    rules: Sequence[Mapping[str, Any]],
    coords: Mapping[str, tuple[int, int]],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    states: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    declare: Mapping[str, Any] | None = None,
    roots: Mapping[str, str] | None = None,
    axes: Sequence[str] | None = None,
) -> Layout:
    spec = LayoutSpec.from_dict(
        {
            "ucp_spec": 1,
            "axes": list(axes if axes is not None else coords),
            "variables": dict(declare or {}),
            "optimizer": {"states": dict(states or {})},
            "rules": list(rules),
        }
    )
    return Layout(spec, coords=coords, shapes=shapes, variables=variables, roots=roots)


def rule(match: str, *steps: OracleStep, **more: Any) -> dict[str, Any]:
    return {"match": match, "steps": [text(step) for step in steps], **more}


def local_tensor(array: np.ndarray, form: int = 0) -> torch.Tensor:
    """The array as a torch tensor: contiguous, or with one of three other stride patterns."""
    tensor = torch.from_numpy(array.copy(order="C"))
    if form == 1 and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if form == 2 and tensor.dim() >= 1:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), -7)
        view = wide[..., 1::2]
        view.copy_(tensor)
        return view
    if form == 3:
        base = tensor.new_full((tensor.numel() + 5,), -7)
        view = base[5:].view(tensor.shape)
        view.copy_(tensor)
        return view
    return tensor


class Gathered:
    """Global arrays written from the fragments of many ranks, with a count of the writes to every element."""

    def __init__(self, full: Mapping[str, np.ndarray]) -> None:
        self.full = full
        self.values = {name: np.full(array.shape, -1, dtype=np.int64) for name, array in full.items()}
        self.counts = {name: np.zeros(array.shape, dtype=np.int64) for name, array in full.items()}

    def add(self, collected: Collected, prefix: str = "model.") -> None:
        for fragment in collected.fragments:
            if not fragment.key.startswith(prefix):
                continue
            name = fragment.key.removeprefix(prefix)
            assert fragment.shape == self.full[name].shape
            assert tuple(fragment.view.shape) == fragment.box.size
            if fragment.box.empty:
                continue
            assert all(s <= n for s, n in zip(fragment.box.stop, fragment.shape, strict=True))
            where = fragment.box.slices()
            self.values[name][where] = fragment.view.numpy()
            self.counts[name][where] += 1

    def check(self, held: Sequence[np.ndarray]) -> None:
        """Every element has its value, and was written as often as ``held`` (the local arrays, cut by the oracle) holds its number."""
        every = np.concatenate([array.reshape(-1) for array in held]) if held else np.zeros(0, dtype=np.int64)
        for name, array in self.full.items():
            found = np.bincount(every[every != PAD], minlength=int(array.max(initial=0)) + 1)
            np.testing.assert_array_equal(self.values[name], np.where(found[array] > 0, array, -1), err_msg=name)
            np.testing.assert_array_equal(self.counts[name], found[array], err_msg=name)


def check_memory(collected: Collected, local: torch.Tensor) -> None:
    """Fragments and padding are views of the local tensor and cover each of its elements exactly once."""
    local.zero_()
    storage = local.untyped_storage().data_ptr()
    for view in [f.view for f in collected.fragments] + [p.view for p in collected.padding]:
        assert view.untyped_storage().data_ptr() == storage
        view += 1
    assert bool((local == 1).all()), local
    # Nothing beside it was touched either.
    base = torch.as_strided(local, (local.untyped_storage().nbytes() // local.element_size(),), (1,), 0)
    assert int((base == 1).sum()) == local.numel()
