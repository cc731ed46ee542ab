"""A live job of the real megatron-core on CPU and gloo: model, DDP and (distributed) optimizer are its own, unmodified code.

Run as a program by ``test_megatron_live.py``: its shims change torch for the whole process. ``install_cpu_shim``, the model and the dump of
live tensors are those of the script that made ``tests/data/megatron``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any


def install_cpu_shim() -> Any:
    """Patches that let megatron-core run on a machine without CUDA."""
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):  # Python 3.11: megatron.training needs 3.12's typing.override
        typing.override = typing_extensions.override

    import torch
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def _count(name, ret):
        def f(*a, **k):
            return ret() if callable(ret) else ret

        return f

    # (1) `device=torch.cuda.current_device()` is used as an allocation device everywhere
    torch.cuda.current_device = _count("torch.cuda.current_device", cpu)
    torch.cuda.synchronize = _count("torch.cuda.synchronize", None)
    torch.cuda.empty_cache = _count("torch.cuda.empty_cache", None)
    torch.cuda.get_rng_state = _count("torch.cuda.get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    torch.cuda.set_rng_state = _count("torch.cuda.set_rng_state", None)

    class _NoStream:
        def __getattr__(self, n):
            return lambda *a, **k: _NoStream()

    torch.cuda.current_stream = _count("torch.cuda.current_stream", _NoStream)
    torch.cuda.Stream = lambda *a, **k: _NoStream()
    torch.cuda.stream = lambda *a, **k: contextlib.nullcontext()

    # (2) DistributedOptimizer/Float16Optimizer classify params by the string
    #     'torch.cuda.HalfTensor' / 'torch.cuda.BFloat16Tensor' / 'torch.cuda.FloatTensor'
    orig_type = torch.Tensor.type

    def patched_type(self, dtype=None, *a, **k):
        if dtype is None:
            t = orig_type(self)
            return t if t.startswith("torch.cuda.") else t.replace("torch.", "torch.cuda.", 1)
        return orig_type(self, dtype, *a, **k)

    torch.Tensor.type = patched_type
    torch.Tensor.cuda = lambda self, *a, **k: self

    # (3) literal device='cuda' in factory calls and .to()
    class Cuda2Cpu(TorchFunctionMode):
        def __torch_function__(self, func, types_, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            d = kwargs.get("device")
            if d is not None and str(d).startswith("cuda"):
                kwargs["device"] = cpu
            if getattr(func, "__name__", "") == "to" and len(args) > 1 and str(args[1]).startswith("cuda"):
                args = (args[0], cpu, *tuple(args[2:]))
            return func(*args, **kwargs)

    mode = Cuda2Cpu()
    mode.__enter__()

    # (4) CUDA RNG tracker forks become no-ops (dropout is 0, init is use_cpu_initialization)
    from megatron.core.tensor_parallel import random as mrandom

    @contextlib.contextmanager
    def fork(self, *a, **k):
        yield

    mrandom.CudaRNGStatesTracker.fork = fork
    mrandom.CudaRNGStatesTracker.get_states = lambda self: {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)}
    mrandom.CudaRNGStatesTracker.set_states = lambda self, s: None
    # (5) local-spec torch LayerNorm/RMSNorm refuses sequence_parallel; build it with the flag off
    #     and tag the params, which is what the Apex/TE norms do
    import copy

    from megatron.core.transformer import torch_norm

    orig_new = torch_norm.WrappedTorchNorm.__new__

    def norm_new(cls, config, *a, **k):
        sp = config.sequence_parallel
        if sp:
            config = copy.copy(config)
            config.sequence_parallel = False
        m = orig_new(cls, config, *a, **k)
        for q in m.parameters():
            q.sequence_parallel = sp
        return m

    torch_norm.WrappedTorchNorm.__new__ = norm_new

    # (6) torch.optim.AdamW keeps a 'step' tensor per param (TE/Apex FusedAdam do not); the
    #     fully_reshardable loader then raises KeyError('step') and the dp_reshardable loader
    #     overwrites the restored step with the pre-load one. Keep the value set from param_groups.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as DO

    orig_set = DO._set_main_param_and_optimizer_states

    def set_states(self, model_param, tensors):
        gi, go = self.model_param_group_index_map[model_param]
        st = self.optimizer.state[self.optimizer.param_groups[gi]["params"][go]]
        if "step" in st:
            tensors = {**tensors, "step": st["step"]}
        return orig_set(self, model_param, tensors)

    DO._set_main_param_and_optimizer_states = set_states
    return mode


def build_config(a: Any) -> Any:
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig

    kw = dict(
        num_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        ffn_hidden_size=a.ffn,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if a.bf16 else torch.float32,
        bf16=a.bf16,
        pipeline_dtype=torch.bfloat16 if a.bf16 else torch.float32,
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
        context_parallel_size=a.cp,
        sequence_parallel=a.sp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        overlap_p2p_comm=False,
        batch_p2p_comm=True,
    )
    if a.arch in ("llama", "mixtral"):
        kw.update(
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            num_query_groups=a.kv_heads,
        )
    if a.arch == "mixtral":
        kw.update(
            num_moe_experts=a.experts,
            moe_router_topk=2,
            moe_ffn_hidden_size=a.ffn,
            moe_token_dispatcher_type="allgather",
            moe_grouped_gemm=False,
            moe_router_load_balancing_type="none",
        )
    return TransformerConfig(**kw)


def build_model(a: Any, cfg: Any, pre: bool, post: bool, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=a.experts if a.arch == "mixtral" else None,
        moe_grouped_gemm=False,
        normalization="RMSNorm" if a.arch != "gpt" else None,
    )
    llama = a.arch != "gpt"
    # the real Megatron rule: make_vocab_size_divisible_by * tp
    mult = a.make_vocab_size_divisible_by * a.tp
    padded = (a.vocab + mult - 1) // mult * mult
    a.padded_vocab_size = padded
    return GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        vocab_size=padded,
        max_sequence_length=a.seq,
        pre_process=pre,
        post_process=post,
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied,
        position_embedding_type="rope" if llama else "learned_absolute",
        vp_stage=vp_stage,
    )


def dump_golden(a: Any, rank: int, model: Any, opt: Any, it: int) -> None:
    """What ``megatron_truth`` reads."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.utils import unwrap_model

    d = {
        "rank": rank,
        "coords": {
            "tp": ps.get_tensor_model_parallel_rank(),
            "pp": ps.get_pipeline_model_parallel_rank(),
            "dp": ps.get_data_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "etp": ps.get_expert_tensor_parallel_rank(),
            "edp": ps.get_expert_data_parallel_rank(),
        },
        "iteration": it,
        "params": [],
        "param_attrs": [],
        "optim": [],
    }
    names = {}
    for i, m in enumerate(unwrap_model(model)):
        p, at = {}, {}
        for n, q in m.named_parameters():
            p[n] = q.detach().clone()
            at[n] = {
                k: getattr(q, k)
                for k in (
                    "tensor_model_parallel",
                    "partition_dim",
                    "partition_stride",
                    "sequence_parallel",
                    "shared",
                    "shared_embedding",
                    "allreduce",
                    "is_embedding_or_output_parameter",
                )
                if hasattr(q, k)
            }
            names[q] = (i, n)
        d["params"].append(p)
        d["param_attrs"].append(at)
    subs = getattr(opt, "chained_optimizers", [opt])
    for _oi, o in enumerate(subs):
        rec = {"type": type(o).__name__, "gbuf": [], "state": []}
        if isinstance(o, DistributedOptimizer) and not o.is_stub_optimizer:
            for _gi, buf in enumerate(o.buffers):
                rec["gbuf"].append(
                    {
                        "dtype": (str(buf.param_dtype), str(buf.grad_dtype)),
                        "numel": buf.numel,
                        "numel_unpadded": buf.numel_unpadded,
                        "bucket_indices": list(buf.bucket_indices),
                        "bucket_numel_unpadded": [b.numel_unpadded for b in buf.buckets],
                        "param_index_map": {names[q]: v for q, v in buf.param_index_map.items()},
                    }
                )
            for gr in o.gbuf_ranges:
                for _dt, bl in gr.items():
                    for _bi, b in enumerate(bl):
                        for q, r in b["param_map"].items():
                            t = o._get_main_param_and_optimizer_states(q)
                            rec["state"].append(
                                {
                                    "name": names[q],
                                    "start": r["param"].start,
                                    "end": r["param"].end,
                                    **{k: v.detach().clone() for k, v in t.items()},
                                }
                            )
        else:
            for g_i, grp in enumerate(getattr(o, "float16_groups", [])):
                for q, mp in zip(grp, o.fp32_from_float16_groups[g_i], strict=False):
                    rec["state"].append(
                        {
                            "name": names[q],
                            "param": mp.detach().clone(),
                            **{k: v.detach().clone() for k, v in o.optimizer.state[mp].items() if torch.is_tensor(v)},
                        }
                    )
            if not rec["state"]:
                for grp in o.optimizer.param_groups:
                    for q in grp["params"]:
                        rec["state"].append(
                            {
                                "name": names[q],
                                "param": q.detach().clone(),
                                **{k: v.detach().clone() for k, v in o.optimizer.state[q].items() if torch.is_tensor(v)},
                            }
                        )
        d["optim"].append(rec)
    os.makedirs(os.path.join(a.dump, "golden"), exist_ok=True)
    torch.save(d, os.path.join(a.dump, "golden", f"rank_{rank:02d}.pt"))


def worker(rank: int, a: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(a.nproc))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    install_cpu_shim()
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import unwrap_model

    from ucp_dcp.frameworks.megatron import MegatronState

    dist.init_process_group("gloo", rank=rank, world_size=a.nproc)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
    )
    # Alike on ranks that hold copies of one tensor (norms on tp ranks, everything on dp ranks): weights are cut from whole ones.
    torch.manual_seed(a.seed + 100 * ps.get_pipeline_model_parallel_rank())
    cfg = build_config(a)
    chunks = []
    for v in range(a.vpp or 1):
        stage = v if a.vpp else None
        pre = ps.is_pipeline_first_stage(ignore_virtual=a.vpp is None, vp_stage=stage)
        post = ps.is_pipeline_last_stage(ignore_virtual=a.vpp is None, vp_stage=stage)
        m = build_model(a, cfg, pre, post, stage)
        chunks.append(Float16Module(cfg, m) if a.bf16 else m)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=a.bf16,
        overlap_grad_reduce=a.bucket_size is not None,
        use_distributed_optimizer=a.dist_opt,
        bucket_size=a.bucket_size,
        check_for_nan_in_grad=False,
    )
    model = [DistributedDataParallel(config=cfg, ddp_config=ddp, module=m, disable_bucketing=(i > 0)) for i, m in enumerate(chunks)]
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        bf16=a.bf16,
        params_dtype=torch.bfloat16 if a.bf16 else torch.float32,
        use_distributed_optimizer=a.dist_opt,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(config, model)
    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    extra = {"iteration": 0}

    def state() -> MegatronState:
        sharded = [m.sharded_state_dict(metadata=metadata) for m in unwrap_model(model)]
        return MegatronState(sharded, optimizer, vocab=a.vocab, extra=extra)

    if a.load:
        report = state().load(a.load)
        print(f"[rank {rank}] iteration {extra['iteration']}, unexpected {report.unexpected[:3]}", flush=True)
        # a job in fp32 takes its weights from the masters, and has no use for 16-bit weights
        unused = [key for key in report.unexpected if a.bf16 or not key.startswith("model.")]
        assert extra["iteration"] == 2 and not unused, unused
        a.dump = a.out + "/loaded"
        dump_golden(a, rank, model, optimizer, extra["iteration"])

    generator = torch.Generator().manual_seed(1234 + ps.get_data_parallel_rank())

    def batches() -> Any:
        while True:
            yield torch.randint(0, a.vocab, (2, a.seq + 1), generator=generator)

    def forward(iterator: Any, m: Any) -> Any:
        tokens = next(iterator)
        positions = torch.arange(a.seq).unsqueeze(0).expand(2, -1)
        mask = torch.triu(torch.ones(1, 1, a.seq, a.seq, dtype=torch.bool), 1)
        out = m(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
        return out, lambda o: (o.float().mean(), {"loss": o.detach().float().mean()})

    for _ in range(a.steps):
        for m in model:
            m.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [batches() for _ in model]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=2,
            seq_length=a.seq,
            micro_batch_size=2,
            decoder_seq_length=a.seq,
            forward_only=False,
        )
        finalize_model_grads(model)
        optimizer.step()
        extra["iteration"] += 1
    if a.save:
        extra["iteration"] = 2
        state().save(a.save)
        a.dump = a.out + "/saved"
        dump_golden(a, rank, model, optimizer, 2)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--arch", choices=["gpt", "llama", "mixtral"], default="llama")
    for name, default in (("nproc", 1), ("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1), ("layers", 4), ("hidden", 32), ("heads", 4)):
        p.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("kv-heads", 2), ("ffn", 48), ("experts", 4), ("vocab", 61), ("make-vocab-size-divisible-by", 8), ("seq", 8)):
        p.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("steps", 2), ("seed", 7), ("port", 29711)):
        p.add_argument(f"--{name}", type=int, default=default)
    for name in ("vpp", "etp", "bucket-size"):
        p.add_argument(f"--{name}", type=int)
    for name in ("sp", "bf16", "tied", "dist-opt"):
        p.add_argument(f"--{name}", action="store_true")
    p.add_argument("--out", required=True)
    p.add_argument("--save")
    p.add_argument("--load")
    a = p.parse_args()
    import torch.multiprocessing as mp

    mp.start_processes(worker, args=(a,), nprocs=a.nproc, start_method="spawn")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
