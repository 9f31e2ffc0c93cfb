"""FlashInfer's fused operations in a model's modules, against the modules themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model

from paged_engine.config import EngineConfig
from paged_engine.models import fuse
from paged_engine.models.fuse import fuse_modules
from paged_engine.models.fused_ops import FusedLayer
from paged_engine.models.load import load_model

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama", (5, 2, 2, 2)),
        ("qwen2", (5, 2, 2, 2)),
        ("qwen3", (9, 2, 2, 2)),
        ("gemma", (5, 2, 2, 2)),
        ("gemma2", (9, 2, 2, 0)),
        ("phi3", (5, 2, 2, 2)),
        ("gpt_oss", (5, 0, 2, 2)),
        ("glm", (5, 2, 2, 2)),
    ],
)
def test_every_operation_passes_its_trial(
    device: torch.device, name: str, counts: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    import flashinfer

    folder = save_tiny_model(name, tmp_path, overrides=SIZES)
    model = load_model(EngineConfig(model=str(folder), dtype=dtype, device=str(device)), device)
    with torch.cuda.device(device):
        fused = fuse_modules(model, flashinfer)
    kinds = ("norms", "gated MLPs", "attention modules", "residual sums")
    assert tuple(fused.get(kind, 0) for kind in kinds) == counts
    forwards = [module.forward for module in model.module.modules()]
    assert all(each.next_norm is not None for each in forwards if isinstance(each, FusedLayer)), "joined"


def test_the_trial_is_strict(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding takes less than half of what it tolerates: what is found to differ is no rounding."""
    import flashinfer

    monkeypatch.setattr(fuse, "_TOLERANCE", {torch.bfloat16: 0.015})
    folder = save_tiny_model("llama", tmp_path, overrides=SIZES)
    model = load_model(EngineConfig(model=str(folder), dtype="bfloat16", device=str(device)), device)
    with torch.cuda.device(device):
        assert sum(fuse_modules(model, flashinfer).values()) == 11
