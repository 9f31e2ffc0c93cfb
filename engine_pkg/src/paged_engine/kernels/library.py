"""The native library as ctypes sees it: structures, functions with their exact types, and which variants run here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

VARIANTS = ("amx", "avx512", "avx2", "generic")
"""All variants, the best first."""

_SUPPORT_BITS = {"generic": 1, "avx2": 2, "avx512": 4, "amx": 8}


class LibraryUnavailable(RuntimeError):
    """The native kernels cannot be used; the message says why and what would help."""


class ElementType(IntEnum):
    """Element types by the number the library knows them by."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> ElementType:
        """The number of a torch dtype; KeyError for one the library does not take."""
        return _ELEMENT_TYPES[dtype]


_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
    torch.int8: ElementType.INT8,
}


class Activation(IntEnum):
    """What a gated layer does to its gate."""

    IDENTITY = 0
    SILU = 1
    GELU_TANH = 2


class PageLayout(ctypes.Structure):
    """Where keys and values lie; see api.h."""

    _fields_ = (
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("element_type", c_int32),
    )


class AttentionLayer(ctypes.Structure):
    """What attention computes in one layer; see api.h."""

    _fields_ = (
        ("pages", PageLayout),
        ("num_query_heads", c_int32),
        ("query_type", c_int32),
        ("sliding_window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class AttentionStep(ctypes.Structure):
    """One step's sequences; see api.h."""

    _fields_ = (
        ("num_sequences", c_int32),
        ("num_threads", c_int32),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("page_indptr", c_void_p),
        ("page_indices", c_void_p),
    )


class Heads(ctypes.Structure):
    """A [tokens, heads, head_dim] tensor whose last axis is contiguous; see api.h."""

    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class Rotary(ctypes.Structure):
    """Rotary embedding of a step's tokens; see api.h."""

    _fields_ = (
        ("rotary_dim", c_int32),
        ("interleaved", c_int32),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("positions", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("norm_epsilon", c_float),
    )


class Linear(ctypes.Structure):
    """A linear layer with packed weights; see api.h."""

    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("weight_type", c_int32),
        ("output_type", c_int32),
        ("activation", c_int32),
        ("accumulate", c_int32),
    )


class DecoderLayer(ctypes.Structure):
    """A whole decoder layer; see api.h."""

    _fields_ = (
        ("attention", AttentionLayer),
        ("rotary", Rotary),
        ("hidden_size", c_int32),
        ("norm_epsilon", c_float),
        ("input_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("qkv", Linear),
        ("attention_output", Linear),
        ("gate_and_up", Linear),
        ("down", Linear),
        ("cache", c_void_p),
    )


class DecoderStep(ctypes.Structure):
    """What a stack of decoder layers works on; see api.h."""

    _fields_ = (
        ("attention", AttentionStep),
        ("num_tokens", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("residual", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("gated", c_void_p),
        ("projected", c_void_p),
    )


_STRUCTURES = (
    PageLayout,
    AttentionLayer,
    AttentionStep,
    Heads,
    Rotary,
    Linear,
    DecoderLayer,
    DecoderStep,
)

_HEADS = POINTER(Heads)
_KERNELS: dict[str, tuple[Any, ...]] = {
    "attention": (POINTER(AttentionLayer), POINTER(AttentionStep), _HEADS, c_void_p, c_void_p, c_void_p),
    "write_pages": (POINTER(PageLayout), _HEADS, _HEADS, c_int32, c_void_p, c_int64, c_void_p, c_int32),
    "rotate_and_write": (
        POINTER(AttentionLayer), POINTER(Rotary), _HEADS, _HEADS, _HEADS, c_void_p, c_int64, c_void_p, c_int32,
    ),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32, c_int32, c_int32),
    "gate": (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32),
    "pack_linear": (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32),
    "pack_int8": (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32),
    "linear": (POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32),
    "decode": (POINTER(DecoderLayer), c_int32, POINTER(DecoderStep)),
    "argmax": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
    "log_sum_exp": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
}  # fmt: skip


class Library:
    """A loaded native library. Loading it after torch makes both share one OpenMP runtime and its threads."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            LibraryUnavailable: it cannot be opened, or was made from other structures than this file's.
        """
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryUnavailable(f"cannot open {path}: {error}") from error
        sizes = (c_int32 * len(_STRUCTURES))()
        self._declare("structure_sizes", (c_void_p,))(sizes)
        if list(sizes) != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
            raise LibraryUnavailable(f"{path} does not belong to this version of paged_engine")
        self.advise_huge_pages = self._declare("advise_huge_pages", (c_void_p, c_int64))
        """(address, bytes): asks for large memory pages; call it before the memory is first touched."""

    def variants(self) -> list[str]:
        """The variants that are in the library and that this machine can run, the best first."""
        supported = self._declare("supported_variants", (), c_int32)()
        return [name for name in VARIANTS if supported & _SUPPORT_BITS[name] and self.has(name)]

    def has(self, variant: str) -> bool:
        """Whether the compiler could make the variant."""
        return hasattr(self._library, f"attention_{variant}")

    def kernel(self, name: str, variant: str) -> Callable[..., None]:
        """A kernel of one variant, checking its arguments' types."""
        return self._declare(f"{name}_{variant}", _KERNELS[name])

    def _declare(self, symbol: str, arguments: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
        function = self._library[symbol]
        function.argtypes = arguments
        function.restype = result
        return function
