"""A job that kills whoever takes it, and what becomes of it.

    python3 examples/poison.py

All from the command line: the poison is delivered once and retried once, each time
its worker dies, and then it is in the dead letter; the other jobs are done.
"""

import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

HANDLER = """
import os, signal

def handle(job):
    if job.payload == "poison":
        os.kill(os.getpid(), signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    with open("done.txt", "a") as file:
        print(job.payload, file=file)
"""


def tiny_queue(folder, *args, wanted=0):
    """Run one command there; return what it answers, a line each."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT]))
    print("$ tiny-queue", *args)
    command = [sys.executable, "-m", "tiny_queue", *args]
    env = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE)
    if ran.returncode != wanted:
        sys.exit(f"exit status {ran.returncode} instead of {wanted}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def main():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "handlers.py"), "w") as file:
            file.write(HANDLER)
        tiny_queue(folder, "put", "jobs", "--string", "poison", "--max-retries", "1")
        for name in ("bread", "butter", "jam"):
            tiny_queue(folder, "put", "jobs", "--string", name)
        tiny_queue(folder, "work", "jobs", "handlers:handle", "--stop-when-empty")
        (dead,) = tiny_queue(folder, "dead", "jobs")
        print(f"dead: {dead['payload']!r}, {dead['last_error']}")
        tiny_queue(folder, "purge", "jobs", "--state", "dead", "--yes")
        with open(os.path.join(folder, "done.txt")) as file:
            done = file.read().split()
    print("done:", *done)
    held = dead["attempts"] == 2 and sorted(done) == ["bread", "butter", "jam"]
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
