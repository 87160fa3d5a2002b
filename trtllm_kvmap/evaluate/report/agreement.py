"""One figure stands at several places of a report; a file edited at one of them is refused."""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.errors import FormatError, InputError
from trtllm_kvmap.evaluate.gates import Gates, judge_gates

ON_TOP = (
    "gap_recovered",
    "retention",
    "retention_normalised",
    "top1_agreement",
    "perplexity_ratio",
)


def require_agreement(entry: dict[str, Any], name: str) -> None:
    """Raise FormatError, which begins with ``name``, unless the figures at the top of the report
    ``entry`` are those of the arm that its config names, and its gates what they say of that arm.
    """
    try:
        arm, source = (entry["arms"][each] for each in (entry["config"]["arm"], "source"))
        gates = Gates(*(gate["limit"] for gate in entry["gates"]))
        agree = {key: entry[key] == arm[key] for key in ON_TOP}
        agree["attention_cosine"] = entry["attention_cosine"]["mean"] == arm["attention_cosine"]
        agree["gates"] = entry["gates"] == judge_gates(gates, arm, source)
    except (LookupError, TypeError, ArithmeticError, InputError) as error:
        raise FormatError(
            f"{name} is not a whole report ({error!r}). Write it again with `trtllm-kvmap "
            f"evaluate`."
        ) from error
    if wrong := [key for key, same in agree.items() if not same]:
        raise FormatError(
            f"{name} contradicts itself: its {', '.join(wrong)} at the top and the figures of its "
            f"arm {entry['config']['arm']} differ, so it was edited or damaged. Write it again "
            f"with `trtllm-kvmap evaluate`."
        )
