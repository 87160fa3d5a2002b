"""Whether a mapped cache may stand: a weighing of signals against a limit. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trtllm_kvmap.decode.guard.signals import Signals
from trtllm_kvmap.decode.hop import Verdict
from trtllm_kvmap.errors import FormatError, MismatchError


@dataclass(frozen=True, slots=True)
class Guard:
    """``applied`` as long as ``bias + weights . features`` stays below ``limit``.

    Set for one pair and one map by evaluate.guard, and kept in the KvMap. ``measured`` (JSON) says
    on what it was set, and what it got right and wrong there. ``recalling`` is the guard that
    decides where the recall was measured too, which weighs it as the last signal (None: there is
    no such guard, and nobody need measure it).
    """

    weights: tuple[float, ...]
    bias: float
    limit: float
    measured: dict[str, Any]
    recalling: Guard | None = None

    def judge(self, signals: Signals) -> Verdict:
        """Raises MismatchError for signals of a target with other bands of layers."""
        deciding = self.deciding(signals)
        return deciding._weigh(signals.to_features(recall=deciding is not self))

    def deciding(self, signals: Signals) -> Guard:
        """The guard whose limit counts for ``signals``: this one, or ``recalling``."""
        return self if self.recalling is None or signals.recall is None else self.recalling

    def unlike(self, first_tokens: int, repair_window: int, selected_tokens: int) -> str:
        """That this guard was set on other hand-overs than those with these counts, in a sentence
        for whoever asks it; empty where it was set on such, or does not say.
        """
        ours = {"S": first_tokens, "N": repair_window, "selected_tokens": selected_tokens}
        theirs = {name: self.measured[name] for name in ours if name in self.measured}
        if all(ours[name] == count for name, count in theirs.items()):
            return ""
        return (
            f"The guard was set on hand-overs with {_listed(theirs)}, and this one has "
            f"{_listed(ours)}: its rates do not hold here. Give the same tokens, or set it again."
        )

    def _weigh(self, features: np.ndarray) -> Verdict:
        if len(features) != len(self.weights):
            raise MismatchError(
                f"The guard weighs {len(self.weights)} signals, the hand-over shows "
                f"{len(features)}; set the guard again for this map (`trtllm-kvmap guard`)."
            )
        with np.errstate(invalid="ignore"):  # an endless signal of weight 0
            score = self.bias + float(np.dot(self.weights, features))
        # Not "score >= limit": a score that is no number must not stand.
        return Verdict(drift=score, applied=score < self.limit)

    def to_json(self) -> dict[str, Any]:
        return {
            "weights": list(self.weights),
            "bias": self.bias,
            "limit": self.limit,
            "measured": self.measured,
            **({} if self.recalling is None else {"recalling": self.recalling.to_json()}),
        }

    @staticmethod
    def from_json(entry: Any) -> Guard:
        """Raises FormatError for JSON that is no guard, or says more than is known here."""
        try:
            if strange := set(entry) - {field.name for field in fields(Guard)}:
                raise ValueError(f"unknown: {', '.join(sorted(map(str, strange)))}")
            recalling = entry.get("recalling")
            if recalling is not None and "recalling" in recalling:
                raise ValueError("recalling holds another guard")
            return Guard(
                weights=tuple(float(weight) for weight in entry["weights"]),
                bias=float(entry["bias"]),
                limit=float(entry["limit"]),
                measured=dict(entry["measured"]),
                recalling=None if recalling is None else Guard.from_json(recalling),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise FormatError(
                f"The guard in the map cannot be read ({error!r}); set it again with "
                f"`trtllm-kvmap guard`."
            ) from error


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
