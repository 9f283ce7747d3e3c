"""Compaction of a store as a job: what is due, the work itself with Spark or without, and the daemon that runs it."""

from compaction_job.job import Report, compact, explain, plan

__all__ = ["Report", "compact", "explain", "plan"]
