"""The pickle in a file of PyTorch's, read as the list of data that it is for weights. Python's own unpickler runs what
a file asks for (https://docs.python.org/3/library/pickle.html: "never unpickle data that could have come from an
untrusted source"); here nothing is imported and nothing called: each operation that `torch.save` writes builds plain
values, and whatever else a file asks for is refused by name."""

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.stored import furthest

STORAGES = {
    "DoubleStorage": np.dtype("float64"),
    "FloatStorage": np.dtype("float32"),
    "HalfStorage": np.dtype("float16"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("int64"),
    "IntStorage": np.dtype("int32"),
    "ShortStorage": np.dtype("int16"),
    "CharStorage": np.dtype("int8"),
    "ByteStorage": np.dtype("uint8"),
    "BoolStorage": np.dtype("bool"),
}
_DICT, _TENSOR, _PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
_KNOWN = frozenset((_DICT, _TENSOR, _PARAMETER, *(f"torch {name}" for name in STORAGES)))
_MARK = object()
_DIMENSIONS = 32  # that a tensor may have; numpy has 64 at most
_PLAIN = frozenset(  # operations whose argument is the value
    (
        *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINSTRING"),
        "SHORT_BINSTRING",
    )
)
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}


@dataclasses.dataclass(frozen=True)
class Named:
    """What the file calls by name: module and name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Storage:
    """`count` numbers in the entry data/`key`."""

    key: str
    dtype: np.dtype
    count: int


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor: numbers of a storage, from `offset` on, with strides in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    pass


def read(pickle: bytes, where: str) -> Any:
    """What a pickle of weights holds: dictionaries, lists, tuples, numbers, texts and `View`s. Raises ShardlmError that
    begins with `where`, for one that asks for anything but tensors, and for a damaged one."""
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(pickle):
            if operation.name == "STOP":
                return machine.stack.pop()
            machine.run(operation.name, argument)
    except _Refused as refused:
        raise ShardlmError(
            f"{where}: {refused}, which weights do not need; nothing of it was run. If you trust the file, "
            "transformers' AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) writes safetensors"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError):
        pass
    raise ShardlmError(f"{where} is damaged; download the file again")


class _Machine:
    """The stack and the memo of a pickle. Errors of Python's own are of a damaged one."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, operation: str, argument: Any) -> None:
        """Does one operation."""
        if operation in _PLAIN:
            self.stack.append(argument)
        elif operation in _VALUES:
            self.stack.append(_VALUES[operation])
        elif operation not in ("PROTO", "FRAME"):
            own: Callable[[Any], None] | None = getattr(self, f"_{operation.lower()}", None)
            if own is None:
                raise _Refused(f"the pickle asks for the operation {operation}")
            own(argument)

    def _marked(self) -> list[Any]:
        """What is behind the last mark, both taken."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            if not at:
                raise ValueError
            at -= 1
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    # Values.

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def _tuple1(self, _: Any) -> None:
        self._last(1)

    def _tuple2(self, _: Any) -> None:
        self._last(2)

    def _tuple3(self, _: Any) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        self.stack.append(tuple([self.stack.pop() for _ in range(count)][::-1]))

    def _append(self, _: Any) -> None:
        value = self.stack.pop()
        _of(list, self.stack[-1]).append(value)

    def _appends(self, _: Any) -> None:
        values = self._marked()
        _of(list, self.stack[-1]).extend(values)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _of(dict, self.stack[-1])[_key(key)] = value

    def _setitems(self, _: Any) -> None:
        values = self._marked()
        for key, value in zip(values[::2], values[1::2], strict=True):
            _of(dict, self.stack[-1])[_key(key)] = value

    # The memo.

    def _binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    _long_binput = _binput

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    _long_binget = _binget

    # What would run something.

    def _global(self, name: str) -> None:
        if name not in _KNOWN:
            raise _Refused(f"the pickle asks for {name.replace(' ', '.')}")
        self.stack.append(Named(name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(f"{_of(str, module)} {_of(str, name)}")

    def _binpersid(self, _: Any) -> None:
        kind, storage, key, _, count = self.stack.pop()
        dtype = STORAGES[_of(Named, storage).name.removeprefix("torch ")]
        if kind != "storage":
            raise ValueError
        self.stack.append(Storage(_of(str, key), dtype, _count(count)))

    def _reduce(self, _: Any) -> None:
        arguments, named = _of(tuple, self.stack.pop()), _of(Named, self.stack.pop())
        if named.name == _DICT and not arguments:
            self.stack.append({})
        elif named.name == _TENSOR:
            self.stack.append(_view(*arguments))
        elif named.name == _PARAMETER:
            self.stack.append(_of(View, arguments[0]))
        else:
            raise _Refused(f"the pickle calls {named.name.replace(' ', '.')} with {len(arguments)} arguments")

    def _build(self, _: Any) -> None:
        self.stack.pop()  # versions of modules, as an attribute of the dictionary
        _of(dict, self.stack[-1])


def _view(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> View:
    del requires_grad
    if hooks or metadata:
        raise _Refused("the pickle has tensors with hooks or marks of their own")
    sizes, steps = (tuple(map(_count, _of(tuple, numbers))) for numbers in (shape, strides))
    # Of one place what the next would be is nothing, and may be any number.
    steps = tuple(step if n > 1 else 0 for n, step in zip(sizes, steps, strict=True))
    found = View(_of(Storage, storage), _count(offset), sizes, steps)
    last = found.offset + furthest(sizes, steps)
    if len(sizes) > _DIMENSIONS or (0 not in sizes and last >= found.storage.count):
        raise ValueError
    return found


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _count(value: Any) -> int:
    if _of(int, value) < 0:
        raise ValueError
    return value


def _key(value: Any) -> Any:
    """Of dictionaries; others than these are no names, and tuples in tuples would take their time."""
    if type(value) not in (str, int):
        raise TypeError
    return value
