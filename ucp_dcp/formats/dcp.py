"""Stock DCP checkpoints: ``.metadata`` and ``__<rank>_<n>.distcp`` files of ``torch.distributed.checkpoint``'s FileSystemWriter.

``.metadata`` is a pickle of DCP's own classes. It is read with inert stand-ins for them, so opening runs nothing, and does not depend on
the torch version that wrote it. An item is a complete ``torch.save`` archive inside a data file; ``.metadata`` says where it starts, not
where its tensor bytes are nor in which order: that is read from the item itself, when it is first needed (``locate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..catalog import Catalog, CatalogBuilder, ObjectRow
from ..dtypes import itemsize, name_of
from ..errors import CorruptCheckpointError, FormatError, StoreNotFoundError, UnsupportedError
from ..names import Role
from ..safe_pickle import EnumStub, Stub, loads
from ..storage.store import Store
from .dcp_items import ItemCache
from .source import Located, Source

__all__ = ["METADATA", "DcpSource", "catalog_from_metadata", "open_dcp", "read_metadata"]

METADATA = ".metadata"
PLANNER_DATA_KEY = "ucp_dcp"
"""Key of ``planner_data`` under which our save planner leaves roles: ``{"tensors": {key: [role, fqn, state, pattern]}}``."""
_MAX_METADATA = 1 << 32
_FEW_FILES = 16
_NOWHERE = "-"


class DcpSource(Source):
    """A stock DCP checkpoint. ``catalog.chunk_offset`` is where each item starts; ``locate`` says where its tensor bytes are.

    ``prefix`` is its folder in the store, ``""`` or with a slash at the end.
    """

    def __init__(
        self, catalog: Catalog, store: Store, provenance: Mapping[str, Any], lengths: NDArray[np.int64], prefix: str = ""
    ) -> None:
        super().__init__(catalog, store, "dcp", provenance)
        self.prefix = prefix
        self._items = ItemCache(lengths)

    @property
    def item_lengths(self) -> NDArray[np.int64]:
        """Bytes of each chunk's item, framing included; an item starts at ``catalog.chunk_offset``."""
        return self._items.lengths

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Where these chunks lie: reads about 1 KiB of each item that was not asked for before."""
        return self._items.locate(self.catalog, self.store, np.asarray(chunks, dtype=np.int64))


def read_metadata(store: Store, prefix: str = "") -> Stub:
    """``.metadata`` in folder ``prefix`` of a store as an inert object: DCP's class, or that of megatron-core 0.15.

    Raises UnsafePickleError when it asks for anything to be run, FormatError when it is something else, StoreError.
    """
    what = f"{prefix}{METADATA} in {store.url}"
    metadata = loads(store.read(prefix + METADATA), what=what, stubs=_stand_in, inert_unknown=True, max_size=_MAX_METADATA)
    if not isinstance(metadata, Stub) or metadata.name not in ("Metadata", "MCoreMetadata"):
        raise FormatError(f"{what}: holds a {type(metadata).__name__}, expected torch.distributed.checkpoint's Metadata")
    return metadata


def open_dcp(store: Store, prefix: str = "", metadata: Stub | None = None) -> DcpSource:
    """Open the stock checkpoint in folder ``prefix`` of a store (``metadata``: what :func:`read_metadata` returned for it).

    Raises UnsafePickleError when ``.metadata`` asks for anything to be run, CorruptCheckpointError naming the tensor or file that does not
    fit, StoreError.
    """
    what = f"{prefix}{METADATA} in {store.url}"
    metadata = read_metadata(store, prefix) if metadata is None else metadata
    infos = _storage_infos(_field(metadata, "storage_data"), what, prefix)
    sizes = _file_sizes(store, {path for path, _, _ in infos.values()}, prefix)
    lengths: list[int] = []

    def place(key: str, offset: tuple[int, ...] | None, nbytes: int) -> tuple[str, int, int]:
        found = infos.get((key, offset))
        if found is None:
            where = f"the chunk at {list(offset)} of tensor {key!r}" if offset is not None else f"object {key!r}"
            raise CorruptCheckpointError(f"{what}: {where} is listed, but not where it is stored")
        path, start, length = found
        if length < nbytes or start + length > sizes[path]:
            raise CorruptCheckpointError(
                f"{what}: {key!r} needs {nbytes} bytes and should have {length} bytes at byte {start} of {path}, "
                f"which has {sizes[path]} bytes; the file is truncated or belongs to another save"
            )
        if offset is not None:
            lengths.append(length)
        return found

    catalog = _catalog(metadata, what, place, sizes)
    version = _field(metadata, "version")
    known = {"dcp_version": version} if isinstance(version, str) else {}
    return DcpSource(catalog, store, known, np.asarray(lengths, dtype=np.int64), prefix)


def catalog_from_metadata(metadata: Any) -> Catalog:
    """The catalog of a live ``torch.distributed.checkpoint.metadata.Metadata`` object, whoever read it.

    Where bytes are is the storage reader's secret, so the files and offsets of this catalog mean nothing: it serves planning only.
    Raises FormatError, UnsupportedError for what is not DCP metadata.
    """

    def place(key: str, offset: tuple[int, ...] | None, nbytes: int) -> tuple[str, int, int]:
        return _NOWHERE, 0, 0

    return _catalog(metadata, "the metadata of the storage reader", place, {_NOWHERE: 2**63 - 1})


def _stand_in(module: str, name: str) -> type[Stub] | None:
    if module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard.")):
        return EnumStub if name == "_MEM_FORMAT_ENCODING" else Stub
    return None


def _field(thing: Any, name: str, default: Any = None) -> Any:
    return thing.get(name, default) if isinstance(thing, Stub) else getattr(thing, name, default)


def _kind(thing: Any) -> str:
    return thing.name if isinstance(thing, Stub) else type(thing).__name__


def _ints(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(x) is int and 0 <= x < 2**63 for x in value):
        raise CorruptCheckpointError(f"{what} is {value!r:.80}, expected integers from 0")
    return tuple(value)


def _storage_infos(data: Any, what: str, prefix: str) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """(key, offset) -> (path, start, length) of every item."""
    if not isinstance(data, dict):
        raise UnsupportedError(
            f"{what}: storage_data is {type(data).__name__}; written by a storage writer that is not torch's FileSystemWriter"
        )
    infos: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in data.items():
        if not isinstance(index, Stub) or not isinstance(info, Stub) or index.name != "MetadataIndex" or info.name != "_StorageInfo":
            raise UnsupportedError(f"{what}: storage_data holds {index!r:.60}: {info!r:.60}; not written by torch's FileSystemWriter")
        key, offset = index.get("fqn"), index.get("offset")
        path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(key) is not str or type(path) is not str:
            raise CorruptCheckpointError(f"{what}: an item of {key!r:.60} in file {path!r:.60}")
        start, length = _ints((start, length), f"{what}: the place of {key!r}")
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                f"{what}: {key!r} is stored with a transform ({info.get('transform_descriptors')!r:.80}); compressed or encrypted items "
                "cannot be read in place. Save without extensions"
            )
        place = (key, None if offset is None else _ints(offset, f"{what}: an offset of {key!r}"))
        if place in infos:
            raise CorruptCheckpointError(f"{what}: two items for {key!r} at {offset}")
        infos[place] = (prefix + path, start, length)
    return infos


def _file_sizes(store: Store, paths: set[str], prefix: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    if len(paths) > _FEW_FILES:  # one listing instead of a request per file
        sizes = {entry.path: entry.size for entry in store.list(prefix) if entry.path in paths}
    for path in sorted(paths - set(sizes)):
        try:
            sizes[path] = store.size(path)
        except StoreNotFoundError:
            raise CorruptCheckpointError(f"{store.url}: {METADATA} names the data file {path!r}, which is missing") from None
    return sizes


def _roles(planner_data: Any, what: str) -> Mapping[str, Any]:
    ours = planner_data.get(PLANNER_DATA_KEY) if isinstance(planner_data, Mapping) else None
    tensors = ours.get("tensors") if isinstance(ours, Mapping) else None
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise CorruptCheckpointError(f"{what}: planner_data[{PLANNER_DATA_KEY!r}] is damaged")
    return tensors


def _role_of(entry: Any, key: str, what: str) -> tuple[Role, str, str, str | None]:
    if (
        not isinstance(entry, (list, tuple))
        or len(entry) not in (3, 4)
        or type(entry[0]) is not int
        or not 0 <= entry[0] < len(Role)
        or type(entry[1]) is not str
        or type(entry[2]) is not str
        or (len(entry) == 4 and not isinstance(entry[3], (str, type(None))))
    ):
        raise CorruptCheckpointError(f"{what}: the role of {key!r} is {entry!r:.80}, expected [role, fqn, state, pattern]")
    return Role(entry[0]), entry[1], entry[2], entry[3] if len(entry) == 4 else None


def _dtype_name(properties: Any, key: str, what: str) -> str:
    state = properties.state if isinstance(properties, Stub) else None
    # TensorProperties pickles itself as a tuple that starts with the dtype.
    dtype = state[0] if isinstance(state, tuple) and state else _field(properties, "dtype")
    if dtype is None:
        raise CorruptCheckpointError(f"{what}: tensor {key!r} has no dtype")
    return name_of(str(dtype))


def _catalog(
    metadata: Any, what: str, place: Callable[[str, tuple[int, ...] | None, int], tuple[str, int, int]], sizes: Mapping[str, int]
) -> Catalog:
    entries = _field(metadata, "state_dict_metadata")
    if not isinstance(entries, Mapping):
        raise FormatError(f"{what}: state_dict_metadata is {type(entries).__name__}, expected a dict")
    planner_data = _field(metadata, "planner_data")
    paths = planner_data if isinstance(planner_data, Mapping) else {}
    roles = _roles(planner_data, what)
    build = CatalogBuilder()
    files = {path: build.add_file(path, size) for path, size in sizes.items()}
    # In the catalog's own order, so that columns beside the catalog fit to its chunks.
    for key in _sorted_keys(entries, what):
        entry = entries[key]
        path = paths.get(key)
        nesting = tuple(path) if isinstance(path, tuple) and path and all(isinstance(p, (str, int)) for p in path) else None
        if _kind(entry) == "BytesStorageMetadata":
            file, start, length = place(key, None, 0)
            build.add_object(ObjectRow(key, path=nesting or (key,), file=files[file], offset=start, length=length, encoding="torch_save"))
            continue
        if _kind(entry) != "TensorStorageMetadata":
            raise UnsupportedError(f"{what}: {key!r} is a {_kind(entry)}; known are TensorStorageMetadata and BytesStorageMetadata")
        role, fqn, state, pattern = _role_of(roles[key], key, what) if key in roles else (Role.PLAIN, "", "", None)
        dtype = _dtype_name(_field(entry, "properties"), key, what)
        shape = _ints(_field(entry, "size"), f"{what}: the shape of {key!r}")
        handle = build.add_tensor(
            key=key,
            role=role,
            fqn=fqn,
            state=state,
            dtype=dtype,
            shape=shape,
            path=nesting,
            pattern=-1 if pattern is None else build.add_pattern({"text": pattern}),
        )
        _add_chunks(build, handle, key, _field(entry, "chunks"), len(shape), itemsize(dtype), place, files, what)
    return build.build()


def _sorted_keys(entries: Mapping[Any, Any], what: str) -> Sequence[str]:
    keys = list(entries)
    for key in keys:
        if type(key) is not str:
            raise CorruptCheckpointError(f"{what}: an entry is named {key!r:.60}, expected a string")
    return sorted(keys)


def _add_chunks(
    build: CatalogBuilder,
    handle: int,
    key: str,
    chunks: Iterable[Any],
    ndim: int,
    width: int,
    place: Callable[[str, tuple[int, ...] | None, int], tuple[str, int, int]],
    files: Mapping[str, int],
    what: str,
) -> None:
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    file: list[int] = []
    offset: list[int] = []
    for chunk in chunks:
        start, size = (_ints(_field(chunk, name), f"{what}: {name} of a chunk of {key!r}") for name in ("offsets", "sizes"))
        if len(start) != ndim or len(size) != ndim:
            raise CorruptCheckpointError(f"{what}: tensor {key!r} of {ndim} dims has a chunk at {list(start)} of size {list(size)}")
        nbytes = width
        for n in size:
            nbytes *= n
        path, at, _ = place(key, start, nbytes)
        rows.append((start, size))
        file.append(files[path])
        offset.append(at)
    boxes = np.asarray(rows, dtype=np.int64).reshape(len(rows), 2, ndim)
    build.add_chunks(handle, boxes, np.asarray(file, dtype=np.int32), np.asarray(offset, dtype=np.int64))
