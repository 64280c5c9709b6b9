"""Door 2: Hugging Face.  Finding, opening, quantising and writing models."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from grom.config import ModelConfig
from grom.errors import BrokenCheckpoint, ConfigError, MissingInput, QuantisedBase
from grom.examples import Rendering
from grom.sites import context_length, find_sites

logger = logging.getLogger(__name__)
PACKAGE = "package:"
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
COPIED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MMAP_BYTES = 32 * 2**20
"""glibc's highest threshold: smaller blocks come from the heap and stay there when freed, larger
ones (grams) are mapped and go back at once."""
BLOCK_WIDTH = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model in memory with the rendering that goes with it."""

    model: Any
    rendering: Rendering
    quantised_modules: tuple[str, ...] = ()


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the system after every batch.

    Large activations are mapped and unmapped for each operation otherwise, and page faults take
    more time than the arithmetic on CPU.  Returns whether the C library took the setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, MMAP_BYTES),
        (M_TRIM_THRESHOLD, 4 * MMAP_BYTES),
        (M_TOP_PAD, MMAP_BYTES // 2),
        (M_ARENA_MAX, 1),
    )
    return all([libc.mallopt(*setting) for setting in settings])


def locate(config: ModelConfig) -> Path:
    """The local folder that holds the source's files; a hub model is downloaded to the cache.

    Raises:
        MissingInput: no such folder, package, registered version or hub model.
    """
    source = config.source
    if source.startswith(PACKAGE):
        name = source.removeprefix(PACKAGE)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingInput(source, f"the package is not installed; `pip install {name}`")
        return Path(spec.origin).parent
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise MissingInput(source, "this folder does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, revision=config.revision, allow_patterns=list(COPIED))
        )
    except Exception as error:
        raise MissingInput(
            source, f"no such folder, and the hub did not give it ({type(error).__name__})"
        ) from error


def fingerprint(config: ModelConfig, folder: Path) -> str:
    """SHA-256 over the files that determine the model, 32 hexadecimal digits."""
    sha = hashlib.sha256()
    if config.source.startswith(PACKAGE):
        sha.update(importlib.metadata.version(config.source.removeprefix(PACKAGE)).encode())
    names = [config.gguf_file] if config.gguf_file else list(COPIED)
    if config.adapter and not Path(config.adapter).is_dir():
        raise MissingInput(config.adapter, "this adapter folder does not exist")
    for root in [folder, *([Path(config.adapter)] if config.adapter else [])]:
        patterns = names if root == folder else list(COPIED)
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        if not files:
            raise MissingInput(str(root), "no model files there")
        for path in files:
            sha.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(2**22):
                    sha.update(block)
    sha.update(json.dumps([config.chat_template, config.dtype]).encode())
    return sha.hexdigest()[:32]


def is_plain(config: ModelConfig, folder: Path) -> bool:
    """Whether the folder can be used as it is: safetensors, and nothing to change."""
    changes = (config.gguf_file, config.adapter, config.chat_template)
    return not any(changes) and config.dtype == "auto" and any(folder.glob("*.safetensors"))


def refuse_quantised(folder: Path) -> None:
    """Raise QuantisedBase if the checkpoint's config says that its weights are quantised."""
    path = folder / "config.json"
    if path.exists() and (found := json.loads(path.read_text()).get("quantization_config")):
        raise QuantisedBase(str(folder), found.get("quant_method", "unknown method"))


def materialise(config: ModelConfig, folder: Path, out: Path) -> None:
    """Write the source as a plain checkpoint: adapter merged, template set, dtype applied."""
    from transformers import AutoModelForCausalLM

    model: Any
    if config.gguf_file:
        model = _from_gguf(folder, config.gguf_file, DTYPES.get(config.dtype, torch.float32))
    else:
        dtype = DTYPES.get(config.dtype, "auto")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = open_tokenizer(folder, **_gguf(config))
    if config.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, config.adapter).merge_and_unload()
    if config.chat_template:
        tokenizer.chat_template = config.chat_template
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _gguf(config: ModelConfig) -> dict[str, str]:
    return {"gguf_file": config.gguf_file} if config.gguf_file else {}


def _from_gguf(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """The model of a GGUF file with plain weights, free of the mark that it was quantised."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    quantised: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(quantised)(config).to(dtype)
    plain.load_state_dict(quantised.state_dict())
    return plain.eval()


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Turn what transformers says of a damaged folder into one error with the folder's name."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BrokenCheckpoint(str(folder), f"{type(error).__name__}: {error}") from error


def open_model(
    folder: Path, *, text_window: int, quantisation: str | None = None, max_tokens: int = 4096
) -> OpenModel:
    """Load a plain checkpoint and its tokenizer.

    Args:
        folder: checkpoint with tokenizer.
        text_window: tokens per window of running text.
        quantisation: None, or `nf4`: 4-bit NormalFloat by bitsandbytes, as a server would load it.
        max_tokens: longest example, if the model's context is longer.

    Raises:
        QuantisedBase, UnknownFamily, MixtureOfExperts: the model cannot be edited.
        ConfigError: quantisation was asked for and no module was quantised.
    """
    from transformers import AutoModelForCausalLM

    refuse_quantised(folder)
    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": "auto", "device_map": device}
    if quantisation is not None:
        options["quantization_config"] = _four_bit(quantisation)
    with _damage_named(folder):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        tokenizer = open_tokenizer(folder)
    model.eval()
    quantised = _quantised_modules(model)
    if quantisation is not None and not quantised:
        raise ConfigError(f"{folder}: asked for {quantisation}, but no module was quantised")
    if quantisation is None:
        find_sites(model)
    elif device == "cpu":
        _refuse_odd_widths(model, folder)
    limit = min(context_length(model), max_tokens)
    return OpenModel(model, Rendering(tokenizer, limit, text_window), quantised)


def open_tokenizer(folder: Path, **options: Any) -> Any:
    """The tokenizer of a checkpoint, as its own files describe it.

    A generic fast tokenizer is opened as such: transformers would take the class of the model's
    family (Qwen2), whose own rules then read the vocabulary wrongly.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text()).get("tokenizer_class") if path.exists() else None
    if named in GENERIC_TOKENIZERS and (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, **options)


def open_rendering(
    folder: Path, *, text_window: int, max_tokens: int = 4096
) -> tuple[Rendering, int]:
    """The rendering of a checkpoint and its vocabulary size, without loading the weights."""
    from transformers import AutoConfig

    with _damage_named(folder):
        config = AutoConfig.from_pretrained(folder).get_text_config()
        tokenizer = open_tokenizer(folder)
    # Some families name no limit; `open_model` will say that they are unknown.
    limit = min(int(getattr(config, "max_position_embeddings", max_tokens)), max_tokens)
    return Rendering(tokenizer, limit, text_window), int(config.vocab_size)


def _four_bit(quantisation: str) -> Any:
    from transformers import BitsAndBytesConfig

    if quantisation != "nf4":
        raise ConfigError(f"unknown quantisation {quantisation!r}; known: nf4")
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def _quantised_modules(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"
    )


def _refuse_odd_widths(model: nn.Module, folder: Path) -> None:
    """On CPU bitsandbytes repacks rows in blocks, and fails within the forward pass otherwise."""
    for name, module in model.named_modules():
        width = getattr(module, "in_features", BLOCK_WIDTH)
        if type(module).__name__ == "Linear4bit" and width % BLOCK_WIDTH:
            raise ConfigError(
                f"{folder}: {name} has {width} inputs, and 4-bit on CPU needs a multiple of "
                f"{BLOCK_WIDTH}. Set `evaluate.quantisations: []`, or run on a GPU."
            )


def pad_id(rendering: Rendering) -> int:
    """A token to pad with; masked, so any will do."""
    tokenizer = rendering.tokenizer
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


@contextmanager
def scratch_folder(root: Path, name: str) -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
