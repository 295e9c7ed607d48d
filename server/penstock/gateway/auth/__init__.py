"""Authentication, authorisation and quotas of clients."""
