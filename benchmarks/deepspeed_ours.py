"""Our side of ``bench_deepspeed.py``: one rank of ``ucp_dcp.load`` from the folder that DeepSpeed saved, onto DTensors.

    python deepspeed_ours.py FOLDER RESULTS {fsdp2|mixed}

``fsdp2``: fp32 parameters and Adam's states, as FSDP2 shards them (rows over all ranks). ``mixed``: bf16 weights, masters and states,
what DeepSpeed's own engine holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accounting import Meter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from ucp_dcp import load  # not ucp_dcp.load below: the package imports lazily, and imports are not part of the load


def main(folder: str, results: str, kind: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    known = json.loads(Path(folder, "facts.json").read_text())["contents"]

    def empty(shape: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return zeros(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

    states = ("exp_avg", "exp_avg_sq") if kind == "fsdp2" else ("master", "exp_avg", "exp_avg_sq")
    weights = torch.float32 if kind == "fsdp2" else torch.bfloat16
    state: dict[str, Any] = {"model": {fqn: empty(values["shape"], weights) for fqn, values in known.items()}}
    state["optim"] = {"state": {fqn: {s: empty(values["shape"]) for s in states} for fqn, values in known.items()}}
    dist.barrier()
    meter = Meter()
    meter.start()
    report = load(state, folder)
    dist.barrier()
    meter.save(results, dist.get_rank())
    if not report.loaded or report.missing:
        raise AssertionError(f"not everything was loaded: {report}")
    for fqn, values in known.items():
        held = {"master": state["model"][fqn], **state["optim"]["state"][fqn]}
        for name, value in held.items():
            full = value.full_tensor()  # type: ignore[attr-defined]
            assert full.numel() == math.prod(values["shape"])
            if hashlib.sha256(full.numpy().tobytes()).hexdigest() != values[name]:
                raise AssertionError(f"{fqn}.{name} is not what was saved")
        if kind == "mixed":
            master = state["optim"]["state"][fqn]["master"].full_tensor()
            assert torch.equal(state["model"][fqn].full_tensor(), master.bfloat16()), fqn  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
