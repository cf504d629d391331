"""`dlmserve join` and `keygen` from the command line, and the checkpoint that a node finds for itself."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlmserve.checkpoint import find_copy, fingerprint, resolve
from dlmserve.cli import main
from dlmserve.errors import CheckpointError
from dlmserve.messages import AgentHello, NodeLeft, Shutdown
from tests.wire_head import LIMIT_S, WireHead

ROOT = Path(__file__).parent.parent
TINY = resolve("tiny")
# The ranks are of no interest here: light ones, without torch.
RUN_JOIN = """
import sys
from dlmserve.worker import agent
from dlmserve import cli, join
class Light(agent.Agent):
    def __init__(self, *args, **more):
        super().__init__(*args, rank_command=[sys.executable, "-m", "tests.light_rank"], spare_command=None, **more)
join.Agent = Light
sys.exit(cli.main(["join", *sys.argv[1:]]))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def change_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_a_copy_has_the_fingerprint_of_the_original_wherever_it_is(copy: Path) -> None:
    assert fingerprint(str(copy), with_weights=True) == fingerprint(TINY, with_weights=True)


@pytest.mark.parametrize("at", [20, -1], ids=["header", "last weight"])
def test_other_weights_have_another_fingerprint(copy: Path, at: int) -> None:
    change_byte(copy / "model.safetensors", at)
    assert fingerprint(str(copy), with_weights=True) != fingerprint(TINY, with_weights=True)
    assert fingerprint(str(copy), with_weights=False) == fingerprint(TINY, with_weights=False)


def test_a_node_takes_the_heads_path_its_own_copy_or_what_the_name_leads_to(copy: Path) -> None:
    wanted = fingerprint(TINY, with_weights=True)
    assert find_copy(TINY, "tiny", wanted, True, None) == TINY
    assert find_copy("/not/here", "tiny", wanted, True, None) == TINY
    assert find_copy(TINY, "tiny", wanted, True, str(copy)) == str(copy)


def test_a_copy_that_differs_from_the_heads_is_refused(copy: Path) -> None:
    change_byte(copy / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"is not the head's .* `dlmserve join --model`"):
        find_copy(TINY, "tiny", fingerprint(TINY, with_weights=True), True, str(copy))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["tcp://10.1.2.3:5570", "--devices", "1"], "dlmserve keygen"),
        (["tcp://127.0.0.1:5570", "--devices", "0"], "--devices is 0"),
        (["tcp://127.0.0.1:5570", "--devices", "1", "--name", "local"], "--name is 'local'"),
        (["tcp://127.0.0.1:5570", "--devices", "1", "--name", "a:b"], "--name is 'a:b'"),
        (["tcp://127.0.0.1:5570", "--devices", "1", "--keys", "/none"], "--keys /none"),
        (["10.1.2.3", "--devices", "1"], "tcp://ADDRESS:PORT"),
    ],
)
def test_what_cannot_join_is_said_in_one_line(flags: list[str], wanted: str, capsys) -> None:
    assert main(["join", *flags]) == 2
    err = capsys.readouterr().err
    assert wanted in err and err.count("\n") == 1


def test_keygen_says_what_it_wrote_and_refuses_to_do_it_twice(tmp_path: Path, capsys) -> None:
    assert main(["keygen", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/head.key", f"{tmp_path}/node.key"]
    assert main(["keygen", str(tmp_path)]) == 2


@pytest.fixture
def head(tmp_path: Path):
    wire_head = WireHead(str(tmp_path))
    yield wire_head
    wire_head.close()


def join(head: WireHead, name: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-c",
        RUN_JOIN,
        head.endpoint,
        "--devices",
        "1",
        "--device",
        "cpu",
        "--name",
        name,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    head.next(AgentHello, node=name)
    return process


def test_a_node_that_is_told_to_leave_says_so_and_ends_well(head: WireHead) -> None:
    process = join(head, "leaver")
    process.send_signal(signal.SIGTERM)
    assert head.next(NodeLeft).node == "leaver"
    assert process.wait(LIMIT_S) == 0


def test_a_node_that_is_sent_away_says_why(head: WireHead) -> None:
    process = join(head, "stranger")
    head.send("stranger:agent", Shutdown("it speaks another protocol"))
    assert process.wait(LIMIT_S) == 1
    assert "sends this node away: it speaks another protocol" in process.communicate()[1].splitlines()[-1]
