"""A proxy between a client and an S3 server on this machine that breaks chosen requests, as networks and loaded servers do.

    with FaultProxy(server.port) as proxy:
        store = open_store("s3://bucket/run", **options_for(proxy.endpoint))
        proxy.rules = [Rule("answer", method="PUT", status=503, code="SlowDown", times=3)]

Requests pass unchanged, so signatures stay valid. It runs in a thread of its own; ``python -m ucp_dcp.testing.fault_proxy PORT RULES.json``
runs one alone, for measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

__all__ = ["Action", "FaultProxy", "Rule", "Seen"]

Action: TypeAlias = Literal["pass", "delay", "answer", "reset", "lose", "cut", "truncate", "stall", "throttle"]
"""What happens to a request.

delay: it is forwarded after ``seconds``; answer: the proxy answers with ``status``, ``code`` and ``body`` and forwards nothing; reset: the
connection is reset and nothing forwarded; lose: the server carries it out, then the connection is reset before the answer; cut: the
connection is reset after ``size`` bytes of the body of the answer; truncate: it is closed in order after those; stall: it hangs after those
for ``seconds``; throttle: ``size`` bytes per second in both directions.
"""

_CHUNK = 1 << 16
_HEAD = 1 << 20


@dataclass
class Rule:
    """Which requests, and what happens to them; the first rule that matches a request decides.

    ``method`` and ``path`` (with its query) are regular expressions; ``header``: a header that the request must have. Of the requests that
    match the rule takes ``nth`` (counted from 1), every ``every``-th, or each with ``probability``, and ``times`` of them at most.
    """

    action: Action
    method: str = ".*"
    path: str = ""
    header: str = ""
    nth: Sequence[int] = ()
    every: int = 1
    probability: float = 1.0
    times: int | None = None
    seconds: float = 0.0
    size: int = 0
    status: int = 503
    code: str = "SlowDown"
    body: str | None = None
    matched: int = field(default=0, init=False)
    used: int = field(default=0, init=False)

    def takes(self, method: str, path: str, headers: dict[str, str], chance: random.Random) -> bool:
        """Whether the rule applies to the request; counts it."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, path) or (self.header and self.header.lower() not in headers):
            return False
        self.matched += 1
        hit = self.matched in self.nth if self.nth else self.matched % self.every == 0 and chance.random() < self.probability
        if not hit or (self.times is not None and self.used >= self.times):
            return False
        self.used += 1
        return True


@dataclass
class Seen:
    """A request: what was done to it, the status of its answer (0: none), and bytes of body there and back so far."""

    method: str
    path: str
    action: Action
    status: int = 0
    sent: int = 0
    received: int = 0

    def count_sent(self, size: int) -> None:
        """More of the body of the request."""
        self.sent += size

    def count_received(self, size: int) -> None:
        """More of the body of the answer."""
        self.received += size


class FaultProxy:
    """Listens on a free port of 127.0.0.1 while its context is open. ``rules`` may be replaced at any time; ``seen`` grows."""

    def __init__(self, port: int, rules: Sequence[Rule] = (), *, listen: int = 0, seed: int = 0) -> None:
        self.rules: Sequence[Rule] = list(rules)
        self.seen: list[Seen] = []
        self.port = 0
        self._upstream = port
        self._listen = listen
        self._chance = random.Random(seed)
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", self._listen, limit=_HEAD))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    # -- connections -----------------------------------------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                head = await _Head.read(reader)
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self._upstream, limit=_HEAD)
                    upstream[1].get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not await self._request(head, reader, writer, *upstream):
                    break
        for stream in (writer, upstream[1] if upstream else None):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    async def _request(
        self,
        head: _Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> bool:
        """One request; whether the connection goes on."""
        method, path, _ = head.first.split(" ", 2)
        rule = next((rule for rule in self.rules if rule.takes(method, path, head.headers, self._chance)), Rule("pass"))
        action = rule.action
        seen = Seen(method, path, action)
        self.seen.append(seen)
        if action == "delay":
            await asyncio.sleep(rule.seconds)
        if action == "reset":
            return _reset(writer)
        if head.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if action == "answer":
            await _body(reader, None, head, seen.count_sent)
            seen.status = rule.status
            return await _answer(writer, rule, method)
        rate = rule.size if action == "throttle" else None
        to_server.write(head.without_expect())
        await _body(reader, to_server, head, seen.count_sent, rate=rate)
        await to_server.drain()
        answer = await _Head.read(from_server)
        seen.status = int(answer.first.split(" ", 2)[1])
        if method == "HEAD" or seen.status in (204, 304):
            answer.length = 0
        if action == "lose":
            await _body(from_server, None, answer, seen.count_received)
            return _reset(writer)
        writer.write(answer.raw)
        if action in ("cut", "truncate", "stall"):
            await _body(from_server, writer, answer, seen.count_received, limit=rule.size)
            await writer.drain()
            if action == "stall":
                await asyncio.sleep(rule.seconds)
            return False if action == "truncate" else _reset(writer)
        await _body(from_server, writer, answer, seen.count_received, rate=rate)
        await writer.drain()
        return "close" not in (head.headers.get("connection", "").lower(), answer.headers.get("connection", "").lower())


@dataclass
class _Head:
    """First line and headers of a message. ``length``: of its body; None: chunked."""

    raw: bytes
    first: str
    headers: dict[str, str]
    length: int | None

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Head:
        raw = await reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        return cls(raw, lines[0], headers, None if chunked else int(headers.get("content-length", 0)))

    def without_expect(self) -> bytes:
        """It was answered by the proxy. No client signs it."""
        return re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", self.raw)


async def _body(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None,
    head: _Head,
    count: Callable[[int], None],
    *,
    limit: int | None = None,
    rate: int | None = None,
) -> None:
    """Pass a body on, or with no writer drop it; ``limit``: bytes of it at most, ``rate``: bytes per second."""
    passed = 0

    async def out(data: bytes) -> bool:
        nonlocal passed
        if limit is not None:
            data = data[: limit - passed]
        passed += len(data)
        count(len(data))
        if writer is not None and data:
            writer.write(data)
            await writer.drain()
        if rate:
            await asyncio.sleep(len(data) / rate)
        return limit is None or passed < limit

    left = head.length
    while left is None:
        line = await reader.readline()
        size = int(line.split(b";")[0] or b"0", 16)
        data = await reader.readexactly(size + 2) if size else await reader.readline()
        if not await out(line + data) or not size:
            return
    while left and (limit is None or passed < limit):
        data = await reader.read(min(_CHUNK, left))
        if not data:
            raise ConnectionError("the sender closed the connection within a body")
        left -= len(data)
        await out(data)


async def _answer(writer: asyncio.StreamWriter, rule: Rule, method: str) -> bool:
    body = rule.body
    if body is None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{rule.code}</Code><Message>injected</Message></Error>'
    data = body.encode()
    head = f"HTTP/1.1 {rule.status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + (b"" if method == "HEAD" else data))
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> bool:
    """RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _main() -> None:
    rules = [Rule(**rule) for rule in json.loads(Path(sys.argv[2]).read_text())] if len(sys.argv) > 2 else []
    with FaultProxy(int(sys.argv[1]), rules) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()  # until whoever started it ends


if __name__ == "__main__":
    _main()
