"""What a harness asks of a model (how likely is this continuation, how does this go on), answered
by one arm: the mapped target, or one of the two models alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import require_room
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.reading import read_context
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

Arm = Literal["mapped", "source", "target"]
STRIDE = 16  # tokens generated between two looks for a stop string


class ArmReader:
    """Reads contexts by one arm. The last context is kept, because a harness asks for the choices
    of one question one after another.
    """

    def __init__(
        self,
        bridge: KvBridge,
        source: LoadedModel,
        *,
        arm: Arm = "mapped",
        first_tokens: int = 1,
        repair_window: int = 32,
    ) -> None:
        if arm not in get_args(Arm):
            raise InputError(f"arm must be one of {', '.join(get_args(Arm))}; got {arm!r}.")
        self.bridge, self.source, self.arm = bridge, source, arm
        self.first_tokens, self.repair_window = first_tokens, repair_window
        self.model = source if arm == "source" else bridge.target
        self._last: tuple[tuple[int, ...], Ready] | None = None

    def read(self, context: Sequence[int]) -> Ready:
        """The arm's model, ready to go on after ``context`` (at least one token id)."""
        ids = tuple(context)
        if self._last is None or self._last[0] != ids:
            self._last = ids, self._read(ids)
        return self._last[1]

    def log_likelihood(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[float, bool]:
        """Nats of ``continuation`` after ``context``, summed, and whether every token of it is the
        likeliest. Raises InputError for an empty one, or one that the model has no room for.
        """
        if not context or not continuation:
            raise InputError("A context and a continuation need at least one token each.")
        require_room(self.model, len(context) + len(continuation))
        ready = self.read(context)
        logits = ready.logits.reshape(1, -1)
        if len(continuation) > 1:
            read = prefill(self.model, list(continuation[:-1]), fork(ready.cache))
            logits = torch.cat([logits, read.logits])
        chosen = torch.tensor(list(continuation), device=logits.device)
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        total = log_probs.gather(-1, chosen[:, None]).sum()
        return float(total), bool((logits.argmax(-1) == chosen).all())

    def continue_greedily(
        self,
        context: Sequence[int],
        max_new_tokens: int,
        stops: Collection[str],
        eos_token_ids: Collection[int],
    ) -> str:
        """Greedy text after ``context``, up to the first of ``stops`` or the first end token."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InputError(f"{self.model.name} has no tokenizer, so it cannot write text.")
        ready = self.read(context)
        cache, logits = fork(ready.cache), ready.logits
        said: list[int] = []
        while True:
            count = min(STRIDE, max_new_tokens - len(said))
            said += generate(self.model, cache, logits, count, eos_token_ids=eos_token_ids)
            ended = said[-1] in eos_token_ids
            text = str(tokenizer.decode(said[:-1] if ended else said))
            found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
            if found or ended or len(said) == max_new_tokens:
                return text[: min(found, default=len(text))]
            logits = prefill(self.model, said[-1:], cache, logits_to_keep=1).logits[-1]

    def _read(self, ids: tuple[int, ...]) -> Ready:
        if self.arm != "mapped":
            return read_context(self.model, ids)
        plan = plan_handoff(
            len(ids), first_tokens=self.first_tokens, repair_window=self.repair_window
        )
        read = read_context(self.source, ids)
        handed = self.bridge.hand_over(read.cache, torch.tensor(ids), plan)
        return Ready(self.model, handed.cache, handed.logits, len(ids), plan.mapped)
