"""Train this example's model with real DeepSpeed, save a checkpoint in the middle, and write down how DeepSpeed itself went on.

    python -m venv ds && DS_BUILD_OPS=0 ds/bin/pip install torch==2.13.0 deepspeed==0.19.8
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 ds/bin/torchrun --nproc-per-node 4 make.py OUT

OUT gets the checkpoint of step 40 and ``expected.json``: the losses of steps 41 to 60, and fingerprints of every weight and optimizer
state as the live engine held them, gathered by DeepSpeed's own functions. Same data, optimizer, schedule and clipping as ``train.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import deepspeed.comm.torch as ds_torch
import torch
import torch.distributed as dist
from data import GLOBAL_BATCH, Text
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from model import Llama, Shape
from recipe import BETAS, CLIP, PEAK, parameter_groups, rate
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

ds_torch.build_shm_op = lambda: None  # an optional op that would be compiled here
SAVE_AT, STEPS = 40, 60


def main(out: Path) -> None:
    """Both parts."""
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Llama(Shape())
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 50_000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=PEAK, betas=BETAS),
        model_parameters=parameter_groups(model),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, rate),
        config=config,
    )
    text, losses, state = Text(), {}, {}
    for step in range(STEPS):
        inputs, targets = text.batch(step, rank, world)
        loss = F.cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[step + 1] = (mean / world).item()
        if step + 1 == SAVE_AT:
            engine.save_checkpoint(str(out / "checkpoint"), tag=f"global_step{SAVE_AT}")
            state = fingerprints(engine, optimizer)
    if rank == 0:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed copies them beside a checkpoint
            (out / "checkpoint" / script).unlink(missing_ok=True)
        expected = {
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "ranks": world,
            "losses": {step: loss for step, loss in losses.items() if step > SAVE_AT},
            "fingerprints": state,
        }
        (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    dist.destroy_process_group()


def fingerprints(engine: deepspeed.DeepSpeedEngine, optimizer: Any) -> dict[str, str]:
    """As ``train.fingerprints``: SHA-256 of the bytes of every weight and state."""
    steps = {float(state["step"]) for state in optimizer.optimizer.state.values()}
    assert len(steps) == 1, steps
    out = {}
    for name, p in engine.module.named_parameters():
        values = {"weight": safe_get_full_fp32_param(p)}
        values |= {key: safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
        for key, value in values.items():
            assert value is not None, (name, key)
            out[f"{name} {key}"] = hashlib.sha256(value.detach().float().contiguous().view(-1).numpy().tobytes()).hexdigest()
        out[f"{name} step"] = hashlib.sha256(torch.tensor(*steps).numpy().tobytes()).hexdigest()
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
