"""Every task by name, and the items that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.choice import READERS, choice_items
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.conversations import coqa_items
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.prompts import prompts_items
from trtllm_kvmap.evaluate.tasks.ruler import TELLERS, ruler_items
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode, list_folder, read_text
from trtllm_kvmap.evaluate.tasks.tiny import tiny_items

__all__ = ["TASKS", "TaskConfig", "named_task", "read_items"]


def read_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """The items that ``config`` names, in order. Raises InputError for a file that is not what the
    task reads, or fewer items than asked for.
    """
    if tokenizer is None:
        raise InputError(f"The task {config.task!r} is text, and the model has no tokenizer.")
    items = TASKS[config.task](config, tokenizer)
    if len(items) < config.num_items:
        raise InputError(
            f"{config.data} holds {len(items)} items of the task {config.task!r} after the first "
            f"{config.skip}; {config.num_items} were asked for. Ask for fewer, or give more text."
        )
    return items


def text_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Plain text cut into pieces one after another: ``context_tokens`` are handed over and the
    ``scored_tokens`` after them are scored. A tokenizer that begins texts with a token of its own
    begins every piece with it.
    """
    if not config.scored_tokens:
        raise InputError("The task 'text' needs scored_tokens of at least 1.")
    ids = encode(tokenizer, read_text(config.task, config.data))
    head = ids[:1] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else ()
    body, step = ids[len(head) :], config.context_tokens - len(head) + config.scored_tokens
    pieces = [head + body[at : at + step] for at in range(0, len(body) - step + 1, step)]
    chosen = pieces[config.skip : config.skip + config.num_items]
    end = config.context_tokens
    return [Item(piece[:end], continuation=piece[end:]) for piece in chosen]


TASKS: dict[str, Callable[[TaskConfig, Tokenizer], list[Item]]] = {
    "tiny": tiny_items,
    "text": text_items,
    "prompts": prompts_items,
    **dict.fromkeys(READERS, choice_items),
    "coqa": coqa_items,
    **dict.fromkeys(TELLERS, ruler_items),
}
GENERATED = ("tiny", *TELLERS)


def named_task(config: TaskConfig, task: str) -> TaskConfig:
    """``config`` for one of several tasks: a ``data`` that is a folder stands for the one file in
    it whose name begins with the task's (or the folder, of MMLU). Raises InputError when there is
    none, or more than one.
    """
    same = replace(config, task=task)
    held = None if task in GENERATED else list_folder(config.data)
    if held is None:
        return same
    found = [
        file
        for file in held
        if file.name.startswith(task)
        and (
            file.suffix in (".json", ".jsonl", ".csv", ".txt") or (task == "mmlu" and file.is_dir())
        )
    ]
    if task == "mmlu" and not found:
        return same
    if len(found) != 1:
        raise InputError(
            f"The folder {config.data} holds {len(found)} files whose names begin with {task!r}; "
            f"one is needed, as {task}.jsonl."
        )
    return replace(same, data=str(found[0]))
