"""Admission: from a request to sequences that are certain to run, or to an error that says with figures why not.

Runs outside the step loop (tokenizing a prompt of megabytes takes seconds) and holds no state, so any thread may call it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paged_engine.config import EngineConfig
from paged_engine.constraints import TokenConstraints
from paged_engine.errors import RequestError
from paged_engine.guided import GrammarCompiler
from paged_engine.request import Chat, GenerateRequest, Prompt, SamplingParams
from paged_engine.scheduling.sequence import Sequence
from paged_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedRequest:
    """A request that will fit, tokenized, as the sequences that answer it."""

    request: GenerateRequest
    sequences: tuple[Sequence, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, the same for each of the sequences."""
        return self.sequences[0].num_prompt_tokens


class Admission:
    """Decides whether a request can run at all, and fills in what it left open."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
        sampling_defaults: Mapping[str, Any],
    ) -> None:
        """
        Args:
            config: the effective configuration, its max_seq_len already capped by the checkpoint and the pool.
            tokenizer: of the checkpoint.
            vocab_size: token ids are 0 to vocab_size - 1.
            eos_token_ids: the checkpoint's end-of-sequence tokens.
            grammars: for requests that want structured outputs.
            sampling_defaults: what the checkpoint's generation_config says, for fields that a request leaves open.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._sampling_defaults = dict(sampling_defaults)

    def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Tokenize and check one request.

        Raises:
            RequestError: INVALID_ARG for a prompt that is empty, too long or not made of token ids of this checkpoint, and
                for controls that name tokens it does not have.
        """
        sampling = self._with_defaults(request.sampling)
        prompt_token_ids = self._truncated(self._prompt_token_ids(request.prompt), request)
        room = self._room_for_output(len(prompt_token_ids))
        max_tokens = min(sampling.max_tokens or self._config.default_max_tokens, room)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        constraints = TokenConstraints.resolve(
            sampling, self._vocab_size, self._eos_token_ids, self._bad_word_ids(sampling.bad_words)
        )
        wanted = sampling.structured_outputs
        sequences = tuple(
            Sequence(
                request.request_id,
                prompt_token_ids,
                sampling,
                max_num_tokens=len(prompt_token_ids) + max_tokens,
                seed=seed,
                index=index,
                constraints=constraints,
                grammar=None if wanted is None else self._grammars.start(wanted),
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for index in range(sampling.n)
        )
        return PreparedRequest(request, sequences)

    def _prompt_token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt)
        elif isinstance(prompt, Chat):
            token_ids = self._tokenizer.render_chat(prompt.messages, prompt.template_kwargs, prompt.tools)
        else:
            token_ids = self._checked_token_ids(prompt)
        if token_ids:
            return token_ids
        if self._tokenizer.bos_token_id is None:
            raise RequestError.invalid(
                "the prompt must have at least one token, and this checkpoint has no BOS to start from"
            )
        return [self._tokenizer.bos_token_id]

    def _truncated(self, token_ids: list[int], request: GenerateRequest) -> list[int]:
        """The last `truncate_prompt_tokens` tokens of a prompt, where the request wants that.

        A text or a conversation that begins with BOS keeps it, as when a tokenizer truncates: it counts as one of them.
        """
        count = request.sampling.truncate_prompt_tokens
        if count is None:
            return token_ids
        if count == -1:
            count = self._most_prompt_tokens(request.sampling)
        if len(token_ids) <= count:
            return token_ids
        if isinstance(request.prompt, (str, Chat)) and token_ids[0] == self._tokenizer.bos_token_id:
            return [token_ids[0], *token_ids[len(token_ids) - count + 1 :]]
        return token_ids[-count:]

    def _most_prompt_tokens(self, sampling: SamplingParams) -> int:
        """Prompt tokens that leave room for `max_tokens` of output; without it for the default, or half of what there is."""
        config = self._config
        num_reserved = sampling.max_tokens or min(config.default_max_tokens, config.max_seq_len // 2)
        if num_reserved >= config.max_seq_len:
            raise RequestError.invalid(
                f"truncate_prompt_tokens must be a whole number >= 1 where max_tokens = {num_reserved} leaves nothing of "
                f"max_seq_len = {config.max_seq_len} for a prompt, got -1; lower max_tokens"
            )
        fits = config.max_seq_len - max(1, num_reserved)
        return fits if config.enable_chunked_prefill else min(fits, config.max_num_tokens)

    def _checked_token_ids(self, token_ids: Iterable[int]) -> list[int]:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError.invalid(
                    f"input_ids must be token ids from 0 to {self._vocab_size - 1}, got {token_id}"
                )
        return list(token_ids)

    def _room_for_output(self, num_prompt_tokens: int) -> int:
        """Output tokens that fit behind the prompt; raises where there is no room for a single one."""
        config = self._config
        longest = config.max_seq_len - 1
        if num_prompt_tokens > longest:
            raise RequestError.invalid(
                f"prompt too long: it has {num_prompt_tokens} tokens, at most {longest} leave room for an answer "
                f"(max_seq_len {config.max_seq_len}, pool of {config.num_pages} pages of {config.page_size} tokens)"
            )
        if not config.enable_chunked_prefill and num_prompt_tokens > config.max_num_tokens:
            raise RequestError.invalid(
                f"prompt too long: it has {num_prompt_tokens} tokens, at most max_num_tokens = {config.max_num_tokens} "
                f"fit in one step and enable_chunked_prefill is off"
            )
        return config.max_seq_len - num_prompt_tokens

    def _bad_word_ids(self, bad_words: list[str]) -> list[list[int]]:
        """Each word as it is written at the beginning of a text and after a space (as in vLLM)."""
        spellings = [
            spelling
            for word in bad_words
            for spelling in ((word.lstrip(), " " + word.lstrip()) if word.strip() else (word,))
        ]
        return [token_ids for spelling in spellings if (token_ids := self._tokenizer.encode_part(spelling))]

    def _with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Fields the request did not set take the checkpoint's defaults."""
        missing = {
            key: value
            for key, value in self._sampling_defaults.items()
            if key not in sampling.model_fields_set
        }
        return sampling.model_copy(update=missing) if missing else sampling
