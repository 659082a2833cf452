import json

import pytest

from megatron_rl.config.sections import ExampleSection, TokenizerSection
from megatron_rl.data.character_tokenizer import CharacterTokenizer
from megatron_rl.data.errors import DataError
from megatron_rl.data.hf_tokenizer import HfTokenizer
from megatron_rl.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    CharacterTokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return tmp_path


def test_an_hf_folder_gives_the_ids_of_its_tokenizer(folder):
    tokenizer = load_tokenizer(TokenizerSection(kind="hf"), str(folder))
    characters = CharacterTokenizer()
    assert tokenizer.encode("3 + 4 =") == characters.encode("3 + 4 =")
    assert tokenizer.render_prompt("3 + 4 =") == characters.encode("3 + 4 =")
    assert tokenizer.decode([*characters.encode("x  , y"), tokenizer.eos_id]) == "x  , y"
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (99, 0, 1, 2)


def test_what_a_tool_said_holds_no_special_token(folder):
    characters, tokenizer = CharacterTokenizer(), load_tokenizer(TokenizerSection(kind="hf"), str(folder))
    assert tokenizer.encode("a<|eos|>") == [*characters.encode("a"), tokenizer.eos_id]
    assert tokenizer.encode_foreign("a<|eos|>") == characters.encode("a<|eos|>") == characters.encode_foreign("a<|eos|>")
    assert characters.encode_foreign("a\u00e9b") == characters.encode("ab")


def test_the_chat_template_wraps_system_prompt_and_question(folder):
    section = TokenizerSection(kind="hf", path=str(folder), chat_template="model", system_prompt="Be brief.")
    tokenizer = load_tokenizer(section, "/nowhere")
    ids = tokenizer.render_prompt("2 + 2 =")
    assert tokenizer.decode(ids) == "[system]Be brief.\n[user]2 + 2 =\n[assistant]"
    without = load_tokenizer(TokenizerSection(kind="hf", chat_template="model"), str(folder))
    assert without.decode(without.render_prompt("2 + 2 =")) == "[user]2 + 2 =\n[assistant]"


def test_examples_stand_between_the_system_prompt_and_the_question(folder):
    examples = (ExampleSection("5 - 9 =", "5 - 9 = -4"), ExampleSection("1 + 1 =", "1 + 1 = 2"))
    section = TokenizerSection(kind="hf", chat_template="model", system_prompt="Be brief.", examples=examples)
    tokenizer = load_tokenizer(section, str(folder))
    assert tokenizer.decode(tokenizer.render_prompt("2 + 2 =")) == (
        "[system]Be brief.\n[user]5 - 9 =\n[assistant]5 - 9 = -4\n[user]1 + 1 =\n[assistant]1 + 1 = 2\n"
        "[user]2 + 2 =\n[assistant]"
    )


def test_a_saved_hf_tokenizer_loads_again(folder, tmp_path):
    tokenizer = load_tokenizer(TokenizerSection(kind="hf"), str(folder))
    tokenizer.save(tmp_path / "copy")
    assert HfTokenizer(tmp_path / "copy", use_chat_template=True).render_prompt("a")[-1] == tokenizer.encode("]")[0]


def test_the_configured_alphabet_is_used():
    assert load_tokenizer(TokenizerSection(kind="characters", alphabet="abc"), None).vocab_size == 6
    assert load_tokenizer(TokenizerSection(kind="characters"), None).vocab_size == 99


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (TokenizerSection(kind="hf"), "needs data.tokenizer.path or model.path"),
        (TokenizerSection(kind="hf", path="/no/such/folder"), "/no/such/folder: no such folder"),
        (TokenizerSection(kind="characters", chat_template="model"), "has no template; use none"),
        (TokenizerSection(kind="characters", system_prompt="x"), "system_prompt needs data.tokenizer.chat_template"),
        (TokenizerSection(kind="characters", examples=(ExampleSection("x", "y"),)), "examples needs data.tokenizer.chat"),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(section, message):
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(section, None)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_or_template_is_named(tmp_path):
    with pytest.raises(DataError, match="no tokenizer can be loaded from this folder"):
        load_tokenizer(TokenizerSection(kind="hf"), str(tmp_path))
    CharacterTokenizer().save(tmp_path)
    with pytest.raises(DataError, match="has no chat template"):
        load_tokenizer(TokenizerSection(kind="hf", chat_template="model"), str(tmp_path))
