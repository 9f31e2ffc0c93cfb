"""How large the pool of pages becomes, and what is said when there is no room."""

from __future__ import annotations

import logging

import pytest
import torch

from paged_engine.attention.interface import AttentionSetup, AttentionSpec
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError
from paged_engine.execution import kv_cache
from paged_engine.execution.kv_cache import KVCache, cache_dtype, create_kv_cache

CPU = torch.device("cpu")
SPECS = tuple(
    AttentionSpec(4, num_kv_heads, head_dim, scale=1.0) for num_kv_heads, head_dim in ((2, 16), (1, 8))
)
TOKEN_BYTES = 2 * (2 * 16 + 1 * 8) * 4
"""Keys and values of both layers in float32."""


class Recorder(TorchAttention):
    """Keeps the tensors that it is given."""

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        super().__init__(AttentionSetup(SPECS, page_size, CPU, dtype, dtype))
        self.bound: dict[int, torch.Tensor] = {}

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        self.bound[layer] = cache


def create(
    monkeypatch: pytest.MonkeyPatch,
    *,
    memory: int = 1 << 40,
    max_seq_len: int = 100,
    dtype: torch.dtype = torch.float32,
    **parameters: object,
) -> tuple[KVCache, Recorder]:
    config = EngineConfig(
        model="m", **{"page_size": 16, "max_batch_size": 4, "max_num_tokens": 64, **parameters}
    )  # type: ignore[arg-type]
    backend = Recorder(config.page_size, dtype)
    monkeypatch.setattr(kv_cache, "available_cpu_memory", lambda: memory)
    cache = create_kv_cache(
        config, backend, len(SPECS), dtype, CPU, max_seq_len=max_seq_len, measure_step=lambda: 0
    )
    return cache, backend


def test_explicit_number_is_honoured_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, backend = create(monkeypatch, memory=0, num_pages=37)
    assert (cache.num_pages, cache.page_size, cache.num_tokens) == (37, 16, 592)
    assert cache.num_bytes == 592 * TOKEN_BYTES
    assert [tuple(tensor.shape) for tensor in backend.bound.values()] == [
        (37, 2, 16, 2, 16),
        (37, 2, 16, 1, 8),
    ]
    assert sum(tensor.nbytes for tensor in backend.bound.values()) == cache.num_bytes


def test_no_more_than_the_sequences_of_a_step_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = create(monkeypatch, max_batch_size=4, max_seq_len=100)
    assert cache.num_pages == 4 * 7
    assert cache.max_seq_len == 100


@pytest.mark.parametrize(("fraction", "share"), [(None, 0.5), ("0.25", 0.25), ("1", 1.0)])
def test_share_of_the_memory(monkeypatch: pytest.MonkeyPatch, fraction: str | None, share: float) -> None:
    memory = 40 * 16 * TOKEN_BYTES
    cache, _ = create(monkeypatch, memory=memory, max_seq_len=10_000, kv_cache_memory_fraction=fraction)
    assert cache.num_pages == int(40 * share)


def test_smaller_dtype_gets_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 40 * 16 * TOKEN_BYTES
    cache, backend = create(monkeypatch, memory=memory, max_seq_len=10_000, dtype=torch.bfloat16)
    assert cache.num_pages == 40
    assert backend.bound[0].dtype == torch.bfloat16


def test_pages_in_int8_have_room_for_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte for each element, and for each token four more in each head's keys and in its values."""
    memory = 2 * 40 * 16 * 2 * (2 * (16 + 4) + 1 * (8 + 4))
    cache, backend = create(monkeypatch, memory=memory, max_seq_len=10_000, dtype=torch.int8)
    assert cache.num_pages == 40
    assert cache.num_bytes == sum(tensor.nbytes for tensor in backend.bound.values()) == memory // 2


def test_pool_smaller_than_the_longest_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cache, _ = create(monkeypatch, num_pages=3, max_seq_len=100)
    assert cache.max_seq_len == 48
    assert "from 100 to 48" in caplog.text


@pytest.mark.parametrize(
    "parameters", [{"memory": 0}, {"memory": 16 * TOKEN_BYTES}, {"num_pages": 1, "page_size": 1}], ids=str
)
def test_no_room_for_a_single_sequence(monkeypatch: pytest.MonkeyPatch, parameters: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"at least 2 tokens, but there is room for \d pages of"):
        create(monkeypatch, **parameters)  # type: ignore[arg-type]


def test_more_than_the_machine_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="lower num_pages"):
        create(monkeypatch, num_pages=2**31 - 1, page_size=1024, max_num_tokens=2048)


def test_figures_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = create(monkeypatch, num_pages=1024)
    assert str(cache) == "1024 pages of 16 tokens = 16384 tokens, 5.0 MiB"


def test_dtype_of_the_pages() -> None:
    assert cache_dtype(EngineConfig(model="m"), torch.float16) == torch.float16
    for name in ("bfloat16", "float8_e4m3fn", "int8"):
        config = EngineConfig(model="m", kv_cache_dtype=name)
        assert cache_dtype(config, torch.float32) == getattr(torch, name)
