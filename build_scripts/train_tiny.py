"""Trains one member of the tiny family from nothing but a seed (trtllm_kvmap/tiny/README.md is its
model card).

    python build_scripts/train_tiny.py tiny-m --out trtllm_kvmap/tiny/tiny-m

One thread, float32, and steps rather than minutes, so that one machine trains one model from one
seed. What mattered: recall appears within minutes when the first stage is nothing but repeated
pairs (every second word of the later passes is an answer), with matrices trained by Muon and
initialised at width ** -0.5; longer documents and more steps come only when accuracy has been
reached, never by the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trtllm_kvmap.tiny.documents import (
    FACT_TOKENS,
    NAMES,
    STEP_WORDS,
    TOKEN_ID,
    VOCABULARY,
    sentences,
    stem_words,
)

PAD, BOS = TOKEN_ID["<pad>"], TOKEN_ID["<bos>"]
MUON_RATE, ADAM_RATE, WARM_UP, BACKGROUND_WEIGHT = 0.02, 3e-3, 100, 0.02
FACTS_ONLY = 0.5  # the share of batches in which questions see complete facts alone


@dataclass(frozen=True)
class Shape:
    """One member: its size, its seed (initialisation and data order) and how long it trains."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    seed: int
    steps: int
    leader: int  # the number of steps (1 or 2) whose accuracy lets the curriculum advance


FAMILY = {
    "tiny-s": Shape(3, 96, 4, 2, 32, 192, seed=11, steps=2600, leader=1),
    "tiny-m": Shape(5, 128, 4, 2, 32, 256, seed=22, steps=2800, leader=2),
    "tiny-x": Shape(5, 128, 3, 1, 64, 256, seed=33, steps=2800, leader=2),
}


@dataclass(frozen=True)
class Stage:
    """Documents of at most ``tokens`` tokens (0: repeated pairs), about min..max people, ``steps``
    asked.
    """

    tokens: int
    min_facts: int
    max_facts: int
    steps: int
    batch: int
    passing: float


STAGES = (
    Stage(0, 4, 8, 1, 32, 0.95),
    Stage(40, 4, 6, 1, 32, 0.93),
    Stage(56, 4, 8, 2, 32, 0.85),
    Stage(128, 6, 16, 2, 20, 0.85),
    Stage(256, 8, 24, 2, 10, 0.85),
    Stage(512, 8, 24, 2, 5, 0.85),
    Stage(1024, 8, 24, 2, 3, 2.0),
)


class Row:
    """One training sequence, written left to right.

    ``ids`` are its tokens; ``answers`` maps the position of an answer to the steps asked; ``told``
    are the positions where a fact is complete (its second name); ``asking`` maps the positions of a
    question's own words to its number.
    """

    def __init__(self) -> None:
        self.ids, self.told = [BOS], [0]
        self.answers: dict[int, int] = {}
        self.asking: dict[int, int] = {}
        self._asked = 0

    def tell(self, words: Sequence[str]) -> None:
        """Words of a document; the last one completes a fact."""
        self.ids += [TOKEN_ID[word] for word in words]
        self.told.append(len(self.ids) - 1)

    def fill(self, words: Sequence[str]) -> None:
        self.ids += [TOKEN_ID[word] for word in words]

    def ask(self, stem: Sequence[str], answer: str, steps: int, *, tell: bool = False) -> None:
        """A question and its answer; with ``tell`` the answer states the fact once more."""
        self._asked += 1
        for word in stem:
            self.asking[len(self.ids)] = self._asked
            self.ids.append(TOKEN_ID[word])
        self.answers[len(self.ids)] = steps
        if tell:
            self.told.append(len(self.ids))
        self.ids.append(TOKEN_ID[answer])


def repeated_pairs(rng: np.random.Generator, stage: Stage) -> Row:
    """``anna ben carl dora ...`` several times over in new orders; asked after the first pass."""
    facts = int(rng.integers(stage.min_facts, stage.max_facts + 1))
    names = [NAMES[i] for i in rng.permutation(len(NAMES))[: 2 * facts]]
    row = Row()
    for turn in range(max(2, 48 // facts)):
        for i in rng.permutation(facts):
            first, second = names[2 * i : 2 * i + 2]
            if turn:
                row.ask([first], second, 1, tell=True)
            else:
                row.tell([first, second])
    return row


def asked_document(rng: np.random.Generator, stage: Stage) -> Row:
    """A document and questions after it, none twice."""
    facts = int(rng.integers(stage.min_facts, stage.max_facts + 1))
    least = FACT_TOKENS * facts
    tokens = int(rng.integers(least, max(stage.tokens, least) + 1))
    ring = [str(name) for name in rng.permutation(NAMES)[:facts]]
    row = Row()
    for sentence in sentences(rng, ring, tokens):
        if sentence[0] == "again":
            row.ask(sentence[:-1], sentence[-1], 1, tell=True)
        elif sentence[0] == "after":
            row.tell(sentence)
        else:
            row.fill(sentence)
    asked = [(start, steps) for start in range(facts) for steps in range(1, stage.steps + 1)]
    for index in rng.permutation(len(asked))[: max(12, stage.tokens // 16)]:
        start, steps = asked[index]
        row.ask(stem_words(ring[start], steps), ring[(start + steps) % facts], steps)
    return row


@dataclass(frozen=True)
class Batch:
    """ids [batch, longest], steps (the steps asked at each answer, else 0), and an additive
    attention mask [batch, 1, longest - 1, longest - 1], or None for plain causal attention.
    """

    ids: torch.Tensor
    steps: torch.Tensor
    mask: torch.Tensor | None


def batch_of(rng: np.random.Generator, stage: Stage) -> Batch:
    make = asked_document if stage.tokens else repeated_pairs
    rows = [make(rng, stage) for _ in range(stage.batch)]
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((stage.batch, longest), PAD)
    steps = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        for position, asked in row.answers.items():
            steps[number, position] = asked
    mask = facts_only(rows, longest - 1) if rng.random() < FACTS_ONLY else None
    return Batch(ids, steps, mask)


def facts_only(rows: Sequence[Row], length: int) -> torch.Tensor:
    """Let the words of a question see nothing but complete facts and the question itself.

    Without this a model keeps a fact at any token after it, each model at another, and no map from
    token to token can join the two; in half of the batches it has to be where the fact ends.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    for number, row in enumerate(rows):
        told = torch.zeros(length, dtype=torch.bool)
        told[[position for position in row.told if position < length]] = True
        question = torch.zeros(length, dtype=torch.long)
        for position, asked in row.asking.items():
            if position < length:
                question[position] = asked
        own = question[:, None] == question[None, :]
        seen[number] &= (question == 0)[:, None] | told[None, :] | own
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def new_model(shape: Shape) -> Qwen3ForCausalLM:
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=4096,
        initializer_range=shape.width**-0.5,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config)


def optimizers(model: Qwen3ForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for embeddings, head and norms; each with its
    rate.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or ".layers." not in n]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, MUON_RATE), (adam, ADAM_RATE)]


def rate_scale(step: int, total: int) -> float:
    """Linear warm-up, a plateau, and a linear decay to nothing over the last 30 %."""
    return min(1.0, (step + 1) / WARM_UP, (total - step) / (0.3 * total))


def losses(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted loss (answers count 1, other words little) and which answers were right [batch,
    length - 1].
    """
    logits = model(batch.ids[:, :-1], attention_mask=batch.mask, use_cache=False).logits
    wanted, asked = batch.ids[:, 1:], batch.steps[:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), reduction="none"
    )
    weight = (asked > 0).float() + BACKGROUND_WEIGHT * (wanted != PAD).float()
    loss = (each.view(wanted.shape) * weight).sum() / weight.sum()
    return loss, logits.argmax(-1) == wanted


class Curriculum:
    """Which stage to draw from, and when accuracy allows the next one."""

    def __init__(self, leader: int) -> None:
        self.stage, self.entered, self.leader = 0, 0, leader
        self.accuracy = dict.fromkeys(range(1, len(STEP_WORDS) + 1), 0.0)

    def draw(self, rng: np.random.Generator) -> int:
        """Mostly the current stage, sometimes an earlier one, so that nothing is forgotten."""
        return self.stage if rng.random() < 0.8 else int(rng.integers(0, self.stage + 1))

    def update(self, drawn: int, step: int, right: torch.Tensor, asked: torch.Tensor) -> None:
        if drawn != self.stage:
            return
        for steps in self.accuracy:
            hits = right[asked == steps]
            if hits.numel():
                self.accuracy[steps] += 0.03 * (hits.float().mean().item() - self.accuracy[steps])
        leading = self.accuracy[min(self.leader, STAGES[self.stage].steps)]
        if step - self.entered > 60 and leading > STAGES[self.stage].passing:
            self.stage, self.entered = self.stage + 1, step


def train(shape: Shape, log: Path) -> Qwen3ForCausalLM:
    """Train one member; ``log`` receives one JSON line every hundred steps."""
    rng, model = np.random.default_rng(shape.seed), new_model(shape)
    chosen, curriculum, started, tokens = (
        optimizers(model),
        Curriculum(shape.leader),
        time.monotonic(),
        0,
    )
    with log.open("w") as lines:
        for step in range(shape.steps):
            drawn = curriculum.draw(rng)
            batch = batch_of(rng, STAGES[drawn])
            loss, right = losses(model, batch)
            for optimizer, rate in chosen:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = rate * rate_scale(step, shape.steps)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in chosen:
                optimizer.step()
            curriculum.update(drawn, step, right, batch.steps[:, 1:])
            tokens += batch.ids.numel()
            if step % 100 == 99:
                line = {
                    "step": step + 1,
                    "stage": curriculum.stage,
                    "tokens": tokens,
                    "seconds": round(time.monotonic() - started),
                    "loss": round(loss.item(), 3),
                    "accuracy": {k: round(v, 3) for k, v in curriculum.accuracy.items()},
                }
                print(json.dumps(line), file=lines, flush=True)
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; words are separated by spaces."""
    words = Tokenizer(models.WordLevel(TOKEN_ID))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a folder that transformers 4.57 reads as well as 5.x."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    amend(folder / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    for file in folder.iterdir():
        file.chmod(0o644)


def amend(path: Path, **entries: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **entries})


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("member", choices=sorted(FAMILY))
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    shape = FAMILY[options.member]
    model = train(shape, options.out / "training.jsonl")
    save(model, options.out)
    write_json(options.out / "training.json", asdict(shape))


if __name__ == "__main__":
    main()
