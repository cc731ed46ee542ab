"""S3 through botocore, which s3fs stands on: blocking requests from any number of threads, with s3fs's storage options.

s3fs sends the same requests through one event loop for all threads of a process. Measured on one server, it takes 1.6 times the CPU time
of botocore for large puts and gets and twice that for ranges of 1 MiB, and it must be made anew after a fork. botocore's own retries are
off (:class:`~.retry.Retry` does them) unless ``config_kwargs={"retries": ...}`` asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import UnsupportedError
from .client import Again, Failed, Found, Listed, Partial, Upload
from .failures import failed_of

__all__ = ["BotocoreClient"]

NONCE = "ucp-nonce"  # user metadata of every object: tells our own write from another's
_CHUNK = 1 << 20  # bytes taken from a response at once
_CONNECT = 60.0  # seconds; http.client takes it for the sending of a whole part, too
_READ = 30.0  # seconds without a byte

# Options of s3fs that say how it caches, splits and loops: nothing here does any of that.
_IGNORED = frozenset((
    "default_block_size", "default_fill_cache", "default_cache_type", "use_listings_cache", "listings_expiry_time", "max_paths",
    "skip_instance_cache", "cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check", "version_aware",
))  # fmt: skip
_SESSION = frozenset(("profile",))  # what s3fs hands to the session
_MADE = threading.Lock()  # sessions read files and are not safe to make at the same time


def _new_lock() -> None:
    global _MADE
    _MADE = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it


@functools.cache
def _models() -> Any:
    """The descriptions of the services: a second of parsing, once per process."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


class BotocoreClient:
    """One bucket. Made anew after a fork and after pickling, by the same options."""

    def __init__(self, bucket: str, options: Mapping[str, Any], connections: int) -> None:
        self.bucket = bucket
        self._options = dict(options)
        self._connections = connections
        self._extra = dict(options.get("s3_additional_kwargs") or {})
        if options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"
        self._held: tuple[int, Any] | None = None
        unknown = set(options) - _IGNORED - _SESSION - _KNOWN
        if unknown:
            raise UnsupportedError(
                f"s3://{bucket}: unknown storage options {sorted(unknown)}; known are those of s3fs but for those about its event loop, "
                'which client="s3fs" takes'
            )

    @property
    def s3(self) -> Any:
        """The botocore client of this process."""
        held = self._held
        if held is None or held[0] != os.getpid():
            with _MADE:
                held = self._held
                if held is None or held[0] != os.getpid():
                    held = self._held = (os.getpid(), self._made())
        return held[1]

    @property
    def endpoint(self) -> str:
        """See :attr:`ObjectClient.endpoint`."""
        return str(self.s3.meta.endpoint_url)

    def __getstate__(self) -> dict[str, Any]:
        return {"bucket": self.bucket, "options": self._options, "connections": self._connections}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _made(self) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        options = self._options
        config = {
            "connect_timeout": _CONNECT,
            "read_timeout": _READ,
            "max_pool_connections": self._connections,
            "tcp_keepalive": True,
            "retries": {"total_max_attempts": 1},
            # Ranges have no checksum of their own, and servers that send the whole object's with a range break botocore. We have digests.
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        arguments = {
            "aws_access_key_id": options.get("key") or options.get("username"),
            "aws_secret_access_key": options.get("secret") or options.get("password"),
            "aws_session_token": options.get("token"),
            "endpoint_url": options.get("endpoint_url"),
            "use_ssl": options.get("use_ssl", True),
            **(options.get("client_kwargs") or {}),
        }
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
            arguments = {name: value for name, value in arguments.items() if not name.startswith("aws_")}
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            session.register_component("data_loader", _models())
            if not options.get("anon") and not arguments["aws_access_key_id"] and session.get_credentials() is None:
                raise Failed(
                    "refused",
                    "no credentials were found (storage options, environment, ~/.aws, instance role); anon=True reads public buckets",
                )
            return session.create_client("s3", config=Config(**config), **arguments)
        except (BotoCoreError, ValueError) as error:
            raise failed_of(error, "connecting") from error

    def _call(self, operation: str, **arguments: Any) -> Any:
        s3 = self.s3
        if self._extra:
            members = s3.meta.service_model.operation_model(_api(operation)).input_shape.members
            arguments = {**{name: value for name, value in self._extra.items() if name in members}, **arguments}
        try:
            return getattr(s3, operation)(Bucket=self.bucket, **arguments)
        except Exception as error:
            raise failed_of(error, operation, wanted=arguments.get("Key")) from error

    # -- reading ---------------------------------------------------------------------------------------------------------

    def head(self, key: str) -> Found:
        """See :meth:`ObjectClient.head`."""
        try:
            return _found(self._call("head_object", Key=key))
        except Failed as failed:
            if failed.kind != "refused":
                raise
            # The answer to a HEAD has no body that could say why.
            try:
                answer = self._call("get_object", Key=key, Range="bytes=0-0")
            except Failed as told:
                raise (failed if told.kind == "range" else told) from None
            answer["Body"].close()
            found = _found(answer)
            return Found(int(answer["ContentRange"].rpartition("/")[2]), found.etag, found.nonce)

    def get(self, key: str, start: int, into: memoryview, etag: str | None) -> Found:
        """See :meth:`ObjectClient.get`."""
        condition = {"IfMatch": etag} if etag else {}
        answer = self._call("get_object", Key=key, Range=f"bytes={start}-{start + len(into) - 1}", **condition)
        body = answer["Body"]
        with contextlib.closing(body):
            found = _found(answer)
            first = start
            told = answer.get("ContentRange", "")
            if told:
                span, _, total = told.removeprefix("bytes ").partition("/")
                first = int(span.partition("-")[0])
                found = Found(int(total), found.etag, found.nonce)
            elif start:
                raise Failed("refused", f"the server answers a request for bytes from {start} on with the whole object")
            if first != start:
                raise Failed("transient", f"bytes from {start} on were asked for, the answer begins at byte {first}")
            if etag and found.etag != etag:
                raise Failed("condition", f"its ETag is {found.etag} now, it was {etag}")
            wanted = min(len(into), found.size - start)
            got = 0
            try:
                while got < wanted:
                    count = body.readinto(into[got : min(got + _CHUNK, wanted)])
                    if not count:
                        break
                    got += count
            except Exception as error:
                failed = failed_of(error, "get_object")
                if failed.kind != "transient":
                    raise failed from error
                raise Partial(f"{got} of {wanted} bytes came: {failed.text}", got, found) from error
            if got < wanted:
                raise Partial(f"{got} of {wanted} bytes came, then the body ended", got, found)
            return found

    def get_all(self, key: str) -> tuple[bytes, Found]:
        """See :meth:`ObjectClient.get_all`."""
        answer = self._call("get_object", Key=key)
        found = _found(answer)
        with contextlib.closing(answer["Body"]) as body:
            try:
                data = body.read()
            except Exception as error:
                raise failed_of(error, "get_object") from error
        if len(data) != found.size:
            raise Failed("transient", f"{len(data)} of {found.size} bytes came, then the body ended")
        return data, found

    # -- writing ---------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes | bytearray, *, nonce: str, if_absent: bool) -> None:
        """See :meth:`ObjectClient.put`."""
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._call("put_object", Key=key, Body=data, Metadata={NONCE: nonce}, **condition)

    def begin(self, key: str, nonce: str) -> str:
        """See :meth:`PartClient.begin`."""
        return str(self._call("create_multipart_upload", Key=key, Metadata={NONCE: nonce})["UploadId"])

    def part(self, key: str, upload_id: str, number: int, data: bytes | bytearray) -> dict[str, str]:
        """See :meth:`PartClient.part`. Where parts have checksums, S3 wants them once more when the upload is completed."""
        answer = self._call("upload_part", Key=key, UploadId=upload_id, PartNumber=number, Body=data)
        return {name: value for name, value in answer.items() if name == "ETag" or (name.startswith("Checksum") and name != "ChecksumType")}

    def complete(self, key: str, upload_id: str, parts: list[dict[str, str]], *, if_absent: bool) -> None:
        """See :meth:`PartClient.complete`."""
        named = [{"PartNumber": number, **part} for number, part in enumerate(parts, 1)]
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._call("complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload={"Parts": named}, **condition)

    def abort(self, key: str, upload_id: str) -> None:
        """See :meth:`PartClient.abort`."""
        try:
            self._call("abort_multipart_upload", Key=key, UploadId=upload_id)
        except Failed as failed:
            if failed.kind not in ("lost", "missing"):
                raise

    def delete(self, key: str) -> None:
        """See :meth:`ObjectClient.delete`."""
        try:
            self._call("delete_object", Key=key)
        except Failed as failed:
            if failed.kind != "missing":
                raise

    # -- listing ---------------------------------------------------------------------------------------------------------

    def list(self, prefix: str, again: Again) -> Iterator[Listed]:
        """See :meth:`ObjectClient.list`."""
        more: dict[str, str] = {}
        while True:
            page = again(lambda more=more: self._call("list_objects_v2", Prefix=prefix, **more))  # type: ignore[misc]
            for item in page.get("Contents", ()):
                yield Listed(item["Key"], int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self, prefix: str, again: Again) -> Iterator[Upload]:
        """See :meth:`PartClient.uploads`."""
        more: dict[str, str] = {}
        while True:
            page = again(lambda more=more: self._call("list_multipart_uploads", Prefix=prefix, **more))  # type: ignore[misc]
            found = page.get("Uploads", ())
            for item in found:
                yield Upload(item["Key"], item["UploadId"], item["Initiated"].timestamp())
            if not page.get("IsTruncated") or not found:
                return
            # SeaweedFS does not say where to go on, and its pages are in no order: after 1,000 uploads, those left are seen when
            # the first are aborted.
            after = (page.get("NextKeyMarker") or found[-1]["Key"], page.get("NextUploadIdMarker") or found[-1]["UploadId"])
            if more and after == (more["KeyMarker"], more["UploadIdMarker"]):
                return
            more = {"KeyMarker": after[0], "UploadIdMarker": after[1]}

    def check_bucket(self) -> None:
        """See :meth:`ObjectClient.check_bucket`. A bucket that may not be looked at is taken to be there."""
        try:
            self._call("head_bucket")
        except Failed as failed:
            if failed.kind == "missing":
                raise Failed("refused", f"the bucket {self.bucket} does not exist") from failed
            if failed.kind == "transient":
                raise


_KNOWN = frozenset((
    "key", "secret", "token", "username", "password", "endpoint_url", "anon", "use_ssl", "client_kwargs", "config_kwargs",
    "s3_additional_kwargs", "requester_pays",
))  # fmt: skip


def _found(answer: Mapping[str, Any]) -> Found:
    return Found(int(answer["ContentLength"]), str(answer.get("ETag", "")), (answer.get("Metadata") or {}).get(NONCE))


def _api(operation: str) -> str:
    return "".join(part.capitalize() for part in operation.split("_"))
