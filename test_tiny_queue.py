"""Tests of tiny_queue: standard library only, no network, no root needed.

    python3 -m unittest                     # all, in the repository's directory
    python3 -m unittest -k Compaction -v    # some

Knobs, from the environment:

    TQ_DEEP=1     the long version, of less than an hour, with no case left out:
                  each death at each byte, 100,000 schedules, 20,000 histories,
                  5,000 kills; some 250,000 power cuts, where a million was aimed
                  at and would take most of an hour, and 75,000 states (of 100,000)
                  after crashes in the recovery from a crash
    TQ_SEED=n     seed of whatever is random (default 1)
    TQ_JOBS=n     processes that share the tests with this one (default: the cores,
                  at most 4)
    TINY_QUEUE_TEST_URLS=...
                  PostgreSQL servers to test on, by spaces; else a local one, else
                  one that is made for it and thrown away
    TQ_REQUIRE_POSTGRES=1
                  without PostgreSQL and psycopg the tests fail
    TQ_LIGHT=1    without the enumerations (faults, interleavings, histories)
    TQ_MUTANTS=1  the tests of the tests, and nothing else: the module is weakened
                  in one place at a time, and on each such mutant some test must
                  fail; TQ_MUTANTS=0:9 tries the first nine

Every line and branch of the module is run without the enumerations, too; on
Linux, with PostgreSQL and the dev group's coverage.py, this shows it:

    coverage erase; TQ_LIGHT=1 coverage run -m unittest
    coverage combine -q; coverage report

The helpers come first, with tests of what could mislead others; then one class per
behaviour, under the banners of the module and in their order.  Tests assert
on the live object first, then on a reopened one.  Claims about processes are
tested with real processes, which tell their steps over a socket: no test
sleeps to let another process get on.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import base64
import collections
import contextlib
import copy
import datetime
import decimal
import enum
import errno
import faulthandler
import fcntl
import functools
import gc
import hashlib
import inspect
import io
import itertools
import json
import linecache
import logging
import math
import operator
import os
import pathlib
import pickle
import posixpath
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import tracemalloc
import types
import unittest
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Optional
from unittest import mock

import tiny_queue as tq

psycopg: Any = tq._optional("psycopg")
DEEP = os.environ.get("TQ_DEEP", "") not in ("", "0")
LIGHT = os.environ.get("TQ_LIGHT", "") not in ("", "0")
SEED = int(os.environ.get("TQ_SEED", "1"))
JOBS = int(os.environ.get("TQ_JOBS", "0")) or min(4, os.cpu_count() or 1)
ROOT = os.path.dirname(os.path.abspath(__file__))
STATES = ("pending", "inflight", "dead")
EPOCH = 1.7e9  # when a simulated host starts
PATIENCE = 20.0  # seconds before something that must happen counts as not happening

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers
# =============================================================================


def eventually(condition, timeout=PATIENCE):
    """Return the first true value of condition(), or fail after timeout."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"never became true: {condition}")
        time.sleep(0.002)


class Patched:
    """A module with some of its functions replaced."""

    def __init__(self, real, **fakes):
        self.__dict__.update(fakes)
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)


def patched(name, **fakes):
    """Let tiny_queue see its module `name` with some functions replaced."""
    return mock.patch.object(tq, name, Patched(getattr(tq, name), **fakes))


def fails(code):
    """A function of the system that fails."""

    def call(*args, **_):
        raise OSError(code, os.strerror(code))

    return call


def faulty(real, *effects):
    """A function whose first calls go to others in its place, in turn (None: as
    ever), and all later ones to it."""
    left = iter(effects)
    return lambda *args: (next(left, None) or real)(*args)


def half_write(fd, data):
    """os.write() of which the disk takes no more than 30 bytes."""
    return os.write(fd, bytes(data)[:30])


class Clock:
    """The real clocks, each plus what the test has added; one that was given an
    instant stands still but for that, and nobody sleeps by it."""

    def __init__(self, at=None, mono=None):
        self.at, self.since = at, mono
        self.wall = self.mono = 0.0

    def jump(self, seconds=0.0, mono=0.0):
        self.wall += seconds
        self.mono += mono

    def sleep(self, seconds):
        self.jump(seconds, seconds)

    def time(self):
        return (time.time() if self.at is None else self.at) + self.wall

    def monotonic(self):
        return (time.monotonic() if self.since is None else self.since) + self.mono

    def patch(self):
        return patched("time", time=self.time, monotonic=self.monotonic)


class Link:
    """One end of a conversation between two processes, in JSON lines."""

    def __init__(self, sock):
        self.sock = sock
        self.sock.settimeout(PATIENCE)
        self.file = sock.makefile("rb")

    def tell(self, value=None):
        self.sock.sendall(json.dumps({"said": value}).encode() + b"\n")

    def hear(self):
        line = self.file.readline()
        if not line:
            raise EOFError("the other process has ended")
        message = json.loads(line)
        if "failed" in message:
            raise AssertionError(message["failed"])
        return message["said"]

    def close(self):
        self.file.close()
        self.sock.close()


class Child(Link):
    """A forked process that runs function(link, *args).

    What the function returns is told last; an exception fails hear().
    """

    place = types.SimpleNamespace(gone=lambda pid: None)

    def __init__(self, function, *args):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # of forking among threads: on purpose
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                link = Link(theirs)
                link.tell(function(link, *args))
            except BaseException:
                message = {"failed": traceback.format_exc()}
                theirs.sendall(json.dumps(message).encode() + b"\n")
            finally:
                os._exit(0)
        theirs.close()
        super().__init__(ours)

    def kill(self, number=signal.SIGKILL):
        pid = self.pid
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.wait()
            self.place.gone(pid)

    def wait(self):
        if self.pid:
            os.waitpid(self.pid, 0)
            self.pid = 0

    def end(self):
        if self.pid:
            self.kill()
        self.close()


def lacking(name):
    """Let tiny_queue see no module that has that attribute."""

    def has(of, attribute):
        return attribute != name and hasattr(of, attribute)

    return mock.patch.object(tq, "hasattr", has, create=True)


def run_python(code, *args, cwd=None, timeout=60, options=(), **env):
    """Run code in a fresh interpreter; return its CompletedProcess."""
    return subprocess.run(
        [sys.executable, *options, "-c", code, *map(str, args)],
        cwd=cwd,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": ROOT, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )


def seal(fields, mark=""):
    """A line as the module writes it: strict JSON, closed by its checksum."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    body = text[:-1].encode()
    return b'%b,"crc":"%b%08x"}\n' % (body, mark.encode(), zlib.crc32(body))


def read_line(line):
    """The fields of a valid line, checksum verified, or None."""
    line = line.strip(b" \t\r\n")
    try:
        fields = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
        return None
    crc = fields.get("crc")
    if crc is not None:
        body = line[: line.rindex(b',"crc"')]
        if int(crc.lstrip("+"), 16) != zlib.crc32(body):
            return None
    return fields


def census(path, name="default"):
    """What the three files say, read without the module: id -> (state, fields)
    of the valid record with the highest rev; finished jobs are left out."""
    best = {}
    for rank, state in enumerate(STATES):
        for line in file_lines(path, state, name):
            fields = read_line(line)
            if fields is not None:
                done = "done" in fields
                key = (fields.get("rev", 1), 3 if done else rank)
                if fields["id"] not in best or best[fields["id"]][0] < key:
                    best[fields["id"]] = (key, "done" if done else state, fields)
    return {id: found[1:] for id, found in best.items() if found[1] != "done"}


def file_of(path, state, name="default"):
    return os.path.join(path, f"{name}.{state}.jsonl")


def file_bytes(path, state, name="default"):
    try:
        return pathlib.Path(file_of(path, state, name)).read_bytes()
    except FileNotFoundError:
        return b""


def file_lines(path, state, name="default"):
    return file_bytes(path, state, name).splitlines(True)


def tree(path):
    """Every file under a directory and its bytes, locks left out."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            if not name.endswith(".lock"):
                file = pathlib.Path(folder, name)
                found[str(file)] = file.read_bytes()
    return {name: data for name, data in found.items() if data}


def waits(thread):
    """Whether a thread is inside the module's waiting, as deep as it goes."""
    frame = sys._current_frames().get(thread.ident)
    code = frame and frame.f_code
    return (
        code
        and code.co_filename == tq.__file__
        and code.co_name in ("wait", "_is_synced", tq._poll.__name__)
    )


def open_fds():
    """How many descriptors this process has open (Linux, else constant)."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return 0


class FullDisk:
    """os.write on a disk where a directory's files may take `limit` bytes."""

    def __init__(self, path, limit):
        self.path = path
        self.limit = limit
        self.refused = 0

    def used(self):
        return sum(entry.stat().st_size for entry in os.scandir(self.path))

    def write(self, fd, data):
        free = self.limit - self.used()
        if free <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, bytes(data)[:free])


class Place:
    """Where an engine keeps its queues in a test, and what is there.

    This one is a directory.  Others are listed in PLACES; the tests of classes
    under @every_engine run on each, unchanged.
    """

    name = "File"
    engine = tq._FileEngine

    def where(self, folder):
        """What Queue gets, in a fresh folder; `clean` is called at the end."""
        return os.path.join(folder, "jobs")

    def clean(self, where):
        pass  # the folder is removed anyway

    def exists(self, where):
        """Whether anything at all was made there."""
        return os.path.exists(where)

    def raw(self, where):
        """All that is stored, read without the module; equal if unchanged."""
        return tree(where)

    def gone(self, pid):
        """Return when all have noticed that a process was killed."""


class WatchedConnection(sqlite3.Connection):
    """Notes how each commit that changes something was synced: True, False, or
    as "never", after which a database may not even open."""

    changed = 0
    seen: list[object] = []

    def cursor(self, *args):
        return super().cursor(WatchedCursor)

    def commit(self):
        self.note()
        super().commit()

    def note(self):
        if self.total_changes > self.changed:
            self.changed = self.total_changes
            row = super().cursor().execute("PRAGMA synchronous").fetchone()
            self.seen.append({0: "never", 1: False}.get(row[0], True))


class WatchedCursor(sqlite3.Cursor):
    def execute(self, sql, *args):
        if sql.upper().split()[0] in ("COMMIT", "END"):
            self.connection.note()
        return super().execute(sql, *args)


class SqlitePlace(Place):
    """A database file, opened by its URL."""

    name = "Sqlite"
    engine = tq._SqliteEngine

    def where(self, folder):
        return f"sqlite:///{folder}/jobs.db"

    def file(self, where):
        return where[len("sqlite:///") :]

    def exists(self, where):
        return os.path.exists(self.file(where))

    def connect(self, where):
        """The application's own connection, outside of a transaction."""
        return sqlite3.connect(self.file(where), timeout=PATIENCE)

    def elsewhere(self, folder):
        """A connection to another database."""
        return self.connect(self.where(folder))

    def watch_commits(self, case, where):
        """A function that returns how each commit since its last call was
        synced; of connections that are made from now on."""
        seen: list[object] = []
        watched = type("Watched", (WatchedConnection,), {"seen": seen})
        connect = sqlite3.connect

        def watch(path, **options):
            if self.file(where) in path:
                options["factory"] = watched
            return connect(path, **options)

        patch = mock.patch.object(sqlite3, "connect", watch)
        patch.start()
        case.addCleanup(patch.stop)
        return lambda: [seen.pop(0) for _ in list(seen)]

    def set_synced(self, conn, synced):
        """Let a connection of the application wait for its commits or not."""
        conn.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")

    def raw(self, where):
        if not self.exists(where):
            return []
        with contextlib.closing(self.connect(where)) as db:
            return [
                db.execute(f"SELECT * FROM tiny_queue_{table}").fetchall()
                for table in ("queues", "jobs")
            ]


class PostgresPlace(Place):
    """A schema of its own on a server, removed at the end."""

    name = "Postgres"
    engine = tq._PostgresEngine

    def __init__(self, url):
        self.url = url
        self._admin, self._pid = None, 0

    def where(self, folder):
        schema = hashlib.sha1(folder.encode()).hexdigest()[:16]
        mark = "&" if "?" in self.url else "?"
        fast = "options=-c%20synchronous_commit%3Doff"
        return f"{self.url}{mark}{fast}&schema=tq_test_{schema}"

    def schema(self, where):
        return where.rpartition("schema=")[2]

    def ask(self, sql, params=()):
        """Rows that the server answers, on a connection of this process."""
        if self._pid != os.getpid() or tq._poll(self._admin.fileno(), 1, 0):
            self._admin = psycopg.connect(self.url, autocommit=True)
            self._pid = os.getpid()
            atexit.register(self._admin.close)
        cursor = self._admin.execute(sql, params)
        return cursor.fetchall() if cursor.description else []

    def clean(self, where):
        self.ask("SET lock_timeout = '10s'; SET client_min_messages = error")
        self.ask(f"DROP SCHEMA IF EXISTS {self.schema(where)} CASCADE")

    def exists(self, where):
        name = [self.schema(where)]
        return bool(self.ask("SELECT 1 FROM pg_namespace WHERE nspname = %s", name))

    def gone(self, pid):
        sql = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
        eventually(lambda: not self.ask(sql, [f"tiny_queue {pid}"]))

    def connect(self, where):
        """The application's own connection, in the queue's schema."""
        path = f"-c search_path={self.schema(where)}"
        return psycopg.connect(self.url, options=path)

    def elsewhere(self, folder):
        return psycopg.connect(self.url, dbname="template1")

    def watch_commits(self, case, where):
        """A function that returns synchronous_commit as the server saw it at
        each commit since its last call, once for each job that was changed."""
        with tq.Queue(where) as queue:  # which makes the tables
            queue.put(0)
            queue.purge("pending")
        schema = self.schema(where)
        self.ask(
            f"CREATE TABLE {schema}.commits (level text);"
            f"CREATE FUNCTION {schema}.note() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN INSERT INTO {schema}.commits"
            " VALUES (pg_catalog.current_setting('synchronous_commit'));"
            " RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER note AFTER INSERT OR UPDATE OR DELETE"
            f" ON {self.jobs_table(where)} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            f" EXECUTE FUNCTION {schema}.note()"
        )
        sql = f"DELETE FROM {schema}.commits RETURNING level"
        return lambda: [
            {"on": True, "off": False}.get(level, level) for (level,) in self.ask(sql)
        ]

    def set_synced(self, conn, synced):
        conn.execute(f"SET synchronous_commit = {'on' if synced else 'off'}")

    def jobs_table(self, where):
        """Whatever its name is."""
        sql = "SELECT table_name FROM information_schema.columns WHERE"
        schema = self.schema(where)
        ((table,),) = self.ask(
            f"{sql} column_name = 'payload' AND table_schema = %s", [schema]
        )
        return f"{schema}.{table}"

    def raw(self, where):
        if not self.exists(where):
            return []
        schema = self.schema(where)
        return [
            self.ask(f"SELECT t::text FROM {schema}.tiny_queue_{table} AS t ORDER BY 1")
            for table in ("queues", "jobs")
        ]


def with_our_clock(run):
    """While a test has replaced the module's clock, the server's is that one."""

    def told(link, sql, params=None):
        if tq.time is not time and tq._PG_NOW in sql:
            now, one = tq.time.time(), isinstance(params, dict)
            sql = sql.replace(tq._PG_NOW, "%(now)s::float8")
            rows = [{**row, "now": now} for row in ([params] if one else params)]
            params = rows[0] if one else rows
        return run(link, sql, params)

    return told


tq._SqlLink.execute = with_our_clock(tq._SqlLink.execute)
tq._PgLink.execute_each = with_our_clock(tq._PgLink.execute_each)


class Cluster:
    """A PostgreSQL server of our own, which may be stopped and restarted."""

    made = None

    @classmethod
    def shared(cls):
        """The one of this process; SkipTest, or failure in CI, if none can be."""
        if psycopg is None or cls.programs() is None:
            lack = NO_POSTGRES or "no server's programs (initdb) are found"
            if os.environ.get("TQ_REQUIRE_POSTGRES", "0") != "0":
                raise AssertionError(lack)
            raise unittest.SkipTest(lack)
        if cls.made is None or cls.made.pid != os.getpid():
            cls.made = cls()
        return cls.made

    @staticmethod
    def programs():
        """Where the server's programs are, or None."""
        found = shutil.which("initdb")
        if found:
            return os.path.dirname(os.path.realpath(found))
        debian = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        return str(debian[-1].parent) if debian else None

    def __init__(self):
        self.pid = os.getpid()
        self.user = {"user": "postgres"} if os.geteuid() == 0 else {}
        self.dir = tempfile.mkdtemp(prefix="tq-cluster-")
        atexit.register(self.remove)
        if self.user:
            shutil.chown(self.dir, "postgres")
        secret = os.path.join(self.dir, "secret")
        pathlib.Path(secret).write_text("sesame\n")
        subprocess.run(
            [f"{self.programs()}/initdb", "-D", f"{self.dir}/data", "-N", "-U", "boss",
             "-E", "UTF8", "--no-locale", "--auth-local=trust",
             "--auth-host=scram-sha-256", f"--pwfile={secret}"],
            check=True, stdout=subprocess.DEVNULL, cwd=self.dir, **self.user,
        )  # fmt: skip
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.url = f"postgresql://boss:sesame@127.0.0.1:{self.port}/postgres"
        self.place = PostgresPlace(self.url)
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [f"{self.programs()}/postgres", "-D", f"{self.dir}/data", "-p",
             str(self.port), "-k", self.dir, "-c", "listen_addresses=127.0.0.1", "-c",
             "fsync=off"],
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.dir,
            **self.user,
        )  # fmt: skip
        eventually(self.answers)

    def answers(self):
        try:
            psycopg.connect(self.url).close()
            return True
        except psycopg.OperationalError:
            return False

    def stop(self, how=signal.SIGINT):
        self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def remove(self):
        if self.pid == os.getpid():
            if self.process is not None:
                self.process.send_signal(signal.SIGCONT)
                self.stop(signal.SIGQUIT)
            shutil.rmtree(self.dir, True)


def find_postgres():
    """URLs of servers to test with, and why there are none."""
    if psycopg is None:
        return [], "psycopg does not import here"
    named = os.environ.get("TINY_QUEUE_TEST_URLS", "").split()
    if named:
        return named, ""
    for url in ("postgresql:///test", "postgresql://127.0.0.1/test",
                "postgresql://postgres@127.0.0.1/test"):  # fmt: skip
        try:
            psycopg.connect(url, connect_timeout=2).close()
            return [url], ""
        except psycopg.Error:
            pass
    if Cluster.programs() is None:
        return [], "no server answers, and no programs of one (initdb) are found"
    os.environ["TINY_QUEUE_TEST_URLS"] = Cluster.shared().url  # children's, too
    return [Cluster.shared().url], ""


POSTGRES, NO_POSTGRES = find_postgres()
PLACES = [Place(), SqlitePlace(), *map(PostgresPlace, POSTGRES)]


def every_engine(case=None, *, only=None, needs="", **settings):
    """Run a class's tests on each engine: for files under its own name, for
    others with theirs behind it.

    `only` names the tests that others run, `needs` a flag of their engine;
    settings are attributes of their classes.
    """
    if case is None:
        return functools.partial(every_engine, only=only, needs=needs, **settings)
    for place in PLACES[1:]:
        if needs and not getattr(place.engine, needs):
            continue
        name = f"{case.__name__}{place.name}"
        members = {"place": place, "__module__": __name__, **settings}
        for test in dir(case):
            if test.startswith("test_"):
                function = getattr(case, test)
                flag = getattr(function, "needs", "path")
                if test not in (only or [test]) or not getattr(place.engine, flag, 1):
                    members[test] = None
        TWINS.append(type(name, (case,), members))
        globals()[name] = TWINS[-1]
    return None if needs and not getattr(tq._FileEngine, needs) else case


TWINS: list[type] = []  # the classes that it made


def needs(flag):
    """Mark a test of what only engines with a flag can do."""

    def mark(test):
        test.needs = flag
        return test

    return mark


of_files = needs("can_compact")  # a test that is about bytes in files


class Limited(unittest.TestCase):
    """A test that may take so long: then its process says where each thread is,
    and ends, as nothing else is sure to end a test that hangs."""

    limit = 3600.0 if DEEP else 120.0  # seconds
    parts = 1  # into how many equal ones it can be cut, to be run by several
    cut = 0, 1  # which of how many is run

    def run(self, result=None):
        if self.limit:
            faulthandler.dump_traceback_later(
                self.limit, exit=True, file=sys.__stderr__
            )
        try:
            return super().run(result)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Case(Limited):
    """A test with a fresh directory; what it opens and spawns is ended."""

    place = PLACES[0]

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="tq-")
        self.addCleanup(shutil.rmtree, self.dir, True)
        self.path = self.place.where(self.dir)
        self.addCleanup(self.place.clean, self.path)
        logger = logging.getLogger("tiny_queue")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        self.addCleanup(logger.setLevel, level)

    def open(self, **options):
        options.setdefault("fsync", False)
        queue = tq.Queue(options.pop("path", self.path), **options)
        self.addCleanup(queue.close)
        return queue

    def manual_clock(self, at=None):
        """The module's clock from now on."""
        clock = Clock(at)
        patch = clock.patch()
        patch.start()
        self.addCleanup(patch.stop)
        return clock

    def spawn(self, function, *args):
        child = Child(function, *args)
        child.place = self.place
        self.addCleanup(child.end)
        return child

    def views(self, queue, **options):
        """The live object, then a new one on the same directory."""
        yield queue
        yield self.open(name=queue.name, **options)

    def assertDrains(self, queue, payloads):
        """get() delivers exactly these, in order; each is settled."""
        found = []
        for job in iter(queue.get, None):
            found.append(job.payload)
            queue.task_done(job)
        self.assertEqual(found, list(payloads))

    def assertHolds(self, queue, payloads):
        """These jobs are in the queue, for the live object and a new one."""
        for view in self.views(queue):
            self.assertEqual([job.payload for job in view.jobs()], list(payloads))

    def assertNoTemp(self):
        self.assertEqual([n for n in os.listdir(self.path) if "tmp" in n], [])

    def assertRefused(self, code, call, *args, **kwargs):
        """A QueueError with this errno; returns it."""
        with self.assertRaises(tq.QueueError) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.errno, code)
        return caught.exception

    def run_threads(self, *works):
        """Run each function in a thread; no exception may escape one."""
        errors = []

        def guarded(work):
            try:
                work()
            except BaseException:
                errors.append(traceback.format_exc())

        threads = [threading.Thread(target=guarded, args=(w,)) for w in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            self.assertFalse(thread.is_alive(), "a thread hangs")
        self.assertEqual(errors, [])

    def write(self, state, data, mode="wb"):
        """Write a data file by hand."""
        os.makedirs(self.path, exist_ok=True)
        with open(file_of(self.path, state), mode) as file:
            file.write(data)


class HelpersTest(Case):
    """What could let other tests pass that should not."""

    def test_eventually_returns_the_value_or_fails(self):
        """eventually() returns what became true, and fails on what does not."""
        values = iter([0, None, 7])
        self.assertEqual(eventually(lambda: next(values)), 7)
        with self.assertRaises(AssertionError):
            eventually(lambda: False, timeout=0.01)

    def test_a_clock_is_the_module_s_alone(self):
        """Each of its two clocks moves by itself, or stands still."""
        clock = Clock(at=1000.0)
        clock.jump(5.0, mono=3600.0)
        with clock.patch():
            self.assertEqual(tq.time.time(), 1005.0)
            self.assertGreater(tq.time.monotonic(), time.monotonic() + 3599)
            self.assertIs(tq.time.sleep, time.sleep)
        self.assertIs(tq.time, time)

    def test_a_failure_in_a_child_or_a_thread_is_told(self):
        """A Child hears, tells and returns its value, or its exception fails."""
        child = self.spawn(lambda link, n: link.hear() + n, 2)
        child.tell(40)
        self.assertEqual(child.hear(), 42)
        with self.assertRaisesRegex(AssertionError, "ZeroDivisionError"):
            self.spawn(lambda link: 1 // 0).hear()
        with self.assertRaisesRegex(AssertionError, "ZeroDivisionError"):
            self.run_threads(lambda: 1 // 0, lambda: None)

    def test_waits_sees_a_waiting_get(self):
        """waits() is true while a thread's get sleeps, and false after it."""
        thread = threading.Thread(target=self.open().get, args=(0.1,))
        thread.start()
        eventually(lambda: waits(thread))
        thread.join()
        self.assertFalse(waits(thread))

    def test_census_keeps_the_highest_rev(self):
        """Of the lines whose checksum is right, success left out."""
        line = seal({"id": "a", "rev": 4, "payload": [1]})
        self.assertEqual(read_line(line)["payload"], [1])
        self.write("pending", b'{"id":"a","payload":1}\n{"id":"b","payload":2}\n')
        self.write("inflight", line.replace(b"[1]", b"[2]"))
        self.write("dead", b'{"id":"a","rev":3,"payload":1}\n{"id":"c","payload":3}\n')
        self.write("inflight", b'{"id":"c","rev":2,"done":true}\n', "ab")
        found = {id: state for id, (state, _) in census(self.path).items()}
        self.assertEqual(found, {"a": "dead", "b": "pending"})


# Constants and errors
# =============================================================================


class ErrorsTest(Case):
    def raised(self, kind, call, *args, **kwargs):
        with self.assertRaises(kind) as caught:
            call(*args, **kwargs)
        message = str(caught.exception)
        self.assertTrue(message[0].islower() and message[-1] not in ".!", message)
        self.assertIsInstance(caught.exception, tq.QueueError)
        return caught.exception

    def test_errors_survive_pickling_with_their_data(self):
        """A public QueueError each, they keep class, message and data attributes."""
        for name, data in (
            ("QueueError", {"path": "p", "errno": 5}),
            ("DuplicateJobError", {"id": "a", "state": "dead"}),
            ("JobNotFoundError", {"id": "a"}),
            ("LeaseLostError", {"id": "a", "token": "t"}),
            ("LockTimeoutError", {"path": "p", "timeout": 1.5, "pid": 7}),
            ("QueueClosedError", {"path": "p"}),
        ):
            error = getattr(tq, name)("what: why", **data)
            self.assertIn(name, tq.__all__)
            for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
                self.assertIs(type(copied), type(error))
                self.assertEqual(str(copied), "what: why")
                found = {name: getattr(copied, name) for name in data}
                self.assertEqual(found, data)

    def test_errors_name_the_job(self):
        """Its id, with its state or the token that lost."""
        queue = self.open()
        queue.put(1, id="a")
        error = self.raised(tq.DuplicateJobError, queue.put, 2, id="a")
        self.assertEqual((error.id, error.state), ("a", "pending"))
        self.assertIn("'a'", str(error))
        job = queue.get()
        queue.task_done(job)
        error = self.raised(tq.LeaseLostError, queue.task_done, job)
        self.assertEqual((error.id, error.token), ("a", job.token))
        for call in (queue.find, queue.requeue_dead):
            self.assertEqual(self.raised(tq.JobNotFoundError, call, "x").id, "x")

    def test_a_closed_queue_names_its_path(self):
        """Every method of a closed queue raises QueueClosedError."""
        queue = self.open()
        queue.put(1)
        job = queue.get()
        queue.close()
        for name, *args in (
            ("put", 1), ("put_many", [1]), ("get",), ("get", None), ("get_many", 2),
            ("task_done", job), ("bury", job, "x"), ("release", job), ("extend", job),
            ("cancel", "a"), ("requeue_dead",), ("reap_stale",), ("jobs",),
            ("find", "a"), ("stats",), ("__len__",), ("purge", "dead"), ("compact",),
            ("verify",), ("dead_letter",),
        ):  # fmt: skip
            error = self.raised(tq.QueueClosedError, getattr(queue, name), *args)
            self.assertEqual(error.path, self.path)


# Jobs
# =============================================================================


class JobTest(Case):
    FIELDS = dict(
        id="a", payload={"n": [1, "é"]}, state="inflight", attempts=1, priority=3,
        created_at=1e9, run_at=0.0, leased_at=1e9, lease_until=1e9 + 300,
        last_error=None, max_retries=7,
    )  # fmt: skip

    def job(self):
        with Clock(at=1e9).patch():
            queue = self.open()
            queue.put({"n": [1, "é"]}, id="a", priority=3, max_retries=7)
            return queue.get()

    def test_a_leased_job_has_every_field(self):
        """Each documented attribute, which can be neither set nor deleted."""
        job = self.job()
        self.assertEqual({n: getattr(job, n) for n in self.FIELDS}, self.FIELDS)
        self.assertTrue(isinstance(job.token, str) and job.token)
        for name in [*self.FIELDS, "token", "other"]:
            with self.assertRaises(AttributeError):
                setattr(job, name, 1)
            with self.assertRaises(AttributeError):
                delattr(job, name)
        self.assertEqual(job.id, "a")

    def test_truthy_even_with_an_empty_payload(self):
        """`if job:` asks whether there is one, whatever its payload."""
        for payload in (None, 0, "", [], {}, False):
            self.assertTrue(tq.Job("a", payload))

    def test_a_copied_or_pickled_job_can_settle(self):
        """Jobs are values: equal and of one hash if all fields are, the token too."""
        for duplicate in (
            lambda job: pickle.loads(pickle.dumps(job)),
            copy.copy,
            copy.deepcopy,
        ):
            job = self.job()
            twin = duplicate(job)
            self.assertEqual((twin, twin.token), (job, job.token))
            self.assertEqual(len({job, twin}), 1)
            queue = self.open()
            queue.task_done(twin)
            self.assertRaises(tq.LeaseLostError, queue.task_done, job)
            self.assertNotEqual(job, tq.Job("a", 1))
            self.assertFalse(job == "a")

    def test_a_pickled_job_keeps_its_crashes(self):
        """Released, it is still one that a holder died of, and waits longer when
        the next one dies, too."""
        queue = self.open(backoff=lambda n: 60)
        queue.put(1, id="a")
        queue.get()
        queue.reap_stale(0)
        queue.release(pickle.loads(pickle.dumps(queue.get())))
        queue.get()
        self.assertEqual((queue.reap_stale(0), queue.stats().delayed), (1, 1))

    def test_repr_shows_no_payload(self):
        """A Job ends up in logs, and payloads must not."""
        text = repr(tq.Job("order-1", {"card": "4111"}))
        self.assertIn("order-1", text)
        self.assertNotIn("4111", text)


class ExponentialTest(Case):
    def test_grows_to_the_cap(self):
        """Without jitter the delays are base * factor ** (n - 1), capped; an attempt
        beyond all floats and a pickled copy give the same."""
        backoff = tq.exponential(base=2, factor=3, cap=50, jitter=0)
        for each in (backoff, pickle.loads(pickle.dumps(backoff))):
            self.assertEqual(list(map(each, (1, 2, 3, 4, 10**6))), [2, 6, 18, 50, 50])

    def test_jitter_stays_within_its_share(self):
        """Delays spread by at most the jitter in both directions."""
        found = [tq.exponential(base=100, jitter=0.1)(1) for _ in range(300)]
        self.assertTrue(90 <= min(found) < 97 and 103 < max(found) <= 110)


# Queue
# =============================================================================


class ArgumentsTest(Case):
    LEASED, PENDING = tq.Job("a", 1), tq.Job("a", 1)
    # Verb, its first arguments, options with what is a TypeError, a ValueError
    WRONG = (
        ("exponential", [], {"base": ("1",)},
         {"base": (-1, math.nan), "factor": (0,), "cap": (math.inf,),
          "jitter": (2, -0.1)}),
        ("Queue", [], {"path": (None, 5, b"jobs", ["jobs"])}, {"path": ("", "a\0b")}),
        ("Queue", ["jobs"],
         {"name": (5, None, b"a"), "backoff": (5,), "lock_timeout": ("1", None),
          "max_retries": ("3", True, 1.0, None), "lease_timeout": ("1", None, True)},
         {"max_retries": (-1,), "lease_timeout": (0, -1, math.nan, math.inf),
          "lock_timeout": (-1, math.nan)}),
        ("put", [1],
         {"delay": ("1", None, True), "at": ("1", datetime.datetime(2030, 1, 1)),
          "id": (5, b"a"), "priority": (1.5, True, "high", None),
          "max_retries": (1.5, False)},
         {"delay": (-1, math.nan, math.inf, 10**400), "at": (math.nan,),
          "id": ("", "x" * 256, "a\nb", "\x85", "\x7f"), "max_retries": (-1,),
          "priority": (2**31, -(2**31) - 1, 2**70), "exist_ok": (True,)}),
        ("put_many", [], {"payloads": ("text", b"text", {"a": 1}, 5, None, [1, {2}])},
         {"payloads": ([1, math.nan],)}),
        ("put_many", [[1, 2]],
         {"ids": ("ab", [5, 6], [None, "a"]), "delay": ("1",), "priority": (1.0,)},
         {"ids": (["a"], ["a", "a"], ["a", ""]), "delay": (-1,)}),
        ("get", [], {"timeout": ("1", True), "lease_timeout": ("1",)},
         {"timeout": (-1, math.nan), "lease_timeout": (0, -5, math.inf)}),
        ("get_many", [], {"n": ("1", 1.0, None, True)}, {"n": (0, -1)}),
        # An error in the place of success would settle a failure as done.
        ("task_done", [LEASED],
         {"success": ("boom", ValueError("boom"), None, 0, 1)},
         {"error": ("e",), "delay": (1,)}),
        ("task_done", [LEASED, False], {"delay": ("1",)}, {"delay": (-1, math.nan)}),
        ("release", [LEASED], {"delay": ("1",)}, {"delay": (-1,)}),
        ("extend", [LEASED], {"seconds": ("1",)},
         {"seconds": (0, -1, math.inf, math.nan)}),
        ("cancel", [], {"id": (5, None)}, {"id": ("", "a\n")}),
        ("find", [], {"id": (5, None)}, {"id": ("", "a\n")}),
        ("requeue_dead", [], {"id": (5,)}, {"id": ("", "a\n")}),
        ("reap_stale", [], {"older_than_seconds": ("1",)},
         {"older_than_seconds": (-1, math.nan)}),
        ("purge", ["dead"], {"older_than": ("1",)}, {"older_than": (-1, math.nan)}),
        ("purge", [], {"state": (None,)}, {"state": ("done",)}),
        ("jobs", [], {"state": (5,), "limit": (1.5,)},
         {"state": ("delayed",), "limit": (-1,)}),
        ("task_done", [], {"job": (None, "a", {"id": "a"})}, {"job": (PENDING,)}),
        ("release", [], {"job": (None,)}, {"job": (PENDING,)}),
        ("extend", [], {"job": (None,)}, {"job": (PENDING,)}),
        ("bury", [None], {"error": ("x",)}, {}),
        ("bury", [PENDING], {}, {"error": ("x",)}),
    )  # fmt: skip

    def test_wrong_types_and_values_are_refused(self):
        """By TypeError and ValueError, with not a byte on disk changed."""
        queue = self.open()
        queue.put(1, id="a")
        job, before = queue.get(), tree(self.dir)
        for verb, first, *rows in self.WRONG:
            call = getattr(tq, verb, None) or getattr(queue, verb)
            args = [job if arg is self.LEASED else arg for arg in first]
            for kind, options in zip((TypeError, ValueError), rows):
                for option, wrong in options.items():
                    for value in wrong:
                        with self.subTest(verb, **{option: value}):
                            self.assertRaises(kind, call, *args, **{option: value})
                            self.assertEqual(tree(self.dir), before)
        self.assertRaises(ValueError, queue.put, 1, delay=1, at=5.0)
        queue.task_done(job, False)
        self.assertEqual([job.id for job in queue.jobs()], ["a"])

    def test_options_are_keyword_only(self):
        """Optional parameters cannot be given by position by mistake."""
        queue = self.open()
        self.assertRaises(TypeError, tq.Queue, self.path, "default", 5)
        self.assertRaises(TypeError, queue.put, 1, 5)
        self.assertRaises(TypeError, queue.put_many, [1], ["a"])
        self.assertRaises(TypeError, queue.get, 0.0, 5.0)
        self.assertFalse(os.path.exists(self.path))

    def test_path_may_be_a_pathlike_and_is_made_absolute(self):
        """A relative path means the same directory after a chdir; the repr has it."""
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.dir)
        queue = self.open(path=pathlib.Path("jobs"), name="mail")
        os.chdir(here)
        queue.put(1)
        self.assertEqual(os.path.realpath(queue.path), os.path.realpath(self.path))
        self.assertEqual(repr(queue), f"Queue({queue.path!r}, 'mail')")
        self.assertDrains(self.open(name="mail"), [1])


class NamesTest(Case):
    def test_bad_names_are_refused_at_construction(self):
        """A name cannot leave the directory, collide, or hide."""
        for name in (
            "../evil", "a/b", "", ".", "..", "a\0b", "x" * 65, "x" * 300, "a\n",
            "é", "a b", "a.dead", "a.pending", "a*", "\u0661", "con", "NUL", "lpt1",
        ):  # fmt: skip
            with self.subTest(name):
                self.assertRaises(ValueError, tq.Queue, self.path, name)
        self.assertEqual(os.listdir(self.dir), [])

    def test_good_names_share_a_directory(self):
        """Queues of one directory do not see each other's jobs."""
        names = ["a", "-rf", "_", "x" * 64, "a-dead", "a_pending", "B2", "A"]
        queues = [self.open(name=name) for name in names]
        for queue in queues:
            queue.put(queue.name, id="same")
        for queue in queues:
            self.assertHolds(queue, [queue.name])

    def test_a_path_that_is_no_url_of_ours_is_refused(self):
        """What has :// is never a file; what lacks slashes would be a directory with
        a URL's name, and a password, in which no worker looks."""
        with self.assertRaisesRegex(ValueError, "'redis'.*sqlite://"):
            tq.Queue("redis://host/0")
        for path in ("sqlite:/a.db", "sqlite:a.db", "postgresql:/me:sesame@host/db"):
            scheme = path.split(":")[0]
            with self.subTest(path), self.assertRaises(ValueError) as caught:
                tq.Queue(path)
            self.assertIn(f"{scheme}://", str(caught.exception))
            self.assertNotIn("sesame", str(caught.exception))
        folder = self.open(path="./sqlite:x")
        self.assertEqual(os.path.basename(folder.path), "sqlite:x")


@every_engine
class PayloadsTest(Case):
    def test_what_json_cannot_hold_is_refused(self):
        """Unfaithful payloads raise at put, with zero bytes written."""
        circle: list = []
        circle.append(circle)
        queue = self.open()
        queue.put("before")
        before = self.place.raw(self.path)
        for bad in (
            datetime.datetime.now(), b"x", {1, 2}, decimal.Decimal(1), object(),
            circle, {(1, 2): 3}, math.nan, {"a": [[math.inf]]}, -math.inf, len,
            [[]] * 2 + [b""],
        ):  # fmt: skip
            with self.subTest(type(bad)):
                self.assertRaises((TypeError, ValueError), queue.put, bad)
        self.assertEqual(self.place.raw(self.path), before)
        queue.put("after")
        self.assertDrains(queue, ["before", "after"])

    def test_nesting_has_one_limit_on_every_python(self):
        """500 levels are stored; one more is a ValueError; brackets in text
        do not count."""
        deep: object = 1
        for _ in range(500):
            deep = [deep]
        queue = self.open()
        queue.put(deep)
        queue.put("[" * 5000)
        queue.put([[]] * 600)
        self.assertRaises(ValueError, queue.put, [deep])
        self.assertRaises(ValueError, queue.put, {"a": deep})
        endless: object = 1
        for _ in range(100_000):
            endless = [endless]
        self.assertRaises(ValueError, queue.put, endless)
        while isinstance(endless, list):  # its own destruction would recurse
            endless = endless[0]
        self.assertDrains(self.open(), [deep, "[" * 5000, [[]] * 600])

    def test_payloads_come_back_as_json_makes_them(self):
        """Keys and tuples follow the json module, numbers are exact, and what the
        caller changes after put() is not seen."""
        queue = self.open()
        late = {"a": [1]}
        payloads = (
            {1: "a"}, {1: "a", "1": "b"}, (1, 2), {"t": (None, True)},
            {2.5: 1, None: 2}, 1e300, 2**53 + 1, -(10**300), 10**4000, 0.1, 5e-324,
            late,
        )  # fmt: skip
        want = [json.loads(json.dumps(payload)) for payload in payloads]
        for payload in payloads:
            queue.put(payload)
        late["a"].append(2)
        self.assertHolds(queue, want)
        self.assertDrains(queue, want)
        if hasattr(sys, "set_int_max_str_digits"):  # it would not be read again
            self.assertRaises(ValueError, queue.put, 10**5000)

    TEXTS = (
        "\udcff", "\x00", "\U0001f600", "\u2028\u2029", "\x85", "\x0b\x0c\x1c",
        "\r\n", '"\\', "\ufeff", "{[", ',"crc":"00000000"}', "\x7f\x80\x9f", '"',
        '"a"', "\\x", "\udcff\\", "",
    )  # fmt: skip

    def test_any_text_comes_back_as_it_was(self):
        """Surrogates, separators and controls survive in payload and error; in files
        each record is one sound line."""
        queue = self.open(max_retries=0)
        queue.put_many([{text: text} for text in self.TEXTS])
        for text in self.TEXTS:
            job = queue.get()
            self.assertEqual(job.payload, {text: text})
            queue.task_done(job, False, text)
        for view in self.views(queue):
            dead = list(view.dead_letter())
            self.assertEqual([job.last_error for job in dead], list(self.TEXTS))
            self.assertEqual(
                [[*job.payload] for job in dead], [[t] for t in self.TEXTS]
            )
        for state in STATES:
            lines = file_lines(self.path, state)
            self.assertIn(len(lines), (0, len(self.TEXTS)))
            self.assertNotIn(None, map(read_line, lines))

    def test_any_id_comes_back_as_it_was(self):
        """Ids hold any text without control characters."""
        ids = ["\udcff", "\U0001f600" * 255, "\u2028", 'a"b', "\\", "\\u0041", " ", "é"]
        queue = self.open()
        for id in ids:
            queue.put(1, id=id)
            self.assertRaises(tq.DuplicateJobError, queue.put, 1, id=id)
        for view in self.views(queue):
            self.assertEqual([job.id for job in view.jobs()], ids)
            self.assertEqual([view.find(id).id for id in ids], ids)
        for id in ids:
            job = queue.get()
            self.assertEqual(job.id, id)
            queue.task_done(job)
        self.assertEqual(len(self.open()), 0)

    def test_a_huge_payload_is_refused(self):
        """One over the limit is a ValueError, one at the limit is taken."""
        queue = self.open()
        with mock.patch.object(tq, "_MAX_PAYLOAD", 10):
            with self.assertRaisesRegex(ValueError, "11 bytes, at most 10"):
                queue.put("x" * 9)
            queue.put("x" * 8)
        self.assertDrains(self.open(), ["x" * 8])


@every_engine
class LifeTest(Case):
    """Every arrow of the state diagram."""

    def setUp(self):
        super().setUp()
        self.clock = self.manual_clock(at=1e9)

    def later(self, seconds):
        self.clock.jump(seconds, mono=seconds)

    def state(self, queue, id="a"):
        """State and attempts of a job, or None; live and reopened."""
        found = []
        for view in self.views(queue):
            try:
                job = view.find(id)
                found.append((job.state, job.attempts))
            except tq.JobNotFoundError:
                found.append(None)
        self.assertEqual(*found)
        return found[0]

    def leased(self, **options):
        queue = self.open(backoff=lambda n: 0, **options)
        queue.put({"n": 1}, id="a")
        return queue, queue.get()

    def test_put_get_done(self):
        """pending, inflight, gone."""
        queue = self.open()
        queue.put(1, id="a")
        self.assertEqual(self.state(queue), ("pending", 0))
        job = queue.get()
        self.assertEqual(self.state(queue), ("inflight", 1))
        self.assertIsNone(queue.get())
        self.assertIsNone(queue.task_done(job))
        self.assertIsNone(self.state(queue))

    def test_each_end_without_success(self):
        """State, attempts and error afterwards, and after how long it is due."""
        queue = self.open(backoff=lambda n: 0)
        for verb, args, delay, state, attempts, error in (
            ("task_done", (False, "boom"), 0, "pending", 1, "boom"),
            ("task_done", (False, "x"), 60, "pending", 1, "x"),  # not the backoff's
            ("release", (), 0, "pending", 0, None),
            ("release", (), 5, "pending", 0, None),
            ("bury", (ValueError("no user"),), 0, "dead", 1, "no user"),
        ):
            with self.subTest(verb, delay=delay):
                queue.put(1, id="a")
                options = {"delay": delay} if delay else {}
                getattr(queue, verb)(queue.get(), *args, **options)
                self.assertEqual(self.state(queue), (state, attempts))
                self.assertEqual(queue.find("a").last_error, error)
                if delay or state == "dead":
                    self.assertIsNone(queue.get())
                self.assertEqual(queue.stats().delayed, bool(delay))
                self.later(delay)
                if state == "pending":
                    self.assertEqual(queue.get().attempts, attempts + 1)
                queue.cancel("a")

    def test_spent_retries_make_it_dead(self):
        """The job's own number or, if it has none, that of the queue that settles
        it: one delivery, then so many more."""
        queue = self.open(backoff=lambda n: 0, max_retries=1)
        for own, runs in ((None, 2), (0, 1), (3, 4)):
            queue.put(1, id="a", max_retries=own)
            for n in range(1, runs + 1):
                job = queue.get()
                self.assertEqual((job.attempts, job.max_retries), (n, runs - 1))
                queue.task_done(job, False, f"e{n}")
            self.assertEqual(self.state(queue), ("dead", runs))
            self.assertEqual(queue.find("a").last_error, f"e{runs}")
            self.assertTrue(queue.cancel("a"))

    def test_release_does_not_count(self):
        """However often, with no retries left: the attempts and the error are those
        of before, and the job does not die of it."""
        queue, job = self.leased(max_retries=1)
        queue.task_done(job, False, "first")
        for _ in range(3):
            job = queue.get()
            self.assertEqual((job.attempts, job.last_error), (2, "first"))
            queue.release(job)
            self.assertEqual(self.state(queue), ("pending", 1))

    def test_how_long_a_lease_lasts(self):
        """From now, as its get() or extend() says or else the queue; the Job of
        before an extend() still settles."""
        queue, job = self.leased(lease_timeout=50)
        self.assertEqual(job.lease_until, 1e9 + 50)
        self.later(10.0)
        again = queue.extend(job, 60)
        self.assertEqual((again.leased_at, again.lease_until), (1e9, 1e9 + 70))
        self.assertEqual((again.token, again.attempts), (job.token, 1))
        self.assertEqual(queue.extend(again).lease_until, 1e9 + 60)
        self.assertEqual(queue.find("a").lease_until, 1e9 + 60)
        queue.task_done(job)
        self.assertIsNone(self.state(queue))
        queue.put(2)
        self.assertEqual(queue.get(lease_timeout=7).lease_until, 1e9 + 17)

    def test_cancel_in_each_state(self):
        """cancel() removes a pending, inflight or dead job, once."""
        queue = self.open()
        for leave in (
            lambda: None,
            queue.get,
            lambda: queue.bury(queue.get(), "x"),
        ):
            queue.put(1, id="a")
            leave()
            self.assertIs(queue.cancel("a"), True)
            self.assertIs(queue.cancel("a"), False)
            self.assertIsNone(self.state(queue))
            self.assertIsNone(queue.get())

    def test_requeue(self):
        """A replayed job is pending with all its retries, once only; all go in the
        order of their deaths."""
        queue, job = self.leased(max_retries=0)
        queue.task_done(job, False, "x")
        self.assertEqual(queue.requeue_dead("a"), 1)
        self.assertEqual(self.state(queue), ("pending", 0))
        self.assertRaises(tq.JobNotFoundError, queue.requeue_dead, "a")
        self.assertEqual(list(queue.dead_letter()), [])
        queue.put_many([1, 2])
        for job in queue.get_many(3)[::-1]:
            queue.task_done(job, False, "y")
        self.assertEqual((queue.requeue_dead(), queue.requeue_dead()), (3, 0))
        self.assertEqual(self.open().stats()[:4], (3, 0, 0, 0))
        self.assertDrains(queue, [2, 1, {"n": 1}])

    def test_an_error_hides_nothing_that_was_done_before_it(self):
        """Jobs taken over are handed over, and a settlement counts; a call that
        has done nothing tells the error."""
        queue, _ = self.leased()
        queue.put(2, id="b")
        self.assertEqual(queue.get().id, "b")
        engine, error = queue._engine, tq.QueueError("disk full")
        takes = [error, tq._Taken([], [], None), error, error]
        with mock.patch.object(engine, "expired", side_effect=error):
            self.assertRaises(tq.QueueError, queue.get)
        self.later(400.0)
        with mock.patch.object(engine, "take", side_effect=takes):
            self.assertRaises(tq.QueueError, queue.get)
            (job,) = queue.get_many(2)
            self.assertEqual((job.id, job.attempts), ("a", 2))
            done = tq._Change("a", job.token, "done")
            self.assertEqual(queue._next(1, 9.0, True, False, [done]).made, [True])
        self.assertEqual(queue.get().id, "b")

    def test_a_get_makes_dead_what_has_no_retries_left(self):
        """It does not deliver what is over and spent once more."""
        queue, _ = self.leased(max_retries=0)
        self.later(400.0)
        self.assertIsNone(queue.get())
        self.assertEqual(self.state(queue), ("dead", 1))

    def test_purge_leaves_what_changes_meanwhile(self):
        """Between its look and the removal a dead job was requeued."""
        queue, job = self.leased()
        queue.bury(job, "x")
        records = queue._engine.records

        def looked(*args):
            found = [*records(*args)]
            queue.requeue_dead("a")
            return iter(found)

        with mock.patch.object(queue._engine, "records", looked):
            self.assertEqual(queue.purge("dead"), 0)
        self.assertEqual(self.state(queue), ("pending", 0))

    def test_requeue_is_told_that_another_was_faster(self):
        """Between its look and the change the dead job was cancelled."""
        queue, job = self.leased()
        queue.bury(job, "x")
        find = queue._engine.find

        def looked(id):
            found = find(id)
            queue.cancel(id)
            return found

        with mock.patch.object(queue._engine, "find", looked):
            self.assertRaises(tq.JobNotFoundError, queue.requeue_dead, "a")

    def test_only_a_lease_is_settled_or_renewed(self):
        """However it was left, the token alone is the fence (I6): the job, or its
        next delivery, stays as it is; so does one of that id in another queue."""
        queue, other = self.open(), self.open(name="other")
        other.put(1, id="a")
        held = other.get()
        for leave in (
            lambda job: queue.task_done(job),
            lambda job: queue.cancel("a"),
            lambda job: queue.purge("inflight"),
            lambda job: queue.release(job, delay=60),
            lambda job: (queue.release(job), queue.get()),
            lambda job: queue.task_done(job, False, "x"),
            lambda job: queue.bury(job, "x"),
            lambda job: queue.reap_stale(0),
            lambda job: (queue.bury(job, "x"), queue.requeue_dead()),
        ):
            queue.put(1, id="a")
            job = queue.get()
            leave(job)
            self.assertLost(queue, job)
            queue.cancel("a")
        self.assertLost(other, job)
        other.task_done(held)

    def assertLost(self, queue, job):
        left = self.place.raw(self.path)
        for verb, *args in (
            ("task_done",), ("task_done", False), ("bury", "x"), ("release",),
            ("extend",),
        ):  # fmt: skip
            self.assertRaises(tq.LeaseLostError, getattr(queue, verb), job, *args)
        self.assertEqual(self.place.raw(self.path), left)

    def test_reap_counts_only_what_is_stale(self):
        """reap_stale() takes back what was not renewed for so long; without an age
        it spares every lease with time left.  Spent retries end in death."""
        queue, job = self.leased()
        queue.put(2, id="b", max_retries=0)
        queue.get()
        self.later(100.0)
        queue.extend(job)
        other = self.open()
        self.assertEqual(other.reap_stale(), 0)
        self.assertEqual(other.reap_stale(50), 1)
        self.assertEqual(self.state(queue, "b"), ("dead", 1))
        self.assertTrue(queue.find("b").last_error)
        self.assertEqual((queue.reap_stale(50), queue.reap_stale(0)), (0, 1))
        self.assertEqual(self.state(queue), ("pending", 1))
        self.assertRaises(tq.LeaseLostError, queue.task_done, job)

    def test_an_expired_lease_is_taken_over(self):
        """At its deadline a living holder's job goes to the next get; a holder who
        is late while nobody has it can still settle."""
        queue, job = self.leased(lease_timeout=10)
        self.later(9.0)
        self.assertIsNone(queue.get())
        self.later(1.5)
        again = queue.get()
        self.assertEqual((again.id, again.attempts), ("a", 2))
        self.assertRaises(tq.LeaseLostError, queue.task_done, job)
        self.assertRaises(tq.LeaseLostError, queue.task_done, job, False)
        self.later(99.0)
        queue.task_done(again)
        self.assertIsNone(self.state(queue))

    def test_expired_leases_come_back_in_their_order(self):
        """That of the leases, not of the puts: taken over, or given back."""
        queue = self.open(backoff=lambda n: 0)
        queue.put("second", delay=5.0)
        queue.put("first")
        queue.get()
        self.later(6.0)
        queue.get()
        for give_back in (lambda: 0, queue.reap_stale):
            self.later(400.0)
            give_back()
            for want in ("first", "second"):
                self.assertEqual(queue.get().payload, want)
                self.later(1.0)

    def test_purge_by_state_and_age(self):
        """The age counts from the last delivery, without one from the put."""
        queue = self.open()
        queue.put_many(list("abc"))
        self.later(100.0)
        queue.bury(queue.get(), "x")
        queue.get()
        queue.put("d")
        for seconds, age, purged in (
            (20, 50, {"pending": 1, "inflight": 0, "dead": 0}),
            (40, 50, {"pending": 1, "inflight": 1, "dead": 1}),
        ):
            self.later(seconds)
            for state, count in purged.items():
                self.assertEqual(queue.purge(state, older_than=age), count)
        queue.put("e")
        self.assertEqual(queue.purge("dead"), 0)
        self.assertEqual(queue.purge("pending"), 1)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_purge_leaves_what_is_put_meanwhile(self):
        """Else it would never end beside a busy producer."""
        queue, other = self.open(), self.open()
        queue.put_many(range(10))
        change = queue._engine.change

        def busy(changes):
            other.put("new")
            return change(changes)

        with mock.patch.multiple(tq, _PART=2, _SQL_PAGE=3):
            with mock.patch.object(queue._engine, "change", busy):
                self.assertEqual(queue.purge("pending"), 10)
        self.assertHolds(queue, ["new"] * 5)

    def test_a_job_is_delivered_though_others_cannot_be_given_back(self):
        """Failing to give back what is expired is logged: the get has its job."""
        queue = self.open(max_retries=0)
        queue.put_many([1, 2], ids=["a", "b"])
        queue.get(lease_timeout=1.0)
        error = tq.QueueError("disk full")
        self.later(60)
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            with mock.patch.object(queue._engine, "change", side_effect=error):
                self.assertEqual(queue.get().id, "b")
        self.assertIn("not given back: disk full", logs.output[0])

    @of_files
    def test_an_interrupted_call_leaves_no_half_change(self):
        """A get that Ctrl-C hits in its write has picked a job: the next get of
        the same object still has it to give."""
        queue = self.open()
        queue.put_many([1, 2])
        queue.stats()
        with patched("os", write=mock.Mock(side_effect=KeyboardInterrupt)):
            self.assertRaises(KeyboardInterrupt, queue.get)
        self.assertDrains(queue, [1, 2])

    @of_files
    def test_an_interrupted_first_look_is_begun_anew(self):
        """Ctrl-C while the files are read for the first time leaves no job that
        is counted and never delivered."""
        self.open().put_many([1, 2])
        queue, interrupts = self.open(), [KeyboardInterrupt]

        class Places(list):
            def append(self, place):
                while interrupts:
                    raise interrupts.pop()
                super().append(place)

        with mock.patch.object(tq, "array", lambda *_: Places()):
            self.assertRaises(KeyboardInterrupt, queue.get)
        self.assertDrains(queue, [1, 2])


@every_engine
class RetryTest(Case):
    def test_the_backoff_is_asked_with_the_attempt(self):
        """backoff(1), backoff(2), ... and the instant is recorded."""
        clock, asked = self.manual_clock(at=1e9), []
        queue = self.open(backoff=lambda n: asked.append(n) or n * 10)
        queue.put(1, id="a")
        for n in (1, 2, 3):
            queue.task_done(queue.get(), False)
            self.assertEqual(queue.find("a").run_at, clock.time() + n * 10)
            clock.jump(n * 10.0)
        self.assertEqual(asked, [1, 2, 3])

    def test_a_bad_backoff_costs_no_job(self):
        """Nonsense or an exception from backoff gives a sane delay, logged."""
        queue = self.open()
        for bad in (
            math.inf,
            math.nan,
            -5,
            None,
            "3",
            10**400,
            True,
            ZeroDivisionError,
        ):
            answer = mock.Mock(side_effect=[bad])
            with self.subTest(bad), Clock(at=1e9).patch():
                queue.backoff = answer
                queue.put(1, id="a")
                with self.assertLogs("tiny_queue", "ERROR") as logs:
                    queue.task_done(queue.get(), False, "e")
                self.assertIn("backoff failed", logs.output[0])
                job = queue.find("a")
                self.assertEqual((job.state, job.last_error), ("pending", "e"))
                self.assertTrue(0 < job.run_at - 1e9 <= 1.1, "the default")
                queue.cancel("a")

    def test_any_error_is_kept_as_text(self):
        """Exceptions, None, numbers and hopeless objects all settle."""

        class Hopeless:
            def __str__(self):
                raise RuntimeError

        queue = self.open(backoff=lambda n: 0, max_retries=100)
        queue.put(1, id="a")
        for error, want in (
            (ValueError("x"), "x"), ("é\n", "é\n"), (None, None), (5, "5"),
        ):  # fmt: skip
            queue.task_done(queue.get(), False, error)
            for view in self.views(queue):
                self.assertEqual(view.find("a").last_error, want)
        queue.task_done(queue.get(), False, Hopeless())
        self.assertIn("Hopeless", queue.find("a").last_error)
        queue.task_done(queue.get(), False, "x" * 10**6)
        self.assertLess(len(queue.find("a").last_error), 70_000)


@every_engine
class OrderTest(Case):
    def test_fifo_whoever_puts_whatever_the_clock_does(self):
        """Frozen or running backwards, the order of get is that of put."""
        queues, clock = [self.open(), self.open()], self.manual_clock(at=1e9)
        for step in (0.0, -1.0):
            for n in range(12):
                clock.jump(step)
                queues[n % 2].put(n)
            self.assertDrains(queues[0], range(12))

    def test_higher_priority_first(self):
        """Priorities from -2**31 to 2**31-1, FIFO inside each."""
        queue = self.open()
        priorities = [0, 5, -1, 5, 2**31 - 1, -(2**31), 0]
        for n, priority in enumerate(priorities):
            queue.put(n, priority=priority)
        want = sorted(range(7), key=lambda n: (-priorities[n], n))
        self.assertEqual([job.payload for job in self.open().get_many(3)], want[:3])
        self.assertDrains(queue, want[3:])

    def test_order_is_that_of_the_file_after_reopening(self):
        """A retried and a released job go last, after a restart too."""
        queue = self.open(backoff=lambda n: 0)
        queue.put_many(list("abcd"))
        a, b = queue.get_many(2)
        queue.task_done(b, False)
        queue.release(a)
        self.assertHolds(queue, "cdba")
        if self.place.engine.can_compact:
            queue.compact()
        self.assertDrains(self.open(), "cdba")

    def test_a_delayed_job_never_holds_up_a_ready_one(self):
        """A thousand urgent delayed jobs at the head are passed by."""
        queue = self.open()
        queue.put_many(range(1000), delay=3600, priority=9)
        queue.put_many(list("0123456789"))
        self.assertDrains(self.open(), "0123456789")
        self.assertEqual(queue.stats()[:2], (1000, 1000))

    def test_get_many_takes_up_to_n_in_order(self):
        """get_many() is n gets under one lock; fewer if there are fewer."""
        queue = self.open()
        queue.put_many(range(5))
        self.assertEqual([job.payload for job in queue.get_many(3)], [0, 1, 2])
        jobs = queue.get_many(10, timeout=1.0)
        self.assertEqual([job.payload for job in jobs], [3, 4])
        self.assertEqual(len({job.token for job in jobs}), 2)
        self.assertEqual(queue.get_many(1), [])


@every_engine
class DelayTest(Case):
    def setUp(self):
        super().setUp()
        self.clock = self.manual_clock(at=1e9)

    def test_delay_and_at(self):
        """A job is due after `delay` seconds or at the instant `at`, as soon as the
        wall clock says so, however it came there."""
        queue = self.open()
        self.assertEqual(queue.put(1, delay=10).run_at, 1e9 + 10)
        self.assertEqual(queue.put(2, at=1e9 + 20.5).run_at, 1e9 + 20.5)
        queue.put(3, delay=86400)
        for jump, want in ((9.0, []), (1.0, [1]), (10.0, []), (0.5, [2])):
            self.clock.jump(jump)
            self.assertDrains(self.open(), want)
        self.clock.jump(86400.0)
        for view in self.views(queue):
            self.assertIsNone(view.stats().next_due)
        self.assertDrains(queue, [3])

    def test_a_clock_set_back_hides_nothing(self):
        """run_at of a job that is not delayed is 0; a delayed one is delivered once,
        when the clock says its instant."""
        queue = self.open()
        self.assertEqual(queue.put(1).run_at, 0)
        self.assertEqual(queue.put(2, at=1.0).run_at, 0)
        queue.put(3, delay=10)
        for jump, want in ((-5e8, [1, 2]), (5e8 + 11, [3]), (86400.0, [])):
            self.clock.jump(jump)
            self.assertDrains(self.open(), want)

    def test_a_due_job_stays_due_when_the_clock_is_set_back(self):
        """An index that saw a job due and one that did not both deliver it
        in the end, once."""
        queue = self.open()
        queue.put(1, delay=10)
        self.clock.jump(11.0)
        self.assertEqual(queue.stats()[:2], (1, 0))
        self.clock.jump(-100.0)
        jobs = [view.get() for view in self.views(queue)]
        self.clock.jump(200.0)
        jobs.append(queue.get())
        self.assertEqual([job.payload for job in jobs if job], [1])

    def test_stats_tell_the_instants(self):
        """oldest is since when a due job waits, next_due the next delayed."""
        queue = self.open()
        self.assertEqual(queue.stats()[5:7], (None, None))
        queue.put("a", delay=50)
        queue.put("b", delay=20)
        self.assertEqual(queue.stats()[5:7], (None, 1e9 + 20))
        self.clock.jump(5.0)
        queue.put("c")
        self.assertEqual(self.open().stats()[5:7], (1e9 + 5, 1e9 + 20))
        self.clock.jump(20.0)
        queue.task_done(queue.get())
        self.assertEqual(self.open().stats().next_due, 1e9 + 50)

    def test_oldest_is_the_job_that_has_been_due_longest(self):
        """Whichever stands first, in whatever priority, was delayed, is gone or
        comes back; and it is the same to a reader that comes later."""
        queue = self.open()
        queue.put("first", id="first", delay=685)
        queue.put("second", id="second", delay=680)
        queue.put("plain", id="plain")
        queue.put("low", id="low", priority=-1, delay=670)
        self.assertOldest(queue, 0)
        self.clock.jump(686)
        self.assertOldest(queue, 0)
        job = queue.get()
        self.assertEqual(job.id, "first")
        for gone, since in (("plain", 670), ("low", 680)):
            queue.cancel(gone)
            self.assertOldest(queue, since)
        queue.put("new", id="new")
        queue.release(job, delay=15)
        self.clock.jump(10)
        queue.put("newest", id="newest")
        self.clock.jump(10)
        for gone, since in (("second", 686), ("new", 696), ("newest", 701)):
            queue.cancel(gone)
            self.assertOldest(queue, since)

    def assertOldest(self, queue, since):
        """On the live object, a new one, and one whose files were rewritten."""
        for view in self.views(queue):
            self.assertEqual(view.stats().oldest, 1e9 + since)
        if queue._engine.can_compact:
            queue.compact()
            self.assertEqual(queue.stats().oldest, 1e9 + since)


@every_engine
class IdsTest(Case):
    def test_an_id_is_taken_until_success(self):
        """pending, delayed, inflight and dead block put(); success frees."""
        queue = self.open(max_retries=0)
        for state, make in (
            ("pending", lambda: queue.put(1, id="x", delay=60)),
            ("pending", lambda: queue.cancel("x") and queue.put(2, id="x")),
            ("inflight", lambda: queue.get()),
            ("dead", lambda: queue.task_done(queue.find("x"), False)),
            ("pending", lambda: queue.requeue_dead("x")),
        ):
            make()
            for view in self.views(queue):
                with self.assertRaises(tq.DuplicateJobError) as caught:
                    view.put(3, id="x")
                self.assertEqual(caught.exception.state, state)
        queue.task_done(queue.get())
        for view in self.views(queue):
            view.put(4, id="x")
            view.task_done(view.get())

    def test_exist_ok_returns_the_job_that_is_there(self):
        """put(exist_ok=True) is put or find, with nothing written."""
        queue = self.open()
        job = queue.put(1, id="x", priority=4)
        self.assertEqual((job.attempts, job.token), (0, None))
        for state in ("pending", "inflight"):
            before = self.place.raw(self.path)
            for view in self.views(queue):
                found = view.put(2, id="x", exist_ok=True)
                self.assertEqual((found, found.state), (job, state))
            self.assertEqual(self.place.raw(self.path), before)
            job = queue.get()
        self.assertEqual(queue.put(5, id="y", exist_ok=True).payload, 5)

    def test_one_process_wins_a_race_for_an_id(self):
        """Of two processes that put one id at once, exactly one succeeds."""
        rounds = range(100 if DEEP else 12)

        def racer(link):
            mine, won = self.open(), []
            for n in rounds:
                link.hear()
                with contextlib.suppress(tq.DuplicateJobError):
                    mine.put(n, id=f"x{n}")
                    won.append(n)
                link.tell()
            return won

        racers = [self.spawn(racer) for _ in range(2)]
        for _ in rounds:
            for child in racers:
                child.tell()
            for child in racers:
                child.hear()
        won = sorted(racers[0].hear() + racers[1].hear())
        self.assertEqual(won, list(rounds))
        self.assertEqual(len(self.open()), len(rounds))

    def test_a_reused_id_is_a_new_job(self):
        """After success an id starts again with attempts 0 and no error."""
        queue = self.open(backoff=lambda n: 0)
        for n in range(4):
            self.assertIsNone(queue.put(n, id="x").last_error)
            queue.task_done(queue.get(), False, "e")
            job = queue.get()
            self.assertEqual((job.payload, job.attempts), (n, 2))
            queue.task_done(job)
            self.assertIsNone(self.open().get())


@every_engine
class PutManyTest(Case):
    def test_returns_the_jobs_in_order(self):
        """Each payload's job, with its id, delay and priority."""
        queue = self.open()
        with Clock(at=1e9).patch():
            jobs = queue.put_many(iter("ab"), ids=iter(["x", "y"]), priority=3)
            jobs += queue.put_many(["c"], delay=5)
        self.assertEqual([job.id for job in jobs[:2]], ["x", "y"])
        self.assertEqual([job.payload for job in jobs], ["a", "b", "c"])
        self.assertEqual([job.priority for job in jobs], [3, 3, 0])
        self.assertEqual(jobs[2].run_at, 1e9 + 5)
        for view in self.views(queue):
            self.assertEqual(list(view.jobs()), jobs)

    def test_empty_writes_nothing(self):
        """An empty iterable returns [] and does not touch the disk."""
        self.assertEqual(self.open().put_many([]), [])
        self.assertFalse(self.place.exists(self.path))

    def test_one_living_id_refuses_all(self):
        """A duplicate adds nothing, the other ids included."""
        queue = self.open()
        queue.put(0, id="b")
        before = self.place.raw(self.path)
        with self.assertRaises(tq.DuplicateJobError) as caught:
            queue.put_many([1, 2, 3], ids=["a", "b", "c"])
        self.assertEqual(caught.exception.id, "b")
        self.assertEqual(self.place.raw(self.path), before)
        queue.put_many([1, 3], ids=["a", "c"])
        self.assertDrains(self.open(), [0, 1, 3])

    @of_files
    def test_one_write_and_one_sync(self):
        """However many jobs, the kernel is asked to write and sync once."""
        queue = self.open(fsync=True)
        queue.put(0)
        writes, syncs = mock.Mock(side_effect=os.write), []
        with patched("os", write=writes), mock.patch.object(tq, "_sync", syncs.append):
            queue.put_many(range(1000))
        self.assertEqual((writes.call_count, len(syncs)), (1, 1))

    @of_files
    def test_a_torn_batch_leaves_nothing(self):
        """Cut at any byte, a put_many is not there at all, and the job before
        it is; its bytes are kept."""
        queue = self.open()
        queue.put("first")
        start = os.path.getsize(file_of(self.path, "pending"))
        queue.put_many(["a", "b", "c"])
        whole = file_bytes(self.path, "pending")
        ends = [match.end() for match in re.finditer(b"\n", whole)][:-1]
        for cut in (*ends, *range(start, len(whole) - 1, 1 if DEEP else 13)):
            shutil.rmtree(self.path)
            self.write("pending", whole[:cut])
            with patched("os", fsync=bool, fdatasync=bool):  # they take most of it
                with tq.Queue(self.path, fsync=False) as fresh:
                    self.assertEqual([job.payload for job in fresh.jobs()], ["first"])
                    fresh.put("next")
            with tq.Queue(self.path, fsync=False) as fresh:
                self.assertDrains(fresh, ["first", "next"])

    @of_files
    def test_a_batch_that_lacks_only_its_newline_is_whole(self):
        """The last line is sound: all jobs are there."""
        self.open().put_many(["a", "b", "c"])
        whole = file_bytes(self.path, "pending")
        self.write("pending", whole[:-1])
        queue = self.open()
        queue.put("d")
        self.assertEqual(file_bytes(self.path, "pending")[: len(whole)], whole)
        self.assertDrains(self.open(), "abcd")


@every_engine
class ViewsTest(Case):
    def fill(self):
        queue = self.open()
        queue.put_many(list("abcdef"), ids=list("abcdef"))
        queue.put("late", id="late", delay=3600)
        a, b, c = queue.get_many(3)
        queue.bury(a, "x")
        queue.bury(c, "y")
        return queue

    def test_jobs_by_state_and_limit(self):
        """pending, inflight, then dead, each in the order of its file."""
        queue = self.fill()
        for view in self.views(queue):
            self.assertEqual(
                [(job.id, job.state) for job in view.jobs()],
                [("d", "pending"), ("e", "pending"), ("f", "pending"),
                 ("late", "pending"), ("b", "inflight"), ("a", "dead"), ("c", "dead")],
            )  # fmt: skip
            for found, want in (
                (view.jobs("inflight"), "b"),
                (view.jobs("pending", 2), "d e"),
                (view.jobs(limit=5), "d e f late b"),
                (view.jobs(limit=0), ""),
                (view.dead_letter(), "a c"),
            ):
                self.assertEqual([job.id for job in found], want.split())

    def test_stats_and_len_count(self):
        """len() counts pending, delayed ones included, and a queue
        without any is true."""
        queue = self.fill()
        for view in self.views(queue):
            self.assertEqual(view.stats()[:5], (4, 1, 1, 2, 0))
            self.assertEqual(len(view), 4)
            self.assertGreater(view.stats().bytes, 100)
        queue.purge("pending")
        self.assertEqual((len(queue), bool(queue)), (0, True))

    @of_files
    def test_stats_fields(self):
        """They have the documented names and order; bytes are those of the files."""
        want = "pending delayed inflight dead damaged oldest next_due bytes"
        self.assertEqual(" ".join(tq.Stats._fields), want)
        self.assertEqual(" ".join(tq.Damage._fields), "file line reason")
        queue = self.fill()
        size = sum(len(file_bytes(self.path, state)) for state in STATES)
        self.assertEqual(queue.stats().bytes, size)
        self.assertIsInstance(queue.stats(), tq.Stats)

    def test_an_iteration_is_a_snapshot(self):
        """What happens meanwhile does not change it, compaction included."""
        queue = self.fill()
        iterator = queue.jobs("pending")
        first = next(iterator)
        self.assertDrains(queue, "def")
        queue.purge("pending")
        if self.place.engine.can_compact:
            queue.compact()
        self.assertEqual(
            [first.id] + [job.id for job in iterator], "d e f late".split()
        )

    def test_looking_writes_nothing(self):
        """Inspection changes no byte of a sound queue."""
        queue = self.fill()
        before = self.place.raw(self.path)
        for view in self.views(queue):
            for look in (view.stats, view.jobs, view.verify, view.dead_letter):
                list(look())
            self.assertEqual((len(view), view.find("b").id), (4, "b"))
        self.assertEqual(self.place.raw(self.path), before)

    def test_looking_at_nothing_creates_nothing(self):
        """A queue that was never written to is empty, and stays nowhere."""
        queue = self.open()
        self.assertEqual(queue.stats(), (0, 0, 0, 0, 0, None, None, 0))
        self.assertEqual(list(queue.jobs()), [])
        self.assertEqual(queue.verify(), [])
        self.assertRaises(tq.JobNotFoundError, queue.find, "a")
        self.assertFalse(self.place.exists(self.path))


@every_engine
class WaitingTest(Case):
    def assertSoon(self, call, low=0.0, high=2.0):
        """What it returns, after so many seconds at least and at most."""
        start = time.monotonic()
        found = call()
        self.assertTrue(low <= time.monotonic() - start < high)
        return found

    def test_a_timeout_is_kept(self):
        """On an empty queue get() and get(0) return None at once, get(timeout) and
        get_many() when it is over."""
        queue = self.open()
        for _ in range(20):
            self.assertIsNone(self.assertSoon(queue.get, high=0.5))
        self.assertIsNone(self.assertSoon(lambda: queue.get(0.1), 0.1, 0.6))
        self.assertEqual(self.assertSoon(lambda: queue.get_many(5, 0.1), 0.1, 0.6), [])

    @of_files
    def test_a_jump_of_the_wall_clock_does_not_change_a_timeout(self):
        """Timeouts are measured by the monotonic clock."""
        queue = self.open()
        for step in (-3600.0, 3600.0):
            ticks = itertools.count(time.time(), step)
            with patched("time", time=ticks.__next__):
                self.assertIsNone(self.assertSoon(lambda: queue.get(0.1), 0.1))

    def test_a_put_elsewhere_ends_the_wait(self):
        """A waiting get, without limit even, returns another process's job."""

        def waiter(link):
            queue = self.open()
            self.assertIsNone(queue.get())
            link.tell("waiting")
            return queue.get(timeout=None).payload

        queue, child = self.open(), self.spawn(waiter)
        child.hear()
        queue.put("hello")
        self.assertEqual(self.assertSoon(child.hear), "hello")

    def test_a_due_job_ends_the_wait(self):
        """A waiting get wakes up when a delayed job becomes due; get_many() waits
        for no second."""
        queue = self.open()
        queue.put(1, delay=0.1)
        queue.put(2, delay=0.1)
        self.assertTrue(self.assertSoon(lambda: queue.get(timeout=PATIENCE)))
        found = self.assertSoon(lambda: queue.get_many(5, timeout=PATIENCE))
        self.assertEqual(len(found), 1)

    @of_files
    def test_who_is_woken_in_vain_again_and_again_sleeps_on(self):
        """Woken within 5 ms again and again for jobs that others took, a waiter
        adds up to 3 ms of sleep each time, 12 at most; a job ends that."""
        queue, naps, ticks = self.open(), [], itertools.count(0.0, 0.001)
        engine = queue._engine

        def wait(times):
            naps.clear()
            with (
                mock.patch.object(engine._watch, "wait"),
                patched("time", sleep=naps.append, monotonic=lambda: next(ticks)),
                patched("random", uniform=lambda low, high: high),
            ):
                for _ in range(times):
                    engine.wait((0, math.inf), 1.0)
            return [round(nap, 6) for nap in naps]

        self.assertEqual(wait(6), [0.003, 0.006, 0.009, 0.012, 0.012])
        queue.put(1)
        self.assertTrue(queue.get())
        self.assertEqual(wait(2), [0.003])
        next(itertools.islice(ticks, 5, None))  # puts have become rare
        self.assertEqual(wait(1), [])

    @of_files
    def test_a_woken_get_does_not_ask_for_the_dead_each_time(self):
        """The first look of a get with nothing due asks who is dead at once,
        the next ones once a second."""
        clock, queue = self.manual_clock(), self.open()
        with mock.patch.object(queue._engine, "expired", return_value=[]) as asked:
            for first, jump, count in ((1, 9, 2), (1, 0, 3), (0, 0, 3), (0, 1, 4)):
                clock.jump(mono=jump)
                queue._next(1, 300.0, True, bool(first))
                self.assertEqual(asked.call_count, count)

    def test_idle_waits_write_nothing_and_cost_little(self):
        """Empty, delayed and leased-elsewhere queues are left as they are."""
        queue = self.open()
        queue.put(1, delay=3600)
        queue.put(2)
        self.assertTrue(queue.get())
        before = self.place.raw(self.path), self.written()
        cpu = time.process_time()
        self.assertIsNone(self.open().get(timeout=0.5))
        self.assertLess(time.process_time() - cpu, 0.2)
        self.assertEqual((self.place.raw(self.path), self.written()), before)

    def written(self):
        """When each file here was last written to."""
        return {
            entry.name: entry.stat().st_mtime_ns
            for folder, _, _ in os.walk(self.dir)
            for entry in os.scandir(folder)
            if entry.name.endswith((".jsonl", ".db", "-wal"))
        }

    def test_many_threads_wait_on_one_object(self):
        """Each of several jobs ends the wait of one thread."""
        queue, found = self.open(), []
        waits = [lambda: found.append(queue.get(timeout=PATIENCE))] * 4
        self.run_threads(*waits, lambda: [queue.put(n) for n in range(4)])
        self.assertEqual(sorted(job.payload for job in found), [0, 1, 2, 3])


@every_engine
class CloseTest(Case):
    def test_with_closes(self):
        """A with block closes; closing twice is fine."""
        with tq.Queue(self.path, fsync=False) as queue:
            queue.put(1)
        self.assertRaises(tq.QueueClosedError, queue.put, 2)
        queue.close()
        self.assertDrains(self.open(), [1])

    def test_leases_out_are_deliverable_at_once(self):
        """close() with leases out gives the jobs away, counted."""
        queue, other = self.open(), self.open()
        queue.put(1)
        job = queue.get()
        self.assertIsNone(other.get())
        queue.close()
        again = other.get()
        self.assertEqual((again.id, again.attempts), (job.id, 2))
        other.task_done(again)

    def test_closing_one_object_leaves_the_others_alone(self):
        """Another object of the process, and of its parent, keeps its leases and
        its lock."""
        one, two = self.open(), self.open()
        one.put(1)
        job = one.get()
        two.put(2)
        two.close()
        self.spawn(lambda link: one.close()).hear()
        self.assertEqual(self.open().get().payload, 2)
        self.assertIsNone(self.open().get())
        one.task_done(job)

    def test_close_while_another_thread_waits(self):
        """A get that waits is ended by close() with QueueClosedError."""
        queue = self.open()
        queue.put(1, delay=3600)

        def wait():
            self.assertRaises(tq.QueueClosedError, queue.get, timeout=5.0)

        def close():
            eventually(lambda: any(map(waits, threading.enumerate())))
            queue.close()

        with mock.patch.object(tq, "_TICK", 0.1):  # as late as it may be noticed
            self.run_threads(wait, close)

    def test_close_leaves_nothing_open(self):
        """No descriptor, connection or thread, whatever the queue was used for."""
        with self.open() as other:  # SQLite keeps descriptors for one that is open
            other.put("late", delay=3600)
        before = open_fds(), threading.active_count()
        queue = self.open()
        queue.put_many(range(3))
        queue.get()
        tq.Worker(queue, str, concurrency=2, max_jobs=2).run_forever()
        queue.get(timeout=0.01)  # which listens
        queue.close()
        eventually(lambda: open_fds() <= before[0], timeout=5.0)
        eventually(lambda: threading.active_count() <= before[1])


@every_engine
class PicklingTest(Case):
    def test_a_queue_pickles_to_its_arguments(self):
        """Pickle and deepcopy make a new object of the same queue."""
        queue = self.open(
            name="q", max_retries=7, lease_timeout=5.0, lock_timeout=1.5,
            backoff=tq.exponential(base=9, jitter=0),
        )  # fmt: skip
        queue.put(1)
        for twin in (pickle.loads(pickle.dumps(queue)), copy.deepcopy(queue)):
            self.addCleanup(twin.close)
            self.assertIsNot(twin, queue)
            for name in "path name max_retries lease_timeout fsync".split():
                self.assertEqual(getattr(twin, name), getattr(queue, name))
            self.assertEqual((len(twin), twin.backoff(1)), (1, 9))

    def test_a_spawned_process_can_use_it_in_any_locale(self):
        """A queue sent to a fresh interpreter reads and writes the same text."""
        queue, payload = self.open(), {"é": "\u2028\udcff"}
        queue.put(payload, id="\U0001f600")
        code = (
            "import pickle, sys; q = pickle.loads(bytes.fromhex(sys.argv[1]));"
            "j = q.get(); q.put(j.payload); q.task_done(j);"
            "print(ascii([j.id, j.payload]))"
        )
        done = run_python(
            code, pickle.dumps(queue).hex(),
            LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0",
        )  # fmt: skip
        want = ascii(["\U0001f600", payload])
        self.assertEqual((done.stdout.strip(), done.stderr), (want, ""))
        self.assertDrains(queue, [payload])

    LEAVING = """
import atexit, itertools, os, sys, threading
import tiny_queue as tq
queue, begun = tq.Queue(sys.argv[1], fsync=False), threading.Event()
puts = tq.Queue(sys.argv[1], "puts", fsync=False)
atexit.register(lambda: puts.put("exit", id="exit"))
def put():
    for n in itertools.count():
        puts.put(n, id=f"n{n}")
def now(job):
    os.write(1, job.id.encode() + b"\\n")
    begun.set()
async def later(job):
    now(job)
works = [tq.Worker(queue, work, concurrency=2).run_forever for work in (later, now)]
for work in (put, *works):
    threading.Thread(target=work, daemon=True).start()
begun.wait(20)
while not len(puts): pass
"""

    def test_the_main_thread_may_leave_threads_behind(self):
        """The process ends at once, whatever they do: what was put is there, from an
        atexit handler, too, and each job of a worker is done or alive."""
        queue, ids = self.open(), [f"j{n}" for n in range(500)]
        queue.put_many(range(500), ids=ids)
        done = run_python(self.LEAVING, self.path, timeout=10)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        alive, ran = {job.id for job in queue.jobs()}, done.stdout.split()
        self.assertEqual(len(ran), len(set(ran)))
        self.assertEqual(set(ids) - alive - set(ran), set())
        self.assertLessEqual(len(alive & set(ran)), 4)
        put = [job.id for job in self.open(name="puts").jobs()]
        put.remove("exit")
        self.assertEqual(put, [f"n{n}" for n in range(len(put))])


@every_engine
class ReentranceTest(Case):
    def test_no_lock_is_held_across_user_code(self):
        """A backoff and a handler that put, and changes while iterating, all work."""
        queue = self.open(max_retries=1, backoff=lambda n: queue.put("more") and 0)
        other = self.open()
        queue.put(1, id="a")
        queue.task_done(queue.get(), False)
        self.assertEqual(len(other), 2)
        for n in range(3):
            queue.put(n, id=f"d{n}", priority=5)
            queue.bury(queue.get(), "x")
        for job in queue.dead_letter():
            queue.requeue_dead(job.id)
        self.assertEqual(queue.stats().dead, 0)
        for _ in queue.jobs():
            break

        def handler(job):
            if job.id == "a":
                queue.put("second")
                other.put("third")

        worker = tq.Worker(queue, handler, 0.01, stop_when_empty=True)
        self.assertEqual(worker.run_forever().done, 7)

    SIGNALLED = """
import os, signal, sys
import tiny_queue as tq
def interrupt(function):
    real = getattr(os, function)
    def interrupted(*args):
        setattr(os, function, real)
        signal.raise_signal(signal.SIGUSR1)
        return real(*args)
    setattr(os, function, interrupted)
def handler(number, frame):
    try:
        queue.put("nested")
        print("put")
    except tq.QueueError as exc:
        print(exc)
signal.signal(signal.SIGUSR1, handler)
for function in ("write", "fdatasync"):
    queue = tq.Queue(sys.argv[1], function, lock_timeout=2.0)
    queue.put("first")
    interrupt(function)
    queue.put("outer")
    print(*sorted(job.payload for job in queue.jobs()))
"""

    @of_files
    def test_a_signal_handler_s_put_gets_a_clear_error(self):
        """Inside a put of the same thread under the lock; while that waits for the
        disk, too, or it is made.  Neither hangs."""
        done = run_python(self.SIGNALLED, self.path, timeout=10)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        under, first, syncing, second = done.stdout.splitlines()
        self.assertIn("signal handler", under)
        self.assertEqual(first, "first outer")
        if syncing == "put":
            self.assertEqual(second, "first nested outer")
        else:
            self.assertIn("signal handler", syncing)
            self.assertEqual(second, "first outer")

    def test_two_objects_on_one_directory_in_one_thread(self):
        """A second object never waits for the first one's lock."""
        one, two = self.open(lock_timeout=0.5), self.open(lock_timeout=0.5)
        for n in range(5):
            one.put(n)
            two.task_done(two.get())
        self.assertEqual(len(one), 0)


class FoundByBreakingTest(Case):
    """Faults that an adversary found, each pinned by its smallest case."""

    def test_close_frees_the_lock_whoever_waits_for_it(self):
        """Threads that wait get QueueClosedError, others the lock at once."""
        for _ in range(5):
            queue, errors = tq.Queue(self.path, fsync=False), []

            def work(queue=queue, errors=errors):
                try:
                    while True:
                        queue.put(1)
                except tq.QueueError as exc:
                    errors.append(type(exc))

            self.run_threads(*[work] * 6, queue.close)
            self.assertEqual(errors, [tq.QueueClosedError] * 6)
            tq.Queue(self.path, lock_timeout=1.0).put(2)

    def test_every_accepted_instant_makes_a_sound_line(self):
        """The longest delay survives verify() and a torn write behind it."""
        queue = self.open()
        queue.put("far", id="far", delay=1e10)
        queue.put("retried", id="r")
        queue.task_done(queue.get(), False, "KeyError: {x}", delay=1e10)
        self.assertEqual(queue.verify(), [])
        self.write("pending", b'{"id":"to', "ab")
        for view in self.views(queue):
            self.assertEqual(sorted(job.id for job in view.jobs()), ["far", "r"])

    def test_enums_count_as_their_value(self):
        """An enum's own format never reaches a file or a file's name."""

        class Level(int, enum.Enum):
            HIGH = 5

        class Name(str, enum.Enum):
            MAIL = "mail"

        queue = tq.Queue(self.path, Name.MAIL, max_retries=Level.HIGH, fsync=False)
        queue.put(1, id=Name.MAIL, priority=Level.HIGH, max_retries=Level.HIGH)
        job = tq.Queue(self.path, "mail").get()
        self.assertEqual((job.id, job.priority, job.max_retries), ("mail", 5, 5))
        self.assertTrue(all(n.startswith("mail.") for n in os.listdir(self.path)))

    def test_a_number_beyond_a_float_is_damage(self):
        """1e999 in a payload by hand costs that line."""
        lines = b'{"id":"a","payload":1e999}\n{"id":"b","payload":2}\n'
        self.write("pending", lines)
        queue = self.open()
        self.assertEqual(queue.get().payload, 2)
        self.assertEqual(queue.stats().damaged, 1)

    def test_a_sealed_line_with_other_order_keeps_its_keys(self):
        """Payload, max_retries and unknown keys survive the next moves."""
        top = '{"id":"%s",%s"rev":1,"attempts":0,"priority":0,"run_at":0,%s}'
        tail = '"max_retries":9,"tag":1,"created_at":5,"payload":2'
        first = seal(top % ("a", '"payload":"p","created_at":5,', '"tag":1'))
        self.write("pending", first + seal(top % ("b", "", tail)))
        queue = self.open()
        for job in queue.get_many(2):
            queue.release(job)
        jobs = {job.id: job for job in self.open().jobs()}
        self.assertEqual([jobs["a"].payload, jobs["b"].payload], ["p", 2])
        self.assertEqual(jobs["b"].max_retries, 9)
        self.assertEqual(file_bytes(self.path, "pending").count(b'"tag":1'), 4)

    def test_threads_wait_for_a_busy_lock_side_by_side(self):
        """Eight durable puts time out together, not one after the other."""
        queue, holder = self.open(lock_timeout=0.2, fsync=True), self.open()
        queue.put(0)

        def put():
            self.assertRaises(tq.LockTimeoutError, queue.put, 1)

        holder._engine._lock.acquire(True, lambda: False)
        start = time.monotonic()
        self.run_threads(*[put] * 8)
        holder._engine._lock.release()
        self.assertLess(time.monotonic() - start, 1.2)
        self.assertEqual(len(queue), 1)

    def test_a_symlinked_directory_can_be_synced(self):
        """With fsync, too, and for a directory below it."""
        os.mkdir(os.path.join(self.dir, "real"))
        link = os.path.join(self.dir, "link")
        os.symlink("real", link)
        for path in (link, os.path.join(link, "below", "jobs")):
            tq.Queue(path).put(1)
            self.assertEqual(len(tq.Queue(os.path.realpath(path))), 1)


# Worker
# =============================================================================


def quick(attempt):
    return 0.0


class WorkerCase(Case):
    """A queue and a worker that ends when there is nothing left."""

    lease = 300.0

    def setUp(self):
        super().setUp()
        self.queue = self.open(backoff=quick, lease_timeout=self.lease)

    def work(self, handler, **options):
        options.setdefault("stop_when_empty", True)
        return tq.Worker(self.queue, handler, 0.05, **options).run_forever()

    def start(self, *workers):
        """Run workers in threads; return these and the list of their totals."""
        totals = []
        threads = [
            threading.Thread(target=lambda w=w: totals.append(w.run_forever()))
            for w in workers
        ]
        for thread in threads:
            thread.start()
            self.addCleanup(thread.join)
        for worker in workers:
            self.addCleanup(worker.stop)
        return threads, totals

    def replaced(self, name, call):
        """Let queue.name be call(the real one, *its arguments)."""
        real = getattr(self.queue, name)
        return mock.patch.object(self.queue, name, functools.partial(call, real))

    def failing(self, name, times, error=None):
        """Let queue.name raise so many times, and then work again."""
        left = [error or tq.QueueError("disk full")] * times

        def call(real, *args, **options):
            if left:
                raise left.pop()
            return real(*args, **options)

        return self.replaced(name, call)


def raiser(error):
    """A handler that raises."""

    def handler(job):
        raise error

    return handler


@every_engine
class WorkerOutcomeTest(WorkerCase):
    """What a handler does, and what becomes of its job."""

    MUTE = type("Mute", (Exception,), {"__str__": lambda error: 1 / 0})
    ODD = type("Odd", (BaseException,), {})
    HUGE = "x" * 50_000_000
    WRONG = tq.Snooze(1)
    WRONG.delay = "soon"

    # What a handler raises in turn, before it returns; with how many retries; the
    # attempt that was the last, and with which error the job is dead then.
    RAISED = [
        ([ValueError("no")], 0, 1, "ValueError: no"),
        ([ValueError("no")] * 4, 3, 4, "ValueError: no"),
        ([ValueError("no")] * 3, 3, 4, None),
        ([tq.Retry(), tq.Retry(0.01)], 3, 3, None),
        ([tq.Retry()], 0, 1, "asked for a retry"),
        ([tq.Snooze(0.01)] * 2, 3, 1, None),
        ([tq.Fail("no such user")], 3, 1, "no such user"),
        ([WRONG], 0, 1, "wrong outcome: delay: .*'soon'|wrong outcome: .*str.*"),
        ([MUTE()], 0, 1, "Mute: .*ZeroDivisionError.*"),
        ([ValueError(HUGE)], 0, 1, "ValueError: x{65524}"),
        ([ValueError("\udcff\n")], 0, 1, "ValueError: \udcff\n"),
        ([ODD()], 0, 1, "Odd: "),
    ]

    def test_what_a_handler_raises(self):
        """An exception of any kind, with any text, is retried, then dead with Type:
        message; Retry counts, Snooze does not, Fail is final.  No payload is logged."""
        attempts, raised = {}, [list(row[0]) for row in self.RAISED]

        def handler(job):
            _, n = job.payload
            attempts[n] = job.attempts
            if raised[n]:
                raise raised[n].pop(0)

        for n, (_, retries, *_) in enumerate(self.RAISED):
            self.queue.put(["secret", n], max_retries=retries)
        totals = tq.Totals(0, 0, 0, 0, 0)
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            while self.queue.stats().pending:
                totals = tq.Totals(*map(sum, zip(totals, self.work(handler))))
        self.assertEqual(totals, tq.Totals(3, 8, 9, 2, 0))
        said = "".join(logs.output)
        self.assertIn("ZeroDivisionError", said)
        self.assertNotIn("secret", said)
        self.assertLess(len(said), 200_000)
        self.assertEqual([*attempts.values()], [row[2] for row in self.RAISED])
        errors = {job.payload[1]: job.last_error for job in self.queue.dead_letter()}
        for n, (*_, want) in enumerate(self.RAISED):
            found = re.fullmatch(want, errors[n]) if want else n not in errors
            self.assertTrue(found, (n, str(errors.get(n))[:99]))

    def test_an_exit_gives_the_job_back_and_stops_the_worker(self):
        """Uncounted, from a plain handler as from a coroutine; sys.exit() says
        nothing by itself, so the log does.  The next worker does the job."""

        async def later(error, job):
            raise error

        told = ["job a ends its worker: SystemExit: no\\nconfig"]
        for error, text in (
            (SystemExit("no\nconfig"), told),
            (KeyboardInterrupt(), []),
        ):
            for handler in (raiser(error), functools.partial(later, error)):
                self.queue.put_many([1, 2], ids=["a", "b"])
                with mock.patch.object(tq._log(), "warning") as warning:
                    self.assertEqual(self.work(handler), tq.Totals(0, 0, 0, 1, 0))
                    said = [call.args[0] % call.args[1:] for call in warning.mock_calls]
                    self.assertTrue(tq.Worker(self.queue, handler).run_once())
                self.assertEqual(said, text)
                found = [(job.state, job.attempts) for job in self.queue.jobs()]
                self.assertEqual(found, [("pending", 0)] * 2)
                self.assertEqual(self.work(lambda job: None).done, 2)


class WorkerAsyncTest(WorkerCase):
    """Coroutines are run before anything is acknowledged."""

    def test_every_form_of_async_handler(self):
        """async def, a partial of one, an object, a coroutine returned; also where
        the worker's own thread is inside of a loop."""
        ran = []

        async def handler(job):
            await asyncio.sleep(0)
            ran.append((job.payload, asyncio.get_running_loop()))

        class Callable:
            async def __call__(self, job):
                await handler(job)

        forms = [handler, functools.partial(handler), Callable(), lambda j: handler(j)]

        async def main():
            for form in forms:
                self.queue.put_many([1, 2])
                ran.clear()
                self.assertEqual(self.work(form, concurrency=2).done, 2)
                self.assertEqual(len({loop for _, loop in ran}), 1)
                self.queue.put(3)
                self.assertTrue(tq.Worker(self.queue, form).run_once())
                self.assertEqual({loop.is_closed() for _, loop in ran}, {True})
                self.assertEqual(sorted(payload for payload, _ in ran), [1, 2, 3])

        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # never awaited
            asyncio.run(main())

    def test_what_fails_the_job(self):
        """An exception of a coroutine, like any other, and a yield, which makes
        a call of the handler run nothing: a failure that says so."""

        async def wrong(job):
            raise LookupError("gone")

        def plain(job):
            yield

        async def both(job):
            yield

        generators = plain, both, types.coroutine(plain), lambda job: (n for n in "x")
        for handler in (wrong, *generators):
            self.queue.put(1, max_retries=0)
            self.assertEqual(self.work(handler).dead, 1)
            (job,) = self.queue.dead_letter()
            want = "LookupError: gone" if handler is wrong else "returned a generator"
            self.assertIn(want, job.last_error)
            self.queue.purge("dead")

    def test_a_loop_that_hangs_is_left_behind(self):
        """A callback that blocks the loop does not keep run_forever."""
        go, loops = threading.Event(), []

        async def handler(job):
            loops.append(asyncio.get_running_loop())
            loops[0].call_soon(loops[0].call_soon, go.wait)  # once this is done

        self.addCleanup(go.set)
        self.queue.put(1)
        self.assertEqual(self.work(handler).done, 1)
        self.assertTrue(loops[0].is_running())
        go.set()
        eventually(lambda: not loops[0].is_running())
        loops[0].close()


@every_engine
class WorkerCallsTest(WorkerCase):
    """A thread settles its job and gets the next by one call of the engine,
    which threads share."""

    def calls(self):
        """Let the engine list its takes and changes: (jobs asked for, changes)."""
        engine, calls = self.queue._engine, []
        take, change = engine.take, engine.change

        def noted_take(n, seconds, held, above=tq._LOWEST, changes=()):
            calls.append((n, len(changes)))
            return take(n, seconds, held, above, changes)

        def noted_change(changes, connection=None):
            calls.append((0, len(changes)))
            return change(changes, connection)

        engine.take, engine.change = noted_take, noted_change
        self.addCleanup(vars(engine).pop, "take")
        self.addCleanup(vars(engine).pop, "change")
        return calls

    def test_one_call_for_each_job(self):
        """One thread's: the next job comes with the settlement of the last."""
        self.queue.put_many(range(4))
        calls = self.calls()
        self.assertEqual(self.work(lambda job: None, max_jobs=3).done, 3)
        self.assertEqual(calls, [(1, 0), (1, 1), (1, 1), (0, 1)])

    def test_threads_share_a_call(self):
        """Who comes while another is at the queue leaves its settlement to the
        next call; that takes for all who wait, and no job is taken for others."""
        self.queue.put_many(range(6))
        calls, all_run = self.calls(), threading.Barrier(3)
        worker = tq.Worker(self.queue, lambda job: all_run.wait(), concurrency=3)
        worker.max_jobs = 6

        def gathered(real, *args):
            """The first call of each round waits for the other two threads."""
            if len(calls) % 2 == 0:
                eventually(lambda: len(worker._together._waiting) == 2)
            return real(*args)

        with self.replaced("_next", gathered), mock.patch.object(tq, "_GATHER", 0):
            self.assertEqual(worker.run_forever().done, 6)
        self.assertEqual(calls, [(1, 0), (2, 0), (1, 1), (2, 2), (0, 1), (0, 2)])

    def test_those_who_shared_a_call_wait_for_each_other(self):
        """A moment, and only as many as the last call served."""
        combined, batches = tq._Combined(), []
        first = threading.Event()

        def make(calls):
            if not batches:
                first.set()
                eventually(lambda: len(combined._waiting) == 2)
            batches.append(len(calls))
            for call in calls:
                call.answer = True

        def late():
            first.wait(PATIENCE)
            for _ in range(3):
                combined(make, 1)

        with mock.patch.object(tq, "_GATHER", PATIENCE):
            self.run_threads(lambda: combined(make, 1), late, late)
        self.assertEqual(batches, [1, 2, 2, 2])

    def test_no_thread_waits_for_anothers_handler(self):
        """While one runs on, the others settle theirs and go on."""
        self.queue.put_many(range(20))
        rest = threading.Semaphore(0)

        def handler(job):
            if job.payload == 0:
                for _ in range(19):
                    self.assertTrue(rest.acquire(timeout=PATIENCE))
                eventually(lambda: self.queue.stats()[:3] == (0, 0, 1))
            else:
                rest.release()

        self.assertEqual(self.work(handler, concurrency=3).done, 20)

    def test_a_lost_lease_of_a_shared_call_is_one_job_s(self):
        """The late outcome, success or failure, changes nothing of the job that has
        its id now, and is told; the others are done."""
        self.queue.put_many([1, 2, 3], ids=["a", "b", "c"])
        all_run, other = threading.Barrier(3), self.open()

        def handler(job):
            if job.id != "c":
                other.cancel(job.id)
                other.put("new", id=job.id, delay=60)
            all_run.wait()
            if job.id == "b":
                raise ValueError

        with self.assertLogs("tiny_queue", "WARNING") as logs:
            totals = self.work(handler, concurrency=3)
        self.assertEqual(totals, tq.Totals(1, 0, 0, 0, 2))
        said = "".join(logs.output)
        self.assertEqual(said.count("job a: lease lost before it was done"), 1)
        self.assertEqual(said.count("job b: lease lost before it was retried"), 1)
        found = [(job.payload, job.last_error) for job in self.queue.jobs("pending")]
        self.assertEqual((found, len(self.queue)), ([("new", None)] * 2, 2))

    def test_a_failing_call_loses_nothing(self):
        """Neither the settlements that shared it nor jobs: each runs once."""
        self.queue.put_many(range(6))
        seen, failed, all_run = [], [], threading.Barrier(3)

        def handler(job):
            seen.append(job.payload)
            all_run.wait()

        def shared(real, *args):
            """A call for one thread waits for the others; a shared one fails."""
            if len(args[-1]) == 1 and not failed:
                eventually(lambda: len(worker._together._waiting) == 2)
            elif len(args[-1]) > 1 and not failed:
                failed.append(tq.QueueError("disk full"))
                raise failed[0]
            return real(*args)

        worker = tq.Worker(self.queue, handler, concurrency=3, max_jobs=6)
        with self.replaced("_next", shared):
            with mock.patch.object(worker, "_wait_out", return_value=0.1):
                self.assertEqual(worker.run_forever(), tq.Totals(6, 0, 0, 0, 0))
        self.assertEqual(sorted(seen), list(range(6)))

    @of_files
    def test_a_job_counts_as_done_once_that_is_durable(self):
        """A failed sync leaves it inflight, with the next job still pending; it
        is settled again, and no job is run twice."""
        self.queue = self.open(fsync=True)
        self.queue.put_many([1, 2], ids=["a", "b"])
        seen, states = [], []

        def fdatasync(fd):
            if len(seen) == 1 and not states:
                states.append(worker._totals["done"])
                raise OSError(errno.EIO, "Input/output error")
            os.fdatasync(fd)

        def wait_out(pause, exc):
            other = self.open()
            states.extend(other.find(id).state for id in "ab")
            return 0.1

        worker = tq.Worker(self.queue, lambda job: seen.append(job.id), max_jobs=2)
        with patched("os", fdatasync=fdatasync, fsync=fdatasync):
            with mock.patch.object(worker, "_wait_out", wait_out):
                self.assertEqual(worker.run_forever(), tq.Totals(2, 0, 0, 0, 0))
        self.assertEqual((seen, states), (["a", "b"], [0, "inflight", "pending"]))

    def test_a_settlement_and_the_job_of_a_dead_holder(self):
        """The call that settles the last job takes that one over, whether holders
        are looked at first, after a second, or since nothing else is due; an
        error in looking at them is none of the settlement."""
        first, last = [("b", 1), ("a", 2), ("c", 1)], [("b", 1), ("c", 1), ("a", 2)]
        for looked, order in ((-math.inf, first), (math.inf, last)):
            self.queue.put_many([1, 2, 3], ids=["a", "b", "c"])
            seen = []
            child = self.spawn(
                lambda link: [link.tell(self.open().get().id), link.hear()]
            )
            self.assertEqual(child.hear(), "a")

            def handler(job, seen=seen, child=child, looked=looked, order=order):
                seen.append((job.id, job.attempts))
                if job.id == "b":
                    child.kill()
                    self.queue._looked = looked
                elif job.id == order[-1][0]:
                    stack.enter_context(self.failing("_find_orphans", 1))

            with contextlib.ExitStack() as stack:
                self.assertEqual(self.work(handler), tq.Totals(3, 0, 0, 0, 0))
            self.assertEqual(seen, order)

    def test_a_take_over_that_fails_is_not_the_end(self):
        """Who stops when nothing is due does not take an error for that."""
        self.queue.put_many([1, 2], ids=["a", "b"])
        seen = []

        def handler(job):
            seen.append((job.id, job.attempts))
            if job.id == "a":
                with self.open() as other:
                    other.get()
                self.queue._looked = -math.inf
                stack.enter_context(self.failing("_take_over", 2))

        with contextlib.ExitStack() as stack:
            self.assertEqual(self.work(handler), tq.Totals(2, 0, 0, 0, 0))
        self.assertEqual(seen, [("a", 1), ("b", 2)])


@every_engine
class WorkerLimitsTest(WorkerCase):
    """When a worker stops, and what it leaves behind."""

    def test_max_jobs(self):
        """Never one too many, with threads either; each runs once."""
        self.queue.put_many(range(20))
        seen = []
        handler = lambda job: seen.append(job.payload)  # noqa: E731
        self.assertEqual(self.work(handler, max_jobs=7, concurrency=4).done, 7)
        self.assertEqual(self.queue.stats()[:3], (13, 0, 0))
        self.assertEqual(self.work(handler, max_jobs=0).done, 0)
        totals = self.work(handler, concurrency=3)
        self.assertEqual(totals, tq.Totals(13, 0, 0, 0, 0))
        self.assertEqual(sorted(seen), [*range(20)])

    def test_run_once(self):
        """One job in this thread; False when there is none."""
        self.queue.put_many([1, 2])
        names = []
        worker = tq.Worker(self.queue, lambda job: names.append(threading.get_ident()))
        results = [worker.run_once() for _ in range(3)]
        self.assertEqual(results, [True, True, False])
        self.assertEqual(set(names), {threading.get_ident()})

    def test_a_thread_without_a_job_stays_while_another_runs(self):
        """It may put some: here two that need both threads."""
        both = threading.Barrier(2)

        def handler(job):
            if job.payload == "first":
                eventually(lambda: any(map(waits, threading.enumerate())))
                self.queue.put_many([1, 2])
            else:
                both.wait(PATIENCE)

        self.queue.put("first")
        self.assertEqual(self.work(handler, concurrency=2).done, 3)

    def test_stopped_while_it_gets(self):
        """A job that comes after stop() is given back uncounted, and an error
        that comes then is not waited out."""
        self.queue.put(1, id="a")
        worker = tq.Worker(self.queue, lambda job: self.fail("it must not run"))

        def stopping(real, n, *args):
            if n:
                worker.stop()
            return real(n, *args)

        with self.replaced("_next", stopping):
            self.assertEqual(worker.run_forever(), tq.Totals(0, 0, 0, 1, 0))
            self.assertEqual(self.queue.find("a").attempts, 0)
            with mock.patch.object(worker, "_wait_out") as waited:
                with mock.patch.object(self.queue._engine, "take") as take:
                    take.side_effect = tq.QueueError("disk full")
                    self.assertEqual(worker.run_forever(), tq.Totals(0, 0, 0, 0, 0))
        self.assertEqual((take.call_count, waited.mock_calls), (1, []))

    @of_files
    def test_wrong_arguments(self):
        """Refused at construction, those of the outcomes too."""
        for bad in (None, "jobs", self.path):
            self.assertRaises(TypeError, tq.Worker, bad, print)
        self.assertRaises(TypeError, tq.Worker, self.queue, "no handler")
        for name, bad in (("concurrency", 0), ("max_jobs", -1), ("poll_interval", 0)):
            with self.assertRaises(ValueError):
                tq.Worker(self.queue, print, **{name: bad})
        for make in (tq.Retry, tq.Snooze):
            for bad in (-1, math.nan, math.inf):
                self.assertRaises(ValueError, make, bad)
            self.assertRaises(TypeError, make, "1")

    def test_a_queue_closed_under_it_ends_it(self):
        """The jobs are not counted, and are pending again; so ends who waits.  One
        that is closed already is refused, or a service would end at once, and well."""
        self.queue.put(1, id="a")
        with self.assertLogs("tiny_queue", "ERROR") as logs:
            totals = self.work(
                lambda job: self.queue.close(), stop_when_empty=False, concurrency=2
            )
        self.assertEqual(totals, tq.Totals(0, 0, 0, 0, 0))
        self.assertIn("job a not settled as done", logs.output[0])
        self.assertEqual(self.open().get().id, "a")
        self.assertRaises(tq.QueueClosedError, self.work, print)

    def test_it_reaps_while_it_runs(self):
        """A job whose holder dies meanwhile is given back, with no get to ask."""
        self.queue.put_many([1, 2], ids=["a", "b"])
        given_back, waited = threading.Event(), []

        def handler(job):
            if job.id == "a":
                child = self.spawn(lambda link: self.open().get().id)
                child.hear()
                child.kill()
                waited.append(given_back.wait(PATIENCE))

        def reap(real):
            count = real()
            if count:
                given_back.set()
            return count

        with self.replaced("reap_stale", reap), mock.patch.object(tq, "_TICK", 0.0):
            totals = self.work(handler)
        self.assertEqual((waited, totals.done), ([True], 2))


class WorkerIdleTest(WorkerCase):
    """A worker without work costs nothing and is there at once."""

    def queues(self):
        """Four that have nothing due, each for another reason."""
        names = ("empty", "damaged", "delayed", "leased")
        queues = [self.open(name=name) for name in names]
        self.held = [queue.get() for queue in queues if queue.put("first")]
        with open(file_of(self.path, "pending", "damaged"), "ab") as file:
            file.write(b"nonsense\n")
        queues[2].put("late", delay=3600)
        for queue, job in zip(queues[:3], self.held):
            queue.task_done(job)
        return queues

    def test_idle_workers_cost_little_and_notice_a_put(self):
        """No file changes, a twentieth of a core is plenty, a put of another
        process begins at once, and so does stop()."""
        queues, seen, seconds = self.queues(), [], 5.0 if DEEP else 0.5
        handler = lambda job: seen.append(job.payload)  # noqa: E731
        polls = zip(queues, (0.1, 60.0) * 2)
        workers = [tq.Worker(queue, handler, poll) for queue, poll in polls]
        cpu, began = time.process_time(), time.time_ns()
        threads, _ = self.start(*workers)
        time.sleep(seconds)  # which are measured
        self.assertLess(time.process_time() - cpu, 4 * seconds / 20)
        files = [self.path, *os.scandir(self.path)]
        changed = [file for file in files if os.stat(file).st_ctime_ns > began]
        self.assertEqual((seen, changed), ([], []))
        start = time.monotonic()
        self.spawn(lambda link: [queue.put(queue.name) and 0 for queue in queues])
        eventually(lambda: len(seen) == 4)
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()
        self.assertLess(time.monotonic() - start, 2.0)
        self.assertEqual(sorted(seen), ["damaged", "delayed", "empty", "leased"])


@every_engine
class WorkerLeaseTest(WorkerCase):
    """Leases are renewed while a handler runs, and no longer."""

    lease = 0.5

    def test_a_long_job_runs_once(self):
        """More than two lease times of sleep, and of pure Python, while another
        reaps and gets as fast as it can."""
        starts, other = [], self.open(lease_timeout=0.5)

        def handler(job):
            starts.append(job.payload)
            end = time.monotonic() + 1.1
            while time.monotonic() < end:
                time.sleep(1.1 if job.payload == "sleep" else 0)

        self.queue.put_many(["sleep", "loop"])
        worker = tq.Worker(self.queue, handler, concurrency=2, max_jobs=2)
        (thread,), totals = self.start(worker)
        eventually(lambda: len(starts) == 2)
        while thread.is_alive():
            self.assertEqual((other.reap_stale(0.5), other.get()), (0, None))
            thread.join(0.05)
        self.assertEqual(sorted(starts), ["loop", "sleep"])
        self.assertEqual(totals, [tq.Totals(2, 0, 0, 0, 0)])

    def test_only_running_jobs_are_renewed(self):
        """Renewing ends with the handler, failed or not, and its thread with
        the worker."""
        before, renewed = threading.active_count(), []
        self.queue = self.open(lease_timeout=0.15)

        def extend(real, job, seconds):
            renewed.append(job.id)
            return real(job, seconds)

        def handler(job):
            eventually(lambda: renewed.count(job.id) == 2)
            if job.id == "a":
                raise tq.Fail("x")

        def renewals():
            self.queue.purge("dead")
            self.queue.put_many([1, 2], ids=["a", "b"])
            renewed.clear()
            self.work(handler)
            return "".join(renewed)

        with self.replaced("extend", extend):
            # One that was under way when the handler ended may come after it.
            eventually(lambda: renewals() == "aabb")
        eventually(lambda: threading.active_count() <= before)  # others' may end, too

    @of_files
    def test_a_lease_is_renewed_after_a_third_of_it(self):
        """A worker that then stands still for another third has lost nothing."""
        queue, late = tq.Queue(self.path, fsync=False, lease_timeout=0.9), []
        self.addCleanup(queue.close)

        def handler(job):
            end = job.lease_until
            late.append(eventually(lambda: queue.find(job.id).lease_until - end))

        def in_time():
            queue.put(1)
            tq.Worker(queue, handler, max_jobs=1).run_forever()
            return late[-1] < 0.5

        self.assertTrue(any(in_time() for _ in range(3)), late)  # the host stalls

    def test_an_idle_worker_takes_over_what_others_lost(self):
        """Without any reaping by hand: the job of a killed process, and where
        nothing proves that it is dead, the one whose lease ran out."""
        seen = []

        def hold(link, proven):
            if not proven:
                tq._FileLock.new_holder = lambda lock: None
            link.tell(self.open(lease_timeout=0.5).get().id)
            link.hear()

        self.queue.put_many([1, 2], ids=["a", "b"])
        children = []
        for proven, id in ((True, "a"), (False, "b")):
            children.append(Child(hold, proven))
            self.assertEqual(children[-1].hear(), id)
        handler = lambda job: seen.append((job.id, job.attempts))  # noqa: E731
        (thread,), _ = self.start(tq.Worker(self.queue, handler, 60, max_jobs=2))
        for child in children:
            child.end()
        killed = time.monotonic()
        thread.join(PATIENCE)
        self.assertLess(time.monotonic() - killed, 2.0)
        self.assertEqual(sorted(seen), [("a", 2), ("b", 2)])

    @of_files
    def test_errors_of_the_queue_are_survived(self):
        """One in reaping, in a call that gets, in one that settles a done job or a
        failed one, and in a wait: each is logged, and all but the first tried again."""
        self.queue.put("done")
        self.queue.put("failed", max_retries=0)

        def handler(job):
            stack.enter_context(self.failing("_next", 2))
            if job.payload == "failed":
                raise tq.Fail("no")

        with contextlib.ExitStack() as stack:
            for name in ("reap_stale", "_next", "_wait"):
                stack.enter_context(self.failing(name, 1))
            logs = stack.enter_context(self.assertLogs("tiny_queue", "ERROR"))
            worker = tq.Worker(self.queue, handler)
            (thread,), totals = self.start(worker)
            eventually(lambda: len(logs.records) == 7)
            worker.stop()
            thread.join()
        self.assertEqual(totals, [tq.Totals(1, 0, 1, 0, 0)])
        said = [record.args[0] for record in logs.records]
        self.assertEqual(said[1:], [0.1, 0.1, 0.2, 0.1, 0.2, 0.1])
        self.assertIn("cannot reap: disk full", logs.output[0])

    @of_files
    def test_a_failed_renewal_is_tried_again_but_not_a_lost_lease(self):
        """An error is logged; after a LeaseLostError, extend is not called for that
        job any more."""
        self.queue.put_many([1, 2], ids=["a", "b"])
        extended = []

        def extend(real, job, seconds):
            extended.append(job.id)
            return real(job, seconds)

        def handler(job):
            if job.id == "a":
                self.open().cancel("a")
            eventually(lambda: extended.count("b") >= 2)

        with self.replaced("extend", extend), self.failing("extend", 1):
            with self.assertLogs("tiny_queue", "ERROR") as logs:
                totals = self.work(handler, concurrency=2)
        self.assertEqual(totals, tq.Totals(1, 0, 0, 0, 1))
        self.assertEqual(extended.count("a"), 1)
        self.assertIn("cannot renew the lease", logs.output[0])

    def test_a_stopping_worker_gives_up_on_a_sick_queue(self):
        """But not early: a job that cannot be settled by the third try is left
        to the worker's death."""
        tries, wait_out = [], lambda worker, pause, exc: pause + 0.6

        def failing(real, *args):
            if worker._stopping:
                tries.append(args)
                raise tq.QueueError("disk full")
            return real(*args)

        def handler(job):
            worker.stop()
            raiser(tq.Retry())(job) if job.payload else None

        worker = tq.Worker(self.queue, handler)
        self.queue.put_many([0, 1])
        with mock.patch.object(tq.Worker, "_wait_out", wait_out):
            with self.replaced("_next", failing):
                totals = [worker.run_forever() for _ in "ab"]
        self.assertEqual(totals, [tq.Totals(0, 0, 0, 0, 0)] * 2)
        self.assertEqual((len(tries), self.queue.stats().inflight), (6, 2))


@every_engine(only=["test_a_second_signal_gives_the_job_back"])
class WorkerSignalTest(WorkerCase):
    """SIGTERM and SIGINT, as a service manager sends them."""

    def test_a_storm_of_signals_while_the_handler_prints(self):
        """Fifty at any lines of it: no re-entered stream, the job is done, no other
        begun, the signal's handler as before."""
        self.queue.put_many(range(6))
        code = """
            import logging, os, signal, sys, time
            import tiny_queue as tq
            logging.basicConfig(stream=sys.stdout)
            def handler(job):
                for n in range(50):
                    os.kill(os.getpid(), signal.SIGINT)
                    print("working", flush=True)
                    logging.warning("working")
                while not worker._stopping:  # the main thread may be late
                    time.sleep(0.001)
            before = signal.getsignal(signal.SIGINT)
            worker = tq.Worker(tq.Queue(sys.argv[1]), handler, poll_interval=60)
            print(*worker.run_forever())
            assert signal.getsignal(signal.SIGINT) == before
        """
        ran = run_python(textwrap.dedent(code), self.path)
        out = ran.stdout.splitlines()
        self.assertEqual((ran.returncode, len(out), out[-1]), (0, 101, "1 0 0 0 0"))
        self.assertEqual(self.queue.stats()[:3], (5, 0, 0))

    def test_a_second_signal_gives_the_job_back(self):
        """At once, and uncounted."""

        def work(link):
            def handler(job):
                link.tell("begun")
                time.sleep(PATIENCE)

            queue = self.open()
            queue.put(1, id="a")
            return tq.Worker(queue, handler, poll_interval=60).run_forever()

        child = self.spawn(work)
        self.assertEqual(child.hear(), "begun")
        child.kill(signal.SIGTERM)
        child.kill(signal.SIGINT)
        self.assertEqual(child.hear(), [0, 0, 0, 1, 0])
        job = self.queue.find("a")
        self.assertEqual((job.state, job.attempts), ("pending", 0))

    def test_signals_that_it_leaves_alone(self):
        """In a thread, and where it is asked to, it installs nothing."""
        before, during = signal.getsignal(signal.SIGTERM), []

        def handler(job):
            during.append(signal.getsignal(signal.SIGTERM))

        self.queue.put_many([1, 2])
        self.work(handler, max_jobs=1, handle_signals=False)
        self.run_threads(lambda: self.work(handler))
        self.assertEqual(during, [before] * 2)

    def test_stop_may_be_called_by_a_signal_handler(self):
        """By the application's own: the running job is the last one, and no thread
        stays."""
        self.queue.put_many([1, 2])
        before, stopped = {*threading.enumerate()}, threading.Event()

        def stop(*_):
            worker.stop()
            stopped.set()

        def handler(job):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            self.assertTrue(stopped.wait(PATIENCE))

        worker = tq.Worker(self.queue, handler, max_jobs=2, handle_signals=False)
        self.addCleanup(signal.signal, signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, stop)
        self.assertEqual(worker.run_forever(), tq.Totals(1, 0, 0, 0, 0))
        self.assertEqual(self.queue.stats()[:3], (1, 0, 0))
        self.assertLessEqual({*threading.enumerate()}, before)

    def test_a_signal_some_time_after_stop_is_the_second(self):
        """It gives the running job back, as it does some time after another."""

        def send():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            eventually(lambda: worker._stopping)

        def handler(job):
            firsts.pop()()
            clock.jump(mono=60.0)
            send()
            eventually(lambda: self.queue.find("a").state == "pending", timeout=5.0)

        clock, firsts = Clock(), [send, lambda: worker.stop()]
        while firsts:
            self.queue.put(1, id="a", exist_ok=True)
            worker = tq.Worker(self.queue, handler, max_jobs=1)
            with clock.patch():
                self.assertEqual(worker.run_forever(), tq.Totals(0, 0, 0, 1, 0))

    def test_a_burst_is_one_signal(self):
        """The second of two within the burst's time does not give the job back."""
        self.queue.put(1)
        clock, looks = [], []  # of the signal handler; of the main thread, later

        def handler(job):
            for count in (1, 2):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                eventually(lambda count=count: len(clock) >= count)
            eventually(lambda: len(looks) > 1)

        def monotonic():
            caller = sys._getframe(1).f_code.co_name
            if caller == "count":
                clock.append(1)
            elif caller == "_watch" and len(clock) == 2:
                looks.append(1)
            return time.monotonic()

        with patched("time", monotonic=monotonic), mock.patch.object(tq, "_BURST", 60):
            totals = self.work(handler, stop_when_empty=False)
        self.assertEqual((totals, len(clock)), (tq.Totals(1, 0, 0, 0, 0), 2))

    def test_a_second_signal_ends_the_waiting_for_a_sick_queue(self):
        """A pause between two tries does not keep a worker that must go."""
        worker = tq.Worker(self.queue, print)
        worker._signals = 2
        with patched("time", sleep=lambda seconds: self.fail("it sleeps")):
            self.assertEqual(worker._wait_out(4.0, tq.QueueError("disk full")), 8.0)


# Engine contract
# =============================================================================


class ContractTest(Case):
    def test_every_engine_has_every_verb(self):
        """An engine implements the whole contract, with the same arguments."""
        engines = {tq._FileEngine, *tq._ENGINE_OF.values()}
        self.assertLessEqual({place.engine for place in PLACES}, engines)
        for engine in engines:
            for name, verb in vars(tq._Engine).items():
                if callable(verb) and not name.startswith("_"):
                    mine = getattr(engine, name)
                    self.assertIsNot(mine, verb, (engine, name))
                    want = list(inspect.signature(verb).parameters)
                    found = list(inspect.signature(mine).parameters)
                    self.assertEqual(found[: len(want)], want, (engine, name))

    def test_queue_calls_nothing_but_verbs(self):
        """Queue knows its engine by the contract only."""
        used = set()
        for node in ast.walk(class_node("Queue")):
            owner = getattr(node, "value", None)
            name = getattr(owner, "attr", getattr(owner, "id", None))
            if isinstance(node, ast.Attribute) and name in ("_engine", "engine"):
                used.add(node.attr)
        self.assertLessEqual(used, set(dir(tq._Engine)) | {"path", "source"})
        self.assertIn("take", used)


def class_node(name):
    """The syntax tree of one class of the module."""
    for node in ast.parse(pathlib.Path(tq.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"no class {name}")


# File engine
# =============================================================================

# Lines
# -----------------------------------------------------------------------------


def ours(**changes):
    """A line with all keys in our order, as the module writes it."""
    fields = {"id": "a", "rev": 1, "attempts": 0, "priority": 0, "run_at": 0}
    fields = {**fields, "created_at": 1.5, "payload": 1, **changes}
    return seal(json.dumps(fields, separators=(",", ":")))


class FormatTest(Case):
    # Files of format 1 as the first release wrote them: zlib, base64
    FIRST = """
        eNrFl9FuozAQRX+l4nW7lT32YDvfghQZ2zRoKUSEtFtV/fc1SaDE6UIo6e5TAkwyh8vMneEt2rrS
        5uVjtLqL3pIot0m0SqJtofMyie6TqHbP/gz133TTuKdts/OHxB9u67yq8+b1dFjvy7VuTgemdrpx
        9niCChUTFStgDyilYu1/bfVrUekwl6nN4QyVRtvM+cvvSfkB9US/g0gBAThDogOUH45AZnWmQhb4
        OkuRl66Ng5lcPnvzUh3SJ8keiPaI7wNWx8CgSUWAuskfN1fD4gzhmKLCRzzp3+vaNXV+uCkRPN0+
        e0dpDGGcChJQFj7L1yQFMoTikuE49iliCNkn7yAxA0sldwGkrcrrIdUMKRFl2BZ9ro5JEw4xIg+Y
        jtLbb8BShEBINczWgZGYAzcMJsHYORgdAWs5KCF45AB5qLRC75q1q+uqPiR42bzeJUkSlVXTfiRJ
        5yIL70f5LpJap8H9pNr8ur3KMaEgKA+w+lwdU8o5EsPkOBP7p0yMGydA0bBJnLbfopNACHukS9XL
        RLM0jSFEKpzezWgRSq6n8u5zaScf6TqwOJVEWQib19R6t5lDRmeQcRqa8TBd78faMu8/Rz+O7u+i
        vMwKb9rN+UYQWB9c38otZVP9cuXRWbVKOSGSA2OZIfzncahvqsK6tq0xRsEQfAVyP2FYW9GmqNrK
        W6GX8IEzxQCQtABHnT/z05h1l9f7ssmLPkDAIGChITuG0sSox4dEm+h4atXUezfsH8etU8ZO+ubt
        xIbZYgvpFcMRsb2rSiVH5e5Dlo8aosCobMIGb6cXm6kXUiLZR/F9amN+bRpTq49Y6s5aCWsAx6Xi
        N5OKz5YKiRQCRrWSNIYJsU4hC9UyVMbAaDY1OMZL63JwjAiGswXzv1VEjgkGXlQ+LlgXsnikUSmt
        dBynJGP/UzIlY7+dXiNZ7Ur38nkEqMsiBHoZsVhSYYn22y5MbgkTZUj/rikVmqRKcIox9+9vLpy/
        wGNUhxcNBH4hqMC2BIUaERT8M4lHS7CLWLy6EPTTiYPtV5d2HzxfWwK7w3l2N21M528kpXtuRVxu
        RwTRoVWnpez9D4QMOMY=
    """

    def test_files_of_the_first_release_open(self):
        """Plain, delayed, retried, released, dead, leased, renewed, done and those
        of a put_many: each is what it was, and nothing is damaged."""
        self.manual_clock(at=1796096930.0)  # some seconds later
        raw = zlib.decompress(base64.b64decode(self.FIRST))
        for state, text in json.loads(raw).items():
            self.write(state, text.encode())
        queue = self.open()
        self.assertEqual(queue.stats()[:5], (7, 2, 2, 1, 0))
        self.assertEqual(queue.reap_stale(), 2)  # their holders are not of this host
        died = "holder died (delivery 1 of 4)"
        found = [(j.id, j.payload, j.attempts, j.last_error) for j in queue.jobs()]
        self.assertEqual(
            found,
            [("plain", "plain", 0, None)]
            + [("m1", 1, 0, None), ("m2", {"two": "\u20ac"}, 0, None)]
            + [("high", "high", 0, None), ("late", "late", 0, None)]
            + [("retried", "retried", 1, 'why "not"\n'), ("dead", "dead", 0, None)]
            + [("leased", "leased", 1, died), ("crashed", "crashed", 1, died)]
            + [("back", "back", 1, "never")],
        )
        order = ["crashed", "leased", "dead", "high", "plain", "m1", "m2"]
        self.assertEqual([job.id for job in queue.get_many(20)], order)
        self.assertEqual((queue.verify(), queue.find("high").max_retries), ([], 7))

    def cycle(self, queue):
        """One job through every kind of line; yields after each change."""
        yield "pending", queue.put({"a": "é"}, id="x")
        yield "inflight", (job := queue.get())
        yield "inflight", queue.extend(job)
        yield "pending", queue.task_done(job, False, "e")
        yield "inflight", (job := queue.get())
        yield "pending", queue.release(job)
        yield "inflight", (job := queue.get())
        yield "dead", queue.bury(job, "f")
        yield "pending", queue.requeue_dead("x")
        yield "inflight", (job := queue.get())
        yield "inflight", queue.task_done(job)
        yield "pending", queue.put(2, id="x")
        yield "inflight", queue.cancel("x")

    def test_each_change_is_one_write_of_one_line_with_the_next_rev(self):
        """To one file: strict JSON with its checksum, which a reader who knows
        only the README can read, its keys in one order."""
        queue, writes = self.open(backoff=lambda n: 0), []
        collections.deque(self.cycle(queue), maxlen=0)  # the ballast is laid
        sizes = {state: len(file_bytes(self.path, state)) for state in STATES}
        rev = read_line(file_lines(self.path, "inflight")[-1])["rev"]

        def write(fd, data):
            writes.append(bytes(data))
            return os.write(fd, data)

        with patched("os", write=write):
            for n, (state, _) in enumerate(self.cycle(queue), 1):
                self.assertEqual(len(writes), n, writes[-1])
                for other in STATES:
                    data = file_bytes(self.path, other)
                    added, sizes[other] = data[sizes[other] :], len(data)
                    self.assertEqual(added, writes[-1] if other == state else b"")
                self.check_line(state, writes[-1], rev + n)

    def check_line(self, state, line, rev):
        self.assertRegex(line, rb'\A[\x20-\x7e]+,"crc":"[0-9a-f]{8}"\}\n\Z')
        fields = read_line(line)
        self.assertEqual(fields["rev"], rev)
        keys = list(fields)
        if "done" in keys:
            self.assertEqual(keys, ["id", "rev", "done", "crc"])
        else:
            self.assertEqual(keys[:5], "id rev attempts priority run_at".split())
            self.assertEqual(keys[-2:], ["payload", "crc"])
            self.assertEqual("token" in keys, state == "inflight")

    def test_batch_marks(self):
        """All lines of a put_many but the last have a plus; the last counts
        them; compaction and moves drop both."""
        queue = self.open()
        queue.put_many(["a", "b", "c"])
        *first, last = file_lines(self.path, "pending")
        for line in first:
            self.assertRegex(line, rb'"crc":"\+[0-9a-f]{8}"\}\n')
            self.assertNotIn("lines", json.loads(line))
        self.assertNotIn(b"+", last[-20:])
        self.assertEqual(json.loads(last)["lines"], 3)
        queue.get_many(3)
        queue.put("d")
        queue.compact()
        for state in STATES:
            self.assertNotRegex(file_bytes(self.path, state), rb'"lines"|"\+')
        self.assertEqual(len(census(self.path)), 4)

    def test_the_payload_s_bytes_are_never_encoded_again(self):
        """A payload as another program wrote it moves as it stands."""
        payload = '{ "b" : 1.00 , "a" : "\\u0041/\\/" }'
        line = (
            ours(created_at=5).decode().replace('"payload":1', '"payload":' + payload)
        )
        self.write("pending", seal(line[: line.rindex(',"crc"')] + "}"))
        queue = self.open()
        queue.bury(queue.get(), "x")
        queue.requeue_dead()
        queue.compact()
        self.assertIn(payload.encode(), file_bytes(self.path, "pending"))
        self.assertEqual(self.open().get().payload, {"b": 1.0, "a": "A//"})

    def test_format_is_a_number(self):
        """FORMAT says which bytes on disk this version writes."""
        self.assertIsInstance(tq.FORMAT, int)


class HandWrittenTest(Case):
    def test_what_a_line_by_hand_says(self):
        """id and payload are enough, and null is what is missing; the rest has
        defaults.  Under a checksum raw UTF-8 is another program's way."""
        raw = json.dumps({"id": "ä", "rev": 1, "payload": "漢"}, ensure_ascii=False)
        late = '{"id":"a","rev":1,"attempts":0,"priority":0,"run_at":0,'
        late += '"created_at":1.5,"payload":1,"more":[2]}'
        for line, id, payload in (
            (b'{"id":"a","payload":["\xc3\xa9\xe2\x80\xa8"]}\n', "a", ["é\u2028"]),
            (b'{"id":"a","priority":null,"payload":1}\n', "a", 1),
            (b'\xef\xbb\xbf {"id":"a","payload":null}\r\n', "a", None),
            (seal(raw), "ä", "漢"),
            (seal(late), "a", 1),
        ):  # fmt: skip
            shutil.rmtree(self.path, True)
            self.write("pending", line)
            queue = self.open(max_retries=5)
            self.assertEqual(queue.verify(), [])
            for view in self.views(queue, max_retries=5):
                job = view.find(id)
                found = job.payload, job.state, job.attempts, job.priority, job.run_at
                self.assertEqual(found, (payload, "pending", 0, 0, 0))
                self.assertEqual(job.max_retries, 5)
            queue.task_done(queue.get())
            self.assertIsNone(self.open().get())

    def test_a_token_settles_nothing_that_is_not_inflight(self):
        """A line moved back to pending by hand may still have one."""
        self.write("pending", b'{"id":"a","token":"t","payload":1}\n')
        queue = self.open()
        for settle in (queue.task_done, queue.release, queue.extend):
            self.assertRaises(tq.LeaseLostError, settle, tq.Job("a", 1, token="t"))
        self.assertDrains(queue, [1])

    def test_an_edited_line_without_crc_is_believed(self):
        """Put, edit id and payload by hand, drop crc: that is a job."""
        queue = self.open()
        queue.put(1, id="a", priority=3, max_retries=1)
        fields = read_line(file_bytes(self.path, "pending"))
        fields.update(id="b", payload=2)
        del fields["crc"]
        self.write("pending", json.dumps(fields).encode() + b"\n", "ab")
        jobs = queue.get_many(5)
        self.assertEqual([(job.id, job.payload) for job in jobs], [("a", 1), ("b", 2)])
        self.assertEqual((jobs[1].priority, jobs[1].max_retries), (3, 1))

    def moves(self, queue):
        """Move the only job through every file; yield its record each time."""
        job = queue.get()
        for move in (
            lambda: None,
            lambda: queue.extend(job),
            lambda: queue.task_done(job, False, "e"),
            lambda: queue.bury(queue.get(), "f"),
            lambda: queue.requeue_dead() and queue.compact(),
        ):
            move()
            yield census(self.path)[job.id]

    def test_other_programs_keys_survive_every_move(self):
        """Hand-written or sealed, in whatever order they stand."""
        fields = {
            "id": "a", "rev": 1, "attempts": 0, "priority": 0, "run_at": 0,
            "created_at": 5.0, "payload": {"p": 1},
        }  # fmt: skip
        for order, tag, close in itertools.product(
            (
                "id rev attempts priority run_at created_at tag payload",
                "tag id rev attempts priority run_at created_at payload",
                "id rev attempts priority run_at tag created_at payload",
                "id rev attempts priority run_at payload created_at tag",
                "id rev attempts priority run_at created_at payload tag",
                "payload created_at id tag rev attempts priority run_at",
            ),
            ({"deep": [1, None, "é"]}, "text", 7),
            (seal, lambda line: json.dumps(line).encode() + b"\n"),
        ):
            with self.subTest(order, tag=tag):
                line = {key: {**fields, "tag": tag}[key] for key in order.split()}
                self.write("pending", close(line))
                for state, record in self.moves(self.open(backoff=lambda n: 0)):
                    for key in ("payload", "tag", "created_at"):
                        self.assertEqual(record.get(key), line[key], f"{key}, {state}")
                shutil.rmtree(self.path)

    def test_an_appended_line_is_seen_by_a_living_object(self):
        """Other programs append under the lock, and get delivers."""
        queue = self.open()
        queue.put("a")
        self.assertEqual(queue.get().payload, "a")
        with open(os.path.join(self.path, "default.lock"), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write("pending", b'{"id":"z","payload":"b"}\n', "ab")
        self.assertDrains(queue, ["b"])

    def test_a_lease_by_hand_raises_documented_errors_only(self):
        """An inflight line with nothing but a token can be seen, extended,
        settled and reaped."""
        self.write("inflight", b'{"id":"a","rev":2,"token":"t","payload":1}\n')
        queue = self.open()
        job = queue.find("a")
        self.assertEqual((job.state, job.token), ("inflight", "t"))
        try:
            queue.extend(job)
            queue.task_done(job)
        except tq.QueueError:
            self.assertEqual(queue.reap_stale(0), 1)
            queue.task_done(queue.get())
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_an_old_copy_of_a_line_is_no_second_job(self):
        """A pending line that comes back after the lease delivers nothing, in
        whichever two files the copies stand."""
        queue = self.open(max_retries=0)
        queue.put(1, id="a")
        pending = file_bytes(self.path, "pending")
        job = queue.get()
        leased = file_bytes(self.path, "inflight")
        self.write("pending", pending, "ab")
        for view in self.views(queue):
            self.assertIsNone(view.get())
            self.assertEqual(view.stats()[:4], (0, 0, 1, 0))
        queue.task_done(job, False, "x")
        self.write("pending", pending, "ab")
        self.write("inflight", leased, "ab")
        for view in self.views(queue):
            self.assertEqual(view.stats()[:4], (0, 0, 0, 1))
        queue.requeue_dead("a")
        self.write("pending", pending, "ab")
        self.assertDrains(queue, [1])
        self.assertEqual(census(self.path), {})
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_equal_revs_have_a_precedence(self):
        """done > dead > inflight > pending, then the earlier line."""
        self.write("pending", b'{"id":"a","rev":2,"payload":"p"}\n' * 2)
        self.write("pending", b'{"id":"a","rev":2,"payload":"later"}\n', "ab")
        queue = self.open()
        self.assertEqual(queue.find("a").payload, "p")
        for state, line in (
            ("inflight", b'{"id":"a","rev":2,"token":"t","payload":"i"}\n'),
            ("dead", b'{"id":"a","rev":2,"payload":"d"}\n'),
        ):
            self.write(state, line)
            self.assertEqual(self.open().find("a").state, state)
        self.write("inflight", b'{"id":"a","rev":2,"done":true}\n', "ab")
        for view in self.views(queue):
            self.assertRaises(tq.JobNotFoundError, view.find, "a")

    def test_a_caller_s_full_stack_is_not_damage(self):
        """RecursionError over a sound line is the caller's, and costs nothing."""
        queue = self.open()
        queue.put(1, id="a")
        with mock.patch.object(tq, "_scan", side_effect=RecursionError):
            self.assertRaises(RecursionError, self.open().find, "a")
        for view in self.views(queue):
            self.assertEqual((view.find("a").payload, view.stats().damaged), (1, 0))


class DamageTest(Case):
    def kept(self):
        """The lines of NAME.damaged."""
        file = pathlib.Path(self.path, "default.damaged")
        return file.read_bytes().splitlines(True) if file.exists() else []

    def check(self, lines, payloads, kept):
        """A queue of these lines drains to the payloads; damage is met once, and
        kept byte for byte (or so many lines)."""
        shutil.rmtree(self.path, True)
        self.open().get()  # there is a lock file to look under
        self.write("pending", b"".join(lines))
        count = kept if isinstance(kept, int) else len(kept)
        queue = self.open(max_retries=0)
        for view in self.views(queue):
            self.assertEqual(view.stats().damaged, count)
        self.assertDrains(queue, payloads)
        for _ in range(20):
            self.assertIsNone(queue.get())
        self.assertEqual(self.open().stats()[:5], (0, 0, 0, 0, count))
        self.assertEqual(self.kept() if count != kept else count, kept)
        want = [("default.damaged", n) for n in range(1, count + 1)]
        self.assertEqual([d[:2] for d in self.open().verify()], want)
        for state in STATES if count else ():
            self.assertNotIn(None, map(read_line, file_lines(self.path, state)))

    def lines_put(self):
        """Three lines put one by one, then three of one put_many."""
        with tq.Queue(self.path, fsync=False) as queue:
            for payload in "abc":
                queue.put(payload)
            queue.put_many(["xxx", "yyy", "zzz"])
            return file_lines(self.path, "pending")

    def test_damage_costs_the_line_that_it_hits(self):
        """Neighbours are delivered, whatever stands between them."""
        a, b, c, x, y, z = self.lines_put()
        bad = [b"{not json\n", b"null\n", b"42\n", b"[]\n", b'{"id":7}\n']
        hand = [b'{"id":"%d","payload":%d}' % (n, n) for n in range(3)]
        bent, bent_y = b.replace(b'"b"', b'"X"'), y.replace(b"yyy", b"yXy")
        glued = b'{"id":"b","pa{"id":"c","payload":"C"}\n'
        nuls = b"\0" * (len(b) - 1) + b"\n"
        for what, lines, payloads, kept in (
            ("foreign JSON", [a, *bad[:2], b"\n", *bad[2:], c], "ac", bad),
            ("BOM, blanks, CRLF",
             [tq._BOM, hand[0], b"\r\n\n  \n", hand[1], b"  \n \n"], [0, 1], []),
            ("a tail of NULs", [a, b, c, b"\0" * 4096], "abc", 1),
            ("a file of NULs", [b"\0" * 4096], "", 1),
            ("NULs for a line", [a, nuls, c], "ac", [nuls]),
            ("one changed byte", [a, bent, c], "ac", [bent]),
            ("one in a put_many", [x, bent_y, z], ["xxx", "zzz"], [bent_y]),
            ("two records on one line", [a, glued], "a", [glued]),
            ("marks in mid-file", [x, c], ["xxx", "c"], []),
        ):  # fmt: skip
            with self.subTest(what):
                self.check(lines, payloads, kept)

    def test_values_that_cannot_be(self):
        """By hand each costs its line, and no get an exception; a rev by hand
        leaves room for others: 2**27 is its limit, 2**28 that of a sealed one."""
        top, hand = 2**27, b'{"id":"a","payload":1,"%s":%s}\n'
        for line in (
            *(hand % (b"priority", value) for value in (
                b"1.5", b"true", b"[]", b'"high"', b"1e2", b"%d" % 2**70,
                b"%d" % (-(2**31) - 1),
            )),
            *(hand % (b"rev", value) for value in (b"0", b"%d" % (top + 1), b"1" * 40)),
            hand % (b"last_error", b"5"),
            hand % (b"created_at", b"1e999"),
            b'{"crc":"00000000","id":"a","payload":1}\n',
            ours(rev=2 * top + 1),
            seal({"id": "a", "rev": 2 * top + 1, "payload": 1}),
        ):  # fmt: skip
            with self.subTest(line):
                self.check([line, b'{"id":"z","payload":"Z"}\n'], "Z", [line])
        lines = [ours(id="a", rev=2 * top), ours(id="b", rev=top + 1)]
        lines.append(b'{"id":"c","payload":1,"rev":%d}\n' % top)
        lines.append(hand.replace(b'"a"', b'"d"') % (b"priority", b"%d" % (2**31 - 1)))
        shutil.rmtree(self.path)
        self.write("pending", b"".join(lines))
        self.assertEqual((self.open().verify(), len(self.open())), ([], 4))

    def test_a_tombstone_beyond_the_limit_removes_nothing(self):
        """It is damage, as is any line with such a rev."""
        self.open().put("D", id="d")
        self.write("inflight", seal(f'{{"id":"d","rev":{2**28 + 1},"done":1}}'))
        queue = self.open()
        self.assertEqual(len(queue.verify()), 1)
        for view in self.views(queue):
            self.assertEqual(view.stats()[:5], (1, 0, 0, 0, 1))

    def test_what_verify_says(self):
        """Why each line is damage, before anybody sets it aside."""
        deep = "[" * (tq._MAX_DEPTH + 1) + "]" * (tq._MAX_DEPTH + 1)
        a, b, *_ = self.lines_put()
        for data, line, reason in (
            (a + b.replace(b'"b"', b'"X"'), 2, "checksum does not match"),
            (seal('{"id":"a","rev":1,"payload":' + deep + "}"), 1, "nested deeper"),
            (b'{"id":"a","payload":"\xff"}\n', 1, "not UTF-8"),
            (b'{"id":"a","payload":1}\n{"id":"b","pay', 2, "torn write"),
            (b'{"id":"a"}\n', 1, "neither payload nor done"),
            (b'{"payload":1}\n', 1, "no id"),
            (b'{"id":"a","rev":200000000,"payload":1}\n', 1, "by hand at most"),
        ):
            self.write("pending", data)
            (damage,) = self.open().verify()
            self.assertEqual(damage[:2], ("default.pending.jsonl", line))
            self.assertIn(reason, damage.reason)

    def test_verify_names_file_and_line_and_changes_nothing(self):
        """Damage in each file is found by reading alone."""
        queue = self.open()
        queue.put_many([1, 2, 3])
        queue.bury(queue.get(), "x")
        self.assertEqual(queue.verify(), [])
        for state in STATES:
            self.write(state, b"\xff\xfe\n{}\n", "ab")
        before = tree(self.dir)
        for view in self.views(queue):
            places = {(d.file, d.line) for d in view.verify() if d.reason}
            self.assertEqual(len(places), 6)
            self.assertIn(("default.pending.jsonl", 4), places)
            self.assertIn(("default.dead.jsonl", 3), places)
        self.assertEqual(tree(self.dir), before)
        for view in self.views(queue):
            self.assertEqual(view.stats()[:5], (2, 0, 0, 1, 6))

    def test_a_sealed_line_that_is_no_job_is_damage(self):
        """A right checksum around nonsense blocks nobody; deep nesting is met
        when the job is leased, as payloads are not read before that."""
        top = '{"id":"%s","rev":1,"attempts":0,"priority":0,"run_at":0,"created_at":1'
        for text in (
            "}",
            ',"payload":NaN}',
            ',"created_at":"x","payload":1}',
            ',"payload":1,"id":"other"}',
            ',"payload":1,"id":7}',
            ',"payload":1,"run_at":[]}',
            ',"payload":}',
            ',"max_retries":"x","payload":1}',
            ',"payload":' + "[" * 999 + "]" * 999 + "}",
            ',"payload":' + "[" * 200_000 + "]" * 200_000 + "}",
        ):
            with self.subTest(text[:90]):
                shutil.rmtree(self.path, True)
                good = b'{"id":"z","payload":"Z"}\n'
                self.write("pending", seal(top % "a" + text) + good)
                queue = self.open(max_retries=0)
                jobs = queue.get_many(2)
                self.assertIn("Z", [job.payload for job in jobs])
                for job in jobs:
                    queue.task_done(job)
                self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_damage_is_logged_without_its_bytes(self):
        """One warning, with a count and no payload."""
        self.write("pending", b"secret\nsecret\n")
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            self.open().get()
        self.assertEqual(len(logs.records), 1)
        self.assertIn("2", logs.output[0])
        self.assertNotIn("secret", logs.output[0])

    def test_a_hole_in_a_batch_voids_it(self):
        """At the first look at a file, a put_many whose closing line counts
        more lines than are whole is not there; its bytes are kept."""
        a, _, _, x, y, z = self.lines_put()
        inside = y.replace(b"yyy", b"\0" * 3)
        nuls = b"\0" * (len(x) - 1) + b"\n"
        for hole in (nuls + y, b"\0" * len(x + y), y, x + inside):
            with self.subTest(hole[:9]):
                shutil.rmtree(self.path)
                self.write("pending", a + hole + z)
                queue = self.open()
                self.assertDrains(queue, ["a"])
                self.assertGreater(queue.stats().damaged, 0)
                self.assertIn(z, b"".join(self.kept()))

    def test_verify_tells_of_a_sound_line_that_was_set_aside(self):
        """One of an unfinished write is not wrong by itself."""
        self.open().put(1)
        lines = [seal({"id": id, "rev": 1, "payload": 1}, "+") for id in "ab"]
        self.write("pending", b"".join(lines), "ab")
        queue = self.open()
        self.assertEqual(queue.stats()[:5], (1, 0, 0, 0, 2))
        reasons = [damage.reason for damage in queue.verify()]
        self.assertEqual(
            reasons, ["set aside: sound by itself, of an unfinished write"] * 2
        )

    def test_verify_of_a_file_that_shrinks(self):
        """Cut while it is read: said so, at the line where it ends."""
        queue = self.open()
        queue.put_many([1, 2])

        def pread(fd, length, place):
            self.write("pending", file_lines(self.path, "pending")[0])
            return os.pread(fd, length, place)

        with patched("os", pread=pread):
            (damage,) = queue.verify()
        self.assertIn("shrank", damage.reason)

    def test_damage_and_a_compaction_that_must_read_anew(self):
        """The operation that met it does not go on with what is forgotten."""
        self.open().put(1, id="a")
        self.write("pending", b"damage\n", "ab")
        queue = self.open()
        effects = [tq._StaleError, None]
        with mock.patch.object(tq._FileEngine, "_compact", side_effect=effects):
            self.assertRaises(tq.DuplicateJobError, queue.put, 2, id="a")
        self.assertHolds(queue, [1])


class TailTest(Case):
    FIRST = {
        "put": lambda queue: queue.put("new"),
        "put with id": lambda queue: queue.put("new", id="new"),
        "put_many": lambda queue: queue.put_many(["new"]),
        "stats": lambda queue: queue.stats(),
        "find": lambda queue: queue.put("new", id="old", exist_ok=True),
        "compact": lambda queue: queue.compact(),
        "jobs": lambda queue: list(queue.jobs()),
    }

    def test_whoever_looks_first_decides_how_a_file_ends(self):
        """A sound last line that lacks its newline is a job, half a line is set
        aside; what is put next is not glued to either."""
        a, b = b'{"id":"a","payload":"A"}\n', b'{"id":"b","payload":"B"}'
        for (name, first), (tail, payloads) in itertools.product(
            self.FIRST.items(), ((b, ["A", "B"]), (b[:15], ["A"]))
        ):
            with self.subTest(name, tail=tail):
                shutil.rmtree(self.path, True)
                self.open().get()  # there is a lock file to look under
                self.write("pending", a + tail)
                queue, torn = self.open(), tail != b
                first(queue)
                for view in self.views(queue):
                    found = [job.payload for job in view.jobs() if job.payload != "new"]
                    self.assertEqual(found, payloads)
                    self.assertEqual(view.stats().damaged, torn)
                    self.assertEqual(len(view.verify()), torn)
                if torn:
                    kept = pathlib.Path(self.path, "default.damaged").read_bytes()
                    self.assertEqual(kept, tail + b"\n")
                self.assertTrue(file_bytes(self.path, "pending").endswith(b"}\n"))

    def test_a_torn_string_of_many_quotes_is_read_once(self):
        """Not anew from each of its escaped quotes, which took a minute."""
        self.write("pending", b'{"id":"a","payload":{"b":"' + b'[{\\"n\\":1}]' * 20_000)
        start = time.process_time()
        self.assertIsNone(self.open().get())
        self.assertLess(time.process_time() - start, 5)

    def test_the_count_of_a_large_write(self):
        """Over several chunks, of short lines or long: a line too few or a hole
        of NULs voids it all, and one that is whole stays."""
        for n, payload in ((100, "x"), (3, "x" * 3000)):
            with mock.patch.object(tq, "_CHUNK", 1000):
                shutil.rmtree(self.path, True)
                self.open().put_many([payload] * n)
                lines = file_lines(self.path, "pending")
                at = len(lines) // 2
                hole = lines[:at] + [b"\0" * len(lines[at])] + lines[at + 1 :]
                for found, count in ((lines, n), (lines[1:], 0), (hole, 0)):
                    self.write("pending", b"".join(found))
                    self.assertEqual(len(self.open()), count)
                    shutil.rmtree(self.path)

    def test_a_newline_that_cannot_be_written_is_imagined(self):
        """On a read-only disk a sound last line counts, short and long."""
        for payload in ("x", "x" * 2000):
            line = ours(payload=payload)[:-1]
            self.write("pending", line)
            with ReadOnlyTest.erofs(self):
                queue = self.open()
                self.assertEqual(queue.find("a").payload, payload)
                self.assertEqual(queue.stats().pending, 1)
                self.assertIsNotNone(queue.stats().oldest)
            self.assertEqual(file_bytes(self.path, "pending"), line)


# Index
# -----------------------------------------------------------------------------


class BacklogTest(Case):
    def backlog(self, n, payload="x"):
        lines = [ours(id=f"job-{i}", created_at=1, payload=payload) for i in range(n)]
        self.write("pending", b"".join(lines), "ab")

    @contextlib.contextmanager
    def reads(self):
        """The lengths of what is read meanwhile."""
        read = mock.Mock(wraps=os.pread)
        lengths = []
        with patched("os", pread=read):
            yield lengths
        lengths += [call.args[1] for call in read.call_args_list]

    def test_payloads_are_not_held_in_memory(self):
        """The index of a backlog is small, whatever the payloads."""
        self.backlog(2000, "x" * 10_000)
        queue = self.open()
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        self.assertEqual(len(queue), 2000)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        self.assertLess(held, 2_000_000)
        for _ in range(5):
            queue.put("x" * 100_000)
        gc.collect()
        self.assertLess(tracemalloc.get_traced_memory()[0], held + 100_000)

    def test_a_put_does_not_read_the_backlog(self):
        """A generated id's put reads the file's end once, then nothing; but once
        more after another's put."""
        self.backlog(5000, "x" * 200)
        one, two = self.open(), self.open()
        with self.reads() as first:
            one.put(1)
        self.assertLess(sum(first), 200_000)
        with self.reads() as later:
            for n in range(50):
                one.put(n)
            one.put_many([1, 2, 3])
        self.assertEqual(later, [])
        with self.reads() as by_turns:
            for n in range(20):
                two.put(n), one.put(n)
        self.assertLess(sum(by_turns) / 40, 100_000)

    def test_operations_write_no_more_with_a_backlog(self):
        """A put writes its line, not the queue: under 1 KB beyond the payload,
        at any length of the queue."""
        self.backlog(5000)
        queue = self.open()
        for n in range(5):
            before = os.path.getsize(file_of(self.path, "pending"))
            queue.put("y" * 100)
            grown = os.path.getsize(file_of(self.path, "pending")) - before
            self.assertLess(grown, 1100)
            job = queue.get()
            self.assertEqual(job.id, f"job-{n}")
            queue.task_done(job)
        self.assertLess(len(file_bytes(self.path, "inflight")), 5000)

    def test_the_time_of_an_operation_does_not_grow(self):
        """The median put, get and settle with 20,000 waiting take at most five
        times what they take with a hundred."""

        def median():
            times = []
            for _ in range(31):
                start = time.perf_counter()
                queue.put("x")
                queue.task_done(queue.get())
                times.append(time.perf_counter() - start)
            return sorted(times)[15]

        self.backlog(100)
        queue = self.open()
        few = median()
        self.backlog(20_000)
        self.assertGreater(len(queue), 19_000)
        self.assertLess(median(), 5 * few)

    def test_a_large_payload_and_a_small_one_behind(self):
        """20 MB go through every file, and block nobody."""
        big = "x" * 20_000_000
        queue = self.open(max_retries=0)
        queue.put(big, max_retries=0)
        queue.put("small")
        job = self.open().get()
        self.assertTrue(job.payload == big)
        queue.task_done(job, False, "e")
        self.assertDrains(self.open(), ["small"])
        self.assertTrue(next(self.open().dead_letter()).payload == big)

    def test_a_large_backlog_is_read_by_every_kind_of_line(self):
        """Usual lines, hand-written ones and all priorities, over 1 MiB."""
        self.backlog(4000, "x" * 300)
        self.write("pending", b'{"id":"hand","payload":"H","priority":1}\n', "ab")
        queue = self.open()
        self.assertEqual(queue.get().payload, "H")
        ids = [job.id for job in queue.get_many(3)]
        self.assertEqual(ids, ["job-0", "job-1", "job-2"])
        for view in self.views(queue):
            self.assertEqual(view.stats()[:4], (3997, 0, 4, 0))

    def test_a_long_order_forgets_its_head(self):
        """Thousands of gets in a row keep the order, whatever the memory does."""
        queue = self.open()
        queue.put_many(range(9000))
        found = [job.payload for _ in range(90) for job in queue.get_many(100)]
        self.assertEqual(found, list(range(9000)))
        (order,) = queue._engine._index.orders.values()
        self.assertLess(len(order.places), 9000)

    def big_steps(self):
        """Read ahead of the lock from the first byte on."""
        return mock.patch.object(tq, "_READ_AHEAD", 0)

    def test_reading_ahead_leaves_a_half_changed_index_alone(self):
        """Another thread was interrupted meanwhile: it is still to be forgotten."""
        queue = self.open()
        queue.put(1, id="a")
        queue.stats()
        index = queue._engine._index
        index.entries.clear()
        index.dirty = True
        queue._engine._read_ahead()
        self.assertTrue(index.dirty)
        self.assertEqual(queue.find("a").payload, 1)

    def test_a_writer_without_a_pause_keeps_no_reader_out(self):
        """More is written during each reading than may be left unread."""
        self.backlog(100)
        queue, producer, puts = self.open(), self.open(), []
        read_ahead = queue._engine._read_ahead

        def overtaken():
            read_ahead()
            puts.append(producer.put("x" * 1000))
            self.assertLess(len(puts), 9)

        with mock.patch.object(tq, "_READ_AHEAD", 100):
            with mock.patch.object(queue._engine, "_read_ahead", overtaken):
                self.assertEqual(queue.get().id, "job-0")
        self.assertEqual(len(puts), 2)  # 100, 400, then 1600 bytes may be left

    def test_jobs_that_others_took_are_not_read(self):
        """However many they are, a get reads one line: that of its own job."""
        queue, other = self.open(), self.open()
        queue.put_many(range(10))
        with patched("time", monotonic=lambda: 1.0):  # no look at who is dead
            self.assertEqual(other.get().payload, 0)
            queue.get_many(5)
            read = mock.Mock(wraps=tq._read_record)
            with mock.patch.object(tq, "_read_record", read):
                self.assertEqual(other.get().payload, 6)
        self.assertEqual(read.call_count, 1)

    def test_priorities_that_come_and_go_leave_nothing(self):
        """A compaction forgets those that no job has any more."""
        queue, other = self.open(), self.open()
        for n in range(100):
            queue.put("x", id=f"{n % 5}", priority=n)
            (other if n % 2 else queue).cancel(f"{n % 5}")
        queue.put("y", id="last", priority=-3)
        queue.compact()
        index = queue._engine._index
        self.assertEqual((list(index.orders), index._ranks), ([-3], [3]))
        self.assertDrains(queue, ["y"])

    def test_a_ctrl_c_as_the_thread_lock_is_left(self):
        """Python 3.9 may take a signal before a with has left: the lock is
        released all the same, after reading ahead and by close()."""
        queue = self.open()
        queue.put(1)
        lock = queue._engine._lock

        @contextlib.contextmanager
        def interrupted():
            lock._mutex.acquire()
            yield

        with mock.patch.object(lock, "threads", interrupted):
            for leave in (queue._engine._read_ahead, queue.close):
                leave()
                self.assertFalse(lock.mine())

    def test_a_file_restored_before_it_is_read_ahead(self):
        """Written anew in place: all is read from its beginning."""
        queue = self.open()
        queue.put(1, id="a")
        queue.stats()
        lines = b"".join(
            seal({"id": f"r{n}", "rev": 1, "payload": n}) for n in range(9)
        )
        self.write("pending", lines)
        with self.big_steps():
            queue._engine._index.doubts_checksums = False
            queue._engine._store.files[0].size = len(lines)
            queue._engine._read_ahead()
        for view in self.views(queue):
            self.assertEqual(len(list(view.jobs())), 9)

    def test_errors_of_reading_ahead(self):
        """A failing disk raises; a file that shrinks is read anew."""
        self.open().put_many(range(9))
        queue = self.open()

        def failing(fd, length, place):
            if not queue._engine._lock._flocked and length > 100:
                if effects:
                    return effects.pop()()
            return os.pread(fd, length, place)

        def fail():
            fails(errno.EIO)()

        effects = [bytes, bytes, fail]
        with self.big_steps(), patched("os", pread=failing):
            self.assertRefused(errno.EIO, queue.stats)
            self.assertEqual(len(list(queue.jobs())), 9)
        self.assertEqual(effects, [])


# Store: the files, their tails, and what of them is on disk
# -----------------------------------------------------------------------------


class Recorder:
    """What the module syncs and replaces, by name, in order."""

    def __init__(self, path):
        self.path = path
        self.events = []
        self.patches = [
            mock.patch.object(tq, "_sync", self._sync),
            patched("os", fsync=self._fsync, replace=self._replace),
        ]
        self.real = tq._sync

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self.events

    def __exit__(self, *exc_info):
        for patch in self.patches:
            patch.stop()

    def _name(self, fd):
        """The path under which an open file stands now."""
        inode = os.fstat(fd).st_ino
        parent = os.path.dirname(self.path)
        if os.stat(parent).st_ino == inode:
            return "parent"
        for entry in [*os.scandir(parent), *os.scandir(self.path)]:
            if entry.inode() == inode:
                return "dir" if entry.is_dir() else short(entry.name)
        return "?"

    def _sync(self, fd):
        self.events.append("sync " + self._name(fd))
        self.real(fd)

    def _fsync(self, fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self.events.append("sync " + self._name(fd))
        os.fsync(fd)

    def _replace(self, source, target):
        assert os.path.dirname(source) == os.path.dirname(target) == self.path
        self.events.append("replace " + short(os.path.basename(target)))
        os.replace(source, target)


def short(name):
    return name.replace("default.", "").replace(".jsonl", "")


class DurabilityTest(Case):
    def setUp(self):
        super().setUp()
        self.queue = self.open(fsync=True, backoff=lambda n: 0, max_retries=1)
        self.queue.put_many(range(4), ids=list("abcd"))
        jobs = self.queue.get_many(4)
        for job in jobs:
            self.queue.release(job)
        self.queue.bury(self.queue.get(), "x")
        self.queue.task_done(self.queue.get())

    def assertSyncs(self, want, call, *args, **kwargs):
        with Recorder(self.path) as events:
            result = call(*args, **kwargs)
        self.assertEqual(events, want)
        return result

    def test_what_is_synced_before_return(self):
        """put, success, retry, dead and their like sync their one file; a
        lease and its renewal sync nothing."""
        queue, syncs = self.queue, self.assertSyncs
        syncs(["sync pending"], queue.put, 1)
        syncs(["sync pending"], queue.put, 1, id="e")
        syncs(["sync pending"], queue.put_many, [1, 2])
        job = syncs([], queue.get)
        syncs([], queue.extend, job)
        syncs(["sync pending"], queue.task_done, job, False)
        job = syncs([], queue.get)
        syncs(["sync pending"], queue.release, job)
        syncs(["sync dead"], queue.bury, syncs([], queue.get), "x")
        queue.put(1, id="z", priority=9, max_retries=0)
        syncs(["sync dead"], queue.task_done, syncs([], queue.get), False)
        syncs(["sync inflight"], queue.task_done, syncs([], queue.get))
        syncs(["sync pending"], queue.requeue_dead, "a")
        syncs(["sync inflight"], queue.cancel, "a")
        syncs(["sync inflight"], queue.purge, "dead")
        syncs(["sync pending"], lambda: queue.get() and queue.reap_stale(0))
        syncs([], lambda: (queue.stats(), list(queue.jobs()), queue.verify()))

    def test_what_is_synced_with_a_lease(self):
        """The settlement that a worker makes by the same call; and the lease of
        a move, which no living process proves."""
        queue, syncs = self.queue, self.assertSyncs
        queue.put("one more")
        take = functools.partial(queue._engine.take, 1, 60.0, True)
        (job,) = syncs([], take).jobs
        (job,) = syncs(["sync inflight"], take, changes=[queue._done(job)]).jobs
        held = tq._Change.of(job, job._rev, "inflight", 60.0)._replace(token="move")
        syncs(["sync inflight"], queue._engine.renew, [held], False)

    def test_without_fsync_nothing_is_synced(self):
        """fsync=False asks the disk for nothing in the usual operations."""
        queue = self.open(backoff=lambda n: 0)

        def work():
            queue.put(1)
            queue.task_done(queue.get(), False)
            queue.bury(queue.get(), "x")
            queue.task_done(queue.get())

        self.assertSyncs([], work)

    def test_a_new_file_s_name_is_durable_before_the_first_answer(self):
        """The first put syncs the file, its directory and that one's parent;
        through a symlink those that it leads to."""
        real, link = os.path.join(self.dir, "real", "jobs"), os.path.join(self.dir, "l")
        os.makedirs(real)
        os.symlink(real, link)
        new = os.path.join(self.dir, "new")
        for path, place in ((new, new), (link, real)):
            queue = self.open(path=path, fsync=True)
            with Recorder(place) as events:
                queue.put(1)
            want = {"sync pending", "sync dir", "sync parent"}
            self.assertLessEqual(want, set(events))
            with Recorder(place) as events:
                queue.put(2)
            self.assertEqual(events, ["sync pending"])

    def test_a_parent_that_may_not_be_read_is_no_error(self):
        """Who may pass through a directory but not read it cannot sync it,
        and has not made it."""

        def opened(path, *args):
            if path in (self.dir, "/"):
                fails(errno.EACCES)()
            return os.open(path, *args)

        with patched("os", open=opened):
            for path in (os.path.join(self.dir, "a", "jobs"), self.path + "b"):
                self.open(path=path, fsync=True).put(1)
                self.assertEqual(len(self.open(path=path)), 1)

    def test_an_answer_about_another_s_record_syncs_it(self):
        """DuplicateJobError and exist_ok rest on a record that may not be on
        disk yet: it is synced first (I5)."""
        for n, exist_ok in enumerate((True, False)):
            other = self.open(name=f"q{n}")
            other.put(1, id="x")
            queue = self.open(name=f"q{n}", fsync=True)
            with Recorder(self.path) as events:
                try:
                    queue.put(2, id="x", exist_ok=exist_ok)
                except tq.DuplicateJobError:
                    self.assertFalse(exist_ok)
            self.assertIn(f"sync q{n}.pending", events)
            self.assertIn("sync dir", events)

    def test_a_file_replaced_by_another_process_is_named_durably(self):
        """After somebody's compaction the next acknowledged write syncs the
        directory too."""
        self.queue.put(1)
        self.open().compact()
        with Recorder(self.path) as events:
            self.queue.put(2)
        self.assertEqual(sorted(events), ["sync dir", "sync pending"])

    def test_a_thread_that_waits_for_another_s_sync_has_its_own(self):
        """If it appended before that began: the one sync is for both."""
        self.queue.put(1)
        store, real, syncs = self.queue._engine._store, tq._sync, []
        tickets = [store.ticket(store.files[0], []) for _ in range(2)]

        def slow(fd):
            syncs.append(fd)
            eventually(lambda: waits(threads[1]))
            real(fd)

        threads = [
            threading.Thread(target=store.commit, args=(ticket,)) for ticket in tickets
        ]
        with mock.patch.object(tq, "_sync", slow):
            threads[0].start()
            eventually(lambda: syncs)
            threads[1].start()
            for thread in threads:
                thread.join(PATIENCE)
        self.assertEqual(len(syncs), 1)
        self.assertEqual(store.files[0].inode.synced, tickets[1].number)

    def test_threads_share_a_sync(self):
        """While one sync runs others gather, and the next append and sync are
        for all of them (group commit)."""
        queue, n = self.queue, 8
        start = len(file_lines(self.path, "pending"))
        real, syncs = tq._sync, []

        def gathered():
            lines = len(file_lines(self.path, "pending")) - start
            return lines + len(queue._engine._put_together._waiting) == n

        def slow(fd):
            syncs.append(fd)
            eventually(gathered)
            real(fd)

        with mock.patch.object(tq, "_sync", slow):
            self.run_threads(*[lambda k=k: queue.put(k) for k in range(n)])
        self.assertIn(len(syncs), (1, 2))
        self.assertEqual(len(file_lines(self.path, "pending")), start + n)

    def test_a_sync_is_for_what_was_written_before_it(self):
        """A put that appends while another's sync runs has one of its own, and
        is woken for it."""
        queue, real, syncs = self.queue, tq._sync, []
        start = len(file_lines(self.path, "pending"))

        def slow(fd):
            syncs.append(len(file_lines(self.path, "pending")) - start)
            if len(syncs) == 1:
                second.start()
                eventually(lambda: len(file_lines(self.path, "pending")) == start + 2)
            real(fd)

        second = threading.Thread(target=queue.put, args=(2,), kwargs={"id": "two"})
        with mock.patch.object(tq, "_sync", slow):
            queue.put(1, id="one")
            second.join(5)
            self.assertFalse(second.is_alive(), "it was not woken")
        self.assertEqual(syncs, [1, 2])


class CompactionTest(Case):
    def size(self):
        return sum(len(file_bytes(self.path, state)) for state in STATES)

    def test_a_drained_queue_shrinks_by_itself(self):
        """Under 1 MiB when drained, under 64 KiB after an idle waiting get,
        empty after close."""
        queue, payload, largest = self.open(), "x" * 500, 0
        for _ in range(2500):
            queue.put(payload)
            queue.task_done(queue.get())
            largest = max(largest, self.size())
        self.assertGreater(largest, 300_000)
        self.assertLessEqual(largest, 2**20 + 4000)
        self.assertIsNone(queue.get(timeout=0.01))
        self.assertLess(self.size(), 2**16)
        queue.put(1)
        queue.task_done(queue.get())
        queue.close()
        self.assertEqual(self.size(), 0)

    def test_draining_a_backlog_shrinks_too(self):
        """However it got there, a drained queue holds at most 1 MiB."""
        queue = self.open()
        queue.put_many(["x" * 1000] * 3000)
        self.assertGreater(self.size(), 3_000_000)
        while jobs := queue.get_many(50):
            for job in jobs:
                queue.task_done(job)
        self.assertLess(self.size(), 2**16)
        queue.close()
        self.assertEqual(self.size(), 0)

    def test_parked_jobs_do_not_pin_the_files(self):
        """With one delayed and one dead job the directory stays small, with
        the same number of files."""
        queue, names = self.open(), None
        queue.put("dead")
        queue.bury(queue.get(), "x")
        queue.put("late", delay=3600)
        for n in range(4000):
            queue.put("x" * 200)
            queue.task_done(queue.get())
            if n % 500 == 0:
                self.assertLess(self.size(), 2_000_000)
                names = names or sorted(os.listdir(self.path))
                self.assertEqual(sorted(os.listdir(self.path)), names)
        queue.close()
        self.assertLess(self.size(), 2000)
        self.assertEqual(self.open().stats()[:4], (1, 1, 0, 1))

    def test_the_order_of_syncs_and_replaces(self):
        """All files are synced first; then pending, dead, the directory, and
        the tombstones' file last (I4)."""
        queue = self.open(fsync=True)
        queue.put_many(range(6))
        for job in queue.get_many(3):
            queue.task_done(job)
        queue.bury(queue.get(), "x")
        queue.bury(queue.get(), "x")
        queue.cancel(next(queue.dead_letter()).id)
        queue.get()
        queue.put("left")
        with Recorder(self.path) as events:
            queue.compact()
        replaces = [e.split()[1] for e in events if e.startswith("replace")]
        self.assertEqual(replaces, ["pending", "dead", "inflight"])
        first = events.index("replace pending")
        self.assertLessEqual(
            {"sync pending", "sync inflight", "sync dead"}, set(events[:first])
        )
        for state in STATES:
            place = events.index(f"replace {state}")
            self.assertEqual(events[place - 1], f"sync {state}.tmp")
        dead, last = events.index("replace dead"), events.index("replace inflight")
        self.assertIn("sync dir", events[dead:last])

    def test_names_are_durable_before_anything_is_replaced(self):
        """A file that somebody else replaced has its name synced before this
        compaction replaces another."""
        queue = self.open(fsync=True)
        queue.put_many([1, 2])
        queue.task_done(queue.get())
        self.open().compact()
        queue.task_done(queue.get())
        fresh = self.open()
        with Recorder(self.path) as events:
            fresh.compact()
        first = [e.split()[0] for e in events].index("replace")
        self.assertIn("sync dir", events[:first])

    def test_nothing_but_superseded_lines_goes(self):
        """States, order, payloads, errors and tokens are what they were."""
        queue = self.open(backoff=lambda n: 0)
        queue.put_many(range(20), ids=[f"j{n}" for n in range(20)])
        queue.put("late", delay=3600, priority=3)
        jobs = queue.get_many(10)
        for n, job in enumerate(jobs):
            (
                queue.task_done,
                lambda job: queue.task_done(job, False, "e"),
                lambda job: queue.bury(job, "f"),
                queue.extend,
            )[n % 4](job)
        want = list(queue.jobs())
        for view in self.views(queue):
            view.compact()
            self.assertEqual(list(view.jobs()), want)
        self.assertEqual(len(queue.get_many(50)), 13)
        queue.task_done(jobs[3])

    def test_it_reads_and_writes_a_part_at_a_time(self):
        """However large the files are: some 1 MiB, not all of it."""
        queue = self.open()
        queue.put_many(["x" * 1000] * 5000)
        queue.task_done(queue.get())
        pread, write = mock.Mock(wraps=os.pread), mock.Mock(wraps=os.write)
        with patched("os", pread=pread, write=write):
            queue.compact()
        sizes = [call.args[1] for call in pread.call_args_list]
        sizes += [len(call.args[1]) for call in write.call_args_list]
        self.assertGreater(sum(sizes), 10_000_000)
        self.assertLess(max(sizes), 2_000_000)

    def test_what_was_not_read_is_not_dropped(self):
        """A compaction with an index that lacks a file's last lines is none."""
        queue, other = self.open(), self.open()
        queue.put_many([1, 2])
        queue.task_done(queue.get())
        other.put(3)
        engine = queue._engine

        def compact():
            for data in engine._store.files:
                engine._store.look(data)
            engine._compact()

        self.assertRaises(tq._StaleError, engine._locked, compact)
        self.assertDrains(self.open(), [2, 3])

    def test_a_leftover_temp_file_is_removed_and_never_read(self):
        """The next to open the files sweeps it; its jobs are not jobs."""
        self.write("pending", b'{"id":"a","payload":"A"}\n')
        for state in STATES:
            temp = pathlib.Path(file_of(self.path, state) + ".tmp")
            temp.write_bytes(b'{"id":"b","payload":"B"}\n')
        self.assertDrains(self.open(), "A")
        self.assertNoTemp()

    def test_no_file_is_ever_made_outside_of_the_directory(self):
        """Not where TMPDIR points, which may be another file system."""
        other = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.addCleanup(shutil.rmtree, other)
        made = []

        def opened(path, flags, *mode, **options):
            made.append(path if flags & os.O_CREAT else file_of(self.path, "pending"))
            return os.open(path, flags, *mode, **options)

        def replace(source, target):
            made.extend([source, target])
            os.replace(source, target)

        self.write("pending", b'{"id":"a","payload":1}\nnonsense\n')
        with mock.patch.dict(os.environ, TMPDIR=other), mock.patch("tempfile.tempdir"):
            with patched("os", open=opened, replace=replace):
                queue = self.open(fsync=True)
                queue.bury(queue.get(), "x")
                queue.put(2)
                queue.compact()
        self.assertGreater(len(made), 6)
        self.assertEqual({os.path.dirname(path) for path in made}, {self.path})
        self.assertEqual(os.listdir(other), [])

    def test_a_leftover_temp_file_is_not_in_the_way(self):
        """Nor of one who opened the queue before its maker died."""
        queue = self.open()
        queue.put_many([1, 2])
        queue.task_done(queue.get())
        temp = pathlib.Path(file_of(self.path, "pending") + ".tmp")
        temp.write_bytes(b"half a fi")
        queue.compact()
        self.assertFalse(temp.exists())
        self.assertDrains(queue, [2])

    def test_replace_is_tried_again_where_readers_refuse_it(self):
        """On Windows an open file cannot be replaced: bounded tries, then an
        error with everything intact."""
        queue, refuse = self.open(), fails(errno.EACCES)
        queue.put_many([1, 2])
        queue.task_done(queue.get())
        with patched("os", replace=faulty(os.replace, refuse, refuse, refuse)):
            queue.compact()
        self.assertEqual(len(file_lines(self.path, "pending")), 1)
        queue.task_done(queue.get())
        queue.put(3)
        with patched("os", replace=refuse):
            self.assertRefused(errno.EACCES, queue.compact)
        self.assertNoTemp()
        self.assertDrains(queue, [3])

    def test_a_failing_one_unasked_costs_only_space(self):
        """The operation succeeds; the next try waits until twice as much is
        superseded."""
        queue, tries = self.open(), []
        job = queue.put("x" * 1000, id="a") and queue.get()

        def replace(source, target):
            tries.append(queue._engine._index.superseded)
            fails(errno.EIO)()

        queue._engine._compact_above = 1000
        with patched("os", replace=replace):
            for _ in range(12):
                job = queue.extend(job)
        self.assertEqual(len(tries), 3, tries)
        self.assertTrue(all(b > 2 * a for a, b in zip(tries, tries[1:])), tries)
        queue.task_done(job)
        self.assertEqual(queue.stats()[:4], (0, 0, 0, 0))

    def test_one_unasked_of_files_that_change(self):
        """What it cannot read as remembered is read anew, and nothing is lost."""
        queue = self.open()
        queue.put("x" * 1000, id="a")
        job = queue.get()
        extend = functools.partial(queue.extend, job)
        queue._engine._compact_above = 1000
        with mock.patch.object(tq._Index, "rewritten", side_effect=tq._StaleError):
            extend()
        for view in self.views(queue):
            self.assertEqual(view.find("a").state, "inflight")
        queue.task_done(job)

    def test_none_where_nothing_may_be_written(self):
        """Looking at a read-only queue compacts nothing."""
        queue = self.open()
        for _ in range(3):
            queue.put("x" * 1000, id="a")
            queue.cancel("a")
        before = tree(self.dir)
        with ReadOnlyTest.erofs(self):
            late = self.open()
            late._engine._compact_above = 1000
            self.assertEqual(late.stats()[:4], (0, 0, 0, 0))
        self.assertEqual(tree(self.dir), before)


class FailedSyncTest(Case):
    """What a failing fsync may have lost is never called done (I9)."""

    def setUp(self):
        super().setUp()
        self.queue = self.open(fsync=True, backoff=lambda n: 0)
        self.queue.put("before", id="b")
        self.failures = 0
        self.real = tq._sync
        patch = mock.patch.object(tq, "_sync", self.sync)
        patch.start()
        self.addCleanup(patch.stop)

    def sync(self, fd):
        if self.failures > 0:
            self.failures -= 1
            fails(errno.EIO)()
        self.real(fd)

    def test_a_put_that_failed_can_be_repeated(self):
        """It raises; the same id again gives exactly one job, in a new file."""
        self.failures = 1
        inode = os.stat(file_of(self.path, "pending")).st_ino
        with open(file_of(self.path, "pending")):  # the number is not free
            self.assertRefused(errno.EIO, self.queue.put, 1, id="k")
            self.queue.put(2, id="k")
            self.assertNotEqual(os.stat(file_of(self.path, "pending")).st_ino, inode)
        self.assertHolds(self.queue, ["before", 2])

    def test_each_settle_that_failed_can_be_repeated(self):
        """The job is still leased by the same token, and settles once."""
        for settle in (
            lambda job: self.queue.task_done(job, False, "e"),
            self.queue.release,
            lambda job: self.queue.bury(job, "x"),
            self.queue.task_done,
        ):
            job = self.queue.get()
            self.failures = 1
            self.assertRefused(errno.EIO, settle, job)
            self.assertEqual(self.queue.find("b").state, "inflight")
            settle(job)
            self.assertRaises(tq.LeaseLostError, settle, job)
            if self.queue.stats().dead:
                self.queue.requeue_dead()
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_a_sticky_failure_fails_everything_until_it_ends(self):
        """Nothing is answered while the files cannot be copied; then all
        acknowledged jobs are there."""
        self.failures = 10**6
        self.assertRefused(errno.EIO, self.queue.put, 1)
        for _ in range(3):
            self.assertRefused(errno.EIO, self.queue.put, 2)
            self.assertRefused(errno.EIO, self.queue.get)
            self.assertRefused(
                errno.EIO, self.queue.task_done, tq.Job("b", 1, token="t")
            )
            self.assertRefused(errno.EIO, self.queue.stats)
        self.failures = 0
        self.queue.put(3)
        self.assertHolds(self.queue, ["before", 3])
        self.assertNoTemp()

    def test_all_waiting_threads_fail_together(self):
        """Whoever shared the failed sync raises; later puts are one job each."""
        results, calls, n = [], [], 6

        def sync(fd):
            calls.append(fd)
            if len(calls) == 1:
                eventually(lambda: len(file_lines(self.path, "pending")) == n + 1)
                fails(errno.EIO)()
            self.real(fd)

        def put(k):
            try:
                self.queue.put(k, id=f"k{k}")
                results.append((k, True))
            except tq.QueueError:
                results.append((k, False))

        with mock.patch.object(tq, "_sync", sync):
            self.run_threads(*[lambda k=k: put(k) for k in range(n)])
        self.assertEqual(len(results), n)
        want = {f"k{k}" for k, fine in results if fine} | {"b"}
        for view in self.views(self.queue):
            self.assertEqual({job.id for job in view.jobs()}, want)
        self.assertEqual([fine for _, fine in results], [False] * n)

    def test_a_failing_directory_sync_is_a_failed_put(self):
        """The name of a new file is part of the promise."""
        queue = self.open(name="other", fsync=True)
        with patched("os", fsync=faulty(os.fsync, *[fails(errno.EIO)] * 5)):
            for _ in range(4):
                self.assertRefused(errno.EIO, queue.put, 1, id="k")
            queue.put(2, id="k")
        self.assertHolds(queue, [2])

    def test_who_shares_a_put_fails_with_it(self):
        """Threads whose puts went into one append and one sync all raise when
        that fails, the followers too."""
        results, calls = {}, []

        def sync(fd):
            calls.append(fd)
            if len(calls) == 1:
                eventually(lambda: len(self.queue._engine._put_together._waiting) == 2)
            if len(calls) == 2:
                fails(errno.EIO)()
            self.real(fd)

        def put(k):
            try:
                results[k] = self.queue.put(k).payload
            except tq.QueueError:
                results[k] = None

        with mock.patch.object(tq, "_sync", sync):
            self.run_threads(*[lambda k=k: put(k) for k in range(3)])
        fine = [k for k in results.values() if k is not None]
        self.assertEqual((len(results), len(fine)), (3, 1))
        self.assertHolds(self.queue, ["before", *fine])

    def test_files_are_copied_before_the_failed_call_returns(self):
        """No later call is needed: another process could acknowledge before."""
        for call in (self.queue.compact, lambda: self.queue.put(1)):
            with open(file_of(self.path, "pending")) as old:
                self.failures = 1
                self.assertRefused(errno.EIO, call)
                new = os.stat(file_of(self.path, "pending"))
                self.assertNotEqual(os.fstat(old.fileno()).st_ino, new.st_ino)

    def test_what_a_repair_left_out_can_be_put_again(self):
        """Without a repetition it is no job; the same line to the byte is one,
        and the next repair keeps it."""
        queue = self.queue
        with Clock(at=2e9).patch():
            self.failures = 1
            self.assertRefused(errno.EIO, queue.put, 1, id="k")
            self.assertHolds(queue, ["before"])
            queue.put(1, id="k")
            self.failures = 1
            self.assertRefused(errno.EIO, queue.put, 2)
        self.assertHolds(queue, ["before", 1])

    def test_a_repair_makes_no_damage_sound(self):
        """A damaged line is copied as it is, that of a put_many too."""
        self.queue.put_many(["aaa", "bbb"])
        data = file_bytes(self.path, "pending").replace(b'"bbb"', b'"bxb"')
        self.write("pending", data)
        self.failures = 1
        self.assertRefused(errno.EIO, self.queue.put, 1)
        self.assertEqual(self.open().stats()[:5], (2, 0, 0, 0, 1))

    def test_a_failure_in_the_compaction_s_first_syncs(self):
        """compact() raises, nothing is dropped, and the queue heals."""
        self.queue.put_many(range(3))
        self.queue.task_done(self.queue.get())
        for count in (1, 2, 3):
            self.failures = count
            try:
                self.queue.compact()
            except tq.QueueError:
                pass
            self.failures = 0
            for view in self.views(self.queue):
                self.assertEqual([job.payload for job in view.jobs()], [0, 1, 2])

    def test_damage_whose_sync_failed_is_copied(self):
        """NAME.damaged is written anew before more is added to it (I9)."""
        for text in (b"one\n", b"two\n"):
            self.write("dead", text, "ab")
            self.failures = 1
            with contextlib.suppress(tq.QueueError):
                self.queue.stats()
        with open(os.path.join(self.path, "default.damaged")) as old:
            self.queue.stats()
            new = os.stat(os.path.join(self.path, "default.damaged"))
            self.assertNotEqual(os.fstat(old.fileno()).st_ino, new.st_ino)
        for view in self.views(self.queue):
            self.assertGreaterEqual(view.stats().damaged, 2)
            self.assertEqual([job.id for job in view.jobs()], ["b"])

    def test_a_sync_that_succeeds_after_one_failed_proves_nothing(self):
        """A file that failed meanwhile stays failed for all its writes (I9)."""
        data = self.queue._engine._store.files[0]

        def fail(fd):
            data.inode.failed = True
            self.queue._engine._store.failed_inodes.append(data.inode)

        with mock.patch.object(tq, "_sync", fail):
            self.assertRefused(errno.EIO, self.queue.put, 1, id="k")
        self.assertHolds(self.queue, ["before"])

    def test_a_repair_without_one_of_the_files(self):
        """Gone, and none may be made: the others are healed all the same."""
        self.queue.put(2, id="c")
        job = self.queue.get()
        self.failures = 2
        self.assertRefused(errno.EIO, self.queue.put, 1, id="k")
        os.unlink(file_of(self.path, "dead"))

        def opened(path, flags, *mode):
            if path == file_of(self.path, "dead"):
                if flags & os.O_CREAT:
                    fails(errno.EACCES)()
            return os.open(path, flags, *mode)

        with patched("os", open=opened):
            self.assertEqual(len(self.queue), 1)
        self.queue.task_done(job)
        for view in self.views(self.queue):
            self.assertEqual([job.id for job in view.jobs()], ["c"])


class FullDiskTest(Case):
    def fill(self, jobs=100, size=1000):
        """A queue of waiting jobs on a disk without a free byte."""
        queue = self.open(backoff=lambda n: 0)
        for n in range(jobs):
            queue.put({"n": n, "pad": "x" * size}, id=f"j{n}")
        disk = FullDisk(self.path, 0)
        disk.limit = disk.used() + 300
        return queue, disk

    def test_a_put_fails_and_leaves_no_half_line(self):
        """A short write is cut back; the error says so; later puts work."""
        queue, disk = self.fill(5)
        before = file_bytes(self.path, "pending")
        with patched("os", write=disk.write):
            for call in (
                lambda: queue.put("y" * 1000),
                lambda: queue.put("y" * 1000, id="new"),
                lambda: queue.put_many(["y" * 200] * 5),
            ):
                self.assertRefused(errno.ENOSPC, call)
                self.assertEqual(file_bytes(self.path, "pending"), before)
                self.assertEqual(len(self.open()), 5)
        self.assertEqual(disk.refused, 3)
        queue.put("z", id="new")
        for view in self.views(queue):
            self.assertEqual([j.id for j in view.jobs()][4:], ["j4", "new"])

    def test_a_hundred_jobs_can_be_taken_and_settled(self):
        """The lock file's ballast pays for the leases and the tombstones."""
        queue, disk = self.fill()
        with patched("os", write=disk.write):
            self.assertRaises(tq.QueueError, queue.put, "y" * 1000)
            for n in range(100):
                job = queue.get()
                self.assertEqual(job.id, f"j{n}")
                queue.task_done(job)
            self.assertGreater(disk.refused, 1)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_each_change_may_be_the_one_that_uses_the_ballast(self):
        """Not only the get before it: the disk is full at the settle."""
        changes = [
            lambda queue, job: queue.task_done(job),
            lambda queue, job: queue.task_done(job, False, "e"),
            lambda queue, job: queue.bury(job, "x"),
            lambda queue, job: queue.release(job),
            lambda queue, job: queue.extend(job),
            lambda queue, job: queue.cancel(job.id),
            lambda queue, job: queue.reap_stale(0),
            lambda queue, job: queue.requeue_dead(),
        ]
        for number, change in enumerate(changes):
            queue = self.open(name=f"q{number}")
            queue.put_many([0, 1])
            queue.bury(queue.get(), "x")
            job, disk = queue.get(), FullDisk(self.path, 0)
            disk.limit = disk.used()
            with patched("os", write=disk.write):
                change(queue, job)
            self.assertGreater(disk.refused, 0)

    def test_when_the_ballast_is_spent_nothing_is_lost(self):
        """Then get and settle raise, and go on when there is room again."""
        queue, disk = self.fill(30, size=30_000)
        done, leased = [], []
        with patched("os", write=disk.write):
            with self.assertRaises(tq.QueueError) as caught:
                while True:
                    leased = [queue.get()]
                    queue.task_done(leased[0], False, "e")
                    done.append(leased.pop().id)
            self.assertEqual(caught.exception.errno, errno.ENOSPC)
        self.assertGreater(len(done), 1)
        self.assertEqual(len(census(self.path)), 30)
        for job in leased:
            queue.task_done(job)
        self.assertEqual(len(list(iter(queue.get, None))), 30 - len(leased))

    def test_the_ballast_is_laid_again(self):
        """When there is room, the lock file gets its ballast back."""
        queue, disk = self.fill()
        lock = os.path.join(self.path, "default.lock")
        full = os.path.getsize(lock)
        self.assertGreaterEqual(full, 256 * 1024)
        clock = Clock()
        with clock.patch():
            with patched("os", write=disk.write):
                queue.get(), queue.get(), queue.get()
            self.assertLess(os.path.getsize(lock), full)
            clock.jump(60.0, mono=60.0)
            queue.put("x")
            self.assertGreaterEqual(os.path.getsize(lock), 256 * 1024)

    def test_the_ballast_is_incompressible(self):
        """Else giving it up would free nothing on a compressing disk."""
        self.open().put(1)
        data = pathlib.Path(self.path, "default.lock").read_bytes()
        self.assertGreater(len(zlib.compress(data)), 250_000)

    def test_a_file_size_limit(self):
        """RLIMIT_FSIZE: put raises, five jobs are intact, and a later put
        works when the limit is lifted."""
        queue = self.open()
        queue.put_many(range(5))
        data = file_bytes(self.path, "pending")

        def limited(link):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) + 50, limits[1]))
            self.assertRaises(tq.QueueError, self.open().put, "x" * 1000)
            self.assertRaises(tq.QueueError, queue.put, "x" * 1000)
            self.assertEqual(file_bytes(self.path, "pending"), data)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            queue.put("later")
            return sorted(os.listdir(self.path))

        names = self.spawn(limited).hear()
        self.assertEqual([name for name in names if "tmp" in name], [])
        self.assertDrains(queue, [0, 1, 2, 3, 4, "later"])

    def test_no_room_for_the_ballast(self):
        """Half of it is worse than none: that space is given back at once."""
        write = faulty(os.write, half_write, fails(errno.ENOSPC))
        with patched("os", write=write):
            self.open().put(1)
        self.assertEqual(os.path.getsize(os.path.join(self.path, "default.lock")), 0)
        self.assertDrains(self.open(), [1])


class ReadOnlyTest(Case):
    def erofs(self):
        """Every open for writing fails, as on a read-only mount."""

        def opened(path, flags, *mode, **options):
            fresh = not os.path.lexists(path)
            if flags & os.O_CREAT if fresh else flags & (os.O_WRONLY | os.O_RDWR):
                os.lstat(os.path.dirname(path))
                refuse(path)
            return os.open(path, flags, *mode, **options)

        def refuse(path, *_, **__):
            fails(errno.EROFS)()

        return patched("os", open=opened, makedirs=refuse)

    def check(self, path, payloads):
        """Inspection works and changes nothing; writers fail clearly."""
        before = tree(self.dir)
        queue = self.open(path=path)
        self.assertEqual([job.payload for job in queue.jobs("pending")], payloads)
        self.assertEqual(len(queue), len(payloads))
        self.assertEqual(queue.verify(), [])
        list(queue.dead_letter())
        for call in (lambda: queue.put(1), queue.get, lambda: queue.cancel("a")):
            with self.assertRaises(tq.QueueError) as caught:
                call()
            self.assertIn(caught.exception.errno, (errno.EROFS, errno.EACCES))
        self.assertEqual([job.payload for job in queue.jobs("pending")], payloads)
        queue.close()
        self.assertEqual(tree(self.dir), before)

    def test_a_read_only_file_system(self):
        """jobs(), stats(), len() and verify() work; a put raises EROFS."""
        queue = self.open(max_retries=0)
        queue.put_many(["a", "b", "c"])
        queue.bury(queue.get(), "x")
        with self.erofs():
            self.check(self.path, ["b", "c"])
        os.unlink(os.path.join(self.path, "default.lock"))
        with self.erofs():
            self.check(self.path, ["b", "c"])

    def test_a_read_only_directory_without_a_queue(self):
        """An empty or missing directory reads as an empty queue."""
        os.makedirs(self.path)
        with self.erofs():
            self.check(self.path, [])
            self.check(os.path.join(self.dir, "missing"), [])

    def test_damage_is_counted_and_left(self):
        """A damaged line in a read-only tree is counted, and stays."""
        self.open().put("a")
        self.write("pending", b"nonsense\n", "ab")
        before = tree(self.dir)
        with self.erofs():
            queue = self.open()
            for _ in range(3):
                self.assertEqual(queue.stats()[:5], (1, 0, 0, 0, 1))
        self.assertEqual(tree(self.dir), before)

    def test_a_file_that_may_not_be_written_can_be_read(self):
        """Under a lock file that may be: looking works, and a put or get says
        so and why; it does not fail half way."""
        self.open().put("a")

        def opened(path, flags, *mode):
            if path.endswith(".jsonl") and flags & os.O_RDWR:
                fails(errno.EACCES)()
            return os.open(path, flags, *mode)

        with patched("os", open=opened):
            for look in (len, lambda queue: len(list(queue.jobs()))):
                queue = self.open()
                self.assertEqual(look(queue), 1)
                for call in (queue.get, lambda: queue.put(1)):  # noqa: B023
                    self.assertRefused(errno.EACCES, call)
            self.assertRefused(errno.EACCES, self.open().put, 1, id="x")
        self.assertDrains(queue, ["a"])

    def test_a_directory_without_write_permission(self):
        """Mode 0555 on a real directory is EACCES, and inspection works."""

        def look(link):
            if os.geteuid() == 0:  # root may write anywhere
                os.setgroups([])
                os.setgid(4242)
                os.setuid(4242)
            self.check(self.path, ["a", "b"])
            with contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(tq.main(["ls", self.path]), 0)
            return out.getvalue().count("\n")

        self.open().put_many(["a", "b"])
        with contextlib.redirect_stdout(io.StringIO()):
            tq.main(["ls", self.path])  # imports what that user may not read
        for name in os.listdir(self.path):
            os.chmod(os.path.join(self.path, name), 0o444)
        os.chmod(self.path, 0o555)
        os.chmod(self.dir, 0o755)
        self.addCleanup(os.chmod, self.path, 0o755)
        self.assertEqual(self.spawn(look).hear(), 2)

    def test_an_object_that_looked_first_can_write_later(self):
        """Once the mount is writable again, the same object puts and gets."""
        queue = self.open()
        queue.put("a")
        looker = self.open()
        with self.erofs():
            self.assertEqual(len(looker), 1)
        looker.put("b")
        self.assertDrains(looker, ["a", "b"])


class ForeignFilesTest(Case):
    """A symlink, FIFO or directory in a file's place is refused."""

    NAMES = [f"default.{s}.jsonl" for s in STATES] + ["default.lock"]

    def each(self, make):
        """For each file of a queue: replace it by make(path), then work."""
        for name in self.NAMES:
            with self.subTest(name):
                shutil.rmtree(self.path, True)
                queue = self.open()
                queue.put(1)
                queue.release(queue.get())
                file = os.path.join(self.path, name)
                os.rename(file, os.path.join(self.dir, "moved"))
                make(file)
                for tried in self.views(queue):
                    with self.assertRaisesRegex(tq.QueueError, re.escape(name)):
                        tried.put(2, id="x")
                        tried.get()
                yield file

    def test_anything_but_a_file(self):
        """It stays, what it leads to is not touched or made, and no open hangs
        for a reader or writer that never comes."""
        victim, none = pathlib.Path(self.dir, "victim"), os.path.join(self.dir, "none")
        victim.write_bytes(b"precious\n")
        for make, is_there in (
            (lambda file: os.symlink(victim, file), os.path.islink),
            (lambda file: os.symlink(none, file), os.path.islink),
            (os.mkfifo, lambda file: stat.S_ISFIFO(os.lstat(file).st_mode)),
            (os.mkdir, os.path.isdir),
        ):
            for file in self.each(make):
                self.assertTrue(is_there(file))
                self.assertFalse(os.path.exists(none))
                self.assertEqual(victim.read_bytes(), b"precious\n")

    def test_fifos_where_files_are_only_read(self):
        """Nor does a look at the files wait for a writer."""
        self.open().put(1)
        fifo = os.path.join(self.path, "default.damaged")
        os.mkfifo(fifo)
        for look in (self.open().verify, self.open().stats):
            refused = functools.partial(self.assertRaises, tq.QueueError)
            thread = threading.Thread(target=refused, args=(look,))
            thread.start()
            thread.join(5)
            hangs = thread.is_alive()
            os.close(os.open(fifo, os.O_RDWR))  # lets go of who does hang
            thread.join()
            self.assertFalse(hangs)

    def test_a_symlink_for_damage_and_temp_files(self):
        """NAME.damaged is never followed, nor is a planted temp file."""
        victim = pathlib.Path(self.dir, "victim")
        victim.write_bytes(b"precious\n")
        self.write("pending", b'nonsense\n{"id":"a","payload":"A"}\n')
        os.symlink(victim, os.path.join(self.path, "default.damaged"))
        self.assertRaises(tq.QueueError, self.open().get)
        os.unlink(os.path.join(self.path, "default.damaged"))
        for state in STATES:
            os.symlink(victim, file_of(self.path, state) + ".tmp")
        queue = self.open()
        self.assertDrains(queue, "A")
        queue.compact()
        self.assertEqual(victim.read_bytes(), b"precious\n")

    def test_a_file_in_the_directory_s_place(self):
        """A queue whose path is a file is a clear error."""
        pathlib.Path(self.path).write_bytes(b"precious\n")
        for call in (lambda q: q.put(1), lambda q: q.get(), lambda q: q.stats()):
            self.assertRaises(tq.QueueError, call, self.open())
        self.assertEqual(pathlib.Path(self.path).read_bytes(), b"precious\n")

    def test_a_symlinked_directory_is_the_same_queue(self):
        """Two ways to one directory share the lock and the jobs."""
        os.mkdir(self.path)
        link = os.path.join(self.dir, "link")
        os.symlink(self.path, link)

        def work(chat, path):
            queue = self.open(path=path)
            ids = [queue.put(n).id for n in range(50)]
            return ids

        children = [self.spawn(work, path) for path in (self.path, link)]
        ids = {id for child in children for id in child.hear()}
        self.assertEqual({job.id for job in self.open(path=link).jobs()}, ids)
        self.assertEqual(len(ids), 100)


class ReplacedFilesTest(Case):
    def setUp(self):
        super().setUp()
        self.queue = self.open()
        self.queue.put_many(["a", "b"])
        self.queue.stats()

    WAYS = {
        "moved": lambda file, aside: os.rename(file, aside),
        "moved and created": lambda file, aside: (
            os.rename(file, aside) or pathlib.Path(file).touch()
        ),
        "copied and truncated": lambda file, aside: os.truncate(file, 0),
        "all removed": lambda file, aside: shutil.rmtree(os.path.dirname(file)),
    }
    FIRST = {
        "put": lambda queue, job: queue.put("c"),
        "put with id": lambda queue, job: queue.put("c", id="c"),
        "get": lambda queue, job: queue.get(),
        "success": lambda queue, job: queue.task_done(job),
        "failure": lambda queue, job: queue.task_done(job, False),
        "burial": lambda queue, job: queue.bury(job, "x"),
        "renewal": lambda queue, job: queue.extend(job),
    }

    def test_a_rotated_log_costs_what_it_took(self):
        """Whichever file is rotated, in whichever way, and whatever a living
        object does first: a lost lease is said, nothing else fails, and new
        jobs go to the file that is there."""
        queue, aside = self.open(name="q"), os.path.join(self.dir, "aside")
        for state, (how, way), first in itertools.product(
            STATES, self.WAYS.items(), self.FIRST.values()
        ):
            for left in STATES:
                queue.purge(left)
            queue.compact()  # else a tombstone may go with its file
            for payload in ("a", "b", "dead"):
                queue.put(payload)
            job = queue.get()
            queue.bury(queue.get(), "x")
            way(file_of(self.path, state, "q"), aside)
            try:
                first(queue, job)
            except tq.LeaseLostError:
                self.assertTrue(state == "inflight" or how == "all removed")
            queue.put("new")
            for each in STATES:
                self.assertNotIn(b"\0", file_bytes(self.path, each, "q"))
            self.assertIn("new", [job.payload for job in iter(queue.get, None)])
            self.assertEqual(queue.verify(), [])

    def test_a_backup_restored_in_place(self):
        """Same inode, other bytes: a living object reads all anew."""
        before = file_bytes(self.path, "pending")
        self.queue.put("c" * 100)
        self.queue.stats()
        other = before.replace(b'"b"', b'"B"')
        lines = [line[: line.rindex(b',"crc"')] + b"}\n" for line in
                 other.splitlines()]  # fmt: skip
        self.write("pending", b"".join(lines) + b'{"id":"z","payload":"Z"}\n' * 60)
        self.assertHolds(self.queue, ["a", "B", "Z"])

    def edit(self, state, old, new):
        """A file's bytes with some replaced and the checksums put right."""
        lines = []
        for line in file_lines(self.path, state):
            text = line[: line.rindex(b',"crc":"')].replace(old, new) + b"}"
            lines.append(seal(text.decode(), "+" if b'"crc":"+' in line else ""))
        return b"".join(lines)

    def test_an_editor_replaces_a_file_by_one_as_long(self):
        """Its size does not tell, its inode does: all is read anew, and so if
        a blind put is the first to see it."""
        for name, others in (("one", []), ("two", ["c"])):
            queue = self.open(name=name)
            queue.put("a", id="old")
            queue.stats()
            path = file_of(self.path, "pending", name)
            line = pathlib.Path(path).read_bytes().partition(b',"crc"')[0] + b"}"
            temp = pathlib.Path(self.dir, "edited")
            temp.write_bytes(seal(line.decode().replace('"old"', '"new"')))
            self.assertEqual(temp.stat().st_size, os.path.getsize(path))
            os.replace(temp, path)
            for payload in others:
                queue.put(payload)
            self.assertEqual(queue.find("new").payload, "a")
            self.assertRaises(tq.JobNotFoundError, queue.find, "old")

    def test_a_line_changed_in_place_is_noticed_when_it_is_read_again(self):
        """What the index says of it is checked: its id, and its checksum."""
        self.queue.put("one", id="x")
        self.queue.put("two", id="y")
        self.queue.stats()
        self.write("pending", self.edit("pending", b'"x"', b'"z"'), "rb+")
        self.assertRaises(tq.JobNotFoundError, self.queue.find, "x")
        self.assertEqual(self.queue.find("z").payload, "one")
        data = file_bytes(self.path, "pending")
        self.write("pending", data.replace(b'"two"', b'"owt"'), "rb+")
        self.assertDrains(self.queue, ["a", "b", "one"])
        self.assertEqual(self.queue.stats().damaged, 1)

    def test_a_rev_changed_in_place_is_noticed_before_a_success(self):
        """Else the success would be of a rev that the line outranks."""
        job = self.queue.get()
        other = self.open()
        other.stats()
        changed = self.edit("inflight", b'"rev":2', b'"rev":7')
        self.write("inflight", changed, "rb+")
        other.task_done(job)
        self.assertDrains(self.open(), ["b"])
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_a_blind_put_that_sees_a_new_file_forgets_the_old(self):
        """A put after another's compaction must not leave an index that reads
        on in mid-file (I8)."""
        other = self.open()
        self.queue.task_done(self.queue.get())
        other.stats()
        self.queue.compact()
        for n in range(3):
            other.put(n)
        for view in self.views(other):
            self.assertEqual([job.payload for job in view.jobs()], ["b", 0, 1, 2])
            self.assertEqual(view.stats().damaged, 0)


class ChangedFilesTest(Case):
    """Bytes that change in place, which nobody may do."""

    def setUp(self):
        super().setUp()
        self.queue = self.open()
        self.queue.put(1, id="a")
        self.queue.stats()
        self.length = len(file_bytes(self.path, "pending")) - 1

    @staticmethod
    def lying(length, *lies):
        """The next reads of so many bytes get others than are there."""
        lies = list(lies)

        def pread(fd, wanted, place):
            block = os.pread(fd, wanted, place)
            return lies.pop()(block) if lies and wanted == length else block

        return patched("os", pread=pread)

    @staticmethod
    def swap(block):
        return block.replace(b'"a"', b'"b"')

    def test_files_that_change_at_every_look_are_refused(self):
        """Three tries, then an error that names the cause; nothing is lost."""
        with self.lying(self.length, *[self.swap] * 3):
            with self.assertRaisesRegex(tq.QueueError, "change without the lock"):
                self.queue.find("a")
        for view in self.views(self.queue):
            self.assertEqual(view.find("a").payload, 1)

    def test_a_head_that_changes_is_read_anew(self):
        """A get that finds less than a line at its place, or one that was never
        there, delivers all the same."""
        other = b'{"id":"b","payload":1}\n'
        for lie in (lambda block: block[:10], self.swap, lambda block: other):
            with self.lying(1024, lie):
                job = self.queue.get()
            self.assertEqual(job.id, "a")
            self.queue.release(job)

    def test_lines_without_an_end_are_read_anew(self):
        """So is a chunk that has no newline, where one had been."""
        late = self.open()
        late.put(2, id="b")
        late._engine._index.discard()  # its tail is decided, and nothing read
        size = len(file_bytes(self.path, "pending"))
        with self.lying(size, lambda block: block.replace(b"\n", b" ")):
            self.assertEqual(late.get().id, "a")

    def test_an_iteration_over_a_file_changed_in_place(self):
        """jobs() says so: it has no lock under which to read anew.  So it does
        if the disk cannot read."""
        queue = self.queue
        for lie, said in ((self.swap, "call it again"), (fails(errno.EIO), "the disk")):
            jobs = queue.jobs()
            with self.lying(self.length, lie):
                self.assertRaisesRegex(tq.QueueError, said, next, jobs)
            self.assertEqual(next(queue.jobs()).id, "a")


class ModesTest(Case):
    def modes(self):
        return {
            stat.S_IMODE(os.stat(os.path.join(self.path, name)).st_mode)
            for name in os.listdir(self.path)
        }

    def test_files_follow_the_umask(self):
        """Data files have the modes that the umask gives; the directory that
        put makes is private."""
        umask = os.umask(0o002)
        self.addCleanup(os.umask, umask)
        self.open().put(1)
        self.assertEqual(self.modes(), {0o664})
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o700)
        self.assertEqual(os.umask(0o002), 0o002)

    def test_modes_survive_rewriting(self):
        """A shared file stays shared after compaction."""
        queue = self.open()
        queue.put_many(range(20))
        queue.release(queue.get())
        for name in os.listdir(self.path):
            os.chmod(os.path.join(self.path, name), 0o664)
        for job in iter(queue.get, None):
            queue.task_done(job)
            queue.compact()
        self.assertEqual(self.modes(), {0o664})

    STEPS = (
        (1, "q.put(1).payload", 1), (2, "q.get().payload", 1), (1, "q.get()", None),
        (2, "q.put(2).payload", 2), (1, "q.compact()", None),
        (2, "q.put(3).payload", 3), (2, "q.compact()", None),
        (1, "q.put(4).payload", 4), (2, "q.compact()", None),
        (1, "[j.payload for j in q.get_many(5)]", [2, 3, 4]), (2, "q.get()", None),
    )  # fmt: skip

    @unittest.skipUnless(os.geteuid() == 0, "only root can be two users")
    def test_two_users_of_one_group(self):
        """A queue in a setgid directory can be used by both, in turn."""
        os.chmod(self.dir, 0o755)
        os.mkdir(self.path)
        os.chown(self.path, 0, 4242)
        os.chmod(self.path, 0o2775)

        def user(link, uid):
            os.umask(0o002)
            os.setgroups([])
            os.setgid(4242)
            os.setuid(uid)
            queue = self.open()
            while (step := link.hear()) is not None:
                link.tell(eval(step, {"q": queue}))

        one, two = self.spawn(user, 4243), self.spawn(user, 4244)
        for who, step, want in self.STEPS:
            child = (one, two)[who - 1]
            child.tell(step)
            self.assertEqual(child.hear(), want)
        self.assertEqual(self.modes(), {0o664})
        one.kill()
        two.tell("len(q.get_many(5)), [q.find(j.id).attempts for j in q.jobs()][1:]")
        self.assertEqual(two.hear(), [3, [2, 2, 2]])

    @unittest.skipUnless(os.geteuid() == 0, "only root can be two users")
    def test_a_user_who_may_not_is_told_and_harms_nothing(self):
        """Without the group's rights each call is a QueueError with EACCES;
        jobs, leases and modes are what they were."""
        queue = self.open()
        queue.put_many(["a", "b"])
        job = queue.get()
        before = tree(self.dir)
        for mode in (0o700, 0o755):
            os.chmod(self.dir, 0o755)
            os.chmod(self.path, mode)
            said = self.spawn(self.stranger).hear()
            self.assertEqual(said, [errno.EACCES] * 3)
            self.assertEqual(tree(self.dir), before)
        queue.task_done(job)
        self.assertDrains(queue, ["b"])

    def stranger(self, link):
        os.setgroups([])
        os.setgid(4242)
        os.setuid(4242)
        said = []
        for call in (lambda q: q.put(1), lambda q: q.get(), lambda q: q.compact()):
            try:
                call(self.open())
            except tq.QueueError as exc:
                said.append(exc.errno)
        return said


class DescriptorsTest(Case):
    def test_no_operation_leaks_one(self):
        """Under a limit of 64, thousands of operations keep the number."""

        def work(link):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            queue = self.open(max_retries=0)
            self.round(queue, 20)
            before = open_fds()
            self.round(queue, 1000 if DEEP else 300)
            for _ in range(200):
                self.assertRaises(TypeError, queue.put, object())
                other = tq.Queue(self.path, fsync=False)
                other.put(1)
                other.task_done(other.get())
                other.get(timeout=1e-6)  # which listens
                del other
            gc.collect()
            return [before, open_fds()]

        before, after = self.spawn(work).hear()
        self.assertLessEqual(abs(after - before), 2)

    def round(self, queue, n):
        for k in range(n):
            queue.put(k)
            queue.task_done(queue.get(), success=k % 50 > 0)
            queue.get()
            if k % 50 == 0:
                list(queue.jobs())
                queue.verify(), queue.stats(), queue.compact()

    def test_no_resource_warning(self):
        """A queue dropped without close() warns of nothing."""
        code = (
            "import sys, gc, tiny_queue as tq\n"
            "q = tq.Queue(sys.argv[1]); q.put(1); j = q.get(); list(q.jobs())\n"
            "q.get(timeout=0.01); del q; gc.collect(); del j; gc.collect()\n"
        )
        done = run_python(code, self.path, options=("-W", "error", "-X", "dev"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_running_out_of_descriptors_is_survived(self):
        """EMFILE raises a QueueError; when there are some again, it works."""
        self.open().put(1)
        queue = self.open()
        with patched("os", open=fails(errno.EMFILE)):
            for call in (queue.get, lambda: queue.put(1), queue.stats):
                self.assertRefused(errno.EMFILE, call)
        self.assertDrains(queue, [1])

    def test_descriptors_are_not_inherited(self):
        """Every file that a queue opens closes on exec."""
        queue, opened = self.open(), mock.Mock(wraps=os.open)
        with patched("os", open=opened):
            queue.put(1)
            queue.get()
            queue.compact()
        safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _, flags, *_ in [call.args for call in opened.call_args_list]:
            if flags & (os.O_RDWR | os.O_WRONLY):  # not a directory, to sync it
                self.assertEqual(flags & (safe | os.O_TRUNC), safe)
            self.assertTrue(flags & os.O_CLOEXEC)


# The few primitives that write, sync and replace
# -----------------------------------------------------------------------------


class PrimitivesTest(Case):
    def test_a_sync_reaches_the_disk(self):
        """Files by fdatasync, directories by fsync, which is for files too where
        nothing better is; on macOS the disk's own cache is synced (F_FULLFSYNC)."""
        calls = []

        def record(name):
            return lambda fd: calls.append((name, stat.S_IFMT(os.fstat(fd).st_mode)))

        def control(fd, command, *rest):
            if command == "cache":
                return record("cache")(fd)
            return fcntl.fcntl(fd, command, *rest)

        mac = {"F_FULLFSYNC": "cache", "fcntl": control}
        for n, (named, want) in enumerate((({}, "data"), (mac, "cache"))):
            calls.clear()
            with patched("os", fdatasync=record("data"), fsync=record("full")):
                with patched("fcntl", **named):
                    self.open(path=f"{self.path}{n}", fsync=True).put(1)
            self.assertIn(("full", stat.S_IFDIR), calls)
            files = {name for name, kind in calls if kind == stat.S_IFREG}
            if named or not hasattr(fcntl, "F_FULLFSYNC"):
                self.assertEqual(files, {want})
        plain = types.SimpleNamespace(fsync=calls.append)
        with mock.patch.multiple(tq, fcntl=None, os=plain):
            tq._sync(8)
        self.assertEqual(calls[-1], 8)

    def test_short_writes_and_reads_are_continued(self):
        """What the kernel cuts short is completed, byte for byte."""
        queue = self.open()
        queue.put("first")
        with patched("os", write=half_write):
            queue.put("x" * 100)
            queue.task_done(queue.get())
        with patched("os", pread=lambda fd, n, place: os.pread(fd, min(n, 50), place)):
            self.assertHolds(self.open(), ["x" * 100])

    def test_a_failing_write_is_cut_back(self):
        """EIO after half a line: the file is what it was, and put raises; if
        truncating fails too, the half line is cut by the next call."""
        queue = self.open()
        queue.put("first", id="a")
        before = file_bytes(self.path, "pending")
        for options in ({}, {"id": "b"}):
            write = faulty(os.write, half_write, fails(errno.EIO))
            with patched("os", write=write):
                self.assertRefused(errno.EIO, queue.put, "second", **options)
            self.assertEqual(file_bytes(self.path, "pending"), before)
        write = faulty(os.write, half_write, fails(errno.EIO))
        with patched("os", write=write, ftruncate=fails(errno.EIO)):
            self.assertRefused(errno.EIO, queue.put, "second")
        queue.put("second", id="b")
        self.assertGreater(read_line(file_lines(self.path, "pending")[1])["rev"], 1)
        self.assertDrains(self.open(), ["first", "second"])

    def test_nothing_is_written_behind_what_could_not_be_cut_back(self):
        """Not with the ballast's space either: the two would be one bad line."""
        queue = self.open()
        queue.put(1)
        job = queue.get()
        write = faulty(os.write, half_write, fails(errno.ENOSPC))
        cut = faulty(os.ftruncate, fails(errno.EIO))
        with patched("os", write=write, ftruncate=cut):
            self.assertRefused(errno.ENOSPC, queue.task_done, job)
        queue.task_done(job)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_the_way_to_a_queue_is_synced_as_far_as_it_is_ours(self):
        """Up to where another file system begins, or one may not read."""
        for end in ("device", "mode"):
            path = os.path.join(self.dir, end, "a", "b")
            os.makedirs(path)
            top, synced = os.path.dirname(os.path.dirname(path)), []

            def sync(path, end=end, top=top, synced=synced):
                if path == top and end == "mode":
                    fails(errno.EACCES)()
                synced.append(path)

            def look(path, end=end, top=top):
                other = path == top and end == "device"
                return types.SimpleNamespace(st_dev=other)

            with patched("os", stat=look), mock.patch.object(tq, "_sync_path", sync):
                tq._sync_ancestors(path)
            self.assertEqual(synced, [os.path.dirname(path)])

    def test_a_rewritten_file_keeps_its_owner_where_that_is_allowed(self):
        """fchown is tried if the owner is another; its refusal does not matter."""
        owners = iter([(7, 8), (1, 1)] * 2)

        def owned(fd):
            uid, gid = next(owners)
            return types.SimpleNamespace(st_uid=uid, st_gid=gid, st_mode=0o100640)

        refused = PermissionError(errno.EPERM, "only root may")
        for effect in (None, refused):
            fchown = mock.Mock(side_effect=effect)
            with patched("os", fstat=owned, fchown=fchown):
                tq._keep_mode(1, 2)
            fchown.assert_called_once_with(1, 7, 8)


class WindowsOS(Patched):
    """os as the module finds it on Windows: less of it, and a file that is
    open cannot be replaced or removed."""

    MISSING = set("pread fdatasync fchown fchmod fork register_at_fork".split())
    MISSING |= {"O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "sysconf", "getuid"}

    def __getattr__(self, name):
        if name in self.MISSING:
            raise AttributeError(name)
        return super().__getattr__(name)

    @staticmethod
    def is_open(path):
        """Whether the module has it open."""
        there = os.stat(path)
        for file in list(tq._FDS):
            with contextlib.suppress(OSError):  # of a test before, and closed since
                if os.path.samestat(os.fstat(file.fd), there):
                    return True
        return False

    def open(self, path, flags, mode=0o777):
        if os.path.isdir(path):
            fails(errno.EACCES)()
        return os.open(path, flags, mode)

    def replace(self, source, target):
        for path in (source, target):
            if os.path.exists(path) and self.is_open(path):
                fails(errno.EACCES)()
        os.replace(source, target)


class WindowsLock:
    """msvcrt's lock: of the bytes from the descriptor's place on."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self):
        self.held = {}

    def locking(self, fd, mode, length):
        place = os.lseek(fd, 0, os.SEEK_CUR)
        key = (os.fstat(fd).st_ino, place, length)
        if self.held.setdefault(key, fd) != fd:
            fails(errno.EACCES)()
        if mode == self.LK_UNLCK:
            del self.held[key]


class WindowsTest(Case):
    """What Windows has instead, simulated: never run on a real one."""

    def setUp(self):
        super().setUp()
        self.os, self.lock = WindowsOS(os), WindowsLock()
        fakes = {"os": self.os, "msvcrt": self.lock, "fcntl": None, "_WINDOWS": True}
        for name, fake in fakes.items():
            patch = mock.patch.object(tq, name, fake)
            patch.start()
            self.addCleanup(patch.stop)
        notifier = mock.patch.object(
            tq, "_new_notifier", tq._Notifier
        )  # no CDLL(None) there
        notifier.start()
        self.addCleanup(notifier.stop)

    def assertLetGo(self):
        """No data file is open, and nobody holds the lock."""
        for state in STATES:
            if os.path.exists(file_of(self.path, state)):
                self.assertFalse(self.os.is_open(file_of(self.path, state)), state)
        self.assertEqual(self.lock.held, {})

    def test_a_job_s_life(self):
        """Each operation lets the files go, and two objects agree throughout; who
        comes meanwhile is told that the lock is busy."""
        one, two = (self.open(fsync=True, max_retries=0) for _ in range(2))
        late = self.open(lock_timeout=0.01)

        def write(fd, data):
            with self.assertRaises(tq.LockTimeoutError) as caught:
                late.stats()
            self.assertIsNone(caught.exception.pid)
            return os.write(fd, data)

        for call in (
            lambda: one.put("a", id="a"),
            lambda: two.put_many(list("bc"), ids=list("bc")),
            lambda: one.bury(one.get(), "x"),
            lambda: two.requeue_dead(),
            lambda: one.extend(one.get()),
            lambda: one.compact(),
            lambda: two.cancel("c"),
            lambda: two.compact(),
        ):
            with patched("os", write=write):
                call()
            self.assertLetGo()
            self.assertEqual(one.stats(), two.stats())
        self.assertDrains(self.open(), ["a"])

    def test_an_operation_goes_on_after_a_compaction(self):
        """One that meets damage sets it aside and compacts first; also if that
        fails since another program has the file open."""
        for others in (False, True):
            name = f"q{others}"
            queue = self.open(name=name)
            queue.put_many([1, 2], ids=list("ab"))
            with open(file_of(self.path, "pending", name), "ab") as file:
                file.write(b"damage\n")
            fakes = {"replace": mock.Mock(side_effect=PermissionError)}
            with patched("os", **fakes if others else {}):
                with patched("time", sleep=lambda seconds: None):
                    queue.put(3, id="c")
            for view in self.views(queue):
                self.assertEqual(view.stats()[:4], (3, 0, 0, 0))
                self.assertGreater(view.stats().damaged, 0)

    def test_what_is_acknowledged_is_synced(self):
        """By a descriptor opened for that, of the file that was written."""
        queue, synced = self.open(fsync=True), []
        queue.put(1)
        with mock.patch.object(tq, "_sync", lambda fd: synced.append(os.fstat(fd))):
            queue.put(2)
            queue.task_done(queue.get())
        files = [file_of(self.path, state) for state in ("pending", "inflight")]
        wanted = [os.stat(file).st_ino for file in files]
        self.assertEqual([info.st_ino for info in synced], wanted)
        self.assertLetGo()

    def test_others_compact_between_append_and_sync(self):
        """The put is acknowledged: the compaction has synced it."""
        queue = self.open(fsync=True)
        commit = queue._engine._commit

        def late(ticket):
            self.open().compact()
            commit(ticket)

        with mock.patch.object(queue._engine, "_commit", late):
            queue.put(2, id="b")  # into a file that stays
            queue.cancel("b")  # that is replaced
        self.assertLetGo()
        self.assertEqual(len(self.open()), 0)

    def test_readers_share_a_descriptor(self):
        """Another thread's read does not fall between a seek and its read."""
        path = os.path.join(self.dir, "f")
        pathlib.Path(path).write_bytes(b"0123456789")
        file, found = tq._Fd(path, os.O_RDONLY), []

        def lseek(fd, place, how):
            place = os.lseek(fd, place, how)
            if threading.current_thread() is threading.main_thread():
                other.start()
                other.join(0.05)
            return place

        other = threading.Thread(target=lambda: found.append(tq._pread(file.fd, 2, 8)))
        with patched("os", lseek=lseek):
            self.assertEqual(tq._pread(file.fd, 2, 3), b"34")
            other.join()
        self.assertEqual(found, [b"89"])

    def test_a_file_replaced_under_an_iteration(self):
        """jobs() says so, since its file could not stay open, even where another
        job's line now stands in the same place."""
        lines = [seal({"id": id, "rev": 1, "payload": 1}) for id in "abc"]
        self.write("pending", b"".join(lines))
        queue = self.open()
        jobs = queue.jobs()
        next(jobs)
        queue.stats()  # which lets go what was read
        self.open().cancel("a")
        self.open().compact()
        with self.assertRaisesRegex(tq.QueueError, "call it again"):
            next(jobs)
        self.assertEqual([job.id for job in queue.jobs()], ["b", "c"])

    def test_the_import_needs_neither_fcntl_nor_forks(self):
        """Without them one process can use a queue as ever."""
        copy = types.ModuleType("tiny_queue")
        copy.__dict__["__file__"] = tq.__file__
        with mock.patch.dict(sys.modules, tiny_queue=copy, fcntl=None):
            with mock.patch.object(os, "register_at_fork"):
                del os.register_at_fork
                exec(code_of(tq), copy.__dict__)
        self.assertIsNone(copy.fcntl)
        with copy.Queue(self.path, fsync=False, cross_process_lock=False) as queue:
            queue.put(1)
            queue.task_done(queue.get())
            self.assertEqual(len(queue), 0)


# Lock: of the queue, and of its holders' lives
# -----------------------------------------------------------------------------


def hold_lock(link, path):
    """In a child: hold the flock of a queue until told."""
    with open(os.path.join(path, "default.lock"), "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link.tell(os.getpid())
        link.hear()


class LockTest(Case):
    def test_a_busy_lock_is_waited_for(self):
        """An operation goes on as soon as the lock is free."""
        queue = self.open()
        queue.put(1)
        child = self.spawn(hold_lock, self.path)
        child.hear()
        timer = threading.Timer(3.0 if DEEP else 0.2, child.tell)
        timer.start()
        self.assertEqual(queue.get().payload, 1)
        timer.join()

    def test_lock_timeout_names_the_file_and_the_holder(self):
        """LockTimeoutError has path, timeout and pid; so for an object that
        never had the lock."""
        old = self.open(lock_timeout=0.1)
        old.put(1)
        child = self.spawn(hold_lock, self.path)
        pid = child.hear()
        for queue in (old, self.open(lock_timeout=0.1)):
            start = time.monotonic()
            with self.assertRaises(tq.LockTimeoutError) as caught:
                queue.put(2)
            self.assertLess(time.monotonic() - start, 2.0)
            error = caught.exception
            self.assertEqual(error.path, os.path.join(self.path, "default.lock"))
            self.assertEqual(error.timeout, 0.1)
            self.assertIn(error.path, str(error))
            if os.path.exists("/proc/locks"):
                self.assertEqual(error.pid, pid)
                self.assertIn(str(pid), str(error))
        self.assertEqual(len(file_lines(self.path, "pending")), 1)
        child.tell()
        child.hear()
        old.put(2)
        self.assertDrains(self.open(), [1, 2])

    def test_who_has_waited_for_long_asks_more_often(self):
        """For a while, or it might starve; then not, or the holder might."""
        queue, pauses = self.open(lock_timeout=0.3), []
        queue.put(1)
        self.spawn(hold_lock, self.path).hear()
        clock = Clock()

        def sleep(seconds):
            pauses.append((now(), seconds))
            clock.jump(mono=seconds or 1e-6)

        def now():
            return clock.mono

        with patched("time", sleep=sleep, monotonic=now):
            self.assertRaises(tq.LockTimeoutError, queue.put, 2)
        for start, end, most in ((0, 20, 1.5), (20, 100, 0.75), (100, 300, 1.5)):
            some = [took for at, took in pauses if start < at * 1e3 < end]
            self.assertTrue(most / 2 < max(some) * 1e3 <= most, (start, max(some)))

    def test_a_busy_lock_does_not_stretch_with_the_wall_clock(self):
        """The timeout is measured by the monotonic clock."""
        queue = self.open(lock_timeout=0.1)
        queue.put(1)
        self.spawn(hold_lock, self.path).hear()
        for step in (-3600.0, 3600.0):
            clock = Clock()
            jumping = lambda: clock.jump(step) or clock.time()  # noqa: E731, B023
            with patched("time", time=jumping):
                start = time.monotonic()
                self.assertRaises(tq.LockTimeoutError, queue.put, 2)
            self.assertTrue(0.1 <= time.monotonic() - start < 2.0)

    def test_whatever_flock_answers_is_an_error_of_the_queue(self):
        """Each errno there is, and in no time: QueueError with that errno, a
        lock that stays busy by its name, and not a byte in the queue.  Where
        there is no flock the error names cross_process_lock=False."""
        busy = {errno.EAGAIN, errno.EINTR, errno.EALREADY, errno.EINPROGRESS}
        none = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
        none |= {errno.EBADF, errno.EINVAL}
        for code in errno.errorcode:
            queue = self.open(lock_timeout=0.001)
            start = time.monotonic()
            with patched("fcntl", flock=fails(code)):
                for call in (lambda: queue.put(1), queue.get, queue.stats):  # noqa: B023
                    with self.assertRaises(tq.QueueError) as caught:
                        call()
                    found, said = vars(caught.exception).get("errno"), caught.exception
                    self.assertEqual(found, None if code in busy else code)
                    self.assertEqual("cross_process_lock" in str(said), code in none)
            self.assertLess(time.monotonic() - start, 2.0)
        self.assertEqual(tree(self.dir), {})

    def test_the_lock_file_is_opened_for_writing(self):
        """Where flock is made of byte locks, an exclusive one needs that."""
        modes = []

        def flock(fd, flags):
            modes.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
            return fcntl.flock(fd, flags)

        with patched("fcntl", flock=flock):
            self.open().put(1)
            self.open().stats()
        self.assertEqual(set(modes), {os.O_RDWR})

    def test_a_lock_file_alone_is_an_empty_queue(self):
        """Empty or not, whatever process left it."""
        for data in (b"", b"12345\n", b"\0" * 300_000):
            shutil.rmtree(self.path, True)
            os.mkdir(self.path)
            pathlib.Path(self.path, "default.lock").write_bytes(data)
            queue = self.open(lock_timeout=0.1)
            self.assertIsNone(queue.get())
            queue.put(1)
            self.assertDrains(queue, [1])

    def test_no_flock_where_it_is_not_wanted(self):
        """TINY_QUEUE_NO_FLOCK=1 is the same as cross_process_lock=False."""
        with patched("fcntl", flock=fails(errno.ENOLCK)):
            queue = self.open(cross_process_lock=False)
            queue.put(1)
            self.assertDrains(queue, [1])
            with mock.patch.dict(os.environ, TINY_QUEUE_NO_FLOCK="1"):
                queue = self.open()
                queue.put(1)
                self.assertDrains(queue, [1])

    def test_an_interrupted_flock_is_tried_again(self):
        """EINTR costs nothing."""
        with patched("fcntl", flock=faulty(fcntl.flock, fails(errno.EINTR))):
            self.open().put(1)
        self.assertDrains(self.open(), [1])

    def test_a_failing_close_loses_nothing(self):
        """EIO on closing a file does not undo what was done."""
        with patched("os", close=lambda fd: os.close(fd) or fails(errno.EIO)()):
            with tq.Queue(self.path) as queue:
                queue.put(1)
                queue.compact()
            gc.collect()
        self.assertDrains(self.open(), [1])

    def open_and_close(self, link):
        """Again and again; say so when that is well under way."""
        quick = lambda fd: None  # noqa: E731, no power is cut here
        with patched("os", fsync=quick, fdatasync=quick):
            for n in range(50 if DEEP else 10):
                with self.open(lock_timeout=60.0) as queue:
                    queue.put(n)
                    job = queue.get()
                    if n == 5:
                        link.tell()
                    if job:
                        queue.task_done(job)

    def test_the_lock_file_stays_one_inode(self):
        """Eight processes open, use, close and are killed; the lock file is
        never unlinked or replaced, and a left one blocks nobody."""
        self.open().put(1)
        lock = os.path.join(self.path, "default.lock")
        inode = os.stat(lock).st_ino
        children = [self.spawn(self.open_and_close) for _ in range(8)]
        for child in children:
            child.hear()
        for child in children[::2]:
            child.kill()
        for child in children[1::2]:
            child.hear()
        self.assertEqual(os.stat(lock).st_ino, inode)
        for queue in self.views(self.open()):
            self.assertEqual(sum(queue.stats()[:4]), len(census(self.path)))

    def test_a_deleted_or_replaced_lock_file(self):
        """Everybody moves to the new lock file, and nothing is lost."""
        one, two = self.open(), self.open()
        one.put(1), two.put(2)
        lock = os.path.join(self.path, "default.lock")
        os.unlink(lock)
        one.put(3)
        os.unlink(lock)
        pathlib.Path(lock).write_bytes(b"")
        self.assertEqual(len(two), 3)
        child = self.spawn(hold_lock, self.path)
        child.hear()
        two._engine._lock.timeout = 0.05
        self.assertRaises(tq.LockTimeoutError, two.put, 4)
        child.kill()
        self.assertDrains(two, [1, 2, 3])

    def test_a_live_lease_after_the_lock_file_was_deleted_is_loud(self):
        """The proofs of life went with it: the job may be delivered twice,
        but only one token can settle."""
        one, two = self.open(), self.open()
        one.put(1)
        first = one.get()
        os.unlink(os.path.join(self.path, "default.lock"))
        second = two.get()
        if second:
            self.assertRaises(tq.LeaseLostError, one.task_done, first)
            two.task_done(second)
        else:
            one.task_done(first)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    @unittest.skipUnless(hasattr(fcntl, "F_OFD_SETLK"), "proofs of life need Linux")
    def test_a_lease_after_the_lock_file_was_deleted_is_proved_anew(self):
        """On the new lock file, where everybody looks."""
        one, two = self.open(), self.open()
        one.put_many([1, 2])
        one.get()
        os.unlink(os.path.join(self.path, "default.lock"))
        held = one.get()
        self.assertEqual([job.payload for job in two.get_many(5)], [1])
        self.assertIsNone(two.get())
        one.task_done(held)

    def test_emulated_flock_is_refused(self):
        """Where the holder's byte cannot be locked while the flock is held,
        flock is byte locks: a network file system, said so."""

        def taken(fd, command, *rest):
            if command == fcntl.F_OFD_SETLK:
                fails(errno.EAGAIN)()
            return fcntl.fcntl(fd, command, *rest)

        if not hasattr(fcntl, "F_OFD_SETLK"):
            self.skipTest("no open-file-description locks here")
        self.open().put(1)
        with patched("fcntl", fcntl=taken):
            with self.assertRaisesRegex(tq.QueueError, "network file system"):
                self.open().get()
        self.assertEqual(self.open().get().payload, 1)

    def test_a_busy_thread_lock_times_out_too(self):
        """A thread that waits for another thread's call gets LockTimeoutError."""
        queue = self.open(lock_timeout=0.05)
        writing, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def write(fd, data):
            writing.set()
            go.wait(PATIENCE)
            return os.write(fd, data)

        queue.put(1)
        with patched("os", write=write):
            thread = threading.Thread(target=queue.put, args=(2,))
            thread.start()
            writing.wait(PATIENCE)
            self.assertRaises(tq.LockTimeoutError, queue.stats)
            go.set()
            thread.join()
        self.assertDrains(queue, [1, 2])

    def test_a_holder_that_the_system_does_not_tell(self):
        """Without /proc/locks the error has no pid, and says who it can be."""
        queue = self.open(lock_timeout=0.05)
        queue.put(1)
        self.spawn(hold_lock, self.path).hear()
        with patched("os", open=fails(errno.ENOENT)):
            with self.assertRaisesRegex(tq.LockTimeoutError, "another") as caught:
                queue.put(2)
        self.assertIsNone(caught.exception.pid)

    def lock_bytes(self, error=None):
        """fcntl without locks of open file descriptions, or refusing them."""
        names = {name: getattr(fcntl, name) for name in dir(fcntl)}
        if error is None:
            names = {key: names[key] for key in names if "OFD" not in key}
            return mock.patch.object(tq, "fcntl", types.SimpleNamespace(**names))
        return patched("fcntl", fcntl=mock.Mock(side_effect=error))

    def test_without_locks_of_open_files_time_decides(self):
        """An old kernel's, or another system's: a live lease is respected, with
        or without a holder, and one that ran out is over."""
        old_kernel = OSError(errno.EINVAL, "Invalid argument")
        for n, (error, held) in enumerate([(None, 0), (None, 1), (old_kernel, 0)]):
            clock = Clock()
            queue, other = (self.open(name=f"q{n}") for _ in range(2))
            queue.put(1, id="a")
            if held:
                job = queue.get(lease_timeout=60.0)
            with self.lock_bytes(error), clock.patch():
                job = job if held else queue.get(lease_timeout=60.0)
                self.assertIsNone(other.get())
                self.assertEqual(other.reap_stale(), 0)
                clock.jump(61, 61)
                self.assertEqual(other.get().id, "a")
                self.assertRaises(tq.LeaseLostError, queue.task_done, job)

    @unittest.skipUnless(hasattr(fcntl, "F_OFD_SETLK"), "no such locks here")
    def test_a_holder_s_lock_that_fails_fails_the_get(self):
        """ENOLCK, say: the job is not leased without its proof of life."""
        self.open().put(1, id="a")
        with self.lock_bytes(OSError(errno.EIO, "Input/output error")):
            self.assertRefused(errno.EIO, self.open().get)
        self.assertEqual(self.open().find("a").state, "pending")


@unittest.skipUnless(hasattr(fcntl, "F_OFD_SETLK"), "proofs of life need Linux")
@every_engine
class HolderTest(Case):
    """The kernel says who is alive."""

    def holder(self, link, n=1, **options):
        """In a child: lease n jobs, tell their ids, then do as told."""
        queue = self.open(**options)
        jobs = queue.get_many(n)
        link.tell([job.id for job in jobs])
        while (step := link.hear()) is not None:
            try:
                link.tell(eval(step, {"queue": queue, "jobs": jobs, "tq": tq}))
            except tq.QueueError as exc:
                link.tell(type(exc).__name__)

    def leased_elsewhere(self, **options):
        queue = self.open()
        queue.put("x", id="a")
        child = self.spawn(self.holder, 1, *options)
        self.assertEqual(child.hear(), ["a"])
        return queue, child

    def test_a_killed_holder_s_job_is_back_at_the_next_get(self):
        """With nothing else due, any process's next get has it, counted."""
        queue, child = self.leased_elsewhere()
        other = self.open()
        for view in (queue, other):
            self.assertIsNone(view.get())
        child.kill()
        job = other.get()
        self.assertEqual((job.id, job.attempts), ("a", 2))
        self.assertIn("holder died", job.last_error)
        self.assertIsNone(queue.get())
        other.task_done(job)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_a_waiting_get_notices_within_about_a_second(self):
        """The tick of an idle get asks the kernel at least once a second."""
        queue, child = self.leased_elsewhere()
        found = []
        thread = threading.Thread(
            target=lambda: found.append((queue.get(PATIENCE), time.monotonic()))
        )
        thread.start()
        child.kill()
        killed = time.monotonic()
        thread.join(PATIENCE)
        job, when = found[0]
        self.assertEqual(job.id, "a")
        self.assertLess(when - killed, 2.0)

    def test_on_a_busy_queue_it_is_back_within_a_second(self):
        """Ready jobs do not hide it: asked once a second, it goes ahead of
        others of its priority."""
        queue, child = self.leased_elsewhere()
        queue.put_many(range(5))
        clock = Clock()
        with clock.patch():
            self.assertEqual(queue.get().payload, 0)
            child.kill()
            clock.jump(1.0, mono=1.0)
            self.assertEqual(queue.get().id, "a")
            self.assertEqual(queue.get().payload, 1)

    def test_dead_holders_jobs_come_by_priority(self):
        """Ahead of others of their priority, not of higher ones."""
        queue, children = self.open(), []
        for priority in (2, 9, 5):
            queue.put(priority, priority=priority)
            children.append(self.spawn(self.holder))
            children[-1].hear()
        queue.put(3, priority=3)
        queue.put("same", priority=5)
        for child in children:
            child.kill()
        order = [job.payload for job in iter(queue.get, None)]
        self.assertEqual(order, [9, 5, "same", 3, 2])

    @needs("steady_leases")
    def test_a_live_holder_keeps_its_job_however_the_wall_clock_jumps(self):
        """Leases of the living are judged by the monotonic clock."""
        queue, child = self.leased_elsewhere()
        for jump in (3600.0, -7200.0, 3.2e8, -6.4e8):
            clock = Clock()
            clock.jump(jump)
            with clock.patch():
                for view in self.views(queue):
                    self.assertIsNone(view.get())
                    self.assertEqual(view.reap_stale(), 0)
        child.tell("queue.task_done(jobs[0])")
        self.assertIsNone(child.hear())
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_a_jump_makes_no_lease_immortal(self):
        """A lease taken before the clock was set back still ends in time."""
        queue, _ = self.leased_elsewhere()
        clock = Clock()
        clock.jump(-3.2e8, mono=301.0)
        with clock.patch():
            self.assertEqual(queue.get().id, "a")

    def test_a_stopped_holder_loses_the_lease_at_its_deadline(self):
        """SIGSTOP: another gets the job; the late task_done raises."""
        queue = self.open()
        queue.put("x", id="a")
        child = self.spawn(self.stoppable)
        child.hear()
        child.kill(signal.SIGSTOP)
        start = time.monotonic()
        job = queue.get(timeout=PATIENCE)
        self.assertGreater(time.monotonic() - start, 0.2)
        self.assertEqual((job.id, job.attempts), ("a", 2))
        child.kill(signal.SIGCONT)
        child.tell()
        self.assertEqual(child.hear(), "LeaseLostError")
        queue.task_done(job)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def stoppable(self, link):
        queue = self.open()
        job = queue.get(lease_timeout=0.5)
        link.tell()
        link.hear()
        try:
            queue.task_done(job)
        except tq.LeaseLostError as exc:
            return type(exc).__name__

    def test_a_poison_job_reaches_dead(self):
        """Each delivery kills its process: at once again the first time, then
        after the backoff, then dead, saying that the holder died."""
        clock = Clock(at=1e9)
        with clock.patch():
            queue = self.open(backoff=lambda n: n * 100)
            queue.put("poison", id="a", max_retries=2)
            for attempt in (1, 2, 3):
                job = self.deliver_and_die()
                self.assertEqual(job, ["a"])
                self.assertIsNone(queue.get()) if attempt > 1 else None
                stats = queue.stats()[:4]
                want = {1: (0, 0, 1, 0), 2: (1, 1, 0, 0), 3: (0, 0, 0, 1)}
                self.assertEqual(stats, want[attempt])
                if attempt == 2:
                    self.assertEqual(queue.find("a").run_at, 1e9 + 200)
                    clock.jump(200.0)
        for view in self.views(queue):
            job = view.find("a")
            self.assertEqual((job.state, job.attempts), ("dead", 3))
            self.assertIn("holder died", job.last_error)

    def deliver_and_die(self):
        child = self.spawn(self.holder)
        ids = child.hear()
        child.kill()
        return ids

    def test_a_good_job_behind_a_poison_one_completes(self):
        """A supervisor that restarts its worker, whatever killed that, sees
        each poison delivery once, and the good job done."""
        queue = self.open(backoff=lambda n: 0)
        queue.put("poison", id="p", max_retries=2)
        queue.put("good", id="g")
        started = []
        for _ in range(10):
            child = self.spawn(self.worker)
            try:
                while True:
                    started.append(child.hear())
            except EOFError:
                child.wait()
            if started[-1] is None:
                break
        self.assertEqual(started.count("p"), 3)
        self.assertEqual(started.count("g"), 1)
        dead = self.open().find("p")
        self.assertEqual((dead.state, dead.attempts), ("dead", 3))
        self.assertIn("holder died", dead.last_error)

    def worker(self, link):
        def handler(job):
            link.tell(job.id)
            if job.payload == "poison":
                number = (signal.SIGKILL, signal.SIGSEGV, 0)[job.attempts - 1]
                os.kill(os.getpid(), number)
                os._exit(1)

        worker = tq.Worker(self.open(backoff=lambda n: 0), handler)
        while worker.run_once():
            pass

    def test_a_settled_delivery_ends_a_row_of_deaths(self):
        """After a failure that was told, the next death is a first one again:
        redelivered at once, whatever the backoff."""
        queue = self.open(backoff=lambda n: 0.0)
        queue.put("x", id="a", max_retries=9)
        self.assertEqual(self.deliver_and_die(), ["a"])
        queue.task_done(queue.get(), False, "told")
        self.assertEqual(self.deliver_and_die(), ["a"])
        slow = self.open(backoff=lambda n: 3600.0)
        self.assertEqual(slow.get().attempts, 4)

    def test_a_verdict_on_another_delivery_changes_nothing(self):
        """Whoever decides on an expired lease may be late: it was renewed, or done
        and put again under its id, and leased again."""
        queue = self.open()
        queue.put(1, id="a")
        job, engine = queue.get(), queue._engine
        expired = engine.expired(0.0)
        queue.extend(job)
        self.assertEqual(queue._give_back(expired), 0)
        expired = engine.expired(0.0)
        queue.task_done(job)
        queue.put(2, id="a")
        job = queue.extend(queue.get())
        for crashes in (0, 1):
            late = [one._replace(crashes=crashes) for one in expired]
            self.assertEqual(queue._give_back(late), 0)
        queue.task_done(job)

    def reap_at_once(self):
        """The sum of what several processes' reap_stale() give back."""

        def reaper(link):
            link.tell()
            link.hear()
            return self.open().reap_stale(100)

        children = [self.spawn(reaper) for _ in range(10 if DEEP else 5)]
        for say in (Child.hear, Child.tell):
            for child in children:
                say(child)
        return sum(child.hear() for child in children)

    def long_job(self, clock):
        """A process with a job that has been renewed for 600 seconds."""

        def hold(link):
            queue = self.open()
            job = queue.get()
            while link.tell() or link.hear():
                clock.jump(200.0, mono=200.0)
                queue.extend(job)

        child = self.spawn(hold)
        child.hear()
        for _ in range(3):
            child.tell("on")
            child.hear()
            clock.jump(200.0, mono=200.0)
        return child

    def test_many_reapers_leave_what_is_renewed_and_take_the_rest_once(self):
        """Five at once: none takes a long job whose lease was renewed lately;
        one gives it back when its holder stands still, or dies."""
        queue, clock = self.open(), Clock()
        with clock.patch():
            for end in (lambda child: clock.jump(150.0, mono=150.0), Child.kill):
                queue.put("long")
                child = self.long_job(clock)
                self.assertEqual(self.reap_at_once(), 0)
                end(child)
                self.assertEqual(self.reap_at_once(), 1)
                self.assertEqual(queue.stats()[:4], (1, 0, 0, 0))
                job = queue.get()
                self.assertEqual((job.payload, job.attempts), ("long", 2))
                queue.task_done(job)

    def test_of_two_who_find_a_holder_dead_one_has_each_job(self):
        """What one has seen and left is looked at again before it is taken."""
        queue, other = self.open(), self.open()
        queue.put_many([1, 2])
        child = self.spawn(self.holder, 2)
        child.hear()
        child.kill()
        jobs = [queue.get(), other.get()]
        self.assertEqual([job.payload for job in jobs], [1, 2])
        self.assertIsNone(queue.get())
        other.task_done(jobs[1])

    def test_a_lease_renewed_while_the_backoff_is_asked_stays(self):
        """reap_stale() asks outside the lock, and then looks again."""
        queue = self.open()
        queue.put(1)
        queue.get()
        self.assertEqual(queue.reap_stale(0), 1)
        job = queue.get()

        def backoff(attempt):
            queue.extend(job)
            return 0.0

        self.assertEqual(self.open(backoff=backoff).reap_stale(0), 0)
        queue.task_done(job)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_a_queue_out_of_scope_keeps_its_jobs(self):
        """A held Job keeps the proof of life of a collected Queue."""
        other = self.open()
        other.put(1)
        queue = tq.Queue(self.path, fsync=False)
        job = queue.get()
        del queue
        gc.collect()
        self.assertIsNone(other.get())
        other.task_done(job)
        other.put(2)
        queue = tq.Queue(self.path, fsync=False)
        job = queue.get()
        del queue, job
        gc.collect()
        self.assertEqual(other.get().payload, 2)

    def test_a_handler_that_forks_leaves_no_proof_of_life(self):
        """A grandchild that lives on does not keep its dead parent's job."""
        queue = self.open()
        queue.put("x", id="a")
        child = self.spawn(self.forker)
        grandchild = child.hear()
        self.addCleanup(os.kill, grandchild, signal.SIGKILL)
        child.kill()
        self.assertEqual(queue.get().id, "a")

    def forker(self, link):
        queue = self.open()
        job = queue.get()
        if os.fork() == 0:
            link.tell(os.getpid())
            signal.pause()
        link.hear()
        queue.task_done(job)

    def test_extend_keeps_the_lease_and_the_proof(self):
        """A renewed lease lasts from now, and still ends with its holder."""
        queue, child = self.leased_elsewhere()
        child.tell("queue.extend(jobs[0], 1000).attempts")
        self.assertEqual(child.hear(), 1)
        clock = Clock()
        clock.jump(mono=500.0)
        with clock.patch():
            self.assertIsNone(queue.get())
            child.kill()
            self.assertEqual(queue.get().id, "a")

    @of_files
    def test_without_proofs_the_wall_clock_decides(self):
        """cross_process_lock=False: a lease ends at its deadline, and one that
        would end later than now + its length is over."""
        for jump in (301.0, -400.0):
            clock = Clock(at=1e9)
            with clock.patch():
                queue = self.open(name=f"q{jump < 0:d}", cross_process_lock=False)
                queue.put(1)
                self.assertTrue(queue.get())
                self.assertIsNone(queue.get())
                clock.jump(jump)
                self.assertEqual(queue.get().attempts, 2)

    def test_a_renewal_keeps_the_count_of_dead_holders(self):
        """A job whose holder died, renewed by the next: its death is the second,
        after which there is a backoff."""
        queue = self.open(backoff=lambda n: 60.0)
        queue.put(1, id="a")
        for delayed in (0, 1):
            holder = self.open()
            holder.extend(holder.get())
            holder.close()
            eventually(lambda: queue.reap_stale() == 1)  # a server takes a moment
            self.assertEqual(queue.stats()[:2], (1, delayed))

    def test_somebody_else_gives_back_first(self):
        """What another object has given back meanwhile is not counted twice."""
        queue, other = (self.open(max_retries=0) for _ in range(2))
        queue.put(1, id="a")
        queue.get(lease_timeout=60.0)
        change = queue._engine.change

        def late(changes):
            self.assertEqual(other.reap_stale(0), 1)
            return change(changes)

        with mock.patch.object(queue._engine, "change", late):
            self.assertEqual(queue.reap_stale(0), 0)
        self.assertEqual(queue.find("a").state, "dead")


@every_engine
class ThreadsTest(Case):
    def setUp(self):
        super().setUp()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.addCleanup(sys.setswitchinterval, interval)

    def test_no_job_is_claimed_twice(self):
        """16 threads on one object and 16 on another take 500 jobs."""
        queues, taken = [self.open(), self.open()], []
        queues[0].put_many(range(500))

        def take(queue):
            for job in iter(queue.get, None):
                taken.append(job.payload)
                queue.task_done(job)

        self.run_threads(*[lambda q=q: take(q) for q in queues for _ in range(16)])
        self.assertEqual(sorted(taken), list(range(500)))
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_everything_at_once_on_one_object(self):
        """Puts, gets, settles, views and compactions by 16 threads conserve
        every job."""
        queue, done = self.open(backoff=lambda n: 0), []

        def put(k):
            return [queue.put([k, n], id=f"{k}-{n}") for n in range(20)]

        def take(seed):
            odds = random.Random(SEED + seed)
            while len(done) < 120:
                job = queue.get(timeout=0.05)
                if job and odds.random() < 0.2:
                    queue.release(queue.extend(job))
                elif job:
                    queue.task_done(job)
                    done.append(job.id)

        def look():
            while len(done) < 120:
                self.assertGreaterEqual(min(queue.stats()[:4]), 0)
                if self.place.engine.can_compact:
                    queue.compact()
                list(queue.jobs(limit=5))

        works = [lambda k=k: put(k) for k in range(6)] + [look, look]
        self.run_threads(*works, *[lambda k=k: take(k) for k in range(8)])
        self.assertEqual(len(set(done)), 120)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    def test_durable_puts_of_many_threads(self):
        """With fsync, each of 8 threads' puts is one job."""
        queue = self.open(fsync=True)
        self.run_threads(*[lambda: [queue.put(n) for n in range(20)]] * 8)
        self.assertEqual(len(self.open()), 160)

    @of_files
    def test_who_has_waited_as_long_fails_too(self):
        """When a lock stays busy, threads do not wait for it one after the other."""
        combined, made, errors = tq._Combined(), [], []

        def make(calls):
            made.append(len(calls))
            if len(made) == 1:
                eventually(lambda: len(combined._waiting) == 2)
            raise tq.LockTimeoutError("busy", pid=7)

        def call():
            try:
                combined(make, 1)
            except tq.LockTimeoutError as exc:
                errors.append((str(exc), exc.pid))

        self.run_threads(call, call, call)
        self.assertEqual((made, errors), ([1, 2], [("busy", 7)] * 3))

    @of_files
    def test_who_is_interrupted_while_others_wait(self):
        """At whatever line of a shared call: they are served, each once."""
        for at in itertools.count(1):
            trace = InterrupterBesideWith(tq.__file__, at, KeyboardInterrupt())
            ended, made, threads = self.ask_together(trace)
            alive = [thread.is_alive() for thread in threads]
            self.assertEqual(alive, [False, False], trace.where)
            self.assertEqual(sorted(made)[-2:], [1, 2], trace.where)
            if ended:
                break
        self.assertGreater(at, 15)

    def ask_together(self, trace):
        """Call as 0, traced, and while that is at it as 1 and 2, in threads."""
        combined, made, threads = tq._Combined(), [], []

        def make(calls):
            if not made and calls[0].request == 0:
                for thread in threads:
                    thread.start()
                eventually(lambda: len(combined._waiting) == 2)
            made.extend(call.request for call in calls)
            for call in calls:
                call.answer = True

        for n in (1, 2):
            thread = threading.Thread(target=combined, args=(make, n), daemon=True)
            threads.append(thread)
        ended = trace.run(combined, make, 0)
        for thread in threads:
            if thread.ident is None:
                thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return ended, made, threads

    @of_files
    def test_a_put_that_is_interrupted_before_it_works(self):
        """The next put does not wait for it."""
        queue = self.open(fsync=True)
        with mock.patch.object(tq._Combined, "_lead", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, queue.put, 1)
        queue.put(2)
        self.assertDrains(self.open(), [2])

    @of_files
    def test_a_leader_that_is_interrupted_before_it_wakes_the_others(self):
        """It decides once whom, and wakes them at the second try."""
        call, wakeup = tq._Call(1), threading.Lock()
        wakeup.acquire()
        call.to_wake = [wakeup]
        tq._Combined()._leave(call)
        self.assertEqual((wakeup.locked(), call.ended), (False, True))


@every_engine
class ProcessesTest(Case):
    def test_forked_children_on_one_inherited_object(self):
        """Parent and four children put 50 each through the same object, and
        take them all, each once."""
        queue = self.open()
        queue.put("warm")
        queue.task_done(queue.get())
        held = queue.put("held") and queue.get()

        def work(link):
            ids = [queue.put(n).id for n in range(50)]
            link.tell(ids)
            link.hear()
            return [queue.task_done(job) or job.id for job in iter(queue.get, None)]

        children = [self.spawn(work) for _ in range(4)]
        put = [queue.put(n).id for n in range(50)]
        put += [id for child in children for id in child.hear()]
        self.assertEqual((len(put), len(set(put))), (250, 250))
        for child in children:
            child.tell()
        taken = [id for child in children for id in child.hear()]
        self.assertEqual(sorted(taken), sorted(put))
        queue.task_done(held)
        self.assertEqual(self.open().stats()[:4], (0, 0, 0, 0))

    @of_files
    def test_everybody_starts_at_once_on_an_empty_place(self):
        """Twenty processes open a missing nested directory and wait; the job
        of one goes to exactly one, the others wait their time for nothing."""
        self.path = os.path.join(self.dir, "a", "b", "jobs")
        seconds = 3.0 if DEEP else 1.0

        def starter(link, n):
            link.hear()
            start, cpu = time.monotonic(), time.process_time()
            queue = self.open()
            if n == 0:
                self.assertIsNone(queue.get(timeout=seconds / 3))
                queue.put("one")
            job = queue.get(timeout=seconds)
            if job:
                queue.task_done(job)
            return bool(job), time.monotonic() - start, time.process_time() - cpu

        children = [self.spawn(starter, n) for n in range(20)]
        for child in children:
            child.tell()
        found, times, cpus = zip(*[child.hear() for child in children])
        self.assertEqual(sum(found), 1)
        self.assertGreaterEqual(
            min(t for t, job in zip(times, found) if not job), seconds
        )
        self.assertLess(max(times), seconds * 4 / 3 + 2.0)
        self.assertLess(sum(cpus), 20 * seconds / 10)

    def test_what_put_returned_survives_a_kill(self):
        """A putting child is killed at a random moment: every id that it told
        is pending, at most one more, and no line is torn for a reader."""

        def putter(link, fsync):
            queue = self.open(fsync=fsync)
            while True:
                link.tell(queue.put("x" * 50).id)

        rng, told = random.Random(SEED), set()
        for n in range(60 if DEEP else 12):
            child = self.spawn(putter, n % 2 == 0)
            for _ in range(rng.randrange(1, 40)):
                told.add(child.hear())
            child.kill()
            try:
                while True:
                    told.add(child.hear())
            except (EOFError, ValueError):
                pass
            found = {job.id for job in self.open().jobs()}
            self.assertLessEqual(told, found)
            self.assertLessEqual(len(found - told), n + 1)
        self.assertEqual(self.open().verify(), [])

    def test_a_killed_taker_loses_no_job(self):
        """Takers are killed in mid-work; every job is done in the end, and
        none that was done comes back."""
        queue = self.open(max_retries=1000, backoff=lambda n: 0)
        queue.put_many(range(200), ids=[f"j{n}" for n in range(200)])

        def taker(link):
            mine = self.open(max_retries=1000)
            while job := mine.get():
                mine.task_done(job)
                link.tell(job.id)
                link.hear()

        done, rng = set(), random.Random(SEED)
        for _ in range(6):
            child = self.spawn(taker)
            for _ in range(rng.randrange(1, 20)):
                done.add(child.hear())
                child.tell()
            child.kill()
        left = {job.id for job in iter(lambda: queue.get(timeout=0.2), None)}
        self.assertFalse(left & done)
        self.assertGreaterEqual(len(left) + len(done), 200 - 6)  # done, untold
        self.assertEqual({job.id for job in self.open().jobs()}, left)

    PARENT = """
import os, sys, threading
import tiny_queue as tq
queue = tq.Queue(sys.argv[1])
queue.put("first")
inside, real = threading.Event(), os.write
def slow(fd, data):
    inside.set()
    sys.stdin.readline()
    return real(fd, data)
tq.os.write = slow
thread = threading.Thread(target=queue.put, args=("parent",))
thread.start()
inside.wait()
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    print("child ended", flush=True)
    thread.join()
"""

    @of_files
    def test_a_child_s_normal_exit_does_not_unlock_the_parent(self):
        """While the parent is inside an operation, a forked child runs to the
        end of its interpreter; the lock is still the parent's."""
        parent = subprocess.Popen(
            [sys.executable, "-c", self.PARENT, self.path],
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.addCleanup(parent.kill)
        with parent:
            self.assertEqual(parent.stdout.readline(), b"child ended\n")
            with self.assertRaises(tq.LockTimeoutError):
                self.open(lock_timeout=0.05).put("other")
            parent.stdin.write(b"\n")
        self.assertEqual(parent.returncode, 0)
        self.assertDrains(self.open(), ["first", "parent"])

    def test_a_spawned_program_does_not_keep_the_lock(self):
        """A long-lived child started with close_fds=False, while threads use
        the queue, holds nobody up."""
        queue = self.open(lock_timeout=5.0)
        queue.put(1)
        job = queue.get()
        program = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            close_fds=False,
        )
        self.addCleanup(program.wait)
        self.addCleanup(program.stdin.close)
        start = time.monotonic()
        self.spawn(lambda link: self.open().put(2).payload).hear()
        queue.task_done(job)
        self.assertLess(time.monotonic() - start, 1.0)
        queue.close()
        self.assertDrains(self.open(), [2])

    def test_forking_while_threads_use_the_queue(self):
        """A child forked at any moment of the parent's threads can put."""
        queue, stop = self.open(), threading.Event()

        def work():
            while not stop.is_set():
                queue.put("parent")
                queue.task_done(queue.get())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for n in range(10):
                child = self.spawn(lambda link, n=n: queue.put("child", id=f"c{n}").id)
                self.assertEqual(child.hear(), f"c{n}")
                child.end()
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
        self.assertEqual(queue.verify(), [])

    def test_a_fork_that_python_does_not_know_of(self):
        """Its child tells by its pid: it has ids and locks of its own."""
        queue, closed, looking = self.open(), self.open(), self.open()
        job = queue.put(1)
        closed.put(2)
        with patched("os", getpid=lambda: -1):
            child = queue.put(3)
            self.assertEqual(looking.stats().pending, 3)
            closed.close()
        self.assertNotEqual(job.id.split("-")[0], child.id.split("-")[0])
        self.assertRaises(tq.QueueClosedError, closed.get)
        self.assertDrains(self.open(), [1, 2, 3])

    def test_a_worker_in_a_fork_that_python_does_not_know_of(self):
        """Its leases are its own, as are its parent's."""
        queue = self.open()
        queue.put_many([1, 2])
        mine = queue.get()

        def work(link):
            job = queue.get()
            queue.task_done(job)
            return job.payload, job.token

        with mock.patch.object(tq, "_ENGINES", ()):
            payload, token = self.spawn(work).hear()
        self.assertEqual(payload, 2)
        self.assertNotEqual(mine.token.split("-")[0], token.split("-")[0])
        queue.task_done(mine)
        self.assertEqual(list(self.open().jobs()), [])

    def test_a_renewal_in_a_fork_that_python_does_not_know_of(self):
        """Whoever has the Job may renew its lease and settle it."""
        queue = self.open()
        queue.put(1)
        job = queue.get()
        with patched("os", getpid=lambda: -1):
            self.assertEqual(queue.extend(job).token, job.token)
        queue.task_done(job)
        self.assertEqual(list(self.open().jobs()), [])

    def test_another_makes_the_directory_at_the_same_moment(self):
        """It is used as if this process had made it."""
        self.path = os.path.join(self.dir, "a", "jobs")

        def makedirs(path, mode, exist_ok):
            os.makedirs(path)
            os.makedirs(path, mode, exist_ok)

        with patched("os", makedirs=makedirs):
            self.open().put(1)
        self.assertDrains(self.open(), [1])


# Waking up
# -----------------------------------------------------------------------------


class FakeKqueue:
    """select.kqueue for one file: its events are changes of size."""

    def __init__(self):
        self.fd, self.size = -1, 0

    def control(self, changes, count, timeout=None):
        for event in changes or ():
            self.fd, self.size = event.ident, os.fstat(event.ident).st_size
        deadline = time.monotonic() + (timeout or 0)
        while count and time.monotonic() < deadline:
            size = os.fstat(self.fd).st_size
            if size != self.size:
                self.size = size
                return ["event"]
            time.sleep(0.002)
        return []


class WakingTest(Case):
    """A waiting get hears of a put by whatever the system has."""

    def assertWakes(self, notifier):
        """A put of another object ends the waiting of a get, and time does."""
        queue, other = self.open(), self.open()
        queue.put(0)
        self.assertDrains(queue, [0])
        self.assertIsNone(queue.get(timeout=0.05))
        self.assertIs(type(queue._engine._watch._notifier), notifier)
        found = []
        thread = threading.Thread(target=lambda: found.append(queue.get(PATIENCE)))
        thread.start()
        eventually(lambda: queue._engine._watch._asking)
        began = time.monotonic()
        other.put(1)
        thread.join()
        self.assertLess(time.monotonic() - began, PATIENCE / 4)
        self.assertEqual(found[0].payload, 1)

    def test_kqueue(self):
        """macOS and the BSDs, simulated."""
        flags = "KQ_EV_ADD KQ_EV_CLEAR KQ_FILTER_VNODE KQ_NOTE_WRITE KQ_NOTE_EXTEND"
        flags += " KQ_NOTE_ATTRIB KQ_NOTE_DELETE KQ_NOTE_RENAME"

        def kevent(ident, filter, flags, fflags):
            return types.SimpleNamespace(ident=ident)

        fake = types.SimpleNamespace(kqueue=FakeKqueue, kevent=kevent)
        fake.__dict__.update((name, 1 << n) for n, name in enumerate(flags.split()))
        with mock.patch.dict(sys.modules, select=fake):
            self.assertWakes(tq._Kqueue)

    def libc(self, **fakes):
        """A C library with other functions in the place of some."""
        import ctypes

        real = ctypes.CDLL(None, use_errno=True)
        return mock.patch("ctypes.CDLL", lambda *_, **__: Patched(real, **fakes))

    def on_linux(self):
        if not sys.platform.startswith("linux"):
            self.skipTest("no inotify here")

    def test_no_inotify_instance_left(self):
        """Then the file is polled."""
        self.on_linux()
        with self.libc(inotify_init1=lambda flags: -1):
            self.assertWakes(tq._Notifier)

    def test_no_inotify_watch_left(self):
        """Then, too."""
        self.on_linux()
        with self.libc(inotify_add_watch=lambda *args: -1):
            self.assertWakes(tq._Notifier)

    def test_a_readiness_with_nothing_to_read(self):
        """It costs another look."""
        self.on_linux()
        notifier = tq._Inotify()
        with mock.patch.object(notifier, "_poll") as poll:
            poll.poll.side_effect = [[1], []]
            self.assertTrue(notifier.wait(0.0))
            self.assertFalse(notifier.wait(0.0))

    def test_a_polled_file_that_is_gone(self):
        """That is a change like any other."""
        path = os.path.join(self.dir, "f")
        pathlib.Path(path).write_bytes(b"")
        notifier = tq._Notifier()
        notifier.arm(path, None)
        self.assertFalse(notifier.wait(0.0))
        os.unlink(path)
        self.assertTrue(notifier.wait(0.0))

    def test_a_file_that_another_thread_opens_anew(self):
        """It is closed for a moment, after which the waiting thread looks again."""
        queue = self.open()
        watch, began = queue._engine._watch, time.monotonic()
        watch.wait(watch.events, tq._Data(0, file_of(self.path, "pending")), PATIENCE)
        self.assertLess(time.monotonic() - began, PATIENCE / 4)
        self.assertEqual(watch.events, 1)

    def test_a_queue_closed_between_looking_and_waiting(self):
        """The get ends at once, with QueueClosedError."""
        queue = self.open()
        wait = queue._engine.wait

        def late(seen, seconds):
            queue.close()
            wait(seen, seconds)

        with mock.patch.object(queue._engine, "wait", late):
            self.assertRaises(tq.QueueClosedError, queue.get, PATIENCE)


# Databases: one engine, two dialects
# =============================================================================


@every_engine(needs="can_join")
class JoinTest(Case):
    """put() and task_done() inside the caller's own transaction."""

    def setUp(self):
        super().setUp()
        self.queue = self.open(backoff=lambda n: 0, max_retries=1)
        self.queue.put("first", id="a")
        self.conn = self.place.connect(self.path)
        self.addCleanup(self.conn.close)
        self.conn.execute("CREATE TABLE effects (job text)")
        self.conn.commit()

    def effect(self, job="a"):
        self.conn.execute(f"INSERT INTO effects (job) VALUES ('{job}')")

    def effects(self):
        with contextlib.closing(self.place.connect(self.path)) as conn:
            return [row[0] for row in conn.execute("SELECT job FROM effects")]

    def test_put_is_there_when_the_caller_commits(self):
        """A rollback takes the jobs along; nobody sees them before."""
        for end, want in ((self.conn.rollback, 1), (self.conn.commit, 4)):
            self.effect()
            job = self.queue.put(2, id="b", connection=self.conn)
            self.queue.put_many([3, 4], delay=60, connection=self.conn)
            self.assertEqual((job.id, len(self.queue)), ("b", 1))
            end()
            for view in self.views(self.queue):
                self.assertEqual(len(view), want)
        self.assertEqual(self.effects(), ["a"])

    def test_a_settlement_is_there_when_the_caller_commits(self):
        """Done, retried or dead: with the effect, or not at all."""
        states = []
        for outcome in ((False, "no"), (False, "no"), (True,)):
            self.queue.requeue_dead()
            job = self.queue.get()
            self.effect()
            self.queue.task_done(job, *outcome, connection=self.conn)
            self.conn.rollback()
            self.assertEqual(self.queue.find("a"), job)
            self.effect()
            self.queue.task_done(job, *outcome, connection=self.conn)
            self.assertEqual(self.queue.find("a").state, "inflight")
            self.conn.commit()
            self.assertRaises(tq.LeaseLostError, self.queue.task_done, job)
            states.append([job.state for job in self.queue.jobs()])
        self.assertEqual(states, [["pending"], ["dead"], []])
        self.assertEqual(len(self.effects()), 3)

    def test_a_handler_may_settle_its_job_together_with_its_effects(self):
        """The Worker counts what the handler settled; what was not committed
        has failed, or its effects would be lost."""
        self.queue.put_many([0, 1, 2])

        def handler(job):
            with contextlib.closing(self.place.connect(self.path)) as conn:
                conn.execute(f"INSERT INTO effects (job) VALUES ('{job.id}')")
                self.queue.task_done(job, job.payload != 1, connection=conn)
                conn.rollback() if job.payload == 2 else conn.commit()

        worker = tq.Worker(self.queue, handler, max_jobs=4)
        with self.assertNoLogs():
            totals = worker.run_forever()
        self.assertEqual((totals.done, totals.retried, totals.lost), (2, 2, 0))
        left = {job.payload: job.last_error for job in self.queue.jobs()}
        self.assertEqual(left, {1: None, 2: "settled, but never committed"})
        self.assertEqual(len(self.effects()), 3)

    def assertNoLogs(self):
        return mock.patch.object(tq, "_log", side_effect=AssertionError("logged"))

    def test_a_lost_lease_leaves_the_transaction_as_it_was(self):
        """LeaseLostError, and the caller may still commit what he wrote."""
        job = self.queue.get()
        self.queue.release(job)
        self.effect()
        for outcome in (True, False):
            with self.assertRaises(tq.LeaseLostError):
                self.queue.task_done(job, outcome, connection=self.conn)
        self.conn.commit()
        self.assertEqual(self.effects(), ["a"])
        self.assertEqual(self.queue.find("a").state, "pending")

    def test_a_duplicate_leaves_the_transaction_as_it_was(self):
        """One living id refuses all, those put in it too; the rest stays."""
        self.effect()
        self.queue.put(1, id="b", connection=self.conn)
        for ids in (["c", "a"], ["c", "b"]):
            with self.assertRaises(tq.DuplicateJobError):
                self.queue.put_many([1, 2], ids=ids, connection=self.conn)
        found = self.queue.put(5, id="a", exist_ok=True, connection=self.conn)
        self.assertEqual(found.payload, "first")
        self.conn.commit()
        self.assertEqual([job.id for job in self.queue.jobs()], ["a", "b"])
        self.assertEqual(self.effects(), ["a"])

    def test_bad_arguments_leave_the_transaction_as_it_was(self):
        """As without a connection: TypeError, ValueError, nothing put."""
        self.effect()
        for bad in ({"payload": {1, 2}}, {"payload": 1, "id": ""}):
            with self.assertRaises((TypeError, ValueError)):
                self.queue.put(**bad, connection=self.conn)
        self.conn.commit()
        self.assertEqual((len(self.queue), self.effects()), (1, ["a"]))

    def test_a_ctrl_c_before_the_call_has_begun(self):
        """There is nothing to take back, and it arrives as itself."""
        real = tq._SqlLink.execute

        def execute(link, text, keys=None):
            if text == "SAVEPOINT tiny_queue":
                raise KeyboardInterrupt
            return real(link, text, keys)

        self.effect()
        with mock.patch.object(tq._SqlLink, "execute", execute):
            with self.assertRaises(KeyboardInterrupt):
                self.queue.put(2, connection=self.conn)
        self.conn.rollback()
        self.assertDrains(self.queue, ["first"])

    def test_what_is_no_connection_to_it_is_refused(self):
        """Any other object, and one to another database."""
        for bad in (object(), "connection", self.queue):
            self.assertRaises(TypeError, self.queue.put, 1, connection=bad)
        other = tempfile.mkdtemp(dir=self.dir)
        with contextlib.closing(self.place.elsewhere(other)) as conn:
            self.assertRaises(ValueError, self.queue.put, 1, connection=conn)
        self.assertEqual(len(self.queue), 1)

    def test_another_object_settles_it_first_of_all(self):
        """It need not have used the database before."""
        job = self.queue.get()
        self.open().task_done(job, connection=self.conn)
        self.conn.commit()
        self.assertEqual(list(self.queue.jobs()), [])

    def test_a_closed_queue_joins_nothing(self):
        """QueueClosedError, and the transaction is as it was."""
        self.effect()
        self.queue.close()
        with self.assertRaises(tq.QueueClosedError):
            self.queue.put(1, id="b", connection=self.conn)
        self.conn.commit()
        self.assertEqual((self.effects(), len(self.open())), (["a"], 1))

    def test_a_fork_that_python_does_not_know_of_joins(self):
        """Its child tells by its pid, and settles in a transaction of its own."""
        job = self.queue.get()
        with patched("os", getpid=lambda: -1):
            self.queue.task_done(job, connection=self.conn)
        self.conn.commit()
        self.assertEqual(list(self.open().jobs()), [])

    def test_a_commit_ends_another_s_wait(self):
        """A waiting get has the job as soon as the caller commits."""

        def waiter(link):
            queue = self.open()
            self.assertIsNone(queue.get())
            link.tell("waiting")
            return queue.get(timeout=PATIENCE).payload

        self.queue.task_done(self.queue.get())
        child = self.spawn(waiter)
        child.hear()
        self.queue.put("joined", connection=self.conn)
        start = time.monotonic()
        self.conn.commit()
        self.assertEqual(child.hear(), "joined")
        self.assertLess(time.monotonic() - start, 2.0)


def unsynced_answers(case, queue, fast):
    """Calls that rest on a job that `fast` put just before, without fsync."""
    refused = functools.partial(case.assertRaises, tq.DuplicateJobError)
    for answer in (
        lambda: queue.put(1, id="a", exist_ok=True),
        lambda: refused(queue.put, 1, id="a"),
        lambda: refused(queue.put_many, [1, 2], ids=["new", "a"]),
    ):
        fast.put(0, id="a")
        yield answer
        fast.purge("pending")


@every_engine(needs="can_join")
class DurableVerbsTest(Case):
    """How the database was asked to commit what each verb changes."""

    def setUp(self):
        super().setUp()
        self.path = self.path.replace("commit%3Doff", "commit%3Don")

    def verbs(self, queue):
        """Each one, and whether what it does must survive a power cut: a lease
        may be forgotten, its job is pending then."""
        held = []
        yield "put", True, lambda: queue.put(0, id="a", max_retries=0)
        yield "put_many", True, lambda: queue.put_many(range(1, 7))
        yield "get", False, lambda: held.append(queue.get())
        yield "get_many", False, lambda: held.extend(queue.get_many(6))
        yield "extend", False, lambda: queue.extend(held[0])
        yield "done", True, lambda: queue.task_done(held.pop())
        yield "retry", True, lambda: queue.task_done(held.pop(), False, "why")
        yield "release", True, lambda: queue.release(held.pop())
        yield "bury", True, lambda: queue.bury(held.pop(), "why")
        yield "reap, one dies", True, lambda: queue.reap_stale(0)
        yield "requeue one", True, lambda: queue.requeue_dead("a")
        yield "cancel", True, lambda: queue.cancel("a")
        yield "requeue all", True, queue.requeue_dead
        yield "get again", False, lambda: held.append(queue.get())
        yield "dead", True, lambda: queue.task_done(held.pop(), False, "why")
        yield "purge", True, lambda: queue.purge("pending")

    def test_each_verb_is_on_disk_when_it_returns(self):
        """With fsync=True; without it nothing is waited for."""
        seen = self.place.watch_commits(self, self.path)
        for fsync in (True, False):
            options = {"fsync": fsync, "max_retries": 1, "backoff": lambda n: 0}
            queue = self.open(name=f"q{fsync:d}", **options)
            for name, durable, verb in self.verbs(queue):
                verb()
                self.assertEqual({*seen()}, {durable and fsync}, (name, fsync))
            self.assertEqual(queue.stats()[:4], (0, 0, 0, 1))

    def test_a_worker_s_settlements_are_on_disk(self):
        """Done, retried or dead, whatever is leased by the same commit."""
        seen = self.place.watch_commits(self, self.path)
        queue = self.open(fsync=True, max_retries=0)
        queue.put_many(range(3))
        self.assertEqual({*seen()}, {True})
        totals = tq.Worker(
            queue, lambda job: 1 // job.payload, max_jobs=3
        ).run_forever()
        self.assertEqual((totals.done, totals.dead), (2, 1))
        found = seen()
        self.assertGreaterEqual(found.count(True), 3)
        self.assertEqual((found[0], found[-1]), (False, True))

    def test_both_sides_of_a_move_are_on_disk(self):
        """All that the target is given, and that the source's are held and gone."""
        source, target = self.path, self.place.where(tempfile.mkdtemp(dir=self.dir))
        target = target.replace("commit%3Doff", "commit%3Don")
        self.addCleanup(self.place.clean, target)
        seen = [self.place.watch_commits(self, where) for where in (source, target)]
        self.open().put_many(range(3))
        self.assertEqual([{*found()} for found in seen], [{False}, set()])
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(tq.main(["move", source, target]), 0)
        found = [found() for found in seen]
        self.assertEqual({*found[0], *found[1]}, {True})
        self.assertEqual((len(self.open()), len(self.open(path=target))), (0, 3))

    def test_what_joins_a_transaction_is_as_durable_as_that(self):
        """The caller's setting counts, whatever the queue's."""
        seen = self.place.watch_commits(self, self.path)
        for synced in (True, False):
            queue = self.open(name=f"q{synced:d}", fsync=not synced)
            queue.put_many([0, 1])
            first, second = queue.get_many(2)
            seen()
            conn = self.place.connect(self.path)
            self.addCleanup(conn.close)
            self.place.set_synced(conn, synced)
            for verb, *args in (
                (queue.put, 2),
                (queue.put_many, [3, 4]),
                (queue.task_done, first),
                (queue.task_done, second, False, "why"),
            ):
                verb(*args, connection=conn)
                self.assertEqual(seen(), [])
                conn.commit()
                self.assertEqual({*seen()}, {synced}, verb)


class DirectoryJoinTest(Case):
    def test_a_directory_refuses_a_connection(self):
        """ValueError, with nothing written."""
        queue = self.open()
        with contextlib.closing(sqlite3.connect(":memory:")) as conn:
            self.assertRaises(ValueError, queue.put, 1, connection=conn)
            self.assertRaises(ValueError, queue.put_many, [1], connection=conn)
        self.assertFalse(os.path.exists(self.path))


class ExactlyOnceTest(Case):
    """Killed at any step of SQLite, a handler's effects are there once."""

    place = SqlitePlace()
    JOBS, STRIDE, LEAST = 2, 7, 20

    def prepare(self):
        with tq.Queue(self.path, fsync=False, max_retries=99) as queue:
            queue.put_many(range(self.JOBS))
        with contextlib.closing(self.place.connect(self.path)) as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS effects (job integer)")
            conn.execute("DELETE FROM effects")
            conn.commit()

    def watch(self, conn, step):
        """Call step() at each instruction of a statement."""
        conn.set_progress_handler(step, 1)

    def work(self, step):
        """Do all jobs; step() is called at every step of the transactions."""
        queue = tq.Queue(self.path, fsync=False, max_retries=99, backoff=lambda n: 0)
        conn = self.place.connect(self.path)
        self.watch(conn, step)
        while len(queue) or queue.stats().inflight:
            for job in iter(queue.get, None):
                step()
                conn.execute(f"INSERT INTO effects VALUES ({job.payload})")
                step()
                queue.task_done(job, connection=conn)
                step()
                conn.commit()
                step()
        conn.close()
        queue.close()

    def killed_at(self, number):
        """Work in a child that dies at a step; whether it had so many."""
        pid = os.fork()
        if pid == 0:
            steps = itertools.count(1)

            def step():
                if next(steps) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                self.work(step)
            finally:
                os._exit(0)
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

    def test_each_effect_is_there_once_wherever_it_dies(self):
        """The job and what its handler wrote commit together or not at all."""
        number, kills, killed = 1, 0, True
        stride = 1 if DEEP else self.STRIDE
        while killed:
            self.prepare()
            killed = self.killed_at(number)
            self.work(lambda: None)
            with contextlib.closing(self.place.connect(self.path)) as conn:
                found = conn.execute("SELECT job FROM effects ORDER BY job").fetchall()
            self.assertEqual([row[0] for row in found], list(range(self.JOBS)), number)
            kills, number = kills + killed, number + stride
        name = type(self).__name__
        print(f"\n{name}: {kills} kills in a handler", file=sys.stderr)
        self.assertGreater(kills, self.LEAST)


@every_engine(needs="can_join")
class DatabaseTest(Case):
    def statements(self):
        """A patch that collects what links execute, and the list of it."""
        said, real = [], tq._SqlLink.execute

        def execute(link, text, params=None):
            said.append(text)
            return real(link, text, params)

        return mock.patch.object(tq._SqlLink, "execute", execute), said

    def test_another_transaction_has_the_id(self):
        """LockTimeoutError in time, which hints at connection=, with nothing put;
        after its commit the id is alive."""
        queue = self.open(lock_timeout=0.2)
        queue.put(0)
        with contextlib.closing(self.place.connect(self.path)) as conn:
            queue.put("theirs", id="x", connection=conn)
            start = time.monotonic()
            with self.assertRaisesRegex(tq.LockTimeoutError, "connection=") as caught:
                queue.put("mine", id="x")
            self.assertTrue(0.2 <= time.monotonic() - start < 4.0)
            self.assertEqual(caught.exception.timeout, 0.2)
            self.assertFalse(caught.exception.outcome_unknown)
            self.assertEqual(len(queue), 1)
            conn.commit()
        self.assertRaises(tq.DuplicateJobError, queue.put, "mine", id="x")
        self.assertDrains(self.open(), [0, "theirs"])

    def test_tables_of_another_format_are_refused(self):
        """With both numbers and what to do, and nothing touched."""
        self.open().put(1)
        for found in (1, 99):
            with contextlib.closing(self.place.connect(self.path)) as conn:
                conn.execute(f"UPDATE tiny_queue_queues SET format = {found}")
                conn.commit()
            before = self.place.raw(self.path)
            for call in (lambda q: q.put(2), len, tq.Queue.get):
                with self.assertRaisesRegex(
                    tq.QueueError, f"format {found} .* knows 2.* move the jobs back"
                ):
                    call(self.open())
            self.assertEqual(self.place.raw(self.path), before)

    def test_many_jobs_are_shown_in_pages(self):
        """No transaction is open meanwhile; what is gone is left out."""
        queue = self.open()
        queue.put_many(range(1200))
        jobs = queue.jobs()
        first = [next(jobs).payload for _ in range(5)]
        self.open(lock_timeout=0.0).put("others can write")
        queue.purge("pending")
        self.assertEqual(first + [job.payload for job in jobs], list(range(500)))

    def test_a_job_that_changes_is_shown_once(self):
        """As it was, or not at all: of the later pages what was leased, settled
        or put meanwhile is left out."""
        queue = self.open()
        queue.put_many(range(8))
        with mock.patch.object(tq, "_SQL_PAGE", 2):
            jobs = queue.jobs()
            found = [next(jobs).payload]
            leased = queue.get_many(4)
            queue.bury(leased[3], "why")
            queue.release(leased[2])
            queue.put(8)
            found += [job.payload for job in jobs]
        self.assertEqual(found, [0, 1, 4, 5, 6, 7])

    def test_purging_looks_at_the_age_page_by_page(self):
        """However many are younger; those of the last delivery, too."""
        queue, clock = self.open(), Clock(at=1e9)
        with clock.patch(), mock.patch.object(tq, "_SQL_PAGE", 3):
            queue.put_many(range(5))
            clock.jump(60)
            queue.put_many(range(5, 10))
            queue.bury(queue.get(), "why")
            self.assertEqual(queue.purge("dead", older_than=30), 0)
            self.assertEqual(queue.purge("pending", older_than=30), 4)
        self.assertDrains(self.open(), range(5, 10))

    def test_an_answer_that_rests_on_a_row_syncs_it(self):
        """It may be of a process without fsync: DuplicateJobError and exist_ok
        commit something of their own (I5)."""
        self.open().put(1, id="a")
        for fsync in (True, False):
            queue = self.open(fsync=fsync)
            self.assertEqual(len(queue), 1)
            patch, said = self.statements()
            with patch:
                queue.put(2, id="a", exist_ok=True)
                self.assertRaises(tq.DuplicateJobError, queue.put, 2, id="a")
            touches = [text for text in said if "SET format = format" in text]
            self.assertEqual(len(touches), 2 if fsync else 0)

    def test_an_id_that_comes_and_goes(self):
        """Alive at the put, gone at the look, ever again: an error in the end."""
        queue = self.open()
        queue.put(1)
        with mock.patch.object(queue._engine, "_insert", return_value={}) as insert:
            with self.assertRaisesRegex(tq.QueueError, "comes and goes"):
                queue.put(2, id="x")
            with self.assertRaisesRegex(tq.QueueError, "comes and goes"):
                queue.put_many([2, 3], ids=["x", "y"])
        self.assertGreater(insert.call_count, 10)
        self.assertDrains(queue, [1])

    def test_a_take_makes_its_changes_first(self):
        """In one transaction: whoever lost his lease is told, and many changes
        are as good as one."""
        queue = self.open()
        queue.put_many(range(24), priority=1)
        queue.put_many(["next", "last"])
        jobs = queue.get_many(24)
        queue.cancel(jobs[1].id)
        done = [tq._Change(job.id, job.token, "done") for job in jobs]
        take = functools.partial(queue._engine.take, 1, 60.0, True, tq._LOWEST)
        made, (job,), _ = take(done[:3])
        self.assertEqual((made, job.payload), ([True, False, True], "next"))
        made, (other,), _ = take(done[3:])
        self.assertEqual((made, other.payload), ([True] * 21, "last"))
        again = tq._Change(job.id, job.token, "done")
        self.assertEqual(take([again, again])[:2], ([True, False], []))
        self.assertEqual([job.payload for job in self.open().jobs()], ["last"])

    def test_a_payload_s_and_an_error_s_every_character_comes_back(self):
        """NUL, half a surrogate pair, a backslash: by whichever way it is put."""
        text = "\0 \\0 \ud800 \\ud800 \N{SNOWMAN} \U0001f600 %s :now {NOW}"
        queue = self.open(backoff=lambda n: 0)
        queue.put(text, id="a\\b\ud800")
        queue.put_many([text, {text: text}])
        job = queue.get()
        queue.task_done(job, False, text)
        for view in self.views(queue):
            found = view.find("a\\b\ud800")
            self.assertEqual((found.payload, found.last_error), (text, text))
        self.assertDrains(queue, [text, {text: text}, text])

    def test_a_wait_for_what_comes_from_now_on(self):
        """It ends in time without a job, and at once with one that is due."""
        queue = self.open()
        queue.put(1, delay=3600)
        start = time.monotonic()
        queue._engine.wait(None, 0.05)
        seen = queue._engine._watch.events, -math.inf, None
        queue._engine.wait(seen[:2] if self.place.name == "Postgres" else seen, 9.0)
        self.assertLess(time.monotonic() - start, 5.0)


# SQLite
# -----------------------------------------------------------------------------


class SqliteTest(Case):
    place = SqlitePlace()

    def setUp(self):
        super().setUp()
        self.file = os.path.join(self.dir, "jobs.db")

    def connect(self, **options):
        conn = sqlite3.connect(self.file, isolation_level=None, **options)
        self.addCleanup(conn.close)
        return conn

    def test_urls(self):
        """Three slashes and a relative path, four and an absolute one; percent
        signs as in any URL."""
        before = os.getcwd()
        os.chdir(self.dir)
        try:
            for url in (self.path, "sqlite:///jobs.db", "sqlite:///./%6aobs.db"):
                queue = self.open(path=url)
                self.assertEqual(queue.path, f"sqlite:///{os.path.realpath(self.file)}")
                queue.put(url)
        finally:
            os.chdir(before)
        self.assertEqual(len(self.open()), 3)
        self.open(path=f"sqlite:///{self.dir}/50%25 a?b.db".replace("?", "%3F")).put(1)
        self.assertTrue(os.path.exists(os.path.join(self.dir, "50% a?b.db")))

    def test_urls_that_name_no_file(self):
        """In memory, a host, an unknown option: ValueError, nothing made."""
        for rest in ("", "/", "/:memory:", "/file::memory:", "host/a.db", "a.db",
                     f"/{self.file}?mode=ro", "/a%00b"):  # fmt: skip
            with self.subTest(rest):
                self.assertRaises(ValueError, tq.Queue, f"sqlite://{rest}")
        with self.assertRaisesRegex(ValueError, "cross_process_lock"):
            self.open(cross_process_lock=False)
        self.assertEqual(os.listdir(self.dir), [])

    def test_it_lives_in_the_application_s_database(self):
        """Beside tables of the same names as its columns; nothing of theirs
        changes, the user_version neither."""
        conn = self.connect()
        conn.execute("PRAGMA user_version = 7")
        conn.execute("CREATE TABLE jobs (id, queue, state)")
        conn.execute("INSERT INTO jobs VALUES (1, 2, 3)")
        queue = self.open()
        self.assertEqual((len(queue), queue.verify()), (0, []))
        queue.put("x")
        self.open(name="other").put("y")
        self.assertDrains(queue, ["x"])
        tables = "SELECT name FROM sqlite_master WHERE name NOT LIKE 'tiny_queue_%'"
        self.assertEqual(
            [row[0] for row in conn.execute(tables)],
            ["jobs"] + ["sqlite_autoindex_tiny_queue_queues_1"],
        )
        self.assertEqual(conn.execute("PRAGMA user_version").fetchone(), (7,))
        self.assertEqual(conn.execute("SELECT * FROM jobs").fetchall(), [(1, 2, 3)])

    def test_looking_at_somebody_s_database_adds_nothing(self):
        """Until the first put there is no table of ours in it."""
        self.connect().execute("CREATE TABLE theirs (x)")
        queue = self.open()
        self.assertEqual((queue.get(), len(queue), list(queue.jobs())), (None, 0, []))
        names = self.connect().execute("SELECT name FROM sqlite_master").fetchall()
        self.assertEqual(names, [("theirs",)])

    def all_statements(self):
        """Each statement of the dialect, by name, in SQLite's words."""
        engine = self.open()._engine
        for name, value in vars(tq).items():
            if name.startswith(("_SQL_", "_SQLITE_")):
                texts = value.values() if isinstance(value, dict) else [value]
                for text in texts:
                    if isinstance(text, str) and re.match(r"(SELECT|UPDATE|DEL)", text):
                        yield name, engine._sql(text).replace("LIVING", "1")

    def test_hot_statements_are_short_index_scans(self):
        """No scan of a table, no sorting: far-future jobs cost nothing."""
        self.open().put(1)
        conn, count = self.connect(), 0
        for name, statement in self.all_statements():
            if name not in ("_SQL_QUEUES", "_SQL_RECORDS", "_SQLITE_PAYLOADS"):
                values = dict.fromkeys(re.findall(r":([a-z_]+)", statement), 1)
                plan = conn.execute(f"EXPLAIN QUERY PLAN {statement}", values)
                told, count = "; ".join(row[3] for row in plan), count + 1
                if name != "_SQL_EXPIRED":  # of the few that are inflight
                    self.assertNotIn("TEMP B-TREE", told, name)
                self.assertNotRegex(told, "SCAN (TABLE )?tiny_queue_jobs", name)
        self.assertGreater(count, 12)

    def test_nothing_newer_than_sqlite_3_31(self):
        """No RETURNING, UPDATE FROM, window or JSON functions."""
        for name, text in self.all_statements():
            self.assertNotRegex(text, r"RETURNING|OVER|json_|STRICT|iif", name)
            if text.startswith("UPDATE"):
                self.assertNotRegex(
                    text.split("WHERE")[0], r"FROM (?!tiny_queue_jobs NOT)"
                )

    def test_a_poll_of_an_idle_queue_takes_no_lock(self):
        """While somebody else writes, looking for a job does not wait."""
        queue = self.open(lock_timeout=0.0)
        queue.put(1, delay=3600)
        self.connect().execute("BEGIN IMMEDIATE")
        for _ in range(100):
            self.assertIsNone(queue.get())

    def test_a_full_disk(self):
        """put raises with nothing kept; with space again, all goes on."""
        queue = self.open()
        queue.put("first")
        db = queue._engine._link.cursor
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with self.assertRaisesRegex(tq.QueueError, "free some space"):
            queue.put("x" * 100_000)
        with self.assertRaises(tq.QueueError):
            queue.put_many(["y" * 100] * 1000)
        self.assertEqual(len(self.open()), 1)
        db.execute("PRAGMA max_page_count = 100000")
        queue.put("second")
        self.assertDrains(self.open(), ["first", "second"])

    def test_what_is_no_database(self):
        """A text file, a directory, a missing folder: one clear error."""
        text = os.path.join(self.dir, "text")
        pathlib.Path(text).write_text("no database at all" * 100)
        for path, word in (
            (text, "not a database"),
            (self.dir, "unable to open"),
            (os.path.join(self.dir, "no", "a.db"), "unable to open"),
        ):
            queue = self.open(path=f"sqlite:///{path}")  # fmt: skip
            with self.assertRaisesRegex(tq.QueueError, word):
                queue.put(1)
        with self.assertRaisesRegex(tq.QueueError, "not a database"):
            self.open(path=f"sqlite:///{text}").verify()
        self.assertEqual(pathlib.Path(text).read_text(), "no database at all" * 100)

    def test_a_damaged_database_is_told(self):
        """verify() lists what is wrong; nothing but QueueError is raised."""
        queue = self.open()
        queue.put_many(["x" * 500] * 200)
        queue.close()
        with open(self.file, "r+b") as file:
            for page in range(8, os.path.getsize(self.file) // 4096):
                file.seek(page * 4096)
                file.write(b"\xff" * 4096)
        queue = self.open()
        damage = queue.verify()
        self.assertEqual({item.file for item in damage}, {"jobs.db"})
        with self.assertRaisesRegex(tq.QueueError, "malformed.*backup"):
            list(queue.jobs())

    def test_a_payload_that_is_no_json_is_told(self):
        """By hand in the table: verify() has its row, other jobs go on."""
        queue = self.open()
        queue.put_many(["a", "b"], ids=["a", "b"])
        self.connect().execute("UPDATE tiny_queue_jobs SET payload='{' WHERE id='a'")
        (damage,) = queue.verify()
        self.assertEqual(damage[:2], ("jobs.db", 1))
        self.assertEqual(queue.get().payload, "b")
        job = queue.find("a")
        self.assertEqual((job.state, job.payload), ("dead", None))
        self.assertIn("not JSON", job.last_error)

    def test_the_file_system_of_a_directory_is_told(self):
        """Or "unknown", where the system has no list of mounts."""
        self.assertNotEqual(tq._file_system(self.dir), "")
        with mock.patch("pathlib.Path.read_text", side_effect=FileNotFoundError):
            self.assertEqual(tq._file_system(self.dir), "unknown")

    def test_a_network_file_system_is_refused(self):
        """By its name, where the system tells."""
        with mock.patch.object(tq, "_file_system", lambda folder: "nfs4"):
            with self.assertRaisesRegex(tq.QueueError, "nfs4.*local disk"):
                self.open().put(1)

    def test_a_database_that_was_replaced_or_deleted(self):
        """The name decides: a put never goes into a file without one."""
        queue = self.open()
        queue.put("old")
        for name in os.listdir(self.dir):
            os.unlink(os.path.join(self.dir, name))
        self.assertEqual(len(queue), 0)
        queue.put("new")
        self.assertDrains(self.open(), ["new"])

    def test_an_answer_that_rests_on_an_unsynced_row_is_synced(self):
        """DuplicateJobError and exist_ok, where the job was put without fsync."""
        seen = self.place.watch_commits(self, self.path)
        for answer in unsynced_answers(self, self.open(fsync=True), self.open()):
            self.assertEqual(seen()[-1:], [False])
            answer()
            self.assertEqual(seen(), [True])
        mode = self.connect().execute("PRAGMA journal_mode").fetchone()
        self.assertEqual(mode, ("wal",))

    def test_a_child_s_commits_outlive_its_parent_s_connection(self):
        """SQLite's locks do not survive fork, so no connection does: else the
        parent's close would delete the log that its child writes to."""
        queue = self.open()
        queue.put("parent")

        def putter(link):
            queue.put("child")
            link.tell()
            link.hear()
            queue.put("after the parent closed")

        child = self.spawn(putter)
        child.hear()
        self.assertEqual(len(queue), 2)
        queue.close()
        child.tell()
        child.hear()
        child.end()
        want = ["parent", "child", "after the parent closed"]
        self.assertDrains(self.open(), want)

    def test_the_database_file_itself_is_never_opened(self):
        """A descriptor of ours there would drop SQLite's locks when it closes;
        the proofs of life are on a file beside it."""
        opened = []

        def record(path, *args):
            opened.append(path)
            return os.open(path, *args)

        with patched("os", open=record):
            queue = self.open()
            queue.put(1)
            queue.task_done(queue.get())
            queue.get(timeout=0.01)
            queue.close()
        self.assertEqual(set(opened), {f"{self.file}-tiny_queue.lock"})

    def test_without_inotify_the_database_is_asked(self):
        """A put of another thread or process ends the wait all the same."""

        def waiter(link):
            queue = self.open()
            link.tell(queue.get())
            job = queue.get(timeout=PATIENCE)
            queue.task_done(job)  # or it comes back when this process ends
            return job.payload

        with mock.patch.object(tq, "_Inotify", mock.Mock(side_effect=OSError)):
            queue, child, found = self.open(), self.spawn(waiter), []
            queue.put(0, delay=3600)
            child.hear()
            self.run_threads(
                lambda: found.append(queue.get(timeout=PATIENCE).payload),
                lambda: queue.put_many([1, 2]),
            )
            self.assertEqual(sorted([*found, child.hear()]), [1, 2])

    def test_a_durable_put_ends_the_wait_at_once(self):
        """The kernel tells of the write, the commit comes after the sync: who
        waits does not look too early and then sleep on."""

        def putter(link):
            queue = self.open(fsync=True)
            for n in range(20):
                link.hear()
                queue.put(n)

        queue, child = self.open(), self.spawn(putter)
        queue.put("there", delay=3600)
        for n in range(20):
            child.tell()
            start = time.monotonic()
            self.assertEqual(queue.get(timeout=PATIENCE).payload, n)
            self.assertLess(time.monotonic() - start, 0.8)

    def test_the_caller_s_settings_do_not_matter(self):
        """Row and text factories of the connection stay his own."""
        queue = self.open()
        queue.put("x", id="é")
        conn = self.connect()
        conn.row_factory, conn.text_factory = sqlite3.Row, bytes
        conn.execute("BEGIN")
        found = queue.put(1, id="é", exist_ok=True, connection=conn)
        self.assertEqual((found.id, found.payload), ("é", "x"))
        queue.put(2, connection=conn)
        conn.execute("COMMIT")
        self.assertIs(conn.text_factory, bytes)
        self.assertEqual(len(queue), 2)

    def test_autocommit_without_a_transaction_is_refused(self):
        """There is nothing to be part of; after BEGIN there is."""
        queue, conn = self.open(), self.connect()
        with self.assertRaisesRegex(ValueError, "BEGIN IMMEDIATE"):
            queue.put(1, connection=conn)
        conn.execute("BEGIN")
        queue.put(1, connection=conn)
        conn.execute("ROLLBACK")
        if sys.version_info >= (3, 12):
            with contextlib.closing(sqlite3.connect(self.file, autocommit=True)) as one:
                self.assertRaises(ValueError, queue.put, 1, connection=one)
            with contextlib.closing(
                sqlite3.connect(self.file, autocommit=False)
            ) as two:
                queue.put(2, connection=two)
                two.rollback()
        self.assertEqual(len(queue), 0)

    def test_no_call_costs_more_because_the_queue_was_small_once(self):
        """With ANALYZE's statistics of a queue of one job, no call reads the
        backlog, in instructions of SQLite."""
        with self.open() as small:
            small.put("first")
            small.get()
            self.connect().execute("ANALYZE")
        queue, steps = self.open(), []
        queue.put_many(range(5000))
        queue.put_many(range(10), delay=1e-3)
        job, other, *_ = queue.get_many(20)
        db = queue._engine._link.connection
        for call in (
            queue.get,
            lambda: queue.bury(job, "why"),
            lambda: list(queue.jobs("dead")),
            queue.requeue_dead,
            lambda: queue.release(queue.extend(other)),
            lambda: queue.reap_stale(60),
        ):
            steps.clear()
            db.set_progress_handler(lambda: steps.append(1), 100)
            call()
            db.set_progress_handler(None, 0)
            self.assertLess(len(steps), 40)

    def test_a_duplicate_leaves_no_transaction_open(self):
        """What was begun for a call ends with its error: nobody is locked out."""
        queue, conn = self.open(), self.place.connect(self.path)
        self.addCleanup(conn.close)
        queue.put(1, id="a")
        with self.assertRaises(tq.DuplicateJobError):
            queue.put(2, id="a", connection=conn)
        with self.assertRaises(tq.DuplicateJobError):
            queue.put_many([2, 3], ids=["b", "a"], connection=conn)
        self.assertFalse(conn.in_transaction)
        self.assertDrains(queue, [1])

    def test_an_interrupt_at_any_line_leaves_nothing_locked(self):
        """Also in the middle of undoing what an error ends."""
        queue = self.open(lock_timeout=0)
        queue.put(1, id="a")
        lost = queue.get()
        queue.cancel("a")
        queue.put(1, id="a", delay=3600)
        calls = {
            "put": lambda: queue.put(2),
            "get": queue.get,
            "duplicate": lambda: queue.put(1, id="a"),
            "lost lease": lambda: queue.task_done(lost),
        }
        for name, call in calls.items():
            for where in self.interruptions(call):
                with self.subTest(name, where=where):
                    self.open(lock_timeout=0).put("other")
                    queue.put("own")

    def test_two_interrupts_leave_nothing_locked_but_the_database(self):
        """One hits the undoing of what the other ended; where both do, the next
        call of the object undoes it."""
        for number in (1, 2):
            queue = self.open(lock_timeout=0)
            queue.put(1, id="a", exist_ok=True)
            link, left = queue._engine._link, [KeyboardInterrupt] * number
            real = link.execute

            def execute(sql, params=None, real=real, left=left):
                while sql == "ROLLBACK" and left:
                    raise left.pop()
                return real(sql, params)

            def undone(link):
                raise tq.QueueError("as of a lease that is lost")

            link.execute = execute
            self.assertRaises(KeyboardInterrupt, queue._engine._run, undone)
            self.assertEqual(link.connection.in_transaction, number == 2)
            self.assertEqual(len(queue), 1)
            self.open(lock_timeout=0).put(2, id="b", exist_ok=True)
            queue.cancel("b")

    def test_an_interrupt_at_any_line_in_the_caller_s_transaction(self):
        """It takes back the call and nothing else."""
        queue, conn = self.open(), self.place.connect(self.path)
        self.addCleanup(conn.close)
        queue.put(1, id="a")
        conn.execute("CREATE TABLE theirs (x)")
        ids = ["b", "a"]
        for before in (0, 1):
            for where in self.interruptions(
                lambda: queue.put_many([2, 3], ids=ids, connection=conn)
            ):
                with self.subTest(before=before, where=where):
                    self.assertEqual(conn.in_transaction, bool(before))
                    theirs = conn.execute("SELECT count(*) FROM theirs").fetchone()
                    self.assertEqual(theirs, (before,))
                    self.assertEqual(len(queue), 1)
                    conn.rollback()
                    if before:
                        conn.execute("INSERT INTO theirs VALUES (1)")
            conn.execute("INSERT INTO theirs VALUES (1)")

    def interruptions(self, call):
        """Interrupt a call at each of its lines in turn."""
        for n in itertools.count(1):
            trace = Interrupter(tq.__file__, n, KeyboardInterrupt())
            with contextlib.suppress(tq.QueueError):
                trace.run(call)
            if trace.where is None:
                break
            yield trace.where
        self.assertGreater(n, 40)

    def test_a_full_disk_in_the_caller_s_transaction(self):
        """Of many jobs none is kept, and what he wrote before may be."""
        queue, conn = self.open(), self.connect()
        queue.put("there")
        conn.execute("CREATE TABLE theirs (x)")
        conn.execute("BEGIN")
        conn.execute("INSERT INTO theirs VALUES (1)")
        pages = conn.execute("PRAGMA page_count").fetchone()[0]
        conn.execute(f"PRAGMA max_page_count = {pages + 5}")
        with self.assertRaisesRegex(tq.QueueError, "free some space"):
            queue.put_many(["x" * 500] * 100, connection=conn)
        if conn.in_transaction:
            conn.execute("COMMIT")
        self.assertEqual([job.payload for job in queue.jobs()], ["there"])

    def test_a_put_many_that_fails_half_way_in_the_caller_s_transaction(self):
        """Of its jobs none is kept, and what he wrote before is."""
        queue, conn = self.open(), self.connect()
        queue.put("there")
        conn.execute(
            "CREATE TRIGGER third BEFORE INSERT ON tiny_queue_jobs"
            " WHEN new.payload = '3' BEGIN SELECT RAISE(ABORT, 'no third'); END"
        )
        conn.execute("BEGIN")
        queue.put("before", connection=conn)
        with self.assertRaisesRegex(tq.QueueError, "no third"):
            queue.put_many([1, 2, 3], connection=conn)
        conn.execute("COMMIT")
        self.assertDrains(queue, ["there", "before"])

    def test_a_transaction_that_read_too_early(self):
        """Others have written since: LockTimeoutError says to do it again."""
        queue, conn = self.open(), self.connect()
        queue.put("first")
        conn.execute("BEGIN")
        conn.execute("SELECT * FROM tiny_queue_jobs").fetchall()
        queue.put("second")
        with self.assertRaisesRegex(tq.LockTimeoutError, "BEGIN IMMEDIATE"):
            queue.put("third", connection=conn)
        conn.execute("ROLLBACK")
        self.assertDrains(queue, ["first", "second"])

    def test_a_database_that_may_only_be_read(self):
        """Looking works, writing says what to check."""
        queue = self.open()
        queue.put("there")
        queue._engine._link.cursor.execute("PRAGMA query_only = 1")
        self.assertEqual((len(queue), next(queue.jobs()).payload), (1, "there"))
        with self.assertRaisesRegex(tq.QueueError, "readonly.*owner and mode"):
            queue.put("more")

    def test_a_fork_by_a_signal_handler_in_a_transaction(self):
        """The parent's transaction keeps its lock and goes on."""
        queue, engine = self.open(), self.open()._engine
        queue.put("there")

        def body(link):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            return engine._lock.mine(), engine._row(link, tq._SQL_COUNTS, {})[0]

        self.assertEqual(engine._run(body), (True, 1))
        self.assertEqual(len(queue), 1)

    def test_without_sqlite3_the_error_says_so(self):
        """The module imports on a Python that was built without it."""
        with mock.patch.dict(sys.modules, sqlite3=None):
            with self.assertRaisesRegex(tq.QueueError, "built without"):
                self.open()

    def test_a_database_in_memory_is_another(self):
        """ValueError: its connection has no file that could be the queue's."""
        queue = self.open()
        with contextlib.closing(sqlite3.connect(":memory:")) as conn:
            with self.assertRaisesRegex(ValueError, "main database"):
                queue.put(1, connection=conn)
        self.assertEqual(os.listdir(self.dir), [])

    def test_a_log_that_sqlite_refuses(self):
        """Without WAL a reader would wait for each writer: QueueError at once,
        and no table is made."""
        queue = self.open()
        connect = queue._engine._connect

        def execute(db, sql, *args):
            sql = "SELECT 'delete'" if "journal_mode" in sql else sql
            return db.execute(sql, *args)

        def stubborn(mode):
            connect(mode)
            link = queue._engine._link
            run = functools.partial(execute, link.cursor)
            link.cursor = Patched(link.cursor, execute=run)

        with mock.patch.object(queue._engine, "_connect", stubborn):
            with self.assertRaisesRegex(tq.QueueError, "refuses its WAL.*'delete'"):
                queue.put(1)
        names = self.connect().execute("SELECT name FROM sqlite_master").fetchall()
        self.assertEqual(names, [])

    def test_a_call_in_the_middle_of_a_call(self):
        """QueueError, where waiting for oneself would be for ever."""
        queue = self.open()
        queue.put(1)
        with self.assertRaisesRegex(tq.QueueError, "in the middle of a call"):
            queue._engine._run(lambda link: queue.put(2))
        self.assertDrains(queue, [1])

    def test_another_thread_s_call_that_does_not_end(self):
        """LockTimeoutError in time; afterwards the object works."""
        queue, errors = self.open(lock_timeout=0.05), []
        queue.put(1)

        def put(db):
            self.run_threads(lambda: errors.append(self.error_of(queue.put, 2)))

        queue._engine._run(put)
        self.assertEqual([type(error) for error in errors], [tq.LockTimeoutError])
        self.assertDrains(queue, [1])

    def error_of(self, call, *args):
        with self.assertRaises(tq.QueueError) as caught:
            call(*args)
        return caught.exception

    def test_an_error_of_the_system(self):
        """QueueError with its errno, where the database cannot be looked at."""
        queue = self.open()
        refusing = mock.Mock(side_effect=PermissionError(errno.EACCES, "Denied"))
        with patched("os", stat=refusing):
            error = self.error_of(queue.put, 1)
        self.assertEqual(error.errno, errno.EACCES)
        queue.put(2)
        self.assertDrains(queue, [2])

    def test_a_connection_that_does_not_close(self):
        """close() says so in the log, and the queue is closed."""
        queue = self.open()
        queue.put(1)
        link = queue._engine._link
        db, link.connection = link.connection, mock.Mock(in_transaction=False)
        link.connection.close.side_effect = sqlite3.OperationalError("no way")
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            queue.close()
        self.assertIn("no way", logs.output[0])
        self.assertRaises(tq.QueueClosedError, queue.put, 2)
        db.close()

    def test_a_lock_file_that_was_deleted_or_replaced(self):
        """Who leases next proves its life on the file that is there now."""
        queue, other = self.open(), self.open()
        queue.put_many(range(5))
        queue.task_done(queue.get())
        for makers in ([queue], [other, queue]):
            os.unlink(f"{self.file}-tiny_queue.lock")
            for maker in makers:
                job = maker.get()
                for view in (queue, other, self.open()):
                    self.assertEqual(view._engine.expired(math.inf), [])
                maker.task_done(job)
        self.assertDrains(queue, [4])

    def test_a_database_that_is_deleted_while_somebody_waits(self):
        """The wait goes on for the one that comes in its place."""
        queue, found = self.open(), []
        queue.put("old", delay=3600)
        self.assertIsNone(queue.get(timeout=0.05))
        for name in os.listdir(self.dir):
            os.unlink(os.path.join(self.dir, name))
        self.assertIsNone(queue.get(timeout=0.05))
        self.run_threads(
            lambda: found.append(queue.get(timeout=PATIENCE).payload),
            lambda: self.open().put("new"),
        )
        self.assertEqual(found, ["new"])

    def test_the_first_put_of_all_may_join(self):
        """The tables are made in the same transaction, and go with it."""
        conn = sqlite3.connect(self.file)
        self.addCleanup(conn.close)
        conn.execute("CREATE TABLE theirs (x)")
        for end, want in ((conn.rollback, 0), (conn.commit, 1)):
            self.open().put("x", connection=conn)
            end()
            self.assertEqual(len(self.open()), want)
        self.assertDrains(self.open(), ["x"])

    def test_durability_is_asked_of_sqlite(self):
        """fsync=True: FULL, save for leases, which may be forgotten; else
        NORMAL.  A take that settles a job is no mere lease."""
        for fsync, want in ((True, [2, 1, 1, 2, 2]), (False, [1] * 5)):
            queue, levels = self.open(name=f"q{fsync:d}", fsync=fsync), []

            def level(queue=queue, levels=levels):
                db = queue._engine._link.cursor
                levels.append(db.execute("PRAGMA synchronous").fetchone()[0])

            queue.put(1)
            level()
            job = queue.get()
            level()
            queue.extend(job)
            level()
            queue.task_done(job)
            level()
            queue.put(2)
            job = queue.get()
            change = tq._Change(job.id, job.token, "done")
            queue._engine.take(1, 60.0, True, tq._LOWEST, [change])
            level()
            self.assertEqual(levels, want)
        mode = self.connect().execute("PRAGMA journal_mode").fetchone()
        self.assertEqual(mode, ("wal",))

    def test_an_undoing_that_fails(self):
        """The disk's error is told, as a QueueError; our own connection is
        closed, which undoes all."""
        queue, conn = self.open(), self.connect()
        queue.put(1, id="a")
        conn.execute("BEGIN")
        real, error = tq._SqlLink.execute, sqlite3.OperationalError("disk I/O error")

        def execute(link, sql, params=None):
            if sql.startswith("ROLLBACK"):
                raise error
            return real(link, sql, params)

        with mock.patch.object(tq._SqlLink, "execute", execute):
            with self.assertRaisesRegex(tq.QueueError, "disk I/O.*the disk failed"):
                queue.put(2, id="a", connection=conn)
            conn.execute("ROLLBACK")
            self.assertRaises(tq.DuplicateJobError, queue.put, 2, id="a")
        self.open(lock_timeout=0).put(2)
        self.assertDrains(queue, [1, 2])


# PostgreSQL
# -----------------------------------------------------------------------------


class Relay:
    """A way to a server on which answers get lost."""

    def __init__(self, port):
        self.port = port
        self.cut_at = 0  # the how many-th answer from now is not delivered
        self.silent = False  # nothing is
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        self.socks = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                self.socks += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source, target, answers):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.silent:
                    continue
                if answers and self.cut_at:
                    self.cut_at -= 1
                    if not self.cut_at:
                        break
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        for sock in (self.listener, *self.socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # or a thread's recv() keeps it
            sock.close()


class ClusterCase(Case):
    """A test on a server of our own, in a database of the test's own."""

    @classmethod
    def setUpClass(cls):
        cls.place = Cluster.shared().place

    def setUp(self):
        super().setUp()
        self.cluster = Cluster.shared()
        self.ask = self.place.ask

    def relay(self):
        relay = Relay(self.cluster.port)
        self.addCleanup(relay.close)
        url = self.path.replace(f":{self.cluster.port}/", f":{relay.own_port}/")
        return relay, url

    def waiting_pid(self):
        """The server's process that waits for a lock, once there is one."""
        sql = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return eventually(lambda: self.ask(sql))[0][0]

    def table(self, queue):
        return f"{self.place.schema(self.path)}.tiny_queue_jobs"

    def failing(self, queue, code, times=3):
        """Let the next changes of the table fail with an SQLSTATE."""
        schema = self.place.schema(self.path)
        self.ask(f"CREATE SEQUENCE {schema}.failures")
        self.ask(
            f"CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN IF nextval('{schema}.failures') <= {times} THEN"
            f" RAISE SQLSTATE '{code}' USING message = 'as the test wanted'; END IF;"
            " RETURN new; END $$"
        )
        self.ask(
            f"CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON {self.table(queue)}"
            f" FOR EACH ROW EXECUTE FUNCTION {schema}.fail()"
        )


class PostgresUrlTest(Case):
    def setUp(self):
        super().setUp()
        if psycopg is None:
            self.skipTest(NO_POSTGRES)

    def test_passwords_are_never_shown(self):
        """Neither in repr, path nor errors, wherever in the URL they stand."""
        for url in ("postgresql://me:open%20sesame@127.0.0.1:1/db",
                    "postgres://127.0.0.1:1/db?user=me&password=open%20sesame",
                    "postgresql://127.0.0.1/db?password=sesame&port=x&nothing=1",
                    "postgresql://me:open sesame?@127.0.0.1:x/db",
                    "postgresql://me:open%2sesame@127.0.0.1/db",
                    "postgresql://me:o/p?sesame@127.0.0.1/db",
                    "postgresql://me:o@p?sesame@127.0.0.1/db"):  # fmt: skip
            said = ""
            try:
                queue = self.open(path=url, lock_timeout=0)
                said = repr(queue) + queue.path
                queue.put(1)
            except (tq.QueueError, ValueError) as exc:
                said += str(exc) + repr(vars(exc))
            self.assertIn("***", said)
            self.assertNotIn("sesame", said)

    def test_wrong_arguments_show_no_password(self):
        """argparse quotes what it does not understand."""
        url = "postgresql://me:open sesame@127.0.0.1/db"
        for words in ([url], ["put", "jobs", "1", url]):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
                tq.main(words)
            self.assertIn("me:***@127.0.0.1/db", said.getvalue())
            self.assertNotIn("sesame", said.getvalue())

    def test_a_pickle_opens_the_same_database(self):
        """The password goes along in a pickle, and only there."""
        queue = self.open(path="postgresql://me:sesame@127.0.0.1:1/db?schema=x")
        twin = pickle.loads(pickle.dumps(queue))
        self.assertEqual(twin._engine.source, queue._engine.source)
        self.assertIn("sesame", twin._engine.source)

    def test_unknown_options_are_refused_with_the_known(self):
        """ValueError before any connection; libpq's own options pass."""
        for query, names in (("scheme=x", "scheme.*libpq's options and schema"),
                             ("pool=0", "pool.*number"),
                             ("notify=yes", "notify.*0 or 1"),
                             ("schema=a.b", "schema"), ("schema=a%22b", "schema"),
                             ("keepalive=-1", "keepalive.*number")):  # fmt: skip
            with self.subTest(query), self.assertRaisesRegex(ValueError, names):
                tq.Queue(f"postgresql://127.0.0.1/test?{query}")
        tq.Queue("postgresql:///test?sslmode=disable&connect_timeout=3&schema=a_b")
        with self.assertRaisesRegex(ValueError, "cross_process_lock"):
            self.open(path="postgresql:///x", cross_process_lock=False)

    def test_nobody_there(self):
        """No server: one line of log, and QueueError within lock_timeout, at least
        a second."""
        start = time.monotonic()
        queue = self.open(path="postgresql://127.0.0.1:1/x", lock_timeout=0.5)
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            with self.assertRaises(tq.QueueError) as caught:
                queue.put(1)
        self.assertEqual(len(logs.output), 1)
        self.assertLess(time.monotonic() - start, 5.0)
        self.assertFalse(caught.exception.outcome_unknown)


class PostgresScriptedTest(Case):
    """What no server says at will: none is asked."""

    def setUp(self):
        super().setUp()
        if psycopg is None:
            self.skipTest(NO_POSTGRES)
        self.queue = self.open(path="postgresql://127.0.0.1:1/x")
        self.engine = self.queue._engine

    def test_what_is_not_told_with_a_put_is_told_after_it(self):
        """Unless it was committed right after another telling; a telling that
        failed is none, and if the second fails, the log says so."""
        run = mock.Mock(return_value=[])
        call = functools.partial(self.engine._run, "body", soon=True)
        with mock.patch.object(tq._SqlEngine, "_run", run):
            for may, soon in (
                ([True], [True]),
                ([False, False], [False]),
                ([False, True], [False, True]),
            ):
                run.reset_mock()
                with mock.patch.object(self.engine, "_may_tell", side_effect=may):
                    self.assertEqual(call(), [])
                told = [each.kwargs["soon"] for each in run.call_args_list]
                self.assertEqual(told, soon)
            run.side_effect = tq.QueueError("no server")
            self.assertRaises(tq.QueueError, call)
            self.assertTrue(self.engine._may_tell())
            run.side_effect = [[], tq.QueueError("no server")]
            with mock.patch.object(self.engine, "_may_tell", side_effect=[False, True]):
                with self.assertLogs("tiny_queue", "WARNING") as logs:
                    call()
        self.assertIn("not told of new jobs: no server", logs.output[0])

    def test_waiting_for_a_descriptor(self):
        """poll() and, where there is none, select() say the same."""
        near, far = socket.socketpair()
        self.addCleanup(near.close)
        lack = types.SimpleNamespace(select=select.select)
        for module in (select, lack):
            with mock.patch.dict(sys.modules, select=module):
                found = [tq._poll(near.fileno(), events, 0) for events in (1, 2, 3)]
                self.assertEqual(found, [0, 2, 2])
                far.send(b"x")
                found = [tq._poll(near.fileno(), events, 1) for events in (1, 2, 3)]
                self.assertEqual((found, near.recv(9)), ([1, 2, 3], b"x"))
        far.close()
        self.assertEqual(tq._poll(near.fileno(), 1, 1), 1)

    def test_a_session_ends_nothing_of_another_process(self):
        """A child was forked while a thread of its parent used it."""
        link = mock.Mock(pid=-1)
        session = tq._PgSession(link, 1)
        with session.lock:
            session.close()
        self.assertTrue(session.lost())
        link.close.assert_not_called()
        link.closed.assert_not_called()

    def test_a_wait_ends_at_the_deadline_only(self):
        """One that ended early goes on: its length is rounded and capped."""

        def steps():
            return (yield 1)

        link = tq._PgLink()
        with mock.patch.object(tq, "_poll", side_effect=[0, 0, 1]) as poll:
            self.assertEqual(link.wait(steps()), 1)
        self.assertEqual(poll.call_count, 3)
        link.deadline = time.monotonic()
        with mock.patch.object(tq, "_poll", return_value=0):
            self.assertRaises(TimeoutError, link.wait, steps())

    def test_a_damaged_table(self):
        """verify() says after how many sound jobs; other errors are raised."""
        job = tq.Job("a", 1)
        for code, found in (("XX001", 3), ("XX002", 3), ("57014", None)):
            error = tq.QueueError("invalid page", sqlstate=code)

            def records(*_, error=error):
                yield from (job, job)
                raise error

            with mock.patch.object(self.engine, "records", records):
                if found is None:
                    self.assertRaises(tq.QueueError, self.queue.verify)
                else:
                    (damage,) = self.queue.verify()
                    self.assertEqual(damage[1:], (found, "invalid page"))

    def test_leases_that_are_never_settled_are_forgotten(self):
        """The oldest, when there are many: an object's memory stays bounded."""
        tokens = [str(n) for n in range(10_003)]
        self.engine._remember(tokens)
        self.assertEqual([*self.engine._tokens], tokens[3:])

    def test_a_session_that_came_too_late(self):
        """The queue was closed while it connected: it is closed, too."""
        self.queue.close()
        with mock.patch.object(self.engine, "_run") as run:
            session = self.engine._holder(True)
        self.assertIs(session, run.return_value)
        session.close.assert_called_once_with()

    def test_another_thread_that_connects_for_too_long(self):
        """It is not waited for longer than it may itself take."""
        thread = threading.Thread(target=self.engine._connecting.acquire)
        thread.start()
        thread.join()
        with mock.patch.multiple(self.engine, SECONDS=0.0, _lock_timeout=0.01):
            with self.assertRaisesRegex(tq.LockTimeoutError, "still connecting"):
                self.engine._holder(True)


class PostgresMissingTest(Case):
    def test_without_psycopg_the_error_says_what_to_install(self):
        """The module imports without it; only such a URL needs it."""
        with mock.patch.dict(sys.modules, psycopg=None):
            with self.assertRaisesRegex(tq.QueueError, r"psycopg\[binary\].*postgres"):
                tq.Queue("postgresql://127.0.0.1/test")

    def test_postgres_was_tested(self):
        """Where it is required, there is a server; else the reason is shown."""
        if NO_POSTGRES:
            if os.environ.get("TQ_REQUIRE_POSTGRES", "0") != "0":
                self.fail(NO_POSTGRES)
            self.skipTest(f"PostgreSQL: {NO_POSTGRES}")
        self.assertIn("LifeTestPostgres", [twin.__name__ for twin in TWINS])


class PostgresTest(ClusterCase):
    def test_a_password_reaches_the_processes_of_work_unseen(self):
        """With one of TINY_QUEUE_DIR they log in, and no argument has it."""
        self.assertIn("sesame", self.path)
        with open(os.path.join(self.dir, "noting.py"), "w") as file:
            file.write("import sys\ndef handle(job):\n    print(job.payload, sys.argv)")
        self.open().put("did")
        env = {**os.environ, "PYTHONPATH": ROOT, "TINY_QUEUE_DIR": self.path}
        ran = subprocess.run(
            [*CLI, "work", "noting:handle", "--stop-when-empty"],
            cwd=self.dir, env=env, timeout=60, capture_output=True, text=True,
        )  # fmt: skip
        self.assertIn("did [", ran.stdout, ran.stderr)
        self.assertNotIn("sesame", ran.stdout + ran.stderr)

    def test_twenty_processes_come_first_at_once(self):
        """One of them makes the tables; each one's job is there."""
        pipe = os.pipe()

        def first(link):
            link.tell("ready")
            select.select([pipe[0]], [], [], PATIENCE)
            self.open().put(os.getpid())

        children = [self.spawn(first) for _ in range(20)]
        for child in children:
            child.hear()
        os.write(pipe[1], b"go")
        for child in children:
            self.assertIsNone(child.hear())
        self.assertEqual(
            {job.payload for job in self.open().jobs()}, {c.pid for c in children}
        )

    def test_tables_of_the_first_format_are_refused(self):
        """They do not say which they have; nothing is touched."""
        schema = self.place.schema(self.path)
        self.ask(f"CREATE SCHEMA {schema}")
        self.ask(f"CREATE TABLE {schema}.tiny_queue_queues (name text PRIMARY KEY)")
        self.ask(f"INSERT INTO {schema}.tiny_queue_queues VALUES ('old')")
        queue = self.open()
        for call in (queue.get, queue.stats, lambda: queue.put(2)):
            with self.assertRaisesRegex(tq.QueueError, "format 1 .*'old'.* knows 2"):
                call()
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        self.assertEqual(self.ask(tables, [schema]), [("tiny_queue_queues",)])

    def test_rights(self):
        """A role with rights on the tables needs none to make them; one that
        lacks any is told which are needed."""
        schema = self.place.schema(self.path)
        self.ask(f"CREATE ROLE {schema} LOGIN PASSWORD 'sesame'")
        self.addCleanup(self.ask, f"DROP ROLE {schema}")
        self.addCleanup(self.ask, f"DROP OWNED BY {schema}")
        url = self.path.replace("boss:", f"{schema}:")
        with self.assertRaisesRegex(tq.QueueError, "CREATE on the database"):
            self.open(path=url).put(1)
        self.open().put("first")
        with self.assertRaisesRegex(tq.QueueError, "USAGE on the schema"):
            self.open(path=url).put(1)
        self.ask(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
        self.ask(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}")
        self.ask(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA"
            f" {schema} TO {schema}"
        )
        queue = self.open(path=url)
        queue.put("second")
        self.assertDrains(queue, ["first", "second"])

    def test_a_wrong_password_is_final(self):
        """QueueError at once, not after lock_timeout; and it is not shown."""
        start = time.monotonic()
        for word, what in (("sesame", "tesame"), ("/postgres?", "/none?")):
            queue = self.open(path=self.path.replace(word, what))
            with self.assertRaises(tq.QueueError) as caught:
                queue.put(1)
            self.assertNotIn("esame", str(caught.exception))
        self.assertLess(time.monotonic() - start, 5.0)

    def test_a_schema_may_have_any_name_of_letters(self):
        """Also that of a word which stands for something in our statements."""
        home = self.place.schema(self.path)
        for name in ("HOME", "N", "TELL", "select", "NOW"):
            self.addCleanup(self.ask, f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
            queue = self.open(path=self.path.replace(home, name))
            queue.put(name, id=name)
            self.assertRaises(tq.DuplicateJobError, queue.put, 1, id=name)
            self.assertDrains(queue, [name])

    def test_schemas_and_queues_do_not_mix(self):
        """The same ids in two schemas, and in two queues of one."""
        queues = [
            tq.Queue(path, name, fsync=False)
            for path in (self.path, self.place.where(self.path))
            for name in ("a", "b")
        ]
        self.addCleanup(self.place.clean, self.place.where(self.path))
        for number, queue in enumerate(queues):
            self.addCleanup(queue.close)
            queue.put(number, id="x")
        for number, queue in enumerate(queues):
            self.assertEqual(queue._engine.names(), ["a", "b"])
            self.assertDrains(queue, [number])

    def test_an_idle_poll_costs_no_write(self):
        """No transaction number is used, however often an empty queue is asked."""
        queue = self.open()
        queue.put(1)
        queue.task_done(queue.get())
        queue.put("late", delay=3600)
        self.assertIsNone(queue.get(timeout=0.05))
        time.sleep(3 * tq._PG_QUIET)  # a debt is paid
        sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
        before = self.ask(sql)
        for _ in range(10_000 if DEEP else 300):
            queue.get()
        queue.get(timeout=0.05)
        self.assertEqual(self.ask(sql), before)

    def test_each_hot_statement_is_a_few_steps_in_an_index(self):
        """Among many waiting and scheduled jobs, whose number the planner does
        not know, a take, with a settlement or without, reads a few blocks."""
        queue = self.open()
        queue.put("first")
        for delay in (0, 3600):
            queue.put_many(range(20_000), delay=delay)
        engine, job = queue._engine, queue.get()
        take = dict(promoted=False, seconds=9.0, owner=0, call="x", above=-1)
        done = tq._sql_keys(tq._Change(job.id, job.token, "done"))
        settled = {f"{key}_0": value for key, value in done.items()}
        text = tq._sql_change("done", str)
        for statement, keys in (
            (tq._pg_take((), True), take),
            (tq._pg_take((text,), True), {**take, **settled}),
            (text, done),
            (tq._PG_PEEK, {}),
            (tq._SQL_EXPIRED, dict(older_than=math.inf)),
        ):
            explain = "EXPLAIN (analyze, buffers, format json) " + statement

            def asked(link, sql=explain, keys=keys):
                return engine._do(link, sql, **keys).fetchone()

            plan = engine._run(asked)[0][0]["Plan"]
            self.assertNotIn("Seq Scan", json.dumps(plan))
            self.assertLess(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], 90)
        self.assertEqual(queue.find(queue.get().id).payload, 2)

    def test_no_statement_costs_more_because_the_queue_was_empty_once(self):
        """With statistics of a queue that was idle when they were made, none
        reads rows in vain: neither a backlog, nor all that are inflight."""
        queue = self.open(backoff=lambda n: 0)
        queue.put("first", id="first")
        queue.get()
        self.ask(f"ALTER TABLE {self.table(queue)} SET (autovacuum_enabled = off)")
        self.ask(f"ANALYZE {self.table(queue)}")
        queue.put_many(range(3000))
        queue.put_many(range(300), delay=1e-3)
        costs = collections.Counter()
        self.use_it_all(queue, costs)
        self.assertGreater(len(costs), 15)
        self.assertEqual({sql: n for sql, n in costs.items() if n > 700}, {})

    @contextlib.contextmanager
    def counted(self, costs):
        """Count the rows that each statement outside of a block reads in vain."""
        real = tq._SqlLink.execute

        def execute(link, sql, keys=None):
            if "tiny_queue_jobs" in sql and not link.in_transaction():
                with link.connection.transaction(force_rollback=True):
                    plan = real(link, "EXPLAIN (ANALYZE, FORMAT JSON) " + sql, keys)
                    plan = plan.fetchone()[0][0]["Plan"]
                for node in self.nodes(plan):
                    removed = [node[key] for key in node if "Rows Removed" in key]
                    costs[sql] += int(sum(removed) * node["Actual Loops"])
            return real(link, sql, keys)

        with mock.patch.object(tq._SqlLink, "execute", execute):
            yield

    def nodes(self, plan):
        yield plan
        for part in plan.get("Plans", ()):
            yield from self.nodes(part)

    def use_it_all(self, queue, costs):
        """Each verb once, some hundred jobs a time."""
        with self.counted(costs), mock.patch.object(tq, "_PART", 1):
            self.use_it(queue, queue._engine)

    def use_it(self, queue, engine):
        self.assertRaises(tq.DuplicateJobError, queue.put, 1, id="first")
        first, second, third, *others = queue.get_many(600)
        done = [tq._Change(first.id, first.token, "done")]
        self.assertEqual(engine.take(1, 60.0, True, tq._LOWEST, done).made, [True])
        queue.release(second)
        queue.bury(queue.extend(third), "why")
        for job in others[:9]:
            queue.bury(job, "why")
        self.assertEqual(queue.requeue_dead(third.id) + queue.requeue_dead(), 10)
        queue.find(third.id)
        queue.cancel(third.id)
        queue.stats()
        self.assertGreater(queue.reap_stale(0), 500)
        self.assertGreater(sum(1 for _ in queue.jobs()), 2900)
        self.assertEqual(queue.purge("dead"), 0)
        one = next(queue.jobs("pending"))
        move = tq._Change(one.id, one._rev, "inflight", 60.0, token="m")
        self.assertIsNotNone(engine.renew([move], False)[0])

    def test_batches_are_one_round_trip(self):
        """put_many of thousands, in their order; and many changes."""
        queue, asked, real = self.open(), [], tq._PgLink.wait
        queue.put("first")

        def wait(link, *args, **options):
            asked.append(link)
            return real(link, *args, **options)

        with mock.patch.object(tq._PgLink, "wait", wait):
            queue = self.open()
            queue.put("second")
            asked.clear()
            queue.put_many(range(3000))
            self.assertEqual(len(asked), 1)
            asked.clear()
            self.assertEqual(queue.purge("pending", older_than=-0.0), 3002)
        self.assertLess(len(asked), 120)
        self.assertEqual(len(queue), 0)

    def test_an_answer_that_rests_on_an_unsynced_row_is_synced(self):
        """DuplicateJobError and exist_ok: the log is on disk up to the row's end."""
        self.addCleanup(self.wal_writer_pauses, "DEFAULT")
        self.wal_writer_pauses("'10s'")
        synced = self.path.replace("commit%3Doff", "commit%3Don")
        queue, fast = self.open(path=synced, fsync=True), self.open()
        fast.put("now it has something to write, and then it pauses")
        for answer in unsynced_answers(self, queue, fast):
            end = self.ask("SELECT pg_current_wal_insert_lsn()::text")[0]
            answer()
            found = self.ask("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", end)
            self.assertEqual(found, [(True,)])

    def wal_writer_pauses(self, delay):
        """How often the server writes what no commit has waited for."""
        self.ask(f"ALTER SYSTEM SET wal_writer_delay = {delay}")
        self.ask("SELECT pg_reload_conf()")

    def test_behind_a_pooler(self):
        """notify=0 leaves nothing in a session: no lock, no setting, nothing
        prepared; leases end by time, and a put is found by looking."""
        queue = self.open(path=self.path + "&notify=0", lease_timeout=0.2)
        for n in range(12):
            queue.put(n)
            queue.task_done(queue.get())

        def ask(link, sql):
            return link.execute(sql, None).fetchall()

        for sql in ("SELECT 1 FROM pg_prepared_statements",
                    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory'"
                    " AND pid = pg_backend_pid()",
                    "SELECT 1 FROM pg_settings WHERE source = 'session'"):  # fmt: skip
            self.assertEqual(queue._engine._run(ask, sql), [], sql)
        self.assertIsNone(queue._engine._session)
        queue.put("x")
        queue.get()
        job = queue.get(timeout=PATIENCE)
        self.assertEqual((job.attempts, queue.task_done(job)), (2, None))
        timer = threading.Timer(0.1, self.open().put, ["late"])
        timer.start()
        self.assertEqual(queue.get(timeout=PATIENCE).payload, "late")
        timer.join()


class PostgresFaultTest(ClusterCase):
    def test_the_pool_is_exhausted(self):
        """Whoever waits for a connection in vain is told which limit it was."""
        queue = self.open(path=self.path + "&pool=1", lock_timeout=0.3)
        queue.put(1)

        def body(link):
            with self.assertRaisesRegex(tq.LockTimeoutError, "pool") as caught:
                queue.put(2)
            self.assertEqual(caught.exception.timeout, 0.3)

        queue._engine._run(body)
        queue.put(3)
        self.assertDrains(queue, [1, 3])

    def test_what_many_jobs_cost_may_take_longer(self):
        """Six times lock_timeout: a statement of one job may not."""
        queue = self.open(lock_timeout=1.0)
        queue.put(1)

        def slow(link):
            return link.execute("SELECT pg_sleep(2)").fetchone()

        self.assertEqual(queue._engine._run(slow, many=True), ("",))
        self.assertRaises(tq.LockTimeoutError, queue._engine._run, slow)

    def test_no_failure_uses_the_pool_up(self):
        """However many connections fail while their errors are kept."""
        relay, url = self.relay()
        queue = self.open(path=url + "&pool=1", lock_timeout=1.0)
        queue.put(1)
        relay.close()
        kept = []
        for _ in range(2):
            try:
                queue.put(2)
            except tq.QueueError as exc:
                kept.append(exc)
        self.assertEqual([type(exc) for exc in kept], [tq.QueueError] * 2)

    def test_deadlocks_and_serialization_failures_are_tried_again(self):
        """They carried out nothing: the caller does not hear of them."""
        queue = self.open()
        queue.put(0)
        for code in ("40001", "40P01"):
            self.failing(queue, code)
            queue.put(code)
            self.ask(f"DROP TRIGGER fail ON {self.table(queue)}")
            schema = self.place.schema(self.path)
            self.ask(f"DROP FUNCTION {schema}.fail")
            self.ask(f"DROP SEQUENCE {schema}.failures")
        self.assertDrains(queue, [0, "40001", "40P01"])

    def test_errors_quote_no_payload(self):
        """The server's words may hold a whole row: they are not passed on."""
        queue = self.open()
        queue.put("public")
        self.ask(f"ALTER TABLE {self.table(queue)} ADD CHECK (priority < 5)")
        with self.assertRaisesRegex(tq.QueueError, "check constraint") as caught:
            queue.put("confidential", priority=7)
        self.assertNotIn("confidential", str(caught.exception))

    def test_a_full_disk_is_reported(self):
        """QueueError with errno ENOSPC, nothing kept; then it goes on."""
        queue = self.open()
        queue.put(1)
        self.failing(queue, "53100", times=2)
        for call in (lambda: queue.put(2), lambda: queue.put_many([3, 4])):
            with self.assertRaisesRegex(tq.QueueError, "disk is full") as caught:
                call()
            self.assertEqual(caught.exception.errno, errno.ENOSPC)
            self.assertFalse(caught.exception.outcome_unknown)
        queue.put(5)
        self.assertDrains(queue, [1, 5])

    def test_a_backend_killed_in_mid_statement(self):
        """What waits on a lock when its process is killed is done anew."""
        queue = self.open()
        queue.put(0)

        def put():
            queue.put("mine", id="x", exist_ok=True)

        with self.place.connect(self.path) as conn:
            queue.put("theirs", id="x", connection=conn)
            thread = threading.Thread(target=put)
            thread.start()
            self.ask(f"SELECT pg_terminate_backend({self.waiting_pid()})")
            self.waiting_pid()
            conn.rollback()
            thread.join(PATIENCE)
        self.assertDrains(queue, [0, "mine"])

    def end_session(self, queue):
        """Let the server end what proves a worker's life."""
        self.ask(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE objid ="
            f" {queue._engine._session.number} AND locktype = 'advisory'"
        )

    def test_a_lost_session_is_replaced(self):
        """The running job stays its worker's own, under a new owner number, and
        the log says so."""
        queue, other = self.open(), self.open()
        queue.put(1)
        job = queue.get()
        old = queue._engine._session
        self.end_session(queue)
        with self.assertLogs("tiny_queue", "WARNING") as logs:
            self.assertIsNone(queue.get())
        self.assertIn("goes on as owner", logs.output[0])
        self.assertNotEqual(queue._engine._session.number, old.number)
        self.assertIsNone(other.get())
        queue.task_done(job)

    def test_a_lost_session_keeps_what_it_took_over(self):
        """As what it has leased itself."""
        queue = self.open()
        queue.put(1)
        with self.open() as other:
            other.get()
        job = queue.get()
        self.end_session(queue)
        with self.assertLogs("tiny_queue", "WARNING"):
            self.assertIsNone(queue.get())
        self.assertIsNone(self.open().get())
        queue.task_done(job)

    def test_a_lost_session_keeps_what_could_not_be_settled(self):
        """Whether that was asked alone or with the next job."""
        for together in (False, True):
            queue = self.open(lock_timeout=1.0)
            queue.put(1)
            job, jobs = queue.get(), self.place.jobs_table(self.path)
            done = [tq._Change(job.id, job.token, "done")]
            with self.place.connect(self.path) as conn:
                conn.execute(f"SELECT FROM {jobs} FOR UPDATE")
                with self.assertRaises(tq.LockTimeoutError):
                    if together:
                        queue._engine.take(1, 60.0, True, tq._LOWEST, done)
                    queue.task_done(job)
            self.end_session(queue)
            with self.assertLogs("tiny_queue", "WARNING"):
                self.assertIsNone(queue.get())
            queue.task_done(job)

    def test_a_lost_session_keeps_what_still_runs_only(self):
        """A lease that a crash of the server brought back after its job was
        settled is a dead holder's: another gets it."""
        queue, other = self.open(), self.open()
        queue.put_many(["runs", "settled"])
        job, settled = queue.get_many(2)
        jobs = self.place.jobs_table(self.path)
        kept = f"{self.place.schema(self.path)}.kept"
        self.ask(f"CREATE TABLE {kept} AS TABLE {jobs}")
        queue.task_done(settled)
        self.ask(f"DELETE FROM {kept} WHERE id <> %s", [settled.id])
        self.ask(f"INSERT INTO {jobs} OVERRIDING SYSTEM VALUE TABLE {kept}")
        self.ask(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks"
            " WHERE locktype = 'advisory'"
        )
        with self.assertLogs("tiny_queue", "WARNING"):
            found = [queue.get().payload, other.get()]
        self.assertEqual(found, ["settled", None])
        queue.task_done(job)

    def sleeper(self, queue):
        """A thread that waits for a job; what it gets, or its error."""
        found = []

        def get():
            try:
                found.append(queue.get(timeout=PATIENCE).payload)
            except tq.QueueError as exc:
                found.append(type(exc))

        thread = threading.Thread(target=get)
        thread.start()
        eventually(lambda: self.hears(thread))
        return thread, found

    def hears(self, thread):
        """Whether it sleeps until the server says something."""
        frame = sys._current_frames().get(thread.ident)
        codes = [frame and frame.f_code, frame and frame.f_back and frame.f_back.f_code]
        return codes == [tq._poll.__code__, tq._PgSession.hear.__code__]

    def test_close_ends_a_sleep(self):
        """At once, and the server sees the connection go."""
        queue = self.open()
        queue.put(1, delay=3600)
        thread, found = self.sleeper(queue)
        queue.close()
        thread.join(5.0)
        self.assertEqual(found, [tq.QueueClosedError])
        sql = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
        eventually(lambda: not self.ask(sql, [queue._engine._session.number]))

    def test_a_put_between_looking_and_listening(self):
        """Nobody was listening, so nothing was heard: it is looked at again."""
        queue, other = self.open(), self.open()
        other.put("early", delay=3600)
        found = queue._engine.take(1, 300.0, True)
        self.assertEqual(found.jobs, [])
        other.put("now")
        start = time.monotonic()
        queue._engine.wait(found.seen, PATIENCE)
        self.assertLess(time.monotonic() - start, 5.0)
        self.assertEqual(queue.get().payload, "now")

    def test_closing_over_a_session_that_is_lost(self):
        """Whether that is known or only found out then, close() just ends."""
        for known in (False, True):
            queue = self.open()
            queue.put(1)
            queue.get()
            session = queue._engine._session
            self.end_session(queue)
            if known:
                session.link.close()
            with (
                contextlib.nullcontext()
                if known
                else mock.patch.object(session.link, "usable", return_value=True)
            ):
                queue.close()
            self.assertTrue(session.gone)
            self.assertRaises(tq.QueueClosedError, queue.get)

    def test_a_session_that_ends_in_a_sleep(self):
        """Whoever slept on it gets the next job all the same."""
        queue = self.open()
        queue.put(1, delay=3600)
        thread, found = self.sleeper(queue)
        old = queue._engine._session
        self.end_session(queue)
        self.open().put("next")
        thread.join(PATIENCE)
        self.assertEqual(found, ["next"])
        self.assertIsNot(queue._engine._session, old)

    def test_a_telling_between_looking_and_sleeping(self):
        """It comes with another answer, and is not slept over."""
        queue, other = self.open(), self.open()
        other.put(1, delay=3600)
        engine, session = queue._engine, queue._engine._holder(True)
        real, asked = engine._do, []

        def do(link, text, **keys):
            rows = real(link, text, **keys)
            if text == tq._PG_PEEK and not asked:
                asked.append(rows := mock.Mock(fetchone=rows.fetchone()))
                rows.fetchone = mock.Mock(return_value=rows.fetchone)
                other.put("told")
                eventually(lambda: link.connection.execute("SELECT 1") and session.told)
            return rows

        start = time.monotonic()
        with mock.patch.object(engine, "_do", do):
            self.assertTrue(engine._listen(session, PATIENCE))
        self.assertLess(time.monotonic() - start, PATIENCE / 2)
        self.assertEqual(queue.get().payload, "told")

    def test_an_owner_number_that_another_has(self):
        """Each object's is its own: it draws until one is free."""
        queue, other = self.open(), self.open()
        queue.put(1)
        taken = queue._engine._holder(True).number
        with mock.patch.object(
            tq.random, "getrandbits", side_effect=[taken - 1, taken - 1, taken]
        ):
            self.assertEqual(other._engine._holder(True).number, taken + 1)

    def test_tables_that_were_dropped(self):
        """QueueError that says what comes next: they are made anew."""
        queue = self.open()
        queue.put(1)
        schema = self.place.schema(self.path)
        ours = [f"{schema}.tiny_queue_{name}" for name in ("jobs", "queues")]
        for what in (f"TABLE {', '.join(ours)}", f"SCHEMA {schema} CASCADE"):
            self.ask(f"DROP {what}")
            with self.assertRaisesRegex(tq.QueueError, "call makes (them|it) anew"):
                queue.put(2)
            queue.put(3)
            self.assertDrains(queue, [3])

    def test_a_killed_worker_s_job_is_back_though_a_child_lives(self):
        """A forked child does not keep its parent's session."""

        def parent(link):
            queue = self.open()
            job = queue.get()
            pid = os.fork()
            if pid == 0:
                time.sleep(PATIENCE)
                os._exit(0)
            link.tell([job.id, pid])
            link.hear()

        queue = self.open()
        queue.put(1, id="x")
        child = self.spawn(parent)
        id, pid = child.hear()
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        self.assertIsNone(queue.get())
        child.kill()
        self.assertEqual(queue.get(timeout=PATIENCE).attempts, 2)

    def test_a_child_leaves_its_parent_s_connections_alone(self):
        """Its end does not end theirs: no message of it reaches the server."""

        def use(link):
            inherited.put("child")

        inherited = self.open()
        inherited.put("parent")
        inherited.release(inherited.get())
        pids = "SELECT pid FROM pg_stat_activity WHERE usename = 'boss' ORDER BY pid"
        before = self.ask(pids)
        self.spawn(use).hear()
        eventually(lambda: self.ask(pids) == before)
        with mock.patch.object(inherited._engine, "_connect", None):
            self.assertDrains(inherited, ["parent", "child"])

    def test_what_has_become_due_cannot_be_taken(self):
        """The error is told at once, or at the next call if a change was made."""
        queue = self.open()
        queue.put("x")
        job, real = queue.get(), queue._engine._take
        queue.put("late", delay=1e-3)
        eventually(lambda: queue.stats().delayed == 0)

        def take(link, changes, keys, apart):
            if apart:
                raise tq.QueueError("no")
            return real(link, changes, keys, apart)

        done = [tq._Change(job.id, job.token, "done")]
        with mock.patch.object(queue._engine, "_take", take):
            made, jobs, _ = queue._engine.take(1, 60.0, True, tq._LOWEST, done)
            self.assertEqual((made, jobs), ([True], []))
            self.assertRaises(tq.QueueError, queue.get)
        self.assertDrains(queue, ["late"])


class PostgresLostTest(ClusterCase):
    """Answers that do not arrive."""

    def setUp(self):
        super().setUp()
        self.relayed, url = self.relay()
        self.queue = self.open(path=url, lock_timeout=5.0)
        self.queue.put("first", id="first")

    def test_a_put_whose_answer_is_lost(self):
        """The caller is told that nobody knows; with an id and exist_ok the
        put is repeated for him."""
        self.relayed.cut_at = 1
        with self.assertRaises(tq.QueueError) as caught:
            self.queue.put("second")
        self.assertTrue(caught.exception.outcome_unknown)
        self.assertEqual(len(self.queue), 2)
        self.relayed.cut_at = 1
        job = self.queue.put("third", id="third", exist_ok=True)
        self.assertEqual((job.id, self.relayed.cut_at), ("third", 0))
        self.assertDrains(self.open(), ["first", "second", "third"])

    def test_a_take_whose_answer_is_lost(self):
        """At whichever answer: the job is leased once, to whoever asked."""
        for queue in self.each_answer():
            job = queue.get()
            self.assertEqual((job.id, job.attempts), ("first", 1))
            other = self.open()  # which loses no answer
            self.assertEqual(other.stats().inflight, 1)
            other.release(job)

    def test_a_take_over_whose_answer_is_lost(self):
        """At whichever answer: the job is whoever asked's."""
        for queue in self.each_answer():
            with self.open() as other:
                other.get()
            job = queue.get()
            self.assertEqual((job.id, job.attempts), ("first", 2))
            other = self.open()
            other.task_done(job)
            other.put("first", id="first")

    def test_a_lease_whose_question_is_lost(self):
        """Nobody knows that it was: it is looked for, and then done."""
        engine, call = self.queue._engine, self.queue.get
        for name in ("_take", "_renew"):
            real, doubts = getattr(engine, name), []

            def lost(link, *args, real=real, doubts=doubts):
                if not doubts:
                    link.connection.close()
                doubts.append(link.doubt)
                return real(link, *args)

            with mock.patch.object(engine, name, lost):
                job = call()
            found = job.id, job.attempts, doubts
            self.assertEqual(found, ("first", 1, [False, True]))
            call = functools.partial(self.queue.extend, job)

    def test_a_settlement_with_a_take_whose_answer_is_lost(self):
        """It is made once, and the job leased once."""
        for queue in self.each_answer(least=1):
            self.open().put("next", id="next", exist_ok=True)
            cut, self.relayed.cut_at = self.relayed.cut_at, 0
            job = queue.get()
            self.relayed.cut_at = cut
            done = [tq._Change(job.id, job.token, "done")]
            made, (after,), _ = queue._engine.take(1, 60.0, True, tq._LOWEST, done)
            self.assertEqual((made, after.attempts), ([cut > 1], 1))
            other = self.open()
            self.assertEqual([job.id for job in other.jobs()], [after.id])
            other.release(after)
            other.put("first", id="first", exist_ok=True)

    def each_answer(self, least=6):
        """New queues that lose the first, second, ... answer, as many as come."""
        for number in itertools.count(1):
            queue = self.open(path=self.queue._engine.source)
            self.relayed.cut_at = number
            yield queue
            if self.relayed.cut_at:
                break
            queue.close()
        self.relayed.cut_at = 0
        self.assertGreater(number, least)

    def test_a_look_before_all_whose_answer_is_lost(self):
        """Where there is no table yet, there is no job either."""
        self.place.clean(self.path)
        for queue in self.each_answer():
            self.assertIsNone(queue.get())

    def test_a_settlement_whose_answer_is_lost(self):
        """It is done, and the caller is told that this is not certain."""
        job = self.queue.get()
        self.relayed.cut_at = 1
        with self.assertRaises(tq.QueueError) as caught:
            self.queue.task_done(job)
        self.assertTrue(caught.exception.outcome_unknown)
        self.assertRaises(tq.JobNotFoundError, self.queue.find, "first")

    def test_no_call_hangs_on_a_silent_server(self):
        """LockTimeoutError within lock_timeout, whatever was asked; then all
        is well again."""
        queue = self.open(path=self.queue._engine.source, lock_timeout=1.0)
        job = queue.get()
        more = (queue.get, lambda: queue.task_done(job), queue.stats) if DEEP else ()
        for call in (lambda: queue.put(1), *more):
            self.relayed.silent = True
            start = time.monotonic()
            self.assertRaises(tq.QueueError, call)
            self.assertLess(time.monotonic() - start, 9.0)
            self.relayed.silent = False
        eventually(lambda: queue.stats().inflight == 1)
        queue.task_done(job)

    def test_no_thread_waits_for_the_others_in_turn(self):
        """Eight that ask a silent server fail together, not one after another."""
        queue = self.open(path=self.queue._engine.source, lock_timeout=1.0)
        self.relayed.silent = True
        start = time.monotonic()

        def get():
            self.assertRaises(tq.QueueError, queue.get)

        self.run_threads(*[get] * 8)
        self.assertLess(time.monotonic() - start, 9.0)

    def test_a_session_that_is_replaced_during_a_take(self):
        """The job came too late to change hands with the others: nobody takes
        it over all the same."""
        queue = self.open()
        engine = queue._engine
        session, take = engine._holder(True), engine._take

        def replaced(*args):
            found = take(*args)
            session.close()
            engine._holder(True)
            return found

        with mock.patch.object(engine, "_take", replaced):
            with self.assertLogs("tiny_queue", "WARNING"):
                job = queue.get()
        sql = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid ="
        eventually(lambda: not self.ask(f"{sql} {session.number}"))
        self.assertEqual(self.open().reap_stale(), 0)
        queue.task_done(job)


class PostgresRestartTest(ClusterCase):
    def setUp(self):
        super().setUp()
        self.done, self.put = collections.Counter(), itertools.count()
        self.ended, self.produced = threading.Event(), threading.Event()
        self.queue = self.open(
            path=self.path.replace("commit%3Doff", "commit%3Don"), fsync=True,
            backoff=lambda n: 0, max_retries=50, lock_timeout=30.0,
        )  # fmt: skip

    def produce(self):
        while not self.ended.is_set():
            number = next(self.put)
            self.queue.put(number, id=f"job-{number}", exist_ok=True)
        self.produced.set()

    def restart(self, worker):
        for how in (signal.SIGINT, signal.SIGQUIT, None):
            more = len(self.done) + 20
            eventually(lambda more=more: len(self.done) > more)
            if how:
                self.cluster.stop(how)
                self.cluster.start()
        self.ended.set()
        self.produced.wait(PATIENCE)
        eventually(lambda: self.queue.stats()[:4] == (0, 0, 0, 0))
        worker.stop()

    def test_a_restart_under_work_loses_no_job(self):
        """Workers and producers go on after the server was stopped, politely
        or not; each job is done, and the log says what happened."""
        worker = tq.Worker(
            self.queue,
            lambda job: self.done.update([job.payload]),
            0.05,
            handle_signals=False,
        )
        with self.assertLogs("tiny_queue", "WARNING"):
            self.run_threads(
                self.produce, lambda: self.restart(worker), worker.run_forever
            )
        self.assertEqual(set(self.done), set(range(next(self.put))))


class PostgresWakingTest(Case):
    @unittest.skipIf(NO_POSTGRES, NO_POSTGRES)
    def setUp(self):
        super().setUp()
        self.place = PostgresPlace(POSTGRES[0])
        self.path = self.place.where(self.dir)
        self.addCleanup(self.place.clean, self.path)

    def take(self, late):
        """Take jobs until one says 0; note how long each has waited."""
        queue = self.open()
        while (job := queue.get(timeout=PATIENCE)).payload:
            late.append(time.monotonic() - job.payload)
            queue.task_done(job)
        queue.task_done(job)

    def test_every_put_of_a_burst_wakes_somebody_soon(self):
        """However dense: few of them tell, and none waits for the look that is
        made once a second."""
        queue, late, tells, real = self.open(), [], [], tq._SqlLink.execute
        queue.put(0, delay=3600)
        busy = 0.0  # seconds in which there were puts

        def execute(link, sql, keys=None):
            tells.append(isinstance(keys, dict) and keys.get("tell"))
            return real(link, sql, keys)

        threads = [threading.Thread(target=self.take, args=[late]) for _ in range(4)]
        with mock.patch.object(tq._SqlLink, "execute", execute):
            for thread in threads:
                thread.start()
            for n in range(8):
                eventually(lambda n=n: len(late) == 4 * n and all(map(waits, threads)))
                time.sleep(0.05 * (n % 2))  # they sleep, or are about to
                busy -= time.monotonic()
                for _ in range(4):
                    queue.put(time.monotonic())
                busy += time.monotonic()
            queue.put_many([0] * 4)
            for thread in threads:
                thread.join(PATIENCE)
        self.assertLess(max(late), 0.5)
        self.assertLess(sum(map(bool, tells)), 2 * 9 + busy / tq._PG_QUIET + 2)

    def test_waiting_workers_hear_of_puts_at_once(self):
        """Median under 5 ms on a machine that is not busy; a tenth of the poll
        that stands behind it in any case."""
        queue, late = self.open(), []
        queue.put(1, delay=3600)
        thread = threading.Thread(target=self.take, args=[late])
        thread.start()
        for n in range(15):
            eventually(lambda n=n: waits(thread) and len(late) == n)
            time.sleep(2 * tq._PG_QUIET)
            queue.put(time.monotonic())
        eventually(lambda: len(late) == 15)
        queue.put(0)
        thread.join(PATIENCE)
        self.assertLess(sorted(late)[7], 0.1)


class PostgresJoinTest(Case):
    def setUp(self):
        super().setUp()
        if NO_POSTGRES:
            self.skipTest(NO_POSTGRES)
        self.place = PostgresPlace(POSTGRES[0])
        self.path = self.place.where(self.dir)
        self.addCleanup(self.place.clean, self.path)
        self.queue = self.open()
        self.queue.put("first", id="a")

    def test_a_connection_without_a_transaction_is_refused(self):
        """In autocommit the put would commit alone; and a failed transaction
        commits nothing."""
        with contextlib.closing(self.place.connect(self.path)) as conn:
            conn.autocommit = True
            with self.assertRaisesRegex(ValueError, "no transaction is open"):
                self.queue.put(1, connection=conn)
            with conn.transaction():
                self.queue.put(2, connection=conn)
            with self.assertRaises(psycopg.Error), conn.transaction():
                with contextlib.suppress(psycopg.Error):
                    conn.execute("SELECT 1/0")
                with self.assertRaisesRegex(ValueError, "INERROR"):
                    self.queue.put(3, connection=conn)
                conn.execute("SELECT 1")
        self.assertDrains(self.queue, ["first", 2])

    def test_a_transaction_that_may_not_write(self):
        """The server's error is a QueueError, and the caller rolls back."""
        with contextlib.closing(self.place.connect(self.path)) as conn:
            conn.execute("SET TRANSACTION READ ONLY")
            with self.assertRaisesRegex(tq.QueueError, "only reads"):
                self.queue.put(2, connection=conn)
            conn.rollback()
        self.assertDrains(self.queue, ["first"])

    def test_rows_may_be_anything_on_it(self):
        """Whatever row factory and adapters the application has set."""
        with contextlib.closing(self.place.connect(self.path)) as conn:
            conn.row_factory = psycopg.rows.dict_row
            for name in ("text", "int8", "float8"):
                conn.adapters.register_loader(name, psycopg.types.string.ByteaLoader)
            conn.execute("SET TIME ZONE 'Asia/Tokyo'; SET DateStyle = 'SQL, DMY'")
            found = self.queue.put(1, id="a", exist_ok=True, connection=conn)
            self.assertEqual(found.payload, "first")
            self.assertIsInstance(found.created_at, float)
            self.queue.put_many([2, 3], connection=conn)
            self.queue.task_done(self.queue.get(), connection=conn)
            conn.commit()
        self.assertDrains(self.queue, [2, 3])

    def test_in_a_pipeline(self):
        """Answers are waited for; an id that is alive spoils nothing."""
        with self.place.connect(self.path) as conn, conn.pipeline():
            self.queue.put(1, id="b", connection=conn)
            for ids in (["c", "a"], ["a", "c"]):
                with self.assertRaises(tq.DuplicateJobError):
                    self.queue.put_many([2, 3], ids=ids, connection=conn)
        self.assertDrains(self.queue, ["first", 1])

    def test_a_connection_that_gives_bytes_for_text_is_refused(self):
        """With the reason, and before anything is written."""
        with self.place.connect(self.path) as conn:
            conn.execute("SET client_encoding = 'SQL_ASCII'")
            with self.assertRaisesRegex(ValueError, "SQL_ASCII"):
                self.queue.put(1, connection=conn)
        self.assertDrains(self.queue, ["first"])

    def test_who_settles_in_an_open_transaction_holds_up_nobody(self):
        """A lease that ends meanwhile is not taken over before the commit, and
        others take and reap without waiting."""
        job = self.queue.get(lease_timeout=0.001)
        self.queue.put("next")
        with self.place.connect(self.path) as conn:
            self.queue.task_done(job, connection=conn)
            start = time.monotonic()
            self.assertEqual(self.queue.reap_stale(), 0)
            self.assertEqual(self.queue.get().payload, "next")
            self.assertLess(time.monotonic() - start, 5.0)
        self.assertRaises(tq.JobNotFoundError, self.queue.find, "a")


class PostgresOnceTest(ExactlyOnceTest):
    """Killed at any message to or from the server, likewise."""

    STRIDE, LEAST = 7, 8

    def setUp(self):
        if NO_POSTGRES:
            self.skipTest(NO_POSTGRES)
        self.place = PostgresPlace(POSTGRES[0])
        self.addCleanup(setattr, tq, "_poll", tq._poll)
        super().setUp()

    def watch(self, conn, step):
        """Call step() around each exchange of either connection."""
        poll = tq._poll
        conn.link = tq._PgLink()
        conn.link.open(conn)
        tq._poll = lambda *args: (step(), poll(*args), step())[1]


# Command line
# =============================================================================

CLI = [sys.executable, "-m", "tiny_queue"]
HOSTILE = "a\x1b[31m\x07\x9b2J\u202eevil\u2066\ud800\x7f"
RAW = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class CommandLineCase(Limited):
    """Runs commands in a temporary directory, where `jobs` is the queue; on
    other engines than files its URL is given in the place of that word.  Calling
    main() is faster than a process."""

    place = PLACES[0]

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = self.place.where(self.folder)
        self.addCleanup(self.place.clean, self.path)
        self.env = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm"}
        for name in ("TINY_QUEUE_DIR", "NO_COLOR", "COLUMNS", "LINES"):
            self.env.pop(name, None)

    def process(self, *args, status=0, stdin=""):
        """Run a command in a process of its own; return what it wrote."""
        args = self.located(args)
        ran = subprocess.run(
            [*CLI, *args], input=stdin, capture_output=True, cwd=self.folder,
            env=self.env, encoding="utf-8", timeout=60,
        )  # fmt: skip
        self.assertEqual(ran.returncode, status, (args, ran.stdout, ran.stderr))
        self.assertNotIn("Traceback", ran.stderr)
        return ran.stdout, ran.stderr

    def located(self, args):
        """The words of a command, with the queue's place for `jobs`."""
        if self.place is PLACES[0]:
            return args
        return [self.path if word == "jobs" else word for word in args]

    def command(self, *args, status=0, kind=io.StringIO, typed="", **env):
        """Call main(), check its exit status; return what it wrote."""
        out, err, args = kind(), kind(), self.located(args)
        env = {"TINY_QUEUE_DIR": "", "COLUMNS": "200", "TERM": "", **env}
        with contextlib.ExitStack() as stack:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(self.folder)
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            file.write(typed)
            file.seek(0)
            stdin = mock.Mock(wraps=file, isatty=out.isatty)
            stack.enter_context(mock.patch.dict(os.environ, env))
            stack.enter_context(mock.patch.object(sys, "stdin", stdin))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            try:
                got = tq.main(args)
            except SystemExit as exc:
                got = exc.code
        self.assertEqual(got, status, (args, err.getvalue()))
        return out.getvalue(), err.getvalue()

    def shown(self, *args, **options):
        """Call main() as on a terminal without colours; return what it wrote."""
        return self.command(*args, kind=Screen, **{"NO_COLOR": "1", **options})

    def answers(self, *args, **options):
        """Run a command, return the objects that it printed, one a line."""
        return [json.loads(s) for s in self.command(*args, **options)[0].splitlines()]

    def answer(self, *args, **options):
        (answer,) = self.answers(*args, **options)
        return answer

    def session(self, *rows):
        """Run commands; each is to answer one object, or a list of them, that
        has these pairs; or to end with a status and a text on stderr."""
        for line, want in rows:
            words = shlex.split(line)
            if isinstance(want, tuple):
                self.assertIn(want[1], self.command(*words, status=want[0])[1], line)
                continue
            wants = want if isinstance(want, list) else [want]
            found = self.answers(*words)
            self.assertEqual(len(found), len(wants), (line, found))
            for one, job in zip(wants, found):
                self.assertEqual({key: job[key] for key in one}, one, line)

    def queue(self, **options):
        queue = tq.Queue(self.path, **options)
        self.addCleanup(queue.close)
        return queue

    def bury(self, *ids):
        """Dead jobs, whose payload is their id."""
        queue = self.queue()
        for id in ids:
            queue.put(id, id=id)
            queue.bury(queue.get(), "bad")
        return queue

    def commands(self):
        """Those that the main help names."""
        text, _ = self.command("--help")
        return re.findall(r"(?m)^  (\w+) +\w", text.split("\ncommands")[1])


# Command line: commands
# =============================================================================


@every_engine
class PutTest(CommandLineCase):
    def test_options_reach_the_job(self):
        """What was put is what is shown; an id that is there is refused, or with
        --exist-ok answered."""
        job = {"id": "a", "payload": {"n": 1}, "priority": 7, "max_retries": 0}
        self.session(
            ("""put jobs '{"n": 1}' --id a --priority 7 --max-retries 0""", job),
            ("show jobs a", {**job, "state": "pending", "run_at": 0.0}),
            ("put jobs 2 --id a", (1, "'a' is already pending")),
            ("put jobs 2 --id a --exist-ok", job),
            ("put jobs --priority -2147483648 -5", {"payload": -5}),
            ("put jobs -s 'a b'", {"payload": "a b"}),
            ("put --string jobs -- --id", {"payload": "--id"}),
            ("put jobs 1 --at 2100-01-01T00:00:00+00:00", {"run_at": 4102444800.0}),
            ("put jobs 1 --at 2100-01-01T00:00:00Z", {"run_at": 4102444800.0}),
            ("put jobs 1 --at 4102444800", {"run_at": 4102444800.0}),
        )
        due = self.answer("put", "jobs", "1", "--delay", "1h")["run_at"]
        self.assertAlmostEqual(due, time.time() + 3600, delta=30)

    def test_what_is_no_payload_makes_nothing(self):
        """It is usage, says how to quote, and no directory appears."""
        deep = ["[" * depth + "]" * depth for depth in (501, 100_000)]
        for text in ("hello", "{a: 1}", "NaN", "1e999", "", "[" * 5000, *deep):
            _, err = self.command("put", "jobs", text, status=2)
            self.assertIn("deep" if text in deep else "not valid JSON", err)
            self.assertIn("--string", err)
        self.assertEqual(os.listdir(self.folder), [])

    def test_directory_from_the_environment(self):
        """TINY_QUEUE_DIR stands in for DIR, and an explicit DIR wins."""
        for words in (["1"], ["other", "2"], ["--id", "a", "3"]):
            self.command("put", *words, TINY_QUEUE_DIR=self.path)
        self.session(("ls jobs", [{"payload": 1}, {"payload": 3}]))

    def test_names_are_queues_of_their_own(self):
        """-n picks one, also in front; a missing one is told with those there."""
        self.session(
            ("put jobs 1 -n mail", {"payload": 1}),
            ("put jobs 2 --name=-rf", {"payload": 2}),
            ("ls jobs --name mail", {"payload": 1}),
            ("-n mail stats jobs", {"pending": 1, "queue": "mail"}),
            ("ls jobs", (3, "; -n can name: -rf, mail")),
        )

    def test_a_name_that_cannot_be_is_refused(self):
        """Nothing is made, neither in the directory nor outside of it."""
        for name in ("../evil", "a/b", "", "..", "x" * 65, "a\n", "é", "a.dead", "nul"):
            self.command("put", "jobs", "1", "--name", name, status=2)
            self.command("ls", "jobs", f"--name={name}", status=2)
        self.assertEqual(os.listdir(self.folder), [])


@every_engine
class PutLinesTest(CommandLineCase):
    def test_each_line_is_a_job_in_order(self):
        """put - takes NDJSON, more than one batch, CRLF, BOM and blank lines."""
        lines = "\ufeff0\r\n\n" + "".join(f"{n}\n" for n in range(1, 2500)) + "2500"
        self.assertEqual(self.answer("put", "jobs", "-", typed=lines), {"put": 2501})
        self.assertEqual([j.payload for j in self.queue().jobs()], [*range(2501)])

    def test_a_bad_line_is_reported_with_what_was_put_before(self):
        """All lines before a bad one are put, and none behind it."""
        lines = "".join(f"{n}\n" for n in range(1500)) + "oops\n7\n"
        out, err = self.command("put", "jobs", "-", typed=lines, status=1)
        self.assertEqual(out, "")
        self.assertIn("1500 jobs were put", err)
        self.assertIn("line 1501 is not valid JSON", err)
        self.assertEqual(len(self.queue()), 1500)

    @of_files
    def test_options_of_a_single_job_are_refused(self):
        """--id, --at and --max-retries make no sense for many; usage."""
        for option in ("--id=a", "--at=1", "--max-retries=1"):
            _, err = self.command("put", "jobs", "-", option, typed="1", status=2)
            self.assertIn(option.split("=")[0], err)
        self.command("put", "jobs", "-", "--delay=60", "--priority=2", typed="1")
        self.session(("ls jobs", {"priority": 2}), ("stats jobs", {"delayed": 1}))

    @of_files
    def test_a_slow_producer_does_not_wait_for_a_batch(self):
        """A line is put when it arrives, while the pipe stays open."""
        with subprocess.Popen(
            [*CLI, "put", self.path, "-"], cwd=self.folder, env=self.env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            process.stdin.write(b"1\n2")
            process.stdin.flush()
            queue = self.queue()
            eventually(lambda: len(queue) == 1)
            out, _ = process.communicate(timeout=PATIENCE)
        self.assertEqual(json.loads(out), {"put": 2})

    @of_files
    def test_progress_is_shown_on_a_terminal_only(self):
        """The progress line goes to a terminal's standard error."""
        for run, said in (
            (self.shown, "\r\x1b[K2 jobs put\r\x1b[K"),
            (self.command, ""),
        ):
            _, err = run("put", "jobs", "-", "--string", typed="hello\n\n")
            self.assertEqual(err, said)


@every_engine
class GetTest(CommandLineCase):
    def test_get_done_is_a_cycle_for_scripts(self):
        """get's id and token, which come first, are what done takes; the lease
        outlives get's process, but not its own time: then its token is refused."""
        self.command("put", "jobs", '"x"')
        old = json.loads(self.process("get", "jobs", "--lease", "5m")[0])
        self.assertEqual(list(old)[:2], ["id", "token"])
        self.assertEqual([old["payload"], old["attempts"]], ["x", 1])
        self.assertEqual(self.command("get", "jobs", status=3), ("", ""))
        self.assertEqual(self.queue().stats().inflight, 1)
        clock = Clock()
        clock.jump(301.0, mono=301.0)
        with clock.patch():
            new = self.answer("get", "jobs")
            self.assertEqual(new["id"], old["id"])
            _, err = self.command("done", "jobs", old["id"], old["token"], status=1)
            self.assertIn("no longer leased", err)
            done = self.command("done", "jobs", new["id"], new["token"])
        self.assertEqual(done, ("", ""))
        self.assertEqual(self.queue().stats()[:4], (0, 0, 0, 0))

    def test_get_waits_for_a_put(self):
        """--timeout waits, also for a queue that is not there yet."""
        wait = tq.Queue._wait

        def put_and_wait(queue, *args):
            self.queue().put("late", id="a", exist_ok=True)
            return wait(queue, *args)

        with mock.patch.object(tq.Queue, "_wait", put_and_wait):
            job = self.answer("get", "jobs", "--timeout", "20")
        self.assertEqual(job["payload"], "late")


@every_engine
class SettleTest(CommandLineCase):
    def lease(self, **options):
        self.queue().put("x", id="a", **options)
        return f"jobs a {self.answer('get', 'jobs')['token']}"

    def test_fail_retries_after_a_delay_or_the_job_is_dead(self):
        """It keeps the error; dead without retries left, or with --dead."""
        for options, more, state in (
            ({}, "--delay 1h", "pending"),
            ({"max_retries": 0}, "", "dead"),
            ({}, "--dead", "dead"),
        ):
            self.command(*f"fail {self.lease(**options)} --error oh {more}".split())
            want = {"state": state, "last_error": "oh", "attempts": 1}
            self.session(("show jobs a", want))
            late = self.queue().find("a").run_at > time.time() + 3000
            self.assertEqual(late, state == "pending")
            self.command("cancel", "jobs", "a")

    def test_a_wrong_token_changes_nothing(self):
        """done and fail of a token that is not the job's exit 1; of a job that is
        gone, 3."""
        words = self.lease()
        for command in ("done", "fail"):
            _, err = self.command(command, "jobs", "a", "0", status=1)
            self.assertIn("no longer leased to token '0'", err)
        self.command("done", *words.split())
        self.command("done", *words.split(), status=3)


@every_engine
class LookingTest(CommandLineCase):
    def test_a_missing_directory_is_nothing_and_stays_missing(self):
        """Every command that only looks or changes exits 3, creates nothing."""
        words = {"done": ["a", "t"], "fail": ["a", "t"], "show": ["a"],
                 "requeue": ["a"], "cancel": ["a"], "move": ["b"],
                 "purge": ["--state=dead", "--yes"]}  # fmt: skip
        for name in {*self.commands()} - {"put", "work"}:
            out, err = self.command(name, self.path, *words.get(name, []), status=3)
            self.assertEqual(out, "")
            self.assertIn("no queue", err)
        self.assertEqual(os.listdir(self.folder), [])

    @of_files
    def test_wrong_usage_is_2(self):
        """No command, an unknown one, missing and surplus words: usage."""
        for name in self.commands():
            for words, want in (([], "missing: DIR"), ("abcdefg", "too many argum")):
                self.assertIn(want, self.command(name, *words, status=2)[1])
        self.session(
            ("", (2, "COMMAND")),
            ("frobnicate", (2, "COMMAND")),
            ("show", (2, "TINY_QUEUE_DIR can stand in for DIR")),
            ("stats jobs here now", (2, "too many arguments: 'here' 'now'")),
            ("stats jobs --frob", (2, "--frob")),
            ("stats jobs -n no/name", (2, "'no/name' cannot name a queue")),
            ("put jobs 1 --delay soon", (2, "--delay: 'soon' is not a time like 90")),
            ("put jobs 1 --at soon", (2, "--at: 'soon' is not an instant like")),
            ("put jobs 1 --max-retries -1", (2, "'-1' is not a whole number from 0")),
            ("ls jobs --state odd", (2, "'odd' is not pending, inflight or dead")),
            ("purge jobs --yes", (3, "no queue")),
        )

    def test_ls_and_show(self):
        """ls lists by state and at most --limit, 3 if nothing; show prints one."""
        self.bury("bad").put_many(range(1, 5), ids=[*"abcd"])
        self.session(
            ("ls jobs", [*({"payload": n} for n in range(1, 5)), {"id": "bad"}]),
            ("ls jobs --state dead", {"payload": "bad", "last_error": "bad"}),
            ("ls jobs --state pending --limit 2", [{"payload": 1}, {"payload": 2}]),
            ("ls jobs --state inflight", (3, "")),
            ("show jobs a", {"payload": 1, "state": "pending"}),
            ("show jobs e", (3, "'e'")),
        )

    def test_stats_tells_what_is_running(self):
        """stats counts and lists the inflight jobs and since when."""
        queue = self.queue()
        queue.put_many(range(3))
        queue.put(9, delay=60)
        job = queue.get()
        stats = self.answer("stats", "jobs")
        found = [stats[name] for name in ("pending", "delayed", "inflight", "dead")]
        self.assertEqual(found, [3, 1, 1, 0])
        self.assertEqual(stats["running"][0]["id"], job.id)
        self.assertAlmostEqual(stats["running"][0]["leased_at"], time.time(), delta=30)
        self.assertGreaterEqual(stats["oldest_age"], 0)
        self.assertGreater(stats["next_due"], time.time())

    @of_files
    def test_prometheus_text_is_well_formed(self):
        """Each sample follows its HELP and TYPE; labels are escaped."""
        folder = 'q"uo\\te'
        tq.Queue(os.path.join(self.folder, folder)).put(1)
        out, _ = self.command("stats", folder, "--prometheus")
        sample = re.compile(r'(\w+)\{(?:\w+="(?:[^"\\\n]|\\.)*",?)+\} [0-9.e+-]+')
        name = None
        for line in out.splitlines():
            if line.startswith("# "):
                name = line.split()[2]
            else:
                self.assertEqual(sample.fullmatch(line)[1], name)
        self.assertIn('q\\"uo\\\\te",state="pending"} 1\n', out)

    @of_files
    def test_verify_lists_damage_and_is_1(self):
        """A flipped byte is found with file and line; verify exits 1."""
        queue = self.queue()
        queue.put_many(["one", "two"])
        self.assertEqual(self.answers("verify", "jobs"), [])
        file = pathlib.Path(file_of(self.path, "pending"))
        file.write_bytes(file.read_bytes().replace(b'"two"', b'"tvo"'))
        damage = self.answer("verify", "jobs", status=1)
        self.assertEqual([damage["file"], damage["line"]], [file.name, 2])


@every_engine
class ChangeTest(CommandLineCase):
    def test_jobs_are_requeued_cancelled_purged_and_reaped(self):
        """Each tells how many; one that is not there is 3."""
        queue = self.bury(*"abcd")
        self.session(
            ("requeue jobs b", {"requeued": 1}),
            ("requeue jobs b", (3, "'b'")),
            ("requeue jobs --all", {"requeued": 3}),
            ("requeue --all jobs", {"requeued": 0}),
            ("ls jobs", [{"id": id} for id in "bacd"]),
            ("cancel jobs a", {"cancelled": 1}),
            ("cancel jobs a", (3, "no job 'a'")),
            ("get jobs", {"id": "b"}),
            ("reap jobs", {"reaped": 0}),
            ("reap jobs --older-than 0", {"reaped": 1}),
            ("purge jobs --yes", (2, "--state")),
            ("purge jobs --state pending", (1, "say --yes")),
            ("purge jobs --state pending --yes --older-than 1d", {"purged": 0}),
            ("stats jobs", {"pending": 3, "dead": 0}),
            ("purge jobs --state pending --yes", {"purged": 3}),
        )
        self.assertEqual([*queue.jobs()], [])
        out = self.answer("requeue", "--all", TINY_QUEUE_DIR=self.path)
        self.assertEqual(out, {"requeued": 0})

    @of_files
    def test_purge_asks_on_a_terminal(self):
        """With count and age; only a yes deletes, anything else is status 1."""
        queue = self.bury("a", "b")
        words = ["purge", "jobs", "--state=dead"]
        for more, typed, status, left, said in (
            ([], "\n", 1, 2, "delete 2 dead jobs of"),
            (["--older-than=1h"], "n\n", 1, 2, "as far as not touched for 60 m, of"),
            ([], "y\n", 0, 0, "[y/N] "),
        ):
            _, err = self.shown(*words, *more, status=status, typed=typed)
            self.assertIn(said, err)
            self.assertEqual(queue.stats().dead, left)

    def test_compact_says_what_it_freed(self):
        """An engine that has nothing to compact says so with 1, as Queue does."""
        queue = self.queue()
        queue.put_many(range(100))
        queue.purge("pending")
        if self.place.engine.can_compact:
            sizes = self.answer("compact", "jobs")
            self.assertGreater(sizes["bytes_before"], 1000)
            self.assertEqual(sizes["bytes"], 0)
        else:
            self.assertRaises(tq.QueueError, queue.compact)
            self.session(("compact jobs", (1, "nothing to compact")))


# Command line: what reaches a terminal
# =============================================================================


class Killed(BaseException):
    pass


class MoveTest(CommandLineCase):
    """move: from any engine to any other."""

    def pairs(self):
        """Each engine to files, from files, and to itself; places anew."""
        files, *others = PLACES
        pairs = [(files, files), *((files, other) for other in others)]
        for pair in [*pairs, *((other, files) for other in others)]:
            wheres = []
            for place in pair:
                wheres.append(place.where(tempfile.mkdtemp(dir=self.folder)))
                self.addCleanup(place.clean, wheres[-1])
            with self.subTest(source=pair[0].name, target=pair[1].name):
                yield wheres

    def open(self, where):
        queue = tq.Queue(where, fsync=False, backoff=lambda n: 0)
        self.addCleanup(queue.close)
        return queue

    def fill(self, where):
        """One job of each kind that can be moved, and a leased one."""
        queue = self.open(where)
        for id, retries in (("dead", 0), ("killed", None)):
            queue.put(id, id=id, max_retries=retries)
            queue.get(lease_timeout=0.001)
            eventually(queue.reap_stale)
        for id, priority in (("leased", 9), ("retried", 8), ("again", 6)):
            queue.put(f"\udcff{id}", id=id, priority=priority, max_retries=priority)
        self.held = queue.get()
        queue.task_done(queue.get(), False, "oh \0", delay=3600)
        queue.task_done(queue.get(), False, "once")
        queue.put([1.5, None], id="late", delay=7200)
        queue.put_many(["x", "y", "z"], ids=["x", "y", "z"], priority=1)
        return queue

    def seen(self, *queues):
        """All that a move keeps of each job; no id may be there twice."""
        jobs = [job for queue in queues for job in queue.jobs()]
        self.assertEqual(len({job.id for job in jobs}), len(jobs))
        return {
            job.id: (job.payload, job.state, job.attempts, job._crashes, job.priority,
                     job.created_at, job.leased_at, job.last_error, job._limit,
                     job.run_at)
            for job in jobs
        }  # fmt: skip

    def test_jobs_arrive_as_they_were(self):
        """Payload, state, attempts, crashes, instants, error, limit and order are
        kept; what is inflight stays, is counted, and can be settled."""
        for source, target in self.pairs():
            queue = self.fill(source)
            want = self.seen(queue)
            answer = self.answer("move", source, target)
            moved = self.open(target)
            counts = {"pending": 7, "dead": 1, "kept": 0, "inflight": 1}
            self.assertEqual(answer, counts)
            self.assertEqual([job.id for job in queue.jobs()], ["leased"])
            del want["leased"]
            self.assertEqual(self.seen(moved), want)
            self.assertEqual(moved.find("dead")._crashes, 1)
            due = [moved.get().id for _ in range(5)]
            self.assertEqual(due, ["again", *"xyz", "killed"])
            queue.task_done(self.held)
            self.assertEqual(self.answer("move", source, target)["pending"], 0)

    def drain(self, queue):
        found = []
        while job := queue.get():
            found.append(job.id)
            queue.task_done(job)
        return found

    def begin(self, queue):
        """Put four jobs, one that is due later, and a dead one."""
        queue.put("bad", id="dead", priority=9)
        queue.bury(queue.get(), "why")
        for id in ("a", "b", "late", "c", "d"):
            queue.put(id, id=id, delay=7200 if id == "late" else 0)

    def move(self, queue, moved, n=0, event=None):
        """Move, in batches of two, with an event before the n-th verb of an engine
        that is called; whether it came."""
        left, move = [n], tq._Move(queue, moved)

        def counted(verb, *args):
            left[0] -= 1
            if left[0] == 0:
                event()
            return verb(*args)

        for side in ("_here", "_there"):
            engine = getattr(move, side)
            verbs = {name: getattr(engine, name) for name in self.VERBS}
            steps = {n: functools.partial(counted, verb) for n, verb in verbs.items()}
            setattr(move, side, Patched(engine, **steps))
        with mock.patch.object(tq, "_BATCH", 2), contextlib.suppress(Killed):
            move.run()
        return n > 0 >= left[0]

    VERBS = ("records", "renew", "put", "find", "change")

    def die(self):
        raise Killed

    def moments(self, places, stride, cases=("",)):
        """Each case with each step of a move: all of them between files, and
        elsewhere only some."""
        every = itertools.product(cases, range(1, self.STEPS + 2))
        return thinned(every, stride if "://" in "".join(places) else 1)

    STEPS = 20  # of three batches and the dead one

    def test_a_kill_at_any_step_is_made_good_by_the_same_command(self):
        """All is there as it was, in its order; at most a batch is due only within
        the hour, nothing before its time."""
        for places in self.pairs():
            queue, moved = map(self.open, places)
            for _, n in self.moments(places, 7):
                self.begin(queue)
                want = self.seen(queue)
                killed = self.move(queue, moved, n, self.die)
                self.assertEqual(killed, n <= self.STEPS)
                self.move(queue, moved)
                self.assertEqual(queue.stats()[:4], (0, 0, 0, 0), n)
                got = self.seen(moved)
                waits = {id: job[-1] for id, job in got.items() if job != want[id]}
                self.assertLessEqual(len(waits), 2, n)
                for id, run_at in waits.items():
                    self.assertAlmostEqual(run_at, time.time() + 3600, delta=PATIENCE)
                    self.assertEqual(got[id][:-1], want[id][:-1], (id, n))
                due = [id for id in "abcd" if id not in waits]
                self.assertEqual(self.drain(moved), due, n)
                self.empty(moved)

    def empty(self, *queues):
        """Forget all jobs; their ids."""
        ids = [job.id for queue in queues for job in queue.jobs()]
        for queue in queues:
            self.assertEqual(queue.stats().inflight, 0)
            queue.purge("pending")
            queue.purge("dead")
        return ids

    def test_what_is_done_at_any_step_neither_loses_nor_doubles(self):
        """On either side, beside a move or after its death; of cancelled jobs
        none is delivered."""
        whats = "work cancel requeue reap move kill".split()
        cases = [*itertools.product(whats, (0, 1))]
        for places in self.pairs():
            both = [*map(self.open, places)]
            for case, n in self.moments(places, 31, cases):
                self.check(n, both, *case)

    def check(self, n, both, what, side):
        queue, moved = both
        gone, self.taken = [], []
        self.begin(queue)
        self.move(queue, moved, n, lambda: self.do(what, side, both, gone))
        self.move(queue, moved)
        for job in self.taken:
            queue.task_done(job)
            gone.append(job.id)
        if what != "kill":
            gone += self.drain(moved)
            self.assertEqual(len(moved), 1, (what, side, n))  # the late one
        gone += self.empty(queue, moved)
        self.assertEqual(sorted(gone), self.ALL, (what, side, n))

    ALL = ["a", "b", "c", "d", "dead", "late"]

    def do(self, what, side, both, gone):
        queue = both[side]
        if what in ("work", "kill"):
            gone += self.drain(queue)
        elif what == "cancel":
            gone += ["b"] * queue.cancel("b")
        elif what == "requeue":
            queue.requeue_dead()
        elif what == "reap":
            queue.reap_stale(0)
            self.taken += both[0].get_many(1)  # whose lease the move must not take
        else:
            self.move(*both)
        if what == "kill":
            self.die()

    def test_copies_of_a_move_that_died_long_ago(self):
        """One is being worked on at the target and stays with its worker, one
        was settled there and comes again; what was put meanwhile moves too."""
        for places in self.pairs():
            queue, moved = map(self.open, places)
            queue.put_many([*"ab"], ids=[*"ab"])
            self.move(queue, moved, 5, self.die)  # both have them
            queue.put("c", id="c")
            self.assertEqual((len(queue), moved.get()), (1, None))
            moved._engine.change([tq._Change("a", None, "pending")])
            job = moved.get()
            self.assertTrue(moved.cancel("b"))
            self.move(queue, moved, 12, functools.partial(queue.put, "d", id="d"))
            self.assertEqual(queue.stats()[:4], (0, 0, 0, 0))
            self.assertEqual(moved.find("a").token, job.token)
            moved.task_done(job)
            self.assertEqual(self.drain(moved), ["b", "c", "d"])

    def test_two_moves_at_once_lose_nothing(self):
        """One begins at any step of the other, and dies at any of its own; at
        most one batch is there twice."""
        queue, moved = (self.open(f"{self.path}-{n}") for n in "ab")
        for n, m in thinned(itertools.product(range(1, 24), repeat=2), 5):
            self.begin(queue)
            second = functools.partial(self.move, queue, moved, m, self.die)
            self.move(queue, moved, n, second)
            gone = self.drain(moved)
            self.move(queue, moved)
            gone = collections.Counter(gone + self.empty(queue, moved))
            self.assertEqual(sorted(gone), self.ALL, (n, m))
            self.assertLessEqual(sum(gone.values()), 8, (n, m))

    def test_what_nobody_goes_on_with_comes_due_within_the_hour(self):
        """On one side or on both, but nothing before its time."""
        both = [self.open(f"{self.path}-{n}") for n in "ab"]
        for n in range(1, self.STEPS):
            self.begin(both[0])
            clock = Clock()
            self.move(*both, n, self.die)
            with clock.patch():
                clock.jump(3500.0)
                gone = [id for queue in both for id in self.drain(queue)]
                self.assertEqual(len({*gone}), len(gone), n)
                clock.jump(101.0)
                gone += [id for queue in both for id in self.drain(queue)]
                self.assertEqual({*gone}, {*"abcd"}, n)
                self.assertLessEqual(len(gone), 6, n)
                self.assertLessEqual({*self.empty(*both)}, {"dead", "late"})

    def test_a_power_cut_loses_and_doubles_nothing(self):
        """At any moment: each step is on disk before the next is begun."""
        disk = Disk.from_tree({"/q/": b""})
        with fresh(disk) as guest:
            queue, moved = guest.queue, guest.tq.Queue("/q", "b")
            queue.put_many([*"abc"], ids=[*"abc"])
            guest.tq._BATCH = 2
            disk.sync()
            guest.tq._Move(queue, moved).run()
        moments = range(len(disk.log) + 1)
        for label, cut in disk.power_states(
            random.Random(SEED), 4, at=moments, variants="prefix"
        ):
            with fresh(Disk.from_tree(cut.tree())) as guest:
                queue, moved = guest.queue, guest.tq.Queue("/q", "b")
                guest.tq._Move(queue, moved).run()
                self.assertEqual([*self.seen(queue, moved)], [*"abc"], label)
                self.assertEqual(queue.stats()[:4], (0, 0, 0, 0))

    def test_an_id_that_the_target_has_stays(self):
        """Unless payload and instant are the same; it is counted, the status is 1,
        and neither job is touched."""
        for source, target in self.pairs():
            queue, moved = self.open(source), self.open(target)
            queue.put("dead", id="dead")
            queue.bury(queue.get(), "why")
            moved.put("dead", id="dead")
            with Clock(time.time()).patch():
                queue.put_many([1, 2, 3], ids=["a", "b", "c"])
                moved.put("other", id="b")
            answer = self.answer("move", source, target, status=1)
            self.assertEqual((answer["pending"], answer["kept"]), (2, 2))
            self.assertEqual(queue.get().payload, 2)
            self.assertEqual(moved.find("b").payload, "other")
            self.assertEqual(queue.find("dead").last_error, "why")

    def test_people_are_told_what_moved_and_what_stays(self):
        """In a sentence each; the status is 1 if anything was kept."""
        self.fill(self.path)
        said = self.shown("move", "jobs", "b")[0]
        self.assertIn("moved 7 waiting and 1 dead jobs", said)
        self.assertIn("1 inflight stay until they are settled", said)
        self.assertNotIn("the target has", said)
        self.assertNotIn("inflight", self.shown("move", "b", "c")[0])
        self.command("put", "b", "1", "--id", "x")
        said = self.shown("move", "b", "c", status=1)[0]
        self.assertIn("moved 0 waiting", said)
        self.assertIn("1 stay: the target has their ids", said)

    def test_where_it_cannot_move(self):
        """To itself: that is usage; to what is no database: nothing is lost, and the
        same command goes on.  To another name in the same place it moves."""
        pathlib.Path(self.folder, "text").write_text("no database at all" * 100)
        self.session(
            ("put jobs 1", {}),
            ("move jobs jobs", (2, "cannot move to itself")),
            ("move jobs sqlite:///text", (1, "not finished: the same command goes")),
            ("move jobs jobs --to-name b", {"pending": 1}),
            ("stats jobs -n b", {"pending": 1}),
        )


class TerminalTest(CommandLineCase):
    """What a person on a terminal is shown, and what a pipe gets."""

    def test_tables_are_aligned_and_fit(self):
        """Under one header, however many blocks of rows; the last column is cut
        at the terminal's width."""
        self.queue(fsync=False).put_many(["x" * 99] * 501)
        lines = self.shown("ls", "jobs", COLUMNS="70")[0].splitlines()
        self.assertEqual(len(lines), 502)
        self.assertEqual({len(line) for line in lines[1:]}, {70})
        self.assertEqual({line[-2:] for line in lines[1:]}, {".."})
        found = {line.index("pending") for line in lines[1:]}
        self.assertEqual(found, {lines[0].index("STATE")})
        self.assertEqual([line for line in lines if line.startswith("ID")], lines[:1])

    def test_for_people_everything_is_told_in_words(self):
        """compact, verify, ls and stats on a terminal, empty and not."""
        queue = self.queue()
        queue.cancel(queue.put(1).id)
        self.assertIn("no job to list", self.shown("ls", "jobs", status=3)[1])
        self.assertIn("nothing is damaged", self.shown("verify", "jobs")[0])
        queue.put(1, id="later", delay=3 * 86400)
        self.assertRegex(self.shown("ls", "jobs")[0], r"later.* in 3 d")
        self.assertRegex(self.shown("show", "jobs", "later")[0], r"(?m)^id +later$")
        self.assertNotIn("RUNNING", self.shown("stats", "jobs")[0])
        queue.put(1, id="now")
        queue.get()
        self.assertRegex(self.shown("stats", "jobs")[0], r"\nnow +1 .* s\n$")
        size = queue.stats().bytes
        out = self.shown("compact", "jobs")[0]
        self.assertRegex(out, rf"^compacted {size} to \d+ bytes$")
        with open(file_of(self.path, "dead"), "w") as file:
            file.write("damage\n")
        out = self.shown("verify", "jobs", status=1)[0]
        self.assertRegex(out, r"FILE +LINE +REASON\ndefault.dead.jsonl +1 +not strict")
        os.truncate(file_of(self.path, "dead"), 0)

    def test_colour_only_on_a_terminal_and_never_with_no_color(self):
        """Escapes are for a terminal without NO_COLOR that is not dumb, nor an old
        console of Windows; --json is JSON there, too."""
        self.bury("a")
        for windows, name, escapes in (
            (False, "NO_COLOR", 4),
            (True, "NO_COLOR", 0),
            (True, "WT_SESSION", 4),
        ):
            with mock.patch.object(tq, "_WINDOWS", windows):
                shown = self.shown("ls", "jobs", **{"NO_COLOR": "", name: ""})[0]
            self.assertEqual(shown.count("\x1b["), escapes)
        self.assertNotIn("\x1b", self.shown("ls", "jobs")[0])
        self.assertNotIn("\x1b", self.shown("ls", "jobs", NO_COLOR="", TERM="dumb")[0])
        self.assertNotIn("\x1b", self.command("ls", "jobs")[0])
        for command in ("ls", "stats", "top"):
            json.loads(self.shown(command, "jobs", "--json")[0])

    def test_hostile_characters_never_reach_a_terminal(self):
        """Controls, bidi marks and surrogates are escaped in every view; piped
        answers are ASCII, and give back the payload exactly."""
        queue, hostile = self.queue(), "\u202eevil\u2066"
        queue.put(HOSTILE, id=hostile)
        queue.bury(queue.get(), HOSTILE)
        queue.put({HOSTILE: HOSTILE})
        queue.get()
        out, _ = self.command("show", "jobs", hostile)
        self.assertTrue(out.isascii() and not RAW.search(out))
        self.assertEqual(json.loads(out)["payload"], HOSTILE)
        for words, status in (
            ("ls jobs", 0), ("dead jobs", 0), ("stats jobs", 0), ("get jobs", 3),
            (f"show jobs {hostile}", 0), ("show jobs \x1b[31m", 2),
            ("ls jobs -n \x1b[31m", 2), ("ls \x1b[31m", 3), ("ls --\x1b[31m\u202e", 2),
            ("put q \x1b[31m\u202e", 2), (f"put jobs 1 --id \u202e{hostile}", 0),
        ):  # fmt: skip
            shown = self.shown(*words.split(" "), status=status)
            self.assertIsNone(RAW.search("".join(shown)), (words, shown))

    def test_ctrl_c_ends_it_quietly(self):
        """With the status by which shells tell that signal."""
        self.queue().put(1)
        with mock.patch.object(tq.Queue, "stats", side_effect=KeyboardInterrupt):
            self.assertEqual(self.command("stats", "jobs", status=130), ("", ""))


class TopTest(CommandLineCase):
    def watch(self, *steps, **env):
        """Each step is done in the place of top's sleep, then comes Ctrl-C;
        return the frames that were shown before each."""
        self.queue().put_many(range(3))
        steps = iter([*steps, lambda: signal.raise_signal(signal.SIGINT)])

        def sleep(seconds):  # other threads sleep, too
            return next(steps)() if seconds == 7.0 else time.sleep(seconds)

        with patched("time", sleep=sleep), contextlib.redirect_stdout(Screen()) as out:
            with mock.patch.dict(os.environ, {"TERM": "xterm", "NO_COLOR": "1", **env}):
                with mock.patch.object(sys, "stdin", io.StringIO()):
                    self.assertEqual(tq.main(["top", self.path, "--interval=7"]), 0)
        self.assertTrue(out.getvalue().startswith("\x1b[?1049h\x1b[?25l\x1b[?7l"))
        self.assertTrue(out.getvalue().endswith(self.LEAVE))
        return [
            frame.partition("\x1b[J")[0].replace("\x1b[K", "").splitlines()
            for frame in out.getvalue().split("\x1b[H")[1:]
        ]

    def test_it_is_redrawn_in_place(self):
        """Changes by others appear, with running jobs; it needs no keyboard, and
        SIGTERM ends it, too."""
        queue, before = self.queue(), signal.getsignal(signal.SIGTERM)
        end = functools.partial(signal.raise_signal, signal.SIGTERM)
        first, second = self.watch(lambda: self.assertTrue(queue.get()), end)
        self.assertIn("pending                 3           -", first)
        self.assertRegex(" ".join(second), r"pending +2 .* inflight +1 .* RUNNING +TRY")
        (job,) = queue.jobs("inflight")
        self.assertRegex(second[-1], rf"^{job.id}  1 .* \d+\.\d s$")
        self.assertIs(signal.getsignal(signal.SIGTERM), before)

    def test_a_small_terminal_is_not_overrun(self):
        """No more lines than rows; the terminal cuts what is too long."""
        ((*lines,),) = self.watch(COLUMNS="30", LINES="5")
        self.assertEqual(len(lines), 4)

    def test_rates_are_of_the_last_ten_seconds(self):
        """What changed before them does not count."""
        clock, queue = Clock(), self.queue()
        with mock.patch.object(tq, "time", Patched(time, monotonic=clock.monotonic)):
            frames = self.watch(
                lambda: clock.jump(mono=9),
                lambda: (queue.put_many([1] * 90), clock.jump(mono=9)),
            )
        rates = [frame[3].split()[2] for frame in frames]
        self.assertEqual(rates[:2], ["-", "+0.0"])
        self.assertAlmostEqual(float(rates[2]), 10.0, delta=0.5)

    def test_however_it_ends_the_terminal_is_given_back(self):
        """By q, Ctrl-C or an error: its modes are as before.  Other keys mean
        nothing."""
        import termios

        self.queue().put(1)
        ours, theirs = os.openpty()
        self.addCleanup(os.close, ours)
        before, during, wait = termios.tcgetattr(theirs), [], select.select

        def typed(keys, *args):
            during.append(termios.tcgetattr(theirs))
            if len(during) == 1:
                return [], [], []
            os.write(ours, b"x" if len(during) == 2 else b"q")
            return wait(keys, [], [], PATIENCE)

        with open(theirs) as stdin, mock.patch.object(sys, "stdin", stdin):
            for end, status in ((typed, 0), (KeyboardInterrupt, 0), (OSError, 1)):
                with contextlib.redirect_stdout(Screen()) as out:
                    with mock.patch("select.select", side_effect=end):
                        with mock.patch.dict(os.environ, TERM="xterm"):
                            self.assertEqual(tq.main(["top", self.path]), status)
                self.assertTrue(out.getvalue().endswith(self.LEAVE))
                self.assertEqual(termios.tcgetattr(theirs), before)
        self.assertEqual([modes == before for modes in during], [False] * 3)
        self.assertTrue(during[0][3] & termios.ISIG)  # Ctrl-C is no key

    LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

    def test_what_is_no_terminal_gets_stats_once(self):
        """Piped, as on a terminal that cannot be redrawn, top is stats."""
        self.queue().put_many(range(3))
        self.assertEqual(self.answer("top", "jobs")["pending"], 3)
        shown, _ = self.shown("top", "jobs", TERM="dumb")
        self.assertEqual(shown.count("3 (0 delayed)\n"), 1)


class StreamsTest(CommandLineCase):
    """Standard streams that are closed, or not what they should be."""

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_closed_pipe_and_a_full_disk(self):
        """`ls | head -1` prints one line and no complaint; what cannot be written is
        an error, not silence."""
        self.queue().put_many(["x" * 200] * 3000)
        full = r"tiny_queue: .*No space left.*\n"
        for end, said, want in (
            ("| head -n 1", "", (0, 1)),
            (">/dev/full", full, (1, 0)),
        ):
            ran = subprocess.run(
                ["sh", "-c", f"{' '.join(CLI)} ls jobs {end}"], cwd=self.folder,
                env=self.env, capture_output=True, timeout=60, text=True,
            )  # fmt: skip
            self.assertEqual((ran.returncode, ran.stdout.count("\n")), want)
            self.assertRegex(ran.stderr, f"^{said}$")

    def without(self, name, *args, status, stream=None):
        """Call main() without one of the standard streams, or with that one in
        its place; return what it said."""
        with mock.patch.object(sys, "stderr", io.StringIO()) as err:
            with mock.patch.object(sys, "stdout", io.StringIO()):
                with mock.patch.object(sys, name, stream):
                    self.assertEqual(tq.main(args), status)
        return err.getvalue()

    def stream(self, verb, error):
        """A standard stream whose write or flush fails."""
        file = tempfile.TemporaryFile()
        self.addCleanup(file.close)
        stream = mock.Mock(encoding="utf-8", isatty=lambda: False, fileno=file.fileno)
        getattr(stream, verb).side_effect = error
        return stream

    def test_without_one_of_them(self):
        """Nothing is done without standard output, for nobody would see what; an
        error that cannot be told keeps its exit status."""
        put = ("put", self.path)
        for name, words, status, said in (
            ("stdout", (*put, "1"), 1, "tiny_queue: standard output is closed\n"),
            ("stdin", (*put, "-"), 1, "standard input is closed"),
            ("stderr", ("show", self.path, "a"), 3, ""),
        ):
            self.assertIn(said, self.without(name, *words, status=status))
            self.assertFalse(os.path.exists(self.path))
        full = self.stream("write", OSError(errno.ENOSPC, "No space left on device"))
        self.without("stderr", "show", self.path, "a", status=3, stream=full)
        full.write.assert_called_once()

    def test_an_answer_that_cannot_be_written(self):
        """Of a change it is said that it was made, or it would be repeated; a job
        of get that nobody saw is given back, and that delivery not counted."""
        full = self.stream("flush", OSError(errno.ENOSPC, "No space left on device"))
        for words, done in (
            (["put", self.path, "1", "--id=a"], "; but this was done: put job a"),
            (["ls", self.path], ""),
            (["get", self.path], ""),
            (["cancel", self.path, "a"], "; but this was done: cancelled 1 job"),
        ):
            said = self.without("stdout", *words, status=1, stream=full)
            want = f"tiny_queue: cannot write the answer: No space left on device{done}"
            self.assertEqual(said, f"{want}\n")
            if words[0] == "get":
                self.session(("show jobs a", {"state": "pending", "attempts": 0}))

    def test_any_locale_will_do(self):
        """On a stream that can show ASCII only, the rest is escaped."""
        self.queue().put("漢字", id="é")
        out = io.TextIOWrapper(io.BytesIO(), "ascii")
        with mock.patch.object(tq, "_is_terminal", return_value=True):
            self.without("stdout", "show", self.path, "é", status=0, stream=out)
        self.assertIn(rb"\u6f22\u5b57", out.buffer.getvalue())

    def test_a_reader_that_has_left_before_the_answer(self):
        """It has had enough: no error, and the change is made."""
        left = self.stream("flush", BrokenPipeError)
        with tempfile.TemporaryFile() as file:
            left.fileno = file.fileno
            words = ("put", self.path, "1")
            self.assertEqual(self.without("stdout", *words, status=0, stream=left), "")
        self.assertEqual(len(self.queue()), 1)


class HelpTest(CommandLineCase):
    def examples(self, command):
        """The lines behind `example:` in a command's help."""
        text, _ = self.command(command, "--help")
        return re.split(r"\nexamples?:\n", text)[1].strip().splitlines()

    def test_every_example_runs(self):
        """The examples of all commands, in order, are one session.  What needs a
        shell, or processes, gets them."""
        with open(os.path.join(self.folder, "handlers.py"), "w") as file:
            file.write("def send(job):\n    print('sent', job.payload)\n")

        def value(name):
            return job[name[1]]

        for command in self.commands():
            for line in self.examples(command):
                if command in ("done", "fail"):
                    job = self.answer("get", "jobs")
                if "|" in line or command == "work":
                    line = line.replace("python3 -m", '"$PYTHON" -m')
                    env = {**self.env, "PYTHON": sys.executable}
                    subprocess.run(
                        line, shell=True, cwd=self.folder, env=env, timeout=60,
                        capture_output=True, check=True,
                    )  # fmt: skip
                else:
                    line = re.sub(r'"\$(\w+)"', value, line)
                    words = shlex.split(line)
                    self.assertEqual(words[:3], ["python3", "-m", "tiny_queue"])
                    self.command(*words[3:])

    def test_every_command_is_told(self):
        """In the main help, which shows a URL, and the README; each has a help of
        its own, with an example, that says where a URL will do."""
        commands, main = self.commands(), self.command("--help")[0]
        self.assertIn("sqlite:///", main)
        readme = pathlib.Path(ROOT, "README.md").read_text("utf-8")
        found = re.findall(r"(?m)^    tiny-queue (\w+) ", readme)
        self.assertEqual(sorted(set(found)), sorted(commands))
        for command in commands:
            text, _ = self.command(command, "--help")
            self.assertIn("[DIR]", text)
            self.assertIn("DIR may be a URL", text)
            self.assertIn(f" {command} jobs", " ".join(self.examples(command)))
        self.assertEqual(self.command("--version"), (f"{tq.__version__}\n", ""))


# Command line: work
# =============================================================================

HANDLERS = """
import asyncio, os, signal, sys, threading, time
import tiny_queue as tq

def note(text):
    with open("notes", "a") as file:
        file.write(f"{text}\\n")

def handle(job):
    what = job.payload
    note(f"{what} {os.getpid()}")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow":
        time.sleep(60)
    if what == "wait":
        while not os.path.exists("go"):
            time.sleep(0.01)
    if what == "fail":
        raise tq.Fail("never")
    if what == "exit":
        sys.exit("no such file")
    if what == "stdin":
        note(f"read {sys.stdin.read()!r}")
    note(f"{what}-ended {os.getpid()}")

async def later(job):
    note(f"{job.payload} {os.getpid()}")
    await asyncio.sleep(60 if job.payload == "slow" else 0.01)
"""


@every_engine(only=["test_several_processes_share_the_jobs", "test_what_handlers_do"])
class WorkTest(CommandLineCase):
    def setUp(self):
        super().setUp()
        with open(os.path.join(self.folder, "handlers.py"), "w") as file:
            file.write(HANDLERS)

    def notes(self, what):
        """The process ids that noted something, in order."""
        try:
            with open(os.path.join(self.folder, "notes")) as file:
                pairs = [line.split() for line in file]
        except FileNotFoundError:
            return []
        return [int(pid) for name, pid in pairs if name == what]

    def put(self, *payloads, **options):
        queue = self.queue()
        for payload in payloads:
            queue.put(payload, **options)
        return queue

    def start(self, *args, handler="handlers:handle"):
        process = subprocess.Popen(
            [*CLI, "work", self.path, handler, *args], cwd=self.folder, env=self.env,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def work(self, *args, stdin="", handler="handlers:handle"):
        words = ["work", "jobs", handler, "--stop-when-empty", *args]
        return self.process(*words, stdin=stdin)[1]

    def gone(self, pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def go(self):
        with open(os.path.join(self.folder, "go"), "w"):
            pass

    def test_several_processes_share_the_jobs(self):
        """A mistyped DIR is told of; they wait for the first job there.  More than
        one takes part, and --max-jobs bounds the deliveries of all together."""
        process = self.start("--processes=2", "--threads=2", "--max-jobs=4")
        self.assertIn("no queue in", process.stderr.readline())
        queue = self.put(*["wait"] * 6)
        pids = eventually(lambda: len(self.notes("wait")) == 4 and self.notes("wait"))
        self.go()
        process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 0)
        self.assertEqual((len(set(pids)), len(self.notes("wait-ended"))), (2, 4))
        self.assertEqual(queue.stats()[:4], (2, 0, 0, 0))

    def test_what_handlers_do(self):
        """A job that kills its process is delivered max_retries + 1 times; by
        `raise tq.Fail` one is dead at once; standard input is empty."""
        queue = self.put("kill", "fail", "stdin", *["ok"] * 5, max_retries=1)
        err = self.work("--processes", "2", stdin="for nobody")
        self.assertIn("read ''\n", pathlib.Path(self.folder, "notes").read_text())
        self.assertEqual(err.count("ended with signal 9; the next starts in"), 2)
        dead = {job.payload: (job.attempts, job.last_error) for job in queue.jobs()}
        self.assertIn("holder died", dead["kill"][1])
        self.assertEqual(dead, {"kill": (2, dead["kill"][1]), "fail": (1, "never")})
        counts = [len(self.notes(f"{what}-ended")) for what in ("stdin", "ok")]
        self.assertEqual((len(self.notes("kill")), *counts), (2, 1, 5))
        self.assertEqual(len(queue), 0)

    def test_a_job_over_its_time_fails_and_its_process_is_killed(self):
        """--timeout: dead with that reason, the process gone, others done."""
        queue = self.put("slow", max_retries=0)
        self.put(*["ok"] * 3)
        err = self.work("--timeout", "0.5", handler="handlers:later")
        (dead,) = queue.dead_letter()
        self.assertEqual(dead.last_error, "ran longer than 0.5 s (--timeout)")
        self.assertEqual((dead.attempts, queue.stats().pending), (1, 0))
        self.assertTrue(self.gone(self.notes("slow")[-1]))
        self.assertIn("ran too long", err)
        self.assertNotIn("ended with", err)

    def test_a_signal_ends_a_worker_that_is_not_ready(self):
        """It is the supervisor that counts signals, and pauses that grow."""
        with open(os.path.join(self.folder, "slow.py"), "w") as file:
            file.write("import os, time\ntime.sleep(os.kill(os.getpid(), 15) or 5)\n")
        process = self.start("--processes", "2", handler="slow:f")
        for pause in ("0.1", "0.2"):
            said = process.stderr.readline()
            self.assertIn(f"signal 15; the next starts in {pause} s", said)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(PATIENCE), 0)

    def test_a_handler_that_exits_is_told_of_and_restarted_in_growing_pauses(self):
        """It is no success, and --max-jobs is used up, by one job if need be."""
        queue = self.put("exit")
        _, err = self.process("work", "jobs", "handlers:handle", "--max-jobs", "3")
        self.assertEqual(len(self.notes("exit")), 3)
        self.assertEqual(re.findall(r"status 0.* in ([\d.]+) s", err), ["0.1", "0.2"])
        self.assertEqual(err.count("ends its worker: SystemExit: no such file"), 3)
        (job,) = queue.jobs()
        self.assertEqual([job.state, job.attempts], ["pending", 0])

    def test_a_signal_finishes_running_jobs_and_a_second_gives_them_back(self):
        """None is begun, the status is 0; what is given back is not counted.  Ctrl-C
        reaches workers once, and so does systemd's SIGTERM to all processes."""
        for payload, numbers in (
            ("wait", [signal.SIGINT]),
            ("wait", [signal.SIGTERM]),
            ("slow", [signal.SIGTERM, signal.SIGINT]),
        ):
            queue = self.put(payload, "next")
            before, process = len(self.notes(payload)), self.start()
            worker = eventually(lambda p=payload, n=before: self.notes(p)[n:])[0]
            for number in numbers:
                if numbers == [signal.SIGTERM]:
                    os.kill(worker, number)
                os.killpg(process.pid, number)  # as a terminal does
            said = process.stderr.readline()
            self.assertIn("still running: 1; a second signal gives", said)
            time.sleep(0.2)  # for a signal too many to do its harm
            self.go()
            process.communicate(timeout=PATIENCE)
            self.assertEqual((process.returncode, self.notes("next")), (0, []))
            left = sorted((j.payload, j.state, j.attempts) for j in queue.jobs())
            want = [("next", "pending", 0), ("slow", "pending", 0)]
            self.assertEqual(left, want[: len(numbers)])
            queue.purge("pending")
            os.unlink(os.path.join(self.folder, "go"))

    def test_workers_do_not_outlive_a_killed_supervisor(self):
        """SIGKILL of the supervisor: its workers stop by themselves."""
        self.put("ok")
        process = self.start("--processes", "2", "--timeout", "60")
        (pid,) = eventually(lambda: self.notes("ok-ended"))
        process.kill()
        eventually(lambda: self.gone(pid))

    def test_a_handler_that_cannot_be_imported_is_usage(self):
        """A wrong MODULE:FUNCTION is told once and exits 2, a wrong DIR so too, 1."""
        for place, name, status, said in (
            ("jobs", "handlers:nothing", 2, "handlers:nothing"),
            ("handlers.py", "handlers:handle", 1, "Not a directory"),
        ):
            _, err = self.process("work", place, name, "--processes=3", status=status)
            self.assertEqual(err.count(said), 1, err)
            self.assertEqual(err.count("\n"), 1, err)


class SupervisorTest(CommandLineCase):
    """What the supervisor does about what has become of its workers."""

    # State and jobs begun and ended, status, last pause, what else; what follows.
    ENDS = [
        ((tq._READY, 1, 0), -9, 0.0, {}, "signal 9; the next starts in 0.1 s"),
        ((tq._READY, 1, 0), 7, 6.4, {}, "ended with exit status 7; .* in 12.8 s"),
        ((tq._STARTING, 0, 0), 7, 0.1, {}, "in 0.2 s"),
        ((tq._READY, 1, 0), 7, 25.6, {"lived": 9.0}, "in 30 s"),
        ((tq._READY, 1, 0), 7, 30.0, {"lived": 11.0}, "in 0.1 s"),
        ((tq._READY, 2, 1), 7, 30.0, {}, "in 0.1 s"),
        ((tq._READY, 1, 0), 0, 0.0, {"stop_when_empty": True}, "in 0.1 s"),
        ((tq._STARTING, 0, 0), 2, 0.0, {"ready": True}, "in 0.1 s"),
        ((tq._FINISHED, 1, 1), 0, 0.0, {"max_jobs": 2}, "in 0.1 s"),
        ((tq._TIMED_OUT, 1, 0), -9, 30.0, {}, "at once"),
        ((tq._TIMED_OUT, 1, 0), -9, 0.0, {"max_jobs": 1}, "never"),
        ((tq._FINISHED, 1, 1), 0, 0.0, {"stop_when_empty": True}, "never"),
        ((tq._READY, 1, 0), -9, 0.0, {"signals": 1}, "never"),
        ((tq._STARTING, 0, 0), 1, 0.0, {}, "never"),
        ((tq._STARTING, 0, 0), 2, 0.0, {}, "never"),
    ]

    def supervisor(self, **options):
        """One whose first worker is taken to run as process 1000."""
        args = {"max_jobs": None, "processes": 1, "stop_when_empty": False}
        supervisor = tq._Supervisor(types.SimpleNamespace(**{**args, **options}))
        self.addCleanup(os.close, supervisor._stop_end)
        supervisor._workers[0].pid = 1000
        return supervisor, supervisor._workers[0]

    def said(self, call, *args):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            call(*args)
        return err.getvalue()

    def test_when_a_successor_starts(self):
        """After a pause that grows while workers die before they have ended a
        job; at once after a job over its time; never if all is done, or if the
        first said what is wrong with the arguments."""
        for numbers, status, pause, options, want in self.ENDS:
            with self.subTest(numbers=numbers, status=status, **options):
                supervisor, worker = self.supervisor(**options)
                supervisor._ready = options.get("ready", numbers[0] != tq._STARTING)
                supervisor._signals = options.get("signals", 0)
                for i, number in enumerate(numbers):
                    worker.numbers[i] = number
                worker.pause = pause
                worker.started_at = time.monotonic() - options.get("lived", 0.0)
                said = self.said(supervisor._see_to_successor, worker, status)
                if want in ("at once", "never"):
                    self.assertEqual(said, "")
                    self.assertEqual(supervisor._is_due(worker), want == "at once")
                else:
                    self.assertRegex(said, f"worker 1000 .*{want}$")
                said_why = numbers[0] == tq._STARTING and want == "never"
                self.assertEqual(supervisor._status, status if said_why else 0)

    def test_a_mistyped_name_is_told_of(self):
        """With those that are there."""
        self.bury("a")
        said = self.said(tq._say_what_is_missing, self.queue(name="defualt"))
        self.assertIn("no job of queue 'defualt' yet; others: default", said)

    def test_the_first_signal_closes_the_pipe_and_the_next_two_never_become_one(self):
        """A worker that is not started yet is not signalled."""
        supervisor, worker = self.supervisor(processes=2)
        worker.numbers[1], worker.numbers[2] = 5, 3
        supervisor._signals = 2
        waitpid, kill = mock.Mock(return_value=(0, 0)), mock.Mock()
        with patched("os", waitpid=waitpid, kill=kill):
            said = self.said(supervisor._step)
        self.assertIn("still running: 2; a second signal gives such jobs back", said)
        self.assertEqual(os.read(supervisor._stop_end, 1), b"")
        both = [mock.call(1000, signal.SIGTERM), mock.call(1000, signal.SIGINT)]
        self.assertEqual(kill.mock_calls, both)

    def test_a_signal_while_no_job_runs_says_nothing(self):
        """There is none that a second signal could give back."""
        supervisor, _ = self.supervisor()
        supervisor._forwarded = 1
        self.assertEqual(self.said(supervisor._forward), "")

    def test_no_worker_can_be_started(self):
        """It is told, and tried again after a pause."""
        supervisor, worker = self.supervisor()
        worker.pid = 0
        error = OSError(errno.EAGAIN, "no more processes")
        with patched("os", fork=mock.Mock(side_effect=error)):
            said = self.said(supervisor._start, worker)
        self.assertIn("no more processes; the next starts in 0.1 s", said)
        self.assertFalse(supervisor._is_due(worker))
        self.assertEqual(worker.pid, 0)

    def test_without_fork_there_is_one_worker(self):
        """On Windows: in this very process, which no signal from here ends."""
        args = types.SimpleNamespace(processes=2, max_jobs=3)
        with lacking("fork"), mock.patch.object(tq, "_work", return_value=0) as work:
            with self.assertRaisesRegex(tq.QueueError, "cannot fork"):
                tq._cmd_work(args, None)
            args.processes = 1
            self.assertEqual(tq._cmd_work(args, None), 0)
        self.assertEqual(work.call_args[0][1].quota, 3)


class TimeLimitTest(CommandLineCase):
    """What a worker process does about a job over its time."""

    def setUp(self):
        super().setUp()
        self.counted(lambda job: None)

    def counted(self, handler):
        self.numbers = memoryview(bytearray(24)).cast("q")
        self.handler = tq._CountedHandler(self.queue(), handler, None, self.numbers)
        self.handler._limit = 1.0

    def running(self, *ids):
        """Jobs that were begun two seconds ago."""
        queue = self.handler._queue
        queue.put_many([1] * len(ids), ids=list(ids))
        jobs = queue.get_many(len(ids))
        since = time.monotonic() - 2
        self.handler._running.update({job.token: (job, since) for job in jobs})
        return jobs

    def look(self, said="", group=True):
        """Look at the time once; return whether the process was killed."""
        kill, leave = mock.Mock(), mock.Mock(side_effect=SystemExit)
        absent = "" if group else "killpg"
        with lacking(absent), patched("os", killpg=kill, _exit=leave):
            with contextlib.redirect_stderr(io.StringIO()) as err:
                with contextlib.suppress(SystemExit):
                    self.handler._look()
        self.assertIn(said, err.getvalue())
        killed = [mock.call(os.getpid(), signal.SIGKILL)]
        self.assertEqual(kill.mock_calls, killed if leave.called and group else [])
        self.assertEqual(self.numbers[0], tq._TIMED_OUT if leave.called else 0)
        return leave.called

    def test_a_job_over_its_time_takes_its_process_along(self):
        """It fails with that reason; the other ones lose no delivery, even if one
        is cancelled meanwhile.  Windows has no groups."""
        queue = self.handler._queue
        for group in (True, False):
            jobs, young = self.running("b", "a", "c"), time.monotonic() + 60
            for job in jobs[::2]:
                self.handler._running[job.token] = job, young
            queue.cancel("c")
            self.assertTrue(self.look("job a ran too long; its worker is", group))
            found = {j.id: (j.state, j.attempts, j.last_error) for j in queue.jobs()}
            error = "ran longer than 1 s (--timeout)"
            want = {"a": ("pending", 1, error), "b": ("pending", 0, None)}
            self.assertEqual(found, want)
            self.handler._running.clear()
            queue.purge("pending")
            self.numbers[0] = 0

    def test_what_happens_while_it_is_failed(self):
        """One that ends is not killed, the new lease of one that was given back is
        not settled, and an error of the queue does not keep the worker."""
        (job,) = self.running("a")
        queue, settle = self.handler._queue, self.handler._queue.task_done

        def settled(*args):
            self.handler._running.clear()
            queue.release(job)
            settle(*args)

        with mock.patch.object(queue, "task_done", settled):
            self.assertFalse(self.look())
        again = queue.get()
        self.handler._running[job.token] = job, 0.0
        self.assertTrue(self.look("ran too long"))
        self.assertEqual(queue.find("a").token, again.token)
        self.numbers[0] = 0
        error = mock.Mock(side_effect=tq.QueueError("disk full"))
        with mock.patch.multiple(queue, task_done=error, release=error):
            self.assertTrue(self.look("disk full"))

    def test_a_handler_that_exits_has_not_ended_its_job(self):
        """So it does not make the next pause short; one that returned does, and one
        that is awaited when its await ends.  What it returns is the worker's."""

        def plain(job):
            if job.token == 2:
                sys.exit()
            return job

        async def later(job):
            plain(job)

        for handler in (plain, later):
            self.counted(handler)
            for token, ended in [(1, 1), (2, 1), (3, 2)]:
                job = types.SimpleNamespace(token=token)
                with contextlib.suppress(SystemExit):
                    result = self.handler.handle(job)
                    if handler is later:
                        self.assertEqual(len(self.handler._running), 1)
                        asyncio.run(result)
                    else:
                        self.assertIs(result, job)
                self.assertEqual(list(self.numbers), [0, token, ended])

    def test_a_handler_that_lets_no_other_thread_run_is_ended(self):
        """faulthandler needs no Python for it, and tells the stack."""
        code = """
            import re, time, types, tiny_queue as tq

            def hang(job):
                time.sleep(0.2)
                re.match("(a+)+$", "a" * 40 + "b")

            tq._CountedHandler._GRACE = 0.2
            numbers = memoryview(bytearray(24)).cast("q")
            counted = tq._CountedHandler(None, hang, 0.3, numbers)
            counted.handle(types.SimpleNamespace(token="t"))
        """
        ran = run_python(textwrap.dedent(code))
        self.assertEqual(ran.returncode, 1, ran.stderr)
        self.assertIn("in hang", ran.stderr)


class HandlerNameTest(CommandLineCase):
    def test_handlers_are_found_in_the_current_directory(self):
        """Also if the interpreter does not look there by itself; what is no function
        is refused by its name."""
        for name, text in (
            ("tq_found_here", "def handle(job):\n    pass\nnumber = 7\n"),
            ("tq_broken", "def x(:\n"),
        ):
            pathlib.Path(self.folder, f"{name}.py").write_text(text)
        self.addCleanup(sys.modules.pop, "tq_found_here", None)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        with mock.patch.object(sys, "path", list(sys.path)):
            found = tq._import_handler("tq_found_here:handle")
            for name in ("tq_nowhere:f", "tq_found_here:nothing", "tq_broken:x",
                         "tq_found_here:number", "tq_found_here:"):  # fmt: skip
                with self.assertRaisesRegex(ValueError, name):
                    tq._import_handler(name)
        self.assertEqual(found.__module__, "tq_found_here")


# Command line: examples
# =============================================================================


class ExampleScriptsTest(CommandLineCase):
    def run_example(self, *command):
        folder = os.path.join(ROOT, "examples")
        command = [
            os.path.join(folder, word) if word.endswith((".py", ".sh")) else word
            for word in command
        ]
        env = {
            "PYTHONPATH": f"{ROOT}:{folder}",
            "TQ": f"{sys.executable} -m tiny_queue",
        }
        ran = subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, timeout=60,
            capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        self.assertEqual(os.listdir(self.folder), [])
        return ran.stdout

    SAID = {
        "web_handoff.py": "on disk: 3\nsent afterwards: 3",
        "cron_once.py": "sales-2030-01-31 is pending already: nothing added",
        "async_program.py": "20 jobs",
        "poison.py": "dead: 'poison', holder died .delivery 2 of 2.",
        "transfer.py": r"60 transfers once each, [1-9]\d* workers killed",
        "consume.sh": r'handled bread\nhandled jam\n.*"dead": 1\b',
    }

    def test_what_they_say(self):
        """Each of them ends well, and has under 60 lines."""
        for name, want in self.SAID.items():
            file = pathlib.Path(ROOT, "examples", name)
            self.assertLess(file.read_text("utf-8").count("\n"), 60, name)
            command = ["sh" if name.endswith(".sh") else sys.executable, name]
            if name == "transfer.py":  # of 200, which take longer
                code = "import sys, transfer as t; t.JOBS = 60"
                code += "; sys.exit(t.main(sys.argv[1]))"
                folder = tempfile.mkdtemp()
                self.addCleanup(shutil.rmtree, folder)
                command = [sys.executable, "-c", code, folder]
            self.assertRegex(self.run_example(*command), f"(?s){want}")

    def test_compare_without_peers(self):
        """Without peers compare.py says how to get them and measures the rest."""
        out = self.run_example(sys.executable, "-S", "compare.py", "--jobs=200")
        skipped = re.findall(r"(?m)^(\S+): skipped, not installed", out)
        self.assertEqual(len(skipped), 6, out)
        rows = re.findall(r"(?m)^tiny_queue( +[\d,]+){3}", out)
        self.assertEqual(len(rows), 2, out)

    def rows(self, text):
        """Of the table of bench.py: what was measured, and all its numbers."""
        text = re.sub(r"[\d,]+ waiting", "N waiting", text)
        row = r"(?m)^\| (.+?) +\| +(\d[^|]*) \| +(.*?) \| +(.*?) \|$"
        found = re.findall(row, text)
        return [work for work, *_ in found], found

    def test_bench(self):
        """On files it has the rows that the README quotes, each rate beside its
        floor, and in a database those that make sense there; it leaves nothing."""
        code = "import bench; bench.CROWD_SECONDS = 0.3; bench.main()"
        bench = functools.partial(self.run_example, sys.executable, "-c", code)
        works, found = self.rows(bench("--jobs=200", "--rounds=1"))
        readme = pathlib.Path(ROOT, "README.md").read_text("utf-8")
        quoted, _ = self.rows(readme.split("| work | rate |")[1].split("\n\n")[0])
        if os.path.exists("/proc/self/statm"):  # else it does not measure memory
            self.assertEqual(works, quoted)
        for work, rate, floor, share in found:
            if rate.endswith("/s"):
                self.assertRegex(f"{floor} {share}", r"^[1-9][\d,]*/s \d+\.\d\d$", work)
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{folder}/bench.db"
            works, _ = self.rows(bench("--jobs=200", "--rounds=1", url))
            for name in tq.Queue(url)._engine.names():
                self.assertEqual(tq.Queue(url, name).stats()[:4], (0, 0, 0, 0))
        for work in quoted:
            absent = work.startswith(("open with", "compact", "memory"))
            self.assertEqual(work in works, not absent, work)


# Simulated disk
# =============================================================================


Hook = Callable[[str, str, "tuple[Any, ...]"], Optional[int]]
Op = tuple[Any, ...]
Tree = dict[str, bytes]  # {path: content}; a path that ends in / is a directory

MUTATING = frozenset(
    "create fchmod fchown fdatasync fsync ftruncate mkdir replace unlink write".split()
)
EVERY_CALL = MUTATING | frozenset(
    "fcntl flock fstat listdir lseek open pread stat".split()
)

# Beyond these many loose directory operations their subsets are sampled.
_ALL_SUBSETS = 8
_GARBAGE = bytes((129 + 7 * byte) % 256 for byte in range(256))
_FLOCK = "hhqqi4x"
_WRITABLE = os.O_WRONLY | os.O_RDWR
# What the simulated os takes from the real one: all that touches no disk.
_HARMLESS = frozenset(
    "SEEK_SET SEEK_END fsencode fsdecode fspath getuid geteuid getegid name"
    " environ strerror sep register_at_fork get_inheritable cpu_count".split()
)
# Unique over all disks and processes: a descriptor that outlives its process never
# names another one's file, and the log names a file for life.
_descriptors = itertools.count(1000)
_keys = itertools.count(100)
_pids = itertools.count(1000)


class Died(BaseException):
    """A simulated process is dead; each later call that it makes raises this too."""


def _error(code: int, *paths: Any) -> OSError:
    blamed = [paths[0], None, paths[1]] if len(paths) == 2 else paths
    return OSError(code, os.strerror(code), *blamed)


def _absolute(path: Any) -> str:
    return posixpath.normpath(posixpath.join("/", os.fsdecode(path)))


def _edit(content: bytes, ops: Iterable[Op]) -> bytes:
    for kind, _, place, *data in ops:
        head = content[:place].ljust(place, b"\0")
        if kind == "truncate":
            content = head
        else:
            content = head + data[0] + content[place + len(data[0]) :]
    return content


def _rename(names: dict[str, int], op: Op) -> None:
    # Each name is set or cleared blindly, so a subset of the operations shows what
    # a directory shows whose other blocks were not written.
    if op[0] in ("replace", "unlink"):
        names.pop(op[2], None)
    if op[0] != "unlink":
        names[op[-1]] = op[1]


class Image:
    """Which names there are, and what each file holds (None: a directory)."""

    def __init__(self, names: dict[str, int], data: dict[int, Any]) -> None:
        self.names, self.data = names, data

    @classmethod
    def of_tree(cls, tree: Tree) -> Image:
        image = cls({}, {})
        for path, data in {"/": b"", **tree}.items():
            full = posixpath.normpath(path)
            for above in [full[:at] for at in range(1, len(full)) if full[at] == "/"]:
                image.apply(("mkdir", image.names.get(above) or next(_keys), above))
            kind = "mkdir" if path.endswith("/") else "create"
            image.apply((kind, image.names.get(full) or next(_keys), full))
            if kind == "create":
                image.data[image.names[full]] = bytes(data)
        return image

    def tree(self) -> Tree:
        """The regular files."""
        data = self.data
        found = {path: data[key] for path, key in self.names.items()}
        return {path: data for path, data in found.items() if data is not None}

    def copy(self) -> Image:
        return Image(dict(self.names), dict(self.data))

    def apply(self, op: Op) -> None:
        kind, key = op[:2]
        if kind in ("write", "truncate"):
            self.data[key] = _edit(self.data[key], [op])
        elif kind in ("create", "mkdir", "replace", "unlink"):
            if kind in ("create", "mkdir"):
                self.data[key] = b"" if kind == "create" else None
            _rename(self.names, op)

    def is_new(self, seen: set[int], level: int) -> bool:
        # bytes remember their hash, and states share them: this costs no pass over
        # the contents. A false match at 64 bits would only skip one state.
        known = hash(
            (level, frozenset((p, self.data[k]) for p, k in self.names.items()))
        )
        return known not in seen and not seen.add(known)  # type: ignore[func-returns-value]


class Handle:
    """An open file description: it, not the process, owns the locks."""

    def __init__(self, key: int, path: str, flags: int) -> None:
        self.key, self.path, self.flags = key, path, flags
        self.position, self.locked = 0, False
        self.bytes: set[int] = set()  # those of the file that it has locked


class Disk(Image):
    """What the processes of one host share: files, locks, a clock, and a log.

    The log's entries are (kind, key, ...), key being a file's number for life:
    ("write", key, offset, bytes), ("truncate", key, size), ("fsync", key),
    ("fsyncdir", key, path), ("failed", key) and ("faileddir", key, path) for an
    fsync that a hook refused, ("create", key, path), ("mkdir", key, path),
    ("replace", key, from, to), ("unlink", key, path), ("meta", key).
    """

    def __init__(self, image: Image | None = None) -> None:
        self.base = image or Image.of_tree({})  # durable, and where the log starts
        super().__init__(dict(self.base.names), dict(self.base.data))
        self.hook: Hook | None = None
        self.watch: frozenset[str] = MUTATING  # the calls that the hook is told of
        self.capacity = math.inf  # bytes in all regular files together
        self.origin = 0  # of a crash state: how many operations had happened whole
        self.log: list[Op] = []
        self.modes: dict[int, int] = {}
        self.changed: dict[str, float] = {}  # when a directory's names last were
        self.handles: set[Handle] = set()
        self.mutex = threading.Lock()
        self.clock = Clock(EPOCH, 1000.0)

    @classmethod
    def from_tree(cls, tree: Tree) -> Disk:
        return cls(Image.of_tree(tree))

    def sync(self) -> None:
        """Make everything durable and start a new log."""
        self.base, self.log = self._replay(len(self.log)), []

    def at(self, position: int) -> Disk:
        """Return the disk as it was after that many operations, undurable ones kept."""
        return self._revive(self._replay(position), self.log[:position], position)

    def _replay(self, position: int) -> Image:
        image = self.base.copy()
        for op in self.log[:position]:
            image.apply(op)
        return image

    def _revive(self, image: Image, log: list[Op], origin: int) -> Disk:
        disk = Disk(image)
        disk.base, disk.log, disk.origin = self.base, log, origin
        disk.clock.wall, disk.clock.mono = self.clock.wall, self.clock.mono
        return disk

    def process_death_states(
        self,
        start: int = 0,
        *,
        torn_limit: int = 4096,
        level: Callable[[int], int] = lambda position: 0,
    ) -> Iterator[tuple[str, Disk]]:
        """Yield (label, disk) for a death of every process at each moment.

        That is after each operation from the start-th on, and at each byte of each
        write (torn_limit evenly spread ones, when it has more). Each disk keeps its
        log, so a power cut can follow. Equal trees are dropped, but not those of
        positions at another level, where more must have survived.
        """
        seen: set[int] = set()
        image = self._replay(start)
        for position in range(start, len(self.log) + 1):
            done = self.log[:position]
            if image.is_new(seen, level(position)):
                whole = self._revive(image, [*done], position)
                yield f"died after op {position}", whole
            for op in self.log[position : position + 1]:
                for cut in _cuts(op, torn_limit):
                    torn = (*op[:3], op[3][:cut])
                    partial = image.copy()
                    partial.apply(torn)
                    if partial.is_new(seen, level(position)):
                        label = f"died in op {position + 1} {op[:3]} at byte {cut}"
                        yield label, self._revive(partial, [*done, torn], position)
                image.apply(op)

    def power_states(
        self,
        rng: random.Random,
        limit: int = 1000,
        *,
        at: Iterable[int] = (),
        variants: str = "all",
        level: Callable[[int], int] = lambda position: 0,
    ) -> Iterator[tuple[str, Disk]]:
        """Yield (label, disk) for what a power cut may leave, all of it durable.

        at is when: numbers of operations in rising order, or the end of the log. At
        each moment all states, or a sample of at most limit. variants: "prefix" cuts
        between operations, "all" also in and under the last one, "holes" also leaves
        NULs where an earlier unsynced write was. level: as in process_death_states.
        """
        seen: set[int] = set()
        cut, fed = _PowerCut(self.base, variants), 0
        for moment in at or [len(self.log)]:
            for op in self.log[fed:moment]:
                cut.feed(op)
            fed = moment
            new = (
                (label, image)
                for label, image in cut.images(rng, limit)
                if image.is_new(seen, level(moment))
            )
            for label, image in itertools.islice(new, limit):
                disk = Disk(image)
                disk.origin = moment
                yield f"power cut after op {moment}: {label}", disk

    def guest(self, **options: Any) -> Any:
        """A process that uses a queue here."""
        return Guest(self, **options)

    def do(self, *op: Any) -> None:
        """Change something, and log it; the mutex is held."""
        self.apply(op)
        self.log.append(op)
        for path in op[2:] if op[0] in ("create", "mkdir", "replace", "unlink") else ():
            self.changed[posixpath.dirname(path)] = self.clock.time()

    def room(self, key: int, offset: int) -> float:
        """Return how many bytes may be written there."""
        used = {*self.names.values(), *(handle.key for handle in self.handles)}
        free = self.capacity - sum(len(self.data[each] or b"") for each in used)
        return max(0, len(self.data[key]) - offset + free)


def _cuts(op: Op, limit: int) -> Iterable[int]:
    size = len(op[3]) if op[0] == "write" else 0
    if size - 1 <= limit:
        return range(1, size)
    return sorted({1 + i * (size - 2) // max(1, limit - 1) for i in range(limit)})


def _tails(data: bytes) -> list[bytes]:
    """Return what may stand in the place of the last unsynced write."""
    size, line = len(data), data.find(b"\n") + 1
    half, quarter = size // 2, size // 4
    cuts = sorted({1, half, line - 1, line, size - 1} & set(range(1, size)))
    middle = data[:quarter] + bytes(half) + data[quarter + half :]
    return [
        *(data[:cut] for cut in cuts),
        bytes(size),
        data.translate(_GARBAGE),
        data[:half] + bytes(size - half),
        bytes(half) + data[half:],
        middle,
        data[:half] + data[half:].translate(_GARBAGE),
    ]


class _PowerCut:
    """Reads a log; knows what a power cut must leave and what it may."""

    def __init__(self, base: Image, variants: str) -> None:
        self.variants, self.names = variants, dict(base.names)
        self.loose: list[Op] = []  # directory operations that may be lost
        self.stuck: list[Op] = []  # those that a failed fsync dropped
        self.pending: dict[int, list[Op]] = {}  # edits that may be lost, by file
        self.failed: dict[int, int] = {}  # how many of them a failed fsync dropped
        # More than one durable content only after a failed fsync.
        self.durable: dict[int, list[Any]] = {k: [d] for k, d in base.data.items()}
        self.known: dict[int, list[Any]] = {}  # contents(), until the next edit

    def feed(self, op: Op) -> None:
        kind, key = op[:2]
        self.known.pop(key, None)
        if kind in ("write", "truncate"):
            self.pending.setdefault(key, []).append(op)
        elif kind == "fsync":
            ends = [
                _edit(old, ops)
                for old in self.durable[key]
                for ops in self._histories(key)
            ]
            self.durable[key] = list(dict.fromkeys(ends))
            self.pending.pop(key, None)
            self.failed.pop(key, None)
        elif kind == "failed":
            self.failed[key] = len(self.pending.get(key, ()))
        elif kind == "fsyncdir":
            self._sync_names(op[2])
        elif kind == "faileddir":
            self.stuck += [o for o in self.loose if posixpath.dirname(o[2]) == op[2]]
        elif kind != "meta":
            if kind in ("create", "mkdir"):
                self.durable[key] = [b"" if kind == "create" else None]
            self.loose.append(op)

    def _sync_names(self, path: str) -> None:
        # What a failed sync dropped stays in doubt until its names are set anew.
        kept: list[Op] = []
        for op in self.loose:
            if posixpath.dirname(op[2]) != path or op in self.stuck:
                kept.append(op)
            else:
                _rename(self.names, op)
                kept = [old for old in kept if not {*old[2:]} & {*op[2:]}]
        self.loose = kept

    def _histories(self, key: int) -> list[list[Op]]:
        # The kernel marks pages clean when writing them back fails: a later fsync
        # succeeds without them, and what they held may or may not be on the disk.
        ops, failed = self.pending.get(key, []), self.failed.get(key, 0)
        return [ops[failed:], ops] if failed else [ops]

    def contents(self, key: int) -> list[Any]:
        """Return all contents that the file may have, from none to all written."""
        if key not in self.known:
            found: dict[Any, None] = {}
            for old, ops in itertools.product(self.durable[key], self._histories(key)):
                found.update(dict.fromkeys([old, *self._written(old, ops)]))
            self.known[key] = list(found)
        return self.known[key]

    def _written(self, old: bytes, ops: list[Op]) -> Iterator[bytes]:
        before = old
        for count, op in enumerate(ops):
            if op[0] == "write" and self.variants != "prefix":
                for tail in _tails(op[3]):
                    yield _edit(before, [(*op[:3], tail)])
            if self.variants == "holes":
                for i, (kind, *place) in enumerate(ops[:count]):
                    if kind == "write":
                        hole = (kind, *place[:2], bytes(len(place[2])))
                        yield _edit(old, [*ops[:i], hole, *ops[i + 1 : count + 1]])
            before = _edit(before, [op])
            yield before

    def _view(self, mask: int) -> dict[str, int]:
        names = dict(self.names)
        for bit, op in enumerate(self.loose):
            if mask >> bit & 1:
                _rename(names, op)
        view: dict[str, int] = {}
        for path in sorted(names):  # parents come first
            if path == "/" or posixpath.dirname(path) in view:
                view[path] = names[path]
        return view

    def _views(self, rng: random.Random, limit: int) -> list[dict[str, int]]:
        count = len(self.loose)
        masks: Iterable[int] = range(1 << count)
        if count > _ALL_SUBSETS:
            sample = {rng.getrandbits(count) for _ in range(min(limit, 256))}
            masks = sorted(sample | {0, (1 << count) - 1})
        views = {frozenset(v.items()): v for v in map(self._view, masks)}
        return list(views.values())

    def images(self, rng: random.Random, limit: int) -> Iterator[tuple[str, Image]]:
        """Yield all states, or the two extremes and then random ones."""
        views = self._views(rng, limit)
        options = [[self.contents(key) for key in view.values()] for view in views]

        def image(which: int, contents: Iterable[Any]) -> Image:
            view = views[which]
            return Image(view, dict(zip(view.values(), contents)))

        total = sum(math.prod(map(len, option)) for option in options)
        if total <= limit and len(self.loose) <= _ALL_SUBSETS:
            for number, option in enumerate(options):
                for chosen in itertools.product(*option):
                    yield f"all, names {number}", image(number, chosen)
            return
        for end in (0, -1):
            yield f"end {end}", image(end, [o[end] for o in options[end]])
        for number in range(4 * limit):
            which = rng.randrange(len(views))
            picked = [rng.choice(option) for option in options[which]]
            yield f"sample {number}", image(which, picked)


class Process:
    """One process on a disk: its pid, its descriptors, its `os` and its `fcntl`.

    Its own hook, if any, is asked instead of the disk's.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk, self.pid = disk, next(_pids)
        self.random = random.Random(f"{SEED} {self.pid}")
        self.hook: Hook | None = None
        self.dead = False
        self.handles: dict[int, Handle] = {}
        self.issued: set[int] = set()
        self.os, self.fcntl = _SimulatedOS(self), _SimulatedFcntl(self)

    def kill(self) -> None:
        """End it here: its descriptors and locks go, what it wrote stays."""
        self.dead = True
        self.disk.handles -= {*self.handles.values()}
        self.handles.clear()


def _syscall(method: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    name = name or method.__name__

    @functools.wraps(method)
    def call(self: _Calls, *args: Any, **options: Any) -> Any:
        process, disk = self._process, self._disk
        if process.dead:
            raise Died(name)
        hook = process.hook or disk.hook
        if hook is None or name not in disk.watch:
            with disk.mutex:
                return method(self, *args, **options)
        try:
            args = self._ask(hook, name, args)
            with disk.mutex:
                result = method(self, *args, **options)
            hook(name, "after", args)
        except Died:
            Process.kill(process)
            raise
        if process.dead:
            raise Died(name)
        return result

    return call


class _Calls:
    def __init__(self, process: Process) -> None:
        self._process, self._disk = process, process.disk

    def _ask(self, hook: Hook, name: str, args: Op) -> Op:
        """The arguments that a hook leaves of a call, if it does not raise."""
        try:
            count = hook(name, "before", args)
        except OSError:
            if name in ("fsync", "fdatasync"):
                self._log_sync("failed", self._handle(args[0]))
            raise
        if self._process.dead:
            raise Died(name)
        if name == "write" and count is not None:
            return args[0], bytes(args[1])[:count]
        return args

    def _log_sync(self, kind: str, handle: Handle) -> None:
        if self._disk.data[handle.key] is None:
            self._disk.do(f"{kind}dir", handle.key, handle.path)
        else:
            self._disk.do(kind, handle.key)

    def _handle(self, fd: int) -> Handle:
        handle = self._process.handles.get(fd)
        if handle is None:
            raise _error(errno.EBADF)
        return handle

    def _writable(self, fd: int, code: int) -> Handle:
        handle = self._handle(fd)
        if not handle.flags & _WRITABLE:
            raise _error(code)
        return handle


class _SimulatedOS(_Calls):
    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.path = Patched(posixpath, isdir=self._isdir)

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS or name[:2] == "O_":
            return getattr(os, name)
        raise AttributeError(f"the simulated os has no {name}")

    def _isdir(self, path: Any) -> bool:
        key = self._disk.names.get(_absolute(path))
        return key is not None and self._disk.data[key] is None

    def _find(self, path: Any, *blamed: Any) -> tuple[str, int | None]:
        """Return the full path and what is there; its directory must exist."""
        names = self._disk.names
        full = path if path.__class__ is str and path in names else _absolute(path)
        if full not in names:
            parent = above = posixpath.dirname(full)
            while above not in names:
                above = posixpath.dirname(above)
            if self._disk.data[names[above]] is not None:
                raise _error(errno.ENOTDIR, *(blamed or (path,)))
            if above != parent:
                raise _error(errno.ENOENT, *(blamed or (path,)))
        return full, names.get(full)

    def _existing(self, path: Any, *blamed: Any) -> tuple[str, int, Any]:
        """Return the full path, the file and what it holds."""
        full, key = self._find(path, *blamed)
        if key is None:
            raise _error(errno.ENOENT, *(blamed or (path,)))
        return full, key, self._disk.data[key]

    def _do_open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        full, key = self._find(path)
        if key is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            key = next(_keys)
            self._disk.do("create", key, full)
            self._disk.modes[key] = mode & ~0o022
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        elif self._disk.data[key] is None:
            if flags & (_WRITABLE | os.O_CREAT | os.O_TRUNC):
                raise _error(errno.EISDIR, path)
        elif flags & os.O_DIRECTORY:
            raise _error(errno.ENOTDIR, path)
        elif flags & os.O_TRUNC:
            self._disk.do("truncate", key, 0)
        handle, fd = Handle(key, full, flags), next(_descriptors)
        self._disk.handles.add(handle)
        self._process.handles[fd] = handle
        self._process.issued.add(fd)
        return fd

    _open_only, _open_change = _syscall(_do_open, "open"), _syscall(_do_open, "create")

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        makes = flags & os.O_CREAT and self._find(path)[1] is None
        opener = self._open_change if makes or flags & os.O_TRUNC else self._open_only
        fd: int = opener(path, flags, mode)
        return fd

    def close(self, fd: int) -> None:
        # The dead hold nothing. A descriptor of another process comes from an object
        # that outlived the patch; a second close of one's own is an error.
        process = self._process
        if fd in process.handles:
            process.disk.handles.discard(process.handles.pop(fd))
        elif fd < 1000 or fd in process.issued and not process.dead:
            raise _error(errno.EBADF)

    def _stat(self, key: int, path: str = "") -> types.SimpleNamespace:
        data = self._disk.data[key]
        kind = stat.S_IFDIR | 0o700 if data is None else stat.S_IFREG
        at = self._disk.changed.get(path, 0.0)
        return types.SimpleNamespace(
            st_mode=kind | (data is not None and self._disk.modes.get(key, 0o600)),
            st_ino=key, st_dev=77, st_nlink=1, st_uid=os.getuid(), st_gid=os.getgid(),
            st_size=len(data or b""), st_mtime=at, st_mtime_ns=int(at * 1e9),
        )  # fmt: skip

    @_syscall
    def stat(self, path: Any, *, follow_symlinks: bool = True) -> Any:
        full, key, _ = self._existing(path)
        return self._stat(key, full)

    lstat = stat

    @_syscall
    def fstat(self, fd: int) -> Any:
        handle = self._handle(fd)
        return self._stat(handle.key, handle.path)

    @_syscall
    def lseek(self, fd: int, offset: int, whence: int) -> int:
        handle = self._handle(fd)
        data = self._disk.data[handle.key]
        if data is None or whence not in (os.SEEK_SET, os.SEEK_END):
            raise NotImplementedError("lseek of a directory, or from elsewhere")
        if whence == os.SEEK_END:
            offset += len(data)
        if offset < 0:
            raise _error(errno.EINVAL)
        handle.position = offset
        return offset

    @_syscall
    def pread(self, fd: int, count: int, offset: int) -> bytes:
        handle = self._handle(fd)
        if handle.flags & os.O_WRONLY:
            raise _error(errno.EBADF)
        if offset < 0 or count < 0:
            raise _error(errno.EINVAL)
        data: bytes | None = self._disk.data[handle.key]
        if data is None:
            raise _error(errno.EISDIR)
        return data[offset : offset + count]

    @_syscall
    def write(self, fd: int, data: Any) -> int:
        handle = self._writable(fd, errno.EBADF)
        appends = handle.flags & os.O_APPEND
        offset = len(self._disk.data[handle.key]) if appends else handle.position
        data = bytes(data)
        count = int(min(len(data), self._disk.room(handle.key, offset)))
        if data and not count:
            raise _error(errno.ENOSPC)
        if data:
            self._disk.do("write", handle.key, offset, data[:count])
        handle.position = offset + count
        return count

    @_syscall
    def ftruncate(self, fd: int, size: int) -> None:
        if size < 0:
            raise _error(errno.EINVAL)
        self._disk.do("truncate", self._writable(fd, errno.EINVAL).key, size)

    def _sync(self, fd: int) -> None:
        self._log_sync("fsync", self._handle(fd))

    fsync, fdatasync = _syscall(_sync, "fsync"), _syscall(_sync, "fdatasync")

    @_syscall
    def replace(self, src: Any, dst: Any) -> None:
        self._find(src, src, dst)
        target, old = self._find(dst, src, dst)
        source, key, data = self._existing(src, src, dst)
        if posixpath.dirname(source) != posixpath.dirname(target) or data is None:
            raise NotImplementedError("replace: files of one directory only")
        if old is not None and self._disk.data[old] is None:
            raise _error(errno.EISDIR, src, dst)
        if old != key:
            self._disk.do("replace", key, source, target)

    @_syscall
    def unlink(self, path: Any) -> None:
        full, key, data = self._existing(path)
        if data is None:
            raise _error(errno.EISDIR, path)
        self._disk.do("unlink", key, full)

    @_syscall
    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        full, key = self._find(path)
        if key is not None:
            raise _error(errno.EEXIST, path)
        self._disk.do("mkdir", next(_keys), full)

    def makedirs(self, path: str, mode: int, exist_ok: bool) -> None:
        """One by one, as os does."""
        missing = [path]
        while not self.path.isdir(parent := posixpath.dirname(missing[0])):
            missing.insert(0, parent)
        for name in missing:
            with contextlib.suppress(FileExistsError):
                self.mkdir(name, mode if name == path else 0o777)

    @_syscall
    def listdir(self, path: Any) -> list[str]:
        full, _, data = self._existing(path)
        if data is not None:
            raise _error(errno.ENOTDIR, path)
        split = map(posixpath.split, self._disk.names)
        return sorted(name for parent, name in split if parent == full and name)

    @_syscall
    def fchmod(self, fd: int, mode: int) -> None:
        handle = self._handle(fd)
        self._disk.modes[handle.key] = mode
        self._disk.do("meta", handle.key)

    @_syscall
    def fchown(self, fd: int, uid: int, gid: int) -> None:
        self._disk.do("meta", self._handle(fd).key)

    def getpid(self) -> int:
        return self._process.pid

    def urandom(self, count: int) -> bytes:
        return self._process.random.randbytes(count)


class _SimulatedFcntl(_Calls):
    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def _others(self, handle: Handle) -> Iterator[Handle]:
        for other in self._disk.handles:
            if other.key == handle.key and other is not handle:
                yield other

    @_syscall
    def flock(self, fd: int, operation: int) -> None:
        handle = self._handle(fd)
        if operation & fcntl.LOCK_SH:
            raise NotImplementedError("shared locks")
        wanted = bool(operation & fcntl.LOCK_EX)
        if wanted and any(other.locked for other in self._others(handle)):
            # Nobody else runs in here to let go: a blocking call never returns.
            waits = not operation & fcntl.LOCK_NB
            raise _error(errno.EDEADLK if waits else errno.EAGAIN)
        handle.locked = wanted

    @_syscall
    def fcntl(self, fd: int, command: int, arg: bytes = b"") -> bytes:
        """Lock, or ask for, one byte by an open-file-description lock."""
        handle = self._handle(fd)
        kind, whence, start, length, pid = struct.unpack(_FLOCK, arg)
        if (kind, whence, length, pid) != (fcntl.F_WRLCK, os.SEEK_SET, 1, 0):
            raise NotImplementedError("only one byte, and for oneself")
        held = any(start in other.bytes for other in self._others(handle))
        if command == fcntl.F_OFD_GETLK:
            if held:
                return struct.pack(_FLOCK, kind, whence, start, length, -1)
            return struct.pack(_FLOCK, fcntl.F_UNLCK, whence, start, length, 0)
        if command != fcntl.F_OFD_SETLK:
            raise NotImplementedError(f"fcntl command {command}")
        self._writable(fd, errno.EBADF)
        if held:
            raise _error(errno.EAGAIN)
        handle.bytes.add(start)
        return arg


NEW = os.O_RDWR | os.O_APPEND | os.O_CREAT


def byte_lock(number: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)


class SimulatedDiskTest(Limited):
    """The simulated calls answer as the kernel's do, and what a crash may leave
    is what can be counted by hand."""

    FLAGS = [
        os.O_RDONLY | os.O_DIRECTORY,
        *(a | b for a in (0, os.O_WRONLY, os.O_RDWR, NEW) for b in (0, os.O_CREAT)),
        NEW | os.O_EXCL,
        os.O_RDWR | os.O_TRUNC,
    ]
    PATHS = ["a", "b", "c", "d", "d/a", "d/b", "a/x", "missing/x"]

    def random_call(self, rng, root):
        """A module, a function and its arguments; None is a descriptor."""
        path = f"{root}/{rng.choice(self.PATHS)}"
        other = f"{os.path.dirname(path)}/{rng.choice('abd')}"
        lock = byte_lock(100 * rng.randrange(3))  # apart: the kernel merges
        size, at = rng.randrange(40), rng.randrange(60)
        return rng.choice([
            *[("os", "open", path, rng.choice(self.FLAGS), 0o660)] * 3,
            *[("os", "write", None, rng.randbytes(size))] * 3,
            ("os", "pread", None, size, at),
            ("os", "lseek", None, at - 1, rng.choice((os.SEEK_SET, os.SEEK_END))),
            ("os", "ftruncate", None, at - 1),
            ("os", "close", None),
            ("os", rng.choice(("fstat", "fsync", "fdatasync")), None),
            ("os", "fchmod", None, rng.choice((0o600, 0o640))),
            ("os", rng.choice(("stat", "listdir", "unlink", "mkdir")), path),
            ("os", "replace", path, other),
            ("fcntl", "flock", None, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ("fcntl", "flock", None, fcntl.LOCK_UN),
            ("fcntl", "fcntl", None, fcntl.F_OFD_SETLK, lock),
            ("fcntl", "fcntl", None, fcntl.F_OFD_GETLK, lock),
        ])  # fmt: skip

    def answer(self, call, fd, args):
        try:
            result = call(*(fd if arg is None else arg for arg in args))
        except OSError as exc:
            return errno.errorcode[exc.errno], exc.filename, exc.filename2
        if not hasattr(result, "st_mode"):
            return sorted(result) if isinstance(result, list) else result
        if stat.S_ISDIR(result.st_mode):
            return stat.S_IFDIR, result.st_uid, result.st_gid
        return result.st_mode, result.st_uid, result.st_gid, result.st_size

    def both(self, process, call, pair):
        """What a call answers here and there; None, None if it is not simulated."""
        module, name, *args = call
        real = {"os": os, "fcntl": fcntl}[module]
        try:
            mine = self.answer(getattr(getattr(process, module), name), pair[0], args)
        except NotImplementedError:
            return None, None
        return mine, self.answer(getattr(real, name), pair[1], args)

    def test_same_calls_same_answers(self):
        """Random calls give the kernel's results, errors and contents."""
        self.addCleanup(os.umask, os.umask(0o022))
        root = tempfile.TemporaryDirectory()
        self.addCleanup(root.cleanup)
        process = Process(Disk.from_tree({f"{root.name}/": b""}))
        rng, fds, seen = random.Random(1), [], set()
        for _ in range(4000):
            call = self.random_call(rng, root.name)
            pair = rng.choice([*fds[-6:], (999, 999)])
            mine, real = self.both(process, call, pair)
            if call[1] == "open" and isinstance(real, int):
                fds.append((mine, real))
            else:
                self.assertEqual(mine, real, call)
            if call[1] == "close" and pair in fds:
                fds.remove(pair)
            seen.add((call[1], real[0] if isinstance(real, tuple) else "ok"))
        for _, fd in fds:
            os.close(fd)
        files = [path for path in pathlib.Path(root.name).rglob("*") if path.is_file()]
        real = {str(path): path.read_bytes() for path in files}
        self.assertEqual(process.disk.tree(), real)
        self.assertGreater(len(seen), 40, "the random calls met too few cases")

    def run_script(self, script, process=None):
        """The disk after calls such as `write old 1; sync old`, in /q."""
        process = process or Process(Disk.from_tree({"/q/old": b"o"}))
        calls = process.os
        for verb, *args in map(str.split, script.split(";")):
            path = f"/q/{args[0]}" if args else "/q"
            if verb in ("mkdir", "unlink"):
                getattr(calls, verb)(path)
            elif verb == "replace":
                calls.replace(path, f"/q/{args[1]}")
            else:
                fd = calls.open(path, os.O_RDONLY if "dir" in verb else NEW)
                if verb == "write":
                    calls.write(fd, args[1].encode() if args[1:] else b"")
                elif verb == "cut":
                    calls.ftruncate(fd, 0)
                else:
                    self.sync(process, fd, "fail" in verb)
        return process.disk

    def sync(self, process, fd, fails):
        def hook(name, when, args):
            raise _error(errno.EIO)

        process.hook = hook if fails else None
        with contextlib.suppress(OSError):
            process.os.fsync(fd)
        process.hook = None

    def shown(self, states):
        """Each state as `name:content`, by spaces."""
        trees = (sorted(disk.tree().items()) for _, disk in states)
        return [
            " ".join(path[3:] + ":" + data.decode("latin-1") for path, data in tree)
            for tree in trees
        ]

    # What a power cut may leave after the calls.
    CUTS = [
        ("write old 1; write old 2", "old:o|old:o1|old:o12"),
        ("write old 1; sync old; write old 2", "old:o1|old:o12"),
        ("cut old; write old n", "old:o|old:|old:n"),
        ("write new n; sync new", "old:o|new:n old:o"),
        ("write tmp n; sync tmp; syncdir; replace tmp old", "old:o tmp:n|old:n"),
        ("write tmp n; sync tmp; syncdir; replace tmp old; syncdir", "old:n"),
        ("write tmp n; syncdir; replace tmp old",
         "old:o tmp:|old:o tmp:n|old:|old:n"),
        ("mkdir d; write d/f n; sync d/f; syncdir d", "old:o|d/f:n old:o"),
        ("mkdir d; write d/f n; sync d/f; syncdir d; syncdir", "d/f:n old:o"),
        ("sync a; sync b; unlink old",
         "old:o|a: old:o|b: old:o|a: b: old:o||a:|b:|a: b:"),
        # After a refused sync the next one succeeds, and keeps only what is newer.
        ("write old 1; failsync old; write old 2; sync old", "old:o\x002|old:o12"),
        ("sync new; failsyncdir; syncdir", "old:o|new: old:o"),
        ("sync new; failsyncdir; syncdir; write tmp; replace tmp new; syncdir",
         "new: old:o"),
    ]  # fmt: skip

    def test_what_a_power_cut_may_leave(self):
        """Of each file a prefix of the unsynced writes, and any subset of the
        directory's loose operations."""
        for script, wanted in self.CUTS:
            with self.subTest(script):
                disk = self.run_script(script)
                found = self.shown(
                    disk.power_states(random.Random(1), variants="prefix")
                )
                self.assertEqual(found, wanted.split("|"))

    def test_the_last_write_s_tail(self):
        """One write of 8 bytes: whole, absent, four cuts and six bad contents;
        with "holes" an earlier one may be NULs while the later one is whole."""
        disk, rng = Disk.from_tree({"/q/old": b""}), random.Random(1)
        calls = Process(disk).os
        calls.write(calls.open("/q/old", NEW), b"abc\ndefg")
        found = {found.tree()["/q/old"] for _, found in disk.power_states(rng)}
        self.assertEqual(len(found), 12)
        self.assertLess({b"", b"abc\ndefg", b"a", b"abc", b"abc\n", b"abc\ndef"}, found)
        self.assertLess({bytes(8), b"abc\n\0\0\0\0", b"\0\0\0\0defg"}, found)
        disk = self.run_script("write old 1; write old 2")
        self.assertNotIn("old:o\x002", self.shown(disk.power_states(rng)))
        holes = disk.power_states(rng, variants="holes")
        self.assertIn("old:o\x002", self.shown(holes))

    def test_what_a_death_leaves(self):
        """Every prefix of the bytes written; a power cut after it may take more,
        and long writes are cut at evenly spread bytes."""
        disk = self.run_script("write f ab; write f cd")
        found = [disk.tree().get("/q/f") for _, disk in disk.process_death_states()]
        self.assertEqual(found, [None, b"", b"a", b"ab", b"abc", b"abcd"])
        disk = self.run_script("write old 1; sync old; write old 2")
        *_, (_, last) = disk.process_death_states()
        self.run_script("write old 3", Process(last))
        cuts = last.power_states(random.Random(1), variants="prefix")
        self.assertEqual(self.shown(cuts), ["old:o1", "old:o12", "old:o123"])
        disk = self.run_script("write old " + "x" * 1000)
        states = disk.process_death_states(torn_limit=4)
        sizes = [len(disk.tree()["/q/old"]) - 1 for _, disk in states]
        self.assertEqual(sizes, [0, 1, 333, 666, 999, 1000])

    def test_moments_and_samples(self):
        """Power cuts at earlier moments, those that look alike left out; of many
        directory operations a sample with both extremes."""
        disk, rng = self.run_script("write old 1; sync old; write old 2"), random.Random
        at = range(len(disk.log) + 1)
        states = disk.power_states(rng(1), at=at, variants="prefix")
        found = [(each.origin, each.tree()["/q/old"]) for _, each in states]
        self.assertEqual(found, [(0, b"o"), (1, b"o1"), (3, b"o12")])
        self.assertEqual(disk.at(1).tree(), {"/q/old": b"o1"})
        disk = self.run_script(";".join(f"sync {n}" for n in range(20)))
        trees = [each.tree() for _, each in disk.power_states(rng(1), 50)]
        self.assertEqual([len(trees), len(trees[0]), len(trees[1])], [50, 1, 21])
        self.assertEqual(
            trees, [each.tree() for _, each in disk.power_states(rng(1), 50)]
        )

    def test_the_dead_hold_no_lock_and_touch_nothing(self):
        """A killed process's locks are free; each of its calls raises, and what
        it was writing is torn where the hook says."""
        disk = Disk.from_tree({"/f": b""})
        one, two = Process(disk), Process(disk)
        fds = [each.os.open("/f", NEW) for each in (one, two)]
        flags, lock = fcntl.LOCK_EX | fcntl.LOCK_NB, byte_lock(7)
        for calls, fd in ((one.fcntl, fds[0]), (two.fcntl, fds[1])):
            with contextlib.suppress(BlockingIOError):
                calls.flock(fd, flags)
                calls.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        self.assertRaises(BlockingIOError, two.fcntl.flock, fds[1], flags)
        one.hook = lambda name, when, args: 1 if when == "before" else one.kill()
        self.assertRaises(Died, one.os.write, fds[0], b"abc")
        self.assertRaises(Died, one.os.fstat, fds[0])
        one.os.close(fds[0])  # as a late __del__ would
        two.fcntl.flock(fds[1], flags)
        two.fcntl.fcntl(fds[1], fcntl.F_OFD_SETLK, lock)
        two.os.write(fds[1], b"d")
        self.assertEqual(disk.tree(), {"/f": b"ad"})

    def test_a_full_disk_writes_what_fits(self):
        """A short write first, then ENOSPC, then room again after a truncation."""
        disk = Disk.from_tree({"/f": b""})
        calls, disk.capacity = Process(disk).os, 5
        fd = calls.open("/f", NEW)
        self.assertEqual([calls.write(fd, b"abc"), calls.write(fd, b"def")], [3, 2])
        with self.assertRaisesRegex(OSError, os.strerror(errno.ENOSPC)):
            calls.write(fd, b"g")
        calls.ftruncate(fd, 4)
        self.assertEqual(calls.write(fd, b"gh"), 1)


# One model of a queue
# =============================================================================

LEASE = 300.0  # seconds
SIZES = {"_BALLAST": 0, "_MIB": 1 << 20, "_IDLE_SLACK": 1 << 16}

# These, three sizes, and the module's `os`, `fcntl` and `time`, are all that the
# tests from here on take from its inside.


def copied_job(module, job):
    """The same job for another process, which has its own copy of the module."""
    return module.Job(*job.__reduce__()[1])


@functools.cache
def code_of(module):
    with open(module.__file__, encoding="utf-8") as file:
        return compile(file.read(), module.__file__, "exec")


def load_copy():
    """Another instance of the module, such as another process has."""
    copy = types.ModuleType("tiny_queue")
    copy.__dict__["__file__"] = tq.__file__
    with mock.patch.dict(sys.modules, {"tiny_queue": copy}):
        with mock.patch.object(os, "register_at_fork", create=True):
            exec(code_of(tq), copy.__dict__)
    copy.origin = tq
    return copy


COPIES = []


class Guest(Process):
    """A process on a simulated disk: its own copy of the module, and a Queue."""

    sizes: dict[str, int] = {}  # that are not as in SIZES

    def __init__(self, disk, *, clock=None, folder="/q", **options):
        super().__init__(disk)
        while COPIES and COPIES[-1].origin is not tq:
            COPIES.pop()  # of another version of the module
        self.tq = COPIES.pop() if COPIES else load_copy()
        vars(self.tq).update({**SIZES, **self.sizes})
        self.tq.os, self.tq.fcntl = self.os, self.fcntl
        self.tq.time = clock or disk.clock
        self.options = {"backoff": lambda n: 0.0, "lock_timeout": 0.02, **options}
        self.folder, self.lent = folder, True
        self.open()

    def open(self):
        options = {"lease_timeout": LEASE, **self.options}
        self.queue = self.tq.Queue(self.folder, **options)
        return self.queue

    def kill(self):
        super().kill()
        if self.lent:
            COPIES.append(self.tq)
        self.queue, self.lent = None, False

    def census(self):
        """Every job: {id: (state, attempts, payload)}."""
        found = {}
        for job in self.queue.jobs():
            assert job.id not in found, f"{job.id} is there twice"
            found[job.id] = (job.state, job.attempts, job.payload)
        return found


def by_key(census):
    """A census by the name in each payload, which must be unaltered."""
    found = {}
    for state, attempts, payload in census.values():
        key = payload["k"]
        assert key not in found, f"{key} is there twice"
        assert payload == payload_of(key), f"{key} is altered"
        found[key] = state, attempts
    return found


@contextlib.contextmanager
def fresh(disk, **options):
    """A new process on a disk, killed at the end."""
    guest = Guest(disk, **options)
    try:
        yield guest
    finally:
        guest.kill()


@contextlib.contextmanager
def small(**sizes):
    """Guests with other sizes, so that they compact sooner."""
    with mock.patch.object(Guest, "sizes", sizes):
        yield


def payload_of(key):
    """A payload that names its job; a key that starts with L has a long one."""
    return {"k": key, "pad": "\u2028\n" + ("x" * 180 if key[0] == "L" else "y")}


def retries_of(key):
    return {"m": 0, "n": 1}.get(key[0], 3)  # of a job that was put alone


# What the words of a script do to a queue; the model has a method for each.
VERBS = {
    "put": lambda q, key, **options: q.put(
        payload_of(key), max_retries=retries_of(key), **options
    ),
    "exist": lambda q, key, **options: q.put(
        payload_of(key), max_retries=retries_of(key), exist_ok=True, **options
    ),
    "many": lambda q, *keys, **options: q.put_many(map(payload_of, keys), **options),
    "get": lambda q, count=1: q.get_many(int(count)),
    "done": lambda q, job: q.task_done(job),
    "fail": lambda q, job, **options: q.task_done(job, False, "e", **options),
    "bury": lambda q, job: q.bury(job, "e"),
    "release": lambda q, job, **options: q.release(job, **options),
    "extend": lambda q, job: q.extend(job, 50.0),
    "cancel": lambda q, id: q.cancel(id),
    "requeue": lambda q, *id: q.requeue_dead(*id),
    "reap": lambda q, *age: q.reap_stale(*map(float, age)),
    "purge": lambda q, state, age=0: q.purge(state, older_than=float(age)),
    "find": lambda q, id: q.find(id),
    "stats": lambda q: q.stats(),
    "compact": lambda q: q.compact(),
    "close": lambda q: q.close(),
}
OF_LEASES = ("done", "fail", "bury", "release", "extend")
UNSYNCED = ("get", "extend", "stats", "compact", "close", "find")
ANSWERS = ("DuplicateJobError", "LeaseLostError", "JobNotFoundError")


class ModelJob:
    """One job; since and length are those of its lease."""

    state, attempts, lapses, error, leased_at = "pending", 0, 0, None, None
    token = holder = None
    since = length = 0.0

    def __init__(self, key, id, retries, created_at, place, run_at=0.0, priority=0):
        self.key, self.id, self.retries = key, id, retries
        self.created_at, self.place = created_at, place
        self.run_at, self.priority = run_at, priority

    def view(self):
        return (
            self.id, self.state, self.attempts, self.priority, self.run_at,
            payload_of(self.key), self.error,
        )  # fmt: skip


class Model:
    """What a queue does, as README and DESIGN say: one dict, no files.

    The verbs get what the real one returned (None if it failed: what it would have
    done), and return the name of the error that it should have raised, if any.
    """

    def __init__(self, clock, backoff=lambda attempt: 0.0):
        self.clock, self.backoff = clock, backoff
        self.jobs, self.places = {}, itertools.count()
        self.gone = set()  # holders that are dead or have closed
        self.in_rows = False  # of a database, where a leased job keeps its place
        self.exact = True  # until something happens whose outcome is not known
        self.touched = set()  # the keys that the last call was about

    def agree(self, real, mine):
        assert not self.exact or real in (None, mine), (real, mine)

    def with_id(self, id):
        return next((job for job in self.jobs.values() if job.id == id), None)

    def move(self, job, state, run_at=None, error=None):
        if state != "inflight" or not self.in_rows:
            job.place = next(self.places)
        job.state = state
        job.run_at = job.run_at if run_at is None else run_at
        job.error = job.error if error is None else error
        self.touched.add(job.key)

    def remove(self, job):
        job.state = "gone"
        self.jobs.pop(job.key, None)
        self.touched.add(job.key)

    def later(self, delay):
        return self.clock.time() + delay if delay else 0.0

    def listed(self, state=None):
        found = [job for job in self.jobs.values() if state in (None, job.state)]
        return sorted(found, key=lambda job: (STATES.index(job.state), job.place))

    def put(self, who, job, key, id=None, delay=0, priority=0):
        twin = self.with_id(id) if id else None
        if twin:
            self.touched.add(twin.key)  # the answer promises that it stays
            return "DuplicateJobError"
        self.add(key, job, id, retries_of(key), self.later(delay), priority)

    def add(self, key, job, id=None, retries=3, run_at=0.0, priority=0):
        id = job.id if job else id
        place, now = next(self.places), self.clock.time()
        mine = ModelJob(key, id, retries, now, place, run_at, priority)
        self.touched.add(key)
        return self.jobs.setdefault(key, mine)

    def exist(self, who, job, key, id):
        if self.put(who, job, key, id) and job:
            self.agree(job.state, self.with_id(id).state)

    def many(self, who, jobs, *keys, delay=0, priority=0):
        for key, job in zip(keys, jobs or itertools.repeat(None)):
            self.add(key, job, None, 3, self.later(delay), priority)

    def over(self, older):
        """Leases that are over, the least lately renewed first."""
        jobs = sorted(self.listed("inflight"), key=lambda job: job.since)
        return [
            job
            for job in jobs
            if job.holder in self.gone
            or self.clock.monotonic() - job.since >= min(job.length, older)
        ]

    def get(self, who, jobs, count=1):
        taken, over = self.pick(int(count))
        if jobs is None:
            for job in taken:
                job.attempts += 1
                self.move(job, "inflight")
            return
        if self.exact:
            self.give_back(over)
            if over and not taken:
                taken, _ = self.pick(int(count))
            self.touched.clear()  # when that is done is not said
        self.agree(
            [(job.payload["k"], job.attempts) for job in jobs],
            [(job.key, job.attempts + 1) for job in taken],
        )
        for job in jobs:
            self.take(who, job, self.add(job.payload["k"], job))

    def pick(self, count):
        """The next jobs, and those whose leases are over and go back."""
        over, now = self.over(math.inf), self.clock.time()
        first = [job for job in over if not job.lapses and job.attempts <= job.retries]
        due = [job for job in self.listed("pending") if job.run_at <= now]
        queue = [(-job.priority, 0, n, job) for n, job in enumerate(first)]
        queue += [(-job.priority, 1, job.place, job) for job in due]
        taken = [item[3] for item in sorted(queue)[:count]]
        return taken, [job for job in over if job not in first]

    def take(self, who, job, mine):
        lapsed = mine.state == "inflight"
        mine.lapses += lapsed
        mine.attempts, mine.token = job.attempts, job.token
        mine.leased_at = self.clock.time()
        self.renew(who, mine, LEASE, mock.ANY if lapsed else None)

    def renew(self, who, job, seconds, error=None):
        job.since, job.length = self.clock.monotonic(), seconds
        job.holder = who
        self.move(job, "inflight", error=error)

    def give_back(self, over):
        for state in ("pending", "dead"):
            for job in over:
                spent = job.attempts > job.retries
                if job.state == "inflight" and spent == (state == "dead"):
                    delay = self.backoff(job.attempts) if job.lapses else 0
                    run_at = None if spent else self.later(delay)
                    job.lapses += 1
                    self.move(job, state, run_at, mock.ANY)
        return len(over)

    def leased(self, job):
        """The job of a lease, if that is the valid one."""
        mine = self.jobs.get(job.payload["k"])
        held = mine and mine.state == "inflight" and mine.token == job.token
        return mine if held else None

    def of_lease(change):
        """A verb with a lease, which must be the valid one."""

        @functools.wraps(change)
        def verb(self, who, done, job, **options):
            mine = self.leased(job)
            if not mine:
                return "LeaseLostError"
            change(self, mine, who=who, **options)

        return verb

    @of_lease
    def done(self, job, who):
        self.remove(job)

    @of_lease
    def fail(self, job, who, delay=None):
        job.lapses = 0
        if job.attempts > job.retries:
            return self.move(job, "dead", error="e")
        delay = self.backoff(job.attempts) if delay is None else delay
        return self.move(job, "pending", self.later(delay), "e")

    @of_lease
    def bury(self, job, who):
        job.lapses = 0
        self.move(job, "dead", error="e")

    @of_lease
    def release(self, job, who, delay=0.0):
        job.attempts -= 1
        self.move(job, "pending", self.later(delay))

    @of_lease
    def extend(self, job, who):
        self.renew(who, job, 50.0)

    def cancel(self, who, gone, id):
        job = self.with_id(id)
        self.agree(gone, job is not None)
        if job:
            self.remove(job)

    def requeue(self, who, count, *id):
        jobs = [self.with_id(*id)] if id else self.listed("dead")
        if id and (not jobs[0] or jobs[0].state != "dead"):
            return "JobNotFoundError"
        self.agree(count, len(jobs))
        for job in jobs:
            job.attempts = job.lapses = 0
            self.move(job, "pending", 0.0)

    def reap(self, who, count, age=math.inf):
        self.agree(count, self.give_back(self.over(float(age))))

    def purge(self, who, count, state, age=0):
        until = self.clock.time() - float(age)
        jobs = self.listed(state)
        old = [job for job in jobs if (job.leased_at or job.created_at) <= until]
        self.agree(count, len(old))
        for job in old:
            self.remove(job)

    def find(self, who, job, id):
        mine = self.with_id(id)
        if mine is None:
            return "JobNotFoundError"
        self.agree(job and job.state, mine.state)

    def compact(self, who, none):
        """Nothing that can be seen."""

    def close(self, who, none):
        self.gone.add(who)

    def stats(self, who, seen):
        now, pending = self.clock.time(), self.listed("pending")
        delayed = [job.run_at for job in pending if job.run_at > now]
        due = [max(job.created_at, job.run_at) for job in pending if job.run_at <= now]
        mine = len(pending), len(delayed), *(len(self.listed(s)) for s in STATES[1:])
        self.agree(seen and seen[:5], (*mine, 0))
        self.agree(seen and seen.next_due, min(delayed, default=None))
        oldest = min(due, default=None)
        if seen and self.exact and not self.in_rows:  # the head of each priority's
            assert (oldest is None) == (seen.oldest is None), (oldest, seen)
            assert not oldest or oldest <= seen.oldest <= now, (oldest, seen)
        else:
            self.agree(seen and seen.oldest, oldest)


class Step(NamedTuple):
    """What a call made of a job (None: it is not there), and when it ran."""

    start: float
    end: float  # infinite if it may still happen
    state: tuple[str, int] | None
    sure: bool = True  # or it may not have happened
    durable: bool = True  # whether it is synced when the call returns


class History:
    """All that was done to each job, and so what may be left of it."""

    def __init__(self):
        self.steps = collections.defaultdict(list)
        self.batches, self.wreckage = [], set()
        self.doubtful = set()  # those whose put never returned

    def settle(self):
        """Call everything so far old and durable."""
        for key, steps in self.steps.items():
            self.steps[key] = [Step(-1, -1, steps[-1].state, key not in self.doubtful)]
        self.batches.clear()

    def level(self, position):
        """How much of it had been acknowledged there."""
        steps = itertools.chain(*self.steps.values())
        return sum(step.sure and step.end <= position for step in steps)

    def cut(self, origin):
        """The history of one who crashed there: later calls never returned."""
        new = History()
        new.batches, new.wreckage = list(self.batches), self.wreckage
        for key, steps in self.steps.items():
            new.steps[key] = [
                step if step.end <= origin else step._replace(end=origin, sure=False)
                for step in steps
                if step.start <= origin
            ]
        return new

    def allowed(self, origin=math.inf, power=False):
        """The states that each job may be in after a crash at that position."""
        return {key: self.left(key, origin, power) for key in self.steps}

    def left(self, key, origin=math.inf, power=False):
        """Those of the steps that none which surely happened came after."""
        kept = [(-math.inf, None)]
        for start, end, state, sure, durable in sorted(
            self.steps[key], key=lambda step: step[:2]
        ):
            if start > origin:
                break
            if sure and end <= origin and (durable or not power):
                kept = [step for step in kept if step[0] > start]
            kept.append((end, state))
        return {state for _, state in kept}


class Refused(Exception):
    """A call of a script failed, other than by an answer."""


class World:
    """A host with the processes of a script: `A put p1; A get | A done p1`.

    A small letter is a process with fsync=False. What comes before the | is made
    durable, and crashes come only after it.
    """

    def __init__(self, host=None, history=None, **options):
        self.host = Disk.from_tree({"/q/": b""}) if host is None else host
        self.history, self.options = history or History(), options
        self.model = Model(self.host.clock, options.get("backoff", lambda n: 0.0))
        self.model.exact = history is None
        self.guests, self.leases, self.ever, self.got = {}, {}, [], []
        self.serial = itertools.count()

    def run(self, script):
        before, bar, after = script.rpartition("|")
        for statement in filter(None, map(str.strip, before.split(";"))):
            self.call(statement)
        if bar:
            self.host.sync()
            self.history.settle()
            self.history.wreckage = wreckage(self.host.tree())
        for statement in filter(None, map(str.strip, after.split(";"))):
            self.call(statement)
        return self

    def guest(self, name):
        if name not in self.guests:
            options = {"fsync": name.isupper(), **self.options}
            self.guests[name] = self.host.guest(**options)
        return self.guests[name]

    def closed(self, guest):
        return weakref.ref(guest.queue) in self.model.gone

    def call(self, statement):
        """Do it, on the queue and in the model; return what became of the jobs."""
        name, verb, *words = statement.split()
        if hasattr(self, verb):
            return getattr(self, verb)(name, *words)
        pairs = [word.split("=") for word in words if "=" in word]
        args = [word for word in words if "=" not in word]
        kinds = {"id": str, "priority": int, "delay": float}
        options = {key: kinds[key](value) for key, value in pairs}
        guest = self.guest(name)
        if verb in OF_LEASES:
            args = [self.leases[name, args[0]]]
        return self.perform(name, guest, verb, args, options)

    def perform(self, name, guest, verb, args, options):
        start, result, said = self.now(), None, ""
        who = weakref.ref(guest.queue)
        try:
            result = VERBS[verb](guest.queue, *args, **options)
        except guest.tq.QueueError as exc:
            said = type(exc).__name__
            if said not in ANSWERS:
                self.hoped(who, start, verb, args, options)
                raise Refused(f"{verb} {args}: {exc!r}") from exc
        except (KeyboardInterrupt, MemoryError):
            self.hoped(who, start, verb, args, options)
            raise
        want = self.told(who, verb, result, args, options)
        assert said == (want or ""), (verb, args, said, want)
        if verb == "get":
            self.got = [job.payload["k"] for job in result]
            self.loosen(start)
            self.leases.update({(name, job.payload["k"]): job for job in result})
            self.ever += result
        durable = name.isupper() and verb not in UNSYNCED
        return self.note(start, sure=True, durable=durable)

    def now(self):
        return len(self.host.log) if isinstance(self.host, Disk) else 0

    def told(self, who, verb, result, args, options):
        self.model.touched.clear()
        if verb == "many":
            self.history.batches.append(args)
        return getattr(self.model, verb)(who, result, *args, **options)

    def hoped(self, who, start, verb, args, options):
        """Note what a call would have done that failed, and go on without it."""
        if verb == "get":
            self.loosen(start)
        before = {key: copy.copy(job) for key, job in self.model.jobs.items()}
        self.model.exact = False
        self.told(who, verb, None, args, options)
        self.note(start, sure=False, durable=False)
        self.model.jobs = before

    def loosen(self, start):
        """A get also ends the leases of the dead, which may be any not held."""
        held = {key for _, key in self.leases}
        for key, steps in self.history.steps.items():
            states = [step.state for step in steps if key not in held]
            ends = {state[1] for state in states if state and state[0] == "inflight"}
            steps += [
                Step(start, start, (where, attempts), False)
                for where in ("pending", "dead")
                for attempts in sorted(ends)
            ]

    def note(self, start, sure, durable):
        jobs, effects = self.model.jobs, {}
        for key in sorted(self.model.touched):
            effects[key] = (
                (jobs[key].state, jobs[key].attempts) if key in jobs else None
            )
            step = Step(start, self.now(), effects[key], sure, durable)
            self.history.steps[key].append(step)
        return effects

    # What a script may say besides the verbs of a queue.

    def kill(self, name):
        guest = self.guest(name)
        del self.guests[name]
        self.model.gone.add(guest.queue and weakref.ref(guest.queue))
        self.leases = {of: job for of, job in self.leases.items() if of[0] != name}
        guest.kill()

    def end(self):
        for name in [*self.guests]:
            self.kill(name)
        return self

    def reopen(self, name):
        self.call(f"{name} close")
        self.guests[name].open()

    def wait(self, name, seconds):
        self.host.clock.sleep(float(seconds))

    def done_all(self, name):
        """Settle what the last get has brought."""
        for key in self.got:
            self.call(f"{name} done {key}")

    def stale(self, name, key):
        """A lease that is not the valid one settles nothing, whoever has it."""
        guest = self.guest(name)
        for job in self.ever:
            if job.payload["k"] == key and not self.model.leased(job):
                for verb in ("done", "release", "extend"):
                    try:
                        VERBS[verb](guest.queue, copied_job(guest.tq, job))
                    except guest.tq.LeaseLostError:
                        continue
                    except guest.tq.QueueError as exc:
                        raise Refused(f"{verb}: {exc!r}") from exc
                    raise AssertionError(f"{key}: {verb} with a stale token")

    # Harm from outside; only for what comes before the | of a script.

    def doubt(self, name, *keys):
        self.history.doubtful.update(keys)

    def harm(self, state, *keys):
        """What an altered file no longer says is as it was before, or gone."""
        self.model.exact = False
        self.model.touched = {*keys}
        for key in keys:
            self.model.jobs[key].state, self.model.jobs[key].attempts = "pending", 0
            if state == "pending":
                del self.model.jobs[key]
        self.note(self.now(), sure=True, durable=True)

    def data_file(self, name):
        calls = Process(self.host).os
        return calls, calls.open(f"/q/default.{name}", NEW)

    def tear(self, name, state, count, *keys):
        """Cut the last bytes of a file off, and with them the jobs named."""
        calls, fd = self.data_file(f"{state}.jsonl")
        calls.ftruncate(fd, calls.fstat(fd).st_size - int(count))
        self.harm(state, *keys)

    def flip(self, name, state, key):
        """Alter a payload where it stands, which ends the job."""
        calls, fd = self.data_file(f"{state}.jsonl")
        data = calls.pread(fd, 1 << 20, 0)
        calls.ftruncate(fd, 0)
        calls.write(fd, data.replace(f'"k":"{key}"'.encode(), b'"k":"p8"'))
        self.harm(state, key)

    def litter(self, name, file, text):
        calls, fd = self.data_file(file)
        calls.write(fd, text.encode().decode("unicode_escape").encode("latin-1"))


def wreckage(tree):
    """Lines of the data files that cannot be records."""
    return {
        line
        for path, data in tree.items()
        if path.endswith(".jsonl")
        for line in data.split(b"\n")
        if line and not line.endswith(b"}")
    }


def random_statement(rng, world, names, verbs):
    """Something that one of them may do next, now or with an old lease."""
    name, verb, id = rng.choice(names), rng.choice(verbs), rng.choice("abcdefgh")
    world.host.clock.sleep(verb.startswith("get"))  # whether holders live is asked anew
    key = f"{rng.choice('pLmn')}{next(world.serial)}"
    late = rng.choice(("", "", "", " delay=15"))
    options = late + rng.choice(("", "", "", " priority=2", " priority=-1"))
    held = [of[1] for of in world.leases if of[0] == name][-4:]
    ever = [job.payload["k"] for job in world.ever] or [key]
    if verb == "settle" or verb == "extend":
        if not held:
            return f"{name} stats"
        key = rng.choice(held)
        settle = ("done", "done", "fail", "fail", "fail delay=25", "bury", "release")
        verb, *option = (rng.choice(settle) if verb == "settle" else verb).split()
        return " ".join([name, verb, key, *option])
    return f"{name} " + {
        "put": f"put {key}{options}",
        "put id": f"put {key} id={id}{options}",
        "many": f"many {key} {key}b {key}c{options}",
        "exist": f"exist {key} id={id}",
        "get 3": "get 3",
        "stale": f"stale {rng.choice(ever)}",
        "cancel": f"cancel {id}",
        "requeue one": f"requeue {id}",
        "reap": f"reap {rng.choice((20, 300))}",
        # Whether a pending job remembers its last delivery is the engine's affair.
        "purge": rng.choice(("purge pending", "purge inflight 5", "purge dead 60")),
        "find": f"find {id}",
        "wait": f"wait {rng.choice((1, 10, 50))}",
        "wait long": f"wait {rng.choice((1, 12, 301))}",
    }.get(verb, verb)


# Crashes, power cuts, failing calls
# =============================================================================


# TQ_MUTANTS=1 tries all, TQ_MUTANTS=0:9 the first nine of the table.
_part = os.environ.get("TQ_MUTANTS", "").split(":")
PART = slice(int(_part[0]), int(_part[1])) if len(_part) == 2 else slice(None)
TORN = 4096 if DEEP else 12
CRASH_FIRST = ("stats", "put z1", "put z1 id=z", "get", "many z1 z2", "compact")


def thinned(cases, stride):
    """Each stride-th of the cases; all of them with TQ_DEEP=1."""
    return itertools.islice(cases, 0, None, 1 if DEEP else stride)


class FaultCase(Limited):
    """Prints one closing line with what it enumerated."""

    maxDiff = 2000
    rng = random.Random(SEED)

    @classmethod
    def setUpClass(cls):
        cls.counts = collections.Counter()
        cls.began = time.perf_counter()
        logging.disable(logging.CRITICAL)
        gc.collect()
        gc.freeze()

    @classmethod
    def tearDownClass(cls):
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        said = ", ".join(f"{n:,} {what}" for what, n in cls.counts.items())
        took = time.perf_counter() - cls.began
        print(f"\n{cls.__name__}: {said} ({took:.1f} s)", file=sys.stderr)

    def share(self, check, cases):
        """Sum up what check(case) counts, for the cases of this part."""
        part, parts = self.cut
        for number, case in enumerate(list(cases)[part::parts]):
            try:
                self.counts.update(check(case) or {})
            except Exception as exc:
                raise AssertionError(f"{repr(case)[:1500]}: {exc!r}") from exc
            if number % 200 == 199:
                gc.collect()


class CrashCase(FaultCase):
    """Checks one crash state; the failure message says how to get it again."""

    turn = 0

    def check(self, disk, history, what, power=False, folder="/q"):
        """Open, use, reopen, drain, reopen; P1-P3, P5, P6, P8 of FAULTS.md."""
        CrashCase.turn += 1
        self.counts["power cuts" if power else "deaths"] += 1
        first = CRASH_FIRST[self.turn % len(CRASH_FIRST)]
        tree = disk.tree()
        try:
            allowed = history.allowed(disk.origin, power)
            self.look(disk, allowed, history, first, folder)
        except Exception as exc:
            text = "\n".join(f"  {name}: {data!r}" for name, data in tree.items())
            raise AssertionError(f"{what}; then {first}: {exc!r}\n{text}") from exc

    def check_cuts(
        self, disk, history, what, limit, at=(), *, variants="all", folder="/q"
    ):
        """Check what power cuts may leave at these moments, or at the end."""
        for label, each in disk.power_states(
            self.rng, limit, at=at, variants=variants, level=history.level
        ):
            self.check(each, history, f"{what}: {label}", True, folder)

    def check_deaths(self, disk, history, what, torn, start=0):
        for label, each in disk.process_death_states(
            start, torn_limit=torn, level=history.level
        ):
            self.check(each, history, f"{what}: {label}")

    def look(self, disk, allowed, history, first, folder):
        damage = wreckage(disk.tree()) | history.wreckage
        world = World(disk, History(), folder=folder)
        effects = world.call(f"A {first}")
        if first == "get":  # which also gives the jobs of the dead back
            for key, states in allowed.items():
                ends = [s[1] for s in states if s and s[0] == "inflight"]
                if key in effects:
                    allowed[key] = {("inflight", s[1] + 1) for s in states if s}
                else:
                    states.update((w, n) for w in ("pending", "dead") for n in ends)
        else:
            allowed.update({key: {state} for key, state in effects.items()})
        seen = by_key(world.guest("A").census())
        self.compare(seen, allowed, history)
        world.kill("A")
        with fresh(disk, folder=folder) as again:
            self.assertEqual(by_key(again.census()), seen, "reopened, it is another")
            kept = b"\n".join(disk.tree().values())
            self.assertFalse([bad for bad in damage if bad not in kept], "not kept")
            if self.turn % 4 == 0:
                self.drain(again, seen)

    def compare(self, seen, allowed, history):
        for key, states in allowed.items():
            state = seen.get(key)
            self.assertIn(state, states, f"{key} {'lost' if not state else 'wrong'}")
        self.assertLessEqual(seen.keys(), allowed.keys(), "invented")
        for batch in history.batches:
            put = ("pending", 0)
            new = [key for key in batch if {put} <= allowed[key] <= {None, put}]
            there = [key for key in new if key in seen]
            self.assertIn(len(there), (0, len(new)), f"half of {batch}: {there}")

    def drain(self, guest, seen):
        """All due jobs come, in the order of their file, and stay settled."""
        queue = guest.queue
        waiting = list(queue.jobs("pending"))
        now = [job for job in waiting if not job.run_at]
        queue.put(payload_of("zz"))
        now.append(types.SimpleNamespace(payload=payload_of("zz"), priority=0))
        order = []
        while job := queue.get():
            order.append(job.payload["k"])
            queue.task_done(job)
        now.sort(key=lambda job: -job.priority)
        wanted = [job.payload["k"] for job in now]
        self.assertEqual([key for key in order if key in wanted], wanted)
        left = {
            key: state
            for key, state in seen.items()
            if state[0] == "dead" or key not in order
        }
        late = {job.payload["k"] for job in waiting if job.run_at}
        for key, state in left.items():
            spent = state[0] == "dead" or state[1] > retries_of(key)
            self.assertTrue(spent or key in late, f"{key} was not given")
        guest.kill()
        with fresh(guest.disk, folder=queue.path) as last:
            self.assertEqual(by_key(last.census()).keys(), left.keys())
            last.queue.close()
            temp = [name for name in last.disk.tree() if name.endswith(".tmp")]
            self.assertFalse(temp)
            self.assertFalse(last.handles, "descriptors left open")


SCRIPTS = {
    "put": "| A put p1; A put L2 delay=1000; A put p3 priority=7",
    "put_id": "| A put p1 id=x; A put p2 id=y; A put q1 id=x",
    "put_many": "A put p0 | A many p1 L2 p3; A many L4 p5 p6 p7 p8",
    "put_many long end": "A put p0; A put p1 | A many p2 p3 L4",
    "get": "A put p1; A put p2 delay=1000; A put p3 priority=7; A put p4"
    " | A get; A get 2",
    "settle": "A many p1 p2 p3 p4; A put m5; A get 5"
    " | A done p1; A fail p2; A bury p3; A release p4; A fail m5",
    "extend": "A put p1; A get | A extend p1; A extend p1; A done p1",
    "stale": "A put p1; A get | A release p1; A get; A stale p1; B stats; A done p1",
    "cancel": "A put p1 id=x; A put p2 id=y; A get"
    " | A cancel x; A cancel y; A put p3 id=x",
    "requeue": "A put m1; A put m2; A get 2; A fail m1; A fail m2"
    " | A requeue; A get; A fail m1; A compact",
    "reap": "A put p1; A put m2; A put p3; A get 3; A kill | B reap; B get; B done p1",
    "takeover": "A put p1; A put p2; A get 2; A kill"
    " | B get; B done p1; B get; B kill; C get; C get; C done p2",
    "purge": "A many p1 p2; A put m3; A get 3; A fail m3; A release p1"
    " | A purge pending; A purge dead; A purge inflight",
    "compact": "A many p1 L2 p3 p4; A put p5 delay=1000; A get 3; A done p1; A bury L2"
    " | A compact; A done p3; A compact; A put p6",
    "close": "A many p1 p2 p3; A get 3; A done p1; A done p2; A bury p3"
    " | A close; B put p4; B close",
    "torn line": "A put p1; A put p2; A kill; B tear pending 9 p2"
    " | A get; A put p3; A done p1",
    "torn newline": "A put p1; A put p2; A kill; B tear pending 1; B doubt p2"
    " | A get; A put p3; A done p1",
    "torn batch": "A put p1; A many p2 p3 p4; A kill; B tear pending 9 p2 p3 p4"
    " | A put p5; A get; A done p1; A put p6",
    "torn lease": "A put p1; A get; A kill; B tear inflight 30 p1"
    " | A get; A put p3; A done p1",
    "damage": "A put p1; A litter pending.jsonl xyz\\n; A put p2; A get"
    " ; A litter inflight.jsonl \\0\\0\\n | B put p3; B get; B done p2; B put p4",
    "flipped": "A put p1; A put p2; A put p3; A get; A kill; B flip pending p2"
    "; B flip inflight p1 | B put p4; B get; B done p1; B get; B done p3",
    "leftover": "A put p1; A litter pending.jsonl.tmp xyz; A kill"
    " | B put p2; B get; B compact; B done p1; B compact",
    "replaced": "A put p1; A put p2; A get; B stats"
    " | A done p1; A compact; B put p3; B get; B done p2; A put p4; B compact; A get",
    "two processes": "A put p1; A put p2 | B get; A compact; B done p1; A put p3"
    " ; B compact; A get; A done p2; B put p4",
}
MIXED = {
    "mixed": "| a put p1; A put p2; a get; a done p1; A get; A done p2; a put p3"
    " ; A compact; A put p4",
    "mixed 2": "| A put p1; a get; a fail p1; A compact; A get; A done p1; a put p2"
    " ; a compact; A put p3",
    "mixed 3": "A put p1; A put p2; A put p3 | a get; a done p1; A get; a compact"
    "; A bury p2; a get; a bury p3; A compact; A requeue",
    "lease unsynced": "A put p1; A put p2; A put p3 | A get; a get; B compact"
    "; A done p1; B compact; B get; B fail p3; B compact",
    "exists": "| a put p1 id=x; A exist q1 id=x; a get; A put q1 id=x; a put p2 id=y"
    " ; a cancel y; A put p3 id=y",
    "careless": "| a put p1; a many p2 p3 p4; a get 2; a done p1; a compact"
    " ; a fail p2; a put p5; a compact; a close",
}
AUTO = {  # with compaction at a few hundred superseded bytes
    "auto": "| A put L1; A get; A done L1; A put L2; A get; A fail L2; A get; A bury L2"
    " ; A put p3; A requeue; A get; A done p3",
    "auto mixed": "| a put L1; a get; a done L1; A put L2; a get; A put L3; A get"
    " ; a fail L2; A done L3; a get; A put p4; a done L2; A put p5",
}


class ScriptsCase(CrashCase):
    """Each test runs `examine` on the worlds that scripts have made."""

    def enumerate(self, scripts, *args, **sizes):
        for name, script in scripts.items():
            with self.subTest(name), small(**sizes):
                self.examine(name, World().run(script).end(), *args)


class ProcessDeathTests(ScriptsCase):
    """Every process dies at each system call or byte: nothing acknowledged is lost."""

    def examine(self, name, world):
        self.check_deaths(world.host, world.history, name, TORN)

    def test_each_operation(self):
        """P1-P3, P5, P6, P8 hold at every byte of every operation."""
        self.enumerate(SCRIPTS)

    def test_mixed_processes(self):
        """fsync=False is no weaker when only processes die."""
        self.enumerate(MIXED)

    def test_unasked_compaction(self):
        """So too when an operation compacts on the way."""
        self.enumerate(AUTO, _MIB=500)


class PowerCutTests(ScriptsCase):
    """A power cut leaves any legal part of what was not synced."""

    def examine(self, name, world, limit):
        disk, limit = world.host, 130 * limit if DEEP else limit
        variants = "holes" if "many" in name else "all"
        at = range(len(disk.log) + 1)
        self.check_cuts(disk, world.history, name, limit, at, variants=variants)

    def test_each_operation(self):
        """With fsync=True all that was acknowledged survives."""
        self.enumerate(SCRIPTS, 60)

    def test_mixed_processes(self):
        """What fsync=True acknowledged survives beside fsync=False."""
        self.enumerate(MIXED, 24)

    def test_unasked_compaction(self):
        """So too when an operation compacts on the way."""
        self.enumerate(AUTO, 10, _MIB=500)


class RandomScriptTests(CrashCase):
    """Random calls of several processes, killed or cut at every moment."""

    VERBS = (
        "put", "put", "put id", "many", "exist", "get", "get", "get 3", "reap",
        *["settle"] * 4, "extend", "cancel", "requeue", "compact", "kill", "reopen",
    )  # fmt: skip

    def wander(self, rng):
        """A world after random calls of three processes, one of them careless."""
        world = World()
        while len(world.host.log) < 40:
            world.call(random_statement(rng, world, "AAbC", self.VERBS))
        return world.end()

    def test_random_scripts(self):
        """Nothing acknowledged is lost, whatever was done in whatever order."""
        for number in range(160 if DEEP else 8):
            rng = random.Random(f"{SEED} {number}")
            with small(_MIB=rng.choice([600, 1 << 20])):
                world, what = self.wander(rng), f"random script {number}"
                self.check_deaths(world.host, world.history, what, 3)
                at = range(len(world.host.log) + 1)
                limit = 40 if DEEP else 12
                self.check_cuts(world.host, world.history, what, limit, at)


RECOVERIES = (
    "R stats; R put z8",
    "R put z8; R get; R done_all",
    "R many z8 L9; R compact",
    "R put z8 id=zz; R exist z9 id=zz; R get",
    "R get 2; R done_all; R compact; R put z8",
    "r get; r done_all; R put z8; r compact; R put z9",
)


class NestedCrashTests(ScriptsCase):
    """A crash during, or a power cut after, the recovery from a crash."""

    def recover(self, what, crashed, history):
        start = len(crashed.log)
        script = RECOVERIES[self.turn % len(RECOVERIES)]
        what = f"{what}; then {script}"
        world = World(crashed, history.cut(crashed.origin))
        try:
            world.run(script).end()
        except Exception as exc:
            raise AssertionError(f"{what}: {exc!r} {crashed.tree()}") from exc
        self.check_deaths(crashed, world.history, what, 2, start)
        at = range(start, len(crashed.log) + 1)
        self.check_cuts(crashed, world.history, what, 16 if DEEP else 3, at)

    def examine(self, name, world, stride):
        states = world.host.process_death_states(torn_limit=3)
        for label, disk in thinned(states, stride):
            self.counts["crashed"] += 1
            self.recover(f"{name}: {label}", disk, world.history)

    def test_each_operation(self):
        """Nothing is lost, whoever acknowledges on whatever a crash has left."""
        self.enumerate(SCRIPTS, 17)

    def test_mixed_processes(self):
        """So too where a careless process or compactor died."""
        self.enumerate(MIXED, 11)


class NewDirectoryTests(CrashCase):
    """Nothing acknowledged hangs on a directory whose name is not durable."""

    def test_power_cut(self):
        """Whoever made the directories, and wherever he died."""
        folder = "/a/b/q"
        world = World(Disk(), folder=folder).run("A put p1; A put p2").end()
        deaths = world.host.process_death_states(torn_limit=2)
        for label, crashed in thinned(deaths, 2):
            start, history = len(crashed.log), world.history.cut(crashed.origin)
            World(crashed, history, folder=folder).run(
                "B put z8; b put z9; B get"
            ).end()
            at = range(start, len(crashed.log) + 1)
            self.check_cuts(crashed, history, label, 20, at, folder=folder)


class Failing:
    """A hook that fails the n-th of some calls, once or until it is lifted."""

    def __init__(self, number, code, sticky=False):
        self.number, self.code, self.sticky = number, code, sticky
        self.seen, self.failed, self.lifted = 0, "", False

    def __call__(self, name, when, args):
        if when == "after" or self.lifted or args[1:] == (fcntl.LOCK_UN,):
            return  # letting go of a lock cannot fail
        self.seen += 1
        if self.seen == self.number or self.sticky and self.seen > self.number > 0:
            self.failed = f"{name}{args[:1]}"
            # Windows may refuse a rename for a while, so that one is tried again.
            raise _error(errno.EIO if name == "replace" else self.code)


class FailureCase(CrashCase):
    """What the disk refuses is reported, and nothing is acknowledged falsely."""

    stride, cuts = 1, 2  # of the failures that are tried; after each of them

    def run_into(self, script, hook, watch):
        """Run a script into a hook; return the call that raised, and when."""
        before, _, after = script.rpartition("|")
        world = World().run(f"{before} |")
        world.host.watch, world.host.hook = watch, hook
        for statement in map(str.strip, after.split(";")):
            start = len(world.host.log)
            try:
                world.call(statement)
            except Refused:
                return world, statement, start
            if hook.failed and hook.sticky:
                return world, statement.split()[0], start
        return world, statement.split()[0], len(world.host.log)

    def tries(self, scripts, watch, codes, stride=0):
        """Fail each call of each script, once and for ever."""
        codes, calls = itertools.cycle(codes), frozenset(watch)
        for name, script in scripts.items():
            count = Failing(0, 0)
            self.run_into(script, count, calls)[0].end()
            numbers = itertools.product(range(1, count.seen + 1), (False, True))
            for number, sticky in thinned(numbers, stride or self.stride):
                hook = Failing(number, next(codes), sticky)
                world, raised, start = self.run_into(script, hook, calls)
                what = f"{name}: call {number} fails with {hook.code}, {sticky=}"
                what = f"{what}: {hook.failed} in {raised!r}"
                self.counts["failures"] += 1
                yield what, world, hook, raised, start

    def go_on(self, world, hook, raised):
        """The same process, and then a new one, work as if nothing had been."""
        name, verb, *_ = [*raised.split(), ""]
        if hook.sticky and verb and "sync" in hook.failed:
            with contextlib.suppress(Refused):
                world.call(f"{name} stats")
        hook.lifted = True
        if " id=" in raised:
            world.call(raised)
        if name not in world.guests or world.closed(world.guests[name]):
            # Whoever closes or dies before he could repair the files leaves a hole.
            name = "y" if hook.sticky else "Y"
        world.run(f"{name} put z8; {name} get; {name} done_all")
        world.run("z put z9" if name == "y" else "Z put z9")

    def examine(self, what, world, hook, raised, start):
        try:
            self.go_on(world, hook, raised)
        except (AssertionError, Refused) as exc:
            raise AssertionError(f"{what}: {exc!r} {world.host.tree()}") from exc
        end = len(world.host.log)
        self.check(world.host.at(end), world.history, what)
        every = DEEP and self.cuts > 1
        at = range(start, end + 1) if every else {self.rng.randint(start, end), end}
        limit = 6 if DEEP else self.cuts
        self.check_cuts(world.host, world.history, what, limit, sorted(at))
        for guest in world.guests.values():
            guest.queue.close()
            if guest.handles:
                gc.collect()  # of exceptions and their frames
            self.assertFalse(guest.handles, f"{what}: descriptors left open")
        world.end()
        temp = [name for name in world.host.tree() if name.endswith(".tmp")]
        self.assertFalse(temp, what)

    def enumerate(self, scripts, watch, codes, **sizes):
        for name, script in scripts.items():
            with self.subTest(name), small(**sizes):
                for case in self.tries({name: script}, watch, codes):
                    self.examine(*case)


class FailingSyncTests(FailureCase):
    """After a failed sync nothing counts as durable until all is copied."""

    stride = 3  # odd, so that once and for ever have their turns
    SYNCS = ("fsync", "fdatasync")

    def test_every_sync(self):
        """Each fails once and for ever; later acknowledgements are true."""
        self.enumerate({**SCRIPTS, **MIXED}, self.SYNCS, [errno.EIO, errno.ENOSPC])

    def test_unasked_compaction(self):
        """So too those of a compaction that nobody asked for."""
        self.enumerate(AUTO, self.SYNCS, [errno.EIO], _MIB=500)

    def test_asked_syncs_raise(self):
        """A put, settle or asked compaction whose sync fails does not return."""
        for script in (
            "| A put p1 id=x",
            "A put p1; A get | A done p1",
            "A put p1; A get | A fail p1",
            "A put p1; A get| A bury p1",
            "A many p1 p2; A get; A done p1 | A compact",
            "a put p1 id=x | A exist q1 id=x",
        ):
            for case in self.tries({script: script}, self.SYNCS, [errno.EIO], 1):
                self.assertIn(" ", case[3], case[0])
                case[1].end()

    def interfere(self, fails, script):
        """Let a put of A fail its first syncs, and then run the script."""
        world = World().run("A put p0; B stats |")
        world.host.watch = frozenset(self.SYNCS)
        world.host.hook = hook = Failing(1, errno.EIO, sticky=True)
        for call in ["A put p1 id=x", *["A stats"] * fails]:
            with self.assertRaises(Refused):
                world.call(call)
            if fails:  # only the directory's now, so that the repair is half done
                world.host.watch = frozenset({"fsync"})
        hook.lifted = True
        world.run(script)
        self.check(world.host.at(len(world.host.log)), world.history, script)
        self.check_cuts(world.host, world.history, script, 50)

    def test_settled_by_another_before_the_repair(self):
        """A success of another process is not taken back by the repair."""
        self.interfere(0, "B get 2; B done_all; B put p2 id=x; A put z8")

    def test_same_id_while_the_repair_is_half_done(self):
        """The repair drops the failed records, not others of that id."""
        self.interfere(1, "B put p2 id=x; A put z8")
        self.interfere(2, "B put p2 id=x; A put z8")

    def test_threads_that_wait_for_one_sync(self):
        """When it fails, all of them raise, and nothing of theirs is kept."""
        world = World().run("A put p0 |")
        guest, go, outcomes = world.guest("A"), threading.Event(), []

        def hook(name, when, args):
            if name == "fdatasync" and when == "before":
                go.wait(5)
                raise _error(errno.EIO)

        def put(key):
            try:
                guest.queue.put(payload_of(key))
                outcomes.append("returned")
            except guest.tq.QueueError:
                outcomes.append("raised")

        # One leads and hangs in the sync; two more write meanwhile and wait.
        world.host.hook = hook
        self.in_threads(world.host, put, go)
        self.assertEqual(outcomes, ["raised"] * 3)
        world.host.hook, world.model.exact = None, False
        world.run("A put p9")
        self.check_cuts(world.host, world.history, "threads", 50)

    def in_threads(self, disk, put, go):
        threads = [threading.Thread(target=put, args=(f"p{n}",)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for _ in range(200):  # they may also be led by one who waits for the first
            if len([op for op in disk.log if op[0] == "write"]) == 3:
                break
            threads[0].join(0.001)
        go.set()
        for thread in threads:
            thread.join(5)


class FailingCallTests(FailureCase):
    """Any call may fail: QueueError, nothing lost, nothing leaked, works again."""

    stride, cuts = 9, 1
    CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.EINTR)

    def test_every_call(self):
        """Each system call of each script, once and for ever."""
        self.enumerate({**SCRIPTS, **MIXED}, EVERY_CALL, self.CODES)

    def test_unasked_compaction(self):
        """So too those of a compaction that nobody asked for."""
        self.enumerate(AUTO, EVERY_CALL, self.CODES, _MIB=500)

    def test_every_short_write(self):
        """A put that fits in part is cut back whole."""
        for script in ("A put p0 | A put p1 id=x", "A put p0 | A many p1 p2"):
            for size in thinned(range(2000), 7):
                world, raised = self.fail_short(script, size)
                if raised == "A":
                    break
                self.counts["short writes"] += 1
                what = f"{script}: {size} bytes fit"
                data = world.host.tree()["/q/default.pending.jsonl"]
                self.assertEqual((data.count(b"\n"), data[-1:]), (1, b"\n"), what)
                self.examine(what, world, Failing(0, 0), raised, 0)
            self.assertIn(size, range(100, 1000))

    def fail_short(self, script, size):
        """Run the last call of a script with room for so many bytes only."""
        before, _, after = script.rpartition("|")
        world = World().run(f"{before} |")
        world.host.capacity = sum(map(len, world.host.tree().values())) + size
        try:
            world.call(after.strip())
            raised = "A"
        except Refused:
            raised = after.strip()
        world.host.capacity = math.inf
        return world, raised


class Mutant(NamedTuple):
    """A weakened copy of the module: a text that stands once in a function, or in
    what is assigned to a name, is replaced.  Each killer (a test or a class; * stands
    for each database) must fail by itself; where one of a row of the file engine does
    not, all that have to do with that are tried."""

    what: str
    killers: str  # by spaces
    where: str  # a function, Class.function, or name of the module
    old: str
    new: str

    def place(self, source):
        """Where the text stands; a row that does not apply must not pass."""
        found = [
            start + match.start()
            for start, end in places_of(source)[self.where]
            for match in re.finditer(re.escape(self.old), source[start:end])
        ]
        if len(found) != 1:
            what = f"{self.old!r} stands {len(found)} times in {self.where}"
            raise AssertionError(f"{self.what}: {what}; mend the row")
        return found[0]

    def source(self, source):
        place = self.place(source)
        return source[:place] + self.new + source[place + len(self.old) :]

    def each_killer(self):
        """Those that can be tried here."""
        for name in self.killers.split():
            for database in ("Sqlite", "Postgres") if "*" in name else ("",):
                killer = name.replace("*", database)
                if not (NO_POSTGRES and "Postgres" in killer):
                    yield killer

    def needs_postgres(self):
        return "*" in self.killers or "Postgres" in self.killers

    def trials(self, source):
        [(first, last)] = places_of(source)["File engine"]
        more = CRASH_SUITE if first < self.place(source) < last else []
        for killer in self.each_killer():
            yield functools.partial(
                Trial, self.what, self.source(source), [killer, *more]
            )


@functools.cache
def places_of(source):
    """Where functions begin and end, by name and by Class.name, and what is assigned
    to names of the module; a name means the file engine's, if it has one."""
    first = source.index("\n# File engine\n# ===")
    last = source.index("\n# ====", source.index("\n# ====", first) + 1)
    lines = [0, *(match.end() for match in re.finditer("\n", source))]
    found = collections.defaultdict(list)
    for owner in ast.walk(ast.parse(source)):
        for node in ast.iter_child_nodes(owner):
            names = []
            if isinstance(node, ast.FunctionDef):
                names = [node.name, f"{getattr(owner, 'name', '')}.{node.name}"]
            elif isinstance(owner, ast.Module) and hasattr(node, "value"):
                targets = getattr(node, "targets", [getattr(node, "target", node)])
                names = [ast.unparse(target) for target in targets]
            for name in names:
                found[name].append((lines[node.lineno - 1], lines[node.end_lineno]))
    for name, spans in found.items():
        found[name] = [span for span in spans if first <= span[0] < last] or spans
    return collections.defaultdict(list, found, **{"File engine": [(first, last)]})


class PerThread(threading.local):
    """A lock of which every thread has its own, so that it excludes nobody."""

    def __init__(self):
        self.lock = threading.RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self._is_owned = self.lock._is_owned

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exc_info):
        self.release()


# fmt: off
MUTANTS = [Mutant(*row) for row in [
    # what is acknowledged is on disk, under a durable name (I5)
    ("what is acknowledged is not synced", "DurabilityTest",
     "_is_synced", "inode.sync()", "pass"),
    ("nor its file's name", "DurabilityTest",
     "_is_synced", "self.sync_directory()", "pass"),
    ("all names are durable", "DurabilityTest",
     "_Inode.__init__", "self.name_durable = False", "self.name_durable = True"),
    ("a sync covers later writes",
     "DurabilityTest.test_a_sync_is_for_what_was_written_before_it",
     "_is_synced", "inode.synced = target", "inode.synced = inode.issued"),
    ("puts are not synced", "DurabilityTest",
     "_insert", "spare=False", "spare=False, durable=False"),
    ("changes are not synced", "DurabilityTest",
     "_change", "self._append(file, part)", "self._append(file, part, durable=False)"),
    ("a success beside a take is not synced", "DurabilityTest",
     "_take", "durable=bool(lines)", "durable=False"),
    ("what a move holds is not synced", "DurabilityTest",
     "_renew", "durable=not held", "durable=False"),
    ("answers are not synced", "DurabilityTest",
     "_put", "store.ticket(", "(lambda *_: None)("),
    ("two syncs of one file at a time", "FailedSyncTest",
     "_is_synced", "with inode.syncing:", "if True:"),
    ("nobody awaits the sync of a shared put",
     "FailedSyncTest.test_who_shares_a_put_fails_with_it",
     "_FileEngine.put", "self._commit([ticket])", "pass"),
    ("what is acknowledged is not synced by its descriptor", "DurabilityTest",
     "_Inode.sync", "_sync(file.fd)", "_WINDOWS and _sync(file.fd)"),
    ("what is acknowledged is not synced on Windows",
     "WindowsTest.test_what_is_acknowledged_is_synced",
     "_Inode.sync", "_sync(file.fd)", "_WINDOWS or _sync(file.fd)"),
    ("a sync goes to the cache only", "PrimitivesTest",
     "_sync", "os.fdatasync(fd)", "pass"),
    ("a sync without fdatasync does nothing", "PrimitivesTest",
     "_sync", "os.fsync(fd)", "pass"),
    ("a sync stops at the disk's cache", "PrimitivesTest",
     "_sync", "fcntl.fcntl(fd, fcntl.F_FULLFSYNC)", "os.fsync(fd)"),
    ("a directory's sync does nothing", "DurabilityTest",
     "_sync_path", "os.fsync(directory.fd)", "pass"),
    ("the directory is not synced", "DurabilityTest",
     "sync_directory", "_sync_path(self.path)", "pass"),
    ("its parents are not synced", "NewDirectoryTests",
     "sync_directory", "_sync_ancestors(", "bool("),
    ("no parent is synced", "NewDirectoryTests",
     "_sync_ancestors", "_sync_path(path)", "pass"),
    ("only one parent is synced", "NewDirectoryTests",
     "_sync_ancestors", "while path != os.path.dirname(path):", "for _ in (1,):"),
    ("parents of the symlink, not of the directory",
     "DurabilityTest.test_a_new_file_s_name_is_durable_before_the_first_answer",
     "sync_directory", "os.path.realpath(self.path)", "self.path"),
    ("a parent that we may not read is an error",
     "DurabilityTest.test_a_parent_that_may_not_be_read_is_no_error",
     "_sync_ancestors", "except PermissionError:", "except ZeroDivisionError:"),
    # after a failed sync (I9)
    ("failed sync: acknowledged", "FailedSyncTest",
     "_Store.commit", "not self._is_synced(*ticket)",
     "self._is_synced(*ticket) is None"),
    ("failed sync: no copy", "FailedSyncTest",
     "enter", "self.rescue()", "self.failed_inodes.clear()"),
    ("failed sync: the same file again", "FailedSyncTest",
     "rescue", "self.rewrite(", "(lambda *_: None)("),
    ("failed sync: no void", "FailedSyncTest",
     "_all_but_failed", "if line not in self._failed_lines", "if True"),
    ("failed sync: void for ever",
     "FailedSyncTest.test_what_a_repair_left_out_can_be_put_again",
     "rescue", "self._failed_lines.clear()", "pass"),
    ("failed sync: names unsynced", "FailedSyncTest",
     "rescue", "self.sync_directory()", "pass"),
    ("failed sync: forgotten", "FailedSyncTest",
     "_is_synced", "self.failed_inodes.append(inode)", "pass"),
    ("failed sync: forgotten before the copy", "FailedSyncTest",
     "rescue", "self.look(data)", "self.look(data); del self.failed_inodes[:]"),
    ("failed sync: not told", "FailedSyncTest",
     "_is_synced", "inode.failed = True", "pass"),
    ("failed sync: a later one makes good",
     "FailedSyncTest.test_a_sync_that_succeeds_after_one_failed_proves_nothing",
     "_is_synced", "if not inode.failed:", "if True:"),
    ("failed sync: not healed at once",
     "FailedSyncTest.test_files_are_copied_before_the_failed_call_returns",
     "_locked", "if entered and self._store.failed_inodes:", "if False:"),
    ("failed sync: not repaired at once",
     "FailedSyncTest.test_files_are_copied_before_the_failed_call_returns",
     "_FileEngine._commit", "self._locked(lambda: None)", "pass"),
    ("failed sync: compacted all the same", "FailingSyncTests.test_asked_syncs_raise",
     "make_durable", "raise OSError(", "bool, ("),
    ("failed directory sync: forgotten", "FailingSyncTests",
     "sync_directory", "self.failed_inodes.extend", "list"),
    # a record goes only when what supersedes it is durable (I4)
    ("no sync before compaction", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "_compact", "store.make_durable()", "pass"),
    ("nor before tombstones go", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "_compact", "store.sync_directory()", "pass"),
    ("tombstones go first", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "_compact", "(0, 2, 1)", "(1, 0, 2)"),
    ("what was not read is dropped",
     "CompactionTest.test_what_was_not_read_is_not_dropped",
     "_compact", "raise _StaleError", "pass"),
    ("new content is not synced", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "rewrite", "_sync(inode.fd)", "pass"),
    ("replaced before it is synced",
     "CompactionTest.test_the_order_of_syncs_and_replaces",
     "rewrite", "_sync(inode.fd)",
     "os.replace(data.temp, data.path); _sync(inode.fd); "
     "os.replace(data.path, data.temp)"),
    ("nothing is replaced", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "rewrite", "_swap(data, old, inode)", "pass"),
    ("nothing is swapped on Windows",
     "WindowsTest.test_a_file_replaced_under_an_iteration",
     "_swap", "old.file.close()", "pass"),
    ("what Windows opens anew may be another file",
     "WindowsTest.test_a_file_replaced_under_an_iteration",
     "_again", "!= self.ident", "is None"),
    ("a rename does nothing", "CompactionTest.test_the_order_of_syncs_and_replaces",
     "_swap", "os.replace(data.temp, data.path)", "pass"),
    ("a repair makes damage sound",
     "FailedSyncTest.test_a_repair_makes_no_damage_sound",
     "_plain", "_body(line[:-1])", "line[:-19]"),
    ("a rename refused to the end is none",
     "CompactionTest.test_replace_is_tried_again_where_readers_refuse_it",
     "_swap", "                raise", "                return"),
    ("a refused rename is not tried again",
     "CompactionTest.test_replace_is_tried_again_where_readers_refuse_it",
     "_swap", "except PermissionError:", "except ZeroDivisionError:"),
    ("temp files leak",
     "CompactionTest.test_replace_is_tried_again_where_readers_refuse_it",
     "rewrite", "_unlink(data.temp)\n            raise", "raise"),
    ("a temp file stands in the way",
     "CompactionTest.test_a_leftover_temp_file_is_not_in_the_way",
     "rewrite", "_unlink(data.temp)\n        try", "try"),
    ("leftovers stay",
     "CompactionTest.test_a_leftover_temp_file_is_removed_and_never_read",
     "_Store.enter", "_unlink(data.temp)", "pass"),
    ("nothing is unlinked",
     "CompactionTest.test_a_leftover_temp_file_is_removed_and_never_read",
     "_unlink", "os.unlink(path)", "pass"),
    ("modes are not kept", "ModesTest",
     "_keep_mode", "os.fchmod(", "bool, ("),
    # one append, whole or not at all (I2, I3)
    ("short writes are not continued", "PrimitivesTest",
     "_write", "while written < len(block):", "while False:"),
    ("no cut-back", "PrimitivesTest",
     "append", "os.ftruncate(", "bool, ("),
    ("written on behind what could not be cut back", "PrimitivesTest",
     "append", "spare = False", "pass"),
    ("a rev is used twice", "PrimitivesTest",
     "_append", "index.use_up(lines)", "pass"),
    ("used revs are not skipped", "PrimitivesTest",
     "next_rev", "self.used_revs.get(key, 0)", "0"),
    ("half a change is kept", "LifeTest.test_an_interrupted_call_leaves_no_half_change",
     "_attempt", "index.dirty = True", "pass"),
    ("an index of half a change is used",
     "LifeTest.test_an_interrupted_call_leaves_no_half_change",
     "_attempt", "if index.dirty:", "if False:"),
    ("half a forgotten index is used",
     "LifeTest.test_an_interrupted_first_look_is_begun_anew",
     "_Index.discard", "self.dirty = True", "self.dirty = False"),
    ("a lower rev wins", "IdsTest",
     "_apply", "if rev < old_rev or", "if"),
    # the tail is decided once (I7)
    ("no cut of torn tails", "TailTest",
     "_decide_tail", "os.ftruncate(", "bool, ("),
    ("no newline for a sound tail", "TailTest",
     "_decide_tail", "self.append(", "(lambda *_, **__: 0)("),
    ("torn tails are not kept", "TailTest",
     "_decide_tail", "self._keep(", "bool("),
    ("cut before it is kept", "PowerCutTests",
     "_decide_tail", "self._keep(inode.read(good, size - good))",
     "raw = inode.read(good, size - good); "
     "os.ftruncate(inode.fd, good); self._keep(raw)"),
    ("a torn batch is cut in part", "PutManyTest",
     "sound_end", "if _is_closed(line):", "if True:"),
    ("a batch torn between two lines is whole",
     "PutManyTest.test_a_torn_batch_leaves_nothing",
     "sound_end", "_is_open(last) or", ""),
    ("an unended line is not read where nobody may end it",
     "TailTest.test_a_newline_that_cannot_be_written_is_imagined",
     "_some", "== self.unterminated", "== -2"),
    ("who may not write is let in to look",
     "ReadOnlyTest.test_a_file_that_may_not_be_written_can_be_read",
     "_Store._open", "or not self._inspecting", ""),
    ("a write's lines are not counted", "DamageTest",
     "_is_complete", "if not top or", "if True or"),
    ("zeros count as lines", "DamageTest",
     "_is_complete", r'b"\0" in line or', ""),
    ("pluses mean nothing", "PutManyTest",
     "_is_open", """== b',"crc":"+'""", "is None"),
    # damage is kept, and nothing altered is read
    ("damage is not set aside", "DamageTest",
     "_catch_up", "if index.damage and", "if False and"),
    ("kept bytes are not synced", "PowerCutTests",
     "_keep", "_sync(kept.inode.fd)", "pass"),
    ("kept file's name is not synced", "PowerCutTests",
     "_keep", "self.sync_directory()", "pass"),
    ("kept bytes of a failed sync stay as they are", "FailingSyncTests",
     "_keep", "self.rewrite(", "bool, ("),
    ("a failed sync of kept bytes is forgotten", "FailingSyncTests",
     "_keep", "self._damaged_in_doubt = True", "pass"),
    ("no crc check of pending", "DamageTest",
     "_load_pending", '== seal.lstrip(b"+")', '!= b""'),
    ("no crc check of others", "DamageTest",
     "_load_line", "_body(line) is not None", "True"),
    ("no crc check of odd ones", "DamageTest",
     "_any_record", "_body(line) is not None", "True"),
    ("no crc check when a line is read again",
     "ReplacedFilesTest.test_a_line_changed_in_place_is_noticed_when_it_is_read_again",
     "_own_record", "_body(line)", """line.rpartition(b',"crc":"')[0]"""),
    ("a line read again may be another job's",
     "ReplacedFilesTest.test_a_line_changed_in_place_is_noticed_when_it_is_read_again",
     "_FileEngine._record", "record.key != key or ", ""),
    ("a line read again may have another rev",
     "ReplacedFilesTest.test_a_rev_changed_in_place_is_noticed_before_a_success",
     "_FileEngine._record", "or record.rev != rev", ""),
    ("revs without limit",
     "DamageTest.test_a_tombstone_beyond_the_limit_removes_nothing",
     "_load_line", "int(top[2]) <= _MAX_REV and", ""),
    # the path still is the file held open (I8)
    ("replaced files go unseen", "ReplacedFilesTest",
     "look", "_ident(info) != inode.ident", "False"),
    ("a replaced file's index is kept",
     "ReplacedFilesTest.test_an_editor_replaces_a_file_by_one_as_long",
     "_catch_up", "if store.look(data) or", "if store.look(data) and False or"),
    ("a blind put keeps the index of a replaced file",
     "ReplacedFilesTest.test_an_editor_replaces_a_file_by_one_as_long",
     "_put_blind", "index.discard()", "pass"),
    ("a file may shrink", "ReplacedFilesTest",
     "_catch_up", "or data.size < index.read[data.file]", ""),
    ("remembered bytes do not matter", "ReplacedFilesTest",
     "_read", "block.startswith(mark)", "True"),
    # the token is the fence (I6)
    ("no token check", "LifeTest",
     "_fenced", "if token == fence", "if True"),
    ("what is not inflight can be settled",
     "HandWrittenTest.test_a_token_settles_nothing_that_is_not_inflight",
     "_fenced", "if state != _INFLIGHT:", "if False:"),
    ("one token for all leases of a job", "LifeTest",
     "_lease_next", "self.fresh()", 'record.fields["id"]'),
    ("all processes make the same tokens", "ProcessesTest",
     "_FileEngine._reset", "os.urandom(8).hex()", '"0"'),
    ("a token outlives its lease", "HolderTest",
     "_apply", "self.tokens.pop(key, None)", "pass"),
    ("a job is given back or taken over though it changed",
     "HolderTest.test_a_lease_renewed_while_the_backoff_is_asked_stays",
     "_fenced", "rev == fence", "rev"),
    ("a lower priority may go before a dead holder's job", "HolderTest",
     "_pick", "order.priority <= above", "False"),
    # both locks, and nothing under them that may not be (I1)
    ("no flock", "LockTest",
     "_flock", "_try_lock(fd)", "pass"),
    ("no patience with the flock", "LockTest",
     "_flock_busy", "_try_lock(fd)", "pass"),
    ("a busy lock is passed after a while", "LockTest",
     "_flock_busy", "raise self._timed_out()", "return"),
    ("a shared flock", "LockTest",
     "_try_lock", "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
    ("no unlock", "ReentranceTest.test_two_objects_on_one_directory_in_one_thread",
     "release", "_unlock(self._file.fd)", "pass"),
    ("unlocking does nothing",
     "ReentranceTest.test_two_objects_on_one_directory_in_one_thread",
     "_unlock", "fcntl.flock(fd, fcntl.LOCK_UN)", "pass"),
    ("no thread lock", "ThreadsTest",
     "_FileLock.reset", "threading.RLock()",
     '__import__("test_tiny_queue").PerThread()'),
    ("another lock file will do", "LockTest",
     "acquire", "== self.ident", "!= None"),
    ("locked before it is noted", "InterruptTest",
     "acquire", "self._flocked = True",
     "self._flocked = self.shared and self._flock(file.fd) or True"),
    ("one release", "InterruptTest",
     "_locked", "finally:\n            lock.release()", "finally:\n            pass"),
    ("descriptors are born unowned", "InterruptTest",
     "_Fd.__init__", "self._own.append(os.open(path, flags, 0o666))",
     "fd = os.open(path, flags, mode)\n            self._own.append(fd)"),
    ("calls within calls", "ReentranceTest",
     "_locked", "if lock.mine():", "if False:"),
    ("closed queues work", "CloseTest",
     "_locked", "if self._closed:", "if False:"),
    ("a child keeps what it inherits", "HolderTest",
     "_after_fork_in_child", "file.close()", "pass"),
    ("a lock file deleted meanwhile is an error", "LockTest",
     "acquire", "except FileNotFoundError:", "except ZeroDivisionError:"),
    ("no flock at all is any error",
     "LockTest.test_whatever_flock_answers_is_an_error_of_the_queue",
     "_flock", "if exc.errno not in _UNSUPPORTED:", "if True:"),
    ("an interrupted flock is an error",
     "LockTest.test_an_interrupted_flock_is_tried_again",
     "_flock", "(BlockingIOError, InterruptedError)", "BlockingIOError"),
    ("who only looked cannot write later",
     "ReadOnlyTest.test_an_object_that_looked_first_can_write_later",
     "_Store.enter", "changed = write and self.readonly", "changed = False"),
    ("a lock once read-only stays so",
     "ReadOnlyTest.test_an_object_that_looked_first_can_write_later",
     "acquire", "or (self.readonly and write)", ""),
    ("a file that is gone is an error", "ReplacedFilesTest",
     "look", "except FileNotFoundError:", "except ZeroDivisionError:"),
    ("a taken byte is an error of its own", "LockTest.test_emulated_flock_is_refused",
     "new_holder", "if exc.errno not in (errno.EAGAIN, errno.EACCES):", "if True:"),
    ("an old kernel's refusal is an error",
     "LockTest.test_without_locks_of_open_files_time_decides",
     "new_holder", "if exc.errno == errno.EINVAL:", "if False:"),
    ("symlinks are followed", "ForeignFilesTest",
     "_OPEN_SAFELY", '"O_NOFOLLOW ', '"'),
    ("opened as if nobody planted anything", "ForeignFilesTest",
     "_open_file", "flags | _OPEN_SAFELY", "flags"),
    ("FIFOs are waited for", "ForeignFilesTest.test_fifos_where_files_are_only_read",
     "_OPEN_SAFELY", " O_NONBLOCK ", " "),
    ("any kind of file will do", "ForeignFilesTest",
     "_open_file", "if not stat.S_ISREG(", "if False and ("),
    # the ballast
    ("ballast is not spent", "FullDiskTest",
     "append", "not self._lock.spend_ballast()", "True"),
    ("spending it frees nothing", "FullDiskTest",
     "spend_ballast", "os.ftruncate(", "bool, ("),
    ("ballast is not laid", "FullDiskTest",
     "acquire", "self._lay_ballast(info.st_size)", "pass"),
    ("a change may not use the ballast",
     "FullDiskTest.test_each_change_may_be_the_one_that_uses_the_ballast",
     "_change", "self._append(file, part)", "self._append(file, part, spare=False)"),
    ("a lease may not use the ballast", "FullDiskTest",
     "_take", "lines + leases,", "lines + leases, spare=False,"),
    ("a renewal may not use the ballast",
     "FullDiskTest.test_each_change_may_be_the_one_that_uses_the_ballast",
     "_renew", "durable=not held", "durable=not held, spare=False"),
    ("half laid ballast stays", "FullDiskTest",
     "_lay_ballast", "self.spend_ballast()", "pass"),
    ("a put may use the ballast", "FullDiskTest",
     "_insert", "spare=False", "spare=True"),
    ("ballast can be compressed", "FullDiskTest",
     "_lay_ballast", "os.urandom(", "bytes("),
    # who is alive
    ("everybody lives", "HolderTest.test_a_killed_holder_s_job_is_back_at_the_next_get",
     "holds", "kind != fcntl.F_UNLCK", "True"),
    ("nobody lives", "HolderTest",
     "holds", "kind != fcntl.F_UNLCK", "False"),
    ("nobody is asked", "HolderTest",
     "holds", "fcntl.fcntl(self._file.fd, fcntl.F_OFD_GETLK, _byte_lock(number))",
     'struct.pack("h", fcntl.F_UNLCK)'),
    ("no byte is locked", "HolderTest",
     "new_holder", "fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, _byte_lock(number))",
     "pass"),
    ("a taken byte is no reason to stop", "LockTest",
     "new_holder", "raise QueueError(", "return None and QueueError("),
    ("a proof on a lock file that is gone",
     "LockTest.test_a_lease_after_the_lock_file_was_deleted_is_proved_anew",
     "_live_holder", "holder.ident != self._lock.ident", "False"),
    ("a job does not keep its proof of life", "HolderTest",
     "_lease", '"inflight", holder)', '"inflight")'),
    # what becomes of a job (Queue decides it, for every engine)
    ("a retry too many", "LifeTest.test_spent_retries_make_it_dead",
     "Queue._failed", "job.attempts > job.max_retries",
     "job.attempts > job.max_retries + 1"),
    ("a retry too few", "LifeTest.test_spent_retries_make_it_dead",
     "Queue._failed", "job.attempts > job.max_retries",
     "job.attempts >= job.max_retries"),
    ("a failure is not counted",
     "LifeTest.test_each_end_without_success",
     "Queue._failed", "attempts=job.attempts", "attempts=job.attempts - 1"),
    ("a failed job is due at once",
     "RetryTest.test_the_backoff_is_asked_with_the_attempt",
     "Queue._failed", "self._backoff(job.attempts) if delay is None",
     "0.0 if delay is None"),
    ("a buried job is retried", "LifeTest.test_each_end_without_success",
     "Queue._buried", '"dead"', '"pending"'),
    ("a released delivery counts", "LifeTest.test_release_does_not_count",
     "Queue._released", "job.attempts - 1", "job.attempts"),
    ("a lost lease is not told",
     "LifeTest.test_only_a_lease_is_settled_or_renewed",
     "Queue._settle", "raise _lost(", "bool, ("),
    ("a lost lease is renewed", "LifeTest.test_only_a_lease_is_settled_or_renewed",
     "Queue.extend", "raise _lost(", "return job or ("),
    ("one get has the queue's lease timeout", "LifeTest.test_how_long_a_lease_lasts",
     "Queue._get", "seconds = _lease_seconds(lease_timeout)", "pass"),
    ("a renewal begins a new lease", "LifeTest.test_how_long_a_lease_lasts",
     "Queue.extend", "token=job.token", "token=self._engine.fresh()"),
    ("what is not dead is replayed", "LifeTest.test_requeue",
     "Queue.requeue_dead", ' or job.state != "dead"', ""),
    ("a replayed job keeps its attempts", "LifeTest.test_requeue",
     "_replayed", '"pending", ', '"pending", attempts=job.attempts, '),
    ("a crash is not counted", "HolderTest.test_a_poison_job_reaches_dead",
     "_Expired.change", "self.crashes + 1", "self.crashes"),
    ("dead though it has a retry left", "HolderTest.test_a_poison_job_reaches_dead",
     "_Expired.is_spent", "self.attempts >", "self.attempts >="),
    ("a crash more than retries",
     "LifeTest.test_reap_counts_only_what_is_stale",
     "_Expired.is_spent", "self.max_retries", "self.max_retries + 1"),
    ("a first crash has a backoff",
     "HolderTest.test_a_lease_renewed_while_the_backoff_is_asked_stays",
     "Queue._given_back", " if one.crashes else 0.0", ""),
    ("no crash has a backoff",
     "HolderTest.test_a_lease_renewed_while_the_backoff_is_asked_stays",
     "Queue._given_back", "self._backoff(one.attempts) if one.crashes else 0.0", "0.0"),
    ("what crashed twice is taken over at once",
     "HolderTest.test_a_poison_job_reaches_dead",
     "Queue._find_orphans", "one.crashes or one.is_spent()", "one.is_spent()"),
    ("what has no retry left is taken over",
     "LifeTest.test_a_get_makes_dead_what_has_no_retries_left",
     "Queue._find_orphans", "one.crashes or one.is_spent()", "one.crashes"),
    ("a dead holder's job is not first",
     "HolderTest.test_dead_holders_jobs_come_by_priority",
     "Queue._take", " if orphan is None else orphan.priority", ""),
    ("dead holders' jobs in any order",
     "HolderTest.test_dead_holders_jobs_come_by_priority",
     "Queue._find_orphans", "-one.priority", "0"),
    ("a busy queue asks for no dead holder",
     "HolderTest.test_on_a_busy_queue_it_is_back_within_a_second",
     "Queue._next", "time.monotonic() - self._looked >= _TICK", "False"),
    ("a get asks for no dead holder",
     "HolderTest.test_a_killed_holder_s_job_is_back_at_the_next_get",
     "Queue._next", "first and not taken.jobs", "False"),
    ("purge of what has changed meanwhile",
     "LifeTest.test_purge_leaves_what_changes_meanwhile",
     "Queue.purge", "job._rev", "None"),
    ("purge whatever the age", "LifeTest.test_purge_by_state_and_age",
     "Queue.purge", "None, age", "None, 0.0"),
    ("reap whatever the age", "LifeTest.test_reap_counts_only_what_is_stale",
     "Queue.reap_stale", "expired(age)", "expired(0.0)"),
    # workers: one call settles a job and gets the next, and threads share it
    ("a settlement counts before it is durable",
     "WorkerCallsTest.test_a_job_counts_as_done_once_that_is_durable",
     "Worker._next", """answer = self._insist(outcome, self._together, call, outcome)
        if answer is None:
            return None
        made, job, seen = answer
        if outcome is not None:
            self._count(outcome, made)
""", """if outcome is not None:
            self._count(outcome, True)
        answer = self._insist(outcome, self._together, call, outcome)
        if answer is None:
            return None
        made, job, seen = answer
"""),
    ("a lost lease counts as done",
     "WorkerCallsTest.test_a_lost_lease_of_a_shared_call_is_one_job_s",
     "Worker._count", 'name = "lost"', "pass"),
    ("a worker says nothing of a lost lease",
     "WorkerCallsTest.test_a_lost_lease_of_a_shared_call_is_one_job_s",
     "Worker._count", "_log().warning(", "bool, ("),
    ("one job too many", "WorkerLimitsTest.test_max_jobs",
     "_settle_and_take", "n = min(n, self.max_jobs - self._taken)", "pass"),
    ("what a failed call was asked is lost",
     "WorkerCallsTest.test_a_failing_call_loses_nothing",
     "_Combined.__call__", "while call.answer is None:", "for _ in (1,):"),
    ("a lock's timeout is its leader's only",
     "ThreadsTest.test_who_has_waited_as_long_fails_too",
     "_Combined.__call__", "other.error = exc", "pass"),
    ("a stopping worker begins a job", "WorkerLimitsTest.test_stopped_while_it_gets",
     "Worker._work", "self._released(job) if self._stopping else ", ""),
    ("what is settled is renewed", "WorkerLeaseTest.test_only_running_jobs_are_renewed",
     "_settle_and_take", "self._running.pop(outcome.job.token, None)", "pass"),
    ("renewed just before the end",
     "WorkerLeaseTest.test_a_lease_is_renewed_after_a_third_of_it",
     "Worker._renew", "length / 3", "length * 0.9"),
    ("the loop of coroutines stays open",
     "WorkerAsyncTest.test_every_form_of_async_handler",
     "_stop_loop", "loop.close()", "pass"),
    ("stop() does nothing",
     "WorkerSignalTest.test_stop_may_be_called_by_a_signal_handler",
     "Worker.stop", "self._stopping = True", "pass"),
    ("a signal after stop() is the first",
     "WorkerSignalTest.test_a_signal_some_time_after_stop_is_the_second",
     "Worker._counting_signals", "2 if again else 1", "1"),
    ("a second signal gives nothing back",
     "WorkerSignalTest.test_a_second_signal_gives_the_job_back",
     "Worker._watch", "self._settle(self._released(job))", "pass"),
    ("a burst of signals is two", "WorkerSignalTest.test_a_burst_is_one_signal",
     "Worker._counting_signals", "if now - last.get(signum, -math.inf) > _BURST:",
     "if True:"),
    # files: parts, order, ages, and what is open
    ("a compaction reads all at once",
     "CompactionTest.test_it_reads_and_writes_a_part_at_a_time",
     "_adjacent",
     "upto = bisect.bisect_left(places, places[first] + _MIB, first + 1, last)",
     "upto = last"),
    ("files: expired leases come in another order",
     "ModelTest.test_random_histories_agree_with_a_model",
     "_FileEngine._expired", "sorted(over)", "over"),
    ("files: the wall clock ends a living holder's lease",
     "HolderTest.test_a_live_holder_keeps_its_job_however_the_wall_clock_jumps",
     "over", "clock - self.clock if alive else now", "now"),
    ("files: a lease never runs out", "LifeTest.test_an_expired_lease_is_taken_over",
     "over", "age >= self.length or ", ""),
    ("files: purge by age ignores the last delivery",
     "LifeTest.test_purge_by_state_and_age",
     "_FileEngine._view", "max(job.created_at, job.leased_at or 0.0)",
     "job.created_at"),
    ("files: the oldest was never delayed",
     "DelayTest.test_oldest_is_the_job_that_has_been_due_longest",
     "_FileEngine._oldest", "list(self._index.due.values())", "[]"),
    ("files: close leaves them open", "CloseTest.test_close_leaves_nothing_open",
     "_FileEngine.close", "self._store.reset()", "pass"),
    ("files: close keeps the proof of life",
     "CloseTest.test_leases_out_are_deliverable_at_once",
     "_FileEngine.close", "self._holder.file.close()", "pass"),
    # databases: what is acknowledged was committed durably (I5)
    ("databases: a put is not synced",
     "DurableVerbsTest*.test_each_verb_is_on_disk_when_it_returns",
     "_SqlEngine.put", "make=True", "make=True, lazy=True"),
    ("databases: a put_many is not synced",
     "DurableVerbsTest*.test_each_verb_is_on_disk_when_it_returns",
     "_SqlEngine.put", "make=True", "make=True, lazy=len(new) > 1"),
    ("databases: a change is not synced",
     "DurableVerbsTest*.test_each_verb_is_on_disk_when_it_returns",
     "_SqlEngine.change", "block=len(changes) > 1",
     "lazy=len(changes) == 1, block=len(changes) > 1"),
    ("databases: many changes are not synced",
     "DurableVerbsTest*.test_each_verb_is_on_disk_when_it_returns",
     "_SqlEngine.change", "block=len(changes) > 1",
     "lazy=len(changes) > 1, block=len(changes) > 1"),
    ("SQLite: a settlement beside a take is not synced",
     "DurableVerbsTestSqlite.test_a_worker_s_settlements_are_on_disk",
     "_SqliteEngine.take", "lazy=not changes", "lazy=True"),
    ("PostgreSQL: a settlement beside a take is not synced",
     "DurableVerbsTestPostgres.test_a_worker_s_settlements_are_on_disk",
     "_PostgresEngine.take", "lazy=not changes", "lazy=True"),
    ("SQLite: leases are synced",
     "DurableVerbsTestSqlite.test_each_verb_is_on_disk_when_it_returns",
     "_SqliteEngine.take", "lazy=not changes", "lazy=False"),
    ("PostgreSQL: leases are synced",
     "DurableVerbsTestPostgres.test_each_verb_is_on_disk_when_it_returns",
     "_PG_TAKE", "TELL, LAZY", "TELL, NULL"),
    ("databases: renewals are synced",
     "DurableVerbsTest*.test_each_verb_is_on_disk_when_it_returns",
     "_SqlEngine.renew", "lazy=held", "lazy=False"),
    ("databases: what a move holds is not synced",
     "DurableVerbsTest*.test_both_sides_of_a_move_are_on_disk",
     "_SqlEngine.renew", "lazy=held", "lazy=True"),
    ("SQLite: what is not synced may not even open",
     "DurableVerbsTestSqlite.test_each_verb_is_on_disk_when_it_returns",
     "_SqliteEngine._begin", '"NORMAL"', '"OFF"'),
    ("SQLite: fsync=False has no effect",
     "DurableVerbsTestSqlite.test_each_verb_is_on_disk_when_it_returns",
     "_SqliteEngine._begin", "self._fsync and ", ""),
    ("PostgreSQL: fsync=False has no effect",
     "DurableVerbsTestPostgres.test_each_verb_is_on_disk_when_it_returns",
     "_PostgresEngine._common", " or not self._fsync", ""),
    ("SQLite: synced as the last call was",
     "DurableVerbsTestSqlite.test_each_verb_is_on_disk_when_it_returns",
     "_SqliteEngine._begin", "if write and link.synchronous != level:",
     "if write and not link.synchronous:"),
    ("SQLite: a log that syncs nothing",
     "SqliteTest.test_an_answer_that_rests_on_an_unsynced_row_is_synced",
     "_SqliteEngine._prepared",
     'mode = link.execute("PRAGMA journal_mode = WAL").fetchone()[0]',
     'mode = "wal"'),
    ("SQLite: a caller's commit as the queue's",
     "DurableVerbsTestSqlite.test_what_joins_a_transaction_is_as_durable_as_that",
     "_SqliteEngine._joined", "self._check_joins(link)",
     "self._check_joins(link)\n"
     "            self._fsync or link.execute('PRAGMA synchronous = NORMAL', {})"),
    ("PostgreSQL: a caller's commit as the queue's",
     "DurableVerbsTestPostgres.test_what_joins_a_transaction_is_as_durable_as_that",
     "_PostgresEngine._common", "not link.guest and (link.lazy or not self._fsync)",
     "link.lazy or not self._fsync"),
    ("databases: answers are not synced",
     "SqliteTest.test_an_answer_that_rests_on_an_unsynced_row_is_synced"
     " PostgresTest.test_an_answer_that_rests_on_an_unsynced_row_is_synced",
     "_SqlEngine.put", "self._run(self._do, _SQL_TOUCH)", "pass"),
    # all or nothing, in a transaction of ours or of the caller's
    ("SQLite: half a put_many stays",
     "PutManyTestSqlite.test_one_living_id_refuses_all",
     "_SqliteEngine._roll_back", '"ROLLBACK"', '"COMMIT"'),
    ("PostgreSQL: half a put_many stays",
     "PutManyTestPostgres.test_one_living_id_refuses_all",
     "_PostgresEngine._begin", "if block:", "if False:"),
    ("databases: a join commits",
     "JoinTest*.test_put_is_there_when_the_caller_commits",
     "_SqlEngine._join", 'link.execute("RELEASE SAVEPOINT tiny_queue")',
     "connection.commit()"),
    ("databases: half a call stays in the caller's transaction",
     "JoinTest*.test_a_duplicate_leaves_the_transaction_as_it_was",
     "_SqlEngine._undo", "link.execute(link.undo)", "pass"),
    # ids, and the token is the fence (I6)
    ("databases: no token check",
     "LifeTest*.test_only_a_lease_is_settled_or_renewed",
     "_SQL_FENCES", '" AND token = :fence"', '""'),
    ("databases: no rev check",
     "HolderTest*.test_a_lease_renewed_while_the_backoff_is_asked_stays",
     "_SQL_FENCES", '" AND rev = UNLOCKED"', '""'),
    ("databases: a change keeps the rev",
     "LifeTest*.test_purge_leaves_what_changes_meanwhile",
     "_SQL_CHANGE", "rev = rev + 1", "rev = rev"),
    ("databases: a lease keeps the rev",
     "HolderTest*.test_a_lease_renewed_while_the_backoff_is_asked_stays",
     "_SQL_LEASE", "rev = rev + 1", "rev = rev"),
    ("databases: what is not inflight keeps its token",
     "LifeTest*.test_only_a_lease_is_settled_or_renewed",
     "_SQL_CHANGE", "token = NULL\n", "token = token\n"),
    ("SQLite: a living id is no error",
     "IdsTestSqlite.test_an_id_is_taken_until_success",
     "_SqliteEngine._insert",
     "if not execute(sql, row).rowcount:\n                break",
     "execute(sql, row)"),
    ("PostgreSQL: a living id is put again",
     "IdsTestPostgres.test_an_id_is_taken_until_success",
     "_PG_PUT", "DO NOTHING", "DO UPDATE SET payload = excluded.payload"),
    ("databases: exist_ok is an error",
     "IdsTest*.test_exist_ok_returns_the_job_that_is_there",
     "_SqlEngine.put", "if exist_ok:", "if False:"),
    ("SQLite: a delivery is not counted",
     "LifeTestSqlite.test_reap_counts_only_what_is_stale",
     "_SqliteEngine._lease", "keys.update(attempts=attempts + 1",
     "keys.update(attempts=attempts"),
    ("PostgreSQL: a delivery is not counted",
     "LifeTestPostgres.test_release_does_not_count",
     "_PG_TAKE", "attempts = attempts + 1", "attempts = attempts"),
    ("databases: text is not kept as it is",
     "PayloadsTest*.test_any_id_comes_back_as_it_was",
     "_from_column", r'if "\\" in text', "if False"),
    ("SQLite: a lease leaves its job where it was",
     "OrderTestSqlite.test_get_many_takes_up_to_n_in_order",
     "_SqliteEngine._lease", "self._sql(_sql_change(state",
     "self._sql(_sql_change('dead'"),
    ("PostgreSQL: what is inflight is leased again",
     "OrderTestPostgres.test_get_many_takes_up_to_n_in_order",
     "_PG_TAKE", "state = 'ready' AND priority", "state <> 'dead' AND priority"),
    # answers of the server that were lost
    ("PostgreSQL: a take whose answer was lost takes again",
     "PostgresLostTest.test_a_take_whose_answer_is_lost",
     "_PostgresEngine._take", "if link.doubt:  # an earlier",
     "if False:  # an earlier"),
    ("PostgreSQL: a put whose answer was lost is repeated",
     "PostgresLostTest.test_a_put_whose_answer_is_lost",
     "_SqlEngine._run", "(lost and not again)", "False"),
    ("PostgreSQL: an unknown outcome is none",
     "PostgresLostTest.test_a_put_whose_answer_is_lost",
     "_SqlEngine._run", "self._in_doubt(error) if doubt else error", "error"),
    # order, ages, the end of leases
    ("databases: a retried job keeps its place",
     "OrderTest*.test_order_is_that_of_the_file_after_reopening",
     "_SQL_CHANGE", "place = NEXT, ", ""),
    ("SQLite: a delayed job is due at once", "DelayTestSqlite.test_delay_and_at",
     "_SqliteEngine._insert", '"delayed" if run_at else "ready"', '"ready"'),
    ("PostgreSQL: a delayed job is due at once", "DelayTestPostgres.test_delay_and_at",
     "_PG_PUT", "WHEN due > NOW THEN 'delayed' ELSE", "ELSE"),
    ("SQLite: the wall clock ends a living holder's lease",
     "HolderTestSqlite.test_a_live_holder_keeps_its_job_however_the_wall_clock_jumps",
     "_SQL_EXPIRED", "ELSE CLOCK - clock END", "ELSE NOW - renewed_at END"),
    ("SQLite: priorities do not matter", "OrderTestSqlite.test_higher_priority_first",
     "_SQLITE_HEADS", "priority DESC, place", "place"),
    ("PostgreSQL: priorities do not matter",
     "OrderTestPostgres.test_higher_priority_first",
     "_PG_TAKE", "priority DESC, place LIMIT COUNT", "place LIMIT COUNT"),
    ("SQLite: a lower priority may go before a dead holder's job",
     "HolderTestSqlite.test_dead_holders_jobs_come_by_priority",
     "_SQLITE_HEADS", " AND priority > :above", ""),
    ("PostgreSQL: a lower priority may go before a dead holder's job",
     "HolderTestPostgres.test_dead_holders_jobs_come_by_priority",
     "_PG_TAKE", " AND priority > :above", ""),
    ("databases: expired leases come in any order",
     "LifeTest*.test_expired_leases_come_back_in_their_order",
     "_SQL_EXPIRED", "ORDER BY renewed_at, place", "ORDER BY place"),
    ("databases: everybody lives",
     "HolderTest*.test_a_killed_holder_s_job_is_back_at_the_next_get",
     "_SQL_EXPIRED", "owner <> 0 AND owner NOT IN (LIVING)", "owner < 0"),
    ("databases: nobody lives",
     "HolderTest*.test_a_stopped_holder_loses_the_lease_at_its_deadline",
     "_SQL_EXPIRED", "owner <> 0 AND owner NOT IN (LIVING)", "owner <> 0"),
    ("databases: a lease never runs out",
     "LifeTest*.test_an_expired_lease_is_taken_over",
     "_SQL_EXPIRED", "age >= lasts OR ", ""),
    ("databases: what was not renewed is not reaped",
     "LifeTest*.test_reap_counts_only_what_is_stale",
     "_SQL_EXPIRED", "age >= :older_than", "age < 0"),
    ("SQLite: another's life is not looked at",
     "HolderTestSqlite.test_a_stopped_holder_loses_the_lease_at_its_deadline",
     "_SqliteEngine._expired", "if self._lock.holds(owner)", "if False"),
    ("SQLite: a lease without a proof of life",
     "HolderTestSqlite.test_a_killed_holder_s_job_is_back_at_the_next_get",
     "_SqliteEngine._lease", "holder.number if holder else 0", "0"),
    ("PostgreSQL: a lease without a proof of life",
     "HolderTestPostgres.test_a_killed_holder_s_job_is_back_at_the_next_get",
     "_PostgresEngine.take", "session.number if session else 0", "0"),
    ("databases: purge by age ignores the last delivery",
     "LifeTest*.test_purge_by_state_and_age",
     "_SQL_RECORDS", "GREATEST(created_at, coalesce(leased_at, 0))", "created_at"),
    ("databases: purge has no end",
     "LifeTest*.test_purge_leaves_what_is_put_meanwhile",
     "_SQL_RECORDS", " AND place <= :last", ""),
    ("databases: the oldest was put first",
     "DelayTest*.test_oldest_is_the_job_that_has_been_due_longest",
     "_SQL_COUNTS", "min(GREATEST(created_at, run_at))", "min(created_at)"),
    ("SQLite: a closed queue works", "CloseTestSqlite.test_with_closes",
     "_SqliteEngine.close", "self._closed = True", "pass"),
    ("PostgreSQL: a closed queue works", "CloseTestPostgres.test_with_closes",
     "_PostgresEngine.close", "self._closed = True", "pass"),
    ("SQLite: close leaves a connection open",
     "CloseTestSqlite.test_close_leaves_nothing_open",
     "_SqliteEngine.close", "self._disconnect()", "pass"),
    ("PostgreSQL: close leaves connections open",
     "CloseTestPostgres.test_close_leaves_nothing_open",
     "_PostgresEngine.close", "while self._free:", "while False:"),
    ("PostgreSQL: close leaves a session open",
     "CloseTestPostgres.test_close_leaves_nothing_open",
     "_PostgresEngine.close", "self._session.close()", "pass"),
    ("PostgreSQL: a new session answers for all that the old one had",
     "PostgresFaultTest.test_a_lost_session_keeps_what_still_runs_only",
     "_PG_RENAME", " AND token = ANY(:tokens::text[])", ""),
    ("SQLite: a child keeps its parent's connection",
     "SqliteTest.test_a_child_s_commits_outlive_its_parent_s_connection",
     "_SqliteEngine.before_fork", "self._disconnect()", "pass"),
    # a move
    ("a move removes other jobs of the same id",
     "MoveTest.test_an_id_that_the_target_has_stays",
     "_is_copy", "found.created_at, found.payload) == (job.created_at, job.payload",
     ") == ("),
    # the processes of `work`
    ("the pause before a restart grows without bound",
     "SupervisorTest.test_when_a_successor_starts",
     "_Supervisor._pause", "min(worker.pause * 2 or 0.1, self._LONGEST_PAUSE)",
     "worker.pause * 2 or 0.1"),
    ("the pause before a restart does not grow",
     "SupervisorTest.test_when_a_successor_starts",
     "_Supervisor._pause", "worker.pause * 2 or 0.1", "0.1"),
    ("a worker that lived long is restarted late",
     "SupervisorTest.test_when_a_successor_starts",
     "_see_to_successor", " or lived >= self._GOOD_RUN", ""),
    ("a worker that ended a job is restarted late",
     "SupervisorTest.test_when_a_successor_starts",
     "_see_to_successor", " or ended", ""),
]]
# fmt: on

# All tests that have to do with what is weakened, the quick ones first.
CRASH_SUITE = (
    "DurabilityTest CompactionTest FailedSyncTest TailTest DamageTest ReplacedFilesTest"
    " ForeignFilesTest FullDiskTest PrimitivesTest LockTest HolderTest ThreadsTest"
    " ModesTest ReadOnlyTest DescriptorsTest ReentranceTest CloseTest IdsTest"
    " PutManyTest HandWrittenTest FormatTest LifeTest FoundByBreakingTest WindowsTest"
    " ProcessesTest NewDirectoryTests ProcessDeathTests PowerCutTests"
    " RandomScriptTests FailingSyncTests FailingCallTests NestedCrashTests ModelTest"
    " InterleavingTest WreckedFilesTest InterruptTest"
).split()


class Trial:
    """Runs tests on a source of the module, in a directory and a process of its
    own, up to the first that fails or hangs."""

    def __init__(self, what, source, tests):
        self.what, self.began = what, time.monotonic()
        self.folder = tempfile.mkdtemp()
        os.chmod(self.folder, 0o755)  # some tests become another user
        pathlib.Path(self.folder, "tiny_queue.py").write_text(source, "utf-8")
        os.symlink(os.path.abspath(__file__), f"{self.folder}/test_tiny_queue.py")
        names = [f"test_tiny_queue.{name}" for name in tests]
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unittest", "-f", "-v", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.output,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": self.folder, "TQ_MUTANTS": ""},
            start_new_session=True,
        )

    def end(self):
        """With all that its tests have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.survived = self.process.wait() == 0
        self.output.seek(0)
        said = self.output.read().decode("utf-8", "replace")
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        begun = re.findall(r"(\w+) \(test_tiny_queue\.(\w+)", said)
        self.last = ".".join(begun[-1][::-1]) if begun else ""  # what it came to
        took = f"{time.monotonic() - self.began:.1f} s"
        self.hung = "Timeout (" in said
        self.fate = f"{self.last}{', hung' * self.hung} ({took})"
        if self.survived or "_FailedTest" in said:
            self.fate = "SURVIVES" if self.survived else "IS NO PYTHON"
            self.survived = True


def try_out(trials):
    """Make and run trials, a few at once; yield each when it has ended."""
    waiting, running = list(trials)[::-1], []
    try:
        while waiting or running:
            while waiting and len(running) < JOBS:
                running.append(waiting.pop()())
            ended = [each for each in running if each.process.poll() is not None]
            for trial in ended:
                running.remove(trial)
                trial.end()
                yield trial
            time.sleep(0 if ended else 0.02)
    finally:
        for trial in running:
            trial.end()


def tests_of(name):
    suite = unittest.TestLoader().loadTestsFromName(name, sys.modules[__name__])
    tests = list(suite if isinstance(suite, unittest.TestSuite) else [suite])
    return [each for each in tests if type(each).__name__ != "_FailedTest"]


class MutantTableTest(Limited):
    """The table of mutants fits the module and leaves none of its syncs out."""

    WATCHED = frozenset(
        "_sync _sync_path _sync_ancestors _replace _unlink _try_lock _unlock"
        " os.fsync os.fdatasync os.replace os.unlink os.ftruncate"
        " fcntl.flock fcntl.fcntl".split()
    )
    source = pathlib.Path(tq.__file__).read_text("utf-8")

    def test_every_row_applies(self):
        """Each text stands once in its function, and each killer is a test."""
        for mutant in MUTANTS:
            with self.subTest(mutant.what):
                self.assertNotEqual(mutant.source(self.source), self.source)
                self.assertTrue(all(map(tests_of, mutant.each_killer())))
        self.assertEqual(len({mutant.what for mutant in MUTANTS}), len(MUTANTS))
        self.assertTrue(all(map(tests_of, CRASH_SUITE)))

    def test_the_readme_says_how_many(self):
        """The number of mutants that it gives is that of the table."""
        text = pathlib.Path(ROOT, "README.md").read_text("utf-8")
        said = re.findall(r"in (\d+)\s+ways.*?all\s+(\d+)\s+are\s+killed", text, re.S)
        self.assertEqual(said, [(str(len(MUTANTS)),) * 2])

    def test_every_sync_replace_and_cut_has_a_row(self):
        """No call that durability or exclusion rests on is without a mutant."""
        rows = [(mutant.place(self.source), len(mutant.old)) for mutant in MUTANTS]
        lines = [0, *(match.end() for match in re.finditer("\n", self.source))]
        [(first, last)] = places_of(self.source)["File engine"]
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in self.WATCHED:
                start = lines[node.lineno - 1] + node.col_offset
                end = lines[node.end_lineno - 1] + node.end_col_offset
                touched = [at for at, size in rows if start - size < at < end]
                self.assertTrue(
                    touched or not first < start < last,
                    self.source[start:end] + " has no row",
                )


@unittest.skipUnless(os.environ.get("TQ_MUTANTS"), "set TQ_MUTANTS=1: takes minutes")
@unittest.skipUnless(hasattr(fcntl, "F_OFD_SETLK"), "a part can be told on Linux only")
class MutantTests(Limited):
    """Tests of the tests: each weakened copy of the module must fail some of them."""

    limit = 0.0  # the tests that it runs have one

    def test_no_mutant_survives(self):
        """Remove one sync, check or order at a time."""
        began, source, trials = time.monotonic(), MutantTableTest.source, []
        mutants = MUTANTS[PART]
        left_out = [row.what for row in mutants if row.needs_postgres() and NO_POSTGRES]
        for trial in try_out(each for row in mutants for each in row.trials(source)):
            trials.append(trial)
            print(f"{trial.what}: {trial.fate}", file=sys.stderr, flush=True)
        survivors = {trial.what for trial in trials if trial.survived}
        print(
            f"\nMutantTests: {len(mutants)} mutants, {len(trials)} trials"
            f" ({sum(trial.hung for trial in trials)} ended by the time limit),"
            f" {len(survivors)} survivors, {len(left_out)} not tried on PostgreSQL"
            f" ({time.monotonic() - began:.1f} s)",
            file=sys.stderr,
        )
        self.assertEqual(survivors, set())
        if os.environ.get("TQ_REQUIRE_POSTGRES", "0") != "0":
            self.assertEqual(left_out, [], NO_POSTGRES)
        # The tests that failed pass on the module as it is.
        killers = sorted({trial.last for trial in trials})
        shares = [killers[i::JOBS] for i in range(min(JOBS, len(killers)))]
        for trial in try_out(lambda s=s: Trial("", source, s) for s in shares):
            self.assertTrue(trial.survived, trial.fate)


# Interrupts, damage, interleavings, histories
# =============================================================================


PATHS = [f"/q/default.{state}.jsonl" for state in STATES]
DAMAGED = "/q/default.damaged"


# The lines, read as DESIGN says and not as the module does
# -----------------------------------------------------------------------------

SEAL = re.compile(rb',"crc":"(\+?)([0-9a-f]{8})"\}\Z')


@functools.lru_cache(maxsize=100_000)
def parse(line):
    """The fields of a sound line (less its newline), {} of a blank, or None."""
    line = line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")
    if not line:
        return {}
    seal = SEAL.search(line)
    if seal and zlib.crc32(line[: seal.start()]) != int(seal[2], 16):
        return None
    try:
        fields = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(fields, dict) or ("crc" in fields and not seal):
        return None
    if not isinstance(fields.get("id"), str) or not fields["id"]:
        return None
    return fields if "done" in fields or "payload" in fields else None


def is_open(line):
    seal = SEAL.search(line)
    return bool(seal and seal[1])


def is_closed(line):
    return not is_open(line) and parse(line) is not None


def is_complete(before, last):
    """Whether the lines that a closing line counts stand before it."""
    fields = (SEAL.search(last) and parse(last)) or {}
    missing = (fields.get("lines") or 1) - 1
    counted = before[::-1][:missing]
    whole = not any(b"\0" in line or is_closed(line) for line in counted)
    return whole and len(counted) == missing


def settle_tail(data):
    """The lines of a file as it is first seen, and those to be cut off."""
    *lines, torn = data.split(b"\n")
    if torn:
        lines.append(torn)
        whole = is_closed(torn) and is_complete(lines[:-1], torn)
    else:
        last = lines[-1] if lines else b""
        whole = not is_open(last) and b"\0" not in last
        whole = whole and is_complete(lines[:-1], last)
    end = len(lines)
    if not whole:
        end -= 1
        while end and not is_closed(lines[end - 1]):
            end -= 1
    return lines[:end], lines[end:]


def reference(tree):
    """What the files say: {id: (state, attempts, payload)}, and all bad lines."""
    jobs, bad = read_files(*(tree.get(path, b"") for path in PATHS))
    return dict(jobs), bad


@functools.lru_cache(maxsize=4)
def read_files(*files):
    best, bad = {}, []
    for rank, data in enumerate(files):
        lines, cut = settle_tail(data)
        bad += [line for line in cut if line]
        for line in lines:
            fields = parse(line)
            if fields is None:
                bad.append(line)
            elif fields:
                id, done = fields["id"], "done" in fields
                order = (fields.get("rev", 1), 3 if done else rank)
                if id not in best or order > best[id][0]:
                    best[id] = order, fields
    jobs = {
        id: (STATES[rank], fields.get("attempts", 0), fields["payload"])
        for id, ((_, rank), fields) in best.items()
        if rank < 3
    }
    return jobs, bad


def build_tree(snapshots=None, tail=("b1", "b2")):
    """Files with every kind of line; snapshots gets the trees on the way."""
    disk, snapshots = (
        Disk.from_tree({"/q/": b""}),
        [] if snapshots is None else snapshots,
    )
    with fresh(disk) as guest:
        queue = guest.queue
        for id in ("rt", "de", "in", "ex"):
            queue.put({"k": id}, id=id, max_retries=0 if id == "de" else None)
        snapshots.append(disk.tree())
        rt, de, _, ex = queue.get_many(4)
        queue.task_done(rt, False, "e")
        snapshots.append(disk.tree())
        queue.task_done(de, False, "e")
        queue.extend(ex)
        queue.put_many([{"k": "m1"}, {"k": "m2"}], ids=["m1", "m2"])
        snapshots.append(disk.tree())
        queue.cancel("m1")
        queue.put({"k": "late"}, id="late", delay=1000, priority=3)
        if tail:
            queue.put_many([{"k": id} for id in tail], ids=tail)
    return disk.tree()


def first_get(queue):
    job = queue.get()
    if job:
        queue.task_done(job)
    return {job.id} if job else set()


# First operations on files as they were found.  Each returns the ids it changed.
OPENERS = [
    lambda queue: set(),
    lambda queue: queue.stats() and set(),
    lambda queue: {queue.put({"k": "new"}).id},
    lambda queue: {queue.put({"k": "new"}, id="new-one").id},
    first_get,
    lambda queue: queue.compact() or set(),
]


@functools.lru_cache(maxsize=1000)
def reopened(*data):
    """What a new process finds in sound files, of which it changes nothing."""
    tree = {"/q/default.lock": b"", **dict(zip(PATHS, data))}
    disk = Disk.from_tree(tree)
    with fresh(disk) as guest:
        census = guest.census()
    assert disk.tree() == tree
    return census


def check_tree(tree, first):
    """Open, use, reopen: what the files say is there, and damage is kept."""
    want, bad = reference(tree)
    disk = Disk.from_tree(tree)
    with fresh(disk) as guest:
        touched = first(guest.queue)
        seen = guest.census()
        stats = guest.queue.stats()
    for id in touched:
        want.pop(id, None)
        assert id not in seen or seen.pop(id)[2] == {"k": "new"}, id
    assert seen.keys() == want.keys(), (sorted(seen), sorted(want))
    for id, job in want.items():
        if first is not first_get or job[0] != "inflight":  # its holder is dead
            assert seen[id] == job, (id, seen[id], job)
    again = reopened(*(disk.tree().get(path, b"") for path in PATHS))
    again = {id: job for id, job in again.items() if id not in touched}
    assert again == seen, (again, seen)
    kept = disk.tree().get(DAMAGED, b"")
    lines = kept.count(b"\n") + (kept[-1:] not in (b"", b"\n"))
    assert stats.damaged == lines >= len(bad), (stats.damaged, bad)
    for line in bad:
        assert line in kept, line
    assert kept.startswith(tree.get(DAMAGED, b""))
    return {}


# Row 8: an exception at any line
# -----------------------------------------------------------------------------


class Interrupter:
    """Raises an exception at the n-th line that the module's code executes."""

    def __init__(self, filename, at, error):
        self.filename, self.left, self.error = filename, at, error
        self.where, self.lines = None, []

    def __call__(self, frame, event, arg):
        return self.line if frame.f_code.co_filename == self.filename else None

    def line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            self.lines.append(frame.f_lineno)
            if self.left == 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise self.error
        return self.line

    def run(self, call, *args):
        """Call; return whether it came to an end before its n-th line."""
        # In a generator, as CPython does not unwind the exception being handled
        # when a trace function raises on the last line of an except clause.
        alone = (call(*args) for _ in range(1))
        old = sys.gettrace()
        sys.settrace(self)
        try:
            next(alone)
        except type(self.error):
            return False
        finally:
            sys.settrace(old)
        return True


class InterrupterBesideWith(Interrupter):
    """Not on lines with `with`: Python itself may leave a lock taken there, when
    a trace function raises at its end; a signal's handler is not run there."""

    def line(self, frame, event, arg):
        code = linecache.getline(self.filename, frame.f_lineno)
        if code.lstrip().startswith("with "):
            return self.line
        return super().line(frame, event, arg)


class InterruptTest(CrashCase):
    """Ctrl-C and MemoryError at every line of every operation."""

    SCRIPTS = (
        "put", "put_id", "put_many", "get", "settle", "extend", "cancel", "requeue",
        "reap", "compact", "close", "two processes",
    )  # fmt: skip

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.addClassCleanup(COPIES.clear)  # a lock may be held in them for ever
        cls.swallowed = []  # interrupted finalizers: Python ignores those
        hook, sys.unraisablehook = sys.unraisablehook, cls.swallow
        cls.addClassCleanup(setattr, sys, "unraisablehook", hook)

    @classmethod
    def swallow(cls, args):
        cls.swallowed.append(args.exc_type)

    def interrupted(self, name, at, error):
        """The world of a script that was interrupted at its n-th line, and where."""
        before, _, after = SCRIPTS[name].rpartition("|")
        world, trace = World().run(f"{before} |"), Interrupter(tq.__file__, at, error)
        while len(COPIES) < 2:  # so that no module is loaded meanwhile
            COPIES.append(load_copy())
        for statement in map(str.strip, after.split(";")):
            if not trace.run(world.call, statement):
                break
        trace.error = error = None  # with all that its frames hold
        return world, trace, statement

    def cases(self):
        """Each line when it is first run; with TQ_DEEP=1 whenever it is."""
        seen = set()
        for name in self.SCRIPTS:
            world, trace, _ = self.interrupted(name, -1, KeyboardInterrupt())
            world.end()
            both = KeyboardInterrupt, MemoryError
            for at, line in enumerate(trace.lines, 1):
                if DEEP or line not in seen:
                    for error in both if DEEP else [both[at % 4 == 1]]:
                        yield name, at, error
                seen.add(line)

    def check(self, case):
        name, at, error = case
        self.swallowed.clear()
        world, trace, statement = self.interrupted(name, at, error())
        try:
            if not self.swallowed:
                self.examine(world, world.guest(statement[0]))
        except Exception as exc:
            what = f"{name}: interrupted in {trace.where} of {statement}: {exc!r}"
            raise AssertionError(what) from exc
        finally:
            world.end()
        return {"ignored in a finalizer" if self.swallowed else "interrupted lines": 1}

    def examine(self, world, guest):
        """The locks are free, all views agree, nothing is half done or leaks."""
        allowed = world.history.allowed()
        with fresh(world.host) as later:  # at once: no lock may be held
            self.compare(by_key(later.census()), allowed, world.history)
        if world.closed(guest):
            guest.queue.close()
            guest.open()
        self.compare(by_key(guest.census()), allowed, world.history)
        queue, other = guest.queue, guest.open()
        queue.put(payload_of("z8"))
        other.put(payload_of("z9"), id="z9")
        live = {job.id: (job.state, job.attempts, job.payload) for job in queue.jobs()}
        assert live == guest.census(), "two objects see two queues"
        with fresh(world.host) as later:
            assert live == later.census(), "another process sees another queue"
        due = {job.id for job in queue.jobs("pending") if not job.run_at}
        lost = due - {job.id for job in queue.get_many(99)}
        assert not lost, f"{lost} are pending, and not to be had"
        assert not [path for path in world.host.tree() if path.endswith(".tmp")]
        queue.close()
        other.close()
        guest.queue = queue = other = None
        world.leases, world.ever = {}, []  # a job keeps its holder's proof of life
        if guest.handles:
            gc.collect()
        left = [handle.path for handle in guest.handles.values()]
        assert not left, f"{left} left open"

    def test_an_exception_at_any_line_leaves_a_working_queue(self):
        """Whatever line it hits: the locks are free, the index is right, nothing
        is lost, half done or leaked."""
        self.share(self.check, self.cases())


# Row 9: every bit flipped
# -----------------------------------------------------------------------------


class BitFlipTest(FaultCase):
    def flips(self):
        trees = [build_tree()]
        if DEEP:
            trees.append({**build_tree(tail=()), DAMAGED: b"junk\nmore \0junk\n"})
        firsts = itertools.cycle(OPENERS)
        for tree in trees:
            for path in sorted(tree):
                places = itertools.product(range(len(tree[path])), range(8))
                for (place, bit), first in zip(places, firsts):
                    yield tree, path, place, bit, first

    def check(self, case):
        tree, path, place, bit, first = case
        data = bytearray(tree[path])
        data[place] ^= 1 << bit
        flipped = {**tree, path: bytes(data)}
        check_tree(flipped, first)
        seen, sound = reference(flipped)[0], reference(tree)[0]
        lost = {id for id in sound if seen.get(id) != sound[id]}
        assert len(lost) <= self.price(tree[path], place, data[place]), lost
        return {"flips": 1, "flips that a job paid for": bool(lost)}

    def price(self, data, place, now):
        """How many jobs a flip may cost: one, two where it joins two lines, and
        its write's where it makes the last line torn or a hole."""
        in_last = data.count(b"\n", place) <= 1
        in_batch = b'"lines":' in data[place:] or in_last
        if in_batch and (in_last or now == 0):
            return 2
        return 2 if data[place : place + 1] == b"\n" else 1

    def test_any_flipped_bit_costs_at_most_its_line(self):
        """One flipped bit: the queue opens twice alike, invents and alters
        nothing, loses at most its line's job, and keeps the damaged bytes."""
        self.share(self.check, thinned(self.flips(), 11))  # odd: each bit has its turn


# Row 10: junk, truncation, files missing, stale, swapped
# -----------------------------------------------------------------------------

JUNK = {
    "a NUL": b"\0",
    "a page of NULs": b"\0" * 512,
    "NULs and a newline": b"\0" * 90 + b"\n",
    "garbage": bytes(range(128, 256)),
    "a line of garbage": bytes(range(128, 256)) + b"\n",
    "half a record": b'{"id":"half","rev":1,"att',
    "half a record ended": b'{"id":"half","rev":1,"att\n',
    "a blank line": b" \r\n",
    "a newline": b"\n",
    "other JSON": b'[1,2]\n"x"\nnull\n{}\n',
    "a foreign line": b'{"id":"foreign","payload":{"k":"foreign"}}\n',
    "a foreign line unended": b'{"id":"foreign","payload":{"k":"foreign"}}',
    "a foreign copy": b'{"id":"m2","payload":{"k":"m2"}}\n',
    "a byte order mark": b"\xef\xbb\xbf",
    "UTF-16": '{"id":"u","payload":1}\n'.encode("utf-16"),
}


def boundaries(data):
    return [0, *(match.end() for match in re.finditer(b"\n", data))]


class WreckedFilesTest(FaultCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.snapshots = []
        cls.tree = build_tree(cls.snapshots)
        cls.rng, cls.turn = random.Random(SEED), itertools.count()

    def data(self):
        return [(path, self.tree[path]) for path in PATHS]

    def wreck(self, what, trees):
        """Check each tree, with the first operations in turn (all, if deep)."""
        trees = list(trees)
        every = DEEP and len(trees) < 10_000
        cases = [
            (tree, first)
            for tree in trees
            for first in (
                OPENERS if every else [OPENERS[next(self.turn) % len(OPENERS)]]
            )
        ]
        self.share(lambda case: {what: 1, **check_tree(*case)}, cases)

    def test_junk_at_every_record_boundary(self):
        """NULs, garbage, half and foreign lines between records cost no more
        than the line that they are glued to."""
        self.wreck("insertions", (
            {**self.tree, path: data[:at] + junk + data[at:]}
            for path, data in self.data()
            for at in boundaries(data)
            for junk in JUNK.values()
        ))  # fmt: skip

    def test_each_record_overwritten(self):
        """A record turned to NULs or garbage costs that record."""
        self.wreck("overwritten records", (
            {**self.tree, path: data[:start] + byte * (end - start) + data[end:]}
            for path, data in self.data()
            for start, end in itertools.combinations(boundaries(data), 2)
            for byte in (b"\0", b"\xa5", b"}")
        ))  # fmt: skip

    def test_each_file_truncated_at_every_byte(self):
        """A file may end anywhere: what is whole in it counts."""
        self.wreck("truncations", (
            {**self.tree, path: data[:size]}
            for path, data in self.tree.items()
            for size in thinned(range(len(data)), 3)
        ))  # fmt: skip

    def test_two_files_truncated(self):
        """Two files may end anywhere, each for itself."""
        pairs = []
        for _ in range(20_000 if DEEP else 1000):
            tree = dict(self.tree)
            for path in self.rng.sample(PATHS, 2):
                tree[path] = tree[path][: self.rng.randrange(len(tree[path]))]
            pairs.append(tree)
        self.wreck("pairs of truncations", pairs)

    def test_files_missing_or_stale(self):
        """Any file may be gone or an older copy, together with any other."""
        versions = [{}, *self.snapshots, self.tree]
        self.wreck("missing or stale sets", (
            {lock: b"", **{p: old[p] for p, old in zip(PATHS, chosen) if p in old}}
            for chosen in itertools.product(versions, repeat=len(PATHS))
            for lock in ("/q/", "/q/default.lock")
        ))  # fmt: skip

    def test_files_swapped(self):
        """Files under each other's names still hold their records."""
        everything = [*self.tree.values(), b"x" * 300]
        self.wreck("permutations", (
            {"/q/default.lock": b"", **dict(zip(PATHS, contents))}
            for contents in itertools.permutations(everything, len(PATHS))
        ))  # fmt: skip

    def test_directories_in_the_files_places(self):
        """A directory where a file should be is a clear error, without harm."""
        for path in [*PATHS, "/q/default.lock"]:
            tree = {p: data for p, data in self.tree.items() if p != path}
            disk = Disk.from_tree({**tree, path + "/": b""})
            with fresh(disk) as guest:
                for call in (guest.queue.stats, guest.queue.get, guest.queue.compact):
                    with self.assertRaisesRegex(guest.tq.QueueError, path):
                        call()
            kept = {p: data for p, data in disk.tree().items() if p in PATHS}
            self.assertEqual(kept, {p: tree[p] for p in PATHS if p in tree})
            self.counts["directories"] += 1


# Row 11: interleavings
# -----------------------------------------------------------------------------

FOREVER = 1 << 30


class Event:
    """One call of a player: which jobs it was about, and when it ran."""

    def __init__(self, player, verb, keys, start):
        self.player, self.verb, self.keys, self.start = player, verb, keys, start
        self.end, self.said, self.jobs = math.inf, None, []


class Verdict:
    """What calls of several processes, at once, allow; lost, unexpected,
    duplicated and so on as in Jepsen's total-queue."""

    PUTS, REMOVALS = ("put", "many", "exist"), ("done", "cancel")

    def __init__(self, events, before=()):
        self.of = collections.defaultdict(list)
        self.history, self.before = History(), before
        for key in before:
            self.history.steps[key].append(Step(-1, -1, ("there", 0)))
        for event in events:
            for key in event.keys:
                self.of[key].append(event)
                if event.verb in (*self.PUTS, *self.REMOVALS):
                    # said: what it returned; None if it did not
                    sure, made = event.said is True, event.verb in self.PUTS
                    if sure or event.said is None:
                        state = ("there", 0) if made else None
                        step = Step(event.start, event.end, state, sure)
                        self.history.steps[key].append(step)

    def check(self, left):
        """P1 to P3: what was put is there once, until it is removed."""
        extra = {key for key, count in left.items() if count > 1}
        assert not extra, f"{extra} there twice"
        unexpected = {*left, *self.of} - self.history.steps.keys()
        assert not unexpected, f"unexpected: {unexpected}"
        for key, events in self.of.items():
            state = ("there", 0) if left[key] else None
            what = "came back" if state else "is lost"
            assert state in self.history.left(key), f"{key} {what}"
            puts = [e for e in events if e.verb in self.PUTS]
            dones = [e for e in events if e.verb == "done" and e.said is True]
            times = sum(e.said is True or e.end == math.inf for e in puts)
            assert len(dones) <= times + (key in self.before), f"{key} was done twice"
            for got in (e for e in events if e.verb == "get"):
                for done in dones:
                    again = [e for e in puts if e.end > done.start]
                    assert got.start < done.end or again, f"{key} after its success"
        return self

    def counts(self, left):
        got = {k: sum(e.verb == "get" for e in es) for k, es in self.of.items()}
        said = [e for es in self.of.values() for e in es if e.said is True]
        puts = {key for e in said if e.verb in self.PUTS for key in e.keys}
        return {
            "puts": len(puts), "done": sum(e.verb == "done" for e in said),
            "lost": 0, "unexpected": 0, "duplicated": sum(n > 1 for n in got.values()),
            "recovered": len({k for k in self.of if got[k] or left[k]} - puts),
        }  # fmt: skip


class Player:
    """A process with a script, in a thread that runs when it has the baton."""

    def __init__(self, stage, script):
        self.stage, self.script, self.held = stage, script, []
        self.baton = threading.Lock()
        self.baton.acquire()
        self.over = self.killed = self.closed = False
        clock = stage.disk.clock
        sleep = functools.partial(stage.wait, self)
        own = Patched(clock, sleep=sleep)
        self.guest = Guest(stage.disk, clock=own, lock_timeout=5.0)
        self.guest.hook = functools.partial(stage.hook, self)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        self.baton.acquire()
        try:
            for step in self.script:
                self.step(*step.split())
        except Died:
            self.killed = True
        except BaseException:
            self.stage.errors.append(traceback.format_exc(limit=-3))
        finally:
            self.stage.finish(self)

    def step(self, verb, *args):
        options = {"id": args[0]} if verb == "put" and args[1:] else {}
        options = {"id": args[0]} if verb == "exist" else options
        args = args[:1] if options else args
        keys = args if verb in (*Verdict.PUTS, "cancel") else ()
        if verb in OF_LEASES:
            if not self.held:
                return
            args = (self.held[0] if verb == "extend" else self.held.pop(0),)
            keys = (args[0].payload["k"],)
        self.closed = self.closed or verb == "close"
        event = self.stage.note(self, verb, keys)
        try:
            done = VERBS[verb](self.guest.queue, *args, **options)
            event.said = done is not False
        except (self.guest.tq.DuplicateJobError, self.guest.tq.LeaseLostError) as exc:
            event.said = exc
        event.end = self.stage.tick()
        if verb == "get" and done:
            self.held += done
            self.stage.delivered(event, *done)


class Stage:
    """Runs players by a plan of (player, calls, killed after them).

    A player that waits for the lock lets its holder run up to the unlocking.
    """

    def __init__(self, tree, scripts, plan):
        self.disk = Disk.from_tree(tree)
        self.disk.watch = EVERY_CALL
        self.events, self.errors, self.leased = [], [], {}
        self.ticks = itertools.count()
        self.players = [Player(self, script.split(";")) for script in scripts]
        self.calls = [0] * len(self.players)
        self.plan = [(self.players[who], *rest) for who, *rest in plan]
        self.running = self.waiter = self.holder = None
        self.all_over = threading.Lock()
        self.all_over.acquire()
        # With these a valid lease may be lost.
        self.harsh = any({"reap 0", "cancel a"} & {*p.script} for p in self.players)

    def play(self):
        for player in self.players:
            player.thread.start()
        self.next_segment()
        self.give(self.owner)
        if not self.all_over.acquire(timeout=60):
            raise AssertionError("the players wait for each other")
        for player in self.players:
            player.thread.join()
        return self

    def next_segment(self):
        while self.plan:
            self.owner, self.left, self.kills = self.plan.pop(0)
            if not self.owner.over:
                return
        self.left, self.kills = FOREVER, False
        self.owner = next((p for p in self.players if not p.over), None)

    def give(self, player):
        self.running = player
        player.baton.release()

    def switch(self, me, player):
        if player is not me:
            self.give(player)
            me.baton.acquire()

    def hook(self, me, name, when, args):
        if self.running is not me:
            return  # the garbage collector, closing in the wrong thread
        if isinstance(args[0], int) and args[0] not in me.guest.handles:
            return  # it closes what an earlier user of that copy of the module had
        if when == "before":
            while self.owner is me and not self.left:
                if self.kills:
                    raise Died("as planned")
                self.next_segment()
                self.switch(me, self.owner)
            self.calls[self.players.index(me)] += 1
            if self.owner is me:
                self.left -= 1
        elif name == "flock" and args[1] & fcntl.LOCK_UN:
            self.holder = None
            self.wake(me)
        elif name == "flock":
            self.holder = me

    def wake(self, me):
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self.switch(me, waiter)

    def wait(self, me, seconds):
        self.disk.clock.sleep(seconds)
        if self.holder not in (None, me):
            self.waiter = me
            self.switch(me, self.holder)

    def finish(self, me):
        me.over = True
        if self.holder is me:
            self.holder = None
        if me.killed or me.closed:
            self.forget(me)
        waiter, self.waiter = self.waiter, None
        if waiter is None and self.owner.over:
            self.next_segment()
        after = waiter or self.owner
        if after is None:
            self.all_over.release()
        else:
            self.give(after)

    # What happened

    def tick(self):
        return next(self.ticks)

    def note(self, player, verb, keys):
        event = Event(player, verb, keys, self.tick())
        self.events.append(event)
        if verb in ("done", "fail", "release", "bury", "cancel"):
            self.leased.pop(keys[0], None)
        elif verb == "reap" and self.harsh:
            self.leased.clear()
        elif verb == "close":
            player.held.clear()
            self.forget(player)
        return event

    def forget(self, player):
        """Its leases end."""
        self.leased = {k: p for k, p in self.leased.items() if p is not player}

    def delivered(self, event, job):
        event.jobs, event.keys = [job], (job.payload["k"],)
        if event.keys[0] in self.leased and not self.harsh:
            self.errors.append(f"{event.keys} is leased to two live processes")
        self.leased[event.keys[0]] = event.player

    def judge(self, before):
        """All see one queue, in which everything is that must be."""
        assert not self.errors, self.errors
        alive = [p for p in self.players if not p.killed and not p.closed]
        with fresh(self.disk) as guest:
            census = guest.census()
            for player in alive:
                seen = player.guest.census()
                assert seen == census, "two processes see two queues"
            left = collections.Counter(job[2]["k"] for job in census.values())
            Verdict(self.events, before).check(left)
            self.fenced(guest)
        with fresh(self.disk) as guest:  # the leases of others end at once; no more
            guest.queue.reap_stale()
            kept = {job.token for job in guest.queue.jobs("inflight")}
            assert kept <= {job.token for p in alive for job in p.held}, "not reaped"

    def fenced(self, guest):
        """P4: tokens are unique, and a stale one changes nothing and raises."""
        got = [job for event in self.events for job in event.jobs]
        assert len({job.token for job in got}) == len(got), "a token was given twice"
        if not self.harsh and not any(p.killed for p in self.players):
            for event in self.events:
                lost = isinstance(event.said, event.player.guest.tq.LeaseLostError)
                assert not lost, "a valid lease was lost"
        before = guest.census()
        current = {job.token for job in guest.queue.jobs("inflight")}
        for job in got:
            if job.token not in current:
                try:
                    guest.queue.task_done(copied_job(guest.tq, job))
                except guest.tq.LeaseLostError:
                    continue
                raise AssertionError("a stale token settled")
        assert guest.census() == before


# What went before, and the scripts of two or three processes.
PLAYS = [
    ("", "put a", "put b"),
    ("", "put a id", "put a id;get"),
    ("put a", "get;done", "get;done"),
    ("put a;put b", "get;fail;get;done", "get;done"),
    ("put a", "get;extend;done", "reap;get;done"),
    ("put a", "get;extend;done", "reap 0;get;done"),
    ("put a;put b;get", "get;done", "get;done;close"),
    ("put a;put b;get;done", "compact", "put c;get;done"),
    ("put a;put b;get;done", "compact;put c", "compact;get;done"),
    ("put a id", "get;done;put a id", "put a id;get;done"),
    ("put a id", "get;done", "cancel a;put a id"),
    ("put a", "get;bury;close", "requeue;get;done;close"),
    ("", "many a b;get;done", "many c d;get;release;close"),
    ("put a;get;done;put b", "stats;close", "put c;get;close"),
    ("put a id", "exist a", "get;done;put a id"),
    ("put a;put b", "get;done", "put c;compact", "get;fail;close"),
    ("put a id", "get;done", "put a id;get", "compact;reap"),
    ("put a;get", "reap", "get;done"),
    ("put a;put b;get", "get;extend", "reap;close", "get;done"),
]


@functools.cache
def opening(script):
    """The disk that a play begins with, and the jobs alive on it."""
    if not script:
        return {"/q/": b""}, frozenset()
    stage = Stage({"/q/": b""}, [script], [(0, FOREVER, False)]).play()
    stage.players[0].guest.kill()
    with fresh(stage.disk) as guest:
        alive = frozenset(job[2]["k"] for job in guest.census().values())
    return stage.disk.tree(), alive


def perform(number, plan):
    """Play one schedule and judge it; returns the stage."""
    first, *scripts = PLAYS[number]
    tree, alive = opening(first)
    stage = Stage(tree, scripts, plan)
    try:
        stage.play().judge(alive)
    finally:
        for player in stage.players:
            player.guest.kill()
    return stage


class InterleavingTest(FaultCase):
    parts = 8 if DEEP else 1

    def plans(self):
        """All single preemptions and kills, then sampled double ones."""
        rng, singles, doubles = random.Random(SEED), [], []
        for number, (_, *scripts) in enumerate(PLAYS):
            players = range(len(scripts))
            lengths = [
                perform(number, [(who, FOREVER, False)]).calls[who] for who in players
            ]
            for who, other in itertools.permutations(players, 2):
                for at in thinned(range(lengths[who]), 5):
                    for kills in (False, True):
                        plan = (who, at, kills), (other, FOREVER, False)
                        singles.append((number, plan))
            for _ in range(98_000 // len(PLAYS) if DEEP else 6):
                plan = []
                for _ in range(rng.choice((2, 3))):
                    who = rng.randrange(len(scripts))
                    plan.append((who, rng.randrange(lengths[who]), rng.random() < 0.3))
                doubles.append((number, tuple(plan)))
        return singles + doubles

    def check(self, case):
        kills = sum(player.killed for player in perform(*case).players)
        return {"schedules": 1, "kills": kills}

    def test_every_preemption_and_every_kill(self):
        """Whoever is interrupted or killed at whatever system call: no job is
        lost, back or leased twice, and a stale token settles nothing."""
        self.counts["scripts"] = len(PLAYS)
        self.share(self.check, self.plans())


# Row 17: random histories against a model
# -----------------------------------------------------------------------------


class Walk(World):
    """One random history of two processes; each call's outcome is the model's."""

    VERBS = (
        "put", "put", "put id", "put id", "many", "exist", "get", "get", "get", "get 3",
        *["settle"] * 5, "extend", "stale", "cancel", "requeue", "requeue one", "reap",
        "purge", "find", "wait", "wait long", "wait long", "reopen", "kill", "compact",
    )  # fmt: skip

    def __init__(self, seed, host=None, names="AB"):
        super().__init__(host, backoff=lambda attempt: 10.0 * attempt)
        self.rng, self.names, self.said = random.Random(seed), names, []
        for name in names:
            self.guest(name)

    def run(self, steps):
        for number in range(steps):
            self.said.append(random_statement(self.rng, self, self.names, self.VERBS))
            try:
                self.call(self.said[-1])
                self.compare(self.guest(self.rng.choice(self.names)), number % 5 == 0)
            except Exception as exc:
                raise AssertionError(f"after {self.said[-12:]}: {exc!r}") from exc
        for name in [*self.names, "z"]:
            self.compare(self.guest(name), True)
            self.kill(name)

    def compare(self, guest, whole):
        self.told(None, "stats", guest.queue.stats(), (), {})
        if whole:
            mine = [job.view() for job in self.model.listed()]
            fields = "id state attempts priority run_at payload last_error".split()
            jobs = list(map(operator.attrgetter(*fields), guest.queue.jobs()))
            assert mine == jobs, (jobs, mine)


class ModelTest(FaultCase):
    def check(self, seed):
        Walk(seed).run(60)
        return {"histories": 1, "operations": 60}

    def test_one_who_looked_before_there_was_a_queue(self):
        """An object that only looked, at nothing, forgets what it knew as soon as
        somebody compacts, as every other does."""
        disk = Disk.from_tree({"/q/": b""})
        with fresh(disk) as a, fresh(disk) as b:
            b.queue.stats()
            a.queue.put("x", id="h")
            b.queue.stats()
            a.queue.get()
            b.queue.stats()
            a.queue.put("x", id="e")
            a.queue.compact()
            b.queue.requeue_dead()
            self.assertEqual(b.census(), a.census())
            self.assertRaises(b.tq.DuplicateJobError, b.queue.put, "y", id="e")

    def test_random_histories_agree_with_a_model(self):
        """Every operation, reopening and crashes among them, in random order on
        two processes: results, order and states are the model's."""
        count = 20_000 if DEEP else 200
        self.share(self.check, [f"{SEED}:{n}" for n in range(count)])


class Here:
    """A host that is the real one but for its clock, with queues in a place;
    what a killed process leaves is what close() leaves."""

    def __init__(self, place):
        self.place, self.clock = place, Clock(EPOCH, 1000.0)
        self.folder = tempfile.mkdtemp(prefix="tq-")
        self.where = place.where(self.folder)

    def guest(self, **options):
        guest = types.SimpleNamespace(tq=tq, queue=None)
        guest.kill = lambda: guest.queue.close()

        def open():
            guest.queue = tq.Queue(self.where, lease_timeout=LEASE, **options)

        guest.open = open
        open()
        return guest

    def end(self):
        self.place.clean(self.where)
        shutil.rmtree(self.folder)


class EngineHistoriesTest(FaultCase):
    parts = 8 if DEEP else 1

    def check(self, case):
        number, place = case
        host = Here(PLACES[place])
        with host.clock.patch():
            walk = Walk(f"{SEED}:{number}", host, "ab")
            if not host.place.engine.can_compact:
                walk.model.in_rows = True
                walk.VERBS = [verb for verb in walk.VERBS if verb != "compact"]
            walk.run(60)
        host.end()
        return {f"histories on {host.place.name}": 1}

    def test_random_histories_agree_across_the_engines(self):
        """The same seeds as on simulated files, on each real engine: results,
        order and states are the model's."""
        count, places = 2_000 if DEEP else 25, range(len(PLACES))
        self.share(self.check, itertools.product(range(count), places))


# Row 13: a storm of kills
# -----------------------------------------------------------------------------


class Storm:
    """Four processes that put, get and settle; one is killed, again and again.

    Each tells a pipe what it is about to do (capitals) and has done: P p put,
    g got, D d done.
    """

    def __init__(self, place, folder, seed):
        self.path, self.can_compact = place.where(folder), place.engine.can_compact
        self.rng, self.said = random.Random(seed), bytearray()
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.serial = itertools.count()
        self.pids = [self.spawn() for _ in range(4)]

    def spawn(self):
        number = next(self.serial)
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)  # should the parent die
                self.work(number)
            finally:
                os._exit(1)
        return pid

    def say(self, what, key):
        os.write(self.writer, f"{what} {key}\n".encode())

    def open(self, fsync):
        options = {"backoff": lambda attempt: 0.0, "max_retries": 10**6}
        return tq.Queue(self.path, fsync=fsync, lock_timeout=30, **options)

    def work(self, number):
        rng, queue = random.Random(number), self.open(number % 2 == 0)
        for n in itertools.count():
            key = f"{number}-{n}"
            self.say("P", key)
            queue.put(key, id=key if n % 2 else None)
            self.say("p", key)
            for job in queue.get_many(rng.randrange(1, 4)):
                self.say("g", job.payload)
                if rng.random() < 0.2:
                    queue.task_done(job, False, "e")
                    continue
                self.say("D", job.payload)
                queue.task_done(job)
                self.say("d", job.payload)
            if rng.random() < 0.02 and self.can_compact:
                queue.compact()

    def listen(self):
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 1 << 16):
                self.said += data

    def rage(self, kills):
        for _ in range(kills):
            end = time.monotonic() + self.rng.uniform(0.001, 0.01 if DEEP else 0.03)
            while time.monotonic() < end:
                select.select([self.reader], [], [], 0.005)
                self.listen()
            victim = self.rng.randrange(len(self.pids))
            self.kill(self.pids[victim])
            self.pids[victim] = self.spawn()

    def kill(self, pid):
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            raise AssertionError("a worker failed by itself, see its traceback")

    def end(self):
        pids, self.pids = self.pids, []
        for pid in pids:
            self.kill(pid)
        self.listen()
        os.close(self.reader)
        os.close(self.writer)

    def events(self):
        """What was said, as calls that began and ended at a place in it."""
        events, begun = [], {}
        for place, line in enumerate(self.said.decode().splitlines()):
            what, key = line.split()
            verb = {"p": "put", "g": "get", "d": "done"}[what.lower()]
            if what == "g" or what.isupper():
                events.append(Event(None, verb, [key], place))
                begun[what.lower(), key] = events[-1]
            if what.islower():
                begun[what, key].end, begun[what, key].said = place, True
        return events

    def drain(self):
        """What is left, in any state, each delivered exactly once; and how many
        writes a kill had torn."""
        queue = self.open(False)
        torn = queue.verify()  # a kill lets a write end at a page boundary
        assert all(bad.file.endswith(".damaged") for bad in torn), torn
        while queue.reap_stale(0):
            pass
        left = collections.Counter(job.payload for job in iter(queue.get, None))
        assert sum(left.values()) == queue.stats().inflight
        queue.close()
        return left, len(torn)


@every_engine
class StormTest(FaultCase):
    place = PLACES[0]

    def test_nothing_is_lost_in_a_storm_of_kills(self):
        """Whoever is killed whenever: what was put is done once or still there,
        and what was done is gone."""
        kills = 5000 if DEEP else 100
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        storm = Storm(self.place, folder, SEED)
        try:
            storm.rage(kills)
        finally:
            storm.end()
        left, torn = storm.drain()
        # Once in 2,000 kills or so (2 writes were torn in 5,000).
        self.assertLessEqual(torn, 2 + kills // 500)
        self.counts.update({"kills": kills, "torn writes": torn})
        self.counts.update(Verdict(storm.events()).check(left).counts(left))
        self.place.clean(storm.path)


# Row 14: clocks that jump
# -----------------------------------------------------------------------------

HOUR, DECADE = 3600.0, 10 * 365.25 * 86400


class JumpingClock(Clock):
    """At the n-th reading of one of the two, wall or mono, it jumps."""

    def __init__(self, which, at, jump):
        super().__init__(EPOCH, 1000.0)
        self.which, self.place, self.by, self.reads = which, at, jump, 0

    def look(self, which):
        self.reads += which == self.which
        if which == self.which and self.reads == self.place:
            self.jump(**{"seconds" if which == "wall" else which: self.by})

    def time(self):
        self.look("wall")
        return super().time()

    def monotonic(self):
        self.look("mono")
        return super().monotonic()


class Jump:
    """Two processes work while a clock jumps; nothing may come of it."""

    def __init__(self, which, at, jump, proofs):
        self.disk = Disk.from_tree({"/q/": b""})
        self.clock = JumpingClock(which, at, jump)
        self.a, self.b = (Guest(self.disk, clock=self.clock) for _ in range(2))
        self.fair = which == "wall" and proofs
        if not proofs:  # as on a system without open-file-description locks
            for guest in (self.a, self.b):
                plain = types.SimpleNamespace(flock=guest.fcntl.flock)
                plain.LOCK_EX, plain.LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB
                plain.LOCK_UN = fcntl.LOCK_UN
                guest.tq.fcntl = plain

    def run(self):
        a, b = self.a.queue, self.b.queue
        for id in "wxyz":
            a.put({"k": id}, id=id)
        b.put({"k": "late"}, id="late", delay=50)
        held = a.get()
        self.clock.sleep(10)
        again = a.extend(held)
        other = b.get()
        b.reap_stale()
        self.clock.sleep(LEASE - 20)
        self.not_taken(b, again)
        self.settle(b.task_done, other, False, "e", delay=5)
        b.reap_stale(LEASE - 10)
        self.not_taken(b, again)
        self.settle(a.task_done, again)
        a.cancel(again.id)  # in case its lease was lost
        assert self.alive() >= {"x", "y", "z", "late"}
        self.not_immortal(a, b)
        assert self.alive() == {"x", "y", "z", "late"}

    def not_taken(self, queue, mine):
        """Nobody else gets a job whose lease has not run out."""
        job = queue.get()
        if job is not None:
            assert job.id != mine.id or not self.fair, "expired early"
            self.settle(queue.release, job)

    def settle(self, call, *args, **options):
        try:
            call(*args, **options)
        except (self.a.tq.LeaseLostError, self.b.tq.LeaseLostError):
            assert not self.fair, "expired early"

    def not_immortal(self, a, b):
        """A lease that is never renewed ends when its time is over."""
        self.clock.sleep(60)
        taken = {job.id for job in a.get_many(9)}
        self.clock.sleep(LEASE + 1)
        # What lapsed before is given back first, and then leased.
        given = {job.id for job in [*b.get_many(9), *b.get_many(9)]}
        assert given >= taken, "immortal"

    def alive(self):
        seen = [set(guest.census()) for guest in (self.a, self.b)]
        assert seen[0] == seen[1]
        return seen[0]


class ClockTest(FaultCase):
    def cases(self):
        jumps = (HOUR, -HOUR, DECADE, -DECADE)
        for proofs in (True, False):
            for which in ("wall", "mono"):
                plain = Jump(which, 0, 0, proofs)
                self.check(plain)
                for at in range(1, plain.clock.reads + 1):
                    for jump in jumps if which == "wall" else (HOUR, DECADE):
                        yield which, at, jump, proofs

    def check(self, case):
        jump = case if isinstance(case, Jump) else Jump(*case)
        try:
            jump.run()
        finally:
            jump.a.kill()
            jump.b.kill()
        return {"jumps": 1}

    def test_a_clock_that_jumps_at_any_reading(self):
        """An hour or ten years, ahead or back, at any reading of the wall clock
        or (a suspended host) ahead on the other: no job is lost, no live lease
        ends early, none is immortal."""
        self.share(self.check, thinned(self.cases(), 3))


# Row 16: poison
# -----------------------------------------------------------------------------


class Raising:
    def __str__(self):
        raise ValueError("no text")


class NoText:
    def __str__(self):
        return 7


class Endless:
    def __str__(self):
        return str(self)


class Loud(str):
    def __str__(self):
        return "\x00"


def nested(depth, kind=list):
    value = 1
    for _ in range(depth):
        value = [value] if kind is list else {"": value}
    return value


CIRCLE = {}
CIRCLE["me"] = [CIRCLE]

POISON_PAYLOADS = [
    None, True, 0, -0.0, 5e-324, 1.7976931348623157e308, float("nan"), [float("-inf")],
    {float("nan"): 1}, 2**53 + 1, -(10**4000), 10**5000, 1e22,
    "", "\x00", "\ud800", "\udfff\ud800", "\U0010ffff", "\ufeff", "\ufffe", "\x85",
    "\u2028", "\n", "\r", "\x1c\x1d\x1e", '","crc":"00000000"}',
    ',"crc":"+00000000"}\n', "\\", '"', "\\u0000", "\u202etxt.exe", "\x1b[2J",
    "%s%n{0}", "{" * 600, "]" * 600, "x" * 200_000, b"bytes", {1, 2}, object(),
    Raising(), 1j, range(3), iter([1]), CIRCLE, int, ...,
    {"id": "a", "rev": 9, "done": True, "crc": "00000000"}, {"payload": {"payload": 1}},
    {"": {"": ""}}, {1: 2}, {None: 1, "null": 2}, {True: 1}, {(1,): 1}, {b"k": 1},
    {"\ud800": "\x00"}, (1, (2,)), [[], {}, [{}]], nested(500), nested(500, dict),
    nested(501), nested(9000), nested(100_000), Loud("loud"), [Loud("loud")],
]  # fmt: skip
POISON_IDS = [
    "", "x" * 255, "x" * 256, "\U0001f600" * 255, "\x00", "a\nb", "\x7f", "\x9f",
    "\x80", "\u2028", "\ud800", "\ufeff", "\u202e", " ", ".", "../../etc/passwd", '"',
    "\\", "\\u0061", '{"id":"b"}', b"bytes", 7, True, ("a",), Loud("loud"), "-rf",
    "'; drop",
]  # fmt: skip
POISON_ERRORS = [
    None, "", "\x00", "\ud800", "\x1b[2J", "\u202e", "a\nb\r\n", "x" * 200_000, b"\xff",
    7, Raising(), NoText(), Endless(), Loud("x"), ValueError(), OSError(2, "no"),
    object(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), [CIRCLE],
    '","crc":"00000000"}',
]  # fmt: skip


def exactly(value):
    """What JSON makes of a value, told apart by type too."""
    return json.dumps(json.loads(json.dumps(value)), sort_keys=True)


def folder_bytes(path):
    return {
        entry.name: open_bytes(entry.path)
        for entry in (os.scandir(path) if os.path.isdir(path) else ())
        if not entry.name.endswith(".lock")
    }


def open_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def try_poison(path, payload, id, error):
    """Whether it was taken, and came back exactly; refused, it left no trace."""
    queue, before = tq.Queue(path, fsync=False, max_retries=0), folder_bytes(path)
    try:
        put = queue.put(payload, id=id)
    except (TypeError, ValueError):
        assert folder_bytes(path) == before
        return False
    with tq.Queue(path, fsync=False) as other:
        job = other.get()
        assert job.id == put.id and (id is None or job.id == id)
        assert exactly(job.payload) == exactly(payload)
        other.bury(job, error)
    (dead,) = queue.dead_letter()
    assert (dead.id, exactly(dead.payload)) == (put.id, exactly(payload))
    assert isinstance(dead.last_error, (str, type(None)))
    assert not isinstance(error, str) or dead.last_error in (
        str(error), str(error)[:65536] + "...",
    )  # fmt: skip
    for name, data in folder_bytes(path).items():
        assert data.isascii() and b"\0" not in data, name
        assert all(parse(line) for line in data.splitlines()), name
    assert queue.verify() == [] and queue.purge("dead") == 1
    return True


def poison(folder):
    """Called in a child: print how many were taken and refused."""
    sys.setrecursionlimit(1000)
    cases = [(payload, None, None) for payload in POISON_PAYLOADS]
    cases += [("p", id, None) for id in POISON_IDS]
    cases += [("p", None, error) for error in POISON_ERRORS]
    outcomes = []
    for number, case in enumerate(cases):
        try:
            outcomes.append(try_poison(os.path.join(folder, "q"), *case))
        except Exception as exc:
            text = ascii(case[1:] if case[0] == "p" else case[0])[:200]
            raise AssertionError(f"case {number}: {text}") from exc
    print(outcomes.count(True), outcomes.count(False))


def pythons():
    """This interpreter, and the other versions that are at hand."""
    yield sys.executable
    for minor in range(9, 20):
        name = shutil.which(f"python3.{minor}")
        if name and minor != sys.version_info[1]:
            if subprocess.run([name, "-c", ""], capture_output=True).returncode == 0:
                yield name


class PoisonTest(FaultCase):
    def test_poison_is_refused_or_comes_back_exactly(self):
        """In the C locale too, each odd payload, id or error text is refused with
        nothing written, or is the same when it is read."""
        code = "import {0}; {0}.poison({1!r})"
        module = os.path.splitext(os.path.basename(__file__))[0]
        for python in pythons():
            folder = tempfile.mkdtemp()
            self.addCleanup(shutil.rmtree, folder)
            done = subprocess.run(
                [python, "-c", code.format(module, folder)],
                cwd=os.path.dirname(os.path.abspath(__file__)),
                env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0",
                     "PYTHONCOERCECLOCALE": "0"},
                capture_output=True, text=True,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])
            taken, refused = map(int, done.stdout.split())
            self.counts["Pythons"] += 1
            self.counts["taken"] += taken
            self.counts["refused"] += refused
            self.assertGreater(min(taken, refused), 20)


# Repository
# =============================================================================


class StyleTest(Case):
    """The rules of the house that a program can check."""

    source = pathlib.Path(tq.__file__).read_text("utf-8")

    def functions(self, tree=None):
        for node in ast.walk(tree or ast.parse(self.source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def code_lines(self, node, source=None):
        """A node's lines that hold code: no docstring, comment or blank."""
        lines = (source or self.source).splitlines()
        skip = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                skip.update(range(part.lineno, part.end_lineno + 1))
        return sum(
            n not in skip and lines[n - 1].strip()[:1] not in ("", "#")
            for n in range(node.lineno, node.end_lineno + 1)
        )

    def test_functions_are_short(self):
        """Median 8 lines of code, nine in ten at most 25, none over 40."""
        sizes = {
            f"{node.name}:{node.lineno}": self.code_lines(node)
            for node in self.functions()
        }
        long = {name: size for name, size in sizes.items() if size > 40}
        self.assertEqual(long, {})
        ordered = sorted(sizes.values())
        self.assertLessEqual(ordered[len(ordered) // 2], 10)
        self.assertLessEqual(ordered[len(ordered) * 9 // 10], 25)

    def test_nothing_outside_the_standard_library(self):
        """Every import, lazy ones included, is found without site-packages."""
        names = set()
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
        names -= {"msvcrt"}
        code = (
            "import importlib.util as u, sys; sys.path = [p for p in sys.path if p];"
            "print([n for n in sys.argv[1:] if not u.find_spec(n)])"
        )
        done = run_python(code, *sorted(names), options=("-S", "-I"))
        self.assertEqual(done.stdout.strip(), "[]", done.stderr)

    def test_who_may_touch_what(self):
        """Queue and Job know nothing of the system; the engine asks no
        backoff; only the lock's part knows fcntl and msvcrt."""
        for name, banned in (
            ("Queue", {"os", "fcntl", "msvcrt", "socket", "stat"}),
            ("Job", {"os", "fcntl", "time", "json"}),
        ):
            used = {n.id for n in ast.walk(class_node(name)) if isinstance(n, ast.Name)}
            self.assertFalse(used & banned, name)
        engine = {getattr(n, "attr", None) for n in ast.walk(class_node("_FileEngine"))}
        self.assertFalse(engine & {"backoff", "_backoff", "flock", "fcntl"})

    def test_only_the_primitives_write_sync_and_replace(self):
        """os.write, fsync, fdatasync, replace and unlink each have one home."""
        homes = {
            "write": {"_write"}, "fsync": {"_sync", "_sync_path"},
            "fdatasync": {"_sync"}, "replace": {"_swap"}, "rename": set(),
            "unlink": {"_unlink"}, "remove": set(), "rmdir": set(),
        }  # fmt: skip
        tree = ast.parse(self.source)
        for function in self.functions(tree):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "os"
                    and function.name not in homes.get(node.attr, {function.name})
                ):
                    self.fail(f"os.{node.attr} in {function.name}:{node.lineno}")

    def test_system_calls_are_written_by_module(self):
        """No open(), no `from os import`: tests can put a disk under it."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.assertNotIn(node.func.id, ("open", "exec", "eval"), node.lineno)
            if isinstance(node, ast.ImportFrom):
                self.assertNotIn(node.module, ("os", "time", "fcntl"))

    def banners(self, source, rule):
        return re.findall(rf"(?m)^# (.+)\n# {rule}{{77}}$", source)

    def test_banners(self):
        """Sections stand under 79-column banners, in the order of the design;
        the tests repeat those that they cover in that order."""
        found = self.banners(self.source, "=")
        want = ["Constants and errors", "Jobs", "Queue", "Worker", "Engine contract"]
        want.append("File engine")
        self.assertEqual([name for name in found if name in want], want)
        self.assertEqual(re.findall(r"(?m)^# [-=]{5,}$", self.source), [
            "# " + mark * 77
            for mark in re.findall(r"(?m)^# ([-=])[-=]{4,}$", self.source)
        ])  # fmt: skip
        mine = pathlib.Path(__file__).read_text("utf-8")
        for rule in "=-":
            theirs = self.banners(self.source, rule)
            repeated = [name for name in self.banners(mine, rule) if name in theirs]
            order = [name for name in theirs if name in repeated]
            self.assertEqual(repeated, order)
            self.assertGreaterEqual(len(repeated), 4)

    def test_docstrings_and_comments(self):
        """First lines of docstrings fit 72 columns; public names have one; no
        TODO is left."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                self.assertLessEqual(len(first), 72, first)
        for name in tq.__all__:
            self.assertTrue(getattr(tq, name).__doc__, name)
        for name, member in vars(tq.Queue).items():
            if not name.startswith("_") and callable(member):
                self.assertTrue(member.__doc__, name)
        self.assertNotRegex(self.source, r"TODO|FIXME|XXX")

    def test_public_names(self):
        """__all__ is sorted, complete and importable."""
        self.assertEqual(sorted(tq.__all__), list(tq.__all__))
        public = {
            name
            for name, value in vars(tq).items()
            if name[0] != "_" and getattr(value, "__module__", "") == "tiny_queue"
        }
        self.assertEqual(public - {"main", "Backoff", "StrPath"}, set(tq.__all__))

    def test_the_import_is_light(self):
        """argparse, signal, ctypes, asyncio and logging are not imported."""
        code = (
            "import sys; old = set(sys.modules); import tiny_queue;"
            "print(sorted({'argparse', 'signal', 'ctypes', 'asyncio', 'logging',"
            " 'socket', 'subprocess'} & (set(sys.modules) - old)))"
        )
        done = run_python(code)
        self.assertEqual(done.stdout.strip(), "[]", done.stderr)

    def test_import_works_without_fcntl(self):
        """On Windows there is none."""
        code = "import sys; sys.modules['fcntl'] = None; import tiny_queue"
        done = run_python(code)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_these_tests_keep_the_rules_too(self):
        """Every test has a docstring of one sentence and under 25 lines."""
        source = pathlib.Path(__file__).read_text("utf-8")
        for node in self.functions(ast.parse(source)):
            if node.name.startswith("test_"):
                text = ast.get_docstring(node)
                self.assertTrue(text, node.name)
                self.assertTrue(text.rstrip().endswith("."), node.name)
                self.assertLess(self.code_lines(node, source), 25, node.name)


class ReadmeTest(Case):
    def test_every_python_block_runs(self):
        """The README's code works as it stands, in an empty directory."""
        file = pathlib.Path(ROOT, "README.md")
        self.assertTrue(file.exists(), "there is no README.md")
        blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", file.read_text("utf-8"))
        self.assertTrue(blocks, "README.md has no python block")
        for n, block in enumerate(blocks, 1):
            with self.subTest(block=n):
                folder = os.path.join(self.dir, f"block{n}")
                os.mkdir(folder)
                block = self.with_server(block, folder)
                done = run_python(block, cwd=folder, timeout=30)
                self.assertEqual(done.returncode, 0, block + done.stderr)

    def with_server(self, block, folder):
        """A block with the URL of a server of ours; without one it is compiled."""
        url = "postgresql://app@localhost/app"
        if url not in block:
            return block
        if NO_POSTGRES:
            return f"compile({block!r}, 'README.md', 'exec')"
        place = PostgresPlace(POSTGRES[0])
        self.addCleanup(place.clean, place.where(folder))
        block = block.replace(f"{url}?schema=jobs", place.where(folder))
        return block.replace(url, place.url)

    def test_the_lines_shown_are_sound(self):
        """The files' lines that the README shows pass their own checksum."""
        text = pathlib.Path(ROOT, "README.md").read_text("utf-8")
        lines = re.findall(r'(?m)^    (\{"id":"order.*\})$', text)
        self.assertEqual(len(lines), 4)
        for line in lines:
            self.assertTrue(parse(line.encode()), line)


class ExamplesTest(Case):
    ARGUMENTS = {
        "quickstart.py": ["input"],
        "latency.py": ["0.2"],
        "compare.py": ["--jobs", "50"],
        "bench.py": ["--jobs", "200", "--rounds", "1"],
    }
    # These take long, or ExampleScriptsTest looks at what they say.
    ELSEWHERE = {
        "bench.py", "compare.py", "web_handoff.py", "cron_once.py", "async_program.py",
        "poison.py", "transfer.py",
    }  # fmt: skip

    def test_every_example_runs(self):
        """Each script in examples/ ends with status 0; the quickstart hashes a
        small directory."""
        folder = os.path.join(self.dir, "input")
        os.mkdir(folder)
        for n in range(12):
            pathlib.Path(folder, f"file{n}").write_bytes(b"x" * n * 1000)
        scripts = sorted(pathlib.Path(ROOT, "examples").glob("*.py"))
        self.assertTrue(scripts, "there are no examples")
        for script in scripts:
            with self.subTest(script.name):
                compile(script.read_bytes(), str(script), "exec")
                if script.name in self.ELSEWHERE and not DEEP:
                    continue
                done = subprocess.run(
                    [sys.executable, str(script), *self.ARGUMENTS.get(script.name, [])],
                    cwd=self.dir,
                    env={**os.environ, "PYTHONPATH": ROOT},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    timeout=60,
                )
                self.assertEqual(done.returncode, 0, done.stdout[-2000:])


if __name__ == "__main__":
    unittest.main()


# Several processes
# =============================================================================

ENUMERATIONS = [
    *(InterruptTest, InterleavingTest, FailingSyncTests, PowerCutTests, BitFlipTest),
    *(NestedCrashTests, NewDirectoryTests, RandomScriptTests, FailingCallTests),
    *(ModelTest, WreckedFilesTest, ProcessDeathTests, EngineHistoriesTest),
]
LONGEST = [ExampleScriptsTest, WorkTest, *ENUMERATIONS]


def handed_out():
    """The classes of this file, those first that take longest; and which part of
    how many equal ones, for those that can be cut."""
    left_out = {MutantTests, TogetherTest, *(ENUMERATIONS if LIGHT else ())}
    classes = [value for value in globals().values() if isinstance(value, type)]
    every = [case for case in classes if issubclass(case, Limited)]
    return [
        (case, part)
        for case in dict.fromkeys(LONGEST + every)
        if case not in left_out
        for part in range(case.parts)
    ]


class HandedOut(unittest.TestSuite):
    """Tests of the classes whose numbers this process reads from a pipe, which it
    shares with others: who has done with one takes the next."""

    _cleanup = False  # it has no list to remove from what was run

    def __init__(self, fd):
        super().__init__()
        self.fd = fd

    def __iter__(self):
        every = handed_out()
        while number := os.read(self.fd, 4):
            case, part = every[int(number)]
            case.cut = part, case.parts
            yield from unittest.TestLoader().loadTestsFromTestCase(case)


class TogetherTest(Limited):
    """Other processes ran their share of the tests meanwhile: as many tests wait
    as run, that takes a third of the time."""

    limit = 0.0  # each of their tests has one
    children: list[subprocess.Popen] = []

    @classmethod
    def start(cls):
        """Hand all tests out; return the suite of this process."""
        reader, writer = os.pipe()
        count = len(handed_out())
        os.write(writer, b"".join(b"%4d" % number for number in range(count)))
        os.close(writer)
        code = f"import {__name__} as t; t.TogetherTest.work({reader})"
        for _ in range(JOBS):
            cls.children.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    pass_fds=[reader],
                    text=True,
                )
            )
        return HandedOut(reader)

    @staticmethod
    def work(fd):
        os.set_inheritable(fd, False)
        result = unittest.TextTestRunner().run(HandedOut(fd))
        sys.exit(not result.wasSuccessful())

    def test_all_processes_passed(self):
        """Each process passed its share; their closing lines are repeated here."""
        for child in self.children:
            self.addCleanup(child.wait)
            self.addCleanup(child.kill)
        for child in self.children:
            said = child.communicate()[0]
            lines = [line for line in said.split("\n") if line.strip(". s")]
            print("", *lines[-20:], sep="\n", file=sys.stderr)
            self.assertEqual(child.returncode, 0, said[-20_000:])


def load_tests(loader, tests, pattern):
    """All tests were asked for: share them out among processes."""
    if loader.testNamePatterns:
        return tests
    if os.environ.get("TQ_MUTANTS"):
        return loader.loadTestsFromTestCase(MutantTests)
    if NO_POSTGRES:
        line = f"PostgreSQL was not tested: {NO_POSTGRES}"
        atexit.register(print, line, file=sys.stderr, flush=True)
    last = TogetherTest("test_all_processes_passed")
    return unittest.TestSuite([TogetherTest.start(), last])
