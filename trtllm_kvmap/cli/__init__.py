"""One door: `trtllm-kvmap <verb>`. Each verb is a file of its own; importing it registers it."""

from trtllm_kvmap.cli import (
    alternate,
    calibrate,
    demo,
    diagnose,
    doctor,
    evaluate,
    fit,
    generate,
    guard,
    inspect,
    plan,
    recipe,
    refine,
    registry,
    report,
    triton,
)
from trtllm_kvmap.cli.app import app
from trtllm_kvmap.models import quiet_loading

__all__ = [
    "alternate",
    "calibrate",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "fit",
    "generate",
    "guard",
    "inspect",
    "main",
    "plan",
    "recipe",
    "refine",
    "registry",
    "report",
    "triton",
]


def main() -> None:
    quiet_loading()
    app()
