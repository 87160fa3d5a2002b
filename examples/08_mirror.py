"""Hot standby: while the small model talks, what it reads is mapped for the large one.

python examples/08_mirror.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from trtllm_kvmap import FitConfig, KvBridge, Session, load_model
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

small, large = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as folder:
    texts = [small.tokenise(make_document(rng, 512, 16, 0).text) for _ in range(40)]
    out = Path(folder) / "pair.moments.safetensors"
    moments = calibrate(small, large, texts, CalibrationConfig(), out)
bridge = KvBridge(fit(moments, FitConfig(n=6)), source=small, target=large)
document = make_document(rng, 1000, 20, 3)


def talk(standby: bool):
    """The small model reads a document and answers twice; the large one takes the third."""
    session = Session({"small": small, "large": large}, [bridge])
    session.add(document.text)
    if standby:
        session.mirror("large", first_tokens=4)
    for question in document.questions[:2]:
        session.add(f" {question.stem}")
        session.generate(1)  # each block that fills is mapped at once
    session.add(f" {document.questions[2].stem}")
    handoff = session.switch("large", first_tokens=4)
    left = 1e3 * (handoff.seconds["first"] + handoff.seconds["map"])
    print(f"standby {standby}: {left:.1f} ms of the switch before the repair")
    return session.generate(1), handoff.logits


plain, mirrored = talk(standby=False), talk(standby=True)
same = mirrored[0] == plain[0] and torch.allclose(mirrored[1], plain[1], atol=1e-3)
if "--validate" in sys.argv and not same:
    sys.exit("FAILED: the standby does not give what a map at the switch gives")
print(f"OK: both ways the large model says {large.tokenizer.decode(mirrored[0])!r}")
