"""A source and a target in two processes: blocks travel over NIXL, and either may die.

python examples/03_two_processes.py [--validate]
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, load_model
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.serve.processes.front import WorkerPair
from trtllm_kvmap.serve.processes.work import PairSettings
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document


def write_map(folder: Path) -> str:
    """Fit tiny-s to tiny-m, as in 01_hand_over.py."""
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    rng = np.random.default_rng(0)
    texts = [make_document(rng, 512, 16, 0).text for _ in range(40)]
    documents = [source.tokenise(text) for text in texts]
    moments = calibrate(
        source, target, documents, CalibrationConfig(), folder / "pair.moments.safetensors"
    )
    fit(moments, FitConfig(n=6)).save(folder / "pair.kvmap.safetensors")
    return str(folder / "pair.kvmap.safetensors")


def main() -> None:
    tokenizer = load_model(model_folder("tiny-m"))
    document = make_document(np.random.default_rng(1), 512, 16, 1)
    (question,) = document.questions
    prompt = tokenizer.tokenise(f"{document.text} {question.stem}")
    names = str(model_folder("tiny-s")), str(model_folder("tiny-m"))
    with tempfile.TemporaryDirectory() as folder:
        kvmap = write_map(Path(folder))
        settings = PairSettings(*names, kvmap, wait_seconds=5, allow_unproven=True)
        with WorkerPair(settings) as pair:
            answers = [pair.ask(prompt, 1)]
            os.kill(pair.source.pid, signal.SIGSTOP)  # a source that says nothing any more
            answers.append(pair.ask(prompt, 1))
    for answer in answers:
        word = tokenizer.tokenizer.decode(answer.token_ids)
        print(f"{question.stem}: {word} ({answer.status.state} {answer.status.reason})")
    states = [answer.status.state for answer in answers]
    if "--validate" in sys.argv and states != ["applied", "fallback_reprefill"]:
        sys.exit("FAILED: the first answer must be applied, the second the target's own")
    print(f"OK: {answers[0].status.mapped} of {len(prompt)} tokens came mapped from the source")


if __name__ == "__main__":
    main()
