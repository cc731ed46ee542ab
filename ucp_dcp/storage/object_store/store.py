"""A :class:`~ucp_dcp.storage.store.Store` on an object store, over any client of ``client``."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...errors import CorruptCheckpointError, FormatError, StoreChangedError, StoreError, StoreExistsError, StoreNotFoundError
from ...paths import checked_path
from ..store import Entry, PositionalWriter, Range, Writer, byte_view
from . import conditions
from .client import Failed, ObjectClient, PartClient, StreamClient, Upload
from .options import Options
from .reads import read_into, read_piece
from .retry import Attempts, Retry
from .uploads import sized_upload, streamed_upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObjectStore"]

T = TypeVar("T")
A = TypeVar("A")

_log = logging.getLogger(__name__)

_FIRST = 15.0  # seconds for a server that nothing was heard of yet: its name may be wrong


class ObjectStore:
    """Objects below ``root`` ("bucket/folder") of a bucket.

    An object is seen whole or not at all. What is read of one object through this store is of one version: its ETag is remembered when
    its size is asked for and at the first ranged read, and StoreChangedError says that it has been replaced since. Writing or deleting it
    through this store, and asking for its size again, forget the old one.

    Attributes:
        spread: requests are limited per prefix of the keys, so the files of many ranks should not all begin alike.
    """

    spread = True

    def __init__(self, client: ObjectClient, protocol: str, root: str, options: Options) -> None:
        self.client = client
        self.protocol = protocol
        self.root = root.strip("/")
        self.options = options
        self.pins: dict[str, str] = {}
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._bucket_seen = False

    @property
    def url(self) -> str:
        """The root with its protocol. Storage options (credentials) are not part of it."""
        return f"{self.protocol}://{self.root}"

    @property
    def threads(self) -> int:
        """Callers of :meth:`read_ranges` at a time that are worth having; each call has several requests in flight itself."""
        return max(1, self.options.requests // 4)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"client": self.client, "protocol": self.protocol, "root": self.root, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- reading ---------------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        """See :meth:`Store.size`. From here on the object must stay what it is."""
        key = self.key(path)
        try:
            found = self.request(path, "asking for its size", lambda _: self.client.head(key))
        except Failed as failed:
            raise self.translated(failed, path, "asking for its size") from failed
        if found.etag:
            self.pins[path] = found.etag
        return found.size

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`. Up to 16 MiB, and a whole file, are one request, which sees old or new content."""
        key = self.key(path)
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: range of {length} bytes from byte {start}; neither may be negative")
        if length is None and start == 0:
            try:
                return self.request(path, "reading it", lambda _: self.client.get_all(key))[0]
            except Failed as failed:
                raise self.translated(failed, path, "reading it") from failed
        if length is None or length == 0 or length > self.options.piece:
            size = self.size(path)  # before memory is taken for what a hostile index claims
            length = max(size - start, 0) if length is None else length
            if length and start + length > size:
                raise self.short(path, start, length, f"the file has {size} bytes")
        data = bytearray(length)
        if length > self.options.piece:
            self.read_ranges([Range(path, start, length)], [memoryview(data)])
        elif length:
            read_piece(self, path, start, memoryview(data), pinned=False)
        return bytes(data)

    def read_up_to(self, path: str, limit: int) -> tuple[int, bytes]:
        """See :meth:`BoundedStore.read_up_to`."""
        key, data = self.key(path), memoryview(bytearray(limit))
        try:
            found = self.request(path, "reading it", lambda _: self.client.get(key, 0, data, None))
        except Failed as failed:
            if failed.kind == "range":  # an empty file has no first byte
                return 0, b""
            raise self.translated(failed, path, "reading it") from failed
        return found.size, bytes(data[: min(limit, found.size)])

    def read_ranges(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """See :meth:`Store.read_ranges`."""
        read_into(self, ranges, into)

    # -- writing ---------------------------------------------------------------------------------------------------------

    def create(self, path: str) -> AbstractContextManager[Writer]:
        """See :meth:`Store.create`. Nobody sees the object before it is complete."""
        self.key(path)
        self.pins.pop(path, None)
        if hasattr(self.client, "stream"):
            from .streams import streamed_by_client

            return streamed_by_client(self, cast(StreamClient, self.client), path)
        return streamed_upload(self, self._parts, path)

    def create_sized(self, path: str, size: int) -> AbstractContextManager[PositionalWriter]:
        """See :meth:`SizedStore.create_sized`."""
        self.key(path)
        self.pins.pop(path, None)
        if hasattr(self.client, "stream"):
            from .streams import sized_by_client

            return sized_by_client(self, cast(StreamClient, self.client), path, size)
        return sized_upload(self, self._parts, path, size)

    @property
    def _parts(self) -> PartClient:
        return cast(PartClient, self.client)

    def put(self, path: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See :meth:`Store.put`. One request; with ``if_absent`` see :mod:`.conditions`."""
        key = self.key(path)
        self.pins.pop(path, None)
        content = bytes(byte_view(data))
        if if_absent:
            conditions.probe(self)
            self.put_new(path, content)
            return
        nonce = secrets.token_hex(16)
        try:
            self.request(path, "writing it", lambda _: self.client.put(key, content, nonce=nonce, if_absent=False))
        except Failed as failed:
            raise self.translated(failed, path, "writing it") from failed

    def put_new(self, path: str, data: bytes | bytearray) -> None:
        """Write an object that must not be there."""
        try:
            conditions.put_new(self, path, data)
        except Failed as failed:
            raise self.translated(failed, path, "writing it") from failed

    def delete(self, *paths: str) -> None:
        """See :meth:`Store.delete`. The first before all others; those several at a time."""
        keys = [(path, self.key(path)) for path in paths]

        def one(pair: tuple[str, str]) -> None:
            path, key = pair
            self.pins.pop(path, None)
            try:
                self.request(path, "deleting it", lambda _: self.client.delete(key))
            except Failed as failed:
                raise self.translated(failed, path, "deleting it") from failed

        if keys:
            one(keys[0])
            self.together(one, keys[1:])

    # -- listing ---------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See :meth:`Store.list`."""
        above = self._prefix
        try:
            for item in self.client.list(above + prefix, self._again("listing")):
                if not item.key.endswith("/"):  # a folder, as some tools make them
                    yield Entry(item.key[len(above) :], item.size, item.mtime)
        except Failed as failed:
            raise StoreError(f"{self.url}: listing {prefix or 'everything'} failed: {failed.text}") from failed

    def uploads(self, prefix: str = "") -> Iterator[Upload]:
        """Multipart uploads, of paths that start with ``prefix``, that were neither completed nor aborted.

        A client without parts of its own tells of none.
        """
        if not hasattr(self.client, "uploads"):
            return
        try:
            yield from self._parts.uploads(self._prefix + prefix, self._again("listing unfinished uploads"))
        except Failed as failed:
            raise StoreError(f"{self.url}: listing unfinished uploads failed: {failed.text}") from failed

    def abort_upload(self, upload: Upload) -> None:
        """Forget an unfinished upload and delete its parts."""
        try:
            self.request(upload.key, "aborting its upload", lambda _: self._parts.abort(upload.key, upload.upload_id))
        except Failed as failed:
            raise self.translated(failed, upload.key, "aborting its upload") from failed

    # -- for the other modules of this package -----------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        below = self.root.partition("/")[2]
        return below + "/" if below else ""

    def key(self, path: str) -> str:
        """The key of a path, which is checked."""
        return self._prefix + checked_path(path)

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return self.client.endpoint

    def request(self, path: str, what: str, call: Callable[[Attempts], T], *, deadline: float | None = None) -> T:
        """A request, made again while it fails in passing."""
        limit = self.options.deadline if deadline is None else min(deadline, self.options.deadline)
        retry = Retry(limit, None if self._bucket_seen else _FIRST)
        found = retry.run(f"{path} in {self.url}: {what}", call)
        self._bucket_seen = True
        return found

    def _again(self, what: str) -> Callable[[Callable[[], Any]], Any]:
        retry = Retry(self.options.deadline, None if self._bucket_seen else _FIRST)
        return lambda call: retry.run(f"{self.url}: {what}", lambda _: call())

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
            self._pool = (os.getpid(), ThreadPoolExecutor(self.options.requests, thread_name_prefix="ucp-object"))
        return self._pool[1]

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """In a thread of the store."""
        return self._executor.submit(call, *arguments)

    def together(self, call: Callable[[A], object], items: Sequence[A]) -> None:
        """Once for each item, several at a time. Raises the first error when none is under way any more."""
        if len(items) < 2:
            for item in items:
                call(item)
            return
        futures = [self.submit(call, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    @property
    def conditional(self) -> bool:
        """Whether the server is taken to keep ``If-None-Match``: until it is known not to."""
        return conditions.kept(self)

    def give_up_conditions(self, why: str) -> None:
        """The server does not."""
        conditions.give_up(self, why)

    def check_absent(self, path: str) -> None:
        """Raises StoreExistsError when there is such a file now."""
        try:
            self.request(path, "looking for it", lambda _: self.client.head(self.key(path)))
        except Failed as failed:
            if failed.kind == "missing":
                return
            raise self.translated(failed, path, "looking for it") from failed
        raise StoreExistsError(f"{path} exists already in {self.url}")

    def wrote(self, path: str, nonce: str) -> bool:
        """Whether the object is the one that was written with this nonce."""
        try:
            return self.request(path, "looking who wrote it", lambda _: self.client.head(self.key(path))).nonce == nonce
        except Failed as failed:
            if failed.kind == "missing":
                return False
            raise self.translated(failed, path, "looking who wrote it") from failed

    def there_after_all(self, path: str, nonce: str) -> bool:
        """Whether a write that was given up was carried out all the same: one look, so that what is reported as failed is not there."""
        with contextlib.suppress(StoreError, Failed):
            found = self.client.head(self.key(path))
            if found.nonce == nonce:
                _log.warning("%s in %s: the writing of it was given up, but it is there, whole", path, self.url)
                return True
        return False

    def short(self, path: str, start: int, length: int, found: str) -> CorruptCheckpointError:
        """The file is shorter than its index says."""
        return CorruptCheckpointError(
            f"{path} in {self.url}: {length} bytes from byte {start} were wanted, but {found}; it is truncated or its index is wrong"
        )

    def changed(self, path: str, how: str) -> StoreChangedError:
        """The object is another one than before."""
        self.pins.pop(path, None)
        return StoreChangedError(f"{path} in {self.url} was replaced since it was opened ({how}); open the checkpoint again")

    def translated(self, failed: Failed, path: str, what: str) -> StoreError:
        """The error for a caller."""
        if failed.kind == "missing":
            if not self._bucket_seen:
                with contextlib.suppress(StoreError):
                    try:
                        self.request(path, "looking for the bucket", lambda _: self.client.check_bucket())
                    except Failed as about:
                        return StoreError(f"{self.url}: {about.text}")
            return StoreNotFoundError(f"{path} was not found in {self.url}")
        if failed.kind == "condition":
            return self.changed(path, failed.text)
        return StoreError(f"{path} in {self.url}: {what} failed: {failed.text}")
