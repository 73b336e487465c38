"""Models in ONNX: their files, graphs, inputs and matrices."""
