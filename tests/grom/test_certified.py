"""Parts of a certificate take hashes where hashes belong, and nothing besides what they name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from grom.certified import CertifiedRequest, Signature, Statistics
from tests.documents import HASH


def test_hashes_have_their_length() -> None:
    assert CertifiedRequest(request=HASH, state="honoured").influence is None
    with pytest.raises(ValidationError):
        CertifiedRequest(request=HASH[:-1], state="honoured")
    with pytest.raises(ValidationError):
        Signature(public_key=HASH, value=HASH)


def test_unknown_fields_and_roles_are_refused() -> None:
    with pytest.raises(ValidationError):
        CertifiedRequest.model_validate({"request": HASH, "state": "honoured", "name": "Erika"})
    with pytest.raises(ValidationError):
        Statistics.model_validate({"role": "else", "artifact": "collect/a", "sha256": HASH})
