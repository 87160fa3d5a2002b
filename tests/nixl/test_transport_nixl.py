"""NIXL itself moves the blocks: two agents of this process, host memory, UCX."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exchange_cases import POISON, Sending, expected, make_pool, offer_of

from trtllm_kvmap.exchange import send
from trtllm_kvmap.exchange.channel import Listener
from trtllm_kvmap.exchange.messages import Address, Offer, Reason
from trtllm_kvmap.exchange.nixl import NixlTransport
from trtllm_kvmap.exchange.receive import NotReceived, Received, receive_blocks

ROOT = Path(__file__).resolve().parents[2]
BLOCK_IDS = (6, 0, 3, 8, 1)


@pytest.fixture(scope="module")
def transports(nixl_api: object) -> Iterator[tuple[NixlTransport, NixlTransport]]:
    """The source's and the target's."""
    both = NixlTransport(), NixlTransport()
    yield both
    for transport in both:
        transport.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener()
    yield listening
    listening.close()


@pytest.mark.parametrize("batch_bytes", [1, 4000, 1 << 20])
def test_blocks_arrive_whole_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
    transports: tuple[NixlTransport, NixlTransport],
    listener: Listener,
    batch_bytes: int,
) -> None:
    monkeypatch.setattr(send, "BATCH_BYTES", batch_bytes)
    source, landing = make_pool(9), make_pool(7, fill=POISON)
    source.take(9)
    landing.take(1)
    before = source.data.clone()
    offer = offer_of(source, transports[0])
    sending = Sending(listener.address, offer, source, BLOCK_IDS)
    sending.start()
    received = receive_blocks(listener, expected(), {"nixl": transports[1]}, landing)
    assert isinstance(received, Received), received
    assert sending.ended().reason is Reason.COMPLETE
    wanted = torch.full_like(landing.data, POISON)
    wanted[list(received.block_ids)] = before[list(BLOCK_IDS)]
    assert torch.equal(landing.data, wanted)
    assert torch.equal(source.data, before)


def refused(
    transports: tuple[NixlTransport, NixlTransport],
    listener: Listener,
    change: dict[str, object],
) -> NotReceived:
    """What becomes of an offer with ``change`` in its address; both sides hold nothing then."""
    source, landing = make_pool(9), make_pool(5)
    good = offer_of(source, transports[0])
    offer: Offer = replace(good, address=replace(good.address, **change))
    sending = Sending(listener.address, offer, source, source.take(5))
    sending.start()
    result = receive_blocks(listener, expected(), {"nixl": transports[1]}, landing)
    assert isinstance(result, NotReceived)
    assert sending.ended().reason is result.reason
    assert (source.num_free, landing.num_free) == (9, 5)
    return result


@pytest.mark.parametrize(
    "token", [b"", b"no agent's metadata", bytes(400)], ids=["empty", "text", "zeros"]
)
def test_a_false_agent_is_refused(
    transports: tuple[NixlTransport, NixlTransport], listener: Listener, token: bytes
) -> None:
    result = refused(transports, listener, {"token": token})
    assert result.reason is Reason.TRANSFER_FAILED
    assert "agent cannot be reached" in result.detail


@pytest.mark.parametrize("base", [0, 4096, (1 << 64) - 4096])
def test_memory_that_was_not_exposed_is_not_read(
    transports: tuple[NixlTransport, NixlTransport], listener: Listener, base: int
) -> None:
    result = refused(transports, listener, {"base": base})
    assert result.reason is Reason.TRANSFER_FAILED


def test_a_good_offer_after_a_bad_one(
    transports: tuple[NixlTransport, NixlTransport], listener: Listener
) -> None:
    refused(transports, listener, {"base": 4096})
    source, landing = make_pool(9), make_pool(5)
    sending = Sending(listener.address, offer_of(source, transports[0]), source, source.take(5))
    sending.start()
    received = receive_blocks(listener, expected(), {"nixl": transports[1]}, landing)
    assert isinstance(received, Received), received
    assert sending.ended().reason is Reason.COMPLETE


def test_an_address_names_the_transport(transports: tuple[NixlTransport, NixlTransport]) -> None:
    address = transports[0].expose(make_pool(2))
    assert isinstance(address, Address)
    assert (address.transport, address.device) == ("nixl", -1)
    assert 0 < len(address.token) < 48_000  # what a message has room for


def test_an_exposed_pool_costs_no_core(transports: tuple[NixlTransport, NixlTransport]) -> None:
    """NIXL's own progress thread would run all the time, on a core that checksums need."""
    transports[0].expose(make_pool(2))
    used, began = time.process_time(), time.monotonic()
    time.sleep(1.0)
    assert time.process_time() - used < 0.1 * (time.monotonic() - began)


def test_a_process_may_end_with_its_transport_open(nixl_api: object) -> None:
    lines = (
        "from exchange_cases import make_pool",
        "from trtllm_kvmap.exchange.nixl import NixlTransport",
        "pool, transport = make_pool(2), NixlTransport()",
        "transport.expose(pool)",
        "print('exposed')",
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "tests" / "unit",
    )
    assert "exposed" in result.stdout
    assert result.returncode == 0, result.stderr[-2000:]


def test_example() -> None:
    example = ROOT / "examples" / "03_two_processes.py"
    result = subprocess.run(
        [sys.executable, str(example), "--validate"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1].startswith("OK: ")
    assert "applied" in result.stdout
    assert "fallback_reprefill" in result.stdout
