"""The web console: a client of the public REST APIs, in its own process on port 8003."""
