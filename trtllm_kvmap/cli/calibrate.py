"""`trtllm-kvmap calibrate`"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.distributed import process_group
from trtllm_kvmap.calibrate.estimate import estimate_calibration
from trtllm_kvmap.calibrate.run import calibrate as run_calibration
from trtllm_kvmap.calibrate.run import partial_path
from trtllm_kvmap.calibrate.text import read_documents
from trtllm_kvmap.cli.app import complain, counted, say, verb, write_json
from trtllm_kvmap.cli.flags import SOURCE, TARGET, JsonOption, config_flags
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.machine import matmul_rate, total_memory
from trtllm_kvmap.models import describe_pair, load_model, read_spec


@verb
@config_flags(config=CalibrationConfig)
def calibrate(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    target: Annotated[str, typer.Argument(help=TARGET)],
    config: CalibrationConfig,
    text: Annotated[
        Path | None,
        typer.Option(
            help="what to read: plain text (one document), JSONL (one a line), or a folder of such "
            "files"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the .moments.safetensors file to write")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from OUT.partial, which an interrupted run left")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="print memory, disk and time, and stop")
    ] = False,
    estimate_tokens: Annotated[
        int, typer.Option(help="how many tokens --estimate is for")
    ] = 128_000,
    json: JsonOption = None,
) -> None:
    """Read text with both models once and add up the moments that every fit is made from.

    Moments are sums of products of both models' keys and values, with RoPE removed. --text and
    --out are needed for all but --estimate.

    Under torchrun every rank reads its share of the documents, and rank 0 writes the sum.
    """
    if estimate:
        _print_estimate(source, target, config, estimate_tokens)
        return
    if text is None or out is None:
        raise InputError("calibrate needs --text, what to read, and --out, the file to write.")
    require_writable(out)
    with process_group(), said_when_interrupted(out, resume=resume):
        described = describe_pair(source, target)
        documents = read_documents(
            text,
            described[0],
            min_tokens=config.min_tokens,
            max_tokens=config.window(*(model.spec for model in described)),
        )
        if resume and not (there := partial_path(out)).is_file():
            complain(
                f"There is no {there} to go on from: calibration begins at the first document."
            )
        loaded = load_model(source), load_model(target)
        with counted("calibrate", len(documents)) as show:
            moments = run_calibration(
                *loaded,
                documents,
                config,
                out,
                resume=resume,
                on_document=show,
            )
    say(f"Wrote {out}: {moments.record['tokens']:,} tokens")
    write_json(json, moments.record)


@contextmanager
def said_when_interrupted(out: Path, *, resume: bool) -> Iterator[None]:
    """Ctrl-C inside the block ends the command with what of ``out`` is kept, and status 130."""
    partial = partial_path(out)
    before, whole = _written(partial), _written(out)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        kept = _written(partial)
        if _written(out) != whole:
            said = f"{out} is whole: it was written before."
        elif kept is not None and (resume or kept != before):
            said = f"{partial} keeps the sums so far: the same command with --resume goes on there."
        else:
            said = f"Nothing was written yet; {out} is as it was."
        complain(f"trtllm-kvmap: interrupted. {said}")
        raise typer.Exit(130) from interrupt


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _print_estimate(source: str, target: str, config: CalibrationConfig, tokens: int) -> None:
    if tokens < 1:
        raise InputError(f"--estimate-tokens must be at least 1, got {tokens}.")
    found = estimate_calibration(
        read_spec(source),
        read_spec(target),
        config,
        tokens=tokens,
        flops_per_second=matmul_rate(torch.float32),
        available=total_memory(),
    )
    for sentence in found.sentences():
        say(sentence)
