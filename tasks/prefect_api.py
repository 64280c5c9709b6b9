"""The Prefect server, asked directly: a client whose failures have names and cures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from grom.errors import ConfigError, ResourceError

TIMEOUT_S = 20.0


class ServerUnreachable(ResourceError):
    """The Prefect server did not answer, or answered with an error of its own."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: no usable answer of the Prefect server ({reason}). Check that "
            "PREFECT_API_URL ends in /api and the server runs (`grom up`). Batches wait "
            "meanwhile, nothing is lost."
        )


class ServerRefused(ConfigError):
    """The Prefect server does not accept who asks."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: the Prefect server refuses access. Set PREFECT_API_AUTH_STRING to the "
            "server's PREFECT_SERVER_API_AUTH_STRING."
        )


@contextmanager
def server() -> Iterator[tuple[SyncPrefectClient, str]]:
    """A client, and the server's address for messages.

    Raises:
        ServerUnreachable: no server is named, it does not answer, or with what no Prefect server
            says.  What a block does not catch of the client's own errors counts as that.
        ServerRefused: it wants other credentials.
    """
    address = get_current_settings().api.url
    if not address:  # a client would start a server of its own, where nobody works
        raise ServerUnreachable("Prefect", "PREFECT_API_URL is not set")
    parts = urlsplit(address)
    where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        with get_client(httpx_settings={"timeout": TIMEOUT_S}, sync_client=True) as client:
            yield client, where
    except PrefectHTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise ServerRefused(where) from None
        raise ServerUnreachable(where, f"HTTP {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(where, type(error).__name__) from error
    except ValueError as error:
        raise ServerUnreachable(where, "it is not the API of a Prefect server") from error


def now_of(client: SyncPrefectClient) -> float:
    """The server's clock, in whole seconds since 1970; this machine's if it does not say."""
    said = client.hello().headers.get("date")
    return parsedate_to_datetime(said).timestamp() if said else time.time()
