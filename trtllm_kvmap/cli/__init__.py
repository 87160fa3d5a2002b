"""One door: `trtllm-kvmap <verb>`. Each verb is a file of its own (verbs.py)."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> None:
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.SIG_IGN:  # as it is where a shell started this in the background
        signal.signal(signal.SIGINT, _end)
    from trtllm_kvmap.cli.verbs import app  # and with it torch and transformers: seconds
    from trtllm_kvmap.models import quiet_loading

    signal.signal(signal.SIGINT, usual)
    quiet_loading()
    app()


def _end(*_: Any) -> None:
    """Ctrl-C while modules are imported. An exception might be swallowed there, or come out as
    another one; and there is nothing yet to clean up.
    """
    os.write(2, b"trtllm-kvmap: interrupted. Nothing was begun; every file is as it was.\n")
    os._exit(130)
