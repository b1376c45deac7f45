"""Models: config.json to a decoder that runs. Families are data, and no family knows what its weights are stored as."""

from nybble.models.config import ModelConfig, read_config
from nybble.models.decoder import Decoder, Layer
from nybble.models.load import load_model, read_layer, share_of
from nybble.models.shapes import SHAPES, dummy_model, shape
from nybble.models.turn import turn_keys
from nybble.models.window import forward_window, hidden_window, prepare_window

__all__ = ["SHAPES", "Decoder", "Layer", "ModelConfig", "dummy_model", "forward_window", "hidden_window", "load_model",
           "prepare_window", "read_config", "read_layer", "shape", "share_of", "turn_keys"]
