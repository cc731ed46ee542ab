"""Records of all rank files -> one catalog of global tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...catalog import Catalog, ObjectRow
from ...dtypes import itemsize
from ...errors import CorruptCheckpointError, UnsupportedError
from ...geometry import c_strides
from ...names import Role, canonical_name
from ...storage.store import Store
from ..deepspeed.rows import Record, Rows, Select, Stored
from ..megatron_core.keys import parse_key
from ..megatron_core.objects import stand_in
from ..megatron_core.tensors import Vocab
from ..source import Source
from ..torch_archive import load_value
from .buffers import lay_out, settings
from .folder import OPTIMIZER
from .groups import GlobalGroups, is_expert_optimizer, members
from .layers import Layers
from .local import Param, Shards
from .rules import Unit, units_of
from .run import Rank, Run, arrange

__all__ = ["MegatronLegacySource", "catalog_from_records"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LOW = ("bfloat16", "float16")


class MegatronLegacySource(Source):
    """A legacy Megatron checkpoint. Objects that are not plain values stay in the rank file; ``read_object`` reads that part of it."""

    def __init__(self, catalog: Catalog, store: Store, provenance: Mapping[str, Any], selects: Mapping[str, Select]) -> None:
        super().__init__(catalog, store, "megatron", provenance)
        self._selects = dict(selects)

    def read_object(self, row: ObjectRow, allow_classes: Iterable[type] = ()) -> Any:
        """The value of an object row (:meth:`Source.read_object`)."""
        select = self._selects.get(row.key)
        if row.encoding == "inline" or select is None:
            return super().read_object(row, allow_classes)
        path = self.catalog.files[row.file].path
        return load_value(
            self.store, path, allow_classes=allow_classes, select=select, stubs=stand_in, what=f"object {row.key!r} in {path}"
        )


def catalog_from_records(records: Sequence[Record], prefix: str = "") -> tuple[Catalog, dict[str, Select], dict[str, Any]]:
    """Join the records of :func:`parse_file`, in any order: the catalog, where objects are in their files, the provenance.

    ``prefix`` is the iteration's folder. Raises CorruptCheckpointError naming the file and the parameter that does not fit, and
    UnsupportedError.
    """
    run, ranks = arrange(records, prefix)
    return _Joiner(run, ranks, prefix).join()


class _Joiner(Rows):
    def __init__(self, run: Run, ranks: Sequence[Rank], prefix: str) -> None:
        super().__init__()
        self.run, self.ranks, self.prefix = run, ranks, prefix
        self.layers = Layers(run, ranks)
        self.vocab = _vocab(run)
        self.shards: dict[tuple[Role, str, str], Shards] = {}
        self.groups = GlobalGroups()
        self.stage: dict[str, int] = {}
        self.scalars: dict[tuple[str, str], tuple[Stored, Record]] = {}
        self.numbers: dict[tuple[str, str], tuple[Any, Record]] = {}
        self.tied = False
        self.remainders = bool(
            run.args.get("use_precision_aware_optimizer") and run.args.get("store_param_remainders", True) and run.args.get("bf16")
        )

    def join(self) -> tuple[Catalog, dict[str, Select], dict[str, Any]]:
        for rank in self.ranks:
            chunks = [self._params(rank, c) for c in range(len(rank.model["chunks"]))]
            for params in chunks:
                for param in params:
                    self._weight(rank, param)
            self._optimizers(rank, chunks)
        for (role, fqn, state), shards in sorted(self.shards.items()):
            self._tensor(role, fqn, state, shards)
        for (fqn, state), (scalar, record) in self.scalars.items():
            self.whole(Role.STATE, fqn, scalar, self.file(record), state)
        for (fqn, state), (value, _) in self.numbers.items():
            self.number(fqn, state, value)
        self._objects()
        first = self.ranks[0].model
        provenance: dict[str, Any] = {
            "writer": "megatron",
            "args": self.run.args,
            "iteration": first["iteration"],
            "tp": self.run.tp,
            "pp": self.run.pp,
            "ep": self.run.ep,
            "vpp": len(first["chunks"]),
        }
        if self.remainders:
            provenance["left_out"] = "fp32 masters: stored as remainders of the weights (store_param_remainders), turned into fp32 numbers"
        return self.build.build(), self.selects, provenance

    # ---- parameters

    def _params(self, rank: Rank, c: int) -> list[Param]:
        """Parameters and buffers of a model chunk, in the order of the module."""
        where = rank.model["path"]
        first = rank.pp == 0 and c == 0
        last = rank.pp == self.run.pp - 1 and c == len(rank.model["chunks"]) - 1
        mtp = bool(self.run.args.get("mtp_num_layers"))
        found = []
        for name, stored in rank.model["chunks"][c]:
            units = tuple(
                Unit(self.layers.global_name(u.fqn, c, rank.pp), u.start, u.shape, u.strides, u.rule)
                for u in units_of(name, stored[2], self.run, rank.ep, where)
            )
            copy = self.run.pp > 1 and (
                (name == _OUTPUT and self.run.tied and last and not first) or (name == _EMBEDDING and mtp and not first)
            )
            shared = self.run.pp > 1 and name == _EMBEDDING and first and not last and (self.run.tied or mtp)
            expert = self.run.own_expert_group and ".experts." in name
            self.tied = self.tied or (copy and name == _OUTPUT)
            found.append(Param(name, stored, units, expert, copy or shared, copy))
        return found

    def _weight(self, rank: Rank, param: Param) -> None:
        if param.copy and param.name == _EMBEDDING:
            return
        offset, dtype, shape, strides = param.stored
        for unit in param.units:
            if self.stage.setdefault(unit.fqn, rank.pp) != rank.pp:
                self.bad(rank.model, f"{unit.fqn!r} is also in a file of pipeline stage {self.stage[unit.fqn]}; it belongs to one stage")
            own = unit
            if strides != c_strides(shape) and param.numel > 1:  # the file keeps the strides that the tensor had
                if len(param.units) > 1 or unit.shape != shape or unit.strides != c_strides(shape):
                    self.bad(rank.model, f"{param.name!r} has strides {list(strides)}, expected those of a contiguous tensor")
                own = Unit(unit.fqn, 0, shape, strides, unit.rule)
            self._place(_role(unit), own, "", dtype, rank, rank.model, offset + unit.start * itemsize(dtype))

    def _place(self, role: Role, unit: Unit, state: str, dtype: str, rank: Rank, record: Record, byte: int) -> None:
        """A rank's shard of a tensor, from byte ``byte`` on with the unit's strides."""
        expert = unit.rule.expert
        shards = self.shards.get((role, unit.fqn, state))
        if shards is None:
            shards = self.shards[role, unit.fqn, state] = Shards(unit, dtype, self.run.etp if expert else self.run.tp)
        if shards.unit.shape != unit.shape or shards.dtype != dtype:
            other = next(iter(shards.found.values()))[0]["path"]
            what = canonical_name(role, unit.fqn, state, "")
            self.bad(record, f"{what!r} is {dtype} {list(unit.shape)}, but {shards.dtype} {list(shards.unit.shape)} in {other}")
        shards.add(rank.etp if expert else rank.tp, record, byte, unit.strides)

    def _tensor(self, role: Role, fqn: str, state: str, shards: Shards) -> None:
        name = canonical_name(role, fqn, state, "")
        missing = shards.missing()
        if missing:
            axis = "expert tensor" if shards.unit.rule.expert else "tensor"
            held = ", ".join(sorted({record["path"] for record, _, _ in shards.found.values()}))
            raise CorruptCheckpointError(
                f"{self.prefix or 'this folder'}: {name!r}: the shard of {axis}-parallel rank {missing[0]} of {shards.count} is missing; "
                f"found only in {held}"
            )
        self._padded(fqn, shards)
        kept = self.vocab.cut(fqn, shards.shape)
        pattern = self.build.add_pattern({"text": shards.unit.rule.text()})
        handle = self.tensor(role, fqn, state, shards.dtype, kept, pattern)
        chunks = shards.chunks(kept, itemsize(shards.dtype))
        n = len(kept)
        self.build.add_chunks(
            handle,
            np.asarray([(c.offset, c.size) for c in chunks], dtype=np.int64).reshape(len(chunks), 2, n),
            np.asarray([self.file(c.record) for c in chunks], dtype=np.int32),
            np.asarray([c.byte for c in chunks], dtype=np.int64),
            strides=np.asarray([c.strides for c in chunks], dtype=np.int64).reshape(len(chunks), n),
        )

    def _padded(self, fqn: str, shards: Shards) -> None:
        """Vocabulary tensors must have the size that the arguments say."""
        if fqn in (_EMBEDDING, _OUTPUT) and self.vocab.padded is not None and shards.shape[0] != self.vocab.padded:
            record = shards.found[min(shards.found)][0]
            self.bad(
                record,
                f"{fqn!r} has {shards.unit.shape[0]} rows on each of {shards.count} ranks, expected {self.vocab.padded} in all "
                "(args.padded_vocab_size)",
            )

    # ---- optimizer

    def _optimizers(self, rank: Rank, chunks: Sequence[Sequence[Param]]) -> None:
        optimizers = rank.model["optimizers"]
        if optimizers is None:  # --no-save-optim
            return
        params = [[p for p in chunk if all(_role(u) == Role.WEIGHT for u in p.units)] for chunk in chunks]
        separate = any(is_expert_optimizer(optimizer) for optimizer in optimizers)
        if not self.run.args.get("use_distributed_optimizer") and rank.optimizer is None:
            flat = [p for chunk in params for p in chunk]
            for optimizer in optimizers:
                expert = is_expert_optimizer(optimizer)
                self._plain(rank, optimizer, [p for p in flat if not separate or p.expert == expert])
            return
        if rank.optimizer is None:
            raise CorruptCheckpointError(
                f"{self.prefix}{rank.name}/{OPTIMIZER}: the file is missing: args in {rank.model['path']} say use_distributed_optimizer; "
                "masters and states of its parameters were in it"
            )
        self._distributed(rank, optimizers, params, separate)

    def _distributed(self, rank: Rank, optimizers: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Param]], separate: bool) -> None:
        record = rank.optimizer
        assert record is not None
        if len(record["optimizers"]) != len(optimizers):
            self.bad(record, f"state of {len(record['optimizers'])} optimizers, but {rank.model['path']} has {len(optimizers)}")
        waiting = {expert: _buffers(params, expert, separate) for expert in (False, True)}
        elements = sum(p.numel for chunk in params for p in chunk)
        for optimizer, buffers in zip(optimizers, record["optimizers"], strict=True):
            expert = is_expert_optimizer(optimizer)
            own: list[Param] = []
            if buffers is None:  # another rank is first in this optimizer's data-parallel group
                waiting[expert] = []
                continue
            for number, buffer in enumerate(buffers):
                if not waiting[expert]:
                    self.bad(record, f"buffer {number} of {buffer['numel']} elements belongs to no parameter in {rank.model['path']}")
                c, held = waiting[expert].pop(0)
                self._buffer(rank, record, number, buffer, c, held, elements)
                own += held
            self._grouped(rank, optimizer, own)
        left = [p for queue in waiting.values() for _, held in queue for p in held]
        if left:
            self.bad(record, f"no buffer holds the state of {left[0].name!r} and {len(left) - 1} more parameters of {rank.model['path']}")

    def _buffer(
        self, rank: Rank, record: Record, number: int, buffer: Mapping[str, Any], chunk: int, held: Sequence[Param], elements: int
    ) -> None:
        """Masters and states of one buffer, which holds ``held`` in reverse order."""
        order = list(reversed(held))
        dtype = order[0].stored[1]
        if buffer["dtype"] not in (dtype, "uint8"):
            self.bad(record, f"buffer {number} is of {buffer['dtype']} parameters; {order[-1].name!r} of {rank.model['path']} is {dtype}")
        numels, alone = [p.numel for p in order], [p.alone for p in order]
        tried = []
        for size, align in settings(self.run, rank.pp, chunk, elements):
            starts, total = lay_out(numels, alone, size, align)
            if total == buffer["numel"]:
                break
            tried.append(total)
        else:
            starts, _ = lay_out(numels, alone, *next(settings(self.run, rank.pp, chunk, elements)))
            beyond = [p.name for p, start in zip(order, starts, strict=True) if start + p.numel > buffer["numel"]]
            hint = f"{beyond[0]!r} does not fit into it" if beyond else f"{buffer['numel'] - max(tried)} elements belong to no parameter"
            self.bad(
                record,
                f"buffer {number} has {buffer['numel']} elements, expected {tried[0]} from the {len(order)} parameters "
                f"({order[-1].name!r} to {order[0].name!r}) in {rank.model['path']}: {hint}",
            )
        for name, (offset, kind, _, _) in buffer["tensors"].items():
            role = Role.MASTER if name == "param" else Role.STATE
            if role == Role.MASTER and self.remainders:
                continue
            for param, start in zip(order, starts, strict=True):
                self._state(rank, record, param, role, "" if role == Role.MASTER else name, kind, offset + start * itemsize(kind))

    def _state(self, rank: Rank, record: Record, param: Param, role: Role, state: str, dtype: str, byte: int) -> None:
        """Optimizer state of the size of a parameter, contiguous from byte ``byte`` on."""
        if param.copy:
            return
        for unit in param.units:
            self._place(role, unit, state, dtype, rank, record, byte + unit.start * itemsize(dtype))

    def _grouped(self, rank: Rank, optimizer: Mapping[str, Any], params: Sequence[Param]) -> None:
        """Param groups of a distributed optimizer, which have no numbers; a step is counted by group."""
        for group in optimizer["groups"]:
            own = members(group, optimizer["groups"], params)
            names = [u.fqn for p in own if not p.copy for u in p.units]
            self.groups.add(group, rank.model, names)
            step = self.groups.step(group)
            if step is not None:
                for name in names:
                    self._number(rank.model, name, "step", step)

    def _number(self, record: Record, fqn: str, state: str, value: Any) -> None:
        known, other = self.numbers.setdefault((fqn, state), (value, record))
        if known != value:
            self.bad(record, f"state {state!r} of {fqn!r} is {value}, but {known} in {other['path']}: files of two saves")

    def _plain(self, rank: Rank, optimizer: Mapping[str, Any], params: Sequence[Param]) -> None:
        """An optimizer without sharding: masters in lists, states by number."""
        record = rank.model
        groups, states, masters = optimizer["groups"], optimizer["states"], optimizer["masters"]
        if masters is not None and len(masters) != len(groups):
            self.bad(record, f"fp32_from_fp16_params has {len(masters)} groups, the optimizer {len(groups)}")
        taken = 0
        for g, group in enumerate(groups):
            numbers = group.get("params", [])
            own = members(group, groups, params)
            if len(numbers) != len(own):
                missing = own[len(numbers)].name if len(numbers) < len(own) else None
                self.bad(
                    record,
                    f"param group {g} lists {len(numbers)} parameters, expected {len(own)} of this rank's {len(params)}"
                    + (f"; {missing!r} is the first without a number" if missing else ""),
                )
            taken += len(own)
            low = [p for p in own if p.stored[1] in _LOW]
            if masters is not None:
                if len(masters[g]) != len(low):
                    self.bad(
                        record,
                        f"fp32_from_fp16_params of group {g} has {len(masters[g])} masters, expected one per 16-bit weight: {len(low)}",
                    )
                for param, master in zip(low, masters[g], strict=True):
                    self._same_size(record, param, master, "the fp32 master")
                    self._state(rank, record, param, Role.MASTER, "", master[1], master[0])
            for number, param in zip(numbers, own, strict=True):
                for name, (kind, value) in states.get(number, {}).items():
                    self._one_state(rank, record, param, name, kind, value)
            self.groups.add(group, record, [u.fqn for p in own if not p.copy for u in p.units])
        if taken != len(params):
            self.bad(record, f"the param groups list {taken} parameters, this rank has {len(params)}")

    def _one_state(self, rank: Rank, record: Record, param: Param, name: str, kind: str, value: Any) -> None:
        if param.copy:
            return
        if kind == "number":
            for unit in param.units:
                self._number(record, unit.fqn, name, value)
        elif kind == "scalar":
            for unit in param.units:
                self.scalars.setdefault((unit.fqn, name), (value, record))
        else:
            self._same_size(record, param, value, f"state {name!r}")
            self._state(rank, record, param, Role.STATE, name, value[1], value[0])

    def _same_size(self, record: Record, param: Param, tensor: Stored, what: str) -> None:
        if tensor[2] != param.shape:
            self.bad(record, f"{what} of {param.name!r} has shape {list(tensor[2])}, expected {list(param.shape)} as the weight has")
        if tensor[3] != c_strides(tensor[2]) and param.numel > 1:
            raise UnsupportedError(
                f"{record['path']}: {what} of {param.name!r} has strides {list(tensor[3])}; only contiguous ones are read"
            )

    # ---- objects

    def _objects(self) -> None:
        first = self.ranks[0].model
        self.object("args", "inline", self.run.args, first)
        for key, kind, value in first["objects"]:
            self.object(key, kind, value, first)
        for rank in self.ranks:
            for key, kind, value in rank.model["per_rank"]:
                self.object(f"{key}/{rank.name}", kind, value, rank.model)
            for name, where in rank.model["others"]:
                self.object(f"model/{rank.name}/{name}", "select", where, rank.model)
        found = list(self.groups.found.values())
        for i, (group, record, names) in enumerate(found):
            for key, value in group.items():
                if key != "params":
                    self.object(f"optim.param_groups.{i}.{key}", value[0], value[1], record)
            self.object(f"optim.param_groups.{i}.params", "inline", list(names), record)
        scaler = next((o["scaler"] for o in first["optimizers"] or () if o["scaler"] is not None), None)
        if scaler is not None:
            self.object("optim.grad_scaler", scaler[0], scaler[1], first)


def _buffers(params: Sequence[Sequence[Param]], expert: bool, separate: bool) -> list[tuple[int, list[Param]]]:
    """(chunk, parameters) of the dense or the experts' buffers, in the optimizer's order: by chunk, within it by dtype as they come."""
    found: list[tuple[int, list[Param]]] = []
    for c, chunk in enumerate(params):
        by_dtype: dict[str, list[Param]] = {}
        for param in chunk:
            if (param.expert and separate) == expert:
                by_dtype.setdefault(param.stored[1], []).append(param)
        found += [(c, held) for held in by_dtype.values()]
    return found


def _role(unit: Unit) -> Role:
    key = parse_key(unit.fqn)
    return Role.WEIGHT if key is None else key.role


def _vocab(run: Run) -> Vocab:
    """How many rows are real. Before 0.18 the tokenizer that knows only a size put an end-of-document token behind it."""
    vocab = Vocab(run.common)
    if vocab.size is not None and run.args.get("tokenizer_type") == "NullTokenizer" and "verify_integrity" not in run.args:
        vocab.size = min(vocab.size + 1, vocab.padded or vocab.size)
    return vocab
