"""Answer a web request at once and do its slow work afterwards.

    python3 examples/web_handoff.py [DIR]

The request only puts a job, which is on disk when the client reads "202 Accepted":
a crash of the server loses no mail. A worker, here a thread and usually a process
of its own (`python3 -m tiny_queue work`), does it. Serves three requests and ends.
"""

import json
import os
import sys
import tempfile
import threading
import urllib.request
from wsgiref.simple_server import make_server

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)  # last: an installed tiny_queue comes before this checkout's
import tiny_queue as tq  # noqa: E402  because it is found only now


def make_app(queue):
    def app(environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        job = queue.put(json.loads(environ["wsgi.input"].read(length)))
        start_response("202 Accepted", [("Content-Type", "application/json")])
        return [json.dumps({"id": job.id}).encode()]

    return app


def ask(port, address, answers):  # a client
    body = json.dumps({"to": address}).encode()
    local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with local.open(f"http://127.0.0.1:{port}/", body, timeout=10) as answer:
        answers.append(json.load(answer)["id"])


def main(folder=None):
    with tempfile.TemporaryDirectory() as temporary:
        answers, sent = [], []
        with tq.Queue(folder or temporary, "mail") as queue:
            with make_server("127.0.0.1", 0, make_app(queue)) as server:
                for name in ("ada", "grace", "edsger"):
                    args = (server.server_port, f"{name}@example.com", answers)
                    client = threading.Thread(target=ask, args=args)
                    client.start()
                    server.handle_request()
                    client.join()
            print("accepted, on disk:", len(queue))
            handler = lambda job: sent.append(job.id)  # noqa: E731  stands for mail
            tq.Worker(queue, handler, stop_when_empty=True).run_forever()
            print("sent afterwards:", len(sent))
    return 0 if len(answers) == 3 and set(answers) <= set(sent) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
