"""The demo model that ships with kvs: a small trained ``qwen35`` with an MTP block, context 32,768 tokens.

How it was made, from which texts and how well it does: ``benchmarks/demo_model/README.md``.
"""

from pathlib import Path

DEMO_MODEL = Path(__file__).with_name("kvs-demo.gguf")
