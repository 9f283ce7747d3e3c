"""The settings of an open store, of either kind: its own, and those of its topics with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logstore.config import BrokerConfig, LogConfig, Resolved, Source, hold_back, resolve_broker, resolve_topic
from logstore.topics.registry import Topic


class StoreSettings:
    """They do not change while the store is open."""

    def _take_settings(self, settings: Mapping[str, object], source: str) -> None:
        """`settings` of the store as a whole, found at `source`. Raises UnknownConfig, InvalidConfig."""
        self._settings = settings
        self._source = source
        self._broker = resolve_broker(settings, store_file=source)
        self._configs: dict[tuple[bool, tuple[tuple[str, str], ...]], LogConfig] = {}

    @property
    def settings_file(self) -> str:
        """Where its own settings are, or would be."""
        return self._source

    def broker_settings(self) -> dict[str, Resolved]:
        """The settings of the store as a whole, each with its source."""
        return self._broker

    @property
    def broker_config(self) -> BrokerConfig:
        return BrokerConfig.from_resolved(self._broker)

    def given(self, name: str) -> Any:
        """The value of a setting of the store where somebody gave one; None where it is the default."""
        found = self._broker[name]
        return None if found.source is Source.DEFAULT else found.value

    def topic_settings(self, topic: Topic | None = None) -> dict[str, Resolved]:
        """Every topic setting with its source; without a topic, what a new one would get."""
        resolved = self.resolve(topic.configs if topic else {})
        return hold_back(resolved) if topic is not None and topic.settings_unknown else resolved

    def log_config(self, topic: Topic) -> LogConfig:
        key = (topic.settings_unknown, tuple(sorted(topic.configs.items())))
        found = self._configs.get(key)
        if found is None:
            found = self._configs[key] = LogConfig.from_resolved(self.topic_settings(topic))
        return found

    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]:
        """Every topic setting for a topic with these of its own. Raises UnknownConfig, InvalidConfig."""
        return resolve_topic(configs, broker=self._settings, store_file=self._source)
