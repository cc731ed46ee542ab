"""The coordinator of a save: our columns beside stock DCP's objects.

873 tensors (LLaMA-2 7B with Adam, shapes only), each Shard(0) over R ranks.

Both start from the pickled plans of all ranks and end with what the coordinator keeps (stock: the pickled metadata; ours: the plan of all
chunks and the pickled assignments). Ours is also shown with the stock ``Metadata`` expanded and pickled, which our writer does in
``finish`` when ``stock_metadata=True``.
"""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planners"))

from harness import Bench, Measurement
from models import LLAMA2_7B, LLAMA3_8B, adam_shapes
from plans import rank_plan, rows_of, whole
from stock_planning import stock_coordinator

from ucp_dcp.planners.merge import merge_objects, merge_tensors
from ucp_dcp.planners.planned import Planned, plan_chunks, stock_state_dict_metadata, ucp_planner_data


def coordinator(wire: list[bytes]) -> Planned:
    """All that our coordinator does between the arrival of the plans and the scatter."""
    plans = [pickle.loads(data) for data in wire]
    planned, assignments = plan_chunks(merge_tensors(plans), merge_objects(plans), len(plans))
    for assignment in assignments:
        pickle.dumps(assignment)
    return planned


def balance(planned: Planned) -> float:
    """Largest / mean bytes over the ranks."""
    loads = np.zeros(planned.world)
    sizes = np.asarray([math.prod(size) for _, _, size in planned.boxes()])
    np.add.at(loads, planned.owner, sizes)
    return float(loads.max() / loads.mean())


def main() -> None:
    """Run and save."""
    bench = Bench("planning", "Coordinator of a save, 873 tensors: CPU seconds")
    ranks = 32 if bench.quick else 256
    shapes = adam_shapes(LLAMA2_7B)
    tensors = {".".join(path): ("float32", shape) for path, shape in shapes.items()}
    wire = [pickle.dumps(rank_plan(tensors, {k: rows_of(s, r, ranks) for k, (_, s) in tensors.items()})) for r in range(ranks)]
    ours = bench.measure(
        "ucp_dcp, sharded", lambda: coordinator(wire), repeat=3, ranks=ranks, plan_bytes=sum(map(len, wire))
    )
    bench.measure(
        "  + stock Metadata expanded and pickled",
        lambda: pickle.dumps((stock_state_dict_metadata(ours.result), ucp_planner_data(ours.result))),
        repeat=1,
        warmup=0,
        ranks=ranks,
    )
    stock = stock_coordinator(shapes, ranks)
    bench.add(Measurement("stock DCP, sharded", (stock.seconds,), (stock.seconds,), {"ranks": ranks, "plan_bytes": stock.plan_bytes}))
    for replicas in (8, 64) if bench.quick else (8, 64, 512):
        llama = {".".join(path): ("float32", shape) for path, shape in adam_shapes(LLAMA3_8B).items()}
        one = pickle.dumps(rank_plan(llama, {k: [whole(s)] for k, (_, s) in llama.items()}))
        row = bench.measure(
            f"ucp_dcp, LLaMA-3 8B, {replicas} replicas", lambda n=replicas, p=one: coordinator([p] * n), repeat=3, ranks=replicas
        )
        row.facts["max/mean bytes"] = round(balance(row.result), 5)
        row.facts["chunks"] = len(row.result.owner)
    bench.finish(f"stock / ours: {stock.seconds / ours.cpu:.1f}x CPU (the clock of stock is CPU in both columns)")


if __name__ == "__main__":
    main()
