"""Public bug reports about optimizer and training state, on four gloo ranks. ``b07(...)`` is case B07; it yields what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import case_kit as kit
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_kit import expect, numbered, refused, save
from meshes import Groups, cut, dtensor
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard

import ucp_dcp
from ucp_dcp import PerRank, TrainState, UCPLoadPlanner, UCPSavePlanner
from ucp_dcp.errors import DtypeMismatchError, LayoutError, MissingKeysError, PlanError, ReplicaMismatchError

S0, R = Shard(0), Replicate()
ROOTS = {"model": "model", "optim": "optimizer"}
CASES: dict[str, kit.Case] = {}


def case(fn: kit.Case) -> kit.Case:
    CASES[fn.__name__.upper()] = fn
    return fn


class Two(nn.Module):
    """Parameters a and b of one shape; ``used`` says which take part in the loss."""

    def __init__(self, used: str = "ab") -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(numbered(2, 2)), nn.Parameter(numbered(2, 2, start=9))
        self.used = used

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        sum((getattr(self, name) ** 2).sum() for name in self.used).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def only_first(groups: Groups) -> bool:
    return groups.rank == 0


@case
def b01(groups: Groups, url: str) -> Iterator[str]:
    """Trained, then frozen: its state is saved and loaded."""
    if not only_first(groups):
        return
    group = groups.first(1)
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    model.step(optimizer)
    model.a.requires_grad_(False)
    TrainState(model, optimizer, process_group=group).save(url)
    fresh = Two()
    fresh.a.requires_grad_(False)
    other = torch.optim.Adam(fresh.parameters())
    TrainState(fresh, other, process_group=group).load(url, strict="exact")
    for name in "ab":
        for state, value in optimizer.state[getattr(model, name)].items():
            yield from expect(other.state[getattr(fresh, name)][state], value, f"{name}.{state}")
    fresh.a.requires_grad_(True)
    fresh.step(other)
    yield from expect(float(other.state[fresh.a]["step"]), 2.0)


@case
def b02(groups: Groups, url: str) -> Iterator[str]:
    """A parameter that was never used has no state."""
    if not only_first(groups):
        return
    group = groups.first(1)
    model = Two("a")
    optimizer = torch.optim.Adam(model.parameters())
    model.step(optimizer)
    TrainState(model, optimizer, process_group=group).save(url)
    fresh = Two()
    other = torch.optim.Adam(fresh.parameters())
    TrainState(fresh, other, process_group=group).load(url)  # as it was: a with state, b without
    yield from expect(other.state[fresh.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])
    if fresh.b in other.state:
        yield "state of b was made up"
    # torch's helper makes state for b, so somebody asks for it
    state = {"model": fresh.state_dict(), "optim": get_optimizer_state_dict(fresh, torch.optim.Adam(fresh.parameters()))}
    yield from refused(MissingKeysError, "optim.state.b.exp_avg", ucp_dcp.load, state, url, roots=ROOTS, process_group=group)
    report = ucp_dcp.load(state, url, roots=ROOTS, strict=False, process_group=group)
    yield from expect(sorted(report.missing), [f"optim.state.b.{s}" for s in ("exp_avg", "exp_avg_sq", "step")])
    yield from expect(state["optim"]["state"]["a"]["exp_avg"], optimizer.state[model.a]["exp_avg"])


def three_groups(lrs: tuple[float, ...], wds: tuple[float, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    members = ([model.weight], [model.bias], [])
    return model, torch.optim.AdamW(
        [{"params": p, "lr": lr, "weight_decay": wd} for p, lr, wd in zip(members, lrs, wds, strict=True)]
    )


@case
def b03(groups: Groups, url: str) -> Iterator[str]:
    """An empty group keeps its own values."""
    if not only_first(groups):
        return
    group = groups.first(1)
    TrainState(*three_groups((0.1, 0.2, 0.3), (0.5, 0.0, 0.01)), process_group=group).save(url)
    model, optimizer = three_groups((9.0, 9.0, 9.0), (9.0, 9.0, 9.0))
    TrainState(model, optimizer, process_group=group).load(url)
    yield from expect([(g["lr"], g["weight_decay"]) for g in optimizer.param_groups], [(0.1, 0.5), (0.2, 0.0), (0.3, 0.01)])


@case
def b04(groups: Groups, url: str) -> Iterator[str]:
    """Groups that differ in a field of their own; groups that are split, re-ordered, merged."""
    if not only_first(groups):
        return
    group = groups.first(1)

    def trainer(*members: tuple[str, dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two()
        return model, torch.optim.SGD([{"params": [getattr(model, n) for n in names], **fields} for names, fields in members], lr=7.0)

    TrainState(*trainer(("a", {"lr": 0.1, "min_lr": 0.01}), ("b", {"lr": 0.2, "min_lr": 0.02})), process_group=group).save(url)
    model, optimizer = trainer(("b", {"min_lr": 5.0}), ("a", {"min_lr": 5.0}))
    TrainState(model, optimizer, process_group=group).load(url)
    yield from expect([(g["lr"], g["min_lr"]) for g in optimizer.param_groups], [(0.2, 0.02), (0.1, 0.01)])
    model, optimizer = trainer(("ab", {"min_lr": 5.0}))
    merged = TrainState(model, optimizer, process_group=group)
    yield from refused(PlanError, ["0.1", "0.2", "'a'", "'b'"], merged.load, url)
    yield from expect(optimizer.param_groups[0]["lr"], 7.0)
    merged.load(url, exclude=["optimizer.param_groups.0.lr", "optimizer.param_groups.0.min_lr"])
    TrainState(*trainer(("ab", {"lr": 0.3})), process_group=group).save(url + "m")
    model, optimizer = trainer(("b", {}), ("a", {}))
    TrainState(model, optimizer, process_group=group).load(url + "m")
    yield from expect([g["lr"] for g in optimizer.param_groups], [0.3, 0.3])


class Stage(nn.Module):
    """A pipeline stage with global layer numbers."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2, bias=False) for i in layers})
        with torch.no_grad():
            for i, layer in self.layers.items():
                layer.weight.copy_(numbered(2, 2, start=10 * int(i) + 1))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        sum((layer.weight**2).sum() for layer in self.layers.values()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def b05(groups: Groups, url: str) -> Iterator[str]:
    """Each pipeline stage has its own hyperparameters."""
    if groups.rank < 2:
        stage = Stage([groups.rank])
        optimizer = torch.optim.AdamW(stage.parameters(), lr=(0.1, 0.2)[groups.rank])
        stage.step(optimizer)
        TrainState(stage, optimizer, process_group=groups.first(2)).save(url)
        again = Stage([groups.rank])
        other = torch.optim.AdamW(again.parameters(), lr=5.0)
        TrainState(again, other, process_group=groups.first(2)).load(url)
        yield from expect(other.param_groups[0]["lr"], (0.1, 0.2)[groups.rank])
        key = f"layers.{groups.rank}.weight"
        yield from expect(dict(again.named_parameters())[key].detach(), dict(stage.named_parameters())[key].detach())
        # by hand, one list on every stage: what one stage has would be taken for all of them
        state = {"optim": {"param_groups": [{"lr": optimizer.param_groups[0]["lr"], "params": [key]}]}}
        yield from refused(ReplicaMismatchError, "optim.param_groups.0", ucp_dcp.save, state, url + "x", process_group=groups.first(2))
    dist.barrier()
    if groups.rank == 0:
        whole = Stage([0, 1])
        one = torch.optim.AdamW(whole.parameters(), lr=5.0)
        yield from refused(PlanError, ["0.1", "0.2", "lr"], TrainState(whole, one, process_group=groups.first(1)).load, url)
        apart = torch.optim.AdamW([{"params": [p]} for p in whole.parameters()], lr=5.0)
        TrainState(whole, apart, process_group=groups.first(1)).load(url)
        yield from expect([g["lr"] for g in apart.param_groups], [0.1, 0.2])


@case
def b06(groups: Groups, url: str) -> Iterator[str]:
    """Loading on the ranks that saved: what of it lies in whose file."""
    mesh = groups.mesh(4)
    full = {f"p{i}": numbered(4, start=10 * i + 1) for i in range(8)}
    steps = {name: {"step": torch.tensor(3.0), "exp_avg": dtensor(v, mesh, [S0])} for name, v in full.items()}
    ucp_dcp.save({"model": {n: dtensor(v, mesh, [S0]) for n, v in full.items()}, "optim": {"state": steps}}, url, roots=ROOTS)
    blank = {name: {"step": torch.tensor(0.0), "exp_avg": dtensor(v, mesh, [S0], fill=0)} for name, v in full.items()}
    state = {"model": {n: dtensor(v, mesh, [S0], fill=0) for n, v in full.items()}, "optim": {"state": blank}}
    ucp_dcp.load(state, url, roots=ROOTS)
    for name, value in full.items():
        yield from expect(state["model"][name].to_local(), cut(value, mesh, [S0]), name)
        yield from expect(state["optim"]["state"][name]["step"], torch.tensor(3.0), name)
    catalog = ucp_dcp.open_checkpoint(url).catalog
    sharded = {catalog.files[int(catalog.chunk_file[catalog.chunk_range(t)[0] + groups.rank])].path for t in _rows(catalog, "exp_avg")}
    if len(sharded) != 1 or f"__{groups.rank}_" not in sharded.pop():
        yield "this rank's shards are not all in its own file"


def _rows(catalog: Any, state: str) -> list[int]:
    return [row.index for row in catalog.tensors() if row.state == state]


@case
def b07(groups: Groups, url: str) -> Iterator[str]:
    """Step in the state, in the group, in both (the group's is stale): each as it was, from 2 ranks to 3."""
    forms = {
        "state": {"state": {"w": {"step": torch.tensor(7, dtype=torch.int32)}}, "param_groups": [{"params": ["w"], "lr": 0.1}]},
        "group": {"state": {"w": {"m": numbered(3)}}, "param_groups": [{"params": ["w"], "step": 7}]},
        "both": {"state": {"w": {"step": torch.tensor(7.0)}}, "param_groups": [{"params": ["w"], "step": 6}]},
    }
    blank = {
        "state": {"state": {"w": {"step": torch.tensor(0, dtype=torch.int32)}}, "param_groups": [{"params": ["w"], "lr": 0.0}]},
        "group": {"state": {"w": {"m": torch.zeros(3)}}, "param_groups": [{"params": ["w"], "step": 0}]},
        "both": {"state": {"w": {"step": torch.tensor(0.0)}}, "param_groups": [{"params": ["w"], "step": 0}]},
    }
    for form, state in forms.items():
        save(groups, 2, lambda s=state: {"optim": s}, url + form, roots={"optim": "optimizer"})
        if groups.rank < 3:
            got = {"optim": blank[form]}
            ucp_dcp.load(got, url + form, roots={"optim": "optimizer"}, process_group=groups.first(3))
            for name, value in state["state"]["w"].items():
                yield from expect(got["optim"]["state"]["w"][name], value, f"{form} {name}")
            yield from expect(got["optim"]["param_groups"], state["param_groups"], form)


@case
def b08(groups: Groups, url: str) -> Iterator[str]:
    """Saved with our planner and loaded with torch's, and the reverse: nested optimizer state."""
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    model.step(optimizer)
    kinds = {"ours": UCPSavePlanner(roots=ROOTS), "stock": None}
    for name, planner in kinds.items():
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{url}{name}", planner=planner)
        for load in (None, UCPLoadPlanner(roots=ROOTS)):
            fresh = Two()
            other = torch.optim.Adam(fresh.parameters())
            got = {"model": fresh.state_dict(), "optim": get_optimizer_state_dict(fresh, other)}
            dcp.load(got, checkpoint_id=f"{url}{name}", planner=load)
            for key, value in state["optim"]["state"]["a"].items():
                yield from expect(got["optim"]["state"]["a"][key], value, f"{name} {key}")


@case
def b09(groups: Groups, url: str) -> Iterator[str]:
    """Another order of parameters; and state that has numbers instead of names."""
    if not only_first(groups):
        return
    group = groups.first(1)

    def trainer(order: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two()
        return model, torch.optim.Adam([getattr(model, n) for n in order])

    model, optimizer = trainer("ab")
    model.step(optimizer)
    for name, value in (("a", 1.0), ("b", 2.0)):
        optimizer.state[getattr(model, name)]["exp_avg"].fill_(value)
    TrainState(model, optimizer, process_group=group).save(url)
    other, reverse = trainer("ba")
    TrainState(other, reverse, process_group=group).load(url)
    yield from expect([float(reverse.state[p]["exp_avg"][0, 0]) for p in (other.a, other.b)], [1.0, 2.0])
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    yield from refused(LayoutError, ["number '0'", "TrainState"], ucp_dcp.save, state, url + "n", roots=ROOTS, process_group=group)


@case
def b10(groups: Groups, url: str) -> Iterator[str]:
    """Never stepped, from 2 ranks to 3, into an optimizer that has not stepped and into one that has."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        path = f"{url}{kind.__name__}"
        if groups.rank < 2:
            model = Two()
            TrainState(model, kind(model.parameters(), lr=0.25), process_group=groups.first(2)).save(path)
        dist.barrier()
        if groups.rank < 3:
            for stepped in (False, True):
                fresh = Two()
                optimizer = kind(fresh.parameters(), lr=0.5)
                if stepped:
                    fresh.step(optimizer)
                TrainState(fresh, optimizer, process_group=groups.first(3)).load(path)
                yield from expect(optimizer.param_groups[0]["lr"], 0.25)
                yield from expect(fresh.a.detach(), numbered(2, 2))
                if any(optimizer.state.get(p) for p in fresh.parameters()):
                    yield f"{kind.__name__}: state of an optimizer that had none"


@case
def b11(groups: Groups, url: str) -> Iterator[str]:
    """fp32 moments of bf16 weights keep all their bits, from two shards to one."""
    mesh, value = groups.mesh(2), 1.0009765625
    fine, coarse = torch.full((4,), value), torch.ones(4, dtype=torch.bfloat16)

    def state() -> dict[str, Any]:
        return {"model": {"w": dtensor(coarse, mesh, [S0])}, "optim": {"state": {"w": {"exp_avg": dtensor(fine, mesh, [S0])}}}}

    save(groups, 2, state, url, roots=ROOTS)
    if groups.rank == 0:
        got = {"model": {"w": torch.zeros(4, dtype=torch.bfloat16)}, "optim": {"state": {"w": {"exp_avg": torch.zeros(4)}}}}
        ucp_dcp.load(got, url, roots=ROOTS, process_group=groups.first(1))
        yield from expect(got["optim"]["state"]["w"]["exp_avg"], fine)
        # a fresh optimizer: its state is made, and nobody decides silently how wide
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        for choice, dtype in (("stored", torch.float32), ("param", torch.bfloat16)):
            optimizer = torch.optim.Adam(model.parameters())
            train = TrainState(model, optimizer, optimizer_root="optim", rng=False, process_group=groups.first(1))
            groups_too = ["optim.param_groups.**"]
            yield from refused(DtypeMismatchError, ["exp_avg", "state_dtype"], train.load, url, exclude=groups_too)
            train.load(url, state_dtype=choice, exclude=groups_too)
            yield from expect(optimizer.state[model.w]["exp_avg"], fine.to(dtype), choice)


@case
def b12(groups: Groups, url: str) -> Iterator[str]:
    """Narrowing is reported or refused; a change of kind is refused; widening is exact."""
    if not only_first(groups):
        return
    group = groups.first(1)
    fine = torch.tensor([1.0009765625, 257.0])
    state = {"f": fine, "h": torch.tensor([1.5], dtype=torch.bfloat16), "b": torch.tensor([True])}
    ucp_dcp.save(state, url, process_group=group)
    narrow = {"f": torch.zeros(2, dtype=torch.bfloat16)}
    yield from refused(DtypeMismatchError, ["'f'", "float32", "bfloat16"], ucp_dcp.load, narrow, url, dtype="error", process_group=group)
    yield from expect(narrow["f"], torch.zeros(2, dtype=torch.bfloat16))
    report = ucp_dcp.load(narrow, url, process_group=group)
    yield from expect(report.cast, {"f": ("float32", "bfloat16")})
    integer = {"f": torch.zeros(2, dtype=torch.int64)}
    yield from refused(DtypeMismatchError, ["'f'", "int64"], ucp_dcp.load, integer, url, process_group=group)
    wide = {"h": torch.zeros(1), "b": torch.zeros(1)}
    ucp_dcp.load(wide, url, process_group=group)
    yield from expect((wide["h"].item(), wide["b"].item()), (1.5, 1.0))


@case
def b13(groups: Groups, url: str) -> Iterator[str]:
    """Every dtype, uneven over 2 ranks, onto 1 and 3; bytes are counted by width."""
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float64 complex64 complex128"
    names += " float8_e4m3fn float8_e5m2 float8_e8m0fnu"
    full = {}
    for name in names.split():
        dtype = getattr(torch, name)
        raw = (torch.arange(7 * dtype.itemsize) % 2 if name == "bool" else torch.arange(1, 7 * dtype.itemsize + 1)).to(torch.uint8)
        full[name] = raw.view(dtype)
    mesh = groups.mesh(2)
    save(groups, 2, lambda: {k: dtensor(v, mesh, [S0]) for k, v in full.items()}, url)
    checkpoint = ucp_dcp.open_checkpoint(url)
    for name, value in full.items():
        yield from expect(checkpoint[name].read().view(torch.uint8), value.view(torch.uint8), name)
        yield from expect(checkpoint[name].nbytes, 7 * value.element_size(), name)
    for n in (1, 3):
        target = groups.mesh(n)
        if groups.rank < n:
            state = {k: dtensor(torch.zeros_like(v.view(torch.uint8)).view(v.dtype), target, [S0]) for k, v in full.items()}
            ucp_dcp.load(state, url, process_group=groups.first(n))
            for name, value in full.items():
                yield from expect(state[name].to_local().view(torch.uint8), cut(value, target, [S0]).view(torch.uint8), f"{name} on {n}")


def scheduled(layers: list[int], parts: int) -> tuple[Stage, torch.optim.Optimizer, Any]:
    """A stage whose layers are in ``parts`` groups of their own learning rates, and its scheduler."""
    stage = Stage(layers)
    members = [stage.layers[str(i)].weight for i in layers]
    split = [members[i::parts] for i in range(parts)]
    optimizer = torch.optim.SGD([{"params": p, "lr": 0.1 * (layers[0] + i + 1)} for i, p in enumerate(split)], lr=1.0)
    return stage, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@case
def b14(groups: Groups, url: str) -> Iterator[str]:
    """Pipeline stages with 2 and with 3 parameter groups: the scheduler and the optimizer show one learning rate afterwards."""
    shapes = (([0, 1], 2), ([2, 3, 4], 3))
    if groups.rank < 2:
        stage, optimizer, scheduler = scheduled(*shapes[groups.rank])
        for _ in range(2):
            stage.step(optimizer)
            scheduler.step()
        TrainState(stage, optimizer, scheduler=scheduler, process_group=groups.first(2)).save(url)
        again, other, resumed = scheduled(*shapes[groups.rank])
        TrainState(again, other, scheduler=resumed, process_group=groups.first(2)).load(url)
        yield from expect((resumed.last_epoch, resumed.base_lrs), (2, scheduler.base_lrs))
        yield from expect([g["lr"] for g in other.param_groups], [g["lr"] for g in optimizer.param_groups])
        yield from expect(resumed.get_last_lr(), [g["lr"] for g in other.param_groups])
        # as one object for all stages
        state = {"scheduler": scheduler.state_dict()}
        yield from refused(ReplicaMismatchError, "scheduler", ucp_dcp.save, state, url + "x", process_group=groups.first(2))
    dist.barrier()
    if groups.rank == 0:
        whole, one, all_lrs = scheduled([0, 1, 2, 3, 4], 5)
        TrainState(whole, one, scheduler=all_lrs, process_group=groups.first(1)).load(url)
        base = [0.1 * 1, 0.1 * 2, 0.1 * 3, 0.1 * 4, 0.1 * 5]
        yield from expect((all_lrs.last_epoch, all_lrs.base_lrs), (2, base))
        yield from expect([g["lr"] for g in one.param_groups], [lr * 0.25 for lr in base])
        few, merged, schedule = scheduled([0, 1, 2, 3, 4], 2)
        train = TrainState(few, merged, scheduler=schedule, process_group=groups.first(1))
        yield from refused(PlanError, "lr", train.load, url)


@case
def b16(groups: Groups, url: str) -> Iterator[str]:
    """Every rank goes on with its own random numbers."""
    if groups.rank < 3:
        group = groups.first(3)
        torch.manual_seed(groups.rank)
        np.random.seed(groups.rank + 10)
        random.seed(groups.rank + 20)
        TrainState(Two(), process_group=group).save(url)
        following = (torch.rand(3), np.random.rand(), random.random())
        torch.manual_seed(99)
        TrainState(Two(), process_group=group).load(url)
        again = (torch.rand(3), np.random.rand(), random.random())
        yield from expect(again[0], following[0])
        yield from expect(again[1:], following[1:])
        yield from refused(ReplicaMismatchError, "PerRank", ucp_dcp.save, {"rng": bytes([groups.rank])}, url + "x", process_group=group)


@case
def b17(groups: Groups, url: str) -> Iterator[str]:
    """From 2 ranks to 4: new ranks keep what they have, with one warning; and to 1."""
    save(groups, 2, lambda: {"rng": PerRank(f"state {groups.rank}")}, url)
    state = {"rng": PerRank("own")}
    with kit.warnings_of("ucp_dcp.planners.load_planner") as warned:
        report = ucp_dcp.load(state, url)
    yield from expect(state["rng"].value, f"state {groups.rank}" if groups.rank < 2 else "own")
    yield from expect(report.missing, [] if groups.rank < 2 else ["rng"])
    yield from expect(len(warned), 1 if groups.rank == 0 else 0, f"{warned}")
    if groups.rank == 0:
        ucp_dcp.load(state, url, process_group=groups.first(1))
        yield from expect(state["rng"].value, "state 0")


class Extra(nn.Linear):
    """A module with extra state."""

    def __init__(self, value: Any) -> None:
        super().__init__(1, 1)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@case
def b18(groups: Groups, url: str) -> Iterator[str]:
    """Extra state that is there, absent, None, or of an older form."""
    if not only_first(groups):
        return
    group = groups.first(1)
    for number, stored in enumerate([{"scale": 2}, None, ["old", 1]]):
        path = f"{url}{number}"
        TrainState(nn.ModuleDict({"l": Extra(stored)}), process_group=group).save(path)
        module = nn.ModuleDict({"l": Extra("mine")})
        TrainState(module, process_group=group).load(path)
        yield from expect(module["l"].value, stored)
    TrainState(nn.ModuleDict({"l": nn.Linear(1, 1)}), process_group=group).save(url)
    module = nn.ModuleDict({"l": Extra("mine")})
    train = TrainState(module, process_group=group)
    yield from refused(MissingKeysError, "l._extra_state", train.load, url)
    train.load(url, exclude=["**._extra_state"])
    yield from expect(module["l"].value, "mine")


@case
def b19(groups: Groups, url: str) -> Iterator[str]:
    """A fresh optimizer gets its moments; a load that does not ask for them says so."""
    if not only_first(groups):
        return
    group = groups.first(1)
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    model.step(optimizer)
    TrainState(model, optimizer, process_group=group).save(url)
    fresh = Two()
    other = torch.optim.Adam(fresh.parameters())
    TrainState(fresh, other, process_group=group).load(url)
    yield from expect(other.state[fresh.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])
    state = {"model": fresh.state_dict()}
    report = ucp_dcp.load(state, url, roots={"model": "model"}, process_group=group)
    if "optimizer.state.a.exp_avg" not in report.unexpected:
        yield f"not reported: {report.unexpected}"
    yield from refused(PlanError, "nobody wants", ucp_dcp.load, state, url, roots={"model": "model"}, strict="exact", process_group=group)


@case
def b20(groups: Groups, url: str) -> Iterator[str]:
    """A new head for an old one."""
    if not only_first(groups):
        return
    group = groups.first(1)
    ucp_dcp.save({n: numbered(2, start=i * 5 + 1) for i, n in enumerate("abc")}, url, process_group=group)
    state = {n: torch.zeros(2) for n in "abd"}
    yield from refused(MissingKeysError, "'d'", ucp_dcp.load, state, url, process_group=group)
    yield from expect(state["a"], torch.zeros(2))
    report = ucp_dcp.load(state, url, strict=False, process_group=group)
    yield from expect((report.missing, report.unexpected), (["d"], ["c"]))
    yield from expect(state["b"], numbered(2, start=6))
    yield from expect(state["d"], torch.zeros(2))


@case
def b04_new(groups: Groups, url: str) -> Iterator[str]:
    """Parameters that are added or unfrozen at resume: named, or started afresh when that is said."""
    if not only_first(groups):
        return
    group = groups.first(1)
    model = Two("a")
    model.b.requires_grad_(False)
    optimizer = torch.optim.Adam([model.a], lr=0.1)
    model.step(optimizer)
    TrainState(model, optimizer, process_group=group).save(url)
    fresh = Two()
    other = torch.optim.Adam(fresh.parameters(), lr=9.0)
    train = TrainState(fresh, other, process_group=group)
    yield from refused(MissingKeysError, ["optimizer.state.b", "frozen"], train.load, url)
    report = train.load(url, exclude=["optimizer.state.b"])
    yield from expect(other.param_groups[0]["lr"], 0.1)
    yield from expect((float(other.state[fresh.a]["step"]), fresh.b in other.state), (1.0, False))
    yield from expect(report.skipped, {"optimizer.state.b": "in exclude"})
    fresh.step(other)


@case
def b03_flat(groups: Groups, url: str) -> Iterator[str]:
    """The nested and the flattened form answer each other, states by role and hyperparameters by name."""
    if not only_first(groups):
        return
    group = groups.first(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    wide, narrow = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": wide, "lr": 0.1}, {"params": narrow, "lr": 0.2}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for saved in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=saved)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
        ucp_dcp.save(state, f"{url}{saved}", roots=ROOTS, process_group=group)
        roles = {row.role.name for row in ucp_dcp.open_checkpoint(f"{url}{saved}").catalog.tensors()}
        yield from expect(roles, {"WEIGHT", "STATE"})
        for wanted in (False, True):
            fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
            other = torch.optim.AdamW([{"params": [p]} for p in fresh.parameters()], lr=7.0)  # split, re-ordered
            form = StateDictOptions(flatten_optimizer_state_dict=wanted)
            got = {"model": fresh.state_dict(), "optim": get_optimizer_state_dict(fresh, other, options=form)}
            ucp_dcp.load(got, f"{url}{saved}", roots=ROOTS, process_group=group)
            flat = got["optim"]
            names = [n for n, _ in fresh.named_parameters()]
            lrs = [flat[f"param_groups.{n}.lr"] if wanted else flat["param_groups"][i]["lr"] for i, n in enumerate(names)]
            yield from expect(lrs, [0.1, 0.2, 0.1, 0.2], f"{saved} {wanted}")
            for name, p in model.named_parameters():
                found = flat[f"state.{name}.exp_avg"] if wanted else flat["state"][name]["exp_avg"]
                yield from expect(found, optimizer.state[p]["exp_avg"], name)


def run_cases(rank: int, world: int, root: str) -> dict[str, list[str]]:
    return kit.run(CASES, root)


@pytest.fixture(scope="module")
def results(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> kit.Results:
    return ranks.run(kit.WORLD, run_cases, str(tmp_path_factory.mktemp("cases")), timeout=180)


@pytest.mark.parametrize("name", list(CASES))
def test_case(results: kit.Results, name: str) -> None:
    kit.check(results, name)
