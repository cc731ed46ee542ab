"""Writing an object in parts, of which several are under way, in bounded memory; nothing is left when it fails."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...errors import StoreError, StoreExistsError
from ..store import byte_view
from .client import Failed, PartClient
from .options import MAX_PARTS, part_size_for
from .retry import Attempts

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .store import ObjectStore

__all__ = ["Pieces", "SmallObject", "StreamedObject", "sized_upload", "streamed_upload"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT = 20.0  # seconds: the caller waits for it with an error in hand
_GROWS = 150  # parts of a stream after which they grow by the first size: 10,000 parts hold 5 TiB from 16 MiB on


class Pieces(Protocol):
    """A :class:`~ucp_dcp.storage.store.PositionalWriter` that can be finished."""

    concurrent: int
    part_size: int

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See there."""
        ...


class _Upload:
    """A multipart upload under way."""

    def __init__(self, store: ObjectStore, client: PartClient, path: str) -> None:
        self._store, self._client, self.path = store, client, path
        self._key, self._nonce = store.key(path), secrets.token_hex(16)
        self._tags: dict[int, dict[str, str]] = {}
        self._id = ""
        unsure = False

        def attempt(attempts: Attempts) -> str:
            nonlocal unsure
            try:
                return client.begin(self._key, self._nonce)
            except Failed as failed:
                unsure |= failed.unsure
                raise

        try:
            self._id = self._request("starting its upload", attempt)
        finally:
            if unsure:
                self._forget_others()

    def _forget_others(self) -> None:
        """Abort uploads that were started by requests whose answers were lost. Nobody else writes this path at the same time."""
        try:
            for upload in list(self._store.uploads(self.path)):
                if upload.key == self._key and upload.upload_id != self._id:
                    self._store.abort_upload(upload)
        except StoreError as error:
            _log.warning("%s; an upload without parts may stay (ucp gc, or a lifecycle rule for unfinished uploads)", error)

    def part(self, number: int, data: bytes | bytearray) -> None:
        """Upload one part, from any thread."""
        if number > MAX_PARTS:
            raise StoreError(f"{self.path} in {self._store.url}: it needs more than {MAX_PARTS} parts of {len(data)} bytes")
        what = f"uploading part {number} ({len(data)} bytes)"
        self._tags[number] = self._request(what, lambda _: self._client.part(self._key, self._id, number, data))

    def complete(self) -> None:
        """Make the object. Raises StoreExistsError when the path exists."""
        parts = [self._tags[number] for number in range(1, len(self._tags) + 1)]

        def attempt(attempts: Attempts) -> None:
            try:
                self._client.complete(self._key, self._id, parts, if_absent=self._store.conditional)
            except Failed as failed:
                if failed.kind == "unconditional" and self._store.conditional:
                    self._store.give_up_conditions(failed.text)
                    self._store.check_absent(self.path)
                    self._client.complete(self._key, self._id, parts, if_absent=False)
                # An answer may have been lost, and the repeated request then finds the upload gone or its own object there.
                elif failed.kind in ("lost", "condition") and self._store.wrote(self.path, self._nonce):
                    return
                elif failed.kind == "condition":
                    raise StoreExistsError(f"{self.path} exists already in {self._store.url}") from failed
                else:
                    raise

        what = f"completing its upload of {len(parts)} parts"
        try:
            self._request(what, attempt)
        except StoreExistsError:
            raise
        except StoreError:
            if not self._store.there_after_all(self.path, self._nonce):
                raise

    def abort(self) -> None:
        """Leave no parts. None may be under way. Logs what it cannot do."""
        try:
            self._request("aborting its upload", lambda _: self._client.abort(self._key, self._id), deadline=_ABORT)
        except StoreError as error:
            _log.warning("%s; its parts stay until they are removed (ucp gc, or a lifecycle rule for unfinished uploads)", error)

    def _request(self, what: str, call: Callable[[Attempts], T], *, deadline: float | None = None) -> T:
        try:
            return self._store.request(self.path, what, call, deadline=deadline)
        except Failed as failed:
            raise self._store.translated(failed, self.path, what) from failed


class SmallObject:
    """An object of known size that fits in one request."""

    concurrent = 1
    part_size = 0

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._data = bytearray(size)
        self._written = 0

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See :class:`~ucp_dcp.storage.store.PositionalWriter`."""
        for buffer in buffers:
            view = byte_view(buffer)
            _check_inside(self._path, offset, view.nbytes, self._size)
            self._data[offset : offset + view.nbytes] = view
            offset += view.nbytes
            self._written += view.nbytes

    def finish(self) -> None:
        """Write it."""
        _check_all(self._path, self._written, self._size)
        self._store.put_new(self._path, self._data)


class _SizedParts:
    """An object of known size in parts, each written by one call."""

    def __init__(self, upload: _Upload, size: int, part_size: int, concurrent: int) -> None:
        self._upload, self._size = upload, size
        self.part_size, self.concurrent = part_size, concurrent
        self._written = 0
        self._lock = threading.Lock()

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See :class:`~ucp_dcp.storage.store.PositionalWriter`."""
        data = b"".join([byte_view(buffer) for buffer in buffers])
        _check_inside(self._upload.path, offset, len(data), self._size)
        number, rest = divmod(offset, self.part_size)
        if rest or len(data) != min(self.part_size, self._size - offset):
            raise StoreError(
                f"{self._upload.path}: a write of {len(data)} bytes at byte {offset} is no part of an upload in parts of {self.part_size}"
            )
        self._upload.part(number + 1, data)
        with self._lock:
            self._written += len(data)

    def finish(self) -> None:
        _check_all(self._upload.path, self._written, self._size)
        self._upload.complete()


@contextlib.contextmanager
def sized_upload(store: ObjectStore, client: PartClient, path: str, size: int) -> Iterator[Pieces]:
    """See :meth:`SizedStore.create_sized`."""
    part_size = part_size_for(size, store.options.part_size)
    if size <= part_size:
        small = SmallObject(store, path, size)
        yield small
        small.finish()
        return
    if not store.conditional:
        store.check_absent(path)
    upload = _Upload(store, client, path)
    try:
        parts = _SizedParts(upload, size, part_size, store.options.uploads)
        yield parts
        parts.finish()
    except BaseException:
        upload.abort()
        raise


class StreamedObject:
    """The writer of :meth:`Store.create`: full parts go out while the next one fills."""

    def __init__(self, store: ObjectStore, client: PartClient, path: str) -> None:
        self._store, self._client, self._path = store, client, path
        self._part = bytearray()
        self._position = 0
        self._upload: _Upload | None = None
        self._number = 0
        self._pending: deque[Future[None]] = deque()

    def write(self, data: Buffer) -> int:
        """See :class:`~ucp_dcp.storage.store.Writer`."""
        view = byte_view(data)
        done = 0
        while done < view.nbytes:
            # A full part goes out only when more follows, so that an object of one part is one request.
            if len(self._part) == self._size():
                self._send()
            count = min(view.nbytes - done, self._size() - len(self._part))
            self._part += view[done : done + count]
            done += count
        self._position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return self._position

    def _size(self) -> int:
        return self._store.options.part_size * (1 + self._number // _GROWS)

    def _send(self) -> None:
        if self._upload is None:
            if not self._store.conditional:
                self._store.check_absent(self._path)
            self._upload = _Upload(self._store, self._client, self._path)
        while len(self._pending) >= self._store.options.uploads:
            self._pending.popleft().result()
        self._number += 1
        part, self._part = self._part, bytearray()
        self._pending.append(self._store.submit(self._upload.part, self._number, part))

    def finish(self) -> None:
        """The object is complete and visible."""
        if self._upload is None:
            self._store.put_new(self._path, self._part)
            return
        self._send()
        while self._pending:
            self._pending.popleft().result()
        self._upload.complete()

    def abort(self) -> None:
        """Nothing is left."""
        for future in self._pending:
            future.cancel()
        for future in self._pending:
            if not future.cancelled():
                future.exception()  # wait: a part that arrives after the abort would stay
        if self._upload is not None:
            self._upload.abort()


@contextlib.contextmanager
def streamed_upload(store: ObjectStore, client: PartClient, path: str) -> Iterator[StreamedObject]:
    """See :meth:`Store.create`."""
    writer = StreamedObject(store, client, path)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _check_inside(path: str, offset: int, length: int, size: int) -> None:
    if offset < 0 or offset + length > size:
        raise StoreError(f"{path}: a write of {length} bytes at byte {offset} does not lie in the {size} bytes of the file")


def _check_all(path: str, written: int, size: int) -> None:
    if written != size:
        raise StoreError(f"{path}: {written} of {size} bytes were written")
