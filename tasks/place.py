"""Where a run keeps its things, and the references that tasks hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grom.config import Config, DataConfig, HoldOutConfig
from grom.errors import DataError
from grom.examples import Example
from tasks.rows import HUB, read_examples, source_files
from tasks.store import Artifact, Store

Part = Literal["all", "seen", "held out"]


class Place(Config):
    """The folder for scratch, and the store for artifacts."""

    work: str
    """Local folder."""
    store: str
    """Root of the artifacts: a local folder or an fsspec address."""

    def open(self) -> Store:
        """The store."""
        return Store(self.store, Path(self.work) / "scratch")

    def cached(
        self,
        stage: str,
        facts: dict[str, Any],
        make: Callable[[Path], None],
        expected_bytes: int = 0,
    ) -> tuple[Artifact, bool]:
        """The artifact of these facts, made now if it is not in the store.

        Returns:
            the artifact, and whether it was there already.
        """
        store = self.open()
        if (found := store.find(stage, facts)) is not None:
            return found, True
        with store.publish(stage, facts, expected_bytes=expected_bytes) as folder:
            make(folder)
        made = store.find(stage, facts)
        assert made is not None
        return made, False

    def fetch(self, artifact: Artifact) -> Path:
        """A local folder with the artifact's files."""
        return self.open().fetch(artifact)


class ModelRef(Config):
    """A plain checkpoint on disk."""

    folder: str
    fingerprint: str
    """Hash of every byte that determines the model."""
    source: str
    """What the configuration calls it."""


class DataRef(Config):
    """A set of examples that was checked from the first row to the last."""

    role: str
    config: DataConfig
    digest: str
    num_rows: int
    num_bad: int = 0
    hold_out: HoldOutConfig | None = None
    versions: tuple[tuple[str, str], ...] = ()
    """Each file with what changes when it does."""
    origin: str | None = None
    """Where the rows came from, if the files are a copy of them."""

    @property
    def address(self) -> str:
        """Where the rows are from, for people."""
        return self.origin or self.config.uri

    @property
    def facts(self) -> dict[str, Any]:
        """What determines the examples and their order; not where they lie."""
        settings = self.config.model_dump(mode="json", exclude={"uri"})
        hold_out = self.hold_out and self.hold_out.model_dump()
        return {"digest": self.digest, "rows": settings, "hold_out": hold_out}

    def paraphrased(self) -> DataRef | None:
        """The same rows with their question in other words; None if the data have none."""
        if self.config.paraphrase is None:
            return None
        changed = {"prompt": self.config.paraphrase, "paraphrase": None}
        return self.model_copy(update={"config": self.config.model_copy(update=changed)})

    def examples(self, part: Part = "all") -> Iterator[Example]:
        """Stream the examples again.

        Raises:
            DataError: a file is not as it was when the set was loaded.
        """
        if not self.config.uri.startswith(HUB):
            now = {file.path: file.version for file in source_files(self.config.uri)}
            if changed := sorted(set(now.items()) ^ set(self.versions)):
                raise DataError(
                    f"{changed[0][0]}: changed while the run was reading it. Start the run again."
                )
        quarantine = self.config.bad_rows == "quarantine"
        for example in read_examples(self.config, (lambda _: None) if quarantine else None):
            held = self.hold_out is not None and self.hold_out.holds(example.group_number)
            if part == "all" or held == (part == "held out"):
                yield example


class CountRef(Config):
    """Token counts and specificity."""

    artifact: Artifact
    num_forget: int
    """Forget examples; windows of running text count one each."""
    num_seen: int
    """Retain examples whose keys the solver sees."""
    num_background: int
    """Background examples, whose keys it sees as well."""
    num_held_out: int
    num_forget_tokens: int
    num_seen_tokens: int
    num_suppressed: int
    """Forget positions with alpha > 0."""
    num_forget_types: int
    """Distinct forget tokens."""


class SitesRef(Config):
    """The chosen sites."""

    artifact: Artifact
    kind: Literal["mlp", "head"]
    layers: tuple[int, ...]
    joint: bool
    """Whether all layers are solved as one system."""


class CollectRef(Config):
    """Moments of one set at every site."""

    artifact: Artifact
    reused: bool
    seconds: float


class EditRef(Config):
    """An edit on disk."""

    artifact: Artifact
    seconds: float
    """Time of the solve alone."""
    nats_per_beta: float
    """Direct drop of the whole edit at unit strength, in nats."""


class CalibrationRef(Config):
    """The chosen strength."""

    artifact: Artifact
    beta: float
    nats: float
    stopped_by: str


class CheckpointRef(Config):
    """The edited checkpoint."""

    artifact: Artifact
    fingerprint: str
    num_changed: int
    seconds: float


class ScoreRef(Config):
    """Scores of one model on every set."""

    artifact: Artifact
    label: str
    """unedited, edited, edited nf4."""
    sets: dict[str, dict[str, float]]
    """Set -> measure -> value."""
    health: dict[str, float] = Field(default_factory=dict)
    """Rates of free answers to forget prompts: repetition, empty rate, ..."""
    quantised_modules: tuple[str, ...] = ()
    """Modules whose class the quantised load changed."""
