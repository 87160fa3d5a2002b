"""Pooled ridge over several pairs, an MLP where ridge fails, and conversations that alternate.

Each pair has a map of its own, judged for itself: equal shapes promise nothing. The first pair then
takes turns in conversations, and what the map costs is told turn by turn, against the same
conversation that never changed models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.alternation import Alternation, alternate
from trtllm_kvmap.evaluate.tasks.conversations import read_conversations
from trtllm_kvmap.evaluate.tasks.named import TaskConfig
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.models import load_model
from trtllm_kvmap.recipes.outcome import Judged, Outcome, Row
from trtllm_kvmap.recipes.pair import Pair, PairConfig, located
from trtllm_kvmap.recipes.steps import (
    Progress,
    chosen,
    judged_map,
    moments_of,
    said,
)
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.tiny import FAMILY


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    """Beside source to target and back, each of ``more_targets`` is a pair with the source. A pair
    is failing when, on the text that chooses, its perplexity is more than ``failing_above`` times
    the target's own (without continuations: the target's accuracy more than so many times its).
    """

    more_targets: tuple[str, ...]
    candidates: FitGrid
    failing_above: float
    mlp: RefineConfig
    mlp_documents: int
    conversations: TaskConfig

    def __post_init__(self) -> None:
        if self.mlp.term != "mlp":
            raise InputError(f"mlp needs the term mlp, got {self.mlp.term!r}.")
        if self.failing_above < 1:
            raise InputError(f"failing_above must be at least 1, got {self.failing_above}.")


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    pairs = [pair, replace(pair, source=pair.target, target=pair.source)]
    if config.source in FAMILY:  # text of your own is given for two models
        pairs += [replace(pair, target=load_model(located(name))) for name in config.more_targets]
    judged: dict[str, Judged] = {}
    directory: list[Row] = []
    for each in pairs:
        name = f"{each.source.name}-to-{each.target.name}".replace("/", "-")
        name += "-back" if name in judged else ""  # two folders of one name
        judged[name], row = one_pair(config, each, on_progress)
        directory.append({"pair": name, **row})
    first = next(iter(judged.values()))
    tables = {"maps, one for each direction": directory}
    sentence = (
        f"{len(judged)} maps, the first recovers {said(first.report.gap_recovered)} of the gap"
    )
    conversations = conversations_of(config)
    if conversations is None:
        left_out = ["conversations in turn; they need --task coqa with its file."]
        return Outcome(judged=judged, tables=tables, sentence=sentence, left_out=left_out)
    there, back = (each.kvmap for each in list(judged.values())[:2])
    found = alternate(
        KvBridge(there, source=pair.source, target=pair.target),
        KvBridge(back, source=pair.target, target=pair.source),
        read_conversations(conversations, pair.target.tokenizer),
        first_tokens=config.judged.first_tokens,
        repair_window=config.judged.repair_window,
        resamples=config.judged.resamples,
        on_talk=lambda done, total: on_progress("converse", done, total),
    )
    tables["loss of the right answer, turn by turn, nats a token"] = _turns(found)
    tables["what a turn adds to the loss of mapping, nats"] = [
        {"answers": name, "drift": slope} for name, slope in found.drift.items()
    ]
    sentence += (
        f"; over {len(found.turns)} turns the loss of the second model grows by "
        f"{said(found.drift['target'])} nats a turn"
    )
    return Outcome(judged=judged, tables=tables, sentence=sentence)


def conversations_of(config: Config) -> TaskConfig | None:
    """Those of the config for the tiny family; for other models, those of a coqa file that neither
    choose nor judge.
    """
    if config.source in FAMILY:
        return config.conversations
    if config.report.task != "coqa":
        return None
    skip = config.report.skip + config.report.num_items
    return replace(config.conversations, task="coqa", data=config.report.data, skip=skip)


def one_pair(config: Config, pair: Pair, on_progress: Progress) -> tuple[Judged, Row]:
    """Pooled ridge, and where that fails the same map with an MLP, unless documents that trained
    nothing say that it does not help.
    """
    moments = moments_of(pair, config.calibration, on_progress)
    kvmap, table = chosen(pair, moments, config.candidates.candidates(), config.judged, on_progress)
    (row_chosen,) = (row for row in table if row["chosen"])
    judged = judged_map(pair, kvmap, config.judged, on_progress)
    row = {"perplexity ratio": judged.report.perplexity_ratio, "with MLP": None}
    if failing(kvmap, row_chosen, config.failing_above):
        refined = refine(
            kvmap,
            pair.source,
            pair.target,
            pair.documents[: config.mlp_documents],
            config.mlp,
            on_step=lambda done, total: on_progress(
                f"{pair.source.name} to {pair.target.name}: train an MLP", done, total
            ),
        )
        mended = judged_map(pair, refined, config.judged, on_progress)
        row["with MLP"] = mended.report.perplexity_ratio
        if refined.fitted["refined"]["scale"]:
            judged = mended
    return judged, {
        **judged.summary(),
        **row,
        "above chance": judged.report.retention_normalised,
        "k": kvmap.fitted["config"]["k"],
        "parameters": judged.kvmap.num_parameters,
    }


def failing(kvmap: KvMap, chosen_row: Row, above: float) -> bool:
    """Whether the map that was chosen is too far from the target, see Config."""
    alone = kvmap.fitted["selection"]["target"]
    if chosen_row["NLL"] is not None:
        return bool(math.exp(chosen_row["NLL"] - alone["nll"]) > above)
    return bool(alone["accuracy"] > above * chosen_row["accuracy"])


def _turns(found: Alternation) -> list[Row]:
    return [
        {
            "turn": row.turn,
            "answers": row.answered_by,
            "loss": row.nll,
            "native": row.native_nll,
            "source alone": row.source_nll,
            "target alone": row.target_nll,
            "mapped tokens": row.mapped_tokens,
        }
        for row in found.turns
    ]
