"""One invented item of every benchmark in the exact shapes it is published in: its authors' own
file (``authors``), and what `datasets` writes of the hub's copy (``hub``, JSON lines).

Field names, nesting, types and quirks are the published ones; the words are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HELLASWAG: dict[str, Any] = {
    "ind": 24,
    "activity_label": "Mending a roof",
    "ctx_a": "A man [step] sits on a roof.",
    "ctx_b": "he",
    "ctx": "A man [step] sits on a roof. he",
    "endings": [
        "pulls  old tiles off.",
        "[substeps] sings. [title] Then he jumps.",
        "is asleep on the ridge.",
        "eats the ladder.",
    ],
    "source_id": "activitynet~v_x",
    "split": "val",
    "split_type": "indomain",
    "label": "0",
}
WIKIHOW = {  # how-to pages have no second half
    **HELLASWAG,
    "ind": 25,
    "activity_label": "Home and Garden",
    "ctx_a": "[header] How to mend a roof [title] Buy tiles. [step] Count them first. ",
    "ctx_b": "",
    "ctx": "[header] How to mend a roof [title] Buy tiles. [step] Count them first. ",
    "source_id": "wikihow~1",
    "label": "3",
}
PIQA = {"goal": "To keep bread fresh, ", "sol1": "wrap it.", "sol2": "leave it in the rain. "}
ARC_LETTERS = {
    "id": "Mercury_1",
    "question": {
        "stem": "Which one melts in the sun?",
        "choices": [
            {"text": "stone", "label": "A"},
            {"text": "ice", "label": "B"},
            {"text": "sand", "label": "C"},
            {"text": "clay", "label": "D"},
            {"text": "salt", "label": "E"},
        ],
    },
    "answerKey": "B",
}
ARC_NUMBERS = {
    "id": "NYSEDREGENTS_1",
    "question": {
        "stem": "What do plants take from the air?",
        "choices": [{"text": text, "label": str(i + 1)} for i, text in enumerate("abcd")],
    },
    "answerKey": "4",
}
WINOGRANDE = {
    "qID": "3X-1",
    "sentence": "The cup did not fit in the bag because _ was too large.",
    "option1": "the cup",
    "option2": "the small bag",
    "answer": "2",
}
MMLU = {
    "question": "What is one, or two,\nplus two? ",
    "subject": "abstract_algebra",
    "choices": ["1", "2", "3", "3 or 4"],
    "answer": 3,
}
COQA = {
    "source": "wikipedia",
    "id": "3zotghdk5",
    "filename": "Mill.txt",
    "story": "The mill burned down. Ben had built it.",
    "questions": [
        {"input_text": "What burned?", "turn_id": 1},
        {"input_text": "Who built it?", "turn_id": 2},
    ],
    "answers": [
        {
            "span_start": 0,
            "span_end": 8,
            "span_text": "The mill",
            "input_text": "the mill",
            "turn_id": 1,
        },
        {"span_start": 22, "span_end": 25, "span_text": "Ben", "input_text": "Ben", "turn_id": 2},
    ],
    "additional_answers": {
        str(i): [
            {"span_start": 0, "span_end": 8, "span_text": "x", "input_text": "mill", "turn_id": 1},
            {"span_start": 0, "span_end": 8, "span_text": "x", "input_text": "he", "turn_id": 2},
        ]
        for i in range(3)
    },
    "name": "Mill.txt",
}


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A list of objects as the object of lists that a hub's table has in its place."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def write_authors(task: str, folder: Path) -> Path:
    """The authors' own file (or files); returns the one that is read."""
    if task == "mmlu":
        path = folder / "abstract_algebra_test.csv"
        cells = [MMLU["question"].replace('"', '""'), *MMLU["choices"]]
        path.write_text(",".join(f'"{cell}"' for cell in cells) + ",D\n")
        return path
    if task == "coqa":
        path = folder / "coqa-dev-v1.0.json"
        path.write_text(json.dumps({"version": "1.0", "data": [COQA]}))
        return path
    if task == "piqa":
        (folder / "valid-labels.lst").write_text("0\n1\n")
        return _lines(folder / "valid.jsonl", [PIQA, PIQA])
    authors = {
        "hellaswag": ("hellaswag_val.jsonl", [{**d, "label": int(d["label"])} for d in SWAG]),
        "arc": ("ARC-Challenge-Dev.jsonl", [ARC_LETTERS, ARC_NUMBERS]),
        "winogrande": ("dev.jsonl", [WINOGRANDE]),
    }
    name, records = authors[task]
    return _lines(folder / name, records)


def write_hub(task: str, folder: Path) -> Path:
    """What `Dataset.to_json` writes of the hub's table: JSON lines in a file called `.json`."""
    arc = [
        {
            "id": d["id"],
            "question": d["question"]["stem"],
            "choices": columns(d["question"]["choices"]),
            "answerKey": d["answerKey"],
        }
        for d in (ARC_LETTERS, ARC_NUMBERS)
    ]
    more = {name: columns(rows) for name, rows in COQA["additional_answers"].items()}
    told = {name: columns(COQA[name]) for name in ("questions", "answers")}
    hub: dict[str, list[dict[str, Any]]] = {
        "hellaswag": SWAG,
        "piqa": [{**PIQA, "label": 0}, {**PIQA, "label": 1}],
        "arc": arc,
        "winogrande": [{name: v for name, v in WINOGRANDE.items() if name != "qID"}],
        "mmlu": [MMLU],
        "coqa": [{**COQA, **told, "additional_answers": more}] * 2,
    }
    return _lines(folder / f"{task}.json", hub[task])


SWAG = [HELLASWAG, WIKIHOW]
COUNTS = {"hellaswag": 2, "piqa": 2, "arc": 2, "winogrande": 1, "mmlu": 1, "coqa": 1}


def _lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
