"""The restricted unpickler: what it must build, and what it must never do. Each attack is a real pickle; a canary shows whether it ran."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import enum
import io
import os
import pathlib
import pickle
import pickletools
import random
import struct
import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import CorruptCheckpointError, FormatError, UCPError, UnsafePickleError, UnsupportedError
from ucp_dcp.safe_pickle import EnumStub, Reference, Stub, find_stub, is_plain, load_object, loads

PLAIN: list[Any] = [
    None, True, False, 0, -5, 255, 2**40, -(2**70), 1.5, float("inf"), "é\ud800x", b"\x00\xff", (1, 2, 3, 4), [1, [2]], {"a": {"b": ()}},
    {1, 2}, frozenset({"a"}), complex(1, -2), slice(1, None, 2), range(3, 9, 2), bytearray(b"xy"), collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, {"a": [1]}), collections.Counter("abca"), collections.deque([1, 2], 3), torch.float8_e4m3fn,
    torch.Size([2, 3]), torch.Size([]), torch.device("cpu"), torch.device("cuda", 1),
    random.Random(3).getstate(), np.float32(2.5), np.int64(-7), np.bool_(True), pathlib.PurePosixPath("/a/b"),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN, ids=lambda v: repr(v)[:25])
def test_plain_values_come_back_as_they_were(value: Any, protocol: int) -> None:
    got = loads(pickle.dumps(value, protocol))
    assert type(got) is type(value)
    assert got == value
    if isinstance(value, collections.defaultdict):
        assert got.default_factory is list


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(3.5), np.zeros((0, 4)), np.array(["ab", "c"]),
        np.array([1, 2], dtype=">i4"), np.arange(12)[::2], np.array([True, False]), np.array([1 + 2j]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)  # fmt: skip
def test_numpy_arrays(array: np.ndarray, protocol: int) -> None:
    data = pickle.dumps(array, protocol)
    got = loads(data)
    assert got.dtype == pickle.loads(data).dtype and np.array_equal(got, array)  # numpy itself swaps foreign byte orders here
    got[...] = got  # writable


def test_numpy_random_state() -> None:
    state = np.random.RandomState(3).get_state()
    got = loads(pickle.dumps(state))
    assert got[0] == state[0] and np.array_equal(got[1], state[1]) and got[2:] == state[2:]


def test_shared_and_recursive_containers_keep_their_identity() -> None:
    a: list[Any] = [1]
    a.append(a)
    got = loads(pickle.dumps({"x": a, "y": a}))
    assert got["x"] is got["y"] and got["x"][1] is got["x"]


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20) | st.binary(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=5) | st.integers(-(2**63), 2**63 - 1), inner, max_size=4)
            | st.tuples(inner, inner)
        ),
        max_leaves=30,
    ),
    st.integers(0, 5),
)
def test_any_plain_tree(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(UCPError):
        loads(data)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_a_value_or_an_error_of_ours(at: int, byte: int) -> None:
    data = bytearray(pickle.dumps({"a": [np.arange(3), torch.Size([1, 2]), {1: (2.5, "x")}], "s": {1, 2}}, 2))
    data[at % len(data)] = byte
    with contextlib.suppress(UCPError):
        loads(bytes(data))


# ---- attacks: code


class Reduce:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def as_global(module: str, name: str, args: bytes = b")", call: bytes = b"R") -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + args + call + b"."


CALLS = [
    ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("builtins", "eval"), ("builtins", "exec"),
    ("builtins", "__import__"), ("builtins", "open"), ("builtins", "compile"), ("__builtin__", "eval"), ("builtins", "getattr.__call__"),
    ("builtins", "breakpoint"), ("builtins", "type"), ("builtins", "super"), ("builtins", "vars"), ("builtins", "globals"),
    ("importlib", "import_module"), ("runpy", "run_path"), ("pickle", "loads"), ("_pickle", "loads"), ("marshal", "loads"),
    ("torch", "load"), ("torch.hub", "load"), ("torch", "save"), ("torch._utils", "_rebuild_qtensor"), ("torch.jit", "load"),
    ("torch._C", "_load_for_lite_interpreter"), ("torch.utils._config_module", "load_config"), ("torch.storage", "_load_from_bytes"),
    ("torch._dynamo.guards", "GuardBuilder.get"), ("torch", "_utils.os.system"), ("torch.serialization", "os.system"),
    ("numpy", "load"), ("numpy", "fromfile"), ("numpy.core.multiarray", "fromfile"), ("numpy.testing._private.utils", "runstring"),
    ("collections", "namedtuple"), ("operator", "attrgetter"), ("functools", "partial"), ("functools", "reduce"), ("ctypes", "CDLL"),
    ("copyreg", "_extension_registry"), ("copyreg", "__newobj_ex__"), ("timeit", "timeit"), ("code", "interact"), ("pathlib", "Path.open"),
    ("datetime", "date"), ("uuid", "UUID"), ("ucp_dcp.safe_pickle.machine", "loads"), ("ucp_dcp.safe_pickle.builders", "Builder"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), CALLS)
@pytest.mark.parametrize("inert", [False, True])
def test_calls_are_refused_by_name(module: str, name: str, inert: bool) -> None:
    with pytest.raises(UnsafePickleError, match=f"{module}.{name}"):
        loads(as_global(module, name), inert_unknown=inert)
    stack_global = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93)R."
    with pytest.raises(UnsafePickleError, match=name):
        loads(stack_global, inert_unknown=inert)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}, lambda x: {"model": {"w": 1}, "z": (1, [x])}])
def test_nothing_is_run(wrap: Any, tmp_path: pathlib.Path) -> None:
    canary = tmp_path / "canary"
    for attack in (
        Reduce(os.system, f"touch {canary}"),
        Reduce(eval, f"open({str(canary)!r}, 'w')"),
        Reduce(exec, f"open({str(canary)!r}, 'w').close()"),
        Reduce(getattr, "x", "format"),
        Reduce(pathlib.Path.touch, canary),
        Reduce(io.open, str(canary), "w"),
        Reduce(np.fromfile, str(canary)),
        Reduce(torch.load, str(canary)),
        Reduce(collections.namedtuple, "x", "a b"),
        Reduce(argparse.FileType("w"), str(canary)),
    ):
        for protocol in range(6):
            data = pickle.dumps(wrap(attack), protocol)
            for inert in (False, True):
                with pytest.raises(UnsafePickleError):
                    loads(data, inert_unknown=inert, stubs={("collections", "x"): Stub})
    assert not canary.exists()


def test_attacks_inside_a_torch_archive(tmp_path: pathlib.Path) -> None:
    canary = tmp_path / "canary"
    buffer = io.BytesIO()
    torch.save({"weights": torch.ones(3), "x": Reduce(os.system, f"touch {canary}")}, buffer)
    with pytest.raises(UnsafePickleError, match="system"):
        load_object(buffer.getvalue())
    assert not canary.exists()


def test_no_attribute_chain() -> None:
    for chain in (
        as_global("builtins", "getattr", b"cos\nsystem\nX\x01\x00\x00\x00a\x86"),
        as_global("builtins", "getattr", b"ccollections\nOrderedDict\nX\x08\x00\x00\x00__init__\x86"),
        as_global("builtins", "getattr", b"ctorch\nSize\nX\x09\x00\x00\x00__class__\x86"),
        as_global("builtins", "getattr", b"ctorch\nfloat32\nX\x09\x00\x00\x00__class__\x86"),
    ):
        with pytest.raises(UnsafePickleError):
            loads(chain)


def test_an_enum_member_by_name_looks_nothing_up() -> None:
    data = as_global("builtins", "getattr", b"cmymodule\nColor\nX\x03\x00\x00\x00RED\x86")
    got = loads(data, stubs={("mymodule", "Color"): EnumStub})
    assert (got.member, got.value, got.qualname) == ("RED", None, "mymodule.Color")
    with pytest.raises(UnsafePickleError):
        loads(data, stubs={("mymodule", "Color"): Stub})  # not an enum
    with pytest.raises(UnsafePickleError):
        loads(data.replace(b"RED", b"a.b"), stubs={("mymodule", "Color"): EnumStub})


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",  # BUILD on one of our constructors
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setitem__K\x01sb.",  # attributes of a container
        b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.",  # BUILD on a dict
        b"\x80\x02ctorch\nfloat32\n}b.",
        b"\x80\x02K\x05}b.",
        b"\x80\x02ctorch\nSize\nK\x01a.",  # APPEND on a constructor
        b"\x80\x02X\x01\x00\x00\x00aK\x01K\x02s.",  # SETITEM on a string
        b"\x80\x02K\x01(K\x02e.",  # APPENDS on a number
        b"\x80\x02](K\x02\x90.",  # ADDITEMS on a list
        b"\x80\x02ctorch\nTensor\n)\x81.",
        b"\x80\x02ctorch\nTensor\n)R.",
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02cbuiltins\nobject\n)R.",
        b"\x80\x02K\x05)R.",
        b"\x80\x02X\x01\x00\x00\x00a)R.",
        b"\x80\x02}\x94)\x81.",
        b"\x80\x02ccollections\ndefaultdict\nctorch\nSize\n\x85R.",  # a factory that is not plain
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nctorch\nTensor\n)}tR.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))\x89}tR.",  # a tensor outside an archive
        b"(\x80\x02X\x07\x00\x00\x00storageQ.",  # a persistent id outside an archive
        b"\x80\x02Pabc\n.",  # a text persistent id
        b"\x80\x02\x82\x01.",  # extension codes
        b"\x80\x02\x83\x01\x00.",
        b"\x80\x02\x84\x01\x00\x00\x00.",
        b"\x80\x05\x97.",  # out-of-band buffers
        b"\x80\x05\x98.",
        b"\x80\x02ccopyreg\n_reconstructor\n(ccollections\nOrderedDict\ncbuiltins\nobject\nNtR.",
        b"\x80\x02ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR.",
        b"(ios\nsystem\n.",  # INST
        b"(cos\nsystem\no.",  # OBJ
        b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.",  # object arrays
        b"\x80\x02cnumpy\ndtype\nX\x06\x00\x00\x00O8,f8,\x85R.",
    ],
)  # fmt: skip
def test_gadgets_are_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        loads(data)


def test_structured_and_object_arrays_are_refused() -> None:
    for array in (np.array([{}], dtype=object), np.zeros(2, dtype=[("a", "f4")]), np.zeros(2, dtype="M8[s]"), np.zeros(2, dtype="V4")):
        with pytest.raises(UnsafePickleError):
            loads(pickle.dumps(array))


def test_a_class_that_is_not_allowed_is_named() -> None:
    for value in (datetime.date(2020, 1, 1), argparse.Namespace(a=1), Weekday.MON):
        with pytest.raises(UnsafePickleError, match=type(value).__qualname__):
            loads(pickle.dumps({"x": value}))


class Weekday(enum.Enum):
    MON = 1


class Held:
    made: ClassVar[list[Any]] = []

    def __init__(self, x: int) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        Held.made.append(state)
        self.__dict__.update(state)


def test_allowed_classes_are_real_and_only_they() -> None:
    got = loads(pickle.dumps({"d": Held(3), "e": Weekday.MON}), allow_classes=[Held, Weekday])
    assert type(got["d"]) is Held and got["d"].x == 3 and got["e"] is Weekday.MON
    assert loads(pickle.dumps(argparse.Namespace(a=[1])), allow_classes=[argparse.Namespace]) == argparse.Namespace(a=[1])


def test_an_allowed_class_does_not_run_when_the_pickle_asks_for_more() -> None:
    Held.made.clear()
    data = pickle.dumps([Held(3), Reduce(os.system, "true")])
    with pytest.raises(UnsafePickleError):
        loads(data, allow_classes=[Held])
    assert Held.made == []


def test_stand_ins_record_and_do_nothing() -> None:
    Held.made.clear()
    got = loads(pickle.dumps([Held(3), Weekday.MON]), stubs={(Held.__module__, "Held"): Stub, (Weekday.__module__, "Weekday"): EnumStub})
    assert got[0].get("x") == 3 and got[0].name == "Held" and got[0].get("y", 7) == 7 and got[1].value == 1
    assert Held.made == []
    assert find_stub(got) is got[1] or find_stub(got) is got[0]
    got = loads(pickle.dumps({"n": argparse.Namespace(a=1)}), inert_unknown=True)
    assert got["n"].get("a") == 1 and got["n"].qualname == "argparse.Namespace"
    assert isinstance(loads(b"\x80\x02cos\nsystem\n.", inert_unknown=True), Reference)


# ---- attacks: time and memory


def bounded(data: bytes, error: type[Exception] = UCPError) -> None:
    start = time.monotonic()
    with pytest.raises(error):
        loads(data)
    assert time.monotonic() - start < 5


def test_a_tuple_that_takes_forever_to_hash() -> None:
    bounded(b"\x80\x02}K\x01\x85" + b"2\x86" * 200 + b"K\x01s.", CorruptCheckpointError)


def test_a_tuple_that_overflows_the_stack_when_hashed() -> None:
    bounded(b"\x80\x02}K\x01" + b"\x85" * 1_000_000 + b"K\x01s.", CorruptCheckpointError)
    bounded(b"\x80\x04\x8f(K\x01" + b"\x85" * 300_000 + b"\x90.", CorruptCheckpointError)
    bounded(b"\x80\x04(K\x01" + b"\x85" * 300_000 + b"\x91.", CorruptCheckpointError)


def test_deep_nesting_alone_is_harmless() -> None:
    value = loads(b"\x80\x02K\x01" + b"\x85" * 200_000 + b".")
    assert not is_plain(value)
    assert find_stub(value) is None


def test_integers_with_equal_hashes_as_keys() -> None:
    big = [(2**61 - 1) * (i + 1) for i in range(100)]
    bounded(pickle.dumps(dict.fromkeys(big)), CorruptCheckpointError)


def test_a_large_memo_index_costs_nothing() -> None:
    assert loads(b"\x80\x02K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 7


def test_copying_the_same_list_again_and_again() -> None:
    body = b"\x80\x02](" + b"K\x01" * 20_000 + b"eq\x00"
    for kind in (b"builtins\nlist\n", b"builtins\ntuple\n", b"builtins\nset\n", b"collections\ndeque\n"):
        bounded(body + (b"c" + kind + b"h\x00\x85R0") * 5_000 + b"h\x00.", CorruptCheckpointError)


def test_repeated_references_to_a_huge_string_stay_references() -> None:
    text = "x" * 1_000_000
    data = b"\x80\x02X" + struct.pack("<I", len(text)) + text.encode() + b"q\x00(" + b"h\x00" * 100_000 + b"t."
    got = loads(data)
    assert len(got) == 100_001 - 1 and all(x is got[0] for x in got)


def test_repeated_array_data() -> None:
    raw = b"\x80\x02B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"q\x00"
    make = b"cnumpy.core.numeric\n_frombuffer\n(h\x00cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85RJ\x00\x00\x10\x00\x85X\x01\x00\x00\x00CtR0"
    bounded(raw.replace(b"\x80\x02B", b"\x80\x03B") + make * 1000 + b"h\x00.", CorruptCheckpointError)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        b"\x80\x02\x8b\xff\xff\xff\xffabc.",
        b"\x80\x02T\xff\xff\xff\x7fabc.",
        b"\x80\x03B\xff\xff\xff\x7fabc.",
        b"I" + b"9" * 60_000 + b"\n.",
        b"L" + b"9" * 5_000 + b"L\n.",
        b"I" + b"1" * 70_000,
        b"c" + b"a" * 100_000,
        b"\x80\x06N.",
        b"",
        b".",
        b"N",
        b"\x80",
        b"\x80\x02(",
        b"\x80\x02t.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
        b"\x80\x02K\x01s.",
        b"S'unterminated\n.",
        b"Fabc\n.",
    ],
)  # fmt: skip
def test_impossible_lengths_and_cut_pickles(data: bytes) -> None:
    bounded(data, FormatError)


def test_every_cut_of_a_real_pickle_is_an_error() -> None:
    data = pickle.dumps({"a": [np.arange(3), torch.Size([1]), 2.5, {"k": (1, 2)}]}, 4)
    for n in range(len(data)):
        with pytest.raises(UCPError):
            loads(data[:n])


def test_size_limit() -> None:
    with pytest.raises(FormatError, match="limit is 10"):
        loads(pickle.dumps("x" * 100), max_size=10)


def test_numpy_shapes_must_fit_their_bytes() -> None:
    data = pickle.dumps(np.arange(4, dtype=np.uint8), 2)
    shape = data.find(b"K\x04\x85")
    assert shape > 0
    bounded(data[:shape] + b"J\xff\xff\xff\x7f\x85" + data[shape + 3 :], CorruptCheckpointError)


def test_a_tree_with_shared_parts_is_not_walked_twice() -> None:
    tree: Any = [1]
    for _ in range(100):
        tree = [tree, tree]
    start = time.monotonic()
    assert find_stub(tree) is None
    assert not is_plain(tree)
    assert not is_plain([[0] * 90_000] * 90_000)
    assert time.monotonic() - start < 2


def test_all_opcodes_of_this_python_are_decided_upon() -> None:
    """A new pickle opcode must be looked at, not fall through."""
    assert pickle.HIGHEST_PROTOCOL == 5 and len(pickletools.opcodes) == 68


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_unsupported_dtypes_are_named() -> None:
    buffer = io.BytesIO()
    torch.save(torch.sparse_coo_tensor([[0]], [1.0], (2,)), buffer)
    with pytest.raises(UnsafePickleError, match="_rebuild_sparse_tensor"):
        load_object(buffer.getvalue())
    with pytest.raises(UnsupportedError, match=r"sparse"):
        loads(as_global("torch.serialization", "_get_layout", b"X\x10\x00\x00\x00torch.sparse_coo\x85"))
