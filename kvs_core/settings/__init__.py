"""Every setting, declared once, and the values that the rooms receive from them.

    setting.py · kinds.py   what a row says; how text becomes a value
    general, model, context, kv, device, sampling, template, speculative, logging, server, foreign
                            the rows, by theme; foreign: what kvs does not do
    table.py                all rows, and look-up by key, flag and YAML key
    rooms.py · sources.py · drafters.py · serving.py
                            what the rooms receive (exported here); typed.py builds it and checks rules between settings

Reading the command line, variables and files is not here: ``kvs_cli/options.py`` does it.
"""

from __future__ import annotations

from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.settings.rooms import (
    KV_TYPES,
    ChatSettings,
    ConstraintSettings,
    ContextPlan,
    ContextSettings,
    DeviceSettings,
    EngineSettings,
    InfoSettings,
    KvSettings,
    LoggingSettings,
    OutputSettings,
    PlanSettings,
    PromptSettings,
    ResidencyMode,
    RopeScaling,
    RopeSettings,
    RunSettings,
)
from kvs_core.settings.serving import AccessSettings, CacheSettings, ListenSettings, ReplySettings, ServeSettings
from kvs_core.settings.sources import HubModel, ModelSettings, SyntheticModel, UrlModel

__all__ = [
    "KV_TYPES",
    "AccessSettings",
    "CacheSettings",
    "ChatSettings",
    "ConstraintSettings",
    "ContextPlan",
    "ContextSettings",
    "DeviceSettings",
    "EngineSettings",
    "HubModel",
    "InfoSettings",
    "KvSettings",
    "ListenSettings",
    "LoggingSettings",
    "ModelSettings",
    "OutputSettings",
    "PlanSettings",
    "PromptSettings",
    "ReplySettings",
    "ResidencyMode",
    "RopeScaling",
    "RopeSettings",
    "RunSettings",
    "ServeSettings",
    "SpeculativeSettings",
    "SyntheticModel",
    "UrlModel",
]
