"""After a hand-over the source drafts for the target: the same answer in fewer of its passes.

python examples/07_speculate.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from trtllm_kvmap import FitConfig, KvBridge, generate, load_model, plan_handoff, prefill, speculate
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.generate import near_ties
from trtllm_kvmap.fit import fit
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
rng = np.random.default_rng(0)
texts = [source.tokenise(make_document(rng, 512, 16, 0).text) for _ in range(40)]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "pair.moments.safetensors"
    kvmap = fit(calibrate(source, target, texts, CalibrationConfig(), out), FitConfig(n=6))
bridge = KvBridge(kvmap, source=source, target=target)

# The source reads; the target takes over. The source's own cache then serves its drafts.
prompt = source.tokenise(make_document(rng, 512, 16, 0).text)
read = prefill(source, prompt)
handoff = bridge.hand_over(read.cache, prompt, plan_handoff(len(prompt), repair_window=32))
drafted = (source, target, read.cache, handoff.cache, handoff.logits, 64)

greedy = speculate(*drafted)
alone = generate(target, fork(handoff.cache), handoff.logits, 64)
print(f"greedy: {greedy.acceptance_rate:.2f} of the proposals accepted")
sampled = speculate(*drafted, temperature=1.0, generator=torch.Generator().manual_seed(0))
print(f"temperature 1: {sampled.acceptance_rate:.2f} of the proposals accepted")
print(source.tokenizer.decode(sampled.rows[0]))

if "--validate" in sys.argv and greedy.rows[0] != alone:
    pairs = zip(greedy.rows[0], alone, strict=True)
    parted = next(i for i, (one, other) in enumerate(pairs) if one != other)
    if not near_ties(prefill(target, alone[:parted], fork(handoff.cache)).logits[-1:], 1e-3):
        sys.exit(f"FAILED: the target alone says something else at token {parted}")
length = sampled.acceptance_length
if "--validate" in sys.argv and not length > 1.5:
    sys.exit("FAILED: sampled drafts were hardly ever accepted")
print(f"OK: {length:.1f} tokens a verifier step, distributed as the target's own")
