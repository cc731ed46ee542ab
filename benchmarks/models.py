"""Parameter names and shapes of published models, exact; as their Hugging Face checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["LLAMA2_7B", "LLAMA3_8B", "MODELS", "Shapes", "adam_shapes"]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Llama:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int

    def shapes(self) -> Shapes:
        h, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        out: Shapes = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            p = f"model.layers.{i}."
            out |= {
                p + "self_attn.q_proj.weight": (h, h),
                p + "self_attn.k_proj.weight": (kv, h),
                p + "self_attn.v_proj.weight": (kv, h),
                p + "self_attn.o_proj.weight": (h, h),
                p + "mlp.gate_proj.weight": (self.intermediate, h),
                p + "mlp.up_proj.weight": (self.intermediate, h),
                p + "mlp.down_proj.weight": (h, self.intermediate),
                p + "input_layernorm.weight": (h,),
                p + "post_attention_layernorm.weight": (h,),
            }
        return out | {"model.norm.weight": (h,), "lm_head.weight": (self.vocab, h)}


LLAMA2_7B: Shapes = _Llama(32000, 4096, 11008, 32, 32, 32).shapes()
"""LLaMA-2 7B: 291 parameters, 6,738,415,616 elements."""
LLAMA3_8B: Shapes = _Llama(128256, 4096, 14336, 32, 32, 8).shapes()
"""LLaMA-3 8B: 291 parameters, 8,030,261,248 elements."""
MODELS: dict[str, Shapes] = {"llama2-7b": LLAMA2_7B, "llama3-8b": LLAMA3_8B}

# The published parameter counts; a typo above must not go unnoticed.
assert sum(map(prod, LLAMA2_7B.values())) == 6_738_415_616 and len(LLAMA2_7B) == 291
assert sum(map(prod, LLAMA3_8B.values())) == 8_030_261_248 and len(LLAMA3_8B) == 291


def adam_shapes(params: Shapes) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path in ``{"model": ..., "optim": {"state": {fqn: {"exp_avg", "exp_avg_sq"}}}}`` -> shape; three tensors per parameter."""
    out: dict[tuple[str, ...], tuple[int, ...]] = {("model", fqn): shape for fqn, shape in params.items()}
    for fqn, shape in params.items():
        for state in ("exp_avg", "exp_avg_sq"):
            out["optim", "state", fqn, state] = shape
    return out
