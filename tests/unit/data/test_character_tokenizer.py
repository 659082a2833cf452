import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_rl.data.character_tokenizer import PRINTABLE_ASCII, CharacterTokenizer
from megatron_rl.data.errors import DataError

TOKENIZER = CharacterTokenizer()


@given(st.text(alphabet=PRINTABLE_ASCII))
def test_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode([TOKENIZER.pad_id, 1, *ids, TOKENIZER.eos_id]) == text


def test_a_prompt_starts_with_bos():
    assert TOKENIZER.render_prompt("ab") == [TOKENIZER.bos_id, *TOKENIZER.encode("ab")]
    assert TOKENIZER.vocab_size == 3 + 96


def test_a_character_outside_the_alphabet_is_named():
    with pytest.raises(DataError, match=r"'\xe9' \(U\+00E9\) is not in the tokenizer's alphabet of 3"):
        CharacterTokenizer("caf").encode("caf\xe9")


@pytest.mark.parametrize(("alphabet", "message"), [("", "is empty"), ("abca", "repeats 'a'")])
def test_a_bad_alphabet_is_refused(alphabet, message):
    with pytest.raises(DataError, match=message):
        CharacterTokenizer(alphabet)


def test_an_id_beyond_the_vocabulary_is_an_error():
    with pytest.raises(IndexError):
        TOKENIZER.decode([TOKENIZER.vocab_size])


def test_the_saved_folder_is_the_same_tokenizer_for_transformers(tmp_path):
    tokenizer = CharacterTokenizer('zyx 0123+=\n"\\\xe9')
    tokenizer.save(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert len(loaded) == tokenizer.vocab_size
    rng = random.Random(7)
    for _ in range(20):
        text = "".join(rng.choices(tokenizer.alphabet, k=rng.randint(0, 30)))
        ids = tokenizer.encode(text)
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids
        assert loaded.decode([*ids, 2], skip_special_tokens=True) == text
    with pytest.raises(Exception, match="UNK"):  # rather than a silent replacement; `tokenizers` raises no narrower type
        loaded("A")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
