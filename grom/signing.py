"""Ed25519 signatures of certificates.

The private key is read when it is used, and never becomes part of a value, a message or a log.
"""

from __future__ import annotations

import re

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grom.certificate import Certificate
from grom.certified import Signature
from grom.errors import ConfigError

SIGNED = "signed with Ed25519"
UNSIGNED = "not signed: nothing but its entry in the ledger tells whether it is as it was made"
KEYGEN = "`grom keygen FILE` makes one"


def read_private_key(pem: str, where: str) -> Ed25519PrivateKey:
    """The key of a PEM text without a passphrase.

    Args:
        pem: the text.
        where: what to call it in a message; the text itself is never shown.

    Raises:
        ConfigError: it is not one.
    """
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        # Not chained: the parser's error may quote what it read.
        raise ConfigError(
            f"{where}: not an Ed25519 private key in PEM without a passphrase; {KEYGEN}."
        ) from None
    return key


def read_public_key(text: bytes, where: str) -> str:
    """A public key, from PEM or from 64 hex digits, as 64 hex digits.

    Raises:
        ConfigError: it is neither.
    """
    if re.fullmatch(rb"\s*[0-9a-fA-F]{64}\s*", text):
        return text.strip().decode().lower()
    try:
        key = serialization.load_pem_public_key(text)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"{where}: not an Ed25519 public key; give the file FILE.pub that `grom keygen FILE` "
            "wrote, or its 64 hex digits."
        ) from None
    return _hex(key)


def new_private_key() -> bytes:
    """A new key as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """The public half as PEM."""
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def sealed(certificate: Certificate, key: Ed25519PrivateKey | None) -> Certificate:
    """With digests of its parts and, if there is a key, signed."""
    words = UNSIGNED if key is None else SIGNED
    whole = certificate.model_copy(update={"authenticity": words}).digested()
    if key is None:
        return whole
    value = key.sign(whole.signed_bytes()).hex()
    signature = Signature(public_key=_hex(key.public_key()), value=value)
    return whole.model_copy(update={"signature": signature})


def signature_holds(certificate: Certificate) -> bool:
    """Whether the document is signed, and as it was when the key that it names signed it."""
    if certificate.signature is None:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(certificate.signature.public_key))
        key.verify(bytes.fromhex(certificate.signature.value), certificate.signed_bytes())
    except (InvalidSignature, ValueError):
        return False
    return True


def _hex(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw.hex()
