"""What build_scripts/triton_server.py leaves behind, with a shell in the server's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))

from triton_server import TritonServer


def test_no_process_outlives_a_server_that_crashed(tmp_path: Path) -> None:
    server = TritonServer(tmp_path, tmp_path)
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    server._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert server._process.stdout is not None
    stub = int(server._process.stdout.readline())
    server._process.kill()
    server._process.wait()
    os.kill(stub, 0)  # it is there
    server.__exit__()
    server._process.stdout.close()
    for _ in range(1_000):  # a signal takes a moment
        if state_of(stub) in ("", "Z"):
            return
        time.sleep(0.01)
    os.kill(stub, signal.SIGKILL)
    pytest.fail("it sleeps on")


def state_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
