"""A stand-in for an engine, run as a process by the tests of supervision: ``fake_engine.py PORT BEHAVIOUR [PIDFILE]``.

Behaviours: serve · stubborn (ignores SIGTERM) · family (leaves grandchildren in sessions of their own) · crash (after half a
second of loading, with a traceback) · oom · hang (never healthy) · mute (healthy, never a token) · dies (of its first request)
· chatty (writes 8 MB before it serves) · echo (writes its arguments' file and an environment variable to the log).
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

port, behaviour = int(sys.argv[1]), sys.argv[2]
pid_file = sys.argv[3] if len(sys.argv) > 3 else None


def note_pid() -> None:
    if pid_file:
        with Path(pid_file).open("a") as file:
            file.write(f"{os.getpid()}\n")


def daemon() -> None:
    """Fork twice with a new session each time, so that neither the parent nor the process group leads to the grandchild."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid()
    time.sleep(600)
    os._exit(0)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(503 if behaviour == "hang" else 200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if behaviour == "mute":
            time.sleep(600)
        if behaviour == "dies":
            print("AssertionError: Synthetic acceptance not supported with CPU sampling", flush=True)
            os._exit(1)
        self.reply(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})


note_pid()
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour in ("family", "family_hang"):
    daemon()
    daemon()
if behaviour == "family_hang":
    behaviour = "hang"
if behaviour == "crash":
    time.sleep(0.5)
    raise RuntimeError("shape mismatch in layer 3")
if behaviour == "oom":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "chatty":
    print("the very first line", flush=True)
    for number in range(8000):
        print(f"{number:07d} " + "x" * 990)
    print("the very last line", flush=True)
if behaviour == "echo":
    print("file holds", Path(sys.argv[4]).read_text(), "and variable", os.environ["TEST_VARIABLE"], flush=True)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
