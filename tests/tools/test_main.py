"""The entry points: which command runs, what it imports, and with which exit code it ends."""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

import ostinato
from ostinato.errors import ConfigError, ModelError, WrongTask
from ostinato.graph.facts import PoolingFacts
from ostinato.runtime import llm
from ostinato.runtime.messages import EngineInfo, SamplingParams
from ostinato.runtime.request_output import CompletionOutput
from ostinato.tools import chat, compile_model, inspect_artifact, main, serve


def test_version_and_help_name_every_command(capsys):
    for words in (["--version"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ostinato {ostinato.__version__}\n")
    for command, (_, text) in main.COMMANDS.items():
        assert command in out
        assert text.split()[0] in out


@pytest.mark.parametrize("words", [[], ["sing"], ["inspect"]])
def test_a_wrong_command_line_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 2
    assert "usage: ostinato" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve x --port=8001", "serve: error: --port: no such flag; did you mean --server.port?"),
        ("serve x --server.prt 1", "serve: error: --server.prt: no such flag; did you mean --server.port?"),
        ("serve x --quantize int4", "serve: error: --quantize: no such flag; see --help"),
        ("serve x y", "serve: error: unrecognized arguments: y; see --help"),
        (
            "compile x --kv.max-gib 3",
            "compile: error: --kv.max-gib: not here, where it would have no effect; `ostinato serve` has it",
        ),
        (
            "compile x --profile.folder y",
            "compile: error: --profile.folder: not here, where it would have no effect; "
            "`ostinato serve` has it",
        ),
        (
            "bench serve --num-prompt=5 --rate 3",
            "bench serve: error: --rate: no such flag; did you mean --request-rate or --ramp-start-rate?",
        ),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(words: str, says: str, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ostinato", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"ostinato {says}\n")


def test_the_compile_model_script_answers_an_unknown_flag_alike(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compile-model", "x", "--passes.fuels", "3"])
    with pytest.raises(SystemExit):
        compile_model.main()
    says = "compile-model: error: --passes.fuels: no such flag; did you mean --passes.fuel?\n"
    assert capsys.readouterr().err == says


def test_an_error_for_the_user_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main.main(["inspect", str(tmp_path / "absent")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ostinato: ")
    assert "absent: no such file or folder; give an artifact, a model folder or a GGUF file" in err
    assert err.count("\n") == 1


def failing(error):
    def call():
        raise error

    return call


def test_exit_codes_of_interrupts_and_results():
    assert main.run_command(lambda: 3) == 3
    assert main.run_command(failing(KeyboardInterrupt())) == 130
    assert main.run_command(failing(ConfigError("kv.max_gib=x"))) == 2
    with pytest.raises(ZeroDivisionError):  # our own bugs keep their traceback
        main.run_command(failing(ZeroDivisionError()))


def test_a_closed_pipe_ends_quietly():
    code = "from ostinato.tools.main import run_command; import sys\n"
    code += "def call():\n    while True: print('x' * 1000)\nsys.exit(run_command(call))"
    reader, writer = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(reader)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")


def test_only_the_command_that_runs_is_imported():
    code = (
        "import sys; from ostinato.tools import main\n"
        "try: main.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'ostinato.tools.chat') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def parsed(tool, *words):
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)
    return parser.parse_args(words)


def test_compile_model_has_no_flag_without_an_effect(capsys):
    assert parsed(compile_model, "SRC", "--passes.off", "silu_mul").out is None
    for flag in ("--kv.block-tokens", "--server.port", "--max-model-len"):
        with pytest.raises(SystemExit):
            parsed(compile_model, "SRC", flag, "8")
    assert "unrecognized arguments: --max-model-len" in capsys.readouterr().err


def test_serve_hands_the_settings_of_a_compile_to_the_compiler(tmp_path, monkeypatch):
    seen = []

    def run(command):
        seen.extend(command)
        return 0, f"a line\n{tmp_path / 'made'}\n"

    monkeypatch.setattr(serve, "_run", run)
    words = ("--graph.dtype=bfloat16", "--passes.off=silu_mul,rms_norm", "--passes.fuel=3", "--kv.max-gib=1")
    config = serve.config_from(parsed(serve, str(tmp_path), *words))
    assert serve.find_artifact(tmp_path, config) == tmp_path / "made"
    assert seen[3:] == [
        "compile",
        str(tmp_path),
        "--graph.dtype=bfloat16",
        "--passes.off=silu_mul,rms_norm",
        "--passes.fuel=3",
    ]
    again = parsed(compile_model, *seen[4:])  # the compiler understands what it is given
    assert serve.config_from(again).passes.off == ("silu_mul", "rms_norm")


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for tool in (serve, chat):
        assert str(parsed(tool, "~/model", "--config=~/serve.toml").path) == "/home/me/model"
    compiling = parsed(compile_model, "~/model", "--out=~/made", "--config=~/c.toml")
    paths = (compiling.source, compiling.out, compiling.config)
    assert [str(path) for path in paths] == ["/home/me/model", "/home/me/made", "/home/me/c.toml"]
    assert str(parsed(inspect_artifact, "~/made").artifact) == "/home/me/made"


def test_serve_refuses_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder; give an artifact"):
        serve.find_artifact(tmp_path / "absent", serve.config_from(parsed(serve, "x")))


def test_chat_sampling_is_the_models_own_unless_a_flag_says_otherwise():
    defaults = {"temperature": 0.3, "top_p": 0.9, "top_k": None}
    own = chat._sampling(parsed(chat, "x"), defaults)
    assert (own.temperature, own.top_p, own.max_tokens) == (0.3, 0.9, None)
    asked = chat._sampling(parsed(chat, "x", "--temperature", "0", "--max-tokens", "5"), defaults)
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.0, 0.9, 5)


def test_chat_refuses_a_wrong_sampling_flag_before_it_loads_the_model(tmp_path):
    for flag, value, says in (("--max-tokens", "0", "equal to 1"), ("--temperature", "-1", "equal to 0")):
        with pytest.raises(ConfigError, match=rf"^{flag} {value}.*{says}; see --help"):
            chat.run(parsed(chat, str(tmp_path / "absent"), flag, value))


def test_chat_refuses_a_model_that_does_not_generate_before_the_first_question(monkeypatch):
    class Embedder(nullcontext):
        info = EngineInfo.model_construct(
            model="mini", pooling=PoolingFacts(task="embed", pooling="mean", size=2, causal=False)
        )

        def __enter__(self):
            return self

    monkeypatch.setattr(llm, "LLM", lambda path, config: Embedder())
    with pytest.raises(WrongTask, match="mini cannot generate"):
        chat.run(parsed(chat, "x"))


def test_chat_prints_why_an_answer_broke_off(capsys):
    class Broken:
        async def stream(self, messages, sampling):
            yield CompletionOutput(0, "Par", (5,))
            yield CompletionOutput(0, "", (), finish_reason="error", error="the step failed: NaN")

    assert chat._answer(Broken(), [], SamplingParams()) == "Par"
    assert capsys.readouterr().out == "Par\n(the step failed: NaN)\n"


def test_quiet_commands_keep_a_log_level_that_was_asked_for():
    for tool, words in ((chat, ("x",)), (compile_model, ("x",))):
        assert "log_level" not in serve.config_from(parsed(tool, *words)).model_fields_set
        assert "log_level" in serve.config_from(parsed(tool, *words, "--log-level", "info")).model_fields_set
