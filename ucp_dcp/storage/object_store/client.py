"""What :class:`~.store.ObjectStore` needs of a client library: single requests, with failures sorted by what can be done about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Again", "Failed", "Found", "Kind", "Listed", "ObjectClient", "PartClient", "Partial", "Stream", "StreamClient", "Upload"]

Again: TypeAlias = Callable[[Callable[[], Any]], Any]

Kind: TypeAlias = Literal["transient", "missing", "condition", "unconditional", "range", "lost", "refused"]
"""What a failed request means.

transient: the same request may succeed later; missing: there is no such object; condition: ``If-Match`` or ``If-None-Match`` did not hold;
unconditional: the server does not know such conditions; range: the range begins behind the end; lost: the multipart upload is not known
(any more); refused: it will not succeed, whatever we do (credentials, region, bucket, rights).
"""


class Failed(Exception):
    """A request failed.

    ``text`` says why, without secrets; ``unsure``: the server may have done it all the same; ``unreached``: there was no connection.
    """

    def __init__(self, kind: Kind, text: str, *, unsure: bool = False, unreached: bool = False, wait: float | None = None) -> None:
        super().__init__(kind, text)
        self.kind: Kind = kind
        self.text = text
        self.unsure = unsure
        self.unreached = unreached
        self.wait = wait  # seconds that the server asks for (Retry-After)


@dataclass(frozen=True, slots=True)
class Found:
    """An object. ``nonce``: what its writer marked it with, if that is known."""

    size: int
    etag: str
    nonce: str | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing; ``mtime`` in seconds since 1970."""

    key: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted; ``started`` in seconds since 1970."""

    key: str
    upload_id: str
    started: float


class ObjectClient(Protocol):
    """One bucket. Every call is one request (a listing: one per page) and raises Failed; used by several threads at once."""

    @property
    def endpoint(self) -> str:
        """URL of the server; empty where that is not known."""
        ...

    def head(self, key: str) -> Found:
        """Whether the object is there."""
        ...

    def get(self, key: str, start: int, into: memoryview, etag: str | None) -> Found:
        """Fill ``into`` (not empty) from byte ``start`` on, as far as the object goes.

        Fails with "condition" when the object is not ``etag`` any more.

        The bytes that arrived before a failure need not be asked for again: ``Partial`` says how many.
        """
        ...

    def get_all(self, key: str) -> tuple[bytes, Found]:
        """The whole object in one request."""
        ...

    def put(self, key: str, data: bytes | bytearray, *, nonce: str, if_absent: bool) -> None:
        """Write the whole object."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        ...

    def list(self, prefix: str, again: Again) -> Iterator[Listed]:
        """All objects whose key starts with the string. ``again`` makes the request of a page, and makes it again."""
        ...

    def check_bucket(self) -> None:
        """Fails with "refused" when there is no such bucket."""
        ...


class Partial(Failed):
    """The body ended early, after ``received`` bytes; ``found`` when the head of the answer had come."""

    def __init__(self, text: str, received: int, found: Found | None) -> None:
        super().__init__("transient", text)
        self.received = received
        self.found = found


class PartClient(ObjectClient, Protocol):
    """A client that uploads the parts of an object one by one."""

    def begin(self, key: str, nonce: str) -> str:
        """Start a multipart upload; returns its id."""
        ...

    def part(self, key: str, upload_id: str, number: int, data: bytes | bytearray) -> dict[str, str]:
        """Upload part ``number`` (from 1); returns what ``complete`` needs of it."""
        ...

    def complete(self, key: str, upload_id: str, parts: list[dict[str, str]], *, if_absent: bool) -> None:
        """Make the object of its parts 1, 2, ..."""
        ...

    def abort(self, key: str, upload_id: str) -> None:
        """Forget the upload and its parts; one that is not known is no error."""
        ...

    def uploads(self, prefix: str, again: Again) -> Iterator[Upload]:
        """Uploads that were neither completed nor aborted; ``again`` as of :meth:`list`."""
        ...


class Stream(Protocol):
    """An object that is being written by a library that cuts and retries parts itself."""

    def write(self, data: Buffer) -> None:
        """Append."""
        ...

    def finish(self) -> None:
        """The object is complete and visible."""
        ...

    def abort(self) -> None:
        """It never is."""
        ...


class StreamClient(ObjectClient, Protocol):
    """A client without parts of its own."""

    def stream(self, key: str, *, nonce: str, part_size: int, parts: int) -> Stream:
        """Begin to write an object in parts of ``part_size`` bytes, ``parts`` of them in flight."""
        ...
