"""Recording of the compiled kernels that a computation calls, and their replay in one call.

CUDA records a step as a graph; this is the same for a CPU. While a `Recorder` is active, each kernel that Python calls
is noted as an operation: the address of its code, and its arguments as words of 64 bits. Results that lie between
kernels are put into an `Arena`, so that they have the same addresses in every replay. What changes from step to step is
known by what it is, never by its value: memory of the step's inputs by the range of addresses that was declared for it,
numbers by being a `Symbol`, the team by the name of its parameter.

Whatever else computes between kernels would be missing from a replay: torch's operations and reads of tensors by Python
are noticed, and the first one is named (`Recorder.obstacle`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core.registry import cpu_target
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.kernels.cpu.compiling import CallForm, Kernel, noting
from asyncengine.kernels.elsewhere import called_apart

_LINE = 64
_LONG = ir.IntType(64)
_NEW = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}
_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__array__}
TEAM = 0
"""The index of the team among the values of a step."""


class Symbol(int):
    """A number that every step has anew, as it is in the step that is recorded."""

    index: int
    """Its index in the values that `Record.replay` is given."""

    @classmethod
    def at(cls, index: int, value: int) -> Symbol:
        symbol = cls(value)
        symbol.index = index
        return symbol


class Arena:
    """Memory for results that lie between kernels. Memory of tensors that are gone is given to the next result."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of address space; the system gives memory for a page of it at its first use."""
        memory = np.empty(size + _LINE, dtype=np.uint8)
        first = -memory.ctypes.data % _LINE
        self._memory = memory[first : first + size]
        self.size = size
        self._free = [(0, size)]
        """Begin and end of each free range, ascending."""
        self._blocks: dict[int, Any] = {}
        """Weak references to the blocks in use, by their offsets."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of undefined content; None if no free range is large enough."""
        count = int(np.prod(shape, dtype=np.int64))
        size = max(_LINE, -(-count * dtype.itemsize // _LINE) * _LINE)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                block = self._memory[begin : begin + size]
                # every view of the tensor keeps the block, so this fires once the last of them is gone
                self._blocks[begin] = weakref.ref(block, partial(self._give_back, begin, begin + size))
                return torch.from_numpy(block).view(dtype)[:count].view(*shape)
        return None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the same memory that does not keep it in use: it is free as soon as `tensor` is gone."""
        offset = tensor.data_ptr() - self._memory.ctypes.data
        return torch.from_numpy(self._memory[offset : offset + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)

    def _give_back(self, begin: int, end: int, _: Any) -> None:
        del self._blocks[begin]
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (begin, end)]):
            if merged and merged[-1][1] == low:
                merged[-1] = merged[-1][0], high
            else:
                merged.append((low, high))
        self._free = merged


class Record:
    """Operations as a table, to be run by one call."""

    def __init__(
        self, operations: Sequence[tuple[int, int, Sequence[int]]], changing: Sequence[tuple[int, ...]]
    ) -> None:
        """`operations`: (address of the caller, which reads arguments from words; that of the code; words). `changing`:
        (index of a word, index of its value among those of a step, an offset that is added to the value)."""
        self._words = np.array([word for *_, words in operations for word in words], dtype=np.int64)
        addresses = self._words.ctypes.data + 8 * np.cumsum([0, *(len(words) for *_, words in operations)])[:-1]
        table = [(caller, code, int(address)) for (caller, code, _), address in zip(operations, addresses, strict=True)]
        self._table = np.array(table, dtype=np.int64).reshape(-1, 3)
        self._table_address = self._table.ctypes.data
        columns = np.array(changing, dtype=np.int64).reshape(-1, 3)
        self._word_indices, self._value_indices, self._offsets = (np.ascontiguousarray(column) for column in columns.T)
        self._values: list[int] = []

    def __len__(self) -> int:
        return len(self._table)

    def replay(self, values: list[int]) -> None:
        """Run the operations with the values of a step, by their indices."""
        if values != self._values:
            self._words[self._word_indices] = np.array(values, dtype=np.int64)[self._value_indices] + self._offsets
            self._values = values
        _replayer()(self._table_address, len(self._table))

    @property
    def table(self) -> tuple[list[list[int]], list[int]]:
        """(code and number of each operation's first word; all words, with 0 for those that change)."""
        words = self._words.copy()
        words[self._word_indices] = 0
        return [[code, (at - self._words.ctypes.data) // 8] for _, code, at in self._table.tolist()], words.tolist()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, kernels called on this thread are noted, and new tensors lie in `arena`.

    `inputs`: tensors whose memory is another in every step, with the indices of their addresses in a step's values.
    """

    def __init__(self, arena: Arena, inputs: Sequence[tuple[int, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._inputs = [(index, own.data_ptr(), own.data_ptr() + own.nbytes) for index, own in inputs if own.nbytes]
        self._operations: list[tuple[CallForm, list[int]]] = []
        self._changing: list[tuple[int, int, int]] = []
        self._words = 0
        self._reads = _Reads(self)
        self.obstacle: str | None = None
        """The first operation that would be missing from a replay; None if there is none."""
        self.full = False
        """Whether the arena had no room."""

    def __enter__(self) -> Recorder:
        self._token = noting.set(self._note)
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*raised)  # type: ignore[no-untyped-call]
        noting.reset(self._token)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def record(self) -> Record:
        """The operations that were noted, ready to be replayed."""
        _make_callers([form for form, _ in self._operations if not form.caller])
        return Record([(form.caller, form.code, words) for form, words in self._operations], self._changing)

    def refuse(self, what: str) -> None:
        """Note an operation that would be missing from a replay."""
        self.obstacle = self.obstacle or what

    def _note(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        result = kernel.run(arguments)
        form = kernel.form_for(arguments)
        if form.returns:
            self.refuse(f"the result of {kernel.py_func.__name__}")
            return result
        words: list[int] = []
        for position, (argument, numba_type) in enumerate(zip(arguments, form.types, strict=True)):
            change = None
            if position == form.team:
                change = TEAM, 0
            elif isinstance(argument, Symbol):
                change = argument.index, 0
            elif isinstance(argument, int) and not isinstance(argument, bool):
                ranges = [(index, argument - low) for index, low, high in self._inputs if low <= argument < high]
                change = ranges[0] if ranges else None
            if change is not None:
                self._changing.append((self._words + len(words), *change))
            words.append(_word(argument, numba_type))
        self._operations.append((form, words))
        self._words += len(words)
        return result

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function in _NEW:
            like = arguments[0] if isinstance(arguments[0], torch.Tensor) else None
            shape = arguments[0].shape if function is torch.ops.aten.empty_like.default else arguments[-1]
            dtype = keywords.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            if shape is arguments[-1] or arguments[0].is_contiguous():
                tensor = self._arena.take(shape, dtype)
                self.full = self.full or tensor is None
                return function(*arguments, **keywords) if tensor is None else tensor
        returned = [value.alias_info for value in function._schema.returns]
        if any(alias is None or alias.is_write for alias in returned):
            self.refuse(str(function))
        return function(*arguments, **keywords)


class _Reads(TorchFunctionMode):
    """Notices Python's reads of tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function in _READS:
            self._recorder.refuse(f"a tensor's {function.__name__}()")
        return function(*arguments, **(keywords or {}))


def _word(argument: Any, numba_type: Any) -> int:
    """64 bits that stand for an argument."""
    if argument is None:
        return 0
    if isinstance(argument, (float, np.floating)):
        packed = struct.pack("<f4x" if numba_type == numba.types.float32 else "<d", argument)
        return int(struct.unpack("<q", packed)[0])
    return int(argument)


_known_callers: dict[tuple[Any, ...], int] = {}
"""Addresses of callers by types of arguments."""
_KEPT: list[Any] = []
"""Compiled modules, which stay as long as the process."""


def _compile(module: ir.Module, names: Sequence[str]) -> list[int]:
    target = llvmlite.binding.Target.from_default_triple().create_target_machine(opt=1, jit=True)
    engine = llvmlite.binding.create_mcjit_compiler(llvmlite.binding.parse_assembly(str(module)), target)
    engine.finalize_object()
    _KEPT.append(engine)
    return [engine.get_function_address(name) for name in names]


def _make_callers(forms: Sequence[CallForm]) -> None:
    """Make the callers of these forms: functions (code, address of words), one for all of the same types."""
    for form in forms:
        form.caller = _known_callers.get(form.types, 0)
    missing = list(dict.fromkeys(form.types for form in forms if not form.caller))
    if missing:
        module, names = ir.Module(), [f"caller{index}" for index in range(len(missing))]
        for name, types in zip(names, missing, strict=True):
            _write_caller(module, name, [cpu_target.target_context.get_value_type(numba_type) for numba_type in types])
        _known_callers.update(zip(missing, _compile(module, names), strict=True))
        for form in forms:
            form.caller = _known_callers[form.types]


def _write_caller(module: ir.Module, name: str, types: Sequence[Any]) -> None:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_LONG, _LONG]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    code, words = function.args
    base, arguments = builder.inttoptr(words, _LONG.as_pointer()), []
    for index, llvm_type in enumerate(types):
        word = builder.load(builder.gep(base, [_LONG(index)]))
        if isinstance(llvm_type, ir.PointerType):
            arguments.append(builder.inttoptr(word, llvm_type))
        elif isinstance(llvm_type, ir.FloatType):
            arguments.append(builder.bitcast(builder.trunc(word, ir.IntType(32)), llvm_type))
        elif isinstance(llvm_type, ir.DoubleType):
            arguments.append(builder.bitcast(word, llvm_type))
        else:
            arguments.append(word if llvm_type.width == 64 else builder.trunc(word, llvm_type))
    function_type = ir.FunctionType(ir.VoidType(), types).as_pointer()
    builder.call(builder.inttoptr(code, function_type), arguments)
    builder.ret_void()


@functools.cache
def _replayer() -> Any:
    """replay(address of a table, operations), without the interpreter's lock."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_LONG, _LONG]), "replay")
    entry, head, body, end = (function.append_basic_block(name) for name in ("entry", "head", "body", "end"))
    builder = ir.IRBuilder(entry)
    table = builder.inttoptr(function.args[0], _LONG.as_pointer())
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_LONG)
    index.add_incoming(_LONG(0), entry)
    builder.cbranch(builder.icmp_signed("<", index, function.args[1]), body, end)
    builder.position_at_end(body)
    row = builder.mul(index, _LONG(3))
    caller, code, words = (builder.load(builder.gep(table, [builder.add(row, _LONG(column))])) for column in range(3))
    builder.call(builder.inttoptr(caller, ir.FunctionType(ir.VoidType(), [_LONG, _LONG]).as_pointer()), [code, words])
    index.add_incoming(builder.add(index, _LONG(1)), body)
    builder.branch(head)
    builder.position_at_end(end)
    builder.ret_void()
    address = _compile(module, ["replay"])[0]
    return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)


# A list of the compiled kernels that a computation calls, made by running it without them.
#
# While a `KernelList` is entered, a kernel that Python calls is noted by its name and its arguments' types, and neither
# compiled nor run. So a model's layers say what they need before their weights are read: the forward runs over weights
# that hold nothing, and what it computes means nothing.

_PRODUCTS: dict[str, Callable[..., tuple[int, ...]]] = {
    "aten::mm": lambda x, y: (x.shape[0], y.shape[1]),
    "aten::addmm": lambda _, x, y, **scales: (x.shape[0], y.shape[1]),
    "aten::bmm": lambda x, y: (*x.shape[:2], y.shape[2]),
}
"""Shapes of torch's products, which would read all weights."""
_APART = 1 << 20
"""The extent of a function that is called by its address: it is so because it takes long."""


class KernelList(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of kernels called on this thread, and of functions whose addresses were asked for, in the order of the
    first calls. int64 in new tensors are zeros, so that they are in range where torch looks things up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extents: dict[str, int] = {}
        """Each name, and about how long it takes to compile (`_extent`)."""
        self._calls: set[tuple[Any, ...]] = set()
        """Kernels that were noted, with the types of their arguments."""

    @property
    def names(self) -> list[str]:
        """Names as `calls.compile_named` takes them, those that take longest first."""
        return sorted(self._extents, key=lambda name: -self._extents[name])

    def __enter__(self) -> KernelList:
        self._tokens = noting.set(self._note), called_apart.set(self._note_address)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        noting.reset(self._tokens[0])
        called_apart.reset(self._tokens[1])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def _note(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        call = kernel, *map(type, arguments)
        if call not in self._calls:
            self._calls.add(call)
            self._extents[kernel.name_for(arguments)] = _extent(kernel, set())

    def _note_address(self, name: str, rare: bool) -> None:
        self._extents.setdefault(name, _APART)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        shape_of = _PRODUCTS.get(function.name().partition(".")[0])
        if shape_of is not None:
            return next(tensor for tensor in arguments if isinstance(tensor, torch.Tensor)).new_empty(
                shape_of(*arguments, **keywords)
            )
        result = function(*arguments, **keywords)
        return result.zero_() if function in _NEW and result.dtype == torch.int64 else result


def _extent(function: Any, seen: set[Any]) -> int:
    """Bytes of Python's code of a kernel and of all kernels that it names."""
    seen.add(function)
    code, namespace = function.py_func.__code__, function.py_func.__globals__
    values = [namespace.get(name) for name in code.co_names]
    callees = [kernel for kernel in values if isinstance(kernel, Kernel) and kernel not in seen]
    return len(code.co_code) + sum(_extent(kernel, seen) for kernel in callees if kernel not in seen)
