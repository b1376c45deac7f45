"""Layers: what a decoder is made of. They know number formats only as something a weight says about itself."""
