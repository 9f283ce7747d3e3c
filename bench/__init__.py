"""Speed and memory of the engine, next to Apache Kafka's own log class in the same run. `python -m bench --help`."""
