"""The HTTP side of the gateway: listener, application, routes and endpoints. The only package that imports FastAPI
and Starlette.
"""
