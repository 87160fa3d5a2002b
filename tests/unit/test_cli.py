"""The door: every verb runs on random models, from text to a judged map."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_maps import random_map
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate import run as run_module
from trtllm_kvmap.cli.evaluate import timing
from trtllm_kvmap.cli.fit import candidate_name
from trtllm_kvmap.cli.guard import taken_back_too_often
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.evaluate.latency import NATIVE, STAGES, ratios
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.sections_of_origin import configuration
from trtllm_kvmap.fit import FitConfig
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny.documents import make_document

Folder = Callable[..., Path]


def run(*arguments: object) -> str:
    """What the command printed; fails with it when the command failed."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, model_folder: Folder) -> dict[str, Any]:
    """A pair of random models, text, moments of it and a map fitted from them."""
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    texts = [make_document(rng, 120, 6, 0).text for _ in range(12)]
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    source = model_folder("qwen3", seed=1)
    target = model_folder("qwen3", layers=3, kv_heads=1, head_dim=32, seed=2)
    moments, kvmap = folder / "pair.moments.safetensors", folder / "pair.kvmap.safetensors"
    run("calibrate", source, target, "--text", text, "--out", moments)
    run("fit", moments, "--out", kvmap, "--scope", "slice", "--n", 3)
    return {"source": source, "target": target, "moments": moments, "kvmap": kvmap, "text": text}


def pair(work: dict[str, Any]) -> tuple[object, ...]:
    return "--source", work["source"], "--target", work["target"]


def test_calibrate_counts_what_it_read(work: dict[str, Any]) -> None:
    moments = MomentSet.load(work["moments"])
    read = len(work["text"].read_text().splitlines())
    assert moments.record["documents"] == read
    assert moments.record["tokens"] == moments.parts[0].moments.count > 12 * 90


def test_an_interrupted_calibration_says_how_to_go_on(
    work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first checkpoint, in a run that an older one's checkpoint lies beside, and
    after a checkpoint; what is resumed then equals what was never interrupted.
    """
    out, partial = tmp_path / "x.moments.safetensors", tmp_path / "x.moments.safetensors.partial"
    command = [str(a) for a in ("calibrate", work["source"], work["target"])]
    command += [str(a) for a in ("--text", work["text"], "--out", out, "--checkpoint-every", 4)]
    add, added = run_module._add_document, []

    def stopping_after(count: int) -> None:
        def add_or_stop(*given: Any) -> None:
            if len(added) == count:
                raise KeyboardInterrupt
            added.append(given)
            add(*given)

        added.clear()
        monkeypatch.setattr(run_module, "_add_document", add_or_stop)

    def interrupted(count: int) -> str:
        stopping_after(count)
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, out.exists()) == (130, False)
        return " ".join(result.output.split())

    assert "Nothing was written yet" in interrupted(3)
    assert not list(tmp_path.iterdir())
    assert f"{partial} keeps the sums so far: the same command with --resume" in interrupted(5)
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]
    assert "Nothing was written yet" in interrupted(2)  # of the older run, and not asked for
    command.append("--resume")
    assert f"{partial} keeps" in interrupted(1)
    stopping_after(-1)
    assert "to go on from" not in run(*command)
    assert len(added) == 12 - 4
    assert out.read_bytes() == work["moments"].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    said = run(*command)
    assert f"no {partial} to go on from: calibration begins at the first document" in said


def test_a_calibration_interrupted_when_it_is_done_says_that_it_wrote(
    work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calibrate = tmp_path / "x.moments.safetensors", run_module.calibrate

    def done_and_stopped(*given: Any, **more: Any) -> None:
        calibrate(*given, **more)
        raise KeyboardInterrupt

    verb = importlib.import_module("trtllm_kvmap.cli.calibrate")
    monkeypatch.setattr(verb, "run_calibration", done_and_stopped)
    command = ("calibrate", work["source"], work["target"], "--text", work["text"], "--out", out)
    result = CliRunner().invoke(app, [str(a) for a in command])
    assert result.exit_code == 130
    assert f"{out} is whole" in " ".join(result.output.split())
    assert out.read_bytes() == work["moments"].read_bytes()


def test_calibrate_estimate_reads_no_text_and_writes_nothing(
    work: dict[str, Any], tmp_path: Path
) -> None:
    said = run("calibrate", work["source"], work["target"], "--estimate")
    assert "memory" in said
    assert "disk" in said


def test_fit_writes_the_map_that_its_flags_describe(work: dict[str, Any]) -> None:
    kvmap = KvMap.load(work["kvmap"], allow_unproven=True)
    assert kvmap.scope == "slice"
    read = {group.layer: len(group.slices) for group in kvmap.groups}
    assert read == {0: 1, 1: 3, 2: 3}  # the target's own layer 0 explains itself
    table = kvmap.fitted["layer_r2"]["value"]  # of one candidate as of several
    assert [len(row) for row in table] == [kvmap.source.num_layers] * 3


def test_fit_estimate_names_every_candidate(work: dict[str, Any]) -> None:
    said = run("fit", work["moments"], "--estimate", "--scope", "pooled", "--scope", "slice")
    assert "pooled" in said
    assert "slice" in said
    assert "for the report: about" in said
    refused = CliRunner().invoke(app, ["fit", str(work["moments"])])
    assert refused.exit_code == 2
    assert "fit needs --out" in refused.output


def test_fit_chooses_among_candidates_by_the_targets_loss(
    work: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "chosen.kvmap.safetensors"
    few = ("--num-items", 3, "--context-tokens", 256, "--questions", 2)
    run("fit", work["moments"], "--out", out, *pair(work), "--n", 1, "--n", 3, *few)
    table = KvMap.load(out, allow_unproven=True).fitted["candidates"]
    losses = [row["nll"] for row in table]
    assert [row["config"]["n"] for row in table] == [1, 3]
    assert [row["chosen"] for row in table] == [loss == min(losses) for loss in losses]


def test_a_swapped_pair_is_told_by_every_verb_that_runs_it(
    work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files of the models: none is loaded."""
    swapped = "--source", work["target"], "--target", work["source"]
    back, out = tmp_path / "back.kvmap.safetensors", tmp_path / "out"
    random_map(load_model(work["target"]), load_model(work["source"]), num_slices=1).save(back)
    few = ("--num-items", 2, "--context-tokens", 96)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    for arguments in (
        ("triton", "--kvmap", work["kvmap"], *swapped, "--allow-unproven", "--out", out),
        ("generate", work["kvmap"], *swapped, "--prompt", "after anna ben", "--allow-unproven"),
        ("evaluate", work["kvmap"], *swapped, *few, "--json", out),
        ("alternate", work["kvmap"], back, *swapped, *few, "--json", out),
        ("alternate", back, work["kvmap"], *pair(work), *few, "--json", out),
        ("fit", work["moments"], *swapped, *few, "--out", out, "--n", 1, "--n", 2),
        ("diagnose", work["kvmap"], *swapped, *few, "--json", out),
        ("refine", work["kvmap"], *swapped, "--text", work["text"], "--out", out),
    ):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 2, arguments
        assert "Source and target look swapped" in result.output, (arguments, result.output)
        assert "Exchange them" in result.output
        assert not out.exists()


def test_inspect_prints_the_map_as_json(work: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "said.json"
    run("inspect", work["kvmap"], "--json", out)
    said = json.loads(out.read_text())
    assert said["scope"] == "slice"
    assert said["evidence"] is None
    assert said["target"]["num_kv_heads"] == 1


def test_generate_continues_and_says_what_was_mapped(work: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "said.json"
    prompt = " ".join(["<bos>", *["after anna ben near"] * 20])
    run(
        *("generate", work["kvmap"], *pair(work), "--prompt", prompt, "--allow-unproven"),
        *("--max-new-tokens", 4, "--repair-window", 8, "--json", out),
    )
    said = json.loads(out.read_text())
    assert len(said["token_ids"]) == 4
    counts = {"prompt": 81, "first": 1, "mapped": 72, "repaired": 8, "sink": 1, "selected": 0}
    assert said["tokens"] == counts
    assert (said["status"], said["guard"]) == ("applied", None)
    assert said["acceptance_rate"] is None
    run(
        *("generate", work["kvmap"], *pair(work), "--prompt", prompt, "--allow-unproven"),
        *("--max-new-tokens", 4, "--repair-window", 8, "--json", out, "--speculate"),
    )
    drafted = json.loads(out.read_text())
    assert drafted["token_ids"] == said["token_ids"]
    assert 0 <= drafted["acceptance_rate"] <= 1


def test_what_is_printed_is_one_line_however_long(work: dict[str, Any], tmp_path: Path) -> None:
    """Whatever reads a pipe sees no break that the model, or a path, does not have."""
    out, prompt = tmp_path / "said.json", " ".join(["<bos>", *["after anna ben near"] * 20])
    options = ("--allow-unproven", "--max-new-tokens", 60, "--json", out)
    shown = run("generate", work["kvmap"], *pair(work), "--prompt", prompt, *options)
    answer = json.loads(out.read_text())["text"]
    assert len(answer) > 200
    assert answer in shown.splitlines()
    deep = tmp_path / "a folder with a long name" / ("x" * 100) / "pair.kvmap.safetensors"
    shown = run("fit", work["moments"], "--out", deep, "--scope", "slice", "--n", 1)
    assert f"Wrote {deep}: slice" in shown


@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize(("limit", "status"), [(1e9, "applied"), (-1e9, "fallback_reprefill")])
def test_generate_asks_the_guard_that_the_map_carries(
    limit: float, status: str, recall: bool, work: dict[str, Any], tmp_path: Path
) -> None:
    out, kvmap = tmp_path / "said.json", tmp_path / "guarded"
    guard = {"weights": [1.0] + [0.0] * 8, "bias": 0.0, "limit": limit, "measured": {}}
    if recall:  # then that one decides, and not the guard without it
        guard = {**guard, "limit": -limit, "recalling": {**guard, "weights": [1.0] + [0.0] * 9}}
    KvMap.load(work["kvmap"], allow_unproven=True).with_guard(guard).save(kvmap)
    prompt = " ".join(["<bos>", *["after anna ben near"] * 20])
    options = ("--allow-unproven", "--max-new-tokens", 2, "--selected-tokens", 5, "--json", out)
    shown = run("generate", kvmap, *pair(work), "--prompt", prompt, *options)
    said = json.loads(out.read_text())
    assert said["status"] == status
    score = said["guard"]["score"]
    assert said["guard"] == {"score": score, "limit": limit}
    assert f"{status} (guard: {score:.3g}, limit {limit:.3g})" in shown
    mapped = {"applied": (48, 5), "fallback_reprefill": (0, 0)}[status]
    assert (said["tokens"]["mapped"], said["tokens"]["selected"]) == mapped


@pytest.mark.parametrize("window", [32, 8])
def test_generate_says_when_its_guard_was_set_on_other_hand_overs(
    window: int, work: dict[str, Any], tmp_path: Path
) -> None:
    measured = {"S": 1, "N": 32, "selected_tokens": 0}
    guard = {"weights": [1.0] + [0.0] * 8, "bias": 0.0, "limit": 1e9, "measured": measured}
    kvmap = tmp_path / "guarded"
    KvMap.load(work["kvmap"], allow_unproven=True).with_guard(guard).save(kvmap)
    prompt = " ".join(["<bos>", *["after anna ben near"] * 20])
    options = ("--allow-unproven", "--max-new-tokens", 2, "--repair-window", window)
    shown = " ".join(run("generate", kvmap, *pair(work), "--prompt", prompt, *options).split())
    unlike = "with S 1, N 32, selected_tokens 0, and this one has S 1, N 8, selected_tokens 0"
    assert (unlike in shown) == (window == 8)
    assert ("its rates do not hold" in shown) == (window == 8)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "--max-new-tokens"), (10**6, "Shorten the prompt")]
)
def test_generate_refuses_a_length_before_any_model_reads(
    count: int, said: str, work: dict[str, Any]
) -> None:
    options = ("--allow-unproven", "--max-new-tokens", count, "--prompt", "after anna ben near")
    arguments = ("generate", work["kvmap"], *pair(work), *options)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert "applied" not in result.output


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FitConfig("slice", k=5, n=7), "slice n=7 ridge=0.001"),
        (FitConfig("pooled", k=5, n=7, ridge=0), "pooled k=5 ridge=0"),
        (FitConfig("head", k=5, rank=9, cut="plain"), "head k=5 ridge=0.001 rank=9 cut=plain"),
        (FitConfig("copy", k=5, n=7), "copy"),
    ],
)
def test_a_candidate_is_named_by_what_its_scope_reads(config: FitConfig, name: str) -> None:
    assert candidate_name(asdict(config)) == name


@pytest.mark.parametrize("axis", ["--n", "--rank"])
def test_several_candidates_without_models_are_refused(
    axis: str, work: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--out", tmp_path / "none", axis, 2, axis, 3)
    result = CliRunner().invoke(app, [str(a) for a in ("fit", work["moments"], *options)])
    assert (result.exit_code, (tmp_path / "none").exists()) == (2, False)
    assert "2 candidates need both models" in result.output
    assert "--ridge, --rank and --cut" in result.output


@pytest.mark.parametrize(("rate", "said"), [(0.1, False), (0.104, False), (0.2, True)])
def test_guard_that_takes_back_more_than_was_allowed_is_said(rate: float, said: bool) -> None:
    measured = {"cases": 300, "bad": 100, "false_fallback_rate": rate}  # 200 others: 0.005 each
    warning = taken_back_too_often(measured, 0.1)
    assert bool(warning) == said
    assert not said or ("20.0%" in warning and "--taken-back allows 10.0%" in warning)


@pytest.mark.parametrize("recall", [False, True])
def test_guard_is_stored_in_the_map(recall: bool, work: dict[str, Any], tmp_path: Path) -> None:
    kvmap, out = tmp_path / "guarded", tmp_path / "guard.json"
    KvMap.load(work["kvmap"], allow_unproven=True).save(kvmap)
    few = ("--num-items", 3, "--context-tokens", 256, "--metric", "nll", "--repair-window", 8)
    asked = ["--recall"] if recall else []
    shown = run("guard", kvmap, *pair(work), *few, *asked, "--json", out)
    guard = json.loads(out.read_text())
    weighings = [guard, guard["recalling"]] if recall else [guard]
    for each in weighings:
        rates = [
            f"{each['measured'][kind]:.1%}" for kind in ("false_fallback_rate", "missed_bad_rate")
        ]
        assert "takes back {} of the others and misses {}".format(*rates) in shown
    assert shown.count("takes back") == len(weighings)
    assert KvMap.load(kvmap, allow_unproven=True).guard == guard
    assert (guard["measured"]["N"], len(guard["measured"]["set_on"])) == (8, 3)
    assert f"of {guard['measured']['cases']} hand-overs" in shown


def test_guard_is_set_on_several_kinds_of_traffic(work: dict[str, Any], tmp_path: Path) -> None:
    kvmap, out, mine = (tmp_path / name for name in ("guarded", "guard.json", "mine.jsonl"))
    KvMap.load(work["kvmap"], allow_unproven=True).save(kvmap)
    words = " ".join(["<bos>", *["after anna ben near"] * 12])
    lines = ({"prompt": words, "answer": "after anna"}, {"prompt": words}, {"prompt": words[:-9]})
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ("--num-items", 3, "--context-tokens", 256, "--metric", "nll", "--repair-window", 8)
    also = ("--scored-tokens", 4, "--also", f"prompts={mine}", "--also", "niah_single")
    shown = run("guard", kvmap, *pair(work), *few, *also, "--json", out)
    measured = json.loads(out.read_text())["measured"]
    kinds = measured["kinds"]
    assert list(kinds) == ["tiny", f"prompts={mine}", "niah_single"]
    assert len({each["cases"] for each in kinds.values()}) == 1
    assert sum(each["cases"] for each in kinds.values()) == measured["cases"]
    assert len(measured["set_on"]) == 9
    for kind, each in kinds.items():
        assert f"{kind}: takes back " in shown
        assert f" of {each['bad']}" in shown
    twice = (*few, "--also", "niah_single", "--also", "niah_single")
    arguments = ("guard", kvmap, *pair(work), *twice)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 2
    assert "'niah_single' is given twice" in " ".join(result.output.split())


def test_evaluate_writes_the_report_and_report_shows_it(
    work: dict[str, Any], tmp_path: Path
) -> None:
    out, page, again = tmp_path / "report.json", tmp_path / "report.html", tmp_path / "again.html"
    few = ("--num-items", 4, "--context-tokens", 256, "--questions", 3, "--resamples", 50)
    written = tmp_path / "report.md"
    said = run(
        *("evaluate", work["kvmap"], *pair(work), *few, "--json", out, "--html", page),
        *("--markdown", written, "--latency", "--min-retention", 0.5),
    )
    report = json.loads(out.read_text())
    assert timing(report["latency"]) in " ".join(said.split())
    assert {"target", "source", "mapped", "repair_only", "wrong_document"} <= set(report["arms"])
    markdown = tmp_path / "again.md"
    shown = run("report", out, "--html", again, "--markdown", markdown)
    assert "repair_only" in shown
    assert again.read_text() == page.read_text()
    assert markdown.read_text() == written.read_text()
    assert [gate["limit"] for gate in report["gates"]] == [0.5, 1.25, 0.8]
    assert report["latency"]["lengths"] == [128, 256]
    settings = dict(configuration(Report.load(out)).grids[0].rows)
    asked = shlex.split(settings["command"])[3:]
    asked[asked.index("--source") + 1], asked[asked.index("--target") + 1] = pair(work)[1::2]
    same = tmp_path / "same.json"
    run("evaluate", work["kvmap"], *asked, "--json", same)
    again_found = json.loads(same.read_text())
    assert {**again_found, "latency": report["latency"]} == report
    timeless = {stage: [[0.0] * 5] * 2 for stage in report["latency"]["turns"]}
    for spoilt in ({"arms": {"target": 1}}, {"latency": {**report["latency"], "turns": timeless}}):
        out.write_text(json.dumps({**report, **spoilt}))
        command = ["report", str(out), "--html", str(tmp_path / "none.html"), "--json", str(same)]
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 2
        assert "arm " not in refused.output  # nothing is shown of it
        assert not (tmp_path / "none.html").exists()
        assert json.loads(same.read_text()) == again_found


def test_a_timed_evaluation_says_the_ratio_at_the_longest_length() -> None:
    # The source's prefill and one more stage, over a native target of two seconds, three turns.
    turns = {stage: [[0.0] * 3] * 2 for stage in STAGES}
    turns |= {"source_prefill": [[1.0] * 3] * 2, "map": [[9.0] * 3, [0.5, 0.6, 0.4]]}
    turns |= {stage: [[1.0] * 3] * 2 for stage in NATIVE}
    said = timing({"lengths": [128, 2048], "turns": turns, **ratios(turns)})
    assert "at 2,048 tokens" in said
    assert "0.25 [0.20 0.30] when the source has read the prompt, 0.75 [0.70 0.80] when" in said
    assert "no prompt is longer" in timing({"lengths": [], "warm": [], "cold": []})


def test_evaluate_runs_several_tasks(work: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "reports.json"
    few = ("--num-items", 3, "--context-tokens", 256, "--questions", 2, "--resamples", 50)
    tasks = ("--tasks", "niah_multikey,variable_tracking")
    shown = run("evaluate", work["kvmap"], *pair(work), *few, *tasks, "--json", out)
    reports = json.loads(out.read_text())["tasks"]
    assert list(reports) == ["niah_multikey", "variable_tracking"]
    for name, report in reports.items():
        assert name in shown
        assert {"target", "source", "mapped", "no_context"} <= set(report["arms"])
        assert report["config"]["context_tokens"]["longest"] <= 256
    refused = CliRunner().invoke(
        app,
        [str(a) for a in ("evaluate", work["kvmap"], *pair(work), *tasks, "--attach")],
    )
    assert refused.exit_code == 2
    assert "one report" in refused.output


def test_diagnose_says_where_a_map_goes_wrong(work: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "diagnosis.json"
    few = ("--num-items", 2, "--context-tokens", 256, "--questions", 2, "--resamples", 50)
    shown = run("diagnose", work["kvmap"], *pair(work), *few, "--length", 300, "--json", out)
    found = json.loads(out.read_text())
    assert {row["group"] for row in found["interventions"]} >= {"field", "layer", "position"}
    assert [row["tokens"] for row in found["lengths"]] == [300]
    assert "shifted_positions" in shown
    whole, page, text = (tmp_path / name for name in ("whole.json", "page.html", "page.md"))
    report = tmp_path / "report.json"
    run("evaluate", work["kvmap"], *pair(work), *few, "--json", report)
    told = ("--diagnosis", out, "--json", whole, "--html", page, "--markdown", text)
    run("report", report, *told)
    assert json.loads(whole.read_text()) == json.loads(report.read_text()) | {"diagnosis": found}
    for path in (page, text):
        assert "Diagnosis: where the error does harm" in path.read_text()
    out.write_text(json.dumps({**found, "config": {**found["config"], "map": "another"}}))
    page.unlink()
    refused = CliRunner().invoke(app, [str(a) for a in ("report", report, *told)])
    assert refused.exit_code == 2
    assert "of another" in refused.output
    assert not page.exists()
    out.write_text(json.dumps({**found, "divergence": 5}))
    refused = CliRunner().invoke(app, [str(a) for a in ("report", report, *told)])
    assert refused.exit_code == 2
    assert f"{report} or {out}" in refused.output.replace("\n", " ")
    assert not page.exists()


def test_alternate_lets_two_models_take_turns(work: dict[str, Any], tmp_path: Path) -> None:
    back, out = tmp_path / "back.kvmap.safetensors", tmp_path / "turns.json"
    random_map(load_model(work["target"]), load_model(work["source"]), num_slices=1).save(back)
    few = ("--num-items", 2, "--context-tokens", 96, "--questions", 3, "--repair-window", 8)
    shown = run("alternate", work["kvmap"], back, *pair(work), *few, "--json", out)
    turns = json.loads(out.read_text())["turns"]
    assert [turn["answered_by"] for turn in turns] == ["source", "target", "source"]
    assert "drift where target answers" in shown
    for maps, wrong in (((work["kvmap"], work["kvmap"]), work["kvmap"]), ((back, back), back)):
        refused = CliRunner().invoke(app, [str(a) for a in ("alternate", *maps, *pair(work))])
        assert refused.exit_code == 2
        assert f"swapped: the map {wrong} was fitted from" in " ".join(refused.output.split())


def test_doctor_says_how_a_pair_can_be_mapped(work: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    run("doctor", *pair(work), "--json", out)
    found = {entry["name"]: entry["usable"] for entry in json.loads(out.read_text())["pair"]}
    assert found == {
        "one tokenizer": True,
        "copy": False,
        "head": False,
        "pooled": True,
        "slice": True,
    }


def test_doctor_counts_the_machine(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    run("doctor", "--json", out)
    names = [entry["name"] for entry in json.loads(out.read_text())["machine"]]
    assert names[0] == "CPU"
    assert {"CUDA", "TensorRT", "TensorRT-LLM", "Triton Inference Server"} <= set(names)
