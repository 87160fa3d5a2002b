"""Long-context tasks made on the spot, in the spirit of RULER (Hsieh et al. 2024, arXiv
2404.06654), for any tokenizer, of 256 tokens and more.

Sentences that matter are hidden among sentences that do not, and the questions are multiple choice:
the wrong choices stand in the same text wherever the task has several needles, so that knowing
which words belong together is needed and finding a rare word is not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.evaluate.tasks.ruler_words import Wording, wording_for
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode, encode_bare

Write = Callable[[str], tuple[int, ...]]  # text to token ids
CHOICES = 4
NEEDLES, VALUES_PER_KEY, CHAINS = 8, 3, 4
MENTIONS = (6, 3, 2, 1)  # of the words of frequent_words, the right one first


@dataclass(frozen=True, slots=True)
class Asked:
    """One question in words; ``choices[label]`` is right."""

    stem: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True, slots=True)
class Told:
    """The sentences that must stand in the text, in order, and every question about them."""

    sentences: list[str]
    asked: list[Asked]


def niah_single(rng: np.random.Generator, words: Wording) -> Told:
    """One needle; the wrong values stand nowhere."""
    (key,) = words.keys(rng, 1)
    right, *wrong = words.values(rng, CHOICES, [key])
    sentence = words.fact.format(key=key, value=right)
    return Told([sentence], [_ask(rng, words.ask.format(key=key), right, wrong)])


def niah_multikey(rng: np.random.Generator, words: Wording) -> Told:
    """Several keys with a value each; the wrong values are those of other keys."""
    keys = words.keys(rng, NEEDLES)
    values = words.values(rng, NEEDLES, keys)
    facts = [words.fact.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    asked = [
        _ask(rng, words.ask.format(key=key), right, [v for v in values if v != right])
        for key, right in zip(keys, values, strict=True)
    ]
    return Told(facts, asked)


def niah_multivalue(rng: np.random.Generator, words: Wording) -> Told:
    """Keys with several values each, all of which are asked for in the order of the text; a wrong
    choice has one of them from another key.
    """
    keys = words.keys(rng, CHOICES)
    values = words.values(rng, CHOICES * VALUES_PER_KEY, keys)
    pairs = [(keys[i % CHOICES], value) for i, value in enumerate(values)]
    of = {key: [v for k, v in pairs if k == key] for key in keys}
    asked = []
    for key in keys:
        others = [of[other] for other in keys if other != key]
        place = int(rng.integers(VALUES_PER_KEY))
        wrong = [[*of[key][:place], o[place], *of[key][place + 1 :]] for o in others]
        right, *swapped = (words.joined.join(each) for each in (of[key], *wrong))
        asked.append(_ask(rng, words.ask.format(key=key), right, swapped))
    return Told([words.fact.format(key=k, value=v) for k, v in pairs], asked)


def variable_tracking(rng: np.random.Generator, words: Wording) -> Told:
    """Chains in which a key has a value and further keys that of the one before; the wrong values
    end other chains. Chains are told side by side, the fact first.
    """
    drawn = words.keys(rng, CHAINS * words.hops)
    chains = [drawn[i::CHAINS] for i in range(CHAINS)]
    values = words.values(rng, CHAINS, drawn)
    told = [words.fact.format(key=c[0], value=v) for c, v in zip(chains, values, strict=True)]
    for hop in range(1, words.hops):
        told += [words.link.format(key=c[hop], other=c[hop - 1]) for c in chains]
    asked = [
        _ask(rng, words.ask_linked.format(key=c[-1]), right, [v for v in values if v != right])
        for c, right in zip(chains, values, strict=True)
    ]
    return Told(told, asked)


def frequent_words(rng: np.random.Generator, words: Wording) -> Told:
    """Words that are mentioned more or less often; which one is most often?"""
    drawn = words.keys(rng, len(MENTIONS))
    mentioned = [word for word, times in zip(drawn, MENTIONS, strict=True) for _ in range(times)]
    told = [words.seen.format(word=word) for word in rng.permutation(mentioned)]
    return Told(told, [_ask(rng, words.ask_seen, drawn[0], drawn[1:])])


TELLERS: dict[str, Callable[[np.random.Generator, Wording], Told]] = {
    "niah_single": niah_single,
    "niah_multikey": niah_multikey,
    "niah_multivalue": niah_multivalue,
    "variable_tracking": variable_tracking,
    "frequent_words": frequent_words,
}


def ruler_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Items whose contexts have at most ``context_tokens`` tokens and lack less than one sentence
    of it, with at most ``questions`` questions. The first one with its answer is the continuation.

    Raises InputError when the sentences that matter do not fit.
    """
    words, tell = wording_for(tokenizer), TELLERS[config.task]
    # The tiny family's texts write their own <bos>.
    write = partial(encode_bare if words.opening else encode, tokenizer)
    items = []
    for index in range(config.skip, config.skip + config.num_items):
        rng = np.random.default_rng([config.seed, index, list(TELLERS).index(config.task)])
        told = tell(rng, words)
        context = _hidden(rng, told.sentences, words, tokenizer, write, config)
        order = rng.permutation(len(told.asked))[: max(config.questions, 1)]
        questions = tuple(_question(write, context, told.asked[i]) for i in order)
        first = questions[0]
        continuation = first.stem + first.choices[first.label]
        items.append(Item(write(context), questions, continuation))
    return items


def _ask(rng: np.random.Generator, stem: str, right: str, wrong: list[str]) -> Asked:
    chosen = [right, *(str(w) for w in rng.permutation(wrong)[: CHOICES - 1])]
    order = rng.permutation(len(chosen))
    return Asked(stem, tuple(chosen[i] for i in order), int(np.flatnonzero(order == 0)[0]))


def _hidden(
    rng: np.random.Generator,
    sentences: list[str],
    words: Wording,
    tokenizer: Tokenizer,
    write: Write,
    config: TaskConfig,
) -> str:
    """``sentences`` in their order at random places between fillers."""
    limit = config.context_tokens

    def length(fillers: list[str]) -> int:
        return len(write(_woven(places, sentences, fillers, words.opening)))

    places = np.sort(rng.random(len(sentences)))
    fillers: list[str] = []
    used = length(fillers)
    if used > limit:
        raise InputError(
            f"The sentences that matter in {config.task} take {used} tokens; context_tokens "
            f"{limit} leaves no room for them. Give more."
        )
    while used < limit:
        fillers.append(words.filler(rng))
        used += len(encode_bare(tokenizer, " " + fillers[-1]))
    while fillers and length(fillers) > limit:
        fillers.pop()
    return _woven(places, sentences, fillers, words.opening)


def _woven(places: np.ndarray, sentences: list[str], fillers: list[str], opening: str) -> str:
    """Each sentence after its share of the fillers, the last filler behind all of them."""
    before = (places * len(fillers)).astype(int).tolist()
    woven = [opening] if opening else []
    at = 0
    for stop, sentence in zip(before, sentences, strict=True):
        woven += [*fillers[at:stop], sentence]
        at = stop
    return " ".join([*woven, *fillers[at:]])


def _question(write: Write, context: str, asked: Asked) -> Question:
    whole = f"{context} {asked.stem}"
    start, stop = len(write(context)), len(write(whole))
    return Question(
        stem=write(whole)[start:],
        choices=tuple(write(f"{whole} {choice}")[stop:] for choice in asked.choices),
        label=asked.label,
    )
