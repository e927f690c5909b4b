"""A durable job queue in one file: no server, no dependency, no lost job.

    import tiny_queue as tq

    queue = tq.Queue("jobs")                     # a directory
    queue.put({"email": "ada@example.com"})      # on disk when it returns
    job = queue.get(timeout=5.0)                 # leased to this process
    if job:
        queue.task_done(job)

Any number of threads and processes of one host may share the directory.  A
queue is three files of JSON lines (pending, inflight, dead) under one lock.
Each change of a job appends one line to one file, and that append is the
commit point: the state of a job is its valid line with the highest `rev`, so
there is no moment at which a job is in no file, and recovery is reading.

What holds: a put that returned is never lost until its job is settled; a
success that returned never comes back; delivery is at least once, by
priority, then in the order of the pending file.  A job whose holder was
killed is delivered again at once: the holder's kernel lock is its proof of
life.  What does not: exactly-once side effects, network file systems, disks
that lie about flushing.

With the URL of a database in place of the directory (sqlite:///app.db,
postgresql://host/db) the same calls work there, and a job and the caller's
own changes can commit together: see Queue.put and Queue.task_done.

Invariants, cited as I1 to I9 where a line relies on them:

I1  Every read-decide-write happens under the thread lock, then the flock;
    user code (handlers, backoff, iteration) never runs under them.
I2  One append is one commit point; disk first, then memory.
I3  The highest valid rev wins, and a rev is never used twice.
I4  A record goes only when what supersedes it is durable, content and name.
I5  Acknowledged means written whole and, with fsync, synced under a durable
    name; a failed or short write is cut back before the error is raised.
I6  The token alone is the fence: new at each lease, kept by extend, demanded
    by every settle.
I7  The tail of a file is decided once, under the lock, by one function.
I8  The kernel says how long a file is and whether the path still names the
    file that we hold open; who finds it replaced discards the index.
I9  After a failed sync nothing counts as durable until every file has been
    copied whole to a new inode, less the records of the failed operations.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import errno
import functools
import heapq
import io
import itertools
import json
import math
import operator
import os
import random
import re
import stat
import struct
import sys
import threading
import time
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quote
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Union, cast
from zlib import crc32

if TYPE_CHECKING:
    import argparse
    import asyncio
    import logging

__version__ = "0.1.0"
__all__ = [
    "Damage",
    "DuplicateJobError",
    "Fail",
    "Job",
    "JobNotFoundError",
    "LeaseLostError",
    "LockTimeoutError",
    "Queue",
    "QueueClosedError",
    "QueueError",
    "Retry",
    "Snooze",
    "Stats",
    "Totals",
    "Worker",
    "exponential",
]


def _optional(module: str) -> Any:
    """A module that only some systems have, or None."""
    try:
        return __import__(module)
    except ImportError:
        return None


fcntl = _optional("fcntl")  # POSIX
msvcrt = _optional("msvcrt")  # Windows

FORMAT = 1  # raised by any change to the bytes on disk

# Constants and errors
# =============================================================================

_MAX_ID = 255
_MAX_DEPTH = 500  # CPython's own limits for nesting differ, 993 to 9998
_MAX_PRIORITY = 2**31 - 1
_MAX_SECONDS = 1e10  # durations; keeps every instant a sane float
_MAX_ERROR = 64 * 1024
_TICK = 1.0  # seconds between two looks at the holders of leases
_MIB = 1 << 20

Backoff = Callable[[int], float]
StrPath = Union[str, "os.PathLike[str]"]


class QueueError(Exception):
    """Base of every error of a queue; nothing was changed unless it says so.

    Attributes hold the data of the message: which are set depends on the
    error, and an unset one is None.
    """

    id: str | None = None
    path: str | None = None
    errno: int | None = None
    outcome_unknown: bool = False  # a database's commit whose answer was lost

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class DuplicateJobError(QueueError):
    """put() of an id that is pending, inflight or dead: `id`, `state`."""

    state: str | None = None


class JobNotFoundError(QueueError):
    """No job of that `id` in the state that the call needs."""


class LeaseLostError(QueueError):
    """The lease of this Job (`id`, `token`) is no longer the valid one.

    It ran out, was reaped or cancelled, or the job is settled already.
    """

    token: str | None = None


class LockTimeoutError(QueueError):
    """The lock (`path`) stayed busy for `timeout` seconds; `pid` holds it.

    `pid` is None where the system does not tell.
    """

    timeout: float | None = None
    pid: int | None = None


class QueueClosedError(QueueError):
    """The Queue object was closed; make a new one for the same path."""


class Retry(Exception):
    """Raised by a handler: this delivery failed, try again.

    After `delay` seconds, or the queue's backoff if that is None.
    """

    delay: float | None = None  # for a subclass that does not call __init__

    def __init__(self, delay: float | None = None) -> None:
        super().__init__(delay)
        self.delay = None if delay is None else _delay(delay)


class Snooze(Exception):
    """Raised by a handler: not now; again in `delay` seconds, uncounted."""

    delay: float = 0.0

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay = _delay(delay)


class Fail(Exception):
    """Raised by a handler: no retry can help; dead now, for that reason."""

    reason: object = None

    def __init__(self, reason: object) -> None:
        super().__init__(reason)
        self.reason = reason


# Jobs
# =============================================================================


class _JobFields:
    """What a Job is made of, while it is being made."""

    __slots__ = (
        "id",
        "payload",
        "state",
        "attempts",
        "priority",
        "created_at",
        "run_at",
        "leased_at",
        "lease_until",
        "last_error",
        "max_retries",
        "token",
        "_holder",
        "_joined",  # what it was settled as in a transaction of the caller's
    )

    def __init__(
        self,
        id: str,
        payload: Any,
        state: str = "pending",
        attempts: int = 0,
        priority: int = 0,
        created_at: float = 0.0,
        run_at: float = 0.0,
        leased_at: float | None = None,
        lease_until: float | None = None,
        last_error: str | None = None,
        max_retries: int = 3,
        token: str | None = None,
        _holder: object = None,
    ) -> None:
        self.id = id
        self.payload = payload
        self.state = state
        self.attempts = attempts
        self.priority = priority
        self.created_at = created_at
        self.run_at = run_at
        self.leased_at = leased_at
        self.lease_until = lease_until
        self.last_error = last_error
        self.max_retries = max_retries
        self.token = token
        self._holder = _holder
        self._joined: str | None = None


class Job(_JobFields):
    """One job as it was when it was read; immutable, truthy, picklable.

    `run_at` is 0.0 for a job that was never delayed.  `leased_at` and
    `lease_until` are None unless a delivery has begun, `token` unless it is
    inflight.  `attempts` counts deliveries, this one included.  A pickled Job
    can be settled elsewhere; only the original keeps its holder's proof of
    life, so a Queue that goes out of scope does not give its jobs away.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Job:
        return _job(_JobFields(*args, **kwargs))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ did it

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot set {name!r}: a Job is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: a Job is immutable")

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _JobFields.__slots__[:-2])

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, self._values()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Job):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.id, self.token))

    def __repr__(self) -> str:
        # No payload: a Job ends up in logs, and payloads must not.
        return f"<Job {self.id!r} {self.state}, attempts={self.attempts}>"


def _job(fields: _JobFields) -> Job:
    """Make a Job of its fields: filled before it is immutable, it takes a
    quarter of the time of thirteen calls of object.__setattr__, and made here
    half the time of a call of Job."""
    fields.__class__ = Job
    return fields  # type: ignore[return-value]


class Stats(NamedTuple):
    """What `Queue.stats` returns; counts, then instants, then bytes."""

    pending: int  # delayed ones included
    delayed: int
    inflight: int
    dead: int
    damaged: int  # lines of NAME.damaged
    oldest: float | None  # since when the longest waiting due job has been due
    next_due: float | None  # when the next delayed job is due
    bytes: int  # of the three data files


class Damage(NamedTuple):
    """One bad line: file name, line number (from 1), what is wrong."""

    file: str
    line: int
    reason: str


def exponential(
    base: float = 1.0, factor: float = 2.0, cap: float = 3600.0, jitter: float = 0.1
) -> Backoff:
    """Return a backoff: base * factor ** (attempt - 1) seconds, at most cap.

    The result is spread by up to `jitter` (a share, 0 to 1) in both
    directions, so that jobs that failed together do not return together.
    """
    base = _number("base", base, 0, _MAX_SECONDS)
    factor = _number("factor", factor, 1, _MAX_SECONDS)
    cap = _number("cap", cap, 0, _MAX_SECONDS)
    jitter = _number("jitter", jitter, 0, 1)
    return functools.partial(_exponential, base, factor, cap, jitter)


def _exponential(
    base: float, factor: float, cap: float, jitter: float, attempt: int
) -> float:
    try:
        delay = min(cap, base * factor ** (attempt - 1))
    except OverflowError:
        delay = cap
    return delay * random.uniform(1 - jitter, 1 + jitter)


# Queue
# =============================================================================


class Queue:
    """A durable queue of JSON payloads in a directory or a database.

    One object may be used by many threads and survives fork; any number of
    objects and processes may use one directory.  Pickles to its arguments.

    path           a directory (str or PathLike), made when first written to,
                   mode 0700; or the URL of a database, "scheme://..."
    name           of the queue in that place: [A-Za-z0-9_-], 1 to 64
    max_retries    failed deliveries after the first before a job is dead, for
                   jobs that were put without a number of their own
    backoff        attempt (1, 2, ...) -> seconds until the next delivery
    lease_timeout  seconds that a delivery may last without extend()
    fsync          False: survives the death of processes, but a power cut may
                   lose the latest operations (the queue still opens)
    cross_process_lock  False (or TINY_QUEUE_NO_FLOCK=1): no flock, so one
                   process only
    lock_timeout   seconds to wait for the lock before LockTimeoutError
    """

    def __init__(
        self,
        path: StrPath,
        name: str = "default",
        *,
        max_retries: int = 3,
        backoff: Backoff | None = None,
        lease_timeout: float = 300.0,
        fsync: bool = True,
        cross_process_lock: bool = True,
        lock_timeout: float = 10.0,
    ) -> None:
        if backoff is not None and not callable(backoff):
            raise TypeError(f"backoff: must be callable, not {type(backoff).__name__}")
        self.name = _queue_name(name)
        self.max_retries = _integer("max_retries", max_retries, 0, 2**31)
        self.backoff: Backoff = exponential() if backoff is None else backoff
        self.lease_timeout = _lease_seconds(lease_timeout)
        self.fsync = bool(fsync)
        self._engine = _open_engine(
            path,
            self.name,
            max_retries=self.max_retries,
            fsync=self.fsync,
            shared=bool(cross_process_lock),
            lock_timeout=_number(
                "lock_timeout", lock_timeout, 0, threading.TIMEOUT_MAX
            ),
        )
        self.path = self._engine.path
        self._options = {
            "max_retries": self.max_retries,
            "backoff": backoff,
            "lease_timeout": self.lease_timeout,
            "fsync": self.fsync,
            "cross_process_lock": bool(cross_process_lock),
            "lock_timeout": lock_timeout,
        }

    def put(
        self,
        payload: Any,
        *,
        delay: float = 0,
        at: float | None = None,
        id: str | None = None,
        exist_ok: bool = False,
        priority: int = 0,
        max_retries: int | None = None,
        connection: Any = None,
    ) -> Job:
        """Add one job; it is on disk, synced, when this returns.

        The payload is anything that JSON holds (no NaN, at most 500 levels
        deep).  It is due after `delay` seconds, or at `at` (Unix time).  An
        `id` that is pending, inflight or dead raises DuplicateJobError, or
        with `exist_ok` returns the job that is there.  Bad arguments raise
        TypeError or ValueError with nothing written; a full disk raises
        QueueError with nothing kept.

        With `connection`, the caller's own to the queue's database, the job
        is part of its open transaction: there when that commits.
        """
        _joins(self._engine, connection)
        new = _New(
            _put_id(id, exist_ok),
            payload,
            _encode(payload),
            _integer("priority", priority, -_MAX_PRIORITY - 1, _MAX_PRIORITY),
            *_due(delay, at),
            None if max_retries is None else _retries(max_retries),
        )
        return self._engine.insert([new], exist_ok, connection)[0]

    def put_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        delay: float = 0,
        priority: int = 0,
        connection: Any = None,
    ) -> list[Job]:
        """Add many jobs with one write and one sync: all or none of them.

        `ids` gives each its id; one that is alive raises DuplicateJobError
        and adds nothing.  An empty iterable returns [] and writes nothing.
        `connection` is put()'s.
        """
        _joins(self._engine, connection)
        priority = _integer("priority", priority, -_MAX_PRIORITY - 1, _MAX_PRIORITY)
        seconds, _ = _due(delay, None)
        new = [
            _make_new((id, item, _encode(item), priority, seconds, None, None))
            for id, item in _with_ids(payloads, ids)
        ]
        return self._engine.insert(new, False, connection) if new else []

    def get(
        self, timeout: float | None = 0.0, *, lease_timeout: float | None = None
    ) -> Job | None:
        """Lease the next due job to this process, or return None.

        Waits up to `timeout` seconds for one; 0 does not wait, None waits
        without limit.  The lease lasts `lease_timeout` seconds (the queue's
        by default) and ends at once when this process dies.
        """
        jobs = self._get(1, timeout, lease_timeout)
        return jobs[0] if jobs else None

    def _get_detached(self, timeout: float, lease_timeout: float | None) -> Job | None:
        """A job for a process that ends before it (a shell script's `get`)."""
        jobs = self._get(1, timeout, lease_timeout, held=False)
        return jobs[0] if jobs else None

    def get_many(self, n: int, timeout: float | None = 0.0) -> list[Job]:
        """Lease up to n due jobs at once; waits only for the first."""
        return self._get(_integer("n", n, 1, 2**31), timeout, None)

    def _get(
        self,
        n: int,
        timeout: float | None,
        lease_timeout: float | None,
        held: bool = True,
    ) -> list[Job]:
        seconds = self.lease_timeout
        if lease_timeout is not None:
            seconds = _lease_seconds(lease_timeout)
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + _number("timeout", timeout, 0, math.inf)
        seen: object = None
        while True:
            jobs, lapses, seen = self._engine.lease(n, seconds, held, seen is not None)
            if jobs:
                self._give_back_quietly(lapses)
                return jobs
            self._give_back(lapses)
            if lapses:
                continue  # one of them may be due now
            left = deadline - time.monotonic()
            if left <= 0 or timeout == 0:
                return jobs
            self._engine.wait(seen, min(left, _TICK))

    def task_done(
        self,
        job: Job,
        success: bool = True,
        error: object = None,
        *,
        delay: float | None = None,
        connection: Any = None,
    ) -> None:
        """Settle a leased job; durable when this returns.

        Success removes it.  Failure keeps `error` as its last_error and makes
        it pending again after the backoff (or `delay` seconds), or dead when
        its retries are spent.  Raises LeaseLostError, with nothing changed,
        if the lease is no longer the valid one.

        With `connection`, the caller's own to the queue's database, this is
        part of its open transaction: what the handler wrote there and the
        settlement commit together or not at all.
        """
        _leased(job)
        _joins(self._engine, connection)
        state, seconds, text = "done", 0.0, None
        if not _is_success(success):
            text = _error_text(error)
            state = "dead" if job.attempts > job.max_retries else "pending"
            if state == "pending":
                seconds = self._delay(job.attempts) if delay is None else _delay(delay)
        elif error is not None or delay is not None:
            raise ValueError("error, delay: only a failure takes them")
        self._engine.settle(job, state, seconds, text, connection=connection)
        if connection is not None:
            object.__setattr__(job, "_joined", state)  # for a Worker

    def bury(self, job: Job, error: object) -> None:
        """Make a leased job dead now, whatever retries it has left."""
        self._engine.settle(_leased(job), "dead", error=_error_text(error))

    def release(self, job: Job, delay: float = 0) -> None:
        """Give a leased job back; this delivery does not count."""
        self._engine.settle(_leased(job), "pending", _delay(delay), counted=False)

    def extend(self, job: Job, seconds: float | None = None) -> Job:
        """Renew a lease: it ends `seconds` from now, not from its old end.

        `seconds` is the queue's lease_timeout by default.  Returns the job
        with its new lease_until; the old Job object can still settle.
        """
        length = self.lease_timeout if seconds is None else _lease_seconds(seconds)
        return self._engine.extend(_leased(job), length)

    def cancel(self, id: str) -> bool:
        """Remove a job; an inflight one's holder gets LeaseLostError.

        Returns whether there was such a job; durable when this returns.
        """
        return self._engine.remove(_job_id(id))

    def dead_letter(self) -> Iterator[Job]:
        """Iterate over a snapshot of the dead jobs, oldest death first."""
        return self.jobs("dead")

    def requeue_dead(self, id: str | None = None) -> int:
        """Make one dead job, or all, pending again; return how many.

        Their attempts start again at 0.  An id that is not dead raises
        JobNotFoundError.
        """
        return self._engine.requeue(None if id is None else _job_id(id))

    def reap_stale(self, older_than_seconds: float | None = None) -> int:
        """Take back the jobs whose lease is over; return how many.

        That is: whose holder is dead, or whose deadline has passed.  With
        `older_than_seconds` also every one not renewed for that long, even if
        its holder lives and its deadline is ahead.  They are pending at once,
        after the backoff if it is not the first such end, or dead when their
        retries are spent.
        """
        age = math.inf
        if older_than_seconds is not None:
            age = _number("older_than_seconds", older_than_seconds, 0, math.inf)
        return self._give_back(self._engine.lapsed(age))

    def _give_back(self, lapses: list[_Lapse]) -> int:
        """Decide on jobs whose lease ended unsettled; the engine applies it
        to those whose rev is still the same."""
        verdicts = []
        for lapse in lapses:
            delay: float | None = 0.0
            if lapse.attempts > lapse.max_retries:
                delay = None
            elif lapse.lapses:
                delay = self._delay(lapse.attempts)
            verdicts.append((lapse, delay, lapse.reason))
        return self._engine.give_back(verdicts)

    def _give_back_quietly(self, lapses: list[_Lapse]) -> None:
        """The caller has jobs to get: it must not lose them to this."""
        try:
            self._give_back(lapses)
        except QueueError as exc:
            _log().warning("lapsed jobs not given back: %s", exc)

    def jobs(self, state: str | None = None, limit: int | None = None) -> Iterator[Job]:
        """Iterate over a snapshot: pending, inflight, then dead jobs.

        Each in the order of its file; `state` picks one of the three, `limit`
        the most to return.  No lock is held meanwhile.
        """
        if state is not None:
            _state(state)
        if limit is not None:
            _integer("limit", limit, 0, 2**62)
        return self._engine.records(state, limit)

    def find(self, id: str) -> Job:
        """Return a job as it is now, or raise JobNotFoundError."""
        return self._engine.find(_job_id(id))

    def stats(self) -> Stats:
        """Count the jobs; flat in the backlog once it was read."""
        return self._engine.counts()

    def __len__(self) -> int:
        """Return the number of pending jobs, delayed ones included."""
        return self._engine.counts().pending

    def __bool__(self) -> bool:
        return True

    def purge(self, state: str, older_than: float = 0) -> int:
        """Remove the jobs of a state; return how many.

        With `older_than` only those whose last delivery began, or which were
        put if there was none, at least that many seconds ago.
        """
        age = _number("older_than", older_than, 0, math.inf)
        return self._engine.purge(_state(state), age)

    def compact(self) -> None:
        """Rewrite the files without what is superseded.

        A database does that by itself: there this raises QueueError.
        """
        self._engine.compact()

    def verify(self) -> list[Damage]:
        """Read every byte and return what is damaged; [] when all is well.

        Lines kept in NAME.damaged are listed until that file is removed.
        """
        return self._engine.verify()

    def close(self) -> None:
        """Release everything; compacts when most of the files is superseded.

        Jobs still leased through this object are deliverable at once, this
        delivery counted.  Closing twice is fine.
        """
        self._engine.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_queue, (self._engine.source, self.name, self._options)

    def __repr__(self) -> str:
        return f"Queue({self.path!r}, {self.name!r})"

    def _delay(self, attempt: int) -> float:
        """Ask the user's backoff; a bad answer must not cost the job."""
        try:
            return _number("backoff", self.backoff(attempt), 0, _MAX_SECONDS)
        except Exception:
            _log().exception(
                "backoff failed for attempt %d; the default is used", attempt
            )
            return exponential()(attempt)


def _make_queue(path: str, name: str, options: dict[str, Any]) -> Queue:
    return Queue(path, name, **options)


# Arguments: each check returns the clean value or raises, before any writing
# -----------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|com\d|lpt\d")  # devices on Windows
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def _queue_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name: must be str, not {type(name).__name__}")
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ValueError(
            f"name: {name!r} cannot name a queue; use 1 to 64 of A-Z a-z 0-9 _ -"
        )
    return str.__str__(name)


def _job_id(id: str) -> str:
    if not isinstance(id, str):
        raise TypeError(f"id: must be str, not {type(id).__name__}")
    if not 0 < len(id) <= _MAX_ID or _CONTROL.search(id):
        raise ValueError(
            f"id: {id[:300]!r} must have 1 to {_MAX_ID} characters, no control ones"
        )
    return str.__str__(id)


def _put_id(id: str | None, exist_ok: bool) -> str | None:
    if id is not None:
        return _job_id(id)
    if exist_ok:
        raise ValueError("exist_ok: needs an id, by which the job is known")
    return None


def _number(what: str, value: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what}: must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not low <= number <= high:  # NaN fails too
        raise ValueError(f"{what}: {number!r} is not between {low} and {high}")
    return number


def _integer(what: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what}: must be int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{what}: must be between {low} and {high}")
    return int(value)  # not an enum, which formats as its name


def _delay(delay: float) -> float:
    return _number("delay", delay, 0, _MAX_SECONDS)


def _lease_seconds(seconds: float) -> float:
    return _number("lease_timeout", seconds, 1e-3, _MAX_SECONDS)


def _retries(max_retries: int) -> int:
    return _integer("max_retries", max_retries, 0, 2**31)


def _due(delay: float, at: float | None) -> tuple[float, float | None]:
    seconds = _delay(delay)
    if at is None:
        return seconds, None
    if seconds:
        raise ValueError("at, delay: give one of the two")
    return 0.0, _number("at", at, 0, _MAX_SECONDS)


def _with_ids(
    payloads: Iterable[Any], ids: Iterable[str] | None
) -> list[tuple[str | None, Any]]:
    if isinstance(payloads, (str, bytes, dict)):
        raise TypeError(f"payloads: a list is needed, not a {type(payloads).__name__}")
    items = list(payloads)
    if ids is None:
        return [(None, item) for item in items]
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids: a list is needed, not a {type(ids).__name__}")
    names = [_job_id(id) for id in ids]
    if len(names) != len(items):
        raise ValueError(f"ids: {len(names)} for {len(items)} payloads")
    if len({_quote(id) for id in names}) != len(names):
        raise ValueError("ids: the same id twice in one put_many")
    return list(zip(names, items))


def _joins(engine: _Engine, connection: Any) -> None:
    if connection is not None and not engine.can_join:
        raise ValueError(
            f"connection: queue {engine.path!r} is in a directory, which cannot be"
            " part of a transaction; use a queue in that database"
        )


def _state(state: str) -> str:
    if not isinstance(state, str):
        raise TypeError(f"state: must be str, not {type(state).__name__}")
    if state not in ("pending", "inflight", "dead"):
        raise ValueError(f"state: {state!r} is not pending, inflight or dead")
    return state


def _leased(job: Job) -> Job:
    if not isinstance(job, Job):
        raise TypeError(f"job: must be a Job, not {type(job).__name__}")
    if job.token is None:
        raise ValueError(f"job {job.id!r} is {job.state}, not leased; get() leases")
    return job


def _is_success(success: bool) -> bool:
    if isinstance(success, bool):
        return success
    # It is easily an error, in the place of success.
    raise TypeError(f"success: must be a bool, not {type(success).__name__}")


def _error_text(error: object) -> str | None:
    """Text of any error; its own __str__ may raise or be huge."""
    if error is None:
        return None
    try:
        text = str(error)
        return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "..."
    except BaseException as exc:
        return f"<{type(error).__name__}; its text raised {type(exc).__name__}>"


_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _not_json(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


# What dumps() makes anew for each call; kept, it saves two thirds of its time.
# A loop in the payload ends as nesting that is too deep.
_make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)  # CPython has it
_chunks: Callable[[Any, int], Iterable[str]] | None = _make_encoder and _make_encoder(
    None, _not_json, _quote, None, ":", ",", False, False, False
)


def _encode(payload: Any) -> str:
    """Payload as ASCII JSON, or TypeError/ValueError."""
    try:
        text = "".join(_chunks(payload, 0)) if _chunks else _dumps(payload)
    except RecursionError:
        raise ValueError(f"payload: nested deeper than {_MAX_DEPTH} levels") from None
    except (TypeError, ValueError) as exc:
        kind = TypeError if isinstance(exc, TypeError) else ValueError
        raise kind(f"payload: {exc}") from exc
    if not _shallow(text):
        raise ValueError(f"payload: nested deeper than {_MAX_DEPTH} levels")
    if len(text) > _MAX_PAYLOAD:
        raise ValueError(f"payload: {len(text)} bytes, at most {_MAX_PAYLOAD} fit")
    return text


_MAX_PAYLOAD = 1 << 30
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]')


def _shallow(text: str, limit: int = _MAX_DEPTH) -> bool:
    """Whether JSON text nests at most so many levels."""
    if len(text) <= limit or text.count("[") + text.count("{") <= limit:
        return True
    depth = 0
    for match in _BRACKETS.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            if depth > limit:
                return False
        elif mark in "]}":
            depth -= 1
    return True


def _log() -> logging.Logger:
    import logging  # here: it would double the time of `import tiny_queue`

    return logging.getLogger("tiny_queue")


# Worker
# =============================================================================


class Totals(NamedTuple):
    """What a Worker did with the jobs it was given."""

    done: int
    retried: int
    dead: int
    released: int  # given back uncounted: snoozed, or at a shutdown
    lost: int  # their lease ended before their handler


_BURST = 0.5  # seconds: a group's Ctrl-C and its forwarding are one signal


_OUTCOME_OF = {"done": "done", "pending": "retried", "dead": "dead"}


class Worker:
    """Runs a handler on the jobs of a queue, until it is told to stop.

    handler(job) returns: the job is done.  It raises: an Exception fails it
    with "Type: message" (retried, or dead); Retry, Snooze and Fail say what
    they say; SystemExit and KeyboardInterrupt give the job back uncounted and
    stop the worker.  An `async def` handler runs on one event loop for all; one
    that yields fails its jobs, for its call runs nothing.  One that has settled
    its job by task_done(job, connection=) and committed may just return; if it
    did not commit, the job has failed.

    poll_interval    most seconds between two looks at the queue; puts wake an
                     idle worker at once
    concurrency      how many jobs at a time, a thread each
    max_jobs         stop after that many
    stop_when_empty  stop when no job is due and none is running
    handle_signals   SIGTERM or SIGINT (in the main thread only): take no new
                     job, finish and acknowledge the running ones, return; at
                     the second signal give them back and return at once

    Leases of running jobs are renewed every third of the queue's
    lease_timeout.  Errors of the queue itself (a full disk) are logged and
    waited out.  As a systemd service:

        [Service]
        ExecStart=/usr/bin/python3 /srv/app/worker.py
        Restart=always
        KillSignal=SIGTERM
        TimeoutStopSec=330

    with TimeoutStopSec above the longest job.  In a container make it the
    main process (`CMD ["python3", "worker.py"]`, not through a shell, which
    would keep the signal) and give `docker stop --time` as long.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Callable[[Job], Any],
        poll_interval: float = 0.5,
        *,
        concurrency: int = 1,
        max_jobs: int | None = None,
        stop_when_empty: bool = False,
        handle_signals: bool = True,
    ) -> None:
        _check_parts(queue, handler)
        self.queue = queue
        self.handler = handler
        self.poll_interval = _number("poll_interval", poll_interval, 1e-3, _MAX_SECONDS)
        self.concurrency = _integer("concurrency", concurrency, 1, 10_000)
        if max_jobs is not None:
            _integer("max_jobs", max_jobs, 0, 2**62)
        self.max_jobs = max_jobs
        self.stop_when_empty = bool(stop_when_empty)
        self.handle_signals = bool(handle_signals)
        self._stopping = False
        self._stopped_at = math.inf
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(Totals._fields, 0)
        self._taken = 0
        self._running: dict[str, Job] = {}  # by token
        self._signals = 0
        self._emptied = False  # stopping only because nothing was due
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_forever(self) -> Totals:
        """Work until stopped; return the totals.  Not for two threads at once."""
        self._reset()
        self._reap(starting=True)
        threads = [
            threading.Thread(target=self._work, name=f"tiny_queue-{i}", daemon=True)
            for i in range(self.concurrency)
        ]
        renewer = threading.Thread(target=self._renew, daemon=True)
        previous = self._install_signals()
        try:
            for thread in [renewer, *threads]:
                thread.start()
            self._watch(threads)
        finally:
            self._stopping = True
            self._ended.set()
            _restore_signals(previous)
            self._stop_loop()
        if self._signals < 2:
            renewer.join()
            self._stopping, self._stopped_at = False, math.inf  # for another run
        return Totals(**self._totals)

    def stop(self) -> None:
        """Ask run_forever to finish its running jobs and return.

        From any thread, or before it runs.
        """
        if not self._stopping:
            self._stopped_at = time.monotonic()
        self._emptied = False
        self._stopping = True

    def run_once(self) -> bool:
        """Run one job that is due, in this thread; False if there was none."""
        self._reset()
        job = self.queue.get()
        if job is None:
            return False
        renewer = threading.Thread(target=self._renew, daemon=True)
        renewer.start()
        try:
            self._run(job)
        finally:
            self._ended.set()
            renewer.join()
            self._stop_loop()
        return True

    # The main thread watches; the signal handler only counts

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        looked = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if self._signals > 1:
                self._release_running()
                return
            if time.monotonic() - looked >= _TICK * 5:
                looked = time.monotonic()
                self._reap()

    def _install_signals(self) -> dict[int, Any]:
        if not self.handle_signals:
            return {}
        if threading.current_thread() is not threading.main_thread():
            return {}
        import signal

        last: dict[int, float] = {}

        def count(signum: int, frame: object) -> None:
            # It may interrupt any line, so it only counts; a burst of one kind
            # is one signal, and one some time after stop() is the second.
            now = time.monotonic()
            if now - last.get(signum, -math.inf) > _BURST:
                again = not self._signals and now - self._stopped_at > 2 * _BURST
                self._signals += 2 if again else 1
            last[signum] = now
            self._emptied = False
            self._stopping = True

        return {
            number: signal.signal(number, count)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _release_running(self) -> None:
        """Give back what still runs; its late outcome will find the lease lost."""
        with self._lock:
            jobs = list(self._running.values())
        for job in jobs:
            self._settle(job, "released", lambda job: self.queue.release(job))

    def _reap(self, starting: bool = False) -> None:
        try:
            count = self.queue.reap_stale()
            if count:
                _log().warning("took back jobs whose lease was over: %d", count)
        except QueueError as exc:
            if starting and isinstance(exc, QueueClosedError):
                raise  # later on, to close the queue is a way to end this
            _log().error("cannot reap: %s", exc)

    # A thread per running job

    def _work(self) -> None:
        pause = 0.0
        while not self._stopping and self._may_take():
            try:
                job = self.queue.get(timeout=min(self.poll_interval, 0.5))
                pause = 0.0
            except QueueClosedError:
                return
            except QueueError as exc:
                self._untake()
                if not self._stopping:
                    pause = self._wait_out(pause, exc)
                continue
            if job is None:
                self._untake()
                if self.stop_when_empty and not self._running:
                    self._emptied = self._stopping = True
            elif self._stopping and not self._emptied:
                self._settle(job, "released", lambda job: self.queue.release(job))
            else:
                self._run(job)

    def _may_take(self) -> bool:
        """Take one of max_jobs before the job: never one too many."""
        with self._lock:
            if self.max_jobs is not None and self._taken >= self.max_jobs:
                return False
            self._taken += 1
            return True

    def _untake(self) -> None:
        with self._lock:
            self._taken -= 1

    def _wait_out(self, pause: float, exc: Exception) -> float:
        pause = min(max(pause * 2, 0.1), 30.0)
        _log().error("queue fails, next try in %.1f s: %s", pause, exc)
        start = time.monotonic()
        while self._signals < 2:
            waited = time.monotonic() - start
            if waited >= (min(pause, 1.0) if self._stopping else pause):
                break
            time.sleep(0.05)
        return pause

    def _run(self, job: Job) -> None:
        """Run the handler on one job and settle it by the outcome."""
        token = cast(str, job.token)
        with self._lock:
            self._running[token] = job
        try:
            try:
                outcome, settle = self._outcome(job)
            except Exception as exc:  # of an outcome itself, like a wrong delay
                _log().exception("job %s: its outcome is wrong", job.id)
                outcome, settle = self._failed(job, f"wrong outcome: {exc}", None)
            self._settle(job, outcome, settle)
        finally:
            with self._lock:
                self._running.pop(token, None)

    def _outcome(self, job: Job) -> tuple[str, Callable[[Job], None]]:
        """Call the handler; say what became of the job, and how to settle it."""
        queue = self.queue
        try:
            result = self.handler(job)
            if hasattr(result, "__await__"):
                self._await(result)
            _check_it_ran(result)
            if job._joined:  # then this finds the lease settled, see _settle
                return self._failed(job, "settled, but never committed", None)
            return "done", queue.task_done
        except Retry as exc:
            delay = None if exc.delay is None else _delay(exc.delay)
            return self._failed(job, "asked for a retry", delay)
        except Snooze as exc:
            seconds = _delay(exc.delay)
            return "released", lambda job: queue.release(job, seconds)
        except Fail as exc:
            reason = _error_text(exc.reason)
            return "dead", lambda job: queue.bury(job, reason)
        except (SystemExit, KeyboardInterrupt) as exc:
            _tell_of_exit(job, exc)
            self._stopping = True
            return "released", lambda job: queue.release(job)
        except BaseException as exc:
            error = f"{type(exc).__name__}: {_error_text(exc)}"[:_MAX_ERROR]
            _log().warning(
                "job %s failed, delivery %d of %d: %s\n%s",
                job.id,
                job.attempts,
                job.max_retries + 1,
                _visible(error),
                _traceback(exc),
            )
            return self._failed(job, error, None)

    def _failed(
        self, job: Job, error: str, delay: float | None
    ) -> tuple[str, Callable[[Job], None]]:
        outcome = "dead" if job.attempts > job.max_retries else "retried"
        return outcome, lambda job: self.queue.task_done(job, False, error, delay=delay)

    def _settle(self, job: Job, outcome: str, settle: Callable[[Job], None]) -> None:
        """Settle, however long the queue's own trouble lasts."""
        pause = 0.0
        while True:
            try:
                settle(job)
                break
            except LeaseLostError:
                if job._joined:  # by the handler, together with its effects
                    outcome = _OUTCOME_OF[job._joined]
                    break
                _log().warning("job %s: lease lost before it was %s", job.id, outcome)
                outcome = "lost"
                break
            except QueueClosedError as exc:
                _log().error("job %s not settled as %s: %s", job.id, outcome, exc)
                return
            except QueueError as exc:
                if self._stopping and pause > 1:
                    return  # the job comes back by itself when this process ends
                pause = self._wait_out(pause, exc)
        with self._lock:
            self._totals[outcome] += 1

    # Leases, and the loop of async handlers

    def _renew(self) -> None:
        """Renew the leases of running jobs, each every third of its length."""
        length = self.queue.lease_timeout
        while not self._ended.wait(length / 3):
            with self._lock:
                jobs = list(self._running.values())
            for job in jobs:
                try:
                    self.queue.extend(job, length)
                except LeaseLostError:
                    with self._lock:
                        self._running.pop(cast(str, job.token), None)
                except QueueError as exc:
                    _log().error("cannot renew the lease of %s: %s", job.id, exc)

    def _await(self, result: Any) -> None:
        import asyncio

        async def wrap() -> BaseException | None:
            try:
                await result
            except BaseException as exc:  # SystemExit would end the loop's thread
                return exc
            return None

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._looper = threading.Thread(target=self._loop.run_forever)
                self._looper.daemon = True
                self._looper.start()
        error = asyncio.run_coroutine_threadsafe(wrap(), self._loop).result()
        if error is not None:
            raise error

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._looper.join(1.0)
            if not self._looper.is_alive():
                loop.close()


def _check_parts(queue: object, handler: object) -> None:
    """Refuse what a Worker would only fail on later, job by job."""
    if not isinstance(queue, Queue):
        raise TypeError(f"queue: must be a Queue, not {type(queue).__name__}")
    if not callable(handler):
        raise TypeError(f"handler: must be callable, not {type(handler).__name__}")


def _restore_signals(previous: dict[int, Any]) -> None:
    if previous:
        import signal

        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _tell_of_exit(job: Job, exc: BaseException) -> None:
    """A worker that ends is no mystery: sys.exit() says nothing by itself."""
    if isinstance(exc, SystemExit):
        error = _visible(f"SystemExit: {_error_text(exc)}")
        _log().warning("job %s ends its worker: %s", job.id, error)


def _check_it_ran(result: object) -> None:
    """Refuse what calling a function with a yield in it returns."""
    if isinstance(result, (types.GeneratorType, types.AsyncGeneratorType)):
        raise TypeError(
            "handler: its call returned a generator and ran nothing; it must not yield"
        )


def _traceback(exc: BaseException) -> str:
    """Where it was raised, without its message, which may be huge."""
    import traceback

    return "".join(traceback.format_tb(exc.__traceback__)).rstrip()


# Engine contract
# =============================================================================


class _New(NamedTuple):
    """A job to insert; id None asks for a generated one."""

    id: str | None
    payload: Any
    text: str  # the payload as ASCII JSON
    priority: int
    delay: float  # seconds
    at: float | None  # or an instant
    max_retries: int | None  # None: whatever the reader's queue says


# Without a call in Python: this and _make_change are 7 % of a put_many.
_make_new: Any = functools.partial(tuple.__new__, _New)


class _Lapse(NamedTuple):
    """An inflight job whose lease ended without being settled."""

    id: str
    rev: int
    attempts: int
    max_retries: int
    lapses: int  # how many deliveries before this one ended so, in a row
    reason: str


class _Leased(NamedTuple):
    """What a lease found: jobs, lapses to decide on, and for wait() what it
    saw if there was nothing."""

    jobs: list[Job]
    lapses: list[_Lapse]
    seen: object


class _Parcel(NamedTuple):
    """A job on its way from one queue to another."""

    id: str
    text: str  # the payload as JSON
    state: str  # pending or dead
    attempts: int
    priority: int
    created_at: float
    run_at: float
    leased_at: float | None  # of its last delivery
    last_error: str | None
    max_retries: int | None
    lapses: int
    token: str  # under which both sides hold it


def _moved_state(token: str) -> str:
    """The state that a job was in when it was held under this token."""
    return "dead" if token.endswith("-dead") else "pending"


class _Engine:
    """What Queue asks of storage.

    Durations cross this contract, instants belong to the engine's clock.
    Every verb may be called by any thread at any time, is atomic, and is
    durable at return where Queue promises it.  The engine never computes a
    backoff and never decides between retry and dead; it takes over a dead
    holder's job by itself only the first time and with retries left.
    """

    source: str  # what opens it again
    path: str  # the same for people: without a password
    _max_retries: int  # of jobs that were put without a number of their own
    can_join = False  # insert and settle inside the caller's transaction
    can_compact = True
    steady_leases = True  # a jump of the wall clock ends no living holder's lease

    def insert(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        """Add all or none; a live id raises or, with exist_ok, is returned.

        With a connection it is part of the open transaction there.
        """
        raise NotImplementedError

    def lease(self, n: int, seconds: float, held: bool, again: bool) -> _Leased:
        """Lease up to n due jobs; without `held` the lease outlives this
        process and ends only by time.

        With nothing due it asks whose holder is dead, `again` (in the same
        get) at most once a second.
        """
        raise NotImplementedError

    def settle(
        self,
        job: Job,
        outcome: str,
        delay: float = 0.0,
        error: str | None = None,
        counted: bool = True,
        connection: Any = None,
    ) -> None:
        """End a lease: done, pending (after delay) or dead; fenced by token.

        With a connection it is part of the open transaction there.
        """
        raise NotImplementedError

    def extend(self, job: Job, seconds: float) -> Job:
        """Renew a lease until `seconds` from now; fenced by token."""
        raise NotImplementedError

    def lapsed(self, older_than: float) -> list[_Lapse]:
        """List leases of dead holders, run out, or not renewed for so long."""
        raise NotImplementedError

    def give_back(self, verdicts: Sequence[tuple[_Lapse, float | None, str]]) -> int:
        """Make lapsed jobs pending after a delay, or dead (None), if their
        rev is still the same; count them."""
        raise NotImplementedError

    def records(self, state: str | None, limit: int | None) -> Iterator[Job]:
        """Iterate over a snapshot, holding no lock meanwhile."""
        raise NotImplementedError

    def find(self, id: str) -> Job:
        raise NotImplementedError

    def requeue(self, id: str | None) -> int:
        """Make dead jobs pending, attempts 0."""
        raise NotImplementedError

    def remove(self, id: str) -> bool:
        """Remove a job in any state."""
        raise NotImplementedError

    def purge(self, state: str, older_than: float) -> int:
        raise NotImplementedError

    def counts(self) -> Stats:
        raise NotImplementedError

    def names(self) -> list[str] | None:
        """Queues in the same place, this one too if it was ever written to;
        None if there is no such place.  Creates nothing."""
        raise NotImplementedError

    def wait(self, seen: object, seconds: float) -> None:
        """Return when a job may have become due since a lease saw none, at
        the latest after seconds."""
        raise NotImplementedError

    def compact(self) -> None:
        raise NotImplementedError

    def verify(self) -> list[Damage]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    # Moving to another queue: held here, adopted there, dropped here, let go
    # there.  Whoever dies in between leaves each job leased on at least one side
    # and deliverable on none; the token, the same on both, tells which it is.

    def hold(self, state: str, n: int, seconds: float, prefix: str) -> list[_Parcel]:
        """Lease up to n pending (due or not) or dead jobs for a move.

        No holder, uncounted, for so many seconds, under new tokens: prefix,
        something unique, "-" and the state.  The parcels say what they were.
        """
        raise NotImplementedError

    def held(self, prefix: str) -> list[_Parcel]:
        """The jobs inflight under tokens that start so."""
        raise NotImplementedError

    def rehold(self, seconds: float, prefix: str) -> list[_Parcel]:
        """Hold what held() finds for so many seconds, under new tokens: a
        move that still has the old ones can change nothing with them."""
        raise NotImplementedError

    def adopt(self, parcels: Sequence[_Parcel], seconds: float) -> None:
        """Insert jobs, all or none, inflight as hold() leaves them; an id that
        is alive raises DuplicateJobError."""
        raise NotImplementedError

    def drop(self, parcels: Sequence[_Parcel]) -> set[str]:
        """Remove held jobs; return the ids of those whose token was no longer
        valid, which are left alone."""
        raise NotImplementedError

    def let_go(self, parcels: Sequence[_Parcel]) -> None:
        """Make held jobs what their parcels say; one whose token is no longer
        valid is left alone."""
        raise NotImplementedError

    # What every engine decides and answers alike

    def _retries(self, own: int | None) -> int:
        return self._max_retries if own is None else own

    def _split(
        self, over: Sequence[_Lease]
    ) -> tuple[collections.deque[_Lease], list[_Lapse]]:
        """Split what is over: to be leased anew at once, or to be decided."""
        first, others = [], []
        for lease in over:
            if lease.lapses == 0 and lease.attempts <= self._retries(lease.max_retries):
                first.append(lease)
            else:
                others.append(self._lapse(lease))
        first.sort(key=lambda lease: -lease.priority)
        return collections.deque(first), others

    def _reason(self, lease: _Lease) -> str:
        tries = self._retries(lease.max_retries) + 1
        return f"{lease.reason} (delivery {lease.attempts} of {tries})"

    def _lapse(self, lease: _Lease) -> _Lapse:
        return _Lapse(
            lease.id,
            lease.rev,
            lease.attempts,
            self._retries(lease.max_retries),
            lease.lapses,
            self._reason(lease),
        )

    def _duplicate(self, job: Job) -> DuplicateJobError:
        advice = "use another id, say that it may exist, or wait for its end"
        if job.state == "dead":
            advice = "requeue it, or cancel it to free its id"
        return DuplicateJobError(
            f"job {job.id!r} is already {job.state} in {self.path!r}; {advice}",
            id=job.id,
            state=job.state,
        )

    def _unknown(self, id: str, states: str) -> JobNotFoundError:
        return JobNotFoundError(
            f"job {id!r} is not {states} in queue {self.path!r}; list the jobs",
            id=id,
        )

    def _lost(self, job: Job) -> LeaseLostError:
        return LeaseLostError(
            f"job {job.id!r} is no longer leased to token {job.token!r} in"
            f" {self.path!r}: the lease ran out, was reaped or cancelled, or the job"
            " is settled; what this delivery did may be done again",
            id=job.id,
            token=job.token,
        )


def _open_engine(path: StrPath, name: str, **options: Any) -> _Engine:
    """Choose the engine: by URL scheme, or files for anything without one."""
    where = os.fspath(path)
    if not isinstance(where, str):
        raise TypeError(f"path: must be str or PathLike, not {type(where).__name__}")
    if not where or "\0" in where:
        raise ValueError(f"path: {where!r} is not a directory name")
    if "://" not in where:
        scheme, colon, _ = where.partition(":")
        if colon and scheme in _ENGINE_OF:  # else jobs go where no worker looks
            raise ValueError(
                f"path: what begins with '{scheme}:' and is a URL has {scheme}://; for"
                f" a directory of such a name write ./{scheme}:..."
            )
        return _FileEngine(os.path.abspath(where), name, **options)
    scheme = where.split("://")[0]
    engine = _ENGINE_OF.get(scheme)
    if engine is None:
        known = ", ".join(f"{scheme}://" for scheme in _ENGINE_OF)
        raise ValueError(
            f"path: no engine for {scheme!r} URLs; give a directory or {known}"
        )
    return engine(where, name, **options)


# File engine
# =============================================================================

# A job's state: three bits of an index entry, in order of precedence for
# equal revs; a delayed job is pending too, so those two differ in bit 0 only.
_PENDING, _DELAYED, _INFLIGHT, _DEAD, _DONE = 0, 1, 2, 4, 6
_FILE_OF = (0, 0, 1, 1, 2, 2, 1)  # state -> file: pending, inflight, dead
_STATE_OF = (_PENDING, _INFLIGHT, _DEAD)  # and back
_NAME_OF = ("pending", "inflight", "dead")  # of a file, and of its jobs' state
_OWN_FILE = re.compile(
    r"([A-Za-z0-9_-]{1,64})\.(?:lock|damaged|(?:pending|inflight|dead)\.jsonl)\Z"
)
_MAX_REV = 2**28
_READ_AHEAD = 128 * 1024  # more unread bytes are read outside the flock
_RUSH = 5e-3  # seconds: puts that come faster than that are a rush
_DOZE = 3e-3
_IDLE_SLACK = 64 * 1024  # superseded bytes that an idle get leaves behind


class _FileCore(_Engine):
    """Three files under one lock, and an index of them kept up to date."""

    def __init__(
        self,
        path: str,
        name: str,
        *,
        max_retries: int,
        fsync: bool,
        shared: bool,
        lock_timeout: float,
    ) -> None:
        self.path = self.source = path
        self._max_retries = max_retries
        shared = shared and os.environ.get("TINY_QUEUE_NO_FLOCK", "") in ("", "0")
        lock = os.path.join(path, f"{name}.lock")
        self._lock = _FileLock(lock, lock_timeout, shared)
        self._store = _Store(path, name, fsync, self._lock)
        self._closed = False
        self._reset()
        _ENGINES.add(self)

    def _reset(self) -> None:
        """Forget all that a process may not share with its parent."""
        self._pid = os.getpid()
        self._prefix = os.urandom(8).hex() + "-"
        self._count = 0
        self._holder: _Holder | None = None
        self._index = _Index()
        self._looked = -math.inf
        self._lost_races = 0, -math.inf
        self._turns = _Turns()
        self._lapses_left: collections.deque[_Lease] = collections.deque()
        self._watch = _Watch()
        self._compact_above = _MIB

    def forked(self) -> None:
        self._lock.reset()
        self._store.reset()
        self._reset()

    # Transactions

    def _locked(self, body: Callable[..., Any], *args: Any, write: bool = True) -> Any:
        """Run body under the thread lock, then the flock (I1).

        The lock is released twice: an exception at any one line, Ctrl-C
        included, leaves at least one of the two to run.
        """
        if self._pid != os.getpid():
            self.forked()
        lock, entered = self._lock, False
        if lock.mine():
            raise QueueError(
                f"queue {self.path!r} is in the middle of a call by this same thread;"
                " do not call it from a signal handler or finalizer"
            )
        try:
            try:
                lock.acquire(write, self._is_closed)
                if self._closed:
                    raise QueueClosedError(
                        f"queue {self.path!r} is closed; make a new Queue",
                        path=self.path,
                    )
                if self._store.enter(write):
                    self._index.discard()
                entered = True
                return body(*args)
            finally:
                if entered and self._store.sick:
                    self._heal()
                if _WINDOWS:
                    self._store.let_go()
                lock.release()
        except OSError as exc:
            raise self._refused(exc) from exc
        finally:
            lock.release()

    def _is_closed(self) -> bool:
        return self._closed

    def _heal(self) -> None:
        """Repair at once after a sync that failed under the lock, before
        another process can acknowledge anything; else at the next call."""
        self._index.discard()
        try:
            self._store.rescue()
        except OSError as exc:
            _log().error("queue %r is not repaired yet: %s", self.path, exc)

    def _commit(self, *tickets: _Ticket | None) -> None:
        try:
            self._store.commit(*tickets)
        except QueueError:
            try:
                self._locked(lambda: None)  # which repairs first
            except QueueError as exc:
                _log().error("queue %r is not repaired yet: %s", self.path, exc)
            raise

    def _refused(self, exc: OSError) -> QueueError:
        path = exc.filename or self.path
        advice = _ADVICE.get(exc.errno or 0, "nothing was acknowledged")
        return QueueError(
            f"queue {self.path!r}: {exc.strerror or exc} ({path}); {advice}",
            errno=exc.errno,
            path=str(path),
        )

    def _transact(
        self, body: Callable[..., Any], *args: Any, write: bool = True
    ) -> Any:
        """Run body under both locks with the index up to date."""
        most = _READ_AHEAD
        while True:
            done, result = self._locked(self._attempt, body, args, most, write=write)
            if done:
                return result
            self._read_ahead()
            most *= 4  # or a process that writes without a pause is never caught up

    def _attempt(
        self, body: Callable[..., Any], args: Any, most: int
    ) -> tuple[bool, Any]:
        """Catch up and run body; (False, None) if there is too much to read."""
        index = self._index
        if index.dirty:
            index.discard()
        for _ in range(3):
            index.dirty = True  # until this ends well: half a change is not kept
            try:
                done = self._catch_up(most)
                result = body(*args) if done else None
                if done:
                    self._compact_if_due()
                index.dirty = False
                index.careful = index.careful and not done
                return done, result
            except _StaleError:  # the files are not what the index remembers
                index.discard()
                index.careful = True
            except (DuplicateJobError, JobNotFoundError, LeaseLostError):
                index.dirty = False
                raise
        raise QueueError(
            f"queue {self.path!r}: its files change without the lock; only append to"
            " them under a flock on NAME.lock",
            path=self.path,
        )

    def _catch_up(self, most: int) -> bool:
        """Read what others wrote; False if that is more than `most` bytes."""
        index, store = self._index, self._store
        size = 0
        for data in store.files:
            if store.look(data) or data.size < index.read[data.file]:
                index.discard()
            size += data.size
        read = index.read
        unread = size - (read[0] + read[1] + read[2])
        if unread > most:
            return False
        index.loaded = True
        if unread:
            for data in store.files:
                if not self._read(data, data.size):
                    return self._catch_up(most)
        if index.damage and not store.readonly:
            self._set_damage_aside()
        return True

    def _read(self, data: _Data, upto: int) -> bool:
        """Index a file up to an offset; False (all is forgotten) if the bytes
        before the unread ones are not the remembered ones (I8)."""
        index = self._index
        now = time.time()
        while index.read[data.file] < upto:
            start, mark = index.read[data.file], index.marks[data.file]
            block = cast(_Inode, data.inode).lines(start - len(mark), len(mark), upto)
            if not block.startswith(mark):
                index.discard()
                return False
            index.load(data.file, block[len(mark) :], now)
        return True

    def _read_ahead(self) -> None:
        """Read a large backlog under the thread lock only, so that other
        processes go on meanwhile; decided bytes never change in place."""
        try:
            with self._lock.threads():
                index = self._index
                if index.dirty:
                    return
                index.dirty = True
                for data in self._store.files:
                    if not self._read(data, data.size):
                        break
                index.dirty = False
        except _StaleError:
            pass  # still dirty, so it is forgotten
        except OSError as exc:
            raise self._refused(exc) from exc
        finally:
            self._lock.release()  # once more, for the same reason as in _locked

    def _set_damage_aside(self) -> None:
        """Keep damaged lines in NAME.damaged and out of the data files."""
        index = self._index
        self._store.keep_damage(index.damage)
        _log().warning(
            "%d damaged lines set aside in %s", len(index.damage), self._store.damaged
        )
        index.damage.clear()
        self._try_compact()
        if not index.loaded:
            raise _StaleError  # forgotten, so there is nothing yet to work on

    # Compaction

    def _compact(self) -> None:
        """Rewrite each file to its live records.

        A record may go only when what supersedes it is durable, content and
        name (I4).  So all files are synced first, and the tombstones, which
        cover records of the other two files, go last.
        """
        index, store = self._index, self._store
        if any(index.read[data.file] != data.size for data in store.files):
            raise _StaleError  # what was not read must not be dropped
        store.make_durable()
        for file in (0, 2, 1):
            if file == 1:
                store.sync_directory()
            if index.read[file] != index.live_of[file]:
                data = store.files[file]
                mark = store.rewrite(data, index.rewritten(file, data.bytes_at))
                index.move(file, data.size, mark)
        index.drop_done()
        self._compact_above = _MIB

    def _compact_if_due(self) -> None:
        """Rewriting stays a constant share of each operation's cost."""
        index = self._index
        superseded = index.superseded
        if superseded > self._compact_above and superseded > index.live_bytes:
            if not self._store.readonly:
                self._try_compact()

    def _try_compact(self) -> None:
        """Compact unasked: a failure costs nothing but space."""
        try:
            self._compact()
        except _StaleError:
            self._index.discard()
        except OSError as exc:
            _log().warning("compaction failed: %s", exc)
            self._compact_above = max(self._compact_above, self._index.superseded) * 2

    def compact(self) -> None:
        self._transact(self._compact)

    # Reading and writing records

    def _append(
        self,
        data: _Data,
        changes: Sequence[_Change],
        *,
        durable: bool = False,
        spare: bool = False,
    ) -> _Ticket | None:
        """Write changes to one file, then to the index if it is up to date.

        `spare` lets a full disk use the ballast.
        """
        index, store = self._index, self._store
        place = data.size
        block = b"".join([change.line for change in changes])
        try:
            store.append(data, block, spare)
        except OSError:
            index.burn(changes)
            raise
        ticket = store.ticket(data, changes) if durable else None
        if index.loaded and index.read[data.file] == place:
            index.learn(data.file, changes, block)
        return ticket

    def _fresh(self) -> str:
        """An id or token: unique by a random prefix of this process."""
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    def _record(self, key: bytes, entry: int) -> _Record:
        """Read a job's line again; it must still be what the index says."""
        data = self._store.files[_FILE_OF[entry & 7]]
        record = _read_record(data.bytes_at(entry >> 64, (entry >> 32 & _MASK) - 1))
        if record.key != key or record.rev != entry >> 3 & _REV_MASK:
            raise _StaleError
        return record

    def _job(self, record: _Record, entry: int) -> Job:
        return self._view(record, _NAME_OF[_FILE_OF[entry & 7]])

    def _view(self, record: _Record, state: str) -> Job:
        fields = record.fields
        retries = fields.get("max_retries")
        inflight = state == "inflight"
        return Job(
            fields["id"],
            fields["payload"],
            state,
            fields["attempts"],
            fields["priority"],
            float(fields["created_at"]),
            float(fields["run_at"]),
            None if state == "pending" else fields.get("leased_at"),
            fields.get("lease_until") if inflight else None,
            fields.get("last_error"),
            self._max_retries if retries is None else retries,
            fields.get("token") if inflight else None,
        )

    def _tombstone(self, key: bytes) -> _Change:
        rev = self._index.next_rev(key)
        line = _sealed(f'{{"id":"{key.decode()}","rev":{rev},"done":true')
        return _Change(line, key, rev, _DONE, 0, 0.0)

    def _pending(
        self, record: _Record, run_at: float, error: str | None, extra: str = ""
    ) -> _Change:
        rev = self._index.next_rev(record.key)
        state = _DELAYED if run_at else _PENDING
        return record.change(
            state, rev, record.fields["attempts"], run_at, extra, error
        )

    def _dead(self, record: _Record, error: str | None, extra: str) -> _Change:
        rev = self._index.next_rev(record.key)
        leased_at = record.fields.get("leased_at", 0)
        extra = f'"leased_at":{leased_at},{extra}'
        return record.change(
            _DEAD, rev, record.fields["attempts"], record.fields["run_at"], extra, error
        )


class _Turn:
    """A thread's durable put among those of others."""

    def __init__(self, new: _New) -> None:
        self.new = new
        self.thread = threading.get_ident()
        self.jobs: list[Job] = []
        self.ticket: _Ticket | None = None
        self.error: LockTimeoutError | None = None
        self.leads = self.left = False
        self.gate: threading.Lock | None = None
        self.batch: list[_Turn] = []  # those that it leads
        self.gates: list[threading.Lock] = []  # theirs, while it wakes them


class _Turns:
    """Who leads, and who waits: for the leader's work, or to lead next."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[_Turn] = []
        self._leader: _Turn | None = None

    def enter(self, turn: _Turn) -> bool:
        """True: lead.  Else a leader has worked for this turn, or failed."""
        with self._lock:
            turn.left = False
            self._waiting.append(turn)
            # A signal handler's put must not wait for its own thread.
            if self._leader is None or self._leader.thread == turn.thread:
                turn.leads, self._leader = True, turn
                return True
            turn.gate = threading.Lock()
            turn.gate.acquire()
        turn.gate.acquire()
        return turn.leads

    def take(self, turn: _Turn) -> list[_Turn]:
        """All that wait, for the leader to work for."""
        with self._lock:
            turn.batch, self._waiting = self._waiting, []
            return turn.batch

    def leave(self, turn: _Turn) -> None:
        """End a turn, however it went; a leader hands on and wakes its batch."""
        if turn.left:
            return
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
            if self._leader is turn:
                self._leader = self._waiting[0] if self._waiting else None
                if self._leader is not None:
                    self._leader.leads = True
                    turn.batch.append(self._leader)
            turn.leads = False
            gates = [other.gate for other in turn.batch if other is not turn]
            turn.gates += [gate for gate in gates if gate is not None]
            turn.batch = []
        while turn.gates:  # last in, first out: the next leader first
            turn.gates.pop().release()
        turn.left = True


class _FileLeases(_FileCore):
    """Putting, leasing, and telling whose lease is over."""

    # Insert

    def insert(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        if len(new) == 1 and new[0].id is None and self._store.fsync:
            return self._insert_together(new[0])
        if all([item.id is None for item in new]):
            jobs, ticket = self._locked(self._insert_blind, new)
        else:
            jobs, ticket = self._transact(self._insert, new, exist_ok)
        if ticket is not None:
            self._commit(ticket)
        if isinstance(jobs, DuplicateJobError):
            try:
                raise jobs
            finally:
                del jobs, ticket  # or the traceback would keep the file open
        return cast("list[Job]", jobs)

    def _insert_together(self, new: _New) -> list[Job]:
        """One durable put: of the threads that put at the same moment, one
        appends and syncs for all.  Without this each would wait for the lock
        in turn, and a sync would serve half as many."""
        turns, turn = self._turns, _Turn(new)
        while turn.ticket is None:  # again if the leader failed before its append
            try:
                try:
                    if turns.enter(turn):
                        self._locked(self._insert_turns, turns.take(turn))
                        self._commit(turn.ticket)
                except LockTimeoutError as exc:
                    for other in turn.batch:  # they have waited as long
                        other.error = exc
                    raise
                finally:
                    turns.leave(turn)
            finally:
                turns.leave(turn)  # twice, for the same reason as in _locked
            if turn.error is not None:
                raise LockTimeoutError(str(turn.error), **vars(turn.error))
        self._commit(turn.ticket)  # done, or failed, or left to us by the leader
        return turn.jobs

    def _insert_turns(self, batch: Sequence[_Turn]) -> None:
        jobs, ticket = self._insert_blind([turn.new for turn in batch], many=False)
        for turn, job in zip(batch, jobs):
            turn.jobs, turn.ticket = [job], ticket

    def _insert_blind(
        self, new: Sequence[_New], many: bool = True
    ) -> tuple[list[Job], _Ticket | None]:
        """Fresh generated ids have no last rev to know (I3), so nothing is
        read: a put costs the same whatever the backlog."""
        index, data = self._index, self._store.files[0]
        if self._store.look(data) or index.dirty:
            index.discard()
            index.dirty = False
        jobs, changes = self._new_jobs(new, [1] * len(new), many)
        return jobs, self._append(data, changes, durable=True)

    def _insert(
        self, new: Sequence[_New], exist_ok: bool
    ) -> tuple[list[Job] | DuplicateJobError, _Ticket | None]:
        index, store = self._index, self._store
        revs = []
        for item in new:
            key = _key(item.id or "")
            entry = index.entries.get(key, _DONE)
            if entry & 7 != _DONE:
                # The answer rests on somebody's record: that is synced (I5).
                found = self._job(self._record(key, entry), entry)
                ticket = store.ticket(store.files[_FILE_OF[entry & 7]], ())
                return [found] if exist_ok else self._duplicate(found), ticket
            revs.append(index.next_rev(key))
        jobs, changes = self._new_jobs(new, revs)
        return jobs, self._append(store.files[0], changes, durable=True)

    def _new_jobs(
        self, new: Sequence[_New], revs: Sequence[int], many: bool = True
    ) -> tuple[list[Job], list[_Change]]:
        """Jobs and their lines; with `many` they are all or nothing."""
        now = time.time()
        created = f'"created_at":{now},'  # once: a float's repr takes 1 us
        jobs, changes = [], []
        last = len(new) - 1 if many else 0
        for i, (item, rev) in enumerate(zip(new, revs)):
            id, payload, text, priority, delay, at, retries = item
            if id is None:
                id = self._fresh()
            run_at = 0.0
            if at is not None:
                run_at = at if at > now else 0.0
            elif delay:
                run_at = now + delay
            lines = f'"lines":{last + 1},' if i == last and last else ""
            limit = "" if retries is None else f'"max_retries":{retries},'
            key = _quote(id)
            line = _sealed(
                f'{{"id":{key},"rev":{rev},"attempts":0,"priority":{priority},'
                f'"run_at":{run_at or 0},{lines}{created}{limit}'
                f'"payload":{text}',
                "+" if i < last else "",
            )
            state = _DELAYED if run_at else _PENDING
            fields = line, key[1:-1].encode(), rev, state, priority, run_at
            changes.append(_make_change(fields))
            if retries is None:
                retries = self._max_retries
            job = _JobFields(id, payload, "pending", 0, priority, now, run_at)
            job.max_retries = retries
            jobs.append(_job(job))
        return jobs, changes

    # Lease

    def lease(self, n: int, seconds: float, held: bool, again: bool) -> _Leased:
        news = self._watch.news
        jobs, lapses, due = self._transact(self._lease, n, seconds, held, again)
        if jobs:
            self._lost_races = 0, -math.inf
        return _Leased(jobs, lapses, (news, due))

    def _lease(
        self, n: int, seconds: float, held: bool, again: bool
    ) -> tuple[list[Job], list[_Lapse], float]:
        index = self._index
        now, clock = time.time(), time.monotonic()
        index.ripen(now)
        undecided: list[_Lapse] = []
        nothing = not (again or index.counts[_PENDING] or self._lapses_left)
        if nothing or clock - self._looked >= _TICK:
            self._looked = clock
            self._lapses_left, undecided = self._split(self._over(clock, now, math.inf))
        picks = self._pick(n, self._lapses_left)
        if not picks:
            if index.superseded > max(_IDLE_SLACK, index.live_bytes):
                self._try_compact()
            return [], undecided, self._index.next_due()
        holder = self._live_holder() if held else None
        changes, jobs = [], []
        for record, lapses, error in picks:
            token = self._fresh()
            stamp = _stamp(token, holder.number if holder else 0, clock, now, seconds)
            change = record.change(
                _INFLIGHT,
                index.next_rev(record.key),
                record.fields["attempts"] + 1,
                record.fields["run_at"],
                stamp + (f'"lapses":{lapses},' if lapses else ""),
                error,
            )
            changes.append(change)
            record.fields["last_error"] = error
            jobs.append(self._leased_job(record, token, now, now, seconds, holder))
        self._append(self._store.files[1], changes, spare=True)
        for job, change in zip(jobs, changes):
            index.tokens[change.key] = cast(str, job.token)
        return jobs, undecided, 0.0

    def _leased_job(
        self,
        record: _Record,
        token: str,
        leased_at: float,
        now: float,
        seconds: float,
        holder: _Holder | None,
        again: bool = False,
    ) -> Job:
        fields = record.fields
        retries = fields.get("max_retries")
        job = _JobFields(
            fields["id"],
            fields["payload"],
            "inflight",
            fields["attempts"] + (not again),
            fields["priority"],
            fields["created_at"],
            float(fields["run_at"]),
            leased_at,
            now + seconds,
            fields.get("last_error"),
            self._max_retries if retries is None else retries,
            token,
            holder,
        )
        return _job(job)

    def _pick(
        self, n: int, lapsed: collections.deque[_Lease]
    ) -> list[tuple[_Record, int, str | None]]:
        """Take up to n jobs: by priority; in one priority first those of dead
        holders, then in the order of the pending file."""
        picks: list[tuple[_Record, int, str | None]] = []
        while len(picks) < n:
            order = self._index.first_order()
            if lapsed and (order is None or lapsed[0].priority >= order.priority):
                lease = lapsed.popleft()
                entry = self._index.entries.get(lease.key, _DONE)
                if entry & 7 != _INFLIGHT or entry >> 3 & _REV_MASK != lease.rev:
                    continue  # another process was faster, or it was settled
                record = self._record(lease.key, entry)
                picks.append((record, lease.lapses + 1, self._reason(lease)))
                continue
            if order is None:
                break
            head = self._head(order)
            if head is not None:
                order.pop()
                get = head.fields.get
                picks.append((head, get("lapses", 0), get("last_error")))
        return picks

    def _head(self, order: _Order) -> _Record | None:
        """The job at the head of an order; None if that was left by a change."""
        record = self._waiting_at(order.peek())
        if record is None:
            order.pop()
        return record

    def _waiting_at(self, place: int) -> _Record | None:
        """The due job at a place of the pending file; None if it left that."""
        inode = cast(_Inode, self._store.files[0].inode)
        record = _read_record(inode.line(place))
        entry = self._index.entries.get(record.key)
        if entry is None:
            raise _StaleError  # each line that was read has an entry
        here = entry >> 64 == place and entry & 7 == _PENDING
        return record if here else None

    # Who is alive

    def _live_holder(self) -> _Holder | None:
        """This object's proof of life, on the lock file that is there now."""
        holder = self._holder
        if holder is None or holder.ident != self._lock.ident or holder.file.fd < 0:
            self._holder = holder = self._lock.new_holder()
        return holder

    def _leases(self) -> Iterable[_Lease]:
        """All leases; those not seen before are read from the file."""
        index = self._index
        for key in index.unlooked:
            entry = index.entries.get(key, _DONE)
            if entry & 7 == _INFLIGHT:
                index.leases[key] = _Lease.of(self._record(key, entry))
        index.unlooked.clear()
        return list(index.leases.values())

    def _over(self, clock: float, now: float, older_than: float) -> list[_Lease]:
        """Leases that ended unsettled; sets their reason."""
        alive: dict[int, bool] = {}
        mine = self._holder.number if self._holder else 0
        over = []
        for lease in self._leases():
            number = lease.holder
            if number and number not in alive:
                alive[number] = number == mine or self._lock.holds(number)
            reason = lease.over(alive.get(number), clock, now, older_than)
            if reason:
                over.append(lease._replace(reason=reason))
        entries = self._index.entries  # in the order of the file, for everybody
        return sorted(over, key=lambda lease: entries[lease.key] >> 64)

    def lapsed(self, older_than: float) -> list[_Lapse]:
        return cast("list[_Lapse]", self._transact(self._lapsed, older_than))

    def _lapsed(self, older_than: float) -> list[_Lapse]:
        over = self._over(time.monotonic(), time.time(), older_than)
        return [self._lapse(lease) for lease in over]

    def give_back(self, verdicts: Sequence[tuple[_Lapse, float | None, str]]) -> int:
        if not verdicts:
            return 0
        count, tickets = self._transact(self._give_back, verdicts)
        self._commit(*tickets)
        return cast(int, count)

    def _give_back(
        self, verdicts: Sequence[tuple[_Lapse, float | None, str]]
    ) -> tuple[int, list[_Ticket | None]]:
        index, now = self._index, time.time()
        moves: dict[int, list[_Change]] = {0: [], 2: []}
        for lapse, delay, error in verdicts:
            key = _key(lapse.id)
            entry = index.entries.get(key, _DONE)
            if entry & 7 != _INFLIGHT or entry >> 3 & _REV_MASK != lapse.rev:
                continue  # somebody else was faster
            record = self._record(key, entry)
            extra = f'"lapses":{lapse.lapses + 1},'
            if delay is None:
                moves[2].append(self._dead(record, error, extra))
            else:
                run_at = now + delay if delay else 0.0
                moves[0].append(self._pending(record, run_at, error, extra))
        return sum(map(len, moves.values())), self._append_moves(moves)

    def _append_moves(self, moves: dict[int, list[_Change]]) -> list[_Ticket | None]:
        return [
            self._append(self._store.files[file], changes, durable=True, spare=True)
            for file, changes in moves.items()
            if changes
        ]


class _FileMoves(_FileLeases):
    """Jobs on their way to another queue or from one; each step is synced,
    since the next lets the other side forget."""

    def hold(self, state: str, n: int, seconds: float, prefix: str) -> list[_Parcel]:
        parcels, ticket = self._transact(self._hold, state, n, seconds, prefix)
        self._commit(ticket)
        return cast("list[_Parcel]", parcels)

    def _hold(
        self, state: str, n: int, seconds: float, prefix: str
    ) -> tuple[list[_Parcel], _Ticket | None]:
        records = self._dead_records(n) if state == "dead" else self._waiting(n)
        tokens = [f"{prefix}{self._fresh()}-{state}" for _ in records]
        parcels = list(map(self._parcel, records, tokens))
        return parcels, self._lease_moved(records, parcels, seconds)

    def _waiting(self, n: int) -> list[_Record]:
        """In the order of delivery, then those not due, the earliest first."""
        index = self._index
        records = [record for record, _, _ in self._pick(n, collections.deque())]
        while len(records) < n and index.next_due() < math.inf:
            *_, key = heapq.heappop(index.delayed)
            records.append(self._record(key, index.entries[key]))
        return records

    def _dead_records(self, n: int) -> list[_Record]:
        return [self._record(key, entry) for entry, key in self._index.live(2)[:n]]

    def _parcel(self, record: _Record, token: str) -> _Parcel:
        fields, state = record.fields, _moved_state(token)
        return _Parcel(
            fields["id"],
            _encode(fields["payload"]),
            state,
            fields["attempts"],
            fields["priority"],
            float(fields["created_at"]),
            float(fields["run_at"]),
            fields.get("leased_at") if state == "dead" else None,
            fields.get("last_error"),
            fields.get("max_retries"),
            fields.get("lapses", 0),
            token,
        )

    def _lease_moved(
        self, records: Sequence[_Record], parcels: Sequence[_Parcel], seconds: float
    ) -> _Ticket | None:
        """Uncounted leases without a holder, under the parcels' tokens."""
        now, clock = time.time(), time.monotonic()
        changes = []
        for record, parcel in zip(records, parcels):
            stamp = _stamp(parcel.token, 0, clock, now, seconds, parcel.leased_at)
            if parcel.lapses:
                stamp += f'"lapses":{parcel.lapses},'
            rev = self._index.next_rev(record.key)
            attempts, run_at, error = parcel.attempts, parcel.run_at, parcel.last_error
            change = record.change(_INFLIGHT, rev, attempts, run_at, stamp, error)
            changes.append(change)
        if not changes:
            return None
        return self._append(self._store.files[1], changes, durable=True, spare=True)

    def held(self, prefix: str) -> list[_Parcel]:
        return cast("list[_Parcel]", self._transact(self._find_held, prefix))

    def _find_held(self, prefix: str) -> list[_Parcel]:
        records = [self._record(key, entry) for entry, key in self._index.live(1)]
        tokens = [str(record.fields.get("token", "")) for record in records]
        return [
            self._parcel(record, token)
            for record, token in zip(records, tokens)
            if token.startswith(prefix)
        ]

    def rehold(self, seconds: float, prefix: str) -> list[_Parcel]:
        parcels, ticket = self._transact(self._rehold, seconds, prefix)
        self._commit(ticket)
        return cast("list[_Parcel]", parcels)

    def _rehold(
        self, seconds: float, prefix: str
    ) -> tuple[list[_Parcel], _Ticket | None]:
        parcels = [
            parcel._replace(token=f"{prefix}{self._fresh()}-{parcel.state}")
            for parcel in self._find_held(prefix)
        ]
        keys = [_key(parcel.id) for parcel in parcels]
        records = [self._record(key, self._index.entries[key]) for key in keys]
        return parcels, self._lease_moved(records, parcels, seconds)

    def adopt(self, parcels: Sequence[_Parcel], seconds: float) -> None:
        self._commit(self._transact(self._adopt, parcels, seconds))

    def _adopt(self, parcels: Sequence[_Parcel], seconds: float) -> _Ticket | None:
        index, records = self._index, []
        for parcel in parcels:
            key = _key(parcel.id)
            entry = index.entries.get(key, _DONE)
            if entry & 7 != _DONE:
                raise self._duplicate(self._job(self._record(key, entry), entry))
            limit = ""
            if parcel.max_retries is not None:
                limit = f'"max_retries":{parcel.max_retries},'
            rest = f'"created_at":{parcel.created_at},{limit}"payload":{parcel.text}'
            records.append(_Record(key, 0, {"priority": parcel.priority}, rest))
        return self._lease_moved(records, parcels, seconds)

    def drop(self, parcels: Sequence[_Parcel]) -> set[str]:
        lost, ticket = self._transact(self._drop, parcels)
        self._commit(ticket)
        return cast("set[str]", lost)

    def _drop(self, parcels: Sequence[_Parcel]) -> tuple[set[str], _Ticket | None]:
        ours = [parcel for parcel in parcels if self._has_lease(parcel)]
        lost = {parcel.id for parcel in parcels} - {parcel.id for parcel in ours}
        changes = [self._tombstone(_key(parcel.id)) for parcel in ours]
        if not changes:
            return lost, None
        files = self._store.files
        return lost, self._append(files[1], changes, durable=True, spare=True)

    def _has_lease(self, parcel: _Parcel) -> bool:
        entry = self._index.entries.get(_key(parcel.id), _DONE)
        if entry & 7 != _INFLIGHT:
            return False
        token = self._record(_key(parcel.id), entry).fields.get("token")
        return bool(token == parcel.token)

    def let_go(self, parcels: Sequence[_Parcel]) -> None:
        self._commit(*self._transact(self._let_go, parcels))

    def _let_go(self, parcels: Sequence[_Parcel]) -> list[_Ticket | None]:
        moves: dict[int, list[_Change]] = {0: [], 2: []}
        for parcel in filter(self._has_lease, parcels):
            key = _key(parcel.id)
            record = self._record(key, self._index.entries[key])
            extra = f'"lapses":{parcel.lapses},' if parcel.lapses else ""
            if parcel.state == "dead":
                moves[2].append(self._dead(record, parcel.last_error, extra))
            else:
                run_at, error = parcel.run_at, parcel.last_error
                moves[0].append(self._pending(record, run_at, error, extra))
        return self._append_moves(moves)


class _FileEngine(_FileMoves):
    """The engine for a directory; see the module's docstring, I1 to I9."""

    # Settle, extend

    def settle(
        self,
        job: Job,
        outcome: str,
        delay: float = 0.0,
        error: str | None = None,
        counted: bool = True,
        connection: Any = None,
    ) -> None:
        settle = getattr(self, f"_settle_{outcome}")
        self._commit(self._transact(settle, job, delay, error, counted))

    def _settle_done(self, job: Job, *_: object) -> _Ticket | None:
        key = _key(job.id)
        self._check_lease(key, job)
        return self._append(
            self._store.files[1], [self._tombstone(key)], durable=True, spare=True
        )

    def _settle_pending(
        self, job: Job, delay: float, error: str | None, counted: bool
    ) -> _Ticket | None:
        key = _key(job.id)
        record = self._record(key, self._check_lease(key, job))
        extra = ""
        if not counted:
            record.fields["attempts"] -= 1
            error = record.fields.get("last_error")
            lapses = record.fields.get("lapses")
            extra = f'"lapses":{lapses},' if lapses else ""
        change = self._pending(
            record, time.time() + delay if delay else 0.0, error, extra
        )
        return self._append(self._store.files[0], [change], durable=True, spare=True)

    def _settle_dead(self, job: Job, _: float, error: str | None, *__: object) -> Any:
        key = _key(job.id)
        record = self._record(key, self._check_lease(key, job))
        change = self._dead(record, error, "")
        return self._append(self._store.files[2], [change], durable=True, spare=True)

    def _check_lease(self, key: bytes, job: Job) -> int:
        """The token is the fence (I6)."""
        entry = self._index.entries.get(key, _DONE)
        if entry & 7 == _INFLIGHT:
            token = self._index.tokens.get(key)
            if token is None:
                token = self._record(key, entry).fields.get("token")
            if token == job.token:
                return entry
        raise self._lost(job)

    def extend(self, job: Job, seconds: float) -> Job:
        return cast(Job, self._transact(self._extend, job, seconds))

    def _extend(self, job: Job, seconds: float) -> Job:
        index, key = self._index, _key(job.id)
        record = self._record(key, self._check_lease(key, job))
        fields, token = record.fields, cast(str, job.token)
        now = time.time()
        leased_at = fields.get("leased_at", now)
        holder = self._live_holder() if fields.get("holder") else None
        number = holder.number if holder else 0
        extra = _stamp(token, number, time.monotonic(), now, seconds, leased_at)
        if fields.get("lapses"):
            extra += f'"lapses":{fields["lapses"]},'
        change = record.change(
            _INFLIGHT,
            index.next_rev(key),
            fields["attempts"],
            fields["run_at"],
            extra,
            fields.get("last_error"),
        )
        self._append(self._store.files[1], [change], spare=True)
        index.tokens[key] = token
        return self._leased_job(record, token, leased_at, now, seconds, holder, True)

    # Looking, removing, replaying

    def records(self, state: str | None, limit: int | None) -> Iterator[Job]:
        snapshot = self._transact(self._snapshot, state, limit, write=False)
        return (
            self._view(self._reread(inode, entry), name)
            for inode, name, entries in snapshot
            for entry in entries
        )

    def _reread(self, inode: _Inode, entry: int) -> _Record:
        try:
            return _read_record(inode.read(entry >> 64, (entry >> 32 & _MASK) - 1))
        except _StaleError:
            raise QueueError(
                f"queue {self.path!r}: a file was changed in place while jobs() read"
                " it; call it again",
                path=self.path,
            ) from None

    def _snapshot(
        self, state: str | None, limit: int | None
    ) -> list[tuple[_Inode, str, list[int]]]:
        """Entries and open inodes: their bytes stay readable for ever."""
        snapshot = []
        for data, name in zip(self._store.files, _NAME_OF):
            if state in (None, name) and data.inode is not None:
                entries = [entry for entry, _ in self._index.live(data.file)][:limit]
                if limit is not None:
                    limit -= len(entries)
                snapshot.append((data.inode, name, entries))
        return snapshot

    def find(self, id: str) -> Job:
        return cast(Job, self._transact(self._find, id, write=False))

    def _find(self, id: str) -> Job:
        key = _key(id)
        entry = self._index.entries.get(key, _DONE)
        if entry & 7 == _DONE:
            raise self._unknown(id, "pending, inflight or dead")
        return self._job(self._record(key, entry), entry)

    def requeue(self, id: str | None) -> int:
        keys = None if id is None else [_key(id)]
        return self._change_many(self._requeue, keys, id)

    def _requeue(self, keys: list[bytes] | None, id: str | None) -> Iterator[_Change]:
        index = self._index
        if keys is None:
            keys = [key for _, key in index.live(2)]
        for key in keys:
            entry = index.entries.get(key, _DONE)
            if entry & 7 != _DEAD:  # only the one that was asked for can be so
                raise self._unknown(cast(str, id), "dead")
            record = self._record(key, entry)
            record.fields["attempts"] = 0
            yield self._pending(record, 0.0, record.fields.get("last_error"))

    def remove(self, id: str) -> bool:
        return bool(self._change_many(self._remove, [_key(id)]))

    def _remove(self, keys: list[bytes]) -> Iterator[_Change]:
        for key in keys:
            if self._index.entries.get(key, _DONE) & 7 != _DONE:
                yield self._tombstone(key)

    def purge(self, state: str, older_than: float) -> int:
        return self._change_many(self._purge, _NAME_OF.index(state), older_than)

    def _purge(self, file: int, older_than: float) -> Iterator[_Change]:
        now = time.time()
        for entry, key in self._index.live(file):
            if older_than:
                fields = self._record(key, entry).fields
                since = max(fields["created_at"], fields.get("leased_at", 0))
                if now - since < older_than:
                    continue
            yield self._tombstone(key)

    def _change_many(self, make: Callable[..., Iterator[_Change]], *args: Any) -> int:
        """Append many single changes, in writes of bounded size."""
        total, more = 0, True
        while more:
            count, tickets, more = self._transact(self._changes, make, args)
            self._commit(*tickets)
            total += count
        return total

    def _changes(
        self, make: Callable[..., Iterator[_Change]], args: Any
    ) -> tuple[int, list[_Ticket | None], bool]:
        """Whether there may be more: a stale index must not undo the count."""
        count = size = 0
        tickets: list[_Ticket | None] = []
        group: list[_Change] = []
        try:
            for change in make(*args):
                group.append(change)
                size += len(change.line)
                if size > _MIB:
                    tickets.append(self._append_group(group))
                    count += len(group)
                    group, size = [], 0
        except _StaleError:
            if not count:
                raise
            self._index.discard()
            return count, tickets, True
        if group:
            tickets.append(self._append_group(group))
        return count + len(group), tickets, False

    def _append_group(self, group: list[_Change]) -> _Ticket | None:
        file = _FILE_OF[group[0].state]
        return self._append(self._store.files[file], group, durable=True, spare=True)

    def names(self) -> list[str] | None:
        try:
            files = os.listdir(self.path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._refused(exc) from exc
        return sorted({found[1] for found in map(_OWN_FILE.match, files) if found})

    def counts(self) -> Stats:
        return cast(Stats, self._transact(self._counts, write=False))

    def _counts(self) -> Stats:
        index, store = self._index, self._store
        index.ripen(time.time())
        counts = index.counts
        return Stats(
            counts[_PENDING] + counts[_DELAYED],
            counts[_DELAYED],
            counts[_INFLIGHT],
            counts[_DEAD],
            store.count_damage() + len(index.damage),
            self._oldest(),
            None if index.next_due() == math.inf else index.next_due(),
            sum(data.size for data in store.files),
        )

    def _oldest(self) -> float | None:
        """Jobs never delayed stand in the order of their puts, so the first of
        each priority speaks for them; of the others each instant is known."""
        since = list(self._index.due.values())
        for order in self._index.orders.values():
            record = None
            while order.has_undelayed() and record is None:
                record = self._waiting_at(order.places[order.head])
                if record is None:
                    order.skip()
                else:
                    since.append(float(record.fields["created_at"]))
        return min(filter(None, since), default=None)

    # Waiting, verifying, closing

    def wait(self, seen: object, seconds: float) -> None:
        news, due = cast("tuple[int, float]", seen)
        seconds = min(seconds, max(0.0, due - time.time()))
        self._watch.wait(news, self._store.files[0], seconds)
        self._doze()

    def _doze(self) -> None:
        """Who was woken again and again for jobs that others took sleeps on
        for some milliseconds, or each put would cost every waiting process a
        look.  Who took the last one does not, nor anybody when puts are rare.
        """
        losses, since = self._lost_races
        losses = min(losses + 1, 4) if time.monotonic() - since < _RUSH else 0
        if losses:
            time.sleep(random.uniform(0, losses * _DOZE))
        self._lost_races = losses, time.monotonic()

    def verify(self) -> list[Damage]:
        files = self._locked(self._store.glimpse, write=False)
        found = []
        for name, inode, size in files:
            number = 0
            try:
                for number, line in enumerate(inode.all_lines(size), 1):
                    reason = _flaw(line, kept=name.endswith(".damaged"))
                    if reason:
                        found.append(Damage(name, number, reason))
            except _StaleError:
                found.append(Damage(name, number + 1, "shrank while it was read"))
        return found

    def close(self) -> None:
        if self._closed:
            return
        if self._pid != os.getpid():
            self.forked()
        try:
            if self._index.loaded and not self._store.readonly:
                self._transact(self._last_compact)
        except QueueError as exc:
            _log().warning("closing without compaction: %s", exc)
        try:
            with self._lock.threads():
                self._closed = True
                if self._holder is not None:
                    self._holder.file.close()
                self._store.reset()
                self._watch.close()
                self._lock.close()
        finally:
            self._lock.release()  # once more, for the same reason as in _locked

    def _last_compact(self) -> None:
        """Cheap, and empty files for a drained queue; a large backlog is not
        rewritten for a few superseded lines."""
        index = self._index
        if index.superseded > index.live_bytes:
            self._try_compact()


# Lines
# -----------------------------------------------------------------------------

# Patterns take a string whole, or a torn one would be searched anew from each
# of its escaped quotes.  Of a line the index needs what _TOP finds; what is
# spliced into a job's next line begins where _OWN ends.
_TEXT = r'[^"\\]*(?:\\.[^"\\]*)*'
_START = rf'\{{"id":"({_TEXT})","rev":(\d{{1,9}}),'
_ORDER = r'"attempts":\d+,"priority":(-?\d+),"run_at":([\d.e+-]+),'
_TOP = re.compile(
    rf'{_START}(?:{_ORDER}("lines":(\d+),)?|"done":)'.encode(),
)
_OWN = re.compile(
    rf'{_START}{_ORDER}(?:"(?:token|holder|clock|leased_at|renewed_at|lease_until'
    rf'|lapses|last_error|lines)":(?:[\d.e+-]+|"{_TEXT}"),)*'
    r'(?="created_at":[\d.e+-]+,)'
)
_FRESH = b'","rev":1,"attempts":0,"priority":0,"run_at":0,"'
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
_KNOWN = frozenset(
    "id rev attempts priority run_at token holder clock leased_at renewed_at"
    " lease_until lapses last_error lines created_at max_retries payload crc".split()
)


class _DamagedError(Exception):
    """A line that is no record; the message says why."""


class _StaleError(Exception):
    """A file does not hold what the index remembers."""


class _Change(NamedTuple):
    """A line to append, and what the index needs of it."""

    line: bytes
    key: bytes
    rev: int
    state: int
    priority: int
    run_at: float


_make_change: Any = functools.partial(tuple.__new__, _Change)


class _Record(NamedTuple):
    """A line of a data file, read to be shown or changed."""

    key: bytes
    rev: int
    fields: dict[str, Any]
    rest: str  # from "created_at" to the payload's end, spliced when it moves

    def change(
        self,
        state: int,
        rev: int,
        attempts: int,
        run_at: float,
        extra: str,
        error: str | None,
    ) -> _Change:
        """This job's next line."""
        note = "" if error is None else f'"last_error":{_quote(error)},'
        priority = self.fields["priority"]
        line = _sealed(
            f'{{"id":"{self.key.decode()}","rev":{rev},"attempts":{attempts},'
            f'"priority":{priority},"run_at":{run_at or 0},{extra}{note}{self.rest}'
        )
        return _Change(line, self.key, rev, state, priority, run_at)


class _Lease(NamedTuple):
    """What tells whether an inflight job's lease is over."""

    key: bytes
    id: str
    rev: int
    attempts: int
    priority: int
    max_retries: int | None
    lapses: int
    holder: int  # 0: no proof of life
    clock: float  # monotonic, at the last renewal
    renewed_at: float
    length: float
    reason: str = ""

    @classmethod
    def of(cls, record: _Record) -> _Lease:
        get = record.fields.get
        leased_at = get("leased_at", 0.0)
        renewed_at = get("renewed_at", leased_at)
        return cls(
            record.key,
            record.fields["id"],
            record.rev,
            record.fields["attempts"],
            record.fields["priority"],
            get("max_retries"),
            get("lapses", 0),
            get("holder", 0),
            get("clock", 0.0),
            renewed_at,
            get("lease_until", leased_at) - renewed_at,
        )

    def over(
        self, alive: bool | None, clock: float, now: float, older_than: float
    ) -> str:
        """Why the lease is over; "" while it is not.

        The monotonic clock is the whole host's and starts with it, as a live
        holder does, so jumps of the wall clock change nothing.  Without a
        holder only the wall clock is left; there a lease that would end later
        than now + its length was given before the clock was set back.
        """
        if alive is False:
            return "holder died"
        age = clock - self.clock if alive else now - self.renewed_at
        if age >= self.length or age < -1:
            return "lease ran out"
        return "not renewed" if age >= older_than else ""


def _stamp(
    token: str,
    holder: int,
    clock: float,
    now: float,
    seconds: float,
    leased_at: float | None = None,
) -> str:
    """The part of a line that makes it a lease."""
    renewed = "" if leased_at is None else f'"renewed_at":{now},'
    return (
        f'"token":"{token}","holder":{holder},"clock":{clock},'
        f'"leased_at":{now if leased_at is None else leased_at},{renewed}'
        f'"lease_until":{now + seconds},'
    )


def _key(id: str) -> bytes:
    """An id as it stands in a line; the index knows it by that."""
    return _quote(id)[1:-1].encode()


def _sealed(text: str, mark: str = "") -> bytes:
    """Close an open JSON object with its checksum and a newline.

    The mark is a plus on all lines of a put_many but the last.
    """
    body = text.encode()
    return b'%b,"crc":"%b%08x"}\n' % (body, mark.encode(), crc32(body))


def _body(line: bytes) -> bytes | None:
    """What a line's checksum covers; None if that is missing or wrong."""
    body, _, seal = line.rpartition(b',"crc":"')
    return body if seal.lstrip(b"+") == b'%08x"}' % crc32(body) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond a float")
    return number


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
# Several times the speed of loads() on short lines.
_scan: Any = json.JSONDecoder(parse_constant=_refuse_constant).scan_once  # type: ignore[attr-defined]


def _read_record(line: bytes) -> _Record:
    """Decode a line that the index holds for sound, or raise _StaleError."""
    try:
        return _own_record(line) or _any_record(line)
    except _DamagedError as exc:
        raise _StaleError from exc


def _own_record(line: bytes) -> _Record | None:
    """Decode a line of ours; None if it is not.

    A right checksum means that we wrote it: ASCII with the keys in our order,
    so that no value needs a check.  Whoever else writes checksums may have
    put other keys in other places.
    """
    body = _body(line)
    if body is None or not body.isascii():
        return None
    text = body.decode() + "}"
    head = _OWN.match(text)
    if head is None:
        return None
    try:
        fields, end = _scan(text, 0)
    except (StopIteration, ValueError):
        return None
    except RecursionError:
        if _shallow(text, _MAX_DEPTH + 1):
            raise  # the caller's own stack is nearly full
        return None
    id, rev = head[1], int(head[2])
    whole = end == len(text) and "payload" in fields and rev <= _MAX_REV
    if not whole or _quote(fields["id"])[1:-1] != id:
        return None
    return _Record(id.encode(), rev, fields, text[head.end() : -1])


def _any_record(line: bytes) -> _Record:
    """Decode any line, hand-written ones included, or raise _DamagedError."""
    line = line.removeprefix(_BOM).strip(_BLANKS)
    own = _own_record(line)
    if own is not None:
        return own
    sealed = _body(line) is not None
    try:
        text = line.decode("utf-8")
        if not _shallow(text, _MAX_DEPTH + 1):  # the record is one level itself
            raise _DamagedError(f"nested deeper than {_MAX_DEPTH} levels")
        fields = _decoder.decode(text)
    except UnicodeDecodeError as exc:
        raise _DamagedError("not UTF-8") from exc
    except ValueError as exc:
        raise _DamagedError(f"not strict JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise _DamagedError("not a JSON object")
    if "crc" in fields and not sealed:
        raise _DamagedError("checksum does not match")
    _fill(fields)
    key, rev = _key(fields["id"]), fields["rev"]
    if not sealed and rev > _MAX_REV // 2:
        # It must leave room for the revs of its job's further changes.
        raise _DamagedError(f"rev: by hand at most {_MAX_REV // 2}")
    top = _TOP.match(line)
    if top and sealed and top[1] != key:
        raise _DamagedError("two ids")
    names = [name for name in fields if name not in _KNOWN]
    names = ["created_at", "max_retries", *names, "payload"]
    rest = _dumps({name: fields[name] for name in names if name in fields})
    return _Record(key, rev, fields, rest[1:-1])


def _fill(fields: dict[str, Any]) -> None:
    """Check a foreign line's values; null is what is missing."""
    try:
        _job_id(fields["id"])
        if "done" not in fields and "payload" not in fields:
            raise _DamagedError("neither payload nor done")
        for names, check, *limits in _CHECKS:
            for name in names.split():
                if fields.get(name) is None:
                    fields.pop(name, None)
                else:
                    check(name, fields[name], *limits)
    except KeyError as exc:
        raise _DamagedError("no id") from exc
    except (TypeError, ValueError) as exc:
        raise _DamagedError(str(exc)) from exc
    for name, value in _DEFAULTS:
        fields.setdefault(name, value)


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what}: must be str, not {type(value).__name__}")


_CHECKS: tuple[tuple[Any, ...], ...] = (
    ("rev", _integer, 1, _MAX_REV),
    ("attempts max_retries holder lapses", _integer, 0, 2**53),
    ("priority", _integer, -_MAX_PRIORITY - 1, _MAX_PRIORITY),
    ("created_at clock leased_at renewed_at", _number, 0, _MAX_SECONDS),
    ("run_at lease_until", _number, 0, 2 * _MAX_SECONDS),
    ("token last_error", _check_text),
)
_DEFAULTS = [("rev", 1)] + [
    (name, 0) for name in ("attempts", "priority", "run_at", "created_at")
]


def _flaw(line: bytes, kept: bool = False) -> str:
    """What is wrong with a line of a file, or ""."""
    try:
        if kept or line.strip(_BLANKS):
            _any_record(line)
    except _DamagedError as exc:
        if kept:
            return f"set aside: {exc}"
        return str(exc) if line.endswith(b"\n") else f"torn write: {exc}"
    return "set aside; sound by itself, of an unfinished write" if kept else ""


def _is_closed(line: bytes) -> bool:
    """Whether a line is sound and ends its write."""
    return not _is_open(line) and not _flaw(line)


def _is_open(line: bytes) -> bool:
    """Whether a line of a put_many expects more of the same write."""
    return line.rstrip(_BLANKS)[-19:-10] == b',"crc":"+'


def _plain(line: bytes) -> bytes:
    """A line without the marks of its write, which count at the tail only."""
    line = line.removeprefix(_BOM)
    if _is_open(line):
        line = line.rstrip(_BLANKS)
        return line[:-11] + line[-10:] + b"\n"  # less the plus
    top = _TOP.match(line) if b'"lines":' in line else None
    body = _body(line[:-1])
    if top and top[5] and body:
        return _sealed((body[: top.start(5)] + body[top.end(5) :]).decode())
    return line


# Index
# -----------------------------------------------------------------------------
# An entry is one int: place << 64 | length << 32 | rev << 3 | state, the length
# with its newline.  Per waiting job that is the id as bytes, the int, a dict
# slot and eight bytes of order: under 200 bytes, whatever the payload.

_MASK = 2**32 - 1
_REV_MASK = 2**29 - 1


def _pack(place: int, length: int, rev: int, state: int) -> int:
    return place << 64 | length << 32 | rev << 3 | state


def _unpack(entry: int) -> tuple[int, int, int, int]:
    """Place, length, rev, state."""
    return entry >> 64, entry >> 32 & _MASK, entry >> 3 & _REV_MASK, entry & 7


def _rev_of(entry: int) -> int:
    return entry >> 3 & _REV_MASK


class _Order:
    """The pending jobs of one priority, by place in the file.

    Places come in rising, so an array and a head do; jobs that were delayed
    join from a heap.  A place that its job has left stays until it comes to
    the head.
    """

    __slots__ = ("priority", "places", "late", "head")

    def __init__(self, priority: int, places: Iterable[int] = ()) -> None:
        self.priority = priority
        self.places = array("Q", places)
        self.late: list[int] = []
        self.head = 0

    def __bool__(self) -> bool:
        return self.head < len(self.places) or bool(self.late)

    def has_undelayed(self) -> bool:
        return self.head < len(self.places)

    def peek(self) -> int:
        """The first place; the order must not be empty."""
        if self.head < len(self.places):
            place = self.places[self.head]
            if not self.late or place < self.late[0]:
                return place
        return self.late[0]

    def pop(self) -> None:
        if self.late and self.peek() == self.late[0]:
            heapq.heappop(self.late)
        else:
            self.skip()

    def skip(self) -> None:
        """Leave out the first of those never delayed."""
        self.head += 1
        if self.head > 4096 and self.head * 2 > len(self.places):
            del self.places[: self.head]
            self.head = 0

    def move(self, moved: dict[int, int]) -> None:
        """Follow the jobs that are still here to their new places."""
        places = self.places[self.head :]
        self.places = array("Q", [moved[p] for p in places if p in moved])
        self.late = sorted(moved[p] for p in self.late if p in moved)
        self.head = 0


class _Index:
    """What the three files say, as a cache that may be discarded any time."""

    def __init__(self) -> None:
        self.burnt: dict[bytes, int] = {}
        self.careful = False  # a checksum proved not to be enough
        self.discard()
        self.dirty = False

    def discard(self) -> None:
        """Forget all but the revs that failed writes have used up.

        It stays dirty until whoever reads it anew, or leaves it empty, is done.
        """
        self.dirty = True
        self.loaded = False  # whether anything was ever read
        self.read = [0, 0, 0]  # how far each file is indexed
        self.marks = [b"", b"", b""]  # the last bytes before that
        self.live_of = [0, 0, 0]  # bytes of live records
        self.counts = [0] * 7  # by state
        self.entries: dict[bytes, int] = {}
        self.orders: dict[int, _Order] = {}
        self._ranks: list[int] = []  # a heap of their priorities, negated
        self.delayed: list[tuple[float, int, int, bytes]] = []
        self.due: dict[bytes, float] = {}  # since when: those that were delayed
        self.tokens: dict[bytes, str] = {}  # of leases given by this object
        self.leases: dict[bytes, _Lease] = {}
        self.unlooked: list[bytes] = []  # inflight, not yet in leases
        self.damage: list[tuple[int, int, int]] = []  # file, place, length

    @property
    def live_bytes(self) -> int:
        return self.live_of[0] + self.live_of[1] + self.live_of[2]

    @property
    def superseded(self) -> int:
        read = self.read
        return read[0] + read[1] + read[2] - self.live_bytes

    def next_rev(self, key: bytes) -> int:
        """A rev never used before (I3)."""
        rev = _rev_of(self.entries.get(key, 0))
        return max(rev, self.burnt.get(key, 0)) + 1

    def burn(self, changes: Sequence[_Change]) -> None:
        """A failed write may come back in part: its revs are used up."""
        if self.loaded:  # else only generated ids, which are never put again
            for change in changes:
                self.burnt[change.key] = self.next_rev(change.key)

    # Reading

    def load(self, file: int, block: bytes, now: float) -> None:
        """Index whole lines that follow what was read of a file."""
        lines = block[:-1].split(b"\n")
        if file == 0 and not self.careful:
            self._load_pending(lines, now)
        else:
            place = self.read[file]
            for line in lines:
                self._load_line(file, line, place, now)
                place += len(line) + 1
        self.read[file] += len(block)
        self.marks[file] = block[-32:]

    def _load_pending(self, lines: Sequence[bytes], now: float) -> None:
        """The loop over a large backlog: usual lines need no regular
        expression, which makes it twice as fast."""
        entries, place = self.entries, self.read[0]
        append = self._order(0).places.append
        fresh = size = 0
        for line in lines:
            end, length = line.find(b'"', 7), len(line) + 1
            body, _, seal = line.rpartition(b',"crc":"')
            if (
                line.startswith(_FRESH, end)
                and b'%08x"}' % crc32(body) == seal.lstrip(b"+")
                and line[7:end] not in entries
            ):
                entries[line[7:end]] = place << 64 | length << 32 | 8
                append(place)
                fresh += 1
                size += length
            else:
                self._load_line(0, line, place, now)
            place += length
        self.counts[_PENDING] += fresh
        self.live_of[0] += size

    def _load_line(self, file: int, line: bytes, place: int, now: float) -> None:
        top = None if self.careful else _TOP.match(line)
        if top and int(top[2]) <= _MAX_REV and _body(line) is not None:
            key, rev = top[1], int(top[2])
            priority, run_at = int(top[3] or 0), float(top[4] or 0)
            state = _STATE_OF[file] if top[3] else _DONE
        else:
            try:
                record = _any_record(line)
            except _DamagedError:
                if line.strip(_BLANKS):
                    self.damage.append((file, place, len(line)))
                return
            key, rev, fields, _ = record
            priority, run_at = fields["priority"], fields["run_at"]
            state = _DONE if "done" in fields else _STATE_OF[file]
        if state == _PENDING and run_at > now:
            state = _DELAYED
        self._apply(key, rev, state, place, len(line) + 1, priority, run_at)

    def learn(self, file: int, changes: Sequence[_Change], block: bytes) -> None:
        """Index lines just written to a file that was read to its end."""
        dirty, self.dirty = self.dirty, True
        place = self.read[file]
        for line, key, rev, state, priority, run_at in changes:
            self._apply(key, rev, state, place, len(line), priority, run_at)
            place += len(line)
        self.read[file] = place
        self.marks[file] = block[-32:]
        self.dirty = dirty

    def _apply(
        self,
        key: bytes,
        rev: int,
        state: int,
        place: int,
        length: int,
        priority: int,
        run_at: float,
    ) -> None:
        """The highest rev wins; of equal ones the greater state, then the
        earlier line (I3)."""
        old = self.entries.get(key)
        if old is not None:
            old_place, old_length, old_rev, old_state = _unpack(old)
            if rev < old_rev or (rev == old_rev and state | 1 <= old_state | 1):
                return
            self.counts[old_state] -= 1
            if old_state != _DONE:
                self.live_of[_FILE_OF[old_state]] -= old_length
            if old_state == _INFLIGHT:
                self.tokens.pop(key, None)
                self.leases.pop(key, None)
            elif old_state == _PENDING and state == _INFLIGHT:
                order = self.orders.get(priority)
                if order and order.peek() == old_place:
                    order.pop()  # taken by another process: no line to read
            self.due.pop(key, None)
        self.entries[key] = _pack(place, length, rev, state)
        self.counts[state] += 1
        if state == _DONE:
            return
        self.live_of[_FILE_OF[state]] += length
        if state == _PENDING:
            self._join(key, place, priority, run_at)
        elif state == _DELAYED:
            heapq.heappush(self.delayed, (run_at, place, priority, key))
        elif state == _INFLIGHT:
            self.unlooked.append(key)

    # Asking

    def _order(self, priority: int) -> _Order:
        order = self.orders.get(priority)
        if order is None:
            order = self.orders[priority] = _Order(priority)
            heapq.heappush(self._ranks, -priority)
        return order

    def first_order(self) -> _Order | None:
        """The jobs of the highest priority that has any."""
        while self._ranks:
            order = self.orders[-self._ranks[0]]
            if order:
                return order
            del self.orders[-heapq.heappop(self._ranks)]
        return None

    def ripen(self, now: float) -> None:
        """Let delayed jobs that are due join the others by their place."""
        while self.next_due() <= now:
            run_at, place, priority, key = heapq.heappop(self.delayed)
            self._join(key, place, priority, run_at)
            self.entries[key] -= _DELAYED - _PENDING
            self.counts[_DELAYED] -= 1
            self.counts[_PENDING] += 1

    def _join(self, key: bytes, place: int, priority: int, run_at: float) -> None:
        order = self._order(priority)
        if run_at:
            heapq.heappush(order.late, place)
            self.due[key] = run_at
        else:
            order.places.append(place)

    def _is_delayed(self, item: tuple[float, int, int, bytes]) -> bool:
        _, seen, _, key = item
        place, _, _, state = _unpack(self.entries.get(key, _DONE))
        return state == _DELAYED and place == seen

    def next_due(self) -> float:
        """When the next delayed job is due, or infinity."""
        while self.delayed and not self._is_delayed(self.delayed[0]):
            heapq.heappop(self.delayed)
        return self.delayed[0][0] if self.delayed else math.inf

    def live(self, file: int) -> list[tuple[int, bytes]]:
        """Entries of a file's live records with their keys, by place."""
        if not self.live_of[file]:
            return []
        states = {state for state, at in enumerate(_FILE_OF) if at == file} - {_DONE}
        return sorted(
            (entry, key) for key, entry in self.entries.items() if entry & 7 in states
        )

    # Compaction

    def rewritten(
        self, file: int, read: Callable[[int, int], bytes]
    ) -> Iterator[bytes]:
        """Yield a file's live lines in blocks; move() when they are in place.

        The lines lose the marks of their write: at the tail those would make
        a whole put_many of what is left of it.
        """
        self._live = self.live(file)
        self._new: list[int] = []  # their entries in the file that is written
        place = 0
        for group in _adjacent([entry for entry, _ in self._live]):
            start, last = group[0] >> 64, group[-1]
            block = read(start, sum(_unpack(last)[:2]) - start)
            if b'"crc":"+' in block or b'"lines":' in block or block[:3] == _BOM:
                lines = [_plain(line + b"\n") for line in block[:-1].split(b"\n")]
                block, at = b"".join(lines), place
                for entry, line in zip(group, lines):
                    self._new.append(_pack(at, len(line), *_unpack(entry)[2:]))
                    at += len(line)
            else:
                shift = place - start << 64
                self._new += [entry + shift for entry in group]
            place += len(block)
            yield block

    def move(self, file: int, size: int, mark: bytes) -> None:
        """Follow the lines of rewritten() to their new places."""
        if file == 0:
            self._move_orders()
        self.entries.update(zip([key for _, key in self._live], self._new))
        self.read[file] = self.live_of[file] = size
        self.marks[file] = mark
        self._live, self._new = [], []

    def _move_orders(self) -> None:
        old = [entry >> 64 for entry, _ in self._live]
        moved = dict(zip(old, [entry >> 64 for entry in self._new]))
        orders, self.orders = self.orders, {}
        for priority, order in orders.items():
            order.move(moved)
            if order:
                self.orders[priority] = order
        self._ranks = sorted([-priority for priority in self.orders])
        self.delayed = [
            (run_at, moved[place], priority, key)
            for run_at, place, priority, key in filter(self._is_delayed, self.delayed)
        ]
        heapq.heapify(self.delayed)

    def drop_done(self) -> None:
        """Forget finished jobs: no file has a line of theirs any more."""
        live = [item for item in self.entries.items() if item[1] & 7 != _DONE]
        self.entries = dict(live)
        self.counts[_DONE] = 0
        self.burnt.clear()


def _adjacent(entries: list[int]) -> Iterator[list[int]]:
    """Group lines that stand side by side, up to 1 MiB or one line."""
    places = [entry >> 64 for entry in entries]
    ends = [place + (entry >> 32 & _MASK) for place, entry in zip(places, entries)]
    gaps = map(operator.ne, ends, places[1:])
    first = 0
    for last in [*(i for i, gap in enumerate(gaps, 1) if gap), len(entries)]:
        while first < last:
            upto = bisect.bisect_left(places, places[first] + _MIB, first + 1, last)
            yield entries[first:upto]
            first = upto


# Store: the files, their tails, and what of them is on disk
# -----------------------------------------------------------------------------

_CHUNK = _MIB
_APPEND = os.O_RDWR | os.O_APPEND
_OPEN_SAFELY = sum(
    getattr(os, flag, 0)
    for flag in "O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_BINARY O_NOINHERIT".split()
)
_WINDOWS = os.name == "nt"
_FULL = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)
_NO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
_ADVICE = {
    errno.ENOSPC: "free some space; nothing is lost",
    errno.ELOOP: "a symlink is refused in place of a queue's file",
    errno.ENXIO: "only a regular file can be a queue's file",
    errno.EISDIR: "only a regular file can be a queue's file",
    errno.ENOTDIR: "a file is in place of the queue's directory; name another path",
    errno.EACCES: "check the owner and mode of the directory and its files",
    errno.EPERM: "check the owner and mode of the directory and its files",
    errno.EROFS: "jobs(), find(), stats() and verify() still work",
    errno.EMFILE: "this process has too many open files",
    errno.ENFILE: "the system has too many open files",
    errno.EIO: "the disk failed; see the system's log",
}


class _Fd:
    """A descriptor that closes itself; none survives into a forked child."""

    __slots__ = ("fd", "_own", "_close", "__weakref__")

    def __init__(self, path: str, flags: int, mode: int = 0o666) -> None:
        self.fd = -1
        self._own: list[int] = []
        self._close = os.close
        with _FORKING:
            self._own.append(os.open(path, flags, mode))
            _FDS.add(self)
        self.fd = self._own[0]

    @classmethod
    def adopt(cls, fd: int) -> _Fd:
        """Own a descriptor that something else has just opened."""
        self = cls.__new__(cls)
        self.fd, self._own, self._close = fd, [fd], os.close
        _FDS.add(self)
        return self

    def close(self) -> None:
        self.fd = -1
        while self._own:  # taken out and closed in one line: no Ctrl-C between
            try:
                self._close(self._own.pop())
            except OSError:
                pass  # it is closed all the same, and nothing was left to write

    __del__ = close


def _open_file(path: str, flags: int, mode: int = 0o666) -> _Fd:
    """Open a regular file; anything else in its place is refused."""
    file = _Fd(path, flags | _OPEN_SAFELY, mode)
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        raise OSError(errno.ENXIO, "not a regular file", path)
    return file


_FDS: weakref.WeakSet[_Fd] = weakref.WeakSet()
_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
_FORKING = threading.RLock()  # no fork between a descriptor's birth and its entry


def _after_fork_in_child() -> None:
    """Close what was inherited, and never unlock it: a lock belongs to the
    open file that parent and child share."""
    _FORKING.release()
    for file in list(_FDS):
        file.close()
    for engine in list(_ENGINES):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(  # methods in C, so that no Ctrl-C falls into them
        before=_FORKING.acquire,
        after_in_parent=_FORKING.release,
        after_in_child=_after_fork_in_child,
    )


_ident: Callable[[Any], tuple[int, int]] = operator.attrgetter("st_dev", "st_ino")


class _Inode:
    """An open data file, and which of its writes are known to be on disk."""

    def __init__(self, path: str, flags: int) -> None:
        self.file = _open_file(path, flags)
        self.path = path
        self.ident = _ident(os.fstat(self.file.fd))
        self.checked = False  # whether the last write's lines were counted
        self.unended = -1  # where a newline is missing that may not be written
        self.named = False  # whether the name is durable
        self.cond = threading.Condition()
        self.issued = self.synced = 0  # numbers of tickets
        self.unsynced: list[tuple[int, Sequence[_Change]]] = []
        self.leader = 0  # the thread that syncs for all
        self.failed = False

    @property
    def fd(self) -> int:
        """Opened anew where Windows made us close it (see _Store.let_go)."""
        if self.file.fd < 0:
            self.file = self._again()
        return self.file.fd

    def _again(self) -> _Fd:
        file = _open_file(self.path, _APPEND)
        if _ident(os.fstat(file.fd)) != self.ident:
            raise _StaleError
        return file

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def sync(self) -> None:
        """Without the lock; so on Windows not by the descriptor that whoever
        holds the lock closes, and none is left open."""
        try:
            file = self._again() if _WINDOWS else self.file
            _sync(file.fd)
        except _StaleError:
            pass  # replaced by a compaction, which syncs what it drops or copies

    def read(self, place: int, length: int) -> bytes:
        """Exactly these bytes, or _StaleError."""
        block = self._some(place, length)
        while len(block) < length:
            more = self._some(place + len(block), length - len(block))
            if not more:
                raise _StaleError
            block += more
        return block

    def _some(self, place: int, length: int) -> bytes:
        block = _pread(self.fd, length, place)
        missing = len(block) < length and place + len(block) == self.unended
        return block + b"\n" if missing else block

    def line(self, place: int) -> bytes:
        """The line at a place, without its newline."""
        size = 1024
        while True:
            block = self._some(place, size)
            end = block.find(b"\n")
            if end >= 0:
                return block[:end]
            if len(block) < size:
                raise _StaleError
            size *= 8

    def lines(self, start: int, known: int, upto: int) -> bytes:
        """Whole lines: about a chunk, more if one line is longer."""
        size = _CHUNK
        while True:
            block = self.read(start, min(size, upto - start))
            end = block.rfind(b"\n") + 1
            if end > known:
                return block[:end]
            if size >= upto - start:
                raise _StaleError
            size *= 8

    def all_lines(self, size: int) -> Iterator[bytes]:
        """Every line with its newline; the last may lack it."""
        begun: list[bytes] = []  # parts of a line, joined once
        for place in range(0, size, _CHUNK):
            block = self.read(place, min(_CHUNK, size - place))
            first, *others = block.split(b"\n")
            begun.append(first)
            for line in others:
                yield b"".join(begun) + b"\n"
                begun = [line]
        if any(begun):
            yield b"".join(begun)

    def lines_back(self, size: int) -> Iterator[tuple[int, bytes]]:
        """Every line and its place, from the end of the file backwards."""
        block, place, end = b"", size, 0
        while True:
            cut = block.rfind(b"\n", 0, max(0, end - 1)) + 1
            if cut:
                yield place + cut, block[cut:end]
                end = cut
            elif place == 0:
                if end:
                    yield 0, block[:end]
                return
            else:
                more = min(place, max(4096, len(block)))
                place -= more
                block = self.read(place, more) + block[:end]
                end = len(block)

    def sound_end(self, size: int) -> tuple[int, int]:
        """Where a file should end, and the length of a sound last line that
        lacks its newline (or 0)."""
        if size == 0:
            return 0, 0
        place, last = next(self.lines_back(size))
        ended = last.endswith(b"\n")
        if not ended or _is_open(last) or (b"\0" in last and not self.checked):
            whole = not ended and _is_closed(last) and self._is_complete(place, last)
        else:
            whole = self.checked or self._is_complete(place, last)
        if whole:
            return size, 0 if ended else len(last)
        for earlier, line in self.lines_back(place):  # of the same write
            if _is_closed(line):
                break
            place = earlier
        return place, 0

    def _is_complete(self, place: int, last: bytes) -> bool:
        """Whether all lines that a closing line counts stand before it; a
        power cut can leave a hole in a write whose end is whole."""
        top = _TOP.match(last)
        if not top or not top[5] or _body(last.rstrip(b"\n")) is None:
            return True  # not of a put_many, or edited by hand
        missing = int(top[6]) - 1
        for _, line in self.lines_back(place):
            if not missing or b"\0" in line or _is_closed(line):
                break
            missing -= 1
        return not missing


class _Data:
    """One of the three data files, and what is known of it."""

    def __init__(self, file: int, path: str) -> None:
        self.file = file
        self.path = path
        self.temp = path + ".tmp"
        self.inode: _Inode | None = None
        self.size = 0
        self.decided = -1  # the size up to which the tail is decided

    def bytes_at(self, place: int, length: int) -> bytes:
        return cast(_Inode, self.inode).read(place, length)


class _Ticket(NamedTuple):
    """A claim to have a write on disk."""

    inode: _Inode
    number: int


class _Store:
    """The data files of one queue and NAME.damaged.

    Everything here but commit() runs under both locks.
    """

    def __init__(self, path: str, name: str, fsync: bool, lock: _FileLock) -> None:
        self.path = path
        self.fsync = fsync
        self.damaged = os.path.join(path, f"{name}.damaged")
        self._name = name
        self._lock = lock
        self.reset()

    def reset(self) -> None:
        base = os.path.join(self.path, self._name)
        self.files = [
            _Data(file, f"{base}.{state}.jsonl") for file, state in enumerate(_NAME_OF)
        ]
        self.readonly = False
        self._swept: object = None
        self._reachable = False
        self.sick: list[_Inode] = []
        self._void: set[bytes] = set()
        self._damage_seen = (-1, 0)
        self._kept_in_doubt = False

    def enter(self, write: bool) -> bool:
        """Begin an operation; True if the index must be discarded."""
        self._inspecting = not write
        changed = write and self.readonly
        if changed:
            self.reset()
        if self._lock.readonly:
            self.readonly = True
        elif self._swept != self._lock.ident:
            for data in [*self.files, _Data(-1, self.damaged)]:
                _unlink(data.temp)
            self._swept = self._lock.ident
        if self.sick:
            self.rescue()
            return True
        return changed

    def look(self, data: _Data) -> bool:
        """Ask the kernel about a file; True if the index must be discarded.

        The path must still name the file held open (I8), and its tail must
        be decided (I7).
        """
        inode, replaced = data.inode, False
        try:
            info = os.lstat(data.path)
        except FileNotFoundError:
            info = None
        if info is None or inode is None or _ident(info) != inode.ident:
            data.inode, data.size, data.decided = self._open(data), 0, 0
            if data.inode is None:
                return inode is not None
            inode, replaced = data.inode, True  # what was read before is void
            info = os.fstat(inode.fd)
        data.size = info.st_size
        if data.size != data.decided or not inode.checked:
            replaced = self._decide_tail(data, inode) or replaced
        return replaced

    def _open(self, data: _Data) -> _Inode | None:
        """Open a data file, made if need be; None if only looking at none."""
        if not self.readonly:
            try:
                return _Inode(data.path, _APPEND | os.O_CREAT)
            except OSError as exc:
                if exc.errno not in _NO_WRITE or not self._inspecting:
                    raise
                self.readonly = True
        try:
            return _Inode(data.path, os.O_RDONLY)
        except FileNotFoundError:
            return None

    def let_go(self) -> None:
        """Close the data files before the lock is released: on Windows an
        open file cannot be replaced by the next holder of the lock."""
        for data in self.files:
            if data.inode is not None:
                data.inode.file.close()

    # The tail

    def _decide_tail(self, data: _Data, inode: _Inode) -> bool:
        """Decide, once, how a file ends (I7); True if anything was cut.

        A sound last line that only lacks its newline gets it.  Any other
        unfinished line, and the lines of an unfinished write before it, are
        cut off and kept in NAME.damaged.
        """
        size = data.size
        data.decided = -1
        good, unended = inode.sound_end(size)
        if self.readonly:
            inode.unended = good if unended else -1
            data.size = good + bool(unended)
        elif unended:
            self.append(data, b"\n", spare=True)
        elif good < size:
            self._keep(inode.read(good, size - good))
            os.ftruncate(inode.fd, good)
            data.size = good
        inode.checked = not self.readonly  # what is not cut is met again
        data.decided = data.size
        return good < size

    # Writing

    def append(self, data: _Data, block: bytes, spare: bool) -> None:
        """Append a block whole, or leave the file as it was and raise (I5)."""
        fd = cast(_Inode, data.inode).fd
        try:
            _write(fd, block)
        except OSError as exc:
            data.decided = -1  # if cutting back fails too, the tail rule does it
            try:
                os.ftruncate(fd, data.size)
                data.decided = data.size
            except OSError:
                spare = False
            if not spare or exc.errno not in _FULL or not self._lock.spend_ballast():
                exc.filename = exc.filename or data.path
                raise
            self.append(data, block, False)
            return
        data.size += len(block)
        data.decided = data.size

    def rewrite(self, data: _Data, blocks: Iterable[bytes]) -> bytes:
        """Replace a file's content: temp file, fsync, rename.

        Its name is not durable until the directory is synced.  Returns the
        last bytes; raises only if nothing was replaced.
        """
        old = cast(_Inode, data.inode)
        _unlink(data.temp)
        try:
            inode = _Inode(data.temp, _APPEND | os.O_CREAT | os.O_EXCL)
            inode.path, inode.checked = data.path, True
            _keep_mode(inode.fd, old.fd)
            size, block = 0, b""
            for block in blocks:
                _write(inode.fd, block)
                size += len(block)
            if size:
                _sync(inode.fd)
            _swap(data, old, inode)
        except BaseException:
            _unlink(data.temp)
            raise
        data.inode, data.size, data.decided = inode, size, size
        return block[-32:]

    # Damage

    def keep_damage(self, damage: Sequence[tuple[int, int, int]]) -> None:
        lines = [self.files[file].bytes_at(*span) for file, *span in damage]
        self._keep(b"\n".join(lines))

    def _keep(self, raw: bytes) -> None:
        """Append damaged bytes to NAME.damaged, durably."""
        kept = _Data(-1, self.damaged)
        kept.inode = _Inode(self.damaged, _APPEND | os.O_CREAT)
        kept.size = kept.inode.size()
        if self._kept_in_doubt:  # as for the data files (I9)
            self.rewrite(kept, kept.inode.all_lines(kept.size))
        self._kept_in_doubt = True
        self.append(kept, raw if raw.endswith(b"\n") else raw + b"\n", spare=True)
        _sync(kept.inode.fd)
        self.sync_directory()
        self._kept_in_doubt = False

    def count_damage(self) -> int:
        """The lines of NAME.damaged."""
        try:
            size = os.lstat(self.damaged).st_size
            if size != self._damage_seen[0]:
                inode = _Inode(self.damaged, os.O_RDONLY)
                self._damage_seen = size, sum(1 for _ in inode.all_lines(size))
        except FileNotFoundError:
            return 0
        return self._damage_seen[1]

    # What is on disk

    def ticket(self, data: _Data, changes: Sequence[_Change]) -> _Ticket | None:
        """Enter what was just appended for the next sync of its file."""
        if not self.fsync:
            return None
        inode = cast(_Inode, data.inode)
        with inode.cond:
            inode.issued += 1
            inode.unsynced.append((inode.issued, changes))
            return _Ticket(inode, inode.issued)

    def commit(self, *tickets: _Ticket | None) -> None:
        """Wait until the tickets' writes are on disk; holds no lock.

        Of the threads that wait, one syncs for all that have appended by
        then (group commit).  A failed sync fails every write not yet synced.
        """
        for ticket in tickets:
            if ticket is not None:
                inode, number = ticket
                while inode.synced < number and not self._committed(inode, number):
                    pass

    def _committed(self, inode: _Inode, number: int) -> bool:
        """Wait for another thread's sync, or do one for all; True when this
        ticket is on disk."""
        me, leads = threading.get_ident(), False
        try:
            with inode.cond:
                # A signal handler may put while its own thread is the leader.
                while inode.synced < number and inode.leader not in (0, me):
                    inode.cond.wait()
                if inode.synced >= number:
                    return True
                if inode.failed:
                    raise QueueError(
                        f"queue {self.path!r}: the disk failed to sync, so nothing was"
                        " acknowledged; the queue repairs its files at the next call",
                        path=self.path,
                        errno=errno.EIO,
                    )
                leads, inode.leader = not inode.leader, me
            self._sync_inode(inode)
            return False
        finally:
            if leads:
                with inode.cond:
                    inode.leader = 0
                    inode.cond.notify_all()

    def _sync_inode(self, inode: _Inode) -> None:
        """Sync a file and its name, for all tickets issued so far."""
        target = inode.issued
        try:
            inode.sync()
            if not inode.named:
                self.sync_directory()
                inode.named = True
        except OSError as exc:
            with inode.cond:
                inode.failed = True
            self.sick.append(inode)
            _log().error("sync of queue %r failed: %s", self.path, exc)
            return
        with inode.cond:
            if inode.failed:
                return
            inode.synced = max(target, inode.synced)
            while inode.unsynced and inode.unsynced[0][0] <= target:
                del inode.unsynced[0]

    def make_durable(self) -> None:
        """Sync every data file as it stands, and their names (I4)."""
        for data in self.files:
            inode = cast(_Inode, data.inode)
            self._sync_inode(inode)
            if inode.failed:
                raise OSError(errno.EIO, "sync failed", data.path)

    def sync_directory(self) -> None:
        """Make the names in the queue's directory durable."""
        if _WINDOWS:
            return
        try:
            _sync_path(self.path)
        except OSError:
            # A retry would say yes and mean nothing: copy everything (I9).
            self.sick.extend(data.inode for data in self.files if data.inode)
            raise
        if not self._reachable:
            _sync_ancestors(os.path.realpath(self.path))
            self._reachable = True

    def rescue(self) -> None:
        """After a failed sync: copy every file whole to a new inode, less the
        lines of the failed operations (I9)."""
        sick = list(self.sick)
        for inode in sick:
            with inode.cond:
                if inode.failed:
                    for _, changes in inode.unsynced:
                        self._void.update(_plain(change.line) for change in changes)
        for data in self.files:
            self.look(data)
            if data.inode is not None:
                self.rewrite(data, self._all_but_void(data.inode, data.size))
        self.sync_directory()
        for data in self.files:
            if data.inode is not None:
                data.inode.named = True
        del self.sick[: len(sick)]
        self._void.clear()

    def _all_but_void(self, inode: _Inode, size: int) -> Iterator[bytes]:
        for line in map(_plain, inode.all_lines(size)):
            if line not in self._void:
                yield line

    # Looking without touching

    def glimpse(self) -> list[tuple[str, _Inode, int]]:
        """The files as they stand, nothing repaired: name, inode, size."""
        found = []
        for path in [data.path for data in self.files] + [self.damaged]:
            try:
                inode = _Inode(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            found.append((os.path.basename(path), inode, inode.size()))
        return found


# The few primitives that write, sync and replace
# -----------------------------------------------------------------------------

_SEEKING = threading.Lock()


def _pread(fd: int, length: int, place: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, length, place)
    with _SEEKING:  # threads share the descriptor, and so its place
        os.lseek(fd, place, os.SEEK_SET)
        return os.read(fd, length)


def _write(fd: int, block: bytes) -> None:
    """Write all of a block; a write is short exactly when the disk is full,
    and the next one says so."""
    written = os.write(fd, block)
    while written < len(block):
        written += os.write(fd, memoryview(block)[written:])


def _sync(fd: int) -> None:
    """Return when a file's bytes are on the disk, not in its cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the disk's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def _sync_path(path: str) -> None:
    directory = _Fd(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    os.fsync(directory.fd)


def _sync_ancestors(path: str) -> None:
    """Make the way to a directory durable: who made a part of it may have died
    before saying so to the disk."""
    device = os.stat(path).st_dev
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        try:
            if os.stat(path).st_dev != device:
                return
            _sync_path(path)
        except PermissionError:
            return  # one that we may not read is not ours to make


def _swap(data: _Data, old: _Inode, new: _Inode) -> None:
    """Put a temp file in the place of the old file; Windows refuses for as
    long as anybody, ourselves included, has either open."""
    if _WINDOWS:
        old.file.close()
        new.file.close()
    pauses = [0.1, 0.05, 0.01, 0.001]
    while True:
        try:
            os.replace(data.temp, data.path)
            return
        except PermissionError:
            if not pauses:
                raise
        time.sleep(pauses.pop())


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _keep_mode(fd: int, old_fd: int) -> None:
    """Give a rewritten file the mode and, where allowed, owner of the old."""
    old, new = os.fstat(old_fd), os.fstat(fd)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except OSError:
            pass  # only root may; the mode then decides who can go on
    if old.st_mode != new.st_mode:
        os.fchmod(fd, stat.S_IMODE(old.st_mode))


# Lock: of the queue, and of its holders' lives
# -----------------------------------------------------------------------------

_BALLAST = 256 * 1024
# Who held the lock for long (a compaction) sleeps for longer than the others
# pause between two tries, or they might starve: it would be back before them.
_LONG_HOLD = 5e-3
_GIVE_WAY = 2e-3
_LONG_WAIT = 20e-3  # seconds: from here on, to its fivefold, a waiter hurries
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EINVAL}
_UNSUPPORTED |= {errno.ENOTSUP, errno.EOPNOTSUPP}  # which are two on macOS


class _Holder(NamedTuple):
    """Proof of life: a byte lock that the kernel drops with the process."""

    file: _Fd
    number: int
    ident: object  # of the lock file it stands in


class _FileLock:
    """A thread lock, then flock on NAME.lock, which is never unlinked.

    The file also carries the holders' byte locks, and ballast for the day
    when the disk is full.
    """

    def __init__(self, path: str, timeout: float, shared: bool) -> None:
        self.path = path
        self.timeout = timeout
        self.shared = shared
        self.reset()

    def reset(self) -> None:
        """Be the lock of another process: nothing is held or open."""
        self._mutex = threading.RLock()
        self.mine: Callable[[], bool] = self._mutex._is_owned  # type: ignore[attr-defined]
        self._file: _Fd | None = None
        self._flocked = False
        self.ident: tuple[int, int] | None = None
        self.readonly = False
        self._lay_at = 0.0
        self._since = math.inf

    def close(self) -> None:
        """Close the file, under the thread lock; that stays what it is, for
        the threads that wait for it."""
        self._file = None
        self._flocked = False

    def threads(self) -> threading.RLock:
        """The thread lock alone, for long reading."""
        return self._mutex

    def acquire(self, write: bool, closed: Callable[[], bool]) -> None:
        if not self._mutex.acquire(timeout=self.timeout):
            raise self._timed_out()
        while not closed():
            if self._file is None or (self.readonly and write):
                self._open(write)
            file = self._file
            if file is None:
                return  # nothing there to lock: only looking
            self._flocked = True  # before it is true: release() may do too much
            if self.shared:
                self._flock(file.fd)
            try:
                info = os.lstat(self.path)
                if _ident(info) == self.ident:
                    break
            except FileNotFoundError:
                pass
            self._file = None  # unlinked or replaced: its lock excludes nobody
        else:
            return
        self._since = time.monotonic()
        if info.st_size < _BALLAST and not self.readonly:
            self._lay_ballast(info.st_size)

    def release(self) -> None:
        """Unlock what this thread holds; called twice, see _locked."""
        if self.mine():
            if self._flocked:
                if self.shared and self._file is not None:
                    try:
                        _unlock(self._file.fd)
                    except OSError:
                        self._file.close()  # that unlocks too
                        self._file = None
                self._flocked = False
            held = time.monotonic() - self._since
            self._mutex.release()
            if held > _LONG_HOLD and self.shared:
                time.sleep(_GIVE_WAY)

    def _open(self, write: bool) -> None:
        self.readonly = False
        self._file = self.ident = None
        try:
            file = _open_file(self.path, _APPEND | (os.O_CREAT if write else 0))
        except FileNotFoundError:
            if not write:
                self.readonly = True
                return
            # The first acknowledgement makes the way to it durable, whoever
            # made it (sync_directory).
            os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
            file = _open_file(self.path, _APPEND | os.O_CREAT)
        except OSError as exc:
            if write or exc.errno not in _NO_WRITE:
                raise
            file = _open_file(self.path, os.O_RDONLY)
            self.readonly = True
        self.ident = _ident(os.fstat(file.fd))
        self._file = file

    def _flock(self, fd: int) -> None:
        """Take the flock; say so where there is none."""
        try:
            _try_lock(fd)
        except (BlockingIOError, InterruptedError):
            self._flock_busy(fd)
        except OSError as exc:
            if exc.errno not in _UNSUPPORTED:
                raise
            raise QueueError(
                f"lock {self.path!r}: this file system cannot lock ({exc.strerror});"
                " keep the queue on a local disk, or pass cross_process_lock=False"
                " if only one process uses it",
                path=self.path,
                errno=exc.errno,
            ) from exc

    def _flock_busy(self, fd: int) -> None:
        """Wait for the flock without ever blocking in the kernel, where
        neither the timeout nor close() would be heeded.

        Whoever has waited for long tries more often for a while, or the others
        would always be back before it is awake; but not so often, nor so long,
        that a hundred waiters take the CPU from the one they wait for.
        """
        start = now = time.monotonic()
        pause, tries = 50e-6, 0
        while now - start < self.timeout:
            if tries < 4:
                tries += 1
                time.sleep(0)
            else:
                late = _LONG_WAIT < now - start < 5 * _LONG_WAIT
                pause = 0.5e-3 if late else min(pause * 1.5, 1e-3)
                time.sleep(pause * random.uniform(0.5, 1.5))  # not all at once
            try:
                _try_lock(fd)
                return
            except (BlockingIOError, InterruptedError):
                now = time.monotonic()
        raise self._timed_out()

    def _timed_out(self) -> LockTimeoutError:
        pid = None if self.ident is None else _flock_pid(self.ident[1])
        who = f"process {pid} holds it" if pid else "another thread or process holds it"
        return LockTimeoutError(
            f"lock {self.path!r} stayed busy for {self.timeout:g} s: {who}; wait, or"
            " end that process (nothing is lost)",
            path=self.path,
            timeout=self.timeout,
            pid=pid,
        )

    # Ballast

    def _lay_ballast(self, size: int) -> None:
        """Fill the lock file up; incompressible, or it would free nothing."""
        now = time.monotonic()
        if now < self._lay_at:
            return
        self._lay_at = now + 10.0
        file = cast(_Fd, self._file)
        try:
            _write(file.fd, os.urandom(_BALLAST - size))
        except OSError:
            self.spend_ballast()

    def spend_ballast(self) -> bool:
        """Give the ballast's space to the disk; False if it was spent."""
        file = cast(_Fd, self._file)
        self._lay_at = time.monotonic() + 10.0
        if os.fstat(file.fd).st_size == 0:
            return False
        os.ftruncate(file.fd, 0)
        return True

    # Holders

    def new_holder(self) -> _Holder | None:
        """Take a byte lock of our own, under the flock; None if there are no
        open-file-description locks here.

        A byte that cannot be had while we hold the flock shows that flock is
        emulated by byte locks: a network file system.
        """
        if not self.shared or not hasattr(fcntl, "F_OFD_SETLK"):
            return None
        file = _open_file(self.path, os.O_RDWR)
        number = random.SystemRandom().randrange(1, 2**53)  # never one in use
        try:
            fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, _byte_lock(number))
        except OSError as exc:
            if exc.errno == errno.EINVAL:  # a kernel before 3.15
                return None
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise QueueError(
                f"lock {self.path!r}: flock is emulated here, as on a network file"
                " system, where a dead host's lock may outlive it; keep the queue on a"
                " local disk",
                path=self.path,
            ) from exc
        return _Holder(file, number, self.ident)

    def holds(self, number: int) -> bool:
        """Whether the holder of that number lives."""
        if self._file is None or not hasattr(fcntl, "F_OFD_GETLK"):
            return True
        answer = fcntl.fcntl(self._file.fd, fcntl.F_OFD_GETLK, _byte_lock(number))
        kind: int = struct.unpack_from("h", answer)[0]
        return bool(kind != fcntl.F_UNLCK)


def _byte_lock(number: int) -> bytes:
    """A struct flock for one byte, exclusive."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)


def _try_lock(fd: int) -> None:
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(fd, 2**30, os.SEEK_SET)  # beyond the ballast: the lock is mandatory
    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except PermissionError as exc:
        raise BlockingIOError(*exc.args) from exc


def _unlock(fd: int) -> None:
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        return
    os.lseek(fd, 2**30, os.SEEK_SET)
    msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)


def _flock_pid(inode: int) -> int | None:
    """Who holds a flock, where the system tells (Linux: /proc/locks)."""
    try:
        file = _open_file("/proc/locks", os.O_RDONLY)
        table = _pread(file.fd, _MIB, 0).decode()
    except OSError:
        return None
    found = re.search(rf"FLOCK +ADVISORY +WRITE (\d+) \S+:{inode} ", table)
    return int(found[1]) if found else None


# Waking up
# -----------------------------------------------------------------------------

_POLL = 0.02  # seconds between looks where no kernel tells of changes


class _Watch:
    """Sleeps until the pending file changes; one for all threads of a Queue.

    One thread asks the kernel, the others wait on a condition, and one of
    them takes over when it leaves.  `news` counts what was heard: a thread
    that saw nothing due at some count sleeps only while it is still that.
    Producers do nothing for this.
    """

    def __init__(self) -> None:
        self.news = 0
        self._cond = threading.Condition()
        self._asking = False
        self._ear: _Ear | None = None
        self._ident: object = None

    def wait(self, news: int, data: _Data, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._cond:
            self._cond.wait_for(lambda: not self._asking or self.news != news, seconds)
            if self._asking or self.news != news:
                return
            self._asking = True
        heard = False
        try:
            heard = self._listen(data, deadline - time.monotonic())
        finally:
            with self._cond:
                self._asking = False
                self.news += heard
                self._cond.notify_all()

    def _listen(self, data: _Data, seconds: float) -> bool:
        """Arm, then have the caller look again, and only then sleep: so no
        change can fall between looking and sleeping."""
        inode = data.inode
        if inode is None:
            time.sleep(min(max(seconds, 0.0), _POLL))
            return True
        ear = self._ear = self._ear or _ear()
        if self._ident == inode.ident:
            return ear.wait(max(0.0, seconds))
        try:
            ear.arm(data.path, inode)
        except OSError:  # no watches left
            self._ear = _Ear()
            self._ear.arm(data.path, inode)
        self._ident = inode.ident
        return True

    def close(self) -> None:
        """Wake all; the descriptor closes when the last has left it."""
        with self._cond:
            self._ear = None
            self.news += 1
            self._cond.notify_all()


class _Ear:
    """Polls a file's size and identity, where nothing better works."""

    def arm(self, path: str, inode: _Inode) -> None:
        """Listen for changes of the path's file from now on."""
        self._path = path
        self._last = self._look()

    def wait(self, seconds: float) -> bool:
        """Whether there was a change, within that many seconds."""
        deadline = time.monotonic() + seconds
        while self._look() == self._last:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_POLL, left))
        self._last = self._look()
        return True

    def _look(self) -> object:
        try:
            info = os.lstat(self._path)
        except OSError:
            return None
        return _ident(info), info.st_size


class _Inotify(_Ear):
    """Linux.  The file is watched, not its directory, or each lease would
    wake everybody; ctypes, because os has no inotify."""

    # IN_MODIFY, IN_ATTRIB (a replaced file loses its link), IN_DELETE_SELF,
    # IN_MOVE_SELF
    _EVENTS = 0x2 | 0x4 | 0x400 | 0x800

    def __init__(self) -> None:
        import ctypes
        import select

        self._libc = ctypes.CDLL(None, use_errno=True)
        fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        self._file = _Fd.adopt(fd)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def arm(self, path: str, inode: _Inode) -> None:
        watch = self._libc.inotify_add_watch
        if watch(self._file.fd, os.fsencode(path), self._EVENTS) < 0:
            raise OSError(errno.ENOSPC, "inotify_add_watch failed", path)

    def wait(self, seconds: float) -> bool:
        if not self._poll.poll(math.ceil(seconds * 1000)):
            return False
        try:
            os.read(self._file.fd, 65536)
        except BlockingIOError:
            pass
        return True


class _Kqueue(_Ear):
    """macOS and the BSDs; watches an open file, so it shares ours."""

    def __init__(self) -> None:
        import select

        self._select: Any = select  # its names differ by system
        self._kqueue = self._select.kqueue()

    def arm(self, path: str, inode: _Inode) -> None:
        select, self._inode = self._select, inode
        kinds = "WRITE EXTEND ATTRIB DELETE RENAME".split()
        event = select.kevent(
            inode.fd,
            select.KQ_FILTER_VNODE,
            select.KQ_EV_ADD | select.KQ_EV_CLEAR,
            sum(getattr(select, f"KQ_NOTE_{kind}") for kind in kinds),
        )
        self._kqueue.control([event], 0)

    def wait(self, seconds: float) -> bool:
        return bool(self._kqueue.control([], 8, seconds))


def _ear() -> _Ear:
    """The best way to hear of changes here; polling when there is none, or
    when the user has no more inotify instances left."""
    import select

    try:
        if hasattr(select, "kqueue"):
            return _Kqueue()
        return _Inotify()
    except (AttributeError, ImportError, OSError, TypeError):
        return _Ear()


# Databases: what their engines share
# =============================================================================


def _to_column(text: str) -> str:
    """Any str as text that a database takes.

    Text with a NUL or half a surrogate pair goes in as a JSON string.  So does
    text with a backslash: a backslash tells the one form from the other.
    """
    if "\\" in text or "\0" in text or _SURROGATE.search(text):
        return _quote(text)
    return text


def _from_column(text: str) -> str:
    return cast(str, json.loads(text)) if "\\" in text else text


_SURROGATE = re.compile("[\ud800-\udfff]")


class _Database(_Engine):
    """A queue in rows: `ready` and `delayed` are the two kinds of pending."""

    can_join = True
    can_compact = False

    def __init__(
        self,
        url: str,
        name: str,
        *,
        max_retries: int,
        fsync: bool,
        shared: bool,
        lock_timeout: float,
    ) -> None:
        if not shared:
            raise ValueError(
                "cross_process_lock: a database locks by itself, so False is for"
                " directories only"
            )
        self.path = self.source = url
        self._name = name
        self._max_retries = max_retries
        self._fsync = fsync
        self._lock_timeout = lock_timeout
        self._closed = False

    def _begin(self) -> None:
        """What each process has for itself."""
        self._pid = os.getpid()
        self._prefix = os.urandom(8).hex() + "-"
        self._serial = itertools.count(1)
        self._looked = -math.inf

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosedError(
                f"queue {self.path!r} is closed; make a new Queue", path=self.path
            )

    def _fresh(self) -> str:
        """An id or token: unique by a random prefix of this process."""
        return f"{self._prefix}{next(self._serial):x}"

    def _new_job(self, new: _New, id: str, created_at: float, run_at: float) -> Job:
        return Job(
            id, new.payload, "pending", 0, new.priority, created_at, run_at,
            max_retries=self._retries(new.max_retries),
        )  # fmt: skip

    def _shown(
        self,
        id: str,
        state: str,
        attempts: int,
        priority: int,
        created_at: float,
        run_at: float,
        leased_at: float | None,
        lease_until: float | None,
        last_error: str | None,
        max_retries: int | None,
        token: str | None,
        payload: Any,
        holder: object = None,
    ) -> Job:
        """A row as a job: without what its state does not have."""
        pending, inflight = state in ("ready", "delayed"), state == "inflight"
        return Job(
            _from_column(id),
            payload,
            "pending" if pending else state,
            attempts,
            priority,
            created_at,
            run_at,
            None if pending else leased_at,
            lease_until if inflight else None,
            None if last_error is None else _from_column(last_error),
            self._retries(max_retries),
            token if inflight else None,
            holder,
        )


_ENGINE_OF: dict[str, Callable[..., _Engine]] = {}  # by URL scheme


# SQLite engine
# =============================================================================

# One row is one live job, and a settled one is gone.  `place` is the order of
# waiting and of dead jobs: who goes last gets the greatest.  `turn` is that of
# leases.  Each hot statement reads one partial index, so jobs that are due far
# ahead are never looked at.  Nothing here is newer than SQLite 3.31.
# INDEXED BY, because the application may have run ANALYZE while the queue was
# empty: then SQLite takes any index for as good as another.
_LITE_FORMAT = 1  # raised by any change to the tables
_LITE_TABLES = (
    """CREATE TABLE  -- which queues are here, and how their rows are to be read
    IF NOT EXISTS tiny_queue_queues (
        name TEXT PRIMARY KEY,
        format INTEGER NOT NULL
    )""",
    """CREATE TABLE  -- payload last: what stands before it is read without it
    IF NOT EXISTS tiny_queue_jobs (
        place INTEGER PRIMARY KEY,
        queue TEXT NOT NULL,
        id TEXT NOT NULL,
        rev INTEGER NOT NULL,
        state TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        priority INTEGER NOT NULL,
        created_at REAL NOT NULL,
        run_at REAL NOT NULL,
        max_retries INTEGER,
        lapses INTEGER NOT NULL DEFAULT 0,
        last_error TEXT,
        token TEXT,
        holder INTEGER NOT NULL DEFAULT 0,
        clock REAL,
        leased_at REAL,
        renewed_at REAL,
        lease_until REAL,
        turn INTEGER,
        was TEXT,
        payload TEXT NOT NULL
    )""",
    """CREATE UNIQUE INDEX  -- an id is taken until its job is settled
    IF NOT EXISTS tiny_queue_ids ON tiny_queue_jobs (queue, id)""",
    """CREATE INDEX  -- the order of delivery: in one priority by place
    IF NOT EXISTS tiny_queue_ready ON tiny_queue_jobs (queue, priority DESC)
    WHERE state = 'ready'""",
    """CREATE INDEX  -- when the next one is due
    IF NOT EXISTS tiny_queue_delayed ON tiny_queue_jobs (queue, run_at)
    WHERE state = 'delayed'""",
    """CREATE INDEX  -- the order of leases
    IF NOT EXISTS tiny_queue_inflight ON tiny_queue_jobs (queue, turn)
    WHERE state = 'inflight'""",
    """CREATE INDEX  -- the order of death
    IF NOT EXISTS tiny_queue_dead ON tiny_queue_jobs (queue)
    WHERE state = 'dead'""",
)
_LITE_HAS_TABLES = """SELECT  -- looking creates nothing
    count(*) FROM sqlite_master WHERE type = 'table' AND name = 'tiny_queue_queues'"""
_LITE_FORMATS = """SELECT  -- rows of another format are not touched
    name, format FROM tiny_queue_queues ORDER BY name"""
_LITE_REGISTER = """INSERT  -- a drained queue is still there
    OR IGNORE INTO tiny_queue_queues (name, format) VALUES (?, ?)"""
_LITE_TOUCH = """UPDATE  -- I5: a commit of ours syncs those that it rests on
    tiny_queue_queues SET format = format WHERE name = ?"""

_LITE_COLUMNS = (
    "place, id, rev, state, attempts, priority, created_at, run_at, max_retries,"
    " lapses, last_error, token, holder, leased_at, lease_until, was, payload"
)
_LITE_INSERT = """INSERT  -- without a place it gets the greatest
    INTO tiny_queue_jobs (queue, id, rev, state, priority, created_at, run_at,
    max_retries, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_LITE_FIND = f"""SELECT  -- whatever its state
    {_LITE_COLUMNS} FROM tiny_queue_jobs WHERE queue = ? AND id = ?"""
_LITE_NEXT_DUE = """SELECT  -- the head of an index
    run_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = ? AND state = 'delayed'
    ORDER BY run_at LIMIT 1"""
_LITE_ANY_READY = """SELECT  -- without a lock for writing: a poll costs no write
    1 FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = ? AND state = 'ready' LIMIT 1"""
_LITE_RIPEN = """UPDATE  -- who is due joins by place, delayed once or not
    tiny_queue_jobs SET state = 'ready'
    WHERE queue = ? AND state = 'delayed' AND run_at <= ?"""
_LITE_HEADS = f"""SELECT  -- higher priority first, then by place
    {_LITE_COLUMNS}, (
        SELECT run_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed'
        ORDER BY run_at LIMIT 1
    ) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = :name AND state = 'ready'
    ORDER BY priority DESC, place LIMIT :n"""
_LITE_LAST_TURN = """SELECT  -- leases stand in the order in which they were given
    coalesce(max(turn), 0) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = ? AND state = 'inflight'"""
_LITE_LEASE = """UPDATE  -- I6: the token is new at each lease
    tiny_queue_jobs SET rev = rev + 1, state = 'inflight', attempts = attempts + 1,
    lapses = ?, last_error = ?, token = ?, holder = ?, clock = ?, leased_at = ?,
    renewed_at = ?, lease_until = ?, was = NULL, turn = 1 + (
        SELECT coalesce(max(turn), 0) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = ? AND state = 'inflight'
    ) WHERE place = ?"""
_LITE_LEASES = """SELECT  -- what tells whose lease is over, in their order
    id, rev, attempts, priority, max_retries, lapses, holder, clock, renewed_at,
    lease_until - renewed_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = ? AND state = 'inflight' ORDER BY turn"""
_LITE_EXTEND = """UPDATE  -- I6: the token is kept
    tiny_queue_jobs SET rev = rev + 1, holder = ?, clock = ?, renewed_at = ?,
    lease_until = ?, turn = ?
    WHERE queue = ? AND id = ? AND state = 'inflight' AND token = ?"""
_LITE_DONE = """DELETE  -- I6: the token alone is the fence
    FROM tiny_queue_jobs
    WHERE queue = ? AND id = ? AND state = 'inflight' AND token = ?"""
_LITE_LAST = (
    "rev = rev + 1, place = (SELECT max(place) + 1 FROM tiny_queue_jobs NOT INDEXED)"
)
_LITE_LEASED = "queue = ? AND id = ? AND state = 'inflight' AND token = ?"
_LITE_RETRY = f"""UPDATE  -- I6; and a retried job goes last
    tiny_queue_jobs SET {_LITE_LAST}, state = ?, run_at = ?, last_error = ?,
    lapses = 0, token = NULL, holder = 0, leased_at = NULL WHERE {_LITE_LEASED}"""
_LITE_RELEASE = f"""UPDATE  -- I6; this delivery does not count
    tiny_queue_jobs SET {_LITE_LAST}, state = ?, run_at = ?, attempts = attempts - 1,
    token = NULL, holder = 0, leased_at = NULL WHERE {_LITE_LEASED}"""
_LITE_BURY = f"""UPDATE  -- I6; dead jobs stand in the order of death
    tiny_queue_jobs SET {_LITE_LAST}, state = 'dead', last_error = ?, lapses = 0,
    token = NULL, holder = 0 WHERE {_LITE_LEASED}"""
_LITE_SPOILT = f"""UPDATE  -- a payload changed by hand holds nobody up
    tiny_queue_jobs SET {_LITE_LAST}, state = 'dead', last_error = ?, token = NULL,
    holder = 0 WHERE place = ?"""
_LITE_LAPSED = "queue = ? AND id = ? AND state = 'inflight' AND rev = ?"
_LITE_GIVE_BACK = f"""UPDATE  -- only if nobody was faster
    tiny_queue_jobs SET {_LITE_LAST}, state = ?, run_at = ?, last_error = ?,
    lapses = lapses + 1, token = NULL, holder = 0, leased_at = NULL
    WHERE {_LITE_LAPSED}"""
_LITE_GIVE_UP = f"""UPDATE  -- only if nobody was faster
    tiny_queue_jobs SET {_LITE_LAST}, state = 'dead', last_error = ?,
    lapses = lapses + 1, token = NULL, holder = 0 WHERE {_LITE_LAPSED}"""
_LITE_REQUEUE = f"""UPDATE  -- a replayed job goes last, with all its retries
    tiny_queue_jobs SET {_LITE_LAST}, state = 'ready', run_at = 0, attempts = 0,
    lapses = 0, leased_at = NULL WHERE queue = ? AND id = ? AND state = 'dead'"""
_LITE_DEAD = """SELECT  -- a bounded part, in the order of death
    id FROM tiny_queue_jobs
    INDEXED BY tiny_queue_dead
    WHERE queue = ? AND state = 'dead' AND place <= ?
    ORDER BY place LIMIT ?"""
_LITE_LAST_PLACE = """SELECT  -- what comes later is not meant
    coalesce(max(place), 0) FROM tiny_queue_jobs NOT INDEXED"""
_LITE_REMOVE = """DELETE  -- whatever its state: an inflight one's token is void
    FROM tiny_queue_jobs WHERE queue = ? AND id = ?"""
_LITE_PLACES = {
    "pending": """SELECT  -- two indexes, one order
        place FROM (
            SELECT place FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = :name AND state = 'ready'
            UNION ALL
            SELECT place FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed'
        ) ORDER BY place LIMIT :n""",
    "inflight": """SELECT  -- in the order of the leases
        place FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = :name AND state = 'inflight'
        ORDER BY turn LIMIT :n""",
    "dead": """SELECT  -- in the order of death
        place FROM tiny_queue_jobs
    INDEXED BY tiny_queue_dead
    WHERE queue = :name AND state = 'dead'
        ORDER BY place LIMIT :n""",
}
_LITE_AT = f"""SELECT  -- of this queue: a place that was left may be given anew
    {_LITE_COLUMNS} FROM tiny_queue_jobs WHERE place = ? AND queue = ?"""
_LITE_PURGE = """DELETE  -- a bounded part, as far as not touched since an instant
    FROM tiny_queue_jobs WHERE place IN (
        SELECT place FROM tiny_queue_jobs WHERE queue = ? AND state = ?
        AND place <= ? AND max(created_at, coalesce(leased_at, 0)) <= ? LIMIT 1000
    )"""
_LITE_COUNTS = """SELECT  -- each by its own index
    (SELECT count(*) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = :name AND state = 'ready'),
    (SELECT count(*) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed'),
    (SELECT count(*) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed' AND run_at > :now),
    (SELECT count(*) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = :name AND state = 'inflight'),
    (SELECT count(*) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_dead
    WHERE queue = :name AND state = 'dead'),
    (SELECT min(run_at) FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed' AND run_at > :now)"""
_LITE_OLDEST = """SELECT  -- the first never delayed, of the highest priority below
    priority, created_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = ? AND state = 'ready' AND priority < ? AND run_at = 0
    ORDER BY priority DESC, place LIMIT 1"""
_LITE_OLDEST_LATE = """SELECT  -- those that were delayed are in no order of theirs
    min(run_at) FROM (
        SELECT run_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = :name AND state = 'ready' AND run_at > 0
        UNION ALL
        SELECT run_at FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = :name AND state = 'delayed' AND run_at <= :now
    )"""
_LITE_SIZE = """SELECT  -- of the whole database
    (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""
_LITE_PAYLOADS = """SELECT  -- every byte that a reader would need
    place, payload FROM tiny_queue_jobs WHERE +queue = ? AND place > ?
    ORDER BY place LIMIT 1000"""

_LITE_HOLDABLE = {  # by the state that Queue knows
    "pending": (
        f"""SELECT  -- in the order of delivery
        {_LITE_COLUMNS} FROM tiny_queue_jobs
    INDEXED BY tiny_queue_ready
    WHERE queue = ? AND state = 'ready'
        ORDER BY priority DESC, place LIMIT ?""",
        f"""SELECT  -- then those not due, the earliest first
        {_LITE_COLUMNS} FROM tiny_queue_jobs
    INDEXED BY tiny_queue_delayed
    WHERE queue = ? AND state = 'delayed'
        ORDER BY run_at LIMIT ?""",
    ),
    "dead": (
        f"""SELECT  -- in the order of death
        {_LITE_COLUMNS} FROM tiny_queue_jobs
    INDEXED BY tiny_queue_dead
    WHERE queue = ? AND state = 'dead'
        ORDER BY place LIMIT ?""",
    ),
}
_LITE_HOLD = """UPDATE  -- uncounted, without a holder; `was` says from which state
    tiny_queue_jobs SET rev = rev + 1, state = 'inflight', token = ?, holder = 0,
    clock = ?, renewed_at = ?, lease_until = ?, turn = ?, was = ? WHERE place = ?"""
_LITE_HELD = f"""SELECT  -- by the beginning of their tokens
    {_LITE_COLUMNS} FROM tiny_queue_jobs
    INDEXED BY tiny_queue_inflight
    WHERE queue = ? AND state = 'inflight'
    AND substr(token, 1, length(?)) = ? ORDER BY turn"""
_LITE_ADOPT = """INSERT  -- inflight from the beginning: deliverable on one side only
    INTO tiny_queue_jobs (queue, id, rev, state, attempts, priority, created_at,
    run_at, max_retries, lapses, last_error, token, clock, leased_at, renewed_at,
    lease_until, turn, was, payload)
    VALUES (?, ?, ?, 'inflight', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_LITE_LET_GO = f"""UPDATE  -- I6; in the place where it stood
    tiny_queue_jobs SET rev = rev + 1, state = ?, run_at = ?, leased_at = ?,
    token = NULL, was = NULL WHERE {_LITE_LEASED}"""

# What the driver says, in part; and what to do.  By text, because error codes
# have names only from Python 3.11 on.
_LITE_BUSY = ("is locked", "locking protocol", "schema is locked")
_LITE_ADVICE = (
    ("is full", "free some space; nothing is lost"),
    ("readonly", "check the owner and mode of the file and its directory"),
    ("unable to open", "check that its directory is there and may be written"),
    ("not a database", "it is another kind of file, or encrypted: name another"),
    ("malformed", "restore a backup, or save what is left with sqlite3's .recover"),
    ("disk I/O", "the disk failed; see the system's log"),
    ("no such", "its tables were changed; restore them, or use another database"),
)
_LITE_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "fuse.sshfs")
_LITE_PAGE = 1000  # jobs that records() reads at a time


class _LiteRow(NamedTuple):
    """A row of the table of jobs; _LITE_COLUMNS."""

    place: int
    id: str
    rev: int
    state: str  # ready and delayed are the two kinds of pending
    attempts: int
    priority: int
    created_at: float
    run_at: float
    max_retries: int | None
    lapses: int
    last_error: str | None
    token: str | None
    holder: int
    leased_at: float | None
    lease_until: float | None
    was: str | None
    payload: str


def _lite_driver() -> Any:
    try:
        import sqlite3
    except ImportError as exc:
        raise QueueError(
            "sqlite:// needs Python's own sqlite3, which this Python was built"
            " without; install its package or use a directory"
        ) from exc
    return sqlite3


def _lite_file(url: str) -> str:
    """The absolute path in a sqlite:/// URL, or ValueError."""
    from urllib.parse import unquote

    rest, _, options = url[len("sqlite://") :].partition("?")
    if options:
        raise ValueError(f"path: {url!r}: sqlite:// URLs know no options")
    if not rest.startswith("/"):
        raise ValueError(
            f"path: {url!r} names a host; a file has three slashes and its relative"
            " path, or four and its absolute one: sqlite:///jobs.db"
        )
    file = unquote(rest[1:])
    if not file or file.startswith((":memory:", "file:")) or "\0" in file:
        raise ValueError(
            f"path: {url!r} names no file; a database in memory lasts no longer than"
            " its process, so it cannot hold a queue"
        )
    # Two names of one database must lead to one lock file.
    return os.path.realpath(os.path.abspath(file))


class _LiteLock(_FileLock):
    """Carries the holders' proofs of life, beside the database.

    Never on the database itself: closing any descriptor of that drops the
    locks that SQLite has on it.
    """

    def _lay_ballast(self, size: int) -> None:
        pass  # a database's space is not ours to keep


class _LiteWatch(_Watch):
    """Sleeps until somebody commits: that writes to the database's log.

    What is written is not yet committed: the log is synced first, and then its
    index changes, of which no kernel tells.  So after a write, heard or just
    missed, the version of the database is asked for in growing pauses.
    """

    def __init__(self, version: Callable[[], object]) -> None:
        super().__init__()
        self._version = version
        self._lately = True  # there may have been a write

    def _listen(self, data: Any, seconds: float) -> bool:
        log, seen = data
        deadline, pause = time.monotonic() + seconds, 1e-4
        if self._arm(log):
            self._lately = True
            return True
        ear = self._ear
        if ear is not None and not self._lately:
            self._lately = ear.wait(max(0.0, seconds))
        while self._lately and self._version() == seen:
            left = deadline - time.monotonic()
            if left <= 0:
                self._lately = ear is None
                return False
            if ear is None or pause < 1e-3:
                time.sleep(min(pause, left, _POLL))
                pause *= 1.5
            else:
                pause = 1e-4 if ear.wait(min(pause, left)) else pause * 1.5
        return self._lately

    def _arm(self, log: str) -> bool:
        """Listen to the log that is there now; whether that is news."""
        try:
            info = os.stat(log)
            ident = (info.st_dev, info.st_ino)
        except OSError:
            ident = None  # no queue yet
        if ident == self._ident:
            return False
        self._ear, self._ident = None, ident
        try:
            if ident is not None:
                ear = _Inotify()
                ear.arm(log, cast(Any, None))
                self._ear = ear
        except (AttributeError, ImportError, OSError, TypeError):
            pass  # there is none here, or none left
        return True


class _LiteCore(_Database):
    """One connection, its transactions, and what can go wrong with them."""

    def __init__(self, url: str, name: str, **options: Any) -> None:
        from urllib.parse import quote

        super().__init__(url, name, **options)
        self._file = _lite_file(url)
        self.path = self.source = f"sqlite:///{quote(self._file)}"
        self._driver = _lite_driver()
        lock = f"{self._file}-tiny_queue.lock"
        self._lock = _LiteLock(lock, self._lock_timeout, True)
        self._db: Any = None
        self._forking = False
        self._reset()
        _LITE_ENGINES.add(self)

    def _reset(self) -> None:
        """Forget all that a process may not share with its parent."""
        self._begin()
        self._holder: _Holder | None = None
        self._idle = True  # the last lease found nothing
        self._lapses_left: collections.deque[_Lease] = collections.deque()
        self._watch = _LiteWatch(self._version)
        if self._db is not None:
            _LITE_INHERITED.append(self._db)  # closing it would drop locks
        self._forget()

    def _forget(self) -> None:
        self._db = None  # a cursor of the connection
        self._ident: tuple[int, int] | None = None  # of the file that it has open
        self._readable = self._writable = False  # what was seen to
        self._synchronous: bool | None = None

    def forked(self) -> None:
        self._forking = False
        self._lock.reset()
        self._reset()

    def __del__(self) -> None:
        if getattr(self, "_db", None) is not None and self._pid == os.getpid():
            self._disconnect()

    # Connection

    def before_fork(self) -> None:
        """Close the connection, between two transactions.

        In a child that inherits one, SQLite takes the locks for its own that
        its parent holds; a new connection there then has none, and the end of
        the parent's would delete the log that the child writes to.
        """
        if not self._lock.mine():  # as it is in a signal handler's fork
            self._lock.threads().acquire()
            self._forking = True
            self._disconnect()

    def after_fork(self) -> None:
        if self._lock.mine() and self._forking:
            self._forking = False
            self._lock.threads().release()

    def _disconnect(self) -> None:
        db = self._db
        self._forget()
        if db is not None:
            try:
                db.connection.close()
            except self._driver.Error as exc:
                _log().warning("closing %s: %s", self.path, exc)

    def _connected(self, write: bool) -> Any:
        """The cursor; None if there is nothing to look at."""
        try:
            info = os.stat(self._file)
            ident = (info.st_dev, info.st_ino)
        except FileNotFoundError:
            ident = None
        if self._ident == ident and (self._writable or self._readable > write):
            return self._db
        if self._db is not None and self._ident != ident:
            self._disconnect()  # what is open has no name any more
        if self._db is None:
            if ident is None and not write:
                return None
            self._connect(write)
        if write:
            self._prepare()
        else:
            self._readable = self._known(self._db)
        return self._db if self._readable else None

    def _connect(self, write: bool) -> None:
        from urllib.parse import quote

        kind = _file_system(os.path.dirname(self._file))
        if kind in _LITE_REMOTE:
            raise QueueError(
                f"queue {self.path!r}: {kind} is a network file system, whose locks"
                " SQLite cannot trust; keep the database on a local disk",
                path=self._file,
            )
        root = "" if self._file.startswith("/") else "/"
        connection = self._driver.connect(
            f"file://{root}{quote(self._file)}?mode={'rwc' if write else 'rw'}",
            timeout=0,  # we wait ourselves: in shorter steps
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        self._db = connection.cursor()
        info = os.stat(self._file)
        self._ident = (info.st_dev, info.st_ino)

    def _prepare(self) -> None:
        """Make the tables if they are missing, and the database one with a
        log (WAL): readers and the writer do not wait for each other."""
        db = self._db
        if not db.execute("PRAGMA page_count").fetchone()[0]:
            # A change writes some three pages whole: a tenth less work than 4096.
            db.execute("PRAGMA page_size = 2048")
        mode = db.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal":
            mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise QueueError(
                f"queue {self.path!r}: SQLite refuses its WAL mode here (it stays"
                f" {mode!r}); keep the database on a local disk",
                path=self._file,
            )
        self._set_synchronous(self._fsync)
        self._transaction("BEGIN IMMEDIATE", self._create)
        self._writable = self._readable = True

    def _create(self, db: Any) -> None:
        if not self._known(db):
            for statement in _LITE_TABLES:
                db.execute(statement)
        db.execute(_LITE_REGISTER, (self._name, _LITE_FORMAT))

    def _known(self, db: Any) -> bool:
        """Whether the tables are there, and of the format that we know."""
        if not db.execute(_LITE_HAS_TABLES).fetchone()[0]:
            return False
        for name, found in db.execute(_LITE_FORMATS).fetchall():
            if found != _LITE_FORMAT:
                raise QueueError(
                    f"queue {self.path!r}: its tables have format {found} (queue"
                    f" {name!r}), this tiny_queue {__version__} knows {_LITE_FORMAT};"
                    " use the version of tiny_queue that made them, or a newer one",
                    path=self._file,
                )
        return True

    def _set_synchronous(self, full: bool) -> None:
        """FULL syncs the log at each commit, NORMAL when it is full."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        self._synchronous = full

    def _version(self) -> object:
        """What each commit changes, those of this connection included."""
        return self._transact(self._data_version, write=False)

    def _data_version(self, db: Any) -> object:
        number = db.execute("PRAGMA data_version").fetchone()[0]
        return number, db.connection.total_changes, self._ident

    # Transactions

    def _transact(
        self,
        body: Callable[..., Any],
        *args: Any,
        write: bool = True,
        synced: bool = True,
        nothing: Any = None,
    ) -> Any:
        """Run body(cursor, *args) as one transaction, under the thread lock.

        `nothing` is the answer where nothing was ever written.  Without
        `synced` a power cut may forget it.  The lock is released twice: a
        Ctrl-C at any one line leaves at least one of the two to run.
        """
        if self._pid != os.getpid():
            self.forked()
        lock = self._lock
        if lock.mine():
            raise QueueError(
                f"queue {self.path!r} is in the middle of a call by this same thread;"
                " do not call it from a signal handler or finalizer"
            )
        mutex = lock.threads()
        try:
            try:
                if not mutex.acquire(timeout=lock.timeout):
                    raise self._timed_out()
                if self._closed:
                    raise self._is_gone()
                return self._patiently(body, args, write, synced, nothing)
            finally:
                if lock.mine():
                    mutex.release()
        except self._driver.Error as exc:
            raise self._refused(exc) from exc
        except OSError as exc:
            raise self._refused(exc, str(exc.strerror)) from exc
        finally:
            if lock.mine():
                mutex.release()

    def _patiently(self, *args: Any) -> Any:
        """Try again while others have the database locked: SQLite's own
        waiting sleeps up to 100 ms at a time."""
        deadline, pause = 0.0, 50e-6
        while True:
            try:
                return self._attempt(*args)
            except self._driver.OperationalError as exc:
                if not _lite_busy(exc):
                    raise
                now = time.monotonic()
                deadline = deadline or now + self._lock.timeout
                if now >= deadline:
                    raise self._timed_out() from exc
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def _attempt(
        self,
        body: Callable[..., Any],
        args: Any,
        write: bool,
        synced: bool,
        nothing: Any,
    ) -> Any:
        db = self._connected(write)
        if db is None:
            return nothing
        if not write:
            return self._transaction("BEGIN", body, *args)
        if self._synchronous is not (self._fsync and synced):
            self._set_synchronous(self._fsync and synced)
        return self._transaction("BEGIN IMMEDIATE", body, *args)

    def _transaction(self, begin: str, body: Callable[..., Any], *args: Any) -> Any:
        db = self._db
        if db.connection.in_transaction:  # two Ctrl-C, or a ROLLBACK that failed
            db.execute("ROLLBACK")
        try:
            try:
                db.execute(begin)
                result = body(db, *args)
                db.execute("COMMIT")
                return result
            except BaseException:
                if db.connection.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except BaseException:  # a Ctrl-C there: all others would find it locked
            if db.connection.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _is_gone(self) -> QueueClosedError:
        return QueueClosedError(
            f"queue {self.path!r} is closed; make a new Queue", path=self.path
        )

    def _timed_out(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"database {self.path!r} stayed locked for {self._lock.timeout:g} s: a"
            " transaction is open there for writing; end it, or pass connection= if"
            " it is this thread's own (nothing is lost)",
            path=self.path,
            timeout=self._lock.timeout,
        )

    def _refused(self, exc: Exception, text: str = "") -> QueueError:
        text = text or str(exc)
        advice = "nothing was acknowledged"
        for part, what in _LITE_ADVICE:
            if part in text:
                advice = what
                break
        return QueueError(
            f"queue {self.path!r}: {text}; {advice}",
            errno=getattr(exc, "errno", None),
            path=self._file,
        )


def _lite_payload(text: str) -> Any:
    """None for what is no JSON: a lease makes such a job dead and says so."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _lite_busy(exc: Exception) -> bool:
    return any(part in str(exc) for part in _LITE_BUSY)


_LITE_ENGINES: weakref.WeakSet[_LiteCore] = weakref.WeakSet()
_LITE_INHERITED: list[Any] = []  # never closed: see before_fork()


def _lite_before_fork() -> None:
    for engine in list(_LITE_ENGINES):
        engine.before_fork()


def _lite_after_fork_in_parent() -> None:
    for engine in list(_LITE_ENGINES):
        engine.after_fork()


def _lite_after_fork_in_child() -> None:
    for engine in list(_LITE_ENGINES):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lite_before_fork,
        after_in_parent=_lite_after_fork_in_parent,
        after_in_child=_lite_after_fork_in_child,
    )


class _LiteJoins(_LiteCore):
    """Changes inside the caller's own transaction."""

    def _join(self, connection: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Run body(cursor, *args) inside the transaction of a connection.

        Where its driver would begin one before the caller's own INSERT, one
        is begun; an error leaves the transaction as it was.
        """
        if self._pid != os.getpid():
            self.forked()
        if self._closed:
            raise self._is_gone()
        driver = self._driver
        if not isinstance(connection, driver.Connection):
            raise TypeError(
                "connection: must be a sqlite3.Connection, not"
                f" {type(connection).__name__}; wrappers have one inside"
            )
        # Read as ours does, whatever the caller has set.
        factory, connection.text_factory = connection.text_factory, str
        try:
            db = driver.Cursor(connection)
            self._check_joins(connection, db)
            return self._within(connection, db, body, args)
        except driver.Error as exc:
            if not _lite_busy(exc):
                raise self._refused(exc) from exc
            raise LockTimeoutError(
                f"database {self.path!r} is locked: another transaction is open for"
                " writing, or has written since this one began to read; roll back and"
                " do it again, best from BEGIN IMMEDIATE on",
                path=self.path,
            ) from exc
        finally:
            connection.text_factory = factory

    def _within(
        self, connection: Any, db: Any, body: Callable[..., Any], args: Any
    ) -> Any:
        began = not connection.in_transaction
        try:
            try:
                if began:
                    db.execute("BEGIN IMMEDIATE")
                db.execute("SAVEPOINT tiny_queue_call")
                self._create(db)
                result = body(db, *args)
                db.execute("RELEASE tiny_queue_call")
                return result
            except BaseException:
                self._undo(db, began)
                raise
        except BaseException:  # a Ctrl-C there
            self._undo(db, began)
            raise

    def _undo(self, db: Any, began: bool) -> None:
        """Again, it finds nothing to undo: the savepoint is gone."""
        if not db.connection.in_transaction:
            return  # a full disk may have ended it
        if began:
            db.execute("ROLLBACK")
        else:
            try:
                db.execute("ROLLBACK TO tiny_queue_call")
                db.execute("RELEASE tiny_queue_call")
            except self._driver.OperationalError as exc:
                if "no such savepoint" not in str(exc):
                    raise

    def _check_joins(self, connection: Any, db: Any) -> None:
        files = {row[1]: row[2] for row in db.execute("PRAGMA database_list")}
        try:
            same = os.path.samefile(files.get("main") or "", self._file)
        except FileNotFoundError:
            same = False
        if not same:
            raise ValueError(
                f"connection: its main database is not that of queue {self.path!r};"
                " only within one database do two changes commit together"
            )
        automatic = getattr(connection, "autocommit", None) is True  # from 3.12 on
        if connection.isolation_level is None or automatic:
            if connection.in_transaction:
                return
            raise ValueError(
                "connection: it is in autocommit mode with no transaction open, so"
                ' there is nothing to be part of; execute("BEGIN IMMEDIATE") first'
            )


class _LiteLeases(_LiteJoins):
    """Putting, leasing, and telling whose lease is over."""

    # Insert

    def insert(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        if connection is None:
            found = self._transact(self._insert, new, exist_ok)
        else:
            found = self._join(connection, self._insert, new, exist_ok, False)
        if isinstance(found, DuplicateJobError):
            raise found
        return cast("list[Job]", found)

    def _insert(
        self, db: Any, new: Sequence[_New], exist_ok: bool, own: bool = True
    ) -> list[Job] | DuplicateJobError:
        for item in new:
            row = None if item.id is None else self._row(db, item.id)
            if row is not None:
                if own and self._fsync:  # it may be of somebody without fsync
                    db.execute(_LITE_TOUCH, (self._name,))
                job = self._view(row)
                if not (own or exist_ok):
                    raise self._duplicate(job)  # which ends what was begun for it
                return [job] if exist_ok else self._duplicate(job)
        now = time.time()
        jobs = [self._job_of(item, now) for item in new]
        rows = [self._new_row(item, job) for item, job in zip(new, jobs)]
        db.executemany(_LITE_INSERT, rows)
        return jobs

    def _new_row(self, item: _New, job: Job) -> tuple[object, ...]:
        return (
            self._name,
            job.id if item.id is None else _to_column(item.id),
            random.getrandbits(48),  # so that an id put again has another
            "delayed" if job.run_at else "ready",
            job.priority,
            job.created_at,
            job.run_at,
            item.max_retries,
            item.text,
        )

    def _job_of(self, item: _New, now: float) -> Job:
        run_at = 0.0
        if item.at is not None:
            run_at = item.at if item.at > now else 0.0
        elif item.delay:
            run_at = now + item.delay
        id = self._fresh() if item.id is None else item.id
        return self._new_job(item, id, now, run_at)

    def _row(self, db: Any, id: str) -> _LiteRow | None:
        row = db.execute(_LITE_FIND, (self._name, _to_column(id))).fetchone()
        return None if row is None else _LiteRow._make(row)

    def _view(self, row: _LiteRow) -> Job:
        return self._shown(
            row.id, row.state, row.attempts, row.priority, row.created_at, row.run_at,
            row.leased_at, row.lease_until, row.last_error, row.max_retries, row.token,
            _lite_payload(row.payload),
        )  # fmt: skip

    # Lease

    def lease(self, n: int, seconds: float, held: bool, again: bool) -> _Leased:
        news = self._watch.news
        if self._idle:  # look first: a poll of an idle queue writes nothing
            nothing = (math.inf, None)
            due, version = self._transact(self._glance, write=False, nothing=nothing)
            if due is not None:
                return _Leased([], [], (news, due, version))
        while True:
            args = (n, seconds, held, again)
            jobs, lapses, due, seen = self._transact(self._lease, *args, synced=False)
            if due:
                break
        self._idle = not jobs
        return _Leased(jobs, lapses, (news, due, seen))

    def _glance(self, db: Any) -> tuple[float | None, object]:
        """When the next job is due, or None if there is something to do now;
        and the version of the database that says so."""
        now, due = time.time(), self._next_due(db)
        if due <= now or db.execute(_LITE_ANY_READY, (self._name,)).fetchone():
            return None, None
        if self._over(db, time.monotonic(), now, math.inf):
            return None, None
        return due, self._data_version(db)

    def _next_due(self, db: Any) -> float:
        row = db.execute(_LITE_NEXT_DUE, (self._name,)).fetchone()
        return math.inf if row is None else cast(float, row[0])

    def _lease(
        self, db: Any, n: int, seconds: float, held: bool, again: bool
    ) -> tuple[list[Job], list[_Lapse], float, object]:
        """The last items are when to come again, where 0.0 is at once, and the
        version of the database."""
        now, clock = time.time(), time.monotonic()
        ready = self._heads(db, n, now)
        undecided: list[_Lapse] = []
        nothing = not (again or ready or self._lapses_left)
        if nothing or clock - self._looked >= _TICK:
            self._looked = clock
            self._lapses_left, undecided = self._split(
                self._over(db, clock, now, math.inf)
            )
        picks = self._pick(db, n, ready)
        if not picks:
            return [], undecided, self._next_due(db), self._data_version(db)
        holder = self._live_holder() if held else None
        number = holder.number if holder else 0
        jobs = []
        for row, lapses in picks:
            token, until = self._fresh(), now + seconds
            stamp = (token, number, clock, now, now, until, self._name, row.place)
            try:
                jobs.append(self._leased_job(row, token, now, until, holder))
                db.execute(_LITE_LEASE, (lapses, row.last_error, *stamp))
            except (TypeError, ValueError, RecursionError) as exc:
                note = _to_column(f"its payload is not JSON: {exc}")
                db.execute(_LITE_SPOILT, (note, row.place))
        return jobs, undecided, math.inf if jobs or undecided else 0.0, None

    def _heads(self, db: Any, n: int, now: float) -> collections.deque[_LiteRow]:
        """The first of those that are due, delayed ones included."""
        keys = {"name": self._name, "n": n}
        rows = db.execute(_LITE_HEADS, keys).fetchall()
        if not rows or (rows[0][-1] is not None and rows[0][-1] <= now):
            if db.execute(_LITE_RIPEN, (self._name, now)).rowcount:
                rows = db.execute(_LITE_HEADS, keys).fetchall()
        return collections.deque([_LiteRow._make(row[:-1]) for row in rows])

    def _leased_job(
        self,
        row: _LiteRow,
        token: str,
        leased_at: float,
        until: float,
        holder: _Holder | None,
        again: bool = False,
    ) -> Job:
        return Job(
            _from_column(row.id),
            json.loads(row.payload),
            "inflight",
            row.attempts + (not again),
            row.priority,
            row.created_at,
            row.run_at,
            leased_at,
            until,
            None if row.last_error is None else _from_column(row.last_error),
            self._retries(row.max_retries),
            token,
            holder,
        )

    def _pick(
        self, db: Any, n: int, ready: collections.deque[_LiteRow]
    ) -> list[tuple[_LiteRow, int]]:
        """Take up to n jobs with their lapses: by priority; in one priority
        first those of dead holders, then by place."""
        picks: list[tuple[_LiteRow, int]] = []
        lapsed = self._lapses_left
        while len(picks) < n and (lapsed or ready):
            if lapsed and (not ready or lapsed[0].priority >= ready[0].priority):
                lease = lapsed.popleft()
                row = self._row(db, lease.id)
                if row is not None and (row.state, row.rev) == ("inflight", lease.rev):
                    error = _to_column(self._reason(lease))
                    picks.append((row._replace(last_error=error), lease.lapses + 1))
            else:
                row = ready.popleft()
                picks.append((row, row.lapses))
        return picks

    # Who is alive

    def _live_holder(self) -> _Holder | None:
        """This object's proof of life, on the lock file that is there now."""
        lock, holder = self._lock, self._holder
        if holder is not None and holder.file.fd >= 0:
            try:
                info = os.lstat(lock.path)
                if holder.ident == (info.st_dev, info.st_ino):
                    return holder
            except FileNotFoundError:
                pass  # it is made anew
        lock.acquire(True, self._is_closed)
        try:
            self._holder = holder = lock.new_holder()
            return holder
        finally:
            lock.release()

    def _is_closed(self) -> bool:
        return self._closed

    def _over(
        self, db: Any, clock: float, now: float, older_than: float
    ) -> list[_Lease]:
        """Leases that ended unsettled, with the reason, in their order."""
        rows = db.execute(_LITE_LEASES, (self._name,)).fetchall()
        alive = self._alive({row[6] for row in rows} - {0})
        over = []
        for id, *fields in rows:
            lease = _Lease(b"", _from_column(id), *fields)
            reason = lease.over(alive.get(lease.holder), clock, now, older_than)
            if reason:
                over.append(lease._replace(reason=reason))
        return over

    def _alive(self, numbers: set[int]) -> dict[int, bool]:
        """Which holders live; asks the kernel about those that are not us."""
        mine = self._holder.number if self._holder else 0
        alive = {mine: True}
        if numbers - {mine}:
            self._lock.acquire(False, self._is_closed)
            try:
                for number in numbers - {mine}:
                    alive[number] = self._lock.holds(number)
            finally:
                self._lock.release()
        alive.pop(0, None)
        return alive

    def lapsed(self, older_than: float) -> list[_Lapse]:
        found = self._transact(self._lapsed, older_than, write=False, nothing=[])
        return cast("list[_Lapse]", found)

    def _lapsed(self, db: Any, older_than: float) -> list[_Lapse]:
        over = self._over(db, time.monotonic(), time.time(), older_than)
        return [self._lapse(lease) for lease in over]

    def give_back(self, verdicts: Sequence[tuple[_Lapse, float | None, str]]) -> int:
        return cast(int, self._transact(self._give_back, verdicts)) if verdicts else 0

    def _give_back(
        self, db: Any, verdicts: Sequence[tuple[_Lapse, float | None, str]]
    ) -> int:
        count = 0
        for lapse, delay, error in verdicts:
            fence = (self._name, _to_column(lapse.id), lapse.rev)
            if delay is None:
                db.execute(_LITE_GIVE_UP, (_to_column(error), *fence))
            else:
                change = (*self._pending(delay), _to_column(error))
                db.execute(_LITE_GIVE_BACK, (*change, *fence))
            count += db.rowcount
        return count

    def _pending(self, delay: float) -> tuple[str, float]:
        """State and run_at of a job that is due after a delay."""
        return ("delayed", time.time() + delay) if delay else ("ready", 0.0)


class _LiteMoves(_LiteLeases):
    """Jobs on their way to another queue or from one."""

    def hold(self, state: str, n: int, seconds: float, prefix: str) -> list[_Parcel]:
        args = (state, n, seconds, prefix)
        return cast("list[_Parcel]", self._transact(self._hold, *args, nothing=[]))

    def _hold(
        self, db: Any, state: str, n: int, seconds: float, prefix: str
    ) -> list[_Parcel]:
        rows: list[Any] = []
        for sql in _LITE_HOLDABLE[state]:
            rows += db.execute(sql, (self._name, n - len(rows))).fetchall()
        return self._hold_rows(db, rows, state, seconds, prefix)

    def _hold_rows(
        self, db: Any, rows: list[Any], state: str, seconds: float, prefix: str
    ) -> list[_Parcel]:
        now, clock = time.time(), time.monotonic()
        turn = db.execute(_LITE_LAST_TURN, (self._name,)).fetchone()[0]
        parcels = []
        for row in map(_LiteRow._make, rows):
            was = row.was or state
            turn, token = turn + 1, f"{prefix}{self._fresh()}-{was}"
            parcels.append(self._parcel(row, was, token))
            stamp = (token, clock, now, now + seconds, turn, was, row.place)
            db.execute(_LITE_HOLD, stamp)
        return parcels

    def _parcel(self, row: _LiteRow, state: str, token: str) -> _Parcel:
        return _Parcel(
            _from_column(row.id),
            row.payload,
            state,
            row.attempts,
            row.priority,
            row.created_at,
            row.run_at,
            row.leased_at,
            None if row.last_error is None else _from_column(row.last_error),
            row.max_retries,
            row.lapses,
            token,
        )

    def held(self, prefix: str) -> list[_Parcel]:
        found = self._transact(self._held, prefix, write=False, nothing=[])
        return cast("list[_Parcel]", found)

    def _held(self, db: Any, prefix: str) -> list[_Parcel]:
        rows = db.execute(_LITE_HELD, (self._name, prefix, prefix)).fetchall()
        return [
            self._parcel(row, row.was or "pending", cast(str, row.token))
            for row in map(_LiteRow._make, rows)
        ]

    def rehold(self, seconds: float, prefix: str) -> list[_Parcel]:
        found = self._transact(self._rehold, seconds, prefix, nothing=[])
        return cast("list[_Parcel]", found)

    def _rehold(self, db: Any, seconds: float, prefix: str) -> list[_Parcel]:
        rows = db.execute(_LITE_HELD, (self._name, prefix, prefix)).fetchall()
        return self._hold_rows(db, rows, "pending", seconds, prefix)

    def adopt(self, parcels: Sequence[_Parcel], seconds: float) -> None:
        self._transact(self._adopt, parcels, seconds)

    def _adopt(self, db: Any, parcels: Sequence[_Parcel], seconds: float) -> None:
        now, clock = time.time(), time.monotonic()
        turn = db.execute(_LITE_LAST_TURN, (self._name,)).fetchone()[0]
        for parcel in parcels:
            turn += 1
            row = self._row(db, parcel.id)
            if row is not None:
                raise self._duplicate(self._view(row))
            error = parcel.last_error
            values = (
                self._name,
                _to_column(parcel.id),
                random.getrandbits(48),
                parcel.attempts,
                parcel.priority,
                parcel.created_at,
                parcel.run_at,
                parcel.max_retries,
                parcel.lapses,
                None if error is None else _to_column(error),
                parcel.token,
                clock,
                parcel.leased_at,
                now,
                now + seconds,
                turn,
                parcel.state,
                parcel.text,
            )
            db.execute(_LITE_ADOPT, values)

    def drop(self, parcels: Sequence[_Parcel]) -> set[str]:
        return cast("set[str]", self._transact(self._drop, parcels))

    def _drop(self, db: Any, parcels: Sequence[_Parcel]) -> set[str]:
        void = set()
        for parcel in parcels:
            fence = (self._name, _to_column(parcel.id), parcel.token)
            if not db.execute(_LITE_DONE, fence).rowcount:
                void.add(parcel.id)
        return void

    def let_go(self, parcels: Sequence[_Parcel]) -> None:
        self._transact(self._let_go, parcels)

    def _let_go(self, db: Any, parcels: Sequence[_Parcel]) -> None:
        now = time.time()
        for parcel in parcels:
            state = "delayed" if parcel.run_at > now else "ready"
            fence = (self._name, _to_column(parcel.id), parcel.token)
            change = (
                "dead" if parcel.state == "dead" else state,
                parcel.run_at,
                parcel.leased_at,
            )
            db.execute(_LITE_LET_GO, (*change, *fence))


class _LiteEngine(_LiteMoves):
    """The engine for a SQLite database, the application's own or another."""

    # Settle, extend

    def settle(
        self,
        job: Job,
        outcome: str,
        delay: float = 0.0,
        error: str | None = None,
        counted: bool = True,
        connection: Any = None,
    ) -> None:
        note = None if error is None else _to_column(error)
        change: tuple[object, ...] = ()
        if outcome == "done":
            statement = _LITE_DONE
        elif outcome == "dead":
            statement, change = _LITE_BURY, (note,)
        elif counted:
            statement, change = _LITE_RETRY, (*self._pending(delay), note)
        else:
            statement, change = _LITE_RELEASE, self._pending(delay)
        if connection is None:
            self._transact(self._settle, statement, change, job)
        else:
            self._join(connection, self._settle, statement, change, job)

    def _settle(self, db: Any, statement: str, change: Any, job: Job) -> None:
        fence = (self._name, _to_column(job.id), job.token)
        if db.execute(statement, (*change, *fence)).rowcount != 1:
            raise self._lost(job)

    def extend(self, job: Job, seconds: float) -> Job:
        return cast(Job, self._transact(self._extend, job, seconds, synced=False))

    def _extend(self, db: Any, job: Job, seconds: float) -> Job:
        row = self._row(db, job.id)
        if row is None or row.state != "inflight" or row.token != job.token:
            raise self._lost(job)
        holder = self._live_holder() if row.holder else None
        now = time.time()
        turn = db.execute(_LITE_LAST_TURN, (self._name,)).fetchone()[0] + 1
        change = (holder.number if holder else 0, time.monotonic(), now, now + seconds)
        fence = (self._name, _to_column(job.id), job.token)
        db.execute(_LITE_EXTEND, (*change, turn, *fence))
        leased_at = now if row.leased_at is None else row.leased_at
        token = cast(str, job.token)
        return self._leased_job(row, token, leased_at, now + seconds, holder, True)

    # Looking, removing, replaying

    def names(self) -> list[str] | None:
        return cast("list[str] | None", self._transact(self._names, write=False))

    def _names(self, db: Any) -> list[str]:
        return [name for name, _ in db.execute(_LITE_FORMATS).fetchall()]

    def records(self, state: str | None, limit: int | None) -> Iterator[Job]:
        """The first thousand as they are now, others as they are when read."""
        states = list(_NAME_OF) if state is None else [state]
        places, first = self._transact(
            self._snapshot, states, limit, write=False, nothing=(array("q"), [])
        )
        return self._records(places, first, state)

    def _snapshot(
        self, db: Any, states: list[str], limit: int | None
    ) -> tuple[array[int], list[Job]]:
        places = array("q")
        for state in states:
            left = -1 if limit is None else limit - len(places)
            keys = {"name": self._name, "n": left}
            places.extend(row[0] for row in db.execute(_LITE_PLACES[state], keys))
        return places, self._page(db, places[:_LITE_PAGE])

    def _page(self, db: Any, places: Iterable[int]) -> list[Job]:
        jobs = []
        for place in places:
            row = db.execute(_LITE_AT, (place, self._name)).fetchone()
            if row is not None:
                jobs.append(self._view(_LiteRow._make(row)))
        return jobs

    def _records(
        self, places: array[int], jobs: list[Job], state: str | None
    ) -> Iterator[Job]:
        yield from jobs
        for start in range(_LITE_PAGE, len(places), _LITE_PAGE):
            some = places[start : start + _LITE_PAGE]
            for job in self._transact(self._page, some, write=False, nothing=[]):
                if state in (None, job.state):
                    yield job

    def find(self, id: str) -> Job:
        row = self._transact(self._row, id, write=False)
        if row is None:
            raise self._unknown(id, "pending, inflight or dead")
        return self._view(row)

    def requeue(self, id: str | None) -> int:
        if id is not None:
            if not self._transact(self._requeue, [_to_column(id)]):
                raise self._unknown(id, "dead")
            return 1
        count = 0
        last = self._transact(self._last_place, write=False, nothing=0)
        while some := self._transact(self._dead, last, write=False, nothing=[]):
            count += self._transact(self._requeue, some)
        return count

    def _last_place(self, db: Any) -> int:
        return cast(int, db.execute(_LITE_LAST_PLACE).fetchone()[0])

    def _dead(self, db: Any, last: int) -> list[str]:
        rows = db.execute(_LITE_DEAD, (self._name, last, 1000)).fetchall()
        return [row[0] for row in rows]

    def _requeue(self, db: Any, columns: list[str]) -> int:
        count = 0
        for column in columns:
            count += db.execute(_LITE_REQUEUE, (self._name, column)).rowcount
        return count

    def remove(self, id: str) -> bool:
        return bool(self._transact(self._delete, _LITE_REMOVE, (_to_column(id),)))

    def _delete(self, db: Any, statement: str, values: tuple[object, ...]) -> int:
        return cast(int, db.execute(statement, (self._name, *values)).rowcount)

    def purge(self, state: str, older_than: float) -> int:
        """In parts: others get their turn in between."""
        count = 0
        since = time.time() - older_than if older_than else math.inf
        last = self._transact(self._last_place, write=False, nothing=0)
        for kind in ("ready", "delayed") if state == "pending" else (state,):
            while some := self._transact(
                self._delete, _LITE_PURGE, (kind, last, since)
            ):
                count += some
        return count

    def counts(self) -> Stats:
        empty = Stats(0, 0, 0, 0, 0, None, None, 0)
        return cast(Stats, self._transact(self._counts, write=False, nothing=empty))

    def _counts(self, db: Any) -> Stats:
        now = time.time()
        found = db.execute(_LITE_COUNTS, {"name": self._name, "now": now}).fetchone()
        ready, late, delayed, inflight, dead, due = found
        return Stats(
            ready + late,
            delayed,
            inflight,
            dead,
            0,
            self._oldest(db, now),
            due,
            db.execute(_LITE_SIZE).fetchone()[0],
        )

    def _oldest(self, db: Any, now: float) -> float | None:
        """Of the first of each priority, and of those that have become due."""
        keys = {"name": self._name, "now": now}
        since = db.execute(_LITE_OLDEST_LATE, keys).fetchone()[0]
        priority = _MAX_PRIORITY + 1
        while True:
            row = db.execute(_LITE_OLDEST, (self._name, priority)).fetchone()
            if row is None:
                return cast("float | None", since)
            priority = row[0]
            since = row[1] if since is None else min(since, row[1])

    # Waiting, verifying, closing

    def wait(self, seen: object, seconds: float) -> None:
        news, due, version = cast("tuple[int, float, object]", seen)
        seconds = min(seconds, max(0.0, due - time.time()))
        self._watch.wait(news, cast(Any, (f"{self._file}-wal", version)), seconds)

    def compact(self) -> None:
        raise QueueError(
            f"queue {self.path!r}: there is nothing to compact, as SQLite reuses the"
            " space of jobs that are gone; VACUUM makes the file itself smaller",
            path=self._file,
        )

    def verify(self) -> list[Damage]:
        """What SQLite finds wrong; then payloads that are not JSON, by the
        number of their row."""
        file = os.path.basename(self._file)
        whole = self._driver.sqlite_version_info < (3, 33)
        check = "PRAGMA quick_check" + ("" if whole else "(tiny_queue_jobs)")
        try:
            found = self._transact(self._check, check, write=False, nothing=[])
        except QueueError as exc:
            if "malformed" not in str(exc):
                raise
            found = [str(exc.__cause__)]
        damage = [Damage(file, 0, text) for text in found if text != "ok"]
        place = 0
        while not damage:
            rows = self._transact(self._payloads, place, write=False, nothing=[])
            for place, text in rows:
                try:
                    json.loads(text)
                except (TypeError, ValueError) as exc:
                    damage.append(Damage(file, place, f"payload: {exc}"))
            if not rows:
                break
        return damage

    def _check(self, db: Any, statement: str) -> list[str]:
        return [row[0] for row in db.execute(statement).fetchall()]

    def _payloads(self, db: Any, place: int) -> list[tuple[int, str]]:
        return list(db.execute(_LITE_PAYLOADS, (self._name, place)).fetchall())

    def close(self) -> None:
        if self._closed:
            return
        if self._pid != os.getpid():
            self.forked()
        with self._lock.threads():
            self._closed = True
            if self._holder is not None:
                self._holder.file.close()
            self._disconnect()
            self._watch.close()
            self._lock.close()


_ENGINE_OF["sqlite"] = _LiteEngine


# PostgreSQL engine
# =============================================================================
# One table of live jobs in a schema of choice.  A job's `place` is that of its
# last change in the order of all, as a line's place in a file is.  In the text
# below HOME stands for the schema, quoted, and NOW for the server's clock,
# which stands still in a statement but not in a transaction; everything else
# comes as a parameter.
#
# No statement leaves the planner a choice that grows with the backlog: its
# statistics may be of a queue that was empty.  Rows that a statement has locked
# are changed by their ctid, which no other way leads to.  Rows named by id are
# looked up one by one in a LATERAL that cannot be pulled up.  And `state || ''`
# keeps it from reading a whole partial index for the sake of one id, `queue ||
# ''` from reading a whole queue for the sake of the few that are inflight.

_PG_VERSION = 1  # of the tables
_PG_DEFAULT_SCHEMA = "tiny_queue"
_PG_POLL = 0.25  # seconds between two looks without LISTEN
_PG_QUIET = 0.01  # seconds between two NOTIFYs of one process
_PG_RIPE = 1000  # delayed jobs made ready by one statement
_PG_PAGE = 500  # jobs read by one statement of a snapshot
_PG_BATCH = 10_000  # jobs removed or replayed by one statement
_PG_FRONT = 2**62  # taken off the place of a job that goes to the front

_PG_MAKE = """
-- Instants are epoch seconds; text that no database takes is kept as JSON.  The
-- first rev is a random one, so that an id put again has another.
CREATE SEQUENCE IF NOT EXISTS HOME.tiny_queue_place;
CREATE TABLE HOME.tiny_queue_job (
    place bigint NOT NULL DEFAULT nextval('HOME.tiny_queue_place'),
    rev bigint NOT NULL DEFAULT (random() * 1e12),
    created_at double precision NOT NULL,
    run_at double precision NOT NULL,
    leased_at double precision,
    renewed_at double precision,
    lease_until double precision,
    owner bigint,
    attempts bigint NOT NULL DEFAULT 0,
    max_retries bigint,
    priority integer NOT NULL,
    lapses integer NOT NULL DEFAULT 0,
    state text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    token text COLLATE "C",
    moved_from text COLLATE "C",
    last_error text,
    payload json NOT NULL,
    PRIMARY KEY (queue, id)
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_threshold = 2000, autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX tiny_queue_ready ON HOME.tiny_queue_job
    (queue, priority DESC, place) WHERE state = 'ready';
CREATE INDEX tiny_queue_delayed ON HOME.tiny_queue_job
    (queue, run_at) WHERE state = 'delayed';
CREATE INDEX tiny_queue_inflight ON HOME.tiny_queue_job
    (queue, place) WHERE state = 'inflight';
CREATE INDEX tiny_queue_dead ON HOME.tiny_queue_job
    (queue, place) WHERE state = 'dead';
CREATE TABLE HOME.tiny_queue_queues (name text COLLATE "C" PRIMARY KEY);
CREATE TABLE HOME.tiny_queue_version (version integer NOT NULL);
INSERT INTO HOME.tiny_queue_version VALUES (1);
"""

_PG_HAS = """
-- Looking creates nothing, and needs no right.
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = 'tiny_queue_version'
), EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %(schema)s)
"""

_PG_FIND_VERSION = """
-- Tables of another version are left alone.
SELECT version FROM HOME.tiny_queue_version
"""

_PG_REGISTER = """
-- A drained queue is still there.
INSERT INTO HOME.tiny_queue_queues VALUES (%(queue)s) ON CONFLICT DO NOTHING
"""

_PG_NAMES = """
-- Queues that were ever written to.
SELECT name FROM HOME.tiny_queue_queues ORDER BY name
"""

_PG_MAKERS_LOCK = """
-- Of all who come first one makes the tables.
SELECT pg_advisory_xact_lock(%(family)s, 0)
"""

_PG_MAKE_SCHEMA = """
-- The role may lack the right to, so only where there is none.
CREATE SCHEMA HOME
"""

_PG_SET_UP = """
-- Nothing outlives lock_timeout; a dead worker's connection ends soon.
SELECT set_config(name, coalesce(%(settings)s::json ->> name, ''), false)
FROM pg_catalog.pg_settings WHERE %(settings)s::json ->> name IS NOT NULL
"""

_PG_NOW = "extract(epoch FROM statement_timestamp())::float8"
_PG_ROW = """id, state, attempts, priority, created_at, run_at, leased_at,
    lease_until, last_error, max_retries, token, payload::text"""

_PG_LAZY = "CASE WHEN %(lazy)s THEN set_config('synchronous_commit', 'off', true) END"
_PG_TELL = "CASE WHEN %(tell)s THEN pg_notify(%(channel)s, '')::text END"

_PG_PUT = """
-- A job is due at an instant of the server's clock; a live id changes nothing.
INSERT INTO HOME.tiny_queue_job
    (queue, id, state, priority, created_at, run_at, max_retries, payload)
SELECT %(queue)s, %(id)s, CASE WHEN due > NOW THEN 'delayed' ELSE 'ready' END,
    %(priority)s, NOW, CASE WHEN due > NOW THEN due ELSE 0 END,
    %(max_retries)s::bigint, %(payload)s::json
FROM (SELECT coalesce(%(at)s::float8, %(delay)s::float8 + NOW)) AS new (due)
ON CONFLICT (queue, id) DO NOTHING
RETURNING created_at, run_at, TELL, LAZY
"""

_PG_PUT_MANY = """
-- All or none, in the order given.
WITH put AS (
    INSERT INTO HOME.tiny_queue_job
        (queue, id, state, priority, created_at, run_at, payload)
    SELECT %(queue)s, new.id, CASE WHEN %(delay)s > 0 THEN 'delayed' ELSE 'ready' END,
        %(priority)s, NOW,
        CASE WHEN %(delay)s > 0 THEN NOW + %(delay)s ELSE 0 END, new.payload::json
    FROM unnest(%(ids)s::text[], %(payloads)s::text[])
        WITH ORDINALITY AS new (id, payload, n)
    ORDER BY new.n IF_ALIVE RETURNING id
)
SELECT NOW, TELL, LAZY, (SELECT CASE
    WHEN count(*) < cardinality(%(ids)s::text[]) THEN coalesce(array_agg(id), '{}')
    END FROM put)
"""

_PG_UNPUT = """
-- Part of the caller's transaction: what of a put_many came before a live id.
DELETE FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND id = ANY(%(ids)s)
RETURNING true
"""

_PG_TAKE = """
-- What is due later is not scanned, what others lock is skipped, and where
-- something delayed has become due it joins first.  No min(): the planner may
-- read them all for it.  Who is locked stays `ready`:
-- asking for that again would tempt the planner to scan them all.
WITH next AS MATERIALIZED (
    SELECT run_at AS due FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'delayed' ORDER BY run_at LIMIT 1
), picked AS MATERIALIZED (
    SELECT ctid AS spot FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'ready'
        AND (%(ripe)s OR coalesce((SELECT due FROM next) > NOW, true))
    ORDER BY priority DESC, place LIMIT N FOR UPDATE SKIP LOCKED
), placed AS MATERIALIZED (
    SELECT spot, nextval('HOME.tiny_queue_place') AS new_place FROM picked
), taken AS (
    UPDATE HOME.tiny_queue_job SET state = 'inflight', rev = rev + 1,
        place = new_place, attempts = attempts + 1, leased_at = NOW,
        renewed_at = NOW, lease_until = NOW + %(seconds)s, owner = %(owner)s,
        token = %(call)s || new_place
    FROM placed WHERE tiny_queue_job.ctid = spot
    RETURNING place, ROW
)
SELECT (SELECT due FROM next) - NOW, LAZY, taken.*
FROM (VALUES (1)) AS one LEFT JOIN taken ON true ORDER BY taken.place
"""

_PG_RIPEN = """
-- Delayed jobs that are due join the others by their place, boundedly many.
WITH ripe AS MATERIALIZED (
    SELECT ctid AS spot FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'delayed' AND run_at <= NOW
    ORDER BY run_at LIMIT %(n)s FOR UPDATE SKIP LOCKED
)
UPDATE HOME.tiny_queue_job SET state = 'ready' FROM ripe
WHERE tiny_queue_job.ctid = spot
RETURNING LAZY
"""

_PG_MINE = """
-- The leases of a take whose answer was lost.
SELECT place, ROW FROM HOME.tiny_queue_job
WHERE queue || '' = %(queue)s AND state = 'inflight' AND starts_with(token, %(call)s)
ORDER BY place
"""

_PG_LAPSED = """
-- The server knows who lives: a session's lock ends with it.
SELECT id, rev, attempts, max_retries, lapses, priority, moved_from, reason
FROM (
    SELECT *, CASE
        WHEN owner <> 0 AND owner NOT IN (
            SELECT objid::bigint FROM pg_catalog.pg_locks
            WHERE locktype = 'advisory' AND objsubid = 2
                AND classid = %(family)s::bigint::oid AND database = (
                    SELECT oid FROM pg_catalog.pg_database
                    WHERE datname = current_database())
        ) THEN 'holder died'
        WHEN lease_until <= NOW OR renewed_at > NOW + 1 THEN 'lease ran out'
        WHEN NOW - renewed_at >= %(older_than)s::float8 AND moved_from IS NULL
            THEN 'not renewed'
        END AS reason
    FROM HOME.tiny_queue_job
    WHERE queue || '' = %(queue)s AND state = 'inflight'
) AS lease
WHERE reason IS NOT NULL ORDER BY place
"""

_PG_REVIVE = """
-- Jobs of dead holders go to the front of their priority, as many as are taken.
WITH lapse AS (
    SELECT * FROM unnest(%(ids)s::text[], %(revs)s::bigint[], %(errors)s::text[])
        AS lapse (lapse_id, lapse_rev, error)
), ready AS MATERIALIZED (
    SELECT priority, place FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'ready'
    ORDER BY priority DESC, place LIMIT %(n)s
), over AS MATERIALIZED (
    SELECT spot, error, priority, old FROM lapse CROSS JOIN LATERAL (
        SELECT ctid AS spot, priority, place AS old FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND id = lapse_id AND rev = lapse_rev
            AND state || '' = 'inflight' FOR UPDATE SKIP LOCKED) AS live
), first AS MATERIALIZED (
    SELECT spot, error AS why FROM (
        SELECT spot, error, true AS lapsed, priority, old FROM over
        UNION ALL SELECT NULL, NULL, false, priority, place FROM ready
        ORDER BY priority DESC, lapsed DESC, old LIMIT %(n)s) AS merged
    WHERE lapsed
)
UPDATE HOME.tiny_queue_job SET state = 'ready', rev = rev + 1,
    place = place - %(front)s, lapses = lapses + 1, last_error = why,
    leased_at = NULL, renewed_at = NULL, lease_until = NULL, owner = NULL,
    token = NULL
FROM first WHERE tiny_queue_job.ctid = spot
RETURNING LAZY
"""

_PG_GIVE_BACK = """
-- Only what has not changed meanwhile; who settles in an open transaction wins.
WITH lapse AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::text[], %(revs)s::bigint[], %(delays)s::float8[],
        %(errors)s::text[]) WITH ORDINALITY
        AS lapse (lapse_id, lapse_rev, delay, error, n)
), over AS MATERIALIZED (
    SELECT spot, delay, error, n FROM lapse CROSS JOIN LATERAL (
        SELECT ctid AS spot FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND id = lapse_id AND rev = lapse_rev
            AND state || '' = 'inflight' FOR UPDATE SKIP LOCKED) AS live
    ORDER BY n
), placed AS MATERIALIZED (
    SELECT over.*, nextval('HOME.tiny_queue_place') AS new_place FROM over
), given AS (
    UPDATE HOME.tiny_queue_job SET rev = rev + 1, place = new_place,
        state = CASE WHEN delay IS NULL THEN 'dead' WHEN delay > 0 THEN 'delayed'
            ELSE 'ready' END,
        run_at = CASE WHEN delay IS NULL THEN run_at WHEN delay > 0 THEN NOW + delay
            ELSE 0 END,
        leased_at = CASE WHEN delay IS NULL THEN leased_at END,
        lapses = lapses + 1, last_error = error, renewed_at = NULL,
        lease_until = NULL, owner = NULL, token = NULL
    FROM placed WHERE tiny_queue_job.ctid = spot
    RETURNING 1
)
SELECT (SELECT count(*) FROM given), TELL, LAZY
"""

_PG_DONE = """
-- The token is the fence.
DELETE FROM HOME.tiny_queue_job
WHERE queue = %(queue)s AND id = %(id)s AND state || '' = 'inflight'
    AND token = %(token)s
RETURNING LAZY
"""

_PG_BACK = """
-- The token is the fence; a job that comes back goes last.
UPDATE HOME.tiny_queue_job SET rev = rev + 1,
    place = nextval('HOME.tiny_queue_place'),
    state = CASE WHEN %(delay)s::float8 > 0 THEN 'delayed' ELSE 'ready' END,
    run_at = CASE WHEN %(delay)s::float8 > 0 THEN NOW + %(delay)s::float8 ELSE 0 END,
    attempts = CASE WHEN %(counted)s THEN attempts ELSE attempts - 1 END,
    lapses = CASE WHEN %(counted)s THEN 0 ELSE lapses END,
    last_error = CASE WHEN %(counted)s THEN %(error)s ELSE last_error END,
    leased_at = NULL, renewed_at = NULL, lease_until = NULL, owner = NULL,
    token = NULL
WHERE queue = %(queue)s AND id = %(id)s AND state || '' = 'inflight'
    AND token = %(token)s
RETURNING TELL, LAZY
"""

_PG_BURY = """
-- The token is the fence.
UPDATE HOME.tiny_queue_job SET rev = rev + 1, state = 'dead',
    place = nextval('HOME.tiny_queue_place'), lapses = 0, last_error = %(error)s,
    renewed_at = NULL, lease_until = NULL, owner = NULL, token = NULL
WHERE queue = %(queue)s AND id = %(id)s AND state || '' = 'inflight'
    AND token = %(token)s
RETURNING LAZY
"""

_PG_EXTEND = """
-- From now, not from the old end; whoever renews it is its holder.
UPDATE HOME.tiny_queue_job SET rev = rev + 1,
    place = nextval('HOME.tiny_queue_place'), renewed_at = NOW,
    lease_until = NOW + %(seconds)s,
    owner = CASE WHEN owner = 0 THEN 0 ELSE %(owner)s END
WHERE queue = %(queue)s AND id = %(id)s AND state || '' = 'inflight'
    AND token = %(token)s
RETURNING LAZY, ROW
"""

_PG_RENAME = """
-- A session was lost, and the new one answers for what still runs.  Not for all of
-- its jobs: a crash may have forgotten that some were settled.
UPDATE HOME.tiny_queue_job SET rev = rev + 1, owner = %(owner)s
WHERE queue || '' = %(queue)s AND state = 'inflight' AND owner = %(old)s
    AND token = ANY(%(tokens)s::text[])
RETURNING LAZY
"""

_PG_FIND = """
-- A short index scan.
SELECT ROW FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND id = %(id)s
"""

_PG_ALIVE = """
-- The first of some ids that lives.  I5: our lock on it makes our commit sync the
-- one that it rests on; whoever settles it in an open transaction is not waited for.
SELECT live.* FROM unnest(%(ids)s::text[]) WITH ORDINALITY AS one (one_id, n)
CROSS JOIN LATERAL (
    SELECT ROW FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND id = one_id LIMIT 1 SYNCED) AS live
ORDER BY n LIMIT 1
"""

_PG_SNAPSHOT = """
-- Ids have no control characters: one text holds them all, in order.
SELECT string_agg(id, E'\\n' ORDER BY part, place) FROM (
    SELECT id, place, CASE state WHEN 'inflight' THEN 1 WHEN 'dead' THEN 2 ELSE 0 END
        AS part
    FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = ANY(%(states)s)
    ORDER BY part, place LIMIT %(limit)s
) AS live
"""

_PG_PAGE_OF = """
-- Each job as it is now, if it is still in one of the states.
SELECT live.* FROM unnest(%(ids)s::text[]) AS one (one_id)
CROSS JOIN LATERAL (
    SELECT ROW FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND id = one_id LIMIT 1) AS live
WHERE state = ANY(%(states)s)
"""

_PG_REQUEUE = """
-- Oldest death first; deaths since the first look wait for the next call.
WITH picked AS MATERIALIZED (
    SELECT ctid AS spot FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'dead' AND place <= %(last)s
    ORDER BY place LIMIT %(n)s FOR UPDATE SKIP LOCKED
), placed AS MATERIALIZED (
    SELECT spot, nextval('HOME.tiny_queue_place') AS new_place FROM picked
), back AS (
    UPDATE HOME.tiny_queue_job SET state = 'ready', rev = rev + 1,
        place = new_place, run_at = 0, attempts = 0, lapses = 0, leased_at = NULL
    FROM placed WHERE tiny_queue_job.ctid = spot
    RETURNING 1
)
SELECT (SELECT count(*) FROM back), TELL, LAZY
"""

_PG_LAST_DEATH = """
-- Bounds requeue_dead() against jobs that die again at once.
SELECT max(place) FROM HOME.tiny_queue_job
WHERE queue = %(queue)s AND state = 'dead'
"""

_PG_REQUEUE_ONE = """
-- Dead or not: nothing else can be replayed.
UPDATE HOME.tiny_queue_job SET state = 'ready', rev = rev + 1,
    place = nextval('HOME.tiny_queue_place'), run_at = 0, attempts = 0, lapses = 0,
    leased_at = NULL
WHERE queue = %(queue)s AND id = %(id)s AND state || '' = 'dead'
RETURNING TELL, LAZY
"""

_PG_REMOVE = """
-- In any state; a lease on it is lost.
DELETE FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND id = %(id)s
RETURNING LAZY
"""

_PG_PURGE = """
-- Boundedly many at a time, none put since the first look.
WITH picked AS MATERIALIZED (
    SELECT ctid AS spot FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = ANY(%(states)s) AND created_at <= %(start)s
        AND %(start)s - greatest(created_at, leased_at) >= %(older_than)s::float8
    LIMIT %(n)s FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM HOME.tiny_queue_job USING picked
    WHERE tiny_queue_job.ctid = spot
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), LAZY
"""

_PG_CLOCK = """
-- Instants are the server's.
SELECT NOW
"""

_PG_COUNTS = """
-- Each count reads one partial index; `oldest` asks the first job of each
-- priority that was never delayed, and all that were.
WITH RECURSIVE head AS (
    (SELECT priority, created_at AS since
    FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'ready' AND run_at = 0
    ORDER BY priority DESC, place LIMIT 1)
    UNION ALL
    SELECT below.* FROM head CROSS JOIN LATERAL (
        SELECT priority, created_at
        FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND state = 'ready'
            AND run_at = 0 AND priority < head.priority
        ORDER BY priority DESC, place LIMIT 1) AS below
), ready AS (
    SELECT count(*) AS jobs, min(run_at) FILTER (WHERE run_at > 0) AS since
    FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND state = 'ready'
), delayed AS (
    SELECT count(*) AS jobs, count(*) FILTER (WHERE run_at <= NOW) AS due,
        min(run_at) FILTER (WHERE run_at <= NOW) AS since,
        min(run_at) FILTER (WHERE run_at > NOW) AS next
    FROM HOME.tiny_queue_job WHERE queue = %(queue)s AND state = 'delayed'
)
SELECT
    ready.jobs + delayed.jobs,
    delayed.jobs - due,
    (SELECT count(*) FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND state = 'inflight'),
    (SELECT count(*) FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND state = 'dead'),
    0, least((SELECT min(since) FROM head), ready.since, delayed.since), next,
    pg_total_relation_size('HOME.tiny_queue_job')
FROM ready, delayed
"""

_PG_LOCK = """
-- The session's lock stands for its owner number.
SELECT pg_try_advisory_lock(%(family)s, %(owner)s)
"""

_PG_PEEK = """
-- Between LISTEN and sleeping: did something come, and when is something due?
SELECT (SELECT true FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND state = 'ready'
        ORDER BY priority DESC, place LIMIT 1),
    (SELECT run_at FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND state = 'delayed' ORDER BY run_at LIMIT 1) - NOW
"""

_PG_RING = """
-- What the last puts of a busy producer owe.
SELECT TELL, LAZY
"""

_PG_WHERE = """
-- The same server, database and table, whatever the way there; and as numbers,
-- whatever the session's time zone and style of dates.
SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    (SELECT oid::bigint FROM pg_catalog.pg_database
        WHERE datname = current_database()),
    to_regclass('HOME.tiny_queue_job')::oid::bigint
"""

_PG_HOLD = """
-- Under new tokens, without holder; nothing else of the job changes.
WITH picked AS MATERIALIZED (
    SELECT ctid AS spot FROM HOME.tiny_queue_job
    WHERE queue = %(queue)s AND state = 'STATE' ORDER BY PLACING LIMIT %(n)s
    FOR UPDATE SKIP LOCKED
), held AS (
    UPDATE HOME.tiny_queue_job SET state = 'inflight', rev = rev + 1,
        moved_from = %(state)s, renewed_at = NOW, lease_until = NOW + %(seconds)s,
        owner = 0, token = %(prefix)s || nextval('HOME.tiny_queue_place') || %(end)s
    FROM picked WHERE tiny_queue_job.ctid = spot
    RETURNING tiny_queue_job.*
)
SELECT PARCEL, LAZY FROM held ORDER BY PLACING
"""

_PG_PARCEL = """id, payload::text, moved_from, attempts, priority, created_at,
    run_at, leased_at, last_error, max_retries, lapses, token"""

_PG_HELD = """
-- Tokens tell which jobs are whose.
SELECT PARCEL FROM HOME.tiny_queue_job
WHERE queue || '' = %(queue)s AND state = 'inflight' AND starts_with(token, %(prefix)s)
    AND moved_from IS NOT NULL
ORDER BY place
"""

_PG_REHOLD = """
-- Under new tokens: whoever has the old ones can change nothing any more.
WITH held AS (
    UPDATE HOME.tiny_queue_job SET rev = rev + 1,
        renewed_at = NOW, lease_until = NOW + %(seconds)s,
        token = %(prefix)s || nextval('HOME.tiny_queue_place') || '-' || moved_from
    WHERE queue || '' = %(queue)s AND state = 'inflight'
        AND starts_with(token, %(prefix)s) AND moved_from IS NOT NULL
    RETURNING *
)
SELECT PARCEL, LAZY FROM held ORDER BY place
"""

_PG_ADOPT = """
-- All or none, inflight as they are on the other side.
WITH new AS (
    INSERT INTO HOME.tiny_queue_job (queue, id, payload, moved_from, attempts,
        priority, created_at, run_at, leased_at, last_error, max_retries, lapses,
        token, state, renewed_at, lease_until, owner)
    SELECT %(queue)s, id, payload::json, state, attempts, priority, created_at,
        run_at, leased_at, last_error, max_retries, lapses, token, 'inflight', NOW,
        NOW + %(seconds)s, 0
    FROM unnest(%(id)s::text[], %(text)s::text[], %(state)s::text[],
        %(attempts)s::bigint[], %(priority)s::integer[], %(created_at)s::float8[],
        %(run_at)s::float8[], %(leased_at)s::float8[], %(last_error)s::text[],
        %(max_retries)s::bigint[], %(lapses)s::integer[], %(token)s::text[])
        WITH ORDINALITY AS parcel (id, payload, state, attempts, priority, created_at,
        run_at, leased_at, last_error, max_retries, lapses, token, n)
    ORDER BY n RETURNING 1
)
SELECT LAZY, (SELECT count(*) FROM new)
"""

_PG_HERE = """
    SELECT spot FROM unnest(%(ids)s::text[], %(tokens)s::text[])
        AS held (held_id, held_token)
    CROSS JOIN LATERAL (
        SELECT ctid AS spot FROM HOME.tiny_queue_job
        WHERE queue = %(queue)s AND id = held_id AND token = held_token
            AND state || '' = 'inflight' FOR UPDATE) AS live
"""

_PG_DROP = """
-- The tokens are the fence.
WITH here AS MATERIALIZED (HERE), gone AS (
    DELETE FROM HOME.tiny_queue_job USING here WHERE tiny_queue_job.ctid = spot
    RETURNING id
)
SELECT id, LAZY FROM gone
"""

_PG_LET_GO = """
-- The tokens are the fence; a job becomes what it was, in its old place.
WITH here AS MATERIALIZED (HERE)
UPDATE HOME.tiny_queue_job SET rev = rev + 1, moved_from = NULL,
    state = CASE WHEN moved_from = 'dead' THEN 'dead' WHEN run_at > NOW THEN 'delayed'
        ELSE 'ready' END,
    renewed_at = NULL, lease_until = NULL, owner = NULL, token = NULL
FROM here WHERE tiny_queue_job.ctid = spot AND moved_from IS NOT NULL
RETURNING TELL, LAZY
"""

_PG_LET_GO_LAPSED = """
-- Whoever moved these died: they become what they were.
UPDATE HOME.tiny_queue_job SET rev = rev + 1, moved_from = NULL,
    state = CASE WHEN moved_from = 'dead' THEN 'dead' WHEN run_at > NOW THEN 'delayed'
        ELSE 'ready' END,
    renewed_at = NULL, lease_until = NULL, owner = NULL, token = NULL
WHERE queue || '' = %(queue)s AND state = 'inflight' AND moved_from IS NOT NULL
    AND (lease_until <= NOW OR renewed_at > NOW + 1)
RETURNING LAZY
"""


def _psycopg() -> Any:
    """The driver, imported when its URL is used."""
    import importlib

    try:
        return importlib.import_module("psycopg")
    except ImportError as exc:
        raise QueueError(
            "postgresql:// URLs need psycopg 3, which does not import here"
            f' ({exc}); pip install "psycopg[binary]", or the extra of a checkout:'
            ' pip install ".[postgres]"'
        ) from exc


def _pg_schema(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", text):
        raise ValueError(f"{text!r} is not of 1 to 63 letters, digits and _")
    return text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not int(text):
        raise ValueError(f"{text!r} is not a number from 1 to 9999")
    return int(text)


# What a URL may say to the engine; everything else in it is for libpq.
_PG_OPTIONS: dict[str, tuple[Callable[[str], Any], Any]] = {
    "schema": (_pg_schema, _PG_DEFAULT_SCHEMA),
    "notify": (_switch, True),  # 0: no session state, for PgBouncer
    "pool": (_positive, 4),  # connections at most, beside the one that listens
    "keepalive": (_positive, 10),  # seconds of silence before TCP asks
}


def _pg_option(name: str, text: str) -> Any:
    try:
        return _PG_OPTIONS[name][0](text)
    except ValueError as exc:
        raise ValueError(f"path: its option {name}: {exc}") from None


# By SQLSTATE: the error's class, and what to do about it.
_PG_ADVICE: dict[str, tuple[type[QueueError], str]] = {
    "55P03": (
        LockTimeoutError,
        "another transaction holds the job or its id; is one with connection= open?",
    ),
    "57014": (LockTimeoutError, "the server took too long, or somebody cancelled it"),
    "53100": (QueueError, "the server's disk is full; free space there"),
    "42501": (
        QueueError,
        "the role needs USAGE on the schema and the sequence tiny_queue_place, and"
        " SELECT, INSERT, UPDATE, DELETE on its tables; to make them, CREATE on the"
        " database",
    ),
    "42P01": (
        QueueError,
        "its tables were dropped; if all are, the next call makes them anew",
    ),
    "3F000": (QueueError, "the schema was dropped; the next call makes it anew"),
    "25006": (QueueError, "this server only reads; connect to the primary"),
}
_PG_RETRIED = {"40001", "40P01", "57P01", "57P03"}  # nothing of it was carried out
# Answers to a login that no second try changes; libpq has no code for them.
_PG_FINAL = re.compile(
    r"authentication failed|does not exist|pg_hba\.conf|no password supplied"
    r"|not permitted to log in|permission denied|unsupported startup|invalid"
)


def _poll(fd: int, events: int, seconds: float) -> int:
    """Which of 1 (readable) and 2 (writable) a descriptor is, in time."""
    import select

    seconds = min(max(seconds, 0.0), 86400.0)
    if not hasattr(select, "poll"):
        read, write = [fd] if events & 1 else [], [fd] if events & 2 else []
        read, write, _ = select.select(read, write, [], seconds)
        return bool(read) + 2 * bool(write)
    poll = select.poll()
    poll.register(fd, (events & 1 and select.POLLIN) | (events & 2 and select.POLLOUT))
    found = poll.poll(math.ceil(seconds * 1000))
    if not found:
        return 0
    wanted = found[0][1]
    if wanted & ~(select.POLLIN | select.POLLOUT):
        return events  # an error: reading or writing will say which
    return bool(wanted & select.POLLIN) + 2 * bool(wanted & select.POLLOUT)


class _Patience:
    """Stands in for the wait() of a psycopg connection, which has no end."""

    __slots__ = ("fd", "deadline")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.deadline = math.inf

    def wait(self, steps: Any, *_: object, **__: object) -> Any:
        """Run a protocol exchange; TimeoutError leaves it where it is."""
        try:
            events = next(steps)
            while True:
                ready = _poll(self.fd, events, self.deadline - time.monotonic())
                if not ready and time.monotonic() >= self.deadline:
                    raise TimeoutError("the server does not answer")
                if ready:
                    events = steps.send(ready)
        except StopIteration as end:
            return end.value


_PG_INHERITED: list[Any] = []  # a parent's connections: never closed, never freed


class _UnreachableError(Exception):
    """No connection came about; its cause says why."""


class _PgLink:
    """A connection of ours, in autocommit; or room for one."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.pid = os.getpid()
        self.patience = _Patience(-1)

    def open(self, connection: Any) -> None:
        self.connection = connection
        self.patience.fd = connection.fileno()
        connection.wait = self.patience.wait
        self._cursor = connection.cursor()

    def rows(self, sql: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        self._cursor.execute(sql, params)
        return cast("list[tuple[Any, ...]]", self._cursor.fetchall())

    def do(self, sql: str, params: dict[str, Any] | None = None) -> None:
        self._cursor.execute(sql, params)

    def closed(self) -> bool:
        return self.connection is None or bool(self.connection.closed)

    def usable(self) -> bool:
        """Whether nothing is in flight on it, nor has the server closed it."""
        return (
            not self.closed()
            and self.connection.info.transaction_status == 0
            and not _poll(self.patience.fd, 1, 0)
        )

    def close(self) -> None:
        if self.pid == os.getpid() and not self.closed():
            self.connection.close()

    def abandon(self) -> None:
        """In a child: let go of the descriptor only.  The parent's session goes
        on, and must end when the parent does."""
        if not self.closed():
            os.close(self.patience.fd)
            _PG_INHERITED.append(self.connection)

    def __del__(self) -> None:
        self.close()


class _PgPool:
    """At most so many connections; the last one used is the next one used.

    Those lent are known weakly: one that a Ctrl-C has lost makes room again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._cond = threading.Condition()
        self._free: list[_PgLink] = []
        self._all: weakref.WeakSet[_PgLink] = weakref.WeakSet()
        self.closed = False

    def lend(
        self, deadline: float, connect: Callable[[_PgLink], object]
    ) -> _PgLink | None:
        """A connection to give back(), or None if none comes free in time."""
        with self._cond:
            while not self._free and len(self._all) >= self._size:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._cond.wait(min(left, 0.1))
            link = self._free.pop() if self._free else _PgLink()
            self._all.add(link)
        try:
            if not link.usable():
                link.close()
                connect(link)
            return link
        except BaseException:  # its traceback would keep the link
            self.give_back(link)
            raise

    def give_back(self, link: _PgLink) -> None:
        if not link.usable() or self.closed:
            link.close()
        with self._cond:
            if link.closed():
                self._all.discard(link)
            else:
                self._free.append(link)
            self._cond.notify()

    def close(self) -> None:
        self.closed = True
        while self._free:
            self._free.pop().close()

    def abandon(self) -> None:
        for link in list(self._all):
            link.abandon()


class _PgSession:
    """Proof of life: a lock that the server drops with the connection.

    The connection also listens while somebody waits, and only then: messages
    that nobody reads would in the end keep the server from vacuuming.
    """

    def __init__(self, link: _PgLink, number: int) -> None:
        self.link = link
        self.number = number
        self.lock = threading.Lock()  # the connection is for one thread at a time
        self.gone = False
        self.told: list[Any] = []  # what it heard while it was asked something
        link.connection.add_notify_handler(self.told.append)

    def lost(self) -> bool:
        """Whether the server has ended it, as far as is known here."""
        if not self.gone and not self.lock.locked():
            with self.lock:
                self.gone = not self.link.usable()
        return self.gone

    def resign(self) -> None:
        """Drop the lock: that a connection ended the server sees a bit later."""
        if not self.lock.locked():
            with self.lock:
                if self.link.usable():
                    self.link.patience.deadline = time.monotonic() + 1.0
                    self.link.do("SELECT pg_advisory_unlock_all()")

    def close(self) -> None:
        """End it at once, even under a thread that waits on it."""
        self.gone = True
        if not self.lock.locked():
            with self.lock:
                self.link.close()
        elif self.link.pid == os.getpid() and not self.link.closed():
            import socket

            with socket.socket(fileno=os.dup(self.link.patience.fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)

    def hear(self, seconds: float) -> bool:
        """Sleep until the server says something, or for so long."""
        pgconn = self.link.connection.pgconn
        if self.told:
            return True
        if not _poll(self.link.patience.fd, 1, seconds):
            return False
        pgconn.consume_input()
        while pgconn.notifies():
            pass
        return True

    def __del__(self) -> None:
        self.close()


class _PgWatch(_Watch):
    """Sleeps until a producer tells, or without LISTEN for a short while."""

    def _listen(self, data: Any, seconds: float) -> bool:
        return bool(data(seconds))


class _PgBell:
    """Tells waiting workers of new jobs, at most once in _PG_QUIET.

    A transaction with a NOTIFY commits under a lock that all of a cluster's
    share, so busy producers tell rarely.  Whoever was kept from it owes a
    telling, which the next put pays, or a thread when none comes in time.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._engine_ring = weakref.WeakMethod(ring)
        self._lock = threading.Lock()
        self._told = -math.inf
        self.owing = False
        self._payer: threading.Thread | None = None

    def ask(self) -> bool:
        """Whether a statement is to tell; if so, what was owed is paid."""
        now = time.monotonic()
        with self._lock:
            if now - self._told < _PG_QUIET:
                return False
            self._told = now
            self.owing = False
            return True

    def owe(self) -> None:
        """A change that did not tell was committed."""
        with self._lock:
            self.owing = True
            if self._payer is not None:
                return
            payer = threading.Thread(target=self._pay, daemon=True)
            try:
                payer.start()
                self._payer = payer
                return
            except RuntimeError:
                pass  # no thread is to be had, as while the interpreter ends
        self.settle_up()

    def _pay(self) -> None:
        """Pay what is owed; end after a while without debts."""
        idle = 0
        while idle < 20:
            time.sleep(_PG_QUIET)
            idle += 1
            if self.owing:
                with self._lock:
                    self.owing, self._told = False, time.monotonic()
                self._ring()
                idle = 0
        with self._lock:
            self._payer = None
            owing = self.owing
        if owing:
            self.owe()

    def settle_up(self) -> None:
        if self.owing:
            self.owing = False
            self._ring()

    def _ring(self) -> None:
        ring = self._engine_ring()
        if ring is not None:
            ring()


class _PgCore(_Database):
    """Connections to one server, and what becomes of its errors."""

    steady_leases = False  # the server's wall clock is the only one that all see

    def __init__(self, url: str, name: str, **options: Any) -> None:
        super().__init__(url, name, **options)
        self.path = _masked(url)
        self._driver = _psycopg()
        self._secrets: set[str] = set()
        found, self._conninfo = self._read_url(url)
        self._schema: str = found["schema"]
        self._notify: bool = found["notify"]
        self._size: int = found["pool"]
        self._keepalive: int = found["keepalive"]
        place = crc32(f"{self._schema} {name}".encode())
        self._channel = f"tiny_queue_{place:08x}"  # a clash costs idle looks only
        self._family = crc32(f"tiny_queue {self._schema}".encode()) & 0x7FFFFFFF
        self._words = {
            "HOME": f'"{self._schema}"', "NOW": _PG_NOW, "ROW": _PG_ROW,
            "TELL": _PG_TELL, "LAZY": _PG_LAZY, "PARCEL": _PG_PARCEL, "HERE": _PG_HERE,
        }  # fmt: skip
        self._texts: dict[str, str] = {}
        self._reset()
        _ENGINES.add(self)

    def _ring(self) -> None:
        raise NotImplementedError

    def _reset(self) -> None:
        """Forget all that a process may not share with its parent."""
        self._begin()
        self._made = False  # whether the tables were found
        self._registered = False  # and the queue's name is there
        self._tokens: dict[str, float] = {}  # unsettled leases and their ends
        self._session: _PgSession | None = None
        self._session_turn = threading.Condition()
        self._opening = False
        self._pool = _PgPool(self._size)
        self._watch = _PgWatch()
        self._bell = _PgBell(self._ring)
        self._joined: weakref.WeakSet[Any] = weakref.WeakSet()
        self._home: object = None

    def forked(self) -> None:
        self._pool.abandon()
        if self._session is not None:
            self._session.link.abandon()
        self._reset()

    def _read_url(self, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Our options with their defaults, and libpq's parameters."""
        base, query = _split_url(url)
        options = {name: default for name, (_, default) in _PG_OPTIONS.items()}
        pq = self._driver.pq.Conninfo.get_defaults()
        known = {option.keyword.decode() for option in pq} | {"ssl"}
        rest = []
        for item in filter(None, query.split("&")):
            name, _, text = item.partition("=")
            if name in _PG_OPTIONS:
                options[name] = _pg_option(name, _unquoted(text))
            elif name in known:
                rest.append(item)
                if "password" in name:
                    self._secrets |= {text, _unquoted(text)} - {""}
            else:
                # Of a password with a ? or & in it that is not percent-encoded.
                name = name if re.fullmatch(r"\w+", name) else "***"
                raise ValueError(
                    f"path: no option {name!r} in PostgreSQL URLs; known are"
                    f" {', '.join([*_PG_OPTIONS, *sorted(known)])}"
                )
        try:
            found = self._driver.conninfo.conninfo_to_dict(
                base + "?" * bool(rest) + "&".join(rest)
            )
        except self._driver.Error as exc:
            reason = self._clean(str(exc), _password_in(url))
            raise ValueError(f"path: {self.path!r} is no URL: {reason}") from None
        self._secrets |= {found[key] for key in found if "password" in key}
        self._secrets |= _password_in(url)
        return options, found

    def _clean(self, text: str, secrets: Iterable[str] = ()) -> str:
        """What may be shown of the driver's words: one line, no password."""
        for secret in sorted({*self._secrets, *secrets}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return " ".join(text.split())

    # Connections

    def _connect(self, link: _PgLink) -> None:
        """Give it a new connection that never waits beyond lock_timeout."""
        lasting = max(self._lock_timeout, 1.0)
        hosts = str(self._conninfo.get("host", "")).count(",") + 1
        milliseconds = int(min(lasting * 1000, 2**31 - 1))
        conninfo = {
            "connect_timeout": math.ceil(min(lasting, 1e6) / hosts),
            "client_encoding": "utf8",
            "fallback_application_name": f"tiny_queue {os.getpid()}",
            "keepalives_idle": self._keepalive,
            "keepalives_interval": max(1, self._keepalive // 3),
            "keepalives_count": 3,
            "tcp_user_timeout": milliseconds,
            **self._conninfo,
        }
        threshold = 5 if self._notify else None  # a pooler mixes sessions up
        try:
            link.open(
                self._driver.connect(
                    autocommit=True, prepare_threshold=threshold, **conninfo
                )
            )
            link.patience.deadline = time.monotonic() + lasting
            if self._notify:
                self._set_up(link, milliseconds)
        except (self._driver.Error, OSError) as exc:
            link.close()
            raise _UnreachableError from exc

    def _set_up(self, link: _PgLink, milliseconds: int) -> None:
        # Each statement is a few steps in an index.  The planner must not think
        # otherwise because its statistics were made while the queue was empty.
        settings = {
            "lock_timeout": milliseconds,
            "statement_timeout": min(6 * milliseconds, 2**31 - 1),
            "idle_in_transaction_session_timeout": milliseconds,
            "idle_session_timeout": 0,
            "default_transaction_isolation": "read committed",
            "jit": "off",
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
            "tcp_keepalives_idle": self._keepalive,
            "tcp_keepalives_interval": max(1, self._keepalive // 3),
            "tcp_keepalives_count": 3,
            "tcp_user_timeout": 3 * max(1, self._keepalive) * 1000,
        }
        text = json.dumps({key: str(value) for key, value in settings.items()})
        link.rows(_PG_SET_UP, {"settings": text})

    def _run(
        self,
        body: Callable[..., Any],
        *args: Any,
        again: bool = False,
        bulk: bool = False,
        write: bool = False,
        bare: bool = False,
        nothing: Any = None,
    ) -> Any:
        """Run body(link, doubt, *args) on a connection, within lock_timeout.

        What certainly was not carried out is tried again; `again` says that
        body can also repeat what may have been, and `doubt` tells it that.
        `nothing` is the answer where nothing was ever written, unless body
        needs no tables (`bare`).
        """
        if self._pid != os.getpid():
            self.forked()
        lasting = max(self._lock_timeout, 1.0) * (6 if bulk else 1)
        deadline = time.monotonic() + lasting
        pause, doubt, warned = 0.01, False, False
        while True:
            link, sent = None, False
            try:
                link = self._lend(deadline)
                if not (bare or self._ready(link, write)):
                    return nothing
                sent = True
                return body(link, doubt, *args)
            except (self._driver.Error, OSError, _UnreachableError) as exc:
                error, retried, lost = self._judge(exc, link)
                doubt = doubt or (sent and lost)
                late = time.monotonic() + pause >= deadline
                if late or not retried or (sent and lost and not again):
                    raise (self._in_doubt(error) if doubt else error) from exc
                log = _log().debug if warned else _log().warning  # a line is enough
                log("%s; it is tried again for at most %g s", error, lasting)
                warned = True
            finally:
                if link is not None:
                    self._pool.give_back(link)
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _lend(self, deadline: float) -> _PgLink:
        self._check_open()
        start = time.monotonic()
        link = self._pool.lend(min(deadline, start + self._lock_timeout), self._connect)
        if link is None:
            raise LockTimeoutError(
                f"queue {self.path!r}: all {self._size} connections of its pool were in"
                f" use for {self._lock_timeout:g} s; give the URL a larger ?pool=",
                path=self.path,
                timeout=self._lock_timeout,
            )
        link.patience.deadline = deadline + 0.25  # the server's own timeouts say more
        return link

    def _judge(
        self, exc: Exception, link: _PgLink | _PgGuest | None
    ) -> tuple[QueueError, bool, bool]:
        """Our error for the driver's; whether another try may help; whether
        nobody can tell if the statement was carried out."""
        unreachable = isinstance(exc, _UnreachableError)
        exc = cast(Exception, exc.__cause__) if unreachable else exc
        code = getattr(exc, "sqlstate", None)
        # Not all of it: its detail may quote a row, payload included.
        said = getattr(getattr(exc, "diag", None), "message_primary", None)
        text = self._clean(said or str(exc))
        kind, advice = _PG_ADVICE.get(code or "", (QueueError, "nothing was changed"))
        if isinstance(exc, TimeoutError):
            kind, advice = LockTimeoutError, "is it stopped, or the network cut?"
        if code in ("42P01", "3F000"):
            self._made = self._registered = False
        data: dict[str, Any] = {"path": self.path, "sqlstate": code}
        if kind is LockTimeoutError:
            data["timeout"] = self._lock_timeout
        if code == "53100":
            data["errno"] = errno.ENOSPC
        error = kind(f"queue {self.path!r}: {text}; {advice}", **data)
        if unreachable or link is None:
            return error, not _PG_FINAL.search(text), False
        if code in _PG_RETRIED:
            return error, True, False
        lost = isinstance(exc, OSError) or bool(link.connection.closed)
        return error, lost, lost

    def _in_doubt(self, error: QueueError) -> QueueError:
        """The statement may have been carried out: nothing else is known."""
        return type(error)(
            f"{error}; the outcome is unknown: look whether it was carried out, or"
            " repeat it in a form that does no harm twice (a put by its id with"
            " exist_ok)",
            **{**vars(error), "outcome_unknown": True},
        )

    # Tables

    def _ready(self, link: _PgLink, write: bool) -> bool:
        """Whether the tables are there, of this version; a writer makes them,
        and registers the queue."""
        if self._registered or (self._made and not write):
            return True
        there = link.rows(_PG_HAS, {"schema": self._schema})[0][0]
        if not there and write:
            self._create(link)
        elif not there:
            return False
        rows = link.rows(self._sql(_PG_FIND_VERSION), {})
        version = rows[0][0] if rows else None
        if version != _PG_VERSION:
            raise QueueError(
                f"queue {self.path!r}: the tables in schema {self._schema!r} are of"
                f" version {version}, and this tiny_queue {__version__} knows"
                f" {_PG_VERSION}; use the same version of it everywhere, or another"
                " ?schema=",
                path=self.path,
            )
        if write:
            link.do(self._sql(_PG_REGISTER), {"queue": self._name})
        self._made, self._registered = True, write
        return True

    def _create(self, link: _PgLink) -> None:
        """One of all who come first makes them, the others wait for it."""
        with link.connection.transaction():
            link.do(_PG_MAKERS_LOCK, {"family": self._family})
            there, schema = link.rows(_PG_HAS, {"schema": self._schema})[0]
            if not schema:
                link.do(self._sql(_PG_MAKE_SCHEMA))
            if not there:
                link.do(self._sql(_PG_MAKE))

    def _sql(self, template: str, **words: str) -> str:
        """A statement with the schema in its place; no user's text."""
        key = template + "".join(words.values()) if words else template
        text = self._texts.get(key)
        if text is None:
            words = {**self._words, **words}
            # What is quoted is the schema's name, which may be one of these words.
            word = re.compile(rf"(?<!\")\b({'|'.join(words)})\b")
            while word.search(template):
                template = word.sub(lambda m: words[m[1]], template)
            text = self._texts[key] = template
        return text

    # The caller's transaction

    def _within(self, connection: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Run body in the transaction that is open on the caller's connection;
        its errors are final, as is a transaction that failed."""
        if self._pid != os.getpid():
            self.forked()
        if not isinstance(connection, self._driver.Connection):
            raise TypeError(
                "connection: must be a psycopg.Connection, not"
                f" {type(connection).__name__}"
            )
        status = connection.info.transaction_status
        if status == 0 and connection.autocommit:
            raise ValueError(
                "connection: no transaction is open on it, so this would commit by"
                " itself; use it inside `with connection.transaction():`"
            )
        if status not in (0, 2):
            raise ValueError(
                f"connection: it cannot run a statement now ({status.name}); roll back"
                " or reconnect first"
            )
        self._check_open()
        if connection.info.encoding == "ascii":
            raise ValueError(
                "connection: its client_encoding is SQL_ASCII, which gives bytes for"
                " text; set it to UTF8"
            )
        guest = _PgGuest(self._driver, connection)
        try:
            if connection not in self._joined:
                self._check_home(guest)
                self._joined.add(connection)
            return body(guest, False, *args)
        except self._driver.Error as exc:
            raise self._judge(exc, guest)[0] from exc

    def _check_home(self, guest: _PgGuest) -> None:
        """Its database must be ours, or nothing commits together."""
        where = guest.rows(self._sql(_PG_WHERE), {})
        if where != self._home:
            home = _PG_WHERE
            self._home = self._run(
                lambda link, _: link.rows(self._sql(home), {}), again=True, write=True
            )
        if where != self._home:
            raise ValueError(
                f"connection: it is to another database than queue {self.path!r}; only"
                " the same one can commit both together"
            )


class _PgGuest:
    """The caller's connection, as far as a verb needs one."""

    def __init__(self, driver: Any, connection: Any) -> None:
        self.connection = connection
        self._cursor = driver.Cursor(connection, row_factory=driver.rows.tuple_row)
        number, string = driver.types.numeric, driver.types.string
        for name, loader in (
            ("float8", number.FloatLoader),
            ("int8", number.IntLoader),
            ("text", string.TextLoader),
        ):  # whatever the caller has theirs read as
            self._cursor.adapters.register_loader(name, loader)

    def rows(self, sql: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        self._cursor.execute(sql, params)
        return cast("list[tuple[Any, ...]]", self._cursor.fetchall())


def _masked(url: str) -> str:
    """A URL for people: without passwords."""
    base, query = _split_url(url)
    base = re.sub(r"(?s)(?<=://)([^:@/]*):(.*)@", r"\1:***@", base)
    return base + "?" * bool(query) + re.sub(r"(?i)(password=)[^&]*", r"\1***", query)


def _split_url(url: str) -> tuple[str, str]:
    """What stands before the query, and the query; as libpq tells them apart."""
    base = cast("re.Match[str]", re.match(r"[^:]*://(?:[^/@]*@)?[^?]*", url))[0]
    return base, url[len(base) + 1 :]


def _password_in(url: str) -> set[str]:
    found = re.search(r"(?s)(?<=://)[^:@/]*:(.*)@", _split_url(url)[0])
    return {found[1], _unquoted(found[1])} - {""} if found else set()


def _unquoted(text: str) -> str:
    import urllib.parse

    return urllib.parse.unquote(text)


class _PgPuts(_PgCore):
    """Asking, putting, and telling those who wait."""

    def _ask(self, link: Any, template: str, **params: Any) -> list[tuple[Any, ...]]:
        common = {
            "queue": self._name, "channel": self._channel, "tell": False,
            "lazy": not self._fsync, "family": self._family,
        }  # fmt: skip
        if isinstance(link, _PgGuest):  # whose commits are not ours to hasten
            common.update(lazy=False, tell=self._notify)
            params.pop("tell", None)
        return cast(
            "list[tuple[Any, ...]]",
            link.rows(self._sql(template), {**common, **params}),
        )

    def _rows(
        self, template: str, again: bool = True, bulk: bool = False, **params: Any
    ) -> list[tuple[Any, ...]]:
        """The answer to one statement; none where nothing was ever written."""
        return cast(
            "list[tuple[Any, ...]]",
            self._run(
                lambda link, _: self._ask(link, template, **params),
                again=again,
                bulk=bulk,
                nothing=[],
            ),
        )

    def _view(self, row: Sequence[Any], holder: object = None) -> Job:
        shown: Callable[..., Job] = self._shown
        return shown(*row[:-1], json.loads(row[-1]), holder)

    def _telling(self, soon: bool, body: Callable[[bool], Any]) -> Any:
        """Run what may make a job due soon, and tell the waiting, or owe it."""
        if not (soon and self._notify):
            return body(False)
        owed, tell = self._bell.owing, self._bell.ask()
        try:
            result = body(tell)
        except BaseException:
            if tell and owed:
                self._bell.owe()
            raise
        if not tell:
            self._bell.owe()
        return result

    def _ring(self) -> None:
        try:
            if not self._closed:
                self._rows(_PG_RING, tell=True, lazy=True)
        except QueueError as exc:
            _log().warning("waiting workers not told of new jobs: %s", exc)

    # Insert

    def insert(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        if self._pid != os.getpid():
            self.forked()  # before an id is made
        ids = [self._fresh() if item.id is None else item.id for item in new]
        if len(new) > 1:
            body: Callable[..., Any] = self._put_many
            args: tuple[Any, ...] = (new, ids)
            again, bulk = False, True
        else:
            body, args = self._put, (new[0], ids[0], exist_ok)
            again, bulk = exist_ok and new[0].id is not None, False
        if connection is not None:
            if not self._registered:
                self._run(lambda *_: None, again=True, write=True)
            return cast("list[Job]", self._within(connection, body, True, *args))
        soon = any(item.delay <= _TICK or item.at is not None for item in new)
        return cast(
            "list[Job]",
            self._telling(
                soon,
                lambda tell: self._run(
                    body, tell, *args, again=again, bulk=bulk, write=True
                ),
            ),
        )

    def _put(
        self, link: Any, doubt: bool, tell: bool, new: _New, id: str, exist_ok: bool
    ) -> list[Job]:
        key = _to_column(id)
        for _ in range(10):
            rows = self._ask(
                link, _PG_PUT, id=key, priority=new.priority, at=new.at,
                delay=new.delay, max_retries=new.max_retries, payload=new.text,
                tell=tell,
            )  # fmt: skip
            if rows:
                created_at, run_at = rows[0][:2]
                return [self._new_job(new, id, created_at, run_at)]
            found = self._alive(link, [key])
            if found is not None and exist_ok:
                return [found]
            if found is not None:
                raise self._duplicate(found)
        raise QueueError(f"queue {self.path!r}: job {id!r} comes and goes; try again")

    def _alive(self, link: Any, keys: list[str]) -> Job | None:
        synced = "FOR KEY SHARE SKIP LOCKED"
        own = self._fsync and not isinstance(link, _PgGuest)
        for lock in (synced, "") if own else ("",):
            found = self._ask(link, self._sql(_PG_ALIVE, SYNCED=lock), ids=keys)
            if found:
                return self._view(found[0])
        return None

    def _put_many(
        self, link: Any, doubt: bool, tell: bool, new: Sequence[_New], ids: list[str]
    ) -> list[Job]:
        """In the caller's transaction an error would spoil all of it, so there
        what came before a live id is taken out again."""
        guest = isinstance(link, _PgGuest)
        keys = [_to_column(id) for id in ids]
        rows = []
        try:
            rows = self._ask(
                link,
                self._sql(
                    _PG_PUT_MANY,
                    IF_ALIVE="ON CONFLICT (queue, id) DO NOTHING" if guest else "",
                ),
                ids=keys,
                payloads=[item.text for item in new],
                priority=new[0].priority,
                delay=new[0].delay,
                tell=tell,
            )
        except self._driver.errors.UniqueViolation:
            pass
        if rows and rows[0][3] is None:
            now = rows[0][0]
            run_at = now + new[0].delay if new[0].delay else 0.0
            return [self._new_job(item, id, now, run_at) for item, id in zip(new, ids)]
        if rows:
            self._ask(link, _PG_UNPUT, ids=rows[0][3])
        raise self._taken(link, keys)

    def _taken(self, link: Any, keys: list[str]) -> QueueError:
        found = self._alive(link, keys)
        if found is not None:
            return self._duplicate(found)
        return QueueError(
            f"queue {self.path!r}: an id was alive and is no more; put them again",
            path=self.path,
        )


class _PgLeases(_PgPuts):
    """Leasing, and telling whose lease is over."""

    def lease(self, n: int, seconds: float, held: bool, again: bool) -> _Leased:
        if self._pid != os.getpid():
            self.forked()  # before a token is made
        news = self._watch.news
        session = self._live_session() if held and self._notify else None
        lapses: list[_Lapse] = []
        looked = time.monotonic() - self._looked >= _TICK
        if looked:
            lapses = self._look(n)[1]
        jobs, due = self._take(n, seconds, session)
        if not (jobs or looked or again):
            revived, lapses = self._look(n)
            if revived:
                jobs, due = self._take(n, seconds, session)
        return _Leased(jobs, lapses, (news, time.monotonic() + due))

    def _take(
        self, n: int, seconds: float, session: _PgSession | None
    ) -> tuple[list[Job], float]:
        """Jobs; if there are none, in how many seconds one will be due."""
        call = self._fresh() + "-"
        owner = session.number if session else 0
        none = [(None, None, None)]
        rows = self._run(
            self._taking, n, seconds, owner, call, again=True, nothing=none
        )
        due = rows[0][0]
        jobs = [self._view(row[3:], session) for row in rows if row[2] is not None]
        self._remember(jobs, seconds)
        successor = self._session
        if jobs and session and successor is not session and successor is not None:
            # Lost meanwhile: these came too late to be renamed with the others.
            tokens = [job.token for job in jobs]
            self._rows(_PG_RENAME, old=owner, owner=successor.number, tokens=tokens)
        return jobs, math.inf if due is None else max(0.0, due)

    def _remember(self, jobs: Iterable[Job], seconds: float) -> None:
        now, tokens = time.monotonic(), self._tokens
        for job in jobs:
            tokens[cast(str, job.token)] = now + seconds
        if len(tokens) > 10_000:  # never settled by this object
            live = list(tokens.items())  # at once: other threads add to it
            self._tokens = {token: end for token, end in live if end > now}

    def _taking(
        self, link: Any, doubt: bool, n: int, seconds: float, owner: int, call: str
    ) -> list[tuple[Any, ...]]:
        if doubt:  # an earlier try may have leased, and nobody knew
            mine = self._ask(link, _PG_MINE, call=call)
            if mine:
                return [(None, None, *row) for row in mine]
        one = self._sql(_PG_TAKE, N="1" if n == 1 else "%(n)s")
        take = functools.partial(
            self._ask, link, one, n=n, seconds=seconds, owner=owner, call=call,
            lazy=True,
        )  # fmt: skip
        rows = take(ripe=False)
        due = rows[0][0]
        if due is not None and due <= 0 and rows[0][2] is None:
            self._ask(link, _PG_RIPEN, n=max(n, _PG_RIPE), lazy=True)
            rows = take(ripe=True)
        return rows

    # Who is alive

    def _look(self, n: int) -> tuple[bool, list[_Lapse]]:
        """Move jobs that a dead holder had for the first time to the front, up
        to n; whether there were any, and the other lapses."""
        self._looked = time.monotonic()
        first, others = [], []
        for lapse, priority in self._over(math.inf):
            if lapse.lapses == 0 and lapse.attempts <= lapse.max_retries:
                first.append((-priority, lapse))
            else:
                others.append(lapse)
        if not first:
            return False, others
        first.sort(key=lambda item: item[0])
        if len(first) > n:
            self._looked = -math.inf  # look again for the rest
        lapses = [lapse for _, lapse in first]
        self._rows(_PG_RIPEN, n=_PG_RIPE, lazy=True)  # who is due comes first, too
        self._rows(
            _PG_REVIVE,
            ids=[_to_column(lapse.id) for lapse in lapses],
            revs=[lapse.rev for lapse in lapses],
            errors=[_to_column(lapse.reason) for lapse in lapses],
            n=n,
            front=_PG_FRONT,
        )
        return True, others

    def _over(self, older_than: float) -> list[tuple[_Lapse, int]]:
        """Leases that ended unsettled, with their priorities, in order."""
        rows = self._rows(_PG_LAPSED, older_than=older_than)
        over, moved = [], False
        for id, rev, attempts, retries, lapses, priority, moved_from, why in rows:
            if moved_from is not None:
                moved = True
                continue
            retries = self._retries(retries)
            reason = f"{why} (delivery {attempts} of {retries + 1})"
            lapse = _Lapse(_from_column(id), rev, attempts, retries, lapses, reason)
            over.append((lapse, priority))
        if moved:
            self._rows(_PG_LET_GO_LAPSED)
        return over

    def lapsed(self, older_than: float) -> list[_Lapse]:
        return [lapse for lapse, _ in self._over(older_than)]

    def give_back(self, verdicts: Sequence[tuple[_Lapse, float | None, str]]) -> int:
        if not verdicts:
            return 0
        params: dict[str, Any] = {
            "ids": [_to_column(lapse.id) for lapse, _, _ in verdicts],
            "revs": [lapse.rev for lapse, _, _ in verdicts],
            "delays": [delay for _, delay, _ in verdicts],
            "errors": [_to_column(error) for _, _, error in verdicts],
        }
        rows = self._telling(
            True, lambda tell: self._rows(_PG_GIVE_BACK, tell=tell, **params)
        )
        return cast(int, rows[0][0]) if rows else 0

    def _live_session(self) -> _PgSession:
        """This object's proof of life; a lost one is replaced, and its jobs
        that nobody has taken over are ours still.  One thread connects, the
        others wait for it as long as it may take itself."""
        if self._pid != os.getpid():
            self.forked()
        deadline = time.monotonic() + max(self._lock_timeout, 1.0)
        mine, turn = False, self._session_turn
        try:
            with turn:
                while self._opening:
                    if not turn.wait(deadline - time.monotonic()):
                        raise self._still_opening()
                session = self._session
                if session is not None and not session.lost():
                    return session
                mine = self._opening = True
            self._session = self._new_session()
            if self._closed:  # meanwhile
                self._session.close()
            if session is not None:
                session.close()
                self._rename(session.number, self._session.number)
            return self._session
        finally:
            if mine:
                with turn:
                    self._opening = False
                    turn.notify_all()

    def _still_opening(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"queue {self.path!r}: another thread is still connecting; is the server"
            " there?",
            path=self.path,
            timeout=self._lock_timeout,
        )

    def _new_session(self) -> _PgSession:
        """On a connection of its own: the one lent goes back to the pool."""
        return cast(
            _PgSession,
            self._run(lambda *_: self._open_session(), again=True, bare=True),
        )

    def _open_session(self) -> _PgSession:
        link = _PgLink()
        self._connect(link)
        try:
            while True:
                number = random.getrandbits(30) + 1
                if self._ask(link, _PG_LOCK, owner=number)[0][0]:
                    return _PgSession(link, number)
        except (self._driver.Error, OSError) as exc:
            link.close()
            raise _UnreachableError from exc

    def _rename(self, old: int, new: int) -> None:
        _log().warning(
            "queue %r: lost the connection that proves that owner %d lives; it goes on"
            " as owner %d",
            self.path,
            old,
            new,
        )
        tokens = [*self._tokens]
        self._rows(_PG_RENAME, old=old, owner=new, tokens=tokens)

    # Waiting

    def wait(self, seen: object, seconds: float) -> None:
        news, due = cast("tuple[int, float]", seen)
        seconds = min(seconds, max(0.0, due - time.monotonic()))
        if seconds > 0:
            self._watch.wait(news, cast(Any, self._hear), seconds)
        else:
            time.sleep(1e-3)  # due, and another process is at it

    def _hear(self, seconds: float) -> bool:
        """Listen, look whether something came before that, then sleep."""
        if not self._notify:
            time.sleep(min(seconds, _PG_POLL))
            return True
        session = self._live_session()
        with session.lock:
            try:
                return self._listen_on(session, seconds)
            except (self._driver.Error, OSError, QueueError):
                session.gone = True  # the next lease says so and opens another
                return True
            finally:
                if self._closed:
                    session.link.close()

    def _listen_on(self, session: _PgSession, seconds: float) -> bool:
        link, answer = session.link, max(self._lock_timeout, 1.0)
        link.patience.deadline = time.monotonic() + answer
        session.told.clear()
        try:
            link.do(f"LISTEN {self._channel}")
            ready, due = False, None
            if self._ready(link, False):
                ready, due = self._ask(link, _PG_PEEK)[0]
            if ready:
                time.sleep(1e-3)  # or it would be a busy loop around a locked job
                return True
            seconds = seconds if due is None else min(seconds, due)
            return session.hear(max(0.0, seconds))
        finally:
            link.patience.deadline = time.monotonic() + answer
            link.do(f"UNLISTEN {self._channel}")


class _PgEngine(_PgLeases):
    """The engine for postgresql:// URLs."""

    # Settle, extend

    def settle(
        self,
        job: Job,
        outcome: str,
        delay: float = 0.0,
        error: str | None = None,
        counted: bool = True,
        connection: Any = None,
    ) -> None:
        template = {"done": _PG_DONE, "pending": _PG_BACK, "dead": _PG_BURY}[outcome]
        params: dict[str, Any] = {"id": _to_column(job.id), "token": job.token}
        if outcome != "done":
            params["error"] = None if error is None else _to_column(error)
        if outcome == "pending":
            params.update(delay=delay, counted=counted)
        if connection is not None:
            if not self._made:
                self._run(lambda *_: None, again=True)
            done = self._within(connection, self._settle, job, template, params)
            if not done:
                raise self._lost(job)
            return
        done = self._telling(
            outcome == "pending" and delay <= _TICK,
            lambda tell: self._run(
                self._settle, job, template, {**params, "tell": tell}, again=True
            ),
        )
        if not done:
            raise self._lost(job)

    def _settle(
        self, link: Any, doubt: bool, job: Job, template: str, params: dict[str, Any]
    ) -> bool:
        """Settled twice it finds nothing, and so does a lease that was lost."""
        done = bool(self._ask(link, template, **params))
        self._tokens.pop(cast(str, job.token), None)
        if doubt and not done:
            raise self._in_doubt(
                QueueError(
                    f"queue {self.path!r}: the connection was lost while job"
                    f" {job.id!r} was settled, and now it is settled, or its lease was"
                    " lost before",
                    id=job.id,
                    path=self.path,
                )
            )
        return done

    def extend(self, job: Job, seconds: float) -> Job:
        session = self._live_session() if self._notify else None
        rows = self._rows(
            _PG_EXTEND,
            id=_to_column(job.id),
            token=job.token,
            seconds=seconds,
            owner=session.number if session else 0,
            lazy=True,
        )
        if not rows:
            self._tokens.pop(cast(str, job.token), None)
            raise self._lost(job)
        self._remember([job], seconds)
        return self._view(rows[0][1:], session)

    # Looking

    def records(self, state: str | None, limit: int | None) -> Iterator[Job]:
        states = _PG_STATES[state]
        rows = self._rows(_PG_SNAPSHOT, bulk=True, states=states, limit=limit)
        ids: str | None = rows[0][0] if rows else None
        return self._pages(ids or "", states)

    def _pages(self, ids: str, states: list[str]) -> Iterator[Job]:
        """Read the jobs page by page; what left these states is left out."""
        start = 0
        while start < len(ids):
            page: list[str] = []
            while len(page) < _PG_PAGE and start < len(ids):
                end = ids.find("\n", start)
                end = len(ids) if end < 0 else end
                page.append(ids[start:end])
                start = end + 1
            rows = self._rows(_PG_PAGE_OF, ids=page, states=states)
            found = {row[0]: row for row in rows}
            yield from [self._view(found[id]) for id in page if id in found]

    def find(self, id: str) -> Job:
        rows = self._rows(_PG_FIND, id=_to_column(id))
        if not rows:
            raise self._unknown(id, "pending, inflight or dead")
        return self._view(rows[0])

    def counts(self) -> Stats:
        rows = self._rows(_PG_COUNTS, bulk=True)
        return Stats(*rows[0]) if rows else Stats(0, 0, 0, 0, 0, None, None, 0)

    def names(self) -> list[str] | None:
        found = self._run(
            lambda link, _: link.rows(self._sql(_PG_NAMES), {}), again=True
        )
        return None if found is None else [row[0] for row in found]

    def verify(self) -> list[Damage]:
        """Have the server read every job; its own checksums speak."""
        number = 0
        try:
            for _ in self.records(None, None):
                number += 1
        except QueueError as exc:
            if getattr(exc, "sqlstate", None) not in ("XX001", "XX002"):
                raise
            return [Damage(f"{self._schema}.tiny_queue_job", number + 1, str(exc))]
        return []

    def compact(self) -> None:
        raise QueueError(
            f"queue {self.path!r}: there is nothing to compact, as the server reuses"
            " the space of jobs that are gone by itself",
            path=self.path,
        )

    # Removing, replaying

    def requeue(self, id: str | None) -> int:
        if id is None:
            return self._requeue_all()
        rows = self._telling(
            True,
            lambda tell: self._rows(
                _PG_REQUEUE_ONE, again=False, id=_to_column(id), tell=tell
            ),
        )
        if not rows:
            raise self._unknown(id, "dead")
        return 1

    def _requeue_all(self) -> int:
        last = self._rows(_PG_LAST_DEATH)
        if not last or last[0][0] is None:
            return 0
        return cast(
            int,
            self._telling(
                True,
                lambda tell: self._many(
                    _PG_REQUEUE, last=last[0][0], n=_PG_BATCH, tell=tell
                ),
            ),
        )

    def _many(self, template: str, **params: Any) -> int:
        """Repeat a statement of bounded size until it finds nothing."""
        total, count = 0, 1
        while count:
            rows = self._rows(template, again=False, bulk=True, **params)
            count = rows[0][0] if rows else 0
            total += count
        return total

    def remove(self, id: str) -> bool:
        return bool(self._rows(_PG_REMOVE, again=False, id=_to_column(id)))

    def purge(self, state: str, older_than: float) -> int:
        start = self._rows(_PG_CLOCK) or [(0.0,)]
        return self._many(
            _PG_PURGE,
            states=_PG_STATES[state],
            start=start[0][0],
            older_than=older_than,
            n=_PG_BATCH,
        )

    def close(self) -> None:
        if self._pid != os.getpid():
            self.forked()
        if self._closed:
            return
        self._bell.settle_up()
        self._closed = True
        self._watch.close()
        with self._session_turn:
            if self._session is not None:
                try:
                    self._session.resign()
                except (self._driver.Error, OSError):
                    pass  # then it ends with the connection
                self._session.close()
        self._pool.close()

    # Moving

    def hold(self, state: str, n: int, seconds: float, prefix: str) -> list[_Parcel]:
        parcels: list[_Parcel] = []
        for internal, placing in _PG_HOLDING[state]:
            left = n - len(parcels)
            if left > 0:
                text = self._sql(_PG_HOLD, STATE=internal, PLACING=placing)
                rows = self._rows(
                    text, again=False, bulk=True, n=left, seconds=seconds,
                    prefix=prefix, state=state, end=f"-{state}",
                )  # fmt: skip
                parcels += [self._parcel(row) for row in rows]
        return parcels

    def held(self, prefix: str) -> list[_Parcel]:
        rows = self._rows(_PG_HELD, bulk=True, prefix=prefix)
        return [self._parcel(row) for row in rows]

    def rehold(self, seconds: float, prefix: str) -> list[_Parcel]:
        rows = self._rows(_PG_REHOLD, bulk=True, seconds=seconds, prefix=prefix)
        return [self._parcel(row) for row in rows]

    def _parcel(self, row: Sequence[Any]) -> _Parcel:
        parcel = _Parcel(*row[: len(_Parcel._fields)])
        error = parcel.last_error
        return parcel._replace(
            id=_from_column(parcel.id),
            last_error=None if error is None else _from_column(error),
        )

    def adopt(self, parcels: Sequence[_Parcel], seconds: float) -> None:
        columns: dict[str, list[Any]] = {
            field: [getattr(parcel, field) for parcel in parcels]
            for field in _Parcel._fields
        }
        columns["id"] = [_to_column(id) for id in columns["id"]]
        columns["last_error"] = [
            None if error is None else _to_column(error)
            for error in columns["last_error"]
        ]
        self._run(self._adopt, columns, seconds, bulk=True, write=True)

    def _adopt(
        self, link: Any, doubt: bool, columns: dict[str, list[Any]], seconds: float
    ) -> None:
        try:
            self._ask(link, _PG_ADOPT, seconds=seconds, **columns)
        except self._driver.errors.UniqueViolation:
            raise self._taken(link, columns["id"]) from None

    def drop(self, parcels: Sequence[_Parcel]) -> set[str]:
        rows = self._rows(_PG_DROP, again=False, bulk=True, **_held(parcels))
        return {parcel.id for parcel in parcels} - {
            _from_column(row[0]) for row in rows
        }

    def let_go(self, parcels: Sequence[_Parcel]) -> None:
        self._telling(
            True,
            lambda tell: self._rows(_PG_LET_GO, bulk=True, tell=tell, **_held(parcels)),
        )


def _held(parcels: Sequence[_Parcel]) -> dict[str, Any]:
    return {
        "ids": [_to_column(parcel.id) for parcel in parcels],
        "tokens": [parcel.token for parcel in parcels],
    }


# By state as Queue names it: as the table does, and in which order each is held.
_PG_STATES: dict[str | None, list[str]] = {
    "pending": ["ready", "delayed"],
    "inflight": ["inflight"],
    "dead": ["dead"],
    None: ["ready", "delayed", "inflight", "dead"],
}
_PG_HOLDING = {
    "pending": (("ready", "priority DESC, place"), ("delayed", "run_at, place")),
    "dead": (("dead", "place"),),
}

_ENGINE_OF["postgresql"] = _ENGINE_OF["postgres"] = _PgEngine


# Command line
# =============================================================================

_OK, _REFUSED, _USAGE, _NOTHING = 0, 1, 2, 3  # exit statuses
_BATCH = 1000  # lines of standard input put with one write
_BOLD, _DIM, _RED, _GREEN = "1", "2", "31", "32"
_COUNT_COLOURS = {"pending": "", "delayed": "", "inflight": _GREEN, "dead": _RED}
_HELP = """\
A durable job queue in a directory or a database.

DIR is a directory, or wherever it stands the URL of a database, such as
sqlite:///app.db.  Answers go to standard output, aligned for a person on
a terminal and as one JSON object a line when piped or with --json; messages
go to standard error.
Exit status: 0 done, 1 refused or damaged, 2 wrong usage, 3 nothing there (no
such queue or job, nothing to list or to get).

TINY_QUEUE_DIR stands in for DIR.  NO_COLOR turns colour off."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Wrong usage raises SystemExit(2) and --help SystemExit(0), as argparse
    does.
    """
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        out = _Out(args.json)
        status: int = args.run(args, out)
        out.flush()  # here, where its error is still ours to report
        return status
    except BrokenPipeError:
        _abandon_output()
        return _OK  # the reader has had enough
    except KeyboardInterrupt:
        return 130
    except (QueueError, ValueError, OSError) as exc:
        _say(f"tiny_queue: {exc}")
        if isinstance(exc, JobNotFoundError):
            return _NOTHING
        return _USAGE if isinstance(exc, ValueError) else _REFUSED


def _abandon_output() -> None:
    """Let the interpreter's own flush at exit meet no closed pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


# Arguments of the command line
# -----------------------------------------------------------------------------

# Each command: the words behind DIR and a summary; options, the kind of their value
# with its default, and help; examples, @ being the program, which in this order make
# one session.
_MANUAL = """\
put PAYLOAD -- add a job, or with - one for each line of JSON
    -s --string             PAYLOAD is text, not JSON
    --id ID                 the job's id; refused while that is in the queue
    --exist-ok              print the job that has the --id already, status 0
    --delay TIME=0          due in that time: 90, 15m, 2h, 1d
    --at INSTANT            due then: 2030-12-31T08:00 or epoch seconds
    --priority INTEGER=0    higher goes first (default: 0)
    --max-retries COUNT     retries before it is dead (default: 3)
    @ put jobs '{"to": "ada@example.com"}'
    @ put sqlite:///app.db '{"to": "ada@example.com"}'
    @ put jobs '"once a day"' --id report-1 --delay 1h --priority 5
    @ put jobs --string 'plain text'
    printf '{"n": 1}\\n{"n": 2}\\n' | @ put jobs -

get -- lease the next job, for a shell script, and print it
    --timeout TIME=0        wait so long for a job
    --lease TIME            time after which it is delivered anew (default: 5m)
    @ get jobs --timeout 5 --lease 10m

done ID TOKEN -- settle a job of get: it was done
    @ done jobs "$id" "$token"

fail ID TOKEN -- settle a job of get: retry it, or it is dead
    --error ERROR           what went wrong; kept with the job
    --delay TIME            retry in that time, not after the backoff
    --dead                  no retry can help
    @ fail jobs "$id" "$token" --error 'no route to host' --delay 30
    @ fail jobs "$id" "$token" --error 'no such user' --dead

ls -- list jobs
    --state STATE           only jobs of that state: pending, inflight or dead
    --limit COUNT           list at most that many
    @ ls jobs --state pending --limit 20

show ID -- show all of one job
    @ show jobs report-1

stats -- count the jobs, and tell what is running
    --prometheus            answer in Prometheus' text format
    @ stats jobs
    @ stats jobs --prometheus

top -- watch the queue; q quits
    --interval TIME=1       between two looks (default: 1)
    @ top jobs --interval 0.5

dead -- list the dead jobs and why
    --limit COUNT           list at most that many
    @ dead jobs --limit 10

requeue ID|--all -- make a dead job, or all, pending again
    --all                   all dead jobs, not one ID
    @ requeue jobs --all

cancel ID -- remove one job
    @ cancel jobs report-1

purge -- remove all jobs of a state
    --state STATE           only jobs of that state: pending, inflight or dead
    --older-than TIME       only jobs not touched for so long
    -y --yes                do not ask
    @ purge jobs --state dead --older-than 7d --yes

reap -- take back the jobs whose lease is over
    --older-than TIME       and jobs not renewed for so long
    @ reap jobs --older-than 1h

move TARGET -- move all waiting and dead jobs to another queue; resumable
    --to-name NAME          the queue's name in TARGET (default: the same)
    @ move jobs other-jobs
    @ move jobs sqlite:///app.db

compact -- rewrite the files without what is superseded
    @ compact jobs

verify -- read every byte and list what is damaged
    @ verify jobs

work MODULE:FUNCTION -- run a handler on the jobs; a process that dies is replaced
    --processes N=1         worker processes (default: 1)
    --threads N=1           jobs at a time in each (default: 1)
    --timeout TIME          fail a job that runs longer, kill its process
    --max-jobs N            stop after that many deliveries in all
    --stop-when-empty       stop when no job is due
    @ work jobs handlers:send --processes 2 --timeout 60 --stop-when-empty
"""
_EVERYWHERE = """\
    -n --name NAME=default  the queue's name (default: default)
    --json                  answer in JSON on a terminal too
"""
_OPTION = r"(?m)^ +((?:-\w )?--[a-z-]+)(?: ([A-Z]+)(?:=(\S+))?)?  +(.+)$"
_COMMANDS = {block.split()[0]: block for block in _MANUAL.split("\n\n")}


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse by hand up to the command, then with that command's parser.

    argparse's subcommands cannot intermix options with words of which the
    first, DIR, may be missing.
    """
    if len(argv) > 2 and argv[0] in ("-n", "--name"):
        argv = [argv[2], *argv[:2], *argv[3:]]
    if not argv or argv[0] not in _COMMANDS:
        return _main_parser().parse_args(argv[:1])  # no: it helps or refuses
    parser = _command_parser(argv[0])
    args = parser.parse_intermixed_args(argv[1:])
    home = os.environ.get("TINY_QUEUE_DIR")
    words = [] if getattr(args, "all", False) else args.wanted
    if home and len(args.words) <= len(words):
        args.words = [home, *args.words]
    missing = ["DIR", *words][len(args.words) :]
    if missing:
        hint = "" if home else "; TINY_QUEUE_DIR can stand in for DIR"
        parser.error(f"missing: {' '.join(missing)}{hint}")
    args.dir, *args.given = args.words
    if extra := args.given[len(words) :]:
        parser.error(f"too many arguments: {' '.join(map(repr, extra))}")
    return args


def _prog() -> str:
    """How the user can call this again."""
    name = os.path.basename(sys.argv[0])
    return "tiny-queue" if name.startswith("tiny-queue") else "python3 -m tiny_queue"


def _parser(**options: Any) -> argparse.ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            # It quotes the arguments raw, and one may be a URL with a password.
            message = re.sub(r"(://[^:@/\s]*:).*@", r"\1***@", message)
            super().error(_visible(message))

    return Parser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )


def _main_parser() -> argparse.ArgumentParser:
    heads = [block.splitlines()[0].split(" -- ") for block in _COMMANDS.values()]
    rows = [f"  {usage.split()[0]:<9}{summary}" for usage, summary in heads]
    parser = _parser(
        prog=_prog(),
        usage="%(prog)s COMMAND [options] [DIR] ...",
        description=_HELP,
        epilog="\n".join(
            ["commands (each has its own --help):", *rows]
            + ["", "example:", f"  {_prog()} put jobs '{{\"n\": 1}}'"]
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    return parser


def _command_parser(name: str) -> argparse.ArgumentParser:
    import argparse

    prog, (head, *lines) = _prog(), _COMMANDS[name].splitlines()
    usage, summary = head.split(" -- ")
    wanted = usage.split()[1:]
    examples = [line.strip() for line in lines if "@ " in line]
    title = "example:" if len(examples) == 1 else "examples:"
    parser = _parser(
        prog=f"{prog} {name}",
        usage=" ".join(["%(prog)s [options] [DIR]", *wanted]),
        description=f"{summary[0].upper()}{summary[1:]}.  DIR may be a URL.",
        epilog="\n  ".join([title, *examples]).replace("@ ", f"{prog} "),
    )
    parser.set_defaults(run=globals()[f"_cmd_{name}"], wanted=wanted)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    rows = re.findall(_OPTION, _EVERYWHERE + _COMMANDS[name])
    for flags, kind, value, help in rows:
        settings: dict[str, Any] = {"action": "store_true"}
        if kind:
            settings = {"type": _KINDS.get(kind), "metavar": kind}
            settings["default"] = value or None
        parser.add_argument(*flags.split(), help=help, **settings)
    return parser


def _argument(parse: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """A type for argparse that says what was wanted."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, OverflowError):
            import argparse

            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return convert


def _seconds(text: str) -> float:
    """A duration: seconds, or with a unit s, m, h or d."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    number = float(text[:-1] if unit else text)
    return _delay(number * (unit or 1))


def _moment(text: str) -> float:
    """Epoch seconds, or ISO 8601, local time where it names no zone."""
    try:
        return float(text)
    except ValueError:
        import datetime

        return datetime.datetime.fromisoformat(
            text.replace("Z", "+00:00")  # which Python 3.9 does not know
        ).timestamp()


def _whole(low: int, text: str) -> int:
    return _integer("number", int(text), low, 2**31 - 1)


# Of an option's value; any other is text.
_KINDS = {
    "TIME": _argument(_seconds, "a time like 90, 15m, 2h or 1d"),
    "INSTANT": _argument(_moment, "an instant like 2030-12-31T08:00"),
    "STATE": _argument(_state, "pending, inflight or dead"),
    "INTEGER": int,
    "COUNT": _argument(functools.partial(_whole, 0), "a whole number from 0 up"),
    "N": _argument(functools.partial(_whole, 1), "a whole number from 1 up"),
}


# What reaches a terminal
# -----------------------------------------------------------------------------


class _Out:
    """Standard output: aligned on a terminal, else JSON lines."""

    def __init__(self, as_json: bool) -> None:
        if sys.stdout is None:
            raise QueueError("standard output is closed")
        if isinstance(sys.stdout, io.TextIOWrapper):  # which may be ASCII only
            sys.stdout.reconfigure(errors="backslashreplace")
        terminal = _is_terminal(sys.stdout)
        old_console = _WINDOWS and "WT_SESSION" not in os.environ  # shows escapes
        self.human = terminal and not as_json
        self.ansi = terminal and not old_console and os.environ.get("TERM") != "dumb"
        self._colour = self.ansi and not os.environ.get("NO_COLOR")
        self.done = ""  # what an error of the output does not undo

    def line(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as exc:
            done = f"; but this was done: {self.done}" if self.done else ""
            raise QueueError(f"cannot write the answer: {exc.strerror}{done}") from exc

    def json(self, value: object) -> None:
        # ASCII, and DEL is the one control character that json leaves raw.
        self.line(json.dumps(value).replace("\x7f", "\\u007f"))

    def answer(self, text: str, value: object) -> None:
        """Text for a person, else the value."""
        self.line(_visible(text)) if self.human else self.json(value)

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text

    def pair(self, name: str, value: object) -> None:
        self.line(f"{self.paint(f'{name:<14}', _DIM)} {_visible(str(value))}")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
        """Write rows in blocks, so that a long list starts at once; count."""
        import shutil

        rows, count, columns = iter(rows), 0, shutil.get_terminal_size().columns
        while block := list(itertools.islice(rows, 500)):
            lines = _aligned([header, *block], columns)
            if not count:
                self.line(self.paint(lines[0], _BOLD))
            for line, row in zip(lines[1:], block):
                self.line(self.paint(line, _RED if "dead" in row else ""))
            count += len(block)
        return count


def _say(text: str) -> None:
    """Write a message to standard error."""
    with contextlib.suppress(OSError, AttributeError):  # full, or None: it is closed
        sys.stderr.write(f"{_visible(text)}\n")


def _progress(text: str) -> None:
    """Show, on a terminal, how far it is; "" ends the line."""
    if _is_terminal(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and bool(stream.isatty())


def _visible(text: str) -> str:
    """Escape what could steer a terminal: controls, bidi marks, surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _aligned(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Lines of a table; the last column takes what the others leave."""
    cells = [[_cut(_visible(cell), 300) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in cells]
    return [_cut(line, max(20, columns)) for line in lines]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]}.."


def _age(seconds: float) -> str:
    """A duration for people, two digits of it at least."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.1f} s"


def _when(instant: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(instant))


# Commands: each opens the queue, answers, and returns the exit status
# -----------------------------------------------------------------------------


def _open_queue(args: argparse.Namespace) -> Queue:
    return Queue(args.dir, args.name)


def _find_queue(args: argparse.Namespace) -> Queue:
    """Open a queue that must be there; a mistyped DIR creates nothing."""
    queue = _open_queue(args)
    names = queue._engine.names() or ()
    if queue.name not in names:
        hint = f"; -n can name: {', '.join(names)}" if names else ""
        raise JobNotFoundError(f"no queue {queue.name!r} in {queue.path!r}{hint}")
    return queue


def _cmd_put(args: argparse.Namespace, out: _Out) -> int:
    (text,) = args.given
    if text == "-":
        return _put_lines(args, out)
    try:
        payload = text if args.string else _payload(text)
    except ValueError as exc:
        raise ValueError(
            f"PAYLOAD {text[:80]!r} is not valid JSON: {exc}; quote it for the shell,"
            " like '{\"n\": 1}' or '\"text\"', or give plain text with --string"
        ) from None
    with _open_queue(args) as queue:
        job = queue.put(
            payload,
            delay=args.delay,
            at=args.at,
            id=args.id,
            exist_ok=args.exist_ok,
            priority=args.priority,
            max_retries=args.max_retries,
        )
    out.done = f"put job {job.id}"
    out.answer(job.id, _job_dict(job))
    return _OK


def _payload(text: str) -> Any:
    """What JSON text says, if a queue takes it, or ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _encode(value)  # refuses NaN, too
    return value


def _put_lines(args: argparse.Namespace, out: _Out) -> int:
    """Put each line of standard input; all before a bad one are put."""
    for option in ("--id", "--at", "--max-retries"):
        if getattr(args, option[2:].replace("-", "_")) is not None:
            raise ValueError(f"{option} is for a single PAYLOAD, not -")
    count = number = 0
    with _open_queue(args) as queue:
        try:
            for lines in _line_batches():
                payloads: list[Any] = []
                try:
                    for line in lines:
                        number += 1
                        payloads += _parse_line(line, number, args.string)
                finally:
                    queue.put_many(payloads, delay=args.delay, priority=args.priority)
                    count += len(payloads)
                    _progress(f"{count} jobs put")
        except BaseException:
            _progress("")
            _say(f"tiny_queue: {count} jobs were put, then it ended")
            raise
    _progress("")
    return _counted(out, "put", count)


def _line_batches() -> Iterator[list[bytes]]:
    """Lines of standard input, as many as are there but at most _BATCH: a slow
    producer's jobs do not wait for a batch to fill."""
    if sys.stdin is None:
        raise QueueError("standard input is closed")
    tail = b""
    while chunk := os.read(sys.stdin.fileno(), _MIB):
        *lines, tail = (tail + chunk).split(b"\n")
        for start in range(0, len(lines), _BATCH):
            yield lines[start : start + _BATCH]
    if tail:
        yield [tail]


def _parse_line(line: bytes, number: int, as_text: bool) -> list[Any]:
    """The payload of a line; of a blank one there is none."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
        if as_text:
            return [text]
        return [_payload(text)] if text.strip() else []
    except ValueError as exc:
        raise QueueError(f"line {number} is not valid JSON: {exc}") from None


def _cmd_get(args: argparse.Namespace, out: _Out) -> int:
    # Waiting for the first job is no mistake; not finding a queue at once is.
    with _open_queue(args) if args.timeout else _find_queue(args) as queue:
        job = queue._get_detached(args.timeout, args.lease)
        if job is None:
            return _NOTHING
        try:
            out.json(_job_dict(job))
            out.flush()
        except BaseException:  # nobody has seen it: it must not wait for its lease
            queue.release(job)
            raise
    return _OK


def _find_lease(queue: Queue, args: argparse.Namespace) -> Job:
    """The job as it is, or one that any settling refuses with LeaseLostError."""
    id, token = args.given
    job = queue.find(id)
    return job if job.token == token else Job(id, None, "inflight", token=token)


def _cmd_done(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        queue.task_done(_find_lease(queue, args))
    return _OK


def _cmd_fail(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        job = _find_lease(queue, args)
        if args.dead:
            queue.bury(job, args.error)
        else:
            queue.task_done(job, False, args.error, delay=args.delay)
    return _OK


def _cmd_ls(args: argparse.Namespace, out: _Out) -> int:
    now = time.time()

    def row(job: Job) -> list[str]:
        state, since = job.state, _age(now - (job.leased_at or job.created_at))
        if state == "pending":
            since = _age(now - max(job.created_at, job.run_at))
            if job.run_at > now:
                state, since = "delayed", f"in {_age(job.run_at - now)}"
        numbers = [f"{job.attempts}/{job.max_retries + 1}", str(job.priority)]
        return [job.id, state, *numbers, since, json.dumps(job.payload)]

    header = ["ID", "STATE", "TRIES", "PRIORITY", "SINCE", "PAYLOAD"]
    with _find_queue(args) as queue:
        return _list(queue.jobs(args.state, args.limit), out, header, row)


def _cmd_dead(args: argparse.Namespace, out: _Out) -> int:
    def row(job: Job) -> list[str]:
        died = _when(job.leased_at or job.created_at)
        error = job.last_error or ""
        return [job.id, str(job.attempts), died, error, json.dumps(job.payload)]

    header = ["ID", "TRIES", "LAST TRY", "ERROR", "PAYLOAD"]
    with _find_queue(args) as queue:
        return _list(queue.jobs("dead", args.limit), out, header, row)


def _list(
    jobs: Iterator[Job], out: _Out, header: list[str], row: Callable[[Job], list[str]]
) -> int:
    count = 0
    if out.human:
        count = out.table(header, map(row, jobs))
        if not count:
            _say("tiny_queue: no job to list")
    else:
        for job in jobs:
            out.json(_job_dict(job))
            count += 1
    return _OK if count else _NOTHING


def _cmd_show(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        job = queue.find(*args.given)
    if not out.human:
        out.json(_job_dict(job))
        return _OK
    for name, value in _job_dict(job).items():
        if name.endswith(("_at", "_until")) and value is not None:
            value = _when(value) if value else "at once"
        if name != "payload" and value is not None:
            out.pair(name, value)
    out.pair("payload", "")
    for line in json.dumps(job.payload, indent=2, ensure_ascii=False).split("\n"):
        out.line(_visible(line))
    return _OK


# What a shell script needs comes first.
_JOB_FIELDS = (
    "id token state attempts max_retries priority created_at run_at leased_at"
    " lease_until last_error payload"
).split()


def _job_dict(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in _JOB_FIELDS}


def _cmd_requeue(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        count = queue.requeue_dead(None if args.all else args.given[0])
    return _counted(out, "requeued", count)


def _cmd_cancel(args: argparse.Namespace, out: _Out) -> int:
    (id,) = args.given
    with _find_queue(args) as queue:
        if not queue.cancel(id):
            raise JobNotFoundError(f"no job {id!r} in {queue.path!r}")
    return _counted(out, "cancelled", 1)


def _cmd_purge(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        if args.state is None:
            raise ValueError("purge needs --state")
        if not args.yes:
            _ask_to_purge(queue, args)
        count = queue.purge(args.state, args.older_than or 0)
    return _counted(out, "purged", count)


def _ask_to_purge(queue: Queue, args: argparse.Namespace) -> None:
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
        raise QueueError("purge deletes jobs: say --yes where nobody can be asked")
    text = f"delete {getattr(queue.stats(), args.state)} {args.state} jobs"
    if args.older_than:
        text += f", as far as not touched for {_age(args.older_than)},"
    sys.stderr.write(_visible(f"{text} of {queue.path!r}? [y/N] "))
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise QueueError("nothing was deleted")


def _cmd_reap(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        count = queue.reap_stale(args.older_than)
    return _counted(out, "reaped", count)


def _cmd_move(args: argparse.Namespace, out: _Out) -> int:
    name = args.name if args.to_name is None else args.to_name
    with _find_queue(args) as source, Queue(args.given[0], name) as target:
        if (source._engine.source, source.name) == (target._engine.source, name):
            raise ValueError("a queue cannot move to itself")
        move = _Move(source, target)
        try:
            move.run()
        except (KeyboardInterrupt, QueueError):
            _say("not finished: the same command goes on where this one ended")
            raise
        finally:
            _progress("")
        left = source.stats().inflight
    seen = {**move.moved, "kept": len(move.kept), "inflight": left}
    if not out.human:
        out.json(seen)
        return _REFUSED if move.kept else _OK
    out.line("moved {pending} waiting and {dead} dead jobs".format(**seen))
    if move.kept:
        out.line(f"{len(move.kept)} stay: the target has their ids")
    if left:
        out.line(f"{left} inflight stay until they are settled or reaped")
    return _REFUSED if move.kept else _OK


class _Move:
    """Moves jobs in batches, each held here, adopted there, dropped here and
    let go there.

    Dying in between leaves at most one batch to go on with: jobs held on
    both sides, or on one, under tokens that name this move.  What nobody goes
    on with comes back by itself when the leases end, after an hour.
    """

    _SECONDS = 3600.0

    def __init__(self, source: Queue, target: Queue) -> None:
        self._here, self._there = source._engine, target._engine
        self.total = len(source) + source.stats().dead
        where = f"{target._engine.path}\n{target.name}"
        self._prefix = f"move-{crc32(where.encode('utf-8', 'surrogatepass')):08x}-"
        self.moved = {"pending": 0, "dead": 0}
        self.kept: list[_Parcel] = []  # the target has a job of that id

    def run(self) -> None:
        self._go_on()
        for state in self.moved:
            while batch := self._here.hold(state, _BATCH, self._SECONDS, self._prefix):
                self._adopt(batch)
                done = sum(self.moved.values())
                _progress(f"moved {done:,} of {self.total:,}")
        self._here.let_go(self.kept)

    def _go_on(self) -> None:
        """Finish what an earlier move left, which may still be at it.

        What is held there is looked at first.  Each of these jobs is then either
        gone from here, or it is here, where the new token keeps the other move
        from dropping it after we have dropped the copy.
        """
        there = self._there.held(self._prefix)
        here = self._here.rehold(self._SECONDS, self._prefix)
        self._land(there)
        self._adopt(here)

    def _land(self, parcels: list[_Parcel]) -> None:
        """Let go what is gone from here; of what is here drop the copy."""
        back = [parcel for parcel in parcels if self._is_here(parcel)]
        if back:
            self._there.drop(back)
        self._finish([parcel for parcel in parcels if parcel not in back])

    def _is_here(self, parcel: _Parcel) -> bool:
        try:
            self._here.find(parcel.id)
            return True
        except JobNotFoundError:
            return False

    def _adopt(self, parcels: list[_Parcel]) -> None:
        while parcels:
            try:
                self._there.adopt(parcels, self._SECONDS)
                break
            except DuplicateJobError as exc:
                self.kept += [parcel for parcel in parcels if parcel.id == exc.id]
                parcels = [parcel for parcel in parcels if parcel.id != exc.id]
        self._drop(parcels)

    def _drop(self, parcels: list[_Parcel]) -> None:
        lost = self._here.drop(parcels) if parcels else set()
        if lost:
            self._there.drop([parcel for parcel in parcels if parcel.id in lost])
        self._finish([parcel for parcel in parcels if parcel.id not in lost])

    def _finish(self, parcels: list[_Parcel]) -> None:
        if parcels:
            self._there.let_go(parcels)
        for parcel in parcels:
            self.moved[parcel.state] += 1


def _cmd_compact(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        before = queue.stats().bytes
        queue.compact()
        after = queue.stats().bytes
    sizes = {"bytes_before": before, "bytes": after}
    out.answer(f"compacted {before} to {after} bytes", sizes)
    return _OK


def _cmd_verify(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        found = queue.verify()
    if out.human:
        rows = [[file, str(line), reason] for file, line, reason in found]
        if not out.table(["FILE", "LINE", "REASON"], rows):
            out.line("nothing is damaged")
    else:
        for damage in found:
            out.json(damage._asdict())
    return _REFUSED if found else _OK


def _counted(out: _Out, verb: str, count: int) -> int:
    out.done = f"{verb} {count} job{'' if count == 1 else 's'}"
    out.answer(out.done, {verb: count})
    return _OK


# stats, in three formats


def _cmd_stats(args: argparse.Namespace, out: _Out) -> int:
    with _find_queue(args) as queue:
        stats, running = queue.stats(), list(queue.jobs("inflight"))
    if getattr(args, "prometheus", False):  # top has no such option
        for line in _prometheus(queue, stats, running):
            out.line(line)
    elif out.human:
        now = time.time()
        out.pair("queue", f"{queue.name} in {queue.path}")
        for name, value in _stats_pairs(stats, now):
            out.pair(name, value)
        if running:
            out.line("")
            out.table(_RUNNING, (_running_row(job, now) for job in running))
    else:
        out.json(_stats_dict(queue, stats, running))
    return _OK


_RUNNING = ["RUNNING", "TRY", "SINCE", "FOR"]


def _running_row(job: Job, now: float) -> list[str]:
    since = job.leased_at or now
    return [job.id, str(job.attempts), _when(since), _age(now - since)]


def _stats_pairs(stats: Stats, now: float) -> list[tuple[str, object]]:
    oldest, due = stats.oldest, stats.next_due
    return [
        ("pending", f"{stats.pending} ({stats.delayed} delayed)"),
        ("inflight", stats.inflight),
        ("dead", stats.dead),
        ("damaged lines", stats.damaged),
        ("bytes", stats.bytes),
        ("oldest waits", "-" if oldest is None else _age(now - oldest)),
        ("next due", "-" if due is None else f"in {_age(due - now)}, {_when(due)}"),
    ]


def _stats_dict(queue: Queue, stats: Stats, running: list[Job]) -> dict[str, Any]:
    now, shown = time.time(), ("id", "attempts", "leased_at", "lease_until")
    return {
        "queue": queue.name,
        "directory": queue.path,
        **stats._asdict(),
        "oldest_age": None if stats.oldest is None else now - stats.oldest,
        "running": [
            {name: getattr(job, name) for name in shown}
            | {"age": now - (job.leased_at or now)}
            for job in running
        ],
    }


def _prometheus(queue: Queue, stats: Stats, running: list[Job]) -> Iterator[str]:
    """Prometheus' text format, for its node exporter's textfile collector."""
    now, due = time.time(), stats.next_due
    waits = max(0.0, now - (stats.oldest or now))
    runs = max([0.0, *(now - (job.leased_at or now) for job in running)])
    path = _visible(queue.path).replace("\\", "\\\\").replace('"', '\\"')
    labels = f'queue="{queue.name}",directory="{path}"'
    states = {f',state="{state}"': getattr(stats, state) for state in _NAME_OF}
    metrics: list[tuple[str, str, dict[str, float | None]]] = [
        ("jobs", "Jobs by state, delayed ones among the pending.", states),
        ("delayed_jobs", "Jobs that are not due yet.", {"": stats.delayed}),
        ("damaged_lines", "Lines set aside as damaged.", {"": stats.damaged}),
        ("bytes", "Size of the data files.", {"": stats.bytes}),
        ("oldest_waiting_seconds", "How long the first due job waits.", {"": waits}),
        ("longest_running_seconds", "Age of the oldest open delivery.", {"": runs}),
        ("next_due_timestamp_seconds", "Absent if no job is delayed.", {"": due}),
    ]
    for name, text, samples in metrics:
        yield f"# HELP tiny_queue_{name} {text}"
        yield f"# TYPE tiny_queue_{name} gauge"
        for label, value in samples.items():
            if value is not None:
                yield f"tiny_queue_{name}{{{labels}{label}}} {value!r}"


# top: a live view


def _cmd_top(args: argparse.Namespace, out: _Out) -> int:
    import select
    import shutil

    if args.json or not out.ansi:
        return _cmd_stats(args, out)
    interval = max(0.05, args.interval)
    seen: list[tuple[float, dict[str, int]]] = []
    with _find_queue(args) as queue, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        keys = _take_screen(stack)
        while True:
            columns, rows = shutil.get_terminal_size()
            shown = itertools.islice(_top_lines(queue, seen, columns, rows), rows - 1)
            lines = "".join(f"{out.paint(text, code)}\x1b[K\n" for code, text in shown)
            # Written over what is there, not cleared first: no flicker.
            print(f"\x1b[H{lines}\x1b[J", end="", flush=True)
            if not keys:
                time.sleep(interval)
            elif select.select(keys, [], [], interval)[0]:
                typed = os.read(keys[0], 64).lower()
                if b"q" in typed or not typed:  # the terminal is gone
                    break
    return _OK


def _top_lines(
    queue: Queue, seen: list[tuple[float, dict[str, int]]], columns: int, rows: int
) -> Iterator[tuple[str, str]]:
    """Colour and text of each line; `seen` keeps ten seconds of counts."""
    now, stats = time.time(), queue.stats()
    yield _BOLD, _visible(f"tiny_queue  {queue.name} in {queue.path}  {_when(now)}")
    yield "", ""
    yield _DIM, f"{'':<14} {'JOBS':>10} {'NET PER S':>11}"
    counts = {name: getattr(stats, name) for name in _COUNT_COLOURS}
    counts["all"] = stats.pending + stats.inflight + stats.dead
    seen.append((time.monotonic(), counts))
    while seen[-1][0] - seen[0][0] > 10.0:
        del seen[0]
    span, first = seen[-1][0] - seen[0][0], seen[0][1]
    for name, count in counts.items():
        # Only net change can be seen from outside: a put and a done job between
        # two looks leave the counts as they were.
        rate = f"{(count - first[name]) / span:+.1f}" if span else "-"
        note = "  put less done" if name == "all" else ""
        colour = _COUNT_COLOURS.get(name, "") if count else ""
        yield colour, f"{name:<14} {count:>10} {rate:>11}{note}"
    for name, value in _stats_pairs(stats, now)[3:]:
        yield "", f"{name:<14} {value}"
    if stats.inflight:
        yield "", ""
        running = queue.jobs("inflight", limit=rows)
        cells = [_RUNNING, *(_running_row(job, now) for job in running)]
        yield from zip([_DIM, *[_GREEN] * rows], _aligned(cells, columns))


def _take_screen(stack: contextlib.ExitStack) -> list[int]:
    """Have the terminal until the stack gives it back as it was; where to
    read keys from, if anywhere."""
    import signal

    keys = []
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stack.callback(signal.signal, signal.SIGTERM, previous or signal.SIG_DFL)
    stack.callback(print, "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l", end="", flush=True)
    print("\x1b[?1049h\x1b[?25l\x1b[?7l", end="")  # no cursor, long lines are cut
    if sys.platform != "win32" and _is_terminal(sys.stdin):  # else Ctrl-C ends it
        import termios

        fd = sys.stdin.fileno()
        modes, before = termios.tcgetattr(fd), termios.tcgetattr(fd)
        modes[3] &= ~(termios.ICANON | termios.ECHO)  # keys one by one, and unseen
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on our screen
        stack.callback(termios.tcsetattr, fd, termios.TCSADRAIN, before)
        termios.tcsetattr(fd, termios.TCSADRAIN, modes)
        keys = [fd]
    return keys


# work: a supervisor of worker processes
# -----------------------------------------------------------------------------

# What a worker process tells its supervisor: its state, and how many jobs it has
# begun and ended.
_STATE, _BEGUN, _ENDED = 0, 1, 2
_STARTING, _READY, _FINISHED, _TIMED_OUT = 0, 1, 2, 3


def _cmd_work(args: argparse.Namespace, out: _Out) -> int:
    if hasattr(os, "fork"):
        return _Supervisor(args).run()
    if args.processes > 1:
        raise QueueError("--processes: this system cannot fork; start several")
    return _work(args, _WorkerProcess(args.max_jobs), os.pipe()[0])


class _WorkerProcess:
    """A worker process and its successors, as the supervisor sees them."""

    def __init__(self, quota: int | None) -> None:
        import mmap

        self.quota = quota  # deliveries left, of --max-jobs
        self.pid = 0  # 0: none is running
        self.started_at = self.start_at = self.pause = 0.0
        self.over = False
        # Shared with the process: known whichever way it ends.
        self.numbers = memoryview(mmap.mmap(-1, 24)).cast("q")


class _Supervisor:
    """Keeps worker processes running.

    They are forked from a process that has neither opened the queue nor
    imported the handler: a fork is safe then, and a crash of theirs is not its
    own.  One pipe serves them all.  When its end here is closed, because we stop
    or were killed, they take no new job.  They are sessions of their own, so
    that Ctrl-C reaches them once, through here.
    """

    _GOOD_RUN = 10.0  # seconds after which a death is not "at once"
    _LONGEST_PAUSE = 30.0

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._signals = self._forwarded = 0
        self._status = _OK
        self._ready = False  # one has imported the handler and opened the queue
        # --max-jobs is shared out; a process for no job is none.
        total, n = args.max_jobs, args.processes
        self._workers = [
            _WorkerProcess(None if total is None else total // n + (i < total % n))
            for i in range(n if total is None else min(n, total))
        ]
        self._stop_end, ours = os.pipe()
        self._pipe = _Fd.adopt(ours)  # which no forked process keeps

    def run(self) -> int:
        import signal

        def count(signum: int, frame: object) -> None:
            self._signals += 1  # nothing else: it may interrupt any line

        self._previous: dict[int, Any] = {
            number: signal.signal(number, count)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while self._step():
                time.sleep(0.05)
        finally:
            _restore_signals(self._previous)
            self._pipe.close()
            os.close(self._stop_end)
        return self._status

    def _step(self) -> bool:
        """Do what is to do; False when nothing is left to supervise."""
        while self._forwarded < self._signals:
            self._forwarded += 1
            self._forward()
        for worker in self._workers:
            self._ready = self._ready or worker.numbers[_STATE] != _STARTING
            if worker.pid:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._see_to_successor(worker, os.waitstatus_to_exitcode(status))
            elif self._is_due(worker):
                self._start(worker)
        return any(w.pid or self._is_wanted(w) for w in self._workers)

    def _forward(self) -> None:
        """The first by the pipe, which says it once: systemd signals the workers
        too, and a second signal means to give running jobs back."""
        import signal

        workers = [worker for worker in self._workers if worker.pid]
        if self._forwarded == 1:
            running = sum(w.numbers[_BEGUN] - w.numbers[_ENDED] for w in workers)
            if running:
                _say(
                    f"tiny_queue: still running: {running}; a second signal gives"
                    " such jobs back"
                )
            self._pipe.close()
            return
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT):  # two never become one
                os.kill(worker.pid, number)

    # One worker's life

    def _is_wanted(self, worker: _WorkerProcess) -> bool:
        return not (self._signals or self._status or worker.over)

    def _is_due(self, worker: _WorkerProcess) -> bool:
        """The first alone, until it is ready: one error, not N."""
        alone = self._ready or worker is self._workers[0]
        due = time.monotonic() >= worker.start_at
        return alone and due and self._is_wanted(worker)

    def _start(self, worker: _WorkerProcess) -> None:
        for i in (_STATE, _BEGUN, _ENDED):
            worker.numbers[i] = 0
        worker.started_at = time.monotonic()
        try:
            worker.pid = os.fork()
        except OSError as exc:  # out of processes or memory
            self._pause(worker, f"no worker can be started: {exc}")
            return
        if worker.pid == 0:
            os.setsid()
            _restore_signals(self._previous)
            # To leave by an exception runs what the handler's module has set up
            # for the exit, and nothing more of the supervisor's.
            sys.exit(_work(self.args, worker, os.dup(self._stop_end)))

    def _pause(self, worker: _WorkerProcess, why: str) -> None:
        worker.pause = min(worker.pause * 2 or 0.1, self._LONGEST_PAUSE)
        worker.start_at = time.monotonic() + worker.pause
        _say(f"tiny_queue: {why}; the next starts in {worker.pause:g} s")

    def _see_to_successor(self, worker: _WorkerProcess, status: int) -> None:
        """A worker ended: is it to have a successor, and when?"""
        pid, worker.pid = worker.pid, 0
        state, begun, ended = worker.numbers
        if worker.quota is not None:
            worker.quota -= begun
        emptied = state == _FINISHED and status == _OK and self.args.stop_when_empty
        worker.over = worker.quota == 0 or emptied
        if status in (_REFUSED, _USAGE) and not self._ready:
            self._status = status  # it said what is wrong with arguments or queue
        lived = time.monotonic() - worker.started_at
        if state == _TIMED_OUT or ended or lived >= self._GOOD_RUN:
            worker.pause = 0.0
        if state != _TIMED_OUT and self._is_wanted(worker):
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            self._pause(worker, f"worker {pid} ended with {how}")


def _work(args: argparse.Namespace, process: _WorkerProcess, stop_end: int) -> int:
    """Be a worker process, until stop_end's other end is closed."""
    # What a handler reads from standard input must not be the terminal.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    handler = _import_handler(*args.given)
    _log_to_stderr()
    with _open_queue(args) as queue:
        _say_what_is_missing(queue)
        worker = Worker(
            queue,
            _CountedHandler(queue, handler, args.timeout, process.numbers).handle,
            concurrency=args.threads,
            max_jobs=process.quota,
            stop_when_empty=args.stop_when_empty,
        )

        def stop_in_time() -> None:
            os.read(stop_end, 1)
            worker.stop()

        threading.Thread(target=stop_in_time, daemon=True).start()
        process.numbers[_STATE] = _READY
        totals = worker.run_forever()
        process.numbers[_STATE] = _FINISHED
    counts = ", ".join(f"{name} {n}" for name, n in totals._asdict().items())
    _log().info("worker %d ends: %s", os.getpid(), counts)
    _Out(False).flush()  # what the handler printed
    return _OK


def _say_what_is_missing(queue: Queue) -> None:
    names = queue._engine.names()
    if names is None:
        _say(f"tiny_queue: no queue in {queue.path!r} yet; it is made")
    elif names and queue.name not in names:
        others = ", ".join(names)
        _say(f"tiny_queue: no job of queue {queue.name!r} yet; others: {others}")


class _CountedHandler:
    """Counts the jobs of a handler, and ends its process, which it has for
    itself, when one of them runs longer than a limit."""

    _GRACE = 15.0  # seconds: more than settling may wait for the queue's lock

    def __init__(
        self,
        queue: Queue,
        handler: Callable[[Job], Any],
        limit: float | None,
        numbers: memoryview,
    ) -> None:
        self._queue = queue
        self._handler = handler
        self._numbers = numbers
        self._lock = threading.Lock()
        self._running: dict[str | None, tuple[Job, float]] = {}  # since when
        if limit:
            self._limit = limit
            threading.Thread(target=self._watch, daemon=True).start()

    def handle(self, job: Job) -> Any:
        """Call the handler; a job that is awaited runs until its await ends."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._counted(job))
            result = self._handler(job)
            if hasattr(result, "__await__"):
                return self._awaited(result, stack.pop_all())
            return result

    async def _awaited(self, result: Any, stack: contextlib.ExitStack) -> None:
        with stack:
            await result

    @contextlib.contextmanager
    def _counted(self, job: Job) -> Iterator[None]:
        with self._lock:
            self._running[job.token] = job, time.monotonic()
            self._numbers[_BEGUN] += 1
        ended = 1
        try:
            yield
        except SystemExit:
            ended = 0  # given back: a pause that grows is not to start anew
            raise
        finally:
            with self._lock:
                del self._running[job.token]
                self._numbers[_ENDED] += ended

    # Time limit

    def _watch(self) -> None:
        import faulthandler

        told = 2 if sys.stderr is None else os.dup(2)
        while True:
            # A handler that lets no other thread run, this one neither, is ended by
            # a thread that is not Python's.  Its stack is told; the holder died.
            patience = self._limit + self._GRACE
            faulthandler.dump_traceback_later(patience, exit=True, file=told)
            self._look()
            time.sleep(0.1)

    def _look(self) -> None:
        start = time.monotonic() - self._limit
        for job, since in list(self._running.values()):
            if since <= start:
                self._end_late(job)

    def _end_late(self, late: Job) -> None:
        """Settle first, kill then: so it fails with this reason, not with that
        of a dead holder, and what else runs here loses no delivery."""
        error = f"ran longer than {self._limit:g} s (--timeout)"
        try:
            self._queue.task_done(late, False, error)
        except LeaseLostError:
            pass  # settled meanwhile, or cancelled and still running
        except QueueError as exc:
            _say(f"tiny_queue: {exc}")  # the holder's death will count instead
        if late.token not in self._running:
            return
        _say(f"tiny_queue: job {late.id} ran too long; its worker is killed")
        for job, _ in list(self._running.values()):
            if job is not late:
                with contextlib.suppress(QueueError):
                    self._queue.release(job)
        self._numbers[_STATE] = _TIMED_OUT
        if hasattr(os, "killpg"):
            import signal

            os.killpg(os.getpid(), signal.SIGKILL)  # and what it has started
        os._exit(_REFUSED)


def _import_handler(name: str) -> Callable[[Job], Any]:
    """MODULE:FUNCTION, found from the current directory on."""
    import pkgutil

    # Its `import tiny_queue` must find this module, not a second copy whose
    # Retry and Fail would be other classes.
    own = __spec__.name if __spec__ is not None else "tiny_queue"
    sys.modules.setdefault(own, sys.modules[__name__])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not all(name.partition(":")):
        raise ValueError(f"{name!r} is not MODULE:FUNCTION")
    try:
        found: Any = pkgutil.resolve_name(name)
    except Exception as exc:  # of any kind: the module runs its own code
        what = f"{type(exc).__name__}: {exc}"
        raise ValueError(
            f"cannot import {name!r}: {what}; MODULE is looked for in the current"
            " directory first"
        ) from exc
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}, no function")
    return cast("Callable[[Job], Any]", found)


def _log_to_stderr() -> None:
    """Show the worker's log, unless the handler's module has set one up."""
    import logging

    class Plain(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return "\n".join(map(_visible, super().format(record).split("\n")))

    stream = logging.StreamHandler()
    stream.setFormatter(Plain("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[stream])


def _file_system(folder: str) -> str:
    """Type of the innermost mount that a directory is in."""
    import pathlib

    path, mount, found = os.path.realpath(folder), "", "unknown"
    try:
        table = pathlib.Path("/proc/self/mounts").read_text()
    except OSError:
        return found  # not Linux
    for line in table.splitlines():
        _, place, kind = line.split()[:3]
        inside = f"{path}/".startswith(f"{place.rstrip('/')}/")
        if inside and len(place) >= len(mount):  # of two at one place the later
            mount, found = place, kind
    return found


if __name__ == "__main__":
    sys.exit(main())
