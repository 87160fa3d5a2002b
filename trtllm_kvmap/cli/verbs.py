"""Every verb, registered by importing its file, and the order in which they are listed."""

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
    promote,
    recipe,
    refine,
    registry,
    report,
    triton,
)
from trtllm_kvmap.cli.app import app

__all__ = [
    "ORDER",
    "alternate",
    "app",
    "calibrate",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "fit",
    "generate",
    "guard",
    "inspect",
    "plan",
    "promote",
    "recipe",
    "refine",
    "registry",
    "report",
    "triton",
]

# As one meets them: what is there, the way of a map, its use, and what goes on from there.
ORDER = (
    *("doctor", "demo", "calibrate", "fit", "evaluate", "report", "generate", "inspect"),
    *("guard", "plan", "triton", "diagnose", "refine", "promote", "alternate", "recipe"),
)
app.registered_commands.sort(key=lambda command: ORDER.index(str(command.name)))
