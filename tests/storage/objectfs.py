"""An fsspec file system with the habits of an object store: no folders, uploads that close() completes, conditional writes."""

from __future__ import annotations

import threading
import time

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

_BUCKETS: dict[str, dict[str, tuple[bytes, float]]] = {}
_LOCK = threading.Lock()


class ObjectFileSystem(AbstractFileSystem):
    protocol = "s3"  # what it imitates
    cachable = False

    def __init__(self, bucket: str, fail_close: bool = False, **kwargs):
        super().__init__(bucket=bucket, fail_close=fail_close, **kwargs)
        self.bucket = bucket
        self.fail_close = fail_close
        self.objects = _BUCKETS.setdefault(bucket, {})
        self.uploads: dict[int, list[bytes]] = {}
        self.calls: list[tuple[str, str]] = []

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if path in self.objects:
            data, changed = self.objects[path]
            return {"name": path, "size": len(data), "type": "file", "LastModified": changed}
        if any(name.startswith(path + "/") for name in list(self.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        out = {}
        for name in list(self.objects):
            if name == path:
                out[name] = self.info(name)
            elif name.startswith(path + "/"):
                child = path + "/" + name[len(path) + 1 :].split("/")[0]
                out[child] = self.info(child)
        if not out:
            raise FileNotFoundError(path)
        return list(out.values()) if detail else list(out)

    def cat_file(self, path, start=None, end=None, **kwargs):
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = self.objects[path][0]
        if start is not None and start >= len(data) and (end is None or end > start):
            raise OSError(22, "The requested range is not satisfiable")
        return data[start:end]

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        path = self._strip_protocol(path)
        with _LOCK:
            if mode == "create" and path in self.objects:
                raise OSError(22, "At least one of the pre-conditions you specified did not hold")
            self.objects[path] = (bytes(value), time.time())

    def rm_file(self, path):
        self.objects.pop(self._strip_protocol(path), None)  # as S3: no error when missing

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        return _ObjectFile(self, path, mode, block_size=1 << 20, autocommit=autocommit, cache_options=cache_options, **kwargs)


class _ObjectFile(AbstractBufferedFile):
    def _initiate_upload(self):
        self.fs.uploads[id(self)] = []
        self.fs.calls.append(("initiate", self.path))

    def _upload_chunk(self, final=False):
        self.buffer.seek(0)
        self.fs.uploads[id(self)].append(self.buffer.read())
        if final:
            if self.fs.fail_close:
                raise OSError("503 Slow Down")
            self.fs.calls.append(("complete", self.path))
            self.fs.objects[self.path] = (b"".join(self.fs.uploads.pop(id(self))), time.time())
        return True

    def discard(self):
        self.fs.calls.append(("abort", self.path))
        self.fs.uploads.pop(id(self), None)
