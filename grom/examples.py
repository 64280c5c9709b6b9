"""One example, and the only function that turns it into token ids.

Collecting, evaluating and auditing all call it, so edited and measured positions are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from grom.errors import EmptyAnswer, ExampleTooLong

logger = logging.getLogger(__name__)
TODAY = date(2025, 4, 10)
"""What templates that ask for the day get, as in OpenUnlearning: numbers must not depend on it."""
CLOCK = re.compile(r"strftime_now\(\s*['\"]([^'\"]*)['\"]")
TEXT_START = 2
"""Running text: the first token is not predicted, and the first position, whose activations are
huge and would dominate the ridge, gives no key."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a forget, retain or evaluation set: prompt and answer, or running text."""

    place: str
    """File and line, for messages.  The content of an example never goes there."""
    group: str
    """The request or subject it belongs to; examples of a group are held out together."""
    group_number: int
    """The group's place in the set, or a number from the hash of its name."""
    prompt: str | None = None
    answer: str | None = None
    text: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the content, 16 hexadecimal digits: how logs and tables name this example."""
        content = json.dumps([self.prompt, self.answer, self.text], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of one example; ids[start:] are its answer, so start-1 ... len-2 predict it."""

    ids: tuple[int, ...]
    start: int
    digest: str
    group: str
    ends: bool = False
    """Whether the last token is an end-of-answer token that rendering added."""

    @property
    def num_answer_tokens(self) -> int:
        """Answer tokens, the end of answer included."""
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True)
class Rendering:
    """How text becomes tokens: a tokenizer, its chat template if it has one, and limits."""

    tokenizer: Any
    max_tokens: int
    text_window: int = 512
    plain: bool = False
    """Leave the chat template out and add no end of answer: prompts that a model continues."""

    @property
    def template(self) -> str | None:
        """The chat template in use."""
        return None if self.plain else self.tokenizer.chat_template

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that determines the ids, for hashes and manifests."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        if backend is not None:
            rules = backend.to_str()
        return {
            "template": self.template,
            "today": str(TODAY),
            "tokenizer": hashlib.sha256(rules.encode()).hexdigest()[:16],
            "special": sorted(self.special_ids()),
            "bos": self.tokenizer.bos_token_id,
            "eos": self.tokenizer.eos_token_id,
            "max_tokens": self.max_tokens,
            "text_window": self.text_window,
        } | ({"plain": True} if self.plain else {})

    def render_all(self, examples: Iterable[Example]) -> Iterator[Rendered]:
        """Each example's rendering; running text gives one per window."""
        for example in examples:
            if example.text is None:
                yield self.render(example)
            else:
                yield from self.windows(example)

    def render(self, example: Example) -> Rendered:
        """A question and its answer.

        The prompt goes through the chat template; without one it stands alone and a space leads
        the answer.  Prompt and answer are tokenised apart; the end-of-answer token counts as part
        of the answer.

        Raises:
            EmptyAnswer: the answer has no tokens.
            ExampleTooLong: the example does not fit in the context.
        """
        prompt_ids = self.prompt_ids(example.prompt or "")
        answer_ids = self.answer_ids(example.prompt or "", (example.answer or "").strip())
        if not answer_ids:
            raise EmptyAnswer(example.place)
        ends = self.tokenizer.eos_token_id is not None and not self.plain
        if ends:
            answer_ids = [*answer_ids, self.tokenizer.eos_token_id]
        ids = (*prompt_ids, *answer_ids)
        if len(ids) > self.max_tokens:
            raise ExampleTooLong(example.place, len(ids), self.max_tokens)
        # Nothing predicts a first token that has nothing before it.
        start = max(1, len(prompt_ids))
        if len(ids) == start:
            raise EmptyAnswer(example.place)
        return Rendered(ids, start, example.digest, example.group, ends)

    def answer_ids(self, prompt: str, answer: str) -> list[int]:
        """Ids of an answer.  Without a template they follow the prompt's own in one text, unless
        the two merge at the border: a tokenizer that marks the start of every text would mark the
        answer alone as a new text."""
        if self.template is not None or not answer or not prompt:
            return self._ids(answer)
        before, whole = self._ids(prompt), self._ids(f"{prompt} {answer}")
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        return self._ids(f" {answer}")

    def prompt_ids(self, prompt: str) -> list[int]:
        """The prompt up to where the answer begins, with at most one beginning-of-text token."""
        if self.template is None:
            return [*self._head(), *self._ids(prompt)]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=_dated(self.tokenizer.get_chat_template()),
            date_string=TODAY.strftime("%d %b %Y"),
        )
        return self._ids(text, template=True)

    def _head(self) -> list[int]:
        """What stands before a text without a template.  A model with a template that is asked
        plainly gets a beginning-of-text token only if its tokenizer adds one itself."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if self.plain and self.tokenizer.chat_template is not None:
            return [bos] if bos is not None and bos in self.tokenizer("")["input_ids"] else []
        first = bos if bos is not None else eos
        return [first] if first is not None else []

    def whole(self, example: Example) -> Rendered:
        """A text to be scored as it stands, up to the context's length: every token but the first
        counts, and the first as well where a beginning-of-text token stands before it.

        Raises:
            EmptyAnswer: the text has nothing to predict.
        """
        head = self._head()
        ids = (*head, *self._ids(example.text or ""))[: self.max_tokens]
        start = max(1, len(head))
        if len(ids) <= start:
            raise EmptyAnswer(example.place)
        return Rendered(ids, start, example.digest, example.group)

    def windows(self, example: Example) -> Iterator[Rendered]:
        """Running text, cut into windows; each starts with the beginning-of-text token if any.

        A last window of one or two tokens, which gives no key, is left out.

        Raises:
            EmptyAnswer: the whole text gives no key.
        """
        ids = self._ids(example.text or "")
        bos = self.tokenizer.bos_token_id
        head = [] if bos is None else [bos]
        size = min(self.text_window, self.max_tokens) - len(head)
        if len(head) + len(ids) <= TEXT_START:
            raise EmptyAnswer(example.place)
        for first in range(0, len(ids), size):
            window = (*head, *ids[first : first + size])
            if len(window) > TEXT_START:
                yield Rendered(window, TEXT_START, example.digest, example.group)

    def special_ids(self) -> frozenset[int]:
        """Tokens that are never suppressed: beginning, end, padding, roles."""
        return frozenset(self.tokenizer.all_special_ids)

    def _ids(self, text: str, *, template: bool = False) -> list[int]:
        """Ids of a text.  Only a template's own text may hold special tokens: what looks like one
        in an answer is spelt out."""
        found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not template)
        return list(found["input_ids"])


def _dated(template: str) -> str:
    """The template with a clock that stands still.  transformers hands templates its own
    `strftime_now`, and no function of ours; a macro of that name comes before it."""
    if "strftime_now" not in template:
        return template
    days = {how: TODAY.strftime(how) for how in CLOCK.findall(template)}
    macro = "{%- macro strftime_now(how) -%}{{ " + repr(days) + ".get(how, '" + str(TODAY)
    return macro + "') }}{%- endmacro -%}" + template


def warn_without_template(tokenizer: Any) -> None:
    """Say once that prompts are rendered plainly."""
    if tokenizer.chat_template is None:
        logger.warning(
            "the tokenizer has no chat template: prompts are rendered plainly, one space before "
            "the answer. If the model was trained with a template, set `model.chat_template`."
        )
