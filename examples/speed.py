"""Measure a queue on the disk of a directory: operations per second.

    python3 examples/speed.py [DIR]      (default: the current directory)

Each line is the best of three rounds. The disk decides what fsync costs, so look at
the ratios: what eight threads gain by sharing a sync, what a backlog costs.
"""

import os
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now


def rate(count, work):
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        work(count)
        best = max(best, count / (time.perf_counter() - start))
    return best


def put(queue):
    def work(count):
        for i in range(count):
            queue.put({"n": i})

    return work


def round_trip(queue):
    def work(count):
        for i in range(count):
            queue.put({"n": i})
            queue.task_done(queue.get())

    return work


def eight_threads(queue):
    def work(count):
        task = [count // 8]
        threads = [threading.Thread(target=put(queue), args=task) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def show(what, value, unit="/s"):
    print(f"{what:<48}{value:>12,.1f} {unit}", flush=True)


def main(folder="."):
    with tempfile.TemporaryDirectory(dir=folder) as top:
        quick = tq.Queue(os.path.join(top, "quick"), fsync=False)
        safe = tq.Queue(os.path.join(top, "safe"))
        show("put, fsync=False", rate(10_000, put(quick)))
        one, eight = rate(500, put(safe)), rate(4_000, eight_threads(safe))
        show("put, fsync", one)
        show("put, fsync, eight threads", eight)
        show("  that is, of one thread's rate", eight / one, "times")
        trip = {}
        for waiting in (100, 100_000):
            path = os.path.join(top, f"with-{waiting}")
            with tq.Queue(path, fsync=False) as queue:
                queue.put_many([{"n": i} for i in range(waiting)])
            with tq.Queue(path, fsync=False) as queue:
                start = time.perf_counter()
                queue.task_done(queue.get())
                opened = time.perf_counter() - start
                trip[waiting] = rate(5_000, round_trip(queue))
            show(f"put + get + task_done, {waiting:,} waiting", trip[waiting])
        show("  that is, of the rate with 100", trip[100_000] / trip[100], "times")
        show("open 100,000 waiting jobs and get the first", opened * 1e3, "ms")
        quick.close()
        safe.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
