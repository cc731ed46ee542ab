"""Random layouts against arrays cut in numpy: every element comes out, from where it lies, exactly as often as it is held."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucp_dcp.layout import collect

from .common import Gathered, check_memory, examples, layout_of, local_tensor, rule
from .oracle import PAD, OracleStep, apply, buffer, coordinates, cut, numbered


@st.composite
def split(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """``total`` as ``count`` numbers from 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def layouts(draw: st.DrawFn, flat: bool = True, shape: tuple[int, ...] | None = None, axes: dict[str, int] | None = None) -> Any:
    """A shape, axis sizes, and steps that fit: drawn one by one, applied by the oracle on all coordinates to know what fits next."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)))
    if axes is None:
        names = draw(st.lists(st.sampled_from(["pp", "tp", "dp"]), unique=True, min_size=1, max_size=3))
        axes = {name: draw(st.integers(1, 4)) for name in names}
    unused = list(axes)
    steps: list[OracleStep] = []
    arrays = {tuple(at.items()): numbered(shape) for at in coordinates(axes)}

    def add(step: OracleStep) -> None:
        steps.append(step)
        axis = step[0]
        for point, array in arrays.items():
            k, n = (dict(point)[axis], axes[axis]) if axis else (0, 1)
            arrays[point] = apply(array, step, k, n)

    is_flat = False
    for _ in range(draw(st.integers(0, 4))):
        ndim = next(iter(arrays.values())).ndim
        kinds = ["Pad", "Shard", "Shard", "Replicate"] if ndim else ["Replicate"]
        if flat and not is_flat:
            kinds.append("Flat")
        if not is_flat and ndim:
            kinds += ["Stack", "Permute"]
        if is_flat:
            kinds += ["Flat"]
        kind = draw(st.sampled_from(kinds))
        axis = draw(st.sampled_from(unused)) if unused and kind not in ("Pad", "Stack", "Permute") else None
        if axis is None and kind not in ("Pad", "Stack", "Permute"):
            continue
        args: dict[str, Any] = {}
        if kind == "Flat":
            sizes = {a.size for a in arrays.values()}
            assert axis is not None
            if len(sizes) == 1 and draw(st.booleans()):
                cuts = draw(split(sizes.pop(), axes[axis]))
                args["bounds"] = np.cumsum([0, *cuts]).tolist()
            is_flat = True
        elif kind in ("Pad", "Shard", "Stack"):
            dim = draw(st.integers(0, ndim - 1))
            sizes = {a.shape[dim] for a in arrays.values()}
            args["dim"] = dim if draw(st.booleans()) else dim - ndim
            if kind == "Pad":
                args["to"] = max(sizes) + draw(st.integers(0, 3))
            elif kind == "Stack":
                if len(sizes) != 1 or not max(sizes) or any(kind == "Pad" for _, kind, _ in steps):
                    continue
                size = max(sizes)
                if draw(st.booleans()):
                    args["index"] = draw(st.integers(0, size - 1))
                else:
                    args["index"] = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
            else:
                assert axis is not None
                n = axes[axis]
                copies = draw(st.sampled_from([c for c in (1, 1, 2, 4) if n % c == 0]))
                if copies != 1:
                    args["copies"] = copies
                if len(sizes) == 1 and draw(st.booleans()):
                    size = sizes.pop()
                    if draw(st.booleans()):
                        args["parts"] = draw(split(size, draw(st.integers(1, 3))))
                        if draw(st.booleans()):
                            args["widths"] = [draw(split(part, n // copies)) for part in args["parts"]]
                        elif draw(st.booleans()):
                            args["copies"] = [draw(st.sampled_from([c for c in (1, 2) if n % c == 0])) for _ in args["parts"]]
                    else:
                        args["widths"] = draw(split(size, n // copies))
        elif kind == "Permute":
            args["dims"] = draw(st.permutations(range(ndim)))
        add((axis, kind, args))
        if axis is not None:
            unused.remove(axis)
    return shape, axes, steps


@given(layouts(), st.integers(0, 3))
@examples(250)
def test_any_steps(case: Any, form: int) -> None:
    shape, sizes, steps = case
    full = numbered(shape)
    gathered = Gathered({"w": full})
    locals_ = []
    for at in coordinates(sizes):
        array = cut(full, steps, at, sizes)
        locals_.append(array)
        layout = layout_of([rule("w", *steps)], {a: (k, sizes[a]) for a, k in at.items()}, shapes={"w": shape})
        local = local_tensor(array, form)
        collected = collect({"model": {"w": local}}, layout=layout)
        gathered.add(collected)
        for padding in collected.padding:
            assert bool((padding.view == PAD).all())
        check_memory(collected, local)
    gathered.check(locals_)


@given(layouts(), st.integers(0, 3))
@examples(100)
def test_replicated_is_true_where_another_rank_holds_the_same(case: Any, form: int) -> None:
    """A box that two ranks hold must be marked, or a load by one owner alone would lose the other."""
    shape, sizes, steps = case
    full = numbered(shape)
    seen: dict[tuple[Any, ...], list[bool]] = {}
    for at in coordinates(sizes):
        layout = layout_of([rule("w", *steps)], {a: (k, sizes[a]) for a, k in at.items()}, shapes={"w": shape})
        for f in collect({"model": {"w": local_tensor(cut(full, steps, at, sizes), form)}}, layout=layout).fragments:
            if not f.box.empty:
                seen.setdefault((f.box.offset, f.box.size), []).append(f.replicated)
    for box, flags in seen.items():
        assert len(flags) == 1 or all(flags), box


@given(st.data())
@examples(150)
def test_trailing_padding_of_flat_partitions(data: st.DataObject) -> None:
    """ZeRO-3 (A37): partitions of ceil(numel / n) elements, the last ones with padding behind."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    n = data.draw(st.integers(1, 6))
    full = numbered(shape)
    each = -(-full.size // n)
    gathered = Gathered({"w": full})
    for k in range(n):
        array = cut(full, [("dp", "Flat", {})], {"dp": k}, {"dp": n})
        local = torch.cat([torch.from_numpy(array.copy()), torch.full((each - array.size,), -9)])
        collected = collect({"model": {"w": local}}, layout=layout_of([rule("w", ("dp", "Flat", {}))], {"dp": (k, n)}, shapes={"w": shape}))
        gathered.add(collected)
        assert sum(p.view.numel() for p in collected.padding) == each - array.size
        check_memory(collected, local)
    gathered.check([full])


@st.composite
def buffers(draw: st.DrawFn) -> Any:
    tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    params: dict[str, tuple[tuple[int, ...], list[OracleStep]]] = {}
    for i in range(draw(st.integers(0, 5))):
        shape, _, steps = draw(layouts(flat=draw(st.booleans()), axes={"tp": tp}))
        params[f"p{i}"] = (shape, steps)
    kwargs: dict[str, Any] = {}
    if draw(st.booleans()):
        kwargs["order"] = draw(st.sampled_from(["given", "reverse", "round_robin"]))
    if draw(st.integers(0, 3)) == 0:
        kwargs["partition"] = "each"
    else:
        kwargs["align"] = draw(st.sampled_from([1, 1, 3, 4]))
        kwargs["pad_to"] = draw(st.sampled_from([1, dp, 2 * dp, 7]))
    return tp, dp, params, kwargs


def buffer_text(names: list[str], kwargs: dict[str, Any]) -> str:
    return f"FlatBuffer(params={names!r}, {', '.join(f'{k}={v}' for k, v in kwargs.items())})"


@given(buffers(), st.data(), st.integers(0, 3))
@examples(150)
def test_flat_buffers(case: Any, data: st.DataObject, form: int) -> None:
    tp, dp, params, kwargs = case
    full = {}
    first = 1
    for name, (shape, _) in params.items():
        full[name] = numbered(shape, first)
        first += full[name].size
    if kwargs.get("partition") != "each" and data.draw(st.booleans()):
        # The padded length must be equal on all tp coordinates for one explicit partition to fit all of them.
        lengths = {
            sum(buffer([cut(full[n], s, {"tp": t}, {"tp": tp}) for n, (_, s) in params.items()], k, dp, **kwargs).size for k in range(dp))
            for t in range(tp)
        }
        kwargs = {**kwargs, "partition": np.cumsum([0, *data.draw(split(max(lengths), dp))]).tolist()}
    rules = [rule(name, *steps) for name, (_, steps) in params.items()]
    rules.append({"match": "buf", "steps": [{"dp": buffer_text(list(params), kwargs)}]})
    gathered = Gathered(full)
    locals_ = []
    for at in coordinates({"tp": tp, "dp": dp}):
        pieces = [cut(full[name], steps, at, {"tp": tp}) for name, (_, steps) in params.items()]
        array = buffer(pieces, at["dp"], dp, **kwargs)
        locals_.append(array)
        local = local_tensor(array, form)
        layout = layout_of(rules, {"tp": (at["tp"], tp), "dp": (at["dp"], dp)}, shapes={n: s for n, (s, _) in params.items()})
        collected = collect({"optimizer": {"state": {"buf": {"m": local}}}}, layout=layout)
        for f in collected.fragments:
            f.key = f.key.removesuffix(".m")
        gathered.add(collected, "optimizer.state.")
        check_memory(collected, local)
    gathered.check(locals_)


@given(st.data())
@examples(120)
def test_inference_from_local_shapes(data: st.DataObject) -> None:
    """Without shapes=, even shards, parts, widths, sized padding and sized stacks give the global shape back."""
    n = data.draw(st.integers(1, 4))
    shape = [data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 3)))]
    dim = data.draw(st.integers(0, len(shape) - 1))
    kind = data.draw(st.sampled_from(["even", "parts", "widths", "pad", "stack", "permute", "copies"]))
    steps: list[OracleStep] = [("tp", "Shard", {"dim": dim})]
    if kind == "parts":
        parts = [data.draw(st.integers(0, 4)) for _ in range(3)]
        shape[dim] = sum(parts)
        steps = [("tp", "Shard", {"dim": dim, "parts": parts})]
    elif kind == "widths":
        widths = [data.draw(st.integers(0, 4)) for _ in range(n)]
        shape[dim] = sum(widths)
        steps = [("tp", "Shard", {"dim": dim, "widths": widths})]
    elif kind == "copies":
        n *= 2
        shape[dim] *= n // 2
        steps = [("tp", "Shard", {"dim": dim, "copies": 2})]
    elif kind == "pad":
        to = -(-shape[dim] // n) * n
        steps = [(None, "Pad", {"dim": dim, "to": to, "size": shape[dim]}), *steps]
    else:
        shape[dim] *= n
        if kind == "stack":
            shape.insert(0, 3)
            steps = [(None, "Stack", {"dim": 0, "index": 2, "size": 3}), *steps]
        elif kind == "permute":
            steps = [*steps, (None, "Permute", {"dims": data.draw(st.permutations(range(len(shape))))})]
    full = numbered(tuple(shape))
    for k in range(n):
        local = torch.from_numpy(cut(full, steps, {"tp": k}, {"tp": n}).copy(order="C"))
        collected = collect({"model": {"w": local}}, layout=layout_of([rule("w", *steps)], {"tp": (k, n)}))
        for f in collected.fragments:
            assert f.shape == tuple(shape)
            np.testing.assert_array_equal(f.view.numpy(), full[f.box.slices()])


def test_piece_counts_are_small() -> None:
    """A cut that needs one view gets one, and a flat range of an n-d array at most 2n - 1."""

    def count(shape: tuple[int, ...], coords: dict[str, tuple[int, int]], *steps: OracleStep) -> int:
        sizes = {a: n for a, (_, n) in coords.items()}
        array = cut(numbered(shape), list(steps), {a: k for a, (k, _) in coords.items()}, sizes)
        layout = layout_of([rule("w", *steps)], coords, shapes={"w": shape})
        return len(layout.fragments({"model": {"w": torch.from_numpy(array.copy())}}))

    assert count((8, 6), {"tp": (1, 2)}, ("tp", "Shard", {"dim": 1})) == 1
    # One coordinate: the parts are neighbours again, and one view holds them.
    assert count((8, 6), {"tp": (0, 1)}, ("tp", "Shard", {"dim": 0, "parts": [4, 2, 2]})) == 1
    assert count((8, 6), {"tp": (0, 2)}, ("tp", "Shard", {"dim": 0, "parts": [4, 2, 2]})) == 3
    for k in range(5):
        n = count((3, 4, 5), {"dp": (k, 5)}, ("dp", "Flat", {}))
        assert n <= 5, n
    # A whole array flattened over one coordinate stays one box.
    assert count((3, 4, 5), {"dp": (0, 1)}, ("dp", "Flat", {})) == 1
    # 4 parts x at most 3 boxes of a 2-d range.
    assert count((8, 6), {"tp": (0, 2), "dp": (0, 2)}, ("tp", "Shard", {"dim": 0, "parts": [4, 4]}), ("dp", "Flat", {})) <= 6


def test_strided_views_address_the_right_memory() -> None:
    base = torch.arange(2 * 12 * 5).reshape(2, 12, 5)
    local = base[1].t()[1:4]
    layout = layout_of([rule("w", ("tp", "Shard", {"dim": 1}))], {"tp": (1, 2)}, shapes={"w": (3, 24)})
    (f,) = layout.fragments({"model": {"w": local}})
    assert f.box.offset == (0, 12) and torch.equal(f.view, local) and f.view.data_ptr() == local.data_ptr()
    assert f.view.stride() == local.stride() and math.prod(f.shape) == 72
