"""A map gets better from what is served: counted with consent, refitted, promoted with evidence.

python examples/12_traffic.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import CalibrationConfig, FitConfig, KvBridge, MomentSet, Session, load_model
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.evaluate.promote import promote, refit
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

small, large = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
columns, fitted = CalibrationConfig(joint=True), FitConfig(n=8, fields="both", ridge=1e-5)
served_with = EvaluationConfig(first_tokens=4, repair_window=8)


def prompt():
    """A document, and what it told asked again: the end of a prompt is what a map is judged by."""
    document = make_document(rng, 80, 16, 10)
    told = [f"{q.stem} {q.choices[q.label]}" for q in document.questions]
    return " ".join([document.text, *told])


with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "traffic.moments.safetensors"
    few = [small.tokenise(prompt()) for _ in range(2)]  # all there was to calibrate on
    old = fit(calibrate(small, large, few, columns, out), fitted)
    bridge = KvBridge(old, source=small, target=large)
    config = TrafficConfig(consent=True, max_pending=100, held_out_every=2, min_documents=20)
    with TrafficMoments(small, large, config, columns) as traffic:
        for number in range(100):
            session = Session({"small": small, "large": large}, [bridge], traffic=traffic)
            session.add(prompt(), consent=number % 5 > 0)  # one in five did not agree
            session.switch("large", first_tokens=4, repair_window=8)
            session.generate(1)
        traffic.drain()  # a server need not wait: it asks for moments now and then
        traffic.moments().save(out)
        counted, held_out = MomentSet.load(out), traffic.held_out()
    winner, trial = promote(old, refit(old, counted), small, large, held_out, served_with)

documents = counted.record["documents"]
print(f"{documents} conversations counted, {len(held_out)} held out; 20 had not agreed")
print("nats a token:", {name: round(nll["value"], 3) for name, nll in trial.nll.items()})
agreed = documents + len(held_out) == 80
if "--validate" in sys.argv and not (agreed and trial.promoted and winner.evidence):
    sys.exit("FAILED: the map refitted from traffic was not promoted")
low, high = trial.gain["low"], trial.gain["high"]
print(f"OK: promoted, {trial.gain['value']:.2f} [{low:.2f}, {high:.2f}] nats a token better")
