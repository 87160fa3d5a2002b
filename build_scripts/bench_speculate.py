"""What speculation after a hand-over gains over the target alone (run it through bench.py).

The source has read a document of the tiny family and drafts on that cache; the target verifies on
the mapped one. Arms take turns in one run, and figures are medians over the turns of tokens per
second, ours over the other's: above 1 is faster.

- ``adaptive``: ours, with the confidence stop at the measured cost of a draft step.
- ``plain``: the target alone, generate(), from the same mapped cache.
- ``fixed``: speculation with blocks of one length, and no confidence stop.
- ``assisted``: transformers' own assisted generation, as it comes, from the same mapped cache. It
  cannot take the draft's cache and lets the draft read the prompt again; the time of a run that
  generates one token is taken off, so that decoding alone is compared.

Two verifiers: tiny-m, hardly slower than its draft, and tiny-m with seven layers inserted behind
each of its own whose outputs are zero: the same tokens, at eight times the layers. Its map is that
of tiny-m, with every layer's part said again for the inserted ones. Temperature 0 and 1.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import Speculation, speculate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel, load_model, spec_from_config
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document, mostly_facts

FIXED = (4, 8, 16, 24)
REPEATS = 8  # of every layer of the slow verifier
DOCUMENTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 3, 512, 64, 2
CALIBRATION_DOCUMENTS = 120
FIRST_TOKENS, REPAIR_WINDOW = 4, 32
SEED = 4  # of documents that no other part of the demo has seen


Arm = Callable[["Prompt", torch.Generator], object]


@dataclass(frozen=True)
class Prompt:
    """A document, the draft's cache of it, and the hand-over of it."""

    token_ids: list[int]
    draft_cache: HfCache
    handoff: Handoff


def bench_speculate() -> dict[str, object]:
    """The figures of `bench.py speculate`, see the module; each by pair and temperature."""
    draft, verifier = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    kvmap = fitted_map(draft, verifier)
    slow = deepened(verifier)
    figures: dict[str, dict[str, object]] = {}
    for name, target, its_map in (
        ("tiny-s to tiny-m", verifier, kvmap),
        (f"tiny-s to tiny-m of {REPEATS}x layers", slow, repeated(kvmap, slow)),
    ):
        bridge = KvBridge(its_map, source=draft, target=target)
        prompts = [handed_over(bridge, item) for item in range(DOCUMENTS)]
        for temperature in (0.0, 1.0):
            case = f"{name}, temperature {temperature:g}"
            for key, value in measured(draft, target, prompts, temperature).items():
                figures.setdefault(key, {})[case] = value
    return {**figures, "rounds": ROUNDS * DOCUMENTS, "threads": torch.get_num_threads()}


def measured(
    draft: LoadedModel, verifier: LoadedModel, prompts: list[Prompt], temperature: float
) -> dict[str, object]:
    """Every figure of one pair at one temperature."""
    cost = median(step_ratio(draft, verifier, prompt) for prompt in prompts)
    turns: list[dict[str, float]] = []  # seconds by arm
    drafted: list[Speculation] = []
    equal = []
    for turn in range(ROUNDS + 1):  # the first only warms up
        for prompt in prompts:
            seconds, made = {}, {}
            for name, arm in arms(draft, verifier, temperature, cost).items():
                generator = torch.Generator().manual_seed(turn)
                start = time.perf_counter()
                made[name] = arm(prompt, generator)
                seconds[name] = time.perf_counter() - start
            if turn:
                seconds["assisted"] -= seconds["assisted, one token"]
                turns.append(seconds)
                drafted.append(made["adaptive"])
                equal.append(made["adaptive"].rows[0] == made["plain"])

    def over(arm: str) -> float:
        return median(turn[arm] / turn["adaptive"] for turn in turns)

    proposed = sum(result.proposed for result in drafted)
    figures: dict[str, object] = {
        "acceptance_rate": sum(result.accepted for result in drafted) / max(proposed, 1),
        "acceptance_length": mean(result.acceptance_length for result in drafted),
        "tokens_per_verifier_step": mean(result.tokens_per_verifier_step for result in drafted),
        "proposed_per_verifier_step": proposed / sum(result.row_steps for result in drafted),
        "ratio_to_plain": over("plain"),
        "ratio_to_fixed": {str(length): round(over(str(length)), 3) for length in FIXED},
        "ratio_to_assisted": over("assisted"),
        "draft_step_to_verifier_step": cost,
    }
    if temperature == 0:
        figures["streams_equal_to_plain"] = f"{sum(equal)} of {len(equal)}"
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}


def arms(
    draft: LoadedModel, verifier: LoadedModel, temperature: float, cost: float
) -> dict[str, Arm]:
    """What takes turns, by name; see the module."""

    def plain(prompt: Prompt, generator: torch.Generator) -> list[int]:
        return generate(
            verifier,
            fork(prompt.handoff.cache),
            prompt.handoff.logits,
            NEW_TOKENS,
            temperature=temperature,
            generator=generator,
        )

    def drafting(policy: DraftLength) -> Arm:
        return lambda prompt, generator: speculate(
            draft,
            verifier,
            prompt.draft_cache,
            prompt.handoff.cache,
            prompt.handoff.logits,
            NEW_TOKENS,
            temperature=temperature,
            generator=generator,
            draft_length=policy,
        )

    def assisting(count: int) -> Arm:
        return lambda prompt, _: assisted(draft, verifier, prompt, count, temperature)

    return {
        "plain": plain,
        "adaptive": drafting(DraftLength(confidence=min(cost, 1.0))),
        **{str(length): drafting(DraftLength(length, length, 0.0)) for length in FIXED},
        "assisted, one token": assisting(1),
        "assisted": assisting(NEW_TOKENS),
    }


def assisted(
    draft: LoadedModel, verifier: LoadedModel, prompt: Prompt, count: int, temperature: float
) -> object:
    """transformers' assisted generation, its defaults, from the mapped cache."""
    ids = torch.tensor([prompt.token_ids])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    return verifier.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft.model,
        max_new_tokens=count,
        **{verifier.cache_argument: fork(prompt.handoff.cache, len(prompt.token_ids) - 1)},
        **({"do_sample": False} | sampling),
    )


def step_ratio(draft: LoadedModel, verifier: LoadedModel, prompt: Prompt) -> float:
    """The time in which the draft decodes a token over the verifier's."""
    seconds = []
    for loaded, cache in ((draft, prompt.draft_cache), (verifier, prompt.handoff.cache)):
        logits = torch.zeros(loaded.spec.vocab_size)
        start = time.perf_counter()
        generate(loaded, fork(cache), logits, NEW_TOKENS)
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


def handed_over(bridge: KvBridge, item: int) -> Prompt:
    rng = np.random.default_rng((SEED, item))
    ids = bridge.source.tokenise(make_document(rng, PROMPT_TOKENS, 16, 0).text)
    read = prefill(bridge.source, ids, logits_to_keep=1)
    plan = plan_handoff(len(ids), first_tokens=FIRST_TOKENS, repair_window=REPAIR_WINDOW)
    return Prompt(ids, read.cache, bridge.hand_over(read.cache, ids, plan))


def fitted_map(source: LoadedModel, target: LoadedModel) -> KvMap:
    with TemporaryDirectory() as folder:
        moments = calibrate(
            source,
            target,
            [target.tokenise(text) for text in mostly_facts(seed=1, count=CALIBRATION_DOCUMENTS)],
            CalibrationConfig(),
            Path(folder) / "pair.moments.safetensors",
        )
        return replace(fit(moments, FitConfig(n=6)), sinks=())


def deepened(loaded: LoadedModel, repeats: int = REPEATS) -> LoadedModel:
    """``loaded`` with ``repeats - 1`` copies behind each layer that add nothing: their two output
    matrices are zero. It says the same, ``repeats`` times as slowly.
    """
    config = copy.deepcopy(loaded.model.config)
    config.num_hidden_layers *= repeats
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = type(loaded.model)(config).eval()
    own = loaded.model.state_dict()
    weights = {}
    for name in model.state_dict():
        parts = name.split(".")
        silent = False
        if "layers" in parts:
            index = parts.index("layers") + 1
            layer, copied = divmod(int(parts[index]), repeats)
            parts[index] = str(layer)
            silent = copied > 0 and parts[-2] in ("o_proj", "down_proj")
        weight = own[".".join(parts)]
        weights[name] = torch.zeros_like(weight) if silent else weight
    model.load_state_dict(weights)
    name = f"{loaded.name} x {repeats}"
    return LoadedModel(name, model, loaded.tokenizer, spec_from_config(config, name))


def repeated(kvmap: KvMap, target: LoadedModel, repeats: int = REPEATS) -> KvMap:
    """``kvmap`` for the deepened target. What an inserted layer holds reaches nothing."""
    groups = [
        replace(group, layer=group.layer * repeats + copied)
        for group in kvmap.groups
        for copied in range(repeats)
    ]
    return replace(
        kvmap, target=target.spec, target_fingerprint=target.fingerprint, groups=tuple(groups)
    )
