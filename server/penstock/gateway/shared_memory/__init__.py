"""Shared-memory regions of clients: registered at the engine, checked per request, unregistered when unused."""
