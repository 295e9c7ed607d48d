"""The web console: pages for people. A client of the public REST APIs, in its own process on port 8003."""
