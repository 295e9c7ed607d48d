"""Driver processes that send requests on schedule and record each one."""
