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


# As one meets them: what is there, the way of a map, its use, and what goes on from there.
ORDER = (
    *("doctor", "demo", "calibrate", "fit", "evaluate", "report", "generate", "inspect"),
    *("guard", "plan", "triton", "diagnose", "refine", "alternate", "recipe"),
)
app.registered_commands.sort(key=lambda command: ORDER.index(str(command.name)))


def main() -> None:
    quiet_loading()
    app()
