"""A guard takes a hand-over back when the map has gone wrong, and the target reads the prompt.

python examples/05_guard.py [--validate]
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from trtllm_kvmap import FitConfig, KvBridge, hand_over_guarded, load_model, plan_handoff, prefill
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.evaluate.damage import with_noise
from trtllm_kvmap.evaluate.guard import GuardConfig, set_guard
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
documents = [source.tokenise(make_document(rng, 256, 20, 0).text) for _ in range(120)]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "pair.moments.safetensors"
    moments = calibrate(source, target, documents, CalibrationConfig(joint=True), out)
kvmap = fit(moments, FitConfig(n=12, ridge=1e-5, fields="both"))

# Set the guard on documents of its own, with the map and with copies damaged on purpose. Kept in
# the file (kvmap.with_guard(guard.to_json()).save(...)), it travels with the map.
items = read_items(TaskConfig(num_items=6, context_tokens=400, questions=16), target.tokenizer)
guard = set_guard(kvmap, source, target, {"documents": items}, GuardConfig(first_tokens=4))

# A request through the map, and through one that is mostly noise.
noise = np.random.default_rng(1)
strange = replace(kvmap, groups=tuple(with_noise(group, 3.0, noise) for group in kvmap.groups))
ids = source.tokenise(make_document(rng, 400, 16, 0).text)
read = prefill(source, ids)
plan = plan_handoff(len(ids), first_tokens=4, repair_window=32)
made = {}
for name, each in (("the map", kvmap), ("a strange map", strange)):
    bridge = KvBridge(each, source=source, target=target)
    made[name] = hand_over_guarded(bridge, guard, read.cache, ids, plan)
    print(f"{name}: {made[name].status}, score {made[name].score:.2f}, limit {guard.limit:.2f}")

statuses = [found.status for found in made.values()]
if "--validate" in sys.argv and statuses != ["applied", "fallback_reprefill"]:
    sys.exit(f"FAILED: the guard said {statuses}")
print(f"OK: taken back, the target read all {len(made['a strange map'].handoff.plan.repaired)}")
