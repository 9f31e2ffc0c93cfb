"""Runs the model over one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from paged_engine.attention.interface import AttentionBackend
from paged_engine.errors import ConfigurationError
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.execution.cuda_graphs import DecodeGraphs
from paged_engine.execution.logprobs import PendingPromptScores
from paged_engine.models.hook import attach, forward_flat
from paged_engine.models.load import LoadedModel
from paged_engine.request import SamplingParams
from paged_engine.scheduling.chunking import MAX_SCORED_POSITIONS
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(token_ids, positions, rows) -> logits of the rows, as models.hook.forward_flat."""


class ModelRunner:
    """A loaded model whose attention goes through `backend`. A model has one runner; another one takes it over."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        forward: Forward | None = None,
    ) -> None:
        """
        Args:
            model: what is run.
            backend: its attention.
            graphs: of the same model and backend; they serve the steps that they cover once they are captured.
            forward: runs the model in place of its own modules, over the step that `backend` has planned.
        """
        self._model = model
        self._forward = forward or partial(forward_flat, model.module)
        self._backend = backend
        self._graphs = graphs
        # Kernels that are not torch's go to the thread's current device, whatever their tensors' is.
        self._current_device = (
            torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
        )
        attach(model.layers, backend)

    @property
    def device(self) -> torch.device:
        """Where the model lies, and where batches must."""
        return self._model.device

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Compute a step: write its keys and values into their pages, and get the logits that are wanted.

        Returns:
            float32 [number of logit rows, vocab_size] on the model's device, in the order of batch.logit_rows.
        """
        with self._current_device:
            if self._graphs is not None and self._graphs.covers(batch):
                return self._graphs.replay(batch)
            self._backend.plan(batch)
            return self._forward(batch.token_ids, batch.positions, batch.logit_rows).float()

    def recover(self) -> None:
        """Give back the memory that a failed step has left. To be called when its error is gone, whose frames hold tensors.

        Raises:
            RuntimeError: CUDA's own; after an error of some kinds (an illegal address, say) a process can do nothing any
                more on its GPU.
        """
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
            torch.cuda.empty_cache()

    def capture_graphs(self, dummy_page: int) -> None:
        """Record the graphs, once the pages are bound; `dummy_page` is a page of the cache that no sequence is given."""
        if self._graphs is not None:
            with self._current_device:
                self._graphs.capture(dummy_page)

    def measure_step(self, max_num_tokens: int, max_batch_size: int, page_size: int) -> int:
        """Run the largest step there can be, with as many prompt positions to be scored as there may be, and return the bytes
        of GPU memory that it takes at its peak, with those that CUDA graphs are going to take.

        Every page of its sequences is page 0, so one page bound to each layer is enough.

        Raises:
            ConfigurationError: the GPU has not even room for the step itself.
        """
        device = self._model.device
        num_sequences = min(max_batch_size, max_num_tokens)
        quotient, remainder = divmod(max_num_tokens, num_sequences)
        sampling = SamplingParams(prompt_logprobs=1)
        ranges = []
        num_to_score = MAX_SCORED_POSITIONS
        for index in range(num_sequences):
            num_tokens = min(quotient + (index < remainder), self._model.max_seq_len)
            sequence = Sequence("measure", [0] * num_tokens, sampling, max_num_tokens=num_tokens)
            sequence.num_scored = max(0, num_tokens - 1 - num_to_score)
            num_to_score -= sequence.num_unscored
            sequence.page_table.extend([0] * -(-num_tokens // page_size))
            ranges.append(ScheduledRange(sequence, 0, num_tokens))
        batch = build_batch(StepPlan(tuple(ranges)), page_size, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        scoring = [item for item in ranges if item.scored]
        try:
            # The scores of one step are still there while the next one computes.
            scores = [
                PendingPromptScores(self.execute(batch)[batch.num_samples :], scoring) for _ in range(2)
            ]
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"a step of max_num_tokens = {max_num_tokens} tokens does not fit beside the weights on {device}: "
                f"lower max_num_tokens or max_batch_size ({error})"
            ) from error
        peak = torch.cuda.max_memory_allocated(device) - before
        del scores
        torch.cuda.empty_cache()
        if self._graphs is None:
            return peak
        with self._current_device:
            return peak + self._graphs.measure()
