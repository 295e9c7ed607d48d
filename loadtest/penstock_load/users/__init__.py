"""Locust users, load shapes and verdicts. Only the locustfile imports the modules that need locust."""
