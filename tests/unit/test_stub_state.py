"""What build_scripts/stub_state.py says of real processes, which only bear a stub's name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))

from stub_state import state_of, state_of_stubs

if sys.platform != "linux":
    pytest.skip("it reads /proc, which is Linux's", allow_module_level=True)


def letter(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_living_the_stopped_and_the_dead_are_told_apart(tmp_path: Path) -> None:
    program = tmp_path / "triton_python_backend_stub"
    shutil.copy(shutil.which("sleep") or "", program)
    bystander = subprocess.Popen(["sleep", "60"])
    started = [subprocess.Popen([program, "60"]) for _ in range(3)]
    started.append(subprocess.Popen([program, "no number"], stderr=subprocess.DEVNULL))
    crashed, stopped, sound, failed = (each.pid for each in started)
    try:
        os.kill(crashed, signal.SIGSEGV)
        os.kill(stopped, signal.SIGSTOP)
        for process, wanted in ((crashed, "Z"), (stopped, "T"), (sound, "S"), (failed, "Z")):
            while letter(process) != wanted:
                time.sleep(0.01)
        said = state_of_stubs(os.getpid(), {crashed: "source", stopped: "target"}).splitlines()
        *lines, memory = said
        assert lines[0] == f"source, process {crashed}: dead, ended by SIGSEGV"
        assert lines[1].startswith(f"target, process {stopped}: stopped, in ")
        assert lines[2].startswith(f"unknown model, process {sound}: sleeping, in ")
        assert lines[3:] == [f"unknown model, process {failed}: dead, ended with status 1"]
        free = shutil.disk_usage("/dev/shm").free // 1_000_000
        assert abs(int(memory.split()[2]) - free) < 1_000
        counted = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        assert f": machine {counted['oom_kill']}" in memory
        assert len(state_of_stubs(bystander.pid, {}).splitlines()) == 1, "of another server"
    finally:
        for each in [*started, bystander]:
            each.kill()
            each.wait()


def test_where_a_process_waits_is_said_only_where_the_kernel_tells(tmp_path: Path) -> None:
    asleep, at_work = (f"{state}{' 0' * 50}".split() for state in "SR")
    assert state_of(tmp_path, asleep) == "sleeping"
    (tmp_path / "wchan").write_text("0")
    assert state_of(tmp_path, asleep) == "sleeping"
    assert state_of(tmp_path, at_work) == "running"
    (tmp_path / "wchan").write_text("pipe_read")
    assert state_of(tmp_path, asleep) == "sleeping, in pipe_read"
