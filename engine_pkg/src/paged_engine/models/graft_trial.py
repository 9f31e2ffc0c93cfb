"""The trial before a graft: what a model's own modules compute over a small step, and their rotary angles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.kernels.self_check import trial_batch
from paged_engine.models.decoder_layer import NotRecognised, RotaryTable
from paged_engine.models.hook import attach, forward_flat
from paged_engine.models.load import LoadedModel

_TRIAL_LENGTHS = (40, 7)
_TABLE_CHUNK = 4096
"""Positions whose angles are computed at once."""


@dataclass
class Trace:
    """What the original model computed in the trial."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)
    """By layer, [num_tokens, hidden_size] in the model's dtype."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    angles: list[Any] = field(default_factory=list)
    """By layer, the (cosines, sines) it was given, or None."""
    rotary_calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    """Module, arguments and result of every call that made angles."""
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[num_tokens, vocab_size]."""

    def rotary_tables(self, max_seq_len: int) -> list[RotaryTable]:
        """By layer, the angles of all positions, from the module that made the layer's own.

        Raises:
            NotRecognised: a layer's angles come from elsewhere, or are laid out in an unknown way.
        """
        tables: dict[int, RotaryTable] = {}
        for call, (module, arguments, keywords, result) in enumerate(self.rotary_calls):
            tables[call] = _make_table(module, arguments, keywords, result, max_seq_len)
        by_layer = []
        for index, angles in enumerate(self.angles):
            made_by = [call for call, (*_, result) in enumerate(self.rotary_calls) if result is angles]
            if not made_by:
                raise NotRecognised(f"of layer {index}: its rotary angles come from no known module")
            by_layer.append(tables[made_by[0]])
        return by_layer


@contextmanager
def small_cache(model: LoadedModel, backend: CpuAttention) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the backend a few pages and a planned step of two prompts; yields its token ids and positions."""
    setup = backend.setup
    lengths = tuple(min(length, model.max_seq_len) for length in _TRIAL_LENGTHS)
    batch = trial_batch(lengths, lengths, setup.page_size)
    num_pages = int(batch.page_indices.max()) + 1
    for layer in range(len(model.layers)):
        backend.bind(layer, torch.zeros(num_pages, *backend.page_shape(layer), dtype=setup.cache_dtype))
    backend.plan(batch)
    rows = torch.arange(batch.num_tokens)
    try:
        yield rows * max(1, (model.vocab_size - 1) // batch.num_tokens), batch.positions
    finally:
        backend.caches.clear()


def trace(
    model: LoadedModel,
    backend: CpuAttention,
    layers: nn.ModuleList,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
) -> Trace:
    """Run the original model over the planned step and note what its layers see."""
    record = Trace(token_ids, positions)

    def after_layer(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        record.inputs.append(hidden[0])
        record.outputs.append((output[0] if isinstance(output, tuple) else output)[0])
        record.angles.append(keywords.get("position_embeddings"))

    def after_rotary(
        module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        record.rotary_calls.append((module, arguments, keywords, output))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(after_layer, with_kwargs=True).remove)
        for name, module in model.module.named_modules():
            if name.rpartition(".")[2].startswith("rotary_emb"):
                hooks.callback(module.register_forward_hook(after_rotary, with_kwargs=True).remove)
        record.logits = run_modules(model, backend, token_ids, positions)
    return record


def run_modules(
    model: LoadedModel, backend: CpuAttention, token_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """All logits [num_tokens, vocab_size] of the planned step, by the model's modules as they are."""
    attach(model.layers, backend)
    return forward_flat(model.module, token_ids, positions, torch.arange(len(token_ids)))


def _make_table(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any, max_seq_len: int
) -> RotaryTable:
    """Repeat a call that made angles, in float32 and for all positions."""
    owner = type(module).__name__
    if not (isinstance(result, tuple) and len(result) == 2 and result[0].dim() == 3):
        raise NotRecognised(f"{owner} gives no pair of cosines and sines")
    cosines, sines = [], []
    for start in range(0, max_seq_len, _TABLE_CHUNK):
        positions = torch.arange(start, min(start + _TABLE_CHUNK, max_seq_len))[None]

        def replaced(argument: Any, positions: torch.Tensor = positions) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            return (
                argument.new_empty(1, 1, 1, dtype=torch.float32)
                if argument.is_floating_point()
                else positions
            )

        angles = module(
            *(replaced(argument) for argument in arguments),
            **{name: replaced(argument) for name, argument in keywords.items()},
        )
        cosines.append(angles[0][0])
        sines.append(angles[1][0])
    cosine, sine = torch.cat(cosines), torch.cat(sines)
    half = cosine.shape[1] // 2
    if all(torch.equal(each[:, :half], each[:, half:]) for each in (cosine, sine)):
        return RotaryTable(cosine[:, :half].contiguous(), sine[:, :half].contiguous(), interleaved=False)
    if all(torch.equal(each[:, ::2], each[:, 1::2]) for each in (cosine, sine)):
        return RotaryTable(cosine[:, ::2].contiguous(), sine[:, ::2].contiguous(), interleaved=True)
    raise NotRecognised(f"{owner} lays its angles out in an unknown way")
