"""Low-precision loads of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grom.errors import ConfigError
from grom.quantize import BLOCK_WEIGHTS, SCHEMES, Scheme, quantise_int4_
from grom.sites import family_of, untie_
from tasks.models import damage_named

CLASSES: dict[Scheme, str] = {
    "nf4": "Linear4bit",
    "fp4": "Linear4bit",
    "int8": "Linear8bitLt",
    "int4": "Int4Linear",
}
OUTLIER = 6.0
"""Activations from here on are multiplied in float16 (LLM.int8, arXiv 2208.07339)."""
INT8_LOGGER = "bitsandbytes.autograd._functions"


def load_quantised(
    folder: Path, quantisation: str, *, head: bool, device: str
) -> tuple[Any, tuple[str, ...]]:
    """Load a plain checkpoint in low precision.

    `nf4`, `fp4` and `int8` are bitsandbytes', as a server would load them, on CPU as well; 4-bit
    computes in float32.  `int4` is `grom.quantize.Int4Linear`.  All of them leave the LM head in
    full precision unless it is asked for; then a tied head is untied, and the embedding stays.

    Args:
        folder: checkpoint.
        quantisation: nf4, fp4, int8 or int4.
        head: also quantise the LM head.
        device: where to, cpu or cuda.

    Returns:
        the model, and the names of the modules whose class the load changed.

    Raises:
        BrokenCheckpoint: config or weights cannot be read.
        ConfigError: no such scheme; bitsandbytes cannot do it; no module was quantised, or not
            the head although it was asked for.
        UnknownFamily: there is no rule that says which module is the head.
    """
    scheme = _scheme(quantisation)
    model = _open(folder, scheme, device)
    if scheme == "int4":
        quantise_int4_(model, head=head)
    elif head:
        with _quantiser_named(folder, scheme):
            _quantise_head_(model, scheme)
    names = _quantised_modules(model, scheme)
    if not names:
        raise ConfigError(f"{folder}: asked for {scheme}, but no module was quantised")
    if head and family_of(model).head not in names:
        raise ConfigError(f"{folder}: asked for {scheme} of the LM head, but it is as it was")
    if CLASSES[scheme] == "Linear4bit" and device == "cpu":
        _refuse_odd_widths(model, names, folder, scheme)
    return model, names


def _scheme(name: str) -> Scheme:
    for scheme in SCHEMES:
        if scheme == name:
            return scheme
    raise ConfigError(f"unknown quantisation {name!r}; known: {', '.join(SCHEMES)}")


def _open(folder: Path, scheme: Scheme, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": "auto", "device_map": device}
    with damage_named(folder):
        if scheme == "int4":
            return AutoModelForCausalLM.from_pretrained(folder, **options)
        AutoConfig.from_pretrained(folder)  # what is wrong from here on is not the config
        with _quantiser_named(folder, scheme):
            how: Any = BitsAndBytesConfig
            if scheme == "int8":
                # It warns in every call that activations pass float16: that is the method.
                logging.getLogger(INT8_LOGGER).setLevel(logging.ERROR)
                options["quantization_config"] = how(load_in_8bit=True, llm_int8_threshold=OUTLIER)
            else:
                options["quantization_config"] = how(
                    load_in_4bit=True,
                    bnb_4bit_quant_type=scheme,
                    bnb_4bit_compute_dtype=torch.float32,
                )
            return AutoModelForCausalLM.from_pretrained(folder, **options)


@contextmanager
def _quantiser_named(folder: Path, scheme: Scheme) -> Iterator[None]:
    """Turn what bitsandbytes cannot do into an error that does not blame the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"{folder}: bitsandbytes does not load this model in {scheme} "
            f"({type(error).__name__}: {error}). Take another scheme; int4 needs no bitsandbytes."
        ) from error


def _quantise_head_(model: nn.Module, scheme: Scheme) -> None:
    """Replace the head, which bitsandbytes leaves alone and refuses if it is tied."""
    import bitsandbytes

    untie_(model)
    name = family_of(model).head
    head: Any = model.get_submodule(name)
    device, weight = head.weight.device, head.weight.detach().cpu()  # moving it quantises
    sizes = (head.in_features, head.out_features, head.bias is not None)
    new: Any
    with torch.device("meta"):
        if scheme == "int8":
            new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=OUTLIER)
        else:
            how = {"quant_type": scheme, "compress_statistics": False}
            new = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, **how)
    if scheme == "int8":
        parameter = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        parameter = bitsandbytes.nn.Params4bit(weight, requires_grad=False, module=new, **how)
    new.weight, new.bias = parameter.to(device), head.bias
    model.set_submodule(name, new.eval())


def _quantised_modules(model: nn.Module, scheme: Scheme) -> tuple[str, ...]:
    """Modules of the scheme's class and, where one class serves two schemes, of its format."""
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module).__name__ == CLASSES[scheme]
        and getattr(module.weight, "quant_type", scheme) == scheme
    )


def _refuse_odd_widths(
    model: nn.Module, names: Sequence[str], folder: Path, scheme: Scheme
) -> None:
    """On CPU bitsandbytes repacks rows in blocks, and fails within the forward pass otherwise."""
    for name in names:
        width = int(getattr(model.get_submodule(name), "in_features", BLOCK_WEIGHTS))
        if width % BLOCK_WEIGHTS:
            raise ConfigError(
                f"{folder}: {name} has {width} inputs, and {scheme} on CPU needs a multiple of "
                f"{BLOCK_WEIGHTS}. Leave {scheme} out of `quantisations` (int4 takes any width), "
                "or run on a GPU."
            )
