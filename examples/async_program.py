"""Use the queue from asyncio: its calls block for a moment, so threads make them.

    python3 examples/async_program.py [DIR]

`asyncio.to_thread` keeps the event loop free while a put waits for the disk or a
get for a job. The loop's heart beats on meanwhile, and the jobs overlap.
"""

import asyncio
import os
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now


async def produce(queue, count):
    for n in range(count):
        await asyncio.to_thread(queue.put, {"n": n})


async def consume(queue, done):
    while job := await asyncio.to_thread(queue.get, 0.5):
        await asyncio.sleep(0.1)  # stands for an await on the network
        done.append(job.payload["n"])
        await asyncio.to_thread(queue.task_done, job)


async def beat(beats):
    while True:
        beats.append(time.monotonic())
        await asyncio.sleep(0.01)


async def run(folder):
    done, beats, start = [], [], time.monotonic()
    with tq.Queue(folder) as queue:
        heart = asyncio.create_task(beat(beats))
        consumers = [consume(queue, done) for _ in range(4)]
        await asyncio.gather(produce(queue, 20), *consumers)
        heart.cancel()
        left = len(queue)
    print(f"{len(done)} jobs of 0.1 s in {time.monotonic() - start:.1f} s,", end=" ")
    print(f"the loop's heart beat {len(beats)} times")
    return 0 if sorted(done) == list(range(20)) and not left else 1


def main(folder=None):
    with tempfile.TemporaryDirectory() as temporary:
        return asyncio.run(run(folder or temporary))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
