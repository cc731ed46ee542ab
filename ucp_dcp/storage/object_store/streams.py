"""Writing through a client that cuts and sends the parts itself."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ...errors import StoreError
from ..store import byte_view
from .client import Failed, Stream, StreamClient
from .options import part_size_for
from .uploads import Pieces, SmallObject

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .store import ObjectStore

__all__ = ["sized_by_client", "streamed_by_client"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Streamed:
    """The writer of :meth:`Store.create`. An object of one part is written by one conditional request."""

    concurrent = 1
    part_size = 0

    def __init__(self, store: ObjectStore, client: StreamClient, path: str, part_size: int) -> None:
        self._store, self._client, self._path, self._part_size = store, client, path, part_size
        self._nonce = secrets.token_hex(16)
        self._first = bytearray()
        self._position = 0
        self._stream: Stream | None = None

    def write(self, data: Buffer) -> int:
        """See :class:`~ucp_dcp.storage.store.Writer`."""
        view = byte_view(data)
        if self._stream is None and len(self._first) + view.nbytes <= self._part_size:
            self._first += view
        else:
            self._send(view)
        self._position += view.nbytes
        return view.nbytes

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """See :class:`~ucp_dcp.storage.store.PositionalWriter`."""
        if offset != self._position:
            raise StoreError(f"{self._path}: a write at byte {offset}, but obstore only appends and is at byte {self._position}")
        for buffer in buffers:
            self.write(buffer)

    def tell(self) -> int:
        """Bytes so far."""
        return self._position

    def _send(self, view: memoryview) -> None:
        if self._stream is None:
            self._store.check_absent(self._path)  # obstore completes uploads without a condition
            self._stream = self._call(
                "starting its upload",
                lambda: self._client.stream(
                    self._store.key(self._path), nonce=self._nonce, part_size=self._part_size, parts=self._store.options.uploads
                ),
            )
            stream, first, self._first = self._stream, self._first, bytearray()
            if first:
                self._call("uploading", lambda: stream.write(first))
        stream = self._stream
        self._call("uploading", lambda: stream.write(view))

    def finish(self) -> None:
        """The object is complete and visible."""
        if self._stream is None:
            self._store.put_new(self._path, self._first)
            return
        try:
            self._call("completing its upload", self._stream.finish)
        except StoreError:
            if not self._store.there_after_all(self._path, self._nonce):
                raise

    def abort(self) -> None:
        """Nothing is left. Logs what it cannot do."""
        if self._stream is not None:
            try:
                self._call("aborting its upload", self._stream.abort)
            except StoreError as error:
                _log.warning("%s; its parts stay until a lifecycle rule for unfinished uploads removes them", error)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Failed as failed:
            raise self._store.translated(failed, self._path, what) from failed


@contextlib.contextmanager
def streamed_by_client(store: ObjectStore, client: StreamClient, path: str, size: int | None = None) -> Iterator[_Streamed]:
    """See :meth:`Store.create`; of known size, parts are large enough."""
    part_size = store.options.part_size if size is None else part_size_for(size, store.options.part_size)
    writer = _Streamed(store, client, path, part_size)
    try:
        yield writer
        if size is not None and writer.tell() != size:
            raise StoreError(f"{path}: {writer.tell()} of {size} bytes were written")
        writer.finish()
    except BaseException:
        writer.abort()
        raise


@contextlib.contextmanager
def sized_by_client(store: ObjectStore, client: StreamClient, path: str, size: int) -> Iterator[Pieces]:
    """See :meth:`SizedStore.create_sized`."""
    if size <= store.options.part_size:
        small = SmallObject(store, path, size)
        yield small
        small.finish()
        return
    with streamed_by_client(store, client, path, size) as writer:
        yield writer
