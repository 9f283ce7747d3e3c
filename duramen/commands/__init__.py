"""The commands, one noun a module. Their bodies import what they need when they run, so that `--help` is quick."""
