"""What an export came to, and the page that goes with an adapter."""

from __future__ import annotations

from dataclasses import dataclass

VLLM_MAX_RANK = 512
"""The largest of vLLM's choices for `--max-lora-rank`."""


@dataclass(frozen=True, slots=True)
class SiteExport:
    """The adapter of one weight."""

    site: str
    rank: int
    """Singular values that it has."""
    full_rank: int
    """Numerical rank of P: from there on the adapter is exact."""
    error: float
    """|P - B A| / |P|, the rounding to its dtype included."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to."""

    sites: tuple[SiteExport, ...]
    is_exact: bool
    """Whether no singular value was left out."""
    error: float
    """|P - B A| / |P| over all sites, the rounding to its dtype included."""
    num_bytes: int
    """Of the adapter."""
    tied_head: bool | None
    """Whether the adapter is on a head that is tied to the embedding; None: not known."""
    metrics: dict[str, dict[str, dict[str, float]]] | None = None
    """Set -> model (unedited, edited, adapter) -> measure -> value."""


def card_of(found: Exported, rank: int) -> str:
    """The README of an adapter whose largest rank is `rank`."""
    exact = "exact up to the rounding of its dtype" if found.is_exact else "truncated"
    lines = ["---", "library_name: peft", "---", "", "# An unlearning edit as a LoRA adapter", ""]
    lines += [
        f"The adapter is {exact}: |P - BA| / |P| = {found.error:.2e} over all sites.",
        f"Largest rank {rank}, scaling 1 at every site, {found.num_bytes / 1e6:.1f} MB.",
        "",
        "| site | rank | rank of P | relative error |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {site.site} | {site.rank} | {site.full_rank} | {site.error:.2e} |"
        for site in found.sites
    ]
    if found.metrics is not None:
        lines += ["", "| set | model | probability | token accuracy |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {name} | {model} | {values['probability']:.3f} | {values['token_accuracy']:.3f} |"
            for name, models in found.metrics.items()
            for model, values in models.items()
        ]
    return "\n".join([*lines, *_notes(found, rank), ""])


def _notes(found: Exported, rank: int) -> list[str]:
    lines = []
    if found.tied_head is not False:
        tied = "The base ties" if found.tied_head else "If the base ties"
        lines += [
            "",
            f"{tied} its head to the input embedding: use the adapter unmerged. "
            "`merge_and_unload` would add it to the embedding as well; for a merged model apply "
            "the edit (`grom apply`), which unties the head first.",
        ]
    larger = f"; export with `--rank {VLLM_MAX_RANK}` for it" if rank > VLLM_MAX_RANK else ""
    lines += [
        "",
        f"vLLM needs a `--max-lora-rank` of at least {rank}, and offers up to {VLLM_MAX_RANK}"
        f"{larger}. It reads one rank and one scaling for all modules, so export with "
        "`--uniform-rank`. This is what its documentation and source say; it was not run with "
        "this adapter.",
    ]
    return lines
