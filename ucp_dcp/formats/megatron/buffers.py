"""Where parameters lie in the buffers of the distributed optimizer. ``distrib_optim.pt`` does not say it; shapes and rules give it.

Rules (core/optimizer/param_layout.py, distrib_optimizer.py ``_compute_per_buffer_param_layout``, ``get_parameter_state_dp_zero``):
parameters in reverse order of the module; each start a multiple of 64 elements of its bucket (not so before megatron-core 0.7); a shared
embedding is a bucket of its own; a bucket ends when it has ``bucket_size`` elements. In the file the padding behind a bucket's last
parameter is cut off, so that neither the data-parallel size nor the padding of buckets matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .run import Run

__all__ = ["lay_out", "settings"]

_ALIGN = 64


def lay_out(numels: Sequence[int], alone: Sequence[bool], bucket_size: int | None, align: int) -> tuple[list[int], int]:
    """First element of each parameter in the file, and the number of elements. Arguments are in buffer order.

    Args:
        numels: elements of each parameter.
        alone: whether it is a shared embedding.
        bucket_size: elements that end a bucket; None: one bucket.
        align: elements that a start is a multiple of.
    """
    starts: list[int] = []
    base, cursor, empty = 0, 0, True
    for numel, own in zip(numels, alone, strict=True):
        cursor = -(-cursor // align) * align
        if own and not empty:
            base, cursor = base + cursor, 0
        starts.append(base + cursor)
        cursor += numel
        empty = own or (bucket_size is not None and cursor >= bucket_size)
        if empty:
            base, cursor = base + cursor, 0
    return starts, base + cursor


def settings(run: Run, pp: int, chunk: int, elements: int) -> Iterator[tuple[int | None, int]]:
    """(bucket size, alignment) that are possible, the likely one first. ``elements``: parameters of the rank.

    Gradients of the first stage's first chunk are reduced in buckets when that overlaps with the backward pass
    (core/distributed/distributed_data_parallel.py).
    """
    size: int | None = None
    if run.args.get("overlap_grad_reduce") and pp == 0 and chunk == 0:
        count, given = run.args.get("ddp_num_buckets"), run.args.get("ddp_bucket_size")
        world = run.args.get("world_size")
        dp = world // (run.tp * run.pp) if type(world) is int and world > 0 else 1  # context parallelism included
        size = max(40_000_000, 1_000_000 * dp)
        if type(given) is int and given > 0:
            size = given
        if type(count) is int and count > 0:
            size = elements // count
    for align in (_ALIGN, 1):
        yield size, align
        if size is not None:
            yield None, align
