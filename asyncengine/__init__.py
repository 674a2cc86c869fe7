"""asyncengine: an LLM inference engine that lives inside your Python program."""

from asyncengine.cli import starting as _starting  # noqa: F401

# isort: split
from asyncengine.async_engine import AsyncEngine
from asyncengine.config import EngineConfig
from asyncengine.demo import EMBEDDER_PATH as DEMO_EMBEDDER
from asyncengine.demo import MODEL_PATH as DEMO_MODEL
from asyncengine.demo import RERANKER_PATH as DEMO_RERANKER
from asyncengine.demo import VISION_PATH as DEMO_VISION
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
from asyncengine.lora.naming import AdapterInfo
from asyncengine.options import ChatKeywords, RequestKeywords, VectorKeywords
from asyncengine.outputs import (
    Chunk,
    Classification,
    Classifications,
    Completion,
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
from asyncengine.shared import EngineHandle, shared_engine
from asyncengine.stats import EngineStats
from asyncengine.step import TokenLogprob
from asyncengine.stream import SyncTokenStream, TokenStream, submitted
from asyncengine.sync_engine import Engine

__version__ = "0.2.0"

__all__ = [
    "DEMO_EMBEDDER",
    "DEMO_MODEL",
    "DEMO_RERANKER",
    "DEMO_VISION",
    "AdapterError",
    "AdapterInUse",
    "AdapterInfo",
    "AdapterNotFound",
    "AsyncEngine",
    "BudgetTooSmall",
    "ChatKeywords",
    "Chunk",
    "Classification",
    "Classifications",
    "Completion",
    "ContextLengthExceeded",
    "Embeddings",
    "Engine",
    "EngineAsleep",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineGroup",
    "EngineHandle",
    "EngineStats",
    "FinishReason",
    "FleetError",
    "GrammarError",
    "GrammarImpossible",
    "GrammarTimeout",
    "GrammarTooLarge",
    "GrammarUnsupported",
    "InvalidParameter",
    "LogprobEntry",
    "ModelInfo",
    "ModelNotFound",
    "OutOfMemory",
    "Policy",
    "QueueFull",
    "Ranked",
    "Ranking",
    "RequestFailed",
    "RequestKeywords",
    "RequestTimeout",
    "Sample",
    "SamplingParams",
    "SyncTokenStream",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "ToolCall",
    "ToolCallDelta",
    "UnsupportedModel",
    "Usage",
    "VectorKeywords",
    "WeightedFair",
    "WrongLoop",
    "WrongProcess",
    "shared_engine",
    "submitted",
]
