"""Loading takes no more memory than the checkpoint and one of its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import load_memory
from tiny_models import make_tiny_model, save_tiny_model, tiny_config

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
"""Of a llama of about 200 MB in float32."""
MARGIN = 24 * 2**20
"""For what is not weights: tokens of the trial runs, tables of names, the allocator's leftovers."""


def test_peak_memory_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    checkpoint, small = tmp_path / "large", save_tiny_model("llama", tmp_path / "small")
    make_tiny_model(tiny_config("llama", **SIZES)).save_pretrained(checkpoint, max_shard_size="20MB")
    shards = [file.stat().st_size for file in checkpoint.glob("*.safetensors")]
    assert len(shards) > 8
    assert 180e6 < sum(shards) < 250e6
    run = subprocess.run(
        [sys.executable, load_memory.__file__, str(checkpoint), str(small)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    own, other = (load_memory.Growth(**json.loads(line)) for line in run.stdout.splitlines())
    assert (own.dtype, other.dtype) == ("float32", "bfloat16")
    assert sum(shards) / 2 < own.resident < sum(shards) + max(shards) + MARGIN
    assert own.anonymous < max(shards) + MARGIN  # the weights are the mapped files themselves
    # In another dtype the files are mapped while they are read; what has to be in memory is the converted weights.
    assert sum(shards) / 4 < other.anonymous < sum(shards) / 2 + max(shards) + MARGIN
    assert other.resident < sum(shards) * 1.5 + max(shards) + MARGIN
