"""The ready specs for Megatron against tensors cut by hand: nothing here takes a cut from a spec.

Every world is put together from the fragments of all its ranks (a save), and filled again from the global tensors (a load).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import megatron_truth
import pytest
import torch

from ucp_dcp.errors import LayoutError, SpecError
from ucp_dcp.layout import Layout, collect
from ucp_dcp.names import Role
from ucp_dcp.spec import LayoutSpec, mla_down_sharded

VOCAB, PADDED_TO, HIDDEN, HEAD, FFN, MOE_FFN, SHARED = 10, 4, 8, 2, 24, 12, 16
Q_RANK, KV_RANK, POS = 8, 6, 2


@dataclass(frozen=True)
class Tensor:
    """A global tensor and how it is cut: ``tp`` is (dim, number of fused parts) or None; ``at`` is "first", "last" or the layer."""

    value: torch.Tensor
    at: str | int
    tp: tuple[int, int] | None
    expert: int | None = None
    vocabulary: bool = False
    role: str = "weight"


@dataclass
class Model:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: int = 0
    experts: int = 0
    count: int = 0

    def add(self, name: str, shape: tuple[int, ...], at: str | int, tp: tuple[int, int] | None = None, **more: Any) -> None:
        n = torch.Size(shape).numel()
        value = (torch.arange(n, dtype=torch.float32) + self.count).reshape(shape)
        self.count += n
        self.tensors[name] = Tensor(value, at, tp, **more)


def transformer(layers: int, heads: int, kv: int, *, gated: bool, biases: bool, te: bool = False, experts: int = 0, mla: str = "") -> Model:
    m = Model(layers=layers, experts=experts)
    gates = 2 if gated else 1
    m.add("embedding.word_embeddings.weight", (VOCAB, HIDDEN), "first", (0, 1), vocabulary=True)
    if biases:
        m.add("embedding.position_embeddings.weight", (6, HIDDEN), "first")
    for i in range(layers):
        at, attention = f"decoder.layers.{i}", f"decoder.layers.{i}.self_attention"
        norm = f"{attention}.linear_qkv.layer_norm_weight" if te and not mla else f"{at}.input_layernorm.weight"
        m.add(norm, (HIDDEN,), i)
        if mla:
            down = (0, 1) if mla == "local" else None
            m.add(f"{attention}.linear_q_down_proj.weight", (Q_RANK, HIDDEN), i, down)
            m.add(f"{attention}.linear_q_up_proj.weight", (heads * 4, Q_RANK), i, (0, 1))
            m.add(f"{attention}.linear_kv_down_proj.weight", (KV_RANK + POS, HIDDEN), i, down)
            m.add(f"{attention}.linear_kv_up_proj.weight", (heads * 6, KV_RANK), i, (0, 1))
            m.add(f"{attention}.{'linear_kv_up_proj.layer_norm_weight' if mla == 'te' else 'kv_layernorm.weight'}", (KV_RANK,), i)
        else:
            m.add(f"{attention}.linear_qkv.weight", ((heads + 2 * kv) * HEAD, HIDDEN), i, (0, 1))
            if biases:
                m.add(f"{attention}.linear_qkv.bias", ((heads + 2 * kv) * HEAD,), i, (0, 1))
        m.add(f"{attention}.linear_proj.weight", (HIDDEN, heads * HEAD), i, (1, 1))
        m.add(f"{at}.mlp.linear_fc1.layer_norm_weight" if te and not experts else f"{at}.pre_mlp_layernorm.weight", (HIDDEN,), i)
        if biases:
            m.add(f"{attention}.linear_proj.bias", (HIDDEN,), i)
            m.add(f"{at}.mlp.linear_fc1.bias", (gates * FFN,), i, (0, gates))
            m.add(f"{at}.mlp.linear_fc2.bias", (HIDDEN,), i)
        if experts and i:  # the first layer is dense, as in DeepSeek
            m.add(f"{at}.mlp.router.weight", (experts, HIDDEN), i)
            m.add(f"{at}.mlp.router.expert_bias", (experts,), i, role="buffer")
            m.add(f"{at}.mlp.shared_experts.linear_fc1.weight", (2 * SHARED, HIDDEN), i, (0, 2))
            m.add(f"{at}.mlp.shared_experts.linear_fc2.weight", (HIDDEN, SHARED), i, (1, 1))
            for e in range(experts):
                one = f"{at}.mlp.experts.local_experts.{e}"
                m.add(f"{one}.linear_fc1.weight", (2 * MOE_FFN, HIDDEN), i, (0, 2), expert=e)
                m.add(f"{one}.linear_fc2.weight", (HIDDEN, MOE_FFN), i, (1, 1), expert=e)
        else:
            m.add(f"{at}.mlp.linear_fc1.weight", (gates * FFN, HIDDEN), i, (0, gates))
            m.add(f"{at}.mlp.linear_fc2.weight", (HIDDEN, FFN), i, (1, 1))
    m.add("decoder.final_layernorm.weight", (HIDDEN,), "last")
    m.add("output_layer.weight", (VOCAB, HIDDEN), "last", (0, 1), vocabulary=True)
    return m


@dataclass(frozen=True)
class Grid:
    """``stages``: layers of each chunk, [chunk][pp]; more than one row is a virtual pipeline."""

    stages: tuple[tuple[int, ...], ...]
    tp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    grouped: bool = False
    """Experts under the names of a grouped GEMM."""

    @property
    def pp(self) -> int:
        return len(self.stages[0])

    def first_layer(self, chunk: int, pp: int) -> int:
        flat = list(itertools.chain(*self.stages))
        return sum(flat[: chunk * self.pp + pp])

    def ranks(self) -> Iterator[dict[str, tuple[int, int]]]:
        assert self.tp * self.dp % (self.ep * self.etp) == 0
        for pp in range(self.pp):
            for inner in range(self.tp * self.dp):
                etp, ep, edp = inner % self.etp, inner // self.etp % self.ep, inner // (self.etp * self.ep)
                sizes = {"pp": (pp, self.pp), "tp": (inner % self.tp, self.tp), "dp": (inner // self.tp, self.dp)}
                yield sizes | {"ep": (ep, self.ep), "etp": (etp, self.etp), "edp": (edp, self.tp * self.dp // (self.ep * self.etp))}

    def cut(self, tensor: Tensor, rank: Mapping[str, tuple[int, int]]) -> torch.Tensor:
        value = tensor.value
        if tensor.vocabulary:
            rows = -(-len(value) // (PADDED_TO * self.tp)) * PADDED_TO * self.tp
            value = torch.cat([value, torch.full((rows - len(value), HIDDEN), -1.0)])
        if tensor.tp is None:
            return value.clone()
        k, n = rank["etp" if tensor.expert is not None else "tp"]
        dim, parts = tensor.tp
        return torch.cat([part.chunk(n, dim)[k] for part in value.chunk(parts, dim)], dim)

    def chunks(self, model: Model, rank: Mapping[str, tuple[int, int]]) -> list[dict[str, tuple[str, torch.Tensor]]]:
        """Per virtual chunk: local name -> (fqn, local tensor)."""
        pp, out = rank["pp"][0], []
        for chunk, row in enumerate(self.stages):
            low, own = self.first_layer(chunk, pp), {}
            for fqn, tensor in model.tensors.items():
                at = tensor.at
                if isinstance(at, int):
                    here = low <= at < low + row[pp]
                else:
                    here = (chunk, pp) == ((0, 0) if at == "first" else (len(self.stages) - 1, self.pp - 1))
                if tensor.expert is not None and here:
                    each = model.experts // self.ep
                    here = tensor.expert // each == rank["ep"][0]
                if not here:
                    continue
                name = fqn.replace(f"layers.{at}.", f"layers.{at - low}.") if isinstance(at, int) else fqn
                if tensor.expert is not None:
                    local = tensor.expert % (model.experts // self.ep)
                    name = name.replace(f"local_experts.{tensor.expert}.", f"local_experts.{local}.")
                    if self.grouped:
                        head, _, tail = name.partition(f"local_experts.{local}.")
                        name = f"{head}{tail}{local}"
                own[name] = (fqn, self.cut(tensor, rank))
            out.append(own)
        return out


def check(spec: str, model: Model, grid: Grid, variables: dict[str, Any]) -> None:
    loaded = LayoutSpec.load(spec)
    stored: dict[str, torch.Tensor] = {}
    buffers = set()
    for rank in grid.ranks():
        chunks = grid.chunks(model, rank)
        several = len(chunks) > 1
        names = [f"model{c}" if several else "model" for c in range(len(chunks))]
        state: dict[str, Any] = {root: {n: t for n, (_, t) in own.items()} for root, own in zip(names, chunks, strict=True)}
        # the optimizer of a chunk keeps its state under the same local names
        weights = {n: t for n, (f, t) in chunks[0].items() if model.tensors[f].role == "weight"}
        state["optimizer"] = {"state": {n: {"exp_avg": t + 0.5, "step": torch.tensor(3.0)} for n, t in weights.items()}}
        coords = {axis: rank[axis] for axis in loaded.axes}
        offsets = {root: {"layer_offset": grid.first_layer(c, rank["pp"][0])} for c, root in enumerate(names)}
        layout = Layout(
            loaded,
            coords,
            {**dict.fromkeys(names, "model"), "optimizer": "optimizer"},
            {"vocab": VOCAB, "vocab_multiple": PADDED_TO, "ffn": FFN, "layer_offset": grid.first_layer(0, rank["pp"][0]), **variables},
            root_variables=offsets,
        )
        before = [{name: t.clone() for name, (_, t) in own.items()} for own in chunks]
        collected = collect(state, layout=layout)
        for f in collected.fragments:
            if f.role == Role.BUFFER:
                buffers.add(f.fqn)
            label = f.fqn if f.role in (Role.WEIGHT, Role.BUFFER) else f"{f.fqn} {f.state}"
            full = stored.setdefault(label, torch.full(f.shape, float("nan")))
            if not f.box.empty:
                part = full[f.box.slices()]
                assert bool((part.isnan() | (part == f.view)).all()), f"{label}: ranks do not agree"
                part.copy_(f.view)
        for f in collected.fragments:  # a load into spoiled memory
            if f.role in (Role.WEIGHT, Role.BUFFER):
                f.view.fill_(-7.0)
        for f in collected.fragments:
            if f.role in (Role.WEIGHT, Role.BUFFER) and not f.box.empty:
                f.view.copy_(model.tensors[f.fqn].value[f.box.slices()])
        for own, whole in zip(chunks, before, strict=True):
            for name, (_, t) in own.items():
                assert torch.equal(t, whole[name]), name
    for fqn, tensor in model.tensors.items():
        assert torch.equal(stored.pop(fqn), tensor.value), fqn
        if len(grid.stages) == 1 and tensor.role == "weight":
            assert torch.equal(stored.pop(f"{fqn} exp_avg"), tensor.value + 0.5), fqn
            assert stored.pop(f"{fqn} step").item() == 3.0
    assert buffers == {f for f, t in model.tensors.items() if t.role == "buffer"}
    if len(grid.stages) == 1:
        assert not stored


GRIDS = {
    "tp2_pp_uneven": Grid(((3, 1),), tp=2),
    "tp4_more_than_kv_heads_dp2": Grid(((4,),), tp=4, dp=2),
    "vpp2_pp2": Grid(((1, 1), (1, 1)), tp=2),
    "vpp2_uneven": Grid(((1, 2), (1, 0))),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_gpt(grid: str) -> None:
    check("megatron-gpt", transformer(4, 4, 4, gated=False, biases=True), GRIDS[grid], {})


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_llama(grid: str, te: bool) -> None:
    check("megatron-llama", transformer(4, 4, 2, gated=True, biases=False, te=te), GRIDS[grid], {})


MOE = {
    "ep2": Grid(((2, 1),), tp=1, dp=2, ep=2),
    "tp2_ep2_etp1": Grid(((3,),), tp=2, dp=1, ep=2),
    "tp2_ep2_etp2_dp2": Grid(((1, 2),), tp=2, dp=2, ep=2, etp=2),
    "ep4_of_tp2_dp2_grouped": Grid(((3,),), tp=2, dp=2, ep=4, grouped=True),
    "vpp2_ep2": Grid(((1, 1), (1, 0)), tp=2, ep=2),
}
MOE_VALUES = {"experts": 4, "moe_ffn": MOE_FFN, "shared_ffn": SHARED}


@pytest.mark.parametrize("grid", MOE)
def test_mixtral(grid: str) -> None:
    check("megatron-mixtral", transformer(3, 4, 2, gated=True, biases=False, experts=4), MOE[grid], MOE_VALUES)


@pytest.mark.parametrize("form", ["local", "te"])
@pytest.mark.parametrize("grid", [Grid(((1, 2),), tp=2), Grid(((3,),), tp=4), Grid(((3,),), tp=1), Grid(((2, 1),), tp=2, ep=2)])
def test_mla_in_both_forms(grid: Grid, form: str) -> None:
    model = transformer(3, 4, 4, gated=True, biases=False, experts=4, mla=form)
    rank = next(iter(grid.ranks()))
    shapes = {name: tuple(t.shape) for own in grid.chunks(model, rank) for name, (_, t) in own.items()}
    sizes = {"q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_pos_emb_head_dim": POS}
    down = mla_down_sharded(shapes, **sizes, tp=grid.tp)
    assert grid.tp == 1 or down == (form == "local")
    check("megatron-mla", model, grid, {**MOE_VALUES, **sizes, "down_sharded": down})
    if grid.tp > 1:  # a wrong answer is refused, not saved
        with pytest.raises(LayoutError, match=r"linear_q_down_proj.weight.*expected"):
            check("megatron-mla", model, grid, {**MOE_VALUES, **sizes, "down_sharded": not down})


def test_mla_shapes_of_neither_form() -> None:
    sizes: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 2, "tp": 2}
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    assert mla_down_sharded({name: (4, 8)}, **sizes) and not mla_down_sharded({name: (8, 8)}, **sizes)
    assert mla_down_sharded({}, **sizes)
    with pytest.raises(SpecError, match=r"linear_q_down_proj.weight: found 5 rows, expected 8 .* or 4"):
        mla_down_sharded({name: (5, 8)}, **sizes)
    with pytest.raises(SpecError, match="one form was expected"):
        mla_down_sharded({name: (4, 8), name.replace("_q_", "_kv_"): (8, 8)}, **sizes)
    with pytest.raises(SpecError, match="q_lora_rank is None"):
        mla_down_sharded({name: (4, 8)}, **{**sizes, "q_lora_rank": None})


def test_expert_buffers_are_over_expert_data_parallelism() -> None:
    """Megatron's distributed optimizer: dense parameters over dp, experts over edp, each in reverse order, aligned and padded."""
    model = transformer(2, 4, 2, gated=True, biases=False, experts=4)
    grid = Grid(((2,),), tp=2, dp=2, ep=2)
    stored: dict[str, torch.Tensor] = {}
    for rank in grid.ranks():
        (own,) = grid.chunks(model, rank)
        own = {n: (f, t) for n, (f, t) in own.items() if model.tensors[f].role == "weight"}
        groups = {True: [], False: []}
        for name, (fqn, _) in own.items():
            groups[model.tensors[fqn].expert is not None].append(name)
        state = {}
        for expert, axis in ((False, "dp"), (True, "edp")):
            line = torch.zeros(0)
            for name in reversed(groups[expert]):
                line = torch.cat([line, torch.full((-len(line) % 64,), 9.0), own[name][1].reshape(-1) + 0.5])
            k, n = rank[axis]
            line = torch.cat([line, torch.full((-len(line) % (128 * n),), 9.0)])
            state["expert_group_0" if expert else "flat_group_0"] = {"exp_avg": line.chunk(n)[k].clone()}
        layout = Layout(
            "megatron-mixtral",
            rank,
            variables={
                **{"vocab": VOCAB, "vocab_multiple": PADDED_TO, "ffn": FFN, "layer_offset": 0, **MOE_VALUES},
                **{"group_align": 64, "group_pad": 128, "groups": [groups[False][::-1]], "expert_groups": [groups[True][::-1]]},
            },
        )
        whole = {n: t for n, (_, t) in grid.chunks(model, rank)[0].items()}
        for f in layout.fragments({"model": whole, "optimizer": {"state": state}}):
            if f.role == Role.STATE and not f.box.empty:
                stored.setdefault(f.fqn, torch.full(f.shape, float("nan")))[f.box.slices()] = f.view
    assert set(stored) == {f for f, t in model.tensors.items() if t.role == "weight"}
    for fqn, value in stored.items():
        assert torch.equal(value, model.tensors[fqn].value + 0.5), fqn


def bloom() -> dict[str, tuple[tuple[int, ...], int, tuple[int, int] | None]]:
    """name -> (shape, pipeline stage of two, cut). Layers 3 and 4 of the pipeline module, the final norm is layer 6."""
    embed = "tied_modules.embed.word_embeddings"
    out: dict[str, tuple[tuple[int, ...], int, tuple[int, int] | None]] = {
        f"{embed}.weight": ((VOCAB, HIDDEN), -1, (0, 1)), f"{embed}.norm.weight": ((HIDDEN,), -1, None),
        f"{embed}.norm.bias": ((HIDDEN,), -1, None), "6.weight": ((HIDDEN,), 1, None), "6.bias": ((HIDDEN,), 1, None),
    }  # fmt: skip
    for i, stage in ((3, 0), (4, 1)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out |= {f"{i}.{norm}.{w}": ((HIDDEN,), stage, None) for w in ("weight", "bias")}
        for part, shape, cut in (
            ("self_attention.query_key_value", (3 * HIDDEN, HIDDEN), (0, 1)),
            ("self_attention.dense", (HIDDEN, HIDDEN), (1, 1)),
            ("mlp.dense_h_to_4h", (4 * HIDDEN, HIDDEN), (0, 1)),
            ("mlp.dense_4h_to_h", (HIDDEN, 4 * HIDDEN), (1, 1)),
        ):
            out[f"{i}.{part}.weight"] = (shape, stage, cut)
            out[f"{i}.{part}.bias"] = (shape[:1], stage, cut if cut[0] == 0 else None)
    return out


@pytest.mark.parametrize("drifted", [False, True])
def test_bloom(drifted: bool) -> None:
    model = {n: torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, (n, (shape, _, _)) in enumerate(bloom().items())}
    stored: dict[str, torch.Tensor] = {}
    averaged = set()
    grid = Grid(((1, 1),), tp=2)
    for rank in grid.ranks():
        pp = rank["pp"][0]
        held = {n for n, (_, stage, _) in bloom().items() if stage in (-1, pp)}
        local = {n: grid.cut(Tensor(model[n], "first", bloom()[n][2], vocabulary=n.endswith("word_embeddings.weight")), rank) for n in held}
        variables = {"vocab": VOCAB, "vocab_multiple": PADDED_TO, "drifted": drifted}
        layout = Layout("megatron-deepspeed-bloom", {a: rank[a] for a in ("pp", "tp", "dp")}, variables=variables)
        for f in layout.fragments({"model": local}):
            full = stored.setdefault(f.fqn, torch.full(f.shape, float("nan")))
            full[f.box.slices()] = f.view
            averaged |= {f.fqn} if f.average else set()
    assert stored.keys() == model.keys()
    for name, value in model.items():
        assert torch.equal(stored[name], value), name
    expected = {n for n, (_, _, cut) in bloom().items() if cut is None and not n.startswith("6.")}
    assert averaged == (expected if drifted else set())


@pytest.mark.parametrize("name", [n for n in megatron_truth.names() if not n.startswith("old") and n != "e2_mb_dp3"])
def test_live_tensors_of_real_runs(name: str) -> None:
    """The local parameters of every rank of a run of megatron-core 0.19.2, under its ready spec, are the global tensors."""
    path = megatron_truth.find(name)
    assert path is not None
    dumps = [torch.load(f, weights_only=True) for f in sorted(path.glob("golden/rank_*.pt"))]
    if not dumps:
        pytest.skip("no dumps of live tensors beside it")
    truth = megatron_truth.truth(path)
    sizes = {axis: 1 + max(d["coords"][axis] for d in dumps) for axis in dumps[0]["coords"]}
    attrs = {n: a for d in dumps for chunk in d["param_attrs"] for n, a in chunk.items()}
    moe = any(".experts." in n for n in truth.weights)
    gated = any(a.get("partition_stride") == 2 for a in attrs.values())
    fc1 = [t.shape[0] // (2 if gated else 1) for n, t in truth.weights.items() if n.endswith("linear_fc1.weight")]
    values: dict[str, Any] = {"vocab": megatron_truth.VOCAB, "vocab_multiple": 8, "ffn": fc1[0], "tied": bool(truth.tied) or "tied" in name}
    values |= {"experts": 4, "moe_ffn": fc1[0]} if moe else {}
    if not moe and not gated:
        values["swiglu"] = False
    spec = LayoutSpec.load("megatron-mixtral" if moe else "megatron-llama")
    chunks = len(dumps[0]["params"])
    layers = 1 + max(int(n.split(".")[2]) for n in truth.weights if n.startswith("decoder.layers."))
    per = layers // (sizes["pp"] * chunks)
    stored: dict[str, torch.Tensor] = {}
    for d in dumps:
        roots = [f"model{c}" for c in range(chunks)]
        offset = {root: {"layer_offset": (c * sizes["pp"] + d["coords"]["pp"]) * per} for c, root in enumerate(roots)}
        coords = {axis: (d["coords"][axis], sizes[axis]) for axis in spec.axes}
        layout = Layout(spec, coords, dict.fromkeys(roots, "model"), {**values, "layer_offset": 0}, root_variables=offset)
        for f in layout.fragments(dict(zip(roots, d["params"], strict=True))):
            full = stored.setdefault(f.fqn, torch.full(f.shape, float("nan"), dtype=f.view.dtype))
            full[f.box.slices()] = f.view
    expected = {n: t for n, t in truth.weights.items() if n not in truth.tied}
    assert stored.keys() == expected.keys()
    for fqn, value in expected.items():
        assert torch.equal(stored[fqn], value), fqn
