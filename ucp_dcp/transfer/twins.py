"""Bytes that several destinations want, such as masters that also answer for bf16 weights: read once, copied in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..dtypes import NAMES, torch_dtype
from .copies import Copy

__all__ = ["fill_twins", "split_twins"]


def split_twins(
    copies: Sequence[Copy],
    file: npt.NDArray[np.integer],
    offset: npt.NDArray[np.integer],
    strides: Sequence[tuple[int, ...]],
    code: npt.NDArray[np.integer],
) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Rows of the copies to read, and (view that will hold the stored values unchanged, view to fill from it) for the others.

    Twins want the same box of the same bytes. Where no destination has the stored dtype, each is read: one cast must not be made from
    another.

    Args:
        file, offset, strides, code: of each copy's chunk, as ``Source.locate`` says.
    """
    rows = list(range(len(copies)))
    if len(rows) < 2:
        return rows, []
    order = np.lexsort((offset, file))
    if not bool(((np.diff(file[order]) == 0) & (np.diff(offset[order]) == 0)).any()):
        return rows, []  # every copy has a chunk to itself
    files, offsets, codes = file.tolist(), offset.tolist(), code.tolist()
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, copy in enumerate(copies):
        groups.setdefault((files[i], offsets[i], strides[i], codes[i], copy.offset, copy.view.shape), []).append(i)
    twins: list[tuple[torch.Tensor, torch.Tensor]] = []
    left_out: set[int] = set()
    for group in groups.values():
        if len(group) == 1:
            continue
        stored = torch_dtype(NAMES[codes[group[0]]])
        first = next((i for i in group if copies[i].view.dtype == stored), None)
        if first is not None:
            others = [i for i in group if i != first]
            twins += [(copies[first].view, copies[i].view) for i in others]
            left_out.update(others)
    return [i for i in rows if i not in left_out], twins


def fill_twins(twins: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Once everything was read."""
    with torch.no_grad():
        for held, view in twins:
            view.detach().copy_(held.detach())
