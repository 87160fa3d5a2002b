"""Which items to read. The fields are flags of every verb that reads items."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_kvmap.errors import InputError

# What named.py has a reader of.
NAMES = (
    *("tiny", "text", "prompts", "hellaswag", "piqa", "arc", "winogrande", "mmlu", "coqa"),
    *("niah_single", "niah_multikey", "niah_multivalue", "variable_tracking", "frequent_words"),
)


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Which items to read. Equal configurations give equal items; different ``skip`` (or seeds of
    a generated task) give different ones.
    """

    task: str = field(
        default="tiny",
        metadata={"help": f"which items: {', '.join(NAMES[:-1])} or {NAMES[-1]} (docs/tasks.md)"},
    )
    data: str = field(
        default="",
        metadata={
            "help": "the task's file, or MMLU's folder; none for tiny and what is generated "
            "(niah_*, variable_tracking, frequent_words)"
        },
    )
    num_items: int = field(default=60, metadata={"help": "how many items to read"})
    skip: int = field(default=0, metadata={"help": "how many items of the task to pass over first"})
    context_tokens: int = field(
        default=1024,
        metadata={"help": "longest context of tiny, every context of text and generated tasks"},
    )
    scored_tokens: int = field(
        default=40, metadata={"help": "length of the scored continuation of tiny, text and prompts"}
    )
    questions: int = field(
        default=6, metadata={"help": "questions per document of tiny and generated tasks"}
    )
    seed: int = field(
        default=0, metadata={"help": "draws the documents of tiny and generated tasks"}
    )

    def __post_init__(self) -> None:
        if self.task not in NAMES:
            raise InputError(f"The task {self.task!r} is not known; known are {', '.join(NAMES)}.")
        for name in ("num_items", "context_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("skip", "scored_tokens", "questions", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}.")
