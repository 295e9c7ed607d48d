"""What watches a running Penstock: rules, dashboards, and the files that Prometheus and Grafana start with."""
