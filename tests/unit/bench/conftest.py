"""What benchmarks share is tested; the modules lie beside the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCHMARKS))
