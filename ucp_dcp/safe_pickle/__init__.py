"""The restricted unpickler (design decision D16).

:func:`loads` is a complete pickle machine of its own: it never imports a module, never looks up an attribute and never calls anything
but the constructors of ``builders.py``, each of which checks its arguments. A pickle can therefore do no more than build plain values:
containers, scalars, bytes, ``torch.Size``, dtypes, devices, numpy arrays and scalars of plain dtypes, tensors of the archive around it.

Everything else is an :class:`~ucp_dcp.errors.UnsafePickleError` that names ``module.name``, unless the caller gave a *stand-in* for it
(``stubs``: the object becomes an inert :class:`Stub` that records constructor arguments and state), or opted in to the real class
(``allow_classes``). Work and memory are bounded by the size of the pickle: see ``machine.py``.
"""

from __future__ import annotations

from .archive import Steps, drive_many
from .builders import Reference, StorageType, TensorSink
from .machine import MAX_PICKLE, loads
from .stubs import EnumStub, Stub, StubTable
from .tensors import StoredStorage, StoredTensor, load_object, read_archive, read_values, tree_steps
from .walk import find_stub, is_plain, iter_leaves

__all__ = [
    "MAX_PICKLE",
    "EnumStub",
    "Reference",
    "Steps",
    "StorageType",
    "StoredStorage",
    "StoredTensor",
    "Stub",
    "StubTable",
    "TensorSink",
    "drive_many",
    "find_stub",
    "is_plain",
    "iter_leaves",
    "load_object",
    "loads",
    "read_archive",
    "read_values",
    "tree_steps",
]
