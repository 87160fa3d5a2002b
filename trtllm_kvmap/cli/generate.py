"""`trtllm-kvmap generate`"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.app import complain, say, verb, write_json
from trtllm_kvmap.cli.flags import (
    JsonOption,
    KvMapArgument,
    SourceOption,
    TargetOption,
    UnprovenOption,
    config_flags,
)
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate as continue_from
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import Guarded, hand_over_guarded
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import require_room
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.errors import InputError, reason
from trtllm_kvmap.mapper.backends import Backend, require_backend
from trtllm_kvmap.models import describe_pair, load_model, require_described, tokenise
from trtllm_kvmap.spec.plan import plan_handoff


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """How a prompt is handed over and continued."""

    max_new_tokens: int = field(default=32, metadata={"help": "tokens to generate, greedily"})
    first_tokens: int = field(
        default=1, metadata={"help": "S: first tokens that the target computes itself"}
    )
    repair_window: int = field(
        default=32, metadata={"help": "N: last tokens that the target computes itself"}
    )
    selected_tokens: int = field(
        default=0,
        metadata={
            "help": "tokens between the two that it computes too: those the source attends to most"
        },
    )
    speculate: bool = field(
        default=False, metadata={"help": "the source drafts, the target verifies: the same answer"}
    )
    backend: Backend = field(default="cpu", metadata={"help": "what runs the map"})

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 1, "first_tokens": 0, "repair_window": 0, "selected_tokens": 0}
        for name, count in least.items():
            if getattr(self, name) < count:
                raise InputError(f"{name} must be at least {count}, got {getattr(self, name)}.")


@verb
@config_flags(config=GenerateConfig)
def generate(
    kvmap: KvMapArgument,
    source: SourceOption,
    target: TargetOption,
    config: GenerateConfig,
    prompt: Annotated[str, typer.Option(help="the prompt, as text")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file")] = None,
    allow_unproven: UnprovenOption = False,
    json: JsonOption = None,
) -> None:
    """The source reads a prompt, the target goes on from the mapped cache.

    A map that carries a guard (`trtllm-kvmap guard`) is asked whether it may stand; if not, the
    target reads the prompt itself.
    """
    text = _prompt_text(prompt, prompt_file)
    require_backend(config.backend)
    loaded = KvMap.load(kvmap, allow_unproven=allow_unproven)
    pair = describe_pair(source, target)
    described = pair[1]
    ids = tokenise(described.tokenizer, described.name, text)
    if not ids:
        raise InputError("The prompt has no token; give some text.")
    require_room(described, len(ids) + config.max_new_tokens)
    require_described(loaded, *pair)
    reader = load_model(source)
    bridge = KvBridge(loaded, source=reader, target=load_model(target), backend=config.backend)
    plan = plan_handoff(
        len(ids), first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    read = prefill(reader, ids, logits_to_keep=1)
    if config.selected_tokens:
        ranked = rank_by_attention(reader, read.cache, ids, plan)
        plan = plan.with_selected(ranked, plan.num_computed + config.selected_tokens)
    guard = None if loaded.guard is None else Guard.from_json(loaded.guard)
    made = hand_over_guarded(bridge, guard, read.cache, ids, plan)
    if guard is not None and made.signals is not None:
        guard = guard.deciding(made.signals)
    handoff, plan = made.handoff, made.handoff.plan
    complain(_said(made, guard))
    counts = config.first_tokens, config.repair_window, config.selected_tokens
    if guard is not None and (unlike := guard.unlike(*counts)):
        complain(unlike)
    tokenizer: Any = bridge.target.tokenizer
    stops = {tokenizer.eos_token_id} - {None}
    count, drafted = config.max_new_tokens, None
    if config.speculate:
        caches = read.cache, handoff.cache
        drafted = speculate(
            reader, bridge.target, *caches, handoff.logits, count, eos_token_ids=stops
        )
        tokens = drafted.rows[0]
    else:
        tokens = continue_from(
            bridge.target, handoff.cache, handoff.logits, count, eos_token_ids=stops
        )
    answer = tokenizer.decode(tokens)
    say(answer)
    write_json(
        json,
        {
            "text": answer,
            "token_ids": tokens,
            "status": made.status,
            "guard": None if guard is None else {"score": made.score, "limit": guard.limit},
            "tokens": {
                "prompt": len(ids),
                "first": len(plan.first),
                "mapped": len(plan.mapped),
                "selected": len(plan.selected),
                "repaired": len(plan.repaired),
                "sink": handoff.sink_tokens,
            },
            "acceptance_rate": None if drafted is None else drafted.acceptance_rate,
            "seconds": handoff.seconds,
        },
    )


def _said(made: Guarded, guard: Guard | None) -> str:
    if guard is None:
        return f"{made.status} (the map has no guard)"
    if made.score is None:
        return f"{made.status} (nothing was mapped)"
    return f"{made.status} (guard: {made.score:.3g}, limit {guard.limit:.3g})"


def _prompt_text(prompt: str, prompt_file: Path | None) -> str:
    if bool(prompt) == (prompt_file is not None):
        raise InputError("Give the prompt once: either --prompt TEXT or --prompt-file FILE.")
    if prompt_file is None:
        return prompt
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The prompt cannot be read from {prompt_file} ({reason(error)}). Give a file of text "
            f"in UTF-8."
        ) from error
