"""The compilation of kernels by numba, without machine code that nothing calls.

numba makes machine code, and a function that Python can call, of everything it compiles. Most compiled functions are
only inlined into others, whose code takes theirs over. So a function has two forms: `Kernel` and `jit.compiled_for` for
Python and C, and `Kernel.inlined` for the functions that contain it, of which there is LLVM's code and no machine code.

A kernel's instructions are the same either way, and so are its results.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.environment import lookup_environment
from numba.core.registry import CPUDispatcher

from asyncengine.kernels.cpu.cache import InlinedCache, KernelCache

Note = Callable[["Kernel", tuple[Any, ...]], Any]
"""Called with a kernel and its arguments in place of the kernel; returns what the kernel returns."""

noting: ContextVar[Note | None] = ContextVar("asyncengine_kernel_calls", default=None)
"""The listener to this thread's calls of kernels: a recorder, or a list (`kernels.recording`)."""
_TEAMS = "asyncengine.kernels.cpu.team_loops"
"""The module whose calls are not noted: one of them stops a team that is garbage-collected while others compute."""
_ENVIRONMENT = "_ZN08NumbaEnv"
"""The prefix of numba's global variables that hold the Python objects of a function."""
_UNUSED_PASSES = {
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "FindLiterallyCalls",
    "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
    "NoPythonSupportedFeatureValidation", "DumpParforDiagnostics",
}  # fmt: skip
"""Numba's compiler passes for closures, `with`, unrolled tuples, array expressions and parallel loops, which no kernel
has: each pass walks every function all the same, which was a tenth of the time of compiling."""


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function and of those inlined into it: machine code once its address or object is asked for."""

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.emitted = self.only_inlined = False
        """Whether machine code was made of it, and whether it is never called by its address, only inlined, so that it
        is optimised in the function that contains it."""

    def _optimize_functions(self, module: Any) -> None:
        """Do nothing: functions are optimised with the module that contains them, which would optimise them once more
        whatever was done before."""
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        if not self.only_inlined:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def _emit(self) -> None:
        self._ensure_finalized()
        if self.emitted:
            return
        self.emitted = True
        self._dynamic_globals.clear()
        super()._finalize_final_module()
        for variable in self._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT) and (objects := lookup_environment(variable.name)) is not None:
                self._codegen.set_env(variable.name, objects)

    def get_pointer_to_function(self, name: str) -> Any:
        self._emit()
        return super().get_pointer_to_function(name)

    def _get_compiled_object(self) -> Any:
        self._emit()
        return super()._get_compiled_object()


class KernelCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler, for code in a `_Library`."""

    def define_pipelines(self) -> Any:
        state = self.state
        if state.library is None:
            state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            state.library.only_inlined = state.flags.no_cpython_wrapper and state.flags.no_cfunc_wrapper
        managers = super().define_pipelines()
        for manager in managers:
            manager.passes = [entry for entry in manager.passes if entry[0].__name__ not in _UNUSED_PASSES]
            manager.finalize()
        return managers


@dataclass(slots=True, eq=False)
class CallForm:
    """A kernel compiled for arguments of some types."""

    types: tuple[Any, ...]
    code: int
    """The address of its code, as C calls it."""
    team: int
    """The index of the argument that is the team; -1 if there is none."""
    returns: bool
    """Whether it has a result."""
    caller: int = 0
    """The address of a function that calls it with words (`kernels.recording`); 0 until that is made."""


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function as Python calls it. Compiled functions that call it take over its `inlined` form."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions={**options, "nopython": True}, pipeline_class=KernelCompiler)
        self._cache = KernelCache(function)
        self._forms: dict[tuple[type, ...], CallForm] = {}

    def __call__(self, *arguments: Any) -> Any:
        note = noting.get()
        if note is None or self.py_func.__module__ == _TEAMS:
            return super().__call__(*arguments)
        return note(self, arguments)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Call it without telling the listener (`noting`)."""
        return super().__call__(*arguments)

    def name_for(self, arguments: tuple[Any, ...]) -> str:
        """The name "module:function:(types)" of a call with these arguments, as `calls.compile_named` takes it."""
        module = self.py_func.__module__
        function = next(name for name, value in vars(sys.modules[module]).items() if value is self)
        return f"{module}:{function}:({', '.join(str(self.typeof_pyval(argument)) for argument in arguments)})"

    def form_for(self, arguments: tuple[Any, ...]) -> CallForm:
        """The form for a call with these numbers, each below 2**63, for whose types it has been compiled."""
        # by Python's types: numba goes through every argument and hashes its type, half the time of a recording
        key = tuple(map(type, arguments))
        if key not in self._forms:
            types = tuple(map(self.typeof_pyval, arguments))
            compiled, names = self.overloads[types], list(inspect.signature(self.py_func).parameters)
            code = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
            team = names.index("team") if "team" in names else -1
            self._forms[key] = CallForm(types, code, team, compiled.signature.return_type != numba.types.none)
        return self._forms[key]

    @functools.cached_property
    def inlined(self) -> _InnerKernel:
        options = {**self.targetoptions, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _InnerKernel(self.py_func, options)

    def get_call_template(self, arguments: Any, named: Any) -> Any:
        return self.inlined.get_call_template(arguments, named)

    def get_overload(self, signature: Any) -> Any:
        return self.inlined.get_overload(signature)


class _InnerCompiler(_FunctionCompiler):  # type: ignore[misc]
    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = True  # else numba makes machine code of it at once
        return flags


class _InnerKernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function in the form that others take over: neither Python nor C can call it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options, pipeline_class=KernelCompiler)
        self._compiler = _InnerCompiler(function, self.targetdescr, options, {}, KernelCompiler)
        self._cache = InlinedCache(function)

    def add_overload(self, result: Any) -> None:
        # numba looks functions up by their entry point, an address in machine code, of which there is none here
        result = result._replace(entry_point=object())
        self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result
