"""A user's own prompts, one JSON object a line."""

from __future__ import annotations

from itertools import islice

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.records import Record, read_records
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode, encode_bare


def prompts_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Each line has a ``prompt``, which is handed over, and may have an ``answer``, which is
    scored; without one, the last ``scored_tokens`` of the prompt are. Raises InputError for a line
    that is not so, or a prompt too short to score its end.
    """
    records = read_records(config.task, config.data)
    chosen = islice(records, config.skip, config.skip + config.num_items)
    return [_item(record, config.scored_tokens, tokenizer) for record in chosen]


def _item(record: Record, scored_tokens: int, tokenizer: Tokenizer) -> Item:
    try:
        ids = encode(tokenizer, record.text("prompt"))
        if "answer" in record:
            return Item(ids, continuation=encode_bare(tokenizer, record.text("answer")))
    except InputError as error:
        raise InputError(
            str(error) if record.where in str(error) else f"{record.where}: {error}"
        ) from error
    if not 0 < scored_tokens < len(ids):
        record.refuse(
            "prompt",
            f"has {len(ids)} tokens, of which the last {scored_tokens} cannot be scored; give an "
            f"answer with it, or another scored_tokens",
        )
    return Item(ids[:-scored_tokens], continuation=ids[-scored_tokens:])
