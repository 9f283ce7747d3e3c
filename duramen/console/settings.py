"""Every setting with its value, where it comes from and its doc."""

from __future__ import annotations

from typing import Any

from duramen.commands.config import setting_document
from duramen.console.view import View


def settings(view: View, *, topic: str | None = None) -> dict[str, Any]:
    store = view.store
    found = None if topic is None else store.topic(topic)
    resolved = {**store.topic_settings(found), **store.broker_settings()}
    return {
        "topic": topic,
        "store_file": store.settings_file.encode("utf-8", "backslashreplace").decode(),
        "settings": [setting_document(each) for each in resolved.values()],
    }
