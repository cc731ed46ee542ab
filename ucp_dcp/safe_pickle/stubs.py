"""Inert stand-ins for classes that are not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = ["EnumStub", "Stub", "StubTable"]


class Stub:
    """An object of a class that was not imported: what the pickle said about it, and nothing else.

    ``args`` and ``kwargs`` are the constructor arguments, ``state`` what ``__setstate__`` would have been given (mostly the instance's
    ``__dict__``), ``items`` the elements of an object that was a list, a dict (as pairs) or a set. Equality is identity.
    """

    __slots__ = ("args", "items", "kwargs", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: list[Any] | None = None

    @property
    def qualname(self) -> str:
        """``module.name`` of the class that this stands for."""
        return f"{self.module}.{self.name}"

    def get(self, field: str, default: Any = None) -> Any:
        """A field of the recorded state: of the instance ``__dict__`` or of the slots of a dataclass."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (dict state, slots state)
            for part in state:
                if isinstance(part, dict) and field in part:
                    return part[field]
            return default
        return state.get(field, default) if isinstance(state, dict) else default

    def __repr__(self) -> str:
        return f"<inert {self.qualname}>"


class EnumStub(Stub):
    """A member of an enum that was not imported: by its value, or by its name where the pickle recorded only that."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The value of the member; None when the pickle recorded its name only."""
        return self.args[0] if self.args else None

    @property
    def member(self) -> str | None:
        """The name of the member; None when the pickle recorded its value."""
        return self.kwargs["name"] if self.kwargs else None


StubTable: TypeAlias = Mapping[tuple[str, str], type[Stub]] | Callable[[str, str], type[Stub] | None]
"""``(module, name) -> stand-in class``, as a mapping or as a function that returns None for what it does not know."""
