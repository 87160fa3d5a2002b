"""Answer at once from a mapped cache, read for real in idle time, take back what was wrong.

python examples/09_upgrade.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, KvBridge, Session, generate, load_model, prefill
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
bridge = KvBridge(fit(moments, FitConfig(scope="copy")), source=small, target=large)

session = Session({"small": small, "large": large}, [bridge])
document = make_document(rng, 500, 16, 1)
session.add(document.text)
session.generate(1)
session.add(f" {document.questions[0].stem}")
session.switch("large", first_tokens=4, repair_window=8)
begin = len(session.token_ids)
print("at once:", large.tokenizer.decode(session.generate(12)))

# Idle time: one chunk after the other, until the cache is what the large model alone would hold.
withdrawn = 0
while True:
    state = session.upgrade(chunk_tokens=128, verify=True)
    withdrawn += len(state.withdrawn)
    print(f"idle chunk: {state.approximate} approximate entries left")
    if not state.approximate:
        break
missing = begin + 12 - len(session.token_ids)
if missing:
    session.generate(missing)
print("in the end:", large.tokenizer.decode(session.token_ids[begin:]))

alone = prefill(large, session.token_ids[:begin], logits_to_keep=1)
native = generate(large, alone.cache, alone.logits[-1], 12)
if "--validate" in sys.argv and session.token_ids[begin:] != native:
    sys.exit("FAILED: an upgraded conversation does not say what the large model alone says")
print(f"OK: {withdrawn} of 12 tokens were withdrawn, and the reply is the large model's own")
