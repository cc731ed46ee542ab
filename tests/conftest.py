"""Fixtures for all tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from isolated import run_isolated
from ranks import RankPool

from ucp_dcp.testing.servers import Server, moto, seaweedfs


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "every combination, also where a covering part is tested otherwise (make test-thorough)"
    parser.addoption("--thorough", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis takes the same examples every time where tests gate a change; ``--thorough`` looks for new ones."""
    settings.register_profile("fixed", deadline=None, derandomize=not config.getoption("--thorough"))
    settings.load_profile("fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run with ``--thorough``, or when they are asked for by ``-m slow`` or by name."""
    if config.getoption("--thorough") or "slow" in config.getoption("-m", "") or any("::" in str(a) for a in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether every combination was asked for."""
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that live as long as the session: ``ranks.run(4, fn, *args)``; see ``tests/ranks.py``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS, started by the first test that asks for it, with a bucket named "bucket"."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The moto server, started by the first test that asks for it, with a bucket named "bucket"."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def isolated_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``isolated_python(code, forbid=("ucp_dcp",), args=())`` -> output of a fresh interpreter that cannot import those packages."""
    folder: Path = tmp_path_factory.mktemp("isolated")
    count = itertools.count()

    def run(code: str, **kwargs: object) -> str:
        return run_isolated(folder / f"script_{next(count)}.py", code, **kwargs)  # type: ignore[arg-type]

    return run
