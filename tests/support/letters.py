"""A tokenizer whose tokens are letters."""

from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer


class Letters:
    """One letter per token, so that any text can stop an answer; no stop token at first."""

    def __init__(self) -> None:
        self.eos_token_ids: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 0x100 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    @property
    def detokenizer(self) -> NaiveStreamingDetokenizer:
        return NaiveStreamingDetokenizer(_Spaced(self))


class _Spaced:
    """Answers the detokenizer's probe as a tokenizer that keeps its spaces does."""

    def __init__(self, letters: Letters) -> None:
        self.decode = lambda ids: " ," if ids == [-1] else letters.decode(ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [-1]
