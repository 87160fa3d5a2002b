"""A conversation goes up to the large model and back; what a model has read itself is kept exactly.

python examples/02_conversation.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, KvBridge, Session, load_model
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

small, large = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
texts = [make_document(rng, 512, 16, 0).text for _ in range(40)]


def bridge(source, target):
    """A map is directional: one for the way up, one for the way back."""
    with tempfile.TemporaryDirectory() as folder:
        documents = [source.tokenise(text) for text in texts]
        out = Path(folder) / "pair.moments.safetensors"
        moments = calibrate(source, target, documents, CalibrationConfig(), out)
    return KvBridge(fit(moments, FitConfig(n=6)), source=source, target=target)


session = Session({"small": small, "large": large}, [bridge(small, large), bridge(large, small)])
document = make_document(rng, 512, 16, 3)
session.add(document.text)
spliced = []
for question, model in zip(document.questions, ("small", "large", "small"), strict=True):
    session.add(f" {question.stem}")
    if model != session.active:
        handoff = session.switch(model)
        spliced.append(len(handoff.plan.spliced))
        print(f"to {model}: {spliced[-1]} spliced, {len(handoff.plan.mapped)} mapped")
    reply = session.models[model].tokenizer.decode(session.generate(1))
    print(f"{model}: {question.stem} {reply} (right: {question.choices[question.label]})")

if "--validate" in sys.argv and not spliced[1] > spliced[0]:
    sys.exit("FAILED: the small model was not given back what it had read itself")
print(f"OK: on the way back {spliced[1]} of {len(session.token_ids)} tokens were spliced")
