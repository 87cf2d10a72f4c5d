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
        return NaiveStreamingDetokenizer(self)
