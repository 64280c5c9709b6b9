"""A signature holds for one document and one key, and the private key is shown nowhere."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from grom.certificate import BrokenCertificate, changed_parts, read_certificate
from grom.errors import ConfigError
from grom.signing import (
    new_private_key,
    public_pem,
    read_private_key,
    read_public_key,
    sealed,
    signature_holds,
)
from tests.documents import a_certificate, a_key


def test_a_signed_document_holds_and_names_its_key() -> None:
    key = a_key()
    whole = sealed(a_certificate(), key)
    assert whole.signature is not None
    assert whole.signature.public_key == read_public_key(public_pem(key), "key.pub")
    assert whole.authenticity == "signed with Ed25519"
    assert signature_holds(read_certificate(whole.to_bytes(), "file"))
    assert sealed(a_certificate(), key) == whole


def test_an_unsigned_document_says_so_and_holds_for_nobody() -> None:
    whole = sealed(a_certificate(), None)
    assert whole.signature is None
    assert whole.authenticity.startswith("not signed")
    assert changed_parts(whole) == []
    assert not signature_holds(whole)


def test_any_byte_that_is_changed_is_found() -> None:
    data = sealed(a_certificate(), a_key()).to_bytes()
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            found = read_certificate(bytes(changed), "file")
        except BrokenCertificate:
            continue
        assert not signature_holds(found), at
        in_signature = found.signature != read_certificate(data, "file").signature
        assert changed_parts(found) or in_signature, at


def test_the_signature_of_another_key_or_document_does_not_hold() -> None:
    one, other = sealed(a_certificate(), a_key()), sealed(a_certificate(), a_key())
    assert one.signature is not None
    assert other.signature is not None
    swapped = one.signature.model_copy(update={"public_key": other.signature.public_key})
    assert not signature_holds(one.model_copy(update={"signature": swapped}))
    moved = a_certificate(approver="Kim").digested()
    assert not signature_holds(moved.model_copy(update={"signature": one.signature}))


def test_what_is_no_private_key_is_refused_without_showing_it() -> None:
    elliptic = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    locked = a_key().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    good = new_private_key().decode()
    for text in (elliptic.decode(), locked.decode(), "secret", "", good[:-40], good[30:]):
        with pytest.raises(ConfigError, match="GROM_SIGNING_KEY: not an Ed25519") as caught:
            read_private_key(text, "GROM_SIGNING_KEY")
        assert "secret" not in str(caught.value)
        assert text == "" or text[40:60] == "" or text[40:60] not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_public_key_is_pem_or_hex() -> None:
    key = a_key()
    digits = read_public_key(public_pem(key), "key.pub")
    assert read_public_key(f" {digits.upper()}\n".encode(), "key.hex") == digits
    for text in (b"", b"abc", digits[:-1].encode(), new_private_key()):
        with pytest.raises(ConfigError, match=r"key.pub: not an Ed25519 public key"):
            read_public_key(text, "key.pub")
