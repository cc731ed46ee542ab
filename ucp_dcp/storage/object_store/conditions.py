"""``put(if_absent=True)``: by ``If-None-Match: *`` where the server keeps it, and what is done where it does not.

S3, SeaweedFS, Ceph and others keep the condition: of several writers one wins. Some servers answer 501 to it, and some write regardless.
Which a server does is found out once per process and bucket, by a small object that is written twice; for amazonaws.com it is known. Where
the condition is not kept, the path is looked at before it is written, which is weaker: two writers at one instant may both succeed.

A condition that does not hold may be our own doing: the request was carried out and its answer lost. So every object carries a nonce of
its writer, and the one that is there is looked at before somebody is told that he lost.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...errors import StoreError, StoreExistsError
from .client import Failed
from .retry import Attempts

if TYPE_CHECKING:
    from .store import ObjectStore

__all__ = ["give_up", "kept", "probe", "put_new"]

_log = logging.getLogger(__name__)

_KNOWN: dict[str, bool] = {}  # endpoint and bucket -> whether conditions are kept


def _server(store: ObjectStore) -> str:
    return f"{store.protocol}://{store.root.partition('/')[0]} at {store.endpoint}"


def kept(store: ObjectStore) -> bool:
    """Whether the server is taken to keep conditions: until it is known not to."""
    return _KNOWN.get(_server(store), True)


def give_up(store: ObjectStore, why: str) -> None:
    """From now on paths are looked at first. Says so in the log."""
    if _KNOWN.get(_server(store), True):
        _log.warning(
            "%s: the server does not keep If-None-Match (%s); whether a path is free is looked up before it is written instead, so two "
            "jobs that save to one place at the same instant with overwrite=False may both succeed",
            store.url,
            why,
        )
    _KNOWN[_server(store)] = False


def probe(store: ObjectStore) -> None:
    """Find out, if it is not known, whether the server keeps the condition."""
    if _server(store) in _KNOWN:
        return
    if (urlsplit(store.endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        _KNOWN[_server(store)] = True
        return
    path = f".ucp.json.{secrets.token_hex(8)}.tmp"  # a name that `collect` deletes, should we die here
    key = store.key(path)
    try:
        for _ in range(2):
            nonce = secrets.token_hex(16)
            try:
                store.request(path, "writing a probe", partial(_probe, store, key, nonce))
            except Failed as failed:
                if failed.kind == "condition":
                    # Also of the first turn: a repeated request whose first answer was lost.
                    _KNOWN[_server(store)] = True
                    return
                if failed.kind == "unconditional":
                    give_up(store, failed.text)
                    return
                raise store.translated(failed, path, "writing a probe") from failed
        give_up(store, "it wrote one object twice")
    finally:
        with contextlib.suppress(StoreError):
            store.delete(path)


def _probe(store: ObjectStore, key: str, nonce: str, attempts: Attempts) -> None:
    store.client.put(key, b"", nonce=nonce, if_absent=True)


def put_new(store: ObjectStore, path: str, data: bytes | bytearray) -> None:
    """Write an object that must not be there. Raises StoreExistsError, or Failed."""
    key, nonce = store.key(path), secrets.token_hex(16)

    def attempt(attempts: Attempts) -> None:
        conditional = kept(store)
        if not conditional and not (attempts.unsure and store.wrote(path, nonce)):
            store.check_absent(path)
        try:
            store.client.put(key, data, nonce=nonce, if_absent=conditional)
        except Failed as failed:
            if failed.kind == "unconditional" and conditional:
                give_up(store, failed.text)
                attempt(attempts)
                return
            if failed.kind != "condition":
                raise
            if not store.wrote(path, nonce):
                raise StoreExistsError(f"{path} exists already in {store.url}") from failed

    try:
        store.request(path, "writing it", attempt)
    except StoreExistsError:
        raise
    except StoreError:
        if not store.there_after_all(path, nonce):
            raise
