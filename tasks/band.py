"""The band of layers that all batches of a service share: statistics of other layers do not add.

bands/<hash>.json     created by the first run that chose one; of model and settings
"""

from __future__ import annotations

import hashlib
import json
import logging

from grom.config import SelectConfig
from grom.errors import GromError
from tasks.artifacts import canonical_json
from tasks.place import ModelRef, Place, SitesRef

logger = logging.getLogger(__name__)
BANDS = "bands"


class BandTaken(GromError):
    """Another run chose other layers first."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: another run chose other layers meanwhile. Start this run again.")


def pinned(model: ModelRef, config: SelectConfig, place: Place) -> SelectConfig:
    """The same settings with the layers that an earlier run chose, if one did."""
    found = place.open().read(_name(model, config))
    if found is None:
        return config
    layers = tuple(json.loads(found.data)["layers"])
    logger.info("select: layers %s, as earlier batches", list(layers))
    return config.model_copy(update={"layers": layers})


def pin(model: ModelRef, config: SelectConfig, sites: SitesRef, place: Place) -> None:
    """Make the layers those of all later batches.

    Args:
        model: the model.
        config: the settings as the service has them, without pinned layers.
        sites: what was chosen.
        place: store.

    Raises:
        BandTaken: another run was first, with others.
    """
    if not sites.layers:
        return  # the head: there is nothing to choose
    name = _name(model, config)
    if not place.open().create(name, canonical_json({"layers": list(sites.layers)})):
        raise BandTaken(name)


def _name(model: ModelRef, config: SelectConfig) -> str:
    facts = {"model": model.fingerprint, "select": config.model_dump(mode="json")}
    return f"{BANDS}/{hashlib.sha256(canonical_json(facts)).hexdigest()[:16]}.json"
