"""Hash every file under a directory with four workers, and kill one of them.

    python3 examples/quickstart.py [DIR]

Each regular file under DIR is a job, and so is one that is not there. Without DIR
it is this repository, less .git and __pycache__. Exits with 0 if each check held.
"""

import hashlib
import os
import sys
import tempfile
import time
from multiprocessing import Process

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now


def open_queues(folder):  # each process opens its own; what they share is the folder
    # fsync=False outlives a kill but not a power cut: enough for a temporary folder.
    options = {"fsync": False, "lease_timeout": 3600, "backoff": lambda attempt: 0.1}
    return [tq.Queue(folder, name, **options) for name in ("jobs", "results", "doomed")]


def work(folder):  # a worker process: take jobs until none has come for a second
    jobs, results, doomed = open_queues(folder)
    while job := jobs.get(timeout=1.0):
        if "deadly" in job.payload:
            doomed.put({"pid": os.getpid(), "delivered": time.monotonic()})
            if job.attempts == 1:
                if sys.platform != "linux":  # where a death may show by the lease's end
                    jobs.extend(job, 0.5)
                time.sleep(60)  # SIGKILL comes here, in the middle of the job
        digest, error = sha256(job.payload["path"])
        if digest:  # kept first: a death before task_done repeats a job, loses none
            results.put([job.payload["path"], digest])
        jobs.task_done(job, success=bool(digest), error=error or None)


def sha256(path):  # the digest, or the reason why there is none
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as exc:
        return "", str(exc)
    return digest.hexdigest(), ""


def main(top=None):
    walk = os.walk(os.path.abspath(top or ROOT), onerror=print)
    found = sorted(os.path.join(at, name) for at, _, names in walk for name in names)
    files = [p for p in found if os.path.isfile(p) and not os.path.islink(p)]
    if top is None:
        files = [p for p in files if not {".git", "__pycache__"} & {*p.split(os.sep)}]
    if not files:
        sys.exit(f"there is no regular file under {top or ROOT!r}")
    with tempfile.TemporaryDirectory() as folder:
        jobs, results, doomed = open_queues(folder)
        missing = os.path.join(folder, "missing")
        jobs.put({"path": missing}, max_retries=1)
        jobs.put({"path": files[0], "deadly": True}, priority=1)
        jobs.put_many([{"path": path} for path in files[1:]])
        team = [Process(target=work, args=[folder], daemon=True) for _ in range(5)]
        for worker in team[:4]:
            worker.start()
        victim, killed = doomed.get(timeout=60).payload["pid"], time.monotonic()
        next(worker for worker in team if worker.pid == victim).kill()
        team[4].start()  # in its place, as a supervisor would
        late = doomed.get(timeout=60).payload["delivered"] - killed
        tick, end = (0.1, "\r") if sys.stdout.isatty() else (0.5, "\n")
        left, deadline = 1, killed + 300 + len(files)
        while left and time.monotonic() < deadline:
            left = (now := jobs.stats()).pending + now.inflight
            print(f"hashed {len(results)} of {len(files)}", end=end, flush=True)
            time.sleep(tick)
        for worker in team:
            worker.join(10)  # each ends by itself, a second after the last job
        with jobs, results, doomed:  # closed before the folder goes
            dead = [(j.payload["path"], "", j.last_error) for j in jobs.dead_letter()]
            seen = [(*result.payload, "") for result in results.jobs()] + dead
        want = [(path, *sha256(path)) for path in [missing, *files]]
    print("what is in the dead letter:", *(ascii(why) for *_, why in dead), sep="\n  ")
    print("what is not as expected:", ascii(sorted({*seen} ^ {*want})))
    checks = {
        f"{len(files)} files were handled, each once": sorted(seen) == sorted(want),
        f"a killed worker's job came again after {late:.3f} s": 0 <= late <= 1,
        "the missing file is in the dead letter with its reason": want[0] in dead,
    }
    for text, held in checks.items():
        print("ok  " if held else "FAIL", text)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
