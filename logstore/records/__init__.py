"""Bytes to records and back: v2 batches, legacy messages, control records, compression, and the compiled kernels."""
