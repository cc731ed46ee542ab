"""Keys of torch_dist checkpoints: what a key says of a tensor, and which axes in front of it are stacked.

Megatron stores the layers of a homogeneous stack as one tensor with a leading layer axis, and experts with an expert axis behind that
(``core/transformer/transformer_block.py``, ``moe/experts.py``, sharded_state_dict).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...names import Role

__all__ = ["Half", "Key", "Stacked", "parse_key", "split_half", "stacked"]

MASTERS = frozenset({"param", "fp32_param", "master_param"})
"""How the optimizers call the fp32 master: the distributed optimizer, the plain one and it before 0.15, TE's own."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_LAYERS = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts)\.experts\.(\d+\.)?(linear_fc[12]\..+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_BUFFER = re.compile(r".*\.(?:expert_bias|local_tokens_per_expert|_float_type)$")


@dataclass(frozen=True, slots=True)
class Key:
    """What a tensor is: its role, its name with axes still stacked, and the name of an optimizer state."""

    role: Role
    name: str
    state: str = ""


def parse_key(key: str, wrapper: str = "") -> Key | None:
    """What a key says; None for optimizer buffers, which hold many parameters.

    ``wrapper`` is a prefix of all model keys (NeMo: ``module.``).
    """
    match = _STATE.fullmatch(key)
    if match is not None:
        name = match[2].removeprefix(wrapper)
        return Key(Role.MASTER, name) if match[1] in MASTERS else Key(Role.STATE, name, match[1])
    if key.startswith(("optimizer.", "chained_")):
        return None
    name = key.removeprefix(wrapper)
    return Key(Role.BUFFER if _BUFFER.fullmatch(name) else Role.WEIGHT, name)


@dataclass(frozen=True, slots=True)
class Stacked:
    """A name whose first ``axes`` dims are layers or experts: ``name(indices)`` is that of one of them."""

    head: str
    tail: str
    layer: bool
    expert: bool

    @property
    def axes(self) -> int:
        """Number of stacked dims in front."""
        return self.layer + self.expert

    def name(self, index: tuple[int, ...]) -> str:
        """The name of one layer's, one expert's tensor."""
        rest = list(index)
        name = self.head
        if self.layer:
            name += f".{rest.pop(0)}"
        if self.tail:
            name += f".{self.tail}" if self.head else self.tail
        return name.replace("{expert}", str(rest.pop(0))) if self.expert else name


def stacked(name: str) -> Stacked:
    """Which leading axes of the tensor ``name`` are stacked."""
    match = _LAYERS.fullmatch(name)
    head, tail = (match[1], match[2]) if match is not None else ("", name)
    experts = _EXPERTS.fullmatch(f".{tail}")
    expert = False
    if experts is not None:
        expert = experts[2] is None
        number = "{expert}." if expert else experts[2]
        tail = f"{experts[1]}.local_experts.{number}{experts[3]}".removeprefix(".")
    return Stacked(head, tail, match is not None, expert)


@dataclass(frozen=True, slots=True)
class Half:
    """Gate (0) or up (1) of a gated ``linear_fc1`` that was stored in two (``singleton_local_shards``)."""

    name: str
    part: int


def split_half(name: str) -> Half | None:
    """``...linear_fc1.weight_w`` / ``_v``; None for other names."""
    match = _HALF.fullmatch(name)
    return None if match is None else Half(match[1], "wv".index(match[2]))
