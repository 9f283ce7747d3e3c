"""The engine: Kafka's partition log, without Spark."""
