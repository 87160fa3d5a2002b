"""NIXL over UCX: between processes and machines, host memory or GPU memory. Read by the target.

The Python binding is ``nixl_cu13`` or ``nixl_cu12``. Whoever exposes memory gets an agent with a
thread that answers its peers; whoever reads gets one without, because that thread and a reading one
would wait for each other. The thread is ours and mostly asleep: NIXL's own never sleeps, and the
core that it takes is one that checksums and copies need.
"""

from __future__ import annotations

import atexit
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import numpy as np

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.exchange.transport import TransferError

log = logging.getLogger(__name__)
BINDINGS = ("nixl_cu13._api", "nixl_cu12._api")
TURN_SECONDS = 0.001  # a peer that introduces itself waits no longer


def load_api() -> Any:
    """NIXL's Python API. Raises UnavailableError."""
    for name in BINDINGS:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise UnavailableError(
        "NIXL is not installed, so no block can travel to another process. Install nixl-cu13 (or "
        "nixl-cu12, as your CUDA is)."
    )


class NixlTransport:
    """See exchange.transport."""

    def __init__(self) -> None:
        self._api = load_api()
        self._exposing: _Agent | None = None
        self._reading: _Agent | None = None

    def expose(self, pool: BlockPool) -> Address:
        if self._exposing is None:
            self._exposing = _Agent(self._api, answers=True)
        self._exposing.register(pool)
        device = -1 if pool.data.device.type == "cpu" else pool.data.device.index
        return Address("nixl", pool.data.data_ptr(), device, self._exposing.metadata())

    def open(self, offer: Offer, landing: BlockPool) -> NixlReader:
        if self._reading is None:
            self._reading = _Agent(self._api, answers=False)
        with _as_transfer_error("the source's agent cannot be reached"):
            self._reading.register(landing)
            self._reading.meet(offer.address.token)
        return NixlReader(self._reading, offer, landing)

    def close(self) -> None:
        for agent in (self._reading, self._exposing):
            if agent is not None:
                agent.close()
        self._reading = self._exposing = None


class _Agent:
    """A NIXL agent whose name nobody else has, the memory it knows and the peers it has met."""

    def __init__(self, api: Any, *, answers: bool) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = api.nixl_agent(f"kvmap-{uuid.uuid4().hex}", config)
        self.peers: dict[bytes, Any] = {}  # by their metadata
        self._registered: dict[int, Any] = {}  # by the address of a pool
        self._in_use, self._closing = threading.Lock(), threading.Event()
        self._answering = threading.Thread(target=self._answer, name="kvmap-nixl", daemon=True)
        if answers:
            self._answering.start()
            atexit.register(self._stop)  # or the interpreter ends while it is inside NIXL

    def register(self, pool: BlockPool) -> None:
        where = pool.data.data_ptr()
        if where not in self._registered:
            with self._in_use:
                self._registered[where] = self.agent.register_memory(pool.data)

    def metadata(self) -> bytes:
        with self._in_use:
            token: bytes = self.agent.get_agent_metadata()
        return token

    def meet(self, token: bytes) -> None:
        if token not in self.peers:
            self.peers[token] = self.agent.add_remote_agent(token)

    def forget(self, token: bytes) -> None:
        """After a failure: the next offer is introduced anew."""
        self.agent.remove_remote_agent(self.peers.pop(token))

    def close(self) -> None:
        self._stop()
        for peer in set(self.peers.values()):
            self.agent.remove_remote_agent(peer)
        for registered in self._registered.values():
            self.agent.deregister_memory(registered)
        self.peers.clear()
        self._registered.clear()

    def _answer(self) -> None:
        failed = False
        while not self._closing.wait(TURN_SECONDS):
            try:
                with self._in_use:
                    self.agent.get_new_notifs()  # nobody sends any: UCX gets a turn, that counts
            except Exception:  # a peer's end is no reason to leave the others without an answer
                if not failed:  # once: there are a thousand turns a second
                    log.warning("NIXL failed in answering its peers", exc_info=True)
                failed = True

    def _stop(self) -> None:
        self._closing.set()
        if self._answering.is_alive():
            self._answering.join()
        atexit.unregister(self._stop)


class NixlReader:
    def __init__(self, reading: _Agent, offer: Offer, landing: BlockPool) -> None:
        self._reading, self._offer, self._landing = reading, offer, landing
        self._agent, self._peer = reading.agent, reading.peers[offer.address.token]
        self._running: list[Any] = []
        self._failed = False

    def start(self, remote: Sequence[int], local: Sequence[int]) -> Any:
        there, data = self._offer.address, self._landing.data
        here = -1 if data.device.type == "cpu" else data.device.index
        with self._failing("a read could not be started"):
            transfer = self._agent.initialize_xfer(
                "READ",
                self._places(data.data_ptr(), here, local),
                self._places(there.base, there.device, remote),
                self._peer,
            )
            self._running.append(transfer)
            if self._agent.transfer(transfer) == "ERR":
                raise TransferError("NIXL could not post the read")
        return transfer

    def finished(self, transfer: Any) -> bool:
        with self._failing("a read failed"):
            state = self._agent.check_xfer_state(transfer)
            if state == "PROC":
                return False
            self._running.remove(transfer)
            transfer.release()
            if state != "DONE":
                raise TransferError(f"NIXL says {state}")
        return True

    def checksums(self, transfer: Any) -> None:
        return

    def close(self) -> None:
        for transfer in self._running:
            with suppress(Exception):  # the exchange has failed already
                transfer.release()
        if self._failed:
            with suppress(Exception):
                self._reading.forget(self._offer.address.token)

    def _places(self, base: int, device: int, block_ids: Sequence[int]) -> Any:
        size = self._landing.block_bytes
        rows = np.empty((len(block_ids), 3), dtype=np.uint64)
        rows[:, 0] = np.asarray(block_ids, dtype=np.uint64) * np.uint64(size) + np.uint64(base)
        rows[:, 1], rows[:, 2] = size, max(device, 0)
        return self._agent.get_xfer_descs(rows, "DRAM" if device < 0 else "VRAM")

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            with _as_transfer_error(what):
                yield
        except TransferError:
            self._failed = True
            raise


@contextmanager
def _as_transfer_error(what: str) -> Iterator[None]:
    """NIXL's exceptions share no base but Exception."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{what}: {type(error).__name__} {error}") from error
