"""One tiny checkpoint loaded twice: transformers' own model as the reference, and ours over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paged_engine.models.load import LoadedModel


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded twice."""

    reference: PreTrainedModel
    """With transformers' eager attention."""
    paged: LoadedModel

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' plain forward over the whole sequence: float32 [num_tokens, vocab_size]."""
        logits: torch.Tensor = self.reference(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits
