"""Key files: made once, readable by their owner, of use only at their own end."""

import json
import stat
from pathlib import Path

import pytest

from dlmserve import keys
from dlmserve.errors import ConfigError


def test_each_end_has_its_own_secret_and_the_others_public_key(tmp_path: Path) -> None:
    head_file, node_file = keys.generate(str(tmp_path / "new"))
    head, node = keys.read(str(head_file), "head"), keys.read(str(node_file), "node")
    assert (head.peer, node.peer) == (node.public, head.public)
    assert len({head.secret, node.secret, head.public, node.public}) == 4
    for path in (head_file, node_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    [head_file, _] = keys.generate(str(tmp_path))
    before = head_file.read_text()
    with pytest.raises(ConfigError, match="choose a folder without keys"):
        keys.generate(str(tmp_path))
    assert head_file.read_text() == before


def test_the_other_ends_file_is_refused(tmp_path: Path) -> None:
    [head_file, _] = keys.generate(str(tmp_path))
    with pytest.raises(ConfigError, match=r"is for a head; wanted the node.key"):
        keys.read(str(head_file), "node")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"role": "node", "public": "x", "secret": 1, "peer": "y"})]
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.key").write_text(text)
    with pytest.raises(ConfigError, match="--keys"):
        keys.read(str(tmp_path / "node.key"), "node")
