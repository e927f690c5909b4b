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
        "_rev",  # how often the job has changed; the fence of what has no token
        "_crashes",  # how many deliveries in a row ended with their holder
        "_limit",  # max_retries as it was put, or None: its reader's queue says
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
        _rev: int = 1,
        _crashes: int = 0,
        _limit: int | None = None,
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
        self._rev = _rev
        self._crashes = _crashes
        self._limit = _limit
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
        return tuple(getattr(self, name) for name in _JobFields.__slots__[:-5])

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (*self._values(), None, self._rev, self._crashes)

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
        self._looked = -math.inf  # when leases were last looked at
        self._orphans: collections.deque[_Expired] = collections.deque()
        self._options: dict[str, Any] = {
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
        if exist_ok and id is None:
            raise ValueError("exist_ok: needs an id, by which the job is known")
        new = _New(
            None if id is None else _job_id(id),
            payload,
            _encode(payload),
            _integer("priority", priority, -_MAX_PRIORITY - 1, _MAX_PRIORITY),
            *_due(delay, at),
            None if max_retries is None else _retries(max_retries),
        )
        return self._engine.put([new], exist_ok, connection)[0]

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
            _make_new((id, item, _encode(item), priority, seconds, *_NEVER_LEASED))
            for id, item in _with_ids(payloads, ids)
        ]
        return self._engine.put(new, False, connection) if new else []

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
        first = True
        while True:
            _, jobs, seen = self._next(n, seconds, held, first)
            left = deadline - time.monotonic()
            if jobs or left <= 0 or timeout == 0:
                return jobs
            self._wait(seen, left)
            first = False

    def _wait(self, seen: object, seconds: float) -> None:
        """Sleep until another look may find what was not there when `seen`."""
        self._engine.wait(seen, min(seconds, _TICK))

    def _next(
        self,
        n: int,
        seconds: float,
        held: bool,
        first: bool,
        changes: Sequence[_Change] = (),
    ) -> _Taken:
        """Make the changes, then lease up to n due jobs.

        Whose holder has died is asked once a second, and at the `first` look
        of a get that finds nothing.  Raises only if no change was made.
        """
        if not n:
            return _Taken(self._engine.change(changes), [], None)
        if time.monotonic() - self._looked >= _TICK:
            self._find_orphans()
        taken = self._take(n, seconds, held, changes)
        try:
            if first and not taken.jobs and self._find_orphans():
                taken = taken._replace(jobs=self._take(n, seconds, held).jobs)
        except QueueError:
            if not changes:
                raise  # else it is told at the next call
            taken = taken._replace(seen=None)
        return taken

    def _take(
        self, n: int, seconds: float, held: bool, changes: Sequence[_Change] = ()
    ) -> _Taken:
        """Lease by priority; in one priority first the jobs of dead holders."""
        engine, orphans = self._engine, self._orphans
        if not orphans:
            return engine.take(n, seconds, held, _LOWEST, changes)
        made = engine.change(changes) if changes else []
        jobs: list[Job] = []
        seen: object = None
        try:
            while len(jobs) < n:
                orphan = _pop(orphans)
                above = _LOWEST if orphan is None else orphan.priority
                _, found, seen = engine.take(n - len(jobs), seconds, held, above)
                jobs += found
                if orphan is None:
                    break
                if len(jobs) == n:
                    orphans.appendleft(orphan)
                else:
                    jobs += self._take_over(orphan, seconds, held)
        except QueueError:
            self._looked = -math.inf  # who was not taken over is found again
            if not made and not jobs:
                raise  # else it is told at the next call: these must be handed over
            seen = None
        return _Taken(made, jobs, seen)

    def _take_over(self, orphan: _Expired, seconds: float, held: bool) -> list[Job]:
        """Lease a dead holder's job anew; [] if another process was faster."""
        change = orphan.change("inflight", seconds)
        change = change._replace(
            attempts=orphan.attempts + 1, token=self._engine.fresh()
        )
        return [job for job in self._engine.renew([change], held) if job is not None]

    def _find_orphans(self) -> bool:
        """Look for leases that are over; whether one of their jobs may be due.

        Who was never taken over before, and has retries left, is taken over at
        once by the next who asks for a job; the others go back to pending,
        after a backoff, or are dead.
        """
        orphans: list[_Expired] = []
        others: list[_Expired] = []
        expired = self._engine.expired(math.inf)
        self._looked = time.monotonic()
        for one in expired:
            (others if one.crashes or one.is_spent() else orphans).append(one)
        self._orphans = collections.deque(
            sorted(orphans, key=lambda one: -one.priority)
        )
        try:
            return bool(self._give_back(others) or orphans)
        except QueueError as exc:  # a full disk: who asks for a job must get one
            _log().warning("jobs of expired leases not given back: %s", exc)
            return bool(orphans)

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
        if not _typed("success", success, bool):  # easily an error, in its place
            change = self._failed(job, _error_text(error), delay)
        elif error is not None or delay is not None:
            raise ValueError("error, delay: only a failure takes them")
        else:
            change = self._done(job)
        self._settle(job, change, connection)
        if connection is not None:
            object.__setattr__(job, "_joined", change.state)  # for a Worker

    def bury(self, job: Job, error: object) -> None:
        """Make a leased job dead now, whatever retries it has left."""
        self._settle(job, self._buried(_leased(job), _error_text(error)))

    def release(self, job: Job, delay: float = 0) -> None:
        """Give a leased job back; this delivery does not count."""
        self._settle(job, self._released(_leased(job), _delay(delay)))

    def _settle(self, job: Job, change: _Change, connection: Any = None) -> None:
        if not self._engine.change([change], connection)[0]:
            raise _lost(job, self.path)

    # What ends a delivery: the job's new state whole, under the lease's token

    def _done(self, job: Job) -> _Change:
        return _Change(job.id, job.token, "done")

    def _failed(self, job: Job, error: str | None, delay: float | None) -> _Change:
        if job.attempts > job.max_retries:
            return self._buried(job, error)
        seconds = self._backoff(job.attempts) if delay is None else _delay(delay)
        return _Change(
            job.id, job.token, "pending", seconds, attempts=job.attempts, error=error
        )

    def _buried(self, job: Job, error: str | None) -> _Change:
        return _Change(job.id, job.token, "dead", attempts=job.attempts, error=error)

    def _released(self, job: Job, seconds: float) -> _Change:
        change = _Change.of(job, job.token, "pending", seconds)
        return change._replace(attempts=job.attempts - 1)

    def extend(self, job: Job, seconds: float | None = None) -> Job:
        """Renew a lease: it ends `seconds` from now, not from its old end.

        `seconds` is the queue's lease_timeout by default.  Returns the job
        with its new lease_until; the old Job object can still settle.
        """
        length = self.lease_timeout if seconds is None else _lease_seconds(seconds)
        change = _Change.of(_leased(job), job.token, "inflight", length)
        change = change._replace(token=job.token)
        renewed = self._engine.renew([change], True)[0]
        if renewed is None:
            raise _lost(job, self.path)
        return renewed

    def cancel(self, id: str) -> bool:
        """Remove a job; an inflight one's holder gets LeaseLostError.

        Returns whether there was such a job; durable when this returns.
        """
        return self._engine.change([_Change(_job_id(id), None, "done")])[0]

    def dead_letter(self) -> Iterator[Job]:
        """Iterate over a snapshot of the dead jobs, oldest death first."""
        return self.jobs("dead")

    def requeue_dead(self, id: str | None = None) -> int:
        """Make one dead job, or all, pending again; return how many.

        Their attempts start again at 0.  An id that is not dead raises
        JobNotFoundError.
        """
        if id is None:
            return self._change_all(map(_replayed, self._engine.records("dead")))
        job = self._engine.find(_job_id(id))
        if job is None or job.state != "dead" or not self._change_all([_replayed(job)]):
            raise _unknown(id, "dead", self.path)
        return 1

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
        return self._give_back(self._engine.expired(age))

    def _give_back(self, expired: Iterable[_Expired]) -> int:
        """Make jobs whose lease is over pending or dead; count those that were
        still as they were found."""
        return self._change_all(map(self._given_back, expired))

    def _given_back(self, one: _Expired) -> _Change:
        state, seconds = "dead", 0.0
        if not one.is_spent():
            state = "pending"
            seconds = self._backoff(one.attempts) if one.crashes else 0.0
        return one.change(state, seconds)

    def _change_all(self, changes: Iterable[_Change]) -> int:
        """Many single changes, in parts: others get their turn in between."""
        changes, count = iter(changes), 0
        while part := list(itertools.islice(changes, _PART)):
            count += sum(self._engine.change(part))
        return count

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
        job = self._engine.find(_job_id(id))
        if job is None:
            raise _unknown(id, "pending, inflight or dead", self.path)
        return job

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
        jobs = self._engine.records(_state(state), None, age)
        return self._change_all(_Change(job.id, job._rev, "done") for job in jobs)

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
        make = functools.partial(Queue, **self._options)
        return make, (self._engine.source, self.name)

    def __repr__(self) -> str:
        return f"Queue({self.path!r}, {self.name!r})"

    def _backoff(self, attempt: int) -> float:
        """Ask the user's backoff; a bad answer must not cost the job."""
        try:
            return _number("backoff", self.backoff(attempt), 0, _MAX_SECONDS)
        except Exception:
            _log().exception(
                "backoff failed for attempt %d; the default is used", attempt
            )
            return exponential()(attempt)


def _pop(orphans: collections.deque[_Expired]) -> _Expired | None:
    try:
        return orphans.popleft()
    except IndexError:
        return None  # another thread had the last


def _replayed(job: Job) -> _Change:
    """A dead job again, with all its retries."""
    return _Change(job.id, job._rev, "pending", error=job.last_error)


# Arguments: each check returns the clean value or raises, before any writing
# -----------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|com\d|lpt\d")  # devices on Windows
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def _typed(what: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{what}: must be {kind.__name__}, not {type(value).__name__}")
    return value


def _queue_name(name: str) -> str:
    _typed("name", name, str)
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ValueError(
            f"name: {name!r} cannot name a queue; use 1 to 64 of A-Z a-z 0-9 _ -"
        )
    return str.__str__(name)


def _job_id(id: str) -> str:
    _typed("id", id, str)
    if not 0 < len(id) <= _MAX_ID or _CONTROL.search(id):
        raise ValueError(
            f"id: {id[:300]!r} must have 1 to {_MAX_ID} characters, no control ones"
        )
    return str.__str__(id)


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
    if _typed("state", state, str) not in ("pending", "inflight", "dead"):
        raise ValueError(f"state: {state!r} is not pending, inflight or dead")
    return state


def _leased(job: Job) -> Job:
    if _typed("job", job, Job).token is None:
        raise ValueError(f"job {job.id!r} is {job.state}, not leased; get() leases")
    return job


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


class _Outcome(NamedTuple):
    """How a delivery ended: the job's next state, not yet made."""

    job: Job
    change: _Change
    name: str  # which of Totals' fields counts it


_BURST = 0.5  # seconds: a group's Ctrl-C and its forwarding are one signal
_NAME_OF_OUTCOME = {"done": "done", "pending": "retried", "dead": "dead"}


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
        if not callable(handler):
            raise TypeError(f"handler: must be callable, not {type(handler).__name__}")
        self.queue: Queue = _typed("queue", queue, Queue)
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
        self._running: dict[str | None, Job] = {}  # by token
        self._together = _Combined()
        self._signals = 0
        self._finished = threading.Event()
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
        try:
            with self._counting_signals():
                for thread in [renewer, *threads]:
                    thread.start()
                self._watch(threads)
        finally:
            self._stopping = True
            self._finished.set()
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
        self._stopping = True

    def run_once(self) -> bool:
        """Run one job that is due, in this thread; False if there was none."""
        self._reset()
        job = self.queue.get()
        if job is None:
            return False
        self._running[job.token] = job
        renewer = threading.Thread(target=self._renew, daemon=True)
        renewer.start()
        try:
            self._settle(self._run(job))
        finally:
            self._finished.set()
            renewer.join()
            self._stop_loop()
        return True

    # The main thread watches; the signal handler only counts

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        looked = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if self._signals > 1:
                with self._lock:
                    jobs = list(self._running.values())
                for job in jobs:  # whose late outcome will find the lease lost
                    self._settle(self._released(job))
                return
            if time.monotonic() - looked >= _TICK * 5:
                looked = time.monotonic()
                self._reap()

    @contextlib.contextmanager
    def _counting_signals(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()
        if not (self.handle_signals and main):
            yield
            return
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
            self._stopping = True

        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler or signal.SIG_DFL)

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
        outcome: _Outcome | None = None
        while outcome is not None or self._may_take():
            job, outcome = self._next(outcome), None
            if job is not None:
                outcome = self._released(job) if self._stopping else self._run(job)
                if outcome.name != "done":
                    self._settle(outcome)
                    outcome = None

    def _may_take(self) -> bool:
        if self._stopping:
            return False
        return self.max_jobs is None or self._taken < self.max_jobs

    def _next(self, outcome: _Outcome | None) -> Job | None:
        """Settle a job that is done and get the next, if one comes in time."""
        call = self._settle_and_take
        answer = self._insist(outcome, self._together, call, outcome)
        if answer is None:
            return None
        made, job, seen = answer
        if outcome is not None:
            self._count(outcome, made)
        if job is None and self._may_take():
            seconds = min(self.poll_interval, 0.5)
            self._insist(None, self.queue._wait, seen, seconds)
        return cast("Job | None", job)

    def _settle_and_take(self, calls: list[_Call]) -> None:
        """Settle what is done and take a job for each who waits, in one call."""
        queue, n = self.queue, 0 if self._stopping else len(calls)
        if self.max_jobs is not None:
            n = min(n, self.max_jobs - self._taken)  # never one too many
        done = [call.request for call in calls if call.request is not None]
        changes = [outcome.change for outcome in done]
        made, jobs, seen = queue._next(
            n, queue.lease_timeout, True, bool(changes), changes
        )
        held, found = iter(made), iter(jobs)
        for call in calls:
            settled = call.request is not None and next(held)
            call.answer = settled, next(found, None), seen
        self._taken += len(jobs)
        with self._lock:
            for outcome in done:
                self._running.pop(outcome.job.token, None)
            for job in jobs:
                self._running[job.token] = job
            if self.stop_when_empty and seen is not None and not self._running:
                self._stopping = True

    def _settle(self, outcome: _Outcome) -> None:
        """Settle a job by itself."""
        changes = [outcome.change]
        taken = self._insist(outcome, self.queue._next, 0, 0.0, True, False, changes)
        with self._lock:
            self._running.pop(outcome.job.token, None)
        if taken is not None:
            self._count(outcome, taken.made[0])

    def _count(self, outcome: _Outcome, made: bool) -> None:
        job, name = outcome.job, outcome.name
        if not made and job._joined:  # by the handler, together with its effects
            name = _NAME_OF_OUTCOME[job._joined]
        elif not made:
            _log().warning("job %s: lease lost before it was %s", job.id, name)
            name = "lost"
        with self._lock:
            self._totals[name] += 1

    def _insist(
        self, outcome: _Outcome | None, call: Callable[..., Any], *args: Any
    ) -> Any:
        """Call the queue, however long its own trouble lasts; None: in vain."""
        pause = 0.0
        while True:
            try:
                return call(*args)
            except QueueClosedError as exc:
                if outcome is not None:
                    job, name = outcome.job, outcome.name
                    _log().error("job %s not settled as %s: %s", job.id, name, exc)
                self._stopping = True
                return None
            except QueueError as exc:
                if self._stopping and (outcome is None or pause > 1):
                    return None  # the job comes back by itself when this process ends
                pause = self._wait_out(pause, exc)

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

    def _run(self, job: Job) -> _Outcome:
        """Run the handler on one job."""
        try:
            return self._outcome(job)
        except Exception as exc:  # of an outcome itself, like a wrong delay
            _log().exception("job %s: its outcome is wrong", job.id)
            return self._failed(job, f"wrong outcome: {exc}", None)

    def _outcome(self, job: Job) -> _Outcome:
        """Call the handler; say what becomes of the job."""
        try:
            self._call(job)
            if job._joined:  # then this finds the lease settled, see _count
                return self._failed(job, "settled, but never committed", None)
            return _Outcome(job, self.queue._done(job), "done")
        except Retry as exc:
            delay = None if exc.delay is None else _delay(exc.delay)
            return self._failed(job, "asked for a retry", delay)
        except Snooze as exc:
            return self._released(job, _delay(exc.delay))
        except Fail as exc:
            change = self.queue._buried(job, _error_text(exc.reason))
            return _Outcome(job, change, "dead")
        except (SystemExit, KeyboardInterrupt) as exc:
            if isinstance(exc, SystemExit):  # by itself it says nothing
                error = _visible(f"SystemExit: {_error_text(exc)}")
                _log().warning("job %s ends its worker: %s", job.id, error)
            self._stopping = True
            return self._released(job)
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

    def _call(self, job: Job) -> None:
        result = self.handler(job)
        if hasattr(result, "__await__"):
            self._await(result)
        if isinstance(result, (types.GeneratorType, types.AsyncGeneratorType)):
            raise TypeError(
                "handler: its call returned a generator and ran nothing; it must not"
                " yield"
            )

    def _failed(self, job: Job, error: str, delay: float | None) -> _Outcome:
        change = self.queue._failed(job, error, delay)
        return _Outcome(job, change, _NAME_OF_OUTCOME[change.state])

    def _released(self, job: Job, seconds: float = 0.0) -> _Outcome:
        return _Outcome(job, self.queue._released(job, seconds), "released")

    # Leases, and the loop of async handlers

    def _renew(self) -> None:
        """Renew the leases of running jobs, each every third of its length."""
        length = self.queue.lease_timeout
        while not self._finished.wait(length / 3):
            with self._lock:
                jobs = list(self._running.values())
            for job in jobs:
                try:
                    self.queue.extend(job, length)
                except LeaseLostError:
                    with self._lock:
                        self._running.pop(job.token, None)
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


def _traceback(exc: BaseException) -> str:
    """Where it was raised, without its message, which may be huge."""
    import traceback

    return "".join(traceback.format_tb(exc.__traceback__)).rstrip()


# Engine contract
# =============================================================================


_LOWEST = -_MAX_PRIORITY - 2  # below every priority
_PART = 500  # changes that are made under one lock


class _New(NamedTuple):
    """A job to put; id None asks for a generated one.

    What follows `max_retries` is of a job that comes from another queue.
    """

    id: str | None
    payload: Any
    text: str  # the payload as ASCII JSON
    priority: int = 0
    delay: float = 0.0  # seconds
    at: float | None = None  # or an instant
    max_retries: int | None = None  # None: whatever the reader's queue says
    state: str = "pending"  # or dead
    attempts: int = 0
    crashes: int = 0
    created_at: float | None = None  # None: now
    leased_at: float | None = None  # of a dead job's last delivery
    error: str | None = None


# Without a call in Python: this and _make_line are 7 % of a put_many.
_make_new: Any = functools.partial(tuple.__new__, _New)
_NEVER_LEASED = (None, None, "pending", 0, 0, None, None, None)


class _Change(NamedTuple):
    """A job's next state, whole; it is made if the fence holds."""

    id: str
    fence: str | int | None  # the lease's token, the job's rev, or nothing
    state: str  # done (gone), pending, dead; in renew() inflight
    seconds: float = 0.0  # until a pending job is due; how long a lease lasts
    at: float | None = None  # or the instant at which it is due
    attempts: int = 0
    crashes: int = 0
    error: str | None = None
    token: str | None = None  # of the lease; kept (extend) or a new one

    @classmethod
    def of(
        cls, job: Job, fence: str | int | None, state: str, seconds: float = 0.0
    ) -> _Change:
        """The job as it is, in that state."""
        counts = job.attempts, job._crashes, job.last_error
        return cls(job.id, fence, state, seconds, None, *counts)


_make_change: Any = functools.partial(tuple.__new__, _Change)


class _Taken(NamedTuple):
    """What a take did: which changes held, the jobs, and for wait() what it
    saw if there was none (None: it could not look)."""

    made: list[bool]
    jobs: list[Job]
    seen: object


class _Expired(NamedTuple):
    """A lease that is over though its job was not settled."""

    id: str
    rev: int
    attempts: int
    max_retries: int
    crashes: int  # how many deliveries before this one ended so, in a row
    priority: int
    reason: str

    def is_spent(self) -> bool:
        return self.attempts > self.max_retries

    def change(self, state: str, seconds: float) -> _Change:
        """The job in that state: one crash more, and why."""
        error = f"{self.reason} (delivery {self.attempts} of {self.max_retries + 1})"
        counts = self.attempts, self.crashes + 1, error
        return _Change(self.id, self.rev, state, seconds, None, *counts)


class _Engine:
    """Keeps the rows of a queue and compares fences; Queue decides.

    Durations cross this contract, and instants of the engine's own clock.
    Every verb may be called by any thread at any time, is atomic, and is
    durable at return where Queue promises it: puts and changes are, leases
    and renewals are not.  An engine computes no backoff, never decides between
    retry and dead, and knows no verb of the user's.
    """

    source: str  # what opens it again
    path: str  # the same for people: without a password
    can_join = False  # put and change inside the caller's transaction
    can_compact = True
    steady_leases = True  # a jump of the wall clock ends no living holder's lease

    def fresh(self) -> str:
        """Return a new id or token, unique over all processes."""
        raise NotImplementedError

    def put(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        """Add all or none; a live id raises DuplicateJobError or, with exist_ok
        (then it is one job), is returned.

        With a connection it is part of the open transaction there.
        """
        raise NotImplementedError

    def take(
        self,
        n: int,
        seconds: float,
        held: bool,
        above: int = _LOWEST,
        changes: Sequence[_Change] = (),
    ) -> _Taken:
        """Settle what the changes say is done, durably, and lease up to n due
        jobs of a priority above; one commit.

        Without `held` a lease outlives this process and ends only by time.
        """
        raise NotImplementedError

    def change(self, changes: Sequence[_Change], connection: Any = None) -> list[bool]:
        """Make each change whose fence holds, and say which did.

        With a connection it is part of the open transaction there.
        """
        raise NotImplementedError

    def renew(self, changes: Sequence[_Change], held: bool) -> list[Job | None]:
        """Make leases of what is leased or waits, where the fence holds.

        A token that is not the old one is a new lease, with our proof of life
        if `held`; with the old one it gets ours only if it had one.  A delivery
        begins (leased_at) when attempts rise.  Without `held` it is durable: a
        move, which rests on it, has no holder.
        """
        raise NotImplementedError

    def expired(self, older_than: float) -> list[_Expired]:
        """List the leases of dead holders, run out, or not renewed for so many
        seconds, in the order of leasing."""
        raise NotImplementedError

    def find(self, id: str) -> Job | None:
        raise NotImplementedError

    def records(
        self, state: str | None, limit: int | None = None, untouched: float = 0.0
    ) -> Iterator[Job]:
        """Iterate over a snapshot, holding no lock meanwhile; of jobs whose last
        delivery began, or which were put, at least `untouched` seconds ago."""
        raise NotImplementedError

    def counts(self) -> Stats:
        raise NotImplementedError

    def names(self) -> list[str] | None:
        """Queues in the same place, this one too if it was ever written to;
        None if there is no such place.  Creates nothing."""
        raise NotImplementedError

    def wait(self, seen: object, seconds: float) -> None:
        """Return when a job may have become due since a take saw none (None:
        since now), at the latest after seconds."""
        raise NotImplementedError

    def compact(self) -> None:
        raise NotImplementedError

    def verify(self) -> list[Damage]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def _duplicate(job: Job, path: str) -> DuplicateJobError:
    advice = "use another id, say that it may exist, or wait for its end"
    if job.state == "dead":
        advice = "requeue it, or cancel it to free its id"
    return DuplicateJobError(
        f"job {job.id!r} is already {job.state} in {path!r}; {advice}",
        id=job.id,
        state=job.state,
    )


def _unknown(id: str, states: str, path: str) -> JobNotFoundError:
    return JobNotFoundError(
        f"job {id!r} is not {states} in queue {path!r}; list the jobs", id=id
    )


def _lost(job: Job, path: str) -> LeaseLostError:
    return LeaseLostError(
        f"job {job.id!r} is no longer leased to token {job.token!r} in {path!r}: the"
        " lease ran out, was reaped or cancelled, or the job is settled; what this"
        " delivery did may be done again",
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


# Calls of several threads made as one
# -----------------------------------------------------------------------------

_GATHER = 1e-4  # seconds that a call waits for more to join, at most


class _Call:
    """What one thread asks for, and its answer, among those made together."""

    answer: Any = None
    error: LockTimeoutError | None = None
    wakeup: threading.Lock | None = None  # held while it waits
    is_leader = ended = False

    def __init__(self, request: Any) -> None:
        self.request = request
        self.thread = threading.get_ident()
        self.batch: list[_Call] = []  # those that it makes, if it leads
        self.to_wake: list[threading.Lock] | None = None  # once it has ended


class _Combined:
    """Makes the calls of several threads as one: who comes while another is at
    it joins the next.  One thread alone pays no switch for it.

    `make` is given a list of calls and sets the answer of each, at once when
    it is decided: a call without one is made again if the leading thread fails.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[_Call] = []
        self._leader: _Call | None = None
        self._served = 0  # by the last call
        self._gathering: threading.Lock | None = None  # its leader waits for others

    def __call__(self, make: Callable[[list[_Call]], object], request: Any) -> Any:
        call = _Call(request)
        while call.answer is None:
            try:
                try:
                    if self._enter(call):
                        self._lead(make, call)
                except LockTimeoutError as exc:
                    for other in call.batch:  # they have waited as long
                        other.error = exc
                    raise
                finally:
                    self._leave(call)
            finally:
                self._leave(call)  # twice, for the same reason as in _locked
            if call.error is not None:
                raise LockTimeoutError(str(call.error), **vars(call.error))
        return call.answer

    def _enter(self, call: _Call) -> bool:
        """True: lead.  Else a leader has worked for this call, or failed."""
        with self._lock:
            call.batch, call.to_wake, call.ended = [], None, False
            self._waiting.append(call)
            # A signal handler's call must not wait for its own thread.
            if self._leader is None or self._leader.thread == call.thread:
                call.is_leader, self._leader = True, call
                return True
            call.wakeup = threading.Lock()
            call.wakeup.acquire()
            if self._gathering and len(self._waiting) >= self._served:
                lock, self._gathering = self._gathering, None
                lock.release()
        call.wakeup.acquire()
        return call.is_leader

    def _lead(self, make: Callable[[list[_Call]], object], call: _Call) -> None:
        """Make the calls of all who wait."""
        if len(self._waiting) < self._served:
            self._gather()
        with self._lock:
            self._gathering = None
            call.batch = [*self._waiting]
            self._waiting = []
        make(call.batch)
        self._served = len(call.batch)

    def _gather(self) -> None:
        """Wait a moment for those whom the last call served: they are about to
        be here again, and else every other call would be its leader's alone."""
        lock = threading.Lock()
        lock.acquire()
        self._gathering = lock
        lock.acquire(timeout=_GATHER)

    def _leave(self, call: _Call) -> None:
        """End a call, however it went; a leader hands on and wakes its batch.

        A Ctrl-C may end it between any two steps, so each may be done again.
        """
        if call.ended:
            return
        with self._lock:
            if call.to_wake is None:
                call.to_wake = self._hand_on(call)
        for lock in reversed(call.to_wake):  # the next leader first
            if lock.locked():
                lock.release()
        call.batch, call.to_wake, call.ended = [], [], True

    def _hand_on(self, call: _Call) -> list[threading.Lock]:
        """The locks of those to wake: who waits for the next leader is not
        among them, or would ask twice."""
        if call in self._waiting:
            self._waiting.remove(call)
        if self._leader is call:
            for following in self._waiting[:1]:
                following.is_leader = True
            self._leader = self._waiting[0] if self._waiting else None
        call.is_leader = False
        served = [other for other in call.batch if other not in self._waiting]
        served += [other for other in self._waiting if other is self._leader]
        return [other.wakeup for other in served if other.wakeup and other is not call]


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
_QUICK = 5e-3  # seconds: waits that end sooner than that are lost races
_PAUSE = 3e-3  # seconds, at most, for each race lost in a row
_IDLE_SLACK = 64 * 1024  # superseded bytes that an idle get leaves behind


class _FileEngine(_Engine):
    """Three files under one lock, and an index of them kept up to date.

    See the module's docstring, I1 to I9.
    """

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
        self._lost_races = 0, -math.inf
        self._watch = _Watch()
        self._compact_above = _MIB
        self._put_together = _Combined()

    def forked(self) -> None:
        self._lock.reset()
        self._store.reset()
        self._reset()

    def fresh(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    # Transactions

    def _locked(self, body: Callable[..., Any], *args: Any, write: bool = True) -> Any:
        """Run body under the thread lock, then the flock (I1).

        The lock is released twice: an exception at any one line, Ctrl-C
        included, leaves at least one of the two to run.
        """
        if self._pid != os.getpid():  # a fork that Python does not know of
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
                if entered and self._store.failed_inodes:
                    self._heal()
                if _WINDOWS:
                    self._store.close_files()
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

    def _commit(self, tickets: Sequence[_Ticket | None]) -> None:
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
        """Catch up and run body; (False, None) if there is too much to read.

        A body that finds the index stale is run again, so it appends nothing
        before it has read all that it needs.
        """
        index = self._index
        if index.dirty:
            index.discard()
        for _ in range(3):
            index.dirty = True  # until this ends well: half a change is not kept
            try:
                done = self._catch_up(most)
                result = body(*args) if done else None
                if done:
                    self._compact_beyond(self._compact_above)
                index.dirty = False
                index.doubts_checksums = index.doubts_checksums and not done
                return done, result
            except _StaleError:  # the files are not what the index remembers
                index.discard()
                index.doubts_checksums = True
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

    def _compact_beyond(self, slack: int) -> None:
        """Compact if more is superseded than that, and than what lives: so that
        rewriting stays a constant share of each operation's cost."""
        superseded = self._index.superseded
        if superseded > slack and superseded > self._index.live_bytes:
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

    # Records

    def _append(
        self,
        file: int,
        lines: Sequence[_Line],
        *,
        durable: bool = True,
        spare: bool = True,
    ) -> _Ticket | None:
        """Write lines to one file, then to the index if it is up to date.

        `spare` lets a full disk use the ballast.
        """
        index, store = self._index, self._store
        data = store.files[file]
        place = data.size
        block = b"".join([line.line for line in lines])
        try:
            store.append(data, block, spare)
        except OSError:
            index.use_up(lines)
            raise
        ticket = store.ticket(data, lines) if durable else None
        if index.loaded and index.read[file] == place:
            index.learn(file, lines, block)
        return ticket

    def _record(self, key: bytes, entry: int) -> _Record:
        """Read a job's line again; it must still be what the index says."""
        place, length, rev, state = _unpack(entry)
        data = self._store.files[_FILE_OF[state]]
        record = _read_record(data.bytes_at(place, length - 1))
        if record.key != key or record.rev != rev:
            raise _StaleError
        return record

    def _job(self, record: _Record, state: str, holder: _Holder | None = None) -> Job:
        get, inflight = record.fields.get, state == "inflight"
        retries = get("max_retries")
        job = _JobFields(
            record.fields["id"],
            record.fields["payload"],
            state,
            record.fields["attempts"],
            record.fields["priority"],
            float(record.fields["created_at"]),
            float(record.fields["run_at"]),
            None if state == "pending" else get("leased_at"),
            get("lease_until") if inflight else None,
            get("last_error"),
            self._max_retries if retries is None else retries,
            get("token") if inflight else None,
            holder,
            record.rev,
            get("lapses", 0),
            retries,
        )
        return _job(job)

    # Put

    def put(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        if not all([item.id is None for item in new]):
            jobs, ticket = self._transact(self._put, new)
        elif len(new) == 1 and self._store.fsync:
            # Each would wait for the lock in turn, and a sync would serve half.
            jobs, ticket = self._put_together(self._put_calls, new[0])
        else:
            jobs, ticket = self._locked(self._put_blind, new)
        self._commit([ticket])
        if isinstance(jobs, Job):  # it is there
            if not exist_ok:
                raise _duplicate(jobs, self.path)
            return [jobs]
        return cast("list[Job]", jobs)

    def _put_calls(self, calls: list[_Call]) -> None:
        ticket = self._locked(self._put_each, calls)
        self._commit([ticket])  # by the leading thread, while others gather

    def _put_each(self, calls: list[_Call]) -> _Ticket | None:
        new = [call.request for call in calls]
        jobs, ticket = self._put_blind(new, many=False)
        for call, job in zip(calls, jobs):
            call.answer = [job], ticket
        return ticket

    def _put_blind(
        self, new: Sequence[_New], many: bool = True
    ) -> tuple[list[Job], _Ticket | None]:
        """Fresh generated ids have no last rev to know (I3), so nothing is
        read: a put costs the same whatever the backlog."""
        index = self._index
        if self._store.look(self._store.files[0]) or index.dirty:
            index.discard()
            index.dirty = False
        return self._insert(new, itertools.repeat(1), many)

    def _put(self, new: Sequence[_New]) -> tuple[list[Job] | Job, _Ticket | None]:
        index, store, revs = self._index, self._store, []
        for item in new:
            key = _key(item.id or "")
            entry = index.entries.get(key, _DONE)
            *_, state = _unpack(entry)
            if state != _DONE:
                # The answer rests on somebody's record: that is synced (I5).
                file = _FILE_OF[state]
                job = self._job(self._record(key, entry), _NAME_OF[file])
                return job, store.ticket(store.files[file], ())
            revs.append(index.next_rev(key))
        return self._insert(new, revs)

    def _insert(
        self, new: Sequence[_New], revs: Iterable[int], many: bool = True
    ) -> tuple[list[Job], _Ticket | None]:
        """Append new jobs; with `many` they are all or nothing."""
        now = time.time()
        jobs, lines = [], []
        last = len(new) - 1 if many else 0
        for i, (item, rev) in enumerate(zip(new, revs)):
            mark = "+" if i < last else ""
            count = f'"lines":{last + 1},' if i == last and last else ""
            job, line = self._new_job(item, rev, now, count, mark)
            jobs.append(job)
            lines.append(line)
        file = 2 if new[0].state == "dead" else 0
        return jobs, self._append(file, lines, spare=False)

    def _new_job(
        self, item: _New, rev: int, now: float, count: str, mark: str
    ) -> tuple[Job, _Line]:
        (id, payload, text, priority, delay, at, retries,
         state, attempts, crashes, created_at, leased_at, error) = item  # fmt: skip
        if id is None:
            id = self.fresh()
        run_at = 0.0
        if at is not None:
            run_at = at if at > now else 0.0
        elif delay:
            run_at = now + delay
        if created_at is None:
            created_at = now
        head = "" if leased_at is None else f'"leased_at":{leased_at},'
        if crashes:
            head += f'"lapses":{crashes},'
        if error is not None:
            head += f'"last_error":{_quote(error)},'
        limit = "" if retries is None else f'"max_retries":{retries},'
        key = _quote(id)
        line = _sealed(
            f'{{"id":{key},"rev":{rev},"attempts":{attempts},"priority":{priority},'
            f'"run_at":{run_at or 0},{count}{head}"created_at":{created_at},{limit}'
            f'"payload":{text}',
            mark,
        )
        number = _DEAD if state == "dead" else _DELAYED if run_at else _PENDING
        fields = line, key[1:-1].encode(), rev, number, priority, run_at
        job = _JobFields(id, payload, state, attempts, priority, created_at, run_at)
        job.max_retries = self._max_retries if retries is None else retries
        job.leased_at, job.last_error = leased_at, error
        job._rev, job._crashes = rev, crashes
        return _job(job), _make_line(fields)

    # Take

    def take(
        self,
        n: int,
        seconds: float,
        held: bool,
        above: int = _LOWEST,
        changes: Sequence[_Change] = (),
    ) -> _Taken:
        events = self._watch.events
        args = n, seconds, held, above, changes
        made, jobs, due, ticket = self._transact(self._take, *args)
        self._commit([ticket])
        if jobs:
            self._lost_races = 0, -math.inf
        return _Taken(made, jobs, (events, due))

    def _take(
        self,
        n: int,
        seconds: float,
        held: bool,
        above: int,
        changes: Sequence[_Change],
    ) -> tuple[list[bool], list[Job], float, _Ticket | None]:
        """The tombstones and the leases are one write, whole or not at all."""
        index, ticket = self._index, None
        index.promote(time.time())
        jobs, leases = self._lease_next(n, seconds, held, above)
        made, lines = self._lines(changes)
        if lines or leases:
            ticket = self._append(1, lines + leases, durable=bool(lines))
        for job, line in zip(jobs, leases):
            index.tokens[line.key] = cast(str, job.token)
        if not jobs:
            self._compact_beyond(_IDLE_SLACK)
        return made, jobs, 0.0 if index.counts[_PENDING] else index.next_due(), ticket

    def _lease_next(
        self, n: int, seconds: float, held: bool, above: int
    ) -> tuple[list[Job], list[_Line]]:
        holder, jobs, leases = None, [], []
        for record in self._pick(n, above):
            holder = self._live_holder() if held and not holder else holder
            attempts, get = record.fields["attempts"], record.fields.get
            counts = attempts + 1, get("lapses", 0), get("last_error")
            change = "", None, "inflight", seconds, None, *counts, self.fresh()
            job, line = self._lease(record, _make_change(change), holder)
            jobs.append(job)
            leases.append(line)
        return jobs, leases

    def _pick(self, n: int, above: int) -> list[_Record]:
        """The first jobs by priority, then in the order of the pending file."""
        picked: list[_Record] = []
        while len(picked) < n:
            order = self._index.first_order()
            if order is None or order.priority <= above:
                break
            head = self._head(order)
            if head is not None:
                order.pop()
                picked.append(head)
        return picked

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
        found, _, _, state = _unpack(entry)
        return record if found == place and state == _PENDING else None

    def _lease(
        self, record: _Record, change: _Change, holder: _Holder | None
    ) -> tuple[Job, _Line]:
        """A job with its lease, and the line that says so."""
        now, fields, token = time.time(), record.fields, change.token
        number, renewed, leased_at = holder.number if holder else 0, "", now
        if change.attempts == fields["attempts"] and "leased_at" in fields:
            renewed, leased_at = f'"renewed_at":{now},', fields["leased_at"]
        until = now + change.seconds
        stamp = (
            f'"token":"{token}","holder":{number},"clock":{time.monotonic()},'
            f'"leased_at":{leased_at},{renewed}"lease_until":{until},'
        )
        rev = self._index.next_rev(record.key)
        line = record.change(_INFLIGHT, rev, fields["run_at"], stamp, change)
        fields["attempts"], fields["lapses"] = change.attempts, change.crashes
        fields["last_error"], fields["token"] = change.error, token
        fields["leased_at"], fields["lease_until"] = leased_at, until
        leased = _make_record((record.key, rev, fields, record.rest))
        return self._job(leased, "inflight", holder), line

    # Change, renew

    def change(self, changes: Sequence[_Change], connection: Any = None) -> list[bool]:
        made, tickets = self._transact(self._change, changes)
        self._commit(tickets)
        return cast("list[bool]", made)

    def _change(
        self, changes: Sequence[_Change]
    ) -> tuple[list[bool], list[_Ticket | None]]:
        made, lines = self._lines(changes)
        return made, [self._append(file, part) for file, part in _writes(lines)]

    def _lines(self, changes: Sequence[_Change]) -> tuple[list[bool], list[_Line]]:
        """Which changes' fences hold, and the lines of those."""
        made, lines = [], []
        for change in changes:
            key = _key(change.id)
            entry = self._fenced(key, change.fence)
            made.append(entry is not None)
            if entry is not None:
                lines.append(self._next_line(key, entry, change))
        return made, lines

    def _fenced(self, key: bytes, fence: str | int | None) -> int | None:
        """A live job's entry, if its lease's token (I6) or its rev is the fence."""
        entry = self._index.entries.get(key, _DONE)
        _, _, rev, state = _unpack(entry)
        if state == _DONE or fence is None:
            return None if state == _DONE else entry
        if isinstance(fence, int):
            return entry if rev == fence else None
        if state != _INFLIGHT:
            return None
        token = self._index.tokens.get(key)
        if token is None:
            token = self._record(key, entry).fields.get("token")
        return entry if token == fence else None

    def _next_line(self, key: bytes, entry: int, change: _Change) -> _Line:
        rev = self._index.next_rev(key)
        if change.state == "done":
            line = _sealed(f'{{"id":"{key.decode()}","rev":{rev},"done":true')
            return _Line(line, key, rev, _DONE, 0, 0.0)
        record = self._record(key, entry)
        state, run_at, extra = _DEAD, record.fields["run_at"], ""
        if change.state == "dead":
            extra = f'"leased_at":{record.fields.get("leased_at", 0)},'
        else:
            now = time.time()
            run_at = now + change.seconds if change.seconds else change.at or 0.0
            state = _DELAYED if run_at > now else _PENDING
        return record.change(state, rev, run_at, extra, change)

    def renew(self, changes: Sequence[_Change], held: bool) -> list[Job | None]:
        jobs, ticket = self._transact(self._renew, changes, held)
        self._commit([ticket])
        return cast("list[Job | None]", jobs)

    def _renew(
        self, changes: Sequence[_Change], held: bool
    ) -> tuple[list[Job | None], _Ticket | None]:
        jobs: list[Job | None] = []
        lines = []
        for change in changes:
            key = _key(change.id)
            entry = self._fenced(key, change.fence)
            if entry is None:
                jobs.append(None)
                continue
            record = self._record(key, entry)
            ours = held and (
                change.token != change.fence or record.fields.get("holder")
            )
            job, line = self._lease(
                record, change, self._live_holder() if ours else None
            )
            jobs.append(job)
            lines.append(line)
        if not lines:
            return jobs, None
        # What a move holds must be held after a power cut, too.
        ticket = self._append(1, lines, durable=not held)
        for job in filter(None, jobs):
            self._index.tokens[_key(job.id)] = cast(str, job.token)
        return jobs, ticket

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
        for key in index.unread_leases:
            entry = index.entries.get(key, _DONE)
            if _unpack(entry)[3] == _INFLIGHT:
                index.leases[key] = _Lease.of(
                    self._record(key, entry), self._max_retries
                )
        index.unread_leases.clear()
        return list(index.leases.values())

    def expired(self, older_than: float) -> list[_Expired]:
        return cast("list[_Expired]", self._transact(self._expired, older_than))

    def _expired(self, older_than: float) -> list[_Expired]:
        clock, now = time.monotonic(), time.time()
        alive: dict[int, bool] = {}
        mine = self._holder.number if self._holder else 0
        over = []
        for lease in self._leases():
            number = lease.holder
            if number and number not in alive:
                alive[number] = number == mine or self._lock.holds(number)
            reason = lease.over(alive.get(number), clock, now, older_than)
            if reason:
                place = self._index.entries[lease.key] >> 64
                over.append((place, lease.job._replace(reason=reason)))
        return [job for _, job in sorted(over)]  # in the order of the file

    # Looking

    def records(
        self, state: str | None, limit: int | None = None, untouched: float = 0.0
    ) -> Iterator[Job]:
        snapshot = self._transact(self._snapshot, state, limit, write=False)
        return self._view(snapshot, time.time() - untouched if untouched else math.inf)

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

    def _view(
        self, snapshot: list[tuple[_Inode, str, list[int]]], until: float
    ) -> Iterator[Job]:
        for inode, state, entries in snapshot:
            for entry in entries:
                job = self._reread(inode, state, entry)
                if max(job.created_at, job.leased_at or 0.0) <= until:
                    yield job

    def _reread(self, inode: _Inode, state: str, entry: int) -> Job:
        try:
            place, length, *_ = _unpack(entry)
            return self._job(_read_record(inode.read(place, length - 1)), state)
        except _StaleError:
            raise QueueError(
                f"queue {self.path!r}: a file was changed in place while jobs() read"
                " it; call it again",
                path=self.path,
            ) from None
        except OSError as exc:
            raise self._refused(exc) from exc

    def find(self, id: str) -> Job | None:
        return cast("Job | None", self._transact(self._find, id, write=False))

    def _find(self, id: str) -> Job | None:
        key = _key(id)
        entry = self._index.entries.get(key, _DONE)
        *_, state = _unpack(entry)
        if state == _DONE:
            return None
        return self._job(self._record(key, entry), _NAME_OF[_FILE_OF[state]])

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
        index.promote(time.time())
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
        events, due = cast("tuple[int, float]", seen or (self._watch.events, math.inf))
        seconds = min(seconds, max(0.0, due - time.time()))
        self._watch.wait(events, self._store.files[0], seconds)
        self._pause_after_lost_races()

    def _pause_after_lost_races(self) -> None:
        """Who was woken again and again for jobs that others took sleeps on
        for some milliseconds, or each put would cost every waiting process a
        look.  Who took the last one does not, nor anybody when puts are rare.
        """
        losses, since = self._lost_races
        losses = min(losses + 1, 4) if time.monotonic() - since < _QUICK else 0
        if losses:
            time.sleep(random.uniform(0, losses * _PAUSE))
        self._lost_races = losses, time.monotonic()

    def verify(self) -> list[Damage]:
        files = self._locked(self._store.files_as_found, write=False)
        found = []
        for name, inode, size in files:
            kept = "set aside: " if name.endswith(".damaged") else ""
            sound = kept and "sound by itself, of an unfinished write"
            number = 0
            try:
                for number, line in enumerate(inode.all_lines(size), 1):
                    reason = _flaw(line) or sound
                    if reason:
                        found.append(Damage(name, number, kept + reason))
            except _StaleError:
                found.append(Damage(name, number + 1, "shrank while it was read"))
        return found

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self._index.loaded:  # and empty files for a drained queue
                self._transact(self._compact_beyond, 0, write=not self._store.readonly)
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


def _writes(lines: Sequence[_Line]) -> Iterator[tuple[int, list[_Line]]]:
    """Lines in a row for one file, in parts of bounded size."""
    part: list[_Line] = []
    size = file = 0
    for line in lines:
        if part and (size > _MIB or _FILE_OF[line.state] != file):
            yield file, part
            part, size = [], 0
        part.append(line)
        size, file = size + len(line.line), _FILE_OF[line.state]
    if part:
        yield file, part


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


class _Line(NamedTuple):
    """A line to append, and what the index needs of it."""

    line: bytes
    key: bytes
    rev: int
    state: int
    priority: int
    run_at: float


_make_line: Any = functools.partial(tuple.__new__, _Line)


class _Record(NamedTuple):
    """A line of a data file, read to be shown or changed."""

    key: bytes
    rev: int
    fields: dict[str, Any]
    rest: str  # from "created_at" to the payload's end, spliced when it moves

    def change(
        self, state: int, rev: int, run_at: float, extra: str, change: _Change
    ) -> _Line:
        """This job's next line."""
        if change.crashes:
            extra += f'"lapses":{change.crashes},'
        if change.error is not None:
            extra += f'"last_error":{_quote(change.error)},'
        priority = self.fields["priority"]
        line = _sealed(
            f'{{"id":"{self.key.decode()}","rev":{rev},"attempts":{change.attempts},'
            f'"priority":{priority},"run_at":{run_at or 0},{extra}{self.rest}'
        )
        return _Line(line, self.key, rev, state, priority, run_at)


_make_record: Any = functools.partial(tuple.__new__, _Record)


class _Lease(NamedTuple):
    """What tells whether an inflight job's lease is over."""

    key: bytes
    job: _Expired  # if it is over
    holder: int  # 0: no proof of life
    clock: float  # monotonic, at the last renewal
    renewed_at: float
    length: float

    @classmethod
    def of(cls, record: _Record, max_retries: int) -> _Lease:
        fields, get = record.fields, record.fields.get
        leased_at = get("leased_at", 0.0)
        renewed_at = get("renewed_at", leased_at)
        job = _Expired(
            fields["id"],
            record.rev,
            fields["attempts"],
            get("max_retries", max_retries),
            get("lapses", 0),
            fields["priority"],
            "",
        )
        length = get("lease_until", leased_at) - renewed_at
        return cls(
            record.key, job, get("holder", 0), get("clock", 0.0), renewed_at, length
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
    id, rev = head[1], int(head[2])
    try:
        fields, end = _scan(text, 0)
        same = _quote(fields["id"])[1:-1] == id  # not there twice
    except (StopIteration, TypeError, ValueError):
        return None
    except RecursionError:
        if _shallow(text, _MAX_DEPTH + 1):
            raise  # the caller's own stack is nearly full
        return None
    if (
        same
        and end == len(text)
        and rev <= _MAX_REV
        and "payload" in fields
        and isinstance(fields["run_at"], (int, float))
        and isinstance(fields["created_at"], (int, float))
    ):
        return _Record(id.encode(), rev, fields, text[head.end() : -1])
    return None


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


_CHECKS: tuple[tuple[Any, ...], ...] = (
    ("rev", _integer, 1, _MAX_REV),
    ("attempts max_retries holder lapses", _integer, 0, 2**53),
    ("priority", _integer, -_MAX_PRIORITY - 1, _MAX_PRIORITY),
    ("created_at clock leased_at renewed_at", _number, 0, _MAX_SECONDS),
    ("run_at lease_until", _number, 0, 2 * _MAX_SECONDS),
    ("token last_error", _typed, str),
)
_DEFAULTS = [("rev", 1)] + [
    (name, 0) for name in ("attempts", "priority", "run_at", "created_at")
]


def _flaw(line: bytes) -> str:
    """What is wrong with a line of a file, or ""."""
    try:
        if line.strip(_BLANKS):
            _any_record(line)
    except _DamagedError as exc:
        return str(exc) if line.endswith(b"\n") else f"torn write: {exc}"
    return ""


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
        self.used_revs: dict[bytes, int] = {}
        self.doubts_checksums = False  # a checksum proved not to be enough
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
        self.unread_leases: list[bytes] = []  # inflight, not yet in leases
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
        return max(rev, self.used_revs.get(key, 0)) + 1

    def use_up(self, changes: Sequence[_Line]) -> None:
        """A failed write may come back in part: its revs are used up."""
        if self.loaded:  # else only generated ids, which are never put again
            for change in changes:
                self.used_revs[change.key] = self.next_rev(change.key)

    # Reading

    def load(self, file: int, block: bytes, now: float) -> None:
        """Index whole lines that follow what was read of a file."""
        lines = block[:-1].split(b"\n")
        if file == 0 and not self.doubts_checksums:
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
        top = None if self.doubts_checksums else _TOP.match(line)
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

    def learn(self, file: int, changes: Sequence[_Line], block: bytes) -> None:
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
            self.unread_leases.append(key)

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

    def promote(self, now: float) -> None:
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
        self.used_revs.clear()


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

    def __init__(self, path: str, flags: int) -> None:
        self.fd = -1
        self._own: list[int] = []
        self._close = os.close
        with _FORKING:
            self._own.append(os.open(path, flags, 0o666))
            _FDS.add(self)
        self.fd = self._own[0]

    @classmethod
    def of(cls, fd: int) -> _Fd:
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


def _open_file(path: str, flags: int) -> _Fd:
    """Open a regular file; anything else in its place is refused."""
    file = _Fd(path, flags | _OPEN_SAFELY)
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
        self.unterminated = -1  # where a newline is missing that may not be written
        self.name_durable = False
        self.lock = threading.RLock()
        self.syncing = threading.RLock()
        self.issued = self.synced = 0  # numbers of tickets
        self.unsynced: list[tuple[int, Sequence[_Line]]] = []
        self.failed = False

    @property
    def fd(self) -> int:
        """Opened anew where Windows made us close it (see _Store.close_files)."""
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
        missing = len(block) < length and place + len(block) == self.unterminated
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
        self.decided_size = -1  # the size up to which the tail is decided

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
        self._cleaned_for: object = None
        self._reachable = False
        self.failed_inodes: list[_Inode] = []
        self._failed_lines: set[bytes] = set()
        self._damage_seen = (-1, 0)
        self._damaged_in_doubt = False

    def enter(self, write: bool) -> bool:
        """Begin an operation; True if the index must be discarded."""
        self._inspecting = not write
        changed = write and self.readonly
        if changed:
            self.reset()
        if self._lock.readonly:
            self.readonly = True
        elif self._cleaned_for != self._lock.ident:
            for data in [*self.files, _Data(-1, self.damaged)]:
                _unlink(data.temp)
            self._cleaned_for = self._lock.ident
        if self.failed_inodes:
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
            data.inode, data.size, data.decided_size = self._open(data), 0, 0
            if data.inode is None:
                return inode is not None
            inode, replaced = data.inode, True  # what was read before is void
            info = os.fstat(inode.fd)
        data.size = info.st_size
        if data.size != data.decided_size or not inode.checked:
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

    def close_files(self) -> None:
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
        data.decided_size = -1
        good, unterminated = inode.sound_end(size)
        if self.readonly:
            inode.unterminated = good if unterminated else -1
            data.size = good + bool(unterminated)
        elif unterminated:
            self.append(data, b"\n", spare=True)
        elif good < size:
            self._keep(inode.read(good, size - good))
            os.ftruncate(inode.fd, good)
            data.size = good
        inode.checked = not self.readonly  # what is not cut is met again
        data.decided_size = data.size
        return good < size

    # Writing

    def append(self, data: _Data, block: bytes, spare: bool) -> None:
        """Append a block whole, or leave the file as it was and raise (I5)."""
        fd = cast(_Inode, data.inode).fd
        try:
            _write(fd, block)
        except OSError as exc:
            data.decided_size = -1  # if cutting back fails too, the tail rule does it
            try:
                os.ftruncate(fd, data.size)
                data.decided_size = data.size
            except OSError:
                spare = False
            if not spare or exc.errno not in _FULL or not self._lock.spend_ballast():
                exc.filename = exc.filename or data.path
                raise
            self.append(data, block, False)
            return
        data.size += len(block)
        data.decided_size = data.size

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
        data.inode, data.size, data.decided_size = inode, size, size
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
        if self._damaged_in_doubt:  # as for the data files (I9)
            self.rewrite(kept, kept.inode.all_lines(kept.size))
        self._damaged_in_doubt = True
        self.append(kept, raw if raw.endswith(b"\n") else raw + b"\n", spare=True)
        _sync(kept.inode.fd)
        self.sync_directory()
        self._damaged_in_doubt = False

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

    def ticket(self, data: _Data, changes: Sequence[_Line]) -> _Ticket | None:
        """Enter what was just appended for the next sync of its file."""
        if not self.fsync:
            return None
        inode = cast(_Inode, data.inode)
        with inode.lock:
            inode.issued += 1
            inode.unsynced.append((inode.issued, changes))
            return _Ticket(inode, inode.issued)

    def commit(self, *tickets: _Ticket | None) -> None:
        """Sync the tickets' writes, unless another thread has; holds no lock.

        Who waits for another's sync has appended meanwhile, as have others: the
        next one syncs for all (group commit).  A failed sync fails every write
        not yet synced.
        """
        for ticket in tickets:
            if ticket is not None and not self._is_synced(*ticket):
                raise QueueError(
                    f"queue {self.path!r}: the disk failed to sync, so nothing was"
                    " acknowledged; the queue repairs its files at the next call",
                    path=self.path,
                    errno=errno.EIO,
                )

    def _is_synced(self, inode: _Inode, number: int) -> bool:
        """Sync a file and its name, for all tickets issued so far.

        One thread at a time: a sync that succeeds beside a failing one may have
        lost its bytes to it.
        """
        with inode.syncing:
            if inode.synced >= number or inode.failed:
                return inode.synced >= number
            target = inode.issued
            try:
                inode.sync()
                if not inode.name_durable:
                    self.sync_directory()
                    inode.name_durable = True
            except OSError as exc:
                inode.failed = True
                self.failed_inodes.append(inode)
                _log().error("sync of queue %r failed: %s", self.path, exc)
                return False
            if not inode.failed:  # by a signal handler's sync meanwhile
                with inode.lock:
                    inode.synced = target
                    while inode.unsynced and inode.unsynced[0][0] <= target:
                        del inode.unsynced[0]
            return inode.synced >= number

    def make_durable(self) -> None:
        """Sync every data file as it stands, and their names (I4)."""
        for data in self.files:
            inode = cast(_Inode, data.inode)
            with inode.lock:
                inode.issued += 1  # others may have written what none has synced
            if not self._is_synced(inode, inode.issued):
                raise OSError(errno.EIO, "sync failed", data.path)

    def sync_directory(self) -> None:
        """Make the names in the queue's directory durable."""
        if _WINDOWS:
            return
        try:
            _sync_path(self.path)
        except OSError:
            # A retry would say yes and mean nothing: copy everything (I9).
            self.failed_inodes.extend(data.inode for data in self.files if data.inode)
            raise
        if not self._reachable:
            _sync_ancestors(os.path.realpath(self.path))
            self._reachable = True

    def rescue(self) -> None:
        """After a failed sync: copy every file whole to a new inode, less the
        lines of the failed operations (I9)."""
        failed = list(self.failed_inodes)
        for inode in failed:
            with inode.lock:
                if inode.failed:
                    for _, changes in inode.unsynced:
                        self._failed_lines.update(
                            _plain(change.line) for change in changes
                        )
        for data in self.files:
            self.look(data)
            if data.inode is not None:
                self.rewrite(data, self._all_but_failed(data.inode, data.size))
        self.sync_directory()
        for data in self.files:
            if data.inode is not None:
                data.inode.name_durable = True
        del self.failed_inodes[: len(failed)]
        self._failed_lines.clear()

    def _all_but_failed(self, inode: _Inode, size: int) -> Iterator[bytes]:
        for line in map(_plain, inode.all_lines(size)):
            if line not in self._failed_lines:
                yield line

    # Looking without touching

    def files_as_found(self) -> list[tuple[str, _Inode, int]]:
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
    them takes over when it leaves.  `events` counts the changes seen: a thread
    that saw nothing due at some count sleeps only while it is still that.
    Producers do nothing for this.
    """

    def __init__(self) -> None:
        self.events = 0
        self._cond = threading.Condition()
        self._asking = False
        self._notifier: _Notifier | None = None
        self._ident: object = None

    def wait(self, events: int, data: _Data, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._cond:
            self._cond.wait_for(
                lambda: not self._asking or self.events != events, seconds
            )
            if self._asking or self.events != events:
                return
            self._asking = True
        changed = False
        try:
            changed = self._listen(data, deadline - time.monotonic())
        finally:
            with self._cond:
                self._asking = False
                self.events += changed
                self._cond.notify_all()

    def _listen(self, data: _Data, seconds: float) -> bool:
        """Arm, then have the caller look again, and only then sleep: so no
        change can fall between looking and sleeping."""
        inode = data.inode
        if inode is None:
            time.sleep(min(max(seconds, 0.0), _POLL))
            return True
        notifier = self._notifier = self._notifier or _new_notifier()
        if self._ident == inode.ident:
            return notifier.wait(max(0.0, seconds))
        try:
            notifier.arm(data.path, inode)
        except OSError:  # no watches left
            self._notifier = _Notifier()
            self._notifier.arm(data.path, inode)
        self._ident = inode.ident
        return True

    def close(self) -> None:
        """Wake all; the descriptor closes when the last has left it."""
        with self._cond:
            self._notifier = None
            self.events += 1
            self._cond.notify_all()


class _Notifier:
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


class _Inotify(_Notifier):
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
        self._file = _Fd.of(fd)
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


class _Kqueue(_Notifier):
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


def _new_notifier() -> _Notifier:
    """The best way to hear of changes here; polling when there is none, or
    when the user has no more inotify instances left."""
    import select

    try:
        if hasattr(select, "kqueue"):
            return _Kqueue()
        return _Inotify()
    except (AttributeError, ImportError, OSError, TypeError):
        return _Notifier()


# Databases: one engine, two dialects
# =============================================================================

# One row is one live job, and a settled one is gone.  The two kinds of pending
# are `ready` and `delayed`.  `place` is the order in which jobs wait and are dead:
# a change of one gives it the last, but for a lease and for becoming due.  Words
# in capitals stand for what the dialects say differently: NOW and CLOCK are their
# clocks, NEXT is the next place, UNLOCKED a rev that no open transaction is about
# to change, and READY, DELAYED, INFLIGHT, DEAD the table by the index of that name.
_SQL_FORMAT = 2  # raised by any change to the tables
_SQL_PAGE = 500  # jobs that a statement of records() reads
_SQL_DUE = 1000  # delayed jobs that one statement makes ready
_SQL_TABLES = (
    """CREATE TABLE  -- which queues are here, and how their rows are to be read
    IF NOT EXISTS QUEUES (
        name TEXT PRIMARY KEY,
        format INTEGER NOT NULL
    )""",
    """CREATE TABLE  -- payload last: what stands before it is read without it
    IF NOT EXISTS JOBS (
        place SERIAL,
        rev BIGINT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        run_at DOUBLE PRECISION NOT NULL,
        leased_at DOUBLE PRECISION,
        renewed_at DOUBLE PRECISION,
        clock DOUBLE PRECISION,
        lease_until DOUBLE PRECISION,
        owner BIGINT NOT NULL DEFAULT 0,
        attempts BIGINT NOT NULL,
        crashes BIGINT NOT NULL,
        max_retries BIGINT,
        priority BIGINT NOT NULL,
        state TEXT NOT NULL,
        queue TEXT NOT NULL,
        id TEXT NOT NULL,
        token TEXT,
        last_error TEXT,
        payload JSON NOT NULL
    )""",
    """CREATE UNIQUE INDEX  -- an id is taken until its job is settled
    IF NOT EXISTS tiny_queue_ids ON JOBS (queue, id)""",
    *(
        f"""CREATE INDEX  -- in order, without the other states
        IF NOT EXISTS tiny_queue_{state} ON JOBS (queue, {order})
        WHERE state = '{state}'"""
        for state, order in (
            ("ready", "priority DESC, place"),
            ("delayed", "run_at"),
            ("inflight", "place"),
            ("dead", "place"),
        )
    ),
)
_SQL_THERE = "SELECT THERE  -- looking creates nothing"
_SQL_QUEUES = """SELECT  -- rows of another format are not touched
    name, FORMAT FROM QUEUES AS queue ORDER BY name"""
_SQL_REGISTER = """INSERT  -- a drained queue is still there
    INTO QUEUES (name, format) VALUES (:queue, :format) ON CONFLICT DO NOTHING"""
_SQL_TOUCH = """UPDATE  -- I5: a commit of ours syncs those that it rests on
    QUEUES SET format = format WHERE name = :queue"""
_SQL_ROW = (
    "id, CAST(payload AS text), state, attempts, priority, created_at, run_at,"
    " leased_at, lease_until, last_error, max_retries, token, rev, crashes"
)
_SQL_NEW = (
    "queue, id, rev, state, attempts, crashes, priority, created_at, run_at,"
    " leased_at, max_retries, last_error, payload"
)
_SQL_CHANGE = """UPDATE  -- the new state whole, at the end of the order
    JOBS SET place = NEXT, rev = rev + 1, attempts = :attempts, crashes = :crashes,
        last_error = :error, state = CASE WHEN :state <> 'pending' THEN :state
            WHEN coalesce(:at, NOW + :seconds) > NOW THEN 'delayed' ELSE 'ready' END,
        run_at = CASE WHEN :state <> 'pending' THEN run_at
            WHEN coalesce(:at, NOW + :seconds) > NOW THEN coalesce(:at, NOW + :seconds)
            ELSE 0 END,
        leased_at = CASE WHEN :state <> 'pending' THEN leased_at END,
        renewed_at = NULL, clock = NULL, lease_until = NULL, owner = 0, token = NULL
    WHERE queue = :queue AND id = :id"""
_SQL_LEASE = """UPDATE  -- a delivery begins when attempts rise
    JOBS SET rev = rev + 1, state = 'inflight', attempts = :attempts,
        crashes = :crashes, last_error = :error,
        leased_at = CASE WHEN :attempts > attempts THEN NOW ELSE leased_at END,
        renewed_at = NOW, clock = CLOCK, lease_until = NOW + :seconds,
        owner = CASE WHEN token = :token AND owner = 0 THEN 0 ELSE :owner END,
        token = :token
    WHERE queue = :queue AND id = :id"""
_SQL_DONE = """DELETE  -- a settled job leaves nothing
    FROM JOBS WHERE queue = :queue AND id = :id"""
_SQL_FENCES = {  # by what the caller knows of the job
    str: " AND token = :fence",  # I6: the token alone
    int: " AND rev = UNLOCKED",  # only if nobody was, or is about to be, faster
    type(None): "",
}
_SQL_FIND = f"""SELECT  -- whatever its state
    {_SQL_ROW} FROM JOBS WHERE queue = :queue AND id = :id"""
_SQL_EXPIRED = """SELECT  -- a living holder's lease is judged by the steady clock
    id, rev, attempts, max_retries, crashes, priority, reason FROM (
        SELECT *, CASE WHEN owner <> 0 AND owner NOT IN (LIVING) THEN 'holder died'
            WHEN age >= lasts OR age < -1 THEN 'lease ran out'
            WHEN age >= :older_than THEN 'not renewed' END AS reason
        FROM (SELECT *, lease_until - renewed_at AS lasts,
            CASE WHEN owner = 0 THEN NOW - renewed_at ELSE CLOCK - clock END AS age
            FROM INFLIGHT WHERE OURS = :queue AND state = 'inflight') AS leased
    ) AS judged WHERE reason IS NOT NULL ORDER BY renewed_at, place"""
_SQL_LAST = "SELECT coalesce(LAST, 0), NOW  -- what comes later is in no snapshot"
_SQL_RECORDS = {  # by state: a part, in order
    state: f"""SELECT  -- what has changed since the snapshot is left out
    place, {_SQL_ROW} FROM {table} WHERE queue = :queue AND {states}
    AND place > :after AND place <= :last AND coalesce(leased_at, 0) <= :since
    AND (:untouched = 0 OR NOW - GREATEST(created_at, coalesce(leased_at, 0))
        >= :untouched) ORDER BY place LIMIT :n"""
    for state, table, states in (
        ("pending", "PLACED", "state IN ('ready', 'delayed')"),
        ("inflight", "INFLIGHT", "state = 'inflight'"),
        ("dead", "DEAD", "state = 'dead'"),
    )
}
_SQL_COUNTS = """SELECT  -- in the order of Stats
    count(*) FILTER (WHERE state IN ('ready', 'delayed')),
    count(*) FILTER (WHERE state = 'delayed' AND run_at > NOW),
    count(*) FILTER (WHERE state = 'inflight'),
    count(*) FILTER (WHERE state = 'dead'), 0,
    min(GREATEST(created_at, run_at))
        FILTER (WHERE state = 'ready' OR (state = 'delayed' AND run_at <= NOW)),
    min(run_at) FILTER (WHERE state = 'delayed' AND run_at > NOW), (SIZE)
    FROM JOBS WHERE queue = :queue"""


@functools.lru_cache(None)
def _sql_change(state: str, fence: Any) -> str:
    text = {"done": _SQL_DONE, "inflight": _SQL_LEASE}.get(state, _SQL_CHANGE)
    return text + _SQL_FENCES[fence]


def _sql_of(change: _Change) -> str:
    return _sql_change(change.state, cast(Any, type(change.fence)))


def _sql_keys(change: _Change, owner: int = 0) -> dict[str, Any]:
    """The parameters of its statement."""
    id, fence, state, seconds, at, attempts, crashes, error, token = change
    if state == "done":
        return {"id": _to_column(id), "fence": fence}
    return {
        "id": _to_column(id), "fence": fence, "state": state, "seconds": seconds,
        "at": at, "attempts": attempts, "crashes": crashes, "token": token,
        "error": error and _to_column(error), "owner": owner,
    }  # fmt: skip


def _to_column(text: str | None) -> str | None:
    """Any str as text that a database takes.

    Text with a NUL or half a surrogate pair goes in as a JSON string.  So does
    text with a backslash: a backslash tells the one form from the other.
    """
    if text and ("\\" in text or "\0" in text or _SURROGATE.search(text)):
        return _quote(text)
    return text


def _from_column(text: str) -> str:
    return cast(str, json.loads(text)) if "\\" in text else text


_SURROGATE = re.compile("[\ud800-\udfff]")


def _payload_of(text: str) -> Any:
    """None for what somebody made no JSON by hand."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _driver(name: str, cure: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise QueueError(f"this URL needs {cure} ({exc})") from exc


class _AliveError(Exception):
    """An id is alive, which ends the transaction; with the job, or None if it
    was settled meanwhile."""


class _UnreachableError(Exception):
    """No connection came about; its cause says why."""


class _SqlLink:
    """A connection's cursor, and what its transaction is to know."""

    connection: Any = None
    cursor: Any = None
    sent = False  # what is to be done, after seeing to the tables
    doubt = False  # an earlier try of it may have been carried out
    lazy = False  # a power cut may forget it
    tell = False  # it may make a job due soon: who waits is to be woken
    guest = False  # it is the caller's own
    undo = ""  # what takes back a call in it

    def execute(self, text: str, keys: Any = None) -> Any:
        return self.cursor.execute(text, keys or {})

    def in_transaction(self) -> bool:
        return bool(self.connection.in_transaction)


class _SqlEngine(_Engine):
    """A queue in rows: the verbs of the contract, and transactions for them."""

    can_join = True
    can_compact = False
    SECONDS = 0.0  # that it tries at least, however short lock_timeout is
    LONGER = 1  # how many times that with many jobs
    PAUSES = (50e-6, 1e-3)  # before it tries again: the first, and the longest
    TABLES = _SQL_TABLES
    # What a dialect brings along
    _driver: Any  # the module
    _words: dict[str, str]  # what it says for the words in capitals
    _spelt: Any  # text -> statement, with parameters in the driver's style
    _common: Any  # link -> parameters that each statement has
    _lend: Any  # lent, deadline, make -> link, or None if there is no database
    _give_back: Any  # what is in lent; may be called twice
    _begin: Any  # link, write, block
    _judge: Any  # exception, link -> QueueError, may be tried again, answer lost
    _joined: Any  # the caller's connection -> context of a link
    _enter: Any  # link: set a savepoint, and see to the tables
    _insert: Any  # link, jobs, ids, revs -> by id when it was created and is due
    _each: Any  # link, changes, owner, columns -> a row of each that held, or None
    _holder: Any  # held -> our proof of life, or None
    _watch: Any  # what sleeps until something changes

    def __init__(self, url: str, name: str, *, shared: bool, **options: Any) -> None:
        if not shared:
            raise ValueError(
                "cross_process_lock: a database locks by itself, so False is for"
                " directories only"
            )
        self.path = self.source = url
        self._name, self._closed = name, False
        self._max_retries: int = options["max_retries"]
        self._fsync: bool = options["fsync"]
        self._lock_timeout: float = options["lock_timeout"]
        self._texts: dict[str, str] = {}
        self._reset()
        _ENGINES.add(self)

    def _reset(self) -> None:
        """Forget all that a process may not share with its parent."""
        self._pid = os.getpid()
        self._prefix = os.urandom(8).hex() + "-"
        self._serial = itertools.count(1)
        self._found = self._registered = False  # the tables; our name in them

    def forked(self) -> None:
        raise NotImplementedError

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # a fork that Python does not know of
            self.forked()

    def fresh(self) -> str:
        self._check_process()
        return f"{self._prefix}{next(self._serial):x}"

    # Statements and transactions

    def _sql(self, text: str) -> str:
        """A statement with the dialect's words in their places."""
        found = self._texts.get(text)
        if found is None:
            # What is quoted is a schema's name, which may be one of these words.
            found, word = text, re.compile(rf"(?<!\")\b({'|'.join(self._words)})\b")
            while word.search(found):
                found = word.sub(lambda match: self._words[match[1]], found)
            found = self._texts[text] = self._spelt(found)
        return found

    def _do(self, link: _SqlLink, text: str, **keys: Any) -> Any:
        return link.execute(self._sql(text), {**self._common(link), **keys})

    def _row(self, link: _SqlLink, text: str, keys: dict[str, Any]) -> Any:
        return self._do(link, text, **keys).fetchone()

    def _rows(self, link: _SqlLink, text: str, keys: dict[str, Any]) -> list[Any]:
        return list(self._do(link, text, **keys).fetchall())

    def _run(
        self,
        body: Callable[..., Any],
        *args: Any,
        connection: Any = None,
        make: bool = False,
        again: bool = True,
        many: bool = False,
        **how: Any,
    ) -> Any:
        """Run body(link, *args) as one transaction, or in the caller's.

        What certainly was not carried out is tried again within lock_timeout,
        and with `again` also what may have been; `many` jobs may take longer.
        `make` makes the tables.  For what else there is see _try().
        """
        self._check_process()
        if connection is not None:
            return self._join(connection, body, *args)
        lasting = max(self._lock_timeout, self.SECONDS) * (self.LONGER if many else 1)
        deadline = time.monotonic() + lasting
        pause, doubt, log = self.PAUSES[0], False, "warning"
        while True:
            link: Any = None
            lent: list[Any] = []
            try:
                try:
                    link = self._lend(lent, deadline, make)
                    return self._try(link, make, doubt, body, args, **how)
                finally:
                    self._give_back(lent)
            except (self._driver.Error, OSError, _UnreachableError) as exc:
                error, retry, lost = self._judge(exc, link)
                lost, left = lost and link.sent, deadline - time.monotonic()
                doubt = doubt or lost
                if left <= 0 or not retry or (lost and not again):
                    raise (self._in_doubt(error) if doubt else error) from exc
            finally:
                self._give_back(lent)  # a Ctrl-C may have ended the first
            if not isinstance(error, LockTimeoutError):  # said once a call
                text = "%s; it is tried again for at most %.1f s"
                getattr(_log(), log)(text, error, left)
                log = "debug"
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self.PAUSES[1])

    def _try(
        self,
        link: Any,
        make: bool,
        doubt: bool,
        body: Callable[..., Any],
        args: Any,
        write: bool = True,
        lazy: bool = False,
        block: bool = False,
        soon: bool = False,
        bare: bool = False,
        nothing: Any = None,
    ) -> Any:
        """A `block` has more than one statement.  `soon` a job may be due by it.
        `nothing` is the answer where there are no tables, unless it needs none
        (`bare`)."""
        if link is None:
            return nothing
        link.sent = False
        if not (bare or self._prepared(link, make)):
            return nothing
        link.doubt, link.lazy, link.tell, link.sent = doubt, lazy, soon, True
        block = self._begin(link, write, block)
        result = body(link, *args)
        if block:
            link.execute("COMMIT")
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosedError(
                f"queue {self.path!r} is closed; make a new Queue", path=self.path
            )

    def _in_doubt(self, error: QueueError) -> QueueError:
        """The statement may have been carried out: nothing else is known."""
        return type(error)(
            f"{error}; the outcome is unknown: look whether it was carried out, or"
            " repeat it in a form that does no harm twice (a put by its id with"
            " exist_ok)",
            **{**vars(error), "outcome_unknown": True},
        )

    def _prepared(self, link: _SqlLink, make: bool) -> bool:
        """Whether the tables are there, of our format; `make` makes them, and
        registers the queue."""
        if self._registered or (self._found and not make):
            return True
        if make:
            self._begin(link, True, True)
            self._create(link)
            link.execute("COMMIT")
        elif not self._row(link, _SQL_THERE, {})[0]:
            return False
        self._check_formats(link)
        self._found, self._registered = True, make
        return True

    def _create(self, link: _SqlLink) -> None:
        if not self._row(link, _SQL_THERE, {})[0]:
            for statement in self.TABLES:
                self._do(link, statement)
        self._check_formats(link)  # of a guest's, too
        self._do(link, _SQL_REGISTER, format=_SQL_FORMAT)

    def _check_formats(self, link: _SqlLink) -> None:
        for name, found in self._rows(link, _SQL_QUEUES, {}):
            if found != _SQL_FORMAT:
                raise QueueError(
                    f"queue {self.path!r}: its tables have format {found} (that of"
                    f" queue {name!r}), this tiny_queue knows {_SQL_FORMAT}; with the"
                    " version that made them move the jobs of every queue in it to a"
                    " directory (inflight ones do not move: let them end), drop all"
                    " tables that begin with tiny_queue_, and move the jobs back with"
                    " this one",
                    path=self.path,
                )

    def _join(self, connection: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Run body in the transaction that is open on the caller's connection;
        an error takes back what it did there and nothing else."""
        self._check_open()
        with self._joined(connection) as link:
            try:
                try:
                    self._enter(link)
                    result = body(link, *args)
                    link.execute("RELEASE SAVEPOINT tiny_queue")
                    return result
                except BaseException:
                    self._undo(link)
                    raise
            except BaseException:  # a Ctrl-C there
                self._undo(link)
                raise

    def _undo(self, link: _SqlLink) -> None:
        try:
            if link.undo and link.in_transaction():
                link.execute(link.undo)
                if link.undo != "ROLLBACK":
                    link.execute("RELEASE SAVEPOINT tiny_queue")
            link.undo = ""
        except self._driver.Error as exc:
            if "savepoint" not in str(exc):  # it was not set yet
                raise

    # Puts and changes

    def put(
        self, new: Sequence[_New], exist_ok: bool, connection: Any = None
    ) -> list[Job]:
        ids = [_to_column(item.id) or self.fresh() for item in new]
        given, jobs, job = new[0].id is not None, [], None
        for _ in range(10):
            try:
                jobs = self._run(
                    self._put, new, ids, connection=connection, make=True,
                    block=given and len(new) > 1, again=given and exist_ok,
                    many=len(new) > 1,
                    soon=any([item.delay <= _TICK for item in new]),
                )  # fmt: skip
                return cast("list[Job]", jobs)
            except _AliveError as exc:
                job = exc.args[0]
            if job is not None:
                if self._fsync and connection is None:
                    self._run(self._do, _SQL_TOUCH)
                if exist_ok:
                    return [job]
                raise _duplicate(job, self.path)
        raise QueueError(f"queue {self.path!r}: {ids[0]!r} comes and goes; try again")

    def _put(self, link: _SqlLink, new: Sequence[_New], ids: list[str]) -> list[Job]:
        """Insert the jobs, or raise the first that is alive."""
        revs = [random.getrandbits(48) for _ in ids]  # an id put again has another
        instants = self._insert(link, new, ids, revs)
        jobs = []
        for item, id, rev in zip(new, ids, revs):
            when = instants.get(id)
            if when is None:
                row = self._row(link, _SQL_FIND, {"id": id})
                raise _AliveError(row and self._view(row))
            job = _JobFields(
                item.id or id,
                item.payload,
                item.state,
                item.attempts,
                item.priority,
                *when,
            )
            job.leased_at, job.last_error = item.leased_at, item.error
            job.max_retries = self._retries(item.max_retries)
            job._rev, job._crashes = rev, item.crashes
            jobs.append(_job(job))
        return jobs

    def change(self, changes: Sequence[_Change], connection: Any = None) -> list[bool]:
        made = self._run(
            self._change, changes, connection=connection, block=len(changes) > 1,
            many=len(changes) > 1,
            soon=any([x.state == "pending" and x.seconds <= _TICK for x in changes]),
            nothing=[False] * len(changes),
        )  # fmt: skip
        return cast("list[bool]", made)

    def _change(self, link: _SqlLink, changes: Sequence[_Change]) -> list[bool]:
        made = [row is not None for row in self._each(link, changes)]
        if link.doubt and not all(made):
            raise self._in_doubt(
                QueueError(
                    f"queue {self.path!r}: the connection was lost while job"
                    f" {changes[made.index(False)].id!r} was changed, and now it is"
                    " changed, or was before",
                    path=self.path,
                )
            )
        return made

    def renew(self, changes: Sequence[_Change], held: bool) -> list[Job | None]:
        holder = self._holder(held)
        rows = self._run(
            self._renew, changes, holder.number if holder else 0, lazy=held,
            block=len(changes) > 1, nothing=[None] * len(changes),
        )  # fmt: skip
        jobs = [row and self._view(row, holder) for row in rows]
        self._note([job for job in jobs if job], holder)
        return jobs

    def _renew(
        self, link: _SqlLink, changes: Sequence[_Change], owner: int
    ) -> list[Any]:
        rows: list[Any] = self._each(link, changes, owner, _SQL_ROW)
        for i, change in enumerate(changes if link.doubt else ()):
            if rows[i] is None:  # an earlier try may have leased, and nobody knew
                found = self._do(link, _SQL_FIND, id=_to_column(change.id))
                row = found.fetchone()
                rows[i] = row if row and row[11] == change.token else None
        return rows

    def _note(self, jobs: Sequence[Job], holder: Any) -> None:
        """Know the leases that were given, where a holder may be replaced."""

    # Looking

    def expired(self, older_than: float) -> list[_Expired]:
        keys = {"older_than": older_than}
        rows = self._run(self._expired, keys, write=False, nothing=[])
        return [
            _Expired(_from_column(id), rev, attempts, self._retries(retries), *rest)
            for id, rev, attempts, retries, *rest in rows
        ]

    def _expired(self, link: _SqlLink, keys: dict[str, Any]) -> list[Any]:
        return self._rows(link, _SQL_EXPIRED, keys)

    def find(self, id: str) -> Job | None:
        row = self._run(self._row, _SQL_FIND, {"id": _to_column(id)}, write=False)
        return None if row is None else self._view(row)

    def records(
        self, state: str | None, limit: int | None = None, untouched: float = 0.0
    ) -> Iterator[Job]:
        nothing = (0, 0.0)
        last, since = self._run(self._row, _SQL_LAST, {}, write=False, nothing=nothing)
        keys = {"last": last, "since": since, "untouched": untouched}
        states = [*_SQL_RECORDS] if state is None else [state]
        jobs = self._pages(states, math.inf if limit is None else limit, keys)
        return itertools.chain([*itertools.islice(jobs, 1)], jobs)  # read a page now

    def _pages(
        self, states: list[str], left: float, keys: dict[str, Any]
    ) -> Iterator[Job]:
        for state in states:
            rows: list[Any] = [(0,)]
            while rows:
                n = int(min(left, _SQL_PAGE))
                keys = {**keys, "after": rows[-1][0], "n": n}
                args = _SQL_RECORDS[state], keys
                rows = self._run(self._rows, *args, write=False, many=True, nothing=[])
                left -= len(rows)
                for row in rows:
                    yield self._view(row[1:])

    def counts(self) -> Stats:
        none = (0, 0, 0, 0, 0, None, None, 0)
        how: dict[str, Any] = {"write": False, "many": True, "nothing": none}
        return Stats(*self._run(self._row, _SQL_COUNTS, {}, **how))

    def names(self) -> list[str] | None:
        rows = self._run(self._rows, _SQL_QUEUES, {}, write=False)
        return None if rows is None else [name for name, _ in rows]

    def _view(
        self, row: Sequence[Any], holder: object = None, payload: Any = None
    ) -> Job:
        """A row as a job: without what its state does not have."""
        make: Any = _JobFields
        job = make(*row[:12], holder, *row[12:14], row[10])
        job.id = _from_column(job.id)
        job.payload = payload if row[1] is None else _payload_of(row[1])
        if job.state in ("ready", "delayed", "pending"):
            job.state, job.leased_at = "pending", None
        if job.last_error is not None:
            job.last_error = _from_column(job.last_error)
        job.max_retries = self._retries(row[10])
        return _job(job)

    def _retries(self, max_retries: int | None) -> int:
        return self._max_retries if max_retries is None else max_retries

    def compact(self) -> None:
        raise QueueError(
            f"queue {self.path!r}: there is nothing to compact, as a database reuses"
            " the space of jobs that are gone; VACUUM makes it smaller",
            path=self.path,
        )


# SQLite
# -----------------------------------------------------------------------------

# INDEXED BY, because the application may have run ANALYZE while the queue was
# empty: then SQLite takes any index for as good as another.  Nothing here is
# newer than SQLite 3.31.
_SQLITE_WORDS = {
    "QUEUES": "tiny_queue_queues",
    "JOBS": "tiny_queue_jobs",
    "PLACED": "JOBS NOT INDEXED",
    "READY": "JOBS INDEXED BY tiny_queue_ready",
    "DELAYED": "JOBS INDEXED BY tiny_queue_delayed",
    "INFLIGHT": "JOBS INDEXED BY tiny_queue_inflight",
    "DEAD": "JOBS INDEXED BY tiny_queue_dead",
    "OURS": "queue",
    "NOW": ":now",
    "CLOCK": ":clock",
    "LAST": "(SELECT max(place) FROM PLACED)",
    "NEXT": "LAST + 1",
    "UNLOCKED": ":fence",
    "FORMAT": "format",
    "THERE": "count(*) FROM sqlite_master WHERE name = 'tiny_queue_queues'",
    "GREATEST": "max",
    "SERIAL": "INTEGER PRIMARY KEY",
    "JSON": "TEXT",
    "SIZE": "SELECT (page_count - freelist_count) * page_size FROM"
    " pragma_page_count, pragma_freelist_count, pragma_page_size",
}
_SQLITE_PUT = f"""INSERT  -- a live id changes nothing
    INTO JOBS ({_SQL_NEW}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (queue, id) DO NOTHING"""
_SQLITE_NEXT_DUE = """SELECT  -- the head of an index
    run_at FROM DELAYED WHERE queue = :queue AND state = 'delayed'
    ORDER BY run_at LIMIT 1"""
_SQLITE_ANY_READY = """SELECT  -- a poll costs no write
    1 FROM READY WHERE queue = :queue AND state = 'ready' LIMIT 1"""
_SQLITE_DUE = """UPDATE  -- who is due joins by place, delayed once or not
    JOBS SET state = 'ready' WHERE place IN (
        SELECT place FROM DELAYED WHERE queue = :queue AND state = 'delayed'
        AND run_at <= NOW ORDER BY run_at LIMIT :n)"""
_SQLITE_HEADS = f"""SELECT  -- higher priority first, then by place
    {_SQL_ROW}, ({_SQLITE_NEXT_DUE}) FROM READY WHERE queue = :queue
    AND state = 'ready' AND priority > :above ORDER BY priority DESC, place LIMIT :n"""
_SQLITE_OWNERS = """SELECT  -- whose lives are to be looked at
    owner FROM INFLIGHT WHERE queue = :queue AND state = 'inflight'"""
_SQLITE_PAYLOADS = """SELECT  -- every byte that a reader would need
    place, payload FROM PLACED WHERE queue = :queue AND place > :after
    ORDER BY place LIMIT :n"""
# What the driver says, in part; and what to do.  By text, because error codes
# have names only from Python 3.11 on.
_SQLITE_BUSY = ("is locked", "locking protocol")
_SQLITE_ADVICE = {
    "is full": "free some space; nothing is lost",
    "readonly": "check the owner and mode of the file and its directory",
    "unable to open": "check that its directory is there and may be written",
    "not a database": "it is another kind of file, or encrypted: name another",
    "malformed": "restore a backup, or save what is left with sqlite3's .recover",
    "disk I/O": "the disk failed; see the system's log",
    "no such": "its tables were changed; restore them, or use another database",
}
_SQLITE_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "fuse.sshfs")
_SQLITE_INHERITED: list[Any] = []  # never closed: see before_fork()


def _sqlite_file(url: str) -> str:
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


def _ident_of(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


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


class _SqliteLock(_FileLock):
    """Carries the holders' proofs of life, beside the database: closing any
    descriptor of that would drop the locks that SQLite has on it."""

    def _lay_ballast(self, size: int) -> None:
        pass  # a database's space is not ours to keep


class _SqliteLink(_SqlLink):
    synchronous = ""  # as it was set last
    now = clock = 0.0  # of the transaction

    def __init__(self, connection: Any, cursor: Any, ident: object = None) -> None:
        self.connection, self.cursor = connection, cursor
        self.ident = ident  # of the file that is open


class _SqliteEngine(_SqlEngine):
    """sqlite:///FILE: the application's own database or another.

    One connection, for one thread at a time.
    """

    _words = _SQLITE_WORDS

    def __init__(self, url: str, name: str, **options: Any) -> None:
        from urllib.parse import quote

        cure = "Python's own sqlite3, which this Python was built without; use another"
        self._driver = _driver("sqlite3", cure)
        self._file = _sqlite_file(url)
        lock = f"{self._file}-tiny_queue.lock"
        self._lock = _SqliteLock(lock, options["lock_timeout"], True)
        super().__init__(f"sqlite:///{quote(self._file)}", name, **options)

    def _reset(self) -> None:
        super()._reset()
        self._link: _SqliteLink | None = None
        self._forking = False
        self._proof: _Holder | None = None
        self._idle = True  # the last take found nothing
        self._watch = _SqliteWatch(self._version)

    def forked(self) -> None:
        if self._link is not None:
            _SQLITE_INHERITED.append(self._link)  # closing it would drop locks
        self._lock.reset()
        self._reset()

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

    def __del__(self) -> None:
        if getattr(self, "_link", None) is not None and self._pid == os.getpid():
            self._disconnect()

    # Connection

    def _lend(self, lent: list[Any], deadline: float, make: bool) -> Any:
        """The connection, under the thread lock."""
        lock = self._lock
        if lock.mine():
            raise QueueError(
                f"queue {self.path!r} is in the middle of a call by this same thread;"
                " do not call it from a signal handler or finalizer"
            )
        if not lock.threads().acquire(timeout=lock.timeout):
            raise self._timed_out()
        lent.append(lock)
        self._check_open()
        ident = _ident_of(self._file)
        if self._link is not None and ident != self._link.ident:
            self._disconnect()  # what is open has no name any more
        if self._link is None and (make or ident is not None):
            self._connect("rwc" if make else "rw")
        return self._link

    def _give_back(self, lent: list[Any]) -> None:
        """End what an error or a Ctrl-C has left open, or all others would find
        the database locked; called twice, as one may end the first."""
        lock = self._lock
        try:
            if lent and (lock.mine() or lock.threads().acquire(timeout=lock.timeout)):
                self._roll_back()
                lent.clear()
        finally:
            if lock.mine():
                lock.threads().release()

    def _roll_back(self) -> None:
        link = self._link
        if link is not None and link.connection.in_transaction:
            try:
                link.execute("ROLLBACK")
            except self._driver.Error:
                self._disconnect()

    def _connect(self, mode: str) -> None:
        from urllib.parse import quote

        kind = _file_system(os.path.dirname(self._file))
        if kind in _SQLITE_REMOTE:
            raise QueueError(
                f"queue {self.path!r}: {kind} is a network file system, whose locks"
                " SQLite cannot trust; keep the database on a local disk",
                path=self._file,
            )
        root = "" if self._file.startswith("/") else "/"
        connection = self._driver.connect(
            f"file://{root}{quote(self._file)}?mode={mode}",
            timeout=0,  # we wait ourselves: SQLite sleeps up to 100 ms at a time
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        ident = _ident_of(self._file)
        self._link = _SqliteLink(connection, connection.cursor(), ident)

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        self._found = self._registered = False
        if link is not None:
            try:
                link.connection.close()
            except self._driver.Error as exc:
                _log().warning("closing %s: %s", self.path, exc)

    def _prepared(self, link: _SqlLink, make: bool) -> bool:
        """With a log (WAL) readers and the writer do not wait for each other."""
        if make and not self._registered:
            if not link.execute("PRAGMA page_count").fetchone()[0]:
                # A change writes a few pages whole: a tenth less work than 4096.
                link.execute("PRAGMA page_size = 2048")
            mode = link.execute("PRAGMA journal_mode").fetchone()[0]
            if mode != "wal":
                mode = link.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise QueueError(
                    f"queue {self.path!r}: SQLite refuses its WAL mode here (it stays"
                    f" {mode!r}); keep the database on a local disk",
                    path=self._file,
                )
        return super()._prepared(link, make)

    def _spelt(self, text: str) -> str:
        return text

    def _common(self, link: Any) -> dict[str, Any]:
        return {"queue": self._name, "now": link.now, "clock": link.clock}

    def _begin(self, link: Any, write: bool, block: bool) -> bool:
        """FULL syncs the log at each commit, NORMAL when it is full."""
        if link.connection.in_transaction:
            link.execute("ROLLBACK")  # after two Ctrl-C
        level = "FULL" if self._fsync and not link.lazy else "NORMAL"
        if write and link.synchronous != level:
            link.execute(f"PRAGMA synchronous = {level}")
            link.synchronous = level
        link.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        link.now, link.clock = time.time(), time.monotonic()
        return True

    def _judge(self, exc: Exception, link: Any) -> tuple[QueueError, bool, bool]:
        text = getattr(exc, "strerror", None) or str(exc)
        if any(part in text for part in _SQLITE_BUSY):
            return self._timed_out(), True, False
        advice = [what for part, what in _SQLITE_ADVICE.items() if part in text]
        error = QueueError(
            f"queue {self.path!r}: {text}; {[*advice, 'nothing was acknowledged'][0]}",
            errno=getattr(exc, "errno", None),
            path=self._file,
        )
        return error, False, False

    def _timed_out(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"database {self.path!r} stayed locked for {self._lock_timeout:g} s: a"
            " transaction is open there for writing; end it, or pass connection= if"
            " it is this thread's own (nothing is lost)",
            path=self.path,
            timeout=self._lock_timeout,
        )

    # The caller's transaction

    @contextlib.contextmanager
    def _joined(self, connection: Any) -> Iterator[_SqliteLink]:
        """The caller's connection, read as ours is whatever he has set."""
        driver = self._driver
        if not isinstance(connection, driver.Connection):
            raise TypeError(
                "connection: must be a sqlite3.Connection, not"
                f" {type(connection).__name__}; wrappers have one inside"
            )
        factory, connection.text_factory = connection.text_factory, str
        try:
            link = _SqliteLink(connection, driver.Cursor(connection))
            self._check_joins(link)
            yield link
        except driver.Error as exc:
            error, busy, _ = self._judge(exc, None)
            if not busy:
                raise error from exc
            raise LockTimeoutError(
                f"database {self.path!r} is locked: another transaction is open for"
                " writing, or has written since this one began to read; roll back and"
                " do it again, best from BEGIN IMMEDIATE on",
                path=self.path,
            ) from exc
        finally:
            connection.text_factory = factory

    def _check_joins(self, link: _SqliteLink) -> None:
        files = {row[1]: row[2] for row in link.execute("PRAGMA database_list")}
        ident = _ident_of(files["main"]) if files.get("main") else None
        if ident is None or ident != _ident_of(self._file):
            raise ValueError(
                f"connection: its main database is not that of queue {self.path!r};"
                " only within one database do two changes commit together"
            )
        automatic = getattr(link.connection, "autocommit", None) is True  # from 3.12 on
        automatic = automatic or link.connection.isolation_level is None
        if automatic and not link.in_transaction():
            raise ValueError(
                "connection: it is in autocommit mode with no transaction open, so"
                ' there is nothing to be part of; execute("BEGIN IMMEDIATE") first'
            )

    def _enter(self, link: Any) -> None:
        """Where its driver would begin a transaction before the caller's own
        INSERT, one is begun, and ends with an error."""
        link.undo = "ROLLBACK TO SAVEPOINT tiny_queue"
        if not link.in_transaction():
            link.undo = "ROLLBACK"
            link.execute("BEGIN IMMEDIATE")
        link.execute("SAVEPOINT tiny_queue")
        link.now, link.clock = time.time(), time.monotonic()
        self._create(link)

    # Puts, changes, takes

    def _insert(
        self, link: Any, new: Sequence[_New], ids: list[str], revs: list[int]
    ) -> dict[str, tuple[float, float]]:
        """None is inserted after one that is alive."""
        execute, sql, now = link.cursor.execute, self._sql(_SQLITE_PUT), link.now
        instants: dict[str, tuple[float, float]] = {}
        for item, id, rev in zip(new, ids, revs):
            due = now + item.delay if item.at is None else item.at
            run_at = due if due > now else 0.0
            state = "delayed" if run_at else "ready"
            created_at = now if item.created_at is None else item.created_at
            row = (
                self._name, id, rev, item.state if item.state == "dead" else state,
                item.attempts, item.crashes, item.priority, created_at, run_at,
                item.leased_at, item.max_retries, _to_column(item.error), item.text,
            )  # fmt: skip
            if not execute(sql, row).rowcount:
                break
            instants[id] = created_at, run_at
        return instants

    def _each(
        self, link: _SqlLink, changes: Sequence[_Change], owner: int = 0, row: str = ""
    ) -> list[Any]:
        rows, common = [], self._common(link)
        for change in changes:
            keys = {**common, **_sql_keys(change, owner)}
            made: Any = link.execute(self._sql(_sql_of(change)), keys).rowcount or None
            if made and row:
                made = link.execute(self._sql(_SQL_FIND), keys).fetchone()
            rows.append(made)
        return rows

    def take(
        self,
        n: int,
        seconds: float,
        held: bool,
        above: int = _LOWEST,
        changes: Sequence[_Change] = (),
    ) -> _Taken:
        events = self._watch.events
        if self._idle and not changes:  # look first: a poll of an idle queue
            look = (math.inf, None)  # takes no lock for writing
            due, version = self._run(self._peek, write=False, nothing=look)
            if due > 0:
                return _Taken([], [], (events, time.monotonic() + due, version))
        keys = {"n": n, "above": above, "seconds": seconds}
        made, jobs, due, version = self._run(
            self._take, changes, keys, held, lazy=not changes,
            nothing=([False] * len(changes), [], math.inf, None),
        )  # fmt: skip
        self._idle = not jobs
        return _Taken(made, jobs, (events, time.monotonic() + due, version))

    def _peek(self, link: Any) -> tuple[float, object]:
        """In how many seconds a job is due, and the database's version."""
        version, row = self._data_version(link), self._row(link, _SQLITE_NEXT_DUE, {})
        if self._row(link, _SQLITE_ANY_READY, {}):
            return 0.0, version
        return row[0] - link.now if row else math.inf, version

    def _take(
        self, link: Any, changes: Sequence[_Change], keys: dict[str, Any], held: bool
    ) -> tuple[list[bool], list[Job], float, object]:
        made = self._change(link, changes) if changes else []
        jobs: list[Job] = []
        while not jobs:
            rows = self._rows(link, _SQLITE_HEADS, keys)
            if not rows or (rows[0][-1] is not None and rows[0][-1] <= link.now):
                if self._do(link, _SQLITE_DUE, n=max(keys["n"], _SQL_DUE)).rowcount:
                    rows = self._rows(link, _SQLITE_HEADS, keys)
            if not rows:
                return made, [], *self._peek(link)
            jobs = self._lease(link, rows, keys["seconds"], self._holder(held))
        return made, jobs, 0.0, None

    def _lease(
        self, link: Any, rows: list[Any], seconds: float, holder: _Holder | None
    ) -> list[Job]:
        """The jobs; one whose payload was made no JSON by hand is dead."""
        jobs: list[Job] = []
        until, owner = link.now + seconds, holder.number if holder else 0
        common = {"seconds": seconds, "at": None, "owner": owner, **self._common(link)}
        for row in rows:
            id, text, _, attempts, priority, created_at, run_at = row[:7]
            error, limit, _, rev, crashes = row[9:14]
            keys = {**common, "id": id, "crashes": crashes, "error": error}
            try:
                payload, token, state = json.loads(text), self.fresh(), "inflight"
                job = _JobFields(
                    _from_column(id),
                    payload,
                    state,
                    attempts + 1,
                    priority,
                    created_at,
                    run_at,
                    link.now,
                    until,
                    error and _from_column(error),
                    self._retries(limit),
                    token,
                    holder,
                    rev + 1,
                    crashes,
                    limit,
                )
                jobs.append(_job(job))
                keys.update(attempts=attempts + 1, token=token)
            except (TypeError, ValueError, RecursionError) as exc:
                why, state = f"its payload is not JSON: {exc}", "dead"
                keys.update(state=state, attempts=attempts, error=why)
            link.execute(self._sql(_sql_change(state, cast(Any, type(None)))), keys)
        return jobs

    # Who is alive

    def _holder(self, held: bool) -> _Holder | None:
        """This object's proof of life, on the lock file that is there now."""
        lock, proof = self._lock, self._proof
        if not held:
            return None
        if proof is not None and proof.file.fd >= 0:
            if proof.ident == _ident_of(lock.path):
                return proof
        lock.acquire(True, lambda: self._closed)
        try:
            self._proof = proof = lock.new_holder()
            return proof
        finally:
            lock.release()

    def _expired(self, link: _SqlLink, keys: dict[str, Any]) -> list[Any]:
        """Ask the kernel which holders live; of ourselves we know it."""
        owners = {owner for (owner,) in self._rows(link, _SQLITE_OWNERS, {})} - {0}
        living = {self._proof.number} if self._proof else set()
        if owners - living:
            self._lock.acquire(False, lambda: self._closed)
            try:
                living |= {owner for owner in owners if self._lock.holds(owner)}
            finally:
                self._lock.release()
        numbers = ", ".join(map(str, sorted(living & owners)))
        sql = self._sql(_SQL_EXPIRED).replace("LIVING", numbers)
        return list(link.execute(sql, {**self._common(link), **keys}).fetchall())

    # Waiting, verifying, closing

    def _version(self) -> object:
        return self._run(self._data_version, write=False)

    def _data_version(self, link: Any) -> object:
        """What each commit changes, those of this connection included."""
        number = link.execute("PRAGMA data_version").fetchone()[0]
        return number, link.connection.total_changes, link.ident

    def wait(self, seen: object, seconds: float) -> None:
        if seen is None:
            seen = self._watch.events, math.inf, self._version()
        events, due, version = cast("tuple[int, float, object]", seen)
        seconds = min(seconds, max(0.0, due - time.monotonic()))
        self._watch.wait(events, cast(Any, (f"{self._file}-wal", version)), seconds)

    def verify(self) -> list[Damage]:
        """What SQLite finds wrong; then payloads that are not JSON, by the
        number of their row."""
        file, place, check = os.path.basename(self._file), 0, "PRAGMA quick_check"
        try:
            rows = self._run(self._rows, check, {}, write=False, nothing=[])
        except QueueError as exc:
            if "malformed" not in str(exc):
                raise
            rows = [(str(exc.__cause__),)]
        damage = [Damage(file, 0, text) for (text,) in rows if text != "ok"]
        while rows and not damage:
            args = _SQLITE_PAYLOADS, {"after": place, "n": _SQL_PAGE}
            rows = self._run(self._rows, *args, write=False, nothing=[])
            for place, text in rows:
                try:
                    json.loads(text)
                except (TypeError, ValueError) as exc:
                    damage.append(Damage(file, place, f"payload: {exc}"))
        return damage

    def close(self) -> None:
        if self._closed:
            return
        self._check_process()
        with self._lock.threads():
            self._closed = True
            if self._proof is not None:
                self._proof.file.close()
            self._disconnect()
            self._watch.close()
            self._lock.close()


def _at_fork(step: str) -> None:
    for engine in list(_ENGINES):
        if isinstance(engine, _SqliteEngine):
            getattr(engine, step)()


if hasattr(os, "register_at_fork"):  # in the child all engines are told anyway
    os.register_at_fork(
        before=lambda: _at_fork("before_fork"),
        after_in_parent=lambda: _at_fork("after_fork"),
    )


class _SqliteWatch(_Watch):
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
        notifier = self._notifier
        if notifier is not None and not self._lately:
            self._lately = notifier.wait(max(0.0, seconds))
        while self._lately and self._version() == seen:
            left = deadline - time.monotonic()
            if left <= 0:
                self._lately = notifier is None
                return False
            if notifier is None or pause < 1e-3:
                time.sleep(min(pause, left, _POLL))
                pause *= 1.5
            else:
                pause = 1e-4 if notifier.wait(min(pause, left)) else pause * 1.5
        return self._lately

    def _arm(self, log: str) -> bool:
        """Listen to the log that is there now; whether that is a change."""
        ident = _ident_of(log)
        if ident == self._ident:
            return False
        self._notifier, self._ident = None, ident
        if ident is not None:
            with contextlib.suppress(AttributeError, ImportError, OSError, TypeError):
                notifier = _Inotify()  # there may be none here, or none left
                notifier.arm(log, cast(Any, None))
                self._notifier = notifier
        return True


# PostgreSQL
# -----------------------------------------------------------------------------

# No statement leaves the planner a choice that grows with the backlog: its
# statistics may be of a queue that was empty.  Rows that a statement has locked
# are changed by their ctid, which no other way leads to.
_PG_QUIET = 0.01  # seconds between two NOTIFYs of one process
_PG_POLL = 0.25  # seconds between two looks without LISTEN
_PG_TOGETHER = 8  # changes that are one statement with a take
_PG_NOW = "extract(epoch FROM statement_timestamp())::float8"
_PG_WORDS = {  # beside those of the schema
    "NOW": _PG_NOW,
    "CLOCK": _PG_NOW,  # the only one that all hosts see
    "UNLOCKED": "(SELECT rev FROM JOBS WHERE queue = :queue AND id = :id"
    " AND rev = :fence FOR UPDATE SKIP LOCKED)",
    # It must not read a whole queue for the sake of the few that are inflight.
    "OURS": "queue || ''",
    "FORMAT": "coalesce((to_jsonb(queue) ->> 'format')::int, 1)",
    "THERE": "to_regclass('QUEUES') IS NOT NULL",
    "GREATEST": "greatest",
    "SERIAL": "bigserial",
    "TEXT": 'text COLLATE "C"',
    "JSON": "json",
    "LIVING": "SELECT objid::bigint FROM pg_catalog.pg_locks WHERE locktype ="
    " 'advisory' AND objsubid = 2 AND classid = :family::bigint::oid AND database ="
    " (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())",
    "TELL": "CASE WHEN :tell THEN pg_notify(:channel, '')::text END",
    "LAZY": "CASE WHEN :lazy THEN set_config('synchronous_commit', 'off', true) END",
}
_PG_TABLES = (
    *_SQL_TABLES,
    """CREATE INDEX  -- the order of waiting, where place is no row's number
    IF NOT EXISTS tiny_queue_pending ON JOBS (queue, place)
    WHERE state IN ('ready', 'delayed')""",
    """ALTER TABLE  -- many rows come and go
    JOBS SET (fillfactor = 80, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0)""",
)
_PG_MAKERS = """SELECT  -- of all who come first one makes the tables
    pg_advisory_xact_lock(:family, 0)"""
_PG_PUT = f"""WITH  -- in one round trip; a live id changes nothing
    put AS (
        INSERT INTO JOBS ({_SQL_NEW})
        SELECT :queue, id, rev, CASE WHEN state = 'dead' THEN 'dead'
            WHEN due > NOW THEN 'delayed' ELSE 'ready' END, coalesce(attempts, 0),
            coalesce(crashes, 0), coalesce(priority, 0), coalesce(created_at, NOW),
            CASE WHEN due > NOW THEN due ELSE 0 END, leased_at, max_retries, error,
            text::json
        FROM (SELECT *, coalesce(at, NOW + coalesce(delay, 0)) AS due
            FROM json_to_recordset(:jobs) AS new (id text, rev bigint, state text,
            attempts bigint, crashes bigint, priority bigint, created_at float8,
            leased_at float8, max_retries bigint, error text, at float8, delay float8,
            text text)) AS new
        ON CONFLICT (queue, id) DO NOTHING RETURNING id, created_at, run_at
    ) SELECT put.*, once.* FROM put, (SELECT TELL, LAZY OFFSET 0) AS once"""
_PG_SET_UP = """SELECT  -- nothing outlives lock_timeout
    set_config(name, coalesce(:settings::json ->> name, ''), false)
    FROM pg_catalog.pg_settings WHERE :settings::json ->> name IS NOT NULL"""
# What is due later is not scanned, what others lock is skipped, and where
# something delayed has become due it is made ready first.  No min(): the planner
# may read them all for it.  Who is locked stays `ready`: asking for that again
# would tempt the planner to scan them all.
_PG_TAKE = f"""next AS MATERIALIZED (
        SELECT run_at AS due FROM JOBS
        WHERE queue = :queue AND state = 'delayed' ORDER BY run_at LIMIT 1
    ), picked AS MATERIALIZED (
        SELECT ctid AS spot FROM JOBS
        WHERE queue = :queue AND state = 'ready' AND priority > :above
            AND (:promoted OR coalesce((SELECT due FROM next) > NOW, true))
        ORDER BY priority DESC, place LIMIT COUNT FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE JOBS AS job SET state = 'inflight', rev = rev + 1,
            attempts = attempts + 1, leased_at = NOW, renewed_at = NOW, clock = CLOCK,
            lease_until = NOW + :seconds, owner = :owner, token = :call || '-' || place
        FROM picked WHERE job.ctid = spot RETURNING place, {_SQL_ROW}
    ) SELECT (SELECT due FROM next) - NOW, ARRAY[MADE]::bigint[], TELL, LAZY, taken.*
    FROM (VALUES (1)) AS one LEFT JOIN taken ON true ORDER BY priority DESC, place"""
_PG_MINE = f"""SELECT  -- the leases of a take whose answer was lost
    NULL, NULL, NULL, NULL, place, {_SQL_ROW} FROM JOBS
    WHERE OURS = :queue AND state = 'inflight' AND starts_with(token, :call || '-')
    ORDER BY priority DESC, place"""
_PG_DUE = """WITH  -- who is due joins by place, boundedly many
    due AS MATERIALIZED (
        SELECT ctid AS spot FROM JOBS
        WHERE queue = :queue AND state = 'delayed' AND run_at <= NOW
        ORDER BY run_at LIMIT :n FOR UPDATE SKIP LOCKED
    ) UPDATE JOBS AS job SET state = 'ready' FROM due WHERE job.ctid = spot
    RETURNING LAZY"""
_PG_PEEK = """SELECT  -- did something come, and when will something be due?
    (SELECT true FROM JOBS WHERE queue = :queue AND state = 'ready'
        ORDER BY priority DESC, place LIMIT 1),
    (SELECT run_at FROM JOBS WHERE queue = :queue AND state = 'delayed'
        ORDER BY run_at LIMIT 1) - NOW"""
_PG_LOCK = """SELECT  -- the session's lock stands for its owner number
    pg_try_advisory_lock(:family, :number)"""
_PG_RENAME = """UPDATE  -- a new session answers for what still runs.  Not for all of
    -- its jobs: a crash may have forgotten that some were settled.
    JOBS SET rev = rev + 1, owner = :owner WHERE OURS = :queue AND state = 'inflight'
    AND owner = :old AND token = ANY(:tokens::text[]) RETURNING LAZY"""
_PG_WHERE = """SELECT  -- the same server, database and table, whatever the way there
    (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    (SELECT oid::bigint FROM pg_catalog.pg_database
        WHERE datname = current_database()), to_regclass('JOBS')::oid::bigint"""


@functools.lru_cache(256)
def _pg_take(changes: tuple[str, ...], one: bool) -> str:
    """A take that makes changes first: one statement, so one round trip."""
    parts, made = [], []
    for number, text in enumerate(changes):
        text = text.replace("UNLOCKED", _PG_WORDS["UNLOCKED"])
        text = re.sub(r":(?!queue\b)([a-z_]+)", rf":\1_{number}", text)
        parts.append(f"made_{number} AS ({text} RETURNING 1), ")
        made.append(f"(SELECT count(*) FROM made_{number})")
    text = _PG_TAKE.replace("MADE", ", ".join(made))
    return "WITH " + "".join(parts) + text.replace("COUNT", "1" if one else ":n")


# What a URL may say to the engine: how, in words, and else.  The rest is libpq's.
_PG_OPTIONS: dict[str, tuple[str, str, Any]] = {
    "schema": (
        "[A-Za-z_][A-Za-z0-9_]{0,62}",
        "1 to 63 letters, digits and _",
        "tiny_queue",
    ),
    "notify": ("[01]", "0 or 1", 1),  # 0: no session state, for PgBouncer
    "pool": ("[1-9][0-9]{0,3}", "a number from 1 to 9999", 4),  # connections at most
    "keepalive": ("[1-9][0-9]{0,3}", "a number from 1 to 9999", 10),  # s, for TCP
}
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
        "the role needs USAGE on the schema and its sequence, and SELECT, INSERT,"
        " UPDATE, DELETE on its tables; to make them, CREATE on the database",
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
_PG_INHERITED: list[Any] = []  # a parent's connections: never closed, never freed


def _split_url(url: str) -> tuple[str, str]:
    """What stands before the query, and the query; as libpq tells them apart."""
    base = cast("re.Match[str]", re.match(r"[^:]*://(?:[^/@]*@)?[^?]*", url))[0]
    return base, url[len(base) + 1 :]


def _masked(url: str) -> str:
    """A URL for people: without passwords."""
    base, query = _split_url(url)
    base = re.sub(r"(?s)(?<=://)([^:@/]*):(.*)@", r"\1:***@", base)
    return base + "?" * bool(query) + re.sub(r"(?i)(password=)[^&]*", r"\1***", query)


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
    ready = found[0][1]
    if ready & ~(select.POLLIN | select.POLLOUT):
        return events  # an error: reading or writing will say which
    return bool(ready & select.POLLIN) + 2 * bool(ready & select.POLLOUT)


class _PgLink(_SqlLink):
    """A connection in autocommit, whose waits end at a deadline; or room
    for one."""

    def __init__(self) -> None:
        self.pid, self.fd, self.deadline = os.getpid(), -1, math.inf

    def open(self, connection: Any) -> None:
        self.connection, self.cursor = connection, connection.cursor()
        self.fd = connection.fileno()
        connection.wait = self.wait  # psycopg's own has no end

    def wait(self, steps: Any, *_: object, **__: object) -> Any:
        """Run a protocol exchange; TimeoutError leaves it where it is."""
        try:
            events = next(steps)
            while True:
                ready = _poll(self.fd, events, self.deadline - time.monotonic())
                if ready:
                    events = steps.send(ready)
                elif time.monotonic() >= self.deadline:
                    raise TimeoutError("the server does not answer")
        except StopIteration as end:
            return end.value

    def execute_each(self, text: str, rows: list[Any]) -> list[Any]:
        """The first row that each execution returns, in one round trip."""
        self.cursor.executemany(text, rows, returning=True)
        found = [self.cursor.fetchone()]
        while self.cursor.nextset():
            found.append(self.cursor.fetchone())
        return found

    def in_transaction(self) -> bool:
        return self.connection.info.transaction_status in (2, 3)

    def closed(self) -> bool:
        return self.connection is None or bool(self.connection.closed)

    def usable(self) -> bool:
        """Whether nothing is in flight on it, nor has the server closed it."""
        if self.closed() or self.connection.info.transaction_status != 0:
            return False
        return not _poll(self.fd, 1, 0)

    def close(self) -> None:
        if self.pid == os.getpid() and not self.closed():
            self.connection.close()

    def abandon(self) -> None:
        """In a child: let go of the descriptor only.  The parent's session goes
        on, and must end when the parent does."""
        if not self.closed():
            os.close(self.fd)
            _PG_INHERITED.append(self.connection)

    def __del__(self) -> None:
        self.close()


class _PgSession:
    """Proof of life: a lock that the server drops with the connection.

    The connection also listens while somebody waits, and only then: messages
    that nobody reads would in the end keep the server from vacuuming.
    """

    def __init__(self, link: _PgLink, number: int) -> None:
        self.link, self.number, self.gone = link, number, False
        self.lock = threading.Lock()  # the connection is for one thread at a time
        self.told: list[Any] = []  # what it heard while it was asked something
        link.connection.add_notify_handler(self.told.append)

    def lost(self) -> bool:
        """Whether the server has ended it, as far as is known here."""
        if not self.gone and not self.lock.locked():
            with self.lock:
                self.gone = not self.link.usable()
        return self.gone

    def close(self) -> None:
        """End it at once, even under a thread that waits on it."""
        self.gone = True
        if not self.lock.locked():
            with self.lock, contextlib.suppress(Exception):
                if self.link.pid == os.getpid() and self.link.usable():
                    # That a connection ended the server sees a bit later.
                    self.link.deadline = time.monotonic() + 1.0
                    self.link.execute("SELECT pg_advisory_unlock_all()")
            self.link.close()
        elif self.link.pid == os.getpid() and not self.link.closed():
            import socket

            with socket.socket(fileno=os.dup(self.link.fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)

    def hear(self, seconds: float) -> bool:
        """Sleep until the server says something, or for so long."""
        pgconn = self.link.connection.pgconn
        if self.told:
            return True
        if not _poll(self.link.fd, 1, seconds):
            return False
        pgconn.consume_input()
        while pgconn.notifies():
            pass
        return True

    def __del__(self) -> None:
        self.link.close()


class _PgWatch(_Watch):
    def _listen(self, data: Any, seconds: float) -> bool:
        return bool(data(seconds))


class _PostgresEngine(_SqlEngine):
    """postgresql://...: a schema of choice on a server.

    A pool of connections; the last one used is the next one used.  Those lent
    are known weakly: one that a Ctrl-C has lost makes room again.
    """

    steady_leases = False  # the server's wall clock is the only one that all see
    SECONDS = 1.0
    LONGER = 6
    PAUSES = (0.01, 1.0)
    TABLES = _PG_TABLES

    def __init__(self, url: str, name: str, **options: Any) -> None:
        cure = 'psycopg 3: pip install "psycopg[binary]", or a checkout\'s [postgres]'
        self._driver = _driver("psycopg", cure)
        self._options, self._conninfo = self._read_url(url)
        schema = self._options["schema"]
        number = crc32(f"{schema} {name}".encode())
        self._channel = f"tiny_queue_{number:08x}"  # a clash costs idle looks only
        self._family = crc32(f"tiny_queue {schema}".encode()) & 0x7FFFFFFF
        jobs, place = (f'"{schema}".tiny_queue_jobs{end}' for end in ("", "_place_seq"))
        self._words = {
            **_PG_WORDS,
            **dict.fromkeys(("JOBS", "PLACED", "INFLIGHT", "DEAD"), jobs),
            "QUEUES": f'"{schema}".tiny_queue_queues',
            "LAST": f"""pg_sequence_last_value('{place}'::regclass)""",
            "NEXT": f"nextval('{place}')",
            "SIZE": f"SELECT pg_total_relation_size('{jobs}')",
        }
        super().__init__(url, name, **options)
        self.path = _masked(url)

    def _reset(self) -> None:
        super()._reset()
        self._room = threading.Condition()
        self._free: list[_PgLink] = []
        self._links: weakref.WeakSet[_PgLink] = weakref.WeakSet()
        self._session: _PgSession | None = None
        self._connecting = threading.RLock()  # one thread makes the session
        self._tokens: dict[str, None] = {}  # of unsettled leases, the oldest first
        self._told = -math.inf  # when the waiting were told
        self._watch = _PgWatch()
        self._guests: weakref.WeakSet[Any] = weakref.WeakSet()
        self._home: object = None

    def forked(self) -> None:
        for link in list(self._links):
            link.abandon()
        if self._session is not None:
            self._session.link.abandon()
        self._reset()

    def _read_url(self, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Our options with their defaults, and libpq's parameters."""
        from urllib.parse import unquote

        base, query = _split_url(url)
        found = re.findall(r"(?s)(?<=://)[^:@/]*:(.*)@", base)
        found += re.findall(r"(?i)password=([^&]*)", query)
        self._secrets = {*found, *map(unquote, found)} - {""}
        options: dict[str, Any] = {name: _PG_OPTIONS[name][2] for name in _PG_OPTIONS}
        rest = []
        for item in filter(None, query.split("&")):
            name, _, text = item.partition("=")
            if name not in _PG_OPTIONS:
                rest.append(item)
                continue
            pattern, what, default = _PG_OPTIONS[name]
            if not re.fullmatch(pattern, unquote(text)):
                raise ValueError(f"path: its option {name}: {text!r} is not {what}")
            options[name] = type(default)(unquote(text))
        try:
            info = self._driver.conninfo.conninfo_to_dict(
                base + "?" * bool(rest) + "&".join(rest)
            )
        except self._driver.Error as exc:
            # What it quotes may be of a password that is not percent-encoded.
            shown, reason = _masked(url), self._clean(str(exc))
            if "@" in url:
                shown, reason = f"{url.partition('://')[0]}://***", "as libpq says"
            raise ValueError(
                f"path: {shown!r} is no URL of PostgreSQL's ({reason}); it may have"
                f" libpq's options and {', '.join(_PG_OPTIONS)}"
            ) from None
        self._secrets |= {info[key] for key in info if "password" in key}
        return options, info

    def _clean(self, text: str) -> str:
        """What may be shown of the driver's words: one line, no password."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return " ".join(text.split())

    def _spelt(self, text: str) -> str:
        return re.sub(r"(?<!:):([a-z_0-9]+)", r"%(\1)s", text)

    def _common(self, link: _SqlLink) -> dict[str, Any]:
        """The commit of a guest is the caller's, and not ours to hasten."""
        return {
            "queue": self._name,
            "channel": self._channel,
            "family": self._family,
            "tell": bool(self._options["notify"] and (link.guest or link.tell)),
            "lazy": not link.guest and (link.lazy or not self._fsync),
        }

    # Connections

    def _lend(self, lent: list[Any], deadline: float, make: bool) -> Any:
        self._check_open()
        end = min(deadline, time.monotonic() + self._lock_timeout)
        size = self._options["pool"]
        with self._room:
            while not self._free and len(self._links) >= size:
                left = end - time.monotonic()
                if left <= 0:
                    raise LockTimeoutError(
                        f"queue {self.path!r}: all {size} connections of its"
                        f" pool were in use for {self._lock_timeout:g} s; give the URL"
                        " a larger ?pool=",
                        path=self.path,
                        timeout=self._lock_timeout,
                    )
                self._room.wait(min(left, 0.1))
            lent.append(self._free.pop() if self._free else _PgLink())
            self._links.add(lent[0])
        link = lent[0]
        if not link.usable():
            link.close()
            self._connect(link)
        link.deadline = deadline + 0.25  # the server's own timeouts say more
        return link

    def _give_back(self, lent: list[Any]) -> None:
        while lent:
            link = lent.pop()
            if not link.closed() and link.in_transaction():
                with contextlib.suppress(Exception):  # then it is not usable
                    link.execute("ROLLBACK")
            if not link.usable() or self._closed:
                link.close()
            with self._room:
                if link.closed():
                    self._links.discard(link)
                else:
                    self._free.append(link)
                self._room.notify()

    def _connect(self, link: _PgLink) -> None:
        """Give it a new connection that never waits beyond lock_timeout."""
        lasting, idle = max(self._lock_timeout, 1.0), self._options["keepalive"]
        hosts = str(self._conninfo.get("host", "")).count(",") + 1
        milliseconds = int(min(lasting * 1000, 2**31 - 1))
        notify = self._options["notify"]
        conninfo = {
            "connect_timeout": math.ceil(min(lasting, 1e6) / hosts),
            "client_encoding": "utf8",
            "fallback_application_name": f"tiny_queue {os.getpid()}",
            "keepalives_idle": idle,
            "keepalives_interval": max(1, idle // 3),
            "keepalives_count": 3,
            "tcp_user_timeout": milliseconds,
            "autocommit": True,
            "prepare_threshold": 5 if notify else None,  # a pooler mixes sessions up
            **self._conninfo,
        }
        try:
            link.open(self._driver.connect(**conninfo))
            link.deadline = time.monotonic() + lasting
            if notify:
                self._set_up(link, milliseconds, idle)
        except (self._driver.Error, OSError) as exc:
            link.close()
            raise _UnreachableError from exc

    def _set_up(self, link: _PgLink, milliseconds: int, idle: int) -> None:
        # Each statement is a few steps in an index.  The planner must not think
        # otherwise because its statistics were made while the queue was empty.
        ways = ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "sort")
        settings = {
            **{f"enable_{way}": "off" for way in ways},
            "jit": "off",
            "lock_timeout": milliseconds,
            "statement_timeout": min(6 * milliseconds, 2**31 - 1),
            "idle_in_transaction_session_timeout": milliseconds,
            "idle_session_timeout": 0,
            "default_transaction_isolation": "read committed",
            "tcp_keepalives_idle": idle,
            "tcp_keepalives_interval": max(1, idle // 3),
            "tcp_keepalives_count": 3,
            "tcp_user_timeout": 3000 * idle,
        }
        text = json.dumps({key: str(value) for key, value in settings.items()})
        self._do(link, _PG_SET_UP, settings=text)

    def _begin(self, link: _SqlLink, write: bool, block: bool) -> bool:
        if block:
            link.execute("BEGIN")
        return block

    def _judge(self, exc: Exception, link: Any) -> tuple[QueueError, bool, bool]:
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
            self._found = self._registered = False
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
        lost = isinstance(exc, OSError) or link.closed()
        return error, lost, lost

    def _create(self, link: _SqlLink) -> None:
        """One of all who come first makes them, the others wait for it."""
        if not self._row(link, _SQL_THERE, {})[0]:
            self._do(link, _PG_MAKERS)
            schema = f'"{self._options["schema"]}"'
            # The role may lack the right to, so only where there is none.
            missing = f"SELECT to_regnamespace('{schema}') IS NULL"
            if link.execute(missing).fetchone()[0]:
                link.execute(f"CREATE SCHEMA {schema}")
        super()._create(link)

    # The caller's transaction

    @contextlib.contextmanager
    def _joined(self, connection: Any) -> Iterator[_SqlLink]:
        """The caller's connection, read as ours is whatever he has set."""
        driver = self._driver
        if not isinstance(connection, driver.Connection):
            raise TypeError(
                "connection: must be a psycopg.Connection, not"
                f" {type(connection).__name__}"
            )
        status = connection.info.transaction_status
        name = status.name
        if status not in (0, 2) or (status == 0 and connection.autocommit):
            raise ValueError(
                f"connection: no transaction is open on it to be part of ({name}); use"
                " it inside `with connection.transaction():`"
            )
        if connection.info.encoding == "ascii":
            raise ValueError(
                "connection: its client_encoding is SQL_ASCII, which gives bytes for"
                " text; set it to UTF8"
            )
        link, types = _PgLink(), driver.types
        link.pid, link.guest, link.connection = 0, True, connection
        link.cursor = driver.Cursor(connection, row_factory=driver.rows.tuple_row)
        for name, loader in (
            ("float8", types.numeric.FloatLoader),
            ("int8", types.numeric.IntLoader),
            ("text", types.string.TextLoader),
        ):
            link.cursor.adapters.register_loader(name, loader)
        try:
            if connection not in self._guests:
                self._check_home(link)
                self._guests.add(connection)
            try:
                yield link
            finally:
                if connection.info.pipeline_status:  # wait for the last answer
                    link.execute("SELECT 1").fetchone()
        except driver.Error as exc:
            raise self._judge(exc, None)[0] from exc

    def _check_home(self, link: _SqlLink) -> None:
        """Its database must be ours, or nothing commits together."""
        where = self._row(link, _PG_WHERE, {})
        if where != self._home:  # or the tables were not there yet
            self._home = self._run(self._row, _PG_WHERE, {}, make=True)
            where = self._row(link, _PG_WHERE, {})
        if where != self._home:
            raise ValueError(
                f"connection: it is to another database than queue {self.path!r}; only"
                " the same one can commit both together"
            )

    def _enter(self, link: _SqlLink) -> None:
        link.undo = "ROLLBACK TO SAVEPOINT tiny_queue"
        link.execute("SAVEPOINT tiny_queue")

    # Puts, changes, takes

    def _run(
        self, body: Callable[..., Any], *args: Any, soon: bool = False, **options: Any
    ) -> Any:
        """Tell the waiting at most once in _PG_QUIET: a transaction with a NOTIFY
        commits under a lock that all of a cluster's share.

        What was committed within _PG_QUIET of a telling, which may have been
        another's, is found by those who wait when they look again after that
        time; what came later is told by itself.
        """
        run = super()._run
        if not (soon and self._options["notify"]) or options.get("connection"):
            return run(body, *args, **options)
        tell = self._may_tell()
        try:
            result = run(body, *args, soon=tell, **options)
        except BaseException:
            self._told = -math.inf  # nobody may have been told
            raise
        if not tell and self._may_tell():
            try:
                run(self._do, "SELECT TELL, LAZY", soon=True, lazy=True)
            except QueueError as exc:
                _log().warning("waiting workers not told of new jobs: %s", exc)
        return result

    def _may_tell(self) -> bool:
        now = time.monotonic()
        if now - self._told < _PG_QUIET:
            return False
        self._told = now
        return True

    def _insert(
        self, link: _SqlLink, new: Sequence[_New], ids: list[str], revs: list[int]
    ) -> dict[str, tuple[float, float]]:
        rows = []
        for item, id, rev in zip(new, ids, revs):
            given = zip(_New._field_defaults.items(), item[3:])
            row = {name: value for (name, usual), value in given if value != usual}
            rows.append({"id": id, "rev": rev, "text": item.text, **row})
            if item.error is not None:
                rows[-1]["error"] = _to_column(item.error)
        found = self._rows(link, _PG_PUT, {"jobs": json.dumps(rows)})
        return {id: (created_at, run_at) for id, created_at, run_at, *_ in found}

    def _each(
        self, link: Any, changes: Sequence[_Change], owner: int = 0, row: str = "1"
    ) -> list[Any]:
        rows, common = [], self._common(link)
        for text, group in itertools.groupby(changes, _sql_of):
            keys = [{**common, **_sql_keys(change, owner)} for change in group]
            sql = self._sql(f"{text} RETURNING {row}, TELL, LAZY")
            if len(keys) == 1:
                rows.append(link.execute(sql, keys[0]).fetchone())
            else:
                rows += link.execute_each(sql, keys)
        self._forget(changes)
        return rows

    def _forget(self, changes: Sequence[_Change]) -> None:
        """Once that is made: who failed to settle still runs, and tries again."""
        for change in changes:
            if isinstance(change.fence, str) and change.token != change.fence:
                self._tokens.pop(change.fence, None)

    def _remember(self, tokens: Sequence[str]) -> None:
        """Which leases are unsettled, or of many the last."""
        self._tokens.update(dict.fromkeys(tokens))
        while len(self._tokens) > 10_000:
            self._tokens.pop(next(iter(self._tokens)), None)

    def take(
        self,
        n: int,
        seconds: float,
        held: bool,
        above: int = _LOWEST,
        changes: Sequence[_Change] = (),
    ) -> _Taken:
        """Too many changes for one statement with it are made before it in the
        same transaction."""
        call, session = self.fresh(), self._holder(held)
        events, owner = self._watch.events, session.number if session else 0
        keys = {
            "n": n,
            "seconds": seconds,
            "owner": owner,
            "above": above,
            "call": call,
        }
        apart = len(changes) > _PG_TOGETHER
        made, rows, due = self._run(
            self._take, changes, keys, apart, lazy=not changes, block=apart,
            nothing=([False] * len(changes), [], math.inf),
        )  # fmt: skip
        if not rows and due <= 0:
            try:
                _, rows, due = self._run(self._take, (), keys, True, lazy=True)
            except QueueError:
                if not made:
                    raise  # else it is told at the next call
                return _Taken(made, [], None)
        jobs = [self._view(row[5:], session) for row in rows]
        self._note(jobs, session)
        return _Taken(made, jobs, (events, time.monotonic() + due))

    def _take(
        self, link: Any, changes: Sequence[_Change], keys: dict[str, Any], apart: bool
    ) -> tuple[list[bool], list[Any], float]:
        """The rows of what was taken, or in how many seconds something is due;
        without changes `apart` makes ready what has become due."""
        made: list[bool] = []
        promoted = apart and not changes
        if changes and (apart or link.doubt):
            made = [row is not None for row in self._each(link, changes)]
            changes = ()
        if link.doubt:  # an earlier try may have leased, and nobody knew
            rows = self._rows(link, _PG_MINE, {"call": keys["call"]})
            if rows:
                return made, rows, math.inf
        if promoted:
            self._do(link, _PG_DUE, n=max(keys["n"], _SQL_DUE))
        for number, change in enumerate(changes):
            keys = {
                **keys,
                **{f"{k}_{number}": v for k, v in _sql_keys(change).items()},
            }
        sql = _pg_take(tuple(map(_sql_of, changes)), keys["n"] == 1)
        rows = self._rows(link, sql, {**keys, "promoted": promoted})
        self._forget(changes)
        due, counts = rows[0][:2]
        due = math.inf if due is None else due
        rows = [row for row in rows if row[4] is not None]
        return made or list(map(bool, counts)), rows, due

    # Who is alive

    def _holder(self, held: bool) -> _PgSession | None:
        """This object's proof of life; a lost one is replaced, and its jobs that
        nobody has taken over are ours still.

        One thread connects; the others wait as long as it may take itself.
        """
        self._check_process()
        if not (held and self._options["notify"]):
            return None
        self._check_process()
        lock = self._connecting
        try:
            if not lock.acquire(timeout=max(self._lock_timeout, self.SECONDS)):
                raise LockTimeoutError(
                    f"queue {self.path!r}: another thread is still connecting; is the"
                    " server there?",
                    path=self.path,
                    timeout=self._lock_timeout,
                )
            old = self._session
            if old is None or old.lost():
                self._session = new = self._run(self._new_session, bare=True)
                if self._closed:  # meanwhile
                    new.close()
                if old is not None:
                    old.close()
                    _log().warning(
                        "queue %r: lost the connection that proves that owner %d lives;"
                        " it goes on as owner %d", self.path, old.number, new.number,
                    )  # fmt: skip
                    self._rename(old, [*self._tokens])
            return self._session
        finally:
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()

    def _new_session(self, _: object) -> _PgSession:
        """On a connection of its own: the one lent goes back to the pool."""
        link = _PgLink()
        self._connect(link)
        try:
            while True:
                number = random.getrandbits(30) + 1
                if self._row(link, _PG_LOCK, {"number": number})[0]:
                    return _PgSession(link, number)
        except (self._driver.Error, OSError) as exc:
            link.close()
            raise _UnreachableError from exc

    def _rename(self, old: _PgSession, tokens: list[str]) -> None:
        """Let the session of now answer for these leases."""
        owner = cast(_PgSession, self._session).number
        keys = {"old": old.number, "owner": owner, "tokens": tokens}
        self._run(lambda link: self._do(link, _PG_RENAME, **keys))

    def _note(self, jobs: Sequence[Job], holder: Any) -> None:
        tokens = [cast(str, job.token) for job in jobs]
        self._remember(tokens)
        if tokens and holder is not None and holder is not self._session:
            # Lost meanwhile: these came too late to be renamed with the others.
            self._rename(holder, tokens)

    # Waiting, verifying, closing

    def wait(self, seen: object, seconds: float) -> None:
        events, due = cast("tuple[int, float]", seen or (self._watch.events, math.inf))
        seconds = min(seconds, max(0.0, due - time.monotonic()))
        if seconds > 0:
            self._watch.wait(events, cast(Any, self._hear), seconds)
        else:
            time.sleep(1e-3)  # due, and another process is at it

    def _hear(self, seconds: float) -> bool:
        """Listen, look whether something came before that, then sleep."""
        session = self._holder(True)
        if session is None:
            time.sleep(min(seconds, _PG_POLL))
            return True
        with session.lock:
            try:
                return self._listen(session, seconds)
            except (self._driver.Error, OSError, QueueError):
                session.gone = True  # the next take says so and opens another
                return True
            finally:
                if self._closed:
                    session.link.close()

    def _listen(self, session: _PgSession, seconds: float) -> bool:
        """Look twice: at once, and when what was put without telling, as others
        were told just before, has been committed; see _run()."""
        link, end = session.link, time.monotonic() + seconds
        session.told.clear()

        def do(text: str) -> Any:
            link.deadline = time.monotonic() + max(self._lock_timeout, self.SECONDS)
            return self._do(link, text)

        try:
            do(f"LISTEN {self._channel}")
            for pause in (_PG_QUIET, seconds):
                ready, due = False, None
                if self._prepared(link, False):
                    ready, due = do(_PG_PEEK).fetchone()
                if ready:
                    time.sleep(1e-3)  # or it would be a busy loop around a locked job
                    return True
                left = min(
                    end - time.monotonic(), pause, math.inf if due is None else due
                )
                if session.hear(max(0.0, left)):
                    return True
            return False
        finally:
            do(f"UNLISTEN {self._channel}")

    def verify(self) -> list[Damage]:
        """Have the server read every job; its own checksums speak."""
        number = 0
        try:
            for _ in self.records(None):
                number += 1
        except QueueError as exc:
            if getattr(exc, "sqlstate", None) not in ("XX001", "XX002"):
                raise
            table = f"{self._options['schema']}.tiny_queue_jobs"
            return [Damage(table, number + 1, str(exc))]
        return []

    def close(self) -> None:
        self._check_process()
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        if self._session is not None:
            self._session.close()
        while self._free:
            self._free.pop().close()


_ENGINE_OF: dict[str, Callable[..., _Engine]] = {  # by URL scheme
    "sqlite": _SqliteEngine,
    "postgresql": _PostgresEngine,
    "postgres": _PostgresEngine,
}


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
    """Let the interpreter's own flush at exit meet no pipe or disk."""
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
        self._write(sys.stdout.write, f"{text}\n")

    def flush(self) -> None:
        self._write(sys.stdout.flush)

    def _write(self, write: Callable[..., object], *text: str) -> None:
        try:
            write(*text)
        except BrokenPipeError:
            raise
        except OSError as exc:
            _abandon_output()
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
        # The lease is for a process that ends before the job: a shell script.
        jobs = queue._get(1, args.timeout, args.lease, held=False)
        if not jobs:
            return _NOTHING
        try:
            out.json(_job_dict(jobs[0]))
            out.flush()
        except BaseException:  # nobody has seen it: it must not wait for its lease
            queue.release(jobs[0])
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
    else:
        out.line("moved {pending} waiting and {dead} dead jobs".format(**seen))
        if move.kept:
            out.line(f"{len(move.kept)} stay: the target has their ids")
        if left:
            out.line(f"{left} inflight stay until they are settled or reaped")
    return _REFUSED if move.kept else _OK


class _Move:
    """Moves jobs in batches: each is leased here under a token that names the
    move, put there as due in an hour, removed here, and made due there as it was.
    One that nobody can take within the hour, dead or delayed, needs no lease, and
    is put there as it is: it must not come back before its time.

    Each step is durable before the next.  Where a move dies the same command goes
    on: it knows leases by their token, and copies by created_at and payload.
    Copies of jobs that were removed already come due by themselves.

    Two at once lose nothing: who removes a job here has written the copy there
    since it leased the job, if only as it was; and who fails to remove a job
    drops only a copy that it put itself and that nobody has written since.
    """

    _SECONDS = 3600.0

    def __init__(self, source: Queue, target: Queue) -> None:
        self._here, self._there = source._engine, target._engine
        self._total = len(source) + source.stats().dead
        where = f"{target._engine.path}\n{target.name}"
        self._prefix = f"move-{crc32(where.encode('utf-8', 'surrogatepass')):08x}-"
        self.moved = {"pending": 0, "dead": 0}
        self.kept: set[str] = set()  # the target has other jobs of these ids

    def run(self) -> None:
        self._there.counts()  # if it cannot be read, nothing is leased here
        leased = self._here.records("inflight")
        begun = [job for job in leased if str(job.token).startswith(self._prefix)]
        self._move_all(begun, "pending")
        for state in self.moved:
            while self._move_all(self._here.records(state), state):
                pass  # until nothing was put meanwhile

    def _move_all(self, jobs: Iterable[Job], state: str) -> bool:
        jobs, before = iter(jobs), self.moved[state]
        while batch := list(itertools.islice(jobs, _BATCH)):
            self._move(batch, state)
            done = sum(self.moved.values())
            _progress(f"moved {done:,} of {self._total:,}")
        return self.moved[state] > before

    def _move(self, jobs: list[Job], state: str) -> None:
        jobs = self._lease(jobs)
        there = self._put(jobs, state)
        ours = [job for job in jobs if job.id in there]
        kept = [job for job in jobs if job.id not in there and job.token]
        changes = [_Change(job.id, job.token or job._rev, "done") for job in ours]
        changes += [self._as_it_was(job, job.token, state) for job in kept]
        made = dict(zip([job.id for job in ours], self._here.change(changes)))
        back = [_Change(id, there[id], "done") for id in there if not made[id]]
        if back:  # cancelled, requeued or reaped here, or another move has them
            self._there.change(back)
        gone = [job for job in ours if made[job.id]]
        if state == "pending":
            self._make_due(gone, there)
        self.moved[state] += len(gone)

    def _lease(self, jobs: list[Job]) -> list[Job]:
        leases = [
            self._as_it_was(job, job.token or job._rev, "inflight")._replace(
                seconds=self._SECONDS, token=f"{self._prefix}{self._here.fresh()}"
            )
            for job in jobs
            if not self._rests(job)
        ]
        leased = {job.id: job for job in self._here.renew(leases, False) if job}
        jobs = [job for job in jobs if job.id in leased or self._rests(job)]
        return [leased.get(job.id, job) for job in jobs]

    def _rests(self, job: Job) -> bool:
        return job.state == "dead" or job.run_at > time.time() + self._SECONDS

    def _make_due(self, jobs: list[Job], there: dict[str, int]) -> None:
        """Make the copies what the jobs were; those that another move wrote are
        looked up, and once more."""
        while jobs:
            changes = [self._as_it_was(job, there[job.id], "pending") for job in jobs]
            made = self._there.change(changes)
            jobs = [job for job, done in zip(jobs, made) if not done]
            found = [(job, self._there.find(job.id)) for job in jobs]
            left = [(j, copy) for j, copy in found if copy and _is_copy(copy, j)]
            jobs = [job for job, copy in left if not copy.token]
            there = {copy.id: copy._rev for _, copy in left}

    def _put(self, jobs: list[Job], state: str) -> dict[str, int]:
        """Copy jobs; return the copies' revs, 0 (no rev) for one found there."""
        there: dict[str, int] = {}
        new = {job.id: self._copy(job, state) for job in jobs}
        while new:
            try:
                copies = self._there.put([*new.values()], False)
                return {**there, **{copy.id: copy._rev for copy in copies}}
            except DuplicateJobError:
                for job in [job for job in jobs if job.id in new]:
                    found = self._there.find(job.id)
                    if found and not _is_copy(found, job):
                        self.kept.add(job.id)
                    elif found and (found.token or self._touch(found)):
                        there[job.id] = 0
                    else:
                        continue  # it changed at this moment: try again
                    del new[job.id]
        return there

    def _touch(self, copy: Job) -> bool:
        """Write a copy as it is, so that no other move drops it any more."""
        change = self._as_it_was(copy, copy._rev, copy.state)
        return self._there.change([change])[0]

    def _as_it_was(self, job: Job, fence: str | int | None, state: str) -> _Change:
        return _Change.of(job, fence, state)._replace(at=job.run_at)

    def _copy(self, job: Job, state: str) -> _New:
        delay, at = (self._SECONDS, None) if job.token else (0.0, job.run_at)
        new = job.id, job.payload, _encode(job.payload), job.priority
        was = state, job.attempts, job._crashes, job.created_at
        leased_at = None if job.token else job.leased_at
        return _New(*new, delay, at, job._limit, *was, leased_at, job.last_error)


def _is_copy(found: Job, job: Job) -> bool:
    return (found.created_at, found.payload) == (job.created_at, job.payload)


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
        self._pipe = _Fd.of(ours)  # which no forked process keeps

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


def _restore_signals(previous: dict[int, Any]) -> None:
    import signal

    for number, handler in previous.items():
        signal.signal(number, handler or signal.SIG_DFL)


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


if __name__ == "__main__":
    sys.exit(main())
