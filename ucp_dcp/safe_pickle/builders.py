"""The only things that a pickle may call. Each checks its arguments, and none keeps state.

Amounts of work that do not follow from the pickle's own length (copies of containers and arrays) are charged to the machine's
budget, so that a short pickle cannot make a long list grow by copying it again and again.
"""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..dtypes import CODES, torch_dtype
from ..errors import CorruptCheckpointError, UnsafePickleError, UnsupportedError
from .stubs import EnumStub, Stub

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Builder", "Reference", "StorageType", "StubClass", "TensorSink", "find_builtin", "set_array_state", "set_dtype_state"]

_MAX_NDIM = 64


class TensorSink(Protocol):
    """What tensors in a pickle become. The pickle holds no tensor bytes, only references to storages beside it."""

    def storage(self, dtype: str | None, key: str, numel: int) -> Any:
        """A storage of ``numel`` elements of ``dtype`` (None: bytes); ``key`` names its record."""
        ...

    def tensor(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: str | None) -> Any:
        """A view of a storage: offset and strides in elements. ``dtype`` None means the storage's."""
        ...


class Reference:
    """A class or function that a pickle names and that is not one of ours: a name without any object behind it."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def qualname(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<name {self.qualname}>"


class StubClass(Reference):
    """A class that has a stand-in. ``callable_`` False: it may be instantiated (NEWOBJ) but calling it is refused."""

    __slots__ = ("callable_", "cls")

    def __init__(self, module: str, name: str, cls: type[Stub], callable_: bool = True) -> None:
        super().__init__(module, name)
        self.cls = cls
        self.callable_ = callable_


class StorageType(Reference):
    """A storage class such as ``torch.FloatStorage``; ``dtype`` is None for untyped storages."""

    __slots__ = ("dtype",)

    def __init__(self, module: str, name: str, dtype: str | None) -> None:
        super().__init__(module, name)
        self.dtype = dtype


class Builder(Reference):
    """A constructor of ours, under the name of the thing that it stands for."""

    __slots__ = ("build",)

    def __init__(self, module: str, name: str, build: Callable[[Machine, tuple[Any, ...]], Any]) -> None:
        super().__init__(module, name)
        self.build = build


def _bad(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"pickle: {what}")


def _ints(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_NDIM:
        raise _bad(f"{what} must be a tuple of at most {_MAX_NDIM} integers, found {type(value).__name__}")
    for x in value:
        if type(x) is not int or not -(2**63) <= x < 2**63:
            raise _bad(f"{what} must hold 64-bit integers, found {x!r:.60}")
    return tuple(value)


def _count(args: tuple[Any, ...], low: int, high: int, what: str) -> None:
    if not low <= len(args) <= high:
        raise _bad(f"{what} takes {low} to {high} arguments, found {len(args)}")


# ---- plain Python


def _sequence(m: Machine, args: tuple[Any, ...], what: str) -> Any:
    _count(args, 0, 1, what)
    if not args:
        return ()
    if type(args[0]) not in (list, tuple, set, frozenset, str, bytes, bytearray):
        raise _bad(f"{what} of {type(args[0]).__name__}")
    m.charge(len(args[0]))
    return args[0]


def _set(kind: type) -> Callable[[Machine, tuple[Any, ...]], Any]:
    def build(m: Machine, args: tuple[Any, ...]) -> Any:
        items = _sequence(m, args, kind.__name__)
        for x in items:
            m.check_key(x)
        return kind(items)

    return build


def _mapping(kind: Callable[[Any], Any], name: str) -> Callable[[Machine, tuple[Any, ...]], Any]:
    def build(m: Machine, args: tuple[Any, ...]) -> Any:
        _count(args, 0, 1, name)
        source = args[0] if args else ()
        if isinstance(source, dict):
            pairs = list(source.items())
        elif type(source) in (list, tuple):
            pairs = [tuple(p) for p in source if type(p) in (list, tuple) and len(p) == 2]
            if len(pairs) != len(source):
                raise _bad(f"{name} of something else than pairs")
        else:
            raise _bad(f"{name} of {type(source).__name__}")
        m.charge(2 * len(pairs))
        for k, _ in pairs:
            m.check_key(k)
        return kind(pairs)

    return build


def _counter(pairs: list[tuple[Any, Any]]) -> Any:
    return collections.Counter(dict(pairs))


_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "set": set, "float": float, "str": str, "bool": bool, "tuple": tuple}


def _defaultdict(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 0, 2, "defaultdict")
    factory = args[0] if args else None
    pairs = _mapping(list, "defaultdict")(m, args[1:])
    if factory is None:
        return collections.defaultdict(None, pairs)
    if isinstance(factory, Builder):
        if factory.module == "builtins" and factory.name in _FACTORIES:
            return collections.defaultdict(_FACTORIES[factory.name], pairs)
        if factory.qualname == "collections.OrderedDict":
            return collections.defaultdict(collections.OrderedDict, pairs)
    raise UnsafePickleError(f"pickle: defaultdict with the factory {factory!r:.100}; allowed: {', '.join(_FACTORIES)}")


def _deque(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 0, 2, "deque")
    limit = args[1] if len(args) == 2 else None
    if limit is not None and (type(limit) is not int or limit < 0):
        raise _bad("deque with a bad maxlen")
    return collections.deque(_sequence(m, args[:1], "deque"), limit)


def _complex(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 0, 2, "complex")
    if not all(type(x) in (int, float) for x in args):
        raise _bad("complex of something else than numbers")
    return complex(*args)


def _slice(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 1, 3, "slice")
    if not all(x is None or type(x) is int for x in args):
        raise _bad("slice of something else than integers")
    return slice(*args)


def _range(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 1, 3, "range")
    if not all(type(x) is int for x in args) or (len(args) == 3 and args[2] == 0):
        raise _bad("range of something else than integers")
    return range(*args)


def _scalar(kind: type, accept: tuple[type, ...]) -> Callable[[Machine, tuple[Any, ...]], Any]:
    def build(m: Machine, args: tuple[Any, ...]) -> Any:
        _count(args, 0, 1, kind.__name__)
        if args and type(args[0]) not in accept:
            raise _bad(f"{kind.__name__} of {type(args[0]).__name__}")
        return kind(*args)

    return build


def _buffer(kind: Callable[[Any], Any], name: str) -> Callable[[Machine, tuple[Any, ...]], Any]:
    def build(m: Machine, args: tuple[Any, ...]) -> Any:
        if len(args) == 2 and type(args[0]) is str and args[1] in ("latin-1", "latin1"):  # protocol 2 writes bytearray this way
            m.charge(len(args[0]))
            return kind(args[0].encode("latin-1"))
        _count(args, 0, 1, name)
        if args and type(args[0]) not in (bytes, bytearray):
            raise _bad(f"{name} of {type(args[0]).__name__}")
        m.charge(len(args[0]) if args else 0)
        return kind(args[0] if args else b"")

    return build


def _codecs_encode(m: Machine, args: tuple[Any, ...]) -> Any:
    # How protocols 0-2 write bytes.
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise _bad("_codecs.encode is accepted for latin1 text only")
    m.charge(len(args[0]))
    return args[0].encode("latin-1")


def _reconstructor(m: Machine, args: tuple[Any, ...]) -> Any:
    # Protocols 0 and 1 create plain objects with copyreg._reconstructor(cls, object, None).
    if len(args) == 3 and isinstance(args[0], StubClass) and isinstance(args[1], Builder) and args[1].name == "object" and args[2] is None:
        return m.new(args[0], (), None)
    raise UnsafePickleError(f"pickle: copyreg._reconstructor{args!r:.120} is not allowed")


def _newobj(m: Machine, args: tuple[Any, ...]) -> Any:
    if not args or not isinstance(args[0], Reference):
        raise _bad("copyreg.__newobj__ without a class")
    return m.new(args[0], args[1:], None)


def _enum_member(m: Machine, args: tuple[Any, ...]) -> Any:
    # Some Python versions write an enum member as getattr(EnumClass, "NAME"). Only for enums with a stand-in, and nothing is looked up.
    if (
        len(args) == 2
        and isinstance(args[0], StubClass)
        and issubclass(args[0].cls, EnumStub)
        and type(args[1]) is str
        and args[1].isidentifier()
    ):
        return args[0].cls(args[0].module, args[0].name, (), {"name": args[1]})
    raise UnsafePickleError(f"pickle: builtins.getattr{args!r:.120} is not allowed")


def _object(m: Machine, args: tuple[Any, ...]) -> Any:
    raise UnsafePickleError("pickle: builtins.object() is not a plain value")


def _path(m: Machine, args: tuple[Any, ...]) -> Any:
    if not all(type(x) is str for x in args):
        raise _bad("a path of something else than strings")
    return pathlib.PurePosixPath(*args)


# ---- numpy


_PLAIN_DTYPE = re.compile(r"[<>|=]?([biufcSU?][0-9]{0,6})\Z")


def _np_dtype(m: Machine, args: tuple[Any, ...]) -> Any:
    import numpy as np

    _count(args, 1, 3, "numpy.dtype")
    if type(args[0]) is not str or not _PLAIN_DTYPE.match(args[0]):
        raise UnsafePickleError(f"pickle: numpy dtype {args[0]!r:.60} is not a plain one")
    return np.dtype(args[0], copy=True)  # a copy, so that set_dtype_state may change its byte order


def set_dtype_state(dtype: Any, state: Any) -> None:
    """Give a plain numpy dtype its byte order; everything else in the state must say "no structure"."""
    if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "=") or any(x is not None for x in state[2:5]):
        raise UnsafePickleError("pickle: a structured numpy dtype is not a plain one")
    if dtype.kind not in "SU":
        dtype.__setstate__((3, state[1], None, None, None, -1, -1, 0))
        return
    # Text and byte strings carry their width in the state.
    width = state[5] if len(state) > 5 else -1
    unit = 4 if dtype.kind == "U" else 1
    if type(width) is not int or not 0 <= width <= 2**24 or width % unit:
        raise _bad(f"numpy dtype of width {width!r:.40}")
    dtype.__setstate__((3, state[1], None, None, None, width, unit, 0))


def _plain_dtype(dtype: Any) -> Any:
    import numpy as np

    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSU":
        raise UnsafePickleError(f"pickle: numpy data of {dtype!r:.60}; only plain dtypes are allowed")
    return dtype


def _np_array(m: Machine, args: tuple[Any, ...]) -> Any:
    import numpy as np

    # _reconstruct(ndarray, (0,), b"b"): an empty array; its state comes with BUILD.
    if len(args) != 3 or not isinstance(args[0], Builder) or args[0].qualname != "numpy.ndarray" or args[1] != (0,):
        raise UnsafePickleError(f"pickle: numpy _reconstruct{args!r:.120} is not allowed")
    return np.empty(0, dtype=np.int8)


def _np_ndarray(m: Machine, args: tuple[Any, ...]) -> Any:
    raise UnsafePickleError("pickle: numpy.ndarray is not called directly by a plain pickle")


def set_array_state(m: Machine, array: Any, state: Any) -> None:
    """Fill the empty array that ``_np_array`` made, after its shape, dtype and byte count were checked against each other."""
    if not isinstance(state, tuple) or len(state) != 5 or type(state[3]) not in (bool, int):
        raise _bad("numpy array with a bad state")
    _, shape, dtype, fortran, raw = state
    dims = _ints(shape, "numpy shape")
    _plain_dtype(dtype)
    if type(raw) is str:
        raw = raw.encode("latin-1")
    if type(raw) is not bytes or min(dims, default=0) < 0 or math.prod(dims) * dtype.itemsize != len(raw):
        raise _bad(f"numpy array of shape {dims} and dtype {dtype} with {len(raw) if type(raw) is bytes else type(raw).__name__} bytes")
    m.charge(len(raw))
    array.__setstate__((1, dims, dtype, bool(fortran), raw))


def _np_frombuffer(m: Machine, args: tuple[Any, ...]) -> Any:
    import numpy as np

    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or args[3] not in ("C", "F"):
        raise _bad("numpy _frombuffer with bad arguments")
    dims, dtype = _ints(args[2], "numpy shape"), _plain_dtype(args[1])
    if min(dims, default=0) < 0 or math.prod(dims) * dtype.itemsize != len(args[0]):
        raise _bad(f"numpy array of shape {dims} and dtype {dtype} with {len(args[0])} bytes")
    m.charge(len(args[0]))
    return np.frombuffer(bytes(args[0]), dtype=dtype).reshape(dims, order=args[3]).copy(order="K")


def _np_scalar(m: Machine, args: tuple[Any, ...]) -> Any:
    import numpy as np

    _count(args, 2, 2, "numpy scalar")
    dtype, raw = _plain_dtype(args[0]), args[1]
    if type(raw) is str:
        raw = raw.encode("latin-1")
    if type(raw) is not bytes or len(raw) != dtype.itemsize or dtype.itemsize == 0:
        raise _bad("numpy scalar whose bytes do not fit its dtype")
    return np.frombuffer(raw, dtype=dtype)[0]


# ---- torch


def _size(m: Machine, args: tuple[Any, ...]) -> Any:
    import torch

    _count(args, 0, 1, "torch.Size")
    return torch.Size(_ints(args[0], "torch.Size") if args else ())


def _device(m: Machine, args: tuple[Any, ...]) -> Any:
    import torch

    _count(args, 1, 2, "torch.device")
    if type(args[0]) is not str or not args[0].replace(":", "").isalnum() or not all(type(x) is int for x in args[1:]):
        raise _bad("torch.device with bad arguments")
    return torch.device(*args)


def _layout(m: Machine, args: tuple[Any, ...]) -> Any:
    import torch

    if args != ("torch.strided",):
        raise UnsupportedError(f"tensors of layout {args!r:.60} are not supported; only torch.strided")
    return torch.strided


def _rebuild(m: Machine, args: tuple[Any, ...], low: int, high: int, dtype_at: int | None) -> Any:
    _count(args, low, high, "a tensor")
    if m.sink is None:
        raise UnsafePickleError("pickle: a tensor in a pickle that is not part of a torch archive")
    if type(args[1]) is not int or args[1] < 0:
        raise _bad(f"tensor with the storage offset {args[1]!r:.40}")
    size, stride = _ints(args[2], "a tensor's size"), _ints(args[3], "a tensor's strides")
    dtype = None
    if dtype_at is not None:
        dtype = str(args[dtype_at]).removeprefix("torch.")
        if dtype not in CODES:
            raise UnsupportedError(f"a stored tensor has dtype {dtype!r:.60}, which this version does not know")
    return m.sink.tensor(args[0], args[1], size, stride, dtype)


def _rebuild_v1(m: Machine, args: tuple[Any, ...]) -> Any:
    return _rebuild(m, args, 4, 4, None)


def _rebuild_v2(m: Machine, args: tuple[Any, ...]) -> Any:
    return _rebuild(m, args, 6, 7, None)


def _rebuild_v3(m: Machine, args: tuple[Any, ...]) -> Any:
    return _rebuild(m, args, 7, 8, 6)


def _parameter(m: Machine, args: tuple[Any, ...]) -> Any:
    # A parameter is its data; requires_grad, hooks and attributes are no part of a stored tensor.
    _count(args, 3, 4, "a parameter")
    return args[0]


def _from_type(m: Machine, args: tuple[Any, ...]) -> Any:
    _count(args, 4, 4, "a tensor with attributes")
    function, kind, inner, _ = args
    if not isinstance(function, Builder) or (function.module, function.name) not in _TENSOR_FUNCTIONS or type(inner) is not tuple:
        raise UnsafePickleError(f"pickle: a tensor rebuilt by {function!r:.100} is not allowed")
    if not isinstance(kind, Reference) or kind.qualname not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise UnsafePickleError(f"pickle: the tensor subclass {kind!r:.100} is not allowed")
    return function.build(m, inner)


def _tensor_class(m: Machine, args: tuple[Any, ...]) -> Any:
    raise UnsafePickleError("pickle: torch.Tensor is not called directly by a plain pickle")


_TENSOR_FUNCTIONS: dict[tuple[str, str], Callable[[Machine, tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_v1,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}

_BUILDERS: dict[tuple[str, str], Callable[[Machine, tuple[Any, ...]], Any]] = {
    ("builtins", "list"): lambda m, a: list(_sequence(m, a, "list")),
    ("builtins", "tuple"): lambda m, a: tuple(_sequence(m, a, "tuple")),
    ("builtins", "set"): _set(set),
    ("builtins", "frozenset"): _set(frozenset),
    ("builtins", "dict"): _mapping(dict, "dict"),
    ("builtins", "int"): _scalar(int, (int, bool)),
    ("builtins", "float"): _scalar(float, (int, float)),
    ("builtins", "bool"): _scalar(bool, (int, bool)),
    ("builtins", "str"): _scalar(str, (str,)),
    ("builtins", "bytes"): _buffer(bytes, "bytes"),
    ("builtins", "bytearray"): _buffer(bytearray, "bytearray"),
    ("builtins", "complex"): _complex,
    ("builtins", "slice"): _slice,
    ("builtins", "range"): _range,
    ("builtins", "xrange"): _range,
    ("builtins", "object"): _object,
    ("builtins", "getattr"): _enum_member,
    ("collections", "OrderedDict"): _mapping(collections.OrderedDict, "OrderedDict"),
    ("collections", "defaultdict"): _defaultdict,
    ("collections", "Counter"): _mapping(_counter, "Counter"),
    ("collections", "deque"): _deque,
    ("_codecs", "encode"): _codecs_encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copyreg", "__newobj__"): _newobj,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch", "Tensor"): _tensor_class,
    ("torch.nn.parameter", "Parameter"): _tensor_class,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.serialization", "_get_layout"): _layout,
    ("numpy", "dtype"): _np_dtype,
    ("numpy", "ndarray"): _np_ndarray,
    **{(f"pathlib{sub}", f"{pure}{os}Path"): _path for sub in ("", "._local") for pure in ("", "Pure") for os in ("Posix", "Windows")},
    **{
        (f"numpy.{core}.{module}", name): build
        for core in ("core", "_core")
        for module, name, build in (
            ("multiarray", "_reconstruct", _np_array),
            ("multiarray", "scalar", _np_scalar),
            ("numeric", "_frombuffer", _np_frombuffer),
        )
    },
    **_TENSOR_FUNCTIONS,
}

_STORAGES: dict[str, str | None] = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "UntypedStorage": None,
}  # fmt: skip

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}


def find_builtin(module: str, name: str) -> Any:
    """What a pickle gets for ``module.name``: a Builder, a storage type, a dtype; None when it is not on the list."""
    module = _OLD_MODULES.get(module, module)
    build = _BUILDERS.get((module, name))
    if build is not None:
        return Builder(module, name, build)
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return StorageType(module, name, _STORAGES[name])
    if module == "torch" and name in CODES:
        return torch_dtype(name)
    if module == "torch" and name in ("strided", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d"):
        import torch

        return getattr(torch, name)
    return None
