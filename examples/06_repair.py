"""Choose what the target computes itself: the ends of a prompt, and the tokens that matter most.

python examples/06_repair.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, KvBridge, load_model, plan_handoff, prefill, rank_by_attention
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.spec.plan import RepairCost, chunk_boundaries
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
documents = [source.tokenise(make_document(rng, 256, 20, 0).text) for _ in range(40)]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "pair.moments.safetensors"
    moments = calibrate(source, target, documents, CalibrationConfig(), out)
bridge = KvBridge(fit(moments, FitConfig(n=4)), source=source, target=target)

# What a pass costs here is measured by whoever knows the host; a budget in milliseconds then
# becomes a number of tokens.
budget = RepairCost(pass_ms=5.0, token_ms=0.25).max_computed(20.0)
document = make_document(rng, 512, 16, 8)
distance = {}
for question in document.questions:
    ids = source.tokenise(f"{document.text} {question.stem}")
    read, native = prefill(source, ids), prefill(target, ids, logits_to_keep=1).logits[-1]
    ends = plan_handoff(len(ids), first_tokens=4, repair_window=8)
    plans = {
        "only the ends": ends,
        "chunk boundaries": ends.with_selected(chunk_boundaries(len(ids), 16), budget),
        "most attended": ends.with_selected(
            rank_by_attention(source, read.cache, ids, ends), budget
        ),
    }
    for name, plan in plans.items():
        logits = bridge.hand_over(read.cache, ids, plan).logits
        # Kullback-Leibler divergence of the answer from the native target's, in nats.
        gap = native.log_softmax(-1) - logits.log_softmax(-1)
        distance.setdefault(name, []).append(float((native.softmax(-1) * gap).sum()))
for name, nats in distance.items():
    print(f"{name}: {plans[name].num_computed} tokens computed, {np.mean(nats):.2f} nats off")

if "--validate" in sys.argv and np.mean(distance["most attended"]) > np.mean(
    distance["only the ends"]
):
    sys.exit("FAILED: computing the most attended tokens brought the target no closer")
print(f"OK: {len(plan.selected)} tokens in the middle were computed by the target itself")
