"""Door 2: Hugging Face.  Finding, opening and writing models."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from grom.config import ModelConfig
from grom.errors import BrokenCheckpoint, MissingInput, QuantisedBase
from grom.examples import Rendering
from grom.sites import context_length, find_sites
from tasks.heap import keep_freed_memory

logger = logging.getLogger(__name__)
PACKAGE = "package:"
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
COPIED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model in memory with the rendering that goes with it."""

    model: Any
    rendering: Rendering
    quantised_modules: tuple[str, ...] = ()


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
    with damage_named(folder):
        found = json.loads(path.read_text()).get("quantization_config") if path.exists() else None
    if found:
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
def damage_named(folder: Path) -> Iterator[None]:
    """Turn what transformers says of a damaged folder into one error with the folder's name."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BrokenCheckpoint(str(folder), f"{type(error).__name__}: {error}") from error


def open_model(
    folder: Path,
    *,
    text_window: int,
    quantisation: str | None = None,
    quantise_head: bool = False,
    max_tokens: int = 4096,
    editable: bool = True,
) -> OpenModel:
    """Load a plain checkpoint and its tokenizer.

    Args:
        folder: checkpoint with tokenizer.
        text_window: tokens per window of running text.
        quantisation: None, or a low-precision load: `nf4`, `fp4`, `int8`, `int4`.
        quantise_head: in such a load quantise the LM head as well.
        max_tokens: longest example, if the model's context is longer.
        editable: False to measure only: then any family will do, quantised or not.

    Raises:
        QuantisedBase, UnknownFamily, MixtureOfExperts: the model cannot be edited.
        BrokenCheckpoint: config, tokenizer or weights cannot be read.
        ConfigError: quantisation was asked for and no module was quantised, or not the head.
    """
    from transformers import AutoModelForCausalLM

    from tasks.quantised import load_quantised  # it imports this module

    if editable:
        refuse_quantised(folder)
    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with damage_named(folder):
        tokenizer = open_tokenizer(folder)
    model: Any
    quantised: tuple[str, ...] = ()
    if quantisation is None:
        with damage_named(folder):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device)
        if editable:
            find_sites(model)
    else:
        model, quantised = load_quantised(folder, quantisation, head=quantise_head, device=device)
    model.eval()
    limit = min(context_length(model.config.get_text_config(), max_tokens), max_tokens)
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

    with damage_named(folder):
        config = AutoConfig.from_pretrained(folder).get_text_config()
        tokenizer = open_tokenizer(folder)
    limit = min(context_length(config, max_tokens), max_tokens)
    return Rendering(tokenizer, limit, text_window), int(config.vocab_size)


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
