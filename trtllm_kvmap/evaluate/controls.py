"""Checks without which no figure means anything: run first, and the run stops when one fails."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from trtllm_kvmap.artifact.evidence import PASSED
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import KvMapError, UnprovenError
from trtllm_kvmap.evaluate import arms
from trtllm_kvmap.evaluate.bootstrap import figure
from trtllm_kvmap.evaluate.probe import Ready, ask
from trtllm_kvmap.evaluate.reading import Reading
from trtllm_kvmap.evaluate.summary import Draws
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.rotary import apply_rope, remove_rope


def run_controls(kvmap: KvMap, reading: Reading) -> dict[str, str]:
    """{control: "passed"}. Raises UnprovenError that names the first control that fails, and
    how. The map is written to a temporary folder, twice while the bytes are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "map"
        kvmap.save(saved)
        for name, control in CONTROLS.items():
            if complaint := control(kvmap, reading, saved):
                raise _failed(name, complaint)
    return dict.fromkeys(CONTROLS, PASSED)


def check_wrong_document(draws: Mapping[str, Draws], arm: str, metric: str) -> str:
    """ "passed", or why it cannot be judged. ``draws`` are those of the arms that ran, ``arm`` the
    mapped one that is reported, in ``metric``.

    What the arm says must come from the document that was read: on the same contexts it must do
    better than with a stranger's document, the whole interval of the paired difference above zero.
    Nor may a stranger's document answer the questions: its accuracy may not lie above that of
    knowing nothing, interval above interval (not paired: a stranger teaches the form of answers).
    Raises UnprovenError.
    """
    wrong = "wrong_document" if arm == "mapped" else "wrong_document_repaired"
    if wrong not in draws:
        return "not judged: there is no other document among the items; give at least two"
    stranger, nothing = (figure(draws[a].accuracy) for a in ("wrong_document", "no_context"))
    if stranger.low is not None and nothing.high is not None and stranger.low > nothing.high:
        raise _failed(
            "wrong_document",
            f"its accuracy, at least {stranger.low:.3f}, lies above that of no context, at "
            f"most {nothing.high:.3f} (intervals of few items may miss by chance: give more)",
        )
    right, other = (getattr(draws[name], metric) for name in (arm, wrong))
    gain = figure(right - other if metric == "accuracy" else other - right)
    if gain.low is None or gain.high is None:
        return "not judged: these items give no interval"
    if gain.low > 0:
        return PASSED
    said = f"{gain.value:.3g} [{gain.low:.3g} {gain.high:.3g}] in {metric}"
    if gain.high < 0:
        raise _failed(
            "wrong_document", f"the right document does worse than a wrong one, by {said}"
        )
    return (
        f"not judged: the right document over a wrong one gains {said}, which reaches zero: the "
        f"map reads nothing that matters here, or the items are too few"
    )


def _reinjection(kvmap: KvMap, reading: Reading, saved: Path) -> str:
    """The target's own cache, taken out and put back, gives the same bits everywhere."""
    native, again = reading.target, arms.reinjection(reading)
    pools = [view_pool(ready.cache) for ready in (native, again)]
    views = [pool.keys + pool.values for pool in pools]
    if not all(torch.equal(a, b) for a, b in zip(*views, strict=True)):
        return "the cache that was put back differs from the one that was taken out"
    if not torch.equal(ask(again, reading.script.tree).log_probs, reading.answers.log_probs):
        return "the target answers otherwise from its own cache put back"
    return ""


def _rope_round_trip(kvmap: KvMap, reading: Reading, saved: Path) -> str:
    return _rope_complaint(reading, reading.source) or _rope_complaint(reading, reading.target)


def _rope_complaint(reading: Reading, ready: Ready) -> str:
    """Keys survive un-rotating and rotating; and un-rotated keys of layer 0, which depend on the
    token alone, are equal wherever one token stands twice, or the rotation is not the model's.
    """
    spec, length = ready.model.spec, ready.model.rope_length(ready.position)
    keys = view_pool(ready.cache).keys[0][0].double()
    positions = torch.arange(ready.position, device=keys.device)
    content = remove_rope(keys, positions, spec.rope, length)
    scale = float(keys.abs().max())
    again = apply_rope(content, positions, spec.rope, length)
    if float((again - keys).abs().max()) > 1e-9 * scale:
        return f"keys of {spec.name} change when RoPE is taken off and put on again"
    # Models compute angles in float32 and may store keys in half precision.
    allowed = (2e-3 if ready.model.model.dtype == torch.float32 else 5e-2) * scale
    first: dict[int, int] = {}
    for index, token in enumerate(reading.item.context):
        origin = first.setdefault(token, index)
        if float((content[:, index] - content[:, origin]).abs().max()) > allowed:
            return (
                f"{spec.name} does not rotate keys as its configuration says: token {token} has "
                f"other un-rotated keys at position {index} than at {origin}"
            )
    return ""


def _deterministic_bytes(kvmap: KvMap, reading: Reading, saved: Path) -> str:
    again = saved.with_name("again")
    kvmap.save(again)
    same = filecmp.cmp(saved, again, shallow=False)
    again.unlink()
    return "" if same else "the same map saved twice gives two different files"


def _corruption_detected(kvmap: KvMap, reading: Reading, saved: Path) -> str:
    """One flipped bit, in the header, in the middle or at the end, keeps a file from loading."""
    size = saved.stat().st_size
    for offset in (100, size // 2, size - 1):
        _flip(saved, offset)
        try:
            KvMap.load(saved, allow_unproven=True)
        except KvMapError:
            _flip(saved, offset)
        else:
            return f"a saved map with one bit of byte {offset} flipped still loads"
    return ""


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _failed(name: str, complaint: str) -> UnprovenError:
    return UnprovenError(
        f"The control {name} failed: {complaint}. No figure of this run can be trusted; mend the "
        f"cause and evaluate again."
    )


# The map, one reading, and the map's file.
CONTROLS: dict[str, Callable[[KvMap, Reading, Path], str]] = {
    "reinjection": _reinjection,
    "rope_round_trip": _rope_round_trip,
    "deterministic_bytes": _deterministic_bytes,
    "corruption_detected": _corruption_detected,
}
