"""What became of a Triton server's python processes (stubs): its log does not say.

Linux only. Reads /proc of processes of the same user.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

# The kernel keeps 15 characters of triton_python_backend_stub.
NAME = "triton_python_b"
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped"}


def state_of_stubs(server: int, models: Mapping[int, str]) -> str:
    """One line for each stub of the process ``server``, the dead ones too, which it keeps as
    zombies; then what kills processes without a word. ``models`` names the model of each id known.
    """
    lines = []
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda found: int(found.name)):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if name == NAME and int(fields[1]) == server:
                model = models.get(int(folder.name), "unknown model")
                lines.append(f"{model}, process {folder.name}: {state_of(folder, fields)}")
        except OSError:
            continue  # it ended meanwhile
    return "\n".join([*lines, _memory(server)])


def state_of(folder: Path, fields: list[str]) -> str:
    """Of the process of a folder /proc/<pid>; ``fields`` are those of its ``stat`` behind the name.
    Where in the kernel it waits (wchan) is said where the kernel tells.
    """
    letter, exit_code = fields[0], int(fields[49])
    if letter in "ZX":
        if number := exit_code & 0x7F:
            return f"dead, ended by {signal.Signals(number).name}"
        return f"dead, ended with status {exit_code >> 8}"
    try:
        waits_in = (folder / "wchan").read_text().strip("0")
    except OSError:
        waits_in = ""
    return STATES.get(letter, letter) + (f", in {waits_in}" if waits_in else "")


def _memory(server: int) -> str:
    free = shutil.disk_usage("/dev/shm").free // 1_000_000
    return (
        f"/dev/shm has {free} MB free; killed for want of memory since boot: {_oom_kills(server)}"
    )


def _oom_kills(server: int) -> str:
    """On the machine, and in the server's cgroup (version 2 or 1) where its files can be read."""
    files = {"machine": Path("/proc/vmstat")}
    for line in Path(f"/proc/{server}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files["cgroup"] = Path(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            files["memory cgroup"] = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    counted = {where: _counter(path) for where, path in files.items()}
    return ", ".join(f"{where} {count}" for where, count in counted.items() if count is not None)


def _counter(path: Path) -> int | None:
    """``oom_kill`` of a file of names and numbers, or None without the file."""
    try:
        words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
    except OSError:
        return None
    return int(words["oom_kill"]) if "oom_kill" in words else None
