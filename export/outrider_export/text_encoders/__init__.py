"""Models that read text and write none: embeddings and rerankers, for openvino-genai's pipelines."""
