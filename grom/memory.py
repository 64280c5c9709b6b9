"""How much memory a run will take, before it starts.

Shapes: N inputs of W, M outputs of W, D hidden size, V vocabulary, K distinct forget tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grom.forward import LOGIT_BLOCK

FLOAT64, FLOAT32 = 8, 4
GB = 1e9
RUNTIME_BYTES = 0.7e9
"""Interpreter and libraries: torch, transformers, prefect, mlflow, pyarrow; measured on CPU."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """The sizes that determine a run's memory."""

    model_bytes: int
    reference_bytes: int
    num_systems: int
    """Ridge systems: one per site, or one for all."""
    num_inputs: int
    """Inputs of one system."""
    num_outputs: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_forget_types: int
    num_forget_pairs: int
    """Pairs of a forget token and its replacement: at most the forget positions, 0 without any."""
    batch_tokens: int
    probe_tokens: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory by phase and term, in bytes."""

    phases: Mapping[str, Mapping[str, float]]

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> float:
        """What that phase needs."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def largest_term(self) -> str:
        """The largest term of that phase, with its size."""
        terms = self.phases[self.peak_phase]
        name = max(terms, key=terms.__getitem__)
        return f"{name} while {self.peak_phase} ({terms[name] / GB:.1f} GB)"


def forecast(shape: RunShape) -> Forecast:
    """Peak memory of each phase.  No term depends on the number of retain tokens.

    The probe and the distinct forget tokens are bounded by the configuration and the vocabulary.
    Replacement targets keep a sum for each pair of a token and what to say instead, so that further
    batches add up exactly; of 7,275 positions of TOFU's answers 4,012 pairs.
    """
    gram = shape.num_inputs**2 * FLOAT64
    vector = shape.num_inputs * FLOAT64
    sums, pairs = shape.num_forget_types * vector, shape.num_forget_pairs * vector
    weight = shape.num_outputs * shape.num_inputs
    model = {"runtime": RUNTIME_BYTES, "model": float(shape.model_bytes)}
    activations = shape.batch_tokens * (
        6 * shape.num_inputs + 12 * shape.hidden_size + shape.num_systems * shape.num_inputs
    )
    logits = 3 * min(LOGIT_BLOCK, shape.batch_tokens) * shape.vocab_size
    running = {
        "activations": float(activations * FLOAT32),
        "logits": float(logits * FLOAT32),
    }
    outputs = shape.batch_tokens * shape.num_layers * shape.hidden_size * FLOAT32
    return Forecast(
        {
            "selecting": {**model, **running, "layer outputs": float(outputs)},
            "collecting": {
                **model,
                "reference": float(shape.reference_bytes),
                **running,
                "moments": float(shape.num_systems * (gram + sums)),
                "sums by pair": float(shape.num_systems * pairs),
            },
            "solving": {
                **model,
                "moments of a system": float(3 * gram + sums),
                "sums by pair": float(pairs),
                "target": float(2 * sums),
                "factor": float(2 * gram),
                "updates": float(shape.num_systems * weight * FLOAT64),
            },
            "calibrating": {
                **model,
                "reference": float(shape.reference_bytes),
                **running,
                "updates and originals": float(shape.num_systems * weight * (FLOAT64 + FLOAT32)),
                "probe": float(shape.probe_tokens * shape.hidden_size * FLOAT32),
            },
        }
    )
