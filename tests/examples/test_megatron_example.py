"""examples/megatron in short: from TP 2 x PP 2 onto other grids and FSDP2, and back: equal state, losses of the run that went on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import fresh_meshes

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron"
LIMIT = 1e-4
FIRST = {"tp": 2, "pp": 2}


def of_example(name: str) -> Any:
    """A module of the example; its folder is on the path only here."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLE))


def train(rank: int, world: int, several: list[dict[str, Any]]) -> list[Any]:
    """Runs, one after another. Plain values come back: (losses, saved, resumed, number of the report's keys)."""
    trainer, parallel = of_example("trainer"), of_example("parallel")
    out = []
    for options in several:
        with fresh_meshes():
            result = trainer.train(trainer.Options(**{**options, "grid": parallel.Grid(**options["grid"])}, keep_state=True))
        out.append((result.losses, result.saved, result.resumed))
    return out


def state_of(runs: list[Any], which: int, index: int = 0) -> dict[str, str]:
    whole = of_example("whole")
    tensors = whole.whole([run[index][which] for run in runs])
    assert whole.masters_are_weights(tensors)
    return whole.fingerprints(tensors)


def check(runs: list[Any], losses: dict[int, float], state: dict[str, str], index: int = 0) -> None:
    assert state_of(runs, 2, index) == state
    for run in runs:
        own = run[index][0]
        assert list(own) == [s for s in losses if s in own] and own
        for step, loss in own.items():
            assert abs(loss - losses[step]) <= LIMIT, step


def test_other_grids_and_back(ranks, tmp_path: Path) -> None:
    first, from_fsdp = (str(tmp_path / name) for name in ("first", "fsdp"))
    whole_run = ranks.run(4, train, [{"grid": FIRST, "steps": 4, "save": first, "save_at": 2, "through_dcp": True}])
    losses, state = whole_run[0][0][0], state_of(whole_run, 1)
    assert len(state) == 27 * 4 and losses[1] > 5 and losses[4] < losses[1] - 0.3
    again: dict[str, Any] = {"steps": 4, "resume": first, "seed": 1}
    others = ranks.run(4, train, [{**again, "grid": {"pp": 2, "dp": 2, "stages": (3, 1)}}, {**again, "grid": {"tp": 4}}])
    after = {s: v for s, v in losses.items() if s > 2}
    for index in (0, 1):
        check(others, after, state, index)
        assert list(others[0][index][0]) == [3, 4]
    fsdp = ranks.run(2, train, [{**again, "grid": {"fsdp": 2}, "save": from_fsdp, "save_at": 3}])
    check(fsdp, after, state)
    back = ranks.run(4, train, [{"grid": FIRST, "steps": 4, "resume": from_fsdp, "seed": 2}])
    check(back, losses, state_of(fsdp, 1))


def test_what_is_put_together_by_hand_notices_a_wrong_shard() -> None:
    """What the comparison is worth: every rank's own tensors count."""
    whole = of_example("whole")

    def rank(tp: int, scale: float) -> dict[str, Any]:
        weight = torch.arange(4.0).view(2, 2) + 10 * tp
        line = torch.zeros(128)
        line[:4] = weight.flatten() * scale
        state = {"master": line, "exp_avg": line + 1, "exp_avg_sq": line + 2, "step": torch.tensor(3.0)}
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        place = {"tp": tp, "dp": 0, "pp": 0, "first_layer": 3}
        return {"place": place, "model": {name: weight}, "state": state, "starts": {name: 0}}

    tensors = whole.whole([rank(0, 1.0), rank(1, 1.0)])
    assert tensors["decoder.layers.3.mlp.linear_fc1.weight"].tolist() == [[0, 1], [10, 11], [2, 3], [12, 13]]
    assert whole.masters_are_weights(tensors)
    wrong = whole.whole([rank(0, 1.0), rank(1, 2.0)])
    assert not whole.masters_are_weights(wrong)
    other = rank(0, 1.0)
    other["place"]["dp"], other["model"] = 1, {name: w + 1 for name, w in other["model"].items()}
    with pytest.raises(AssertionError, match="different copies"):
        whole.whole([rank(0, 1.0), other])
