"""Places of the same name that are not one place: folders on the disk of each node, memory of each process, buckets of their own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp_dcp
from ucp_dcp.errors import StoreError
from ucp_dcp.storage.commit import check_visible
from ucp_dcp.storage.store import open_store

LOST = (1, 3)


def save_apart(rank: int, world: int, shared: str, own: str, options: dict[str, Any], value: float) -> str:
    """Ranks 1 and 3 write into places of their own."""
    url = own.format(rank=rank) if rank in LOST else shared
    state = {"model": {f"w{rank}": torch.full((rank + 2,), value)}}
    try:
        ucp_dcp.save(state, url, storage_options=options)
    except StoreError as error:
        return str(error)
    return "saved"


def told(messages: list[str]) -> None:
    assert len(set(messages)) == 1, messages
    (text,) = set(messages)
    assert "does not see what 2 of 4 ranks wrote" in text and "rank 1 (" in text and "rank 3 (" in text, text
    assert "rank 0 (" not in text and "rank 2 (" not in text and "nothing was committed" in text


def test_folders_of_each_node(ranks: Any, tmp_path: Path) -> None:
    told(ranks.run(4, save_apart, str(tmp_path / "node0"), str(tmp_path / "node{rank}"), {}, 1.0))
    assert not list(tmp_path.glob("*/ucp.json")) and not list((tmp_path / "node0").rglob("*.distcp"))


def test_memory_of_each_process(ranks: Any) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    messages = ranks.run(4, save_apart, url, url, {}, 1.0)
    assert len(set(messages)) == 1 and "3 of 4 ranks" in messages[0] and "rank 3 (" in messages[0], messages


def test_buckets_of_their_own(ranks: Any, seaweed_server: Any) -> None:
    """The old checkpoint stays what it was."""
    name, options = uuid.uuid4().hex, seaweed_server.storage_options
    url = f"s3://bucket/{name}/run"
    ucp_dcp.save({"old": torch.ones(3)}, url, storage_options=options, no_dist=True)
    for rank in LOST:
        seaweed_server.make_bucket(f"own-{rank}")
    told(ranks.run(4, save_apart, url, "s3://own-{rank}/" + name, options, 2.0))
    assert list(ucp_dcp.open_checkpoint(url, storage_options=options)) == ["old"]
    assert len({entry.path.partition("/")[0] for entry in open_store(url, **options).list("g-")}) == 1


def test_ranks_are_counted_not_files(tmp_path: Path) -> None:
    """A rank writes several files; of many ranks all are named, four with their cause."""
    store = open_store(tmp_path, sync=False)
    generation = "g-" + "a" * 32
    store.put(f"{generation}/__0_0.distcp", b"12")
    files = {f"{generation}/__{rank}_{n}.distcp": 2 for rank in range(7) for n in range(3 if rank else 1)}
    with pytest.raises(StoreError) as raised:
        check_visible(store, generation, files)
    text = str(raised.value)
    assert "6 of 7 ranks" in text and text.count("(") == 4 and "all of them: 1, 2, 3, 4, 5, 6" in text
    with pytest.raises(StoreError, match=r"rank 0 \(.* has 2 bytes instead of 3\)"):
        check_visible(store, generation, {f"{generation}/__0_0.distcp": 3})
