"""The pickle machine: every opcode is executed here, over a byte string whose size is the bound of all work.

What an attacker can reach with the standard unpickler and not here:

- names: :func:`_Machine.find` maps exact ``(module, name)`` pairs to constructors of ours; nothing is imported or looked up by attribute;
- BUILD and APPEND on arbitrary objects: only plain containers, stand-ins and numpy arrays have a state;
- memory: the memo is a dict (``LONG_BINPUT 0xffffffff`` costs nothing), every length is checked against the bytes that are left before
  anything is allocated, and copies of containers are charged to a budget proportional to the size of the pickle;
- time: dictionary keys are bounded (a deeply shared tuple takes exponential time to hash, a deeply nested one overflows the C stack,
  and equal hashes can be made from large integers).

Opcodes: Lib/pickletools.py of CPython, protocols 0 to 5 without out-of-band buffers, extension codes and text persistent ids.
"""

from __future__ import annotations

import collections
import gc
import struct
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import CorruptCheckpointError, FormatError, UCPError, UnsafePickleError
from .builders import Builder, Reference, StorageType, StubClass, TensorSink, find_builtin, set_array_state, set_dtype_state
from .opcodes import OPCODES
from .stubs import Stub, StubTable

__all__ = ["MAX_PICKLE", "Machine", "loads"]

MAX_PICKLE = 1 << 30
"""Default limit of the size of a pickle in bytes."""

_MAX_LINE = 1 << 16
_MAX_KEY_PARTS = 256
_DICTS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_KEY_SCALARS = frozenset((str, int, float, bool, type(None), bytes))

_I32, _U32, _U64, _F64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<Q"), struct.Struct(">d")


class RealClass(Reference):
    """A class that the caller allowed."""

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        super().__init__(cls.__module__, cls.__qualname__)
        self.cls = cls


class Machine:
    """One run over one pickle. Use :func:`loads`."""

    def __init__(
        self,
        data: bytes | memoryview,
        what: str,
        stubs: StubTable | None,
        classes: dict[tuple[str, str], Any],
        sink: TensorSink | None,
        unknown: Callable[[str, str], Any] | None,
    ) -> None:
        self.data = bytes(data)
        self.what = what
        self.sink = sink
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._stubs = stubs
        self._classes = classes
        self._unknown = unknown
        self._found: dict[tuple[str, str], Any] = {}
        self._budget = 16 * len(self.data) + (1 << 16)
        self.line_end = 0

    # ---- guards

    def charge(self, amount: int) -> None:
        """Pay for copying ``amount`` elements or bytes. Raises CorruptCheckpointError beyond what the pickle's size allows."""
        self._budget -= amount
        if self._budget < 0:
            raise CorruptCheckpointError(f"{self.what}: the pickle copies far more than it holds ({len(self.data)} bytes); refused")

    def check_key(self, key: Any) -> None:
        """Refuse dictionary keys that could take long to hash."""
        if isinstance(key, (Stub, Reference)):
            return
        parts, todo = 0, [key]
        while todo:
            x = todo.pop()
            parts += 1
            if parts > _MAX_KEY_PARTS:
                raise CorruptCheckpointError(f"{self.what}: a dictionary key with more than {_MAX_KEY_PARTS} parts")
            if isinstance(x, tuple):
                if len(x) > _MAX_KEY_PARTS:
                    raise CorruptCheckpointError(f"{self.what}: a dictionary key with more than {_MAX_KEY_PARTS} parts")
                todo.extend(x)
            elif type(x) in _KEY_SCALARS:
                if type(x) is int and not -(2**63) <= x < 2**64:
                    raise CorruptCheckpointError(f"{self.what}: an integer of more than 64 bits as a dictionary key")
            elif not isinstance(x, (Stub, Reference)) and type(x) not in self._real() and type(x).__name__ not in ("dtype", "device"):
                raise CorruptCheckpointError(f"{self.what}: a dictionary key of type {type(x).__name__}")
        self.charge(parts)

    def _real(self) -> set[type]:
        return {c.cls for c in self._classes.values() if isinstance(c, RealClass)}

    # ---- names

    def find(self, module: str, name: str) -> Any:
        """The thing that stands for ``module.name``. Raises UnsafePickleError when it is not allowed."""
        key = (module, name)
        got = self._found.get(key)
        if got is None:
            got = self._found[key] = self._find(module, name)
        return got

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if self._stubs is not None:
            stub = self._stubs(module, name) if callable(self._stubs) else self._stubs.get((module, name))
            if stub is not None:
                return StubClass(module, name, stub)
        got = find_builtin(module, name)
        if got is None and self._unknown is not None:
            got = self._unknown(module, name)
        if got is None:
            raise UnsafePickleError(
                f"{self.what}: the pickle asks for {module}.{name}, which is not allowed; nothing was run. "
                "If you trust the file and need the class, pass allow_classes=[...]"
            )
        return got

    # ---- objects

    def call(self, function: Any, args: Any) -> Any:
        """REDUCE."""
        if type(args) is not tuple:
            raise CorruptCheckpointError(f"{self.what}: a call with {type(args).__name__} arguments")
        if type(function) is Builder:
            return function.build(self, args)
        if type(function) is StubClass and function.callable_:
            return function.cls(function.module, function.name, args)
        if type(function) is RealClass:
            return function.cls(*args)
        name = function.qualname if isinstance(function, Reference) else f"a value of type {type(function).__name__}"
        raise UnsafePickleError(f"{self.what}: the pickle calls {name}, which is not allowed; nothing was run")

    def new(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """NEWOBJ, NEWOBJ_EX, OBJ, INST."""
        if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
            raise CorruptCheckpointError(f"{self.what}: an object made from bad arguments")
        if type(cls) is StubClass:
            return cls.cls(cls.module, cls.name, args, kwargs or None)
        if type(cls) is RealClass:
            return cls.cls.__new__(cls.cls, *args, **(kwargs or {}))
        if type(cls) is Builder and not kwargs:
            return cls.build(self, args)
        name = cls.qualname if isinstance(cls, Reference) else f"a value of type {type(cls).__name__}"
        raise UnsafePickleError(f"{self.what}: the pickle makes an object of {name}, which is not allowed; nothing was run")

    def _build(self, target: Any, state: Any) -> None:
        kind = type(target)
        if kind is collections.OrderedDict:
            if not isinstance(state, dict) or set(state) - {"_metadata"}:
                raise UnsafePickleError(f"{self.what}: attributes of an OrderedDict: {state!r:.80}")
            if state:  # what torch.nn.Module.state_dict() attaches: version numbers of the modules
                target._metadata = state["_metadata"]
        elif kind in self._real():
            setter = getattr(target, "__setstate__", None)
            if setter is not None:
                setter(state)
                return
            slots: Any = None
            if isinstance(state, tuple) and len(state) == 2:
                state, slots = state
            if state:
                target.__dict__.update(state)
            for name, value in (slots or {}).items():
                object.__setattr__(target, name, value)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            set_array_state(self, target, state)
        elif kind.__module__.startswith("numpy") and hasattr(target, "newbyteorder"):
            set_dtype_state(target, state)
        else:
            raise UnsafePickleError(f"{self.what}: the pickle sets the state of a {kind.__name__}; nothing was run")

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is list or type(target) is collections.deque:
            target.extend(items)
        elif isinstance(target, Stub):
            if target.items is None:
                target.items = []
            target.items.extend(items)
        elif type(target) in self._real():
            target.extend(items)
        else:
            raise UnsafePickleError(f"{self.what}: the pickle appends to a {type(target).__name__}")

    def set_items(self, target: Any, items: list[Any]) -> None:
        """SETITEMS: ``items`` are keys and values in turn."""
        if isinstance(target, Stub):
            if target.items is None:
                target.items = []
            target.items.extend(zip(items[::2], items[1::2], strict=True))
            return
        if type(target) not in _DICTS and type(target) not in self._real():
            raise UnsafePickleError(f"{self.what}: the pickle sets items of a {type(target).__name__}")
        if len(items) % 2:
            raise CorruptCheckpointError(f"{self.what}: an odd number of dictionary items")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                self.check_key(key)
            target[key] = items[i + 1]

    def _persistent(self, pid: Any) -> Any:
        if self.sink is None:
            raise UnsafePickleError(f"{self.what}: a persistent id in a pickle that is not part of a torch archive: {pid!r:.80}")
        if (
            type(pid) is not tuple
            or len(pid) not in (5, 6)
            or pid[0] != "storage"
            or not isinstance(pid[1], StorageType)
            or type(pid[2]) is not str
            or type(pid[4]) is not int
            or pid[4] < 0
            or (len(pid) == 6 and pid[5] is not None)
        ):
            raise CorruptCheckpointError(f"{self.what}: a storage reference of an unknown form: {pid!r:.120}")
        return self.sink.storage(pid[1].dtype, pid[2], pid[4])

    # ---- the loop

    def take(self, pos: int, size: int) -> bytes:
        """``size`` bytes of the pickle, after checking that they are there."""
        if size > len(self.data) - pos:
            raise CorruptCheckpointError(f"{self.what}: the pickle is cut: {size} bytes wanted at {pos} of {len(self.data)}")
        return self.data[pos : pos + size]

    def line(self, pos: int) -> bytes:
        """The text up to the next newline; ``line_end`` is then the byte after it."""
        end = self.data.find(b"\n", pos, pos + _MAX_LINE)
        if end < 0:
            raise CorruptCheckpointError(f"{self.what}: a line without an end at byte {pos} of the pickle")
        self.line_end = end + 1
        return self.data[pos:end]

    def cut(self) -> list[Any]:
        """Everything above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def run(self) -> Any:
        """Execute the pickle and return its value."""
        collecting = gc.isenabled()
        gc.disable()  # millions of small objects, all of them kept: the collector would walk them again and again
        try:
            return self._run()
        except UCPError:
            raise
        except RecursionError:
            raise CorruptCheckpointError(f"{self.what}: the pickle nests too deeply") from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, struct.error) as e:
            raise CorruptCheckpointError(f"{self.what}: damaged pickle: {type(e).__name__}: {e}") from e
        finally:
            if collecting:
                gc.enable()

    def _run(self) -> Any:
        data, stack, marks, memo = self.data, self.stack, self.marks, self.memo
        append, pop = stack.append, stack.pop
        pos, end = 0, len(data)
        while True:
            op = data[pos]
            pos += 1
            # In the order of how often they occur in the metadata of a large checkpoint.
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x68:  # BINGET
                append(memo[data[pos]])
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                append(memo[_U32.unpack_from(data, pos)[0]])
                pos += 4
            elif op == 0x4B:  # BININT1
                append(data[pos])
                pos += 1
            elif op == 0x4D:  # BININT2
                append(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x4A:  # BININT
                append(_I32.unpack_from(data, pos)[0])
                pos += 4
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x52:  # REDUCE
                args = pop()
                stack[-1] = self.call(stack[-1], args)
            elif op == 0x81:  # NEWOBJ
                args = pop()
                cls = stack[-1]
                # as in new(), without a call: most objects of large pickles are stand-ins
                stack[-1] = (
                    cls.cls(cls.module, cls.name, args) if type(cls) is StubClass and type(args) is tuple else self.new(cls, args, None)
                )
            elif op == 0x29:  # EMPTY_TUPLE
                append(())
            elif op == 0x7D:  # EMPTY_DICT
                append({})
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x75:  # SETITEMS
                items = self.cut()
                self.set_items(stack[-1], items)
            elif op == 0x62:  # BUILD
                state = pop()
                if isinstance(stack[-1], Stub):
                    stack[-1].state = state
                else:
                    self._build(stack[-1], state)
            elif op == 0x61:  # APPEND
                value = pop()
                self._extend(stack[-1], [value])
            elif op == 0x58 or op == 0x8C or op == 0x8D:  # BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
                if op == 0x58:
                    size = _U32.unpack_from(data, pos)[0]
                    pos += 4
                elif op == 0x8C:
                    size = data[pos]
                    pos += 1
                else:
                    size = _U64.unpack_from(data, pos)[0]
                    pos += 8
                if size > end - pos:
                    self.take(pos, size)
                append(data[pos : pos + size].decode("utf-8", "surrogatepass"))
                pos += size
            elif op == 0x71:  # BINPUT
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[_U32.unpack_from(data, pos)[0]] = stack[-1]
                pos += 4
            elif op == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == 0x74:  # TUPLE
                append(tuple(self.cut()))
            elif op == 0x73:  # SETITEM
                value = pop()
                key = pop()
                self.set_items(stack[-1], [key, value])
            elif op == 0x5D:  # EMPTY_LIST
                append([])
            elif op == 0x65:  # APPENDS
                items = self.cut()
                self._extend(stack[-1], items)
            elif op == 0x4E:  # NONE
                append(None)
            elif op == 0x88:  # NEWTRUE
                append(True)
            elif op == 0x89:  # NEWFALSE
                append(False)
            elif op == 0x47:  # BINFLOAT
                append(_F64.unpack_from(data, pos)[0])
                pos += 8
            elif op == 0x51:  # BINPERSID
                stack[-1] = self._persistent(stack[-1])
            elif op == 0x2E:  # STOP
                return pop()
            else:
                handler = OPCODES.get(op)
                if handler is None:
                    raise UnsafePickleError(f"{self.what}: pickle opcode 0x{op:02x} at byte {pos - 1} is not allowed or unknown")
                pos = handler(self, pos)


def loads(
    data: bytes | memoryview,
    *,
    what: str = "pickle",
    stubs: StubTable | None = None,
    allow_classes: Iterable[type] = (),
    sink: TensorSink | None = None,
    inert_unknown: bool = False,
    max_size: int = MAX_PICKLE,
) -> Any:
    """The value of a pickle, built without importing or calling anything that it names.

    ``what`` names the source in errors. ``stubs`` gives inert stand-ins by ``(module, name)``. ``allow_classes`` are real classes that may
    be created, called and given a state, as the standard unpickler would; the whole pickle is first read with stand-ins in their place,
    so a pickle that also asks for something else runs nothing of them. ``sink`` receives tensors (torch archives only). With
    ``inert_unknown`` an instance of an unknown class becomes a :class:`Stub`, and an unknown name a :class:`Reference`; *calling* an
    unknown name stays an error.

    Raises UnsafePickleError naming what is not allowed, CorruptCheckpointError for a damaged pickle, FormatError when it is larger than
    ``max_size`` bytes.
    """
    if len(data) > max_size:
        raise FormatError(f"{what}: a pickle of {len(data)} bytes; the limit is {max_size}")
    classes = {(cls.__module__, cls.__qualname__): RealClass(cls) for cls in allow_classes}

    def unknown(module: str, name: str) -> Any:
        return StubClass(module, name, Stub, callable_=False) if inert_unknown else None

    if classes:
        inert = {key: StubClass(*key, Stub) for key in classes}
        Machine(data, what, stubs, inert, sink, unknown).run()
    return Machine(data, what, stubs, classes, sink, unknown).run()
