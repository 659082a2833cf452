import stat

import pytest
import yaml

from megatron_rl.rollout.sglang.keys import EngineKeys, make_keys, read_key_file, write_key_file


def test_keys_survive_the_file_and_differ_each_time(tmp_path):
    keys = make_keys()
    path = tmp_path / "keys.yaml"
    write_key_file(path, keys)
    assert read_key_file(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({keys.api, keys.admin, make_keys().api}) == 3 and len(keys.api) == 64


def test_keys_do_not_show_in_a_repr():
    assert "hush" not in repr(EngineKeys("hush-1", "hush-2"))


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "keys.yaml"
    write_key_file(path, make_keys())
    path.chmod(0o640)
    with pytest.raises(PermissionError, match=r"mode 640.*chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize("text", ["", "- a\n", "api_key: x\n", "api_key: x\nadmin_api_key:\n"])
def test_missing_keys_are_named(tmp_path, text):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"keys\.yaml: expected lines .*missing .*admin_api_key"):
        read_key_file(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        read_key_file(tmp_path / "absent.yaml")


def test_the_file_is_what_sglang_reads_and_what_a_person_may_write(tmp_path):
    path = tmp_path / "keys.yaml"
    keys = EngineKeys("0" * 64, "1234e5678")  # neither may turn into a number
    write_key_file(path, keys)
    assert yaml.safe_load(path.read_text()) == {"api-key": keys.api, "admin-api-key": keys.admin}
    path.write_text("# engines of the east rack\n\nadmin_api_key: 'two'\napi_key: one\n")
    assert read_key_file(path) == EngineKeys("one", "two")
