"""What is recorded of a run, against what is there now: facts, keys, bytes, versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.artifacts import SCHEMA, CorruptArtifact, canonical_json
from tasks.certificates import software
from tasks.codecs import read_json
from tasks.provenance import Published, copied_facts, find_published
from tasks.run_facts import TOPICS, topic_of
from tasks.runs import Run
from tasks.store import Store


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not now as it was."""

    topic: str
    """One of `TOPICS`."""
    fact: str
    then: str
    now: str


def in_order(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Differences in the order of the pipeline."""
    return tuple(sorted(found, key=lambda one: TOPICS.index(one.topic)))


def recorded_differences(run: Run, store: Store) -> list[Difference]:
    """Where what is stored contradicts itself: facts, keys, bytes, the certificate's hashes."""
    made = run.made
    found = [
        Difference("statistics", name, "in the store", "no longer there") for name in made.gone
    ]
    stored = [*made.retain, *made.parts, made.solved, made.applied]
    if made.forget is not None and made.forget not in stored:
        stored.append(made.forget)
    for one in stored:
        found += _of_artifact(one, store)
    hashes = run.certificate.statistics if run.certificate is not None else ()
    for statistics in hashes:
        there = find_published(statistics.artifact, store)
        if there is not None and there.sha256 != statistics.sha256:
            name = f"{statistics.role}, {statistics.artifact}"
            found.append(Difference("statistics", name, statistics.sha256, there.sha256))
    return found


def _of_artifact(one: Published, store: Store) -> Iterator[Difference]:
    stage = one.name.split("/")[0]
    topic = "edit" if stage in ("solve", "apply") else "statistics"
    try:
        folder = store.fetch(one.artifact)
        copies = [copied_facts(one, store)]
        if stage == "solve":
            copies.append(read_json(folder / "edit.json")["facts"])
    except CorruptArtifact as error:
        yield Difference(topic, one.name, "as published", str(error))
        return
    for copy in copies:
        for name in dict.fromkeys([*one.facts, *copy]):
            then, now = (canonical_json(facts.get(name)).decode() for facts in (copy, one.facts))
            if then != now:
                yield Difference(topic_of(name), f"{one.name}, {name}", then, now)
    if one.schema is None:
        yield Difference(topic, f"key of {one.name}", one.key, "its facts give another key")
    elif one.schema != SCHEMA[stage]:
        then, now = str(one.schema), str(SCHEMA[stage])
        yield Difference("software", f"mathematics of stage {stage}", then, now)


def software_differences(run: Run) -> list[Difference]:
    """Versions, and the kind of machine, as far as they were recorded."""
    now = software()
    return [
        Difference("software", name, then, now.get(name, "not installed"))
        for name, then in run.software.items()
        if now.get(name) != then
    ]
