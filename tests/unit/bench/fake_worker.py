"""Stands for worker.py where its conversation is tested: the kind says how it behaves, the options are not used."""

from __future__ import annotations

import json
import os
import sys
import time


def main(kind: str) -> None:
    if kind == "does not start":
        sys.exit("the model is missing")
    print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens = [prompt[: request["max_tokens"]] for prompt in request["prompts"]]
        if kind == "dies":
            sys.exit("out of memory")
        if kind == "reports an error":
            print(json.dumps({"error": "ValueError: bad prompt"}), flush=True)
        elif kind == "falls silent":
            time.sleep(600)
        elif kind == "loses tokens":
            print(json.dumps({"seconds": 0.5, "tokens": [each[:-1] for each in tokens]}), flush=True)
        else:
            print(json.dumps({"seconds": 0.5, "tokens": tokens, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
