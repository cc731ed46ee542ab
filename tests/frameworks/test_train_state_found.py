"""``TrainState`` in the hands of a user: what was wrong or awkward when examples/fsdp was written with it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import ucp_dcp
from ucp_dcp.errors import MissingKeysError, PlanError


def job(seed: int = 0, schedulers: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = [LambdaLR(optimizer, lambda n: 1 / (n + 1)) for _ in range(schedulers)]
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for s in scheduler:
            s.step()
    return model, optimizer, scheduler


ZERO = Path(__file__).parents[1] / "data" / "deepspeed" / "z3_fp32_subgroups_w3"


def test_a_scheduler_of_another_make_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    other, other_optimizer, _ = job(1)
    state = ucp_dcp.TrainState(other, other_optimizer, rng=False)
    ucp_dcp.save({**state.state_dict(), "lr_scheduler": ("warm-up", 7)}, tmp_path / "c", roots=state.roots)
    model, optimizer, scheduler = job()
    live = ucp_dcp.TrainState(model, optimizer, scheduler=scheduler, rng=False)
    before = model.weight.detach().clone()
    with pytest.raises(PlanError, match=r"'lr_scheduler'.*exclude=\['lr_scheduler'\]"):
        live.load(tmp_path / "c")
    assert torch.equal(model.weight, before)
    report = live.load(tmp_path / "c", strict=False)
    assert torch.equal(model.weight, other.weight)
    assert "lr_scheduler" in report.skipped and "lr_scheduler" not in report.loaded and scheduler[0].last_epoch == 2


def test_the_scheduler_of_deepspeed_has_the_same_name() -> None:
    assert isinstance(ucp_dcp.open_checkpoint(ZERO).objects["lr_scheduler"], dict)
    model, optimizer, scheduler = job()
    live = ucp_dcp.TrainState(model, optimizer, scheduler=scheduler, rng=False)
    with pytest.raises(PlanError, match=r"'lr_scheduler'.*last_batch_iteration"):
        live.load(ZERO, include=["lr_scheduler"])
    assert "lr_scheduler" in live.load(ZERO, strict=False).skipped


@pytest.mark.parametrize("how", [{"exclude": ["lr_scheduler"]}, {"include": ["model.**", "optimizer.**"]}], ids=str)
def test_one_name_leaves_out_all_of_the_schedulers(tmp_path: Path, how: dict[str, list[str]]) -> None:
    model, optimizer, _ = job(1)
    ucp_dcp.TrainState(model, optimizer, rng=False).save(tmp_path / "c")
    live, opt, scheduler = job()
    scheduler[0].step()
    report = ucp_dcp.TrainState(live, opt, scheduler=scheduler, rng=False).load(tmp_path / "c", **how)
    assert torch.equal(live.weight, model.weight) and not report.missing
    assert scheduler[0].last_epoch == 3 and scheduler[0].state_dict()["_last_lr"] == [1e-2 / 4] * 2
    assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_a_checkpoint_without_schedulers_says_so_once(tmp_path: Path) -> None:
    model, optimizer, _ = job(1)
    ucp_dcp.TrainState(model, optimizer, rng=False).save(tmp_path / "c")
    live, opt, scheduler = job()
    with pytest.raises(MissingKeysError, match=r"exclude=\['lr_scheduler'\]") as caught:
        ucp_dcp.TrainState(live, opt, scheduler=scheduler, rng=False).load(tmp_path / "c")
    assert "problems" not in str(caught.value)


def test_another_number_of_schedulers(tmp_path: Path) -> None:
    model, optimizer, two = job(1, schedulers=2)
    ucp_dcp.TrainState(model, optimizer, scheduler=two, rng=False).save(tmp_path / "c")
    live, opt, one = job()
    with pytest.raises(PlanError, match="2 schedulers"):
        ucp_dcp.TrainState(live, opt, scheduler=one, rng=False).load(tmp_path / "c")


def test_random_generators_that_are_not_there_are_named_with_everything_else(tmp_path: Path) -> None:
    """Not only after all other problems are out of the way."""
    model, optimizer, _ = job(1)
    ucp_dcp.TrainState(model, optimizer, rng=False).save(tmp_path / "c")
    live, opt, scheduler = job()
    state = ucp_dcp.TrainState(live, opt, scheduler=scheduler, extra={"step": 0})
    with pytest.raises(MissingKeysError, match="3 problems") as caught:
        state.load(tmp_path / "c")
    assert all(f"'{name}'" in str(caught.value) for name in ("rng", "lr_scheduler", "extra.step"))


def test_nothing_is_said_of_fewer_ranks_when_no_rank_saved_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = job(1)
    ucp_dcp.TrainState(model, optimizer, rng=False).save(tmp_path / "c")
    live, opt, _ = job()
    report = ucp_dcp.TrainState(live, opt).load(tmp_path / "c", strict=False)
    assert report.missing == ["rng"] and "fewer ranks" not in caplog.text


def test_half_a_state_is_refused_and_one_process_does_not_warn(tmp_path: Path) -> None:
    def trainer() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = trainer()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ucp_dcp.TrainState(model, optimizer, rng=False).save(tmp_path)
        fresh, other = trainer()
        train = ucp_dcp.TrainState(fresh, other, rng=False)
        with pytest.raises(PlanError, match=r"'optimizer.state.weight': exp_avg left out .* half a state"):
            train.load(tmp_path, exclude=["optimizer.state.**.exp_avg"])
        assert not other.state
        train.load(tmp_path, exclude=["optimizer.state.**"])
        assert not other.state
        train.load(tmp_path)
        assert torch.equal(other.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
