"""``MegatronState`` over stand-ins with the fields that megatron-core 0.19.2 gives (written down from live objects of it)."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ucp_dcp
from ucp_dcp.errors import LayoutError, UnsupportedError
from ucp_dcp.frameworks.megatron import MegatronState
from ucp_dcp.layout import collect
from ucp_dcp.names import Role

VOCAB, PADDED, HIDDEN, FFN, LAYERS, EXPERTS = 5, 8, 4, 6, 2, 4


@dataclass
class ShardedTensor:
    key: str
    data: Any
    dtype: Any
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: Any = None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: Any = None


@dataclass
class ShardedTensorFactory:
    key: str
    data: Any
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]
    replica_id: Any = 0
    flattened_range: Any = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: Any = 0

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}_{'.'.join(map(str, self.global_shape))}"


def sharded(
    key: str, data: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...], prepended: int = 0, **more: Any
) -> ShardedTensor:
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), whole, offset, prepend_axis_num=prepended, **more)


def swiglu(key: str, data: torch.Tensor, lead: tuple[int, ...], sizes: tuple[int, ...], tp: int, n: int) -> ShardedTensorFactory:
    """As ``apply_swiglu_sharded_factory`` builds it: gate and up as two shards of one key."""

    def build(key: str, data: torch.Tensor, replica: Any, flattened: Any) -> list[ShardedTensor]:
        gate, up = torch.chunk(data, 2, dim=0)
        rows, whole = len(gate), (*sizes, 2 * len(gate) * n, *data.shape[1:])
        return [sharded(key, part, whole, (*lead, (half * n + tp) * rows, 0), len(lead)) for half, part in enumerate((gate, up))]

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat(parts))


def whole_model() -> dict[str, torch.Tensor]:
    shapes = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        at = f"decoder.layers.{i}"
        shapes |= {f"{at}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,), f"{at}.mlp.linear_fc1.weight": (2 * FFN, HIDDEN)}
        shapes |= {f"{at}.mlp.linear_fc2.weight": (HIDDEN, FFN), f"{at}.mlp.router.expert_bias": (EXPERTS,)}
        for e in range(EXPERTS):
            shapes[f"{at}.mlp.experts.local_experts.{e}.linear_fc1.weight"] = (2 * FFN, HIDDEN)
    return {n: torch.arange(float(torch.Size(s).numel())).reshape(s) + 1000 * k for k, (n, s) in enumerate(shapes.items())}


@dataclass
class Live:
    """One rank of a job of ``n`` tensor-parallel (and as many expert-parallel) ranks that holds the whole model's values."""

    tp: int
    n: int
    scale: float = 1.0
    params: dict[str, torch.Tensor] = field(default_factory=dict)

    def sharded(self) -> dict[str, Any]:
        full, k, n, out = {f: t * self.scale for f, t in whole_model().items()}, self.tp, self.n, {}

        def own(name: str, value: torch.Tensor) -> torch.Tensor:
            self.params[name] = torch.nn.Parameter(value.clone())
            return self.params[name]

        embed = torch.cat([full["embedding.word_embeddings.weight"], torch.full((PADDED - VOCAB, HIDDEN), -1.0)]).chunk(n)[k]
        out["embedding.word_embeddings.weight"] = sharded(
            "embedding.word_embeddings.weight", own("embedding", embed), (PADDED, HIDDEN), (k * PADDED // n, 0), allow_shape_mismatch=True
        )
        out["norm"] = sharded("decoder.final_layernorm.weight", own("norm", full["decoder.final_layernorm.weight"]), (HIDDEN,), (0,))
        for i in range(LAYERS):
            at = f"decoder.layers.{i}"
            name = "self_attention.linear_qkv.layer_norm_weight"
            out[f"{at}.{name}"] = sharded(f"decoder.layers.{name}", own(f"{i}.ln", full[f"{at}.{name}"]), (LAYERS, HIDDEN), (i, 0), 1)
            fc1 = torch.cat([half.chunk(n)[k] for half in full[f"{at}.mlp.linear_fc1.weight"].chunk(2)])
            out[f"{at}.fc1"] = swiglu("decoder.layers.mlp.linear_fc1.weight", own(f"{i}.fc1", fc1), (i,), (LAYERS,), k, n)
            fc2 = full[f"{at}.mlp.linear_fc2.weight"].chunk(n, 1)[k]
            key = "decoder.layers.mlp.linear_fc2.weight"
            out[f"{at}.fc2"] = sharded(key, own(f"{i}.fc2", fc2), (LAYERS, HIDDEN, FFN), (i, 0, k * FFN // n), 1)
            bias = full[f"{at}.mlp.router.expert_bias"].clone()
            out[f"{at}.bias"] = sharded("decoder.layers.mlp.router.expert_bias", bias, (LAYERS, EXPERTS), (i, 0), 1)
            for e in range(EXPERTS // n):
                number = k * EXPERTS // n + e
                value = own(f"{i}.expert{e}", full[f"{at}.mlp.experts.local_experts.{number}.linear_fc1.weight"])
                key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
                out[f"{at}.expert{e}"] = swiglu(key, value, (i, number), (LAYERS, EXPERTS), 0, 1)
            out[f"{at}._extra_state"] = ShardedObject("decoder.layers.self_attention._extra_state", io.BytesIO())
        out["rng"] = ShardedObject("rng_state", {"seed": k}, (n,), (k,))
        out["copy"] = ShardedObject("rng_state", {"seed": -1}, (n,), (k,), replica_id=(0, 0, 1))
        return out

    def distributed(self, dp: int, of: int, step: bool) -> Any:
        """A distributed optimizer of data-parallel rank ``dp``: one bucket, params in reverse order, cut into equal parts."""
        params = list(reversed(self.params.values()))
        total = -(-sum(p.numel() for p in params) // of) * of
        low, high = dp * total // of, (dp + 1) * total // of
        bucket, index, mains, state, at = {}, {}, [], {}, 0
        for p in params:
            a, b = max(low, at), min(high, at + p.numel())
            if a < b:
                main = p.detach().reshape(-1)[a - at : b - at] + 0.25
                bucket[p] = {"param": SimpleNamespace(start=a - at, end=b - at)}
                index[p] = (0, len(mains))
                mains.append(main)
                state[main] = {"exp_avg": main + 1, "exp_avg_sq": main + 2} | ({"step": torch.tensor(9.0)} if step else {})
            at += p.numel()
        group = {"params": mains, "lr": 0.1} | ({} if step else {"step": 9})
        inner = SimpleNamespace(param_groups=[group], state=state)
        return SimpleNamespace(
            optimizer=inner, gbuf_ranges=[{("bf16", "fp32"): [{"param_map": bucket}]}], model_param_group_index_map=index, config=None
        )

    def plain(self) -> Any:
        """Float16OptimizerWithFloat16Params."""
        params = list(self.params.values())
        mains = [p.detach() + 0.25 for p in params]
        state = {m: {"exp_avg": m + 1, "exp_avg_sq": m + 2, "step": torch.tensor(9.0)} for m in mains}
        inner = SimpleNamespace(param_groups=[{"params": mains}], state=state)
        optimizer = SimpleNamespace(optimizer=inner, float16_groups=[params], fp32_from_float16_groups=[mains], fp32_from_fp32_groups=[[]])
        return SimpleNamespace(chained_optimizers=[optimizer, SimpleNamespace(is_stub_optimizer=True)])


def expected() -> dict[str, torch.Tensor]:
    out = {}
    for name, value in whole_model().items():
        buffer = name.endswith("expert_bias")
        out[f"model.{name}"] = value
        if not buffer:
            out |= {f"{name} master": value + 0.25, f"{name} exp_avg": value + 1.25, f"{name} exp_avg_sq": value + 2.25}
            out[f"{name} step"] = torch.tensor(9.0)
    return out


def put_together(states: list[MegatronState]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for state in states:
        for f in collect(state.state_dict, layout=state.layout).fragments:
            weight = f.role in (Role.WEIGHT, Role.BUFFER)
            assert (f.role == Role.BUFFER) == f.fqn.endswith("expert_bias")
            label = f"model.{f.fqn}" if weight else f"{f.fqn} {f.state or 'master'}"
            full = out.setdefault(label, torch.full(f.shape, float("nan")))
            part = full[f.box.slices()]
            assert bool((part.isnan() | (part == f.view)).all()), label
            full[f.box.slices()] = f.view
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for label, value in b.items():
        assert torch.equal(a[label], value), label


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 3), (2, 1), (2, 5)])
def test_ranges_of_a_distributed_optimizer(tp: int, dp: int, step: bool) -> None:
    """Ranges begin and end anywhere: in the gate, in up, in an expert; five ranks cut every parameter."""
    states = []
    for k in range(tp):
        for r in range(dp):
            live = Live(k, tp)
            tree = live.sharded()
            states.append(MegatronState(tree, live.distributed(r, dp, step), vocab=VOCAB))
    same(put_together(states), expected())


def test_the_plain_optimizer_and_virtual_chunks() -> None:
    states = []
    for k in range(2):
        live = Live(k, 2)
        tree = live.sharded()
        first = {n: v for n, v in tree.items() if "layers.1" not in n}
        states.append(MegatronState([first, {n: v for n, v in tree.items() if n not in first}], live.plain(), vocab=VOCAB))
    same(put_together(states), expected())
    assert [s.state_dict["objects"] for s in states] == [{f"rng_state/shard_{k}_2": {"seed": k}} for k in range(2)]


@pytest.mark.parametrize("step", [True, False])
def test_save_and_load_in_place(tmp_path: Path, step: bool) -> None:
    """One rank of each: a save, and a load into other numbers; the live tensors themselves change."""
    live = Live(0, 1)
    tree = live.sharded()
    extra = {"iteration": 7}
    MegatronState(tree, live.distributed(0, 1, step), vocab=VOCAB, extra=extra).save(tmp_path, no_dist=True)
    other = Live(0, 1, scale=-1.0)
    tree, extra = other.sharded(), {"iteration": 0}
    optimizer = other.distributed(0, 1, step)
    group = optimizer.optimizer.param_groups[0]
    for main, values in optimizer.optimizer.state.items():
        main.zero_()
        values["exp_avg"].zero_()
        if step:
            values["step"].zero_()
    if not step:
        group["step"] = 0
    report = MegatronState(tree, optimizer, vocab=VOCAB, extra=extra).load(tmp_path, no_dist=True)
    assert not report.unexpected and extra == {"iteration": 7}
    for name, p in live.params.items():
        if name == "embedding":
            assert torch.equal(other.params[name][:VOCAB], p[:VOCAB]) and not other.params[name][VOCAB:].any()
        else:
            assert torch.equal(other.params[name], p), name
    assert group["step"] == 9 if not step else all(v["step"] == 9 for v in optimizer.optimizer.state.values())
    assert isinstance(group.get("step", 0), int)
    same(put_together([MegatronState(tree, optimizer, vocab=VOCAB)]), expected())


def test_states_are_made_before_a_load(tmp_path: Path) -> None:
    live = Live(0, 1)
    tree = live.sharded()
    MegatronState(tree, live.distributed(0, 1, True), vocab=VOCAB).save(tmp_path, no_dist=True)
    optimizer = live.distributed(0, 1, True)
    kept, made = dict(optimizer.optimizer.state), []
    optimizer.optimizer.state.clear()

    def make() -> None:
        made.append(1)
        optimizer.optimizer.state.update({m: {k: torch.zeros_like(v) for k, v in s.items()} for m, s in kept.items()})

    optimizer._init_optimizer_states_with_dummy_values = make
    MegatronState(tree, optimizer, vocab=VOCAB).load(tmp_path, no_dist=True)
    assert made == [1]
    same(put_together([MegatronState(tree, optimizer, vocab=VOCAB)]), expected())


def test_the_fallback_to_adam_of_torch_gets_its_step(tmp_path: Path) -> None:
    """megatron-core 0.19.2 without TE and Apex: its ``init_state_fn`` makes the moments of torch's AdamW and no ``step``."""
    live = Live(0, 1)
    tree = live.sharded()
    MegatronState(tree, live.distributed(0, 1, True), vocab=VOCAB).save(tmp_path, no_dist=True)
    other = Live(0, 1)
    tree = other.sharded()
    inner = torch.optim.AdamW(other.params.values())

    def init(optimizer: Any, config: Any) -> None:
        for p in other.params.values():
            optimizer.state[p] = {"exp_avg": torch.zeros_like(p.data), "exp_avg_sq": torch.zeros_like(p.data)}

    optimizer = SimpleNamespace(optimizer=inner, init_state_fn=init, config=None)
    report = MegatronState(tree, optimizer, vocab=VOCAB).load(tmp_path, no_dist=True, source="weight")
    assert not [key for key in report.unexpected if not key.endswith(".master")]
    assert all(state["step"] == 9 and state["exp_avg"].any() for state in inner.state.values())


def test_a_padded_vocabulary_without_its_true_size_stays_padded(tmp_path: Path) -> None:
    MegatronState(Live(0, 1).sharded()).save(tmp_path, no_dist=True)
    stored = ucp_dcp.open_checkpoint(str(tmp_path))
    assert stored["model.embedding.word_embeddings.weight"].shape == (PADDED, HIDDEN)
    assert torch.equal(stored["model.decoder.layers.1.mlp.linear_fc1.weight"][...], whole_model()["decoder.layers.1.mlp.linear_fc1.weight"])


def test_what_does_not_fit_is_an_error() -> None:
    tree = Live(0, 1).sharded()
    data = torch.zeros(2, 3)

    def refused(error: type[Exception], message: str, leaf: Any, optimizer: Any = None) -> None:
        with pytest.raises(error, match=message):
            MegatronState({**tree, "x": leaf}, optimizer)

    refused(LayoutError, "plain tensors; expected megatron-core's sharded_state_dict", data)
    refused(LayoutError, r"^decoder.x: holds no tensor", ShardedTensor("decoder.x", None, None, (2,), (2,), (0,)))
    refused(LayoutError, r"decoder.x: local shape \(2, 3\) at \(1, 0\) does not lie in", sharded("decoder.x", data, (2, 3), (1, 0)))
    refused(UnsupportedError, "1 axes are prepended, and its name tells of 0", sharded("decoder.x", data, (4, 2, 3), (0, 0, 0), 1))
    refused(UnsupportedError, "a flattened ShardedTensor", sharded("decoder.x", data, (2, 3), (0, 0), flattened_range=slice(0, 2)))
    refused(UnsupportedError, "a tensor of an optimizer", sharded("optimizer.state.exp_avg.decoder.x", data, (2, 3), (0, 0)))
    copying = ShardedTensorFactory("decoder.x", data, lambda k, t, r, f: [sharded(k, t.clone(), (2, 3), (0, 0))], sum)
    refused(UnsupportedError, "is a copy of the parameter", copying)
    partly = ShardedTensorFactory("decoder.x", data, lambda k, t, r, f: [sharded(k, t[:1], (1, 3), (0, 0))], sum)
    refused(UnsupportedError, "hold 3 elements, the parameter has 6", partly)
    refused(LayoutError, "global shape", sharded("decoder.final_layernorm.weight", torch.zeros(3), (3,), (0,)))
    stranger = Live(0, 1)
    stranger.sharded()
    with pytest.raises(LayoutError, match="is not in the sharded state dict"):
        MegatronState(tree, stranger.distributed(0, 1, True))
    aware = SimpleNamespace(config=SimpleNamespace(use_precision_aware_optimizer=True))
    with pytest.raises(UnsupportedError, match="precision-aware"):
        MegatronState(tree, aware)
    with pytest.raises(UnsupportedError, match="no optimizer of megatron-core"):
        MegatronState(tree, SimpleNamespace())
    with pytest.raises(LayoutError, match="vocab=9, and the model has 8 rows"):
        MegatronState(tree, vocab=9)
    with pytest.raises(LayoutError, match="holds no tensor"):
        MegatronState({})
