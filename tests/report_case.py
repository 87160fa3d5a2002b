"""A written-down report that has something for every section, and what a hostile one may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis, Intervention, LengthRow, TokenError
from trtllm_kvmap.evaluate.gates import Gates, judge_gates
from trtllm_kvmap.evaluate.latency import STAGES, ratios
from trtllm_kvmap.evaluate.provenance import name_of
from trtllm_kvmap.evaluate.report.report import Report

# Seconds of each stage at two lengths in three turns, and the native target's. The source's prefill
# and its five followers take 0.01 and 0.02 each, but for the map of the other two turns.
TURNS: dict[str, list[list[float]]] = {stage: [[0.01] * 3, [0.02] * 3] for stage in STAGES} | {
    "map": [[0.01, 0.005, 0.03], [0.02, 0.01, 0.06]],
    "target_prefill": [[0.03] * 3, [0.19] * 3],
    "target_first_step": [[0.01] * 3, [0.01] * 3],
}
SECONDS = {stage: [sorted(each)[1] for each in rows] for stage, rows in TURNS.items()}
# Markup that runs, fetches or breaks out of attributes and tables if anything lets it.
HOSTILE = (
    "<script>window.hurt = 1</script>\"'><img src=x onerror='window.hurt = 2'> "
    "[a](javascript:window.hurt=3) $\\x$ | __b__ ```"
)


def figure(value: float | None, reach: float = 0.05) -> dict[str, float | None]:
    if value is None:
        return {"value": None, "low": None, "high": None}
    return {"value": value, "low": value - reach, "high": value + reach}


def arm(accuracy: float | None, nll: float | None, gap: float | None) -> dict[str, Any]:
    return {
        "accuracy": figure(accuracy),
        "nll": figure(nll),
        "perplexity": figure(7.5),
        "perplexity_ratio": figure(1.1),
        "top1_agreement": figure(0.8),
        "rollout_agreement": figure(None),
        "retention": figure(None if accuracy is None else accuracy / 0.9),
        "retention_normalised": figure(None if accuracy is None else (accuracy - 0.25) / 0.65),
        "gap_recovered": figure(gap),
        "attention_cosine": 0.91,
        "mapped_share": 0.875,
    }


def written_diagnosis() -> Diagnosis:
    """Of the map of written_report: two layers of two heads, all that a diagnosis can find."""

    def found(group: str, name: str, removed: float, **where: Any) -> Intervention:
        place = {"field": None, "layer": None, "head": None} | where
        kl = 0.2 * (1 - removed)
        return Intervention(
            group=group, name=name, divergence=figure(kl), removed=figure(removed), **place
        )

    rows = [found("field", "keys", 0.75), found("field", "values", 0.125)]
    for layer in range(2):
        rows.append(found("layer", f"layer {layer}", 0.25 + layer / 2, layer=layer))
        for field in ("key", "value"):
            name = f"{field}s of layer {layer}"
            rows.append(found("layer", name, 0.35, layer=layer, field=field))
        for head in range(2):
            name = f"head {head} of layer {layer}"
            rows.append(found("head", name, head - layer / 4, layer=layer, head=head))
    rows += [found("position", f"{i + 1}/8", i / 16) for i in range(8)]
    rows += [found("kind", kind, 0.0625) for kind in ("digits", "words")]
    rows += [found("layers_below", f"layers 0-{layer}", 0.45 + layer / 2) for layer in range(2)]
    rows += [found("layers_above", f"layers {layer}-1", 0.98 - layer / 4) for layer in range(2)]
    rows += [found("control", "shifted_positions", -1.5), found("control", "shifted_values", -19)]
    report = written_report()
    nrmse = {"nrmse": [0.25, 0.5], "cosine": [0.97, None]}
    return Diagnosis(
        config={
            "source": "small <b>",
            "target": "large",
            "S": 2,
            "N": 16,
            "num_items": 12,
            "metric": "accuracy",
            "task": "tiny",
            "data": "",
            "skip": 0,
            "seed": 5,
            "scope": "slice",
            "map": name_of(report.fingerprints, report.kvmap),
        },
        divergence=figure(0.2),
        interventions=tuple(rows),
        kv_error={"key": nrmse, "value": nrmse},
        attention_cosine={"mean": 0.91, "worst": 0.87, "per_layer": [0.95, 0.87]},
        tokens=(
            TokenError("position", "0-15", 1234, 0.0416, 0.0208),
            TokenError("position", "16-31", 16, 0.09, 0.05),
            TokenError("kind", "digits", 7, 0.3, 0.2),
        ),
        lengths=tuple(
            LengthRow(
                tokens=tokens,
                beyond_calibration=beyond,
                nll=figure(2.0),
                source_nll=figure(2.3),
                target_nll=figure(1.8),
                gap_recovered=figure(0.6),
                divergence=figure(0.2),
                accuracy=figure(0.8),
                source_accuracy=figure(0.65),
                target_accuracy=figure(0.9),
            )
            for tokens, beyond in ((512, False), (2048, True), (4096, None))
        ),
        refused={"permuted_heads": "large has one KV head"},
    )


def whole_report() -> Report:
    return written_report().with_diagnosis(written_diagnosis())


def written_report() -> Report:
    arms = {
        "target": arm(0.9, 1.8, 1.0),
        "source": arm(0.5, 2.3, 0.0),
        "mapped": arm(0.72, 2.0, 0.55),
        "mapped_repaired_32": arm(0.8, 1.9, 0.75),
        "copy": {"refused": "copy needs equal (KV heads, head_dim) [not here]"},
        "repair_only": arm(0.3, 2.9, -1.25),
        "wrong_document": arm(0.25, 3.0, None),
        "no_context": arm(0.24, 3.1, None),
    }
    fit = {"scope": "slice", "k": 4, "n": 12, "ridge": 1e-3, "fields": "same"}
    chosen = {"config": fit, "parameters": 123456, "r2_key": 0.76, "r2_value": 0.59, "nll": 1.93}
    chosen["attention_cosine"] = 0.93
    layer_r2 = {"key": [[0.5, 0.9], [0.25, None]], "value": [[0.4, 0.3], [0.2, 0.1]]}
    candidates = [
        {
            **chosen,
            "accuracy": 0.8,
            "gap_recovered": 0.7,
            "intervals": {"nll": [1.9, 1.96], "accuracy": [0.7, 0.9], "gap_recovered": [None] * 2},
            "chosen": True,
            "refused": None,
        },
        {
            **dict.fromkeys((*chosen, "accuracy", "gap_recovered")),
            "config": {**fit, "scope": "head"},
            "chosen": False,
            "refused": "head needs equal <KV heads>",
        },
    ]
    nrmse = {"nrmse": [0.25, 0.5], "cosine": [0.97, None]}
    return Report(
        arms=arms,
        gap_recovered=figure(0.75),
        retention=figure(0.8 / 0.9),
        retention_normalised=figure(0.55 / 0.65),
        top1_agreement=figure(0.8),
        perplexity_ratio=figure(1.1),
        attention_cosine={"mean": 0.91, "worst": 0.87, "per_layer": [0.95, 0.87]},
        kv_error={"key": nrmse, "value": nrmse},
        controls={"reinjection": "passed", "wrong_document": "not judged: <one item>"},
        config={
            "source": "small <b>",
            "target": "large",
            "arm": "mapped_repaired_32",
            "metric": "accuracy",
            "N": 32,
            "S": 1,
            "rollout_steps": 16,
            "length_normalised": True,
            "resamples": 2000,
            "backend": "cpu",
            "task": "hellaswag",
            "data": "held out.jsonl",
            "skip": 20,
            "scored_tokens": 40,
            "questions": 6,
            "seed": 3,
            "num_items": 60,
            "num_questions": 240,
            "context_tokens": {"shortest": 256, "longest": 1024, "asked": 1000},
            "items_digest": "cc" * 32,
            "map_digest": "dd" * 32,
            "versions": {"python": "3.11.9", "torch": "2.13.0"},
        },
        gates=judge_gates(Gates(), arms["mapped_repaired_32"], arms["source"]),
        chance=0.25,
        contexts={
            "tokens": [256, 512, 1024],
            "metric": {
                "source": [0.5, 0.25, 0.75],
                "mapped_repaired_32": [0.75, 0.25, None],
                "target": [1.0, 0.75, 1.0],
            },
        },
        latency={"lengths": [256, 1024], "rounds": 3, "threads": 2}
        | {"turns": TURNS, "seconds": SECONDS}
        | ratios(TURNS),
        fingerprints={"source": {"weights": "aa" * 32}, "target": {"weights": "bb" * 32}},
        kvmap={
            "scope": "slice",
            "parameters": 123456,
            "fitted": {
                "candidates": candidates,
                "layer_r2": layer_r2,
                "selection": {
                    "items": 24,
                    "S": 4,
                    "N": 32,
                    "metric": "accuracy",
                    "chosen_by": "cosine",
                    "source": {
                        "nll": 2.25,
                        "accuracy": 0.5,
                        "intervals": {"nll": [2.0, 2.5], "accuracy": [0.25, 0.75]},
                    },
                    "target": {
                        "nll": 1.75,
                        "accuracy": None,
                        "intervals": {"nll": [1.5, 2.0], "accuracy": [None, None]},
                    },
                },
            },
        },
    )


def large_report() -> Report:
    """The same of a target of 64 layers and 8 heads that reads a source of 40 layers."""
    target, source, heads = 64, 40, 8
    report = whole_report()
    assert report.diagnosis is not None
    nrmse = {"nrmse": [layer / 64 for layer in range(target)], "cosine": [0.9] * target}
    removed = [
        row
        for row in report.diagnosis["interventions"]
        if row["group"] in ("field", "position", "kind", "control")
    ]

    def found(group: str, name: str, share: float, **where: Any) -> dict[str, Any]:
        place = {"field": None, "layer": None, "head": None} | where
        return {
            "group": group,
            "name": name,
            **place,
            "divergence": figure(0.1),
            "removed": figure(share),
        }

    for layer in range(target):
        names = {f"layer {layer}": None, f"keys of layer {layer}": "key"}
        names |= {f"values of layer {layer}": "value"}
        for name, field in names.items():
            removed.append(found("layer", name, 0.3 - layer / 100, layer=layer, field=field))
        removed.append(found("layers_below", f"layers 0-{layer}", layer / 64))
        removed.append(found("layers_above", f"layers {layer}-{target - 1}", 1 - layer / 64))
        for head in range(heads):
            name = f"head {head} of layer {layer}"
            removed.append(found("head", name, head / 8 - layer / 64, layer=layer, head=head))
    by_layer = {"mean": 0.9, "worst": 0.8, "per_layer": [0.9] * target}
    both = {"kv_error": {"key": nrmse, "value": nrmse}, "attention_cosine": by_layer}
    report.kvmap["fitted"]["layer_r2"] = {
        field: [[(t - s) / 64 for s in range(source)] for t in range(target)]
        for field in ("key", "value")
    }
    report.config["source"] = "organisation/a-model-of-14B-with-a-long-name-as-they-have-them"
    report.contexts["tokens"] = [256] * 60
    for name in report.contexts["metric"]:
        report.contexts["metric"][name] = [0.5] * 60
    diagnosis = {**report.diagnosis, "interventions": removed, **both}
    # A report and its diagnosis are of one map.
    name = name_of(report.fingerprints, report.kvmap)
    diagnosis["config"] = {**diagnosis["config"], "map": name}
    return replace(report, diagnosis=diagnosis, **both)


def hostile_report() -> Report:
    """The same, with HOSTILE wherever a name, a reason or a document's words may stand."""
    report = whole_report()
    assert report.diagnosis is not None
    report.diagnosis["interventions"][0]["name"] = HOSTILE
    report.diagnosis["interventions"][-1]["name"] = HOSTILE
    report.diagnosis["tokens"][0]["name"] = HOSTILE
    report.diagnosis["refused"][HOSTILE] = HOSTILE
    config, fitted = report.config, report.kvmap["fitted"]
    report.arms[HOSTILE] = report.arms.pop(config["arm"])
    report.contexts["metric"][HOSTILE] = report.contexts["metric"].pop(config["arm"])
    config["source"] = config["target"] = config["arm"] = config[HOSTILE] = HOSTILE
    report.arms["copy"]["refused"] = report.controls[HOSTILE] = HOSTILE
    report.fingerprints[HOSTILE] = {HOSTILE: HOSTILE}
    fitted["candidates"][1]["refused"] = fitted["candidates"][0]["config"]["fields"] = HOSTILE
    report.gates[0]["name"] = HOSTILE
    return report
