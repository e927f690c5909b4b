"""Money between accounts: each transfer once, whenever its worker dies.

    python3 examples/transfer.py

A transfer and the end of its job commit together (`connection=`), so a worker that
is killed at any moment has done both or neither.
"""

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now

JOBS, ACCOUNTS = 200, 5
MOVE = "UPDATE accounts SET balance = balance + ?, moves = moves + 1 WHERE id = ?"


def work(file):
    queue = tq.Queue(f"sqlite:///{file}", max_retries=1000)
    conn = sqlite3.connect(file, timeout=60)
    while job := queue.get(timeout=2):
        source, target, amount = job.payload
        conn.execute(MOVE, (-amount, source))
        conn.execute(MOVE, (amount, target))
        queue.task_done(job, connection=conn)
        conn.commit()


def main(folder):
    file = os.path.join(folder, "bank.db")
    queue, conn, killed = tq.Queue(f"sqlite:///{file}"), sqlite3.connect(file), 0
    conn.execute("CREATE TABLE accounts (id, balance, moves)")
    rows = [(n, 1000, 0) for n in range(ACCOUNTS)]
    conn.executemany("INSERT INTO accounts VALUES (?, ?, ?)", rows)
    moves = [[*random.sample(range(ACCOUNTS), 2), 7] for _ in range(JOBS)]
    queue.put_many(moves, connection=conn)  # accounts and jobs, or none of them
    conn.commit()
    while queue.stats()[:3] != (0, 0, 0):
        with subprocess.Popen([sys.executable, __file__, file]) as worker:
            time.sleep(random.uniform(0.1, 0.4 + killed / 20))  # slow machines, too
            killed += worker.poll() is None
            worker.kill()
    ((total, moves),) = conn.execute("SELECT sum(balance), sum(moves) FROM accounts")
    print(f"{moves // 2} transfers once each, {killed} workers killed, sum {total}")
    return 0 if (total, moves) == (1000 * ACCOUNTS, 2 * JOBS) else 1


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(work(*sys.argv[1:]))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(temporary))
