"""Turn one model's KV cache into another's, so that a conversation changes models without being
read again.

    from trtllm_kvmap import KvBridge, KvMap, load_model

    source, target = load_model("models/small"), load_model("models/large")
    kvmap = KvMap.load("small-to-large.kvmap.safetensors")
    bridge = KvBridge(kvmap, source=source, target=target)
    target_cache = bridge.convert(source_cache, token_ids)

Names are imported when they are first asked for, so that a part of the package costs only itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_kvmap.artifact.kvmap import KvMap as KvMap
    from trtllm_kvmap.artifact.moments import MomentSet as MomentSet
    from trtllm_kvmap.calibrate.config import CalibrationConfig as CalibrationConfig
    from trtllm_kvmap.decode.bridge import Handoff as Handoff
    from trtllm_kvmap.decode.bridge import KvBridge as KvBridge
    from trtllm_kvmap.decode.generate import generate as generate
    from trtllm_kvmap.decode.guard.guard import Guard as Guard
    from trtllm_kvmap.decode.guard.guarded import hand_over_guarded as hand_over_guarded
    from trtllm_kvmap.decode.prefill import prefill as prefill
    from trtllm_kvmap.decode.select_tokens import rank_by_attention as rank_by_attention
    from trtllm_kvmap.decode.session.mirror import Mirror as Mirror
    from trtllm_kvmap.decode.session.session import Session as Session
    from trtllm_kvmap.decode.session.session_file import load_session as load_session
    from trtllm_kvmap.decode.session.session_file import save_session as save_session
    from trtllm_kvmap.decode.speculation.draft_length import DraftLength as DraftLength
    from trtllm_kvmap.decode.speculation.speculate import speculate as speculate
    from trtllm_kvmap.errors import KvMapError as KvMapError
    from trtllm_kvmap.fit.config import FitConfig as FitConfig
    from trtllm_kvmap.mapper.backends import make_mapper as make_mapper
    from trtllm_kvmap.mapper.backends import map_kv as map_kv
    from trtllm_kvmap.mapper.contract import Span as Span
    from trtllm_kvmap.mapper.pool import KvPool as KvPool
    from trtllm_kvmap.models import LoadedModel as LoadedModel
    from trtllm_kvmap.models import load_model as load_model
    from trtllm_kvmap.spec.plan import HandoffPlan as HandoffPlan
    from trtllm_kvmap.spec.plan import plan_handoff as plan_handoff

__version__ = "0.1.0"

# Where each public name lives. Names that are also folders (fit, evaluate) stay in them.
_HOMES = {
    "CalibrationConfig": "calibrate.config",
    "DraftLength": "decode.speculation.draft_length",
    "FitConfig": "fit.config",
    "Guard": "decode.guard.guard",
    "Handoff": "decode.bridge",
    "HandoffPlan": "spec.plan",
    "KvBridge": "decode.bridge",
    "KvMap": "artifact.kvmap",
    "KvMapError": "errors",
    "KvPool": "mapper.pool",
    "LoadedModel": "models",
    "Mirror": "decode.session.mirror",
    "MomentSet": "artifact.moments",
    "Session": "decode.session.session",
    "Span": "mapper.contract",
    "generate": "decode.generate",
    "hand_over_guarded": "decode.guard.guarded",
    "load_model": "models",
    "load_session": "decode.session.session_file",
    "make_mapper": "mapper.backends",
    "map_kv": "mapper.backends",
    "plan_handoff": "spec.plan",
    "prefill": "decode.prefill",
    "rank_by_attention": "decode.select_tokens",
    "save_session": "decode.session.session_file",
    "speculate": "decode.speculation.speculate",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
