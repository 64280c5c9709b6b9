"""Metrics of unlearning: arrays in, numbers with their reading out."""

from grom.metrics.choice import choice_accuracy, letter_counts, shuffled_agreement
from grom.metrics.composite import (
    distance_to_reference,
    final_muse,
    final_tofu,
    final_wmdp,
    harmonic,
    memorisation_score,
    overall_score,
    privacy_score,
    utility_rel,
)
from grom.metrics.facts import Reading, counterfact, token_accuracy, zsre
from grom.metrics.health import generation_health, rep_4
from grom.metrics.ks import ks_test
from grom.metrics.membership import (
    MinK,
    auc,
    loss_score,
    membership_auc,
    min_k,
    min_k_plus_plus,
    reference_score,
    s_mia,
    zlib_score,
)
from grom.metrics.memorisation import exact_memorisation, extraction_strength
from grom.metrics.metric import Better, Metric, Variant, mean_metric, not_computed
from grom.metrics.muse import AUC_RETRAIN, knowmem, priv_leak, verbmem
from grom.metrics.text import Rouge, rouge1, rouge_l, until_stop, words
from grom.metrics.tofu import (
    TruthRatio,
    forget_quality,
    forget_truth_ratio,
    model_utility,
    normalised_probability,
    probability,
    retain_truth_ratio,
    truth_ratio,
)

__all__ = [
    "AUC_RETRAIN",
    "Better",
    "Metric",
    "MinK",
    "Reading",
    "Rouge",
    "TruthRatio",
    "Variant",
    "auc",
    "choice_accuracy",
    "counterfact",
    "distance_to_reference",
    "exact_memorisation",
    "extraction_strength",
    "final_muse",
    "final_tofu",
    "final_wmdp",
    "forget_quality",
    "forget_truth_ratio",
    "generation_health",
    "harmonic",
    "knowmem",
    "ks_test",
    "letter_counts",
    "loss_score",
    "mean_metric",
    "membership_auc",
    "memorisation_score",
    "min_k",
    "min_k_plus_plus",
    "model_utility",
    "normalised_probability",
    "not_computed",
    "overall_score",
    "priv_leak",
    "privacy_score",
    "probability",
    "reference_score",
    "rep_4",
    "retain_truth_ratio",
    "rouge1",
    "rouge_l",
    "s_mia",
    "shuffled_agreement",
    "token_accuracy",
    "truth_ratio",
    "until_stop",
    "utility_rel",
    "verbmem",
    "words",
    "zlib_score",
    "zsre",
]
