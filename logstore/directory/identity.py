"""The store's identity as a log directory of Kafka: `logs/meta.properties`, which brokers and their tools read."""

from __future__ import annotations

import os

from logstore.directory.checkpoint import MetaProperties, read_meta_properties, write_meta_properties
from logstore.directory.finding import Finding, StoreReport
from logstore.directory.layout import Layout
from logstore.errors import CorruptCheckpoint
from logstore.files import FileSystem
from logstore.segment.names import META_PROPERTIES
from logstore.topic import new_topic_id


def make_identity(fs: FileSystem, layout: Layout) -> None:
    """A new one."""
    write_meta_properties(
        fs,
        os.path.join(layout.logs, META_PROPERTIES),
        MetaProperties(version=1, node_id=0, cluster_id=new_topic_id(), directory_id=new_topic_id()),
    )


def examine_identity(fs: FileSystem, layout: Layout) -> StoreReport:
    """Whether the file is there and can be read. Changes nothing."""
    path, report = os.path.join(layout.logs, META_PROPERTIES), StoreReport()
    try:
        found = read_meta_properties(fs, path)
        if found is None:
            report.findings.append(Finding("meta.properties is missing", file=path))
        elif not found.cluster_id:  # almost any text is a properties file
            report.findings.append(Finding("meta.properties is damaged: it has no cluster.id", file=path))
    except CorruptCheckpoint as error:
        report.findings.append(Finding(f"meta.properties is damaged: {error.what}", file=path))
    return report


def restore_identity(fs: FileSystem, layout: Layout, *, dry_run: bool = False) -> StoreReport:
    """Give a store that lost its identity a new one; no record depends on it."""
    report = examine_identity(fs, layout)
    if report.findings:
        report.actions.append(f"{'would write' if dry_run else 'wrote'} meta.properties with a new cluster id")
        if not dry_run:
            make_identity(fs, layout)
    return report
