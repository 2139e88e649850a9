"""Two servers for most tests: one without and one with recurrent layers, both with tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvs_core.streaming import history
from tests.server.running import Running, running
from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen35

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>{{ c.function.arguments|tojson }}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools|tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""A template in the manner of Qwen3.5's: it opens the thoughts, and its calls are XML."""


@pytest.fixture
def none_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations take the memory that was pinned for them along, as long ones do."""
    monkeypatch.setattr(history, "_SHORT", 1 << 30)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 attention layers; a BOS in front of every text; its template knows no tools."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", seed=2, pre="llama-bpe")


@pytest.fixture(scope="session")
def llama(llama_path: Path) -> Iterator[Running]:
    """Served with everything switched on, in a context of 1024 tokens."""
    with running("-m", llama_path, "-c", 1024, "--metrics", "--props", "--alias", "tiny") as server:
        yield server


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """6 recurrent and 2 attention layers, with a template that thinks and calls tools."""
    path = write_tiny_qwen35(tmp_path_factory.mktemp("tiny") / "qwen35.gguf", seed=1)
    with running("-m", path, "-c", 1024, "--chat-template", THINKING) as server:
        yield server
