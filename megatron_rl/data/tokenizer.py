"""Text <-> token ids behind one Protocol, and the one place that chooses the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.config.sections import TokenizerSection
from megatron_rl.data.character_tokenizer import PRINTABLE_ASCII, CharacterTokenizer
from megatron_rl.data.errors import DataError


class Tokenizer(Protocol):
    """What the loop needs of a tokenizer. `pad_id` is never sampled or trained on; `bos_id` may not exist."""

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: no special token is added."""
        ...

    def encode_foreign(self, text: str) -> list[int]:
        """The ids of what a tool said: the names of special tokens are plain text in it, and what the vocabulary lacks is
        left out."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens dropped."""
        ...

    def render_prompt(self, text: str) -> list[int]:
        """The ids that a model continues with its answer: chat template, system prompt and bos as configured."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer files of a Hugging Face folder, which `AutoTokenizer` and SGLang can load."""
        ...


def load_tokenizer(section: TokenizerSection, model_path: str | None) -> Tokenizer:
    """The configured tokenizer. `model_path` is where an `hf` tokenizer without its own path comes from.

    Raises `DataError` for settings that do not go together and for folders without a usable tokenizer.
    """
    if section.system_prompt and section.chat_template == "none":
        raise DataError("data.tokenizer.system_prompt needs data.tokenizer.chat_template: model")
    if section.examples and section.chat_template == "none":
        raise DataError("data.tokenizer.examples needs data.tokenizer.chat_template: model")
    if section.kind == "characters":
        if section.chat_template != "none":
            raise DataError("data.tokenizer.chat_template: the characters tokenizer has no template; use none")
        return CharacterTokenizer(PRINTABLE_ASCII if section.alphabet is None else section.alphabet)
    path = section.path or model_path
    if path is None:
        raise DataError("data.tokenizer.kind hf needs data.tokenizer.path or model.path (a Hugging Face folder)")
    # transformers takes seconds to import, and a run with a character tokenizer does not need it.
    from megatron_rl.data.hf_tokenizer import HfTokenizer

    return HfTokenizer(
        Path(path),
        use_chat_template=section.chat_template == "model",
        system_prompt=section.system_prompt,
        examples=section.examples,
    )
