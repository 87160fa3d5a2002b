"""One request from its JSON to its answer, whatever carries tensors between the two models."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trtllm_kvmap.decode.guard.signals import judged_tokens
from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.models import tokenise
from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.policy import Policy, source_reads
from trtllm_kvmap.serve.request import CompletionRequest, parse_request
from trtllm_kvmap.serve.source import Owner
from trtllm_kvmap.serve.target import Event, Job
from trtllm_kvmap.spec.plan import plan_handoff

DEFAULT_MAX_TOKENS = 128
# More than any text needs, escapes of JSON included; reading without a bound would be free to ask.
CHARACTERS_PER_POSITION = 64
Read = TypeVar("Read")  # what the source hands to the target: tensors of whatever host this is


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How prompts are handed over. ``max_positions`` is the target's limit, ``mapper_id`` the name
    of the map. ``guarded``: the map carries a guard, which weighs the source's losses of the
    repaired tokens, so the source reads those too. ``streams``: an answer may come in pieces.
    """

    name: str
    max_positions: int
    mapper_id: str
    first_tokens: int = 1
    repair_window: int = 32
    guarded: bool = False
    streams: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """``body`` is what the client gets; ``last`` the event with the counts, on the last of them."""

    body: dict[str, Any]
    last: Event | None = None


class Pipeline(Generic[Read]):
    """Validates, tokenises, lets the source read and the target answer.

    ``read(token_ids, owner, judged)`` asks the source and may raise anything, as may ``policy``:
    then the target reads the prompt itself. ``answer(token_ids, job, read)`` asks the target; what
    it raises ends the request.
    """

    def __init__(
        self,
        config: PipelineConfig,
        tokenizer: Any,
        *,
        read: Callable[[list[int], Owner, int], Read],
        answer: Callable[[list[int], Job, Read | None], Iterator[Event]],
        policy: Policy = source_reads,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._read, self._answer, self._policy = read, answer, policy

    def respond(self, body: str | bytes, parameters: Mapping[str, Any]) -> Iterator[Answered]:
        """The response objects of one request: many when it streams, else one.

        Raises InputError before the first of them for a request that cannot be carried out.
        """
        longest = CHARACTERS_PER_POSITION * self.config.max_positions
        if len(body) > longest:
            raise InputError(
                f"The request has {len(body)} characters; at most {longest} are read, "
                f"{CHARACTERS_PER_POSITION} for each position of the target. Shorten the prompt."
            )
        request = parse_request(body, parameters)
        if request.stream and not self.config.streams:
            raise InputError(
                f"{self.config.name} gives whole answers: `stream` must be false. Ask the "
                f"pipeline's generate_stream for pieces."
            )
        token_ids = self._token_ids(request)
        plan = plan_handoff(
            len(token_ids),
            first_tokens=self.config.first_tokens,
            repair_window=self.config.repair_window,
        )
        read = None
        outcome = self._refusal(request)
        if outcome is None:
            try:
                outcome = self._policy(request, token_ids, plan)
                if outcome is None:
                    judged = len(judged_tokens(plan)) if self.config.guarded else 0
                    end = plan.num_tokens if judged else plan.mapped.stop
                    owner = request.tenant, request.conversation
                    read = self._read(token_ids[:end], owner, judged)
            except Exception as error:
                # Nothing about the answer depends on the source.
                outcome = Outcome("fallback_reprefill", "source_failed", str(error))
        job = Job(
            max_tokens=request.max_tokens
            or min(DEFAULT_MAX_TOKENS, self.config.max_positions - len(token_ids)),
            stop=request.stop,
            stream=request.stream,
            first_tokens=self.config.first_tokens,
            repair_window=self.config.repair_window,
            outcome=outcome,
            counted_as=_counted_as(request),
        )
        head = self._head(request)
        for event in self._answer(token_ids, job, read):
            last = event if event.finish_reason else None
            yield Answered({**head, **_choice(request, event), **_facts(event)}, last)

    def _token_ids(self, request: CompletionRequest) -> list[int]:
        if request.prompt is not None:
            ids = tokenise(self.tokenizer, self.config.name, request.prompt)
        else:
            ids = tokenise(
                self.tokenizer, self.config.name, self._chat(request), add_special_tokens=False
            )
        if not ids:
            raise InputError("The prompt has no token; give some text.")
        room = self.config.max_positions - len(ids)
        if room < (request.max_tokens or 1):
            raise InputError(
                f"The prompt has {len(ids)} tokens and {request.max_tokens or 1} more are asked "
                f"for; the target allows {self.config.max_positions} in all. Shorten the prompt or "
                f"ask for fewer."
            )
        return ids

    def _chat(self, request: CompletionRequest) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("The target has no chat template; give `prompt` instead.")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(request.messages or ()), add_generation_prompt=True, tokenize=False
                )
            )
        except Exception as error:  # a template raises whatever its author chose
            raise InputError(f"The chat template refuses these messages: {error}.") from error

    def _refusal(self, request: CompletionRequest) -> Outcome | None:
        if request.mapper_id and request.mapper_id != self.config.mapper_id:
            return Outcome(
                "unsupported",
                "other_mapper",
                f"the map {request.mapper_id!r} was asked for, {self.config.mapper_id!r} is served",
            )
        return None

    def _head(self, request: CompletionRequest) -> dict[str, Any]:
        chat = request.prompt is None
        whole = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if chat and request.stream else whole,
            "created": int(time.time()),
            "model": self.config.name,
        }


def _counted_as(request: CompletionRequest) -> str | None:
    if not request.consent:
        return None
    # Two tenants may give conversations the same name.
    return json.dumps([request.tenant, request.conversation]) if request.conversation else ""


def _choice(request: CompletionRequest, event: Event) -> dict[str, Any]:
    said: dict[str, Any]
    if request.prompt is not None:
        said = {"text": event.text}
    elif request.stream:
        said = {"delta": {"role": "assistant", "content": event.text}}
    else:
        said = {"message": {"role": "assistant", "content": event.text}}
    return {"choices": [{"index": 0, **said, "finish_reason": event.finish_reason}]}


def _facts(event: Event) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kv_status": event.outcome.status,
        "kv_reason": event.outcome.kv_reason,
    }
    if event.finish_reason:
        tokens = event.tokens
        facts["usage"] = {
            "prompt_tokens": tokens["prompt"],
            "completion_tokens": tokens["completion"],
            "total_tokens": tokens["prompt"] + tokens["completion"],
            "mapped_tokens": tokens["mapped"],
            "repaired_tokens": tokens["repaired"],
        }
        facts["kv_milliseconds"] = {k: round(v, 3) for k, v in event.milliseconds.items()}
        facts["kv_bytes_moved"] = event.bytes_moved
    return facts


def error_sentence(error: Exception) -> str:
    """What a client is told: our own sentences as they are, anything else by its kind alone."""
    if isinstance(error, KvMapError):
        return str(error)
    return f"The server failed on this request ({type(error).__name__}); its log says more."
