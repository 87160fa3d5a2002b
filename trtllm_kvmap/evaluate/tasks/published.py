"""What stands beside a benchmark's records in the files of its authors: PIQA's labels in a second
file, MMLU's subject in the name of each of its 57.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.records import Record, read_records
from trtllm_kvmap.evaluate.tasks.text import list_folder, read_text

LETTERS = ("A", "B", "C", "D")
MMLU_COLUMNS = ("question", *LETTERS, "answer")
MMLU_FILE = re.compile(r"(?!mmlu_[a-z]+\.)(?:mmlu_)?(\w+)_(test|val|dev)\.csv")


def task_records(config: TaskConfig) -> Iterator[Record]:
    """The records of ``config.data`` with what stands beside them. A folder of MMLU's files gives
    one question of each subject in turn, so that a few items are of all subjects.
    """
    if config.task == "mmlu":
        held = list_folder(config.data)
        files = [config.data] if held is None else map(str, mmlu_files(config.data, held))
        subjects = [_mmlu_records(file) for file in files]
        for turn in zip_longest(*subjects):
            yield from (record for record in turn if record is not None)
    elif config.task == "piqa":
        yield from _piqa_records(config.data)
    else:
        yield from read_records(config.task, config.data)


def mmlu_files(folder: str, held: Sequence[Path]) -> list[Path]:
    """The files `<subject>_<split>.csv` of ``held``, which lies in ``folder``. Raises InputError
    when there is none or they are of several splits.
    """
    named = {file: MMLU_FILE.fullmatch(file.name) for file in held}
    found = {file: match[2] for file, match in named.items() if match}
    splits = sorted(set(found.values()))
    if len(splits) != 1:
        raise InputError(
            f"The folder {folder} holds {len(found)} files <subject>_test.csv (or _val, _dev) of "
            f"the splits {', '.join(splits) or 'none'}; give a folder with those of one split."
        )
    return list(found)


def _mmlu_records(file: str) -> Iterator[Record]:
    match = MMLU_FILE.fullmatch(Path(file).name)
    subject = {"subject": match[1]} if match else {}
    for record in read_records("mmlu", file, MMLU_COLUMNS):
        yield Record(record.where, record.number, {**record.fields, **subject})


def _piqa_records(data: str) -> Iterator[Record]:
    beside = Path(data).with_suffix("").as_posix() + "-labels.lst" if data else ""
    try:
        lines = read_text("piqa", beside).split() if Path(beside).is_file() else []
    except OSError:  # of no such name can there be a file: read_records says so of ``data``
        lines = []
    for record in read_records("piqa", data):
        label = {"label": lines[record.number]} if record.number < len(lines) else {}
        yield Record(record.where, record.number, {**label, **record.fields})
