"""Device-seconds of reading with one model and writing with another, by length."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate.accounting import Phases, compute_of, saving
from trtllm_kvmap.evaluate.measure_speeds import measure_speeds
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.recipes.outcome import Row


def compute_rows(
    bridge: KvBridge,
    source: LoadedModel,
    judged: EvaluationConfig,
    *,
    lengths: Sequence[int],
    reply_tokens: int,
) -> list[Row]:
    """Reader and writer apart against all of it on the reader."""
    speeds = measure_speeds(
        bridge,
        source,
        lengths,
        first_tokens=judged.first_tokens,
        repair_window=max(judged.repair_window, 1),
    )
    rows = []
    for length in lengths:
        mapped = max(length - speeds.repair_window, 0)
        read = float(speeds.source_prefill.seconds(length))
        told = reply_tokens - 1
        split = Phases(
            source_prefill=read,
            map=float(speeds.map.seconds(mapped)),
            repair=float(speeds.repair.seconds(length)),
            decode=told / speeds.target_decode,
        )
        native = Phases(source_prefill=read, decode=told / speeds.source_decode)
        costs = compute_of(split, devices=2), compute_of(native, devices=1)
        rows.append(
            {
                "tokens": length,
                "active, split": costs[0].active,
                "active, reader": costs[1].active,
                "active saved": saving(*costs),
                "reserved, split": costs[0].reserved,
                "reserved, reader": costs[1].reserved,
                "first token, split over reader": (costs[0].elapsed - split.decode) / read,
                "decode, writer over reader": speeds.target_decode / speeds.source_decode,
            }
        )
    return rows
