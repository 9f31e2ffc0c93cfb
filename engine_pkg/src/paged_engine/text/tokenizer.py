"""The checkpoint's tokenizer as the engine uses it: prompts to token ids, token ids to text, from several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged_engine.errors import ConfigurationError, RequestError
from paged_engine.text import chat
from paged_engine.text.codec import Codec, FastCodec, SlowCodec
from paged_engine.text.detokenizer import Detokenizer


class Tokenizer:
    """Prompts to token ids and back. Every method may be called from any thread.

    Args:
        tokenizer: transformers' tokenizer, which nothing else may use for encoding from now on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.hf_tokenizer = tokenizer
        """transformers' object, for libraries that read its vocabulary."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._codec: Codec = (
            FastCodec(backend) if isinstance(backend, tokenizers.Tokenizer) else SlowCodec(tokenizer)
        )
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_ids: frozenset[int] = frozenset({tokenizer.eos_token_id} - {None})
        """The tokenizer's own; a checkpoint's generation config may name more."""
        self.vocab_size: int = len(tokenizer)
        """Number of tokens, the added ones included; a model's may be larger (padding)."""
        empty = self._codec.encode("", add_special_tokens=True)
        self._adds_bos = self.bos_token_id is not None and empty[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path_or_id: str, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer of a checkpoint.

        Args:
            path_or_id: a checkpoint folder, a .gguf file or a hub id.
            trust_remote_code: lets a checkpoint bring tokenizer code of its own.

        Raises:
            ConfigurationError: there is none at that place, or it cannot be read; with the cause.
        """
        # Importing transformers takes seconds and brings torch, which the rest of this layer does without.
        from transformers import AutoTokenizer

        path = Path(path_or_id).expanduser()
        if not path.exists() and (path.suffix == ".gguf" or path.is_absolute() or path_or_id.startswith(".")):
            raise ConfigurationError(f"tokenizer: there is no file or folder '{path_or_id}'")
        place: dict[str, str] = {"pretrained_model_name_or_path": str(path) if path.exists() else path_or_id}
        if path.is_file():
            place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        try:
            return cls(AutoTokenizer.from_pretrained(**place, trust_remote_code=trust_remote_code))
        except Exception as error:
            # A damaged file shows as nearly any type of error.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigurationError(
                f"tokenizer: cannot load one from '{path_or_id}', which must be a checkpoint folder, a .gguf file or "
                f"a hub id: {reason}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, with the special tokens that the tokenizer puts around a text.

        A text that begins with the beginning-of-sequence token gets no second one.

        Raises:
            RequestError: INVALID_ARG for a text that is not valid Unicode.
        """
        token_ids = self._encode(text, add_special_tokens=True)
        if self._adds_bos and token_ids[1:2] == [self.bos_token_id]:
            return token_ids[1:]
        return token_ids

    def encode_part(self, text: str) -> list[int]:
        """The token ids of a piece of text as it may stand in the middle of another: without special tokens around it."""
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Any,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template; see `chat.render`.

        The template writes all special tokens itself, so none are added.

        Raises:
            RequestError: INVALID_ARG for messages that are malformed or that the template refuses.
        """
        prompt = chat.render(self.hf_tokenizer, messages, chat_template_kwargs or {}, tools)
        return self._encode(prompt, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some token ids, with every space as it was generated."""
        return self._codec.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """The text of one token on its own, special or not, with the space in front of it; U+FFFD for half a character."""
        return self._codec.decode_token(token_id)

    def open_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Incremental decoding for one sequence."""
        return self._codec.open_detokenizer(skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError.invalid(
                f"the prompt is not valid Unicode: half of a surrogate pair at character {error.start}"
            ) from None
        return self._codec.encode(text, add_special_tokens=add_special_tokens)
