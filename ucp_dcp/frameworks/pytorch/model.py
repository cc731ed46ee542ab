"""Modules -> values by global name, without the prefixes of wrappers, and loaded values back into modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import PlanError, UnsupportedError
from ...names import unwrap

__all__ = ["Modules"]

_EXTRA = "_extra_state"


class Modules:
    """The modules of one rank: one model, or the stages of a pipeline that are here. Names are global and without wrappers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self._prefixes = [_wrapper_prefixes(m) for m in self.modules]
        for module in self.modules:
            for name, child in module.named_modules():
                if type(child).__name__ == "FullyShardedDataParallel":
                    raise UnsupportedError(
                        f"module {name!r} is wrapped by FSDP1, whose optimizer state is made of flattened shards: pass "
                        "torch.distributed.checkpoint.state_dict.get_state_dict(...) to ucp_dcp.save, or use fully_shard (FSDP2)"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Parameters, persistent buffers and extra state: the live tensors themselves wherever the module gives them."""
        out: dict[str, Any] = {}
        for module, prefixes in zip(self.modules, self._prefixes, strict=True):
            for raw, value in module.state_dict().items():
                name = _clean(raw, prefixes)
                if name in out and not _same(out[name], value):
                    raise PlanError(f"two modules of this rank have a value called {name!r}; stages need global names")
                # Extra state is one opaque value, also when it is a dict.
                out[name] = (_EXTRA, value) if raw.endswith(_EXTRA) and not isinstance(value, torch.Tensor) else value
        return out

    def parameters(self) -> dict[int, str]:
        """The id of a parameter -> its first name."""
        out: dict[int, str] = {}
        for module, prefixes in zip(self.modules, self._prefixes, strict=True):
            for raw, parameter in module.named_parameters():
                out.setdefault(id(parameter), _clean(raw, prefixes))
        return out

    def aliases(self) -> dict[str, list[str]]:
        """First name of a tied parameter -> its other names."""
        first, out = self.parameters(), dict[str, list[str]]()
        for module, prefixes in zip(self.modules, self._prefixes, strict=True):
            for raw, parameter in module.named_parameters(remove_duplicate=False):
                name = _clean(raw, prefixes)
                if name != first[id(parameter)]:
                    out.setdefault(first[id(parameter)], []).append(name)
        return out

    def put_back(self, loaded: Mapping[str, Any], names: Iterable[str]) -> None:
        """Give modules what a load could not fill in place: extra state, and values that ``state_dict()`` had copied."""
        wanted = set(names)
        for module, prefixes in zip(self.modules, self._prefixes, strict=True):
            live = {_memory(t) for t in (*module.parameters(), *module.buffers())}
            copies = {}
            for raw in module.state_dict():
                name = _clean(raw, prefixes)
                if name not in wanted:
                    continue
                value = loaded[name]
                if isinstance(value, tuple) and len(value) == 2 and value[0] == _EXTRA and raw.endswith(_EXTRA):
                    copies[raw] = value[1]
                elif not (isinstance(value, torch.Tensor) and _memory(value) in live):
                    copies[raw] = value
            if copies:
                module.load_state_dict(copies, strict=False)


def _same(a: Any, b: Any) -> bool:
    """Whether two stages have one and the same value (a shared module)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _memory(a) == _memory(b) and a.shape == b.shape
    return a is b


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, address of an outer tensor): tells whether two tensors are one."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.numel() == 0:
        return (0, 0)  # nothing to copy
    try:
        return (local.data_ptr(), local.numel())
    except RuntimeError:  # a tensor subclass without a memory of its own
        return (id(local), -1)


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Prefixes that end in the ``module.`` of DistributedDataParallel or DataParallel, longest first."""
    kinds = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    found = [unwrap(name) for name, child in module.named_modules() if isinstance(child, kinds)]
    return sorted((f"{name}.module." if name else "module." for name in found), key=len, reverse=True)


def _clean(raw: str, prefixes: Sequence[str]) -> str:
    name = unwrap(raw)
    for prefix in prefixes:
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    return name
