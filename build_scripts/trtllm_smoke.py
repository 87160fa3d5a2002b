"""On a machine with a GPU and TensorRT-LLM: one hand-over between two engines, step by step.

    python build_scripts/trtllm_smoke.py --source SMALL --target LARGE --kvmap P.kvmap.safetensors
                                         --prompt-file long.txt --json smoke.json
    python build_scripts/trtllm_smoke.py --dry-run      the checks in order, on any machine

Both models are local folders, the map one of this pair, the prompt longer than the map's repair
window. The source's engine reads the prompt and is shut down before the target's starts, so that
one card is enough. The exit status is 0 when every check held. docs/runbook.md says what each
proves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CHECKS = {
    "door": "the installed tensorrt_llm is as signatures.py lists it",
    "export": "a finished request's KV was copied out while its blocks were held",
    "layout": "that KV is what transformers computes: blocks are heads, tokens, channels",
    "native": "the target's engine answers a plain request",
    "mapped": "the request with the hand-over's salt was given mapped tokens, and says so",
    "isolated": "the same plain request afterwards answers as it did before",
    "shows": "the mapped answer agrees with the native one in at least its first token",
    "released": "the source's blocks are held no longer",
}
# The least cosine, over layers, between the engine's KV and transformers' in the same precision;
# heads and tokens exchanged give about 0.
LEAST_COSINE = 0.98
ANSWER_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="folder of the model that reads")
    parser.add_argument("--target", type=Path, help="folder of the model that answers")
    parser.add_argument("--kvmap", type=Path, help="the map of the two")
    parser.add_argument("--prompt-file", type=Path, help="text both can read")
    parser.add_argument("--backend", default="cuda", help="what maps (default: cuda)")
    parser.add_argument("--allow-unproven", action="store_true", help="an unproven map")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--dry-run", action="store_true", help="print the checks and run nothing")
    options = parser.parse_args()
    if options.dry_run:
        for name, what in CHECKS.items():
            print(f"{name:10} {what}")
        return 0
    if None in (options.source, options.target, options.kvmap, options.prompt_file):
        parser.error("--source, --target, --kvmap and --prompt-file are needed, or --dry-run")
    # The engine's worker in this process: the blocks are handed over as objects.
    os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    smoke = Smoke(options)
    try:
        smoke.run()
    finally:
        if options.json:
            options.json.write_text(json.dumps(smoke.found, indent=1) + "\n")
    failed = [name for name in CHECKS if not smoke.found["checks"].get(name)]
    print(f"Failed: {', '.join(failed)}." if failed else "TensorRT-LLM smoke check passed.")
    return 1 if failed else 0


class Smoke:
    """The checks in order; each leaves its finding before the next begins."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, Any] = {"checks": {}}

    def run(self) -> None:
        if not self._door():
            return
        exported = self._read()
        if exported is not None:
            self._answer(exported)

    def _door(self) -> bool:
        from trtllm_kvmap.inject.trtllm import host

        differing = list(host.caller_differences())
        self.found["tensorrt_llm"] = {"version": host.VERSION, "path": host.PATH}
        return self._note("door", not differing, f"{host.VERSION} at {host.PATH} {differing}")

    def _read(self) -> Any:
        """The source's engine reads the prompt; its KV, or None."""
        import trtllm_parts

        from trtllm_kvmap.errors import UnavailableError
        from trtllm_kvmap.models import load_model

        self.source = load_model(self.options.source)
        self.ids = self.source.tokenise(self.options.prompt_file.read_text())
        settings = {"exports": "trtllm_parts:EXPORTS"}
        with Engine(self.options.source, settings, ("KvExportScheduler", "KvExportWorker")) as llm:
            trtllm_parts.EXPORTS.want("smoke", self.ids)
            llm.answer(self.ids, 1)
            exported, until = None, time.monotonic() + 30
            while exported is None and time.monotonic() < until:
                try:
                    exported = trtllm_parts.EXPORTS.take("smoke")
                except UnavailableError:
                    time.sleep(0.05)  # the engine's loop ends the copy
        whole = exported is not None and exported.token_ids == tuple(self.ids)
        self._note("export", whole, "nothing was kept" if exported is None else "")
        if not whole:
            return None
        cosines = self._cosines(exported)
        self.found["cosine"] = cosines
        return exported if self._note("layout", min(cosines) > LEAST_COSINE, cosines) else None

    def _cosines(self, exported: Any) -> list[float]:
        """Per layer, keys and values: the engine's KV against transformers'."""
        from trtllm_kvmap.decode.prefill import prefill
        from trtllm_kvmap.inject.hf_cache import view_pool

        pool = view_pool(prefill(self.source, self.ids, logits_to_keep=1).cache)
        cosines = []
        for ours, theirs in ((exported.keys, pool.keys), (exported.values, pool.values)):
            for layer, view in enumerate(theirs):
                a, b = ours[layer].float().cpu().flatten(), view[0].float().cpu().flatten()
                cosines.append(round(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), 4))
        return cosines

    def _answer(self, exported: Any) -> None:
        """The target's engine, without and with the hand-over."""
        import trtllm_parts

        from trtllm_kvmap.artifact.container import read_digest
        from trtllm_kvmap.inject.connector.blocks import Offer
        from trtllm_kvmap.inject.connector.identity import HandoffIdentity

        settings = {
            "kvmap": str(self.options.kvmap.resolve()),
            "blocks": "trtllm_parts:BLOCKS",
            "backend": self.options.backend,
            "allow_unproven": self.options.allow_unproven,
        }
        identity = HandoffIdentity(
            "smoke", "smoke", str(self.options.target), read_digest(self.options.kvmap), "1"
        )
        halves = ("ReportingScheduler", "KvMapWorker")
        with Engine(self.options.target, settings, halves) as llm:
            native = llm.answer(self.ids, ANSWER_TOKENS)
            self._note("native", len(native) == ANSWER_TOKENS, native)
            offer = Offer(identity, exported.token_ids, self.source.fingerprint)
            salt = trtllm_parts.BLOCKS.offer(offer, exported.as_source())
            mapped = llm.answer(self.ids, ANSWER_TOKENS, salt)
            again = llm.answer(self.ids, ANSWER_TOKENS)
        told = [status.to_json() for status in trtllm_parts.STATUSES]
        applied = len(told) == 1 and told[0]["state"] == "applied" and told[0]["mapped"] > 0
        self._note("mapped", applied, told)
        self._note("isolated", again == native, again)
        agreement = sum(a == b for a, b in zip(native, mapped, strict=False)) / ANSWER_TOKENS
        self.found |= {"native": native, "mapped": mapped, "agreement": agreement}
        self._note("shows", mapped[:1] == native[:1], f"agreement {agreement:.2f}: {mapped}")
        self._note("released", not trtllm_parts.BLOCKS.salts(), trtllm_parts.BLOCKS.salts())

    def _note(self, name: str, held: bool, seen: object) -> bool:
        self.found["checks"][name] = held
        print(f"{'ok' if held else 'FAILED':6} {name:10} {CHECKS[name]}", flush=True)
        if not held:
            print(f"       seen: {seen}", flush=True)
        return held


class Engine:
    """One LLM with the connector's classes of trtllm_parts."""

    def __init__(self, model: Path, settings: dict[str, Any], halves: tuple[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "connector.json"
        self._path.write_text(json.dumps(settings))
        self._model, self._halves = str(model), halves

    def __enter__(self) -> Engine:
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig

        os.environ["TRTLLM_KVMAP_CONNECTOR"] = str(self._path)
        self._sampling: Callable[..., Any] = SamplingParams
        self._llm = LLM(
            model=self._model,
            kv_connector_config=KvCacheConnectorConfig(
                connector_module="trtllm_parts",
                connector_scheduler_class=self._halves[0],
                connector_worker_class=self._halves[1],
            ),
            kv_cache_config=KvCacheConfig(enable_block_reuse=True),
        )
        return self

    def answer(self, token_ids: list[int], steps: int, salt: str | None = None) -> list[int]:
        sampling = self._sampling(max_tokens=steps, temperature=0.0, ignore_eos=True)
        result = self._llm.generate_async(
            inputs=token_ids, sampling_params=sampling, cache_salt=salt
        )
        return list(result.result().outputs[0].token_ids)

    def __exit__(self, *error: object) -> None:
        self._llm.shutdown()
        self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(main())
