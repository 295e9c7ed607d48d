"""The same model behind other serving frameworks, compared with Penstock."""
