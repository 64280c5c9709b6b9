"""Settings of the method.  Frozen, complete, and each field explains itself."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_RHO = 0.03


class Config(BaseModel):
    """Base of every configuration: frozen, unknown keys refused, docstrings in the schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class RidgeConfig(Config):
    """Weights of the three terms of the objective (see `grom.solve`)."""

    w_retain: float = Field(default=100.0, ge=0)
    """Weight of the retain term, which is a mean over tokens."""
    w_forget: float = Field(default=1.0, gt=0)
    """Weight of the forget term, which is a mean over tokens."""
    rho: float | None = Field(default=None, gt=0)
    """Ridge as a share of the mean diagonal of A before the ridge; 0.03 if `mu` is not given."""
    mu: float | None = Field(default=None, gt=0)
    """Ridge as an absolute number, in squared key norm.  Excludes `rho`."""
    cache_retain: bool = False
    """Keep the Cholesky factor of the retain part, so that a forget set of few tokens is solved in
    O(N^2 s); needs `collect.keep_request_keys`, frozen keys, and N^2 x 8 bytes in the store for
    each system.  `rho` is then a share of the retain part's mean diagonal alone: every batch gets
    the same ridge, however it is solved."""

    @model_validator(mode="after")
    def _one_ridge(self) -> Self:
        if self.rho is not None and self.mu is not None:
            raise ValueError("give `rho` or `mu`, not both")
        if self.cache_retain and self.w_retain == 0:
            raise ValueError("`cache_retain` keeps a factor of the retain part: give it a weight")
        return self

    def ridge(self, mean_diagonal: float) -> float:
        """The ridge mu for an A whose diagonal has this mean before the ridge."""
        if self.mu is not None:
            return self.mu
        return (DEFAULT_RHO if self.rho is None else self.rho) * mean_diagonal


class TargetConfig(Config):
    """What the edit should make of a forget token (see `grom.target`)."""

    kind: Literal["replacement", "suppression", "redirect", "corruption"] = "replacement"
    """replacement: what a reference would say instead.  suppression: push the token down.
    redirect: one fixed token instead.  corruption: one random direction (hazardous knowledge)."""
    redirect_to: str | None = None
    """The token that `redirect` moves to, as text; its first token counts."""
    seed: int = 0
    """Seed of the random direction of `corruption`."""
    suppress_special: bool = False
    """Let special tokens (end of answer) be suppressed like any other.  The published code does so
    by accident, and answers run on; only for comparison with it (`paper_compat`)."""

    @model_validator(mode="after")
    def _redirect_needs_a_token(self) -> Self:
        if (self.kind == "redirect") != (self.redirect_to is not None):
            raise ValueError("`redirect_to` goes with `kind: redirect`, and only with it")
        return self


class SelectConfig(Config):
    """Which weights are edited."""

    site: Literal["mlp", "head"] = "mlp"
    """mlp: the output matrix of each MLP in a band of layers.  head: the LM head."""
    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Layers to edit, counted from 0.  Not given: the best contiguous band is searched."""
    width: int | None = Field(default=None, ge=1)
    """Layers in the searched band.  Not given: a fifth of the model's layers."""
    sample_examples: int = Field(default=300, ge=1)
    """Examples of each set that the search looks at."""
    joint: bool | None = None
    """Solve all layers of the band as one system, so that what they add up to leaves retain keys
    alone; keeps more of held-out retain, and needs the square of the band's summed inputs in
    memory.  Not given: yes for frozen keys up to 12,288 summed inputs."""


class CollectConfig(Config):
    """How keys are collected."""

    # Not `keys`: dict(model) would take it for the method of a mapping.
    order: Literal["frozen", "sequential"] = Field(default="frozen", alias="keys")
    """frozen: all sites from the unedited model in one pass.  sequential: layer by layer, each
    from the model with the layers below already edited, as the paper does."""
    batch_tokens: int = Field(default=2048, ge=16)
    """Tokens in one batch, padding included."""
    window_examples: int = Field(default=1024, ge=1)
    """Examples that are sorted by length together."""
    text_window: int = Field(default=512, ge=8)
    """Tokens in one window of running text."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory that the run may take; not given: what is free."""
    keep_request_keys: bool = False
    """Keep the keys of every request beside the moments, so that one can be withdrawn, and its
    influence measured anew, without its text.  They take tokens x inputs x 4 bytes a site, and tell
    what the text was about: gold tokens are among them."""

    @property
    def facts(self) -> dict[str, int]:
        """What determines the order in which tokens are summed."""
        return {"batch_tokens": self.batch_tokens, "window_examples": self.window_examples}


class AuditConfig(Config):
    """What is measured of each request's influence on the edit."""

    top: int = Field(default=3, ge=1)
    """Length of the lists of most and least influential requests."""
    refit: Literal["none", "extremes", "all"] = "extremes"
    """Whose influence is also measured with s, mu and alpha anew, which takes a whole solve each:
    nobody's, of those in the two lists, or everybody's."""
    exact_log_probs: bool = False
    """Also run the model with and without each of the most influential requests, and measure its
    own answers: direct effects leave out what happens on the way to the last layer."""
    retain_groups: int = Field(default=0, ge=0)
    """Retain groups, spread evenly over the set, whose absence is measured: what they protect."""


class AutoStrength(Config):
    """Search the strength: forget enough, but never at the cost of held-out retain."""

    forget_probability: float | None = Field(default=None, gt=0, lt=1)
    """Mean answer probability on the forget set to reach.  Not given: the reference model's level,
    or .2 without a reference."""
    utility_floor: float | None = Field(default=0.9, gt=0, le=1)
    """Share of the held-out retain probability before the edit that must stay; null: no floor."""
    probe_examples: int = Field(default=100, ge=1)
    """Examples of each set that the search measures on."""
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    """Relative width of the bracket at which the bisection stops."""
    max_nats: float = Field(default=400.0, gt=0)
    """Where the search gives up."""


class StrengthConfig(Config):
    """How hard to push: exactly one of the three."""

    nats: float | None = Field(default=None, gt=0)
    """Mean direct drop of the suppressed tokens' logits, in nats, summed over the sites."""
    beta: float | None = Field(default=None, gt=0)
    """Length of the target shift, as in the paper.  Means nothing across models."""
    auto: AutoStrength | None = None
    """Search it (the default)."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("nats", "beta", "auto") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of `nats`, `beta` and `auto`, not {' and '.join(given)}")
        return self

    @property
    def search(self) -> AutoStrength | None:
        """The search to run, or None if the strength is given."""
        if self.nats is None and self.beta is None:
            return self.auto or AutoStrength()
        return None


class ModelConfig(Config):
    """A model, and how to open it."""

    source: str
    """Hub id, local folder, `models:/name@alias` (registered), or `package:NAME` (an installed
    Python package that carries the weights)."""
    revision: str | None = None
    """Commit of a hub model; pin it."""
    gguf_file: str | None = None
    """File name within the source, if the weights come as GGUF."""
    adapter: str | None = None
    """Folder of a PEFT adapter to merge into the weights first."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the weights are held and the edited checkpoint is stored."""


class DataConfig(Config):
    """A set of examples: which files, which columns, which rows."""

    uri: str
    """File, folder, prefix or glob on any fsspec scheme, or `hub:NAME[:CONFIG[:SPLIT]]`.
    JSON Lines (.json, .jsonl, also .gz and .zst) and Parquet."""
    prompt: str = "prompt"
    """Column of the question."""
    answer: str = "answer"
    """Column of the answer."""
    paraphrase: str | None = None
    """Column of the question in other words, if there is one; it is asked as well."""
    text: str = "text"
    """Column of running text, where a row has no prompt."""
    group: str = "request_id"
    """Column of the request or subject that a row belongs to, if there is one."""
    group_rows: int | None = Field(default=None, ge=1)
    """Without such a column: that many consecutive rows make a group."""
    only: tuple[str, ...] | None = None
    """Take only rows of these groups."""
    without: tuple[str, ...] = ()
    """Leave out rows of these groups."""
    skip: int = Field(default=0, ge=0)
    """Leave out that many rows at the start."""
    every: int = Field(default=1, ge=1)
    """Then take only every so many-th row."""
    limit: int | None = Field(default=None, ge=1)
    """Take only so many rows."""
    bad_rows: Literal["fail", "quarantine"] = "fail"
    """fail: the first bad row ends the run.  quarantine: it is left out and listed by place."""


class HoldOutConfig(Config):
    """Which retain groups are kept out of the keys, so that the honest utility can be measured."""

    every: int = Field(default=10, ge=2)
    """Every so many-th group."""

    def holds(self, group_number: int) -> bool:
        """Whether this group is held out."""
        return group_number % self.every == self.every - 1


class EvaluateConfig(Config):
    """What is measured before and after the edit, and how the edited checkpoint is attacked."""

    max_examples: int = Field(default=400, ge=1)
    """Examples per set, spread evenly over it."""
    quantisations: tuple[Literal["nf4", "fp4", "int8", "int4"], ...] = ("nf4", "int4")
    """Quantised loads of the edited checkpoint that are measured, too."""
    quantise_head: bool | None = None
    """Quantise the LM head as well.  Not given: only if the edit is there, for an edit of weights
    that a load leaves alone is not tested by it."""
    health_examples: int = Field(default=24, ge=0)
    """Forget prompts that the model answers freely, to see whether it still speaks.  With 0 the
    gate's conditions on free answers fail, unless they are null."""
    health_tokens: int = Field(default=64, ge=8)
    """Longest of these answers, in tokens."""


class Band(Config):
    """How far a set's value may be from the reference model's, either way: forgetting more than a
    model that never knew is a fault, too."""

    set: str
    """Name of the set: forget; retain, held out; ..."""
    within: float = Field(ge=0, le=1)
    """Largest distance of the mean answer probabilities."""


class GateConfig(Config):
    """What the edited model must fulfil to pass.  A NaN fails."""

    max_forget_probability: float = Field(default=0.5, gt=0, le=1)
    """Mean answer probability left on the forget set."""
    min_held_out_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the held-out retain probability that must be left: the utility floor."""
    max_recovery: float = Field(default=0.05, ge=0, le=1)
    """How much forget probability an attack (a quantised load, a paraphrased question) may bring
    back."""
    reference_bands: tuple[Band, ...] = ()
    """Sets whose mean answer probability must be near the reference (retrained) model's."""
    max_repetition: float | None = Field(default=0.5, gt=0, le=1)
    """Mean share of repeated 4-grams in free answers to forget prompts; null: not asked."""
    max_empty_rate: float | None = Field(default=0.1, ge=0, le=1)
    """Share of empty free answers to forget prompts; null: not asked."""
    max_degenerate_rate: float | None = Field(default=0.25, ge=0, le=1)
    """Share of free answers without a word, or mostly repetition; null: not asked."""
