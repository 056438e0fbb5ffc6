"""The Tokenloom server: sources → tokenizer → packing → mixing → pipeline → run → gRPC and REST."""
