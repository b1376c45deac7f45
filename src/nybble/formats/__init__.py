"""Number formats, quantized tensors and the scheme vocabulary: what the codes mean, never how a kernel lays them out."""
