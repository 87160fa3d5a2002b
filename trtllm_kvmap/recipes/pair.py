"""What every recipe starts from: two models and three sets of text that share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.text import read_documents
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.run import EvaluationConfig, Metric
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import LoadedModel, describe_pair, load_model
from trtllm_kvmap.tiny import FAMILY, model_folder

RUN = 32  # tokens in a row by which text is recognised again


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """The part of a recipe's config that all recipes have. ``fit``, ``selection`` and ``report``
    say which text fits, chooses and judges; ``calibration`` how the first is added up (the studies
    count every token alike); ``judged`` at which S and N.
    """

    source: str
    target: str
    fit: TaskConfig
    selection: TaskConfig
    report: TaskConfig
    judged: EvaluationConfig
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)


AnyConfig = TypeVar("AnyConfig", bound=PairConfig)


@dataclass(frozen=True, slots=True)
class OwnModels:
    """Models and text in place of the tiny family's: folders or hub ids, a ``text`` to fit on
    (read_documents), and a ``task`` with its ``data`` to choose and judge by.
    """

    source: str | None = None
    target: str | None = None
    text: Path | None = None
    task: str | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        given = [self.source, self.target, self.text, self.task, self.data]
        if any(given) and not all(given):
            raise InputError(
                "Models of your own need text of your own: give --source, --target, --text, "
                "--task and --data together, or none of them for the tiny family."
            )

    def put_into(self, config: AnyConfig) -> AnyConfig:
        """``config`` for these models: the report reads the items after those of the selection, and
        text without questions is judged by its loss.
        """
        if self.source is None or self.target is None or self.task is None:
            return config
        data, after = str(self.data), config.selection.skip + config.selection.num_items
        metric: Metric = "nll" if self.task in ("text", "coqa") else "accuracy"
        return replace(
            config,
            source=self.source,
            target=self.target,
            selection=replace(config.selection, task=self.task, data=data),
            report=replace(config.report, task=self.task, data=data, skip=after),
            judged=replace(config.judged, metric=metric),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """``documents`` (token ids) fit, ``selection`` chooses, ``report`` judges; ``task`` named what
    judges.
    """

    documents: list[tuple[int, ...]]
    selection: list[Item]
    report: list[Item]
    task: TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Texts):
    """The texts, and the two models that read them."""

    source: LoadedModel
    target: LoadedModel


def read_texts(config: PairConfig, text: Path | None) -> Texts:
    """What is read, before any weights are loaded. Raises InputError when two of the three sets
    share text, MismatchError for models of different tokenizers.
    """
    source, target = describe_pair(located(config.source), located(config.target))
    if text is None:
        documents = [item.context for item in read_items(config.fit, target.tokenizer)]
    else:
        how = config.calibration
        read = read_documents(
            text,
            source,
            min_tokens=max(8, how.min_tokens),
            max_tokens=how.window(source.spec, target.spec),
        )
        documents = [tuple(ids) for ids in read[: config.fit.num_items]]
    selection = read_items(config.selection, target.tokenizer)
    report = read_items(config.report, target.tokenizer)
    for one, others, names in (
        (documents, selection, "fits and the text that chooses"),
        (documents, report, "fits and the text that judges"),
        ([item.context for item in selection], report, "chooses and the text that judges"),
    ):
        require_disjoint(one, others, names)
    return Texts(documents=documents, selection=selection, report=report, task=config.report)


def load_pair(config: PairConfig, texts: Texts) -> Pair:
    return Pair(
        documents=texts.documents,
        selection=texts.selection,
        report=texts.report,
        task=texts.task,
        source=load_model(located(config.source)),
        target=load_model(located(config.target)),
    )


def located(name: str) -> str | Path:
    """Where a member of the tiny family lies, by its name; any other folder or hub id as it is."""
    return model_folder(name) if name in FAMILY else name


def require_disjoint(seen: Sequence[Sequence[int]], items: Sequence[Item], names: str) -> None:
    """Raise InputError when more than half of a context's runs of 32 tokens occur in ``seen``."""
    known = {run for ids in seen for run in _runs(ids)}
    for number, item in enumerate(items):
        runs = _runs(item.context)
        if 2 * sum(run in known for run in runs) > len(runs):
            raise InputError(
                f"The text that {names} share a document (number {number}); a figure on it would "
                f"flatter the map. Give other text, another seed, or another skip."
            )


def _runs(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + RUN]) for at in range(max(len(ids) - RUN, 0) + 1)]
