"""kvs: exact inference with a KV cache larger than device memory. The map is README.md beside this file."""
