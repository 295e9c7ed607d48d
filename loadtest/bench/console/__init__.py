"""The console in a browser, with many streams and events."""
