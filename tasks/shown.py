"""What of a run's settings may be shown: on its page, in MLflow, on a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GROUPS = ("only", "without")
"""Settings that name people."""
PASSWORD = re.compile(r"://[^/@\s]*@")
QUERY = re.compile(r"(https?://[^\s?#]*)\?[^\s#]*")
"""Signed addresses carry their signature there."""


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that may be passed on: no password or signature in an address, groups counted, not
    named."""

    def shown(key: str, value: Any) -> Any:
        if key in GROUPS and value:
            return f"{len(value)} groups"
        if isinstance(value, Mapping):
            return {inner: shown(inner, item) for inner, item in value.items()}
        if isinstance(value, list | tuple):
            return [shown("", item) for item in value]
        if isinstance(value, str):
            return QUERY.sub(r"\1?***", PASSWORD.sub("://***@", value))
        return value

    return {key: shown(key, value) for key, value in settings.items()}
