"""One door: `trtllm-kvmap <verb>`. Each verb is a file of its own; importing it registers it."""

from trtllm_kvmap.cli import doctor, inspect
from trtllm_kvmap.cli.app import app

__all__ = ["doctor", "inspect", "main"]


def main() -> None:
    app()
