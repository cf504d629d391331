"""The command line and the settings file: names, values, errors, and what `--help` costs."""

import io
import json
import logging
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from dlmserve.checkpoint import resolve
from dlmserve.cli import main
from dlmserve.config import ServerConfig
from dlmserve.errors import ConfigError
from dlmserve.flags import FLAGS, Parser, add_flags, make_config
from dlmserve.generate import CanvasView
from dlmserve.logs import JsonFormatter, TextFormatter, request_id
from dlmserve.messages import RequestStep
from dlmserve.tokenizer import Tokenizer


def config(*argv: str) -> ServerConfig:
    parser = Parser(prog="dlmserve")
    add_flags(parser)
    return make_config(parser.parse(list(argv)))


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*argv)
    return str(caught.value)


def test_every_setting_has_a_flag() -> None:
    assert {flag.field for flag in FLAGS} == {field.name for field in fields(ServerConfig)}


def test_flags_become_settings() -> None:
    made = config(
        "--tp-layout", "1,1,2", "--thresholds=0.9,0.5", "--port", "0", "--slo-ms", "250", "--api-key", "k"
    )
    assert made == ServerConfig(
        tp_layout=(1, 1, 2), thresholds=(0.9, 0.5), port=0, slo_ms=250.0, api_keys=("k",)
    )


def test_without_flags_all_is_default() -> None:
    assert config() == ServerConfig()


def test_a_file_sets_by_flag_name_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 9000\ntp-layout = [1, 2]\nmax_queue = 5\nthresholds = "0.7"\napi-key = ["a", "b"]\n'
    )
    made = config("--config", str(file), "--port", "9001")
    assert made == ServerConfig(
        port=9001, tp_layout=(1, 2), max_queue=5, thresholds=(0.7,), api_keys=("a", "b")
    )


def test_keys_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    assert config("--api-key", f"@{file}", "--api-key", "three").api_keys == ("one", "two", "three")
    file.write_text("")
    assert "--api-key is empty" in refusal("--api-key", f"@{file}")
    assert "cannot be read" in refusal("--api-key", "@/nowhere")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp-layot", "1"], "unknown flag '--tp-layot'; did you mean '--tp-layout'?"),
        (["--max-num", "1"], "unknown flag '--max-num'; did you mean '--max-num-seqs'?"),
        (["--port", "http"], "--port is 'http'; wanted an integer"),
        (["--port", "70000"], "--port is 70000; wanted 0 (any free port) to 65535"),
        (["--tp-layout", "1,x"], "--tp-layout is '1,x'; wanted TP degrees"),
        (["--tp-layout", "3"], "TP degree 3; wanted 1, 2, 4 or 8"),
        (["--attention", "fast"], "--attention is 'fast'; wanted one of: auto, flash, varlen, sdpa"),
        (["--memory-fraction", "1.5"], "--memory-fraction is 1.5; wanted above 0 and at most 1"),
        (["--cache", "some"], "--cache is 'some'; wanted one of: none, prefix, dual"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml cannot be read as TOML"),
        (["tiny"], "unexpected argument 'tiny'"),
    ],
)
def test_a_wrong_flag_is_an_error_that_helps(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("port = true", "port is True; wanted an integer"),
        ("port = 80.5", "--port is '80.5'; wanted an integer"),
        ("[serve]\nport = 1", "unknown key 'serve'"),
        ("port =", "cannot be read as TOML"),
    ],
)
def test_a_wrong_key_is_an_error_that_helps(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert said in refusal("--config", str(file))


def test_errors_of_the_command_line_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert main(["--prot", "1"]) == 2
    assert main(["generate", "--step", "4", "hi"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "dlmserve: error: unknown command 'serv'; did you mean 'serve'?",
        "dlmserve: error: unknown flag '--prot'; did you mean '--port'?",
        "dlmserve: error: unknown flag '--step'; did you mean '--steps'?",
    ]


def test_a_command_that_fails_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "no-such-model"]) == 1
    assert "model 'no-such-model' is no folder" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dlmserve.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'aiohttp', 'zmq', 'tokenizers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert "--tp-layout" in out and "generate" in out


def test_the_server_process_imports_no_torch() -> None:
    code = (
        "import sys, dlmserve.server.serve; print({'torch', 'transformers', 'catboost'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "set()\n"


def test_log_lines_for_people_and_for_machines() -> None:
    fields = {"msg": "took %d", "args": (3,), "levelno": 30, "levelname": "WARNING", "status": 200}
    record = logging.makeLogRecord(fields)
    token = request_id.set("r1")
    try:
        assert TextFormatter().format(record).endswith("warning: took 3  request_id=r1 status=200")
        line = json.loads(JsonFormatter().format(record))
    finally:
        request_id.reset(token)
    expected = {"message": "took 3", "level": "warning", "request_id": "r1", "status": 200}
    assert {key: line[key] for key in expected} == expected


def test_generate_prints_the_answer_and_what_it_took(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Write as a JSON list: Anna Oslo baker", "--seed", "1"]) == 0
    out, err = capfd.readouterr()
    assert out == '["Anna", "Oslo", "baker"]\n'
    assert re.match(r"\d+ steps, [\d.]+ tokens/step, 11 tokens in the answer", err.splitlines()[-1])


def test_the_canvas_view_shows_masks_tokens_and_ends() -> None:
    tokenizer = Tokenizer(resolve("tiny"))
    view = CanvasView(tokenizer, eos_ids=[0], start=10, num_positions=4)
    [three] = tokenizer.encode("3")
    view.apply(
        RequestStep(1, True, 0, 0.9, positions=[11, 13, 14], tokens=[three, 0, 0], confidences=[1, 1, 1])
    )
    console = Console(file=io.StringIO(), width=40)
    console.print(view.render())
    assert console.file.getvalue().splitlines() == ["\u25913\u2591\u00b7", "step 1, 2 of 4 unmasked"]  # type: ignore[attr-defined]
