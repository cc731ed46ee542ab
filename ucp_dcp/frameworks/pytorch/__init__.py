"""Trainers made of torch modules, torch optimizers and learning rate schedulers: plain, DDP, FSDP2, tensor and pipeline parallel."""

from .train_state import TrainState

__all__ = ["TrainState"]
