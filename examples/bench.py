"""Measure the queue on a disk, beside what bare system calls reach there.

    python3 examples/bench.py                  in this directory, about a minute
    python3 examples/bench.py DIR --jobs 1000 --rounds 1
    python3 examples/bench.py sqlite:///bench.db --jobs 1000

Each row is a kind of work, its rate, the floor, which is the same work done by bare
system calls in the same run, and the share of the floor's speed that the queue
reaches. The measures take turns, in three rounds, and medians are shown. A directory
gets a temporary one in it, of a hundred megabytes. In a database, which has no floor,
the queues whose names begin with tiny-queue-bench are emptied, before and after.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now

JOB = {"to": "ada@example.com", "n": 12345}
MANY = 1000  # jobs of one put_many
CROWD_SECONDS = 1.0
PUTS_A_SECOND = 400
# From a process that has done nothing yet: like programs of their own, but quickly.
START = multiprocessing.get_context("forkserver")


class Bench:
    """The measures, each of which notes its figures of one round."""

    def __init__(self, place, jobs, rounds):
        self.place = place
        self.url = "://" in place
        self.jobs = jobs
        self.rounds = rounds
        self.quick = max(500, jobs // 20)  # operations without a sync
        self.synced = max(20, jobs // 400)  # and with one
        self.heavy = min(max(jobs, 20_000), 100_000)  # jobs of 1 KB: fewer hide
        self.seen = {}  # work, unit: the value and the floor of each round

    def run(self):
        self.fill("few", 100, JOB)
        self.fill("deep", self.jobs, JOB)
        measures = [self.one_by_one, self.with_fsync, self.backlog]
        measures += [self.wake_up, self.kill, self.crowd, self.waiting]
        if not self.url and os.path.exists("/proc/self/statm"):
            self.fill("heavy", self.heavy, "x" * 1000)
            measures.insert(3, self.memory)
        for turn in range(self.rounds):
            for measure in measures:
                name = measure.__name__.replace("_", " ")
                progress(f"round {turn + 1} of {self.rounds}: {name}")
                measure(turn)
        progress("")
        return [self.row(*work, rounds) for work, rounds in self.seen.items()]

    def where(self, name):
        """Path and name of a queue for one measure."""
        if self.url:
            return self.place, f"tiny-queue-bench-{name.rstrip('0123456789')}"
        return os.path.join(self.place, name), "default"

    def open(self, name, fsync=True):
        return tq.Queue(*self.where(name), fsync=fsync)

    def fill(self, name, count, payload):
        """Write a backlog, once for all rounds."""
        with self.open(name, False) as queue:
            for start in range(0, count, MANY):
                progress(f"writing {count:,} jobs: {start:,}")
                queue.put_many([payload] * min(MANY, count - start))

    def empty(self):
        for name in ("few", "deep", "quick", "synced", "wake", "kill", "crowd", "idle"):
            with self.open(name, False) as queue:
                for state in ("pending", "inflight", "dead"):
                    queue.purge(state)

    def note(self, work, unit, value, floor=math.nan):
        self.seen.setdefault((work, unit), []).append((value, floor))

    def row(self, work, unit, rounds):
        """The medians; that of the share is of each round's."""
        digits = 0 if unit in ("/s", "bytes") else 2
        behind = unit if unit == "/s" else f" {unit}"
        medians = map(statistics.median, zip(*rounds))
        cells = [f"{number:,.{digits}f}{behind}" for number in medians]
        share = statistics.median(floor / value for value, floor in rounds)
        share = {"/s": 1 / share, "times": math.nan}.get(unit, share)
        cells.append(f"{share:.2f}")
        return [work, *("-" if "nan" in cell else cell for cell in cells)]

    # One process

    def one_by_one(self, turn):
        with self.open(f"quick{turn}", False) as queue:
            put, take, bare_put, bare_take = self.ready(queue)
            self.pair("put, fsync=False", self.quick, put, bare_put)
            self.pair("get + task_done, fsync=False", self.quick, take, bare_take)

    def with_fsync(self, turn):
        with self.open(f"synced{turn}") as queue:
            put, take, bare_put, bare_take = self.ready(queue)
            one, bare_one = self.pair("put", self.synced, put, bare_put)
            # Eight that wait for a sync share the next; the floor's sync one each.
            work = "put by 8 threads"
            eight, bare_eight = self.pair(work, self.synced, put, bare_put, threads=8)
            self.note("8 threads, to one", "times", eight / one, bare_eight / bare_one)
            self.pair("get + task_done", self.synced, take, bare_take)
            many = functools.partial(queue.put_many, [JOB] * MANY)
            bare_many = bare_put and functools.partial(bare_put, MANY)
            calls, work = max(3, self.synced // 25), f"put_many, {MANY:,} a call"
            self.pair(work, calls, many, bare_many, each=MANY)

    def ready(self, queue):
        round_trip(queue)  # the first makes the files
        put = functools.partial(queue.put, JOB)
        take = functools.partial(settle_next, queue)
        if self.url:
            return put, take, None, None
        bare = BareCalls(queue)
        return put, take, bare.put, bare.take

    def pair(self, work, count, ours, bare, each=1, threads=1):
        """Time both, one after the other, and note jobs per second."""
        value = each * rate(count, ours, threads)
        floor = each * rate(count, bare, threads) if bare else math.nan
        self.note(work, "/s", value, floor)
        return value, floor

    def backlog(self, turn):
        """The queue object that has read it all serves what follows, too."""
        waiting, start = f"{self.jobs:,} waiting", time.perf_counter()
        with self.open("deep", False) as queue:
            queue.release(queue.get())
            if self.url:
                self.round_trips(queue, waiting)
                return
            value = self.jobs / (time.perf_counter() - start)
            file = os.path.join(queue.path, "default.pending.jsonl")
            floor = self.jobs * rate(1, lambda: read_lines(file))
            self.note(f"open with {waiting}, first get", "/s", value, floor)
            self.round_trips(queue, waiting)
            copy = functools.partial(copy_lines, file)
            self.pair(f"compact, {waiting}", 1, queue.compact, copy, each=self.jobs)

    def round_trips(self, queue, waiting):
        few, many, count, floor = 0.0, 0.0, self.quick // 5, math.nan
        with self.open("few", False) as other:
            for _ in range(5):  # by turns: the machine may slow down meanwhile
                few += 1 / rate(count, lambda: round_trip(other))
                many += 1 / rate(count, lambda: round_trip(queue))
            if not self.url:
                bare = BareCalls(other)
                floor = 1 / rate(self.quick, bare.put) + 1 / rate(self.quick, bare.take)
        self.note("round trip, fsync=False, 100 waiting", "/s", 5 / few, 1 / floor)
        self.note(f"round trip, fsync=False, {waiting}", "/s", 5 / many, 1 / floor)
        self.note(f"cost with {waiting}, to 100", "times", many / few)

    # More than one

    def memory(self, turn):
        with children([grow], *self.where("heavy")) as [child]:
            work = f"memory a job of 1 KB, {self.heavy:,} waiting"
            self.note(work, "bytes", child.recv() / self.heavy)

    def wake_up(self, turn):
        """The floor is the wake-up of a process that reads from a pipe."""
        count = max(20, min(200, self.jobs // 500))
        be_woken_so_often, late = functools.partial(be_woken, count=count), []
        with self.open(f"wake{turn}", False) as queue:
            with children([be_woken_so_often], *self.where(f"wake{turn}")) as [child]:
                for send in (functools.partial(tell, child), queue.put):
                    for _ in range(count):
                        time.sleep(0.005)  # until it sleeps again
                        send(time.monotonic())
                    late.append(child.recv())
        for what, n in (("median", count // 2), ("99th percentile", count * 99 // 100)):
            self.note(f"wake-up of a process, {what}", "ms", late[1][n], late[0][n])

    def kill(self, turn):
        """From the holder's death to the delivery to a process that waits."""
        name = f"kill{turn}"
        with self.open(name) as queue, ThreadPoolExecutor(1) as pool:
            queue.put(JOB)
            with children([hold], *self.where(name)):
                found = pool.submit(queue.get, 60.0)
                # Anywhere in the second between two looks at the holders.
                time.sleep((turn + 0.5) / self.rounds)
                start = time.perf_counter()
            queue.task_done(found.result())  # the child was killed
        self.note("redelivery after kill -9", "s", time.perf_counter() - start)

    def crowd(self, turn):
        """Four that put and four that take, to one process that does both."""
        kinds = [functools.partial(along, work=work) for work in (put_one, settle_next)]
        with self.open(f"crowd{turn}", False) as queue:
            queue.put_many([JOB] * self.quick)  # that no taker runs dry
            one = 2 * rate(self.quick // 2, lambda: round_trip(queue))
            with children(kinds * 4, *self.where(f"crowd{turn}")) as all8:
                for child in all8:
                    tell(child, time.monotonic() + CROWD_SECONDS)
                counts, longest = zip(*(child.recv() for child in all8))
        fair = min(4 * min(four) / sum(four) for four in (counts[::2], counts[1::2]))
        total = sum(counts) / CROWD_SECONDS / one
        self.note("8 processes, 4 put and 4 take, to one", "times", total)
        self.note("the slowest of four of them, to their mean", "times", fair)
        self.note("the longest call among the 8", "ms", max(longest) * 1e3)

    def waiting(self, turn):
        with self.open(f"idle{turn}", False) as queue:
            with children([wait] * 8, *self.where(f"idle{turn}")) as all8:
                start = time.monotonic()
                for i in range(PUTS_A_SECOND):
                    time.sleep(max(0.0, start + i / PUTS_A_SECOND - time.monotonic()))
                    queue.put(JOB)
                for child in all8:
                    tell(child, 0.0)
                used = sum(child.recv() for child in all8)
        what = f"CPU of 8 waiting workers at {PUTS_A_SECOND} puts a second"
        self.note(what, "cores", used / (time.monotonic() - start))


class BareCalls:
    """The floor of an operation: its system calls and JSON, nothing else."""

    PUT = (
        '{"id":"0123456789abcdef-1","rev":1,"attempts":0,"priority":0,"run_at":0,'
        '"created_at":1795977084.7783115,"payload":%s,"crc":"9a1c0073"}\n'
    )
    LEASE = b" " * 300 + b"\n"  # as long as real ones
    DONE = b" " * 64 + b"\n"

    def __init__(self, queue):
        folder = f"{queue.path}-bare"
        os.makedirs(folder, exist_ok=True)
        self.paths = [os.path.join(folder, name) for name in ("lock", "p", "i", "d")]
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        self.fds = [os.open(path, flags) for path in self.paths]
        self.sync = sync if queue.fsync else int  # int: nothing to wait for
        self.mutex = threading.Lock()  # threads share the flock's descriptor
        self.put()

    def put(self, jobs=1):
        lines = [self.PUT % json.dumps(JOB) for _ in range(jobs)]
        self.append(self.fds[1], "".join(lines).encode(), 2)
        self.sync(self.fds[1])

    def take(self):
        json.loads(self.append(self.fds[2], self.LEASE, 4).split(b"\n")[0])
        self.append(self.fds[2], self.DONE, 4)
        self.sync(self.fds[2])

    def append(self, fd, block, stats):
        line = b""
        with self.mutex:
            fcntl.flock(self.fds[0], fcntl.LOCK_EX)
            for path in self.paths[:stats]:
                os.lstat(path)
            if block is self.LEASE:
                line = os.pread(self.fds[1], 200, 0)
            os.write(fd, block)
            fcntl.flock(self.fds[0], fcntl.LOCK_UN)
        return line


def sync(fd):
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the disk's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def read_lines(path):
    """The floor of an opening: read, split, and check each line."""
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    for line in lines:
        crc32(line)
    return lines


def copy_lines(path):
    """The floor of a compaction: that, and a synced copy."""
    with open(f"{path}.bare", "wb", buffering=0) as file:
        file.write(b"\n".join(read_lines(path)))
        sync(file.fileno())


def rate(count, work, threads=1):
    """How often a second it is done, by threads that do it so often each."""
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            every = functools.partial(pool.map, rate, [count] * threads)
            return threads * count * rate(1, lambda: list(every([work] * threads)))
    start = time.perf_counter()
    for _ in range(count):
        work()
    return count / (time.perf_counter() - start)


def settle_next(queue):
    job = queue.get(0.05)  # of many takers one may run dry
    if job is not None:
        queue.task_done(job)


def put_one(queue):
    queue.put(JOB)


def round_trip(queue):
    put_one(queue)
    settle_next(queue)


# The other side of a measure, in processes of their own


@contextlib.contextmanager
def children(functions, path, name):
    """Processes that run function(pipe, path, name), ready to start together."""
    pipes, processes = [], []
    try:
        for function in functions:
            ours, theirs = START.Pipe()
            pipes.append(ours)
            arguments = (function, theirs, path, name)
            processes.append(START.Process(target=in_child, args=arguments))
            processes[-1].start()
            theirs.close()
        for pipe in pipes:
            pipe.recv()  # "ready"
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_child(function, pipe, path, name):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    function(pipe, path, name)


def tell(pipe, instant):
    os.write(pipe.fileno(), struct.pack("d", instant))  # with less ado than send()


def told(pipe):
    return struct.unpack("d", os.read(pipe.fileno(), 8))[0]


def grow(pipe, path, name):
    """By how many bytes this process grows when it reads a backlog: the mean of four
    times after the first, which also fills what start-up has freed."""
    pipe.send("ready")
    sizes = []
    for queue in [tq.Queue(path, name) for _ in range(5)]:
        queue.stats()
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    pipe.send((sizes[-1] - sizes[0]) / 4)


def be_woken(pipe, path, name, count):
    """Milliseconds after each message in a pipe, then after each put, sorted."""

    def late(since):
        return (time.monotonic() - since) * 1e3  # one clock for all processes

    def take():
        job = queue.get(timeout=60.0)
        delay = late(job.payload)
        queue.task_done(job)
        return delay

    with tq.Queue(path, name, fsync=False) as queue:
        queue.stats()
        pipe.send("ready")
        pipe.send(sorted(late(told(pipe)) for _ in range(count)))
        pipe.send(sorted(take() for _ in range(count)))


def hold(pipe, path, name):
    job = tq.Queue(path, name).get()
    pipe.send(job.id)
    told(pipe)  # until it is killed


def along(pipe, path, name, work):
    """How often until an instant, and the longest time that it took."""
    with tq.Queue(path, name, fsync=False) as queue:
        work(queue)
        pipe.send("ready")
        until = told(pipe)
        count, longest, now = 0, 0.0, time.monotonic()
        while now < until:
            work(queue)
            before, now = now, time.monotonic()
            count, longest = count + 1, max(longest, now - before)
        pipe.send((count, longest))


def wait(pipe, path, name):
    """CPU seconds of taking what comes, until told to stop."""
    with tq.Queue(path, name, fsync=False) as queue:
        worker = tq.Worker(queue, lambda job: None, handle_signals=False)
        thread = threading.Thread(target=worker.run_forever)
        thread.start()
        pipe.send("ready")
        start = time.process_time()
        told(pipe)
        pipe.send(time.process_time() - start)
        worker.stop()
        thread.join()


# What it says


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show(rows, place, jobs):
    """As a table, aligned for people, that Markdown understands too."""
    rows = [["work", "rate", "floor", "of floor"], *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * widths[0], *("-" * (n - 1) + ":" for n in widths[1:])])
    for work, *cells in rows:
        cells = map(str.rjust, cells, widths[1:])
        print(f"| {' | '.join([work.ljust(widths[0]), *cells])} |")
    where = place.split("://")[0]
    if where == place:
        told = subprocess.run(["df", "-P", place], capture_output=True, text=True)
        where = told.stdout.splitlines()[-1].split()[0]
    print(
        f"\n{time.strftime('%Y-%m-%d')}, tiny_queue {tq.__version__},"
        f" Python {platform.python_version()}, {platform.platform()},"
        f" {os.cpu_count()} cores, on {where}, {jobs:,} jobs."
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", nargs="?", default=".", metavar="DIR_OR_URL")
    parser.add_argument("--jobs", type=int, default=100_000, help="waiting jobs")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # SIGTERM ends it like Ctrl-C: its hundred megabytes go in both cases.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    url = "://" in args.place
    parent = None if url else args.place
    with tempfile.TemporaryDirectory(prefix="tq-bench-", dir=parent) as folder:
        place = args.place if url else os.path.abspath(folder)
        bench = Bench(place, args.jobs, args.rounds)
        if url:
            bench.empty()  # what a killed one left
        try:
            rows = bench.run()
        finally:
            if url:
                bench.empty()
    show(rows, args.place, args.jobs)


if __name__ == "__main__":
    main()
