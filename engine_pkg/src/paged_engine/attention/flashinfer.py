"""Paged attention by FlashInfer's kernels: what makes an NVIDIA GPU work near its memory bandwidth.

flashinfer is imported when a GPU is to be used, and not before. Checked against the sources of flashinfer-python 0.6 and
0.7, whose public interface it calls with arguments that mean the same in both:

- Mixed steps go through the prefill wrapper, whose causal mask is aligned to the bottom right, as chunks need it; steps
  in which every sequence computes one token go through the decode wrapper, on tensor cores for large groups and windows.
- Head sizes that the kernels do not have are padded with zeros to the next that they have: no score changes by it.
- The FA2 kernels ignore `sinks`, so that a sink is applied to their output by means of the log-sum-exp they return.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from paged_engine.attention.flashinfer_wrappers import (
    HEAD_DIMS,
    MAX_CAPTURED_BATCH_SIZE,
    LayerKind,
    PageTable,
    kernel_head_dim,
    kv_layout,
    make_captured_workspace,
    make_workspace,
)
from paged_engine.attention.interface import AttentionSetup, BackendUnsupported
from paged_engine.attention.torch_reference import round_to
from paged_engine.attention.trial import try_out
from paged_engine.errors import ConfigurationError
from paged_engine.execution.batch import Batch

_log = logging.getLogger(__name__)

_OLDEST_COMPUTE_CAPABILITY = (8, 0)
_MAX_APPENDED_VALUES = 8192
"""Key-value heads x head size that one thread block of the append kernel writes (1024 threads of 8 values)."""


def why_unsupported(setup: AttentionSetup) -> str | None:
    """Why FlashInfer cannot serve `setup` here, or None where nothing is known to speak against it."""
    if setup.device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the model is on {setup.device}"
    if setup.dtype not in (torch.float16, torch.bfloat16):
        return (
            f"it computes in float16 or bfloat16, and the model is in {_name(setup.dtype)} (parameter dtype)"
        )
    if setup.cache_dtype not in (setup.dtype, torch.float8_e4m3fn):
        return (
            f"the KV cache must be {_name(setup.dtype)} like the model or float8_e4m3fn, not "
            f"{_name(setup.cache_dtype)} (parameter kv_cache_dtype)"
        )
    for spec in setup.specs:
        if spec.head_dim > HEAD_DIMS[-1]:
            return f"the head size may be at most {HEAD_DIMS[-1]}, and the model has {spec.head_dim}"
        values = spec.num_kv_heads * kernel_head_dim(spec.head_dim)
        if values > _MAX_APPENDED_VALUES:
            return f"key-value heads x head size may be at most {_MAX_APPENDED_VALUES}, and the model has {values}"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "the package flashinfer-python is not installed (it comes with paged-engine[gpu])"
    if not re.match(r"0\.[67]\b", version):
        return f"flashinfer-python must be 0.6 or 0.7, and {version} is installed"
    capability = torch.cuda.get_device_capability(setup.device)
    if capability < _OLDEST_COMPUTE_CAPABILITY:
        return f"the GPU must have compute capability 8.0 or higher, and this one has {capability[0]}.{capability[1]}"
    return None


def load_flashinfer(setup: AttentionSetup) -> FlashInferAttention:
    """Make the backend and try every kernel that the model needs, so that nothing is left to fail at the first request.

    Raises:
        BackendUnsupported: FlashInfer is missing, cannot serve this model or GPU, does not run here (no compiler for
            kernels that were not built ahead of time), or computes something else than plain torch.
        ConfigurationError: there is no memory left for it; another backend would be short of it, too.
    """
    if reason := why_unsupported(setup):
        raise BackendUnsupported(reason)
    _log.info(
        "trying FlashInfer's kernels out; those that are not built yet are compiled now, which takes minutes"
    )
    try:
        with torch.cuda.device(setup.device):
            backend = FlashInferAttention(setup, importlib.import_module("flashinfer"))
            try_out(backend, setup)
    except BackendUnsupported:
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model leaves no room on {setup.device} for the workspace of its attention: use a GPU with more memory, "
            f"or a smaller model ({error})"
        ) from error
    except Exception as error:  # a failing import, a missing compiler, …: all mean that it cannot be used
        raise BackendUnsupported(f"FlashInfer does not run here: {type(error).__name__}: {error}") from error
    return backend


class FlashInferAttention:
    """AttentionBackend over FlashInfer.

    Pages are [keys and values, page_size, num_kv_heads, kernel head size], and in float8 [keys and values, num_kv_heads,
    page_size, kernel head size] (flashinfer_wrappers.kv_layout). Its decode steps can be captured in CUDA graphs
    (cuda_graphs.CapturableAttention).
    """

    name = "flashinfer"
    max_captured_batch_size = MAX_CAPTURED_BATCH_SIZE

    def __init__(self, setup: AttentionSetup, library: Any) -> None:
        """`library` is the module flashinfer, or what behaves like it."""
        self._setup = setup
        self.library = library
        self._layout = kv_layout(setup.cache_dtype)
        self._caches: dict[int, torch.Tensor] = {}
        kinds = {spec: replace(spec, has_sinks=False) for spec in setup.specs}
        self._workspace = make_workspace(list(kinds.values()), setup.device)
        made = {
            kind: LayerKind(library, kind, setup, self._workspace) for kind in dict.fromkeys(kinds.values())
        }
        self._kinds = list(made.values())
        self._kind_of = [made[kinds[spec]] for spec in setup.specs]
        self._slots = self._eager_slots = self._captured_slots = _Slots.allocate(0, setup.device)
        self._captured_indices = torch.empty(0, dtype=torch.int32, device=setup.device)
        # FlashInfer copies its plans to the device out of pinned buffers that the next plan overwrites.
        self._copies_done = torch.cuda.Event() if setup.device.type == "cuda" else None

    def page_shape(self, layer: int) -> tuple[int, ...]:
        """(2, page_size, num_kv_heads, kernel head size), the middle two swapped in float8."""
        spec, page_size = self._setup.specs[layer], self._setup.page_size
        inner = (spec.num_kv_heads, page_size) if self._layout == "HND" else (page_size, spec.num_kv_heads)
        return 2, *inner, kernel_head_dim(spec.head_dim)

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        """Keep `cache`, [num_pages, *page_shape(layer)]."""
        self._caches[layer] = cache

    def plan(self, batch: Batch) -> None:
        """Plan each kind of layer once."""
        if batch.num_tokens > len(self._eager_slots.pages):
            self._eager_slots = _Slots.allocate(batch.num_tokens, self._setup.device)
        self._slots = self._eager_slots.first(batch.num_tokens)
        self._slots.fill(batch.slots, batch.page_size)
        table = self._upload(batch)
        for kind in self._kinds:
            if batch.max_query_len == 1:
                kind.plan_decode(table)
            else:
                kind.plan_prefill(table)
        self._mark_copies()

    def allocate_for_capture(self, max_batch_size: int, max_num_pages: int) -> None:
        """Make the buffers that captured steps read: up to max_batch_size sequences, max_num_pages pages in all."""
        self._captured_slots = _Slots.allocate(max_batch_size, self._setup.device)
        self._captured_indices = torch.zeros(max_num_pages, dtype=torch.int32, device=self._setup.device)
        workspace = make_captured_workspace(self._setup.specs, max_batch_size, self._workspace)
        for kind in self._kinds:
            kind.start_capture(workspace)

    def plan_captured(self, batch: Batch) -> None:
        """Plan a decode step of exactly as many sequences as were captured, or are about to be.

        Everything that differs from step to step goes into buffers whose addresses a graph may keep.
        """
        self._slots = self._captured_slots.first(batch.num_sequences)
        self._slots.fill(batch.slots, batch.page_size)
        table = self._upload(batch)
        for kind in self._kinds:
            kind.plan_captured(table, self._captured_indices)
        self._mark_copies()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        cache = self._caches[layer]
        head_dim, kernel_dim = query.shape[-1], cache.shape[-1]
        slots = self._slots
        self.library.append_paged_kv_cache(
            round_to(cache.dtype, _fitted(key, kernel_dim)),
            round_to(cache.dtype, _fitted(value, kernel_dim)),
            slots.rows[:-1],
            slots.offsets,
            cache,
            slots.pages,
            slots.rows,
            slots.lengths,
            kv_layout=self._layout,
        )
        output = self._kind_of[layer].run(_fitted(query, kernel_dim).to(self._setup.dtype), cache, sinks)
        return output[..., :head_dim].to(query.dtype)

    def _upload(self, batch: Batch) -> PageTable:
        """The step's page table as `plan` wants it: small tensors pinned on the CPU, page numbers on the device."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
        pinned = [
            tensor.pin_memory() if self._copies_done is not None else tensor
            for tensor in (batch.query_starts, batch.page_indptr, batch.page_indices, batch.last_page_len)
        ]
        query_starts, indptr, indices, last_page_len = pinned
        return PageTable(
            query_starts, indptr, indices.to(self._setup.device, non_blocking=True), last_page_len
        )

    def _mark_copies(self) -> None:
        if self._copies_done is not None:
            self._copies_done.record()


@dataclass(frozen=True)
class _Slots:
    """Where the step's keys and values go, for the append kernel: each row as a sequence of its own that has one page.

    All int32 on the device. That takes nothing but slot numbers, and the same kernel serves captured steps.
    """

    rows: torch.Tensor
    """[num_rows + 1]: 0, 1, … : the row that is a "sequence", and the "page table" of one page each."""
    pages: torch.Tensor
    """[num_rows]: the page of each row."""
    offsets: torch.Tensor
    """[num_rows]: the row's place in its page."""
    lengths: torch.Tensor
    """[num_rows]: tokens in the page once the row is written."""

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> _Slots:
        """Memory for that many rows."""
        rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        return cls(rows, *(torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(3)))

    def first(self, num_rows: int) -> _Slots:
        """The first rows, in the same memory."""
        return _Slots(
            self.rows[: num_rows + 1], self.pages[:num_rows], self.offsets[:num_rows], self.lengths[:num_rows]
        )

    def fill(self, slots: torch.Tensor, page_size: int) -> None:
        """Point the rows to `slots`, int64 [num_rows]."""
        self.pages.copy_(slots // page_size)
        self.offsets.copy_(slots % page_size)
        torch.add(self.offsets, 1, out=self.lengths)


def _fitted(heads: torch.Tensor, kernel_dim: int) -> torch.Tensor:
    """[rows, heads, dim] with zeros up to kernel_dim, and the values of a head beside each other in memory."""
    if heads.shape[-1] < kernel_dim:
        return functional.pad(heads, (0, kernel_dim - heads.shape[-1]))
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
