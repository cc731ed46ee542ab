"""What a Megatron run really held, as global tensors: put together from the per-rank dumps of live objects, never from a checkpoint.

Beside a checkpoint lies ``golden/rank_XX.pt`` per rank: coordinates, local parameters, their tensor-parallel attributes, and the fp32
masters and Adam states as (parameter, range of the flattened local parameter, values). Old versions have ``<name>.golden<rank>.pt`` with
less. Nothing here uses the package under test. The naming convention is that of ``docs/language.md``: names of megatron-core with global
layer and expert numbers, gate above up in ``linear_fc1``, ``linear_qkv`` by query group, no vocabulary padding.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["TIED", "Truth", "find", "names", "truth"]

DATA = Path(__file__).parent / "data" / "megatron"
TIED = {"output_layer.weight": "embedding.word_embeddings.weight"}
VOCAB = 61
"""``--vocab-size`` of all checkpoints of megatron-core 0.19.2 here; those of older versions have no padding."""

_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# for dumps of old versions, which have no attributes: (dim, stride); all else is replicated
_DIVIDED = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_fc1.weight": (0, 2),
    "linear_proj.weight": (1, 1),
    "linear_fc2.weight": (1, 1),
}

Place = tuple[int, int, int, int]
"""pp, chunk, ep, tp: with which coordinate a rank holds a local parameter (``ep`` and expert-tp for experts)."""


@dataclass
class Truth:
    """Global tensors by global name.

    ``weights``: as in the model. ``masters``: fp32. ``states``: parameter -> state -> tensor, ``step`` among them as a number in
    ``steps``. A tied output layer (``tied``) stands here under its own name and under the embedding's, each from its own ranks.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def canonical(self, tied: bool = False) -> dict[str, torch.Tensor]:
        """All tensors by canonical name. ``tied=False`` leaves out what stands under the name of a tied output layer."""
        skip = set() if tied else set(self.tied)
        out = {f"model.{n}": t for n, t in self.weights.items() if n not in skip}
        out |= {f"optim.state.{n}.master": t for n, t in self.masters.items() if n not in skip}
        out |= {f"optim.state.{n}.{s}": t for n, own in self.states.items() if n not in skip for s, t in own.items()}
        return out


def find(name: str) -> Path | None:
    """The folder of a checkpoint: of the repository, else of ``$UCP_DCP_EXTRA_DATA/megatron``; None: it is in neither."""
    extra = os.environ.get("UCP_DCP_EXTRA_DATA")
    for folder in (DATA, *([Path(extra, "megatron")] if extra else [])):
        if (folder / name).is_dir():
            return folder / name
    return None


def names() -> list[str]:
    """Names of all checkpoints that :func:`find` finds."""
    extra = os.environ.get("UCP_DCP_EXTRA_DATA")
    folders = [DATA, *([Path(extra, "megatron")] if extra else [])]
    return sorted({p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_dir()})


def truth(path: Path, vocab: int | None = VOCAB) -> Truth:
    """The global tensors of the checkpoint at ``path``. ``vocab``: rows of vocabulary tensors that are no padding; None keeps all.

    Copies (of norms on TP ranks, of everything on DP ranks) are compared here; a part that no rank holds is an AssertionError.
    """
    files = sorted(path.glob("golden/rank_*.pt"))
    dumps = [torch.load(f, weights_only=True) for f in files]
    if not dumps:
        files = sorted(path.glob("*.golden*.pt"))
        dumps = [_of_old(torch.load(f, weights_only=True)) for f in files]
        vocab = None
    assert dumps, f"{path}: no dumps of live objects"
    first_layer, experts = _numbers(dumps)
    local: dict[str, dict[Place, torch.Tensor]] = defaultdict(dict)
    attrs: dict[str, tuple[int, int] | None] = {}
    flat: dict[tuple[str, str], dict[Place, torch.Tensor]] = defaultdict(dict)
    seen: dict[tuple[str, str], dict[Place, torch.Tensor]] = defaultdict(dict)
    out = Truth()
    for dump in dumps:
        own: dict[tuple[int, str], tuple[str, Place, torch.Size]] = {}
        for chunk, (params, param_attrs) in enumerate(zip(dump["params"], dump["param_attrs"], strict=True)):
            for name, value in params.items():
                fqn, place = _global(name, chunk, dump["coords"], first_layer, experts)
                own[chunk, name] = (fqn, place, value.shape)
                a = param_attrs[name]
                divided = (a["partition_dim"], a["partition_stride"]) if a.get("tensor_model_parallel") else None
                assert attrs.setdefault(fqn, divided) == divided, fqn
                if a.get("shared_embedding") and name in TIED:
                    out.tied[name] = TIED[name]
                _same(local[fqn].setdefault(place, value), value, fqn)
        for optimizer in dump["optim"]:
            for state in optimizer["state"]:
                chunk, name = state["name"]
                fqn, place, shape = own[chunk, name]
                if "step" in state:
                    out.steps[fqn] = float(state["step"])
                for key, value in state.items():
                    if key in ("name", "start", "end", "step") or not torch.is_tensor(value):
                        continue
                    whole = flat[fqn, key].setdefault(place, torch.zeros(shape.numel()))
                    known = seen[fqn, key].setdefault(place, torch.zeros(shape.numel(), dtype=torch.bool))
                    part = slice(state.get("start", 0), state.get("end", shape.numel()))
                    values = value.reshape(-1)
                    if bool(known[part].any()):  # a copy on another DP rank (plain optimizer)
                        _same(whole[part], values, fqn)
                    whole[part], known[part] = values, True
    for fqn, parts in local.items():
        out.weights[fqn] = _join(parts, attrs[fqn], fqn, vocab)
    for (fqn, key), flats in flat.items():
        assert all(bool(k.all()) for k in seen[fqn, key].values()), (fqn, key)
        assert set(flats) == set(local[fqn]), (fqn, key)
        value = _join({place: f.reshape(local[fqn][place].shape) for place, f in flats.items()}, attrs[fqn], fqn, vocab)
        if key == "param":
            out.masters[fqn] = value
        else:
            out.states.setdefault(fqn, {})[key] = value
    return out


def _of_old(dump: dict[str, Any]) -> dict[str, Any]:
    """A dump of ``make_megatron_old.py`` in the form of the others."""
    divided = {name: next((d for end, d in _DIVIDED.items() if name.endswith(end)), None) for name in dump["params"]}
    return {
        "coords": {"tp": dump["tp"], "pp": 0, "ep": 0, "etp": dump["tp"]},
        "params": [dump["params"]],
        "param_attrs": [
            {
                n: {} if d is None else {"tensor_model_parallel": True, "partition_dim": d[0], "partition_stride": d[1]}
                for n, d in divided.items()
            }
        ],
        "optim": [{"state": [{"name": (0, n), "start": a, "end": b, **values} for n, a, b, values in dump["rec"]]}],
    }


def _numbers(dumps: list[dict[str, Any]]) -> tuple[dict[tuple[int, int], int], int]:
    """The global number of the first layer of each (chunk, pp), and how many experts a rank has."""
    layers: dict[tuple[int, int], int] = {}
    experts = 0
    for dump in dumps:
        for chunk, params in enumerate(dump["params"]):
            found = [_LAYER.fullmatch(name) for name in params]
            layers[chunk, dump["coords"]["pp"]] = max((int(m[2]) + 1 for m in found if m), default=0)
            experts = max([experts, *(int(m[2]) + 1 for name in params if (m := _EXPERT.fullmatch(name)))])
    first, at = {}, 0
    for key in sorted(layers):  # virtual chunks outermost, stages inside: the order in which a batch goes through them
        first[key] = at
        at += layers[key]
    return first, experts


def _global(name: str, chunk: int, coords: dict[str, int], first: dict[tuple[int, int], int], experts: int) -> tuple[str, Place]:
    match = _LAYER.fullmatch(name)
    fqn = f"{match[1]}{int(match[2]) + first[chunk, coords['pp']]}{match[3]}" if match else name
    match = _EXPERT.fullmatch(fqn)
    if match is None:
        return fqn, (coords["pp"], chunk, 0, coords["tp"])
    return f"{match[1]}{int(match[2]) + coords['ep'] * experts}{match[3]}", (coords["pp"], chunk, coords["ep"], coords["etp"])


def _join(parts: dict[Place, torch.Tensor], divided: tuple[int, int] | None, fqn: str, vocab: int | None) -> torch.Tensor:
    assert len({place[:3] for place in parts}) == 1, (fqn, sorted(parts))
    shards = [parts[place] for place in sorted(parts)]
    if divided is None:
        for shard in shards[1:]:
            _same(shards[0], shard, fqn)
        whole = shards[0].clone()
    else:
        assert [place[3] for place in sorted(parts)] == list(range(len(parts))), fqn
        dim, stride = divided
        pieces = [shard.chunk(stride, dim) for shard in shards]
        whole = torch.cat([piece[s] for s in range(stride) for piece in pieces], dim)
    return whole[:vocab].clone() if fqn in _VOCABULARY and vocab is not None else whole


def _same(a: torch.Tensor, b: torch.Tensor, fqn: str) -> None:
    a, b = a.contiguous(), b.contiguous()
    assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"copies of {fqn} differ"
