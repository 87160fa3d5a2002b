"""Build a pipeline of the TensorRT-engine lane: source engine, map engine, target engine.

    python build_scripts/build_engines.py --source SMALL --target LARGE --kvmap P.kvmap.safetensors
                                          --out FOLDER
    python build_scripts/build_engines.py --dry-run --source SMALL --target LARGE [--kvmap P]

The first needs a GPU and TensorRT-LLM 1.2.1, and has never been run. --dry-run needs neither: it
reads two model folders, or their config.json alone, says whether a pipeline of them can be built
and prints every command, shape and byte count; --json prints the same as JSON. The tiny family is
known by name (tiny-s, tiny-m, tiny-x). The exit status is 0 when the pair can be built.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.wording import in_flags
from trtllm_kvmap.engine.build import build_pipeline
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.pair import read_side
from trtllm_kvmap.engine.plan import UNVERIFIED, plan_pipeline
from trtllm_kvmap.errors import KvMapError
from trtllm_kvmap.tiny import FAMILY, model_folder

FLAGS = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(PipelineConfig)}


def main() -> int:
    options = parse()
    settings = {field.name: getattr(options, field.name) for field in fields(PipelineConfig)}
    source, target = (
        model_folder(name) if name in FAMILY else Path(name)
        for name in (options.source, options.target)
    )
    try:
        config = PipelineConfig.of(settings)
        if options.dry_run:
            return dry_run(options, source, target, config)
        print(UNVERIFIED)
        from trtllm_kvmap.engine.builders import TensorRtBuilders

        manifest = build_pipeline(
            source,
            target,
            options.kvmap,
            options.out,
            config,
            TensorRtBuilders(),
            allow_unproven=options.allow_unproven,
        )
    except KvMapError as error:
        print(in_flags(str(error), FLAGS), file=sys.stderr)
        return 2
    size = sum(record.bytes for record in manifest.files.values())
    print(f"Built {options.out}: {len(manifest.files)} files, {size:,} bytes.")
    return 0


def dry_run(options: argparse.Namespace, source: Path, target: Path, config: PipelineConfig) -> int:
    kvmap = KvMap.load(options.kvmap, allow_unproven=True) if options.kvmap else None
    plan = plan_pipeline(read_side(source), read_side(target), config, kvmap, options.n)
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        told = replace(plan, found=tuple(in_flags(sentence, FLAGS) for sentence in plan.found))
        print("\n".join(told.lines()))
    return 1 if plan.found else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", required=True, help="folder of the model that reads")
    parser.add_argument("--target", required=True, help="folder of the model that answers")
    parser.add_argument("--kvmap", type=Path, help="the map of the two")
    parser.add_argument("--out", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and build nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument("--n", type=int, default=8, help="slices of a map that is not there yet")
    parser.add_argument("--allow-unproven", action="store_true", help="an unproven map")
    for field in fields(PipelineConfig):
        parser.add_argument(FLAGS[field.name], type=type(field.default), default=field.default)
    options = parser.parse_args()
    if not options.dry_run and None in (options.kvmap, options.out):
        parser.error("give --kvmap and --out, or --dry-run")
    return options


if __name__ == "__main__":
    sys.exit(main())
