"""Map, read again, or stay: decided from measured speeds and from what the map's report shows.

python examples/11_routing.py [--validate]
"""

import sys

from trtllm_kvmap.artifact.evidence import CONTROLS
from trtllm_kvmap.decode.routing.routing import Situation, route
from trtllm_kvmap.decode.routing.speeds import Speeds, Timing, bytes_per_token
from trtllm_kvmap.decode.routing.vouched import RoutingPolicy
from trtllm_kvmap.models import read_spec
from trtllm_kvmap.tiny import model_folder

source, target = (read_spec(model_folder(name)) for name in ("tiny-s", "tiny-m"))

# What `trtllm-kvmap plan --measure --speeds F` would write for your models; made up here.
speeds = Speeds(
    source_prefill=Timing(((128, 0.004), (1024, 0.030), (4096, 0.180))),
    target_prefill=Timing(((64, 0.006), (128, 0.008), (1024, 0.070), (4096, 0.500))),
    map=Timing(((1024, 0.004),)),
    repair=Timing(((64, 0.0062), (4096, 0.012))),
    repair_window=32,
    source_decode=900.0,
    target_decode=500.0,
    transfer_bytes_per_second=1e9,
)
# What a map's file carries once it was judged; the part that routing reads (see read_map).
map_digest = "5e" * 32
interval = {"value": 0.94, "low": 0.90, "high": 0.98}
evidence = {
    "config": {"metric": "accuracy", "N": 32, "S": 4, "map_digest": map_digest}
    | {"context_tokens": {"longest": 1024}},
    "arms": {
        "source": {"accuracy": {"value": 0.62, "low": 0.59, "high": 0.65}},
        "target": {"accuracy": {"value": 1.0, "low": 1.0, "high": 1.0}},
    },
    "gap_recovered": interval,
    "perplexity_ratio": {"value": 1.03, "low": 1.02, "high": 1.04},
    "controls": dict.fromkeys(CONTROLS, "passed"),
}

judged = evidence, map_digest
sizes = {"bytes_per_token": bytes_per_token(source), "max_positions": target.max_positions}
asked = {
    "long": route(Situation(2048), speeds, *judged, **sizes),
    "short": route(Situation(60), speeds, *judged, **sizes),
    "unproven": route(Situation(2048), speeds, None, None, **sizes),
    "hasty": route(
        Situation(2048), speeds, *judged, policy=RoutingPolicy(max_seconds=0.001), **sizes
    ),
}
for name, found in asked.items():
    print(f"{name}: {found.choice}. {found.reason}")

chosen = [found.choice for found in asked.values()]
if "--validate" in sys.argv and chosen != ["map", "reprefill", "reprefill", "stay"]:
    sys.exit(f"FAILED: the choices are {chosen}")
print(f"OK: mapping pays from {asked['long'].break_even_tokens} tokens on")
