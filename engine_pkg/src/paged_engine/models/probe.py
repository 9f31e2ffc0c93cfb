"""Finds a model's attention layers by running it once over a few tokens, and refuses what would not be right.

What attention computes is read off the real calls rather than guessed from configuration fields, and then held against
the model's own code: the mask rule that it asks for at every length, and its own eager attention on random input.
A second run with the same tokens in another order shows whether tokens meet anywhere but in attention, as they do in
recurrent and convolutional layers, whose state a paged cache does not hold.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paged_engine.attention.interface import AttentionSpec
from paged_engine.attention.torch_reference import dense_attention
from paged_engine.errors import ConfigurationError
from paged_engine.models.hook import (
    ATTENTION_NAME,
    NO_ATTENTION_INTERFACE,
    PROBE_NAME,
    AttentionLayer,
    forward_flat,
)

_NUM_ROWS = 8
_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux"}
"""Arguments that an AttentionSpec expresses."""
_WITHOUT_EFFECT = {
    "position_ids",
    "position_embeddings",
    "logits_to_keep",
    "cache_position",
    "output_router_logits",
}
"""Arguments that models pass along although causal attention over known pages does not depend on them."""
_TOLERANCE = 0.05
"""Relative. Rounding in 16-bit models stays well below, what is looked for lies well above."""


@dataclass(frozen=True)
class _Call:
    """One call of the attention function during a probing run; shapes as in hook.PagedAttention."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: dict[str, Any]


def find_attention_layers(model: PreTrainedModel, max_seq_len: int) -> tuple[AttentionLayer, ...]:
    """Find the attention layers of `model` in the order in which it runs them; leaves it set up for `hook.attach`.

    Args:
        model: loaded with hook.register() done before.
        max_seq_len: the longest sequence that will be served; masks are checked up to it.

    Raises:
        ConfigurationError: the model cannot be served rightly over a paged cache; the message says why.
    """
    num_rows = min(_NUM_ROWS, max_seq_len)
    rows = torch.arange(num_rows, device=model.device)
    token_ids = rows * max(1, model.config.get_text_config().vocab_size // num_rows)
    positions = rows + max_seq_len - num_rows
    calls, logits = _run(model, PROBE_NAME, token_ids, positions)
    _check_every_layer_called(model, calls)
    layers: list[AttentionLayer] = []
    compared: set[tuple[type[nn.Module], AttentionSpec]] = set()
    for call in calls:
        spec = _derive_spec(call, max_seq_len)
        if (type(call.module), spec) not in compared:
            _check_against_code(call, spec)
            compared.add((type(call.module), spec))
        layers.append(AttentionLayer(call.module, spec))
    again, logits_again = _run(model, ATTENTION_NAME, token_ids.flip(0), positions.flip(0))
    _check_every_layer_called(model, again)
    _check_tokens_meet_in_attention_only(calls, again)
    if _differ(logits, logits_again.flip(0)):
        raise ConfigurationError(_tokens_meet("behind the last attention layer"))
    _check_positions_start_at_zero(model, token_ids)
    return tuple(layers)


def _run(
    model: PreTrainedModel, name: str, token_ids: torch.Tensor, positions: torch.Tensor | None
) -> tuple[list[_Call], torch.Tensor]:
    """Run the model with every token attending to itself alone; return the attention calls and all logits.

    Without positions the model numbers the tokens by itself, as it does for everybody who gives none.
    """
    with _recording(model, name) as calls, torch.inference_mode():
        try:
            logits = forward_flat(
                model, token_ids, positions, torch.arange(len(token_ids), device=model.device)
            )
        except Exception as error:  # whatever its own code raises, the model cannot be called as it has to be
            raise ConfigurationError(
                f"{type(model).__name__} cannot be run over a paged cache: a trial run ended with "
                f"{type(error).__name__}: {error}"
            ) from error
    return calls, logits


@contextmanager
def _recording(model: PreTrainedModel, name: str) -> Iterator[list[_Call]]:
    """Collect the calls that reach the attention function registered under `name`."""
    calls: list[_Call] = []

    def attend_to_itself(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        calls.append(_Call(module, query, key, value, mask, arguments))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    model.set_attn_implementation(name)
    modules = list(model.modules())
    for module in modules:
        module.paged_attention = attend_to_itself
    try:
        yield calls
    finally:
        for module in modules:
            del module.paged_attention


def _check_every_layer_called(model: PreTrainedModel, calls: list[_Call]) -> None:
    """Every decoder layer must have called the attention function, and each once."""
    num_layers = model.config.get_text_config().num_hidden_layers
    distinct = len({id(call.module) for call in calls})
    if not calls:
        raise ConfigurationError(f"{type(model).__name__} cannot be served: {NO_ATTENTION_INTERFACE}")
    if distinct != num_layers or len(calls) != num_layers:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be served over a paged cache: attention was called {len(calls)} times by "
            f"{distinct} modules, but the model has {num_layers} layers (it mixes attention with other kinds of "
            "layers, or shares them)"
        )


def _derive_spec(call: _Call, max_seq_len: int) -> AttentionSpec:
    """Read off a layer's call what its attention computes."""
    arguments = {
        name: value for name, value in call.arguments.items() if value is not None and value is not False
    }
    owner = type(call.module).__name__
    if call.arguments.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise ConfigurationError(f"{owner} is not causal: tokens see those that come later")
    unknown = sorted(arguments.keys() - _UNDERSTOOD - _WITHOUT_EFFECT - {"is_causal", "dropout"})
    if unknown or arguments.get("dropout", 0) != 0:
        raise ConfigurationError(
            f"{owner} passes what paged attention does not know: {', '.join(unknown) or 'dropout'}"
        )
    sinks = arguments.get("s_aux")
    if sinks is not None and sinks.shape != call.query.shape[1:2]:
        raise ConfigurationError(
            f"{owner} has attention sinks of shape {list(sinks.shape)}; known is one for each query head"
        )
    return AttentionSpec(
        num_query_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=max(call.query.shape[-1], call.value.shape[-1]),
        scale=float(arguments.get("scaling", call.query.shape[-1] ** -0.5)),
        sliding_window=_derive_window(call, max_seq_len),
        soft_cap=arguments.get("softcap"),
        has_sinks=sinks is not None,
    )


def _derive_window(call: _Call, max_seq_len: int) -> int | None:
    """Read the sliding window off the mask rule, and check that the rule is nothing else, up to max_seq_len."""
    owner = type(call.module).__name__
    rule: Callable[..., torch.Tensor] | None = getattr(call.mask, "mask_function", None)
    if rule is None:
        raise ConfigurationError(
            f"{owner} gets a mask that the model builds by itself, which cannot be checked"
        )
    keys = torch.arange(max_seq_len, device=call.query.device)
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)

    def seen_by(position: int) -> torch.Tensor:
        return rule(zero, zero, torch.full_like(zero, position), keys).expand(keys.shape)

    try:
        num_seen = int(seen_by(max_seq_len - 1).sum())
        window = None if num_seen == max_seq_len else num_seen
        edge = window or max_seq_len
        telling = {
            0,
            1,
            2,
            max_seq_len // 3,
            max_seq_len // 2,
            edge - 1,
            edge,
            edge + 1,
            2 * edge - 1,
            2 * edge,
        }
        for position in (each for each in telling if each < max_seq_len):
            if not torch.equal(seen_by(position), (keys <= position) & (keys > position - edge)):
                raise ConfigurationError(
                    f"{owner} has a mask that is neither causal nor a sliding window (seen at position {position}); "
                    f"with max_seq_len = {max_seq_len} it cannot be served rightly"
                )
    except IndexError as error:
        raise ConfigurationError(f"{owner} has a mask that depends on the input's tokens") from error
    given = call.arguments.get("sliding_window")
    if given is not None and given != window and not (window is None and given >= max_seq_len):
        raise ConfigurationError(
            f"{owner} asks for a sliding window of {given}, but its mask has {window or 'none'}: one of them is wrong"
        )
    return window


def _check_against_code(call: _Call, spec: AttentionSpec) -> None:
    """Compare `spec` with the eager attention that the module's own code would run, on random input."""
    owner = type(call.module).__name__
    if _counts_rows(type(call.module)):
        raise ConfigurationError(
            f"{owner} counts positions by itself instead of using the given ones, which a chunk of a prompt would break"
        )
    eager = vars(sys.modules[type(call.module).__module__]).get("eager_attention_forward")
    if eager is None:
        raise ConfigurationError(f"{owner} has no eager attention to compare with")
    generator = torch.Generator(device=call.query.device).manual_seed(0)
    query, key, value = (
        torch.randn(heads.shape, generator=generator, device=heads.device)
        for heads in (call.query, call.key, call.value)
    )
    num_rows = query.shape[2]
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).tril()
    if spec.sliding_window is not None:
        visible = visible.triu(1 - spec.sliding_window)
    additive = torch.zeros(visible.shape, device=query.device).masked_fill(
        ~visible, torch.finfo(torch.float32).min
    )
    with torch.inference_mode():
        try:
            theirs = eager(call.module, query, key, value, additive[None, None], **call.arguments)[0]
        except Exception as error:  # whatever its own code raises, the configuration does not fit that code
            raise ConfigurationError(
                f"{owner} cannot run its own eager attention: {type(error).__name__}: {error}"
            ) from error
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        ours = dense_attention(query, key, value, visible[None], spec, call.arguments.get("s_aux"))
    if _differ(theirs[0].flatten(1), ours[0].flatten(1)):
        raise ConfigurationError(
            f"{owner} computes something else than softmax attention with the scale, window, soft "
            "cap and sinks that it passes"
        )


def _counts_rows(attention_class: type[nn.Module]) -> bool:
    """Whether the module's code makes positions out of its number of rows."""
    try:
        return "arange(" in inspect.getsource(attention_class)
    except (OSError, TypeError):
        return False


def _check_tokens_meet_in_attention_only(calls: list[_Call], again: list[_Call]) -> None:
    """Compare a run with one whose rows were in the opposite order: nothing but the order may differ."""
    for index, (call, repeated) in enumerate(zip(calls, again, strict=True)):
        if repeated.mask is not None:
            raise ConfigurationError(
                f"{type(call.module).__name__} gets a mask that the model builds by itself"
            )
        for name in ("query", "key", "value"):
            before, after = (getattr(each, name)[0].transpose(0, 1).flatten(1) for each in (call, repeated))
            if _differ(before, after.flip(0)):
                raise ConfigurationError(_tokens_meet(f"before the attention of layer {index}"))


def _check_positions_start_at_zero(model: PreTrainedModel, token_ids: torch.Tensor) -> None:
    """The model must number tokens as the engine does; RoBERTa and its kin begin behind the padding token's id."""
    token_ids = token_ids[-1:].expand(len(token_ids))  # all alike, since those models do not count padding
    by_engine, _ = _run(model, ATTENTION_NAME, token_ids, torch.arange(len(token_ids), device=model.device))
    by_model, _ = _run(model, ATTENTION_NAME, token_ids, None)
    for ours, theirs in zip(by_engine, by_model, strict=True):
        for name in ("query", "key", "value"):
            if _differ(*(getattr(call, name)[0].transpose(0, 1).flatten(1) for call in (theirs, ours))):
                raise ConfigurationError(
                    f"{type(model).__name__} cannot be served over a paged cache: left to itself it does not number "
                    "the tokens of a sequence 0, 1, 2, …, so its positions would be wrong"
                )


def _tokens_meet(where: str) -> str:
    return (
        f"the model cannot be served over a paged cache: {where}, a token's values depend on other tokens or on its row "
        "(recurrent, convolutional or otherwise stateful layers)"
    )


def _differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether most rows of two [rows, values] tensors differ by more than rounding (a mixture of experts may round
    one row over the edge to another expert)."""
    error = (first.float() - second.float()).norm(dim=-1) / (first.float().norm(dim=-1) + 1e-6)
    return bool(error.median() > _TOLERANCE)
