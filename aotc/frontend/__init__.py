"""Front ends: PyTorch, Hugging Face, GGUF and ONNX sources become Graphs."""
