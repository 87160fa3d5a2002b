"""A small model reads, a large one answers: from calibration text to the first token.

python examples/01_hand_over.py [--validate]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from trtllm_kvmap import FitConfig, KvBridge, generate, load_model, plan_handoff, prefill
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))

# Calibrate: both models read the same text once. Fit: the moments become a map.
rng = np.random.default_rng(0)
texts = [make_document(rng, 512, 16, 0).text for _ in range(60)]
with tempfile.TemporaryDirectory() as folder:
    documents = [source.tokenise(text) for text in texts]
    moments = calibrate(
        source, target, documents, CalibrationConfig(), Path(folder) / "pair.moments.safetensors"
    )
kvmap = fit(moments, FitConfig(scope="slice", n=6))
bridge = KvBridge(kvmap, source=source, target=target)

# Hand over: the source has read the prompt; the target computes its first 4 and last 32 tokens.
document = make_document(rng, 512, 16, 3)
same = 0
for question in document.questions:
    prompt = source.tokenise(f"{document.text} {question.stem}")
    read = prefill(source, prompt)
    handoff = bridge.hand_over(
        read.cache, prompt, plan_handoff(len(prompt), first_tokens=4, repair_window=32)
    )
    (answer,) = generate(target, handoff.cache, handoff.logits, 1)
    native = int(torch.argmax(prefill(target, prompt, logits_to_keep=1).logits[-1]))
    same += answer == native
    words = [target.tokenizer.decode([token]) for token in (answer, native)]
    print(f"{question.stem}: mapped says {words[0]}, native says {words[1]}")

if "--validate" in sys.argv and same == 0:
    sys.exit("FAILED: the mapped target agrees with the native one on no question")
print(f"OK: {len(handoff.plan.mapped)} of {len(prompt)} tokens were mapped, not read again")
