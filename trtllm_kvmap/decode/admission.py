"""What must hold before a hand-over begins, so that a bad request changes nothing."""

from __future__ import annotations

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.prompt import Prompt, require_room, require_tokens
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries, view_pool, written_lengths
from trtllm_kvmap.models import KnownModel, LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan
from trtllm_kvmap.spec.rope import written_length


def check_request(
    kvmap: KvMap,
    source: KnownModel,
    target: LoadedModel,
    prompt: Prompt,
    plan: HandoffPlan,
    source_cache: HfCache,
    target_cache: HfCache | None,
) -> int:
    """The rope_length of the source's mapped keys. Raises InputError or MismatchError."""
    require_tokens(target, prompt.token_ids)
    require_room(target, prompt.longest)
    _check_plan(plan, prompt)
    if plan.spliced:
        if target_cache is None:
            raise InputError(
                f"The plan splices {len(plan.spliced)} tokens, so target_cache is needed; give the "
                f"target's exact cache, or plan with spliced=0."
            )
        _check_cache("target", target_cache, prompt, plan.spliced.stop, kvmap.target.kv_shape)
        dtype = view_pool(target_cache).dtype
        if dtype != target.model.dtype:
            raise MismatchError(
                f"The target's cache is {dtype} but the model computes in {target.model.dtype}; "
                f"give a cache that this model filled."
            )
    if not plan.mapped:
        return 0
    require_tokens(source, prompt.token_ids[:, : plan.mapped.stop])
    require_room(source, plan.mapped.stop - min(prompt.pads))
    _check_cache("source", source_cache, prompt, plan.mapped.stop, kvmap.source.kv_shape)
    return _source_length(source, prompt, plan, source_cache)


def _check_plan(plan: HandoffPlan, prompt: Prompt) -> None:
    parts = (plan.spliced, plan.first, plan.mapped, plan.repaired)
    ends = [0, *(part.stop for part in parts)]
    if [part.start for part in parts] != ends[:-1] or ends[-1] != prompt.num_tokens:
        covered = ", ".join(f"{part.start}-{part.stop}" for part in parts)
        raise InputError(
            f"The plan covers the tokens {covered}; the prompt needs 0-{prompt.num_tokens} without "
            f"gaps. Make the plan with plan_handoff({prompt.num_tokens}, ...)."
        )
    if plan.spliced and prompt.padded:
        raise InputError(
            "Nothing can be spliced into a padded batch, because its rows begin at different "
            "columns; plan with spliced=0, or hand the rows over one by one."
        )
    if list(plan.selected) != sorted({*plan.selected} & {*plan.mapped}):
        raise InputError(
            f"The plan selects the tokens {list(plan.selected)[:8]}, which must be ascending and "
            f"mapped ({plan.mapped.start}-{plan.mapped.stop}); select with plan.with_selected."
        )
    if plan.selected and prompt.padded:
        raise InputError(
            "No token can be selected in a padded batch, because its rows begin at different "
            "columns; use plan.contiguous, or hand the rows over one by one."
        )


def _check_cache(
    what: str, cache: HfCache, prompt: Prompt, entries: int, kv_shape: tuple[int, int, int]
) -> None:
    pool = view_pool(cache)
    if pool.kv_shape != kv_shape:
        raise MismatchError(
            f"The {what}'s cache holds (layers, KV heads, head_dim) = {pool.kv_shape}; the map "
            f"needs {kv_shape}. Give the cache that this {what} filled."
        )
    held = pool.keys[0].shape[0], pool.tokens_per_block
    if held[0] != prompt.batch or held[1] < entries:
        raise InputError(
            f"The {what}'s cache holds {held[0]} sequences of {held[1]} tokens; the plan needs "
            f"{prompt.batch} of at least {entries}. Let the {what} read the prompt first."
        )


def _source_length(source: KnownModel, prompt: Prompt, plan: HandoffPlan, cache: HfCache) -> int:
    rope = source.spec.rope
    if not rope.length_dependent:
        return prompt.longest
    lengths = written_lengths(cache, plan.mapped)
    if lengths is not None:  # the shortest and the longest suffice: frequencies change one way
        return written_length(rope, [min(lengths), max(lengths)])
    if num_entries(cache) < rope.original_length:
        return prompt.longest
    raise MismatchError(
        f"{source.name} has {rope.kind} RoPE, whose frequencies depend on how long the sequence "
        f"was when a key was written, and its cache does not say. Read the prompt with "
        f"decode.prefill, which records it."
    )
