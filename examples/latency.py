"""Measure how fast a put wakes a waiting process, and what waiting costs.

python3 examples/latency.py [SECONDS]      (default: 5 s of idling)
"""

import os
import statistics
import sys
import tempfile
import time
from multiprocessing import Process

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now

PUTS = 300


def wait_for_jobs(folder, idle):
    queue = tq.Queue(folder, fsync=False)
    delays = []
    while len(delays) < PUTS:
        job = queue.get(timeout=10.0)
        delays.append(time.monotonic() - job.payload)  # one clock for the whole host
        queue.task_done(job)
    delays.sort()
    print(f"wake-up, median          {statistics.median(delays) * 1e3:8.3f} ms")
    print(f"wake-up, 99th percentile {delays[PUTS * 99 // 100] * 1e3:8.3f} ms")
    used = time.process_time()
    queue.get(timeout=idle)
    share = (time.process_time() - used) / idle
    print(f"idle, of one core        {share * 100:8.3f} %")


def main(idle=5.0):
    with tempfile.TemporaryDirectory() as folder:
        waiter = Process(target=wait_for_jobs, args=[folder, idle])
        waiter.start()
        queue = tq.Queue(folder, fsync=False)
        for _ in range(PUTS):
            time.sleep(0.01)  # long enough for the other to sleep again
            queue.put(time.monotonic())
        waiter.join()
        queue.close()
    return waiter.exitcode


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2])))
