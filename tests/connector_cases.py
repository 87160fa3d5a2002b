"""What every host with a connector must do, whatever engine it is: one table, run against each.

A lane gives a Host and runs every case of CASES on the kind of host it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from connector_world import REPAIR_WINDOW, Stream, World
from streams import require_equal_streams


@dataclass(frozen=True)
class Ask:
    """One greedy request. ``cancel_after`` so many tokens it is cancelled."""

    token_ids: list[int]
    steps: int = 16
    salt: str | None = None
    handoff: str | None = None
    cancel_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """``status`` is HandoffStatus.to_json(), or None for a plain request; ``cached`` how many
    prompt tokens the engine found in its own prefix cache when the request began.
    """

    token_ids: list[int]
    status: dict[str, Any] | None
    cached: int


class Host(Protocol):
    """An engine that runs the target, with a connector over the world's blocks."""

    tokens_per_block: int

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        """Submit all of them at once, in this order, and wait for all."""

    def forget(self) -> None:
        """Empty the prefix cache."""

    def preemptions(self) -> int:
        """How many times a running request has lost its blocks so far."""


def require(answer: Answer, expected: Stream) -> None:
    require_equal_streams(answer.token_ids, expected.token_ids, expected.logits)


def require_status(answer: Answer, state: str, **counts: int) -> None:
    assert answer.status is not None, "the response says nothing of the hand-over"
    seen = {name: answer.status[name] for name in ("state", *counts)}
    assert seen == {"state": state, **counts}, answer.status
    assert bool(answer.status["reason"]) or state == "applied"


def mapped_end(host: Host, token_ids: list[int]) -> int:
    """The formula for a request of which nothing is computed."""
    size = host.tokens_per_block
    return max(0, (len(token_ids) - REPAIR_WINDOW) // size * size)


def case_a_mapped_request_goes_on_as_the_hf_lane_does(host: Host, world: World) -> None:
    ids = world.prompt(1)
    end, sink = mapped_end(host, ids), world.sink_of(ids)
    assert end >= 96, "a prompt this short proves nothing"
    assert sink, "the sink table should know how prompts start"
    (answer,) = host.run([Ask(ids, salt=world.offer(ids))])
    expected = world.expect(ids, 16, end=end)
    require(answer, expected)
    assert answer.token_ids != world.native(ids, 16).token_ids, "mapped KV should show"
    assert len(set(answer.token_ids)) > 4, "a stream of one token proves nothing"
    require_status(
        answer,
        "applied",
        prompt=len(ids),
        matched=end,
        mapped=end - sink,
        sink=sink,
        computed=len(ids) - end,
        already_exact=0,
        already_approximate=0,
    )


def case_wrong_kv_changes_the_output_as_it_does_in_the_hf_lane(host: Host, world: World) -> None:
    ids, other = world.prompt(2), world.prompt(102, 200)
    right = world.expect(ids, 16, end=mapped_end(host, ids))
    wrong = world.expect(ids, 16, end=mapped_end(host, ids), read=other)
    assert right.token_ids != wrong.token_ids
    (answer,) = host.run([Ask(ids, salt=world.offer(ids, read=other))])
    require(answer, wrong)


def case_a_plain_request_never_hits_mapped_blocks(host: Host, world: World) -> None:
    """Of the same prompt: in the same batch, behind it, before it, and later."""
    ids = world.prompt(3)
    mapped, native = world.expect(ids, 16, end=mapped_end(host, ids)), world.native(ids, 16)
    assert mapped.token_ids != native.token_ids
    first, beside = host.run([Ask(ids, salt=world.offer(ids)), Ask(ids)])
    require(first, mapped)
    require(beside, native)
    assert beside.cached == 0, "the plain request was first of its kind"
    assert beside.status is None
    host.forget()
    before, after = host.run([Ask(ids), Ask(ids, salt=world.offer(ids))])
    require(before, native)
    require(after, mapped)
    # Behind everything a mapped request has decoded, too.
    (later,) = host.run([Ask(ids + mapped.token_ids)])
    require(later, world.native(ids + mapped.token_ids, 16))
    (stranger,) = host.run([Ask(ids, salt="another tenant's own salt")])
    require(stranger, native)
    assert stranger.cached == 0
    assert stranger.status is None


def case_the_next_turn_hits_its_own_blocks_decoded_ones_too(host: Host, world: World) -> None:
    size, ids = host.tokens_per_block, world.prompt(4)
    salt = world.offer(ids)
    (first,) = host.run([Ask(ids, 2 * size, salt=salt)])
    before = world.expect(ids, 2 * size, end=mapped_end(host, ids))
    require(first, before)
    turn = ids + before.token_ids
    cached = (len(turn) - 1) // size * size
    assert cached > len(ids), "blocks of decoded tokens should be among them"
    turn = turn + world.prompt(5)[1:40]
    (second,) = host.run([Ask(turn, salt=salt, handoff=salt)])
    assert second.cached == cached
    require(second, world.go_on(before.cache, turn, 16))
    require_status(
        second, "applied", already_exact=0, already_approximate=cached, mapped=0, matched=0
    )
    (plain,) = host.run([Ask(turn)])
    require(plain, world.native(turn, 16))
    assert plain.cached == 0


def case_an_exact_prefix_of_the_conversation_is_used(host: Host, world: World) -> None:
    """The first turn was the target's own under the same salt; the second is handed over."""
    size, ids = host.tokens_per_block, world.prompt(6, 200)
    identity = world.identity()
    turn = ids[: 2 * size + 5]
    (native,) = host.run([Ask(turn, 4, salt=identity.salt, handoff=identity.salt)])
    require(native, world.native(turn, 4))
    require_status(native, "fallback_reprefill", already_exact=0, computed=len(turn))
    (answer,) = host.run([Ask(ids, salt=world.offer(ids, identity=identity))])
    end = mapped_end(host, ids)
    assert answer.cached == 2 * size
    require(answer, world.expect(ids, 16, end=end, spliced=2 * size))
    require_status(
        answer,
        "applied",
        already_exact=2 * size,
        already_approximate=0,
        mapped=end - 2 * size,
        sink=0,
    )


def case_the_targets_own_kv_of_an_offer_is_spliced(host: Host, world: World) -> None:
    """It ends inside a block."""
    own = host.tokens_per_block + 5
    for ids in map(world.prompt, range(30, 40)):
        end = mapped_end(host, ids)
        expected = world.expect(ids, 16, end=end, spliced=own)
        if expected.token_ids != world.expect(ids, 16, end=end).token_ids:
            break
    else:
        raise AssertionError("no prompt shows whether its first tokens are exact")
    (answer,) = host.run([Ask(ids, salt=world.offer(ids, exact=own))])
    require(answer, expected)
    require_status(answer, "applied", spliced=own, mapped=end - own, sink=0, already_exact=0)


def case_requests_mapped_at_once_do_not_mix(host: Host, world: World) -> None:
    prompts = [world.prompt(seed) for seed in (8, 9, 10)]
    answers = host.run([Ask(ids, salt=world.offer(ids)) for ids in prompts])
    streams = [world.expect(ids, 16, end=mapped_end(host, ids)) for ids in prompts]
    assert len({tuple(stream.token_ids) for stream in streams}) == 3
    for answer, expected in zip(answers, streams, strict=True):
        require(answer, expected)
        require_status(answer, "applied")


def case_one_hand_over_asked_for_twice_at_once(host: Host, world: World) -> None:
    ids = world.prompt(11)
    salt = world.offer(ids)
    for answer in host.run([Ask(ids, salt=salt), Ask(ids, salt=salt)]):
        require(answer, world.expect(ids, 16, end=mapped_end(host, ids)))
        require_status(answer, "applied")


def case_a_source_that_has_read_less_is_used_as_far_as_it_goes(host: Host, world: World) -> None:
    size, ids = host.tokens_per_block, world.prompt(12)
    read = ids[: 2 * size + 7]
    (answer,) = host.run([Ask(ids, salt=world.offer(read))])
    require(answer, world.expect(ids, 16, end=2 * size))
    require_status(answer, "applied", matched=2 * size)


def case_a_prompt_the_source_has_not_read_is_computed(host: Host, world: World) -> None:
    ids, other = world.prompt(13), world.prompt(14)
    first_difference = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
    assert first_difference < host.tokens_per_block
    (answer,) = host.run([Ask(ids, salt=world.offer(other))])
    require(answer, world.native(ids, 16))
    require_status(answer, "fallback_reprefill", matched=0, computed=len(ids))


def case_first_tokens_the_sink_table_lacks_are_mapped(host: Host, world: World) -> None:
    ids = [token for token in world.prompt(15) if token != world.prompt(15)[0]]
    ids = ids[1:]
    missed = 4 - world.sink_of(ids)
    assert missed > 0, "this prompt should not start as prompts do"
    (answer,) = host.run([Ask(ids, salt=world.offer(ids))])
    require(answer, world.expect(ids, 16, end=mapped_end(host, ids)))
    require_status(answer, "applied", sink=world.sink_of(ids), sink_missed=missed)


def case_without_its_salt_a_request_is_offered_nothing(host: Host, world: World) -> None:
    ids = world.prompt(16)
    salt = world.offer(ids)
    unsalted, other = host.run([Ask(ids, handoff=salt), Ask(ids, salt="other", handoff=salt)])
    for answer in (unsalted, other):
        require(answer, world.native(ids, 16))
        require_status(answer, "unsupported", matched=0)
    (right,) = host.run([Ask(ids, salt=salt, handoff=salt)])
    require(right, world.expect(ids, 16, end=mapped_end(host, ids)))


def case_an_offer_for_another_map_is_refused(host: Host, world: World) -> None:
    ids = world.prompt(17)
    salt = world.offer(ids, identity=world.identity(kvmap_digest="another"))
    (answer,) = host.run([Ask(ids, salt=salt)])
    require(answer, world.native(ids, 16))
    require_status(answer, "unsupported", matched=0)


def case_a_failed_load_is_computed_and_spoils_no_other(host: Host, world: World) -> None:
    """Also: what was computed instead is exact, and the next turn says so."""
    size, ids, other = host.tokens_per_block, world.prompt(18), world.prompt(19)
    salt, fine = world.offer(ids), world.offer(other)
    world.blocks.broken.add(salt)
    lost, kept = host.run([Ask(ids, salt=salt), Ask(other, salt=fine)])
    native = world.native(ids, 16)
    require(lost, native)
    require_status(lost, "fallback_reprefill", matched=0, mapped=0, computed=len(ids))
    assert "is gone" in lost.status["reason"]
    require(kept, world.expect(other, 16, end=mapped_end(host, other)))
    require_status(kept, "applied")
    turn = ids + native.token_ids + world.prompt(20)[1:20]
    (second,) = host.run([Ask(turn, salt=salt, handoff=salt)])
    require(second, world.go_on(native.cache, turn, 16))
    cached = (len(ids) + 15) // size * size
    require_status(second, "fallback_reprefill", already_exact=cached, already_approximate=0)


def case_a_cancelled_request_leaves_nothing_behind(host: Host, world: World) -> None:
    ids, other = world.prompt(21), world.prompt(22)
    salt, fine = world.offer(ids), world.offer(other)
    _, kept = host.run([Ask(ids, 64, salt=salt, cancel_after=3), Ask(other, salt=fine)])
    require(kept, world.expect(other, 16, end=mapped_end(host, other)))
    assert world.blocks.find(salt) is None, "its source blocks are still held"
    (plain,) = host.run([Ask(ids)])
    require(plain, world.native(ids, 16))
    assert plain.cached == 0


def case_chunked_prefill_loses_nothing(host: Host, world: World) -> None:
    """The source has read a third of the prompt; the target computes the rest in many chunks."""
    size, ids = host.tokens_per_block, world.prompt(23, 300)
    read = ids[: len(ids) // 3]
    end = len(read) // size * size
    mapped, plain = host.run([Ask(ids, salt=world.offer(read)), Ask(ids)])
    require(mapped, world.expect(ids, 16, end=end))
    require(plain, world.native(ids, 16))
    require_status(mapped, "applied", matched=end, computed=len(ids) - end)


def case_preemption_loses_nothing(host: Host, world: World) -> None:
    """The first request grows until it has taken mapped blocks of the second, which are mapped
    again when that one resumes.
    """
    asked = [(world.prompt(24), 7 * host.tokens_per_block), (world.prompt(25), 80)]
    before = host.preemptions()
    answers = host.run([Ask(ids, steps, salt=world.offer(ids)) for ids, steps in asked])
    assert host.preemptions() > before, "the pool was large enough for both: nothing was proven"
    for (ids, steps), answer in zip(asked, answers, strict=True):
        require(answer, world.expect(ids, steps, end=mapped_end(host, ids)))
        require_status(answer, "applied", matched=mapped_end(host, ids))
    assert not world.blocks.salts()


# Kinds of host. ``roomy``: blocks and batch are larger than any case needs. ``narrow``: at most
# 48 tokens are computed in a step, and there are blocks for about two of the prompts.
Case = Callable[[Host, World], None]
NARROW = (case_chunked_prefill_loses_nothing, case_preemption_loses_nothing)
CASES: dict[str, tuple[Case, ...]] = {
    "roomy": tuple(
        value
        for name, value in list(globals().items())
        if name.startswith("case_") and value not in NARROW
    ),
    "narrow": (
        case_a_mapped_request_goes_on_as_the_hf_lane_does,
        case_requests_mapped_at_once_do_not_mix,
        case_a_failed_load_is_computed_and_spoils_no_other,
        *NARROW,
    ),
}


def title(case: Case) -> str:
    return case.__name__.removeprefix("case_")
