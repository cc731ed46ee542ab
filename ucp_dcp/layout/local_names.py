"""Names of parameters as one rank's state dict has them -> global fqns without wrapper prefixes; and which parameter a flat key means."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import LayoutError
from ..names import unwrap, unwrap_all
from .fragment import GroupField, Path

__all__ = ["LocalNames"]


class LocalNames:
    """The names below the roots of one state dict.

    described: there is a layout. Its rules are about the names as they are, and take wrappers off themselves (``rename:``).
    """

    def __init__(self, described: bool) -> None:
        self._described = described
        self._clean: dict[str, str] = {}
        self._weights: set[str] = set()
        self._states: dict[str, str] = {}

    def learn(self, weights: Iterable[str], states: Iterable[str]) -> None:
        """weights: dotted names below the model roots. states: names of parameters below the optimizer roots."""
        weights, states = list(weights), list(states)
        if self._described:
            self._clean = {n: n for n in weights}
            self._states = {n: n for n in states}
        else:
            self._clean = unwrap_all(weights)
            # Alone, the optimizer's names decide; beside a model, the model's do: it may be one child called `module` that is trained.
            self._states = {n: unwrap(n) for n in states} if weights else unwrap_all(states)
        self._weights = set(self._clean.values())

    def of_weight(self, name: str) -> str:
        """The fqn of a weight or buffer."""
        return self._clean.get(name, name)

    def of_state(self, name: str, key: str) -> str:
        """The fqn of a parameter in the optimizer's state. Raises LayoutError for a number instead of a name."""
        if name in self._clean:
            return self._clean[name]
        found = self._states.get(name, name)
        if name.isdigit() and not self._described and name not in self._weights:
            raise LayoutError(
                f"{key}: the optimizer's state is kept by parameter number {name!r}, which says nothing once parameters are in another "
                "order; expected parameter names: use ucp_dcp.TrainState or torch's get_optimizer_state_dict"
            )
        return found

    def of_flattened(self, key: str) -> tuple[str, str] | None:
        """(fqn, state) of ``state.<name>.<state>``, torch's flattened form; None when no parameter of the state dict is meant."""
        if not key.startswith("state."):
            return None
        return self._split(key.removeprefix("state."))

    def _split(self, rest: str) -> tuple[str, str] | None:
        """The longest known name at the beginning of a dotted key, and what is behind it."""
        at = rest.rfind(".")
        while at > 0:
            name = rest[:at]
            if name in self._clean:
                return self._clean[name], rest[at + 1 :]
            clean = name if self._described else unwrap(name)
            if clean in self._weights:
                return clean, rest[at + 1 :]
            at = rest.rfind(".", 0, at)
        return None

    def group_field(self, root: str, rest: Path) -> GroupField | None:
        """What a value below an optimizer root is among the hyperparameters: nested by group number, or flattened by parameter name."""
        if len(rest) >= 3 and rest[0] == "param_groups" and str(rest[1]).isdigit():
            return GroupField(root, int(rest[1]), ".".join(map(str, rest[2:])))
        if len(rest) == 1 and str(rest[0]).startswith("param_groups."):
            found = self._split(str(rest[0]).removeprefix("param_groups."))
            return None if found is None else GroupField(root, *found)
        return None
