"""The optimizer formats of flat buffers (``dp_reshardable``, ``fully_sharded_bucket_space``) as tensors of parameters.

They store, for each model-parallel rank, what lies in its buffers, and no names. Names follow from the order in which modules register
parameters; how each is divided over tensor parallelism follows from the chunks of the weights. Nothing is guessed: bucket ends, and the
ends of the pieces in which a buffer is stored, must be exactly those of the parameters, and what fits in two ways is told apart by its
contents (a master, rounded, is the weight).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ...catalog import Catalog
from ...errors import CorruptCheckpointError, UnsupportedError
from ...geometry import Box
from ...names import Role
from ..dcp import METADATA
from .buckets import LocalParam, lay_out, pieces_of_range
from .contents import Sample, matches
from .keys import MASTERS
from .objects import Common
from .order import STYLES, Style, expert_of, in_module_order, layer_of, stage_layers
from .tensors import Vocab
from .views import Views, flat_place

__all__ = ["add_buckets"]

_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.(\w+)\)"
    r"\.bucket_idx_(\d+)\.(\w+)"
)
_GATHERED = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(slots=True)
class _Buffer:
    """One buffer of one model-parallel rank."""

    chain: int
    rank: int
    number: int
    dtype: str
    chunk: int = 0
    """The model chunk (virtual pipeline stage)."""
    rows: dict[str, dict[int, int]] = field(default_factory=dict)
    """state -> bucket -> index of the tensor."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"dp_group_idx_{self.rank}.gbuf_idx_{self.number} ({self.dtype}) of optimizer {self.chain}"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Sizes of the parallel axes of the run that saved."""

    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int


def add_buckets(views: Views, keys: Sequence[str], common: Common, vocab: Vocab) -> None:
    """Masters and states out of flat buffers.

    Raises CorruptCheckpointError, UnsupportedError naming the buffer or parameter that does not fit.
    """
    catalog = views.base.catalog
    for row in catalog.objects:
        if _GATHERED.match(row.key):
            raise UnsupportedError(
                f"{catalog.files[row.file].path} in {views.base.store.url}: the optimizer state is one object per model-parallel rank "
                f"({row.key!r}, dp_zero_gather_scatter), which this version cannot take apart. A stock checkpoint still has the weights "
                "(prefer='stock'); to keep the optimizer state save with --dist-ckpt-optim-fully-reshardable or --ckpt-fully-parallel-save"
            )
    buffers = _buffers(catalog, keys, f"{METADATA} in {views.base.store.url}")
    if not buffers:
        return
    rebuild = _Rebuild(views, common, vocab, buffers)
    for chain in sorted({b.chain for b in buffers}):
        rebuild.chain(chain, [b for b in buffers if b.chain == chain])


def _buffers(catalog: Catalog, keys: Sequence[str], what: str) -> list[_Buffer]:
    found: dict[tuple[int, int, int, str], _Buffer] = {}
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            raise UnsupportedError(f"{what}: the tensor {key!r} is of an optimizer format that this version does not know")
        index = catalog.find(key)
        assert index is not None
        chain, rank, number, bucket = int(match[1] or 0), int(match[2]), int(match[3]), int(match[6])
        own = found.setdefault((chain, rank, number, match[4]), _Buffer(chain, rank, number, match[4]))
        own.rows.setdefault(match[7], {})[bucket] = index
    buffers = [found[k] for k in sorted(found)]
    for own in buffers:
        first = next(iter(own.rows.values()))
        for state, rows in own.rows.items():
            if sorted(rows) != list(range(len(rows))) or sorted(rows) != sorted(first):
                missing = sorted(set(range(max(*first, *rows) + 1)) - (set(rows) & set(first)))
                raise CorruptCheckpointError(f"{what}: {own.name}: bucket_idx_{missing[0] if missing else 0}.{state} is missing")
    # a model chunk has one buffer per dtype: the n-th of a dtype is of chunk n
    for _, group in groupby(sorted(buffers, key=lambda b: (b.chain, b.rank, b.dtype, b.number)), lambda b: (b.chain, b.rank, b.dtype)):
        for chunk, own in enumerate(group):
            own.chunk = chunk
    return buffers


class _Rebuild:
    def __init__(self, views: Views, common: Common, vocab: Vocab, buffers: Sequence[_Buffer]) -> None:
        self.views, self.common, self.vocab = views, common, vocab
        self.catalog = views.base.catalog
        self.where = f"{METADATA} in {views.base.store.url}"
        self.weights = {fqn: t for (role, fqn, _), t in views.tensors.items() if role == Role.WEIGHT}
        self.layers = 1 + max((n for n in map(layer_of, self.weights) if n is not None), default=-1)
        self.experts = 1 + max((n for n in map(expert_of, self.weights) if n is not None), default=-1)
        self.grid = self._sizes(buffers)
        self.stages = stage_layers(common, self.layers, self.grid.pp, self.grid.vpp)
        self.tied = _OUTPUT not in self.weights and _EMBEDDING in self.weights

    def _sizes(self, buffers: Sequence[_Buffer]) -> _Grid:
        integer = self.common.integer
        tp, pp = integer("tensor_model_parallel_size"), integer("pipeline_model_parallel_size")
        dense = 1 + max(b.rank for b in buffers if b.chain == 0)
        if tp is None:
            tp = len(self._cuts(_EMBEDDING)[1]) or 1 if _EMBEDDING in self.weights else 1
        if pp is None:
            pp = max(dense // tp, 1)
        ep, etp = integer("expert_model_parallel_size", 1), integer("expert_tensor_parallel_size", tp)
        vpp = integer("virtual_pipeline_model_parallel_size") or 1 + max(b.chunk for b in buffers)
        return _Grid(tp, pp, vpp, ep or 1, etp or tp)

    # ---- which parameters a rank has

    def _cuts(self, fqn: str) -> tuple[int, list[tuple[int, int]]]:
        """The dim along which a weight is stored in pieces (-1: it is not), and the pieces (begin, length)."""
        own = self.weights[fqn]
        dim, pieces = -1, []
        for d, extent in enumerate(own.shape):
            found = sorted({(box.offset[d], box.size[d]) for box in own.boxes})
            if len(found) == 1:
                continue
            ends = [begin + n for begin, n in found]
            if dim >= 0 or found[0][0] or ends[-1] != extent or any(a != b for a, (b, _) in zip(ends, found[1:], strict=False)):
                raise UnsupportedError(
                    f"{self.where}: weight {fqn!r} is stored in pieces that are not tensor-parallel shards; "
                    "without them it is not known how its optimizer state is divided"
                )
            dim, pieces = d, found
        return dim, pieces

    def _local(self, fqn: str, rank: int, size: int) -> LocalParam:
        """The parameter as tensor-parallel rank ``rank`` of ``size`` has it."""
        shape = self.weights[fqn].shape
        padded = self.vocab.padded
        if padded is not None and self.vocab.cut(fqn, (padded, *shape[1:])) == shape and shape[0] != padded:
            full = (padded, *shape[1:])
            each = padded // size
            return LocalParam(fqn, full, 0, ((rank * each, each),)) if size > 1 else LocalParam(fqn, full)
        dim, pieces = self._cuts(fqn)
        if dim < 0:
            return LocalParam(fqn, shape, skip=rank > 0)
        if len(pieces) == size:
            return LocalParam(fqn, shape, dim, (pieces[rank],))
        if len(pieces) == 2 * size and ".linear_fc1." in fqn:
            return LocalParam(fqn, shape, dim, (pieces[rank], pieces[size + rank]))
        raise CorruptCheckpointError(
            f"{self.where}: weight {fqn!r} is stored in {len(pieces)} pieces, but there are {size} tensor-parallel ranks"
        )

    def _params(self, own: _Buffer, style: Style, experts: bool | None) -> list[LocalParam]:
        """Parameters of a buffer in its order; ``experts``: only them, only others, or (None) all."""
        grid = self.grid
        if experts:
            tp, size = own.rank % grid.etp, grid.etp
            ep, pp = own.rank // grid.etp % grid.ep, own.rank // (grid.etp * grid.ep)
        else:
            tp, size, ep, pp = own.rank % grid.tp, grid.tp, 0, own.rank // grid.tp
        layers = self.stages.get((pp, own.chunk), range(0))
        first, last = (pp, own.chunk) == (0, 0), (pp, own.chunk) == (grid.pp - 1, grid.vpp - 1)
        per_rank = max(self.experts // grid.ep, 1)
        names = []
        for fqn in self.weights:
            layer, expert = layer_of(fqn), expert_of(fqn)
            here = layer in layers if layer is not None else first if fqn.startswith("embedding.") else last
            if not here or (experts is not None and experts != (expert is not None)):
                continue
            if expert is not None and experts and expert // per_rank != ep:
                continue
            if own.dtype not in ("uint8", self.weights[fqn].dtype):
                continue
            names.append(fqn)
        copy = self.tied and last and not first and not experts and own.dtype in ("uint8", self.weights[_EMBEDDING].dtype)
        if copy:
            names.append(_OUTPUT)
        params = []
        for fqn in reversed(in_module_order(names, style, self.where)):
            if copy and fqn == _OUTPUT:  # the last stage's copy of the embedding
                twin = self._local(_EMBEDDING, tp, size)
                params.append(LocalParam(fqn, twin.shape, twin.dim, twin.pieces, skip=True))
            else:
                params.append(self._local(fqn, tp, size))
        return params

    # ---- fitting

    def chain(self, number: int, buffers: Sequence[_Buffer]) -> None:
        """All buffers of one optimizer: the first reading that fits every one of them."""
        kinds: tuple[bool | None, ...] = (None,) if not self.experts else (False, True, None)
        fitting: list[tuple[list[list[LocalParam]], list[list[tuple[int, int]]]]] = []
        problem = ""
        for experts in kinds:
            for style in STYLES:
                read: list[list[LocalParam]] = []
                starts: list[list[tuple[int, int]]] = []
                for own in buffers:
                    found = self._params(own, style, experts)
                    fit = self._fit(own, found)
                    if fit is None:
                        problem = problem or self._misfit(own, found)
                        break
                    read.append(found)
                    starts.append(fit)
                else:
                    if (read, starts) not in fitting:
                        fitting.append((read, starts))
        if not fitting:
            raise UnsupportedError(f"{self.where}: {problem}")
        if len(fitting) > 1:
            fitting = [reading for reading in fitting if self._true(buffers, reading)]
            if len(fitting) != 1:
                raise UnsupportedError(
                    f"{self.where}: the buffers of optimizer {number} can be read in {len(fitting) or 'no'} ways that agree with the "
                    "weights; which parameter lies where is not certain"
                )
        self._check_ranks(number, buffers, fitting[0][0])
        for own, params, places in zip(buffers, *fitting[0], strict=True):
            self._add(own, params, places)

    def _ends(self, own: _Buffer) -> list[int]:
        rows = next(iter(own.rows.values()))
        return [self.catalog.tensor(rows[b]).shape[0] for b in range(len(rows))]

    def _fit(self, own: _Buffer, params: Sequence[LocalParam]) -> list[tuple[int, int]] | None:
        """Places of the parameters, when buckets and stored pieces end exactly where parameters do."""
        places = lay_out([p.numel for p in params], self._ends(own))
        if places is None:
            return None
        for rows in own.rows.values():
            edges = {(b, int(at)) for b, t in rows.items() for at in self._stretches(t)[:, 0]}
            ends = self._ends(own)
            for param, (bucket, start) in zip(params, places, strict=True):
                stop = start + param.numel
                if (bucket, start) not in edges or (stop != ends[bucket] and (bucket, stop) not in edges):
                    return None
        return places

    def _stretches(self, t: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """(k, 2) begin and length of the stored pieces of a buffer."""
        return self.catalog.boxes(t)[:, :, 0]

    def _misfit(self, own: _Buffer, params: Sequence[LocalParam]) -> str:
        total = sum(p.numel for p in params)
        return (
            f"{own.name} has buckets of {self._ends(own)} elements, which {len(params)} parameters of {total} elements do not fill "
            f"(expected from tensor, pipeline, virtual and expert parallelism {self.grid.tp}, {self.grid.pp}, {self.grid.vpp}, "
            f"{self.grid.ep}); frozen parameters, or a model whose order of parameters is not known to this version"
        )

    def _true(self, buffers: Sequence[_Buffer], fit: tuple[list[list[LocalParam]], list[list[tuple[int, int]]]]) -> bool:
        """Whether the masters, rounded, are the weights, in a few elements of each parameter."""
        samples: list[Sample] = []
        for own, params, places in zip(buffers, *fit, strict=True):
            master = next((rows for state, rows in own.rows.items() if state in MASTERS), None)
            if master is None:
                return True
            for param, (bucket, start) in zip(params, places, strict=True):
                if param.fqn not in self.weights:
                    continue
                for place, box, at in self._views(master[bucket], param, start):
                    samples.append(Sample(place, box, at, param))
                    break
        return matches(self.views, samples, self.weights)

    def _check_ranks(self, number: int, buffers: Sequence[_Buffer], params: Sequence[Sequence[LocalParam]]) -> None:
        """Every rank of the optimizer's group must be there."""
        ranks = {b.rank for b in buffers}
        grid = self.grid
        experts = any(expert_of(p.fqn) is not None for own in params for p in own) and len({b.chain for b in buffers}) == 1
        only = experts and all(expert_of(p.fqn) is not None for own in params for p in own)
        expected = grid.etp * grid.ep * grid.pp if only else grid.tp * grid.pp
        missing = sorted(set(range(expected)) - ranks)
        if missing:
            raise CorruptCheckpointError(
                f"{self.where}: optimizer {number}: dp_group_idx_{missing[0]} of {expected} model-parallel ranks is missing"
            )

    # ---- views

    def _views(self, t: int, param: LocalParam, start: int) -> Iterator[tuple[tuple[int, int], Box, int]]:
        """((chunk, element of it), box of the parameter, flat index of the box in the local parameter)."""
        first = self.catalog.chunk_range(t)[0]
        stop = start + param.numel
        for c, (at, length) in enumerate(self._stretches(t).tolist()):
            low, high = max(at, start), min(at + length, stop)
            if low >= high:
                continue
            for box, flat in pieces_of_range(param, low - start, high - start):
                yield (first + c, start + flat - at), box, flat

    def _add(self, own: _Buffer, params: Sequence[LocalParam], places: Sequence[tuple[int, int]]) -> None:
        for state, rows in own.rows.items():
            role, name = (Role.MASTER, "") if state in MASTERS else (Role.STATE, state)
            for param, (bucket, start) in zip(params, places, strict=True):
                if param.skip:
                    continue
                dtype = self.catalog.tensor(rows[bucket]).dtype
                cut = self.vocab.cut(param.fqn, param.shape)
                for (chunk, element), box, _ in self._views(rows[bucket], param, start):
                    kept = box if cut == param.shape else box.intersect(Box((0,) * len(cut), cut))
                    if kept is not None:  # padding is at the end: what is kept begins where the box does
                        self.views.add(role, param.fqn, name, dtype, cut, kept, flat_place(chunk, 1, element, param.local))
