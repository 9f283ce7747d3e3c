"""A store in a bucket: what is decided there, as pure functions of what was just read."""
