"""What answering at once and reading for real afterwards costs and brings (run it through
bench.py).

tiny-s reads documents, tiny-m answers from a mapped cache and is upgraded in idle chunks. Each
document is also read by tiny-m alone, in the same turn: times are medians of the ratios of turns.
Agreement is the share of emitted tokens that are those tiny-m alone emits, greedily.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

DOCUMENTS, DOCUMENT_TOKENS, EMITTED = 20, 900, 24
CHUNK_TOKENS, TOKENS_BETWEEN = 128, 4  # a chunk is read after every 4 tokens that are emitted


@dataclass(frozen=True, slots=True)
class Turn:
    """One document: seconds, and shares of equal tokens."""

    prefill: float
    answer: float
    chunks: list[float]
    step: float
    withdrawn: int
    before: float
    after: float
    verified: float
    largest_difference: float


def bench_upgrade() -> dict[str, object]:
    """The figures of `bench.py upgrade`, see the module."""
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    bridge, rng = fitted_bridge(source, target), np.random.default_rng(1)
    turns = []
    for number in range(DOCUMENTS + 1):
        document = make_document(rng, DOCUMENT_TOKENS, 20, 1)
        ids = source.tokenise(f"{document.text} {document.questions[0].stem}")
        if number:  # the first turn warms up
            turns.append(take_turn(bridge, ids))
        else:
            take_turn(bridge, ids)
    return {
        "first_token_to_prefill": median(turn.answer / turn.prefill for turn in turns),
        "upgrade_to_prefill": median(sum(turn.chunks) / turn.prefill for turn in turns),
        "longest_chunk_to_decode_step": median(max(turn.chunks) / turn.step for turn in turns),
        "agreement": {
            "mapped": mean(turn.before for turn in turns),
            "upgraded_meanwhile": mean(turn.after for turn in turns),
            "upgraded_and_verified": mean(turn.verified for turn in turns),
        },
        "withdrawn_tokens": mean(turn.withdrawn for turn in turns),
        "emitted_tokens": EMITTED,
        "largest_difference_to_native_cache": max(turn.largest_difference for turn in turns),
        "chunk_tokens": CHUNK_TOKENS,
        "documents": DOCUMENTS,
        "threads": torch.get_num_threads(),
        "turns": [asdict(turn) for turn in turns],
    }


def fitted_bridge(source: object, target: object) -> KvBridge:
    rng = np.random.default_rng(0)
    texts = [source.tokenise(make_document(rng, 512, 16, 0).text) for _ in range(60)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pair.moments.safetensors"
        moments = calibrate(source, target, texts, CalibrationConfig(), out)
    return KvBridge(fit(moments, FitConfig(n=6)), source=source, target=target)


def take_turn(bridge: KvBridge, ids: list[int]) -> Turn:
    target = bridge.target
    alone, native_seconds = timed(lambda: prefill(target, ids, logits_to_keep=1))
    wanted = generate(target, alone.cache, alone.logits[-1], EMITTED)

    plain = switched(bridge, ids)
    before = plain.generate(EMITTED)

    session = switched(bridge, ids, switch=False)
    _, answer = timed(lambda: (session.switch("large", first_tokens=4), session.generate(1)))
    chunks, state = [], None
    while state is None or state.approximate:
        state, seconds = timed(lambda: session.upgrade(chunk_tokens=CHUNK_TOKENS))
        chunks.append(seconds)
        session.generate(TOKENS_BETWEEN)
    made = len(session.token_ids) - len(ids)
    if made < EMITTED:
        session.generate(EMITTED - made)
    after = session.token_ids[len(ids) :][:EMITTED]
    _, steps = timed(lambda: session.generate(8))
    exact = prefill(target, session.token_ids[:-1]).cache

    verified, withdrawn = plain, 0
    while True:
        state = verified.upgrade(chunk_tokens=CHUNK_TOKENS, verify=True)
        withdrawn += len(state.withdrawn)
        if not state.approximate:
            break
    missing = len(ids) + EMITTED - len(verified.token_ids)
    if missing:
        verified.generate(missing)
    return Turn(
        prefill=native_seconds,
        answer=answer,
        chunks=chunks,
        step=steps / 8,
        withdrawn=withdrawn,
        before=share_equal(before, wanted),
        after=share_equal(after, wanted),
        verified=share_equal(verified.token_ids[len(ids) :], wanted),
        largest_difference=largest_difference(session, exact),
    )


def switched(bridge: KvBridge, ids: list[int], *, switch: bool = True) -> Session:
    """A conversation that the source has read all of but the last token."""
    session = Session({"small": bridge.source, "large": bridge.target}, [bridge])
    session.add(ids[:-1])
    session.read()
    session.add(ids[-1:])
    if switch:
        session.switch("large", first_tokens=4)
    return session


def share_equal(mine: list[int], theirs: list[int]) -> float:
    return mean(a == b for a, b in zip(mine, theirs, strict=True))


def largest_difference(session: Session, exact: object) -> float:
    here, there = view_pool(session.held["large"].cache), view_pool(exact)
    pairs = zip(here.keys + here.values, there.keys + there.values, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def timed(run: Callable[[], object]) -> tuple[object, float]:
    began = time.perf_counter()
    made = run()
    return made, time.perf_counter() - began
