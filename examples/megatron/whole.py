"""The global model from what every rank has, put together by hand: the package has no part in what its results are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from gpt import Shape
from torch import Tensor

STATES = ("master", "exp_avg", "exp_avg_sq")


def whole(ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """``copies()`` of all ranks -> global weights by name, and states as ``<name> <state>``. Ranks that have one thing must agree on it."""
    if "global" in ranks[0]:
        return dict(ranks[0]["global"])
    shards: dict[str, dict[int, Tensor]] = {}
    for rank in ranks:
        place = rank["place"]
        peers = [r for r in ranks if (r["place"]["pp"], r["place"]["tp"]) == (place["pp"], place["tp"])]
        line = {key: torch.cat([r["state"][key] for r in sorted(peers, key=lambda r: r["place"]["dp"])]) for key in STATES}
        for name, value in rank["model"].items():
            fqn = global_name(name, place["first_layer"])
            own = {fqn: value}
            part = slice(rank["starts"][name], rank["starts"][name] + value.numel())
            own |= {f"{fqn} {key}": line[key][part].view(value.shape) for key in STATES}
            own[f"{fqn} step"] = rank["state"]["step"]
            for label, tensor in own.items():
                known = shards.setdefault(label, {}).setdefault(place["tp"], tensor)
                if not torch.equal(known, tensor):
                    raise AssertionError(f"{label}: ranks at tp {place['tp']} have different copies")
    return {label: join(label, [parts[k] for k in sorted(parts)]) for label, parts in shards.items()}


def global_name(name: str, first_layer: int) -> str:
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    return f"decoder.layers.{int(number) + first_layer}.{rest}"


def join(label: str, parts: list[Tensor]) -> Tensor:
    """Shards of tensor-parallel ranks, end to end as Megatron cuts them; the vocabulary without padding."""
    name, _, state = label.partition(" ")
    if state == "step" or "norm" in name:
        if any(not torch.equal(p, parts[0]) for p in parts):
            raise AssertionError(f"{label}: tensor-parallel ranks have different copies")
        return parts[0]
    if "linear_fc1" in name:
        gates, ups = zip(*(p.chunk(2) for p in parts), strict=True)
        return torch.cat([*gates, *ups])
    out = torch.cat(parts, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)
    return out[: Shape().vocab] if name.endswith(("word_embeddings.weight", "output_layer.weight")) else out


def fingerprints(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of every tensor, masters left out: they are the weights (``masters_are_weights``), and FSDP2 has none."""
    return {
        label: hashlib.sha256(str(tuple(t.shape)).encode() + t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for label, t in tensors.items()
        if not label.endswith(" master")
    }


def masters_are_weights(tensors: dict[str, Tensor]) -> bool:
    """In fp32 a master and its weight are one number."""
    masters = [label for label in tensors if label.endswith(" master")]
    return all(torch.equal(tensors[label], tensors[label.removesuffix(" master")]) for label in masters)
