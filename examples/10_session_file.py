"""A conversation over two models is saved, loaded, and goes on bit for bit.

python examples/10_session_file.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, KvBridge, Session, load_model, load_session, save_session
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

small, large = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
models = {"small": small, "large": large}
rng = np.random.default_rng(0)
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
texts = [small.tokenise(make_document(rng, 256, 12, 0).text) for _ in range(20)]
moments = calibrate(small, large, texts, CalibrationConfig(), folder / "pair.moments.safetensors")
bridges = [KvBridge(fit(moments, FitConfig(n=6)), source=small, target=large)]

session = Session(models, bridges)
document = make_document(rng, 300, 12, 2)
session.add(f"{document.text} {document.questions[0].stem}")
session.generate(1)
session.switch("large")

path = folder / "talk.session.safetensors"
digest = save_session(session, path)
loaded = load_session(path, models, bridges)  # refuses other weights under the same names
print(f"{path.name}: {path.stat().st_size} bytes, {digest[:12]}")
for name, held in loaded.held.items():
    print(f"{name}: {held.exact} of {held.entries} entries are exact, {held.mapped_tokens} mapped")

replies = []
for talk in (session, loaded):
    talk.add(f" {document.questions[1].stem}")
    replies.append(talk.generate(8))
if "--validate" in sys.argv and (replies[0] != replies[1] or loaded.hops != session.hops):
    sys.exit("FAILED: the loaded conversation does not go on as the saved one")
print(f"OK: both go on with {large.tokenizer.decode(replies[1])!r}")
