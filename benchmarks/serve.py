"""Load test of `dubito serve` and `dubito play`: latency at a fixed rate of requests, and the largest throughput.

    python benchmarks/serve.py [--rate 200] [--seconds 20] [--run RUN] [--play] [--priority -15]

With --play the requests are those of the page of `dubito play` (/ask): both answers, nearest rows and, where there is a
number to sweep, 41 more rows. --priority raises the priority of client and server beside other programs (as root).

Starts the server as a program, and sends single rows over keep-alive connections from this process, so client and
server share the machine. At a fixed rate requests start on schedule, whether or not earlier ones were answered, and
latency counts from the scheduled start: a slow server cannot hide behind a client that waits for it. The throughput is
that of 32 clients which send the next request when they have the answer. Without --run a regression and a
classification run are fitted to generated tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dubito import Laplace, runs


def make_runs(folder: Path) -> dict[str, Path]:
    """Fit a run on houses that predicts a price, and one that predicts a class."""
    rng = random.Random(0)
    towns = {"Ulm": 100, "Bern": 400, "Graz": 200, "Wien": 300}
    size = [rng.uniform(30, 200) for _ in range(600)]
    rooms, town = [rng.randint(1, 6) for _ in size], [rng.choice(list(towns)) for _ in size]
    price = [towns[t] + s + 5 * r + rng.gauss(0, 20) for t, s, r in zip(town, size, rooms, strict=True)]
    kind = ["cheap" if p < 300 else "usual" if p < 450 else "dear" for p in price]
    table = {"size": size, "rooms": rooms, "town": town}
    found = {}
    for name, target in (("numbers", price), ("classes", kind)):
        training = {"epochs": 100, "lr": 0.01}
        run = runs.fit({**table, name: target}, name, recipe=Laplace(), training=training, progress=False)
        run.save(folder / name)
        found[name] = folder / name
    return found


def row_of(run: Path) -> dict[str, Any]:
    """Return a row of the training data."""
    loaded = runs.load(run)
    return {name: values[0] for name, values in loaded.cells("train", [0]).items()}


def request_of(run: Path, play: bool, token: str) -> bytes:
    """Return a whole HTTP request."""
    row = row_of(run)
    swept = next((name for name, value in row.items() if isinstance(value, float)), None)
    drawn = any(name.startswith("pixel") for name in row)  # a picture has no sweep
    if drawn:  # some pixels of a drawing have values that no training picture had; so have those of one that is moved
        names, cells = list(row), list(row.values())
        row = dict(zip(names, cells[len(cells) // 8 :] + cells[: len(cells) // 8], strict=True))
    value = {"row": row, "sweep": None if drawn else swept} if play else {"rows": [row]}
    body = json.dumps(value).encode()
    lines = (
        f"POST /{'ask' if play else 'predict'}{token} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
    )
    return "\r\n".join([*lines, f"content-length: {len(body)}"]).encode() + b"\r\n\r\n" + body


class Connection:
    """One keep-alive connection."""

    async def open(self, port: int, message: bytes) -> Connection:
        """Connect, and return the connection."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.message = message
        return self

    async def ask(self) -> None:
        """Send a request, and read its answer."""
        self.writer.write(self.message)
        head = await self.reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await self.reader.readexactly(length)


async def fixed_rate(port: int, message: bytes, rate: float, seconds: float) -> list[float]:
    """Return the latency of each request, from the time at which it was due."""
    free, latencies, tasks = [await Connection().open(port, message) for _ in range(16)], [], []
    rng, begin, due = random.Random(0), time.perf_counter(), 0.0

    async def one(when: float) -> None:
        connection = free.pop() if free else await Connection().open(port, message)
        await connection.ask()
        latencies.append(time.perf_counter() - begin - when)
        free.insert(0, connection)

    while due < seconds:
        due += rng.expovariate(rate)  # requests of many independent clients
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return latencies


async def throughput(port: int, message: bytes, seconds: float, clients: int = 32) -> float:
    """Return the requests per second of clients that ask again at once."""
    end, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        connection = await Connection().open(port, message)
        while time.perf_counter() < end:
            await connection.ask()
            count += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return count / seconds


def measure(run: Path, rate: float, seconds: float, play: bool) -> None:
    code = "from dubito.cli import main; main()"
    words = [sys.executable, "-c", code, "play" if play else "serve", str(run), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if "127.0.0.1:" in line)
            place, _, query = line.partition("127.0.0.1:")[2].split()[0].partition("?")
            port, message = int(place.rstrip("/")), request_of(run, play, f"?{query}" if query else "")
            asyncio.run(fixed_rate(port, message, 50, 1))  # warm
            latencies = sorted(asyncio.run(fixed_rate(port, message, rate, seconds)))
            most = asyncio.run(throughput(port, message, seconds / 2))
        finally:
            server.terminate()
    p50, p99 = statistics.median(latencies), latencies[int(0.99 * len(latencies))]
    told = f"{len(latencies)} requests at {rate:g}/s: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, "
    print(f"{run.name}: {told}largest {1e3 * latencies[-1]:.1f} ms; 32 clients: {most:.0f} requests/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--play", action="store_true")
    parser.add_argument("--priority", type=int, default=0)
    chosen = parser.parse_args()
    os.nice(chosen.priority)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the test")
    with tempfile.TemporaryDirectory() as folder:
        found = [chosen.run] if chosen.run else list(make_runs(Path(folder)).values())
        for run in found:
            measure(run, chosen.rate, chosen.seconds, chosen.play)
    print(f"CPU of the servers: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.1f} s")


if __name__ == "__main__":
    main()
