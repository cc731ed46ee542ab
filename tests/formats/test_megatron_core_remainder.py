"""Masters of the precision-aware optimizer: an int16 remainder, combined with the bf16 weight.

Synthetic: Transformer Engine's optimizer needs CUDA, so no real file can be made here. The halves are cut as its kernel does
(``multi_tensor/adam.cu``): the weight is the upper half of the master, rounded up where the lower half, as a signed number, is negative.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ucp_dcp
from ucp_dcp import open_checkpoint
from ucp_dcp.errors import CorruptCheckpointError
from ucp_dcp.planners.consistency import join_halves

FQN = "decoder.layers.{}.self_attention.linear_proj.weight"
STACKED = "decoder.layers.self_attention.linear_proj.weight"


def halves(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int64)
    low = torch.where(low >= 1 << 15, low - (1 << 16), low)
    high = (bits.to(torch.int64) >> 16) + (low < 0)
    high = torch.where(high >= 1 << 15, high - (1 << 16), high)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def saved(root: Path, master: torch.Tensor, weights: bool = True) -> Path:
    high, low = halves(master)
    state = {f"optimizer.state.param.{STACKED}": low, f"optimizer.state.exp_avg.{STACKED}": torch.randn(master.shape)}
    dcp.save({**({STACKED: high} if weights else {}), **state}, checkpoint_id=root, no_dist=True)
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return root


def masters() -> torch.Tensor:
    some = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(3))
    special = [0.0, -0.0, 1.0, -1.0, 1e-40, 3.4e38, 1.00390625, -1.00390625]  # the last two lie half way between bf16 numbers
    some.view(-1)[: len(special)] = torch.tensor(special)
    return some


def test_the_halves_are_the_master_again() -> None:
    bits = torch.arange(-(1 << 31), 1 << 31, 4099, dtype=torch.int64).to(torch.int32)
    value = bits.view(torch.float32)
    value = value[torch.isfinite(value)]
    assert torch.equal(join_halves(*halves(value)).view(torch.int32), value.view(torch.int32)) and len(value) > 1_000_000


def test_read_and_load(tmp_path: Path) -> None:
    master = masters()
    checkpoint = open_checkpoint(saved(tmp_path / "c", master))
    for layer in range(2):
        stored = checkpoint[f"optim.state.{FQN.format(layer)}.master"]
        assert stored.dtype == torch.float32
        assert torch.equal(stored.read().view(torch.int32), master[layer].view(torch.int32))
        assert torch.equal(stored[1:5, 2:], master[layer][1:5, 2:])
        assert checkpoint[f"model.{FQN.format(layer)}"].read().dtype == torch.bfloat16
    assert checkpoint.check().counts == {"consistent": 0, "inconsistent": 0, "unproven": 2}
    state = {"optim": {"state": {FQN.format(i): {"master": torch.zeros(6, 5)} for i in range(2)}}}
    ucp_dcp.load(state, tmp_path / "c", roots={"optim": "optimizer"})
    for i in range(2):
        assert torch.equal(state["optim"]["state"][FQN.format(i)]["master"], master[i])
    weights = {"model": {FQN.format(i): torch.zeros(6, 5) for i in range(2)}}  # fp32 wanted: the master answers
    ucp_dcp.load(weights, tmp_path / "c", roots={"model": "model"}, source="master")
    assert torch.equal(weights["model"][FQN.format(1)], master[1])


def test_without_the_weight_it_is_an_error_at_open(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"master of 'decoder\.layers\.0.*only the remainder is stored.*found none"):
        open_checkpoint(saved(tmp_path / "c", masters(), weights=False))


def test_a_stock_view_stays_what_it_is(tmp_path: Path) -> None:
    stock = open_checkpoint(saved(tmp_path / "c", masters()), prefer="stock")
    assert stock[f"optimizer.state.param.{STACKED}"].dtype == torch.int16
