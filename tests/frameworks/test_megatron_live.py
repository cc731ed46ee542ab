"""Jobs of the real megatron-core 0.19.2: what ``MegatronState`` saves of one, and loads into one with another layout, is bitwise the same.

``make test-frameworks`` unpacks the wheel and names the folder in ``$UCP_DCP_MEGATRON``; without it these tests are skipped. What a job
holds is read from its live parameters and optimizer fragments and put together by ``megatron_truth``, without this package.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import megatron_truth
import pytest
import torch

import ucp_dcp

MEGATRON = os.environ.get("UCP_DCP_MEGATRON", "")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not Path(MEGATRON, "megatron", "core").is_dir(), reason="no unpacked megatron-core in $UCP_DCP_MEGATRON"),
]
ROOT = Path(__file__).parents[2]

Job = tuple[int, str]
CHAINS: dict[str, list[Job]] = {
    # number of ranks, and options
    "dense": [
        (4, "--arch llama --bf16 --dist-opt --tp 2 --pp 2"),
        (2, "--arch llama --bf16 --dist-opt --bucket-size 3000"),  # dp 2, many buckets: what Megatron's own reshardable format gets wrong
        (2, "--arch llama --bf16 --pp 2 --vpp 2"),  # the plain optimizer
    ],
    "tied": [(2, "--arch gpt --tied --bf16 --dist-opt --pp 2"), (2, "--arch gpt --tied --tp 2")],  # masters become fp32 weights
    "experts": [(2, "--arch mixtral --bf16 --dist-opt --ep 2 --layers 2"), (2, "--arch mixtral --bf16 --dist-opt --etp 2 --layers 2")],
}


def run(out: Path, ranks: int, options: str, port: int, *more: str) -> None:
    path = os.pathsep.join([MEGATRON, str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    program = [
        sys.executable,
        str(Path(__file__).with_name("megatron_live.py")),
        *options.split(),
        "--nproc",
        str(ranks),
        "--out",
        str(out),
    ]
    done = subprocess.run([*program, "--port", str(port), *more], env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def assert_same(a: megatron_truth.Truth, b: megatron_truth.Truth) -> None:
    """Weights where both have one dtype, else masters against fp32 weights; moments and steps bit for bit."""
    assert a.weights.keys() - set(a.tied) == b.weights.keys() - set(b.tied)
    for fqn, value in b.weights.items():
        if fqn in b.tied:
            continue
        expected = a.weights[fqn] if a.weights[fqn].dtype == value.dtype else a.masters[fqn]
        assert torch.equal(value, expected), fqn
        assert torch.equal(b.masters[fqn], a.masters[fqn]), f"{fqn}: master"
        assert b.states[fqn].keys() == a.states[fqn].keys() >= {"exp_avg", "exp_avg_sq"}
        for state, moment in b.states[fqn].items():
            assert torch.equal(moment, a.states[fqn][state]), f"{fqn}: {state}"
        assert b.steps[fqn] == a.steps[fqn] == 2.0


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("chain", CHAINS)
def test_from_layout_to_layout(chain: str, tmp_path: Path) -> None:
    url, before = "", None
    for number, (ranks, options) in enumerate(CHAINS[chain]):
        out = tmp_path / str(number)
        loads = ["--load", url, "--steps", "0", "--seed", str(50 + number)] if url else []
        url = str(out / "checkpoint")
        run(out, ranks, options, 29711 + 10 * list(CHAINS).index(chain) + number, *loads, "--save", url)
        if before is not None:
            assert_same(before, megatron_truth.truth(out / "loaded"))
        before = megatron_truth.truth(out / "saved")
        stored = ucp_dcp.open_checkpoint(url)
        for fqn in ("embedding.word_embeddings.weight", "decoder.layers.1.self_attention.linear_qkv.weight"):
            assert torch.equal(stored[f"optim.state.{fqn}.exp_avg"][...], before.states[fqn]["exp_avg"])
