"""`--model kvmap` for lm-evaluation-harness, which must be installed beside this package.

    python -m trtllm_kvmap.evaluate.lm_eval_adapter --model kvmap --tasks hellaswag,piqa \\
        --model_args kvmap=p.kvmap.safetensors,source=SMALL,target=LARGE,arm=mapped

Run it three times, with arm mapped, source and target: the mapped figure alone says nothing. Every
request's context is handed over and its continuation is scored by the arm; contexts shorter than
first_tokens + repair_window are computed by the target whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.evaluate.likelihood import Arm, ArmReader
from trtllm_kvmap.models import load_model

MAX_NEW_TOKENS = 256  # where a task does not say
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("kvmap")
class KvMapLM(LM):  # type: ignore[misc]  # untyped where the harness is not installed
    """One arm as a harness's model. ``kvmap`` is a file, ``source`` and ``target`` folders or hub
    ids. Requests are run one by one, so ``batch_size`` and ``max_batch_size`` change nothing. A
    CUDA ``device`` that is not there means the CPU, because the harness asks for one unasked.
    """

    def __init__(
        self,
        kvmap: str,
        source: str,
        target: str,
        arm: Arm = "mapped",
        first_tokens: int = 1,
        repair_window: int = 32,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        models = [load_model(name, device=_present(device)) for name in (source, target)]
        loaded = KvMap.load(kvmap, allow_unproven=True)
        bridge = KvBridge(loaded, source=models[0], target=models[1])
        self.reader = ArmReader(
            bridge,
            models[0],
            arm=arm,
            first_tokens=int(first_tokens),
            repair_window=int(repair_window),
        )

    @property
    def tokenizer_name(self) -> str:
        return self.reader.model.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        tokenizer: Any = self.reader.model.tokenizer
        return str(
            tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """One (sum of log-probabilities, is greedy) for each request's (context, continuation)."""
        answers = []
        for context, continuation in (request.args for request in requests):
            answer = self.reader.log_likelihood(*self._pair(context, continuation))
            self.cache_hook.add_partial("loglikelihood", (context, continuation), answer)
            answers.append(answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Raises UnavailableError: a rolling loss has no context that could be handed over."""
        raise UnavailableError(
            "A task of rolling perplexity hands no context over, so no map can be judged by it; "
            "use `trtllm-kvmap evaluate --task text`, which scores what follows a mapped context."
        )

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The greedy text for each request's (context, settings), up to a stop string. Raises
        InputError for a request to sample.
        """
        answers = []
        for context, settings in (request.args for request in requests):
            if settings.get("do_sample"):
                raise InputError("The arms of a map are compared greedily; set do_sample=False.")
            stops = settings.get("until") or []
            given = [settings[name] for name in LENGTHS if settings.get(name) is not None]
            answer = self.reader.continue_greedily(
                self._ids(context) or [self._prefix()],
                int(given[0]) if given else MAX_NEW_TOKENS,
                [stops] if isinstance(stops, str) else stops,
                [] if self._eos() is None else [self._eos()],
            )
            self.cache_hook.add_partial("generate_until", (context, settings), answer)
            answers.append(answer)
        return answers

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, cut where the harness cuts: spaces that end the context belong to the
        continuation, and the tokens of the whole beyond the context's are the continuation's.
        """
        if not context.strip():
            return [self._prefix()], self._ids(context + continuation, add_special_tokens=False)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._ids(stripped)
        return before, self._ids(stripped + continuation)[len(before) :]

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.reader.model.tokenise(text, add_special_tokens=add_special_tokens)

    def _eos(self) -> Any:
        return getattr(self.reader.model.tokenizer, "eos_token_id", None)

    def _prefix(self) -> int:
        """What stands before a text without a context: the begin token, else the end token."""
        begin = getattr(self.reader.model.tokenizer, "bos_token_id", None)
        prefix = self._eos() if begin is None else begin
        if prefix is None:
            raise InputError(
                f"{self.reader.model.name} has neither a begin nor an end token, so it cannot "
                f"score a text without a context."
            )
        return int(prefix)


def _present(device: str | None) -> str:
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return "cpu"
    return device


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
