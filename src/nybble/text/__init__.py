"""Text in, token ids out, and back. Reads `tokenizer.json` directories and .gguf vocabularies; loads no torch."""

from nybble.text.detokenizer import Detokenizer
from nybble.text.errors import read_text
from nybble.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer", "read_text"]
