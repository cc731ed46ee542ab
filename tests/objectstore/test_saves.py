"""Whole saves and loads through a network that fails."""

from __future__ import annotations

import uuid

import pytest
import torch

import ucp_dcp
from ucp_dcp.errors import StoreError
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.fault_proxy import Rule
from ucp_dcp.testing.servers import options_for

MIB = 1 << 20


def state(seed, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {f"w{i}": torch.randn(rows, 1 << 18, generator=generator) for i in range(3)},
        "small": {f"b{i}": torch.randn(7, generator=generator) for i in range(20)},
        "step": seed,
    }


def emptied(wanted):
    return {
        "model": {k: torch.zeros_like(v) for k, v in wanted["model"].items()},
        "small": {k: torch.zeros_like(v) for k, v in wanted["small"].items()},
        "step": -1,
    }


def same(found, wanted):
    flat = [(found[a][k], v) for a in ("model", "small") for k, v in wanted[a].items()]
    return all(torch.equal(a, b) for a, b in flat) and found["step"] == wanted["step"]


def options(proxy, **own):
    return {**options_for(proxy.endpoint), "part_size": 5 * MIB, "piece": MIB, "deadline": 60, **own}


@pytest.mark.parametrize("failures", [20, pytest.param(60, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.slow)])
def test_many_errors_in_one_save_and_load(proxy, failures):
    """Half of all requests fail, until so many have; then bit for bit equal."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    small = options(proxy, piece=(18 * MIB // (2 * failures)) & ~4095, gap=0)  # so that a load has so many requests
    codes = [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (502, "BadGateway"), (504, "GatewayTimeout")]
    each = failures // len(codes)
    proxy.rules = [Rule("answer", status=status, code=code, probability=0.13, times=each) for status, code in codes]
    wanted = state(1)
    ucp_dcp.save(wanted, url, storage_options=small)
    found = emptied(wanted)
    ucp_dcp.load(found, url, storage_options=small)
    assert same(found, wanted)
    assert sum(rule.used for rule in proxy.rules) > 0.9 * failures
    assert list(open_store(url, **small).uploads()) == []


def test_credentials_revoked_midway(proxy):
    """The save fails with a clear error, and the old checkpoint is intact, also as soon as the credentials are back."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    old = state(1)
    ucp_dcp.save(old, url, storage_options=options(proxy))
    for nth in (1, 3, 5):
        proxy.rules = [
            Rule("pass", times=nth),
            Rule("answer", status=400, code="ExpiredToken"),
        ]
        with pytest.raises(StoreError, match=r"ExpiredToken.*the credentials have expired"):
            ucp_dcp.save(state(2), url, storage_options=options(proxy))
        proxy.rules = []
        found = emptied(old)
        ucp_dcp.load(found, url, storage_options=options(proxy))
        assert same(found, old)


def revoked(rank, world, url, storage_options):
    try:
        ucp_dcp.save({f"w{rank}": torch.full((5 * MIB // 4,), float(rank)), "all": torch.ones(3)}, url, storage_options=storage_options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_credentials_revoked_midway_on_all_ranks(proxy, ranks):
    """Rank 1's are gone when it uploads; all ranks are told why."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    proxy.rules = [Rule("answer", method="PUT", path="__[0-9]_0", nth=(2,), status=403, code="InvalidAccessKeyId")]
    told = ranks.run(3, revoked, url, options(proxy))
    assert {kind for kind, _ in told} == {"StoreError"}, told
    assert all("InvalidAccessKeyId" in text and "the access key is not known there" in text for _, text in told)
    assert all(url in text for _, text in told)
    proxy.rules = []
    store = open_store(url, **options(proxy))
    assert list(store.list()) == [] and list(store.uploads()) == []
