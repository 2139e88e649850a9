"""Every setting, declared once, and the values that the rooms receive from them."""

from __future__ import annotations

from kvs_core.settings.rooms import (
    KV_TYPES,
    ChatSettings,
    ContextPlan,
    ContextSettings,
    DeviceSettings,
    EngineSettings,
    KvSettings,
    LoggingSettings,
    ModelSettings,
    OutputSettings,
    PromptSettings,
    ResidencyMode,
    RopeScaling,
    RopeSettings,
    RunSettings,
)

__all__ = [
    "KV_TYPES",
    "ChatSettings",
    "ContextPlan",
    "ContextSettings",
    "DeviceSettings",
    "EngineSettings",
    "KvSettings",
    "LoggingSettings",
    "ModelSettings",
    "OutputSettings",
    "PromptSettings",
    "ResidencyMode",
    "RopeScaling",
    "RopeSettings",
    "RunSettings",
]
