"""examples/fsdp in short: losses after a resume are those of the run that went on, and the state is the same bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from meshes import fresh_meshes

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp"
ZERO = EXAMPLE / "zero"
EXPECTED = json.loads((ZERO / "expected.json").read_text())
LIMIT = 1e-4


def of_example(name: str) -> Any:
    """A module of the example; its folder is on the path only here, for its names are short."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLE))


def train(rank: int, world: int, several: list[dict[str, Any]]) -> list[Any]:
    """Runs, one after another. Plain values come back: (log, saved, resumed)."""
    example = of_example("train")
    out = []
    for options in several:
        with fresh_meshes():
            result = example.train(example.Options(**options, fingerprint=True))
        out.append(([(s.step, s.loss, s.lr) for s in result.log], result.saved, result.resumed))
    return out


def check_same(results: list[Any], losses: dict[int, tuple[float, float]], state: dict[str, str]) -> None:
    for log, _, resumed in results:
        assert resumed == state
        assert [step for step, _, _ in log] == list(losses)
        for step, loss, lr in log:
            assert abs(loss - losses[step][0]) <= LIMIT, step
            assert lr == losses[step][1], step


def test_resume_on_other_meshes(ranks, tmp_path: Path) -> None:
    """Untied and tied, onto dp x tp and onto one process."""
    urls = {tied: str(tmp_path / f"tied_{tied}") for tied in (False, True)}
    first = ranks.run(3, train, [{"mesh": {"dp": 3}, "steps": 5, "save": urls[t], "save_at": 2, "tied": t} for t in urls])
    again = [{"steps": 5, "resume": urls[t], "tied": t, "seed": 1} for t in urls]
    others = ranks.run(4, train, [{**options, "mesh": {"dp": 2, "tp": 2}} for options in again]) + ranks.run(1, train, again)
    for i, tensors in enumerate((84, 80)):
        log, saved, _ = first[0][i]
        assert [run[i][1] for run in first] == [saved] * 3 and len(saved) == tensors  # every rank gathers the same
        losses = {step: (loss, lr) for step, loss, lr in log if step > 2}
        assert len(losses) == 3 and log[0][1] > 5  # the model is not trained when it starts
        check_same([run[i] for run in others], losses, saved)


def test_resume_from_what_deepspeed_wrote(ranks) -> None:
    again = {"steps": 44, "resume": str(ZERO / "checkpoint"), "seed": 1, "mesh": {"dp": 2, "tp": 2}}
    results = ranks.run(4, train, [again])
    recipe = of_example("recipe")
    losses = {step: (EXPECTED["losses"][str(step)], recipe.PEAK * recipe.rate(step - 1)) for step in range(41, 45)}
    assert len(EXPECTED["losses"]) == 20 and len(EXPECTED["fingerprints"]) == 84
    for [run] in results:
        check_same([run], losses, EXPECTED["fingerprints"])


def test_a_loss_from_a_wrong_state_is_far_off(ranks) -> None:
    """What the limit is worth."""
    [[(log, _, _)]] = ranks.run(1, train, [{"steps": 3, "seed": 1}])
    assert abs(log[-1][1] - EXPECTED["losses"]["43"]) > 100 * LIMIT


def test_all_shares_of_a_batch_are_the_batch() -> None:
    import torch

    text = of_example("data").Text()
    whole = text.batch(5)
    for parts in (1, 2, 3, 4):
        shares = [text.batch(5, part, parts) for part in range(parts)]
        assert all(torch.equal(torch.cat([s[i] for s in shares]), whole[i]) for i in (0, 1))
    assert not torch.equal(text.batch(6)[0], whole[0])
    with pytest.raises(ValueError, match="12 sequences"):
        text.batch(0, 0, 5)


def test_plot_is_a_picture() -> None:
    losses = {step: 5 - step / 10 for step in range(1, 21)}
    after = {step: loss for step, loss in losses.items() if step > 10}
    picture = of_example("plot").draw(losses, after, [("ours", "dp 3 <x>", after, [1e-7] * 9 + [0.0])], LIMIT)
    root = ElementTree.fromstring(picture)
    tags = [child.tag.rpartition("}")[2] for child in root]
    assert tags.count("polyline") == 3 and tags.count("circle") == 10


@pytest.mark.slow  # `make demo` runs it
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main = of_example("train").main
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    main(["--steps", "2", "--save", str(tmp_path / "c")])
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
    with pytest.raises(SystemExit):
        main(["--mesh", "dp=2,tp=2"])
    assert "needs 4 ranks, and there are 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--mesh", "tp=2"])
    program = [sys.executable, "-W", "error", str(EXAMPLE / "train.py"), "--steps", "3", "--resume", str(tmp_path / "c"), "--dtype", "bf16"]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [3]
    assert done.stderr == ""
