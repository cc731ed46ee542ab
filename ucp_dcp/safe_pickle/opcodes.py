"""The rarer pickle opcodes: ``(machine, position after the opcode) -> position after its argument``."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import CorruptCheckpointError, FormatError, UnsafePickleError
from .stubs import Stub

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["OPCODES"]

_MAX_LONG = 1 << 12
_I32, _U32, _U64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<Q")


def _proto(m: Machine, pos: int) -> int:
    if m.data[pos] > 5:
        raise FormatError(f"{m.what}: pickle protocol {m.data[pos]} is newer than 5")
    return pos + 1


def _frame(m: Machine, pos: int) -> int:
    size = _U64.unpack_from(m.data, pos)[0]
    m.take(pos + 8, size)
    return pos + 8


def _counted(header: struct.Struct | None, make: Callable[[bytes], Any], limit: int | None = None) -> Callable[[Machine, int], int]:
    def op(m: Machine, pos: int) -> int:
        if header is None:
            size = m.data[pos]
            pos += 1
        else:
            size = header.unpack_from(m.data, pos)[0]
            pos += header.size
        if size < 0 or (limit is not None and size > limit):
            raise CorruptCheckpointError(f"{m.what}: a pickled value of {size} bytes at {pos}")
        m.stack.append(make(m.take(pos, size)))
        return pos + size

    return op


def _text(make: Callable[[bytes], Any]) -> Callable[[Machine, int], int]:
    def op(m: Machine, pos: int) -> int:
        m.stack.append(make(m.line(pos)))
        return m.line_end

    return op


def _old_string(raw: bytes) -> Any:
    # Python 2 strings: text where they are text.
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _quoted(line: bytes) -> Any:
    if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    return _old_string(codecs.escape_decode(line[1:-1])[0])


def _int_line(line: bytes) -> Any:
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > _MAX_LONG:
        raise ValueError("an integer of too many digits")
    return int(line)


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _global(m: Machine, pos: int) -> int:
    module = m.line(pos).decode("utf-8")
    name = m.line(m.line_end).decode("utf-8")
    m.stack.append(m.find(module, name))
    return m.line_end


def _stack_global(m: Machine, pos: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise CorruptCheckpointError(f"{m.what}: a class named by something else than strings")
    m.stack.append(m.find(module, name))
    return pos


def _obj(m: Machine, pos: int) -> int:
    items = m.cut()
    m.stack.append(m.new(items[0], tuple(items[1:]), None))
    return pos


def _inst(m: Machine, pos: int) -> int:
    module = m.line(pos).decode("utf-8")
    name = m.line(m.line_end).decode("utf-8")
    cls = m.find(module, name)
    m.stack.append(m.new(cls, tuple(m.cut()), None))
    return m.line_end


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    m.stack[-1] = m.new(m.stack[-1], args, kwargs)
    return pos


def _pop(m: Machine, pos: int) -> int:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()
    return pos


def _pop_mark(m: Machine, pos: int) -> int:
    m.cut()
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _empty_set(m: Machine, pos: int) -> int:
    m.stack.append(set())
    return pos


def _add_items(m: Machine, pos: int) -> int:
    items = m.cut()
    for x in items:
        m.check_key(x)
    target = m.stack[-1]
    if isinstance(target, Stub):
        if target.items is None:
            target.items = []
        target.items.extend(items)
    elif type(target) is set:
        target.update(items)
    else:
        raise UnsafePickleError(f"{m.what}: the pickle adds elements to a {type(target).__name__}")
    return pos


def _frozenset(m: Machine, pos: int) -> int:
    items = m.cut()
    for x in items:
        m.check_key(x)
    m.stack.append(frozenset(items))
    return pos


def _list(m: Machine, pos: int) -> int:
    m.stack.append(m.cut())
    return pos


def _dict(m: Machine, pos: int) -> int:
    items = m.cut()
    m.stack.append({})
    m.set_items(m.stack[-1], items)
    return pos


def _get(m: Machine, pos: int) -> int:
    m.stack.append(m.memo[int(m.line(pos))])
    return m.line_end


def _put(m: Machine, pos: int) -> int:
    m.memo[int(m.line(pos))] = m.stack[-1]
    return m.line_end


OPCODES: dict[int, Callable[[Machine, int], int]] = {
    0x80: _proto,
    0x95: _frame,
    ord("I"): _text(_int_line),
    ord("L"): _text(lambda line: _int_line(line.removesuffix(b"L"))),
    ord("F"): _text(lambda line: float(line[:_MAX_LONG])),
    ord("S"): _text(_quoted),
    ord("V"): _text(lambda line: line.decode("raw-unicode-escape")),
    ord("T"): _counted(_I32, _old_string),
    ord("U"): _counted(None, _old_string),
    ord("C"): _counted(None, bytes),
    ord("B"): _counted(_U32, bytes),
    0x8E: _counted(_U64, bytes),
    0x96: _counted(_U64, bytearray),
    0x8A: _counted(None, _long),
    0x8B: _counted(_I32, _long, _MAX_LONG),
    ord("c"): _global,
    0x93: _stack_global,
    ord("o"): _obj,
    ord("i"): _inst,
    0x92: _newobj_ex,
    ord("0"): _pop,
    ord("1"): _pop_mark,
    ord("2"): _dup,
    0x8F: _empty_set,
    0x90: _add_items,
    0x91: _frozenset,
    ord("l"): _list,
    ord("d"): _dict,
    ord("g"): _get,
    ord("p"): _put,
}
