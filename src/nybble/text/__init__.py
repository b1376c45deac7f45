"""Text in, token ids out, and back. Reads `tokenizer.json` directories and .gguf vocabularies; loads no torch."""

from nybble.text.detokenizer import Detokenizer
from nybble.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
