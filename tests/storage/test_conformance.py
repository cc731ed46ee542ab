"""The shipped conformance suite, run on the stores of the package."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from ucp_dcp.storage.fsspec_store import FsspecStore
from ucp_dcp.storage.local import LocalStore
from ucp_dcp.storage.store import open_store
from ucp_dcp.testing.crash import Disk, FaultyStore
from ucp_dcp.testing.store_conformance import StoreConformance

from .dictstore import DictStore
from .objectfs import ObjectFileSystem


class TestLocal(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "not" / "there yet")


class TestLocalWithoutSync(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return open_store(f"file://{tmp_path}", sync=False)


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self):
        return open_store(f"memory://{uuid.uuid4().hex}/root")


class TestLocalThroughFsspec(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return FsspecStore(fsspec.filesystem("file"), str(tmp_path / "root"))


class TestObjectStore(StoreConformance):
    """A file system with the habits of S3: uploads in parts, completed by close(), conditional writes."""

    @pytest.fixture
    def store(self):
        return FsspecStore(ObjectFileSystem(bucket=uuid.uuid4().hex), "root")


class TestCrashDisk(StoreConformance):
    """The disk of the crash kit keeps the rules as long as nothing breaks."""

    exclusive_put_threads = 1
    concurrent = 0

    @pytest.fixture
    def store(self):
        return Disk(self.concurrent).store()

    def test_pickles(self):
        pytest.skip("it has no place that a copy could share")


class TestCrashDiskOfKnownSizes(TestCrashDisk):
    concurrent = 4


class TestFaultyLocal(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return FaultyStore(LocalStore(tmp_path, sync=False))

    def test_pickles(self):
        pytest.skip("it counts what is done in this process")


class TestDict(StoreConformance):
    """The store that crashes in the commit tests keeps the rules as long as it lives."""

    exclusive_put_threads = 1

    @pytest.fixture
    def store(self):
        return DictStore()

    def test_pickles(self):
        pytest.skip("it has no place that a copy could share")
