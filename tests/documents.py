"""A certificate made up from nothing, and keys to sign it with."""

from __future__ import annotations

import math
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from grom.certificate import Certificate, not_covered
from grom.certified import (
    Base,
    CertifiedAttack,
    CertifiedCondition,
    CertifiedEdit,
    CertifiedModel,
    CertifiedRequest,
    Measured,
    Statistics,
)
from grom.ledger import GENESIS
from grom.signing import new_private_key, read_private_key

NOON = "2026-01-02T12:00:00+00:00"
HASH = "ab" * 32
INFLUENCE = {"frozen": 0.25, "own_effect_nats": 3.5, "num_tokens": 12, "share": 1.0}


def a_key() -> Ed25519PrivateKey:
    """A new signing key."""
    return read_private_key(new_private_key().decode(), "test")


def hash_of(number: int) -> str:
    """Any hash."""
    return f"{number:064x}"


def measured(model: str, precision: str, name: str, probability: float) -> Measured:
    return Measured(
        model=model,
        precision=precision,
        set=name,
        num_examples=4,
        values={"probability": probability, "token_accuracy": 0.5},
    )


def a_certificate(**changes: Any) -> Certificate:
    """A batch's, of two requests, one refused; neither digested nor signed."""
    requests = (
        CertifiedRequest(request=hash_of(1), state="honoured", influence=INFLUENCE),
        CertifiedRequest(request=hash_of(2), state="refused", reason="no token of its own"),
    )
    whole: dict[str, Any] = {
        "batch": "october",
        "run": "run-1",
        "manifest_sha256": HASH,
        "received": NOON,
        "started": NOON,
        "certified": NOON,
        "requests": requests,
        "influence_note": "exact at every site",
        "base": Base(source="hub/base", fingerprint="12" * 16),
        "model": CertifiedModel(
            name="support",
            version="7",
            dtype="bfloat16",
            files={"model.safetensors": HASH},
            untouched_sha256=HASH,
        ),
        "edit": CertifiedEdit(
            key="3" * 16,
            checkpoint="4" * 16,
            files={"edit.safetensors": HASH},
            edited={"w": HASH},
            alpha_sha256=HASH,
            nats=12.0,
            beta=3.5,
            stopped_by="forget level",
        ),
        "statistics": (Statistics(role="retain", artifact="collect/aa", sha256=HASH),),
        "settings": {"name": "support", "model": {"source": "hub/base"}},
        "measured": (
            measured("unedited", "bfloat16", "forget", 0.9),
            measured("edited", "bfloat16", "forget", 0.1),
            measured("edited", "nf4", "forget", math.nan),
            measured("unedited", "bfloat16", "retain, held out", 0.8),
            measured("edited", "bfloat16", "retain, held out", 0.7),
        ),
        "free_answers": {"edited": {"repetition": 0.0}},
        "gate": (
            CertifiedCondition(
                name="forget probability",
                value=0.1,
                limit=0.5,
                at_most=True,
                passed=True,
                margin=0.4,
            ),
        ),
        "attacks": (
            CertifiedAttack(
                name="nf4",
                verdict="removed",
                measure="probability",
                unedited=0.9,
                edited=0.1,
                attacked=0.1,
                ceiling=0.9,
                floor=0.1,
                recovered_share=0.0,
                num_examples=4,
                reason="nothing comes back (0%)",
            ),
        ),
        "approver": "gate",
        "software": {"python": "3.12"},
        "ledger_head": GENESIS,
        "not_covered": not_covered(has_earlier=False, has_refused=True),
    }
    return Certificate(**(whole | changes))
