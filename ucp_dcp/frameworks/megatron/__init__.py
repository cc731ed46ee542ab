"""Live megatron-core trainers: their sharded state dicts and optimizers as fragments. Duck-typed: megatron is never imported."""

from .state import MegatronState

__all__ = ["MegatronState"]
