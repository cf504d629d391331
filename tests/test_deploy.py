"""The files of deploy/ against the program: each command line through the real parser, probes through the routes."""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from dlmserve.config import ServerConfig
from dlmserve.flags import Parser, add_flags, make_config
from dlmserve.join import join_parser
from tests.fake_head import FakeHead, scripted
from tests.http_client import HELLO, Client, run

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DRAIN_S = ServerConfig().drain_s
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFEST: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
SERVICES = {each["metadata"]["name"]: each["spec"] for each in MANIFEST if each["kind"] == "Service"}
PODS = {
    each["metadata"]["name"]: each["spec"]["template"] for each in MANIFEST if each["kind"] == "Deployment"
}
HEAD, NODE = (PODS[name]["spec"]["containers"][0] for name in ("dlmserve-head", "dlmserve-node"))


def head_config(argv: list[str]) -> ServerConfig:
    parser = Parser(prog="dlmserve")
    add_flags(parser)
    return make_config(parser.parse(argv))


# ---- Kubernetes


def test_the_manifests_commands_are_ones_that_the_program_takes() -> None:
    config = head_config(HEAD["args"])
    assert config.host == "0.0.0.0" and config.devices == 0 and config.listen
    assert NODE["args"][0] == "join"
    node = join_parser().parse(NODE["args"][1:])
    assert node.devices == NODE["resources"]["limits"]["nvidia.com/gpu"] == len(config.tp_layout)


def test_a_node_reaches_a_head_that_is_not_ready_yet() -> None:
    """It never would be otherwise: it is ready when nodes have brought an instance."""
    config, head = head_config(HEAD["args"]), urlsplit(join_parser().parse(NODE["args"][1:]).head)
    service = SERVICES[head.hostname]
    assert service["publishNotReadyAddresses"]
    assert service["selector"].items() <= PODS["dlmserve-head"]["metadata"]["labels"].items()
    assert [port["port"] for port in service["ports"]] == [head.port] == [urlsplit(config.listen).port]


def test_clients_reach_a_ready_head_only() -> None:
    service = SERVICES["dlmserve"]
    assert not service.get("publishNotReadyAddresses")
    assert [port["port"] for port in service["ports"]] == [head_config(HEAD["args"]).port]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_what_the_server_answers(probe: str) -> None:
    head = FakeHead(scripted(HELLO))

    async def story(client: Client) -> None:
        wanted = {True: 200, False: 503 if probe == "readinessProbe" else 200}
        for head.ready in (True, False):
            status, _ = await client.get(HEAD[probe]["httpGet"]["path"])
            assert status == wanted[head.ready]

    assert HEAD[probe]["httpGet"]["port"] == head_config(HEAD["args"]).port
    run(story, head)


def test_mounted_keys_are_the_ones_that_are_read() -> None:
    for pod, container, name in (
        (PODS["dlmserve-head"], HEAD, "head"),
        (PODS["dlmserve-node"], NODE, "node"),
    ):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert f"{mounts['keys']}/{name}.key" in container["args"]


# ---- every stop timeout


def test_no_one_kills_a_head_that_drains() -> None:
    unit = (DEPLOY / "dlmserve.service").read_text()
    assert PODS["dlmserve-head"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > DRAIN_S
    assert int(re.findall(r"--stop-timeout (\d+)", DOCKERFILE)[0]) > DRAIN_S


# ---- systemd


def test_the_units_command_is_one_that_the_program_takes(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(DEPLOY / "dlmserve.service")
    program, *argv = shlex.split(unit["Service"]["ExecStart"])
    assert f'{Path(program).name} = "dlmserve.cli:main"' in (ROOT / "pyproject.toml").read_text()
    settings = tmp_path / "dlmserve.toml"
    settings.write_text("port = 8001\n")
    argv[argv.index("--config") + 1] = str(settings)
    config = head_config(argv)
    assert config.port == 8001 and config.log_format == "json"


# ---- Docker


def test_the_images_commands_are_ones_that_the_program_takes() -> None:
    lines = {
        name: json.loads(words) for name, words in re.findall(r"^(ENTRYPOINT|CMD) (.*)$", DOCKERFILE, re.M)
    }
    assert lines["ENTRYPOINT"][-3:] == ["python", "-m", "dlmserve"]
    assert head_config(lines["CMD"]).host == "0.0.0.0"
    example = re.findall(r"#   docker run .*\\\n#     dlmserve (.*)", DOCKERFILE)[0]
    assert head_config(shlex.split(example)).host == "0.0.0.0"


def test_the_image_runs_as_the_user_whose_cache_the_manifest_mounts() -> None:
    user, home = re.findall(r"useradd --create-home --uid (\d+) (\w+)", DOCKERFILE)[0]
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == [user]
    for pod, container in ((PODS["dlmserve-head"], HEAD), (PODS["dlmserve-node"], NODE)):
        assert pod["spec"]["securityContext"]["fsGroup"] == int(user)
        assert f"/home/{home}/.cache" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_image_is_not_run_in_the_folder_of_the_sources() -> None:
    """There `python -m dlmserve` would import the sources, which are without the compiled kernels."""
    folders = re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.M)
    assert len(folders) == 2 and folders[0] != folders[1]


def test_what_the_image_is_built_of_is_in_its_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert sent >= {"dlmserve", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"}
    assert "requirements.lock" in sent
    assert all((ROOT / name).exists() for name in sent)


# ---- Slurm


@pytest.fixture
def slurm_job(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Runs the batch script with stand-ins for srun and Python: the command lines that would run, nodes' first."""

    def stand_in(name: str, body: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    # srun runs its command once, as on one node; Python prints its arguments, one line of JSON in one write.
    stand_in("srun", 'echo "$@" >&2; while [ "$1" != bash ]; do shift; done; SLURMD_NODENAME=n2 exec "$@"')
    shown = f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\""
    python = stand_in("python-stand-in", shown)

    def job(*argv: str, nodes: int, **env: str) -> list[list[str]]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHON": python, "SLURM_JOB_NUM_NODES": str(nodes), **env}
        command = ["bash", str(DEPLOY / "slurm.sh"), *argv]
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
        if nodes > 1:  # without --ntasks srun would take the job's: one more than there are nodes to join
            assert f"--nodes={nodes - 1} --ntasks={nodes - 1}" in done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert all(line[:2] == ["-m", "dlmserve"] for line in lines)
        return sorted((line[2:] for line in lines), key=lambda line: line[0] != "join")

    return job


def test_a_slurm_job_is_a_head_and_nodes_that_join_it(slurm_job: Callable[..., list[list[str]]]) -> None:
    node, head = slurm_job(
        "--model", "llada-8b", nodes=3, SLURM_GPUS_PER_NODE="a100:4", SLURM_GPUS_ON_NODE="8"
    )
    config = head_config(head)
    assert config.tp_layout == (1,) * 12 and config.devices == 4 and config.model == "llada-8b"
    joined = join_parser().parse(node[1:])
    assert joined.devices == 4 and joined.name == "n2" and joined.keys == "keys/node.key"
    assert urlsplit(joined.head).port == urlsplit(config.listen).port
    assert config.drain_s < 30  # Slurm's default KillWait


def test_a_slurm_job_goes_by_its_environment(slurm_job: Callable[..., list[list[str]]]) -> None:
    given = {"DEVICES": "2", "TP_LAYOUT": "2", "KEYS": "/k", "PORT": "6000"}
    [head] = slurm_job("--drain-s", "5", nodes=1, **given)
    config = head_config(head)
    assert (config.devices, config.tp_layout, config.keys) == (2, (2,), "/k/head.key")
    assert config.listen == "tcp://0.0.0.0:6000" and config.drain_s == 5
