"""Every setting is a flag, a TOML key and a keyword, declared once."""

import argparse

import pytest

from ostinato.errors import ConfigError
from ostinato.tools.flags import add_flags, changed, config_from, settings

FLAGS = [
    "cpu.bind", "cpu.threads", "gpu.graph_tokens", "graph.dtype", "graph.pooling", "graph.target",
    "graph.task", "graph.tune_s", "kv.ahead_mib", "kv.block_tokens", "kv.headroom_gib", "kv.idle_shrink_s",
    "kv.initial_mib", "kv.max_gib",
    "kv.prefix_cache", "kv.share", "kv.wait_s", "log_level", "max_model_len", "passes.dump_dir",
    "passes.fuel", "passes.off", "profile.folder", "profile.max_seconds", "scheduler.max_running",
    "scheduler.max_step_tokens", "scheduler.max_waiting", "server.access_log", "server.admin_key",
    "server.allow_chat_template", "server.api_key",
    "server.api_key_file", "server.body_timeout_s", "server.chat_template", "server.cors_origins",
    "server.drain_s",
    "server.header_timeout_s", "server.host", "server.keepalive_s", "server.limits.concurrent",
    "server.limits.requests_per_minute", "server.limits.tokens_per_minute", "server.max_bodies_mib",
    "server.max_body_mib", "server.max_connections", "server.max_logprobs", "server.max_n",
    "server.port", "server.reasoning_end_str", "server.reasoning_parser", "server.reasoning_start_str",
    "server.request_timeout_s", "server.send_timeout_s",
    "server.served_name",
    "server.stall_s", "server.store_mib", "server.store_ttl_s", "server.template_timeout_s",
    "server.tool_parser", "server.trace_endpoint",
]  # fmt: skip


def parse(*words, environ=None):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return config_from(parser.parse_args(words), environ or {})


def test_the_list_of_settings_is_the_reviewed_one():
    assert sorted(path for path, _ in settings()) == FLAGS


def test_every_setting_has_help():
    assert [path for path, field in settings() if not field.description and path.count(".")] == []


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "o.toml"
    file.write_text("[kv]\nblock_tokens = 32\nmax_gib = 2.5\n[server]\nport = 9000\n")
    config = parse(
        "--config", str(file), "--server.port", "9001", "--no-kv.prefix-cache", "--passes.off", "a,b"
    )
    assert (config.kv.block_tokens, config.kv.max_gib, config.server.port) == (32, 2.5, 9001)
    assert (config.kv.prefix_cache, config.passes.off, config.scheduler.max_running) == (
        False,
        ("a", "b"),
        256,
    )


def test_keys_come_from_the_environment_and_are_masked():
    config = parse(environ={"OSTINATO_API_KEY": "secret, other", "OSTINATO_ADMIN_KEY": "root"})
    assert (config.server.api_key, config.server.admin_key) == (("secret", "other"), "root")
    assert changed(config) == {"server.api_key": "***", "server.admin_key": "***"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv.block-tokens", "0"), r"kv.block_tokens='0'.*greater than or equal to 1"),
        (("--server.port", "http"), r"server.port='http'.*valid integer"),
        (("--graph.dtype", "int3"), r"graph.dtype='int3'.*float32"),
        (("--kv.max-gib", "nan"), r"kv.max_gib='nan'.*finite"),
        (("--log-level", "loud"), r"log_level='LOUD': Input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        (("--config", "/nonexistent.toml"), r"nonexistent.toml: No such file"),
    ],
)
def test_a_wrong_value_names_the_setting(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_an_unknown_key_in_the_file_is_an_error(tmp_path):
    file = tmp_path / "o.toml"
    file.write_text("[kv]\npage_size = 32\n")
    with pytest.raises(ConfigError, match=r"kv.page_size=32"):
        parse("--config", str(file))
    file.write_text("kv = [broken")
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse("--config", str(file))
