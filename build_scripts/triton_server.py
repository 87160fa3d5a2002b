"""Runs the Triton Inference Server that the nvidia-pytriton wheel carries, on a CPU.

The wheel is used as a carrier of the server alone: nothing of pytriton's Python code runs. Its
python backend was built before numpy 2 and reads wrong bytes with it, so an environment for it
needs numpy < 2.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from environment import MAIN, Environment
from stub_state import state_of_stubs

WHEEL, WHEEL_VERSION = "nvidia-pytriton", "0.7.0"
# Without the wheel's own requirements, because nothing of its Python code runs.
ENVIRONMENT = Environment(
    ".venv-triton", ("numpy==1.26.4",), over=MAIN, data=(f"{WHEEL}=={WHEEL_VERSION}",)
)
# Generous: four processes import torch, on whatever machine this is.
START_SECONDS, STOP_SECONDS = 600.0, 60.0


class TritonServer:
    """A running server over the model ``repository``, with its files in the folder ``work``.

    ``control`` starts with no model loaded and lets the repository API load and unload them. Use it
    as a context manager; it raises RuntimeError with the server's log when it does not get ready.
    """

    def __init__(self, repository: Path, work: Path, *, control: bool = False) -> None:
        self.repository, self.work = repository, work
        self.log = work / "tritonserver.log"
        self.http_port, self.metrics_port = free_ports(2)
        self.models = sorted(p.parent.name for p in repository.glob("*/config.pbtxt"))
        self._control = control
        self._known: dict[int, str] = {}

    def __enter__(self) -> TritonServer:
        self.work.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self._paths()}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # where nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)  # stubs outlive a server that crashed
        self._process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            return str(answer.read().decode())

    def ask(self, body: Any, **parameters: str) -> Any:
        """The response object to an OpenAI request, of /generate. Raises RuntimeError with the
        server's sentence when it refuses, and the state of its processes when one is not healthy.
        """
        with self._open(body, "generate", parameters) as answer:
            return self._response(answer.read())

    def stream(self, body: Any, **parameters: str) -> Iterator[Any]:
        """The response objects of /generate_stream, as they come."""
        with self._open(body, "generate_stream", parameters) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield self._response(line.removeprefix(b"data:"))

    def _open(
        self, body: Any, endpoint: str, parameters: dict[str, str]
    ) -> http.client.HTTPResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        given = json.dumps({"request": text, "parameters": parameters}).encode()
        return self.post(f"v2/models/kvmap_pipeline/{endpoint}", given)

    def infer(self, body: Any, **headers: str) -> Any:
        """The response object of kvmap_whole's /infer, which is given HTTP ``headers``."""
        text = {"name": "request", "shape": [1], "datatype": "BYTES", "data": [json.dumps(body)]}
        given = json.dumps({"inputs": [text]}).encode()
        with self.post("v2/models/kvmap_whole/infer", given, headers) as answer:
            (output,) = json.load(answer)["outputs"]
        return json.loads(output["data"][0])

    def post(
        self, path: str, data: bytes, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        # Named, because what is not is sent as a form; see docs/triton.md for what that does.
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(
            f"{self.url}/{path}", data=data, headers=sent, method="POST"
        )
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            said = error.read().decode().strip().removeprefix("data: ")
            with contextlib.suppress(ValueError, KeyError):
                said = json.loads(said)["error"]
            raise RuntimeError(self._with_state(said)) from error
        return answer

    def control(self, model: str, action: str) -> None:
        """``action`` is load, or unload, which is over when nothing of the model is left."""
        self.post(f"v2/repository/models/{model}/{action}", b"{}").read()
        self.stubs()
        end = time.monotonic() + START_SECONDS
        while action == "unload" and self.stubs()[model] and time.monotonic() < end:
            time.sleep(0.1)

    def kill_stub(self, model: str) -> None:
        """Kill every python process of ``model``, as a crash would."""
        for pid in self.stubs()[model]:
            os.kill(pid, signal.SIGSEGV)

    def stubs(self) -> dict[str, list[int]]:
        """The process ids of each model's python processes."""
        found: dict[str, list[int]] = {model: [] for model in self.models}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it ended meanwhile
            if words[0].endswith("triton_python_backend_stub") and str(self.repository) in words[1]:
                (model,) = (m for m in self.models if f"/{m}/1/model.py" in words[1])
                found[model].append(int(folder.name))
                self._known[int(folder.name)] = model
        return found

    def _response(self, said: bytes) -> Any:
        """Our response object out of Triton's, which may be an error that comes with status 200."""
        outer = json.loads(said)
        if "error" in outer:
            raise RuntimeError(self._with_state(outer["error"]))
        return json.loads(outer["response"])

    def _with_state(self, said: str) -> str:
        if "is not healthy" not in said and "health mutex" not in said:
            return said
        return f"{said}\n{state_of_stubs(self.pid, self._known)}"

    def _paths(self) -> dict[str, str]:
        libraries = [str(site_packages() / "nvidia_pytriton.libs"), python_libraries()]
        return {
            "LD_LIBRARY_PATH": ":".join(libraries),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def _command(self) -> list[str]:
        command = [
            str(installed() / "bin" / "tritonserver"),
            *("--model-repository", str(self.repository)),
            *("--backend-directory", str(make_backend_folder(self.work / "backends"))),
            *("--http-address", "127.0.0.1", "--http-port", str(self.http_port)),
            *("--metrics-address", "127.0.0.1", "--metrics-port", str(self.metrics_port)),
            "--allow-grpc=false",
            "--http-header-forward-pattern=(?i)x-vsr-kv-.*",
        ]
        if self._control:
            command += ["--model-control-mode=explicit", "--load-model=*"]
        return command

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/v2/health/ready"):
                    self.stubs()  # so that the dead can be named
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"tritonserver did not get ready; its log:\n{self.log.read_text()}")


def installed() -> Path:
    """The wheel's server folder. Raises FileNotFoundError where the wheel is not installed."""
    try:
        found = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"{WHEEL} is not installed here. Run `python build_scripts/run_tests.py -k triton`."
        ) from None
    return Path(str(found.locate_file("pytriton"))) / "tritonserver"


def version() -> str:
    """The wheel that carries the server; the server's own version is in its log."""
    return f"{WHEEL} {metadata.version(WHEEL)}"


def site_packages() -> Path:
    return installed().parents[1]


def python_libraries() -> str:
    return str(sysconfig.get_config_var("LIBDIR"))


def make_backend_folder(folder: Path) -> Path:
    """The python backend with the stub of the running Python beside it, as Triton wants them."""
    name = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "python").mkdir(parents=True, exist_ok=True)
    for part in ("backends/python", f"python_backend_stubs/{name}"):
        for file in (installed() / part).iterdir():
            if file.is_file():
                shutil.copy2(file, folder / "python")
    return folder


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
