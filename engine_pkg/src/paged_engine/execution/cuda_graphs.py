"""Decode steps as CUDA graphs: what a step launches on the GPU is recorded once per batch size and replayed with one call.

A decode step of a large model is hundreds of short kernels; launched one by one from Python they leave the GPU waiting. A
graph has fixed addresses and shapes. So there is one for each size of a ladder, a step is padded to the next size with
sequences of one token in a page that belongs to nobody, and everything that differs from step to step is copied into
fixed buffers before the replay.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from paged_engine.attention.interface import AttentionBackend
from paged_engine.errors import ConfigurationError
from paged_engine.execution.batch import Batch
from paged_engine.models.hook import forward_flat
from paged_engine.models.load import LoadedModel

_log = logging.getLogger(__name__)

_MAX_PAGES = 1 << 22
"""Page numbers that a captured step may hold; a step of more is run without a graph."""
_PROGRESS_SECONDS = 5


@runtime_checkable
class CapturableAttention(Protocol):
    """What an attention backend offers besides AttentionBackend if its decode steps can be captured."""

    max_captured_batch_size: int

    def allocate_for_capture(self, max_batch_size: int, max_num_pages: int) -> None:
        """Make the buffers that captured steps read. Graphs captured before are void after it."""

    def plan_captured(self, batch: Batch) -> None:
        """Plan a decode step of exactly as many sequences as its graph; what differs by step must reach device memory."""


class Recorder(Protocol):
    """Records what a function launches. The one that counts is CudaRecorder."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function` and return what repeats its launches, on the same memory, without running any Python of it."""


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """See Recorder. The function runs once before, outside of the graph, for what happens at a first run only."""
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        return graph.replay


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(token_ids, positions, rows whose logits are wanted) -> logits, as hook.forward_flat does it for one model."""


class DecodeGraphs:
    """The recorded decode steps of one model."""

    def __init__(
        self,
        forward: Forward,
        attention: CapturableAttention,
        make_recorder: Callable[[], Recorder],
        *,
        device: torch.device,
        vocab_size: int,
        page_size: int,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        """Allocate the fixed buffers; `capture` does the rest.

        Args:
            forward: the model.
            attention: its backend.
            make_recorder: makes what captures, anew for each use.
            device: of the model.
            vocab_size: width of its logits.
            page_size: tokens of a page.
            max_batch_size: sequences of the largest step there is; the backend may capture up to fewer.
            max_seq_len: tokens of the longest sequence there is.
        """
        self.sizes = batch_sizes(min(max_batch_size, attention.max_captured_batch_size))
        self._forward = forward
        self._attention = attention
        self._make_recorder = make_recorder
        self._device = device
        self._page_size = page_size
        self._replays: dict[int, Callable[[], None]] = {}
        largest = self.sizes[-1]
        self._max_pages = min(largest * -(-max_seq_len // page_size), _MAX_PAGES)
        self._token_ids, self._positions, self._slots = torch.zeros(
            3, largest, dtype=torch.int64, device=device
        )
        self._rows = torch.arange(largest, device=device)
        self._logits = torch.zeros(largest, vocab_size, dtype=torch.float32, device=device)
        self._padding = _padding(largest, 0, page_size, device)
        attention.allocate_for_capture(largest, self._max_pages)

    def measure(self) -> int:
        """Bytes of GPU memory that `capture` is going to take, by capturing the two largest sizes.

        All share the memory of the largest; what the second adds, each other one adds. Page 0 of the cache is written.
        """
        taken = [0]
        recorder = self._make_recorder()
        for size in self.sizes[:-3:-1]:
            before, _ = torch.cuda.mem_get_info(self._device)
            if not self._capture_size(size, recorder):
                return 0
            after, _ = torch.cuda.mem_get_info(self._device)
            taken.append(max(0, before - after))
        self._replays.clear()
        torch.cuda.empty_cache()
        return taken[1] + taken[-1] * (len(self.sizes) - 1)

    def capture(self, dummy_page: int) -> None:
        """Record all sizes, the largest first, so that the smaller ones find room in its memory.

        A model that cannot be recorded (its code waits for the GPU half-way) is run without graphs, with a warning.

        Args:
            dummy_page: a page of the cache that no sequence is ever given; padding writes there.
        """
        if not self.sizes:  # measure() has found that it cannot be done
            return
        self._padding = _padding(self.sizes[-1], dummy_page, self._page_size, self._device)
        recorder = self._make_recorder()
        started = reported = time.monotonic()
        for count, size in enumerate(reversed(self.sizes), start=1):
            if not self._capture_size(size, recorder):
                return
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                _log.info("captured %d of %d CUDA graphs", count, len(self.sizes))
        _log.info("captured %d CUDA graphs in %.1f s", len(self._replays), time.monotonic() - started)

    def covers(self, batch: Batch) -> bool:
        """Whether `batch` is a decode step that a graph was captured for."""
        if batch.max_query_len != 1 or not self._replays or batch.num_sequences > self.sizes[-1]:
            return False
        return (
            len(batch.page_indices) + self._size_for(batch.num_sequences) - batch.num_sequences
            <= self._max_pages
        )

    @torch.inference_mode()
    def replay(self, batch: Batch) -> torch.Tensor:
        """Compute a step that `covers` is true for.

        Returns:
            float32 [number of logit rows, vocab_size]; the next replay may overwrite it.
        """
        size = self._size_for(batch.num_sequences)
        self._attention.plan_captured(self._place(batch, size))
        self._replays[size]()
        if batch.num_samples == batch.num_sequences:
            return self._logits[: batch.num_sequences]
        return self._logits[batch.logit_rows]

    @torch.inference_mode()
    def _capture_size(self, size: int, recorder: Recorder) -> bool:
        """Record one size; False, and nothing recorded at all from now on, if it fails."""
        try:
            self._attention.plan_captured(self._place(_first(self._padding, size), size))
            self._replays[size] = recorder.record(functools.partial(self._compute, size))
        except (
            Exception
        ) as error:  # a model's own code, or memory: either way there is the step without a graph
            _log.warning("decode steps are run without CUDA graphs: %s: %s", type(error).__name__, error)
            self._replays.clear()
            self.sizes = []
        else:
            return True
        # Only here is the error gone, and with it the frames that still hold what was recorded.
        torch.cuda.empty_cache()
        return False

    def _compute(self, size: int) -> None:
        """What is recorded: all that the GPU does for a step of `size` sequences, out of and into fixed buffers."""
        logits = self._forward(self._token_ids[:size], self._positions[:size], self._rows[:size])
        self._logits[:size].copy_(logits)

    def _size_for(self, num_sequences: int) -> int:
        return next(size for size in self.sizes if size >= num_sequences)

    def _place(self, batch: Batch, size: int) -> Batch:
        """Pad a decode step to `size` sequences; what its kernels read of the rows goes into the fixed buffers."""
        padding = _first(self._padding, size - batch.num_sequences)
        token_ids, positions, slots = (
            torch.cat((of_batch, of_padding), out=buffer[:size])
            for of_batch, of_padding, buffer in (
                (batch.token_ids, padding.token_ids, self._token_ids),
                (batch.positions, padding.positions, self._positions),
                (batch.slots, padding.slots, self._slots),
            )
        )
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=_joined(batch.query_starts, padding.query_starts),
            context_lens=torch.cat((batch.context_lens, padding.context_lens)),
            page_indptr=_joined(batch.page_indptr, padding.page_indptr),
            page_indices=torch.cat((batch.page_indices, padding.page_indices)),
            last_page_len=torch.cat((batch.last_page_len, padding.last_page_len)),
            logit_rows=self._rows[:size],
            num_samples=size,
            max_query_len=1,
            page_size=batch.page_size,
        )


def make_decode_graphs(
    model: LoadedModel, backend: AttentionBackend, *, page_size: int, max_batch_size: int
) -> DecodeGraphs | None:
    """Graphs still to be captured for a model on a GPU; None where there is no GPU or the backend cannot be captured.

    Raises:
        ConfigurationError: the GPU has not even room for the buffers that their steps read and write.
    """
    if model.device.type != "cuda" or not isinstance(backend, CapturableAttention):
        return None
    try:
        return DecodeGraphs(
            functools.partial(forward_flat, model.module),
            backend,
            functools.partial(CudaRecorder, model.device),
            device=model.device,
            vocab_size=model.vocab_size,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_seq_len=model.max_seq_len,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the buffers of CUDA graphs for max_batch_size = {max_batch_size} sequences do not fit beside the weights on "
            f"{model.device}: lower max_batch_size, or set cuda_graphs to false ({error})"
        ) from error


def batch_sizes(max_batch_size: int) -> list[int]:
    """The ladder of sizes: dense where steps are short, up to 16 and then 32 apart, and max_batch_size itself."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch_size, 32)]
    return [*(size for size in ladder if size < max_batch_size), max_batch_size]


def _padding(num_sequences: int, page: int, page_size: int, device: torch.device) -> Batch:
    """A decode step of sequences that have one token each, all of them in the first slot of one page."""
    zeros = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    ones = torch.ones(num_sequences, dtype=torch.int32)
    counts = torch.arange(num_sequences + 1, dtype=torch.int32)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros + page * page_size,
        query_starts=counts,
        context_lens=ones,
        page_indptr=counts,
        page_indices=ones * page,
        last_page_len=ones,
        logit_rows=zeros,
        num_samples=num_sequences,
        max_query_len=1,
        page_size=page_size,
    )


def _first(padding: Batch, num_sequences: int) -> Batch:
    """The first sequences of a padding batch, in which a sequence has one token and one page."""
    n = num_sequences
    return replace(
        padding,
        token_ids=padding.token_ids[:n],
        positions=padding.positions[:n],
        slots=padding.slots[:n],
        query_starts=padding.query_starts[: n + 1],
        context_lens=padding.context_lens[:n],
        page_indptr=padding.page_indptr[: n + 1],
        page_indices=padding.page_indices[:n],
        last_page_len=padding.last_page_len[:n],
        logit_rows=padding.logit_rows[:n],
        num_samples=n,
    )


def _joined(starts: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """CSR starts of two lists, the second behind the first."""
    return torch.cat((starts, starts[-1] + more[1:]))
