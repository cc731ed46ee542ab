"""A store in a dict that can crash: after a given number of changes, every further call raises and nothing changes any more."""

from __future__ import annotations

import contextlib
import time

from ucp_dcp.errors import CorruptCheckpointError, FormatError, StoreExistsError, StoreNotFoundError
from ucp_dcp.paths import checked_path
from ucp_dcp.storage.store import Entry, byte_view, target_views


class Crash(BaseException):
    """The machine is gone. Not an Exception, so that no cleanup code mistakes it for an error of the store."""


class DictStore:
    url = "dict://"

    def __init__(self, files=None, allow=None):
        self.files: dict[str, bytes] = dict(files or {})
        self.times: dict[str, float] = {}
        self.allow = allow  # changes until the crash
        self.log: list[str] = []

    def _change(self, text):
        if self.allow is not None:
            if self.allow <= 0:
                raise Crash(text)
            self.allow -= 1
        self.log.append(text)

    def _get(self, path):
        if checked_path(path) not in self.files:
            raise StoreNotFoundError(f"{path} was not found")
        return self.files[path]

    def size(self, path):
        return len(self._get(path))

    def read(self, path, start=0, length=None):
        data = self._get(path)
        if start < 0 or (length is not None and length < 0):
            raise FormatError(f"{path}: negative range")
        length = len(data) - start if length is None else length
        if start + length > len(data):
            raise CorruptCheckpointError(f"{path}: too short")
        return data[start : start + length]

    def read_ranges(self, ranges, into):
        for item, view in zip(ranges, target_views(ranges, into), strict=True):
            data = self.read(item.path, item.start, item.length)
            if data:
                view[:] = data

    @contextlib.contextmanager
    def create(self, path):
        checked_path(path)
        if path in self.files:
            raise StoreExistsError(f"{path} exists")
        self._change(f"open {path}")
        self.files[path] = b""
        self.times[path] = time.time()
        store = self

        class Writer:
            def write(self, data):
                store._change(f"write {path}")
                store.files[path] += bytes(byte_view(data))
                return byte_view(data).nbytes

            def tell(self):
                return len(store.files[path])

        try:
            yield Writer()
            store._change(f"close {path}")
        except BaseException as error:
            if not isinstance(error, Crash):
                del self.files[path]
            raise

    def put(self, path, data, *, if_absent=False):
        checked_path(path)
        if if_absent and path in self.files:
            raise StoreExistsError(f"{path} exists")
        self._change(f"put {path}")
        self.files[path] = bytes(data)
        self.times[path] = time.time()

    def delete(self, *paths):
        for path in paths:
            if checked_path(path) in self.files:
                self._change(f"delete {path}")
                del self.files[path]

    def list(self, prefix=""):
        for path, data in list(self.files.items()):
            if path.startswith(prefix):
                yield Entry(path, len(data), self.times.get(path, 0.0))
