"""Keys from settings and from a file: names, limits, and what is said about wrong ones."""

import hashlib
from pathlib import Path

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.config import LimitsConfig, ServerConfig
from ostinato.runtime.http.api_keys import KeyRing


def key_file(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_without_keys_everybody_is_one_caller():
    ring = KeyRing.of(ServerConfig(limits=LimitsConfig(concurrent=3)))
    assert ring.everybody is not None
    assert (ring.everybody.name, ring.everybody.allowance.limits.concurrent) == ("anonymous", 3)
    assert ring.find("anything") is None


def test_keys_of_the_settings_are_named_by_their_order():
    ring = KeyRing.of(ServerConfig(api_key="first, second"))
    assert ring.everybody is None
    names = {
        key: caller and caller.name for key in ("first", "second", "third", "") for caller in [ring.find(key)]
    }
    assert names == {"first": "key-1", "second": "key-2", "third": None, "": None}


def test_a_file_gives_names_and_limits_and_need_not_hold_the_keys_themselves(tmp_path: Path):
    digest = hashlib.sha256(b"sk-bob").hexdigest()
    path = key_file(
        tmp_path,
        '[alice]\nkey = "sk-alice"\nconcurrent = 4\nrequests_per_minute = 0\n'
        f'[bob]\nkey_sha256 = "{digest}"\n',
    )
    ring = KeyRing.of(
        ServerConfig(api_key_file=path, limits=LimitsConfig(requests_per_minute=60, tokens_per_minute=9))
    )
    alice, bob = ring.find("sk-alice"), ring.find("sk-bob")
    assert alice is not None
    assert bob is not None
    assert (alice.name, bob.name) == ("alice", "bob")
    assert alice.allowance.limits == LimitsConfig(concurrent=4, requests_per_minute=0, tokens_per_minute=9)
    assert bob.allowance.limits == LimitsConfig(requests_per_minute=60, tokens_per_minute=9)
    assert ring.find(digest) is None


def test_a_key_that_is_no_text_is_wrong_and_nothing_worse():
    assert KeyRing.of(ServerConfig(api_key="a")).find("\udcff\ud800é") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 keys"),
        ("[a]\n", "a: Value error, needs exactly one of key and key_sha256"),
        ('[a]\nkey = "SECRET"\nkey_sha256 = "' + "0" * 64 + '"\n', "needs exactly one"),
        ('[a]\nkey_sha256 = "SECRET"\n', "a.key_sha256: String should match pattern"),
        ('[a]\nkey = ["SECRET"]\n', "a.key: Input should be a valid string"),
        ('[a]\nkey = "SECRET"\nlimit = 3\n', "a.limit: Extra inputs are not permitted"),
        (
            '[a]\nkey = "SECRET"\nconcurrent = -1\n',
            "a.concurrent: Input should be greater than or equal to 0",
        ),
        ('["a b"]\nkey = "SECRET"\n', "'a b' is no name"),
        ('[a]\nkey = "SECRET"\n[b]\nkey = "SECRET"\n', "the same key is given twice"),
        ('a = "SECRET"\n', "a: Input should be a valid dictionary"),
        ('[a\nkey = "SECRET"\n', "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_a_key(tmp_path: Path, text: str, says: str):
    path = key_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.of(ServerConfig(api_key_file=path))
    assert says in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_missing_file_and_an_empty_key_are_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"server\.api_key_file=.*No such file"):
        KeyRing.of(ServerConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="a key is empty"):
        KeyRing.of(ServerConfig(api_key=("", "a")))


def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = key_file(tmp_path, '[a]\nkey = "SECRET"\n')
    Path(path).chmod(0o644)
    KeyRing.of(ServerConfig(api_key_file=path))
    assert "chmod 600" in caplog.text
    assert "SECRET" not in caplog.text


def test_settings_that_are_printed_show_no_key():
    config = ServerConfig(api_key=("SECRET",), admin_key="SECRET")
    assert "SECRET" not in repr(config)
    assert "SECRET" not in str(config)
