"""Replica digests: equal for equal content whatever the strides, different for different content, and cheap."""

from __future__ import annotations

import time

import pytest
import torch

from ucp_dcp.planners.replicas import object_digest, serialize_object, tensor_digest


@pytest.mark.parametrize("shape", [(1 << 19,), (700, 801), (9, 70, 801), (16, 16, 16, 16, 16), (1, 1, 1 << 19)], ids=str)
@pytest.mark.parametrize("mode", ["sample", "full"])
def test_digests_do_not_depend_on_strides(shape: tuple[int, ...], mode: str) -> None:
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    order = list(range(len(shape)))[::-1]
    strided = value.permute(order).contiguous().permute(order)
    spread = torch.stack([value, value], dim=-1)[..., 0]
    start = time.process_time()
    found = {tensor_digest(t, mode) for t in (value, strided, spread)}  # type: ignore[arg-type]
    assert len(found) == 1 and time.process_time() - start < 2.0
    for at in (0, -1):
        other = value.clone()
        other.view(-1)[at] += 1
        assert tensor_digest(other, mode) not in found  # type: ignore[arg-type]


def test_digests_of_sets_and_bytes_of_signs() -> None:
    def digest(value: object) -> bytes:
        return object_digest(value, serialize_object(value))

    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"}) != digest({"a", "b"})
    assert digest(0.0) != digest(-0.0) and digest(1) != digest(True) and digest(1) != digest(1.0)
    conj = torch.tensor([1 + 2j, 3 - 1j])
    assert tensor_digest(conj.conj().resolve_conj(), "full") == tensor_digest(conj.conj(), "full")
