"""An independent way to cut tensors: numpy slices and concatenations, step by step, on arrays that number their elements.

Nothing of the package is imported here. A global array holds 1, 2, 3, ...; padding is PAD. ``cut_all`` gives what every coordinate holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

PAD = 0

# (axis or None, pattern name, keyword arguments)
OracleStep = tuple[str | None, str, dict[str, Any]]


def numbered(shape: tuple[int, ...], first: int = 1) -> np.ndarray:
    count = 1
    for n in shape:
        count *= n
    return np.arange(first, first + count, dtype=np.int64).reshape(shape)


def coordinates(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    for point in itertools.product(*(range(n) for n in sizes.values())):
        yield dict(zip(sizes, point, strict=True))


def chunks(items: list[int], n: int) -> list[list[int]]:
    """torch.chunk, padded with empty chunks: pieces of ceil(len / n)."""
    each = -(-len(items) // n) if items else 0
    return [items[each * k : each * (k + 1)] if each else [] for k in range(n)]


def apply(array: np.ndarray, step: OracleStep, k: int, n: int) -> np.ndarray:
    _, kind, args = step
    if kind in ("Replicate", "Average", "Unique"):
        return array
    if kind == "Shard":
        dim = args["dim"]
        indices = list(range(array.shape[dim]))
        parts = args.get("parts") or [len(indices)]
        widths = args.get("widths")
        if widths is not None and args.get("parts") is None:
            widths = [widths]
        copies = args.get("copies", 1)
        copies = copies if isinstance(copies, list) else [copies] * len(parts)
        keep: list[int] = []
        for p, size in enumerate(parts):
            mine, indices = indices[:size], indices[size:]
            if widths is not None:
                pieces = []
                for width in widths[p]:
                    pieces.append(mine[:width])
                    mine = mine[width:]
            else:
                pieces = chunks(mine, n // copies[p])
            keep += [piece for piece in pieces for _ in range(copies[p])][k]
        assert not indices
        return np.take(array, np.array(keep, dtype=np.int64), axis=dim)
    if kind == "Pad":
        dim = args["dim"]
        shape = list(array.shape)
        shape[dim] = args["to"] - shape[dim]
        return np.concatenate([array, np.full(shape, PAD, dtype=array.dtype)], axis=dim)
    if kind == "Stack":
        return np.asarray(np.take(array, args["index"], axis=args["dim"]))
    if kind == "Permute":
        return np.transpose(array, args["dims"])
    if kind == "Flat":
        flat = array.reshape(-1)
        bounds = args.get("bounds")
        if bounds is not None:
            return flat[bounds[k] : bounds[k + 1]]
        pieces = chunks(list(range(flat.size)), n)
        return flat[np.array(pieces[k], dtype=np.int64)]
    raise AssertionError(kind)


def cut(array: np.ndarray, steps: list[OracleStep], at: dict[str, int], sizes: dict[str, int], without: str | None = None) -> np.ndarray:
    for step in steps:
        axis = step[0]
        if axis is not None and axis == without:
            continue
        array = apply(array, step, at[axis] if axis else 0, sizes[axis] if axis else 1)
    return array


def held(steps: list[OracleStep], at: dict[str, int]) -> bool:
    return all(kind != "Unique" or at[str(axis)] in args["at"] for axis, kind, args in steps)


def buffer(
    arrays: list[np.ndarray], k: int, n: int, order: str = "given", align: int = 1, pad_to: int = 1, partition: Any = "even"
) -> np.ndarray:
    """The local part of a flat buffer of these arrays."""
    if order == "reverse":
        arrays = arrays[::-1]
    if order == "round_robin":
        arrays = [a for r in range(n) for j, a in enumerate(arrays) if j % n == r]
    if partition == "each":
        out: list[int] = []
        for array in arrays:
            flat = array.reshape(-1).tolist()
            each = -(-len(flat) // n)
            mine = flat[each * k : each * (k + 1)]
            out += mine + [PAD] * (each - len(mine))
        return np.array(out, dtype=np.int64)
    whole: list[int] = []
    for array in arrays:
        while len(whole) % align:
            whole.append(PAD)
        whole += array.reshape(-1).tolist()
    while len(whole) % pad_to:
        whole.append(PAD)
    if partition == "even":
        each = -(-len(whole) // n)
        partition = [each * j for j in range(n + 1)]
    whole += [PAD] * (partition[-1] - len(whole))
    return np.array(whole[partition[k] : partition[k + 1]], dtype=np.int64)


def text(step: OracleStep) -> dict[str, str]:
    """The step as a spec writes it."""
    axis, kind, args = step
    key = axis if axis is not None else kind.lower()
    return {key: f"{kind}({', '.join(f'{name}={value!r}' for name, value in args.items())})"}
