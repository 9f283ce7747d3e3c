"""The console: a web page over a store, its JSON API, and the report: the same page of one moment in one file."""
