"""A detached ed25519 signature (RFC 8032) of a map's digest, in a file beside the map.

The digest covers every byte that a map means, and a map that differs from its digest does not load:
a signature of the digest is one of the map.
"""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.errors import FormatError, InputError, UnavailableError, UnprovenError

SUFFIX = ".sig"
PREFIX = b"trtllm_kvmap map "  # a signature of something else is none of a map


def sign(digest: str, private_key: bytes) -> str:
    """128 hex digits. ``private_key`` is an ed25519 key in PEM, without a password."""
    found = _key("private", private_key)
    return str(found.sign(PREFIX + digest.encode()).hex())


def require_signature(name: str, digest: str, signature: str | None, public_key: bytes) -> None:
    """Raise UnprovenError unless ``signature`` is one of ``digest`` by ``public_key`` (PEM)."""
    key = _key("public", public_key)
    if signature is None:
        raise UnprovenError(
            f"{name} has no signature ({SUFFIX} beside it), and one by the given key is asked for. "
            f"Have it signed, or load it without a key."
        )
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature.strip()), PREFIX + digest.encode())
    except (InvalidSignature, ValueError) as error:
        raise UnprovenError(
            f"The signature of {name} is not one of this map by the given key. Fetch both again, "
            f"or ask whoever signed it."
        ) from error


def _key(side: str, pem: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UnavailableError(
            "Signatures need the package cryptography: pip install 'trtllm-kvmap[signatures]'."
        ) from error
    try:
        found: Any
        if side == "private":
            found = serialization.load_pem_private_key(pem, password=None)
        else:
            found = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError) as error:
        raise FormatError(
            f"The {side} key is no PEM file of an unencrypted key ({error}); give one, such as "
            f"`openssl genpkey -algorithm ed25519` writes."
        ) from error
    wanted = ed25519.Ed25519PrivateKey if side == "private" else ed25519.Ed25519PublicKey
    if not isinstance(found, wanted):
        raise InputError(f"The {side} key is a {type(found).__name__}; an ed25519 key is needed.")
    return found
