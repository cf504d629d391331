"""A bounded storm of faults on a small cluster under load, and the account of what it did to the requests.

    python -m bench.chaos [--minutes 10] [--rate 50] [--faults 36] [--seed 0] [--json FILE]

A head with two ranks and a node with one, all on this machine, serve the embedded model to open-loop clients
(Poisson, `--rate` a second; more than this machine can answer, so part of it is told 429). Faults come one after
another, kinds in a shuffled order that repeats, each followed until the cluster is whole again. At the end the
head is killed and started again, and must take the node back without a new rank process. Loopback only.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from bench import report
from bench.chaos_cluster import POISON, Cluster, is_whole
from bench.chaos_load import Clients

RECOVERY_LIMIT_S = 120.0
HEAD_S = 30.0  # of the time, for the new head
FLOOD = 300  # requests at once

Fault = Callable[[Cluster, Clients, random.Random], Awaitable[bool]]  # whether an instance is lost by it


async def kill_rank(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    os.kill(rng.choice(await cluster.ranks("local")), signal.SIGKILL)
    return True


async def kill_rank_of_node(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    os.kill((await cluster.ranks("b"))[0], signal.SIGKILL)
    return True


async def stop_rank(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    os.kill(rng.choice(await cluster.ranks("local")), signal.SIGSTOP)
    return True


async def kill_planner(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    [killed] = cluster.pids_of("dlmserve.control.planning.process")
    os.kill(killed, signal.SIGKILL)
    end_at = time.monotonic() + RECOVERY_LIMIT_S
    while not set(cluster.pids_of("dlmserve.control.planning.process")) - {killed}:
        assert time.monotonic() < end_at, "the planner was not started again"
        await asyncio.sleep(0.2)
    return False


async def kill_agent(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    os.kill(cluster.pids_of("dlmserve.worker.agent")[0], signal.SIGKILL)
    return True


async def kill_node(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    cluster.node.kill()
    cluster.node.wait()
    cluster.node = cluster.start_node()
    return True


async def node_leaves(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    cluster.node.terminate()
    assert cluster.node.wait(30) == 0, "a node that was told to leave did not end well"
    cluster.node = cluster.start_node()
    return True


async def cut_node_off(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    """All processes of the node stand still, longer than the head waits, and come back."""
    pids = [cluster.node.pid, *await cluster.ranks("b")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    end_at = time.monotonic() + RECOVERY_LIMIT_S
    while any(node["node"] == "b" for node in (await cluster.describe()).get("nodes", [])):
        assert time.monotonic() < end_at, "a node that stands still was not noticed"
        await asyncio.sleep(0.2)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    await cluster.until_whole(RECOVERY_LIMIT_S)
    assert await cluster.ranks("b") == pids[1:], "a node that came back had its rank restarted"
    return False


async def change_layout(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    now = (await cluster.describe())["layout"]
    assert await cluster.want([2, 1] if len(now) == 3 else [1, 1, 1]) == 202
    return False


async def clients_leave(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    await clients.leave(30)
    return False


async def flood(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    for _ in range(FLOOD):
        clients.start()
    return False


async def not_finite(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    told = await asyncio.gather(*(clients.poison(POISON) for _ in range(5)))
    assert all(told), "a request whose logits are NaN was not told so"
    return False


async def strangers(cluster: Cluster, clients: Clients, rng: random.Random) -> bool:
    """Bytes that are no protocol, and a ZeroMQ peer without a key, on the nodes' port."""
    port = int(cluster.nodes_endpoint.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(rng.randbytes(1000))
    writer.close()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger:agent")
    stranger.connect(cluster.nodes_endpoint)
    stranger.send(b"hello")
    await asyncio.sleep(1.0)
    stranger.close(linger=0)
    return False


FAULTS: list[Fault] = [
    kill_rank, kill_rank_of_node, stop_rank, kill_planner, kill_agent, kill_node, node_leaves, cut_node_off,
    change_layout, clients_leave, flood, not_finite, strangers,
]  # fmt: skip


async def storm(
    cluster: Cluster, clients: Clients, rng: random.Random, num_faults: int, end_at: float
) -> list[dict]:
    """One fault after another, spread over the time that is left; what each was and how long it took to heal."""
    log: list[dict] = []
    kinds: list[Fault] = []
    for number in range(num_faults):
        kinds = kinds or rng.sample(FAULTS, len(FAULTS))
        fault = kinds.pop()
        next_at = time.monotonic() + max(0.0, end_at - time.monotonic()) / (num_faults - number)
        log.append(await one_fault(fault, cluster, clients, rng))
        print(f"{number + 1:3} {log[-1]}", file=sys.stderr, flush=True)
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    return log


async def one_fault(fault: Fault, cluster: Cluster, clients: Clients, rng: random.Random) -> dict:
    """`whole_s`: until every wanted instance serves again; `answer_s`: until the next right answer."""
    before = {each["name"] for each in (await cluster.until_whole()).get("instances", [])}
    began_at = time.monotonic()
    entry: dict = {"kind": fault.__name__}
    try:
        if await fault(cluster, clients, rng):
            while before <= {each["name"] for each in (await cluster.describe()).get("instances", [])}:
                if time.monotonic() - began_at > RECOVERY_LIMIT_S:
                    raise TimeoutError("no instance was lost: the fault was not noticed")
                await asyncio.sleep(0.05)
            entry["noticed_s"] = round(time.monotonic() - began_at, 2)
        await cluster.until_whole(RECOVERY_LIMIT_S)
        entry["whole_s"] = round(time.monotonic() - began_at, 2)
    except (AssertionError, TimeoutError) as error:
        entry["failed"] = str(error)
    later = [at - began_at for at in clients.account.right if at > began_at]
    entry["answer_s"] = round(later[0], 2) if later else None
    return entry


async def replace_head(cluster: Cluster, clients: Clients) -> dict:
    """SIGKILL; another head on the same ports takes the node back with the ranks that it has."""
    ranks = await cluster.ranks("b")
    killed_at = time.monotonic()
    clients.outages.append((killed_at, float("inf")))
    cluster.head.kill()
    cluster.head.wait()
    cluster.head = cluster.start_head()
    await cluster.until_whole()
    clients.outages[-1] = (killed_at, time.monotonic())
    return {
        "whole_s": round(time.monotonic() - killed_at, 2),
        "ranks_kept": await cluster.ranks("b") == ranks,
    }


async def idle(cluster: Cluster, clients: Clients) -> dict:
    """What is still held when nobody asks for anything any more."""
    state = await cluster.describe()
    end_at = time.monotonic() + RECOVERY_LIMIT_S
    while (state["running"] or state["waiting"] or not is_whole(state)) and time.monotonic() < end_at:
        await asyncio.sleep(0.2)
        state = await cluster.describe()
    pages = sum(each["kv_pages_in_use"] for each in state["instances"])
    return {"requests": state["running"] + state["waiting"], "kv_pages": pages}


async def run(args: argparse.Namespace, folder: Path) -> dict:
    rng = random.Random(args.seed)
    cluster = Cluster(folder)
    try:
        await cluster.until_whole()
        async with Clients(cluster.base, 40, args.seed) as clients:
            await clients.learn()
            end_at = time.monotonic() + args.minutes * 60
            stop = asyncio.Event()
            load = asyncio.create_task(clients.offer(args.rate, stop))
            faults = await storm(cluster, clients, rng, args.faults, end_at - HEAD_S)
            head = await replace_head(cluster, clients)
            await asyncio.sleep(max(0.0, end_at - time.monotonic()))
            stop.set()
            await load
            left = await idle(cluster, clients)
            left["exit_statuses"] = cluster.stop()
            left["processes"] = cluster.left_over()
            requests = clients.account.report() | {"undisturbed_accuracy": clients.undisturbed_accuracy}
    finally:
        for process in (cluster.head, cluster.node):
            if process.poll() is None:
                process.kill()
    kinds = len({fault["kind"] for fault in faults})
    return {"requests": requests, "faults": faults, "kinds": kinds, "killed_head": head, "left_over": left}


def verdict(found: dict) -> list[str]:
    """What is not as it should be."""
    wrong = [f"{f['kind']}: {f['failed']}" for f in found["faults"] if "failed" in f]
    requests, left = found["requests"], found["left_over"]
    wrong += [f"{requests[name]} requests {name}" for name in ("num_wrong", "num_lost") if requests[name]]
    wrong += [
        f"left over: {left[name]} {name}" for name in ("requests", "kv_pages", "processes") if left[name]
    ]
    if not found["killed_head"]["ranks_kept"]:
        wrong.append("the new head did not take the node's ranks back")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="at least; faults that heal slowly take longer"
    )
    parser.add_argument("--rate", type=float, default=50.0, help="requests offered per second")
    parser.add_argument("--faults", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        found = asyncio.run(run(args, Path(folder)))
    found["options"] = {"minutes": args.minutes, "rate": args.rate}
    if args.json:
        report.write(args.json, args.seed, found)
    for kind in sorted({fault["kind"] for fault in found["faults"]}):
        healed = [f["whole_s"] for f in found["faults"] if f["kind"] == kind and "whole_s" in f]
        print(f"{kind:18} whole again after {', '.join(f'{s:.1f}' for s in healed)} s")
    print({**found["requests"], "killed_head": found["killed_head"], "left_over": found["left_over"]})
    wrong = verdict(found)
    print("\n".join(wrong) or "nothing lost, nothing wrong, nothing left over")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
