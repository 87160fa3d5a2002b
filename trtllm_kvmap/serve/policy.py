"""Who reads a prompt: the seam at which a deployment decides.

A policy sees a request and its plan before any model runs, and returns None, the source reads and
the target goes on from mapped KV, or the Outcome with which the target reads the prompt itself.
"""

from __future__ import annotations

from collections.abc import Callable

from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.request import CompletionRequest
from trtllm_kvmap.spec.plan import HandoffPlan

Policy = Callable[[CompletionRequest, HandoffPlan], Outcome | None]


def source_reads(request: CompletionRequest, plan: HandoffPlan) -> Outcome | None:
    """Read by the source, answered by the target, wherever a token is left to map."""
    if plan.mapped:
        return None
    return Outcome(
        "fallback_reprefill",
        "short_prompt",
        f"the target computes all {plan.num_tokens} tokens of so short a prompt anyway",
    )
