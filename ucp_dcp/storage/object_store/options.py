"""Which client serves a URL, and how many requests and bytes it may have under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedError

if TYPE_CHECKING:
    from .store import ObjectStore

__all__ = ["MAX_PARTS", "MIN_PART", "Options", "open_object_store", "part_size_for"]

MIB = 1 << 20
MAX_PARTS = 10_000
"""Parts of an upload at most (S3)."""
MIN_PART = 5 * MIB
"""Bytes of every part but the last at least (S3)."""
LARGEST = 5 << 40
"""Bytes of an object at most (S3)."""


@dataclass(frozen=True)
class Options:
    """What an object store may have under way at a time, in this process.

    Attributes:
        part_size: bytes of the parts of an upload, a multiple of 1 MiB; larger where 10,000 of them would not do.
        uploads: parts in flight per file. An upload holds ``uploads + 1`` parts in memory at most.
        requests: ranged requests in flight.
        piece: bytes of a ranged request at most.
        gap: bytes between two wanted ranges of one call that are read through rather than asked for apart.
        deadline: seconds after which a request that keeps failing is given up.
    """

    part_size: int = 16 * MIB
    uploads: int = 4
    requests: int = 16
    piece: int = 16 * MIB
    gap: int = 64 << 10
    deadline: float = 120.0

    def __post_init__(self) -> None:
        if self.part_size < MIN_PART or self.part_size % MIB:
            raise ValueError(f"part_size={self.part_size}; expected a multiple of {MIB} from {MIN_PART} on")
        for name in ("uploads", "requests", "piece"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.gap < 0 or self.deadline < 0:
            raise ValueError(f"gap={self.gap}, deadline={self.deadline}; neither may be negative")


def part_size_for(size: int, part_size: int) -> int:
    """Bytes of a part of an object of ``size`` bytes: ``part_size``, or the smallest multiple of 1 MiB that 10,000 parts do with."""
    return max(part_size, -(-size // (MAX_PARTS * MIB)) * MIB)


def open_object_store(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """The store at an ``s3://`` URL, or with ``client="obstore"`` at any that obstore knows. Contacts nothing.

    ``options``: those of :class:`Options`, ``client``, and the rest for the client: in s3fs's words.
    """
    from .botocore_client import BotocoreClient
    from .store import ObjectStore

    own = {name: options[name] for name in Options.__dataclass_fields__ if name in options}
    rest = {name: value for name, value in options.items() if name not in own and name != "client"}
    limits = Options(**own)
    protocol, _, root = url.partition("://")
    root = root.strip("/")
    bucket = root.partition("/")[0]
    if not bucket or "//" in root:
        raise UnsupportedError(f"{url}: expected {protocol}://bucket/folder without empty names")
    client = options.get("client", "botocore")
    if client == "obstore":
        from .obstore_client import ObstoreClient

        return ObjectStore(ObstoreClient(protocol, bucket, rest, limits.deadline), protocol, root, limits)
    if client != "botocore":
        raise UnsupportedError(f'{url}: client={client!r}; expected "botocore", "obstore" or "s3fs"')
    try:
        import botocore  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{url}: s3fs is not installed; pip install ucp-dcp[s3]") from error
    return ObjectStore(BotocoreClient(bucket, {**_configured("s3"), **rest}, 2 * limits.requests), protocol, root, limits)


def _configured(protocol: str) -> dict[str, Any]:
    """Storage options from fsspec's configuration files and environment variables."""
    from fsspec.config import conf

    return dict(conf.get(protocol, {}))
