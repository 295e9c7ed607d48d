"""Shared-memory regions of clients: registered at the engine, checked for each request, unregistered when unused."""
