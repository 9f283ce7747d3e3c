"""Compaction of one partition: which log, which range, the offset map, the groups, the filter, the swap. No Spark."""
