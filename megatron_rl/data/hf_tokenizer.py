"""The tokenizers of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config.sections import ExampleSection
from megatron_rl.data.errors import DataError


class HfTokenizer:
    """The tokenizer of a local Hugging Face folder; nothing is fetched."""

    def __init__(
        self,
        folder: Path,
        *,
        use_chat_template: bool = False,
        system_prompt: str | None = None,
        examples: Sequence[ExampleSection] = (),
    ) -> None:
        """Raises `DataError` when the folder has no tokenizer, or no chat template or end token where one is needed."""
        self._tokenizer = _load_auto_tokenizer(folder)
        if use_chat_template and not self._tokenizer.chat_template:
            raise DataError(f"{folder}: the tokenizer has no chat template; set data.tokenizer.chat_template to none")
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"{folder}: the tokenizer names no eos_token; answers could not end")
        self._use_chat_template = use_chat_template
        self._opening = _opening_messages(system_prompt, examples)
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int = self._tokenizer.eos_token_id
        self.bos_id: int | None = self._tokenizer.bos_token_id
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_foreign(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_prompt(self, text: str) -> list[int]:
        if not self._use_chat_template:
            return self._tokenizer(text)["input_ids"]
        messages = [*self._opening, {"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def _opening_messages(system_prompt: str | None, examples: Sequence[ExampleSection]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for example in examples:
        messages.append({"role": "user", "content": example.user})
        messages.append({"role": "assistant", "content": example.assistant})
    return messages


def _load_auto_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; data.tokenizer.path (or model.path) must be a Hugging Face folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{folder}: no tokenizer can be loaded from this folder ({reason})") from error
