"""A tokenizer of one token per character, for small models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.data.errors import DataError

PRINTABLE_ASCII = "".join(chr(code) for code in range(32, 127)) + "\n"
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")


class CharacterTokenizer:
    """One token per character. Ids: pad 0, bos 1, eos 2, then the alphabet in its order."""

    pad_id: int = 0
    bos_id: int | None = 1
    eos_id: int = 2

    def __init__(self, alphabet: str = PRINTABLE_ASCII) -> None:
        """Raises `DataError` for an empty alphabet or one that repeats a character."""
        repeated = {character for character in alphabet if alphabet.count(character) > 1}
        if repeated or not alphabet:
            problem = f"repeats {''.join(sorted(repeated))!r}" if repeated else "is empty"
            raise DataError(f"data.tokenizer.alphabet {problem}; give each character once")
        self.alphabet = alphabet
        self.vocab_size = len(SPECIAL_TOKENS) + len(alphabet)
        self._id_of = {character: index for index, character in enumerate(alphabet, start=len(SPECIAL_TOKENS))}

    def encode(self, text: str) -> list[int]:
        """Raises `DataError` for a character that the alphabet lacks."""
        try:
            return [self._id_of[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise DataError(
                f"character {character!r} (U+{ord(character):04X}) is not in the tokenizer's alphabet of "
                f"{len(self.alphabet)} characters; add it to data.tokenizer.alphabet"
            ) from error

    def encode_foreign(self, text: str) -> list[int]:
        return [self._id_of[character] for character in text if character in self._id_of]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises `IndexError` for an id beyond the vocabulary: a model must not sample its padding."""
        first = len(SPECIAL_TOKENS)
        return "".join(self.alphabet[token - first] for token in token_ids if token >= first)

    def render_prompt(self, text: str) -> list[int]:
        return [1, *self.encode(text)]

    def save(self, folder: Path) -> None:
        vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)} | self._id_of
        backend = Tokenizer(models.WordLevel(vocab))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        pad, bos, eos = SPECIAL_TOKENS
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            "clean_up_tokenization_spaces": False,
        }
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "tokenizer.json", backend.to_str(pretty=True))
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
