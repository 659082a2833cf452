"""The tokenizers of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.data.errors import DataError


class HfTokenizer:
    """The tokenizer of a local Hugging Face folder; nothing is fetched."""

    def __init__(self, folder: Path, *, use_chat_template: bool = False, system_prompt: str | None = None) -> None:
        """Raises `DataError` when the folder has no tokenizer, or no chat template or end token where one is needed."""
        self._tokenizer = _load_auto_tokenizer(folder)
        if use_chat_template and not self._tokenizer.chat_template:
            raise DataError(f"{folder}: the tokenizer has no chat template; set data.tokenizer.chat_template to none")
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"{folder}: the tokenizer names no eos_token; answers could not end")
        self._use_chat_template = use_chat_template
        self._system_prompt = system_prompt
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int = self._tokenizer.eos_token_id
        self.bos_id: int | None = self._tokenizer.bos_token_id
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_prompt(self, text: str) -> list[int]:
        if not self._use_chat_template:
            return self._tokenizer(text)["input_ids"]
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages = [*system, {"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def _load_auto_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; data.tokenizer.path (or model.path) must be a Hugging Face folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{folder}: no tokenizer can be loaded from this folder ({reason})") from error
