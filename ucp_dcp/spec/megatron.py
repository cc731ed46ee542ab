"""What a spec for Megatron needs to know and only the shapes of local tensors tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import SpecError

__all__ = ["mla_down_sharded"]


def mla_down_sharded(
    shapes: Mapping[str, Sequence[int]], *, q_lora_rank: int | None, kv_lora_rank: int, qk_pos_emb_head_dim: int, tp: int
) -> bool:
    """``down_sharded`` of the ready spec ``megatron-mla``: True if the down projections are cut over tp, False if each rank has them whole.

    Args:
        shapes: local name -> shape of the local tensor; other names than those of down projections are ignored.
        q_lora_rank, kv_lora_rank, qk_pos_emb_head_dim: of the model's configuration; q_lora_rank is None without a q down projection.
        tp: size of the tensor-parallel axis.

    Raises:
        SpecError: a shape fits neither form, or two tensors are of different forms. Without any down projection (a stage without layers)
        the answer is True.
    """
    rows = {"linear_q_down_proj": q_lora_rank, "linear_kv_down_proj": kv_lora_rank + qk_pos_emb_head_dim}
    seen: dict[bool, str] = {}
    for name, shape in shapes.items():
        kind = next((k for k in rows if name.endswith(f".{k}.weight")), None)
        if kind is None:
            continue
        whole = rows[kind]
        if whole is None:
            raise SpecError(f"{name}: there is a q down projection, but q_lora_rank is None")
        found = int(shape[0]) if shape else 0
        if found == whole:
            form = tp == 1  # one rank has all of it in either form: the answer does not matter
        elif found == -(-whole // tp):
            form = True
        else:
            raise SpecError(
                f"{name}: found {found} rows, expected {whole} (whole on every rank, Transformer Engine) or {-(-whole // tp)} (cut over "
                f"{tp} tensor-parallel ranks, local spec)"
            )
        seen[form] = name
    if len(seen) == 2:
        raise SpecError(f"{seen[True]} is cut over tensor-parallel ranks, and {seen[False]} is whole on every rank: one form was expected")
    return False not in seen
