"""asyncengine: an LLM inference engine that lives inside your Python program."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

__all__ = [
    "DEMO_EMBEDDER", "DEMO_MODEL", "DEMO_RERANKER", "DEMO_VISION", "AdapterError", "AdapterInUse", "AdapterInfo",
    "AdapterNotFound", "AsyncEngine", "Beam", "BudgetTooSmall", "ChatKeywords", "Chunk", "Classification",
    "Classifications", "Completion", "ContextLengthExceeded", "Decision", "DecisionAnswer", "Embeddings", "Engine",
    "EngineAsleep", "EngineClosed", "EngineConfig", "EngineDead", "EngineError", "EngineGroup", "EngineHandle",
    "EngineStats", "FinishReason", "FleetError", "GrammarError", "GrammarImpossible", "GrammarTimeout",
    "GrammarTooLarge", "GrammarUnsupported", "InvalidParameter", "LogprobEntry", "ModelInfo", "ModelNotFound",
    "OutOfMemory", "Policy", "PrefixCacheReset", "QueueFull", "Ranked", "Ranking", "RequestFailed",
    "RequestKeywords", "RequestTimeout", "Sample", "SamplingParams", "Session", "SyncTokenStream", "Timings",
    "TokenLogprob", "TokenStream", "ToolCall", "ToolCallDelta", "UnsupportedModel", "Usage", "VectorKeywords",
    "WeightedFair", "WrongLoop", "WrongProcess", "beam_search", "shared_engine", "submitted",
]  # fmt: skip

_NAMES = {
    "async_engine": "AsyncEngine",
    "beams": "Beam beam_search",
    "cache_news": "PrefixCacheReset",
    "config": "EngineConfig",
    "demo": "DEMO_EMBEDDER DEMO_MODEL DEMO_RERANKER DEMO_VISION",
    "engine_group": "EngineGroup",
    "errors": "AdapterError AdapterInUse AdapterNotFound BudgetTooSmall ContextLengthExceeded EngineAsleep "
    "EngineClosed EngineDead EngineError FleetError GrammarError GrammarImpossible GrammarTimeout GrammarTooLarge "
    "GrammarUnsupported InvalidParameter ModelNotFound OutOfMemory QueueFull RequestFailed RequestTimeout "
    "UnsupportedModel WrongLoop WrongProcess",
    "grammar": "",
    "info": "ModelInfo",
    "lora.adapter": "AdapterInfo",
    "options": "ChatKeywords RequestKeywords VectorKeywords",
    "outputs": "Chunk Classification Classifications Completion Decision DecisionAnswer Embeddings FinishReason "
    "LogprobEntry Ranked Ranking Sample Timings ToolCall ToolCallDelta Usage",
    "policies": "Policy WeightedFair",
    "sampling_params": "SamplingParams",
    "session": "Session",
    "shared": "EngineHandle shared_engine",
    "stats": "EngineStats",
    "step": "TokenLogprob",
    "stream": "SyncTokenStream TokenStream submitted",
    "sync_engine": "Engine",
}
"""Public names by the module that defines them, which is imported when one of them is first asked for."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from asyncengine.async_engine import AsyncEngine
    from asyncengine.beams import Beam, beam_search
    from asyncengine.cache_news import PrefixCacheReset
    from asyncengine.config import EngineConfig
    from asyncengine.demo import DEMO_EMBEDDER, DEMO_MODEL, DEMO_RERANKER, DEMO_VISION
    from asyncengine.engine_group import EngineGroup
    from asyncengine.errors import (
        AdapterError,
        AdapterInUse,
        AdapterNotFound,
        BudgetTooSmall,
        ContextLengthExceeded,
        EngineAsleep,
        EngineClosed,
        EngineDead,
        EngineError,
        FleetError,
        GrammarError,
        GrammarImpossible,
        GrammarTimeout,
        GrammarTooLarge,
        GrammarUnsupported,
        InvalidParameter,
        ModelNotFound,
        OutOfMemory,
        QueueFull,
        RequestFailed,
        RequestTimeout,
        UnsupportedModel,
        WrongLoop,
        WrongProcess,
    )
    from asyncengine.info import ModelInfo
    from asyncengine.lora.adapter import AdapterInfo
    from asyncengine.options import ChatKeywords, RequestKeywords, VectorKeywords
    from asyncengine.outputs import (
        Chunk,
        Classification,
        Classifications,
        Completion,
        Decision,
        DecisionAnswer,
        Embeddings,
        FinishReason,
        LogprobEntry,
        Ranked,
        Ranking,
        Sample,
        Timings,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from asyncengine.policies import Policy, WeightedFair
    from asyncengine.sampling_params import SamplingParams
    from asyncengine.session import Session
    from asyncengine.shared import EngineHandle, shared_engine
    from asyncengine.stats import EngineStats
    from asyncengine.step import TokenLogprob
    from asyncengine.stream import SyncTokenStream, TokenStream, submitted
    from asyncengine.sync_engine import Engine
else:  # unseen by type checkers, which would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return import_module(f"asyncengine.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'asyncengine' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"asyncengine.{_MODULES[name]}"), name)
        return value
