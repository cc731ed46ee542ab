"""What a Megatron checkpoint says of itself in pickles: ``common.pt`` or ``common_state``, and object shards.

They name Megatron's own classes (argparse Namespaces, enums); inert stand-ins take their place, nothing is imported or run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...catalog import ObjectRow
from ...errors import CorruptCheckpointError
from ...safe_pickle import EnumStub, Reference, Stub, drive_many, is_plain, tree_steps
from ...storage.store import Range, Store
from ..dcp import DcpSource
from ..torch_archive import open_archive

__all__ = ["COMMON", "COMMON_STATE", "Common", "inline", "plain", "read_common", "read_shards", "shard_key", "stand_in"]

COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
_ENUM = re.compile(r"(?:.*\.)?(?:enums?|.*_enums?)$|.*Type$|.*Mode$|.*Backend$|.*Strategy$|.*Kind$")


def stand_in(module: str, name: str) -> type[Stub] | None:
    """Inert stand-ins for classes that Megatron's ``args`` and objects refer to."""
    if module == "argparse" and name == "Namespace":
        return Stub
    if module.partition(".")[0] in ("megatron", "nemo", "transformer_engine", "signal"):
        return EnumStub if _ENUM.match(name) or _ENUM.match(module) else Stub
    return None


class Common:
    """What holds for the whole checkpoint.

    Attributes:
        file: path of the file that holds it; "" when nothing does. path: the same for messages, with the object's name.
        state: the dict that Megatron calls ``common_state_dict``.
        args: the run's arguments as far as they are plain values; empty when there are none.
        content: ``content_metadata``: how the optimizer was written.
    """

    def __init__(self, path: str, state: Mapping[Any, Any], file: str = "") -> None:
        self.path = path
        self.file = file
        self.state = state
        args = state.get("args")
        values = args.state if isinstance(args, Stub) else args
        self.args: dict[str, Any] = {
            key: plain(value) for key, value in (values.items() if isinstance(values, dict) else ()) if isinstance(key, str)
        }
        content = state.get("content_metadata")
        self.content: dict[str, Any] = content if isinstance(content, dict) else {}

    def integer(self, name: str, default: int | None = None) -> int | None:
        """An argument that is a positive number; ``default`` when it is None or absent. Raises CorruptCheckpointError for another."""
        value = self.args.get(name)
        if value is None:
            return default
        if type(value) is not int or value < 1:
            raise CorruptCheckpointError(f"{self.path}: args.{name} is {value!r:.40}, expected a number from 1")
        return value


def plain(value: Any) -> Any:
    """A value without classes: dtypes by name, tuples as lists, what has no plain form as its text."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, EnumStub):
        return value.member if value.member is not None else plain(value.value)
    text = value.name if isinstance(value, Reference) else f"<{type(value).__name__}>" if isinstance(value, Stub) else str(value)
    return text.removeprefix("torch.")


def read_common(store: Store, base: DcpSource, prefix: str = "") -> Common:
    """``common.pt`` (up to megatron-core 0.18) or the object ``common_state`` (0.19). Nothing: an empty one.

    Raises UnsafePickleError, CorruptCheckpointError naming the file.
    """
    row = base.catalog.find_object(COMMON_STATE)
    if row is not None:
        file = base.catalog.files[row.file].path
        path = f"{file} ({COMMON_STATE})"
        (found,) = read_shards(base, [row])
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
    elif any(entry.path == prefix + COMMON for entry in store.list(prefix + COMMON)):
        path = file = prefix + COMMON
        found = open_archive(store, path, stubs=stand_in, inert_unknown=True).value
    else:
        return Common(f"{store.url}", {})
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: holds a {type(found).__name__}, expected a dict")
    return Common(path, found, file)


def read_shards(base: DcpSource, rows: Sequence[ObjectRow]) -> list[Any]:
    """The object trees of object shards (tensors stay where they are), read together."""
    files = base.catalog.files
    paths = [files[row.file].path for row in rows]

    def read(asked: list[tuple[int, int, int]]) -> list[bytes]:
        buffers = [bytearray(length) for _, _, length in asked]
        base.store.read_ranges(
            [Range(paths[n], rows[n].offset + start, length) for n, start, length in asked], [memoryview(b) for b in buffers]
        )
        return [bytes(b) for b in buffers]

    steps = [
        tree_steps(row.length, what=f"object {row.key!r} in {path}", base=row.offset, stubs=stand_in, inert_unknown=True)
        for row, path in zip(rows, paths, strict=True)
    ]
    return drive_many(steps, read)


def shard_key(key: str) -> str:
    """The key of a ShardedObject without ``/shard_<offset>_<shape>``."""
    return re.sub(r"/shard_[\d.]+_[\d.]+$", "", key)


def inline(value: Any) -> Any:
    """``plain(value)`` where the catalog can keep it inline, else None."""
    found = plain(value)
    return found if is_plain(found) else None
