"""A stand-in for tritonserver: quick to start, and as stubborn or broken as a test wants it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAKE_SERVER = """
import http.server, json, os, re, signal, subprocess, sys, time

options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
config = open(options["model-repository"] + "/llm/config.pbtxt").read()
print("I0101 starting with", sys.argv[1:], flush=True)
if "fail-at-start" in config:
    reason = "TritonModelException: the disk is upside down\\\\n\\\\nAt:\\\\n  model.py(36): initialize"
    print('I0101 pb_stub.cc:366] "Failed to initialize Python stub: ' + reason + '"')
    print('E0101 backend_model.cc:692] "ERROR: Failed to create instance: ' + reason + '"')
    print('E0101 model_lifecycle.cc:642] "failed to load \\'llm\\' version 1: Internal: ' + reason + '"')
    print("error: creating server: Internal - failed to load all models", flush=True)
    sys.exit(1)
stub = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print("stub", stub.pid, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(400 if "never-ready" in config else 200)
        self.end_headers()
        if self.path.endswith("/config"):
            parameters = re.findall(r'key: "(\\w+)"\\s+value \\{\\s+string_value: "([^"]*)"', config)
            values = {key: {"string_value": value} for key, value in parameters}
            self.wfile.write(json.dumps({"parameters": values}).encode())

    def log_message(self, *arguments):
        pass


def stop(number, frame):
    if "stubborn" in config:
        return
    if "leaves-its-stub" not in config:
        stub.kill()
    print("finalized", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
server = http.server.HTTPServer((options["http-address"], int(options["http-port"])), Handler)
if "ends-by-itself" in config:
    server.handle_request()
    server.handle_request()
    print("error: out of everything", flush=True)
    os._exit(7)
server.serve_forever()
"""


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in on the PATH; returns a model repository, whose parameter `mood` says how it behaves."""
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    script = tmp_path / "fake_server.py"
    script.write_text(FAKE_SERVER)
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')  # a path may have spaces
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=":")
    model = tmp_path / "repository" / "llm"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").touch()
    (model / "config.pbtxt").write_text('name: "llm"\nbackend: "python"\n')
    return model.parent
