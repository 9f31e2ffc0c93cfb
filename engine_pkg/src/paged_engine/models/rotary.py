"""Rotary embeddings whose frequencies change with the length of a sequence.

transformers chooses the frequencies of the types "dynamic" and "longrope" by the largest position in the whole call.
In a batch that holds many sequences, and parts of them, a neighbour would then change a sequence's result. Below a
length that is the checkpoint's own, the choice is always the same; up to there these models are served.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paged_engine.errors import ConfigurationError


def check_rotary_embeddings(model: nn.Module, max_seq_len: int) -> None:
    """Refuse a model whose rotary frequencies could depend on the other sequences of a step.

    Raises:
        ConfigurationError: names the rope type and the largest max_seq_len that can be served.
    """
    for module in model.modules():
        for rope_type, limit in _length_dependent_types(module):
            if max_seq_len > limit:
                raise ConfigurationError(
                    f"the model's rotary embedding of type '{rope_type}' changes its frequencies for all sequences of "
                    f"a step once one is longer than {limit} tokens, so results would depend on other requests: "
                    f"max_seq_len must be at most {limit} for this model, got {max_seq_len}"
                )


def _length_dependent_types(module: nn.Module) -> list[tuple[str, int]]:
    """The length-dependent rope types of one module, each with the longest sequence that does not trigger it."""
    by_layer_type = getattr(module, "rope_type", None)
    if isinstance(by_layer_type, str):
        by_layer_type = {None: by_layer_type}
    if not isinstance(by_layer_type, dict):
        return []
    parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
    limits: list[tuple[str, int]] = []
    for layer_type, rope_type in by_layer_type.items():
        own = parameters if layer_type is None else parameters[layer_type]
        if rope_type == "longrope":
            limits.append((rope_type, int(own["original_max_position_embeddings"])))
        elif "dynamic" in rope_type:
            limits.append((rope_type, int(module.original_max_seq_len)))  # type: ignore[arg-type]
    return limits
