# /// script
# requires-python = ">=3.11"
# dependencies = ["huey", "litequeue", "nobroker", "persist-queue", "potatoq>=26.1a1",
#     "procrastinate", "psycopg[binary,pool]"]
# ///
"""Compare tiny_queue with its peers, those that are installed: the same work.

    uv run examples/compare.py                     installs the peers, then compares
    python3 examples/compare.py [--jobs N] [--dir D] [PEER ...]
    python3 examples/compare.py --url postgresql://HOST/DB [--jobs N]

The last compares on a PostgreSQL server (with psycopg 3, potatoq and procrastinate, in
schemas of their own that are dropped at the end), and measures the cost of a backlog
of N waiting and N scheduled jobs.

Each peer works in a process of its own, by turns, in three rounds. Shown are the
medians of jobs per second, and how many times that tiny_queue does. The tables are
two promises: what has returned survives a power cut, or the death of processes only.
Peers that run tasks are measured at their storage, which favours them.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's

JOB = {"to": "ada@example.com", "n": 12345}
MANY = 1000
WORK = ("put", "put_many", "get + done", "open")  # open: until the first get
ROUNDS = 3


# Each peer: what there is to know of it, and its put, put_many, get and done.


def tiny_queue(folder, fsync):
    """acknowledges, with a fencing token; a dead holder's job is back at once"""
    import tiny_queue

    queue = tiny_queue.Queue(folder, fsync=fsync)
    return queue.put, queue.put_many, queue.get, queue.task_done


def on_sqlite(folder, fsync):
    """the same in a SQLite database"""
    import tiny_queue

    queue = tiny_queue.Queue(f"sqlite:///{folder}/queue.db", fsync=fsync)
    return queue.put, queue.put_many, queue.get, queue.task_done


def nobroker(folder, fsync):
    """acknowledges, with a token; a dead holder's job is back after a timeout"""
    import nobroker

    queue = nobroker.Queue(folder, fsync=fsync)
    return queue.enqueue, queue.enqueue_many, queue.lease_one, queue.ack


def litequeue(folder, fsync):
    """acknowledges, in newer versions with a token; finding lost jobs and pruning
    done ones is the user's; no fsync by default and no option for it: a pragma on its
    connection"""
    import litequeue

    queue = litequeue.LiteQueue(f"{folder}/queue.db")
    if fsync:
        queue.conn.execute("PRAGMA synchronous = FULL")

    def done(message):
        json.loads(message.data)
        # Before Python 3.12 pip finds a version whose done has no second argument.
        claim = getattr(message, "claim_id", None)
        queue.done(message.message_id, **({} if claim is None else {"claim_id": claim}))

    return lambda job: queue.put(json.dumps(job)), None, queue.pop, done


def persist_queue(folder, fsync):
    """acknowledges, without a token, among the threads of one process; clearing done
    jobs is the user's; no option for less than fsync: a pragma on its connection"""
    import persistqueue

    queue = persistqueue.SQLiteAckQueue(folder)
    if not fsync:
        queue._putter.execute("PRAGMA synchronous = NORMAL")
    return queue.put, None, lambda: queue.get(block=False, raw=True), queue.ack


def huey_sqlite(folder, fsync):
    """does not acknowledge: a job is gone when it is taken; no fencing; with
    fsync=False a power cut may damage its database"""
    from huey.storage import SqliteStorage

    return huey(SqliteStorage(filename=f"{folder}/queue.db", fsync=fsync))


def huey_file(folder, fsync):
    """does not acknowledge: a job is gone when it is taken; no fencing; never syncs;
    each get lists all waiting jobs"""
    from huey.storage import FileStorage

    return huey(FileStorage("queue", folder))


def huey(storage):
    def put(job):
        storage.enqueue(json.dumps(job).encode())

    return put, None, storage.dequeue, lambda data: json.loads(bytes(data))


def potatoq(folder, fsync):
    """acknowledges, with a token; a dead worker's jobs are back when its heartbeat is
    missed; no fsync by default"""
    from potatoq import Potatoq

    app = Potatoq("compare", broker=f"sqlite:///{folder}/queue.db")
    app.conf.broker_transport_options = {"durable": fsync}
    return potatoq_calls(app.broker)


def potatoq_calls(broker):
    from potatoq.message import Message

    broker.setup()
    consumer = broker.consumer(["default"], "compare")

    def put_many(jobs):
        broker.enqueue([Message("task", [job]) for job in jobs])

    def done(delivery):
        consumer.complete(delivery, None, [])

    return lambda job: put_many([job]), put_many, lambda: consumer.fetch(0.0), done


PEERS = {  # name: what opens it, package, module
    "tiny_queue": (tiny_queue, "tiny-queue", "tiny_queue"),
    "on SQLite": (on_sqlite, "tiny-queue", "tiny_queue"),
    "nobroker": (nobroker, "nobroker", "nobroker"),
    "litequeue": (litequeue, "litequeue", "litequeue"),
    "persist-queue": (persist_queue, "persist-queue", "persistqueue"),
    "huey-sqlite": (huey_sqlite, "huey", "huey"),
    "huey-file": (huey_file, "huey", "huey"),
    "potatoq": (potatoq, "potatoq", "potatoq"),
}


def server_tiny_queue(url, schema):
    """acknowledges, with a token; a dead session's jobs are back at once"""
    import tiny_queue

    queue = tiny_queue.Queue(with_option(url, f"schema={schema}"))
    return queue.put, queue.put_many, queue.get, queue.task_done


def server_potatoq(url, schema):
    """acknowledges, with a token; a dead worker's jobs are back when its heartbeat is
    missed"""
    from potatoq import Potatoq

    path = with_option(url, f"options=-c%20search_path%3D{schema}")
    return potatoq_calls(Potatoq("compare", broker=path).broker)


def server_procrastinate(url, schema):
    """acknowledges, without a token; its statements on its own connector, without
    its worker's event loop"""
    from procrastinate import App, SyncPsycopgConnector, sql

    path = with_option(url, f"options=-c%20search_path%3D{schema}")
    ask = SyncPsycopgConnector(conninfo=path)
    app = App(connector=ask)
    app.open()
    app.schema_manager.apply_schema()
    task = app.task(name="task", queue="default")(lambda **job: None)
    made = ask.execute_query_one("SELECT * FROM procrastinate_register_worker_v1()")

    def get():
        fetch = sql.queries["fetch_job"]
        return ask.execute_query_one(fetch, queues=None, worker_id=made["worker_id"])

    def done(job):
        end = sql.queries["finish_job"]
        ask.execute_query(end, job_id=job["id"], status="succeeded", delete_job=True)

    put_many = lambda jobs: task.batch_defer(*jobs)  # noqa: E731
    return lambda job: task.defer(**job), put_many, get, done


SERVERS = {
    "tiny_queue": (server_tiny_queue, "tiny-queue", "tiny_queue"),
    "potatoq": (server_potatoq, "potatoq", "potatoq"),
    "procrastinate": (server_procrastinate, "procrastinate", "procrastinate"),
}


def with_option(url, option):
    return f"{url}{'&' if '?' in url else '?'}{option}"


def in_schema(url, name, work):
    """Call work with a fresh schema, which is dropped at the end."""
    import psycopg

    schema = f"tq_compare_{name}_{os.getpid()}"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"SET client_min_messages = error; CREATE SCHEMA {schema}")
        try:
            return work(schema)
        finally:
            admin.execute(f"DROP SCHEMA {schema} CASCADE")


def serve(name, url, jobs):
    """One round of one peer on the server: {work: jobs per second}."""

    def work(schema):
        put, put_many, get, done = SERVERS[name][0](url, schema)
        put(JOB)
        done(get())
        count = max(20, jobs // 200)
        seen = {"put": rate(count, lambda: put(JOB))}
        seen["get + done"] = rate(count, lambda: done(get()))
        calls = max(2, count // 100)
        seen["put_many"] = MANY * rate(calls, lambda: put_many([JOB] * MANY))
        return seen

    return in_schema(url, name, work)


def deepen(name, url, jobs):
    """A round trip's milliseconds with 100 waiting jobs, and with very many."""
    import tiny_queue

    def work(schema):
        queue = tiny_queue.Queue(with_option(url, f"schema={schema}"))
        queue.put_many([JOB] * 100)
        trip = lambda: (queue.put(JOB), queue.task_done(queue.get()))  # noqa: E731
        few = [1e3 / rate(100, trip) for _ in range(ROUNDS)]
        for _ in range(0, jobs, 10_000):
            queue.put_many([JOB] * min(10_000, jobs))
            queue.put_many([JOB] * min(10_000, jobs), delay=86400)
        many = [1e3 / rate(100, trip) for _ in range(ROUNDS)]
        return {"few": statistics.median(few), "many": statistics.median(many)}

    return in_schema(url, name, work)


def measure(peer, folder, jobs, fsync):
    """One round of one peer, in a process of its own: {work: jobs per second}."""
    os.makedirs(f"{folder}/{os.getpid()}")
    put, put_many, get, done = peer(f"{folder}/{os.getpid()}", fsync)
    put(JOB)
    done(get())  # the first ones make the files
    count = max(20, jobs // 200 if fsync else jobs // 50)
    seen = {"put": rate(count, lambda: put(JOB))}
    seen["get + done"] = rate(count, lambda: done(get()))
    if put_many:
        calls = max(2, count // 100)
        seen["put_many"] = MANY * rate(calls, lambda: put_many([JOB] * MANY))
    if not fsync:
        start = time.perf_counter()
        _, _, get, done = peer(f"{folder}/backlog", False)
        done(get())
        seen["open"] = jobs / (time.perf_counter() - start)
    return seen


def rate(count, work):
    start = time.perf_counter()
    for _ in range(count):
        work()
    return count / (time.perf_counter() - start)


def fill(peer, folder, jobs, fsync):
    """Write the backlog that each round opens."""
    os.makedirs(f"{folder}/backlog")
    put, put_many, _, _ = peer(f"{folder}/backlog", fsync)
    for start in range(0, jobs, MANY):
        batch = [JOB] * min(MANY, jobs - start)
        put_many(batch) if put_many else [put(job) for job in batch]
    return {}


def in_child(task, name, where, jobs, fsync=True):
    """Do a task in a new process; {}, with a word about it, if that fails."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{task} {name}{', fsync' if fsync else ''}\x1b[K\r")
    words = [task, name, where, str(jobs), str(fsync)]
    command = [sys.executable, __file__, "--child", *words]
    ran = subprocess.run(command, capture_output=True, encoding="utf-8")
    if ran.returncode:
        print(f"{name} failed at {task}:", *ran.stderr.splitlines()[-1:])
        return {}
    return json.loads(ran.stdout)


def table(title, names, top, jobs, fsync):
    """Measure all peers, by turns, and print their medians and ratios."""
    rounds = [
        {
            name: in_child("measure", name, os.path.join(top, name), jobs, fsync)
            for name in names
        }
        for _ in range(ROUNDS)
    ]
    show(title, names, rounds)


def show(title, names, rounds):
    print(f"\n{title}; jobs/s, and tiny_queue's rate in times of that")
    print(f"{'':<14}", *(f"{work:>18} " for work in WORK))
    for name in names:
        cells = [cell(rounds, name, work) for work in WORK]
        print(f"{name:<14}", *cells, flush=True)


def cell(rounds, name, work):
    seen = [(each["tiny_queue"].get(work), each[name].get(work)) for each in rounds]
    both = [(ours, theirs) for ours, theirs in seen if ours and theirs]
    if not both:
        return f"{'-':>11}{'':8}"
    median = statistics.median(theirs for _, theirs in both)
    ratio = statistics.median(ours / theirs for ours, theirs in both)
    times = "" if name == "tiny_queue" else f"{ratio:.2f}x"
    return f"{median:>11,.0f}{times:>8}"


def installed(names, peers=PEERS):
    """Those of the peers that are here; says what each is, or how to get it."""
    from importlib import metadata, util

    for name in names:
        peer, package, module = peers[name]
        if util.find_spec(module) is None:
            print(f"{name}: skipped, not installed; pip install {package}")
            continue
        ours = module == "tiny_queue"
        version = "" if ours else f" {metadata.version(package)}"
        print(f"{name}{version}: {' '.join((peer.__doc__ or '').split())}")
        yield name


def child(task, name, where, jobs, fsync):
    if task in ("serve", "deepen"):
        seen = {"serve": serve, "deepen": deepen}[task](name, where, int(jobs))
    else:
        work = {"measure": measure, "fill": fill}[task]
        seen = work(PEERS[name][0], where, int(jobs), fsync == "True")
    print(json.dumps(seen))


def compare_on_a_server(url, jobs):
    names = list(installed(list(SERVERS), SERVERS))
    rounds = [
        {name: in_child("serve", name, url, jobs) for name in names}
        for _ in range(ROUNDS)
    ]
    show("PostgreSQL, as the server commits by default", names, rounds)
    seen = in_child("deepen", "tiny_queue", url, jobs)
    if seen:
        few, many, ratio = seen["few"], seen["many"], seen["many"] / seen["few"]
        print(f"\nround trip with 100 waiting {few:.2f} ms; with {jobs:,} waiting and")
        print(f"{jobs:,} scheduled {many:.2f} ms: {ratio:.2f} times the cost")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peers = list(PEERS)[1:]
    known = f"of {', '.join(peers)} (default: all)"
    parser.add_argument("peers", nargs="*", metavar="PEER", help=known)
    parser.add_argument("--dir", default=".", help="on whose disk (default: here)")
    parser.add_argument(
        "--jobs", type=int, default=100_000, help="waiting jobs (default: %(default)s)"
    )
    parser.add_argument("--url", help="compare on this PostgreSQL server")
    args = parser.parse_args()
    if args.url:
        return compare_on_a_server(args.url, args.jobs)
    for name in args.peers:
        if name not in peers:
            parser.error(f"no peer {name!r}; known are {', '.join(peers)}")
    names = list(installed(["tiny_queue", *(args.peers or peers)]))
    day, python = time.strftime("%Y-%m-%d"), platform.python_version()
    print(f"\n{day}, Python {python}, {os.cpu_count()} cores; {args.jobs:,} waiting")
    with tempfile.TemporaryDirectory(prefix="tq-compare-", dir=args.dir) as top:
        for name in names:
            in_child("fill", name, os.path.join(top, name), args.jobs, False)
        title = "fsync off: survives the death of processes"
        table(title, names, top, args.jobs, False)
        names = [name for name in names if name != "huey-file"]  # it never syncs
        table("fsync on: survives a power cut", names, top, args.jobs, True)


if __name__ == "__main__":
    try:
        child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
    except KeyboardInterrupt:
        sys.exit(130)
