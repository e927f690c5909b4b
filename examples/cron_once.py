"""Put the day's report from a cron job, once, however often cron runs it.

    python3 examples/cron_once.py [DIR]

The id names what is to be done, so a second run finds it there and adds nothing,
while it waits, runs or is dead. Once it is done the id is free again: what must
not be done twice on one day is for the handler to know. Without DIR it shows that.
"""

import datetime
import os
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now


def put_report(folder, day):  # what cron would call, perhaps on two machines' clocks
    with tq.Queue(folder, "reports") as queue:
        try:
            job = queue.put({"report": "sales", "day": day}, id=f"sales-{day}")
        except tq.DuplicateJobError as exc:
            print(f"{exc.id} is {exc.state} already: nothing added")
        else:
            print(f"{job.id} was put")
        return len(queue)


def demonstrate(folder):
    day = datetime.date(2030, 1, 31)
    following = day + datetime.timedelta(days=1)
    counts = [put_report(folder, f"{when}") for when in (day, day, following, day)]
    done = []
    with tq.Queue(folder, "reports") as queue:
        worker = tq.Worker(
            queue, lambda job: done.append(job.payload["day"]), stop_when_empty=True
        )
        worker.run_forever()
    print("reports made:", *done)
    return 0 if counts == [1, 1, 2, 2] and done == [f"{day}", f"{following}"] else 1


def main(folder=None):
    if folder:
        put_report(folder, f"{datetime.date.today()}")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return demonstrate(temporary)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
