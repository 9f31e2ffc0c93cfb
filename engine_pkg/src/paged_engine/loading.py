"""Assembles an engine from a configuration: checkpoint, attention, pool, scheduler, sampler.

Everything that can be wrong with a configuration on this machine is found here, before the first request.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import GenerationConfig

from paged_engine.admission import Admission
from paged_engine.attention.interface import AttentionBackend, AttentionSetup
from paged_engine.attention.select import select_backend
from paged_engine.config import EngineConfig
from paged_engine.control_groups import usable_cores
from paged_engine.engine import Engine
from paged_engine.errors import ConfigurationError
from paged_engine.execution.cuda_graphs import make_decode_graphs
from paged_engine.execution.kv_cache import cache_dtype, create_kv_cache
from paged_engine.execution.runner import Forward, ModelRunner
from paged_engine.execution.sampling import Sampler
from paged_engine.guided import GrammarCompiler
from paged_engine.models.load import LoadedModel, load_model, resolve_checkpoint, resolve_device
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields whose default a checkpoint's generation_config may set, as in vLLM."""


def load_engine(config: EngineConfig) -> Engine:
    """Load the checkpoint and get everything ready for the first step.

    Returns:
        An engine whose `config` is the effective one: max_num_tokens, max_seq_len, num_pages and num_threads are
        what came out.

    Raises:
        ConfigurationError: the checkpoint cannot be served as configured on this machine; says why.
    """
    # In a thread that ends, and its OpenMP team with it: libgomp counts the team members of all threads, and where there
    # are more of them than cores it lets a team sleep, instead of wait, between one kernel of a step and the next.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as thread:
        engine = thread.submit(_load, config).result()
    # Torch keeps a number of its own for each thread that has begun to compute.
    torch.set_num_threads(engine.config.num_threads)
    return engine


def _load(config: EngineConfig) -> Engine:
    device = resolve_device(config.device)
    config = config.fitted_to(device.type)
    num_threads = config.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    model = load_model(config, device)
    tokenizer = Tokenizer.load(
        config.tokenizer or resolve_checkpoint(config.model, config.dtype), config.trust_remote_code
    )
    kv_dtype = cache_dtype(config, model.dtype)
    specs = tuple(layer.spec for layer in model.layers)
    setup = AttentionSetup(specs, config.page_size, device=device, dtype=model.dtype, cache_dtype=kv_dtype)
    backend = select_backend(config.attention_backend, setup)
    graphs = None
    if config.cuda_graphs:
        graphs = make_decode_graphs(
            model, backend, page_size=config.page_size, max_batch_size=config.max_batch_size
        )
    runner = ModelRunner(model, backend, graphs, _graft(config, model, backend))
    sampler = _make_sampler(model, backend)
    cache = create_kv_cache(
        config,
        backend,
        len(specs),
        kv_dtype,
        device,
        max_seq_len=model.max_seq_len,
        num_spare_pages=0 if graphs is None else 1,
        measure_step=lambda: runner.measure_step(
            config.max_num_tokens, config.max_batch_size, config.page_size
        ),
    )
    runner.capture_graphs(dummy_page=cache.num_pages)
    effective = config.model_copy(
        update={"max_seq_len": cache.max_seq_len, "num_pages": cache.num_pages, "num_threads": num_threads}
    )
    eos_token_ids = model.eos_token_ids | tokenizer.eos_token_ids
    logger.info(
        "%s in %s on %s, attention by %s, KV cache: %s",
        type(model.module).__name__, model.dtype, device, backend.name, cache,
    )  # fmt: skip
    return Engine(
        effective,
        admission=Admission(
            effective,
            tokenizer,
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            grammars=GrammarCompiler(tokenizer.hf_tokenizer, model.vocab_size, eos_token_ids),
            sampling_defaults=_sampling_defaults(model.generation_config)
            if config.use_generation_config
            else {},
        ),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        scheduler=Scheduler(
            effective, PagePool(cache.num_pages, config.page_size, config.enable_prefix_caching)
        ),
        runner=runner,
        sampler=sampler,
    )


def _graft(config: EngineConfig, model: LoadedModel, backend: AttentionBackend) -> Forward | None:
    """The model in the native kernels, as a whole or in parts; None where its modules stay.

    On a GPU they stay, and FlashInfer's fused operations compute those of them that it has.
    """
    int8 = config.weight_dtype == "int8"
    if int8 and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"weight_dtype must be auto with dtype {dtype}, got int8: int8 weights are made of bfloat16 ones, so set "
            "dtype to bfloat16"
        )
    grafted = None
    if config.graft and backend.name == "cpu":
        # Imported here since the kernels behind it are of no use on a GPU.
        from paged_engine.attention.cpu_native import CpuAttention
        from paged_engine.models.graft import graft_model

        assert isinstance(backend, CpuAttention), "the name says so"
        grafted = graft_model(model, backend, max_num_tokens=config.max_num_tokens, int8=int8)
    if config.graft and backend.name == "flashinfer":
        from paged_engine.attention.flashinfer import FlashInferAttention
        from paged_engine.models.fuse import fuse_modules

        assert isinstance(backend, FlashInferAttention), "the name says so"
        with torch.cuda.device(model.device):
            fuse_modules(model, backend.library)
    if int8 and grafted is None:
        raise ConfigurationError(
            f"weight_dtype must be auto for {type(model.module).__name__} with attention_backend {backend.name} and "
            f"graft {str(config.graft).lower()}, got int8: only the native CPU kernels compute with int8 weights, "
            "and only in linear layers that they take"
        )
    return grafted


def _make_sampler(model: LoadedModel, backend: AttentionBackend) -> Sampler:
    """One that draws with FlashInfer's kernels where its attention is used and they can be, too."""
    if backend.name == "flashinfer":
        from paged_engine.attention.flashinfer import FlashInferAttention
        from paged_engine.execution.flashinfer_draw import load_flashinfer_draw

        assert isinstance(backend, FlashInferAttention), "the name says so"
        if draw := load_flashinfer_draw(backend.library, model.vocab_size, model.device):
            return Sampler(model.vocab_size, draw)
    return Sampler(model.vocab_size)


def _sampling_defaults(generation_config: GenerationConfig) -> dict[str, Any]:
    """What the checkpoint recommends, where it differs from "no change"."""
    recommended = generation_config.to_diff_dict()
    return {key: recommended[key] for key in _DEFAULTABLE if recommended.get(key) is not None}
