"""Grafana's dashboards in Python: `python -m deploy.monitoring.build` writes deploy/monitoring/dashboards/*.json."""
