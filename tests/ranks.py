"""Persistent gloo ranks for tests: importing torch costs seconds per process, so the processes are started once per session.

``pool.run(n, fn, *args, **kwargs)`` runs the module-level function ``fn(rank, world, *args, **kwargs)`` on ``n`` processes inside a default
process group made for that one call, and returns the list of results in rank order. Everything a test needs to know:

- ``fn`` is sent by name (module and qualified name), arguments and results are pickled (plain pickle, tensors by value).
- The failure that happened first is raised again in the test, with rank and traceback as a note. It keeps its type, also when it is no
  ``Exception`` (``CheckpointException`` is a ``BaseException``). Other ranks get a few seconds to finish, then they are killed.
- A rank that hangs is killed after ``timeout`` seconds and reported with the stacks of all its threads.
- Killed ranks are started again by the next call. Nothing of one call is seen by the next: the group has a store prefix of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["RankDied", "RankFailed", "RankHung", "RankPool"]

GRACE = 5.0
"""Seconds that the other ranks get to finish after a first failure."""


class RankFailed(RuntimeError):
    """A rank raised something that cannot be pickled; the message holds its traceback."""


class RankDied(RuntimeError):
    """The process of a rank ended while it ran."""


class RankHung(TimeoutError):
    """A rank did not finish in time and was killed."""


@dataclass(frozen=True, slots=True)
class _Job:
    module: str
    file: str
    qualname: str
    args: bytes
    rank: int
    world: int
    run: int
    store: tuple[str, int]
    timeout: float
    sys_path: list[str]


@dataclass(frozen=True, slots=True)
class _Done:
    run: int
    result: bytes | None
    error: bytes | None = None
    """A pickled exception; None when it does not pickle."""
    trace: str = ""
    at: float = 0.0
    """``time.monotonic()`` of the failure: one clock for all processes of a machine."""


@dataclass(slots=True)
class _Worker:
    process: Any
    conn: Connection
    stacks: Path
    """Where faulthandler writes the stacks of all threads on SIGUSR1."""
    done: _Done | None = None
    warm: bool = False
    """It has answered before, so torch is imported."""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.conn.close()


class RankPool:
    """Up to ``max_size`` persistent processes, started when a call needs them."""

    def __init__(self, max_size: int = 8) -> None:
        self.max_size = max_size
        self._workers: list[_Worker] = []
        self._runs = 0
        self._store: Any = None
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self.started = 0
        """Processes started so far: a self test proves that calls share them."""

    def run(self, n: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
        """``fn(rank, world, *args, **kwargs)`` of ranks 0..n-1. Raises what the first failing rank raised, RankDied, RankHung."""
        if not 1 <= n <= self.max_size:
            raise ValueError(f"world size {n}, this pool has 1..{self.max_size}")
        module, file = _module_of(fn)
        payload = pickle.dumps((args, kwargs))
        self._ensure(n)
        self._runs += 1
        workers = self._workers[:n]
        try:
            for rank, worker in enumerate(workers):
                worker.done = None
                job = _Job(module, file, fn.__qualname__, payload, rank, n, self._runs, ("127.0.0.1", self._store.port), timeout, sys.path)
                worker.conn.send_bytes(pickle.dumps(job))
            self._collect(workers, fn.__qualname__, timeout)
        finally:
            # Whatever is still busy (this call was interrupted, or a rank hangs) must not meet the next call.
            for worker in workers:
                if worker.done is None:
                    worker.kill()
        results = []
        for worker in workers:
            assert worker.done is not None and worker.done.result is not None
            results.append(pickle.loads(worker.done.result))
        return results

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._store = None
        self._dir.cleanup()

    def _ensure(self, n: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore

            # Hosted here, so that it outlives every rank and no rank has to guess a free port.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ctx = multiprocessing.get_context("spawn")
        for rank in range(n):
            # A process keeps its rank for life: torch's caches of meshes remember it.
            if rank < len(self._workers) and self._workers[rank].process.is_alive():
                continue
            ours, theirs = ctx.Pipe()
            stacks = Path(self._dir.name) / f"stacks-{self.started}"
            # Not a daemon: the code under test may start processes of its own.
            process = ctx.Process(target=_serve, args=(theirs, str(stacks)), name=f"rank-worker-{self.started}")
            process.start()
            theirs.close()
            self.started += 1
            started = _Worker(process, ours, stacks)
            if rank < len(self._workers):
                self._workers[rank].kill()
                self._workers[rank] = started
            else:
                self._workers.append(started)

    def _collect(self, workers: list[_Worker], what: str, timeout: float) -> None:
        world = len(workers)
        deadline = time.monotonic() + timeout + 120.0 * (not all(worker.warm for worker in workers))  # for `import torch`
        busy = {worker.conn: rank for rank, worker in enumerate(workers)}
        failures: list[tuple[float, int, BaseException]] = []
        while busy:
            ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, Connection)
                rank = busy.pop(conn)
                worker = workers[rank]
                try:
                    worker.done = done = pickle.loads(conn.recv_bytes())
                    worker.warm = True
                except (EOFError, OSError):
                    worker.process.join(GRACE)
                    died = RankDied(f"rank {rank} of {world} died in {what} with exit code {worker.process.exitcode}")
                    failures.append((0.0, rank, died))  # before all others: a lost peer is what they report
                else:
                    if done.result is None:
                        failures.append((done.at, rank, _revive(done, rank, world, what)))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            (_, _, first), *others = sorted(failures, key=lambda failure: failure[:2])
            for _, rank, error in others:
                first.add_note(f"later, rank {rank} raised {type(error).__name__}: {str(error)[:200]}")
            if busy:
                first.add_note(f"ranks {sorted(busy.values())} were still running {GRACE:g} s later and were killed")
            raise first
        if busy:
            raise RankHung(self._describe_hung(workers, busy, what, timeout))

    @staticmethod
    def _describe_hung(workers: list[_Worker], busy: dict[Connection, int], what: str, timeout: float) -> str:
        hung = f"ranks {sorted(busy.values())} of {len(workers)}"
        lines = [f"{hung} did not finish {what} within {timeout:g} s and were killed; their stacks:"]
        for rank in sorted(busy.values()):
            os.kill(workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        for rank in sorted(busy.values()):
            stacks = workers[rank].stacks
            lines += [f"--- rank {rank}", stacks.read_text() if stacks.exists() else "(not started yet)"]
        return "\n".join(lines)


def _module_of(fn: Callable[..., Any]) -> tuple[str, str]:
    module, file = fn.__module__, fn.__code__.co_filename
    if "<" in fn.__qualname__ or module == "__main__":
        raise ValueError(f"{module}.{fn.__qualname__} cannot be sent to ranks: it must be a function at the top of an importable module")
    return module, file


def _revive(done: _Done, rank: int, world: int, what: str) -> BaseException:
    note = f"raised by rank {rank} of {world} in {what}:\n{done.trace}"
    if done.error is None:
        return RankFailed(note)
    error: BaseException = pickle.loads(done.error)
    error.add_note(note)
    return error


# ---------------------------------------------------------------- in the worker


def _serve(conn: Connection, stacks: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(stacks, "w") as stacks_file, contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
        import torch

        torch.set_num_threads(1)
        while True:
            job: _Job = pickle.loads(conn.recv_bytes())
            conn.send_bytes(pickle.dumps(_run(job)))


def _run(job: _Job) -> _Done:
    try:
        sys.path[:] = job.sys_path
        fn = _resolve(job)
        args, kwargs = pickle.loads(job.args)
        with _process_group(job):
            try:
                return _Done(job.run, pickle.dumps(fn(job.rank, job.world, *args, **kwargs)))
            except BaseException as e:
                # Before the group is destroyed: that makes the other ranks fail too, and they must not look like the first.
                return _failed(job, e)
    except BaseException as e:
        return _failed(job, e)
    finally:
        gc.collect()


def _failed(job: _Job, e: BaseException) -> _Done:
    at, trace = time.monotonic(), traceback.format_exc()
    try:
        error: bytes | None = pickle.dumps(e)
        pickle.loads(error)  # many exceptions pickle but do not come back
    except Exception:
        error = None
    return _Done(job.run, None, error, trace, at)


@contextlib.contextmanager
def _process_group(job: _Job) -> Any:
    import torch.distributed as dist

    host, port = job.store
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world), MASTER_ADDR=host, MASTER_PORT=str(port))
    limit = timedelta(seconds=120)  # a busy machine may need many seconds to import what a rank needs
    store = dist.PrefixStore(f"run-{job.run}", dist.TCPStore(host, port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
    try:
        yield
    finally:
        if dist.is_initialized():  # the function may have destroyed it itself
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            forget_meshes()


def forget_meshes() -> None:
    """DTensor caches how operators shard, with the mesh it saw first; a mesh of a later group is equal to it, but its groups are gone."""
    import torch
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:
        # torch 2.10. Its plans of redistributions hold the placements of the cleared cache, whose masks nobody fills any more.
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        _gen_transform_infos.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _resolve(job: _Job) -> Callable[..., Any]:
    module = sys.modules.get(job.module)
    if module is None:
        try:
            module = importlib.import_module(job.module)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{job.module}.".startswith(f"{e.name}."):
                raise  # something that the test module imports is missing
            spec = importlib.util.spec_from_file_location(job.module, job.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[job.module] = module
            spec.loader.exec_module(module)
    fn: Any = module
    for part in job.qualname.split("."):
        fn = getattr(fn, part)
    return fn  # type: ignore[no-any-return]
