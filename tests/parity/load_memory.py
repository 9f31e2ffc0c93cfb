"""Measures the memory that loading a checkpoint takes, in a process of its own.

``python load_memory.py CHECKPOINT WARM_UP_CHECKPOINT``: one JSON object for each dtype, by Growth's fields.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from hand_built import load_tiny

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Growth:
    """By how many bytes the process grew at the most while it loaded."""

    dtype: str
    resident: int
    """All that was resident, mapped files included: the kernel's own record of the peak."""
    anonymous: int
    """Without mapped files, whose pages the kernel takes back when memory is short; sampled every two milliseconds."""


def main(checkpoint: Path, warm_up: Path) -> None:
    """Load the small checkpoint first, so that what is imported and set up once does not count."""
    for dtype in ("float32", "bfloat16"):
        load_tiny(warm_up, dtype=dtype)
        print(json.dumps(asdict(measure(checkpoint, dtype))))


def measure(checkpoint: Path, dtype: str) -> Growth:
    """Load `checkpoint` in `dtype`, and let go of it again."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    resident, anonymous = read_status("VmRSS"), read_status("RssAnon")
    samples = [anonymous]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(read_status("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        model = load_tiny(checkpoint, dtype=dtype)
    finally:
        done.set()
        watching.join()
    assert str(model.dtype) == f"torch.{dtype}"
    return Growth(dtype, read_status("VmHWM") - resident, max(samples) - anonymous)


def read_status(field: str) -> int:
    """A size of this process in bytes, as Linux tells it."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
