"""What the tests know of the server that runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))

from triton_server import TritonServer

from trtllm_kvmap.artifact.evidence import CONTROLS
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.settings import ServeConfig

CONFIG = ServeConfig(first_tokens=2, repair_window=8, max_held_tokens=2_000)
FIGURE = {"value": 0.9, "low": 0.8, "high": 1.0}
# Of no run: it says of the map what routing asks for.
REPORT = {
    "config": {"metric": "nll", "N": CONFIG.repair_window, "context_tokens": {"longest": 4096}},
    "arms": {"source": {"nll": FIGURE}, "target": {"nll": FIGURE | {"value": 0.5}}},
    "gap_recovered": FIGURE,
    "perplexity_ratio": FIGURE,
    "controls": dict.fromkeys(CONTROLS, "passed"),
}


@dataclass(frozen=True)
class Served:
    """The server, and what it was started from. The map has random weights: what it makes of a
    prompt is far from the target's own answer, so that no test can take one for the other.
    """

    server: TritonServer
    source: LoadedModel
    target: LoadedModel
    kvmap: Path
    traffic: Path

    def refer(self, model: str, value: str, *, to: str) -> None:
        """Change a parameter of a served model from ``value`` to ``to``, and load it again."""
        path = self.server.repository / model / "config.pbtxt"
        text = path.read_text()
        assert text.count(f'"{value}"') == 1, f"{model} has no parameter {value}"
        path.write_text(text.replace(f'"{value}"', f'"{to}"'))
        self.server.control(model, "load")

    def reload(self, *models: str) -> None:
        """Let models read their files again, whatever Triton thinks has changed."""
        for model in models:
            self.server.control(model, "unload")
            self.server.control(model, "load")
