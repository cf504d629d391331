"""Many clients at once on a server that runs here: none may fail, /health must stay quick, nothing may be left behind.

    python -m bench.load [--clients 200] [--json bench/results/load_cpu.json]

Starts `python -m dlmserve` with the embedded model, opens that many streams at once while /health is asked over and
over, then reads the gauges. Bounded in clients and in time; loopback only.
"""

import argparse
import asyncio
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from multiprocessing import Queue, get_context
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import aiohttp

from bench import report, tasks

READY_LIMIT_S = 120
TOTAL_LIMIT_S = 300
GAUGES = ("requests_running", "requests_waiting", "kv_pages_in_use")


async def stream(session: aiohttp.ClientSession, prompt: str) -> dict:
    """One streamed chat completion: seconds to the first text and to the end, and what went wrong."""
    began = time.perf_counter()
    first: float | None = None
    text, done, finish = "", False, None
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return {"error": f"status {response.status}: {await response.text()}"}
        async for line in response.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                done = True
            elif data:
                chunk = json.loads(data)
                if "error" in chunk:
                    return {"error": chunk["error"]["message"]}
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        text += choice["delta"]["content"]
                    finish = choice["finish_reason"] or finish
    if not done or finish is None:
        return {"error": "the stream ended early"}
    return {"first_s": first, "total_s": time.perf_counter() - began, "text": text}


def probe_health(base: str, started: Event, stop: Event, out: Queue) -> None:
    """In a process of its own, so that the clients' work is not taken for the server's."""
    address = urlsplit(base)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    times = []
    while not stop.wait(0.02):
        began = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        times.append(time.perf_counter() - began)
        started.set()
    out.put(times)


async def read_metrics(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()


def sums(text: str) -> dict[str, float]:
    """Each metric, added up over its labels."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def idle_quantiles(text: str) -> dict[str, float]:
    """Upper bounds, by histogram bucket, of the time between two steps of a busy instance."""
    found = re.findall(r'^dlmserve_step_idle_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)$', text, re.MULTILINE)
    buckets = [(1e3 * float(bound), float(count)) for bound, count in found]
    total = buckets[-1][1] if buckets else 0.0
    return {
        f"p{q}": next((bound for bound, count in buckets if count >= total * q / 100), 0.0)
        for q in (50, 90, 99)
    }


async def measure(base: str, num_clients: int, seed: int) -> dict:
    problems = tasks.problems("test", num_clients, seed)
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=TOTAL_LIMIT_S)
    async with aiohttp.ClientSession(base, connector=connector, timeout=limit) as session:
        context = get_context("spawn")
        started, stop, out = context.Event(), context.Event(), context.Queue()
        prober = context.Process(target=probe_health, args=(base, started, stop, out))
        prober.start()
        await asyncio.to_thread(started.wait)
        began = time.perf_counter()
        answers = await asyncio.gather(*(stream(session, p.prompt) for p in problems))
        total_s = time.perf_counter() - began
        stop.set()
        health_s = sorted(await asyncio.to_thread(out.get))
        prober.join()
        text = await read_metrics(session)
        metrics = sums(text)
    good = [a for a in answers if "error" not in a]
    return {
        "clients": num_clients,
        "failed": [a["error"] for a in answers if "error" in a],
        "right": sum(tasks.score(p, a.get("text", "")) for p, a in zip(problems, answers, strict=True)),
        "requests_per_s": num_clients / total_s,
        "latency_s": report.spread([a["total_s"] for a in good]),
        "health_ms": {
            "p50": 1e3 * health_s[len(health_s) // 2],
            "p99": 1e3 * health_s[int(len(health_s) * 0.99)],
        },
        "left_over": {name: metrics.get(f"dlmserve_{name}", 0.0) for name in GAUGES},
        "idle_at_most_ms": idle_quantiles(text),
        "head_cpu_s": metrics.get("process_cpu_seconds_total", 0.0),
        "head_rss_mb": metrics.get("process_resident_memory_bytes", 0.0) / 2**20,
    }


def start_server(args: list[str]) -> tuple[subprocess.Popen, str, float]:
    """The process, its address, and how long it took to be ready. Raises SystemExit where it does not start."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "dlmserve", "--port", "0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    for line in process.stdout:
        if found := re.search(r"serving \S+ on (http://\S+)", line):
            # A full pipe would stop the server at its next log line.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, found[1], time.perf_counter() - began
        if time.perf_counter() - began > READY_LIMIT_S:
            break
    process.kill()
    raise SystemExit("the server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200, help="streams at once (at most 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    args, server_args = parser.parse_known_args()
    process, base, ready_s = start_server(server_args)
    try:
        result = asyncio.run(measure(base, min(args.clients, 1000), args.seed))
    finally:
        process.terminate()
        process.wait()
    result |= {"ready_s": ready_s, "exit_status": process.returncode}
    print(json.dumps(result, indent=1))
    if args.json:
        report.write(args.json, args.seed, result)


if __name__ == "__main__":
    main()
